"""The kernels of sample.cu on the CPU, against forge.sampling. Needs a C++ compiler and no GPU."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf, isnan, nan
from random import Random
from typing import Any, NamedTuple

import pytest

from forge.request import SamplingParams
from forge.sampling import (
    GAP_STEPS,
    PLAIN,
    draw_key,
    filter_logits,
    gap_weight,
    gumbel,
    logit_gaps,
    process_logits,
    sample_token,
    token_logprob,
)
from tests.models.emulated_kernels import (
    COMPILER,
    Kernels,
    Matrix,
    Variant,
    compile_kernels,
    library_folder,
)

MAX_SINGLE = 3.4028234663852886e38

pytestmark = [
    # Compiling a variant takes longer than its tests, so all of them are in one run.
    pytest.mark.long,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are those of Linux"),
]

OK, HAS_NAN, HAS_POSITIVE_INF, NOTHING_ALLOWED, ALL_NEGATIVE_INF = range(5)
"""Statuses: forge/models/hf/sampling/status.py, which needs torch."""


VARIANTS = (
    Variant(2, 64, "F32"),
    Variant(1, 32, "F16", uses_scratch=True),
    Variant(3, 32, "BF16"),
)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Kernels]:
    """Return a function that returns the kernels of a variant, compiled once.

    The order of their warps depends on the calls since then.
    """
    folder = library_folder(tmp_path_factory)

    def build(variant: Variant) -> Kernels:
        return Kernels(compile_kernels(variant, folder), variant)

    return build


@pytest.fixture(
    params=VARIANTS,
    ids=lambda variant: f"{variant.cluster} CTAs {variant.logit_type}",
)
def kernels(request: pytest.FixtureRequest, build: Callable[[Variant], Kernels]) -> Kernels:
    return build(request.param)


SHAPES = ("gauss", "equal", "ties", "peak", "islands", "impossible", "slope", "zeros", "cliff")
"""Kinds of logits."""


def some_logits(rng: Random, size: int, shape: str) -> list[float]:
    """Return a row of one kind."""
    spread = rng.choice((0.01, 0.3, 1.0, 3.0, 8.0, 30.0))
    row = [rng.gauss(0.0, spread) for _ in range(size)]
    if shape == "equal":
        row = [row[0]] * size
    elif shape == "ties":
        row = [round(2.0 * x) / 2.0 for x in row]
    elif shape == "peak":
        row[rng.randrange(size)] += rng.uniform(2.0, 40.0)
    elif shape == "islands":
        # Between them are many bins without a token, all of which may seem to hold the cut.
        row = [x * 0.05 - rng.choice((0.0, 6.0, 12.0)) for x in row]
    elif shape == "impossible":
        row = [x if rng.random() < 0.4 else -inf for x in row]
        row[rng.randrange(size)] = 0.0
    elif shape == "slope":
        # Each bin has about the same mass: many bins may hold the cut.
        step = rng.choice((0.001, 0.03, 0.125))
        row = [-step * token for token in rng.sample(range(size), size)]
    elif shape == "zeros":
        row = [rng.choice((0.0, -0.0)) for _ in row]
    elif shape == "cliff":
        # Tokens with the largest gap, and impossible ones.
        row = [rng.choice((-inf, -200.0, 0.0)) for _ in row]
        row[rng.randrange(size)] = 0.0
    return row


def some_params(rng: Random, size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 1e-5, 0.3, 0.7, 1.0, 2.0)),
        top_k=rng.choice((0, 0, 2, 20, rng.randint(1, size), size, size + 7)),
        top_p=rng.choice((1.0, 1.0, rng.uniform(1e-9, 1.0), 0.5, 0.9, 0.95, 0.999, 1e-9)),
        min_p=rng.choice((0.0, 0.0, 0.1, 0.001, 1.0)),
    )


def edge_params(rng: Random, row: Sequence[float]) -> SamplingParams:
    """Return a top-p that a number of tokens reaches exactly, or misses by a rounding error.

    In half of the cases it is a part of what top-k leaves.
    """
    gaps = sorted(logit_gaps(row, 1.0))
    top_k = rng.choice((0, rng.randint(2, len(gaps) + 1)))
    masses = list(accumulate(map(gap_weight, gaps[: top_k or None])))
    edge = rng.choice((len(masses) // 2, rng.randint(1, len(masses)))) - 1
    top_p = masses[edge] / masses[-1] * rng.choice((1.0, 1.0 - 1e-12, 1.0 + 1e-12))
    return SamplingParams(top_k=top_k, top_p=min(max(top_p, 1e-9), 1.0))


def some_keys(rng: Random, count: int) -> list[tuple[int, int]]:
    """Return seeds and positions."""
    return [(rng.getrandbits(64), rng.randrange(200_000)) for _ in range(count)]


def expected_samples(
    rows: Iterable[Sequence[float]],
    params: Sequence[SamplingParams],
    keys: Sequence[tuple[int, int]],
    statuses: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Return token and status of each row in the normative arithmetic."""
    rows = list(rows)
    return [
        (0, status) if status else (sample_token(row, each, *key), OK)
        for row, each, key, status in zip(
            rows, params, keys, statuses or [row_status(row) for row in rows], strict=True
        )
    ]


def row_status(row: Sequence[float]) -> int:
    if any(map(isnan, row)):
        return HAS_NAN
    return {inf: HAS_POSITIVE_INF, -inf: ALL_NEGATIVE_INF}.get(max(row), OK)


def test_tokens_are_those_of_the_normative_arithmetic(kernels: Kernels) -> None:
    rng = Random(11)
    for index in range(40):
        size = rng.choice((1, 5, 64, 300, 1000, 3000) if index < 30 else (1, 2, 8, 33))
        rows = [some_logits(rng, size, rng.choice(SHAPES)) for _ in range(4)]
        logits = Matrix(rows, kernels.variant.logit_type, aligned=index % 2 == 0)
        params = [
            edge_params(rng, row) if rng.random() < 0.2 else some_params(rng, size)
            for row in logits.rows
        ]
        keys, order = some_keys(rng, 4), rng.sample(range(4), 4)
        picked = [logits.rows[at] for at in order]
        assert kernels.sample(logits, params, keys, rows=order) == expected_samples(
            picked, params, keys
        )


def test_the_best_of_two_parts_of_a_row_is_the_best_of_the_row(kernels: Kernels) -> None:
    """Noise depends on the id in the whole row. Of equal scores the lower id is the better."""
    rng = Random(12)
    num_equal = 0
    for index in range(30):
        size = rng.choice((2, 9, 64, 300, 1000))
        cut = rng.randrange(1, size)
        rows = [some_logits(rng, size, rng.choice(("gauss", "equal", "ties"))) for _ in range(4)]
        whole = Matrix(rows, kernels.variant.logit_type, aligned=True)
        parts = [
            Matrix([row[start:end] for row in rows], kernels.variant.logit_type, aligned=aligned)
            for start, end, aligned in ((0, cut, True), (cut, size, index % 2 == 0))
        ]
        params = [SamplingParams(temperature=rng.choice((0.0, 0.7, 1.3))) for _ in rows]
        keys = some_keys(rng, 4)
        low, high = (
            kernels.sample_part(part, params, keys, first)
            for part, first in zip(parts, (0, cut), strict=True)
        )
        num_equal += sum(a[0] == b[0] for a, b in zip(low, high, strict=True))
        merged = [(a if a[0] >= b[0] else b)[1:] for a, b in zip(low, high, strict=True)]
        assert merged == expected_samples(whole.rows, params, keys)
    assert num_equal > 5


def test_rows_that_are_not_finite_have_a_status_and_no_token(kernels: Kernels) -> None:
    rng = Random(12)
    for size in (1, 7, 300):
        rows = [some_logits(rng, size, "gauss") for _ in range(7)]
        for row, value in zip(rows[:3], (nan, inf, -inf), strict=True):
            row[rng.randrange(size)] = value
        rows[3] = [-inf] * size
        rows[4] = [rng.choice((nan, -inf)) for _ in range(size)]
        rows[5][0], rows[5][-1] = inf, nan
        for index in range(4):
            logits = Matrix(rows, kernels.variant.logit_type, aligned=index % 2 == 0)
            params = [
                SamplingParams(temperature=float(index > 0))
                if index < 2
                else some_params(rng, size)
                for _ in rows
            ]
            keys = some_keys(rng, len(rows))
            expected = expected_samples(logits.rows, params, keys)
            assert kernels.sample(logits, params, keys) == expected


def test_an_infinity_in_any_warp_has_a_status(kernels: Kernels) -> None:
    rng = Random(17)
    rows = [[0.0] * 512 for _ in range(40)]
    for row in rows:
        row[rng.randrange(512)] = inf
    logits = Matrix(rows, kernels.variant.logit_type, aligned=True)
    found = kernels.sample(logits, [SamplingParams()] * 40, some_keys(rng, 40))
    assert found == [(0, HAS_POSITIVE_INF)] * 40


def test_flags_of_the_raw_logits_decide_the_status(kernels: Kernels) -> None:
    """The bits are NaN, +inf and finite."""
    raw = [0, 1, 2, 3, 4, 5, 6, 7, 4]
    statuses = [ALL_NEGATIVE_INF, HAS_NAN, HAS_POSITIVE_INF, HAS_NAN] * 2 + [NOTHING_ALLOWED]
    statuses[4] = OK
    rows = [[0.5, 0.25]] * 8 + [[-inf, -inf]]
    logits = Matrix(rows, kernels.variant.logit_type, aligned=True)
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)):
        found = kernels.sample(logits, [params] * 9, [(3, 4)] * 9, raw_flags=array("I", raw))
        assert found == expected_samples(rows, [params] * 9, [(3, 4)] * 9, statuses)


def test_the_ends_of_the_range_of_single_precision(build: Callable[[Variant], Kernels]) -> None:
    rng = Random(13)
    ends = (MAX_SINGLE, 3e38, 2.99999e38, 1e38, 0.0, 1e-45, -1e38, -3e38, -MAX_SINGLE, -inf)
    kernels = build(VARIANTS[0])
    for index in range(30):
        rows = [[rng.choice(ends[rng.randrange(9) :]) for _ in range(37)] for _ in range(4)]
        rows[0] = [-rng.uniform(2.9e38, 3e38) for _ in range(37)]
        rows[1] = [rng.uniform(2.99e38, 3e38) for _ in range(37)]
        rows[2] = [10.0 + rng.randrange(8) * 2.0**-20 for _ in range(37)]
        for row in rows:
            row[0] = max(row[0], -MAX_SINGLE)
        logits = Matrix(rows, "F32", aligned=index % 2 == 0)
        params = [some_params(rng, 37) for _ in rows]
        keys = some_keys(rng, 4)
        expected = expected_samples(logits.rows, params, keys)
        assert kernels.sample(logits, params, keys) == expected


def test_scores_that_are_nearly_equal(build: Callable[[Variant], Kernels]) -> None:
    """The logits undo the noise up to their rounding, below what single precision resolves.

    Under these seeds the noise of a token is among the largest there are.
    """
    rng = Random(16)
    kernels = build(VARIANTS[0])
    seeds = (27_316_358, 68_101_346, 126_865_687, 144_447_206)
    for index in range(24):
        size = (8, 100)[index // 2 % 2]
        temperature = rng.choice((1e-5, 0.3, 0.7, 1.0))
        keys = [(seed, 0) for seed in rng.sample(seeds, 2)] if index % 3 else some_keys(rng, 2)
        score = rng.choice((0.0, 5.0, -1e4, 1e6, -1e6))
        rows = []
        for key in keys:
            noise = [gumbel(draw_key(*key, PLAIN), token) for token in range(size)]
            row = [(score - each) * temperature for each in noise]
            if index % 2:
                row[noise.index(max(noise))] += (1e-3 + abs(score) * 1e-6) * temperature
            rows.append(row)
        logits = Matrix(rows, "F32", aligned=True)
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=rng.choice((1.0, 0.99)),
                min_p=rng.choice((0.0, 1e-9)),
            )
            for _ in rows
        ]
        expected = expected_samples(logits.rows, params, keys)
        assert kernels.sample(logits, params, keys) == expected


def expected_tokens(
    rows: Sequence[Sequence[float]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    return [
        sorted(each.token for each in filter_logits(row, of_row))
        for row, of_row in zip(rows, params, strict=True)
    ]


def test_the_filters_keep_the_tokens_of_the_normative_arithmetic(kernels: Kernels) -> None:
    rng = Random(14)
    for index in range(40):
        size = rng.choice((1, 5, 64, 300, 1000))
        rows = [some_logits(rng, size, rng.choice(SHAPES)) for _ in range(4)]
        logits = Matrix(rows, kernels.variant.logit_type, aligned=index % 2 == 0)
        params = [
            edge_params(rng, row) if rng.random() < 0.4 else some_params(rng, size)
            for row in logits.rows
        ]
        params = [SamplingParams(top_k=2) if each.greedy else each for each in params]
        assert kernels.kept_tokens(logits, params) == expected_tokens(logits.rows, params)


def test_impossible_tokens_are_not_among_the_k_most_likely(kernels: Kernels) -> None:
    rng = Random(18)
    rows = [some_logits(rng, 64, "cliff") for _ in range(8)]
    logits = Matrix(rows, kernels.variant.logit_type, aligned=True)
    params = [SamplingParams(top_k=rng.randint(20, 50)) for _ in rows]
    assert kernels.kept_tokens(logits, params) == expected_tokens(rows, params)


def test_top_p_keeps_no_token_beyond_top_k(kernels: Kernels) -> None:
    """The top-k ends within equal tokens. The top-p is the mass of all that it keeps."""
    rng = Random(19)
    for shape in ("equal", "ties"):
        rows = [some_logits(rng, 100, shape) for _ in range(4)]
        logits = Matrix(rows, kernels.variant.logit_type, aligned=True)
        params = [SamplingParams(top_k=rng.randint(2, 99), top_p=1.0 - 1e-12) for _ in rows]
        assert kernels.kept_tokens(logits, params) == expected_tokens(logits.rows, params)


def test_a_mass_that_ends_just_before_the_kth_token(build: Callable[[Variant], Kernels]) -> None:
    """The bins of the second search are aligned to its first gap, and its end is within one."""
    offsets = "0 295 305 330 346 374 549 585 641 661 722 742 761 802 876 886 919 1004 1054 1085"
    later = "1120 1184 1583 1642 1932"
    gaps = [0, *(476_744 + int(offset) for offset in f"{offsets} {later}".split())]
    row = [-(gap + 0.5) / GAP_STEPS if gap else 0.0 for gap in gaps]
    weights = [gap_weight(gap) for gap in logit_gaps(row, 1.0)]
    top_k, num_kept = 24, 8
    limit = (sum(weights[: num_kept - 1]) + 0.3 * weights[num_kept - 1]) / sum(weights[:top_k])
    params = [SamplingParams(top_k=top_k, top_p=limit)]
    logits = Matrix([row], "F32", aligned=True)
    found = build(VARIANTS[0]).kept_tokens(logits, params)
    assert found == expected_tokens(logits.rows, params)


def test_the_mass_of_more_equal_tokens_than_32_bits_hold(
    build: Callable[[Variant], Kernels],
) -> None:
    """70,000 tokens in the cells of one CTA: the low 16 bits of their weights exceed 2^32."""
    size = 70_000
    kernels = build(VARIANTS[1])
    logits = Matrix([[0.0] * size], kernels.variant.logit_type, aligned=True)
    (kept,) = kernels.kept_tokens(logits, [SamplingParams(top_p=0.75)])
    assert kept == list(range(size * 3 // 4))


class AdjustedRow(NamedTuple):
    """What a row's logits become.

    drafts   last tokens of `output`, which the counts leave out
    """

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]
    mask: bytes | None


def some_adjusted_row(rng: Random, size: int) -> AdjustedRow:
    edges = [token for token in (0, 63, 64, 4095, 4096, size - 1) if token < size]

    def some_tokens(most: int) -> list[int]:
        count = rng.randint(0, most)
        return [rng.choice((rng.randrange(size), *edges)) for _ in range(count)]

    has_penalties = rng.random() < 0.6
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((0.01, 1.0, 1.3, 10.0)) if has_penalties else 1.0,
        presence_penalty=rng.choice((0.0, 0.7, -2.0)) if has_penalties else 0.0,
        frequency_penalty=rng.choice((0.0, 0.1, 1.9)) if has_penalties else 0.0,
        logit_bias=[(token, rng.uniform(-100.0, 100.0)) for token in some_tokens(9)],
        allowed_token_ids=[rng.randrange(size), *some_tokens(9)] if rng.random() < 0.3 else None,
    )
    drafts = some_tokens(4) if params.has_penalties else []
    mask = None
    if rng.random() < 0.5:
        words = -(-size // 64)
        mask = rng.getrandbits(64 * words).to_bytes(8 * words, "little")
    return AdjustedRow(params, some_tokens(20), some_tokens(20) + drafts, drafts, mask)


def offsets(lists: Iterable[Sequence[Any]]) -> array[int]:
    return array("q", accumulate(map(len, lists), initial=0))


def joined(typecode: str, lists: Iterable[Iterable[Any]]) -> array[Any]:
    """Return the elements of all lists. Never empty, so that it has an address."""
    return array(typecode, [each for values in lists for each in values] or [0])


def adjust(
    kernels: Kernels, logits: Matrix, order: Sequence[int], adjusted: Sequence[AdjustedRow]
) -> tuple[list[array[float]], array[int]]:
    """Return the adjusted logits of each row and the flags of the raw ones."""
    size, num_rows, rng = logits.size, len(adjusted), Random(5)
    masks = [each.mask for each in adjusted if each.mask is not None]
    penalized = [each for each in adjusted if each.params.has_penalties]
    slots = rng.sample(range(num_rows + 2), len(penalized))
    prompt_mask = array("B", b"\1" * size * (num_rows + 2))
    output_counts = array("i", [3]) * (size * (num_rows + 2))
    for slot, row in zip(slots, penalized, strict=True):
        for token in range(slot * size, (slot + 1) * size):
            prompt_mask[token] = output_counts[token] = 0
        for token in row.prompt:
            prompt_mask[slot * size + token] = 1
        for token in row.output[: len(row.output) - len(row.drafts)]:
            output_counts[slot * size + token] += 1
    num_drafts = sum(len(each.drafts) for each in penalized)
    cells = rng.sample(range(2 * num_drafts), num_drafts)
    draft_tokens = array("q", [0] * (2 * num_drafts + 1))
    for cell, token in zip(cells, joined("q", (e.drafts for e in penalized)), strict=False):
        draft_tokens[cell] = token
    strengths = [
        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        for p in (each.params for each in penalized)
    ]
    allowed = [each.params.allowed_token_ids or () for each in adjusted]
    biases = [each.params.logit_bias for each in adjusted]
    out, raw_flags = array("f", [nan]) * (size * num_rows), array("I", [0] * num_rows)
    kernels.run(
        "run_adjust",
        num_rows,
        logits.address,
        logits.row_stride,
        array("q", order),
        size,
        out,
        raw_flags,
        index_of_rows(each.mask is not None for each in adjusted),
        array("Q", b"".join(masks) or bytes(8)),
        offsets(allowed),
        joined("q", allowed),
        offsets(biases),
        joined("q", ([token for token, _ in each] for each in biases)),
        joined("d", ([bias for _, bias in each] for each in biases)),
        index_of_rows(each.params.has_penalties for each in adjusted),
        joined("q", [slots]),
        joined("d", strengths),
        offsets([each.drafts for each in penalized]),
        joined("q", [cells]),
        draft_tokens,
        prompt_mask,
        output_counts,
    )
    return [out[at : at + size] for at in range(0, len(out), size)], raw_flags


def index_of_rows(has_entry: Iterable[bool]) -> array[int]:
    """Return the index of each row among those with an entry, or -1."""
    count = iter(range(1000))
    return array("q", [next(count) if has else -1 for has in has_entry])


@pytest.mark.parametrize("size", [1, 70, 1000, 2 * 4096 + 300])
def test_adjusted_logits_are_those_of_the_normative_arithmetic(kernels: Kernels, size: int) -> None:
    """Then their tokens are those, and the status is that of the raw logits."""
    rng = Random(size)
    for index in range(3 if size < 4096 else 1):
        rows = [some_logits(rng, size, rng.choice(SHAPES)) for _ in range(6)]
        rows[1][rng.randrange(size)] = nan
        rows[2][rng.randrange(size)] = inf
        rows[3] = [-inf] * size
        rows[4][0] = -inf
        rows[5] = [rng.choice((3e38, 0.0, -3e38)) for _ in range(size)]
        adjusted = [some_adjusted_row(rng, size) for _ in range(6)]
        adjusted[1] = adjusted[1]._replace(mask=bytes(8 * -(-size // 64)))
        if index % 2:
            # Only an impossible token is allowed.
            adjusted[4] = adjusted[4]._replace(params=SamplingParams(allowed_token_ids=[0]))
        logits = Matrix(rows, kernels.variant.logit_type, aligned=index % 2 == 0)
        order = rng.sample(range(6), 6)
        adjusted = [adjusted[at] for at in order]
        raw = [logits.rows[at] for at in order]
        out, raw_flags = adjust(kernels, logits, order, adjusted)
        expected = [
            array("f", process_logits(row, a.params, a.prompt, a.output, (), a.mask))
            for row, a in zip(raw, adjusted, strict=True)
        ]
        statuses = [
            row_status(row) or (NOTHING_ALLOWED if max(processed) == -inf else OK)
            for row, processed in zip(raw, expected, strict=True)
        ]
        for found, processed, status in zip(out, expected, statuses, strict=True):
            if status not in (HAS_NAN, HAS_POSITIVE_INF):
                assert found.tobytes() == processed.tobytes()
        if kernels.variant.logit_type == "F32":
            params, keys = [each.params for each in adjusted], some_keys(rng, 6)
            samples = kernels.sample(
                Matrix(out, "F32", aligned=True), params, keys, raw_flags=raw_flags
            )
            assert samples == expected_samples(expected, params, keys, statuses)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities_are_those_of_the_normative_arithmetic(
    kernels: Kernels, num_top: int
) -> None:
    rng = Random(num_top)
    for index, size in enumerate((1, 2, 19, 64, 300, 1000)):
        rows = [some_logits(rng, size, rng.choice(SHAPES)) for _ in range(6)]
        rows[1][rng.randrange(size)] = rng.choice((nan, inf))
        rows[2] = [-inf] * size
        logits = Matrix(rows, kernels.variant.logit_type, aligned=index % 2 == 0)
        tokens = [rng.randrange(size) for _ in rows]
        order = rng.sample(range(6), 6) if index % 2 else None
        count = min(num_top, size)
        for at, token, found in zip(
            order or range(6), tokens, kernels.logprobs(logits, tokens, count, order), strict=True
        ):
            row = logits.rows[at]
            assert found[0] == token
            if row_status(row):
                assert all(map(isnan, (found[1], *found[2 + count :])))
                continue
            expected = token_logprob(row, token, count)
            assert found[2 : 2 + count] == [each for each, _ in expected.top]
            logprobs = [expected.logprob, *(logprob for _, logprob in expected.top)]
            assert [found[1], *found[2 + count :]] == pytest.approx(logprobs, rel=1e-12, abs=1e-12)
