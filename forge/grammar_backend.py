"""GrammarBackend: what an engine needs of a library that compiles structures into token masks.

Owns the protocol, and which library serves it by default. Knows no engine.

    check(structure) ─► compile ─► create_matcher ─► advance_matchers, feed: a token at a time

Always true: a structure that `check` accepted has matchers, and `feed` gives one result whether
or not `advance_matchers` came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forge.cpu_count import num_usable_cpus
from forge.errors import InvalidRequest
from forge.feedback_queue import QueueLevel
from forge.request import Structure
from forge.sequence import GrammarMatcher
from forge.tokenizer import Tokenizer, Vocabulary


class GrammarBackend(Protocol):
    """Compiles structures and creates the matchers of outputs. Any thread may call it."""

    def vocabulary(self) -> Vocabulary:
        """Return the tokens for which structures are compiled."""
        ...

    def mark_compilable(self, structure: Structure, level: QueueLevel) -> None:
        """Let `check` accept the structure at once: another process compiled it on this level."""
        ...

    def compilable_level(self, structure: Structure) -> QueueLevel | None:
        """Return the level on which the structure was accepted, or None."""
        ...

    def check(self, structure: Structure) -> None:
        """Raise InvalidRequest unless an output can have this structure. May take seconds."""
        ...

    def compile(self, structure: Structure, level: QueueLevel | None) -> object:
        """Compile the structure in this process, and return an object that keeps it compiled.

        Raises InvalidRequest. May take seconds, within the limits of the level if that is known.
        """
        ...

    def compiled_grammar(self, structure: Structure) -> object | None:
        """Return an object that keeps the structure compiled while referenced, or None.

        None: it is not compiled. Otherwise `create_matcher` returns at once.
        """
        ...

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> GrammarMatcher:
        """Return the matcher of a new output.

        allow_end   an end id is allowed where the text is complete
        """
        ...

    def advance_matchers(self, pairs: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Do the work of the next `feed` of each matcher, which has this token, if that is faster.

        pairs   `structure_matcher` of some outputs, and the token of each

        Errors are raised by `feed`.
        """
        ...


def create_grammar_backend(
    tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]
) -> GrammarBackend:
    """Return the backend of llguidance for these tokens.

    Raises InvalidRequest where there is no tokenizer.
    """
    # llguidance is imported where a structure is used.
    from forge.mask_threads import num_mask_threads
    from forge.structured_output import LLGuidanceBackend

    if tokenizer is None:
        raise InvalidRequest("structure", "this engine has no tokenizer", "Give it one")
    num_threads = num_mask_threads(num_usable_cpus())
    return LLGuidanceBackend(tokenizer, vocab_size, end_ids, num_threads)
