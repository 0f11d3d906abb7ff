"""Seeds: a run from a seed and faults, every check on; the first violation as text to be pasted.

Owns how a case, its operations and the checks are put together. Knows no policy.

    seed, rates ──► case, operations ──► World ──► Outcome       faults on, then off until all ended
                                           │ violation? ──► fewer operations ──► Found
                                           └ every 8th seed again under other sequence ids

Same seed, same rates, same outcome, in any process. The second run must decide the same, or an
order that nobody chose, such as that of a set, has decided.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.hash import HashModel
from forge.policy import POLICIES
from forge.proposers import Proposer
from forge.seam import StepPlan
from sim.books import Books, answer
from sim.cases import Case, draw_case
from sim.checks import PlanAudit
from sim.clock import Clock, TimedModel
from sim.cost import Affine
from sim.faults import ALL, HOST_NS, STEP_NS, Op, Rates, Sabotage, draw_ops
from sim.faulty import FaultyModel, Mood, MoodyOracle, draft_model
from sim.shrink import shrunk
from sim.workload import Arrival
from sim.world import World

TWIN_EVERY = 8
"""Every so many seeds a run is done twice."""

TWIN_FIRST_ID = 1_003
"""Of the second run's sequences: in a set they have another order than 0, 1, 2, ..."""

MOST_STEPS = 20_000
"""Of any run: one that takes more does not end."""


class Violation(NamedTuple):
    """What was wrong, at which step of the engine, and when."""

    what: str
    step: int
    at_ns: int


class Outcome(NamedTuple):
    """A run: what was reached, and the first violation if there was one."""

    reached: Counter[str]
    num_steps: int
    violation: Violation | None


class Found(NamedTuple):
    """A violation of a seed, with the operations that are left of the seed's, and what they do."""

    seed: int
    violation: Violation
    ops: tuple[Op, ...]
    num_ops: int

    def __str__(self) -> str:
        """Text for people, of which the last part can be pasted."""
        what, step, at_ns = self.violation
        lines = "".join(f"    {op!r},\n" for op in self.ops)
        return (
            f"seed {self.seed}: {what}\n"
            f"first at step {step}, {at_ns / 1e6:g} ms; {len(self.ops)} of {self.num_ops} "
            f"operations are enough:\n"
            "from sim.faults import Op\n"
            "from sim.seeds import run_ops\n"
            f"print(run_ops({self.seed}, [\n{lines}]).violation)"
        )


class Report(NamedTuple):
    """Of many seeds: how many ran, what they reached, and what was found, if anything."""

    num_seeds: int
    num_steps: int
    reached: Counter[str]
    found: Found | None


class Planned:
    """A workload: arrivals that are known beforehand."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = list(arrivals)

    def arrivals(self) -> Iterator[Arrival]:
        """In order of time."""
        return iter(self._arrivals)

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """Nothing."""
        return ()


def run_seeds(
    first: int, last: int, rates: Rates = ALL, tell: Callable[[str], object] = print
) -> Report:
    """Seeds `first` to `last`, both included, up to the first violation, which is told shrunk.

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
            found = smallest(seed, ops, outcome.violation)
            tell(str(found))
            return Report(seed - first + 1, num_steps, reached, found)
    return Report(last - first + 1, num_steps, reached, None)


def smallest(seed: int, ops: Sequence[Op], violation: Violation) -> Found:
    """The operations of a violation that was seen, as few as are enough to see one again.

    One that is not seen again is told as it was: something beside the seed has decided.
    """
    if run_ops(seed, ops).violation is None:
        what = f"{violation.what} (seen once, and not again: the run does not repeat itself)"
        return Found(seed, violation._replace(what=what), tuple(ops), len(ops))
    left = shrunk(ops, lambda some: run_ops(seed, some).violation is not None)
    return Found(seed, run_ops(seed, left).violation or violation, tuple(left), len(ops))


def run_ops(seed: int, ops: Sequence[Op]) -> Outcome:
    """What comes of these operations in the seed's case. Any operations will do, in any order."""
    if not __debug__:
        raise InvalidConfig("faults", "python -O leaves out every check", "Run without -O")
    case = draw_case(seed)
    run = _Run(case, ops)
    outcome = run.outcome()
    if seed % TWIN_EVERY or outcome.violation is not None:
        return outcome
    twin = _Run(case, ops, TWIN_FIRST_ID)
    again = twin.outcome()
    for one, other in zip(run.decisions(), twin.decisions(), strict=False):
        if one != other:
            what = f"other sequence ids, other decisions: {one}, then {other}"
            return outcome._replace(violation=Violation(what, one[0], 0))
    if again.violation is not None:
        what = f"under other sequence ids: {again.violation.what}"
        return outcome._replace(violation=again.violation._replace(what=what))
    return outcome


class _Run:
    """One run, whose sequences are called `first_id` and so on."""

    def __init__(self, case: Case, ops: Sequence[Op], first_id: int = 0) -> None:
        ops = sorted(ops, key=lambda op: op.at_us)
        self._case = case
        self._plans: list[StepPlan] = []
        self._first_id = first_id
        mood = Mood(case)
        model = case.model(draft=draft_model(case, mood))
        arrivals = _arrivals(case, ops)
        self._faulty = FaultyModel(model, self._plan)
        self._timed = TimedModel(self._faulty, Clock(), Affine(STEP_NS, host_ns=HOST_NS))
        self._engine = Engine(
            self._timed,
            case.config,
            policy=POLICIES[case.policy],
            proposer=_proposer(case, model, mood, arrivals),
        )
        scheduler = self._engine.scheduler
        scheduler._next_seq_id = first_id
        self._audit = PlanAudit(scheduler)
        self._books = Books(self._engine, model, self._faulty, case.policy)
        self._world = World(self._engine, self._timed, Planned(arrivals), self._books)
        self._sabotage = Sabotage(case, self._world, self._timed, self._faulty, mood, self._books)
        for op in ops:
            if op.kind not in ("submit", "leave"):
                self._world.at(op.at_us * 1_000, _doing(self._sabotage, op))
        self._world.at(max((op.at_us for op in ops), default=0) * 1_000, self._sabotage.calm)

    def outcome(self) -> Outcome:
        """Run until all is over or something is wrong."""
        violation = None
        world, books = self._world, self._books
        try:
            while world.step():
                assert world.num_steps < MOST_STEPS, "it does not end"
            books.close()
            self._check_measures()
        except Exception as fault:  # of any kind: the engine is what is in question
            violation = Violation(_said(fault), world.num_steps, world.clock.now_ns)
        reached = self._sabotage.counted() + books.reached + books.ended
        reached[_variant(self._case)] += 1
        reached["refused"] += books.refused
        return Outcome(reached, world.num_steps, violation)

    def _check_measures(self) -> None:
        """What users would have seen adds up to the same; Little's law, to the nanosecond."""
        books, measures = self._books, self._world.measures
        assert measures.in_system == 0 and measures.refused == books.refused
        assert measures.arrived == books.came and +measures.endings == +books.ended
        assert measures.holding_ns == measures.latency.total_ns == books.sojourn_ns

    def _plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._audit(plan)

    def decisions(self) -> Iterator[tuple[int, int, object, object]]:
        """Step, blocks, copies and rows of each plan; sequences are called 0, 1, 2, ..."""
        for plan in self._plans:
            rows = [row._replace(seq_id=row.seq_id - self._first_id) for row in plan.rows]
            yield plan.step, plan.num_blocks, plan.copies, rows


def _doing(sabotage: Sabotage, op: Op) -> Callable[[], None]:
    return lambda: sabotage.happen(op)


def _arrivals(case: Case, ops: Iterable[Op]) -> list[Arrival]:
    """The requests that are submitted, each once, and when their clients leave."""
    at_ns: dict[int, int] = {}
    leaves_ns: dict[int, int] = {}
    for op in ops:
        if op.kind == "submit":
            at_ns.setdefault(op.who, op.at_us * 1_000)
        elif op.kind == "leave" and op.who in at_ns:
            leaves_ns.setdefault(op.who, op.at_us * 1_000)
    return [Arrival(at, case.request(who), leaves_ns.get(who)) for who, at in at_ns.items()]


def _proposer(
    case: Case, model: HashModel, mood: Mood, arrivals: Iterable[Arrival]
) -> Proposer | None:
    """Recorded outputs, where the case has them; None: as its configuration says."""
    if not case.recorded or case.config.speculation is None:
        return None
    longest = case.config.max_model_len
    outputs = {
        a.request.id: answer(model, case.config, a.request, 0, longest).tokens for a in arrivals
    }
    return MoodyOracle(outputs, case, mood)


def _variant(case: Case) -> str:
    """In which way the case speculates."""
    speculation = case.config.speculation
    if speculation is None:
        return "no drafts"
    method = "recorded" if case.recorded else speculation.method
    return f"{method}, {speculation.acceptance}"


def _said(fault: Exception) -> str:
    """The error, and the line it came from: an assert need not say more."""
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{frame.name}: {frame.line}"
    return f"{type(fault).__name__}: {fault}, in {where}" if str(fault) else where
