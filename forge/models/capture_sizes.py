"""Sizes of steps that are captured as CUDA graphs, and the limits of what a captured step may hold.

Owns the numbers. Imports no torch: the simulator's cost model uses them too.
"""

from __future__ import annotations

MIXED_CAPTURE_SIZES = (16, 32, 64, 128, 256, 512)
"""Tokens of captured steps that hold prompts or chunks of them."""

VERIFY_CAPTURE_SIZES = tuple(
    sorted(
        {*MIXED_CAPTURE_SIZES, 2, 4, 24, 48, 96, 160, 192, 224, 320, 384, 448, 576, 640, 768, 1024}
    )
)
"""Tokens of captured steps of a target whose rows have drafts.

Finer than MIXED_CAPTURE_SIZES, because every verification is such a step: 64 rows of 5 tokens,
padded to 512, would take half as long again. Steps of up to 16 tokens have GEMMs of their own.
"""

MAX_MIXED_ROWS = 128
"""Most rows of a captured step that holds prompts."""

MAX_GRAPH_PREFILL_ROWS = 4
"""Most rows of more than one token in a captured step whose prompts use FA3."""

NO_CONTEXT_MAX_TOKENS = 128
"""Tokens of a captured step up to which FA3 takes longer rows only if all start at position 0."""

SPLIT_DECODE_ABOVE_TOKENS = 64
"""Tokens of a captured step above which rows of one token use the decode kernel."""


def decode_capture_sizes(max_rows: int) -> list[int]:
    """Return the rows of captured decode steps: 1, 2, 4, 8, by 8 up to 128, then by 16.

    `max_rows` is always one of them, and the largest.
    """
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, max_rows, 16), max_rows}
    return sorted(size for size in sizes if size <= max_rows)
