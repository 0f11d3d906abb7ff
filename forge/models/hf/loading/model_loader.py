"""open_model: from a name to a model that is ready to serve, and its memory freed at the end.

Owns the order of a start, and whether a record of an earlier one is used. In order:

    checkpoint ─► module ─► inspection ─► fused decoder, compared ─► blocks ─► graphs ─► HFModel
    (refusals)    weights   of layers,    with the modules      ▲    that fit
                  and host  kernels       or compiled modules   │    and KV tiers
                  memory                                        │
    record of an earlier start ─► fused decoder, of the weights ┘    decoder_record.py

Always true: a model that cannot work is refused as early as possible. Each part is a phase of the
StartLog.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge.config import DeviceOptions, EngineConfig
from forge.errors import InvalidConfig, InvalidRequest
from forge.models.capture_sizes import (
    VERIFY_CAPTURE_SIZES,
    decode_capture_sizes,
    mixed_capture_sizes,
    usable_capture_sizes,
)
from forge.models.gc_control import freeze_gc, freeze_objects, pause_gc
from forge.models.hf.attention.flashinfer_api import FlashInferWrappers
from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.buffers import MAX_IN_FLIGHT
from forge.models.hf.decoders.fused_decoder import FusedDecoder
from forge.models.hf.decoders.interface import Decoder
from forge.models.hf.decoders.module_decoder import register_attention
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.models.hf.loading.checkpoint import import_modelling, select_device
from forge.models.hf.loading.checkpoint_files import (
    DESCRIPTION_PATTERNS,
    find_checkpoint_folder,
    read_sampling_defaults,
)
from forge.models.hf.loading.decoder_loader import load_decoder, load_recorded_decoder
from forge.models.hf.loading.decoder_record import (
    DecoderRecord,
    RecordKey,
    library_versions,
    may_write_record,
    read_record,
    record_key,
    write_record,
)
from forge.models.hf.loading.end_tokens import (
    complete_end_tokens,
    log_end_tokens,
    usable_end_ids,
)
from forge.models.hf.loading.kernel_selection import (
    compile_missing_modules,
    select_attention,
)
from forge.models.hf.loading.kv_tiers import (
    NO_HOST_MEMORY,
    HostMemory,
    TierSetup,
    open_host_memory,
    pin_host_memory,
)
from forge.models.hf.loading.loaded_decoder import LoadedDecoder
from forge.models.hf.loading.memory import compute_num_blocks
from forge.models.hf.loading.model_spec import resolve_config_fields, resolve_model_spec
from forge.models.hf.loading.partition import WHOLE, Partition, partition_for
from forge.models.hf.loading.recorded_decoder import create_record
from forge.models.hf.model import HFModel
from forge.models.hf.parallel.communicator import Communicator
from forge.models.hf.progress import silence_transformers
from forge.models.hf.runner.cuda_graphs import (
    NO_GRAPHS,
    CapturedGraphs,
    DecodeGraphs,
    MixedGraphs,
)
from forge.models.hf.runner.model_runner import ModelRunner
from forge.models.hf.tokenizer import HFTokenizer
from forge.models.hf.weights import ModelWeights
from forge.models.loaded_model import LoadedModel
from forge.start_log import StartLog

log = logging.getLogger(__name__)


def assemble_model(
    decoder: Decoder,
    layers: Sequence[LayerSpec],
    kv_cache_spec: KVCacheSpec,
    config: EngineConfig,
    *,
    weights: ModelWeights | None = None,
    vocab_size: int,
    eos_token: int,
    device: torch.device,
    decode_sizes: Sequence[int] = (),
    mixed_sizes: Sequence[int] = (),
    max_in_flight: int = MAX_IN_FLIGHT,
    draft: HFModel | None = None,
    wrappers: FlashInferWrappers | None = None,
    host_memory: HostMemory = NO_HOST_MEMORY,
    partition: Partition = WHOLE,
) -> HFModel:
    """Return the model with a KV cache, sampler and graphs of the config's geometry.

    weights         what an update changes in place; None: they stay as they are
    decode_sizes    rows of decode graphs; () captures none
    mixed_sizes     tokens of graphs of mixed steps, of which those that a step may replay are used
    max_in_flight   steps that may be in flight
    draft           draft model, or None
    wrappers        as in `select_attention`
    host_memory     where moves go to and come from
    partition       how the model is divided over ranks
    """
    with partition.raise_on_all(device):
        kv_cache = KVCache(
            kv_cache_spec,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            device=device,
        )
    attention, capturable = select_attention(kv_cache, layers, wrappers)
    runner = ModelRunner(
        decoder,
        attention,
        kv_cache,
        partition.create_sampler(config.max_num_seqs, vocab_size, device),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_in_flight=max_in_flight,
    )
    sizes = usable_capture_sizes(mixed_sizes, config.max_num_batched_tokens, config.max_model_len)

    def capture_graphs() -> CapturedGraphs:
        if not decode_sizes or capturable is None:
            return NO_GRAPHS
        with torch.inference_mode(), pause_gc():
            return CapturedGraphs(
                DecodeGraphs(runner, decode_sizes), MixedGraphs(runner, capturable, sizes)
            )

    pool, files, create_moves = host_memory.pool, host_memory.files, host_memory.create_moves
    return HFModel(
        runner,
        vocab_size=vocab_size,
        eos_token=eos_token,
        capture_graphs=capture_graphs,
        weights=weights,
        check_changes=partition.check_changes,
        draft=draft,
        moves=None if pool is None else create_moves(kv_cache, pool, files),
    )


class Opening(NamedTuple):
    """A model that is known and not loaded yet.

    config_fields   fields of EngineConfig, all checked; `num_blocks` may be missing
    load            loads the weights
    """

    tokenizer: HFTokenizer
    config_fields: dict[str, Any]
    eos_token: int
    load: Callable[[], LoadedDecoder]


def open_recorded(
    record: DecoderRecord,
    folder: Path,
    overrides: Mapping[str, Any],
    options: DeviceOptions,
    device: torch.device,
    start: StartLog,
) -> Opening:
    """Return a model that an earlier start has recorded. Raise InvalidConfig for a geometry."""
    from_files = [each.token for each in record.ends]
    tokenizer = HFTokenizer.from_folder(folder, from_files, record.tokenizer_class)
    ends = complete_end_tokens(record.ends, tokenizer)
    log_end_tokens(ends, tokenizer, record.vocab_size)
    eos_token, *end_ids = usable_end_ids(ends, record.vocab_size) or [tokenizer.eos_token]
    config_fields = resolve_config_fields(
        overrides, device, folder, record.torch_dtype, record.max_model_len, end_ids
    )
    load = partial(load_recorded_decoder, record, folder, config_fields, options, device, start)
    return Opening(tokenizer, config_fields, eos_token, load)


def open_inspected(
    name: str,
    overrides: Mapping[str, Any],
    options: DeviceOptions,
    device: torch.device,
    start: StartLog,
    key: RecordKey | None,
    partition: Partition = WHOLE,
) -> Opening:
    """Return a model that transformers describes. Raise InvalidConfig for what cannot work.

    key         what a record depends on, before any file was read; None: no record is written
    partition   how the model is divided over ranks
    """
    register_attention()
    checkpoint, tokenizer, config_fields, eos_token, ends = resolve_model_spec(
        name, overrides, options, device
    )
    log_end_tokens(ends, tokenizer, checkpoint.vocab_size)

    def write(module: Any, fused: FusedDecoder, layers: list[LayerSpec]) -> None:
        new_key = find_key(checkpoint.folder, overrides, options, device)
        # Weights, which come last, may have been fetched since. Nothing else may have changed.
        if key is None or new_key is None or new_key[: len(key)] != key:
            return
        if not may_write_record(new_key):
            return
        record = None
        if tokenizer.equals_its_class(checkpoint.folder):
            record = create_record(
                module,
                fused,
                layers,
                checkpoint.folder,
                options.load_format,
                ends=checkpoint.ends,
                vocab_size=checkpoint.vocab_size,
                tokenizer_class=tokenizer.class_name,
            )
        write_record(new_key, record)

    load = partial(
        load_decoder, checkpoint, config_fields, options, device, start, write, partition
    )
    return Opening(tokenizer, config_fields, eos_token, load)


def log_template_error(tokenizer: HFTokenizer) -> None:
    """Log a chat template that cannot be read, or that does not take a message of a user."""
    if tokenizer.chat_template is not None:
        try:
            tokenizer.render([{"role": "user", "content": "Hello"}])
        except InvalidRequest as error:
            log.warning("chats will be refused: %s", error)


def find_key(
    folder: Path, overrides: Mapping[str, Any], options: DeviceOptions, device: torch.device
) -> RecordKey | None:
    """Return the key of the checkpoint's record.

    None where no record can be used: compiled modules, or files that cannot be read.
    """
    if options.torch_compile:
        return None
    try:
        return record_key(
            folder,
            device,
            dtype=options.dtype,
            load_format=options.load_format,
            max_model_len=overrides.get("max_model_len"),
            versions=library_versions(),
        )
    except OSError:
        return None


@contextmanager
def import_modelling_code(start: StartLog) -> Iterator[None]:
    """Import transformers' code of models, and freeze its objects until the context ends."""
    with start.phase("imports"), pause_gc():
        import_modelling()
    with freeze_objects():
        yield


@contextmanager
def refuse_out_of_memory(overrides: Mapping[str, Any]) -> Iterator[None]:
    """Raise InvalidConfig in place of a CUDA out-of-memory error."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise InvalidConfig(
            "num_blocks" if "num_blocks" in overrides else "max_num_batched_tokens",
            "the GPU's memory is not enough for the model, its steps and its cache",
            "Give less",
        ) from None


@contextmanager
def open_model(
    name: str,
    overrides: Mapping[str, Any],
    options: DeviceOptions,
    start: StartLog | None = None,
    tiers: TierSetup | None = None,
    communicator: Communicator | None = None,
) -> Iterator[LoadedModel]:
    """Open the checkpoint's model, and close it when the context ends. Raise InvalidConfig.

    overrides      fields of EngineConfig that the caller set
    start          where the phases of the start are recorded
    tiers          KV tiers; None: the `host_tier` of the overrides, without files. Each rank has
                   host memory of its own, of this size
    communicator   ranks that divide the model, all of which open it with equal arguments; None:
                   this process has it alone
    """
    start = start or StartLog()
    partition = partition_for(communicator)
    partition.check_options(options, tiers)
    with ExitStack() as exit_stack:
        with start.phase("configuration"):
            device = select_device(options.device)
            with silence_transformers():
                folder = find_checkpoint_folder(name, DESCRIPTION_PATTERNS)
            sampling_defaults = read_sampling_defaults(folder, options.generation_config)
            key = None
            if partition.records_starts():
                key = find_key(folder, overrides, options, device)
            record = None if key is None else read_record(key)
            if record is None:
                exit_stack.enter_context(import_modelling_code(start))
                opening = open_inspected(name, overrides, options, device, start, key, partition)
            else:
                opening = open_recorded(record, folder, overrides, options, device, start)
        tokenizer, config_fields, eos_token, load = opening
        log_template_error(tokenizer)
        with refuse_out_of_memory(overrides):
            with pin_host_memory(tiers, device) as slabs:
                loaded = load()
                with start.phase("KV tiers"):
                    opened = open_host_memory(
                        tiers, slabs, loaded, config_fields, options.load_format, device
                    )
                    with partition.raise_on_all(device):
                        host_memory = exit_stack.enter_context(opened)
            if "num_blocks" not in config_fields:
                with start.phase("memory"):
                    with partition.raise_on_all(device):
                        num_blocks = compute_num_blocks(
                            [loaded], config_fields, options.gpu_memory_utilization, device
                        )
                    config_fields["num_blocks"] = partition.fewest(num_blocks, device)
            config = EngineConfig(**config_fields)
            with start.phase("graphs"):
                model = create_model(
                    loaded, config, eos_token, device, host_memory=host_memory, partition=partition
                )
        exit_stack.callback(model.close)
        with freeze_gc(), compile_missing_modules(loaded.prefill):
            yield LoadedModel(
                *(name, model, tokenizer, config, str(device), host_memory.disk_keys),
                sampling_defaults,
            )


def create_model(
    loaded: LoadedDecoder,
    config: EngineConfig,
    eos_token: int,
    device: torch.device,
    max_in_flight: int = MAX_IN_FLIGHT,
    draft: HFModel | None = None,
    host_memory: HostMemory = NO_HOST_MEMORY,
    partition: Partition = WHOLE,
) -> HFModel:
    """Return the loaded decoder's model on the config's geometry.

    max_in_flight   steps that may be in flight
    draft           draft model, or None
    host_memory     where moves go to and come from
    partition       how the model is divided over ranks
    """
    speculation = config.speculation
    verifies_drafts = draft is not None or (
        speculation is not None and speculation.method == "ngram"
    )
    mixed_sizes = {*mixed_capture_sizes(loaded.layer_weights)}
    if verifies_drafts:
        mixed_sizes |= {*VERIFY_CAPTURE_SIZES}
    return assemble_model(
        loaded.decoder,
        loaded.layers,
        loaded.kv_cache_spec,
        config,
        weights=loaded.weights,
        vocab_size=loaded.checkpoint.vocab_size,
        eos_token=eos_token,
        device=device,
        decode_sizes=decode_capture_sizes(config.max_num_seqs) if loaded.use_graphs else (),
        mixed_sizes=sorted(mixed_sizes) if loaded.use_graphs else (),
        max_in_flight=max_in_flight,
        draft=draft,
        wrappers=loaded.prefill.wrappers,
        host_memory=host_memory,
        partition=partition,
    )
