"""The twin: a trace on a simulated GPU, then on the GPU itself, and how far apart the two are.

Owns the order of the experiment and its figures. Model, table and workload are those of sim/; the
engine is the real one on both sides, and the same World drives both.

    load ─► calibrate ─► practice ─► predict ─► hash, written ─► run, some times ─► errors ─► gate
                         │ other requests of the trace: steps of an engine that serves join the
                         └ probes in the fit; one block in five is held out and says what it gains

    python -m bench.twin qwen3-4b TRACE [--loads 0.6,0.3] [--requests 2000] [--repeats 3]
                         [--settings 128x2048,16x512,...] [--calibration FILE] [--json FILE]

A load is a share of what the engine serves when all requests are there at once, as predicted. What
was predicted is written, with its SHA-256, before the first run that counts. The last line says
which figures are beyond the gate: more than 5 % off the middle run. `--settings` compares
`max_num_seqs` x `max_num_batched_tokens` instead: which is best, and in which order (Kendall 1938).
Baselines that a fitted table has to beat: a constant, a line in rows and tokens, the roofline.
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

from bench.record import record, write
from bench.rounds import uncollected
from bench.shapes import SHAPES
from bench.shapes import write as write_shape
from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.load import Loaded, load
from forge.request import Delta
from forge.seam import Model
from sim.calibrate import calibrated, identity_of, practised, roofline_like, show
from sim.calibration import Calibration, read
from sim.clock import Clock, Cost, TimedModel, TimedStep
from sim.drift import Measured, baselines, drift
from sim.lengths import LengthModel
from sim.live import LiveModel, Ran, WallClock
from sim.table import Table, Work, work_of
from sim.traces import Asked, Trace, trace_file
from sim.workload import Arrival, InVocabulary, Listed
from sim.world import World

OPTIONS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "device")
"""Of the model that is loaded."""

QUANTILES = (50, 90, 99)
GATED = (*(f"{time}_p{q}" for time in ("ttft", "itl") for q in QUANTILES), "tok_s")
"""Figures that a prediction is held to."""

GATE = 0.05
"""The error that such a figure may have, either way, as a share of the middle run."""

SHARES = (1, 2, *range(5, 100, 5), 98, 99)
"""Per cents at which distributions are told, for a picture."""

BLOCK, HELD = 50, 5
"""Steps of a block, and one block in so many that is held out: neighbours are too much alike."""

RESAMPLES = 200


class Seen:
    """A watcher: when each request came, and when its tokens did."""

    def __init__(self) -> None:
        self._told_ns: dict[int, list[int]] = {}
        self._arrived_ns: dict[int, int] = {}

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        assert refused is None, refused
        self._arrived_ns[arrival.request.id] = arrival.at_ns
        self._told_ns[arrival.request.id] = []

    def left(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("nobody leaves")

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        for delta in deltas:
            assert delta.error is None, delta.error
            self._told_ns[delta.request_id] += [now_ns] * len(delta.tokens)

    def outcome(self) -> Outcome:
        """Of all requests, which have ended."""
        last_ns = max(told[-1] for told in self._told_ns.values())
        return Outcome(
            np.array([(told[0] - self._arrived_ns[i]) / 1e6 for i, told in self._told_ns.items()]),
            [np.diff(np.array(told)) / 1e6 for told in self._told_ns.values()],
            (last_ns - min(self._arrived_ns.values())) / 1e9,
        )


class Outcome(NamedTuple):
    """Of one run, in milliseconds.

    first     [requests] to the first token
    between   of each request, between its tokens
    seconds   from the first arrival to the last token
    """

    first: Any
    between: list[Any]
    seconds: float

    def figures(self) -> dict[str, float]:
        """What is compared."""
        between = np.concatenate(self.between)
        named = {f"ttft_p{q}": float(np.percentile(self.first, q)) for q in QUANTILES}
        named |= {f"itl_p{q}": float(np.percentile(between, q)) for q in QUANTILES}
        tokens = len(self.first) + len(between)
        whole = self.first + np.array([each.sum() for each in self.between])
        mean = {"latency_mean": float(whole.mean()), "ttft_mean": float(self.first.mean())}
        return named | mean | {"tok_s": tokens / self.seconds}

    def curves(self) -> dict[str, list[float]]:
        """Times that so many per cent do not exceed."""
        named = {"ttft": self.first, "itl": np.concatenate(self.between)}
        return {
            name: [round(float(each), 3) for each in np.percentile(values, SHARES)]
            for name, values in named.items()
        }


def served(world: World, seen: Seen) -> Outcome:
    """The world at its end."""
    world.run()
    return seen.outcome()


def predicted(cost: Cost, config: EngineConfig, workload: Trace) -> Outcome:
    """What the requests would see if steps took what `cost` says."""
    model, seen = TimedModel(LengthModel(), Clock(), cost), Seen()
    return served(World(Engine(model, config), model, workload, seen), seen)


def real(
    model: Model, config: EngineConfig, workload: Trace, keeps: bool = False
) -> tuple[Outcome, list[Ran]]:
    """What the requests see, and the steps where `keeps`."""
    # A server is sent its prompts: they are made before the clock begins.
    asked = Listed(tuple(InVocabulary(workload, model.vocab_size()).arrivals()))
    # To look at all that is kept, again and again, would take 100 ms each time.
    with uncollected():
        live, seen = LiveModel(model, WallClock(), keeps), Seen()
        return served(World(Engine(live, config), live, asked, seen), seen), live.steps


def waited(steps: Sequence[Ran]) -> list[Measured]:
    """Those that the host waited for, since of others nobody knows what the device took. All of
    them where most are late: there a step is the host's own."""
    known = [step for step in steps if not step.late]
    chosen = known if 2 * len(known) > len(steps) else steps
    return [Measured(step.plan, step.ns) for step in chosen]


def trace(asked: Sequence[Asked], rate: float, longest: int) -> Trace:
    """These requests, `rate` a second; what does not fit into `longest` tokens is cut."""
    begun = asked[0].at_ns
    moved = [each._replace(at_ns=each.at_ns - begun) for each in asked]
    output = longest // 8
    return Trace(moved, longest_prompt=longest - output, longest_output=output).at_rate(rate)


def capacity(cost: Cost, config: EngineConfig, asked: Sequence[Asked]) -> float:
    """Requests a second when all are there from the beginning."""
    at_once = trace(asked, 1e9, config.max_model_len)
    return len(asked) / predicted(cost, config, at_once).seconds


# Practice.


def parted(asked: Sequence[Asked], count: int, practice: int) -> tuple[list[Asked], list[Asked]]:
    """`count` requests to be predicted, and `practice` that are spread evenly among them.

    Raises InvalidConfig where the trace has fewer.
    """
    stretch = asked[: count + practice]
    if len(stretch) < count + practice:
        what = f"the trace has {len(asked)} requests, fewer than {count} and {practice} of practice"
        raise InvalidConfig("requests", what, "Ask for fewer")
    tried = {(2 * i + 1) * len(stretch) // (2 * practice) for i in range(practice)}
    return (
        [each for i, each in enumerate(stretch) if i not in tried],
        [each for i, each in enumerate(stretch) if i in tried],
    )


def keep(path: Path, steps: Sequence[Ran]) -> None:
    """What each step had to do, what it took, and when what happened to it is in the file."""
    kept = [[*work_of(plan), *times] for plan, *times in steps]
    path.write_text(json.dumps([[*Work._fields, *Ran._fields[1:]], *kept]) + "\n")


def corrected(
    calibration: Calibration, steps: Sequence[Measured]
) -> tuple[Calibration, dict[str, Any]]:
    """The tables fitted to their probes and to these steps, and errors on blocks held out.

    before, after   of the tables as they were, and fitted without the held-out blocks
    """
    known, held = blocks(steps)
    told = {
        "steps": len(steps),
        "held_out": len(held),
        "before": cells_of(calibration.table(), held),
        "after": cells_of(practised(calibration, known).table(), held),
    }
    return practised(calibration, steps), told


def blocks(steps: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Those that are fitted, and every fifth block of them, in order."""
    parts: tuple[list[Measured], list[Measured]] = ([], [])
    for i, step in enumerate(steps):
        parts[i // BLOCK % HELD == HELD - 1].append(step)
    return parts


def cells_of(table: Table, steps: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Errors in each cell of sim.drift."""
    return {
        cell: {name: round(value, 4) for name, value in errors._asdict().items()}
        for cell, errors in drift(table, steps).errors.items()
    }


# The comparison.


def error_of(said: float, ran: Iterable[float]) -> float:
    """Signed, as a share of the middle run."""
    return round(said / median(ran) - 1, 4)


def beyond(said: Mapping[str, float], ran: Sequence[Mapping[str, float]]) -> list[str]:
    """What the prediction misses by more than the gate, with its error. Empty: it passes."""
    errors = {name: error_of(said[name], (run[name] for run in ran)) for name in GATED}
    return [f"{name} {error:+.2%}" for name, error in errors.items() if abs(error) > GATE]


def compared(sim: Mapping[str, float], runs: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """For each figure the prediction beside the median of the runs, and what that is worth."""
    figures = [run.figures() for run in runs]
    intervals = resampled(runs)
    found = {}
    for name, told in sim.items():
        values = [each[name] for each in figures]
        found[name] = {
            "sim": round(told, 4),
            "real": round(median(values), 4),
            "error": error_of(told, values),
            "runs": [round(value, 4) for value in values],
            "interval": intervals.get(name),
            "within": min(values) <= told <= max(values),
        }
    return found


def resampled(runs: Sequence[Outcome]) -> dict[str, list[float]]:
    """95 % intervals of the figures, by drawing the requests of all runs anew."""
    first = np.concatenate([run.first for run in runs])
    between = [each for run in runs for each in run.between]
    rng, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        picks = rng.integers(0, len(first), len(first) // len(runs))
        drawn = Outcome(first[picks], [between[i] for i in picks], 1.0)
        found.append(drawn.figures())
    return {
        name: [
            round(float(np.percentile([each[name] for each in found], q)), 4) for q in (2.5, 97.5)
        ]
        for name in found[0]
        if name != "tok_s"
    }


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Tau of two orders: pairs that agree less pairs that do not, as a share of all."""
    pairs = list(combinations(range(len(one)), 2))
    signs = [np.sign(one[i] - one[j]) * np.sign(other[i] - other[j]) for i, j in pairs]
    return float(sum(signs) / len(pairs))


# The experiment.


class Experiment:
    """One loaded model, its table, and two parts of the trace: to be practised with, and predicted.

    Practice has other requests, as long as those that are predicted and at the highest of the
    loads: a table knows the steps that it has seen, and requests decide how full steps are.
    """

    def __init__(
        self,
        loaded: Loaded,
        calibration: Calibration,
        asked: Sequence[Asked],
        practice: int,
        shares: Sequence[float],
        count: int,
        folder: Path,
    ) -> None:
        self.model, self.config = loaded.model, loaded.config
        self.longest = loaded.config.max_model_len
        self.asked, tried = parted(asked, count, practice)
        say("practice")
        rate = max(shares) * capacity(calibration.table(), self.config, self.asked)
        paced = trace(tried, rate, self.longest)
        real(self.model, self.config, trace(tried[: 1 + practice // 8], rate, self.longest))
        _, ran = real(self.model, self.config, paced, keeps=True)
        keep(folder / "practice.json", ran)
        steps = waited(ran)
        self.calibration, told = corrected(calibration, steps)
        self.told = {"late": sum(step.late for step in ran), **told}
        self.costs: dict[str, Cost] = {"table": self.calibration.table(), **baselines(steps)}
        ceiling = roofline_like(calibration.identity)
        if ceiling is not None:
            self.costs["roofline"] = ceiling
        say(json.dumps(self.told))

    def loads(self, shares: Sequence[float], repeats: int, folder: Path) -> dict[str, Any]:
        """Each load predicted, then run `repeats` times; and what is beyond the gate, of all."""
        most = capacity(self.costs["table"], self.config, self.asked)
        paced = {share: trace(self.asked, share * most, self.longest) for share in shares}
        ahead = {
            share: {
                name: predicted(cost, self.config, paced[share])
                for name, cost in self.costs.items()
            }
            for share in shares
        }
        said = {
            share: {name: each.figures() for name, each in told.items()}
            for share, told in ahead.items()
        }
        digest = committed(folder / "predictions.json", {"capacity": most, "loads": said})
        runs: dict[float, list[Outcome]] = {share: [] for share in shares}
        own: dict[float, dict[str, dict[str, float]]] = {}
        for repeat in range(repeats):
            last = repeat == repeats - 1
            for share in shares:
                outcome, steps = real(self.model, self.config, paced[share], keeps=last)
                runs[share].append(outcome)
                if last:
                    keep(folder / f"steps-{share}.json", steps)
                    own[share] = cells_of(self.calibration.table(), waited(steps))
                say(f"load {share}, run {repeat}: {json.dumps(outcome.figures())}")
        levels, missed = [], []
        for share in shares:
            table, *others = said[share].items()
            ran = [run.figures() for run in runs[share]]
            missed += [f"load {share}: {each}" for each in beyond(table[1], ran)]
            levels.append(
                {
                    "load": share,
                    "requests_per_s": round(share * most, 3),
                    "figures": compared(table[1], runs[share]),
                    "steps": own[share],
                    "shares": SHARES,
                    "curves": {
                        "sim": ahead[share]["table"].curves(),
                        "real": [run.curves() for run in runs[share]],
                    },
                    "baselines": {
                        name: {
                            key: error_of(value, (run[key] for run in ran))
                            for key, value in told.items()
                        }
                        for name, told in others
                    },
                }
            )
        return {
            "requests": len(self.asked),
            "repeats": repeats,
            "predictions": digest,
            "levels": levels,
            "beyond": missed,
        }

    def settings(
        self, pairs: Sequence[tuple[int, int]], share: float, folder: Path
    ) -> dict[str, Any]:
        """Each pair of max_num_seqs and max_num_batched_tokens predicted, then run once."""
        most = capacity(self.costs["table"], self.config, self.asked)
        paced = trace(self.asked, share * most, self.longest)
        configs = [
            replace(self.config, max_num_seqs=seqs, max_num_batched_tokens=tokens)
            for seqs, tokens in pairs
        ]
        said = [predicted(self.costs["table"], each, paced).figures() for each in configs]
        digest = committed(folder / "rank-predictions.json", {"settings": pairs, "said": said})
        ran = []
        for config in configs:
            ran.append(real(self.model, config, paced)[0].figures())
            say(f"{config.max_num_seqs}x{config.max_num_batched_tokens}: {json.dumps(ran[-1])}")
        names = list(said[0])
        return {
            "load": share,
            "requests": len(self.asked),
            "predictions": digest,
            "settings": [
                {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "sim": sim, "real": own}
                for (seqs, tokens), sim, own in zip(pairs, said, ran, strict=True)
            ],
            "tau": {
                name: round(kendall([s[name] for s in said], [r[name] for r in ran]), 4)
                for name in names
            },
            "regret": {
                name: round(_regret([s[name] for s in said], [r[name] for r in ran]), 4)
                for name in names
                if name != "tok_s"
            },
        }


def _regret(said: Sequence[float], ran: Sequence[float]) -> float:
    """By how much the setting that seemed best is worse than the best one."""
    return ran[said.index(min(said))] / min(ran) - 1


def committed(path: Path, said: Any) -> dict[str, str]:
    """What was said is in the file. Its digest, and when that was."""
    text = json.dumps(said, indent=1, sort_keys=True) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    told = {
        "sha256": sha256(text.encode()).hexdigest(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    say(f"predicted: {told}")
    return told


def say(line: str) -> None:
    print(f"{time.perf_counter():9.1f} s  {line}", flush=True)


def _pairs(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (each.split("x") for each in text.split(","))]


def _calibration(loaded: Loaded, file: str | None, minutes: float) -> Calibration:
    if file is None:
        return calibrated(loaded, 0, 60 * minutes)
    calibration = read(file)
    calibration.refuse_elsewhere(identity_of(loaded), file)
    return calibration


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def tell(figures: Mapping[str, Any]) -> None:
    """What came of it, in lines. The last one is the verdict, or of settings how orders agree."""
    for level in figures.get("levels", ()):
        print(f"load {level['load']}: {level['requests_per_s']} requests a second")
        for key, told in level["figures"].items():
            print(f"{key:<14}{told['sim']:>12}{told['real']:>12}{100 * told['error']:>+9.2f} %")
    if "rank" in figures:
        print(figures["rank"]["tau"])
    else:
        print(f"beyond {GATE:.0%}: {', '.join(figures['beyond']) or 'nothing'}")


def _arguments(words: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.twin", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a shape's name, a checkpoint or an embedded model")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--loads", type=_numbers, default=[0.6], metavar="SHARE,SHARE")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--practice", type=int, default=700, help="requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", type=_pairs, default=[], metavar="SEQSxTOKENS,...")
    parser.add_argument("--calibration", metavar="FILE", help="instead of calibrating")
    parser.add_argument("--minutes", type=float, default=10.0, help="to calibrate, at most")
    parser.add_argument("--device", help="auto, cuda or cpu, of a checkpoint")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=Path("build/twin"))
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(None if words is None else list(words))
    if len(arguments.settings) == 1:
        parser.error("one setting has no order: name two or more")
    return arguments


def main(words: Iterable[str] | None = None) -> None:
    """Run the experiment, write the record where asked."""
    arguments = _arguments(words)
    with tempfile.TemporaryDirectory() as root:
        given = {each: getattr(arguments, each) for each in OPTIONS}
        options = {each: value for each, value in given.items() if value is not None}
        name = arguments.model
        if name in SHAPES:
            name, options["load_format"] = str(write_shape(name, root)), "dummy"
        with load(name, options) as loaded:
            say("calibrate")
            calibration = _calibration(loaded, arguments.calibration, arguments.minutes)
            calibration.write(arguments.folder / "calibration.json")
            show(calibration)
            experiment = Experiment(
                loaded,
                calibration,
                list(trace_file(arguments.trace)),
                arguments.practice,
                arguments.loads,
                arguments.requests,
                arguments.folder,
            )
            figures: dict[str, Any] = {
                "shape": Path(name).name,
                "trace": arguments.trace.name,
                "engine": calibration.identity.engine,
                "practice": experiment.told,
                "calibration": calibration.report,
            }
            if arguments.settings:
                share = arguments.loads[0]
                figures["rank"] = experiment.settings(arguments.settings, share, arguments.folder)
            else:
                figures |= experiment.loads(arguments.loads, arguments.repeats, arguments.folder)
    if arguments.json is not None:
        write(arguments.json, record("twin", figures))
    tell(figures)


if __name__ == "__main__":
    main()
