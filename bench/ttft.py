"""Time to the first token: after prompts of several lengths, and after a cached prefix.

Owns the figures of `forge bench ttft`. Times are those of LLM.generate, detokenization included,
for one request of one token on an idle engine.

    ttft_128_ms             nothing is cached
    ttft_prefix_8k_64_ms    a prefix of 8,192 tokens is in the cache, 64 tokens are new
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from forge.bench.engine_driver import defaults, greedy, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import Cells, PrefixCell, draw_prompts, print_result, prompt_id_range
from forge.engine_options import Options
from forge.llm import LLM


def measure_ttft_s(llm: LLM, prompt: list[int]) -> float:
    """Return the seconds of a request for one token."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], greedy(1))
    seconds = time.perf_counter() - start
    assert len(output.token_ids) == 1, output.finish_reason
    return seconds


def measure_median_ttft_ms(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """Return the median time to the first token of the prompts, run one after the other."""
    return round(statistics.median(measure_ttft_s(llm, prompt) for prompt in prompts) * 1e3, 3)


def measure_ttft_by_length(llm: LLM, cells: Cells) -> dict[str, float]:
    """Return a figure for each prompt length. The prefix cache of `llm` is off."""
    ids = prompt_id_range(llm.engine.model.vocab_size())
    figures = {}
    for length in cells.ttft:
        prompts = draw_prompts(random.Random(cells.seed), cells.repeats, (length, length), ids)
        figures[f"ttft_{length}_ms"] = measure_median_ttft_ms(llm, prompts)
    return figures


def measure_uncached(model: str, cells: Cells, options: Options) -> dict[str, Any]:
    """Return the start time and the times to the first token with nothing cached.

    One prompt of each length runs first, so that compilation for a length is not measured.
    """
    with open_llm(model, {**defaults(model, cells), **options}) as (llm, shape, start_s):
        ids, rng = prompt_id_range(llm.engine.model.vocab_size()), random.Random(cells.seed + 1)
        for length in cells.ttft:
            measure_ttft_s(llm, draw_prompts(rng, 1, (length, length), ids)[0])
        return {
            "engine": "forge",
            "shape": shape,
            "start_s": start_s,
            **measure_ttft_by_length(llm, cells),
        }


def measure_cached_prefix(
    model: str, cell: PrefixCell, cells: Cells, options: Options
) -> dict[str, Any]:
    """Return the time to the first token after a prefix that an earlier request has cached.

    Opens its own LLM: prefix caching is on here and off in every other cell.
    """
    longest = cell.prefix_tokens + cell.new_tokens + 64
    caching_options: Options = {
        **defaults(model, cells),
        **options,
        "enable_prefix_caching": True,
        "max_model_len": longest,
    }
    rng = random.Random(cells.seed)
    with open_llm(model, caching_options) as (llm, shape, _):
        ids = prompt_id_range(llm.engine.model.vocab_size())
        lengths = (cell.prefix_tokens, cell.prefix_tokens)
        (prefix,) = draw_prompts(rng, 1, lengths, ids)
        suffixes = draw_prompts(rng, cell.repeats + 2, (cell.new_tokens, cell.new_tokens), ids)
        # The first fills the cache, the second warms up the path after a hit.
        for suffix in suffixes[:2]:
            measure_ttft_s(llm, prefix + suffix)
        milliseconds = measure_median_ttft_ms(llm, [prefix + suffix for suffix in suffixes[2:]])
    return {"engine": "forge", "shape": shape, f"ttft_{cell.name}_ms": milliseconds}


def main(
    model: str,
    json_path: str | None,
    cell_names: Sequence[str] = (),
    repeats: int | None = None,
    options: Options | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure both kinds, print the result and write the record. Raises InvalidConfig.

    The arguments are those of forge.bench.step.main.
    """
    cells = cells or Cells.read()
    cells = cells._replace(
        repeats=repeats or cells.repeats,
        prefix=tuple(each._replace(repeats=repeats or each.repeats) for each in cells.prefix),
        throughput=(),
        mixed=(),
        steady=cells.steady._replace(batches=()),
    )
    if cell_names:
        cells = cells.select(cell_names)
    figures = measure_uncached(model, cells, options or Options()) if cells.ttft else {}
    for cell in cells.prefix:
        figures |= measure_cached_prefix(model, cell, cells, options or Options())
    for name, value in figures.items():
        print(f"{name:<24}{value:>12}")
    print_result(figures)
    if json_path is not None:
        write_json(json_path, create_result("ttft", figures))
    return 0
