"""The expected answers of the server, computed from the embedded model's logits alone.

Owns ten lines that continue a context, and the log probability of a text. Knows no engine, cache,
batch, sampler or server, so an error in any of those is a difference from here.

    SERVER_URL          a server that any number of requests fit           ┐
    NARROW_SERVER_URL   one sequence runs, one waits, the next gets 429    ├ set by run.py
    SERVER_KEY          the key of both                                    ┘

Clients run in separate environments, where forge is imported from its sources: its core needs
nothing but the standard library. The working folder is empty, and belongs to the client.
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from forge.models.hash import HashModel
from forge.models.loader import load_model

MODEL = "hash"
URL = os.environ["SERVER_URL"]
NARROW_URL = os.environ["NARROW_SERVER_URL"]
KEY = os.environ["SERVER_KEY"]

END = 0
TOLERANCE = 1e-4
"""Tolerance of a log probability: it is sent as a decimal and may be summed in another order."""


def _open() -> HashModel:
    # Never closed: it holds nothing but memory, and the process ends soon.
    model = ExitStack().enter_context(load_model(MODEL, {})).model
    assert isinstance(model, HashModel)
    return model


_MODEL = _open()


class GreedyAnswer(NamedTuple):
    """A greedy continuation. `tokens` counts the end token, which has no text."""

    text: str
    tokens: int
    finish_reason: str


def ids(text: str) -> list[int]:
    """Return the token ids of a text: byte b is the token b + 1."""
    return [byte + 1 for byte in text.encode()]


def chat(*messages: tuple[str, str]) -> str:
    """Return the prompt that messages, each a role and a text, are rendered to."""
    return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"


def logprobs(context: Sequence[int]) -> list[float]:
    """Return the log probability of each token after the context."""
    logits = _MODEL.context_logits(context)
    largest = max(logits)
    log_sum = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - log_sum for logit in logits]


def greedy(prompt: str, max_tokens: int) -> GreedyAnswer:
    """Generate the most likely tokens up to the end token or `max_tokens`."""
    context = ids(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        scores = logprobs(context + output)
        output.append(scores.index(max(scores)))
        if output[-1] == END:
            return GreedyAnswer(_text(output[:-1]), len(output), "stop")
    return GreedyAnswer(_text(output), len(output), "length")


def _text(tokens: Sequence[int]) -> str:
    return bytes(token - 1 for token in tokens).decode()


def score_of(context: Sequence[int], continuation: Sequence[int]) -> float:
    """Return the log probability of the continuation after the context."""
    every = [*context, *continuation]
    return sum(logprobs(every[:end])[every[end]] for end in range(len(context), len(every)))


def is_near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE


def health(url: str) -> dict[str, int]:
    """Return the numbers of running and waiting sequences, and other figures of /healthz."""
    with urllib.request.urlopen(url + "/healthz", timeout=5) as answer:
        figures: dict[str, int] = json.load(answer)
    return figures


def wait_until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until the condition holds; fail after `within_s`."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not after {within_s} s"
        time.sleep(0.01)
