"""The sequential reference: one request at a time, in ten lines that nobody can misread.

Owns the answer that everything else must give. Knows no block, batch, plan, cache or stream: each
token comes from the whole context, and a stop string is looked for in the whole text. It shares
with the engine the model's `context_logits` and the arithmetic of forge.sampling, nothing else.

    prompt ──► logits ──► adjusted ──► choose ──► token ──► ended? ──► prompt + token ──► ...
"""

from __future__ import annotations

from typing import NamedTuple

from forge.config import EngineConfig
from forge.models.hash import HashModel
from forge.request import FinishReason, Request, TokenLogprob
from forge.sampling import adjusted, choice_seed, choose, mix, token_logprob
from forge.tokenizer import Tokenizer


class Expected(NamedTuple):
    """What one choice must give when nobody aborts it.

    why   "eos", "stop id", "stop string" or "length": finer than `finish`, for counting
    """

    tokens: tuple[int, ...]
    finish: FinishReason
    why: str
    stop_token: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def expected(
    model: HashModel,
    config: EngineConfig,
    request: Request,
    choice: int = 0,
    *,
    longest: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Expected:
    """What `choice` of `request` must give.

    longest   length of the sequence at which a request without max_tokens ends
    """
    params, prompt = request.params, list(request.prompt)
    base = params.seed if params.seed is not None else mix(config.seed ^ mix(request.id))
    seed = choice_seed(base, choice)
    end_ids = () if params.ignore_eos else (model.eos_token(), *config.end_ids)
    room = params.max_tokens
    if room is None:
        assert longest is not None, "a request without max_tokens needs `longest`"
        room = longest - len(prompt)
    output: list[int] = []
    scores: list[TokenLogprob] = []
    why = None if room else "length"
    while why is None:
        logits = model.context_logits(prompt + output)
        allowed = adjusted(logits, params, prompt, output, end_ids)
        output.append(choose(allowed, params, seed, len(prompt) + len(output)))
        if params.logprobs is not None:
            scores.append(token_logprob(logits, output[-1], params.logprobs))
        why = _ending(request, output, end_ids, tokenizer)
        if why is None and len(output) == room:
            why = "length"
    by_id = why in ("eos", "stop id")
    return Expected(
        tuple(output),
        FinishReason.LENGTH if why == "length" else FinishReason.STOP,
        why,
        output[-1] if by_id else None,
        tuple(scores),
        _prompt_scores(model, request, choice),
    )


def _ending(
    request: Request, output: list[int], end_ids: tuple[int, ...], tokenizer: Tokenizer | None
) -> str | None:
    params = request.params
    if len(output) < params.min_tokens:
        return None
    if output[-1] in end_ids:
        return "eos"
    if output[-1] in params.stop_token_ids:
        return "stop id"
    if params.stop:
        assert tokenizer is not None, "stop strings need a tokenizer"
        before, text = tokenizer.decode(output[:-1]), tokenizer.decode(output)
        # One more occurrence than before: one that min_tokens has let pass does not count later.
        if any(_occurrences(text, stop) > _occurrences(before, stop) for stop in params.stop):
            return "stop string"
    return None


def _occurrences(text: str, stop: str) -> int:
    return sum(text.startswith(stop, i) for i in range(len(text)))


def _prompt_scores(model: HashModel, request: Request, choice: int) -> tuple[TokenLogprob, ...]:
    count, prompt = request.params.prompt_logprobs, request.prompt
    if count is None or choice:
        return ()
    return tuple(
        token_logprob(model.context_logits(prompt[:p]), prompt[p], count)
        for p in range(1, len(prompt))
    )
