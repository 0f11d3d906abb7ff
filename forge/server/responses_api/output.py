"""ResponseOutput: one response of /v1/responses, whole or as the events of a stream.

Owns the response object, its items and the order of events. Knows no store and no socket.

    response.created, response.in_progress
    response.output_item.added                          an item begins
      response.content_part.added                       of a text
        response.output_text.delta ... .done            reasoning_text of a reasoning
      response.content_part.done
      response.function_call_arguments.delta ... .done  of a call
    response.output_item.done                           the item as it stays
    response.completed, .incomplete or .failed          the response as it stays

Always true: sequence numbers count from 0 without a gap, and the last event has the whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from forge.outputs import RequestOutput, TextDelta
from forge.server.choice_end import weights_fields
from forge.server.errors import APIError
from forge.server.output_items import (
    CallItem,
    ItemEnd,
    ItemEvent,
    ItemStart,
    ItemText,
    OutputItem,
    OutputItems,
    ReasoningItem,
)
from forge.server.responses_api.items import ID_PREFIXES, Item, create_id, encode_object
from forge.server.time_slicing import SlicedWork

FINAL_STATUSES = {"stop": "completed", "length": "incomplete"}
"""Finish reason -> status of a response, where that is not `cancelled`: a pause aborts requests."""

FINAL_EVENTS = {"completed": "completed", "failed": "failed"}
"""Status of a response -> name of its last event, where that is not `incomplete`."""


class Event(NamedTuple):
    """An event of a stream: its type and its JSON."""

    kind: str
    data: str


class ResponseOutput:
    """A response: its status, its items and its usage.

    id        id of the response
    status    in_progress, completed, incomplete, failed or cancelled
    head      JSON object of the fields that do not change, encoded once: it may be long
    """

    def __init__(
        self,
        response_id: str,
        head: str,
        num_prompt_tokens: int,
        items: OutputItems,
        now_s: Callable[[], int],
    ) -> None:
        self.id = response_id
        self.status = "in_progress"
        self._head = head.removesuffix("}")
        self._num_prompt_tokens = num_prompt_tokens
        self._items = items
        self._now_s = now_s
        self._ids: list[str] = []
        self._completed_at: int | None = None
        self._error: dict[str, str] | None = None
        self._num_events = 0

    def add_output(self, output: RequestOutput) -> SlicedWork[None]:
        """Add the whole output of a request, which ends the response, in slices."""
        for event in (yield from self._items.push_whole(output)):
            self._note(event)
        self._end(self._final_status())

    def start_events(self) -> Iterator[Event]:
        """Yield the events before any output."""
        for kind in ("response.created", "response.in_progress"):
            yield self._response_event(kind)

    def delta_events(self, delta: TextDelta) -> Iterator[Event]:
        """Yield the events of a delta."""
        for event in self._items.push(delta):
            yield from self._item_events(event)

    def end_events(
        self, status: str | None = None, error: APIError | None = None
    ) -> Iterator[Event]:
        """Yield the last events of a response.

        status   what it ends with, where it was cut: failed or cancelled
        error    what failed
        """
        for event in self._items.end():
            yield from self._item_events(event)
        if error is not None:
            code = error.code if error.status < 500 else "server_error"
            self._error = {"code": code, "message": error.message}
        self._end(status or self._final_status())
        name = FINAL_EVENTS.get(self.status, "incomplete")
        yield self._response_event(f"response.{name}")

    def encode(self) -> str:
        """Return the JSON of the response as it is now."""
        is_cut = self.status == "incomplete"
        changing = {
            "id": self.id,
            "object": "response",
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.output(),
            "usage": None if self.status == "in_progress" else self._usage(),
            **weights_fields(self._items.weights),
            **self._timings_fields(),
        }
        return f"{self._head},{encode_object(changing).removeprefix('{')}"

    def output(self) -> list[Item]:
        """Return the items so far, in the form in which a later request uses them."""
        return [
            self._item(item_id, item, _item_status(item))
            for item_id, item in zip(self._ids, self._items.items, strict=True)
        ]

    def _final_status(self) -> str:
        return FINAL_STATUSES.get(self._items.finish_reason or "", "cancelled")

    def _end(self, status: str) -> None:
        self.status = status
        if status == "completed":
            self._completed_at = self._now_s()

    def _usage(self) -> dict[str, Any]:
        items = self._items
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": items.cached_tokens.total,
                "cache_write_tokens": items.cached_tokens.written,
            },
            "output_tokens": items.num_tokens,
            "output_tokens_details": {"reasoning_tokens": items.num_reasoning_tokens},
            "total_tokens": self._num_prompt_tokens + items.num_tokens,
        }

    def _timings_fields(self) -> dict[str, Any]:
        items = self._items
        num_cached = items.cached_tokens.total
        return items.timings.fields(self._num_prompt_tokens, num_cached, items.num_tokens)

    def _item(self, item_id: str, item: OutputItem, status: str) -> Item:
        if isinstance(item, CallItem):
            return {
                "id": item_id,
                "type": "function_call",
                "status": status,
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.text,
            }
        if isinstance(item, ReasoningItem):
            return {
                "id": item_id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [_part(item)],
            }
        return {
            "id": item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_part(item)],
        }

    def _note(self, event: ItemEvent) -> None:
        """Give an item that begins its id."""
        if isinstance(event, ItemStart):
            self._ids.append(create_id(ID_PREFIXES[_item_type(event.item)]))

    def _item_events(self, event: ItemEvent) -> Iterator[Event]:
        self._note(event)
        index = event.item_index
        place = {"item_id": self._ids[index], "output_index": index}
        match event:
            case ItemStart(_, CallItem() as item):
                yield self._added(index, self._item(self._ids[index], item, "in_progress"))
            case ItemStart(_, item):
                opened = {**self._item(self._ids[index], item, "in_progress"), "content": []}
                yield self._added(index, opened)
                part = {"content_index": 0, "part": _part(item)}
                yield self._event("response.content_part.added", **place, **part)
            case ItemText(_, CallItem(), text):
                yield self._event("response.function_call_arguments.delta", **place, delta=text)
            case ItemText(_, ReasoningItem(), text):
                yield self._event(
                    "response.reasoning_text.delta", **place, content_index=0, delta=text
                )
            case ItemText(_, _, text):
                yield self._event(
                    "response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]
                )
            case ItemEnd(_, item):
                yield from self._item_end_events(place, item)

    def _item_end_events(self, place: dict[str, Any], item: OutputItem) -> Iterator[Event]:
        if isinstance(item, CallItem):
            yield self._event("response.function_call_arguments.done", **place, arguments=item.text)
        else:
            content = {**place, "content_index": 0}
            if isinstance(item, ReasoningItem):
                yield self._event("response.reasoning_text.done", **content, text=item.text)
            else:
                text = {"text": item.text, "logprobs": []}
                yield self._event("response.output_text.done", **content, **text)
            yield self._event("response.content_part.done", **content, part=_part(item))
        done = self._item(place["item_id"], item, _item_status(item))
        yield self._event(
            "response.output_item.done", output_index=place["output_index"], item=done
        )

    def _added(self, index: int, item: Item) -> Event:
        return self._event("response.output_item.added", output_index=index, item=item)

    def _response_event(self, kind: str) -> Event:
        """Return an event with the whole response."""
        head = self._event(kind).data.removesuffix("}")
        return Event(kind, f'{head},"response":{self.encode()}}}')

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return Event(kind, encode_object({"type": kind, "sequence_number": number, **fields}))


def _item_status(item: OutputItem) -> str:
    return "completed" if item.is_complete else "incomplete"


def _item_type(item: OutputItem) -> str:
    if isinstance(item, CallItem):
        return "function_call"
    return "reasoning" if isinstance(item, ReasoningItem) else "message"


def _part(item: OutputItem) -> dict[str, Any]:
    """Return the one part of a text or a reasoning."""
    if isinstance(item, ReasoningItem):
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}
