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
from forge.sim.clock import VirtualClockStep
from forge.sim.workloads.workload import RequestArrival

PREFILL, DECODE, VERIFY, RECOMPUTE = KINDS = ("prompt", "token", "drafts", "again")
"""What a row computes: a part of a prompt, one more token, a token and drafts behind it, or what
was computed before and lost."""


def row_kind(row: Row, prompt_len: int) -> str:
    """One of KINDS.

    prompt_len   tokens of the request's prompt
    """
    if row.drafts:
        return VERIFY
    if row.num_samples == 1 and row.end - row.start == 1 and row.start >= prompt_len:
        return DECODE
    return RECOMPUTE if row.epoch else PREFILL


class StepRecord(NamedTuple):
    """A step that was committed.

    tokens        computed, by KINDS
    used_blocks   held by sequences when it was told
    num_waiting   requests in line then
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
class RequestTimeline:
    """A request, from its arrival to its end; -1 where that has not happened."""

    arrival_ns: int
    prompt_len: int
    first_token_ns: int = -1
    finish_ns: int = -1
    num_tokens: int = 0
    finish: str = ""


class PointEvent(NamedTuple):
    """Something that happened to a request at one time, and why."""

    at_ns: int
    what: str
    request_id: int
    why: str


class RunHistory:
    """A Watcher that keeps what it hears.

    num_blocks   of the cache
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
        """The request has a life, or a mark that says why not."""
        request = arrival.request
        if refusal is not None:
            self.events.append(PointEvent(now_ns, "refused", request.id, refusal))
            return
        self.timelines[request.id] = RequestTimeline(arrival.at_ns, len(request.prompt))
        for sequence in self._scheduler.requests.get(request.id, ()):
            self._request_of[sequence.id] = request.id

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """A mark."""
        self.events.append(PointEvent(now_ns, "left", request_id, "its client went away"))

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """The step, its rows and what requests gained are kept."""
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
