"""open_model: from a name to a model that is ready to serve, and everything given back after.

Owns the order of a start and the geometry's defaults per device. What it does, in order:

    checkpoint ─► module ─► survey ─► fused decoder, compared ─► blocks ─► graphs ─► HFModel
    (refusals)    weights   layers    with the modules           that fit
                                      or compiled modules

Whatever cannot work is refused as early as it can be known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from forge.config import DeviceOptions, EngineConfig
from forge.errors import InvalidConfig
from forge.models.hf.attention import LayerSpec
from forge.models.hf.backend import attention_for, check_kernels, kv_shape, ops_for
from forge.models.hf.checkpoint import Checkpoint, find_device, load_module, open_checkpoint
from forge.models.hf.comparison import (
    DEVIATION,
    deviation,
    distance,
    probe_positions,
    tolerance,
)
from forge.models.hf.compiled import INDUCTOR, Backend, CompiledDecoder, compiled
from forge.models.hf.decoder import ATTENTION, Decoder, ModuleDecoder, register
from forge.models.hf.device import Device
from forge.models.hf.fused import FusedDecoder, Ops, fuse
from forge.models.hf.garbage import settled, undisturbed
from forge.models.hf.graphs import (
    CHUNK_SIZES,
    VERIFIED_SIZES,
    ChunkGraphs,
    DecodeGraphs,
    bucket_sizes,
)
from forge.models.hf.memory import fitting_blocks
from forge.models.hf.model import HFModel
from forge.models.hf.pool import KVPool, KVShape
from forge.models.hf.progress import watched
from forge.models.hf.sampler import Sampler
from forge.models.hf.staging import LANES
from forge.models.hf.tokenizer import HFTokenizer
from forge.models.hf.weights import Weights
from forge.models.load import Loaded

log = logging.getLogger(__name__)

ON_CPU: Mapping[str, Any] = {
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "depth": 1,
}
ON_CUDA: Mapping[str, Any] = {
    "block_size": 64,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "depth": 2,
}
"""Geometry where nobody asked for another."""

COMPILERS = 16
"""Threads that compile kernels at the start."""

EXERCISED_SLOTS = 64
"""Rows of the batches with which they are compiled, at most."""


def decoder_of(
    module: Any,
    ops: Ops,
    max_model_len: int,
    prepare: Callable[[FusedDecoder, list[LayerSpec]], None] = lambda fused, layers: None,
) -> tuple[Decoder, list[LayerSpec]]:
    """Return the fastest decoder of the module that computes what the module does, and its layers.

    prepare   called with a fused decoder before its kernels are compared
    """
    modules = ModuleDecoder(module)
    layers = modules.survey()
    fused = fuse(module, layers, ops, max_model_len)
    if fused is None:
        return modules, layers
    positions = probe_positions(module.config, max_model_len)
    apart = deviation(modules, fused, layers, positions)
    # A number that is not finite is within no limit.
    if apart <= DEVIATION:
        prepare(fused, layers)
        apart = distance(modules, fused, layers, positions)
        if apart <= tolerance(module.dtype):
            return fused, layers
    log.warning("the fused decoder is %.3g from the modules; they are used instead", apart)
    return modules, layers


def compiled_of(
    module: Any, max_model_len: int, backend: Backend = INDUCTOR
) -> tuple[CompiledDecoder, list[LayerSpec]]:
    """Return the module's own layers, compiled, and what they are. Raises InvalidConfig."""
    modules = ModuleDecoder(module)
    layers = modules.survey()
    with watched("compiling layers", len(layers)) as advance:
        decoder = compiled(module, layers, backend)
        advance(len(layers))  # they share their graphs
    positions = probe_positions(module.config, max_model_len)
    apart = distance(modules, decoder, layers, positions)
    if not apart <= tolerance(module.dtype):
        raise InvalidConfig(
            "torch_compile",
            f"the compiled modules are {apart:.3g} from the modules as they are",
            "Leave it out",
        )
    return decoder, layers


def compile_kernels(fused: FusedDecoder, layers: Sequence[LayerSpec], block_size: int) -> None:
    """Every kernel that a step may need is compiled, all at the same time. On a GPU only."""
    device, dtype = fused.device, fused.dtype
    pool = KVPool(
        kv_shape(layers, dtype, device),
        num_blocks=1,
        block_size=block_size,
        num_slots=EXERCISED_SLOTS,
        max_model_len=block_size,
        device=device,
    )
    _, recorder = attention_for(pool, layers)
    if recorder is not None:
        together([*fused.exercises(pool), *recorder.exercises(fused.rotary)])


def served(
    decoder: Decoder,
    layers: Sequence[LayerSpec],
    shape: KVShape,
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_token: int,
    device: torch.device,
    decode_sizes: Sequence[int] = (),
    chunk_sizes: Sequence[int] = (),
    lanes: int = LANES,
    draft: HFModel | None = None,
) -> HFModel:
    """The model, on a pool of the config's geometry.

    lanes   steps that may be in flight
    draft   proposes tokens for it
    """
    pool = KVPool(
        shape,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_slots=config.max_num_seqs,
        max_model_len=config.max_model_len,
        device=device,
    )
    attention, recorder = attention_for(pool, layers)
    state = Device(
        decoder,
        attention,
        pool,
        Sampler(config.max_num_seqs, vocab_size, device),
        max_num_batched_tokens=config.max_num_batched_tokens,
        lanes=lanes,
    )
    decodes, chunks = None, None
    if decode_sizes and recorder is not None:
        with torch.inference_mode(), undisturbed():
            decodes = DecodeGraphs(state, decode_sizes)
            # A step is filled up to less than twice its tokens, and with what one table can name.
            most = min(2 * config.max_num_batched_tokens, config.max_model_len + 1)
            sizes = [size for size in chunk_sizes if size < most]
            chunks = ChunkGraphs(state, recorder, sizes)
    return HFModel(
        state,
        vocab_size=vocab_size,
        eos_token=eos_token,
        decodes=decodes,
        chunks=chunks,
        draft=draft,
    )


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Every call is made. At the same time, for what takes long in them is compiling a kernel."""

    def made(call: Callable[[], object]) -> None:
        with torch.inference_mode():
            call()

    with (
        watched("compiling kernels", len(calls)) as advance,
        ThreadPoolExecutor(COMPILERS) as pool,
    ):
        for _ in pool.map(made, calls):
            advance(1)


class Outline(NamedTuple):
    """What is known of a model before its weights are loaded. Checked, but for `num_blocks`.

    geometry   fields of EngineConfig
    """

    checkpoint: Checkpoint
    tokenizer: HFTokenizer
    geometry: dict[str, Any]
    eos_token: int


def outline(
    name: str, given: Mapping[str, Any], options: DeviceOptions, device: torch.device
) -> Outline:
    """The checkpoint, its tokenizer and the geometry. Raises InvalidConfig for what cannot work."""
    checkpoint = open_checkpoint(
        name, dtype=options.dtype, device=device, load_format=options.load_format
    )
    tokenizer = HFTokenizer.of_folder(checkpoint.folder, checkpoint.end_ids)
    max_model_len = checkpoint.longest(given.get("max_model_len"))
    refuse_changing_rotation(checkpoint.config, max_model_len)
    geometry = dict(ON_CUDA if device.type == "cuda" else ON_CPU)
    geometry |= {**given, "max_model_len": max_model_len}
    geometry["max_num_batched_tokens"] = _batched_tokens(given, geometry)
    eos_token, *end_ids = checkpoint.end_ids or (tokenizer.eos_token,)
    geometry["end_ids"] = tuple(end_ids)
    geometry["cache_namespace"] = f"{checkpoint.folder} {checkpoint.dtype}"
    EngineConfig(**{"num_blocks": 1, **geometry})  # what is wrong with it is said before loading
    return Outline(checkpoint, tokenizer, geometry, eos_token)


def load_weights(
    checkpoint: Checkpoint,
    geometry: Mapping[str, Any],
    options: DeviceOptions,
    device: torch.device,
) -> Weights:
    """The checkpoint's weights are on the device, and kernels for them compiled."""
    check_kernels(device, checkpoint.dtype)  # before the weights, which take longer to read
    module = load_module(checkpoint, device, options.load_format, ATTENTION)
    decoder: Decoder
    with torch.inference_mode():
        if options.torch_compile:
            decoder, layers = compiled_of(module, geometry["max_model_len"])
        else:
            decoder, layers = decoder_of(
                module,
                ops_for(device, checkpoint.dtype),
                geometry["max_model_len"],
                partial(compile_kernels, block_size=geometry["block_size"]),
            )
    shape = kv_shape(layers, checkpoint.dtype, device)
    # Modules may ask the host for numbers of the device, which a recording cannot; theirs say.
    still = isinstance(decoder, FusedDecoder) or module._can_compile_fullgraph
    return Weights(checkpoint, decoder, layers, shape, still and not options.enforce_eager)


@contextmanager
def within_memory(given: Mapping[str, Any]) -> Iterator[None]:
    """Memory of a GPU that is not enough is a refusal."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise InvalidConfig(
            "num_blocks" if "num_blocks" in given else "max_num_batched_tokens",
            "the GPU's memory is not enough for the model, its steps and its cache",
            "Give less",
        ) from None


@contextmanager
def open_model(name: str, given: Mapping[str, Any], options: DeviceOptions) -> Iterator[Loaded]:
    """The checkpoint's model, for as long as the context lasts. Raises InvalidConfig.

    given   fields of EngineConfig that somebody asked for
    """
    register()
    device = find_device(options.device)
    checkpoint, tokenizer, geometry, eos_token = outline(name, given, options, device)
    with within_memory(given):
        weights = load_weights(checkpoint, geometry, options, device)
        if "num_blocks" not in geometry:
            geometry["num_blocks"] = fitting_blocks(
                [weights], geometry, options.gpu_memory_utilization, device
            )
        config = EngineConfig(**geometry)
        model = serving(weights, config, eos_token, device)
    with settled():
        yield Loaded(name, model, tokenizer, config, str(device))


def serving(
    weights: Weights,
    config: EngineConfig,
    eos_token: int,
    device: torch.device,
    lanes: int = LANES,
    draft: HFModel | None = None,
) -> HFModel:
    """The weights' model, on a pool of the config's geometry. Parameters as of `served`."""
    speculation = config.speculation
    verifies = draft is not None or (speculation is not None and speculation.method == "ngram")
    chunks = VERIFIED_SIZES if verifies else CHUNK_SIZES
    return served(
        weights.decoder,
        weights.layers,
        weights.shape,
        config,
        vocab_size=weights.checkpoint.vocab_size,
        eos_token=eos_token,
        device=device,
        decode_sizes=bucket_sizes(config.max_num_seqs) if weights.recorded else (),
        chunk_sizes=chunks if weights.recorded else (),
        lanes=lanes,
        draft=draft,
    )


def _batched_tokens(given: Mapping[str, Any], geometry: Mapping[str, Any]) -> Any:
    """As given, or the device's default, which a small context or a large batch may change."""
    if "max_num_batched_tokens" in given:
        return given["max_num_batched_tokens"]
    return max(geometry["max_num_batched_tokens"], geometry["max_num_seqs"])


def refuse_changing_rotation(config: Any, max_model_len: int) -> None:
    """Raises InvalidConfig where the rotation of a position would depend on the batch around it."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") in ("dynamic", "longrope") and original:
            if max_model_len > original:
                raise InvalidConfig(
                    "max_model_len",
                    f"beyond {original} positions {rope['rope_type']} rotates each by the longest "
                    "of its batch",
                    f"Give at most {original}",
                )
