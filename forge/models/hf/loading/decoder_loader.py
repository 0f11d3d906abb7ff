"""load_decoder: from a checkpoint to a decoder with its weights on a device, and kernels compiled.

Owns the choice between the decoders. Knows no KV cache that serves and no geometry but its block.

    checkpoint ─► module ─► inspection ─► fused decoder, compared ─► kernels ─► LoadedDecoder
                                          or compiled modules, or the modules
    DecoderRecord ─► fused decoder, of the weights alone ──────────► kernels ─► LoadedDecoder
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forge.config import DeviceOptions
from forge.errors import InvalidConfig
from forge.models.hf.attention.flashinfer_api import FlashInferWrappers
from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.decoders.comparison import (
    MAX_FLOAT32_ERROR,
    float32_error,
    logits_error,
    max_logits_error,
    probe_positions,
)
from forge.models.hf.decoders.compiled_decoder import (
    INDUCTOR,
    CompileBackend,
    CompiledDecoder,
    compile_decoder,
)
from forge.models.hf.decoders.fused_decoder import FusedDecoder, fuse
from forge.models.hf.decoders.interface import Decoder
from forge.models.hf.decoders.module_decoder import ATTENTION_NAME, ModuleDecoder
from forge.models.hf.kv_cache import KVCache
from forge.models.hf.loading.checkpoint import (
    Checkpoint,
    CheckpointSummary,
    check_memory,
    mean_layer_weights,
    module_buffers,
    module_parameters,
)
from forge.models.hf.loading.decoder_record import DecoderRecord
from forge.models.hf.loading.kernel_selection import (
    NO_FLASHINFER,
    PrefillKernels,
    import_kernel_libraries,
    select_attention,
    select_kv_cache_spec,
    select_ops,
    select_prefill,
)
from forge.models.hf.loading.loaded_decoder import LoadedDecoder
from forge.models.hf.loading.partition import WHOLE, Partition
from forge.models.hf.loading.recorded_decoder import (
    open_reader,
    recorded_tensors,
    recorded_weights,
    show_reading,
)
from forge.models.hf.ops.interface import Ops
from forge.models.hf.progress import show_progress
from forge.models.hf.sampling.sampler import kernel_compilations
from forge.models.hf.weight_names import module_weight_names
from forge.models.hf.weights import ModelWeights
from forge.start_log import StartLog

log = logging.getLogger(__name__)

NUM_COMPILE_THREADS = 16
"""Threads that compile kernels at the start."""

OnFused = Callable[[Any, FusedDecoder, list[LayerSpec]], None]

WARMUP_SLOTS = 64
"""Most rows of the batches that kernels are compiled with."""


def select_decoder(
    module: Any,
    ops: Ops,
    max_model_len: int,
    warm_up: Callable[[FusedDecoder, list[LayerSpec]], None] = lambda fused, layers: None,
    partition: Partition = WHOLE,
) -> tuple[Decoder, list[LayerSpec]]:
    """Return the fastest decoder that computes what the module does, and the module's layers.

    warm_up     called with a fused decoder before its kernels are compared
    partition   how the module is divided over ranks. All of them choose the same decoder
    """
    module_decoder = ModuleDecoder(module)
    layers = module_decoder.inspect_layers()
    fused = fuse(module, layers, ops, max_model_len, partition.create_decoder)
    if fused is None:
        return module_decoder, layers
    positions = probe_positions(module.config, max_model_len)
    max_vocab_size = partition.probe_vocab_size(module.config.get_text_config().vocab_size)
    error = float32_error(module_decoder, fused, layers, positions, max_vocab_size)
    error = partition.largest(error, module.device)
    # NaN fails this comparison.
    if error <= MAX_FLOAT32_ERROR:
        warm_up(fused, layers)
        error = logits_error(module_decoder, fused, layers, positions)
        error = partition.largest(error, module.device)
        if error <= max_logits_error(module.dtype):
            return fused, layers
    log.warning("the fused decoder is %.3g from the modules; they are used instead", error)
    return module_decoder, layers


def build_compiled_decoder(
    module: Any, max_model_len: int, backend: CompileBackend = INDUCTOR
) -> tuple[CompiledDecoder, list[LayerSpec]]:
    """Return a decoder of the module's own layers, compiled, and the layers.

    Raise InvalidConfig.
    """
    module_decoder = ModuleDecoder(module)
    layers = module_decoder.inspect_layers()
    with show_progress("compiling layers", len(layers)) as advance:
        decoder = compile_decoder(module, layers, backend)
        advance(len(layers))  # They share their graphs.
    positions = probe_positions(module.config, max_model_len)
    error = logits_error(module_decoder, decoder, layers, positions)
    if not error <= max_logits_error(module.dtype):
        raise InvalidConfig(
            "torch_compile",
            f"the compiled modules are {error:.3g} from the modules as they are",
            "Leave it out",
        )
    return decoder, layers


def compile_kernels(
    fused: FusedDecoder,
    layers: Sequence[LayerSpec],
    block_size: int,
    vocab_size: int,
    wrappers: FlashInferWrappers | None = None,
) -> None:
    """Compile every kernel that a step may need, all at the same time. Does nothing on a CPU.

    wrappers   as in `select_attention`
    """
    device, dtype = fused.device, fused.dtype
    kv_cache = KVCache(
        select_kv_cache_spec(layers, dtype, device),
        num_blocks=1,
        block_size=block_size,
        num_slots=WARMUP_SLOTS,
        max_model_len=block_size,
        device=device,
    )
    _, capturable = select_attention(kv_cache, layers, wrappers)
    if capturable is not None:
        run_concurrently(
            [
                *kernel_compilations(vocab_size, device, dtype),
                *fused.warmup_calls(kv_cache),
                *capturable.warmup_calls(fused.first_rope),
            ],
            # A thread that waits for the device has its context, without which cuBLAS warns.
            start_thread=partial(torch.cuda.synchronize, device),
        )


def run_concurrently(
    calls: Sequence[Callable[[], object]], start_thread: Callable[[], object] = lambda: None
) -> None:
    """Make every call, on several threads: most of their time is compilation.

    start_thread   called first in each thread
    """

    def made(call: Callable[[], object]) -> None:
        with torch.inference_mode():
            call()

    with (
        show_progress("compiling kernels", len(calls)) as advance,
        ThreadPoolExecutor(NUM_COMPILE_THREADS, initializer=start_thread) as executor,
    ):
        for _ in executor.map(made, calls):
            advance(1)


def agree_prefill(
    found: PrefillKernels, partition: Partition, device: torch.device
) -> PrefillKernels:
    """Return the kernels that this process found, without FlashInfer's where a rank has them not.

    The kernels decide which steps are replayed, and so which sums the ranks make together.
    """
    has_wrappers = found.wrappers is not None
    if partition.fewest(int(has_wrappers), device) == int(has_wrappers):
        return found
    log.warning("prefill attention: Triton's kernel, since a rank has none of FlashInfer's")
    return NO_FLASHINFER


def load_decoder(
    checkpoint: Checkpoint,
    config_fields: Mapping[str, Any],
    options: DeviceOptions,
    device: torch.device,
    start: StartLog,
    on_fused: OnFused = lambda module, fused, layers: None,
    partition: Partition = WHOLE,
) -> LoadedDecoder:
    """Load the checkpoint's weights onto the device and compile kernels for them.

    on_fused    called with the module, its fused decoder that was compared, and the layers
    partition   how the model is divided over ranks
    """
    dtype, max_model_len = checkpoint.dtype, config_fields["max_model_len"]
    with start.phase("weights"), ThreadPoolExecutor(1) as executor:
        # Threads wait for the disk, so the import takes little longer than alone.
        libraries = executor.submit(import_kernel_libraries, device, dtype)
        with partition.raise_on_all(device):
            module = partition.load_module(checkpoint, device, options.load_format, ATTENTION_NAME)
        with start.phase("kernel libraries"):
            libraries.result()
    # Rank 0 alone has the biases of partial sums. All ranks have to capture the same graphs.
    layer_weights = partition.fewest(mean_layer_weights(module), device)
    decoder: Decoder
    with torch.inference_mode():
        if options.torch_compile:
            with start.phase("torch.compile"):
                decoder, layers = build_compiled_decoder(module, max_model_len)
            prefill = select_prefill(layers, select_kv_cache_spec(layers, dtype, device), device)
        else:
            with start.phase("comparison"):
                # The first CUDA kernels of the process are loaded here.
                layers = ModuleDecoder(module).inspect_layers()
                kv_cache_spec = select_kv_cache_spec(layers, dtype, device)
                with start.phase("choice of kernels"):
                    found = select_prefill(layers, kv_cache_spec, device)
                    prefill = agree_prefill(found, partition, device)

                def warm_up(fused: FusedDecoder, layers: list[LayerSpec]) -> None:
                    with start.phase("kernels"):
                        compile_kernels(
                            fused,
                            layers,
                            config_fields["block_size"],
                            checkpoint.vocab_size,
                            prefill.wrappers,
                        )

                ops = select_ops(device, dtype)
                decoder, layers = select_decoder(module, ops, max_model_len, warm_up, partition)
            if isinstance(decoder, FusedDecoder):
                with start.phase("record"):
                    on_fused(module, decoder, layers)
    kv_cache_spec = select_kv_cache_spec(layers, dtype, device)
    # A module that reads from the device cannot be captured; transformers marks those that do not.
    supports_capture = isinstance(decoder, FusedDecoder) or module._can_compile_fullgraph
    use_graphs = supports_capture and not options.enforce_eager
    return LoadedDecoder(
        checkpoint.summary(),
        decoder,
        layers,
        kv_cache_spec,
        layer_weights,
        use_graphs,
        prefill,
        ModelWeights(
            module_parameters(module), module_weight_names(module), module_buffers(module)
        ),
    )


def load_recorded_decoder(
    record: DecoderRecord,
    folder: Path,
    config_fields: Mapping[str, Any],
    options: DeviceOptions,
    device: torch.device,
    start: StartLog,
) -> LoadedDecoder:
    """Load the weights of a recorded decoder onto the device and compile kernels for them."""
    dtype, layers = record.torch_dtype, record.layers
    with torch.inference_mode():
        with start.phase("weights"), ThreadPoolExecutor(1) as executor:
            libraries = executor.submit(import_kernel_libraries, device, dtype)
            check_memory(record.weight_bytes, device)
            with (
                show_reading(record, options.load_format) as advance,
                open_reader(record, folder, options.load_format, device) as reader,
            ):
                tensors = list(recorded_tensors(record, reader, device, advance))
            with start.phase("kernel libraries"):
                libraries.result()
        kv_cache_spec = select_kv_cache_spec(layers, dtype, device)
        with start.phase("choice of kernels"):
            prefill = select_prefill(layers, kv_cache_spec, device)
            ops = select_ops(device, dtype)
        decoder = FusedDecoder.from_tensors(ops, layers[0], record.eps, len(layers), tensors)
        with start.phase("kernels"):
            block_size = config_fields["block_size"]
            compile_kernels(decoder, layers, block_size, record.vocab_size, prefill.wrappers)
    summary = CheckpointSummary(folder, record.architecture, dtype, record.vocab_size)
    return LoadedDecoder(
        summary,
        decoder,
        layers,
        kv_cache_spec,
        record.layer_weights,
        not options.enforce_eager,
        prefill,
        recorded_weights(record, decoder),
    )
