"""The format of gpt-oss: an answer of several messages, each in a channel.

Owns the grammar and the parser of such answers. Knows no request and no HTTP.

    <|channel|>analysis<|message|>Why<|end|>                                    reasoning
    <|start|>assistant<|channel|>commentary<|message|>I look<|end|>             reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>Because<|return|>              content

The prompt ends with <|start|>assistant. An answer ends with its first call or its final message.
OpenAI, Harmony response format, 2025.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from forge.server.held_text import partial_length
from forge.server.output_events import (
    ArgumentsPiece,
    CallStart,
    OutputEvent,
    ReasoningPiece,
    TextPiece,
    merge_events,
)
from forge.server.parameter_reader import JSONReader
from forge.server.tool_formats import CallableTool
from forge.server.tool_grammar import TerminalWriter, write_json_rule

MESSAGE, CHANNEL, START, END = "<|message|>", "<|channel|>", "<|start|>", "<|end|>"
BODY_ENDS = (END, "<|call|>", "<|return|>", START)
COUNTED_ENDS = (f"{CHANNEL}final", f"{CHANNEL}commentary to=")
"""Texts of which the first one ends the reasoning."""
MAX_HEADER_CHARS = 1024
"""Length of a header from which on it is content: each piece of it is searched again."""
_RECIPIENT = re.compile(r" to=functions\.([A-Za-z0-9_-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_STARTS = (CHANNEL, START, " to=")


class HarmonyGrammarBuilder:
    """Builds the grammar of an answer.

    special_ids   special tokens of the format, by name; the answer must have these tokens there
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._terminals = TerminalWriter(special_ids)

    def build_grammar(
        self, tools: Sequence[CallableTool], min_calls: int, max_calls: int, answer: str = ""
    ) -> str:
        """Return the grammar of an answer, which has at most one call.

        min_calls   0: a final message or a call; 1: a call
        max_calls   not read: a call ends the answer
        answer      right side of a rule for a final message; "": any text
        """
        write = self._terminals.write
        body = "BODY " + write(END)
        lines = ["TEXT: /(?s:.*)/"]
        if not self._terminals.has_special(END):
            body = "body"
            lines.append(f"body[lazy]: TEXT {json.dumps(END)}")
        else:
            lines.append("BODY: /(?s:.*)/")
        # Whole headers: the lexer does not return to the end of a shorter terminal.
        headers = [write(f"{CHANNEL}{name}{MESSAGE}") for name in ("analysis", "commentary")]
        lines += [
            f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}",
            f"step: ({' | '.join(headers)}) {body} {write(START + 'assistant')}",
        ]
        for index, tool in enumerate(tools):
            header = f"commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}"
            lines += [
                f"call{index}: {write(CHANNEL + header)} rest{index}",
                f"rest{index}: {write_json_rule(tool.parameters)}",
            ]
        if min_calls:
            return "\n".join(["start: step* call", *lines])
        final = f"final: {write(f'{CHANNEL}final{MESSAGE}')} {'answer' if answer else 'TEXT'}"
        lines += [final, *([f"answer: {answer}"] if answer else [])]
        return "\n".join(["start: step* (final | call)", *lines])


class HarmonyParser:
    """Finds reasoning, content and calls in the messages of an answer while it grows.

    names       tools that may be called
    num_calls   calls that have started

    Messages before the final one are reasoning, with a line break between two of them. Text that
    begins with no header is content.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.num_calls = 0
        self._names = frozenset(names)
        self._reader: JSONReader | None = None  # of the latest call
        self._buffer = ""
        self._kind: type[OutputEvent] | None = None  # of the message's body; None: in a header
        self._is_start = True
        self._separator = ""  # before the next piece of reasoning

    @property
    def is_open(self) -> bool:
        """Return whether the arguments of the latest call are incomplete."""
        return self._reader is not None and self._reader.is_open

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain now, with equal neighbours merged."""
        self._buffer += text
        events: list[OutputEvent] = []
        if self._is_start and self._buffer:
            starts = _HEADER_STARTS
            if not any(s.startswith(self._buffer) or self._buffer.startswith(s) for s in starts):
                self._kind = TextPiece
            elif not any(self._buffer.startswith(each) for each in starts):
                return []
            self._is_start = False
        while self._buffer and (self._read_header if self._kind is None else self._read_body)(
            events
        ):
            pass
        return merge_events(events)

    def flush(self) -> list[OutputEvent]:
        """Return the text that was held back. This is the last call. A header has no text."""
        buffered, self._buffer = self._buffer, ""
        events: list[OutputEvent] = []
        if self._kind is not None:
            self._add(buffered, events)
        elif self._is_start and buffered:
            events.append(TextPiece(buffered))
        return events

    def _read_header(self, events: list[OutputEvent]) -> bool:
        """Read a whole header; return False where it is incomplete."""
        at = self._buffer.find(MESSAGE, 0, MAX_HEADER_CHARS)
        if at < 0:
            if len(self._buffer) < MAX_HEADER_CHARS:
                return False
            self._kind = TextPiece  # no header is so long
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        self._kind = ReasoningPiece
        if recipient is not None and recipient[1] in self._names:
            self._kind, self._reader = ArgumentsPiece, JSONReader()
            self.num_calls += 1
            events.append(CallStart(recipient[1]))
        elif recipient is None and channel is not None and channel[1] == "final":
            self._kind = TextPiece
        return True

    def _read_body(self, events: list[OutputEvent]) -> bool:
        """Read a message's text up to its end; return False where more text must come first."""
        found = [(at, each) for each in BODY_ENDS if (at := self._buffer.find(each)) >= 0]
        if not found:
            held = max(partial_length(self._buffer, each) for each in BODY_ENDS)
            at = len(self._buffer) - held
            self._add(self._buffer[:at], events)
            self._buffer = self._buffer[at:]
            return False
        at, end = min(found)
        self._add(self._buffer[:at], events)
        self._buffer = self._buffer[at + len(end) :]
        self._separator = "\n" if self._kind is ReasoningPiece else self._separator
        self._kind = None
        return True

    def _add(self, text: str, events: list[OutputEvent]) -> None:
        """Add a piece of the message's text."""
        if not text:
            return
        if self._kind is ArgumentsPiece and self._reader is not None:
            if not self._reader.is_open:
                return
            text = text[: self._reader.read(text, 0, [])]
        elif self._kind is ReasoningPiece:
            text, self._separator = self._separator + text, ""
        assert self._kind is not None, "a header has no text"
        events.append(self._kind(text))
