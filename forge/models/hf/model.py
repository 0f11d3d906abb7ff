"""HFModel: a transformers model behind the seam's four methods.

Owns which way a plan is run. What it stands on has a file each: batch (the plan as arrays), device
(the order of a step), graphs (decode steps recorded), step (from numbers to outputs).

    forward(plan)                                             result()
      copies ─ binds ─ one transfer ─ table changes             wait for this step's numbers
        ├─ every row one token, a graph fits:  one launch
        └─ otherwise:  inputs ─ hidden (a graph, if small) ─ logits of the last tokens ─ draw
      tokens stay on the device for the next step; a copy leaves for the host

Nothing here waits for the device: a step that needs a token of the step before names the place
where that step leaves it (`source_rows`), and the order of the stream does the rest. So it is with
a draft model: its plans are queued first, and its tokens and what they were drawn from stay there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from forge.config import MAX_DRAFTS
from forge.errors import InvalidConfig
from forge.models.hf.runner.cuda_graphs import DecodeGraphs, MixedGraphs
from forge.models.hf.runner.input_batch import build_input_batch
from forge.models.hf.runner.model_runner import ModelRunner, invert_order
from forge.models.hf.runner.verification import draft_only_evidence, execute_and_verify
from forge.models.hf.sampling.logprobs import PendingLogprobs
from forge.models.hf.speculation.acceptance import AcceptanceEvidence
from forge.models.hf.speculation.drafts import (
    NO_DRAFT_TOKENS,
    DraftCollector,
    DraftPlanOutput,
    DraftTokens,
)
from forge.models.hf.step import HFStep
from forge.seam import StepPlan

log = logging.getLogger(__name__)


class _QueuedStep(NamedTuple):
    """What a plan has queued: the order of its batch, and what is on its way to the host."""

    plan_rows: Sequence[int]
    logprobs: Sequence[PendingLogprobs]
    prompt_logprobs: Sequence[PendingLogprobs]
    evidence: AcceptanceEvidence | None


class HFModel:
    """Serves a causal language model of transformers.

    decode_graphs   decode steps that are recorded, or None
    mixed_graphs    other small steps that are recorded, or None
    draft           proposes tokens of this model's vocabulary; nobody else gives it plans
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        eos_token: int,
        decode_graphs: DecodeGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
        draft: HFModel | None = None,
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token = eos_token
        self._decode_graphs = decode_graphs
        self._mixed_graphs = mixed_graphs
        self._batch_rows: list[int] = []
        self._last_step: HFStep | None = None
        if draft is not None:
            _refuse_mismatched_draft(self, draft)
        self._draft = draft
        sampled = runner.output_buffer.sampled
        max_drafts = MAX_DRAFTS if draft is not None else 0
        self._draft_buffer = torch.zeros(
            (2, max_drafts, sampled.shape[1]), dtype=sampled.dtype, device=sampled.device
        )

    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def num_layers(self) -> int:
        """Layers whose keys and values a block holds."""
        return self._runner.kv_cache.spec.num_layers

    def eos_token(self) -> int:
        """The id that ends an output."""
        return self._eos_token

    @property
    def num_slots(self) -> int:
        """Most rows of a plan."""
        return self._runner.kv_cache.num_slots

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> HFStep:
        """Queue the draft's plans, then the plan's copies and rows, on the device."""
        self._runner.kv_cache.check_plan(plan.num_blocks, plan.block_size)
        draft_tokens = self._run_draft_plans(plan.drafts)
        queued = self._queue_plan(plan, draft_tokens)
        if not queued.plan_rows:
            return HFStep(plan, (), None, None, (), (), queued.evidence)
        previous = self._last_step if any(row.refs for row in plan.rows) else None
        wait_for_tokens = self._runner.output_buffer.copy_to_host(len(queued.plan_rows))
        self._last_step = HFStep(plan, queued.plan_rows, previous, wait_for_tokens, *queued[1:])
        return self._last_step

    def queue_draft_plan(self, plan: StepPlan) -> DraftPlanOutput:
        """Queue a plan of which this model is the draft. Its tokens stay on the device.

        The output's tensors are valid until the next plan of this model.
        """
        runner = self._runner
        runner.kv_cache.check_plan(plan.num_blocks, plan.block_size)
        plan_rows = self._queue_plan(plan, NO_DRAFT_TOKENS).plan_rows
        distributions, runner.draft_distributions = runner.draft_distributions, []
        return DraftPlanOutput(invert_order(plan_rows), runner.output_buffer.sampled, distributions)

    def _run_draft_plans(self, plans: Sequence[StepPlan]) -> DraftTokens:
        """What the draft model has drawn. Where it fails the rest of its plans is not run."""
        collector, draft = DraftCollector(plans, self._draft_buffer), self._draft
        for plan in plans:
            if draft is None:
                raise InvalidConfig(
                    "speculation",
                    "the plan is one for a pair of models, and this model has no draft",
                    "Give the model one, or let speculative_method be ngram",
                )
            try:
                output = draft.queue_draft_plan(plan)
            except Exception as error:  # without drafts there is a token a step all the same
                log.warning("the draft model failed: %r", error)
                break
            collector.add(output)
        return collector.draft_tokens()

    def _queue_plan(self, plan: StepPlan, draft_tokens: DraftTokens) -> _QueuedStep:
        """Queue the plan's copies and rows; tokens and status of its rows are in the outbox."""
        runner = self._runner
        kv_cache, sampler = runner.kv_cache, runner.sampler
        kv_cache.copy_blocks(plan.copies)
        table_width = kv_cache.block_tables.shape[1]
        batch = build_input_batch(
            plan, self._batch_rows, kv_cache.num_slots, table_width, draft_tokens.batch_rows
        )
        self._batch_rows = invert_order(batch.plan_rows)
        evidence = (
            draft_only_evidence(draft_tokens)
            if draft_tokens.plans and not batch.rows_with_drafts
            else None
        )
        if not batch.plan_rows:
            return _QueuedStep((), (), (), evidence)
        runner.draft_distributions = []
        for row in plan.rows:
            if row.bind is not None:
                sampler.bind(row.slot, row.bind)
        sampler.flush_seeds()
        rows = [plan.rows[index] for index in batch.plan_rows]
        if batch.rows_with_drafts:
            return _QueuedStep(
                batch.plan_rows,
                *execute_and_verify(runner, batch, rows, self._mixed_graphs, draft_tokens),
            )
        if self._decode_graphs is not None and self._decode_graphs.can_replay(batch, rows):
            ids, logits = self._decode_graphs.replay(batch)
            runner.update_penalties(batch, rows, ids)
            logprobs = runner.resample(logits, range(len(rows)), rows)
            return _QueuedStep(batch.plan_rows, logprobs, (), evidence)
        return _QueuedStep(
            batch.plan_rows, *runner.execute_model(batch, rows, self._mixed_graphs), evidence
        )


def _refuse_mismatched_draft(target: HFModel, draft: HFModel) -> None:
    """Raises InvalidConfig unless the two can be a pair."""
    for name, one, other, remedy in (
        ("draft_model", target.vocab_size(), draft.vocab_size(), "Give a draft of the same one"),
        ("max_num_seqs", target.num_slots, draft.num_slots, "Give both the same"),
    ):
        if one != other:
            noun = "tokens in its vocabulary" if name == "draft_model" else "slots"
            raise InvalidConfig(name, f"the draft has {other} {noun}, the model {one}", remedy)
