"""The engine's step: schedule, forward, commit, on the hash model. Every choice ends exactly once.

Faults are those that the hash model can inject; its `forward` hook also records plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from forge.engine import Engine
from forge.errors import (
    ContextTooLong,
    DuplicateRequest,
    InvalidConfig,
    InvalidRequest,
    NeverFits,
    PolicyError,
)
from forge.models.hash import HashModel
from forge.models.paged import NO_FAULTS, FaultHooks
from forge.policy import FCFS, Policy
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.seam import StepPlan
from forge.tokenizer import ByteDetokenizer, ByteTokenizer, Tokenizer
from tests.core.builders import ServedRequests, check_block_pool, config, request
from tests.core.reference import compute_expected

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ABORT, ERROR = FinishReason.ABORT, FinishReason.ERROR
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def create_engine(
    *,
    faults: FaultHooks = NO_FAULTS,
    likely_tokens: Iterable[int] | None = None,
    tokenizer: Tokenizer | None = None,
    policy: Policy = FCFS,
    **numbers: Any,
) -> Engine:
    """Return an engine on a hash model of 257 tokens."""
    chosen = config(**numbers)
    m = HashModel(
        num_blocks=chosen.num_blocks,
        block_size=chosen.block_size,
        likely_tokens=None if likely_tokens is None else tuple(likely_tokens),
        faults=faults,
    )
    return Engine(m, chosen, tokenizer, policy)


def expected_tokens(e: Engine, request: Request, choice: int = 0) -> list[int]:
    assert isinstance(e.model, HashModel)
    return list(compute_expected(e.model, e.config, request, choice, tokenizer=e.tokenizer).tokens)


def run_requests(e: Engine, *requests: Request) -> ServedRequests:
    """Submit the requests, then step until the engine has no work."""
    for each in requests:
        e.submit(each)
    result = ServedRequests()
    for _ in range(1000):
        if not e.has_work:
            break
        result.add(e.step())
        check_block_pool(e.scheduler.pool)
    assert not e.has_work
    assert e.scheduler.pool.num_used_blocks == 0
    return result


def raise_at(*steps: int) -> Callable[[StepPlan], Any]:
    """Return a hook that raises for the plans of these steps."""

    def fault(plan: StepPlan) -> Mapping[int, str]:
        if plan.step in steps:
            raise RuntimeError("device")
        return {}

    return fault


def raise_always(plan: StepPlan) -> Any:
    raise RuntimeError("device")


# Outputs.


@DEPTHS
def test_a_request_gets_the_tokens_the_model_gives_it_alone(depth: int) -> None:
    e = create_engine(depth=depth)
    req = request(0, prompt=[1, 2, 3], max_tokens=12, ignore_eos=True)
    served = run_requests(e, req)
    assert served.tokens == {(0, 0): expected_tokens(e, req)}
    assert served.finish == {(0, 0): LENGTH}


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_many_requests_under_pressure_get_what_each_gets_alone(depth: int, caching: bool) -> None:
    """Ten requests that need five blocks each share eleven, on four rows, in small chunks."""
    plans: list[StepPlan] = []
    e = create_engine(
        faults=FaultHooks(forward=plans.append),
        blocks=11,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        depth=depth,
        enable_prefix_caching=caching,
    )
    requests = [
        request(i, prompt=range(i, i + 4), max_tokens=7, temperature=0.8, seed=i, ignore_eos=True)
        for i in range(10)
    ]
    served = run_requests(e, *requests)
    assert sum(len(plan.preempted) for plan in plans) >= 3
    assert served.tokens == {(each.id, 0): expected_tokens(e, each) for each in requests}


def test_output_and_plans_are_the_same_in_every_engine() -> None:
    logs, outputs = [], []
    for _ in range(2):
        plans: list[StepPlan] = []
        e = create_engine(faults=FaultHooks(forward=plans.append), blocks=10, block_size=2, depth=2)
        requests = [request(i, prompt=[i + 1], temperature=1.0, max_tokens=9) for i in range(5)]
        outputs.append(run_requests(e, *requests).tokens)
        logs.append(plans)
    assert outputs[0] == outputs[1]
    assert logs[0] == logs[1]


def test_depth_changes_no_token_where_outputs_end_by_themselves() -> None:
    """The model ends often: it samples from three tokens, one of them the end."""
    outputs = []
    for depth in (1, 2):
        e = create_engine(likely_tokens=(0, 1, 2), depth=depth)
        requests = [request(i, prompt=[1, i + 1], max_tokens=30) for i in range(8)]
        served = run_requests(e, *requests)
        assert STOP in served.finish.values()
        outputs.append(served.tokens)
    assert outputs[0] == outputs[1]


@DEPTHS
def test_choices_of_one_request_are_drawn_separately_and_each_as_if_alone(depth: int) -> None:
    e = create_engine(depth=depth)
    req = request(0, prompt=range(6), n=4, temperature=1.0, max_tokens=6, ignore_eos=True)
    served = run_requests(e, req)
    assert served.tokens == {(0, i): expected_tokens(e, req, i) for i in range(4)}
    assert len({tuple(tokens) for tokens in served.tokens.values()}) == 4


def test_a_request_without_a_seed_depends_on_the_engines() -> None:
    req = request(0, prompt=[1], temperature=1.0, max_tokens=8)
    first, again, other = (run_requests(create_engine(seed=seed), req).tokens for seed in (1, 1, 2))
    assert first == again
    assert first != other


@DEPTHS
def test_a_resized_pool_changes_no_token(depth: int) -> None:
    plans: list[StepPlan] = []
    e = create_engine(faults=FaultHooks(forward=plans.append), blocks=20, block_size=2, depth=depth)
    requests = [request(i, prompt=range(i, i + 4), max_tokens=8, ignore_eos=True) for i in range(4)]
    for each in requests:
        e.submit(each)
    served = ServedRequests()
    for num_blocks in (20, 20, 9, 6, 30, 6):
        e.resize(num_blocks)
        served.add(e.step())
    while e.has_work:
        served.add(e.step())
    assert {plan.num_blocks for plan in plans} == {20, 9, 6, 30}
    assert any("resized" in event.why for plan in plans for event in plan.preempted)
    assert served.tokens == {(each.id, 0): expected_tokens(e, each) for each in requests}


# The loop.


def test_depth_one_commits_what_it_plans() -> None:
    e = create_engine(depth=1)
    req = request(0, prompt=[1], max_tokens=3, ignore_eos=True)
    e.submit(req)
    first, second, third = expected_tokens(e, req)
    assert [e.step() for _ in range(3)] == [
        [Delta(0, 0, (first,))],
        [Delta(0, 0, (second,))],
        [Delta(0, 0, (third,), LENGTH)],
    ]
    assert not e.has_work


def test_depth_two_plans_ahead_of_the_commit() -> None:
    plans: list[StepPlan] = []
    e = create_engine(faults=FaultHooks(forward=plans.append), depth=2)
    req = request(0, prompt=[1], max_tokens=2, ignore_eos=True)
    e.submit(req)
    first, second = expected_tokens(e, req)
    assert (e.step(), len(plans), e.num_steps) == ([], 1, 0)
    assert (e.step(), len(plans), e.num_steps) == ([Delta(0, 0, (first,))], 2, 1)
    assert (e.step(), len(plans), e.num_steps) == ([Delta(0, 0, (second,), LENGTH)], 2, 2)
    assert not e.has_work


@DEPTHS
def test_requests_share_decode_steps(depth: int) -> None:
    """32 requests of eight tokens take eight steps, not 256."""
    e = create_engine(blocks=256, max_num_seqs=32, max_num_batched_tokens=64, depth=depth)
    run_requests(e, *(request(i, prompt=[i + 1], max_tokens=8, ignore_eos=True) for i in range(32)))
    assert e.num_steps == 8


@DEPTHS
def test_two_streams_take_as_many_steps_as_one(depth: int) -> None:
    steps = []
    for count in (1, 2):
        e = create_engine(depth=depth)
        run_requests(
            e, *(request(i, prompt=[i + 1], max_tokens=9, ignore_eos=True) for i in range(count))
        )
        steps.append(e.num_steps)
    assert steps == [9, 9]


def test_an_idle_engine_has_nothing_to_do_and_counts_no_step() -> None:
    e = create_engine()
    assert not e.has_work
    assert e.step() == []
    assert e.num_steps == 0


def test_the_number_of_steps_grows_while_the_engine_makes_progress() -> None:
    e = create_engine(max_num_seqs=4, max_num_batched_tokens=4)
    e.submit(request(0, prompt=range(12), max_tokens=3, ignore_eos=True))
    counts = []
    while e.has_work:
        e.step()
        counts.append(e.num_steps)
    assert counts == [1, 2, 3, 4, 5]


# Faults of the model.


@DEPTHS
@pytest.mark.parametrize(
    "faults",
    [FaultHooks(forward=raise_at(2)), FaultHooks(result=raise_at(2))],
    ids=["forward", "result"],
)
def test_one_broken_step_changes_no_token(faults: FaultHooks, depth: int) -> None:
    e = create_engine(faults=faults, depth=depth)
    requests = [request(i, prompt=range(i, i + 6), max_tokens=7, ignore_eos=True) for i in range(3)]
    served = run_requests(e, *requests)
    assert served.tokens == {(each.id, 0): expected_tokens(e, each) for each in requests}
    assert set(served.finish.values()) == {LENGTH}


@pytest.mark.parametrize(
    "faults",
    [FaultHooks(forward=raise_at(1)), FaultHooks(result=raise_at(0))],
    ids=["forward", "result"],
)
def test_a_broken_step_voids_every_plan_in_flight(faults: FaultHooks) -> None:
    e = create_engine(faults=faults, depth=2)
    e.submit(request(0, prompt=[1, 2]))
    assert (e.step(), e.num_steps) == ([], 0)
    assert (e.step(), e.num_steps) == ([], 1)
    assert [sequence.tokens for sequence in e.scheduler.waiting] == [[1, 2]]
    assert (e.step(), e.num_steps) == ([], 1)
    assert len(e.scheduler.ledger) == 1


@DEPTHS
@pytest.mark.parametrize(
    "faults",
    [FaultHooks(forward=raise_always), FaultHooks(result=raise_always)],
    ids=["forward", "result"],
)
def test_a_model_that_always_fails_ends_every_choice_with_an_error(
    faults: FaultHooks, depth: int
) -> None:
    """`ServedRequests` refuses a second ending. Five requests and one more choice, two rows."""
    e = create_engine(faults=faults, max_num_seqs=2, depth=depth)
    errors = []
    for i in range(5):
        e.submit(request(i, prompt=[i + 1], n=2 if i == 3 else 1))
    served = ServedRequests()
    while e.has_work:
        deltas = e.step()
        errors += [delta.error for delta in deltas]
        served.add(deltas)
    assert set(served.finish) == {(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0)}
    assert errors == ["the model failed: RuntimeError('device')"] * 6
    assert e.num_steps <= 2 * 6 * depth


@DEPTHS
def test_a_broken_row_ends_its_request_alone(depth: int) -> None:
    def second_row(plan: StepPlan) -> Mapping[int, str]:
        return {1: "NaN"} if plan.step == 2 else {}

    e = create_engine(faults=FaultHooks(result=second_row), depth=depth)
    requests = [request(i, prompt=[i + 1], max_tokens=6, ignore_eos=True) for i in range(3)]
    served = run_requests(e, *requests)
    assert served.finish == {(0, 0): LENGTH, (1, 0): ERROR, (2, 0): LENGTH}
    assert served.tokens[0, 0] == expected_tokens(e, requests[0])
    assert served.tokens[1, 0] == expected_tokens(e, requests[1])[:2]
    assert served.tokens[2, 0] == expected_tokens(e, requests[2])


def test_the_engine_serves_on_after_a_fault() -> None:
    e = create_engine(faults=FaultHooks(forward=raise_at(0, 1)))
    assert run_requests(e, request(0, prompt=[1])).finish == {(0, 0): ERROR}
    req = request(1, prompt=[2], max_tokens=4, ignore_eos=True)
    assert run_requests(e, req).tokens == {(1, 0): expected_tokens(e, req)}


# Stop strings.


@DEPTHS
def test_a_stop_string_ends_an_output(depth: int) -> None:
    """The model writes letters a and b; the output ends with the token that completes "bb"."""
    tokenizer = ByteTokenizer()
    e = create_engine(tokenizer=tokenizer, likely_tokens=tokenizer.encode("ab"), depth=depth)
    requests = [
        request(i, prompt=[i + 1], max_tokens=40, stop=["bb"], min_tokens=i, ignore_eos=True)
        for i in range(6)
    ]
    served = run_requests(e, *requests)
    assert served.tokens == {(each.id, 0): expected_tokens(e, each) for each in requests}
    assert set(served.finish.values()) == {STOP}
    assert all(tokenizer.decode(tokens).endswith("bb") for tokens in served.tokens.values())


class BrokenTokenizer(ByteTokenizer):
    """A tokenizer whose detokenizer fails at the first token."""

    def create_detokenizer(self, previous: int | None = None) -> ByteDetokenizer:
        class Broken(ByteDetokenizer):
            def push(self, token: int) -> str:
                raise ValueError("no text")

        return Broken()


def test_a_detokenizer_that_fails_ends_its_request_alone() -> None:
    e = create_engine(tokenizer=BrokenTokenizer())
    req = request(1, prompt=[2], max_tokens=3, ignore_eos=True)
    e.submit(request(0, prompt=[1], stop="x"))
    e.submit(req)
    first, _, _ = expected_tokens(e, req)
    assert e.step() == [
        Delta(0, 0, finish=ERROR, error="stop strings: ValueError('no text')"),
        Delta(1, 0, (first,)),
    ]
    assert run_requests(e).finish == {(1, 0): LENGTH}


# Refusals.


@pytest.mark.parametrize("token", [257, -1, True, 1.0, None, "1"])
def test_a_prompt_names_tokens_of_the_model(token: Any) -> None:
    e = create_engine()
    with pytest.raises(InvalidRequest, match="is out of vocabulary: ids are below 257") as error:
        e.submit(Request(0, (1, token)))
    assert (error.value.field, error.value.code) == ("prompt", "token_out_of_range")
    assert not e.has_work


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias={257: 1.0})),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(5, 257))),
        ("stop_token_ids", SamplingParams(stop_token_ids=(257,))),
    ],
)
def test_parameters_name_tokens_of_the_model(field: str, params: SamplingParams) -> None:
    e = create_engine()
    with pytest.raises(
        InvalidRequest, match="Token ID 257 is out of vocabulary: ids are below 257"
    ) as error:
        e.submit(Request(0, (1,), params))
    assert (error.value.field, error.value.code) == (field, "token_out_of_range")
    assert not e.has_work


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_an_engine_limits_log_probabilities(field: str) -> None:
    def submit(max_logprobs: int, count: int, prompt_len: int = 2, **options: Any) -> None:
        # 2**18 tokens fit into large blocks of which few have to be made.
        size = {"block_size": 2**12, "max_model_len": 2**19, "blocks": 2**7}
        engine = Engine(
            HashModel(vocab_size=257, block_size=2**12, num_blocks=2**7),
            config(max_logprobs=max_logprobs, **size),
        )
        params = SamplingParams(**{field: count, "max_tokens": 9, **options})
        engine.submit(Request(0, (5,) * prompt_len, params))

    for limit, count in ((20, 20), (25, 25), (257, -1), (-1, -1), (-1, 257)):
        submit(limit, count)
    for limit, count, problem in (
        *((20, 21, "21 is more than 20"), (20, -1, "257 is more than 20")),
        (256, -1, "Give less, or start with --max-logprobs 257"),
    ):
        with pytest.raises(InvalidRequest, match=problem) as error:
            submit(limit, count)
        assert error.value.field == field
    too_many = {"max_tokens": 2**18} if field == "logprobs" else {"prompt_len": 2**18}
    submit(20, 20, **{**too_many})
    with pytest.raises(InvalidRequest, match="are more than 4194304"):
        submit(-1, 200, **too_many)
    if field == "logprobs":  # listed ids are many without any option
        listed = {"logprob_token_ids": range(128)}
        submit(20, 0, max_tokens=2**15, **listed)
        with pytest.raises(InvalidRequest, match="128 for each of 32769 tokens are more"):
            submit(20, 0, max_tokens=2**15 + 1, **listed)


def test_every_token_of_the_model_can_be_named() -> None:
    e = create_engine()
    params = SamplingParams(
        max_tokens=1, logit_bias={256: 1.0}, allowed_token_ids=(0, 256), stop_token_ids=(256,)
    )
    assert (0, 0) in run_requests(e, Request(0, (0, 256), params)).finish


def test_stop_strings_need_a_tokenizer() -> None:
    e = create_engine()
    with pytest.raises(InvalidRequest, match="stop: this engine has no tokenizer") as error:
        e.submit(request(0, prompt=[1], stop="x"))
    assert error.value.field == "stop"
    assert not e.has_work


@pytest.mark.parametrize("call", [Engine.check, Engine.submit])
def test_a_request_that_can_never_finish_is_refused(
    call: Callable[[Engine, Request], None],
) -> None:
    e = create_engine(blocks=4, block_size=4, max_model_len=18)
    with pytest.raises(ContextTooLong):
        call(e, request(0, prompt=range(4), max_tokens=15))
    with pytest.raises(NeverFits):
        call(e, request(0, prompt=range(4), max_tokens=14))
    call(e, request(0, prompt=range(4), max_tokens=13))


def test_a_check_promises_nothing() -> None:
    e = create_engine()
    e.check(request(0, prompt=[1]))
    assert not e.has_work


def test_a_live_id_is_refused_and_its_request_goes_on() -> None:
    e = create_engine()
    req = request(0, prompt=[1], max_tokens=4, ignore_eos=True)
    e.submit(req)
    with pytest.raises(DuplicateRequest):
        e.submit(request(0, prompt=[2]))
    assert run_requests(e).tokens == {(0, 0): expected_tokens(e, req)}


@pytest.mark.parametrize("token", [257, -1])
def test_end_ids_are_tokens_of_the_model(token: int) -> None:
    with pytest.raises(InvalidConfig, match=f"end_ids: {token} is not below the vocabulary") as no:
        create_engine(end_ids=(0, token))
    assert no.value.option == "end_ids"


@DEPTHS
def test_every_end_id_ends_an_output(depth: int) -> None:
    """Ids 5 and 256 join the model's own; the slot gets all three once."""
    plans: list[StepPlan] = []
    e = create_engine(
        faults=FaultHooks(forward=plans.append),
        likely_tokens=(5, 6, 256),
        end_ids=(5, 0, 256),
        depth=depth,
    )
    requests = [request(i, prompt=[i + 1, 3, 3, 3], max_tokens=50) for i in range(12)]
    served = run_requests(e, *requests)
    assert served.tokens == {(each.id, 0): expected_tokens(e, each) for each in requests}
    assert {tokens[-1] for tokens in served.tokens.values()} == {5, 256}
    assert plans[0].rows[0].bind is not None
    assert plans[0].rows[0].bind.end_ids == (0, 5, 256)


# Aborts.


@DEPTHS
def test_an_aborted_request_ends_once_at_the_next_step(depth: int) -> None:
    e = create_engine(depth=depth)
    req = request(1, prompt=[2], max_tokens=5, ignore_eos=True)
    e.submit(request(0, prompt=[1]))
    e.submit(req)
    served = ServedRequests()
    served.add(e.step())
    served.add(e.step())
    e.abort(0)
    e.abort(0)
    deltas = e.step()
    assert [d for d in deltas if d.request_id == 0] == [Delta(0, 0, finish=ABORT)]
    served.add(deltas)
    while e.has_work:
        served.add(e.step())
    assert served.finish == {(0, 0): ABORT, (1, 0): LENGTH}
    assert served.tokens[1, 0] == expected_tokens(e, req)


@DEPTHS
def test_an_engine_with_an_ending_to_report_has_work(depth: int) -> None:
    e = create_engine(depth=depth)
    e.submit(request(0, prompt=[1]))
    e.step()
    e.abort(0)
    assert e.has_work
    assert e.undelivered_deltas == (Delta(0, 0, finish=ABORT),)
    assert (e.is_ending(0), e.is_ending(1), e.num_uniform_steps(1)) == (True, False, 0)
    assert e.plans_in_flight == list(e.scheduler.ledger) and len(e.plans_in_flight) == depth - 1
    assert run_requests(e).finish == {(0, 0): ABORT}


def test_an_abort_before_the_first_step_and_of_every_choice() -> None:
    e = create_engine()
    e.submit(request(0, prompt=[1], n=2))
    e.abort(0)
    assert e.step() == [Delta(0, 0, finish=ABORT), Delta(0, 1, finish=ABORT)]
    assert (e.has_work, e.num_steps) == (False, 0)


def test_an_abort_of_an_unknown_or_ended_request_reports_nothing() -> None:
    e = create_engine()
    run_requests(e, request(0, prompt=[1], max_tokens=1))
    e.abort(0)
    e.abort(77)
    assert not e.has_work
    assert e.step() == []


def test_an_ending_is_reported_with_the_error_of_the_same_step() -> None:
    e = create_engine(faults=FaultHooks(forward=raise_at(0)))
    e.submit(request(0, prompt=[1]))
    e.submit(request(1, prompt=[2], max_tokens=1, ignore_eos=True))
    e.abort(0)
    assert e.step() == [Delta(0, 0, finish=ABORT)]
    assert run_requests(e).finish == {(1, 0): LENGTH}


def test_an_answer_of_the_policy_that_is_refused_loses_no_ending() -> None:
    e = create_engine(policy=FCFS._replace(admit=lambda waiting, context: None))
    e.submit(request(0, prompt=[1]))
    e.submit(request(1, prompt=[2]))
    e.abort(0)
    with pytest.raises(PolicyError):
        e.step()
    e.abort(1)
    assert run_requests(e).finish == {(0, 0): ABORT, (1, 0): ABORT}


class InterruptedModel(HashModel):
    """A model that is interrupted (Ctrl-C) while the results of some plans are awaited."""

    def __init__(self, at: set[int]) -> None:
        super().__init__(
            vocab_size=64, num_blocks=64, block_size=4, faults=FaultHooks(result=self._stop)
        )
        self._at = at

    def _stop(self, plan: StepPlan) -> Mapping[int, str]:
        if plan.step in self._at:
            raise KeyboardInterrupt
        return {}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_continues_after_an_interrupted_step(depth: int) -> None:
    """The caller gets the interrupt; the plans in flight are void and nothing is lost."""
    req = request(0, prompt=[1, 2, 3], max_tokens=6, ignore_eos=True)
    model = InterruptedModel({2})
    e = Engine(model, config(depth=depth))
    e.submit(req)
    tokens: list[int] = []
    interrupts = 0
    while e.has_work:
        try:
            tokens += [token for delta in e.step() for token in delta.tokens]
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert tuple(tokens) == compute_expected(model, config(), req).tokens


class ShortOutputModel(HashModel):
    """A model whose second output lacks a row."""

    def forward(self, plan: StepPlan) -> Any:
        step = super().forward(plan)
        if plan.step == 1:
            return step._replace(rows=step.rows[:-1])
        return step


def test_an_output_that_is_not_the_plans_is_a_broken_step() -> None:
    requests = [request(i, prompt=[i + 1, 2], max_tokens=5, ignore_eos=True) for i in range(2)]
    model = ShortOutputModel(vocab_size=64, num_blocks=64, block_size=4)
    e = Engine(model, config())
    for each in requests:
        e.submit(each)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    while e.has_work:
        for delta in e.step():
            tokens[delta.request_id] += delta.tokens
    for each in requests:
        assert tuple(tokens[each.id]) == compute_expected(model, config(), each).tokens


def test_an_id_is_free_again_once_its_ending_is_reported() -> None:
    e = create_engine()
    e.submit(request(7, prompt=[1]))
    e.abort(7)
    with pytest.raises(DuplicateRequest, match="request 7 is still ending"):
        e.submit(request(7, prompt=[1]))
    assert [delta.finish for delta in e.step()] == [ABORT]
    e.submit(request(7, prompt=[1]))


def test_a_range_is_served_as_the_same_tokens_in_a_tuple() -> None:
    served = [
        run_requests(
            create_engine(), Request(0, prompt, SamplingParams(max_tokens=5, seed=1))
        ).tokens
        for prompt in (range(3, 9), tuple(range(3, 9)))
    ]
    assert served[0] == served[1]


@pytest.mark.parametrize("prompt", [range(250, 258), range(257, 250, -1), range(-1, 3)])
def test_a_range_that_leaves_the_vocabulary_at_either_end_is_refused(prompt: range) -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"^prompt: Token ID (257|-1) is out of vocabulary: ids are below 257",
    ):
        create_engine().submit(Request(0, prompt))
