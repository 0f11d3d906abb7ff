"""Load costs: loads and prefills, timed through forge.seam before a model serves.

Owns which plans are timed, and the text that says what they took. Knows no device, and no file.

    load      |load 8| d |   |load 64| d |       the time that it adds to a step of one token:
                                                 a load is complete before the next step begins
    prefill   |ppppppppp|                        a chunk as long as a step may be
              ..............|ppppppppp|          the same one after four times as many tokens

A long prefix is computed in chunks, each of which also reads all keys before it. So the time of a
token in a chunk at the start is not enough: pairs of tokens grow with the square of the length.

Always true: sizes grow only while they are quick, so a slow device is measured with small ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

from forge.config import EngineConfig, LoadCosts
from forge.models.probe_plans import ProbePlans
from forge.seam import Model, StepPlan

CHUNK_LENS = (32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of timed chunks, up to the longest step of the engine."""

CONTEXT_RATIO = 4
"""Positions before the later chunk, as a multiple of its tokens, where the cache has room."""

NUM_LOADED = (1, 2, 4, 8, 16, 32, 64)
"""Blocks of timed loads."""

MAX_CHUNK_S, MAX_LOAD_S = 0.025, 0.01
"""Time after which no longer chunk and no larger load is tried."""

NUM_REPEATS, MAX_REPEATED_S = 3, 0.1
"""Most times that a size is timed for a median, and seconds after which it is not timed again."""

SHOWN_LEN = 8192
"""Tokens of the prefix whose times the log shows."""


def measure_load_costs(model: Model, config: EngineConfig) -> LoadCosts | None:
    """Return the times of the model's loads and prefills; None where nothing could be loaded.

    Takes some tenths of a second on a GPU. The model has executed a plan before.
    """
    tier = config.host_tier
    assert tier is not None, "there is no host pool"
    max_loaded = min(config.num_blocks - 1, tier.num_blocks)
    if max_loaded < 1 or config.max_model_len < 3:
        return None
    return LoadCosts(*_measure_loads(model, config, max_loaded), *_measure_prefill(model, config))


def describe_load_costs(config: EngineConfig) -> str:
    """Return a line with the measured times, and those of a long prefix from each tier."""
    tier = config.host_tier
    assert tier is not None and tier.costs is not None, "nothing was measured"
    costs, disk, size = tier.costs, tier.disk, config.block_size
    num_blocks = max(1, min(SHOWN_LEN, config.max_model_len) // size)
    num_tokens = num_blocks * size
    parts = [
        f"{_ms(costs.prefill_ns(0, num_tokens))} to compute",
        f"{_ms(costs.transfer_ns(num_blocks))} from host memory",
    ]
    per_block = f"{costs.load_block_ns / 1e3:.1f} us a block from host memory"
    if disk is not None:
        parts.append(f"{_ms(costs.transfer_ns(num_blocks, disk.fetch_block_ns))} from files")
        per_block += f", {disk.fetch_block_ns / 1e3:.1f} us more from a file"
    return (
        f"KV tiers: {costs.load_ns / 1e3:.1f} us a load, {per_block}; computing takes "
        f"{costs.token_ns / 1e3:.1f} us a token and {costs.pair_ps / 1e3:.2f} ns more for each "
        f"token before it. A prefix of {num_tokens} tokens takes {', '.join(parts)}: an idle "
        "engine takes the quickest"
    )


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"


def _measure_loads(model: Model, config: EngineConfig, max_blocks: int) -> tuple[int, int]:
    """Return nanoseconds of a load, and of each of its blocks."""
    plans = ProbePlans(config, 1, 1)
    model.forward(plans.bind_plan()).result()
    sizes = [size for size in NUM_LOADED if size <= max_blocks]
    # What was never stored may be any bits, and the device's blocks must stay finite numbers.
    model.forward(plans.store_plan(sizes[-1])).result()

    def seconds(num_blocks: int) -> float:
        return _seconds(model, plans.load_plan(num_blocks), plans.step_plan(1, 0))

    largest = _first_size_beyond(sizes, seconds, MAX_LOAD_S)
    small = max(1, largest // 8)
    step_s = _median_s(lambda: _seconds(model, plans.step_plan(1, 0)))
    small_s = _median_s(lambda: seconds(small)) - step_s
    largest_s = _median_s(lambda: seconds(largest)) - step_s
    # One block alone gives one number: all of it counts for the block.
    block_s = (largest_s - small_s) / (largest - small) if small < largest else largest_s
    block_s = max(0.0, block_s)
    return max(0, round(1e9 * (small_s - small * block_s))), round(1e9 * block_s)


def _measure_prefill(model: Model, config: EngineConfig) -> tuple[int, int]:
    """Return nanoseconds of a token, and picoseconds of a pair of tokens."""
    max_positions = min(config.num_blocks * config.block_size, config.max_model_len - 1)
    max_tokens = min(config.max_num_batched_tokens, max_positions)
    plans = ProbePlans(config, 1, max_positions)
    model.forward(plans.bind_plan()).result()

    def seconds(num_tokens: int, start: int = 0) -> float:
        return _seconds(model, plans.step_plan(num_tokens, start))

    sizes = [size for size in CHUNK_LENS if size < max_tokens] + [min(max_tokens, CHUNK_LENS[-1])]
    size = _first_size_beyond(sizes, seconds, MAX_CHUNK_S)
    chunk_s = _median_s(lambda: seconds(size))
    start = min(CONTEXT_RATIO * size, max_positions - size)
    pair_s = 0.0
    if start >= size:  # after fewer tokens the difference would be that of disturbances
        seconds(size, start)
        pair_s = (_median_s(lambda: seconds(size, start)) - chunk_s) / (size * start)
    num_pairs = size * (size + 1) / 2
    pair_s = min(max(0.0, pair_s), chunk_s / num_pairs)
    return round(1e9 * (chunk_s - num_pairs * pair_s) / size), round(1e12 * pair_s)


def _first_size_beyond(sizes: Iterable[int], seconds: Callable[[int], float], max_s: float) -> int:
    """Return the first of the ascending sizes that takes more than `max_s`, or the last one."""
    largest = 0
    for largest in sizes:
        seconds(largest)  # the first step of a size may allocate
        if seconds(largest) > max_s:
            break
    return largest


def _median_s(measure: Callable[[], float]) -> float:
    times: list[float] = []
    while len(times) < NUM_REPEATS and sum(times) < MAX_REPEATED_S:
        times.append(measure())
    return median(times)


def _seconds(model: Model, *plans: StepPlan) -> float:
    """Return the time from the first `forward` until the result of each plan is read."""
    start_s = time.perf_counter()
    for step in [model.forward(plan) for plan in plans]:
        step.result()
    return time.perf_counter() - start_s
