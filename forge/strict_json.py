"""JSON that every parser reads alike.

Owns what parsers merge, round or refuse. Knows no schema.

    {"path": "/tmp/a", "\\u0070ath": "/etc"}    a grammar reads two names, a parser keeps the last
    1e400                                      infinite for most parsers, an error for others
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from math import isinf
from typing import Any

MAX_NESTING = 128
"""Most lists and objects within each other: serde_json reads 128, and Python fewer than 1,000."""


class SchemaViolation(ValueError):
    """A finished output does not have its schema."""


def parse_json(text: str) -> Any:
    """Return the JSON value. Raises SchemaViolation where parsers would return different ones."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_create_object,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except SchemaViolation:
        raise
    except ValueError as error:
        raise SchemaViolation(f"it is not JSON: {error}") from None
    except RecursionError:
        raise SchemaViolation(f"it nests more than {MAX_NESTING} deep") from None
    if measure_json(value)[2] > MAX_NESTING:
        raise SchemaViolation(f"it nests more than {MAX_NESTING} deep")
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise SchemaViolation("it has half a surrogate pair") from None
    return value


def _create_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise SchemaViolation(f"the name {name[:64]!a} comes twice in an object")
    return value


def _parse_float(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise SchemaViolation("it has a number that is too large for a double")
    return number


def _parse_int(text: str) -> int:
    _parse_float(text)  # so it has at most 309 digits; Python itself refuses 4,301
    return int(text)


def _refuse_constant(name: str) -> None:
    raise SchemaViolation(f"it has {name}, which is not JSON")


def measure_json(value: Any) -> tuple[int, int, int]:
    """Return how many values and characters of strings there are, and how deep lists nest."""
    num_values, num_chars, depth, level = 0, 0, 0, [value]
    while level:
        num_values += len(level)
        num_chars += sum(len(item) for item in level if isinstance(item, str))
        inner = [item for item in level if isinstance(item, dict | list)]
        depth += bool(inner)
        lists = (item if isinstance(item, list) else item.values() for item in inner)
        level = list(chain.from_iterable(lists))
    return num_values, num_chars, depth
