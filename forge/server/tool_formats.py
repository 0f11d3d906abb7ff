"""How models write the calls of tools: one row for each family, its grammar and its reader.

Owns the forms. Knows no request and no HTTP.

    before          <tool_call>\\n
    opening, a call {"name": "NAME", "arguments":
    its arguments   {...}, as their schema has them
    its end         }
    between         \\n</tool_call>\\n<tool_call>\\n      and the next call
    after           \\n</tool_call>                     and the output ends

The grammar of an answer allows nothing else, so what is read back always parses. JSON is spaced as
forge.structured_output spaces it. The reader takes text in chunks of any size: its events, joined,
are the same.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolCallFormat(NamedTuple):
    """How one family of models writes its calls.

    template_marks   the source of a template of this family has all of these
    other_marks      and none of these
    trigger          an answer that has this goes on with a call; "" if only a call's beginning says
                     so
    begin            text before the first call
    separator        text from one call to the next; None where an answer has one call at most
    end              text after the last call
    arguments_key    the key of a call's arguments
    id_prefix        of the id that a call gets; a template may refuse others
    id_digits        hexadecimal digits after it
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
        """A call of this tool up to its arguments."""
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
"""Each family has its row. The first whose marks are in a template is that template's."""


def find_format(template: str) -> ToolCallFormat | None:
    """How a model with this template writes its calls; None if it is none of FORMATS."""
    source = template.replace("\\", "")  # quotes may be escaped there
    for call_format in FORMATS.values():
        if all(mark in source for mark in call_format.template_marks):
            if not any(mark in source for mark in call_format.other_marks):
                return call_format
    return None


class CallableTool(NamedTuple):
    """A tool that may be called. `parameters` is the schema of its arguments, which are an object.

    name   letters, digits, _ and -: the same text in JSON
    """

    name: str
    parameters: Mapping[str, Any]


class ToolGrammarBuilder:
    """Writes what an answer may be, in llguidance's dialect of Lark.

    special_ids   special tokens that the form has in its texts, by name: there they have to be
                  these tokens
    """

    def __init__(self, call_format: ToolCallFormat, special_ids: Mapping[str, int]) -> None:
        self._format = call_format
        self._special_ids = special_ids
        names = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special_names = re.compile(f"({'|'.join(names)})" if names else "(?!)")

    def build_grammar(self, tools: Sequence[CallableTool], min_calls: int, max_calls: int) -> str:
        """The grammar of an answer.

        min_calls   0: any text, and calls only after it; 1: nothing but calls
        max_calls   calls, where the form has more than one
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
        """Text, or text to where a call has begun: a lazy lexeme ends there, whatever follows."""
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
        """The text, of terminals and special tokens; nothing for no text."""
        parts = filter(None, self._special_names.split(text))
        ids = self._special_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)


class TextPiece(NamedTuple):
    """Text of an answer that is no call."""

    text: str


class CallStart(NamedTuple):
    """A call of this tool begins."""

    name: str


class ArgumentsPiece(NamedTuple):
    """More of the arguments of the call that began last, as JSON."""

    text: str


OutputEvent = TextPiece | CallStart | ArgumentsPiece

_QUOTE_OR_BRACE = re.compile(r'["{}]')
_QUOTE_OR_BACKSLASH = re.compile(r'["\\]')


class ToolCallParser:
    """Finds the calls in an answer as it grows. Without tools it has none.

    Text is held back only while it may begin a call; a call begins with its arguments, and these
    are never held back. What is no call of these tools is text.

    num_calls   calls that have begun
    is_open     the last of them has not ended

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
        self._after_call = False  # a call has begun, and behind it comes its end or the next one

    @property
    def is_open(self) -> bool:
        """The last call has begun, and its arguments are not whole."""
        return self._depth > 0

    def push(self, text: str) -> list[OutputEvent]:
        """What is certain with this text. No two neighbours are of one kind, but for calls."""
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
        return _merge_events(events)

    def flush(self) -> list[OutputEvent]:
        """What was held back. The last call.

        The beginning of a call before which there was none is text; that of a further call, and
        an unfinished end, are nothing.
        """
        buffered, self._buffer = self._buffer, ""
        return [TextPiece(buffered)] if buffered and not self._after_call else []

    def _read_text(self, text: str, at: int, events: list[OutputEvent]) -> int:
        """Reads one character, or those before the next that may begin something."""
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
            # Nothing that can follow a call. Its end, where there is one, is not text.
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
        """Reads to the end of the arguments, or of the text."""
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
    """One of the expected begins with the text. They are sorted."""
    at = bisect_left(expected, text)
    return at < len(expected) and expected[at].startswith(text)


def _merge_events(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """The same, with neighbours of one kind as one."""
    joined: list[OutputEvent] = []
    for kind, group in groupby(events, type):
        if kind is CallStart:
            joined += group
        else:
            joined.append(kind("".join([event[0] for event in group])))
    return joined
