"""FilmRecorder: writes the film of a run while the engine makes it.

Owns what was written so far. Knows no file and no page: it passes lines to a function. It reads the
plan, the output and the public state of the scheduler after each call, and writes what changed.
The format is that of forge.film.state.

    Engine ──record_plan, record_commit, ...──► line ──► FilmState.apply ──► write

Always true: `state` is the pool after the last call, table for table and block for block.

A step without a decision costs a loop over the running sequences and two short lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from forge.blocks import BlockHash, BlockTable
from forge.film.state import KEYFRAME_PLANS, FilmState, Line
from forge.pause import PauseMode
from forge.request import Delta, FinishReason, Request
from forge.scheduler import Scheduler
from forge.seam import Row, StepOutput, StepPlan
from forge.sessions import SessionKey
from forge.version import VERSION


class DeviceSpan(NamedTuple):
    """Launch of a step, and its start and end on the device, in nanoseconds."""

    launched_ns: int
    begin_ns: int
    end_ns: int


def no_device_span() -> DeviceSpan | None:
    """Return None: nothing is known of the device's time."""
    return None


def film_header(scheduler: Scheduler, title: str, policy: str, clock: str) -> Line:
    """Return the first line of a film.

    clock   virtual: the times of a simulation. host: those at which plans and commits ended
    """
    config = scheduler.config
    return {
        "film": 1,
        "forge": VERSION,
        "title": title,
        "policy": policy,
        "clock": clock,
        "blocks": scheduler.pool.num_blocks,
        "next": scheduler.pool.next_free_block,
        "block_size": config.block_size,
        "slots": config.max_num_seqs,
        "budget": config.max_num_batched_tokens,
        "depth": config.depth,
        "host_blocks": config.host_tier.num_blocks if config.host_tier is not None else 0,
    }


# Fields of a row by index: attribute access is slower, and every row passes here.
SEQ_ID: Final = 0
SLOT: Final = 2
START: Final = 3
TOKENS: Final = 4
REFS: Final = 5
NUM_SAMPLES: Final = 8
DRAFTS: Final = 11

assert [Row._fields[i] for i in (SEQ_ID, SLOT, START, TOKENS, REFS, NUM_SAMPLES, DRAFTS)] == [
    *("seq_id", "slot", "start", "tokens", "refs", "num_samples", "drafts")
], "FilmRecorder reads a Row by index"


def _is_decode(rows: Sequence[Row]) -> bool:
    """Return whether each row computes and samples one token."""
    for row in rows:
        if row[NUM_SAMPLES] != 1 or row[DRAFTS] or len(row[TOKENS]) + len(row[REFS]) != 1:
            return False
    return True


def _gains_one_each(rows: Sequence[Row], deltas: Sequence[Delta]) -> bool:
    """Return whether each row has a delta of one token that ends nothing."""
    return len(deltas) == len(rows) and all(
        len(delta.tokens) == 1 and delta.finish is None for delta in deltas
    )


class FilmRecorder:
    """A Recorder that passes each line of the film to `write`, the header first.

    write         takes a line
    clock         integer nanoseconds
    device_span   returns the times of the step that was committed last
    """

    def __init__(
        self,
        write: Callable[[Line], object],
        scheduler: Scheduler,
        clock: Callable[[], int],
        header: Line,
        device_span: Callable[[], DeviceSpan | None] = no_device_span,
    ) -> None:
        self.state = FilmState(header)
        self.header = header
        self._write = write
        self._scheduler = scheduler
        self._clock = clock
        self._device_span = device_span
        self._tables: dict[int, BlockTable] = {}
        self._hashes: dict[int, BlockHash] = {}
        self._num_evictions = scheduler.pool.num_evictions
        self._seq_ids: dict[tuple[int, int], int] = {}
        self._in_flight: dict[int, StepPlan] = {}
        self._planned_us: dict[int, int] = {}
        self._num_plans = 0
        write(header)

    # Events from outside.

    def record_submit(self, request: Request) -> None:
        """Write the arrival of a request, at the time of the clock."""
        self.record_arrival(request, self._clock())

    def record_arrival(self, request: Request, at_ns: int) -> None:
        """Write the arrival of a request that was accepted."""
        sequences = self._scheduler.requests[request.id]
        for sequence in sequences:
            self._seq_ids[request.id, sequence.choice] = sequence.id
        params = request.params
        line: Line = {"arrive": request.id, "at": at_ns // 1000, "seq": sequences[0].id}
        line |= {"n": len(sequences), "prompt": len(request.prompt), "output": params.max_tokens}
        if request.priority:
            line["class"] = request.priority
        self._finish_line(line, ())

    def record_refusal(self, request: Request, at_ns: int, why: str) -> None:
        """Write a request that was refused, and why."""
        line = {"refused": request.id, "at": at_ns // 1000, "prompt": len(request.prompt)}
        self._finish_line({**line, "output": request.params.max_tokens, "why": why}, ())

    def record_abort(self, request_id: int) -> None:
        """Write that the client left."""
        self._finish_line({"left": request_id, "at": self._now_us()}, ())

    def record_reset(self) -> None:
        """Write that the prefix cache was reset."""
        self._hashes.clear()
        self._finish_line({"reset": True, "at": self._now_us()}, ())

    def record_pause(self, mode: PauseMode) -> None:
        """Write that the engine was paused."""
        self._finish_line({"pause": mode.value, "at": self._now_us()}, ())

    def record_resume(self) -> None:
        """Write the end of the pause."""
        self._finish_line({"resume": True, "at": self._now_us()}, ())

    def record_weights(self, version: str, namespace: str) -> None:
        """Write that new weights dropped the content of all blocks, without their version."""
        self._hashes.clear()
        self._finish_line({"reset": True, "weights": True, "at": self._now_us()}, ())

    def record_sleep(self, level: int) -> None:
        """Write that the model sleeps, which drops the content of all blocks."""
        self._hashes.clear()
        self._finish_line({"reset": True, "sleep": level, "at": self._now_us()}, ())

    def record_resize(self, num_blocks: int | None, num_host_blocks: int | None) -> None:
        """Write the new sizes of the pools."""
        if num_blocks is not None:
            self._hashes = {b: h for b, h in self._hashes.items() if b < num_blocks}
        self._finish_line({"resize": [num_blocks, num_host_blocks], "at": self._now_us()}, ())

    def record_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Write the number of files that are there at the start."""
        self._finish_line({"files": len(keys), "at": self._now_us()}, ())

    def record_end_session(self, key: SessionKey) -> None:
        """Write that a session ended, without its name."""
        self._finish_line({"session": "ended", "at": self._now_us()}, ())

    def record_expire_session(self, key: SessionKey, last_turn: int) -> None:
        """Write that a session expired, without its name."""
        self._finish_line({"session": "expired", "at": self._now_us()}, ())

    def record_void(self, why: str) -> None:
        """Write that every plan in flight is void, and why."""
        self._in_flight.clear()
        self._planned_us.clear()
        self._finish_line({"void": why, "at": self._now_us()}, ())

    # Steps.

    def record_plan(self, plan: StepPlan | None) -> None:
        """Write a plan; nothing for None. Every KEYFRAME_PLANS plans the whole state precedes."""
        if plan is None:
            return
        if self._num_plans and self._num_plans % KEYFRAME_PLANS == 0:
            self._write(self.state.keyframe())
        self._num_plans += 1
        self._in_flight[plan.step] = plan
        now_us = self._planned_us[plan.step] = self._now_us()
        line: Line = {"plan": plan.step, "at": now_us}
        for name in ("admitted", "preempted", "copies"):
            events = getattr(plan, name)
            if events:
                line[name] = [list(event) for event in events]
        if plan.stores or plan.loads or plan.spills or plan.fetches:
            line["stores"] = [[move.block, move.host_block] for move in plan.stores]
            line["loads"] = [[move.seq_id, move.block, move.host_block] for move in plan.loads]
            line["files"] = [len(plan.spills), len(plan.fetches)]
        reasons = self._scheduler.wait_reasons
        waiting = self._scheduler.waiting
        wait = None
        if waiting:
            why = {str(s.id): reasons.by_seq_id[s.id] for s in waiting if s.id in reasons.by_seq_id}
            wait = [*(reasons.limit or ("", "")), why]
        if wait != self.state.wait:
            line["wait"] = wait
        self._finish_line(line, plan.rows)

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Write a commit: when it ended, the drafts that were kept, and what each row gained."""
        plan = self._in_flight.pop(output.step)
        line: Line = {"done": output.step, "at": self._now_us()}
        planned_us = self._planned_us.pop(output.step)
        span = self._device_span()
        if span is not None:
            line["device"] = [each // 1000 - planned_us for each in span]
        reasons: dict[int, str] = {}
        if not (_is_decode(plan.rows) and _gains_one_each(plan.rows, deltas)):
            self._add_gains(line, plan.rows, output, deltas)
            reasons = {
                self._seq_ids[delta.request_id, delta.choice]: delta.finish.value
                for delta in deltas
                if delta.finish is not None
            }
        touched = [load.block for load in plan.loads]
        size, tables = self._scheduler.config.block_size, self._scheduler.pool.tables
        for row in plan.rows:  # those that have filled blocks may have published them
            start = row[START]
            if start % size + len(row[TOKENS]) + len(row[REFS]) + len(row[DRAFTS]) >= size:
                table = tables.get(row.seq_id)
                if table is not None:
                    touched += table.blocks[start // size : row.end // size]
        self._finish_line(line, (), touched, reasons)

    def _add_gains(
        self, line: Line, rows: Sequence[Row], output: StepOutput, deltas: Sequence[Delta]
    ) -> None:
        """Add the drafts that were kept, and the gains that do not follow from the row."""
        gained = {self._seq_ids[d.request_id, d.choice]: len(d.tokens) for d in deltas if d.tokens}
        kept, exceptions = [], []
        for row, out in zip(rows, output.rows, strict=True):
            seq_id, expected = row.seq_id, min(1, row.num_samples)
            if row.drafts:
                expected = len(out.tokens)
                kept.append([seq_id, max(0, expected - 1)])
            if gained.get(seq_id, 0) != expected:
                exceptions.append([seq_id, gained.get(seq_id, 0)])
        if kept:
            line["kept"] = kept
        if exceptions:
            line["gained"] = exceptions

    # Changes of the pool.

    def _now_us(self) -> int:
        return self._clock() // 1000

    def _finish_line(
        self,
        line: Line,
        rows: Sequence[Row],
        touched: Iterable[int] = (),
        reasons: dict[int, str] | None = None,
    ) -> None:
        """Add what has changed since the line before, apply the line to `state`, and write it.

        touched   blocks that may have been published
        reasons   why sequences ended; the others were aborted or failed with their step
        """
        state, pool = self.state, self._scheduler.pool
        self._add_ended(line, reasons or {})
        blocks = set(touched)
        freed = self._freed_seq_ids("preempted" in line)
        for seq_id in freed:
            blocks.update(state.tables[seq_id])
            del self._tables[seq_id]
        if freed:
            line["free"] = freed
        if "plan" in line:
            self._add_rows(line, rows, freed)
        self._add_tables(line, rows, blocks)
        self._add_contents(line, blocks)
        for name, value, known in (
            ("next", pool.next_free_block, state.next_block),
            ("host", self._scheduler.host_cache.num_held_blocks, state.num_host_blocks),
            ("disk", self._scheduler.disk_cache.num_files, state.num_files),
        ):
            if value != known:
                line[name] = value
        state.apply(line)
        self._write(line)

    def _add_ended(self, line: Line, reasons: dict[int, str]) -> None:
        live, sequences = self.state.live, self._scheduler.sequences
        arrived = "arrive" in line
        if len(live) + (line["n"] if arrived else 0) == len(sequences):
            return
        otherwise = FinishReason.ABORT if "left" in line else FinishReason.ERROR
        ended = [seq_id for seq_id in live if seq_id not in sequences]
        line["ended"] = [[seq_id, reasons.get(seq_id, otherwise.value)] for seq_id in ended]
        for seq_id in ended:
            request_id, choice, *_ = live[seq_id]
            del self._seq_ids[request_id, choice]

    def _freed_seq_ids(self, may_be_opened_again: bool) -> list[int]:
        """Return the sequences whose table was freed.

        Only a plan that names a preemption may have opened the table of such a sequence again.
        """
        known, tables = self._tables, self._scheduler.pool.tables
        if may_be_opened_again:
            return [s for s, table in known.items() if tables.get(s) is not table]
        if known.keys() <= tables.keys():
            return []
        return [seq_id for seq_id in known if seq_id not in tables]

    def _add_rows(self, line: Line, rows: Sequence[Row], freed: Sequence[int]) -> None:
        """Add the rows, unless they are those of the plan before with one token more."""
        state, gone = self.state, set(freed)
        seq_ids = [row[SEQ_ID] for row in rows]
        if seq_ids == state.plan_seq_ids and not freed and _is_decode(rows):
            tokens, slots = state.num_tokens.get, state.slots.get
            if all(tokens(r[SEQ_ID]) == r[START] and slots(r[SEQ_ID]) == r[SLOT] for r in rows):
                return
        entries: list[int | list[int]] = []
        for row in rows:
            seq_id, count = row.seq_id, row.end - row.start
            if (
                count == 1 == row.num_samples
                and not row.drafts
                and seq_id not in gone
                and state.num_tokens.get(seq_id) == row.start
                and state.slots.get(seq_id) == row.slot
            ):
                entries.append(seq_id)
                continue
            entries.append([seq_id, row.slot, row.start, count, len(row.drafts), row.num_samples])
        line["rows"] = entries

    def _add_tables(self, line: Line, rows: Sequence[Row], blocks: set[int]) -> None:
        """Add new tables, and how others changed; collect the blocks that came and went.

        Within a call a table either grows or is cut, so its first blocks are those it had. Rows
        that are left out imply the tokens of their tables; a table without a row may load.
        """
        state, tables = self.state, self._scheduler.pool.tables
        opened, grown, corrected = [], [], []
        new_ids = tables.keys() - self._tables.keys()
        for seq_id in sorted(new_ids):
            table = self._tables[seq_id] = tables[seq_id]
            opened.append([seq_id, table.num_tokens, *table.blocks])
            blocks.update(table.blocks)
        known_tables, known_tokens = state.tables, state.num_tokens
        gains = len(rows) == len(tables) and "rows" not in line
        ends = {} if gains else {row.seq_id: row.end for row in rows}
        for seq_id, table in tables.items():
            if seq_id in new_ids:
                continue
            before = known_tables[seq_id]
            if len(before) != len(table.blocks):
                keep = min(len(before), len(table.blocks))
                grown.append([seq_id, keep, *table.blocks[keep:]])
                blocks.update(before[keep:], table.blocks[keep:])
            if not gains and table.num_tokens != ends.get(seq_id, known_tokens[seq_id]):
                corrected.append([seq_id, table.num_tokens])
        for name, changes in (("open", opened), ("grow", grown), ("tokens", corrected)):
            if changes:
                line[name] = changes

    def _add_contents(self, line: Line, blocks: set[int]) -> None:
        """Add the blocks whose content is found from now on, or no longer.

        blocks   those of tables that changed. A table that grew and was freed since the line before
                 has evicted others: then all are compared
        """
        pool = self._scheduler.pool
        evicted, published = self._compare_contents(blocks)
        if len(evicted) != pool.num_evictions - self._num_evictions:
            others = self._compare_contents(self._hashes.keys() - blocks)
            evicted, published = evicted + others[0], published + others[1]
        self._num_evictions = pool.num_evictions
        for name, changed in (("evict", evicted), ("publish", published)):
            if changed:
                line[name] = sorted(changed)

    def _compare_contents(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return those of these blocks that lost a known content, and those that got one."""
        hashes, pool = self._hashes, self._scheduler.pool
        evicted, published = [], []
        for block in blocks:
            if block >= pool.num_blocks:
                continue
            block_hash, known = pool.hash_of(block), hashes.get(block)
            if block_hash == known:
                continue
            if known is not None:
                evicted.append(block)
                del hashes[block]
            if block_hash is not None:
                published.append(block)
                hashes[block] = block_hash
        return evicted, published
