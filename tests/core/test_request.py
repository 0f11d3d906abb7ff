"""Request parameters: each limit, the message of its refusal, and the resulting value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import ForgeError, InvalidRequest
from forge.request import (
    CachedTokens,
    Delta,
    FinishReason,
    OutputWeights,
    Request,
    SamplingParams,
    TokenLogprob,
)
from tests.texts import ANY_CHARACTER

VALID_VALUES: list[tuple[str, Any]] = [
    ("n", 1),
    ("n", 128),
    ("temperature", 0),
    ("temperature", 5e-324),
    ("temperature", 1e-40),
    ("temperature", 2),
    ("temperature", 2.0),
    ("top_k", 0),
    ("top_k", 1),
    ("top_k", 2**31 - 1),
    ("top_p", 5e-324),
    ("top_p", 1),
    ("min_p", 0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 10),
    ("presence_penalty", -2.0),
    ("presence_penalty", 2),
    ("frequency_penalty", -2),
    ("frequency_penalty", 2.0),
    ("logit_bias", ()),
    ("logit_bias", ((0, -100.0),)),
    ("logit_bias", ((7, 100),)),
    ("logit_bias", tuple((token, 1.0) for token in range(1024))),
    ("allowed_token_ids", None),
    ("allowed_token_ids", (0,)),
    ("allowed_token_ids", tuple(range(1024))),
    ("seed", None),
    ("seed", 0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", 2**31 - 1),
    ("min_tokens", 0),
    ("min_tokens", 16),
    ("stop", ()),
    ("stop", tuple(f"s{index}" for index in range(16))),
    ("stop", ("x" * 1024,)),
    ("stop_token_ids", ()),
    ("stop_token_ids", tuple(range(1024))),
    ("ignore_eos", True),
    ("logprobs", None),
    ("logprobs", 0),
    ("logprobs", 20),
    ("logprob_token_ids", ()),
    ("prompt_logprobs", None),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
]

INVALID_VALUES: list[tuple[str, Any, str]] = [
    ("n", 0, "from 1 to 128"),
    ("n", -1, "from 1 to 128"),
    ("n", 129, "from 1 to 128"),
    ("n", 10**9, "from 1 to 128"),
    ("temperature", -0.0001, "from 0 to 2"),
    ("temperature", 2.0001, "from 0 to 2"),
    ("top_k", -2, "from -1 to 2147483647"),
    ("top_k", 2**31, "from -1 to 2147483647"),
    ("top_p", 0, "above 0"),
    ("top_p", 0.0, "above 0"),
    ("top_p", -5e-324, "from 0 to 1"),
    ("top_p", 1.0001, "from 0 to 1"),
    ("min_p", -0.0001, "from 0 to 1"),
    ("min_p", 1.0001, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 10"),
    ("repetition_penalty", 0.0099, "from 0.01 to 10"),
    ("repetition_penalty", 10.001, "from 0.01 to 10"),
    ("presence_penalty", -2.0001, "from -2 to 2"),
    ("presence_penalty", 2.0001, "from -2 to 2"),
    ("frequency_penalty", -2.0001, "from -2 to 2"),
    ("frequency_penalty", 2.0001, "from -2 to 2"),
    ("logit_bias", {0: 100.001}, "from -100 to 100"),
    ("logit_bias", {0: -100.001}, "from -100 to 100"),
    ("logit_bias", {-1: 1.0}, "ids from 0"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024"),
    ("allowed_token_ids", [], "one id or more"),
    ("allowed_token_ids", [-1], "ids from 0"),
    ("allowed_token_ids", range(1025), "at most 1024"),
    ("seed", -(2**63) - 1, "to 9223372036854775807"),
    ("seed", 2**63, "to 9223372036854775807"),
    ("max_tokens", -1, "from 0 to 2147483647"),
    ("max_tokens", 2**31, "from 0 to 2147483647"),
    ("min_tokens", -1, "from 0 to 16"),
    ("min_tokens", 17, "from 0 to 16"),
    ("stop", "", "a non-empty string"),
    ("stop", [""], "a non-empty string"),
    ("stop", ["a", ""], "a non-empty string"),
    ("stop", [f"s{index}" for index in range(17)], "at most 16"),
    ("stop", "x" * 1025, "at most 1024"),
    ("stop_token_ids", [-1], "ids from 0"),
    ("stop_token_ids", range(1025), "at most 1024"),
    ("logprobs", -2, "from -1 to"),
    ("logprobs", 2**31, "from -1 to"),
    ("prompt_logprobs", -2, "from -1 to"),
    ("prompt_logprobs", 2**31, "from -1 to"),
    ("logprob_token_ids", [-1], "ids from 0"),
    ("logprob_token_ids", range(129), "at most 128"),
    ("logprob_token_ids", [5], "the request has no logprobs"),
]

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
NOT_INTEGERS: list[Any] = [True, False, 1.0, 1.5, nan, inf, "1", [1], (), 1j]
NOT_NUMBERS: list[Any] = [True, False, nan, inf, -inf, "1", None, [1.0], 1j, 10**400, -(10**400)]
NOT_LISTS: list[tuple[str, Any]] = [
    ("logit_bias", "x"),
    ("logit_bias", 5),
    ("logit_bias", None),
    ("logit_bias", [1, 2]),
    ("logit_bias", [(1,)]),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: "x"}),
    ("logit_bias", {1: None}),
    ("logit_bias", {1: True}),
    ("logit_bias", {1: nan}),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1.0: 1.0}),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", "ab"),
    ("allowed_token_ids", [True]),
    ("allowed_token_ids", [1.0]),
    ("stop", 5),
    ("stop", None),
    ("stop", [1]),
    ("stop", [["a"]]),
    ("stop", b"ab"),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", None),
    ("stop_token_ids", "ab"),
    ("stop_token_ids", [True]),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("ignore_eos", "true"),
]


def refuse(field: str, value: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    return caught.value


def case_id(case: Any) -> str:
    return str(case)[:24]


@pytest.mark.parametrize(("field", "value"), VALID_VALUES, ids=case_id)
def test_a_value_at_its_bound_is_kept(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value", "limit"), INVALID_VALUES, ids=case_id)
def test_a_value_past_its_bound_is_refused_by_field_and_limit(
    field: str, value: Any, limit: str
) -> None:
    error = refuse(field, value)
    assert error.field == field
    assert str(error).startswith(f"{field}: ")
    assert limit in str(error)


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=case_id)
@pytest.mark.parametrize("field", INTEGERS)
def test_an_integer_field_takes_nothing_but_an_int(field: str, value: Any) -> None:
    """True is not 1, and 1.0 is not 1: a client that sends them means something else."""
    assert refuse(field, value).field == field


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=case_id)
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_field_takes_nothing_but_a_finite_number(field: str, value: Any) -> None:
    assert refuse(field, value).field == field


@pytest.mark.parametrize("field", ["n", "top_k", "min_tokens", "temperature", "ignore_eos"])
def test_none_is_refused_for_fields_that_need_a_value(field: str) -> None:
    assert refuse(field, None).field == field


@pytest.mark.parametrize(("field", "value"), NOT_LISTS, ids=case_id)
def test_a_list_field_of_another_shape_is_refused_by_name(field: str, value: Any) -> None:
    assert refuse(field, value).field == field


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    with pytest.raises(InvalidRequest, match="min_tokens: 5 is not an integer from 0 to 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_min_tokens_is_free_when_max_tokens_is() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=2**31 - 1).min_tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("n", 0, "invalid_value"),
        ("stop", "", "invalid_value"),
        ("stop", ["s"] * 17, "too_many_items"),
        ("stop", "x" * 1025, "string_too_long"),
        ("logit_bias", dict.fromkeys(range(200_000), 0.0), "too_many_items"),
        ("logit_bias", {-1: 0.0}, "token_out_of_range"),
        ("stop_token_ids", range(10**6), "too_many_items"),
        ("stop_token_ids", [-1], "token_out_of_range"),
        ("allowed_token_ids", [-1], "token_out_of_range"),
    ],
    ids=case_id,
)
def test_a_refusal_has_the_code_that_clients_switch_on(field: str, value: Any, code: str) -> None:
    assert refuse(field, value).code == code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "x" * 10**6),
        ("stop", [["x" * 10**6]]),
        ("stop_token_ids", ["x" * 10**6]),
        ("temperature", "a\nb\r\x1b[2J"),
        ("n", 10**5000),
    ],
    ids=["n", "stop", "stop_token_ids", "temperature", "digits"],
)
def test_a_refusal_is_one_short_line_whatever_was_sent(field: str, value: Any) -> None:
    """The message goes to a log and back to the client: no megabyte, no control characters."""
    message = str(refuse(field, value))
    assert len(message) < 200
    assert message.isprintable()


def test_every_refusal_is_a_forge_error_and_a_value_error() -> None:
    error = refuse("n", 0)
    assert isinstance(error, ForgeError)
    assert isinstance(error, ValueError)


def test_top_k_minus_one_means_all_as_zero_does() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(top_k=-1).top_k == 0


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["end", "\n"]).stop == ("end", "\n")


def test_logit_bias_in_any_shape_and_order_is_one_value() -> None:
    expected = SamplingParams(logit_bias=((1, 2.0), (3, -1.0)))
    assert SamplingParams(logit_bias={3: -1.0, 1: 2.0}) == expected
    assert SamplingParams(logit_bias=[(3, -1.0), (1, 2.0)]) == expected
    assert expected.logit_bias == ((1, 2.0), (3, -1.0))


def test_id_lists_become_tuples_so_the_value_can_be_hashed() -> None:
    params = SamplingParams(stop_token_ids=[5, 3], allowed_token_ids=[9], logit_bias={1: 1.0})
    assert (params.stop_token_ids, params.allowed_token_ids) == ((5, 3), (9,))
    assert hash(params) == hash(replace(params))


def test_a_later_change_of_the_callers_list_changes_nothing() -> None:
    mine = [1, 2]
    params = SamplingParams(stop_token_ids=mine)
    mine.append(-1)
    assert params.stop_token_ids == (1, 2)


def test_requests_below_the_temperature_that_overflows_are_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9.9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize(
    ("field", "neutral", "active"),
    [
        ("repetition_penalty", 1.0, 1.1),
        ("presence_penalty", 0.0, -0.5),
        ("frequency_penalty", 0.0, 0.5),
    ],
)
def test_penalises_is_true_when_earlier_tokens_matter(
    field: str, neutral: float, active: float
) -> None:
    neither: dict[str, Any] = {field: neutral}
    either: dict[str, Any] = {field: active}
    assert not SamplingParams(**neither).has_penalties
    assert SamplingParams(**either).has_penalties


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(4, 99),
    min_tokens=st.integers(0, 4),
    stop=st.lists(st.text(ANY_CHARACTER, min_size=1, max_size=4), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


def test_minus_one_is_as_many_log_probabilities_as_any_vocabulary_has() -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    assert params.logprobs == params.prompt_logprobs == 2**31 - 1


def test_listed_ids_are_kept_in_order_and_each_once() -> None:
    params = SamplingParams(logprobs=0, logprob_token_ids=[7, 5, 7, 6])
    assert params.logprob_token_ids == (7, 5, 6)
    assert SamplingParams(logprobs=0, logprob_token_ids=range(128)).logprob_token_ids[-1] == 127


@given(PARAMS)
def test_repr_builds_an_equal_value(params: SamplingParams) -> None:
    assert eval(repr(params)) == params


def test_repr_shows_only_fields_that_differ_from_the_default() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(n=2, stop="x")) == "SamplingParams(n=2, stop=('x',))"


def test_a_request_repr_builds_an_equal_request() -> None:
    request = Request(3, (1, 2), SamplingParams(temperature=0.5), -1, "tenant", 0.25)
    assert eval(repr(request)) == request


def test_params_cannot_be_changed() -> None:
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_a_changed_copy_is_checked_again() -> None:
    with pytest.raises(InvalidRequest, match=r"^n: "):
        replace(SamplingParams(), n=0)


@pytest.mark.parametrize("prompt", [(), [], range(0)])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: it is empty") as caught:
        Request(0, prompt)
    assert (caught.value.field, caught.value.code) == ("prompt", "empty_prompt")


@pytest.mark.parametrize("prompt", [None, 5])
def test_a_prompt_that_is_no_list_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: "):
        Request(0, prompt)


def test_a_prompt_is_copied_to_a_tuple() -> None:
    mine: Any = [1, 2]
    request = Request(0, mine)
    mine.append(3)
    assert request.prompt == (1, 2)


@pytest.mark.parametrize("priority", [-(2**31), 0, 2**31 - 1])
def test_a_priority_of_32_bits_is_kept(priority: int) -> None:
    assert Request(0, (1,), priority=priority).priority == priority


@pytest.mark.parametrize("priority", [-(2**31) - 1, 2**31, True, 1.0, "1", None])
def test_a_priority_that_is_no_32_bit_integer_is_refused(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^priority: "):
        Request(0, (1,), priority=priority)


def test_a_prompt_that_is_a_range_stays_one() -> None:
    assert Request(0, range(3, 9)).prompt == range(3, 9)


def test_a_request_cannot_be_changed() -> None:
    request = Request(0, (1,))
    with pytest.raises(FrozenInstanceError):
        request.prompt = (2,)  # type: ignore[misc]


def test_finish_reasons_are_the_words_that_users_see() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_a_delta_repr_builds_an_equal_delta() -> None:
    delta = Delta(
        4,
        1,
        (7,),
        FinishReason.STOP,
        7,
        (TokenLogprob(7, -0.5, ((7, -0.5), (2, -1.0))),),
        cached_tokens=CachedTokens(12, 8, 4),
    )
    assert eval(repr(delta)) == delta and delta.weights == OutputWeights()


def test_cached_tokens_add_up_by_tier() -> None:
    tokens = CachedTokens(1, 2, 3).plus(CachedTokens(10, 20, 30))
    assert (tokens, tokens.total) == (CachedTokens(device=11, host=22, disk=33), 66)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"session_id": "x" * 129}, "session_id: 129 characters, at most 128. Shorten it"),
        ({"session_id": 7}, "session_id: 7 is not a string. Give text"),
        ({"tenant": None}, "tenant: 'None' is not a string. Give text"),
        (
            {"session_end": True},
            "session_end: the request names no session. Give session_id, or leave it out",
        ),
        (
            {"session_id": "a", "session_end": 1},
            "session_end: 1 is not true or false. Give a boolean",
        ),
        (
            {"expected_pause_s": nan},
            "expected_pause_s: nan is not a number from 0 to 86400. Give a value in range",
        ),
        (
            {"expected_pause_s": 86_400.5},
            "expected_pause_s: 86400.5 is not a number from 0 to 86400. Give a value in range",
        ),
    ],
)
def test_a_session_field_past_its_bound_is_refused_by_name(
    values: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request(0, (1,), **values)
    assert str(caught.value) == error


def test_session_fields_at_their_bounds_are_kept() -> None:
    request = Request(0, (1,), session_id="x" * 128, session_end=True, expected_pause_s=86_400)
    assert (len(request.session_id), request.session_end) == (128, True)
    assert request.expected_pause_s == 86_400
    assert replace(request, expected_pause_s=0).expected_pause_s == 0
