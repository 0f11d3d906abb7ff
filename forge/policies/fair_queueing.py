"""Fair queueing: each tenant is served as many tokens as any other that has requests waiting.

A counter per tenant grows with the tokens that it is served, an output token twice as much as one
of a prompt, and the tenant with the lowest goes first. One that comes back after a pause begins at
the lowest counter of those present, so it cannot save up service. VTC (Sheng et al. 2024).
"""

from collections.abc import Sequence
from typing import NamedTuple

from forge.policy import FCFS, Candidate, PolicyContext, PolicyEvent, PolicyEventKind

OUTPUT_WEIGHT = 2.0
"""Service of an output token, in tokens of a prompt."""


class Account(NamedTuple):
    """Service of a tenant: what was counted, and how many of its sequences are live."""

    tenant: str
    service: float = 0.0
    num_live: int = 0


Accounts = tuple[Account, ...]


def count_service(accounts: Accounts, event: PolicyEvent) -> Accounts:
    """Return the accounts after an event: a prompt is charged when admitted, outputs at the end."""
    candidate, kind = event.candidate, event.kind
    if candidate is None:
        return accounts
    tenant = candidate.request.tenant
    mine = next((a for a in accounts if a.tenant == tenant), Account(tenant))
    others = tuple(a for a in accounts if a.tenant != tenant)
    if kind is PolicyEventKind.ARRIVED:
        if not mine.num_live:
            last = others[-1].service if others else 0.0  # the latest event was of that tenant
            floor = min((a.service for a in others if a.num_live), default=last)
            mine = mine._replace(service=max(mine.service, floor))
        mine = mine._replace(num_live=mine.num_live + 1)
    elif kind is PolicyEventKind.ADMITTED and not candidate.num_served:  # preempted ones have paid
        mine = mine._replace(service=mine.service + candidate.num_pending)
    elif kind is PolicyEventKind.FINISHED:
        output = OUTPUT_WEIGHT * candidate.num_output
        mine = mine._replace(service=mine.service + output, num_live=max(0, mine.num_live - 1))
    return (*others, mine)


def admit_least_served_tenant(
    waiting: Sequence[Candidate], context: PolicyContext
) -> Candidate | None:
    """Return the oldest sequence of the tenant with the least service, in the most urgent class."""
    accounts: Accounts = context.state  # type: ignore[assignment]
    service = {a.tenant: a.service for a in accounts}
    for c in context.running:  # outputs that are not charged yet
        tenant = c.request.tenant
        service[tenant] = service.get(tenant, 0.0) + OUTPUT_WEIGHT * c.num_output
    return min(
        waiting, key=lambda c: (c.request.priority, service.get(c.request.tenant, 0.0), c.id)
    )


policy = FCFS._replace(admit=admit_least_served_tenant, update=count_service, initial_state=())
