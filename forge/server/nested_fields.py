"""Checks of the objects and lists inside a field: each error has the path of what is wrong.

Owns what these checks have in common. Knows no field.

    input[2].content[0].type   a path: names and indices, as a client would write it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from forge.errors import InvalidRequest
from forge.server.errors import excerpt
from forge.server.protocol import (
    invalid_field_error,
    is_neutral,
    missing_field_error,
    unknown_field_error,
    unsupported_error,
)

NO_KEYS: Mapping[str, tuple[object, ...]] = {}


def parse_object(param: str, value: object) -> dict[str, Any]:
    """Return the value, which must be an object. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise invalid_field_error(param, "it is not an object", "invalid_type")
    return value


def parse_string(param: str, value: object) -> str:
    """Return the value, which must be a string. Raises InvalidRequest."""
    if value is None:
        raise missing_field_error(param, "Give a string")
    if not isinstance(value, str):
        raise invalid_field_error(param, "it is not a string", "invalid_type")
    return value


def parse_list(param: str, value: object, max_items: int) -> list[Any]:
    """Return the value, which must be a list of at most `max_items`. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise invalid_field_error(param, "it is not a list", "invalid_type")
    if len(value) > max_items:
        raise InvalidRequest(
            param, f"{len(value)} items, at most {max_items}", "Give fewer", "too_many_items"
        )
    return value


def check_keys(
    param: str,
    item: Mapping[str, Any],
    known: Collection[str],
    unsupported: Mapping[str, tuple[object, ...]] = NO_KEYS,
) -> None:
    """Raise InvalidRequest for a key that the object cannot have.

    unsupported   keys refused by name, and the values of each that have no effect, besides null
    """
    for key, value in item.items():
        if key in known:
            continue
        if key not in unsupported:
            raise unknown_field_error(f"{param}.{excerpt(key)}", key, known)
        if not is_neutral(value, unsupported[key]):
            raise unsupported_error(f"{param}.{key}", "it is not supported", "Leave it out")
