"""Which kernels a device gets: attention and the fused operations, by what the device is.

Owns the two choices and the refusals that follow. A CPU gets plain torch, an NVIDIA GPU FlashInfer
and Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge.errors import InvalidConfig
from forge.models.hf.arithmetic import TorchOps
from forge.models.hf.attention import Attention, LayerSpec, TorchAttention
from forge.models.hf.flashinfer_api import load_wrappers
from forge.models.hf.fused import Ops
from forge.models.hf.graphs import Recorder
from forge.models.hf.pool import KVPool, KVShape

HALF = (torch.bfloat16, torch.float16)

MOST_GROUPED = 16
"""Query heads of one key head that the decode kernel takes."""


def check_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Import the libraries of the device's kernels. Raises InvalidConfig where one cannot serve."""
    if device.type == "cuda" and dtype in HALF:
        load_wrappers()


def kv_shape(layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> KVShape:
    """What the pages of these layers hold on this device. Raises InvalidConfig."""
    spec = layers[0]
    head_dim = spec.head_dim
    if device.type == "cuda" and dtype in HALF:
        from forge.models.hf.cuda_attention import HEAD_DIMS, padded_head_dim

        padded = padded_head_dim(head_dim)
        if padded is None:
            raise InvalidConfig(
                "model",
                f"its heads have {head_dim} dimensions, the GPU's kernels take {HEAD_DIMS[-1]}",
                "Serve it with --device cpu",
            )
        if spec.num_heads > MOST_GROUPED * spec.num_kv_heads:
            raise InvalidConfig(
                "model",
                f"{spec.num_heads} heads share {spec.num_kv_heads} key heads, the GPU's kernels "
                f"take {MOST_GROUPED} a key head",
                "Serve it with --device cpu",
            )
        head_dim = padded
    return KVShape(len(layers), spec.num_kv_heads, head_dim, dtype)


def attention_for(pool: KVPool, layers: Sequence[LayerSpec]) -> tuple[Attention, Recorder | None]:
    """The attention kernels of the pool's device, and what steps can be recorded with.

    float32 and float64 have plain torch's alone, which asks the host in every layer.
    """
    if pool.data.device.type == "cuda" and pool.shape.dtype in HALF:
        from forge.models.hf.cuda_attention import CudaAttention

        attention = CudaAttention(pool, layers)
        return attention, attention
    return TorchAttention(pool, layers), None


def ops_for(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fused operations of the device."""
    if device.type == "cuda" and dtype in HALF:
        from forge.models.hf.kernels import TritonOps

        return TritonOps(pdl=True)
    return TorchOps()
