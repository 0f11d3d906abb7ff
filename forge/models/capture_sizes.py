"""Sizes of steps that are captured as CUDA graphs, and the limits of what a captured step may hold.

Owns the numbers. Imports no torch: the simulator's cost model uses them too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

MIXED_CAPTURE_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Tokens of captured steps that hold prompts or chunks of them, for every model."""

LARGE_CAPTURE_SIZES = (
    *(640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048),
    *(2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
)
"""Tokens of further captured steps, for models whose layers are small: `mixed_capture_sizes`."""

LAUNCH_BOUND_WEIGHTS = 20 * 10**10
"""Tokens x parameters of a layer up to which launching a layer takes longer than computing it.

Measured on an H200: 0.4 to 0.7 ms to launch a layer's kernels, 540 TFLOP/s: wiki/Graphs.md.
"""

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
"""Most rows of a captured step whose rows all use FA2."""

MAX_MIXED_TOKENS = 1024
"""Most tokens of a captured step whose rows all use FA2."""

MAX_GRAPH_PREFILL_ROWS = 4
"""Most rows of more than one token in a captured step of MIXED_CAPTURE_SIZES that uses FA3."""

LARGE_GRAPH_ROW_TOKENS = 64
"""Tokens of a captured step of LARGE_CAPTURE_SIZES for each longer row that it has room for."""

NO_CONTEXT_MAX_TOKENS = 128
"""Tokens of a captured step up to which FA3 takes longer rows only if all start at position 0."""

SPLIT_DECODE_ABOVE_TOKENS = 64
"""Tokens of a captured step above which rows of one token use the decode kernel."""


def mixed_capture_sizes(layer_weights: int) -> list[int]:
    """Return the tokens of captured steps that hold prompts.

    layer_weights   parameters of a layer
    The largest size is the first that a layer computes for longer than its launches take: a larger
    step gains nothing from a graph, and padding costs it.
    """
    largest = LAUNCH_BOUND_WEIGHTS // layer_weights
    num_large = (
        bisect_left(LARGE_CAPTURE_SIZES, largest) + 1 if largest > MIXED_CAPTURE_SIZES[-1] else 0
    )
    return [*MIXED_CAPTURE_SIZES, *LARGE_CAPTURE_SIZES[:num_large]]


def usable_capture_sizes(
    sizes: Iterable[int], max_num_batched_tokens: int, max_model_len: int
) -> list[int]:
    """Return the sizes that a step may replay, ascending.

    The last is the first with room for the largest step. Padding at most doubles a step, and
    padding tokens have to fit into one block table.
    """
    limit = min(2 * max_num_batched_tokens - 1, max_model_len)
    fitting = sorted(size for size in sizes if size <= limit)
    return fitting[: bisect_left(fitting, max_num_batched_tokens) + 1]


def max_graph_prefill_rows(num_tokens: int) -> int:
    """Return the most rows of more than one token in a captured step that uses FA3."""
    if num_tokens <= MIXED_CAPTURE_SIZES[-1]:
        return MAX_GRAPH_PREFILL_ROWS
    return num_tokens // LARGE_GRAPH_ROW_TOKENS


def decode_capture_sizes(max_rows: int) -> list[int]:
    """Return the rows of captured decode steps: 1, 2, 4, 8, by 8 up to 128, then by 16.

    `max_rows` is always one of them, and the largest.
    """
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, max_rows, 16), max_rows}
    return sorted(size for size in sizes if size <= max_rows)
