"""What the engine itself takes around a step with drafts: planning and committing, no model.

Owns a model that says at once whatever it is asked, and the runs that are timed over it. While rows
have drafts nothing else is in flight, so that time is part of every round; without drafts it is
hidden behind the device. `forge.lookahead` weighs it, with what forge.models.costs has timed.

    |- schedule -|- forward, result -|- commit -|        the two ends, by number of sequences
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from forge.config import EngineConfig
from forge.engine import Engine
from forge.request import Request, SamplingParams
from forge.seam import RowOutput, StepOutput, StepPlan, Verified

SIZES = (1, 8, 64, 256)
"""Sequences of the rounds that are timed, as far as the engine has them, and as many as it has if
these are fewer. Beyond the last the line goes on as it did."""

ROUNDS, WARMUPS = 6, 3


class _Said(NamedTuple):
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class _Agreeing:
    """Every draft is right.

    busy_s    seconds that it has taken
    drafted   rows with drafts in the last plan
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.drafted = 0

    def vocab_size(self) -> int:
        return 256

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        return 0

    def forward(self, plan: StepPlan) -> _Said:
        started = time.perf_counter()
        rows = tuple(
            RowOutput((1,) * row.num_samples, verified=(Verified(1),) * len(row.drafts))
            for row in plan.rows
        )
        self.drafted = sum(map(bool, (row.drafts for row in plan.rows)))
        self.busy_s += time.perf_counter() - started
        return _Said(StepOutput(plan.step, rows))


def overhead(config: EngineConfig) -> tuple[tuple[int, float], ...]:
    """Points of (sequences, seconds of a round in which each of them has drafts).

    Ascending; none where no such round fits. Some tenths of a second.
    """
    most, points = min(config.max_num_seqs, SIZES[-1]), []
    for rows in sorted({*(size for size in SIZES if size < most), most}):
        spent = _round_s(config, rows)
        if spent is not None:
            points.append((rows, spent))
    rising = accumulate((spent for _, spent in points), max)
    return tuple(zip((rows for rows, _ in points), rising, strict=True))


def _round_s(config: EngineConfig, rows: int) -> float | None:
    speculation = config.speculation
    assert speculation is not None, "nobody asks what drafts cost"
    always = replace(config, depth=1, speculation=replace(speculation, costs=None))
    most = (ROUNDS + WARMUPS + 1) * (1 + speculation.num_tokens)
    output = min(most, config.max_model_len - 2)
    blocks = -(-(output + 2) // config.block_size)
    if rows * (1 + speculation.num_tokens) > config.max_num_batched_tokens:
        return None
    if rows * blocks > min(config.num_blocks, speculation.num_blocks or config.num_blocks):
        return None
    model = _Agreeing()
    engine = Engine(model, always)
    for number in range(rows):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.submit(Request(number, (1, 1), params))
    times = []
    while engine.has_work:
        started, model.busy_s = time.perf_counter(), 0.0
        engine.step()
        if model.drafted == rows:
            times.append(time.perf_counter() - started - model.busy_s)
    return median(times[WARMUPS:]) if len(times) > WARMUPS else None
