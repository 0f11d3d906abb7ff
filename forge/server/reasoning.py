"""Reasoning in the answers of a chat: its formats, and its separation from the content.

Owns the formats. Knows no request and no HTTP. The end of the prompt, which the template wrote,
shows whether an answer begins inside its reasoning, may begin with it, or has none.

    prompt ends with    answer                          Reasoning of the answer
    <think>             ....</think>content             ("", "</think>")
    </think>            content                         None
    anything else       <think>....</think>content      ("<think>", "</think>")
                        content

Always true: text may come in chunks of any size; the joined events are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forge.reasoning_counter import MAX_LINE_BREAKS
from forge.request import Reasoning
from forge.server.held_text import partial_length
from forge.server.output_events import OutputEvent, ReasoningPiece, TextPiece
from forge.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 64
"""Tokens at the end of a prompt that show whether the template has started the reasoning."""


class ReasoningFormat(NamedTuple):
    """The format of one family's reasoning.

    template_marks   texts of which the source of a family's template contains at least one
    begin            marker that begins the reasoning; "" where every answer begins inside it
    end              marker that ends it
    """

    template_marks: tuple[str, ...]
    begin: str
    end: str


THINK = ReasoningFormat(("</think>",), "<think>", "</think>")
HARMONY = ReasoningFormat(("<|channel|>",), "", "<|channel|>final<|message|>")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "openai_gptoss": HARMONY,
    "mistral": ReasoningFormat(("[/THINK]",), "[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat(("</seed:think>",), "<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat(
        ("Here is my thought process:",), "Here is my thought process:", "Here is my response:"
    ),
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "glm45": THINK,
    "minimax_m2": THINK,
}
"""Formats by vLLM's names. A template has the first format of which it contains a mark."""


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of a model with this chat template; None if it shows none."""
    for reasoning_format in REASONING_FORMATS.values():
        if any(mark in template for mark in reasoning_format.template_marks):
            return reasoning_format
    return None


def find_reasoning(
    reasoning_format: ReasoningFormat | None, prompt: Sequence[int], tokenizer: Tokenizer
) -> Reasoning | None:
    """Return the reasoning that an answer to this prompt may have; None where it has none."""
    if reasoning_format is None:
        return None
    _, begin, end = reasoning_format
    data = b"".join(map(tokenizer.token_bytes, prompt[-PROMPT_TAIL_TOKENS:]))
    tail = data.decode(errors="replace").rstrip()
    if tail.endswith(end):
        return None
    return Reasoning("" if tail.endswith(begin) else begin, end)


def num_open_tokens(
    reasoning: Reasoning, begin: str, prompt: Sequence[int], tokenizer: Tokenizer
) -> int:
    """Return how many tokens at the end of the prompt belong to the answer's reasoning.

    They follow the begin marker of the format, where the template has written it.
    """
    if reasoning.begin or not begin:
        return 0
    pieces = [tokenizer.token_bytes(token) for token in prompt[-PROMPT_TAIL_TOKENS:]]
    num_bytes = len(b"".join(pieces).rpartition(begin.encode())[2])
    count = 0
    for piece in reversed(pieces):
        num_bytes -= len(piece)
        if num_bytes < 0:
            break
        count += 1
    return count


class ReasoningParser:
    """Separates an answer's reasoning from its content while the answer grows.

    reasoning   what the answer may have; None: all of it is content
    dropped     characters that are dropped at the start of the content after reasoning

    Text is held back only while it may belong to a marker. Line breaks next to a marker belong to
    it. Without its end marker the rest of the answer is reasoning. O(1) a character.
    """

    def __init__(self, reasoning: Reasoning | None, dropped: str = "\n") -> None:
        self._begin, self._end = reasoning or ("", "")  # markers that may still come
        self._dropped = dropped
        self._leading = "" if self._begin or not self._end else "\n"  # dropped before more text
        self._buffer = ""

    def push(self, text: str) -> list[OutputEvent]:
        """Add text; return the pieces that are certain now."""
        text, self._buffer = self._buffer + text, ""
        if self._begin:
            start = text.lstrip("\n")
            if len(text) - len(start) > MAX_LINE_BREAKS or not _may_start(start, self._begin):
                self._begin = self._end = ""
            elif start.startswith(self._begin):
                text, self._begin, self._leading = start[len(self._begin) :], "", "\n"
            else:
                self._buffer = text
                return []
        events: list[OutputEvent] = []
        if self._end:
            before, marker, text = text.partition(self._end)
            num_held = 0 if marker else partial_length(before, self._end)
            body = _strip_line_breaks(before[: len(before) - num_held])
            self._add(events, ReasoningPiece, body)
            if not marker:
                self._buffer = before[len(body) :]
                return events
            self._end, self._leading = "", self._dropped
        self._add(events, TextPiece, text)
        return events

    def flush(self) -> list[OutputEvent]:
        """Return the text that was held back. This is the last call."""
        buffered, self._buffer = self._buffer, ""
        events: list[OutputEvent] = []
        self._add(events, ReasoningPiece if self._end and not self._begin else TextPiece, buffered)
        return events

    def _add(
        self,
        events: list[OutputEvent],
        kind: type[ReasoningPiece] | type[TextPiece],
        text: str,
    ) -> None:
        """Add a piece, without the characters that are dropped at its start."""
        if self._leading:
            text = text.lstrip(self._leading)
        if text:
            self._leading = ""
            events.append(kind(text))


def _may_start(text: str, marker: str) -> bool:
    """Return whether the text begins with the marker, or may once it continues."""
    return text.startswith(marker) or marker.startswith(text)


def _strip_line_breaks(text: str) -> str:
    """Return the text without the line breaks at its end, at most MAX_LINE_BREAKS."""
    for _ in range(MAX_LINE_BREAKS):
        text = text.removesuffix("\n")
    return text
