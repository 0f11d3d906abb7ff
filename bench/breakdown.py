"""Step breakdown: groups of kernels, the idle share of the device, and the share of the host.

Owns the figures of `forge bench step --profile` and the table that sorts kernels into groups. They
come from a trace of torch.profiler over steady decode steps. A device without one has the figures
of the host only.

    measure_kernels   [gemm][ attention ][gemm] [sampling] may overlap: a kernel can start early
    busy              [=======================] [========] the union of them
    idle              the rest of the window

    python -m forge.bench.breakdown --plot PICTURE RECORD...    bars of the groups, a panel each
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.bench.engine_driver import EngineDriver, check_num_rows, defaults, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.step import measure_steady
from forge.bench.workload import Cells, draw_prompts, print_result, prompt_id_range
from forge.engine_options import Options
from forge.errors import ForgeError, InvalidConfig

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ranks", ("reduce_packets", "reduce_flagged", "gather_packets", "nccl", "_all_reduce")),
    (
        "attention",
        (
            *("mha", "xqa", "batchprefill", "batchdecode", "mergestate", "flash", "attention"),
            *("decode_qkv", "decode_queries"),
        ),
    ),
    (
        "sampling",
        (
            *("draw", "score_tile", "_pick", "sampl", "adjust", "logprobs"),
            *("argmax", "softmax", "topk", "sort"),
        ),
    ),
    ("copies", ("memcpy", "memset", "direct_copy", "catarray")),
    (
        "gemm",
        (
            *("linear", "gate_up", "block_sums", "row_sums"),
            *("gemm", "nvjet", "cutlass", "gemv", "splitk", "cublas"),
        ),
    ),
    (
        "norm, rope, elementwise",
        (
            *("norm", "rope", "silu", "elementwise", "reduce"),
            *("gather", "scatter", "index", "embedding", "fill"),
        ),
    ),
)
"""Group -> parts of kernel names, in lower case. The first group with a match takes a kernel."""

OTHER = "other"
PART_NAMES = {
    "gemm": "GEMMs",
    "attention": "attention",
    "norm, rope, elementwise": "norms, rotation, inputs",
    "sampling": "draw",
    "copies": "copies",
    "ranks": "between ranks",
    OTHER: "other",
}
"""Group -> its name in the picture, in the order of the bar, from below."""

PART_STYLES = {
    "device busy": ("0.45", ""),
    "device idle": ("0.8", "xx"),
    "GEMMs": ("#0072B2", ""),
    "attention": ("#E69F00", "//"),
    "norms, rotation, inputs": ("#009E73", ".."),
    "draw": ("#CC79A7", ""),
    "copies": ("#56B4E9", ""),
    "between ranks": ("#D55E00", "\\\\"),
    "other": ("#000000", ""),
}
"""Name -> colour of Okabe and Ito, and hatch."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of trace events that occupy the device."""

STEPS = 20


def kernel_group(kernel: str) -> str:
    """Return the group of a kernel with this name."""
    lowered = kernel.lower()
    for group, substrings in GROUPS:
        if any(piece in lowered for piece in substrings):
            return group
    return OTHER


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def trace_figures(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Return figures per step of a trace of `steps` steps, in us.

    events     trace events in Chrome's format: cat, name, ts and dur in us
    busy_us    time with any kernel running; groups add up to more where kernels overlap
    window_us  from the start of the first kernel to the end of the last one
    launches   calls that put work on the device; a graph is one
    """
    complete_events = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete_events if event.get("cat") in ON_DEVICE]
    groups = dict.fromkeys((*(group for group, _ in GROUPS), OTHER), 0.0)
    by_name: dict[str, float] = {}
    for event in kernels:
        groups[kernel_group(event["name"])] += event["dur"] / steps
        by_name[event["name"]] = by_name.get(event["name"], 0.0) + event["dur"] / steps
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in kernels]
    window = max((end for _, end in spans), default=0.0) - min((at for at, _ in spans), default=0.0)
    busy = union_length(spans)
    calls = [
        event for event in complete_events if event.get("cat") in ("cuda_runtime", "cuda_driver")
    ]
    return {
        "groups_us": {group: round(us, 2) for group, us in groups.items()},
        "busy_us": round(busy / steps, 2),
        "window_us": round(window / steps, 2),
        "idle_share": round(1 - busy / window, 4) if window else None,
        "kernels": round(len(kernels) / steps, 1),
        "launches": round(sum("Launch" in call["name"] for call in calls) / steps, 1),
        "longest_us": {
            name[:120]: round(us, 2)
            for name, us in sorted(by_name.items(), key=lambda item: -item[1])[:12]
        },
    }


def cuda_torch() -> Any | None:
    """Return torch if it is imported and uses a CUDA device, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


@contextmanager
def trace_kernels(torch: Any) -> Iterator[list[dict[str, Any]]]:
    """Trace the steps that run in the context. The yielded list holds their events at its end.

    The device is idle at both ends, so exactly these steps are in the trace.
    """
    from torch.profiler import ProfilerActivity, profile

    events: list[dict[str, Any]] = []
    # Keep the tracer loaded between two traces: loading it again with captured graphs can crash.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield events
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events += json.loads(path.read_text())["traceEvents"]


def measure_kernels(drive: EngineDriver, batch: int, cells: Cells, torch: Any) -> dict[str, Any]:
    """Return the figures of the device for a step at one batch size."""
    ids = prompt_id_range(drive.engine.model.vocab_size())
    length = cells.steady.context
    prompts = draw_prompts(random.Random(cells.seed), batch, (length, length), ids)
    with drive.steady_decode(prompts) as timer:
        with trace_kernels(torch):  # the first trace of a process starts slowly
            drive.step()
        with trace_kernels(torch) as events:
            for _ in range(STEPS):
                drive.step()
        check_num_rows([timer.num_rows], batch)
    return trace_figures(events, STEPS)


def measure(drive: EngineDriver, batches: Sequence[int], cells: Cells) -> dict[str, Any]:
    """Return step and host time without a profiler, and kernels with one, for each batch size."""
    figures: dict[str, Any] = {}
    torch = cuda_torch()
    for batch in batches:
        figures[f"b{batch}"] = measure_steady(drive, batch, cells)
        if torch is not None:
            figures[f"b{batch}"]["device"] = measure_kernels(drive, batch, cells, torch)
    return figures


def show(figures: Mapping[str, Any], batch: int) -> None:
    """Print the figures of one batch size as a table."""
    step_us = figures[f"step_ms_b{batch}"] * 1e3
    print(f"\nB={batch}: step {step_us:,.1f} us, median, no profiler")
    print(
        f"  host {figures[f'host_us_b{batch}']:,.1f} us, "
        f"of it forward {figures[f'forward_us_b{batch}']:,.1f} us"
    )
    device = figures.get("device")
    if device is None:
        print("  no CUDA device is used: the figures are those of the host only")
        return
    idle = "unknown" if device["idle_share"] is None else f"{device['idle_share']:.1%}"
    print(
        f"  profiled: busy {device['busy_us']:,.1f} us of {device['window_us']:,.1f}, idle {idle}"
    )
    print(f"  {device['kernels']} kernels and {device['launches']} launches a step")
    total = sum(device["groups_us"].values()) or 1.0
    for group, us in device["groups_us"].items():
        print(f"  {group:<26}{us:>10,.1f} us{us / total:>8.1%}")
    for name, us in device["longest_us"].items():
        print(f"    {us:>10,.1f} us  {kernel_group(name):<24}  {name[:80]}")


def main(
    model: str,
    json_path: str | None,
    batches: Sequence[int] = (1, 64),
    options: Options | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure, print, and write the record to `json_path`."""
    cells = cells or Cells.read()
    cells = cells._replace(steady=cells.steady._replace(batches=tuple(batches)))
    with open_llm(model, {**defaults(model, cells), **(options or Options())}) as (llm, shape, _):
        figures = measure(EngineDriver(llm.engine), batches, cells)
    for batch in batches:
        show(figures[f"b{batch}"], batch)
    print_result({"engine": "forge", "shape": shape, "breakdown": figures})
    if json_path is not None:
        write_json(json_path, create_result("breakdown", {"shape": shape, **figures}))
    return 0


# The plot


def device_figures(result: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return batch size -> figures of the device, sorted.

    Raises InvalidConfig where there are none.
    """
    figures = result["figures"] if result["benchmark"] == "breakdown" else {}
    sizes = sorted(int(name[1:]) for name, each in figures.items() if "device" in each)
    if not sizes:
        raise InvalidConfig(
            "plot",
            f"a record of {result['benchmark']!r} without kernels",
            "Name one of forge bench step MODEL --profile on a GPU",
        )
    return {size: figures[f"b{size}"]["device"] for size in sizes}


def draw_breakdown(results: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure with a panel for each record. Raises InvalidConfig."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise InvalidConfig(
            "plot", f"{missing.name} is not installed", "pip install matplotlib"
        ) from None
    steps = [device_figures(each) for each in results]
    shares = {"width_ratios": [len(step) for step in steps]}
    with rc_context({"font.size": 12, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        row: Any = figure.subplots(1, len(results), sharey=True, squeeze=False, gridspec_kw=shares)[
            0
        ]
        for axes, each, step in zip(row, results, steps, strict=True):
            draw_step_panel(axes, step)
            axes.set(xlabel="rows of the step", title=each["figures"]["shape"])
        row[0].set_ylabel("ms of a profiled step")
        handles, names = row[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=4)
    return figure


def draw_step_panel(axes: Any, step: Mapping[int, Mapping[str, Any]]) -> None:
    """Draw two bars for each batch size: the step, busy and idle, and its groups of kernels.

    Overlapping kernels count twice, so the second bar may be higher than the first.
    """
    devices, positions = list(step.values()), range(len(step))
    busy = [device["busy_us"] for device in devices]
    idle = [device["window_us"] - device["busy_us"] for device in devices]
    parts = {
        name: [device["groups_us"].get(group, 0.0) for device in devices]
        for group, name in PART_NAMES.items()
    }
    draw_stack(axes, [at - 0.2 for at in positions], {"device busy": busy, "device idle": idle})
    draw_stack(axes, [at + 0.2 for at in positions], parts)
    axes.set_xticks(positions, map(str, step))
    axes.grid(axis="y", alpha=0.3)


def draw_stack(axes: Any, positions: Sequence[float], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw bars of parts in us above each other. A part that is zero everywhere is left out."""
    bottoms = [0.0] * len(positions)
    for name, us in parts.items():
        if not any(us):
            continue
        heights = [each / 1e3 for each in us]
        colour, hatch = PART_STYLES[name]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.bar(positions, heights, 0.38, bottom=bottoms, label=name, **style)
        bottoms = [under + height for under, height in zip(bottoms, heights, strict=True)]


def write_breakdown_plot(paths: Sequence[Path], picture: Path) -> None:
    """Write the plot of the records to `picture`. Raises InvalidConfig."""
    figure = draw_breakdown([json.loads(path.read_text()) for path in paths])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns 1 on refusal."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.breakdown",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plot", type=Path, metavar="PICTURE", required=True)
    parser.add_argument("records", type=Path, metavar="RECORD", nargs="+")
    args = parser.parse_args(words)
    try:
        write_breakdown_plot(args.records, args.plot)
    except (ForgeError, OSError) as error:
        print(f"forge.bench.breakdown: {error}", file=sys.stderr)
        return 1
    print(args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
