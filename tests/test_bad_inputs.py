"""Every row of bad_inputs.py, one after the other, on a server that serves 32 good streams.

One server for all rows. The streams begin anew as they end, from the first row to the last, and
each must say what the same request said alone. An observer looks at every block of the cache after
every step: it is free, cached or in the table of a request that is open.

    rows      ──► bad request ──► refusal ──► who is left? ──► a good request
    32 streams ═══════════════════════════════════════════════════════════════►
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
from forge.models.load import LETTERS
from forge.models.logits import Faults
from forge.seam import StepPlan
from forge.tokenizer import ByteTokenizer, ChatEnd, Message
from tests.audited import WITHIN_S, Audit, Audited, audited
from tests.bad_inputs import (
    ALL,
    CHAT,
    CHAT_OVERHEAD,
    COMPLETIONS,
    GENERATE,
    ITS_NAME,
    LONGEST,
    OPENAI,
    ROWS,
    Cut,
    Row,
    body_of,
    requests_of,
    user,
)
from tests.listening import Stepwise, wait_until
from tests.test_async_llm import POISON
from tests.test_server_limits import health, is_closing, started
from tests.wire import HOST, KEY, Address, Answer, Exchange, Wire, answer_to, head, post

STREAMS = 32
STEP_MS = 20
CACHE = {"num_blocks": 1024, "block_size": 4, "max_model_len": LONGEST, "max_num_seqs": 64}


class Alternating(ByteTokenizer):
    """A template that takes no two messages of one role in a row."""

    def chat(self, messages: Sequence[Message], end: ChatEnd, variables: Any) -> list[int]:
        roles = [message["role"] for message in messages]
        if any(a == b for a, b in pairwise(roles)):
            raise InvalidRequest("messages", "roles must alternate", "Mend it", "template_error")
        return super().chat(messages, end, variables)


def good_request(index: int) -> bytes:
    """One of the streams, each with another prompt and other fields.

    Each has another length, so that one ends after nearly every step: `check` waits for that.
    """
    text = f"this is stream {index} " + "abc" * (index % 5)
    fields: dict[str, Any] = {
        "model": "hash",
        "max_tokens": 24 + index,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": Audit.OWN,
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
        return post(CHAT, json.dumps(fields).encode(), f"x-request-id: good-{index}")
    fields["prompt"] = text
    return post(COMPLETIONS, json.dumps(fields).encode(), f"x-request-id: good-{index}")


def said(answer: Answer) -> tuple[int, list[Any], str]:
    """What a stream said, however it was cut into events: text, scores, ending, usage."""
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
    return answer.status, list(found.items()), events[-2]


class GoodStreams:
    """32 streams that begin anew as they end, on an event loop in a thread.

    alone      what each said when it was alone
    altered    who has said anything else since
    rounds     how often each begins, if nobody stops it before
    """

    def __init__(self, address: Address, alone: Mapping[int, Any], rounds: int = 2**31) -> None:
        self.altered: list[str] = []
        self._rounds = rounds
        self.ended = 0
        self._address = address
        self._alone = alone
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        """Each has come to its end."""
        self._stopping = True
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), "a stream does not end"

    async def _run(self) -> None:
        await asyncio.gather(*(self._go_on(index) for index in range(STREAMS)))

    async def _go_on(self, index: int) -> None:
        wire = Wire(self._address)
        request = good_request(index)
        for _ in range(self._rounds):
            if self._stopping:
                break
            try:
                found: Any = said(await wire.answer(request))
            except (OSError, EOFError, ValueError) as fault:
                found = repr(fault)
                await wire.close()
            self.ended += 1
            if found != self._alone[index]:
                self.altered.append(f"stream {index}: {found} instead of {self._alone[index]}")
                break
        await wire.close()


class Served(Audited):
    """A server with 32 good streams on it."""

    def __init__(self, server: Audited, rounds: int = 2**31) -> None:
        super().__init__(server.llm, server.address, server.client, server.clock)
        self.streams = GoodStreams(server.address, alone(), rounds)
        wait_until(lambda: self.audit.open == STREAMS, WITHIN_S)

    def check(self) -> None:
        """Nobody is left of what was sent, nothing is lost, and a good stream came to its end."""
        audit, streams = self.audit, self.streams
        steps, ended = audit.steps, streams.ended
        wait_until(
            lambda: audit.steps > steps and streams.ended > ended and not audit.strangers, WITHIN_S
        )
        assert streams.altered == []
        assert audit.faults == []
        assert self.llm.failure is None


KNOWN_GOOD = post(GENERATE, b'{"prompt": "ok", "max_tokens": 1, "temperature": 0}')


@cache
def alone() -> dict[int, Any]:
    """What each good stream says, one after the other on a server that has nothing else to do."""
    with audited("hash", tokenizer=Alternating(), **CACHE) as server:
        return {
            index: said(answer_to(server.address, good_request(index), WITHIN_S))
            for index in range(STREAMS)
        }


@cache
def known_text() -> str:
    """The answer of KNOWN_GOOD."""
    with LLM("hash") as llm:
        return llm.generate("ok", SamplingParams(temperature=0, max_tokens=1))[0].text


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serves 32 good streams from the first test to the last, and has lost nothing after it."""
    model = f"hash:step_ms={STEP_MS}"
    with audited(model, tokenizer=Alternating(), **CACHE) as quiet:
        server = Served(quiet)
        try:
            yield server
        finally:
            server.streams.stop()
        answer = answer_to(server.address, KNOWN_GOOD, WITHIN_S)
        assert (answer.status, answer.json["text"]) == (200, known_text())
        assert server.streams.altered == []
        assert 'forge_requests_total{finish="error"} 0.0' in server.figures()
        server.check_rest()


def check_answer(answer: Answer, row: Row, name: str | None) -> None:
    """The answer is what the row says, in the shape of all answers."""
    assert answer.headers["x-request-id"]
    if row.code is None:
        assert answer.status == row.status == 200, answer.body[:400]
    else:
        found = answer.json
        assert list(found) == ["error"], answer.body[:400]
        error = found["error"]
        assert list(error) == ["message", "type", "param", "code"]
        param = name if row.param == ITS_NAME else row.param
        assert (answer.status, error["type"], error["param"], error["code"]) == (
            row.status,
            row.kind,
            param,
            row.code,
        ), error
        message = error["message"]
        assert 0 < len(message) <= 512 and message.isascii() and message.isprintable()
        for inside in ("pydantic", "Traceback", "Error(", "0x", ".py", KEY):
            assert inside not in message
    assert row.holds(answer), answer.body[:400]


LARGE = {41, 104, 107, 147}
"""Rows whose bodies have megabytes."""
FIRST_OF_CODE = {row.code: row.number for row in reversed(ROWS) if row.number not in LARGE}
"""The rows of the quick tests: one for each code of an error that no large body is needed for."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.long] * (FIRST_OF_CODE.get(row.code) != row.number))
        for row in ROWS
    ],
    ids=lambda row: f"{row.number}-{row.what}",
)
def test_a_bad_input_is_refused_and_harms_nobody(served: Served, row: Row) -> None:
    asked = [
        (sent, name, Exchange(served.address, sent.request(), WITHIN_S))
        for sent, name in requests_of(row)
    ]
    try:
        if row.code == "request_timeout":
            answer_to(served.address, head("GET", "/livez", HOST), WITHIN_S)  # it has read the rest
            served.clock.forward(DEFAULT_LIMITS.read_timeout)
        for sent, name, exchange in asked:
            count = 1 if isinstance(sent, Cut) else sent.answers
            answers = exchange.last_words() if isinstance(sent, Cut) else exchange.answers(count)
            assert len(answers) == count
            for answer in answers:
                check_answer(answer, row, name)
    finally:
        for _, _, exchange in asked:
            exchange.leave()
    served.check()


LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


def test_a_client_that_leaves_ends_its_own_request_and_no_other(served: Served) -> None:
    """Row 132: it has the name of another request, or the beginning of one."""
    exchanges = []
    for name in ("good", "good-1", "g"):
        body = body_of(GENERATE, {**LONG, "request_id": name})
        sent = post(GENERATE, body, f"x-request-id: {name}")
        exchanges.append(Exchange(served.address, sent, WITHIN_S))
    wait_until(lambda: served.audit.strangers == 3, WITHIN_S)
    exchanges.pop().leave()
    wait_until(lambda: served.audit.strangers == 2, WITHIN_S)
    for exchange in exchanges:
        exchange.leave()
    served.check()


# Rows about the state of a server.


def check_refusal(answer: Answer, status: int, code: str, kind: str = "server_error") -> None:
    """The answer is this error, of no field."""
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"], error["code"]) == (
        status,
        kind,
        None,
        code,
    ), error


def sent_to_each(server: Served, fields: Mapping[str, Any]) -> list[Exchange]:
    """A good request with these fields to every endpoint."""
    requests = (post(path, body_of(path, fields)) for path in ALL)
    return [Exchange(server.address, request, WITHIN_S) for request in requests]


@pytest.mark.soak
def test_who_finds_the_queue_full_or_waits_too_long_is_told_when_to_ask_again() -> None:
    """Rows 136 and 137: the streams have all places, and as many requests wait as may."""
    limits = Limits(max_queue=STREAMS)
    options = {**CACHE, "max_num_seqs": STREAMS}
    with audited("hash:step_ms=50", limits=limits, tokenizer=Alternating(), **options) as quiet:
        server = Served(quiet, rounds=1)
        wait_until(lambda: server.llm.status.running == STREAMS, WITHIN_S)
        steps = server.audit.steps
        wait_until(lambda: server.audit.steps > steps + 1, WITHIN_S)  # each has had a token
        several = post(COMPLETIONS, body_of(COMPLETIONS, {"prompt": ["a"] * (STREAMS - 3)}))
        waiting = [*sent_to_each(server, {}), Exchange(server.address, several, WITHIN_S)]
        wait_until(lambda: server.audit.strangers == STREAMS, WITHIN_S)
        for exchange in sent_to_each(server, {}):
            (answer,) = exchange.answers(1)
            check_refusal(answer, 429, "queue_full", "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        server.clock.forward(limits.queue_timeout)
        for exchange in waiting:
            (answer,) = exchange.answers(1)
            check_refusal(answer, 503, "queue_timeout")
            assert int(answer.headers["retry-after"]) >= 1
        server.streams.stop()
        assert server.streams.altered == []
        server.check_rest()


def breaks_past(position: int, plan: StepPlan) -> dict[int, str]:
    """Rows that compute this position of their sequence, and why they fail."""
    rows = enumerate(plan.rows)
    return {index: "secret detail" for index, row in rows if row.start <= position < row.end}


def test_a_request_that_the_engine_fails_on_is_a_500_and_no_other_is() -> None:
    """Row 141. No stream is as long as what the model fails on."""
    with audited("hash", tokenizer=Alternating(), **CACHE) as quiet:
        quiet.llm.engine.model = HashModel(
            likely=[*[byte + 1 for byte in LETTERS] * 3, 0],  # as `hash` has it
            num_blocks=CACHE["num_blocks"],
            block_size=CACHE["block_size"],
            step_s=STEP_MS / 1000,
            faults=Faults(result=partial(breaks_past, 120)),
        )
        server = Served(quiet)
        prompts = {"prompt": "x" * 150, "messages": user("x" * 150)}
        for path in ALL:
            name = "messages" if path == CHAT else "prompt"
            request = post(path, body_of(path, {name: prompts[name]}))
            answer = answer_to(server.address, request, WITHIN_S)
            check_refusal(answer, 500, "internal_error")
            assert answer.headers["x-should-retry"] == "false" and b"secret" not in answer.body
        for path, name in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
            begun = {"prompt": "x" * 118, "messages": user("x" * (118 - CHAT_OVERHEAD))}[name]
            body = body_of(path, {name: begun, **LONG, "max_tokens": 50, "stream": True})
            answer = answer_to(server.address, post(path, body), WITHIN_S)
            last = answer.body.split(b"\n\n")[-2].removeprefix(b"data: ")
            assert json.loads(last)["error"]["code"] == "internal_error", answer.body
            assert b"[DONE]" not in answer.body and b"secret" not in answer.body
        server.check()
        server.streams.stop()
        server.check_rest()


def test_a_client_that_leaves_before_its_answer_leaves_nothing() -> None:
    """Row 143, with answers that are whole and with streams, beside a good stream.

    No step is taken while they leave, so what ends their requests is that.
    """
    with audited("hash", tokenizer=Alternating(), **CACHE) as server:
        model = Stepwise(num_blocks=CACHE["num_blocks"], block_size=CACHE["block_size"])
        server.llm.engine.model = model
        with model.ending():
            good = Exchange(server.address, good_request(0), WITHIN_S)
            bodies = [(path, body_of(path, LONG)) for path in ALL]
            bodies += [(path, body_of(path, {**LONG, "stream": True})) for path in OPENAI]
            leaving = [
                Exchange(server.address, post(path, body), WITHIN_S) for path, body in bodies
            ]
            wait_until(lambda: len(server.llm._mailboxes) == 1 + len(leaving), WITHIN_S)
            model.let.release(2)
            wait_until(lambda: server.audit.strangers == len(leaving), WITHIN_S)
            for exchange in leaving:
                exchange.leave()
            wait_until(lambda: len(server.llm._mailboxes) == 1, WITHIN_S)
            model.let.release(2)
            wait_until(lambda: (server.audit.open, server.audit.strangers) == (1, 0), WITHIN_S)
        (answer,) = good.answers(1)
        assert answer.status == 200
        assert said(answer) == said(answer_to(server.address, good_request(0), WITHIN_S))
        server.check_rest()


@pytest.mark.soak
def test_who_comes_after_the_signal_is_sent_away_and_the_streams_come_to_their_end() -> None:
    """Row 139."""
    words = ("hash:step_ms=40", f"--api-key={KEY}", "--drain-timeout=30")
    with started(*words) as (process, server):
        address = ("127.0.0.1", httpx.URL(server.url).port or 80)
        streams = GoodStreams(address, alone(), rounds=1)
        wait_until(lambda: health(server) == STREAMS, WITHIN_S)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_closing(server))
        for path in ALL:
            exchange = Exchange(address, post(path, body_of(path, {})), WITHIN_S)
            (answer,) = exchange.last_words()
            check_refusal(answer, 503, "shutting_down")
            assert answer.headers["connection"] == "close"
            assert int(answer.headers["retry-after"]) >= 1
        streams.stop()
        assert streams.altered == []
        assert process.wait(WITHIN_S) == 0


@pytest.mark.long
def test_when_the_engine_is_dead_every_endpoint_and_every_stream_says_so(tmp_path: Path) -> None:
    """Row 140."""
    file = tmp_path / "poison.py"
    file.write_text(POISON.format(fault="RuntimeError('secret detail')"), encoding="utf-8")
    model = f"hash:step_ms={STEP_MS}"
    with audited(model, tokenizer=Alternating(), policy=str(file), **CACHE) as quiet:
        server = Served(quiet, rounds=1)
        deadly = body_of(GENERATE, {"prompt": "x" * 13})
        Exchange(server.address, post(GENERATE, deadly), WITHIN_S).answers(1)
        exchanges = sent_to_each(server, {})
        for (answer,) in (exchange.answers(1) for exchange in exchanges):
            check_refusal(answer, 503, "engine_dead")
            assert answer.headers["x-should-retry"] == "false" and b"secret" not in answer.body
        server.streams.stop()
        assert len(server.streams.altered) == STREAMS
        for told in server.streams.altered:
            assert "engine_dead" in told.partition(" instead of ")[0] and "secret" not in told
