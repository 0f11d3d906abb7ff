"""open_pair: a model and its draft model, on one device and in one memory.

Owns the checks that make two checkpoints a pair. How each is opened is in model_loader.py.

    target      tokenizer ──┐ equal tokens            max_model_len ──┐ the draft has as many
    draft       tokenizer ──┘                         positions ──────┘
                logits of any width: resized          blocks: as many as the target's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from forge.config import DeviceOptions, EngineConfig, Speculation
from forge.errors import InvalidConfig
from forge.models.gc_control import freeze_gc
from forge.models.hf.buffers import MAX_IN_FLIGHT
from forge.models.hf.decoders.module_decoder import register_attention
from forge.models.hf.decoders.resized_vocab import ResizedVocabDecoder
from forge.models.hf.loading.checkpoint import (
    Checkpoint,
    open_checkpoint,
    select_device,
)
from forge.models.hf.loading.checkpoint_files import read_sampling_defaults
from forge.models.hf.loading.decoder_loader import load_decoder
from forge.models.hf.loading.end_tokens import log_end_tokens
from forge.models.hf.loading.kernel_selection import compile_missing_modules
from forge.models.hf.loading.kv_tiers import TierSetup, open_host_memory, pin_host_memory
from forge.models.hf.loading.memory import compute_num_blocks
from forge.models.hf.loading.model_loader import (
    create_model,
    import_modelling_code,
    log_template_error,
    refuse_out_of_memory,
)
from forge.models.hf.loading.model_spec import ModelSpec, refuse_dynamic_rope, resolve_model_spec
from forge.models.hf.loading.partition import partition_for
from forge.models.hf.parallel.communicator import Communicator
from forge.models.hf.tokenizer import HFTokenizer
from forge.models.loaded_model import LoadedModel
from forge.start_log import StartLog


@contextmanager
def open_pair(
    name: str,
    draft_name: str,
    overrides: Mapping[str, Any],
    options: DeviceOptions,
    start: StartLog | None = None,
    tiers: TierSetup | None = None,
    communicator: Communicator | None = None,
) -> Iterator[LoadedModel]:
    """Open the model with its draft model, and close both when the context ends.

    Raise InvalidConfig.
    overrides      fields of EngineConfig that the caller set. `speculation` configures the drafts;
                   the completed config has the number of the draft's blocks in it
    start          where the phases of the start are recorded
    tiers          as in `open_model`; the draft's blocks have none
    communicator   as in `open_model`; each rank has the whole draft
    """
    start = start or StartLog()
    partition = partition_for(communicator)
    partition.check_options(options, tiers)
    draft_partition = partition.draft()
    with ExitStack() as exit_stack:
        exit_stack.enter_context(import_modelling_code(start))
        with start.phase("configuration"):
            register_attention()
            device = select_device(options.device)
            target = resolve_model_spec(name, overrides, options, device)
            log_end_tokens(target.ends, target.tokenizer, target.checkpoint.vocab_size)
            log_template_error(target.tokenizer)
            sampling_defaults = read_sampling_defaults(
                target.checkpoint.folder, options.generation_config
            )
            config_fields = target.config_fields
            checkpoint = open_checkpoint(
                draft_name, dtype=options.dtype, device=device, load_format=options.load_format
            )
            check_pair(target, checkpoint)
        speculation: Speculation = config_fields.get("speculation") or Speculation()
        config_fields["speculation"] = speculation
        with refuse_out_of_memory(overrides):
            with pin_host_memory(tiers, device) as slabs:
                loaded = load_decoder(
                    target.checkpoint, config_fields, options, device, start, partition=partition
                )
                with start.phase("KV tiers"):
                    opened = open_host_memory(
                        tiers, slabs, loaded, config_fields, options.load_format, device
                    )
                    with partition.raise_on_all(device):
                        host_memory = exit_stack.enter_context(opened)
            loaded_draft = load_decoder(
                checkpoint, config_fields, options, device, start, partition=draft_partition
            )
            draft_vocab_size, vocab_size = checkpoint.vocab_size, target.checkpoint.vocab_size
            if draft_vocab_size != vocab_size:
                loaded_draft = loaded_draft._replace(
                    decoder=ResizedVocabDecoder(loaded_draft.decoder, draft_vocab_size, vocab_size),
                    checkpoint=loaded_draft.checkpoint._replace(vocab_size=vocab_size),
                )
            if "num_blocks" not in config_fields:
                with start.phase("memory"):
                    with partition.raise_on_all(device):
                        num_blocks = compute_num_blocks(
                            [loaded, loaded_draft],
                            config_fields,
                            options.gpu_memory_utilization,
                            device,
                        )
                    config_fields["num_blocks"] = partition.fewest(num_blocks, device)
            num_draft_blocks = speculation.num_blocks or config_fields["num_blocks"]
            config_fields["speculation"] = replace(speculation, num_blocks=num_draft_blocks)
            config = EngineConfig(**config_fields)
            # One plan of the draft model for each draft of a step.
            max_in_flight = MAX_IN_FLIGHT * speculation.num_tokens
            with start.phase("graphs"):
                draft_model = create_model(
                    loaded_draft,
                    replace(config, num_blocks=num_draft_blocks),
                    target.eos_token,
                    device,
                    max_in_flight,
                    partition=draft_partition,
                )
                model = create_model(
                    loaded,
                    config,
                    target.eos_token,
                    device,
                    draft=draft_model,
                    host_memory=host_memory,
                    partition=partition,
                )
        # Modules of the draft are compiled too: with other heads they are others.
        modules = dict.fromkeys(loaded.prefill.to_compile + loaded_draft.prefill.to_compile)
        missing = loaded.prefill._replace(to_compile=tuple(modules))
        exit_stack.callback(model.close)
        with freeze_gc(), compile_missing_modules(missing):
            yield LoadedModel(
                *(name, model, target.tokenizer, config, str(device), host_memory.disk_keys),
                sampling_defaults,
            )


def check_pair(target: ModelSpec, draft: Checkpoint) -> None:
    """Raise InvalidConfig unless the draft model can propose tokens for the target."""
    max_model_len: int = target.config_fields["max_model_len"]
    draft_max_len = draft.max_model_len
    if draft_max_len is not None and draft_max_len < max_model_len:
        raise InvalidConfig(
            "max_model_len",
            f"the draft model has {draft_max_len} positions, and sequences of {max_model_len} are "
            "to be served",
            f"Give at most {draft_max_len}, or another draft model",
        )
    refuse_dynamic_rope(draft.config, max_model_len)
    draft_tokenizer = HFTokenizer.from_folder(draft.folder, [each.token for each in draft.ends])
    differing_token = first_differing_token(target.tokenizer, draft_tokenizer)
    if differing_token is not None:
        raise InvalidConfig(
            "draft_model",
            f"its tokens are not the model's: {differing_token} is another one, or none",
            "Give a draft model with the tokenizer of the model",
        )


def first_differing_token(one: HFTokenizer, other: HFTokenizer) -> int | None:
    """Return the lowest id that stands for different tokens in the two, or None."""
    for token in range(max(one.vocab_size, other.vocab_size)):
        if token >= min(one.vocab_size, other.vocab_size):
            return token
        if one.token_bytes(token) != other.token_bytes(token):
            return token
    return None
