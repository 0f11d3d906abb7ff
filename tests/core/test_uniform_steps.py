"""Uniform steps: their number, and that a fast-forward reaches the state of the same steps."""

from __future__ import annotations

from collections import deque

import pytest

from forge.policy import FCFS
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from tests.core.builders import EOS, create_output, next_plan, request, scheduler, snapshot, step

TOKEN = 7


def start(s: Scheduler, *max_tokens: int) -> deque[StepPlan]:
    """Run one request per limit, up to the first commit after which no prompt token is pending.

    Return the plans in flight, one fewer than the depth.
    """
    for id, limit in enumerate(max_tokens):
        s.add(request(id, range(10 * id, 10 * id + 3), max_tokens=limit, ignore_eos=True))
    in_flight: deque[StepPlan] = deque()
    for _ in range(2):
        in_flight.append(next_plan(s))
        if len(in_flight) == s.config.depth:
            commit(s, in_flight)
    return in_flight


def commit(s: Scheduler, in_flight: deque[StepPlan]) -> list[object]:
    plan = in_flight.popleft()
    return list(s.commit(plan, create_output(plan, TOKEN)))


def state(s: Scheduler) -> object:
    """Return the state on which later decisions depend."""
    sequences = [(q.id, q.tokens, str(q.table), q.num_synced_blocks) for q in s.running.values()]
    events = [event for plan in s.ledger for event in plan.finished]
    return sequences, events, s.next_step, s.num_planned_tokens, snapshot(s.pool)


def test_each_sequence_gains_a_token_until_the_first_ends() -> None:
    s = scheduler()
    start(s, 20, 9)
    assert s.num_uniform_steps(TOKEN) == 9 - 2


def test_with_a_plan_in_flight_the_steps_end_before_a_sequence_does() -> None:
    s = scheduler(depth=2)
    start(s, 20, 9)
    assert s.num_uniform_steps(TOKEN) == 9 - 2


def test_with_fewer_plans_in_flight_than_depth_allows_there_are_none() -> None:
    s = scheduler(depth=2)
    commit(s, start(s, 20))
    assert not s.ledger and s.num_uniform_steps(TOKEN) == 0


def test_a_token_that_ends_a_sequence_leaves_no_step() -> None:
    s = scheduler()
    s.add(request(0, range(3), max_tokens=9))
    plan = next_plan(s)
    s.commit(plan, create_output(plan, TOKEN))
    assert (s.num_uniform_steps(TOKEN), s.num_uniform_steps(EOS)) == (8, 0)


def test_there_are_none_until_a_committed_plan_has_the_end_of_a_sequence() -> None:
    s = scheduler(depth=2)
    in_flight = start(s, 20, 2)
    steps = []
    for _ in range(3):
        in_flight.append(next_plan(s))
        commit(s, in_flight)
        steps.append(s.num_uniform_steps(TOKEN))
    assert steps == [0, 0, 15]


def test_uniform_steps_end_when_the_pool_has_no_block_left() -> None:
    s = scheduler(blocks=7, block_size=2)
    start(s, 8, 8)
    steps = s.num_uniform_steps(TOKEN)
    assert 0 < steps < 6
    for _ in range(steps):
        plan = next_plan(s)
        assert not plan.preempted
        s.commit(plan, create_output(plan, TOKEN))


def test_uniform_steps_end_where_a_policy_chooses_what_is_evicted() -> None:
    """Eight blocks, of which a paused session has four: without a choice they are evicted too."""
    steps = []
    for policy in (FCFS, FCFS._replace(evict=lambda sessions, context: sessions[-1])):
        s = scheduler(blocks=8, policy=policy)
        s.add(Request(9, tuple(range(50, 66)), SamplingParams(max_tokens=1), session_id="a"))
        step(s)
        assert s.pool.num_disposable_blocks == 4
        start(s, 28)
        steps.append(s.num_uniform_steps(TOKEN))
    assert steps[0] == 26 and 4 * 4 - 5 >= steps[1] > 0


def test_a_waiting_sequence_that_may_displace_another_leaves_no_uniform_step() -> None:
    steps = []
    for policy in (FCFS, FCFS._replace(displace=lambda running, waiting, context: None)):
        s = scheduler(max_num_seqs=1, policy=policy)
        start(s, 20)
        s.add(request(9, range(50, 53)))
        steps.append(s.num_uniform_steps(TOKEN))
    assert steps == [18, 0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_fast_forward_reaches_the_state_of_as_many_steps(
    steps: int, depth: int, caching: bool
) -> None:
    stepped, forwarded = (
        scheduler(depth=depth, block_size=2, enable_prefix_caching=caching) for _ in range(2)
    )
    in_flight = start(stepped, 20, 9)
    deltas: list[object] = []
    for _ in range(steps):
        in_flight.append(next_plan(stepped))
        deltas = commit(stepped, in_flight)
    start(forwarded, 20, 9)
    assert forwarded.num_uniform_steps(TOKEN) >= steps
    forwarded.schedule()
    result = forwarded.fast_forward(steps, TOKEN)
    assert state(forwarded) == state(stepped)
    assert [row.end for plan in forwarded.ledger for row in plan.rows] == [
        row.end for plan in stepped.ledger for row in plan.rows
    ]
    assert len(result.deltas) == len([d for d in deltas if getattr(d, "finish", None)])
