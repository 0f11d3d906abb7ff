"""HFStep: a step on its way, and what its rows turn out to have gained.

Owns the way from the device's numbers to RowOutputs. Knows the plan it belongs to and nothing of
how it was computed.

    numbers         [2, rows]    token and status of each row, in the order of the batch
    scores          one line for each sampled token that asked for log probabilities
    prompt scores   one line for each prompt position, where asked, in order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from forge.models.hf.draw import NAN
from forge.models.hf.sampler import error_text, read_logprobs
from forge.models.hf.staging import Arrival
from forge.models.hf.verdict import Evidence, Verdict
from forge.request import TokenLogprob
from forge.seam import RowOutput, StepOutput, StepPlan

INHERITED = "its input comes from a row that failed"
BAD_PROMPT = "the model's logits are not finite at a prompt position"


class Scores(NamedTuple):
    """Log probabilities on their way to the host.

    rows     row of the batch that each line belongs to
    counts   most likely tokens it asked for
    """

    rows: Sequence[int]
    counts: Sequence[int]
    arrival: Arrival


class HFStep:
    """A step the device may still be running.

    order      row of the plan for each row of the batch
    evidence   where drafts were judged, or a draft model has run
    failed     rows of the plan that ended in an error, once `result` has returned
    """

    def __init__(
        self,
        plan: StepPlan,
        order: Sequence[int],
        before: HFStep | None,
        numbers: Callable[[], torch.Tensor] | None,
        scores: Sequence[Scores],
        prompt_scores: Sequence[Scores],
        evidence: Evidence | None = None,
    ) -> None:
        self._plan = plan
        self._order = order
        self._before = before
        self._numbers = numbers
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._evidence = evidence
        self.failed: frozenset[int] = frozenset()

    def result(self) -> StepOutput:
        """Wait for this step only; what each row gained, or why it gained nothing."""
        outputs: list[RowOutput] = []
        verdict = Verdict(self._evidence) if self._evidence is not None else None
        if self._numbers is not None:
            tokens, status = self._numbers().tolist()
            broken = self._before.failed if self._before is not None else frozenset()
            self._before = None  # a chain of all steps ever would not end
            if verdict or any(status) or broken or self._scores or self._prompt_scores:
                outputs = self._with_scores(tokens, status, broken, verdict)
            else:
                outputs = self._plain(tokens)
        undrafted = verdict.undrafted if verdict is not None else ()
        return StepOutput(self._plan.step, tuple(outputs), undrafted)

    def _plain(self, tokens: list[int]) -> list[RowOutput]:
        rows = self._plan.rows
        outputs = [RowOutput()] * len(rows)
        for index, token in zip(self._order, tokens, strict=True):
            if rows[index].num_samples:
                outputs[index] = RowOutput((token,))
        return outputs

    def _with_scores(
        self,
        tokens: list[int],
        status: list[int],
        broken: frozenset[int],
        verdict: Verdict | None,
    ) -> list[RowOutput]:
        scored, prompts = _collected(self._scores), _collected(self._prompt_scores)
        outputs = [RowOutput()] * len(self._order)
        failed = set()
        for at, index in enumerate(self._order):
            row, prompt = self._plan.rows[index], prompts.get(at, ())
            error = None
            if broken and any(ref.row in broken for ref in row.refs):
                error = INHERITED
            elif prompt and any(score.logprob != score.logprob for score in prompt):
                error = BAD_PROMPT
            elif not row.drafts and (status[at] == NAN or (row.num_samples and status[at])):
                # Without a token a row fails too where its pages hold what is not finite.
                error = error_text(status[at])
            if error is not None:
                outputs[index] = RowOutput(error=error)
            elif row.drafts and verdict is not None:
                outputs[index] = verdict.output(at, row, scored.get(at, ()), prompt)
            else:
                sampled = (tokens[at],) if row.num_samples else ()
                outputs[index] = RowOutput(sampled, scored.get(at, ()), prompt)
            if outputs[index].error is not None:
                failed.add(index)
        self.failed = frozenset(failed)
        return outputs


def _collected(all_scores: Sequence[Scores]) -> dict[int, tuple[TokenLogprob, ...]]:
    """Every row's log probabilities, in the order they were computed."""
    found: dict[int, list[TokenLogprob]] = {}
    for rows, counts, arrival in all_scores:
        lines = read_logprobs(arrival.wait())
        for at, count, score in zip(rows, counts, lines, strict=True):
            found.setdefault(at, []).append(score._replace(top=score.top[:count]))
    return {at: tuple(scores) for at, scores in found.items()}
