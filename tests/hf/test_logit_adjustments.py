"""Each family of logit adjustments: what is collected on the host, and its effect on the logits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import pytest

from forge.request import SamplingParams, Structure
from forge.sampling import DRAFT, MAX_GAP, PLAIN
from forge.seam import Bind, Row

torch = pytest.importorskip("torch")

from forge.models.hf.buffers import upload_groups  # noqa: E402
from forge.models.hf.sampling.adjusted_chunks import collect_chunk_rows  # noqa: E402
from forge.models.hf.sampling.gumbel import purpose_offset  # noqa: E402
from forge.models.hf.sampling.logit_adjustments import (  # noqa: E402
    apply_allowed_tokens,
    apply_logit_bias,
    apply_min_tokens,
    apply_token_masks,
    collect_allowed_tokens,
    collect_logit_bias,
    collect_min_tokens,
    collect_token_masks,
)
from forge.models.hf.sampling.penalties import PenaltyState  # noqa: E402
from forge.models.hf.sampling.slot_params import SlotParams, build_slot_params  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Chunk(NamedTuple):
    """Rows of a chunk, row i in slot i, and the parameters of their slots."""

    rows: list[Row]
    params: list[SlotParams]


def chunk_of(*params: SamplingParams, vocab_size: int = 4, **bind: Any) -> Chunk:
    """Return rows whose prompt is token 0 at position 0, so that each samples position 1."""
    binds = [Bind(each, seed=1, prompt_len=1, **bind) for each in params]
    rows = [Row(slot, 0, slot, 0, (0,)) for slot in range(len(params))]
    return Chunk(rows, [build_slot_params(each, vocab_size) for each in binds])


def as_lists(group: Any) -> tuple[list[Any], ...]:
    return tuple(array.tolist() for array in group)


def adjusted(apply: Any, group: Any, logits: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the logits after `apply` with the group's tensors."""
    x = torch.tensor(logits, dtype=torch.float64)
    apply(x, *upload_groups(CPU, group))
    return x.tolist()


def test_masks_are_collected_in_whole_words_of_the_vocabulary() -> None:
    """70 tokens take two words. A shorter mask is filled up, a longer one is cut off."""
    masks = ((), (b"\x05",), (b"\xff" * 20,))
    rows = [Row(slot, 0, slot, 0, (0,), masks=each) for slot, each in enumerate(masks)]
    assert as_lists(collect_token_masks(rows, 70)) == ([1, 2], [5, 0, -1, -1])


def test_a_mask_rules_out_the_tokens_whose_bit_is_0_in_its_row_alone() -> None:
    rows = [Row(0, 0, 0, 0, (0,)), Row(1, 0, 1, 0, (0,), masks=(b"\x05",))]
    found = adjusted(apply_token_masks, collect_token_masks(rows, 4), [[1.0, 2.0, 3.0, 4.0]] * 2)
    assert found == [[1.0, 2.0, 3.0, 4.0], [1.0, -inf, 3.0, -inf]]


def test_allowed_tokens_are_cells_of_the_flat_logits() -> None:
    _, params = chunk_of(SamplingParams(), SamplingParams(allowed_token_ids=[3, 1]))
    assert as_lists(collect_allowed_tokens(params, 4)) == ([1], [7, 5])


def test_tokens_that_are_not_allowed_are_ruled_out_in_their_row_alone() -> None:
    _, params = chunk_of(SamplingParams(), SamplingParams(allowed_token_ids=[3, 1]))
    group = collect_allowed_tokens(params, 4)
    found = adjusted(apply_allowed_tokens, group, [[1.0, 2.0, 3.0, 4.0]] * 2)
    assert found == [[1.0, 2.0, 3.0, 4.0], [-inf, 2.0, -inf, 4.0]]


def test_a_bias_is_added_to_its_cell() -> None:
    _, params = chunk_of(SamplingParams(), SamplingParams(logit_bias={0: 0.5, 2: -3.0}))
    group = collect_logit_bias(params, 4)
    assert as_lists(group) == ([4, 6], [0.5, -3.0])
    found = adjusted(apply_logit_bias, group, [[1.0, 2.0, 3.0, 4.0]] * 2)
    assert found == [[1.0, 2.0, 3.0, 4.0], [1.5, 2.0, 0.0, 4.0]]


def test_min_tokens_collects_the_stop_tokens_of_rows_that_are_too_short() -> None:
    """Row 0 has no minimum, row 1 is one token short of it, row 2 has sampled enough."""
    rows, params = chunk_of(
        SamplingParams(),
        SamplingParams(min_tokens=1, stop_token_ids=[2]),
        SamplingParams(min_tokens=1, stop_token_ids=[2]),
        end_ids=(3,),
    )
    rows[2] = rows[2]._replace(start=1)
    assert as_lists(collect_min_tokens(rows, params, 4)) == ([7, 6], [1, 1])


def test_min_tokens_leaves_the_stop_tokens_of_a_row_that_can_sample_nothing_else() -> None:
    rows, params = chunk_of(*[SamplingParams(min_tokens=1)] * 2, end_ids=(3,))
    group = collect_min_tokens(rows, params, 4)
    found = adjusted(apply_min_tokens, group, [[1.0, 2.0, 3.0, 4.0], [-inf, -inf, -inf, 4.0]])
    assert found == [[1.0, 2.0, 3.0, -inf], [-inf, -inf, -inf, 4.0]]


def penalty_state(chunk: Chunk) -> PenaltyState:
    state = PenaltyState(len(chunk.rows), 4, CPU)
    for row, params in zip(chunk.rows, chunk.params, strict=True):
        state.bind(row.slot, params.bind)
    return state


PENALIZED = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)


def test_penalties_are_collected_of_the_rows_that_have_some() -> None:
    chunk = chunk_of(SamplingParams(), PENALIZED)
    group = penalty_state(chunk).collect(*chunk)
    assert as_lists(group) == ([1], [1], [2.0, 0.5, 0.25], [], [])


def test_drafts_before_the_sampled_position_are_collected_with_their_row() -> None:
    """Slot 1 has drafts at positions 1 and 2. A row that ends at 2 counts the first alone."""
    chunk = chunk_of(SamplingParams(), PENALIZED)
    state = penalty_state(chunk)
    state.update((Row(1, 0, 1, 0, (0,), drafts=(3, 2)),), torch.tensor([0, 3, 2]))
    for end, offsets in ((1, []), (2, [0]), (3, [0, 1])):
        rows = [chunk.rows[0], Row(1, 0, 1, end - 1, (0,))]
        group = state.collect(rows, chunk.params)
        first = state._draft_tokens.shape[1]
        assert group.draft_cells.tolist() == [first + offset for offset in offsets]
        assert group.draft_rows.tolist() == [0] * len(offsets)


def test_penalties_change_the_logits_of_repeated_tokens_in_their_row_alone() -> None:
    """Token 0 is the prompt, token 1 an output, token 3 a draft."""
    chunk = chunk_of(SamplingParams(), PENALIZED)
    state = penalty_state(chunk)
    state.update((Row(1, 0, 1, 0, (0, 1), drafts=(3,)),), torch.tensor([0, 1, 3]))
    rows = [chunk.rows[0], Row(1, 0, 1, 2, (0,))]
    group = state.collect(rows, chunk.params)
    found = adjusted(state.apply, group, [[2.0, -2.0, 3.0, 4.0]] * 2)
    assert found == [[2.0, -2.0, 3.0, 4.0], [1.0, -4.75, 3.0, 1.25]]


def test_chunk_rows_hold_the_numbers_and_the_key_of_each_row() -> None:
    rows, params = chunk_of(SamplingParams(temperature=0.5, top_k=2), SamplingParams())
    drafting = Bind(SamplingParams(), seed=1, prompt_len=1, proposes=True, acceptance="rejection")
    params[1] = build_slot_params(drafting, 4)
    assert as_lists(collect_chunk_rows([5, 7], [3, 1], rows, params)) == (
        [5, 7],
        [3, 1],
        [2.0, 1.0, 2.0, 1.0, MAX_GAP, 1.0, 1.0, 4.0, 1.0, MAX_GAP],
        [0, 1],
        [1, 1],
        [purpose_offset(PLAIN), purpose_offset(DRAFT)],
    )


def test_families_that_no_row_uses_leave_the_logits_as_they_are() -> None:
    rows, params = chunk_of(SamplingParams(structure=Structure.regex(".*")), SamplingParams())
    state = penalty_state(Chunk(rows, params))
    families = [
        (apply_token_masks, collect_token_masks(rows, 4)),
        (apply_allowed_tokens, collect_allowed_tokens(params, 4)),
        (apply_logit_bias, collect_logit_bias(params, 4)),
        (apply_min_tokens, collect_min_tokens(rows, params, 4)),
        (state.apply, state.collect(rows, params)),
    ]
    for apply, group in families:
        assert adjusted(apply, group, [[1.0, 2.0, 3.0, 4.0]] * 2) == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert state.num_bytes == 0
