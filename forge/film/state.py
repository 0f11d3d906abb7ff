"""FilmState: tables, cached blocks and queue of a run, folded from the lines of its film.

Owns the format of a line, as a reader sees it. Knows no scheduler and no pool. forge/film/page.js
folds the same lines in a browser.

    {"arrive": 7, "at": 1200, "seq": 7, "n": 1, "prompt": 40, "output": 9, "class": 0}
    {"plan": 3, "at": 5100, "rows": [[7, 0, 0, 40, 0, 1]], "admitted": [[7, "new, ..."]],
     "open": [[7, 40, 3, 4, 5]], "next": 6}
    {"plan": 4, "at": 9100}                        the rows of plan 3, one token more in each
    {"done": 3, "at": 9100, "device": [100, 100, 4000], "publish": [3, 4]}
    {"left": 7, "at": 9600, "ended": [[7, "abort"]], "free": [7]}

Times are microseconds. Those of `device` count from the plan: its launch, and its start and end on
the device. Ids and lengths are all that a film has of a request: no text, no token.
Any line may have changes of the pool since the line before, in this order:

    ended     [sequence, reason]: sequences that are no longer live
    free      sequences whose table was freed. One that is still live waits again
    rows      of a plan, in its order: a sequence with one token more, or [sequence, slot, start,
              tokens, drafts, samples]. Left out: the sequences of the plan before, one token each
    open      [sequence, tokens, block, ...]: a new table
    grow      [sequence, keep, block, ...]: its first `keep` blocks stay, these follow
    tokens    [sequence, tokens]: positions in use, where rows do not imply them
    evict     blocks that are no longer found by their content
    publish   blocks whose content is found from now on
    next      block that is allocated next; null: none is free
    wait      [limit, why, {sequence: why}]: see forge.wait_reasons. Holds until the next one
    host, disk   blocks held in host memory, and files

A commit also has: kept, [sequence, drafts] for each row with drafts; gained, [sequence, tokens]
where a row gained something else than its sample or its kept drafts and one more.

The lines of a server (forge.film.live) are not of every step. A plan then has `steps`, those since
the line before, if they are several, and rows are those of the last one. It has `totals` instead of
kept and gained: preemptions, evictions, copies, drafts, kept drafts and output tokens so far.
Every KEYFRAME_PLANS plans a line {"key": ...} has the whole state, so a reader may start there.
"""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]

KEYFRAME_PLANS = 256


class FilmState:
    """State of the engine after the lines so far: those after the header.

    tables       blocks of each sequence that runs, in order
    num_tokens   positions in use of each table
    slots        slot of each sequence that has had a row
    live         sequence -> (request, choice, class, prompt tokens, most output tokens)
    epochs       sequence -> how often a live sequence lost its table
    published    blocks whose content is found, used or cached
    wait         limit, its reason, and the reasons of sequences; None: nothing is said
    """

    def __init__(self, header: Line) -> None:
        self.num_blocks: int = header["blocks"]
        self.num_host_blocks = self.num_files = 0
        self.tables: dict[int, list[int]] = {}
        self.num_tokens: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.live: dict[int, tuple[int, int, int, int, int | None]] = {}
        self.epochs: dict[int, int] = {}
        self.published: set[int] = set()
        self.next_block: int | None = header["next"]
        self.wait: list[Any] | None = None
        self.plan_seq_ids: list[int] = []

    @property
    def used(self) -> set[int]:
        """Blocks in at least one table."""
        return {block for blocks in self.tables.values() for block in blocks}

    @property
    def cached(self) -> set[int]:
        """Blocks in no table whose content is kept."""
        return self.published - self.used

    @property
    def waiting(self) -> list[int]:
        """Sequences in the queue, in its order: class, resumed before new, then arrival."""
        queue = [seq_id for seq_id in self.live if seq_id not in self.tables]
        return sorted(queue, key=lambda s: (self.live[s][2], not self.epochs[s], s))

    def apply(self, line: Line) -> None:
        """Apply one line. Lines come in order."""
        if "key" in line:
            self._load(line["key"])
            return
        if "arrive" in line:
            self._arrive(line)
        elif "resize" in line:
            self._resize(line["resize"])
        elif "reset" in line:
            self.published.clear()
        for seq_id, _ in line.get("ended", ()):
            del self.live[seq_id], self.epochs[seq_id]
        for seq_id in line.get("free", ()):
            self._free(seq_id)
        if "plan" in line:
            self._apply_rows(line)
        for seq_id, num_tokens, *blocks in line.get("open", ()):
            self.tables[seq_id], self.num_tokens[seq_id] = blocks, num_tokens
        for seq_id, keep, *blocks in line.get("grow", ()):
            self.tables[seq_id][keep:] = blocks
        for seq_id, num_tokens in line.get("tokens", ()):
            self.num_tokens[seq_id] = num_tokens
        self.published.difference_update(line.get("evict", ()))
        self.published.update(line.get("publish", ()))
        self.next_block = line.get("next", self.next_block)
        self.wait = line.get("wait", self.wait)
        self.num_host_blocks = line.get("host", self.num_host_blocks)
        self.num_files = line.get("disk", self.num_files)

    def keyframe(self) -> Line:
        """Return the line that has the whole state."""
        state = {
            "blocks": self.num_blocks,
            "tables": [[s, self.num_tokens[s], *blocks] for s, blocks in self.tables.items()],
            "slots": [[s, slot] for s, slot in self.slots.items()],
            "live": [[s, self.epochs[s], *facts] for s, facts in self.live.items()],
            "published": sorted(self.published),
            "rows": self.plan_seq_ids,
            "next": self.next_block,
            "wait": self.wait,
            "host": self.num_host_blocks,
            "disk": self.num_files,
        }
        return {"key": state}

    def _arrive(self, line: Line) -> None:
        facts = (line.get("class", 0), line["prompt"], line["output"])
        for choice in range(line["n"]):
            seq_id = line["seq"] + choice
            self.live[seq_id] = (line["arrive"], choice, *facts)
            self.epochs[seq_id] = 0

    def _resize(self, sizes: list[int | None]) -> None:
        num_blocks = sizes[0]
        if num_blocks is not None:
            self.num_blocks = num_blocks
            self.published = {block for block in self.published if block < num_blocks}

    def _free(self, seq_id: int) -> None:
        for each in (self.tables, self.num_tokens, self.slots):
            each.pop(seq_id, None)  # a table that came and went between two lines is in none
        if seq_id in self.live:
            self.epochs[seq_id] += 1

    def _apply_rows(self, line: Line) -> None:
        rows = line.get("rows", self.plan_seq_ids)
        num_tokens = self.num_tokens
        for row in rows:
            if isinstance(row, int):
                num_tokens[row] += 1
            else:
                seq_id, slot, start, count, *_ = row
                self.slots[seq_id], num_tokens[seq_id] = slot, start + count
        if "rows" in line:
            self.plan_seq_ids = [row if isinstance(row, int) else row[0] for row in rows]

    def _load(self, state: Line) -> None:
        self.num_blocks = state["blocks"]
        self.tables = {s: blocks for s, _, *blocks in state["tables"]}
        self.num_tokens = {s: num_tokens for s, num_tokens, *_ in state["tables"]}
        self.slots = dict(map(tuple, state["slots"]))
        self.live = {s: tuple(facts) for s, _, *facts in state["live"]}
        self.epochs = {s: epoch for s, epoch, *_ in state["live"]}
        self.published = set(state["published"])
        self.plan_seq_ids = list(state["rows"])
        self.next_block, self.wait = state["next"], state["wait"]
        self.num_host_blocks, self.num_files = state["host"], state["disk"]
