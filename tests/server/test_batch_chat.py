"""Batches of chats, /invocations, and what options of the server change in requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig
from forge.outputs import TextDelta
from forge.request import SamplingParams
from forge.server import generation
from forge.server.admission import MAX_HELD_LOGPROBS, AdmissionQueue
from forge.server.app import create_app
from forge.server.errors import APIError
from forge.server.request_defaults import RequestDefaults
from forge.server.sse import comment_ping, encode_event
from forge.server.streaming import GeneratedStream
from tests.server.test_routes import SMALL, get, post
from tests.server.test_server import check_envelope, parse_chunks

CHAT, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": text}] for text in ("hi", "a longer one")]
GREEDY = {"model": "hash", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("hash", **SMALL)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def app(llm: AsyncLLM) -> Starlette:
    return create_app(llm, served_model_name="hash")


def test_a_batch_has_the_answer_to_each_chat(app: Starlette) -> None:
    fields = {**GREEDY, "logprobs": True, "return_token_ids": True}
    batch = post(app, BATCH, messages=CHATS, **fields).json()
    alone = [post(app, CHAT, messages=chat, **fields).json() for chat in CHATS]
    assert batch["choices"] == [
        {**each["choices"][0], "index": index, "prompt_token_ids": each["prompt_token_ids"]}
        for index, each in enumerate(alone)
    ]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(each["usage"][name] for each in alone)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "too_many_prompts"),
        ({"messages": CHATS[0]}, "messages", "invalid_type"),
        ({"messages": [*CHATS, []]}, "messages[2]", "empty_messages"),
        (
            {"messages": [CHATS[0], [{"role": "a b", "content": ""}]]},
            "messages[1][0].role",
            "invalid_value",
        ),
        ({"messages": CHATS * 200}, "messages", "too_many_prompts"),
        ({"messages": CHATS, "stream": True}, "stream", "unsupported_parameter"),
        ({"messages": CHATS, "n": 2}, "n", "unsupported_parameter"),
        ({"messages": CHATS, "temperature": 3}, "temperature", "invalid_value"),
    ],
)
def test_a_batch_that_cannot_be_answered_is_refused_by_name(
    app: Starlette, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = post(app, BATCH, model="hash", **fields)
    check_envelope(answer, 400, param, code)
    if code == "unsupported_parameter":
        assert answer.json()["error"]["message"].endswith("send each chat to /v1/chat/completions")


def test_an_invocation_is_a_chat_or_a_completion(app: Starlette) -> None:
    chat = {**GREEDY, "messages": CHATS[0]}
    assert (
        post(app, "/invocations", **chat).json()["choices"]
        == (post(app, CHAT, **chat).json()["choices"])
    )
    completion = post(app, "/invocations", prompt="hi", **GREEDY).json()
    assert (
        completion["choices"]
        == post(app, "/v1/completions", prompt="hi", **GREEDY).json()["choices"]
    )


def test_routes_are_found_with_and_without_the_root_path(llm: AsyncLLM) -> None:
    app = create_app(llm, api_keys=("k",), root_path="/llm")
    for path in ("/healthz", "/llm/healthz"):
        assert get(app, path).status_code == 200, path
    for path in ("/v1/models", "/llm/v1/models"):
        assert get(app, path).status_code == 401, path
    open_app = create_app(llm, root_path="/llm")
    for path in ("/v1/models", "/llm/v1/models"):
        assert get(open_app, path).json()["data"][0]["root"] == llm.model, path
    for path in ("/llmv1/models", "/llm//v1/models", "/llm/llm/v1/models", "/other/v1/models"):
        assert get(open_app, path).status_code == 404, path


@pytest.mark.parametrize("root_path", ["llm", "/llm/", "/", "/a b", "//a", "/a?b"])
def test_a_root_path_that_is_no_beginning_of_a_path_is_refused(
    llm: AsyncLLM, root_path: str
) -> None:
    with pytest.raises(InvalidConfig, match="root_path"):
        create_app(llm, root_path=root_path)


def test_options_set_fields_of_requests_that_leave_them_out(llm: AsyncLLM) -> None:
    app = create_app(llm, served_model_name="hash", request_defaults=RequestDefaults(True, True))
    chat = {**GREEDY, "messages": CHATS[0], "logprobs": True}
    (choice,) = post(app, CHAT, **chat).json()["choices"]
    assert choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    (choice,) = post(app, CHAT, **chat, return_tokens_as_token_ids=False).json()["choices"]
    assert not choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    for options in (None, {"include_usage": False}):
        chunks = parse_chunks(post(app, CHAT, **chat, stream=True, stream_options=options).text)
        assert all(chunk["usage"]["total_tokens"] for chunk in chunks)
    metrics = RequestDefaults(enable_per_request_metrics=True)
    timed_app = create_app(llm, served_model_name="hash", request_defaults=metrics)
    for fields, has_metrics in (({}, True), ({"return_metrics": False}, False)):
        assert ("metrics" in post(timed_app, CHAT, **chat, **fields).json()) == has_metrics
    batch = post(timed_app, BATCH, **GREEDY, messages=CHATS).json()
    assert "metrics" not in batch and len(batch["choices"]) == 2
    for wrong, code in (({"x": 1}, "unknown_parameter"), ([], "invalid_type")):
        answer = post(app, CHAT, **chat, stream=True, stream_options=wrong)
        check_envelope(answer, 400, "stream_options", code)


def test_a_grammar_in_the_notation_of_sglang_is_followed(app: Starlette) -> None:
    grammar = 'root ::= "[" word "]"\nword ::= [a-c]+ | "é"'
    fields = {**GREEDY, "max_tokens": 30, "temperature": 1, "seed": 1, "prompt": "x"}
    del fields["ignore_eos"]
    text = post(app, "/v1/completions", ebnf=grammar, **fields).json()["choices"][0]["text"]
    assert text[0] == "[" and set(text[1:].rstrip("]")) <= set("abcé")


@pytest.mark.parametrize(
    "grammar", ["", "root", "a ::= b", "root ::= b", 'root ::= "', "root ::= " + "(" * 4000]
)
def test_a_grammar_that_is_none_is_refused(app: Starlette, grammar: str) -> None:
    answer = post(app, "/v1/completions", model="hash", prompt="x", ebnf=grammar)
    check_envelope(answer, 400, "ebnf", "invalid_grammar")


def test_an_error_names_each_key_that_is_no_token_id(app: Starlette) -> None:
    bias = {"x": 1.0, "1": 1.0, "y": 2.0}
    answer = post(app, "/v1/completions", model="hash", prompt="x", logit_bias=bias)
    check_envelope(answer, 400, "logit_bias", "invalid_type")
    assert "'x', 'y' are not token ids" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [[5] * 9] * 96, "logprobs": -1}, "logprobs"),
        (
            "/v1/completions",
            {"prompt": [5] * 140, "n": 128, "prompt_logprobs": -1, "max_tokens": 1},
            "prompt_logprobs",
        ),
        (BATCH, {"messages": CHATS[:1] * 96, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_one_response_has_no_more_log_probabilities_for_several_prompts_or_choices(
    path: str, fields: dict[str, Any], param: str
) -> None:
    with closing(AsyncLLM("hash", **{**SMALL, "max_logprobs": -1})) as llm:
        app = create_app(llm, served_model_name="hash")
        answer = post(app, path, **{"model": "hash", "max_tokens": 200, **fields})
        check_envelope(answer, 400, param, "invalid_value")
        assert (
            "for all prompts and choices are more than 4194304" in answer.json()["error"]["message"]
        )


def test_responses_in_progress_have_so_many_log_probabilities_together() -> None:
    """A response that has few for each token is made nevertheless."""
    listed = {"logprob_token_ids": tuple(range(128)), "logprobs": 0}

    async def respond(llm: AsyncLLM, queue: AdmissionQueue, **fields: Any) -> int:
        params = SamplingParams(max_tokens=2, **fields)
        request = llm.create_request("a", params)

        def build_body(outputs: Any) -> Any:
            yield 1
            return {"text": outputs[0].text}

        return (await generation.create_response(queue, [request], "", build_body)).status_code

    async def test() -> None:
        async with AsyncLLM("hash", **SMALL) as llm:
            queue = AdmissionQueue(llm)
            with queue.admit_logprobs(MAX_HELD_LOGPROBS - 255):
                with pytest.raises(APIError) as error:
                    await respond(llm, queue, **listed)
                assert (error.value.status, error.value.code) == (429, "queue_full")
                assert await respond(llm, queue, logprobs=20) == 200
            with queue.admit_logprobs(MAX_HELD_LOGPROBS - 256):
                assert await respond(llm, queue, **listed) == 200
            with queue.admit_logprobs(MAX_HELD_LOGPROBS):
                pass

    asyncio.run(asyncio.wait_for(test(), 20))


class OneEvent:
    """Encodes a stream of one event, at its end."""

    def encode_ping(self) -> str:
        return comment_ping()

    def encode_delta(self, index: int, delta: TextDelta) -> list[str]:
        return []

    def encode_end(self) -> list[str]:
        return [encode_event("[DONE]")]

    def encode_error(self, error: APIError) -> list[str]:
        raise error

    def close(self) -> None: ...


def test_a_stream_in_progress_counts_its_log_probabilities_until_its_end() -> None:
    """Deltas wait in memory while the client does not read."""

    async def test() -> None:
        async with AsyncLLM("hash", **SMALL) as llm:
            queue, statuses = AdmissionQueue(llm), list[int]()
            ids = tuple(range(128))
            params = SamplingParams(max_tokens=2, logprobs=0, logprob_token_ids=ids)

            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    with pytest.raises(APIError), queue.admit_logprobs(MAX_HELD_LOGPROBS - 255):
                        pass

            async def stream() -> None:
                request = llm.create_request("a", params)
                response = GeneratedStream(queue, [request], "", OneEvent())
                await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]

            with queue.admit_logprobs(MAX_HELD_LOGPROBS - 255):
                with pytest.raises(APIError, match="in progress have too many"):
                    await stream()
            await stream()
            assert statuses == [200]
            with queue.admit_logprobs(MAX_HELD_LOGPROBS):
                pass

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_whole_response_counts_its_log_probabilities_until_it_is_sent() -> None:
    """Its text waits in memory while the client does not read."""

    async def test() -> None:
        async with AsyncLLM("hash", **SMALL) as llm:
            queue, num_messages = AdmissionQueue(llm), 0
            ids = tuple(range(128))
            params = SamplingParams(max_tokens=2, logprobs=0, logprob_token_ids=ids)

            def build_body(outputs: Any) -> Any:
                yield 1
                return {"text": outputs[0].text}

            async def send(message: Message) -> None:
                nonlocal num_messages
                num_messages += 1
                with pytest.raises(APIError), queue.admit_logprobs(MAX_HELD_LOGPROBS - 255):
                    pass

            request = llm.create_request("a", params)
            response = await generation.create_response(queue, [request], "", build_body)
            await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
            assert num_messages == 2
            with queue.admit_logprobs(MAX_HELD_LOGPROBS):
                pass

    asyncio.run(asyncio.wait_for(test(), 20))
