"""Sizes of captured mixed steps: by a layer's parameters, and by what a step may have."""

from __future__ import annotations

import pytest

from forge.models.capture_sizes import (
    LARGE_CAPTURE_SIZES,
    MIXED_CAPTURE_SIZES,
    mixed_capture_sizes,
    usable_capture_sizes,
)

SIZES = (*MIXED_CAPTURE_SIZES, *LARGE_CAPTURE_SIZES)


@pytest.mark.parametrize(
    ("millions", "largest"),
    [(16, 8192), (25, 8192), (101, 2048), (193, 1152), (317, 640), (389, 640), (391, 512)],
)
def test_steps_are_captured_up_to_the_size_that_takes_longer_than_its_launches(
    millions: int, largest: int
):
    """These are the shapes of wiki/Graphs.md, and the ends of the range."""
    sizes = mixed_capture_sizes(millions * 10**6)
    assert sizes == [size for size in SIZES if size <= largest]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "largest"),
    [
        (2048, 40_960, 2048),
        (2049, 40_960, 2560),
        (256, 40_960, 256),
        (300, 40_960, 384),
        (16_384, 40_960, 8192),
        # Padding tokens fill at most one block table.
        (2048, 1000, 896),
        (300, 300, 256),
        # A padded step has at most twice the tokens of the largest.
        (9, 40_960, 16),
        (8, 40_960, 0),
    ],
)
def test_the_largest_size_is_the_first_with_room_for_the_largest_step(
    max_tokens: int, max_model_len: int, largest: int
):
    sizes = usable_capture_sizes(reversed(SIZES), max_tokens, max_model_len)
    assert sizes == [size for size in SIZES if size <= largest]
