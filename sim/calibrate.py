"""Calibrate: a named model is profiled where it is, and the tables that suit it are in a file.

Owns the order of the work, what is told of it, and the one real clock of the simulator: nothing
that a simulation runs imports this.

    load ──► time the host ──► profile the model ──► fit ──► check what was held out ──► file
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from forge import __version__
from forge.config import EngineConfig
from forge.models.load import Loaded, load
from sim.calibration import Calibration, Identity, Probed, code_digest, engine_numbers
from sim.clock import Cost
from sim.drift import Errors, Measured, baselines, errors_of, kind_of
from sim.fitting import (
    Known,
    Target,
    chunks_of,
    decode_of,
    launch_ns,
    probes_of,
    split,
    tables_of,
    target,
    usual_ns,
    whole_ns,
    whole_times,
)
from sim.host import HostSample, host_samples, middles
from sim.noise import Residuals, bins_of
from sim.profiling import Sample, profiled
from sim.roofline import GPUS, SHAPES, Roofline, roofline
from sim.squares import numeric
from sim.table import FS_PER_NS, Commit, Planning, Table, work_of
from sim.workload import drawn

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")
"""What a step's time can depend on, where it is installed."""

SECONDS = 600.0
HOST_SHARE = 0.05
"""Of the time: for the host."""

HOST_HELD = 86
"""Purpose of the draws that hold samples of the host out."""


def calibration_of(
    identity: Identity,
    samples: Sequence[Sample],
    host: tuple[Sequence[HostSample], Sequence[HostSample]],
    seed: int,
    left: int = 0,
) -> Calibration:
    """Tables that suit the samples, and how far off tables are that have not seen one in five.

    The report and the residuals are of tables fitted to four in five. Once they are known nothing
    is gained by not using the fifth: the tables that are kept are fitted to all.

    host   what planning took, and what committing took
    left   probes that there was no time for
    """
    fit, held = split(samples, seed)
    (plans, held_plans), (commits, held_commits) = (_split_host(each, seed) for each in host)
    tables = tables_of(fit, plans, commits)
    table = Table(tables)
    report = {
        "samples": len(samples),
        "held_out": len(held),
        "left_out": left,
        "steps": _by_kind(held, partial(_whole, table), whole_ns),
        "launches": _by_kind(held, lambda sample: table.launch_ns(sample.plan), launch_ns),
        "host": {
            "planning": _host_errors(tables.planning, held_plans),
            "commit": _host_errors(tables.commit, held_commits),
        },
        "baselines": _baselines(identity, fit, held),
    }
    whole = tables_of(samples, *host)
    probes = tuple(
        Probed(target.works[0], max(0, target.ns), target.whole_ns)
        for target in probes_of(samples, whole.launch)
    )
    return Calibration(identity, whole, _residuals(table, held), report, probes)


def practised(calibration: Calibration, served: Sequence[Measured]) -> Calibration:
    """The same with tables of steps that suit its probes and what an engine has served.

    Probes reach all that an engine may ask for; what it does ask for is told best by its own steps.
    A kind of step that there is none of keeps its table, and so do the host and the drafts.
    """
    known = Known(
        [Target((work,), ns, whole_ns) for work, ns, whole_ns in calibration.probes],
        [target(work_of(plan), ns) for plan, ns in served if plan.rows and not plan.drafts],
    )
    tables = calibration.tables
    decode, chunks = decode_of(known), chunks_of(known)
    if decode is not None:
        tables = tables._replace(decode=decode)
    if chunks is not None:
        mixed, recorded = chunks
        tables = tables._replace(mixed=mixed, recorded=recorded)
    return replace(calibration, tables=tables)


def calibrate(
    name: str,
    options: Mapping[str, Any],
    seed: int,
    seconds: float = SECONDS,
    now: Callable[[], int] = time.perf_counter_ns,
) -> Calibration:
    """The named model's, here and on the geometry that the options give. Raises InvalidConfig.

    seconds   that are spent at most once the model is loaded, but for the step under way
    """
    with load(name, options) as loaded:
        return calibrated(loaded, seed, seconds, now)


def calibrated(
    loaded: Loaded,
    seed: int,
    seconds: float = SECONDS,
    now: Callable[[], int] = time.perf_counter_ns,
) -> Calibration:
    """The loaded model's. Nobody else may use it meanwhile. Raises InvalidConfig."""
    budget_ns = round(seconds * 1e9)
    numeric()  # what is missing is said before minutes have been spent
    identity = identity_of(loaded)
    host = host_samples(loaded.config, now, round(budget_ns * HOST_SHARE))
    spent = round(budget_ns * (1 - HOST_SHARE))
    samples, left = profiled(loaded.model, loaded.config, now, seed, spent)
    found = calibration_of(identity, samples, host, seed, left)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return replace(found, report={"day": day, **found.report})


def identity_of(loaded: Loaded) -> Identity:
    """Of a model that is loaded, on this machine."""
    config: EngineConfig = loaded.config
    versions = {"forge": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch: Any = sys.modules.get("torch")  # loaded where a checkpoint is
    device = _processor()
    if torch is not None and loaded.device.startswith("cuda"):
        device = torch.cuda.get_device_name(loaded.device)
        versions["cuda"] = str(torch.version.cuda)
    dtype = config.cache_namespace.rpartition(" ")[2].removeprefix("torch.")
    name = Path(loaded.name).name if "/" in loaded.name else loaded.name
    return Identity(name, dtype, device, versions, code_digest(), engine_numbers(config))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# The report.


def _split_host(
    samples: Sequence[HostSample], seed: int
) -> tuple[list[HostSample], list[HostSample]]:
    fit: list[HostSample] = []
    held: list[HostSample] = []
    for place, sample in enumerate(middles(samples)):
        (held if drawn(seed, HOST_HELD, place) < 0.2 else fit).append(sample)
    return fit, held


def _host_errors(part: Planning | Commit, held: Sequence[HostSample]) -> dict[str, float]:
    pairs = ((part.fs(sample.work) // FS_PER_NS, max(1, sample.ns)) for sample in held)
    return errors_of(pairs)._asdict()


def _whole(table: Table, sample: Sample) -> int:
    """What `whole_times` should be."""
    return table.step_ns(sample.plan) + usual_ns(
        sample, table.tables.launch, table.tables.draft_launch
    )


def _by_kind(
    held: Sequence[Sample],
    predicted: Callable[[Sample], int],
    measured: Callable[[Sample], int],
) -> dict[str, dict[str, float]]:
    kinds = dict.fromkeys(sample.kind for sample in held)
    return {
        kind: errors_of(
            (predicted(sample), measured(sample)) for sample in held if sample.kind == kind
        )._asdict()
        for kind in kinds
    }


def measured_steps(samples: Sequence[Sample]) -> list[Measured]:
    """The samples without drafts, each with the middle one of its times."""
    return [Measured(sample.plan, whole_ns(sample)) for sample in samples if not sample.plan.drafts]


def _baselines(
    identity: Identity, fit: Sequence[Sample], held: Sequence[Sample]
) -> dict[str, dict[str, float]]:
    """What simpler models make of the same held-out steps."""
    known, unseen = measured_steps(fit), measured_steps(held)
    if not known or not unseen:
        return {}
    costs: dict[str, Cost] = {**baselines(known)}
    ceiling = roofline_like(identity)
    if ceiling is not None:
        costs["roofline"] = ceiling
    return {
        name: errors_of((cost.step_ns(plan), ns) for plan, ns in unseen)._asdict()
        for name, cost in costs.items()
    }


def roofline_like(identity: Identity) -> Roofline | None:
    """The roofline of this model and device, where both are known."""
    device, model = identity.device.lower(), identity.model.lower()
    gpus = [gpu for name, gpu in GPUS.items() if all(p in device for p in name.split("-"))]
    shapes = [shape for name, shape in SHAPES.items() if model.startswith(name)]
    return roofline(gpus[0], shapes[0]) if gpus and shapes else None


def _residuals(table: Table, held: Sequence[Sample]) -> Residuals:
    times: dict[str, list[tuple[int, int]]] = {"decode": [], "mixed": []}
    for sample in held:
        kind = "decode" if kind_of(sample.plan) == "decode" else "mixed"
        predicted = _whole(table, sample)
        times[kind] += [(predicted, ns) for ns in whole_times(sample)]
    return Residuals(bins_of(times["decode"]), bins_of(times["mixed"]))


def show(calibration: Calibration, say: Callable[[str], object] = print) -> None:
    """What was measured and how good the tables are, in lines."""
    identity, report = calibration.identity, calibration.report
    say(f"model       {identity.model} {identity.dtype}, {identity.device}")
    say(f"engine      {', '.join(f'{name} {n}' for name, n in identity.engine.items())}")
    left = f", no time for {report['left_out']}" if report["left_out"] else ""
    say(f"steps       {report['samples']} kinds, {report['held_out']} held out{left}")
    say(f"{'held out':<20}{'':>6}{'median':>11}{'p90':>11}{'bias':>11}")
    for group in ("steps", "launches", "host", "baselines"):
        for name, errors in report[group].items():
            say(f"{group:<10}{name:<10}{Errors(**errors)}")
    say(f"digest      {identity.digest}")


def main(
    name: str, options: Mapping[str, Any], path: str, seed: int, seconds: float = SECONDS
) -> int:
    """The calibration is in the file, and its report was printed. Raises InvalidConfig."""
    calibration = calibrate(name, options, seed, seconds)
    calibration.write(path)
    show(calibration)
    print(f"written     {path}")
    return 0
