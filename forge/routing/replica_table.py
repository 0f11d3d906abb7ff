"""Replica table: the replicas of a fleet, the requests that they have, and what they hold.

Owns the life of replicas and of routed requests, and the PrefixIndex. Knows no engine, socket or
clock: whatever connects to replicas reports what happened. The Router decides.

    join ──► active ──drain──► draining ──► leave       accepts no request, ends those that it has
               └─────────── leave (it died) ──────►     its requests are returned, none is forgotten

    request   route ──► waits ──begin──► runs ──► end
                          └── its replica leaves: it can be routed again
                                           └── its replica leaves: it has failed, the client has
                                               had a part of the answer

Always true: each open request is on one replica. One that is not active gets none.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

from forge.blocks import BlockHash
from forge.kv_events import KVEvent
from forge.routing.prefix_index import PrefixIndex
from forge.routing.router import ReplicaLoad, Router, RoutingRequest


class IndexFeed(Protocol):
    """Source of what the index holds."""

    def on_route(
        self, index: PrefixIndex, replica_id: int, hashes: Sequence[BlockHash], num_held: int
    ) -> None:
        """Handle a request of these blocks that was routed to the replica.

        num_held   the first blocks that the index has found there
        """
        ...

    def on_events(self, index: PrefixIndex, replica_id: int, events: Sequence[KVEvent]) -> None:
        """Handle KV events of the replica."""
        ...


class EventFeed:
    """The index follows the KV events of replicas: exact, as late as they come."""

    def on_route(
        self, index: PrefixIndex, replica_id: int, hashes: Sequence[BlockHash], num_held: int
    ) -> None:
        """Do nothing: the blocks are held when they are computed."""

    def on_events(self, index: PrefixIndex, replica_id: int, events: Sequence[KVEvent]) -> None:
        """Follow the events."""
        index.apply(replica_id, events)


class DecisionFeed:
    """The index expects that replicas hold what was routed to them: at once, and approximate."""

    def on_route(
        self, index: PrefixIndex, replica_id: int, hashes: Sequence[BlockHash], num_held: int
    ) -> None:
        """Expect that the replica holds the blocks soon."""
        index.expect(replica_id, hashes, num_held)

    def on_events(self, index: PrefixIndex, replica_id: int, events: Sequence[KVEvent]) -> None:
        """Do nothing: replicas need not publish events."""


class RoutedRequest(NamedTuple):
    """An open request.

    num_prefill_tokens   prompt tokens that its replica lacked when it was routed; 0 once it has
                         started
    """

    replica_id: int
    num_prefill_tokens: int
    has_started: bool


class Decision(NamedTuple):
    """Replica of a request.

    num_prefix_blocks   first blocks of its prompt that the replica holds, as far as is known
    """

    replica_id: int
    num_prefix_blocks: int


class LostRequests(NamedTuple):
    """Ids of the requests of a replica that has left, in the order in which they were routed.

    waiting   have not started: they can be routed again
    started     have failed: their clients have a part of the answer
    """

    waiting: tuple[int, ...]
    started: tuple[int, ...]


class ReplicaTable:
    """Routes requests, and follows the replicas. One thread calls it.

    num_decisions   requests routed so far, those that were routed again included
    """

    def __init__(self, router: Router, feed: IndexFeed) -> None:
        self.index = PrefixIndex()
        self.num_decisions = 0
        self._router = router
        self._feed = feed
        self._loads: dict[int, ReplicaLoad] = {}  # of active replicas, in order of their ids
        self._draining: dict[int, ReplicaLoad] = {}
        self._requests: dict[int, RoutedRequest] = {}

    @property
    def active_ids(self) -> tuple[int, ...]:
        """Replicas that accept requests, in order."""
        return tuple(self._loads)

    @property
    def draining_ids(self) -> tuple[int, ...]:
        """Replicas that end their requests and accept none."""
        return tuple(self._draining)

    def load(self, replica_id: int) -> ReplicaLoad:
        """Return the load of a replica."""
        return self._loads_with(replica_id)[replica_id]

    # Replicas.

    def join(self, replica_id: int, max_blocks: int) -> None:
        """Add a replica that holds nothing. At most so many hashes of it are known at a time."""
        self.index.add_replica(replica_id, max_blocks)
        self._loads[replica_id] = ReplicaLoad(replica_id)
        self._loads = dict(sorted(self._loads.items()))

    def drain(self, replica_id: int) -> None:
        """Route nothing more to the replica. A second call changes nothing."""
        load = self._loads.pop(replica_id, None)
        if load is not None:
            self._draining[replica_id] = load

    def leave(self, replica_id: int) -> LostRequests:
        """Remove a replica, because it has drained or died, and return the requests that it had."""
        self.index.remove_replica(replica_id)
        del self._loads_with(replica_id)[replica_id]
        lost = {i: r for i, r in self._requests.items() if r.replica_id == replica_id}
        for request_id in lost:
            del self._requests[request_id]
        return LostRequests(
            tuple(i for i, request in lost.items() if not request.has_started),
            tuple(i for i, request in lost.items() if request.has_started),
        )

    def follow(self, replica_id: int, events: Sequence[KVEvent]) -> None:
        """Handle KV events of a replica, in their order."""
        self._feed.on_events(self.index, replica_id, events)

    # Requests.

    def replica_of(self, request_id: int) -> int:
        """Return the replica of an open request."""
        return self._requests[request_id].replica_id

    def route(
        self,
        request_id: int,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        tenant: str = "",
        session_id: str = "",
        candidate_ids: Container[int] | None = None,
    ) -> Decision | None:
        """Choose a replica for a request, or return None where none accepts requests.

        hashes          of the full blocks of its prompt that can be shared
        num_tokens      of its prompt
        candidate_ids   replicas among which it is chosen; left out: all
        """
        assert request_id not in self._requests, f"request {request_id} is routed already"
        replica_ids = tuple(
            each for each in self._loads if candidate_ids is None or each in candidate_ids
        )
        if not replica_ids:
            return None
        request = RoutingRequest(self.num_decisions, hashes, num_tokens, tenant, session_id)
        loads = tuple(self._loads[each] for each in replica_ids)
        lengths: list[int] = []

        def find_prefix(hashes: Sequence[BlockHash]) -> Sequence[int]:
            lengths[:] = self.index.prefix_lengths(hashes, replica_ids)
            return lengths

        replica_id = self._router.route(request, loads, find_prefix)
        # A router that goes by load alone has looked nothing up.
        num_blocks = (lengths or find_prefix(hashes))[replica_ids.index(replica_id)]
        num_missing = num_tokens - num_tokens * num_blocks // max(1, len(hashes))
        self.num_decisions += 1
        self._requests[request_id] = RoutedRequest(replica_id, num_missing, has_started=False)
        self._add_load(replica_id, 1, num_missing)
        self._feed.on_route(self.index, replica_id, hashes, num_blocks)
        return Decision(replica_id, num_blocks)

    def begin(self, request_id: int) -> None:
        """Note that a part of the answer has reached the client. A second call changes nothing."""
        request = self._requests[request_id]
        if not request.has_started:
            self._add_load(request.replica_id, 0, -request.num_prefill_tokens)
            self._requests[request_id] = RoutedRequest(request.replica_id, 0, has_started=True)

    def end(self, request_id: int) -> None:
        """Forget a request that has ended, or that its replica has refused."""
        request = self._requests.pop(request_id)
        self._add_load(request.replica_id, -1, -request.num_prefill_tokens)

    def _add_load(self, replica_id: int, num_requests: int, num_prefill_tokens: int) -> None:
        loads = self._loads_with(replica_id)
        load = loads[replica_id]
        loads[replica_id] = ReplicaLoad(
            replica_id,
            load.num_requests + num_requests,
            load.num_prefill_tokens + num_prefill_tokens,
        )

    def _loads_with(self, replica_id: int) -> dict[int, ReplicaLoad]:
        return self._loads if replica_id in self._loads else self._draining
