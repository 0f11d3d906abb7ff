"""Number of blocks that fit into memory next to the weights and the largest step.

Owns the arithmetic and the advice. Runs a decoder once to measure it; knows nothing else of it.

    total x utilisation
      └─ used before ── weights ── largest step ── CUDA graphs ── [ blocks of the cache ]

Always true: the largest step is run, not estimated. It has as many tokens and as many rows of
logits as a plan may have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forge.config import Speculation
from forge.errors import InvalidConfig
from forge.models.hf.attention.flashinfer_api import FlashInferWrappers
from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, RowSpan
from forge.models.hf.block_moves import staging_bytes
from forge.models.hf.decoders.interface import Decoder, ForwardContext
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.models.hf.loading.kernel_selection import select_attention
from forge.models.hf.loading.loaded_decoder import LoadedDecoder
from forge.seam import REJECTION

GIB = 2**30

CUDA_GRAPH_BYTES = 3 * GIB // 2
"""Bytes reserved for CUDA graphs and for allocations of libraries outside of torch."""

TYPICAL_STEP_TOKENS = 2048
"""Tokens of a step that is run before the largest.

The GEMM library chooses kernels by size and loads each on its first use: not in a first prompt.
"""

SAMPLER_BYTES = GIB
"""Bytes of a step with full sampling; the sampler works in chunks of this size."""

HOST_MEMORY_FRACTION = 0.4
"""Share of the host's free memory that a KV cache on the CPU may take."""


def num_host_blocks(bytes_per_token: int, block_size: int, max_blocks: int) -> int:
    """Return the blocks of a cache in host memory: `max_blocks`, or as many as fit its share."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(
        1, min(max_blocks, int(free * HOST_MEMORY_FRACTION) // (bytes_per_token * block_size))
    )


def profile_step_bytes(
    decoder: Decoder,
    kv_cache_spec: KVCacheSpec,
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    max_logits_rows: int,
    max_num_batched_tokens: int,
    wrappers: FlashInferWrappers | None,
    device: torch.device,
) -> int:
    """Run the largest step; return the CUDA memory it takes, in bytes, weights and cache excluded.

    max_logits_rows   most positions that are sampled in one step
    wrappers          as in `select_attention`
    """
    tokens = max_num_batched_tokens
    kv_cache = KVCache(
        kv_cache_spec,
        num_blocks=-(-tokens // block_size),
        block_size=block_size,
        num_slots=1,
        max_model_len=tokens,
        device=device,
    )
    kv_cache.block_tables[0] = torch.arange(
        kv_cache.max_num_blocks, dtype=torch.int32, device=device
    )
    attention, _ = select_attention(kv_cache, layers, wrappers)
    torch.cuda.synchronize(device)
    allocated_before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for num_tokens in sorted({min(TYPICAL_STEP_TOKENS, tokens), tokens}):
        positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
        slots = torch.zeros_like(positions)
        attention.plan(AttentionMetadata([RowSpan(0, 0, num_tokens, 0)], 0, slots[:0], slots[:0]))
        context = ForwardContext(kv_cache, attention, kv_cache.slot_mapping(slots, positions))
        hidden = decoder.forward(slots, positions, context)
        decoder.compute_logits(hidden[: min(num_tokens, max_logits_rows)])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - allocated_before


def num_device_blocks(
    bytes_per_token: int,
    step_bytes: int,
    *,
    block_size: int,
    max_model_len: int,
    utilization: float,
    device: torch.device,
) -> int:
    """Return the blocks of a KV cache in CUDA memory.

    bytes_per_token   bytes of one position in all caches that have this number of blocks
    Raise InvalidConfig, with a setting that works, where the longest sequence would not fit.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    other_bytes = (total - free) + step_bytes + SAMPLER_BYTES + CUDA_GRAPH_BYTES
    block_bytes = bytes_per_token * block_size
    num_blocks = int(total * utilization - other_bytes) // block_bytes
    min_blocks = -(-max_model_len // block_size)
    if num_blocks >= min_blocks:
        return num_blocks
    needed_utilization = (other_bytes + min_blocks * block_bytes) / total
    sizes = (
        f"weights and steps take {other_bytes / GIB:.1f} GiB of {total / GIB:.1f}, a sequence of "
        f"{max_model_len} tokens {min_blocks * block_bytes / GIB:.1f}"
    )
    if needed_utilization <= 0.98:
        raise InvalidConfig(
            "gpu_memory_utilization",
            f"{utilization:g} is too little: {sizes}",
            f"Give {_round_up(needed_utilization)}",
        )
    max_len_that_fits = num_blocks * block_size
    if max_len_that_fits > 0:
        raise InvalidConfig("max_model_len", sizes, f"Give {max_len_that_fits}")
    raise InvalidConfig(
        "max_num_batched_tokens", sizes, "Give less, or serve a smaller model on this device"
    )


def compute_num_blocks(
    decoders: Sequence[LoadedDecoder],
    config_fields: Mapping[str, Any],
    utilization: float,
    device: torch.device,
) -> int:
    """Return the blocks that fit into each model's cache; on a CPU at most what slots can use.

    decoders   the model that is served, then its draft model, if any
    """
    block_size, max_model_len = config_fields["block_size"], config_fields["max_model_len"]
    bytes_per_token = sum(loaded.kv_cache_spec.bytes_per_token for loaded in decoders)
    if device.type == "cpu":
        max_blocks = -(-max_model_len // block_size) * config_fields["max_num_seqs"]
        return num_host_blocks(bytes_per_token, block_size, max_blocks)
    speculation: Speculation | None = config_fields.get("speculation")
    num_drafts = speculation.num_tokens if speculation is not None else 0
    with torch.inference_mode():
        # The two models' steps never run at the same time.
        step_bytes = max(
            profile_step_bytes(
                loaded.decoder,
                loaded.kv_cache_spec,
                loaded.layers,
                block_size=block_size,
                max_logits_rows=config_fields["max_num_seqs"] * (1 + num_drafts),
                max_num_batched_tokens=min(config_fields["max_num_batched_tokens"], max_model_len),
                wrappers=loaded.prefill.wrappers,
                device=device,
            )
            for loaded in decoders
        )
    if len(decoders) > 1 and speculation and speculation.acceptance == REJECTION:
        # The distribution of each draft, in float64, until rejection has read it.
        vocab_size = decoders[0].checkpoint.vocab_size
        step_bytes += 8 * num_drafts * config_fields["max_num_seqs"] * vocab_size
    if config_fields.get("host_tier") is not None:
        step_bytes += 2 * staging_bytes(decoders[0].kv_cache_spec.bytes_per_token * block_size)
    step_bytes += CUDA_GRAPH_BYTES * (len(decoders) - 1)
    return num_device_blocks(
        bytes_per_token,
        step_bytes,
        block_size=block_size,
        max_model_len=max_model_len,
        utilization=utilization,
        device=device,
    )


def _round_up(fraction: float) -> str:
    """Return the share with two digits, rounded up."""
    return f"{int(fraction * 100) / 100 + 0.01:.2f}"
