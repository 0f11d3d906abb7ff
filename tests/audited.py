"""A server with a key whose engine is watched: after every step each block is where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from forge.async_llm import AsyncLLM
from forge.engine_loop import Report
from forge.limits import Limits
from forge.request import Request
from forge.server.app import create_app
from forge.server.serve import listener
from forge.tokenizer import Tokenizer
from tests.listening import LIMIT_S, Clock, listening, wait_until
from tests.wire import KEY, Address

WITHIN_S = LIMIT_S


class Audit:
    """Looks at every block after every step, on the engine's thread.

    faults     steps after which a block was lost or two figures did not agree
    steps      after which it has looked
    open       requests that the engine has; strangers are those without the salt OWN
    """

    OWN = "good"

    def __init__(self, llm: AsyncLLM) -> None:
        self.faults: list[str] = []
        self.steps = 0
        self.open = 0
        self.strangers = 0
        self._scheduler = llm.engine.scheduler

    def opened(self, request: Request) -> Audit:
        """Nothing to look at."""
        return self

    def gained(self, deltas: object) -> None:
        """Nothing to look at."""

    def left(self) -> None:
        """Nothing to look at."""

    def stepped(self, report: Report) -> None:
        """Look."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        held = {block for table in pool.tables.values() for block in table.blocks}
        live = {each.id for choices in scheduler.requests.values() for each in choices}
        told = report.status
        whole = len(held) + pool.available == pool.num_blocks == told.num_blocks
        if not whole or told.blocks_used != len(held) or not set(pool.tables) <= live:
            self.faults.append(
                f"step {told.num_steps}: {len(held)} blocks held by {len(pool.tables)} tables, "
                f"{pool.available} available of {pool.num_blocks}, {told.blocks_used} told, "
                f"{len(live)} sequences open"
            )
        salts = [choices[0].request.cache_salt for choices in scheduler.requests.values()]
        self.open, self.strangers = len(salts), len(salts) - salts.count(self.OWN)
        self.steps += 1


class Audited:
    """A running server."""

    def __init__(self, llm: AsyncLLM, address: Address, client: httpx.Client, clock: Clock) -> None:
        self.llm = llm
        self.clock = clock
        self.address = address
        self.client = client
        self.audit = Audit(llm)
        llm.observe(self.audit)

    def check_rest(self) -> None:
        """Nobody is served, every block is back, and /metrics says so too."""
        assert self.audit.faults == []
        assert self.llm.failure is None
        wait_until(lambda: not self.llm.engine.has_work, WITHIN_S)
        pool = self.llm.engine.scheduler.pool
        assert (pool.used, pool.available) == (0, pool.num_blocks)
        figures = self.figures()
        assert "forge_kv_blocks_used 0.0" in figures
        assert f"forge_kv_blocks_cached {float(pool.cached_count)}" in figures

    def figures(self) -> list[str]:
        """The lines of /metrics."""
        return self.client.get("/metrics").text.splitlines()


@contextmanager
def audited(
    model: str, *, limits: Limits | None = None, tokenizer: Tokenizer | None = None, **options: Any
) -> Iterator[Audited]:
    """A server on a free port, gone with the block."""
    llm = AsyncLLM(model, **options)
    llm.tokenizer = tokenizer or llm.tokenizer
    limits = limits or Limits()
    clock = Clock()
    with listener("127.0.0.1", 0, KEY) as socket_:
        app = create_app(llm, served_model_name="hash", api_key=KEY, limits=limits)
        with listening(llm, app, socket_, limits, clock) as (url, client):
            client.headers["authorization"] = f"Bearer {KEY}"
            yield Audited(llm, ("127.0.0.1", httpx.URL(url).port or 80), client, clock)
