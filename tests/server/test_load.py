"""GET /load, and KV events of a server: what routers and autoscalers read of a replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.bench.served_traffic import find_free_port
from tests.server.local_server import GatedModel, wait_until
from tests.server.test_metrics import open_metered
from tests.server.test_server import open_server

KINDS = pytest.mark.parametrize("kind", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
TIMEOUT_S = 60


@KINDS
def test_an_idle_server_has_no_load(kind: Callable[..., AsyncLLM]) -> None:
    with open_metered(kind=kind) as served:
        served.generate({"prompt": "abc", "max_tokens": 4})
        (answer,) = served.send_all(("GET", "/load", None))
    assert answer.json() == {
        "server_load": 0, "running": 0, "waiting": 0, "kv_blocks_total": 64, "kv_blocks_free": 64,
        "queue_s": 0.0,
    }  # fmt: skip


def test_the_wait_of_the_request_that_no_step_has_served_grows_while_the_engine_stalls() -> None:
    """One sequence runs at a time. Two steps are permitted: the second one has seen all three."""
    model = GatedModel(num_blocks=64, block_size=4)

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = model

    body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
    with (
        open_server(prepare=prepare, max_num_seqs=1) as server,
        ThreadPoolExecutor(3) as pool,
        model.open_at_exit(),
    ):
        for _ in range(3):
            pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60)
        wait_until(lambda: server.llm.num_open_requests == 3)
        model.permits.release(2)
        wait_until(lambda: server.llm.load.num_waiting == 2)
        first = server.client.get("/load").json()
        wait_until(lambda: server.llm.load.queue_s > first["queue_s"])
        second = server.client.get("/load").json()
    assert (first["server_load"], first["running"], first["waiting"]) == (3, 1, 2)
    assert first["kv_blocks_free"] < first["kv_blocks_total"] == 64
    assert 0 < first["queue_s"] < second["queue_s"]


def test_without_its_key_nobody_reads_the_load() -> None:
    with open_server(api_keys=("key",)) as server:
        assert server.client.get("/load").status_code == 401
        headers = {"authorization": "Bearer key"}
        assert server.client.get("/load", headers=headers).status_code == 200


@KINDS
def test_a_server_publishes_the_blocks_of_its_prompts_and_counts_the_batches(
    kind: Callable[..., AsyncLLM],
) -> None:
    """Nine tokens fill two blocks of four. A reset clears them."""
    pytest.importorskip("msgspec")
    zmq: Any = pytest.importorskip("zmq")
    decode = pytest.importorskip("msgspec.msgpack").decode
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"kv-events")
        endpoint = f"tcp://127.0.0.1:{find_free_port()}"
        with open_metered(kind=kind, kv_events=endpoint) as served:
            socket.connect(endpoint)
            deadline_s = time.monotonic() + TIMEOUT_S
            num_sent = 0
            while not socket.poll(20):  # until the subscription has arrived
                assert time.monotonic() < deadline_s
                served.send_all(("POST", "/reset_prefix_cache", None))
                num_sent += 1
            served.generate({"prompt": "nine toks", "max_tokens": 1, "ignore_eos": True})
            events: list[dict[str, Any]] = []
            while not events or events[-1]["type"] != "BlockStored":
                assert socket.poll(1000 * TIMEOUT_S)
                topic, _, payload = socket.recv_multipart()
                events += decode(payload)[1]
            prompt_ids = served.llm.tokenizer.encode("nine toks")
            # A thread counts what it has sent, and the count comes with the report of a later step.
            published = 'forge_kv_event_batches_total{outcome="published"}'
            while (found := served.scrape())[published] < num_sent:
                assert time.monotonic() < deadline_s
                served.send_all(("POST", "/reset_prefix_cache", None))
    assert topic == b"kv-events"
    assert (events[-1]["token_ids"], events[-1]["block_size"]) == (prompt_ids[:8], 4)
    assert found['forge_kv_event_batches_total{outcome="dropped"}'] == 0
