"""Policies: the choices of admission, preemption and the split of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from forge.policy import (
    FCFS,
    POLICIES,
    Candidate,
    Policy,
    PolicyContext,
    Split,
    decodes_then_chunks,
    first_in_queue,
    largest_table,
    least_progress,
    prefills_first,
    shortest_prompt,
)
from forge.request import Request
from forge.sessions import Session
from tests.core.builders import (
    NO_CONTEXT,
    config,
    hash_model,
    next_plan,
    request,
    row_spans,
    scheduler,
    serve,
    step,
)
from tests.core.reference import compute_expected


class CandidateValue(NamedTuple):
    """A Candidate as a value."""

    id: int
    request: Request
    num_output: int = 0
    num_pending: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    session: Session | None = None
    num_served: int = 0
    num_overtaken: int = 0


def create_candidate(
    id: int,
    *,
    prompt: int = 1,
    priority: int = 0,
    output: int = 0,
    pending: int = 0,
    blocks: int = 0,
) -> CandidateValue:
    new_request = request(id, prompt=range(prompt), priority=priority)
    return CandidateValue(id, new_request, output, pending, blocks)


# Admission.


def test_the_first_in_line_is_admitted() -> None:
    assert first_in_queue(
        [create_candidate(5), create_candidate(2)], NO_CONTEXT
    ) == create_candidate(5)


def test_the_shortest_prompt_of_the_most_urgent_class_is_admitted() -> None:
    line = [
        create_candidate(1, prompt=9),
        create_candidate(2, prompt=3),
        create_candidate(3, prompt=1, priority=1),
    ]
    assert shortest_prompt(line, NO_CONTEXT) == line[1]


def test_of_two_shortest_prompts_the_older_is_admitted() -> None:
    line = [create_candidate(4, prompt=3), create_candidate(2, prompt=3)]
    assert shortest_prompt(line, NO_CONTEXT) == line[1]


# Preemption.


def test_the_lowest_class_is_preempted_first() -> None:
    running = [
        create_candidate(1, priority=0, output=0),
        create_candidate(2, priority=2, output=9),
        create_candidate(3, priority=1),
    ]
    assert least_progress(running, NO_CONTEXT) == running[1]


def test_within_a_class_the_fewest_output_tokens_lose() -> None:
    running = [
        create_candidate(1, output=5),
        create_candidate(2, output=3),
        create_candidate(3, output=4),
    ]
    assert least_progress(running, NO_CONTEXT) == running[1]


def test_of_two_with_equal_progress_the_higher_id_loses() -> None:
    running = [
        create_candidate(7, output=3),
        create_candidate(9, output=3),
        create_candidate(8, output=3),
    ]
    assert least_progress(running, NO_CONTEXT) == running[1]


def test_the_largest_table_is_the_sequence_that_frees_most_blocks() -> None:
    running = [
        create_candidate(1, blocks=1),
        create_candidate(2, blocks=3),
        create_candidate(3, blocks=2),
    ]
    assert largest_table(running, NO_CONTEXT) == running[1]


def test_of_two_largest_tables_the_higher_id_loses() -> None:
    running = [
        create_candidate(3, blocks=2),
        create_candidate(8, blocks=2),
        create_candidate(5, blocks=2),
    ]
    assert largest_table(running, NO_CONTEXT) == running[1]


# Splitting the budget.


def test_every_decode_runs_and_prompts_get_the_rest_in_running_order() -> None:
    filling = [
        create_candidate(1, pending=4),
        create_candidate(2, pending=9),
        create_candidate(3, pending=5),
    ]
    assert decodes_then_chunks(10, 2, filling, NO_CONTEXT) == Split(2, (4, 4, 0))


def test_a_budget_that_covers_everything_is_not_spent_twice() -> None:
    assert decodes_then_chunks(100, 2, [create_candidate(1, pending=4)], NO_CONTEXT) == Split(
        2, (4,)
    )


def test_a_budget_of_decodes_alone_leaves_no_chunk() -> None:
    assert decodes_then_chunks(2, 2, [create_candidate(1, pending=4)], NO_CONTEXT) == Split(2, (0,))


def test_chunks_alone_stall_the_decodes() -> None:
    assert prefills_first(
        10, 2, [create_candidate(1, pending=4), create_candidate(2, pending=9)], NO_CONTEXT
    ) == Split(0, (4, 6))


# Policies in the scheduler.


def test_the_policies_that_ship_have_names() -> None:
    assert POLICIES == {
        "fcfs": Policy(first_in_queue, least_progress, decodes_then_chunks),
        "shortest-prompt": Policy(shortest_prompt, least_progress, decodes_then_chunks),
        "prefill-first": Policy(first_in_queue, least_progress, prefills_first),
        "largest-victim": Policy(first_in_queue, largest_table, decodes_then_chunks),
    }


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_changes_the_order_and_never_a_token(name: str) -> None:
    """Seven requests share twelve blocks of two and four rows, so every policy preempts."""
    s = scheduler(
        blocks=12, block_size=2, max_num_seqs=4, max_num_batched_tokens=6, policy=POLICIES[name]
    )
    requests = [
        request(i, prompt=range(i, i + 3), max_tokens=8, ignore_eos=True) for i in range(1, 8)
    ]
    for each in requests:
        s.add(each)
    m = hash_model(s)
    served = serve(s, m)
    assert served.num_preemptions > 0
    assert served.tokens == {
        (each.id, 0): list(compute_expected(m, config(), each).tokens) for each in requests
    }


def test_a_custom_policy_replaces_one_choice() -> None:
    def newest(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        return max(waiting, key=lambda candidate: candidate.id)

    s = scheduler(max_num_seqs=1, policy=FCFS._replace(admit=newest))
    for i in (0, 1, 2):
        s.add(request(i, prompt=[1]))
    assert row_spans(next_plan(s)) == [(2, 0, 1)]


def test_a_policy_reads_the_fields_of_a_candidate() -> None:
    """Sequence 0 has run two steps and holds two blocks of two; sequence 1 has three tokens."""
    read = []

    def read_candidates(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        read.append(
            [
                CandidateValue(*(getattr(c, name) for name in CandidateValue._fields))
                for c in waiting
            ]
        )
        return None

    s = scheduler(block_size=2)
    first, second = request(0, prompt=[1, 2]), request(1, prompt=[3, 4, 5])
    s.add(first)
    step(s)
    step(s)
    s.add(second)
    s.policy = FCFS._replace(admit=read_candidates)
    next_plan(s)
    assert read == [[CandidateValue(1, second, 0, 3, 0, 0)]]
    running = s.running[0]
    assert CandidateValue(
        *(getattr(running, name) for name in CandidateValue._fields)
    ) == CandidateValue(0, first, 2, 0, 2, 0, None, 4)


def test_a_policy_may_admit_no_sequence_while_others_run() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    step(s)
    s.policy = FCFS._replace(admit=lambda waiting, context: None)
    s.add(request(1, prompt=[2]))
    assert row_spans(next_plan(s)) == [(0, 1, 2)]
