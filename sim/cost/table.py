"""Table: what steps take, looked up in what steps took. The cost model that a calibration fills.

Owns the form of the model: which properties of a plan count, and how. Knows no clock, no file and
no fit. Every number is a whole one, so a run is the same on every machine.

    rows of one token     base[rows] + near[rows] * KV, beyond a bend far[rows] * KV,
                          + long[rows] * positions of the longest row
    recorded chunks       base[graph] + positions until the last part ends, + drafts to verify,
                          + KV of rows of one token, where these are read apart
    any other rows        tokens[T] + pairs of queries and keys + rows + KV, + drafts to verify
    the draft's plans     base[rows] + KV + further tokens, for each
    the host              planning, launching, committing: by rows, events, blocks and tokens

Tables are lines through knots. A CUDA graph of 8 rows serves 5 to 8 of them: that step of the stair
is the two knots 5 and 8. Nothing makes a table rise: a full tile can be faster than an open one.

A parameter counts in proportion, so each model is fitted by least squares: `get_parameters` and
`with_parameters` turn it into a list of numbers and back.
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
    """What of a plan counts.

    rows, tokens    that it computes
    chunks          rows of more than one token, drafts included
    kv, most_kv     positions before rows of one token: in all, and the most
    pairs           of a query and a key, in chunks
    lines           positions whose draws judge drafts, or follow them
    binds, blocks   rows that take a slot over, and the blocks that they get
    events          requests admitted, preempted and finished
    spans           tokens of each row and the positions they read, where a row is a chunk
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
    """What of this plan counts, its drafts' plans left aside. O(rows)."""
    tokens = chunks = kv = most_kv = pairs = lines = binds = blocks = 0
    spans: list[tuple[int, int]] = []
    for _, _, _, start, tokens_known, refs, _, new_blocks, _, bind, _, drafts in plan.rows:
        count = len(tokens_known) + len(refs) + len(drafts)
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
        if bind is not None:
            binds += 1
            blocks += len(new_blocks)
    events = len(plan.admitted) + len(plan.preempted) + len(plan.finished)
    rows, reads = len(plan.rows), tuple(spans) if chunks else ()
    return StepFeatures(
        rows, tokens, chunks, kv, most_kv, pairs, lines, binds, blocks, events, reads
    )


class PiecewiseLinear(NamedTuple):
    """Femtoseconds at some whole numbers, ascending, and on straight lines between them.

    The first counts for all below it; beyond the last they grow in proportion.
    """

    at: tuple[int, ...]
    fs: tuple[int, ...]

    @property
    def is_valid(self) -> bool:
        """A value for each knot, one at least, all knots above 0 and ascending."""
        at = self.at
        rising = all(one < other for one, other in pairwise(at))
        return 0 < len(at) == len(self.fs) and at[0] > 0 and rising

    def evaluate(self, x: int) -> int:
        """Femtoseconds at `x`."""
        at, fs = self.at, self.fs
        index = bisect_left(at, x)
        if index == len(at):
            return fs[-1] * x // at[-1]
        if index == 0 or at[index] == x:
            return fs[index]
        before, after = at[index - 1], at[index]
        return (fs[index - 1] * (after - x) + fs[index] * (x - before)) // (after - before)


def create_zero_knots(at: Iterable[int]) -> PiecewiseLinear:
    """Knots there, at 0."""
    knots = tuple(at)
    return PiecewiseLinear(knots, (0,) * len(knots))


class DecodeCost(NamedTuple):
    """Of a step in which every row is one token, in femtoseconds.

    bend     mean of positions before a row up to which `near` counts, behind it `far`
    near     of a position that is read; far: of one behind the bend
    long     of a position of the longest row. A row is read in a fixed number of parts, so however
             little the others have the step waits for the longest; how much of that is hidden
             depends on the cut, which depends on the rows
    """

    bend: int
    base: PiecewiseLinear
    near: PiecewiseLinear
    far: PiecewiseLinear
    long: PiecewiseLinear

    def at_num_rows(self, rows: int) -> DecodeLine:
        """Of so many rows."""
        return DecodeLine(
            self.base.evaluate(rows),
            self.bend * rows,
            self.near.evaluate(rows),
            self.far.evaluate(rows),
            self.long.evaluate(rows),
        )

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this step."""
        return self.at_num_rows(work.rows).cost_fs(work.kv, work.most_kv)


class DecodeLine(NamedTuple):
    """Of steps of some number of rows: Decode's, `bend` being of all positions."""

    base: int
    bend: int
    near: int
    far: int
    long: int

    def cost_fs(self, total_kv_len: int, max_kv_len: int) -> int:
        """Of a step that reads so many positions."""
        base, bend, near, far, long = self
        if total_kv_len > bend:
            return base + near * bend + far * (total_kv_len - bend) + long * max_kv_len
        return base + near * total_kv_len + long * max_kv_len


MIN_SPLIT_POSITIONS = 128
"""Positions that a part of a cut tile has at least."""


class GraphCondition(NamedTuple):
    """Which steps with prompts or drafts in them a recording is for.

    most_rows    of all kinds; most_longer: of more than one token
    least_singles, most_singles   rows of one token
    above        tokens: none of up to so many
    whole        tokens: of up to so many only those whose rows all begin at their first position
    """

    most_rows: int
    most_longer: int
    least_singles: int = 0
    most_singles: int = 0
    above: int = 0
    whole: int = 0

    def matches(self, work: StepFeatures) -> bool:
        """This is one of them."""
        singles = work.rows - work.chunks
        return (
            work.rows <= self.most_rows
            and work.chunks <= self.most_longer
            and self.least_singles <= singles <= self.most_singles
            and work.tokens > self.above
            and (work.tokens > self.whole or all(count == end for count, end in work.spans))
        )


class CapturedStepCost(NamedTuple):
    """Of a recorded step with prompts or drafts in it, in femtoseconds.

    One kernel reads for all rows, in tiles: up to `tile` tokens of one row, a row of one token too,
    each over all that its row has. What fills the recording is one more row. Where it `cuts`, and
    while there is room for more than the tiles, they are cut into parts, as short as the room
    allows (FlashInfer, Ye et al. 2025); a tile too many, and none is cut. A processor takes two
    parts at a time. Those of one key head are handed out after those of the one before, each to
    whom has room first, and the step takes until the last one ends.

        room for 8   rows of 900, 100 and 100, and a chunk of 2 tiles over 400
                     parts of 300: 3 + 1 + 1 + 2 * 2 are 9, too many
                     parts of 400: 3 + 1 + 1 + 2 * 1 are 7

    Where rows of one token are `apart` another kernel reads for them, behind the first, to which
    they are one row of so many tokens.

    steps         that it is for; apart: 1 where rows of one token are
    processors, heads   of the device, and key heads
    cuts          0: tiles are never cut
    sharing       per mille: how much longer a part takes while two share a processor
    base          by tokens of the recordings
    position_fs   of a position that the last part waits for, itself included
    kv_fs, long_fs   of a position of a row that is read apart, and of one of the longest
    verify_fs, line_fs   as in Mixed
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
        """It is about this step."""
        return work.tokens <= self.base.at[-1] and self.steps.matches(work)

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this step, that it holds."""
        index = bisect_left(self.base.at, work.tokens)
        positions = self.makespan_positions(work.spans, self.base.at[index] - work.tokens)
        spent = self.base.fs[index] + self.position_fs * positions
        if self.apart:
            spent += self.kv_fs * work.kv + self.long_fs * work.most_kv
        if work.lines:
            spent += self.verify_fs + self.line_fs * work.lines
        return spent

    def makespan_positions(self, spans: tuple[tuple[int, int], ...], num_padding: int) -> int:
        """Until the last part ends, in positions of one that has a processor to itself."""
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
    # Kept, since a fit asks again for each parameter.
    singles = [end for count, end in spans if count == 1]
    longer = [(count, end) for count, end in spans if count > 1]
    if num_padding:
        longer.append((num_padding, num_padding))
    tiles = singles + [end for count, end in longer for _ in range(-(-count // tile))]
    return _makespan(_split_tiles(tiles, max_splits) * heads, processors, sharing)


def _split_tiles(tiles: list[int], max_splits: int) -> list[int]:
    """The tiles in parts as short as there is room for; as they are, where there is none."""
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
    """When the last of the parts ends, if each processor takes two at a time, in their order.

    First all take one, then all a second one. Who ends two together goes on with one: so it fits
    best what was measured.
    """
    first, second = splits[:processors], splits[processors : 2 * processors]
    # When each processor next has room, in thousandths, and what is left of its other part then.
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
    """Of a step with prompts or drafts in it that is not recorded, in femtoseconds.

    tokens      of all tokens together
    pair_fs     of a query and a key of a chunk
    chunk_fs    of a chunk
    row_fs      of a row of one token; kv_fs: of a position that such a row reads
    verify_fs   where drafts are judged, whatever their number; line_fs: of each judged position
    """

    tokens: PiecewiseLinear
    pair_fs: int = 0
    chunk_fs: int = 0
    row_fs: int = 0
    kv_fs: int = 0
    verify_fs: int = 0
    line_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this step."""
        spent = self.tokens.evaluate(work.tokens) + self.pair_fs * work.pairs
        spent += self.chunk_fs * work.chunks + self.row_fs * (work.rows - work.chunks)
        if work.lines:
            spent += self.verify_fs + self.line_fs * work.lines
        return spent + self.kv_fs * work.kv


class DraftPlanCost(NamedTuple):
    """Of a plan of the draft model, in femtoseconds.

    base       by rows
    kv_fs      of a position before a row of one token; token_fs: of each token above one a row
    """

    base: PiecewiseLinear
    kv_fs: int = 0
    token_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this plan."""
        if not work.rows:
            return 0
        further = self.token_fs * (work.tokens - work.rows)
        return self.base.evaluate(work.rows) + self.kv_fs * work.kv + further


class PlanningCost(NamedTuple):
    """Of the scheduler, from the commit before to the plan, in femtoseconds.

    extra_fs   of each token above one a row; block_fs: of each block that comes with a slot
    """

    base_fs: int = 0
    row_fs: int = 0
    event_fs: int = 0
    block_fs: int = 0
    extra_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this plan."""
        spent = self.base_fs + self.row_fs * work.rows + self.event_fs * work.events
        return spent + self.block_fs * work.blocks + self.extra_fs * (work.tokens - work.rows)


class LaunchCost(NamedTuple):
    """Of the host in `Model.forward`, in femtoseconds.

    decodes    where every row is one token, by rows
    tokens     of other steps, by tokens
    """

    decodes: PiecewiseLinear
    tokens: PiecewiseLinear
    row_fs: int = 0
    line_fs: int = 0
    bind_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this plan."""
        if not work.rows:
            return 0
        bound = self.bind_fs * work.binds
        if not work.chunks:
            return self.decodes.evaluate(work.rows) + bound
        spent = self.tokens.evaluate(work.tokens) + self.row_fs * work.rows
        return spent + self.line_fs * work.lines + bound


class CommitCost(NamedTuple):
    """Of the host from the result to the tokens being told, in femtoseconds."""

    base_fs: int = 0
    row_fs: int = 0
    extra_fs: int = 0

    def cost_fs(self, work: StepFeatures) -> int:
        """Of this plan's result."""
        spent = self.base_fs + self.row_fs * work.rows
        return spent + self.extra_fs * (work.tokens - work.rows)


class FrontendLatency(NamedTuple):
    """What a request takes outside of the engine, in nanoseconds: not part of any step.

    ingress_ns         from the client to the engine; ingress_token_ns: for each token of the prompt
    egress_ns          from the engine to the client, of the first token
    """

    ingress_ns: int = 0
    ingress_token_ns: int = 0
    egress_ns: int = 0

    def first_token_ns(self, num_prompt: int) -> int:
        """What a client waits for its first token beside what the engine takes."""
        return self.ingress_ns + self.ingress_token_ns * num_prompt + self.egress_ns


class CostTables(NamedTuple):
    """All that is fitted.

    recorded              the first that holds a step with chunks says what it takes, or `mixed`
    draft, draft_launch   None where the model has no draft
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
        """Of a step with prompts or drafts in it, in femtoseconds."""
        for tiled in self.recorded:
            if tiled.applies_to(work):
                return tiled.cost_fs(work)
        return self.mixed.cost_fs(work)


class TableCost:
    """A Cost by the tables. Two of equal tables are interchangeable."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._decode_lines: dict[int, DecodeLine] = {}
        # Plans in flight are asked about three times each, and are long.
        self._feature_cache: list[tuple[StepPlan, StepFeatures]] = []

    def step_ns(self, plan: StepPlan) -> int:
        """The draft's plans, then the rows."""
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
        """By the line of so many rows."""
        return self._decode_fs(num_rows, total_kv_len, max_kv_len) // FS_PER_NS

    def plan_ns(self, plan: StepPlan) -> int:
        """Planning, then launching."""
        return self.tables.planning.cost_fs(self._features_of(plan)) // FS_PER_NS + self.launch_ns(
            plan
        )

    def launch_ns(self, plan: StepPlan) -> int:
        """The host in `Model.forward`, the draft's plans included."""
        tables = self.tables
        spent = tables.launch.cost_fs(self._features_of(plan))
        if plan.drafts and tables.draft_launch is not None:
            spent += sum(
                tables.draft_launch.cost_fs(extract_features(each)) for each in plan.drafts
            )
        return spent // FS_PER_NS

    def commit_ns(self, plan: StepPlan) -> int:
        """By rows and tokens."""
        return self.tables.commit.cost_fs(self._features_of(plan)) // FS_PER_NS

    def _decode_fs(self, rows: int, kv: int, most_kv: int) -> int:
        line = self._decode_lines.get(rows)
        if line is None:
            line = self._decode_lines[rows] = self.tables.decode.at_num_rows(rows)
        return line.cost_fs(kv, most_kv)

    def _features_of(self, plan: StepPlan) -> StepFeatures:
        for known, work in self._feature_cache:
            if known is plan:
                return work
        work = extract_features(plan)
        self._feature_cache = [*self._feature_cache[-1:], (plan, work)]
        return work


# Parameters.

FIXED_FIELDS = frozenset(
    {"bend", "steps", "apart", "tile", "processors", "heads", "cuts", "sharing"}
)
"""Fields that are chosen, not fitted."""

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
    """The part's parameters, one after the other."""
    found: list[int] = []
    for name, value in cost._asdict().items():
        if isinstance(value, PiecewiseLinear):
            found += value.fs
        elif name not in FIXED_FIELDS:
            found.append(int(value))
    return found


def with_parameters(cost: CostPart, parameters: Sequence[int]) -> CostPart:
    """A part of the same form with these parameters."""
    rest: Iterator[int] = iter(parameters)
    changes: dict[str, Any] = {}
    for name, value in cost._asdict().items():
        if isinstance(value, PiecewiseLinear):
            changes[name] = PiecewiseLinear(value.at, tuple(next(rest) for _ in value.at))
        elif name not in FIXED_FIELDS:
            changes[name] = next(rest)
    return cost._replace(**changes)


def scale_device_cost(tables: CostTables, per_mille: int) -> CostTables:
    """The same of a device that takes that share of the time. The host is as fast as before."""

    def scale(part: CostPart) -> CostPart:
        return with_parameters(part, [each * per_mille // 1000 for each in get_parameters(part)])

    draft = None if tables.draft is None else scale(tables.draft)
    recorded = tuple(scale(each) for each in tables.recorded)
    return tables._replace(
        decode=scale(tables.decode), mixed=scale(tables.mixed), draft=draft, recorded=recorded
    )
