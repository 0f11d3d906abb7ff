"""Overhead: time of the engine around a step with drafts, without the model.

Planning and committing.

Owns a model that answers at once, and the runs that are timed over it. While rows have drafts no
other step is in flight, so that time is part of every round. Without drafts it passes while the
device computes. `forge.draft_length` weighs it, with what forge.models.costs has timed.

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

BATCH_SIZES = (1, 8, 64, 256)
"""Sequences of the timed rounds, up to the engine's limit, and the limit itself if it is lower.

Beyond the last point the time is extrapolated.
"""

NUM_ROUNDS, NUM_WARMUPS = 6, 3


class _ReadyStep(NamedTuple):
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class _AcceptAllModel:
    """Model under which every draft is right. It has no content, so it moves none.

    forward_s        seconds spent in `forward`
    num_draft_rows   rows with drafts in the last plan
    """

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.num_draft_rows = 0

    def vocab_size(self) -> int:
        return 256

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        return 0

    def executes_moves(self) -> bool:
        return True

    def forward(self, plan: StepPlan) -> _ReadyStep:
        start_s = time.perf_counter()
        rows = tuple(
            RowOutput((1,) * row.num_samples, verified=(Verified(1),) * len(row.drafts))
            for row in plan.rows
        )
        self.num_draft_rows = sum(map(bool, (row.drafts for row in plan.rows)))
        self.forward_s += time.perf_counter() - start_s
        return _ReadyStep(StepOutput(plan.step, rows))


def measure_overhead(config: EngineConfig) -> tuple[tuple[int, float], ...]:
    """Return points of (sequences, seconds of a round in which each of them has drafts), ascending.

    () where no such round fits. Takes some tenths of a second.
    """
    max_seqs, points = min(config.max_num_seqs, BATCH_SIZES[-1]), []
    for rows in sorted({*(size for size in BATCH_SIZES if size < max_seqs), max_seqs}):
        round_s = _measure_round_s(config, rows)
        if round_s is not None:
            points.append((rows, round_s))
    monotonic_s = accumulate((round_s for _, round_s in points), max)
    return tuple(zip((rows for rows, _ in points), monotonic_s, strict=True))


def _config_of_rounds(config: EngineConfig) -> EngineConfig:
    """Return what the time of a round depends on; all else is at its default.

    The model has another vocabulary, and no files.
    """
    speculation, host_tier = config.speculation, config.host_tier
    assert speculation is not None, "drafts are timed only with speculation"
    return EngineConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        speculation=replace(speculation, costs=None),
        host_tier=None if host_tier is None else replace(host_tier, costs=None, disk=None),
    )


def _measure_round_s(config: EngineConfig, num_seqs: int) -> float | None:
    speculation = config.speculation
    assert speculation is not None, "drafts are timed only with speculation"
    max_output = (NUM_ROUNDS + NUM_WARMUPS + 1) * (1 + speculation.num_tokens)
    output_len = min(max_output, config.max_model_len - 2)
    num_blocks = -(-(output_len + 2) // config.block_size)
    if num_seqs * (1 + speculation.num_tokens) > config.max_num_batched_tokens:
        return None
    if num_seqs * num_blocks > min(config.num_blocks, speculation.num_blocks or config.num_blocks):
        return None
    model = _AcceptAllModel()
    engine = Engine(model, _config_of_rounds(config))
    for number in range(num_seqs):
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        engine.submit(Request(number, (1, 1), params))
    times_s = []
    while engine.has_work:
        start_s, model.forward_s = time.perf_counter(), 0.0
        engine.step()
        if model.num_draft_rows == num_seqs:
            times_s.append(time.perf_counter() - start_s - model.forward_s)
    return median(times_s[NUM_WARMUPS:]) if len(times_s) > NUM_WARMUPS else None
