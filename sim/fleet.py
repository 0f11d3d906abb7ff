"""Fleet: replicas of the real engine and a router, on one time line, from one seed.

Owns the order of events and the life of replicas. Knows no routing rule: a ReplicaTable decides.
Replicas work at the same time, so each has its own position on the time line. What a step returns
is delivered when the step ends, and the router sees nothing earlier.

    time          0          t          c
    replica 0     |== step (computed at 0) ==| delivery ─► client, router
    replica 1     |= step =|== step ==|
    router                 ▲ a request arrives: it is queued, and replica 0 sees it at c

Always true: events at one time have one order, so equal fleets write equal logs. Each request ends
once. One whose replica dies ends with `replica_died` if the client had a part of its answer;
otherwise it moves to another replica, or waits for one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from forge.blocks import BlockHash, chain_hashes, root_hash
from forge.engine import Engine
from forge.errors import ForgeError
from forge.kv_events import KVEvent, KVEventSink
from forge.request import Delta, Request
from forge.routing.replica_table import Decision, ReplicaTable
from forge.sessions import SessionKey
from forge.sim.clock import VirtualClockModel, VirtualClockStep
from forge.sim.metrics import NO_OBJECTIVE, LatencyObjective, RunMetrics
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import RequestArrival, Workload

DELIVERY, DISCONNECT, DEATH, START, ARRIVAL, EXPIRY, STEP = range(7)
"""Kinds of events, in the order in which they happen at equal times."""

REPLICA_DIED, NO_REPLICA, REFUSED = "replica_died", "no_replica", "refused"
"""Ends of requests besides the finish reasons of engines."""


class ReplicaEvent(NamedTuple):
    """A replica dies, or starts with an empty cache, at `at_ns`."""

    at_ns: int
    replica_id: int


class ReplicaEvents(NamedTuple):
    """Deaths and starts of a run. A replica whose first event is a start is not there before."""

    deaths: tuple[ReplicaEvent, ...] = ()
    starts: tuple[ReplicaEvent, ...] = ()

    def in_order(self) -> list[tuple[int, ReplicaEvent]]:
        """Return (DEATH or START, event) in the order in which they happen."""
        kinds = ((DEATH, self.deaths), (START, self.starts))
        found = [(kind, event) for kind, events in kinds for event in events]
        return sorted(found, key=lambda each: (each[1].at_ns, each[0], each[1].replica_id))

    def absent_ids(self) -> list[int]:
        """Return the replicas that are not there at time 0."""
        first_kinds: dict[int, int] = {}
        for kind, event in self.in_order():
            first_kinds.setdefault(event.replica_id, kind)
        return [replica_id for replica_id, kind in first_kinds.items() if kind == START]

    def conflict(self, num_replicas: int) -> str | None:
        """Return why these events cannot happen in this order, or None."""
        absent = self.absent_ids()
        present = {each: each not in absent for each in range(num_replicas)}
        for kind, (at_ns, replica_id) in self.in_order():
            when = f"at {at_ns / NS_PER_S:g} s"
            if replica_id not in present:
                return f"replica {replica_id} is not one of 0 to {num_replicas - 1}"
            if present[replica_id] == (kind == START):
                state = "starts and is there already" if kind == START else "dies and is not there"
                return f"replica {replica_id} {state} {when}"
            present[replica_id] = kind == START
        return None


NO_EVENTS = ReplicaEvents()


@dataclass(eq=False)
class Replica:
    """An engine of the fleet from its start to its death. Owned by the Fleet.

    kv_events           of its steps since the last one that was queued for delivery
    has_step_event      its next step is an event
    num_requests        requests that were routed to it
    num_routed_tokens   prompt tokens of those requests
    """

    id: int
    engine: Engine
    model: VirtualClockModel
    kv_events: list[KVEvent]
    is_alive: bool = True
    has_step_event: bool = False
    num_requests: int = 0
    num_routed_tokens: int = 0
    num_steps: int = 0


class _Delivery(NamedTuple):
    """Results of a step of a replica."""

    replica: Replica
    step: VirtualClockStep | None
    deltas: list[Delta]
    kv_events: list[KVEvent]


class _Expiry(NamedTuple):
    """A paused session of a replica expires, unless it has had another turn by then."""

    replica: Replica
    key: SessionKey
    last_turn: int


_Payload: TypeAlias = _Delivery | _Expiry | ReplicaEvent | RequestArrival | Replica | int


class _FleetEvent(NamedTuple):
    """An event that is due at `at_ns`. `sequence_number` is unique."""

    at_ns: int
    kind: int
    sequence_number: int
    payload: _Payload


@dataclass(slots=True)
class _OpenRequest:
    """A request that has arrived and not ended."""

    request: Request
    num_open_choices: int
    has_client: bool = True


class FleetObserver(Protocol):
    """Receives every event of a fleet, in order."""

    def on_route(
        self, request: Request, now_ns: int, decision: Decision | None, why: str | None
    ) -> None:
        """Handle a request that was routed.

        decision   None where it waits for a replica
        why        text of the error with which the replica has refused it, if it has
        """
        ...

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Handle a client that disconnected before its request ended."""
        ...

    def on_step(
        self, replica_id: int, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int
    ) -> None:
        """Handle a step of a replica, at its end. `step` is the one that was committed, if any."""
        ...

    def on_start(self, replica_id: int, now_ns: int) -> None:
        """Handle a replica that begins to accept requests."""
        ...

    def on_death(self, replica_id: int, now_ns: int) -> None:
        """Handle a replica that died. Its requests are routed or failed after this."""
        ...

    def on_failure(self, request_id: int, now_ns: int, why: str) -> None:
        """Handle a request that ended because its replica died, or because there is none."""
        ...


CreateReplica: TypeAlias = Callable[[KVEventSink], tuple[Engine, VirtualClockModel]]
"""Returns a new engine at time 0 that sends its KV events to the sink, and its model."""


class Fleet:
    """A run. Its attributes may be read when it has ended.

    replicas       all that have started, in order of their starts
    num_moved      times that a request was routed again because its replica died
    last_refusal   text of the error of the last request that was refused
    """

    def __init__(
        self,
        create_replica: CreateReplica,
        num_replicas: int,
        table: ReplicaTable,
        workload: Workload,
        *observers: FleetObserver,
        replica_events: ReplicaEvents = NO_EVENTS,
        objective: LatencyObjective = NO_OBJECTIVE,
    ) -> None:
        conflict = replica_events.conflict(num_replicas)
        assert conflict is None, conflict
        self.metrics = RunMetrics(objective)
        self.table = table
        self.replicas: list[Replica] = []
        self.now_ns = 0
        self.num_moved = 0
        self.last_refusal: str | None = None
        self._create_replica = create_replica
        self._workload = workload
        self._observers = observers
        self._arrivals: Iterator[RequestArrival] = workload.arrivals()
        self._events: list[_FleetEvent] = []
        self._num_events = 0
        self._alive: dict[int, Replica] = {}
        self._open: dict[int, _OpenRequest] = {}
        self._unrouted: list[int] = []  # open requests that wait for a replica
        absent = replica_events.absent_ids()
        for replica_id in range(num_replicas):
            if replica_id not in absent:
                self._start(replica_id)
        for kind, event in replica_events.in_order():
            self._push(event.at_ns, kind, event)
        self._queue_next_arrival()

    def run(self) -> RunMetrics:
        """Process all events, and return the metrics."""
        while self._events:
            event = heapq.heappop(self._events)
            self.now_ns = event.at_ns
            self._process(event.kind, event.payload)
        for request_id in list(self._unrouted):
            self._fail(request_id, NO_REPLICA)
        for replica in self._alive.values():
            assert not replica.engine.has_work, f"replica {replica.id} has work and no event"
        return self.metrics

    def _process(self, kind: int, payload: _Payload) -> None:
        match payload:
            case _Delivery():
                self._deliver(payload)
            case Replica():
                payload.has_step_event = False
                if payload.is_alive:
                    self._step(payload)
            case RequestArrival():
                self._arrive(payload)
            case _Expiry(replica, key, last_turn):
                if replica.is_alive:
                    replica.engine.expire_session(key, last_turn)
                    self._queue_step(replica)
            case ReplicaEvent() if kind == DEATH:
                self._kill(payload.replica_id)
            case ReplicaEvent():
                self._start(payload.replica_id)
            case int():
                self._disconnect(payload)

    # Replicas.

    def _start(self, replica_id: int) -> None:
        """Start a replica with an empty cache, and give it the requests that wait for one."""
        kv_events: list[KVEvent] = []
        engine, model = self._create_replica(kv_events.extend)
        model.clock.wait_until(self.now_ns)
        replica = Replica(replica_id, engine, model, kv_events)
        self.replicas.append(replica)
        self._alive[replica_id] = replica
        self.table.join(replica_id, _num_indexed_blocks(engine))
        for observer in self._observers:
            observer.on_start(replica_id, self.now_ns)
        waiting, self._unrouted = self._unrouted, []
        for request_id in waiting:
            self._route(self._open[request_id].request)

    def _kill(self, replica_id: int) -> None:
        """Remove a replica. What it has computed and not delivered is lost."""
        self._alive.pop(replica_id).is_alive = False
        lost = self.table.leave(replica_id)
        for observer in self._observers:
            observer.on_death(replica_id, self.now_ns)
        for request_id in lost.started:
            self._fail(request_id, REPLICA_DIED)
        for request_id in lost.waiting:
            if self._open[request_id].has_client:
                self.num_moved += 1
                self._route(self._open[request_id].request)
            else:
                self._fail(request_id, REPLICA_DIED)

    def _step(self, replica: Replica) -> None:
        """Step an engine now, and queue the delivery of its result at the end of the step."""
        engine, model = replica.engine, replica.model
        if not engine.can_step:
            return
        model.clock.wait_until(self.now_ns)
        model.last_step = None
        deltas = engine.step()
        replica.num_steps += 1
        end_ns = model.clock.now_ns
        kv_events = list(replica.kv_events)
        replica.kv_events.clear()
        self._push(end_ns, DELIVERY, _Delivery(replica, model.last_step, deltas, kv_events))
        self._queue_expiries(replica, end_ns)
        self._queue_step(replica)

    def _queue_step(self, replica: Replica) -> None:
        if replica.engine.can_step and not replica.has_step_event:
            replica.has_step_event = True
            self._push(max(self.now_ns, replica.model.clock.now_ns), STEP, replica)

    def _queue_expiries(self, replica: Replica, now_ns: int) -> None:
        """Queue the expiry of each session of the replica that has paused since the last call."""
        ttl_s = replica.engine.config.session_ttl_s
        for session in replica.engine.scheduler.take_paused_sessions():
            at_ns = now_ns + round(NS_PER_S * session.time_to_live_s(ttl_s))
            self._push(at_ns, EXPIRY, _Expiry(replica, session.key, session.last_turn))

    def _deliver(self, delivery: _Delivery) -> None:
        """Deliver a step to the clients and to the router, unless its replica has died since."""
        replica, step, deltas, kv_events = delivery
        if not replica.is_alive:
            return
        for observer in self._observers:
            observer.on_step(replica.id, step, deltas, self.now_ns)
        self.table.follow(replica.id, kv_events)
        self.metrics.record_deltas(deltas, self.now_ns)
        for delta in deltas:
            self.table.begin(delta.request_id)
            if delta.finish is not None:
                self._end_choices(delta.request_id, 1, delta.finish.value)
                if delta.request_id not in self._open:
                    self.table.end(delta.request_id)

    # Requests.

    def _arrive(self, arrival: RequestArrival) -> None:
        """Route a request. Its latency counts from here, whatever happens to its replica."""
        request = arrival.request
        labels = request.priority, request.cache_salt
        self.metrics.record_arrival(request.id, arrival.at_ns, request.params.n, *labels)
        self._open[request.id] = _OpenRequest(request, request.params.n)
        if arrival.disconnect_ns is not None:
            self._push(arrival.disconnect_ns, DISCONNECT, request.id)
        self._route(request)
        self._queue_next_arrival()

    def _route(self, request: Request) -> None:
        """Submit an open request to a replica, or let it wait for one."""
        hashes = self._shareable_hashes(request)
        length = len(request.prompt)
        labels = request.tenant, request.session_id
        decision = self.table.route(request.id, hashes, length, *labels)
        why = None
        if decision is None:
            self._unrouted.append(request.id)
        else:
            replica = self._alive[decision.replica_id]
            try:
                replica.engine.submit(request)
                replica.num_requests += 1
                replica.num_routed_tokens += length
                self._queue_step(replica)
            except ForgeError as error:
                why = self.last_refusal = str(error)
                self.table.end(request.id)
        for observer in self._observers:
            observer.on_route(request, self.now_ns, decision, why)
        if why is not None:
            self._end_choices(request.id, self._open[request.id].num_open_choices, REFUSED)

    def _shareable_hashes(self, request: Request) -> list[BlockHash]:
        """Return the hashes of the prompt's full blocks but the last token's, as an engine would.

        None without a replica: then no decision is made.
        """
        if not self._alive:
            return []
        config = next(iter(self._alive.values())).engine.config
        size = config.block_size
        num_tokens = (len(request.prompt) - 1) // size * size
        root = root_hash(config.cache_namespace, request.cache_salt, size)
        return chain_hashes(root, request.prompt[:num_tokens], size)

    def _disconnect(self, request_id: int) -> None:
        """End a request for a client that has left, unless it has ended before."""
        if request_id not in self._open:
            return
        self._open[request_id].has_client = False
        for observer in self._observers:
            observer.on_disconnect(request_id, self.now_ns)
        if request_id in self._unrouted:
            self._unrouted.remove(request_id)
            self._end_choices(request_id, self._open[request_id].num_open_choices, "abort")
            return
        replica = self._alive[self.table.replica_of(request_id)]
        replica.engine.abort(request_id)
        self._queue_expiries(replica, self.now_ns)
        self._queue_step(replica)

    def _fail(self, request_id: int, why: str) -> None:
        """End a request that no replica has."""
        for observer in self._observers:
            observer.on_failure(request_id, self.now_ns, why)
        self._end_choices(request_id, self._open[request_id].num_open_choices, why)

    def _end_choices(self, request_id: int, count: int, why: str) -> None:
        """End so many choices. After the last one, queue the arrivals that follow the request."""
        self._open[request_id].num_open_choices -= count
        for _ in range(count):
            has_ended = self.metrics.record_finish(request_id, self.now_ns, why)
        if has_ended:
            del self._open[request_id]
            for arrival in self._workload.follow_up_arrivals(request_id, self.now_ns):
                self._push(arrival.at_ns, ARRIVAL, arrival)

    def _queue_next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._push(arrival.at_ns, ARRIVAL, arrival)

    def _push(self, at_ns: int, kind: int, payload: _Payload) -> None:
        heapq.heappush(self._events, _FleetEvent(at_ns, kind, self._num_events, payload))
        self._num_events += 1


def _num_indexed_blocks(engine: Engine) -> int:
    """Return how many blocks a replica can hold in all media."""
    tier = engine.config.host_tier
    if tier is None:
        return engine.config.num_blocks
    return engine.config.num_blocks + tier.num_blocks + (tier.disk.max_files if tier.disk else 0)
