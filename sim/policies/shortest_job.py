"""Shortest job first: the least work of prompt and output, within the most urgent class.

The least mean latency where lengths are known. Of an output that is `max_tokens`: an upper bound on
a server, the truth in the simulator. Long requests wait for as long as short ones keep coming.
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate


def num_tokens(candidate: Candidate) -> int:
    """Tokens to compute from the start; a decode step is counted as much as a prompt's token."""
    return len(candidate.request.prompt) + (candidate.request.params.max_tokens or 0)


def admit_shortest_job(waiting: Sequence[Candidate]) -> Candidate | None:
    """The shortest of the most urgent class; ties go to the older."""
    return min(waiting, key=lambda c: (c.request.priority, num_tokens(c), c.id))


policy = FCFS._replace(admit=admit_shortest_job)
