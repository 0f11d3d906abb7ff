"""The field `timings` of every API, and cached tokens in each API's usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.server.app import create_app
from forge.server.timings import TIMINGS, AnswerTimings
from forge.timings import ChoiceTimings

USER = [{"role": "user", "content": "a text that fills some blocks of the cache " * 4}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": USER[0]["content"], "max_tokens": 3},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "/v1/responses": {"input": USER[0]["content"], "max_output_tokens": 3},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/generate": {"prompt": USER[0]["content"], "max_tokens": 3},
}
NAMES = TIMINGS["timings"]["properties"].keys()
METRIC_NAMES = [
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
    "tokens_per_second",
]
"""Names of vLLM's metrics of a request."""
TIMEOUT_S = 20.0


@asynccontextmanager
async def open_app(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncLLM("hash", **options) as llm:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=TIMEOUT_S
        ) as client:
            yield client


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    body = {"model": "hash", "ignore_eos": True, **BODIES[path], **fields}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def last_with_timings(text: str) -> dict[str, Any]:
    """Return the fields of the one event of a stream that has timings."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if '"timings"' in line]
    (event,) = events
    fields = json.loads(event)
    found: dict[str, Any] = fields.get("response") or {**fields.get("delta", {}), **fields}
    return found


def num_tokens(path: str, body: dict[str, Any]) -> tuple[int, int, int]:
    """Return prompt tokens that were computed and cached, and output tokens, by the usage."""
    usage = body["usage"]
    if path == "/v1/messages":
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return computed, usage["cache_read_input_tokens"], usage["output_tokens"]
    name = "input" if path == "/v1/responses" else "prompt"
    cached = usage[f"{name}_tokens_details"]["cached_tokens"]
    output = usage["output_tokens" if name == "input" else "completion_tokens"]
    return usage[f"{name}_tokens"] - cached, cached, output


def check_times(timings: dict[str, Any]) -> None:
    assert timings.keys() == NAMES
    first_ms = timings["time_to_first_token_ms"]
    assert timings["queue_ms"] >= 0 and timings["predicted_ms"] >= 0
    assert first_ms == pytest.approx(timings["queue_ms"] + timings["prompt_ms"], abs=0.002)


@pytest.mark.parametrize("path", BODIES)
def test_answers_have_timings_where_they_are_requested(path: str) -> None:
    """The first request computes its prompt, and the second finds it in the cache."""

    async def test() -> None:
        async with open_app() as client:
            for is_first in (True, False):
                answers = [(await post(client, path, return_timings=True)).json()]
                if path != "/generate" and not is_first:
                    stream = await post(client, path, return_timings=True, stream=True)
                    answers.append(last_with_timings(stream.text))
                for answer in answers:
                    timings = answer["timings"]
                    check_times(timings)
                    assert (timings["cache_n"] == 0) == is_first
                    assert (timings["preemptions"], timings["recomputed_n"]) == (0, 0)
                    if "usage" in answer:
                        counts = tuple(timings[f"{name}_n"] for name in ("prompt", "cache"))
                        assert (*counts, timings["predicted_n"]) == num_tokens(path, answer)
            for fields in ({}, {"return_timings": False}, {"return_timings": None}):
                assert "timings" not in (await post(client, path, **fields)).text

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_chunk_has_no_choices_and_the_usage_if_that_is_requested(path: str) -> None:
    async def test() -> None:
        async with open_app() as client:
            for options in ({}, {"stream_options": {"include_usage": True}}):
                fields = {"stream": True, "return_timings": True, "n": 2, **options}
                text = (await post(client, path, **fields)).text
                chunk = last_with_timings(text)
                assert chunk["choices"] == [] and ("usage" in chunk) == bool(options)
                assert text.endswith(
                    f"data: {json.dumps(chunk, separators=(',', ':'))}\n\ndata: [DONE]\n\n"
                )
                assert chunk["timings"]["predicted_n"] == 6

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_have_metrics_where_they_are_requested(path: str) -> None:
    async def test() -> None:
        async with open_app() as client:
            answer = (await post(client, path, return_metrics=True)).json()
            assert list(answer["metrics"]) == METRIC_NAMES and "timings" not in answer
            assert all(value >= 0 for value in answer["metrics"].values())
            for fields, expected in (({"max_tokens": 1}, METRIC_NAMES), ({"n": 2}, None)):
                fields |= {"return_metrics": True}
                found = (await post(client, path, **fields)).json()["metrics"]
                assert found is expected or (list(found), found["mean_itl_ms"]) == (expected, None)
                options = {"stream": True, "stream_options": {"include_usage": True}}
                text = (await post(client, path, **fields, **options)).text
                last = json.loads(text.splitlines()[-4].removeprefix("data: "))
                assert text.count('"metrics"') == (expected is not None) and "usage" in last
                if expected is not None:
                    assert list(last["metrics"]) == [n for n in expected if n != "mean_itl_ms"]
            text = (await post(client, path, return_metrics=True, stream=True)).text
            assert '"metrics"' not in text and '"usage"' not in text

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_metrics_are_those_of_the_one_choice() -> None:
    timings = AnswerTimings(None, True)
    timings.add(ChoiceTimings(1.0, 2.0, 4.0, 5.5))
    assert timings.fields(1, 0, 4) == {}
    assert timings.metrics(4)["metrics"] == dict(
        zip(METRIC_NAMES, (2000.0, 1500.0, 1000.0, 500.0, round(4000 / 3500, 3)), strict=True)
    )
    timings.add(ChoiceTimings(1.0, 2.0, 4.0, 5.5))
    assert timings.metrics(8) == {"metrics": None} and timings.last_chunk_metrics(8) == {}
    unserved = AnswerTimings(None, True)
    unserved.add(ChoiceTimings(1.0))
    assert set(unserved.metrics(0)["metrics"].values()) == {None}


def test_preemptions_of_a_request_are_those_of_the_metrics() -> None:
    """Eight blocks of four. Each of two choices grows to six."""

    async def test() -> None:
        async with open_app(num_blocks=8, block_size=4) as client:
            fields = {"prompt": "req0", "max_tokens": 20, "n": 2, "return_timings": True}
            timings = (await post(client, "/v1/completions", **fields)).json()["timings"]
            metrics = (await client.get("/metrics")).text
            assert timings["preemptions"] >= 1 and timings["recomputed_n"] >= 1
            for name, value in (
                ('preemptions_total{mode="recompute"}', timings["preemptions"]),
                ("recomputed_tokens_total", timings["recomputed_n"]),
            ):
                assert f"forge_{name} {value:.1f}\n" in metrics

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_an_answer_spans_its_choices() -> None:
    """From the first step and token of any choice to the last token of any."""
    timings = AnswerTimings(True)
    timings.add(ChoiceTimings(1.0, 2.0, 4.0, 5.0, 1, 10))
    timings.add(ChoiceTimings(1.0, 1.5, 4.5, 9.0, 2, 20))
    timings.add(ChoiceTimings(1.0))
    assert timings.fields(30, 10, 7)["timings"] == {
        "queue_ms": 500.0,
        "time_to_first_token_ms": 3000.0,
        "cache_n": 10,
        "prompt_n": 20,
        "prompt_ms": 2500.0,
        "predicted_n": 7,
        "predicted_ms": 5000.0,
        "preemptions": 3,
        "recomputed_n": 30,
    }


def test_what_has_not_happened_has_no_time() -> None:
    timings = AnswerTimings(True)
    assert timings.fields(1, 0, 0) == {}
    timings.add(ChoiceTimings(1.0))
    found = timings.fields(1, 0, 0)["timings"]
    assert [name for name, value in found.items() if value is None] == [
        *("queue_ms", "time_to_first_token_ms", "prompt_ms", "predicted_ms")
    ]


def test_a_prompt_that_was_never_computed_does_not_count() -> None:
    timings = AnswerTimings(True)
    timings.add(ChoiceTimings(1.0))
    assert timings.fields(30, 0, 0)["timings"]["prompt_n"] == 0
