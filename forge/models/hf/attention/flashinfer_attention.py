"""FlashInferAttention: paged attention on an NVIDIA GPU, by the decode kernels and FlashInfer's.

Owns the choice of kernel and the plans they need. Knows no weights and no sampling.

    rows of one token     ours     no plan: tables and lengths stay on the device, so that a CUDA
                                   graph can hold it (triton_decode.py)
    longer rows           FA3      planned once a step on the host, before any layer runs
      all from position 0          reads the step's own keys, which are contiguous: no blocks
    short longer rows     FA2      also soft caps and windows, which FA3 does not have
    captured graphs                graph_attention.py

Measurements: wiki/Attention.md, "Longer rows". FlashInfer's own choice on an H200 is the slower
kernel, so `FA3_MIN_TOKENS` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from forge.models.capture_sizes import (
    MAX_MIXED_ROWS,
    MAX_MIXED_TOKENS,
    max_graph_prefill_rows,
)
from forge.models.hf.attention.flashinfer_api import FlashInferWrappers
from forge.models.hf.attention.flashinfer_prefill import (
    PagedPrefill,
    PlanKey,
    RaggedPrefill,
    paged_kv_indices,
    query_and_kv_lens,
)
from forge.models.hf.attention.graph_attention import (
    GraphPrefillKernels,
    MixedGraphAttention,
    build_graph_attentions,
)
from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, QKNormRope
from forge.models.hf.attention.triton_decode import DecodeAttention
from forge.models.hf.kv_cache import KVCache

WORKSPACE_BYTES = 256 * 2**20
"""FlashInfer's recommended workspace: enough for any step outside of a captured graph."""

FA2_QUERY_TILE = 128
"""Largest query tile of FA2, where each head of a group counts as a query."""

FA3_MIN_TOKENS = 256
"""Mean tokens of a row from which FA3 is faster than FA2 over blocks: wiki/Attention.md."""

FA3_RAGGED_MIN_TOKENS = 128
"""Mean tokens from which FA3 is faster where every row starts at position 0: wiki/Attention.md."""


class FlashInferAttention:
    """Attention kernels of one KV cache and one model's layers."""

    def __init__(
        self, kv_cache: KVCache, layers: Sequence[LayerSpec], wrappers: FlashInferWrappers
    ) -> None:
        self._wrappers = wrappers
        self._kv_cache = kv_cache
        self._layers = layers
        self._plan_keys = [PlanKey.from_layer(spec) for spec in layers]
        device = kv_cache.data.device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._graph_workspace = self._workspace
        self._has_graphs = False
        self._paged_kernels: dict[tuple[PlanKey, str], PagedPrefill] = {}
        self._ragged_kernels: dict[PlanKey, RaggedPrefill] = {}
        self._step_kernels: dict[PlanKey, PagedPrefill | RaggedPrefill] = {}
        self._decode = DecodeAttention(kv_cache, layers, pdl=True)
        self._slots = self._kv_lens = kv_cache.block_tables[0, :0]

    def plan(self, metadata: AttentionMetadata) -> None:
        """Choose and plan the kernels of the longer rows."""
        self._slots, self._kv_lens = metadata.slots, metadata.kv_lens
        prefill_spans = metadata.spans[metadata.num_decode_rows :]
        if not prefill_spans:
            return
        query_lens, kv_lens = query_and_kv_lens(prefill_spans)
        mean_tokens = int(query_lens.sum()) / len(query_lens)
        is_padded = self._kv_cache.spec.head_dim != self._layers[0].head_dim
        is_ragged = (
            not is_padded
            and mean_tokens >= FA3_RAGGED_MIN_TOKENS
            and bool((query_lens == kv_lens).all())
        )
        kv_indices = None
        for key in dict.fromkeys(self._plan_keys):
            full_attention = not key.softcap and not key.window
            if full_attention and is_ragged:
                self._step_kernels[key] = ragged_kernel = self._ragged_kernel(key)
                ragged_kernel.plan(query_lens)
            else:
                kv_indices = (
                    paged_kv_indices(self._kv_cache, prefill_spans, kv_lens)
                    if kv_indices is None
                    else kv_indices
                )
                use_fa3 = full_attention and mean_tokens >= FA3_MIN_TOKENS
                self._step_kernels[key] = paged_kernel = self._paged_kernel(
                    key, "fa3" if use_fa3 else "fa2"
                )
                paged_kernel.plan(query_lens, kv_lens, kv_indices)

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Run the decode kernel for rows of one token, the planned kernel for the others."""
        num_decode_rows = len(self._slots)
        if not num_decode_rows:
            return self._attend_prefill(layer_index, queries, keys, values)
        if num_decode_rows == len(queries):
            return self._decode.attend(layer_index, queries, self._slots, self._kv_lens)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        decode_out, prefill_out = out[:num_decode_rows], out[num_decode_rows:]
        self._decode.attend_into(
            decode_out, layer_index, queries[:num_decode_rows], self._slots, self._kv_lens
        )
        prefill_tensors = (each[num_decode_rows:] for each in (queries, keys, values))
        kernel = self._step_kernels[self._plan_keys[layer_index]]
        kernel.attend_into(prefill_out, layer_index, *prefill_tensors)
        return out

    def attend_qkv(
        self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope
    ) -> torch.Tensor | None:
        """Run the fused decode kernel, where every row has one token; else return None."""
        if len(self._slots) != len(qkv):
            return None
        return self._decode.attend_qkv(layer_index, qkv, rope, self._slots, self._kv_lens)

    def _attend_prefill(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return self._step_kernels[self._plan_keys[layer_index]].attend(
            layer_index, queries, keys, values
        )

    def warmup_calls(self, rope: QKNormRope) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every variant of the decode kernel."""
        return self._decode.warmup_calls(rope)

    def build_graph_attentions(
        self, num_tokens: int, slots: torch.Tensor, kv_lens: torch.Tensor
    ) -> tuple[MixedGraphAttention, ...]:
        """Return the attentions of graphs of `num_tokens` tokens. All sizes share one workspace.

        Call it for the largest size first: the workspace cannot grow once a graph has its address.
        """
        spec = self._layers[0]
        # A smaller graph may need more: it has more rows.
        max_tiles = max(
            self._max_graph_tiles(tokens, len(slots))
            for tokens in (num_tokens, min(num_tokens, MAX_MIXED_TOKENS))
        )
        # Partial outputs and their sums, in fp32, of every tile that a plan may have.
        needed_bytes = (
            spec.num_heads * max_tiles * FA2_QUERY_TILE * (self._kv_cache.spec.head_dim + 1) * 4
        )
        if self._graph_workspace.numel() < needed_bytes + 2**20:
            assert not self._has_graphs, "captured graphs hold the address of the workspace"
            self._graph_workspace = torch.empty(
                needed_bytes + 2**20, dtype=torch.uint8, device=self._workspace.device
            )
        self._has_graphs = True
        build_kernels = partial(
            GraphPrefillKernels,
            self._wrappers.paged,
            self._kv_cache,
            self._layers,
            self._graph_workspace,
            num_tokens,
        )
        return build_graph_attentions(build_kernels, self._decode, num_tokens, slots, kv_lens)

    def _max_graph_tiles(self, num_tokens: int, num_slots: int) -> int:
        """Return the most tiles of FA2 that a plan of a graph may have."""
        # Layers with windows or soft caps use FA2 where others use FA3.
        max_rows = max_graph_prefill_rows(num_tokens) + 1
        if num_tokens <= MAX_MIXED_TOKENS:
            max_rows = max(max_rows, min(num_slots, MAX_MIXED_ROWS))
        spec = self._layers[0]
        properties = torch.cuda.get_device_properties(self._workspace.device)
        min_tiles = 2 * properties.multi_processor_count // spec.num_kv_heads + 1
        group_size = spec.num_heads // spec.num_kv_heads
        return max(min_tiles, -(-num_tokens * group_size // FA2_QUERY_TILE) + max_rows + 1)

    def _paged_kernel(self, key: PlanKey, backend: str) -> PagedPrefill:
        kernel_key = (key, backend)
        if kernel_key not in self._paged_kernels:
            wrapper = self._wrappers.paged(self._workspace, "HND", backend=backend)
            self._paged_kernels[kernel_key] = PagedPrefill(
                self._kv_cache, key, self._layers[0].num_heads, wrapper
            )
        return self._paged_kernels[kernel_key]

    def _ragged_kernel(self, key: PlanKey) -> RaggedPrefill:
        if key not in self._ragged_kernels:
            wrapper = self._wrappers.ragged(self._workspace, "NHD", backend="fa3")
            self._ragged_kernels[key] = RaggedPrefill(
                self._kv_cache, key, self._layers[0].num_heads, wrapper
            )
        return self._ragged_kernels[key]
