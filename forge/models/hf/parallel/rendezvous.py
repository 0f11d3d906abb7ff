"""Rendezvous: the ranks of one model meet, each on its device, and can add their tensors.

Owns which device a rank has, and where ranks meet. Knows no model.

    store    a file in memory that only these processes can open: no port is opened to meet
    gloo     CPUs, over the loopback interface
    NCCL     GPUs; each process finds its rank's as the first: see forge/models/rank_devices.py

Always true: nothing listens on an address of another interface than the loopback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from forge.errors import InvalidConfig
from forge.models.hf.parallel.communicator import Communicator, GlooCommunicator
from forge.models.hf.parallel.cuda_communicator import create_cuda_communicator, open_group

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables by which the libraries choose an interface. Those that are set stay as they are."""


def select_rank_device(name: str, world_size: int) -> torch.device:
    """Return the device of this process's rank.

    name   as in DeviceOptions
    Raises InvalidConfig where there are fewer GPUs than ranks.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus < world_size:
        raise InvalidConfig(
            "tensor_parallel_size",
            f"each of {world_size} ranks needs a GPU, and torch finds {num_gpus}",
            f"Give at most {num_gpus}" if num_gpus else "Give device cpu, or leave it out",
        )
    return torch.device("cuda", 0)


@contextmanager
def open_communicator(
    rank: int, world_size: int, store_path: str, device_name: str
) -> Iterator[Communicator]:
    """Meet the other ranks, and yield what adds tensors with them until the context ends.

    store_path    file that all ranks of this model can open
    device_name   as in DeviceOptions
    Raises InvalidConfig where there are fewer GPUs than ranks.
    """
    for variable, interface in LOOPBACK.items():
        os.environ.setdefault(variable, interface)
    device = select_rank_device(device_name, world_size)
    num_threads = torch.get_num_threads()
    with open_group(rank, world_size, f"file://{store_path}", device) as group:
        if device.type == "cuda":
            yield create_cuda_communicator(group, device)
            return
        # Ranks on CPUs share the cores.
        torch.set_num_threads(max(1, num_threads // world_size))
        try:
            yield GlooCommunicator(group)
        finally:
            torch.set_num_threads(num_threads)
