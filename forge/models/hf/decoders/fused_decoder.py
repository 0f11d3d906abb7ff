"""FusedDecoder: a hand-written Llama-like decoder with fused weights and few large operations.

Owns the fused weights and the order of operations. The operations come from `Ops`: plain torch on
a CPU (ops/reference.py), Triton on a GPU (ops/triton_ops.py). Knows no plan, no sampling and no
graph.

    many tokens                             up to `ops.max_small_rows` tokens
    h = norm(x)                             qkv = small(x, Wqkv, norm)
    qkv = h Wqkv                            q, k = rope_and_cache(qkv)
    q, k = rope_and_cache(qkv)              a = attend(q, k, v)
    a = attend(q, k, v)                     x += small(a, Wo)
    x += a Wo;  h = norm(x)                 m = gate_up_small(x, Wgu, norm)
    m = gate_up(h, Wgu)                     x += small(m, Wd)
    x += m Wd;  h = next norm(x)            6 launches a layer

q, k and v are one GEMM, gate and up another: the input is read once, in one launch, with enough
output columns to fill the device.
Always true: a decoder is fused only where configuration and structure are known
(fusion_support.py), and is then compared with the modules it replaces (comparison.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.functional import embedding

from forge.models.hf.attention.interface import LayerSpec, QKNormRope
from forge.models.hf.decoders.fusion_support import has_known_structure, unmodelled_fields
from forge.models.hf.decoders.interface import ALL_TOKENS, ForwardContext, TokenSelection
from forge.models.hf.kv_cache import KVCache
from forge.models.hf.ops.interface import Ops

log = logging.getLogger(__name__)
start_log = logging.getLogger("forge.start")


class LayerWeights(NamedTuple):
    """Weights of one layer, [outputs, inputs] like nn.Linear's."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _identity(layer: LayerWeights) -> LayerWeights:
    return layer


def _cast_layer(layer: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """Return the layer with all weights in `dtype`."""
    return LayerWeights(*(None if weight is None else weight.to(dtype) for weight in layer))


class FusedDecoder:
    """Embedding, layers and head of a Llama-like model, built by `fuse`."""

    def __init__(
        self,
        ops: Ops,
        spec: LayerSpec,
        eps: float,
        embedding: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        layers: list[LayerWeights],
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._eps = eps
        self._embedding = embedding
        self._ropes = [QKNormRope(*cos_sin, each.q_norm, each.k_norm, eps) for each in layers]
        self._layers = layers
        self._cast_layer = _identity
        self._norm = norm
        self._head = head

    @classmethod
    def from_tensors(
        cls,
        ops: Ops,
        spec: LayerSpec,
        eps: float,
        num_layers: int,
        tensors: Iterable[torch.Tensor | None],
    ) -> Self:
        """Return the decoder that is made of these tensors, in the order of `tensors()`."""
        rest: Iterator[Any] = iter(tensors)
        embedding, cos, sin = islice(rest, 3)
        num_fields = len(LayerWeights._fields)
        layers = [LayerWeights(*islice(rest, num_fields)) for _ in range(num_layers)]
        norm, head = rest
        return cls(ops, spec, eps, embedding, (cos, sin), layers, norm, head)

    def tensors(self) -> Iterator[torch.Tensor | None]:
        """Yield all tensors: embedding, cos, sin, the weights of each layer, norm, head."""
        yield from (self._embedding, self.first_rope.cos, self.first_rope.sin)
        for layer in self._layers:
            yield from layer
        yield from (self._norm, self._head)

    @property
    def eps(self) -> float:
        """Constant that the norms add to a mean of squares."""
        return self._eps

    def with_dtype(self, ops: Ops, dtype: torch.dtype, vocab_size: int) -> FusedDecoder:
        """Return this decoder with other ops, in `dtype`, over the first `vocab_size` tokens.

        A layer's weights are cast when the layer runs, so one layer at a time is held in `dtype`.
        """
        copied = copy.copy(self)
        copied._ops = ops
        copied._cast_layer = partial(_cast_layer, dtype=dtype)
        copied._embedding = self._embedding[:vocab_size].to(dtype)
        copied._norm = self._norm.to(dtype)
        copied._head = self._head[:vocab_size].to(dtype)
        return copied

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> torch.Tensor:
        """Return hidden states after the last layer, before the last norm, [N, hidden_size]."""
        x = embedding(input_ids, self._embedding)
        if x.shape[0] <= self._ops.max_small_rows:
            return self._forward_small(x, positions, context)[logits_indices]
        return self._forward_large(x, positions, context, logits_indices)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [rows, vocab_size]."""
        if hidden.shape[0] <= self._ops.max_small_rows:
            return self._ops.linear_small(hidden, self._head, norm_weight=self._norm, eps=self._eps)
        return self._ops.linear(self._ops.rms_norm(hidden, self._norm, self._eps), self._head)

    def warmup_calls(self, kv_cache: KVCache) -> Iterator[Callable[[], object]]:
        """Yield calls that together compile every operation in every form that a step may need.

        They write keys and values to the scratch block.
        """
        ops, layer, eps, spec = self._ops, self._layers[0], self._eps, self._spec
        device, dtype = self._norm.device, self._norm.dtype

        def some(rows: int, weight: torch.Tensor) -> torch.Tensor:
            return torch.zeros(rows, weight.shape[1], dtype=dtype, device=device)

        for rows in (1, 2, 3, 4)[: ops.max_small_rows]:
            x, a, m = some(rows, layer.qkv), some(rows, layer.o), some(rows, layer.down)
            yield partial(ops.linear_small, x, self._head, norm_weight=self._norm, eps=eps)
            norms = {"norm_weight": layer.input_norm, "eps": eps}
            yield partial(ops.linear_small, x, layer.qkv, bias=layer.qkv_bias, **norms)
            yield partial(ops.linear_small, a, layer.o, bias=layer.o_bias, residual=x)
            yield partial(ops.gate_up_small, x, layer.gate_up, layer.post_norm, eps)
            yield partial(ops.linear_small, m, layer.down, residual=x)
        scratch_slot = kv_cache.scratch_slot
        for rows in (8, 16, 32):
            for weight in (layer.qkv, layer.o, layer.down, self._head):
                yield partial(ops.linear, some(rows, weight), weight)
            yield partial(ops.gate_up, some(rows, layer.gate_up), layer.gate_up)
        for rows in (8, 128):
            x = some(rows, layer.qkv)
            yield partial(ops.rms_norm, x, self._norm, eps)
            yield partial(ops.add_rms_norm, x, x.clone(), self._norm, eps)
            yield partial(ops.gate_up, x, layer.gate_up)
            positions = torch.zeros(rows, dtype=torch.int32, device=device)
            slot_mapping = kv_cache.slot_mapping(
                torch.full_like(positions, scratch_slot), positions
            )
            rope = self._ropes[0]
            yield partial(
                ops.rope_and_cache,
                some(rows, layer.qkv.T),
                rope.cos,
                rope.sin,
                positions,
                slot_mapping,
                kv_cache.keys[0],
                kv_cache.values[0],
                rope.q_norm_weight,
                rope.k_norm_weight,
                eps,
                spec.num_heads,
                spec.num_kv_heads,
            )

    def _attend(
        self, layer_index: int, qkv: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return the layer's outputs, [tokens, heads * head_dim]; write its keys and values."""
        spec, rope = self._spec, self._ropes[layer_index]
        out = context.attention.attend_qkv(layer_index, qkv, rope)
        if out is not None:
            return out
        queries, keys = self._ops.rope_and_cache(
            qkv,
            rope.cos,
            rope.sin,
            positions,
            context.slot_mapping,
            context.kv_cache.keys[layer_index],
            context.kv_cache.values[layer_index],
            rope.q_norm_weight,
            rope.k_norm_weight,
            rope.eps,
            spec.num_heads,
            spec.num_kv_heads,
        )
        heads = qkv.view(len(qkv), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        values = heads[:, spec.num_heads + spec.num_kv_heads :]
        return context.attention.attend(layer_index, queries, keys, values).flatten(1)

    def _forward_small(
        self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Run all layers with the operations for few rows."""
        ops, eps = self._ops, self._eps
        for index, layer in enumerate(map(self._cast_layer, self._layers)):
            qkv = ops.linear_small(
                x, layer.qkv, bias=layer.qkv_bias, norm_weight=layer.input_norm, eps=eps
            )
            a = self._attend(index, qkv, positions, context)
            x = self._add_output_small(a, layer.o, layer.o_bias, x)
            m = ops.gate_up_small(x, layer.gate_up, layer.post_norm, eps)
            x = self._add_output_small(m, layer.down, None, x)
        return x

    def _add_output_small(
        self, y: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return y @ w.T + bias + residual: attention's or the MLP's last product, few rows."""
        return self._ops.linear_small(y, w, bias=bias, residual=residual)

    def _add_output(
        self, y: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Return y @ w.T + bias + residual: attention's or the MLP's last product, many rows."""
        return residual + self._ops.linear(y, w, bias)

    def _add_output_norm(
        self,
        y: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y @ w.T + bias + residual and its norm. The residual may be overwritten."""
        y = self._ops.linear(y, w, bias)
        return residual, self._ops.add_rms_norm(y, residual, norm_weight, self._eps)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._norm.dtype

    @property
    def first_rope(self) -> QKNormRope:
        """Norm and rotation of the first layer."""
        return self._ropes[0]

    def _forward_large(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection,
    ) -> torch.Tensor:
        """Run all layers for many tokens. The last MLP runs for the selected tokens only."""
        ops, eps = self._ops, self._eps
        last = len(self._layers) - 1
        h = ops.rms_norm(x, self._layers[0].input_norm, eps)
        for index, layer in enumerate(map(self._cast_layer, self._layers)):
            a = self._attend(index, ops.linear(h, layer.qkv, layer.qkv_bias), positions, context)
            if index == last:
                a, x = a[logits_indices], x[logits_indices]
            x, h = self._add_output_norm(a, layer.o, layer.o_bias, x, layer.post_norm)
            m = ops.gate_up(h, layer.gate_up)
            if index < last:
                next_norm = self._layers[index + 1].input_norm
                x, h = self._add_output_norm(m, layer.down, None, x, next_norm)
            else:
                x = self._add_output(m, layer.down, None, x)
        return x


def _stack_weights(
    parent: nn.Module, names: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack weights (and biases) of linear modules, whose own become views of the result.

    Because of the views the modules still work, and no weight is held twice.
    """
    parts = [getattr(parent, name) for name in names]
    weight = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    first = 0
    for part in parts:
        rows = part.weight.shape[0]
        part.weight.data = weight[first : first + rows]
        if bias is not None:
            part.bias.data = bias[first : first + rows]
        first += rows
    return weight, bias


def qkv_names(attn: Any) -> tuple[str, ...]:
    """Return the names of the modules whose weights are stacked as QKV."""
    return ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")


def gate_up_names(mlp: Any) -> tuple[str, ...]:
    """Return the names of the modules whose weights are stacked as gate and up."""
    return ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")


def _extract_layer(module: Any) -> LayerWeights:
    """Return a layer's weights, its QKV and its gate and up projections stacked."""
    attn, mlp = module.self_attn, module.mlp
    qkv, qkv_bias = _stack_weights(attn, qkv_names(attn))
    return LayerWeights(
        module.input_layernorm.weight.data,
        qkv,
        qkv_bias,
        attn.q_norm.weight.data if hasattr(attn, "q_norm") else None,
        attn.k_norm.weight.data if hasattr(attn, "k_norm") else None,
        attn.o_proj.weight.data,
        None if attn.o_proj.bias is None else attn.o_proj.bias.data,
        module.post_attention_layernorm.weight.data,
        _stack_weights(mlp, gate_up_names(mlp))[0],
        mlp.down_proj.weight.data,
    )


def _compute_cos_sin(module: Any, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of every position, [positions, rotated], by the module's own code."""
    weight = module.base_model.embed_tokens.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    positions = torch.arange(max_model_len, device=weight.device)[None]
    cos, sin = module.base_model.rotary_emb(
        torch.empty(0, dtype=dtype, device=weight.device), positions
    )
    return cos[0].contiguous(), sin[0].contiguous()


def fuse(
    module: Any,
    specs: list[LayerSpec],
    ops: Ops,
    max_model_len: int,
    create: Callable[..., FusedDecoder] = FusedDecoder,
) -> FusedDecoder | None:
    """Return the module's fused decoder, or None where it may compute something else.

    create   takes the arguments of FusedDecoder and returns the decoder
    """
    layers_differ = len({spec._replace(window=0) for spec in specs}) != 1
    if layers_differ or not has_known_structure(module, specs[0]):
        start_log.info(
            "%s runs transformers' modules: the fused decoder has no such layers",
            type(module).__name__,
        )
        return None
    unmodelled_names = unmodelled_fields(module)
    if unmodelled_names:
        names = ", ".join(unmodelled_names)
        log.warning("the fused decoder does not model %s; the modules are used instead", names)
        return None
    base = module.base_model
    return create(
        ops,
        specs[0],
        base.norm.variance_epsilon,
        base.embed_tokens.weight.data,
        _compute_cos_sin(module, max_model_len),
        [_extract_layer(layer) for layer in base.layers],
        base.norm.weight.data,
        module.lm_head.weight.data,
    )
