"""Tiny configurations of transformers' causal language models, and random weights for them.

Owns which field of a configuration becomes which number: widths and counts become small, and every
position at which the computation changes (a window, the original context of a scaled rotation)
comes within POSITIONS. All else stays at the class's own default, or is drawn from a seed.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING

POSITIONS = 256
"""Longest sequence of a tiny model."""

LAYERS = 4
WINDOW = 20
ORIGINAL_POSITIONS = 64
VOCAB = 307

FIELD_NAMES_BY_SIZE = (
    (
        64,
        "hidden_size d_model n_embd embedding_dim word_embed_proj_dim emb_dim dim_model_base "
        "attention_hidden_size embedding_size",
    ),
    (
        96,
        "intermediate_size dense_intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim "
        "encoder_ffn_dim n_inner ffn_hidden_size expert_ffn_hidden_size dim_ff dff "
        "shared_intermediate_size",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size query_pre_attn_scalar "
        "moe_shared_expert_intermediate_size "
        "prefix_dense_intermediate_size router_hidden_size "
        "swa_head_dim head_dim kv_channels index_head_dim indexer_head_dim",
    ),
    (
        16,
        "kv_lora_rank q_lora_rank v_head_dim qk_nope_head_dim hidden_size_per_layer_input "
        "laurel_rank index_topk swa_v_head_dim o_lora_rank hc_lowrank mamba_d_state",
    ),
    (
        8,
        "qk_rope_head_dim d_rel gated_norm_rank rotary_dim num_experts num_local_experts "
        "n_routed_experts moe_num_experts index_block_size",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
        "encoder_attention_heads swa_num_attention_heads index_n_heads zero_expert_num",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk "
        "moe_k num_kv_shared_layers o_groups max_window_layers n_group index_topk_blocks",
    ),
    (
        1,
        "first_k_dense_replace num_dense_layers moe_layer_start_index num_mtp_layers "
        "num_nextn_predict_layers topk_group num_shared_experts n_shared_experts "
        "index_local_blocks",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "moe_layer_end_index",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size local_attention window_size",
    ),
    (32 + 8, "attention_chunk_size floor_scale log_scaling_n_floor keep_window_size"),
    (ORIGINAL_POSITIONS, "original_max_position_embeddings"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
)
SIZES = {name: size for size, names in FIELD_NAMES_BY_SIZE for name in names.split()}
"""What a field of that name becomes where its class has another number than 0 or None."""

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
}
"""Fields that a class needs and has no working default for, by model type."""


def field_names(cls: type) -> list[str]:
    """Return the names of all fields of a configuration class."""
    assert is_dataclass(cls), f"{cls.__name__} is no dataclass"
    return [each.name for each in fields(cls)]


def tiny_config(kind: str, seed: int | None = None) -> Any:
    """Return a small configuration; with a seed, one with optional fields changed.

    Raises whatever transformers raises for a configuration that it cannot have.
    """
    cls = CONFIG_MAPPING[kind]
    extra = WITHOUT_DEFAULT.get(kind, {})
    default = cls(**extra) if "text_config" in extra else cls()
    if is_composite(default):
        return default
    kwargs = small_fields(default)
    if seed is not None:
        kwargs = draw_fields(default, kwargs, random.Random(f"{kind} {seed}"))
    return cls(**kwargs)


def small_fields(default: Any) -> dict[str, Any]:
    """Return the fields that make the default configuration small."""
    count = value_of(default, "num_hidden_layers")
    small: dict[str, Any] = {}
    for name in field_names(type(default)):
        value = value_of(default, name)
        if name in TOKENS:
            small[name] = TOKENS[name]
        elif name in SIZES and isinstance(value, int) and value:
            small[name] = min(value, SIZES[name])
        elif isinstance(value, (list, tuple)) and len(value) == count:
            small[name] = sample_layers(value)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            small[name] = small_rotation(value)
    return small | WITHOUT_DEFAULT.get(default.model_type, {})


def value_of(config: Any, name: str) -> Any:
    """Return a field's value, or None where it has no single one."""
    return vars(config).get(config.attribute_map.get(name, name))


def is_composite(config: Any) -> bool:
    """Return whether the text model is a part of the configured one. Such are refused by name."""
    try:
        return config.get_text_config() is not config
    except ValueError:  # there are several
        return True


def sample_layers(values: Any) -> list[Any]:
    """Return LAYERS of the values, one for each layer, with every kind among them."""
    kinds = list(dict.fromkeys(values))
    return [kinds[index % len(kinds)] for index in range(LAYERS)]


def small_rotation(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rope parameters whose original context is ORIGINAL, at any depth."""
    rope = copy.deepcopy(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            rope[name] = small_rotation(value)
        elif name == "original_max_position_embeddings":
            rope[name] = ORIGINAL_POSITIONS
        elif name == "max_position_embeddings":
            rope[name] = POSITIONS
    return rope


OPTIONAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 2.0),
    "clip_qkv": (None, 0.7),
    "decoder_sparse_step": (2,),
    "final_logit_softcapping": (None, 1.5),
    "global_attn_every_n_layers": (2, 3),
    "head_dim": (16, 32),
    "hidden_act": ("gelu", "relu", "silu", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu", "relu", "gelu_pytorch_tanh"),
    "logit_scale": (0.5, 2.0),
    "logits_soft_cap": (1.5,),
    "max_window_layers": (0, 1, 3),
    "mlp_only_layers": ([0], [1, 2]),
    "no_rope_layer_interval": (1, 2, 3),
    "num_experts_per_tok": (1, 3),
    "num_key_value_heads": (1, 2, 4),
    "num_kv_shared_layers": (0, 1, 2),
    "query_pre_attn_scalar": (4, 64),
    "sliding_window": (7, WINDOW),
    "sliding_window_pattern": (2, 3),
}
"""Values of optional fields that cannot be made of their defaults."""

PER_LAYER: dict[str, tuple[Any, ...]] = {
    "layer_types": ("full_attention", "sliding_attention"),
    "no_rope_layers": (0, 1),
    "layer_rope_theta": (None, 100.0, 10000.0),
}
"""Fields with a value for each layer, which is one of these."""

LAYER_RULES = frozenset(
    "global_attn_every_n_layers max_window_layers no_rope_layer_interval sliding_window_pattern "
    "use_sliding_window".split()
)
"""Fields from which a class makes the lists of PER_LAYER where it is not given one."""

INERT = re.compile(
    "drop|init|std|jitter|coef|loss|aux|output_|use_cache|is_decoder|is_encoder|pretraining|summary|"
    "return|classifier|slow_but_exact|kernel|scale_attention_softmax|upcast"
)
"""Names of fields about training, or about the form of an output."""

ATTENTION = re.compile("rope|rotary|window|layer_types|soft|clip|scal|multiplier|norm|head|bias|kv")


def draw_fields(default: Any, small: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return the small fields with one to five optional ones changed."""
    possible = {}
    for name in field_names(type(default)):
        values = alternatives(name, small.get(name, value_of(default, name)), small, draw)
        if values:
            possible[name] = values
    # What changes attention is drawn as often as all else together.
    pools = [sorted(filter(ATTENTION.search, possible)), sorted(possible)]
    names = {draw.choice(pool) for pool in draw.choices(pools, k=draw.randint(1, 5)) if pool}
    changed = {name: draw.choice(possible[name]) for name in sorted(names)}
    if names & {"use_sliding_window", "layer_types", "max_window_layers"}:
        windows = {"sliding_window": WINDOW, "use_sliding_window": True}
        changed = {name: windows[name] for name in windows if name in possible} | changed
    left_out = PER_LAYER.keys() if names & LAYER_RULES else ()
    return {name: small[name] for name in small if name not in left_out} | changed


def alternatives(
    name: str, value: Any, small: dict[str, Any], draw: random.Random
) -> tuple[Any, ...]:
    """Return other values of a field; none where they have no effect."""
    if INERT.search(name) or name in TOKENS:
        return ()
    if name in PER_LAYER:
        if name == "layer_types" and not set(value or ()) <= {*PER_LAYER[name]}:
            return ()
        return ([draw.choice(PER_LAYER[name]) for _ in range(LAYERS)],)
    if name == "rope_parameters":
        width = small.get("head_dim") or 16
        return (draw_rotations(value, width, draw),) if isinstance(value, dict) else ()
    if name in OPTIONAL:
        return tuple(each for each in OPTIONAL[name] if each != value)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, float) and "eps" in name:
        return (1e-2,)
    if isinstance(value, float):
        return (value / 2, value * 2) if value else (0.5,)
    return ()


def draw_rotations(rope: dict[str, Any], width: int, draw: random.Random) -> dict[str, Any]:
    """Return rope parameters of another type, or of other types for each kind of layer."""
    kinds = [kind for kind, each in rope.items() if each is None or isinstance(each, dict)]
    if kinds:
        several = {kind: draw_rotation(1.0, width, draw) for kind in kinds}
        return {kind: None if draw.random() < 0.2 else each for kind, each in several.items()}
    return draw_rotation(rope.get("partial_rotary_factor", 1.0), width, draw)


def draw_rotation(share: float, width: int, draw: random.Random) -> dict[str, Any]:
    """Return rope parameters of one type.

    share   of a head's dimensions that is rotated, by default
    width   of a head
    """
    share = 0.5 if draw.random() < 0.3 else share
    pairs = int(width * share) // 2
    original = {"original_max_position_embeddings": ORIGINAL_POSITIONS}
    scaled = {"factor": draw.choice([2.0, 4.0]), **original}
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = [
        *({}, {"attention_factor": 0.7}, {"truncate": False}),
        *({"mscale": 1.0, "mscale_all_dim": 0.5}, {"beta_fast": 8.0, "beta_slow": 2.0}),
    ]
    factors = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(pairs)],
        **draw.choice([{}, {"attention_factor": 1.3}]),
    }
    types = {
        "default": {},
        "linear": {"factor": scaled["factor"]},
        "dynamic": {"factor": scaled["factor"], **draw.choice([{}, original])},
        "yarn": {**scaled, **draw.choice(yarn)},
        "llama3": {**scaled, **frequencies},
        "longrope": {**scaled, **factors},
    }
    name = draw.choice(list(types))
    rope = {"rope_type": name, "rope_theta": draw.choice([100.0, 1e4]), **types[name]}
    if share != 1.0:
        rope["partial_rotary_factor"] = share
    if draw.random() < 0.2:
        rope["llama_4_scaling_beta"] = 0.1
    return rope


STRONG_DEVIATION, WEAK_DEVIATION = 0.18, 0.08
"""Deviations of the weights of matrices.

Strong weights make what a layer does wrong large. With weak ones it is hidden among other layers,
where a comparison at load in bfloat16 cannot see it.
"""


def weight_deviation(dtype: str, seed: int | None) -> float:
    """Return STRONG in float32 and WEAK in bfloat16; the other of the two for odd seeds."""
    return STRONG_DEVIATION if (dtype == "float32") == ((seed or 0) % 2 == 0) else WEAK_DEVIATION


@torch.no_grad()
def draw_weights(module: Any, deviation: float) -> None:
    """Give every tensor random numbers, so large that what precedes a token matters.

    transformers' own start is so near zero that every context looks the same.
    """
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * deviation * (1.6 if tensor.shape[-1] < 32 else 1.0))
        elif "bias" in name:
            tensor.copy_(noise * 0.1)
        else:
            tensor.add_(noise * 0.1)
