"""Steps of sampled rows against greedy ones: what each sampling parameter adds to a step.

Owns the settings and the order of the runs. The clock is EngineDriver's.

    greedy | temperature | greedy | top-k | greedy | ... | greedy     one round, all at one size
       └────────┬───────────┘
        ratio = median step of the setting / median step of the greedy runs next to it

    python -m forge.bench.sampled_steps qwen3-4b --batches 64,256 --json FILE

Every run has new prompts, one row each in steady decode. A step is timed on the host's clock from
end to end, so a ratio also has what the host adds where the device waits for it. A figure is the
median of the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from forge.bench.engine_driver import EngineDriver, OpenLLM, defaults, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import Cells, draw_prompts, print_result, prompt_id_range
from forge.errors import ForgeError, InvalidConfig
from forge.request import SamplingParams

NUM_LISTED = 100
"""Ids in a bias, and in a list of allowed ids."""


def create_settings(first_id: int) -> dict[str, SamplingParams]:
    """Return the settings by name.

    first_id   the first of the ids that a bias and a list of allowed ids name
    """
    ids = range(first_id, first_id + NUM_LISTED)
    filters: dict[str, Any] = {"top_k": 50, "top_p": 0.95}
    penalties: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    fields: dict[str, dict[str, Any]] = {
        "temperature": {},
        "top_k": {"top_k": 50},
        "top_p": {"top_p": 0.95},
        "top_k_top_p": filters,
        "min_p": {"min_p": 0.05},
        "penalties": penalties,
        "penalties_top_k_top_p": {**penalties, **filters},
        "logit_bias": {"logit_bias": dict.fromkeys(ids, 1.0)},
        "allowed_token_ids": {"allowed_token_ids": list(ids)},
        "logprobs": {"logprobs": 5},
    }
    return {name: SamplingParams(temperature=0.8, **each) for name, each in fields.items()}


class StepMeter:
    """Median step times of one batch size on an open LLM."""

    def __init__(self, session: OpenLLM, cells: Cells, batch: int) -> None:
        engine = session.llm.engine
        self.ids = prompt_id_range(engine.model.vocab_size())
        self._drive = EngineDriver(engine)
        self._rng = random.Random(cells.seed)
        self._batch = batch
        self._steps = cells.steady.steps
        self._length = max(1, cells.steady.context - self._steps // 2)

    def step_ms(self, params: SamplingParams | None) -> float:
        """Return the median milliseconds of a step; None samples greedily."""
        prompts = draw_prompts(self._rng, self._batch, (self._length, self._length), self.ids)
        times = self._drive.time_steps(prompts, self._steps, params)
        return median(each.step_s for each in times) * 1e3


def measure(
    session: OpenLLM, cells: Cells, batches: Sequence[int], names: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Return milliseconds of greedy steps and ratios to them, by batch and setting."""
    figures: dict[str, Any] = {"shape": session.shape}
    for batch in batches:
        meter = StepMeter(session, cells, batch)
        settings = create_settings(meter.ids[0])
        for name in names:
            meter.step_ms(settings[name])  # Kernels are loaded on their first run.
        ratios: dict[str, list[float]] = {name: [] for name in names}
        greedy_ms = [meter.step_ms(None)]
        for _ in range(rounds):
            for name in names:
                sampled_ms = meter.step_ms(settings[name])
                greedy_ms.append(meter.step_ms(None))
                ratios[name].append(sampled_ms / mean(greedy_ms[-2:]))
        figures[f"b{batch}"] = {"greedy_ms": spread(greedy_ms)} | {
            name: spread(each) for name, each in ratios.items()
        }
        show(batch, figures[f"b{batch}"])
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the greatest of the values."""
    return {
        "median": round(median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def show(batch: int, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Print the figures of one batch size."""
    for name, each in figures.items():
        low, high = each["min"], each["max"]
        print(f"b{batch:<5}{name:<24}{each['median']:.4f}  ({low:.4f} to {high:.4f})", flush=True)


def select_settings(chosen: str | None) -> tuple[str, ...]:
    """Return the names of a comma-separated list, or all names. Raises InvalidConfig."""
    known = tuple(create_settings(0))
    if chosen is None:
        return known
    names = tuple(chosen.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidConfig(
            "settings", f"{unknown[0][:64]!r} is not known", f"Give some of: {', '.join(known)}"
        )
    return names


def run_cli(words: Sequence[str] | None = None, cells: Cells | None = None) -> int:
    """Run the command line of this module. Returns the exit status.

    cells   instead of those of cells.json: their seed, context and number of steps
    """
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.sampled_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a shape such as qwen3-4b, a folder or an embedded model")
    parser.add_argument("--batches", default="64,256", help="rows of a step; default 64,256")
    parser.add_argument("--settings", help="such as top_k,penalties; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(words)
    cells = cells or Cells.read()
    try:
        names = select_settings(args.settings)
        batches = [int(each) for each in args.batches.split(",")]
        with open_llm(args.model, defaults(args.model, cells)) as session:
            figures = measure(session, cells, batches, names, args.rounds)
    except (ForgeError, OSError, ValueError) as error:
        print(f"forge.bench.sampled_steps: {error}", file=sys.stderr)
        return 1
    print_result(figures)
    if args.json is not None:
        write_json(args.json, create_result("sampled_steps", figures))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
