"""Sampler: forge.sampling for a batch of rows, on the device that holds the logits.

Owns what choosing needs to remember of each slot: its parameters on the host, its seed and
temperature in tables that a CUDA graph reads, the tokens it has seen. Knows no plan, pool or model.

    logits ─ mask, allowed ids ─ bias ─ min_tokens ─ penalties ─ / T ─┬─ top-k ─ top-p ─ min-p
      │       one upload says which cells of which rows               └─ + noise ─ argmax ─► tokens
      └─ NaN, +inf, nothing possible ──────────────────────────────────────────────────────► status

The order, the ties and the noise are those of sampling.py, in float64. Greedy is no branch: it is
scale 1 and noise times 0. Nothing here waits for a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge import sampling
from forge.models.hf.asked import Asked, Numbers, asked_of
from forge.models.hf.draw import (
    CHUNK,
    FINE,
    IMPOSSIBLE,
    INFINITE,
    NAN,
    RULED_OUT,
    draw_keys,
    gumbel,
    offset_of,
    status_of,
)
from forge.models.hf.ranks import SELECTED, leading, most_likely
from forge.models.hf.seen import Seen
from forge.models.hf.upload import ids, joined, upload
from forge.request import TokenLogprob
from forge.seam import Bind, Row

_ERRORS = {
    NAN: "the model's logits are not finite: NaN",
    INFINITE: "the model's logits are not finite: their maximum is inf",
    IMPOSSIBLE: "the model's logits are not finite: their maximum is -inf",
    RULED_OUT: sampling.RULED_OUT,
}


class Share(NamedTuple):
    """What some rows drew their drafts from.

    rows     which they are
    shares   float64 [len(rows), V]  probability of each token
    """

    rows: Sequence[int]
    shares: Tensor


class Choice(NamedTuple):
    """What a batch of rows sampled, on the device.

    tokens   int64 [R]  0 where the row failed
    status   int8 [R]   draw.FINE, or what `error_text` explains
    shares   of rows whose drafts are judged by rejection
    """

    tokens: Tensor
    status: Tensor
    shares: Sequence[Share]


class _Ask(NamedTuple):
    """What a chunk of rows asks for. Tensors are on the device; n rows, empty where nobody asks.

    numbers    [n, 5] float64, the columns of Numbers
    slots      [n], positions [n] and offsets [n]: the key of each row's draw
    guided     rows with a mask; `masks` theirs, 64 ids a word
    allowing   rows with allowed ids; `allowed` the cells of the chunk's flat logits they allow
    biased     cells, and what is added to each
    masked     cells that min_tokens masks, and the row each is in
    penalised  rows, their slots, and repetition, presence and frequency [m, 3]
    drafted    rows of those, once for each draft before their position; Seen's cell of each draft
    """

    numbers: Tensor
    slots: Tensor
    positions: Tensor
    offsets: Tensor
    guided: Tensor
    masks: Tensor
    allowing: Tensor
    allowed: Tensor
    biased: Tensor
    biases: Tensor
    masked: Tensor
    masked_rows: Tensor
    penalised: Tensor
    penalised_slots: Tensor
    drafted: Tensor
    drafted_cells: Tensor
    penalties: Tensor


class Part(NamedTuple):
    """Rows that are worked on at once. n rows.

    picks    which they are, and on the device as `index`
    x        [n, V] float64, what sampling.adjusted gives
    status   int8 [n]
    order    leading tokens whose order some row's filter needs; 0 sorts nothing
    noisy    some row is not greedy
    """

    picks: Sequence[int]
    index: Tensor
    states: Sequence[Asked]
    ask: _Ask
    x: Tensor
    status: Tensor
    order: int
    noisy: bool


class Sampler:
    """Chooses tokens on one device, and remembers what that takes.

    seeds          int64 [num_slots + 1]    the 64 bits of each slot's seed
    temperatures   float64 [num_slots + 1]  0 is greedy
    The last cell of each is scratch, for rows that only fill a batch. Memory for penalties is taken
    when a sequence first asks for them: see Seen.

    demanding    slots whose draw may need more than the two tables: ask `plain`
    penalising   slots whose penalties count inputs: call `observe`
    scoring      slots that ask for the log probabilities of their prompt
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, Asked] = {}
        self.demanding: set[int] = set()
        self.penalising: set[int] = set()
        self.scoring: set[int] = set()
        self._bound: dict[int, tuple[int, float]] = {}
        self._table = torch.zeros(2, num_slots + 1, dtype=torch.int64, device=device)
        self.seeds = self._table[0]
        self.temperatures = self._table[1].view(torch.float64)
        self._seen = Seen(num_slots, vocab_size, device)

    def bind(self, slot: int, bind: Bind) -> None:
        """Slot `slot` belongs to a new sequence; its tables follow with the next `flush`.

        History is counted where penalties ask: before prompt_len it is prompt, then output.
        """
        state = self._slots[slot] = asked_of(bind, self._vocab_size)
        params = bind.params
        for slots, asks in (
            (self.demanding, state.plain_from > 0),
            (self.penalising, params.penalises),
            (self.scoring, params.prompt_logprobs is not None),
        ):
            slots.discard(slot)
            if asks:
                slots.add(slot)
        self._bound[slot] = (bind.seed, 0.0 if params.greedy else params.temperature)
        self._seen.bind(slot, bind)

    def bound(self, slot: int) -> Bind:
        """What the sequence in the slot asked for."""
        return self._slots[slot].bind

    def scored(self, row: Row) -> range:
        """Positions of the prompt whose log probabilities this row's inputs give."""
        if row.slot not in self.scoring:
            return range(0)
        return range(row.start + 1, min(row.end, self.bound(row.slot).prompt_len - 1) + 1)

    def flush(self) -> None:
        """The seeds and temperatures of slots bound since the last flush are on the device."""
        if not self._bound:
            return
        seeds = np.array([seed for seed, _ in self._bound.values()], np.uint64).view(np.int64)
        heat = np.array([heat for _, heat in self._bound.values()], np.float64).view(np.int64)
        slots, cells = upload(self._device, ids(list(self._bound)), np.concatenate((seeds, heat)))
        self._table.index_copy_(1, slots, cells.view(2, -1))
        self._bound.clear()

    def observe(self, row: Row, inputs: Tensor) -> None:
        """Penalties know the row's inputs, [n] ids at positions [row.start, row.end)."""
        self.observe_all((row,), inputs)

    def observe_all(self, rows: Sequence[Row], inputs: Tensor) -> None:
        """Penalties know the rows' inputs, row behind row in `inputs`.

        Positions that a slot was told with its history are not counted twice. One upload and three
        kernels for any number of rows; nothing where no row penalises.
        """
        self._seen.observe(rows, inputs)

    def plain(self, row: Row) -> bool:
        """The token behind this row needs its slot's cells of the two tables and nothing else."""
        return row.end >= self._slots[row.slot].plain_from

    def choose(
        self, logits: Tensor, rows: Sequence[Row], among: Sequence[int] | None = None
    ) -> Choice:
        """The token behind each row, as sampling.adjusted and sampling.choose have it.

        logits   [R, vocab_size]  any float dtype, of the last position of each of `rows`
        among    rows to choose for, where not all; what others get means nothing
        A row that cannot be sampled fails alone. Extra memory: under 1 GB at any R.
        """
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        status = torch.empty(len(rows), dtype=torch.int8, device=self._device)
        shares: list[Share] = []
        for part in self.parts(logits, rows, range(len(rows)) if among is None else among):
            x = part.x
            if part.noisy:
                x = self.filtered(part)
                shares += self._shares(part, x)
                keys = self.keys(part, part.ask.offsets)
                x.add_(gumbel(keys, x.shape[1]).mul_(part.ask.numbers[:, 1:2]))
            chosen = x.argmax(1).masked_fill_(part.status != FINE, 0)
            tokens.index_copy_(0, part.index, chosen)
            status.index_copy_(0, part.index, part.status)
        return Choice(tokens, status, shares)

    def parts(self, logits: Tensor, rows: Sequence[Row], among: Sequence[int]) -> Iterator[Part]:
        """Rows `among` all, in parts that fit into memory, as sampling.adjusted has them."""
        self.flush()
        for picks in self._chunks(rows, among):
            states = [self._slots[rows[pick].slot] for pick in picks]
            index, ask = self._ask(picks, [rows[pick] for pick in picks], states)
            x = logits.index_select(0, index).double()
            status = status_of(x.amax(1))
            self._adjust(x, ask)
            if ask.allowing.numel() or ask.guided.numel():
                ruled_out = (status == FINE) & (x.amax(1) == -inf)
                status.masked_fill_(ruled_out, RULED_OUT)
            order = max(state.order for state in states)
            noisy = any(state.numbers.noise for state in states)
            yield Part(picks, index, states, ask, x, status, order, noisy)

    def keys(self, part: Part, offsets: Tensor | int) -> Tensor:
        """Keys of draws behind the part's rows, for purposes with these offsets."""
        seeds = self.seeds.index_select(0, part.ask.slots)
        return draw_keys(seeds, part.ask.positions, offsets)

    def _shares(self, part: Part, x: Tensor) -> list[Share]:
        """What rows that propose draw from, where it is asked for later."""
        mine = [at for at, state in enumerate(part.states) if state.purpose == sampling.DRAFT]
        if not mine:
            return []
        (at,) = upload(self._device, ids(mine))
        return [Share([part.picks[i] for i in mine], x.index_select(0, at).softmax(1))]

    def _chunks(self, rows: Sequence[Row], among: Sequence[int]) -> Iterator[list[int]]:
        """Rows by what their filters cost, at most as many at once as memory allows."""

        def order(at: int) -> int:
            return self._slots[rows[at].slot].order

        most = max(1, CHUNK // self._vocab_size)
        by_order = sorted(among, key=order)
        for _, group in groupby(by_order, key=lambda at: (order(at) > 0) + (order(at) > SELECTED)):
            picks = list(group)
            for start in range(0, len(picks), most):
                yield picks[start : start + most]

    def _ask(
        self, picks: Sequence[int], rows: Sequence[Row], states: Sequence[Asked]
    ) -> tuple[Tensor, _Ask]:
        size = self._vocab_size
        listed = list(enumerate(states))
        masks = [(at, row.masks[0]) for at, row in enumerate(rows) if row.masks]
        allowing = [at for at, s in listed if s.bind.params.allowed_token_ids is not None]
        biasing = [at for at, s in listed if len(s.biased)]
        masking = [at for at, s in listed if s.masks(rows[at].end)]
        penalised = [at for at, s in listed if s.bind.params.penalises]
        drafted = [self._seen.drafted(rows[at]) for at in penalised]
        asked = [states[at].bind.params for at in penalised]
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in asked]
        index, numbers, *tensors, flat_penalties = upload(
            self._device,
            ids(picks),
            np.array([s.numbers for s in states], np.float64).reshape(-1),
            ids([row.slot for row in rows]),
            ids([row.end for row in rows]),
            ids([offset_of(s.purpose) for s in states]),
            ids([at for at, _ in masks]),
            np.frombuffer(b"".join(_words(mask, size) for _, mask in masks), np.int64),
            ids(allowing),
            joined(states[at].allowed + at * size for at in allowing),
            joined(states[at].biased + at * size for at in biasing),
            joined((states[at].biases for at in biasing), np.float64),
            joined(states[at].masked + at * size for at in masking),
            np.repeat(ids(masking), ids([len(states[at].masked) for at in masking])),
            ids(penalised),
            ids([rows[at].slot for at in penalised]),
            np.repeat(ids(range(len(drafted))), ids([len(cells) for cells in drafted])),
            joined(np.arange(cells.start, cells.stop) for cells in drafted),
            np.array(penalties, np.float64).reshape(-1),
        )
        shaped = (numbers.view(-1, len(Numbers._fields)), *tensors, flat_penalties.view(-1, 3))
        return index, _Ask._make(shaped)

    def _adjust(self, x: Tensor, ask: _Ask) -> None:
        """sampling.adjusted, in place."""
        flat = x.view(-1)
        if ask.guided.numel():
            bits = torch.arange(64, device=x.device)
            words = ask.masks.view(len(ask.guided), -1, 1)
            possible = (words >> bits & 1).view(len(ask.guided), -1)[:, : x.shape[1]]
            rows = x.index_select(0, ask.guided).masked_fill_(possible == 0, -inf)
            x.index_copy_(0, ask.guided, rows)
        if ask.allowing.numel():
            kept = flat.index_select(0, ask.allowed)
            x.index_fill_(0, ask.allowing, -inf)
            flat.index_copy_(0, ask.allowed, kept)
        if ask.biased.numel():
            flat.index_add_(0, ask.biased, ask.biases)
        if ask.masked.numel():
            kept = flat.index_select(0, ask.masked)
            flat.index_fill_(0, ask.masked, -inf)
            alive = (x.amax(1) > -inf).index_select(0, ask.masked_rows)
            flat.index_copy_(0, ask.masked, kept.masked_fill_(alive, -inf))
        if ask.penalised.numel():
            y = x.index_select(0, ask.penalised)
            drafted = (ask.drafted, ask.drafted_cells)
            y = self._seen.penalised(y, ask.penalised_slots, ask.penalties, drafted)
            x.index_copy_(0, ask.penalised, y)

    def filtered(self, part: Part) -> Tensor:
        """The part's `x`, changed to what sampling.candidates has; -inf where it has nothing."""
        x = part.x
        scale, _, reach, top_p, log_min_p = part.ask.numbers.unsqueeze(2).unbind(1)
        x.mul_(scale)
        outside = x < x.amax(1, keepdim=True) + log_min_p
        if part.order:
            outside.logical_or_(leading(x, reach.long(), top_p, part.order).logical_not_())
        return x.masked_fill_(outside, -inf)


def _words(mask: bytes, vocab_size: int) -> bytes:
    """The mask in whole words of 64 ids, as many as the vocabulary needs; new bits are 0."""
    size = -(-vocab_size // 64) * 8
    return mask[:size].ljust(size, b"\0")


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Log probabilities under raw logits, in one tensor that goes to the host in one copy.

    logits   [n, V]  any float dtype
    tokens   [n]     the token of each row
    float64 [n, 2 + 2 * min(count, V)]: token, its log probability, the most likely ids, theirs.
    Read it with `read_logprobs`. NaN where a row's logits are not usable.
    """
    size = logits.shape[1]
    count = min(count, size)
    result = torch.empty(len(logits), 2 + 2 * count, dtype=torch.float64, device=logits.device)
    step = max(1, CHUNK // size)
    for start in range(0, len(logits), step):
        lines = result[start : start + step]
        x = logits[start : start + step].double()
        at = tokens[start : start + step].long()[:, None]
        top = x.amax(1, keepdim=True)
        total = (x - top).exp_().sum(1, keepdim=True).log_().add_(top)
        lines[:, :1] = at
        lines[:, 1:2] = x.gather(1, at) - total
        if count:
            likely, values = most_likely(x, count)
            lines[:, 2 : 2 + count] = likely
            lines[:, 2 + count :] = values - total
    return result


def read_logprobs(lines: Tensor) -> tuple[TokenLogprob, ...]:
    """What `logprobs` wrote, from its copy on the host."""
    count = (lines.shape[1] - 2) // 2
    return tuple(
        TokenLogprob(
            int(token),
            logprob,
            tuple(zip(map(int, top[:count]), top[count:], strict=True)),
        )
        for token, logprob, *top in lines.tolist()
    )


def error_text(status: int) -> str:
    """Why a row with this status has no token, in the words of forge.sampling."""
    return _ERRORS[status]
