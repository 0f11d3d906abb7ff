"""Bounds on what one client may cost, fixed while a server runs.

Owns the numbers and their bounds. Knows no socket and no route. The modules of forge/server that
use each number:

    connection.py   read_timeout, write_timeout     a client that sends or reads too slowly
    admission.py    max_queue, queue_timeout,       more requests than the engine can start
                    request_timeout
    sse.py          ping_interval                   a stream that has nothing to send
    http_server.py  max_connections                 more connections than the process can hold
                    drain_timeout                   the end of the server
    responses_api   response_store_mib,             responses that clients may continue
                    response_ttl
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from forge.errors import InvalidConfig

MAX_COUNT = 2**20
MIN_COUNTS = {"max_connections": 1, "max_queue": 1, "response_store_mib": 0}
"""Fields that are integers, and the least of each."""
MAX_SECONDS = 10.0**7


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on requests and connections. Seconds may be fractions.

    max_connections          connections that may be open; one more is refused
    max_queue                requests that may wait for their first token; one more is refused
    queue_timeout            seconds a request may wait for its first token
    request_timeout          seconds a request may take in all
    read_timeout             seconds a client may take to send a request
    write_timeout            seconds a client may leave sent data unread
    ping_interval            seconds a stream may be silent before it sends a comment
    drain_timeout            seconds that open requests may take to end after SIGTERM or Ctrl-C
    response_store_mib       MiB of responses that /v1/responses stores for all keys; 0 stores none
    response_ttl             seconds that a stored response is kept
    """

    max_connections: int = 2048
    max_queue: int = 1024
    queue_timeout: float = 300.0
    request_timeout: float | None = None
    read_timeout: float = 30.0
    write_timeout: float = 30.0
    ping_interval: float = 10.0
    drain_timeout: float = 5.0
    response_store_mib: int = 64
    response_ttl: float = 3600.0

    def __post_init__(self) -> None:
        for name, least in MIN_COUNTS.items():
            count = getattr(self, name)
            if type(count) is not int or count < least:
                kind = "a positive integer" if least else "an integer from 0"
                raise InvalidConfig(name, f"{count!r} is not {kind}", f"Give {least} or more")
            if count > MAX_COUNT:
                raise InvalidConfig(name, f"{count} is more than {MAX_COUNT}", "Give less")
        for name in (
            limit_field.name for limit_field in fields(self) if limit_field.name not in MIN_COUNTS
        ):
            value = getattr(self, name)
            if value is None and name == "request_timeout":
                continue
            if type(value) not in (int, float) or not math.isfinite(value):
                raise InvalidConfig(name, f"{value!r} is not a number of seconds", "Give 30, say")
            if not 0 < value <= MAX_SECONDS:
                raise InvalidConfig(
                    name, f"{value!r} is not above 0 and at most {MAX_SECONDS:.0f}", "Give 30, say"
                )


DEFAULT_LIMITS = Limits()
