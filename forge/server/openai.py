"""The shapes of /v1/completions and /generate: what is asked, and every byte of the answer.

Owns the request models, the legacy logprobs block and the bodies. Knows no engine and no socket.

    CompletionRequest ──► SamplingParams, one Request per prompt
    outputs of prompt p, choice c ──► choices[p * n + c]        a body, or one chunk per delta
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from forge.errors import InvalidRequest
from forge.llm import RequestOutput, TextDelta
from forge.request import Request, SamplingParams, TokenLogprob
from forge.server.fields import (
    MAX_CONTINUATIONS,
    UNSUPPORTED,
    Asked,
    Flag,
    Integer,
    NamedPrompt,
    Prompted,
)
from forge.server.refusal import shown
from forge.server.slices import TOKENS, Slices, entries_of
from forge.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""What JSON can say for minus infinity; OpenAI's servers use the same."""


class StreamOptions(BaseModel):
    """What a stream says about usage.

    include_usage            one chunk without choices before [DONE] has the usage
    continuous_usage_stats   beside that, every chunk has the usage so far
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Streamed(Asked):
    """A request whose answer may be a stream and have several choices."""

    n: Integer = None
    best_of: Integer = None
    stream: Flag = None
    stream_options: Annotated[
        StreamOptions | None,
        Field(description="an object with include_usage, continuous_usage_stats: true or false"),
    ] = None

    @property
    def includes_usage(self) -> bool:
        """A stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Every chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.includes_usage and bool(options and options.continuous_usage_stats)

    def sampling_params(self) -> SamplingParams:
        """As asked. Raises InvalidRequest also for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream is not true", "Leave it out")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise InvalidRequest(
                "stream_options",
                "continuous_usage_stats needs include_usage",
                "Set both to true, or leave both out",
            )
        self._check_best_of()
        return super().sampling_params()

    def _check_best_of(self) -> None:
        """Raise InvalidRequest unless all choices that are made are answered."""
        count = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == count:
            return
        if self.best_of < count:
            raise InvalidRequest(
                "best_of",
                f"{shown(str(self.best_of))} is less than n, {shown(str(count))}",
                "Leave it out, or give the value of n",
            )
        raise InvalidRequest(
            "best_of",
            "more choices than n are not supported",
            "Leave it out, or give the value of n",
            "unsupported_parameter",
        )


class CompletionRequest(Prompted, Streamed):
    """The body of POST /v1/completions, checked as far as that needs no engine."""

    default_max_tokens: ClassVar[int | None] = 16

    logprobs: Integer = None
    echo: Flag = None

    def without_prompt(self) -> Self:
        """The rest of it: a prompt may have millions of ids, which each collection looks at."""
        return self.model_copy(update={"prompt": None})

    def named_prompts(self) -> list[NamedPrompt]:
        """The prompts, at least one. Raises InvalidRequest."""
        prompts = super().named_prompts()
        continuations = len(prompts) * (self.n or 1)
        if continuations > MAX_CONTINUATIONS:
            raise InvalidRequest(
                "n",
                f"{len(prompts)} prompts with {self.n} choices each are {continuations}, at most "
                f"{MAX_CONTINUATIONS}",
                "Send several requests",
                "too_many_items",
            )
        return prompts

    def sampling_params(self) -> SamplingParams:
        """As asked. Raises InvalidRequest also for fields that do not go together."""
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens", "0 leaves nothing to answer", "Give 1, or use echo")
        if self.echo and self.stream and self.logprobs is not None:
            raise InvalidRequest(
                "echo",
                "a stream cannot echo with logprobs",
                "Leave out echo, logprobs or stream",
                "unsupported_parameter",
            )
        return super().sampling_params()

    @property
    def prompt_logprobs(self) -> int | None:
        """Log probabilities of the prompt are wanted, with this many alternatives."""
        return self.logprobs if self.echo else None


class GenerateRequest(Prompted):
    """The body of POST /generate."""

    default_max_tokens: ClassVar[int | None] = 32
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED,
        "echo": (False,),
        "logprobs": (),
        "n": (1,),
        "stream": (False,),
        "stream_options": (),
    }

    def named_prompts(self) -> list[NamedPrompt]:
        """The prompt. Raises InvalidRequest."""
        prompts = super().named_prompts()
        if prompts[0].param != "prompt":
            raise InvalidRequest(
                "prompt",
                "there is more than one",
                "Send one as text or token ids, or use /v1/completions",
                "invalid_type",
            )
        return prompts

    def sampling_params(self) -> SamplingParams:
        """As asked. Raises InvalidRequest."""
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens", "0 leaves nothing to answer", "Give 1 or more")
        return super().sampling_params()


class LogprobsBlock:
    """The legacy logprobs of one choice, token by token.

    tokens           each token as text
    token_logprobs   its log probability; null for the first of an echoed prompt
    top_logprobs     text and log probability of the most likely tokens and of the token itself
    text_offset      characters before the token, also those of a stop that the text leaves out

    named   ids whose names are in the text: see `echo_text`
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, named: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._named = named
        self._detokenizer = tokenizer.detokenizer()
        self._offset = offset
        self._block = self._empty()

    def add_first(self, token: int) -> None:
        """The first token of an echoed prompt: nothing comes before it."""
        self._put(token, None, None)

    def add(self, scores: Sequence[TokenLogprob]) -> None:
        """The next tokens."""
        text_of = self._tokenizer.token_text
        for token, logprob, top in scores:
            logprob = max(logprob, LOWEST_LOGPROB)
            alternatives: dict[str, float] = {}
            for other, score in top:
                alternatives.setdefault(text_of(other), max(score, LOWEST_LOGPROB))
            alternatives.setdefault(text_of(token), logprob)
            self._put(token, logprob, alternatives)

    def add_all(self, scores: Sequence[TokenLogprob]) -> Slices[None]:
        """The next tokens, however many."""
        for start in range(0, len(scores), TOKENS):
            part = scores[start : start + TOKENS]
            self.add(part)
            yield entries_of((), part)

    def restart(self, offset: int) -> None:
        """What follows is decoded afresh, `offset` characters into the text."""
        self._detokenizer = self._tokenizer.detokenizer()
        self._offset = offset
        self._named = ()

    def taken(self) -> dict[str, list[Any]]:
        """What was added since this was called before."""
        block, self._block = self._block, self._empty()
        return block

    def _put(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        block, name = self._block, self._tokenizer.token_text(token)
        if token in self._named:  # no character goes across it
            self._offset += len(self._detokenizer.flush())
            self._detokenizer = self._tokenizer.detokenizer()
        block["tokens"].append(name)
        block["token_logprobs"].append(logprob)
        block["top_logprobs"].append(top)
        block["text_offset"].append(self._offset)
        self._offset += len(name if token in self._named else self._detokenizer.push(token))

    @staticmethod
    def _empty() -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def echo_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of a prompt of token ids, in which special ids have their names.

    `skip_special_tokens` is about outputs: vLLM echoes a prompt in the same way.
    """
    parts = groupby(ids, tokenizer.special_ids.__contains__)
    return "".join(
        "".join(map(tokenizer.token_text, part)) if is_special else tokenizer.decode(part)
        for is_special, part in parts
    )


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Counts of token ids. A prompt counts once, whatever n is; a stop token counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Completion:
    """One call of /v1/completions: the answer, whole or in chunks.

    requests   one per prompt, in order
    """

    def __init__(
        self,
        asked: CompletionRequest,
        prompts: Sequence[NamedPrompt],
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        head: Mapping[str, object],
    ) -> None:
        self.requests = requests
        self._asked = asked
        self._tokenizer = tokenizer
        self._head = dict(head)
        # Of every chunk but what differs: built once, for there is a chunk per token.
        self._chunk_head = json.dumps(self._head, separators=(",", ":"))[:-1] + ',"choices":['
        # Of a prompt that is text, the ids around it have no names in the answer.
        self._named = [
            tokenizer.special_ids if isinstance(p.content, list) else () for p in prompts
        ]
        self._echoed = [self._text(p.content) if asked.echo else "" for p in prompts]
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._completion_tokens = 0
        self._unsaid = {  # prompts that the first chunk of a choice still has to say
            (p, c): self._echoed[p]
            for p, request in enumerate(requests)
            for c in range(request.params.n)
        }
        self._blocks: dict[tuple[int, int], LogprobsBlock] = {}

    def body(self, outputs: Sequence[RequestOutput]) -> Slices[dict[str, Any]]:
        """The whole answer."""
        choices: list[dict[str, object]] = []
        for p, output in enumerate(outputs):
            for choice in output.choices:
                logprobs = yield from self._whole_logprobs(p, output, choice.logprobs)
                choices.append(
                    {
                        "index": len(choices),
                        "text": self._echoed[p] + choice.text,
                        "logprobs": logprobs,
                        "finish_reason": choice.finish_reason,
                    }
                )
                self._completion_tokens += len(choice.token_ids)
                yield 1
        return {**self._head, "choices": choices, "usage": self.usage()}

    def chunks(self, p: int, delta: TextDelta) -> tuple[str, ...]:
        """The JSON of each event that says what a choice of prompt `p` gained."""
        text = self._unsaid.pop((p, delta.choice), "") + delta.text
        logprobs = "null"
        if self._asked.logprobs is not None:
            block = self._blocks.get((p, delta.choice))
            if block is None:
                block = self._blocks[p, delta.choice] = LogprobsBlock(self._tokenizer, 0)
            block.add(delta.logprobs)
            logprobs = json.dumps(block.taken(), separators=(",", ":"), allow_nan=False)
        self._completion_tokens += len(delta.token_ids)
        index = p * self.requests[p].params.n + delta.choice
        finish = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        chunk = (
            f'{self._chunk_head}{{"index":{index},"text":{json.dumps(text)},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}]{self._usage_so_far()}}}'
        )
        return (chunk,)

    def last_chunks(self) -> list[str]:
        """The JSON of what is said before [DONE]: the usage, where asked."""
        if not self._asked.includes_usage:
            return []
        return [f'{self._chunk_head}],"usage":{json.dumps(self.usage(), separators=(",", ":"))}}}']

    def usage(self) -> dict[str, int]:
        """Tokens of all prompts and, so far, of all choices."""
        return usage(self._prompt_tokens, self._completion_tokens)

    def _usage_so_far(self) -> str:
        if not self._asked.includes_usage:
            return ""
        if not self._asked.counts_usage:
            return ',"usage":null'
        return f',"usage":{json.dumps(self.usage(), separators=(",", ":"))}'

    def _text(self, content: str | list[int]) -> str:
        return content if isinstance(content, str) else echo_text(self._tokenizer, content)

    def _whole_logprobs(
        self, p: int, output: RequestOutput, scores: Sequence[TokenLogprob]
    ) -> Slices[dict[str, list[Any]] | None]:
        if self._asked.logprobs is None:
            return None
        block = LogprobsBlock(self._tokenizer, 0, self._named[p])
        if self._asked.echo:
            block.add_first(output.prompt_token_ids[0])
            yield from block.add_all(output.prompt_logprobs)
        block.restart(len(self._echoed[p]))
        yield from block.add_all(scores)
        return block.taken()
