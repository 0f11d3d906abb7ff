"""Refusals by a configuration: sizes that no model has, and layers that paged attention has not.

Owns the lists of what is refused. Knows no files and no weights.

    configuration ─► sizes of 1 or more ─► layers of causal attention, with keys and values alone

Always true: a model that passes computes the same with paged attention as with its own.
"""

from __future__ import annotations

from typing import Any

import transformers

from forge.models.hf.loading.checkpoint_files import refuse_model

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
GLOBAL_FIELDS = (
    *("vocab_size", "max_position_embeddings", "rope_parameters", "layer_types", "alibi"),
    *("attn_config", "position_embedding_type", "kv_lora_rank", "num_kv_shared_layers"),
    *("original_max_position_embeddings", "add_cross_attention"),
)
"""Fields that are read once for all layers, here and at the start."""

ATTENTION_SINK_TYPES = {
    *("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"),
}
"""Model types whose attention has a learned logit in addition to those of the keys."""

STATES_BY_LAYER = {"granitemoehybrid"}
"""Model types whose layers have a state only where `layer_types` has other than attention."""

POSITIVE_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def refuse_sizes(config: Any) -> None:
    """Raise InvalidConfig for a size that no model has, by its name in config.json."""

    def size(field: str) -> int | None:
        try:
            value = getattr(config, field, None)
        except RuntimeError:  # Each layer has its own value.
            return None
        return value if type(value) is int else None

    for field in POSITIVE_SIZES:
        value = size(field)
        if value is not None and value < 1:
            refuse_model(f"config.json has {field} {value}, which must be 1 or more", "Fix it")
    experts = [size(field) for field in ("num_local_experts", "num_experts", "n_routed_experts")]
    num_experts, per_token = max(each or 0 for each in experts), size("num_experts_per_tok")
    if num_experts and per_token is not None and not 1 <= per_token <= num_experts:
        refuse_model(
            f"config.json has num_experts_per_tok {per_token}, which must be 1 to {num_experts}",
            "Fix it",
        )
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        refuse_model(
            f"config.json has num_attention_heads {heads}, no multiple of its num_key_value_heads "
            f"{kv_heads}",
            "Fix it",
        )


def refuse_unsupported(config: Any, module_class: Any) -> None:
    """Raise InvalidConfig where paged attention would compute something else than the module."""
    for field in GLOBAL_FIELDS:
        try:
            getattr(config, field, None)
        # transformers raises where each layer has its own value.
        except RuntimeError:
            refuse_model(
                f"{module_class.__name__} has a {field} for each layer, which is not supported",
                "Serve another model, such as a Llama or a Qwen3",
            )

    def has(field: str) -> bool:
        return bool(getattr(config, field, None))

    all_types = set(getattr(config, "layer_types", None) or ())
    layer_types = all_types - ATTENTION_KINDS
    has_attention_alone = config.model_type in STATES_BY_LAYER and all_types and not layer_types
    alibi = (
        config.model_type == "bloom"
        or has("alibi")
        or bool(getattr(getattr(config, "attn_config", None), "alibi", False))
    )
    relative = str(getattr(config, "position_embedding_type", "")).startswith("relative")
    unsupported = {
        # Even as decoders these count positions differently.
        "the layers of an encoder": (
            type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
            or config.model_type == "bert-generation"
        ),
        "layers that read another model": config.model_type.endswith("_assistant"),
        "layers with a state": (
            getattr(module_class, "_is_stateful", False) and not has_attention_alone
        ),
        f"layers of {', '.join(sorted(map(str, layer_types)))}": bool(layer_types),
        "latent attention (MLA)": has("kv_lora_rank"),
        "attention sinks": config.model_type in ATTENTION_SINK_TYPES,
        "ALiBi": alibi,
        "relative position biases": relative,
        "layers that share keys and values": has("num_kv_shared_layers"),
        "attention to another text": has("add_cross_attention"),
        "attention that does not go through transformers' interface": not (
            module_class.is_backend_compatible()
        ),
    }
    for feature, is_present in unsupported.items():
        if is_present:
            refuse_model(
                f"{module_class.__name__} has {feature}, which is not supported",
                "Serve another model, such as a Llama or a Qwen3",
            )
