"""The sequential reference: one request at a time, in ten plain lines.

Owns the output that everything else must give. Knows no block, batch, plan, cache or stream: each
token is computed from the whole context, and a stop string is searched in the whole text. It shares
with the engine the model's `context_logits` and the arithmetic of forge.sampling, nothing else.

    prompt ──► logits ──► adjusted ──► choose ──► token ──► ended? ──► prompt + token ──► ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from forge.config import EngineConfig
from forge.models.hash import HashModel
from forge.request import FinishReason, Request, TokenLogprob
from forge.sampling import (
    choice_seed,
    mix,
    output_logprob,
    process_logits,
    sample_token,
    token_logprob,
)
from forge.tokenizer import Tokenizer

ALPHABET = "ab é\n"
"""Likely characters in outputs of a random world's model; one of them has two bytes."""
MAX_CHARS = 5
"""Number of characters of the longest text of a language."""


class ExpectedChoice(NamedTuple):
    """Expected output of a choice that is not aborted.

    end_reason   "eos", "stop id", "stop string", "structure" or "length": finer than `finish`
    """

    tokens: tuple[int, ...]
    finish: FinishReason
    end_reason: str
    stop_token: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def compute_expected(
    model: HashModel,
    config: EngineConfig,
    request: Request,
    choice: int = 0,
    *,
    max_len: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> ExpectedChoice:
    """Return the expected output of `choice` of `request`.

    max_len   length of the sequence at which a request without max_tokens ends
    """
    params, prompt = request.params, list(request.prompt)
    base = params.seed if params.seed is not None else mix(config.seed ^ mix(request.id))
    seed = choice_seed(base, choice)
    end_ids = () if params.ignore_eos else (model.eos_token(), *config.end_ids)
    max_tokens = params.max_tokens
    if max_tokens is None:
        assert max_len is not None, "a request without max_tokens needs `max_len`"
        max_tokens = max_len - len(prompt)
    output: list[int] = []
    scores: list[TokenLogprob] = []
    end_reason = None if max_tokens else "length"
    while end_reason is None:
        logits = model.context_logits(prompt + output)
        mask = _mask(request, output, end_ids, tokenizer)
        allowed = process_logits(logits, params, prompt, output, end_ids, mask)
        output.append(sample_token(allowed, params, seed, len(prompt) + len(output)))
        if params.logprobs is not None:
            scores.append(output_logprob(logits, output[-1], params))
        end_reason = _end_reason(request, output, end_ids, tokenizer)
        if end_reason is None and len(output) == max_tokens:
            end_reason = "length"
    by_id = end_reason in ("eos", "stop id")
    return ExpectedChoice(
        tuple(output),
        FinishReason.LENGTH if end_reason == "length" else FinishReason.STOP,
        end_reason,
        output[-1] if by_id else None,
        tuple(scores),
        _prompt_scores(model, request, choice),
    )


def _end_reason(
    request: Request, output: list[int], end_ids: tuple[int, ...], tokenizer: Tokenizer | None
) -> str | None:
    params = request.params
    counts = len(output) >= params.min_tokens
    if counts and output[-1] in end_ids:
        return "eos"
    if counts and output[-1] in params.stop_token_ids:
        return "stop id"
    if counts and params.stop:
        assert tokenizer is not None, "stop strings need a tokenizer"
        before, text = tokenizer.decode(output[:-1]), tokenizer.decode(output)
        # One occurrence more than before: one before min_tokens does not count later.
        if any(_occurrences(text, stop) > _occurrences(before, stop) for stop in params.stop):
            return "stop string"
    if params.structure is not None and _continuations(request, output, tokenizer) == {b""}:
        return "structure"
    return None


@cache
def language(pattern: str) -> frozenset[bytes]:
    """Return every text of ALPHABET, up to the longest, that the pattern matches as a whole."""
    texts = ("".join(text) for n in range(MAX_CHARS + 1) for text in product(ALPHABET, repeat=n))
    return frozenset(text.encode() for text in texts if re.fullmatch(pattern, text))


def _continuations(
    request: Request, output: Sequence[int], tokenizer: Tokenizer | None
) -> set[bytes]:
    """Return the possible continuations of the output, with b"" if it may end here."""
    assert tokenizer is not None, "a structure needs a tokenizer"
    assert request.params.structure is not None
    text = b"".join(map(tokenizer.token_bytes, output))
    texts = language(request.params.structure.text)
    return {each[len(text) :] for each in texts if each.startswith(text)}


def _mask(
    request: Request, output: Sequence[int], end_ids: Iterable[int], tokenizer: Tokenizer | None
) -> bytes | None:
    """Return the mask of the possible next bytes and of the end; None without a structure."""
    if request.params.structure is None:
        return None
    rest = _continuations(request, output, tokenizer)
    ids = {each[0] + 1 for each in rest - {b""}}  # ids of the byte tokenizer
    ids |= set(end_ids) if b"" in rest else set()
    return sum(1 << token for token in ids).to_bytes(40, "little")


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
