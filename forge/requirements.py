"""The tested versions of forge's dependencies, and the installed versions outside them.

Owns the ranges. pyproject.toml has the same ranges, and constraints/oldest.txt their lower ends;
tests/project/test_requirements.py compares the three. Knows no package except `packaging`.

    ""     every install           hf     torch models on a CPU           gpu    on an NVIDIA GPU

The ranges of `gpu` apply where FlashInfer is installed, which only that extra installs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

PYTHON_REQUIREMENT = "python>=3.11,<3.13"

TESTED_REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "": (
        "h11>=0.16,<0.17",
        "llguidance>=1.9,<1.10",
        "numpy>=1.26,<2.5",
        "packaging>=25,<27",
        "prometheus-client>=0.22,<0.27",
        "pydantic>=2.11,<2.15",
        "pyyaml>=6.0.2,<6.1",
        "safetensors>=0.8,<0.9",
        "starlette>=1.0.1,<1.11",
        "uvicorn>=0.35,<0.55",
    ),
    "hf": (
        "jinja2>=3.1.4,<3.2",
        "tokenizers>=0.23.1,<0.24",
        "torch>=2.11,<2.14",
        "transformers>=5.17,<5.24",
    ),
    "gpu": (
        "apache-tvm-ffi==0.1.10",
        "cuda-bindings>=13.3,<13.4",
        "flashinfer-python==0.6.14",
        "torch>=2.11,<2.12",
        "transformers>=5.17,<5.18",
        "triton>=3.6,<3.7",
    ),
}
"""Requirements by extra. A package in two extras has the narrower range in the later one."""


class UntestedVersion(NamedTuple):
    """An installed version outside the tested range."""

    package: str
    version: str
    tested: str

    def __str__(self) -> str:
        return f"{self.package} {self.version} (tested: {self.tested})"


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution or of python, or None."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_untested(
    version_of: Callable[[str], str | None] = installed_version,
) -> list[UntestedVersion]:
    """Return the installed versions outside their ranges, sorted by package.

    version_of   returns the version of python or of a distribution, None where it is not installed

    Reads one metadata file a package, about 10 ms in all.
    """
    extras = ["", "hf"] if version_of("flashinfer-python") is None else ["", "hf", "gpu"]
    requirement_texts = [
        PYTHON_REQUIREMENT,
        *(text for extra in extras for text in TESTED_REQUIREMENTS[extra]),
    ]
    ranges = {each.name: each.specifier for each in map(Requirement, requirement_texts)}
    versions = {name: version_of(name) for name in ranges}
    return [
        UntestedVersion(name, version, ",".join(sorted(map(str, ranges[name]), reverse=True)))
        for name, version in sorted(versions.items())
        if version is not None and not _is_in_range(ranges[name], version)
    ]


def _is_in_range(tested: SpecifierSet, version: str) -> bool:
    try:
        return tested.contains(version, prereleases=False)
    except InvalidVersion:
        return False
