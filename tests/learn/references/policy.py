"""First fit: the oldest request whose blocks are free."""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext


def fits(candidate: Candidate, context: PolicyContext) -> bool:
    """Return whether its blocks are free, besides those that the scheduler keeps."""
    num_needed = -(-candidate.num_pending // context.block_size)
    num_kept = min(len(context.running), max(1, context.num_blocks // 100))
    return num_needed + num_kept <= context.num_free_blocks


def admit(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the oldest request that fits."""
    return next((each for each in waiting if fits(each, context)), None)


policy = FCFS._replace(admit=admit)
