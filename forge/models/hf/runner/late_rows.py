"""LateRows: rows of a queued step that are sampled when the next plan gives their masks.

Owns the logits of these rows until then, and the copy of the step's tokens to the host. Knows no
grammar: a mask is bytes of a plan.

    host      |queue plan 4|commit 3: masks|queue plan 5: masks of 4, rows of 5|wait for 4|commit 4
    device                 |==== plan 4 up to its logits ====|draw 4|==== plan 5 ====

Always true: late rows are sampled after the rows of their own step and before anything of the next
one, on the same stream. So the next step reads their tokens as it reads any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forge.models.hf.runner.model_runner import ModelRunner, StepLogits
from forge.models.hf.sampling.logprobs import PendingLogprobs
from forge.models.hf.sampling.status import STATUS_NO_MASK
from forge.seam import LateMask, Row


class LateRows:
    """Rows of one step that wait for their masks.

    logprobs   log probabilities of the step's tokens; `sample` appends those of late rows
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[Row],
        batch_rows: Sequence[int],
        late_rows: Sequence[int],
        step_logits: StepLogits,
        logprobs: Sequence[PendingLogprobs],
    ) -> None:
        """Keep what the rows of a step need to be sampled.

        rows         rows of the plan, in the order of the batch
        batch_rows   row of the batch for each row of the plan
        late_rows    rows of the plan
        """
        self.logprobs = list(logprobs)
        self._runner = runner
        self._rows = list(rows)
        self._batch_rows = batch_rows
        self._unsampled = {batch_rows[index] for index in late_rows}
        self._step_logits: StepLogits | None = step_logits
        self._wait: Callable[[], torch.Tensor] | None = None

    def sample(self, late_masks: Sequence[LateMask]) -> None:
        """Queue the samples of the rows that have a mask, and the copy of all tokens to the host.

        late_masks   by row of the plan
        Call it before anything of the next step is queued. Does not wait for the device. After
        `wait_for_tokens` there are no masks, and nothing is left to queue.
        """
        if self._step_logits is None:
            assert not late_masks, "the result of these rows was read before their masks came"
            return
        for index, mask in late_masks:
            batch_row = self._batch_rows[index]
            self._rows[batch_row] = self._rows[batch_row]._replace(masks=(mask,))
            self._unsampled.remove(batch_row)
        sampled = {self._batch_rows[index] for index, _ in late_masks}
        logits, logits_batch_rows = self._step_logits
        self._step_logits = None  # Its memory is free for the next step.
        pairs = [(i, row) for i, row in enumerate(logits_batch_rows) if row in sampled]
        self.logprobs += self._runner.finish_rows(logits, pairs, self._rows)
        self._wait = self._runner.output_buffer.copy_to_host(len(self._rows))

    def wait_for_tokens(self) -> torch.Tensor:
        """Wait for the step, and return token and status of each row of its batch, int32 [2, rows].

        A late row without a mask has STATUS_NO_MASK. It is called without `sample` where every
        sequence has ended: no plan follows.
        """
        if self._wait is None:
            self.sample(())
        assert self._wait is not None
        tokens_and_status = self._wait()
        if not self._unsampled:
            return tokens_and_status
        tokens_and_status = tokens_and_status.clone()
        tokens_and_status[1, sorted(self._unsampled)] = STATUS_NO_MASK
        return tokens_and_status
