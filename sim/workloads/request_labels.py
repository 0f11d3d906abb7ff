"""Request labels: arrival time, priority class and tenant of the requests of a workload.

Owns the labels. Knows no workload and no engine. Draws depend on the id of the request, or on its
session, whose turns all have the same labels. So labels do not change lengths or times.

    RequestArrival(at_ns, request) ──► the same with arrival_s, priority, cache_salt and tenant
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from forge.sim.draws import CLASS_DRAW, TENANT_DRAW, draw_uniform
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import RequestArrival, Workload


class LabeledWorkload(NamedTuple):
    """A workload whose requests carry arrival time, priority class and tenant."""

    workload: Workload
    num_classes: int
    num_tenants: int
    seed: int

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield the arrivals of the workload, labeled."""
        return map(self._add_labels, self.workload.arrivals())

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the arrivals of the workload, labeled."""
        return map(self._add_labels, self.workload.follow_up_arrivals(request_id, now_ns))

    def _add_labels(self, arrival: RequestArrival) -> RequestArrival:
        request = arrival.request
        key = request.id if arrival.session is None else arrival.session
        changes: dict[str, Any] = {"arrival_s": arrival.at_ns / NS_PER_S}
        if self.num_classes > 1:
            changes["priority"] = self._draw_index(CLASS_DRAW, key, self.num_classes)
        if self.num_tenants > 1:
            # The first tenant sends as many requests as all others together.
            tenant = max(
                0,
                self._draw_index(TENANT_DRAW, key, 2 * self.num_tenants - 2) - self.num_tenants + 2,
            )
            changes["cache_salt"] = changes["tenant"] = f"tenant {tenant}"
        return arrival._replace(request=replace(request, **changes))

    def _draw_index(self, purpose: int, key: int, count: int) -> int:
        return int(draw_uniform(self.seed, purpose, key) * count)
