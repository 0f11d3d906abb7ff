"""Formats of tool calls: for each family of models a row, its grammar and its parser.

Owns the formats. Knows no request and no HTTP.

    begin           <tool_call>\\n
    call_prefix     {"name": "NAME", "arguments":
    arguments       {...}, as their schema requires
    end of a call   }
    separator       \\n</tool_call>\\n<tool_call>\\n      and the next call
    end             \\n</tool_call>                     and the output ends

JSON is spaced as forge.structured_output spaces it.

Always true: the grammar of an answer allows nothing else, so the parser reads every call. Text may
come in chunks of any size: the parser's events, joined, are equal.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from forge.server.output_events import (
    ArgumentsPiece,
    CallStart,
    OutputEvent,
    TextPiece,
    merge_events,
)

JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolCallFormat(NamedTuple):
    """The format of one family's tool calls.

    template_marks   texts that the source of a family's template contains, all of them
    other_marks      texts that it does not contain, none of them
    trigger          text after which an answer must continue with a call; "" where only the
                     beginning of a call shows that
    begin            text before the first call
    separator        text from one call to the next; None where an answer has at most one call
    end              text after the last call
    arguments_key    key of a call's arguments
    id_prefix        prefix of a call's id; a template may refuse others
    id_digits        hexadecimal digits after the prefix
    """

    template_marks: tuple[str, ...]
    other_marks: tuple[str, ...]
    trigger: str
    begin: str
    separator: str | None
    end: str
    arguments_key: str = "arguments"
    id_prefix: str = "call_"
    id_digits: int = 24

    def call_prefix(self, name: str) -> str:
        """Return a call of this tool up to its arguments."""
        return f'{{"name": "{name}", "{self.arguments_key}": '


HERMES = ToolCallFormat(
    template_marks=("<tool_call>", '"arguments"'),
    other_marks=("<function=", "<arg_key>", "<tool_sep>"),
    trigger="<tool_call>",
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
MISTRAL = ToolCallFormat(
    template_marks=("[TOOL_CALLS] [",),
    other_marks=("[ARGS]",),
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS] [",
    separator=", ",
    end="]",
    id_prefix="",
    id_digits=9,
)
LLAMA = ToolCallFormat(
    template_marks=('{"name": function name, "parameters": ',),
    other_marks=(),
    trigger="",
    begin="",
    separator=None,
    end="",
    arguments_key="parameters",
)
FORMATS: Mapping[str, ToolCallFormat] = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "mistral, without a space": MISTRAL._replace(
        template_marks=("[TOOL_CALLS][",), begin="[TOOL_CALLS]["
    ),
    "llama": LLAMA,
}
"""Formats by family. A template has the first format whose marks it contains."""


def find_format(template: str) -> ToolCallFormat | None:
    """Return the format of a model with this chat template; None if it is not in FORMATS."""
    source = template.replace("\\", "")  # a template may escape quotes
    for call_format in FORMATS.values():
        if all(mark in source for mark in call_format.template_marks):
            if not any(mark in source for mark in call_format.other_marks):
                return call_format
    return None


class CallableTool(NamedTuple):
    """A tool that may be called. `parameters` is the schema of its arguments, an object.

    name   letters, digits, _ and -, which JSON does not escape
    """

    name: str
    parameters: Mapping[str, Any]


class ToolGrammarBuilder:
    """Builds the grammar of an answer, in llguidance's dialect of Lark.

    special_ids   special tokens in the format's texts, by name; the answer must have these tokens
                  there
    """

    def __init__(self, call_format: ToolCallFormat, special_ids: Mapping[str, int]) -> None:
        self._format = call_format
        self._special_ids = special_ids
        names = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special_names = re.compile(f"({'|'.join(names)})" if names else "(?!)")

    def build_grammar(self, tools: Sequence[CallableTool], min_calls: int, max_calls: int) -> str:
        """Return the grammar of an answer.

        min_calls   0: any text, and calls only after it; 1: nothing but calls
        max_calls   most calls, where the format has a separator
        """
        call_format, more_calls = self._format, ""
        if call_format.separator is not None and max_calls > 1:
            more_calls = f"({self._to_terminals(call_format.separator)} call){{0,{max_calls - 1}}} "
        lines = [
            f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}",
            f"more: {more_calls}{self._to_terminals(call_format.end)}",
        ]
        for index, (name, parameters) in enumerate(tools):
            schema = json.dumps({**parameters, "x-guidance": JSON_SPACING})
            lines += [
                f"call{index}: {self._to_terminals(call_format.call_prefix(name))} rest{index}",
                f'rest{index}: %json {schema} "}}"',
            ]
        if min_calls:
            return "\n".join([f"start: {self._to_terminals(call_format.begin)} call more", *lines])
        return "\n".join([*self._build_auto_rules(tools), *lines])

    def _build_auto_rules(self, tools: Sequence[CallableTool]) -> list[str]:
        """Return rules for text, or text up to a call: a lazy lexeme ends where a call begins."""
        call_format, lines = self._format, ["TEXT: /(?s:.*)/"]
        if call_format.trigger in self._special_ids:
            return [f"start: TEXT | TEXT {self._to_terminals(call_format.begin)} call more", *lines]
        if call_format.trigger:
            rest = self._to_terminals(call_format.begin.removeprefix(call_format.trigger))
            lines.append(f"sign[lazy]: TEXT {json.dumps(call_format.trigger)}")
            return [f"start: TEXT | sign {rest} call more", *lines]
        starts = ["TEXT"]
        for index, (name, _) in enumerate(tools):
            trigger, comma, rest = call_format.call_prefix(name).partition(", ")
            starts.append(f"sign{index} {self._to_terminals(comma + rest)} rest{index} more")
            lines.append(f"sign{index}[lazy]: TEXT {json.dumps(call_format.begin + trigger)}")
        return [f"start: {' | '.join(starts)}", *lines]

    def _to_terminals(self, text: str) -> str:
        """Return the text as terminals and special tokens; "" for no text."""
        parts = filter(None, self._special_names.split(text))
        ids = self._special_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)


_QUOTE_OR_BRACE = re.compile(r'["{}]')
_QUOTE_OR_BACKSLASH = re.compile(r'["\\]')


class ToolCallParser:
    """Finds the calls in an answer while it grows. Without tools it finds none.

    Text is held back only while it may begin a call. A call begins with its arguments, which are
    never held back. Anything but a call of these tools is text.

    num_calls   calls that have started
    is_open     whether the latest of them has not ended

    O(log tools) a character, and O(1) in the length of the text.
    """

    def __init__(self, call_format: ToolCallFormat, names: Iterable[str]) -> None:
        self.num_calls = 0
        self._depth = 0  # of braces, in arguments
        self._in_string = self._escaped = False
        self._buffer = ""
        self._call_end = "}" + call_format.end
        openings = {f"{call_format.call_prefix(name)}{{": name for name in names}
        self._first_prefixes = {call_format.begin + text: name for text, name in openings.items()}
        self._next_prefixes: dict[str, str] = {}
        if call_format.separator is not None:
            self._next_prefixes = {
                f"}}{call_format.separator}{text}": name for text, name in openings.items()
            }
        self._first_sorted = sorted(self._first_prefixes)
        self._next_sorted = sorted([*self._next_prefixes, self._call_end])
        self._after_call = False  # a call has started; its end or the next call follows it

    @property
    def is_open(self) -> bool:
        """Return whether the arguments of the latest call are incomplete."""
        return self._depth > 0

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain now, with equal neighbours merged."""
        if not self._first_sorted:
            return [TextPiece(text)] if text else []
        events: list[OutputEvent] = []
        at = 0
        while at < len(text):
            at = (
                self._read_arguments(text, at, events)
                if self._depth
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
            start = text.find(self._first_sorted[0][0], at)
            if start != at:
                start = len(text) if start < 0 else start
                events.append(TextPiece(text[at:start]))
                return start
        self._read_char(text[at], events)
        return at + 1

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
            events += (CallStart(name), ArgumentsPiece("{"))
            self.num_calls += 1
            self._buffer, self._depth, self._after_call = "", 1, True

    def _read_arguments(self, text: str, at: int, events: list[OutputEvent]) -> int:
        """Read to the end of the arguments or of the text; return the position."""
        end = at
        while self._depth and end < len(text):
            if self._escaped:
                self._escaped = False
                end += 1
                continue
            match = (_QUOTE_OR_BACKSLASH if self._in_string else _QUOTE_OR_BRACE).search(text, end)
            if match is None:
                end = len(text)
                break
            end = match.end()
            match match[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "{":
                    self._depth += 1
                case _:
                    self._depth -= 1
        events.append(ArgumentsPiece(text[at:end]))
        return end


def _has_prefix(text: str, expected: Sequence[str]) -> bool:
    """Return whether one of the sorted `expected` texts begins with `text`."""
    at = bisect_left(expected, text)
    return at < len(expected) and expected[at].startswith(text)
