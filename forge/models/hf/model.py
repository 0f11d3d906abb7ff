"""HFModel: a transformers model behind the seam's four methods.

Owns which way a plan is run. What it stands on has a file each: batch (the plan as arrays), device
(the order of a step), graphs (decode steps recorded), step (from numbers to outputs).

    forward(plan)                                             result()
      copies ─ binds ─ one transfer ─ table changes             wait for this step's numbers
        ├─ every row one token, a graph fits:  one launch
        └─ otherwise:  inputs ─ hidden (a graph, if small) ─ logits of the last tokens ─ draw
      tokens stay on the device for the next step; a copy leaves for the host

Nothing here waits for the device: a step that needs a token of the step before names the place
where that step leaves it (`sources`), and the order of the stream does the rest. So it is with a
draft model: its plans are queued first, and its tokens and what they were drawn from stay there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from forge.config import MOST_DRAFTS
from forge.errors import InvalidConfig
from forge.models.hf.batch import batch_of
from forge.models.hf.device import Device, inverse
from forge.models.hf.graphs import ChunkGraphs, DecodeGraphs
from forge.models.hf.proposals import NOTHING_PROPOSED, Collected, Proposals
from forge.models.hf.step import HFStep, Scores
from forge.models.hf.verdict import Evidence
from forge.models.hf.verify import drafted, verify
from forge.seam import StepPlan

log = logging.getLogger(__name__)


class _Launched(NamedTuple):
    """What a plan has queued: the order of its batch, and what is on its way to the host."""

    order: Sequence[int]
    scores: Sequence[Scores]
    prompt_scores: Sequence[Scores]
    evidence: Evidence | None


class HFModel:
    """Serves a causal language model of transformers.

    decodes   decode steps that are recorded, or None
    chunks    other small steps that are recorded, or None
    draft     proposes tokens of this model's vocabulary; nobody else gives it plans
    """

    def __init__(
        self,
        device: Device,
        *,
        vocab_size: int,
        eos_token: int,
        decodes: DecodeGraphs | None = None,
        chunks: ChunkGraphs | None = None,
        draft: HFModel | None = None,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._eos_token = eos_token
        self._decodes = decodes
        self._chunks = chunks
        self._places: list[int] = []
        self._last: HFStep | None = None
        if draft is not None:
            _refuse_unequal(self, draft)
        self._draft = draft
        rows = device.outbox.rows
        most = MOST_DRAFTS if draft is not None else 0
        self._drawn = torch.zeros((2, most, rows.shape[1]), dtype=rows.dtype, device=rows.device)

    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def num_layers(self) -> int:
        """Layers whose keys and values a block holds."""
        return self._device.pool.shape.num_layers

    def eos_token(self) -> int:
        """The id that ends an output."""
        return self._eos_token

    @property
    def num_slots(self) -> int:
        """Most rows of a plan."""
        return self._device.pool.num_slots

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> HFStep:
        """Queue the draft's plans, then the plan's copies and rows, on the device."""
        self._device.pool.check(plan.num_blocks, plan.block_size)
        proposals = self._proposed(plan.drafts)
        launched = self._launch(plan, proposals)
        if not launched.order:
            return HFStep(plan, (), None, None, (), (), launched.evidence)
        before = self._last if any(row.refs for row in plan.rows) else None
        numbers = self._device.outbox.leave(len(launched.order))
        self._last = HFStep(plan, launched.order, before, numbers, *launched[1:])
        return self._last

    def _proposed(self, plans: Sequence[StepPlan]) -> Proposals:
        """What the draft model has drawn. Where it fails the rest of its plans is not run."""
        collected, draft = Collected(plans, self._drawn), self._draft
        for plan in plans:
            if draft is None:
                raise InvalidConfig(
                    "speculation",
                    "the plan is one for a pair of models, and this model has no draft",
                    "Give the model one, or let speculative_method be ngram",
                )
            try:
                draft._device.pool.check(plan.num_blocks, plan.block_size)
                order = draft._launch(plan, NOTHING_PROPOSED).order
            except Exception as fault:  # without drafts there is a token a step all the same
                log.warning("the draft model failed: %r", fault)
                break
            collected.add(inverse(order), draft._device.outbox.rows, draft._device.shares)
            draft._device.shares = []
        return collected.proposals()

    def _launch(self, plan: StepPlan, proposals: Proposals) -> _Launched:
        """Queue the plan's copies and rows; tokens and status of its rows are in the outbox."""
        device = self._device
        pool, sampler = device.pool, device.sampler
        pool.copy(plan.copies)
        width = pool.tables.shape[1]
        batch = batch_of(plan, self._places, pool.num_slots, width, proposals.places)
        self._places = inverse(batch.order)
        evidence = drafted(proposals) if proposals.plans and not batch.verified else None
        if not batch.order:
            return _Launched((), (), (), evidence)
        device.shares = []
        for row in plan.rows:
            if row.bind is not None:
                sampler.bind(row.slot, row.bind)
        sampler.flush()
        rows = [plan.rows[index] for index in batch.order]
        if batch.verified:
            return _Launched(batch.order, *verify(device, batch, rows, self._chunks, proposals))
        if self._decodes is not None and self._decodes.fits(batch, rows):
            ids, logits = self._decodes.run(batch)
            device.observe(batch, rows, ids)
            scores = device.particular(logits, range(len(rows)), rows)
            return _Launched(batch.order, scores, (), evidence)
        return _Launched(batch.order, *device.compute(batch, rows, self._chunks), evidence)


def _refuse_unequal(target: HFModel, draft: HFModel) -> None:
    """Raises InvalidConfig unless the two can be a pair."""
    for name, one, other, remedy in (
        ("draft_model", target.vocab_size(), draft.vocab_size(), "Give a draft of the same one"),
        ("max_num_seqs", target.num_slots, draft.num_slots, "Give both the same"),
    ):
        if one != other:
            what = "tokens in its vocabulary" if name == "draft_model" else "slots"
            raise InvalidConfig(name, f"the draft has {other} {what}, the model {one}", remedy)
