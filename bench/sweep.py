"""A closed loop on the engine itself: latency and throughput by the number of streams.

Owns the figures of the offline sweep. bench/serve.py measures the same curve through HTTP; the
difference is the cost of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.bench.engine_driver import EngineDriver, defaults, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import Cells, print_result, prompt_id_range, run_closed_levels
from forge.engine_options import Options

HEADING = f"{'streams':>8}{'TTFT p50':>10}{'ITL p50':>9}{'ITL p99':>9}{'gap p99':>9}{'tok/s':>10}"


def format_row(figures: dict[str, Any]) -> str:
    """Return a level as a row under HEADING, times in ms."""
    return (
        f"{figures['c']:>8}{figures['ttft_p50']:>10.1f}{figures['itl_p50']:>9.2f}"
        f"{figures['itl_p99']:>9.2f}{figures['gap_p99']:>9.2f}{figures['tok_s']:>10,}"
    )


def measure(
    drive: EngineDriver, cells: Cells, concurrency: Sequence[int]
) -> list[dict[str, float]]:
    """Return a level for each concurrency, after a warm-up of four streams."""
    ids = prompt_id_range(drive.engine.model.vocab_size())
    return run_closed_levels(drive.submit, drive.step, cells, ids, concurrency)


def main(
    model: str,
    json_path: str | None,
    concurrency: Sequence[int] = (),
    options: Options | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure, print a result for each concurrency, and write the record."""
    cells = cells or Cells.read()
    streams = concurrency or cells.sweep.concurrency
    with open_llm(model, {**defaults(model, cells), **(options or Options())}) as (llm, shape, _):
        levels = measure(EngineDriver(llm.engine), cells, streams)
    about = {"engine": "forge", "shape": shape, "path": "offline"}
    results: list[dict[str, Any]] = [{**about, **figures} for figures in levels]
    print(HEADING)
    for result in results:
        print(format_row(result))
    for result in results:
        print_result(result)
    if json_path is not None:
        write_json(json_path, create_result("sweep", {"levels": results}))
    return 0
