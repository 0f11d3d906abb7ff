"""The scheduler: what the next plan computes, and what its results change.

Expected values are literals, unless a test says otherwise. Sections: admission, plans, chunks,
classes, preemption, endings, aborts, the prefix cache, forks, faults, resizing, policies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from forge.config import Speculation
from forge.drafting import create_drafter
from forge.errors import (
    ContextTooLong,
    DuplicateRequest,
    InvalidRequest,
    NeverFits,
    PolicyError,
)
from forge.policy import FCFS, Candidate, PolicyContext, Split
from forge.request import CachedTokens, Delta, FinishReason, Request, SamplingParams
from forge.sampling import choice_seed, mix
from forge.scheduler import MAX_PREEMPTIONS, Scheduler
from forge.seam import (
    Bind,
    BlockCopy,
    Event,
    Row,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenRef,
    Verified,
)
from forge.sequence import StopChecker
from tests.core.builders import (
    EOS,
    VOCAB,
    check_block_pool,
    config,
    create_output,
    hash_model,
    next_plan,
    request,
    row_spans,
    scheduler,
    serve,
    snapshot,
    step,
)
from tests.core.reference import compute_expected

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ABORT, ERROR = FinishReason.ABORT, FinishReason.ERROR


def row_tuples(plan: StepPlan) -> list[int]:
    return [row.seq_id for row in plan.rows]


def event_ids(events: tuple[Event, ...]) -> list[int]:
    return [event.seq_id for event in events]


def waiting_ids(s: Scheduler) -> list[int]:
    return [sequence.id for sequence in s.waiting]


def endings(deltas: list[Delta]) -> list[tuple[int, FinishReason | None]]:
    return [(delta.request_id, delta.finish) for delta in deltas]


def errors(deltas: list[Delta]) -> list[tuple[int, str | None]]:
    return [(delta.request_id, delta.error) for delta in deltas]


def scheduler_state(s: Scheduler) -> dict[str, Any]:
    """Return the full state of the scheduler, its pool included, as comparable text."""
    fields = {
        name: repr(value)
        for name, value in vars(s).items()
        if name not in ("pool", "_create_stop_checker")
    }
    return fields | snapshot(s.pool)


def pressed_scheduler(**numbers: Any) -> Scheduler:
    """Return a scheduler with six blocks of one token, full after two steps, short at the third."""
    s = scheduler(**{"blocks": 6, "block_size": 1, "enable_prefix_caching": False, **numbers})
    s.add(request(0, prompt=[1, 2], max_tokens=5))
    s.add(request(1, prompt=[3, 4], max_tokens=5))
    return s


def admit_newest(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    return max(waiting, key=lambda candidate: candidate.id)


# Admission.


def test_nothing_to_do_is_no_plan() -> None:
    s = scheduler()
    assert not s.has_work
    assert s.schedule() is None


def test_admission_stops_at_the_batch_size() -> None:
    s = scheduler(max_num_seqs=2)
    for i in range(5):
        s.add(request(i, prompt=[i + 1]))
    assert row_tuples(next_plan(s)) == [0, 1]
    assert waiting_ids(s) == [2, 3, 4]


def test_admission_waits_until_the_whole_prompt_fits() -> None:
    """Four blocks of four. A running request holds one, so 13 tokens (four blocks) must wait."""
    s = scheduler(blocks=4, block_size=4)
    s.add(request(0, prompt=range(3), max_tokens=4))
    step(s)
    s.add(request(1, prompt=range(13), max_tokens=4))
    assert row_tuples(next_plan(s)) == [0]
    assert s.pool.num_free_blocks == 3


def test_admission_leaves_a_block_for_the_running_sequences() -> None:
    """Three blocks are left and three are needed: none would be left for the running sequence."""
    s = scheduler(blocks=4, block_size=4)
    s.add(request(0, prompt=range(3), max_tokens=2))
    step(s)
    s.add(request(1, prompt=range(12), max_tokens=2))
    plan, deltas = step(s)
    assert (row_tuples(plan), endings(deltas)) == ([0], [(0, LENGTH)])
    assert row_tuples(next_plan(s)) == [1]


def test_admission_waits_for_budget() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    s.add(request(0, prompt=range(4)))
    s.add(request(1, prompt=range(4)))
    assert row_spans(next_plan(s)) == [(0, 0, 4)]
    assert waiting_ids(s) == [1]


def test_decodes_are_part_of_the_budget_that_admission_has() -> None:
    """Budget five, three decodes: the first new request takes what is left, the second waits."""
    s = scheduler(max_num_seqs=5, max_num_batched_tokens=5)
    for i in range(3):
        s.add(request(i, prompt=[i + 1]))
    step(s)
    s.add(request(3, prompt=[4, 5]))
    s.add(request(4, prompt=[6]))
    plan = next_plan(s)
    assert (event_ids(plan.admitted), plan.num_tokens, waiting_ids(s)) == ([3], 5, [4])


def test_a_freed_slot_is_refilled_in_the_very_next_plan() -> None:
    """One row, two requests of two tokens: four steps, none of them idle."""
    s = scheduler(max_num_seqs=1)
    s.add(request(0, prompt=[1], max_tokens=2))
    s.add(request(1, prompt=[2], max_tokens=2))
    plans = [step(s)[0] for _ in range(4)]
    assert [row_spans(plan) for plan in plans] == [
        [(0, 0, 1)],
        [(0, 1, 2)],
        [(1, 0, 1)],
        [(1, 1, 2)],
    ]
    assert not s.has_work


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(4, 5), (4, 6), (9, 1), (10, 0), (9, None), (1, 9)]
)
def test_a_request_up_to_the_longest_sequence_is_served(
    prompt_len: int, max_tokens: int | None
) -> None:
    s = scheduler(max_model_len=10)
    s.add(request(0, prompt=range(prompt_len), max_tokens=max_tokens))
    served = serve(s, hash_model(s, min_eos_len=99, likely_tokens=(1, 2, 3)))
    assert served.finish == {(0, 0): LENGTH}
    assert len(served.tokens[0, 0]) == (10 - prompt_len if max_tokens is None else max_tokens)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "field", "least"),
    [
        (4, 7, "max_tokens", 11),
        (9, 2, "max_tokens", 11),
        (10, 1, "prompt", 11),
        (11, 0, "prompt", 11),
        (10, None, "prompt", 11),
        (12, 5, "prompt", 17),
    ],
)
def test_a_request_past_the_longest_sequence_is_refused_and_changes_nothing(
    prompt_len: int, max_tokens: int | None, field: str, least: int
) -> None:
    s = scheduler(max_model_len=10)
    before = scheduler_state(s)
    with pytest.raises(ContextTooLong) as refusal:
        s.add(request(0, prompt=range(prompt_len), max_tokens=max_tokens))
    assert refusal.value.field == field
    cause = ", the prompt alone is longer than the model's context length"
    assert str(refusal.value) == (
        f"{field}: Input tokens exceed the configured limit of 10 tokens: {prompt_len} prompt "
        f"tokens + {least - prompt_len} output tokens{cause if prompt_len > 10 else ''}. "
        f"Shorten the request, or start with --max-model-len {least} if the model takes as many"
    )
    assert scheduler_state(s) == before


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(4, 4), (4, 5), (7, 2), (8, 1), (8, 0), (8, None), (1, None)]
)
def test_a_request_up_to_the_whole_cache_is_served(prompt_len: int, max_tokens: int | None) -> None:
    """Two blocks of four hold eight positions; the last token of an output takes none."""
    s = scheduler(blocks=2, block_size=4)
    s.add(request(0, prompt=range(prompt_len), max_tokens=max_tokens))
    served = serve(s, hash_model(s, likely_tokens=(1, 2, 3)))
    assert served.finish == {(0, 0): LENGTH}
    assert len(served.tokens[0, 0]) == (9 - prompt_len if max_tokens is None else max_tokens)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "field", "blocks"),
    [
        (4, 6, "max_tokens", 3),
        (8, 2, "max_tokens", 3),
        (9, 0, "prompt", 3),
        (9, 1, "prompt", 3),
        (9, None, "prompt", 3),
        (1, 100, "max_tokens", 25),
        (9, 5, "prompt", 4),
    ],
)
def test_a_request_past_the_whole_cache_is_refused_and_changes_nothing(
    prompt_len: int, max_tokens: int | None, field: str, blocks: int
) -> None:
    s = scheduler(blocks=2, block_size=4)
    new_request = request(0, prompt=range(prompt_len), max_tokens=max_tokens)
    before = scheduler_state(s)
    with pytest.raises(NeverFits, match="the cache has 2 of 4") as refusal:
        s.add(new_request)
    assert refusal.value.field == field
    assert str(refusal.value).endswith(f"Shorten the request or start with --num-blocks {blocks}")
    assert scheduler_state(s) == before
    scheduler(blocks=blocks, block_size=4).add(new_request)
    with pytest.raises(NeverFits):
        scheduler(blocks=blocks - 1, block_size=4).add(new_request)


@pytest.mark.parametrize(
    ("blocks", "longest", "fits", "kind"), [(2, 64, 5, NeverFits), (16, 8, 4, ContextTooLong)]
)
def test_min_tokens_beyond_the_limits_are_refused_without_max_tokens(
    blocks: int, longest: int, fits: int, kind: type[InvalidRequest]
) -> None:
    """A prompt of four. The limit of the cache or of the model must not end the output earlier."""
    s = scheduler(blocks=blocks, block_size=4, max_model_len=longest)
    with pytest.raises(kind) as refusal:
        s.add(request(0, prompt=range(4), max_tokens=None, min_tokens=fits + 1))
    assert refusal.value.field == "min_tokens"
    s.add(request(0, prompt=range(4), max_tokens=None, min_tokens=fits))
    assert serve(s, hash_model(s, likely_tokens=(1, 2, 3))).finish == {(0, 0): LENGTH}


def test_a_refusal_of_a_request_is_an_invalid_request() -> None:
    for refusal in (ContextTooLong, NeverFits, DuplicateRequest):
        assert issubclass(refusal, InvalidRequest)


def test_a_second_request_with_a_live_id_is_refused_without_effect() -> None:
    s = scheduler()
    s.add(request(5, prompt=[1, 2], max_tokens=3))
    step(s)
    before = scheduler_state(s)
    with pytest.raises(DuplicateRequest, match=r"id: request 5 is live. Use a new id"):
        s.add(request(5, prompt=[9]))
    assert scheduler_state(s) == before
    step(s)
    _, deltas = step(s)
    assert deltas == [Delta(5, 0, (7,), LENGTH)]


def test_an_id_can_be_used_again_after_its_request_has_ended() -> None:
    s = scheduler()
    for _ in range(2):
        s.add(request(5, prompt=[1], max_tokens=1))
        _, deltas = step(s)
        assert endings(deltas) == [(5, LENGTH)]


# Plans.


def test_a_prompt_and_its_decodes_are_rows_of_one_shape() -> None:
    """Blocks of four: the third plan feeds position 4, so it appends a block."""
    s = scheduler(blocks=9, block_size=4)
    params = SamplingParams(temperature=0.5, max_tokens=9, seed=-1)
    s.add(replace(request(3, prompt=[11, 12, 13]), params=params))
    plans = [step(s, token)[0] for token in (21, 22, 23, 24)]
    bind = Bind(params, 2**64 - 1, prompt_len=3, end_ids=(0,))
    new = Event(0, "new, 0 tokens shared")
    first = Row(0, 0, 0, 0, (11, 12, 13), (), 0, (0,), 1, bind)
    assert plans == [
        StepPlan(0, (first,), num_blocks=9, block_size=4, admitted=(new,)),
        StepPlan(1, (Row(0, 0, 0, 3, (21,), (), 1, (), 1, None),), num_blocks=9, block_size=4),
        StepPlan(2, (Row(0, 0, 0, 4, (22,), (), 1, (1,), 1, None),), num_blocks=9, block_size=4),
        StepPlan(3, (Row(0, 0, 0, 5, (23,), (), 2, (), 1, None),), num_blocks=9, block_size=4),
    ]


def test_a_plan_made_before_the_commit_names_the_token_it_feeds() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1, 2]))
    s.add(request(1, prompt=[3]))
    first, second = next_plan(s), next_plan(s)
    assert [row.refs for row in second.rows] == [(TokenRef(0, 0),), (TokenRef(0, 1),)]
    assert [row.tokens for row in second.rows] == [(), ()]
    assert s.commit(first, create_output(first)) == [Delta(0, 0, (7,)), Delta(1, 0, (7,))]
    assert [row.refs for row in next_plan(s).rows] == [(TokenRef(1, 0),), (TokenRef(1, 1),)]


def test_a_plan_names_the_latest_token_when_several_are_in_flight() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    assert [next_plan(s).rows[0].refs for _ in range(3)] == [(), ((0, 0),), ((1, 0),)]


def test_admitted_sequences_decode_in_the_same_plan() -> None:
    s = scheduler()
    for i in range(3):
        s.add(request(i, prompt=[1, 2, i]))
    step(s)
    assert row_spans(next_plan(s)) == [(0, 3, 4), (1, 3, 4), (2, 3, 4)]


def test_no_row_is_planned_past_the_length_in_flight() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], max_tokens=2))
    first, second = next_plan(s), next_plan(s)
    assert row_spans(second) == [(0, 1, 2)]
    assert s.schedule() is None
    s.commit(first, create_output(first))
    assert s.schedule() is None
    assert s.commit(second, create_output(second)) == [Delta(0, 0, (7,), LENGTH)]


def test_a_sequence_whose_end_is_in_flight_takes_no_further_block() -> None:
    """Three blocks of one hold the prompt and the first token; the second is never fed back."""
    s = scheduler(block_size=1)
    s.add(request(0, prompt=[1, 2], max_tokens=2))
    next_plan(s)
    next_plan(s)
    assert s.schedule() is None
    assert s.pool.num_used_blocks == 3


def test_a_request_without_a_seed_takes_one_from_the_engine_and_its_id() -> None:
    s = scheduler(seed=99)
    s.add(request(4, prompt=[1], n=2))
    s.add(request(5, prompt=[2]))
    first, _ = step(s)
    binds = [row.bind for row in (*first.rows, *next_plan(s).rows) if row.bind is not None]
    base = mix(99 ^ mix(4))
    assert [bind.seed for bind in binds] == [base, mix(99 ^ mix(5)), choice_seed(base, 1)]
    assert len({bind.seed for bind in binds}) == 3


@pytest.mark.parametrize(
    ("params", "history"),
    [
        pytest.param({}, (), id="nothing"),
        pytest.param({"repetition_penalty": 1.5}, (1, 2, 3, 4), id="counts"),
        pytest.param({"presence_penalty": 1.0}, (1, 2, 3, 4), id="counts of the output"),
        pytest.param({"frequency_penalty": -1.0}, (1, 2, 3, 4), id="counts of each"),
    ],
)
def test_a_slot_that_counts_tokens_gets_those_it_is_not_fed(
    params: dict[str, Any], history: tuple[int, ...]
) -> None:
    s = scheduler()
    s.add(request(0, prompt=[1, 2, 3, 4, 5]))
    step(s)
    s.add(request(1, prompt=[1, 2, 3, 4, 6], **params))
    bind = next_plan(s).rows[1].bind
    assert bind is not None
    assert bind.history == history


def test_a_slot_that_scores_the_prompt_gets_all_of_it() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    s.add(request(0, prompt=range(6), prompt_logprobs=0))
    bind = next_plan(s).rows[0].bind
    assert bind is not None
    assert bind.history == (0, 1, 2, 3, 4, 5)


def test_equal_calls_give_equal_plans() -> None:
    logs = []
    for _ in range(2):
        s = pressed_scheduler(blocks=8)
        s.add(request(2, prompt=[1, 2, 5], n=2, max_tokens=4))
        logs.append(serve(s, hash_model(s), depth=2).plans)
    assert logs[0] == logs[1]
    assert repr(logs[0]) == repr(logs[1])


# Chunks.


def test_a_chunk_shares_its_plan_with_the_decodes() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    s.add(request(0, prompt=[1, 2, 3]))
    step(s)
    s.add(request(1, prompt=range(20)))
    plans = [step(s)[0] for _ in range(4)]
    assert [row_spans(plan) for plan in plans] == [
        [(0, 3, 4), (1, 0, 7)],
        [(0, 4, 5), (1, 7, 14)],
        [(0, 5, 6), (1, 14, 20)],
        [(0, 6, 7), (1, 20, 21)],
    ]


def test_only_the_last_chunk_samples_and_only_the_first_binds() -> None:
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=4, block_size=4)
    s.add(request(0, prompt=range(10)))
    chunks = [step(s)[0].rows[0] for _ in range(3)]
    assert [chunk.num_samples for chunk in chunks] == [0, 0, 1]
    assert [chunk.bind is None for chunk in chunks] == [False, True, True]
    assert [(chunk.keep, chunk.new_blocks) for chunk in chunks] == [
        (0, (0, 1, 2)),
        (3, ()),
        (3, ()),
    ]


def test_a_chunk_that_does_not_end_the_prompt_gains_nothing() -> None:
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=4)
    s.add(request(0, prompt=range(6)))
    assert step(s)[1] == []
    assert step(s)[1] == [Delta(0, 0, (7,))]


def test_a_prompt_of_ten_thousand_never_delays_a_stream_by_more_than_a_chunk() -> None:
    """Budget 512: one decode and 511 of the prompt per plan, so 20 plans, each with the decode."""
    s = scheduler(
        blocks=1024, block_size=16, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=16384
    )
    s.add(request(0, prompt=[1], max_tokens=100))
    step(s)
    s.add(request(1, prompt=[i % 256 for i in range(10_000)]))
    plans = [step(s)[0] for _ in range(20)]
    assert [plan.rows[0].end for plan in plans] == list(range(2, 22))
    assert [plan.num_tokens for plan in plans] == [512] * 19 + [1 + 10_000 - 19 * 511]
    assert plans[-1].rows[1].end == 10_000


def test_a_decode_never_waits_for_a_prompt() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    for i in range(3):
        s.add(request(i, prompt=[i + 1]))
    step(s)
    s.add(request(3, prompt=range(5)))
    for _ in range(4):
        plan, _ = step(s)
        assert row_tuples(plan) == [0, 1, 2, 3]
        assert plan.num_tokens == 4


def test_several_prompts_share_the_budget_that_decodes_leave() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=10)
    s.add(request(0, prompt=range(6)))
    s.add(request(1, prompt=range(10, 19)))
    assert row_spans(step(s)[0]) == [(0, 0, 6), (1, 0, 4)]
    assert row_spans(step(s)[0]) == [(0, 6, 7), (1, 4, 9)]


# Priority classes.


def test_started_requests_are_those_with_a_choice_that_the_last_plan_admits_first() -> None:
    """Sequence 1 resumes; of two choices one starts and the other forks a step later."""
    s = pressed_scheduler()
    started, admitted = [], []
    while s.has_work:
        if len(started) == 3:
            s.add(request(2, prompt=[5, 6], max_tokens=3, n=2))
        plan, _ = step(s)
        started.append(list(s.new_request_ids))
        admitted.append(event_ids(plan.admitted))
    assert s.schedule() is None and s.new_request_ids == []
    assert started == [[0, 1], [], [], [], [], [], [], [], [2], [2], [], []]
    assert admitted == [[0, 1], [], [], [], [], [1], [], [], [2], [3], [], []]
    assert (s.num_queried_tokens, s.num_cached_tokens) == (2 + 2 + 2 + 2, 1)


def test_urgent_classes_go_first_and_arrival_decides_within_one() -> None:
    s = scheduler(max_num_seqs=1)
    for i, priority in enumerate([1, 0, 0, 1, -1]):
        s.add(request(i, prompt=[1], priority=priority, max_tokens=1))
    assert [row_tuples(step(s)[0]) for _ in range(5)] == [[4], [1], [2], [0], [3]]


def test_a_request_that_does_not_fit_holds_back_those_after_it() -> None:
    """Otherwise a stream of short requests could starve a long one."""
    s = scheduler(blocks=8, block_size=4)
    s.add(request(0, prompt=range(16)))
    step(s)
    s.add(request(1, prompt=range(20, 36)))
    s.add(request(2, prompt=[1]))
    assert row_tuples(next_plan(s)) == [0]
    assert waiting_ids(s) == [1, 2]


# Preemption.


def test_one_is_preempted_when_blocks_run_out_and_ties_go_to_the_higher_id() -> None:
    s = pressed_scheduler()
    step(s)
    step(s)
    assert s.pool.num_free_blocks == 0
    plan, _ = step(s)
    assert plan.preempted == (Event(1, "2 blocks needed, 0 free"),)
    assert row_spans(plan) == [(0, 3, 4)]
    assert waiting_ids(s) == [1]


def test_victims_go_by_class_then_progress_then_id() -> None:
    s = scheduler(blocks=9, block_size=1, enable_prefix_caching=False)
    for i, priority in enumerate([0, 1, 0]):
        s.add(request(i, prompt=[1, 2], priority=priority, max_tokens=8))
    plans = [step(s)[0] for _ in range(4)]
    assert [plan.preempted for plan in plans] == [
        (),
        (),
        (Event(1, "3 blocks needed, 0 free"),),
        (Event(2, "2 blocks needed, 1 free"),),
    ]


def test_no_more_are_preempted_than_the_others_need() -> None:
    """Four runners hold two blocks each of eight; one victim's blocks are not enough for three."""
    s = scheduler(blocks=8, block_size=2, enable_prefix_caching=False)
    for i in range(4):
        s.add(request(i, prompt=[1, 2], max_tokens=9))
    plans = [step(s)[0] for _ in range(4)]
    assert [event_ids(plan.preempted) for plan in plans] == [[], [], [], [3, 2]]


def test_preemption_stops_once_there_are_as_many_blocks_as_are_needed() -> None:
    """Three runners hold two blocks each of six; one victim frees as many as the others need."""
    s = scheduler(blocks=6, block_size=2, enable_prefix_caching=False)
    for i in range(3):
        s.add(request(i, prompt=[1, 2], max_tokens=9))
    plans = [step(s)[0] for _ in range(4)]
    assert [event_ids(plan.preempted) for plan in plans] == [[], [], [], [2]]
    assert (row_tuples(plans[3]), s.pool.num_free_blocks) == ([0, 1], 0)


def test_a_preempted_sequence_is_computed_again_with_its_output() -> None:
    s = pressed_scheduler()
    for token in (21, 22, 23, 24, 25):
        plan, _ = step(s, token)
    plan, deltas = step(s, 26)
    assert plan.admitted == (Event(1, "resumed, 0 tokens shared"),)
    (row,) = plan.rows
    assert (row.epoch, row.start, row.tokens, row.keep) == (1, 0, (3, 4, 21, 22), 0)
    assert row.bind is not None
    assert row.bind.prompt_len == 2
    assert deltas == [Delta(1, 0, (26,))]


def test_a_preempted_sequence_resumes_ahead_of_newcomers() -> None:
    s = pressed_scheduler()
    step(s)
    step(s)
    step(s)
    s.add(request(2, prompt=[5], max_tokens=1))
    assert waiting_ids(s) == [1, 2]
    step(s)
    step(s)
    assert event_ids(next_plan(s).admitted) == [1, 2]


def test_a_preempted_sequence_resumes_ahead_of_an_older_one_that_never_ran() -> None:
    """The policy had admitted sequences 2 and 1 before sequence 0."""
    s = pressed_scheduler(max_num_seqs=2, policy=FCFS._replace(admit=admit_newest))
    s.add(request(2, prompt=[5, 6], max_tokens=5))
    plans = [step(s)[0] for _ in range(3)]
    assert [event_ids(plan.admitted) for plan in plans] == [[2, 1], [], []]
    assert event_ids(plans[2].preempted) == [2]
    assert waiting_ids(s) == [2, 0]


def test_a_step_that_preempts_admits_no_sequence() -> None:
    """The victim frees two blocks more than needed, and a new request of one block waits."""
    s = pressed_scheduler()
    step(s)
    step(s)
    s.add(request(2, prompt=[5], max_tokens=1, priority=-1))
    plan, _ = step(s)
    assert (event_ids(plan.preempted), event_ids(plan.admitted)) == ([1], [])
    assert s.pool.num_free_blocks == 2


def test_a_preempted_sequence_keeps_the_token_already_in_flight() -> None:
    s = pressed_scheduler()
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first, 21))
    third = next_plan(s)
    assert event_ids(third.preempted) == [1]
    assert s.commit(second, create_output(second, 22)) == [Delta(0, 0, (22,)), Delta(1, 0, (22,))]
    s.commit(third, create_output(third, 23))
    s.abort(0)
    assert next_plan(s).rows[0].tokens == (3, 4, 21, 22)


def test_a_preempted_sequence_waits_for_its_token_in_flight() -> None:
    s = pressed_scheduler()
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first, 21))
    third = next_plan(s)
    assert event_ids(third.preempted) == [1]
    s.abort(0)
    assert s.schedule() is None
    s.commit(second, create_output(second, 22))
    assert next_plan(s).rows[0].tokens == (3, 4, 21, 22)


def test_a_sequence_that_has_its_last_token_is_never_preempted() -> None:
    """Both reach their length in the step before the blocks would run out."""
    s = scheduler(blocks=6, block_size=1, enable_prefix_caching=False)
    s.add(request(0, prompt=[1, 2], max_tokens=2))
    s.add(request(1, prompt=[3, 4], max_tokens=3))
    step(s)
    _, deltas = step(s)
    assert endings(deltas) == [(0, LENGTH), (1, None)]
    plan, deltas = step(s)
    assert (plan.preempted, endings(deltas)) == ((), [(1, LENGTH)])


def test_an_end_in_flight_frees_blocks_before_a_preemption() -> None:
    """Sequence 0 gets its last token from the plan in flight; its three blocks are enough."""
    s = scheduler(blocks=6, block_size=1, enable_prefix_caching=False)
    s.add(request(0, prompt=[1, 2], max_tokens=2))
    s.add(request(1, prompt=[3, 4], max_tokens=5))
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    assert s.schedule() is None
    assert endings(s.commit(second, create_output(second))) == [(0, LENGTH), (1, None)]
    plan = next_plan(s)
    assert (row_spans(plan), plan.preempted) == ([(1, 3, 4)], ())


def test_only_sequences_without_a_block_wait_for_an_end_in_flight() -> None:
    """Sequences 1 and 2 need a block each and one is left; sequence 0 is about to free two."""
    s = scheduler(blocks=7, block_size=1, enable_prefix_caching=False)
    for i, max_tokens in enumerate([2, 5, 5]):
        s.add(request(i, prompt=[i + 1], max_tokens=max_tokens))
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    s.add(request(3, prompt=[9], max_tokens=1))
    third = next_plan(s)
    assert (row_tuples(third), third.preempted, third.admitted) == ([1], (), ())
    s.commit(second, create_output(second))
    assert row_spans(next_plan(s)) == [(1, 3, 4), (2, 2, 3)]


def test_a_prompt_alone_that_is_still_computed_is_no_end_in_flight() -> None:
    """Sequence 1 samples nothing, and has three of its eight tokens left: it is the victim."""
    s = scheduler(
        blocks=12,
        block_size=1,
        max_num_seqs=3,
        max_num_batched_tokens=3,
        enable_prefix_caching=False,
    )
    s.add(request(0, prompt=[1, 2], max_tokens=6))
    s.add(request(1, prompt=range(8), max_tokens=0))
    plans = [step(s)[0] for _ in range(4)]
    assert row_spans(plans[2]) == [(0, 3, 4), (1, 3, 5)]
    assert [event_ids(plan.preempted) for plan in plans] == [[], [], [], [1]]


def test_a_sequence_is_preempted_eight_times_and_then_has_every_block_it_can_need() -> None:
    """Each urgent request fits together with sequence 0 and outgrows the pool one step later."""
    s = scheduler(blocks=40, block_size=1, max_num_batched_tokens=64, enable_prefix_caching=False)
    s.add(request(0, prompt=[1], priority=1, max_tokens=38))
    step(s)
    for i in range(1, MAX_PREEMPTIONS + 1):
        s.add(request(i, prompt=[2] * (s.pool.num_free_blocks - 2), max_tokens=2))
        step(s)
        plan, _ = step(s)
        assert event_ids(plan.preempted) == [0]
        plan, _ = step(s)
        assert event_ids(plan.admitted) == [0]
    assert s.running[0].num_preemptions == 8
    assert len(plan.rows[0].new_blocks) == 38
    s.policy = FCFS._replace(preempt=lambda running, context: refuse_if_offered(running, 0))
    s.add(request(99, prompt=[3], max_tokens=4))
    step(s)
    step(s)
    plan, _ = step(s)
    assert (row_tuples(plan), plan.preempted) == ([0], (Event(9, "1 block needed, 0 free"),))


def test_a_prompt_alone_that_was_preempted_too_often_has_the_blocks_of_its_prompt() -> None:
    """Nothing follows the prompt, so its last position is the last that needs a block."""
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(5), max_tokens=0))
    s.waiting[0].num_preemptions = MAX_PREEMPTIONS
    assert next_plan(s).rows[0].new_blocks == (0, 1)


def refuse_if_offered(running: Sequence[Candidate], seq_id: int) -> Candidate:
    assert seq_id not in [candidate.id for candidate in running]
    return running[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_sequence_is_preempted_and_admitted_by_one_plan(depth: int) -> None:
    s = scheduler(blocks=10, block_size=1, enable_prefix_caching=False)
    for i, max_tokens in enumerate([2, 8, 5, 8]):
        s.add(request(i, prompt=[i + 1, i], max_tokens=max_tokens, ignore_eos=True))
    served = serve(s, hash_model(s), depth=depth)
    assert served.num_preemptions >= 2
    for plan in served.plans:
        assert not set(event_ids(plan.admitted)) & set(event_ids(plan.preempted))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_outputs_equal_those_of_each_request_alone(depth: int, caching: bool) -> None:
    """Twelve blocks of two for seven requests that need six each, on the hash model."""
    s = scheduler(
        blocks=12,
        block_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=7,
        enable_prefix_caching=caching,
    )
    requests = [
        request(i, prompt=range(i, i + 3), max_tokens=9, temperature=0.9, seed=i, ignore_eos=True)
        for i in range(7)
    ]
    for each in requests:
        s.add(each)
    m = hash_model(s)
    served = serve(s, m, depth=depth)
    assert served.num_preemptions >= 3
    for each in requests:
        assert tuple(served.tokens[each.id, 0]) == compute_expected(m, config(), each).tokens
    assert s.pool.num_used_blocks == 0


# Endings.


def test_a_sequence_retires_with_its_last_token_and_its_blocks_are_free() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1, 2], max_tokens=1))
    _, deltas = step(s)
    assert deltas == [Delta(0, 0, (7,), LENGTH)]
    assert (s.pool.num_used_blocks, s.running, s.has_work) == (0, {}, False)


def test_the_end_token_ends_an_output_early() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], max_tokens=100))
    step(s)
    assert step(s, 0)[1] == [Delta(0, 0, (0,), STOP, stop_token=0)]
    assert not s.has_work


def test_a_stop_id_ends_an_output() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], stop_token_ids=(5, 6)))
    assert step(s, 6)[1] == [Delta(0, 0, (6,), STOP, stop_token=6)]


def test_stop_beats_length() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], max_tokens=1))
    assert endings(step(s, 0)[1]) == [(0, STOP)]


def test_ignore_eos_makes_the_end_token_a_token_like_others() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], max_tokens=2, ignore_eos=True, stop_token_ids=(5,)))
    plan, deltas = step(s, 0)
    assert deltas == [Delta(0, 0, (0,))]
    assert plan.rows[0].bind is not None
    assert plan.rows[0].bind.end_ids == ()
    assert endings(step(s, 5)[1]) == [(0, STOP)]


@pytest.mark.parametrize("token", [0, 5])
def test_no_id_ends_an_output_before_min_tokens(token: int) -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], max_tokens=9, min_tokens=3, stop_token_ids=(5,)))
    assert [endings(step(s, token)[1]) for _ in range(3)] == [[(0, None)], [(0, None)], [(0, STOP)]]


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1, 2, 3], max_tokens=0))
    plan, deltas = step(s)
    assert (row_spans(plan), plan.rows[0].num_samples) == ([(0, 0, 3)], 0)
    assert deltas == [Delta(0, 0, (), LENGTH)]
    assert not s.has_work


def test_max_tokens_zero_is_not_planned_again_while_in_flight() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1, 2, 3], max_tokens=0))
    s.add(request(1, prompt=[4]))
    first, second = next_plan(s), next_plan(s)
    assert (row_tuples(first), row_tuples(second)) == ([0, 1], [1])


class StopAtToken:
    """A StopChecker that ends the output at one token."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.fed: list[int] = []

    def feed(self, token: int) -> bool:
        self.fed.append(token)
        return token == self.token


def test_a_checked_output_ends_when_its_stop_checker_says_so() -> None:
    s = scheduler(stop_checker=lambda request: StopAtToken(9))
    s.add(request(0, prompt=[1]))
    assert step(s, 8)[1] == [Delta(0, 0, (8,))]
    assert step(s, 9)[1] == [Delta(0, 0, (9,), STOP)]


def test_a_stop_checker_beats_length_and_an_end_id_beats_the_stop_checker() -> None:
    s = scheduler(stop_checker=lambda request: StopAtToken(9))
    s.add(request(0, prompt=[1], max_tokens=1))
    s.add(request(1, prompt=[2], max_tokens=1, stop_token_ids=(9,)))
    assert step(s, 9)[1] == [Delta(0, 0, (9,), STOP), Delta(1, 0, (9,), STOP, stop_token=9)]


def test_every_choice_has_a_separate_stop_checker_and_it_survives_preemption() -> None:
    watches: list[StopAtToken] = []

    def create_checker(request: Request) -> StopAtToken:
        watches.append(StopAtToken(99))
        return watches[-1]

    s = pressed_scheduler(stop_checker=create_checker)
    for token in (21, 22, 23, 24, 25, 26):
        step(s, token)
    assert [w.fed for w in watches] == [[21, 22, 23, 24, 25], [21, 22, 26]]


def test_a_row_planned_past_the_stop_is_dropped() -> None:
    """Six positions are computed, but the block that the second row filled is not published."""
    s = scheduler(block_size=2)
    s.add(request(0, prompt=[1, 2, 3]))
    first, second = next_plan(s), next_plan(s)
    assert endings(s.commit(first, create_output(first, 0))) == [(0, STOP)]
    assert s.commit(second, create_output(second)) == []
    assert s.pool.num_cached_blocks == 1
    check_block_pool(s.pool)


def test_a_plan_says_what_happened_since_the_plan_before_and_why() -> None:
    s = pressed_scheduler()
    plans = [step(s)[0]]
    s.add(request(2, prompt=[5], n=2, max_tokens=1))
    s.abort(2)
    plans += [step(s)[0] for _ in range(5)]
    assert [(plan.admitted, plan.preempted, plan.finished) for plan in plans] == [
        ((Event(0, "new, 0 tokens shared"), Event(1, "new, 0 tokens shared")), (), ()),
        ((), (), (Event(2, "abort"), Event(3, "abort"))),
        ((), (Event(1, "2 blocks needed, 0 free"),), ()),
        ((), (), ()),
        ((), (), ()),
        ((Event(1, "resumed, 0 tokens shared"),), (), (Event(0, "length"),)),
    ]


# Aborts.


def test_abort_while_waiting() -> None:
    s = scheduler(max_num_seqs=1)
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2]))
    step(s)
    assert s.abort(1) == [Delta(1, 0, finish=ABORT)]
    assert row_tuples(next_plan(s)) == [0]


def test_abort_between_chunks() -> None:
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=4)
    s.add(request(0, prompt=range(10)))
    step(s)
    assert s.abort(0) == [Delta(0, 0, finish=ABORT, cached_tokens=CachedTokens(written=4))]
    assert (s.pool.num_used_blocks, s.has_work, s.schedule()) == (0, False, None)


def test_abort_while_running() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    step(s)
    assert s.abort(0) == [Delta(0, 0, finish=ABORT)]
    assert (s.pool.num_used_blocks, s.has_work, s.schedule()) == (0, False, None)


def test_abort_in_flight_drops_the_result() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2]))
    first, second = next_plan(s), next_plan(s)
    assert s.abort(0) == [Delta(0, 0, finish=ABORT)]
    assert s.commit(first, create_output(first)) == [Delta(1, 0, (7,))]
    assert s.commit(second, create_output(second)) == [Delta(1, 0, (7,))]
    assert s.pool.num_used_blocks == 1


def test_abort_while_preempted_with_a_token_in_flight() -> None:
    s = pressed_scheduler()
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    next_plan(s)
    assert s.abort(1) == [Delta(1, 0, finish=ABORT)]
    assert s.commit(second, create_output(second)) == [Delta(0, 0, (7,))]


def test_abort_after_the_end_of_an_unknown_id_and_twice_changes_nothing() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], max_tokens=1))
    s.add(request(1, prompt=[2]))
    step(s)
    s.abort(1)
    before = scheduler_state(s)
    assert s.abort(0) == s.abort(1) == s.abort(77) == []
    assert scheduler_state(s) == before


def test_abort_ends_every_open_choice() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1], n=3))
    step(s)
    step(s)
    assert s.abort(0) == [Delta(0, choice, finish=ABORT) for choice in range(3)]
    assert (s.pool.num_used_blocks, s.has_work) == (0, False)


# The prefix cache.


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        pytest.param(range(10), 8, id="only the suffix is computed"),
        pytest.param(range(9), 8, id="one token is left"),
        pytest.param(range(8), 4, id="a prompt of full blocks computes its last one"),
        pytest.param(range(4), 0, id="a prompt of one full block shares nothing"),
        pytest.param([*range(7), 99, 8], 4, id="a change in the second block"),
        pytest.param([99, *range(1, 9)], 0, id="a change in the first block"),
    ],
)
def test_a_prefix_computed_before_is_shared(prompt: Sequence[int], start: int) -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9)))
    step(s)
    s.add(request(1, prompt=prompt))
    plan, _ = step(s)
    assert plan.rows[1].start == start
    assert plan.admitted == (Event(1, f"new, {start} tokens shared"),)
    assert s.num_cached_tokens == start
    assert plan.rows[1].new_blocks[: start // 4] == (0, 1)[: start // 4]


@pytest.mark.parametrize(
    ("prompt", "found", "written"),
    [
        pytest.param(range(10), 8, 0, id="the last block is not full"),
        pytest.param(range(8), 4, 0, id="the block that it computes is there already"),
        pytest.param(range(16), 8, 8, id="a longer prompt"),
        pytest.param([*range(7), 99, 8], 4, 4, id="a change in the second block"),
    ],
)
def test_blocks_of_a_prompt_that_are_new_to_the_cache_are_counted(
    prompt: Sequence[int], found: int, written: int
) -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9), max_tokens=1))
    (first,) = step(s)[1]
    assert first.cached_tokens == CachedTokens(written=8)
    s.add(request(1, prompt=prompt, max_tokens=5))
    deltas = [delta for _ in range(5) for delta in step(s)[1]]
    counts = CachedTokens(device=found, written=written)
    assert [each.cached_tokens for each in deltas] == [CachedTokens()] * 4 + [counts], (
        "blocks of the output do not count"
    )


def test_a_block_of_a_prompt_counts_once_where_it_is_found_lost_and_computed_again() -> None:
    """The first chunk finds one block and computes one. After the loss both are computed."""
    s = scheduler(block_size=4, max_num_batched_tokens=4, max_num_seqs=2)
    s.add(request(0, prompt=range(4), max_tokens=1))
    step(s)
    s.add(request(1, prompt=range(17), max_tokens=1))
    assert row_spans(step(s)[0]) == [(1, 4, 8)]
    s.void("a step failed")
    s.reset_prefix_cache()
    deltas = [delta for _ in range(5) for delta in step(s)[1]]
    assert [each.cached_tokens for each in deltas] == [CachedTokens(device=4, written=12)]


def test_a_block_that_is_found_and_lost_before_the_first_commit_is_not_written() -> None:
    s = scheduler(block_size=4, max_num_seqs=2)
    s.add(request(0, prompt=range(4), max_tokens=1))
    step(s)
    s.add(request(1, prompt=range(17), max_tokens=1))
    assert row_spans(next_plan(s)) == [(1, 4, 17)]
    s.void("a step failed")
    s.reset_prefix_cache()
    deltas = step(s)[1]
    assert [each.cached_tokens for each in deltas] == [CachedTokens(device=4, written=12)]


def test_a_block_of_a_prompt_counts_once_for_all_choices() -> None:
    """The second choice starts after the first has ended, and computes the lost blocks again."""
    s = scheduler(block_size=4, max_num_seqs=1)
    s.add(request(0, prompt=range(9), max_tokens=2, n=2))
    deltas = [delta for _ in range(2) for delta in step(s)[1]]
    s.reset_prefix_cache()
    plan, first_deltas = step(s)
    assert row_spans(plan) == [(1, 0, 9)]
    deltas += [*first_deltas, *step(s)[1]]
    counts = [each.cached_tokens for each in deltas if each.finish is not None]
    assert counts == [CachedTokens(written=8), CachedTokens()]


def test_without_prefix_caching_no_block_is_written() -> None:
    s = scheduler(enable_prefix_caching=False)
    s.add(request(0, prompt=range(9), max_tokens=1))
    assert step(s)[1][0].cached_tokens == CachedTokens()


def test_a_prefix_outlives_the_request_that_computed_it() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9), max_tokens=1))
    step(s)
    assert s.pool.num_used_blocks == 0
    s.add(request(1, prompt=range(9)))
    assert next_plan(s).rows[0].start == 8


def test_an_output_is_shared_as_a_prompt_is() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=[1, 2, 3], max_tokens=3))
    for token in (21, 22, 23):
        step(s, token)
    s.add(request(1, prompt=[1, 2, 3, 21, 22, 23, 24]))
    assert next_plan(s).rows[0].start == 4


@pytest.mark.parametrize(("salt", "start"), [("", 0), ("b", 0), ("a", 8)])
def test_only_requests_with_the_same_salt_share(salt: str, start: int) -> None:
    s = scheduler()
    s.add(request(0, prompt=range(9), cache_salt="a", max_tokens=1))
    step(s)
    s.add(request(1, prompt=range(9), cache_salt=salt))
    assert next_plan(s).rows[0].start == start


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    s = scheduler()
    s.add(request(0, prompt=range(9), max_tokens=1))
    step(s)
    s.add(request(1, prompt=range(9), prompt_logprobs=0))
    assert next_plan(s).rows[0].start == 0


def test_without_the_cache_nothing_is_shared() -> None:
    s = scheduler(enable_prefix_caching=False)
    for i in range(2):
        s.add(request(i, prompt=range(9), max_tokens=1))
    assert row_spans(step(s)[0]) == [(0, 0, 9), (1, 0, 9)]
    assert s.pool.num_cached_blocks == 0


def test_a_reset_cache_shares_nothing_computed_before() -> None:
    s = scheduler()
    s.add(request(0, prompt=range(9)))
    step(s)
    s.reset_prefix_cache()
    s.add(request(1, prompt=range(9)))
    assert next_plan(s).rows[1].start == 0


def test_a_block_is_shared_when_its_step_is_committed_and_not_before() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9)))
    first = next_plan(s)
    s.add(request(1, prompt=range(9)))
    second = next_plan(s)
    assert row_spans(second) == [(0, 9, 10)]
    s.commit(first, create_output(first))
    assert row_spans(next_plan(s)) == [(0, 10, 11), (1, 8, 9)]


def test_a_prefix_is_shared_chunk_by_chunk_while_its_owner_still_computes() -> None:
    """Blocks 0 and 1 are committed by the second chunk; the third is the owner's alone."""
    s = scheduler(block_size=4, max_num_seqs=4, max_num_batched_tokens=5)
    s.add(request(0, prompt=range(13), max_tokens=1))
    step(s)
    s.add(request(1, prompt=[0, 1, 2, 3, 4, 5, 6, 7, 99], max_tokens=1))
    assert row_spans(step(s)[0]) == [(0, 5, 10)]
    assert row_spans(step(s)[0]) == [(0, 10, 13), (1, 8, 9)]


def test_requests_after_one_that_waits_for_a_prefix_are_admitted() -> None:
    s = scheduler(block_size=4)
    for i, prompt in enumerate([range(9), range(9), range(20, 29)]):
        s.add(request(i, prompt=prompt))
    assert row_spans(next_plan(s)) == [(0, 0, 9), (2, 0, 9)]
    assert waiting_ids(s) == [1]


def test_passing_over_waiting_requests_is_bounded_by_the_batch_size() -> None:
    s = scheduler(block_size=4, max_num_seqs=2)
    for i in range(4):
        s.add(request(i, prompt=range(9)))
    s.add(request(4, prompt=[1]))
    assert row_tuples(next_plan(s)) == [0]
    assert waiting_ids(s) == [1, 2, 3, 4]


def test_a_hundred_requests_hold_their_common_prefix_once() -> None:
    """512 common tokens in blocks of 16 are 32 blocks; each request has one block of its own."""
    s = scheduler(blocks=4096, block_size=16, max_num_seqs=100, max_num_batched_tokens=1024)
    for i in range(100):
        s.add(request(i, prompt=[*range(200), *range(200), *range(112), i], max_tokens=4))
    assert row_spans(step(s)[0]) == [(0, 0, 513)]
    plan, _ = step(s)
    assert row_spans(plan) == [(0, 513, 514), *((i, 512, 513) for i in range(1, 100))]
    step(s)
    assert s.pool.peak_used_blocks == 32 + 100
    step(s)
    step(s)
    assert (s.has_work, s.pool.num_used_blocks) == (False, 0)


def test_requests_that_wait_for_a_prefix_compute_it_when_its_owner_is_aborted() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9)))
    s.add(request(1, prompt=range(9)))
    next_plan(s)
    s.abort(0)
    assert row_spans(next_plan(s)) == [(1, 0, 9)]


def test_a_block_computed_twice_is_held_twice_and_found_once() -> None:
    """A request for prompt logprobs computes a prefix that another one is computing."""
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9)))
    s.add(request(1, prompt=range(9), prompt_logprobs=0))
    plan, _ = step(s)
    assert row_spans(plan) == [(0, 0, 9), (1, 0, 9)]
    assert s.pool.num_used_blocks == 6
    s.abort(0)
    s.abort(1)
    assert s.pool.num_cached_blocks == 2
    check_block_pool(s.pool)


def test_a_prefix_that_two_compute_after_a_reset_is_given_up_by_both() -> None:
    """After the reset no request finds block 0: sequence 1 computes what 0 is still computing."""
    s = scheduler(block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    s.add(request(0, prompt=range(13)))
    step(s)
    s.reset_prefix_cache()
    s.add(request(1, prompt=range(13)))
    assert row_spans(next_plan(s)) == [(0, 8, 13), (1, 0, 3)]
    s.abort(1)
    s.abort(0)
    s.add(request(2, prompt=range(13)))
    assert row_spans(next_plan(s)) == [(2, 0, 8)]


def test_a_resumed_sequence_shares_its_remaining_cached_blocks() -> None:
    """The sequence had computed three blocks, and the survivor took the last of them."""
    s = pressed_scheduler(enable_prefix_caching=True)
    for _ in range(3):
        step(s)
    s.abort(0)
    plan = next_plan(s)
    assert plan.admitted == (Event(1, "resumed, 2 tokens shared"),)
    assert row_spans(plan) == [(1, 2, 4)]


# Forks.


def test_choices_share_the_prompt_and_copies_precede_their_rows() -> None:
    """Six tokens in blocks of four: block 0 is shared by all three, block 1 copied by two."""
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(6), n=3))
    first, _ = step(s)
    assert row_spans(first) == [(0, 0, 6)]
    plan, _ = step(s)
    assert plan.copies == (BlockCopy(1, 2), BlockCopy(1, 3))
    assert row_spans(plan) == [(0, 6, 7), (1, 5, 6), (2, 5, 6)]
    assert [row.new_blocks for row in plan.rows] == [(), (0, 2), (0, 3)]
    assert plan.admitted == (
        Event(1, "forked from 0, 5 tokens shared"),
        Event(2, "forked from 0, 5 tokens shared"),
    )
    assert s.pool.num_used_blocks == 4


def test_a_fork_at_a_block_edge_copies_nothing() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(5), n=2))
    step(s)
    plan, _ = step(s)
    assert (plan.copies, row_spans(plan)) == ((), [(0, 5, 6), (1, 4, 5)])


def test_a_prompt_of_one_token_is_forked_without_a_block() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=[1], n=2))
    step(s)
    plan, _ = step(s)
    assert (plan.copies, row_spans(plan)) == ((), [(0, 1, 2), (1, 0, 1)])


def test_choices_fork_without_the_prefix_cache_too() -> None:
    s = scheduler(block_size=4, enable_prefix_caching=False)
    s.add(request(0, prompt=range(8), n=2))
    step(s)
    plan, _ = step(s)
    assert (plan.copies, row_spans(plan)) == ((BlockCopy(1, 3),), [(0, 8, 9), (1, 7, 8)])


def test_choices_wait_for_the_commit_of_their_prompt() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    s.add(request(0, prompt=range(6), n=2))
    step(s)
    second, third = next_plan(s), next_plan(s)
    assert (row_spans(second), row_spans(third)) == ([(0, 4, 6)], [(0, 6, 7)])
    s.commit(second, create_output(second))
    assert row_spans(next_plan(s)) == [(0, 7, 8), (1, 5, 6)]


def test_a_fork_waits_for_blocks_as_others_do() -> None:
    """Three blocks of two: the parent holds two, its child needs one and one must stay free."""
    s = scheduler(blocks=3, block_size=2)
    s.add(request(0, prompt=[1, 2, 3], n=2, max_tokens=2))
    step(s)
    assert row_tuples(step(s)[0]) == [0]
    assert row_spans(next_plan(s)) == [(1, 2, 3)]


def test_a_fork_needs_blocks_only_for_unshared_positions() -> None:
    """Four blocks of two: as above, and one stays free."""
    s = scheduler(blocks=4, block_size=2)
    s.add(request(0, prompt=[1, 2, 3], n=2, max_tokens=2))
    step(s)
    assert row_spans(next_plan(s)) == [(0, 3, 4), (1, 2, 3)]


def test_a_choice_whose_siblings_have_ended_computes_its_prompt_itself() -> None:
    s = scheduler(enable_prefix_caching=False)
    s.add(request(0, prompt=[1, 2], n=2, max_tokens=3))
    assert row_spans(step(s, 0)[0]) == [(0, 0, 2)]  # its first token is the end
    assert row_spans(step(s)[0]) == [(1, 0, 2)]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_choices_of_one_token_do_not_wait_for_a_sibling_that_ends(max_tokens: int) -> None:
    """Each choice ends with the step that computes the prompt, so none could ever fork from it."""
    s = scheduler(enable_prefix_caching=False)
    s.add(request(0, prompt=[1, 2], n=4, max_tokens=max_tokens))
    assert row_spans(next_plan(s)) == [(choice, 0, 2) for choice in range(4)]


def test_a_request_whose_stop_checker_cannot_be_made_leaves_nothing() -> None:
    calls: list[int] = []

    def create_checker(request: Request) -> StopChecker | None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no checker")
        return None

    s = Scheduler(config(), 300, (0,), create_stop_checker=create_checker)
    with pytest.raises(ValueError, match="no checker"):
        s.add(request(0, prompt=[1], n=2))
    assert (s.has_work, s.waiting, s.requests) == (False, [], {})


@pytest.mark.parametrize("split", [Split(0, (1.0,)), Split(0.0, (1,))])  # type: ignore[arg-type]
def test_a_split_counts_in_whole_tokens(split: Split) -> None:
    s = scheduler(policy=FCFS._replace(split=lambda budget, num_decodes, filling, context: split))
    s.add(request(0, prompt=[1, 2]))
    with pytest.raises(PolicyError, match="Return a Split within these"):
        s.schedule()


def test_the_copy_of_a_fork_is_planned_at_once_though_the_fork_computes_later() -> None:
    """The policy delays the fork; then it is aborted, and its blocks leave the pool."""
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(6), n=2))
    step(s)
    s.policy = FCFS._replace(admit=lambda waiting, context: None)
    in_flight = next_plan(s)
    s.policy = FCFS._replace(split=lambda budget, num_decodes, filling, context: Split(0, (0,)))
    copying = next_plan(s)
    assert (copying.rows, copying.copies) == ((), (BlockCopy(1, 2),))
    s.abort(0)
    s.commit(in_flight, create_output(in_flight))
    s.commit(copying, create_output(copying))
    s.policy = FCFS
    s.add(request(1, prompt=[1], max_tokens=1))
    s.resize(1)
    assert next_plan(s).copies == ()


@pytest.mark.parametrize("depth", [1, 2])
def test_forked_choices_equal_those_of_each_alone(depth: int) -> None:
    """Nine blocks for five choices that need three each: forks, copies and preemptions."""
    s = scheduler(blocks=9, block_size=4, max_num_batched_tokens=9)
    new_request = request(
        0, prompt=range(6), n=5, max_tokens=7, temperature=1.0, seed=3, ignore_eos=True
    )
    s.add(new_request)
    m = hash_model(s)
    served = serve(s, m, depth=depth)
    assert served.num_preemptions > 0
    assert any(plan.copies for plan in served.plans)
    for choice in range(5):
        assert (
            tuple(served.tokens[0, choice])
            == compute_expected(m, config(), new_request, choice).tokens
        )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("admit", [FCFS.admit, admit_newest])
def test_prompt_logprobs_come_once_and_whole(admit: Any, depth: int) -> None:
    """Chunks, preemptions and two choices, of which either may be admitted first."""
    policy = FCFS._replace(admit=admit)
    s = scheduler(blocks=10, block_size=2, max_num_seqs=3, max_num_batched_tokens=4, policy=policy)
    requests = [
        request(i, prompt=range(i, i + 7), n=2, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
        for i in range(3)
    ]
    for each in requests:
        s.add(each)
    m = hash_model(s)
    served = serve(s, m, depth=depth)
    assert served.num_preemptions > 0
    for each in requests:
        scores = compute_expected(m, config(), each).prompt_logprobs
        assert tuple(served.prompt_logprobs[each.id, 0]) == scores
        assert served.prompt_logprobs[each.id, 1] == []


def test_prompt_logprobs_of_a_prompt_alone_come_with_its_ending() -> None:
    s = scheduler()
    new_request = request(0, prompt=range(5), max_tokens=0, prompt_logprobs=2)
    s.add(new_request)
    m = hash_model(s)
    plan = next_plan(s)
    scores = compute_expected(m, config(), new_request).prompt_logprobs
    assert len(scores) == 4
    assert s.commit(plan, m.forward(plan).result()) == [
        Delta(0, 0, (), LENGTH, prompt_logprobs=scores, cached_tokens=CachedTokens(written=4))
    ]


# Faults.


def test_a_late_or_repeated_result_gains_nothing() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    first = next_plan(s)
    second = next_plan(s)
    s.commit(first, create_output(first))
    before = scheduler_state(s)
    assert s.commit(first, create_output(first)) == []
    assert scheduler_state(s) == before
    assert s.commit(second, create_output(second)) == [Delta(0, 0, (7,))]


def test_plans_are_committed_in_their_order() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    next_plan(s)
    second = next_plan(s)
    with pytest.raises(AssertionError, match="plan 1 committed out of order"):
        s.commit(second, create_output(second))


def test_a_result_must_be_of_its_plan_and_have_its_rows() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    plan = next_plan(s)
    with pytest.raises(AssertionError, match="plan 0 got the output of 5"):
        s.commit(plan, StepOutput(5, (RowOutput((7,)),)))
    plan = next_plan(s)
    with pytest.raises(AssertionError, match="0 of 1 rows"):
        s.commit(plan, StepOutput(1, ()))


def test_an_error_in_a_row_ends_that_request_alone_and_publishes_nothing() -> None:
    s = scheduler(block_size=4)
    for i in range(2):
        s.add(request(i, prompt=[i, 1, 2, 3, 4]))
    plan = next_plan(s)
    output = StepOutput(0, (RowOutput(error="NaN"), RowOutput((7,))))
    assert s.commit(plan, output) == [
        Delta(0, 0, finish=ERROR, error="NaN"),
        Delta(1, 0, (7,)),
    ]
    assert s.pool.num_cached_blocks == 0
    s.add(request(2, prompt=[0, 1, 2, 3, 4]))
    assert row_spans(next_plan(s)) == [(1, 5, 6), (2, 0, 5)]


def test_an_error_in_a_chunk_ends_its_request() -> None:
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    s.add(request(0, prompt=[1, 2, 3]))
    deltas = s.commit(next_plan(s), StepOutput(0, (RowOutput(error="NaN"),)))
    assert errors(deltas) == [(0, "NaN")]


@pytest.mark.parametrize("tokens", [(), (7, 7)])
def test_a_row_with_another_number_of_tokens_ends_its_request(tokens: tuple[int, ...]) -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    deltas = s.commit(next_plan(s), StepOutput(0, (RowOutput(tokens),)))
    assert errors(deltas) == [(0, f"the model gave {len(tokens)} tokens, 1 were planned")]
    assert not s.has_work


def test_a_chunk_that_samples_ends_its_request() -> None:
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    s.add(request(0, prompt=[1, 2, 3]))
    deltas = s.commit(next_plan(s), StepOutput(0, (RowOutput((7,)),)))
    assert errors(deltas) == [(0, "the model gave 1 tokens, 0 were planned")]


@pytest.mark.parametrize("token", [257, -1])
def test_a_token_outside_the_vocabulary_ends_its_request(token: int) -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    step(s, 5)  # tokens after the first take a faster path
    _, deltas = step(s, token)
    assert deltas == [
        Delta(
            0,
            0,
            finish=ERROR,
            error=f"the model sampled token {token}, its vocabulary has 257",
        )
    ]


def test_the_last_token_of_the_vocabulary_is_a_token() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    assert step(s, 256)[1] == [Delta(0, 0, (256,))]


class BrokenStopChecker:
    """A StopChecker that fails."""

    def feed(self, token: int) -> bool:
        raise ValueError("no text")


def test_a_stop_checker_that_fails_ends_its_request_alone() -> None:
    s = scheduler(stop_checker=lambda each: BrokenStopChecker() if each.params.stop else None)
    s.add(request(0, prompt=[1], stop="x"))
    s.add(request(1, prompt=[2]))
    assert step(s)[1] == [
        Delta(0, 0, finish=ERROR, error="stop strings: ValueError('no text')"),
        Delta(1, 0, (7,)),
    ]


class CountingMatcher:
    """A GrammarMatcher whose mask is the number of tokens fed, and which ends with token 9."""

    def __init__(self) -> None:
        self.mask = b"\0"

    def feed(self, token: int) -> bool:
        if token == 13:
            raise ValueError("no next token")
        self.mask = bytes((self.mask[0] + 1,))
        return token == 9

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        return [bytes((self.mask[0] + count,)) for count, _ in enumerate(drafts, 1)]


def matcher_scheduler(**numbers: Any) -> Scheduler:
    """Return a scheduler in which requests of min_p 1 have a matcher, and others have none."""
    return scheduler(matcher=lambda params: CountingMatcher() if params.min_p else None, **numbers)


def masks(plan: StepPlan) -> list[tuple[int, bytes | None]]:
    return [(row.seq_id, row.masks[0] if row.masks else None) for row in plan.rows]


def test_a_row_has_the_mask_that_all_tokens_before_it_give() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1], min_p=1.0))
    s.add(request(1, prompt=[2]))
    assert [masks(step(s)[0]) for _ in range(3)] == [
        [(0, b"\0"), (1, None)],
        [(0, b"\1"), (1, None)],
        [(0, b"\2"), (1, None)],
    ]


def test_a_chunk_that_samples_nothing_has_no_mask() -> None:
    s = matcher_scheduler(max_num_batched_tokens=8)
    s.add(request(0, prompt=range(10), min_p=1.0))
    assert [masks(step(s)[0]) for _ in range(3)] == [[(0, None)], [(0, b"\0")], [(0, b"\1")]]


def late(plan: StepPlan) -> tuple[tuple[int, ...], list[tuple[int, bytes]]]:
    """Return the late rows of the plan, and the masks that it gives to those of the plan before."""
    return plan.late_rows, [tuple(each) for each in plan.late_masks]


def test_a_row_that_is_planned_ahead_of_the_token_before_gets_its_mask_from_the_next_plan() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2], min_p=1.0))
    first, second = next_plan(s), next_plan(s)
    assert (masks(first), late(first)) == ([(0, None), (1, b"\0")], ((), []))
    assert (masks(second), late(second)) == ([(0, None), (1, None)], ((1,), []))
    s.commit(first, create_output(first))
    third = next_plan(s)
    assert (masks(third), late(third)) == ([(0, None), (1, None)], ((1,), [(1, b"\1")]))
    s.commit(second, create_output(second))
    assert late(next_plan(s)) == ((1,), [(1, b"\2")])


def test_late_rows_of_a_mixed_plan_are_those_after_drafts_and_before_chunks() -> None:
    s = drafting_scheduler({0})
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2]))
    s.add(request(2, prompt=[3], min_p=1.0))
    s.add(request(3, prompt=[3, 4], min_p=1.0))
    step(s)
    first = next_plan(s)
    assert [len(row.drafts) for row in first.rows] == [1, 0, 0, 0] and first.late_rows == ()
    s.add(request(4, prompt=[4, 5, 6], min_p=1.0))
    second = next_plan(s)
    assert (row_tuples(second), late(second)) == ([1, 2, 3, 4], ((1, 2), []))
    assert masks(second)[3] == (4, b"\0")
    s.commit(first, create_output(first))
    third = next_plan(s)
    assert row_tuples(third) == [0, 1, 2, 3, 4]
    assert late(third) == ((2, 3, 4), [(1, b"\2"), (2, b"\2")])


@pytest.mark.parametrize("ending", ["abort", "complete", "failed matcher"])
def test_a_late_row_of_a_sequence_that_has_ended_gets_no_mask(ending: str) -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1], min_p=1.0))
    s.add(request(1, prompt=[2], min_p=1.0))
    first = next_plan(s)
    second = next_plan(s)
    assert second.late_rows == (0, 1)
    tokens = {"abort": 7, "complete": 9, "failed matcher": 13}
    rows = RowOutput((tokens[ending],)), RowOutput((7,))
    s.commit(first, StepOutput(first.step, rows))
    if ending == "abort":
        s.abort(0)
    third = next_plan(s)
    assert (row_tuples(third), late(third)) == ([1], ((0,), [(1, b"\1")]))
    rows = RowOutput(error="no mask"), RowOutput((7,))
    assert s.commit(second, StepOutput(second.step, rows)) == [Delta(1, 0, (7,))]


def test_the_masks_of_the_last_rows_come_in_a_plan_without_rows() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1], min_p=1.0, max_tokens=2))
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    third = next_plan(s)
    assert (third.rows, late(third)) == ((), ((), [(0, b"\1")]))
    assert endings(s.commit(second, create_output(second))) == [(0, LENGTH)]
    assert s.commit(third, create_output(third)) == []
    assert not s.has_work and not s.ledger


def test_masks_are_given_while_all_sequences_wait_for_drafts() -> None:
    """The second row of 0 is late when its first token comes, after which it may have drafts."""
    s = drafting_scheduler({0})
    s.add(request(0, prompt=[1], min_p=1.0))
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    assert s.running[0].num_drafts == 1
    third = next_plan(s)
    assert (third.rows, late(third)) == ((), ((), [(0, b"\1")]))
    assert s.schedule() is None
    s.commit(second, create_output(second))
    assert [(row.drafts, row.masks) for row in next_plan(s).rows] == [((5,), (b"\2", b"\3"))]


def test_a_preempted_sequence_gets_the_mask_of_the_row_in_flight() -> None:
    s = matcher_scheduler(blocks=4, block_size=1, enable_prefix_caching=False)
    s.add(request(0, prompt=[1], max_tokens=4))
    s.add(request(1, prompt=[2], min_p=1.0, max_tokens=4))
    first, second = next_plan(s), next_plan(s)
    assert second.late_rows == (1,)
    s.commit(first, create_output(first))
    third = next_plan(s)
    assert event_ids(third.preempted) == [1]
    assert (row_tuples(third), late(third)) == ([0], ((), [(1, b"\1")]))
    s.commit(second, create_output(second))
    assert s.waiting[0].tokens == [2, 7, 7]


def test_a_sequence_that_waits_again_gets_the_mask_of_the_row_in_flight() -> None:
    """A resize preempts it, between two plans."""
    s = matcher_scheduler(blocks=8, block_size=1)
    for id in range(3):
        s.add(request(id, prompt=[id + 1], min_p=1.0 if id == 2 else 0.0, max_tokens=4))
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    s.resize(5)
    assert waiting_ids(s) == [2]
    assert late(next_plan(s)) == ((), [(2, b"\1")])
    s.commit(second, create_output(second))
    assert s.sequences[2].tokens == [3, 7, 7]


def test_a_voided_plan_gets_no_masks() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1], min_p=1.0))
    first, _ = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    s.void("boom")
    again = next_plan(s)
    assert (masks(again), late(again)) == ([(0, b"\1")], ((), []))


# Waiting for a commit.


class Guess:
    """A Proposer of token 5 for some requests."""

    def __init__(self, request_ids: Collection[int]) -> None:
        self._request_ids = request_ids

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        return (5,)[:max_drafts] if request_id in self._request_ids else ()


def drafting_scheduler(request_ids: Collection[int], **numbers: Any) -> Scheduler:
    """Return a scheduler in which these requests have a draft a row after their first token.

    Requests of min_p 1 have a matcher.
    """
    chosen = config(speculation=Speculation(num_tokens=1, method="ngram"), **numbers)
    return Scheduler(
        chosen,
        VOCAB,
        (EOS,),
        create_matcher=lambda params: CountingMatcher() if params.min_p else None,
        drafter=create_drafter(chosen, Guess(request_ids)),
    )


def test_nothing_is_planned_when_half_of_the_tokens_wait() -> None:
    """Sequence 0 may gain two tokens, with its draft, and the others one each."""
    s = drafting_scheduler({0})
    for id in range(3):
        s.add(request(id, prompt=[1]))
    step(s)
    first = next_plan(s)
    assert s.schedule() is None
    s.commit(first, create_output(first))
    assert row_tuples(next_plan(s)) == [0, 1, 2]


def test_others_run_ahead_while_less_than_half_of_the_tokens_wait() -> None:
    s = drafting_scheduler({0})
    for id in range(4):
        s.add(request(id, prompt=[1]))
    step(s)
    assert (row_tuples(next_plan(s)), row_tuples(next_plan(s))) == ([0, 1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("late", range(5))
@pytest.mark.parametrize("count", [2, 3, 8])
def test_sequences_that_wait_do_not_take_turns(count: int, late: int) -> None:
    """They arrive in two halves, which with two plans in flight could alternate indefinitely.

    Every draft is rejected, so each row gives one token.
    """
    s = drafting_scheduler(range(count), blocks=200)
    for id in range(count // 2):
        s.add(request(id, prompt=[1], max_tokens=40))
    in_flight: deque[StepPlan] = deque()
    steps = sizes = 0
    coming = deque(range(count // 2, count))
    while s.has_work:
        while coming and steps >= late:
            s.add(request(coming.popleft(), prompt=[1], max_tokens=40))
        plan = s.schedule()
        if plan is not None:
            steps += 1
            sizes += len(plan.rows)
            in_flight.append(plan)
        if plan is None or len(in_flight) == 2:
            oldest = in_flight.popleft()
            rows = [RowOutput((7,), verified=(Verified(5),) * len(r.drafts)) for r in oldest.rows]
            s.commit(oldest, StepOutput(oldest.step, tuple(rows)))
    assert sizes == 40 * count
    assert steps <= 40 + late + 2


def test_a_sequence_whose_last_token_is_in_flight_delays_no_other() -> None:
    s = drafting_scheduler({0})
    s.add(request(0, prompt=[1], max_tokens=3))
    s.add(request(1, prompt=[2]))
    step(s)
    assert s.running[0].num_drafts == 1
    assert (row_tuples(next_plan(s)), row_tuples(next_plan(s))) == ([0, 1], [1])


def test_a_sequence_whose_last_token_is_in_flight_is_none_of_the_others() -> None:
    s = drafting_scheduler({0})
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2], max_tokens=2))
    s.add(request(2, prompt=[3]))
    s.add(request(3, prompt=[4]))
    step(s)
    first = next_plan(s)
    assert s.schedule() is None
    s.commit(first, create_output(first))
    assert row_tuples(next_plan(s)) == [0, 2, 3]


def test_a_sequence_that_is_gone_is_not_waited_for() -> None:
    s = drafting_scheduler({0})
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2]))
    step(s)
    next_plan(s)
    s.abort(0)
    assert row_tuples(next_plan(s)) == [1]


# Matchers.


def test_a_matcher_reports_when_an_output_is_complete() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1], min_p=1.0))
    s.add(request(1, prompt=[2]))
    step(s)
    assert step(s, 9)[1] == [Delta(0, 0, (9,), FinishReason.STOP), Delta(1, 0, (9,))]
    assert row_tuples(next_plan(s)) == [1]


def test_a_matcher_that_fails_ends_its_request_alone() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1], min_p=1.0))
    s.add(request(1, prompt=[2]))
    assert step(s, 13)[1] == [
        Delta(0, 0, finish=ERROR, error="structure: ValueError('no next token')"),
        Delta(1, 0, (13,)),
    ]


def test_a_preempted_sequence_resumes_with_the_mask_it_had() -> None:
    s = matcher_scheduler(blocks=4, block_size=1, enable_prefix_caching=False)
    s.add(request(0, prompt=[1], max_tokens=4))
    s.add(request(1, prompt=[2], min_p=1.0, max_tokens=4))
    row_masks = []
    while s.has_work:
        row_masks += [mask for seq_id, mask in masks(step(s)[0]) if seq_id == 1]
    assert s.num_preemptions == 1
    assert row_masks == [b"\0", b"\1", b"\2", b"\3"]


def test_each_choice_has_a_separate_matcher() -> None:
    s = matcher_scheduler()
    s.add(request(0, prompt=[1, 2], min_p=1.0, n=2))
    step(s)
    step(s)
    assert masks(next_plan(s)) == [(0, b"\2"), (1, b"\1")]


def test_a_voided_plan_is_computed_again_under_a_new_epoch() -> None:
    s = scheduler(block_size=4)
    s.add(request(0, prompt=[1, 2, 3, 4, 5]))
    plan = next_plan(s)
    assert s.void("boom") == []
    assert s.commit(plan, create_output(plan)) == []
    again = next_plan(s)
    assert again.preempted == (Event(0, "boom"),)
    assert [(row.epoch, row.start, row.end, row.keep) for row in again.rows] == [(1, 0, 5, 0)]
    assert again.rows[0].bind == plan.rows[0].bind


def test_a_sequence_voided_twice_ends_with_the_error() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    next_plan(s)
    s.void("first")
    next_plan(s)
    assert s.void("second") == [Delta(0, 0, finish=ERROR, error="second")]
    assert (s.has_work, s.pool.num_used_blocks) == (False, 0)


def test_a_void_leaves_waiting_sequences_unchanged() -> None:
    s = scheduler(max_num_seqs=1)
    s.add(request(0, prompt=[1]))
    s.add(request(1, prompt=[2]))
    next_plan(s)
    s.void("first")
    next_plan(s)
    assert errors(s.void("second")) == [(0, "second")]
    assert row_tuples(next_plan(s)) == [1]
    assert s.void("third") == []


def test_a_void_drops_the_token_in_flight_of_a_preempted_sequence() -> None:
    s = pressed_scheduler()
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first, 21))
    next_plan(s)
    assert waiting_ids(s) == [1]
    s.void("boom")
    assert s.commit(second, create_output(second)) == []
    assert [row.tokens for row in next_plan(s).rows] == [(1, 2, 21)]
    s.abort(0)
    assert [row.tokens for row in next_plan(s).rows] == [(3, 4, 21)]


def test_a_sequence_that_only_waited_for_a_token_outlives_a_void() -> None:
    """Sequence 1 was preempted before the second fault: it was in no plan that failed."""
    s = pressed_scheduler()
    next_plan(s)
    s.void("first")
    first, second = next_plan(s), next_plan(s)
    s.commit(first, create_output(first))
    next_plan(s)
    assert waiting_ids(s) == [1]
    assert errors(s.void("second")) == [(0, "second")]
    assert s.commit(second, create_output(second)) == []
    assert [row.seq_id for row in next_plan(s).rows] == [1]


# Resizing.


def test_a_grown_pool_is_in_the_next_plan_and_admits_more() -> None:
    s = scheduler(blocks=2, block_size=4)
    s.add(request(0, prompt=range(4), max_tokens=2))
    step(s)
    with pytest.raises(NeverFits):
        s.add(request(1, prompt=range(20)))
    s.resize(8)
    s.add(request(1, prompt=range(20), max_tokens=2))
    plan = next_plan(s)
    assert (plan.num_blocks, row_tuples(plan)) == (8, [0, 1])


def test_a_shrunken_pool_preempts_the_holders_of_removed_blocks() -> None:
    """Sequence 0 holds block 0, sequence 1 blocks 1 and 2, sequence 2 block 3."""
    s = scheduler(blocks=8, block_size=4, enable_prefix_caching=False)
    for i, prompt in enumerate([range(2), range(6), range(3)]):
        s.add(request(i, prompt=prompt, max_tokens=2))
    step(s)
    s.resize(2)
    plan = next_plan(s)
    why = "pool resized to 2 blocks"
    assert plan.preempted == (Event(1, why), Event(2, why))
    assert (plan.num_blocks, row_tuples(plan)) == (2, [0])
    assert max(block for row in plan.rows for block in (0, *row.new_blocks)) < 2
    check_block_pool(s.pool)


def test_a_result_for_blocks_that_were_lost_publishes_nothing() -> None:
    """A chunk of sequence 1 is in flight when it loses its blocks; it gets others at once."""
    s = scheduler(blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=20)
    s.add(request(0, prompt=range(12), max_tokens=1))
    s.add(request(1, prompt=range(20, 29), max_tokens=1))
    first = next_plan(s)
    assert row_spans(first) == [(0, 0, 12), (1, 0, 8)]
    s.abort(0)
    s.resize(5)
    second = next_plan(s)
    assert [(row.epoch, row.start, row.end) for row in second.rows] == [(1, 0, 9)]
    assert s.commit(first, create_output(first)) == []
    s.add(request(2, prompt=range(20, 29), max_tokens=1))
    assert s.schedule() is None
    s.commit(second, create_output(second))
    assert row_spans(next_plan(s)) == [(2, 8, 9)]


def test_a_pool_cannot_shrink_below_what_a_live_request_needs_and_then_changes_nothing() -> None:
    s = scheduler(blocks=8, block_size=4)
    s.add(request(0, prompt=range(6), max_tokens=7))
    step(s)
    before = scheduler_state(s)
    with pytest.raises(NeverFits, match=r"request 0 needs 3 blocks, 2 were given. Give 3") as no:
        s.resize(2)
    assert no.value.field == "num_blocks"
    assert scheduler_state(s) == before
    s.resize(3)
    assert next_plan(s).num_blocks == 3


# Policies.


def test_admit_must_choose_a_waiting_sequence() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    step(s)
    s.add(request(1, prompt=[2]))
    s.policy = FCFS._replace(admit=lambda waiting, context: s.running[0])
    with pytest.raises(PolicyError, match=r"admit returned sequence 0. Return one of its"):
        s.schedule()


def test_a_refused_answer_of_admit_loses_no_request() -> None:
    """Admission passed over sequence 1 before the answer: its prefix is being computed."""
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9)))
    next_plan(s)
    s.add(request(1, prompt=range(9)))
    s.add(request(2, prompt=[5]))
    answers_of_admit = iter([1, 0])
    everyone = {sequence.id: sequence for sequence in [*s.waiting, *s.running.values()]}
    s.policy = FCFS._replace(admit=lambda waiting, context: everyone[next(answers_of_admit)])
    with pytest.raises(PolicyError, match="admit returned sequence 0"):
        s.schedule()
    assert waiting_ids(s) == [1, 2]
    assert s.abort(1) == [Delta(1, 0, finish=ABORT)]


def test_a_policy_that_raises_loses_no_request() -> None:
    """The second call of admit raises, after sequence 1 was passed over."""
    s = scheduler(block_size=4)
    s.add(request(0, prompt=range(9)))
    next_plan(s)
    s.add(request(1, prompt=range(9)))
    s.add(request(2, prompt=[5]))
    first_answer = iter([s.waiting[0]])

    def admit(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
        for candidate in first_answer:
            return candidate
        raise ZeroDivisionError

    s.policy = FCFS._replace(admit=admit)
    with pytest.raises(PolicyError, match=r"raised ZeroDivisionError\(\) at .*test_scheduler.py"):
        s.schedule()
    assert waiting_ids(s) == [1, 2]


def test_an_error_of_a_call_names_the_function_of_the_policy() -> None:
    """The call fails, so no line of the function ran."""
    s = scheduler(policy=FCFS._replace(admit=lambda waiting: waiting[0]))  # type: ignore[misc]
    s.add(request(0, prompt=[1]))
    with pytest.raises(PolicyError, match=r"raised TypeError\(.*\) at .*test_scheduler.py"):
        s.schedule()


@pytest.mark.parametrize("victim", ["waiting", "exempt", "none"])
def test_preempt_must_choose_an_offered_sequence(victim: str) -> None:
    s = pressed_scheduler()
    step(s)
    step(s)
    s.add(request(2, prompt=[5], max_tokens=1))
    s.running[0].num_preemptions = MAX_PREEMPTIONS
    choices: dict[str, Any] = {"waiting": s.waiting[0], "exempt": s.running[0], "none": None}
    s.policy = FCFS._replace(preempt=lambda running, context: choices[victim])
    with pytest.raises(PolicyError, match=r"preempt returned .* Return one of its"):
        s.schedule()


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(Split(2, (4,)), id="more decodes than there are"),
        pytest.param(Split(-1, (4,)), id="fewer decodes than none"),
        pytest.param(Split(1, (4, 0)), id="an empty chunk for no sequence"),
        pytest.param(Split(1, ()), id="a chunk too few"),
        pytest.param(Split(1, (-1,)), id="a negative chunk"),
        pytest.param(Split(1, (8,)), id="more than the budget"),
        pytest.param(Split(0, (4, 4)), id="a chunk for no sequence"),
        pytest.param(None, id="nothing"),
    ],
)
def test_split_must_stay_within_the_offer(split: Any) -> None:
    """A budget of eight, one decode, one prompt of twenty."""
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    s.add(request(0, prompt=[1]))
    step(s)
    s.add(request(1, prompt=range(20)))
    s.policy = FCFS._replace(split=lambda budget, num_decodes, filling, context: split)
    with pytest.raises(
        PolicyError, match=r"a budget of 8, decodes 1, pending \[20\]. Return a Split"
    ):
        s.schedule()


def test_a_chunk_cannot_be_longer_than_the_prompt() -> None:
    s = scheduler(
        policy=FCFS._replace(split=lambda budget, num_decodes, filling, context: Split(0, (4,)))
    )
    s.add(request(0, prompt=[1, 2, 3]))
    with pytest.raises(PolicyError, match="a budget of 64, decodes 0"):
        s.schedule()


def test_split_may_let_any_sequence_wait_a_step() -> None:
    s = scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    for i in range(2):
        s.add(request(i, prompt=[i + 1]))
    step(s)
    s.add(request(2, prompt=range(20)))
    s.policy = FCFS._replace(split=lambda budget, num_decodes, filling, context: Split(1, (0,)))
    assert row_spans(next_plan(s)) == [(0, 1, 2)]


def test_a_policy_that_never_admits_is_refused() -> None:
    s = scheduler(policy=FCFS._replace(admit=lambda waiting, context: None))
    s.add(request(0, prompt=[1]))
    with pytest.raises(PolicyError, match="1 requests wait, 0 run, and the policy gives none"):
        s.schedule()


def test_a_policy_that_spends_nothing_is_refused_when_nothing_is_in_flight() -> None:
    s = scheduler()
    s.add(request(0, prompt=[1]))
    first = next_plan(s)
    s.add(request(1, prompt=[2, 3]))
    s.policy = FCFS._replace(split=lambda budget, num_decodes, filling, context: Split(0, (0,)))
    assert s.schedule() is None
    s.commit(first, create_output(first))
    with pytest.raises(PolicyError, match="0 requests wait, 2 run, and the policy gives none"):
        s.schedule()


@pytest.mark.parametrize("refused", ["split", "admit"])
def test_a_fork_admitted_when_the_policy_is_refused_is_admitted_again(refused: str) -> None:
    """No plan has its copy, so its blocks do not have the expected content."""
    s = scheduler(block_size=4)
    m = hash_model(s)
    new_request = request(
        0, prompt=range(6), n=2, max_tokens=5, temperature=1.0, seed=1, ignore_eos=True
    )
    s.add(new_request)
    plan = next_plan(s)
    s.commit(plan, m.forward(plan).result())
    s.add(request(1, prompt=[9]))
    answers_of_admit = iter([s.waiting[0]])
    s.policy = (
        FCFS._replace(split=lambda budget, num_decodes, filling, context: Split(num_decodes, (99,)))
        if refused == "split"
        else FCFS._replace(admit=lambda waiting, context: next(answers_of_admit))
    )
    with pytest.raises(PolicyError):
        s.schedule()
    assert waiting_ids(s) == [1, 2]
    s.policy = FCFS
    served = serve(s, m, depth=1)
    for choice in range(2):
        tokens = tuple(served.tokens[0, choice])
        assert tokens == compute_expected(m, config(), new_request, choice).tokens[-len(tokens) :]


# Public state.


def test_plans_and_sequences_are_numbered_after_skipped_ids() -> None:
    s = scheduler()
    s.skip_seq_ids(1000)
    s.add(request(0, range(3), max_tokens=2))
    assert (s.next_step, s.num_free_slots) == (0, s.config.max_num_seqs)
    plan = next_plan(s)
    assert [row.seq_id for row in plan.rows] == [1000] == list(s.sequences)
    assert (s.next_step, s.num_free_slots) == (1, s.config.max_num_seqs - 1)


def test_a_sequence_prefills_until_its_prompt_is_planned() -> None:
    s = scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    s.add(request(0, range(3), max_tokens=2))
    step(s)
    assert s.is_prefilling(s.running[0])
    next_plan(s)
    assert not s.is_prefilling(s.running[0])
