"""Rank of forge.bench.tensor_parallel: an engine on its part of a model, and its figures.

Owns what a rank measures. Every rank makes the same calls in the same order; rank 0 writes a file.

    the job, JSON ─► ranks meet ─► model ─► engine ─► steps, throughput, tokens, all-reduces ─► file
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from forge.bench.engine_driver import EngineDriver
from forge.bench.step import measure_steady, measure_throughput
from forge.bench.workload import BatchCell, Cells, SteadyCell, draw_prompts, prompt_id_range
from forge.config import DeviceOptions
from forge.engine import Engine
from forge.models.hf import open_model
from forge.models.hf.parallel.communicator import Communicator, GlooCommunicator
from forge.models.hf.parallel.cuda_communicator import create_cuda_communicator, open_group
from forge.request import Request, SamplingParams

NUM_COMPARED = 8
"""Sequences whose tokens are compared."""

NUM_COMPARED_TOKENS = 32
COMPARED_LENGTH = 100
NUM_REPLAYS = 20


def read_cells(job: Mapping[str, Any]) -> Cells:
    """Return the cells of a job."""
    batches, context, steps = job["steady"]
    return Cells.read()._replace(
        seed=job["seed"],
        warm_up=tuple(_batch_cell(each) for each in job["warm_up"]),
        throughput=tuple(_batch_cell(each) for each in job["throughput"]),
        rounds=job["rounds"],
        steady=SteadyCell(tuple(batches), context, steps),
    )


def _batch_cell(fields: list[Any]) -> BatchCell:
    name, requests, *lengths = fields
    return BatchCell(name, requests, *map(tuple, lengths))


def measure_rank(
    engine: Engine, cells: Cells, communicator: Communicator | None, device: torch.device
) -> dict[str, Any]:
    """Return this rank's figures."""
    drive = EngineDriver(engine)
    for batch in cells.warm_up:
        measure_throughput(drive, batch, 1, cells.seed)
    figures: dict[str, Any] = {}
    for size in cells.steady.batches:
        figures |= measure_steady(drive, size, cells)
        if communicator is not None and device.type == "cuda":
            hidden_size, num_layers = model_sizes(engine)
            us = all_reduces_us(communicator, size, hidden_size, 2 * num_layers, device)
            figures[f"all_reduce_us_b{size}"] = round(us, 1)
            share = us / (1e3 * figures[f"step_ms_b{size}"])
            figures[f"all_reduce_share_b{size}"] = round(share, 3)
    for batch in cells.throughput:
        figures[f"{batch.name}_tok_s"] = measure_throughput(drive, batch, cells.rounds, cells.seed)
    figures["tokens"] = greedy_tokens(engine, cells)
    return figures


def model_sizes(engine: Engine) -> tuple[int, int]:
    """Return the width of a hidden state, and the layers."""
    runner: Any = engine.model._runner  # type: ignore[attr-defined]
    embedding = next(iter(runner.decoder.tensors()))
    return embedding.shape[1], engine.model.num_layers()


def all_reduces_us(
    communicator: Communicator, rows: int, width: int, count: int, device: torch.device
) -> float:
    """Return the microseconds of all-reduces, one after the other, as in a step of this many rows.

    count   all-reduces of a step, all in one CUDA graph
    """
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(count):
            if communicator.all_reduce_norm(x, x, weight, 1e-6) is None:
                communicator.all_reduce(x)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / NUM_REPLAYS


def greedy_tokens(engine: Engine, cells: Cells) -> list[list[tuple[int, float]]]:
    """Return token and gap of each output position of some greedy requests.

    A gap is the log probability of the most likely token less that of the next.
    """
    ids = prompt_id_range(engine.model.vocab_size())
    length = min(COMPARED_LENGTH, engine.config.max_model_len // 2)
    prompts = draw_prompts(random.Random(cells.seed + 1), NUM_COMPARED, (length, length), ids)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_COMPARED_TOKENS, ignore_eos=True, logprobs=2
    )
    for index, prompt in enumerate(prompts):
        engine.submit(Request(index, tuple(prompt), params))
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    while engine.has_work:
        for delta in engine.step():
            for score in delta.logprobs:
                (_, best), (_, second) = score.top
                found[delta.request_id].append((score.token, best - second))
    return found


def run_rank(job: Mapping[str, Any]) -> None:
    """Open this rank's part of the model and measure. Rank 0 writes the figures."""
    rank, world_size = job["rank"], job["world_size"]
    device = torch.device(job["device"], 0) if job["device"] == "cuda" else torch.device("cpu")
    options = DeviceOptions(
        device=job["device"],
        load_format=job["load_format"],
        gpu_memory_utilization=job["utilization"],
    )
    with ExitStack() as stack:
        communicator: Communicator | None = None
        if world_size > 1:
            group = stack.enter_context(open_group(rank, world_size, job["address"], device))
            communicator = (
                create_cuda_communicator(group, device, job["sums"])
                if device.type == "cuda"
                else GlooCommunicator(group)
            )
        begin = time.perf_counter()
        loaded = stack.enter_context(
            open_model(job["folder"], job["overrides"], options, communicator=communicator)
        )
        start_s = round(time.perf_counter() - begin, 1)
        engine = Engine(loaded.model, loaded.config, loaded.tokenizer)
        figures = {"start_s": start_s, "num_blocks": loaded.config.num_blocks}
        if device.type == "cuda":
            figures["card"] = torch.cuda.get_device_name(device)
        figures |= measure_rank(engine, read_cells(job), communicator, device)
        if rank == 0:
            Path(job["out"]).write_text(json.dumps(figures))


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
