"""MessageOutput: one message of /v1/messages, whole or as the events of a stream.

Owns the message, its blocks, its stop reason and the order of events. Knows no socket.

    message_start                                    the message without content; a ping
    content_block_start                              a block begins
      content_block_delta ...                        text_delta, input_json_delta, thinking_delta
    content_block_stop
    message_delta                                    stop reason and usage
    message_stop

Always true: blocks have indices from 0 in order, and each is open alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forge.outputs import RequestOutput, TextDelta
from forge.request import Request
from forge.server.choice_end import weights_fields
from forge.server.errors import APIError, anthropic_envelope, request_aborted_error
from forge.server.output_items import (
    CallItem,
    ItemEnd,
    ItemEvent,
    ItemStart,
    ItemText,
    OutputItem,
    OutputItems,
    ReasoningItem,
    TextItem,
)
from forge.server.sse import comment_ping, encode_named_event
from forge.server.time_slicing import TOKENS_PER_SLICE, EncodedList, SlicedWork


class MessageOutput:
    """A message: its blocks, its stop reason and its usage. Encodes its own stream.

    head   id and model of the message
    """

    def __init__(
        self,
        head: Mapping[str, str],
        request: Request,
        items: OutputItems,
        http_request_id: str,
    ) -> None:
        self._head = head
        self._num_prompt_tokens = len(request.prompt)
        self._items = items
        self._http_request_id = http_request_id
        self._has_started = False

    def build(self, output: RequestOutput) -> SlicedWork[dict[str, Any]]:
        """Build the whole message of an output, in slices. Raises APIError for an aborted one."""
        (choice,) = output.choices
        _check_not_aborted(choice.finish_reason)
        yield from self._items.push_whole(output)
        yield 1 + len(choice.token_ids) // TOKENS_PER_SLICE
        return {
            **self._message(self._encode_content()),
            **self._end_fields(),
            "usage": self._usage(),
        }

    def encode_ping(self) -> str:
        """Return a ping; a comment before the message has started."""
        return _encode("ping") if self._has_started else comment_ping()

    def encode_delta(self, index: int, delta: TextDelta) -> Iterator[str]:
        """Yield the events of a delta. Raises APIError for the last one of an aborted request."""
        _check_not_aborted(delta.finish_reason)
        if not self._has_started:
            self._has_started = True
            message = {
                **self._message([]),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage(),
            }
            yield _encode("message_start", message=message)
            yield _encode("ping")
        for event in self._items.push(delta):
            yield _encode_item_event(event)

    def encode_end(self) -> Iterable[str]:
        """Return the last events."""
        return (
            _encode("message_delta", delta=self._end_fields(), usage=self._usage()),
            _encode("message_stop"),
        )

    def encode_error(self, error: APIError) -> Iterable[str]:
        """Return the error. Without message_stop a reader can detect that the text is cut."""
        data = json.dumps(anthropic_envelope(error, self._http_request_id), separators=(",", ":"))
        return (encode_named_event("error", data),)

    def close(self) -> None:
        """Do nothing: a message holds nothing."""

    def _encode_content(self) -> EncodedList:
        """Encode the blocks of the whole message, without a call that was cut."""
        items = self._items.items
        if self._items.ends_within_call:
            # A message has a block at least, also that of an empty output.
            items = items[:-1] or [TextItem()]
        content = EncodedList()
        for item in items:
            if isinstance(item, CallItem):
                content.add_json(_encode_call(item))
            else:
                content.extend([_block(item)])
        return content

    def _message(self, content: EncodedList | list[Any]) -> dict[str, Any]:
        return {**self._head, "type": "message", "role": "assistant", "content": content}

    def _end_fields(self) -> dict[str, Any]:
        """Return the fields of the message that its end decides."""
        items, num_cached = self._items, self._items.cached_tokens.total
        timings = items.timings.fields(self._num_prompt_tokens, num_cached, items.num_tokens)
        return {**self._stop_fields(), **weights_fields(items.weights), **timings}

    def _stop_fields(self) -> dict[str, str | None]:
        """Return why the message ended."""
        items = self._items
        if items.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(items.stop_match.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": items.stop_match.matched}
        return {
            "stop_reason": "tool_use" if items.has_calls else "end_turn",
            "stop_sequence": None,
        }

    def _usage(self) -> dict[str, Any]:
        """Count tokens so far. In this API those of a cache are not among the input tokens."""
        cached = self._items.cached_tokens
        return {
            "input_tokens": self._num_prompt_tokens - cached.total - cached.written,
            "cache_creation_input_tokens": cached.written,
            "cache_read_input_tokens": cached.total,
            "output_tokens": self._items.num_tokens,
            "output_tokens_details": {"thinking_tokens": self._items.num_reasoning_tokens},
        }


def _encode_call(item: CallItem) -> str:
    """Return the JSON of the whole block of a complete call.

    Its input is the text of the model: Python cannot hold every number of JSON.
    """
    return f"{_dumps(_block(item)).removesuffix('{}}')}{item.text}}}"


def _block(item: OutputItem) -> dict[str, Any]:
    """Return the block of an item, whose input is empty where it is a call."""
    if isinstance(item, CallItem):
        return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": {}}
    if isinstance(item, ReasoningItem):
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    return {"type": "text", "text": item.text}


def _check_not_aborted(finish_reason: str | None) -> None:
    """Raise APIError for an aborted request: no stop reason says that its output is cut."""
    if finish_reason == "abort":
        raise request_aborted_error()


def _encode_item_event(event: ItemEvent) -> str:
    match event:
        case ItemStart(index, item):
            return _encode("content_block_start", index=index, content_block=_block(item))
        case ItemText(index, CallItem(), text):
            delta = {"type": "input_json_delta", "partial_json": text}
            return _encode("content_block_delta", index=index, delta=delta)
        case ItemText(index, ReasoningItem(), text):
            delta = {"type": "thinking_delta", "thinking": text}
            return _encode("content_block_delta", index=index, delta=delta)
        case ItemText(index, _, text):
            return _encode(
                "content_block_delta", index=index, delta={"type": "text_delta", "text": text}
            )
        case ItemEnd(index, _):
            return _encode("content_block_stop", index=index)


def _encode(kind: str, **fields: Any) -> str:
    """Return an event of this type."""
    return encode_named_event(kind, _dumps({"type": kind, **fields}))


def _dumps(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
