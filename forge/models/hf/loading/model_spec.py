"""ModelSpec: a checkpoint, its tokenizer and the geometry, before any weight is loaded.

Owns the default geometry of each device, and what is refused of a geometry. Loads no weights.

    checkpoint ─► tokenizer ─► defaults | what the caller set ─► EngineConfig, checked
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge.config import DeviceOptions, EngineConfig, default_batched_tokens
from forge.errors import InvalidConfig
from forge.models.hf.loading.checkpoint import Checkpoint, open_checkpoint
from forge.models.hf.loading.end_tokens import EndToken, complete_end_tokens, usable_end_ids
from forge.models.hf.loading.kernel_selection import refuse_small_gpu
from forge.models.hf.tokenizer import HFTokenizer

CPU_DEFAULTS: Mapping[str, Any] = {
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "depth": 1,
}
CUDA_DEFAULTS: Mapping[str, Any] = {
    "block_size": 64,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "depth": 2,
}
"""Geometry where the caller set none."""


class ModelSpec(NamedTuple):
    """Everything known of a model before its weights are loaded.

    config_fields   fields of EngineConfig, all checked; `num_blocks` may be missing
    eos_token       preferred end token
    ends            all end tokens that the checkpoint or its tokenizer names
    """

    checkpoint: Checkpoint
    tokenizer: HFTokenizer
    config_fields: dict[str, Any]
    eos_token: int
    ends: tuple[EndToken, ...]


def resolve_model_spec(
    name: str, overrides: Mapping[str, Any], options: DeviceOptions, device: torch.device
) -> ModelSpec:
    """Return the checkpoint, its tokenizer and the geometry.

    Raise InvalidConfig for what cannot work.
    """
    checkpoint = open_checkpoint(
        name, dtype=options.dtype, device=device, load_format=options.load_format
    )
    refuse_small_gpu(device, checkpoint.dtype)
    tokenizer = HFTokenizer.from_folder(checkpoint.folder, [each.token for each in checkpoint.ends])
    ends = complete_end_tokens(checkpoint.ends, tokenizer)
    max_model_len = checkpoint.resolve_max_model_len(overrides.get("max_model_len"))
    refuse_dynamic_rope(checkpoint.config, max_model_len)
    eos_token, *end_ids = usable_end_ids(ends, checkpoint.vocab_size) or [tokenizer.eos_token]
    config_fields = resolve_config_fields(
        overrides, device, checkpoint.folder, checkpoint.dtype, max_model_len, end_ids
    )
    return ModelSpec(checkpoint, tokenizer, config_fields, eos_token, ends)


def resolve_config_fields(
    overrides: Mapping[str, Any],
    device: torch.device,
    folder: Path,
    dtype: torch.dtype,
    max_model_len: int,
    end_ids: list[int],
) -> dict[str, Any]:
    """Return the fields of EngineConfig for a checkpoint. Raise InvalidConfig.

    end_ids   end tokens after the preferred one
    """
    config_fields = dict(CUDA_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS)
    config_fields |= {**overrides, "max_model_len": max_model_len}
    if "max_num_batched_tokens" not in overrides:
        config_fields["max_num_batched_tokens"] = default_batched_tokens(
            config_fields["max_num_batched_tokens"], config_fields["max_num_seqs"]
        )
    config_fields["end_ids"] = tuple(end_ids)
    config_fields["cache_namespace"] = f"{folder} {dtype}"
    # Invalid fields are refused before loading.
    EngineConfig(**{"num_blocks": 1, **config_fields})
    return config_fields


def refuse_dynamic_rope(config: Any, max_model_len: int) -> None:
    """Raise InvalidConfig where a position's rotation would depend on the rest of its batch."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in per_layer_type or [parameters]:
        original_max_positions = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") in ("dynamic", "longrope") and original_max_positions:
            if max_model_len > original_max_positions:
                raise InvalidConfig(
                    "max_model_len",
                    f"beyond {original_max_positions} positions {rope['rope_type']} RoPE depends "
                    "on the longest sequence of the batch",
                    f"Give at most {original_max_positions}",
                )
