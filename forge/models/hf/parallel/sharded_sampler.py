"""Samplers of several ranks: every rank returns the same tokens, by construction.

Owns how ranks agree. The arithmetic is Sampler's.

    rank 0   logits of ids 0 ..     ─ score = logit / T + noise(seed, position, id) ─ best ┐
    rank 1   logits of ids V/2 ..   ─ score = logit / T + noise(seed, position, id) ─ best ┤
                                                                                           │
    both     16 bytes a row from each rank ─► the best score; of equal ones the lower id ◄─┘

    rows with filters, penalties, masks or log probabilities: the logits of these rows are gathered,
    every rank samples them whole, and rank 0's tokens are everyone's

Always true: noise depends on the id in the whole vocabulary and not on the rank, so tokens are
those of one rank with the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from forge.models.hf.buffers import int64_array, upload
from forge.models.hf.parallel.best_tokens import BestTokens, create_merge
from forge.models.hf.parallel.communicator import Communicator
from forge.models.hf.parallel.sharding import Shard, VocabShard
from forge.models.hf.sampling.adjusted_chunks import SamplingChunk
from forge.models.hf.sampling.logprobs import compute_listed_logprobs
from forge.models.hf.sampling.sampler import (
    Sampler,
    SamplerOutput,
    create_kernels,
    select_kernels,
)
from forge.models.hf.sampling.slot_params import SlotParams
from forge.models.hf.sampling.slot_sampling import sample_slots
from forge.seam import Bind, Row


class AgreedSampler(Sampler):
    """Sampler of logits that every rank has whole: rank 0's tokens are everyone's.

    Distributions of drafts stay each rank's own. Rank 0 alone accepts drafts, by its own p and q,
    and the next plan has the accepted tokens: nothing that another rank computes depends on its q.
    """

    def __init__(
        self, communicator: Communicator, num_slots: int, vocab_size: int, device: torch.device
    ) -> None:
        super().__init__(num_slots, vocab_size, device)
        self._communicator = communicator

    def sample_slots(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out_tokens: Tensor,
        out_status: Tensor,
    ) -> None:
        """Sample a token for each row from its slot's entry, and replace it by rank 0's."""
        super().sample_slots(logits, slots, positions, out_tokens, out_status)
        sampled = torch.stack((out_tokens, out_status))
        self._communicator.broadcast(sampled)
        out_tokens.copy_(sampled[0])
        out_status.copy_(sampled[1])

    def sample(
        self, logits: Tensor, rows: Sequence[Row], logits_rows: Sequence[int] | None = None
    ) -> SamplerOutput:
        """Sample the token after each row, and replace it by rank 0's."""
        output = super().sample(logits, rows, logits_rows)
        self._communicator.broadcast(output.sampled)
        return output


class ShardedSampler(AgreedSampler):
    """Sampler of logits of which each rank has those of its ids, [rows, VocabShard.size]."""

    def __init__(
        self, communicator: Communicator, num_slots: int, vocab_size: int, device: torch.device
    ) -> None:
        super().__init__(communicator, num_slots, vocab_size, device)
        shard = Shard(communicator.rank, communicator.world_size)
        self._vocab = VocabShard.of(shard, vocab_size)
        self._shard_kernels = create_kernels(self._vocab.size, device)
        self._merge_best = create_merge(shard.world_size, device)

    def _build_slot_params(self, bind: Bind) -> SlotParams:
        """Return the bind's parameters. `sample` takes rows with filters: they need all logits."""
        slot_params = super()._build_slot_params(bind)
        if slot_params.has_filters:
            return replace(slot_params, adjusted_until=inf)
        return slot_params

    def sample_slots(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out_tokens: Tensor,
        out_status: Tensor,
    ) -> None:
        """Sample a token for each row from its slot's entry, over the ids of all ranks."""
        best = BestTokens.of(torch.empty(4 * len(logits), dtype=torch.int32, device=logits.device))
        kernels = select_kernels(self._shard_kernels, logits)
        sample = sample_slots if kernels is None else kernels.sample
        sample(
            logits,
            slots,
            positions,
            self.unadjusted_table,
            best.tokens,
            best.status,
            first_token=self._vocab.first,
            out_scores=best.scores,
        )
        gathered = self._communicator.all_gather(best.buffer)
        self._merge_best(gathered, out_tokens, out_status)

    def sample(
        self, logits: Tensor, rows: Sequence[Row], logits_rows: Sequence[int] | None = None
    ) -> SamplerOutput:
        """Sample the token after each row from its whole logits. Rank 0's are everyone's."""
        indices = range(len(rows)) if logits_rows is None else logits_rows
        return super().sample(self._gather(logits, indices), rows)

    def compute_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, logits_rows: Tensor | None = None
    ) -> Tensor:
        """Return `logprobs.compute_logprobs` of whole rows of the logits."""
        if logits_rows is not None:
            logits = logits.index_select(0, logits_rows)
        return super().compute_logprobs(self._gather_all(logits), tokens, num_top)

    def compute_listed_logprobs(
        self, logits: Tensor, tokens: Tensor, listed: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """Return `logprobs.compute_listed_logprobs` of whole rows of the logits."""
        whole = self._gather_all(logits.index_select(0, logits_rows))
        return compute_listed_logprobs(whole, tokens, listed)

    def adjusted_chunks(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        row_indices: Sequence[int],
        logits_rows: Sequence[int] | None = None,
    ) -> Iterator[SamplingChunk]:
        """Return the rows of `row_indices` in chunks, from their whole logits."""
        if not row_indices:
            return iter(())
        indices = range(len(rows)) if logits_rows is None else logits_rows
        whole = self._gather(logits, [indices[index] for index in row_indices])
        places = dict(zip(row_indices, range(len(row_indices)), strict=True))
        return super().adjusted_chunks(
            whole, rows, row_indices, [places.get(index, 0) for index in range(len(rows))]
        )

    def _gather(self, logits: Tensor, logits_rows: Sequence[int]) -> Tensor:
        """Return the whole logits of these rows, [len(logits_rows), V]."""
        if list(logits_rows) != list(range(len(logits))):
            (index,) = upload(logits.device, int64_array(logits_rows))
            logits = logits.index_select(0, index)
        return self._gather_all(logits)

    def _gather_all(self, logits: Tensor) -> Tensor:
        """Return the whole logits of all rows, [rows, V]."""
        vocab = self._vocab
        padded = pad(logits, (0, vocab.width - vocab.size), value=-inf)
        parts = self._communicator.all_gather(padded)
        return parts.transpose(0, 1).flatten(1)[:, : vocab.vocab_size]
