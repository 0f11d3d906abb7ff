"""The live film over HTTP: its stream, its page, and what it costs the engine's outputs."""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.film.state import FilmState, Line
from forge.request import SamplingParams
from forge.server.app import create_app
from forge.server.film import MAX_READERS, POLL_INTERVAL_S, FilmFeed
from forge.server.http_server import create_listener
from tests.film.chromium import OpenPage, require_chromium
from tests.film.engine_checks import engine_state
from tests.film.test_live import assert_fold_is_the_engine
from tests.server.local_server import TIMEOUT_S, ManualClockLoop, serve_app, wait_until
from tests.server.test_server import RunningServer

SIZES = {"num_blocks": 96, "block_size": 4, "max_num_seqs": 16, "max_model_len": 256}
PROMPTS = [f"{number} waits in line" for number in range(64)]
BODY = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
STATUS = "document.getElementById('connection')?.textContent"
KEY = {"authorization": "Bearer key"}


@contextmanager
def open_film_server(
    kind: Callable[..., AsyncLLM] = AsyncLLM, clock: ManualClockLoop | None = None, **options: Any
) -> Iterator[RunningServer]:
    """Serve an engine with a film, whose pool is too small for 16 sequences, until the end."""
    llm = kind("hash", **{**SIZES, **options})
    with create_listener("127.0.0.1", 0, ()) as socket_:
        app = create_app(llm, served_model_name="hash", film=FilmFeed(llm, "fcfs"))
        with serve_app(llm, app, socket_, clock=clock) as (url, client):
            yield RunningServer(url, llm, client)


class FilmReader:
    """A page without a browser: folds the lines of a stream."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._events = (
            json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")
        )
        self.fold = FilmState(next(self._events))
        self.lines: list[Line] = []

    def read_until(self, condition: Callable[[FilmState], bool]) -> None:
        """Fold lines, the first of which is a keyframe, until the condition holds."""
        while not (self.lines and condition(self.fold)):
            line = next(self._events)
            assert "end" not in line, line
            if "key" not in line or not self.lines:
                self.fold.apply(line)
            self.lines.append(line)
        assert "key" in self.lines[0]


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_pages_that_join_early_and_late_fold_to_the_engine_and_change_no_output() -> None:
    """64 requests in 16 slots; the second page joins after the first has read their arrival."""
    with open_film_server() as server:
        expected = texts_of(server.post_completion(**BODY))
        scheduler, answers = server.llm.engine.scheduler, list[dict[str, Any]]()
        post = threading.Thread(target=lambda: answers.append(server.post_completion(**BODY)))
        with server.client.stream("GET", "/film") as first_answer:
            first = FilmReader(first_answer)
            first.read_until(lambda fold: True)
            post.start()
            first.read_until(lambda fold: bool(fold.live))
            with server.client.stream("GET", "/film") as late_answer:
                late = FilmReader(late_answer)
                post.join(TIMEOUT_S)
                for reader in (first, late):
                    published = set(scheduler.pool.published_blocks)
                    reader.read_until(lambda f, p=published: not f.live and f.published == p)  # type: ignore[misc]
                    assert_fold_is_the_engine(reader.fold, scheduler)
        assert texts_of(answers[0]) == expected
        assert sum(line.get("n", 0) for line in first.lines) == len(PROMPTS)
        ends = [why for line in first.lines for _, why in line.get("ended", ())]
        assert ends == ["length"] * len(PROMPTS)
        assert first.lines[-1]["totals"][-1] == len(PROMPTS) * BODY["max_tokens"]  # type: ignore[operator]
        wait_until(lambda: server.llm.engine.recorder is None)  # the last page has left


def test_the_stream_has_neither_text_nor_tokens_nor_names() -> None:
    with open_film_server() as server, server.client.stream("GET", "/film") as answer:
        reader = FilmReader(answer)
        reader.read_until(lambda fold: True)
        server.post_completion(**BODY | {"prompt": "Zebra secret", "session_id": "private-7"})
        reader.read_until(lambda fold: bool(fold.live) or "ended" in reader.lines[-1])
        text = json.dumps(reader.lines).lower()
        assert not [word for word in ("zebra", "secret", "private", "token_ids") if word in text]


@pytest.mark.long
def test_the_film_of_an_engine_in_its_own_process_and_its_recording(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    with (
        open_film_server(AsyncLLM.spawn, record=str(record)) as server,
        server.client.stream("GET", "/film") as answer,
    ):
        reader = FilmReader(answer)
        server.post_completion(**BODY)
        num_output = len(PROMPTS) * BODY["max_tokens"]  # type: ignore[operator]
        reader.read_until(lambda _: reader.lines[-1].get("totals", [0])[-1] == num_output)
        reader.read_until(lambda fold: not fold.live)
        assert not reader.fold.tables and reader.fold.published
    assert sum('"submit"' in line for line in record.read_text().splitlines()) == len(PROMPTS)


async def call_film(app: Any, send: Callable[[Any], Any]) -> None:
    """Call GET /film of an application, for a client that never leaves."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "GET", "path": "/film", "headers": headers, "state": {}}
    await app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)


def test_a_page_that_reads_too_slowly_is_dropped_and_the_outputs_are_the_same() -> None:
    async def test() -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
        async with AsyncLLM("hash", **SIZES) as llm:
            expected = [(await llm.generate(prompt, params)).token_ids for prompt in PROMPTS[:8]]
            app = create_app(llm, film=FilmFeed(llm, "fcfs", max_unread=1000))
            sent, gate = list[bytes](), asyncio.Event()

            async def send(message: Any) -> None:
                sent.append(message.get("body", b""))
                if len(sent) > 1:  # the headers
                    await gate.wait()

            stream = asyncio.create_task(call_film(app, send))
            while llm.engine.recorder is None:
                await asyncio.sleep(0.001)
            for prompt, token_ids in zip(PROMPTS, expected, strict=False):
                assert (await llm.generate(prompt, params)).token_ids == token_ids
            assert len(sent) == 2  # headers and header; the connection takes no more
            gate.set()
            await stream
            assert json.loads(sent[-2][6:]) == {"end": "the page reads too slowly"}
            assert sum(map(len, sent)) < 2000

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_a_stream_ends_with_its_engine() -> None:
    clock = ManualClockLoop()
    with open_film_server(clock=clock) as server, server.client.stream("GET", "/film") as answer:
        lines = answer.iter_lines()
        assert '"film":1' in next(lines)
        server.llm.close()
        clock.advance_and_wait(POLL_INTERVAL_S)
        rest = [line for line in lines if line.startswith("data: ")]
        assert json.loads(rest[-1][6:]) == {"end": "the engine has ended"}


def test_no_more_pages_read_than_the_limit() -> None:
    with open_film_server() as server:
        llm = server.llm
        feed = FilmFeed(llm, "fcfs")

        async def fill() -> None:
            readers = [feed.join() for _ in range(MAX_READERS)]
            app = create_app(llm, film=feed)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                refused = await http.get("/film")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "film_full"
            for reader in readers:
                feed.leave(reader)

        asyncio.run(fill())


def test_keys_hosts_and_the_page_without_and_with_a_film() -> None:
    async def test() -> None:
        async with AsyncLLM("hash", **SIZES) as llm:

            async def get(app: Any, path: str, **headers: str) -> httpx.Response:
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
                    return await client.get(path, headers={"host": "127.0.0.1", **headers})

            plain = create_app(llm, api_keys=("key",))
            assert (await get(plain, "/film", **KEY)).status_code == 404
            assert (await get(plain, "/")).status_code == 401
            assert "<script" not in (await get(plain, "/", **KEY)).text

            hosts = frozenset({"127.0.0.1"})
            app = create_app(llm, api_keys=("key",), hosts=hosts, film=FilmFeed(llm, "fcfs"))
            assert (await get(app, "/film")).status_code == 401
            assert (await get(app, "/film", authorization="Bearer other")).status_code == 401
            for path in ("/", "/film"):
                assert (await get(app, path, **KEY, host="evil.example")).status_code == 421
            page = await get(app, "/")
            assert page.status_code == 200
            policy = page.headers["content-security-policy"]
            assert policy.startswith("default-src 'none';") and "unsafe" not in policy
            assert re.findall(r"connect-src [^;]*", policy) == ["connect-src 'self'"]
            assert html.escape(policy, quote=False) in page.text
            assert "hash" not in re.sub(r"<script>.*</script>", "", page.text, flags=re.DOTALL)

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


@pytest.mark.long
def test_the_live_page_in_a_browser_has_the_state_of_the_engine(tmp_path: Path) -> None:
    chromium = require_chromium()
    with open_film_server() as server:
        scheduler = server.llm.engine.scheduler
        server.post_completion(**BODY)
        with closing(OpenPage(chromium, tmp_path / "profile", f"{server.url}/")) as page:
            wait_until(lambda: server.llm.engine.recorder is not None)
            server.post_completion(**BODY)
            state = json.dumps(engine_state(scheduler), separators=(",", ":"))
            fold = "live.film?.lines.length && canonicalState(live.film, live.film.length)"
            wait_until(lambda: page.evaluate(fold) == state)
            page.evaluate("drawLive()")
            assert page.evaluate("[page.errors, page.violations]") == [[], []]
            num_output = len(PROMPTS) * 12
            assert page.evaluate("live.film.total.output") == num_output


@pytest.mark.long
def test_the_live_page_sends_the_key_that_is_typed_into_it(tmp_path: Path) -> None:
    chromium = require_chromium()
    llm = AsyncLLM("hash", **SIZES)
    with create_listener("127.0.0.1", 0, ()) as socket_:
        app = create_app(llm, api_keys=("key",), film=FilmFeed(llm, "fcfs"))
        with serve_app(llm, app, socket_) as (url, _):
            with closing(OpenPage(chromium, tmp_path / "profile", f"{url}/")) as page:
                wait_until(lambda: page.evaluate(STATUS) == "This server needs an API key.")
                page.evaluate("document.getElementById('key').value = 'key'")
                page.evaluate("document.getElementById('connect').click()")
                wait_until(lambda: page.evaluate("live.film?.lines.length") == 1)
                assert page.evaluate("[page.errors, page.violations]") == [[], []]
