"""Wait reasons: each way in which a sequence is left in the queue has its own words."""

from __future__ import annotations

from forge.policy import FCFS
from forge.scheduler import Scheduler
from forge.wait_reasons import (
    BLOCKS,
    BUDGET,
    OWN_TOKEN,
    PAUSE,
    POLICY,
    PREEMPTION,
    PREFIX,
    SEARCH,
    SIBLING,
    SLOTS,
)
from tests.core.builders import next_plan, request, scheduler, step


def limit_name(s: Scheduler) -> str | None:
    """Return the name of what ended admission."""
    return None if s.wait_reasons.limit is None else s.wait_reasons.limit.name


def test_nothing_limits_admission_that_ends_with_the_queue() -> None:
    s = scheduler()
    s.add(request(0, range(1, 4)))
    next_plan(s)
    assert limit_name(s) is None and not s.wait_reasons.by_seq_id


def test_a_sequence_without_blocks_has_the_numbers_and_ends_admission() -> None:
    """Four blocks of four: one is held, and 13 tokens need four of the other three."""
    s = scheduler(blocks=4, max_num_batched_tokens=16)
    s.add(request(0, range(1, 4), max_tokens=2))
    step(s)
    s.add(request(1, range(1, 14), max_tokens=2))
    s.add(request(2, range(20, 23), max_tokens=2))
    next_plan(s)
    assert s.wait_reasons.by_seq_id == {1: "4 blocks needed, 1 kept, 3 free"}
    assert s.wait_reasons.limit == (BLOCKS, "sequence 1 lacks blocks")


def test_reasons_are_those_of_the_last_plan() -> None:
    s = scheduler()
    s.add(request(0, range(1, 12)))
    s.add(request(1, range(1, 12)))
    step(s)
    assert s.wait_reasons.by_seq_id == {1: PREFIX}
    step(s)
    assert not s.waiting and not s.wait_reasons.by_seq_id


def test_slots_and_the_tokens_of_a_step_end_admission() -> None:
    s = scheduler(max_num_seqs=1, max_num_batched_tokens=8)
    s.add(request(0, range(1, 4)))
    s.add(request(1, range(1, 4)))
    next_plan(s)
    assert s.wait_reasons.limit == (SLOTS, "1 of 1 slots are taken")
    s = scheduler(max_num_batched_tokens=8)
    s.add(request(0, range(1, 10)))
    s.add(request(1, range(20, 30)))
    next_plan(s)
    assert limit_name(s) == BUDGET and not s.wait_reasons.by_seq_id


def test_a_policy_that_admits_none_is_the_reason() -> None:
    s = scheduler()
    s.add(request(0, range(1, 4)))
    step(s)
    s.policy = FCFS._replace(admit=lambda waiting, context: None)
    s.add(request(1, range(1, 4)))
    next_plan(s)
    assert limit_name(s) == POLICY


def test_a_prefix_and_a_choice_in_progress_are_waited_for() -> None:
    s = scheduler()
    s.add(request(0, range(1, 12)))
    s.add(request(1, range(1, 12)))
    s.add(request(2, range(30, 36), n=2))
    next_plan(s)
    assert s.wait_reasons.by_seq_id == {1: PREFIX, 3: SIBLING}


def test_a_pause_is_the_reason_of_all_that_wait() -> None:
    s = scheduler()
    s.add(request(0, range(1, 4)))
    s.freeze()
    assert s.schedule() is None
    assert limit_name(s) == PAUSE


def test_too_many_passed_over_end_the_search() -> None:
    s = scheduler(max_num_seqs=2)
    s.add(request(0, range(1, 12)))
    for index in (1, 2, 3):
        s.add(request(index, range(1, 12)))
    next_plan(s)
    assert limit_name(s) == SEARCH and s.wait_reasons.by_seq_id == {1: PREFIX, 2: PREFIX}


def test_a_preempted_sequence_waits_for_the_token_that_it_has_in_flight() -> None:
    s = scheduler(blocks=8, block_size=1, depth=2)
    s.add(request(0, (1, 2), max_tokens=2))
    s.add(request(1, (3, 4), max_tokens=2))
    next_plan(s)
    s.resize(3)
    next_plan(s)
    assert s.wait_reasons.by_seq_id == {1: OWN_TOKEN}


def test_a_preemption_ends_the_admission_of_its_plan() -> None:
    s = scheduler(blocks=4, block_size=1, enable_prefix_caching=False)
    s.add(request(0, (1,), max_tokens=4))
    s.add(request(1, (2,), max_tokens=4))
    plans = [step(s)[0] for _ in range(3)]
    assert [len(plan.preempted) for plan in plans] == [0, 0, 1]
    assert limit_name(s) == PREEMPTION
