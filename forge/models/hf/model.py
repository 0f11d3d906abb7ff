"""HFModel: a transformers model behind the seam's four methods.

Owns which way a plan is run. What it stands on has a file each: batch (the plan as arrays), device
(the order of a step), graphs (decode steps recorded), step (from numbers to outputs).

    forward(plan)                                             result()
      copies ─ binds ─ one transfer ─ table changes             wait for this step's numbers
        ├─ every row one token, a graph fits:  one launch
        └─ otherwise:  inputs ─ hidden (a graph, if small) ─ logits of the last tokens ─ draw
      tokens stay on the device for the next step; a copy leaves for the host

Nothing here waits for the device: a step that needs a token of the step before names the place
where that step leaves it (`sources`), and the order of the stream does the rest.
"""

from __future__ import annotations

import torch

from forge.models.hf.batch import batch_of
from forge.models.hf.device import Device, inverse
from forge.models.hf.graphs import ChunkGraphs, DecodeGraphs
from forge.models.hf.step import HFStep, Scores
from forge.seam import StepPlan


class HFModel:
    """Serves a causal language model of transformers.

    decodes   decode steps that are recorded, or None
    chunks    other small steps that are recorded, or None
    """

    def __init__(
        self,
        device: Device,
        *,
        vocab_size: int,
        eos_token: int,
        decodes: DecodeGraphs | None = None,
        chunks: ChunkGraphs | None = None,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._eos_token = eos_token
        self._decodes = decodes
        self._chunks = chunks
        self._places: list[int] = []
        self._last: HFStep | None = None

    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def num_layers(self) -> int:
        """Layers whose keys and values a block holds."""
        return self._device.pool.shape.num_layers

    def eos_token(self) -> int:
        """The id that ends an output."""
        return self._eos_token

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> HFStep:
        """Queue the plan's copies and rows on the device."""
        device = self._device
        pool, sampler = device.pool, device.sampler
        pool.check(plan.num_blocks, plan.block_size)
        pool.copy(plan.copies)
        batch = batch_of(plan, self._places, pool.num_slots, pool.tables.shape[1])
        self._places = inverse(batch.order)
        if not batch.order:
            return HFStep(plan, (), None, None, (), ())
        for row in plan.rows:
            if row.bind is not None:
                sampler.bind(row.slot, row.bind)
        sampler.flush()
        rows = [plan.rows[index] for index in batch.order]
        if self._decodes is not None and self._decodes.fits(batch, rows):
            ids, logits = self._decodes.run(batch)
            device.observe(batch, rows, ids)
            scores = device.particular(logits, range(len(rows)), rows)
            prompt_scores: list[Scores] = []
        else:
            scores, prompt_scores = device.compute(batch, rows, self._chunks)
        before = self._last if any(row.refs for row in rows) else None
        numbers = device.outbox.leave(len(rows))
        self._last = HFStep(plan, batch.order, before, numbers, scores, prompt_scores)
        return self._last
