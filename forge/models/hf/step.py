"""HFStep: a step in flight, and its rows' outputs once the device has computed them.

Owns the way from the device's numbers to RowOutputs. Knows the plan it belongs to and nothing of
how it was computed.

    tokens, status     [2, rows]   in the order of the batch
    logprobs           one entry for each sampled token whose request returns them
    prompt logprobs    one entry for each such prompt position, in order

Always true: a row whose input comes from a failed row fails too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forge.models.hf.sampling.logprobs import PendingLogprobs, read_logprobs
from forge.models.hf.sampling.status import STATUS_NAN, error_text
from forge.models.hf.speculation.acceptance import AcceptanceEvidence, DraftAcceptance
from forge.request import TokenLogprob
from forge.seam import FileAnswer, Row, RowOutput, StepOutput, StepPlan

INHERITED_ERROR = "its input comes from a row that failed"
PROMPT_LOGITS_ERROR = "the model's logits are not finite at a prompt position"


def no_answers(plan: StepPlan) -> tuple[FileAnswer, ...]:
    """Return no answers: there are no files."""
    return ()


class HFStep:
    """A step that the device may still be running.

    plan_rows         row of the plan for each row of the batch
    previous          step that samples inputs of this one, or None
    wait_for_tokens   waits for tokens and status, [2, rows]; None where the plan has no rows
    evidence          numbers that decide which drafts are accepted, or None
    file_answers      returns, for the plan, the answers of file moves that have ended
    failed_rows       rows of the plan that ended in an error, set by `result`
    """

    def __init__(
        self,
        plan: StepPlan,
        plan_rows: Sequence[int],
        previous: HFStep | None,
        wait_for_tokens: Callable[[], torch.Tensor] | None,
        logprobs: Sequence[PendingLogprobs],
        prompt_logprobs: Sequence[PendingLogprobs],
        evidence: AcceptanceEvidence | None = None,
        file_answers: Callable[[StepPlan], tuple[FileAnswer, ...]] = no_answers,
    ) -> None:
        self._plan = plan
        self._plan_rows = plan_rows
        self._previous = previous
        self._wait_for_tokens = wait_for_tokens
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._evidence = evidence
        self._file_answers = file_answers
        self.failed_rows: frozenset[int] = frozenset()

    def result(self) -> StepOutput:
        """Wait for this step alone and return each row's tokens or its error."""
        outputs: list[RowOutput] = []
        acceptance = DraftAcceptance(self._evidence) if self._evidence is not None else None
        if self._wait_for_tokens is not None:
            tokens, status = self._wait_for_tokens().tolist()
            failed_before = (
                self._previous.failed_rows if self._previous is not None else frozenset()
            )
            self._previous = None  # Each step would otherwise keep all earlier ones in memory.
            if (
                acceptance
                or any(status)
                or failed_before
                or self._logprobs
                or self._prompt_logprobs
            ):
                outputs = self._full_outputs(tokens, status, failed_before, acceptance)
            else:
                outputs = self._token_outputs(tokens)
        undrafted = acceptance.undrafted if acceptance is not None else ()
        answers = self._file_answers(self._plan)
        return StepOutput(self._plan.step, tuple(outputs), undrafted, answers)

    def _token_outputs(self, tokens: list[int]) -> list[RowOutput]:
        rows = self._plan.rows
        outputs = [RowOutput()] * len(rows)
        for index, token in zip(self._plan_rows, tokens, strict=True):
            if rows[index].num_samples:
                outputs[index] = RowOutput((token,))
        return outputs

    def _full_outputs(
        self,
        tokens: list[int],
        status: list[int],
        failed_before: frozenset[int],
        acceptance: DraftAcceptance | None,
    ) -> list[RowOutput]:
        logprobs = _logprobs_by_row(self._logprobs)
        prompt_logprobs = _logprobs_by_row(self._prompt_logprobs)
        outputs = [RowOutput()] * len(self._plan_rows)
        failed = set()
        for batch_row, index in enumerate(self._plan_rows):
            row, row_prompt_logprobs = self._plan.rows[index], prompt_logprobs.get(batch_row, ())
            error = _row_error(row, status[batch_row], failed_before, row_prompt_logprobs)
            if error is not None:
                outputs[index] = RowOutput(error=error)
            elif row.drafts and acceptance is not None:
                outputs[index] = acceptance.row_output(
                    batch_row, row, logprobs.get(batch_row, ()), row_prompt_logprobs
                )
            else:
                sampled = (tokens[batch_row],) if row.num_samples else ()
                outputs[index] = RowOutput(
                    sampled, logprobs.get(batch_row, ()), row_prompt_logprobs
                )
            if outputs[index].error is not None:
                failed.add(index)
        self.failed_rows = frozenset(failed)
        return outputs


def _row_error(
    row: Row, status: int, failed_before: frozenset[int], prompt_logprobs: Sequence[TokenLogprob]
) -> str | None:
    """Return why the row fails, or None. A row with drafts may still fail in their acceptance.

    status          status of the row on the device
    failed_before   rows of the previous plan that failed
    """
    if failed_before and any(ref.row in failed_before for ref in row.refs):
        return INHERITED_ERROR
    if any(score.logprob != score.logprob for score in prompt_logprobs):
        return PROMPT_LOGITS_ERROR
    # A row without a sample fails too if its blocks hold values that are not finite.
    if not row.drafts and (status == STATUS_NAN or (row.num_samples and status)):
        return error_text(status)
    return None


def _logprobs_by_row(pending: Sequence[PendingLogprobs]) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return the log probabilities of each row of the batch, in the order they were computed."""
    found: dict[int, list[TokenLogprob]] = {}
    for rows, num_top, host_copy in pending:
        entries = read_logprobs(host_copy.wait())
        for batch_row, count, logprob in zip(rows, num_top, entries, strict=True):
            found.setdefault(batch_row, []).append(logprob._replace(top=logprob.top[:count]))
    return {batch_row: tuple(logprobs) for batch_row, logprobs in found.items()}
