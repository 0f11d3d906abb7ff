"""Options of ranks, the comparison of plans on each rank, and an engine whose ranks have ended."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from forge.config import DeviceOptions, EngineConfig
from forge.engine import Engine
from forge.errors import EngineDead, InvalidConfig, RankMismatch
from forge.llm import LLM
from forge.models.embedded import embedded_folder
from forge.models.hash import HashModel
from forge.policy import FCFS
from forge.policy_loader import load_policy
from forge.rank_start import PlanChecker, start_ranks
from forge.recording import RecordingWriter, build_header
from forge.request import Request, SamplingParams
from forge.seam import PendingStep, StepPlan

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""
TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: '0' is not an integer from 1 to 64"),
        ({"tensor_parallel_size": 65}, "is not an integer from 1 to 64"),
        ({"tensor_parallel_size": True}, "is not an integer from 1 to 64"),
        ({"check_ranks": True}, "check_ranks: there is one rank"),
        ({**TWO, "check_ranks": 1}, "check_ranks: 1 is no boolean"),
    ],
)
def test_options_of_ranks_have_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        DeviceOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"torch_compile": True},
            "torch_compile: compiled modules cannot be divided, and tensor_parallel_size is 2",
        ),
        (
            {"kv_host_gib": 1.0, "check_kv": True},
            "check_kv: with tensor_parallel_size 2 each rank has blocks of its own",
        ),
        (
            {"kv_host_gib": 1.0, "kv_disk_path": "x", "kv_disk_gib": 1.0},
            "kv_disk_path: with tensor_parallel_size 2 no files of blocks are kept",
        ),
    ],
)
def test_options_that_ranks_do_not_have_are_refused_before_a_process_starts(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        start_ranks(TINY, TWO | options, "fcfs", load_policy)


def test_functions_of_a_policy_cannot_be_compared_on_other_ranks() -> None:
    with pytest.raises(InvalidConfig, match="check_ranks: the policy's functions cannot be sent"):
        start_ranks(TINY, TWO | {"check_ranks": True}, FCFS, load_policy)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 1}])
def test_a_model_of_one_rank_starts_no_process(options: dict[str, Any]) -> None:
    assert start_ranks(TINY, options, "fcfs", load_policy) is None


def test_the_model_hash_is_not_divided() -> None:
    with pytest.raises(InvalidConfig, match="tensor_parallel_size: the model hash does not accept"):
        LLM("hash", tensor_parallel_size=2)


def test_the_model_tiny_is_not_divided() -> None:
    with pytest.raises(InvalidConfig, match="tensor_parallel_size: the model tiny is computed in"):
        LLM("tiny", tensor_parallel_size=2)


def recorded_lines() -> list[str]:
    """Return the recording of three requests, one of them aborted."""
    lines: list[str] = []
    config = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=4, max_model_len=64)
    model = HashModel(vocab_size=64, eos_token=0, num_blocks=16, block_size=4)
    header = build_header(config, 64, 0, "fcfs", "0")
    recorder = RecordingWriter(lines.append, lambda: 0, header)
    engine = Engine(model, config, recorder=recorder)
    for number in range(3):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        engine.submit(Request(number, (1, 2, 3 + number), params))
    engine.step()
    engine.abort(1)
    while engine.has_work:
        engine.step()
    recorder.close()
    return lines


def test_a_rank_makes_the_plans_of_rank_0() -> None:
    checker = PlanChecker(partial(load_policy, "fcfs"))
    for line in recorded_lines():
        checker.check(line)


def test_a_rank_with_another_policy_ends_at_its_first_plan_that_differs() -> None:
    """The recorded engine admits the first request first, this one the last."""
    last_first = FCFS._replace(admit=lambda waiting, context: waiting[-1])
    checker = PlanChecker(lambda: last_first)
    with pytest.raises(RankMismatch, match="another plan than the recorded step"):
        for line in recorded_lines():
            checker.check(line)


class _EndedRanks(HashModel):
    """Model whose second step finds that a rank has ended."""

    def forward(self, plan: StepPlan) -> PendingStep:
        if plan.step:
            raise EngineDead("rank 1 has ended")
        return super().forward(plan)


def test_an_engine_whose_ranks_have_ended_raises_and_ends_every_request() -> None:
    config = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=4, max_model_len=64)
    engine = Engine(_EndedRanks(vocab_size=64, eos_token=0, num_blocks=16, block_size=4), config)
    engine.submit(Request(0, (1, 2), SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    with pytest.raises(EngineDead, match="rank 1 has ended"):
        engine.step()
