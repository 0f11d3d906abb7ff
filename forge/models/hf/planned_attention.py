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

from forge.models.hf.attention import LayerSpec, Span
from forge.models.hf.batch import Ints
from forge.models.hf.flashinfer_api import plan_info
from forge.models.hf.pool import KVPool


class Kind(NamedTuple):
    """Layers with equal arguments share a plan."""

    scale: float
    window: int
    softcap: float

    @classmethod
    def of(cls, spec: LayerSpec) -> Kind:
        """The layer's."""
        return cls(spec.scale, spec.window, spec.softcap)


class _Told(ABC):
    """A kernel of FlashInfer, and the plan of the step it runs in."""

    def __init__(self, pool: KVPool, kind: Kind, num_heads: int, wrapper: Any) -> None:
        self._pool = pool
        self._kind = kind
        self._num_heads = num_heads
        self._wrapper = wrapper
        self._read: torch.cuda.Event | None = None

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, heads, head_dim]: the layer's outputs."""
        # Heads are as wide as pages have them.
        head_dim = queries.shape[-1]
        missing = self._pool.shape.head_dim - head_dim
        queries = pad(queries, (0, missing)) if missing else queries
        out = torch.empty_like(queries)
        self._run(layer, queries, keys, values, out)
        return out[..., :head_dim]

    @abstractmethod
    def _run(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` with the layer's outputs."""

    def _wait(self) -> None:
        """The device has read the plan before, whose places may be filled again."""
        if self._read is not None:
            self._read.synchronize()

    def _tell(self, *numbers: Any, **more: Any) -> None:
        """FlashInfer plans the step."""
        dtype = self._pool.shape.dtype
        self._wrapper.plan(
            *numbers,
            causal=True,
            sm_scale=self._kind.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            non_blocking=True,
            **more,
        )
        self._read = torch.cuda.Event()
        self._read.record()


class Planned(_Told):
    """For rows of any length, which read pages."""

    def plan(self, lengths: Ints, ends: Ints, pages: torch.Tensor) -> tuple[int, ...]:
        """What FlashInfer decided, for comparison with what a graph has recorded.

        lengths, ends   [rows] queries of each row, and positions it reads
        pages           pages of all rows behind each other, int32 on the device
        """
        self._wait()
        pool, kind = self._pool, self._kind
        counts = -(-ends // pool.block_size)
        self._tell(
            pinned(cumulated(lengths)),
            pinned(cumulated(counts)),
            pages,
            # A row that is only there to fill a graph has no page, and none of its positions.
            pinned(np.where(ends > 0, (ends - 1) % pool.block_size + 1, 0)),
            self._num_heads,
            pool.shape.num_kv_heads,
            pool.shape.head_dim,
            pool.block_size,
            window_left=kind.window - 1 if kind.window else -1,
            logits_soft_cap=kind.softcap or None,
        )
        return plan_info(self._wrapper)

    def _run(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        # Those of the step are in their pages by now.
        pages = (self._pool.keys[layer], self._pool.values[layer])
        self._wrapper.run(queries, tuple(each.transpose(1, 2) for each in pages), out=out)


class Whole(_Told):
    """FA3 over rows that begin at their first position: all that they read is the step's own."""

    def plan(self, lengths: Ints) -> None:
        """The rows of the step are known: [rows] queries of each, and as many keys."""
        self._wait()
        shape, firsts = self._pool.shape, pinned(cumulated(lengths))
        self._tell(firsts, firsts, self._num_heads, shape.num_kv_heads, shape.head_dim)

    def _run(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._wrapper.run(queries, keys, values, out=out)


def lengths_of(spans: Sequence[Span]) -> tuple[Ints, Ints]:
    """[rows] queries of each row, and positions it reads."""
    ends = np.array([span.end for span in spans], np.int32)
    return ends - np.array([span.start for span in spans], np.int32), ends


def pages_of(pool: KVPool, spans: Sequence[Span], ends: Ints) -> torch.Tensor:
    """Pages of all rows behind each other, from the tables on the device."""
    counts = -(-ends // pool.block_size)
    firsts = np.array([span.slot for span in spans], np.int64) * pool.tables.shape[1]
    firsts -= np.cumsum(counts) - counts
    cells = np.arange(counts.sum(), dtype=np.int64) + np.repeat(firsts, counts)
    return pool.tables.view(-1)[pinned(cells).to(pool.data.device, non_blocking=True)]


def cumulated(counts: Ints) -> Ints:
    """0 and the running sums."""
    result: Ints = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=result[1:])
    return result


def pinned(array: Any) -> torch.Tensor:
    """The array where the device can fetch it."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
