"""RoutingState: a ReplicaTable whose replicas and requests have the names that Ray gives them.

Owns the table, and which request is open where. Knows no Ray object: names are texts.

    replicas(names)     join and leave: a name that is gone has died, or was stopped
    choose(request)     a decision, which counts at once, so a burst spreads
    settle(request)     Ray sent it elsewhere: the one that was chosen was full
    end(request)        it was answered, failed, or its client left

Always true: a request counts on one replica at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

from forge.ray.routing_key import RoutingKey
from forge.routing.replica_table import DecisionFeed, ReplicaTable
from forge.routing.router import Router


class RoutingState:
    """Routes requests by name. One thread calls it.

    max_blocks   hashes that are kept of a replica
    """

    def __init__(self, router: Router, max_blocks: int) -> None:
        self.table = ReplicaTable(router, DecisionFeed())
        self._max_blocks = max_blocks
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}  # of open requests
        self._next_number = 0

    def set_replicas(self, names: Collection[str]) -> None:
        """Let new replicas join, and those that are not named leave."""
        ids = {replica_id_of(each): each for each in names}
        for replica_id in [each for each in self._names if each not in ids]:
            self.remove_replica(self._names[replica_id])
        for replica_id, name in ids.items():
            if replica_id not in self._names:
                self._names[replica_id] = name
                self.table.join(replica_id, self._max_blocks)

    def remove_replica(self, name: str) -> None:
        """Forget a replica and its requests. A second call changes nothing."""
        replica_id = replica_id_of(name)
        if self._names.pop(replica_id, None) is not None:
            lost = self.table.leave(replica_id)
            gone = {*lost.waiting, *lost.started}
            self._numbers = {n: each for n, each in self._numbers.items() if each not in gone}

    def choose(
        self, request: str, key: RoutingKey, names: Sequence[str], tried: Collection[str] = ()
    ) -> str | None:
        """Return the replica for a request, of the named ones, or None where none of them is known.

        tried   replicas that lost this request: chosen only where there is no other
        """
        fresh = [each for each in names if each not in tried]
        chosen = self._route(request, key, fresh) or self._route(request, key, names)
        return None if chosen is None else self._names[chosen]

    def settle(self, request: str, key: RoutingKey, name: str) -> None:
        """Count a request where it was sent."""
        number = self._numbers.get(request)
        if number is None or self.table.replica_of(number) != replica_id_of(name):
            self._route(request, key, [name])

    def end(self, request: str) -> None:
        """Forget a request. Unknown ones change nothing."""
        number = self._numbers.pop(request, None)
        if number is not None:
            self.table.end(number)

    def _route(self, request: str, key: RoutingKey, names: Sequence[str]) -> int | None:
        self.end(request)  # it is routed again: the replica was full, or the time for it ran out
        number = self._next_number
        decision = self.table.route(
            number,
            key.hashes,
            key.num_tokens,
            key.tenant,
            key.session_id,
            [replica_id_of(each) for each in names],
        )
        if decision is None:
            return None
        self._next_number += 1
        self._numbers[request] = number
        return decision.replica_id


def replica_id_of(name: str) -> int:
    """Return the id of a replica in the table: the same in every process, as sessions need it."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
