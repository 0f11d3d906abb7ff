"""The logprobs of a prompt's tokens in a response, in vLLM's shape.

Owns the entries. Knows no request.

    null                                                            first: it has none
    {"5": {"logprob": -0.2, "rank": 1, "decoded_token": "a"},       the most likely tokens
     "9": {"logprob": -2.5, "rank": null, "decoded_token": "b"}}    and the token itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.request import TokenLogprob
from forge.server.legacy_logprobs import MIN_LOGPROB
from forge.server.time_slicing import TOKENS_PER_SLICE, EncodedList, SlicedWork, num_entries
from forge.tokenizer import Tokenizer


def build_prompt_logprobs(
    logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer
) -> SlicedWork[EncodedList]:
    """Build the entries of a prompt's tokens, in slices.

    logprobs   of the tokens after the first
    """
    entries = EncodedList()
    entries.extend([None])
    for start in range(0, len(logprobs), TOKENS_PER_SLICE):
        batch = logprobs[start : start + TOKENS_PER_SLICE]
        entries.extend([_build_entry(each, tokenizer) for each in batch])
        yield num_entries((), batch)
    return entries


def _build_entry(scored: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entry of one token. Its rank is known where it is among the most likely."""
    token, logprob, top = scored
    ranked = {other: (score, rank) for rank, (other, score) in enumerate(top, 1)}
    chosen: dict[int, tuple[float, int | None]] = {token: (logprob, None), **ranked}
    return {
        str(other): {
            "logprob": max(score, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_text(other),
        }
        for other, (score, rank) in chosen.items()
    }
