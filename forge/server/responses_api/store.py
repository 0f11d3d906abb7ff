"""ResponseStore: responses that later requests may continue, bounded in bytes and in time.

Owns which responses are kept. Knows no request and no clock: times are arguments. Each tenant has a
separate store with an equal part of the bytes, so no client evicts or finds another's responses.

    put ──► [ oldest ... newest ] ──► get, delete
              │
              └── dropped: the store is full, or it is older than ttl_s

Always true: the stored bytes are at most max_bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENTRY_BYTES = 512
"""Bytes of an entry in addition to its JSON."""


@dataclass(slots=True)
class StoredResponse:
    """A response and its conversation. Owned by a ResponseStore.

    response    JSON of the response as clients get it
    items       the items that it answers, those of earlier turns included; see `encode_items`
    output      its own items
    status      of the response
    created_s   when it was put into the store
    cancel      ends it while it is in progress; returns once its final form is stored
    """

    response: bytes
    items: bytes
    output: bytes
    status: str
    created_s: float
    cancel: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the JSON, and of what keeps it."""
        return len(self.response) + len(self.items) + len(self.output) + ENTRY_BYTES


class ResponseStore:
    """Responses of one tenant by id, oldest first.

    num_bytes   bytes of all stored responses
    """

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._responses: dict[str, StoredResponse] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response_id: str, stored: StoredResponse, now_s: float) -> None:
        """Store a response as the newest; drop the oldest ones until it fits.

        One that is larger than the store is not stored.
        """
        self.drop_expired(now_s)
        self.delete(response_id, now_s)
        if stored.num_bytes > self._max_bytes:
            return
        while self.num_bytes + stored.num_bytes > self._max_bytes:
            self._drop(next(iter(self._responses)))
        self._responses[response_id] = stored
        self.num_bytes += stored.num_bytes

    def get(self, response_id: str, now_s: float) -> StoredResponse | None:
        """Return a response, or None where it is not stored or no longer."""
        self.drop_expired(now_s)
        return self._responses.get(response_id)

    def delete(self, response_id: str, now_s: float) -> bool:
        """Drop a response; return whether it was stored."""
        self.drop_expired(now_s)
        if response_id not in self._responses:
            return False
        self._drop(response_id)
        return True

    def drop_expired(self, now_s: float) -> float:
        """Drop the responses older than ttl_s; return the time before which none of the rest is."""
        while self._responses:
            response_id, stored = next(iter(self._responses.items()))
            expiry_s = stored.created_s + self._ttl_s
            if now_s < expiry_s:
                return expiry_s
            self._drop(response_id)
        return now_s + self._ttl_s

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= self._responses.pop(response_id).num_bytes
