"""Rows of a plan: decodes, prefill chunks and drafts to verify, written from running sequences.

Owns how a sequence becomes a Row, and what that changes in it: `table.num_tokens`,
`num_synced_blocks` and `row_index`. Knows no queue and no policy: the scheduler says which
sequences get a row.

    prefill chunk   tokens[start : end]      samples when end is the last known token
    decode          1 known token, or a TokenRef to the row of the plan before that samples it. With
                    a grammar its mask follows from that token: the plan after it gives the mask
    verification    last token + drafts      samples after each
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forge.blocks import BlockPool
from forge.drafting import Drafter
from forge.seam import Bind, Draft, LateMask, Row, StepPlan, TokenRef
from forge.sequence import Sequence


def write_decodes(
    rows: list[Row], late_rows: list[int], sequences: Iterable[Sequence], step: int
) -> int:
    """Append a row of one more token for each sequence, and return how many rows were written.

    late_rows   receives the index of each row whose mask follows from a token in flight
    step        number of the plan that the rows are for

    A sequence whose last token is in flight gets no row. This is the hot loop: a Row is built as a
    tuple, in a third of the time of calling the class.
    """
    previous_step, new, append = step - 1, tuple.__new__, rows.append
    first = index = len(rows)
    new_blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    refs: tuple[TokenRef, ...]
    masks: tuple[bytes, ...]
    for sequence in sequences:
        table, known, matcher = sequence.table, sequence.tokens, sequence.matcher
        start = table.num_tokens
        end = start + 1
        if end >= sequence.max_len:
            continue  # every token it may still get is in flight
        keep, blocks = sequence.num_synced_blocks, table.blocks
        if keep == len(blocks):
            new_blocks = ()
        else:
            new_blocks = tuple(blocks[keep:])
            sequence.num_synced_blocks = len(blocks)
        masks = ()
        if start < len(known):
            tokens, refs = (known[start],), ()
            if matcher is not None:
                masks = (matcher.mask,)
        else:  # the plan before this one samples it
            tokens, refs = (), (new(TokenRef, (previous_step, sequence.row_index)),)
            if matcher is not None:
                late_rows.append(index)
        sequence.row_index = index
        index += 1
        append(
            new(
                Row,
                (
                    sequence.id,
                    sequence.epoch,
                    sequence.slot,
                    start,
                    tokens,
                    refs,
                    keep,
                    new_blocks,
                    1,
                    None,
                    masks,
                    (),
                ),
            )
        )
        table.num_tokens = end
    return index - first


def collect_late_masks(plan: StepPlan, sequences: Mapping[int, Sequence]) -> tuple[LateMask, ...]:
    """Return the masks of the plan's late rows. Every token before those rows is committed.

    A preempted sequence keeps the token that its row samples, so it has a mask. One that has ended
    has none.
    """
    found = []
    for index in plan.late_rows:
        sequence = sequences.get(plan.rows[index].seq_id)
        if sequence is not None and sequence.matcher is not None:
            found.append(LateMask(index, sequence.matcher.mask))
    return tuple(found)


def write_chunk(rows: list[Row], sequence: Sequence, num_tokens: int) -> None:
    """Append a row of the next `num_tokens` known tokens.

    The row that ends at the last known token samples, unless the sequence ends there
    (max_tokens = 0).
    """
    table = sequence.table
    assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
    start, num_known = table.num_tokens, len(sequence.tokens)
    end = start + num_tokens
    assert end <= num_known, f"sequence {sequence.id} fills to {end} of {num_known}"
    keep = sequence.num_synced_blocks
    num_samples = int(end == num_known < sequence.max_len)
    if num_samples:
        sequence.row_index = len(rows)
    rows.append(
        Row(
            sequence.id,
            sequence.epoch,
            sequence.slot,
            start,
            tuple(sequence.tokens[start:end]),
            (),
            keep,
            tuple(table.blocks[keep:]),
            num_samples,
            None if keep else _bind(sequence, start),
            (sequence.matcher.mask,) if num_samples and sequence.matcher is not None else (),
        )
    )
    sequence.num_synced_blocks = len(table.blocks)
    table.num_tokens = end


def write_drafts(
    rows: list[Row], sequence: Sequence, drafts: tuple[Draft, ...], masks: tuple[bytes, ...]
) -> None:
    """Append a row that verifies drafts: the last token and, after it, the drafts."""
    table = sequence.table
    assert sequence.slot is not None, f"sequence {sequence.id} runs without a slot"
    start, keep = table.num_tokens, sequence.num_synced_blocks
    rows.append(
        Row(
            sequence.id,
            sequence.epoch,
            sequence.slot,
            start,
            (sequence.tokens[start],),
            keep=keep,
            new_blocks=tuple(table.blocks[keep:]),
            num_samples=1 + len(drafts),
            masks=masks,
            drafts=drafts,
        )
    )
    sequence.num_synced_blocks = len(table.blocks)
    table.num_tokens = start + 1 + len(drafts)


def propose_drafts(
    drafter: Drafter, pool: BlockPool, sequence: Sequence, budget: int
) -> tuple[tuple[Draft, ...], tuple[bytes, ...]]:
    """Return the drafts of the sequence's next row, and with a grammar a mask for each sample.

    budget   tokens of the step that drafts may take

    Length and free blocks limit the drafts too: no sequence is preempted for a draft, and no
    protected block is evicted. Blocks for
    them are allocated here, and the commit frees those of rejected ones. Without drafts the masks
    are not used: `write_decodes` reads the mask of the matcher.
    """
    table, matcher, num_known = sequence.table, sequence.matcher, len(sequence.tokens)
    room = table.capacity + pool.num_disposable_blocks * pool.block_size - num_known
    max_drafts = min(sequence.num_drafts, budget, sequence.max_len - num_known - 1, room)
    drafts = drafter.propose(sequence, max_drafts) if max_drafts > 0 else ()
    masks: tuple[bytes, ...] = ()
    if drafts and matcher is not None:
        draft_masks = matcher.draft_masks(draft for draft in drafts if isinstance(draft, int))
        drafts, masks = drafts[: len(draft_masks)], (matcher.mask, *draft_masks)
    if drafts:
        growth = pool.grow(sequence.id, 1 + len(drafts))
        sequence.num_synced_blocks = min(sequence.num_synced_blocks, growth.keep)
    return drafts, masks


def _bind(sequence: Sequence, start: int) -> Bind:
    """Return what the device must know to take the sequence over at `start`."""
    num_history = start if sequence.params.has_penalties else 0
    if sequence.params.prompt_logprobs is not None:
        num_history = max(num_history, sequence.bind.prompt_len)
    return sequence.bind._replace(history=tuple(sequence.tokens[:num_history]))
