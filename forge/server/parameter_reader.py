"""Readers of a call's arguments, which return them as JSON while they grow.

Owns the end of the arguments. Knows no call's name and no text around calls. Arguments that are
JSON pass as they are; those that are written one by one are put into an object.

    <parameter=city>\\nRome\\n</parameter>\\n<parameter=days>\\n3\\n</parameter>\\n</function>
    {"city": "         Rome"                 , "days":          3                }
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from forge.server.held_text import partial_length
from forge.server.tool_formats import ParameterSyntax
from forge.server.tool_parameters import ToolParameter

_QUOTE_OR_BRACE = re.compile(r'["{}]')
_QUOTE_OR_BACKSLASH = re.compile(r'["\\]')
_VALUE_END = re.compile(r'["\[\]{}<,)\n]')
"""Characters that end a value or count its depth: no scalar of JSON has one of them."""


class ArgumentsReader(Protocol):
    """Reads the arguments of one call.

    is_open   whether they are incomplete
    """

    is_open: bool

    def read(self, text: str, at: int, pieces: list[str]) -> int:
        """Read to the end of the arguments or of the text; return the position.

        pieces   gets more of the arguments, as JSON
        """
        ...


class JSONReader:
    """Reads a JSON object up to its last brace. O(1) in the length of the object."""

    def __init__(self) -> None:
        self.is_open = True
        self._depth = 0  # of braces
        self._in_string = self._escaped = False

    def read(self, text: str, at: int, pieces: list[str]) -> int:
        """Read to the end of the object or of the text; return the position."""
        end = at
        while self.is_open and end < len(text):
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
                    self.is_open = self._depth > 0
        pieces.append(text[at:end])
        return end


class ParameterReader:
    """Reads arguments that are written one by one, up to the text that ends their call.

    call_suffix   text that ends the call; it is left for what reads on after the arguments

    Text that no parameter and no end of the call begins with is dropped, up to the end of the
    answer: a grammar allows none.
    """

    def __init__(
        self, syntax: ParameterSyntax, parameters: Sequence[ToolParameter], call_suffix: str
    ) -> None:
        self.is_open = True
        self._syntax = syntax
        self._call_suffix = call_suffix
        self._parameters = {syntax.key_text(each.name): each for each in parameters}
        self._value: TextValue | JSONValue | None = None
        self._buffer = ""  # of what is expected: a key, the text after a value, the call's suffix
        self._expected = self._keys("")
        self._opening = "{"  # JSON before the next key

    def read(self, text: str, at: int, pieces: list[str]) -> int:
        """Read to the end of the arguments or of the text; return the position."""
        if self._opening == "{":
            pieces.append("{")
            self._opening = ""
        while self.is_open and at < len(text):
            if self._value is not None:
                at = self._value.read(text, at, pieces)
                if not self._value.is_open:
                    end, self._value = self._value.unread_end, None
                    self._expected = {end: None} if end else self._keys(self._syntax.separator)
                continue
            self._buffer += text[at]
            at += 1
            if self._buffer in self._expected:
                self._start(self._expected[self._buffer], pieces)
            elif not any(each.startswith(self._buffer) for each in self._expected):
                self._expected, self._buffer = {}, ""
        if not self.is_open:
            pieces.append("}")
        return at

    def _keys(self, separator: str) -> dict[str, ToolParameter | None]:
        """Return what may come where a parameter may: the keys, and the suffix of the call."""
        keys = {separator + key: each for key, each in self._parameters.items()}
        return {**keys, self._call_suffix: None}

    def _start(self, parameter: ToolParameter | None, pieces: list[str]) -> None:
        """Start to read what follows the text in the buffer, which was expected."""
        buffered, self._buffer = self._buffer, ""
        if parameter is not None:
            pieces.append(f"{self._opening}{json.dumps(parameter.name)}: ")
            self._opening = ", "
            del self._parameters[self._syntax.key_text(parameter.name)]
            end = self._syntax.end
            self._value = (
                JSONValue(parameter.words, end)
                if parameter.text is None
                else TextValue(parameter, end)
            )
        elif buffered == self._call_suffix:
            self.is_open = False
        else:
            self._expected = self._keys(self._syntax.separator)


class TextValue:
    """Reads text and the text that ends it, and returns its value as JSON.

    is_open      whether it is incomplete
    unread_end   text that follows what was read

    Text is held back while its value may be no string.
    """

    unread_end = ""

    def __init__(self, parameter: ToolParameter, end: str) -> None:
        self.is_open = True
        self._parameter = parameter
        self._end = end
        self._buffer = ""  # of the end
        self._held = ""  # of a value that may be no string
        self._is_string = False

    def read(self, text: str, at: int, pieces: list[str]) -> int:
        """Read to the end of the value or of the text; return the position."""
        whole = self._buffer + text[at:]
        value, end, rest = whole.partition(self._end)
        if not end:
            held_from = len(whole) - partial_length(whole, self._end)
            value, self._buffer = whole[:held_from], whole[held_from:]
        self.is_open = not end
        pieces.append(self._read_piece(value))
        return len(text) - len(rest)

    def _read_piece(self, text: str) -> str:
        """Return the JSON of the next piece of the value; of the last one where it has ended."""
        if self._is_string:
            return _escape(text) + ("" if self.is_open else '"')
        self._held += text
        if not self.is_open:
            return self._parameter.read_text(self._held)
        if self._parameter.may_be_json(self._held):
            return ""
        self._is_string = True
        return '"' + _escape(self._held)


class JSONValue:
    """Reads a JSON value, or a word of the format for one, up to the character after it.

    is_open      whether it is incomplete
    unread_end   text that follows what was read
    """

    def __init__(self, words: Mapping[str, str], end: str) -> None:
        self.is_open = True
        self.unread_end = end
        self._words = words
        self._depth = 0
        self._in_string = self._escaped = False
        self._word = ""  # a word is held back until it is whole
        self._has_started = False

    def read(self, text: str, at: int, pieces: list[str]) -> int:
        """Read to the end of the value or of the text; return the position."""
        end = self._find_end(text, at)
        piece = text[at:end]
        if self._word or (piece[:1].isalpha() and not self._has_started):
            self._word += piece
            piece = "" if self.is_open else self._words.get(self._word, self._word)
        self._has_started = True
        pieces.append(piece)
        return end

    def _find_end(self, text: str, at: int) -> int:
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            pattern = _QUOTE_OR_BACKSLASH if self._in_string else _VALUE_END
            match = pattern.search(text, at)
            if match is None:
                return len(text)
            char = match[0]
            if not self._in_string and self._depth == 0 and char in "]}<,)\n":
                self.is_open = False
                return match.start()
            at = match.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
        return at


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
