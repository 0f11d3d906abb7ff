"""PagedModel: a Model from a PagedDecoder, which has the blocks and computes logits from them.

Owns what every step needs besides: the slots' block tables and histories, copies and moves of
blocks, sampling, drafts and their verification. Knows no scheduler and no arithmetic of a model.

    plan ──► copies ──► per row: table = table[:keep] + new_blocks
                                 inputs = tokens, what `refs` name, drafts
         ──► decoder.forward(all rows) ──► logits ──► per row: sampling ──► tokens

    class Decoder:                                 three numbers and three methods
        vocab_size, num_layers, block_size = 257, 1, 16
        def pages(self): ...                       contents of the blocks
        def resize(self, num_blocks): ...
        def forward(self, rows): ...               write the rows' inputs, and return their logits

With `draft`, another PagedModel, the two are a pair. The draft executes the plans in
`plan.drafts`; a row of the target names its tokens by plan and row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import NamedTuple, Protocol, TypeAlias

from forge.acceptance import RejectionInput, accept_coupled, rejection_sample, residual
from forge.errors import InvalidConfig
from forge.models.file_moves import FileMoves, no_files
from forge.models.host_blocks import HostBlocks, Pages, check_moves, page_bytes
from forge.request import TokenLogprob
from forge.sampling import (
    ACCEPT,
    DRAFT,
    NO_ALLOWED_TOKEN,
    RESIDUAL,
    draw_from_weights,
    draw_key,
    draw_token,
    filter_logits,
    invalid_logits_reason,
    probabilities,
    process_logits,
    sample_token,
    token_logprob,
    uniform,
)
from forge.seam import (
    Bind,
    FileAnswer,
    LateMask,
    Row,
    RowOutput,
    StepOutput,
    StepPlan,
    Verified,
)

NO_TOKEN = -1
"""Result of a row that failed. It is no token id, so a row that reads it is detected."""


class BlockRow(NamedTuple):
    """Row of a PagedDecoder: tokens of one sequence that are computed in a step.

    table    blocks of the sequence, in order: position p is in table[p // block_size]
    start    position of the first token; the blocks have all that is before it
    tokens   inputs, at least one
    """

    table: Sequence[int]
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        """End position: one past the last token."""
        return self.start + len(self.tokens)


RowLogits: TypeAlias = Callable[[int], Sequence[float]]
"""Logits of a row after tokens [0, end), for any end with start < end <= row.end.

One float per token of the vocabulary. They are valid until the next `forward` of the decoder.
"""


class PagedDecoder(Protocol):
    """Blocks, and the arithmetic that writes and reads them.

    num_layers   layers whose state a block holds
    block_size   positions of a block
    """

    vocab_size: int
    num_layers: int
    block_size: int

    def pages(self) -> Pages:
        """Return the contents of the blocks, to be copied and moved as bytes."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks. The first ones keep their contents."""
        ...

    def forward(self, rows: Sequence[BlockRow]) -> Sequence[RowLogits]:
        """Write the rows' inputs into their blocks, and return the logits of each row.

        No row reads what another row of the call writes.
        """
        ...


class FaultHooks(NamedTuple):
    """Injected faults, for tests and simulation.

    forward   called with each plan when it arrives; `forward` raises what it raises
    result    called with each plan when it ends; `result` raises what it raises. It returns the
              index of each row that fails, with its error
    """

    forward: Callable[[StepPlan], None] = lambda plan: None
    result: Callable[[StepPlan], Mapping[int, str]] = lambda plan: {}


NO_FAULTS = FaultHooks()

UNMASKED = RowOutput(error="the next plan gave no mask for this row")
"""Result of a late row until the next plan gives its mask."""


@dataclass(slots=True)
class _Slot:
    """State of the sequence in a slot, as a device keeps it. Owned by PagedModel."""

    bind: Bind
    table: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)


class _DrawnDraft(NamedTuple):
    """Draft and the distribution that it was sampled from.

    A token that the plan names has mass 1.
    """

    token: int
    q: Mapping[int, float]


class _TargetSample(NamedTuple):
    """Sample of the target after one position, and the inputs of rejection for the draft there.

    token   the target's own token, or NO_TOKEN, where `error` is the reason
    """

    token: int
    logits: Sequence[float] = ()
    error: str | None = None
    rejection_input: RejectionInput | None = None


class ComputedStep(NamedTuple):
    """PendingStep whose arithmetic is done; `result` waits until the imagined device would be.

    rows     results; the model replaces those of late rows when the next plan gives their masks
    logits   of each late row whose inputs are known, by its index
    """

    plan: StepPlan
    rows: list[RowOutput]
    logits: Mapping[int, RowLogits]
    undrafted: tuple[int, ...]
    answers: tuple[FileAnswer, ...]
    faults: FaultHooks
    ready_at_s: float

    def result(self) -> StepOutput:
        """Return the step's output, with an error for each row that `faults` names. Waits."""
        if self.ready_at_s:
            time.sleep(max(0.0, self.ready_at_s - time.monotonic()))
        return self.result_now()

    def result_now(self) -> StepOutput:
        """Return the output of `result` without waiting."""
        errors = self.faults.result(self.plan)
        rows = tuple(
            RowOutput(error=errors[i]) if i in errors else out for i, out in enumerate(self.rows)
        )
        return StepOutput(self.plan.step, rows, self.undrafted, self.answers)


class PagedModel:
    """Model that runs plans on a PagedDecoder.

    step_s        seconds of a step on the imagined device, which runs one step after the other
    draft         draft model with the same vocabulary, or None. Only this model gives it plans
    files         files of host blocks; None: there are none
    host_blocks   contents of the host pool; None: a plain HostBlocks
    """

    def __init__(
        self,
        decoder: PagedDecoder,
        *,
        eos_token: int,
        faults: FaultHooks = NO_FAULTS,
        step_s: float = 0.0,
        draft: PagedModel | None = None,
        files: FileMoves | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        if draft is not None and draft.vocab_size() != decoder.vocab_size:
            raise InvalidConfig(
                "draft_model",
                f"its vocabulary has {draft.vocab_size()} tokens, the model's {decoder.vocab_size}",
                "Give a draft of the same vocabulary",
            )
        self._decoder = decoder
        self._eos_token = eos_token
        if host_blocks is None:
            host_blocks = HostBlocks(page_bytes(decoder.pages()))
        self._host_blocks = host_blocks
        self._files = files or no_files()
        self._slots: dict[int, _Slot] = {}
        self._sampled_by_step: dict[int, list[int]] = {}
        self._last_step: ComputedStep | None = None
        self._faults = faults
        self._step_s = step_s
        self._free_at_s = 0.0
        self._draft = draft
        self._drawn_drafts: list[list[_DrawnDraft | None]] = []
        self._draft_probs: dict[int, Mapping[int, float]] = {}

    def vocab_size(self) -> int:
        """Return the width of the logits."""
        return self._decoder.vocab_size

    def num_layers(self) -> int:
        """Return the layers whose state a block holds."""
        return self._decoder.num_layers

    def eos_token(self) -> int:
        """Return the id that ends an output."""
        return self._eos_token

    def executes_moves(self) -> bool:
        """Return True: `forward` carries out stores and loads."""
        return True

    def samples_late_rows(self) -> bool:
        """Return True: `forward` first samples the late rows of the plan before."""
        return True

    def forward(self, plan: StepPlan) -> ComputedStep:
        """Execute the draft's plans, then the plan's copies, rows and moves, in order.

        First the late rows of the plan before are sampled.
        """
        if plan.block_size != self._decoder.block_size:
            raise InvalidConfig(
                "block_size",
                f"the model keeps {self._decoder.block_size} positions a block, the engine "
                f"{plan.block_size}",
                "Give both the same",
            )
        self._faults.forward(plan)
        self._sample_late_rows(plan.late_masks)
        undrafted = self._run_draft_plans(plan)
        if plan.num_blocks != len(self._decoder.pages()):
            self._decoder.resize(plan.num_blocks)
        pages = self._decoder.pages()
        self._host_blocks.resize(plan.num_host_blocks)
        self._files.begin(plan, self._host_blocks)
        if plan.stores or plan.loads or plan.fetches:
            tables = {slot: state.table for slot, state in self._slots.items()}
            check_moves(plan, tables, self._files.spilling, self._files.fetching)
        for source, target in plan.copies:
            pages[target][:] = pages[source]
        # A plan refers to tokens of the previous plan only.
        sampled: list[int] = []
        before = self._sampled_by_step.get(plan.step - 1, [])
        self._sampled_by_step = {plan.step - 1: before, plan.step: sampled}
        self._draft_probs.clear()
        rows, late_logits = self._run_rows(plan)
        sampled += [out.tokens[0] if out.tokens else NO_TOKEN for out in rows]
        self._host_blocks.run_moves(plan, pages)
        ready_s = 0.0
        if self._step_s:
            ready_s = self._free_at_s = max(time.monotonic(), self._free_at_s) + self._step_s
        answers = self._files.end(plan)
        step = ComputedStep(plan, rows, late_logits, undrafted, answers, self._faults, ready_s)
        self._last_step = step
        return step

    def _sample_late_rows(self, late_masks: Sequence[LateMask]) -> None:
        """Sample these rows of the step before. One whose input failed keeps its error."""
        for index, mask in late_masks:
            step = self._last_step
            assert step is not None and index in step.plan.late_rows, f"row {index} is not late"
            if step.rows[index] is UNMASKED:
                row = step.plan.rows[index]._replace(masks=(mask,))
                output = self._sample(row, [], step.logits[index])
                step.rows[index] = output
                if output.tokens:
                    self._sampled_by_step[step.plan.step][index] = output.tokens[0]

    def _run_draft_plans(self, plan: StepPlan) -> tuple[int, ...]:
        """Execute the draft's plans; return the sequences for which the draft failed."""
        self._drawn_drafts = []
        undrafted: list[int] = []
        for draft_plan in plan.drafts:
            if self._draft is None:
                raise InvalidConfig(
                    "speculation",
                    "the plan is for a target and its draft, and this model has no draft",
                    "Load a draft model, or set speculative_method to ngram",
                )
            try:
                step = self._draft.forward(draft_plan)
                outputs = step.result_now().rows
            except Exception:  # Without drafts each row still gets one token a step.
                self._drawn_drafts.append([None] * len(draft_plan.rows))
                undrafted += [row.seq_id for row in draft_plan.rows]
                continue
            self._free_at_s = max(self._free_at_s, step.ready_at_s)
            failed = [out.error is not None for out in outputs]
            undrafted += [
                row.seq_id
                for row, has_failed in zip(draft_plan.rows, failed, strict=True)
                if has_failed
            ]
            self._drawn_drafts.append(
                [
                    _DrawnDraft(out.tokens[0], self._draft._draft_probs.get(row.seq_id, {}))
                    if out.tokens
                    else None
                    for row, out in zip(draft_plan.rows, outputs, strict=True)
                ]
            )
        return tuple(dict.fromkeys(undrafted))

    def _resolve_drafts(self, row: Row) -> list[_DrawnDraft]:
        """Return the row's drafts before the first that the draft model failed to sample."""
        drafts = []
        for draft in row.drafts:
            if isinstance(draft, int):
                proposal: _DrawnDraft | None = _DrawnDraft(draft, {draft: 1.0})
            else:
                proposal = self._drawn_drafts[draft.plan][draft.row]
            if proposal is None:
                break
            drafts.append(proposal)
        return drafts

    def _run_rows(self, plan: StepPlan) -> tuple[list[RowOutput], dict[int, RowLogits]]:
        """Compute the rows, and sample all but the late ones, whose logits are returned too."""
        drafts = [self._resolve_drafts(row) for row in plan.rows]
        inputs = [self._read_inputs(row, drafts[index]) for index, row in enumerate(plan.rows)]
        known = [index for index, tokens in enumerate(inputs) if NO_TOKEN not in tokens]
        block_rows = []
        for index in known:
            row = plan.rows[index]
            slot = self._slots[row.slot]
            _extend_history(slot, row.start, inputs[index])
            block_rows.append(BlockRow(slot.table, row.start, inputs[index]))
        logits = dict(zip(known, self._decoder.forward(block_rows), strict=True))
        rows, late_rows = [], frozenset(plan.late_rows)
        for index, row in enumerate(plan.rows):
            if index not in logits:
                output = RowOutput(error="its input comes from a row that failed")
            elif index in late_rows:
                output = UNMASKED
            else:
                output = self._sample(row, drafts[index], logits[index])
            rows.append(output)
        return rows, {index: logits[index] for index in plan.late_rows if index in logits}

    def _read_inputs(self, row: Row, drafts: list[_DrawnDraft]) -> list[int]:
        """Return the row's inputs, NO_TOKEN where one is unknown, and update the slot's table."""
        if row.bind is not None:
            self._slots[row.slot] = _Slot(row.bind, [], list(row.bind.history))
        slot = self._slots[row.slot]
        slot.table[row.keep :] = row.new_blocks
        inputs = [*row.tokens, *(self._sampled_by_step[ref.step][ref.row] for ref in row.refs)]
        return [*inputs, *(draft.token for draft in drafts)]

    def block_table(self, slot: int) -> Sequence[int]:
        """Return the blocks of the sequence in a slot."""
        return self._slots[slot].table

    def _sample(self, row: Row, drafts: list[_DrawnDraft], logits: RowLogits) -> RowOutput:
        """Return the result of a row whose inputs are in its blocks."""
        try:
            return self._build_output(self._slots[row.slot], row, drafts, logits)
        except Exception as error:  # `logits` fails for this row; other rows go on.
            return RowOutput(error=f"logits: {error!r}")

    def _build_output(
        self, slot: _Slot, row: Row, drafts: list[_DrawnDraft], logits: RowLogits
    ) -> RowOutput:
        prompt_logprobs = _prompt_logprobs(slot, row.start, row.end, logits)
        if any(isnan(score.logprob) for score in prompt_logprobs):
            return RowOutput(error="the model's logits are not finite at a prompt position")
        if not row.num_samples:
            return RowOutput(prompt_logprobs=prompt_logprobs)
        samples = [
            self._sample_position(slot, row, index, draft, logits)
            for index, draft in enumerate([*drafts, None])
        ]
        rejection_inputs = [
            sample.rejection_input for sample in samples if sample.rejection_input is not None
        ]
        draft_tokens = [draft.token for draft in drafts]
        if rejection_inputs:
            tokens = rejection_sample(rejection_inputs, samples[-1].token)
            verified = [
                Verified(t.draft, float(t.p), float(t.q), t.residual) for t in rejection_inputs
            ]
        else:
            tokens = accept_coupled(draft_tokens, [sample.token for sample in samples])
            verified = [Verified(token) for token in draft_tokens]
        emitted = samples[: len(tokens)]
        if emitted[-1].error is not None:
            if len(tokens) == 1:
                return RowOutput(error=emitted[-1].error)
            # The tokens before it may end the output. If not, the next step fails on it alone.
            tokens = tokens[:-1]
            del emitted[-1], verified[len(tokens) - 1 :]
        logprobs: tuple[TokenLogprob, ...] = ()
        count = slot.bind.params.logprobs
        if count is not None:
            pairs = zip(emitted, tokens, strict=True)
            logprobs = tuple(token_logprob(sample.logits, token, count) for sample, token in pairs)
        return RowOutput(tokens, logprobs, prompt_logprobs, verified=tuple(verified[: len(tokens)]))

    def _sample_position(
        self, slot: _Slot, row: Row, index: int, draft: _DrawnDraft | None, row_logits: RowLogits
    ) -> _TargetSample:
        """Return the sample after the row's inputs and its first `index` drafts."""
        bind, position = slot.bind, row.end - len(row.drafts) + index
        params, prompt_len = bind.params, bind.prompt_len
        try:
            logits = row_logits(position)
        except Exception as error:  # `logits` fails for this context; others go on.
            return _failed_sample(bind, f"logits: {error!r}", draft)
        problem = invalid_logits_reason(logits)
        if len(logits) != self._decoder.vocab_size:
            problem = f"logits: {len(logits)} numbers for a vocabulary of {self.vocab_size()}"
        if problem is not None:
            return _failed_sample(bind, problem, draft)
        prompt: Sequence[int] = ()
        output: Sequence[int] = range(position - prompt_len)  # Only its length is read.
        if params.has_penalties:
            prompt, output = slot.history[:prompt_len], slot.history[prompt_len:position]
        mask = row.masks[index] if row.masks else None
        allowed = process_logits(logits, params, prompt, output, bind.end_ids, mask)
        if max(allowed) == -inf:
            return _failed_sample(bind, NO_ALLOWED_TOKEN, draft)
        if bind.uses_rejection:
            if bind.proposes:
                kept = filter_logits(allowed, params)
                self._draft_probs[row.seq_id] = probabilities(kept)
                return _TargetSample(draw_token(kept, draw_key(bind.seed, position, DRAFT)), logits)
            if draft is not None:
                trial = _create_rejection_input(
                    bind, position, probabilities(filter_logits(allowed, params)), draft
                )
                return _TargetSample(NO_TOKEN, logits, None, trial)
        return _TargetSample(sample_token(allowed, params, bind.seed, position), logits)


def _extend_history(slot: _Slot, start: int, inputs: list[int]) -> None:
    """Add the inputs from position `start` on to the slot's history, where something reads it."""
    params = slot.bind.params
    if params.has_penalties or params.prompt_logprobs is not None:
        # Rejected drafts are at positions from `start` on. The bind's history is kept.
        del slot.history[max(start, len(slot.bind.history)) :]
        known = slot.history[start : start + len(inputs)]
        assert known == inputs[: len(known)], f"inputs at {start} differ from the slot's history"
        slot.history += inputs[len(known) :]


def _prompt_logprobs(
    slot: _Slot, start: int, end: int, logits: RowLogits
) -> tuple[TokenLogprob, ...]:
    count = slot.bind.params.prompt_logprobs
    if count is None:
        return ()
    return tuple(
        token_logprob(logits(position), slot.history[position], count)
        for position in range(start + 1, min(end, slot.bind.prompt_len - 1) + 1)
    )


def _failed_sample(bind: Bind, error: str, draft: _DrawnDraft | None) -> _TargetSample:
    """Return a sample without a token; p = 0 rejects the draft, if there is one."""
    rejection_input = None
    if draft is not None and bind.uses_rejection:
        rejection_input = RejectionInput(draft.token, 0.0, 1.0, 0.5, NO_TOKEN)
    return _TargetSample(NO_TOKEN, (), error, rejection_input)


def _create_rejection_input(
    bind: Bind, position: int, p: Mapping[int, float], draft: _DrawnDraft
) -> RejectionInput:
    def key(purpose: int) -> int:
        return draw_key(bind.seed, position, purpose)

    replacement = draw_from_weights(residual(p, draft.q), key(RESIDUAL))
    p_and_q = p.get(draft.token, 0.0), draft.q.get(draft.token, 0.0)
    return RejectionInput(draft.token, *p_and_q, uniform(key(ACCEPT), 0), replacement)
