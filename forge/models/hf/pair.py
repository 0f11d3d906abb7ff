"""open_pair: a model and a draft model for it, on one device and out of one memory.

Owns what makes two checkpoints a pair, and the refusals that follow. How each is opened by itself
is known to open.

    target      tokenizer ──┐ the same tokens         max_model_len ──┐ the draft reaches it
    draft       tokenizer ──┘                         positions ──────┘
                logits of any width: fitted           blocks: as many as the target's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from forge.config import DeviceOptions, EngineConfig, Speculation
from forge.errors import InvalidConfig
from forge.models.hf.checkpoint import Checkpoint, find_device, open_checkpoint
from forge.models.hf.decoder import register
from forge.models.hf.fitted import FittedDecoder
from forge.models.hf.garbage import settled
from forge.models.hf.memory import fitting_blocks
from forge.models.hf.open import (
    Outline,
    load_weights,
    outline,
    refuse_changing_rotation,
    serving,
    within_memory,
)
from forge.models.hf.staging import LANES
from forge.models.hf.tokenizer import HFTokenizer
from forge.models.load import Loaded


@contextmanager
def open_pair(
    name: str, draft_name: str, given: Mapping[str, Any], options: DeviceOptions
) -> Iterator[Loaded]:
    """The model with its draft, for as long as the context lasts. Raises InvalidConfig.

    given   fields of EngineConfig that somebody asked for; `speculation` says how drafts are used,
            and has the blocks of the draft's cache in the completed config
    """
    register()
    device = find_device(options.device)
    target = outline(name, given, options, device)
    geometry = target.geometry
    checkpoint = open_checkpoint(
        draft_name, dtype=options.dtype, device=device, load_format=options.load_format
    )
    check_pair(target, checkpoint)
    speculation: Speculation = geometry.get("speculation") or Speculation()
    geometry["speculation"] = speculation
    with within_memory(given):
        weights = load_weights(target.checkpoint, geometry, options, device)
        draft = load_weights(checkpoint, geometry, options, device)
        own, width = checkpoint.vocab_size, target.checkpoint.vocab_size
        if own != width:
            draft = draft._replace(
                decoder=FittedDecoder(draft.decoder, own, width),
                checkpoint=checkpoint._replace(vocab_size=width),
            )
        if "num_blocks" not in geometry:
            geometry["num_blocks"] = fitting_blocks(
                [weights, draft], geometry, options.gpu_memory_utilization, device
            )
        blocks = speculation.num_blocks or geometry["num_blocks"]
        geometry["speculation"] = replace(speculation, num_blocks=blocks)
        config = EngineConfig(**geometry)
        lanes = LANES * speculation.num_tokens  # a plan of the draft model for each
        proposing = serving(
            draft, replace(config, num_blocks=blocks), target.eos_token, device, lanes
        )
        model = serving(weights, config, target.eos_token, device, draft=proposing)
    with settled():
        yield Loaded(name, model, target.tokenizer, config, str(device))


def check_pair(target: Outline, draft: Checkpoint) -> None:
    """Raises InvalidConfig unless the draft can propose tokens for the target."""
    longest: int = target.geometry["max_model_len"]
    most = draft.max_model_len
    if most is not None and most < longest:
        raise InvalidConfig(
            "max_model_len",
            f"the draft model has {most} positions, and sequences of {longest} are to be served",
            f"Give at most {most}, or another draft model",
        )
    refuse_changing_rotation(draft.config, longest)
    other = HFTokenizer.of_folder(draft.folder, draft.end_ids)
    found = first_difference(target.tokenizer, other)
    if found is not None:
        raise InvalidConfig(
            "draft_model",
            f"its tokens are not the model's: {found} is another one, or none",
            "Give a draft model with the tokenizer of the model",
        )


def first_difference(one: HFTokenizer, other: HFTokenizer) -> int | None:
    """The lowest id that is not the same token for both, or None."""
    for token in range(max(one.vocab_size, other.vocab_size)):
        if token >= min(one.vocab_size, other.vocab_size):
            return token
        if one.token_bytes(token) != other.token_bytes(token):
            return token
    return None
