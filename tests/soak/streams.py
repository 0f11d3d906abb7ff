"""GoodStreams: clients that play conversations without end, and count what became of each request.

Owns the counts of one run. Each client has a connection and plays one turn after the other.

    turn ──► drawn to leave? ──┬── no:  its answer must be the expected one    completed or lost
                               └── yes: the client leaves at a random moment   left, or completed
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.server.http_wire import Address
from tests.soak.answers import Answer
from tests.soak.catalogue import Conversation, Turn
from tests.soak.connection import AnswerTimes, SoakConnection, TimedAnswer

TIMEOUT_S = 300.0
"""Seconds after which a request without an answer is lost."""
PAUSE_S = 1.0
"""Pause of a client while requests are lost: a server that has ended refuses them all at once."""
STREAM_SHARE = 0.8
MAX_FAULTS = 100
"""Most descriptions of lost requests; all are counted."""


class Behaviour(NamedTuple):
    """What the clients of a run do.

    leave_share   share of requests whose client leaves
    token_s       seconds of a token, of which the moments to leave are drawn
    """

    leave_share: float
    token_s: float


class StreamCounts:
    """Counts of good requests.

    lost      requests without the expected answer, described
    finished  choices of completed requests
    """

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()
        self.completed: Counter[str] = Counter()
        self.left = 0
        self.num_lost = 0
        self.lost: list[str] = []
        self.finished = 0
        self.prompt_tokens = 0
        self.output_tokens = 0

    def add_answer(self, turn: Turn) -> None:
        """Count a request with the expected answer."""
        self.completed[turn.path] += 1
        self.finished += turn.body.get("n", 1)
        self.prompt_tokens += turn.answer.prompt_tokens
        self.output_tokens += turn.answer.output_tokens

    def add_lost(self, turn: Turn, problem: str) -> None:
        """Count a request that was lost, and describe it."""
        self.num_lost += 1
        if len(self.lost) < MAX_FAULTS:
            self.lost.append(f"{turn.path}: {problem}")

    def find_faults(self) -> list[str]:
        """Return what is wrong: lost requests, and requests of which nothing is known."""
        faults = [f"lost: {each}" for each in self.lost[:10]]
        if self.num_lost:
            faults.append(f"{self.num_lost} good requests were lost")
        unknown = self.started.total() - self.completed.total() - self.left - self.num_lost
        if unknown:
            faults.append(f"{unknown} good requests have neither ended nor been left")
        return faults

    def figures(self) -> dict[str, Any]:
        """Return the counts for a record."""
        return {
            "started": self.started.total(),
            "completed": self.completed.total(),
            "completed_by_path": dict(sorted(self.completed.items())),
            "left": self.left,
            "lost": self.num_lost,
            "output_tokens": self.output_tokens,
        }


class GoodStreams:
    """The clients of one run, which share a catalogue.

    on_start    called when a request is sent
    on_answer   called with the times of each answer that is the expected one
    """

    def __init__(
        self,
        address: Address,
        key: str,
        catalogue: Sequence[Conversation],
        behaviour: Behaviour,
        seed: str,
        on_start: Callable[[], None] = lambda: None,
        on_answer: Callable[[AnswerTimes], None] = lambda times: None,
    ) -> None:
        self.counts = StreamCounts()
        self._address = address
        self._key = key
        self._catalogue = catalogue
        self._behaviour = behaviour
        self._seed = seed
        self._on_start = on_start
        self._on_answer = on_answer

    async def run(self, count: int, until_s: float, ramp_s: float) -> None:
        """Run so many clients until the time of time.monotonic; each ends its last request.

        ramp_s   seconds over which the clients start
        """
        clients = (
            self._run_client(index, until_s, ramp_s * index / count) for index in range(count)
        )
        await asyncio.gather(*clients)

    async def _run_client(self, index: int, until_s: float, delay_s: float) -> None:
        rng = Random(f"{self._seed} {index}")
        connection = SoakConnection(self._address, self._key)
        await asyncio.sleep(delay_s)
        num_plays = 0
        while time.monotonic() < until_s:
            fields = {"session_id": f"{self._seed}-{index}-{num_plays}".replace(" ", "-")}
            if rng.random() < 0.5:
                fields["cache_salt"] = f"{index}-{num_plays}"
            num_plays += 1
            num_lost = self.counts.num_lost
            await self.play(connection, rng, rng.choice(self._catalogue), fields, until_s)
            if self.counts.num_lost > num_lost:
                await asyncio.sleep(PAUSE_S)
            if rng.random() < 0.05:
                await connection.close()
        await connection.close()

    async def play(
        self,
        connection: SoakConnection,
        rng: Random,
        conversation: Conversation,
        fields: dict[str, Any],
        until_s: float,
    ) -> None:
        """Play the turns of a conversation until one has no answer."""
        previous_id = ""
        for number, turn in enumerate(conversation):
            if number and time.monotonic() >= until_s:
                return
            sent = {**fields, "stream": rng.random() < STREAM_SHARE}
            if number == len(conversation) - 1 and rng.random() < 0.5:
                sent["session_end"] = True
            timed = await self._request(connection, rng, turn, turn.encode(sent, previous_id))
            if timed is None:
                return
            previous_id = timed.response_id

    async def _request(
        self, connection: SoakConnection, rng: Random, turn: Turn, body: bytes
    ) -> TimedAnswer | None:
        """Send one request. Return its answer, or None where there is none."""
        leaves = rng.random() < self._behaviour.leave_share
        num_tokens = turn.answer.output_tokens / turn.body.get("n", 1)
        leave_s = rng.random() * num_tokens * self._behaviour.token_s
        self._on_start()
        self.counts.started[turn.path] += 1
        try:
            async with asyncio.timeout(leave_s if leaves else TIMEOUT_S):
                timed = await connection.request(turn.path, body)
        except TimeoutError:
            await connection.close()
            if leaves:
                self.counts.left += 1
            else:
                self.counts.add_lost(turn, f"no answer within {TIMEOUT_S:g} s")
            return None
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            await connection.close()
            self.counts.add_lost(turn, repr(error))
            return None
        if timed.answer != turn.answer:
            self.counts.add_lost(turn, describe_difference(timed.answer, turn.answer))
            return None
        self.counts.add_answer(turn)
        self._on_answer(timed.times)
        return timed


def describe_difference(found: Answer, expected: Answer) -> str:
    """Return the fields of an answer that are not the expected ones."""
    return "; ".join(
        f"{name} is {str(got)[:200]!r} instead of {str(wanted)[:200]!r}"
        for name, got, wanted in zip(Answer._fields, found, expected, strict=True)
        if got != wanted
    )
