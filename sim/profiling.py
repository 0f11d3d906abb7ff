"""Profiling: steps of a model timed through the seam.

Owns the plans that are timed and the order in which they are. Knows no device: a step takes from
`forward` to `result`, as it does for an engine. The clock is an argument, so the same code profiles
a GPU in real time and a planted cost model in no time.

    probes    decode    rows x positions, half of them uneven          ┐ in an order drawn from the
              chunk     tokens x past                                  │ seed, at least three times
              mixed     chunks of any past beside rows of one token,   │ over
                        half of them uneven                            │
              verify    rows with drafts, with and without a draft     ┘

    launch    |--F0--||--F1--|      |--F2--|
    device           [=== 0 ===][=== 1 ===][=== 2 ===]
    waits                    |..|r0     |..|r1           step 1 took r1 - max(end of F1, r0)

That is what a TimedModel adds to its clock, read backwards. A step that the host launches kernel by
kernel is nearly done when its launch is: the launch is the host's, and the rest is the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from forge.config import EngineConfig
from forge.request import SamplingParams
from forge.seam import (
    COUPLED,
    REJECTION,
    Bind,
    Draft,
    DraftRef,
    Model,
    PendingStep,
    Row,
    StepPlan,
    TokenRef,
)
from sim.table import Work, work_of
from sim.workload import drawn

Time = Callable[[], int]
"""Nanoseconds since some moment."""

UNEVEN, ORDER, IDS, BLOCKS, PAST = 81, 82, 83, 87, 88
"""Purposes of draws."""

REPEATS, WARMUPS, STEPS = 3, 2, 5
"""Times that all probes are timed; steps before those that count; those that count."""

LONG, FEW_STEPS = 1024, 3
"""Tokens above which a step is so long that fewer of it say as much."""

WARMING = 8
"""Probes that run before any that counts: a process does some things once."""

LEVELS = 8
"""Numbers of positions at which each number of rows is timed, each twice the one before."""

UNEVEN_SHARE = 0.5
"""Of probes with rows of one token: those in which the rows are uneven."""

PADDED = (16, 32, 64, 128, 256, 512)
"""Tokens of the steps that are recorded as graphs."""

MIXED_LEVELS = 3
"""The same beside a chunk."""

GREEDY = SamplingParams(temperature=0.0)


class Probe(NamedTuple):
    """A step to be timed.

    kind      decode, chunk, mixed, verify or draft
    pasts     positions before each row of one token, or of a token and `drafts` of them
    chunks    positions before each other row, and its tokens
    plans     for the draft model, before the rows
    """

    kind: str
    pasts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()
    drafts: int = 0
    plans: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions that it computes."""
        return len(self.pasts) * (1 + self.drafts) + sum(n for _, n in self.chunks)


class Sample(NamedTuple):
    """A probe's plan, and nanoseconds: of the device and of the launch, each time it ran.

    bound    the plan before it, in which every slot was bound, and what its launch took
    """

    kind: str
    plan: StepPlan
    steps_ns: tuple[int, ...]
    launches_ns: tuple[int, ...]
    bound: tuple[Work, int] = (Work(), 0)


# What is timed.


def row_sizes(most: int) -> list[int]:
    """Numbers of rows: each that has a graph, and the first that has outgrown the one below it."""
    graphs = {1, 2, 4, *range(8, 128, 8), *range(128, most, 16), most}
    return sorted({n for size in graphs for n in (size, size + 1) if n <= most})


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens: those of graphs and the first above each, then half as many again."""
    sizes = {n for size in PADDED for n in (size, size + 1)} | {most}
    size = 2 * PADDED[-1]
    while size < most:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(n for n in sizes if n <= most)


def few(sizes: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the ends included."""
    if len(sizes) <= most:
        return list(sizes)
    return sorted({sizes[i * (len(sizes) - 1) // (most - 1)] for i in range(most)})


class Room:
    """How many positions sequences can have, on this engine's geometry."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def longest(self, rows: int, beside: int = 0) -> int:
        """Positions that each of so many sequences can have, `beside` blocks being taken."""
        config = self.config
        blocks = max(0, config.num_blocks - beside) // max(1, rows)
        return min(config.max_model_len, blocks * config.block_size)

    def holds(self, probe: Probe) -> bool:
        """The probe fits the cache, the slots and the budget."""
        config = self.config
        ends = [past + 1 + probe.drafts for past in probe.pasts]
        ends += [past + n for past, n in probe.chunks]
        blocks = sum(-(-end // config.block_size) for end in ends)
        return (
            0 < len(ends) <= config.max_num_seqs
            and max(ends) <= config.max_model_len
            and blocks <= config.num_blocks
            and probe.num_tokens <= config.max_num_batched_tokens
        )


def probes(config: EngineConfig, seed: int) -> list[Probe]:
    """All that is timed on this geometry, in no particular order."""
    room = Room(config)
    found = [*_decodes(room, seed), *_chunks(room), *_mixed(room, seed)]
    if config.speculation is not None:
        found += _verified(room, config.speculation.num_tokens, config.speculation.method)
    return [probe for probe in dict.fromkeys(found) if room.holds(probe)]


def _levels(longest: int, levels: int = LEVELS) -> list[int]:
    return sorted({max(1, (longest - 2) >> i) for i in range(levels)})


def _decodes(room: Room, seed: int) -> Iterator[Probe]:
    for rows in row_sizes(room.config.max_num_seqs):
        for level, past in enumerate(_levels(room.longest(rows))):
            yield Probe("decode", _pasts(room, rows, past, drawn(seed, UNEVEN, rows, level)))


def _pasts(room: Room, rows: int, mean: int, draw: float) -> tuple[int, ...]:
    """Rows of so many positions each, or half of the draws as many in all. Engines hardly ever have
    even rows, and a step waits for the longest."""
    even = rows == 1 or draw >= UNEVEN_SHARE
    return (mean,) * rows if even else _uneven(rows, mean, room.config.max_model_len - 2)


def _uneven(rows: int, mean: int, most: int) -> tuple[int, ...]:
    """An eighth of the rows are long, the others short; about as many positions in all."""
    long = max(1, rows // 8)
    high = min(most, 4 * mean, rows * mean // (2 * long))
    low = (rows * mean - long * high) // (rows - long) if rows > long else high
    return (high,) * long + (max(1, low),) * (rows - long)


def _chunks(room: Room) -> Iterator[Probe]:
    longest = room.longest(1)
    for tokens in token_sizes(room.config.max_num_batched_tokens):
        for past in {0, *(longest >> i for i in (1, 3, 5))}:
            yield Probe("chunk", (), ((past, tokens),))
        for parts in (2, 4, 8):
            if tokens // parts > 1:
                yield Probe("chunk", (), ((0, tokens // parts),) * parts)


def _mixed(room: Room, seed: int) -> Iterator[Probe]:
    """A prompt that begins, and one of which any share of what there is room for was computed."""
    size = room.config.block_size
    for tokens in few(token_sizes(room.config.max_num_batched_tokens), 9):
        for rows in few(row_sizes(room.config.max_num_seqs - 1 or 1), 5):
            chunk = tokens - rows
            if chunk < 2:
                continue
            for level in range(MIXED_LEVELS):
                most = room.longest(rows + 1, rows) - chunk
                part = drawn(seed, PAST, (tokens << 16) + rows, level)
                for before in sorted({0, max(0, int(part * most))}):
                    beside = -(-(before + chunk) // size) + rows
                    levels = few(_levels(room.longest(rows, beside)), MIXED_LEVELS)
                    draw = drawn(seed, UNEVEN, (tokens << 16) + rows, 2 * level + (before > 0))
                    past = levels[min(level, len(levels) - 1)]
                    yield Probe("mixed", _pasts(room, rows, past, draw), ((before, chunk),))


def _verified(room: Room, most: int, method: str) -> Iterator[Probe]:
    for rows in few(row_sizes(room.config.max_num_seqs), 8):
        for past in few(_levels(room.longest(rows) - most), 3):
            for drafts in sorted({1, (1 + most) // 2, most}):
                yield Probe("verify", (past,) * rows, (), drafts)
                if method == "draft":
                    yield Probe("draft", (past,) * rows, (), drafts, drafts)


def shuffled(found: Sequence[Probe], seed: int, repeat: int) -> list[int]:
    """Their places in the order of this repeat."""
    return sorted(range(len(found)), key=lambda i: drawn(seed, ORDER, i, repeat))


# Plans.


class Bench:
    """Plans of probes, over the first slots. Steps count down from the engine's.

    Blocks are strewn over the cache, as those of an engine that has served for a while: a GPU finds
    pages sooner where they lie side by side.
    """

    def __init__(self, model: Model, config: EngineConfig, seed: int) -> None:
        self._config = config
        self._steps, self._draft_steps = count(-(2**40)), count(-(2**40))
        most = config.max_num_batched_tokens
        width = model.vocab_size()
        self._ids = tuple(int(drawn(seed, IDS, i) * width) for i in range(most))
        self._accepts = config.speculation.acceptance if config.speculation else COUPLED
        blocks = range(config.num_blocks)
        self._strewn = tuple(sorted(blocks, key=lambda block: drawn(seed, BLOCKS, block)))

    def bound(self, probe: Probe) -> StepPlan:
        """Every slot is bound to a sequence of the probe's, with all of its blocks."""
        drafts = [self._draft_plan(self._bound_rows(probe, True))] if probe.plans else []
        return self._plan(self._bound_rows(probe, False), tuple(drafts))

    def steps(self, probe: Probe) -> Iterator[StepPlan]:
        """The probe's step, again and again: the first knows its tokens, later ones name them."""
        rows = self._rows(probe)
        before: int | None = None
        while True:
            drafts = tuple(self._draft_plan(self._draft_rows(probe)) for _ in range(probe.plans))
            named = rows
            if before is not None and not probe.drafts:
                named = [
                    row._replace(tokens=(), refs=(TokenRef(before, i),))
                    if len(row.tokens) == 1
                    else row
                    for i, row in enumerate(rows)
                ]
            plan = self._plan(named, drafts)
            before = plan.step
            yield plan

    def _blocks(self, probe: Probe) -> list[tuple[int, ...]]:
        size = self._config.block_size
        ends = [past + 1 + probe.drafts for past in probe.pasts]
        ends += [past + n for past, n in probe.chunks]
        spans, first = [], 0
        for end in ends:
            needed = -(-end // size)
            spans.append(self._strewn[first : first + needed])
            first += needed
        return spans

    def _bound_rows(self, probe: Probe, proposes: bool) -> list[Row]:
        heat = 1.0 if probe.drafts and self._accepts == REJECTION else 0.0
        params = SamplingParams(temperature=heat) if heat else GREEDY
        return [
            Row(
                slot,
                0,
                slot,
                0,
                (self._ids[slot],),
                new_blocks=blocks,
                num_samples=1,
                bind=Bind(params, slot, 1, acceptance=self._accepts, proposes=proposes),
            )
            for slot, blocks in enumerate(self._blocks(probe))
        ]

    def _rows(self, probe: Probe) -> list[Row]:
        kept = [len(blocks) for blocks in self._blocks(probe)]
        rows = []
        for slot, past in enumerate(probe.pasts):
            drafts: tuple[Draft, ...] = tuple(
                DraftRef(i, slot) if probe.plans else self._ids[i] for i in range(probe.drafts)
            )
            token = (self._ids[slot],)
            samples = 1 + probe.drafts
            rows.append(Row(slot, 0, slot, past, token, (), kept[slot], (), samples, drafts=drafts))
        for slot, (past, tokens) in enumerate(probe.chunks, len(probe.pasts)):
            rows.append(Row(slot, 0, slot, past, self._ids[:tokens], (), kept[slot], (), 1))
        return rows

    def _draft_rows(self, probe: Probe) -> list[Row]:
        return [row._replace(num_samples=1, drafts=()) for row in self._rows(probe)]

    def _draft_plan(self, rows: list[Row]) -> StepPlan:
        speculation = self._config.speculation
        assert speculation is not None, "nobody asks for drafts"
        blocks = speculation.num_blocks or self._config.num_blocks
        return StepPlan(next(self._draft_steps), tuple(rows), blocks, self._config.block_size)

    def _plan(self, rows: list[Row], drafts: tuple[StepPlan, ...]) -> StepPlan:
        config = self._config
        step = next(self._steps)
        return StepPlan(step, tuple(rows), config.num_blocks, config.block_size, drafts=drafts)


# Times.


def timed(
    model: Model, plans: Iterable[StepPlan], depth: int, time: Time
) -> list[tuple[StepPlan, int, int]]:
    """Each plan with what the device and the launch took, `depth` of them in flight."""
    found: list[tuple[StepPlan, int, int]] = []
    flying: list[tuple[PendingStep, StepPlan, int, int]] = []
    ready_ns = time()

    def settle() -> None:
        nonlocal ready_ns
        pending, plan, begun_ns, launched_ns = flying.pop(0)
        pending.result()
        now_ns = time()
        found.append((plan, now_ns - max(launched_ns, ready_ns), launched_ns - begun_ns))
        ready_ns = now_ns

    for plan in plans:
        begun_ns = time()
        pending = model.forward(plan)
        flying.append((pending, plan, begun_ns, time()))
        if len(flying) >= depth:
            settle()
    while flying:
        settle()
    return found


def profiled(
    model: Model, config: EngineConfig, time: Time, seed: int, budget_ns: int
) -> tuple[list[Sample], int]:
    """Samples of all probes, and how many probes there was no time for.

    The first repeat ends when its share of the time is spent. Since the order is drawn, what is
    left out is no corner of the grid.
    """
    every = probes(config, seed)
    bench = Bench(model, config, seed)
    for place in shuffled(every, seed, REPEATS)[:WARMING]:
        _sampled(model, config, bench, every[place], time)
    begun_ns = time()
    reached: dict[int, Sample] = {}
    for repeat in range(REPEATS):
        for place in shuffled(every, seed, repeat):
            if repeat and place not in reached:
                continue
            if not repeat and reached and (time() - begun_ns) * REPEATS > budget_ns:
                break
            before, now = reached.get(place), _sampled(model, config, bench, every[place], time)
            if before is not None:
                now = now._replace(
                    steps_ns=before.steps_ns + now.steps_ns,
                    launches_ns=before.launches_ns + now.launches_ns,
                    bound=(now.bound[0], min(before.bound[1], now.bound[1])),
                )
            reached[place] = now
    return [reached[place] for place in sorted(reached)], len(every) - len(reached)


def _sampled(model: Model, config: EngineConfig, bench: Bench, probe: Probe, time: Time) -> Sample:
    bound = bench.bound(probe)
    [(_, _, bound_ns)] = timed(model, [bound], 1, time)
    plans = bench.steps(probe)
    # Who drafts is not planned again before the commit.
    depth = 1 if probe.drafts else config.depth
    steps = STEPS if probe.num_tokens <= LONG else FEW_STEPS
    first = [next(plans) for _ in range(WARMUPS + steps + depth - 1)]
    found = timed(model, first, depth, time)[WARMUPS : WARMUPS + steps]
    steps_ns = tuple(device_ns for _, device_ns, _ in found)
    launches_ns = tuple(launch_ns for *_, launch_ns in found)
    work = work_of(bound)
    return Sample(probe.kind, found[0][0], steps_ns, launches_ns, (work, bound_ns))
