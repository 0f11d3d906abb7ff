"""ReasoningMatcher: a structure that begins after the reasoning of an output.

Owns the masks of reasoning. Knows no grammar: the matcher of the structure is created where the
reasoning ends.

    output    <think>  why ...  </think>  {"city": ...}
    position  0..7     7 7 7    7..15     None
    mask      marker   any token but the ends        the structure's

    position   bytes matched of the begin marker, and in the reasoning its length and the bytes
               matched of the end marker

A token that completes the end marker has no byte after it: the structure begins with a token. An
output that may begin with the marker or with its structure is matched as both until a token
decides; reasoning that has started wins.

Always true: the mask follows from the committed tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from forge.request import Reasoning
from forge.sequence import GrammarMatcher


class ReasoningMasks:
    """Masks of one reasoning for one vocabulary, which all outputs share.

    tokens    bytes of each id; b"" for an id that reasoning never has
    end_ids   ids that end an output: none ends it before its structure

    Creation visits the vocabulary a few times: do it in a thread.
    """

    def __init__(
        self, reasoning: Reasoning, tokens: Sequence[bytes], end_ids: Collection[int]
    ) -> None:
        self._begin, self._end = reasoning.begin.encode(), reasoning.end.encode()
        self._tokens = tokens
        self._end_ids = frozenset(end_ids)
        self.start = len(self._begin)
        self.size = self.start + len(self._end)
        # Only a token with a byte after the marker's last one may not fit inside reasoning.
        last = self._end[-1:]
        longer_tokens = [t for t, data in enumerate(tokens) if last in data[:-1]]
        free = self._pack(t for t, data in enumerate(tokens) if data and t not in self._end_ids)
        first_bytes = set(self._begin)
        by_first_byte: dict[int, list[int]] = {byte: [] for byte in first_bytes}
        for token, data in enumerate(tokens):
            if data and data[0] in first_bytes:
                by_first_byte[data[0]].append(token)
        self._masks = [
            *(
                self._begin_mask(position, by_first_byte[byte])
                for position, byte in enumerate(self._begin)
            ),
            *(
                self._reasoning_mask(position, free, longer_tokens)
                for position in range(self.start, self.size)
            ),
        ]

    def mask(self, position: int) -> bytes:
        """Return the ids that may come next, as a GrammarMatcher has them."""
        return self._masks[position]

    def advance(self, position: int, token: int) -> int | None:
        """Return the position after the token, or None where it does not fit."""
        data = self._tokens[token]
        if not data or token in self._end_ids:
            return None
        if position < self.start:
            rest = self._begin[position:]
            if rest.startswith(data) and len(data) < len(rest):
                return position + len(data)
            if not data.startswith(rest):
                return None
            position, data = self.start, data[len(rest) :]
        text = self._end[: position - self.start] + data
        at = text.find(self._end)
        if at >= 0:
            return self.size if at + len(self._end) == len(text) else None
        longest = min(len(self._end) - 1, len(text))
        return self.start + next(
            length for length in range(longest, -1, -1) if text.endswith(self._end[:length])
        )

    def _begin_mask(self, position: int, candidates: Iterable[int]) -> bytes:
        """Return the mask where the output must continue the begin marker.

        candidates   ids that begin with the marker's next byte
        """
        return self._pack(t for t in candidates if self.advance(position, t) is not None)

    def _reasoning_mask(self, position: int, free: bytes, longer_tokens: Iterable[int]) -> bytes:
        """Return the mask inside reasoning: `free` without tokens that do not fit."""
        mask = bytearray(free)
        for token in longer_tokens:
            if self.advance(position, token) is None:
                mask[token >> 3] &= ~(1 << (token & 7))
        return bytes(mask)

    def _pack(self, tokens: Iterable[int]) -> bytes:
        """Return the mask that has these ids."""
        mask = bytearray(-(-len(self._tokens) // 32) * 4)
        for token in tokens:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


class ReasoningMatcher(GrammarMatcher):
    """Matches an output that may have reasoning before its structure.

    create_matcher   returns the matcher of a structure that begins
    mask             ids that may come next: id t is bit t % 8 of byte t // 8
    """

    def __init__(self, masks: ReasoningMasks, create_matcher: Callable[[], GrammarMatcher]) -> None:
        self._masks = masks
        self._create_matcher = create_matcher
        self._position: int | None = 0  # None: no reasoning can come any more
        # None: the structure has not started, and cannot start with the output
        self._matcher = create_matcher() if masks.start else None
        self.mask = self._compute_mask()

    @property
    def structure_matcher(self) -> GrammarMatcher | None:
        """Matcher of the structure once no reasoning can come any more, or None."""
        return self._matcher if self._position is None else None

    def feed(self, token: int) -> bool:
        """Add a token that the mask allows; return True once the output is complete.

        Raises ValueError for another token, and where the structure becomes too complex.
        """
        is_complete, matcher = False, self._matcher
        position = None if self._position is None else self._masks.advance(self._position, token)
        if position == self._masks.size:
            position, matcher = None, self._create_matcher()
        elif position is not None and (
            position >= self._masks.start or not _allows(matcher, token)
        ):
            matcher = None
        elif matcher is not None:
            is_complete = matcher.feed(token)
        else:
            raise ValueError(f"token {token} does not fit: it has text after a marker")
        self._position, self._matcher = position, matcher
        self.mask = self._compute_mask()
        return is_complete

    def check_end(self) -> None:
        """Raise where the structure is complete and does not allow the output."""
        if self._matcher is not None:
            self._matcher.check_end()

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        """Return the masks after the first 1, 2, ... drafts, up to one that cannot follow or ends.

        None is returned where the output may begin with either a marker or its structure.
        """
        position, matcher = self._position, self._matcher
        if position is None:
            assert matcher is not None, "an output has reasoning or a structure"
            return matcher.draft_masks(drafts)
        masks: list[bytes] = []
        if matcher is not None:
            return masks
        remaining = iter(drafts)
        for token in remaining:
            position = self._masks.advance(position, token)
            if position is None:
                break
            if position == self._masks.size:
                matcher = self._create_matcher()
                return [*masks, matcher.mask, *matcher.draft_masks(remaining)]
            masks.append(self._masks.mask(position))
        return masks

    def _compute_mask(self) -> bytes:
        masks = [] if self._position is None else [self._masks.mask(self._position)]
        if self._matcher is not None:
            masks.append(self._matcher.mask)
        if len(masks) == 1:
            return masks[0]
        union = int.from_bytes(masks[0], "little") | int.from_bytes(masks[1], "little")
        return union.to_bytes(len(masks[0]), "little")


def _allows(matcher: GrammarMatcher | None, token: int) -> bool:
    return matcher is not None and bool(matcher.mask[token >> 3] >> (token & 7) & 1)
