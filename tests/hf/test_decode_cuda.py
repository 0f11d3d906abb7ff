"""The kernels of decode.cu on a GPU: outputs of plain torch and of the Triton kernel; no spills.

A case is a step of many rows, drawn as in test_triton_decode.py. The kernels' arithmetic without a
GPU: tests/models/test_decode_kernel.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.hf.test_triton_decode import (  # noqa: E402
    BOUNDS,
    DecodeCase,
    Step,
    attend_by_torch,
    error,
    row_lengths,
    stack_bytes,
    step_of,
    to_float64,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(150)]

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 514, 1500)
"""Lengths around the ends of tiles and blocks."""

MANY = (*EDGES, *row_lengths(80))

CASES: dict[str, DecodeCase] = {
    "Qwen3-4B": DecodeCase(MANY, 32, 8, 128, 64, norms=2),
    "Qwen3-0.6B": DecodeCase(MANY, 16, 8, 128, 64, norms=2),
    "Qwen3-14B": DecodeCase(MANY, 40, 8, 128, 64, norms=2),
    "Qwen3-32B": DecodeCase(MANY, 64, 8, 128, 64, norms=2),
    "without norms, blocks of 16": DecodeCase(MANY, 16, 4, 128, 16),
    "blocks of 256": DecodeCase(MANY, 8, 2, 128, 256, norms=2),
    "a key head for each": DecodeCase(MANY, 4, 4, 128, 64, norms=2),
    "groups of 12": DecodeCase(MANY, 24, 2, 128, 64, norms=2),
    "groups of 16": DecodeCase(MANY, 16, 1, 128, 64),
    "heads of 64": DecodeCase(MANY, 16, 4, 64, 64, norms=2),
    "256 rows": DecodeCase(tuple(range(1, 1025, 4)), 32, 8, 128, 64, norms=2),
    "one long row": DecodeCase((20_000, *row_lengths(40)), 32, 8, 128, 64, norms=2),
}


def kernels_of(step: Step) -> Any:
    """Return the kernels of decode.cu for a step; their partial results are NaN."""
    from forge.models.hf.attention.decode_cuda import CudaDecodeAttention

    kernels = CudaDecodeAttention(step.pool, step.spec, pdl=True)
    kernels.scratch[0].fill_(float("nan"))
    return kernels


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kernels_agree_with_plain_torch_in_float64(dtype: str, name: str):
    """Outputs of a projection, then of given queries with every key in its block."""
    device, bound = torch.device("cuda"), BOUNDS[dtype]
    step = step_of(CASES[name], device, getattr(torch, dtype))
    reference = to_float64(step)
    queries, expected = attend_by_torch(reference)
    kernels = kernels_of(step)
    untouched = step.pool.data[0].clone()
    out = step.qkv.new_empty(queries.shape)
    rows = (step.slots, step.lengths, step.spec.scale)
    kernels.attend_qkv_into(out, 1, step.qkv, step.rotary, *rows)
    assert error(out, expected) < bound
    assert error(step.pool.data[1], reference.pool.data[1]) < bound
    assert torch.equal(step.pool.data[0], untouched)
    kernels.attend_into(out.fill_(7.0), 1, queries.to(out), *rows)
    assert error(out, expected) < bound
    assert not kernels.scratch[1].any()


@pytest.mark.gpu
def test_steps_of_few_rows_agree_with_one_of_many():
    """Steps of fewer than MIN_CUDA_ROWS rows are those of the Triton kernel."""
    from forge.models.hf.attention.triton_decode import MIN_CUDA_ROWS, DecodeAttention

    step = step_of(CASES["Qwen3-4B"], torch.device("cuda"), torch.bfloat16)
    attention = DecodeAttention(step.pool, [step.spec] * 2, pdl=True)
    out = attention.attend_qkv(1, step.qkv, step.rotary, step.slots, step.lengths)
    by_triton = torch.cat(
        [
            attention.attend_qkv(1, qkv, step.rotary, slots, lengths)
            for qkv, slots, lengths in zip(
                *(x.split(MIN_CUDA_ROWS - 1) for x in (step.qkv, step.slots, step.lengths)),
                strict=True,
            )
        ]
    )
    assert not torch.equal(out, by_triton), "both are of one kernel"
    assert error(out, by_triton.cpu().double()) < BOUNDS["bfloat16"]


@pytest.mark.gpu
def test_rows_that_read_nothing_keep_their_outputs():
    step = step_of(CASES["Qwen3-4B"], torch.device("cuda"), torch.bfloat16)
    queries, expected = attend_by_torch(to_float64(step))
    lengths = step.lengths.clone()
    lengths[1::2] = 0
    # The new tokens of the other rows are in no block, so their last position is not read.
    out = torch.full_like(queries, 7.0, device="cuda", dtype=torch.bfloat16)
    step.pool.data[1].copy_(written_blocks(step))
    arguments = (queries.to(out), step.slots, lengths, step.spec.scale)
    kernels_of(step).attend_into(out, 1, *arguments)
    assert bool((out[1::2] == 7.0).all())
    assert error(out[::2], expected[::2]) < BOUNDS["bfloat16"]


def written_blocks(step: Step) -> Any:
    """Return the blocks of layer 1 with the new tokens, from plain torch."""
    reference = to_float64(step)
    attend_by_torch(reference)
    return reference.pool.data[1]


@pytest.mark.gpu
def test_a_launch_is_repeatable_and_reads_what_the_launch_before_wrote():
    """Twenty launches that each read the outputs of the one before, with and without a wait."""
    step = step_of(CASES["256 rows"], torch.device("cuda"), torch.bfloat16)
    kernels = kernels_of(step)
    rows = (step.slots, step.lengths, step.spec.scale)

    def outputs(synchronize: bool) -> Any:
        first, second = (step.qkv.new_zeros(len(step.qkv), 32, 128) for _ in range(2))
        kernels.attend_qkv_into(first, 1, step.qkv, step.rotary, *rows)
        for _ in range(20):
            kernels.attend_into(second, 0, first, *rows)
            if synchronize:
                torch.cuda.synchronize()
            kernels.attend_into(first, 1, second, *rows)
        return first.clone()

    assert torch.equal(outputs(synchronize=True), outputs(synchronize=False))


def test_a_cache_without_a_kernel_is_not_accepted():
    pytest.importorskip("cuda.bindings")
    from forge.models.hf.attention.decode_cuda import has_kernel

    step = step_of(DecodeCase((5,), 2, 1, 64, 16), torch.device("cpu"), torch.bfloat16)
    assert not has_kernel(step.pool, step.spec)


@pytest.mark.parametrize(
    ("capability", "max_shared_bytes", "head_dims"),
    [
        ((8, 0), 163 * 1024, []),
        ((8, 9), 99 * 1024, []),
        ((9, 0), 227 * 1024, [64, 128]),
        ((10, 0), 227 * 1024, [64, 128]),
        ((12, 0), 99 * 1024, [64]),
    ],
)
def test_a_device_runs_the_kernels_where_their_tiles_fit_into_its_shared_memory(
    capability: tuple[int, int], max_shared_bytes: int, head_dims: list[int]
):
    pytest.importorskip("cuda.bindings")
    from forge.models.hf.attention.decode_cuda import fits_device

    assert [n for n in (64, 128) if fits_device(capability, max_shared_bytes, n)] == head_dims


@pytest.mark.parametrize("group", [4, 16])
def test_the_kernels_stay_in_registers(group: int, tmp_path: Path):
    """Compile for sm_90a, which needs no GPU: a layer of Qwen3, blocks of 64."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as unavailable:
        pytest.skip(str(unavailable))
    from forge.models.hf.attention.decode_cuda import DECODE_CONFIG, SOURCE, decode_macros
    from forge.models.hf.attention.interface import LayerSpec

    spec = LayerSpec(8 * group, 8, 128, 1.0)
    macros = decode_macros(torch.bfloat16, spec, 64, DECODE_CONFIG)
    flags = [b"--gpu-architecture=sm_90a", *(f"-D{each}".encode() for each in macros)]
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"decode.cu", 0, [], [])
    (failure,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    assert not int(failure)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    binary = b" " * size
    nvrtc.nvrtcGetCUBIN(program, binary)
    assert stack_bytes(binary, tmp_path) == [0, 0]
