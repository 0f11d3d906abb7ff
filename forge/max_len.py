"""max_len: the length at which a request ends, or why it can never finish.

Knows only geometry: no queue or block. So any thread may call `max_len`.

    prompt_len                             max_len        min(max_model_len, positions + 1)
    [ prompt ...... | output .............. ]                    |
                      max_tokens, or None: as long as fits ──────┘
"""

from __future__ import annotations

from forge.config import EngineConfig
from forge.errors import ContextTooLong, NeverFits
from forge.request import Request
from forge.sequence import Sequence


def max_len(request: Request, config: EngineConfig, num_blocks: int) -> int:
    """Return the length at which the request ends, prompt included: proof that it can finish alone.

    Raises ContextTooLong or NeverFits.
    """
    prompt_len, max_tokens = len(request.prompt), request.params.max_tokens
    # Without a limit the output is as long as fits, which must be `min_tokens` at least.
    limit_name = "min_tokens" if max_tokens is None else "max_tokens"
    num_positions = num_blocks * config.block_size
    min_output = max(1, request.params.min_tokens) if max_tokens is None else max_tokens
    min_len = prompt_len + min_output
    if min_len > config.max_model_len:
        # Clients read these words, OpenAI's and then SGLang's, and not the code.
        cause = ""
        if prompt_len > config.max_model_len:
            cause = ", the prompt alone is longer than the model's context length"
        raise ContextTooLong(
            "prompt" if prompt_len >= config.max_model_len else limit_name,
            f"Input tokens exceed the configured limit of {config.max_model_len} tokens: "
            f"{prompt_len} prompt tokens + {min_output} output tokens{cause}",
            f"Shorten the request, or start with --max-model-len {min_len} "
            "if the model takes as many",
        )
    # The last output token is never fed back, so it takes no position.
    if max(prompt_len, min_len - 1) > num_positions:
        blocks = -(-max(prompt_len, min_len - 1) // config.block_size)
        raise NeverFits(
            "prompt" if prompt_len > num_positions else limit_name,
            f"{prompt_len} prompt tokens + {min_output} output tokens need {blocks} "
            f"blocks, the cache has {num_blocks} of {config.block_size}",
            f"Shorten the request or start with --num-blocks {blocks}",
        )
    return min(config.max_model_len, num_positions + 1) if max_tokens is None else min_len


def check_fits(sequence: Sequence, block_size: int, num_blocks: int) -> None:
    """Raise NeverFits if the sequence could not finish alone in a pool of `num_blocks`."""
    num_positions = max(sequence.max_len - 1, len(sequence.tokens))
    needed = -(-num_positions // block_size)
    if needed > num_blocks:
        raise NeverFits(
            "num_blocks",
            f"request {sequence.request.id} needs {needed} blocks, {num_blocks} were given",
            f"Give {needed} or more, or abort the request",
        )
