"""LengthModel: a model of lengths only, for speed. Every token is the same one.

Owns no pages and no arithmetic: what a scheduler does depends on lengths and, through the prefix
cache, on prompts. Outputs end at `max_tokens`, so requests should ignore the end. Drafts are
accepted with a chosen probability, each by itself.
"""

from __future__ import annotations

from forge.sampling import draw_key, uniform
from forge.seam import Row, RowOutput, StepOutput, StepPlan, Verified

FILLER_TOKEN = 1
_ACCEPT_DRAW = 17
"""Purpose of the draws that accept drafts."""

ONE_TOKEN, NO_TOKENS = RowOutput((FILLER_TOKEN,)), RowOutput()


class CompletedStep(StepOutput):
    """A step whose output is known when it is launched: it is both."""

    __slots__ = ()

    def result(self) -> StepOutput:
        """Itself."""
        return self


class LengthModel:
    """Four methods and a constant.

    acceptance   probability that a draft is accepted, given those before it were
    """

    def __init__(self, vocab_size: int = 2**31 - 1, acceptance: float = 0.0, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._seed = seed

    def vocab_size(self) -> int:
        """Every id of a prompt is below it."""
        return self._vocab_size

    def num_layers(self) -> int:
        """One."""
        return 1

    def eos_token(self) -> int:
        """Never sampled."""
        return 0

    def forward(self, plan: StepPlan) -> CompletedStep:
        """Rows that sample give one token, those with drafts one more for each accepted."""
        # By place: a third of what names cost, for every row of every step.
        rows = tuple([ONE_TOKEN if row[8] == 1 else self._row_output(row) for row in plan.rows])
        return CompletedStep(plan.step, rows)

    def _row_output(self, row: Row) -> RowOutput:
        if not row.num_samples:
            return NO_TOKENS
        key = draw_key(self._seed ^ (row.seq_id << 20), row.start, _ACCEPT_DRAW)
        accepted = 0
        while accepted < len(row.drafts) and uniform(key, accepted) < self._acceptance:
            accepted += 1
        num_verified = min(accepted + 1, len(row.drafts))
        return RowOutput(
            (FILLER_TOKEN,) * (accepted + 1), verified=(Verified(FILLER_TOKEN),) * num_verified
        )
