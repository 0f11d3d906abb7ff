"""World: an engine, a workload and a clock, driven event by event from one seed.

Owns the order of events. Knows no policy and no arithmetic: the engine is forge's own, its model is
a TimedModel. Between two steps everything that is due happens in one total order, as it does in
EngineLoop: (time, kind, number).

    events due ──► engine.submit / abort ──► engine.step() ──► tokens told at the clock's time ──►
        ▲                                                                                         │
        └───────────── arrivals that follow an answer ◄───────────────────────────────────────────┘

Same world, same log, byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from forge.engine import Engine
from forge.errors import ForgeError
from forge.request import Delta
from forge.sim.clock import VirtualClockStep
from forge.sim.metrics import NO_OBJECTIVE, LatencyObjective, RunMetrics
from forge.sim.workloads.workload import RequestArrival, Workload

DISCONNECT, ARRIVAL, CALLBACK = range(3)
"""Kinds of events, in the order in which they happen at one time."""


class ScheduledEvent(NamedTuple):
    """Something due at `at_ns`. Two events never compare equal: `sequence_number` counts them."""

    at_ns: int
    kind: int
    sequence_number: int
    payload: RequestArrival | int | Callable[[], None]


class WorldClock(Protocol):
    """A clock: virtual, or the machine's."""

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the world began."""
        ...

    def wait_until(self, time_ns: int) -> None:
        """It is `time_ns`, or later already."""
        ...


class ClockedModel(Protocol):
    """A model on a clock. `last_step` is the step that was committed last, where that is known."""

    last_step: VirtualClockStep | None

    @property
    def clock(self) -> WorldClock:
        """That of the world."""
        ...


class WorldObserver(Protocol):
    """Hears of everything that happens, in order."""

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """The request was submitted, or refused and why."""
        ...

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """The client has gone away."""
        ...

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """The engine has stepped; `step` is the one that was committed, if any."""
        ...


class World:
    """One run. What it has may be read at any time between two steps."""

    def __init__(
        self,
        engine: Engine,
        model: ClockedModel,
        workload: Workload,
        *observers: WorldObserver,
        objective: LatencyObjective = NO_OBJECTIVE,
    ) -> None:
        self.engine = engine
        self.clock = model.clock
        self.metrics = RunMetrics(objective)
        self.num_steps = 0
        self.model = model
        self._workload = workload
        self._observers = observers
        self._arrivals: Iterator[RequestArrival] = workload.arrivals()
        self._events: list[ScheduledEvent] = []
        self._num_events = self._last_arrival_ns = 0
        self._queue_next_arrival()

    def schedule(self, at_ns: int, callback: Callable[[], None]) -> None:
        """`callback` happens at `at_ns`, between two steps."""
        self._push_event(at_ns, CALLBACK, callback)

    def run(self) -> RunMetrics:
        """Nothing is left to do, nobody to come."""
        while self.step():
            pass
        return self.metrics

    @property
    def next_event_ns(self) -> int | None:
        """When the next event is due; None where nothing is to come but from the engine."""
        return self._events[0].at_ns if self._events else None

    def step(self) -> bool:
        """What is due has happened, and the engine has stepped once. False: all is over."""
        self.process_events()
        return self.step_engine()

    def step_engine(self) -> bool:
        """As `step`, where what is due has happened."""
        engine = self.engine
        if not engine.has_work:
            if not self._events:
                return False
            self.clock.wait_until(self._events[0].at_ns)
            return True
        self.model.last_step = None
        deltas = engine.step()
        self.num_steps += 1
        now_ns = self.clock.now_ns
        for observer in self._observers:
            observer.on_step(self.model.last_step, deltas, now_ns)
        self.record_deltas(deltas, now_ns)
        return True

    def record_deltas(self, deltas: list[Delta], now_ns: int) -> None:
        """The deltas are in the measures; who waited for one of them may ask again."""
        measures = self.metrics
        measures.record_deltas(deltas, now_ns)
        for delta in deltas:
            if delta.finish is not None and measures.record_finish(
                delta.request_id, now_ns, delta.finish.value
            ):
                for arrival in self._workload.follow_up_arrivals(delta.request_id, now_ns):
                    self._push_event(arrival.at_ns, ARRIVAL, arrival)

    def process_events(self) -> None:
        """Everything due by now has happened."""
        events, now_ns = self._events, self.clock.now_ns
        while events and events[0].at_ns <= now_ns:
            payload = heapq.heappop(events).payload
            if isinstance(payload, RequestArrival):
                self._submit(payload)
            elif isinstance(payload, int):
                self.engine.abort(payload)
                for watcher in self._observers:
                    watcher.on_disconnect(payload, self.clock.now_ns)  # a jump may have come before
            else:
                payload()

    def _submit(self, arrival: RequestArrival) -> None:
        """It counts from when it came, though a step was under way."""
        request = arrival.request
        refusal = None
        try:
            self.engine.submit(request)
        except ForgeError as error:
            refusal = str(error)
            # What is asked without a limit is refused for its prompt.
            tokens = len(request.prompt) + (request.params.max_tokens or 0)
            self.metrics.record_refusal(arrival.at_ns, type(error).__name__, tokens, refusal)
        else:
            labels = request.priority, request.cache_salt
            self.metrics.record_arrival(request.id, arrival.at_ns, request.params.n, *labels)
            if arrival.disconnect_ns is not None:
                self._push_event(arrival.disconnect_ns, DISCONNECT, request.id)
        for watcher in self._observers:
            watcher.on_arrival(arrival, self.clock.now_ns, refusal)
        self._queue_next_arrival()

    def _queue_next_arrival(self) -> None:
        """The next arrival of the open loop is among the events."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            assert arrival.at_ns >= self._last_arrival_ns, (
                f"request {arrival.request.id} comes too late"
            )
            self._last_arrival_ns = arrival.at_ns
            self._push_event(arrival.at_ns, ARRIVAL, arrival)

    def _push_event(
        self, at_ns: int, kind: int, payload: RequestArrival | int | Callable[[], None]
    ) -> None:
        heapq.heappush(self._events, ScheduledEvent(at_ns, kind, self._num_events, payload))
        self._num_events += 1
