"""The HTTP server, over a socket: real server, real engine, the deterministic model.

Most tests share one server. A test that breaks or ends a server has a separate one. A server is a
thread that ends with its `with` block; the tests of `run_server` start a separate process.

Its cache is small (64 blocks of 4), so that blocks left by a request are detected.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge import LLM, AsyncLLM, HashModel, SamplingParams
from forge.errors import InvalidConfig, InvalidRequest
from forge.limits import DEFAULT_LIMITS, Limits
from forge.models.paged import FaultHooks
from forge.policy import FCFS, Policy, first_in_queue
from forge.seam import StepPlan
from forge.server.app import create_app
from forge.server.batch_chat import BatchChatRequest
from forge.server.body import MAX_BODY_BYTES
from forge.server.chat import ChatRequest
from forge.server.completions import CompletionRequest
from forge.server.http_server import create_listener, run_server
from forge.server.protocol import RequestBody, parse_request
from forge.server.responses_api.request import ResponsesRequest
from forge.tokenizer import ByteTokenizer
from tests.server.local_server import (
    TIMEOUT_S,
    GatedModel,
    ManualClockLoop,
    create_client,
    serve_app,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[2]
MAX_MODEL_LEN = 256
NEVER_ENDS = {"max_tokens": 200, "ignore_eos": True}
LONG = {"max_tokens": 2000, "ignore_eos": True}
GREEDY = {"temperature": 0}


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage without the cached tokens, which depend on what ran before."""
    assert "cached_tokens" in usage["prompt_tokens_details"]
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


class RunningServer(NamedTuple):
    """A running server."""

    url: str
    llm: AsyncLLM
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def post_completion(self, **body: Any) -> dict[str, Any]:
        """Return the response of /v1/completions, which must succeed."""
        answer = self.post("/v1/completions", **{"model": "hash", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which ends with [DONE]."""
        answer = self.post("/v1/completions", **{"model": "hash", "stream": True, **body})
        assert answer.status_code == 200, answer.text
        return parse_chunks(answer.text)

    @property
    def blocks_used(self) -> int:
        return self.llm.engine.scheduler.pool.num_used_blocks

    def is_idle(self) -> bool:
        return not self.llm.engine.has_work and self.blocks_used == 0


@contextmanager
def open_server(
    model: str = "hash",
    *,
    api_keys: tuple[str, ...] = (),
    prepare: Callable[[AsyncLLM], None] = lambda llm: None,
    clock: ManualClockLoop | None = None,
    reasoning_parser: str | None = None,
    reasoning_config: str | None = None,
    tool_call_parser: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **options: Any,
) -> Iterator[RunningServer]:
    """Serve on a free port until the end of the block."""
    numbers = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 64,
    }
    llm = AsyncLLM(model, **{**numbers, **options})
    prepare(llm)
    with create_listener("127.0.0.1", 0, api_keys) as socket_:
        app = create_app(
            llm,
            served_model_name="hash",
            api_keys=api_keys,
            reasoning_parser=reasoning_parser,
            reasoning_config=reasoning_config,
            tool_call_parser=tool_call_parser,
            limits=limits,
        )
        with serve_app(llm, app, socket_, limits, clock) as (url, client):
            yield RunningServer(url, llm, client)


@pytest.fixture(scope="module")
def running_server() -> Iterator[RunningServer]:
    with open_server() as server:
        yield server
        check_serves(server)


@pytest.fixture(scope="module")
def slow_server() -> Iterator[RunningServer]:
    """A server with steps of 20 ms, on which LONG runs for longer than a test waits."""
    with open_server("hash:step_ms=20", num_blocks=2048, max_model_len=2048) as server:
        yield server


def parse_chunks(text: str) -> list[dict[str, Any]]:
    """Return the JSON of each event of a whole stream."""
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    events = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choice_texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Return the joined text of each choice; check that each ends once, with nothing after it."""
    texts: dict[int, str] = {}
    finished: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in finished
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"] is not None:
                finished.add(choice["index"])
    assert finished == set(texts)
    return texts


ANSWER = {"role": "assistant", "refusal": None, "reasoning_content": None, "reasoning": None}
"""A message without reasoning, before its content."""


def check_envelope(answer: httpx.Response, status: int, param: str | None, code: str) -> None:
    """Check that the response is this error, in the shape of all errors and without internals."""
    found = answer.json()
    assert answer.status_code == status, answer.text[:400]
    error = found.get("error", found)
    message = error["message"]
    if "object" in found:  # of SGLang's API: its code is the status
        assert list(found) == ["object", "message", "type", "param", "code"]
        kind = "InternalServerError" if status >= 500 else "BadRequestError"
        assert list(found.values()) == ["error", message, kind, param, status]
    elif "type" in found:  # of Anthropic's API: the message begins with the field
        assert (list(found), found["type"]) == (["type", "error", "request_id"], "error")
        assert list(error) == ["type", "message"] and found["request_id"]
        assert param is None or message.startswith(f"{param}: "), (param, message)
    else:
        assert list(found) == ["error"] and list(error) == ["message", "type", "param", "code"]
        assert (error["param"], error["code"]) == (param, code), error
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        assert error["type"] == ("server_error" if status >= 500 else kind)
    assert 0 < len(message) <= 512 and message.isascii() and message.isprintable()
    for inside in ("pydantic", "Traceback", "Error(", "0x", ".py", "site-packages", str(ROOT)):
        assert inside not in message
    assert answer.headers["x-request-id"]


# Promises of the first version.


def test_a_prompt_becomes_text_with_counts(running_server: RunningServer) -> None:
    answer = running_server.post("/generate", prompt="hello").json()
    assert answer["prompt_tokens"] == 5
    assert 0 < answer["completion_tokens"] <= 32


def test_healthz_reports_ok(running_server: RunningServer) -> None:
    before = running_server.client.get("/healthz").json()
    running_server.post_completion(prompt="a", max_tokens=4, ignore_eos=True)
    after = running_server.client.get("/healthz").json()
    assert before["status"] == after["status"] == "ok"
    assert after["steps"] >= before["steps"] + 4
    assert after["kv_blocks_total"] == 64
    assert (after["running"], after["waiting"], after["kv_blocks_used"]) == (0, 0, 0)


def test_generate_returns_a_completion(running_server: RunningServer) -> None:
    answer = running_server.post("/generate", prompt="hello", max_tokens=7, ignore_eos=True).json()
    assert isinstance(answer["text"], str)
    assert len(answer["token_ids"]) == answer["completion_tokens"] == 7
    assert answer["finish_reason"] == "length"


def test_a_completion_ends_with_length_at_max_tokens(running_server: RunningServer) -> None:
    answer = running_server.post_completion(prompt="hello", max_tokens=5, ignore_eos=True, **GREEDY)
    assert (answer["object"], answer["model"]) == ("text_completion", "hash")
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert len(choice["text"]) == 5
    counts = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert without_cached(answer["usage"]) == counts
    assert abs(answer["created"] - time.time()) < 60


def test_a_completion_streams_as_server_sent_events(running_server: RunningServer) -> None:
    body = {"model": "hash", "prompt": "hello", "stream": True}
    with running_server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert len(lines) >= 2 and all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["object"] == "text_completion"


# Official clients.


def test_the_official_client_reads_completions_and_streams(
    running_server: RunningServer, openai: Any
) -> None:
    with openai.OpenAI(
        base_url=f"{running_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["hash"]
        options: Any = {"model": "hash", "prompt": "to be", "max_tokens": 20, "seed": 5}
        whole = client.completions.create(**options)
        with client.completions.create(**options, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        assert whole.usage is not None and whole.usage.prompt_tokens == 5
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**{**options, "temperature": 9.0})
        assert (error.value.param, error.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**options, "model": "other"})


def test_the_official_async_client_reads_completions_and_streams(
    running_server: RunningServer, openai: Any
) -> None:
    async def both() -> tuple[str, str]:
        url = f"{running_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            options: Any = {"model": "hash", "prompt": "to be", "max_tokens": 20, "seed": 5}
            whole = await client.completions.create(**options)
            text = ""
            async with await client.completions.create(**options, stream=True) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].text
            return whole.choices[0].text, text

    whole, joined = asyncio.run(both())
    assert whole == joined and whole


# Texts.


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "plain", **GREEDY},
        {"prompt": "an emoji 😀, two", "seed": 3, "temperature": 2.0, "top_k": 257},
        {"prompt": "漢字かな", "seed": 4, "logit_bias": {"241": 100, "160": 99, "153": 99}},
        {"prompt": [1, 2, 3, 200, 256], "seed": 5, "n": 3},
        {"prompt": ["several", "prompts"], "seed": 6, "n": 2},
        {"prompt": [[7, 8], [9]], "seed": 7},
        {"prompt": "stops", "seed": 8, "stop": ["e", "ou"], "max_tokens": 60},
        {"prompt": "echoed", "seed": 9, "echo": True, "n": 2},
        {"prompt": "scored", "seed": 10, "logprobs": 2, "n": 2},
        {"prompt": "nothing new", "max_tokens": 0, "echo": True},
        {"prompt": [[98, 0, 99], [0]], "seed": 12, "echo": True},
    ],
    ids=lambda body: str(body["prompt"]),
)
def test_a_stream_has_the_content_of_the_whole_answer(
    running_server: RunningServer, body: dict[str, Any]
) -> None:
    whole = running_server.post_completion(**{"max_tokens": 40, **body})
    chunks = running_server.stream(
        **{"max_tokens": 40, **body, "stream_options": {"include_usage": True}}
    )
    last = chunks.pop()
    assert choice_texts(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
    assert last["choices"] == []
    assert without_cached(last["usage"]) == without_cached(whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if "logprobs" in body:
            joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
            for part in own:
                for name, items in part["logprobs"].items():
                    joined[name] += items
            assert joined == choice["logprobs"]
        else:
            assert choice["logprobs"] is None and all(part["logprobs"] is None for part in own)


def test_the_text_is_that_of_the_engine_without_a_server(running_server: RunningServer) -> None:
    params = SamplingParams(max_tokens=30, seed=11, temperature=0.9, top_p=0.9)
    with LLM("hash") as llm:
        (alone,) = llm.generate("the same prompt", params)
    fields = {"prompt": "the same prompt", "max_tokens": 30, "seed": 11, "temperature": 0.9}
    answer = running_server.post("/generate", **fields, top_p=0.9).json()
    assert (answer["text"], answer["token_ids"]) == (alone.text, alone.token_ids)
    assert running_server.post_completion(**fields, top_p=0.9)["choices"][0]["text"] == alone.text


@pytest.mark.long
def test_requests_at_the_same_time_leave_each_others_text_alone(
    running_server: RunningServer,
) -> None:
    prompts = [f"prompt number {i}" for i in range(16)]
    with LLM("hash") as llm:
        params = [SamplingParams(max_tokens=30, seed=i) for i in range(16)]
        alone = [output.text for output in llm.generate(prompts, params)]

    async def together() -> list[str]:
        async with httpx.AsyncClient(
            base_url=running_server.url, trust_env=False, verify=False, timeout=TIMEOUT_S
        ) as client:
            bodies = [
                {"prompt": prompt, "max_tokens": 30, "seed": seed}
                for seed, prompt in enumerate(prompts)
            ]
            calls = [client.post("/generate", json=body) for body in bodies]
            return [answer.json()["text"] for answer in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == alone


def test_an_echo_comes_first_and_has_the_logprobs_of_the_prompt(
    running_server: RunningServer,
) -> None:
    answer = running_server.post_completion(
        prompt="né a", max_tokens=3, ignore_eos=True, echo=True, logprobs=1
    )
    (choice,) = answer["choices"]
    assert choice["text"].startswith("né a")
    block = choice["logprobs"]
    # Five bytes make four characters: both bytes of the second have the same offset.
    assert block["tokens"][:5] == ["n", "bytes:\\xc3", "bytes:\\xa9", " ", "a"]
    assert block["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6]
    assert block["token_logprobs"][0] is None and block["top_logprobs"][0] is None
    for token, logprob, top in zip(
        block["tokens"][1:], block["token_logprobs"][1:], block["top_logprobs"][1:], strict=True
    ):
        assert logprob < 0 and top[token] == logprob == min(top.values())
        assert 1 <= len(top) <= 2


def test_offsets_after_a_prompt_that_ends_inside_a_character_are_those_of_the_text(
    running_server: RunningServer,
) -> None:
    """Half a character decodes to U+FFFD, and the output begins after that."""
    body = {"prompt": [98, 196], "max_tokens": 2, "ignore_eos": True, "echo": True, "logprobs": 0}
    (choice,) = running_server.post_completion(**body, **GREEDY)["choices"]
    assert choice["text"].startswith("a\ufffd") and len(choice["text"]) == 4
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ([98, 0, 99], "a<|end|>b", [0, 1, 8]),
        ([0, 0], "<|end|><|end|>", [0, 7]),
        ([0xC4, 0, 0xAA, 98], "\ufffd<|end|>\ufffda", [0, 1, 8, 9]),
    ],
    ids=str,
)
def test_an_echo_of_ids_names_the_special_ones(
    running_server: RunningServer, prompt: list[int], text: str, offsets: list[int]
) -> None:
    """Bytes with a special id between them form no character."""
    body = {"prompt": prompt, "max_tokens": 0, "echo": True}
    (choice,) = running_server.post_completion(**body, logprobs=0)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)
    body |= {"max_tokens": 1, "ignore_eos": True, "allowed_token_ids": [98]}
    (choice,) = running_server.post_completion(**body, logprobs=0)["choices"]
    assert choice["text"] == text + "a"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]


def test_an_echo_without_new_tokens_scores_the_prompt(running_server: RunningServer) -> None:
    answer = running_server.post_completion(
        prompt=[98, 99, 100], max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    counts = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert without_cached(answer["usage"]) == counts


def test_the_scores_of_a_prompt_are_those_of_the_same_tokens_as_output(
    running_server: RunningServer,
) -> None:
    body = {"prompt": "score", "max_tokens": 6, "ignore_eos": True, "logprobs": 2, **GREEDY}
    first = running_server.post_completion(**body)["choices"][0]
    again = running_server.post_completion(
        prompt="score" + first["text"], max_tokens=0, echo=True, logprobs=2, **GREEDY
    )["choices"][0]
    assert again["logprobs"]["token_logprobs"][5:] == first["logprobs"]["token_logprobs"]
    assert again["logprobs"]["top_logprobs"][5:] == first["logprobs"]["top_logprobs"]


def test_each_prompt_of_a_list_has_its_choices_in_order(running_server: RunningServer) -> None:
    both = running_server.post_completion(
        prompt=["first", "second"], n=2, seed=1, echo=True, max_tokens=8
    )
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    starts = [choice["text"][:5] for choice in both["choices"]]
    assert starts == ["first", "first", "secon", "secon"]
    alone = running_server.post_completion(prompt="second", n=2, seed=1, echo=True, max_tokens=8)
    assert [c["text"] for c in both["choices"][2:]] == [c["text"] for c in alone["choices"]]


def test_a_stop_string_ends_the_text_before_it(running_server: RunningServer) -> None:
    body = {"prompt": "stop here", "max_tokens": 40, "ignore_eos": True, **GREEDY}
    text = running_server.post_completion(**body)["choices"][0]["text"]
    stop = text[10:13]
    (choice,) = running_server.post_completion(**body, stop=stop)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_usage_so_far_is_in_every_chunk_where_requested(running_server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = running_server.stream(
        prompt="count", max_tokens=9, ignore_eos=True, stream_options=options
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 9 and counts[0] >= 1


def test_max_tokens_is_16_for_completions_and_32_for_generate_by_default(
    running_server: RunningServer,
) -> None:
    body = {"model": "hash", "prompt": "default", "ignore_eos": True}
    assert running_server.post_completion(**body)["usage"]["completion_tokens"] == 16
    assert running_server.post("/generate", **body).json()["completion_tokens"] == 32


def test_null_is_the_default_of_every_field(running_server: RunningServer) -> None:
    body = dict.fromkeys([*CompletionRequest.model_fields, *CompletionRequest.unsupported])
    body |= {"model": "hash", "prompt": "nulls", "seed": 1}
    assert (
        running_server.post_completion(**body)["choices"]
        == running_server.post_completion(prompt="nulls", seed=1)["choices"]
    )


def test_a_seed_repeats_and_its_absence_does_not(running_server: RunningServer) -> None:
    def text(**body: Any) -> str:
        found: str = running_server.post("/generate", prompt="again", **body).json()["text"]
        return found

    assert text(seed=2) == text(seed=2)
    assert len({text() for _ in range(4)}) > 1


def test_the_longest_request_is_served_and_one_token_more_is_not(
    running_server: RunningServer,
) -> None:
    answer = running_server.post_completion(prompt="x" * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    for prompt, param in ((MAX_MODEL_LEN - 1, "max_tokens"), (MAX_MODEL_LEN, "prompt")):
        response = running_server.post("/generate", prompt="x" * prompt, max_tokens=2)
        check_envelope(response, 400, param, "context_length_exceeded")


def test_a_request_that_the_cache_could_never_hold_is_refused() -> None:
    with open_server(num_blocks=4) as server:  # 16 positions
        good = server.post("/generate", prompt="x" * 8, max_tokens=9)
        assert good.json()["prompt_tokens"] == 8
        response = server.post("/generate", prompt="x" * 8, max_tokens=10)
        check_envelope(response, 400, "max_tokens", "context_length_exceeded")


def test_ids_are_unique(running_server: RunningServer) -> None:
    ids = [running_server.post_completion(prompt="a", max_tokens=1)["id"] for _ in range(20)]
    ids += [chunk["id"] for chunk in running_server.stream(prompt="a", max_tokens=1)]
    assert len(set(ids)) == 21 and all(i.startswith("cmpl-") for i in ids)


def test_fields_that_do_nothing_here_are_accepted(running_server: RunningServer) -> None:
    running_server.post_completion(
        prompt="a",
        user="someone",
        request_id="mine",
        metadata={"a": "b"},
        add_special_tokens=True,
        spaces_between_special_tokens=False,
        best_of=1,
        suffix="",
        tools=[],
        response_format={"type": "text"},
        skip_special_tokens=True,
        use_beam_search=False,
        length_penalty=1.0,
    )


def test_requests_with_different_salts_share_no_blocks(running_server: RunningServer) -> None:
    scheduler = running_server.llm.engine.scheduler

    def shared(salt: str) -> int:
        before = scheduler.num_cached_tokens
        running_server.post_completion(
            prompt="a prompt of some blocks", max_tokens=1, cache_salt=salt
        )
        return scheduler.num_cached_tokens - before

    assert [shared("one"), shared("one"), shared("two"), shared("one")] == [0, 20, 0, 20]


# Shared steps, and time.


@pytest.mark.long
def test_32_streams_share_the_steps_of_one_engine() -> None:
    """Alone, each of 32 streams of 24 tokens would take 24 steps: 768."""
    body = {"model": "hash", "prompt": "shared", "max_tokens": 24, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    model = GatedModel(num_blocks=512, block_size=4)

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = model

    def ask(url: str, seed: int) -> str:
        with create_client(url) as client:
            return client.post("/v1/completions", json={**body, "seed": seed}).text

    with (
        open_server(prepare=prepare, num_blocks=512) as server,
        model.open_at_exit(),
        ThreadPoolExecutor(32) as pool,
    ):
        futures = [pool.submit(ask, server.url, seed) for seed in range(32)]
        wait_until(lambda: len(server.llm._mailboxes) == 32)
        model.permits.release(768)
        texts = [each.result() for each in futures]
        steps = server.llm.engine.num_steps
    counts = [parse_chunks(text)[-1]["usage"]["completion_tokens"] for text in texts]
    assert counts == [24] * 32
    print(f"32 streams x 24 tokens took {steps} steps")
    assert 24 <= steps <= 768 / 4, steps


def test_an_event_arrives_before_the_next_token_is_there() -> None:
    body = {"model": "hash", "prompt": "time", "max_tokens": 3, "ignore_eos": True, "stream": True}
    model = GatedModel(num_blocks=64, block_size=4)

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = model

    with open_server(prepare=prepare) as server, model.open_at_exit():
        model.permits.release()
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(2):
                assert next(lines).startswith("data: {")
                model.permits.release()
            assert [line[:7] for line in lines] == ["data: {", "data: ["]


@pytest.mark.parametrize("events", [0, 3])
def test_a_stream_that_the_client_leaves_gives_its_blocks_back(
    slow_server: RunningServer, events: int
) -> None:
    """2,000 steps of 20 ms would hold them for 40 s."""
    body = {"model": "hash", "prompt": ["gone", "too"], "n": 2, "stream": True, **LONG}
    with slow_server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(2 * events):
            next(lines)
        assert slow_server.blocks_used > 0
    wait_until(slow_server.is_idle)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_whole_answer_that_the_client_does_not_wait_for_is_aborted(
    slow_server: RunningServer, path: str
) -> None:
    text = json.dumps({"model": "hash", "prompt": "gone", **LONG}).encode()
    with connect(slow_server) as connection:
        connection.sendall(head(path, f"content-length: {len(text)}") + text)
        wait_until(lambda: slow_server.blocks_used > 0)
    wait_until(slow_server.is_idle)


def test_a_client_that_leaves_while_it_sends_leaves_nothing(running_server: RunningServer) -> None:
    steps = running_server.llm.engine.num_steps
    with connect(running_server) as connection:
        connection.sendall(head("/generate", "content-length: 50") + b'{"prompt": "whole"}')
    check_serves(running_server)
    assert running_server.llm.engine.num_steps == steps + 2
    assert running_server.is_idle()


# Refusals.


@pytest.mark.parametrize(
    ("model_type", "field", "remedy"),
    [
        (CompletionRequest, "max_token", "Use max_tokens, or leave it out"),
        (CompletionRequest, "max_completion_tokens", "Use max_tokens"),
        (CompletionRequest, "guided_json", 'Use structured_outputs: {"json": ...}'),
        (CompletionRequest, "messages", "Send a chat to /v1/chat/completions"),
        (ChatRequest, "prompt", "Send messages, or a prompt to /v1/completions"),
        (ChatRequest, "stop_sequences", "Use stop, or leave it out"),
        (ChatRequest, "streams", "Use stream, or leave it out"),
        (BatchChatRequest, "streams", "Leave it out"),
        (ResponsesRequest, "max_tokens", "Use max_output_tokens, or leave it out"),
        (ChatRequest, "foo", "Leave it out"),
        (ChatRequest, "max_tokens" * 7, "Leave it out"),
    ],
)
def test_the_error_of_a_refused_field_names_what_to_send(
    model_type: type[RequestBody], field: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_request(model_type, {field: "x"})
    assert raised.value.remedy == remedy


BIG = 10**400
BAD_IN_BOTH: list[tuple[dict[str, Any], str | None, str]] = [
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"x" * 200: 1}, "x" * 64, "unknown_parameter"),
    ({"line\nbreak\x1b": 1}, "line\\nbreak\\x1b", "unknown_parameter"),
    ({"zeros": [0] * 100_000}, "zeros", "unknown_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "unsupported_parameter"),
    ({"session_id": ""}, "session_id", "invalid_value"),
    ({"session_id": "x" * 129}, "session_id", "invalid_value"),
    ({"session_end": True}, "session_end", "invalid_value"),
    ({"session_end": "x", "session_id": "a"}, "session_end", "invalid_type"),
    ({"expected_pause_s": -1}, "expected_pause_s", "invalid_value"),
    ({"prompt_cache_key": "x" * 129}, "prompt_cache_key", "invalid_value"),
    ({"lora_path": "file:///x"}, "lora_path", "unsupported_parameter"),
    ({"return_hidden_states": True}, "return_hidden_states", "unsupported_parameter"),
    ({"stop_regex": "and|or"}, "stop_regex", "unsupported_parameter"),
    ({"messages": []}, "messages", "unsupported_parameter"),
    ({"model": 7}, "model", "invalid_type"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": True}, "prompt", "invalid_type"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [1.0]}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [[1], "a"]}, "prompt", "invalid_type"),
    ({"prompt": [1, [2]]}, "prompt", "invalid_type"),
    ({"prompt": [["a"]]}, "prompt", "invalid_type"),
    ({"prompt": [None]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "token_out_of_range"),
    ({"prompt": [257]}, "prompt", "token_out_of_range"),
    ({"prompt": [2**31]}, "prompt", "token_out_of_range"),
    ({"prompt": [2**63]}, "prompt", "token_out_of_range"),
    ({"prompt": [BIG]}, "prompt", "token_out_of_range"),
    ({"prompt": "x" * MAX_MODEL_LEN}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 1_000_000}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 100_000}, "prompt", "context_length_exceeded"),
    ({"prompt": "\ud800"}, "prompt", "invalid_unicode"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"max_tokens": "10"}, "max_tokens", "invalid_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_value"),
    ({"max_tokens": 2**63}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**4000}, "max_tokens", "invalid_value"),
    ({"max_tokens": []}, "max_tokens", "invalid_value"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens", "context_length_exceeded"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"temperature": BIG}, "temperature", "invalid_value"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"temperature": float("-inf")}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": -1}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_p": float("nan")}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_value"),
    ({"top_k": 10**12}, "top_k", "invalid_value"),
    ({"min_p": -0.1}, "min_p", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "invalid_value"),
    ({"presence_penalty": -2.1}, "presence_penalty", "invalid_value"),
    ({"presence_penalty": float("nan")}, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_value"),
    ({"seed": "x"}, "seed", "invalid_value"),
    ({"seed": True}, "seed", "invalid_value"),
    ({"logit_bias": []}, "logit_bias", "invalid_type"),
    ({"logit_bias": "x"}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"01": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "token_out_of_range"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": -101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias", "invalid_value"),
    # bad_inputs.py has the long tests' 200,000 of one and a million of the other.
    ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias", "too_many_items"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [257]}, "allowed_token_ids", "token_out_of_range"),
    ({"allowed_token_ids": ["1"]}, "allowed_token_ids", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "token_out_of_range"),
    ({"stop_token_ids": [257]}, "stop_token_ids", "token_out_of_range"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids", "too_many_items"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_type"),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"stop": [["a"]]}, "stop", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "too_many_items"),
    ({"stop": "x" * 1_000_000}, "stop", "string_too_long"),
    ({"stop": "\udfff"}, "stop", "invalid_unicode"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": 1}, "cache_salt", "invalid_value"),
    ({"cache_salt": "x" * 10_000}, "cache_salt", "invalid_value"),
    ({"cache_salt": "a/../b"}, "cache_salt", "invalid_value"),
    ({"cache_salt": "salt\n"}, "cache_salt", "invalid_value"),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"priority": "high"}, "priority", "invalid_value"),
    ({"user": 5}, "user", "invalid_value"),
    ({"user": "x" * 10_000}, "user", "invalid_value"),
    ({"user": "\ud800"}, "user", "invalid_unicode"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "too_many_items"),
    ({"metadata": {"a": float("inf")}}, "metadata", "invalid_value"),
    ({"metadata": {"\ud800": "a"}}, "metadata", "invalid_unicode"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"logprob_token_ids": [257], "logprobs": 0}, "logprob_token_ids", "token_out_of_range"),
    ({"logprob_token_ids": [1] * 129, "logprobs": 0}, "logprob_token_ids", "too_many_items"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "invalid_value"),
    (
        {"logprob_token_ids": [5], "logprobs": 0, "echo": True, "max_tokens": 0},
        *("logprob_token_ids", "invalid_value"),
    ),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
    ({"prompt": [[1, 2], []]}, "prompt[1]", "empty_prompt"),
    ({"prompt": [[1], [257]]}, "prompt[1]", "token_out_of_range"),
    ({"prompt": ["a", "x" * MAX_MODEL_LEN]}, "prompt[1]", "context_length_exceeded"),
    ({"prompt": ["a"] * 10_000}, "prompt", "too_many_prompts"),
    ({"prompt": [[1]] * 257}, "prompt", "too_many_prompts"),
    ({"prompt": ["a"] * 256, "n": 5}, "n", "too_many_items"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": -1}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_value"),
    ({"n": "2"}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": 10**9}, "n", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"logprobs": "1"}, "logprobs", "invalid_value"),
    ({"echo": "yes"}, "echo", "invalid_type"),
    ({"stream": "true"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options",
        "invalid_type",
    ),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options", "unknown_parameter"),
    (
        {"stream": True, "stream_options": dict.fromkeys(map(str, range(100_000)), 1)},
        "stream_options",
        "too_many_items",
    ),
    ({"stream": True, "temperature": 9}, "temperature", "invalid_value"),
    ({"stream": True, "prompt": ""}, "prompt", "empty_prompt"),
]
BAD_GENERATE: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ["a"]}, "prompt", "invalid_type"),
    ({"prompt": [[1]]}, "prompt", "invalid_type"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"stream": True}, "stream", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"logprobs": 1}, "logprobs", "unsupported_parameter"),
    ({"stream_options": {}}, "stream_options", "unsupported_parameter"),
]
BAD_FIELDS = [
    *(("/v1/completions", *row) for row in BAD_IN_BOTH + BAD_COMPLETIONS),
    *(("/generate", *row) for row in BAD_IN_BOTH + BAD_GENERATE),
]
BAD_BODIES: list[tuple[bytes, str | None, str]] = [
    (b"", None, "invalid_json"),
    (b"{", None, "invalid_json"),
    (b"{'prompt': 1}", None, "invalid_json"),
    (b'{"prompt": "a"} {}', None, "invalid_json"),
    (b"\xff\xfe", None, "invalid_json"),
    (b'{"prompt": "\xed\xa0\x80"}', None, "invalid_json"),
    (b'\xef\xbb\xbf{"prompt": "a"}', None, "invalid_json"),
    ('{"prompt": "a"}'.encode("utf-16"), None, "invalid_json"),
    (b'"text"', None, "invalid_type"),
    (b"42", None, "invalid_type"),
    (b"null", None, "invalid_type"),
    (b"true", None, "invalid_type"),
    (b"[]", None, "invalid_type"),
    (b"NaN", None, "invalid_type"),
    (b'{"seed": ' + b"9" * 5000 + b"}", None, "invalid_json"),
    (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", None, "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature", "invalid_value"),
    (b'{"prompt": "a", "temperature": -Infinity}', "temperature", "invalid_value"),
    (b'{"prompt": "a", "foo": NaN}', "foo", "invalid_value"),
    (b'{"\\ud800": 1}', "\\ud800", "invalid_unicode"),
]
BAD_TYPES = [
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-16",
    "application/jsonx",
]


def check_serves(server: RunningServer) -> None:
    """Check that the server still answers, with the right text."""
    answer = server.post("/generate", prompt="ok", max_tokens=2, ignore_eos=True, **GREEDY)
    assert (answer.status_code, answer.json()["text"]) == (200, good_text())


@cache
def good_text() -> str:
    with LLM("hash") as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        return llm.generate("ok", params)[0].text


@contextmanager
def assert_no_step(server: RunningServer) -> Iterator[None]:
    """Check that no step runs and no block is taken in the block."""
    steps = server.llm.engine.num_steps
    yield
    assert server.llm.engine.num_steps == steps
    assert server.is_idle()


def shorten(value: Any) -> Any:
    """Return `value` cut to what the first 40 characters of its text can show."""
    if isinstance(value, dict):
        return {key: shorten(each) for key, each in islice(value.items(), 40)}
    return [shorten(each) for each in value[:40]] if isinstance(value, list) else value


def row_id(value: Any) -> str:
    return repr(shorten(value))[:40] if isinstance(value, dict | bytes) else str(value)


@pytest.mark.parametrize(("path", "fields", "param", "code"), BAD_FIELDS, ids=row_id)
def test_a_bad_field_is_refused_by_name(
    running_server: RunningServer, path: str, fields: dict[str, Any], param: str | None, code: str
) -> None:
    body = json.dumps({"model": "hash", "prompt": "good", **fields})
    with assert_no_step(running_server):
        answer = running_server.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        check_envelope(answer, 400, param, code)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("max_tokens", "1.5", "'1.5' is not an integer"),
        ("max_tokens", 1.5, "1.5 is not an integer"),
        ("max_tokens", [1], "it is not an integer"),
        ("model", 5, "5 is not a string"),
        ("temperature", True, "true is not a number"),
        ("top_k", "a\n" * 99, "'" + "a\\n" * 32 + "...' is not an integer"),
        ("echo", 0, "0 is not true or false"),
        ("stop", [1], "it is not a string or a list of strings"),
    ],
    ids=row_id,
)
def test_a_value_of_the_wrong_type_is_named(
    running_server: RunningServer, field: str, value: object, problem: str
) -> None:
    answer = running_server.post(
        "/v1/completions", **{"model": "hash", "prompt": "a", field: value}
    )
    assert answer.json()["error"]["message"] == f"{field}: {problem}. Fix it or leave it out"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize(("body", "param", "code"), BAD_BODIES, ids=row_id)
def test_a_bad_body_is_refused(
    running_server: RunningServer, path: str, body: bytes, param: str | None, code: str
) -> None:
    with assert_no_step(running_server):
        answer = running_server.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        check_envelope(answer, 400, param, code)


@pytest.mark.parametrize("content_type", BAD_TYPES)
def test_a_body_of_another_content_type_is_refused(
    running_server: RunningServer, content_type: str
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    with assert_no_step(running_server):
        answer = running_server.client.post(
            "/generate", content=b'{"prompt": "a"}', headers=headers
        )
        check_envelope(answer, 415, None, "unsupported_media_type")


def test_a_json_content_type_may_name_utf_8(running_server: RunningServer) -> None:
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    answer = running_server.client.post(
        "/generate", content='{"prompt": "é"}'.encode(), headers=headers
    )
    assert answer.json()["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("../../etc/passwd", "/v1/completions"),
        ("other\r\nx-injected: 1", "/v1/completions"),
        ("m" * 1_000_000, "/generate"),
    ],
    ids=["path", "line break", "a million characters"],
)
def test_a_model_that_is_not_there_is_404(
    running_server: RunningServer, model: str, path: str
) -> None:
    with assert_no_step(running_server):
        answer = running_server.post(path, model=model, prompt="a")
        check_envelope(answer, 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/nope", 404, "not_found"),
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/healthz/", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("POST", "//v1/completions", 404, "not_found"),
        ("POST", "/V1/Completions", 404, "not_found"),
        ("GET", "/nowhere%0d%0ax: 1/" + "y" * 500, 400, "invalid_path"),
        ("GET", "/nowhere%c2%85x: 1/" + "y" * 500, 404, "not_found"),
        ("GET", "/v1/models/hash%0a", 400, "invalid_path"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/generate", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ],
)
def test_a_path_or_method_that_is_not_there_is_refused(
    running_server: RunningServer, method: str, path: str, status: int, code: str
) -> None:
    answer = running_server.client.request(method, running_server.url + path)
    check_envelope(answer, status, None, code)
    assert ("allow" in answer.headers) == (status == 405)


def test_a_model_is_found_by_its_name_alone(running_server: RunningServer) -> None:
    (listed,) = running_server.client.get("/v1/models").json()["data"]
    assert running_server.client.get("/v1/models/hash").json() == listed
    other = running_server.client.get("/v1/models/some/other")
    check_envelope(other, 404, "model", "model_not_found")


@contextmanager
def connect(server: RunningServer) -> Iterator[socket.socket]:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=TIMEOUT_S) as connection:
        yield connection


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_until_close(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent(
    running_server: RunningServer,
) -> None:
    with assert_no_step(running_server), connect(running_server) as connection:
        connection.sendall(head("/generate", f"content-length: {MAX_BODY_BYTES + 1}"))
        answer = read_until_close(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


def test_a_body_that_grows_over_the_limit_is_refused(running_server: RunningServer) -> None:
    with assert_no_step(running_server), connect(running_server) as connection:
        connection.sendall(head("/v1/completions", "transfer-encoding: chunked"))
        part = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 0x100000):
            connection.sendall(part)
        connection.sendall(b"1\r\n \r\n")
        answer = read_until_close(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        head("/generate", "content-length: -1"),
        head("/generate", "content-length: abc"),
        head("/generate", "transfer-encoding: chunked") + b"no chunk\r\n",
    ],
)
def test_what_is_not_http_gets_an_envelope_and_is_cut(
    running_server: RunningServer, sent: bytes
) -> None:
    with assert_no_step(running_server), connect(running_server) as connection:
        connection.sendall(sent)
        answer = read_until_close(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_framing"


EDGES = st.sampled_from(
    [
        *(None, True, False, -1, 0, 1, 2, 2**31, 2**63, BIG, -0.5, 0.5, 1e-40, float("nan")),
        *("", "a", "\ud800", "\x00", [], [1], ["a"], [[1]], [None], {}, {"1": 1}, {"a": "b"}),
    ]
)
FIELD_NAMES = st.sampled_from(
    [*CompletionRequest.model_fields, *CompletionRequest.unsupported, "other"]
)


@settings(max_examples=80)
@given(
    st.dictionaries(FIELD_NAMES, EDGES, max_size=4), st.sampled_from(["completions", "generate"])
)
def test_no_field_whatever_its_value_makes_the_server_fail(
    running_server: RunningServer, fields: dict[str, Any], name: str
) -> None:
    path = "/generate" if name == "generate" else "/v1/completions"
    body = json.dumps({"model": "hash", "prompt": "fuzz", "max_tokens": 2, **fields})
    answer = running_server.client.post(
        path, content=body, headers={"content-type": "application/json"}
    )
    if answer.status_code != 200:
        error = answer.json()["error"]
        check_envelope(answer, answer.status_code, error["param"], error["code"])
        assert answer.status_code in (400, 404)
    elif fields.get("stream") is True:
        choice_texts(parse_chunks(answer.text))
    else:
        assert answer.json()
    assert running_server.is_idle()


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_no_body_makes_the_server_fail(running_server: RunningServer, body: bytes) -> None:
    answer = running_server.client.post(
        "/generate", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "nul \x00 inside"},
        {"temperature": 1e-40},
        {"temperature": 5e-324},
        {"temperature": 0, "n": 3},
        {"top_k": -1},
        {"top_k": 0},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"logit_bias": {str(i): -100 for i in range(1, 257)}},
        {"ignore_eos": True, "max_tokens": None},
        {"min_tokens": 4, "max_tokens": 4},
        {"priority": -5},
        {"allowed_token_ids": [98]},
        {"stop": None, "n": None, "temperature": None, "stream": None, "logprobs": None},
        {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1.3},
    ],
    ids=row_id,
)
def test_values_at_the_edge_are_served(
    running_server: RunningServer, fields: dict[str, Any]
) -> None:
    answer = running_server.post_completion(**{"prompt": "edge", **fields})
    assert {c["finish_reason"] for c in answer["choices"]} <= {"stop", "length"}


def test_choices_at_temperature_0_are_equal(running_server: RunningServer) -> None:
    answer = running_server.post_completion(prompt="same", n=3, **GREEDY)
    assert len({choice["text"] for choice in answer["choices"]}) == 1


# The key.


def test_with_a_key_every_route_but_healthz_needs_it() -> None:
    with open_server(api_keys=("sésame",)) as server:
        key = "Bearer sésame".encode()
        paths = [("GET", "/v1/models"), ("POST", "/generate"), ("POST", "/v1/completions")]
        paths += [("GET", "/nowhere"), ("GET", "//healthz"), ("GET", "/v1/%6dodels")]
        wrong = [
            *(None, b"", b"Bearer", b"Bearer wrong", b"Token " + key[7:]),
            *(b"Bearer  " + key[7:], b"Basic " + key[7:], key + b" x", b"Bearer \xff\xfe"),
            *(b"Bearer " + b"x" * 8000, b"Bearer s\xe9same"),
        ]
        for method, path in paths:
            for value in wrong if path == "/v1/models" else wrong[:1]:
                headers = {} if value is None else {b"authorization": value}
                answer = server.client.request(method, server.url + path, headers=headers)
                check_envelope(answer, 401, None, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        in_query = server.client.get("/v1/models", params={"api_key": "sésame"})
        check_envelope(in_query, 401, None, "invalid_api_key")
        assert server.client.get("/healthz").status_code == 200
        with_key = {b"authorization": key}
        for value in (key, b"bearer " + key[7:]):  # schemes ignore case
            headers = {b"authorization": value}
            assert server.client.get("/v1/models", headers=headers).status_code == 200
        answer = server.client.post("/generate", json={"prompt": "a"}, headers=with_key)
        assert answer.status_code == 200


# Failures.


def fail_at_position(position: int, step_s: float = 0.0) -> Callable[[AsyncLLM], None]:
    """Make the logits at this position of any sequence unusable. A step takes `step_s`."""

    def bad_rows(plan: StepPlan) -> dict[int, str]:
        rows = enumerate(plan.rows)
        return {i: "secret detail" for i, row in rows if row.start <= position < row.end}

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = HashModel(
            num_blocks=64, block_size=4, faults=FaultHooks(result=bad_rows), step_s=step_s
        )

    return prepare


def test_a_request_that_fails_is_a_500_and_others_go_on() -> None:
    with open_server(prepare=fail_at_position(30)) as server:
        answer = server.post("/generate", prompt="x" * 10, **NEVER_ENDS)
        check_envelope(answer, 500, None, "internal_error")
        assert answer.headers["x-should-retry"] == "false"
        assert "secret" not in answer.text
        several = server.post("/v1/completions", model="hash", prompt=["x", "y" * 40], max_tokens=5)
        check_envelope(several, 500, None, "internal_error")
        assert server.post("/generate", prompt="x", max_tokens=5).status_code == 200
        wait_until(server.is_idle)


def test_a_stream_that_fails_ends_with_an_error_and_without_done() -> None:
    with open_server(prepare=fail_at_position(30, step_s=0.02)) as server:
        body = {"model": "hash", "prompt": ["x" * 10, "y"], "stream": True, **NEVER_ENDS}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        events = answer.text.split("\n\n")
        assert events.pop() == ""
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "[DONE]" not in answer.text and "secret" not in answer.text
        wait_until(server.is_idle)


def test_a_stream_that_fails_before_its_first_event_has_a_status() -> None:
    with open_server(prepare=fail_at_position(5)) as server:
        body = {"model": "hash", "prompt": "x" * 10, "stream": True}
        check_envelope(
            server.client.post("/v1/completions", json=body), 500, None, "internal_error"
        )


class FailingTokenizer(ByteTokenizer):
    """A tokenizer with a bug."""

    def encode(self, text: str, **encoding: bool) -> list[int]:
        raise RuntimeError("secret detail")


def test_a_bug_of_the_server_is_a_500_that_the_log_explains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def prepare(llm: AsyncLLM) -> None:
        llm.tokenizer = FailingTokenizer()

    with open_server(prepare=prepare) as server:
        answer = server.post("/generate", prompt="text")
        check_envelope(answer, 500, None, "internal_error")
        assert answer.headers["x-should-retry"] == "false"
        assert server.post("/generate", prompt=[1]).status_code == 200
    assert answer.headers["x-request-id"] in caplog.text and "secret detail" in caplog.text


def failing_policy() -> Policy:
    """Return a user's policy with a bug: it raises when a prompt has 13 tokens."""

    def admit(waiting: Any, context: Any) -> Any:
        if any(len(candidate.request.prompt) == 13 for candidate in waiting):
            raise RuntimeError("secret detail")
        return first_in_queue(waiting, context)

    return FCFS._replace(admit=admit)


def test_a_dead_engine_is_503_everywhere_and_ends_open_streams() -> None:
    with open_server("hash:step_ms=20", policy=failing_policy()) as server:
        body = {"model": "hash", "prompt": "open", "stream": True, **NEVER_ENDS}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            killer = server.post("/generate", prompt="x" * 13)
            check_envelope(killer, 503, None, "engine_dead")
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        for dead in (
            server.client.get("/healthz"),
            server.post("/generate", prompt="a"),
            server.post("/v1/completions", model="hash", prompt=["a", "b"]),
            server.post("/v1/completions", model="hash", prompt="a", stream=True),
        ):
            check_envelope(dead, 503, None, "engine_dead")
            assert dead.headers["x-should-retry"] == "false"
        assert server.post("/generate", prompt="").status_code == 400


def test_the_log_has_the_reason_that_the_engine_ended(caplog: pytest.LogCaptureFixture) -> None:
    with open_server(policy=failing_policy()) as server:
        check_envelope(server.post("/generate", prompt="x" * 13), 503, None, "engine_dead")
        answer = server.post("/generate", prompt="a")
    assert "Traceback" in caplog.text and "secret detail" in caplog.text
    label = answer.headers["x-request-id"]
    assert f"request {label} failed: the engine has ended: " in caplog.text


def test_a_request_to_a_closed_engine_gets_the_shutdown_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_server() as server:
        server.llm.close()
        answer = server.post("/generate", prompt="a")
    check_envelope(answer, 503, None, "shutting_down")
    assert "failed" not in caplog.text


def test_closing_the_engine_ends_open_requests_with_the_shutdown_error() -> None:
    with open_server("hash:step_ms=20") as server:
        body = {"model": "hash", "prompt": "open", "stream": True, **NEVER_ENDS}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.llm.close()
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"


# Start and end.

PROGRAM = """
import sys
from forge import AsyncLLM
from forge.limits import Limits
from forge.server.http_server import run_server
llm = AsyncLLM("hash:step_ms=5")
run_server(llm, host="127.0.0.1", port=0, api_keys=(), served_model_name=None,
    on_ready=lambda url: print(url, flush=True),
    limits=Limits(drain_timeout=300.0, read_timeout=300.0))
print("closed:", llm.failure)
"""


@contextmanager
def open_server_program() -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Run PROGRAM as a process until the end of the block; yield it and a client of it."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with create_client(url) as client:
                yield process, client
        finally:
            process.kill()


OPEN: dict[str, Any] = {"model": "hash:step_ms=5", "prompt": "open", "stream": True}
OPEN |= {"ignore_eos": True}
CLEAN_EXIT = (0, "closed: it was closed\n", "")


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_ends_the_server_after_its_open_requests(number: signal.Signals) -> None:
    with open_server_program() as (process, client):
        assert client.get("/v1/models").json()["data"][0]["id"] == "hash:step_ms=5"
        body = {**OPEN, "max_tokens": 60}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        printed, complained = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, printed, complained) == CLEAN_EXIT


def is_closing(client: httpx.Client) -> bool:
    """Return whether new requests are refused."""
    url = client.base_url.join("/readyz")
    return httpx.get(url, trust_env=False, verify=False, timeout=TIMEOUT_S).status_code == 503


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_second_signal_ends_open_requests_at_once(number: signal.Signals) -> None:
    with open_server_program() as (process, client):
        body = {**OPEN, "max_tokens": 8000}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            wait_until(lambda: is_closing(client))
            process.send_signal(number)
            *_, last = (line for line in lines if line)
        printed, complained = process.communicate(timeout=TIMEOUT_S)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert (process.returncode, printed, complained) == CLEAN_EXIT


@pytest.mark.long
def test_a_second_signal_cuts_a_client_that_never_finishes_its_request() -> None:
    """Without the cut, the server would wait for its limits of 30 s and 300 s."""
    with open_server_program() as (process, client):
        address = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            connection.sendall(head("/generate", "content-length: 9") + b"{")
            assert client.get("/healthz").status_code == 200
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_closing(client))
            process.send_signal(signal.SIGTERM)
            printed, complained = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, printed, complained) == CLEAN_EXIT


def refuse_start(**options: Any) -> tuple[InvalidConfig, AsyncLLM]:
    """Return the error that `run_server` raises, and its engine."""
    llm = AsyncLLM("hash")
    chosen = {"host": "127.0.0.1", "port": 0, "api_keys": (), "served_model_name": None}
    with pytest.raises(InvalidConfig) as caught:
        run_server(llm, **{**chosen, **options}, on_ready=lambda url: pytest.fail("it started"))
    return caught.value, llm


def test_a_busy_port_is_refused_and_the_engine_is_closed(running_server: RunningServer) -> None:
    port = httpx.URL(running_server.url).port
    error, llm = refuse_start(port=port)
    assert error.option == "port" and str(port) in str(error)
    assert llm.failure == "it was closed"


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"host": ""}, "host"),
        ({"host": "no such host"}, "host"),
        ({"host": "192.0.2.1", "api_keys": ("k",)}, "host"),
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "::"}, "host"),
        ({"api_keys": ("k", "")}, "api_key"),
    ],
    ids=str,
)
def test_a_start_that_cannot_be_is_refused_by_option(options: dict[str, Any], option: str) -> None:
    assert refuse_start(**options)[0].option == option


def test_a_system_error_in_binding_is_refused_as_one_of_the_port() -> None:
    """A link-local address without an interface: neither in use nor another machine's."""
    with pytest.raises(InvalidConfig, match="cannot be bound") as error:
        create_listener("fe80::1", 0, ("key",))
    assert error.value.option == "port"


def test_a_public_address_is_served_with_a_key() -> None:
    with create_listener("0.0.0.0", 0, ("key",)) as socket_:
        assert socket_.getsockname()[0] == "0.0.0.0"


def test_a_listening_socket_names_its_protocol() -> None:
    """Without it, asyncio lets small responses wait 40 ms for an acknowledgement."""
    with create_listener("localhost", 0, ()) as socket_:
        assert socket_.proto == socket.IPPROTO_TCP
        assert socket_.getsockname()[0] == "127.0.0.1"


def test_the_page_names_every_field() -> None:
    page = (ROOT / "docs" / "Server.md").read_text(encoding="utf-8")
    fields = [*CompletionRequest.model_fields, *CompletionRequest.unsupported]
    assert [name for name in fields if f"`{name}`" not in page] == []


def test_a_completion_has_token_ids_where_they_are_requested(
    running_server: RunningServer,
) -> None:
    body: dict[str, Any] = {"model": "hash", "prompt": ["ab", "c"], "max_tokens": 4}
    body |= {"ignore_eos": True, "n": 2, "seed": 3, "return_token_ids": True}
    whole = running_server.post("/v1/completions", **body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [[98, 99]] * 2 + [[100]] * 2
    chunks = parse_chunks(running_server.post("/v1/completions", **body, stream=True).text)
    for choice in whole:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        found = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert found == [choice["prompt_token_ids"]]


def test_tokens_of_logprobs_are_named_by_id_where_that_is_requested(
    running_server: RunningServer,
) -> None:
    body: dict[str, Any] = {"model": "hash", "max_tokens": 3, "return_tokens_as_token_ids": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    (choice,) = running_server.post("/v1/completions", **body, prompt="a", logprobs=2).json()[
        "choices"
    ]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    tops = choice["logprobs"]["top_logprobs"]
    assert [next(iter(top)) for top in tops] == names, "the token itself is the first"
    assert all(name.startswith("token_id:") for top in tops for name in top)
    messages = [{"role": "user", "content": "a"}]
    chat = running_server.post(
        "/v1/chat/completions", **body, messages=messages, logprobs=True, top_logprobs=2
    ).json()["choices"][0]
    content = chat["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{t}" for t in chat["token_ids"]]
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("prompt", ["Once upon a time " * 12, [98, 0, 99], "a"])
def test_a_stream_echoes_with_logprobs_what_the_whole_answer_has(
    running_server: RunningServer, prompt: object
) -> None:
    body: dict[str, Any] = {"model": "hash", "prompt": prompt, "max_tokens": 4, "echo": True}
    body |= {"ignore_eos": True, "n": 2, "seed": 3, "logprobs": 2}
    whole = running_server.post("/v1/completions", **body).json()["choices"]
    answer = running_server.post("/v1/completions", **body, stream=True)
    assert answer.status_code == 200, answer.text
    parts = [chunk["choices"][0] for chunk in parse_chunks(answer.text)]
    for choice in whole:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for part in own for value in part["logprobs"][key]] == values
        assert [part["finish_reason"] for part in own][-1] == choice["finish_reason"]


def test_a_prompt_has_logprobs_where_they_are_requested(running_server: RunningServer) -> None:
    body: dict[str, Any] = {"model": "hash", "prompt": "abc", "max_tokens": 1, "n": 2, "echo": True}
    whole = running_server.post("/v1/completions", **body, logprobs=3, prompt_logprobs=3).json()
    for choice in whole["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == 2
        for at, entry in enumerate(rest, 1):
            own = entry[str(99 + at - 1)]
            assert own["logprob"] == choice["logprobs"]["token_logprobs"][at]
            assert own["decoded_token"] == "abc"[at]
            ranks = [each["rank"] for each in entry.values() if each["rank"] is not None]
            assert sorted(ranks) == [1, 2, 3]
    for more, code in (
        ({"prompt_logprobs": 1, "stream": True}, "unsupported_parameter"),
        ({"prompt_logprobs": 1, "logprobs": 2}, "conflicting_parameters"),
        ({"prompt_logprobs": 21}, "invalid_value"),
    ):
        answer = running_server.post("/v1/completions", **body, **more)
        check_envelope(answer, 400, "prompt_logprobs", code)
