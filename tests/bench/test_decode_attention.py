"""Lengths of the steps that `forge.bench.decode_attention` measures."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forge.bench.decode_attention import MIN_DRAWN_LEN, STEPS, Lengths

pytestmark = pytest.mark.torch


def test_padding_follows_rows_of_one_length():
    assert Lengths("padded", 3, 1000, 2).draw() == [1000, 1000, 1000, 1, 1]


@pytest.mark.parametrize("step", [each for each in STEPS if each.kind == "drawn"], ids=str)
def test_drawn_lengths_repeat_and_differ_within_bounds(step: Lengths):
    lengths = step.draw()
    assert lengths == step.draw() and len(lengths) == step.num_rows
    assert min(lengths) >= MIN_DRAWN_LEN and max(lengths) > 1.5 * step.mean
    assert abs(sum(lengths) / len(lengths) - step.mean) < 0.02 * step.mean
