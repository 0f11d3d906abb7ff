"""Time slicing: no callback of the event loop does work that grows with a request.

Work is counted, not timed: calls and returns of functions, in Python and in C, within one callback.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from forge.async_llm import MAX_DELTAS_PER_READ, MAX_LOGPROBS_PER_READ, AsyncLLM
from forge.outputs import RequestOutput, TextDelta
from forge.request import Request, SamplingParams, TokenLogprob
from forge.server.admission import AdmissionQueue
from forge.server.app import create_app
from forge.server.chat import ChatCompletionResponse, ChatRequest
from forge.server.chat_formats import find_chat_formats
from forge.server.errors import APIError
from forge.server.legacy_logprobs import LegacyLogprobs
from forge.server.prompt_logprobs import build_prompt_logprobs
from forge.server.protocol import parse_request
from forge.server.streaming import GeneratedStream
from forge.server.time_slicing import (
    ENTRIES_PER_SLICE,
    SEND_BYTES,
    TOKENS_PER_SLICE,
    EncodedList,
    SlicedWork,
    encode_json,
    iter_json,
    run_in_slices,
)
from forge.server.tokenization import MAX_IDS, MAX_TEXT_CHARS
from forge.tokenizer import ByteTokenizer

MOST_CALLS = 25 * ENTRIES_PER_SLICE
"""Most calls in one callback: an entry needs about ten, and two slices may share a callback."""

MANY = {"model": "hash", "n": 64, "max_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
LONG = {"model": "hash", "max_tokens": 64, "ignore_eos": True}
ECHO = {"model": "hash", "max_tokens": 0, "echo": True, "logprobs": 20}


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the calls in each callback.

    most   calls of the longest callback
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return super().call_soon(self._count_calls, callback, *args, context=context)

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._count_calls, callback, *args, context=context)

    def _count_calls(self, callback: Callable[..., object], *args: Any) -> None:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            callback(*args)
        finally:
            sys.setprofile(None)
            self.most = max(self.most, calls)


def measure_callbacks(path: str, body: dict[str, Any]) -> tuple[httpx.Response, int]:
    """Return the response, and the calls of the longest callback while it was made."""
    loop = CountingLoop()

    async def measure() -> httpx.Response:
        options: dict[str, Any] = {"num_blocks": 2048, "block_size": 16, "max_num_seqs": 128}
        options["max_logprobs"] = -1
        async with AsyncLLM("hash", **options) as llm:
            transport = httpx.ASGITransport(create_app(llm))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                await asyncio.sleep(0)
                loop.most = 0  # opening the engine is one callback
                return await http.post(path, json=body, timeout=None)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(measure()), loop.most


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 20, **MANY}),
        pytest.param("/v1/chat/completions", {**CHAT, **MANY}, marks=pytest.mark.long),
        ("/v1/completions", {"prompt": "a", "logprobs": 20, "stream": True, **MANY}),
        ("/v1/completions", {"prompt": "a" * 512, "n": 1, **ECHO}),
        ("/v1/completions", {"prompt": "a", "logprobs": -1, **LONG}),
        ("/v1/completions", {"prompt": "a" * 64, "stream": True, **ECHO, "logprobs": -1}),
        ("/v1/completions", {"prompt": "a" * 64, "prompt_logprobs": -1, **LONG, "max_tokens": 1}),
        ("/v1/chat/completions", {**CHAT, **LONG, "logprob_token_ids": list(range(128))}),
    ],
    ids=["choices", "chat", "stream", "echo", "all", "stream all", "prompt", "listed"],
)
def test_no_callback_does_more_for_an_answer_of_many_log_probabilities(
    path: str, body: dict[str, Any]
) -> None:
    answer, most = measure_callbacks(path, body)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 100_000
    assert most < MOST_CALLS


class TicksAtEnds:
    """A StreamEncoder that notes how often others have run, at the end of each choice."""

    def __init__(self) -> None:
        self.num_ticks = 0
        self.ticks_at_ends: list[int] = []

    def encode_ping(self) -> str:
        """Return nothing."""
        return ""

    def encode_delta(self, index: int, delta: TextDelta) -> list[str]:
        """Note the ticks at the end of a choice."""
        if delta.finish_reason is not None:
            self.ticks_at_ends.append(self.num_ticks)
        return ["a"]

    def encode_end(self) -> list[str]:
        """Return no event."""
        return []

    def encode_error(self, error: APIError) -> list[str]:
        """Return no event."""
        return []

    def close(self) -> None:
        """Do nothing."""


def test_others_run_between_the_ends_of_the_choices_of_a_stream() -> None:
    """An answer with tools is compared with its schema there, which may take some milliseconds."""
    encoder = TicksAtEnds()

    async def tick() -> None:
        while True:
            encoder.num_ticks += 1
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        pass

    async def stream() -> None:
        async with AsyncLLM("hash", num_blocks=256, block_size=16) as llm:
            request = llm.create_request("a", SamplingParams(max_tokens=1, n=8))
            response = GeneratedStream(AdmissionQueue(llm), [request], "", encoder)
            ticker = asyncio.create_task(tick())
            await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
            ticker.cancel()

    asyncio.run(asyncio.wait_for(stream(), 20))
    assert len(set(encoder.ticks_at_ends)) == len(encoder.ticks_at_ends) == 8


def test_a_reader_that_was_slow_takes_what_waited_in_parts() -> None:
    async def taken() -> list[TextDelta]:
        async with AsyncLLM("hash", num_blocks=256, block_size=16) as llm:
            params = SamplingParams(max_tokens=4 * MAX_DELTAS_PER_READ, ignore_eos=True)
            deltas = llm.stream("a", params)
            found = [await anext(deltas)]
            while llm.status.has_work:
                await asyncio.sleep(0.005)
            return [*found, *[delta async for delta in deltas]]

    found = asyncio.run(taken())
    assert sum(len(delta.token_ids) for delta in found) == 4 * MAX_DELTAS_PER_READ
    assert max(len(delta.token_ids) for delta in found) <= MAX_DELTAS_PER_READ


def test_a_reader_that_was_slow_takes_few_log_probabilities_at_a_time() -> None:
    """Each token comes with 257 and itself: 16 tokens have more than a read."""

    async def taken() -> list[TextDelta]:
        async with AsyncLLM("hash", num_blocks=256, block_size=16, max_logprobs=-1) as llm:
            params = SamplingParams(max_tokens=MAX_DELTAS_PER_READ, ignore_eos=True, logprobs=-1)
            deltas = llm.stream("a", params)
            found = [await anext(deltas)]
            while llm.status.has_work:
                await asyncio.sleep(0.005)
            return [*found, *[delta async for delta in deltas]]

    found = asyncio.run(taken())
    assert sum(len(delta.logprobs) for delta in found) == MAX_DELTAS_PER_READ
    assert max(len(delta.logprobs) for delta in found) == -(-MAX_LOGPROBS_PER_READ // 258)


VALUES: list[Any] = [
    {},
    [],
    {"a": 1, "é": None, "c": {"d": [], "e": {}}},
    {"choices": []},
    {"choices": [{"index": 0, "logprobs": {"tokens": ["\n\u2028"] * 200}}, {}], "usage": {"n": 1}},
    [{"a": i} for i in range(TOKENS_PER_SLICE)],
    [{"a": [i]} for i in range(3 * TOKENS_PER_SLICE + 1)],
    [None, {"a": 1}, {str(i): i for i in range(3 * ENTRIES_PER_SLICE)}],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_parts_of_a_value_are_its_json(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert "".join(iter_json(value)) == whole


def test_a_list_that_was_encoded_as_it_grew_is_the_same_json() -> None:
    grown, plain = EncodedList(), [{"a": i} for i in range(5)]
    assert "".join(iter_json({"content": grown})) == '{"content":[]}'
    for part in (plain[:2], [], plain[2:]):
        grown.extend(part)
    assert json.loads("".join(iter_json({"content": grown}))) == {"content": plain}


def test_no_part_has_more_items_than_a_slice() -> None:
    scores = [{"token": "a", "top": [{"token": "b"}] * 20}] * 1000
    parts = list(iter_json({"choices": [{"logprobs": {"content": scores}}]}))
    assert max(part.count('"top"') for part in parts) == TOKENS_PER_SLICE


VOCABULARY = ByteTokenizer(tuple(f"<{i}>" for i in range(3 * ENTRIES_PER_SLICE)))
RANKED = tuple((token, -0.5 * token) for token in range(VOCABULARY.vocab_size))
WHOLE = [TokenLogprob(7, -3.5, RANKED), TokenLogprob(8, -1.0, RANKED[:2])]
"""A token that comes with the whole vocabulary, and one that is not among its most likely ones."""


def build_chat_logprobs() -> SlicedWork[Any]:
    body = parse_request(ChatRequest, {"model": "a", "messages": [], "logprobs": True})
    request = Request(0, (1,), SamplingParams(logprobs=-1))
    output = RequestOutput.empty(request)
    output.append(TextDelta(0, "ab", (7, 8), "stop", tuple(WHOLE)))
    formats = find_chat_formats(VOCABULARY)
    answer = ChatCompletionResponse(body, request, VOCABULARY, formats, {})
    whole = yield from answer.body([output])
    return whole["choices"][0]["logprobs"]["content"]


def build_legacy_logprobs() -> SlicedWork[Any]:
    block = LegacyLogprobs(VOCABULARY, VOCABULARY.token_text, 0)
    yield from block.add_all(WHOLE)
    return block.take()["top_logprobs"]


def chat_entry(token: int, logprob: float) -> dict[str, Any]:
    data = list(VOCABULARY.token_bytes(token))
    return {"token": VOCABULARY.token_text(token), "logprob": logprob, "bytes": data}


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (
            build_prompt_logprobs(WHOLE, VOCABULARY),
            [
                None,
                *(
                    {
                        str(t): {"logprob": x, "rank": r, "decoded_token": VOCABULARY.token_text(t)}
                        for t, x, r in ((token, score, None), *((t, x, t + 1) for t, x in top))
                    }
                    for token, score, top in WHOLE
                ),
            ],
        ),
        (
            build_chat_logprobs(),
            [
                {
                    **chat_entry(token, score),
                    "top_logprobs": [chat_entry(*other) for other in top],
                }
                for token, score, top in WHOLE
            ],
        ),
        (
            build_legacy_logprobs(),
            [
                {VOCABULARY.token_text(t): x for t, x in ((token, score), *top)}
                for token, score, top in WHOLE
            ],
        ),
    ],
    ids=["prompt", "chat", "legacy"],
)
def test_a_token_with_a_whole_vocabulary_is_built_and_encoded_in_slices(
    work: SlicedWork[Any], expected: Any
) -> None:
    slices = []
    while True:
        try:
            slices.append(next(work))
        except StopIteration as end:
            parts = list(iter_json(end.value))
            break
    assert json.loads("".join(parts)) == expected
    assert max(slices) <= ENTRIES_PER_SLICE and sum(slices) > 3 * ENTRIES_PER_SLICE
    assert max(map(len, parts)) < 100 * ENTRIES_PER_SLICE


def test_others_run_between_the_slices_of_an_answer() -> None:
    async def turns() -> int:
        body = {"choices": [{"tokens": ["x" * 100] * 100_000}]}

        def made() -> Any:
            yield 0
            return body

        count, work = 0, asyncio.create_task(run_in_slices(encode_json(made())))
        while not work.done():
            await asyncio.sleep(0)
            count += 1
        assert json.loads(b"".join(await work)) == body
        return count

    assert asyncio.run(turns()) > 100


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {"prompt": "a" * (MAX_TEXT_CHARS + 1)}, "prompt", "string_too_long"),
        ("/detokenize", {"tokens": [1] * (MAX_IDS + 1)}, "tokens", "too_many_items"),
    ],
)
def test_a_text_to_tokenize_has_a_limit_and_so_have_ids(
    path: str, body: dict[str, Any], param: str, code: str
) -> None:
    answer, _ = measure_callbacks(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert "at most" in error["message"] and "in parts" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a" * MAX_TEXT_CHARS}), ("/detokenize", {"tokens": [98] * MAX_IDS})],
)
def test_what_is_within_the_limit_is_answered_off_the_event_loop(
    path: str, body: dict[str, Any]
) -> None:
    answer, most = measure_callbacks(path, body)
    assert answer.status_code == 200
    found = answer.json()
    assert found.get("count", MAX_TEXT_CHARS) == MAX_TEXT_CHARS
    assert len(found.get("prompt", "a" * MAX_IDS)) == MAX_IDS
    assert most < MOST_CALLS


def test_the_names_of_many_tokens_are_encoded_and_sent_in_parts() -> None:
    sizes: list[int] = []

    async def tokenize() -> httpx.Response:
        async with AsyncLLM("hash", num_blocks=16, block_size=16) as llm:
            app = create_app(llm)

            async def record_sizes(scope: Scope, receive: Receive, send: Send) -> None:
                async def send_body(message: Message) -> None:
                    sizes.append(len(message.get("body", b"")))
                    await send(message)

                await app(scope, receive, send_body)

            transport = httpx.ASGITransport(record_sizes)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                body = {"prompt": "é" * 2**15, "return_token_strs": True}
                return await http.post("/tokenize", json=body)

    found = asyncio.run(tokenize()).json()
    assert found["count"] == len(found["tokens"]) == 2**16
    assert found["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9"] * 2**15
    assert sum(sizes) > 4 * SEND_BYTES and max(sizes) < 2 * SEND_BYTES
