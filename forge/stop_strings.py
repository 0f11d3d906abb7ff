"""StopStringChecker: whether the text of an output has a stop string.

Owns the detokenizer of one output in the engine. Knows no request: the scheduler feeds it tokens.

    tokens ─► text so far ─► a stop string is complete? ─► the output ends at this token

Always true: a stop string is found at the token that completes it, also across tokens.
"""

from __future__ import annotations

from forge.request import SamplingParams
from forge.tokenizer import StopStringDetokenizer, Tokenizer


class StopStringChecker:
    """Decodes one output as it grows, and finds the end of a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._text = StopStringDetokenizer(
            tokenizer.create_detokenizer(), params.stop, params.min_tokens
        )

    def feed(self, token: int) -> bool:
        """Append a token, and return whether a stop string is complete."""
        self._text.push(token)
        return self._text.matched_stop is not None


def create_stop_checker(
    tokenizer: Tokenizer | None, params: SamplingParams
) -> StopStringChecker | None:
    """Return the checker of a new output, or None where nothing can be found."""
    if not params.stop or tokenizer is None:
        return None
    return StopStringChecker(tokenizer, params)
