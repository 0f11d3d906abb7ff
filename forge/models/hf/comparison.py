"""Comparison: how far a decoder's logits are from those of the modules that it stands for.

Owns two measures and where they look. Knows no plan and no sampling.

    deviation   the fused arithmetic in plain torch against the modules, both in float32: what is
                computed. One layer at a time is cast, so a large model needs no float32 copy
    distance    the decoder as it will run against the modules, in the model's dtype: its kernels

    positions   0 .. 7    |    w-1 w w+1    |    2^k    |    the last two
                          every integer w of the configuration

A boundary in position (a window, the length before scaling, a chunk) is an integer of the
configuration, so tokens stand on both sides of each. No token stands between them: attention of a
probe masks by position, and a position of 100,000 costs as much as one of 10.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge.models.hf.arithmetic import TorchOps
from forge.models.hf.attention import LayerSpec, Rotary, Rows, row_attention
from forge.models.hf.decoder import Decoder, ModuleDecoder, PagedStep
from forge.models.hf.fused import FusedDecoder
from forge.models.hf.pool import KVPool, KVShape

FIRST_POSITIONS = 8
"""Positions at the start of a probe, one after the other."""

VOCABULARY = 4096
"""Tokens over which `deviation` is measured: the embedding and the head are not cast whole."""

DEVIATION = 1e-3
"""Largest deviation that rounding to float32 explains, generously."""

BLOCK_SIZE = 32
"""Of the pages of a probe."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest distance that rounding alone explains, generously."""
    return {torch.float64: 1e-5, torch.float32: 1e-3}.get(dtype, 0.1)


def probe_positions(config: Any, max_model_len: int) -> list[int]:
    """Return where the tokens of a probe stand, in order, all below `max_model_len`."""
    named = set(_integers(vars(config.get_text_config())))
    found = {*range(FIRST_POSITIONS), max_model_len - 2, max_model_len - 1}
    found |= {1 << k for k in range(max_model_len.bit_length())}
    found |= {integer + step for integer in named for step in (-1, 0, 1)}
    return sorted(position for position in found if 0 <= position < max_model_len)


def _integers(values: dict[str, Any]) -> Iterator[int]:
    """Yield the integers of a configuration and of the dictionaries in it."""
    for value in values.values():
        if isinstance(value, dict):
            yield from _integers(value)
        elif type(value) is int:
            yield value


@torch.inference_mode()
def deviation(
    modules: ModuleDecoder,
    fused: FusedDecoder,
    layers: Sequence[LayerSpec],
    positions: Sequence[int],
) -> float:
    """Return the largest |a - b| / |a| of a token's logits, in float32 or wider; NaN stays NaN."""
    module = modules.module
    dtype = torch.promote_types(module.dtype, torch.float32)
    sizes = (module.lm_head.weight.shape[0], module.base_model.embed_tokens.weight.shape[0])
    rows = min(VOCABULARY, *sizes)
    wide = (ModuleDecoder(_widened(module, dtype, rows)), fused.widened(TorchOps(), dtype, rows))
    ids = _ids(len(positions), rows, module.device)
    with _full_precision():
        a, b = (probe_logits(decoder, ids, positions, layers, dtype) for decoder in wide)
    return float(((a - b).norm(dim=-1) / a.norm(dim=-1)).max())


@torch.inference_mode()
def distance(
    modules: ModuleDecoder, other: Decoder, layers: Sequence[LayerSpec], positions: Sequence[int]
) -> float:
    """Return |a - b| / |a| of all logits of a probe, or of its last tokens; NaN stays NaN.

    The largest over a prompt of all positions and over steps of one token and of two.
    """
    module = modules.module
    vocab_size = module.config.get_text_config().vocab_size
    ids = _ids(len(positions), vocab_size, module.device)
    apart = []
    for count in (len(positions), 1, 2):
        probe = (ids[-count:], positions[-count:], layers, module.dtype)
        a, b = (probe_logits(decoder, *probe).double() for decoder in (modules, other))
        apart.append((a - b).norm() / a.norm())
    return float(torch.stack(apart).max())


def _ids(count: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int32, device=device) * 7919) % vocab_size


def probe_logits(
    decoder: Decoder,
    ids: torch.Tensor,
    positions: Sequence[int],
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the logits of tokens of one sequence that stand at increasing `positions`."""
    count, device = len(ids), ids.device
    num_blocks = -(-count // BLOCK_SIZE)
    pool = KVPool(
        KVShape(len(layers), layers[0].num_kv_heads, layers[0].head_dim, dtype),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_slots=1,
        max_model_len=count,
        device=device,
    )
    pool.tables[0] = torch.arange(num_blocks, dtype=torch.int32, device=device)
    at = torch.tensor(positions, dtype=torch.int32, device=device)
    places = torch.arange(count, dtype=torch.int32, device=device)
    where = pool.places(torch.zeros_like(places), places)
    step = PagedStep(pool, SparseAttention(pool, layers, at), where)
    return decoder.logits(decoder.hidden(ids, at, step))


class SparseAttention:
    """Plain torch, for one sequence that has tokens at some positions only.

    positions   [tokens] of the step, increasing; its keys fill the pages of slot 0 in this order
    """

    def __init__(self, pool: KVPool, layers: Sequence[LayerSpec], positions: torch.Tensor) -> None:
        self._pool = pool
        self._layers = layers
        self._behind = positions[:, None] - positions

    def begin(self, rows: Rows) -> None:
        """Do nothing: the rows are known."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return each query's output over the keys at its position and before."""
        rows = (queries, *self._pool.gathered(layer, 0, len(queries)))
        q, k, v = (each.transpose(0, 1) for each in rows)
        return row_attention(q, k, v, self._behind, self._layers[layer]).transpose(0, 1)

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> None:
        """Return None: queries, keys and values are made before."""
        return None


class _Wide(nn.Module):
    """Runs a module in another dtype; its weights are cast for the call and dropped after it."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.wide = dtype

    def forward(self, *args: Any, **others: Any) -> Any:
        """Return what the module gives."""
        tensors = {**dict(self.inner.named_parameters()), **dict(self.inner.named_buffers())}
        cast = {
            name: tensor.to(self.wide)
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        return torch.func.functional_call(self.inner, cast, args, others)

    def __getattr__(self, name: str) -> Any:
        """Return the module's own attribute: models ask their layers for their kind."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def _widened(module: Any, dtype: torch.dtype, rows: int) -> Any:
    """Return a fusable module in `dtype`, on the same weights, of `rows` tokens."""
    base = copy.copy(module.base_model)
    weight = base.embed_tokens.weight[:rows].to(dtype)
    base._modules = {
        **base._modules,
        "embed_tokens": nn.Embedding.from_pretrained(weight),
        "layers": nn.ModuleList(_Wide(layer, dtype) for layer in base.layers),
        "norm": _Wide(base.norm, dtype),
    }
    head = nn.Linear(weight.shape[1], rows, bias=False, device="meta")
    head.weight = nn.Parameter(module.lm_head.weight[:rows].to(dtype), requires_grad=False)
    wide = copy.copy(module)
    wide._modules = {**module._modules, module.base_model_prefix: base, "lm_head": head}
    return wide


@contextmanager
def _full_precision() -> Iterator[None]:
    """Keep a GPU from multiplying float32 as TF32, whose rounding hides what is looked for."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
