"""ThinkingBudgetMatcher: ends the reasoning of an output that has spent its budget of tokens.

Owns the count of the reasoning's tokens. Knows no scheduler and no model: a forced token is a mask
with one id, so it is planned, drawn, committed and recorded like any token under a structure.

    budget of 3     <think>  why   is   it   Stop.  </think>  answer ...
    mask            any      any   any  any  one id  one id   any, or the structure's
    num_left        3        2     1    0    0       0

Always true: the mask follows from the committed tokens alone. Until the budget is spent it allows
what it would allow without a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy

from forge.reasoning_counter import ReasoningCounter
from forge.request import ThinkingBudget
from forge.sequence import GrammarMatcher


class _Progress:
    """Part of an output: what its reasoning has spent, and how much of the forced end it has.

    num_left     tokens that the reasoning may still have
    num_forced   forced tokens so far. The last of them closes the reasoning, so that the rest of
                 `end_ids` is never empty where one is due
    """

    def __init__(self, budget: ThinkingBudget, token_bytes: Callable[[int], bytes]) -> None:
        begin, end = budget.reasoning
        self.num_left = budget.num_tokens
        self.num_forced = 0
        self._end_ids = budget.end_ids
        self._counter = ReasoningCounter(begin, [end], token_bytes)

    def copy(self) -> _Progress:
        """Return a copy that goes on by itself."""
        other = copy(self)
        other._counter = copy(self._counter)
        return other

    @property
    def forced_token(self) -> int | None:
        """The one token that may come next, or None where the budget forces none."""
        if self.num_left or not self._counter.is_open:
            return None
        return self._end_ids[self.num_forced]

    def add(self, token: int) -> None:
        """Add the next token, which is the forced one where there is one."""
        if self._counter.is_open:
            if self.num_left:
                self.num_left -= 1
            else:
                self.num_forced += 1
        self._counter.add((token,))


class ThinkingBudgetMatcher(GrammarMatcher):
    """Matches an output whose reasoning has a budget, and its structure if it has one.

    token_bytes   returns the bytes of a token, or the name of a special one
    vocab_size    ids are below it
    matcher       follows the structure; None: the output has none
    mask          ids that may come next: id t is bit t % 8 of byte t // 8
    """

    def __init__(
        self,
        budget: ThinkingBudget,
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
        matcher: GrammarMatcher | None,
    ) -> None:
        self._matcher = matcher
        self._progress = _Progress(budget, token_bytes)
        self._mask_bytes = -(-vocab_size // 32) * 4
        self._every_id = ((1 << vocab_size) - 1).to_bytes(self._mask_bytes, "little")
        self.mask = self._mask_after(self._progress, None if matcher is None else matcher.mask)

    @property
    def structure_matcher(self) -> GrammarMatcher | None:
        """Matcher of the structure once the next token goes to it, or None."""
        return None if self._matcher is None else self._matcher.structure_matcher

    def feed(self, token: int) -> bool:
        """Add a token that the mask allows; return True once the output is complete.

        Raises ValueError for another token than a forced one, and what the structure's matcher
        raises.
        """
        forced_token = self._progress.forced_token
        if forced_token not in (None, token):
            raise ValueError(f"token {token} came where the budget forces {forced_token}")
        self._progress.add(token)
        matcher = self._matcher
        is_complete = matcher is not None and matcher.feed(token)
        self.mask = self._mask_after(self._progress, None if matcher is None else matcher.mask)
        return is_complete

    def check_end(self) -> None:
        """Raise where the structure is complete and does not allow the output."""
        if self._matcher is not None:
            self._matcher.check_end()

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        """Return the masks after the first 1, 2, ... drafts.

        They end before a draft that cannot follow or that completes the output.
        """
        drafts = list(drafts)
        others: list[bytes] | list[None] = [None] * len(drafts)
        if self._matcher is not None:
            others = self._matcher.draft_masks(drafts)
        progress, masks = self._progress.copy(), list[bytes]()
        for token, other in zip(drafts, others, strict=False):  # the structure may end earlier
            if progress.forced_token not in (None, token):
                break
            progress.add(token)
            masks.append(self._mask_after(progress, other))
        return masks

    def _mask_after(self, progress: _Progress, other: bytes | None) -> bytes:
        """Return the mask after these tokens.

        other   mask of the structure there; None: there is none
        """
        token = progress.forced_token
        if token is None:
            return self._every_id if other is None else other
        mask = bytearray(self._mask_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)
