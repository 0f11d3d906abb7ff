"""Longest prefix: the sequence with the most cached tokens goes first, before they are evicted.

Only the first sequences of the queue are looked up: the time grows with their number. A sequence is
overtaken a bounded number of times. See RadixAttention in SGLang (Zheng et al. 2024).
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext, oldest_overtaken

MAX_LOOKUPS = 8
"""Sequences of the queue that are compared."""

MAX_OVERTAKEN = 64
"""Admissions of later sequences after which a sequence is admitted in any case."""


def admit_longest_prefix(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the sequence with the longest cached prefix, in the most urgent class."""
    overtaken = oldest_overtaken(waiting, MAX_OVERTAKEN)
    if overtaken is not None:
        return overtaken
    return min(
        waiting[:MAX_LOOKUPS],
        key=lambda c: (c.request.priority, -context.num_cached_tokens(c), c.id),
    )


policy = FCFS._replace(admit=admit_longest_prefix)
