"""Text to token ids and back, one token at a time without splitting a character.

Owns the byte tokenizer, incremental detokenizing, the search for stop strings and the types of a
chat. Knows no request, engine or model.

    tokens   f0  9f  98  80      one emoji is four byte tokens
    deltas   ""  ""  ""  "😀"     joined deltas equal the decode of all tokens

    text     so the |answ        stop "answer": text that may be its beginning is held back
               sent | held       and sent with the next character, unless that is "e"

Held back: at most the longest stop string less one character, and incomplete bytes. The search is
the automaton of Knuth, Morris and Pratt (1977): each stop string reads each character once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from forge.errors import InvalidRequest

MAX_CHAT_CHARS = 16 * 2**20
"""Most characters of a rendered chat: a template may repeat the same text any number of times."""

ChatMessage = Mapping[str, Any]
"""A message of a chat: `role`, `content`, and other keys that a model's template may read.

The arguments of each of its `tool_calls` are an object.
"""


class ChatEnd(Enum):
    """End of a rendered chat.

    GENERATION_PROMPT        an answer of the assistant begins
    CONTINUE_FINAL_MESSAGE   the last message is open, and the output continues it
    END_OF_MESSAGE           the last message is closed, and no other has started
    """

    GENERATION_PROMPT = "answer"
    CONTINUE_FINAL_MESSAGE = "open"
    END_OF_MESSAGE = "closed"


_BYTE_CHAT_ENDS = {
    ChatEnd.GENERATION_PROMPT: "\nassistant:",
    ChatEnd.CONTINUE_FINAL_MESSAGE: "",
    ChatEnd.END_OF_MESSAGE: "\n",
}
BYTE_CHAT_TEMPLATE = """\
function: {"name": ..., "description": ..., "parameters": ...}   for each of the tools
role: content                                                    for each message
call: {"id": ..., "name": ..., "arguments": ...}                 for each of its tool_calls
assistant:
<tool_call>
{"name": ..., "arguments": ...}
</tool_call>
"""
"""Format of a chat of the byte tokenizer, line by line, and of the tool calls in an answer."""


class Detokenizer(Protocol):
    """Decodes one output while it grows."""

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now. It never ends inside a character."""
        ...

    def extend(self, tokens: Sequence[int]) -> str:
        """Add several tokens; return the text that is certain now, as pushes of each would."""
        ...

    def flush(self) -> str:
        """Return the rest of the text; bytes that form no character become U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Converts between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: ids are below it."""
        ...

    @property
    def eos_token(self) -> int:
        """The id that ends an output."""
        ...

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids that control the model. Decoding omits them, except those around tool calls."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, in the template's language; None where chats have no format.

        It shows the format in which the model writes tool calls.
        """
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of a prompt. Raises UnicodeEncodeError on a lone surrogate.

        add_special_tokens     the ids begin and end with those that the checkpoint puts around
                               every prompt, such as BOS
        parse_special_tokens   the name of a special id in the text is that id; False: plain text
        """
        ...

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], end: ChatEnd, variables: Mapping[str, Any]
    ) -> list[int]:
        """Return the ids of a rendered chat. The name of a special id in a message stays text.

        variables   other names that the template may read; unknown ones have no effect. `tools`
                    is a list of {"type": "function", "function": {...}}
        Raises InvalidRequest naming `messages`. May be slow. Any thread may call this.
        """
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens. Special ids have none."""
        ...

    def create_detokenizer(self, previous: int | None = None) -> Detokenizer:
        """Return a new incremental decoder.

        previous   token that the decoded ones follow in one text; None: they begin a text
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of a special one."""
        ...

    def token_text(self, token: int) -> str:
        """Return a token as a list shows it: `bytes:\\xNN` where its bytes alone are no text."""
        ...

    def token_piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it, such as `Ġthe`; "" for an unknown id."""
        ...


class Vocabulary(NamedTuple):
    """Tokens of a model as plain values, which can be sent to another process.

    tokens             bytes of each id
    special_token_ids  ids that no text encodes to
    end_ids            ids that end an output, at least one
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    end_ids: list[int]


class ByteDetokenizer:
    """Decodes byte tokens as UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now."""
        return self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> str:
        """Add several tokens; return the text that is certain now."""
        return self._decoder.decode(bytes(token - 1 for token in tokens if 1 <= token <= 256))

    def flush(self) -> str:
        """Return the rest of the text, with broken bytes replaced."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """A tokenizer of bytes: the end token is 0, byte b is b + 1, further special ids are from 257.

    special_tokens   names of the special ids, that of the end token first
    """

    def __init__(self, special_tokens: tuple[str, ...] = ("<|end|>",)) -> None:
        assert special_tokens, "a tokenizer needs a name for its end token"
        ids = (0, *range(257, 256 + len(special_tokens)))
        self._special_tokens = dict(zip(ids, special_tokens, strict=True))
        self._ids_by_name = {name: token for token, name in self._special_tokens.items()}
        self._names = re.compile(f"({match_any(special_tokens)})")

    @property
    def vocab_size(self) -> int:
        """Return the number of bytes and special ids."""
        return 256 + len(self._special_tokens)

    @property
    def eos_token(self) -> int:
        """Return 0."""
        return 0

    @property
    def special_token_ids(self) -> Collection[int]:
        """Return the ids of the end token and of the other special tokens."""
        return self._special_tokens.keys()

    @property
    def chat_template(self) -> str | None:
        """Return BYTE_CHAT_TEMPLATE."""
        return BYTE_CHAT_TEMPLATE

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return one id per byte of the text's UTF-8. Raises UnicodeEncodeError on a surrogate.

        add_special_tokens     of no effect: a prompt has no special ids around it
        parse_special_tokens   the name of a special id is that id; False: plain bytes
        """
        if not parse_special_tokens:
            return [byte + 1 for byte in text.encode()]
        tokens: list[int] = []
        for index, part in enumerate(self._names.split(text)):  # names have odd indices
            tokens += [self._ids_by_name[part]] if index % 2 else [b + 1 for b in part.encode()]
        return tokens

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], end: ChatEnd, variables: Mapping[str, Any]
    ) -> list[int]:
        """Return a chat in the lines of BYTE_CHAT_TEMPLATE. `tools` is the only variable."""
        lines = [f"function: {_to_json(tool['function'])}" for tool in variables.get("tools", ())]
        for message in messages:
            lines.append(f"{message['role']}: {message['content']}")
            for call in message.get("tool_calls", ()):
                lines.append(f"call: {_to_json({'id': call['id'], **call['function']})}")
        text = "\n".join(lines)
        check_chat_length(text)
        return self.encode(text + _BYTE_CHAT_ENDS[end], parse_special_tokens=False)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the byte tokens, broken bytes replaced; other ids have none."""
        return bytes(token - 1 for token in tokens if 1 <= token <= 256).decode(errors="replace")

    def create_detokenizer(self, previous: int | None = None) -> ByteDetokenizer:
        """Return a new incremental decoder; `previous` has no effect."""
        return ByteDetokenizer()

    def token_bytes(self, token: int) -> bytes:
        """Return the byte, or the name of a special id; b"" for an id without text."""
        if 1 <= token <= 256:
            return bytes((token - 1,))
        name: str = self._special_tokens.get(token, "")
        return name.encode()

    def token_piece(self, token: int) -> str:
        """Return the token's text: the vocabulary writes it so."""
        return self.token_text(token)

    def token_text(self, token: int) -> str:
        """Return the character or name; `bytes:\\xNN` for a byte that is no character alone."""
        # Bytes from 128 on are parts of longer characters, or invalid.
        if 128 < token <= 256:
            return f"bytes:\\x{token - 1:02x}"
        return self.token_bytes(token).decode()


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def match_any(names: Iterable[str]) -> str:
    """Return the source of a pattern for any of the names, of which the longest is tried first."""
    by_length = sorted(filter(None, names), key=lambda name: (-len(name), name))
    return "|".join(map(re.escape, by_length)) or "(?!)"


def check_chat_length(text: str) -> None:
    """Raise InvalidRequest for a rendered chat that is too long to encode."""
    if len(text) > MAX_CHAT_CHARS:
        raise InvalidRequest(
            "messages",
            f"they have {len(text)} characters when rendered, at most {MAX_CHAT_CHARS}",
            "Send less",
            "context_length_exceeded",
        )


class _StopStringMatcher:
    """Matches one stop string against the end of a text, one character at a time.

    num_matched   length of the longest prefix of `stop` that the text ends with
    _fallback     [i] is the longest proper prefix of `stop` that its first i characters end with

    O(1) per character, amortized. `_fallback` grows together with `num_matched`: a request may have
    many long stop strings, and building their whole automata would delay other requests.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = [0, 0]

    def push(self, char: str) -> bool:
        """Add a character; return whether the text now ends with the whole stop string."""
        stop, num_matched = self.stop, self.num_matched
        if num_matched == len(stop):
            num_matched = self._fallback[num_matched]
        self.num_matched = num_matched = self._advance(num_matched, char)
        if num_matched == len(self._fallback):
            self._fallback.append(self._advance(self._fallback[-1], char))
        return num_matched == len(stop)

    def _advance(self, num_matched: int, char: str) -> int:
        """Return the matched length after `char`, given the matched length before it."""
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._fallback[num_matched]
        return num_matched + (self.stop[num_matched] == char)

    @property
    def num_partial(self) -> int:
        """Characters at the end of the text that a later match may begin with."""
        is_complete = self.num_matched == len(self.stop)
        return self._fallback[self.num_matched] if is_complete else self.num_matched


class StopStringDetokenizer:
    """A detokenizer that ends at a stop string. It returns the text before the stop.

    The stop that completes first wins; of two that complete at the same character, the longer wins.
    No stop completes before `min_tokens` tokens, but it may begin earlier. The result depends only
    on the tokens: an engine and a reader with one each agree on the end.

    stop           stop strings, none of them empty
    matched_stop   the stop string that ended the text, or None

    O(stop strings) per character where a stop string may have started, and O(1) in the length of
    the text. Other text is only searched for the first characters of stop strings.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        assert all(stop), f"an empty stop string is complete before any text: {stop!r}"
        self.matched_stop: str | None = None
        self._detokenizer = detokenizer
        self._matchers = [
            _StopStringMatcher(s) for s in sorted(set(stop), key=lambda s: (-len(s), s))
        ]
        self._first_chars = frozenset(s[0] for s in stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._buffer = ""

    def push(self, token: int) -> str:
        """Add a token; return the text that can be sent now, "" after the stop."""
        if self.matched_stop is not None:
            return ""
        self._num_tokens += 1
        return self._check_stops(self._detokenizer.push(token))

    def flush(self) -> str:
        """Return the text still held back, "" after the stop. This is the last call."""
        if self.matched_stop is not None:
            return ""
        text = self._check_stops(self._detokenizer.flush())
        text, self._buffer = text + self._buffer, ""
        return text

    def _check_stops(self, text: str) -> str:
        # With nothing held back no stop string has started, and this text starts none.
        if not self._buffer and self._first_chars.isdisjoint(text):
            return text
        can_stop = self._num_tokens >= self._min_tokens
        buffered = self._buffer + text
        for end, char in enumerate(text, len(self._buffer) + 1):
            matches = [a for a in self._matchers if a.push(char)]
            if matches and can_stop:
                self.matched_stop, self._buffer = matches[0].stop, ""
                return buffered[: end - len(self.matched_stop)]
        # A whole stop before min_tokens matters only for the later stops that may overlap it.
        num_ready = len(buffered) - max(a.num_partial for a in self._matchers)
        self._buffer = buffered[num_ready:]
        return buffered[:num_ready]
