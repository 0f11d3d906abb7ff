"""The server's promises, by their numbers: P4, P8, P18, P24, P26, P28.

A promise is one function at two sizes: a small one that always runs, and the full one under `soak`.
The engine's promises are in tests/core/test_promises.py, that of a long run in
tests/server/test_soak.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pydantic
import pytest
from starlette.applications import Starlette

from forge.async_llm import AsyncLLM
from forge.request import Request, SamplingParams
from forge.server.app import create_app
from forge.server.openapi import ERROR_SCHEMA
from forge.server.operations import STALL_LIMIT_S
from forge.tokenizer import ChatEnd
from tests.cli.test_cli import environment
from tests.core.reference import compute_expected
from tests.server.local_server import TIMEOUT_S, wait_until
from tests.server.test_metrics import parse_samples
from tests.server.test_routes import create_probed_app, get, post
from tests.server.test_server import RunningServer, open_server, parse_chunks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def running_server() -> Iterator[RunningServer]:
    with open_server(num_blocks=512) as server:
        yield server


# P4, impossible work refused at once.


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 3, 256), id="3 sizes"),
        pytest.param(range(2, 257), id="255 sizes", marks=pytest.mark.soak),
    ],
)
def test_one_token_more_than_the_cache_holds_is_refused(sizes: tuple[int, ...]) -> None:
    """P4, impossible work refused at once: bound - 1, bound and bound + 1 of each size of pool."""
    longest_s = 0.0
    for num_blocks in sizes:
        llm = AsyncLLM("hash", num_blocks=num_blocks, block_size=4)
        try:
            app = create_app(llm)
            prompt, most = [7] * (4 * num_blocks - 2), 3  # the last token needs no position
            for max_tokens in (most - 1, most):
                response = post(
                    app, "/generate", prompt=prompt, max_tokens=max_tokens, ignore_eos=True
                )
                assert response.json()["completion_tokens"] == max_tokens
            start_s = time.monotonic()
            response = post(app, "/generate", prompt=prompt, max_tokens=most + 1)
            longest_s = max(longest_s, time.monotonic() - start_s)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "max_tokens"
            assert f"--num-blocks {num_blocks + 1}" in response.json()["error"]["message"]
        finally:
            llm.close()
    print(f"refused within {longest_s * 1000:.1f} ms")


# P8, /livez is 200 if and only if there is progress.


class ProbeResult(NamedTuple):
    """Statuses of /livez, and the longest time that a response took."""

    statuses: Counter[int]
    took_s: list[float]


async def livez(app: Starlette) -> int:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.get("/livez")).status_code


async def probe_under_load(app: Starlette, llm: AsyncLLM, load: ProbeLoad) -> ProbeResult:
    """Return the probe's responses while two clients always have long prompts computed.

    A response counts where two steps and the call took less than the limit: the second step was
    reported since. Otherwise the machine was stalled, not the engine.
    """
    ends_s = time.monotonic() + load.load_s
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def goes_on() -> bool:
        return time.monotonic() < ends_s or llm.status.num_steps <= LEAST_STEPS

    async def ask(number: int) -> None:
        rng = Random(number)
        while goes_on():
            await llm.generate(rng.choices(range(1, 257), k=load.prompt_len), params)

    asking = [asyncio.create_task(ask(number)) for number in range(2)]
    found = ProbeResult(Counter(), [])
    while goes_on():
        before_s, steps = time.monotonic(), llm.status.num_steps
        while llm.status.num_steps < steps + 2 and goes_on():
            await asyncio.sleep(0.002)
        start_s = time.monotonic()
        status = await livez(app)
        end_s = time.monotonic()
        found.took_s.append(end_s - start_s)
        if end_s - before_s < load.patience_s:
            found.statuses[status] += 1
    await asyncio.gather(*asking)
    return found


async def probe_frozen_engine(app: Starlette, llm: AsyncLLM) -> float:
    """Return the seconds from a request to a stopped engine to the first 503; then resume it."""
    pid = llm._host._process.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    start_s = time.monotonic()
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    request = asyncio.create_task(llm.generate("a", params))
    try:
        while await livez(app) == 200:
            assert time.monotonic() - start_s < TIMEOUT_S
            await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)  # a shell may have resumed all its processes
            if request.done():
                request = asyncio.create_task(llm.generate("a", params))
        return time.monotonic() - start_s
    finally:
        os.kill(pid, signal.SIGCONT)
        await request
        assert await livez(app) == 200


class ProbeLoad(NamedTuple):
    """A step's tokens and milliseconds, the prompts, their duration and the stall limit."""

    budget: int
    step_ms: int
    prompt_len: int
    load_s: float
    patience_s: float


LEAST_STEPS = 30


@pytest.mark.long
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(ProbeLoad(64, 5, 6_400, 0.5, 0.25), id="short"),
        # A prompt takes 31 s. The limits are a server's defaults.
        pytest.param(
            ProbeLoad(26, 100, 8_000, 600.0, STALL_LIMIT_S), id="long", marks=pytest.mark.soak
        ),
    ],
)
def test_the_probe_fails_when_the_engine_is_frozen_and_never_under_load(load: ProbeLoad) -> None:
    """P8, /livez true iff progress: 503 within the limit, no false alarm while prompts fill."""
    llm = AsyncLLM.spawn(
        f"hash:step_ms={load.step_ms}",
        max_num_batched_tokens=load.budget,
        max_num_seqs=4,
        num_blocks=4096,
    )
    try:
        app = create_probed_app(llm, load.patience_s)
        found = asyncio.run(probe_under_load(app, llm, load))
        took_s = sorted(found.took_s)
        print(f"{found.statuses}, p99 {took_s[len(took_s) * 99 // 100] * 1000:.1f} ms")
        assert found.statuses.keys() <= {200} and llm.status.num_steps > LEAST_STEPS
        until_s = asyncio.run(probe_frozen_engine(app, llm))
        print(f"503 after {until_s:.2f} s")
        assert load.patience_s < until_s
    finally:
        llm.close()


# P18, usage is exact.


class CountedRequest(NamedTuple):
    """A body, and its token ids as counted by a reference."""

    path: str
    body: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int


def draw_counted_request(server: RunningServer, rng: Random) -> CountedRequest:
    """Return a request of /v1/completions or of a chat, with ends of every kind."""
    tokenizer, engine = server.llm.tokenizer, server.llm.engine
    texts = ["a beginning of many, "[: rng.randint(5, 21)] + rng.choice("abcé") for _ in range(3)]
    fields: dict[str, Any] = {
        "n": rng.randint(1, 3),
        "max_tokens": rng.randint(1, 16),
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.getrandbits(32),
        "stop": rng.choice(([], ["e"], ["th", "o t"], [" a", "ee"])),
        "stop_token_ids": rng.choice(([], [102, 103])),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        path = "/v1/chat/completions"
        messages = [{"role": "user", "content": texts[0]}]
        body: dict[str, Any] = {"messages": messages}
        prompts = [tokenizer.apply_chat_template(messages, ChatEnd.GENERATION_PROMPT, {})]
    else:
        path = "/v1/completions"
        prompt_field = texts[: rng.randint(1, 3)]
        body = {"prompt": prompt_field, "echo": rng.random() < 0.2}
        prompts = [tokenizer.encode(text) for text in prompt_field]
    params = SamplingParams(**fields)
    outputs = [
        compute_expected(
            engine.model,  # type: ignore[arg-type]
            engine.config,
            Request(0, tuple(prompt), params),
            choice,
            tokenizer=tokenizer,
        ).tokens
        for prompt in prompts
        for choice in range(params.n)
    ]
    return CountedRequest(
        path,
        {"model": "hash", **fields, **body},
        sum(map(len, prompts)),
        sum(map(len, outputs)),
    )


@pytest.mark.long
@pytest.mark.parametrize("requests", [25, pytest.param(3_000, marks=pytest.mark.soak)])
def test_usage_is_what_a_reference_counts(running_server: RunningServer, requests: int) -> None:
    """P18, usage is exact: whole and streamed, n > 1, stops inside of tokens, cached prefixes."""
    rng, reached = Random(18), Counter[str]()
    for _ in range(requests):
        path, body, prompt_tokens, completion_tokens = draw_counted_request(running_server, rng)
        expected = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        cached_before = running_server.llm.status.num_cached_tokens
        whole = running_server.post(path, **body).json()
        details = [whole["usage"].pop("prompt_tokens_details")]
        assert whole["usage"] == expected, body
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["stream_options"]["continuous_usage_stats"] = rng.random() < 0.5
        chunks = parse_chunks(running_server.post(path, **body).text)
        details.append(chunks[-1]["usage"].pop("prompt_tokens_details"))
        assert (chunks[-1]["usage"], chunks[-1]["choices"]) == (expected, []), body
        assert 0 <= details[0]["cached_tokens"] <= details[1]["cached_tokens"] < prompt_tokens
        so_far = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
        assert so_far == sorted(so_far)
        reached["chats"] += path.startswith("/v1/chat")
        reached["several choices"] += body["n"] > 1
        reached["cached"] += running_server.llm.status.num_cached_tokens > cached_before
        reached["stopped"] += any(c["finish_reason"] == "stop" for c in whole["choices"])
    print(dict(reached))
    assert not [name for name in reached if reached[name] < requests // 6]


@pytest.mark.parametrize("times", [8, pytest.param(500, marks=pytest.mark.soak)])
def test_usage_of_a_stream_that_is_left_is_that_of_its_chunks(times: int) -> None:
    """P18, usage is exact: also of a request that is aborted, up to the last chunk that was read.

    The count is the number of `logprobs` entries: one for each token.
    """
    rng, aborted = Random(19), 0
    body = {
        "model": "hash",
        "prompt": "left",
        "n": 3,
        "max_tokens": 200,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    with open_server("hash:step_ms=10", num_blocks=512) as server:
        for _ in range(times):
            before = parse_samples(server.client.get("/metrics").text)
            num_read = read_chunks(server, body, rng.randint(1, 9))
            wait_until(server.is_idle)
            after = parse_samples(server.client.get("/metrics").text)
            name = "forge_generation_tokens_total"
            assert num_read <= after[name] - before[name] <= 600
            gone = 'forge_requests_total{finish="abort"}'
            aborted += after[gone] > before[gone]
    assert aborted > times // 2


def read_chunks(server: RunningServer, body: dict[str, Any], num_chunks: int) -> int:
    """Return the tokens of so many chunks, check the usage of each, and close the stream."""
    num_tokens = 0
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                num_tokens += sum(len(each["logprobs"]["tokens"]) for each in chunk["choices"])
                assert chunk["usage"]["completion_tokens"] == num_tokens
                assert chunk["usage"]["total_tokens"] == num_tokens + len(body["prompt"])
                num_chunks -= 1
            if not num_chunks:
                break
    return num_tokens


# P24, starts or fails clearly.


def running_in(group: int) -> list[str]:
    """Return the states of a group's processes, except those that have exited."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True)
    states = [line.split() for line in listed.stdout.splitlines()]
    assert len(states) > 1, listed.stderr
    return [state for pgid, state in states if int(pgid) == group and state[0] != "Z"]


def refusal_lines(*commands: list[str], status: int = 2) -> list[str]:
    """Return the error line of each command, all started at once; check that no child is left."""
    start_s, lines = time.monotonic(), []
    with ExitStack() as stack:
        started = []
        for words in commands:
            process = subprocess.Popen(
                [sys.executable, "-m", "forge", *words],
                cwd=ROOT,
                env=environment({}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # so that its children can be found
            )
            stack.callback(process.kill)
            started.append(stack.enter_context(process))
        for process, words in zip(started, commands, strict=True):
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (status, ""), (words, process.returncode, err)
            assert err.startswith(f"forge {words[0]}: "), err
            assert err.count("\n") == 1 and "Traceback" not in err, err
            wait_until(lambda group=process.pid: not running_in(group))  # type: ignore[misc]
            lines.append(err.strip())
    print(f"all within {time.monotonic() - start_s:.1f} s: {lines}")
    return lines


EXIT_PROGRAM = "import os, multiprocessing as m\nif m.parent_process(): os._exit(3)\n"
"""A policy file that ends the engine's process and no other."""


@pytest.mark.long
def test_a_server_whose_engine_ends_at_its_start_reports_it_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    """P24, starts or fails clearly: one line, and no process stays."""
    file = tmp_path / "ends.py"
    file.write_text(EXIT_PROGRAM)
    (line,) = refusal_lines(["serve", "--port=0", "--policy", str(file)], status=1)
    assert line.endswith("the engine did not start: its process ended with exit code 3")


@pytest.mark.soak
def test_no_bad_start_lasts_or_leaves_a_process(tmp_path: Path) -> None:
    """P24, starts or fails clearly: bad paths, bad options, a busy port."""
    bad = tmp_path / "forge.yaml"
    bad.write_text("num_blocks: [1]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refusal_lines(["serve", "--port", str(taken.getsockname()[1])])
    for command in ("serve", "info"):
        refusal_lines(
            [command, str(tmp_path / "nowhere")],
            [command, "nonesuch"],
            [command, "--num-blocks=0"],
            [command, "hash", "--max-num-seqs=4096"],
            [command, "--config", str(bad)],
            [command, "--config", str(tmp_path / "none.yaml")],
            [command, "--policy", str(tmp_path / "none.py")],
        )


@pytest.mark.soak
@pytest.mark.torch
def test_a_server_whose_weights_are_damaged_reports_it_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    """P24, starts or fails clearly: weights cut short, overwritten or missing, a broken config."""
    torch = pytest.importorskip("torch")
    from tests.hf.families import create_module

    create_module("llama", torch.float32).save_pretrained(tmp_path / "whole")
    folders = [
        Path(shutil.copytree(tmp_path / "whole", tmp_path / name))
        for name in ("short", "noise", "none", "config")
    ]
    short, noise, none, config = folders
    weights = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (noise / "model.safetensors").write_bytes(b"\xff" * len(weights))
    (none / "model.safetensors").unlink()
    (config / "config.json").write_text("{")
    for folder in folders:
        (line,) = refusal_lines(["serve", str(folder), "--port=0", "--device=cpu"])
        assert str(folder) in line


# P26, metrics are bounded.


async def call_app(app: Starlette, path: str, body: dict[str, Any], name: str) -> int:
    """Return the status of a call without a socket."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"x-request-id", name.encode()),
        ],
        "state": {},
    }
    left = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    statuses: list[int] = []
    never = asyncio.Event()

    async def receive() -> Any:
        if left:
            return left.pop()
        await never.wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    (status,) = statuses
    return status


@pytest.mark.long
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_no_name_that_a_client_sends_is_a_label(count: int) -> None:
    """P26, metrics are bounded: odd models, users, ids, salts and paths make no series."""
    llm = AsyncLLM("hash", num_blocks=64, block_size=4, max_model_len=64)
    try:
        app = create_app(llm, served_model_name="hash", metrics_compat="vllm")
        before = parse_samples(get(app, "/metrics").text).keys()
        statuses: Counter[int] = Counter()

        async def ask() -> None:
            for number in range(count):
                odd = f"odd-{number}"
                body: dict[str, Any] = {"model": odd, "prompt": "a", "max_tokens": 1}
                path = "/v1/completions" if number % 2 else "/generate"
                if number % 10 == 0:
                    body |= {"model": "hash", "user": odd, "request_id": odd, "cache_salt": odd}
                elif number % 10 == 1:
                    path = f"/{odd}"
                statuses[await call_app(app, path, body, odd)] += 1

        asyncio.run(ask())
        assert statuses == {200: count // 10, 404: count - count // 10}
        assert parse_samples(get(app, "/metrics").text).keys() == before
    finally:
        llm.close()


# P28, official clients work: the shape of every response. tests/clients has the clients.

ANSWERS = {"/v1/completions": "Completion", "/v1/chat/completions": "chat.ChatCompletion"}
CHUNKS = {"/v1/completions": "Completion", "/v1/chat/completions": "chat.ChatCompletionChunk"}
"""The official types: names in `openai.types`."""


VLLM_NULLS = {
    **{"prompt_token_ids": None, "prompt_logprobs": None, "token_ids": None},
    **{"reasoning_content": None, "reasoning": None},
}
"""Fields of vLLM, which are null in a response that has none of them."""
STOP_FIELDS = {"stop_reason", "matched_stop"}
"""Fields of vLLM and of SGLang, which name the stop that ended a choice."""


def unknown_fields(value: object) -> list[str]:
    """Return names that neither the official types nor the fields above have, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        extra = (value.model_extra or {}).items()
        own = [name for name, each in extra if VLLM_NULLS.get(name, ...) is not each]
        own = [name for name in own if name not in STOP_FIELDS]
        return own + [name for each in dict(value).values() for name in unknown_fields(each)]
    if isinstance(value, list | tuple):
        return [name for each in value for name in unknown_fields(each)]
    return []


def check_type(name: str, value: dict[str, Any]) -> None:
    """Check that the value has exactly the official type: no field missing or unknown."""
    from openai import types  # imported here: it takes longer than most tests

    kind: type[pydantic.BaseModel] = attrgetter(name)(types)
    found = kind.model_validate_json(json.dumps(value), strict=True)
    assert not unknown_fields(found), (unknown_fields(found), value)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether the value fits the schema, in the keywords that error schemas use."""
    known = {"type", "description", "required", "additionalProperties", "properties", "enum"}
    assert schema.keys() <= {*known, "maxLength"}, "the schema has a keyword not checked here"
    kinds = {"object": dict, "string": str, "null": type(None)}
    types = schema.get("type", [])
    if types and not any(
        isinstance(value, kinds[name]) for name in ([types] if isinstance(types, str) else types)
    ):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", len(value))
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= value.keys() <= properties.keys():
        return False
    return all(conforms(each, properties[name]) for name, each in value.items())


BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "temperature": 1.0, "seed": 3},
    {"logprobs": 2},
    {"stop": ["e", "t"]},
    {"stop_token_ids": list(range(90, 120))},
    {"max_tokens": 1},
)


@pytest.mark.parametrize("path", sorted(ANSWERS))
@pytest.mark.parametrize("fields", BODIES, ids=lambda fields: "-".join(fields) or "plain")
def test_every_answer_and_chunk_is_of_the_official_type(
    running_server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    """P28, official clients work: each answer and chunk is of openai's types, to the letter."""
    body: dict[str, Any] = {"model": "hash", "max_tokens": 6, "temperature": 0, **fields}
    if path == "/v1/completions":
        body |= {"prompt": ["a", "b"], "echo": "stop" in fields}
    else:
        body["messages"] = [{"role": "user", "content": "a"}]
        if "logprobs" in fields:
            body |= {"logprobs": True, "top_logprobs": 2}
    whole = running_server.post(path, **body).json()
    check_type(ANSWERS[path], whole)
    assert {each["finish_reason"] for each in whole["choices"]} <= {"stop", "length"}
    for options in (None, {"include_usage": True}):
        chunks = parse_chunks(
            running_server.post(path, **body, stream=True, stream_options=options).text
        )
        for chunk in chunks:
            for choice in chunk["choices"]:
                if path == "/v1/completions" and choice["finish_reason"] is None:
                    choice["finish_reason"] = "stop"  # the type has none for an open choice
            check_type(CHUNKS[path], chunk)
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_every_other_answer_is_of_the_official_type_too(running_server: RunningServer) -> None:
    """P28, official clients work: the list of models, and errors as /openapi.json has them."""
    (model,) = running_server.client.get("/v1/models").json()["data"]
    assert model.pop("max_model_len") == 256  # vLLM's
    assert model.pop("root") == model["id"]  # vLLM's and SGLang's
    check_type("Model", model)
    schema = running_server.client.get("/openapi.json").json()["components"]["schemas"]["Error"]
    assert schema == ERROR_SCHEMA and not conforms({"error": {}}, schema)
    for answer in (
        running_server.client.get("/nowhere"),
        running_server.client.get("/v1/completions"),
        running_server.client.get("/v1/models/odd"),
        running_server.client.post("/v1/completions", content=b"{"),
        running_server.client.post(
            "/v1/completions", content=b"{}", headers={"content-type": "text/x"}
        ),
        *(running_server.post(path, model="odd", prompt="a") for path in ANSWERS),
        *(running_server.post(path, model="hash", temperature=9) for path in ANSWERS),
        *(
            running_server.post(path, model="hash", odd=1)
            for path in (*ANSWERS, "/generate", "/tokenize")
        ),
        running_server.post("/generate", prompt="a" * 300),
    ):
        assert 400 <= answer.status_code < 500 and conforms(answer.json(), schema), answer.text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_answers_and_streams(running_server: RunningServer) -> None:
    """P28, official clients work: curl, whole and with -N."""
    body = {"model": "hash", "prompt": "a", "max_tokens": 6, "seed": 1}

    def curl(**more: Any) -> str:
        words = ["curl", "-sSN", "--fail-with-body", f"{running_server.url}/v1/completions"]
        words += ["-H", "content-type: application/json", "-d", json.dumps({**body, **more})]
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return done.stdout

    whole = json.loads(curl())
    check_type("Completion", whole)
    chunks = parse_chunks(curl(stream=True))
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]
