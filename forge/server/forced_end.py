"""The text that ends a reasoning whose budget is spent: from the options, as tokens.

Owns --reasoning-config, whose keys are vLLM's. Knows no request.

    {"reasoning_end_str": "Time is up.</think>"} ──► text ──► ids, special tokens by their names
"""

from __future__ import annotations

import json
from typing import Any

from forge.errors import InvalidConfig
from forge.request import MAX_LISTED_IDS
from forge.server.reasoning import HARMONY, ReasoningFormat
from forge.tokenizer import Tokenizer

START_KEY, END_KEY = "reasoning_start_str", "reasoning_end_str"
OPTION = "reasoning_config"


def find_end_ids(
    tokenizer: Tokenizer, reasoning: ReasoningFormat | None, config: str | None
) -> tuple[int, ...]:
    """Return the tokens that end a reasoning; () where none can be ended.

    config   JSON of the option; None: the end marker alone is forced

    Raises InvalidConfig for an option that does not fit the format. Answers in channels, those of
    gpt-oss, have no end that fits at every place of their reasoning.
    """
    keys = {} if config is None else _parse_config(config)
    if reasoning is None or reasoning is HARMONY:
        if keys:
            raise InvalidConfig(
                OPTION,
                "the reasoning of this model's answers has no end that can be forced",
                "Leave it out, or give --reasoning-parser",
            )
        return ()
    start, text = keys.get(START_KEY) or reasoning.begin, keys.get(END_KEY) or reasoning.end
    if start != reasoning.begin:
        raise InvalidConfig(
            OPTION,
            f"{START_KEY} is not {reasoning.begin!r}, with which the model's format begins",
            "Leave it out, or give another --reasoning-parser",
        )
    if not text.endswith(reasoning.end) or text.count(reasoning.end) > 1:
        raise InvalidConfig(
            OPTION,
            f"{END_KEY} does not end with {reasoning.end!r}, or has it twice",
            "Write the model's end marker after the text, once",
        )
    end_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    data = b"".join(map(tokenizer.token_bytes, end_ids))
    keeps_end = data.endswith(reasoning.end.encode())
    if not keys and not keeps_end:  # nothing was requested: chats refuse a budget
        return ()
    if tokenizer.eos_token in end_ids:
        raise InvalidConfig(
            OPTION, f"{END_KEY} has the token that ends an answer", "Leave its name out"
        )
    if len(end_ids) > MAX_LISTED_IDS or not keeps_end:
        raise InvalidConfig(
            OPTION,
            f"{END_KEY} has {len(end_ids)} tokens, at most {MAX_LISTED_IDS}, or the tokenizer "
            "does not keep its end",
            "Give a shorter text",
        )
    return end_ids


def _parse_config(config: str) -> dict[str, str]:
    try:
        keys: Any = json.loads(config)
        "".join(keys.values() if isinstance(keys, dict) else ()).encode()
    except (ValueError, TypeError, RecursionError):  # also of values that are no text
        keys = None
    if not isinstance(keys, dict):
        raise InvalidConfig(
            OPTION, "it is no JSON object of texts", f'Give {{"{END_KEY}": "</think>"}}, say'
        )
    if unknown := [key for key in keys if key not in (START_KEY, END_KEY)]:
        raise InvalidConfig(
            OPTION, f"there is no key {unknown[0][:64]!r}", f"Give {START_KEY} and {END_KEY}"
        )
    return keys
