"""Sampling defaults of a checkpoint: which fields apply, and what a request replaces."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from forge.errors import InvalidConfig
from forge.request import SamplingParams
from forge.sampling_defaults import NO_SAMPLING_DEFAULTS, SamplingDefaults


def test_fields_of_sampling_are_read_and_others_are_not() -> None:
    config = {
        **{"do_sample": False, "temperature": 0, "top_p": None, "top_k": 20, "min_p": 0.1},
        **{"repetition_penalty": 1.05, "max_new_tokens": 9, "max_length": 5, "eos_token_id": 2},
    }
    defaults = SamplingDefaults.from_generation_config(config)
    expected = SamplingParams(
        temperature=0, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=9
    )
    assert defaults.params() == expected
    assert defaults.describe() == (
        "temperature 0, top_k 20, min_p 0.1, repetition_penalty 1.05, max_tokens 9"
    )
    assert pickle.loads(pickle.dumps(defaults)) == defaults, "it is sent to another process"
    assert NO_SAMPLING_DEFAULTS.params() == SamplingParams()


@pytest.mark.parametrize(
    ("given", "of_route", "expected"),
    [({}, 16, 9), ({}, 4, 4), ({}, None, 9), ({"max_tokens": 100}, 16, 100)],
)
def test_the_lower_default_of_max_tokens_applies_where_none_is_given(
    given: dict[str, Any], of_route: int | None, expected: int
) -> None:
    defaults = SamplingDefaults({"max_tokens": 9, "top_k": 3})
    fields = defaults.complete(given, of_route)
    assert fields == {"max_tokens": expected, "top_k": 3}
    assert defaults.complete({"top_k": 0}, None)["top_k"] == 0
    assert NO_SAMPLING_DEFAULTS.complete({}, of_route) == {"max_tokens": of_route}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("top_k", "5"), ("min_p", True), ("max_new_tokens", 1.5)],
)
def test_a_value_out_of_bounds_is_refused_with_the_way_to_start_all_the_same(
    field: str, value: Any
) -> None:
    with pytest.raises(InvalidConfig, match=r"^generation_config: .* --generation-config none"):
        SamplingDefaults.from_generation_config({field: value})
