"""LengthModel: a model of lengths only, for speed. Every token is the same one.

Owns no KV cache and no arithmetic: scheduling depends on lengths and, through the prefix cache, on
prompts. Outputs end at `max_tokens`, so requests should set `ignore_eos`. Drafts are accepted
independently with a fixed probability.
"""

from __future__ import annotations

from forge.sampling import draw_key, uniform
from forge.seam import Row, RowOutput, StepOutput, StepPlan, Verified

FILLER_TOKEN = 1
_ACCEPT_DRAW = 17
"""Purpose of the draws that accept drafts; see forge.sim.draws."""

ONE_TOKEN, NO_TOKENS = RowOutput((FILLER_TOKEN,)), RowOutput()


class CompletedStep(StepOutput):
    """A pending step that is its own output: the output is known at launch."""

    __slots__ = ()

    def result(self) -> StepOutput:
        return self


class LengthModel:
    """A Model without weights.

    acceptance   probability that a draft is accepted, given that all drafts before it were
    """

    def __init__(self, vocab_size: int = 2**31 - 1, acceptance: float = 0.0, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._seed = seed

    def vocab_size(self) -> int:
        """Return a bound above every token id of a prompt."""
        return self._vocab_size

    def num_layers(self) -> int:
        return 1

    def eos_token(self) -> int:
        """Return a token that is never sampled."""
        return 0

    def executes_moves(self) -> bool:
        """Return True: without content there is nothing to move."""
        return True

    def forward(self, plan: StepPlan) -> CompletedStep:
        """Return one token for each row that samples, and one more for each accepted draft."""
        rows = tuple(
            [ONE_TOKEN if row.num_samples == 1 else self._row_output(row) for row in plan.rows]
        )
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
