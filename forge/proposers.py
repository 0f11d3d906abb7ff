"""Proposers: drafts guessed from a sequence's own tokens, without a model.

Owns how tokens are guessed without a model. Knows no plan, block or batch: a proposal is a pure
function of a sequence's tokens and its id. A guess is certain (q = 1), so both acceptance rules
take it, and a wrong one costs a position of a step and nothing else.

    NGramProposer    ... for i in range(n): ... for i in ra the last tokens were there before:
                     └─────────┘ └─── proposed next time what followed them is proposed
    OracleProposer   a recorded output, with some tokens changed: drafts of a chosen acceptance, at
                     no cost, to measure what everything else costs

Prompt lookup: Saxena 2023; as a suffix match over prompt and output.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from forge.sampling import draw_key, uniform

_CORRUPTION = 16
"""Purpose of the draws of OracleProposer."""


class Proposer(Protocol):
    """Guesses the tokens that follow."""

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        """Return at most `max_drafts` tokens that may follow `tokens`, or ()."""
        ...


class NGramProposer:
    """Proposes what followed the last earlier match of the last `max_n` down to `min_n` tokens.

    max_lookback   tokens that are searched: bounds the cost, O(max_lookback) a call
    """

    def __init__(self, max_n: int = 4, min_n: int = 2, max_lookback: int = 4096) -> None:
        assert 1 <= min_n <= max_n, f"{min_n=} {max_n=}"
        self._max_n = max_n
        self._min_n = min_n
        self._max_lookback = max_lookback

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        """Return at most `max_drafts` tokens that followed the longest match, or ()."""
        context = array("i", tokens[-self._max_lookback :])
        data = context.tobytes()
        for size in range(min(self._max_n, len(context) - 1), self._min_n - 1, -1):
            match_end = _find_last_match(data, size, context.itemsize)
            if match_end is not None:
                return tuple(context[match_end : match_end + max_drafts])
        return ()


def _find_last_match(data: bytes, size: int, width: int) -> int | None:
    """Return the end of the last earlier occurrence of the last `size` tokens, or None.

    data   the tokens, `width` bytes each: bytes are searched in C
    """
    suffix, end = data[-size * width :], len(data) - width
    while (offset := data.rfind(suffix, 0, end)) >= 0:
        if offset % width == 0:
            return offset // width + size
        end = offset + len(suffix) - 1
    return None


class OracleProposer:
    """Replays recorded outputs, each token changed with a chosen probability.

    outputs      output of each request without drafts, by request id
    acceptance   probability that a token is not changed, independently for each
    vocab_size   a changed token is another one below it
    """

    def __init__(
        self,
        outputs: Mapping[int, Sequence[int]],
        acceptance: float,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self._outputs = outputs
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._seed = seed

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        """Return the recorded tokens at these positions, some changed.

        () for an unknown request.
        """
        num_output = len(tokens) - prompt_len
        drafts = self._outputs.get(request_id, ())[num_output : num_output + max_drafts]
        return tuple(
            self._corrupt(request_id, len(tokens) + i, token) for i, token in enumerate(drafts)
        )

    def _corrupt(self, request_id: int, position: int, token: int) -> int:
        key = draw_key(self._seed ^ (request_id << 20), position, _CORRUPTION)
        if uniform(key, 0) < self._acceptance:
            return token
        return (token + 1) % self._vocab_size
