"""Verification on the device: rows with drafts are sampled at each of their last positions.

Owns which positions these are and what is asked of each. Decides nothing: what it sends to the host
is evidence, for forge.models.hf.verdict.

    row      x  d1 d2      inputs; d1 and d2 are drafts
    lines    0  1  2       each as the row that would compute up to there, if tokens came singly
    told     t0 t1 t2      coupled: the target's own draws. Rejection: p, q and a residual draw for
                           each draft, and the draw behind the last

Rows without drafts that run in the same step are lines too: logits are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from forge.models.hf.batch import Batch, Ints
from forge.models.hf.device import Device, Recorded
from forge.models.hf.proposals import Proposals
from forge.models.hf.sampler import logprobs
from forge.models.hf.staging import Arrival
from forge.models.hf.step import Scores
from forge.models.hf.trials import FIELDS, tell_trials
from forge.models.hf.verdict import NO_LINES, Evidence, Lines
from forge.seam import Bind, Row


def lines_of(
    batch: Batch, rows: Sequence[Row], binds: Mapping[int, Bind], proposals: Proposals
) -> Lines:
    """Lines of the batch.

    rows    in the batch's order
    binds   of those in batch.verified, by their place
    """
    plain = [at for at, row in enumerate(rows) if row.num_samples and not row.drafts]
    sizes = [1] * len(plain) + [len(rows[at].drafts) + 1 for at in batch.verified]
    counts: Ints = np.array(sizes, np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    of: Ints = np.repeat(np.array(plain + batch.verified, np.int32), counts)
    # How many of the row's positions are behind the line's.
    behind = np.repeat(ends, counts) - np.arange(1, len(of) + 1, dtype=np.int32)
    firsts = dict(zip(batch.verified, (ends - counts)[len(plain) :].tolist(), strict=True))
    tried = {
        line: draft
        for at, first in firsts.items()
        if binds[at].rejects
        for line, draft in enumerate(rows[at].drafts, first)
        if proposals.exists(draft)
    }
    return Lines(
        of.tolist(),
        batch.slots[of],
        (batch.starts + batch.lengths)[of] - behind,
        (batch.firsts + batch.lengths)[of] - behind - 1,
        len(plain),
        firsts,
        tried,
    )


def _singles(rows: Sequence[Row], lines: Lines) -> list[Row]:
    """Each line as a row of one token that ends there, for a sampler."""
    singles = []
    for at, end in zip(lines.rows, lines.ends.tolist(), strict=True):
        row = rows[at]
        masks = row.masks
        if masks:
            sample = end - row.end + len(row.drafts)
            masks = masks[sample : sample + 1]
        singles.append(Row(row.seq_id, row.epoch, row.slot, end - 1, (0,), masks=masks))
    return singles


def verify(
    device: Device,
    batch: Batch,
    rows: Sequence[Row],
    recorded: Recorded | None,
    proposals: Proposals,
) -> tuple[list[Scores], list[Scores], Evidence]:
    """Run rows of any length of which some have drafts: as Device.compute, and the evidence."""
    sampler, count = device.sampler, len(rows)
    binds = {at: sampler.bound(rows[at].slot) for at in batch.verified}
    lines = lines_of(batch, rows, binds, proposals)
    scored = device.scored(batch, rows)
    lasts = batch.firsts + batch.lengths - 1
    wanted = np.concatenate([lasts, lines.tokens, *(s.tokens for s in scored)], dtype=np.int32)
    others = (lines.slots, lines.ends, lines.tokens)
    drafts = proposals.numbers[0].view(-1) if len(batch.drafted) else None
    through = device.through(batch, rows, recorded, wanted, others, drafts)
    device.observe(batch, rows, through.ids)
    first_scored = count + len(lines.rows)
    prompt_scores = device.prompt_scores(scored, through.hidden[first_scored:])
    logits = device.decoder.logits(through.hidden[count:first_scored])
    drawn = torch.zeros((2, len(lines.rows)), dtype=torch.int32, device=logits.device)
    device.draw(logits, through.others[0], through.others[1], drawn[0], drawn[1])
    told = torch.zeros((len(lines.rows), FIELDS), dtype=torch.float64, device=logits.device)
    singles = _singles(rows, lines) if sampler.demanding or lines.tried else []
    _draw_again(device, logits, lines, singles, drawn)
    told[:, :2] = drawn.t()
    scores: list[Scores] = []
    if singles:
        behind = (through.others[2].long() + 1).clamp_(max=len(through.ids) - 1)
        following = through.ids.index_select(0, behind).long()
        tell_trials(sampler, logits, singles, lines.tried, following, proposals, told)
        scores = _scores(device, logits, lines, following, told)
    device.clear(through.hidden[:count])
    if lines.plain:
        device.outbox.rows[:, device.there(lines.rows[: lines.plain])] = drawn[:, : lines.plain]
    sent = torch.cat((told[lines.plain :].reshape(-1), proposals.sent.reshape(-1).double()))
    return scores, prompt_scores, Evidence(lines, binds, proposals.light(), Arrival(sent))


def drafted(proposals: Proposals) -> Evidence:
    """Of a step that verifies nothing: how the draft model fared."""
    return Evidence(NO_LINES, {}, proposals.light(), Arrival(proposals.sent.reshape(-1).double()))


def _draw_again(
    device: Device, logits: torch.Tensor, lines: Lines, singles: Sequence[Row], drawn: torch.Tensor
) -> None:
    """Lines that ask for more than a plain draw are drawn again."""
    sampler = device.sampler
    if not sampler.demanding:
        return
    again = [
        line
        for line, row in enumerate(singles)
        if line not in lines.tried and not sampler.plain(row)
    ]
    if again:
        choice, at = sampler.choose(logits, singles, again), device.there(again)
        drawn[:, at] = torch.stack((choice.tokens.int(), choice.status.int()))[:, at]


def _scores(
    device: Device,
    logits: torch.Tensor,
    lines: Lines,
    following: torch.Tensor,
    told: torch.Tensor,
) -> list[Scores]:
    """Of each line's draw, where asked; before it of the draft, where that may be emitted too."""
    if not device.sampler.demanding:
        return []
    asked: list[tuple[int, int]] = []
    for line, slot in enumerate(lines.slots.tolist()):
        count = device.sampler.bound(slot).params.logprobs
        if count is not None:
            asked += [(line, count)] * (1 + (line in lines.tried))
    if not asked:
        return []
    of = [line for line, _ in asked]
    at = device.there(of)
    tokens = told[at, 0].long()
    firsts = [i for i in range(len(of) - 1) if of[i] == of[i + 1]]
    if firsts:
        places, of_drafts = device.there(firsts), device.there([of[i] for i in firsts])
        tokens.index_copy_(0, places, following[of_drafts])
    counts = [count for _, count in asked]
    numbers = logprobs(logits[at], tokens, max(counts))
    return [Scores([lines.rows[line] for line in of], counts, Arrival(numbers))]
