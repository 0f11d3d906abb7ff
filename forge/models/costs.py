"""What steps cost: timed through the seam before a model serves, so that drafts can be weighed.

Owns the plans that are timed. Knows no device: a step takes from `forward` to `result`, as it does
for an engine. Whoever serves then binds every slot anew and begins at step 0.

    target   x x x x           one token a row; each step is launched before the last is waited for
    verify   x d d  x d d      a token and drafts; each step is waited for
    draft    the same behind plans for the draft model: what each of them adds
    told     x behind a plan of a text for the draft model: what that adds
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

SIZES = (1, 4, 16, 64, 256)
"""Rows of the steps that are timed, as far as the engine has them, and as many as it has."""

FEW = (1, 2, 3, 4)
"""Drafts of a row, beside the most: what a step takes is no line in its tokens."""

CONTEXT = 256
"""Positions before a row, where there is room for them."""

TEXT = 512
"""Tokens that a draft model is told at once, where there is room for them."""

REPEATS, WARMUPS = 5, 2
MOST_SECONDS = 2.0
"""No larger batch is timed once this has passed: from there the line goes on as it did."""


class _Plans:
    """Plans over the first `rows` slots. Rows begin behind some positions, whatever is in them.

    start   of each row
    span    blocks of a slot, for as many drafts as its row may have
    """

    def __init__(
        self, config: EngineConfig, speculation: Speculation, rows: int, num_drafts: int
    ) -> None:
        self._config = config
        self._speculation = speculation
        self._rows = rows
        self._steps, self._draft_steps = count(-(2**40)), count(-(2**40))
        blocks = min(config.num_blocks, speculation.num_blocks or config.num_blocks) // rows
        room = min(config.max_model_len, blocks * config.block_size)
        self.start = max(1, min(CONTEXT, room - 1 - num_drafts))
        self.span = -(-(self.start + 1 + num_drafts) // config.block_size)

    def bound(self) -> StepPlan:
        """The slots are bound, of both models if there are two."""
        return self._plan([self._first(slot, False) for slot in range(self._rows)], 1)

    def step(self, num_drafts: int, num_plans: int) -> StepPlan:
        """Rows of a token and known drafts, behind so many plans for the draft model."""
        drafts = (0,) * num_drafts
        rows = [
            Row(
                slot,
                0,
                slot,
                self.start,
                (0,),
                keep=self.span,
                num_samples=1 + num_drafts,
                drafts=drafts,
            )
            for slot in range(self._rows)
        ]
        return self._plan(rows, num_plans)

    def text(self, num_tokens: int) -> StepPlan:
        """A row of a token in the first slot, behind a plan of a text for the draft model."""
        plan = self.step(0, 1)
        (draft,) = plan.drafts
        row = draft.rows[0]._replace(tokens=(0,) * num_tokens, num_samples=0)
        return plan._replace(rows=plan.rows[:1], drafts=(draft._replace(rows=(row,)),))

    def _first(self, slot: int, proposes: bool) -> Row:
        acceptance = self._speculation.acceptance
        heat = 1.0 if acceptance == REJECTION else 0.0
        bind = Bind(
            SamplingParams(temperature=heat), slot, 1, acceptance=acceptance, proposes=proposes
        )
        blocks = tuple(range(slot * self.span, (slot + 1) * self.span))
        return Row(slot, 0, slot, 0, (0,), new_blocks=blocks, bind=bind)

    def _plan(self, rows: list[Row], num_plans: int) -> StepPlan:
        size, blocks = self._config.block_size, self._config.num_blocks
        if self._speculation.method != "draft":
            num_plans = 0
        binding = rows[0].bind is not None
        drafts = tuple(
            StepPlan(
                next(self._draft_steps),
                tuple(
                    self._first(row.slot, True)
                    if binding
                    else row._replace(num_samples=1, drafts=())
                    for row in rows
                ),
                self._speculation.num_blocks or blocks,
                size,
            )
            for _ in range(num_plans)
        )
        return StepPlan(next(self._steps), tuple(rows), blocks, size, drafts=drafts)


def measured(model: Model, config: EngineConfig) -> StepCosts | None:
    """What steps of the model, and of its draft, take. Some tenths of a second on a GPU.

    Every size is timed with as many drafts as a row can have, and with fewer. None: no row can.
    """
    speculation = config.speculation
    assert speculation is not None, "nobody asks what drafts cost"
    drafts = min(speculation.num_tokens, config.num_blocks * config.block_size - 2)
    drafts = min(drafts, config.max_num_batched_tokens - 1, config.max_model_len - 2)
    if drafts < 1:
        return None
    most = min(config.max_num_seqs, config.max_num_batched_tokens // (1 + drafts))
    target: list[tuple[int, float]] = []
    verify: list[tuple[int, float]] = []
    draft: list[tuple[int, float]] = []
    started = time.perf_counter()
    for rows in sorted({*(size for size in SIZES if size < most), most}):
        plans = _Plans(config, speculation, rows, drafts)
        late = time.perf_counter() - started > MOST_SECONDS
        if target and (late or rows * plans.span > config.num_blocks):
            break
        model.forward(plans.bound()).result()
        target.append((rows, _ahead(model, plans)))
        for num_drafts in sorted({min(few, drafts) for few in FEW} | {drafts}):
            tokens, spent = rows * (1 + num_drafts), _waited(model, plans, num_drafts, 0)
            if not verify or tokens > verify[-1][0]:
                verify.append((tokens, spent))
        if speculation.method == "draft":
            whole = _waited(model, plans, drafts, drafts)
            draft.append((rows, max(0.0, whole - spent) / drafts))
    told = _told(model, config, speculation) if speculation.method == "draft" else ()
    return StepCosts(_rising(target), _rising(draft), _rising(verify), told=told)


def _told(
    model: Model, config: EngineConfig, speculation: Speculation
) -> tuple[tuple[int, float], ...]:
    """A line through nothing and a text, as long as there is room for; none without room."""
    blocks = min(config.num_blocks, speculation.num_blocks or config.num_blocks)
    room = min(config.max_model_len, blocks * config.block_size) - 2
    text = min(TEXT, config.max_num_batched_tokens, room)
    if text < 1:
        return ()
    plans = _Plans(config, speculation, 1, text)
    model.forward(plans.bound()).result()
    whole = _median(model, lambda: plans.text(text))
    return (0, 0.0), (text, max(0.0, whole - _waited(model, plans, 0, 0)))


def _rising(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """No point is below one before it: a step of more tokens that took less was disturbed less."""
    most = accumulate((spent for _, spent in points), max)
    return tuple(zip((tokens for tokens, _ in points), most, strict=True))


def _waited(model: Model, plans: _Plans, num_drafts: int, num_plans: int) -> float:
    return _median(model, lambda: plans.step(num_drafts, num_plans))


def _median(model: Model, planned: Callable[[], StepPlan]) -> float:
    """Of a step that is waited for, in seconds."""
    times = []
    for _ in range(WARMUPS + REPEATS):
        start = time.perf_counter()
        model.forward(planned()).result()
        times.append(time.perf_counter() - start)
    return median(times[WARMUPS:])


def _ahead(
    model: Model, plans: _Plans, num_drafts: int = 0, num_plans: int = 0, repeats: int = REPEATS
) -> float:
    """Mean of steps that are each launched before the one before is waited for, in seconds."""
    pending = model.forward(plans.step(num_drafts, num_plans))
    start = time.perf_counter()
    for _ in range(repeats):
        following = model.forward(plans.step(num_drafts, num_plans))
        pending.result()
        pending = following
    pending.result()
    return (time.perf_counter() - start) / (repeats + 1)


class Parts(NamedTuple):
    """What the device takes, in seconds, the host's work being hidden behind it.

    step     of one token a row
    verify   of a token and k drafts a row
    draft    each of the k plans of the draft model; 0 where there is none
    """

    step: float
    verify: float
    draft: float


def parts(model: Model, config: EngineConfig, rows: int, k: int, repeats: int = 20) -> Parts:
    """Of so many rows with k drafts each."""
    speculation = config.speculation
    assert speculation is not None, "nobody asks what drafts cost"
    plans = _Plans(config, speculation, rows, k)
    model.forward(plans.bound()).result()
    for num_plans in (k, 0):
        _ahead(model, plans, k, num_plans, WARMUPS)
    verify = _ahead(model, plans, k, 0, repeats)
    whole = verify
    if speculation.method == "draft":
        whole = _ahead(model, plans, k, k, repeats)
    return Parts(_ahead(model, plans, 0, 0, repeats), verify, (whole - verify) / k)
