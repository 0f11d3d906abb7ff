"""Batch: a plan as flat arrays, in the order a device wants its rows.

Owns the translation and nothing else: numpy in, numpy out, no device, no state. Rows of one token
come first, so that a decode kernel takes the front of the batch and a prefill kernel the rest.

    plan rows        [prefill of B] [decode A] [decode C]
    order             1 2 0                                 batch row -> row of the plan
    tokens            a c | b b b b b                       0 where a row before samples it
    sources           7 N | N N N N N                       batch row of the step before, or N
    positions         9 4 | 0 1 2 3 4
    drafted, drawn    tokens that are drafts, and where the draft model leaves them
    table changes     flat index into the tables, block     the fold of the plan's diffs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge.seam import Row, StepPlan

Ints: TypeAlias = "NDArray[np.int32]"


class Batch(NamedTuple):
    """One plan's rows. R rows, T tokens.

    order         [R] row of the plan for each row of the batch
    num_decode    rows at the front that have one token
    slots         [R]
    starts        [R] first position of each row
    lengths       [R] positions it computes
    firsts        [R] its first token
    tokens        [T] known inputs
    sources       [T] batch row of the step before that samples the input; `known` where known
    token_slots   [T]
    positions     [T]
    cells         [U] places in the flat block tables that change
    blocks        [U] what they become
    verified      rows of the batch that have drafts
    drafted       [D] tokens that the draft model draws
    drawn         [D] where: plan of the draft model * `known` + row of its batch
    """

    order: list[int]
    num_decode: int
    slots: Ints
    starts: Ints
    lengths: Ints
    firsts: Ints
    tokens: Ints
    sources: Ints
    token_slots: Ints
    positions: Ints
    cells: Ints
    blocks: Ints
    verified: list[int]
    drafted: Ints
    drawn: Ints


_NOTHING: Ints = np.zeros(0, np.int32)
_NO_DRAFTS: tuple[list[int], Ints, Ints] = ([], _NOTHING, _NOTHING)
EMPTY = Batch._make(([], 0, *([_NOTHING] * 10), *_NO_DRAFTS))


def batch_of(
    plan: StepPlan,
    before: Sequence[int],
    known: int,
    table_width: int,
    proposed: Sequence[Sequence[int]] = (),
) -> Batch:
    """The plan's rows as arrays.

    before        batch row of each plan row of the step before
    known         source of a token that needs none: the most rows a batch can have
    table_width   cells of one slot's table
    proposed      batch row of each row of the draft model's plans, of those that it has run. In the
                  place of a draft from any other stands token 0, which is as good as any
    """
    rows = plan.rows
    if not rows:
        return EMPTY
    _, _, slots, starts, tokens, refs, keeps, news, *_, drafts = zip(*rows, strict=True)
    cells: list[int] = []
    blocks: list[int] = []
    if any(news):
        for slot, keep, new in zip(slots, keeps, news, strict=True):
            first = slot * table_width + keep
            cells += range(first, first + len(new))
            blocks += new
    changes = (np.array(cells, np.int32), np.array(blocks, np.int32))
    lengths = [len(t) + len(r) for t, r in zip(tokens, refs, strict=True)]
    if any(drafts):
        lengths = [n + len(d) for n, d in zip(lengths, drafts, strict=True)]
    row_slots, row_starts = np.array(slots, np.int32), np.array(starts, np.int32)
    if max(lengths) == 1:
        count = len(rows)
        known_ids = np.array([t[0] if t else 0 for t in tokens], np.int32)
        sources = np.array([before[r[0].row] if r else known for r in refs], np.int32)
        ones: Ints = np.ones(count, np.int32)
        at: Ints = np.arange(count, dtype=np.int32)
        order = list(range(count))
        inputs = (known_ids, sources, row_slots, row_starts)
        return Batch(order, count, row_slots, row_starts, ones, at, *inputs, *changes, *_NO_DRAFTS)
    # Stable, so that rows of one token keep their order.
    order = sorted(range(len(rows)), key=lambda i: lengths[i] > 1)
    row_lengths = np.array(lengths, np.int32)[order]
    row_slots, row_starts = row_slots[order], row_starts[order]
    firsts = np.cumsum(row_lengths, dtype=np.int32) - row_lengths
    ordered = [rows[i] for i in order]
    flat, flat_sources, *last = _flat(ordered, before, known, proposed)
    within = np.arange(len(flat), dtype=np.int32) - np.repeat(firsts, row_lengths)
    inputs = (
        flat,
        flat_sources,
        np.repeat(row_slots, row_lengths),
        np.repeat(row_starts, row_lengths) + within,
    )
    count = lengths.count(1)
    return Batch(order, count, row_slots, row_starts, row_lengths, firsts, *inputs, *changes, *last)


def _flat(
    rows: Sequence[Row], before: Sequence[int], known: int, proposed: Sequence[Sequence[int]]
) -> tuple[Ints, Ints, list[int], Ints, Ints]:
    """Tokens, sources, verified, drafted and drawn, as Batch has them, of its rows in order."""
    flat: list[int] = []
    named: list[int] = []  # tokens that rows of the step before sample, and which rows these are
    samplers: list[int] = []
    drafted: list[int] = []
    drawn: list[int] = []
    for row in rows:
        flat += row.tokens
        if row.refs:
            named += range(len(flat), len(flat) + len(row.refs))
            samplers += [before[ref.row] for ref in row.refs]
            flat += [0] * len(row.refs)
        for draft in row.drafts:
            if isinstance(draft, int):
                flat.append(draft)
                continue
            plan, of = draft
            if plan < len(proposed):
                drafted.append(len(flat))
                drawn.append(plan * known + proposed[plan][of])
            flat.append(0)
    sources: Ints = np.full(len(flat), known, np.int32)
    sources[named] = samplers
    verified = [at for at, row in enumerate(rows) if row.drafts]
    drafts = (np.array(drafted, np.int32), np.array(drawn, np.int32))
    return np.array(flat, np.int32), sources, verified, *drafts
