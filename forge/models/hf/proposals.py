"""Proposals: what a draft model has drawn for one plan, kept on the device.

Owns how a draft is found by its name. Knows no rule: whether a draft is good is judged elsewhere.

    plan.drafts    0: rows A B C     1: rows A C     2: rows C        2 was not run: it failed
    numbers        0: [ .. ]         1: [ .. ]                        token and status, a batch row
    parts, lines   what each was drawn from, where rejection will ask

The host knows where each draft stands and, until the step is over, not which token it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.draw import FINE, NAN
from forge.models.hf.sampler import Share
from forge.models.hf.upload import ids, upload
from forge.seam import Draft, StepPlan


class Proposals(NamedTuple):
    """Drafts of one plan.

    plans     of the draft model
    places    of those that it ran: batch row of each row
    numbers   int32 [2, most plans, slots]: token and status
    parts     float64 [.., vocabulary] each: what drafts were drawn from, where that is judged
    lines     part and line in it, by plan and row of its batch
    """

    plans: Sequence[StepPlan]
    places: Sequence[Sequence[int]]
    numbers: Tensor
    parts: Sequence[Tensor]
    lines: Mapping[tuple[int, int], tuple[int, int]]

    @property
    def sent(self) -> Tensor:
        """Numbers of the plans that were run, for `Told`."""
        return self.numbers[:, : len(self.places)]

    def light(self) -> Proposals:
        """Without what drafts were drawn from: that is much memory, and needed once."""
        return self._replace(parts=(), lines={})

    def exists(self, draft: Draft) -> bool:
        """It is known, or the draft model has run its plan."""
        return isinstance(draft, int) or draft.plan < len(self.places)

    def q(self, drafts: Sequence[Draft], tokens: Tensor, vocab_size: int) -> Tensor:
        """What each draft was drawn from, float64 [n, vocab_size]; all of it where it is known.

        tokens   int64 [n]  the drafts, on the device
        """
        shares = torch.zeros(len(drafts), vocab_size, dtype=torch.float64, device=tokens.device)
        known = [at for at, draft in enumerate(drafts) if isinstance(draft, int)]
        if known:
            (at,) = upload(tokens.device, ids(known))
            shares.view(-1).index_fill_(0, at * vocab_size + tokens.index_select(0, at), 1.0)
        found: dict[int, tuple[list[int], list[int]]] = {}
        for at, draft in enumerate(drafts):
            if not isinstance(draft, int):
                part, line = self.lines[draft.plan, self.places[draft.plan][draft.row]]
                lines, places = found.setdefault(part, ([], []))
                lines.append(line)
                places.append(at)
        for part, (lines, places) in found.items():
            line_ids, place_ids = upload(tokens.device, ids(lines), ids(places))
            shares.index_copy_(0, place_ids, self.parts[part].index_select(0, line_ids))
        return shares

    def fine(self, drafts: Sequence[Draft]) -> Tensor:
        """bool [n] on the device: the draft is one, for the model has not failed."""
        device, slots = self.numbers.device, self.numbers.shape[2]
        fine = torch.ones(len(drafts), dtype=torch.bool, device=device)
        named = [
            (at, draft.plan * slots + self.places[draft.plan][draft.row])
            for at, draft in enumerate(drafts)
            if not isinstance(draft, int)
        ]
        if named:
            at, cells = upload(device, *(ids(column) for column in zip(*named, strict=True)))
            fine.index_copy_(0, at, self.numbers[1].view(-1).index_select(0, cells) == FINE)
        return fine


NOTHING_PROPOSED = Proposals((), (), torch.zeros(2, 0, 0, dtype=torch.int32), (), {})


class Collected:
    """Gathers Proposals while the draft model runs its plans, one after the other.

    numbers   int32 [2, most plans, slots], to be written over
    """

    def __init__(self, plans: Sequence[StepPlan], numbers: Tensor) -> None:
        self._plans = plans
        self._numbers = numbers
        self._places: list[Sequence[int]] = []
        self._parts: list[Tensor] = []
        self._lines: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, places: Sequence[int], numbers: Tensor, shares: Sequence[Share]) -> None:
        """The next plan was run: batch row of each row, token and status [2, slots], shares."""
        plan = len(self._places)
        self._numbers[:, plan].copy_(numbers)
        self._places.append(places)
        for share in shares:
            for line, row in enumerate(share.rows):
                self._lines[plan, row] = (len(self._parts), line)
            self._parts.append(share.shares)

    def proposals(self) -> Proposals:
        """Of the plans that were run."""
        return Proposals(self._plans, self._places, self._numbers, self._parts, self._lines)


class Told:
    """What the host has been told of a plan's drafts.

    numbers   Proposals.sent, as they arrived
    """

    def __init__(self, proposals: Proposals, numbers: Sequence[Sequence[Sequence[int]]]) -> None:
        self._plans = proposals.plans
        self._places = proposals.places
        self._tokens, self._status = numbers

    def tokens(self, drafts: Sequence[Draft]) -> list[int]:
        """The drafts, up to the first that the draft model failed to give."""
        found = []
        for draft in drafts:
            if isinstance(draft, int):
                found.append(draft)
                continue
            plan, row = draft
            if plan >= len(self._places):
                break
            at = self._places[plan][row]
            if self._status[plan][at] != FINE:
                break
            found.append(self._tokens[plan][at])
        return found

    @property
    def undrafted(self) -> tuple[int, ...]:
        """Sequences for which the draft model failed, each once."""
        failed: list[int] = []
        for index, plan in enumerate(self._plans):
            if index >= len(self._places):
                failed += [row.seq_id for row in plan.rows]
                continue
            status = self._status[index]
            if not any(status):  # all are FINE, as nearly always
                continue
            for row, at in zip(plan.rows, self._places[index], strict=True):
                if status[at] == NAN or (row.num_samples and status[at] != FINE):
                    failed.append(row.seq_id)
        return tuple(dict.fromkeys(failed))
