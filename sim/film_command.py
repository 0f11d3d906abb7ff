"""Films of `forge sim`: its options, the run that stands next to the first, and the page.

Owns --html and --versus. Knows no format: forge.sim.reports.film films, forge.film.page builds.

    forge sim --rate 20 --html run.html
    forge sim --rate 20 --html run.html --versus "policy=ageing depth=2"
    forge sim replay recording.jsonl --html run.html
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.cli.options import closest_matches, define_option
from forge.cli.settings import parse_value
from forge.errors import InvalidConfig
from forge.film.page import build_page
from forge.film.state import Line
from forge.sim.reports.film import WorldFilm
from forge.sim.reports.text_report import describe_scenario
from forge.sim.run_options import DRAFTS_OPTION, GEOMETRY_OPTIONS, SCENARIO_OPTIONS, create_scenario
from forge.sim.scenario import Scenario

HTML_OPTION = define_option(
    "html", str, None, "write a page to FILE that shows every step of the run", "FILE"
)
VERSUS_OPTION = define_option(
    "versus",
    str,
    None,
    "film the same arrivals with other options next to it: policy=ageing depth=2",
    "NAME=VALUE ...",
)

RUN_NAMES = ("policy", "cost", "agreement", "draft_cost", "host_blocks", "host_block_us")
"""Options of a scenario, besides those of the engine, that leave drawn arrivals as they are."""

VERSUS_OPTIONS = {
    each.name: each
    for each in (*SCENARIO_OPTIONS, *GEOMETRY_OPTIONS, DRAFTS_OPTION)
    if each in (*GEOMETRY_OPTIONS, DRAFTS_OPTION) or each.name in RUN_NAMES
}
"""Options that the second run may change, by name."""


def parse_versus(text: str) -> dict[str, Any]:
    """Return the options of the second run, by name. Raises InvalidConfig."""
    found: dict[str, Any] = {}
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = []
    for part in parts:
        flag, equals, value = part.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not equals or name not in VERSUS_OPTIONS:
            names = closest_matches(name, tuple(VERSUS_OPTIONS)) or VERSUS_OPTIONS
            raise InvalidConfig(
                "versus",
                f"{part[:64]!r} is not NAME=VALUE of an option that leaves the arrivals alone",
                f"Use {', '.join(names)}",
            )
        found[name] = parse_value(VERSUS_OPTIONS[name], value, f"--versus {flag}")
    if not found:
        raise InvalidConfig("versus", f"{text[:64]!r} has no option", "Give policy=ageing, say")
    return found


def second_scenario(
    values: Mapping[str, Any], explicit: frozenset[str]
) -> tuple[str, Scenario] | None:
    """Return the run of --versus with its changes as text; None where it was not given.

    Raises InvalidConfig.
    """
    text = values[VERSUS_OPTION.name]
    if text is None:
        return None
    if values[HTML_OPTION.name] is None:
        raise InvalidConfig("versus", "it is a second film on a page", "Give --html FILE too")
    changes = parse_versus(text)
    return text, create_scenario({**values, **changes}, explicit | changes.keys())


def film_scenario(scenario: Scenario, title: str) -> list[Line]:
    """Run a scenario, and return its film."""
    films: list[WorldFilm] = []

    def create_observers(engine: Any) -> list[WorldFilm]:
        films.append(WorldFilm(engine, title, describe_policy(scenario)))
        return films

    scenario.run(create_observers=create_observers)
    return films[0].lines


def describe_policy(scenario: Scenario) -> str:
    """Return the name of the policy; of a file, its last part."""
    return Path(scenario.policy).name


def write_film(
    path: str, scenario: Scenario, lines: list[Line], second: tuple[str, Scenario] | None
) -> None:
    """Write the page of a run, and of the one next to it."""
    films = [lines]
    if second is not None:
        changes, other = second
        films.append(film_scenario(other, f"the same arrivals with {changes}"))
    write_page(path, films, describe_scenario(scenario))


def write_page(path: str, films: list[list[Line]], title: str) -> None:
    """Write a page of films to a file."""
    Path(path).write_text(build_page(films, title), encoding="utf-8", newline="\n")
