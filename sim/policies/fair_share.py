"""Fair share: whoever asks for little is not behind whoever asks for much.

A tenant is a `cache_salt`. A choice has no memory, so shares are not counted: the tenant with the
fewest tokens waiting goes first (shortest queue first), the one with the most blocks is preempted
first, and prompts that are computed together have equal chunks.
"""

from collections import Counter
from collections.abc import Sequence

from forge.policy import FCFS, Candidate, Split


def least_asked(waiting: Sequence[Candidate]) -> Candidate | None:
    """The oldest request of the tenant with the fewest prompt tokens in line."""
    asked: Counter[str] = Counter()
    for candidate in waiting:
        asked[candidate.request.cache_salt] += len(candidate.request.prompt)
    return min(waiting, key=lambda c: (asked[c.request.cache_salt], c.id))


def most_held(running: Sequence[Candidate]) -> Candidate:
    """The newest sequence of the tenant that holds the most blocks."""
    held: Counter[str] = Counter()
    for candidate in running:
        held[candidate.request.cache_salt] += candidate.num_blocks
    return max(running, key=lambda c: (held[c.request.cache_salt], c.id))


def alike(budget: int, num_decodes: int, filling: Sequence[Candidate]) -> Split:
    """Every decode, then equal chunks; what short prompts leave goes to the others."""
    chunks = [0] * len(filling)
    left = budget - num_decodes
    places = sorted(range(len(filling)), key=lambda i: filling[i].num_pending)
    for done, place in enumerate(places):
        chunks[place] = min(filling[place].num_pending, left // (len(places) - done))
        left -= chunks[place]
    return Split(num_decodes, tuple(chunks))


policy = FCFS._replace(admit=least_asked, preempt=most_held, split=alike)
