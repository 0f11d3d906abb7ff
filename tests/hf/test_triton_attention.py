"""TritonAttention gives what plain torch gives, in a step and in a captured graph.

Plain torch stands in for both kernels. The tests cover all between: rows, order, buffers, padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from forge.models.hf.attention.interface import AttentionMetadata, RowSpan  # noqa: E402
from forge.models.hf.attention.triton_attention import (  # noqa: E402
    TritonAttention,
    prefill_row_numbers,
)
from forge.models.hf.kv_cache import KVCache  # noqa: E402
from tests.hf.test_graph_attention import (  # noqa: E402
    CASES,
    SLOTS,
    STEPS,
    TOKENS,
    CapturedCase,
    TorchDecodeAttention,
    attend_by_torch,
    pool_of,
)

pytestmark = pytest.mark.torch


class TorchPrefillAttention(NamedTuple):
    """The prefill kernel, in plain torch."""

    case: CapturedCase
    pool: KVCache

    def attend_into(self, out: Any, layer: int, queries: Any, rows: Any) -> None:
        assert layer == 1 and queries.is_contiguous()
        firsts = rows.query_starts.tolist()
        lengths = zip(rows.slots.tolist(), rows.kv_lens.tolist(), strict=True)
        for row, (slot, end) in enumerate(lengths):
            first, last = firsts[row : row + 2]
            if first < last:
                assert last - first > 1, "the decode kernel takes rows of one token"
                span = [RowSpan(slot, end - (last - first), end, 0)]
                out[first:last] = attend_by_torch(self.case, self.pool, span, queries[first:last])


class Rows(NamedTuple):
    """Rows of a step, rows of one token first."""

    spans: list[RowSpan]
    num_decode_rows: int
    num_tokens: int


def rows_of(bounds: list[tuple[int, int]]) -> Rows:
    spans, first = [], 0
    for slot, (start, end) in enumerate(bounds):
        spans.append(RowSpan(slot, start, end, first))
        first += end - start
    return Rows(spans, sum(end - start == 1 for start, end in bounds), first)


def attention_of(case: CapturedCase, pool: KVCache) -> TritonAttention:
    prefill: Any = TorchPrefillAttention(case, pool)
    decode: Any = TorchDecodeAttention(case, pool)
    return TritonAttention(pool, prefill, decode)


def draw_queries(case: CapturedCase, tokens: int) -> Any:
    draw = torch.Generator().manual_seed(2)
    shape = (tokens, case.spec.num_heads, case.spec.head_dim)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_step_gives_what_plain_torch_gives(case: CapturedCase, name: str):
    pool, rows = pool_of(case), rows_of(STEPS[name][1])
    attention = attention_of(case, pool)
    slots, kv_lens = (
        torch.tensor(each[: rows.num_decode_rows], dtype=torch.int32)
        for each in ([s.slot for s in rows.spans], [s.end for s in rows.spans])
    )
    attention.plan(AttentionMetadata(rows.spans, rows.num_decode_rows, slots, kv_lens))
    queries = draw_queries(case, rows.num_tokens)
    # Heads of a module's queries may lie anywhere.
    apart = queries.transpose(0, 1).contiguous().transpose(0, 1)
    out = attention.attend(1, apart, queries, queries)
    expected = attend_by_torch(case, pool, rows.spans, queries)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_one_graph_replays_every_step_one_after_the_other(case: CapturedCase):
    """Rows of the step before must not be read again."""
    pool = pool_of(case)
    slots, kv_lens = torch.zeros(2, TOKENS, dtype=torch.int32)
    (attention,) = attention_of(case, pool).build_graph_attentions(
        TOKENS, slots[:SLOTS], kv_lens[:SLOTS]
    )
    attention.plan(AttentionMetadata((), 0, slots[:0], slots[:0]))  # as it is captured
    queries = draw_queries(case, TOKENS)
    assert not attention.attend(1, queries, queries, queries).any()
    for _, bounds in STEPS.values():
        rows = rows_of(bounds)
        slots.zero_(), kv_lens.zero_()
        slots[: rows.num_decode_rows] = torch.arange(rows.num_decode_rows)
        ends = [span.end for span in rows.spans[: rows.num_decode_rows]]
        kv_lens[: rows.num_decode_rows] = torch.tensor(ends)
        assert attention.plan_replay(rows.spans, rows.num_decode_rows)
        out = attention.attend(1, queries, queries, queries)
        expected = attend_by_torch(case, pool, rows.spans, queries[: rows.num_tokens])
        torch.testing.assert_close(out[: rows.num_tokens], expected, rtol=1e-9, atol=1e-12)
        assert not out[rows.num_tokens :].any()


def test_a_graph_refuses_more_rows_than_its_buffers_have():
    case = CASES["plain"]
    slots = torch.zeros(2, dtype=torch.int32)
    (attention,) = attention_of(case, pool_of(case)).build_graph_attentions(TOKENS, slots, slots)
    rows = rows_of([(0, 2), (0, 2), (0, 2)])
    assert not attention.plan_replay(rows.spans, 0)
    assert attention.plan_replay(rows.spans[:2], 0)


def test_rows_after_the_last_are_empty_and_in_the_scratch_slot():
    rows = rows_of([(8, 9), (0, 3), (4, 6)])
    numbers = prefill_row_numbers(rows.spans[1:], 1, 4, scratch_slot=9)
    assert numbers.tolist() == [[1, 2, 9, 9, 9], [1, 4, 6, 6, 6], [3, 6, 0, 0, 0]]


def test_rows_that_do_not_follow_each_other_are_refused():
    with pytest.raises(AssertionError, match="does not begin at token 2"):
        prefill_row_numbers([RowSpan(0, 0, 3, 4)], 2, 4, scratch_slot=9)
