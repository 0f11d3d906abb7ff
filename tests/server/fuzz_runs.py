"""Fuzzed bodies, sent to a server: the response to each has one of the shapes that it may have.

run_fuzz            bodies of clients, over several connections
run_operator_fuzz   bodies that change the engine for everybody, one after the other; every
                    eighth change is undone, and a request of a client has the same text again
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.server.fuzzing import fuzz_body
from tests.server.good_bodies import (
    ANTHROPIC,
    CLIENT_ROUTES,
    NUM_BLOCKS,
    OPERATOR_ROUTES,
    RESIZES,
    RESPONSES,
    SCORE,
)
from tests.server.http_wire import (
    HOST,
    JSON,
    Address,
    PersistentConnection,
    WireResponse,
    build_head,
    build_post,
)

ADMIN_KEY = "admin"
CLIENT_REFUSALS = {400, 404, 413}
"""Statuses other than 200 that a body of a client may cause."""
OPERATOR_REFUSALS = CLIENT_REFUSALS | {409}
"""The same of operators: a paused engine refuses some commands."""
RESTORING: list[tuple[str, dict[str, Any] | None]] = [
    ("/admin/wake", None),
    ("/admin/weights", {"files": ["model.safetensors"], "weight_version": "0"}),
    ("/admin/resume", None),
    ("/resize_kv_cache", {"num_blocks": NUM_BLOCKS}),
]
"""Commands after which the engine serves as at its start, whatever came before."""
CHANGES_UNTIL_RESTORED = 8
GOOD_REQUEST = build_post("/generate", b'{"prompt": "a", "seed": 1}')
TIMEOUT_S = 60.0
WIRE_ERRORS = (OSError, EOFError, ValueError, TimeoutError)
"""Errors of a response that is cut, is not HTTP, or does not come."""


@dataclass(slots=True)
class BodyFuzzReport:
    """Results of many bodies.

    faults        responses that no body may have, each with the body's index
    refused_ms    milliseconds of each refusal
    """

    faults: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    duration_s: float = 0.0

    def __str__(self) -> str:
        ordered = sorted(self.refused_ms)
        p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        return (
            f"{self.statuses.total()} bodies in {self.duration_s:.1f} s: {dict(self.statuses)}; "
            f"refusals: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {ordered[-1]:.1f} ms; "
            f"{dict(self.codes.most_common())}"
        )

    def add_answer(
        self, name: str, path: str, answer: WireResponse, refusals: set[int], took_s: float
    ) -> None:
        """Count the response to the body of this name, and add its fault, if it has one."""
        self.statuses[answer.status] += 1
        if answer.status != 200:
            self.refused_ms.append(took_s * 1e3)
        problem = find_fault(path, answer, refusals)
        if problem is not None:
            self.faults.append(f"{name}: {answer.status} {problem}: {answer.body[:200]!r}")
        elif answer.status != 200:
            error = answer.json.get("error", answer.json)
            self.codes[str(error.get("code", error["type"]))] += 1


async def run_fuzz(
    address: Address,
    seed: int,
    count: int,
    connections: int,
    routes: dict[str, int] = CLIENT_ROUTES,
) -> BodyFuzzReport:
    """Send the first `count` bodies of this seed over so many connections."""
    report = BodyFuzzReport()
    indices = iter(range(count))
    start_s = time.perf_counter()

    async def send() -> None:
        wire = PersistentConnection(address)
        for index in indices:
            path, body = fuzz_body(seed, index, routes)
            name, sent_s = f"seed {seed} index {index} {path}", time.perf_counter()
            try:
                answer = await asyncio.wait_for(wire.send(build_post(path, body)), TIMEOUT_S)
            except WIRE_ERRORS as error:
                await wire.close()
                report.faults.append(f"{name}: {error!r}")
                continue
            took_s = time.perf_counter() - sent_s
            report.add_answer(name, path, answer, CLIENT_REFUSALS, took_s)
        await wire.close()

    await asyncio.gather(*(send() for _ in range(connections)))
    report.duration_s = time.perf_counter() - start_s
    return report


async def run_operator_fuzz(address: Address, seed: int, count: int) -> BodyFuzzReport:
    """Send the first `count` bodies of operators, and undo their changes now and then."""
    report = BodyFuzzReport()
    wire = PersistentConnection(address)
    start_s = time.perf_counter()
    expected = (await wire.send(GOOD_REQUEST)).json["text"]
    for index in range(count):
        path, body = fuzz_body(seed, index, OPERATOR_ROUTES)
        name, sent_s = f"seed {seed} index {index} {path}", time.perf_counter()
        try:
            answer = await asyncio.wait_for(wire.send(_build_command(path, body)), TIMEOUT_S)
            took_s = time.perf_counter() - sent_s
            report.add_answer(name, path, answer, OPERATOR_REFUSALS, took_s)
            if index % CHANGES_UNTIL_RESTORED == 0 or index == count - 1:
                good = await asyncio.wait_for(_restore(wire), TIMEOUT_S)
                if good.status != 200 or good.json["text"] != expected:
                    report.faults.append(f"{name}: then {good.status} {good.body[:200]!r}")
        except WIRE_ERRORS as error:
            await wire.close()
            report.faults.append(f"{name}: {error!r}")
    await wire.close()
    report.duration_s = time.perf_counter() - start_s
    return report


async def _restore(wire: PersistentConnection) -> WireResponse:
    """Let the engine serve as at its start, and return the response to a good request."""
    for path, fields in RESTORING:
        body = b"" if fields is None else json.dumps(fields).encode()
        await wire.send(_build_command(path, body))
    return await wire.send(GOOD_REQUEST)


def _build_command(path: str, body: bytes) -> bytes:
    """Return a request with the key that its route takes."""
    if not path.startswith("/admin/"):
        return build_post(path, body)
    key, length = f"authorization: Bearer {ADMIN_KEY}", f"content-length: {len(body)}"
    return build_head("POST", path, HOST, JSON, key, length) + body


# Faults.


def find_fault(path: str, answer: WireResponse, refusals: set[int]) -> str | None:
    """Return what is wrong with the response to a body, or None."""
    if answer.status == 200 and answer.headers.get("content-type", "").startswith(
        "text/event-stream"
    ):
        return None if _ends_well(path, answer.body) else "a stream that does not end well"
    if answer.status == 200 and path in RESIZES:
        return "a body" if answer.body else None
    try:
        found = json.loads(answer.body, parse_constant=_refuse_constant)
    except ValueError:
        return "no JSON"
    if answer.status == 200:
        return None if isinstance(found, dict) and not found.get("error") else "no answer"
    if answer.status not in refusals:
        return "a status that no body may cause"
    if path.startswith(ANTHROPIC):
        return _find_anthropic_fault(found)
    if path == SCORE:
        return _find_score_fault(found)
    return _find_envelope_fault(found)


def _ends_well(path: str, body: bytes) -> bool:
    """Return whether the last event of a stream is the one that its API has."""
    if not body.endswith(b"\n\n"):
        return False
    last = body.split(b"\n\n")[-2]
    if path == RESPONSES:
        return last.startswith((b"event: response.completed\n", b"event: response.incomplete\n"))
    if path == ANTHROPIC:
        return last.startswith(b"event: message_stop\n")
    return last == b"data: [DONE]" and b'"error":' not in body


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _find_anthropic_fault(found: Any) -> str | None:
    if not isinstance(found, dict) or list(found) != ["type", "error", "request_id"]:
        return "no envelope"
    error = found["error"]
    if not isinstance(error, dict) or list(error) != ["type", "message"]:
        return "no envelope"
    if not _is_message(error["message"]):
        return "a message that is none"
    has_kind = error["type"] in ("invalid_request_error", "not_found_error", "request_too_large")
    return None if has_kind else "a type or code that is none"


def _find_score_fault(found: Any) -> str | None:
    if not isinstance(found, dict) or list(found) != ["object", "message", "type", "param", "code"]:
        return "no envelope"
    if not _is_message(found["message"]):
        return "a message that is none"
    has_kind = (found["object"], found["type"]) == ("error", "BadRequestError")
    return None if has_kind and type(found["code"]) is int else "a type or code that is none"


def _find_envelope_fault(found: Any) -> str | None:
    error = found.get("error") if isinstance(found, dict) and list(found) == ["error"] else None
    if not isinstance(error, dict) or list(error) != ["message", "type", "param", "code"]:
        return "no envelope"
    message, kind, param, code = error.values()
    if not _is_message(message):
        return "a message that is none"
    if kind != "invalid_request_error" or not isinstance(code, str) or not code:
        return "a type or code that is none"
    has_valid_param = param is None or (isinstance(param, str) and param.isprintable())
    return None if has_valid_param else "a param that is none"


def _is_message(message: Any) -> bool:
    is_plain = isinstance(message, str) and message.isascii() and message.isprintable()
    return is_plain and 0 < len(message) <= 512
