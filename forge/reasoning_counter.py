"""ReasoningCounter: which tokens of an output are its reasoning, while it grows.

Owns the search for the markers. Knows no format of a model and no request.

    output    <think>  why ...  </think>  answer
    counted   1        2   3 4  5
    is_open            yes                no
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MAX_LINE_BREAKS = 2
"""Line breaks next to a marker that belong to it: before it, and at the start of an answer."""


class ReasoningCounter:
    """Counts the tokens of an answer's reasoning: all up to the one that ends its end marker.

    begin         marker that the answer may begin with; "": it begins inside its reasoning
    ends          markers of which the first one ends the reasoning; (): there is none
    token_bytes   returns the bytes of a token, or the name of a special one

    O(1) a token.
    """

    def __init__(
        self, begin: str, ends: Iterable[str], token_bytes: Callable[[int], bytes]
    ) -> None:
        self.num_tokens = 0
        self._token_bytes = token_bytes
        self._begin, self._ends = begin.encode(), [end.encode() for end in ends]
        self._tail = b""  # end of the output, as far as a marker may have started in it
        self._tail_size = max(map(len, self._ends), default=1) - 1
        self._num_undecided = 0  # tokens of what may be the begin marker

    @property
    def is_open(self) -> bool:
        """True after the begin marker and before the end marker."""
        return not self._begin and bool(self._ends)

    def add(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the output."""
        for token in tokens:
            if not self._ends:
                return
            self._tail += self._token_bytes(token)
            self._num_undecided += 1
            if not self._begin or self._has_begun():
                self.num_tokens += self._num_undecided
                self._num_undecided = 0
                if any(end in self._tail for end in self._ends):
                    self._ends = []
                self._tail = self._tail[max(0, len(self._tail) - self._tail_size) :]

    def _has_begun(self) -> bool:
        """Return whether the begin marker is complete; end the count where it cannot come."""
        begin, start = self._begin, self._tail.lstrip(b"\n")
        if start.startswith(begin):
            self._begin, self._tail = b"", start[len(begin) :]
            return True
        if len(self._tail) - len(start) > MAX_LINE_BREAKS or not begin.startswith(start):
            self._ends = []
        return False
