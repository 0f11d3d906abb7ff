"""Beat head-of-line blocking with a policy that passes only requests that cannot start.

First come, first served: if the oldest waiting request lacks blocks, all others wait with it,
although there is room for them. Write `admit`: return the request to admit next, or None.

The check runs two worlds. In the first, one prompt in eight is long and needs most blocks: 75 % of
the requests must be good (first token within a second), and under `fcfs` it is 60 % at most. In the
second, blocks are plentiful and slots are short: there an order that prefers short prompts only
lets the long ones wait. In neither world may the longest wait for a first token be more than 1.3
times that under `fcfs`.

150 requests arrive, then none. In a stream without an end, a long prompt would wait as long as
short ones take the blocks that it needs. A bound on `candidate.num_overtaken` ends that: a request
that was passed so often is the next one. Here a bound is not needed; one below 90 brings the
blocking back, since that many short requests come while a long prompt waits for its blocks.

`waiting` is in the order of arrival. What you may read: `candidate.num_pending` (tokens that it has
yet to compute), `context.block_size`, `context.num_free_blocks`, `context.num_blocks`,
`context.running`; see forge/policy.py for the rest. The scheduler keeps one block free for each
running sequence, up to 1 % of all. While nothing runs something must be admitted. To try it:

    forge sim --policy learn/06_policy.py --num-blocks 400 --output 100 --rate 16 --requests 150 \\
        --prompt 32-96,32-96,32-96,32-96,32-96,32-96,32-96,4000
"""

from collections.abc import Sequence

from forge.policy import FCFS, Candidate, PolicyContext


def admit(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate | None:
    """Return the request to admit next, or None. This is what `fcfs` does."""
    return waiting[0]


policy = FCFS._replace(admit=admit)
