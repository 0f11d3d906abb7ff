"""The query of a list of items: how many, in which order, after which one.

Owns the names of the query's parameters. Knows no store.

    ?limit=20&order=desc&after=msg_5f0c   twenty items older than that one, newest first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forge.errors import InvalidRequest
from forge.server.errors import excerpt
from forge.server.protocol import invalid_field_error
from forge.server.responses_api.items import Item

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
ORDERS = ("asc", "desc")
_NEUTRAL = {"stream": "false", "include_obfuscation": "false"}
"""Parameters of a stored response, and the value of each that has no effect."""


class ListQuery(NamedTuple):
    """A part of a list of items.

    limit   most items
    order   asc: oldest first; desc: newest first
    after   id of the item before the first one; "" begins at the start
    """

    limit: int
    order: str
    after: str

    def select(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return this part of the items, which are oldest first. Raises InvalidRequest."""
        ordered = list(items) if self.order == "asc" else list(reversed(items))
        start = 0
        if self.after:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise InvalidRequest(
                    "after", f"there is no item '{excerpt(self.after)}'", "Give the id of an item"
                )
            start = ids.index(self.after) + 1
        selected = ordered[start : start + self.limit]
        return {
            "object": "list",
            "data": selected,
            "first_id": selected[0]["id"] if selected else None,
            "last_id": selected[-1]["id"] if selected else None,
            "has_more": start + self.limit < len(ordered),
        }


def parse_list_query(query: Mapping[str, str]) -> ListQuery:
    """Return the part of a list that a query requests. Raises InvalidRequest."""
    _check_names(query, ("limit", "order", "after"))
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3) or not (
        1 <= int(limit) <= MAX_LIMIT
    ):
        raise invalid_field_error(
            "limit", f"'{excerpt(limit)}' is not an integer from 1 to {MAX_LIMIT}"
        )
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise invalid_field_error("order", f"'{excerpt(order)}' is not one of {', '.join(ORDERS)}")
    return ListQuery(int(limit), order, query.get("after", ""))


def check_no_query(query: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a parameter that has an effect on a stored response."""
    _check_names(query, _NEUTRAL)
    for name, neutral in _NEUTRAL.items():
        if query.get(name, neutral) != neutral:
            raise InvalidRequest(
                name, "a stored response is sent whole", "Leave it out", "unsupported_parameter"
            )


def _check_names(query: Mapping[str, str], known: Sequence[str] | Mapping[str, str]) -> None:
    for name in query:
        if name not in known:
            raise InvalidRequest(
                excerpt(name), "there is no such parameter", "Leave it out", "unknown_parameter"
            )
