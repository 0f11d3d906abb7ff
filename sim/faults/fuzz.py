"""Fuzzing: runs drawn from seeds with faults and every check on, and the first violation shrunk.

Owns how a case, its operations and the checks are put together. Knows no policy.

    seed, rates ──► case, operations ──► World ──► FuzzOutcome   faults on, then off until all ended
                                           │ violation? ──► fewer operations ──► FailingSeed
                                           └ every 8th seed again under other sequence ids

Always true: the same seed and rates give the same outcome, in any process. The second run must
decide the same. If it does not, an order without meaning, such as that of a set, has decided.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.invariants import PlanAudit
from forge.models.hash import HashModel
from forge.policy import POLICIES
from forge.proposers import Proposer
from forge.seam import StepPlan
from forge.sim.clock import Clock, VirtualClockModel
from forge.sim.cost.simple import AffineCost
from forge.sim.faults.faulty_model import (
    DraftQuality,
    FaultyModel,
    VariableOracle,
    create_draft_model,
)
from forge.sim.faults.operations import (
    DEFAULT_RATES,
    HOST_NS,
    STEP_NS,
    FaultInjector,
    Op,
    Rates,
    draw_ops,
)
from forge.sim.faults.random_cases import RandomCase, draw_case
from forge.sim.faults.reference_oracle import ReferenceOracle, compute_reference_output
from forge.sim.faults.shrink import shrink
from forge.sim.workloads.workload import FixedArrivals, RequestArrival
from forge.sim.world import World

RENUMBER_EVERY = 8
"""Interval between the seeds that are run twice."""

RENUMBERED_FIRST_ID = 1_003
"""First sequence id of the second run: in a set, these ids have another order than 0, 1, 2, ..."""

MAX_STEPS = 20_000
"""Most steps of a run; one that takes more does not end."""


class Violation(NamedTuple):
    """A failed check: its error, the engine step, and the time."""

    what: str
    step: int
    at_ns: int


class FuzzOutcome(NamedTuple):
    """Counts of what a run reached, and its first violation if there was one."""

    reached: Counter[str]
    num_steps: int
    violation: Violation | None


class FailingSeed(NamedTuple):
    """A violation of a seed, with the fewest operations that cause it."""

    seed: int
    violation: Violation
    ops: tuple[Op, ...]
    num_ops: int

    def __str__(self) -> str:
        """Return text for people, whose last part can be pasted and run."""
        what, step, at_ns = self.violation
        lines = "".join(f"    {op!r},\n" for op in self.ops)
        return (
            f"seed {self.seed}: {what}\n"
            f"first at step {step}, {at_ns / 1e6:g} ms; {len(self.ops)} of {self.num_ops} "
            f"operations are enough:\n"
            "from forge.sim.faults.operations import Op\n"
            "from forge.sim.faults.fuzz import run_ops\n"
            f"print(run_ops({self.seed}, [\n{lines}]).violation)"
        )


class FuzzReport(NamedTuple):
    """Number of seeds that ran, what they reached, and the first failure if there was one."""

    num_seeds: int
    num_steps: int
    reached: Counter[str]
    failure: FailingSeed | None


def run_seeds(
    first: int, last: int, rates: Rates = DEFAULT_RATES, write_line: Callable[[str], object] = print
) -> FuzzReport:
    """Run seeds `first` to `last`, both included, up to the first violation, and write it shrunk.

    Raises InvalidConfig under `python -O`, which leaves out every check.
    """
    reached: Counter[str] = Counter()
    num_steps = 0
    for seed in range(first, last + 1):
        ops = draw_ops(draw_case(seed), rates)
        outcome = run_ops(seed, ops)
        reached += outcome.reached
        num_steps += outcome.num_steps
        if outcome.violation is not None:
            found = shrink_failure(seed, ops, outcome.violation)
            write_line(str(found))
            return FuzzReport(seed - first + 1, num_steps, reached, found)
    return FuzzReport(last - first + 1, num_steps, reached, None)


def shrink_failure(seed: int, ops: Sequence[Op], violation: Violation) -> FailingSeed:
    """Return a violation with the fewest of its operations that still cause one.

    A violation that does not happen again is returned with all operations: something that the seed
    does not decide has caused it.
    """
    if run_ops(seed, ops).violation is None:
        what = f"{violation.what} (seen once, and not again: the run does not repeat itself)"
        return FailingSeed(seed, violation._replace(what=what), tuple(ops), len(ops))
    shrunk = shrink(ops, lambda some: run_ops(seed, some).violation is not None)
    return FailingSeed(seed, run_ops(seed, shrunk).violation or violation, tuple(shrunk), len(ops))


def run_ops(seed: int, ops: Sequence[Op]) -> FuzzOutcome:
    """Run these operations in the seed's case. Any operations are valid, in any order."""
    if not __debug__:
        raise InvalidConfig("faults", "python -O leaves out every check", "Run without -O")
    case = draw_case(seed)
    run = _FuzzRun(case, ops)
    outcome = run.run()
    if seed % RENUMBER_EVERY or outcome.violation is not None:
        return outcome
    renumbered_run = _FuzzRun(case, ops, RENUMBERED_FIRST_ID)
    renumbered = renumbered_run.run()
    for one, other in zip(run.decisions(), renumbered_run.decisions(), strict=False):
        if one != other:
            what = f"other sequence ids, other decisions: {one}, then {other}"
            return outcome._replace(violation=Violation(what, one[0], 0))
    if renumbered.violation is not None:
        what = f"under other sequence ids: {renumbered.violation.what}"
        return outcome._replace(violation=renumbered.violation._replace(what=what))
    return outcome


class _FuzzRun:
    """A run whose sequence ids start at `first_id`."""

    def __init__(self, case: RandomCase, ops: Sequence[Op], first_id: int = 0) -> None:
        ops = sorted(ops, key=lambda op: op.at_us)
        self._case = case
        self._plans: list[StepPlan] = []
        self._first_id = first_id
        quality = DraftQuality(case)
        model = case.create_model(draft=create_draft_model(case, quality))
        arrivals = _create_arrivals(case, ops)
        self._faulty = FaultyModel(model, self._on_plan)
        self._timed = VirtualClockModel(self._faulty, Clock(), AffineCost(STEP_NS, host_ns=HOST_NS))
        self._engine = Engine(
            self._timed,
            case.config,
            policy=POLICIES[case.policy],
            proposer=_create_proposer(case, model, quality, arrivals),
        )
        scheduler = self._engine.scheduler
        scheduler.skip_seq_ids(first_id)
        self._audit = PlanAudit(scheduler)
        self._oracle = ReferenceOracle(self._engine, model, self._faulty, case.policy)
        self._world = World(self._engine, self._timed, FixedArrivals(tuple(arrivals)), self._oracle)
        self._injector = FaultInjector(
            case, self._world, self._timed, self._faulty, quality, self._oracle
        )
        for op in ops:
            if op.kind not in ("submit", "leave"):
                self._world.schedule(op.at_us * 1_000, _create_action(self._injector, op))
        self._world.schedule(
            max((op.at_us for op in ops), default=0) * 1_000, self._injector.stop_faults
        )

    def run(self) -> FuzzOutcome:
        """Run until all requests have ended, or until a check fails."""
        violation = None
        world, oracle = self._world, self._oracle
        try:
            while world.step():
                assert world.num_steps < MAX_STEPS, f"not ended in {MAX_STEPS} steps"
            oracle.close()
            self._check_metrics()
        except Exception as error:  # any error: the engine is under test
            violation = Violation(_describe_error(error), world.num_steps, world.clock.now_ns)
        reached = self._injector.count_reached() + oracle.reached + oracle.finish_counts
        reached[_describe_speculation(self._case)] += 1
        reached["refused"] += oracle.num_refused
        return FuzzOutcome(reached, world.num_steps, violation)

    def _check_metrics(self) -> None:
        """Check that the metrics equal the oracle's: Little's law, to the nanosecond."""
        oracle, measures = self._oracle, self._world.metrics
        assert measures.num_in_system == 0 and measures.num_refused == oracle.num_refused
        assert (
            measures.num_arrived == oracle.num_arrived
            and +measures.finish_counts == +oracle.finish_counts
        )
        assert measures.in_system_ns == measures.latency.total_ns == oracle.sojourn_ns

    def _on_plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._audit(plan)

    def decisions(self) -> Iterator[tuple[int, int, object, object]]:
        """Yield step, blocks, copies and rows of each plan; sequence ids start at 0."""
        for plan in self._plans:
            rows = [row._replace(seq_id=row.seq_id - self._first_id) for row in plan.rows]
            yield plan.step, plan.num_blocks, plan.copies, rows


def _create_action(injector: FaultInjector, op: Op) -> Callable[[], None]:
    return lambda: injector.apply(op)


def _create_arrivals(case: RandomCase, ops: Iterable[Op]) -> list[RequestArrival]:
    """Return the arrivals of the submitted requests, each once, with the times of disconnects."""
    at_ns: dict[int, int] = {}
    disconnects_ns: dict[int, int] = {}
    for op in ops:
        if op.kind == "submit":
            at_ns.setdefault(op.who, op.at_us * 1_000)
        elif op.kind == "leave" and op.who in at_ns:
            disconnects_ns.setdefault(op.who, op.at_us * 1_000)
    return [
        RequestArrival(at, case.request(request_id), disconnects_ns.get(request_id))
        for request_id, at in at_ns.items()
    ]


def _create_proposer(
    case: RandomCase, model: HashModel, quality: DraftQuality, arrivals: Iterable[RequestArrival]
) -> Proposer | None:
    """Return a proposer of recorded outputs, or None: the configuration decides."""
    if not case.has_recorded_drafts or case.config.speculation is None:
        return None
    max_len = case.config.max_model_len
    outputs = {
        a.request.id: compute_reference_output(model, case.config, a.request, 0, max_len).tokens
        for a in arrivals
    }
    return VariableOracle(outputs, case, quality)


def _describe_speculation(case: RandomCase) -> str:
    """Return the name of the way in which the case speculates."""
    speculation = case.config.speculation
    if speculation is None:
        return "no drafts"
    method = "recorded" if case.has_recorded_drafts else speculation.method
    return f"{method}, {speculation.acceptance}"


def _describe_error(error: Exception) -> str:
    """Return the error and its source line, which names an assert without a message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.name}: {frame.line}"
    return f"{type(error).__name__}: {error}, in {where}" if str(error) else where
