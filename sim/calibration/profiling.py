"""Profiling: step times of a model, measured through the seam.

Owns the plans that are timed and their order. Knows no device: a step takes from `forward` to
`result`, as in an engine. The clock is an argument, so the same code profiles a GPU in real time
and a cost model in virtual time.

    decode   rows x positions, half of them uneven            ┐
    chunk    tokens x past positions                          │ in random order, by seed;
    mixed    a chunk with rows of one token, half uneven      │ at least three times
    verify   rows with drafts, with and without draft plans   ┘

    launch   |--F0--||--F1--| |--F2--|
    device   [=== 0 ===][=== 1 ===][=== 2 ===]
    waits    |..|r0 |..|r1 step 1 took r1 - max(end of F1, r0)

A VirtualClockModel adds these times to its clock. A step whose kernels the host launches one by one
is nearly done when its launch is: the launch counts for the host, the rest for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from forge.config import EngineConfig
from forge.models.capture_sizes import MIXED_CAPTURE_SIZES, decode_capture_sizes
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
from forge.sim.cost.table import StepFeatures, extract_features
from forge.sim.draws import BLOCKS_DRAW, IDS_DRAW, ORDER_DRAW, PAST_DRAW, UNEVEN_DRAW, draw_uniform

ReadClock = Callable[[], int]
"""Nanoseconds since a fixed moment."""


NUM_REPEATS, NUM_WARMUP_STEPS, NUM_STEPS = 3, 2, 5
"""Repeats of all probes; steps of a probe that are not counted; steps that are."""

LONG_STEP_TOKENS, NUM_LONG_STEPS = 1024, 3
"""Above this many tokens a step is so long that fewer repetitions suffice."""

NUM_WARMUP_PROBES = 8
"""Probes that run before the first one that counts: a process does some work only once."""

NUM_KV_LEVELS = 8
"""Numbers of positions at which each number of rows is timed, each twice the previous one."""

UNEVEN_SHARE = 0.5
"""Share of the probes with rows of one token in which the rows have different lengths."""

NUM_MIXED_KV_LEVELS = 3
"""NUM_KV_LEVELS of steps with a chunk."""

GREEDY = SamplingParams(temperature=0.0)


class Probe(NamedTuple):
    """A step to time.

    kind              decode, chunk, mixed, verify or draft
    context_lens      positions before each row of one token, or of one token and its drafts
    chunks            (positions before the row, its tokens) of each other row
    num_drafts        drafts of each row of `context_lens`
    num_draft_plans   plans of the draft model before the rows
    """

    kind: str
    context_lens: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()
    num_drafts: int = 0
    num_draft_plans: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions that the step computes."""
        return len(self.context_lens) * (1 + self.num_drafts) + sum(n for _, n in self.chunks)


class StepSample(NamedTuple):
    """The plan of a probe, with the times of the device and of the launch for each repetition.

    bind_launch   features of the plan that bound every slot, and the time of its launch
    """

    kind: str
    plan: StepPlan
    steps_ns: tuple[int, ...]
    launches_ns: tuple[int, ...]
    bind_launch: tuple[StepFeatures, int] = (StepFeatures(), 0)


# What is timed.


def row_sizes(max_rows: int) -> list[int]:
    """Return numbers of rows: each captured size, and the size after it."""
    graphs = decode_capture_sizes(max_rows)
    return sorted({n for size in graphs for n in (size, size + 1) if n <= max_rows})


def token_sizes(max_tokens: int) -> list[int]:
    """Return numbers of tokens: captured sizes and those after them, then two for each doubling."""
    sizes = {n for size in MIXED_CAPTURE_SIZES for n in (size, size + 1)} | {max_tokens}
    size = 2 * MIXED_CAPTURE_SIZES[-1]
    while size < max_tokens:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(n for n in sizes if n <= max_tokens)


def subsample(sizes: Sequence[int], max_count: int) -> list[int]:
    """Return at most this many of the sizes, the first and the last included."""
    if len(sizes) <= max_count:
        return list(sizes)
    return sorted({sizes[i * (len(sizes) - 1) // (max_count - 1)] for i in range(max_count)})


class CacheCapacity:
    """The positions that fit into the KV cache of an engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def max_len(self, num_rows: int, num_reserved: int = 0) -> int:
        """Return the positions that each of `num_rows` sequences can have.

        num_reserved   blocks that are taken already
        """
        config = self.config
        blocks = max(0, config.num_blocks - num_reserved) // max(1, num_rows)
        return min(config.max_model_len, blocks * config.block_size)

    def fits(self, probe: Probe) -> bool:
        """Return True where the probe fits the cache, the slots and the token budget."""
        config = self.config
        ends = [past + 1 + probe.num_drafts for past in probe.context_lens]
        ends += [past + n for past, n in probe.chunks]
        blocks = sum(-(-end // config.block_size) for end in ends)
        return (
            0 < len(ends) <= config.max_num_seqs
            and max(ends) <= config.max_model_len
            and blocks <= config.num_blocks
            and probe.num_tokens <= config.max_num_batched_tokens
        )


def create_probes(config: EngineConfig, seed: int) -> list[Probe]:
    """Return all probes for the geometry of this engine."""
    capacity = CacheCapacity(config)
    found = [
        *_decode_probes(capacity, seed),
        *_chunk_probes(capacity),
        *_mixed_probes(capacity, seed),
    ]
    if config.speculation is not None:
        found += _verify_probes(capacity, config.speculation.num_tokens, config.speculation.method)
    return [probe for probe in dict.fromkeys(found) if capacity.fits(probe)]


def _kv_levels(max_len: int, levels: int = NUM_KV_LEVELS) -> list[int]:
    return sorted({max(1, (max_len - 2) >> i) for i in range(levels)})


def _decode_probes(capacity: CacheCapacity, seed: int) -> Iterator[Probe]:
    for rows in row_sizes(capacity.config.max_num_seqs):
        for level, past in enumerate(_kv_levels(capacity.max_len(rows))):
            yield Probe(
                "decode",
                _draw_context_lens(
                    capacity, rows, past, draw_uniform(seed, UNEVEN_DRAW, rows, level)
                ),
            )


def _draw_context_lens(
    capacity: CacheCapacity, num_rows: int, mean_len: int, draw: float
) -> tuple[int, ...]:
    """Return the positions of each row: equal, or uneven with about the same sum.

    `draw` decides. Rows of an engine are rarely equal, and a step waits for the longest.
    """
    even = num_rows == 1 or draw >= UNEVEN_SHARE
    return (
        (mean_len,) * num_rows
        if even
        else _uneven_lens(num_rows, mean_len, capacity.config.max_model_len - 2)
    )


def _uneven_lens(rows: int, mean: int, max_len: int) -> tuple[int, ...]:
    """Return lengths with about this mean: an eighth of the rows long, the others short."""
    long = max(1, rows // 8)
    high = min(max_len, 4 * mean, rows * mean // (2 * long))
    low = (rows * mean - long * high) // (rows - long) if rows > long else high
    return (high,) * long + (max(1, low),) * (rows - long)


def _chunk_probes(capacity: CacheCapacity) -> Iterator[Probe]:
    max_len = capacity.max_len(1)
    for tokens in token_sizes(capacity.config.max_num_batched_tokens):
        for past in {0, *(max_len >> i for i in (1, 3, 5))}:
            yield Probe("chunk", (), ((past, tokens),))
        for parts in (2, 4, 8):
            if tokens // parts > 1:
                yield Probe("chunk", (), ((0, tokens // parts),) * parts)


def _mixed_probes(capacity: CacheCapacity, seed: int) -> Iterator[Probe]:
    """Yield steps with a chunk that starts a prompt, and with one that continues it."""
    size = capacity.config.block_size
    for tokens in subsample(token_sizes(capacity.config.max_num_batched_tokens), 9):
        for rows in subsample(row_sizes(capacity.config.max_num_seqs - 1 or 1), 5):
            chunk = tokens - rows
            if chunk < 2:
                continue
            for level in range(NUM_MIXED_KV_LEVELS):
                max_start = capacity.max_len(rows + 1, rows) - chunk
                part = draw_uniform(seed, PAST_DRAW, (tokens << 16) + rows, level)
                for chunk_start in sorted({0, max(0, int(part * max_start))}):
                    num_reserved = -(-(chunk_start + chunk) // size) + rows
                    levels = subsample(
                        _kv_levels(capacity.max_len(rows, num_reserved)), NUM_MIXED_KV_LEVELS
                    )
                    draw = draw_uniform(
                        seed, UNEVEN_DRAW, (tokens << 16) + rows, 2 * level + (chunk_start > 0)
                    )
                    past = levels[min(level, len(levels) - 1)]
                    yield Probe(
                        "mixed",
                        _draw_context_lens(capacity, rows, past, draw),
                        ((chunk_start, chunk),),
                    )


def _verify_probes(capacity: CacheCapacity, max_drafts: int, method: str) -> Iterator[Probe]:
    for rows in subsample(row_sizes(capacity.config.max_num_seqs), 8):
        for past in subsample(_kv_levels(capacity.max_len(rows) - max_drafts), 3):
            for drafts in sorted({1, (1 + max_drafts) // 2, max_drafts}):
                yield Probe("verify", (past,) * rows, (), drafts)
                if method == "draft":
                    yield Probe("draft", (past,) * rows, (), drafts, drafts)


def shuffle_order(probes: Sequence[Probe], seed: int, repeat: int) -> list[int]:
    """Return the indices of the probes in the order of this repeat."""
    return sorted(range(len(probes)), key=lambda i: draw_uniform(seed, ORDER_DRAW, i, repeat))


# Plans.


class ProbePlanner:
    """Creates the plans of probes over the first slots. Step numbers are below those of an engine.

    Blocks are scattered over the cache, as in an engine that has served for a while: a GPU reads
    contiguous blocks faster.
    """

    def __init__(self, model: Model, config: EngineConfig, seed: int) -> None:
        self._config = config
        self._steps, self._draft_steps = count(-(2**40)), count(-(2**40))
        max_tokens = config.max_num_batched_tokens
        width = model.vocab_size()
        self._ids = tuple(int(draw_uniform(seed, IDS_DRAW, i) * width) for i in range(max_tokens))
        self._acceptance = config.speculation.acceptance if config.speculation else COUPLED
        blocks = range(config.num_blocks)
        self._shuffled_blocks = tuple(
            sorted(blocks, key=lambda block: draw_uniform(seed, BLOCKS_DRAW, block))
        )

    def create_bind_plan(self, probe: Probe) -> StepPlan:
        """Return a plan that binds a sequence with all of its blocks to every slot of the probe."""
        drafts = [self._draft_plan(self._bind_rows(probe, True))] if probe.num_draft_plans else []
        return self._plan(self._bind_rows(probe, False), tuple(drafts))

    def create_step_plans(self, probe: Probe) -> Iterator[StepPlan]:
        """Yield the step of the probe repeatedly.

        The first names its tokens, later ones refer to them.
        """
        rows = self._rows(probe)
        previous_step: int | None = None
        while True:
            drafts = tuple(
                self._draft_plan(self._draft_rows(probe)) for _ in range(probe.num_draft_plans)
            )
            plan_rows = rows
            if previous_step is not None and not probe.num_drafts:
                plan_rows = [
                    row._replace(tokens=(), refs=(TokenRef(previous_step, i),))
                    if len(row.tokens) == 1
                    else row
                    for i, row in enumerate(rows)
                ]
            plan = self._plan(plan_rows, drafts)
            previous_step = plan.step
            yield plan

    def _blocks(self, probe: Probe) -> list[tuple[int, ...]]:
        size = self._config.block_size
        ends = [past + 1 + probe.num_drafts for past in probe.context_lens]
        ends += [past + n for past, n in probe.chunks]
        spans, first = [], 0
        for end in ends:
            needed = -(-end // size)
            spans.append(self._shuffled_blocks[first : first + needed])
            first += needed
        return spans

    def _bind_rows(self, probe: Probe, proposes: bool) -> list[Row]:
        temperature = 1.0 if probe.num_drafts and self._acceptance == REJECTION else 0.0
        params = SamplingParams(temperature=temperature) if temperature else GREEDY
        return [
            Row(
                slot,
                0,
                slot,
                0,
                (self._ids[slot],),
                new_blocks=blocks,
                num_samples=1,
                bind=Bind(params, slot, 1, acceptance=self._acceptance, proposes=proposes),
            )
            for slot, blocks in enumerate(self._blocks(probe))
        ]

    def _rows(self, probe: Probe) -> list[Row]:
        num_blocks = [len(blocks) for blocks in self._blocks(probe)]
        rows = []
        for slot, past in enumerate(probe.context_lens):
            drafts: tuple[Draft, ...] = tuple(
                DraftRef(i, slot) if probe.num_draft_plans else self._ids[i]
                for i in range(probe.num_drafts)
            )
            token = (self._ids[slot],)
            samples = 1 + probe.num_drafts
            rows.append(
                Row(slot, 0, slot, past, token, (), num_blocks[slot], (), samples, drafts=drafts)
            )
        for slot, (past, tokens) in enumerate(probe.chunks, len(probe.context_lens)):
            rows.append(Row(slot, 0, slot, past, self._ids[:tokens], (), num_blocks[slot], (), 1))
        return rows

    def _draft_rows(self, probe: Probe) -> list[Row]:
        return [row._replace(num_samples=1, drafts=()) for row in self._rows(probe)]

    def _draft_plan(self, rows: list[Row]) -> StepPlan:
        speculation = self._config.speculation
        assert speculation is not None, "a draft plan needs a draft model"
        blocks = speculation.num_blocks or self._config.num_blocks
        return StepPlan(next(self._draft_steps), tuple(rows), blocks, self._config.block_size)

    def _plan(self, rows: list[Row], drafts: tuple[StepPlan, ...]) -> StepPlan:
        config = self._config
        step = next(self._steps)
        return StepPlan(step, tuple(rows), config.num_blocks, config.block_size, drafts=drafts)


# Times.


def time_plans(
    model: Model, plans: Iterable[StepPlan], depth: int, clock: ReadClock
) -> list[tuple[StepPlan, int, int]]:
    """Return each plan with the time of the device and of the launch, with `depth` in flight."""
    found: list[tuple[StepPlan, int, int]] = []
    in_flight: list[tuple[PendingStep, StepPlan, int, int]] = []
    ready_ns = clock()

    def finish_oldest() -> None:
        nonlocal ready_ns
        pending, plan, begun_ns, launched_ns = in_flight.pop(0)
        pending.result()
        now_ns = clock()
        found.append((plan, now_ns - max(launched_ns, ready_ns), launched_ns - begun_ns))
        ready_ns = now_ns

    for plan in plans:
        begun_ns = clock()
        pending = model.forward(plan)
        in_flight.append((pending, plan, begun_ns, clock()))
        if len(in_flight) >= depth:
            finish_oldest()
    while in_flight:
        finish_oldest()
    return found


def profile(
    model: Model, config: EngineConfig, clock: ReadClock, seed: int, budget_ns: int
) -> tuple[list[StepSample], int]:
    """Return samples of all probes, and the number of probes that were left out for lack of time.

    The first repeat ends when its share of the budget is spent. The order is random, so the probes
    that are left out are spread over the grid.
    """
    probes = create_probes(config, seed)
    planner = ProbePlanner(model, config, seed)
    for index in shuffle_order(probes, seed, NUM_REPEATS)[:NUM_WARMUP_PROBES]:
        _sample_probe(model, config, planner, probes[index], clock)
    begun_ns = clock()
    samples: dict[int, StepSample] = {}
    for repeat in range(NUM_REPEATS):
        for index in shuffle_order(probes, seed, repeat):
            if repeat and index not in samples:
                continue
            if not repeat and samples and (clock() - begun_ns) * NUM_REPEATS > budget_ns:
                break
            before = samples.get(index)
            now = _sample_probe(model, config, planner, probes[index], clock)
            if before is not None:
                now = now._replace(
                    steps_ns=before.steps_ns + now.steps_ns,
                    launches_ns=before.launches_ns + now.launches_ns,
                    bind_launch=(
                        now.bind_launch[0],
                        min(before.bind_launch[1], now.bind_launch[1]),
                    ),
                )
            samples[index] = now
    return [samples[index] for index in sorted(samples)], len(probes) - len(samples)


def _sample_probe(
    model: Model, config: EngineConfig, planner: ProbePlanner, probe: Probe, clock: ReadClock
) -> StepSample:
    bound = planner.create_bind_plan(probe)
    [(_, _, bound_ns)] = time_plans(model, [bound], 1, clock)
    plans = planner.create_step_plans(probe)
    # A sequence with drafts is planned again only after the commit.
    depth = 1 if probe.num_drafts else config.depth
    steps = NUM_STEPS if probe.num_tokens <= LONG_STEP_TOKENS else NUM_LONG_STEPS
    first = [next(plans) for _ in range(NUM_WARMUP_STEPS + steps + depth - 1)]
    found = time_plans(model, first, depth, clock)[NUM_WARMUP_STEPS : NUM_WARMUP_STEPS + steps]
    steps_ns = tuple(device_ns for _, device_ns, _ in found)
    launches_ns = tuple(launch_ns for *_, launch_ns in found)
    work = extract_features(bound)
    return StepSample(probe.kind, found[0][0], steps_ns, launches_ns, (work, bound_ns))
