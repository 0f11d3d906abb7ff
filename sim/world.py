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
from sim.clock import TimedStep
from sim.measures import SERVED_AT_ALL, Measures, Objective
from sim.workload import Arrival, Workload

LEAVES, ARRIVES, FAULT = range(3)
"""Kinds of events, in the order in which they happen at one time."""


class Event(NamedTuple):
    """Something due at `at_ns`. Two events never compare equal: `number` counts them."""

    at_ns: int
    kind: int
    number: int
    what: Arrival | int | Callable[[], None]


class Hands(Protocol):
    """A clock: virtual, or the machine's."""

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the world began."""
        ...

    def reach(self, time_ns: int) -> None:
        """It is `time_ns`, or later already."""
        ...


class Timed(Protocol):
    """A model on a clock. `last` is the step that was committed last, where that is known."""

    last: TimedStep | None

    @property
    def clock(self) -> Hands:
        """That of the world."""
        ...


class Watcher(Protocol):
    """Hears of everything that happens, in order."""

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """The request was submitted, or refused and why."""
        ...

    def left(self, request_id: int, now_ns: int) -> None:
        """The client has gone away."""
        ...

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        """The engine has stepped; `step` is the one that was committed, if any."""
        ...


class World:
    """One run. What it has may be read at any time between two steps."""

    def __init__(
        self,
        engine: Engine,
        model: Timed,
        workload: Workload,
        *watchers: Watcher,
        objective: Objective = SERVED_AT_ALL,
    ) -> None:
        self.engine = engine
        self.clock = model.clock
        self.measures = Measures(objective)
        self.num_steps = 0
        self.model = model
        self._workload = workload
        self._watchers = watchers
        self._arrivals: Iterator[Arrival] = workload.arrivals()
        self._events: list[Event] = []
        self._numbers = self._latest_ns = 0
        self._read_ahead()

    def at(self, at_ns: int, fault: Callable[[], None]) -> None:
        """`fault` happens at `at_ns`, between two steps."""
        self._due(at_ns, FAULT, fault)

    def run(self) -> Measures:
        """Nothing is left to do, nobody to come."""
        while self.step():
            pass
        return self.measures

    @property
    def next_ns(self) -> int | None:
        """When the next event is due; None where nothing is to come but from the engine."""
        return self._events[0].at_ns if self._events else None

    def step(self) -> bool:
        """What is due has happened, and the engine has stepped once. False: all is over."""
        self.happen()
        return self.advance()

    def advance(self) -> bool:
        """As `step`, where what is due has happened."""
        engine = self.engine
        if not engine.has_work:
            if not self._events:
                return False
            self.clock.reach(self._events[0].at_ns)
            return True
        self.model.last = None
        deltas = engine.step()
        self.num_steps += 1
        now_ns = self.clock.now_ns
        for watcher in self._watchers:
            watcher.stepped(self.model.last, deltas, now_ns)
        self.tell(deltas, now_ns)
        return True

    def tell(self, deltas: list[Delta], now_ns: int) -> None:
        """The deltas are in the measures; who waited for one of them may ask again."""
        measures = self.measures
        measures.gain(deltas, now_ns)
        for delta in deltas:
            if delta.finish is not None and measures.end(
                delta.request_id, now_ns, delta.finish.value
            ):
                for arrival in self._workload.following(delta.request_id, now_ns):
                    self._due(arrival.at_ns, ARRIVES, arrival)

    def happen(self) -> None:
        """Everything due by now has happened."""
        events, now_ns = self._events, self.clock.now_ns
        while events and events[0].at_ns <= now_ns:
            what = heapq.heappop(events).what
            if isinstance(what, Arrival):
                self._arrive(what)
            elif isinstance(what, int):
                self.engine.abort(what)
                for watcher in self._watchers:
                    watcher.left(what, self.clock.now_ns)  # a jump may have come before
            else:
                what()

    def _arrive(self, arrival: Arrival) -> None:
        """It counts from when it came, though a step was under way."""
        request, refused = arrival.request, None
        try:
            self.engine.submit(request)
        except ForgeError as refusal:
            refused = str(refusal)
            # What is asked without a limit is refused for its prompt.
            tokens = len(request.prompt) + (request.params.max_tokens or 0)
            self.measures.refuse(arrival.at_ns, type(refusal).__name__, tokens, refused)
        else:
            labels = request.priority, request.cache_salt
            self.measures.arrive(request.id, arrival.at_ns, request.params.n, *labels)
            if arrival.leaves_ns is not None:
                self._due(arrival.leaves_ns, LEAVES, request.id)
        for watcher in self._watchers:
            watcher.arrived(arrival, self.clock.now_ns, refused)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """The next arrival of the open loop is among the events."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            assert arrival.at_ns >= self._latest_ns, f"request {arrival.request.id} comes too late"
            self._latest_ns = arrival.at_ns
            self._due(arrival.at_ns, ARRIVES, arrival)

    def _due(self, at_ns: int, kind: int, what: Arrival | int | Callable[[], None]) -> None:
        heapq.heappush(self._events, Event(at_ns, kind, self._numbers, what))
        self._numbers += 1
