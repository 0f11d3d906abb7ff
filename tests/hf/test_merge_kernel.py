"""The merge of ranks' best tokens in one kernel gives what plain torch gives, bit for bit.

Without a GPU the kernel runs in Triton's interpreter, in a process of its own: see
test_triton_ops.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.parallel.best_tokens import create_ranking, merge_best  # noqa: E402
from forge.models.hf.sampling.status import NUM_STATUSES, STATUS_OK  # noqa: E402
from tests.hf.test_triton_ops import needs_compiler  # noqa: E402

pytestmark = pytest.mark.torch

NUM_ROWS = (1, 2, 127, 128, 300)
WORLD_SIZES = (2, 3, 8)


def draw_results(num_rows: int, world_size: int) -> Any:
    """Return buffers of BestTokens: few different scores, and half of the rows failed on a rank."""
    generator = torch.Generator().manual_seed(1000 * world_size + num_rows)

    def draw(high: int) -> Any:
        return torch.randint(high, (world_size, num_rows), generator=generator, dtype=torch.int32)

    scores = draw(3).double() / 7 - 0.2
    is_ok = draw(4) > 0
    status = torch.where(is_ok, torch.full_like(draw(1), STATUS_OK), draw(NUM_STATUSES))
    return torch.cat((scores.view(torch.int32), draw(100_000), status), 1)


def wrong_cases(device: str) -> list[tuple[int, int]]:
    """Return the rows and ranks where the kernel on the device gives something else."""
    from forge.models.hf.parallel.merge_kernel import BestMerger

    ranking = create_ranking(torch.device("cpu"))
    wrong = []
    for world_size in WORLD_SIZES:
        merger = BestMerger(ranking.to(device), world_size)
        for num_rows in NUM_ROWS:
            gathered = draw_results(num_rows, world_size)
            # Rows of a wider tensor: what is after them must stay.
            expected = torch.full((2, num_rows + 5), -5, dtype=torch.int32)
            merged = expected.clone().to(device)
            merge_best(ranking, gathered, *expected[:, :num_rows])
            merger.merge(gathered.to(device), *merged[:, :num_rows])
            if not torch.equal(merged.cpu(), expected):
                wrong.append((num_rows, world_size))
    return wrong


def test_the_interpreted_kernel_gives_every_row_the_token_and_status_of_plain_torch() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.test_merge_kernel"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-3000:]


@needs_compiler
def test_one_kernel_is_compiled_for_hopper_whatever_the_rows() -> None:
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    kernels = pytest.importorskip("forge.models.hf.parallel.merge_kernel")
    kernel = kernels.merge_rows
    types = {"scores": "*fp64", "ranking": "*fp64", "num_rows": "i32"}
    constants = {"WORLD": 2, "OK": STATUS_OK, "BLOCK": kernels.BLOCK_ROWS}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32")
        for name in kernel.arg_names
    }
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(kernel, signature, positions, {})
    assert "st.global" in compiler.compile(source, target=target).asm["ptx"]


@pytest.mark.gpu
def test_the_compiled_kernel_gives_every_row_the_token_and_status_of_plain_torch() -> None:
    assert wrong_cases("cuda") == []


if __name__ == "__main__":
    print(wrong_cases("cpu"))
