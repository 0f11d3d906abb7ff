"""The device's sampler against forge.sampling: same tokens, same errors, same order of ties."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any, NamedTuple

import pytest

from forge import sampling
from forge.models.logits import LogitsModel
from forge.request import MAX_FAST_LOGPROBS, SamplingParams, Structure
from forge.seam import Bind, Row, StepPlan

torch = pytest.importorskip("torch")

from forge.models.hf.sampling.filters import MAX_TOPK  # noqa: E402
from forge.models.hf.sampling.gumbel import draw_keys, gumbel_noise, noise_bits  # noqa: E402
from forge.models.hf.sampling.logprobs import (  # noqa: E402
    compute_listed_logprobs,
    compute_logprobs,
    read_logprobs,
)
from forge.models.hf.sampling.penalties import PenaltyState  # noqa: E402
from forge.models.hf.sampling.sampler import Sampler, SamplerOutput  # noqa: E402
from forge.models.hf.sampling.status import STATUS_NAN, error_text  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
ANY = Structure.regex(".*")
"""Grammar in the bind of a row with a mask."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class SamplerCase(NamedTuple):
    """One row to sample: its bind, its tokens so far, the model's logits."""

    bind: Bind
    tokens: tuple[int, ...]
    logits: list[float]
    mask: bytes | None = None


def process_logits(case: SamplerCase, logits: Sequence[float]) -> list[float]:
    prompt, output = case.tokens[: case.bind.prompt_len], case.tokens[case.bind.prompt_len :]
    return sampling.process_logits(
        logits, case.bind.params, prompt, output, case.bind.end_ids, case.mask
    )


def expected(case: SamplerCase) -> tuple[int, str | None]:
    """Return token and error by the normative arithmetic, in the order LogitsModel applies it."""
    params, position = case.bind.params, len(case.tokens)
    error = sampling.invalid_logits_reason(case.logits)
    if error is not None:
        return 0, error
    logits = process_logits(case, case.logits)
    if max(logits) == -inf:
        return 0, sampling.NO_ALLOWED_TOKEN
    return sampling.sample_token(logits, params, case.bind.seed, position), None


def list_choices(choice: SamplerOutput) -> list[tuple[int, str | None]]:
    pairs = zip(choice.tokens.tolist(), choice.status.tolist(), strict=True)
    return [(token, error_text(status) if status else None) for token, status in pairs]


def create_sampler(cases: Sequence[SamplerCase], vocab_size: int) -> tuple[Sampler, list[Row]]:
    """Return a sampler whose slot i has case i, and the row that case i is at.

    A random part of the case's tokens is history. Its row feeds the rest, and some of it again.
    """
    rng = Random(len(cases))
    sampler = Sampler(len(cases), vocab_size, CPU)
    rows = []
    for slot, case in enumerate(cases):
        num_history = rng.randrange(len(case.tokens))
        start = rng.randrange(num_history + 1)
        sampler.bind(slot, case.bind._replace(history=case.tokens[:num_history]))
        fed = case.tokens[start:]
        rows.append(
            Row(
                slot,
                0,
                slot,
                start,
                fed,
                num_samples=1,
                masks=() if case.mask is None else (case.mask,),
            )
        )
    inputs = torch.tensor([t for row in rows for t in row.tokens])
    sampler.update_penalties(rows, inputs)
    return sampler, rows


def check(cases: Sequence[SamplerCase]) -> None:
    sampler, rows = create_sampler(cases, len(cases[0].logits))
    found = list_choices(sampler.sample(torch.tensor([case.logits for case in cases]), rows))
    for case, answer in zip(cases, found, strict=True):
        assert answer == expected(case), case


def sample_one(
    params: SamplingParams, logits: Sequence[float], **bind: Any
) -> tuple[int, str | None]:
    """Return token and error of a row whose sequence is a prompt of one token 0."""
    sampler = Sampler(1, len(logits), CPU)
    sampler.bind(0, Bind(params, seed=1, prompt_len=1, **bind))
    row = Row(0, 0, 0, 0, (0,), num_samples=1)
    sampler.update_penalties((row,), torch.tensor([0]))
    return list_choices(sampler.sample(torch.tensor([list(logits)]), [row]))[0]


def some_params(rng: Random, vocab_size: int) -> SamplingParams:
    """Return any combination, each field at its default about half the time."""

    def maybe(value: Callable[[], Any], default: Any) -> Any:
        return value() if rng.random() < 0.5 else default

    def ids(max_count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, max_count))]

    return SamplingParams(
        temperature=maybe(lambda: rng.choice([0.0, 1e-5, 0.3, 0.7, 2.0]), 1.0),
        top_k=maybe(lambda: rng.randint(1, vocab_size + 2), 0),
        top_p=maybe(lambda: rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999]), 1.0),
        min_p=maybe(lambda: rng.choice([0.01, 0.2, 1.0]), 0.0),
        repetition_penalty=maybe(lambda: rng.choice([0.5, 1.3]), 1.0),
        presence_penalty=maybe(lambda: rng.choice([-0.7, 1.1]), 0.0),
        frequency_penalty=maybe(lambda: rng.choice([-0.3, 0.6]), 0.0),
        logit_bias=maybe(lambda: {t: rng.uniform(-5.0, 5.0) for t in ids(4)}, ()),
        allowed_token_ids=maybe(lambda: ids(min(vocab_size, 1024)), None)
        if rng.random() < 0.5
        else None,
        min_tokens=maybe(lambda: rng.randint(1, 6), 0),
        stop_token_ids=maybe(lambda: ids(3), ()),
    )


def some_case(rng: Random, vocab_size: int) -> SamplerCase:
    """Return logits with or without ties and impossible tokens; now and then unusable ones."""
    scale = rng.choice([0.5, 3.0, 20.0])
    logits = torch.tensor([rng.gauss(0.0, scale) for _ in range(vocab_size)])
    if rng.random() < 0.4:
        logits = logits.round()  # ties
    for _ in range(rng.choice([0, 0, 2, vocab_size * 2])):
        logits[rng.randrange(vocab_size)] = -inf
    if rng.random() < 0.05:
        logits[rng.randrange(vocab_size)] = rng.choice([nan, inf])
    length = rng.randint(1, 12)
    tokens = tuple(rng.randrange(vocab_size) for _ in range(length))
    params = some_params(rng, vocab_size)
    end_ids = (rng.randrange(vocab_size),)
    mask = None
    if params.allowed_token_ids is None and rng.random() < 0.3:
        params = replace(params, structure=ANY)
        mask = rng.randbytes(-(-vocab_size // 8)) + bytes(rng.choice((0, 3)))
    bind = Bind(params, rng.getrandbits(64), rng.randint(1, length), end_ids)
    return SamplerCase(bind, tokens, logits.tolist(), mask)


@pytest.mark.parametrize("vocab_size", [2, 7, 64])
def test_tokens_and_errors_are_those_of_the_normative_arithmetic(vocab_size: int) -> None:
    rng = Random(vocab_size)
    for _ in range(40):
        check([some_case(rng, vocab_size) for _ in range(40)])


def test_adjusted_logits_are_those_of_sampling_to_the_last_bit() -> None:
    rng = Random(5)
    cases = [some_case(rng, 40) for _ in range(80)]
    sampler, rows = create_sampler(cases, 40)
    logits, num_compared = torch.tensor([case.logits for case in cases]), 0
    for chunk in sampler.adjusted_chunks(logits, rows, range(len(rows))):
        for index, adjusted in zip(chunk.rows, chunk.logits.tolist(), strict=True):
            case = cases[index]
            singles = logits[index].tolist()
            if sampling.invalid_logits_reason(singles) is None:
                assert adjusted == process_logits(case, singles)
                num_compared += 1
    assert num_compared > 40


def test_a_vocabulary_too_wide_to_select_from_is_sorted_with_the_same_result() -> None:
    rng = Random(5)
    check([some_case(rng, 2500) for _ in range(200)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_dtype_are_read_exactly(dtype: Any) -> None:
    rng = Random(7)
    rounded = [
        case._replace(logits=torch.tensor(case.logits).to(dtype).tolist())
        for case in (some_case(rng, 30) for _ in range(100))
    ]
    sampler, rows = create_sampler(rounded, 30)
    logits = torch.tensor([case.logits for case in rounded], dtype=dtype)
    assert list_choices(sampler.sample(logits, rows)) == [expected(case) for case in rounded]


def test_more_rows_than_fit_in_memory_at_once_get_the_tokens_they_get_alone() -> None:
    vocab_size, num_rows = 400_000, 24  # A chunk has 10 rows.
    torch.manual_seed(0)
    logits = torch.randn(num_rows, vocab_size)
    sampler = Sampler(num_rows, vocab_size, CPU)
    rows = [Row(i, 0, i, 0, (0,)) for i in range(num_rows)]
    for row in rows:
        sampler.bind(row.slot, Bind(SamplingParams(temperature=0.8), row.slot, 1))
    together = sampler.sample(logits, rows).tokens.tolist()
    alone = [sampler.sample(logits[i : i + 1], rows[i : i + 1]).tokens.item() for i in (0, 10, 23)]
    assert alone == [together[i] for i in (0, 10, 23)]


def test_bits_of_the_noise_are_the_integers_of_sampling() -> None:
    rng = Random(3)
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *(rng.getrandbits(64) for _ in range(20))]
    positions = [0, 1, 2**31 - 1, *(rng.randrange(2**20) for _ in range(22))]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    keys = draw_keys(signed, torch.tensor(positions))
    bits = noise_bits(keys, 200)
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = sampling.draw_key(seed, position, sampling.PLAIN)
        assert keys[i].item() % 2**64 == key
        uniforms = [(b + 0.5) * 2.0**-32 for b in bits[i].tolist()]
        assert uniforms == [sampling.uniform(key, token) for token in range(200)]


def test_noise_is_that_of_sampling_to_the_last_bits() -> None:
    keys = draw_keys(torch.tensor([5]), torch.tensor([9]))
    key = sampling.draw_key(5, 9, sampling.PLAIN)
    expected_noise = [sampling.gumbel(key, token) for token in range(1000)]
    assert gumbel_noise(keys, 1000)[0].tolist() == pytest.approx(
        expected_noise, rel=1e-13, abs=1e-15
    )


def test_equal_logits_give_the_lower_id() -> None:
    assert sample_one(GREEDY, [1.0, 3.0, 3.0, 3.0]) == (1, None)
    assert sample_one(SamplingParams(top_k=1), [1.0, 3.0, 3.0, 3.0]) == (1, None)


def test_a_row_that_cannot_be_sampled_fails_alone() -> None:
    logits = torch.tensor([[0.0, 1.0], [nan, 1.0], [inf, 1.0], [-inf, -inf], [1.0, 0.0]])
    sampler = Sampler(5, 2, CPU)
    rows = [Row(i, 0, i, 0, (0,)) for i in range(5)]
    for row in rows:
        sampler.bind(row.slot, Bind(GREEDY, 0, 1))
    unusable = [(0, sampling.invalid_logits_reason(logits[i].tolist())) for i in (1, 2, 3)]
    assert list_choices(sampler.sample(logits, rows)) == [(1, None), *unusable, (0, None)]


def test_allowed_ids_that_the_model_rules_out_fail_in_the_words_of_any_other_model() -> None:
    params = SamplingParams(allowed_token_ids=[1])
    row = Row(0, 0, 0, 0, (0,), new_blocks=(0,), num_samples=1, bind=Bind(params, 0, 1))
    model = LogitsModel(
        lambda context: [0.0, -inf], vocab_size=2, eos_token=0, num_blocks=1, block_size=4
    )
    words = model.forward(StepPlan(0, (row,), 1, 4)).result().rows[0].error
    assert sample_one(params, [0.0, -inf]) == (0, words)


@pytest.mark.parametrize("vocab_size", [63, 64, 65, 300])
def test_mask_bits_after_the_vocabulary_change_nothing(vocab_size: int) -> None:
    bind = Bind(SamplingParams(temperature=0.0, structure=ANY), 0, 1)
    last = vocab_size - 1
    mask = (1 << last | 1 << vocab_size).to_bytes(80, "little")
    check(
        [
            SamplerCase(bind, (0,), [1.0] * vocab_size, mask),
            SamplerCase(bind, (0,), [1.0] * vocab_size),
        ]
    )
    sampler, rows = create_sampler([SamplerCase(bind, (0,), [1.0] * vocab_size, mask)], vocab_size)
    assert list_choices(sampler.sample(torch.ones(1, vocab_size), rows)) == [(last, None)]


def test_a_row_with_a_structure_is_always_adjusted() -> None:
    sampler = Sampler(1, 8, CPU)
    sampler.bind(0, Bind(SamplingParams(temperature=0.0, structure=ANY), 0, 1))
    assert sampler.adjusted_slots == {0}
    assert sampler.is_adjusted(Row(0, 0, 0, 500, (1,), masks=(b"\1",)))


def test_a_mask_of_ids_that_the_model_rules_out_fails_alone() -> None:
    bind = Bind(SamplingParams(structure=ANY), 0, 1)
    check(
        [SamplerCase(bind, (0,), [0.0, -inf], b"\2"), SamplerCase(bind, (0,), [0.0, -inf], b"\1")]
    )
    assert expected(SamplerCase(bind, (0,), [0.0, -inf], b"\2")) == (0, sampling.NO_ALLOWED_TOKEN)


def test_min_tokens_masks_end_ids_until_the_output_is_long_enough() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[2])
    sampler = Sampler(1, 4, CPU)
    sampler.bind(0, Bind(params, 0, prompt_len=3, end_ids=(3, 2)))
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    lengths = (3, 4, 5)
    rows = [Row(0, 0, 0, length - 1, (0,)) for length in lengths]
    assert [sampler.sample(logits, [row]).tokens.item() for row in rows] == [1, 1, 3]


def test_min_tokens_masks_nothing_where_nothing_else_is_possible() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1)
    assert sample_one(params, [-inf, 2.0, 1.0], end_ids=(1, 2, 1)) == (1, None)


def test_history_that_rows_feed_again_is_counted_once() -> None:
    """Token 1 is one output. Counted twice, 2.0 - 2 * 0.6 falls under token 0's 1.0."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.6)
    sampler = Sampler(1, 2, CPU)
    sampler.bind(0, Bind(params, 0, prompt_len=1, history=(0, 1)))
    row = Row(0, 0, 0, 0, (0, 1))
    sampler.update_penalties((row,), torch.tensor([0, 1]))
    assert sampler.sample(torch.tensor([[1.0, 2.0]]), [row]).tokens.item() == 1


@pytest.mark.parametrize(
    ("params", "before"),
    [
        (SamplingParams(temperature=0.0, presence_penalty=2.0), (0, 1)),
        (SamplingParams(temperature=0.0, repetition_penalty=3.0), (1,)),
    ],
)
def test_a_slot_forgets_the_tokens_of_the_sequence_before(
    params: SamplingParams, before: tuple[int, ...]
) -> None:
    """Token 1 was in its prompt or output; were it remembered, token 2 would be chosen."""
    sampler = Sampler(1, 3, CPU)
    sampler.bind(0, Bind(params, 0, prompt_len=1, history=before))
    sampler.bind(0, Bind(params, 0, prompt_len=1, history=(0,)))
    row = Row(0, 0, 0, 0, (0,))
    sampler.update_penalties((row,), torch.tensor([0]))
    assert sampler.sample(torch.tensor([[0.0, 2.0, 1.0]]), [row]).tokens.item() == 1


def test_inputs_fed_one_by_one_count_as_those_fed_at_once() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.9)
    case = SamplerCase(
        Bind(params, 0, prompt_len=3), (4, 4, 1, 2, 2, 4, 0), [3.0, 2.5, 5.0, -1.0, 6.0]
    )
    sampler = Sampler(1, 5, CPU)
    sampler.bind(0, case.bind)
    for at, token in enumerate(case.tokens):
        row = Row(0, 0, 0, at, (token,))
        sampler.update_penalties((row,), torch.tensor([token]))
    assert list_choices(sampler.sample(torch.tensor([case.logits]), [row])) == [expected(case)]


def test_top_p_is_over_what_top_k_left_whatever_other_rows_keep() -> None:
    """Of 0.4 and 0.3 the first has 4/7, more than 0.55. Of all three it has 0.4, less than that."""
    sampler = Sampler(2, 4, CPU)
    sampler.bind(0, Bind(SamplingParams(top_k=2, top_p=0.55), 0, prompt_len=1))
    sampler.bind(1, Bind(SamplingParams(top_k=3, top_p=0.55), 0, prompt_len=1))
    logits = torch.tensor([[0.4, 0.3, 0.3, 0.0]] * 2).log()
    chosen = [
        sampler.sample(logits, [Row(slot, 0, slot, start, (0,)) for slot in (0, 1)]).tokens.tolist()
        for start in range(20)
    ]
    assert [set(tokens) for tokens in zip(*chosen, strict=True)] == [{0}, {0, 1}]


def test_no_memory_is_taken_for_penalties_until_a_sequence_asks() -> None:
    seen = PenaltyState(4, 1000, CPU)
    seen.bind(0, Bind(SamplingParams(top_k=5), 0, 1))
    assert seen.num_bytes == 0
    seen.bind(0, Bind(SamplingParams(presence_penalty=1.0), 0, 1))
    assert seen.num_bytes == 4 * 1000 * 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        GREEDY,
        SamplingParams(temperature=0.0, top_k=4, top_p=0.5, min_p=0.2),
        SamplingParams(top_k=9, top_p=0.9, min_p=0.1),
        SamplingParams(min_tokens=3, ignore_eos=True),
        SamplingParams(logprobs=2, prompt_logprobs=1),
    ],
)
def test_temperature_and_filters_need_the_slot_table_alone(params: SamplingParams) -> None:
    sampler = Sampler(1, 10, CPU)
    sampler.bind(0, Bind(params, 0, 1))
    assert not sampler.is_adjusted(Row(0, 0, 0, 0, (0,)))
    assert sampler.adjusted_slots == set()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=[1]),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
    ],
)
def test_a_row_whose_logits_change_is_adjusted(params: SamplingParams) -> None:
    sampler = Sampler(1, 10, CPU)
    sampler.bind(0, Bind(params, 0, 1))
    assert sampler.is_adjusted(Row(0, 0, 0, 10**6, (0,)))
    assert sampler.adjusted_slots == {0}


def test_a_row_is_adjusted_until_its_output_may_end() -> None:
    sampler = Sampler(1, 10, CPU)
    sampler.bind(0, Bind(SamplingParams(min_tokens=2), 0, prompt_len=5, end_ids=(1,)))
    adjusted = [sampler.is_adjusted(Row(0, 0, 0, end - 1, (0,))) for end in (5, 6, 7)]
    assert adjusted == [True, True, False]


def test_the_slot_table_holds_the_last_binds_after_one_flush() -> None:
    sampler = Sampler(3, 10, CPU)
    params = SamplingParams(temperature=0.25, top_k=4, top_p=0.5, min_p=1.0)
    sampler.bind(2, Bind(params, 2**64 - 1, 1))
    sampler.bind(0, Bind(SamplingParams(temperature=0.5), 8, 1))
    sampler.bind(0, Bind(SamplingParams(temperature=1e-6), 9, 1))
    sampler.flush_slots()
    assert sampler.slot_table[:, 0].tolist() == [9, 0, -1, 0]
    greedy = [1.0, 0.0, 10.0, 1.0, float(sampling.MAX_GAP)]
    numbers = sampler.slot_table[:, 1:].view(torch.float64)
    assert numbers.tolist() == [greedy, greedy, [4.0, 1.0, 4.0, 0.5, 0.0], greedy]
    assert sampler.unadjusted_table.equal(sampler.slot_table)


def test_a_slot_that_is_always_adjusted_is_greedy_without_its_adjustments() -> None:
    sampler = Sampler(2, 10, CPU)
    sampler.bind(0, Bind(SamplingParams(temperature=0.25, repetition_penalty=1.1), 5, 1))
    sampler.bind(1, Bind(SamplingParams(temperature=0.25, min_tokens=2), 6, 1, end_ids=(1,)))
    sampler.flush_slots()
    scales = [
        table[:2, 1:].view(torch.float64)[:, 0].tolist()
        for table in (sampler.slot_table, sampler.unadjusted_table)
    ]
    assert scales == [[4.0, 4.0], [1.0, 4.0]]


def test_scored_positions_are_those_of_the_prompt_after_the_first() -> None:
    """Inputs at [start, end) give the log probabilities of tokens at (start, end]."""
    sampler = Sampler(2, 10, CPU)
    sampler.bind(0, Bind(SamplingParams(prompt_logprobs=0), 0, prompt_len=5, history=(1,) * 5))
    sampler.bind(1, Bind(SamplingParams(), 0, prompt_len=5))
    rows = [Row(0, 0, 0, 0, (1, 1, 1)), Row(0, 0, 0, 3, (1, 1, 1)), Row(1, 0, 1, 0, (1, 1, 1))]
    assert [list(sampler.prompt_logprob_positions(row)) for row in rows] == [[1, 2, 3], [4], []]


def test_a_slot_is_listed_by_what_its_sequence_asks() -> None:
    sampler = Sampler(1, 10, CPU)
    asking = SamplingParams(presence_penalty=1.0, logprobs=0, prompt_logprobs=0)
    for params, listed in ((asking, {0}), (SamplingParams(), set())):
        sampler.bind(0, Bind(params, 0, prompt_len=1))
        assert sampler.slot_bind(0).params == params
        assert (
            sampler.adjusted_slots
            == sampler.penalty_slots
            == sampler.logprob_slots
            == sampler.prompt_logprob_slots
            == listed
        )


@pytest.mark.parametrize("count", [0, 1, 5, 99])
def test_logprobs_are_those_of_sampling(count: int) -> None:
    rng = Random(count)
    cases = [some_case(rng, 40) for _ in range(60)]
    lines = [case.logits for case in cases if sampling.invalid_logits_reason(case.logits) is None]
    tokens = [rng.randrange(40) for _ in lines]
    found = read_logprobs(compute_logprobs(torch.tensor(lines), torch.tensor(tokens), count))
    for line, token, score in zip(lines, tokens, found, strict=True):
        oracle = sampling.token_logprob(line, token, count)
        assert score.token == token
        assert score.logprob == pytest.approx(oracle.logprob, abs=1e-12)
        assert [t for t, _ in score.top] == [t for t, _ in oracle.top]
        assert [x for _, x in score.top] == pytest.approx([x for _, x in oracle.top], abs=1e-12)


def test_logprobs_of_unusable_logits_are_not_numbers() -> None:
    lines = torch.tensor([[nan, 0.0, 1.0], [inf, 0.0, 1.0], [-inf, -inf, -inf]])
    scores = read_logprobs(compute_logprobs(lines, torch.tensor([1, 1, 1]), 2))
    assert [score.logprob != score.logprob for score in scores] == [True] * 3


class SlotCase(NamedTuple):
    """Arguments of `Sampler.sample_slots`, and the binds of their rows."""

    sampler: Sampler
    binds: list[Bind]
    logits: Any
    slots: Any
    positions: Any

    def sample(self) -> list[list[int]]:
        """Return tokens and statuses."""
        out = torch.full((2, len(self.binds)), 77, dtype=torch.int32, device=self.logits.device)
        self.sampler.sample_slots(self.logits, self.slots, self.positions, out[0], out[1])
        return out.tolist()


def create_slot_case(device: Any, dtype: Any, vocab_size: int, num_rows: int = 64) -> SlotCase:
    """Return rows of greedy, random and filtered slots; some have logits of no use."""
    rng = Random(vocab_size)
    logits = torch.tensor(
        [[rng.gauss(0.0, 2.0) for _ in range(vocab_size)] for _ in range(num_rows)]
    )
    logits[0, 3], logits[1, 2], logits[2], logits[3, :5] = nan, inf, -inf, -inf
    logits[4] = 1.0
    sampler = Sampler(num_rows, vocab_size, device)
    filters = ({}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.5})
    binds = [
        Bind(
            SamplingParams(temperature=rng.choice([0.0, 0.7, 2.0]), **rng.choice(filters)),
            rng.getrandbits(64),
            1,
        )
        for _ in range(num_rows)
    ]
    for slot, bind in enumerate(binds):
        sampler.bind(slot, bind)
    sampler.flush_slots()
    slots = rng.sample(range(num_rows), num_rows)
    positions = [rng.randrange(1, 2**20) for _ in range(num_rows)]
    return SlotCase(
        sampler,
        [binds[slot] for slot in slots],
        logits.to(dtype).to(device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [300, MAX_TOPK + 200])
def test_samples_from_the_slot_table_are_those_of_sampling(vocab_size: int, dtype: Any) -> None:
    case = create_slot_case(CPU, dtype, vocab_size, 20)
    tokens, status = case.sample()
    found = [(t, error_text(s) if s else None) for t, s in zip(tokens, status, strict=True)]
    rows = zip(case.binds, case.positions.tolist(), case.logits.tolist(), found, strict=True)
    for bind, position, logits, answer in rows:
        error = sampling.invalid_logits_reason(logits)
        token = 0 if error else sampling.sample_token(logits, bind.params, bind.seed, position)
        assert answer == (token, error)


def test_a_row_on_the_scratch_slot_is_greedy() -> None:
    sampler = Sampler(2, 3, CPU)
    out = torch.zeros(2, 1, dtype=torch.int64)
    slots, positions = torch.tensor([2]), torch.tensor([0])
    sampler.sample_slots(torch.tensor([[0.0, 2.0, 1.0]]), slots, positions, out[0], out[1])
    assert out.tolist() == [[1], [0]]


def test_a_cpu_needs_no_bindings_of_cuda() -> None:
    program = (
        "import sys\n"
        "sys.modules['triton'] = sys.modules['cuda'] = None\n"
        "import torch\n"
        "from tests.hf.test_sampler import CPU, create_slot_case\n"
        "create_slot_case(CPU, torch.float32, 10).sample()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 2048, 4100])
def test_cuda_samples_what_the_cpu_samples(vocab_size: int, dtype: Any) -> None:
    cuda = torch.device("cuda")
    expected = create_slot_case(CPU, dtype, vocab_size).sample()
    assert create_slot_case(cuda, dtype, vocab_size).sample() == expected


@pytest.mark.gpu
def test_a_sample_inside_a_graph_reads_the_slot_table_as_it_is_at_replay() -> None:
    case = create_slot_case(torch.device("cuda"), torch.bfloat16, 4100)
    expected = case.sample()
    table = case.sampler.unadjusted_table
    entries = table.clone()
    table.copy_(entries[-1])  # all greedy
    out = torch.zeros(2, 64, dtype=torch.int32, device=case.logits.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.sampler.sample_slots(case.logits, case.slots, case.positions, out[0], out[1])
    table.copy_(entries)
    graph.replay()
    assert out.tolist() == expected


COUNTS = (5, MAX_FAST_LOGPROBS, MAX_FAST_LOGPROBS + 10)
"""Log probabilities for each token: few by the kernel, many by torch."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("vocab_size", [64, 2500])
def test_cuda_chooses_what_the_cpu_chooses_and_never_waits(vocab_size: int) -> None:
    cuda = torch.device("cuda")
    rng = Random(11)
    cases = [some_case(rng, vocab_size) for _ in range(200)]
    logits = torch.tensor([case.logits for case in cases], device=cuda)
    inputs = torch.tensor([t for case in cases for t in case.tokens], device=cuda)
    rows = [
        Row(i, 0, i, 0, case.tokens, masks=() if case.mask is None else (case.mask,))
        for i, case in enumerate(cases)
    ]
    listed = torch.tensor([[i % vocab_size, 3] for i in range(len(cases))], device=cuda)
    row_indices = torch.arange(len(cases), device=cuda)
    sampler = Sampler(len(cases), vocab_size, cuda)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot, case in enumerate(cases):
            sampler.bind(slot, case.bind)
        sampler.update_penalties(rows, inputs)
        choice = sampler.sample(logits, rows)
        tokens = choice.tokens.long()
        lines = [sampler.compute_logprobs(logits, tokens, count) for count in COUNTS]
        lines.append(sampler.compute_listed_logprobs(logits, tokens, listed, row_indices))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cpu, cpu_rows = create_sampler(cases, vocab_size)
    chosen = cpu.sample(logits.cpu(), cpu_rows)
    assert list_choices(choice) == list_choices(chosen)
    oracles = [compute_logprobs(logits.cpu(), chosen.tokens, count) for count in COUNTS]
    oracles.append(compute_listed_logprobs(logits.cpu(), chosen.tokens, listed.cpu()))
    is_finite = chosen.status != STATUS_NAN  # of a row with NaN the top tokens are any
    for found, oracle in zip(lines, oracles, strict=True):
        torch.testing.assert_close(
            found.cpu()[is_finite], oracle[is_finite], rtol=0.0, atol=1e-12, equal_nan=True
        )
        assert bool(found.cpu()[~is_finite][:, [1, -1]].isnan().all())
