"""The route /v1/score: how likely each of some tokens is to follow a text, in SGLang's form.

Owns the request and the response. Knows no model. A score is of the first token after the prompt
of an item, so each item is a request for one token, and items share what the query has cached.

    query + items[i] ──► a prompt ──► one token, with the log probabilities of label_token_ids
                                        │
    scores[i][j]  probability of label_token_ids[j], or with apply_softmax its share among them
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from forge.errors import InvalidRequest
from forge.outputs import RequestOutput
from forge.request import NOTHING_CACHED, SamplingParams
from forge.server import generation, routes
from forge.server.admission import AdmissionQueue
from forge.server.body import MAX_BODY_BYTES
from forge.server.completions import CompletionRequest, usage
from forge.server.errors import request_aborted_error
from forge.server.field_names import FieldNames
from forge.server.json_route import handle_json
from forge.server.legacy_logprobs import MIN_LOGPROB
from forge.server.protocol import (
    BooleanField,
    CacheSaltField,
    EncodedRequest,
    IntegerField,
    NamedPrompt,
    StringField,
    TokenIdsField,
    invalid_field_error,
    missing_field_error,
    parse_prompts,
    parse_request,
)
from forge.server.request_head import RequestHead
from forge.server.routes import APIRoute
from forge.server.served_model import ServedModel
from forge.server.time_slicing import SlicedWork

# Checked by `ScoreRequest.parse_items`, which names the invalid one.
QueryField = Annotated[
    SkipValidation[str | list[int] | None], Field(description="text, or token ids")
]
ItemsField = Annotated[
    SkipValidation[str | list[str] | list[list[int]] | None],
    Field(description="a text, a list of texts, or a list of lists of token ids"),
]
MAX_JOINED_LENGTH = MAX_BODY_BYTES
"""Characters or ids of all prompts. Each has the query, so a short body could make long prompts."""

_NAMES = FieldNames({"prompt": "items", "logprob_token_ids": "label_token_ids"})


class ScoreRequest(EncodedRequest):
    """The body of POST /v1/score, with the checks that need no engine."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "embed_override_token_id": (),
        "item_embed_overrides": (),
        "query_embed_overrides": (),
        "return_pooled_hidden_states": (False,),
    }

    model: StringField = None
    query: QueryField = None
    items: ItemsField = None
    label_token_ids: TokenIdsField = None
    apply_softmax: BooleanField = None
    item_first: BooleanField = None
    priority: IntegerField = None
    cache_salt: CacheSaltField = None

    def parse_items(self) -> list[NamedPrompt]:
        """Return the prompt of each item, at least one. Raises InvalidRequest."""
        query, is_text = self.query, isinstance(self.query, str)
        if query is None:
            raise missing_field_error("query", "Give text or token ids")
        if not is_text and not (isinstance(query, list) and set(map(type, query)) <= {int}):
            raise invalid_field_error("query", "it is neither text nor token ids", "invalid_type")
        if self.items is None or self.items == []:
            raise missing_field_error("items", "Give at least one text, or list of token ids")
        with _NAMES.rename_errors():
            items = parse_prompts(self.items)
        length = len(query) * len(items) + sum(len(item.content) for item in items)
        if length > MAX_JOINED_LENGTH:
            raise InvalidRequest(
                "items",
                f"with the query they have {length} characters or ids, at most {MAX_JOINED_LENGTH}",
                "Send them in several requests",
                "too_many_items",
            )
        prompts = []
        for item in items:
            param = _NAMES.client_name(item.param)
            if isinstance(item.content, str) != is_text:
                problem = "text and token ids cannot be joined: the query has the other form"
                raise invalid_field_error(param, problem, "invalid_type")
            first, second = (item.content, query) if self.item_first else (query, item.content)
            prompts.append(NamedPrompt(param, first + second))  # type: ignore[operator]
        return prompts

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of a request for one token. Raises InvalidRequest."""
        if not self.label_token_ids:
            raise missing_field_error("label_token_ids", "Give the ids of at least one token")
        with _NAMES.rename_errors():
            return SamplingParams(
                max_tokens=1,
                temperature=0.0,
                logprobs=0,
                logprob_token_ids=self.label_token_ids,
            )


class ParsedScore(NamedTuple):
    """A request, the parameters that all items share, and the prompt of each item."""

    request_body: ScoreRequest
    params: SamplingParams
    prompts: list[NamedPrompt]


class ScoreEndpoints:
    """Handler of the route."""

    def __init__(self, queue: AdmissionQueue, served_model: ServedModel) -> None:
        self._queue = queue
        self._served_model = served_model

    def routes(self) -> list[APIRoute]:
        """Return the route with its handler."""
        return [routes.SCORE.bind(POST=self.score)]

    async def score(self, request: Request) -> Response:
        """POST /v1/score."""
        return await handle_json(request, self._parse, self._respond)

    def _parse(self, body: dict[str, Any]) -> ParsedScore:
        request_body = parse_request(ScoreRequest, body)
        self._served_model.check(request_body.model)
        return ParsedScore(request_body, request_body.sampling_params(), request_body.parse_items())

    async def _respond(self, parsed: ParsedScore, head: RequestHead) -> Response:
        request_body, params, prompts = parsed
        names = {"priority", "cache_salt", *EncodedRequest.model_fields}
        shared = request_body.model_dump(include=names, exclude_none=True)
        with _NAMES.rename_errors():
            requests = await generation.build_requests(
                self._queue, parse_request(CompletionRequest, shared), prompts, params, head
            )

        def build_body(outputs: Sequence[RequestOutput]) -> SlicedWork[dict[str, Any]]:
            scores, num_prompt, cached_tokens = [], 0, NOTHING_CACHED
            for output in outputs:
                scores.append(item_scores(request_body, output))
                num_prompt += len(output.prompt_token_ids)
                cached_tokens = cached_tokens.plus(output.cached_tokens)
                yield 1
            return {
                "object": "scoring",
                "model": self._served_model.name,
                "scores": scores,
                "usage": usage(num_prompt, 0, cached_tokens),
            }

        return await generation.create_response(self._queue, requests, head.request_id, build_body)


def item_scores(request_body: ScoreRequest, output: RequestOutput) -> list[float]:
    """Return the score of each label after the prompt of an output, which has one token.

    Raises APIError for an output that a pause has aborted: it has none.
    """
    if output.finish_reason == "abort":
        raise request_aborted_error()
    found = dict(output.logprobs[0].top)
    labels = request_body.label_token_ids or []
    logprobs = [max(found[label], MIN_LOGPROB) for label in labels]
    if not request_body.apply_softmax:
        return [math.exp(each) for each in logprobs]
    highest = max(logprobs)
    weights = [math.exp(each - highest) for each in logprobs]
    total = math.fsum(weights)
    return [each / total for each in weights]
