"""Filters on a device against forge.sampling: the same tokens are kept, and the same drawn."""

from __future__ import annotations

from itertools import accumulate
from math import inf
from operator import ne
from random import Random
from typing import Any

import pytest

from forge.request import SamplingParams
from forge.sampling import (
    IMPOSSIBLE,
    MAX_GAP,
    filter_logits,
    gap_weight,
    logit_gaps,
    sample_token,
)
from forge.seam import Bind

np = pytest.importorskip("numpy")
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
from forge.models.hf.sampling.slot_sampling import build_slot_entry, sample_slots  # noqa: E402

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


# CUDA.


def count_differences(vocab_size: int, num_rows: int, shape: str, dtype: Any) -> int:
    """Return how many rows the kernel cuts elsewhere than plain torch, or draws otherwise."""
    from forge.models.hf.sampling.sample_cuda import SampleKernels

    cuda = torch.device("cuda")
    rng = Random(f"{vocab_size} {shape} {dtype}")
    x = some_logits(rng, num_rows, vocab_size, shape).to(dtype).float()
    params = [
        some_params(rng, vocab_size) if index % 2 else edge_params(rng, row)
        for index, row in enumerate(x.tolist())
    ]
    entries = [
        build_slot_entry(
            rng.getrandbits(64), build_slot_params(Bind(each, 0, 1), vocab_size).numbers
        )
        for each in params
    ]
    slot_table = torch.from_numpy(np.stack(entries)).to(cuda)
    numbers = slot_table[:, 1:].view(torch.float64)
    slots = torch.arange(num_rows, dtype=torch.int32, device=cuda)
    logits, kernels = x.to(dtype).to(cuda), SampleKernels(vocab_size, cuda)
    gaps = compute_gaps(logits, numbers[:, 0])
    kept = kept_mask(gaps, kernels.find_cuts(logits, slots, slot_table))
    expected = kept_mask(gaps, eager_cuts(logits, numbers, vocab_size))
    is_cut_elsewhere = ((kept != expected) & (gaps <= MAX_GAP)).any(1).cpu()
    tokens = torch.full((2, 2, num_rows), 77, dtype=torch.int32)
    sampled = tokens[0].to(cuda)
    kernels.sample(logits, slots, slots, slot_table, sampled[0], sampled[1])
    sample_slots(
        x.to(dtype), slots.cpu(), slots.cpu(), slot_table.cpu(), tokens[1, 0], tokens[1, 1]
    )
    return int((is_cut_elsewhere | (sampled.cpu() != tokens[1]).any(0)).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [1, 64, 1000, 151_936])
def test_the_kernel_keeps_and_draws_what_plain_torch_does(
    vocab_size: int, shape: str, dtype: Any
) -> None:
    assert count_differences(vocab_size, 16 if vocab_size > 1000 else 512, shape, dtype) == 0


def normative_tokens(logits: Any, params: list[SamplingParams], seeds: list[int]) -> list[int]:
    """Return the token of each row by forge.sampling; row i is at position i."""
    return [
        sample_token(row, each, seed, position)
        for position, (row, each, seed) in enumerate(
            zip(logits.tolist(), params, seeds, strict=True)
        )
    ]


def sampled_tokens(logits: Any, params: list[SamplingParams], seeds: list[int]) -> list[int]:
    """Return the token of each row by `sample_slots`, on the device of the logits.

    Row i is at position i.
    """
    num_rows, vocab_size = logits.shape
    entries = [
        build_slot_entry(seed, build_slot_params(Bind(each, seed, 1), vocab_size).numbers)
        for each, seed in zip(params, seeds, strict=True)
    ]
    slot_table = torch.from_numpy(np.stack(entries)).to(logits.device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=logits.device)
    sampled = torch.full((2, num_rows), 77, dtype=torch.int32, device=logits.device)
    if logits.is_cuda:
        from forge.models.hf.sampling.sample_cuda import SampleKernels

        kernels = SampleKernels(vocab_size, logits.device)
        kernels.sample(logits, rows, rows, slot_table, sampled[0], sampled[1])
    else:
        sample_slots(logits, rows, rows, slot_table, sampled[0], sampled[1])
    assert not sampled[1].any(), "a row failed"
    tokens: list[int] = sampled[0].tolist()
    return tokens


def count_wrong_tokens(device: Any, vocab_size: int, num_rows: int, seed: int) -> int:
    """Return how many rows a device samples otherwise than forge.sampling."""
    rng = Random(f"{vocab_size} {seed}")
    num_wrong = 0
    for start in range(0, num_rows, len(SHAPES)):
        shape = SHAPES[start // len(SHAPES) % len(SHAPES)]
        x = some_logits(rng, min(len(SHAPES), num_rows - start), vocab_size, shape)
        params = [
            some_params(rng, vocab_size) if index % 2 else edge_params(rng, row)
            for index, row in enumerate(x.tolist())
        ]
        seeds = [rng.getrandbits(63) for _ in params]
        found = sampled_tokens(x.to(device), params, seeds)
        num_wrong += sum(map(ne, found, normative_tokens(x, params, seeds)))
    return num_wrong


def test_plain_torch_draws_the_tokens_of_the_normative_arithmetic() -> None:
    assert count_wrong_tokens(torch.device("cpu"), 64, 160, 0) == 0


# 28 parts, so that the workers of a run share them: 5,040 rows of a real vocabulary.
@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(28))
def test_the_kernel_draws_the_tokens_of_the_normative_arithmetic(seed: int) -> None:
    assert count_wrong_tokens(torch.device("cuda"), 151_936, 180, seed) == 0
