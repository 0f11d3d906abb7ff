"""CommitGate: the sequences whose next row depends on a result that is still in flight.

Owns the set of them, and `Sequence.inspect_from`, which no other module writes. In the set are
sequences with drafts: their length is known once the drafts are verified. All others run ahead.

    step       0            1            2            3
    gated     |row|  commit  |row|  commit  |row|             one row, then its commit
    others    |row|row|row|row|row|row|row|row|row|           planned ahead of their commits

Always true: while blocked sequences may gain as many tokens as the others, nothing is planned
before the commit. Otherwise two halves of the batch, each waiting for the other's step, would take
turns.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge.sequence import Sequence


class CommitGate:
    """Running sequences whose next row must wait for a commit.

    sequences   running sequences that are planned one commit at a time, by id
    """

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}

    def update(self, sequence: Sequence) -> None:
        """Add a sequence that has drafts, and remove any other.

        Call it when a sequence was admitted and when its `num_drafts` was set. From then on each of
        its results is inspected, until `skip_inspection`.
        """
        sequence.inspect_from = 0
        if sequence.num_drafts:
            self.sequences[sequence.id] = sequence
        else:
            self.sequences.pop(sequence.id, None)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that no longer runs. Its result in flight is inspected."""
        sequence.inspect_from = 0
        self.sequences.pop(sequence.id, None)

    def skip_inspection(self, sequence: Sequence, review_len: int) -> None:
        """Let `commit` append tokens without inspection while the length stays below `review_len`.

        A stop id, a failure and the token that reaches `review_len` are inspected all the same.
        Nothing changes for a sequence in the gate, with a stop checker or with a matcher. Call it
        when a token sampled with the current blocks is committed: a result before may be of a
        prompt chunk.
        """
        reads_tokens = sequence.stop_checker is not None or sequence.matcher is not None
        if not reads_tokens and sequence.id not in self.sequences:
            sequence.inspect_from = review_len - 1

    def blocked(self) -> set[int]:
        """Return the ids of gated sequences that can have no row before a commit.

        Their known tokens are all planned. One whose last token may be in flight is left out.
        """
        return {s.id for s in self.sequences.values() if s.num_pending <= 0 and not s.is_ending}

    def should_wait(self, blocked: set[int], running: Iterable[Sequence]) -> bool:
        """Return whether the blocked sequences may gain as many tokens in a step as all others.

        A row of a blocked sequence may gain one token and its drafts, any other row one token.
        """
        num_blocked = sum(1 + self.sequences[seq_id].num_drafts for seq_id in blocked)
        num_ready = sum(s.id not in blocked and not s.is_ending for s in running)
        return num_blocked >= num_ready
