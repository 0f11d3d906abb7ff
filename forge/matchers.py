"""Matchers: creates the matchers of an engine's outputs, and advances them before each commit.

Owns whether there were any: an engine without structures does no work for them. Knows no library.

    output of a plan ─► tokens of its matchers ─► advance_matchers, on threads ─► commit feeds each

Always true: a token that the commit may not feed is not passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from forge.errors import ForgeError, InvalidRequest
from forge.grammar_backend import GrammarBackend
from forge.request import SamplingParams, Structure
from forge.seam import StepOutput, StepPlan
from forge.sequence import GrammarMatcher, Sequence
from forge.thinking_budget import ThinkingBudgetMatcher
from forge.tokenizer import Tokenizer


class Matchers:
    """Matchers of the outputs of one engine, which owns it.

    find_backend   returns the backend; called when a structure is used
    tokenizer      None: no output has a budget of reasoning
    vocab_size     ids of the model are below it
    """

    def __init__(
        self,
        find_backend: Callable[[], GrammarBackend],
        tokenizer: Tokenizer | None,
        vocab_size: int,
    ) -> None:
        self._find_backend = find_backend
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._has_created_any = False

    def create(self, params: SamplingParams) -> GrammarMatcher | None:
        """Return the matcher of a new output, or None. Raises InvalidRequest."""
        matcher = None
        if params.structure is not None:
            matcher = self._create_structure_matcher(params.structure, not params.ignore_eos)
        if params.thinking_budget is None:
            return matcher
        assert self._tokenizer is not None, "`check_request` refuses a budget without a tokenizer"
        return ThinkingBudgetMatcher(
            params.thinking_budget, self._tokenizer.token_bytes, self._vocab_size, matcher
        )

    def _create_structure_matcher(self, structure: Structure, allow_end: bool) -> GrammarMatcher:
        self._has_created_any = True
        try:
            return self._find_backend().create_matcher(structure, allow_end=allow_end)
        except ForgeError:
            raise
        except Exception as error:  # of the library, for this request only
            raise InvalidRequest("structure", f"it failed: {error!r}", "Fix it") from error

    def advance(
        self, plan: StepPlan, output: StepOutput, sequences: Mapping[int, Sequence]
    ) -> None:
        """Let the matchers of the plan's rows do the work of their tokens, before the commit."""
        if self._has_created_any:
            pairs = list(_next_tokens(plan, output, sequences, self._vocab_size))
            if pairs:
                self._find_backend().advance_matchers(pairs)


def _next_tokens(
    plan: StepPlan, output: StepOutput, sequences: Mapping[int, Sequence], vocab_size: int
) -> Iterator[tuple[GrammarMatcher, int]]:
    """Yield each structure's matcher with the token that the commit feeds it.

    Not those of rows with drafts.
    """
    for row, result in zip(plan.rows, output.rows, strict=True):
        sequence = sequences.get(row.seq_id)
        if sequence is None or sequence.matcher is None or row.drafts or row.num_samples != 1:
            continue
        if result.error is None and len(result.tokens) == 1:
            token = result.tokens[0]
            if 0 <= token < vocab_size and token not in sequence.stop_ids:
                if (matcher := sequence.matcher.structure_matcher) is not None:
                    yield matcher, token
