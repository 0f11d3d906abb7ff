"""OneShotAllReduce on two GPUs: exact sums of random calls, alone and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("triton")

from forge.bench.all_reduce import measure  # noqa: E402


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["packets", "flagged", "default", "graphs"])
def test_sums_of_two_gpus_are_exact_and_equal_on_both(part: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    figures: dict[str, Any] = measure(
        [f"check {part}"], num_ranks=2, hidden=2560, rows=[1], calls=500
    )
    assert figures["failures"] == []
    # Graphs draw how often they are replayed.
    assert figures[f"check {part}"]["calls"] >= (400 if part == "graphs" else 500)
    assert figures[f"check {part}"]["wrong"] == 0
