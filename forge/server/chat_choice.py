"""ChatChoice: one choice of a chat completion, as a message or as the deltas of a stream.

Owns the text, the calls and the finish reason of a choice. Knows no logprobs and no chunk.

    text of the engine ──OutputParser──► ReasoningPiece   reasoning_content and reasoning
                                         TextPiece        content
                                         CallStart        tool_calls[i]: id, type, name
                                         ArgumentsPiece   tool_calls[i]: more of the arguments

Always true: each delta has the key reasoning_content, unless the request leaves the reasoning out.
Clients of SGLang and of DeepSeek read it without a check.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import Any

from forge.outputs import ChoiceOutput, TextDelta
from forge.server.messages import REASONING_KEYS
from forge.server.output_events import (
    ArgumentsPiece,
    CallStart,
    OutputEvent,
    ReasoningPiece,
    TextPiece,
)
from forge.server.output_parser import OutputParser
from forge.server.time_slicing import ENTRIES_PER_SLICE, SlicedWork, iter_texts
from forge.server.tool_formats import CallFormat
from forge.server.tools import ToolSet


class ChatChoice:
    """Content, calls and finish reason of one choice, whole or in deltas.

    tools            tools that it may call; None: none
    call_format      format of its calls, which decides their ids
    reasoning_keys   keys under which the reasoning is sent; without any it is left out
    """

    def __init__(
        self,
        parser: OutputParser,
        tools: ToolSet | None,
        call_format: CallFormat,
        reasoning_keys: Collection[str] = REASONING_KEYS,
    ) -> None:
        self._parser = parser
        self._reasoning_keys = reasoning_keys
        self._call_format = call_format
        self._null_reasoning = ',"reasoning_content":null' if reasoning_keys else ""
        self._call_finish_reason = "stop" if tools is None else tools.finish_reason
        # OpenAI's content is null, not "", in a message that only calls tools.
        self._empty_content = "" if tools is None else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of tokens of the reasoning so far."""
        return self._parser.num_reasoning_tokens

    def message(self, choice: ChoiceOutput) -> SlicedWork[dict[str, object]]:
        """Build the whole message of a choice, in slices.

        A call that violates its schema is left out, and the calls after it: a client may run each
        call of a message, whatever its finish reason is.
        """
        parser = self._parser
        parser.count_tokens(choice.token_ids)
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        events: list[OutputEvent] = []
        for text in iter_texts(choice.text):
            events += parser.push(text)
            yield ENTRIES_PER_SLICE
        for event in [*events, *parser.flush(choice)]:
            match event:
                case ReasoningPiece(piece):
                    reasoning.append(piece)
                case TextPiece(piece):
                    texts.append(piece)
                case CallStart(name):
                    calls.append(self._create_call(name))
                case ArgumentsPiece(piece):
                    calls[-1]["function"]["arguments"] += piece
        if self.violation is not None:
            del calls[parser.num_valid_calls :]
        content = "".join(texts) or self._empty_content
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        message |= dict.fromkeys(self._reasoning_keys, "".join(reasoning) or None)
        return {**message, "tool_calls": calls} if calls else message

    @property
    def violation(self) -> str | None:
        """Return how the choice violates its schema, or None. It is known at its end."""
        return self._parser.violation

    def finish_reason(self, engine_reason: str | None) -> str | None:
        """Return why the choice ended; the reason of a call only where every call is complete."""
        if engine_reason is not None and self.violation is not None:
            return "error"
        calls_complete = self._parser.num_calls and not self._parser.is_open
        return (
            self._call_finish_reason
            if calls_complete and engine_reason == "stop"
            else engine_reason
        )

    @property
    def role_delta(self) -> str:
        """JSON of the first delta, which has the role."""
        content = json.dumps(self._empty_content)
        return f'{{"role":"assistant","content":{content}{self._null_reasoning}}}'

    @property
    def empty_delta(self) -> str:
        """JSON of a delta without text and call."""
        return f"{{{self._null_reasoning[1:]}}}"

    def encode_deltas(self, delta: TextDelta) -> list[str]:
        """Return the JSON of a delta for each piece that is certain now.

        Where no tool may be called, each of the engine's deltas but the last gives at least one.
        """
        parser, is_last = self._parser, delta.finish_reason is not None
        parser.count_tokens(delta.token_ids)
        index = parser.num_calls - 1  # of the call that is open
        events = parser.push(delta.text)
        if is_last:
            events += parser.flush(delta)
        deltas = []
        for event in events:
            if isinstance(event, ReasoningPiece) and not self._reasoning_keys:
                continue
            index += isinstance(event, CallStart)
            deltas.append(self._encode_event(index, event))
        if not deltas and self._empty_content is not None and not is_last:
            deltas.append(f'{{"content":""{self._null_reasoning}}}')
        return deltas

    def _encode_event(self, index: int, event: OutputEvent) -> str:
        match event:
            case ReasoningPiece(text):
                return json.dumps(dict.fromkeys(self._reasoning_keys, text), separators=(",", ":"))
            case TextPiece(text):
                return f'{{"content":{json.dumps(text)}{self._null_reasoning}}}'
            case CallStart(name):
                call = {"index": index, **self._create_call(name)}
            case ArgumentsPiece(text):
                call = {"index": index, "function": {"arguments": text}}
        calls = json.dumps(call, separators=(",", ":"))
        return f'{{"tool_calls":[{calls}]{self._null_reasoning}}}'

    def _create_call(self, name: str) -> dict[str, Any]:
        """Return a call of this tool with a new id and no arguments."""
        call_id = create_call_id(self._call_format)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def create_call_id(call_format: CallFormat) -> str:
    """Return a new id of a call, of a form that the model's template accepts."""
    digits = secrets.token_hex(call_format.id_digits)[: call_format.id_digits]
    return call_format.id_prefix + digits
