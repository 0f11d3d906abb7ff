"""One choice of a chat, as its client has it: a message, or the deltas of a stream.

Owns the text, the calls and the finish reason of a choice. Knows no logprobs and no chunk.

    text of the engine ──CallReader──► Words       content
                                       Call        tool_calls[i]: id, type, name, arguments ""
                                       Arguments   tool_calls[i]: more of the arguments
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from forge.llm import TextDelta
from forge.server.tool_formats import HERMES, Arguments, Call, CallReader, Event, Words
from forge.server.tools import Tools, call_format
from forge.tokenizer import Tokenizer


class ChoiceAnswer:
    """What one choice says, whole or piece by piece."""

    def __init__(self, tools: Tools | None, tokenizer: Tokenizer) -> None:
        self._form = HERMES if tools is None else call_format(tokenizer)
        names = [] if tools is None else [tool.name for tool in tools.callable]
        self._reader = CallReader(self._form, names)
        self._finish = "stop" if tools is None else tools.finish
        # Where tools may be called there may be no content, and then it is null.
        self._no_content = "" if tools is None else None

    def message(self, text: str) -> dict[str, object]:
        """The whole of it."""
        reader = self._reader
        words: list[str] = []
        calls: list[dict[str, Any]] = []
        for event in [*reader.read(text), *reader.close()]:
            match event:
                case Words(said):
                    words.append(said)
                case Call(name):
                    calls.append(self._begun(name))
                case Arguments(said):
                    calls[-1]["function"]["arguments"] += said
        content = "".join(words) or self._no_content
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def reason(self, reason: str | None) -> str | None:
        """Why it has ended, for those who wait for calls: they want whole ones."""
        whole = self._reader.num_calls and not self._reader.open
        return self._finish if whole and reason == "stop" else reason

    @property
    def role(self) -> str:
        """The JSON of the first delta."""
        return f'{{"role":"assistant","content":{json.dumps(self._no_content)}}}'

    def gained(self, delta: TextDelta) -> list[str]:
        """The JSON of a delta for each piece of what is certain now.

        Where no tool may be called there is always one before the last of the engine's.
        """
        reader, last = self._reader, delta.finish_reason is not None
        index = reader.num_calls - 1  # of the call that goes on
        events = reader.read(delta.text)
        if last:
            events += reader.close()
        pieces = []
        for event in events:
            index += isinstance(event, Call)
            pieces.append(self._piece(index, event))
        if not pieces and self._no_content is not None and not last:
            pieces.append('{"content":""}')
        return pieces

    def _piece(self, index: int, event: Event) -> str:
        match event:
            case Words(text):
                return f'{{"content":{json.dumps(text)}}}'
            case Call(name):
                call = {"index": index, **self._begun(name)}
            case Arguments(text):
                call = {"index": index, "function": {"arguments": text}}
        return f'{{"tool_calls":[{json.dumps(call, separators=(",", ":"))}]}}'

    def _begun(self, name: str) -> dict[str, Any]:
        """A call of this tool, with a new id and no arguments."""
        form = self._form
        label = form.id_prefix + secrets.token_hex(form.id_digits)[: form.id_digits]
        return {"id": label, "type": "function", "function": {"name": name, "arguments": ""}}
