"""World: an engine, a workload and a clock, driven event by event from one seed.

Owns the order of events. Knows no policy and no arithmetic: the engine is that of forge, its model
is a VirtualClockModel. Between two steps all due events happen in one total order, as they do in
EngineLoop: (time, kind, number).

    events due ──► engine.submit / abort ──► engine.step() ──► deltas at the time of the clock ──►
        ▲                                                                                         │
        └───────────── arrivals that follow an answer ◄───────────────────────────────────────────┘

Always true: equal worlds write equal logs, byte for byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from forge.engine import Engine
from forge.errors import ForgeError
from forge.request import Delta
from forge.sessions import SessionKey
from forge.sim.clock import VirtualClockStep
from forge.sim.metrics import NO_OBJECTIVE, LatencyObjective, RunMetrics
from forge.sim.session_metrics import SessionMetrics
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import RequestArrival, Workload

DISCONNECT, ARRIVAL, EXPIRY, CALLBACK = range(4)
"""Kinds of events, in the order in which they happen at equal times."""


class SessionExpiry(NamedTuple):
    """A paused session expires, unless it has had another turn by then."""

    key: SessionKey
    last_turn: int


class ScheduledEvent(NamedTuple):
    """An event that is due at `at_ns`.

    `sequence_number` is unique, so two events never compare equal.
    """

    at_ns: int
    kind: int
    sequence_number: int
    payload: RequestArrival | int | SessionExpiry | Callable[[], None]


class WorldClock(Protocol):
    """A virtual clock, or that of the machine."""

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the start of the world."""
        ...

    def wait_until(self, time_ns: int) -> None:
        """Wait until `time_ns`; return at once if it has passed."""
        ...


class ClockedModel(Protocol):
    """A model on a clock. `last_step` is the last committed step, or None where it is unknown."""

    last_step: VirtualClockStep | None

    @property
    def clock(self) -> WorldClock:
        """The clock of the world."""
        ...


class WorldObserver(Protocol):
    """Receives every event of a world, in order."""

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Handle a submitted request. `refusal` is the error text where it was refused."""
        ...

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Handle a client that disconnected before its request ended."""
        ...

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Handle a step of the engine. `step` is the one that was committed, if any."""
        ...


class World:
    """A run. Its attributes may be read between two steps."""

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
        self.sessions = SessionMetrics()
        self.num_steps = 0
        self.model = model
        self._workload = workload
        self._observers = observers
        self._arrivals: Iterator[RequestArrival] = workload.arrivals()
        self._events: list[ScheduledEvent] = []
        self._num_events = self._last_arrival_ns = 0
        self._queue_next_arrival()

    def schedule(self, at_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` at `at_ns`, between two steps."""
        self._push_event(at_ns, CALLBACK, callback)

    def run(self) -> RunMetrics:
        """Step until the engine has no work and no event is left."""
        while self.step():
            pass
        return self.metrics

    @property
    def next_event_ns(self) -> int | None:
        """Time of the next event, or None where no event is queued."""
        return self._events[0].at_ns if self._events else None

    def step(self) -> bool:
        """Process due events and step the engine once. Returns False when nothing is left to do."""
        self.process_events()
        return self.step_engine()

    def step_engine(self) -> bool:
        """Step the engine, or wait for the next event. Returns False when nothing is left to do.

        Due events have been processed.
        """
        engine = self.engine
        if not engine.can_step:
            if not self._events:
                assert not engine.has_work, "requests wait for a session that never expires"
                return False
            self.clock.wait_until(self._events[0].at_ns)
            return True
        self.model.last_step = None
        deltas = engine.step()
        self.num_steps += 1
        self.sessions.record_admissions(engine.scheduler.new_request_ids)
        now_ns = self.clock.now_ns
        for observer in self._observers:
            observer.on_step(self.model.last_step, deltas, now_ns)
        self.record_deltas(deltas, now_ns)
        self.queue_expiries(now_ns)
        return True

    def queue_expiries(self, now_ns: int) -> None:
        """Queue the expiry of each session that has paused since the last call."""
        ttl_s = self.engine.config.session_ttl_s
        for session in self.engine.scheduler.take_paused_sessions():
            at_ns = now_ns + round(NS_PER_S * session.time_to_live_s(ttl_s))
            self._push_event(at_ns, EXPIRY, SessionExpiry(session.key, session.last_turn))

    def record_deltas(self, deltas: list[Delta], now_ns: int) -> None:
        """Record the deltas in the metrics, and queue the arrivals that follow an answer."""
        measures = self.metrics
        measures.record_deltas(deltas, now_ns)
        for delta in deltas:
            if delta.finish is not None and measures.record_finish(
                delta.request_id, now_ns, delta.finish.value
            ):
                self.sessions.record_finish(delta.request_id, now_ns)
                for arrival in self._workload.follow_up_arrivals(delta.request_id, now_ns):
                    self._push_event(arrival.at_ns, ARRIVAL, arrival)

    def process_events(self) -> None:
        """Process all events that are due now."""
        events, now_ns = self._events, self.clock.now_ns
        while events and events[0].at_ns <= now_ns:
            payload = heapq.heappop(events).payload
            if isinstance(payload, RequestArrival):
                self._submit(payload)
            elif isinstance(payload, SessionExpiry):
                self.engine.expire_session(*payload)
            elif isinstance(payload, int):
                self.engine.abort(payload)
                for observer in self._observers:
                    # Read again: a callback may have advanced the clock.
                    observer.on_disconnect(payload, self.clock.now_ns)
                self.queue_expiries(now_ns)
            else:
                payload()

    def _submit(self, arrival: RequestArrival) -> None:
        """Submit a request.

        Its latency counts from its arrival, even if a step was in progress then.
        """
        request = arrival.request
        refusal = None
        try:
            self.engine.submit(request)
        except ForgeError as error:
            refusal = str(error)
            # A request without a limit was refused for its prompt.
            tokens = len(request.prompt) + (request.params.max_tokens or 0)
            self.metrics.record_refusal(arrival.at_ns, type(error).__name__, tokens, refusal)
        else:
            labels = request.priority, request.cache_salt
            self.metrics.record_arrival(request.id, arrival.at_ns, request.params.n, *labels)
            if arrival.session is not None:
                hashes = self.engine.scheduler.requests[request.id][0].hashes
                self.sessions.record_arrival(
                    arrival.session, request.cache_salt, request.id, arrival.at_ns, hashes
                )
            if arrival.disconnect_ns is not None:
                self._push_event(arrival.disconnect_ns, DISCONNECT, request.id)
        for observer in self._observers:
            observer.on_arrival(arrival, self.clock.now_ns, refusal)
        self._queue_next_arrival()

    def _queue_next_arrival(self) -> None:
        """Queue the next arrival of the workload."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            assert arrival.at_ns >= self._last_arrival_ns, (
                f"request {arrival.request.id} comes too late"
            )
            self._last_arrival_ns = arrival.at_ns
            self._push_event(arrival.at_ns, ARRIVAL, arrival)

    def _push_event(
        self,
        at_ns: int,
        kind: int,
        payload: RequestArrival | int | SessionExpiry | Callable[[], None],
    ) -> None:
        heapq.heappush(self._events, ScheduledEvent(at_ns, kind, self._num_events, payload))
        self._num_events += 1
