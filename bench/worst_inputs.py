"""Worst-case inputs of every route: how long each blocks the event loop, and its memory.

Owns the inputs and the timer of the event loop. The server runs in this process, its engine in
another, and the client that sends the inputs in a third.

    client    input ──► server ──► answer          one after the other, or several at once
    watch     every callback of the event loop ──► processor time of the longest
    memory    of this process and its children ──► its peak, and what remains at the end

Times of callbacks are processor times of the thread of the event loop: other work of the machine
does not count. They do not include the time for which another thread holds the GIL. `stall` is the
longest wall time between two ticks of a thread that only sleeps: an upper bound on a busy machine.

    python -m forge.bench.worst_inputs [WORD ...]     those whose name has one of the words
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from forge.async_llm import AsyncLLM
from forge.server.body import MAX_BODY_BYTES
from forge.server.http_server import run_server
from forge.server.tokenization import MAX_IDS, MAX_TEXT_CHARS

SAMPLE_S = 0.02
TIMEOUT_S = 300.0
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


class WorstInput(NamedTuple):
    """Requests that a client sends: `requests` of them, at once or one after the other.

    body   of the i-th request; bytes are sent unchanged, None is a GET
    """

    name: str
    path: str
    body: Callable[[int], object]
    requests: int = 1
    at_once: bool = True


def bomb(i: int) -> dict[str, Any]:
    """Return a regex whose only match has a billion characters."""
    return {"prompt": "a", "max_tokens": 4, "regex": f"((a{{1000}}){{1000}}){{{1001 + i}}}"}


def costly(i: int) -> dict[str, Any]:
    """Return a grammar that takes gigabytes to compile."""
    shapes = " & ".join(f"/(.*[ab]){{{k}}}.*/" for k in range(3, 60))
    return {"prompt": "a", "max_tokens": 4, "grammar": f"start: T\nT: {shapes}\nX{i}: /a/"}


def slow(i: int) -> dict[str, Any]:
    """Return a grammar that takes seconds and little memory to compile."""
    shapes = " & ".join(f"/(.*[ab]){{{k}}}.*/" for k in range(3, 14))
    return {"prompt": "a", "max_tokens": 4, "grammar": f"start: T\nT: {shapes}\nX{i}: /a/"}


def chat(content: object = "hi", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    message = {"role": "user", "content": content}
    return {"model": "hash", "messages": [message], "max_tokens": 2, **fields}


def completion(prompt: object = "a", **fields: Any) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"model": "hash", "prompt": prompt, "max_tokens": 2, **fields}


TEXT = "a" * (MAX_BODY_BYTES - 200)
IDS = [98] * (MAX_BODY_BYTES // 4 - 100)
MANY = {"n": 128, "max_tokens": 64}


def worst_inputs() -> Iterator[WorstInput]:
    """Yield all inputs."""

    def one(name: str, path: str, body: object) -> WorstInput:
        return WorstInput(name, path, lambda i: body)

    yield WorstInput("structure: simple", GENERATE, lambda i: {"prompt": "a", "regex": "[0-9]{2}"})
    for make in (bomb, costly, slow):
        yield WorstInput(f"structure: 12 x {make.__name__} at once", GENERATE, make, 12)
        name = f"structure: 36 x {make.__name__} in sequence"
        yield WorstInput(name, GENERATE, lambda i, make=make: make(100 + i), 36, False)  # type: ignore[misc]
    properties = {f"p{i}": {"type": "number", "minimum": i / 3} for i in range(400)}
    schema = {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}}
    yield one("structure: 400 properties", GENERATE, {"prompt": "a", "response_format": schema})

    yield one("tokenize: 8 MiB", "/tokenize", {"prompt": TEXT})
    yield one("tokenize: 1 Mi characters", "/tokenize", {"prompt": "a" * MAX_TEXT_CHARS})
    yield one("detokenize: 2 Mi ids", "/detokenize", {"tokens": IDS})
    yield one("detokenize: 256 Ki ids", "/detokenize", {"tokens": [98] * MAX_IDS})

    scores: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
    yield one("choices: 128", COMPLETIONS, completion(logprobs=20, **MANY))
    yield one("choices: 128, streamed", COMPLETIONS, completion(logprobs=20, stream=True, **MANY))
    yield one("choices: 128 of a chat", CHAT, chat(**scores, **MANY))
    yield one("choices: 128 of a chat, streamed", CHAT, chat(**scores, stream=True, **MANY))
    echo: dict[str, Any] = {"echo": True, "logprobs": 20}
    yield one("choices: 256 prompts x 4", COMPLETIONS, completion(["abc"] * 256, n=4, **echo))
    yield one("echo: 8000 tokens", COMPLETIONS, completion("a" * 8000, **{**echo, "max_tokens": 0}))
    ids = completion([[98] * 4000] * 64, echo=True)
    yield one("echo: 64 prompts of 4000 ids", COMPLETIONS, ids)
    yield one("long output", GENERATE, {"prompt": "a", "max_tokens": 8000, "ignore_eos": True})

    yield one("prompt: 8 MiB of text", COMPLETIONS, completion(TEXT))
    yield one("prompt: 256 of 32 kB", COMPLETIONS, completion(["a" * 32_000] * 256))
    yield one("prompt: 2 Mi ids", COMPLETIONS, completion(IDS))
    yield one("prompt: 256 of 8000 ids", COMPLETIONS, completion([[98] * 8000] * 256))
    yield one("prompt: ids and texts", COMPLETIONS, completion([98, "a"] * 600_000))

    message = {"role": "user", "content": "a" * 1900}
    yield one("chat: 8 MiB of text", CHAT, chat(TEXT))
    yield one("chat: 4096 messages", CHAT, {"model": "hash", "messages": [message] * 4096})
    yield one("chat: 170,000 parts", CHAT, chat([{"type": "text", "text": "a"}] * 170_000))
    functions = [{"name": f"f{i}", "parameters": {"properties": properties}} for i in range(64)]
    yield one(
        "chat: tools", CHAT, chat(tools=[{"type": "function", "function": f} for f in functions])
    )
    yield one("chat: a schema of 8 MiB", CHAT, chat(response_format={**schema, "x": TEXT}))

    stops = ["ab" * 500 + str(k) for k in range(16)]
    list_fields: dict[str, Any] = {"logit_bias": {str(k): 1 for k in range(256)}, "stop": stops}
    yield one(
        "lists: longest", COMPLETIONS, completion(stop_token_ids=[5] * 1024, **list_fields, **MANY)
    )
    yield one("json: 8 MiB that is none", GENERATE, b"[" + b"1," * 4_000_000)
    yield one("json: fractions", GENERATE, b'{"prompt":[' + b"1.5," * 2_000_000 + b"1]}")
    yield one("json: nested", GENERATE, b'{"prompt":' + b'{"a":' * 900 + b"1" + b"}" * 901)
    names = json.dumps({f"a{j}": j for j in range(450_000)}).encode()
    yield one("json: names", GENERATE, names[: MAX_BODY_BYTES - 1])
    surrogate = b'{"prompt":[' + b'"a",' * 2_000_000 + b'"\\ud800"]}'
    yield one("json: half a pair", GENERATE, surrogate)
    yield one("json: escapes", GENERATE, b'{"prompt":"' + b"\\u00e9" * 1_390_000 + b'"}')
    yield one("field: unknown, of 8 MiB", GENERATE, {"prompt": "a", "x": IDS})
    yield one("field: a name of 8 MiB", COMPLETIONS, completion(**{"model": TEXT}))

    yield one("openapi", "/openapi.json", None)
    yield one("metrics", "/metrics", None)
    streams = completion(stream=True, max_tokens=64, ignore_eos=True)
    yield WorstInput("streams: 256 at once", COMPLETIONS, lambda i: streams, 256)


def send(url: str, path: str, body: object, http: httpx.Client) -> int:
    """Send a request. Returns the status of the answer, or 0 where there is none."""
    if body is None:
        return http.get(url + path).status_code
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with http.stream(
            "POST", url + path, content=data, headers={"content-type": "application/json"}
        ) as answer:
            for _ in answer.iter_raw():
                pass
            return answer.status_code
    except httpx.HTTPError as error:
        print(path, repr(error), file=sys.stderr)
        return 0


def run_client(url: str, words: list[str], pipe: Connection) -> None:
    """Send the inputs, in this process, and report through the pipe when each begins and ends."""
    limits = httpx.Limits(max_connections=512)
    pattern_rng = random.Random(0)
    with httpx.Client(timeout=TIMEOUT_S, limits=limits) as http, ThreadPoolExecutor(300) as pool:
        send(url, GENERATE, {"prompt": "a", "regex": "[0-9]{3}"}, http)
        for each in worst_inputs():
            if words and not any(word in each.name for word in words):
                continue
            bodies = [each.body(i) for i in range(each.requests)]
            pipe.send(each.name)
            pipe.recv()
            begin_s = time.monotonic()
            other = "-"
            if each.at_once:
                futures = [pool.submit(send, url, each.path, body, http) for body in bodies]
                if each.name.startswith("structure: 12"):
                    time.sleep(0.05)
                    digits = {
                        "prompt": "a",
                        "regex": f"[0-9]{{3,{pattern_rng.randrange(9, 10**6)}}}",
                    }
                    since_s = time.monotonic()
                    assert send(url, GENERATE, digits, http) == 200
                    other = f"{time.monotonic() - since_s:.2f} s"
                statuses = [each.result() for each in futures]
            else:
                statuses = [send(url, each.path, body, http) for body in bodies]
            took_s = time.monotonic() - begin_s
            pipe.send((took_s, other, sorted(set(statuses))))
            pipe.recv()
    pipe.send(None)


class EventLoopTimer:
    """Processor time of the longest callback of any event loop, and the longest stall."""

    def __init__(self) -> None:
        self.longest_s, self.where = 0.0, ""
        self.stall_s = 0.0
        plain = asyncio.Handle._run

        def timed(handle: Any) -> None:
            begin_s = time.thread_time()
            plain(handle)
            took_s = time.thread_time() - begin_s
            if took_s > self.longest_s:
                self.longest_s, self.where = took_s, repr(handle)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        last_s = time.monotonic()
        while True:
            time.sleep(0.001)
            now_s = time.monotonic()
            self.stall_s = max(self.stall_s, now_s - last_s)
            last_s = now_s

    def pop_maxima(self) -> tuple[float, str, float]:
        """Return the maxima since the previous call: seconds, callback, stall."""
        found = self.longest_s, self.where, self.stall_s
        self.longest_s, self.where, self.stall_s = 0.0, "", 0.0
        return found


class ProcessTreeMemory:
    """Memory of this process and its descendants, except the client, in MiB."""

    def __init__(self, client: int) -> None:
        self._client = client
        self.peak_mib = self.current_mib()
        threading.Thread(target=self._sample, daemon=True).start()

    def current_mib(self) -> float:
        """Return the proportional set size: shared pages count in parts."""
        total, waiting = 0, [os.getpid()]
        while waiting:
            pid = waiting.pop()
            if pid == self._client:
                continue
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += int(rollup.partition("Pss:")[2].split()[0])
                for task in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (task / "children").read_text().split())
            except OSError:
                continue  # the process has just ended
        return total / 1024

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            self.peak_mib = max(self.peak_mib, self.current_mib())


def main(words: list[str]) -> None:
    """Print a line for each input."""
    context = get_context("spawn")
    watch = EventLoopTimer()

    def report_inputs(url: str) -> None:
        ours, theirs = context.Pipe()
        client = context.Process(target=run_client, args=(url, words, theirs), daemon=True)
        client.start()
        memory = ProcessTreeMemory(client.pid or 0)
        print(
            f"{'input':38} {'status':>9} {'answered':>9} {'beside':>7} {'callback':>9} {'stall':>8}"
            f" {'memory before, most, after (MiB)':>33}"
        )
        while (name := ours.recv()) is not None:
            watch.pop_maxima()
            before = memory.peak_mib = memory.current_mib()
            ours.send(True)
            took_s, other, statuses = ours.recv()
            time.sleep(0.2)
            longest_s, where, stall_s = watch.pop_maxima()
            status_codes = ",".join(map(str, statuses))
            print(
                f"{name:38} {status_codes:>9} {took_s:>7.2f} s {other:>7} {1e3 * longest_s:>6.1f} "
                "ms "
                f"{1e3 * stall_s:>5.0f} ms {before:>15.0f} {memory.peak_mib:>8.0f} "
                f"{memory.current_mib():>8.0f}",
                flush=True,
            )
            if longest_s > 0.05:
                print(f"    {where[:300]}", flush=True)
            ours.send(True)
        os.kill(os.getpid(), signal.SIGTERM)

    def start_reporting(url: str) -> None:
        threading.Thread(target=report_inputs, args=(url,), daemon=True).start()

    run_server(
        AsyncLLM.spawn("hash"),
        host="127.0.0.1",
        port=0,
        api_keys=(),
        served_model_name=None,
        on_ready=start_reporting,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
