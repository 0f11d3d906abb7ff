"""The cells of cells.json on forge: first token, throughput, and the time of single steps.

Owns the figures of `forge bench step`. Peers run the same cells through bench/peers.py and print
the same keys, so that the lines of one run on one machine can be laid side by side.

    ttft_N_ms          first token of one prompt of N tokens, median
    cN_tok_s           N requests at once, output tokens a second, best of the rounds
    mixed256_tok_s     lengths drawn from a range
    step_ms_bN         one step of N sequences in steady decode, median, 10th and 90th percentile
    host_us_bN         what Engine.step costs the host in it: schedule, forward, commit, no wait
    forward_us_bN      the part of it inside Model.forward
    policy_us_bN       the rest of it: schedule and commit
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bench.drive import Drive, Opened, defaults, opened
from bench.record import record, write
from bench.ttft import cold
from bench.workload import Batch, Cells, draw_batch, draw_prompts, id_range, say, spread
from forge.llm import Options


def throughput(drive: Drive, batch: Batch, rounds: int, seed: int) -> float:
    """Output tokens a second of the fastest round; each round has prompts of its own."""
    ids = id_range(drive.engine.model.vocab_size())
    rng = random.Random(seed)
    runs = [drive.batch(draw_batch(rng, batch, ids)) for _ in range(rounds)]
    seconds, tokens = min(runs)
    return round(tokens / seconds)


def steady(drive: Drive, batch: int, cells: Cells) -> dict[str, float]:
    """Step and host time at one batch size."""
    cell = cells.steady
    ids = id_range(drive.engine.model.vocab_size())
    length = max(1, cell.context - cell.steps // 2)  # so that the context is passed half-way
    prompts = draw_prompts(random.Random(cells.seed), batch, (length, length), ids)
    times = drive.steps(prompts, cell.steps)
    return {
        **spread(f"step_ms_b{batch}", [t.step_s * 1e3 for t in times], 4),
        **spread(f"host_us_b{batch}", [t.host_s * 1e6 for t in times], 1),
        **spread(f"forward_us_b{batch}", [t.forward_s * 1e6 for t in times], 1),
        **spread(f"policy_us_b{batch}", [(t.host_s - t.forward_s) * 1e6 for t in times], 1),
    }


def measure(opened_llm: Opened, cells: Cells) -> dict[str, Any]:
    """Every figure of the cells on an open LLM, after the warm-up."""
    llm, shape, start_s = opened_llm
    figures: dict[str, Any] = {"engine": "forge", "shape": shape, "start_s": start_s}
    drive = Drive(llm.engine)
    for batch in cells.warm_up:
        throughput(drive, batch, 1, cells.seed)
    figures |= cold(llm, cells)
    for batch in cells.throughput:
        figures[f"{batch.name}_tok_s"] = throughput(drive, batch, cells.rounds, cells.seed)
    for batch in cells.mixed:
        figures[f"{batch.name}_tok_s"] = throughput(drive, batch, 1, cells.seed)
    for size in cells.steady.batches:
        figures |= steady(drive, size, cells)
    return figures


def show(figures: dict[str, Any]) -> None:
    """The figures as a table on standard output."""
    print(f"{figures['shape']}, started in {figures['start_s']} s")
    for name, value in figures.items():
        if isinstance(value, int | float) and not name.endswith(("_p10", "_p90", "start_s")):
            low, high = figures.get(f"{name}_p10"), figures.get(f"{name}_p90")
            around = "" if low is None else f"   p10 {low:,}  p90 {high:,}"
            print(f"{name:<20}{value:>14,}{around}")


def main(
    model: str,
    json_path: str | None,
    names: Sequence[str] = (),
    repeats: int | None = None,
    options: Options | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure, show, print the result, write the record where asked. Raises InvalidConfig.

    model     a shape's name, a checkpoint's folder or id, or an embedded model
    names     cells to run, such as c1 or ttft_128 or b64; all where empty
    repeats   first tokens that the median is of
    options   what LLM is opened with beside the cells' own
    """
    cells = cells or Cells.read()
    cells = cells._replace(repeats=repeats or cells.repeats, prefix=())
    if names:
        cells = cells.only(names)
    with opened(model, {**defaults(model, cells), **(options or Options())}) as opened_llm:
        figures = measure(opened_llm, cells)
    show(figures)
    say(figures)
    if json_path is not None:
        write(json_path, record("step", figures))
    return 0
