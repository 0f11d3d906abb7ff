"""OutputItems: one output as items, each a reasoning, a text or a call of a tool.

Owns where an item begins and ends. Knows no API: /v1/responses and /v1/messages write the same
items in their own shapes.

    deltas of the engine ──OutputParser──► ItemStart 0   TextItem
                                           ItemText  0   "Let me look"
                                           ItemEnd   0
                                           ItemStart 1   CallItem: its id and tool
                                           ItemText  1   {"city": "Rome"}
                                           ItemEnd   1

Always true: items do not overlap, and the last delta ends the last item. The texts of an item,
joined, are its text, however the output was cut into deltas. An output has an item at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from forge.outputs import NO_STOP_MATCH, RequestOutput, TextDelta
from forge.request import INITIAL_WEIGHTS, NOTHING_CACHED
from forge.server.chat import ChatRequest
from forge.server.chat_choice import create_call_id
from forge.server.chat_formats import ChatFormats
from forge.server.errors import schema_violation_error
from forge.server.output_events import ArgumentsPiece, CallStart, ReasoningPiece, TextPiece
from forge.server.output_parser import OutputParser
from forge.server.time_slicing import ENTRIES_PER_SLICE, SlicedWork, iter_texts
from forge.server.timings import AnswerTimings
from forge.server.tool_formats import HERMES, CallFormat
from forge.tokenizer import Tokenizer


@dataclass(slots=True)
class OutputItem:
    """A part of the output. Owned by OutputItems.

    pieces        its text in pieces
    is_complete   false where the output ended within it
    """

    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self.pieces)


class ReasoningItem(OutputItem):
    """Reasoning of the model before its answer."""


class TextItem(OutputItem):
    """Text of the answer."""


@dataclass(slots=True)
class CallItem(OutputItem):
    """A call of a tool; its text is the JSON of its arguments."""

    name: str = ""
    call_id: str = ""


class ItemStart(NamedTuple):
    """The beginning of the item at this index."""

    item_index: int
    item: OutputItem


class ItemText(NamedTuple):
    """Text that the item at this index gains, never empty."""

    item_index: int
    item: OutputItem
    text: str


class ItemEnd(NamedTuple):
    """The end of the item at this index."""

    item_index: int
    item: OutputItem


ItemEvent = ItemStart | ItemText | ItemEnd


class OutputItems:
    """Items of one output, which grows by deltas.

    items           items so far; the last one is open until the output has ended
    finish_reason   reason that the engine gave for the end, or None
    num_tokens      output tokens so far
    cached_tokens   tokens of the prompt that were in a cache
    weights         weights that the output was sampled with, from its last delta on
    timings         times of the output, from its last delta on
    stop_match      token or stop string that ended the output, from its last delta on
    """

    def __init__(
        self, parser: OutputParser, call_format: CallFormat, timings: AnswerTimings
    ) -> None:
        self.items: list[OutputItem] = []
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.cached_tokens = NOTHING_CACHED
        self.weights = INITIAL_WEIGHTS
        self.timings = timings
        self.stop_match = NO_STOP_MATCH
        self._call_format = call_format
        self._parser = parser
        self._has_ended = False

    @classmethod
    def of_chat(
        cls,
        request_body: ChatRequest,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        formats: ChatFormats,
    ) -> Self:
        """Return the items of an answer to a chat with this prompt."""
        tools = request_body.callable_tools
        return cls(
            formats.create_parser(request_body.named_structure, tools, prompt, tokenizer),
            HERMES if tools is None else formats.call_format,
            AnswerTimings(request_body.return_timings),
        )

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of tokens of the reasoning so far."""
        return self._parser.num_reasoning_tokens

    @property
    def has_calls(self) -> bool:
        """Return whether the output calls a tool."""
        return any(isinstance(item, CallItem) for item in self.items)

    @property
    def ends_within_call(self) -> bool:
        """Return whether the output has ended within a call, whose arguments are incomplete."""
        last = self.items[-1] if self._has_ended else None
        return isinstance(last, CallItem) and not last.is_complete

    def push(self, delta: TextDelta) -> Iterator[ItemEvent]:
        """Add a delta; yield the events that are certain now.

        Raises APIError for the last one where the output violates its schema, before any event of
        it.
        """
        self.num_tokens += len(delta.token_ids)
        self.cached_tokens = self.cached_tokens.plus(delta.cached_tokens)
        self._parser.count_tokens(delta.token_ids)
        self.timings.add(delta.timings)
        parsed_events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parsed_events += self._parser.flush(delta)
            if self._parser.violation is not None:
                raise schema_violation_error(self._parser.violation)
            self.finish_reason, self.weights = delta.finish_reason, delta.weights
            self.stop_match = delta.stop_match
        for event in parsed_events:
            match event:
                case ReasoningPiece(text):
                    yield from self._continue(ReasoningItem, text)
                case TextPiece(text):
                    yield from self._continue(TextItem, text)
                case CallStart(name):
                    yield from self._start(
                        CallItem(name=name, call_id=create_call_id(self._call_format))
                    )
                case ArgumentsPiece(text):
                    yield self._add(text)
        if delta.finish_reason is not None:
            yield from self.end()

    def push_whole(self, output: RequestOutput) -> SlicedWork[list[ItemEvent]]:
        """Add the only choice of a request that has ended, in slices; return the events."""
        (choice,) = output.choices
        events: list[ItemEvent] = []
        for text in iter_texts(choice.text):
            events += self.push(TextDelta(choice.index, text, ()))
            yield ENTRIES_PER_SLICE
        events += self.push(
            TextDelta(
                choice.index,
                "",
                tuple(choice.token_ids),
                choice.finish_reason,
                cached_tokens=output.cached_tokens,
                weights=choice.weights,
                timings=choice.timings,
                error=choice.error,
                stop_match=choice.stop_match,
            )
        )
        return events

    def end(self) -> Iterator[ItemEvent]:
        """End the output, after its last delta or before it; yield the events of that."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self.items:
            yield from self._start(TextItem())
        item = self.items[-1]
        item.is_complete = self.finish_reason == "stop"
        if isinstance(item, CallItem):
            item.is_complete = not self._parser.is_open and self._parser.violation is None
        yield ItemEnd(len(self.items) - 1, item)

    def _continue(self, kind: type[OutputItem], text: str) -> Iterator[ItemEvent]:
        """Add text to the open item where it is of this kind, else to a new one."""
        if not self.items or not isinstance(self.items[-1], kind):
            yield from self._start(kind())
        yield self._add(text)

    def _start(self, item: OutputItem) -> Iterator[ItemEvent]:
        """End the open item, if there is one, and start another."""
        if self.items:
            self.items[-1].is_complete = True
            yield ItemEnd(len(self.items) - 1, self.items[-1])
        self.items.append(item)
        yield ItemStart(len(self.items) - 1, item)

    def _add(self, text: str) -> ItemEvent:
        item = self.items[-1]
        item.pieces.append(text)
        return ItemText(len(self.items) - 1, item, text)
