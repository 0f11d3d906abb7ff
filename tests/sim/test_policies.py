"""The policies of sim/policies: the choices of each, and that each serves all requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.policies import POLICY_FOLDER, policy_names
from forge.policy import POLICIES, Policy
from forge.policy_loader import load_policy
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.sequence import Sequence
from forge.sim.scenario import Scenario, summary
from tests.core.builders import NO_CONTEXT

FILES = sorted(file for file in POLICY_FOLDER.glob("*.py") if file.stem != "__init__")


def create_request(request_id: int, prompt: int, output: int = 4, **more: Any) -> Request:
    """Return a request with a unique prompt."""
    first = 1000 * request_id
    params = SamplingParams(max_tokens=output)
    return Request(request_id, tuple(range(first, first + prompt)), params, **more)


def waiting_sequences(*requests: Request) -> list[Sequence]:
    """Return the requests as a scheduler passes them to `admit`."""
    scheduler = Scheduler(EngineConfig(), vocab_size=10_000, end_ids=(0,))
    for request in requests:
        scheduler.add(request)
    return scheduler.waiting


def admission_order(policy: Policy, waiting: list[Sequence]) -> list[int]:
    """Return the requests in the order in which the policy admits them."""
    remaining, chosen = list(waiting), []
    while remaining:
        choice = policy.admit(remaining, NO_CONTEXT)
        assert choice is not None
        chosen.append(choice.request.id)
        remaining = [s for s in remaining if s is not choice]
    return chosen


def test_there_are_policies_to_compare_and_each_has_a_name() -> None:
    assert policy_names() == (
        *POLICIES,
        *("ageing", "attained-service", "fair-queueing", "fair-share", "longest-prefix"),
        *("newest", "predicted-shortest", "session-fcfs", "shortest-aged", "shortest-job"),
        *("small-chunks", "working-set"),
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_server_takes_the_file(file: Any) -> None:
    assert isinstance(load_policy(str(file)), Policy)


def test_an_unknown_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        InvalidConfig, match=r"^policy: 'nonesuch' is not known. Use fcfs, .*newest"
    ):
        load_policy("nonesuch")


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_serves_all_requests_when_blocks_are_scarce(name: str) -> None:
    engine = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=64)
    scenario = Scenario(
        requests=40, rate=200.0, prompt="1-60", output="1-40", classes=3, tenants=3,
        policy=name, cost="unit", engine=engine,
    )  # fmt: skip
    figures = summary(scenario.run())
    assert figures["endings"] == {"length": 40}
    assert figures["preemptions"] > 0


def test_shortest_job_counts_prompt_and_output() -> None:
    waiting = waiting_sequences(
        create_request(0, 50, 50),
        create_request(1, 90, 5),
        create_request(2, 20, 90),
        create_request(3, 9, 9, priority=1),
    )
    assert admission_order(load_policy("shortest-job"), waiting) == [1, 0, 2, 3]


def test_ageing_lets_a_class_wait_for_ten_seconds_and_no_longer() -> None:
    waiting = waiting_sequences(
        create_request(0, 5, priority=1, arrival_s=0.0),
        create_request(1, 5, priority=0, arrival_s=9.9),
        create_request(2, 5, priority=0, arrival_s=10.1),
    )
    assert admission_order(load_policy("ageing"), waiting) == [1, 0, 2]


def test_shortest_aged_lets_a_long_prompt_be_passed_for_a_while() -> None:
    """A thousand tokens are two seconds."""
    waiting = waiting_sequences(
        create_request(0, 900, arrival_s=0.0),
        create_request(1, 100, arrival_s=1.5),
        create_request(2, 100, arrival_s=1.7),
    )
    assert admission_order(load_policy("shortest-aged"), waiting) == [1, 0, 2]


def test_newest_serves_the_last_first_within_a_class() -> None:
    waiting = waiting_sequences(
        create_request(0, 5), create_request(1, 5), create_request(2, 5, priority=-1)
    )
    assert admission_order(load_policy("newest"), waiting) == [2, 1, 0]


def test_fair_share_admits_the_tenant_with_the_fewest_waiting_tokens() -> None:
    many = [create_request(i, 100, cache_salt="many") for i in range(3)]
    waiting = waiting_sequences(
        *many, create_request(3, 150, cache_salt="few"), create_request(4, 140, cache_salt="few")
    )
    # 290 against 300; then the few have less still.
    assert admission_order(load_policy("fair-share"), waiting) == [3, 4, 0, 1, 2]


def test_fair_share_preempts_the_tenant_with_the_most_blocks() -> None:
    scheduler = Scheduler(EngineConfig(), vocab_size=10_000, end_ids=(0,))
    for request in (
        create_request(0, 100, cache_salt="many"),
        create_request(1, 100, cache_salt="many"),
        create_request(2, 150, cache_salt="few"),
    ):
        scheduler.add(request)
    scheduler.schedule()
    running = list(scheduler.running.values())
    assert load_policy("fair-share").preempt(running, NO_CONTEXT).request.id == 1


@pytest.mark.parametrize(
    ("budget", "decodes", "pending", "chunks"),
    [
        (64, 4, (100, 100, 100), (20, 20, 20)),
        (64, 4, (100, 5, 100), (28, 5, 27)),
        (64, 0, (10, 5), (10, 5)),
        (4, 4, (10,), (0,)),
    ],
)
def test_fair_share_computes_prompts_together_in_equal_chunks(
    budget: int, decodes: int, pending: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    filling = waiting_sequences(*(create_request(i, count) for i, count in enumerate(pending)))
    split = load_policy("fair-share").split(budget, decodes, filling, NO_CONTEXT)
    assert (split.num_decodes, sorted(split.chunks)) == (decodes, sorted(chunks))
    assert all(chunk <= most for chunk, most in zip(split.chunks, pending, strict=True))


def test_small_chunks_bounds_prompts_only_in_steps_with_decodes() -> None:
    filling = waiting_sequences(create_request(0, 200), create_request(1, 900))
    split = load_policy("small-chunks").split
    assert split(2048, 3, filling, NO_CONTEXT) == (3, (200, 56))
    assert split(2048, 0, filling, NO_CONTEXT) == (0, (200, 900))
    assert split(100, 3, filling, NO_CONTEXT) == (3, (97, 0))


# Comparisons: the same requests under different policies.

BUSY = Scenario(
    requests=70,
    rate=24.0,
    prompt="32-96,32-96,32-96,3000",
    output="64",
    engine=EngineConfig(max_num_seqs=8),
)


def test_short_prompts_first_is_faster_for_most_and_slower_for_the_last() -> None:
    fcfs, shortest = (
        summary(replace(BUSY, policy=name).run()) for name in ("fcfs", "shortest-job")
    )
    assert shortest["ttft_ms"]["p50"] < 0.5 * fcfs["ttft_ms"]["p50"]
    assert shortest["ttft_ms"]["max"] > fcfs["ttft_ms"]["max"]


def test_small_chunks_make_tokens_come_evenly() -> None:
    fcfs, small = (summary(replace(BUSY, policy=name).run()) for name in ("fcfs", "small-chunks"))
    assert small["itl_ms"]["max"] < 0.5 * fcfs["itl_ms"]["max"]
