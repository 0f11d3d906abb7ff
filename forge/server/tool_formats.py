"""How models write the calls of tools: one row for each family, its grammar and its reader.

Owns the forms. Knows no request and no HTTP.

    before          <tool_call>\\n
    opening, a call {"name": "NAME", "arguments":
    its arguments   {...}, as their schema has them
    its end         }
    between         \\n</tool_call>\\n<tool_call>\\n      and the next call
    after           \\n</tool_call>                     and the output ends

The grammar of an answer allows nothing else, so what is read back always parses. JSON is spaced as
forge.structure spaces it. The reader takes text in any cut: joined, its events are the same.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallFormat(NamedTuple):
    """How one family of models writes its calls.

    marks       the source of a template of this family has all of these
    foreign     and none of these
    sign        an answer that has this goes on with a call; "" if only a call's beginning says so
    before      text before the first call
    between     text from one call to the next; None where an answer has one call at most
    after       text after the last call
    arguments   the key of a call's arguments
    id_prefix   of the id that a call gets; a template may refuse others
    id_digits   hexadecimal digits after it
    """

    marks: tuple[str, ...]
    foreign: tuple[str, ...]
    sign: str
    before: str
    between: str | None
    after: str
    arguments: str = "arguments"
    id_prefix: str = "call_"
    id_digits: int = 24

    def opening(self, name: str) -> str:
        """A call of this tool up to its arguments."""
        return f'{{"name": "{name}", "{self.arguments}": '


HERMES = CallFormat(
    marks=("<tool_call>", '"arguments"'),
    foreign=("<function=", "<arg_key>", "<tool_sep>"),
    sign="<tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)
MISTRAL = CallFormat(
    marks=("[TOOL_CALLS] [",),
    foreign=("[ARGS]",),
    sign="[TOOL_CALLS]",
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
    id_prefix="",
    id_digits=9,
)
LLAMA = CallFormat(
    marks=('{"name": function name, "parameters": ',),
    foreign=(),
    sign="",
    before="",
    between=None,
    after="",
    arguments="parameters",
)
FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "mistral, without a space": MISTRAL._replace(marks=("[TOOL_CALLS][",), before="[TOOL_CALLS]["),
    "llama": LLAMA,
}
"""Each family has its row. The first whose marks are in a template is that template's."""


def format_of(template: str) -> CallFormat | None:
    """How a model with this template writes its calls; None if it is none of FORMATS."""
    source = template.replace("\\", "")  # quotes may be escaped there
    for form in FORMATS.values():
        if all(mark in source for mark in form.marks):
            if not any(mark in source for mark in form.foreign):
                return form
    return None


class Tool(NamedTuple):
    """A tool that may be called. `parameters` is the schema of its arguments, which are an object.

    name   letters, digits, _ and -: the same text in JSON
    """

    name: str
    parameters: Mapping[str, Any]


class Writer:
    """Writes what an answer may be, in llguidance's dialect of Lark.

    ids   special tokens that the form has in its texts, by name: there they have to be these tokens
    """

    def __init__(self, form: CallFormat, ids: Mapping[str, int]) -> None:
        self._form = form
        self._ids = ids
        names = sorted(map(re.escape, ids), key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(names)})" if names else "(?!)")

    def grammar(self, tools: Sequence[Tool], fewest: int, most: int) -> str:
        """The grammar of an answer.

        fewest   0: any text, and calls only after it; 1: nothing but calls
        most     calls, where the form has more than one
        """
        form, more = self._form, ""
        if form.between is not None and most > 1:
            more = f"({self._said(form.between)} call){{0,{most - 1}}} "
        lines = [
            f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}",
            f"more: {more}{self._said(form.after)}",
        ]
        for index, (name, parameters) in enumerate(tools):
            schema = json.dumps({**parameters, "x-guidance": SPACING})
            lines += [
                f"call{index}: {self._said(form.opening(name))} rest{index}",
                f'rest{index}: %json {schema} "}}"',
            ]
        if fewest:
            return "\n".join([f"start: {self._said(form.before)} call more", *lines])
        return "\n".join([*self._after_text(tools), *lines])

    def _after_text(self, tools: Sequence[Tool]) -> list[str]:
        """Text, or text to where a call has begun: a lazy lexeme ends there, whatever follows."""
        form, lines = self._form, ["TEXT: /(?s:.*)/"]
        if form.sign in self._ids:
            return [f"start: TEXT | TEXT {self._said(form.before)} call more", *lines]
        if form.sign:
            begun = self._said(form.before.removeprefix(form.sign))
            lines.append(f"sign[lazy]: TEXT {json.dumps(form.sign)}")
            return [f"start: TEXT | sign {begun} call more", *lines]
        starts = ["TEXT"]
        for index, (name, _) in enumerate(tools):
            sign, comma, begun = form.opening(name).partition(", ")
            starts.append(f"sign{index} {self._said(comma + begun)} rest{index} more")
            lines.append(f"sign{index}[lazy]: TEXT {json.dumps(form.before + sign)}")
        return [f"start: {' | '.join(starts)}", *lines]

    def _said(self, text: str) -> str:
        """The text, of terminals and special tokens; nothing for no text."""
        parts = filter(None, self._names.split(text))
        ids = self._ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)


class Words(NamedTuple):
    """Text of an answer that is no call."""

    text: str


class Call(NamedTuple):
    """A call of this tool begins."""

    name: str


class Arguments(NamedTuple):
    """More of the arguments of the call that began last, as JSON."""

    text: str


Event = Words | Call | Arguments

_OUTSIDE = re.compile(r'["{}]')
_INSIDE = re.compile(r'["\\]')


class CallReader:
    """Finds the calls in an answer as it grows. Without tools it has none.

    Text is held back only while it may begin a call; a call begins with its arguments, and these
    are never held back. What is no call of these tools is text.

    num_calls   calls that have begun
    open        the last of them has not ended

    O(log tools) a character, and O(1) in the length of the text.
    """

    def __init__(self, form: CallFormat, names: Iterable[str]) -> None:
        self.num_calls = 0
        self._depth = 0  # of braces, in arguments
        self._quoted = self._escaped = False
        self._held = ""
        self._closing = "}" + form.after
        openings = {f"{form.opening(name)}{{": name for name in names}
        self._first = {form.before + text: name for text, name in openings.items()}
        self._next: dict[str, str] = {}
        if form.between is not None:
            self._next = {f"}}{form.between}{text}": name for text, name in openings.items()}
        self._first_sorted = sorted(self._first)
        self._next_sorted = sorted([*self._next, self._closing])
        self._between = False  # a call has begun, and behind it comes its end or the next one

    @property
    def open(self) -> bool:
        """The last call has begun, and its arguments are not whole."""
        return self._depth > 0

    def read(self, text: str) -> list[Event]:
        """What is certain with this text. No two neighbours are of one kind, but for calls."""
        if not self._first_sorted:
            return [Words(text)] if text else []
        events: list[Event] = []
        at = 0
        while at < len(text):
            at = self._arguments(text, at, events) if self._depth else self._text(text, at, events)
        return _joined(events)

    def close(self) -> list[Event]:
        """What was held back. The last call.

        The beginning of a call before which there was none is text; that of a further call, and
        an unfinished end, are nothing.
        """
        held, self._held = self._held, ""
        return [Words(held)] if held and not self._between else []

    def _text(self, text: str, at: int, events: list[Event]) -> int:
        """Reads one character, or those before the next that may begin something."""
        if not self._held and not self._between:
            begin = text.find(self._first_sorted[0][0], at)
            if begin != at:
                begin = len(text) if begin < 0 else begin
                events.append(Words(text[at:begin]))
                return begin
        self._hold(text[at], events)
        return at + 1

    def _hold(self, char: str, events: list[Event]) -> None:
        held = self._held + char
        if self._between and not _begins(held, self._next_sorted):
            # Nothing that can follow a call. Its end, where there is one, is not text.
            self._held, self._between = "", False
            for other in held.removeprefix(self._closing):
                self._hold(other, events)
            return
        while held and not self._between and not _begins(held, self._first_sorted):
            events.append(Words(held[0]))
            held = held[1:]
        self._held = held
        name = (self._next if self._between else self._first).get(held)
        if name is not None:
            events += (Call(name), Arguments("{"))
            self.num_calls += 1
            self._held, self._depth, self._between = "", 1, True

    def _arguments(self, text: str, at: int, events: list[Event]) -> int:
        """Reads to the end of the arguments, or of the text."""
        end = at
        while self._depth and end < len(text):
            if self._escaped:
                self._escaped = False
                end += 1
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, end)
            if found is None:
                end = len(text)
                break
            end = found.end()
            match found[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    self._escaped = True
                case "{":
                    self._depth += 1
                case _:
                    self._depth -= 1
        events.append(Arguments(text[at:end]))
        return end


def _begins(text: str, expected: Sequence[str]) -> bool:
    """One of the expected begins with the text. They are sorted."""
    at = bisect_left(expected, text)
    return at < len(expected) and expected[at].startswith(text)


def _joined(events: Sequence[Event]) -> list[Event]:
    """The same, with neighbours of one kind as one."""
    joined: list[Event] = []
    for kind, group in groupby(events, type):
        if kind is Call:
            joined += group
        else:
            joined.append(kind("".join([event[0] for event in group])))
    return joined
