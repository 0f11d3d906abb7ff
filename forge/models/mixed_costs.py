"""Mixed step costs: steps of prompts and decodes, timed through forge.seam before a model serves.

Owns which plans are timed. Knows no device: a step takes from `forward` to `result`. The engine
then binds every slot again and starts at step 0.

    tokens        |ppppppppp|           a prompt in slot 0, by tokens, at both ends of each graph
    pair_ps       .....|ppppppppp|      the same tokens after other positions
    position_ns   ....|d  ....|d  ppp   decode rows after positions, against rows without them
"""

from __future__ import annotations

import time
from itertools import accumulate
from statistics import median

from forge.config import EngineConfig, MixedStepCosts
from forge.models.capture_sizes import LARGE_CAPTURE_SIZES, MIXED_CAPTURE_SIZES
from forge.models.probe_plans import ProbePlans
from forge.seam import Model

MAX_TIMED_TOKENS = 2049
"""Most tokens of a timed step: a graph of 2,048 ends. A larger step takes time in proportion."""

CHUNK_LEN, CONTEXT_LEN = 256, 2048
"""Tokens of the chunk, and positions before rows, of the steps that time attention."""

NUM_DECODES = 16
"""Decode rows of the steps that time their attention."""

NUM_REPEATS, NUM_WARMUPS = 5, 2


def measure_mixed_costs(model: Model, config: EngineConfig) -> MixedStepCosts:
    """Return the times of the model's steps. Takes some seconds on a GPU.

    Costs of attention are 0 where the cache has no room for the steps that time them.
    """
    max_tokens = min(
        config.max_num_batched_tokens,
        max(1, config.max_model_len - 1),
        config.num_blocks * config.block_size,
    )
    largest = min(max_tokens, MAX_TIMED_TOKENS)
    ends = (*MIXED_CAPTURE_SIZES, *LARGE_CAPTURE_SIZES)
    sizes = {largest, *(size for end in ends for size in (end, end + 1))}
    plans = ProbePlans(config, 1, max_tokens)
    model.forward(plans.bind_plan()).result()
    points = [
        (size, _median_step_us(model, plans, size, 0)) for size in sorted(sizes) if size <= largest
    ]
    # A larger step that took less time was disturbed less.
    times_us = accumulate((max(1, round(us)) for _, us in points), max)
    tokens = tuple(zip((size for size, _ in points), times_us, strict=True))
    return MixedStepCosts(tokens, *_measure_attention(model, config))


def _measure_attention(model: Model, config: EngineConfig) -> tuple[int, int]:
    """Return the times of a decode row's position in ns and of a query-key pair in ps."""
    plans = ProbePlans(config, 1 + NUM_DECODES, CONTEXT_LEN + CHUNK_LEN)
    if not plans.fits or config.max_num_batched_tokens < NUM_DECODES + CHUNK_LEN:
        return 0, 0
    model.forward(plans.bind_plan()).result()
    chunk_us = _median_step_us(model, plans, CHUNK_LEN, 0)
    later_chunk_us = _median_step_us(model, plans, CHUNK_LEN, CONTEXT_LEN)
    short_rows_us = _median_step_us(model, plans, CHUNK_LEN, 0, NUM_DECODES, 1)
    long_rows_us = _median_step_us(model, plans, CHUNK_LEN, 0, NUM_DECODES, CONTEXT_LEN)
    num_positions, num_pairs = NUM_DECODES * (CONTEXT_LEN - 1), CHUNK_LEN * CONTEXT_LEN
    return (
        max(0, round(1000 * (long_rows_us - short_rows_us) / num_positions)),
        max(0, round(10**6 * (later_chunk_us - chunk_us) / num_pairs)),
    )


def _median_step_us(
    model: Model,
    plans: ProbePlans,
    num_tokens: int,
    start: int,
    num_decodes: int = 0,
    context_len: int = 0,
) -> float:
    """Return the median time from `forward` to `result`, in microseconds."""
    times = []
    for _ in range(NUM_WARMUPS + NUM_REPEATS):
        plan = plans.step_plan(num_tokens, start, num_decodes, context_len)
        start_s = time.perf_counter()
        model.forward(plan).result()
        times.append(time.perf_counter() - start_s)
    return 1e6 * median(times[NUM_WARMUPS:])
