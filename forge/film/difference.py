"""Differences between a scheduler and the state of a film, over any number of steps.

Owns what of a line is found by comparison. Knows no time and no event. forge.film.recorder follows
each call instead, and knows what a call can change; here tables may have been freed, opened again,
cut and grown in between.

    FilmState (line before) ──┐
    Scheduler (now) ──────────┴──► ended, free, rows, open, grow, tokens
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from forge.film.state import FilmState, Line
from forge.request import FinishReason
from forge.scheduler import Scheduler
from forge.seam import StepPlan


def find_ended(
    state: FilmState,
    scheduler: Scheduler,
    reasons: Mapping[tuple[int, int], FinishReason],
    left: Collection[int],
) -> Line:
    """Return the sequences that are no longer live, with their reasons.

    reasons   by request and choice
    left      requests whose client left
    """
    ended = []
    for seq_id in state.live.keys() - scheduler.sequences.keys():
        request_id, choice, *_ = state.live[seq_id]
        otherwise = FinishReason.ABORT if request_id in left else FinishReason.ERROR
        ended.append([seq_id, reasons.get((request_id, choice), otherwise).value])
    return {"ended": sorted(ended)} if ended else {}


def find_freed(state: FilmState, scheduler: Scheduler) -> Line:
    """Return the sequences that lost a table: one that is live as often as it did."""
    freed, tables = [], scheduler.pool.tables
    for seq_id, sequence in scheduler.sequences.items():
        freed += [seq_id] * (sequence.epoch - state.epochs[seq_id])
    freed += [s for s in state.tables if s not in tables and s not in scheduler.sequences]
    return {"free": freed} if freed else {}


def add_rows(line: Line, state: FilmState, plan: StepPlan) -> None:
    """Add the rows, unless they are those of the line before with one token more."""
    freed = set(line.get("free", ()))
    tokens, slots = state.num_tokens.get, state.slots.get
    entries: list[int | list[int]] = []
    for row in plan.rows:
        seq_id, start = row.seq_id, row.start
        count = len(row.tokens) + len(row.refs) + len(row.drafts)
        if (
            count == 1 == row.num_samples
            and tokens(seq_id) == start
            and slots(seq_id) == row.slot
            and seq_id not in freed
        ):
            entries.append(seq_id)
        else:
            drafts = len(row.drafts)
            entries.append([seq_id, row.slot, start, count, drafts, row.num_samples])
    if entries != state.plan_seq_ids:
        line["rows"] = entries


def add_tables(line: Line, state: FilmState, scheduler: Scheduler, plan: StepPlan | None) -> None:
    """Add new tables, how others changed, and the positions that the rows do not imply."""
    opened, grown, corrected = [], [], []
    freed, known = set(line.get("free", ())), state.tables
    num_tokens = dict(state.num_tokens)
    if plan is not None:
        num_tokens |= {row.seq_id: row.end for row in plan.rows}
    for seq_id, table in scheduler.pool.tables.items():
        before = known.get(seq_id)
        blocks = table.blocks
        if before is None or seq_id in freed:
            opened.append([seq_id, table.num_tokens, *blocks])
            continue
        if before != blocks:
            keep = num_common(before, blocks)
            grown.append([seq_id, keep, *blocks[keep:]])
        if num_tokens[seq_id] != table.num_tokens:
            corrected.append([seq_id, table.num_tokens])
    for name, changes in (("open", opened), ("grow", grown), ("tokens", corrected)):
        if changes:
            line[name] = changes


def num_common(before: list[int], after: list[int]) -> int:
    """Return the length of the longest common beginning."""
    if after[: len(before)] == before:  # most tables have grown
        return len(before)
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return index
    return min(len(before), len(after))
