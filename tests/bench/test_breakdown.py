"""The plot of a breakdown shows the figures of its record."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge.bench import breakdown
from forge.errors import InvalidConfig

MODELS = Path(breakdown.__file__).resolve().parents[1] / "forge" / "models" / "hf"

CUDA_KERNEL = re.compile(
    r"__global__ void(?:[\s\\]+(?!__)[A-Z_]+\b(?!\()"
    r"|\s+__launch_bounds__\([^()]*(?:\([^()]*\))?[^()]*\))*"
    r"[\s\\]+(?!__)(\w+)\("
)
MACRO_KERNEL = re.compile(r"^[A-Z]+_KERNEL\((\w+),", re.MULTILINE)

with_matplotlib = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def device(attention: float, gemm: float, busy: float, window: float) -> dict[str, Any]:
    """Return a step of two groups of kernels, in us."""
    groups = dict.fromkeys((*(group for group, _ in breakdown.GROUPS), breakdown.OTHER), 0.0)
    groups |= {"attention": attention, "gemm": gemm}
    return {"device": {"groups_us": groups, "busy_us": busy, "window_us": window}}


RECORD: dict[str, Any] = {
    "benchmark": "breakdown",
    "figures": {
        "shape": "tiny",
        "b64": device(3000.0, 2000.0, 5000.0, 5500.0),
        "b1": device(1000.0, 2000.0, 2500.0, 2600.0),
    },
}


@with_matplotlib
@pytest.mark.filterwarnings("ignore")  # matplotlib's own, which change with its version
def test_the_parts_are_next_to_the_step_and_exceed_it_by_what_overlaps() -> None:
    """At one row 3,000 us of kernels keep the device busy for 2,500 of 2,600: 500 overlap."""
    (axes,) = breakdown.draw_breakdown([RECORD]).axes
    bars = {each.get_label(): [bar.get_height() for bar in each] for each in axes.containers}
    assert {name: pytest.approx(heights) for name, heights in bars.items()} == {
        "device busy": [2.5, 5.0],
        "device idle": [0.1, 0.5],
        "GEMMs": [2.0, 2.0],
        "attention": [1.0, 3.0],
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "64"]
    idle = next(each for each in axes.containers if each.get_label() == "device idle")
    assert [bar.get_y() + bar.get_height() for bar in idle] == pytest.approx([2.6, 5.5])


def test_every_group_of_kernels_is_in_the_picture() -> None:
    assert {*breakdown.PART_NAMES} == {group for group, _ in breakdown.GROUPS} | {breakdown.OTHER}
    assert {*breakdown.PART_NAMES.values()} < set(breakdown.PART_STYLES)


@with_matplotlib
@pytest.mark.filterwarnings("ignore")
def test_the_breakdown_of_records_is_a_picture(tmp_path: Path) -> None:
    record, picture = tmp_path / "record.json", tmp_path / "wiki" / "picture.png"
    record.write_text(json.dumps(RECORD))
    assert breakdown.run_cli(["--plot", str(picture), str(record), str(record)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "record",
    [
        {"benchmark": "step", "figures": {"engine": "forge", "shape": "tiny", "c1_tok_s": 3}},
        {"benchmark": "breakdown", "figures": {"shape": "tiny", "b1": {"step_ms_b1": 2.0}}},
    ],
    ids=["of another benchmark", "of the host only"],
)
def test_a_record_without_kernels_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="without kernels"):
        breakdown.device_figures(record)


def test_a_record_that_is_missing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    missing = str(tmp_path / "none.json")
    assert breakdown.run_cli(["--plot", str(tmp_path / "picture.png"), missing]) == 1
    assert capsys.readouterr().err.startswith("forge.bench.breakdown: ")


def test_every_cuda_kernel_of_forge_has_a_group() -> None:
    """A macro that defines kernels takes their name first, and calls it `name`."""
    sources = [path.read_text() for path in sorted(MODELS.rglob("*.cu"))]
    found = [name for source in sources for name in CUDA_KERNEL.findall(source)]
    assert len(found) == sum(source.count("__global__ void") for source in sources)
    kernels = [name for name in found if name != "name"]
    kernels += [name for source in sources for name in MACRO_KERNEL.findall(source)]
    assert {"decode_qkv", "sample", "reduce_packets", "gather_packets"} <= set(kernels)
    assert not [name for name in kernels if breakdown.kernel_group(name) == breakdown.OTHER]


def test_the_kernels_between_ranks_have_a_group_of_their_own() -> None:
    names = (
        "reduce_flagged_wide",
        "gather_packets",
        "ncclDevKernel_AllReduce_Sum",
        "two_shot_all_reduce",
    )
    assert {breakdown.kernel_group(name) for name in names} == {"ranks"}
