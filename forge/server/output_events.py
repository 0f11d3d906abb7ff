"""Events of an answer: what a parser of a model's output reports, in order. Values only.

ReasoningPiece   text of the reasoning
TextPiece        text of the content
CallStart        a call of a tool begins
ArgumentsPiece   more of the arguments of the call that began last, as JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol


class ReasoningPiece(NamedTuple):
    """A piece of an answer's reasoning."""

    text: str


class TextPiece(NamedTuple):
    """Text of an answer outside its reasoning and its calls."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a call of this tool."""

    name: str


class ArgumentsPiece(NamedTuple):
    """A piece of the latest call's arguments, as JSON."""

    text: str


OutputEvent = ReasoningPiece | TextPiece | CallStart | ArgumentsPiece


class CallParser(Protocol):
    """Finds the calls in an answer while it grows.

    The events of all texts, joined, do not depend on where the answer is cut into texts.
    """

    @property
    def num_calls(self) -> int:
        """Return the number of calls that have started."""
        ...

    @property
    def is_open(self) -> bool:
        """Return whether the arguments of the latest call are incomplete."""
        ...

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain now."""
        ...

    def flush(self) -> list[OutputEvent]:
        """Return the events of the text that was held back. This is the last call."""
        ...


def merge_events(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Return the events with neighbours of one kind merged, except for the starts of calls."""
    joined: list[OutputEvent] = []
    for kind, group in groupby(events, type):
        if kind is CallStart:
            joined += group
        else:
            joined.append(kind("".join([event[0] for event in group])))
    return joined
