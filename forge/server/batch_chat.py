"""The request and the response of /v1/chat/completions/batch: several chats in one call.

Owns the fields that a batch does not have, and the joint body. Each chat is a request of its own.

    messages [[...], [...]] ──► ChatRequest, ChatRequest ──► one Request each
    outputs                 ──► choices[i] of chat i, one usage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from forge.errors import InvalidRequest
from forge.outputs import RequestOutput
from forge.request import NOTHING_CACHED, Request
from forge.server import chat, generation
from forge.server.admission import AdmissionQueue
from forge.server.chat import ChatCompletionResponse, ChatRequest
from forge.server.chat_formats import ChatFormats
from forge.server.completions import usage
from forge.server.field_names import FieldNames
from forge.server.protocol import MAX_PROMPTS, missing_field_error, parse_request
from forge.server.request_head import RequestHead
from forge.server.time_slicing import SlicedWork

ConversationsField = Annotated[
    list[list[Any]] | None, Field(description="a list of chats, each a list of messages")
]


class BatchChatRequest(ChatRequest):
    """The body of POST /v1/chat/completions/batch. All chats have its other fields."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ChatRequest.unsupported,
        "best_of": (1,),
        "n": (1,),
        "parallel_tool_calls": (),
        "prompt_logprobs": (),
        "return_metrics": (False,),
        "return_timings": (False,),
        "stream": (False,),
        "stream_options": (),
        "tool_choice": ("none",),
        "tools": ([],),
    }
    remedy: ClassVar[str] = "Leave it out, or send each chat to /v1/chat/completions"

    messages: ConversationsField = None  # type: ignore[assignment]

    def split(self) -> list[ChatRequest]:
        """Return the request of each chat, at least one. Raises InvalidRequest."""
        if self.messages is None:
            raise missing_field_error("messages", "Give a list of chats")
        if not 1 <= len(self.messages) <= MAX_PROMPTS:
            raise InvalidRequest(
                "messages",
                f"{len(self.messages)} chats, from 1 to {MAX_PROMPTS}",
                "Send them in several requests",
                "too_many_prompts",
            )
        shared = self.model_dump(exclude={"messages"}, exclude_none=True)
        return [parse_request(ChatRequest, {**shared, "messages": each}) for each in self.messages]


async def build_requests(
    queue: AdmissionQueue, chats: Sequence[ChatRequest], head: RequestHead, formats: ChatFormats
) -> list[Request]:
    """Return a request that the engine can serve for each chat. Raises InvalidRequest."""
    queue.check_capacity(len(chats))  # before the costly part
    requests = []
    for index, each in enumerate(chats):
        with FieldNames({"messages": f"messages[{index}]"}).rename_errors():
            requests.append(await chat.build_request(queue, each, head, formats))
    with FieldNames({"logprobs": "top_logprobs"}).rename_errors():
        generation.check_logprobs(queue.llm, requests)
    return requests


class BatchChatResponse:
    """The response of one call, with a choice for each chat.

    responses   of the chats, in order
    head        fields of the body before its choices
    """

    def __init__(
        self, responses: Sequence[ChatCompletionResponse], head: Mapping[str, object]
    ) -> None:
        self.requests = [request for each in responses for request in each.requests]
        self._responses = responses
        self._head = {**head, "object": "chat.completion"}

    def body(self, outputs: Sequence[RequestOutput]) -> SlicedWork[dict[str, Any]]:
        """Build the whole body, in slices."""
        choices: list[dict[str, Any]] = []
        cached_tokens, num_reasoning = NOTHING_CACHED, None
        for index, (response, output) in enumerate(zip(self._responses, outputs, strict=True)):
            body = yield from response.body([output])
            (choice,) = body["choices"]
            prompt_ids = body["prompt_token_ids"]
            choices.append({**choice, "index": index, "prompt_token_ids": prompt_ids})
            cached_tokens = cached_tokens.plus(output.cached_tokens)
            if (details := body["usage"].get("completion_tokens_details")) is not None:
                num_reasoning = (num_reasoning or 0) + details["reasoning_tokens"]
        num_prompt = sum(len(request.prompt) for request in self.requests)
        counts = usage(num_prompt, sum(len(each.token_ids) for each in outputs), cached_tokens)
        if num_reasoning is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return {**self._head, "choices": choices, "usage": counts}
