"""Verification on the device: sample at every position where a draft may be accepted.

Owns which positions of a batch need logits and what is sampled at each. Knows no acceptance rule:
it copies numbers to the host, where forge.models.hf.speculation.acceptance decides.

    row           x  d1 d2     inputs; d1 and d2 are drafts
    logits rows   0  1  2      one after each input that a token may follow
    to the host   t0 t1 t2     coupled: the target's own samples. Rejection: p, q and a residual
                               sample for each draft, and the sample after the last draft

A logits row is the logits at one position. Rows without drafts have one each in the same step, so
logits are computed once.
Always true: nothing here waits for the device.
Speculative decoding: Leviathan et al. 2023.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from forge.models.hf.buffers import HostCopy, Int32Array
from forge.models.hf.runner.input_batch import InputBatch
from forge.models.hf.runner.model_runner import ForwardGraphs, ModelRunner, StepLogits
from forge.models.hf.runner.token_logprobs import ScoredToken, compute_token_logprobs
from forge.models.hf.sampling.logprobs import PendingLogprobs
from forge.models.hf.speculation.acceptance import NO_LOGITS_ROWS, AcceptanceEvidence, LogitsRows
from forge.models.hf.speculation.drafts import DraftTokens
from forge.models.hf.speculation.rejection import NUM_FIELDS, compute_rejection_inputs
from forge.seam import Bind, Row


class VerifiedBatch(NamedTuple):
    """Results of a batch with drafts, on their way to the host, and its logits."""

    logprobs: list[PendingLogprobs]
    prompt_logprobs: list[PendingLogprobs]
    step_logits: StepLogits
    evidence: AcceptanceEvidence


def build_logits_rows(
    batch: InputBatch, rows: Sequence[Row], binds: Mapping[int, Bind], draft_tokens: DraftTokens
) -> LogitsRows:
    """Return the positions of the batch that need logits, rows without drafts first.

    rows    rows of the plan, in the order of the batch
    binds   bind of each row in `batch.rows_with_drafts`, by row of the batch
    """
    undrafted_rows = [
        batch_row for batch_row, row in enumerate(rows) if row.num_samples and not row.drafts
    ]
    num_logits = [1] * len(undrafted_rows) + [
        len(rows[batch_row].drafts) + 1 for batch_row in batch.rows_with_drafts
    ]
    num_logits_array: Int32Array = np.array(num_logits, np.int32)
    logits_row_ends = np.cumsum(num_logits_array, dtype=np.int32)
    batch_rows: Int32Array = np.repeat(
        np.array(undrafted_rows + batch.rows_with_drafts, np.int32), num_logits_array
    )
    # Positions of the row after the one that the logits row belongs to.
    positions_after = np.repeat(logits_row_ends, num_logits_array) - np.arange(
        1, len(batch_rows) + 1, dtype=np.int32
    )
    first_logits_row = dict(
        zip(
            batch.rows_with_drafts,
            (logits_row_ends - num_logits_array)[len(undrafted_rows) :].tolist(),
            strict=True,
        )
    )
    rejection_drafts = {
        logits_row: draft
        for batch_row, first in first_logits_row.items()
        if binds[batch_row].uses_rejection
        for logits_row, draft in enumerate(rows[batch_row].drafts, first)
        if draft_tokens.was_run(draft)
    }
    return LogitsRows(
        batch_rows.tolist(),
        batch.slots[batch_rows],
        (batch.starts + batch.query_lens)[batch_rows] - positions_after,
        (batch.query_starts + batch.query_lens)[batch_rows] - positions_after - 1,
        len(undrafted_rows),
        first_logits_row,
        rejection_drafts,
    )


def _single_token_rows(rows: Sequence[Row], logits_rows: LogitsRows) -> list[Row]:
    """Return a row of one token for each logits row, which ends at the same position.

    The sampler reads its slot, its end and its mask, as if the tokens were decoded one by one.
    """
    single_rows = []
    for batch_row, end in zip(logits_rows.batch_rows, logits_rows.ends.tolist(), strict=True):
        row = rows[batch_row]
        masks = row.masks
        if masks:
            sample_index = end - row.end + len(row.drafts)
            masks = masks[sample_index : sample_index + 1]
        single_rows.append(Row(row.seq_id, row.epoch, row.slot, end - 1, (0,), masks=masks))
    return single_rows


def execute_and_verify(
    runner: ModelRunner,
    batch: InputBatch,
    rows: Sequence[Row],
    graphs: ForwardGraphs | None,
    draft_tokens: DraftTokens,
    late_rows: Collection[int] = (),
) -> VerifiedBatch:
    """Run rows of any length, some with drafts, and queue what the host needs to accept drafts.

    rows           rows of the plan, in the order of the batch
    graphs         captured graphs, or None to run without
    draft_tokens   drafts of the draft model, on the device
    late_rows      rows of the batch that are sampled later: see late_rows.py

    Tokens and status of rows without drafts are in `runner.output_buffer`.
    """
    sampler, num_rows = runner.sampler, len(rows)
    binds = {at: sampler.slot_bind(rows[at].slot) for at in batch.rows_with_drafts}
    logits_rows = build_logits_rows(batch, rows, binds, draft_tokens)
    prompt_logprob_rows = runner.find_prompt_logprob_rows(batch, rows)
    last_tokens = batch.query_starts + batch.query_lens - 1
    logits_indices = np.concatenate(
        [last_tokens, logits_rows.token_indices, *(s.token_indices for s in prompt_logprob_rows)],
        dtype=np.int32,
    )
    extra_arrays = (logits_rows.slots, logits_rows.ends, logits_rows.token_indices)
    flat_drafts = (
        draft_tokens.tokens_and_status[0].view(-1) if len(batch.draft_token_indices) else None
    )
    output = runner.forward_batch(batch, rows, graphs, logits_indices, extra_arrays, flat_drafts)
    runner.update_penalties(rows, output.input_ids)
    first_prompt_logits = num_rows + len(logits_rows.batch_rows)
    prompt_logprobs = runner.compute_prompt_logprobs(
        prompt_logprob_rows, output.hidden[first_prompt_logits:]
    )
    logits = runner.decoder.compute_logits(output.hidden[num_rows:first_prompt_logits])
    sampled = torch.zeros((2, len(logits_rows.batch_rows)), dtype=torch.int32, device=logits.device)
    sampler.sample_slots(
        logits, output.extra_arrays[0], output.extra_arrays[1], sampled[0], sampled[1]
    )
    evidence = torch.zeros(
        (len(logits_rows.batch_rows), NUM_FIELDS), dtype=torch.float64, device=logits.device
    )
    single_rows = (
        _single_token_rows(rows, logits_rows)
        if sampler.adjusted_slots or sampler.logprob_slots or logits_rows.rejection_drafts
        else []
    )
    _sample_adjusted(runner, logits, logits_rows, single_rows, sampled, late_rows)
    evidence[:, :2] = sampled.t()
    logprobs: list[PendingLogprobs] = []
    if single_rows:
        next_token_indices = (output.extra_arrays[2].long() + 1).clamp_(
            max=len(output.input_ids) - 1
        )
        next_tokens = output.input_ids.index_select(0, next_token_indices).long()
        compute_rejection_inputs(
            sampler,
            logits,
            single_rows,
            logits_rows.rejection_drafts,
            next_tokens,
            draft_tokens,
            evidence,
        )
        logprobs = _compute_logprobs(runner, logits, logits_rows, next_tokens, evidence, late_rows)
    runner.reset_outputs(output.hidden[:num_rows])
    if logits_rows.num_undrafted:
        runner.output_buffer.sampled[
            :, runner.to_device(logits_rows.batch_rows[: logits_rows.num_undrafted])
        ] = sampled[:, : logits_rows.num_undrafted]
    host_numbers = torch.cat(
        (
            evidence[logits_rows.num_undrafted :].reshape(-1),
            draft_tokens.host_part.reshape(-1).double(),
        )
    )
    return VerifiedBatch(
        logprobs,
        prompt_logprobs,
        StepLogits(logits, logits_rows.batch_rows),
        AcceptanceEvidence(
            logits_rows, binds, draft_tokens.without_distributions(), HostCopy(host_numbers)
        ),
    )


def draft_only_evidence(draft_tokens: DraftTokens) -> AcceptanceEvidence:
    """Return the evidence of a step without drafts: the draft model's tokens and status."""
    return AcceptanceEvidence(
        NO_LOGITS_ROWS,
        {},
        draft_tokens.without_distributions(),
        HostCopy(draft_tokens.host_part.reshape(-1).double()),
    )


def _sample_adjusted(
    runner: ModelRunner,
    logits: torch.Tensor,
    logits_rows: LogitsRows,
    single_rows: Sequence[Row],
    sampled: torch.Tensor,
    late_rows: Collection[int],
) -> None:
    """Sample again where the logits are adjusted, except for late rows.

    logits        [L, V]
    single_rows   row of one token for each logits row
    sampled       [2, L] int32; token and status, overwritten in place

    Logits rows whose draft is under rejection are left out: `compute_rejection_inputs` samples
    them.
    """
    sampler = runner.sampler
    if not sampler.adjusted_slots:
        return
    adjusted = [
        logits_row
        for logits_row, row in enumerate(single_rows)
        if logits_row not in logits_rows.rejection_drafts
        and logits_rows.batch_rows[logits_row] not in late_rows
        and sampler.is_adjusted(row)
    ]
    if adjusted:
        output = sampler.sample(logits, [single_rows[i] for i in adjusted], adjusted)
        sampled.index_copy_(1, runner.to_device(adjusted), output.sampled)


def _compute_logprobs(
    runner: ModelRunner,
    logits: torch.Tensor,
    logits_rows: LogitsRows,
    next_tokens: torch.Tensor,
    evidence: torch.Tensor,
    late_rows: Collection[int],
) -> list[PendingLogprobs]:
    """Compute the log probability of each sampled token whose request returns them.

    A draft under rejection may be emitted in place of the sample. Its entry comes before the
    sample's.

    logits        [L, V]
    next_tokens   [L] int64; the draft after each position
    evidence      [L, NUM_FIELDS] float64; its first column is the sampled token
    """
    if not runner.sampler.logprob_slots:
        return []
    scored: list[ScoredToken] = []
    for logits_row, slot in enumerate(logits_rows.slots.tolist()):
        params = runner.sampler.slot_bind(slot).params
        batch_row = logits_rows.batch_rows[logits_row]
        if params.logprobs is not None and batch_row not in late_rows:
            each = ScoredToken(logits_row, batch_row, params)
            scored += [each] * (1 + (logits_row in logits_rows.rejection_drafts))
    if not scored:
        return []
    request_rows = [each.logits_row for each in scored]
    request_index = runner.to_device(request_rows)
    tokens = evidence[request_index, 0].long()
    draft_requests = [
        i for i in range(len(request_rows) - 1) if request_rows[i] == request_rows[i + 1]
    ]
    if draft_requests:
        draft_request_index = runner.to_device(draft_requests)
        draft_rows = runner.to_device([request_rows[i] for i in draft_requests])
        tokens.index_copy_(0, draft_request_index, next_tokens[draft_rows])
    return compute_token_logprobs(runner.sampler, runner.to_device, logits, tokens, scored)
