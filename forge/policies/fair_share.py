"""Fair share: tenants with few tokens do not wait for tenants with many.

A tenant is a `cache_salt`. A policy has no memory, so shares are not counted. The tenant with the
fewest waiting tokens goes first (shortest queue first). The tenant with the most blocks is
preempted first. Prompts that are computed together receive equal chunks.
"""

from collections import Counter
from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext, Split


def admit_shortest_tenant_queue(
    waiting: Sequence[Candidate], context: PolicyContext
) -> Candidate | None:
    """Return the oldest request of the tenant with the fewest waiting prompt tokens."""
    waiting_tokens: Counter[str] = Counter()
    for candidate in waiting:
        waiting_tokens[candidate.request.cache_salt] += len(candidate.request.prompt)
    return min(waiting, key=lambda c: (waiting_tokens[c.request.cache_salt], c.id))


def preempt_largest_tenant(running: Sequence[Candidate], context: PolicyContext) -> Candidate:
    """Return the newest sequence of the tenant that holds the most blocks."""
    num_blocks: Counter[str] = Counter()
    for candidate in running:
        num_blocks[candidate.request.cache_salt] += candidate.num_blocks
    return max(running, key=lambda c: (num_blocks[c.request.cache_salt], c.id))


def split_evenly(
    budget: int, num_decodes: int, filling: Sequence[Candidate], context: PolicyContext
) -> Split:
    """Return every decode, then equal chunks; tokens that short prompts leave go to the others."""
    chunks = [0] * len(filling)
    left = budget - num_decodes
    order = sorted(range(len(filling)), key=lambda i: filling[i].num_pending)
    for done, index in enumerate(order):
        chunks[index] = min(filling[index].num_pending, left // (len(order) - done))
        left -= chunks[index]
    return Split(num_decodes, tuple(chunks))


policy = FCFS._replace(
    admit=admit_shortest_tenant_queue, preempt=preempt_largest_tenant, split=split_evenly
)
