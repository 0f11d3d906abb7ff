"""Attention of captured graphs gives what plain torch gives, in whichever graph a step runs.

FlashInfer is replaced by a wrapper that reads the same plan and the same blocks, slowly, and the
Triton decode kernel by plain torch. The tests cover all between: buffers, order, lengths, padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.attention import flashinfer_prefill  # noqa: E402
from forge.models.hf.attention.graph_attention import (  # noqa: E402
    GraphPrefillKernels,
    MixedGraphAttention,
    PrefillGraphAttention,
    SplitGraphAttention,
    build_graph_attentions,
)
from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, RowSpan  # noqa: E402
from forge.models.hf.attention.reference import TorchAttention, attend_sequence  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
BLOCK, SLOTS, TOKENS = 4, 12, 96


class FakeWrapper:
    """FlashInfer's paged wrapper in plain torch: rows of a plan, one after the other."""

    def __init__(self, workspace: Any, layout: str, **places: Any) -> None:
        assert layout == "HND" and places["use_cuda_graph"]
        self._places = places
        self._plan_info: list[Any] = []

    def plan(self, firsts: Any, pages: Any, ids: Any, last: Any, *shape: int, **how: Any) -> None:
        assert len(firsts) == len(self._places["qo_indptr_buf"])
        assert len(pages) == len(self._places["paged_kv_indptr_buf"])
        assert len(last) == len(self._places["paged_kv_last_page_len_buf"])
        assert len(ids) <= len(self._places["paged_kv_indices_buf"])
        assert how["causal"]
        self._plan_info = [int(firsts[-1])]
        self._rows = [each.tolist() for each in (firsts, pages, ids, last)]
        self._shape, self._how = shape, how

    def run(self, queries: Any, pages: Any, *, out: Any) -> None:
        firsts, bounds, ids, last = self._rows
        heads, kv_heads, head_dim, size = self._shape
        spec = LayerSpec(
            heads,
            kv_heads,
            head_dim,
            self._how["sm_scale"],
            self._how["window_left"] + 1,
            self._how["logits_soft_cap"] or 0.0,
        )
        for row, count in enumerate(last):
            mine, own = slice(*firsts[row : row + 2]), ids[slice(*bounds[row : row + 2])]
            if not own:
                assert mine.start == mine.stop
                continue
            end = (len(own) - 1) * size + count
            k, v = (each[own].transpose(0, 1).flatten(1, 2)[:, :end] for each in pages)
            start = end - (mine.stop - mine.start)
            q = queries[mine].transpose(0, 1)
            behind = torch.arange(start, end)[:, None] - torch.arange(end)
            out[mine] = attend_sequence(q, k, v, behind, spec).transpose(0, 1)


class CapturedCase(NamedTuple):
    """One layer; `page_dim` is the head size in the cache."""

    spec: LayerSpec
    page_dim: int = 8


CASES = {
    "plain": CapturedCase(LayerSpec(4, 2, 8, 0.4)),
    "heads narrower than pages": CapturedCase(LayerSpec(4, 2, 6, 0.4)),
    "window": CapturedCase(LayerSpec(4, 2, 8, 0.4, window=7)),
    "soft cap": CapturedCase(LayerSpec(2, 2, 8, 0.4, softcap=1.5)),
}

STEPS: dict[str, tuple[type, list[tuple[int, int]]]] = {
    "a prompt": (PrefillGraphAttention, [(0, 50)]),
    "four prompts": (PrefillGraphAttention, [(0, 9), (0, 30), (0, 7), (0, 50)]),
    "prompts that fill it": (PrefillGraphAttention, [(0, 60), (0, 36)]),
    "a chunk": (MixedGraphAttention, [(13, 60)]),
    "a chunk with rows of one token": (
        SplitGraphAttention,
        [(30, 31), (0, 1), (59, 60), (21, 80)],
    ),
    "the same, full": (SplitGraphAttention, [(30, 31), (59, 60), (3, 97)]),
    "four chunks with as many as there may be": (
        SplitGraphAttention,
        [(5 * i, 5 * i + 1) for i in range(8)] + [(0, 7), (9, 20), (40, 60), (2, 5)],
    ),
    "five chunks with a row of one token": (
        MixedGraphAttention,
        [(70, 71), *[(3 * i, 5 * i + 9) for i in range(5)]],
    ),
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(flashinfer_prefill, "pin", torch.from_numpy)
    with torch.inference_mode():
        yield


def pool_of(case: CapturedCase) -> KVCache:
    """Return a cache of noise, 0 in the padding of heads, each slot's blocks shuffled."""
    draw = torch.Generator().manual_seed(1)
    pool = KVCache(
        KVCacheSpec(2, case.spec.num_kv_heads, case.page_dim, torch.float64),
        num_blocks=SLOTS * 30,
        block_size=BLOCK,
        num_slots=SLOTS,
        max_model_len=30 * BLOCK,
        device=CPU,
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=draw, dtype=torch.float64))
    pool.data[..., case.spec.head_dim :] = 0.0
    pool.block_tables[:SLOTS] = torch.randperm(SLOTS * 30, generator=draw).view(SLOTS, 30)
    return pool


def attend_by_torch(case: CapturedCase, pool: KVCache, spans: list[RowSpan], queries: Any) -> Any:
    """Return plain torch's outputs, from a cache without padding."""
    head_dim = case.spec.head_dim
    plain = KVCache(
        pool.spec._replace(head_dim=head_dim),
        num_blocks=pool.max_num_blocks,
        block_size=BLOCK,
        num_slots=SLOTS,
        max_model_len=30 * BLOCK,
        device=CPU,
    )
    plain.data.copy_(pool.data[..., :head_dim])
    plain.block_tables.copy_(pool.block_tables)
    attention = TorchAttention(plain, [case.spec] * 2)
    attention.plan(AttentionMetadata(spans, 0, queries[0, 0, :0], queries[0, 0, :0]))
    return attention.attend(1, queries, queries, queries)


class TorchDecodeAttention(NamedTuple):
    """The decode kernel, in plain torch."""

    case: CapturedCase
    pool: KVCache

    def attend_into(self, out: Any, layer: int, queries: Any, slots: Any, lengths: Any) -> None:
        assert layer == 1 and out.is_contiguous()
        for row, (slot, end) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            if end:
                span = [RowSpan(slot, end - 1, end, 0)]
                out[row] = attend_by_torch(self.case, self.pool, span, queries[row : row + 1])[0]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_captured_graph_gives_what_plain_torch_gives(case: CapturedCase, name: str):
    kind, rows = STEPS[name]
    pool = pool_of(case)
    slots, kv_lens = torch.zeros(2, TOKENS, dtype=torch.int32)
    places = partial(GraphPrefillKernels, FakeWrapper, pool, [case.spec] * 2, None, TOKENS)
    attentions = build_graph_attentions(
        places, TorchDecodeAttention(case, pool), TOKENS, slots[:SLOTS], kv_lens[:SLOTS]
    )
    none = slots[:0]
    for attention in attentions:  # as they are recorded
        attention.plan(AttentionMetadata((), 0, none, none))
    spans, first = [], 0
    for slot, (start, end) in enumerate(rows):
        spans.append(RowSpan(slot, start, end, first))
        first += end - start
    singles = sum(end - start == 1 for start, end in rows)
    slots[:singles] = torch.arange(singles)
    kv_lens[:singles] = torch.tensor([end for _, end in rows[:singles]])
    chosen = next(each for each in attentions if each.plan_replay(spans, singles))
    assert type(chosen) is kind
    shape = (TOKENS, case.spec.num_heads, case.spec.head_dim)
    draw = torch.Generator().manual_seed(2)
    queries = torch.randn(shape, generator=draw, dtype=torch.float64)
    out = chosen.attend(1, queries, queries, queries)
    assert out.shape == queries.shape and bool(torch.isfinite(out).all())
    expected = attend_by_torch(case, pool, spans, queries[:first])
    torch.testing.assert_close(out[:first], expected, rtol=1e-9, atol=1e-12)
