"""WeightNames: which weight of a model a tensor is, by the name that it is stored under.

Owns the two rules that a start and an update share: the base model's prefix may be there or not,
and some names are of no weight. Knows no file and no tensor.

    layers.0.mlp.up_proj.weight          ─► model.layers.0.mlp.up_proj.weight
    model.layers.0.mlp.up_proj.weight    ─► model.layers.0.mlp.up_proj.weight
    layers.0.self_attn.rotary_emb.inv_freq   harmless: computed from config.json
    model.layers.61.mlp.up_proj.weight       harmless after 61 layers and one that predicts further
    model.layers.0.self_attn.q_proj.bias     neither: refused where it is read
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

HARMLESS_PATTERNS = (
    # Computed from the configuration.
    *(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", r"(^|\.)position_ids$"),
    *(r"\.(masked_bias|causal_mask)$", r"\._extra_state$"),
    # Predictions of further tokens: parts of another model, which drafts.
    r"(^|\.)mtp[._]",
    # Encoders of images and sound. A configuration of text alone has none.
    r"(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\.",
)
"""Names, besides those that a class of transformers ignores, that no causal model computes with."""

MASK_PATTERN = r"(^|\.)(attn|attention)\.bias$"
"""Causal masks of older checkpoints, [1, 1, positions, positions]. Biases have one dimension."""


class WeightNames(NamedTuple):
    """Names of a model's weights, and how checkpoints write them.

    weights    names in the model's state dict
    prefix     that of the base model, without which it is also saved
    harmless   patterns of names that are no weights
    """

    weights: Collection[str]
    prefix: str
    harmless: Sequence[str] = HARMLESS_PATTERNS

    def find(self, stored_name: str) -> str | None:
        """Return the weight that is stored under this name, or None."""
        prefix = f"{self.prefix}."
        candidates = (stored_name, f"{prefix}{stored_name}", stored_name.removeprefix(prefix))
        return next((name for name in candidates if name in self.weights), None)

    def is_harmless(self, stored_name: str, shape: Sequence[int]) -> bool:
        """Return whether the model computes the same without this tensor."""
        if len(shape) > 1 and re.search(MASK_PATTERN, stored_name):
            return True
        return any(re.search(pattern, stored_name) for pattern in self.harmless)


def module_weight_names(module: Any) -> WeightNames:
    """Return the names of a module of transformers."""
    ignored = sorted(module._keys_to_ignore_on_load_unexpected or ())
    config = module.config.get_text_config()
    num_layers = config.num_hidden_layers
    further = range(num_layers, num_layers + (getattr(config, "num_nextn_predict_layers", 0) or 0))
    ignored += [rf"(^|\.)layers\.{index}\." for index in further]
    return WeightNames(
        frozenset(module.state_dict()), module.base_model_prefix, (*HARMLESS_PATTERNS, *ignored)
    )
