"""Engine configuration: every value is checked when the configuration is made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from forge.config import (
    DEVICE_CHOICES,
    MAX_GEOMETRY,
    DeviceOptions,
    EngineConfig,
    MixedStepCosts,
    Speculation,
    StepCosts,
)
from forge.errors import ForgeError, InvalidConfig

COUNTS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def refuse(**options: Any) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig(**options)
    return caught.value


def smallest_config(**options: Any) -> EngineConfig:
    ones = dict.fromkeys(COUNTS, 1)
    return EngineConfig(**{**ones, **options})


@pytest.mark.parametrize("option", COUNTS)
def test_one_is_the_least_of_every_count(option: str) -> None:
    assert getattr(smallest_config(), option) == 1


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
@pytest.mark.parametrize("option", COUNTS)
def test_a_count_that_is_no_positive_integer_is_refused_by_name(option: str, value: Any) -> None:
    error = refuse(**{option: value})
    assert error.option == option
    assert str(error) == f"{option}: {value!r} is not a positive integer. Give 1 or more"


@pytest.mark.parametrize("depth", [1, 2])
def test_one_or_two_plans_may_be_in_flight(depth: int) -> None:
    assert EngineConfig(depth=depth).depth == depth


@pytest.mark.parametrize("depth", [0, 3, -1, "2", None, [1], True, 1.0])
def test_another_depth_is_refused(depth: Any) -> None:
    """True == 1 and 1.0 == 1, but a caller that passes them means something else."""
    assert str(refuse(depth=depth)) == f"depth: {depth!r} is not supported. Give 1 or 2"


def test_a_full_batch_must_be_able_to_decode() -> None:
    assert smallest_config(max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8
    error = refuse(max_num_seqs=8, max_num_batched_tokens=7)
    assert error.option == "max_num_batched_tokens"
    assert "7 is less than max_num_seqs 8" in str(error)
    assert "Give at least 8" in str(error)


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_a_seed_of_64_bits_is_kept(seed: int) -> None:
    assert EngineConfig(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [1.5, "x", None, True, 2**63, -(2**63) - 1])
def test_a_seed_that_is_no_64_bit_integer_is_refused(seed: Any) -> None:
    """Otherwise the first request without a seed would break the engine."""
    assert refuse(seed=seed).option == "seed"


def test_a_refusal_is_a_forge_error_and_a_value_error() -> None:
    error = refuse(depth=0)
    assert isinstance(error, ForgeError)
    assert isinstance(error, ValueError)


def test_a_changed_copy_is_checked_again() -> None:
    with pytest.raises(InvalidConfig, match=r"^num_blocks: 0 is not"):
        replace(EngineConfig(), num_blocks=0)


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        EngineConfig(1024)  # type: ignore[call-arg]


def test_a_config_cannot_be_changed() -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.depth = 2  # type: ignore[misc]


def test_repr_builds_an_equal_config() -> None:
    config = EngineConfig(num_blocks=7, seed=-3, end_ids=(4, 5), cache_namespace="m/bf16")
    assert eval(repr(config)) == config


@pytest.mark.parametrize("option", sorted(MAX_GEOMETRY))
def test_a_count_beyond_any_device_is_refused_before_it_fills_the_memory(option: str) -> None:
    most = MAX_GEOMETRY[option]
    with pytest.raises(InvalidConfig, match=f"{option}: {most + 1} is more than {most}. Give less"):
        EngineConfig(**{"max_num_batched_tokens": 2**24, option: most + 1})


@pytest.mark.parametrize("option", DEVICE_CHOICES)
def test_each_choice_of_a_device_is_taken_and_no_other(option: str) -> None:
    for known in DEVICE_CHOICES[option]:
        assert getattr(DeviceOptions(**{option: known}), option) == known  # type: ignore[arg-type]
    for other in ("nonesuch", "", None, 1, ["auto"]):
        with pytest.raises(InvalidConfig, match=f"^{option}: .* is not known. Give one of: auto, "):
            DeviceOptions(**{option: other})  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), True, "0.5", None])
def test_a_share_of_the_memory_is_above_0_and_at_most_1(share: Any) -> None:
    assert DeviceOptions(gpu_memory_utilization=1).gpu_memory_utilization == 1
    with pytest.raises(InvalidConfig, match=r"^gpu_memory_utilization: .* is not a share of the"):
        DeviceOptions(gpu_memory_utilization=share)


def test_enforce_eager_is_a_boolean() -> None:
    with pytest.raises(InvalidConfig, match=r"^enforce_eager: 1 is no boolean"):
        DeviceOptions(enforce_eager=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [(), ((1, 0.0),), ((1, 1.0), (8, -1.0))])
def test_steps_that_take_no_time_are_no_costs(target: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidConfig, match="speculation: costs: a step of the model takes"):
        Speculation(costs=StepCosts(target))


@pytest.mark.parametrize(("num_tokens", "fits"), [(0, False), (1, True), (16, True), (17, False)])
def test_a_row_has_one_to_sixteen_drafts(num_tokens: int, fits: bool) -> None:
    if fits:
        assert Speculation(num_tokens=num_tokens).num_tokens == num_tokens
    else:
        with pytest.raises(InvalidConfig, match="not from 1 to 16"):
            Speculation(num_tokens=num_tokens)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), 86_401, "60", True])
def test_a_session_ends_after_a_positive_number_of_seconds(seconds: Any) -> None:
    assert "session_ttl_s: " in str(refuse(session_ttl_s=seconds))
    assert EngineConfig(session_ttl_s=86_400).session_ttl_s == 86_400


@pytest.mark.parametrize("count", [-1, 2**20 + 1, 1.0, True])
def test_the_bound_of_sessions_is_an_integer_from_0_on(count: Any) -> None:
    assert "max_sessions: " in str(refuse(max_sessions=count))
    assert EngineConfig(max_sessions=0).max_sessions == 0


@pytest.mark.parametrize("count", [-2, 2**24 + 1, 1.5, True, "20", None])
def test_a_number_of_log_probabilities_that_is_none_is_refused(count: Any) -> None:
    assert "max_logprobs: " in str(refuse(max_logprobs=count))


@pytest.mark.parametrize("ms", [0, 0.0009, -1, 60_001, float("nan"), float("inf"), "15", True])
def test_a_bound_that_is_no_time_of_a_step_is_refused(ms: Any) -> None:
    assert str(refuse(max_step_ms=ms)).startswith(f"max_step_ms: {ms!r} is not a number of milli")
    assert EngineConfig(max_step_ms=15).max_step_ms == 15


@pytest.mark.parametrize(
    "costs",
    [
        MixedStepCosts(()),
        MixedStepCosts(((0, 5),)),
        MixedStepCosts(((1, 0),)),
        MixedStepCosts(((2, 5), (2, 6))),
        MixedStepCosts(((1, 6), (2, 5))),
        MixedStepCosts(((1, 5.5),)),  # type: ignore[arg-type]
        MixedStepCosts(((1, 5),), position_ns=-1),
    ],
)
def test_a_table_without_ascending_integer_times_is_refused(costs: MixedStepCosts) -> None:
    assert "mixed_costs: " in str(refuse(mixed_costs=costs))
    assert EngineConfig(mixed_costs=MixedStepCosts(((1, 5), (2, 5)))).mixed_costs is not None
