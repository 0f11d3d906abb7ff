"""The version of forge, the name of its distribution, and how an extra of it is installed."""

from __future__ import annotations

VERSION = "0.1.0"

DISTRIBUTION = "forge-llm-engine"
"""Not on the package index: it is installed from a clone or from a wheel built there."""


def install_remedy(extra: str) -> str:
    """Return how to install forge with `extra`, as the last sentence of a refusal."""
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    return f"In a clone of forge run pip install '.[{extra}]', or install '{wheel}[{extra}]'"
