"""The cells of cells.json on forge: first token, throughput, and the time of single steps.

Owns the figures of `forge bench step`. Peers run the same cells through bench/peers.py and print
the same keys, for comparison on one machine.

    ttft_N_ms          time to the first token of one prompt of N tokens, median
    cN_tok_s           N requests at once, output tokens a second, best of the rounds
    mixed256_tok_s     lengths drawn from a range
    step_ms_bN         one step of N sequences in steady decode, median, 10th and 90th percentile
    host_us_bN         the host time of Engine.step in it: schedule, forward, commit, no wait
    forward_us_bN      the part of it inside Model.forward
    policy_us_bN       the rest of it: schedule and commit
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from forge.bench.engine_driver import EngineDriver, OpenLLM, defaults, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.ttft import measure_ttft_by_length
from forge.bench.workload import (
    BatchCell,
    Cells,
    draw_batch,
    draw_prompts,
    percentiles,
    print_result,
    prompt_id_range,
)
from forge.engine_options import Options


def measure_throughput(drive: EngineDriver, batch: BatchCell, rounds: int, seed: int) -> float:
    """Return output tokens a second of the fastest round. Each round has its own prompts."""
    ids = prompt_id_range(drive.engine.model.vocab_size())
    rng = random.Random(seed)
    runs = [drive.run_batch(draw_batch(rng, batch, ids)) for _ in range(rounds)]
    seconds, tokens = min(runs)
    return round(tokens / seconds)


def measure_steady(drive: EngineDriver, batch: int, cells: Cells) -> dict[str, float]:
    """Return step and host times at one batch size."""
    cell = cells.steady
    ids = prompt_id_range(drive.engine.model.vocab_size())
    length = max(1, cell.context - cell.steps // 2)  # the context is reached half-way
    prompts = draw_prompts(random.Random(cells.seed), batch, (length, length), ids)
    times = drive.time_steps(prompts, cell.steps)
    return {
        **percentiles(f"step_ms_b{batch}", [t.step_s * 1e3 for t in times], 4),
        **percentiles(f"host_us_b{batch}", [t.host_s * 1e6 for t in times], 1),
        **percentiles(f"forward_us_b{batch}", [t.forward_s * 1e6 for t in times], 1),
        **percentiles(f"policy_us_b{batch}", [(t.host_s - t.forward_s) * 1e6 for t in times], 1),
    }


def measure(session: OpenLLM, cells: Cells) -> dict[str, Any]:
    """Return every figure of the cells on an open LLM, after the warm-up."""
    llm, shape, start_s = session
    figures: dict[str, Any] = {"engine": "forge", "shape": shape, "start_s": start_s}
    drive = EngineDriver(llm.engine)
    for batch in cells.warm_up:
        measure_throughput(drive, batch, 1, cells.seed)
    figures |= measure_ttft_by_length(llm, cells)
    for batch in cells.throughput:
        figures[f"{batch.name}_tok_s"] = measure_throughput(drive, batch, cells.rounds, cells.seed)
    for batch in cells.mixed:
        figures[f"{batch.name}_tok_s"] = measure_throughput(drive, batch, 1, cells.seed)
    for size in cells.steady.batches:
        figures |= measure_steady(drive, size, cells)
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"{figures['shape']}, started in {figures['start_s']} s")
    for name, value in figures.items():
        if isinstance(value, int | float) and not name.endswith(("_p10", "_p90", "start_s")):
            low, high = figures.get(f"{name}_p10"), figures.get(f"{name}_p90")
            percentile_text = "" if low is None else f"   p10 {low:,}  p90 {high:,}"
            print(f"{name:<20}{value:>14,}{percentile_text}")


def main(
    model: str,
    json_path: str | None,
    cell_names: Sequence[str] = (),
    repeats: int | None = None,
    options: Options | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure, print the result and write the record. Raises InvalidConfig.

    model        a shape's name, a checkpoint's folder or id, or an embedded model
    cell_names   cells to run, such as c1 or ttft_128 or b64; empty: all
    repeats      number of first tokens in a median
    options      of the LLM, besides those of the cells
    """
    cells = cells or Cells.read()
    cells = cells._replace(repeats=repeats or cells.repeats, prefix=())
    if cell_names:
        cells = cells.select(cell_names)
    with open_llm(model, {**defaults(model, cells), **(options or Options())}) as session:
        figures = measure(session, cells)
    show(figures)
    print_result(figures)
    if json_path is not None:
        write_json(json_path, create_result("step", figures))
    return 0
