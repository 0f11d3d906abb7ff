"""Conversations with known answers: ragged, sampled, of several turns, some with tools or a schema.

Owns the bodies. Each answer is that of the same request alone on an idle server, as a whole and as
a stream. Where nothing restricts the output, the sequential reference must give it too.

    rng ──► turns ──► body of one of four APIs ──► answer alone ──┐
              ▲                                                   │
              └────────────── the next turn has it ───────────────┘
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any, NamedTuple

from forge.models.hash import HashModel
from forge.request import Request, SamplingParams
from forge.tokenizer import ByteTokenizer, ChatEnd
from tests.core.reference import compute_expected
from tests.server.audited_server import AuditedServer, open_audited_server
from tests.server.good_bodies import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES
from tests.server.http_wire import KEY
from tests.soak.answers import Answer
from tests.soak.connection import SoakConnection

SIZES: dict[str, Any] = {
    "num_blocks": 4096,
    "block_size": 16,
    "max_model_len": 1024,
    "max_num_seqs": 512,
}
"""Sizes of the server, for which the longest conversation is short enough."""
PATHS = (COMPLETIONS, CHAT, RESPONSES, ANTHROPIC)
FEATURES = {"plain": 6, "schema": 2, "tools": 2}
"""What a conversation is of, and how often."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WORDS = ("when", "does", "it", "rain", "in", "the", "north", "é", "漢字", "of", "hello", "then")
MAX_STRUCTURED_TOKENS = 120
PREVIOUS_ID = "@previous@"
"""Text in a body in place of the id of the response before."""


class Turn(NamedTuple):
    """A request and its answer.

    body     JSON of an object, without the fields of one play
    answer   expected answer
    """

    path: str
    body: dict[str, Any]
    answer: Answer

    def encode(self, fields: dict[str, Any], previous_id: str) -> bytes:
        """Return the body with these fields, after the response of this id."""
        body = {**self.body, **fields}
        if fields.get("stream") and self.path in (COMPLETIONS, CHAT):
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).replace(PREVIOUS_ID, previous_id).encode()


Conversation = tuple[Turn, ...]


def draw_text(rng: Random) -> str:
    """Return some words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))


def draw_sampling(rng: Random) -> dict[str, Any]:
    """Return fields of sampling that all four APIs have; the seed makes the output certain."""
    fields: dict[str, Any] = {
        "temperature": rng.choice((0, 0.7, 1.0)),
        "seed": rng.getrandbits(31),
        "ignore_eos": rng.random() < 0.5,
    }
    for name, value in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.05), ("frequency_penalty", 0.5)):
        if rng.random() < 0.2:
            fields[name] = value
    return fields


class Draft(NamedTuple):
    """A turn before its answer is known: what to send, and what the reference needs of it.

    prompt   token ids of the prompt where nothing restricts the output, else None
    """

    path: str
    body: dict[str, Any]
    prompt: list[int] | None
    stop: tuple[str, ...]
    max_tokens: int


class Author:
    """Writes the turns of one conversation.

    messages   messages of the chat so far, for the template
    """

    def __init__(self, rng: Random, path: str, feature: str) -> None:
        self._rng = rng
        self._path = path
        self._feature = "plain" if path == COMPLETIONS and feature == "tools" else feature
        self._messages: list[dict[str, Any]] = []
        self._text = ""
        self._num_turns = 0
        if path != COMPLETIONS and rng.random() < 0.5:
            self._messages.append({"role": "system", "content": draw_text(rng)})

    def write(self) -> Draft:
        """Return the next turn."""
        self._num_turns += 1
        is_plain = self._feature == "plain"
        max_tokens = int(2 ** self._rng.uniform(2, 6.4)) if is_plain else MAX_STRUCTURED_TOKENS
        stop = ("et", "oa ") if self._rng.random() < 0.2 and self._path != RESPONSES else ()
        body = {"model": "hash", **draw_sampling(self._rng)}
        if not is_plain:
            stop, body["ignore_eos"] = (), False
        if self._path == COMPLETIONS:
            return self._write_completion(body, max_tokens, stop)
        self._messages.append({"role": "user", "content": draw_text(self._rng)})
        write = {CHAT: self._chat, RESPONSES: self._response, ANTHROPIC: self._message}[self._path]
        prompt = None
        if is_plain:
            prompt = ByteTokenizer().apply_chat_template(
                self._messages,
                ChatEnd.GENERATION_PROMPT,
                {},
            )
        return Draft(self._path, body | write(max_tokens, stop), prompt, stop, max_tokens)

    def add_answer(self, answer: Answer) -> None:
        """Continue with this answer to the last turn."""
        self._text += answer.texts[0] if answer.texts else ""
        text = answer.texts[0] if answer.texts else ""
        self._messages.append({"role": "assistant", "content": text})

    def _write_completion(
        self, body: dict[str, Any], max_tokens: int, stop: tuple[str, ...]
    ) -> Draft:
        self._text += f" {draw_text(self._rng)}"
        body |= {"prompt": self._text, "max_tokens": max_tokens}
        if stop:
            body["stop"] = list(stop)
        if self._feature == "schema":
            body["response_format"] = _chat_format()
        elif self._rng.random() < 0.15:
            body["n"] = 2
        prompt = None if self._feature == "schema" else ByteTokenizer().encode(self._text)
        return Draft(COMPLETIONS, body, prompt, stop, max_tokens)

    def _chat(self, max_tokens: int, stop: tuple[str, ...]) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [*self._messages], "max_tokens": max_tokens}
        if stop:
            body["stop"] = list(stop)
        if self._feature == "schema":
            body["response_format"] = _chat_format()
        elif self._feature == "tools":
            body["tools"] = [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
                for name in ("weather", "trip")
            ]
            body["tool_choice"] = "required"
        return body

    def _response(self, max_tokens: int, stop: tuple[str, ...]) -> dict[str, Any]:
        items = [{"type": "message", **message} for message in self._messages]
        body: dict[str, Any] = {"max_output_tokens": max_tokens}
        if self._num_turns == 1:
            body["input"] = items
        else:
            body |= {"input": items[-1:], "previous_response_id": PREVIOUS_ID}
        if self._feature == "schema":
            body["text"] = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
        elif self._feature == "tools":
            body["tools"] = [
                {"type": "function", "name": name, "parameters": SCHEMA}
                for name in ("weather", "trip")
            ]
            body["tool_choice"] = "required"
        return body

    def _message(self, max_tokens: int, stop: tuple[str, ...]) -> dict[str, Any]:
        is_system = self._messages[0]["role"] == "system"
        body: dict[str, Any] = {
            "messages": self._messages[is_system:],
            "max_tokens": max_tokens,
        }
        if is_system:
            body["system"] = self._messages[0]["content"]
        if stop:
            body["stop_sequences"] = list(stop)
        if self._feature == "schema":
            body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        elif self._feature == "tools":
            body["tools"] = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "trip")]
            body["tool_choice"] = {"type": "any"}
        return body


def _chat_format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


def build_catalogue(seed: int, count: int) -> list[Conversation]:
    """Return so many conversations with their answers. Fails where two ways of asking differ."""
    with open_audited_server("hash", **SIZES) as server:
        return asyncio.run(_build(server, seed, count))


async def _build(server: AuditedServer, seed: int, count: int) -> list[Conversation]:
    connection = SoakConnection(server.address, KEY)
    model = server.llm.engine.model
    assert isinstance(model, HashModel)
    conversations = []
    for index in range(count):
        rng = Random(f"{seed} {index}")
        path = PATHS[index % len(PATHS)]
        # A call is the end of a conversation: its id, which the template has, is random.
        feature = rng.choices(list(FEATURES), list(FEATURES.values()))[0]
        num_turns = 1 if feature == "tools" else rng.choice((1, 1, 2, 3))
        author, turns, previous_id = Author(rng, path, feature), [], ""
        for _ in range(num_turns):
            draft = author.write()
            turn = Turn(path, draft.body, Answer((), (), (), 0, 0))
            whole = await connection.request(path, turn.encode({"stream": False}, previous_id))
            streamed = await connection.request(path, turn.encode({"stream": True}, previous_id))
            assert whole.answer == streamed.answer, (turn, whole, streamed)
            if draft.prompt is not None:
                check_reference(server, model, draft, whole.answer)
            previous_id = whole.response_id
            turns.append(turn._replace(answer=whole.answer))
            author.add_answer(whole.answer)
        conversations.append(tuple(turns))
    await connection.close()
    return conversations


def check_reference(server: AuditedServer, model: HashModel, draft: Draft, answer: Answer) -> None:
    """Check that the sequential reference gives this answer too."""
    names = ("temperature", "seed", "ignore_eos", "top_p", "top_k", "min_p", "frequency_penalty")
    fields = {name: draft.body[name] for name in names if name in draft.body}
    choices = draft.body.get("n", 1)
    params = SamplingParams(n=choices, max_tokens=draft.max_tokens, stop=draft.stop, **fields)
    assert draft.prompt is not None
    request, tokenizer = Request(0, tuple(draft.prompt), params), ByteTokenizer()
    config = server.llm.engine.config
    for choice in range(choices):
        expected = compute_expected(model, config, request, choice, tokenizer=tokenizer)
        text = tokenizer.decode(expected.tokens)
        if expected.end_reason == "stop string":
            text = text[: min(text.find(stop) for stop in draft.stop if stop in text)]
        found = answer.texts[choice] if answer.texts else ""
        assert found == text, (draft, answer, expected)
