"""LegacyLogprobs: the logprobs of /v1/completions, in the older of OpenAI's two shapes.

Owns the lists and the offsets of their texts. Knows no request and no response.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

from forge.request import TokenLogprob
from forge.server.time_slicing import (
    ENTRIES_PER_SLICE,
    SlicedWork,
    iter_batches,
    num_entries,
    split_scores,
)
from forge.tokenizer import Tokenizer

TokenNamer = Callable[[int], str]
"""Function that returns a token as the logprobs of a response show it."""

MIN_LOGPROB = -9999.0
"""Minus infinity in JSON; OpenAI's servers use the same value."""


class LegacyLogprobs:
    """The legacy logprobs block of one choice, token by token.

    tokens           name of each token
    token_logprobs   its log probability; null for the first token of an echoed prompt
    top_logprobs     name and log probability of the most likely tokens and of the token itself
    text_offset      characters before the token, including those of a stop string, which is cut

    name_token   returns the name of a token
    num_hidden   tokens at the start of an echoed prompt whose names its text does not have: see
                 `echo_text`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        name_token: TokenNamer,
        num_hidden: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._name_token = name_token
        self._num_hidden = num_hidden
        self._special_ids: Collection[int] = tokenizer.special_token_ids
        self._detokenizer = tokenizer.create_detokenizer()
        self._offset = 0
        self._entries = self._new_entries()

    def add_first(self, token: int) -> None:
        """Add the first token of an echoed prompt, which has no log probability."""
        self._append(token, None, None)

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Add the next tokens."""
        for scored in logprobs:
            for _ in self._add_in_slices(scored):
                pass

    def add_all(self, logprobs: Sequence[TokenLogprob]) -> SlicedWork[None]:
        """Add any number of tokens, in slices."""
        for batch in split_scores(logprobs):
            if len(batch[0].top) > ENTRIES_PER_SLICE:
                yield from self._add_in_slices(batch[0])
            else:
                self.add(batch)
                yield num_entries((), batch)

    def _add_in_slices(self, scored: TokenLogprob) -> SlicedWork[None]:
        """Add one token, in slices."""
        name_of, logprob = self._name_token, max(scored.logprob, MIN_LOGPROB)
        alternatives = {name_of(scored.token): logprob}  # first, as in vLLM
        for others in iter_batches(scored.top, ENTRIES_PER_SLICE):
            for other, other_logprob in others:
                alternatives.setdefault(name_of(other), max(other_logprob, MIN_LOGPROB))
            yield len(others)
        self._append(scored.token, logprob, alternatives)

    def restart(self, offset: int, previous: int | None) -> None:
        """Decode the following tokens as an output that starts at character `offset`.

        previous   token before the output in its text: see Tokenizer.create_detokenizer
        """
        self._detokenizer = self._tokenizer.create_detokenizer(previous)
        self._offset = offset
        self._special_ids, self._num_hidden = (), 0

    def take(self) -> dict[str, list[Any]]:
        """Return the entries added since the previous call."""
        entries, self._entries = self._entries, self._new_entries()
        return entries

    def _append(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        entries, has_name = self._entries, token in self._special_ids
        if has_name:  # a special token ends any incomplete character
            self._offset += len(self._detokenizer.flush())
            self._detokenizer = self._tokenizer.create_detokenizer()
        entries["tokens"].append(self._name_token(token))
        entries["token_logprobs"].append(logprob)
        entries["top_logprobs"].append(top)
        entries["text_offset"].append(self._offset)
        if self._num_hidden:
            self._num_hidden -= 1
        else:
            name_or_text = self._tokenizer.token_text if has_name else self._detokenizer.push
            self._offset += len(name_or_text(token))

    @staticmethod
    def _new_entries() -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def name_by_id(token: int) -> str:
    """Return the id of a token as a name, in vLLM's form."""
    return f"token_id:{token}"


def echo_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of a prompt of token ids, with the names of its special ids.

    `skip_special_tokens` applies to outputs only: vLLM echoes a prompt in the same way.
    """
    parts = groupby(ids, tokenizer.special_token_ids.__contains__)
    return "".join(
        "".join(map(tokenizer.token_text, part)) if is_special else tokenizer.decode(part)
        for is_special, part in parts
    )
