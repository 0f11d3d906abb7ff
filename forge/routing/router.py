"""Routers: which replica computes a request. Values in, a replica out.

Owns the rules. Knows no clock, socket or engine, and keeps nothing between two decisions: the
ReplicaTable gives it the number of the decision, the replicas and what they hold.

    request      blocks [ a | b | c | d ]
    replica 0           [ a | b ]            3 requests     prefix-aware: 0, while it has few more
    replica 1           [ a ]                1 request      requests than 1
    replica 2                                0 requests     least-loaded: 2

Always true: equal arguments give equal replicas, in every process. Replicas that are equally good
are taken in turn.

Longest prefix with bounded imbalance: SGLang's cache-aware router; with a least share of the
prompt below which load alone decides: the same and Ray Serve's PrefixCacheAffinityRouter. A sum of
missing blocks and load: NVIDIA Dynamo's KV router, llm-d's scorers. Rendezvous hashing: Thaler and
Ravishankar 1998; a bound on the load that it may cause: Mirrokni et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from forge.blocks import BlockHash
from forge.errors import InvalidConfig


class RoutingRequest(NamedTuple):
    """Properties of a request that a router may read.

    number       decisions before this one
    hashes       of the full blocks of its prompt that can be shared, first block first
    num_tokens   of its prompt
    """

    number: int
    hashes: Sequence[BlockHash]
    num_tokens: int
    tenant: str = ""
    session_id: str = ""


class ReplicaLoad(NamedTuple):
    """A replica that accepts requests, and what was routed to it and has not ended.

    num_requests         requests
    num_prefill_tokens   prompt tokens that it lacked when they came, of those that have not started
    """

    id: int
    num_requests: int = 0
    num_prefill_tokens: int = 0


PrefixLookup = Callable[[Sequence[BlockHash]], Sequence[int]]
"""Returns how many of the first of these blocks each replica holds, in the order of replicas."""


class Router(Protocol):
    """Chooses a replica for each request. Pure: a value whose fields are its settings."""

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return the id of one of `replicas`, which are at least one, in order of their ids."""
        ...


class RoundRobin(NamedTuple):
    """Replicas in turn, whatever they hold and have."""

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return the next replica in turn."""
        return replicas[request.number % len(replicas)].id


class LeastLoaded(NamedTuple):
    """The replica with the fewest requests."""

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return a replica with the fewest requests."""
        return _least_loaded(request, replicas).id


class PrefixAware(NamedTuple):
    """The replica that holds the longest prefix, among those with few more requests than others.

    max_imbalance       requests that a replica may have more than the one with the fewest
    min_prefix_percent  share of the prompt below which a prefix does not matter: the replica with
                        the fewest requests is chosen. A system prompt that all share attracts none
    """

    max_imbalance: int = 8
    min_prefix_percent: int = 10

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return the replica with the longest prefix that is not overloaded, or the least loaded.

        Of several with the same prefix it is the one with the fewest requests.
        """
        max_requests = min(each.num_requests for each in replicas) + self.max_imbalance
        found = [
            (length, replica)
            for length, replica in zip(find_prefix(request.hashes), replicas, strict=True)
            if replica.num_requests <= max_requests
        ]
        longest = max(length for length, _ in found)
        if 100 * longest < self.min_prefix_percent * len(request.hashes):
            return _least_loaded(request, replicas).id
        return _least_loaded(request, [each for length, each in found if length == longest]).id


class LeastWork(NamedTuple):
    """The replica that has the least to compute until the first token of the request.

    request_tokens   tokens that a request of a replica counts as, for the steps that it shares

    The work is the sum of the prompt tokens that its other requests wait for, of those of this
    prompt that it does not hold, and of `request_tokens` for each of its requests.
    """

    request_tokens: int = 256

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return a replica with the least work."""
        num_blocks = max(1, len(request.hashes))
        works = [
            replica.num_prefill_tokens
            + self.request_tokens * replica.num_requests
            - request.num_tokens * length // num_blocks
            for length, replica in zip(find_prefix(request.hashes), replicas, strict=True)
        ]
        least = min(works)
        best = [each for work, each in zip(works, replicas, strict=True) if work == least]
        return _least_loaded(request, best).id


class SessionSticky(NamedTuple):
    """The same replica for all turns of a session, as long as it is there.

    max_imbalance   requests that a replica may have more than the one with the fewest; above it the
                    session's next choice is taken, until the load is even again

    Without a session the replica with the fewest requests. Nothing is remembered: each session has
    its own order of all replicas, by hash. A replica that leaves moves its sessions only.
    """

    max_imbalance: int = 32

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return the first replica of the session's order that is not overloaded."""
        if not request.session_id:
            return _least_loaded(request, replicas).id
        max_requests = min(each.num_requests for each in replicas) + self.max_imbalance
        found = [each for each in replicas if each.num_requests <= max_requests]
        key = repr((request.tenant, request.session_id)).encode()
        return max(found, key=lambda each: _session_weight(key, each.id)).id


class SessionOrPrefix(NamedTuple):
    """A session's own replica for its turns, and the longest prefix for all other requests.

    Both count the requests of a replica, so each sees what the other one causes.
    """

    session: SessionSticky = SessionSticky()
    prefix: PrefixAware = PrefixAware()

    def route(
        self, request: RoutingRequest, replicas: Sequence[ReplicaLoad], find_prefix: PrefixLookup
    ) -> int:
        """Return the replica that the rule for this kind of request chooses."""
        rule: Router = self.session if request.session_id else self.prefix
        return rule.route(request, replicas, find_prefix)


def _session_weight(key: bytes, replica_id: int) -> bytes:
    """Return the weight of a replica in the order of a session: the greatest comes first."""
    return blake2b(key, digest_size=16, salt=replica_id.to_bytes(16, "little")).digest()


def _least_loaded(request: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Return the replica with the fewest requests, of several the next one in turn."""
    first = request.number % len(replicas)
    in_turn = (*replicas[first:], *replicas[:first])
    return min(in_turn, key=lambda each: each.num_requests)


ROUTERS: Mapping[str, Router] = {
    "round-robin": RoundRobin(),
    "least-loaded": LeastLoaded(),
    "prefix-aware": PrefixAware(),
    "least-work": LeastWork(),
    "session-sticky": SessionSticky(),
    "session-or-prefix": SessionOrPrefix(),
}
"""Routers by name, with their default settings."""


def find_router(name: str) -> Router:
    """Return the router of this name. Raises InvalidConfig."""
    router = ROUTERS.get(name)
    if router is None:
        raise InvalidConfig(
            "router", f"{name[:64]!r} is not known", f"Use one of {', '.join(ROUTERS)}"
        )
    return router
