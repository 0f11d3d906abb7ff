"""CudaDecodeAttention: the kernels of decode.cu for one KV cache. Imported only where CUDA is.

Owns their compilation, launch and scratch memory. Knows no plan and no other kernel.

    decode.cu ──► a module for each shape of the cache ──► decode_qkv, decode_queries
                  a grid of `num_ctas` CTAs a multiprocessor, whatever the step

Always true: nothing here waits for the device, and each call is safe inside a CUDA graph. A call
depends on the rows' lengths through the device alone.
Measurements: wiki/Attention.md, "Steps of many rows".
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.attention.interface import LayerSpec, QKNormRope
from forge.models.hf.cuda_module import CudaModule, compile_source, max_shared_bytes
from forge.models.hf.kv_cache import KVCache

SOURCE = Path(__file__).with_name("decode.cu")

TYPE_MACROS = {torch.bfloat16: "TYPE_BF16", torch.float16: "TYPE_F16"}
"""Macro of decode.cu for each dtype of the cache."""

MAX_ROWS = 1024
"""Most rows of a step: a warp adds up the tiles of 32 groups of 32 rows."""

MIN_COMPUTE_CAPABILITY = (9, 0)
"""Bulk copies need Hopper."""


class DecodeConfig(NamedTuple):
    """Division of a step among warps.

    tile_size    positions of a bulk copy; a multiple of 16 that divides the block size
    num_warps    warps of a CTA
    num_stages   tiles of a warp that are in flight or in use
    num_ctas     CTAs of a multiprocessor
    min_tiles    work of a warp in tiles, where a step has enough for all
    start_tiles  tiles that take as long as the queries and the output of a row and key head
    """

    tile_size: int
    num_warps: int
    num_stages: int
    num_ctas: int
    min_tiles: int
    start_tiles: int

    def shared_bytes(self, head_dim: int, max_rows: int) -> int:
        """Return the dynamic shared memory of a CTA: its rings, their barriers, the rows."""
        tile_bytes = 2 * 2 * self.tile_size * head_dim
        return self.num_warps * self.num_stages * (tile_bytes + 8) + 4 * (3 * max_rows + 32)


DECODE_CONFIG = DecodeConfig(16, 8, 2, 1, 2, 5)
"""Config of every step, measured on an H200: wiki/Attention.md, "Steps of many rows"."""


def has_kernel(kv_cache: KVCache, spec: LayerSpec) -> bool:
    """Return whether the kernels compute layers of this shape over this cache.

    They have no window and no soft cap.
    """
    device = kv_cache.data.device
    return (
        device.type == "cuda"
        and kv_cache.spec.dtype in TYPE_MACROS
        and kv_cache.spec.head_dim == spec.head_dim
        and spec.head_dim in (64, 128)
        and spec.num_heads <= 16 * spec.num_kv_heads
        and kv_cache.block_size % DECODE_CONFIG.tile_size == 0
        and fits_device(
            torch.cuda.get_device_capability(device), max_shared_bytes(device), spec.head_dim
        )
    )


def fits_device(capability: tuple[int, int], max_shared_bytes: int, head_dim: int) -> bool:
    """Return whether a device can run the kernels for heads of this size.

    capability         compute capability
    max_shared_bytes   most shared memory of a CTA. Consumer GPUs above Hopper have 99 KiB, too
                       little for heads of 128
    """
    needed_bytes = DECODE_CONFIG.shared_bytes(head_dim, MAX_ROWS)
    return capability >= MIN_COMPUTE_CAPABILITY and needed_bytes <= max_shared_bytes


class CudaDecodeAttention:
    """Kernels of one shape of layers over one KV cache, and the scratch memory of cut rows.

    kv_cache, spec   a pair that `has_kernel` accepts
    pdl              launch while the kernel before still runs
    max_rows         most rows of a step
    """

    def __init__(
        self,
        kv_cache: KVCache,
        spec: LayerSpec,
        *,
        pdl: bool,
        config: DecodeConfig = DECODE_CONFIG,
    ) -> None:
        device = kv_cache.data.device
        self._kv_cache = kv_cache
        self._pdl = pdl
        self._num_threads = 32 * config.num_warps
        self.max_rows = max_rows = min(kv_cache.num_slots, MAX_ROWS)
        self._head_dim = spec.head_dim
        self._shared_bytes = config.shared_bytes(spec.head_dim, max_rows)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._grid = (num_sms * config.num_ctas, 1)
        self._compile = partial(
            compile_decode_kernels,
            *(kv_cache.spec.dtype, spec, kv_cache.block_size, device),
            config=config,
        )
        # A warp has at most two cut rows. A part has a float4 of its sums for each lane, and its
        # output: 8 or 16 query heads.
        halves = 2 if spec.num_heads > 8 * spec.num_kv_heads else 1
        num_cells = 4 * 32 * (1 + halves * spec.head_dim // 16)
        num_partials = 2 * self._grid[0] * config.num_warps
        self._partials = torch.empty(num_partials * num_cells, dtype=torch.float32, device=device)
        # Zeroed once: the last warp of each row and key head resets its counter.
        self._counters = torch.zeros(max_rows * spec.num_kv_heads, dtype=torch.int32, device=device)

    @cached_property
    def _module(self) -> CudaModule:
        """The kernels, compiled when they are first used: a second or more."""
        names = ("decode_qkv", "decode_queries")
        device = self._kv_cache.data.device
        return CudaModule(self._compile(), dict.fromkeys(names, self._shared_bytes), device)

    def has_rope(self, rope: QKNormRope) -> bool:
        """Return whether the kernels compute this rotation: in float32, of every dimension."""
        return all(
            each.dtype == torch.float32 and each.shape[-1] == self._head_dim
            for each in (rope.cos, rope.sin)
        )

    @property
    def scratch(self) -> tuple[Tensor, Tensor]:
        """Partial results and counters; between calls all counters are 0."""
        return self._partials, self._counters

    def attend_into(
        self,
        out: Tensor,
        layer_index: int,
        queries: Tensor,
        slots: Tensor,
        kv_lens: Tensor,
        scale: float,
    ) -> None:
        """Write the outputs of rows whose keys and values are all in their blocks.

        Rows with KV length 0 leave their part of `out` unchanged.

        out, queries     [rows, heads, head_dim]; rows of `queries` may have gaps between them
        slots, kv_lens   [rows] int32; kv_lens counts the row's own token
        """
        arguments = self._arguments(out, layer_index, queries, slots, kv_lens, scale)
        self._launch("decode_queries", *arguments)

    def attend_qkv_into(
        self,
        out: Tensor,
        layer_index: int,
        qkv: Tensor,
        rope: QKNormRope,
        slots: Tensor,
        kv_lens: Tensor,
        scale: float,
    ) -> None:
        """Write the outputs from the QKV projection, and the new keys and values to their blocks.

        out              [rows, heads * head_dim]
        qkv              [rows, (heads + 2 * kv_heads) * head_dim]
        slots, kv_lens   [rows] int32; kv_lens counts the row's own token
        """
        self._launch(
            "decode_qkv",
            *self._arguments(out, layer_index, qkv, slots, kv_lens, scale),
            *(rope.cos, rope.sin, rope.q_norm_weight, rope.k_norm_weight, float(rope.eps)),
        )

    def _arguments(
        self,
        out: Tensor,
        layer_index: int,
        q: Tensor,
        slots: Tensor,
        kv_lens: Tensor,
        scale: float,
    ) -> tuple[Tensor | int | float, ...]:
        """Return the arguments that both kernels have."""
        kv_cache = self._kv_cache
        assert len(q) <= self.max_rows, f"{len(q)} rows, at most {self.max_rows}"
        assert q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0, (
            f"queries at {q.data_ptr():#x} with strides {q.stride()}: not multiples of 16 bytes"
        )
        assert out.is_contiguous(), f"out has strides {out.stride()}"
        return (
            *(q, q.stride(0), slots, kv_lens, len(q)),
            *(kv_cache.block_tables, kv_cache.block_tables.stride(0)),
            *(kv_cache.data[layer_index], float(scale), out, *self.scratch),
        )

    def _launch(self, name: str, *arguments: Tensor | int | float | None) -> None:
        self._module.launch(
            name, self._grid, self._num_threads, self._shared_bytes, arguments, pdl=self._pdl
        )


def compile_decode_kernels(
    dtype: torch.dtype,
    spec: LayerSpec,
    block_size: int,
    device: torch.device,
    *,
    config: DecodeConfig = DECODE_CONFIG,
) -> bytes:
    """Return the kernels for one shape of layers, compiled for the device. Cached."""
    return compile_source(SOURCE, decode_macros(dtype, spec, block_size, config), device)


def decode_macros(
    dtype: torch.dtype, spec: LayerSpec, block_size: int, config: DecodeConfig
) -> tuple[str, ...]:
    """Return the macros of decode.cu for one shape of layers."""
    return (
        TYPE_MACROS[dtype],
        f"HEAD_DIM={spec.head_dim}",
        f"GROUP={spec.num_heads // spec.num_kv_heads}",
        f"KV_HEADS={spec.num_kv_heads}",
        f"BLOCK_SIZE={block_size}",
        f"TILE={config.tile_size}",
        f"WARPS={config.num_warps}",
        f"STAGES={config.num_stages}",
        f"CTAS={config.num_ctas}",
        f"MIN_TILES={config.min_tiles}",
        f"START_TILES={config.start_tiles}",
    )
