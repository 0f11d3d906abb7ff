"""Rank of test_gpu_ranks.py: a GPU of its own, and a part of a checkpoint."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch

from forge.config import DeviceOptions
from forge.models.hf.loading.model_loader import open_model
from forge.models.hf.parallel.rendezvous import open_communicator
from forge.models.rank_devices import rank_environment
from tests.hf.gloo_rank import OVERRIDES, serve

WORLD_SIZE = 2


def run_rank(rank: int, device: str, store_path: str, folder: str, results: Connection) -> None:
    """Serve some requests in float32 and send an Outcome. Rank 0 serves them alone before."""
    os.environ.update(rank_environment(rank, WORLD_SIZE, os.environ))
    overrides = {**OVERRIDES, "num_blocks": 64}
    options = DeviceOptions(device=device, dtype="float32", load_format="dummy")
    if rank == 0:
        with open_model(folder, overrides, options) as whole:
            results.send(serve(whole, torch.float32))
    with (
        open_communicator(rank, WORLD_SIZE, store_path, device) as communicator,
        open_model(folder, overrides, options, communicator=communicator) as part,
    ):
        results.send(serve(part, torch.float32))
