"""FleetRequestRouter: forge's routers as Ray Serve's interface for routers calls them.

Owns nothing but the translation. Ray has one such object for each process that sends requests, and
calls it on one event loop. The interface is alpha in Ray 2.60: this module is all that uses it.

    update_replicas ──────────► RoutingState.set_replicas
    choose_replicas ──────────► RoutingState.choose ──► [[chosen], [the others]]
    on_request_routed ────────► RoutingState.settle         the chosen one may be full
    on_request_completed ─────► RoutingState.end
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from forge.ray.call import Call
from forge.ray.routing_key import BLOCK_BYTES, BYTES_PER_TOKEN
from forge.ray.routing_state import RoutingState
from forge.routing.router import find_router


class FleetRequestRouter(RequestRouter):
    """Chooses a replica for each call, by the router of that name."""

    def initialize_state(self, router: str, replica_tokens: int) -> None:
        """Set the router.

        replica_tokens   tokens that the cache of a replica holds, by which hashes are forgotten
        """
        max_blocks = max(1, replica_tokens * BYTES_PER_TOKEN // BLOCK_BYTES)
        self._state = RoutingState(find_router(router), max_blocks)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the replicas that run."""
        super().update_replicas(replicas)
        self._state.set_replicas([each.replica_id.unique_id for each in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died, before Ray's controller reports it."""
        super().on_replica_actor_died(replica_id)
        self._state.remove_replica(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, and after it all others for the case that it is full."""
        call = None if pending_request is None else _call_of(pending_request)
        if pending_request is None or call is None:
            return [candidate_replicas]
        request = pending_request.metadata.internal_request_id
        names = {each.replica_id.unique_id: each for each in candidate_replicas}
        chosen = self._state.choose(request, call.key, list(names), call.tried)
        if chosen is None:
            return [candidate_replicas]

        def forget(future: Any) -> None:
            if future.cancelled():  # its client left before it was sent
                self._state.end(request)

        if not pending_request.future.done():
            pending_request.future.add_done_callback(forget)
        return [[names.pop(chosen)], list(names.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count the request where it was sent."""
        call = _call_of(pending_request)
        if call is not None:
            request = pending_request.metadata.internal_request_id
            self._state.settle(request, call.key, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget the request."""
        self._state.end(internal_request_id)


def _call_of(pending_request: PendingRequest) -> Call | None:
    """Return the call of a request; None for one of Ray's own."""
    args = pending_request.args
    return args[0] if args and isinstance(args[0], Call) else None
