"""Step message: a BatchStep as bytes, from rank 0 to the other ranks.

Owns the format, both ways. Knows no process and no device. A decode step is its header and the
arrays that InputBatch has; parameters, masks and drafts are there only in the steps that have them.

    int32     header: kind, sizes, counts | arrays of InputBatch | samples of each row | drafts
              | copies | moves | histories of binds
    JSON      parameters of the sequences that take over a slot
    bytes     masks, one after the other

Nothing is pickled, and a message that is cut short is an error: it ends with no byte unread.

Always true: a rank that receives a step has the same arrays as rank 0, and rows of equal slots,
positions, samples, masks, drafts and binds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, cast, overload

import numpy as np

from forge.models.hf.buffers import Int32Array
from forge.models.hf.runner.batch_step import BatchStep
from forge.models.hf.runner.input_batch import InputBatch
from forge.ranks.message_kind import DRAFT_STEP, LATE_MASKS
from forge.request import SamplingParams, Structure, ThinkingBudget
from forge.seam import (
    Bind,
    BlockCopy,
    Draft,
    DraftRef,
    HostLoad,
    HostStore,
    LateMask,
    Row,
    StepPlan,
    TokenRef,
)

_NUM_SIZES = 9

_ARRAYS = (
    *("slots", "starts", "tokens", "source_rows", "table_indices", "table_block_ids"),
    *("draft_token_indices", "draft_sources"),
)
"""Arrays of InputBatch that are in every message; most often the last four are empty."""

_RAGGED_ARRAYS = (
    *("plan_rows", "query_lens", "query_starts", "token_slots", "positions", "rows_with_drafts"),
)
"""Fields of InputBatch that a step of one token a row leaves out: they follow from the others."""

_ROW_NUMBERS = ("num_samples", "num_refs", "num_drafts", "draft_plans", "draft_values")
_OTHERS = ("copies", "stores", "loads", "late_rows", "histories", "num_masks", "mask_bytes")

_SECTIONS = (*_ARRAYS, *_RAGGED_ARRAYS, *_ROW_NUMBERS, *_OTHERS)
"""Sections of int32 numbers, in order; the header has the length of each."""

_HEADER_LEN = _NUM_SIZES + len(_SECTIONS)

_KNOWN_TOKEN = 2**31 - 1
"""Plan of a draft that is a known token: more plans than a step has."""

_REFERENCE = TokenRef(0, 0)
_NUM_SAMPLES = itemgetter(Row._fields.index("num_samples"))
_MASKS = itemgetter(Row._fields.index("masks"))


def encode_step(kind: int, step: BatchStep) -> list[Any]:
    """Return the step as buffers, whose bytes one after the other are the message.

    kind   STEP or DRAFT_STEP of forge.ranks.message_kind
    Some 40 us for 256 decodes: every array but the samples of each row is there already.
    """
    plan, batch, rows, binds = step.plan, step.batch, step.rows, step.binds
    assert not plan.spills and not plan.fetches, "files of blocks belong to one process"
    sections: dict[str, Sequence[int] | Int32Array] = {}
    for name in _ARRAYS if _has_one_token_a_row(batch) else (*_ARRAYS, *_RAGGED_ARRAYS):
        sections[name] = getattr(batch, name)
    num_samples = [*map(_NUM_SAMPLES, rows)]
    if num_samples.count(1) != len(rows):
        sections["num_samples"] = num_samples
    if kind == DRAFT_STEP:
        sections["num_refs"] = [len(row.refs) for row in rows]
    if batch.rows_with_drafts:
        _add_drafts(sections, [row.drafts for row in rows])
    masks: tuple[bytes, ...] = ()
    if any(map(_MASKS, rows)):
        masks = tuple(chain.from_iterable(map(_MASKS, rows)))
        sections["num_masks"] = [len(row.masks) for row in rows]
        sections["mask_bytes"] = [len(mask) for mask in masks]
    sections["late_rows"] = plan.late_rows
    if binds:
        sections["histories"] = [*chain.from_iterable(bind.history for _, bind in binds)]
    if plan.copies or plan.stores or plan.loads:
        sections["copies"] = [*chain.from_iterable(plan.copies)]
        sections["stores"] = [*chain.from_iterable(plan.stores)]
        sections["loads"] = [*chain.from_iterable(load[2:] for load in plan.loads)]
    text = b"" if not binds else json.dumps([_encode_bind(*each) for each in binds]).encode()
    header = [
        *(kind, plan.step & 0x7FFFFFFF, plan.num_blocks, plan.block_size, plan.num_host_blocks),
        *(plan.file_epoch, step.num_draft_plans, batch.num_decode_rows, len(text)),
        *(len(sections.get(name, ())) for name in _SECTIONS),
    ]
    arrays = [np.array(header, np.int32)]
    for name in _SECTIONS:
        if (values := sections.get(name)) is not None and len(values):
            arrays.append(values if isinstance(values, np.ndarray) else np.array(values, np.int32))
    return [*arrays, text, *masks]


def encode_late_masks(late_masks: Sequence[LateMask]) -> list[Any]:
    """Return the masks of the step before as buffers of one message."""
    rows = [row for row, _ in late_masks]
    header = [LATE_MASKS, len(rows), *rows, *(len(mask) for _, mask in late_masks)]
    return [np.array(header, np.int32), *(mask for _, mask in late_masks)]


def decode_late_masks(message: bytes) -> list[LateMask]:
    """Return the masks of a message."""
    count = int(np.frombuffer(message, np.int32, 2)[1])
    rows = np.frombuffer(message, np.int32, count, 8).tolist()
    lengths = np.frombuffer(message, np.int32, count, 8 + 4 * count).tolist()
    masks = _split_masks(message, 8 + 8 * count, lengths)
    return [LateMask(*each) for each in zip(rows, masks, strict=True)]


def _has_one_token_a_row(batch: InputBatch) -> bool:
    """Return whether `build_input_batch` made the batch of rows of one token, in plan order."""
    return batch.token_slots is batch.slots and batch.positions is batch.starts


def _add_drafts(sections: dict[str, Any], drafts: Sequence[Sequence[Draft]]) -> None:
    """Add the drafts of all rows: of a known token its id, of others their plan and row."""
    flat = [*chain.from_iterable(drafts)]
    sections["num_drafts"] = [len(each) for each in drafts]
    sections["draft_plans"] = [_KNOWN_TOKEN if isinstance(d, int) else d.plan for d in flat]
    sections["draft_values"] = [d if isinstance(d, int) else d.row for d in flat]


def _encode_bind(slot: int, bind: Bind) -> list[Any]:
    """Return the bind as JSON values. Parameters at their default are left out."""
    params = {
        each.name: value
        for each in fields(SamplingParams)
        if (value := getattr(bind.params, each.name)) != each.default
    }
    structure = bind.params.structure
    if structure is not None:
        params["structure"] = structure.encode()
    if bind.params.thinking_budget is not None:
        params["thinking_budget"] = bind.params.thinking_budget.encode()
    numbers = (bind.seed, bind.prompt_len, bind.end_ids, len(bind.history))
    return [slot, params, *numbers, bind.acceptance, bind.proposes]


def decode_step(message: bytes) -> BatchStep:
    """Return the step of a message. Its arrays are views of the message, and read-only."""
    header = np.frombuffer(message, np.int32, _HEADER_LEN).tolist()
    _, step_number, num_blocks, block_size, num_host_blocks, *sizes = header[:_NUM_SIZES]
    file_epoch, num_draft_plans, num_decode_rows, text_bytes = sizes
    lengths = header[_NUM_SIZES:]
    numbers = np.frombuffer(message, np.int32, sum(lengths), 4 * _HEADER_LEN)
    sections: dict[str, Any] = {}
    first = 0
    for name, length in zip(_SECTIONS, lengths, strict=True):
        sections[name] = numbers[first : first + length]
        first += length
    text_start = 4 * (_HEADER_LEN + first)
    masks_start = text_start + text_bytes
    binds = _decode_binds(message[text_start:masks_start], sections["histories"])
    masks = _decode_masks(message, masks_start, sections)
    drafts = _decode_drafts(sections)
    num_rows = len(sections["slots"])
    if not len(sections["plan_rows"]):
        sections["plan_rows"] = np.arange(num_rows, dtype=np.int32)
        sections["query_starts"] = sections["plan_rows"]
        sections["query_lens"] = np.ones(num_rows, np.int32)
        sections["token_slots"], sections["positions"] = sections["slots"], sections["starts"]
    if not len(sections["num_samples"]):
        sections["num_samples"] = np.ones(num_rows, np.int32)
    for name in ("plan_rows", "rows_with_drafts"):
        sections[name] = sections[name].tolist()
    fields_of_batch = {name: sections[name] for name in (*_ARRAYS, *_RAGGED_ARRAYS)}
    batch = InputBatch(num_decode_rows=num_decode_rows, **fields_of_batch)
    plan = StepPlan(
        step_number,
        (),
        num_blocks,
        block_size,
        copies=tuple(BlockCopy(*pair) for pair in _pairs(sections["copies"])),
        num_host_blocks=num_host_blocks,
        stores=tuple(HostStore(*pair) for pair in _pairs(sections["stores"])),
        loads=tuple(HostLoad(0, 0, *pair) for pair in _pairs(sections["loads"])),
        file_epoch=file_epoch,
        late_rows=tuple(sections["late_rows"].tolist()),
    )
    rows = _ReceivedRows(batch, sections["num_samples"], sections["num_refs"], masks, drafts)
    return BatchStep(plan, batch, rows, binds, num_draft_plans)


def _pairs(numbers: Int32Array) -> list[list[int]]:
    return cast(list[list[int]], numbers.reshape(-1, 2).tolist())


def _decode_binds(text: bytes, histories: Int32Array) -> list[tuple[int, Bind]]:
    """Return slot and bind of each sequence that takes over a slot."""
    if not text:
        return []
    binds: list[tuple[int, Bind]] = []
    first = 0
    for slot, params, seed, prompt_len, end_ids, count, *rest in json.loads(text):
        if "structure" in params:
            params["structure"] = Structure.decode(params["structure"])
        if "thinking_budget" in params:
            params["thinking_budget"] = ThinkingBudget.decode(params["thinking_budget"])
        history = tuple(histories[first : first + count].tolist())
        first += count
        bind = Bind(SamplingParams(**params), seed, prompt_len, tuple(end_ids), history, *rest)
        binds.append((slot, bind))
    return binds


def _decode_masks(
    message: bytes, masks_start: int, sections: dict[str, Any]
) -> dict[int, tuple[bytes, ...]]:
    """Return the masks of each row that has some. They are the rest of the message."""
    masks = _split_masks(message, masks_start, sections["mask_bytes"].tolist())
    found: dict[int, tuple[bytes, ...]] = {}
    first = 0
    for batch_row, count in enumerate(sections["num_masks"].tolist()):
        if count:
            found[batch_row] = tuple(masks[first : first + count])
            first += count
    return found


def _split_masks(message: bytes, start: int, lengths: Sequence[int]) -> list[bytes]:
    """Return masks of these lengths, which are the message from `start` to its end."""
    masks: list[bytes] = []
    for num_bytes in lengths:
        masks.append(message[start : start + num_bytes])
        start += num_bytes
    assert start == len(message), f"{len(message)} bytes, and {start} were announced"
    return masks


def _decode_drafts(sections: dict[str, Any]) -> dict[int, tuple[Draft, ...]]:
    """Return the drafts of each row that has some."""
    pairs = zip(sections["draft_plans"].tolist(), sections["draft_values"].tolist(), strict=True)
    flat: list[Draft] = [
        value if plan == _KNOWN_TOKEN else DraftRef(plan, value) for plan, value in pairs
    ]
    found: dict[int, tuple[Draft, ...]] = {}
    first = 0
    for batch_row, count in enumerate(sections["num_drafts"].tolist()):
        if count:
            found[batch_row] = tuple(flat[first : first + count])
            first += count
    return found


class _ReceivedRows(Sequence[Row]):
    """Rows of a received step, built when one is first read: most decode steps read none."""

    def __init__(
        self,
        batch: InputBatch,
        num_samples: Int32Array,
        num_refs: Int32Array,
        masks: dict[int, tuple[bytes, ...]],
        drafts: dict[int, tuple[Draft, ...]],
    ) -> None:
        self._batch, self._num_samples, self._num_refs = batch, num_samples, num_refs
        self._masks, self._drafts = masks, drafts

    def __len__(self) -> int:
        return len(self._batch.plan_rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[Row]:
        batch, rows = self._batch, []
        num_refs = self._num_refs.tolist() or [0] * len(self)
        columns = (batch.slots, batch.starts, batch.query_lens, self._num_samples)
        numbers = zip(*(each.tolist() for each in columns), num_refs, strict=True)
        for batch_row, (slot, start, length, samples, count) in enumerate(numbers):
            drafts = self._drafts.get(batch_row, ())
            tokens = (0,) * (length - count - len(drafts))
            masks = self._masks.get(batch_row, ())
            # By position: a step of 256 rows builds as many.
            refs = (_REFERENCE,) * count
            rows.append(Row(0, 0, slot, start, tokens, refs, 0, (), samples, None, masks, drafts))
        return rows
