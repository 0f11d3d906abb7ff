"""InputBatch: a plan as flat arrays, in the order in which the device runs its rows.

Owns the translation and nothing else: numpy out, no device, no state. Rows of one token come
first, so that a decode kernel takes the front of the batch and a prefill kernel the rest.

    plan rows        [prefill of B] [decode A] [decode C]
    plan_rows         1 2 0                                 row of the batch -> row of the plan
    tokens            a c | b b b b b                       0 where an earlier step samples it
    source_rows       7 N | N N N N N                       row of the previous batch, or N
    positions         9 4 | 0 1 2 3 4
    draft_token_indices, draft_sources                      inputs that the draft model sampled
    table_indices     index into the flat block tables      what changes in them
    table_block_ids   block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forge.models.hf.buffers import Int32Array
from forge.seam import Row, StepPlan


class InputBatch(NamedTuple):
    """Rows of one plan: R rows, T tokens, U updates of block tables, D drafts of the draft model.

    plan_rows             [R] row of the plan for each row of the batch
    num_decode_rows       rows at the front that have one token
    slots                 [R]
    starts                [R] first position of each row
    query_lens            [R] positions that the row computes
    query_starts          [R] index of its first token
    tokens                [T] ids of inputs; 0 where the host does not know them yet
    source_rows           [T] row of the previous batch that samples the input; `no_source` where
                          the host knows it
    token_slots           [T] slot of each token's row
    positions             [T] position of each token in its sequence
    table_indices         [U] indices into the flat block tables
    table_block_ids       [U] block that each of them becomes
    rows_with_drafts      rows of the batch that have drafts
    draft_token_indices   [D] tokens that the draft model samples
    draft_sources         [D] where it leaves them: plan * `no_source` + row of that plan's batch
    """

    plan_rows: list[int]
    num_decode_rows: int
    slots: Int32Array
    starts: Int32Array
    query_lens: Int32Array
    query_starts: Int32Array
    tokens: Int32Array
    source_rows: Int32Array
    token_slots: Int32Array
    positions: Int32Array
    table_indices: Int32Array
    table_block_ids: Int32Array
    rows_with_drafts: list[int]
    draft_token_indices: Int32Array
    draft_sources: Int32Array


_EMPTY_ARRAY: Int32Array = np.zeros(0, np.int32)
_NO_DRAFTS: tuple[list[int], Int32Array, Int32Array] = ([], _EMPTY_ARRAY, _EMPTY_ARRAY)
EMPTY_BATCH = InputBatch._make(([], 0, *([_EMPTY_ARRAY] * 10), *_NO_DRAFTS))


def build_input_batch(
    plan: StepPlan,
    previous_batch_rows: Sequence[int],
    no_source: int,
    table_width: int,
    draft_batch_rows: Sequence[Sequence[int]] = (),
) -> InputBatch:
    """Return the plan's rows as arrays.

    previous_batch_rows   row of the batch for each row of the previous plan
    no_source             source of a token that the host knows: the most rows a batch can have
    table_width           blocks of one slot's block table
    draft_batch_rows      for each plan that the draft model has run: row of the batch for each of
                          its rows. A draft of any other plan is token 0 and is never accepted
    """
    rows = plan.rows
    if not rows:
        return EMPTY_BATCH
    _, _, slots, starts, tokens, refs, keeps, new_blocks, *_, drafts = zip(*rows, strict=True)
    table_indices: list[int] = []
    table_block_ids: list[int] = []
    if any(new_blocks):
        for slot, keep, block_ids in zip(slots, keeps, new_blocks, strict=True):
            first_index = slot * table_width + keep
            table_indices += range(first_index, first_index + len(block_ids))
            table_block_ids += block_ids
    table_updates = (np.array(table_indices, np.int32), np.array(table_block_ids, np.int32))
    lengths = [len(t) + len(r) for t, r in zip(tokens, refs, strict=True)]
    if any(drafts):
        lengths = [n + len(d) for n, d in zip(lengths, drafts, strict=True)]
    row_slots, row_starts = np.array(slots, np.int32), np.array(starts, np.int32)
    if max(lengths) == 1:
        num_decode_rows = len(rows)
        decode_token_ids = np.array([t[0] if t else 0 for t in tokens], np.int32)
        decode_sources = np.array(
            [previous_batch_rows[r[0].row] if r else no_source for r in refs], np.int32
        )
        ones: Int32Array = np.ones(num_decode_rows, np.int32)
        row_indices: Int32Array = np.arange(num_decode_rows, dtype=np.int32)
        plan_rows = list(range(num_decode_rows))
        inputs = (decode_token_ids, decode_sources, row_slots, row_starts)
        return InputBatch(
            plan_rows,
            num_decode_rows,
            row_slots,
            row_starts,
            ones,
            row_indices,
            *inputs,
            *table_updates,
            *_NO_DRAFTS,
        )
    # The sort is stable: rows of one token keep their order.
    plan_rows = sorted(range(len(rows)), key=lambda i: lengths[i] > 1)
    query_lens = np.array(lengths, np.int32)[plan_rows]
    row_slots, row_starts = row_slots[plan_rows], row_starts[plan_rows]
    query_starts = np.cumsum(query_lens, dtype=np.int32) - query_lens
    ordered = [rows[i] for i in plan_rows]
    token_ids, source_rows, *draft_fields = _flatten_tokens(
        ordered, previous_batch_rows, no_source, draft_batch_rows
    )
    offsets = np.arange(len(token_ids), dtype=np.int32) - np.repeat(query_starts, query_lens)
    inputs = (
        token_ids,
        source_rows,
        np.repeat(row_slots, query_lens),
        np.repeat(row_starts, query_lens) + offsets,
    )
    num_decode_rows = lengths.count(1)
    return InputBatch(
        plan_rows,
        num_decode_rows,
        row_slots,
        row_starts,
        query_lens,
        query_starts,
        *inputs,
        *table_updates,
        *draft_fields,
    )


def _flatten_tokens(
    rows: Sequence[Row],
    previous_batch_rows: Sequence[int],
    no_source: int,
    draft_batch_rows: Sequence[Sequence[int]],
) -> tuple[Int32Array, Int32Array, list[int], Int32Array, Int32Array]:
    """Return tokens, source rows, rows with drafts, draft token indices and draft sources.

    rows   rows of the plan, in the order of the batch
    """
    token_ids: list[int] = []
    # Inputs that the previous step samples, and the rows of its batch that sample them.
    ref_indices: list[int] = []
    ref_sources: list[int] = []
    draft_token_indices: list[int] = []
    draft_sources: list[int] = []
    for row in rows:
        token_ids += row.tokens
        if row.refs:
            ref_indices += range(len(token_ids), len(token_ids) + len(row.refs))
            ref_sources += [previous_batch_rows[ref.row] for ref in row.refs]
            token_ids += [0] * len(row.refs)
        for draft in row.drafts:
            if isinstance(draft, int):
                token_ids.append(draft)
                continue
            plan, draft_row = draft
            if plan < len(draft_batch_rows):
                draft_token_indices.append(len(token_ids))
                draft_sources.append(plan * no_source + draft_batch_rows[plan][draft_row])
            token_ids.append(0)
    source_rows: Int32Array = np.full(len(token_ids), no_source, np.int32)
    source_rows[ref_indices] = ref_sources
    rows_with_drafts = [batch_row for batch_row, row in enumerate(rows) if row.drafts]
    draft_arrays = (np.array(draft_token_indices, np.int32), np.array(draft_sources, np.int32))
    return np.array(token_ids, np.int32), source_rows, rows_with_drafts, *draft_arrays
