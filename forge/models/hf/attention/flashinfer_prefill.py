"""FlashInfer's prefill kernels for rows of any length, and their plans.

Owns how a plan is built. Knows neither which kernel a step takes nor whether a graph holds it.

    rows      lengths, positions that each reads, block ids of all rows one after the other
    plan()    once a step, on the host: which program takes which tile
    attend()  once a layer

Always true: a plan's numbers go through pinned memory that the next plan fills again. The next plan
first waits until the device has read them, which it has by then.
Ye et al. 2025 (FlashInfer).
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
    """Arguments of a layer that its plan depends on. Layers with equal keys share a plan."""

    scale: float
    window: int
    softcap: float

    @classmethod
    def from_layer(cls, spec: LayerSpec) -> PlanKey:
        """Return the key of a layer."""
        return cls(spec.scale, spec.window, spec.softcap)


class _PlannedKernel(ABC):
    """A FlashInfer wrapper and its plan for the current step."""

    def __init__(self, kv_cache: KVCache, key: PlanKey, num_heads: int, wrapper: Any) -> None:
        self._kv_cache = kv_cache
        self._key = key
        self._num_heads = num_heads
        self._wrapper = wrapper
        self._plan_copied: torch.cuda.Event | None = None

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's outputs, [tokens, heads, head_dim]."""
        # The kernels take heads as wide as the cache's, padding included.
        head_dim = queries.shape[-1]
        padding = self._kv_cache.spec.head_dim - head_dim
        queries = pad(queries, (0, padding)) if padding else queries
        out = torch.empty_like(queries)
        self._run(layer_index, queries, keys, values, out)
        return out[..., :head_dim]

    def attend_into(
        self,
        out: torch.Tensor,
        layer_index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write what `attend` returns to `out`."""
        if self._kv_cache.spec.head_dim == queries.shape[-1]:
            self._run(layer_index, queries, keys, values, out)
        else:
            out.copy_(self.attend(layer_index, queries, keys, values))

    @abstractmethod
    def _run(
        self,
        layer_index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the layer's outputs to `out`."""

    def _wait_for_plan_copy(self) -> None:
        """Wait until the device has read the last plan, whose pinned memory is filled again."""
        if self._plan_copied is not None:
            self._plan_copied.synchronize()

    def _plan_wrapper(self, *numbers: Any, **more: Any) -> None:
        """Plan the step in FlashInfer, and mark when the device has read the plan."""
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
    """Kernel for rows of any length that read the paged KV cache."""

    def plan(
        self, query_lens: Int32Array, kv_lens: Int32Array, kv_indices: torch.Tensor
    ) -> tuple[int, ...]:
        """Plan the rows; return the plan's layout, to compare with a captured graph's.

        query_lens, kv_lens   [rows] queries of each row, and positions that it reads
        kv_indices            block ids of all rows one after the other, int32 on the device
        """
        self._wait_for_plan_copy()
        kv_cache, key = self._kv_cache, self._key
        num_blocks = -(-kv_lens // kv_cache.block_size)
        self._plan_wrapper(
            pin(build_indptr(query_lens)),
            pin(build_indptr(num_blocks)),
            kv_indices,
            # An empty row, which only fills a graph, has no last block.
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
        # The step's own keys and values are in their blocks already.
        kv = (self._kv_cache.keys[layer_index], self._kv_cache.values[layer_index])
        self._wrapper.run(queries, tuple(each.transpose(1, 2) for each in kv), out=out)


class RaggedPrefill(_PlannedKernel):
    """FA3 over rows that start at position 0: all they read is the step's own keys and values."""

    def plan(self, query_lens: Int32Array) -> None:
        """Plan rows that have as many keys as queries.

        query_lens   [rows] queries of each row
        """
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
    """Return the queries of each row and the positions that it reads, [rows] each."""
    kv_lens = np.array([span.end for span in spans], np.int32)
    return kv_lens - np.array([span.start for span in spans], np.int32), kv_lens


def paged_kv_indices(
    kv_cache: KVCache, spans: Sequence[RowSpan], kv_lens: Int32Array
) -> torch.Tensor:
    """Return the block ids of all rows one after the other, read from the tables on the device."""
    num_blocks = -(-kv_lens // kv_cache.block_size)
    row_offsets = np.array([span.slot for span in spans], np.int64) * kv_cache.block_tables.shape[1]
    row_offsets -= np.cumsum(num_blocks) - num_blocks
    table_indices = np.arange(num_blocks.sum(), dtype=np.int64) + np.repeat(row_offsets, num_blocks)
    return kv_cache.block_tables.view(-1)[
        pin(table_indices).to(kv_cache.data.device, non_blocking=True)
    ]


def build_indptr(lens: Int32Array) -> Int32Array:
    """Return 0 and the running sums, [len(lens) + 1]."""
    result: Int32Array = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=result[1:])
    return result
