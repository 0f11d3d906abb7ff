"""Faults in the simulator: nothing is lost, sent twice or endless, whatever fails."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from forge import scheduler
from forge.config import SPECULATIVE_METHODS
from forge.errors import InvalidConfig
from forge.invariants import PlanAudit
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sim.faults.fuzz import run_ops, run_seeds
from forge.sim.faults.operations import DEFAULT_RATES, FAULTS, Op, draw_ops, parse_faults
from forge.sim.faults.random_cases import draw_case

# Names in `reached`. A race counts if a sequence waits for a block that another computes.
KINDS = tuple({"race": "raced"}.get(kind, kind) for kind in FAULTS)
VARIANTS = tuple(
    f"{method}, {acceptance}"
    for method in (*SPECULATIVE_METHODS, "recorded")
    for acceptance in ("coupled", "rejection")
)
EDGES = ("prompt of whole blocks", "prompt of whole chunks", "longest sequence", "no output")
OUTCOMES = (
    *("stop", "length", "abort", "error", "refused", "shrink refused"),
    *("preempted", "preempted by a resize", "prefix hit", "forked", "raced"),
    *("all drafts accepted", "no draft accepted", "stop among drafts", "length among drafts"),
    "end inside accepted drafts",
)
STATES = (
    *("waiting", "filling", "decoding", "ending", "gone"),
    *("decoding, token in flight", "decoding, last token in flight"),
    "decoding, drafts in flight",
)


def unreached(reached: Counter[str], names: tuple[str, ...], least: int = 1) -> list[str]:
    return [name for name in names if reached[name] < least]


# Seeds.


def test_twenty_seeds_of_all_faults_violate_nothing() -> None:
    report = run_seeds(0, 19)
    assert report.failure is None and report.num_seeds == 20


@pytest.mark.long
def test_two_hundred_seeds_of_all_faults_violate_nothing() -> None:
    """Faults on, then off: every check after every step, and all live requests end in time."""
    report = run_seeds(0, 199)
    print(report.num_steps, sorted(report.reached.items()))
    assert report.failure is None and report.num_seeds == 200
    assert not unreached(report.reached, (*KINDS, *OUTCOMES, *EDGES, *VARIANTS))


@pytest.mark.long
def test_requests_are_aborted_in_every_state_of_their_lives() -> None:
    """Two plans in flight with drafts in them: this has the most states."""
    reached: Counter[str] = Counter()
    cases = [draw_case(seed) for seed in range(150)]
    for case in cases:
        if case.config.depth == 2 and case.config.speculation is not None:
            outcome = run_ops(case.seed, draw_ops(case, parse_faults("abort=0.8")))
            assert outcome.violation is None, f"seed {case.seed}"
            reached += outcome.reached
    print(sorted(reached.items()))
    assert not unreached(reached, tuple(f"abort {state}" for state in STATES))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 11_000, 2_000))
def test_ten_thousand_seeds_of_all_faults_violate_nothing(first: int) -> None:
    report = run_seeds(first, first + 1_999)
    print(report.num_steps, sorted(report.reached.items()))
    assert report.failure is None and report.num_seeds == 2_000
    assert not unreached(report.reached, (*KINDS, *OUTCOMES, *EDGES, *VARIANTS), least=20)
    aborts = tuple(f"abort {state}" for state in (*STATES, "preempted"))
    assert not unreached(report.reached, (*aborts, "preempted 8 times"))


@pytest.mark.soak
@pytest.mark.parametrize("kind", FAULTS)
def test_three_hundred_seeds_of_each_fault_alone_violate_nothing(kind: str) -> None:
    report = run_seeds(20_000, 20_299, {kind: 0.3})
    print(report.num_steps, sorted(report.reached.items()))
    assert report.failure is None


# Properties of a run.


def test_the_same_operations_give_the_same_outcome_twice_and_in_any_order() -> None:
    for seed in range(5):
        ops = draw_ops(draw_case(seed), DEFAULT_RATES)
        assert ops == draw_ops(draw_case(seed), DEFAULT_RATES)
        assert run_ops(seed, ops) == run_ops(seed, ops)


def test_another_fault_changes_nothing_of_a_faults_operations() -> None:
    """Each kind has separate draws, and so do the requests."""
    case = draw_case(3)
    alone = draw_ops(case, parse_faults("reset=0.3"))
    beside = draw_ops(case, parse_faults("jump=0.5,reset=0.3"))
    assert len(alone) < len(beside)
    assert [op for op in beside if op.kind != "jump"] == alone


def test_a_run_without_operations_is_over_at_once() -> None:
    outcome = run_ops(1, [])
    assert outcome.violation is None and outcome.num_steps == 0


def test_operations_on_unknown_requests_change_nothing() -> None:
    """Any part of a list of operations is valid: the request of a fault may be missing."""
    kinds = [kind for kind in FAULTS if kind not in ("burst", "race", "excess")]
    ops = [Op(1_000 * at, kind, who=7, amount=50) for at, kind in enumerate(kinds)]
    outcome = run_ops(1, ops)
    assert outcome.violation is None and not outcome.num_steps


# Violations that must be found.


def test_an_endless_restart_is_found_once_faults_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt longer than a step is started again in each: all invariants hold, with no end."""
    schedule = Scheduler.schedule

    def restless(self: Scheduler) -> StepPlan | None:
        for sequence in list(self._prefilling.values()):
            self._preempt(sequence, "restless")
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", restless)
    outcomes = [run_ops(seed, [Op(0, "submit")]) for seed in range(1, 16)]
    found = [outcome.violation.what for outcome in outcomes if outcome.violation is not None]
    assert found and all("requests go on too long after the faults" in what for what in found)


@pytest.mark.long
def test_a_ninth_preemption_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests in a pool that holds one: some are preempted as often as allowed."""
    seed = 60
    assert draw_case(seed).is_crowded
    ops = draw_ops(draw_case(seed), {})
    assert run_ops(seed, ops).violation is None
    assert run_ops(seed, ops).reached["preempted 8 times"] > 0
    monkeypatch.setattr(scheduler, "MAX_PREEMPTIONS", 9)
    assert run_ops(seed, ops).violation is not None


def test_a_violation_inside_a_plan_is_not_taken_for_a_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine continues after errors of its model, so an error of a check there is kept."""

    def doubtful(self: PlanAudit, plan: StepPlan) -> None:
        assert plan.step != 3, "the third plan is doubted"

    monkeypatch.setattr(PlanAudit, "__call__", doubtful)
    violation = run_ops(1, [Op(0, "submit")]).violation
    assert violation is not None and "the third plan is doubted" in violation.what


def test_without_asserts_no_seed_is_run() -> None:
    """`python -O` would check nothing and find nothing."""
    program = "from forge.sim.faults.fuzz import run_seeds; run_seeds(0, 0)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Run without -O" in done.stderr


# The `--faults` option.


def test_faults_are_parsed_by_name_and_rate() -> None:
    assert parse_faults("abort=0.25, reset") == {"abort": 0.25, "reset": 0.1}
    assert parse_faults("all=0.5,abort=0") == {**dict.fromkeys(FAULTS, 0.5), "abort": 0.0}
    assert tuple(DEFAULT_RATES) == tuple(FAULTS)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "no fault is named"),
        ("abrt=0.1", "'abrt' is not known"),
        ("abort=2", "'abort=2' is no rate"),
        ("abort=-0.1", "'abort=-0.1' is no rate"),
        ("abort=often", "'abort=often' is no rate"),
        ("abort=nan", "'abort=nan' is no rate"),
    ],
)
def test_unknown_faults_are_refused_with_the_known_ones(spec: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        parse_faults(spec)
