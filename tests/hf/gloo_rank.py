"""Rank of test_gloo_ranks.py: opens a checkpoint with the other ranks and serves requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from forge.config import DeviceOptions
from forge.engine import Engine
from forge.models.hf.decoders.comparison import probe_logits
from forge.models.hf.loading.draft_pair import open_pair
from forge.models.hf.loading.model_loader import open_model
from forge.models.hf.model import HFModel
from forge.models.hf.parallel.communicator import GlooCommunicator
from forge.request import Request, SamplingParams

OPTIONS = DeviceOptions(device="cpu", dtype="float64")
OVERRIDES = {
    **{"max_model_len": 256, "max_num_seqs": 6, "block_size": 16},
    **{"max_num_batched_tokens": 24, "depth": 2},
}
PROBE = tuple(range(5, 45))


class Outcome(NamedTuple):
    """What a model gives to a fixed set of requests.

    logits   of the probe, by this rank's ids
    """

    tokens: dict[tuple[int, int], list[int]]
    errors: list[str]
    num_blocks: int
    logits: Any


def some_requests() -> list[Request]:
    """Return requests of several lengths, greedy, random, filtered and penalised."""
    params: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 30, "logprobs": 2},
        {"temperature": 0.8, "frequency_penalty": 0.6, "min_tokens": 9},
    )
    return [
        Request(
            index,
            tuple(range(3 + index, 20 + 9 * index)),
            SamplingParams(max_tokens=12, seed=index, ignore_eos=True, **each),
        )
        for index, each in enumerate(params)
    ]


def serve(opened: Any, dtype: torch.dtype = torch.float64) -> Outcome:
    """Return what an opened model of this dtype gives to the requests."""
    engine = Engine(opened.model, opened.config)
    for request in some_requests():
        engine.submit(request)
    tokens: dict[tuple[int, int], list[int]] = {}
    errors: list[str] = []
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.tokens)
            errors += [delta.error] if delta.error else []
    assert isinstance(opened.model, HFModel)
    runner = opened.model._runner
    ids = torch.tensor(PROBE, dtype=torch.int32, device=runner.kv_cache.data.device)
    layers = runner.attention._layers  # type: ignore[attr-defined]
    with torch.inference_mode():
        logits = probe_logits(runner.decoder, ids, range(len(PROBE)), layers, dtype)
    return Outcome(tokens, errors, engine.config.num_blocks, logits.tolist())


def run_rank(
    rank: int, world_sizes: Sequence[int], store_path: str, folder: str, results: Connection
) -> None:
    """Serve with the first ranks of each number, and send an Outcome. The last serve a pair too."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    most = max(world_sizes)
    store = dist.FileStore(store_path, most)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=most)
    for world_size in world_sizes:
        group = dist.new_group(list(range(world_size)))
        if rank >= world_size:
            continue
        communicator = GlooCommunicator(group)
        with open_model(folder, OVERRIDES, OPTIONS, communicator=communicator) as opened:
            results.send(serve(opened))
        if world_size > min(world_sizes):
            continue
        with open_pair(folder, folder, OVERRIDES, OPTIONS, communicator=communicator) as pair:
            results.send(serve(pair))
    dist.destroy_process_group()
