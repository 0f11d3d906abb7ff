"""Slices: long work of the event loop, a little at a time, so that others are served between.

Owns how much is done at once. Knows no request. Work that one C function does at a stretch holds
Python's lock in any thread, so what grows with a request is cut here and not only moved to one.

    body ──► encoded ──► parts        generators; each yields how many entries its last slice did
               └── in_slices: after ENTRIES of them, others run
    PartsResponse ──► a part at a time, as the client reads

An entry is a token, or a log probability with its text. 1,000 take 1 to 4 ms to build and encode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge.request import TokenLogprob

ENTRIES = 2048
"""Done at once."""

TOKENS = 64
"""Of a list, built or encoded at once. Each may have twenty log probabilities."""

SENT_BYTES = 2**18
"""Handed to the connection at once."""

BYTES_OF_ENTRY = 32
"""An encoded one has at least as many."""

T = TypeVar("T")
Slices = Generator[int, None, T]
"""Work in slices, and what it returns."""


class EncodedList:
    """A list of objects, each encoded when it is added: no more than text is kept of them."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def extend(self, items: Sequence[object]) -> None:
        """Add these."""
        if items:
            self.parts.append(_dumps(items)[1:-1])


class Pace:
    """Counts entries, and lets others run after ENTRIES of them. One for each task."""

    def __init__(self) -> None:
        self._done = 0

    async def spend(self, entries: int) -> None:
        """So many were done."""
        self._done += entries
        if self._done >= ENTRIES:
            self._done = 0
            await asyncio.sleep(0)


async def in_slices(work: Slices[T]) -> T:
    """Return what the work returns; others run between its slices."""
    pace = Pace()
    while True:
        try:
            entries = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await pace.spend(entries)


def entries_of(tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> int:
    """How many entries these tokens and their log probabilities are."""
    return len(tokens) + len(scores) * (1 + len(scores[0].top) if scores else 0)


def encoded(body: Slices[dict[str, Any]]) -> Slices[list[bytes]]:
    """The body of an answer as JSON, in parts."""
    value = yield from body
    parts = []
    for part in json_parts(value):
        parts.append(part.encode())
        yield len(part) // BYTES_OF_ENTRY
    return parts


class PartsResponse(Response):
    """JSON that was encoded in parts, sent without joining them."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and the parts."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        waiting, size = list[bytes](), 0
        for part in self._parts:
            waiting.append(part)
            size += len(part)
            if size >= SENT_BYTES:
                body = b"".join(waiting)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
                waiting, size = [], 0
        await send({"type": "http.response.body", "body": b"".join(waiting)})


def json_parts(value: object) -> Iterator[str]:
    """The value as JSON without spaces, in parts of at most TOKENS items of a list.

    Objects, also those of a list of `choices`, are cut between and within their members.
    """
    if isinstance(value, dict):
        before = "{"
        for key, member in value.items():
            yield f"{before}{_dumps(key)}:"
            yield from _choices(member) if key == "choices" else json_parts(member)
            before = ","
        yield "}" if value else "{}"
    elif isinstance(value, EncodedList):
        before = "["
        for part in value.parts:
            yield before + part
            before = ","
        yield "]" if value.parts else "[]"
    elif isinstance(value, list) and len(value) > TOKENS:
        for start in range(0, len(value), TOKENS):
            part = _dumps(value[start : start + TOKENS])[1:-1]
            yield f"[{part}" if start == 0 else f",{part}"
        yield "]"
    else:
        yield _dumps(value)


def _choices(items: list[Any]) -> Iterator[str]:
    before = "["
    for item in items:
        yield before
        yield from json_parts(item)
        before = ","
    yield "]" if items else "[]"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
