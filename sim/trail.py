"""Trail: what a run did, kept for pictures.

Owns what pictures need: steps, spans and requests. Knows no picture. Memory grows with the run,
which is why nobody keeps a trail who does not draw.

    request 7   arrived ....... [prompt][prompt][ token token token ]   preempted   [ again ][ token
                 waiting         span           span                    mark         span
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forge.engine import Engine
from forge.request import Delta
from forge.seam import Row
from sim.clock import TimedStep
from sim.workload import Arrival

PROMPT, TOKEN, DRAFTS, AGAIN = KINDS = ("prompt", "token", "drafts", "again")
"""What a row computes: a part of a prompt, one more token, a token and drafts behind it, or what
was computed before and lost."""


def kind_of(row: Row, prompt: int) -> str:
    """One of KINDS.

    prompt   tokens of the request's prompt
    """
    if row.drafts:
        return DRAFTS
    if row.num_samples == 1 and row.end - row.start == 1 and row.start >= prompt:
        return TOKEN
    return AGAIN if row.epoch else PROMPT


class Seen(NamedTuple):
    """A step that was committed.

    tokens        computed, by KINDS
    used_blocks   held by sequences when it was told
    num_waiting   requests in line then
    """

    step: int
    begin_ns: int
    end_ns: int
    told_ns: int
    tokens: tuple[int, ...]
    num_rows: int
    used_blocks: int
    num_waiting: int


@dataclass(slots=True)
class Span:
    """Rows of one sequence of one kind in steps that follow each other."""

    request_id: int
    slot: int
    kind: str
    begin_ns: int
    end_ns: int
    step: int
    num_steps: int
    num_tokens: int


@dataclass(slots=True)
class Life:
    """A request, from its arrival to its end; -1 where that has not happened."""

    arrived_ns: int
    prompt: int
    first_ns: int = -1
    ended_ns: int = -1
    num_tokens: int = 0
    finish: str = ""


class Mark(NamedTuple):
    """Something that happened to a request at one time, and why."""

    at_ns: int
    what: str
    request_id: int
    why: str


class Trail:
    """A Watcher that keeps what it hears.

    num_blocks   of the cache
    """

    def __init__(self, engine: Engine) -> None:
        self.num_blocks = engine.config.num_blocks
        self.steps: list[Seen] = []
        self.spans: list[Span] = []
        self.lives: dict[int, Life] = {}
        self.marks: list[Mark] = []
        self._scheduler = engine.scheduler
        self._request_of: dict[int, int] = {}
        self._open: dict[int, Span] = {}

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """The request has a life, or a mark that says why not."""
        request = arrival.request
        if refused is not None:
            self.marks.append(Mark(now_ns, "refused", request.id, refused))
            return
        self.lives[request.id] = Life(arrival.at_ns, len(request.prompt))
        for sequence in self._scheduler.requests.get(request.id, ()):
            self._request_of[sequence.id] = request.id

    def left(self, request_id: int, now_ns: int) -> None:
        """A mark."""
        self.marks.append(Mark(now_ns, "left", request_id, "its client went away"))

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        """The step, its rows and what requests gained are kept."""
        if step is not None:
            self._compute(step, now_ns)
        for delta in deltas:
            life = self.lives[delta.request_id]
            if delta.tokens and life.first_ns < 0:
                life.first_ns = now_ns
            life.num_tokens += len(delta.tokens)
            if delta.finish is not None:
                life.ended_ns, life.finish = now_ns, delta.finish.value

    def _compute(self, step: TimedStep, now_ns: int) -> None:
        plan, tokens = step.plan, dict.fromkeys(KINDS, 0)
        for event in plan.preempted:
            request_id = self._request_of[event.seq_id]
            self.marks.append(Mark(step.begin_ns, "preempted", request_id, event.why))
        for row in plan.rows:
            request_id, span = self._request_of[row.seq_id], self._open.get(row.slot)
            kind, count = kind_of(row, self.lives[request_id].prompt), row.end - row.start
            tokens[kind] += count
            follows = span is not None and span.step + span.num_steps == plan.step
            if span is not None and follows and (span.request_id, span.kind) == (request_id, kind):
                span.end_ns = step.end_ns
                span.num_steps += 1
                span.num_tokens += count
                continue
            span = Span(request_id, row.slot, kind, step.begin_ns, step.end_ns, plan.step, 1, count)
            self._open[row.slot] = span
            self.spans.append(span)
        self.steps.append(
            Seen(
                plan.step,
                step.begin_ns,
                step.end_ns,
                now_ns,
                tuple(tokens.values()),
                len(plan.rows),
                self._scheduler.pool.used,
                len(self._scheduler.waiting),
            )
        )
