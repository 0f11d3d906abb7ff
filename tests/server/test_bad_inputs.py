"""Every row of bad_inputs.py, one after the other, on a server that serves 16 good streams.

One server for all rows. The streams start again when they end, from the first row to the last, and
each must have the output of the same request alone. An audit checks every block of the cache after
every step: it is free, cached or in the table of an open request.

    rows      ──► bad request ──► error ──► anything left? ──► a good request
    16 streams ═══════════════════════════════════════════════════════════════►
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge import LLM, HashModel, SamplingParams
from forge.errors import InvalidRequest
from forge.limits import DEFAULT_LIMITS, Limits
from forge.models.embedded import LETTERS
from forge.models.paged import FaultHooks
from forge.seam import StepPlan
from forge.tokenizer import ByteTokenizer, ChatEnd, ChatMessage
from tests.engine.test_async_llm import FAILING_POLICY
from tests.server.audited_server import (
    SERVER_TIMEOUT_S,
    AuditedServer,
    BlockAudit,
    open_audited_server,
)
from tests.server.bad_inputs import (
    ALL,
    CHAT,
    CHAT_OVERHEAD,
    COMPLETIONS,
    GENERATE,
    MAX_MODEL_LEN,
    OPENAI_PATHS,
    ROWS,
    SENT_FIELD,
    BadInput,
    ClosingRequest,
    build_body,
    row_requests,
    user,
)
from tests.server.http_wire import (
    HOST,
    KEY,
    Address,
    PersistentConnection,
    RawExchange,
    WireResponse,
    build_head,
    build_post,
    send_request,
)
from tests.server.local_server import GatedModel, wait_until
from tests.server.test_limits import count_requests, is_closing, open_server_process

STREAMS = 16
STEP_MS = 20
CACHE = {"num_blocks": 1024, "block_size": 4, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64}


class AlternatingTokenizer(ByteTokenizer):
    """A tokenizer whose template refuses two messages of one role in a row."""

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], end: ChatEnd, variables: Any
    ) -> list[int]:
        roles = [message["role"] for message in messages]
        if any(a == b for a, b in pairwise(roles)):
            raise InvalidRequest("messages", "roles must alternate", "Fix it", "template_error")
        return super().apply_chat_template(messages, end, variables)


def good_request(index: int) -> bytes:
    """Return the request of one stream, each with another prompt and other fields.

    Each has another length, so that one ends after nearly every step: `check` waits for that.
    """
    text = f"this is stream {index} " + "abc" * (index % 5)
    fields: dict[str, Any] = {
        "model": "hash",
        "max_tokens": 24 + index,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": BlockAudit.OWN_SALT,
        "seed": index,
        "ignore_eos": True,
        "temperature": 0,
        **[
            {},
            {"temperature": 1.2, "top_k": 40},
            {},
            {"logprobs": True, "top_logprobs": 2} if index % 2 else {"logprobs": 2},
            {},
            {"frequency_penalty": 1.5, "stop": ["etao", "\n"]},
        ][index // 2 % 6],
    }
    if index % 2:
        fields["messages"] = [{"role": "user", "content": text}]
        return build_post(CHAT, json.dumps(fields).encode(), f"x-request-id: good-{index}")
    fields["prompt"] = text
    return build_post(COMPLETIONS, json.dumps(fields).encode(), f"x-request-id: good-{index}")


def read_output(answer: WireResponse) -> tuple[int, list[Any], str]:
    """Return the text, scores, finish reason and usage of a stream, however it was cut.

    Without the cached tokens of the prompt, which depend on what ran before.
    """
    if answer.status != 200:
        return answer.status, [], answer.body.decode()
    events = answer.body.decode().split("\n\n")
    found: dict[str, Any] = {"text": "", "scores": []}
    for event in (each for each in events[:-2] if each != ": ping"):
        chunk = json.loads(event.removeprefix("data: "))
        for choice in chunk.get("choices", ()):
            found["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            scores = choice.get("logprobs") or {}
            found["scores"] += scores.get("content") or scores.get("top_logprobs") or ()
            found["finish"] = choice["finish_reason"]
        found["usage"] = chunk.get("usage")
        if found["usage"]:
            del found["usage"]["prompt_tokens_details"]
    return answer.status, list(found.items()), events[-2]


class GoodStreams:
    """16 streams that start again when they end, on an event loop in a thread.

    expected     output of each request alone
    mismatches   outputs that differed since
    rounds       how often each stream starts, unless `stop` comes first
    """

    def __init__(self, address: Address, expected: Mapping[int, Any], rounds: int = 2**31) -> None:
        self.mismatches: list[str] = []
        self._rounds = rounds
        self.num_ended = 0
        self._address = address
        self._expected = expected
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        """Let each stream come to its end, and stop."""
        self._stopping = True
        self._thread.join(SERVER_TIMEOUT_S)
        assert not self._thread.is_alive(), "a stream does not end"

    async def _run(self) -> None:
        await asyncio.gather(*(self._run_stream(index) for index in range(STREAMS)))

    async def _run_stream(self, index: int) -> None:
        wire = PersistentConnection(self._address)
        request = good_request(index)
        for _ in range(self._rounds):
            if self._stopping:
                break
            try:
                found: Any = read_output(await wire.send(request))
            except (OSError, EOFError, ValueError) as error:
                found = repr(error)
                await wire.close()
            self.num_ended += 1
            if found != self._expected[index]:
                self.mismatches.append(
                    f"stream {index}: {found} instead of {self._expected[index]}"
                )
                break
        await wire.close()


class LoadedServer(AuditedServer):
    """A server with 16 good streams on it."""

    def __init__(self, server: AuditedServer, rounds: int = 2**31) -> None:
        super().__init__(server.llm, server.address, server.client, server.clock)
        self.streams = GoodStreams(server.address, outputs_alone(), rounds)
        wait_until(lambda: self.audit.num_open == STREAMS, SERVER_TIMEOUT_S)

    def check(self) -> None:
        """Check that no bad request is left, no block is lost and a good stream has ended."""
        audit, streams = self.audit, self.streams
        steps, ended = audit.num_steps, streams.num_ended
        wait_until(
            lambda: audit.num_steps > steps and streams.num_ended > ended and not audit.num_foreign,
            SERVER_TIMEOUT_S,
        )
        assert streams.mismatches == []
        assert audit.faults == []
        assert self.llm.failure is None


GOOD_REQUEST = build_post(GENERATE, b'{"prompt": "ok", "max_tokens": 1, "temperature": 0}')


@cache
def outputs_alone() -> dict[int, Any]:
    """Return the output of each good stream, one after the other on an idle server."""
    with open_audited_server("hash", tokenizer=AlternatingTokenizer(), **CACHE) as server:
        return {
            index: read_output(send_request(server.address, good_request(index), SERVER_TIMEOUT_S))
            for index in range(STREAMS)
        }


@cache
def good_text() -> str:
    """Return the output of KNOWN_GOOD."""
    with LLM("hash") as llm:
        return llm.generate("ok", SamplingParams(temperature=0, max_tokens=1))[0].text


@pytest.fixture(scope="module")
def running_server() -> Iterator[LoadedServer]:
    """Serve 16 good streams from the first test to the last; check at the end that none is lost."""
    model = f"hash:step_ms={STEP_MS}"
    with open_audited_server(model, tokenizer=AlternatingTokenizer(), **CACHE) as quiet:
        server = LoadedServer(quiet)
        try:
            yield server
        finally:
            server.streams.stop()
        answer = send_request(server.address, GOOD_REQUEST, SERVER_TIMEOUT_S)
        assert (answer.status, answer.json["text"]) == (200, good_text())
        assert server.streams.mismatches == []
        assert 'forge_requests_total{finish="error"} 0.0' in server.metrics_lines()
        server.check_idle()


def check_answer(answer: WireResponse, row: BadInput, name: str | None) -> None:
    """Check that the response is the row's, in the shape of all responses."""
    assert answer.headers["x-request-id"]
    if row.code is None:
        assert answer.status == row.status == 200, answer.body[:400]
    else:
        found = answer.json
        assert list(found) == ["error"], answer.body[:400]
        error = found["error"]
        assert list(error) == ["message", "type", "param", "code"]
        param = name if row.param == SENT_FIELD else row.param
        assert (answer.status, error["type"], error["param"], error["code"]) == (
            row.status,
            row.error_type,
            param,
            row.code,
        ), error
        message = error["message"]
        assert 0 < len(message) <= 512 and message.isascii() and message.isprintable()
        for inside in ("pydantic", "Traceback", "Error(", "0x", ".py", KEY):
            assert inside not in message
    assert row.check(answer), answer.body[:400]


LARGE = {41, 104, 107, 147}
"""Rows whose bodies have megabytes."""
FIRST_NUMBER_BY_CODE = {row.code: row.number for row in reversed(ROWS) if row.number not in LARGE}
"""Rows of the quick tests: one for each error code that needs no large body."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, marks=[pytest.mark.long] * (FIRST_NUMBER_BY_CODE.get(row.code) != row.number)
        )
        for row in ROWS
    ],
    ids=lambda row: f"{row.number}-{row.description}",
)
def test_a_bad_input_is_refused_and_disturbs_no_stream(
    running_server: LoadedServer, row: BadInput
) -> None:
    exchanges = [
        (sent, name, RawExchange(running_server.address, sent.request(), SERVER_TIMEOUT_S))
        for sent, name in row_requests(row)
    ]
    try:
        if row.code == "request_timeout":
            send_request(
                running_server.address, build_head("GET", "/livez", HOST), SERVER_TIMEOUT_S
            )  # the server has read the rest
            running_server.clock.advance_and_wait(DEFAULT_LIMITS.read_timeout)
        for sent, name, exchange in exchanges:
            count = 1 if isinstance(sent, ClosingRequest) else sent.answers
            answers = (
                exchange.read_until_close()
                if isinstance(sent, ClosingRequest)
                else exchange.read_responses(count)
            )
            assert len(answers) == count
            for answer in answers:
                check_answer(answer, row, name)
    finally:
        for _, _, exchange in exchanges:
            exchange.close()
    running_server.check()


LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


def test_a_client_that_leaves_ends_its_own_request_and_no_other(
    running_server: LoadedServer,
) -> None:
    """Row 132: the bad request has the name of another request, or the beginning of one."""
    exchanges = []
    for name in ("good", "good-1", "g"):
        body = build_body(GENERATE, {**LONG, "request_id": name})
        sent = build_post(GENERATE, body, f"x-request-id: {name}")
        exchanges.append(RawExchange(running_server.address, sent, SERVER_TIMEOUT_S))
    wait_until(lambda: running_server.audit.num_foreign == 3, SERVER_TIMEOUT_S)
    exchanges.pop().close()
    wait_until(lambda: running_server.audit.num_foreign == 2, SERVER_TIMEOUT_S)
    for exchange in exchanges:
        exchange.close()
    running_server.check()


# Rows about the state of a server.


def check_refusal(answer: WireResponse, status: int, code: str, kind: str = "server_error") -> None:
    """Check that the response is this error, of no field."""
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"], error["code"]) == (
        status,
        kind,
        None,
        code,
    ), error


def send_to_all(server: LoadedServer, fields: Mapping[str, Any]) -> list[RawExchange]:
    """Send a good request with these fields to every endpoint."""
    requests = (build_post(path, build_body(path, fields)) for path in ALL)
    return [RawExchange(server.address, request, SERVER_TIMEOUT_S) for request in requests]


@pytest.mark.soak
def test_a_request_that_finds_the_queue_full_or_waits_too_long_gets_a_retry_time() -> None:
    """Rows 136 and 137: the streams fill the batch, and the queue is full."""
    limits = Limits(max_queue=STREAMS)
    options = {**CACHE, "max_num_seqs": STREAMS}
    with open_audited_server(
        "hash:step_ms=50", limits=limits, tokenizer=AlternatingTokenizer(), **options
    ) as quiet:
        server = LoadedServer(quiet, rounds=1)
        wait_until(lambda: server.llm.status.num_running == STREAMS, SERVER_TIMEOUT_S)
        steps = server.audit.num_steps
        wait_until(
            lambda: server.audit.num_steps > steps + 1, SERVER_TIMEOUT_S
        )  # each has had a token
        several = build_post(
            COMPLETIONS, build_body(COMPLETIONS, {"prompt": ["a"] * (STREAMS - 3)})
        )
        waiting = [*send_to_all(server, {}), RawExchange(server.address, several, SERVER_TIMEOUT_S)]
        wait_until(lambda: server.audit.num_foreign == STREAMS, SERVER_TIMEOUT_S)
        for exchange in send_to_all(server, {}):
            (answer,) = exchange.read_responses(1)
            check_refusal(answer, 429, "queue_full", "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        server.clock.advance_and_wait(limits.queue_timeout)
        for exchange in waiting:
            (answer,) = exchange.read_responses(1)
            check_refusal(answer, 503, "queue_timeout")
            assert int(answer.headers["retry-after"]) >= 1
        server.streams.stop()
        assert server.streams.mismatches == []
        server.check_idle()


def row_faults(position: int, plan: StepPlan) -> dict[int, str]:
    """Return an error for each row that computes this position of its sequence."""
    rows = enumerate(plan.rows)
    return {index: "secret detail" for index, row in rows if row.start <= position < row.end}


@pytest.mark.long
def test_a_request_that_the_engine_fails_on_is_a_500_and_no_other_is() -> None:
    """Row 141. No good stream is long enough to reach the failing position."""
    with open_audited_server("hash", tokenizer=AlternatingTokenizer(), **CACHE) as quiet:
        quiet.llm.engine.model = HashModel(
            likely_tokens=[*[byte + 1 for byte in LETTERS] * 3, 0],  # as in `hash`
            num_blocks=CACHE["num_blocks"],
            block_size=CACHE["block_size"],
            step_s=STEP_MS / 1000,
            faults=FaultHooks(result=partial(row_faults, 120)),
        )
        server = LoadedServer(quiet)
        prompts = {"prompt": "x" * 150, "messages": user("x" * 150)}
        for path in ALL:
            name = "messages" if path == CHAT else "prompt"
            request = build_post(path, build_body(path, {name: prompts[name]}))
            answer = send_request(server.address, request, SERVER_TIMEOUT_S)
            check_refusal(answer, 500, "internal_error")
            assert answer.headers["x-should-retry"] == "false" and b"secret" not in answer.body
        for path, name in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
            value = {"prompt": "x" * 118, "messages": user("x" * (118 - CHAT_OVERHEAD))}[name]
            body = build_body(path, {name: value, **LONG, "max_tokens": 50, "stream": True})
            answer = send_request(server.address, build_post(path, body), SERVER_TIMEOUT_S)
            last = answer.body.split(b"\n\n")[-2].removeprefix(b"data: ")
            assert json.loads(last)["error"]["code"] == "internal_error", answer.body
            assert b"[DONE]" not in answer.body and b"secret" not in answer.body
        server.check()
        server.streams.stop()
        server.check_idle()


@pytest.mark.long
def test_a_client_that_leaves_before_its_answer_leaves_nothing() -> None:
    """Row 143, with whole responses and with streams, alongside a good stream.

    No step runs while the clients leave, so only their leaving ends the requests.
    """
    with open_audited_server("hash", tokenizer=AlternatingTokenizer(), **CACHE) as server:
        model = GatedModel(num_blocks=CACHE["num_blocks"], block_size=CACHE["block_size"])
        server.llm.engine.model = model
        with model.open_at_exit():
            good = RawExchange(server.address, good_request(0), SERVER_TIMEOUT_S)
            bodies = [(path, build_body(path, LONG)) for path in ALL]
            bodies += [(path, build_body(path, {**LONG, "stream": True})) for path in OPENAI_PATHS]
            leaving = [
                RawExchange(server.address, build_post(path, body), SERVER_TIMEOUT_S)
                for path, body in bodies
            ]
            wait_until(lambda: len(server.llm._mailboxes) == 1 + len(leaving), SERVER_TIMEOUT_S)
            model.permits.release(2)
            wait_until(lambda: server.audit.num_foreign == len(leaving), SERVER_TIMEOUT_S)
            for exchange in leaving:
                exchange.close()
            wait_until(lambda: len(server.llm._mailboxes) == 1, SERVER_TIMEOUT_S)
            model.permits.release(2)
            wait_until(
                lambda: (server.audit.num_open, server.audit.num_foreign) == (1, 0),
                SERVER_TIMEOUT_S,
            )
        (answer,) = good.read_responses(1)
        assert answer.status == 200
        assert read_output(answer) == read_output(
            send_request(server.address, good_request(0), SERVER_TIMEOUT_S)
        )
        server.check_idle()


@pytest.mark.soak
def test_requests_after_the_signal_are_refused_and_open_streams_complete() -> None:
    """Row 139."""
    words = ("hash:step_ms=40", f"--api-key={KEY}", "--drain-timeout=30")
    with open_server_process(*words) as (process, server):
        address = ("127.0.0.1", httpx.URL(server.url).port or 80)
        streams = GoodStreams(address, outputs_alone(), rounds=1)
        wait_until(lambda: count_requests(server) == STREAMS, SERVER_TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_closing(server))
        for path in ALL:
            exchange = RawExchange(
                address, build_post(path, build_body(path, {})), SERVER_TIMEOUT_S
            )
            (answer,) = exchange.read_until_close()
            check_refusal(answer, 503, "shutting_down")
            assert answer.headers["connection"] == "close"
            assert int(answer.headers["retry-after"]) >= 1
        streams.stop()
        assert streams.mismatches == []
        assert process.wait(SERVER_TIMEOUT_S) == 0


@pytest.mark.long
def test_when_the_engine_is_dead_every_endpoint_and_every_stream_reports_it(tmp_path: Path) -> None:
    """Row 140."""
    file = tmp_path / "poison.py"
    file.write_text(FAILING_POLICY.format(fault="RuntimeError('secret detail')"), encoding="utf-8")
    model = f"hash:step_ms={STEP_MS}"
    with open_audited_server(
        model, tokenizer=AlternatingTokenizer(), policy=str(file), **CACHE
    ) as quiet:
        server = LoadedServer(quiet, rounds=1)
        deadly = build_body(GENERATE, {"prompt": "x" * 13})
        RawExchange(server.address, build_post(GENERATE, deadly), SERVER_TIMEOUT_S).read_responses(
            1
        )
        exchanges = send_to_all(server, {})
        for (answer,) in (exchange.read_responses(1) for exchange in exchanges):
            check_refusal(answer, 503, "engine_dead")
            assert answer.headers["x-should-retry"] == "false" and b"secret" not in answer.body
        server.streams.stop()
        assert len(server.streams.mismatches) == STREAMS
        for mismatch in server.streams.mismatches:
            assert (
                "engine_dead" in mismatch.partition(" instead of ")[0] and "secret" not in mismatch
            )
