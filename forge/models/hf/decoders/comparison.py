"""Comparison of a decoder's logits with those of the modules that it replaces.

Owns two measures and the positions at which they are taken. Knows no plan and no sampling.

    float32_error   the fused arithmetic in plain torch against the modules, both in float32:
                    checks the arithmetic. One layer at a time is cast, so a large model needs no
                    float32 copy
    logits_error    the decoder as it will run against the modules, in the model's dtype: checks
                    the kernels

    positions   0 .. 7    |    w-1 w w+1    |    2^k    |    the last two
                          every integer w of the configuration

Always true: every integer of the configuration has a probe token before and after it, since
arithmetic changes with the position there: a window, the length before scaling, a chunk. No token
stands between. A probe's attention masks by position, so position 100,000 costs as much as 10.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, QKNormRope
from forge.models.hf.attention.reference import attend_sequence
from forge.models.hf.decoders.fused_decoder import FusedDecoder
from forge.models.hf.decoders.interface import Decoder, ForwardContext
from forge.models.hf.decoders.module_decoder import ModuleDecoder
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.models.hf.ops.reference import TorchOps

NUM_FIRST_POSITIONS = 8
"""Consecutive positions at the start of a probe."""

PROBE_VOCAB_SIZE = 4096
"""Vocabulary of `float32_error`: embedding and head are cast for these tokens only."""

MAX_FLOAT32_ERROR = 1e-3
"""Largest `float32_error` that rounding to float32 explains, with a margin."""

PROBE_BLOCK_SIZE = 32
"""Positions of a block of a probe's KV cache."""


def max_logits_error(dtype: torch.dtype) -> float:
    """Return the largest `logits_error` that rounding to the dtype explains, with a margin."""
    return {torch.float64: 1e-5, torch.float32: 1e-3}.get(dtype, 0.1)


def probe_positions(config: Any, max_model_len: int) -> list[int]:
    """Return the positions of a probe's tokens, ascending, all below `max_model_len`."""
    config_integers = set(_integers(vars(config.get_text_config())))
    positions = {*range(NUM_FIRST_POSITIONS), max_model_len - 2, max_model_len - 1}
    positions |= {1 << k for k in range(max_model_len.bit_length())}
    positions |= {integer + step for integer in config_integers for step in (-1, 0, 1)}
    return sorted(position for position in positions if 0 <= position < max_model_len)


def _integers(values: dict[str, Any]) -> Iterator[int]:
    """Yield the integers of a configuration and of the dictionaries in it."""
    for value in values.values():
        if isinstance(value, dict):
            yield from _integers(value)
        elif type(value) is int:
            yield value


@torch.inference_mode()
def float32_error(
    module_decoder: ModuleDecoder,
    fused: FusedDecoder,
    layers: Sequence[LayerSpec],
    positions: Sequence[int],
    max_vocab_size: int = PROBE_VOCAB_SIZE,
) -> float:
    """Return the largest relative error |a - b| / |a| of a token's logits, in float32 or wider.

    max_vocab_size   most ids of the probe
    A logit that is NaN makes the result NaN.
    """
    module = module_decoder.module
    dtype = torch.promote_types(module.dtype, torch.float32)
    sizes = (module.lm_head.weight.shape[0], module.base_model.embed_tokens.weight.shape[0])
    vocab_size = min(PROBE_VOCAB_SIZE, max_vocab_size, *sizes)
    decoders = (
        ModuleDecoder(_cast_model(module, dtype, vocab_size)),
        fused.with_dtype(TorchOps(), dtype, vocab_size),
    )
    ids = _probe_ids(len(positions), vocab_size, module.device)
    with _disable_tf32():
        a, b = (probe_logits(decoder, ids, positions, layers, dtype) for decoder in decoders)
    return float(((a - b).norm(dim=-1) / a.norm(dim=-1)).max())


@torch.inference_mode()
def logits_error(
    module_decoder: ModuleDecoder,
    other: Decoder,
    layers: Sequence[LayerSpec],
    positions: Sequence[int],
) -> float:
    """Return the relative error |a - b| / |a| of a probe's logits, all tokens together.

    The largest of three probes: a prompt of all positions, its last token, its last two. A logit
    that is NaN makes the result NaN.
    """
    module = module_decoder.module
    vocab_size = module.config.get_text_config().vocab_size
    ids = _probe_ids(len(positions), vocab_size, module.device)
    errors = []
    for count in (len(positions), 1, 2):
        probe = (ids[-count:], positions[-count:], layers, module.dtype)
        a, b = (probe_logits(decoder, *probe).double() for decoder in (module_decoder, other))
        errors.append((a - b).norm() / a.norm())
    return float(torch.stack(errors).max())


def _probe_ids(count: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int32, device=device) * 7919) % vocab_size


def probe_logits(
    decoder: Decoder,
    input_ids: torch.Tensor,
    positions: Sequence[int],
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the logits of one sequence with tokens at increasing `positions` only."""
    count, device = len(input_ids), input_ids.device
    num_blocks = -(-count // PROBE_BLOCK_SIZE)
    kv_cache = KVCache(
        KVCacheSpec(len(layers), layers[0].num_kv_heads, layers[0].head_dim, dtype),
        num_blocks=num_blocks,
        block_size=PROBE_BLOCK_SIZE,
        num_slots=1,
        max_model_len=count,
        device=device,
    )
    kv_cache.block_tables[0] = torch.arange(num_blocks, dtype=torch.int32, device=device)
    device_positions = torch.tensor(positions, dtype=torch.int32, device=device)
    cache_positions = torch.arange(count, dtype=torch.int32, device=device)
    slot_mapping = kv_cache.slot_mapping(torch.zeros_like(cache_positions), cache_positions)
    context = ForwardContext(
        kv_cache, SparseAttention(kv_cache, layers, device_positions), slot_mapping
    )
    return decoder.compute_logits(decoder.forward(input_ids, device_positions, context))


class SparseAttention:
    """Attention in plain torch for one sequence that has tokens at some positions only.

    positions   [tokens] increasing; the keys are in the blocks of slot 0, in this order
    """

    def __init__(
        self, kv_cache: KVCache, layers: Sequence[LayerSpec], positions: torch.Tensor
    ) -> None:
        self._kv_cache = kv_cache
        self._layers = layers
        self._distance = positions[:, None] - positions

    def plan(self, metadata: AttentionMetadata) -> None:
        """Do nothing: the rows are known."""

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return each query's output over the keys at its position and before."""
        rows = (queries, *self._kv_cache.gather(layer_index, 0, len(queries)))
        q, k, v = (each.transpose(0, 1) for each in rows)
        return attend_sequence(q, k, v, self._distance, self._layers[layer_index]).transpose(0, 1)

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        """Return None: queries, keys and values are made by the caller."""
        return None


class _CastModule(nn.Module):
    """Module that runs in another dtype. Weights are cast for each call and freed after it."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, *args: Any, **others: Any) -> Any:
        """Return the module's output in `dtype`."""
        tensors = {**dict(self.inner.named_parameters()), **dict(self.inner.named_buffers())}
        cast = {
            name: tensor.to(self.dtype)
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        return torch.func.functional_call(self.inner, cast, args, others)

    def __getattr__(self, name: str) -> Any:
        """Return the inner module's attribute: models read some attributes of their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def _cast_model(module: Any, dtype: torch.dtype, vocab_size: int) -> Any:
    """Return a fusable module in `dtype` over `vocab_size` tokens, on the same weights."""
    base = copy.copy(module.base_model)
    weight = base.embed_tokens.weight[:vocab_size].to(dtype)
    base._modules = {
        **base._modules,
        "embed_tokens": nn.Embedding.from_pretrained(weight),
        "layers": nn.ModuleList(_CastModule(layer, dtype) for layer in base.layers),
        "norm": _CastModule(base.norm, dtype),
    }
    head = nn.Linear(weight.shape[1], vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(module.lm_head.weight[:vocab_size].to(dtype), requires_grad=False)
    copied = copy.copy(module)
    copied._modules = {**module._modules, module.base_model_prefix: base, "lm_head": head}
    return copied


@contextmanager
def _disable_tf32() -> Iterator[None]:
    """Keep a GPU from multiplying float32 as TF32, whose rounding would hide an error."""
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
