"""PagedModel: a Model from a PagedDecoder, which has the blocks and computes logits from them.

Owns what every step needs besides: the slots' block tables and histories, copies and moves of
blocks, drafts and late rows. Knows no scheduler and no arithmetic of a model.

    plan ──► copies ──► per row: table = table[:keep] + new_blocks
                                 inputs = tokens, what `refs` name, drafts
         ──► decoder.forward(all rows) ──► logits ──► per row: sampling ──► tokens

With `draft`, another PagedModel, the two are a pair. The draft executes the plans in
`plan.drafts`; a row of the target names its tokens by plan and row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.models.file_moves import FileMoves, no_files
from forge.models.host_blocks import HostBlocks, check_moves, page_bytes
from forge.models.paged_decoder import BlockRow, PagedDecoder, RowLogits
from forge.models.row_sampling import NO_TOKEN, DrawnDraft, Slot, extend_history, sample_row
from forge.seam import FileAnswer, LateMask, Row, RowOutput, StepOutput, StepPlan


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
        self._slots: dict[int, Slot] = {}
        self._sampled_by_step: dict[int, list[int]] = {}
        self._last_step: ComputedStep | None = None
        self._faults = faults
        self._step_s = step_s
        self._free_at_s = 0.0
        self._draft = draft
        self._drawn_drafts: list[list[DrawnDraft | None]] = []
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
                    DrawnDraft(out.tokens[0], self._draft._draft_probs.get(row.seq_id, {}))
                    if out.tokens
                    else None
                    for row, out in zip(draft_plan.rows, outputs, strict=True)
                ]
            )
        return tuple(dict.fromkeys(undrafted))

    def _resolve_drafts(self, row: Row) -> list[DrawnDraft]:
        """Return the row's drafts before the first that the draft model failed to sample."""
        drafts = []
        for draft in row.drafts:
            if isinstance(draft, int):
                proposal: DrawnDraft | None = DrawnDraft(draft, {draft: 1.0})
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
            extend_history(slot, row.start, inputs[index])
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

    def _read_inputs(self, row: Row, drafts: list[DrawnDraft]) -> list[int]:
        """Return the row's inputs, NO_TOKEN where one is unknown, and update the slot's table."""
        if row.bind is not None:
            self._slots[row.slot] = Slot(row.bind, [], list(row.bind.history))
        slot = self._slots[row.slot]
        slot.table[row.keep :] = row.new_blocks
        inputs = [*row.tokens, *(self._sampled_by_step[ref.step][ref.row] for ref in row.refs)]
        return [*inputs, *(draft.token for draft in drafts)]

    def block_table(self, slot: int) -> Sequence[int]:
        """Return the blocks of the sequence in a slot."""
        return self._slots[slot].table

    def _sample(self, row: Row, drafts: list[DrawnDraft], logits: RowLogits) -> RowOutput:
        """Return the result of a row whose inputs are in its blocks."""
        try:
            sampled = sample_row(self._slots[row.slot], row, drafts, logits, self.vocab_size())
        except Exception as error:  # `logits` fails for this row; other rows go on.
            return RowOutput(error=f"logits: {error!r}")
        if sampled.draft_probs is not None:
            self._draft_probs[row.seq_id] = sampled.draft_probs
        return sampled.output
