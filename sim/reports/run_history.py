"""Run history: the steps, spans and requests of a run, kept for plots and traces.

Owns the data of plots. Knows no plot. Memory grows with the run, so only runs that are plotted or
traced have a history.

    request 7   arrived ....... [prompt][prompt][ token token token ]   preempted   [ again ][ token
                 waiting         span           span                    event        span
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forge.engine import Engine
from forge.request import Delta
from forge.seam import Row
from forge.sim.clock import VirtualClockStep
from forge.sim.workloads.workload import RequestArrival

PREFILL, DECODE, VERIFY, RECOMPUTE = KINDS = ("prompt", "token", "drafts", "again")
"""Kinds of rows: a chunk of a prompt, a decode token, a token with drafts to verify, and tokens
recomputed after a preemption.
"""


def row_kind(row: Row, prompt_len: int) -> str:
    """Return the kind of a row.

    prompt_len   tokens of the prompt of its request
    """
    if row.drafts:
        return VERIFY
    if row.num_samples == 1 and row.end - row.start == 1 and row.start >= prompt_len:
        return DECODE
    return RECOMPUTE if row.epoch else PREFILL


class StepRecord(NamedTuple):
    """A committed step.

    tokens        computed tokens of each of KINDS
    used_blocks   blocks held by sequences after the commit
    num_waiting   requests in the queue after the commit
    """

    step: int
    begin_ns: int
    end_ns: int
    commit_time_ns: int
    tokens: tuple[int, ...]
    num_rows: int
    used_blocks: int
    num_waiting: int


@dataclass(slots=True)
class ComputeSpan:
    """Consecutive rows of one sequence and one kind."""

    request_id: int
    slot: int
    kind: str
    begin_ns: int
    end_ns: int
    step: int
    num_steps: int
    num_tokens: int


@dataclass(slots=True)
class RequestTimeline:
    """A request from its arrival to its end. Times are -1 until they are known."""

    arrival_ns: int
    prompt_len: int
    first_token_ns: int = -1
    finish_ns: int = -1
    num_tokens: int = 0
    finish: str = ""


class PointEvent(NamedTuple):
    """An event of a request at one time, and its reason."""

    at_ns: int
    what: str
    request_id: int
    why: str


class RunHistory:
    """A WorldObserver that stores what it receives.

    num_blocks   blocks of the cache
    """

    def __init__(self, engine: Engine) -> None:
        self.num_blocks = engine.config.num_blocks
        self.steps: list[StepRecord] = []
        self.spans: list[ComputeSpan] = []
        self.timelines: dict[int, RequestTimeline] = {}
        self.events: list[PointEvent] = []
        self._scheduler = engine.scheduler
        self._request_of: dict[int, int] = {}
        self._open_spans: dict[int, ComputeSpan] = {}

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Start the timeline of the request, or add an event with the refusal."""
        request = arrival.request
        if refusal is not None:
            self.events.append(PointEvent(now_ns, "refused", request.id, refusal))
            return
        self.timelines[request.id] = RequestTimeline(arrival.at_ns, len(request.prompt))
        for sequence in self._scheduler.requests.get(request.id, ()):
            self._request_of[sequence.id] = request.id

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Add an event."""
        self.events.append(PointEvent(now_ns, "left", request_id, "its client went away"))

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Add the step, its rows and the tokens of requests."""
        if step is not None:
            self._record_step(step, now_ns)
        for delta in deltas:
            timeline = self.timelines[delta.request_id]
            if delta.tokens and timeline.first_token_ns < 0:
                timeline.first_token_ns = now_ns
            timeline.num_tokens += len(delta.tokens)
            if delta.finish is not None:
                timeline.finish_ns, timeline.finish = now_ns, delta.finish.value

    def _record_step(self, step: VirtualClockStep, now_ns: int) -> None:
        plan, tokens = step.plan, dict.fromkeys(KINDS, 0)
        for event in plan.preempted:
            request_id = self._request_of[event.seq_id]
            self.events.append(PointEvent(step.begin_ns, "preempted", request_id, event.why))
        for row in plan.rows:
            request_id, span = self._request_of[row.seq_id], self._open_spans.get(row.slot)
            kind, count = row_kind(row, self.timelines[request_id].prompt_len), row.end - row.start
            tokens[kind] += count
            is_contiguous = span is not None and span.step + span.num_steps == plan.step
            if (
                span is not None
                and is_contiguous
                and (span.request_id, span.kind) == (request_id, kind)
            ):
                span.end_ns = step.end_ns
                span.num_steps += 1
                span.num_tokens += count
                continue
            span = ComputeSpan(
                request_id, row.slot, kind, step.begin_ns, step.end_ns, plan.step, 1, count
            )
            self._open_spans[row.slot] = span
            self.spans.append(span)
        self.steps.append(
            StepRecord(
                plan.step,
                step.begin_ns,
                step.end_ns,
                now_ns,
                tuple(tokens.values()),
                len(plan.rows),
                self._scheduler.pool.num_used_blocks,
                len(self._scheduler.waiting),
            )
        )
