"""Shortest job first: the fewest tokens of prompt and output, within the most urgent class.

The lowest mean latency where lengths are known. The length of an output is taken from `max_tokens`:
an upper bound on a server, exact in the simulator. Long requests wait as long as short ones keep
arriving.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext


def num_tokens(candidate: Candidate) -> int:
    """Return the tokens of prompt and output. A decode token counts as much as a prompt token."""
    return len(candidate.request.prompt) + (candidate.request.params.max_tokens or 0)


def admit_shortest_job(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the shortest of the most urgent class; ties go to the older request."""
    return min(waiting, key=lambda c: (c.request.priority, num_tokens(c), c.id))


policy = FCFS._replace(admit=admit_shortest_job)
