"""Mixed step costs: steps of prompts and decodes, timed through forge.seam before a model serves.

Owns the plans that are timed. Knows no device: a step takes from `forward` to `result`. The engine
then binds every slot again and starts at step 0.

    tokens        |ppppppppp|           a prompt in slot 0, by tokens, at both ends of each graph
    pair_ps       .....|ppppppppp|      the same tokens after other positions
    position_ns   ....|d  ....|d  ppp   decode rows after positions, against rows without them
"""

from __future__ import annotations

import time
from itertools import accumulate, count
from statistics import median

from forge.config import EngineConfig, MixedStepCosts
from forge.models.capture_sizes import LARGE_CAPTURE_SIZES, MIXED_CAPTURE_SIZES
from forge.request import SamplingParams
from forge.seam import Bind, Model, Row, StepPlan

MAX_TIMED_TOKENS = 2049
"""Most tokens of a timed step: a graph of 2,048 ends. A larger step takes time in proportion."""

CHUNK_LEN, CONTEXT_LEN = 256, 2048
"""Tokens of the chunk, and positions before rows, of the steps that time attention."""

NUM_DECODES = 16
"""Decode rows of the steps that time their attention."""

NUM_REPEATS, NUM_WARMUPS = 5, 2


class _PlanBuilder:
    """Builder of plans over slots with `blocks_per_slot` blocks each, of arbitrary contents."""

    def __init__(self, config: EngineConfig, num_slots: int, slot_len: int) -> None:
        self._config = config
        self._slot_len = slot_len
        self.blocks_per_slot = -(-slot_len // config.block_size)
        self._num_slots = num_slots
        self._steps = count(-(2**40))

    @property
    def fits(self) -> bool:
        """True where the cache, the batch and the longest sequence have room for the slots."""
        config = self._config
        return (
            self._num_slots * self.blocks_per_slot <= config.num_blocks
            and self._num_slots <= config.max_num_seqs
            and self._slot_len < config.max_model_len
        )

    def bind_plan(self) -> StepPlan:
        """Return a plan that binds every slot and gives it its blocks."""
        rows = []
        for slot in range(self._num_slots):
            first = slot * self.blocks_per_slot
            blocks = tuple(range(first, first + self.blocks_per_slot))
            bind = Bind(SamplingParams(temperature=0.0), slot, 1)
            rows.append(Row(slot, 0, slot, 0, (0,), new_blocks=blocks, bind=bind))
        return self._build_plan(rows)

    def step_plan(
        self, num_tokens: int, start: int, num_decodes: int = 0, context_len: int = 0
    ) -> StepPlan:
        """Return decode rows after `context_len` positions, and a chunk after `start` of them.

        The chunk has the first slot.
        """
        keep = self.blocks_per_slot
        rows = [
            Row(slot, 0, slot, context_len, (0,), keep=keep, num_samples=1)
            for slot in range(1, 1 + num_decodes)
        ]
        chunk = Row(0, 0, 0, start, (0,) * num_tokens, keep=keep, num_samples=1)
        return self._build_plan([*rows, chunk])

    def _build_plan(self, rows: list[Row]) -> StepPlan:
        config = self._config
        return StepPlan(next(self._steps), tuple(rows), config.num_blocks, config.block_size)


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
    plans = _PlanBuilder(config, 1, max_tokens)
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
    plans = _PlanBuilder(config, 1 + NUM_DECODES, CONTEXT_LEN + CHUNK_LEN)
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
    plans: _PlanBuilder,
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
