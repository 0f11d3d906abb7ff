"""Step costs: a model's steps, timed through forge.seam before it serves, to choose draft lengths.

Owns the plans that are timed. Knows no device: a step takes from `forward` to `result`, as it does
for an engine. The engine then binds every slot again and starts at step 0.

    target     x x x x           one token a row; the next step is launched before this one is read
    verify     x d d  x d d      a token and drafts a row; each step is read before the next
    draft      verify, with plans of the draft model before it: time that each of them adds
    catch_up   x, with a plan that prefills the draft model before it: time that it adds
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, count
from statistics import median
from typing import NamedTuple

from forge.config import EngineConfig, Speculation, StepCosts
from forge.request import SamplingParams
from forge.seam import REJECTION, Bind, Model, Row, StepPlan

BATCH_SIZES = (1, 4, 16, 64, 256)
"""Rows of the timed steps, up to the engine's limit, which is timed too."""

NUM_DRAFTS = (1, 2, 3, 4)
"""Drafts of a row in timed steps, besides the most: time is not linear in tokens."""

CONTEXT_LEN = 256
"""Positions before a row, where the cache has room for them."""

CATCH_UP_LEN = 512
"""Tokens of the timed prefill of the draft model, where the cache has room for them."""

NUM_REPEATS, NUM_WARMUPS = 5, 2
MAX_MEASURE_S = 2.0
"""Time after which no larger batch is timed; costs beyond are extrapolated."""


class _PlanBuilder:
    """Builder of plans over the first `num_rows` slots.

    The contents of earlier positions are arbitrary.
    context_len       positions before each row
    blocks_per_slot   blocks of a slot, for as many drafts as its row may have
    """

    def __init__(
        self, config: EngineConfig, speculation: Speculation, num_rows: int, num_drafts: int
    ) -> None:
        self._config = config
        self._speculation = speculation
        self._num_rows = num_rows
        self._steps, self._draft_steps = count(-(2**40)), count(-(2**40))
        num_blocks = min(config.num_blocks, speculation.num_blocks or config.num_blocks) // num_rows
        num_positions = min(config.max_model_len, num_blocks * config.block_size)
        self.context_len = max(1, min(CONTEXT_LEN, num_positions - 1 - num_drafts))
        self.blocks_per_slot = -(-(self.context_len + 1 + num_drafts) // config.block_size)

    def bind_plan(self) -> StepPlan:
        """Return a plan that binds the slots, of both models if there are two."""
        return self._build_plan([self._bind_row(slot, False) for slot in range(self._num_rows)], 1)

    def decode_plan(self, num_drafts: int, num_draft_plans: int) -> StepPlan:
        """Return rows of a token and known drafts, after plans of the draft model."""
        drafts = (0,) * num_drafts
        rows = [
            Row(
                slot,
                0,
                slot,
                self.context_len,
                (0,),
                keep=self.blocks_per_slot,
                num_samples=1 + num_drafts,
                drafts=drafts,
            )
            for slot in range(self._num_rows)
        ]
        return self._build_plan(rows, num_draft_plans)

    def catch_up_plan(self, num_tokens: int) -> StepPlan:
        """Return a row of a token in the first slot, after a plan that prefills the draft model."""
        plan = self.decode_plan(0, 1)
        (draft,) = plan.drafts
        row = draft.rows[0]._replace(tokens=(0,) * num_tokens, num_samples=0)
        return plan._replace(rows=plan.rows[:1], drafts=(draft._replace(rows=(row,)),))

    def _bind_row(self, slot: int, proposes: bool) -> Row:
        acceptance = self._speculation.acceptance
        temperature = 1.0 if acceptance == REJECTION else 0.0
        bind = Bind(
            SamplingParams(temperature=temperature),
            slot,
            1,
            acceptance=acceptance,
            proposes=proposes,
        )
        blocks = tuple(range(slot * self.blocks_per_slot, (slot + 1) * self.blocks_per_slot))
        return Row(slot, 0, slot, 0, (0,), new_blocks=blocks, bind=bind)

    def _build_plan(self, rows: list[Row], num_draft_plans: int) -> StepPlan:
        size, blocks = self._config.block_size, self._config.num_blocks
        if self._speculation.method != "draft":
            num_draft_plans = 0
        binds = rows[0].bind is not None
        drafts = tuple(
            StepPlan(
                next(self._draft_steps),
                tuple(
                    self._bind_row(row.slot, True)
                    if binds
                    else row._replace(num_samples=1, drafts=())
                    for row in rows
                ),
                self._speculation.num_blocks or blocks,
                size,
            )
            for _ in range(num_draft_plans)
        )
        return StepPlan(next(self._steps), tuple(rows), blocks, size, drafts=drafts)


def measure_step_costs(model: Model, config: EngineConfig) -> StepCosts | None:
    """Return the times of the model's and the draft model's steps; None if no row can have drafts.

    Takes some tenths of a second on a GPU. Each batch size is timed with several numbers of drafts.
    """
    speculation = config.speculation
    assert speculation is not None, "speculation is off"
    max_drafts = min(speculation.num_tokens, config.num_blocks * config.block_size - 2)
    max_drafts = min(max_drafts, config.max_num_batched_tokens - 1, config.max_model_len - 2)
    if max_drafts < 1:
        return None
    max_rows = min(config.max_num_seqs, config.max_num_batched_tokens // (1 + max_drafts))
    target: list[tuple[int, float]] = []
    verify: list[tuple[int, float]] = []
    draft: list[tuple[int, float]] = []
    start_s = time.perf_counter()
    for num_rows in sorted({*(size for size in BATCH_SIZES if size < max_rows), max_rows}):
        plans = _PlanBuilder(config, speculation, num_rows, max_drafts)
        is_late = time.perf_counter() - start_s > MAX_MEASURE_S
        if target and (is_late or num_rows * plans.blocks_per_slot > config.num_blocks):
            break
        model.forward(plans.bind_plan()).result()
        target.append((num_rows, _overlapped_step_s(model, plans)))
        for num_drafts in sorted({min(few, max_drafts) for few in NUM_DRAFTS} | {max_drafts}):
            num_tokens = num_rows * (1 + num_drafts)
            verify_s = _sync_step_s(model, plans, num_drafts, 0)
            if not verify or num_tokens > verify[-1][0]:
                verify.append((num_tokens, verify_s))
        if speculation.method == "draft":
            round_s = _sync_step_s(model, plans, max_drafts, max_drafts)
            draft.append((num_rows, max(0.0, round_s - verify_s) / max_drafts))
    catch_up: tuple[tuple[int, float], ...] = ()
    if speculation.method == "draft":
        catch_up = _measure_catch_up(model, config, speculation)
    return StepCosts(_monotonic(target), _monotonic(draft), _monotonic(verify), catch_up=catch_up)


def _measure_catch_up(
    model: Model, config: EngineConfig, speculation: Speculation
) -> tuple[tuple[int, float], ...]:
    """Return times of the draft model's prefill at 0 and some tokens; () without room for one."""
    blocks = min(config.num_blocks, speculation.num_blocks or config.num_blocks)
    num_positions = min(config.max_model_len, blocks * config.block_size) - 2
    num_tokens = min(CATCH_UP_LEN, config.max_num_batched_tokens, num_positions)
    if num_tokens < 1:
        return ()
    plans = _PlanBuilder(config, speculation, 1, num_tokens)
    model.forward(plans.bind_plan()).result()
    round_s = _median_step_s(model, lambda: plans.catch_up_plan(num_tokens))
    return (0, 0.0), (num_tokens, max(0.0, round_s - _sync_step_s(model, plans, 0, 0)))


def _monotonic(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the points with times that never fall.

    A larger step that took less time was disturbed less.
    """
    max_s = accumulate((spent for _, spent in points), max)
    return tuple(zip((tokens for tokens, _ in points), max_s, strict=True))


def _sync_step_s(model: Model, plans: _PlanBuilder, num_drafts: int, num_draft_plans: int) -> float:
    """Return the median time of a step that is read before the next is launched, in seconds."""
    return _median_step_s(model, lambda: plans.decode_plan(num_drafts, num_draft_plans))


def _median_step_s(model: Model, create_plan: Callable[[], StepPlan]) -> float:
    """Return the median time from `forward` to `result`, in seconds."""
    times = []
    for _ in range(NUM_WARMUPS + NUM_REPEATS):
        start = time.perf_counter()
        model.forward(create_plan()).result()
        times.append(time.perf_counter() - start)
    return median(times[NUM_WARMUPS:])


def _overlapped_step_s(
    model: Model,
    plans: _PlanBuilder,
    num_drafts: int = 0,
    num_draft_plans: int = 0,
    repeats: int = NUM_REPEATS,
) -> float:
    """Return the mean time of steps launched before the previous one is read, in seconds."""
    pending = model.forward(plans.decode_plan(num_drafts, num_draft_plans))
    start = time.perf_counter()
    for _ in range(repeats):
        next_pending = model.forward(plans.decode_plan(num_drafts, num_draft_plans))
        pending.result()
        pending = next_pending
    pending.result()
    return (time.perf_counter() - start) / (repeats + 1)


class DeviceTimes(NamedTuple):
    """Times of the device in seconds, with the host's work hidden.

    step     a step of one token a row
    verify   a step of a token and k drafts a row
    draft    each of the k plans of the draft model; 0 without one
    """

    step: float
    verify: float
    draft: float


def measure_device_times(
    model: Model, config: EngineConfig, num_rows: int, num_drafts: int, repeats: int = 20
) -> DeviceTimes:
    """Return the device's times for `num_rows` rows with `num_drafts` drafts each."""
    speculation = config.speculation
    assert speculation is not None, "speculation is off"
    plans = _PlanBuilder(config, speculation, num_rows, num_drafts)
    model.forward(plans.bind_plan()).result()
    for num_plans in (num_drafts, 0):
        _overlapped_step_s(model, plans, num_drafts, num_plans, NUM_WARMUPS)
    verify = _overlapped_step_s(model, plans, num_drafts, 0, repeats)
    round_s = verify
    if speculation.method == "draft":
        round_s = _overlapped_step_s(model, plans, num_drafts, num_drafts, repeats)
    return DeviceTimes(
        _overlapped_step_s(model, plans, 0, 0, repeats), verify, (round_s - verify) / num_drafts
    )
