"""Table: step times looked up in measured step times. The cost model that a calibration fills.

Owns the form of the model: which features of a plan count, and how. Knows no clock, no file and no
fit. Every parameter is an integer, so a run is the same on every machine.

    decode rows only      base[rows] + near[rows] * KV, above the bend far[rows] * KV,
                          + long[rows] * positions of the longest row
    captured chunks       base[graph] + positions until the last split ends, + drafts to verify,
                          + KV of decode rows, where a separate kernel reads for them
    any other step        tokens[T] + query-key pairs + rows + KV, + drafts to verify
    draft model's plans   base[rows] + KV + further tokens, for each plan
    host                  planning, launch, commit: by rows, events, blocks and tokens

Tables are piecewise linear. A CUDA graph of 8 rows serves 5 to 8 of them: that stair is the two
knots 5 and 8. A table may fall: a full tile can be faster than a partial one.

Always true: the cost is linear in each parameter, so each part is fitted by least squares.
`get_parameters` and `with_parameters` turn a part into a list of numbers and back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from forge.seam import StepPlan
from forge.sim.units import FS_PER_NS


class StepFeatures(NamedTuple):
    """The features of a plan that its time depends on.

    rows, tokens    rows and tokens that the step computes
    chunks          rows of more than one token, drafts included
    kv, most_kv     positions before the rows of one token: their sum and their maximum
    pairs           query-key pairs in chunks
    lines           positions whose logits verify drafts: one more than the drafts of each row
    binds, blocks   rows that bind a slot, and the blocks that they receive
    events          requests admitted, preempted and finished
    spans           (tokens, end position) of each row; empty where no row is a chunk
    """

    rows: int = 0
    tokens: int = 0
    chunks: int = 0
    kv: int = 0
    most_kv: int = 0
    pairs: int = 0
    lines: int = 0
    binds: int = 0
    blocks: int = 0
    events: int = 0
    spans: tuple[tuple[int, int], ...] = ()


def extract_features(plan: StepPlan) -> StepFeatures:
    """Return the features of a plan. Its draft plans are left out. O(rows)."""
    tokens = chunks = kv = most_kv = pairs = lines = binds = blocks = 0
    spans: list[tuple[int, int]] = []
    for row in plan.rows:
        start, drafts = row.start, row.drafts
        count = len(row.tokens) + len(row.refs) + len(drafts)
        tokens += count
        spans.append((count, start + count))
        if count == 1:
            kv += start
            if start > most_kv:
                most_kv = start
        else:
            chunks += 1
            pairs += count * start + count * (count + 1) // 2
            if drafts:
                lines += 1 + len(drafts)
        if row.bind is not None:
            binds += 1
            blocks += len(row.new_blocks)
    events = len(plan.admitted) + len(plan.preempted) + len(plan.finished)
    rows, reads = len(plan.rows), tuple(spans) if chunks else ()
    return StepFeatures(
        rows, tokens, chunks, kv, most_kv, pairs, lines, binds, blocks, events, reads
    )


class PiecewiseLinear(NamedTuple):
    """Femtoseconds at ascending integer knots, interpolated linearly between them.

    at   knots, above 0
    fs   femtoseconds at each knot
    Below the first knot the value is constant; above the last it grows in proportion.
    """

    at: tuple[int, ...]
    fs: tuple[int, ...]

    @property
    def is_valid(self) -> bool:
        """True where each knot has a value and knots are above 0 and ascend.

        There is at least one.
        """
        at = self.at
        rising = all(one < other for one, other in pairwise(at))
        return 0 < len(at) == len(self.fs) and at[0] > 0 and rising

    def evaluate(self, x: int) -> int:
        """Return the femtoseconds at `x`."""
        at, fs = self.at, self.fs
        index = bisect_left(at, x)
        if index == len(at):
            return fs[-1] * x // at[-1]
        if index == 0 or at[index] == x:
            return fs[index]
        before, after = at[index - 1], at[index]
        return (fs[index - 1] * (after - x) + fs[index] * (x - before)) // (after - before)


def create_zero_knots(at: Iterable[int]) -> PiecewiseLinear:
    """Return a table with these knots and 0 at each of them."""
    knots = tuple(at)
    return PiecewiseLinear(knots, (0,) * len(knots))


class DecodeCost(NamedTuple):
    """Cost of a step in which every row is one token, in femtoseconds.

    bend   mean number of positions before a row up to which `near` applies; above it `far` does
    base   by rows
    near   of a position that is read, by rows; far: of one above the bend
    long   of a position of the longest row, by rows

    The longest row counts on its own because each row is read in a fixed number of splits: the step
    waits for the longest row, however short the others are.
    """

    bend: int
    base: PiecewiseLinear
    near: PiecewiseLinear
    far: PiecewiseLinear
    long: PiecewiseLinear

    def at_num_rows(self, rows: int) -> DecodeLine:
        """Return the cost function of steps of this many rows."""
        return DecodeLine(
            self.base.evaluate(rows),
            self.bend * rows,
            self.near.evaluate(rows),
            self.far.evaluate(rows),
            self.long.evaluate(rows),
        )

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of a step with these features."""
        return self.at_num_rows(work.rows).cost_fs(work.kv, work.most_kv)


class DecodeLine(NamedTuple):
    """The parameters of DecodeCost at one number of rows. `bend` is the sum over all rows."""

    base: int
    bend: int
    near: int
    far: int
    long: int

    def cost_fs(self, total_kv_len: int, max_kv_len: int) -> int:
        """Return the cost of a step that reads this many positions."""
        base, bend, near, far, long = self
        if total_kv_len > bend:
            return base + near * bend + far * (total_kv_len - bend) + long * max_kv_len
        return base + near * total_kv_len + long * max_kv_len


MIN_SPLIT_POSITIONS = 128
"""Smallest number of positions in a split."""


class GraphCondition(NamedTuple):
    """The steps with prompts or drafts that a CUDA graph can replay.

    most_rows      maximum number of rows
    most_longer    maximum number of rows of more than one token
    least_singles, most_singles   bounds of the number of rows of one token
    above          only steps of more tokens than this
    whole          up to this many tokens, only steps whose rows all start at position 0
    """

    most_rows: int
    most_longer: int
    least_singles: int = 0
    most_singles: int = 0
    above: int = 0
    whole: int = 0

    def matches(self, work: StepFeatures) -> bool:
        """Return True where the graph can replay a step with these features."""
        singles = work.rows - work.chunks
        return (
            work.rows <= self.most_rows
            and work.chunks <= self.most_longer
            and self.least_singles <= singles <= self.most_singles
            and work.tokens > self.above
            and (work.tokens > self.whole or all(count == end for count, end in work.spans))
        )


class CapturedStepCost(NamedTuple):
    """Cost of a captured step with prompts or drafts in it, in femtoseconds.

    One attention kernel reads for all rows, in tiles: up to `tile` tokens of one row, each over all
    positions of its row. A row of one token is a tile. The padding of the graph is one more row.
    Where `cuts` is 1, tiles are cut into splits that are as short as the room allows (FlashInfer,
    Ye et al. 2025). Where there are more tiles than room, none is cut. A processor runs two splits
    at a time. Splits are assigned key head by key head, each to the first processor with room. The
    step takes until the last split ends.

        room for 8   rows of 900, 100 and 100, and a chunk of 2 tiles over 400
                     splits of 300: 3 + 1 + 1 + 2 * 2 are 9, too many
                     splits of 400: 3 + 1 + 1 + 2 * 1 are 7

    Where `apart` is 1, another kernel reads for rows of one token, after the first kernel. To the
    first kernel these rows are one row of as many tokens.

    steps         the steps that this cost applies to
    `apart`       1 where a separate kernel reads for rows of one token
    processors    streaming multiprocessors of the device; heads: key heads
    cuts          0: tiles are never cut
    sharing       per mille: how much longer a split takes while two share a processor
    base          by tokens of the captured graphs
    position_fs   of a position on the critical path, up to the end of the last split
    kv_fs         of a position of a row that the separate kernel reads
    long_fs       of a position of the longest such row
    verify_fs, line_fs   as in MixedStepCost
    """

    steps: GraphCondition
    apart: int
    tile: int
    processors: int
    heads: int
    cuts: int
    sharing: int
    base: PiecewiseLinear
    position_fs: int = 0
    kv_fs: int = 0
    long_fs: int = 0
    verify_fs: int = 0
    line_fs: int = 0

    def applies_to(self, work: StepFeatures) -> bool:
        """Return True where this cost applies to a step with these features."""
        return work.tokens <= self.base.at[-1] and self.steps.matches(work)

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of a step that this cost applies to."""
        index = bisect_left(self.base.at, work.tokens)
        positions = self.makespan_positions(work.spans, self.base.at[index] - work.tokens)
        spent = self.base.fs[index] + self.position_fs * positions
        if self.apart:
            spent += self.kv_fs * work.kv + self.long_fs * work.most_kv
        if work.lines:
            spent += self.verify_fs + self.line_fs * work.lines
        return spent

    def makespan_positions(self, spans: tuple[tuple[int, int], ...], num_padding: int) -> int:
        """Return when the last split ends, in positions of a split alone on its processor."""
        if self.apart:
            chunk_spans = tuple((count, end) for count, end in spans if count > 1)
            singles = len(spans) - len(chunk_spans)
            spans = ((singles, singles), *chunk_spans)
        max_splits = 2 * self.processors // self.heads if self.cuts else 0
        return _makespan_positions(
            spans, num_padding, self.tile, max_splits, self.heads, self.processors, self.sharing
        )


@lru_cache(maxsize=1 << 14)
def _makespan_positions(
    spans: tuple[tuple[int, int], ...],
    num_padding: int,
    tile: int,
    max_splits: int,
    heads: int,
    processors: int,
    sharing: int,
) -> int:
    # Cached: a fit evaluates the same steps once for each parameter.
    singles = [end for count, end in spans if count == 1]
    longer = [(count, end) for count, end in spans if count > 1]
    if num_padding:
        longer.append((num_padding, num_padding))
    tiles = singles + [end for count, end in longer for _ in range(-(-count // tile))]
    return _makespan(_split_tiles(tiles, max_splits) * heads, processors, sharing)


def _split_tiles(tiles: list[int], max_splits: int) -> list[int]:
    """Return the tiles cut into splits as short as the room allows; uncut where there is none."""
    split_size = max(tiles)
    if len(tiles) >= max_splits:
        return tiles
    low = min(MIN_SPLIT_POSITIONS, split_size)
    while low < split_size:
        middle = (low + split_size) // 2
        if sum(-(-end // middle) for end in tiles) > max_splits:
            low = middle + 1
        else:
            split_size = middle
    return [min(split_size, end - at) for end in tiles for at in range(0, end, split_size)]


def _makespan(splits: Sequence[int], processors: int, sharing: int) -> int:
    """Return when the last split ends, if each processor runs two at a time, in their order.

    Each processor receives one split, then each a second one. The rest go to the first processor
    with room. A processor whose two splits end together continues with one: this fits measurements
    best.
    """
    first, second = splits[:processors], splits[processors : 2 * processors]
    # (when the processor has room next, in thousandths; what remains of its other split then)
    free_at = [
        (sharing * min(pair), max(pair) - min(pair)) for pair in zip(first, second, strict=False)
    ]
    free_at += [(1000 * part, 0) for part in first[len(second) :]]
    heapify(free_at)
    for part in splits[2 * processors :]:
        now, remaining = free_at[0]
        if remaining:
            heapreplace(free_at, (now + sharing * min(remaining, part), abs(remaining - part)))
        else:
            heapreplace(free_at, (now + 1000 * part, 0))
    return max(now + 1000 * remaining for now, remaining in free_at) // 1000


class MixedStepCost(NamedTuple):
    """Cost of a step with prompts or drafts in it that is not captured, in femtoseconds.

    tokens      of all tokens together
    pair_fs     of a query-key pair of a chunk
    chunk_fs    of a chunk
    row_fs      of a row of one token
    kv_fs       of a position that a row of one token reads
    verify_fs   of verification, whatever the number of drafts
    line_fs     of each verified position
    """

    tokens: PiecewiseLinear
    pair_fs: int = 0
    chunk_fs: int = 0
    row_fs: int = 0
    kv_fs: int = 0
    verify_fs: int = 0
    line_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of a step with these features."""
        spent = self.tokens.evaluate(work.tokens) + self.pair_fs * work.pairs
        spent += self.chunk_fs * work.chunks + self.row_fs * (work.rows - work.chunks)
        if work.lines:
            spent += self.verify_fs + self.line_fs * work.lines
        return spent + self.kv_fs * work.kv


class DraftPlanCost(NamedTuple):
    """Cost of a plan of the draft model, in femtoseconds.

    base       by rows
    kv_fs      of a position before a row of one token
    token_fs   of each token above one a row
    """

    base: PiecewiseLinear
    kv_fs: int = 0
    token_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of a draft plan with these features."""
        if not work.rows:
            return 0
        further = self.token_fs * (work.tokens - work.rows)
        return self.base.evaluate(work.rows) + self.kv_fs * work.kv + further


class PlanningCost(NamedTuple):
    """Cost of scheduling, from the previous commit to the plan, in femtoseconds.

    row_fs     of a row; event_fs: of an admission, a preemption or a finish
    block_fs   of each block that is allocated with a slot
    extra_fs   of each token above one a row
    """

    base_fs: int = 0
    row_fs: int = 0
    event_fs: int = 0
    block_fs: int = 0
    extra_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of scheduling a plan with these features."""
        spent = self.base_fs + self.row_fs * work.rows + self.event_fs * work.events
        return spent + self.block_fs * work.blocks + self.extra_fs * (work.tokens - work.rows)


class LaunchCost(NamedTuple):
    """Cost of the host in `Model.forward`, in femtoseconds.

    decodes   steps in which every row is one token, by rows
    tokens    other steps, by tokens; row_fs, line_fs: of their rows and verified positions
    bind_fs   of a row that binds a slot
    """

    decodes: PiecewiseLinear
    tokens: PiecewiseLinear
    row_fs: int = 0
    line_fs: int = 0
    bind_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of launching a plan with these features."""
        if not work.rows:
            return 0
        bound = self.bind_fs * work.binds
        if not work.chunks:
            return self.decodes.evaluate(work.rows) + bound
        spent = self.tokens.evaluate(work.tokens) + self.row_fs * work.rows
        return spent + self.line_fs * work.lines + bound


class CommitCost(NamedTuple):
    """Cost of the host from the result to the delivery of its tokens, in femtoseconds.

    row_fs     of a row
    extra_fs   of each token above one a row
    """

    base_fs: int = 0
    row_fs: int = 0
    extra_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Return the cost of committing a plan with these features."""
        spent = self.base_fs + self.row_fs * work.rows
        return spent + self.extra_fs * (work.tokens - work.rows)


class FrontendLatency(NamedTuple):
    """Time of a request outside of the engine, in nanoseconds. It is part of no step.

    ingress_ns         from the client to the engine
    ingress_token_ns   for each token of the prompt
    egress_ns          from the engine to the client, for the first token
    """

    ingress_ns: int = 0
    ingress_token_ns: int = 0
    egress_ns: int = 0

    def first_token_ns(self, num_prompt: int) -> int:
        """Return what the frontend adds to the time to the first token."""
        return self.ingress_ns + self.ingress_token_ns * num_prompt + self.egress_ns


class CostTables(NamedTuple):
    """All fitted parts of the model.

    recorded              costs of captured steps; the first that applies counts, else `mixed`
    draft, draft_launch   None where the model has no draft model
    """

    decode: DecodeCost
    mixed: MixedStepCost
    planning: PlanningCost
    launch: LaunchCost
    commit: CommitCost
    draft: DraftPlanCost | None = None
    draft_launch: DraftPlanCost | None = None
    edges: FrontendLatency = FrontendLatency()
    recorded: tuple[CapturedStepCost, ...] = ()

    def chunk_step_fs(self, work: StepFeatures) -> int:
        """Return the cost of a step with prompts or drafts in it, in femtoseconds."""
        for tiled in self.recorded:
            if tiled.applies_to(work):
                return tiled.cost_fs(work)
        return self.mixed.cost_fs(work)


class TableCost:
    """A CostModel that reads the tables. Two instances with equal tables are interchangeable."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._decode_lines: dict[int, DecodeLine] = {}
        # The features of the last two plans: each plan is evaluated three times, O(rows) each.
        self._feature_cache: list[tuple[StepPlan, StepFeatures]] = []

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the draft plans and of the rows."""
        work = self._features_of(plan)
        tables = self.tables
        spent = 0
        if work.chunks:
            spent = tables.chunk_step_fs(work)
        elif work.rows:
            spent = self._decode_fs(work.rows, work.kv, work.most_kv)
        if plan.drafts and tables.draft is not None:
            spent += sum(tables.draft.cost_fs(extract_features(each)) for each in plan.drafts)
        return spent // FS_PER_NS

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return the time of a decode step; the parameters of its number of rows are cached."""
        return self._decode_fs(num_rows, total_kv_len, max_kv_len) // FS_PER_NS

    def plan_ns(self, plan: StepPlan) -> int:
        """Return the time of scheduling and of launching the plan."""
        return self.tables.planning.cost_fs(self._features_of(plan)) // FS_PER_NS + self.launch_ns(
            plan
        )

    def launch_ns(self, plan: StepPlan) -> int:
        """Return the time of the host in `Model.forward`, draft plans included."""
        tables = self.tables
        spent = tables.launch.cost_fs(self._features_of(plan))
        if plan.drafts and tables.draft_launch is not None:
            spent += sum(
                tables.draft_launch.cost_fs(extract_features(each)) for each in plan.drafts
            )
        return spent // FS_PER_NS

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the time of the commit, by rows and tokens."""
        return self.tables.commit.cost_fs(self._features_of(plan)) // FS_PER_NS

    def _decode_fs(self, rows: int, kv: int, most_kv: int) -> int:
        line = self._decode_lines.get(rows)
        if line is None:
            line = self._decode_lines[rows] = self.tables.decode.at_num_rows(rows)
        return line.cost_fs(kv, most_kv)

    def _features_of(self, plan: StepPlan) -> StepFeatures:
        for cached_plan, work in self._feature_cache:
            if cached_plan is plan:
                return work
        work = extract_features(plan)
        self._feature_cache = [*self._feature_cache[-1:], (plan, work)]
        return work


# Parameters.

FIXED_FIELDS = frozenset(
    {"bend", "steps", "apart", "tile", "processors", "heads", "cuts", "sharing"}
)
"""Fields that a search chooses; all other fields are fitted."""

CostPart = TypeVar(
    "CostPart",
    DecodeCost,
    CapturedStepCost,
    MixedStepCost,
    DraftPlanCost,
    PlanningCost,
    LaunchCost,
    CommitCost,
)


def get_parameters(cost: CostPart) -> list[int]:
    """Return the fitted parameters of a part as a flat list."""
    found: list[int] = []
    for name, value in cost._asdict().items():
        if isinstance(value, PiecewiseLinear):
            found += value.fs
        elif name not in FIXED_FIELDS:
            found.append(int(value))
    return found


def with_parameters(cost: CostPart, parameters: Sequence[int]) -> CostPart:
    """Return a part of the same form with these parameters, in the order of `get_parameters`."""
    rest: Iterator[int] = iter(parameters)
    changes: dict[str, Any] = {}
    for name, value in cost._asdict().items():
        if isinstance(value, PiecewiseLinear):
            changes[name] = PiecewiseLinear(value.at, tuple(next(rest) for _ in value.at))
        elif name not in FIXED_FIELDS:
            changes[name] = next(rest)
    return cost._replace(**changes)


def scale_device_cost(tables: CostTables, per_mille: int) -> CostTables:
    """Return tables for a device that takes this share of the time. The host stays as fast."""

    def scale(part: CostPart) -> CostPart:
        return with_parameters(part, [each * per_mille // 1000 for each in get_parameters(part)])

    draft = None if tables.draft is None else scale(tables.draft)
    recorded = tuple(scale(each) for each in tables.recorded)
    return tables._replace(
        decode=scale(tables.decode), mixed=scale(tables.mixed), draft=draft, recorded=recorded
    )
