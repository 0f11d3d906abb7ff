"""Answers of the four generation APIs, from a body or from a stream's events, in one form.

Owns which event is the last one, and where texts, calls, finish reasons and usage are.

    /v1/completions, /v1/chat/completions   chunks, then [DONE]      ┐
    /v1/responses                           response.completed       ├──► Answer
    /v1/messages                            message_stop             ┘

A stream without its last event, or with a usage or texts that contradict it, raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from tests.server.good_bodies import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES


class Answer(NamedTuple):
    """What a request must give, however it is batched, cached or sent.

    texts    text of each choice
    calls    (name, arguments) of each call; the arguments are written again, so spaces do not count
    finish   finish reason of each choice, in the words of the API
    """

    texts: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    finish: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int


class EventReader(Protocol):
    """Reads the events of one stream."""

    def add(self, event: str) -> bool:
        """Read the data of an event. Return whether it has output."""
        ...

    def answer(self) -> Answer:
        """Return the answer. Raises ValueError unless the stream ended as it must."""
        ...

    def response_id(self) -> str:
        """Return the id by which a later request continues the answer."""
        ...


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _normal_arguments(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


class ChunkReader:
    """Reads chunks of completions and chats."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._calls: dict[int, list[str]] = {}
        self._finish: dict[int, str] = {}
        self._usage: Mapping[str, Any] | None = None
        self._id = ""
        self._has_ended = False

    def add(self, event: str) -> bool:
        _require(not self._has_ended, "an event follows [DONE]")
        if event == "[DONE]":
            self._has_ended = True
            return False
        chunk = json.loads(event)
        _require("error" not in chunk, f"an error: {event[:200]}")
        self._id = chunk["id"]
        has_output = False
        for choice in chunk["choices"]:
            index = choice["index"]
            _require(index not in self._finish, "output follows a finish reason")
            delta = choice.get("delta", choice)
            text = delta.get("content") or delta.get("text") or ""
            self._texts[index] = self._texts.get(index, "") + text
            for call in delta.get("tool_calls") or ():
                named = self._calls.setdefault(call["index"], ["", ""])
                named[0] += call["function"].get("name") or ""
                named[1] += call["function"].get("arguments") or ""
                has_output = True
            has_output |= bool(text)
            if choice["finish_reason"]:
                self._finish[index] = choice["finish_reason"]
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        return has_output

    def answer(self) -> Answer:
        _require(self._has_ended, "there is no [DONE]")
        _require(self._usage, "there is no usage")
        _require(self._texts.keys() == self._finish.keys(), "a choice has no finish reason")
        assert self._usage is not None
        return Answer(
            tuple(text for _, text in sorted(self._texts.items())),
            tuple((call[0], _normal_arguments(call[1])) for _, call in sorted(self._calls.items())),
            tuple(finish for _, finish in sorted(self._finish.items())),
            self._usage["prompt_tokens"],
            self._usage["completion_tokens"],
        )

    def response_id(self) -> str:
        return self._id


class ResponseReader:
    """Reads events of /v1/responses."""

    def __init__(self) -> None:
        self._text = self._arguments = ""
        self._next_number = 0
        self._last: dict[str, Any] | None = None

    def add(self, event: str) -> bool:
        _require(self._last is None, "an event follows the last one")
        found = json.loads(event)
        _require(found["sequence_number"] == self._next_number, "an event is missing")
        self._next_number += 1
        match found["type"]:
            case "response.output_text.delta":
                self._text += found["delta"]
                return bool(found["delta"])
            case "response.function_call_arguments.delta":
                self._arguments += found["delta"]
                return True
            case "response.completed" | "response.incomplete":
                self._last = found["response"]
            case "response.failed" | "error":
                raise ValueError(f"an error: {event[:200]}")
        return False

    def answer(self) -> Answer:
        _require(self._last is not None, "there is no last event")
        assert self._last is not None
        answer = read_response(self._last)
        _require("".join(answer.texts) == self._text, "the deltas are not the text")
        given = "".join(
            item["arguments"] for item in self._last["output"] if item["type"] == "function_call"
        )
        _require(given == self._arguments, "the deltas are not the arguments")
        return answer

    def response_id(self) -> str:
        return "" if self._last is None else str(self._last["id"])


class MessageReader:
    """Reads events of /v1/messages."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._has_ended = False

    def add(self, event: str) -> bool:
        _require(not self._has_ended, "an event follows message_stop")
        found = json.loads(event)
        has_started = bool(self._message) != (found["type"] == "message_start")
        _require(has_started or found["type"] == "error", "message_start is not the first event")
        match found["type"]:
            case "message_start":
                self._message = found["message"]
            case "content_block_start":
                _require(found["index"] == len(self._blocks) and not self._open, "a block's index")
                self._open = True
                self._blocks.append({**found["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = self._blocks[found["index"]], found["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                    return bool(delta["text"])
                block["json"] += delta["partial_json"]
                return True
            case "content_block_stop":
                self._open = False
            case "message_delta":
                self._message |= {**found["delta"], "usage": found["usage"]}
            case "message_stop":
                self._has_ended = True
            case "error":
                raise ValueError(f"an error: {event[:200]}")
        return False

    def answer(self) -> Answer:
        _require(self._has_ended, "there is no message_stop")
        _require(not self._open, "a block has no end")
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        return read_message({**self._message, "content": self._blocks})

    def response_id(self) -> str:
        return str(self._message.get("id", ""))


READERS: Mapping[str, Callable[[], EventReader]] = {
    COMPLETIONS: ChunkReader,
    CHAT: ChunkReader,
    RESPONSES: ResponseReader,
    ANTHROPIC: MessageReader,
}


# Whole bodies.


def read_choices(body: dict[str, Any]) -> Answer:
    """Return the answer of a whole completion or chat."""
    messages = [choice.get("message", choice) for choice in body["choices"]]
    functions = [call["function"] for each in messages for call in each.get("tool_calls") or ()]
    return Answer(
        tuple(each.get("content") or each.get("text") or "" for each in messages),
        tuple((each["name"], _normal_arguments(each["arguments"])) for each in functions),
        tuple(choice["finish_reason"] for choice in body["choices"]),
        body["usage"]["prompt_tokens"],
        body["usage"]["completion_tokens"],
    )


def read_response(body: dict[str, Any]) -> Answer:
    """Return the answer of a whole response."""
    texts, calls = [], []
    for item in body["output"]:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"] == "function_call":
            calls.append((item["name"], _normal_arguments(item["arguments"])))
    reason = (body["incomplete_details"] or {"reason": "stop"})["reason"]
    usage = body["usage"]
    tokens = usage["input_tokens"], usage["output_tokens"]
    return Answer(tuple(texts), tuple(calls), (f"{body['status']}: {reason}",), *tokens)


MESSAGE_INPUTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
"""Counts of a message's usage that make up its prompt."""


def read_message(body: dict[str, Any]) -> Answer:
    """Return the answer of a whole message."""
    blocks, usage = body["content"], body["usage"]
    return Answer(
        tuple(block["text"] for block in blocks if block["type"] == "text"),
        tuple(
            (block["name"], json.dumps(block["input"], sort_keys=True))
            for block in blocks
            if block["type"] == "tool_use"
        ),
        (body["stop_reason"],),
        sum(usage[name] for name in MESSAGE_INPUTS),
        usage["output_tokens"],
    )


WHOLE: Mapping[str, Callable[[dict[str, Any]], Answer]] = {
    COMPLETIONS: read_choices,
    CHAT: read_choices,
    RESPONSES: read_response,
    ANTHROPIC: read_message,
}
