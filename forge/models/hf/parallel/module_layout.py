"""Layout of a module's parameters over ranks, for the families whose division is known.

Owns the list of families and the check of each layer's parts. Knows no weights and no files.

    model.layers.3.self_attn.q_proj.weight   Slice(0, rows of the rank's heads)
    model.layers.3.self_attn.o_proj.weight   Slice(1, columns of the rank's heads)
    model.layers.3.input_layernorm.weight    whole: no entry

Always true: every parameter is either in the layout or known to be equal on all ranks. A module
with any other parameter is refused by that parameter's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from forge.errors import InvalidConfig
from forge.models.hf.parallel.sharding import FIELD, HeadCounts, Shard, Slice, VocabShard

DIVISIBLE_CLASSES = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
        *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"),
    }
)
"""Classes of transformers that tests compare, divided, with one rank."""

HEAD_NORMS = ("q_norm", "k_norm")
REMEDY = "Serve it on one device, or serve a Llama, Mistral, Phi-3, Qwen2, Qwen3 or Gemma 2"


class ModuleLayout(NamedTuple):
    """Part of a module that one rank has.

    slices       part of each divided parameter, by its name in `named_parameters`
    partial      names of the linear modules whose outputs are partial sums
    first_only   names of biases that rank 0 alone adds
    heads        attention heads of this rank
    vocab        ids of this rank
    """

    slices: Mapping[str, Slice]
    partial: tuple[str, ...]
    first_only: frozenset[str]
    heads: HeadCounts
    vocab: VocabShard


def find_layout(module: Any, shard: Shard) -> ModuleLayout:
    """Return the rank's part of a ...ForCausalLM. Raise InvalidConfig where it is not known."""
    kind = type(module).__name__
    if kind not in DIVISIBLE_CLASSES:
        raise InvalidConfig(FIELD, f"the layers of {kind} are not known to be divisible", REMEDY)
    config = module.config
    whole = HeadCounts(config.num_attention_heads, config.num_key_value_heads)
    vocab = VocabShard.of(shard, module.lm_head.out_features)
    slices = {"lm_head.weight": Slice(0, ((vocab.first, vocab.end),))}
    partial: list[str] = []
    prefix = f"{module.base_model_prefix}.layers"
    for index, layer in enumerate(module.base_model.layers):
        for name, part in _layer_slices(layer, whole, shard):
            slices[f"{prefix}.{index}.{name}"] = part
        partial += [f"{prefix}.{index}.{each}" for each in ("self_attn.o_proj", "mlp.down_proj")]
    _refuse_unknown(module, slices)
    biases = frozenset(f"{name}.bias" for name in partial)
    return ModuleLayout(slices, tuple(partial), biases, shard.heads(whole), vocab)


def _layer_slices(layer: Any, whole: HeadCounts, shard: Shard) -> Iterator[tuple[str, Slice]]:
    """Yield the divided parameters of a layer, by their names in it."""
    attn, mlp = layer.self_attn, layer.mlp
    head_dim = attn.o_proj.in_features // whole.num_heads
    queries, keys = shard.head_rows(whole, head_dim)
    num_queries, num_keys = whole.num_heads * head_dim, whole.num_kv_heads * head_dim
    inner = mlp.down_proj.in_features
    gate = shard.inner_rows(inner)
    yield "self_attn.o_proj.weight", Slice(1, (queries,))
    yield "mlp.down_proj.weight", Slice(1, (gate,))
    rows: dict[str, tuple[tuple[int, int], ...]] = {}
    if hasattr(attn, "qkv_proj"):
        rows["self_attn.qkv_proj"] = (
            queries,
            _shift(keys, num_queries),
            _shift(keys, num_queries + num_keys),
        )
    else:
        rows |= {"self_attn.q_proj": (queries,), "self_attn.k_proj": (keys,)}
        rows["self_attn.v_proj"] = (keys,)
    if hasattr(mlp, "gate_up_proj"):
        rows["mlp.gate_up_proj"] = (gate, _shift(gate, inner))
    else:
        rows |= {"mlp.gate_proj": (gate,), "mlp.up_proj": (gate,)}
    for name, intervals in rows.items():
        part = Slice(0, intervals)
        linear = layer.get_submodule(name)
        expected = num_queries + 2 * num_keys if name.endswith("qkv_proj") else None
        if expected is not None and linear.out_features != expected:
            raise InvalidConfig(FIELD, f"{name} has {linear.out_features} rows", REMEDY)
        yield f"{name}.weight", part
        if linear.bias is not None:
            yield f"{name}.bias", part


def _shift(interval: tuple[int, int], offset: int) -> tuple[int, int]:
    return (interval[0] + offset, interval[1] + offset)


def _refuse_unknown(module: Any, slices: Mapping[str, Slice]) -> None:
    """Raise InvalidConfig for a parameter or buffer that is not known to be divided or whole."""
    head_dim = module.base_model.layers[0].self_attn.head_dim
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in slices:
            owner = module.get_submodule(name.rpartition(".")[0])
            is_known = type(owner) is nn.Linear
        elif ".self_attn." in name and name.split(".")[-2] in HEAD_NORMS:
            is_known = parameter.shape == (head_dim,)
        else:
            # Norms of the hidden state, biases of o and down, and the embedding.
            hidden_size = module.config.hidden_size
            is_known = parameter.shape == (hidden_size,) or name.endswith("embed_tokens.weight")
        if not is_known:
            raise InvalidConfig(FIELD, f"{name} is not known to be divisible", REMEDY)
    for name, _ in module.named_buffers():
        if "rotary_emb" not in name and not name.endswith("embed_scale"):
            raise InvalidConfig(FIELD, f"the buffer {name} is not known to be divisible", REMEDY)
