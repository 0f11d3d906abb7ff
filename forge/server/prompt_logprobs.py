"""The logprobs of a prompt's tokens in a response, in vLLM's shape.

Owns the entries. Knows no request.

    null                                                            first: it has none
    {"5": {"logprob": -0.2, "rank": 1, "decoded_token": "a"},       the most likely tokens
     "9": {"logprob": -2.5, "rank": null, "decoded_token": "b"}}    and the token itself
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from forge.request import TokenLogprob
from forge.server.legacy_logprobs import MIN_LOGPROB
from forge.server.time_slicing import (
    ENTRIES_PER_SLICE,
    EncodedList,
    SlicedWork,
    iter_batches,
    num_entries,
    split_scores,
)
from forge.tokenizer import Tokenizer


def build_prompt_logprobs(
    logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer
) -> SlicedWork[EncodedList]:
    """Build the entries of a prompt's tokens, in slices.

    logprobs   of the tokens after the first
    """
    entries = EncodedList()
    entries.extend([None])
    for batch in split_scores(logprobs):
        if len(batch[0].top) > ENTRIES_PER_SLICE:
            parts = iter_batches(_rank_tokens(batch[0]), ENTRIES_PER_SLICE)
            members = (_build_members(part, tokenizer) for part in parts)
            yield from entries.add_in_parts("{", members, "}")
        else:
            entries.extend([_build_members(_rank_tokens(each), tokenizer) for each in batch])
            yield num_entries((), batch)
    return entries


class _RankedToken(NamedTuple):
    """A token of an entry. Its rank is known where it is among the most likely ones."""

    token: int
    logprob: float
    rank: int | None


def _rank_tokens(scored: TokenLogprob) -> Iterator[_RankedToken]:
    """Yield the token itself, and the others among the most likely ones."""
    token, logprob, top = scored
    rank = next((rank for rank, (other, _) in enumerate(top, 1) if other == token), None)
    yield _RankedToken(token, logprob, rank)
    for other_rank, (other, score) in enumerate(top, 1):
        if other != token:
            yield _RankedToken(other, score, other_rank)


def _build_members(ranked: Iterable[_RankedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the members of these tokens of an entry."""
    return {
        str(token): {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }
        for token, logprob, rank in ranked
    }
