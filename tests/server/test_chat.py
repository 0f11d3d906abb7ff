"""Chat over HTTP: real server, real engine, the deterministic model and its plain template.

A chat of the embedded model is a line `role: content` for each message and then `assistant:`. So
its response is the response of /v1/completions to that text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.async_llm import AsyncLLM
from forge.errors import InvalidRequest
from forge.outputs import TextDelta
from forge.server.chat import RESERVED_VARIABLES, ChatRequest, create_chat_choice
from forge.server.chat_formats import find_chat_formats
from forge.server.messages import MAX_MESSAGES, MAX_TEMPLATE_ROLES, ROLES
from forge.server.protocol import parse_request
from forge.tokenizer import MAX_CHAT_CHARS, ByteTokenizer, ChatEnd, ChatMessage
from tests.server.test_server import (
    ANSWER,
    BAD_BODIES,
    BAD_IN_BOTH,
    EDGES,
    GREEDY,
    LONG,
    MAX_MODEL_LEN,
    RunningServer,
    assert_no_step,
    check_envelope,
    check_serves,
    fail_at_position,
    open_server,
    parse_chunks,
    row_id,
    wait_until,
    without_cached,
)

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CACHED_PART = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
RENDERED = "user: hi\nassistant:"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server() as running:
        yield running
        check_serves(running)


@pytest.fixture(scope="module")
def paced_server() -> Iterator[RunningServer]:
    """A server with steps of 3 ms, so that a stream has several chunks with text."""
    with open_server("hash:step_ms=3") as running:
        yield running


def post_chat(server: RunningServer, **body: Any) -> dict[str, Any]:
    """Return the response to a good request."""
    answer = server.post(PATH, **{"model": "hash", "messages": USER, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream_chat(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which ends with [DONE]."""
    body = {"model": "hash", "messages": USER, "stream": True, **body}
    answer = server.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    return parse_chunks(answer.text)


def post_raw(server: RunningServer, fields: dict[str, Any]) -> httpx.Response:
    """Return the response to a body with values that JSON does not have."""
    body = json.dumps({"model": "hash", "messages": USER, **fields})
    return server.client.post(PATH, content=body, headers={"content-type": "application/json"})


def choice_parts(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Return the parts of the chunks that belong to one choice."""
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for choice in choices)


# Responses.


def test_an_answer_is_a_message_of_the_assistant_with_counts(server: RunningServer) -> None:
    answer = post_chat(server, max_tokens=5, ignore_eos=True, **GREEDY)
    assert (answer.pop("prompt_token_ids"), answer.pop("prompt_logprobs")) == (None, None)
    assert list(answer) == ["id", "created", "model", "object", "choices", "usage"]
    assert answer["id"].startswith("chatcmpl-") and answer["model"] == "hash"
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    text = choice["message"].pop("content")
    assert len(text) == 5
    assert choice == {
        "index": 0,
        "message": ANSWER,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "matched_stop": None,
        "token_ids": None,
    }
    counts = {"prompt_tokens": len(RENDERED), "completion_tokens": 5}
    assert list(answer["usage"].pop("prompt_tokens_details")) == ["cached_tokens"]
    assert answer["usage"] == {**counts, "total_tokens": len(RENDERED) + 5}


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        (USER, {}, "user: hi\nassistant:"),
        (
            [
                {"role": "system", "content": "be short"},
                {"role": "user", "content": "né"},
                {"role": "assistant", "content": "", "refusal": None, "tool_calls": None},
                {"role": "tool", "content": "2", "tool_call_id": "call_1"},
                {"role": "developer", "content": "go on", "name": "d-1"},
            ],
            {},
            "system: be short\nuser: né\nassistant: \ntool: 2\ndeveloper: go on\nassistant:",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
            {},
            "user: a\nb\nassistant:",
        ),
        (
            [
                {"role": "my-critic", "content": "hm", "extra_field": [0], "metadata": {"a": 1}},
                {"role": "assistant", "content": "a", "partial": False, "x": None},
                {"role": "user", "content": [CACHED_PART]},
            ],
            {},
            "my-critic: hm\nassistant: a\nuser: b\nassistant:",
        ),
        (USER, {"add_generation_prompt": True}, "user: hi\nassistant:"),
        (USER, {"add_generation_prompt": False}, "user: hi\n"),
        (USER, {"continue_final_message": True}, "user: hi"),
        (USER, {"continue_final_message": True, "add_generation_prompt": False}, "user: hi"),
        (USER, {"chat_template_kwargs": {"enable_thinking": False}}, "user: hi\nassistant:"),
    ],
    ids=row_id,
)
def test_a_chat_is_the_completion_of_its_rendered_text(
    server: RunningServer, messages: list[Any], options: dict[str, Any], prompt: str
) -> None:
    same = {"max_tokens": 12, "seed": 3, "top_k": 50}
    answer = post_chat(server, messages=messages, **same, **options)
    alone = server.post_completion(prompt=prompt, **same)
    assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["text"]
    assert without_cached(answer["usage"]) == without_cached(alone["usage"])


def test_an_answer_without_a_limit_is_as_long_as_fits(server: RunningServer) -> None:
    answer = post_chat(server, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "limit",
    [
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"max_tokens": None, "max_completion_tokens": 3},
    ],
)
def test_both_names_of_the_limit_limit(server: RunningServer, limit: dict[str, Any]) -> None:
    assert post_chat(server, ignore_eos=True, **limit)["usage"]["completion_tokens"] == 3


def test_a_stop_string_ends_the_answer_before_it(server: RunningServer) -> None:
    body = {"max_tokens": 40, "ignore_eos": True, **GREEDY}
    text = post_chat(server, **body)["choices"][0]["message"]["content"]
    stop = text[10:13]
    (choice,) = post_chat(server, **body, stop=[stop])["choices"]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.long
def test_every_sampling_field_reaches_the_engine(server: RunningServer) -> None:
    """Each field alone gives the output of /v1/completions with it."""
    fields: list[dict[str, Any]] = [
        {"temperature": 1.7},
        {"top_p": 0.2},
        {"top_k": 1},
        {"min_p": 0.9},
        {"repetition_penalty": 9.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {"98": 100}},
        {"allowed_token_ids": [98, 99]},
        {"stop_token_ids": list(range(100, 200))},
        {"min_tokens": 20},
        {"cache_salt": "salt", "priority": 3},
    ]
    for field in fields:
        body = {"max_tokens": 20, "seed": 2, **field}
        (choice,) = post_chat(server, **body)["choices"]
        (alone,) = server.post_completion(prompt=RENDERED, **body)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (
            alone["text"],
            alone["finish_reason"],
        ), field


def test_logprobs_have_an_entry_per_token_with_its_bytes(server: RunningServer) -> None:
    body = {"max_tokens": 9, "ignore_eos": True, "seed": 1, "temperature": 2.0}
    (choice,) = post_chat(server, **body, logprobs=True, top_logprobs=3)["choices"]
    (legacy,) = server.post_completion(prompt=RENDERED, **body, logprobs=3)["choices"]
    assert list(choice["logprobs"]) == ["content", "refusal"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == legacy["logprobs"]["tokens"]
    assert [entry["logprob"] for entry in content] == legacy["logprobs"]["token_logprobs"]
    token_bytes = b"".join(bytes(entry["bytes"]) for entry in content)
    assert token_bytes.decode(errors="replace") == choice["message"]["content"]
    for entry, top in zip(content, legacy["logprobs"]["top_logprobs"], strict=True):
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert len(entry["top_logprobs"]) == 3
        for other in entry["top_logprobs"]:
            assert list(other) == ["token", "logprob", "bytes"]
            assert top[other["token"]] == other["logprob"]


def test_listed_ids_replace_the_most_likely_tokens(server: RunningServer) -> None:
    """The token itself comes first, and not twice where it is listed."""
    body = {"max_tokens": 2, "ignore_eos": True, "allowed_token_ids": [98]}
    body |= {"logprob_token_ids": [99, 97, 99], "return_tokens_as_token_ids": True}
    (choice,) = post_chat(server, **body, logprobs=True, top_logprobs=5)["choices"]
    (legacy,) = server.post_completion(prompt=RENDERED, **body, logprobs=0)["choices"]
    for entry, top in zip(
        choice["logprobs"]["content"], legacy["logprobs"]["top_logprobs"], strict=True
    ):
        others = [(other["token"], other["logprob"]) for other in entry["top_logprobs"]]
        assert others == list(top.items())
        assert list(top) == ["token_id:98", "token_id:99", "token_id:97"]
        assert all(-9999 < each < 0 for each in top.values())
    listed = {**body, "logprob_token_ids": [97, 98], "logprobs": True}
    (choice,) = post_chat(server, **listed)["choices"]
    tokens = [each["token"] for each in choice["logprobs"]["content"][0]["top_logprobs"]]
    assert tokens == ["token_id:98", "token_id:97"]
    parts = choice_parts(stream_chat(server, **listed), 0)
    streamed = [entry for part in parts for entry in (part["logprobs"] or {}).get("content", ())]
    assert streamed == choice["logprobs"]["content"]


def test_logprobs_alone_have_no_alternatives(server: RunningServer) -> None:
    (choice,) = post_chat(server, max_tokens=2, logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


def test_null_is_the_default_of_every_field(server: RunningServer) -> None:
    body = dict.fromkeys([*ChatRequest.model_fields, *ChatRequest.unsupported])
    given = {"model": "hash", "messages": USER, "seed": 1, "max_tokens": 8}
    assert (
        post_chat(server, **{**body, **given})["choices"] == post_chat(server, **given)["choices"]
    )


def test_fields_without_effect_are_accepted(server: RunningServer) -> None:
    neutral = {name: values[0] for name, values in ChatRequest.unsupported.items() if values}
    hints = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    given = {"seed": 1, "max_tokens": 8, "logprobs": False, "top_logprobs": 0}
    own = ChatRequest.model_fields
    none = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    body = {**{k: v for k, v in neutral.items() if k not in own}, **none, **hints, **given}
    assert "modalities" in body
    assert post_chat(server, **body)["choices"] == post_chat(server, **given)["choices"]


def test_an_answer_can_be_sent_back(server: RunningServer) -> None:
    message = post_chat(server, max_tokens=3, ignore_eos=True)["choices"][0]["message"]
    again = post_chat(server, messages=[*USER, message, *USER], max_tokens=3, ignore_eos=True)
    assert again["usage"]["prompt_tokens"] > len(RENDERED)


# Streams.


@pytest.mark.parametrize(
    "body",
    [
        GREEDY,
        {"seed": 3, "temperature": 2.0, "top_k": 257},
        {"seed": 4, "n": 3},
        {"seed": 8, "stop": ["e", "ou"], "max_tokens": 60},
        {"seed": 10, "logprobs": True, "top_logprobs": 2, "n": 2},
        {"seed": 11, "messages": [{"role": "user", "content": "漢字 😀"}], "min_p": 0.001},
    ],
    ids=row_id,
)
def test_a_stream_has_the_content_of_the_whole_answer(
    paced_server: RunningServer, body: dict[str, Any]
) -> None:
    whole = post_chat(paced_server, **{"max_tokens": 40, **body})
    usage = {"stream_options": {"include_usage": True}}
    chunks = stream_chat(paced_server, **{"max_tokens": 40, **body, **usage})
    last = chunks.pop()
    assert last["choices"] == []
    assert without_cached(last["usage"]) == without_cached(whole["usage"])
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    heads = {(c["id"], c["object"], c["created"], c["model"]) for c in [*chunks, last]}
    ((label, kind, _, model),) = heads
    assert len(chunks) > 2 * len(whole["choices"])  # a choice has several besides its role
    assert (label[:9], kind, model) == ("chatcmpl-", "chat.completion.chunk", "hash")
    for choice in whole["choices"]:
        first, *rest = choice_parts(chunks, choice["index"])
        assert first["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
        assert first["logprobs"] is None and first["finish_reason"] is None
        assert all("role" not in part["delta"] for part in rest)
        # Clients of SGLang and DeepSeek read it without a check.
        assert all(part["delta"]["reasoning_content"] is None for part in rest)
        assert text_of(rest) == choice["message"]["content"]
        ends = [part["finish_reason"] for part in rest]
        assert ends == [None] * (len(rest) - 1) + [choice["finish_reason"]]
        if body.get("logprobs"):
            entries = [entry for part in rest for entry in part["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]


def test_a_stream_without_options_has_no_usage(server: RunningServer) -> None:
    chunks = stream_chat(server, max_tokens=4)
    assert chunks and all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_so_far_is_in_every_chunk_where_requested(paced_server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream_chat(paced_server, max_tokens=9, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, 9) and len(counts) > 3


def test_a_token_without_certain_text_is_a_delta_without_text() -> None:
    """Half of a character gives such a delta."""
    body = parse_request(ChatRequest, {"messages": USER})
    tokenizer = ByteTokenizer()
    answer = create_chat_choice(body, [1], tokenizer, find_chat_formats(tokenizer))
    assert answer.encode_deltas(TextDelta(0, "", (196,))) == [
        '{"content":"","reasoning_content":null}'
    ]
    assert answer.encode_deltas(TextDelta(0, "", (1,), "stop")) == []


def test_a_stream_that_the_client_leaves_gives_its_blocks_back() -> None:
    with open_server("hash:step_ms=20", num_blocks=2048, max_model_len=2048) as server:
        body = {"model": "hash", "messages": USER, "stream": True, **LONG}
        with server.client.stream("POST", PATH, json=body) as answer:
            lines = answer.iter_lines()  # referenced, or the stream would be closed already
            next(lines)
            assert not server.is_idle()
        wait_until(server.is_idle)


def test_a_stream_that_fails_ends_with_an_error_and_without_done() -> None:
    with open_server(prepare=fail_at_position(len(RENDERED) + 4, step_s=0.02)) as server:
        answer = server.post(
            PATH, model="hash", messages=USER, stream=True, max_tokens=20, ignore_eos=True
        )
    assert answer.status_code == 200 and "[DONE]" not in answer.text
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert len(events) > 1
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"


# Official clients.


def test_the_official_client_chats_and_streams(server: RunningServer, openai: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "hash", "messages": USER, "max_completion_tokens": 20, "seed": 5}
        whole = client.chat.completions.create(
            **options, n=2, logprobs=True, top_logprobs=2, stop="zz"
        )
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.usage is not None and whole.usage.prompt_tokens == len(RENDERED)
        scored = whole.choices[0].logprobs
        assert scored is not None and scored.content is not None
        assert len(scored.content[0].top_logprobs) == 2
        with client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ) as chunks:
            read = list(chunks)
        text = "".join(c.choices[0].delta.content or "" for c in read if c.choices)
        assert text == whole.choices[0].message.content
        assert read[-1].usage is not None and read[-1].usage.prompt_tokens == len(RENDERED)
        back: Any = [*USER, whole.choices[0].message.model_dump()]
        assert client.chat.completions.create(model="hash", messages=back, max_tokens=1).choices
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**{**options, "top_logprobs": 5})
        assert (error.value.param, error.value.code) == ("top_logprobs", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**options, "model": "other"})


def test_the_streaming_helper_of_the_official_client_puts_the_message_together(
    server: RunningServer,
    openai: Any,
) -> None:
    # The helper refuses a response that was cut, so the end token comes, after 12 others.
    options: Any = {"model": "hash", "messages": USER, "seed": 5, "logit_bias": {"0": 100}}
    fields: Any = {"min_tokens": 12, "max_tokens": 20}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(**options, extra_body=fields) as events,
    ):
        message = events.get_final_completion().choices[0].message
    whole = post_chat(server, **options, **fields)["choices"][0]["message"]
    assert (message.role, message.content) == ("assistant", whole["content"])
    assert message.content


def test_the_official_async_client_chats_and_streams(server: RunningServer, openai: Any) -> None:
    async def both() -> tuple[str | None, str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            options: Any = {"model": "hash", "messages": USER, "max_tokens": 20, "seed": 5}
            whole = await client.chat.completions.create(**options)
            text = ""
            async with await client.chat.completions.create(**options, stream=True) as chunks:
                async for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
            return whole.choices[0].message.content, text

    whole, joined = asyncio.run(both())
    assert whole == joined and whole


# Refusals.


def chat_with(**message: Any) -> dict[str, Any]:
    """Return a chat of one good message and this one."""
    return {"messages": [*USER, message]}


def nested_list(depth: int) -> list[Any]:
    """Return a list in a list, this deep."""
    return [] if depth == 1 else [nested_list(depth - 1)]


def chat_with_content(content: Any) -> dict[str, Any]:
    return chat_with(role="user", content=content)


CONTENT = "messages[1].content"
UNSUPPORTED = "unsupported_parameter"
KEYS = [f"key_{i}" for i in range(33)]
BAD_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": {"role": "user", "content": "hi"}}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "empty_messages"),
    ({"messages": [None]}, "messages[0]", "invalid_type"),
    ({"messages": ["x"]}, "messages[0]", "invalid_type"),
    ({"messages": [[]]}, "messages[0]", "invalid_type"),
    ({"messages": USER * 100_000}, "messages", "too_many_messages"),
    ({"messages": USER * (MAX_MESSAGES + 1)}, "messages", "too_many_messages"),
    ({"messages": USER * MAX_MESSAGES}, "messages", "context_length_exceeded"),
    (chat_with(content="a"), "messages[1].role", "invalid_value"),
    (chat_with(role="a wizard", content="a"), "messages[1].role", "invalid_value"),
    (chat_with(role="<|end|>", content="a"), "messages[1].role", "invalid_value"),
    (chat_with(role="User", content="a"), "messages[1].role", "invalid_value"),
    (chat_with(role=1, content="a"), "messages[1].role", "invalid_value"),
    (chat_with(role=["user"], content="a"), "messages[1].role", "invalid_value"),
    (chat_with(role="function", content="a", name="f"), "messages[1].role", "invalid_value"),
    (chat_with(role="user"), CONTENT, "invalid_type"),
    (chat_with(role="assistant"), CONTENT, "invalid_type"),
    (chat_with_content(None), CONTENT, "invalid_type"),
    (chat_with_content(5), CONTENT, "invalid_type"),
    (chat_with_content(True), CONTENT, "invalid_type"),
    (chat_with_content({}), CONTENT, "invalid_type"),
    (chat_with_content([]), CONTENT, "invalid_value"),
    (chat_with_content(["a"]), CONTENT, "invalid_type"),
    (chat_with_content([{"type": "text"}]), CONTENT, "invalid_value"),
    (chat_with_content([{"type": "text", "text": 5}]), CONTENT, "invalid_value"),
    (chat_with_content([{"type": "text", "text": "a", "more": 1}]), CONTENT, "invalid_value"),
    (chat_with_content([{"text": "a"}]), CONTENT, "invalid_value"),
    (chat_with_content([{"type": "x"}]), CONTENT, "invalid_value"),
    (chat_with_content([{"type": ["text"], "text": "a"}]), CONTENT, "invalid_value"),
    (
        chat_with_content([{"type": "image_url", "image_url": {"url": "http://x"}}]),
        CONTENT,
        "unsupported_parameter",
    ),
    (
        chat_with_content(
            [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]
        ),
        CONTENT,
        "unsupported_parameter",
    ),
    *(
        (chat_with_content([{"type": kind, kind: "a"}]), CONTENT, "unsupported_parameter")
        for kind in ("audio_url", "file", "image", "image_embeds", "input_image", "refusal")
    ),
    *(
        (chat_with_content([{"type": kind, kind: "a"}]), CONTENT, "unsupported_parameter")
        for kind in ("thinking", "video", "video_url")
    ),
    (chat_with_content("\ud800"), "messages", "invalid_unicode"),
    (chat_with_content([{"type": "text", "text": "\udcff"}]), "messages", "invalid_unicode"),
    (chat_with_content("x" * MAX_MODEL_LEN), "messages", "context_length_exceeded"),
    (chat_with_content("x" * 1_000_000), "messages", "context_length_exceeded"),
    (chat_with(role="user", content="a", name=""), "messages[1].name", "invalid_value"),
    (chat_with(role="user", content="a", name="a\nb"), "messages[1].name", "invalid_value"),
    (chat_with(role="user", content="a", name="x" * 10_240), "messages[1].name", "invalid_value"),
    (chat_with(role="user", content="a", name="<|end|>"), "messages[1].name", "invalid_value"),
    (chat_with(role="user", content="a", name=5), "messages[1].name", "invalid_value"),
    (chat_with(role="tool", content="a"), "messages[1].tool_call_id", "missing_required_parameter"),
    (
        chat_with(role="tool", content="a", tool_call_id=5),
        "messages[1].tool_call_id",
        "invalid_value",
    ),
    (
        chat_with(role="user", content="a", tool_call_id="c"),
        "messages[1].tool_call_id",
        "invalid_value",
    ),
    (
        chat_with(role="assistant", content=None, tool_calls=[{"id": "c"}]),
        "messages[1].tool_calls[0].type",
        "unsupported_parameter",
    ),
    (
        chat_with(role="assistant", content="a", audio={"id": "c"}),
        "messages[1].audio",
        "unsupported_parameter",
    ),
    (
        chat_with(role="user", content="a", reasoning_content="b"),
        "messages[1].reasoning_content",
        "invalid_value",
    ),
    (
        chat_with(role="assistant", content="a", reasoning=["b"]),
        "messages[1].reasoning",
        "invalid_type",
    ),
    (
        chat_with(role="assistant", content="a", reasoning="b", reasoning_content="c"),
        "messages[1].reasoning",
        "conflicting_parameters",
    ),
    (chat_with(role="user", content="a", **{"a b": 1}), "messages[1].a b", "unknown_parameter"),
    (chat_with(role="user", content="a", foo=nested_list(100)), "messages[1].foo", "invalid_value"),
    (
        chat_with(role="user", content="a", **dict.fromkeys(KEYS, 1)),
        "messages[1]",
        "too_many_items",
    ),
    (chat_with(role="user", content="a", partial=True), "messages[1].partial", UNSUPPORTED),
    (chat_with(role="user", content="a", prefix=True), "messages[1].prefix", UNSUPPORTED),
    (
        {"messages": [{"role": "user", "content": "a", "x" * 999: 1}]},
        f"messages[0].{'x' * 64}",
        "unknown_parameter",
    ),
]
BAD_VARIABLES: list[tuple[dict[str, Any], str]] = [
    *(({name: True}, "unsupported_parameter") for name in sorted(RESERVED_VARIABLES)),
    ({"chat_template": "{{ 1 }}"}, "unsupported_parameter"),
    ({"bos_token": "<s>"}, "unsupported_parameter"),
    ({"__class__": "a"}, "unsupported_parameter"),
    ({"": 1}, "unsupported_parameter"),
    ({"a b": 1}, "unsupported_parameter"),
    ({"x" * 65: 1}, "unsupported_parameter"),
    ({"style": "x" * 513}, "string_too_long"),
    ({"style": ["a"]}, "invalid_type"),
    ({"style": {"a": 1}}, "invalid_type"),
    ({"style": None}, "invalid_type"),
    ({"style": float("nan")}, "invalid_value"),
    ({"style": "\ud800"}, "invalid_unicode"),
    ({f"a{i}": 1 for i in range(17)}, "too_many_items"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    *BAD_MESSAGES,
    *((({"chat_template_kwargs": v}), "chat_template_kwargs", code) for v, code in BAD_VARIABLES),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ({"chat_template_kwargs": "a"}, "chat_template_kwargs", "invalid_type"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"documents": [{}]}, "documents", "unsupported_parameter"),
    ({"prompt": "a"}, "prompt", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", "invalid_value"),
    ({"guided_regex": "a*"}, "guided_regex", "unsupported_parameter"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        "reasoning_effort",
        "conflicting_parameters",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "invalid_regex"),
    (
        {"structured_outputs": {"regex": "a"}, "regex": "a"},
        "regex",
        "conflicting_parameters",
    ),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": "1"}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": True}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens", "context_length_exceeded"),
    (
        {"max_completion_tokens": 5, "max_tokens": 6},
        "max_completion_tokens",
        "conflicting_parameters",
    ),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": 10**9}, "n", "invalid_value"),
    ({"n": "2"}, "n", "invalid_value"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"logprobs": "true"}, "logprobs", "invalid_type"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 5, "logprobs": False}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": True, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 10**4000, "logprobs": True}, "top_logprobs", "invalid_value"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "invalid_value"),
    (
        {"logprob_token_ids": [257], "logprobs": True},
        *("logprob_token_ids", "token_out_of_range"),
    ),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "invalid_type"),
    ({"continue_final_message": "yes"}, "continue_final_message", "invalid_type"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    ({"safety_identifier": 5}, "safety_identifier", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options", "unknown_parameter"),
    ({"stream": True, "messages": []}, "messages", "empty_messages"),
    ({"stream": True, "temperature": 9}, "temperature", "invalid_value"),
    *(row for row in BAD_IN_BOTH if not {"prompt", "messages", "tools"} & row[0].keys()),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHATS, ids=row_id)
def test_a_bad_field_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str | None, code: str
) -> None:
    with assert_no_step(server):
        check_envelope(post_raw(server, fields), 400, param, code)


@pytest.mark.parametrize(("body", "param", "code"), BAD_BODIES, ids=row_id)
def test_a_bad_body_is_refused(
    server: RunningServer, body: bytes, param: str | None, code: str
) -> None:
    headers = {"content-type": "application/json"}
    if param == "foo" or b"temperature" in body:
        body = body.replace(b'"prompt": "a"', b'"messages": []')
    with assert_no_step(server):
        check_envelope(server.client.post(PATH, content=body, headers=headers), 400, param, code)


def test_a_model_that_is_not_there_and_a_method_that_is_not_are_refused(
    server: RunningServer,
) -> None:
    with assert_no_step(server):
        answer = server.post(PATH, model="../../etc/passwd", messages=USER)
        check_envelope(answer, 404, "model", "model_not_found")
        check_envelope(server.client.get(PATH), 405, None, "method_not_allowed")


class OneMessageTokenizer(ByteTokenizer):
    """A tokenizer whose template takes one message at most."""

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], end: ChatEnd, variables: Any
    ) -> list[int]:
        if len(messages) > 1:
            raise InvalidRequest("messages", "roles must alternate", "Fix it", "template_error")
        return super().apply_chat_template(messages, end, variables)


def test_what_the_template_refuses_is_refused_before_the_stream_begins() -> None:
    def prepare(llm: AsyncLLM) -> None:
        llm.tokenizer = OneMessageTokenizer()

    with open_server(prepare=prepare) as server:
        for streamed in (False, True):
            answer = server.post(PATH, model="hash", messages=USER * 2, stream=streamed)
            check_envelope(answer, 400, "messages", "template_error")
        assert post_chat(server, max_tokens=1)["choices"]


class KnownRolesTokenizer(ByteTokenizer):
    """A tokenizer whose template writes the messages of some roles, and a key of them."""

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], end: ChatEnd, variables: Any
    ) -> list[int]:
        known = [each for each in messages if each["role"] in (*ROLES, "critic")]
        parts = [f"{each['content']} {each.get('mood', '')}" for each in known]
        return self.encode(" ".join(parts))


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    def render(role: str, content: str = "a") -> list[int]:
        body = {"messages": [*USER, {"role": role, "content": content}]}
        return parse_request(ChatRequest, body).render_prompt(KnownRolesTokenizer())

    for role in (*ROLES[:-1], "critic"):
        assert render(role) == ByteTokenizer().encode("hi  a ")
    for content in ("a", ""):
        with pytest.raises(InvalidRequest, match="leaves out messages of this role") as error:
            render("wizard", content)
        assert (error.value.field, error.value.code) == (
            "messages[1].role",
            "unsupported_parameter",
        )


def test_each_role_that_the_template_leaves_out_is_refused() -> None:
    """One that it writes, alongside another, does not make up for it."""
    roles = ["critic", "wizard", "witch"]
    body = {"messages": [*USER, *({"role": role, "content": "a"} for role in roles)]}
    with pytest.raises(InvalidRequest, match="leaves out messages of this role") as error:
        parse_request(ChatRequest, body).render_prompt(KnownRolesTokenizer())
    assert error.value.field == "messages[2].role"


def test_roles_of_a_template_are_limited() -> None:
    """The messages are rendered once more for each."""

    def render(num_roles: int) -> list[int]:
        messages = [{"role": f"r{i % num_roles}", "content": "a"} for i in range(2 * num_roles)]
        return parse_request(ChatRequest, {"messages": messages}).render_prompt(ByteTokenizer())

    assert render(MAX_TEMPLATE_ROLES)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TEMPLATE_ROLES}") as error:
        render(MAX_TEMPLATE_ROLES + 1)
    assert (error.value.field, error.value.code) == ("messages", "too_many_items")


def test_a_template_reads_every_key_of_a_message() -> None:
    body = {"messages": [{"role": "user", "content": "a", "mood": "glad", "task": None}]}
    prompt = parse_request(ChatRequest, body).render_prompt(KnownRolesTokenizer())
    assert prompt == ByteTokenizer().encode("a glad")


def test_a_chat_that_is_rendered_far_too_long_is_refused() -> None:
    message = {"role": "user", "content": "x" * (MAX_CHAT_CHARS - 5)}
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CHAT_CHARS}") as error:
        ByteTokenizer().apply_chat_template([message], ChatEnd.GENERATION_PROMPT, {})
    assert (error.value.field, error.value.code) == ("messages", "context_length_exceeded")


FIELD_NAMES = st.sampled_from([*ChatRequest.model_fields, *ChatRequest.unsupported, "other"])
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_call_id", "tool_calls", "other"]),
        st.sampled_from([*ROLES, None, 1, "", "\ud800", [], {}, [{"type": "text", "text": "a"}]]),
    ),
    max_size=3,
)


@settings(max_examples=80)
@given(st.dictionaries(FIELD_NAMES, EDGES, max_size=4), MESSAGES | st.just(USER))
def test_no_field_whatever_its_value_makes_the_server_fail(
    server: RunningServer, fields: dict[str, Any], messages: list[Any]
) -> None:
    answer = post_raw(server, {"messages": messages, "max_completion_tokens": 2, **fields})
    if answer.status_code != 200:
        error = answer.json()["error"]
        check_envelope(answer, answer.status_code, error["param"], error["code"])
        assert answer.status_code in (400, 404)
    elif fields.get("stream") is True:
        assert choice_parts(parse_chunks(answer.text), 0)[-1]["finish_reason"]
    else:
        assert answer.json()["choices"]
    assert server.is_idle()


def test_the_page_names_every_field() -> None:
    page = (ROOT / "docs" / "Server.md").read_text(encoding="utf-8")
    fields = [*ChatRequest.model_fields, *ChatRequest.unsupported]
    assert [name for name in fields if f"`{name}`" not in page] == []


@pytest.mark.parametrize("options", [{}, {"include_usage": True, "continuous_usage_stats": True}])
def test_token_ids_are_returned_where_they_are_requested(
    paced_server: RunningServer, options: dict[str, Any]
) -> None:
    body = {"max_tokens": 6, "ignore_eos": True, "n": 2, "seed": 3, "return_token_ids": True}
    whole = post_chat(paced_server, **body)
    assert whole["prompt_token_ids"] == ByteTokenizer().encode(RENDERED)
    chunks = stream_chat(paced_server, **body, **({"stream_options": options} if options else {}))
    assert [c.get("prompt_token_ids") for c in chunks if "prompt_token_ids" in c] == [
        whole["prompt_token_ids"]
    ]
    for choice in whole["choices"]:
        parts = choice_parts(chunks, choice["index"])
        ids = [token for part in parts for token in part.get("token_ids", ())]
        assert ids == choice["token_ids"] and len(ids) == 6
    assert post_chat(paced_server, max_tokens=1)["choices"][0]["token_ids"] is None


def test_a_chat_has_logprobs_of_its_prompt_where_they_are_requested(server: RunningServer) -> None:
    entries = post_chat(server, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert [None if e is None else [v["decoded_token"] for v in e.values()] for e in entries] == [
        None,
        *([char] for char in RENDERED[1:]),
    ]
