"""Simulator fidelity: a trace on a simulated GPU, then on the real GPU, and the error between them.

Owns the order of the experiment and its figures. Model, table and workload are those of sim/. The
engine is the real one on both sides, and the same World drives both.

    load ─► calibrate ─► practice ─► predict ─► hash, written ─► run, some times ─► errors ─► gate
                         │ other requests of the trace: steps of a serving engine join the
                         └ probes in the fit; one block in five is held out to measure the gain

    python -m forge.bench.simulator_fidelity qwen3-4b TRACE
                         [--loads 0.6,0.3] [--requests 2000] [--repeats 3]
                         [--settings 128x2048,16x512,...] [--calibration FILE] [--json FILE]

A load is a share of the predicted throughput when all requests arrive at once. The prediction is
written, with its SHA-256, before the first run that counts. The last line names the figures outside
the gate: more than 5 % off the median run. `--settings` compares pairs of `max_num_seqs` x
`max_num_batched_tokens` instead: which is best, and in which order (Kendall 1938). Baselines that a
fitted table has to beat: a constant, an affine function of rows and tokens, the roofline.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from forge.bench.engine_run import gc_disabled
from forge.bench.result_file import create_result, write_json
from forge.bench.shapes import SHAPES
from forge.bench.shapes import write_shape as write_shape
from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.loaded_model import LoadedModel
from forge.models.loader import load_model
from forge.request import Delta
from forge.seam import Model
from forge.sim.calibration.calibrate import (
    calibrate_loaded,
    create_identity,
    find_roofline,
    print_report,
    refit_with_served_steps,
)
from forge.sim.calibration.cost_error import MeasuredStep, compute_cell_errors, fit_baselines
from forge.sim.clock import Clock, VirtualClockModel, VirtualClockStep
from forge.sim.cost.calibration_file import Calibration, read_calibration
from forge.sim.cost.model import CostModel
from forge.sim.cost.table import StepFeatures, TableCost, extract_features
from forge.sim.length_model import LengthModel
from forge.sim.wall_clock import StepTiming, WallClock, WallClockModel
from forge.sim.workloads.traces import TraceRequest, TraceWorkload, open_trace
from forge.sim.workloads.workload import FixedArrivals, RequestArrival, VocabularyWorkload
from forge.sim.world import World

OPTIONS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "device")
"""Options of the loaded model."""

QUANTILES = (50, 90, 99)
GATED_FIGURES = (*(f"{time}_p{q}" for time in ("ttft", "itl") for q in QUANTILES), "tok_s")
"""Figures that the gate checks."""

MAX_ERROR = 0.05
"""Limit of the error of a gated figure, up or down, relative to the median run."""

PERCENTILES = (1, 2, *range(5, 100, 5), 98, 99)
"""Percentiles at which distributions are recorded, for plots."""

BLOCK_STEPS, HOLDOUT_EVERY = 50, 5
"""Steps of a block, and the period of held-out blocks.

Blocks: neighbouring steps are too similar.
"""

RESAMPLES = 200


class LatencyWatcher:
    """A WorldObserver that records the times of arrivals and of tokens."""

    def __init__(self) -> None:
        self._token_times_ns: dict[int, list[int]] = {}
        self._arrived_ns: dict[int, int] = {}

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refused: str | None) -> None:
        assert refused is None, refused
        self._arrived_ns[arrival.request.id] = arrival.at_ns
        self._token_times_ns[arrival.request.id] = []

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("no client disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        for delta in deltas:
            assert delta.error is None, delta.error
            self._token_times_ns[delta.request_id] += [now_ns] * len(delta.tokens)

    def latencies(self) -> RunLatencies:
        """Return the latencies of all requests. All have ended."""
        last_ns = max(times_ns[-1] for times_ns in self._token_times_ns.values())
        return RunLatencies(
            np.array(
                [
                    (times_ns[0] - self._arrived_ns[i]) / 1e6
                    for i, times_ns in self._token_times_ns.items()
                ]
            ),
            [np.diff(np.array(times_ns)) / 1e6 for times_ns in self._token_times_ns.values()],
            (last_ns - min(self._arrived_ns.values())) / 1e9,
        )


class RunLatencies(NamedTuple):
    """Latencies of a run, in milliseconds.

    ttft_ms   [requests]   time to the first token
    itl_ms    one array for each request: times between its tokens
    seconds   from the first arrival to the last token
    """

    ttft_ms: Any
    itl_ms: list[Any]
    seconds: float

    def figures(self) -> dict[str, float]:
        """Return the figures that are compared."""
        between = np.concatenate(self.itl_ms)
        figures = {f"ttft_p{q}": float(np.percentile(self.ttft_ms, q)) for q in QUANTILES}
        figures |= {f"itl_p{q}": float(np.percentile(between, q)) for q in QUANTILES}
        tokens = len(self.ttft_ms) + len(between)
        latencies_ms = self.ttft_ms + np.array([each.sum() for each in self.itl_ms])
        mean = {"latency_mean": float(latencies_ms.mean()), "ttft_mean": float(self.ttft_ms.mean())}
        return figures | mean | {"tok_s": tokens / self.seconds}

    def curves(self) -> dict[str, list[float]]:
        """Return each latency at PERCENTILES."""
        samples = {"ttft": self.ttft_ms, "itl": np.concatenate(self.itl_ms)}
        return {
            name: [round(float(each), 3) for each in np.percentile(values, PERCENTILES)]
            for name, values in samples.items()
        }


def run_world(world: World, watcher: LatencyWatcher) -> RunLatencies:
    """Run the world to its end. Returns the latencies that the observer recorded."""
    world.run()
    return watcher.latencies()


def predict(cost: CostModel, config: EngineConfig, workload: TraceWorkload) -> RunLatencies:
    """Return the latencies of the requests if steps take the times of `cost`."""
    model, watcher = VirtualClockModel(LengthModel(), Clock(), cost), LatencyWatcher()
    return run_world(World(Engine(model, config), model, workload, watcher), watcher)


def measure_real(
    model: Model, config: EngineConfig, workload: TraceWorkload, keeps: bool = False
) -> tuple[RunLatencies, list[StepTiming]]:
    """Return the latencies of the requests on the real engine, with its steps if `keeps`."""
    # A server receives its prompts: they are created before the clock starts.
    arrivals = FixedArrivals(tuple(VocabularyWorkload(workload, model.vocab_size()).arrivals()))
    # Garbage collection would scan the kept steps repeatedly, for 100 ms each time.
    with gc_disabled():
        live, watcher = WallClockModel(model, WallClock(), keeps), LatencyWatcher()
        return run_world(
            World(Engine(live, config), live, arrivals, watcher), watcher
        ), live.timings


def synchronous_steps(steps: Sequence[StepTiming]) -> list[MeasuredStep]:
    """Return the steps that the host waited for: of the others, only an upper bound is known.

    Returns all steps where most finished early: there the time of a step is that of the host.
    """
    waited_for = [step for step in steps if not step.finished_early]
    chosen = waited_for if 2 * len(waited_for) > len(steps) else steps
    return [MeasuredStep(step.plan, step.ns) for step in chosen]


def scale_trace(requests: Sequence[TraceRequest], rate: float, longest: int) -> TraceWorkload:
    """Return these requests at `rate` a second, cut to `longest` tokens."""
    first_ns = requests[0].at_ns
    shifted = [each._replace(at_ns=each.at_ns - first_ns) for each in requests]
    output = longest // 8
    return TraceWorkload(
        shifted, max_prompt_tokens=longest - output, max_output_tokens=output
    ).at_rate(rate)


def predict_capacity(
    cost: CostModel, config: EngineConfig, requests: Sequence[TraceRequest]
) -> float:
    """Return the predicted requests a second when all arrive at once."""
    at_once = scale_trace(requests, 1e9, config.max_model_len)
    return len(requests) / predict(cost, config, at_once).seconds


# Practice.


def split_requests(
    requests: Sequence[TraceRequest], count: int, practice: int
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return `count` requests to predict, and `practice` requests spread evenly among them.

    Raises InvalidConfig where the trace has fewer.
    """
    stretch = requests[: count + practice]
    if len(stretch) < count + practice:
        problem = (
            f"the trace has {len(requests)} requests, fewer than {count} and {practice} of practice"
        )
        raise InvalidConfig("requests", problem, "Ask for fewer")
    practice_indices = {(2 * i + 1) * len(stretch) // (2 * practice) for i in range(practice)}
    return (
        [each for i, each in enumerate(stretch) if i not in practice_indices],
        [each for i, each in enumerate(stretch) if i in practice_indices],
    )


def write_steps(path: Path, steps: Sequence[StepTiming]) -> None:
    """Write the features of each step and its times to the file."""
    rows = [[*extract_features(plan), *times] for plan, *times in steps]
    path.write_text(json.dumps([[*StepFeatures._fields, *StepTiming._fields[1:]], *rows]) + "\n")


def refit_tables(
    calibration: Calibration, steps: Sequence[MeasuredStep]
) -> tuple[Calibration, dict[str, Any]]:
    """Return the tables fitted to their probes and these steps, and errors on held-out blocks.

    before, after   errors of the tables as they were, and fitted without the held-out blocks
    """
    fitted, holdout = split_blocks(steps)
    errors = {
        "steps": len(steps),
        "held_out": len(holdout),
        "before": errors_by_cell(calibration.create_cost(), holdout),
        "after": errors_by_cell(
            refit_with_served_steps(calibration, fitted).create_cost(), holdout
        ),
    }
    return refit_with_served_steps(calibration, steps), errors


def split_blocks(steps: Sequence[MeasuredStep]) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Return the steps to fit, and those of every fifth block, in order."""
    parts: tuple[list[MeasuredStep], list[MeasuredStep]] = ([], [])
    for i, step in enumerate(steps):
        parts[i // BLOCK_STEPS % HOLDOUT_EVERY == HOLDOUT_EVERY - 1].append(step)
    return parts


def errors_by_cell(table: TableCost, steps: Sequence[MeasuredStep]) -> dict[str, dict[str, float]]:
    """Return the errors in each cell of forge.sim.calibration.cost_error."""
    return {
        cell: {name: round(value, 4) for name, value in errors._asdict().items()}
        for cell, errors in compute_cell_errors(table, steps).errors.items()
    }


# The comparison.


def relative_error(predicted: float, measured: Iterable[float]) -> float:
    """Return the signed error, as a share of the median run."""
    return round(predicted / median(measured) - 1, 4)


def gate_failures(
    predicted: Mapping[str, float], measured: Sequence[Mapping[str, float]]
) -> list[str]:
    """Return the figures with an error above the gate, as texts. Empty: the prediction passes."""
    errors = {
        name: relative_error(predicted[name], (run[name] for run in measured))
        for name in GATED_FIGURES
    }
    return [f"{name} {error:+.2%}" for name, error in errors.items() if abs(error) > MAX_ERROR]


def compare_runs(
    sim: Mapping[str, float], runs: Sequence[RunLatencies]
) -> dict[str, dict[str, Any]]:
    """Return for each figure the prediction, the runs, and the error with its spread."""
    figures = [run.figures() for run in runs]
    intervals = bootstrap_intervals(runs)
    found = {}
    for name, predicted in sim.items():
        values = [each[name] for each in figures]
        found[name] = {
            "sim": round(predicted, 4),
            "real": round(median(values), 4),
            "error": relative_error(predicted, values),
            "runs": [round(value, 4) for value in values],
            "interval": intervals.get(name),
            "within": min(values) <= predicted <= max(values),
        }
    return found


def bootstrap_intervals(runs: Sequence[RunLatencies]) -> dict[str, list[float]]:
    """Return 95 % intervals of the figures, by resampling the requests of all runs."""
    first = np.concatenate([run.ttft_ms for run in runs])
    between = [each for run in runs for each in run.itl_ms]
    rng, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        picks = rng.integers(0, len(first), len(first) // len(runs))
        sample = RunLatencies(first[picks], [between[i] for i in picks], 1.0)
        found.append(sample.figures())
    return {
        name: [
            round(float(np.percentile([each[name] for each in found], q)), 4) for q in (2.5, 97.5)
        ]
        for name in found[0]
        if name != "tok_s"
    }


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return tau of two orders: pairs in agreement less the others, as a share of all."""
    pairs = list(combinations(range(len(one)), 2))
    signs = [np.sign(one[i] - one[j]) * np.sign(other[i] - other[j]) for i, j in pairs]
    return float(sum(signs) / len(pairs))


# The experiment.


class Experiment:
    """A loaded model, its table, and two parts of the trace: for practice, and to predict.

    Practice uses other requests, of the same lengths and at the highest load: a table is accurate
    for steps that it was fitted to, and the requests decide how full steps are.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration,
        requests: Sequence[TraceRequest],
        practice: int,
        shares: Sequence[float],
        count: int,
        folder: Path,
    ) -> None:
        self.model, self.config = loaded.model, loaded.config
        self.longest = loaded.config.max_model_len
        self.requests, practice_requests = split_requests(requests, count, practice)
        print_progress("practice")
        rate = max(shares) * predict_capacity(calibration.create_cost(), self.config, self.requests)
        paced = scale_trace(practice_requests, rate, self.longest)
        measure_real(
            self.model,
            self.config,
            scale_trace(practice_requests[: 1 + practice // 8], rate, self.longest),
        )
        _, timings = measure_real(self.model, self.config, paced, keeps=True)
        write_steps(folder / "practice.json", timings)
        steps = synchronous_steps(timings)
        self.calibration, refit_report = refit_tables(calibration, steps)
        self.practice_report = {
            "late": sum(step.finished_early for step in timings),
            **refit_report,
        }
        self.costs: dict[str, CostModel] = {
            "table": self.calibration.create_cost(),
            **fit_baselines(steps),
        }
        ceiling = find_roofline(calibration.identity)
        if ceiling is not None:
            self.costs["roofline"] = ceiling
        print_progress(json.dumps(self.practice_report))

    def run_loads(self, shares: Sequence[float], repeats: int, folder: Path) -> dict[str, Any]:
        """Predict each load, then run it `repeats` times.

        Returns the record, with all gate failures.
        """
        max_rate = predict_capacity(self.costs["table"], self.config, self.requests)
        paced = {
            share: scale_trace(self.requests, share * max_rate, self.longest) for share in shares
        }
        predictions = {
            share: {
                name: predict(cost, self.config, paced[share]) for name, cost in self.costs.items()
            }
            for share in shares
        }
        predicted_figures = {
            share: {name: each.figures() for name, each in figures_by_cost.items()}
            for share, figures_by_cost in predictions.items()
        }
        digest = write_prediction(
            folder / "predictions.json", {"capacity": max_rate, "loads": predicted_figures}
        )
        runs: dict[float, list[RunLatencies]] = {share: [] for share in shares}
        step_errors: dict[float, dict[str, dict[str, float]]] = {}
        for repeat in range(repeats):
            last = repeat == repeats - 1
            for share in shares:
                outcome, steps = measure_real(self.model, self.config, paced[share], keeps=last)
                runs[share].append(outcome)
                if last:
                    write_steps(folder / f"steps-{share}.json", steps)
                    step_errors[share] = errors_by_cell(
                        self.calibration.create_cost(), synchronous_steps(steps)
                    )
                print_progress(f"load {share}, run {repeat}: {json.dumps(outcome.figures())}")
        levels, failures = [], []
        for share in shares:
            table, *baselines = predicted_figures[share].items()
            measured = [run.figures() for run in runs[share]]
            failures += [f"load {share}: {each}" for each in gate_failures(table[1], measured)]
            levels.append(
                {
                    "load": share,
                    "requests_per_s": round(share * max_rate, 3),
                    "figures": compare_runs(table[1], runs[share]),
                    "steps": step_errors[share],
                    "shares": PERCENTILES,
                    "curves": {
                        "sim": predictions[share]["table"].curves(),
                        "real": [run.curves() for run in runs[share]],
                    },
                    "baselines": {
                        name: {
                            key: relative_error(value, (run[key] for run in measured))
                            for key, value in figures_by_cost.items()
                        }
                        for name, figures_by_cost in baselines
                    },
                }
            )
        return {
            "requests": len(self.requests),
            "repeats": repeats,
            "predictions": digest,
            "levels": levels,
            "beyond": failures,
        }

    def run_settings(
        self, pairs: Sequence[tuple[int, int]], share: float, folder: Path
    ) -> dict[str, Any]:
        """Predict each pair of max_num_seqs and max_num_batched_tokens, then run it once."""
        max_rate = predict_capacity(self.costs["table"], self.config, self.requests)
        paced = scale_trace(self.requests, share * max_rate, self.longest)
        configs = [
            replace(self.config, max_num_seqs=seqs, max_num_batched_tokens=tokens)
            for seqs, tokens in pairs
        ]
        predicted_figures = [
            predict(self.costs["table"], each, paced).figures() for each in configs
        ]
        digest = write_prediction(
            folder / "rank-predictions.json", {"settings": pairs, "said": predicted_figures}
        )
        measured = []
        for config in configs:
            measured.append(measure_real(self.model, config, paced)[0].figures())
            print_progress(
                f"{config.max_num_seqs}x{config.max_num_batched_tokens}: {json.dumps(measured[-1])}"
            )
        names = list(predicted_figures[0])
        return {
            "load": share,
            "requests": len(self.requests),
            "predictions": digest,
            "settings": [
                {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "sim": sim, "real": real}
                for (seqs, tokens), sim, real in zip(
                    pairs, predicted_figures, measured, strict=True
                )
            ],
            "tau": {
                name: round(
                    kendall_tau([s[name] for s in predicted_figures], [r[name] for r in measured]),
                    4,
                )
                for name in names
            },
            "regret": {
                name: round(
                    _regret([s[name] for s in predicted_figures], [r[name] for r in measured]), 4
                )
                for name in names
                if name != "tok_s"
            },
        }


def _regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much worse the predicted best setting is than the best one, as a share."""
    return measured[predicted.index(min(predicted))] / min(measured) - 1


def write_prediction(path: Path, prediction: Any) -> dict[str, str]:
    """Write the prediction. Returns its digest and the time."""
    text = json.dumps(prediction, indent=1, sort_keys=True) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    stamp = {
        "sha256": sha256(text.encode()).hexdigest(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    print_progress(f"predicted: {stamp}")
    return stamp


def print_progress(text: str) -> None:
    print(f"{time.perf_counter():9.1f} s  {text}", flush=True)


def _parse_settings(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (each.split("x") for each in text.split(","))]


def _load_calibration(loaded: LoadedModel, file: str | None, minutes: float) -> Calibration:
    if file is None:
        return calibrate_loaded(loaded, 0, 60 * minutes)
    calibration = read_calibration(file)
    calibration.check_machine(create_identity(loaded), file)
    return calibration


def _parse_floats(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def print_outcome(figures: Mapping[str, Any]) -> None:
    """Print the figures. The last line is the gate, or for settings the agreement of the orders."""
    for level in figures.get("levels", ()):
        print(f"load {level['load']}: {level['requests_per_s']} requests a second")
        for key, figure in level["figures"].items():
            print(
                f"{key:<14}{figure['sim']:>12}{figure['real']:>12}{100 * figure['error']:>+9.2f} %"
            )
    if "rank" in figures:
        print(figures["rank"]["tau"])
    else:
        print(f"beyond {MAX_ERROR:.0%}: {', '.join(figures['beyond']) or 'nothing'}")


def _parse_arguments(words: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m forge.bench.simulator_fidelity", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", help="a shape's name, a checkpoint or an embedded model")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--loads", type=_parse_floats, default=[0.6], metavar="SHARE,SHARE")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--practice", type=int, default=700, help="requests of practice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", type=_parse_settings, default=[], metavar="SEQSxTOKENS,...")
    parser.add_argument("--calibration", metavar="FILE", help="use it instead of calibrating")
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of the calibration")
    parser.add_argument("--device", help="auto, cuda or cpu, for a checkpoint")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=Path("build/twin"))
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args(None if words is None else list(words))
    if len(arguments.settings) == 1:
        parser.error("one setting has no order: name two or more")
    return arguments


def main(words: Iterable[str] | None = None) -> None:
    """Run the experiment and write the record where `--json` names a file."""
    arguments = _parse_arguments(words)
    with tempfile.TemporaryDirectory() as root:
        arguments_by_name = {each: getattr(arguments, each) for each in OPTIONS}
        options = {each: value for each, value in arguments_by_name.items() if value is not None}
        name = arguments.model
        if name in SHAPES:
            name, options["load_format"] = str(write_shape(name, root)), "dummy"
        with load_model(name, options) as loaded:
            print_progress("calibrate")
            calibration = _load_calibration(loaded, arguments.calibration, arguments.minutes)
            calibration.write(arguments.folder / "calibration.json")
            print_report(calibration)
            experiment = Experiment(
                loaded,
                calibration,
                list(open_trace(arguments.trace)),
                arguments.practice,
                arguments.loads,
                arguments.requests,
                arguments.folder,
            )
            figures: dict[str, Any] = {
                "shape": Path(name).name,
                "trace": arguments.trace.name,
                "engine": calibration.identity.engine,
                "practice": experiment.practice_report,
                "calibration": calibration.report,
            }
            if arguments.settings:
                share = arguments.loads[0]
                figures["rank"] = experiment.run_settings(
                    arguments.settings, share, arguments.folder
                )
            else:
                figures |= experiment.run_loads(
                    arguments.loads, arguments.repeats, arguments.folder
                )
    if arguments.json is not None:
        write_json(arguments.json, create_result("twin", figures))
    print_outcome(figures)


if __name__ == "__main__":
    main()
