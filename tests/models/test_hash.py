"""Embedded models: HashModel's function, and how LogitsModel executes a plan."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from math import exp, inf, nan
from pathlib import Path
from typing import Any

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.models.paged import FaultHooks
from forge.request import Request, SamplingParams, Structure, TokenLogprob
from forge.sampling import NO_ALLOWED_TOKEN, token_logprob
from forge.seam import Bind, BlockCopy, LateMask, Row, RowOutput, StepPlan, TokenRef
from tests.core.builders import config
from tests.core.reference import compute_expected
from tests.virtual_time import VirtualTime

# HashModel: from a context to logits.


def argmax(logits: Sequence[float]) -> int:
    return max(range(len(logits)), key=logits.__getitem__)


def contexts(count: int, length: int, seed: int = 1) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(1, 64) for _ in range(length)) for _ in range(count)]


def small(**options: Any) -> HashModel:
    return HashModel(vocab_size=64, num_blocks=8, block_size=4, **options)


def agreement(target: HashModel, draft: HashModel, of: Sequence[tuple[int, ...]]) -> float:
    """Return the share of contexts on which both have the same most likely token."""
    same = sum(argmax(target.context_logits(c)) == argmax(draft.context_logits(c)) for c in of)
    return same / len(of)


def test_the_same_context_gives_the_same_logits() -> None:
    """Also after many others: the model keeps no state of a context."""
    model, many = small(), contexts(200, 9)
    first = [tuple(model.context_logits(context)) for context in many]
    assert [tuple(model.context_logits(context)) for context in many] == first
    assert [tuple(small().context_logits(context)) for context in many[:5]] == first[:5]


def test_the_container_of_a_context_does_not_matter() -> None:
    model, context = small(), (5, 6, 7)
    assert model.context_logits([5, 6, 7]) == model.context_logits(context)
    assert model.context_logits(array("i", context)) == model.context_logits(context)


def test_the_most_likely_tokens_are_known_answers() -> None:
    """Literals, so that another machine or version that computes differently is noticed."""
    model = small()
    prompts = [tuple(range(1, n)) for n in (6, 7, 8, 9, 20, 40)]
    assert [argmax(model.context_logits(prompt)) for prompt in prompts] == [8, 44, 13, 23, 18, 53]


def test_another_process_gives_the_same_logits() -> None:
    """Under another hash seed, so nothing rests on the order of a set or on hash()."""
    context = tuple(range(1, 30))
    program = (
        "from forge.models.hash import HashModel\n"
        "model = HashModel(vocab_size=64, num_blocks=8, block_size=4, seed=-5)\n"
        f"print(model.context_logits({context!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        env={"PYTHONHASHSEED": "12345"},
    )
    assert eval(done.stdout) == small(seed=-5).context_logits(context)


def test_another_seed_is_another_model() -> None:
    assert agreement(small(seed=0), small(seed=1), contexts(200, 9)) < 0.1


def test_probabilities_sum_to_one() -> None:
    model = HashModel()
    for context in contexts(5, 12):
        logits = model.context_logits(context)
        assert len(logits) == model.vocab_size() == 257
        total = sum(exp(token_logprob(logits, token, 0).logprob) for token in range(257))
        assert total == pytest.approx(1.0, abs=1e-9)


def test_a_pinned_context_forces_its_token() -> None:
    model = small(forced_tokens={(4, 5): 9, (1,): 0})
    assert token_logprob(model.context_logits((4, 5)), 9, 0).logprob > -1e-6
    assert token_logprob(model.context_logits((1,)), 0, 0).logprob > -1e-6  # eos, though quiet
    assert model.context_logits((4, 6)) == small().context_logits((4, 6))


def test_draft_and_target_mostly_agree() -> None:
    assert agreement(small(), small(agreement=0.8), contexts(200, 9)) > 120 / 200


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 0.9, 1.0])
def test_the_measured_agreement_is_the_requested_one(share: float) -> None:
    """2000 contexts: four standard deviations are at most 4.5 points."""
    measured = agreement(small(), small(agreement=share), contexts(2000, 9))
    assert measured == pytest.approx(share, abs=4 * (share * (1 - share) / 2000) ** 0.5)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 9])
def test_a_draft_that_never_agrees_does_not_agree_by_avoiding_eos(length: int) -> None:
    """In short contexts eos is replaced by another token; the draft's must still differ from it."""
    target, draft = (
        HashModel(vocab_size=8, likely_tokens=(0, 3, 5), agreement=share) for share in (1.0, 0.0)
    )
    assert agreement(target, draft, contexts(100, length)) == 0.0


def test_any_earlier_token_changes_the_logits() -> None:
    """A model of the last eight tokens alone would not notice a wrong block before them."""
    model = small()
    context = contexts(1, 40)[0]
    plain = model.context_logits(context)
    for position in range(40):
        changed = (*context[:position], 63 - context[position], *context[position + 1 :])
        assert model.context_logits(changed) != plain, position


def test_two_tokens_that_change_places_change_the_logits() -> None:
    model = small()
    assert model.context_logits((1, 2, 3, 4, 5)) != model.context_logits((2, 1, 3, 4, 5))
    assert model.context_logits((0, 0, 0, 0)) != model.context_logits((0, 0, 0, 0, 0))


def test_only_likely_tokens_are_most_likely() -> None:
    model = small(likely_tokens=(3, 9, 27))
    assert {argmax(model.context_logits(c)) for c in contexts(100, 9)} == {3, 9, 27}


def test_eos_is_never_likely_while_the_context_is_quiet() -> None:
    model = small(likely_tokens=(0, 7), min_eos_len=6)
    for context in contexts(50, 5):
        assert argmax(model.context_logits(context)) == 7
        assert token_logprob(model.context_logits(context), 0, 0).logprob < -50
    assert {argmax(model.context_logits(c)) for c in contexts(50, 6)} == {0, 7}


# LogitsModel: a plan is executed in order, and contexts are read back through the table.


class ContextLog:
    """Logits that keep every context. The next token is one more than the last."""

    def __init__(self) -> None:
        self.contexts: list[tuple[int, ...]] = []

    def logits(self, context: Sequence[int]) -> list[float]:
        self.contexts.append(tuple(context))
        return [9.0 if token == context[-1] + 1 else 0.0 for token in range(100)]


def create_logged_model(num_blocks: int = 8) -> tuple[list[tuple[int, ...]], LogitsModel]:
    notebook = ContextLog()
    model = LogitsModel(
        notebook.logits, vocab_size=100, eos_token=0, num_blocks=num_blocks, block_size=4
    )
    return notebook.contexts, model


def bind(prompt_len: int, history: tuple[int, ...] = (), **params: Any) -> Bind:
    sampling = SamplingParams(**{"temperature": 0, **params})
    return Bind(sampling, seed=1, prompt_len=prompt_len, history=history)


def prompt_row(tokens: Sequence[int], blocks: tuple[int, ...], slot: int = 0, **params: Any) -> Row:
    """Return a whole prompt of a sequence that takes the slot over."""
    bind_value = bind(len(tokens), **params)
    return Row(slot, 0, slot, 0, tuple(tokens), (), 0, blocks, 1, bind_value)


def decode_row(
    start: int, token: int, keep: int, blocks: tuple[int, ...] = (), slot: int = 0
) -> Row:
    """Return one more token of the sequence in the slot."""
    return Row(slot, 0, slot, start, (token,), (), keep, blocks, 1, None)


def plan(
    step: int, *rows: Row, num_blocks: int = 8, copies: tuple[BlockCopy, ...] = ()
) -> StepPlan:
    return StepPlan(step, rows, num_blocks, 4, copies)


def run_plans(model: LogitsModel, *plans: StepPlan) -> list[list[int | None]]:
    """Return the token of every row of every plan; None for a row without one."""
    outputs = [model.forward(each).result() for each in plans]
    return [[row.tokens[0] if row.tokens else None for row in out.rows] for out in outputs]


def test_the_four_numbers_are_those_it_was_made_with() -> None:
    model = HashModel(vocab_size=300, eos_token=7, num_layers=5)
    assert (model.vocab_size(), model.eos_token(), model.num_layers()) == (300, 7, 5)


def test_a_context_is_read_back_in_the_order_of_the_table() -> None:
    context_log, model = create_logged_model()
    assert run_plans(model, plan(0, prompt_row(range(10, 19), (6, 0, 3)))) == [[19]]
    assert context_log == [tuple(range(10, 19))]


def test_the_table_is_the_fold_of_keep_and_new_blocks() -> None:
    context_log, model = create_logged_model()
    run_plans(
        model,
        plan(0, prompt_row(range(10, 18), (2, 5)), prompt_row(range(30, 34), (4,), slot=1)),
        plan(
            1,
            decode_row(8, 50, keep=2, blocks=(7,)),
            decode_row(4, 60, keep=1, blocks=(1,), slot=1),
        ),
        plan(2, decode_row(9, 51, keep=3)),
        plan(3, decode_row(5, 52, keep=1, blocks=(1,))),  # back to [2], then the other's last block
    )
    assert context_log[2:] == [
        (*range(10, 18), 50),
        (*range(30, 34), 60),
        (*range(10, 18), 50, 51),
        (*range(10, 14), 60, 52),
    ]


def test_a_chunk_samples_nothing_and_the_next_one_sees_it() -> None:
    context_log, model = create_logged_model()
    first = prompt_row(range(10, 14), (2,))._replace(num_samples=0)
    rest = Row(0, 0, 0, 4, (14, 15), (), 1, (3,), 1, None)
    assert run_plans(model, plan(0, first), plan(1, rest)) == [[None], [16]]
    assert context_log == [tuple(range(10, 16))]


def test_a_slot_that_changes_hands_forgets_its_table() -> None:
    context_log, model = create_logged_model()
    run_plans(
        model, plan(0, prompt_row(range(10, 18), (2, 5))), plan(1, prompt_row((40, 41), (1,)))
    )
    assert context_log[1] == (40, 41)


def test_two_ids_swapped_in_a_table_change_the_output() -> None:
    """The canary: a wrong block shows."""
    model = small()

    def resumed(step: int, *table: int) -> RowOutput:
        row = Row(0, 0, 0, 8, (9,), (), 0, table, 1, bind(8, logprobs=5))
        return model.forward(plan(step, row)).result().rows[0]

    model.forward(plan(0, prompt_row(range(1, 9), (2, 5))))
    right = resumed(1, 2, 5, 3)
    assert resumed(2, 5, 2, 3) != right
    assert resumed(3, 2, 5, 3) == right


def test_reading_a_position_that_was_never_written_is_found() -> None:
    """A prefix claimed and never computed reads as -1, which is no token of any context."""
    context_log, model = create_logged_model()
    run_plans(model, plan(0, Row(0, 0, 0, 4, (14,), (), 0, (2, 3), 1, bind(5))))
    assert context_log == [(-1, -1, -1, -1, 14)]
    whole = small().context_logits((10, 11, 12, 13, 14))
    assert small().context_logits(context_log[0]) != whole


def test_a_copied_block_reads_like_its_source_and_is_written_alone() -> None:
    context_log, model = create_logged_model()
    second = Row(1, 0, 1, 3, (77,), (), 0, (4,), 1, bind(3))
    run_plans(
        model,
        plan(0, prompt_row((10, 11, 12), (2,))),
        plan(1, decode_row(3, 13, keep=1), second, copies=(BlockCopy(2, 4),)),
        plan(2, decode_row(4, 14, keep=1, blocks=(5,))),
    )
    assert context_log[1:] == [(10, 11, 12, 13), (10, 11, 12, 77), (10, 11, 12, 13, 14)]


def test_copies_come_before_the_rows_of_their_plan() -> None:
    """The first row rewrites the source; the second reads the copy made before that."""
    context_log, model = create_logged_model()
    other = Row(1, 0, 1, 1, (77,), (), 0, (4,), 1, bind(1))
    run_plans(
        model,
        plan(0, prompt_row((10,), (2,))),
        plan(1, prompt_row((20,), (2,)), other, copies=(BlockCopy(2, 4),)),
    )
    assert context_log[2] == (10, 77)


def test_blocks_that_went_with_a_resize_come_back_blank() -> None:
    context_log, model = create_logged_model()
    reread = Row(0, 0, 0, 1, (11,), (), 0, (7,), 1, bind(1))
    run_plans(
        model,
        plan(0, prompt_row((10,), (7,))),
        plan(1, prompt_row((20,), (0,)), num_blocks=7),
        plan(2, reread, num_blocks=8),
    )
    assert context_log[2] == (-1, 11)


def test_a_pool_can_grow_and_keeps_what_it_had() -> None:
    context_log, model = create_logged_model(num_blocks=2)
    run_plans(
        model,
        plan(0, prompt_row(range(10, 14), (1,)), num_blocks=2),
        plan(
            1,
            prompt_row((20,), (8,), slot=1),
            decode_row(4, 14, keep=1, blocks=(9,)),
            num_blocks=10,
        ),
        plan(2, decode_row(1, 21, keep=1, slot=1), num_blocks=10),
    )
    assert context_log[1:] == [(20,), (10, 11, 12, 13, 14), (20, 21)]


def test_a_named_token_is_the_one_that_the_row_sampled() -> None:
    context_log, model = create_logged_model()
    named = Row(0, 0, 0, 1, (), (TokenRef(0, 1),), 1, (), 1, None)
    mixed = Row(1, 0, 1, 1, (50,), (TokenRef(0, 0),), 1, (), 1, None)
    tokens = run_plans(
        model,
        plan(0, prompt_row((10,), (2,)), prompt_row((20,), (3,), slot=1)),
        plan(1, named, mixed),
    )
    assert tokens == [[11, 21], [22, 12]]
    assert context_log[2:] == [(10, 21), (20, 50, 11)]


def test_a_plan_may_refer_to_tokens_of_a_step_without_a_result_yet() -> None:
    _, model = create_logged_model()
    named = Row(0, 0, 0, 1, (), (TokenRef(0, 0),), 1, (), 1, None)
    first = model.forward(plan(0, prompt_row((10,), (2,))))
    second = model.forward(plan(1, named))
    assert second.result().rows == (RowOutput((12,)),)
    assert first.result().rows == (RowOutput((11,)),)


def test_logits_that_are_not_finite_are_an_error_of_their_row_alone() -> None:
    def logits(context: Sequence[int]) -> list[float]:
        return [nan, 0.0, 0.0] if context[-1] == 1 else [0.0, 0.0, 5.0]

    model = LogitsModel(logits, vocab_size=3, eos_token=0, num_blocks=8, block_size=4)
    bad, good = (
        model.forward(plan(0, prompt_row((1,), (2,)), prompt_row((2,), (3,), slot=1))).result().rows
    )
    assert bad == RowOutput(error="the model's logits are not finite: NaN")
    assert good == RowOutput((2,))


def test_a_row_whose_input_comes_from_a_failed_row_inherits_the_error() -> None:
    def logits(context: Sequence[int]) -> list[float]:
        return [nan] * 3 if context[-1] == 1 else [0.0, 0.0, 5.0]

    model = LogitsModel(logits, vocab_size=3, eos_token=0, num_blocks=8, block_size=4)
    model.forward(plan(0, prompt_row((1,), (2,)), prompt_row((2,), (3,), slot=1)))
    rows = [Row(slot, 0, slot, 1, (), (TokenRef(0, slot),), 1, (), 1, None) for slot in (0, 1)]
    heir, other = model.forward(plan(1, *rows)).result().rows
    assert heir == RowOutput(error="its input comes from a row that failed")
    assert other == RowOutput((2,))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_allowed_ids_that_the_model_rules_out_are_an_error_of_their_row_alone(
    temperature: float,
) -> None:
    """The model's logits are usable, what the request leaves of them is not."""

    def logits(context: Sequence[int]) -> list[float]:
        return [0.0, -inf, 5.0]

    model = LogitsModel(logits, vocab_size=3, eos_token=0, num_blocks=8, block_size=4)
    strict = prompt_row((1,), (2,), allowed_token_ids=[1], temperature=temperature)
    bad, good = model.forward(plan(0, strict, prompt_row((2,), (3,), slot=1))).result().rows
    assert bad.error is not None
    assert bad.tokens == ()
    assert good == RowOutput((2,))


def test_a_token_is_drawn_from_those_of_the_rows_mask() -> None:
    model = LogitsModel(
        lambda context: [0.0, 4.0, 5.0, -inf], vocab_size=4, eos_token=0, num_blocks=8, block_size=4
    )
    params = {"structure": Structure.regex(".*"), "temperature": 0.0}
    masks = (b"\x03", b"\x01", b"\x08", None)
    rows = [
        prompt_row((1,), (2 + slot,), slot=slot, **params)._replace(
            masks=() if mask is None else (mask,)
        )
        for slot, mask in enumerate(masks)
    ]
    outputs = model.forward(plan(0, *rows)).result().rows
    assert [output.tokens for output in outputs] == [(1,), (0,), (), (2,)]
    assert outputs[2].error == NO_ALLOWED_TOKEN


LATE = Row(0, 0, 0, 1, (), (TokenRef(0, 0),), 1, (), 1, None)
"""The row after the first, planned ahead of its token."""


def test_a_late_row_is_sampled_when_the_next_plan_gives_its_mask() -> None:
    """Without a mask 3 is the most likely token. The row after it reads what was sampled."""
    contexts: list[tuple[int, ...]] = []

    def logits(context: Sequence[int]) -> list[float]:
        contexts.append(tuple(context))
        return [0.0, 4.0, 5.0, 6.0]

    model = LogitsModel(logits, vocab_size=4, eos_token=0, num_blocks=8, block_size=4)
    model.forward(plan(0, prompt_row((1,), (2,))))
    late = model.forward(plan(1, LATE)._replace(late_rows=(0,)))
    after = LATE._replace(start=2, refs=(TokenRef(1, 0),))
    last = model.forward(
        plan(2, after)._replace(late_rows=(0,), late_masks=(LateMask(0, b"\x06"),))
    )
    assert late.result().rows == (RowOutput((2,)),)
    model.forward(plan(3)._replace(late_masks=(LateMask(0, b"\x02"),)))
    assert last.result().rows == (RowOutput((1,)),)
    assert contexts == [(1,), (1, 3), (1, 3, 2)]


def test_a_late_row_without_a_mask_fails_and_so_does_the_row_after_it() -> None:
    model = small()
    model.forward(plan(0, prompt_row((1,), (2,))))
    late = model.forward(plan(1, LATE)._replace(late_rows=(0,)))
    after = model.forward(plan(2, LATE._replace(start=2, refs=(TokenRef(1, 0),))))
    assert late.result().rows == (RowOutput(error="the next plan gave no mask for this row"),)
    assert after.result().rows == (RowOutput(error="its input comes from a row that failed"),)


def test_a_late_row_whose_input_failed_fails_whatever_its_mask() -> None:
    def logits(context: Sequence[int]) -> list[float]:
        return [nan] * 4 if context == array("i", [1]) else [0.0, 4.0, 5.0, 6.0]

    model = LogitsModel(logits, vocab_size=4, eos_token=0, num_blocks=8, block_size=4)
    model.forward(plan(0, prompt_row((1,), (2,))))
    late = model.forward(plan(1, LATE)._replace(late_rows=(0,)))
    model.forward(plan(2)._replace(late_masks=(LateMask(0, b"\x06"),)))
    assert late.result().rows == (RowOutput(error="its input comes from a row that failed"),)


def test_a_mask_for_a_row_that_is_not_late_is_a_fault_of_the_plan() -> None:
    model = small()
    model.forward(plan(0, prompt_row((1,), (2,))))
    with pytest.raises(AssertionError, match="row 0 is not late"):
        model.forward(plan(1)._replace(late_masks=(LateMask(0, b"\xff"),)))


def test_a_prompt_position_without_finite_logits_is_an_error_of_its_row() -> None:
    """A log probability of NaN has no JSON."""

    def logits(context: Sequence[int]) -> list[float]:
        return [nan] * 3 if len(context) == 2 else [0.0, 0.0, 5.0]

    model = LogitsModel(logits, vocab_size=3, eos_token=0, num_blocks=8, block_size=4)
    row = prompt_row((1, 2, 1), (2,), history=(1, 2, 1), prompt_logprobs=0)
    (output,) = model.forward(plan(0, row)).result().rows
    assert output.error is not None
    assert "not finite" in output.error


def test_a_prompt_position_without_logits_is_an_error_of_its_row_alone() -> None:
    def logits(context: Sequence[int]) -> list[float]:
        if len(context) == 2:
            raise ValueError("two tokens")
        return [0.0, 0.0, 5.0]

    model = LogitsModel(logits, vocab_size=3, eos_token=0, num_blocks=8, block_size=4)
    scored = prompt_row((1, 2, 1), (2,), history=(1, 2, 1), prompt_logprobs=0)
    bad, good = model.forward(plan(0, scored, prompt_row((2,), (3,), slot=1))).result().rows
    assert bad == RowOutput(error="logits: ValueError('two tokens')")
    assert good == RowOutput((2,))


# Log probabilities.


def test_reported_log_probabilities_are_those_of_the_models_own_logits() -> None:
    """A bias and a temperature change what is drawn, not what the model thought of it."""
    model = small()
    row = prompt_row((5, 6), (1,), temperature=0.5, logit_bias={9: 100.0}, logprobs=1)
    (output,) = model.forward(plan(0, row)).result().rows
    assert output.tokens == (9,)
    assert output.logprobs == (token_logprob(model.context_logits((5, 6)), 9, 1),)


def test_prompt_scores_are_those_of_the_models_function() -> None:
    model, prompt = small(), tuple(range(3, 13))
    row = prompt_row(prompt, (1, 2, 3), history=prompt, prompt_logprobs=2)
    (output,) = model.forward(plan(0, row)).result().rows
    assert output.prompt_logprobs == tuple(
        token_logprob(model.context_logits(prompt[:p]), prompt[p], 2) for p in range(1, 10)
    )


@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_prompt_scores_in_chunks_are_those_of_the_whole(chunk: int) -> None:
    """Position p is scored by the chunk that computes p - 1; the last chunk also samples."""
    prompt = tuple(range(3, 13))
    whole = prompt_row(prompt, (1, 2, 3), history=prompt, prompt_logprobs=2)
    (expected,) = small().forward(plan(0, whole)).result().rows
    model = small()
    scores: tuple[TokenLogprob, ...] = ()
    for step, start in enumerate(range(0, 10, chunk)):
        end = min(start + chunk, 10)
        bind = whole.bind if start == 0 else None
        blocks = (1, 2, 3) if start == 0 else ()
        row = Row(0, 0, 0, start, prompt[start:end], (), 3 if start else 0, blocks, 0, bind)
        (output,) = (
            model.forward(plan(step, row._replace(num_samples=int(end == 10)))).result().rows
        )
        assert len(output.prompt_logprobs) == min(end, 9) - start
        scores += output.prompt_logprobs
    assert scores == expected.prompt_logprobs
    assert output.tokens == expected.tokens


def test_a_prompt_that_differs_from_the_one_to_be_scored_is_a_fault_of_the_plan() -> None:
    """Scores of the history would be reported for tokens that the model has not read."""
    row = prompt_row((5, 6, 9), (1,), history=(5, 6, 7), prompt_logprobs=0)
    with pytest.raises(AssertionError, match="inputs at 0 differ from the slot's history"):
        small().forward(plan(0, row))


# Time and faults.


def test_steps_run_one_after_the_other_however_early_they_were_launched(
    virtual_time: VirtualTime,
) -> None:
    """Two steps of 250 ms end 250 and 500 ms after the launch; a float holds these exactly."""
    model = small(step_s=0.25)
    launched_s = virtual_time.now_s
    first = model.forward(plan(0, prompt_row((1,), (2,))))
    second = model.forward(plan(1, decode_row(1, 5, keep=1)))
    assert (first.ready_at_s, second.ready_at_s) == (launched_s + 0.25, launched_s + 0.5)
    first.result()
    assert virtual_time.now_s == launched_s + 0.25
    second.result()
    assert virtual_time.now_s == launched_s + 0.5


def test_an_idle_device_starts_a_step_when_it_is_launched(virtual_time: VirtualTime) -> None:
    model = small(step_s=0.25)
    model.forward(plan(0, prompt_row((1,), (2,)))).result()
    virtual_time.sleep(0.75)
    launched_s = virtual_time.now_s
    assert model.forward(plan(1, decode_row(1, 5, keep=1))).ready_at_s == launched_s + 0.25


def test_what_the_forward_hook_raises_is_raised_and_the_plan_is_not_run() -> None:
    def forward(plan: StepPlan) -> None:
        if plan.step == 1:
            raise RuntimeError("device lost")

    context_log: list[tuple[int, ...]] = []

    def logits(context: Sequence[int]) -> list[float]:
        context_log.append(tuple(context))
        return [0.0, 1.0]

    model = LogitsModel(
        logits, vocab_size=2, eos_token=0, num_blocks=8, block_size=4, faults=FaultHooks(forward)
    )
    model.forward(plan(0, prompt_row((1,), (2,))))
    with pytest.raises(RuntimeError, match="device lost"):
        model.forward(plan(1, decode_row(1, 1, keep=1)))
    assert context_log == [(1,)]


def test_the_result_hook_fails_the_step_or_single_rows() -> None:
    def result(plan: StepPlan) -> Mapping[int, str]:
        if plan.step == 1:
            raise RuntimeError("step lost")
        return {1: "row lost"}

    model = small(faults=FaultHooks(result=result))
    rows = [prompt_row((7,), (2,)), prompt_row((8,), (3,), slot=1), prompt_row((9,), (4,), slot=2)]
    calm = small().forward(plan(0, *rows)).result().rows
    lost = model.forward(plan(0, *rows)).result().rows
    assert lost == (calm[0], RowOutput(error="row lost"), calm[2])
    with pytest.raises(RuntimeError, match="step lost"):
        model.forward(plan(1, decode_row(1, 5, keep=1))).result()


# Through the engine.


def run_requests(engine: Engine, *requests: Request) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return tokens of every choice, by (request, choice)."""
    for request in requests:
        engine.submit(request)
    tokens: dict[tuple[int, int], tuple[int, ...]] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            key = (delta.request_id, delta.choice)
            tokens[key] = tokens.get(key, ()) + delta.tokens
        assert engine.num_steps < 500
    return tokens


class RepeatModel:
    """A model that repeats the last token."""

    def logits(self, context: Sequence[int]) -> list[float]:
        return [1.0 if token == context[-1] else 0.0 for token in range(257)]


def test_a_users_own_function_is_served_in_a_few_lines() -> None:
    model = LogitsModel(
        RepeatModel().logits, vocab_size=257, eos_token=0, num_blocks=64, block_size=16
    )
    engine = Engine(model, EngineConfig(num_blocks=64))
    greedy = SamplingParams(temperature=0, max_tokens=4)
    tokens = run_requests(engine, Request(0, (5, 9), greedy), Request(1, (7,), greedy))
    assert tokens == {(0, 0): (9, 9, 9, 9), (1, 0): (7, 7, 7, 7)}


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 3.0,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
}


class PlanLogModel(HashModel):
    """A HashModel that keeps its plans."""

    def __init__(self) -> None:
        super().__init__(vocab_size=24, num_blocks=32, block_size=4, min_eos_len=99)
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return super().forward(plan)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_count_the_tokens_of_a_prefix_hit(temperature: float) -> None:
    """Their rows were computed for another request, so the bind gives them to the slot."""
    prompt = tuple(range(1, 15))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, **PENALTIES)
    model = PlanLogModel()
    numbers = config(blocks=32, max_num_batched_tokens=16)
    engine = Engine(model, numbers)
    run_requests(engine, Request(0, prompt, SamplingParams(max_tokens=1)))
    model.plans.clear()
    penalised = Request(1, prompt, params)
    tokens = run_requests(engine, penalised)[1, 0]
    first = model.plans[0].rows[0]
    assert first.start == 12
    assert first.bind is not None
    assert first.bind.history == prompt[:12]
    assert tokens == compute_expected(model, numbers, penalised).tokens
    free = SamplingParams(temperature=temperature, seed=3, max_tokens=12)
    unmoved = compute_expected(model, numbers, Request(1, prompt, free)).tokens
    assert tokens != unmoved, "the penalties changed nothing"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_every_choice_is_the_one_it_would_be_alone(depth: int, budget: int) -> None:
    """Chunks, slots, neighbours and planning ahead leave no trace in the tokens."""
    numbers = config(blocks=32, max_num_seqs=4, max_num_batched_tokens=budget, depth=depth)
    model = HashModel(vocab_size=24, num_blocks=32, block_size=4, min_eos_len=12)
    requests = [
        Request(0, tuple(range(1, 10)), SamplingParams(seed=1, n=3, max_tokens=9)),
        Request(1, (4, 4), SamplingParams(temperature=0, seed=2, max_tokens=20)),
        Request(2, (9, 8, 7), SamplingParams(seed=-7, top_p=0.9, max_tokens=20, **PENALTIES)),
        Request(3, (6,) * 11, SamplingParams(seed=4, min_tokens=8, top_k=5, max_tokens=20)),
    ]
    alone = {
        (each.id, choice): compute_expected(model, numbers, each, choice).tokens
        for each in requests
        for choice in range(each.params.n)
    }
    assert run_requests(Engine(model, numbers), *requests) == alone


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_an_engine_reports_each_prompt_score_once_whatever_the_chunk(budget: int) -> None:
    model = HashModel(vocab_size=24, num_blocks=32, block_size=4)
    prompt = tuple(range(1, 12))
    engine = Engine(model, config(blocks=32, max_num_seqs=1, max_num_batched_tokens=budget))
    engine.submit(Request(0, prompt, SamplingParams(max_tokens=2, prompt_logprobs=1, seed=1)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [score for delta in deltas for score in delta.prompt_logprobs] == [
        token_logprob(model.context_logits(prompt[:p]), prompt[p], 1) for p in range(1, 11)
    ]


def test_a_model_refuses_plans_of_another_block_size() -> None:
    """It would write to other blocks than the engine assigns."""
    engine = Engine(HashModel(num_blocks=8, block_size=8), config(blocks=8, block_size=16))
    engine.submit(Request(0, (1, 2, 3)))
    with pytest.raises(InvalidConfig, match=r"block_size: the model keeps 8 .* the engine 16"):
        engine.step()


@pytest.mark.parametrize("count", [2, 4])
def test_logits_of_another_width_are_an_error_of_their_row(count: int) -> None:
    model = LogitsModel(
        lambda context: [0.0] * count, vocab_size=3, eos_token=0, num_blocks=8, block_size=4
    )
    (row,) = model.forward(plan(0, prompt_row([1, 2], (0,)))).result().rows
    assert row.error == f"logits: {count} numbers for a vocabulary of 3"
