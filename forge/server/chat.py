"""The shapes of /v1/chat/completions: what is asked, and every byte of the answer.

Owns the request model, the logprobs of chats and the bodies. Knows no template and no socket.

    ChatRequest ──► messages ──► the tokenizer's chat, in a thread ──► ids ──► one Request
    choice c    ──► choices[c].message            a body
                    choices[c].delta              {"role": "assistant", "content": ""}
                                                  {"content": "..."} per delta of the engine
                                                  {"tool_calls": [...]} where it calls a tool
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from forge.compiler import TOO_COSTLY
from forge.errors import InvalidRequest
from forge.llm import RequestOutput, TextDelta
from forge.request import MAX_LOGPROBS, Request, SamplingParams, Structure, TokenLogprob
from forge.server import generation
from forge.server.answer import ChoiceAnswer
from forge.server.fields import MAX_USER_CHARS, UNSUPPORTED, Flag, Integer, NamedPrompt, Text
from forge.server.line import Line
from forge.server.messages import checked_messages
from forge.server.openai import LOWEST_LOGPROB, Streamed, usage
from forge.server.refusal import shown
from forge.server.slices import TOKENS, EncodedList, Slices, entries_of
from forge.server.tools import Tools, asked_tools, check_mentions_calls
from forge.tokenizer import ChatEnd, Tokenizer

# Checked by `checked_messages`, which names the message at fault and stops at the first.
Messages = Annotated[
    SkipValidation[list[dict[str, Any]] | None],
    Field(description="a list of messages, each with a role and a content"),
]
# Checked by `asked_tools`, in the same way.
Definitions = Annotated[
    SkipValidation[list[dict[str, Any]] | None],
    Field(description="a list of tools, each a function with a name and parameters"),
]
Choice = Annotated[
    SkipValidation[str | dict[str, Any] | None],
    Field(description="none, auto, required, or an object that names a function"),
]
Variables = Annotated[
    dict[str, bool | int | float | str] | None,
    Field(description="an object of strings, numbers, true or false"),
]

RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("conversations", "documents", "kwargs", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("sanitize_control_tokens", "self", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    }
)
"""What a template, or who renders it, has from the server: not for a client to set."""
_VARIABLE = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ChatRequest(Streamed):
    """The body of POST /v1/chat/completions, checked as far as that needs no engine."""

    default_max_tokens: ClassVar[int | None] = None
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED,
        "echo": (False,),
        "prediction": (),
        "prompt": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Messages = None
    max_completion_tokens: Integer = None
    logprobs: Flag = None
    top_logprobs: Integer = None
    tools: Definitions = None
    tool_choice: Choice = None
    parallel_tool_calls: Flag = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: Variables = None
    # Accepted, and nothing depends on them.
    prompt_cache_key: Text = None
    safety_identifier: Text = None

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams that are not left to their default. Raises InvalidRequest."""
        given = super().given()
        limit = self.max_completion_tokens
        if limit is not None:
            if self.max_tokens not in (None, limit):
                raise InvalidRequest(
                    "max_completion_tokens",
                    "max_tokens says something else",
                    "Give one of them",
                    "conflicting_parameters",
                )
            given["max_tokens"] = limit
        if given["max_tokens"] == 0:
            raise InvalidRequest("max_tokens", "0 leaves nothing to answer", "Give 1 or more")
        return {**given, "logprobs": self._alternatives()}

    def _alternatives(self) -> int | None:
        """How many of the most likely tokens come with each; None if not even its own score."""
        count = self.top_logprobs or 0
        if not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequest(
                "top_logprobs",
                f"{shown(str(count))} is not an integer from 0 to {MAX_LOGPROBS}",
                "Give a value in range",
            )
        if count and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs", "logprobs is not true", "Set it, or leave this out"
            )
        return count if self.logprobs else None

    @property
    def end(self) -> ChatEnd:
        """How the rendered chat ends. Raises InvalidRequest."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message",
                    "add_generation_prompt is true as well",
                    "Give one of them",
                )
            return ChatEnd.OPEN
        return ChatEnd.CLOSED if self.add_generation_prompt is False else ChatEnd.ANSWER

    def variables(self) -> dict[str, Any]:
        """What else the template may look at. Raises InvalidRequest."""
        variables = self.chat_template_kwargs or {}
        for name, value in variables.items():
            # A template has its special tokens by names like bos_token.
            if name in RESERVED or name.endswith("_token") or not _VARIABLE.fullmatch(name):
                raise InvalidRequest(
                    "chat_template_kwargs",
                    f"'{shown(name)}' is not for a request to set",
                    "Leave it out",
                    "unsupported_parameter",
                )
            if isinstance(value, str) and len(value) > MAX_USER_CHARS:
                raise InvalidRequest(
                    "chat_template_kwargs",
                    f"'{shown(name)}' has {len(value)} characters, at most {MAX_USER_CHARS}",
                    "Shorten it",
                    "string_too_long",
                )
        return variables

    @cached_property
    def callable_tools(self) -> Tools | None:
        """What the answer may call; None where it may call nothing. Raises InvalidRequest."""
        tools = asked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        asked = None if tools is None else self.asked_structure
        if asked is not None:
            raise InvalidRequest(
                asked.field,
                "the answer may call tools",
                'Set tool_choice to "none", or leave one of them out',
                "conflicting_parameters",
            )
        return tools

    def prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The rendered chat. Raises InvalidRequest. May be slow."""
        messages, variables = checked_messages(self.messages), dict(self.variables())
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                check_mentions_calls(f"messages[{index}].tool_calls", tokenizer)
        if self.callable_tools is not None:
            variables["tools"] = list(self.callable_tools.definitions)
        return tokenizer.chat(messages, self.end, variables)


async def admit(line: Line, asked: ChatRequest) -> Request:
    """The request, which the engine will take. Raises InvalidRequest, or Refused."""
    line.check(1)  # before it costs anything
    with _limit_as_asked(asked):
        # A template is a program, and texts may be long: the event loop serves others.
        params, ids = await asyncio.to_thread(_read, asked, line.llm.tokenizer)
        prompt, tools = NamedPrompt("messages", ids), asked.callable_tools
        try:
            (request,) = await generation.admit(line, asked, [prompt], params)
        except InvalidRequest as fault:
            if tools is None or fault.field != "structure":
                raise
            if fault.code != TOO_COSTLY:
                await _check_each(line, tools)
            with _named("tools"):
                raise
    return request


def _read(asked: ChatRequest, tokenizer: Tokenizer) -> tuple[SamplingParams, list[int]]:
    """How to sample, and the prompt. Raises InvalidRequest. May be slow."""
    params, tools = asked.sampling_params(), asked.callable_tools
    if tools is not None:
        with _named("tools"):
            params = replace(params, structure=tools.structure(tokenizer))
    return params, asked.prompt_ids(tokenizer)


async def _check_each(line: Line, tools: Tools) -> None:
    """Raise InvalidRequest for the first of the tools whose parameters cannot be followed."""
    for place, tool in zip(tools.places, tools.callable, strict=True):
        with _named(f"{place}.parameters"):
            structure = Structure.json_schema(tool.parameters)
            await line.prepare(SamplingParams(structure=structure))


@contextmanager
def _named(field: str) -> Iterator[None]:
    """What is wrong with the structure is said of the field that asked for it."""
    try:
        yield
    except InvalidRequest as fault:
        if fault.field != "structure":
            raise
        code = TOO_COSTLY if fault.code == TOO_COSTLY else "invalid_schema"
        raise InvalidRequest(field, fault.problem, fault.remedy, code) from None


@contextmanager
def _limit_as_asked(asked: ChatRequest) -> Iterator[None]:
    """What is wrong with the limit is said of the field that gave it."""
    try:
        yield
    except InvalidRequest as fault:
        if fault.field != "max_tokens" or asked.max_tokens is not None:
            raise
        name = "max_completion_tokens"
        raise InvalidRequest(name, fault.problem, fault.remedy, fault.code) from None


class ChatCompletion:
    """One call of /v1/chat/completions: the answer, whole or in chunks."""

    def __init__(
        self,
        asked: ChatRequest,
        request: Request,
        tokenizer: Tokenizer,
        head: Mapping[str, object],
    ) -> None:
        self.requests = (request,)
        self._asked = asked
        self._tokenizer = tokenizer
        self._head = {**head, "object": "chat.completion"}
        # Of every chunk but what differs: built once, for there is a chunk per token.
        chunk_head = {**head, "object": "chat.completion.chunk"}
        self._chunk_head = json.dumps(chunk_head, separators=(",", ":"))[:-1] + ',"choices":['
        self._counts_usage = asked.counts_usage
        self._no_usage = ',"usage":null' if asked.includes_usage else ""
        self._completion_tokens = 0
        self._silent = set(range(request.params.n))  # choices whose role nobody has said
        self._answers = [ChoiceAnswer(asked.callable_tools, tokenizer) for _ in self._silent]

    def body(self, outputs: Sequence[RequestOutput]) -> Slices[dict[str, Any]]:
        """The whole answer."""
        (output,) = outputs
        self._completion_tokens = sum(len(choice.token_ids) for choice in output.choices)
        choices = []
        for choice in output.choices:
            answer = self._answers[choice.index]
            message, content = answer.message(choice.text), EncodedList()
            for start in range(0, len(choice.logprobs), TOKENS):
                part = choice.logprobs[start : start + TOKENS]
                content.extend(self._scores(part))
                yield entries_of((), part)
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._block(content),
                    "finish_reason": answer.reason(choice.finish_reason),
                }
            )
            yield 1 + len(choice.token_ids) // TOKENS
        return {**self._head, "choices": choices, "usage": self.usage()}

    def chunks(self, _: int, delta: TextDelta) -> list[str]:
        """The JSON of each event that says what a choice gained; its role is said before all."""
        chunks, answer = [], self._answers[delta.choice]
        if delta.choice in self._silent:
            self._silent.remove(delta.choice)
            chunks.append(self._chunk(delta.choice, answer.role, "null", "null"))
        self._completion_tokens += len(delta.token_ids)
        logprobs, finish = "null", "null"
        if self._asked.logprobs:
            scores = self._block(self._scores(delta.logprobs))
            logprobs = json.dumps(scores, separators=(",", ":"), allow_nan=False)
        gained = answer.gained(delta)
        if delta.finish_reason is not None:
            finish = f'"{answer.reason(delta.finish_reason)}"'
        *first, last = gained or ["{}"]
        chunks += [self._chunk(delta.choice, piece, "null", "null") for piece in first]
        # While a call may be about to begin there may be nothing to say.
        if gained or self._counts_usage or (finish, logprobs) != ("null", "null"):
            chunks.append(self._chunk(delta.choice, last, logprobs, finish))
        return chunks

    def last_chunks(self) -> list[str]:
        """The JSON of what is said before [DONE]: the usage, where asked."""
        if not self._asked.includes_usage:
            return []
        return [f'{self._chunk_head}],"usage":{json.dumps(self.usage(), separators=(",", ":"))}}}']

    def usage(self) -> dict[str, int]:
        """Tokens of the rendered chat and, so far, of all choices."""
        return usage(len(self.requests[0].prompt), self._completion_tokens)

    def _chunk(self, index: int, delta: str, logprobs: str, finish: str) -> str:
        so_far = self._no_usage
        if self._counts_usage:
            so_far = f',"usage":{json.dumps(self.usage(), separators=(",", ":"))}'
        return (
            f'{self._chunk_head}{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}]{so_far}}}'
        )

    def _block(self, content: list[dict[str, Any]] | EncodedList) -> dict[str, Any] | None:
        return {"content": content, "refusal": None} if self._asked.logprobs else None

    def _scores(self, scores: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """An entry per token, each with the most likely tokens in its place."""
        return [
            {**self._scored(token, score), "top_logprobs": [self._scored(*other) for other in top]}
            for token, score, top in scores
        ]

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
