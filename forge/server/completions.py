"""The requests and responses of /v1/completions and /generate.

Owns the request models and the bodies. Knows no engine and no socket.

    CompletionRequest ──► SamplingParams, one Request per prompt
    outputs of prompt p, choice c ──► choices[p * n + c]        a body, or one chunk per delta
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from forge.errors import InvalidRequest
from forge.outputs import RequestOutput, TextDelta
from forge.request import (
    NOTHING_CACHED,
    CachedTokens,
    Request,
    SamplingParams,
    TokenLogprob,
)
from forge.sampling_defaults import SamplingDefaults
from forge.server.choice_end import encode_end, end_fields, find_violation
from forge.server.errors import excerpt
from forge.server.legacy_logprobs import LegacyLogprobs, TokenNamer, echo_text, name_by_id
from forge.server.prompt_logprobs import build_prompt_logprobs
from forge.server.protocol import (
    MAX_TOTAL_CHOICES,
    BooleanField,
    IntegerField,
    NamedPrompt,
    PromptRequest,
    SamplingRequest,
    TokenIdsField,
)
from forge.server.time_slicing import SlicedWork, split_scores
from forge.server.timings import AnswerTimings
from forge.tokenizer import Tokenizer


class StreamOptions(BaseModel):
    """Options of a stream's usage.

    include_usage            a chunk without choices before [DONE] has the usage
    continuous_usage_stats   in addition, every chunk has the usage so far; alone it has no effect
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StreamingRequest(SamplingRequest):
    """A request that may have several choices and a streamed response."""

    n: IntegerField = None
    best_of: IntegerField = None
    stream: BooleanField = None
    return_token_ids: BooleanField = None
    return_tokens_as_token_ids: BooleanField = None
    prompt_logprobs: IntegerField = None
    logprob_token_ids: TokenIdsField = None
    return_metrics: BooleanField = None
    stream_options: Annotated[
        StreamOptions | None,
        Field(description="an object with include_usage, continuous_usage_stats: true or false"),
    ] = None

    @property
    def includes_usage(self) -> bool:
        """Return whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        """Return whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.includes_usage and bool(options and options.continuous_usage_stats)

    @property
    def is_timed(self) -> bool:
        """Return whether the answer has times of its request."""
        return super().is_timed or bool(self.return_metrics)

    def token_namer(self, tokenizer: Tokenizer) -> TokenNamer:
        """Return the function that names the tokens of logprobs."""
        return name_by_id if self.return_tokens_as_token_ids else tokenizer.token_text

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidRequest, also for conflicting fields."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream is not true", "Leave it out")
        self._check_best_of()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs",
                "a stream has none",
                "Leave out stream, or use echo and logprobs of /v1/completions",
                "unsupported_parameter",
            )
        return super().sampling_params(defaults)

    def _check_best_of(self) -> None:
        """Raise InvalidRequest unless best_of is n: every generated choice is returned."""
        count = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == count:
            return
        if self.best_of < count:
            raise InvalidRequest(
                "best_of",
                f"{excerpt(str(self.best_of))} is less than n, {excerpt(str(count))}",
                "Leave it out, or give the value of n",
            )
        raise InvalidRequest(
            "best_of",
            "more choices than n are not supported",
            "Give n that value and choose by logprobs, or leave it out",
            "unsupported_parameter",
        )


class CompletionRequest(PromptRequest, StreamingRequest):
    """The body of POST /v1/completions, with the checks that need no engine."""

    default_max_tokens: ClassVar[int | None] = 16

    logprobs: IntegerField = None
    echo: BooleanField = None

    def without_prompt(self) -> Self:
        """Return a copy without the prompt: each garbage collection would visit millions of ids."""
        return self.model_copy(update={"prompt": None})

    def parse_prompts(self) -> list[NamedPrompt]:
        """Return the prompts, at least one. Raises InvalidRequest."""
        prompts = super().parse_prompts()
        continuations = len(prompts) * (self.n or 1)
        if continuations > MAX_TOTAL_CHOICES:
            raise InvalidRequest(
                "n",
                f"{len(prompts)} prompts with {self.n} choices each are {continuations}, at most "
                f"{MAX_TOTAL_CHOICES}",
                "Send several requests",
                "too_many_items",
            )
        return prompts

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidRequest, also for conflicting fields."""
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens", "0 leaves no token to generate", "Give 1, or use echo"
            )
        if self.max_tokens == 0 and self.logprob_token_ids:
            raise InvalidRequest(
                "logprob_token_ids",
                "max_tokens is 0, so no token is generated",
                "Give max_tokens of 1 or more",
            )
        return super().sampling_params(defaults)

    @property
    def echo_logprobs(self) -> int | None:
        """Top logprobs per token of the echoed prompt; None without them."""
        return self.logprobs if self.echo else None

    def explicit_params(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the request sets. Raises InvalidRequest."""
        params, count = super().explicit_params(), self.echo_logprobs
        if count is None:
            return params
        if self.prompt_logprobs not in (None, count):
            raise InvalidRequest(
                "prompt_logprobs",
                "logprobs of the echo has another value",
                "Give both the same value, or leave one out",
                "conflicting_parameters",
            )
        return {**params, "prompt_logprobs": count}


class GenerateRequest(PromptRequest):
    """The body of POST /generate."""

    default_max_tokens: ClassVar[int | None] = 32
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **PromptRequest.unsupported,
        "best_of": (1,),
        "echo": (False,),
        "logprob_token_ids": ([],),
        "logprobs": (),
        "n": (1,),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_metrics": (False,),
        "return_tokens_as_token_ids": (False,),
        "stream": (False,),
        "stream_options": (),
    }

    def parse_prompts(self) -> list[NamedPrompt]:
        """Return the one prompt. Raises InvalidRequest for several."""
        prompts = super().parse_prompts()
        if prompts[0].param != "prompt":
            raise InvalidRequest(
                "prompt",
                "there is more than one",
                "Send one as text or token ids, or use /v1/completions",
                "invalid_type",
            )
        return prompts

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidRequest."""
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens", "0 leaves no token to generate", "Give 1 or more")
        return super().sampling_params(defaults)


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: CachedTokens
) -> dict[str, Any]:
    """Count token ids. A prompt counts once for all choices; a stop token counts.

    Cached tokens are counted by tier where some were not on the device: OpenAI has no such field.
    """
    details: dict[str, Any] = {"cached_tokens": cached_tokens.total}
    if cached_tokens.host or cached_tokens.disk:
        device, host, disk, _ = cached_tokens
        details["cached_tokens_by_tier"] = {"device": device, "host": host, "disk": disk}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def encode_last_chunk(chunk_head: str, fields: dict[str, Any]) -> list[str]:
    """Return the JSON of a chunk without choices that has these fields, or nothing without any.

    chunk_head   JSON of all chunks, up to their first choice
    """
    return [f"{chunk_head}],{_compact_json(fields)[1:]}"] if fields else []


class CompletionResponse:
    """The response of one call of /v1/completions, whole or in chunks.

    requests   one per prompt, in order
    """

    def __init__(
        self,
        request_body: CompletionRequest,
        prompts: Sequence[NamedPrompt],
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        head: Mapping[str, object],
    ) -> None:
        self.requests = requests
        self._request_body = request_body
        self._tokenizer = tokenizer
        self._head = dict(head)
        # JSON that all chunks begin with: built once, because there is a chunk per token.
        self._chunk_head = json.dumps(self._head, separators=(",", ":"))[:-1] + ',"choices":['
        # The special ids before a text prompt have no names in the response.
        self._num_hidden_ids = [
            _count_added_ids(tokenizer, request.prompt)
            if isinstance(prompt.content, str) and request_body.add_special_tokens is not False
            else 0
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        self._echo_texts = [
            self._echo_text(p.content) if request_body.echo else "" for p in prompts
        ]
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._completion_tokens = 0
        self._timings = AnswerTimings(request_body.return_timings, request_body.return_metrics)
        self._cached_tokens = NOTHING_CACHED
        self._pending_echo = {  # text of the prompt for the first chunk of each choice
            (p, c): self._echo_texts[p]
            for p, request in enumerate(requests)
            for c in range(request.params.n)
        }
        self._choices_without_ids = set(self._pending_echo)  # prompt ids are not sent yet
        self._logprobs: dict[tuple[int, int], LegacyLogprobs] = {}
        self._prompt_logprobs = [list[TokenLogprob]() for _ in requests]  # of an echo
        self._waiting_deltas = [list[TextDelta]() for _ in requests]
        # Prompts whose logprobs have not all come.
        has_echo_logprobs = request_body.echo_logprobs is not None
        self._open_echoes = set(range(len(requests)) if has_echo_logprobs else ())

    def body(self, outputs: Sequence[RequestOutput]) -> SlicedWork[dict[str, Any]]:
        """Build the whole body, in slices."""
        choices: list[dict[str, object]] = []
        for p, output in enumerate(outputs):
            self._cached_tokens = self._cached_tokens.plus(output.cached_tokens)
            for choice in output.choices:
                logprobs = yield from self._build_logprobs(p, output, choice.logprobs)
                prompt_logprobs = None
                if self._request_body.prompt_logprobs is not None:
                    prompt_logprobs = yield from build_prompt_logprobs(
                        output.prompt_logprobs, self._tokenizer
                    )
                returns_ids = self._request_body.return_token_ids
                choices.append(
                    {
                        "index": len(choices),
                        "text": self._echo_texts[p] + choice.text,
                        "logprobs": logprobs,
                        "finish_reason": choice.finish_reason,
                        "prompt_logprobs": prompt_logprobs,
                        "prompt_token_ids": output.prompt_token_ids if returns_ids else None,
                        "token_ids": choice.token_ids if returns_ids else None,
                        **end_fields(choice, find_violation(choice)),
                    }
                )
                self._completion_tokens += len(choice.token_ids)
                self._timings.add(choice.timings)
                yield 1
        times = self._timings_fields() | self._timings.metrics(self._completion_tokens)
        return {**self._head, "choices": choices, "usage": self.usage(), **times}

    def chunks(self, p: int, delta: TextDelta) -> Iterator[str]:
        """Yield the JSON of each event for a delta of prompt `p`.

        Deltas wait until the logprobs of the whole echoed prompt, if requested, have come, or until
        no more come: a pause may abort the request within its prompt.
        """
        prompt_logprobs, waiting = self._prompt_logprobs[p], self._waiting_deltas[p]
        prompt_logprobs += delta.prompt_logprobs
        waiting.append(delta)
        is_whole = len(prompt_logprobs) >= len(self.requests[p].prompt) - 1
        if is_whole or (delta.choice == 0 and delta.finish_reason is not None):
            self._open_echoes.discard(p)
        if p in self._open_echoes:
            return
        self._waiting_deltas[p] = []
        for each in waiting:
            yield from self._delta_chunks(p, each)

    def _delta_chunks(self, p: int, delta: TextDelta) -> Iterator[str]:
        """Yield the chunks of a delta, of which the first of each choice has the echo."""
        key = p, delta.choice
        text = self._pending_echo.pop(key, "")
        block = self._logprobs.get(key)
        if block is None and self._request_body.logprobs is not None:
            block = self._logprobs[key] = self._create_logprobs(p)
            if self._request_body.echo:
                block.add_first(self.requests[p].prompt[0])
                for batch in split_scores(self._prompt_logprobs[p]):
                    block.add(batch)
                    yield self._chunk(p, delta.choice, text, block)
                    text = ""
            block.restart(len(self._echo_texts[p]), self.requests[p].previous_token)
        if block is not None:
            block.add(delta.logprobs)
        self._completion_tokens += len(delta.token_ids)
        self._cached_tokens = self._cached_tokens.plus(delta.cached_tokens)
        self._timings.add(delta.timings)
        end = encode_end(delta.finish_reason, delta, find_violation(delta))
        end += self._encode_ids(p, delta)
        yield self._chunk(p, delta.choice, text + delta.text, block, end)

    def _chunk(
        self, p: int, choice: int, text: str, block: LegacyLogprobs | None, end: str = "null"
    ) -> str:
        """Return the JSON of an event. `end` is the finish reason, and what follows it."""
        logprobs = "null" if block is None else _compact_json(block.take())
        index = p * self.requests[p].params.n + choice
        return (
            f'{self._chunk_head}{{"index":{index},"text":{json.dumps(text)},'
            f'"logprobs":{logprobs},"finish_reason":{end}}}]{self._usage_so_far()}}}'
        )

    def _encode_ids(self, p: int, delta: TextDelta) -> str:
        """Return the JSON members with the ids of a delta, or "" where they are not requested.

        The first of each choice has those of the prompt.
        """
        if not self._request_body.return_token_ids:
            return ""
        prompt = ""
        if (p, delta.choice) in self._choices_without_ids:
            self._choices_without_ids.remove((p, delta.choice))
            prompt = f',"prompt_token_ids":{_compact_json(list(self.requests[p].prompt))}'
        return f'{prompt},"token_ids":{_compact_json(delta.token_ids)}'

    def last_chunks(self) -> list[str]:
        """Return the JSON of the events before [DONE]: usage and timings, if they are requested."""
        fields = self._timings_fields()
        if self._request_body.includes_usage:
            metrics = self._timings.last_chunk_metrics(self._completion_tokens)
            fields = {"usage": self.usage()} | fields | metrics
        return encode_last_chunk(self._chunk_head, fields)

    def usage(self) -> dict[str, Any]:
        """Count the tokens of all prompts and of all choices so far."""
        return usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def _timings_fields(self) -> dict[str, Any]:
        num_cached = self._cached_tokens.total
        return self._timings.fields(self._prompt_tokens, num_cached, self._completion_tokens)

    def _usage_so_far(self) -> str:
        if not self._request_body.includes_usage:
            return ""
        if not self._request_body.usage_in_every_chunk:
            return ',"usage":null'
        return f',"usage":{json.dumps(self.usage(), separators=(",", ":"))}'

    def _echo_text(self, content: str | list[int]) -> str:
        return content if isinstance(content, str) else echo_text(self._tokenizer, content)

    def _create_logprobs(self, p: int) -> LegacyLogprobs:
        namer = self._request_body.token_namer(self._tokenizer)
        return LegacyLogprobs(self._tokenizer, namer, self._num_hidden_ids[p])

    def _build_logprobs(
        self, p: int, output: RequestOutput, logprobs: Sequence[TokenLogprob]
    ) -> SlicedWork[dict[str, list[Any]] | None]:
        if self._request_body.logprobs is None:
            return None
        legacy_logprobs = self._create_logprobs(p)
        if self._request_body.echo:
            legacy_logprobs.add_first(output.prompt_token_ids[0])
            yield from legacy_logprobs.add_all(output.prompt_logprobs)
        legacy_logprobs.restart(len(self._echo_texts[p]), self.requests[p].previous_token)
        yield from legacy_logprobs.add_all(logprobs)
        return legacy_logprobs.take()


def _count_added_ids(tokenizer: Tokenizer, prompt: Sequence[int]) -> int:
    """Return how many ids at the start of a text's prompt the checkpoint has added, such as BOS."""
    pairs = zip(tokenizer.encode(""), prompt, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
