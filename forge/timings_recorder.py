"""TimingsRecorder: reads a clock at the plans and commits of requests that return timings.

Owns the open choices of these requests. Knows no socket and no format. While there are none it is
not among the engine's recorders, and costs nothing.

    submit ── add ──► plan: admitted, loads, preempted ──► commit: tokens ──► label: the last Delta
                      record_plan                          record_commit      has ChoiceTimings

Always true: a choice is dropped with its last Delta, which every submitted choice gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forge.recorder import Recorder
from forge.recorder_chain import RecorderChain
from forge.request import Delta, Request
from forge.scheduler import Scheduler
from forge.seam import StepOutput, StepPlan
from forge.sequence import Sequence as EngineSequence
from forge.timings import ChoiceTimings, TimedEvent


@dataclass(slots=True)
class _OpenChoice:
    """Times of a choice so far. Owned by the TimingsRecorder.

    sequence   None until it is admitted
    """

    arrival_s: float
    sequence: EngineSequence | None = None
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    events: list[TimedEvent] = field(default_factory=list)

    def finish(self) -> ChoiceTimings:
        """Return its times, once it has ended."""
        return ChoiceTimings(
            self.arrival_s,
            self.first_step_s,
            self.first_token_s,
            self.last_token_s,
            self.num_preemptions,
            0 if self.sequence is None else self.sequence.num_recomputed,
            tuple(self.events),
        )


class TimingsRecorder(Recorder):
    """Times the choices of the requests that are added, until they end.

    clock   seconds, on the clock of the requests' arrivals
    """

    def __init__(
        self, scheduler: Scheduler, recorders: RecorderChain, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._recorders = recorders
        self._clock = clock
        self._choices: dict[tuple[int, int], _OpenChoice] = {}

    def add(self, request: Request, arrival_s: float) -> None:
        """Time a request that was submitted, if it returns timings."""
        if not request.return_timings:
            return
        if not self._choices:
            self._recorders.add(self)
        for choice in range(request.params.n):
            self._choices[request.id, choice] = _OpenChoice(arrival_s)

    def record_plan(self, plan: StepPlan | None) -> None:
        """Note the changes of timed choices in the plan."""
        if plan is None or not (plan.admitted or plan.preempted or plan.loads):
            return
        now_s = self._clock()
        for seq_id, why in plan.preempted:
            if (choice := self._find(seq_id)) is not None:
                choice.num_preemptions += 1
                choice.events.append(TimedEvent(now_s, "preempted", why))
        for seq_id, why in plan.admitted:
            if (choice := self._find(seq_id)) is not None:
                choice.sequence = self._scheduler.sequences[seq_id]
                if choice.first_step_s is None:
                    choice.first_step_s = now_s
                choice.events.append(TimedEvent(now_s, "admitted", why))
        for seq_id, count in Counter(load.seq_id for load in plan.loads).items():
            if (choice := self._find(seq_id)) is not None:
                choice.events.append(TimedEvent(now_s, "load", f"{count} blocks"))

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Note the time of the tokens of timed choices."""
        now_s, choices = self._clock(), self._choices
        for delta in deltas:
            if delta.tokens:
                choice = choices.get((delta.request_id, delta.choice))
                if choice is not None:
                    if choice.first_token_s is None:
                        choice.first_token_s = now_s
                    choice.last_token_s = now_s

    def label(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Return the deltas, the last one of each timed choice with its times."""
        return [self._label(delta) for delta in deltas] if self._choices else deltas

    def _label(self, delta: Delta) -> Delta:
        if delta.finish is None:
            return delta
        choice = self._choices.pop((delta.request_id, delta.choice), None)
        if choice is None:
            return delta
        if not self._choices:
            self._recorders.remove(self)
        return delta._replace(timings=choice.finish())

    def _find(self, seq_id: int) -> _OpenChoice | None:
        """Return the timed choice of this sequence, or None."""
        sequence = self._scheduler.sequences.get(seq_id)
        if sequence is None:
            return None
        return self._choices.get((sequence.request.id, sequence.choice))
