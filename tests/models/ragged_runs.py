"""Requests over Python source, run through the engine in any batching.

Owns what a run is compared by. The text is that of this repository, cut at random places.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from forge.engine import Engine
from forge.models.embedded import EMBEDDED_CHECKPOINTS, open_embedded_model
from forge.models.loaded_model import LoadedModel
from forge.models.loader import LoadOptions, load_model
from forge.request import Request, SamplingParams, Structure, TokenLogprob

TEXT = Path(__file__).read_bytes()
PREFIX = [byte + 1 for byte in TEXT[:48]]
"""Beginning of half of all prompts: three blocks that they share."""


@dataclass(slots=True)
class Output:
    """All that a request returns."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Run(NamedTuple):
    """Outputs by request id, and how often something happened that changes the batches."""

    outputs: dict[int, Output]
    num_preemptions: int
    num_accepted_tokens: int
    num_cached_tokens: int


def draw_requests(seed: int, count: int, max_tokens: int, **fields: Any) -> list[Request]:
    """Return requests: greedy and seeded, some with penalties, filters or log probabilities."""
    rng = Random(seed)
    requests = []
    for number in range(count):
        begin = rng.randrange(len(TEXT) - 100)
        prompt = [byte + 1 for byte in TEXT[begin : begin + rng.randint(1, 90)]]
        if number % 2:
            prompt = PREFIX + prompt
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        params = replace(greedy, **fields)
        if number % 3 == 1:
            params = replace(params, temperature=0.8, top_p=0.95, seed=number)
        if number % 4 == 2:
            params = replace(params, frequency_penalty=0.4, repetition_penalty=1.1)
        if number % 5 == 3:
            params = replace(params, logprobs=2, prompt_logprobs=1)
        if number % 7 == 5:
            params = replace(params, structure=Structure.regex("[a-z_]{4}( [a-z]+)*"))
        requests.append(Request(number, tuple(prompt), params))
    return requests


def open_model(name: str, options: Mapping[str, Any]) -> AbstractContextManager[LoadedModel]:
    """Open a model. Step costs of an embedded one are not measured, so it drafts at any cost."""
    if name not in EMBEDDED_CHECKPOINTS:
        return load_model(name, options)
    parsed = LoadOptions.from_overrides(options)
    return open_embedded_model(name, parsed.draft, parsed.device, parsed.config, parsed.tiers)


def run(model: str, requests: list[Request], seed: int = 0, **options: Any) -> Run:
    """Submit the requests at random times; return what they all got."""
    rng, waiting = Random(seed), list(requests)
    outputs = {request.id: Output() for request in requests}
    num_cached = 0
    with open_model(model, options) as loaded:
        config = loaded.config
        engine = Engine(loaded.model, config, loaded.tokenizer)
        while waiting or engine.has_work:
            while waiting and rng.random() < 0.6:
                engine.submit(waiting.pop(0))
            for delta in engine.step():
                assert delta.error is None, delta.error
                output = outputs[delta.request_id]
                output.tokens += delta.tokens
                output.logprobs += delta.logprobs
                output.prompt_logprobs += delta.prompt_logprobs
                num_cached += delta.cached_tokens.total
        scheduler = engine.scheduler
        assert scheduler.pool.num_free_blocks == config.num_blocks
        return Run(outputs, scheduler.num_preemptions, scheduler.num_accepted_tokens, num_cached)
