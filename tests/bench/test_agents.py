"""Sessions of agents over HTTP: prompts as in the simulator, answers in prompts, and figures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge import AsyncLLM
from forge.bench.agent_load import AgentLoad
from forge.bench.agents import find_choice
from forge.bench.http_client import Endpoint, StreamedResponse
from forge.bench.session_load import (
    AnswerSource,
    FixedAnswers,
    PromptMapper,
    ReturnedAnswers,
    SessionClient,
    SessionRun,
    Turn,
    session_figures,
)
from forge.cli.main import main
from forge.config import EngineConfig
from forge.errors import InvalidConfig, RequestFailed
from forge.request import Delta, Request
from forge.server.app import create_app
from forge.server.http_server import create_listener
from forge.sim.clock import VirtualClockStep
from forge.sim.length_model import FILLER_TOKEN
from forge.sim.scenario import summary
from forge.sim.workloads.workload import FixedArrivals, RequestArrival, VocabularyWorkload
from forge.sim.world import World
from tests.server.local_server import create_client, serve_app

VOCAB = 200
SMALL = AgentLoad(
    agents=2, sessions=3, turns=3, system=40, new="20-60", output="4-12", pause=0.0, seed=5
)
ONE_AGENT = replace(SMALL, agents=1)
BLOCKS: dict[str, Any] = {"num_blocks": 512, "block_size": 16}


# The sessions are those of the simulator.


class ArrivalLog:
    """Arrivals of a simulation, by request."""

    def __init__(self) -> None:
        self.arrivals: dict[int, RequestArrival] = {}

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        assert refusal is None, refusal
        self.arrivals[arrival.request.id] = arrival

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("no client disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Do nothing."""


def simulate(load: AgentLoad) -> tuple[World, list[Request]]:
    """Return the simulation of the load, and its requests with tokens below VOCAB."""
    log = ArrivalLog()
    scenario = replace(load.scenario(), engine=EngineConfig(**BLOCKS))
    world = scenario.run(create_observers=lambda engine: [log])
    arrivals = tuple(arrival for _, arrival in sorted(log.arrivals.items()))
    mapped = VocabularyWorkload(FixedArrivals(arrivals), VOCAB).arrivals()
    return world, [arrival.request for arrival in mapped]


@contextmanager
def open_forge_server() -> Iterator[str]:
    """Yield the address of forge's server on the deterministic model, with a prefix cache."""
    llm = AsyncLLM("hash", **BLOCKS)
    with (
        create_listener("127.0.0.1", 0, None) as socket_,
        serve_app(llm, create_app(llm), socket_) as (url, _),
    ):
        yield url


class RecordingEndpoint(Endpoint):
    """An endpoint that keeps the prompt of each request."""

    def __init__(self, url: str) -> None:
        super().__init__(url, None, None)
        self.prompts: list[list[int]] = []

    def build_request(
        self, prompt: Sequence[int], output: int, fields: Mapping[str, Any] | None = None
    ) -> bytes:
        self.prompts.append(list(prompt))
        return super().build_request(prompt, output, fields or {})


def run_sessions(server: Endpoint, load: AgentLoad) -> SessionRun:
    """Run the sessions with fixed answers and without hints."""
    answers = FixedAnswers()
    workload = load.create_workload(answers.get_answer)
    client = SessionClient(server, workload, answers, VOCAB, load.turn_of, load.no_fields)
    return asyncio.run(client.run())


def test_prompts_and_answers_are_those_of_the_simulation() -> None:
    _, simulated = simulate(SMALL)
    with open_forge_server() as url:
        server = RecordingEndpoint(url)
        run = run_sessions(server, SMALL)
    assert sorted(server.prompts) == sorted(list(request.prompt) for request in simulated)
    assert run.errors == {}
    assert sorted(turn[:2] for turn in run.turns) == [(s, t) for s in range(3) for t in range(3)]
    simulated_lengths = sorted(
        (divmod(request.id, 3), len(request.prompt), request.params.max_tokens)
        for request in simulated
    )
    assert simulated_lengths == sorted(
        ((turn.session, turn.turn), turn.num_prompt_tokens, turn.num_tokens) for turn in run.turns
    )


def test_a_server_finds_the_tokens_in_its_cache_that_the_simulated_engine_finds() -> None:
    """One agent at a time, so that both see the turns in one order."""
    world, simulated = simulate(ONE_AGENT)
    with open_forge_server() as url:
        run = run_sessions(Endpoint(url, None, None), ONE_AGENT)
        metrics = httpx.get(url + "/metrics", trust_env=False).text
    counts = [
        int(float(re.findall(rf"^forge_prefix_cache_{name}_total (\S+)$", metrics, re.M)[0]))
        for name in ("queries", "hits")
    ]
    figures = summary(world)
    assert counts == [figures["prompt_tokens"], figures["shared_tokens"]]
    assert counts[0] == sum(turn.num_prompt_tokens for turn in run.turns)
    # All but the new tokens of a turn, up to a block: the answers are found too.
    assert counts[1] > counts[0] - len(simulated) * (60 + 16) - 40


def test_a_session_ends_early_where_the_sequence_would_be_too_long() -> None:
    """The server takes 150 tokens: the system prompt, one turn and sometimes a second one."""
    load = replace(SMALL, max_len=150)
    workload = load.create_workload(FixedAnswers().get_answer)
    pending, lengths = list(workload.arrivals()), []
    while pending:
        request = pending.pop(0).request
        lengths.append(len(request.prompt) + (request.params.max_tokens or 0))
        pending += workload.follow_up_arrivals(request.id, 0)
    assert 3 <= len(lengths) < 9
    assert max(lengths) <= 150


# Prompts below the size of a vocabulary.


def test_only_the_new_tokens_of_a_context_are_mapped_again() -> None:
    mapper = PromptMapper(10)
    first = mapper.map(0, (3, 1_000_000))
    assert first[0] == 3 and 1 <= first[1] < 10
    assert mapper.map(0, (3, 1_000_000, 2_000_000))[:2] == first
    (arrival,) = VocabularyWorkload(
        FixedArrivals((RequestArrival(0, Request(0, (4, 1_000_000, 5_000_000))),)), 10
    ).arrivals()
    assert mapper.map(0, (4, 1_000_000, 5_000_000)) == list(arrival.request.prompt)


# Answers.

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REJECTED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nno such"


def stream(*events: Mapping[str, Any]) -> bytes:
    """Return a streamed response of these events."""
    body = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events)
    return HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def answer_in_ids(body: Mapping[str, Any]) -> bytes:
    """Return a response whose ids count up from the last one of the prompt, modulo VOCAB."""
    first, count = body["prompt"][-1] + 1, body["max_tokens"]
    ids = [token % VOCAB for token in range(first, first + count)]
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": count,
        "prompt_tokens_details": {
            "cached_tokens": 7,
            "cached_tokens_by_tier": {"device": 4, "host": 2, "disk": 1},
        },
    }
    choices = [{"index": 0, "text": "", "token_ids": part} for part in (ids[:1], ids[1:])]
    return stream(*({"choices": [each]} for each in choices), {"choices": [], "usage": usage})


class ScriptedServer(asyncio.Protocol):
    """Answers each request with the result of `answer`, one request on a connection at a time."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], bytes]) -> None:
        self.answer, self.data = answer, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        if len(body) < int(head.lower().partition(b"content-length: ")[2].split()[0]):
            return
        self.data = b""
        self.transport.write(self.answer(json.loads(body)))


def run_scripted(
    answer: Callable[[Mapping[str, Any]], bytes], load: AgentLoad, source: AnswerSource
) -> SessionRun:
    """Run the sessions on a server with this answer."""

    async def run() -> SessionRun:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: ScriptedServer(answer), "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            server = Endpoint(f"http://127.0.0.1:{port}", "any", None)
            workload = load.create_workload(source.get_answer)
            client = SessionClient(
                server,
                workload,
                source,
                VOCAB,
                load.turn_of,
                load.session_fields,
                retry_delay_s=0.0,
            )
            try:
                return await client.run()
            finally:
                await asyncio.sleep(0.01)  # both sides see that the connections are closed

    return asyncio.run(run())


def test_returned_answers_are_in_the_next_prompt() -> None:
    bodies: list[Mapping[str, Any]] = []

    def answer(body: Mapping[str, Any]) -> bytes:
        bodies.append(body)
        return answer_in_ids(body)

    run = run_scripted(answer, replace(ONE_AGENT, sessions=1), ReturnedAnswers(VOCAB))
    assert run.errors == {}
    assert [body["return_token_ids"] for body in bodies] == [True] * 3
    for before, after in pairwise(bodies):
        first = before["prompt"][-1] + 1
        ids = [token % VOCAB for token in range(first, first + before["max_tokens"])]
        context = [*before["prompt"], *ids]
        assert after["prompt"][: len(context)] == context
        assert len(after["prompt"]) > len(context)
    assert [turn.num_cached_tokens for turn in run.turns] == [7, 7, 7]
    assert [turn.num_loaded_tokens for turn in run.turns] == [3, 3, 3]


def test_fixed_answers_allow_one_token_and_are_in_the_next_prompt() -> None:
    bodies: list[Mapping[str, Any]] = []

    def answer(body: Mapping[str, Any]) -> bytes:
        bodies.append(body)
        return answer_in_ids(body)

    run_scripted(answer, replace(ONE_AGENT, sessions=1), FixedAnswers())
    assert [body["allowed_token_ids"] for body in bodies] == [[FILLER_TOKEN]] * 3
    context = [*bodies[0]["prompt"], *[FILLER_TOKEN] * bodies[0]["max_tokens"]]
    assert bodies[1]["prompt"][: len(context)] == context


def test_an_answer_outside_the_vocabulary_fails_its_session() -> None:
    """It would be mapped to another token, and nothing after it would be found in the cache."""
    run = run_scripted(answer_in_ids, ONE_AGENT, ReturnedAnswers(2))
    assert set(run.errors) == {0}
    assert "at or above the vocabulary size of 2. Give --vocab-size" in run.errors[0]


def test_a_response_without_ids_is_a_failure() -> None:
    response = StreamedResponse()
    response.feed(stream({"choices": [{"text": "a"}]}), 0.0)
    with pytest.raises(RequestFailed, match="does not return the token ids"):
        response.token_ids()


# Failures.


def test_a_failed_turn_ends_its_session_and_no_other_one_starts() -> None:
    """Two agents, five sessions; the second turn of one session is refused."""
    prompts: list[int] = []

    def answer(body: Mapping[str, Any]) -> bytes:
        prompts.append(len(body["prompt"]))
        is_second_turn = len(body["prompt"]) == second_turn
        return REFUSED if is_second_turn else answer_in_ids(body)

    load = replace(SMALL, sessions=5, new="24", output="6")
    second_turn = 40 + 24 + 6 + 24
    run = run_scripted(answer, load, FixedAnswers())
    refusal = "turn 1: the server said HTTP/1.1 400 Bad Request: no such"
    assert run.errors == {0: refusal, 1: refusal}
    assert sorted(prompts) == [64, 64, second_turn, second_turn]
    assert [turn.turn for turn in run.turns] == [0, 0]
    assert session_figures(run)["sessions"] == 0


def test_a_rejected_turn_is_sent_again_and_counted() -> None:
    tries: dict[tuple[int, ...], int] = {}

    def answer(body: Mapping[str, Any]) -> bytes:
        key = tuple(body["prompt"])
        tries[key] = tries.get(key, 0) + 1
        return REJECTED if tries[key] < 3 else answer_in_ids(body)

    run = run_scripted(answer, SMALL, FixedAnswers())
    assert (len(run.turns), run.num_rejected, run.errors) == (9, 18, {})


def test_a_stream_that_ends_early_is_a_failure() -> None:
    run = run_scripted(
        lambda body: answer_in_ids({**body, "max_tokens": 3}), ONE_AGENT, FixedAnswers()
    )
    assert run.errors[0].startswith("turn 0: the stream ended after 3 tokens of ")


# The command.


def test_the_command_prints_and_writes_the_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "agents.json"
    words = (
        "--agents 2 --sessions 3 --turns 2 --system 40 --new 20-60 --output 4-12 --pause 0 "
        f"--seed 5 --label mine --vocab-size {VOCAB}"
    )
    with open_forge_server() as url:
        assert main(["bench", "agents", url, *words.split(), "--json", str(path)]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    result = json.loads(line.removeprefix("RESULT "))
    counts = [result[name] for name in ("engine", "shape", "sessions", "turns", "errors")]
    assert counts == ["mine", "hash", 3, 6, 0]
    record = json.loads(path.read_text())
    assert record["benchmark"] == "agents"
    assert record["figures"] == {
        "workload": {
            **{"agents": 2, "sessions": 3, "turns": 2, "system": 40, "new": "20-60"},
            **{"output": "4-12", "pause": 0.0, "max_len": 8192, "seed": 5},
        },
        "result": result,
        "errors": {},
    }


def test_a_server_that_refuses_a_field_fails_every_session_and_is_quoted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--agents 2 --sessions 9 --pause 0 --system 40 --vocab-size {100 * VOCAB}"
    with open_forge_server() as url:
        assert main(["bench", "agents", url, *words.split()]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[2].removeprefix("RESULT "))["errors"] == 2
    assert lines[3].startswith("session ") and "is out of vocabulary" in lines[3]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--agents 0", "--agents: 0 is not from 1 to 1000000. Give 1 or more"),
        ("--new x", "--new: 'x' is no length. Give 512, 16-1024 or exp:300, say"),
        ("--output 0", "--output: '0' is no length. Give 512, 16-1024, exp:300 or 64,64,4000, say"),
        ("--pause=-1", "--pause: -1 is not from 0 to 86400. Give seconds, or 0"),
        ("--hints all", "--hints: 'all' is not known. Use none or sessions"),
        ("--answers true", "--answers: 'true' is not known. Use fixed or returned"),
    ],
)
def test_an_invalid_option_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert main(["bench", "agents", "http://127.0.0.1:1", "--model", "m", *words.split()]) == 2
    assert capsys.readouterr().err == f"forge bench agents: {line}\n"


# Figures.


def test_figures_are_by_turn_by_session_and_of_the_whole_run() -> None:
    """Two sessions of two turns: one completes, the second turn of the other failed."""
    turns = [
        Turn(0, 0, due_s=1.0, sent_s=1.5, first_s=2.0, end_s=3.0, num_prompt_tokens=10,
             num_tokens=4, num_cached_tokens=None),
        Turn(1, 0, due_s=1.0, sent_s=1.0, first_s=4.0, end_s=5.0, num_prompt_tokens=10,
             num_tokens=4, num_cached_tokens=8),
        Turn(0, 1, due_s=6.0, sent_s=6.0, first_s=6.25, end_s=8.0, num_prompt_tokens=20,
             num_tokens=4, num_cached_tokens=16, num_loaded_tokens=12),
    ]  # fmt: skip
    assert session_figures(SessionRun(turns, {1: "turn 1: no"}, 2)) == {
        "sessions": 1,
        "errors": 1,
        "rejected": 2,
        "turns": 3,
        "makespan_s": 7.0,
        "turns_s": 0.4286,
        "session_mean_s": 7.0,
        "session_p99_s": 7.0,
        "ttft_first_p50": 2000.0,
        "ttft_first_p99": 3000.0,
        "ttft_later_p50": 250.0,
        "ttft_later_p99": 250.0,
        "latency_p50": 2000.0,
        "latency_p99": 4000.0,
        "late_p99": 500.0,
        "tok_s": 1.7,
        "prompt_tokens": 40,
        "cached_tokens": 24,
        "loaded_tokens": 12,
        "jain": 1.0,
    }


def test_a_run_without_a_served_turn_has_counts_only() -> None:
    figures = session_figures(SessionRun([], {0: "turn 0: no"}, 0))
    assert {name: value for name, value in figures.items() if value} == {"errors": 1}


# Fields of a session.


def test_hints_name_the_session_its_pause_and_its_end() -> None:
    load = replace(SMALL, turns=3, pause=2.5, seed=5)
    assert load.session_fields(3) == {"session_id": "5-1", "expected_pause_s": 2.5}
    assert load.session_fields(5) == {"session_id": "5-1", "session_end": True}
    assert load.no_fields(3) == {}


def test_each_request_has_the_fields_of_its_turn() -> None:
    fields: list[tuple[Any, ...]] = []

    def answer(body: Mapping[str, Any]) -> bytes:
        names = ("session_id", "expected_pause_s", "session_end")
        fields.append(tuple(body.get(name) for name in names))
        return answer_in_ids(body)

    run_scripted(answer, replace(ONE_AGENT, sessions=2, turns=2), FixedAnswers())
    assert fields == [
        *[("5-0", 0.0, None), ("5-0", None, True)],
        *[("5-1", 0.0, None), ("5-1", None, True)],
    ]


def test_with_hints_every_session_of_a_server_has_ended_after_the_run() -> None:
    words = "--agents 2 --sessions 3 --turns 2 --system 40 --new 20-60 --output 4-12 --pause 0.001"
    with open_forge_server() as url:
        options = f"{words} --hints sessions --seed 5 --vocab-size {VOCAB}"
        assert main(["bench", "agents", url, *options.split()]) == 0
        with create_client(url) as client:
            statuses = [client.delete(f"/v1/sessions/5-{s}").status_code for s in range(3)]
            metrics = client.get("/metrics").text
    assert statuses == [404] * 3
    assert int(re.findall(r"^forge_requests_total\{.*length.*\} (\d+)", metrics, re.M)[0]) == 6


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"hints: 'x' is not known\. Use none or sessions"):
        find_choice("hints", "x", {"none": 1, "sessions": 2})
