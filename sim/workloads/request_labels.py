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
from forge.sim.draws import CLASS_DRAW, TENANT_DRAW, draw_uniform
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import RequestArrival, Workload


class LabeledWorkload(NamedTuple):
    """A workload whose requests say when they came, of which class and for whom."""

    workload: Workload
    num_classes: int
    num_tenants: int
    seed: int

    def arrivals(self) -> Iterator[RequestArrival]:
        """Those of the workload."""
        return map(self._add_labels, self.workload.arrivals())

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Those of the workload."""
        return map(self._add_labels, self.workload.follow_up_arrivals(request_id, now_ns))

    def _add_labels(self, arrival: RequestArrival) -> RequestArrival:
        request = arrival.request
        changes: dict[str, Any] = {"arrival_s": arrival.at_ns / NS_PER_S}
        if self.num_classes > 1:
            changes["priority"] = self._draw_index(CLASS_DRAW, request, self.num_classes)
        if self.num_tenants > 1:
            # The first tenant asks as often as all others together.
            tenant = max(
                0,
                self._draw_index(TENANT_DRAW, request, 2 * self.num_tenants - 2)
                - self.num_tenants
                + 2,
            )
            changes["cache_salt"] = f"tenant {tenant}"
        return arrival._replace(request=replace(request, **changes))

    def _draw_index(self, purpose: int, request: Request, count: int) -> int:
        return int(draw_uniform(self.seed, purpose, request.id) * count)
