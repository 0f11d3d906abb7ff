"""KV tiers over HTTP: `usage` says which tier had the tokens of a prompt, and /metrics counts them.

The device has 32 blocks of four tokens, the host pool 64. Fillers push the prompt's blocks out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.errors import NeverFits
from forge.request import SamplingParams
from forge.server.server_stats import ServerStats
from forge.server.stat_logger import StatLogger
from tests.engine.test_tiers import FILLERS, HOST, PROMPT, SMALL, files
from tests.server.test_metrics import MeteredApp, open_metered
from tests.server.test_server import parse_chunks, without_cached

GREEDY = {"model": "m", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
KINDS = pytest.mark.parametrize(
    "kind",
    [AsyncLLM, pytest.param(AsyncLLM.spawn, marks=pytest.mark.long)],
    ids=["thread", "process"],
)


def complete(served: MeteredApp, prompt: str | list[str], **fields: Any) -> dict[str, Any]:
    """Return the response of /v1/completions; for a stream its last chunk, which has the usage."""
    body = {**GREEDY, "prompt": prompt, **fields}
    (answer,) = served.send_all(("POST", "/v1/completions", body))
    assert answer.status_code == 200, answer.text
    if "stream" in body:
        chunk: dict[str, Any] = parse_chunks(answer.text)[-1]
        return chunk
    found: dict[str, Any] = answer.json()
    return found


def details(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["usage"]["prompt_tokens_details"]
    return found


def evict(served: MeteredApp) -> None:
    for filler in FILLERS:
        complete(served, filler)


@KINDS
def test_usage_counts_cached_tokens_by_tier(kind: Callable[..., AsyncLLM]) -> None:
    """Only where some came from host memory: OpenAI's field alone has the sum."""
    with open_metered(kind=kind, **HOST) as served:
        first, second = (complete(served, PROMPT) for _ in range(2))
        assert details(first) == {"cached_tokens": 0}
        assert details(second) == {"cached_tokens": 12}
        evict(served)
        third = complete(served, PROMPT)
        by_tier = {"device": 0, "host": 12, "disk": 0}
        assert details(third) == {"cached_tokens": 12, "cached_tokens_by_tier": by_tier}
        assert third["choices"] == second["choices"] == first["choices"]
        assert without_cached(third["usage"]) == without_cached(first["usage"])
        evict(served)
        streamed = complete(served, [PROMPT, "another"], n=2, stream=True, **USAGE)
        assert details(streamed) == details(third), "two prompts and four choices"
        evict(served)
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        body = {**GREEDY, **chat, "stream": True, **USAGE}
        for cached in (0, 20):
            (answer,) = served.send_all(("POST", "/v1/chat/completions", body))
            assert details(parse_chunks(answer.text)[-1])["cached_tokens"] == cached
        whole = {**GREEDY, **chat}
        (answer,) = served.send_all(("POST", "/v1/chat/completions", whole))
        assert details(answer.json()) == {"cached_tokens": 20}


def test_usage_counts_tokens_from_files_after_a_restart(tmp_path: Path) -> None:
    with open_metered(**files(tmp_path / "kv")) as served:
        complete(served, PROMPT)
        before = complete(served, PROMPT)
        evict(served)
    with open_metered(**files(tmp_path / "kv")) as served:
        after = complete(served, PROMPT)
    by_tier = {"device": 0, "host": 0, "disk": 12}
    assert details(after) == {"cached_tokens": 12, "cached_tokens_by_tier": by_tier}
    assert after["choices"] == before["choices"]


@KINDS
def test_metrics_count_the_tiers(kind: Callable[..., AsyncLLM], tmp_path: Path) -> None:
    with open_metered(kind=kind, **files(tmp_path / "kv")) as served:
        for _ in range(2):
            complete(served, PROMPT)
        evict(served)
        complete(served, PROMPT)
        found = served.scrape()
    assert found["forge_kv_host_blocks_total"] == 64
    # All four blocks of the prompt and its output were stored, and three of them loaded.
    assert found["forge_kv_host_blocks_used"] == found['forge_tier_moves_total{move="store"}'] == 4
    assert found['forge_tier_moves_total{move="load"}'] == 3
    assert found['forge_tier_moves_total{move="fetch"}'] == 0
    by_source = {
        source: found[f'forge_prompt_tokens_by_source_total{{source="{source}"}}']
        for source in ("device", "host", "disk", "computed")
    }
    num_fillers = sum(map(len, FILLERS))
    assert by_source == {"device": 12, "host": 12, "disk": 0, "computed": 14 + 2 + 2 + num_fillers}
    assert sum(by_source.values()) == found["forge_prefix_cache_queries_total"]
    assert found["forge_prefix_cache_hits_total"] == 12
    assert found["forge_host_cache_hits_total"] == 12
    assert found["forge_host_cache_queries_total"] == 12 + by_source["computed"]
    with open_metered(kind=kind, **files(tmp_path / "kv")) as served:
        num_files = served.scrape()["forge_kv_disk_files"]
        complete(served, PROMPT)
        found = served.scrape()
    assert num_files == 4, "what was read when the folder was opened"
    assert found['forge_tier_moves_total{move="fetch"}'] == 3
    assert found['forge_prompt_tokens_by_source_total{source="disk"}'] == 12


def test_files_that_fail_are_counted(tmp_path: Path) -> None:
    """The first answer ends the wait for all three. The others may come after the scrape."""
    with open_metered(**files(tmp_path / "kv")) as served:
        for _ in range(2):
            complete(served, PROMPT)
        evict(served)
    for file in (tmp_path / "kv").glob("[0-9a-f]*"):
        file.write_bytes(b"damaged")
    with open_metered(**files(tmp_path / "kv")) as served:
        assert details(complete(served, PROMPT)) == {"cached_tokens": 0}
        found = served.scrape()
    num_failed = found['forge_tier_failed_moves_total{move="fetch"}']
    assert 1 <= num_failed <= 3
    assert found['forge_tier_moves_total{move="fetch"}'] == 0
    assert found["forge_kv_disk_files"] == 4 - num_failed


def test_turns_of_a_session_count_their_tokens_by_tier() -> None:
    """What a session has left is stored without a second touch."""
    with open_metered(**HOST) as served:
        complete(served, PROMPT, session_id="s")
        evict(served)
        complete(served, PROMPT + " and more", session_id="s")
        found = served.scrape()
    resumed = [found[f'forge_resumed_tokens_total{{from="{tier}"}}'] for tier in ("device", "host")]
    assert resumed == [0, 12]


def test_the_line_of_the_log_has_the_tiers_where_there_are_some() -> None:
    lines = []
    for options in (SMALL, HOST):
        with open_metered(**options) as served:
            for _ in range(2):
                complete(served, PROMPT)
            evict(served)
            statistics = StatLogger(ServerStats(served.llm))
            complete(served, PROMPT)
            lines.append(statistics.format_line(1.0))
    without, with_host = lines
    assert without is not None and without.endswith("cache 0 % used, 0 % hit")
    assert with_host is not None
    assert with_host.endswith("cache 0 % used, 0 % hit; host 6 % used, 86 % hit, 0 % in files")


# Reset and resize.


def post(served: MeteredApp, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    (answer,) = served.send_all(("POST", path, body))
    return answer


@KINDS
def test_a_reset_forgets_every_tier_until_the_next_start(
    kind: Callable[..., AsyncLLM], tmp_path: Path
) -> None:
    with open_metered(kind=kind, **files(tmp_path / "kv")) as served:
        for _ in range(2):
            complete(served, PROMPT)
        evict(served)
        assert post(served, "/reset_prefix_cache").status_code == 200
        assert details(complete(served, PROMPT)) == {"cached_tokens": 0}
        found = served.scrape()
        assert (found["forge_kv_host_blocks_used"], found["forge_kv_disk_files"]) == (0, 0)
    with open_metered(kind=kind, **files(tmp_path / "kv")) as served:
        assert details(complete(served, PROMPT))["cached_tokens_by_tier"]["disk"] == 12


@KINDS
def test_a_resize_changes_both_pools_and_no_output(kind: Callable[..., AsyncLLM]) -> None:
    with open_metered(kind=kind, **HOST) as served:
        before = complete(served, PROMPT)
        complete(served, PROMPT)
        evict(served)
        body = {"num_blocks": 30, "num_host_blocks": 0}
        answer = post(served, "/resize_kv_cache", body)
        assert (answer.status_code, answer.content) == (200, b"")
        found = served.scrape()
        assert (found["forge_kv_blocks_total"], found["forge_kv_host_blocks_total"]) == (30, 0)
        again = complete(served, PROMPT)
        assert details(again) == {"cached_tokens": 0}
        assert again["choices"] == before["choices"]
        too_long = post(served, "/v1/completions", {**GREEDY, "prompt": FILLERS[1]})
        assert too_long.status_code == 400, "it needs 32 blocks"
        assert "the cache has 30 of 4" in too_long.json()["error"]["message"]
        post(served, "/resize_kv_cache", {"num_blocks": 32})
        assert served.scrape()["forge_kv_host_blocks_total"] == 0, "left out: unchanged"
        complete(served, FILLERS[1])


@pytest.mark.parametrize(
    ("options", "body", "param", "message"),
    [
        (HOST, {"num_blocks": 33}, "num_blocks", "33 blocks, and memory was allocated for 32"),
        (HOST, {"num_blocks": 0}, "num_blocks", "0 is not an integer from 1"),
        (HOST, {"num_blocks": 2**24}, "num_blocks", "blocks, and memory was allocated for 32"),
        (HOST, {"num_blocks": 10**400}, "num_blocks", "is not an integer from 1 to 16777216"),
        (HOST, {"num_blocks": 32, "num_host_blocks": 65}, "num_host_blocks", "allocated for 64"),
        (HOST, {"num_blocks": 32, "num_host_blocks": -1}, "num_host_blocks", "integer from 0"),
        (SMALL, {"num_blocks": 16, "num_host_blocks": 4}, "num_host_blocks", "no host pool"),
        (HOST, {"num_host_blocks": 4}, "num_blocks", "it is missing"),
    ],
)
def test_a_size_that_is_not_possible_is_refused_and_changes_nothing(
    options: dict[str, Any], body: dict[str, Any], param: str, message: str
) -> None:
    with open_metered(**options) as served:
        answer = post(served, "/resize_kv_cache", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert message in error["message"] and len(error["message"]) < 200
        assert served.scrape()["forge_kv_blocks_total"] == 32


@KINDS
def test_a_pool_that_an_open_request_needs_is_not_made_smaller(
    kind: Callable[..., AsyncLLM],
) -> None:
    """The request would take 40 s."""
    options = {**HOST, "num_blocks": 2048, "max_model_len": 8192}

    def sizes(llm: AsyncLLM) -> tuple[int, int]:
        assert llm.status.tiers is not None
        return llm.status.num_blocks, llm.status.tiers.num_host_blocks

    async def resize_while_open(served: MeteredApp) -> None:
        llm, params = served.llm, SamplingParams(max_tokens=8000, ignore_eos=True)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(served.app), base_url="http://127.0.0.1"
        )
        async with client, aclosing(llm.stream(PROMPT, params)) as stream:
            await anext(stream)
            with pytest.raises(NeverFits, match=r"num_blocks: request \d+ needs 2004 blocks"):
                await llm.resize(2003, 1)
            body = {"num_blocks": 2003, "num_host_blocks": 1}
            answer = await client.post("/resize_kv_cache", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "num_blocks")
            assert sizes(llm) == (2048, 64)
            await llm.resize(2004, 1)
            assert sizes(llm) == (2004, 1)

    with open_metered("hash:step_ms=5", kind=kind, **options) as served:
        asyncio.run(asyncio.wait_for(resize_while_open(served), 60))
