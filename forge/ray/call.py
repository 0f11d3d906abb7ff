"""Call: an HTTP request on its way to a replica, and the parts of its response.

Owns the values that cross from one of Ray's processes to another. Knows no socket and no engine.

    Ingress ── Call ──► EngineReplica ── ResponseHead, bytes, bytes, ... ──► Ingress
"""

from __future__ import annotations

from typing import NamedTuple

from forge.errors import ForgeError
from forge.ray.routing_key import RoutingKey

Headers = tuple[tuple[bytes, bytes], ...]


class Call(NamedTuple):
    """A request.

    tried   names of the replicas that have lost it
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    key: RoutingKey
    tried: tuple[str, ...] = ()


class ResponseHead(NamedTuple):
    """The first part of a response. Its other parts are bytes."""

    status: int
    headers: Headers

    @property
    def is_event_stream(self) -> bool:
        """True where the body is server-sent events, which a client reads as they come."""
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )


class ReplicaLost(ForgeError):
    """The replica of this name has no engine any more. Another one may serve the request."""

    def __init__(self, name: str) -> None:
        super().__init__(f"replica {name} has no engine")
        self.name = name

    def __reduce__(self) -> tuple[type[ReplicaLost], tuple[str]]:
        return ReplicaLost, (self.name,)
