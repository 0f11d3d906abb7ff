"""Filters on a device against forge.sampling: the same tokens are kept, and the same drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import inf, nan
from random import Random
from typing import Any

import pytest

from forge import sampling
from forge.request import SamplingParams
from forge.sampling import (
    GAP_STEPS,
    IMPOSSIBLE,
    MAX_GAP,
    filter_logits,
    gap_weight,
    logit_gaps,
)
from forge.seam import Bind

torch = pytest.importorskip("torch")

from forge.models.hf.sampling.filters import (  # noqa: E402
    MAX_TOPK,
    Cuts,
    FilterParams,
    compute_gaps,
    find_cuts,
    gap_weights,
    kept_mask,
)
from forge.models.hf.sampling.slot_params import build_slot_params  # noqa: E402
from forge.models.hf.sampling.status import error_text  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = ("gauss", "equal", "bfloat16", "ties", "peak", "islands", "impossible", "slope")
"""Kinds of logits."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def some_logits(rng: Random, num_rows: int, vocab_size: int, shape: str) -> Any:
    """Return logits [num_rows, vocab_size] of one kind, float32 on the CPU."""
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    spread = rng.choice((0.01, 0.3, 1.0, 3.0, 8.0))
    x = torch.randn(num_rows, vocab_size, generator=generator) * spread
    if shape == "equal":
        x = torch.full_like(x, rng.uniform(-3.0, 3.0))
    elif shape == "bfloat16":
        x = x.bfloat16().float()
    elif shape == "ties":
        x = (x * 2).round() / 2
    elif shape == "peak":
        x[:, rng.randrange(vocab_size)] += rng.uniform(2.0, 40.0)
    elif shape == "islands":
        # Between them are many bins without a token, all of which may seem to hold the cut.
        x = x * 0.05 - rng.choice((6.0, 12.0)) * (torch.arange(vocab_size) % 2)
    elif shape == "impossible":
        x[torch.rand(x.shape, generator=generator) < 0.6] = -inf
        x[:, 0] = 0.0
    elif shape == "slope":
        # Each bin has about the same mass: many bins may hold the cut.
        x = -torch.arange(vocab_size) * torch.full((num_rows, 1), rng.choice((0.001, 0.03, 0.125)))
        x = x[:, torch.randperm(vocab_size, generator=generator)]
    return x


def some_params(rng: Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((1e-5, 0.3, 0.7, 1.0, 2.0)),
        top_k=rng.choice((0, 0, 2, rng.randint(2, vocab_size + 2), vocab_size)),
        top_p=rng.choice((1.0, rng.uniform(1e-9, 1.0), 0.5, 0.9, 0.95, 0.999, 1e-9)),
        min_p=rng.choice((0.0, 0.0, 0.1, 0.001, 1.0)),
    )


def edge_params(rng: Random, logits: list[float]) -> SamplingParams:
    """Return a top-p that a number of tokens reaches exactly, or misses by a rounding error.

    In half of the cases it is a part of what top-k leaves.
    """
    gaps = sorted(logit_gaps(logits, 1.0))
    top_k = rng.choice((0, rng.randint(2, len(gaps) + 1)))
    masses = list(accumulate(map(gap_weight, gaps[: top_k or None])))
    edge = rng.choice((len(masses) // 2, rng.randint(1, len(masses)))) - 1
    top_p = masses[edge] / masses[-1] * rng.choice((1.0, 1.0 - 1e-12, 1.0 + 1e-12))
    return SamplingParams(top_k=top_k, top_p=min(max(top_p, 1e-9), 1.0))


def build_numbers(params: list[SamplingParams], vocab_size: int) -> Any:
    """Return the fields of SamplingNumbers of each row, float64 [n, 5]."""
    binds = [Bind(each, seed=1, prompt_len=1) for each in params]
    numbers = [build_slot_params(bind, vocab_size).numbers for bind in binds]
    return torch.tensor(numbers, dtype=torch.float64)


def eager_cuts(logits: Any, numbers: Any, max_top_k: int) -> Cuts:
    """Return the cuts that plain torch finds."""
    gaps = compute_gaps(logits, numbers[:, 0])
    params = FilterParams(numbers[:, 2], numbers[:, 3], numbers[:, 4])
    return find_cuts(gaps, params, max_top_k)


def kept_tokens(logits: Any, numbers: Any, cuts: Cuts) -> list[list[int]]:
    """Return the possible tokens of each row that are kept."""
    kept = kept_mask(compute_gaps(logits, numbers[:, 0]), cuts) & (logits > -inf)
    return [row.nonzero()[:, 0].tolist() for row in kept]


def expected_tokens(logits: Any, params: list[SamplingParams]) -> list[list[int]]:
    return [
        sorted(c.token for c in filter_logits(row, each))
        for row, each in zip(logits.tolist(), params, strict=True)
    ]


# Plain torch.


def test_gaps_are_those_of_the_normative_arithmetic() -> None:
    rng = Random(3)
    for shape in SHAPES:
        x = some_logits(rng, 4, 65, shape)
        temperatures = [rng.choice((1e-5, 0.3, 0.7, 1.9)) for _ in range(4)]
        gaps = compute_gaps(x, torch.tensor([1.0 / t for t in temperatures], dtype=torch.float64))
        found = [logit_gaps(row, t) for row, t in zip(x.tolist(), temperatures, strict=True)]
        assert gaps.tolist() == found, shape


def test_logits_in_double_precision_have_the_gaps_of_the_normative_arithmetic() -> None:
    logits = [1.0, 1.0 - 1e-9, 3e38, -3e38, 0.1 + 2**-30, -inf, 1e300, -1e300]
    for row in (logits, logits[:6], logits[:2] + logits[4:], [-1e300, -2e300, -inf]):
        gaps = compute_gaps(
            torch.tensor([row], dtype=torch.float64), torch.tensor([1 / 0.7], dtype=torch.float64)
        )
        assert gaps.tolist() == [logit_gaps(row, 0.7)]


def test_weights_are_those_of_the_normative_arithmetic_and_never_rise() -> None:
    gaps = torch.arange(IMPOSSIBLE + 1)
    weights = gap_weights(gaps)
    assert bool((weights[1:] <= weights[:-1]).all())
    picked = [*range(0, 70_000, 7), *range(0, IMPOSSIBLE, 997), MAX_GAP, IMPOSSIBLE]
    assert weights[picked].tolist() == [gap_weight(gap) for gap in picked]


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_torch_keeps_the_tokens_of_the_normative_arithmetic(shape: str) -> None:
    rng = Random(5)
    for vocab_size in (1, 2, 17, 64, 257):
        params = [some_params(rng, vocab_size) for _ in range(6)]
        x = some_logits(rng, 6, vocab_size, shape)
        numbers = build_numbers(params, vocab_size)
        found = kept_tokens(x, numbers, eager_cuts(x, numbers, vocab_size))
        assert found == expected_tokens(x, params)


def test_a_selection_of_leading_tokens_keeps_what_an_order_of_all_keeps() -> None:
    rng = Random(7)
    vocab_size = MAX_TOPK + 500
    params = [
        SamplingParams(top_k=rng.randint(2, 40), top_p=rng.choice((0.3, 1.0))) for _ in range(12)
    ]
    x = some_logits(rng, 12, vocab_size, "ties")
    numbers = build_numbers(params, vocab_size)
    selected = eager_cuts(x, numbers, max(each.top_k for each in params))
    ordered = eager_cuts(x, numbers, vocab_size)
    assert [each.tolist() for each in selected] == [each.tolist() for each in ordered]


# Triton.


def count_differences(
    device: str, vocab_size: int, num_rows: int, num_passes: int, shape: str, **options: Any
) -> int:
    """Return how many rows the kernels cut elsewhere than plain torch."""
    kernels = pytest.importorskip("forge.models.hf.sampling.filters_triton")
    rng = Random(f"{vocab_size} {num_passes} {shape}")
    x = some_logits(rng, num_rows, vocab_size, shape)
    params = [
        some_params(rng, vocab_size) if index % 2 else edge_params(rng, row)
        for index, row in enumerate(x.tolist())
    ]
    x, numbers = x.to(device), build_numbers(params, vocab_size).to(device)
    _, gaps, tokens = kernels.find_cuts_cuda(
        x,
        torch.arange(num_rows, device=device),
        numbers,
        has_order=True,
        has_top_p=True,
        num_passes=num_passes,
        **options,
    )
    all_gaps = compute_gaps(x, numbers[:, 0])
    kept = kept_mask(all_gaps, Cuts(gaps, tokens))
    expected = kept_mask(all_gaps, eager_cuts(x, numbers, vocab_size))
    return int(((kept != expected) & (all_gaps <= MAX_GAP)).any(1).sum())


def count_cuts_beyond_top_k(device: str) -> int:
    """Return 1 where the kernels cut a row wrongly whose mass ends just before the k-th token.

    The bins of the second search are aligned to its first gap, and its end is within one of them.
    """
    kernels = pytest.importorskip("forge.models.hf.sampling.filters_triton")
    offsets = "0 295 305 330 346 374 549 585 641 661 722 742 761 802 876 886 919 1004 1054 1085"
    later = "1120 1184 1583 1642 1932"
    gaps = [0, *(476_744 + int(offset) for offset in f"{offsets} {later}".split())]
    x = torch.tensor([[-(gap + 0.5) / GAP_STEPS if gap else 0.0 for gap in gaps]])
    weights = [gap_weight(gap) for gap in logit_gaps(x[0].tolist(), 1.0)]
    top_k, num_kept = 24, 8
    limit = (sum(weights[: num_kept - 1]) + 0.3 * weights[num_kept - 1]) / sum(weights[:top_k])
    params = [SamplingParams(top_k=top_k, top_p=limit)]
    numbers = build_numbers(params, len(gaps)).to(device)
    _, cut_gaps, tokens = kernels.find_cuts_cuda(
        x.to(device), torch.arange(1, device=device), numbers, has_order=True, has_top_p=True
    )
    found = kept_tokens(x.to(device), numbers, Cuts(cut_gaps, tokens))
    return int(found != expected_tokens(x, params))


def count_differences_at_the_range(device: str) -> int:
    """Return how many rows of float64 logits beyond single precision are sampled otherwise."""
    kernels = pytest.importorskip("forge.models.hf.sampling.filters_triton")
    rows = [[-inf, -1e300, -inf], [-1e300, -2e300, -inf], [1e300, 0.0, -1e300], [-1e39, 0.0, 3e38]]
    x = torch.tensor(rows, dtype=torch.float64)
    params = [SamplingParams(top_k=2, top_p=0.9)] * len(rows)
    order = torch.arange(len(rows), device=device)
    tokens, _ = kernels.filtered_sample_cuda(
        x.to(device),
        order,
        build_numbers(params, 3).to(device),
        order,
        order,
        order,
        has_order=True,
        has_top_p=True,
    )
    drawn = [sampling.sample_token(row, params[0], at, at) for at, row in enumerate(rows)]
    return sum(token != other for token, other in zip(tokens.tolist(), drawn, strict=True))


def count_other_samples(device: str, vocab_size: int, num_rows: int) -> int:
    """Return how many rows have another token or error than in the normative arithmetic."""
    kernels = pytest.importorskip("forge.models.hf.sampling.filters_triton")
    rng = Random(vocab_size)
    params = [
        SamplingParams(temperature=0.0) if rng.random() < 0.2 else some_params(rng, vocab_size)
        for _ in range(num_rows)
    ]
    x = torch.cat([some_logits(rng, 1, vocab_size, rng.choice(SHAPES)) for _ in params])
    for row in x:
        if rng.random() < 0.2:
            row[rng.randrange(vocab_size)] = rng.choice((nan, inf))
        elif rng.random() < 0.1:
            row[:] = -inf
    seeds = [rng.randrange(-(2**63), 2**63) for _ in params]
    order = list(range(num_rows))
    rng.shuffle(order)
    tokens, status = kernels.filtered_sample_cuda(
        x.to(device),
        torch.tensor(order, device=device),
        build_numbers(params, vocab_size)[order].to(device),
        torch.tensor(order, device=device),
        torch.tensor(order, device=device) + 100,
        torch.tensor(seeds, device=device),
        has_order=True,
        has_top_p=True,
    )
    num_different = 0
    for at, token, code in zip(order, tokens.tolist(), status.tolist(), strict=True):
        logits = x[at].tolist()
        error = sampling.invalid_logits_reason(logits)
        drawn = 0 if error else sampling.sample_token(logits, params[at], seeds[at], at + 100)
        num_different += (token, error_text(code) if code else None) != (drawn, error)
    return num_different


CASES: dict[str, Callable[[str], int]] = {
    **{
        f"cuts, {shape}, {passes} passes": partial(
            count_differences,
            vocab_size=100,
            num_rows=8,
            num_passes=passes,
            shape=shape,
            tile=64,
        )
        for shape, passes in (*zip(SHAPES, (3, 0) * 4, strict=True), ("islands", 1))
    },
    "cuts of one token": partial(
        count_differences, vocab_size=1, num_rows=6, num_passes=3, shape="gauss", tile=64
    ),
    "cuts beyond top-k": count_cuts_beyond_top_k,
    "samples of float64": count_differences_at_the_range,
    "samples": partial(count_other_samples, vocab_size=65, num_rows=24),
}
"""Each a number of rows that differ, which has to be 0. Without passes `finish` does all."""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, int]:
    """Every case's figure, from a process in which Triton interprets."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.test_filters"],
        capture_output=True,
        text=True,
        env=env,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_agree(interpreted: dict[str, int], name: str) -> None:
    assert interpreted[name] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_passes", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [1, 64, 1000, 151_936])
def test_compiled_kernels_cut_where_plain_torch_does(
    vocab_size: int, shape: str, num_passes: int
) -> None:
    num_rows = 16 if vocab_size > 1000 else 512
    assert count_differences("cuda", vocab_size, num_rows, num_passes, shape) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [count_cuts_beyond_top_k, count_differences_at_the_range])
def test_compiled_kernels_agree_at_edges(count: Callable[[str], int]) -> None:
    assert count("cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [64, 9000])
def test_compiled_kernels_draw_the_tokens_of_the_normative_arithmetic(vocab_size: int) -> None:
    assert count_other_samples("cuda", vocab_size, 64) == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: case("cpu") for name, case in CASES.items()}))
