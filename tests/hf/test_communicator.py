"""Exact copies as sums of floats, and the merge of the best tokens of ranks."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.parallel.best_tokens import create_merge  # noqa: E402
from forge.models.hf.parallel.communicator import add_parts  # noqa: E402
from forge.models.hf.parallel.cuda_communicator import (  # noqa: E402
    CudaCommunicator,
    exact_numbers,
    restore_numbers,
    select_one_shot_bytes,
)
from tests.hf.thread_ranks import ThreadCommunicator, create_communicators, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

TENSORS = (
    torch.tensor([[1.5, -0.0, nan, inf], [1e-310, -1e300, 3.0, 0.1]], dtype=torch.float64),
    torch.tensor([0, -1, 2**31 - 1, -(2**31), 65535, 65536], dtype=torch.int32),
    torch.tensor([-3.5, 1e-8, 0.0], dtype=torch.bfloat16),
    torch.tensor([2**63 - 1, -(2**63)]),
)
"""Bits that a sum of such numbers themselves would change."""


def equal_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("x", TENSORS, ids=lambda x: str(x.dtype))
def test_bits_survive_as_small_integers_in_float32(x: Any) -> None:
    numbers = exact_numbers(x)
    assert numbers.dtype == torch.float32 and numbers.nbytes % 128 == 0
    total = numbers + torch.zeros_like(numbers)
    assert equal_bits(restore_numbers(total, x.dtype, x.shape), x)


class ThreadReducer:
    """Sums over threads, in place of a kernel over the memory of several GPUs."""

    def __init__(self, communicator: ThreadCommunicator) -> None:
        self._communicator = communicator

    def takes(self, x: Any, residual: Any = None) -> bool:
        return bool(x.dtype == torch.float32)

    def all_reduce(self, x: Any, residual: Any = None) -> Any:
        return self._communicator.all_reduce(x, residual)


class Group:
    """Rank and size of a process group."""

    def __init__(self, communicator: ThreadCommunicator) -> None:
        self.rank = lambda: communicator.rank
        self.size = lambda: communicator.world_size


@pytest.mark.parametrize("x", TENSORS, ids=lambda x: str(x.dtype))
def test_small_gathers_and_broadcasts_are_sums_with_every_bit_kept(x: Any) -> None:
    def exchange(communicator: ThreadCommunicator) -> tuple[Any, Any]:
        reducer = ThreadReducer(communicator)
        cuda = CudaCommunicator(Group(communicator), (reducer, reducer))
        mine = x.flip(0) if communicator.rank else x.clone()
        gathered = cuda.all_gather(mine)
        cuda.broadcast(mine)
        return gathered, mine

    communicators = create_communicators(2)
    for gathered, broadcast in run_ranks(communicators, exchange):
        assert equal_bits(gathered, torch.stack((x, x.flip(0))))
        assert equal_bits(broadcast, x)
    assert [each.calls for each in communicators] == [{"all_reduce": 2}] * 2


def test_a_sum_is_rounded_once_and_in_the_order_of_ranks() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert add_parts(parts, None).tolist() == [258.0]  # bfloat16 has no 257: 256 + 1 is 256.
    assert add_parts(parts[:2], parts[2]).tolist() == [258.0]


def merge(scores: Any, tokens: Any, status: Any) -> Any:
    """Return token and status of each row."""
    out = torch.full((2, scores.shape[1]), -5, dtype=torch.int32)
    gathered = torch.cat((scores.view(torch.int32), tokens, status), 1)
    create_merge(len(scores), torch.device("cpu"))(gathered, out[0], out[1])
    return out


def test_the_best_of_all_ranks_is_the_higher_score_and_of_equal_ones_the_lower_id() -> None:
    scores = torch.tensor([[1.0, 5.0, -inf, 2.0, nan], [1.0, 7.0, 3.0, inf, 9.0]])
    tokens = torch.tensor([[4, 5, 0, 6, 0], [104, 105, 106, 0, 107]], dtype=torch.int32)
    status = torch.tensor([[0, 0, 4, 0, 1], [0, 0, 0, 2, 0]], dtype=torch.int32)
    merged, merged_status = merge(scores.double(), tokens, status)
    assert merged.tolist() == [4, 105, 106, 0, 0]
    assert merged_status.tolist() == [0, 0, 0, 2, 1]


def test_a_row_without_a_finite_logit_on_any_rank_has_a_status_and_no_token() -> None:
    scores = torch.full((2, 1), -inf, dtype=torch.float64)
    tokens, status = torch.zeros((2, 1)).int(), torch.full((2, 1), 4).int()
    assert [each.tolist() for each in merge(scores, tokens, status)] == [[0], [4]]


def test_two_ranks_sum_longer_messages_in_one_shot_than_more_ranks_do() -> None:
    """256 hidden states of Qwen3 4B and of Llama 3.1 8B are summed, with norm, in one launch."""
    assert 256 * 4096 * 2 <= select_one_shot_bytes(2) < 5 << 20
    assert select_one_shot_bytes(2) % 512 == 0
    assert select_one_shot_bytes(4) == select_one_shot_bytes(8) == 1 << 20
