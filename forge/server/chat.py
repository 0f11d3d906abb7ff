"""The request and the response of /v1/chat/completions.

Owns the request model, the logprobs of chats and the bodies. Knows no template and no socket.

    ChatRequest ──► messages ──► apply_chat_template, in a thread ──► ids ──► one Request
    choice c    ──► choices[c].message            a body
                    choices[c].delta              {"role": "assistant", "content": ""}
                                                  {"content": "..."} per delta of the engine
                                                  {"tool_calls": [...]} for a call of a tool
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from forge.errors import InvalidRequest
from forge.grammar_sandbox import TOO_COSTLY_CODE
from forge.outputs import RequestOutput, TextDelta
from forge.request import (
    NOTHING_CACHED,
    Request,
    SamplingParams,
    TokenLogprob,
)
from forge.sampling_defaults import SamplingDefaults
from forge.server import generation
from forge.server.admission import AdmissionQueue
from forge.server.chat_choice import ChatChoice
from forge.server.chat_formats import ChatFormats
from forge.server.choice_end import encode_end, end_fields
from forge.server.completions import (
    StreamingRequest,
    encode_last_chunk,
    usage,
)
from forge.server.errors import excerpt
from forge.server.field_names import FieldNames
from forge.server.legacy_logprobs import MIN_LOGPROB
from forge.server.messages import MAX_TEMPLATE_ROLES, REASONING_KEYS, ROLES, parse_messages
from forge.server.prompt_logprobs import build_prompt_logprobs
from forge.server.protocol import (
    MAX_USER_CHARS,
    UNSUPPORTED_FIELDS,
    BooleanField,
    IntegerField,
    NamedPrompt,
    ShortTextField,
)
from forge.server.request_head import RequestHead
from forge.server.time_slicing import (
    ENTRIES_PER_SLICE,
    TOKENS_PER_SLICE,
    EncodedList,
    SlicedWork,
    iter_batches,
    num_entries,
    split_scores,
)
from forge.server.timings import AnswerTimings
from forge.server.tool_formats import HERMES
from forge.server.tools import ToolSet, check_renders_tool_calls, parse_tools
from forge.tokenizer import ChatEnd, ChatMessage, Tokenizer

# Checked by `parse_messages`, which names the invalid message and stops at the first one.
MessagesField = Annotated[
    SkipValidation[list[dict[str, Any]] | None],
    Field(description="a list of messages, each with a role and a content"),
]
# Checked by `parse_tools`, which names the invalid tool and stops at the first one.
ToolsField = Annotated[
    SkipValidation[list[dict[str, Any]] | None],
    Field(description="a list of tools, each a function with a name and parameters"),
]
ToolChoiceField = Annotated[
    SkipValidation[str | dict[str, Any] | None],
    Field(description="none, auto, required, or an object that names a function"),
]
TemplateVariablesField = Annotated[
    dict[str, bool | int | float | str] | None,
    Field(description="an object of strings, numbers, true or false"),
]

RESERVED_VARIABLES = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("conversations", "documents", "kwargs", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("sanitize_control_tokens", "self", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Names that the server or the renderer sets for a template: a client may not set them."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
NO_THINKING_LIMIT = -1
MAX_THINKING_TOKENS = 2**31 - 1
_VARIABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ChatRequest(StreamingRequest):
    """The body of POST /v1/chat/completions, with the checks that need no engine."""

    default_max_tokens: ClassVar[int | None] = None
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED_FIELDS,
        "echo": (False,),
        "parse_special_tokens": (False,),
        "prompt": (),
        "web_search_options": (),
    }

    messages: MessagesField = None
    max_completion_tokens: IntegerField = None
    logprobs: BooleanField = None
    top_logprobs: IntegerField = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: BooleanField = None
    add_generation_prompt: BooleanField = None
    continue_final_message: BooleanField = None
    chat_template_kwargs: TemplateVariablesField = None
    reasoning_effort: ShortTextField = None
    include_reasoning: BooleanField = None
    thinking_token_budget: IntegerField = None
    # Accepted without effect.
    prediction: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    prompt_cache_retention: ShortTextField = None
    safety_identifier: ShortTextField = None
    service_tier: ShortTextField = None
    store: BooleanField = None
    verbosity: ShortTextField = None

    def explicit_params(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the request sets. Raises InvalidRequest."""
        params = super().explicit_params()
        limit = self.max_completion_tokens
        if limit is not None:
            if self.max_tokens not in (None, limit):
                raise InvalidRequest(
                    "max_completion_tokens",
                    "max_tokens has another value",
                    "Give only one of them",
                    "conflicting_parameters",
                )
            params["max_tokens"] = limit
        if params.get("max_tokens") == 0:
            raise InvalidRequest("max_tokens", "0 leaves no token to generate", "Give 1 or more")
        return {**params, "logprobs": self._num_top_logprobs()}

    def _num_top_logprobs(self) -> int | None:
        """Return the number of top logprobs per token; None without logprobs."""
        count = self.top_logprobs or 0
        if count and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs", "logprobs is not true", "Set it, or leave this out"
            )
        return count if self.logprobs else None

    @property
    def max_thinking_tokens(self) -> int | None:
        """Most tokens of the reasoning; None: no limit. Raises InvalidRequest."""
        budget = self.thinking_token_budget
        if budget is None or budget == NO_THINKING_LIMIT:
            return None
        if not 0 <= budget <= MAX_THINKING_TOKENS:
            raise InvalidRequest(
                "thinking_token_budget",
                f"{excerpt(str(budget))} is not an integer from -1 to {MAX_THINKING_TOKENS}",
                "Give a value in range; -1 is no limit",
            )
        return budget

    @property
    def chat_end(self) -> ChatEnd:
        """End of the rendered chat. Raises InvalidRequest for conflicting fields."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message",
                    "add_generation_prompt is true as well",
                    "Give only one of them",
                )
            return ChatEnd.CONTINUE_FINAL_MESSAGE
        return (
            ChatEnd.END_OF_MESSAGE
            if self.add_generation_prompt is False
            else ChatEnd.GENERATION_PROMPT
        )

    @property
    def begins_text(self) -> bool:
        """Return whether the answer does not continue the final message."""
        return self.chat_end is not ChatEnd.CONTINUE_FINAL_MESSAGE

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the template. Raises InvalidRequest."""
        variables = dict(self.chat_template_kwargs or {})
        for name, value in variables.items():
            # A template has its special tokens under names like bos_token.
            if (
                name in RESERVED_VARIABLES
                or name.endswith("_token")
                or not _VARIABLE_NAME.fullmatch(name)
            ):
                raise InvalidRequest(
                    "chat_template_kwargs",
                    f"'{excerpt(name)}' cannot be set by a request",
                    "Leave it out",
                    "unsupported_parameter",
                )
            if isinstance(value, str) and len(value) > MAX_USER_CHARS:
                raise InvalidRequest(
                    "chat_template_kwargs",
                    f"'{excerpt(name)}' has {len(value)} characters, at most {MAX_USER_CHARS}",
                    "Shorten it",
                    "string_too_long",
                )
        if self.reasoning_effort is not None:
            for name, value in effort_variables(self.reasoning_effort).items():
                if variables.setdefault(name, value) != value:
                    raise InvalidRequest(
                        "reasoning_effort",
                        f"chat_template_kwargs has another {name}",
                        "Give only one of them",
                        "conflicting_parameters",
                    )
        return variables

    @cached_property
    def callable_tools(self) -> ToolSet | None:
        """Tools that the answer may call; None without any. Raises InvalidRequest."""
        return parse_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def replace_tools(self, tools: ToolSet) -> None:
        """Set `callable_tools` to tools with less of their schemas; the prompt stays the same."""
        self.__dict__["callable_tools"] = tools

    def render_prompt(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of the rendered chat. Raises InvalidRequest. May be slow."""
        if self.add_special_tokens and tokenizer.encode(""):
            raise InvalidRequest(
                "add_special_tokens", "a chat's template writes the special tokens", "Leave it out"
            )
        messages, variables = parse_messages(self.messages), dict(self.template_variables())
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                check_renders_tool_calls(f"messages[{index}].tool_calls", tokenizer)
        if "message.thinking" in (tokenizer.chat_template or ""):
            messages = [add_thinking(message) for message in messages]
        if self.callable_tools is not None:
            variables["tools"] = list(self.callable_tools.definitions)

        def render(messages: Sequence[ChatMessage]) -> list[int]:
            return tokenizer.apply_chat_template(messages, self.chat_end, variables)

        prompt = render(messages)
        check_renders_roles(messages, prompt, render)
        return prompt


def check_renders_roles(
    messages: Sequence[ChatMessage],
    prompt: Sequence[int],
    render: Callable[[Sequence[ChatMessage]], Sequence[int]],
) -> None:
    """Raise InvalidRequest where the template leaves out the messages of a role besides ROLES.

    prompt   rendered messages. Those with other contents of such a role must differ from it
    """
    first_indices: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            first_indices.setdefault(message["role"], index)
    if len(first_indices) > MAX_TEMPLATE_ROLES:
        raise InvalidRequest(
            "messages",
            f"they have {len(first_indices)} roles besides {', '.join(ROLES)}, "
            f"at most {MAX_TEMPLATE_ROLES}",
            "Give fewer, or a name to messages of one role",
            "too_many_items",
        )
    for role, index in first_indices.items():
        others = [
            {**message, "content": f"{message['content']}."} if message["role"] == role else message
            for message in messages
        ]
        if render(others) == prompt:
            raise InvalidRequest(
                f"messages[{index}].role",
                "the model's chat template leaves out messages of this role",
                f"Give one of {', '.join(ROLES)}",
                "unsupported_parameter",
            )


def effort_variables(effort: str) -> dict[str, bool | str]:
    """Return the variables of a template for an effort of reasoning. Raises InvalidRequest.

    Templates know the effort, or whether to reason at all, or neither.
    """
    if effort not in REASONING_EFFORTS:
        raise InvalidRequest(
            "reasoning_effort",
            f"'{excerpt(effort)}' is not one of {', '.join(REASONING_EFFORTS)}",
            "Give one of these",
        )
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def add_thinking(message: ChatMessage) -> ChatMessage:
    """Return the message with its reasoning under the key that the template of gpt-oss reads.

    With calls it takes no reasoning alongside a content.
    """
    if "reasoning" not in message or (message.get("tool_calls") and message["content"]):
        return message
    return {**message, "thinking": message["reasoning"]}


async def build_request(
    queue: AdmissionQueue, request_body: ChatRequest, head: RequestHead, formats: ChatFormats
) -> Request:
    """Return a request that the engine can serve. Raises InvalidRequest or APIError."""
    queue.check_capacity(1)  # before the costly part
    names = FieldNames({"thinking_budget": "thinking_token_budget", "logprobs": "top_logprobs"})
    with names.rename_errors(), _relabel_max_tokens_error(request_body):
        # A template is a program, and texts may be long: a thread keeps the event loop free.
        llm, tokenizer = queue.llm, queue.llm.tokenizer
        params, prompt_ids = await asyncio.to_thread(
            _read_params_and_prompt, request_body, llm.sampling_defaults, tokenizer, formats
        )
        prompt = NamedPrompt("messages", prompt_ids)
        while True:
            try:
                (request,) = await generation.build_requests(
                    queue, request_body, [prompt], params, head
                )
                return request
            except InvalidRequest as error:
                answer, tools = request_body.named_structure, request_body.callable_tools
                fields = ["structure"] if answer is None else ["structure", answer.field]
                if tools is None or error.field not in fields:
                    raise
                if error.code == TOO_COSTLY_CODE:
                    relaxed = tools.relax_tools()
                else:
                    relaxed = await _relax_parts(queue, request_body, tools, formats)
                if relaxed == tools:
                    code = error.code if error.code == TOO_COSTLY_CODE else "invalid_schema"
                    raise InvalidRequest("tools", error.problem, error.remedy, code) from None
                request_body.replace_tools(relaxed)
            params = await asyncio.to_thread(
                _with_structure, params, request_body, prompt_ids, tokenizer, formats
            )


def _read_params_and_prompt(
    request_body: ChatRequest,
    defaults: SamplingDefaults,
    tokenizer: Tokenizer,
    formats: ChatFormats,
) -> tuple[SamplingParams, list[int]]:
    """Return the sampling parameters and the prompt. Raises InvalidRequest. May be slow."""
    params = request_body.sampling_params(defaults)
    max_thinking_tokens = request_body.max_thinking_tokens
    prompt = request_body.render_prompt(tokenizer)
    params = _with_structure(params, request_body, prompt, tokenizer, formats)
    if max_thinking_tokens is not None:  # after the structure, which must have the same reasoning
        budget = formats.thinking_budget_of(max_thinking_tokens, prompt, tokenizer)
        params = replace(params, thinking_budget=budget)
    return params, prompt


def _with_structure(
    params: SamplingParams,
    request_body: ChatRequest,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    formats: ChatFormats,
) -> SamplingParams:
    """Return the parameters with the structure of the answer. Raises InvalidRequest."""
    answer, tools = request_body.named_structure, request_body.callable_tools
    if answer is None and tools is None:
        return params
    structure = formats.structure_of(answer, tools, prompt, tokenizer)
    with _relabel_structure_error("tools"):
        return replace(params, structure=structure)


async def _relax_parts(
    queue: AdmissionQueue, request_body: ChatRequest, tools: ToolSet, formats: ChatFormats
) -> ToolSet:
    """Return the tools with less of each schema that cannot be compiled, or the same ones.

    Raises InvalidRequest for the answer's structure or the first strict tool that cannot be.
    """
    if request_body.structure is not None:
        with request_body.relabel_structure_error():
            await queue.check_structure(SamplingParams(structure=request_body.structure))
    for index, field_path in enumerate(tools.field_paths):
        structure = tools.alone(index).structure(
            formats.call_format, queue.llm.tokenizer, answer=None
        )
        try:
            with _relabel_structure_error(f"{field_path}.parameters"):
                await queue.check_structure(SamplingParams(structure=structure))
        except InvalidRequest as error:
            if tools.callable_tools[index].is_strict:
                raise
            if error.code == TOO_COSTLY_CODE:  # further ones may be as costly
                return tools.relax_tools()
            tools = tools.relax_tools(index)
    return tools


@contextmanager
def _relabel_structure_error(field: str) -> Iterator[None]:
    """Raise an InvalidRequest of the structure again with the field that requested it."""
    try:
        yield
    except InvalidRequest as error:
        if error.field != "structure":
            raise
        code = TOO_COSTLY_CODE if error.code == TOO_COSTLY_CODE else "invalid_schema"
        raise InvalidRequest(field, error.problem, error.remedy, code) from None


@contextmanager
def _relabel_max_tokens_error(request_body: ChatRequest) -> Iterator[None]:
    """Raise an InvalidRequest of max_tokens again with max_completion_tokens where that was set."""
    try:
        yield
    except InvalidRequest as error:
        if error.field != "max_tokens" or request_body.max_tokens is not None:
            raise
        name = "max_completion_tokens"
        raise InvalidRequest(name, error.problem, error.remedy, error.code) from None


def create_chat_choice(
    request_body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer, formats: ChatFormats
) -> ChatChoice:
    """Return a choice of the answer to a request with this prompt."""
    tools = request_body.callable_tools
    parser = formats.create_parser(request_body.named_structure, tools, prompt, tokenizer)
    keys = () if request_body.include_reasoning is False else REASONING_KEYS
    return ChatChoice(parser, tools, HERMES if tools is None else formats.call_format, keys)


class ChatCompletionResponse:
    """The response of one call of /v1/chat/completions, whole or in chunks."""

    def __init__(
        self,
        request_body: ChatRequest,
        request: Request,
        tokenizer: Tokenizer,
        formats: ChatFormats,
        head: Mapping[str, object],
    ) -> None:
        self.requests = (request,)
        self._request_body = request_body
        self._tokenizer = tokenizer
        self._name_token = request_body.token_namer(tokenizer)
        self._formats = formats
        self._head = {**head, "object": "chat.completion"}
        # JSON that all chunks begin with: built once, because there is a chunk per token.
        chunk_head = {**head, "object": "chat.completion.chunk"}
        self._chunk_head = json.dumps(chunk_head, separators=(",", ":"))[:-1] + ',"choices":['
        self._usage_in_every_chunk = request_body.usage_in_every_chunk
        self._null_usage = ',"usage":null' if request_body.includes_usage else ""
        self._returns_ids = bool(request_body.return_token_ids)
        self._unsent_prompt_ids = ""  # JSON of the prompt's ids, for the first chunk
        if self._returns_ids and request_body.stream:
            prompt_ids = json.dumps(list(request.prompt), separators=(",", ":"))
            self._unsent_prompt_ids = f',"prompt_token_ids":{prompt_ids}'
        self._completion_tokens = 0
        self._timings = AnswerTimings(request_body.return_timings, request_body.return_metrics)
        self._cached_tokens = NOTHING_CACHED
        self._unstarted_choices = set(range(request.params.n))  # their role is not sent yet
        self._choices = [
            create_chat_choice(request_body, request.prompt, tokenizer, formats)
            for _ in self._unstarted_choices
        ]

    def body(self, outputs: Sequence[RequestOutput]) -> SlicedWork[dict[str, Any]]:
        """Build the whole body, in slices."""
        (output,) = outputs
        self._completion_tokens = sum(len(choice.token_ids) for choice in output.choices)
        self._cached_tokens = output.cached_tokens
        choices = []
        for choice in output.choices:
            chat_choice = self._choices[choice.index]
            message, content = (yield from chat_choice.message(choice)), EncodedList()
            for batch in split_scores(choice.logprobs):
                yield from self._encode_logprobs(content, batch)
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs_object(content),
                    "finish_reason": chat_choice.finish_reason(choice.finish_reason),
                    "token_ids": choice.token_ids if self._returns_ids else None,
                    **end_fields(choice, chat_choice.violation),
                }
            )
            self._timings.add(choice.timings)
            yield 1 + len(choice.token_ids) // TOKENS_PER_SLICE
        prompt: dict[str, object] = {
            "prompt_token_ids": output.prompt_token_ids if self._returns_ids else None,
            "prompt_logprobs": None,
        }
        if self._request_body.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = yield from build_prompt_logprobs(
                output.prompt_logprobs, self._tokenizer
            )
        metrics = self._timings.metrics(self._completion_tokens)
        ends = {"usage": self.usage(), **self._timings_fields(), **metrics}
        return {**self._head, **prompt, "choices": choices, **ends}

    def chunks(self, _: int, delta: TextDelta) -> list[str]:
        """Return the JSON of each event for a delta; a choice's first event has its role."""
        chunks, chat_choice = [], self._choices[delta.choice]
        if delta.choice in self._unstarted_choices:
            self._unstarted_choices.remove(delta.choice)
            chunks.append(self._chunk(delta.choice, chat_choice.role_delta, "null", "null"))
        self._completion_tokens += len(delta.token_ids)
        self._cached_tokens = self._cached_tokens.plus(delta.cached_tokens)
        self._timings.add(delta.timings)
        logprobs = "null"
        if self._request_body.logprobs:
            scores = self._logprobs_object(self._logprob_entries(delta.logprobs))
            logprobs = json.dumps(scores, separators=(",", ":"), allow_nan=False)
        deltas = chat_choice.encode_deltas(delta)
        reason = chat_choice.finish_reason(delta.finish_reason)
        finish = encode_end(reason, delta, chat_choice.violation)
        *first, last = deltas or [chat_choice.empty_delta]
        chunks += [self._chunk(delta.choice, piece, "null", "null") for piece in first]
        if self._returns_ids:
            finish += f',"token_ids":{json.dumps(delta.token_ids, separators=(",", ":"))}'
        # A delta may be empty: its text is held back while it may begin a call.
        if deltas or self._usage_in_every_chunk or (finish, logprobs) != ("null", "null"):
            chunks.append(self._chunk(delta.choice, last, logprobs, finish))
        return chunks

    def last_chunks(self) -> list[str]:
        """Return the JSON of the events before [DONE]: usage and timings, if they are requested."""
        fields = self._timings_fields()
        if self._request_body.includes_usage:
            metrics = self._timings.last_chunk_metrics(self._completion_tokens)
            fields = {"usage": self.usage()} | fields | metrics
        return encode_last_chunk(self._chunk_head, fields)

    def usage(self) -> dict[str, Any]:
        """Count the tokens of the rendered chat and of all choices so far."""
        counts = usage(len(self.requests[0].prompt), self._completion_tokens, self._cached_tokens)
        if self._formats.reasoning is not None:
            num_reasoning = sum(each.num_reasoning_tokens for each in self._choices)
            counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return counts

    def _timings_fields(self) -> dict[str, Any]:
        num_prompt, num_cached = len(self.requests[0].prompt), self._cached_tokens.total
        return self._timings.fields(num_prompt, num_cached, self._completion_tokens)

    def _chunk(self, index: int, delta: str, logprobs: str, finish: str) -> str:
        usage = self._unsent_prompt_ids + self._null_usage
        if self._usage_in_every_chunk:
            counts = json.dumps(self.usage(), separators=(",", ":"))
            usage = f'{self._unsent_prompt_ids},"usage":{counts}'
        self._unsent_prompt_ids = ""
        return (
            f'{self._chunk_head}{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}]{usage}}}'
        )

    def _logprobs_object(
        self, content: list[dict[str, Any]] | EncodedList
    ) -> dict[str, Any] | None:
        return {"content": content, "refusal": None} if self._request_body.logprobs else None

    def _encode_logprobs(
        self, content: EncodedList, logprobs: Sequence[TokenLogprob]
    ) -> SlicedWork[None]:
        """Add the entries of a part of `split_scores`, in slices."""
        token, score, top = logprobs[0]
        if len(top) <= ENTRIES_PER_SLICE:
            content.extend(self._logprob_entries(logprobs))
            yield num_entries((), logprobs)
            return
        entry = json.dumps(self._logprob_entry(token, score), separators=(",", ":"))
        parts = (
            [self._logprob_entry(*other) for other in part]
            for part in iter_batches(top, ENTRIES_PER_SLICE)
        )
        yield from content.add_in_parts(f'{entry[:-1]},"top_logprobs":[', parts, "]}")

    def _logprob_entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return an entry per token, each with the most likely tokens at its position.

        Of a request that lists ids, each has the token itself and these ids.
        """
        if self._request_body.logprob_token_ids:
            logprobs = [
                TokenLogprob(token, score, tuple({token: score, **dict(top)}.items()))
                for token, score, top in logprobs
            ]
        return [
            {
                **self._logprob_entry(token, score),
                "top_logprobs": [self._logprob_entry(*other) for other in top],
            }
            for token, score, top in logprobs
        ]

    def _logprob_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name_token(token),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
