"""A server with a key and an audit of its blocks: after every step each block has one owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from forge.async_llm import AsyncLLM
from forge.engine_messages import StepReport
from forge.limits import Limits
from forge.request import Request
from forge.server.app import create_app
from forge.server.http_server import create_listener
from forge.server.tenants import tenant_name, tenant_salt
from forge.tokenizer import Tokenizer
from forge.trainer_access import TrainerAccess
from tests.server.http_wire import KEY, Address
from tests.server.local_server import TIMEOUT_S, ManualClockLoop, serve_app, wait_until

SERVER_TIMEOUT_S = TIMEOUT_S


class BlockAudit:
    """Checks every block after every step, on the engine's thread.

    faults      steps after which a block was lost or two figures did not agree
    num_steps   steps that were checked
    num_open    open requests of the engine; strangers are those without the salt OWN
    """

    OWN_SALT = "good"

    def __init__(self, llm: AsyncLLM) -> None:
        self.faults: list[str] = []
        self.num_steps = 0
        self.num_open = 0
        self.num_foreign = 0
        self._scheduler = llm.engine.scheduler

    def on_request(self, request: Request) -> BlockAudit:
        """Return itself: a request has nothing to check."""
        return self

    def on_deltas(self, deltas: object) -> None:
        """Ignore deltas."""

    def on_close(self) -> None:
        """Ignore the end of reading."""

    def on_step(self, report: StepReport) -> None:
        """Check every block, and the figures of the report."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        table_blocks = {block for table in pool.tables.values() for block in table.blocks}
        live = {each.id for choices in scheduler.requests.values() for each in choices}
        status = report.status
        is_complete = (
            len(table_blocks) + pool.num_free_blocks == pool.num_blocks == status.num_blocks
        )
        if (
            not is_complete
            or status.num_used_blocks != len(table_blocks)
            or not set(pool.tables) <= live
        ):
            self.faults.append(
                f"step {status.num_steps}: {len(table_blocks)} blocks held by {len(pool.tables)} "
                "tables, "
                f"{pool.num_free_blocks} available of {pool.num_blocks}, {status.num_used_blocks} "
                "reported, "
                f"{len(live)} sequences open"
            )
        salts = [choices[0].request.cache_salt for choices in scheduler.requests.values()]
        own_salt = tenant_salt(tenant_name(KEY), self.OWN_SALT)
        self.num_open, self.num_foreign = len(salts), len(salts) - salts.count(own_salt)
        self.num_steps += 1


class AuditedServer:
    """A running server whose blocks are audited."""

    def __init__(
        self, llm: AsyncLLM, address: Address, client: httpx.Client, clock: ManualClockLoop
    ) -> None:
        self.llm = llm
        self.clock = clock
        self.address = address
        self.client = client
        self.audit = BlockAudit(llm)
        llm.add_observer(self.audit)

    def check_idle(self) -> None:
        """Check that no request is served, every block is free or cached, and /metrics agrees."""
        assert self.audit.faults == []
        assert self.llm.failure is None
        wait_until(lambda: not self.llm.engine.has_work, SERVER_TIMEOUT_S)
        pool = self.llm.engine.scheduler.pool
        assert (pool.num_used_blocks, pool.num_free_blocks) == (0, pool.num_blocks)
        figures = self.metrics_lines()
        assert "forge_kv_blocks_used 0.0" in figures
        assert f"forge_kv_blocks_cached {float(pool.num_cached_blocks)}" in figures

    def metrics_lines(self) -> list[str]:
        """Return the lines of /metrics."""
        return self.client.get("/metrics").text.splitlines()


@contextmanager
def open_audited_server(
    model: str,
    *,
    limits: Limits | None = None,
    tokenizer: Tokenizer | None = None,
    trainer_access: TrainerAccess | None = None,
    **options: Any,
) -> Iterator[AuditedServer]:
    """Serve on a free port until the end of the block."""
    llm = AsyncLLM(model, **options)
    llm.tokenizer = tokenizer or llm.tokenizer
    limits = limits or Limits()
    clock = ManualClockLoop()
    with create_listener("127.0.0.1", 0, (KEY,)) as socket_:
        app = create_app(
            llm,
            served_model_name="hash",
            api_keys=(KEY,),
            limits=limits,
            trainer_access=trainer_access,
        )
        with serve_app(llm, app, socket_, limits, clock) as (url, client):
            client.headers["authorization"] = f"Bearer {KEY}"
            yield AuditedServer(llm, ("127.0.0.1", httpx.URL(url).port or 80), client, clock)
