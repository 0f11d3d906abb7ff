"""Time slicing: long work on the event loop in short slices, so that others are served between.

Owns how much is done at once. Knows no request. A C function that runs long holds Python's lock in
any thread. So work that grows with a request is cut into slices here; a thread would not help.

    body ──► encode_json ──► parts    generators; each yields how many entries its last slice did
                └── run_in_slices: after ENTRIES_PER_SLICE of them, others run
    JSONPartsResponse ──► a part at a time, as the client reads

An entry is a token, or a log probability with its text. 1,000 take 1 to 4 ms to build and encode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge.request import TokenLogprob

ENTRIES_PER_SLICE = 2048
"""Entries done at once."""

TOKENS_PER_SLICE = 64
"""Most tokens of a list that are built or encoded at once."""

CHARS_PER_SLICE = 1024
"""Characters of a whole answer that are parsed at once: each call in them is compared as well."""

SEND_BYTES = 2**18
"""Bytes handed to the connection at once."""

MIN_ENTRY_BYTES = 32
"""Least bytes of an encoded entry."""

T = TypeVar("T")
SlicedWork = Generator[int, None, T]
"""Work in slices: yields the entries of each slice, and returns the result."""


class EncodedList:
    """A list of objects, each encoded when it is added, so that only its text is kept.

    parts   JSON of the list, cut at commas
    """

    def __init__(self) -> None:
        self.parts: list[str] = []

    def extend(self, items: Sequence[object]) -> None:
        """Encode and add the items."""
        if items:
            self.parts.append(_dumps(items)[1:-1])

    def add_json(self, text: str) -> None:
        """Add an item that is the text of JSON."""
        self.parts.append(text)

    def add_in_parts(
        self, start: str, parts: Iterable[Sequence[object] | Mapping[str, object]], end: str
    ) -> SlicedWork[None]:
        """Encode and add one item in slices: its JSON is `start`, the members, `end`.

        parts   lists or objects with the members, at least one
        """
        for part in parts:
            self.parts.append(start + _dumps(part)[1:-1])
            start = ""
            yield len(part)
        self.parts[-1] += end


class SliceBudget:
    """Counts the entries of one task, and lets others run after ENTRIES_PER_SLICE of them."""

    def __init__(self) -> None:
        self._num_done = 0

    async def spend(self, entries: int) -> None:
        """Count entries that were done; let others run when the slice is full."""
        self._num_done += entries
        if self._num_done >= ENTRIES_PER_SLICE:
            self._num_done = 0
            await asyncio.sleep(0)


async def run_in_slices(work: SlicedWork[T]) -> T:
    """Return the result of `work`; others run between its slices."""
    budget = SliceBudget()
    while True:
        try:
            entries = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await budget.spend(entries)


def num_entries(tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> int:
    """Return the number of entries of these tokens and log probabilities."""
    return len(tokens) + len(scores) * (1 + len(scores[0].top) if scores else 0)


def iter_texts(text: str) -> Iterator[str]:
    """Yield the text in the parts that one slice parses."""
    for start in range(0, len(text), CHARS_PER_SLICE):
        yield text[start : start + CHARS_PER_SLICE]


def iter_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last of which may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def split_scores(scores: Sequence[TokenLogprob]) -> Iterator[Sequence[TokenLogprob]]:
    """Yield the log probabilities of as many tokens as one slice has, at least of one token."""
    if scores:
        size = max(1, min(TOKENS_PER_SLICE, ENTRIES_PER_SLICE // num_entries((), scores[:1])))
        for start in range(0, len(scores), size):
            yield scores[start : start + size]


def encode_json(work: SlicedWork[dict[str, Any]]) -> SlicedWork[list[bytes]]:
    """Encode the body of a response as parts of JSON, in slices."""
    body = yield from work
    parts = []
    for part in iter_json(body):
        parts.append(part.encode())
        yield len(part) // MIN_ENTRY_BYTES
    return parts


class JSONPartsResponse(Response):
    """JSON that was encoded in parts, sent without joining them.

    sending   entered while the parts are sent, which takes as long as the client reads
    """

    media_type = "application/json"

    def __init__(
        self, parts: Sequence[bytes], sending: AbstractContextManager[None] | None = None
    ) -> None:
        super().__init__()
        self._parts = parts
        self._sending = sending or nullcontext()
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and the parts; let others run between SEND_BYTES."""
        with self._sending:
            await self._send_parts(send)

    async def _send_parts(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        buffer, size = list[bytes](), 0
        for part in self._parts:
            buffer.append(part)
            size += len(part)
            if size >= SEND_BYTES:
                body = b"".join(buffer)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
                buffer, size = [], 0
        await send({"type": "http.response.body", "body": b"".join(buffer)})


def iter_json(value: object) -> Iterator[str]:
    """Yield the value as JSON without spaces, in parts of at most TOKENS_PER_SLICE list items.

    Objects, also those in a list of `choices`, are cut between and within their members. So are
    objects in other lists, but only those with more members than a slice.
    """
    if isinstance(value, dict):
        separator = "{"
        for key, member in value.items():
            yield f"{separator}{_dumps(key)}:"
            yield from _iter_choices(member) if key == "choices" else iter_json(member)
            separator = ","
        yield "}" if value else "{}"
    elif isinstance(value, EncodedList):
        separator = "["
        for part in value.parts:
            yield separator + part
            separator = ","
        yield "]" if value.parts else "[]"
    elif isinstance(value, list) and value and _is_long_object(value[-1]):
        for index, item in enumerate(value):
            yield from _iter_object_parts("," if index else "[", item)
        yield "]"
    elif isinstance(value, list) and len(value) > TOKENS_PER_SLICE:
        for start in range(0, len(value), TOKENS_PER_SLICE):
            part = _dumps(value[start : start + TOKENS_PER_SLICE])[1:-1]
            yield f"[{part}" if start == 0 else f",{part}"
        yield "]"
    else:
        yield _dumps(value)


def _iter_choices(items: list[Any]) -> Iterator[str]:
    separator = "["
    for item in items:
        yield separator
        yield from iter_json(item)
        separator = ","
    yield "]" if items else "[]"


def _is_long_object(value: object) -> bool:
    return isinstance(value, dict) and len(value) > ENTRIES_PER_SLICE


def _iter_object_parts(start: str, item: object) -> Iterator[str]:
    """Yield `start` and an item of a list, in parts of at most ENTRIES_PER_SLICE members."""
    if not _is_long_object(item):
        yield start + _dumps(item)
        return
    assert isinstance(item, dict)
    start += "{"
    for members in iter_batches(item.items(), ENTRIES_PER_SLICE):
        yield start + _dumps(dict(members))[1:-1]
        start = ","
    yield "}"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
