"""Models that the fused decoder can compute, by configuration and by structure.

Owns the lists of what is allowed. A field of the configuration or a part of the module that is in
none of them makes the model run its own modules, which is slower and right.

    config  ─► unmodelled_fields ─► none ┐
                                         ├─► fuse ─► compared with the modules (comparison.py)
    module  ─► has_known_structure ─► yes┘
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from typing import Any

from torch import nn

from forge.models.hf.attention.interface import LayerSpec

INERT_FIELDS = {
    *("architectures", "dtype", "id2label", "label2id", "problem_type", "return_dict"),
    *("output_hidden_states", "transformers_version", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"),
}
"""Fields that change no logit of a model in eval mode."""

MODELLED_FIELDS = {
    # Shapes of weights, and fields whose effect the structure or the layers' inspection shows.
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps"),
    *("hidden_act", "attention_bias", "attention_out_bias", "mlp_bias"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "attention_multiplier",
    # Read by the module's own rotary code.
    *("max_position_embeddings", "original_max_position_embeddings", "rope_parameters"),
    "partial_rotary_factor",
}
"""Fields that the fused decoder takes at any value."""

NEUTRAL_VALUES = {
    **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    **{"chunk_size_feed_forward": 0, "is_encoder_decoder": False},
}
"""Fields that the fused decoder takes at this value only."""

ROPE_FIELDS = {
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"),
    "type",  # The older name of rope_type, which checkpoints have instead or as well.
    *("original_max_position_embeddings", "max_position_embeddings", "truncate"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor"),
}
"""Fields of `rope_parameters` that only cosines and sines depend on."""


def unmodelled_fields(module: Any) -> list[str]:
    """Return the fields of the module's configuration that the fused decoder does not model.

    A field counts if its class declares it, or if the module's source reads it. Other fields of a
    checkpoint have no effect in transformers.
    """
    values = vars(module.config)
    source = inspect.getsource(sys.modules[type(module).__module__])
    names = {each.name for each in fields(module.config)}
    for name in values:
        pattern = re.escape(name)
        if re.search(rf"config\.{pattern}\b|[\"']{pattern}[\"']", source):
            names.add(name)
    found = [
        name
        for name in sorted(names - INERT_FIELDS - MODELLED_FIELDS)
        if not name.startswith("_") and values.get(name) != NEUTRAL_VALUES.get(name, values)
    ]
    rotary = values.get("rope_parameters") or {}
    return found + [f"rope_parameters.{name}" for name in sorted(set(rotary) - ROPE_FIELDS)]


def has_known_structure(module: Any, spec: LayerSpec) -> bool:
    """Return whether the module has Llama's parts under Llama's names, and no others."""
    base = module.base_model
    if _child_names(module) != {module.base_model_prefix, "lm_head"}:
        return False
    if _child_names(base) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if not _is_linear(module.lm_head) or module.lm_head.bias is not None:
        return False
    if type(base.embed_tokens) is not nn.Embedding or base.embed_tokens.max_norm is not None:
        return False
    owners = [module, base, base.layers]
    norms = [base.norm]
    for layer in base.layers:
        if not _has_known_layer_structure(layer, spec):
            return False
        owners += [layer, layer.self_attn, layer.mlp]
        norms += [layer.input_layernorm, layer.post_attention_layernorm, *_qk_norms(layer)]
    if any([*owner.parameters(recurse=False), *owner.buffers(recurse=False)] for owner in owners):
        return False
    return all(map(_is_rms_norm, norms)) and len({norm.variance_epsilon for norm in norms}) == 1


def _has_known_layer_structure(layer: Any, spec: LayerSpec) -> bool:
    """Return whether a layer has exactly the parts that LayerWeights is made of."""
    # Not with the file's imports: this brings the modelling code, which some starts do not need.
    from transformers.activations import ACT2FN

    if _child_names(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention = _child_names(layer.self_attn) - {"q_norm", "k_norm"}
    mlp = _child_names(layer.mlp) - {"act_fn", "activation_fn"}
    if attention not in ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}):
        return False
    if mlp not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}):
        return False
    activation = getattr(layer.mlp, "act_fn", None) or getattr(layer.mlp, "activation_fn", None)
    inputs = [getattr(layer.self_attn, name) for name in attention - {"o_proj"}]
    inner = [getattr(layer.mlp, name) for name in mlp]
    return (
        type(activation) in (nn.SiLU, type(ACT2FN["silu"]))
        and all(map(_is_linear, [layer.self_attn.o_proj, *inputs, *inner]))
        and len({part.bias is None for part in inputs}) == 1
        and all(part.bias is None for part in inner)
        and all(norm.weight.shape == (spec.head_dim,) for norm in _qk_norms(layer))
    )


def _qk_norms(layer: Any) -> list[Any]:
    children = dict(layer.self_attn.named_children())
    return [children[name] for name in ("q_norm", "k_norm") if name in children]


def _child_names(module: nn.Module) -> set[str]:
    """Return the names of the children, dropout excluded."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _is_rms_norm(module: nn.Module) -> bool:
    """Return whether it is an RMSNorm that multiplies by its weight. Gemma's adds 1 to it."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
