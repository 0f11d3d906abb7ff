"""Drafts of a draft model for one step of the target, kept on the device.

Owns how a `Draft` of the plan is found among them. Knows no acceptance rule.

    plan.drafts         0: rows A B C     1: rows A C     2: rows C     2 was not run: it failed
    tokens_and_status   0: [ .. ]         1: [ .. ]                     [2, plans, slots]
    distributions       what each draft was sampled from, where rejection reads it

Always true: the host knows where each draft lies and, until the step ends, not which token it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.buffers import int64_array, upload
from forge.models.hf.sampling.sampler import DraftDistribution
from forge.models.hf.sampling.status import STATUS_NAN, STATUS_OK
from forge.seam import Draft, StepPlan


class DraftTokens(NamedTuple):
    """Drafts for one plan of the target.

    plans               plans of the draft model, in order
    batch_rows          for each plan that was run: row of the batch for each row of the plan
    tokens_and_status   [2, plans, slots] int32; tokens and status, in the order of each batch
    distributions       [n, V] float64 each; distributions that drafts were sampled from, where
                        rejection reads them
    distribution_rows   (plan, row of its batch) -> (index into `distributions`, row of that tensor)
    """

    plans: Sequence[StepPlan]
    batch_rows: Sequence[Sequence[int]]
    tokens_and_status: Tensor
    distributions: Sequence[Tensor]
    distribution_rows: Mapping[tuple[int, int], tuple[int, int]]

    @property
    def host_part(self) -> Tensor:
        """Tokens and status of the plans that were run, [2, plans run, slots], for `HostDrafts`."""
        return self.tokens_and_status[:, : len(self.batch_rows)]

    def without_distributions(self) -> DraftTokens:
        """Return the drafts without distributions, so that their memory is freed after one use."""
        return self._replace(distributions=(), distribution_rows={})

    def was_run(self, draft: Draft) -> bool:
        """Return whether the draft is a known token, or of a plan that the draft model has run."""
        return isinstance(draft, int) or draft.plan < len(self.batch_rows)

    def gather_q(self, drafts: Sequence[Draft], tokens: Tensor, vocab_size: int) -> Tensor:
        """Return q, the distribution that each draft was sampled from, float64 [n, vocab_size].

        A draft whose token the plan names has all its mass on that token.
        tokens   [n] int64; the drafts, on the device
        """
        q = torch.zeros(len(drafts), vocab_size, dtype=torch.float64, device=tokens.device)
        known_rows = [index for index, draft in enumerate(drafts) if isinstance(draft, int)]
        if known_rows:
            (index,) = upload(tokens.device, int64_array(known_rows))
            q.view(-1).index_fill_(0, index * vocab_size + tokens.index_select(0, index), 1.0)
        rows_by_tensor: dict[int, tuple[list[int], list[int]]] = {}
        for index, draft in enumerate(drafts):
            if not isinstance(draft, int):
                tensor_index, tensor_row = self.distribution_rows[
                    draft.plan, self.batch_rows[draft.plan][draft.row]
                ]
                tensor_rows, q_rows = rows_by_tensor.setdefault(tensor_index, ([], []))
                tensor_rows.append(tensor_row)
                q_rows.append(index)
        for tensor_index, (tensor_rows, q_rows) in rows_by_tensor.items():
            tensor_row_index, q_row_index = upload(
                tokens.device, int64_array(tensor_rows), int64_array(q_rows)
            )
            q.index_copy_(
                0, q_row_index, self.distributions[tensor_index].index_select(0, tensor_row_index)
            )
        return q

    def is_valid(self, drafts: Sequence[Draft]) -> Tensor:
        """Return a mask of drafts that have a token, bool [n] on the device."""
        device, slots = self.tokens_and_status.device, self.tokens_and_status.shape[2]
        valid = torch.ones(len(drafts), dtype=torch.bool, device=device)
        drawn_rows = [
            (index, draft.plan * slots + self.batch_rows[draft.plan][draft.row])
            for index, draft in enumerate(drafts)
            if not isinstance(draft, int)
        ]
        if drawn_rows:
            index, cells = upload(
                device, *(int64_array(column) for column in zip(*drawn_rows, strict=True))
            )
            valid.index_copy_(
                0, index, self.tokens_and_status[1].view(-1).index_select(0, cells) == STATUS_OK
            )
        return valid


NO_DRAFT_TOKENS = DraftTokens((), (), torch.zeros(2, 0, 0, dtype=torch.int32), (), {})


class DraftPlanOutput(NamedTuple):
    """Output of one plan of the draft model.

    batch_rows          row of the batch for each row of the plan
    tokens_and_status   [2, slots] int32 on the device, in the order of the batch
    distributions       distributions that rows sampled from, where rejection reads them
    """

    batch_rows: Sequence[int]
    tokens_and_status: Tensor
    distributions: Sequence[DraftDistribution]


class DraftCollector:
    """Collector of the draft model's outputs, plan by plan. Owned by one `HFModel.forward`.

    tokens_and_status   [2, plans, slots] int32 on the device, overwritten
    """

    def __init__(self, plans: Sequence[StepPlan], tokens_and_status: Tensor) -> None:
        self._plans = plans
        self._tokens_and_status = tokens_and_status
        self._batch_rows: list[Sequence[int]] = []
        self._distributions: list[Tensor] = []
        self._distribution_rows: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, output: DraftPlanOutput) -> None:
        """Add the output of the draft model's next plan. Its tokens are copied on the device."""
        plan = len(self._batch_rows)
        self._tokens_and_status[:, plan].copy_(output.tokens_and_status)
        self._batch_rows.append(output.batch_rows)
        for distribution in output.distributions:
            for tensor_row, row in enumerate(distribution.rows):
                self._distribution_rows[plan, row] = (len(self._distributions), tensor_row)
            self._distributions.append(distribution.probs)

    def draft_tokens(self) -> DraftTokens:
        """Return the drafts of the plans added so far."""
        return DraftTokens(
            self._plans,
            self._batch_rows,
            self._tokens_and_status,
            self._distributions,
            self._distribution_rows,
        )


class HostDrafts:
    """Drafts of a plan on the host.

    tokens_and_status   `DraftTokens.host_part` as nested lists
    """

    def __init__(
        self, draft_tokens: DraftTokens, tokens_and_status: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        self._plans = draft_tokens.plans
        self._batch_rows = draft_tokens.batch_rows
        self._tokens, self._status = tokens_and_status

    def valid_tokens(self, drafts: Sequence[Draft]) -> list[int]:
        """Return the tokens of the drafts before the first that failed."""
        found = []
        for draft in drafts:
            if isinstance(draft, int):
                found.append(draft)
                continue
            plan, row = draft
            if plan >= len(self._batch_rows):
                break
            batch_row = self._batch_rows[plan][row]
            if self._status[plan][batch_row] != STATUS_OK:
                break
            found.append(self._tokens[plan][batch_row])
        return found

    @property
    def undrafted(self) -> tuple[int, ...]:
        """Ids of sequences for which the draft model failed, each once."""
        failed: list[int] = []
        for index, plan in enumerate(self._plans):
            if index >= len(self._batch_rows):
                failed += [row.seq_id for row in plan.rows]
                continue
            status = self._status[index]
            if not any(status):  # All are STATUS_OK: the common case.
                continue
            for row, batch_row in zip(plan.rows, self._batch_rows[index], strict=True):
                if status[batch_row] == STATUS_NAN or (
                    row.num_samples and status[batch_row] != STATUS_OK
                ):
                    failed.append(row.seq_id)
        return tuple(dict.fromkeys(failed))
