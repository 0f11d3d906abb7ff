"""EndToken: a token that ends an output, and the files that say so.

Owns the union of what the files of a checkpoint name. Knows no model and no request.

    generation_config.json   2       ┐
    config.json              2       ├─► 2 (both), 4 (the tokenizer): either one ends an output
    the tokenizer            4       ┘
    LlamaConfig's default    2       where 2 is a special token, or nothing else is named
                             9999     beyond the vocabulary: logged by name, and left out

Always true: an id that any file names ends an output. Fine-tunes change one of the files and leave
the others as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forge.models.hf.tokenizer import HFTokenizer

log = logging.getLogger("forge.start")


DEFAULT_SUFFIX = "'s default"
"""End of the origin of a token that no file names: the configuration's class does."""


class EndToken(NamedTuple):
    """Token that ends an output.

    origins   what names it: files, the tokenizer, or the default of a class
    """

    token: int
    origins: tuple[str, ...]

    @property
    def is_default(self) -> bool:
        """Return whether no file names it."""
        return all(origin.endswith(DEFAULT_SUFFIX) for origin in self.origins)


def merge_end_tokens(named: Iterable[EndToken]) -> tuple[EndToken, ...]:
    """Return each token once, in the order of its first origin, with all of its origins."""
    origins: dict[int, dict[str, None]] = {}
    for token, added in named:
        origins.setdefault(token, {}).update(dict.fromkeys(added))
    return tuple(EndToken(token, tuple(found)) for token, found in origins.items())


def parse_end_tokens(value: Any, origin: str) -> list[EndToken]:
    """Return the tokens of a field `eos_token_id`: one id, several or none."""
    items = value if isinstance(value, list | tuple) else [value]
    return [EndToken(item, (origin,)) for item in items if type(item) is int]


def complete_end_tokens(
    from_files: Sequence[EndToken], tokenizer: HFTokenizer
) -> tuple[EndToken, ...]:
    """Return the tokens that end an output: those of the files, then the tokenizer's own.

    The default of a class is that of another vocabulary, in which it may be a word: it counts where
    the tokenizer has it as a special token, and where nothing else is named.
    """
    own = parse_end_tokens(tokenizer.own_eos_token, "the tokenizer")
    is_special = tokenizer.special_token_ids.__contains__
    named = [each for each in from_files if not each.is_default or is_special(each.token)]
    return merge_end_tokens([*named, *own]) or tuple(from_files)


def usable_end_ids(ends: Iterable[EndToken], vocab_size: int) -> list[int]:
    """Return the ids below the width of the logits: no other is ever sampled."""
    return [each.token for each in ends if 0 <= each.token < vocab_size]


def log_end_tokens(ends: Sequence[EndToken], tokenizer: HFTokenizer, vocab_size: int) -> None:
    """Log which tokens end an output and what names each, and which ids can end none."""
    usable = set(usable_end_ids(ends, vocab_size))
    parts = [
        f"{token} {tokenizer.token_text(token)!r} ({', '.join(origins)})"
        for token, origins in ends
        if token in usable
    ]
    log.info("tokens that end an output: %s", ", ".join(parts) or "none")
    for token, origins in ends:
        if token not in usable:
            log.warning(
                "eos_token_id %d (%s) ends no output: the vocabulary has %d tokens",
                token,
                ", ".join(origins),
                vocab_size,
            )
