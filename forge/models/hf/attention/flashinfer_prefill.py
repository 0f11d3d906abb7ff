"""Planned: FlashInfer's kernels for rows of any length, and the plans that they are told by.

Owns what a plan is made of. Knows neither which kernel a step takes nor that steps are recorded.

    rows      lengths, positions that each reads, pages behind each other
    plan()    once a step, on the host: which program takes which tile (Ye et al. 2025, FlashInfer)
    attend()  once a layer

A plan's numbers travel through pinned memory that the next plan fills again: it waits until the
device has read them, which it has by then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from forge.models.hf.attention.flashinfer_api import plan_info
from forge.models.hf.attention.interface import LayerSpec, RowSpan
from forge.models.hf.buffers import Int32Array, pin
from forge.models.hf.kv_cache import KVCache


class PlanKey(NamedTuple):
    """Layers with equal arguments share a plan."""

    scale: float
    window: int
    softcap: float

    @classmethod
    def from_layer(cls, spec: LayerSpec) -> PlanKey:
        """The layer's."""
        return cls(spec.scale, spec.window, spec.softcap)


class _PlannedKernel(ABC):
    """A kernel of FlashInfer, and the plan of the step it runs in."""

    def __init__(self, kv_cache: KVCache, key: PlanKey, num_heads: int, wrapper: Any) -> None:
        self._kv_cache = kv_cache
        self._key = key
        self._num_heads = num_heads
        self._wrapper = wrapper
        self._plan_copied: torch.cuda.Event | None = None

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, heads, head_dim]: the layer's outputs."""
        # Heads are as wide as pages have them.
        head_dim = queries.shape[-1]
        padding = self._kv_cache.spec.head_dim - head_dim
        queries = pad(queries, (0, padding)) if padding else queries
        out = torch.empty_like(queries)
        self._run(layer_index, queries, keys, values, out)
        return out[..., :head_dim]

    @abstractmethod
    def _run(
        self,
        layer_index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` with the layer's outputs."""

    def _wait_for_plan_copy(self) -> None:
        """The device has read the plan before, whose places may be filled again."""
        if self._plan_copied is not None:
            self._plan_copied.synchronize()

    def _plan_wrapper(self, *numbers: Any, **more: Any) -> None:
        """FlashInfer plans the step."""
        dtype = self._kv_cache.spec.dtype
        self._wrapper.plan(
            *numbers,
            causal=True,
            sm_scale=self._key.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            non_blocking=True,
            **more,
        )
        self._plan_copied = torch.cuda.Event()
        self._plan_copied.record()


class PagedPrefill(_PlannedKernel):
    """For rows of any length, which read pages."""

    def plan(
        self, query_lens: Int32Array, kv_lens: Int32Array, kv_indices: torch.Tensor
    ) -> tuple[int, ...]:
        """What FlashInfer decided, for comparison with what a graph has recorded.

        query_lens, kv_lens   [rows] queries of each row, and positions it reads
        kv_indices            pages of all rows behind each other, int32 on the device
        """
        self._wait_for_plan_copy()
        kv_cache, key = self._kv_cache, self._key
        num_blocks = -(-kv_lens // kv_cache.block_size)
        self._plan_wrapper(
            pin(build_indptr(query_lens)),
            pin(build_indptr(num_blocks)),
            kv_indices,
            # A row that is only there to fill a graph has no page, and none of its positions.
            pin(np.where(kv_lens > 0, (kv_lens - 1) % kv_cache.block_size + 1, 0)),
            self._num_heads,
            kv_cache.spec.num_kv_heads,
            kv_cache.spec.head_dim,
            kv_cache.block_size,
            window_left=key.window - 1 if key.window else -1,
            logits_soft_cap=key.softcap or None,
        )
        return plan_info(self._wrapper)

    def _run(
        self,
        layer_index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        # Those of the step are in their pages by now.
        kv = (self._kv_cache.keys[layer_index], self._kv_cache.values[layer_index])
        self._wrapper.run(queries, tuple(each.transpose(1, 2) for each in kv), out=out)


class RaggedPrefill(_PlannedKernel):
    """FA3 over rows that begin at their first position: all that they read is the step's own."""

    def plan(self, query_lens: Int32Array) -> None:
        """The rows of the step are known: [rows] queries of each, and as many keys."""
        self._wait_for_plan_copy()
        spec, indptr = self._kv_cache.spec, pin(build_indptr(query_lens))
        self._plan_wrapper(indptr, indptr, self._num_heads, spec.num_kv_heads, spec.head_dim)

    def _run(
        self,
        layer_index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._wrapper.run(queries, keys, values, out=out)


def query_and_kv_lens(spans: Sequence[RowSpan]) -> tuple[Int32Array, Int32Array]:
    """[rows] queries of each row, and positions it reads."""
    kv_lens = np.array([span.end for span in spans], np.int32)
    return kv_lens - np.array([span.start for span in spans], np.int32), kv_lens


def paged_kv_indices(
    kv_cache: KVCache, spans: Sequence[RowSpan], kv_lens: Int32Array
) -> torch.Tensor:
    """Pages of all rows behind each other, from the tables on the device."""
    num_blocks = -(-kv_lens // kv_cache.block_size)
    row_offsets = np.array([span.slot for span in spans], np.int64) * kv_cache.block_tables.shape[1]
    row_offsets -= np.cumsum(num_blocks) - num_blocks
    table_indices = np.arange(num_blocks.sum(), dtype=np.int64) + np.repeat(row_offsets, num_blocks)
    return kv_cache.block_tables.view(-1)[
        pin(table_indices).to(kv_cache.data.device, non_blocking=True)
    ]


def build_indptr(lens: Int32Array) -> Int32Array:
    """0 and the running sums."""
    result: Int32Array = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=result[1:])
    return result
