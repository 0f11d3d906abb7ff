"""Sessions of agents on a server: each turn is sent after its pause, and its times are noted.

Owns the closed loop of sessions, where answers come from, and what the figures mean. Knows no draw:
the sessions are a workload of the simulator (sim/workloads/agents.py), on a wall clock here.

    agent 1   POST ─► ..... [DONE]  tool   POST ─► .. [DONE]  tool  POST ─►   session 0
    agent 2   POST ─► ........ [DONE]    tool     POST ─► ... [DONE]          session 1, then 2
              ▲due     ▲first token
              └────────── completion time of a session: to the end of its last turn ──────────►

Latency counts from the time at which a turn was due, as in an open loop: a late client is late for
that turn. A failed turn ends its session, and no other session starts in its place.

Jain's index is (sum x)^2 / (n sum x^2) over the mean turn latencies x of sessions: 1 where all are
equal, 1 / n where one has all of it (Jain, Chiu and Hawe, 1984).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from forge.bench.http_client import ConnectionPool, Endpoint, StreamedResponse
from forge.bench.load_generator import MAX_TRIES, RETRY_DELAY_S
from forge.bench.workload import quantile
from forge.errors import RequestFailed
from forge.request import Request
from forge.sampling import mix
from forge.sim.length_model import FILLER_TOKEN
from forge.sim.session_metrics import jain_index
from forge.sim.units import NS_PER_S
from forge.sim.workloads.agents import filler_answer
from forge.sim.workloads.workload import RequestArrival, Workload

LATENCY_KEYS = (
    *("ttft_first_p50", "ttft_first_p99", "ttft_later_p50", "ttft_later_p99"),
    *("latency_p50", "latency_p99"),
)
"""Figures in ms of served turns. First: the first turn of a session; later: all others."""


class AnswerSource(Protocol):
    """The source of the answers that become part of the next prompt.

    fields   fields of each request that it needs
    """

    fields: Mapping[str, Any]

    def get_answer(self, request_id: int, num_tokens: int) -> Sequence[int]:
        """Return the answer to a request that was served: the `get_answer` of AgentSessions."""
        ...

    def record(self, request_id: int, response: StreamedResponse) -> None:
        """Keep what `get_answer` needs of a response. Raises RequestFailed."""
        ...


class FixedAnswers:
    """Answers that are known in advance: FILLER_TOKEN is the only token that may be sampled.

    So the prompts of a run are the same on every server and in the simulator.
    """

    fields: Mapping[str, Any] = {"allowed_token_ids": [FILLER_TOKEN]}

    def get_answer(self, request_id: int, num_tokens: int) -> Sequence[int]:
        return filler_answer(request_id, num_tokens)

    def record(self, request_id: int, response: StreamedResponse) -> None:
        """Do nothing: the tokens are known."""


class ReturnedAnswers:
    """Answers of the model, for servers that stream token ids, as vLLM does.

    vocab_size   bound of the ids of prompts; those of answers must be below it too
    """

    fields: Mapping[str, Any] = {"return_token_ids": True}

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._answers: dict[int, list[int]] = {}

    def get_answer(self, request_id: int, num_tokens: int) -> Sequence[int]:
        return self._answers.pop(request_id)

    def record(self, request_id: int, response: StreamedResponse) -> None:
        tokens = response.token_ids()
        if max(tokens, default=0) >= self._vocab_size:
            raise RequestFailed(
                f"an answer has token {max(tokens)}, at or above the vocabulary size of "
                f"{self._vocab_size}. Give --vocab-size of the model"
            )
        self._answers[request_id] = tokens


class PromptMapper:
    """Prompts with all tokens below `vocab_size`, equal to those of VocabularyWorkload.

    A turn repeats the context of the turn before it. Only what follows it is mapped: a long prompt
    takes too long between two events of other streams.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._contexts: dict[int, tuple[Sequence[int], list[int]]] = {}

    def map(self, session: int, prompt: Sequence[int]) -> list[int]:
        """Return the mapped prompt of the session's next turn."""
        context, mapped = self._contexts.get(session, ((), []))
        if prompt[: len(context)] != context:
            context, mapped = (), []
        size = self._vocab_size
        mapped = [
            *mapped,
            *(t if t < size else 1 + mix(t) % (size - 1) for t in prompt[len(context) :]),
        ]
        self._contexts[session] = prompt, mapped
        return mapped

    def forget(self, session: int) -> None:
        """Forget the context of a session that has ended."""
        self._contexts.pop(session, None)


class Turn(NamedTuple):
    """A turn that was served, times in seconds after the start of the run.

    session, turn       numbers of its session, and of the turn in it, from 0
    due_s               when it was due
    sent_s              when it was first sent
    first_s, end_s      first and last piece of output
    num_cached_tokens   prompt tokens found in the cache; None where the server does not report them
    num_loaded_tokens   those of them that came from host memory or files
    """

    session: int
    turn: int
    due_s: float
    sent_s: float
    first_s: float
    end_s: float
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int | None = None
    num_loaded_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first piece of output."""
        return 1e3 * (self.first_s - self.due_s)

    @property
    def latency_ms(self) -> float:
        """Time to the last piece of output."""
        return 1e3 * (self.end_s - self.due_s)


class SessionRun(NamedTuple):
    """The result of a load.

    turns          served turns, in order of their ends
    errors         session -> why a turn of it failed
    num_rejected   answers of 429 or 503
    """

    turns: list[Turn]
    errors: dict[int, str]
    num_rejected: int


class SessionClient:
    """Turns of a workload on a server.

    turn_of           request id -> session and turn
    session_fields    request id -> fields that describe its session to the server
    retry_delay_s     pause after a rejection
    """

    def __init__(
        self,
        server: Endpoint,
        workload: Workload,
        answers: AnswerSource,
        vocab_size: int,
        turn_of: Callable[[int], tuple[int, int]],
        session_fields: Callable[[int], Mapping[str, Any]],
        retry_delay_s: float = RETRY_DELAY_S,
    ) -> None:
        self._server = server
        self._workload = workload
        self._answers = answers
        self._turn_of = turn_of
        self._session_fields = session_fields
        self._retry_delay_s = retry_delay_s
        self._prompts = PromptMapper(vocab_size)
        self._pool = ConnectionPool(server)
        self._turns: list[Turn] = []
        self._errors: dict[int, str] = {}
        self._num_rejected = 0
        self._start_s = 0.0

    async def run(self) -> SessionRun:
        """Send all turns. Returns after the end of the last one."""
        self._start_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for arrival in self._workload.arrivals():
                    group.create_task(self._run_turn(arrival, group))
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        finally:
            self._pool.close()
        return SessionRun(self._turns, self._errors, self._num_rejected)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def _run_turn(self, arrival: RequestArrival, group: asyncio.TaskGroup) -> None:
        """Send a turn when it is due, and start the turns that follow it."""
        request, due_s = arrival.request, arrival.at_ns / NS_PER_S
        session, turn = self._turn_of(request.id)
        message = self._build_message(session, request)
        await asyncio.sleep(max(0.0, due_s - self._now_s()))
        sent_s = self._now_s()
        try:
            response = await self._send_until_served(message)
            self._check_complete(request, response)
            self._answers.record(request.id, response)
        except RequestFailed as error:
            self._errors[session] = f"turn {turn}: {error}"
            self._prompts.forget(session)
            return
        self._turns.append(
            Turn(
                session,
                turn,
                due_s,
                sent_s,
                response.chunk_times_s[0] - self._start_s,
                response.chunk_times_s[-1] - self._start_s,
                len(request.prompt),
                response.num_tokens,
                response.num_cached_tokens,
                response.num_loaded_tokens,
            )
        )
        followers = tuple(
            self._workload.follow_up_arrivals(request.id, round(self._now_s() * NS_PER_S))
        )
        if all(self._turn_of(each.request.id)[0] != session for each in followers):
            self._prompts.forget(session)
        for each in followers:
            group.create_task(self._run_turn(each, group))

    def _build_message(self, session: int, request: Request) -> bytes:
        num_tokens = request.params.max_tokens
        assert num_tokens is not None, "the length of an answer is fixed"
        fields = {**self._answers.fields, **self._session_fields(request.id)}
        prompt = self._prompts.map(session, request.prompt)
        return self._server.build_request(prompt, num_tokens, fields)

    async def _send_until_served(self, message: bytes) -> StreamedResponse:
        for _ in range(MAX_TRIES):
            connection = await self._pool.acquire()
            response = await connection.send(message)
            self._pool.release(connection)
            if not response.is_rejected:
                return response
            self._num_rejected += 1
            await asyncio.sleep(self._retry_delay_s)
        raise RequestFailed(f"rejected {MAX_TRIES} times, every {self._retry_delay_s:g} s")

    def _check_complete(self, request: Request, response: StreamedResponse) -> None:
        count, expected = response.num_tokens, request.params.max_tokens
        if count != expected or not response.chunk_times_s:
            raise RequestFailed(f"the stream ended after {count} tokens of {expected}")


def session_figures(run: SessionRun) -> dict[str, Any]:
    """Return the figures of a load, those of no sample as None.

    makespan_s         from the due time of the first turn to the end of the last
    session_mean_s     from the due time of a session's first turn to the end of its last; sessions
                       with an error are left out
    prompt_tokens, cached_tokens, loaded_tokens   sums over served turns
    late_p99           ms from due to sent. Where it is not small compared with the latencies, they
                       measure the client
    """
    by_session = sorted(run.turns)
    sessions = [list(turns) for _, turns in groupby(by_session, lambda turn: turn.session)]
    complete = [turns for turns in sessions if turns[0].session not in run.errors]
    durations_s = [turns[-1].end_s - turns[0].due_s for turns in complete]
    first = [each.ttft_ms for each in run.turns if not each.turn]
    later = [each.ttft_ms for each in run.turns if each.turn]
    latency = [turn.latency_ms for turn in run.turns]
    lateness = [1e3 * (turn.sent_s - turn.due_s) for turn in run.turns]
    means = [statistics.mean(turn.latency_ms for turn in turns) for turns in complete]
    cached = [turn.num_cached_tokens for turn in run.turns if turn.num_cached_tokens is not None]
    num_tokens = sum(turn.num_tokens for turn in run.turns)
    begin_s = min((turn.due_s for turn in run.turns), default=0.0)
    makespan_s = max((turn.end_s for turn in run.turns), default=0.0) - begin_s
    samples = (first, later, latency)
    return {
        "sessions": len(complete),
        "errors": len(run.errors),
        "rejected": run.num_rejected,
        "turns": len(run.turns),
        "makespan_s": round(makespan_s, 3),
        "turns_s": round(len(run.turns) / makespan_s, 4) if makespan_s else 0.0,
        "session_mean_s": round(statistics.mean(durations_s), 3) if durations_s else None,
        "session_p99_s": round(quantile(durations_s, 0.99), 3) if durations_s else None,
        **dict(zip(LATENCY_KEYS, _medians_and_p99s(samples), strict=True)),
        "late_p99": round(quantile(lateness, 0.99), 2) if lateness else None,
        "tok_s": round(num_tokens / makespan_s, 1) if makespan_s else 0.0,
        "prompt_tokens": sum(turn.num_prompt_tokens for turn in run.turns),
        "cached_tokens": sum(cached) if cached else None,
        "loaded_tokens": sum(turn.num_loaded_tokens for turn in run.turns),
        "jain": round(jain_index(means), 4) if means else None,
    }


def _medians_and_p99s(samples: Sequence[Sequence[float]]) -> list[float | None]:
    figures: list[float | None] = []
    for each in samples:
        figures += [round(statistics.median(each), 2) if each else None]
        figures += [round(quantile(each, 0.99), 2) if each else None]
    return figures
