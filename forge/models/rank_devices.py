"""Environment of a rank's process: which GPU is its first, and how GPUs may reach each other.

Owns the variables. They are set before the process imports torch.

    rank 0   CUDA_VISIBLE_DEVICES=0,1     cuda:0 is GPU 0
    rank 1   CUDA_VISIBLE_DEVICES=1,0     cuda:0 is GPU 1

Every thread's default device is the first, so each rank works on cuda:0. The others stay visible:
memory of a hidden GPU cannot be mapped.
Always true: multicast is off. Not every machine can use it, and results would depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.errors import InvalidConfig

WITHOUT_MULTICAST: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Variables that keep NCCL and torch from multicast."""

RANK_VARIABLES: Mapping[str, str] = {
    **WITHOUT_MULTICAST,
    # Each rank's device is cuda:0, by which torch would take them for one device.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Variables that are equal on all ranks."""


def rank_environment(rank: int, world_size: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for a rank on a host with a GPU for each rank.

    environment   of the process that starts the ranks. Its CUDA_VISIBLE_DEVICES chooses the GPUs
    Raise InvalidConfig where that names fewer than `world_size`.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(world_size))) if chosen is None else chosen.split(",")
    if len(devices) < world_size:
        raise InvalidConfig(
            "tensor_parallel_size",
            f"{world_size} ranks need a GPU each, and CUDA_VISIBLE_DEVICES={chosen} has "
            f"{len(devices)}",
            f"Give at most {len(devices)}, or name more GPUs",
        )
    devices = devices[:world_size]
    own = devices.pop(rank)
    return {**RANK_VARIABLES, "CUDA_VISIBLE_DEVICES": ",".join([own, *devices])}
