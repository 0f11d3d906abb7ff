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

A parameter counts in proportion, so each model is fitted by least squares: `flat` and `filled` turn
it into a list of numbers and back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from forge.seam import StepPlan

FS_PER_NS = 1_000_000


class Work(NamedTuple):
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


def work_of(plan: StepPlan) -> Work:
    """What of this plan counts, its drafts' plans left aside. O(rows)."""
    tokens = chunks = kv = most_kv = pairs = lines = binds = blocks = 0
    spans: list[tuple[int, int]] = []
    for _, _, _, start, known, refs, _, new_blocks, _, bind, _, drafts in plan.rows:
        count = len(known) + len(refs) + len(drafts)
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
    return Work(rows, tokens, chunks, kv, most_kv, pairs, lines, binds, blocks, events, reads)


class Knots(NamedTuple):
    """Femtoseconds at some whole numbers, ascending, and on straight lines between them.

    The first counts for all below it; beyond the last they grow in proportion.
    """

    at: tuple[int, ...]
    fs: tuple[int, ...]

    @property
    def sound(self) -> bool:
        """A value for each knot, one at least, all knots above 0 and ascending."""
        at = self.at
        rising = all(one < other for one, other in pairwise(at))
        return 0 < len(at) == len(self.fs) and at[0] > 0 and rising

    def value(self, x: int) -> int:
        """Femtoseconds at `x`."""
        at, fs = self.at, self.fs
        right = bisect_left(at, x)
        if right == len(at):
            return fs[-1] * x // at[-1]
        if right == 0 or at[right] == x:
            return fs[right]
        before, after = at[right - 1], at[right]
        return (fs[right - 1] * (after - x) + fs[right] * (x - before)) // (after - before)


def level(at: Iterable[int]) -> Knots:
    """Knots there, at 0."""
    places = tuple(at)
    return Knots(places, (0,) * len(places))


class Decode(NamedTuple):
    """Of a step in which every row is one token, in femtoseconds.

    bend     mean of positions before a row up to which `near` counts, behind it `far`
    near     of a position that is read; far: of one behind the bend
    long     of a position of the longest row. A row is read in a fixed number of parts, so however
             little the others have the step waits for the longest; how much of that is hidden
             depends on the cut, which depends on the rows
    """

    bend: int
    base: Knots
    near: Knots
    far: Knots
    long: Knots

    def line(self, rows: int) -> Line:
        """Of so many rows."""
        return Line(
            self.base.value(rows),
            self.bend * rows,
            self.near.value(rows),
            self.far.value(rows),
            self.long.value(rows),
        )

    def fs(self, work: Work) -> int:
        """Of this step."""
        return self.line(work.rows).fs(work.kv, work.most_kv)


class Line(NamedTuple):
    """Of steps of some number of rows: Decode's, `bend` being of all positions."""

    base: int
    bend: int
    near: int
    far: int
    long: int

    def fs(self, kv: int, most_kv: int) -> int:
        """Of a step that reads so many positions."""
        base, bend, near, far, long = self
        if kv > bend:
            return base + near * bend + far * (kv - bend) + long * most_kv
        return base + near * kv + long * most_kv


LEAST_PART = 128
"""Positions that a part of a cut tile has at least."""


class Steps(NamedTuple):
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

    def have(self, work: Work) -> bool:
        """This is one of them."""
        singles = work.rows - work.chunks
        return (
            work.rows <= self.most_rows
            and work.chunks <= self.most_longer
            and self.least_singles <= singles <= self.most_singles
            and work.tokens > self.above
            and (work.tokens > self.whole or all(count == end for count, end in work.spans))
        )


class Tiled(NamedTuple):
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

    steps: Steps
    apart: int
    tile: int
    processors: int
    heads: int
    cuts: int
    sharing: int
    base: Knots
    position_fs: int = 0
    kv_fs: int = 0
    long_fs: int = 0
    verify_fs: int = 0
    line_fs: int = 0

    def holds(self, work: Work) -> bool:
        """It is about this step."""
        return work.tokens <= self.base.at[-1] and self.steps.have(work)

    def fs(self, work: Work) -> int:
        """Of this step, that it holds."""
        place = bisect_left(self.base.at, work.tokens)
        positions = self.positions(work.spans, self.base.at[place] - work.tokens)
        spent = self.base.fs[place] + self.position_fs * positions
        if self.apart:
            spent += self.kv_fs * work.kv + self.long_fs * work.most_kv
        if work.lines:
            spent += self.verify_fs + self.line_fs * work.lines
        return spent

    def positions(self, spans: tuple[tuple[int, int], ...], filling: int) -> int:
        """Until the last part ends, in positions of one that has a processor to itself."""
        if self.apart:
            longer = tuple((count, end) for count, end in spans if count > 1)
            singles = len(spans) - len(longer)
            spans = ((singles, singles), *longer)
        room = 2 * self.processors // self.heads if self.cuts else 0
        return _positions(
            spans, filling, self.tile, room, self.heads, self.processors, self.sharing
        )


@lru_cache(maxsize=1 << 14)
def _positions(
    spans: tuple[tuple[int, int], ...],
    filling: int,
    tile: int,
    room: int,
    heads: int,
    processors: int,
    sharing: int,
) -> int:
    # Kept, since a fit asks again for each parameter.
    singles = [end for count, end in spans if count == 1]
    longer = [(count, end) for count, end in spans if count > 1]
    if filling:
        longer.append((filling, filling))
    tiles = singles + [end for count, end in longer for _ in range(-(-count // tile))]
    return _last(_cut(tiles, room) * heads, processors, sharing)


def _cut(tiles: list[int], room: int) -> list[int]:
    """The tiles in parts as short as there is room for; as they are, where there is none."""
    part = max(tiles)
    if len(tiles) >= room:
        return tiles
    low = min(LEAST_PART, part)
    while low < part:
        middle = (low + part) // 2
        if sum(-(-end // middle) for end in tiles) > room:
            low = middle + 1
        else:
            part = middle
    return [min(part, end - at) for end in tiles for at in range(0, end, part)]


def _last(parts: Sequence[int], processors: int, sharing: int) -> int:
    """When the last of the parts ends, if each processor takes two at a time, in their order.

    First all take one, then all a second one. Who ends two together goes on with one: so it fits
    best what was measured.
    """
    first, second = parts[:processors], parts[processors : 2 * processors]
    # When each processor next has room, in thousandths, and what is left of its other part then.
    room = [
        (sharing * min(pair), max(pair) - min(pair)) for pair in zip(first, second, strict=False)
    ]
    room += [(1000 * part, 0) for part in first[len(second) :]]
    heapify(room)
    for part in parts[2 * processors :]:
        now, left = room[0]
        if left:
            heapreplace(room, (now + sharing * min(left, part), abs(left - part)))
        else:
            heapreplace(room, (now + 1000 * part, 0))
    return max(now + 1000 * left for now, left in room) // 1000


class Mixed(NamedTuple):
    """Of a step with prompts or drafts in it that is not recorded, in femtoseconds.

    tokens      of all tokens together
    pair_fs     of a query and a key of a chunk
    chunk_fs    of a chunk
    row_fs      of a row of one token; kv_fs: of a position that such a row reads
    verify_fs   where drafts are judged, whatever their number; line_fs: of each judged position
    """

    tokens: Knots
    pair_fs: int = 0
    chunk_fs: int = 0
    row_fs: int = 0
    kv_fs: int = 0
    verify_fs: int = 0
    line_fs: int = 0

    def fs(self, work: Work) -> int:
        """Of this step."""
        spent = self.tokens.value(work.tokens) + self.pair_fs * work.pairs
        spent += self.chunk_fs * work.chunks + self.row_fs * (work.rows - work.chunks)
        if work.lines:
            spent += self.verify_fs + self.line_fs * work.lines
        return spent + self.kv_fs * work.kv


class Draft(NamedTuple):
    """Of a plan of the draft model, in femtoseconds.

    base       by rows
    kv_fs      of a position before a row of one token; token_fs: of each token above one a row
    """

    base: Knots
    kv_fs: int = 0
    token_fs: int = 0

    def fs(self, work: Work) -> int:
        """Of this plan."""
        if not work.rows:
            return 0
        further = self.token_fs * (work.tokens - work.rows)
        return self.base.value(work.rows) + self.kv_fs * work.kv + further


class Planning(NamedTuple):
    """Of the scheduler, from the commit before to the plan, in femtoseconds.

    extra_fs   of each token above one a row; block_fs: of each block that comes with a slot
    """

    base_fs: int = 0
    row_fs: int = 0
    event_fs: int = 0
    block_fs: int = 0
    extra_fs: int = 0

    def fs(self, work: Work) -> int:
        """Of this plan."""
        spent = self.base_fs + self.row_fs * work.rows + self.event_fs * work.events
        return spent + self.block_fs * work.blocks + self.extra_fs * (work.tokens - work.rows)


class Launch(NamedTuple):
    """Of the host in `Model.forward`, in femtoseconds.

    decodes    where every row is one token, by rows
    tokens     of other steps, by tokens
    """

    decodes: Knots
    tokens: Knots
    row_fs: int = 0
    line_fs: int = 0
    bind_fs: int = 0

    def fs(self, work: Work) -> int:
        """Of this plan."""
        if not work.rows:
            return 0
        bound = self.bind_fs * work.binds
        if not work.chunks:
            return self.decodes.value(work.rows) + bound
        spent = self.tokens.value(work.tokens) + self.row_fs * work.rows
        return spent + self.line_fs * work.lines + bound


class Commit(NamedTuple):
    """Of the host from the result to the tokens being told, in femtoseconds."""

    base_fs: int = 0
    row_fs: int = 0
    extra_fs: int = 0

    def fs(self, work: Work) -> int:
        """Of this plan's result."""
        spent = self.base_fs + self.row_fs * work.rows
        return spent + self.extra_fs * (work.tokens - work.rows)


class Edges(NamedTuple):
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


class Tables(NamedTuple):
    """All that is fitted.

    recorded              the first that holds a step with chunks says what it takes, or `mixed`
    draft, draft_launch   None where the model has no draft
    """

    decode: Decode
    mixed: Mixed
    planning: Planning
    launch: Launch
    commit: Commit
    draft: Draft | None = None
    draft_launch: Draft | None = None
    edges: Edges = Edges()
    recorded: tuple[Tiled, ...] = ()

    def chunked_fs(self, work: Work) -> int:
        """Of a step with prompts or drafts in it, in femtoseconds."""
        for tiled in self.recorded:
            if tiled.holds(work):
                return tiled.fs(work)
        return self.mixed.fs(work)


class Table:
    """A Cost by the tables. Two of equal tables are interchangeable."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._lines: dict[int, Line] = {}
        # Plans in flight are asked about three times each, and are long.
        self._works: list[tuple[StepPlan, Work]] = []

    def step_ns(self, plan: StepPlan) -> int:
        """The draft's plans, then the rows."""
        work = self._work(plan)
        tables = self.tables
        spent = 0
        if work.chunks:
            spent = tables.chunked_fs(work)
        elif work.rows:
            spent = self._decode_fs(work.rows, work.kv, work.most_kv)
        if plan.drafts and tables.draft is not None:
            spent += sum(tables.draft.fs(work_of(each)) for each in plan.drafts)
        return spent // FS_PER_NS

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        """By the line of so many rows."""
        return self._decode_fs(num_rows, num_kv, most_kv) // FS_PER_NS

    def plan_ns(self, plan: StepPlan) -> int:
        """Planning, then launching."""
        return self.tables.planning.fs(self._work(plan)) // FS_PER_NS + self.launch_ns(plan)

    def launch_ns(self, plan: StepPlan) -> int:
        """The host in `Model.forward`, the draft's plans included."""
        tables = self.tables
        spent = tables.launch.fs(self._work(plan))
        if plan.drafts and tables.draft_launch is not None:
            spent += sum(tables.draft_launch.fs(work_of(each)) for each in plan.drafts)
        return spent // FS_PER_NS

    def commit_ns(self, plan: StepPlan) -> int:
        """By rows and tokens."""
        return self.tables.commit.fs(self._work(plan)) // FS_PER_NS

    def _decode_fs(self, rows: int, kv: int, most_kv: int) -> int:
        line = self._lines.get(rows)
        if line is None:
            line = self._lines[rows] = self.tables.decode.line(rows)
        return line.fs(kv, most_kv)

    def _work(self, plan: StepPlan) -> Work:
        for known, work in self._works:
            if known is plan:
                return work
        work = work_of(plan)
        self._works = [*self._works[-1:], (plan, work)]
        return work


# Parameters.

FIXED = frozenset({"bend", "steps", "apart", "tile", "processors", "heads", "cuts", "sharing"})
"""Fields that are chosen, not fitted."""

Part = TypeVar("Part", Decode, Tiled, Mixed, Draft, Planning, Launch, Commit)


def flat(part: Part) -> list[int]:
    """The part's parameters, one after the other."""
    found: list[int] = []
    for name, value in part._asdict().items():
        if isinstance(value, Knots):
            found += value.fs
        elif name not in FIXED:
            found.append(int(value))
    return found


def filled(part: Part, parameters: Sequence[int]) -> Part:
    """A part of the same form with these parameters."""
    rest: Iterator[int] = iter(parameters)
    changes: dict[str, Any] = {}
    for name, value in part._asdict().items():
        if isinstance(value, Knots):
            changes[name] = Knots(value.at, tuple(next(rest) for _ in value.at))
        elif name not in FIXED:
            changes[name] = next(rest)
    return part._replace(**changes)


def scaled(tables: Tables, per_mille: int) -> Tables:
    """The same of a device that takes that share of the time. The host is as fast as before."""

    def of(part: Part) -> Part:
        return filled(part, [each * per_mille // 1000 for each in flat(part)])

    draft = None if tables.draft is None else of(tables.draft)
    recorded = tuple(of(each) for each in tables.recorded)
    return tables._replace(
        decode=of(tables.decode), mixed=of(tables.mixed), draft=draft, recorded=recorded
    )
