"""Device: everything one GPU (or CPU) holds, and how a batch runs through it.

Owns the order of operations of a step. Knows arrays, not plans. `decode` is the part that a CUDA
graph records: it reads only tensors that keep their place and never asks the host.

    inbox    what the host says of this step          outbox   tokens and status of each row
       │                                                 ▲  │ the step before, where a row names it
       └─► inputs ─► hidden ─► logits of the last ─► draw┘◄─┘
                       │
                       └─ keys and values in their pages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forge.models.hf.attention import Attention, Rows, Span
from forge.models.hf.batch import Batch, Ints
from forge.models.hf.decoder import EVERY, Decoder, PagedStep, Wanted
from forge.models.hf.draw import NAN, draw
from forge.models.hf.pool import KVPool
from forge.models.hf.sampler import Sampler, Share, logprobs
from forge.models.hf.staging import LANES, Arrival, Inbox, Outbox
from forge.models.hf.step import Scores
from forge.seam import Bind, Row

SCORED_ROWS = 256
"""Prompt positions whose logits exist at the same time."""


class Scored(NamedTuple):
    """A row of the batch that gives log probabilities of its prompt.

    positions   of the prompt's tokens that are scored
    tokens      of the batch, whose hidden states score them
    """

    at: int
    positions: range
    tokens: Ints
    bind: Bind


class Through(NamedTuple):
    """Rows that have run up to their hidden states, on the device.

    ids      [tokens] of the batch
    hidden   [wanted, hidden]
    slots    [rows], and `ends`: one past the last position of each
    others   arrays that were sent along
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    others: Sequence[torch.Tensor]


class Recorded(Protocol):
    """Steps up to the hidden state that can be replayed."""

    def size(self, rows: int, tokens: int) -> int | None:
        """Tokens of the smallest recording that has room, or None."""
        ...

    def run(
        self, spans: Sequence[Span], num_decode: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and hidden states of rows whose fields stand in the inbox; None: not this time.

        num_decode   rows at the front that have one token
        """
        ...


class Device:
    """Weights, pages, sampling state and the places through which numbers come and go.

    outbox   token and status of each row of the last batch, whether it asked for a token or not
    shares   what rows of the last batch drew their drafts from, where that is judged
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        pool: KVPool,
        sampler: Sampler,
        *,
        max_num_batched_tokens: int,
        lanes: int = LANES,
    ) -> None:
        """lanes   steps that may be in flight."""
        self.decoder = decoder
        self.attention = attention
        self.pool = pool
        self.sampler = sampler
        device = pool.data.device
        # Rows that share a prefix name its blocks each, so the tables say how many there can be.
        changes = 2 * pool.tables.numel()
        tokens = 16 * max_num_batched_tokens
        self.inbox = Inbox(device, tokens + 8 * pool.num_slots + changes, lanes)
        self.outbox = Outbox(device, pool.num_slots)
        self.shares: list[Share] = []

    def receive(self, batch: Batch, arrays: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        """The arrays are on the device and the batch's table changes are made. One transfer."""
        if not len(batch.cells):
            return self.inbox.send(arrays)
        *views, cells, blocks = self.inbox.send([*arrays, batch.cells, batch.blocks])
        self.pool.tables.view(-1)[cells.long()] = blocks
        return views

    def inputs(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """[tokens] ids: known ones, and those that a row of the step before has sampled."""
        most = self.pool.num_slots
        sampled = self.outbox.rows[0][sources.clamp(max=most - 1)]
        return torch.where(sources < most, sampled, tokens)

    def decode(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        sources: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [rows] and logits [rows, vocabulary] of rows of one token; draws are in the outbox.

        Each argument: [rows] int32.
        """
        ids = self.inputs(tokens, sources)
        where = self.pool.places(slots, positions)
        ends = positions + 1
        self.attention.begin(Rows((), len(ids), slots, ends))
        step = PagedStep(self.pool, self.attention, where)
        logits = self.decoder.logits(self.decoder.hidden(ids, positions, step))
        self.draw(
            logits, slots, ends, self.outbox.rows[0, : len(ids)], self.outbox.rows[1, : len(ids)]
        )
        return ids, logits

    def hidden(
        self,
        attention: Attention,
        token_slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        sources: torch.Tensor,
        wanted: Wanted = EVERY,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [tokens] of rows of any length, whose `attention` has begun, and hidden [wanted]."""
        ids = self.inputs(tokens, sources)
        step = PagedStep(self.pool, attention, self.pool.places(token_slots, positions))
        return ids, self.decoder.hidden(ids, positions, step, wanted)

    def compute(
        self, batch: Batch, rows: Sequence[Row], recorded: Recorded | None
    ) -> tuple[list[Scores], list[Scores]]:
        """Run rows of any length; scores of sampled tokens and of prompts where asked.

        rows       the plan's, in the batch's order
        recorded   steps that can be replayed, where one may fit
        """
        scored = self.scored(batch, rows)
        lasts = batch.firsts + batch.lengths - 1
        wanted = np.concatenate([lasts, *(each.tokens for each in scored)], dtype=np.int32)
        ids, hidden, slots, ends, _ = self.through(batch, rows, recorded, wanted)
        self.observe(batch, rows, ids)
        prompt_scores = self.prompt_scores(scored, hidden[len(rows) :])
        return self._sampled(rows, hidden[: len(rows)], slots, ends), prompt_scores

    def through(
        self,
        batch: Batch,
        rows: Sequence[Row],
        recorded: Recorded | None,
        wanted: Ints,
        others: Sequence[Ints] = (),
        drafts: torch.Tensor | None = None,
    ) -> Through:
        """Run rows of any length up to the hidden states behind the tokens `wanted`.

        others   arrays that go to the device in the same transfer
        drafts   what the draft model has drawn, flat, as batch.drawn counts it
        """
        ends = batch.starts + batch.lengths
        columns = (batch.slots, batch.starts, ends, batch.firsts)
        spans = [Span(*span) for span in zip(*(each.tolist() for each in columns), strict=True)]
        size = len(batch.tokens)
        if recorded is not None:
            size = recorded.size(len(rows), size) or size
        count = batch.num_decode
        arrays = (*chunk_fields_of(batch, size, self.pool), batch.slots, ends, wanted, *others)
        if drafts is None:
            there = self.receive(batch, arrays)
        else:
            *there, drafted, drawn = self.receive(batch, (*arrays, batch.drafted, batch.drawn))
            there[2].index_copy_(0, drafted.long(), drafts.index_select(0, drawn.long()))
        inputs, (slots, ends_there, at_wanted) = there[:4], there[5:8]
        found = recorded.run(spans, count, size) if recorded is not None else None
        if found is not None:
            ids, hidden = found[0], found[1][at_wanted.long()]
        else:
            self.attention.begin(Rows(spans, count, slots[:count], ends_there[:count]))
            of_token, positions, tokens, sources = (each[: len(batch.tokens)] for each in inputs)
            ids, hidden = self.hidden(
                self.attention, of_token, positions, tokens, sources, at_wanted.long()
            )
        return Through(ids, hidden, slots, ends_there, there[8:])

    def _sampled(
        self, rows: Sequence[Row], hidden: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> list[Scores]:
        """Draw for rows that ask for a token; every row leaves a status.

        hidden        [rows, hidden] of each row's last token. It has seen all that the row has, so
                      a number in it that is not finite tells of one anywhere: such a row must not
                      pass on its pages, sampled from or not
        slots, ends   [rows] int32
        """
        count = len(rows)
        self.clear(hidden)
        sampled = [at for at, row in enumerate(rows) if row.num_samples]
        if not sampled:
            return []
        if len(sampled) < count:
            at = self.there(sampled)
            hidden, slots, ends = hidden[at], slots[at], ends[at]
        logits = self.decoder.logits(hidden)
        drawn = torch.zeros((2, len(sampled)), dtype=torch.int32, device=logits.device)
        self.draw(logits, slots, ends, drawn[0], drawn[1])
        if len(sampled) < count:
            self.outbox.rows[:, at] = drawn
        else:
            self.outbox.rows[:, :count] = drawn
        return self.particular(logits, sampled, rows)

    def clear(self, hidden: torch.Tensor) -> None:
        """Each row's status says whether the hidden state of its last token is finite. No token."""
        self.outbox.rows.zero_()
        self.outbox.rows[1, : len(hidden)] = NAN * (~torch.isfinite(hidden)).any(-1)

    def observe(self, batch: Batch, rows: Sequence[Row], ids: torch.Tensor) -> None:
        """The inputs are counted for rows with penalties."""
        sampler = self.sampler
        if sampler.penalising and any(row.slot in sampler.penalising for row in rows):
            sampler.observe_all(rows, ids)

    def particular(
        self, logits: torch.Tensor, sampled: Sequence[int], rows: Sequence[Row]
    ) -> list[Scores]:
        """Rows that ask for more than a plain draw are drawn again; scores where asked.

        logits    [len(sampled), vocabulary]
        sampled   row of the batch for each row of the logits
        """
        sampler = self.sampler
        if not sampler.demanding:
            return []
        # A recorded step draws for every row, also where the plan asks for no token.
        asking = [(i, rows[at]) for i, at in enumerate(sampled) if rows[at].num_samples]
        chosen = [i for i, row in asking if not sampler.plain(row)]
        if not chosen:
            return []
        where = self.there([sampled[i] for i in chosen])
        picked = logits[self.there(chosen)]
        mine = [rows[sampled[i]] for i in chosen]
        choice = sampler.choose(picked, mine)
        self.outbox.rows[0, where] = choice.tokens.to(torch.int32)
        self.outbox.rows[1, where] = choice.status.to(torch.int32)
        for lines_of, shares in choice.shares:
            self.shares.append(Share([sampled[chosen[i]] for i in lines_of], shares))
        asked = [sampler.bound(row.slot).params.logprobs for row in mine]
        lines = [i for i, count in enumerate(asked) if count is not None]
        if not lines:
            return []
        at = self.there(lines)
        counts = [asked[i] or 0 for i in lines]
        numbers = logprobs(picked[at], choice.tokens[at], max(counts))
        return [Scores([sampled[chosen[i]] for i in lines], counts, Arrival(numbers))]

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        ends: torch.Tensor,
        tokens: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        """Write the plain draw of each line of logits, and its status. All but logits: [lines]."""
        seeds, temperatures = self.sampler.seeds, self.sampler.temperatures
        draw(logits, slots, ends, seeds, temperatures, tokens, status)

    def scored(self, batch: Batch, rows: Sequence[Row]) -> list[Scored]:
        """Rows that give log probabilities of their prompt."""
        if not self.sampler.scoring:
            return []
        found = []
        for at, row in enumerate(rows):
            positions = self.sampler.scored(row)
            if positions:
                first = int(batch.firsts[at]) + positions[0] - 1 - row.start
                tokens: Ints = np.arange(first, first + len(positions), dtype=np.int32)
                found.append(Scored(at, positions, tokens, self.sampler.bound(row.slot)))
        return found

    def prompt_scores(self, scored: Sequence[Scored], hidden: torch.Tensor) -> list[Scores]:
        """Scores of the prompt's own tokens, some hundred positions of logits at a time."""
        scores: list[Scores] = []
        first = 0
        for at, positions, _, bind in scored:
            count = bind.params.prompt_logprobs or 0
            for start in range(0, len(positions), SCORED_ROWS):
                part = positions[start : start + SCORED_ROWS]
                logits = self.decoder.logits(hidden[first : first + len(part)])
                first += len(part)
                tokens = self.there([bind.history[p] for p in part])
                arrival = Arrival(logprobs(logits, tokens, count))
                scores.append(Scores([at] * len(part), [count] * len(part), arrival))
        return scores

    def there(self, numbers: Sequence[int]) -> torch.Tensor:
        """The numbers as int64 on the device, without waiting for it."""
        host = torch.tensor(numbers, dtype=torch.int64)
        device = self.pool.data.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def inverse(order: Sequence[int]) -> list[int]:
    """Where each row of the plan stands in the batch."""
    places = [0] * len(order)
    for at, index in enumerate(order):
        places[index] = at
    return places


def fields_of(batch: Batch, size: int, pool: KVPool) -> tuple[Ints, Ints, Ints, Ints]:
    """Slot, position, token and source of each token, filled up to `size` with scratch tokens."""
    return (
        _filled(batch.token_slots, size, pool.scratch_slot),
        _filled(batch.positions, size, 0),
        _filled(batch.tokens, size, 0),
        _filled(batch.sources, size, pool.num_slots),
    )


def chunk_fields_of(batch: Batch, size: int, pool: KVPool) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The same, and positions that each row of one token reads: these stand first, 0 behind."""
    reads = batch.starts[: batch.num_decode] + 1
    return (*fields_of(batch, size, pool), _filled(reads, size, 0))


def _filled(array: Ints, size: int, filler: int) -> Ints:
    if len(array) == size:
        return array
    result: Ints = np.full(size, filler, np.int32)
    result[: len(array)] = array
    return result
