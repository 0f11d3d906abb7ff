"""How many blocks fit: what is left of a device's memory beside weights and the largest step.

Owns the arithmetic and the advice. Knows a decoder only as something to run once and measure.

    total x utilisation
      └─ used before ── weights ── largest step ── recordings ── [ blocks of the cache ]

The largest step is run, not estimated: as many tokens as a plan may have, as many rows of logits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forge.config import Speculation
from forge.errors import InvalidConfig
from forge.models.hf.attention import LayerSpec, Rows, Span
from forge.models.hf.backend import attention_for
from forge.models.hf.decoder import Decoder, PagedStep
from forge.models.hf.pool import KVPool, KVShape
from forge.models.hf.weights import Weights
from forge.seam import REJECTION

GIB = 2**30

RECORDINGS_BYTES = GIB
"""Set aside for CUDA graphs and for what libraries allocate beside torch."""

SAMPLING_BYTES = GIB
"""What a step may take that filters and sorts: forge.models.hf.sampler works in chunks of this."""

HOST_SHARE = 0.4
"""Share of the host's free memory that a cache on the CPU may take."""


def blocks_on_host(token_bytes: int, block_size: int, wanted: int) -> int:
    """Blocks for a cache in the host's memory: `wanted`, or as many as a share of it holds."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(wanted, int(free * HOST_SHARE) // (token_bytes * block_size)))


def step_bytes(
    decoder: Decoder,
    shape: KVShape,
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    logits_rows: int,
    max_num_batched_tokens: int,
    device: torch.device,
) -> int:
    """Bytes of CUDA memory that the largest step takes beside weights and cache. Runs it.

    logits_rows   most positions that are sampled in one step
    """
    tokens = max_num_batched_tokens
    pool = KVPool(
        shape,
        num_blocks=-(-tokens // block_size),
        block_size=block_size,
        num_slots=1,
        max_model_len=tokens,
        device=device,
    )
    pool.tables[0] = torch.arange(pool.capacity, dtype=torch.int32, device=device)
    attention, _ = attention_for(pool, layers)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    slots = torch.zeros_like(positions)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attention.begin(Rows([Span(0, 0, tokens, 0)], 0, slots[:0], slots[:0]))
    step = PagedStep(pool, attention, pool.places(slots, positions))
    hidden = decoder.hidden(slots, positions, step)
    decoder.logits(hidden[: min(tokens, logits_rows)])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def blocks_on_device(
    token_bytes: int,
    largest_step: int,
    *,
    block_size: int,
    max_model_len: int,
    utilization: float,
    device: torch.device,
) -> int:
    """Blocks for a cache in CUDA memory. Raises InvalidConfig where the longest sequence would not
    fit, with what to set instead.

    token_bytes   of one position, in all caches that have so many blocks
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    beside = (total - free) + largest_step + SAMPLING_BYTES + RECORDINGS_BYTES
    block_bytes = token_bytes * block_size
    blocks = int(total * utilization - beside) // block_bytes
    needed = -(-max_model_len // block_size)
    if blocks >= needed:
        return blocks
    share = (beside + needed * block_bytes) / total
    sizes = (
        f"weights and steps take {beside / GIB:.1f} GiB of {total / GIB:.1f}, a sequence of "
        f"{max_model_len} tokens {needed * block_bytes / GIB:.1f}"
    )
    if share <= 0.98:
        raise InvalidConfig(
            "gpu_memory_utilization",
            f"{utilization:g} is too little: {sizes}",
            f"Give {_up(share)}",
        )
    longest = blocks * block_size
    if longest > 0:
        raise InvalidConfig("max_model_len", sizes, f"Give {longest}")
    raise InvalidConfig(
        "max_num_batched_tokens", sizes, "Give less, or serve a smaller model on this device"
    )


def fitting_blocks(
    models: Sequence[Weights],
    geometry: Mapping[str, Any],
    utilization: float,
    device: torch.device,
) -> int:
    """As many blocks as fit into each model's cache, on a CPU no more than every slot could fill.

    models   the one served; behind it its draft, if it has one
    """
    block_size, longest = geometry["block_size"], geometry["max_model_len"]
    token_bytes = sum(weights.shape.token_bytes for weights in models)
    if device.type == "cpu":
        wanted = -(-longest // block_size) * geometry["max_num_seqs"]
        return blocks_on_host(token_bytes, block_size, wanted)
    speculation: Speculation | None = geometry.get("speculation")
    drafts = speculation.num_tokens if speculation is not None else 0
    with torch.inference_mode():
        # One model's step runs after the other's.
        largest_step = max(
            step_bytes(
                weights.decoder,
                weights.shape,
                weights.layers,
                block_size=block_size,
                logits_rows=geometry["max_num_seqs"] * (1 + drafts),
                max_num_batched_tokens=min(geometry["max_num_batched_tokens"], longest),
                device=device,
            )
            for weights in models
        )
    if len(models) > 1 and speculation and speculation.acceptance == REJECTION:
        # What each draft was drawn from, in float64, until it is judged.
        vocab_size = models[0].checkpoint.vocab_size
        largest_step += 8 * drafts * geometry["max_num_seqs"] * vocab_size
    largest_step += RECORDINGS_BYTES * (len(models) - 1)
    return blocks_on_device(
        token_bytes,
        largest_step,
        block_size=block_size,
        max_model_len=longest,
        utilization=utilization,
        device=device,
    )


def _up(share: float) -> str:
    """The share, rounded up to two digits."""
    return f"{int(share * 100) / 100 + 0.01:.2f}"
