"""Options of a fleet: the words after `serve run forge.ray:app`."""

from __future__ import annotations

from typing import Any

import pytest

from forge.errors import InvalidConfig
from forge.ray.fleet_options import FLEET_OPTIONS, FleetOptions, resolve_options
from tests.docs.pages import ROOT


def test_words_are_options_of_the_engine_and_of_the_fleet() -> None:
    words = {"model": "hash:step_ms=2", "num_blocks": "512", "replicas": "4", "replica_gpus": "1"}
    settings, fleet = resolve_options({**words, "reasoning_parser": "qwen3"}, {})
    assert settings.values["reasoning_parser"] == "qwen3"
    assert settings.values["tool_call_parser"] is None
    assert settings.values["model"] == "hash:step_ms=2"
    assert settings.engine_options == {"num_blocks": 512}
    assert (fleet.replicas, fleet.replica_gpus, fleet.router) == (4, 1.0, "session-or-prefix")


def test_values_of_a_file_of_ray_need_not_be_texts() -> None:
    settings, fleet = resolve_options(
        {"replicas": 2, "target_queue_s": 0.5, "enforce_eager": True, "api_key": ["a", "b"]}, {}
    )
    assert (fleet.replicas, fleet.target_queue_s) == (2, 0.5)
    assert settings.engine_options == {"enforce_eager": True}
    assert settings.values["api_key"] == ("a", "b")


def test_what_is_not_given_is_read_from_the_environment() -> None:
    environ = {"FORGE_API_KEY": "a,b", "FORGE_REPLICAS": "3", "FORGE_NUM_BLOCKS": "99"}
    settings, fleet = resolve_options({"num_blocks": "100"}, environ)
    assert (settings.values["api_key"], fleet.replicas) == (("a", "b"), 3)
    assert settings.engine_options == {"num_blocks": 100}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"replica": "4"}, "replica: there is no such option"),
        ({"port": "80"}, "port: there is no such option"),
        ({"replicas": "many"}, "--replicas: 'many' is not an integer"),
        ({"replicas": "0"}, "replicas: 0 is not an integer from 1"),
        ({"replicas": "4", "max_replicas": "3"}, "max_replicas: 3 is not an integer from 4"),
        ({"router": "random"}, "router: 'random' is not known"),
        ({"target_queue_s": "0"}, "target_queue_s: 0.0 is no time above 0"),
        ({"replica_gpus": "-1"}, "replica_gpus: -1.0 is no number from 0"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{error}"):
        resolve_options(words, {})


def test_the_page_has_a_row_for_every_option() -> None:
    page = (ROOT / "docs" / "Scaling.md").read_text(encoding="utf-8")
    rows = [
        f"| `{each.name}` | {'' if each.default is None else f'`{each.default}` '}| {each.help} |"
        for each in FLEET_OPTIONS
    ]
    assert [row for row in rows if row not in page] == []
    assert FleetOptions() == FleetOptions(replicas=1)
