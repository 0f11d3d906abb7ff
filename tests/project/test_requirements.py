"""The ranges of versions: one table, and pyproject.toml and the constraint files agree with it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from forge.requirements import TESTED_REQUIREMENTS, find_untested

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}


def read_pins(name: str) -> dict[str, Version]:
    """Each line of a constraint file, which names one version."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, _, version in found}


def extra_requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra in pyproject.toml, less the one for another extra of forge."""
    found = [Requirement(text) for text in EXTRAS[extra]]
    return [each for each in found if each.name != PROJECT["name"]]


def version_lookup(**installed: str) -> Callable[[str], str | None]:
    """Versions in their ranges, but for these."""
    known = {"python": "3.11.7"} | {name.replace("_", "-"): it for name, it in installed.items()}
    return known.get


def is_next_series(version: Version, bound: str) -> bool:
    """`bound` is the first version of the release series after that of `version`."""
    limit = Version(bound).release
    series = (*version.release, 0, 0)[: len(limit)]
    return limit == (*series[:-1], series[-1] + 1)


@pytest.mark.parametrize("extra", TESTED_REQUIREMENTS)
def test_the_table_has_the_ranges_of_pyproject(extra: str) -> None:
    assert list(TESTED_REQUIREMENTS[extra]) == [
        text for text in EXTRAS[extra] if PROJECT["name"] not in text
    ]


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_range_has_both_ends(extra: str) -> None:
    operators = {
        each.name: {part.operator for part in each.specifier} for each in extra_requirements(extra)
    }
    assert {
        name: found for name, found in operators.items() if found not in ({">=", "<"}, {"=="})
    } == {}


def test_the_lower_ends_are_the_versions_of_the_oldest_install() -> None:
    lower = {
        canonicalize_name(each.name): Version(part.version)
        for extra in ("", "hf")
        for each in extra_requirements(extra)
        for part in each.specifier
        if part.operator == ">="
    }
    assert lower == read_pins("oldest")


@pytest.mark.parametrize("extra", ["", "hf", "events", "otel", "ray", "plot", "dev"])
def test_each_upper_end_follows_the_version_of_the_newest_install(extra: str) -> None:
    newest = read_pins("newest")
    outside = [
        str(each)
        for each in extra_requirements(extra)
        for part in each.specifier
        if part.operator == "<"
        and not is_next_series(newest[canonicalize_name(each.name)], part.version)
    ]
    assert outside == []
    assert all(
        newest[canonicalize_name(each.name)] in each.specifier for each in extra_requirements(extra)
    )


def test_the_measured_versions_are_the_only_ones_of_the_extra_gpu() -> None:
    measured = read_pins("gpu")
    assert {each.name for each in extra_requirements("gpu")} == set(measured)
    for each in extra_requirements("gpu"):
        upper = [part.version for part in each.specifier if part.operator == "<"]
        assert measured[each.name] in each.specifier
        assert all(is_next_series(measured[each.name], bound) for bound in upper)


def test_the_measured_versions_are_in_the_ranges_of_a_cpu_too() -> None:
    """The extra gpu has the extra hf in it: a version outside could not be installed."""
    measured = read_pins("gpu")
    assert all(
        measured[each.name] in each.specifier
        for each in extra_requirements("hf")
        if each.name in measured
    )


def test_versions_inside_their_ranges_are_not_named() -> None:
    assert (
        find_untested(version_lookup(torch="2.13.0+cpu", transformers="5.23.0", h11="0.16.0")) == []
    )


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "2.13.0rc1", "2.14.0.dev20261101", "main"])
def test_a_version_outside_its_range_is_named_with_the_range(version: str) -> None:
    (found,) = find_untested(version_lookup(torch=version, starlette="1.2.0"))
    assert str(found) == f"torch {version} (tested: >=2.11,<2.14)"


def test_where_flashinfer_is_installed_the_ranges_are_those_of_a_gpu() -> None:
    measured = {"flashinfer_python": "0.6.14", "apache_tvm_ffi": "0.1.10"}
    assert find_untested(version_lookup(torch="2.11.0+cu130", triton="3.6.0", **measured)) == []
    named = find_untested(
        version_lookup(torch="2.13.0", triton="3.9.0", **measured | {"apache_tvm_ffi": "0.1.15"})
    )
    assert [each.package for each in named] == ["apache-tvm-ffi", "torch", "triton"]


def test_python_has_a_range_too() -> None:
    assert [str(each) for each in find_untested(version_lookup(python="3.15.0"))] == [
        "python 3.15.0 (tested: >=3.11,<3.13)"
    ]


@pytest.mark.parametrize(
    ("page", "file"), [("README.md", "newest"), ("README.md", "gpu"), ("Dockerfile.gpu", "gpu")]
)
def test_what_is_shown_installs_the_versions_that_ran(page: str, file: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(rf"-c (/src/)?constraints/{file}\.txt", text)
