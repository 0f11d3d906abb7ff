"""Hostile requests, from every table and every fuzzer of the tests of the server.

Owns the list of tables, and what each response may be. Rows of a table come in random order, each
once before one comes again. Tables are drawn by the square root of their length.

    TABLES   rows of bad inputs, and of refusals by each route     half of the requests
    FUZZERS  damaged bodies, damaged framing, requests cut short   the other half
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, NamedTuple

from tests.server import (
    bad_inputs,
    test_chat,
    test_framing,
    test_messages_api,
    test_responses,
    test_server,
    test_structured_output,
    test_tools,
)
from tests.server.fuzz_runs import CLIENT_REFUSALS, find_fault
from tests.server.fuzzing import fuzz_body
from tests.server.good_bodies import (
    ANTHROPIC,
    CHAT,
    CLIENT_ROUTES,
    COMPLETIONS,
    COUNT_TOKENS,
    GENERATE,
    OPERATOR_ROUTES,
    RESPONSES,
)
from tests.server.http_wire import Address, RawExchange, WireResponse, build_post

TIMEOUT_S = 90.0
"""Seconds until a response counts as missing."""
LONG_BYTES = 100_000
"""Bytes beyond which a row is sent in the warm-up too."""
OTHER_SERVER_CODES = {"context_length_exceeded", "template_error"}
"""Codes of rows that this server may serve: its context is longer, and its template takes all."""
ADMIN_ROUTES = {path: n for path, n in OPERATOR_ROUTES.items() if path.startswith("/admin/")}
"""Routes that refuse a client's key. /resize_kv_cache takes it, and would disturb all by design."""


class HostileRequest(NamedTuple):
    """A request and what may come back.

    source    table or fuzzer that it is from
    build     makes its bytes, which may be megabytes
    answers   number of responses; 0: the client leaves without reading
    closes    whether the server ends the connection after it
    fault     returns what is wrong with a response, or None
    """

    source: str
    name: str
    build: Callable[[], bytes]
    answers: int = 1
    closes: bool = False
    fault: Callable[[WireResponse], str | None] = lambda answer: None


def has_status(*statuses: int) -> Callable[[WireResponse], str | None]:
    """Return a check that a response has one of these statuses."""

    def find(answer: WireResponse) -> str | None:
        if answer.status in statuses:
            return None
        return f"{answer.status} instead of {statuses}: {answer.body[:200]!r}"

    return find


# Tables.


def bad_input_rows() -> Iterator[HostileRequest]:
    """Yield the requests of bad_inputs.py."""
    for row in bad_inputs.ROWS:
        statuses = {row.status, 200} if row.code in OTHER_SERVER_CODES else {row.status}
        for sent, _ in bad_inputs.row_requests(row):
            closes = isinstance(sent, bad_inputs.ClosingRequest)
            count = 1 if isinstance(sent, bad_inputs.ClosingRequest) else sent.answers
            name = f"{row.number} {row.description}"
            yield HostileRequest(
                "bad inputs", name, sent.request, count, closes, has_status(*statuses)
            )


def _row(source: str, path: str, body: dict[str, Any] | bytes, code: str) -> HostileRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    statuses = (400, 200) if code in OTHER_SERVER_CODES else (400,)
    return HostileRequest(
        source,
        f"{path} {raw[:80]!r}",
        lambda: build_post(path, raw),
        fault=has_status(*statuses),
    )


def refused_fields() -> Iterator[HostileRequest]:
    """Yield the refusals of each route."""
    user = [{"role": "user", "content": "hi"}]
    chat = {"model": "hash", "messages": user}
    for path, fields, _, code in test_server.BAD_FIELDS:
        yield _row("fields", path, {"model": "hash", "prompt": "good", **fields}, code)
    for fields, _, code in test_chat.BAD_CHATS:
        yield _row("chats", CHAT, {**chat, **fields}, code)
    for fields, _, code in test_tools.BAD:
        yield _row("tools", CHAT, {**chat, **fields}, code)
    for fields, _, code in test_structured_output.REFUSED_FIELDS:
        yield _row("structures", COMPLETIONS, {"model": "hash", "prompt": "a", **fields}, code)
        yield _row("structures", CHAT, {**chat, **fields}, code)
        yield _row("structures", GENERATE, {"prompt": "a", **fields}, code)
    for fields, _, code in test_responses.REFUSALS:
        yield _row("responses", RESPONSES, {"model": "hash", "input": "hi", **fields}, code)
    message = {"max_tokens": 8, **chat}
    for fields, param in test_messages_api.REFUSALS:
        code = "context_length_exceeded" if param in ("max_tokens", "messages") else ""
        yield _row("messages", ANTHROPIC, {**message, **fields}, code)
    for body, _, code in test_server.BAD_BODIES:
        for path in (COMPLETIONS, GENERATE, CHAT, RESPONSES, ANTHROPIC, COUNT_TOKENS):
            yield _row("bodies", path, body, code)


def bad_framing() -> Iterator[HostileRequest]:
    """Yield bytes that no request may have. The server refuses them, or waits for more."""
    for right, wrong in test_framing.INVALID:
        data = right + wrong + test_framing.GET
        yield HostileRequest("framing", repr(data[:60]), lambda data=data: data, 0)  # type: ignore[misc]


TABLES: tuple[Callable[[], Iterator[HostileRequest]], ...] = (
    bad_input_rows,
    refused_fields,
    bad_framing,
)


# Fuzzers.


def fuzzed_body(rng: Random) -> HostileRequest:
    """Return a damaged body of a route of clients."""
    index = rng.getrandbits(40)
    path, body = fuzz_body(0, index, CLIENT_ROUTES)
    return HostileRequest(
        "fuzzed bodies",
        f"seed 0 index {index} {path}",
        lambda: build_post(path, body),
        fault=lambda answer: find_fault(path, answer, CLIENT_REFUSALS),
    )


def fuzzed_command(rng: Random) -> HostileRequest:
    """Return a command of an operator with the key of a client."""
    index = rng.getrandbits(40)
    path, body = fuzz_body(0, index, ADMIN_ROUTES)
    name = f"seed 0 index {index} {path}"
    return HostileRequest(
        "fuzzed commands", name, lambda: build_post(path, body), fault=has_status(401)
    )


def cut_request(rng: Random) -> HostileRequest:
    """Return the beginning of a request, after which the client leaves."""
    whole = fuzzed_body(rng)
    request = whole.build()
    end = rng.randint(0, len(request))
    return HostileRequest("cut requests", whole.name, lambda: request[:end], 0)


def damaged_request(rng: Random) -> HostileRequest:
    """Return a request of which some bytes are others, after which the client leaves."""
    whole = fuzzed_body(rng)
    request = bytearray(whole.build())
    for _ in range(rng.randint(1, 4)):
        request[rng.randrange(min(len(request), 300))] = rng.randrange(256)
    return HostileRequest("damaged requests", whole.name, lambda: bytes(request), 0)


FUZZERS: tuple[Callable[[Random], HostileRequest], ...] = (
    *(fuzzed_body, fuzzed_body, fuzzed_body, fuzzed_command, cut_request, damaged_request),
)


# Sending.


def table_rows() -> list[HostileRequest]:
    """Return the rows of all tables. It takes seconds: some have megabytes."""
    return [row for table in TABLES for row in table()]


class HostileClient:
    """Draws hostile requests and sends them, each on a separate connection and thread.

    rows       rows of tables, drawn for half of the requests
    counts     requests by source
    statuses   responses by status
    faults     what no server may give, with the name of the request
    """

    def __init__(self, address: Address, seed: int, rows: Iterable[HostileRequest]) -> None:
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self._address = address
        self._rng = Random(f"{seed} hostile")
        self._rows: dict[str, list[HostileRequest]] = {}
        for row in rows:
            self._rows.setdefault(row.source, []).append(row)
        self._weights = [len(rows) ** 0.5 for rows in self._rows.values()]
        self._waiting: dict[str, list[HostileRequest]] = {source: [] for source in self._rows}

    async def send_long(self, until_s: float) -> None:
        """Send each row of more than LONG_BYTES once, one after the other, until that time.

        The time is of time.monotonic(). Parsing such a row takes tens of MiB for a moment, and the
        allocators keep a part. Drawn rows would leave most of them for the end of an hour.
        """
        for row in await asyncio.to_thread(self._find_long):
            if time.monotonic() >= until_s:
                return
            await self.send(row)

    def _find_long(self) -> list[HostileRequest]:
        rows = (row for rows in self._rows.values() for row in rows)
        return [row for row in rows if len(row.build()) > LONG_BYTES]

    def draw(self) -> HostileRequest:
        """Return the next request: a row of a table or one of a fuzzer."""
        if self._rng.random() < 0.5:
            return self._rng.choice(FUZZERS)(self._rng)
        (source,) = self._rng.choices([*self._rows], self._weights)
        if not self._waiting[source]:
            self._waiting[source] = self._rng.sample(self._rows[source], len(self._rows[source]))
        return self._waiting[source].pop()

    async def send(self, request: HostileRequest) -> None:
        """Send the request and check what comes back."""
        self.counts[request.source] += 1
        try:
            answers = await asyncio.to_thread(_exchange, self._address, request)
        except (OSError, ValueError) as error:
            self.faults.append(f"{request.source}: {request.name}: {error!r}")
            return
        if len(answers) != request.answers:
            self.faults.append(f"{request.source}: {request.name}: {len(answers)} responses")
        for answer in answers:
            self.statuses[answer.status] += 1
            problem = request.fault(answer)
            if problem is not None:
                self.faults.append(f"{request.source}: {request.name}: {problem}")


def _exchange(address: Address, request: HostileRequest) -> list[WireResponse]:
    exchange = RawExchange(address, request.build(), TIMEOUT_S)
    if not request.answers:
        exchange.close()
        return []
    try:
        if request.closes:
            return exchange.read_until_close()
        return exchange.read_responses(request.answers)
    finally:
        exchange.close()
