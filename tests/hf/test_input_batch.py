"""A plan as flat arrays: the order of its rows, where inputs come from, which blocks change.

The property at the end runs random worlds on the embedded model and folds their plans twice: by
the plans' own diffs, and by the arrays made of them.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from forge.models.hf.runner.input_batch import EMPTY_BATCH, InputBatch, build_input_batch  # noqa: E402
from forge.models.hf.runner.model_runner import invert_order  # noqa: E402
from forge.seam import DraftRef, Row, StepPlan, TokenRef  # noqa: E402
from tests.core.worlds import draw_world, run_world  # noqa: E402

pytestmark = pytest.mark.torch

KNOWN = 9
WIDTH = 4


def batch(*rows: Row, before: tuple[int, ...] = ()) -> InputBatch:
    return build_input_batch(StepPlan(5, rows, 64, 16), before, KNOWN, WIDTH)


def to_lists(found: InputBatch) -> dict[str, Any]:
    """Return every field as plain numbers; arrays must be int32."""
    arrays = {name: value for name, value in found._asdict().items() if hasattr(value, "dtype")}
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
    return found._asdict() | {name: array.tolist() for name, array in arrays.items()}


def test_rows_of_one_token_stay_in_the_plans_order():
    found = batch(
        Row(7, 0, slot=3, start=9, tokens=(40,)),
        Row(4, 0, slot=0, start=4, tokens=(41,)),
        Row(5, 0, slot=2, start=0, tokens=(42,)),
    )
    assert to_lists(found) == {
        "plan_rows": [0, 1, 2],
        "num_decode_rows": 3,
        "slots": [3, 0, 2],
        "starts": [9, 4, 0],
        "query_lens": [1, 1, 1],
        "query_starts": [0, 1, 2],
        "tokens": [40, 41, 42],
        "source_rows": [KNOWN, KNOWN, KNOWN],
        "token_slots": [3, 0, 2],
        "positions": [9, 4, 0],
        "table_indices": [],
        "table_block_ids": [],
        "rows_with_drafts": [],
        "draft_token_indices": [],
        "draft_sources": [],
    }


def test_rows_of_one_token_come_first_and_both_kinds_keep_their_order():
    found = batch(
        Row(0, 0, slot=1, start=0, tokens=(10, 11, 12)),
        Row(1, 0, slot=2, start=9, tokens=(20,)),
        Row(2, 0, slot=3, start=16, tokens=(30, 31)),
        Row(3, 0, slot=0, start=4, tokens=(40,)),
    )
    assert to_lists(found) == {
        "plan_rows": [1, 3, 0, 2],
        "num_decode_rows": 2,
        "slots": [2, 0, 1, 3],
        "starts": [9, 4, 0, 16],
        "query_lens": [1, 1, 3, 2],
        "query_starts": [0, 1, 2, 5],
        "tokens": [20, 40, 10, 11, 12, 30, 31],
        "source_rows": [KNOWN] * 7,
        "token_slots": [2, 0, 1, 1, 1, 3, 3],
        "positions": [9, 4, 0, 1, 2, 16, 17],
        "table_indices": [],
        "table_block_ids": [],
        "rows_with_drafts": [],
        "draft_token_indices": [],
        "draft_sources": [],
    }


def test_a_token_that_is_not_known_names_the_batch_row_that_samples_it():
    """Rows 0, 1, 2 of plan 4 were rows 2, 0, 1 of its batch."""
    found = batch(
        Row(0, 0, slot=0, start=3, refs=(TokenRef(4, 0),)),
        Row(1, 0, slot=1, start=3, tokens=(50,)),
        Row(2, 0, slot=2, start=3, refs=(TokenRef(4, 2),)),
        before=(2, 0, 1),
    )
    assert found.source_rows.tolist() == [2, KNOWN, 1]
    assert found.tokens.tolist() == [0, 50, 0]


def test_with_longer_rows_in_the_batch_a_token_ref_resolves_to_the_same_row():
    found = batch(
        Row(0, 0, slot=0, start=0, tokens=(10, 11)),
        Row(1, 0, slot=1, start=3, refs=(TokenRef(4, 1),)),
        Row(2, 0, slot=2, start=3, tokens=(12,), refs=(TokenRef(4, 0),)),
        before=(1, 0),
    )
    assert found.plan_rows == [1, 0, 2]
    assert found.tokens.tolist() == [0, 10, 11, 12, 0]
    assert found.source_rows.tolist() == [0, KNOWN, KNOWN, KNOWN, 1]
    assert found.positions.tolist() == [3, 0, 1, 3, 4]


@pytest.mark.parametrize("more", [(), (62, 63)], ids=["alone", "with a longer row"])
def test_table_updates_follow_the_blocks_that_stay(more: tuple[int, ...]):
    found = batch(
        Row(0, 0, slot=2, start=16, tokens=(60,), keep=1, new_blocks=(30,)),
        Row(1, 0, slot=0, start=5, tokens=(61, *more), keep=1),
        Row(2, 0, slot=1, start=0, tokens=(64,), keep=0, new_blocks=(7, 5, 6)),
    )
    assert found.table_indices.tolist() == [2 * WIDTH + 1, WIDTH, WIDTH + 1, WIDTH + 2]
    assert found.table_block_ids.tolist() == [30, 7, 5, 6]


def test_a_plan_without_rows_is_the_empty_batch():
    assert batch() is EMPTY_BATCH
    assert to_lists(EMPTY_BATCH) == {name: [] for name in InputBatch._fields} | {
        "num_decode_rows": 0
    }


def test_inverse_says_where_each_row_of_the_plan_stands():
    assert invert_order([1, 3, 0, 2]) == [2, 0, 3, 1]


def test_drafts_follow_the_other_inputs_and_a_models_drafts_are_read_where_it_left_them():
    rows = (
        Row(0, 0, slot=0, start=9, tokens=(10,), drafts=(DraftRef(0, 1), DraftRef(1, 0))),
        Row(1, 0, slot=1, start=3, refs=(TokenRef(4, 0),)),
        Row(2, 0, slot=2, start=5, tokens=(11,), drafts=(12, DraftRef(0, 0))),
    )
    plan = StepPlan(5, rows, 64, 16)
    found = build_input_batch(plan, (2,), KNOWN, WIDTH, draft_batch_rows=((2, 3), (1,)))
    assert found.plan_rows == [1, 0, 2] and found.rows_with_drafts == [1, 2]
    assert found.tokens.tolist() == [0, 10, 0, 0, 11, 12, 0]
    assert found.source_rows.tolist() == [2, *[KNOWN] * 6]
    assert found.positions.tolist() == [3, 9, 10, 11, 5, 6, 7]
    assert (found.draft_token_indices.tolist(), found.draft_sources.tolist()) == (
        [2, 3, 6],
        [3, KNOWN + 1, 2],
    )
    # Where plan 1 of the draft model has not run, token 0 stands for its draft.
    found = build_input_batch(plan, (2,), KNOWN, WIDTH, draft_batch_rows=((2, 3),))
    assert (found.draft_token_indices.tolist(), found.draft_sources.tolist()) == ([2, 6], [3, 2])


def check_inputs(plan: StepPlan, found: InputBatch, before: list[int], known: int) -> None:
    """Each row's part of the arrays is what the row says."""
    assert sorted(found.plan_rows) == list(range(len(plan.rows)))
    lengths = [plan.rows[index].end - plan.rows[index].start for index in found.plan_rows]
    assert [n == 1 for n in lengths] == sorted((n == 1 for n in lengths), reverse=True)
    assert found.num_decode_rows == lengths.count(1) and found.query_lens.tolist() == lengths
    for at, index in enumerate(found.plan_rows):
        row = plan.rows[index]
        mine = slice(found.query_starts[at], found.query_starts[at] + lengths[at])
        drafts = [draft if isinstance(draft, int) else 0 for draft in row.drafts]
        assert found.tokens[mine].tolist() == [*row.tokens, *(0 for _ in row.refs), *drafts]
        refs = [before[ref.row] for ref in row.refs] + [known for _ in row.drafts]
        assert found.source_rows[mine].tolist() == [known for _ in row.tokens] + refs
        assert found.positions[mine].tolist() == list(range(row.start, row.end))
        assert found.token_slots[mine].tolist() == [row.slot] * lengths[at]
        assert (found.slots[at], found.starts[at]) == (row.slot, row.start)


def test_the_arrays_of_random_plans_fold_to_the_tables_of_their_diffs():
    kept = rebound = named = mixed = drafted = 0
    for seed in range(40):
        world = draw_world(seed)
        slots, width = world.config.max_num_seqs, world.config.max_model_len
        tables: dict[int, list[int]] = {}
        flat = np.full(slots * width, -1, np.int32)
        before: list[int] = []
        for plan in (entry for entry in run_world(world).log if isinstance(entry, StepPlan)):
            found = build_input_batch(plan, before, slots, width)
            check_inputs(plan, found, before, slots)
            before = invert_order(found.plan_rows)
            flat[found.table_indices] = found.table_block_ids
            for row in plan.rows:
                tables.setdefault(row.slot, [])[row.keep :] = row.new_blocks
                assert (
                    flat.reshape(slots, width)[row.slot, : len(tables[row.slot])].tolist()
                    == (tables[row.slot])
                )
                kept += bool(row.keep and row.new_blocks)
                rebound += row.bind is not None
                named += bool(row.refs)
            mixed += 0 < found.num_decode_rows < len(plan.rows)
            drafted += bool(found.rows_with_drafts)
    assert min(kept, rebound, named, mixed, drafted) > 50, (kept, rebound, named, mixed, drafted)
