"""ToolCallParser: the calls in an answer while it grows.

Owns the text around arguments. Knows no request and no HTTP.

    text ──► TextPiece | prefix of a call ──► ArgumentsReader ──► suffix, separator or end ──► ...
                         CallStart            ArgumentsPiece

Always true: the grammar of an answer allows nothing else, so the parser reads every call. Text may
come in chunks of any size: the parser's events, joined, are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from forge.server.output_events import (
    ArgumentsPiece,
    CallStart,
    OutputEvent,
    TextPiece,
    merge_events,
)
from forge.server.parameter_reader import ArgumentsReader, JSONReader, ParameterReader
from forge.server.tool_formats import CallableTool, ToolCallFormat
from forge.server.tool_parameters import arguments_of


class ToolCallParser:
    """Finds the calls in an answer while it grows. Without tools it finds none.

    Text is held back only while it may begin a call. A call begins with its arguments, which are
    held back only where they are not JSON. Anything but a call of these tools is text.

    num_calls   calls that have started

    O(log tools) a character, and O(1) in the length of the text.
    """

    def __init__(self, call_format: ToolCallFormat, tools: Iterable[CallableTool]) -> None:
        self.num_calls = 0
        self._format = call_format
        self._tools = {tool.name: tool for tool in tools}
        self._reader: ArgumentsReader | None = None  # of the latest call
        self._buffer = ""
        suffix, first = call_format.call_suffix, call_format.first_char
        self._call_end = suffix + call_format.end
        openings = {f"{call_format.call_prefix(name)}{first}": name for name in self._tools}
        self._first_prefixes = {call_format.begin + text: name for text, name in openings.items()}
        if call_format.other_trigger:
            other_begin = call_format.other_begin
            self._first_prefixes |= {other_begin + text: name for text, name in openings.items()}
        self._next_prefixes: dict[str, str] = {}
        if call_format.separator is not None:
            self._next_prefixes = {
                f"{suffix}{call_format.separator}{text}": name for text, name in openings.items()
            }
        self._first_sorted = sorted(self._first_prefixes)
        self._next_sorted = sorted([*self._next_prefixes, self._call_end])
        self._after_call = False  # a call has started; its end or the next call follows it

    @property
    def is_open(self) -> bool:
        """Return whether the arguments of the latest call are incomplete."""
        return self._reader is not None and self._reader.is_open

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain now, with equal neighbours merged."""
        if not self._first_sorted:
            return [TextPiece(text)] if text else []
        events: list[OutputEvent] = []
        at = 0
        while at < len(text):
            reader = self._reader
            at = (
                self._read_arguments(reader, text, at, events)
                if reader is not None and reader.is_open
                else self._read_text(text, at, events)
            )
        return merge_events(events)

    def flush(self) -> list[OutputEvent]:
        """Return the text that was held back. This is the last call.

        The incomplete beginning of a first call is text. That of a further call, and an incomplete
        end, are dropped.
        """
        buffered, self._buffer = self._buffer, ""
        return [TextPiece(buffered)] if buffered and not self._after_call else []

    def _read_text(self, text: str, at: int, events: list[OutputEvent]) -> int:
        """Read one character, or all before the next that may begin a call; return the position."""
        if not self._buffer and not self._after_call:
            start = self._find_first_char(text, at)
            if start != at:
                events.append(TextPiece(text[at:start]))
                return start
        self._read_char(text[at], events)
        return at + 1

    def _find_first_char(self, text: str, at: int) -> int:
        """Return where a call may begin: at the first character that all calls begin with."""
        first_char = self._first_sorted[0][0]
        if self._first_sorted[-1][0] != first_char:
            return at
        start = text.find(first_char, at)
        return len(text) if start < 0 else start

    def _read_char(self, char: str, events: list[OutputEvent]) -> None:
        buffered = self._buffer + char
        if self._after_call and not _has_prefix(buffered, self._next_sorted):
            # This cannot follow a call. Drop the call's end, if it is here; the rest is text.
            self._buffer, self._after_call = "", False
            for following in buffered.removeprefix(self._call_end):
                self._read_char(following, events)
            return
        while buffered and not self._after_call and not _has_prefix(buffered, self._first_sorted):
            events.append(TextPiece(buffered[0]))
            buffered = buffered[1:]
        self._buffer = buffered
        name = (self._next_prefixes if self._after_call else self._first_prefixes).get(buffered)
        if name is not None:
            events.append(CallStart(name))
            self.num_calls += 1
            self._buffer, self._after_call = "", True
            self._reader = self._create_reader(self._tools[name])
            self._read_arguments(self._reader, self._format.first_char, 0, events)

    def _create_reader(self, tool: CallableTool) -> ArgumentsReader:
        syntax, suffix = self._format.parameters, self._format.call_suffix
        if syntax is None:
            return JSONReader()
        return ParameterReader(syntax, arguments_of(tool, syntax).parameters, suffix)

    def _read_arguments(
        self, reader: ArgumentsReader, text: str, at: int, events: list[OutputEvent]
    ) -> int:
        """Read to the end of the arguments or of the text; return the position."""
        pieces: list[str] = []
        at = reader.read(text, at, pieces)
        events += [ArgumentsPiece(piece) for piece in pieces if piece]
        if not reader.is_open and self._format.parameters is not None:
            self._buffer = self._format.call_suffix  # which showed the end
        return at


def _has_prefix(text: str, expected: Sequence[str]) -> bool:
    """Return whether one of the sorted `expected` texts begins with `text`."""
    at = bisect_left(expected, text)
    return at < len(expected) and expected[at].startswith(text)


class LeadingCallParser:
    """Finds calls only at the beginning of an answer: any other answer has none.

    parser   finds the calls
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._is_text = False

    @property
    def num_calls(self) -> int:
        """Return the number of calls that have started."""
        return self._parser.num_calls

    @property
    def is_open(self) -> bool:
        """Return whether the arguments of the latest call are incomplete."""
        return self._parser.is_open

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain now."""
        if self._is_text:
            return [TextPiece(text)] if text else []
        events: list[OutputEvent] = []
        for at, char in enumerate(text):
            events += self._parser.push(char)
            if events and not self.num_calls:
                self._is_text = True
                rest = "".join(event[0] for event in self._parser.flush()) + text[at + 1 :]
                return merge_events([*events, *([TextPiece(rest)] if rest else [])])
            if events:
                return merge_events([*events, *self._parser.push(text[at + 1 :])])
        return events

    def flush(self) -> list[OutputEvent]:
        """Return the text that was held back. This is the last call."""
        return self._parser.flush()
