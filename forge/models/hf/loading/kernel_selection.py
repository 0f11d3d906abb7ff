"""Choice of a device's kernels: attention and the fused operations.

Owns the two choices and the refusals that follow. A CPU gets plain torch; an NVIDIA GPU gets
FlashInfer and Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge.errors import InvalidConfig
from forge.models.hf.attention.flashinfer_api import load_wrappers
from forge.models.hf.attention.interface import Attention, CapturableAttention, LayerSpec
from forge.models.hf.attention.reference import TorchAttention
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.models.hf.ops.interface import Ops
from forge.models.hf.ops.reference import TorchOps

HALF_DTYPES = (torch.bfloat16, torch.float16)

MAX_GROUP_SIZE = 16
"""Most query heads of one key head that the decode kernel takes."""


def check_kernel_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Import the libraries of the device's kernels.

    Raise InvalidConfig where one cannot be used.
    """
    if device.type == "cuda" and dtype in HALF_DTYPES:
        load_wrappers()


def select_kv_cache_spec(
    layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> KVCacheSpec:
    """Return the shape of these layers' keys and values on this device. Raise InvalidConfig."""
    spec = layers[0]
    head_dim = spec.head_dim
    if device.type == "cuda" and dtype in HALF_DTYPES:
        from forge.models.hf.attention.cuda_attention import HEAD_DIMS, padded_head_dim

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
    kv_cache: KVCache, layers: Sequence[LayerSpec]
) -> tuple[Attention, CapturableAttention | None]:
    """Return the device's attention, and the attention that graphs can capture, or None.

    float32 and float64 run in plain torch, which reads from the device in every layer: no graphs.
    """
    if kv_cache.data.device.type == "cuda" and kv_cache.spec.dtype in HALF_DTYPES:
        from forge.models.hf.attention.cuda_attention import CudaAttention

        attention = CudaAttention(kv_cache, layers)
        return attention, attention
    return TorchAttention(kv_cache, layers), None


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the device's operations between attention calls."""
    if device.type == "cuda" and dtype in HALF_DTYPES:
        from forge.models.hf.ops.skinny_gemm import MIN_CAPABILITY, SkinnyGemm
        from forge.models.hf.ops.triton_ops import TritonOps

        has_skinny_gemm = torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        return TritonOps(
            pdl=True,
            skinny_gemm=SkinnyGemm(dtype, device) if has_skinny_gemm else None,
        )
    return TorchOps()
