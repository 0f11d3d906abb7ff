"""The line that a server logs every ten seconds while it has work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from forge.async_llm import AsyncLLM
from forge.request import SamplingParams
from forge.server.server_stats import ServerStats
from forge.server.stat_logger import StatLogger

SHORT = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)


LONG = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    opened = AsyncLLM("hash", num_blocks=64, block_size=4, max_model_len=128)
    yield opened
    opened.close()


def test_a_line_has_the_rates_since_the_line_before(llm: AsyncLLM) -> None:
    statistics = StatLogger(ServerStats(llm))
    for expected in (0, 89):  # two blocks of four tokens are cached, of nine tokens
        asyncio.run(llm.generate("ninechars", SHORT))
        line = statistics.format_line(2.0)
        found = f"0 running, 0 waiting; tokens/s: 4 in, 10 out; cache 0 % used, {expected} % hit"
        assert line == found


def test_an_idle_server_logs_nothing(llm: AsyncLLM) -> None:
    statistics = StatLogger(ServerStats(llm))
    assert statistics.format_line(10.0) is None
    asyncio.run(llm.generate("abc", SHORT))
    assert statistics.format_line(10.0) is not None
    assert statistics.format_line(10.0) is None


def test_open_requests_are_reported_while_they_run() -> None:
    slow = AsyncLLM("hash:step_ms=20", max_num_seqs=1)

    async def lines() -> list[str | None]:
        statistics = StatLogger(ServerStats(slow))
        tasks = [asyncio.create_task(slow.generate("abc", LONG)) for _ in range(3)]
        while slow.status.num_running != 1 or slow.status.num_waiting != 2:
            await asyncio.sleep(0.002)
        line = statistics.format_line(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [line]

    try:
        (line,) = asyncio.run(asyncio.wait_for(lines(), 60))
        assert line is not None and line.startswith("1 running, 2 waiting; ")
    finally:
        slow.close()


def test_lines_go_to_the_log_as_long_as_it_runs(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    def num_lines() -> int:
        return sum(record.name == "forge.statistics" for record in caplog.records)

    async def a_while() -> None:
        telling = asyncio.create_task(StatLogger(ServerStats(llm), period_s=0.01).run())
        await llm.generate("abc", SHORT)
        busy = num_lines()
        while not num_lines():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        telling.cancel()
        assert num_lines() <= busy + 1, "busy for a moment, then silent"

    with caplog.at_level(logging.INFO, logger="forge.statistics"):
        asyncio.run(asyncio.wait_for(a_while(), 60))
