"""HFModel: a transformers model with the four methods of forge.seam.Model.

Owns the choice of how a plan is run. Its parts: input_batch (the plan as arrays), model_runner
(the order of a step), cuda_graphs (captured steps), block_moves (moves to and from host memory),
late_rows (samples that wait for their masks), step (from the device's numbers to outputs).

    forward(plan)                                               result()
      samples of the plan before that waited for their masks
      wait on the device for the moves of the plan before
      block copies ─ binds ─ one transfer ─ table updates         wait for this step's numbers
        ├─ rows of one token, a graph fits:  one replay           answers of file moves
        └─ otherwise:  inputs ─ hidden (a graph, if small) ─ logits ─ sample
      tokens stay on the device for the next step; a copy goes to the host
      moves, on streams of their own

Always true: `forward` never waits for the device. An input that the previous step samples is read
on the device, from the row named by `source_rows`. The draft model's plans are queued first, and
their tokens and distributions stay on the device too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from forge.config import MAX_DRAFTS
from forge.errors import EnginePaused, InvalidConfig, InvalidWeights
from forge.models.hf.block_moves import Moves
from forge.models.hf.runner.batch_step import BatchStep, NoFollowers, StepPublisher
from forge.models.hf.runner.cuda_graphs import NO_GRAPHS, CapturedGraphs, no_graphs
from forge.models.hf.runner.input_batch import build_input_batch
from forge.models.hf.runner.late_rows import LateRows
from forge.models.hf.runner.model_runner import ModelRunner, StepLogits, invert_order
from forge.models.hf.runner.verification import draft_only_evidence, execute_and_verify
from forge.models.hf.sampling.logprobs import PendingLogprobs
from forge.models.hf.speculation.acceptance import AcceptanceEvidence
from forge.models.hf.speculation.drafts import (
    NO_DRAFT_TOKENS,
    DraftCollector,
    DraftPlanOutput,
    DraftTokens,
)
from forge.models.hf.step import HFStep, no_answers
from forge.models.hf.weights import ModelWeights
from forge.models.part_watch import PartWatch
from forge.seam import LateMask, StepPlan
from forge.weights import PartTimes, WeightSource

log = logging.getLogger(__name__)

GIB = 2**30


class _QueuedStep(NamedTuple):
    """Row order of a queued plan, and its results on their way to the host.

    plan_rows   row of the plan for each row of the batch
    late_rows   rows that the next plan's masks are for, or None
    """

    plan_rows: Sequence[int]
    logprobs: Sequence[PendingLogprobs]
    prompt_logprobs: Sequence[PendingLogprobs]
    evidence: AcceptanceEvidence | None
    late_rows: LateRows | None


def allow_changes() -> None:
    """Do nothing: weights and memory of a model of one process may change."""


class HFModel:
    """Causal language model of transformers that executes plans.

    capture_graphs  captures steps as CUDA graphs, now and after each sleep
    weights         weights that can be replaced; None: they stay as they are
    check_changes   raises InvalidConfig where an update or a sleep would change one rank of several
    draft           draft model with the same vocabulary and slots, or None. Only this model gives
                    it plans
    moves           moves of blocks to and from host memory; None: plans have no host pool

    Where several ranks share the model, rank 0 runs `forward` and publishes each step. On the other
    ranks `follow` and `follow_draft` take its place.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        eos_token: int,
        capture_graphs: Callable[[], CapturedGraphs] = no_graphs,
        weights: ModelWeights | None = None,
        check_changes: Callable[[], None] = allow_changes,
        draft: HFModel | None = None,
        moves: Moves | None = None,
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token = eos_token
        self._capture_graphs = capture_graphs
        self._graphs = capture_graphs()
        self._weights = weights
        self._check_changes = check_changes
        self._moves = moves
        self._publisher: StepPublisher = NoFollowers()
        self._batch_rows: list[int] = []
        self._last_step: HFStep | None = None
        self._late_rows: LateRows | None = None
        if draft is not None:
            _refuse_mismatched_draft(self, draft)
        self._draft = draft
        sampled = runner.output_buffer.sampled
        max_drafts = MAX_DRAFTS if draft is not None else 0
        self._draft_buffer = torch.zeros(
            (2, max_drafts, sampled.shape[1]), dtype=sampled.dtype, device=sampled.device
        )
        self._followed_drafts = DraftCollector((), self._draft_buffer)

    def vocab_size(self) -> int:
        """Return the width of the logits."""
        return self._vocab_size

    def num_layers(self) -> int:
        """Return the layers whose keys and values a block holds."""
        return self._runner.kv_cache.spec.num_layers

    def eos_token(self) -> int:
        """Return the id that ends an output."""
        return self._eos_token

    @property
    def num_slots(self) -> int:
        """Most rows of a plan."""
        return self._runner.kv_cache.num_slots

    def publish_to(self, publisher: StepPublisher) -> None:
        """Send each step from now on to the publisher, before its first kernel is queued."""
        self._publisher = publisher

    def executes_moves(self) -> bool:
        """Return whether this model has a host pool, whose moves `forward` carries out."""
        return self._moves is not None

    def samples_late_rows(self) -> bool:
        """Return True: `forward` first queues the samples of the late rows of the plan before."""
        return True

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by their names, each tensor once, to be read only."""
        return self._changeable_weights.parameters()

    def update_weights(self, source: WeightSource) -> None:
        """Replace weights in place. The draft model keeps its own. Raises InvalidWeights."""
        self._changeable_weights.update(source)

    def sleep(self, level: int) -> PartTimes:
        """Free the memory of weights, KV cache and graphs, and return the seconds of each part.

        Those of the draft model too, whose weights are kept in host memory at every level.
        """
        weights = self._changeable_weights  # A refusal comes before the first change.
        watch, device = PartWatch(), self._runner.kv_cache.data.device
        _synchronize(device)  # Moves of the last plan may still run.
        self._last_step = None
        self._graphs = NO_GRAPHS
        watch.end("graphs")
        weights.release(keep_content=level == 1)
        watch.end("weights")
        self._runner.kv_cache.release()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        watch.end("kv_cache")
        if self._draft is not None:
            self._draft.sleep(1)
            watch.end("draft")
        return watch.times

    def close(self) -> None:
        """Free the memory of weights, KV cache, graphs and host pool. No step may follow.

        At once, and also where something still references the model.
        """
        with suppress(RuntimeError):  # a device that failed has nothing left to wait for
            _synchronize(self._runner.kv_cache.data.device)
        self._last_step = self._late_rows = self._moves = None
        self._graphs = NO_GRAPHS
        if self._weights is not None:
            self._weights.drop()
        self._runner.kv_cache.release()
        if self._draft is not None:
            self._draft.close()

    def wake(self) -> PartTimes:
        """Allocate what `sleep` freed, capture the graphs again, and return the seconds.

        Raises EnginePaused, and changes nothing, where the device lacks memory.
        """
        device = self._runner.kv_cache.data.device
        if device.type == "cuda":  # for the draft model too, which refuses nothing after this
            check_free_memory(self._released_bytes, torch.cuda.mem_get_info(device)[0])
        return self._allocate_again()

    def _allocate_again(self) -> PartTimes:
        watch, device = PartWatch(), self._runner.kv_cache.data.device
        self._changeable_weights.restore()
        watch.end("weights")
        self._runner.kv_cache.restore()
        _synchronize(device)
        watch.end("kv_cache")
        self._graphs = self._capture_graphs()
        _synchronize(device)
        watch.end("graphs")
        if self._draft is not None:
            self._draft._allocate_again()
            watch.end("draft")
        return watch.times

    @property
    def _released_bytes(self) -> int:
        num_bytes = self._changeable_weights.released_bytes + self._runner.kv_cache.released_bytes
        return num_bytes + (self._draft._released_bytes if self._draft is not None else 0)

    @property
    def _changeable_weights(self) -> ModelWeights:
        self._check_changes()
        if self._weights is None:
            raise InvalidWeights("weights", "those of this model are fixed", "Start it again")
        return self._weights

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> HFStep:
        """Queue the draft model's plans, then this plan. Return without waiting for the device."""
        late_rows, self._late_rows = self._late_rows, None
        assert late_rows is not None or not plan.late_masks, f"plan {plan.step} has masks of no row"
        if late_rows is not None:
            self._publisher.publish_late_masks(plan.late_masks)
            late_rows.sample(plan.late_masks)
        self._runner.kv_cache.check_plan(plan.num_blocks, plan.block_size)
        moves, file_answers = self._moves, no_answers
        if moves is not None:
            moves.begin(plan)
            file_answers = moves.end
        elif plan.num_host_blocks:
            raise InvalidConfig(
                "host_tier",
                f"{plan.num_host_blocks} host blocks, and this model has no host pool",
                "Leave host_tier out, or start with a host pool",
            )
        draft_tokens = self._run_draft_plans(plan.drafts)
        batch_step = self._build_step(plan, draft_tokens)
        self._publisher.publish(batch_step)
        queued = self._queue_step(batch_step, draft_tokens)
        if queued.plan_rows:
            previous = self._last_step if any(row.refs for row in plan.rows) else None
            self._late_rows = late_rows = queued.late_rows
            if late_rows is None:
                logprobs = queued.logprobs
                wait_for_tokens = self._runner.output_buffer.copy_to_host(len(queued.plan_rows))
            else:
                logprobs, wait_for_tokens = late_rows.logprobs, late_rows.wait_for_tokens
            step = HFStep(
                plan,
                queued.plan_rows,
                previous,
                wait_for_tokens,
                logprobs,
                queued.prompt_logprobs,
                queued.evidence,
                file_answers,
            )
            self._last_step = step
        else:
            step = HFStep(plan, (), None, None, (), (), queued.evidence, file_answers)
        if moves is not None:
            moves.queue(plan)
        return step

    @torch.inference_mode()
    def follow(self, step: BatchStep) -> None:
        """Queue a step that rank 0 has published, after those of its draft model.

        Return without waiting for the device. Nothing of the step comes back to this host.
        """
        self._runner.kv_cache.check_plan(step.plan.num_blocks, step.plan.block_size)
        if self._moves is not None:
            self._moves.begin(step.plan)
        drafts, self._followed_drafts = (
            self._followed_drafts.draft_tokens(),
            DraftCollector((), self._draft_buffer),
        )
        assert len(drafts.batch_rows) == step.num_draft_plans, "rank 0 has run as many drafts"
        self._late_rows = self._queue_step(step, drafts).late_rows
        if self._moves is not None:
            self._moves.queue(step.plan)

    @torch.inference_mode()
    def follow_late_masks(self, late_masks: Sequence[LateMask]) -> None:
        """Sample the late rows of the step before, which rank 0 has masks of."""
        late_rows, self._late_rows = self._late_rows, None
        assert late_rows is not None, "the step before has late rows"
        late_rows.sample(late_masks)

    @torch.inference_mode()
    def follow_draft(self, step: BatchStep) -> None:
        """Queue a step of the draft model that rank 0 has published."""
        assert self._draft is not None, "rank 0 has a draft model"
        self._followed_drafts.add(self._draft.queue_draft_step(step))

    def queue_draft_plan(self, plan: StepPlan, publisher: StepPublisher) -> DraftPlanOutput:
        """Publish and queue a plan of which this model is the draft: see `queue_draft_step`."""
        self._runner.kv_cache.check_plan(plan.num_blocks, plan.block_size)
        step = self._build_step(plan, NO_DRAFT_TOKENS)
        publisher.publish_draft(step)
        return self.queue_draft_step(step)

    def queue_draft_step(self, step: BatchStep) -> DraftPlanOutput:
        """Queue a step of which this model is the draft. Its tokens stay on the device.

        The output's tensors are valid until this model's next step.
        """
        runner = self._runner
        plan_rows = self._queue_step(step, NO_DRAFT_TOKENS).plan_rows
        distributions, runner.draft_distributions = runner.draft_distributions, []
        return DraftPlanOutput(invert_order(plan_rows), runner.output_buffer.sampled, distributions)

    def _run_draft_plans(self, plans: Sequence[StepPlan]) -> DraftTokens:
        """Queue the draft model's plans in order. After a failure the rest is not run."""
        collector, draft = DraftCollector(plans, self._draft_buffer), self._draft
        for plan in plans:
            if draft is None:
                raise InvalidConfig(
                    "speculation",
                    "the plan is for a target and its draft, and this model has no draft",
                    "Load a draft model, or set speculative_method to ngram",
                )
            try:
                output = draft.queue_draft_plan(plan, self._publisher)
            except Exception as error:  # Without drafts each row still gets one token a step.
                self._publisher.accept_draft_failure(error)
                log.warning("the draft model failed: %r", error)
                break
            collector.add(output)
        return collector.draft_tokens()

    def _build_step(self, plan: StepPlan, draft_tokens: DraftTokens) -> BatchStep:
        """Return the plan's rows as a batch. No device is used."""
        kv_cache = self._runner.kv_cache
        table_width = kv_cache.block_tables.shape[1]
        batch = build_input_batch(
            plan, self._batch_rows, kv_cache.num_slots, table_width, draft_tokens.batch_rows
        )
        self._batch_rows = invert_order(batch.plan_rows)
        return BatchStep(
            plan,
            batch,
            [plan.rows[index] for index in batch.plan_rows],
            [(row.slot, row.bind) for row in plan.rows if row.bind is not None],
            len(draft_tokens.batch_rows),
        )

    def _queue_step(self, step: BatchStep, draft_tokens: DraftTokens) -> _QueuedStep:
        """Queue the step's block copies and rows. Tokens and status go to the output buffer."""
        runner, batch, rows = self._runner, step.batch, step.rows
        sampler = runner.sampler
        runner.kv_cache.copy_blocks(step.plan.copies)
        evidence = (
            draft_only_evidence(draft_tokens)
            if draft_tokens.plans and not batch.rows_with_drafts
            else None
        )
        if not batch.plan_rows:
            return _QueuedStep((), (), (), evidence, None)
        runner.draft_distributions = []
        for slot, bind in step.binds:
            sampler.bind(slot, bind)
        sampler.flush_slots()
        batch_rows = invert_order(batch.plan_rows) if step.plan.late_rows else []
        late_rows = frozenset(batch_rows[index] for index in step.plan.late_rows)
        logprobs: Sequence[PendingLogprobs]
        prompt_logprobs: Sequence[PendingLogprobs]
        if batch.rows_with_drafts:
            logprobs, prompt_logprobs, step_logits, evidence = execute_and_verify(
                runner, batch, rows, self._graphs.mixed, draft_tokens, late_rows
            )
        elif self._graphs.decode is not None and self._graphs.decode.can_replay(batch, rows):
            ids, logits = self._graphs.decode.replay(batch)
            runner.update_penalties(rows, ids)
            step_logits = StepLogits(logits, range(len(rows)))
            logprobs = runner.finish_sampling(*step_logits, rows, late_rows)
            prompt_logprobs = ()
        else:
            logprobs, prompt_logprobs, step_logits = runner.execute_model(
                batch, rows, self._graphs.mixed, late_rows
            )
        waiting = None
        if late_rows:
            waiting = LateRows(runner, rows, batch_rows, step.plan.late_rows, step_logits, logprobs)
        return _QueuedStep(batch.plan_rows, logprobs, prompt_logprobs, evidence, waiting)


def check_free_memory(needed_bytes: int, free_bytes: int) -> None:
    """Raise EnginePaused where a wake needs more memory than is free."""
    if needed_bytes > free_bytes:
        raise EnginePaused(
            f"a wake needs {needed_bytes / GIB:.1f} GiB, and the GPU has "
            f"{free_bytes / GIB:.1f} free. Free memory of the trainer, then wake it again"
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _refuse_mismatched_draft(target: HFModel, draft: HFModel) -> None:
    """Raise InvalidConfig unless the draft has the target's vocabulary and slots."""
    for name, one, other, remedy in (
        ("draft_model", target.vocab_size(), draft.vocab_size(), "Give a draft of the same one"),
        ("max_num_seqs", target.num_slots, draft.num_slots, "Give both the same"),
    ):
        if one != other:
            noun = "tokens in its vocabulary" if name == "draft_model" else "slots"
            raise InvalidConfig(name, f"the draft has {other} {noun}, the model {one}", remedy)
