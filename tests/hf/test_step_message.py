"""A step that another rank receives is the step that rank 0 runs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge.models.hf.parallel.step_message import (
    decode_late_masks,
    decode_step,
    encode_late_masks,
    encode_step,
)
from forge.models.hf.runner.batch_step import BatchStep
from forge.models.hf.runner.input_batch import InputBatch, build_input_batch
from forge.ranks.message_kind import DRAFT_STEP, LATE_MASKS, STEP, message_kind
from forge.request import Reasoning, SamplingParams, Structure, StructureKind, ThinkingBudget
from forge.seam import (
    COUPLED,
    REJECTION,
    Bind,
    BlockCopy,
    DraftRef,
    HostLoad,
    HostStore,
    LateMask,
    Row,
    StepPlan,
    TokenRef,
)

pytestmark = pytest.mark.torch

NUM_SLOTS, TABLE_WIDTH, NUM_DRAFT_PLANS = 8, 16, 2
ids = st.integers(0, 2**31 - 2)
small = st.integers(0, 9)

params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=small,
    logit_bias=st.dictionaries(small, st.floats(-100, 100), max_size=2),
    allowed_token_ids=st.none() | st.sets(small, min_size=1, max_size=2),
    stop=st.lists(st.sampled_from(["a", "\n"]), max_size=1),
    logprobs=st.none() | small,
) | st.sampled_from(
    [
        SamplingParams(structure=Structure(StructureKind.REGEX, "a+"), min_p=0.1),
        SamplingParams(
            logprobs=0,
            logprob_token_ids=(5, 3),
            thinking_budget=ThinkingBudget(5, Reasoning("", "b"), (7, 8)),
        ),
    ]
)
binds = st.builds(
    Bind,
    params,
    seed=st.integers(0, 2**64 - 1),
    prompt_len=ids,
    end_ids=st.lists(ids, max_size=2).map(tuple),
    history=st.lists(ids, max_size=4).map(tuple),
    acceptance=st.sampled_from([COUPLED, REJECTION]),
    proposes=st.booleans(),
)
draft_refs = st.builds(DraftRef, st.integers(0, NUM_DRAFT_PLANS - 1), st.integers(0, 3))


@st.composite
def rows(draw: st.DrawFn, slot: int) -> Row:
    """Rows of one to some tokens, a third of which have drafts, masks or a bind."""
    tokens = tuple(draw(st.lists(ids, max_size=3)))
    refs = (TokenRef(4, draw(st.integers(0, 3))),) if not tokens or draw(st.booleans()) else ()
    drafts = tuple(draw(st.lists(ids | draft_refs, max_size=2))) if draw(st.booleans()) else ()
    num_samples = draw(st.sampled_from([0, 1])) if not drafts else 1 + len(drafts)
    masks = tuple(draw(st.lists(st.binary(max_size=5), max_size=num_samples)))
    bind = draw(st.none() | binds)
    keep, blocks = (
        (0, (3, 4)) if bind is not None else (draw(small), draw(st.sampled_from([(), (7,)])))
    )
    return Row(
        *(draw(ids), draw(small), slot, draw(small), tokens, refs, keep, blocks, num_samples),
        *(bind, masks, drafts),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans of up to four rows, with copies and moves."""
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=4, unique=True))
    pairs = st.lists(st.tuples(ids, ids), max_size=2)
    return StepPlan(
        draw(ids),
        tuple(draw(rows(slot)) for slot in slots),
        draw(ids),
        16,
        copies=tuple(BlockCopy(*pair) for pair in draw(pairs)),
        num_host_blocks=draw(ids),
        stores=tuple(HostStore(*pair) for pair in draw(pairs)),
        loads=tuple(HostLoad(5, 1, *pair) for pair in draw(pairs)),
        file_epoch=draw(small),
        late_rows=tuple(draw(st.lists(small, max_size=2))),
    )


def step_of(plan: StepPlan) -> BatchStep:
    """Return the step that rank 0 makes of the plan."""
    batch = build_input_batch(plan, range(4), NUM_SLOTS, TABLE_WIDTH, [range(4)] * NUM_DRAFT_PLANS)
    return BatchStep(
        plan,
        batch,
        [plan.rows[index] for index in batch.plan_rows],
        [(row.slot, row.bind) for row in plan.rows if row.bind is not None],
        NUM_DRAFT_PLANS,
    )


def joined(buffers: list[Any]) -> bytes:
    return b"".join(bytes(memoryview(each).cast("B")) for each in buffers if len(each))


def message_of(kind: int, step: BatchStep) -> bytes:
    return joined(encode_step(kind, step))


def as_lists(batch: InputBatch) -> list[Any]:
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in batch]


@given(plan=plans(), kind=st.sampled_from([STEP, DRAFT_STEP]))
def test_another_rank_receives_the_step_of_rank_0(plan: StepPlan, kind: int) -> None:
    """Arrays and binds are equal; rows are equal in what a device reads of them."""
    step = step_of(plan)
    message = message_of(kind, step)
    received = decode_step(message)
    assert message_kind(message) == kind
    assert as_lists(received.batch) == as_lists(step.batch)
    assert all(each.dtype == np.int32 for each in received.batch if isinstance(each, np.ndarray))
    assert received.binds == step.binds
    assert received.num_draft_plans == NUM_DRAFT_PLANS
    moved = [move._replace(seq_id=0, epoch=0) for move in plan.loads]
    assert received.plan == plan._replace(rows=(), loads=tuple(moved))
    assert len(received.rows) == len(step.rows)
    for row, original in zip(received.rows, step.rows, strict=True):
        for name in ("slot", "start", "end", "num_samples", "masks", "drafts"):
            assert getattr(row, name) == getattr(original, name), name
        if kind == DRAFT_STEP:
            assert len(row.refs) == len(original.refs)


def test_a_step_of_256_decodes_has_five_arrays_and_nothing_else() -> None:
    """Slots, starts, tokens and sources; row numbers and lengths follow from these."""
    rows = tuple(Row(i, 0, i, 9, refs=(TokenRef(0, i),), keep=1, num_samples=1) for i in range(256))
    plan = StepPlan(1, rows, 512, 16)
    batch = build_input_batch(plan, range(256), 256, TABLE_WIDTH)
    step = BatchStep(plan, batch, rows, [], 0)
    assert len(message_of(STEP, step)) < 4 * 256 * 4 + 256
    assert [row.end for row in decode_step(message_of(STEP, step)).rows] == [10] * 256


@given(plan=plans(), num_bytes=st.integers(1, 8))
def test_a_message_of_another_length_is_an_error(plan: StepPlan, num_bytes: int) -> None:
    message = message_of(STEP, step_of(plan))
    with pytest.raises((AssertionError, ValueError)):
        decode_step(message[:-num_bytes])
    with pytest.raises(AssertionError, match="were announced"):
        decode_step(message + b"x" * num_bytes)


@given(masks=st.lists(st.tuples(small, st.binary(max_size=5)), max_size=3))
def test_another_rank_receives_the_masks_of_late_rows(masks: list[tuple[int, bytes]]) -> None:
    late_masks = [LateMask(*each) for each in masks]
    message = joined(encode_late_masks(late_masks))
    assert message_kind(message) == LATE_MASKS
    assert decode_late_masks(message) == late_masks
    with pytest.raises(AssertionError, match="were announced"):
        decode_late_masks(message + b"x")
