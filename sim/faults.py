"""Faults: what goes wrong in a run, when, and for whom. Operations as values, drawn from one seed.

Owns the menu, how a run's operations are drawn, and what each of them does. Knows no check. A run
is a list of operations in which any may be left out, so that a failing list can be made shorter.

    seed, rates ──► [Op(0, "submit", 3), Op(2000, "abort", 3), ...] ──► Sabotage.happen(op)
                                                                          │
                                  engine, clock, costs, models, drafts ◄──┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from forge.errors import ContextTooLong, DuplicateRequest, InvalidConfig, NeverFits
from sim.books import Books
from sim.cases import EXCESS, FAULTS, SAME_PROMPT, TIMES, Case, Dice
from sim.checks import snapshot, stages
from sim.clock import TimedModel
from sim.cost import Affine
from sim.faulty import FaultyModel, Hiccups, Mood
from sim.world import World

MENU = {
    "abort": "a request is aborted, whatever its state; sometimes twice, sometimes after its end",
    "leave": "a client goes away at some time after it asked",
    "again": "a request comes with the id of one that is live",
    "excess": "a request asks for one token more than a sequence may have",
    "burst": "up to ten requests come at once",
    "race": "two requests with the same prompt come at once",
    "shrink": "the pool has fewer blocks",
    "grow": "the pool has more blocks",
    "reset": "nothing computed so far is shared any more",
    "forward": "the model refuses a plan",
    "result": "a step has no result",
    "rows": "a row of a step fails, and its keys and values are damaged",
    "garble": "a row gives a token that is none of the vocabulary",
    "short": "a step's output lacks a row",
    "twice": "a step's output comes a second time",
    "stall": "a step takes half a minute",
    "slow": "steps take ten times as long for a while",
    "jump": "a second goes by between two steps",
    "draft-off": "the draft model fails for some of its plans",
    "draft-rows": "the draft model fails for a row",
    "draft-zero": "drafts are as wrong as can be for a while",
    "draft-full": "drafts are all right for a while",
}
"""Every fault by its name in `--faults`."""

MOST_KINDS = 4
"""Kinds of faults in one seed, at most: what all do at once hides what each does."""

DEFAULT_RATE = 0.1
ON_US = 16_000
"""Faults happen, and requests come, before this time."""

MILLISECOND_US = 1_000
STEP_NS, HOST_NS = 600_000, 800_000
"""Of device and host: much happens between the launch of a step and its commit."""
STALL_NS, JUMP_NS, SLOWER = 30_000_000_000, 1_000_000_000, 10


class Op(NamedTuple):
    """Something that happens at `at_us`, to request `who`, as much as `amount`."""

    at_us: int
    kind: str
    who: int = 0
    amount: int = 0

    def __repr__(self) -> str:
        who = f", who={self.who}" if self.who else ""
        amount = f", amount={self.amount}" if self.amount else ""
        return f"Op({self.at_us}, {self.kind!r}{who}{amount})"


Rates = Mapping[str, float]
"""Probability of each kind of fault in a millisecond, which is a step's usual time."""


def parse_faults(spec: str) -> Rates:
    """The rates that `spec` asks for: `abort=0.1,shrink=0.05`, `abort,reset`, or `all`.

    Raises InvalidConfig.
    """
    rates: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        name, _, text = part.partition("=")
        try:
            rate = float(text) if text else DEFAULT_RATE
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            raise InvalidConfig(
                "faults", f"{part[:64]!r} is no rate from 0 to 1", "Give abort=0.1, say"
            )
        if name != "all" and name not in MENU:
            known = ", ".join(("all", *MENU))
            raise InvalidConfig("faults", f"{name[:64]!r} is not known", f"Give some of: {known}")
        rates |= dict.fromkeys(MENU, rate) if name == "all" else {name: rate}
    if not rates:
        raise InvalidConfig("faults", "no fault is named", "Give all, or abort=0.1")
    return rates


ALL = parse_faults("all")


# Drawing.


def draw_ops(case: Case, rates: Rates) -> list[Op]:
    """The case's requests and what goes wrong, in order of time."""
    dice = Dice(case.seed, TIMES)
    most = dice.pick((1, ON_US // 4, ON_US // 2, ON_US))
    ops = [Op(dice.below(most), "submit", who) for who in range(case.num_requests)]
    kinds = [kind for kind in rates if rates[kind]]
    while len(kinds) > MOST_KINDS:
        del kinds[dice.below(len(kinds))]
    for kind in kinds:
        # Draws of its own for each kind: another kind's rate changes nothing here.
        own = Dice(case.seed, FAULTS, list(MENU).index(kind))
        for start_us in range(0, ON_US, MILLISECOND_US):
            if own.share() < rates[kind]:
                at_us = start_us + own.below(MILLISECOND_US)
                ops += _drawn(case, kind, at_us, own, _whom(ops, at_us, own))
    return sorted(ops, key=lambda op: op.at_us)


def _whom(ops: list[Op], at_us: int, dice: Dice) -> int:
    """Mostly one of those who came not long before; anybody now and then."""
    here = [op for op in ops if op.kind == "submit" and op.at_us <= at_us]
    here = sorted(here, key=lambda op: op.at_us)[-8:]
    if not here or dice.share() < 0.2:
        return dice.below(len(ops))
    return dice.pick(here).who


def _drawn(case: Case, kind: str, at_us: int, dice: Dice, who: int) -> list[Op]:
    """Operations of one fault, which is about request `who` where it is about one."""
    match kind:
        case "abort":
            return [Op(at_us, kind, who)] * dice.pick((1, 1, 1, 2))
        case "burst":
            first = case.num_requests + at_us % SAME_PROMPT // 10 * 10
            count = 2 + dice.below(9)
            return [Op(at_us, "submit", first + i) for i in range(count)]
        case "race":
            return [
                Op(at_us, "submit", SAME_PROMPT * (1 + i) + who % SAME_PROMPT) for i in range(2)
            ]
        case "excess":
            return [Op(at_us, kind, EXCESS + who % SAME_PROMPT)]
        case "shrink":
            return [Op(at_us, kind, amount=1 + dice.below(case.config.num_blocks))]
        case "grow":
            return [Op(at_us, kind, amount=case.config.num_blocks + dice.below(5))]
        case "slow" | "draft-zero" | "draft-full" | "draft-off":
            return [Op(at_us, kind, amount=1 + dice.below(8))]
        case "rows" | "garble" | "draft-rows":
            return [Op(at_us, kind, amount=1 + dice.below(case.config.max_num_seqs))]
    return [Op(at_us, kind, who)]


# What operations do.


class Sabotage:
    """Does operations to a world. After `calm` nothing goes wrong any more.

    reached   how often each fault had something to break, and where aborts hit
    """

    def __init__(
        self, case: Case, world: World, timed: TimedModel, faulty: FaultyModel, mood: Mood,
        books: Books,
    ) -> None:  # fmt: skip
        self.reached: Counter[str] = Counter()
        self._case = case
        self._world = world
        self._engine = world.engine
        self._timed = timed
        self._faulty = faulty
        self._mood = mood
        self._books = books
        self._stalled: dict[int, int] = {}
        self._set_pace(1)

    def happen(self, op: Op) -> None:
        """The operation has happened, at the clock's time."""
        scheduler = self._engine.scheduler
        match op.kind:
            case "abort":
                self._abort(op.who)
            case "again" | "excess":
                self._intrude(op)
            case "shrink" | "grow":
                self._resize(op)
            case "reset":
                self.reached[op.kind] += bool(scheduler.pool._hash_of)
                self._engine.reset_prefix_cache()
            case "forward" | "result" | "rows" | "garble" | "short":
                self._faulty.armed[op.kind] = op.amount or 1
            case "twice":
                self._repeat()
            case "stall":
                self._stalled[scheduler._next_step] = STALL_NS
                self.reached[op.kind] += scheduler.has_work
            case "jump":
                self._timed.clock.pass_ns(JUMP_NS)
                self.reached[op.kind] += scheduler.has_work
            case "slow":
                self._set_pace(SLOWER)
                self._later(op, lambda: self._set_pace(1))
                self.reached[op.kind] += scheduler.has_work
            case _:
                self._spoil(op)
        self._books.look()

    def calm(self) -> None:
        """Faults are off, also those that were armed."""
        self._faulty.armed.clear()
        self._mood.plans = self._mood.row = 0
        self._mood.level = self._mood.usual
        self._set_pace(1)
        self._stalled.clear()
        self._books.calm()

    def counted(self) -> Counter[str]:
        """All that was reached, also by what was armed."""
        return self.reached + self._faulty.done + self._mood.done

    def _abort(self, who: int) -> None:
        engine = self._engine
        for stage in stages(engine.scheduler, who):
            if any(delta.request_id == who for delta in engine._undelivered):
                stage = "ending"
            self.reached[f"abort {stage}"] += 1
        self._books.aborted(who)
        engine.abort(who)

    def _intrude(self, op: Op) -> None:
        """A request that must be refused, and nothing has changed."""
        engine, scheduler = self._engine, self._engine.scheduler
        live = op.who in scheduler.requests
        ending = any(delta.request_id == op.who for delta in engine._undelivered)
        if op.kind == "again" and not (live or ending):
            return
        before = snapshot(scheduler)
        try:
            engine.submit(self._case.request(op.who))
        except (ContextTooLong, DuplicateRequest, NeverFits) as refusal:
            why = type(refusal)
            if op.kind == "excess":
                assert why is ContextTooLong, f"request {op.who} was refused: {refusal}"
            else:  # one that is ending may need more blocks than there are by now
                assert why is DuplicateRequest or (ending and why is NeverFits), f"{refusal}"
        else:
            raise AssertionError(f"request {op.who} ({op.kind}) was not refused")
        assert snapshot(scheduler) == before, f"refusing request {op.who} has changed something"
        self.reached[op.kind] += 1

    def _resize(self, op: Op) -> None:
        scheduler = self._engine.scheduler
        before, preempted = snapshot(scheduler), scheduler.preemptions
        try:
            scheduler.resize(op.amount)
        except NeverFits:
            assert snapshot(scheduler) == before, "a resize that was refused has changed something"
            self.reached[f"{op.kind} refused"] += 1
        else:
            self.reached[op.kind] += 1
            self.reached["preempted by a resize"] += scheduler.preemptions - preempted

    def _repeat(self) -> None:
        """The last output once more: it must change nothing."""
        if self._faulty.last is not None:
            scheduler = self._engine.scheduler
            before = snapshot(scheduler)
            deltas = scheduler.commit(*self._faulty.last)
            assert not deltas and snapshot(scheduler) == before, "an output counts twice"
            self.reached["twice"] += 1

    def _spoil(self, op: Op) -> None:
        """Drafts."""
        mood = self._mood
        if op.kind == "draft-off":
            mood.plans = op.amount
        elif op.kind == "draft-rows":
            mood.row = op.amount
        else:
            mood.level = 0.0 if op.kind == "draft-zero" else 1.0
            self._later(op, self._cheer)
            self.reached[op.kind] += bool(self._engine.scheduler._stepwise)

    def _cheer(self) -> None:
        self._mood.level = self._mood.usual

    def _set_pace(self, factor: int) -> None:
        device_ns, host_ns = factor * STEP_NS, factor * HOST_NS
        self._timed.cost = Hiccups(Affine(device_ns, host_ns=host_ns), self._stalled)

    def _later(self, op: Op, change: Callable[[], None]) -> None:
        at_us = op.at_us + op.amount * MILLISECOND_US
        self._world.at(at_us * 1_000, change)
