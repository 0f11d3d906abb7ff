"""OutputParser: an answer's reasoning, content and calls, from its text while it grows.

Owns the order of the parsers. Knows no request, HTTP or JSON of a response, so that every API that
answers a chat can use it.

    text of the engine ──ReasoningParser──► ReasoningPiece                      reasoning
                                └─ content ──CallParser──► TextPiece            content
                                                           CallStart            a call's name
                                                           ArgumentsPiece       its arguments
    tokens of the engine ──ReasoningCounter──► num_reasoning_tokens
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.outputs import ChoiceOutput, TextDelta
from forge.reasoning_counter import ReasoningCounter
from forge.server.call_check import CallCheck
from forge.server.choice_end import find_violation
from forge.server.output_events import CallParser, OutputEvent, TextPiece, merge_events
from forge.server.reasoning import ReasoningParser


class OutputParser:
    """Parses one choice of an answer. `push` and `count_tokens` are independent of each other."""

    def __init__(
        self,
        reasoning: ReasoningParser,
        calls: CallParser,
        counter: ReasoningCounter,
        check: CallCheck,
    ) -> None:
        self._reasoning = reasoning
        self._check = check
        self._calls = calls
        self._counter = counter

    @property
    def num_calls(self) -> int:
        """Return the number of calls that have started."""
        return self._calls.num_calls

    @property
    def num_valid_calls(self) -> int:
        """Return the number of calls that have ended and have their schemas, up to a violation."""
        return self._check.num_valid_calls

    @property
    def is_open(self) -> bool:
        """Return whether the arguments of the latest call are incomplete."""
        return self._calls.is_open

    @property
    def violation(self) -> str | None:
        """Return how a complete part of the answer violates its schema, or None."""
        return self._check.violation

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of tokens of the reasoning, with its markers, so far."""
        return self._counter.num_tokens

    def count_tokens(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the answer to the count of those of the reasoning."""
        self._counter.add(tokens)

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain now, with equal neighbours merged."""
        events = merge_events(self._find_calls(self._reasoning.push(text)))
        return self._check.add(events, is_in_call=self.is_open)

    def flush(self, end: ChoiceOutput | TextDelta) -> list[OutputEvent]:
        """Return the events of the text that was held back. This is the last call.

        end   the output that was read, or its last delta
        """
        events = self._find_calls(self._reasoning.flush())
        events = merge_events([*events, *self._calls.flush()])
        events = self._check.add(events, is_in_call=self.is_open)
        stops = end.finish_reason == "stop"
        self._check.end(
            ends_by_itself=stops and end.stop_match.reason is None,
            stops=stops,
            is_in_call=self.is_open,
        )
        self._check.violation = self._check.violation or find_violation(end)
        return events

    def _find_calls(self, pieces: Sequence[OutputEvent]) -> list[OutputEvent]:
        """Return the events with the calls in the content."""
        events: list[OutputEvent] = []
        for piece in pieces:
            events += self._calls.push(piece.text) if isinstance(piece, TextPiece) else [piece]
        return events
