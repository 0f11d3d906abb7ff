"""The policies of the laboratory: what each chooses, and that each serves everybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.llm import find_policy
from forge.policy import POLICIES, Policy
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.sequence import Sequence
from sim.scenario import FOLDER, Scenario, policy_names, policy_of, summary

FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem != "__init__")


def asked(request_id: int, prompt: int, output: int = 4, **more: Any) -> Request:
    """A request with a prompt of its own."""
    first = 1000 * request_id
    params = SamplingParams(max_tokens=output)
    return Request(request_id, tuple(range(first, first + prompt)), params, **more)


def line(*requests: Request) -> list[Sequence]:
    """The requests as a scheduler offers them to `admit`."""
    scheduler = Scheduler(EngineConfig(), vocab_size=10_000, end_ids=(0,))
    for request in requests:
        scheduler.add(request)
    return scheduler.waiting


def order(policy: Policy, waiting: list[Sequence]) -> list[int]:
    """Requests in the order in which the policy would admit them."""
    left, chosen = list(waiting), []
    while left:
        choice = policy.admit(left)
        assert choice is not None
        chosen.append(choice.request.id)
        left = [s for s in left if s is not choice]
    return chosen


def test_there_are_policies_to_compare_and_each_has_a_name() -> None:
    assert policy_names() == (
        *POLICIES,
        *("ageing", "fair-share", "newest", "shortest-aged", "shortest-job", "small-chunks"),
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_server_takes_the_file(file: Any) -> None:
    assert isinstance(find_policy(str(file)), Policy)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InvalidConfig, match=r"^policy: 'nonesuch' is not known. Use fcfs, .*newest"
    ):
        policy_of("nonesuch")


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_serves_everybody_where_blocks_are_short(name: str) -> None:
    engine = EngineConfig(num_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=64)
    scenario = Scenario(
        requests=40, rate=200.0, prompt="1-60", output="1-40", classes=3, tenants=3,
        policy=name, cost="unit", engine=engine,
    )  # fmt: skip
    figures = summary(scenario.run())
    assert figures["endings"] == {"length": 40}
    assert figures["preemptions"] > 0


def test_shortest_job_counts_prompt_and_output() -> None:
    waiting = line(asked(0, 50, 50), asked(1, 90, 5), asked(2, 20, 90), asked(3, 9, 9, priority=1))
    assert order(policy_of("shortest-job"), waiting) == [1, 0, 2, 3]


def test_ageing_lets_a_class_wait_for_ten_seconds_and_no_longer() -> None:
    waiting = line(
        asked(0, 5, priority=1, arrival_s=0.0),
        asked(1, 5, priority=0, arrival_s=9.9),
        asked(2, 5, priority=0, arrival_s=10.1),
    )
    assert order(policy_of("ageing"), waiting) == [1, 0, 2]


def test_shortest_aged_lets_a_long_prompt_be_passed_for_a_while() -> None:
    """A thousand tokens are two seconds."""
    waiting = line(
        asked(0, 900, arrival_s=0.0),
        asked(1, 100, arrival_s=1.5),
        asked(2, 100, arrival_s=1.7),
    )
    assert order(policy_of("shortest-aged"), waiting) == [1, 0, 2]


def test_newest_serves_the_last_first_within_a_class() -> None:
    waiting = line(asked(0, 5), asked(1, 5), asked(2, 5, priority=-1))
    assert order(policy_of("newest"), waiting) == [2, 1, 0]


def test_fair_share_serves_who_asks_for_little_before_who_asks_for_much() -> None:
    many = [asked(i, 100, cache_salt="many") for i in range(3)]
    waiting = line(*many, asked(3, 150, cache_salt="few"), asked(4, 140, cache_salt="few"))
    # 290 against 300; then the few have less still.
    assert order(policy_of("fair-share"), waiting) == [3, 4, 0, 1, 2]


def test_fair_share_preempts_who_holds_the_most() -> None:
    scheduler = Scheduler(EngineConfig(), vocab_size=10_000, end_ids=(0,))
    for request in (
        asked(0, 100, cache_salt="many"),
        asked(1, 100, cache_salt="many"),
        asked(2, 150, cache_salt="few"),
    ):
        scheduler.add(request)
    scheduler.schedule()
    running = list(scheduler.running.values())
    assert policy_of("fair-share").preempt(running).request.id == 1


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
    filling = line(*(asked(i, count) for i, count in enumerate(pending)))
    split = policy_of("fair-share").split(budget, decodes, filling)
    assert (split.num_decodes, sorted(split.chunks)) == (decodes, sorted(chunks))
    assert all(chunk <= most for chunk, most in zip(split.chunks, pending, strict=True))


def test_small_chunks_bounds_prompts_beside_decodes_only() -> None:
    filling = line(asked(0, 200), asked(1, 900))
    split = policy_of("small-chunks").split
    assert split(2048, 3, filling) == (3, (200, 56))
    assert split(2048, 0, filling) == (0, (200, 900))
    assert split(100, 3, filling) == (3, (97, 0))


# What they are for: the same requests, other policies.

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
