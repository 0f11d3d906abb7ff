"""Calibrate: profile a model on this machine and write cost tables to a file.

Owns the order of the work, its report, and the real clock: no simulation imports this module.

    load ──► time the host ──► profile the model ──► fit ──► check held-out samples ──► file
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
from forge.models.loaded_model import LoadedModel
from forge.models.loader import load_model
from forge.sim.calibration.cost_error import (
    MeasuredStep,
    RelativeErrors,
    fit_baselines,
    step_kind,
    summarize_errors,
)
from forge.sim.calibration.fitting import (
    FitTarget,
    FitTargets,
    create_probe_targets,
    create_target,
    exposed_launch_ns,
    fit_chunks,
    fit_decode,
    fit_tables,
    median_launch_ns,
    median_total_ns,
    split_holdout,
    total_times_ns,
)
from forge.sim.calibration.host_times import HostSample, measure_host, median_samples
from forge.sim.calibration.nnls import import_numpy
from forge.sim.calibration.profiling import StepSample, profile
from forge.sim.cost.calibration_file import (
    Calibration,
    Identity,
    ProbeTime,
    model_code_digest,
    select_engine_settings,
)
from forge.sim.cost.model import CostModel
from forge.sim.cost.noise import Residuals, create_bins
from forge.sim.cost.roofline import GPUS, MODEL_SHAPES, RooflineCost, create_roofline
from forge.sim.cost.table import CommitCost, PlanningCost, TableCost, extract_features
from forge.sim.draws import HOST_HOLDOUT_DRAW, draw_uniform
from forge.sim.units import FS_PER_NS

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")
"""Packages that step times can depend on."""

DEFAULT_BUDGET_S = 600.0
HOST_SHARE = 0.05
"""Share of the time budget for the host."""


def fit_calibration(
    identity: Identity,
    samples: Sequence[StepSample],
    host: tuple[Sequence[HostSample], Sequence[HostSample]],
    seed: int,
    num_skipped: int = 0,
) -> Calibration:
    """Return tables fitted to the samples, and their errors on held-out samples.

    Report and residuals are those of tables fitted to four samples in five. The tables that are
    kept are fitted to all samples: once the errors are known, the held-out ones need not be left
    out.

    host          samples of planning, and of committing
    num_skipped   probes that were left out for lack of time
    """
    fit, holdout = split_holdout(samples, seed)
    (plans, holdout_plans), (commits, holdout_commits) = (
        _split_host_samples(each, seed) for each in host
    )
    tables = fit_tables(fit, plans, commits)
    table = TableCost(tables)
    report = {
        "samples": len(samples),
        "held_out": len(holdout),
        "left_out": num_skipped,
        "steps": _errors_by_kind(holdout, partial(_predict_total_ns, table), median_total_ns),
        "launches": _errors_by_kind(
            holdout, lambda sample: table.launch_ns(sample.plan), median_launch_ns
        ),
        "host": {
            "planning": _host_errors(tables.planning, holdout_plans),
            "commit": _host_errors(tables.commit, holdout_commits),
        },
        "baselines": _baseline_errors(identity, fit, holdout),
    }
    all_tables = fit_tables(samples, *host)
    probes = tuple(
        ProbeTime(target.works[0], max(0, target.ns), target.whole_ns)
        for target in create_probe_targets(samples, all_tables.launch)
    )
    return Calibration(identity, all_tables, _create_residuals(table, holdout), report, probes)


def refit_with_served_steps(
    calibration: Calibration, served: Sequence[MeasuredStep]
) -> Calibration:
    """Return the calibration with step tables refitted to its probes and to served steps.

    Probes cover all steps that an engine may run; served steps are those that it does run. A kind
    of step without samples keeps its table, and so do the host and the drafts.
    """
    targets = FitTargets(
        [FitTarget((work,), ns, whole_ns) for work, ns, whole_ns in calibration.probes],
        [
            create_target(extract_features(plan), ns)
            for plan, ns in served
            if plan.rows and not plan.drafts
        ],
    )
    tables = calibration.tables
    decode, chunks = fit_decode(targets), fit_chunks(targets)
    if decode is not None:
        tables = tables._replace(decode=decode)
    if chunks is not None:
        mixed, captured = chunks
        tables = tables._replace(mixed=mixed, recorded=captured)
    return replace(calibration, tables=tables)


def calibrate(
    name: str,
    options: Mapping[str, Any],
    seed: int,
    seconds: float = DEFAULT_BUDGET_S,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Calibration:
    """Load the model and calibrate it here, on the geometry of the options. Raises InvalidConfig.

    seconds   limit after the model is loaded; a step in progress may exceed it
    """
    with load_model(name, options) as loaded:
        return calibrate_loaded(loaded, seed, seconds, clock)


def calibrate_loaded(
    loaded: LoadedModel,
    seed: int,
    seconds: float = DEFAULT_BUDGET_S,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Calibration:
    """Calibrate a loaded model, which must not be in use. Raises InvalidConfig."""
    budget_ns = round(seconds * 1e9)
    import_numpy()  # a missing package is reported before minutes of measurement
    identity = create_identity(loaded)
    host = measure_host(loaded.config, clock, round(budget_ns * HOST_SHARE))
    profile_budget_ns = round(budget_ns * (1 - HOST_SHARE))
    samples, num_skipped = profile(loaded.model, loaded.config, clock, seed, profile_budget_ns)
    calibration = fit_calibration(identity, samples, host, seed, num_skipped)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return replace(calibration, report={"day": day, **calibration.report})


def create_identity(loaded: LoadedModel) -> Identity:
    """Return the identity of a loaded model on this machine."""
    config: EngineConfig = loaded.config
    versions = {"forge": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch: Any = sys.modules.get("torch")  # imported if the model is a checkpoint
    device = _cpu_name()
    if torch is not None and loaded.device.startswith("cuda"):
        device = torch.cuda.get_device_name(loaded.device)
        versions["cuda"] = str(torch.version.cuda)
    dtype = config.cache_namespace.rpartition(" ")[2].removeprefix("torch.")
    name = Path(loaded.name).name if "/" in loaded.name else loaded.name
    return Identity(
        name, dtype, device, versions, model_code_digest(), select_engine_settings(config)
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# The report.


def _split_host_samples(
    samples: Sequence[HostSample], seed: int
) -> tuple[list[HostSample], list[HostSample]]:
    fit: list[HostSample] = []
    holdout: list[HostSample] = []
    for index, sample in enumerate(median_samples(samples)):
        (holdout if draw_uniform(seed, HOST_HOLDOUT_DRAW, index) < 0.2 else fit).append(sample)
    return fit, holdout


def _host_errors(
    cost: PlanningCost | CommitCost, holdout: Sequence[HostSample]
) -> dict[str, float]:
    pairs = ((cost.cost_fs(sample.work) // FS_PER_NS, max(1, sample.ns)) for sample in holdout)
    return summarize_errors(pairs)._asdict()


def _predict_total_ns(table: TableCost, sample: StepSample) -> int:
    """Return the prediction of `median_total_ns`."""
    return table.step_ns(sample.plan) + exposed_launch_ns(
        sample, table.tables.launch, table.tables.draft_launch
    )


def _errors_by_kind(
    holdout: Sequence[StepSample],
    predicted: Callable[[StepSample], int],
    measured: Callable[[StepSample], int],
) -> dict[str, dict[str, float]]:
    kinds = dict.fromkeys(sample.kind for sample in holdout)
    return {
        kind: summarize_errors(
            (predicted(sample), measured(sample)) for sample in holdout if sample.kind == kind
        )._asdict()
        for kind in kinds
    }


def measured_steps(samples: Sequence[StepSample]) -> list[MeasuredStep]:
    """Return the samples without drafts, each with the median of its times."""
    return [
        MeasuredStep(sample.plan, median_total_ns(sample))
        for sample in samples
        if not sample.plan.drafts
    ]


def _baseline_errors(
    identity: Identity, fit: Sequence[StepSample], holdout: Sequence[StepSample]
) -> dict[str, dict[str, float]]:
    """Return the errors of simpler models on the same held-out steps."""
    fitted, holdout_steps = measured_steps(fit), measured_steps(holdout)
    if not fitted or not holdout_steps:
        return {}
    costs: dict[str, CostModel] = {**fit_baselines(fitted)}
    roofline_cost = find_roofline(identity)
    if roofline_cost is not None:
        costs["roofline"] = roofline_cost
    return {
        name: summarize_errors((cost.step_ns(plan), ns) for plan, ns in holdout_steps)._asdict()
        for name, cost in costs.items()
    }


def find_roofline(identity: Identity) -> RooflineCost | None:
    """Return the roofline of this model and device, or None where one of them is unknown."""
    device, model = identity.device.lower(), identity.model.lower()
    gpus = [gpu for name, gpu in GPUS.items() if all(p in device for p in name.split("-"))]
    shapes = [shape for name, shape in MODEL_SHAPES.items() if model.startswith(name)]
    return create_roofline(gpus[0], shapes[0]) if gpus and shapes else None


def _create_residuals(table: TableCost, holdout: Sequence[StepSample]) -> Residuals:
    times: dict[str, list[tuple[int, int]]] = {"decode": [], "mixed": []}
    for sample in holdout:
        kind = "decode" if step_kind(sample.plan) == "decode" else "mixed"
        predicted = _predict_total_ns(table, sample)
        times[kind] += [(predicted, ns) for ns in total_times_ns(sample)]
    return Residuals(create_bins(times["decode"]), create_bins(times["mixed"]))


def print_report(calibration: Calibration, write_line: Callable[[str], object] = print) -> None:
    """Write what was measured and the errors of the tables, as lines."""
    identity, report = calibration.identity, calibration.report
    write_line(f"model       {identity.model} {identity.dtype}, {identity.device}")
    write_line(f"engine      {', '.join(f'{name} {n}' for name, n in identity.engine.items())}")
    skipped = f", no time for {report['left_out']}" if report["left_out"] else ""
    write_line(f"steps       {report['samples']} kinds, {report['held_out']} held out{skipped}")
    write_line(f"{'held out':<20}{'':>6}{'median':>11}{'p90':>11}{'bias':>11}")
    for group in ("steps", "launches", "host", "baselines"):
        for name, errors in report[group].items():
            write_line(f"{group:<10}{name:<10}{RelativeErrors(**errors)}")
    write_line(f"digest      {identity.digest}")


def main(
    name: str, options: Mapping[str, Any], path: str, seed: int, seconds: float = DEFAULT_BUDGET_S
) -> int:
    """Calibrate, write the file and print the report. Raises InvalidConfig."""
    calibration = calibrate(name, options, seed, seconds)
    calibration.write(path)
    print_report(calibration)
    print(f"written     {path}")
    return 0
