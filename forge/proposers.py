"""Proposers that know tokens: what may come next, by what a sequence has said so far.

Owns how tokens are guessed without a model. Knows no plan, block or batch: a proposal is a pure
function of a sequence's tokens and its id. A guess is certain (q = 1), so both acceptance rules
take it, and a wrong one costs a position of a step and nothing else.

    NGram     ... for i in range(n):  ...  for i in ra      the last tokens were there before:
                  └─────────┘ └─── proposed next time       what followed them is proposed
    Oracle    a recorded output, with some tokens spoiled: drafts of a chosen acceptance, at no
              cost, to measure what everything else costs

Prompt lookup: Saxena 2023; as a suffix match over prompt and output.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from forge.sampling import draw_key, uniform

_SPOIL = 16
"""Purpose of the Oracle's own draws."""


class Proposer(Protocol):
    """Guesses what follows."""

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, most: int
    ) -> tuple[int, ...]:
        """At most `most` tokens that may follow `tokens`; none where it has no idea."""
        ...


class NGram:
    """What followed the last `longest` down to `shortest` tokens, where they were last before.

    reach   tokens looked back at: bounds the cost, O(reach) a call
    """

    def __init__(self, longest: int = 4, shortest: int = 2, reach: int = 4096) -> None:
        assert 1 <= shortest <= longest, f"{shortest=} {longest=}"
        self._longest = longest
        self._shortest = shortest
        self._reach = reach

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, most: int
    ) -> tuple[int, ...]:
        """At most `most` tokens that followed the longest match; none where nothing matches."""
        seen = array("i", tokens[-self._reach :])
        data = seen.tobytes()
        for size in range(min(self._longest, len(seen) - 1), self._shortest - 1, -1):
            at = _last_before(data, size, seen.itemsize)
            if at is not None:
                return tuple(seen[at : at + most])
        return ()


def _last_before(data: bytes, size: int, width: int) -> int | None:
    """Where the last earlier occurrence of the last `size` tokens ends, or None.

    data   the tokens, `width` bytes each: bytes are searched in C
    """
    tail, end = data[-size * width :], len(data) - width
    while (at := data.rfind(tail, 0, end)) >= 0:
        if at % width == 0:
            return at // width + size
        end = at + len(tail) - 1
    return None


class Oracle:
    """Replays recorded outputs, each token spoiled with a chosen probability.

    outputs      what each request, by its id, gave without drafts
    acceptance   probability that a token is left as it was, each by itself
    vocab_size   a spoiled token is another one below it
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
        self, request_id: int, tokens: Sequence[int], prompt_len: int, most: int
    ) -> tuple[int, ...]:
        """The recorded tokens at these places, spoiled or not; none for a request without."""
        done = len(tokens) - prompt_len
        recorded = self._outputs.get(request_id, ())[done : done + most]
        return tuple(
            self._spoiled(request_id, len(tokens) + i, token) for i, token in enumerate(recorded)
        )

    def _spoiled(self, request_id: int, position: int, token: int) -> int:
        key = draw_key(self._seed ^ (request_id << 20), position, _SPOIL)
        if uniform(key, 0) < self._acceptance:
            return token
        return (token + 1) % self._vocab_size
