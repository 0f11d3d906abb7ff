"""Labels: what a workload's requests say beside their lengths.

Owns when a request says that it came, its class and its tenant. Knows no workload and no engine.
Randomness hangs on the request's id, so labels change nobody's lengths or times.

    Arrival(at_ns, request) ──► Arrival(at_ns, request with arrival_s, priority, cache_salt)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from forge.request import Request
from sim.workload import SECOND, Arrival, Workload, drawn

CLASS, TENANT = 48, 49
"""Purposes of draws."""


class Labels(NamedTuple):
    """A workload whose requests say when they came, of which class and for whom."""

    workload: Workload
    classes: int
    tenants: int
    seed: int

    def arrivals(self) -> Iterator[Arrival]:
        """Those of the workload."""
        return map(self._labelled, self.workload.arrivals())

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """Those of the workload."""
        return map(self._labelled, self.workload.following(request_id, now_ns))

    def _labelled(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        changes: dict[str, Any] = {"arrival_s": arrival.at_ns / SECOND}
        if self.classes > 1:
            changes["priority"] = self._share(CLASS, request, self.classes)
        if self.tenants > 1:
            # The first tenant asks as often as all others together.
            tenant = max(0, self._share(TENANT, request, 2 * self.tenants - 2) - self.tenants + 2)
            changes["cache_salt"] = f"tenant {tenant}"
        return arrival._replace(request=replace(request, **changes))

    def _share(self, purpose: int, request: Request, count: int) -> int:
        return int(drawn(self.seed, purpose, request.id) * count)
