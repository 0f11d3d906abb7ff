"""Choice of a device's kernels: attention and the fused operations.

Owns the choices and the refusals that follow. A CPU gets plain torch; an NVIDIA GPU gets Triton.

    longer rows on a GPU      FlashInfer   where its modules are compiled on this machine
                              Triton       elsewhere; FlashInfer's are compiled for the next start

Always true: the kernels of a start serve until its end. A graph holds one kernel, and the outputs
of one run come from the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch

from forge.errors import InvalidConfig
from forge.models.hf.attention.flashinfer_api import FlashInferWrappers, load_wrappers
from forge.models.hf.attention.flashinfer_compiler import compile_in_background
from forge.models.hf.attention.flashinfer_modules import (
    PrefillModule,
    find_obstacle,
    is_installed,
    may_have_modules,
    missing_tools,
    required_modules,
)
from forge.models.hf.attention.interface import Attention, CapturableAttention, LayerSpec
from forge.models.hf.attention.reference import TorchAttention
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.models.hf.ops.interface import Ops
from forge.models.hf.ops.reference import TorchOps

log = logging.getLogger("forge.start")

HALF_DTYPES = (torch.bfloat16, torch.float16)

HEAD_DIMS = (64, 128, 256)
"""Head sizes that every kernel of a GPU has; blocks are padded to the next."""

MIN_COMPUTE_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs with early launch, which every kernel uses."""

MIN_SHARED_BYTES = 227 * 1024
"""Shared memory of a block on Hopper. Tiles were chosen for it; small Blackwell GPUs have less."""

MAX_GROUP_SIZE = 16
"""Most query heads of one key head that the decode kernel takes."""


class PrefillKernels(NamedTuple):
    """Kernels of rows with more than one token.

    wrappers      FlashInfer's, or None: Triton's, or plain torch on a CPU
    to_compile    modules of FlashInfer to compile for the next start
    """

    wrappers: FlashInferWrappers | None
    to_compile: tuple[PrefillModule, ...]


NO_FLASHINFER = PrefillKernels(None, ())


def has_gpu_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device has kernels for a dtype: an NVIDIA GPU, in half precision."""
    return device.type == "cuda" and dtype in HALF_DTYPES


def refuse_small_gpu(device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidConfig where the GPU cannot run the kernels of a dtype."""
    if not has_gpu_kernels(device, dtype):
        return
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    shared_bytes = properties.shared_memory_per_block_optin
    if capability < MIN_COMPUTE_CAPABILITY or shared_bytes < MIN_SHARED_BYTES:
        raise InvalidConfig(
            "device",
            f"the GPU has compute capability {capability[0]}.{capability[1]} and "
            f"{shared_bytes // 1024} KiB of shared memory a block, the kernels need 9.0 and "
            f"{MIN_SHARED_BYTES // 1024} KiB",
            "Give cpu, or the dtype float32",
        )


def import_kernel_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Import the libraries of the device's kernels, which takes seconds.

    Raise nothing: what cannot be imported here is imported again where it is used.
    """
    if has_gpu_kernels(device, dtype):
        with suppress(Exception):
            import triton  # noqa: F401

            if is_installed() and may_have_modules():
                load_wrappers()


def select_prefill(
    layers: Sequence[LayerSpec], kv_cache_spec: KVCacheSpec, device: torch.device
) -> PrefillKernels:
    """Return the kernels of longer rows, and log which ones they are and why."""
    if not has_gpu_kernels(device, kv_cache_spec.dtype):
        return NO_FLASHINFER
    modules = required_modules(layers, kv_cache_spec)
    obstacle = find_obstacle(modules, device)
    if obstacle is None:
        log.info("prefill attention: FlashInfer's kernels, which are compiled on this machine")
        return PrefillKernels(load_wrappers(), ())
    to_compile: tuple[PrefillModule, ...] = ()
    end = ""
    if obstacle.missing:
        if tools := missing_tools():
            end = f"; there is no {' and no '.join(tools)} to compile them"
        else:
            end = "; they are compiled in the background for the next start"
            to_compile = obstacle.missing
    log.info(
        "prefill attention: Triton's kernel instead of FlashInfer's: %s%s", obstacle.reason, end
    )
    return PrefillKernels(None, to_compile)


def compile_missing_modules(prefill: PrefillKernels) -> AbstractContextManager[object]:
    """Return a context in which FlashInfer's missing modules are compiled in the background."""
    if not prefill.to_compile:
        return nullcontext()
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    architectures = sorted({f"{major}.{minor}" for major, minor in capabilities})
    return compile_in_background(prefill.to_compile, " ".join(architectures))


def padded_head_dim(head_dim: int) -> int | None:
    """Return the head size in the cache for a head of `head_dim`, None for too large a one."""
    return next((size for size in HEAD_DIMS if size >= head_dim), None)


def select_kv_cache_spec(
    layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> KVCacheSpec:
    """Return the shape of these layers' keys and values on this device. Raise InvalidConfig."""
    spec = layers[0]
    head_dim = spec.head_dim
    if has_gpu_kernels(device, dtype):
        padded_dim = padded_head_dim(head_dim)
        if padded_dim is None:
            raise InvalidConfig(
                "model",
                f"its heads have {head_dim} dimensions, the GPU's kernels take {HEAD_DIMS[-1]}",
                "Serve it with --device cpu",
            )
        if spec.num_heads > MAX_GROUP_SIZE * spec.num_kv_heads:
            raise InvalidConfig(
                "model",
                f"{spec.num_heads} heads share {spec.num_kv_heads} key heads, the GPU's kernels "
                f"take {MAX_GROUP_SIZE} a key head",
                "Serve it with --device cpu",
            )
        head_dim = padded_dim
    return KVCacheSpec(len(layers), spec.num_kv_heads, head_dim, dtype)


def select_attention(
    kv_cache: KVCache,
    layers: Sequence[LayerSpec],
    wrappers: FlashInferWrappers | None = None,
) -> tuple[Attention, CapturableAttention | None]:
    """Return the device's attention, and the attention that graphs can capture, or None.

    wrappers   FlashInfer's, for longer rows on a GPU; None: Triton's kernel takes them
    float32 and float64 run in plain torch, which reads from the device in every layer: no graphs.
    """
    if not has_gpu_kernels(kv_cache.data.device, kv_cache.spec.dtype):
        return TorchAttention(kv_cache, layers), None
    if wrappers is None:
        from forge.models.hf.attention.triton_attention import TritonAttention
        from forge.models.hf.attention.triton_decode import DecodeAttention
        from forge.models.hf.attention.triton_prefill import PrefillAttention

        prefill = PrefillAttention(kv_cache, layers)
        decode = DecodeAttention(kv_cache, layers, pdl=True)
        triton_attention = TritonAttention(kv_cache, prefill, decode)
        return triton_attention, triton_attention
    from forge.models.hf.attention.flashinfer_attention import FlashInferAttention

    attention = FlashInferAttention(kv_cache, layers, wrappers)
    return attention, attention


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the device's operations between attention calls."""
    if has_gpu_kernels(device, dtype):
        from forge.models.hf.ops.skinny_gemm import SkinnyGemm
        from forge.models.hf.ops.triton_ops import TritonOps

        return TritonOps(pdl=True, skinny_gemm=SkinnyGemm(dtype, device))
    return TorchOps()
