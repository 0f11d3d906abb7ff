"""The measured time of the engine around a speculative step: rising points of real steps."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from forge import LLM
from forge.config import DiskTier, EngineConfig, HostTier, MixedStepCosts, Speculation, StepCosts
from forge.models import embedded
from forge.overhead import NUM_ROUNDS, NUM_WARMUPS, _AcceptAllModel, measure_overhead
from forge.seam import StepPlan


def create_config(**changes: Any) -> EngineConfig:
    plain = EngineConfig(
        num_blocks=512,
        block_size=16,
        max_num_seqs=20,
        max_num_batched_tokens=256,
        max_model_len=512,
        depth=2,
        speculation=Speculation(num_tokens=3),
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_points_are_of_all_sizes_and_rise(method: str) -> None:
    points = measure_overhead(create_config(speculation=Speculation(num_tokens=3, method=method)))
    assert [rows for rows, _ in points] == [1, 8, 20]
    spent = [seconds for _, seconds in points]
    assert 0 < spent[0] and spent == sorted(spent)


def test_no_point_is_below_that_of_fewer_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock whose readings come closer, each step takes less time than the one before."""
    monkeypatch.setattr(time, "perf_counter", map(math.sqrt, count()).__next__)
    first, *others = measure_overhead(create_config())
    assert [rows for rows, _ in others] == [8, 20]
    assert {seconds for _, seconds in others} == {first[1]}


def test_a_large_engine_is_not_timed_in_full() -> None:
    large = create_config(max_num_seqs=3000, max_num_batched_tokens=16_384, num_blocks=8192)
    assert [rows for rows, _ in measure_overhead(large)] == [1, 8, 64, 256]


def test_only_steps_count_in_which_every_sequence_has_all_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[StepPlan] = []
    forward = _AcceptAllModel.forward

    def kept(self: _AcceptAllModel, plan: StepPlan) -> Any:
        plans.append(plan)
        return forward(self, plan)

    monkeypatch.setattr(_AcceptAllModel, "forward", kept)
    measure_overhead(create_config(max_num_seqs=8))
    full = [plan for plan in plans if plan.rows and all(len(r.drafts) == 3 for r in plan.rows)]
    assert {len(plan.rows) for plan in full} == {1, 8}
    # All drafts are accepted, so the number of tokens of all steps is known.
    assert 10 < len(full) <= 2 * (NUM_WARMUPS + NUM_ROUNDS + 1)


def test_time_inside_the_model_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only advances inside the model measures nothing."""
    monkeypatch.setattr(time, "perf_counter", iter(range(1_000_000)).__next__)
    # Four readings a step make three intervals; the one inside the model does not count.
    assert {seconds for _, seconds in measure_overhead(create_config())} == {2}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 2},
        {"max_num_batched_tokens": 64},
        {"max_model_len": 8},
        {"speculation": Speculation(num_tokens=3, num_blocks=2)},
    ],
    ids=str,
)
def test_what_does_not_fit_has_no_points(changes: dict[str, Any]) -> None:
    assert len(measure_overhead(create_config(**changes))) < 3


@pytest.mark.parametrize(
    "changes",
    [
        {"end_ids": (151_643,)},
        {"host_tier": HostTier(num_blocks=8)},
        {"host_tier": HostTier(num_blocks=8, disk=DiskTier(max_files=8))},
        {"max_step_ms": 5.0, "mixed_costs": MixedStepCosts(((1, 1),))},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_what_only_the_served_model_has_hinders_no_measurement(changes: dict[str, Any]) -> None:
    """The timed model has a vocabulary of its own, no files, and no measured times."""
    assert len(measure_overhead(create_config(max_num_seqs=1, **changes))) == 1


def test_costs_that_were_timed_have_the_engines_part_and_given_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM("hash:step_ms=1", draft_model="hash:step_ms=0.1") as llm:
        speculation = llm.engine.config.speculation
        assert speculation is not None and speculation.costs is not None
        assert speculation.costs.scheduler == ()
    timed = StepCosts(((1, 1.0),), ((1, 0.1),), ((2, 1.1),))
    monkeypatch.setattr(embedded, "_hash_step_costs", lambda *_: timed)
    with LLM("hash", draft_model="hash", max_num_seqs=4) as llm:
        speculation = llm.engine.config.speculation
        assert speculation is not None and speculation.costs is not None
        assert [rows for rows, _ in speculation.costs.scheduler] == [1, 4]
        assert speculation.costs[:3] == timed[:3]
