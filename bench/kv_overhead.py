"""Overhead of KV tiers where nothing is ever found in them: throughput with them over without.

Owns two engines in one process, the order of their runs, and the ratio. Prefix caching is on in
both, and all prompts are unique, so the tiers are searched and never used.

    off │ c256 mixed128 │     on │ c256 mixed128 │ c256 mixed128 │     off │ c256 mixed128 │
        └─── pair 1 ─────────────────┘               └── pair 2 ──────────────────┘

A ratio is of one pair: the two runs of a cell that are next to each other, with the same prompts.

Always true: no token of a prompt was in a cache, or the run ends with an error.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from forge.bench.engine_driver import defaults, greedy, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.shapes import model_folder
from forge.bench.workload import (
    BatchCell,
    Cells,
    draw_batch,
    print_result,
    prompt_id_range,
)
from forge.engine_options import Options
from forge.errors import InvalidConfig, RequestFailed
from forge.llm import LLM

CELLS = (
    BatchCell("c256", 256, (200, 200), (384, 384)),
    BatchCell("mixed128", 128, (100, 512), (100, 512)),
)
WARM_UP = BatchCell("warm_up", 256, (200, 200), (16, 16))
ORDER = ("off", "on", "on", "off")
"""Runs of a round. Each half of it is a pair: a drift of the machine changes sides."""

HOST_GIB = 4.0
BLOCK_SIZE = 64
SPARE_BLOCKS = 64


def run_cell(llm: LLM, cell: BatchCell, seed: str) -> float:
    """Return the output tokens a second of the cell. Raises RequestFailed.

    seed   equal seeds have equal prompts
    """
    ids = prompt_id_range(llm.engine.model.vocab_size())
    work = draw_batch(random.Random(seed), cell, ids)
    prompts, params = [prompt for prompt, _ in work], [greedy(output) for _, output in work]
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start_s
    num_cached = sum(each.cached_tokens.total for each in outputs)
    if num_cached:
        raise RequestFailed(f"{num_cached} tokens of prompts were in a cache")
    num_tokens = sum(len(each.token_ids) for each in outputs)
    if num_tokens != sum(output for _, output in work):
        raise RequestFailed(f"{num_tokens} tokens came")
    return num_tokens / seconds


def side_options(model: str, cells: Sequence[BatchCell], options: Options) -> dict[str, Options]:
    """Return the options of both engines, which differ by their host memory alone."""
    block_size = options.get("block_size", 16 if model.partition(":")[0] == "hash" else BLOCK_SIZE)
    common: Options = {
        **defaults(model, Cells.read()),
        "enable_prefix_caching": True,
        "block_size": block_size,
        # All sequences of a cell at once: none is preempted.
        "num_blocks": SPARE_BLOCKS
        + max(each.requests * -(-(each.input[1] + each.output[1]) // block_size) for each in cells),
        **options,
    }
    host_gib = common.pop("kv_host_gib", HOST_GIB)
    if "kv_disk_path" in common:
        raise InvalidConfig(
            "kv_disk_path", "files are not a part of this comparison", "Leave it out"
        )
    return {"off": common, "on": {**common, "kv_host_gib": host_gib}}


def measure(
    engines: Mapping[str, LLM], cells: Sequence[BatchCell], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each cell, printing each run when it is complete.

    tok_s_off, tok_s_on   medians of the runs of each side
    ratio                 on / off of each pair: median, least and greatest
    """
    start_s = time.perf_counter()
    for llm in engines.values():
        run_cell(llm, WARM_UP, "warm_up")
    runs: dict[str, list[tuple[str, float]]] = {cell.name: [] for cell in cells}
    for run_index in range(rounds * len(ORDER)):
        side = ORDER[run_index % len(ORDER)]
        for cell in cells:
            tok_s = run_cell(engines[side], cell, f"{cell.name} {run_index // 2}")
            runs[cell.name].append((side, tok_s))
            elapsed_s = time.perf_counter() - start_s
            print(f"{elapsed_s:7.1f} s  {cell.name:<10}{side:<4}{tok_s:>10,.0f} tok/s", flush=True)
    return [create_row(cell.name, runs[cell.name]) for cell in cells]


def create_row(name: str, runs: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return the row of a cell. Two runs that follow each other are a pair."""
    ratios = []
    for first in range(0, len(runs), 2):
        pair = dict(runs[first : first + 2])
        ratios.append(round(pair["on"] / pair["off"], 4))
    by_side = {side: [tok_s for each, tok_s in runs if each == side] for side in ("off", "on")}
    return {
        "cell": name,
        **{f"tok_s_{side}": round(median(values)) for side, values in by_side.items()},
        "runs": [[side, round(tok_s, 1)] for side, tok_s in runs],
        "ratio": round(median(ratios), 4),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main(
    model: str,
    json_path: str | None,
    rounds: int = 1,
    options: Options | None = None,
    cells: Sequence[BatchCell] = CELLS,
) -> int:
    """Measure, print the rows and write the record. Raises InvalidConfig and RequestFailed.

    rounds    times that the four runs of ORDER are made
    options   of both engines, besides those of the benchmark; `kv_host_gib` of the one with tiers
    """
    shape = Path(model).name
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        folder = model_folder(model, root)
        engines: dict[str, LLM] = {}
        for side, chosen in side_options(folder, cells, options or Options()).items():
            llm, _, start_s = stack.enter_context(open_llm(folder, chosen))
            engines[side] = llm
            print(f"{shape}, tiers {side}, started in {start_s} s", flush=True)
        rows = measure(engines, cells, rounds)
    about = {"benchmark": "kv_overhead", "engine": "forge", "shape": shape}
    for row in rows:
        print(
            f"{row['cell']:<10} tiers on / off {row['ratio']:.4f} "
            f"({row['ratio_min']:.4f} to {row['ratio_max']:.4f}); {row['tok_s_off']:,} tok/s "
            f"without, {row['tok_s_on']:,} with"
        )
        print_result({**about, **row})
    if json_path is not None:
        write_json(json_path, create_result("kv_overhead", {"shape": shape, "cells": rows}))
    return 0
