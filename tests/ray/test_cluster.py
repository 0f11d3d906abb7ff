"""A fleet on a real Ray cluster: clients, deaths, restarts and drains.

Replicas are processes that are killed with SIGKILL. `make test-ray` runs these tests in an
environment of their own. One cluster serves all of them, since it takes long to start.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.ray.cluster import (
    Fleet,
    child_pids,
    deploy,
    engine_pids,
    is_alive,
    kill,
    open_cluster,
    wait_for,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
]

OPTIONS: dict[str, Any] = {
    "model": "hash:step_ms=5",
    "served_model_name": "hash",
    "replicas": 3,
    "replica_cpus": 0.1,
    "health_period_s": 1,
    "num_blocks": 512,
    "max_num_seqs": 16,
}
NUM_REQUESTS = 1000
NUM_CLIENTS = 32


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with open_cluster():
        yield deploy(**OPTIONS)


def outcome(client: httpx.Client, number: int) -> str:
    """Send a request, every second one as a stream, and return how it ended.

    complete   the whole response has come
    failed     it had started, and ended with an error and without [DONE]
    """
    is_stream = number % 2 == 0
    body: dict[str, Any] = {
        "model": "hash", "prompt": f"request {number}", "max_tokens": 8, "ignore_eos": True,
        "stream": is_stream,
    }  # fmt: skip
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    response = client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text[:200]}"
    if not is_stream:
        return "complete" if response.json()["usage"]["completion_tokens"] == 8 else response.text
    *events, last = [line for line in response.text.split("\n\n") if line.startswith("data:")]
    if last == "data: [DONE]":
        usage = json.loads(events[-1].removeprefix("data: "))["usage"]
        return "complete" if usage["completion_tokens"] == 8 else response.text
    has_error = "error" in json.loads(last.removeprefix("data: "))
    return "failed" if has_error and events else response.text


def run_load(fleet: Fleet, on_request: dict[int, Any]) -> Counter[str]:
    """Send all requests, and call what `on_request` has for a number when that is sent."""
    lock, outcomes = threading.Lock(), Counter[str]()
    numbers = iter(range(NUM_REQUESTS))

    def send_some() -> None:
        with httpx.Client(base_url=fleet.url, timeout=300) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                on_request.get(number, lambda: None)()
                found = outcome(client, number)
                with lock:
                    outcomes[found] += 1

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for future in [pool.submit(send_some) for _ in range(NUM_CLIENTS)]:
            future.result()
    return outcomes


def test_the_openai_client_works_through_a_fleet(fleet: Fleet) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["hash"]
    messages = [{"role": "user", "content": "hello"}]
    fields: dict[str, Any] = {"model": "hash", "messages": messages, "max_tokens": 6, "seed": 1}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    with pytest.raises(openai.NotFoundError, match="there is no 'other' here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="hash", prompt="a", temperature=9)


def test_turns_of_a_session_find_their_prefix_on_one_replica(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.url, timeout=300) as client:
        for session in ("a", "b", "c", "d"):
            context, cached = f"session {session} begins here. " * 8, []
            for _ in range(4):
                body = {"model": "hash", "prompt": context, "max_tokens": 16, "ignore_eos": True}
                headers = {"x-session-id": session}
                found = client.post("/v1/completions", json=body, headers=headers).json()
                cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
                context += found["choices"][0]["text"]
            assert cached[0] == 0 and min(cached[1:]) > 150
            ended = [client.delete(f"/v1/sessions/{session}").status_code for _ in range(2)]
            assert ended == [200, 404]


def test_a_client_that_leaves_aborts_its_request(fleet: Fleet) -> None:
    body = {"model": "hash", "prompt": "a", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=fleet.url, timeout=300) as client:
        for _ in range(60):  # more than the replicas have rows: the last ones would wait for 35 s
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        assert outcome(client, 0) == "complete"


def test_of_a_thousand_requests_none_that_had_not_started_is_lost_when_replicas_die(
    fleet: Fleet,
) -> None:
    """A replica is killed after 200 requests, and another one after 600."""
    wait_for(lambda: len(engine_pids()) == 3)
    killed: list[int] = []
    engines: list[int] = []

    def kill_one() -> None:
        pid = engine_pids()[0]
        engines.extend(child_pids(pid))
        kill(pid)
        killed.append(pid)

    outcomes = run_load(fleet, {200: kill_one, 600: kill_one})
    print("outcomes", dict(outcomes))
    assert set(outcomes) <= {"complete", "failed"}, outcomes
    assert sum(outcomes.values()) == NUM_REQUESTS
    assert len(killed) == 2 and outcomes["failed"] <= 2 * NUM_CLIENTS
    assert engines
    wait_for(lambda: not any(map(is_alive, engines)))
    wait_for(lambda: len(set(engine_pids()) - set(killed)) == 3)


def test_an_engine_that_dies_takes_no_request_with_it_that_had_not_started(fleet: Fleet) -> None:
    """Only the engine's process is killed: its replica is alive, and replaced for its health."""
    wait_for(lambda: len(engine_pids()) == 3)
    replica = engine_pids()[0]

    def kill_engine() -> None:
        for pid in child_pids(replica):
            kill(pid)

    outcomes = run_load(fleet, {200: kill_engine})
    print("outcomes", dict(outcomes))
    assert set(outcomes) <= {"complete", "failed"}, outcomes
    wait_for(lambda: replica not in engine_pids() and len(engine_pids()) == 3)


def test_a_rolling_restart_fails_no_request(fleet: Fleet) -> None:
    wait_for(lambda: len(engine_pids()) == 3)
    before = set(engine_pids())
    restart = threading.Thread(target=lambda: fleet.redeploy(**OPTIONS, max_num_batched_tokens=512))
    outcomes = run_load(fleet, {100: restart.start})
    restart.join()
    more = run_load(fleet, {})
    assert set(outcomes + more) == {"complete"}, outcomes + more
    wait_for(lambda: not before & set(engine_pids()))
