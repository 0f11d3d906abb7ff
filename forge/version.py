"""The version of forge, the name of its distribution, and the remedy for a missing extra."""

from __future__ import annotations

VERSION = "0.1.1"

DISTRIBUTION = "forge-llm-engine"
"""Not on the package index: install it from a clone, or from a wheel built there."""


def install_remedy(extra: str) -> str:
    """Return the sentence that says how to install forge with `extra`, for the end of an error."""
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    return f"In a clone of forge run pip install '.[{extra}]', or install '{wheel}[{extra}]'"
