"""TorchAttention against one loop over queries, keys and heads, in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, RowSpan  # noqa: E402
from forge.models.hf.attention.reference import TorchAttention  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
SPANS = [(2, 0, 1), (0, 22, 23), (3, 0, 9), (1, 13, 21), (4, 17, 18)]
"""Slot, start and end: a new row of one token, a later one, a prompt, a chunk, one more token."""


class AttentionCase(NamedTuple):
    """Arguments of one layer, and the spread of its numbers."""

    heads: int
    kv_heads: int
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.4


CASES = {
    "every head has keys": AttentionCase(3, 3),
    "grouped heads": AttentionCase(6, 2),
    "one key head": AttentionCase(4, 1),
    "window": AttentionCase(4, 2, window=5),
    "window of one": AttentionCase(4, 2, window=1),
    "window longer than any row": AttentionCase(4, 2, window=64),
    "soft cap": AttentionCase(4, 2, softcap=2.0),
    "window and soft cap": AttentionCase(4, 2, window=7, softcap=1.5),
    "negative scale": AttentionCase(4, 2, scale=-0.3),
}


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def attend_by_loop(
    case: AttentionCase, query: list[list[float]], at: int, keys: Any, values: Any
) -> list[Any]:
    """Return [heads][head_dim] of one query at position `at`, one number after the other."""
    out = []
    for head, q in enumerate(query):
        kv = head * case.kv_heads // case.heads
        positions = [p for p in range(at + 1) if not case.window or at - p < case.window]
        scores = [case.scale * dot(q, keys[p][kv]) for p in positions]
        if case.softcap:
            scores = [case.softcap * math.tanh(score / case.softcap) for score in scores]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights)
        columns = zip(*(values[p][kv] for p in positions), strict=True)
        out.append([dot(weights, list(column)) / total for column in columns])
    return out


def unused_kv(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values that would show if they were read: the cache has the real ones."""
    broken = torch.full_like(queries[:, :1], float("nan"))
    return broken, broken


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_query_sees_its_own_sequence_up_to_itself(case: AttentionCase):
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(7)
    layers = [LayerSpec(case.heads, case.kv_heads, 8, case.scale, case.window, case.softcap)] * 2
    pool = KVCache(
        KVCacheSpec(2, case.kv_heads, 8, torch.float64),
        num_blocks=30,
        block_size=4,
        num_slots=5,
        max_model_len=24,
        device=CPU,
    )
    pool.block_tables[:5] = torch.randperm(30, generator=draw).view(5, 6)
    pool.data.copy_(torch.randn(pool.data.shape, generator=draw, dtype=torch.float64))
    spans, first = [], 0
    for slot, start, end in SPANS:
        spans.append(RowSpan(slot, start, end, first))
        first += end - start
    queries = 2 * torch.randn(first, case.heads, 8, generator=draw, dtype=torch.float64)
    attention = TorchAttention(pool, layers)
    none = torch.zeros(0, dtype=torch.int32)
    attention.plan(AttentionMetadata(spans, 0, none, none))
    out = attention.attend(1, queries, *unused_kv(queries))
    for span in spans:
        keys, values = (part.tolist() for part in pool.gather(1, span.slot, span.end))
        for offset in range(span.end - span.start):
            at = span.first_token + offset
            expected = attend_by_loop(case, queries[at].tolist(), span.start + offset, keys, values)
            assert torch.allclose(out[at], torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_the_order_of_rows_does_not_matter():
    draw = torch.Generator().manual_seed(3)
    pool = KVCache(
        KVCacheSpec(1, 1, 8, torch.float64),
        num_blocks=8,
        block_size=4,
        num_slots=2,
        max_model_len=16,
        device=CPU,
    )
    pool.block_tables[:2] = torch.randperm(8, generator=draw).view(2, 4)
    pool.data.copy_(torch.randn(pool.data.shape, generator=draw, dtype=torch.float64))
    queries = torch.randn(5, 2, 8, generator=draw, dtype=torch.float64)
    attention = TorchAttention(pool, [LayerSpec(2, 1, 8, 0.4)])
    none = torch.zeros(0, dtype=torch.int32)
    attention.plan(AttentionMetadata([RowSpan(0, 3, 4, 0), RowSpan(1, 6, 10, 1)], 1, none, none))
    one = attention.attend(0, queries, *unused_kv(queries))
    attention.plan(AttentionMetadata([RowSpan(1, 6, 10, 0), RowSpan(0, 3, 4, 4)], 0, none, none))
    other = attention.attend(0, queries[[1, 2, 3, 4, 0]], *unused_kv(queries))
    assert torch.equal(other[[4, 0, 1, 2, 3]], one)


def test_plain_torch_makes_no_queries_of_a_product():
    """None makes the decoder rotate and write by itself."""
    layers = [LayerSpec(2, 1, 8, 0.4)]
    shape = KVCacheSpec(1, 1, 8, torch.float64)
    pool = KVCache(shape, num_blocks=1, block_size=4, num_slots=1, max_model_len=4, device=CPU)
    assert TorchAttention(pool, layers).attend_qkv(0, torch.zeros(1, 32), None) is None
