"""Faults as values: operations of a run with their times and requests, drawn from one seed.

Owns the kinds of faults, how a run's operations are drawn, and what each of them does. Knows no
check. A run is a list of operations. Any of them may be left out, so a failing list can shrink.

    seed, rates ──► [Op(0, "submit", 3), Op(2000, "abort", 3), ...] ──► FaultInjector.apply(op)
                                                                          │
                                  engine, clock, costs, models, drafts ◄──┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from forge.errors import ContextTooLong, DuplicateRequest, InvalidConfig, NeverFits
from forge.invariants import describe_states, snapshot
from forge.sim.clock import VirtualClockModel
from forge.sim.cost.simple import AffineCost
from forge.sim.faults.faulty_model import DraftQuality, FaultyModel, StallingCost
from forge.sim.faults.random_cases import (
    FAULTS_DRAW,
    FIRST_TOO_LONG_ID,
    SAME_PROMPT_OFFSET,
    TIMES_DRAW,
    RandomCase,
    SeededDraws,
)
from forge.sim.faults.reference_oracle import ReferenceOracle
from forge.sim.world import World

FAULTS = {
    "abort": "a request is aborted, whatever its state; sometimes twice, sometimes after its end",
    "leave": "a client disconnects at some time after its request",
    "again": "a request has the id of a live one",
    "excess": "a request needs one token more than a sequence may have",
    "burst": "up to ten requests come at once",
    "race": "two requests with the same prompt come at once",
    "shrink": "the pool has fewer blocks",
    "grow": "the pool has more blocks",
    "reset": "the prefix cache is reset",
    "forward": "the model refuses a plan",
    "result": "a step has no result",
    "rows": "a row of a step fails, and its keys and values are damaged",
    "garble": "a row returns a token outside of the vocabulary",
    "short": "a step's output has a row too few",
    "twice": "a step's output is committed twice",
    "stall": "a step takes half a minute",
    "slow": "steps take ten times as long for a while",
    "jump": "a second passes between two steps",
    "draft-off": "the draft model fails for some of its plans",
    "draft-rows": "the draft model fails for a row",
    "draft-zero": "all drafts are wrong for a while",
    "draft-full": "all drafts are right for a while",
}
"""Name of each fault in `--faults` -> what it does."""

MAX_KINDS = 4
"""Most kinds of faults in one seed: many kinds at once hide what each does."""

DEFAULT_RATE = 0.1
FAULT_WINDOW_US = 16_000
"""Faults and arrivals happen before this time."""

US_PER_MS = 1_000
STEP_NS, HOST_NS = 600_000, 800_000
"""Step times of device and host: much happens between the launch of a step and its commit."""
STALL_NS, JUMP_NS, SLOWDOWN = 30_000_000_000, 1_000_000_000, 10


class Op(NamedTuple):
    """Something that happens at `at_us`, to request `who`, with the size `amount`."""

    at_us: int
    kind: str
    who: int = 0
    amount: int = 0

    def __repr__(self) -> str:
        fields = [str(self.at_us), repr(self.kind)]
        if self.who:
            fields.append(f"who={self.who}")
        if self.amount:
            fields.append(f"amount={self.amount}")
        return f"Op({', '.join(fields)})"


Rates = Mapping[str, float]
"""Fault kind -> its probability per millisecond, about one step."""


def parse_faults(spec: str) -> Rates:
    """Parse the rates in `spec`: `abort=0.1,shrink=0.05`, `abort,reset`, or `all`.

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
        if name != "all" and name not in FAULTS:
            known = ", ".join(("all", *FAULTS))
            raise InvalidConfig("faults", f"{name[:64]!r} is not known", f"Give some of: {known}")
        rates |= dict.fromkeys(FAULTS, rate) if name == "all" else {name: rate}
    if not rates:
        raise InvalidConfig("faults", "no fault is named", "Give all, or abort=0.1")
    return rates


DEFAULT_RATES = parse_faults("all")


# Drawing operations.


def draw_ops(case: RandomCase, rates: Rates) -> list[Op]:
    """Draw the case's requests and faults, in order of time."""
    dice = SeededDraws(case.seed, TIMES_DRAW)
    arrival_window_us = dice.choice(
        (1, FAULT_WINDOW_US // 4, FAULT_WINDOW_US // 2, FAULT_WINDOW_US)
    )
    ops = [
        Op(dice.randrange(arrival_window_us), "submit", request_id)
        for request_id in range(case.num_requests)
    ]
    kinds = [kind for kind in rates if rates[kind]]
    while len(kinds) > MAX_KINDS:
        del kinds[dice.randrange(len(kinds))]
    for kind in kinds:
        # Each kind has separate draws: another kind's rate changes nothing here.
        kind_dice = SeededDraws(case.seed, FAULTS_DRAW, list(FAULTS).index(kind))
        for start_us in range(0, FAULT_WINDOW_US, US_PER_MS):
            if kind_dice.uniform() < rates[kind]:
                at_us = start_us + kind_dice.randrange(US_PER_MS)
                ops += _draw_fault(
                    case, kind, at_us, kind_dice, _draw_target(ops, at_us, kind_dice)
                )
    return sorted(ops, key=lambda op: op.at_us)


def _draw_target(ops: list[Op], at_us: int, dice: SeededDraws) -> int:
    """Draw a request: mostly one of the latest eight submitted, now and then any."""
    recent = [op for op in ops if op.kind == "submit" and op.at_us <= at_us]
    recent = sorted(recent, key=lambda op: op.at_us)[-8:]
    if not recent or dice.uniform() < 0.2:
        return dice.randrange(len(ops))
    return dice.choice(recent).who


def _draw_fault(
    case: RandomCase, kind: str, at_us: int, dice: SeededDraws, request_id: int
) -> list[Op]:
    """Return the operations of one fault, on request `request_id` if its kind has a request."""
    match kind:
        case "abort":
            return [Op(at_us, kind, request_id)] * dice.choice((1, 1, 1, 2))
        case "burst":
            first = case.num_requests + at_us % SAME_PROMPT_OFFSET // 10 * 10
            count = 2 + dice.randrange(9)
            return [Op(at_us, "submit", first + i) for i in range(count)]
        case "race":
            return [
                Op(at_us, "submit", SAME_PROMPT_OFFSET * (1 + i) + request_id % SAME_PROMPT_OFFSET)
                for i in range(2)
            ]
        case "excess":
            return [Op(at_us, kind, FIRST_TOO_LONG_ID + request_id % SAME_PROMPT_OFFSET)]
        case "shrink":
            return [Op(at_us, kind, amount=1 + dice.randrange(case.config.num_blocks))]
        case "grow":
            return [Op(at_us, kind, amount=case.config.num_blocks + dice.randrange(5))]
        case "slow" | "draft-zero" | "draft-full" | "draft-off":
            return [Op(at_us, kind, amount=1 + dice.randrange(8))]
        case "rows" | "garble" | "draft-rows":
            return [Op(at_us, kind, amount=1 + dice.randrange(case.config.max_num_seqs))]
    return [Op(at_us, kind, request_id)]


# Applying operations.


class FaultInjector:
    """Applies operations to a world. After `stop_faults` no fault happens any more.

    reached   how often each fault affected something, and the states that aborts hit
    """

    def __init__(
        self,
        case: RandomCase,
        world: World,
        timed: VirtualClockModel,
        faulty: FaultyModel,
        draft_quality: DraftQuality,
        oracle: ReferenceOracle,
    ) -> None:
        self.reached: Counter[str] = Counter()
        self._case = case
        self._world = world
        self._engine = world.engine
        self._timed = timed
        self._faulty = faulty
        self._draft_quality = draft_quality
        self._oracle = oracle
        self._stalls_ns: dict[int, int] = {}
        self._set_step_time(1)

    def apply(self, op: Op) -> None:
        """Apply the operation now, at the clock's time."""
        scheduler = self._engine.scheduler
        match op.kind:
            case "abort":
                self._abort(op.who)
            case "again" | "excess":
                self._submit_invalid(op)
            case "shrink" | "grow":
                self._resize(op)
            case "reset":
                self.reached[op.kind] += bool(scheduler.pool.num_published_blocks)
                self._engine.reset_prefix_cache()
            case "forward" | "result" | "rows" | "garble" | "short":
                self._faulty.pending_faults[op.kind] = op.amount or 1
            case "twice":
                self._commit_again()
            case "stall":
                self._stalls_ns[scheduler.next_step] = STALL_NS
                self.reached[op.kind] += scheduler.has_work
            case "jump":
                self._timed.clock.advance(JUMP_NS)
                self.reached[op.kind] += scheduler.has_work
            case "slow":
                self._set_step_time(SLOWDOWN)
                self._schedule_change(op, lambda: self._set_step_time(1))
                self.reached[op.kind] += scheduler.has_work
            case _:
                self._change_drafts(op)
        self._oracle.check_state()

    def stop_faults(self) -> None:
        """Stop all faults, pending ones included."""
        self._faulty.pending_faults.clear()
        self._draft_quality.num_failing_plans = self._draft_quality.failing_row = 0
        self._draft_quality.agreement = self._draft_quality.default_agreement
        self._set_step_time(1)
        self._stalls_ns.clear()
        self._oracle.start_drain()

    def count_reached(self) -> Counter[str]:
        """Return the counts of all that was reached, pending faults included."""
        return self.reached + self._faulty.num_injected + self._draft_quality.num_injected

    def _abort(self, request_id: int) -> None:
        engine = self._engine
        for state in describe_states(engine.scheduler, request_id):
            if engine.is_ending(request_id):
                state = "ending"
            self.reached[f"abort {state}"] += 1
        self._oracle.expect_abort(request_id)
        engine.abort(request_id)

    def _submit_invalid(self, op: Op) -> None:
        """Submit a request that must be refused, and check that the refusal changes nothing."""
        engine, scheduler = self._engine, self._engine.scheduler
        is_live = op.who in scheduler.requests
        is_ending = engine.is_ending(op.who)
        if op.kind == "again" and not (is_live or is_ending):
            return
        before = snapshot(scheduler)
        try:
            engine.submit(self._case.request(op.who))
        except (ContextTooLong, DuplicateRequest, NeverFits) as refusal:
            error_type = type(refusal)
            if op.kind == "excess":
                assert error_type is ContextTooLong, f"request {op.who} was refused: {refusal}"
            else:  # a request that is ending may need more blocks than the pool has by now
                assert error_type is DuplicateRequest or (is_ending and error_type is NeverFits), (
                    f"{refusal}"
                )
        else:
            raise AssertionError(f"request {op.who} ({op.kind}) was not refused")
        assert snapshot(scheduler) == before, f"the refusal of request {op.who} changed something"
        self.reached[op.kind] += 1

    def _resize(self, op: Op) -> None:
        scheduler = self._engine.scheduler
        before, preempted = snapshot(scheduler), scheduler.num_preemptions
        try:
            scheduler.resize(op.amount)
        except NeverFits:
            assert snapshot(scheduler) == before, "a refused resize changed something"
            self.reached[f"{op.kind} refused"] += 1
        else:
            self.reached[op.kind] += 1
            self.reached["preempted by a resize"] += scheduler.num_preemptions - preempted

    def _commit_again(self) -> None:
        """Commit the last output a second time: it must change nothing."""
        if self._faulty.last_result is not None:
            scheduler = self._engine.scheduler
            before = snapshot(scheduler)
            deltas = scheduler.commit(*self._faulty.last_result)
            assert not deltas and snapshot(scheduler) == before, "the second commit had an effect"
            self.reached["twice"] += 1

    def _change_drafts(self, op: Op) -> None:
        """Apply a fault of the draft model or of the draft quality."""
        quality = self._draft_quality
        if op.kind == "draft-off":
            quality.num_failing_plans = op.amount
        elif op.kind == "draft-rows":
            quality.failing_row = op.amount
        else:
            quality.agreement = 0.0 if op.kind == "draft-zero" else 1.0
            self._schedule_change(op, self._restore_draft_quality)
            self.reached[op.kind] += bool(self._engine.scheduler.gate.sequences)

    def _restore_draft_quality(self) -> None:
        self._draft_quality.agreement = self._draft_quality.default_agreement

    def _set_step_time(self, factor: int) -> None:
        device_ns, host_ns = factor * STEP_NS, factor * HOST_NS
        self._timed.cost = StallingCost(AffineCost(device_ns, host_ns=host_ns), self._stalls_ns)

    def _schedule_change(self, op: Op, change: Callable[[], None]) -> None:
        at_us = op.at_us + op.amount * US_PER_MS
        self._world.schedule(at_us * 1_000, change)
