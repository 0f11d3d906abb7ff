"""Checks of what an engine is given: its config, requests, and sizes of its pools.

Owns the limits that a model, a config and a tokenizer set together. Knows no queue and no block,
so any thread may call a check.

    check_config      config  against the model
    check_request     request against the model, the config and the tokenizer
    check_pool_sizes  sizes   against the config
    count_logprobs    log probabilities of a request, for checks of several
    require_...       what a model must offer for a command

Always true: a check changes nothing, and its error names the field, the limit and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forge.config import MAX_GEOMETRY, EngineConfig
from forge.errors import InvalidConfig, InvalidRequest
from forge.request import MAX_FAST_LOGPROBS, Request, ThinkingBudget
from forge.seam import Model, executes_moves, samples_late_rows
from forge.tokenizer import Tokenizer
from forge.weights import Sleeps, UpdatesWeights

MAX_LOGPROB_ENTRIES = 2**22
"""Limit for a request with more than MAX_FAST_LOGPROBS: a server takes 3 GB for as many."""


class LogprobCount(NamedTuple):
    """Log probabilities that come with the tokens of a prompt or of its choices, at most."""

    per_token: int
    num_tokens: int

    @property
    def num_many(self) -> int:
        """All of them where each token has more than MAX_FAST_LOGPROBS, else 0."""
        return self.per_token * self.num_tokens if self.per_token > MAX_FAST_LOGPROBS else 0


def count_logprobs(
    name: str, request: Request, max_model_len: int, vocab_size: int
) -> LogprobCount:
    """Return the count of a request.

    name   logprobs: of the tokens of its choices; prompt_logprobs: of its prompt
    """
    params, prompt_len = request.params, len(request.prompt)
    per_token = min(getattr(params, name) or 0, vocab_size)
    if name == "prompt_logprobs":
        return LogprobCount(per_token, prompt_len - 1)
    room = max_model_len - prompt_len
    num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    return LogprobCount(len(params.logprob_token_ids) or per_token, params.n * num_tokens)


def check_config(config: EngineConfig, model: Model) -> None:
    """Raise InvalidConfig for a config that the model cannot serve."""
    for token in config.end_ids:
        if not 0 <= token < model.vocab_size():
            raise InvalidConfig(
                "end_ids",
                f"{token} is not below the vocabulary size {model.vocab_size()}",
                "Give ids of this model",
            )
    if config.host_tier is not None and not executes_moves(model):
        raise InvalidConfig(
            "host_tier",
            "this model has no pool of blocks in host memory",
            "Leave host_tier out, or use a model that executes moves",
        )


def check_request(
    request: Request, model: Model, config: EngineConfig, tokenizer: Tokenizer | None
) -> None:
    """Raise InvalidRequest for ids outside the vocabulary, and for what the engine lacks."""
    params, vocab_size = request.params, model.vocab_size()
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("logit_bias", tuple(token for token, _ in params.logit_bias), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    if params.stop and tokenizer is None:
        raise InvalidRequest(
            "stop", "this engine has no tokenizer", "Use stop_token_ids, or give a tokenizer"
        )
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, request, config, vocab_size)
    if params.thinking_budget is not None:
        _check_thinking_budget(params.thinking_budget, vocab_size, tokenizer)
    if params.has_masks and config.depth > 1 and not samples_late_rows(model):
        raise InvalidRequest(
            "thinking_budget" if params.structure is None else "structure",
            f"this model does not sample late rows (StepPlan.late_rows), which come with "
            f"{config.depth} plans in flight",
            "Give the model samples_late_rows(), or start with depth 1",
        )


def _check_logprobs(name: str, request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Raise InvalidRequest for more log probabilities than the engine or its memory allows."""
    num_likely = min(getattr(request.params, name) or 0, vocab_size)
    limit = vocab_size if config.max_logprobs == -1 else config.max_logprobs
    if num_likely > limit:
        raise InvalidRequest(
            name,
            f"{num_likely} is more than {limit}",
            f"Give less, or start with --max-logprobs {num_likely}",
        )
    count = count_logprobs(name, request, config.max_model_len, vocab_size)
    if count.num_many > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            name,
            f"{count.per_token} for each of {count.num_tokens} tokens are more than "
            f"{MAX_LOGPROB_ENTRIES}",
            "Request fewer tokens or fewer log probabilities",
        )


def _check_thinking_budget(
    budget: ThinkingBudget, vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Raise InvalidRequest for forced tokens that do not end the reasoning."""
    field = "thinking_budget"
    _check_ids(field, budget.end_ids, vocab_size)
    if tokenizer is None:
        raise InvalidRequest(field, "this engine has no tokenizer", "Give one, or leave it out")
    text = b"".join(map(tokenizer.token_bytes, budget.end_ids))
    if not text.endswith(budget.reasoning.end.encode()):
        raise InvalidRequest(
            field,
            f"the text of end_ids does not end with {budget.reasoning.end!r}",
            "Give the tokens of a text that does",
        )


def check_pool_sizes(
    num_blocks: int | None, num_host_blocks: int | None, config: EngineConfig
) -> None:
    """Raise InvalidConfig for sizes that no pool of this config can have. None: unchanged."""
    max_blocks = MAX_GEOMETRY["num_blocks"]
    for name, value, least in (
        ("num_blocks", num_blocks, 1),
        ("num_host_blocks", num_host_blocks, 0),
    ):
        if value is not None and (type(value) is not int or not least <= value <= max_blocks):
            raise InvalidConfig(
                name,
                f"{str(value)[:32]} is not an integer from {least} to {max_blocks}",
                "Give one",
            )
    if num_host_blocks is not None and config.host_tier is None:
        raise InvalidConfig(
            "num_host_blocks",
            "this engine has no host pool to resize",
            "Start it with kv_host_gib, or leave this out",
        )


def require_weight_updates(model: Model) -> UpdatesWeights:
    """Return the model. Raises InvalidConfig where its weights are fixed."""
    if not isinstance(model, UpdatesWeights):
        raise InvalidConfig(
            "weights", "those of this model are fixed", "Start again with the new weights"
        )
    return model


def require_sleep(model: Model, level: int) -> Sleeps:
    """Return the model. Raises InvalidConfig where it cannot sleep on this level."""
    if not isinstance(model, Sleeps):
        raise InvalidConfig("sleep", "this model cannot release its memory", "End the engine")
    check_sleep_level(level)
    return model


def check_sleep_level(level: object) -> None:
    """Raise InvalidConfig for what is no level of a sleep."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidConfig("level", f"{str(level)[:32]} is not 1 or 2", "Give 1 or 2")


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    # The ids of a range lie between its ends.
    for token in (ids[0], ids[-1]) if isinstance(ids, range) else ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequest(
                field,
                f"Token ID {token!r} is out of vocabulary: ids are below {vocab_size}",
                "Give ids of this model's vocabulary",
                "token_out_of_range",
            )
