"""StopStringChecker: whether the text of an output has a stop string.

Owns the detokenizer of one output in the engine. Knows no request: the scheduler feeds it tokens.

    tokens ─► text so far ─► a stop string is complete? ─► the output ends at this token

Always true: a stop string is found at the token that completes it, also across tokens.
"""

from __future__ import annotations

from forge.request import Request
from forge.tokenizer import StopStringDetokenizer, Tokenizer


class StopStringChecker:
    """Decodes one output as it grows, and finds the end of a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._text = create_stop_detokenizer(tokenizer, request)

    def feed(self, token: int) -> bool:
        """Append a token, and return whether a stop string is complete."""
        self._text.push(token)
        return self._text.matched_stop is not None


def create_stop_detokenizer(tokenizer: Tokenizer, request: Request) -> StopStringDetokenizer:
    """Return the detokenizer of an output of the request, in the engine and for its reader."""
    detokenizer, params = tokenizer.create_detokenizer(request.previous_token), request.params
    return StopStringDetokenizer(detokenizer, params.stop, params.min_tokens)


def create_stop_checker(tokenizer: Tokenizer | None, request: Request) -> StopStringChecker | None:
    """Return the checker of a new output, or None where nothing can be found."""
    if not request.params.stop or tokenizer is None:
        return None
    return StopStringChecker(tokenizer, request)
