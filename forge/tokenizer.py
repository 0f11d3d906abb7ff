"""Text to token ids and back, one token at a time without ever splitting a character.

Owns the byte tokenizer, incremental detokenising and the search for stop strings. Knows no request,
engine or model.

    tokens   f0  9f  98  80      one emoji is four byte tokens
    deltas   ""  ""  ""  "😀"     joined deltas equal the decode of all tokens

    text     ...the an|sw      stop "answer": what may be its beginning is held back
                       ^ sent up to here, "answ" waits

Held back: at most the longest stop string less one character, and incomplete bytes. The search is
the automaton of Knuth, Morris and Pratt (1977), so a text is read once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Detokenizer(Protocol):
    """Decodes one output as it grows."""

    def push(self, token: int) -> str:
        """Text that is certain now. Never ends inside a character."""
        ...

    def flush(self) -> str:
        """What is left; bytes that make no character become U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eos_token(self) -> int:
        """The id that ends an output."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special id. Raises UnicodeEncodeError on a lone surrogate."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens; special ids have none."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token; of a special one its name."""
        ...

    def token_text(self, token: int) -> str:
        """One token in a listing; `bytes:\\xNN` where its bytes alone are no text."""
        ...


class ByteDetokenizer:
    """Decodes byte tokens as UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that is certain now."""
        return self._decoder.decode(bytes((token - 1,))) if 1 <= token <= 256 else ""

    def flush(self) -> str:
        """What is left, broken bytes replaced."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """256 bytes and special ids: the end at 0, byte b at b + 1, further special ids from 257."""

    def __init__(self, special_tokens: tuple[str, ...] = ("<|end|>",)) -> None:
        ids = (0, *range(257, 256 + len(special_tokens)))
        self._special = dict(zip(ids, special_tokens, strict=True))

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special ids."""
        return 256 + len(self._special)

    @property
    def eos_token(self) -> int:
        """0."""
        return 0

    def encode(self, text: str) -> list[int]:
        """One id per byte of the text's UTF-8. Raises UnicodeEncodeError on a lone surrogate."""
        return [byte + 1 for byte in text.encode()]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the byte tokens, broken bytes replaced; other ids have none."""
        return bytes(token - 1 for token in tokens if 1 <= token <= 256).decode(errors="replace")

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh incremental decoder."""
        return ByteDetokenizer()

    def token_bytes(self, token: int) -> bytes:
        """The byte, or the name of a special id; nothing for an id without text."""
        if 1 <= token <= 256:
            return bytes((token - 1,))
        name: str = self._special.get(token, "")
        return name.encode()

    def token_text(self, token: int) -> str:
        """The character or name; `bytes:\\xNN` for a byte that is no character alone."""
        data = self.token_bytes(token)
        return data.decode() if not data or data[0] < 128 else f"bytes:\\x{data[0]:02x}"


class _StopAutomaton:
    """How much of one stop string the text ends with, one character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * (len(stop) + 1)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length]
            length += stop[i] == stop[length]
            self._fallback[i + 1] = length

    def read(self, char: str) -> bool:
        """True when the text now ends with the whole stop string."""
        stop, matched = self.stop, self.matched
        if matched == len(stop):
            matched = self._fallback[matched]
        while matched and stop[matched] != char:
            matched = self._fallback[matched]
        self.matched = matched + (stop[matched] == char)
        return self.matched == len(stop)

    @property
    def begun(self) -> int:
        """Characters at the end of the text that a stop still to come may begin with."""
        whole = self.matched == len(self.stop)
        return self._fallback[self.matched] if whole else self.matched


class TextStream:
    """A detokenizer that ends at a stop string. Text up to the stop is kept, the rest is not.

    The stop that is complete first wins; of two complete at the same character, the longer. Until
    `min_tokens` tokens have come no stop is complete.
    stopped   the stop string that ended the text, or None
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        self.stopped: str | None = None
        self._detokenizer = detokenizer
        self._stops = [_StopAutomaton(s) for s in sorted(set(stop), key=lambda s: (-len(s), s))]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token: int) -> str:
        """Text that can be sent now; "" once stopped."""
        if self.stopped is not None:
            return ""
        self._num_tokens += 1
        return self._read(self._detokenizer.push(token))

    def flush(self) -> str:
        """Everything still held back; "" once stopped."""
        if self.stopped is not None:
            return ""
        text = self._read(self._detokenizer.flush())
        text, self._held = text + self._held, ""
        return text

    def _read(self, text: str) -> str:
        if not self._stops:
            return text
        armed = self._num_tokens >= self._min_tokens
        held = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [a for a in self._stops if a.read(char)]
            if complete and armed:
                self.stopped, self._held = complete[0].stop, ""
                return held[: end - len(self.stopped)]
        # A whole stop that did not count can only matter through what it may still begin.
        cut = len(held) - max(a.begun for a in self._stops)
        self._held = held[cut:]
        return held[:cut]
