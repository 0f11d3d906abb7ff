"""SkinnyGemm: GEMMs with few rows of x on tensor cores. Imported only where torch has CUDA.

Owns the choice of a build, and the launch. The kernels are those of skinny_gemm.cu.

    rows of x     1 or 2           to 16, to 32 with a small weight    more
    GEMM          small_gemm.py    this module                         a library's

With few rows the work is to read the weights, and a library's kernels read them at 2.2 to 3.5 TB/s
of an H200's 4.8: each starts when the one before has ended. These request their first weights
before they wait, straight into registers.

Always true: `takes` is True only for operands that the kernels compute. An output depends on its
row, the weights and the build, and on no other row.
Measurements: wiki/Fusion.md, "Up to 16 rows".
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.cuda_module import CudaModule, compile_source

SOURCE = Path(__file__).with_name("skinny_gemm.cu")

MAX_ROWS = 16
"""Most rows of x. With more, reading x again for each 16 rows of w takes longer than reading w."""

MAX_ROWS_OF_SMALL_WEIGHT = 32
"""Most rows where the weight has at most `SMALL_WEIGHT` elements: starting is most of the time."""

SMALL_WEIGHT = 2**23

STEP_COLUMNS = 32
"""Columns of a step; a multiple of them is needed."""


class SkinnyBuild(NamedTuple):
    """Macros of skinny_gemm.cu, with which it is compiled.

    row_tiles     tiles of 8 rows of x; a step reads all of them
    num_warps     warps of a CTA, which share the columns
    steps         steps of 32 columns whose weights a thread requests ahead
    input_steps   steps whose part of x a thread requests ahead; it divides `steps`
    min_ctas      CTAs that share a multiprocessor
    """

    row_tiles: int
    num_warps: int
    steps: int
    input_steps: int
    min_ctas: int

    @property
    def macros(self) -> tuple[str, ...]:
        """Macros of skinny_gemm.cu, without the dtype."""
        return (
            f"ROW_TILES={self.row_tiles}",
            f"WARPS={self.num_warps}",
            f"STEPS={self.steps}",
            f"INPUT_STEPS={self.input_steps}",
            f"MIN_CTAS={self.min_ctas}",
        )


def select_build(m: int, k: int, n: int, num_sms: int) -> SkinnyBuild:
    """Return the build for m rows of x and a weight [n, k], for m up to 32.

    A CTA has 16 rows of w. Where that gives few CTAs, each has more warps and requests more ahead.
    The rule follows measurements on an H200.

    num_sms   multiprocessors of the device
    """
    num_ctas = n // 16
    is_narrow = num_ctas <= num_sms
    if m <= 8:
        num_warps = 16 if is_narrow else 8
        steps = 8 if num_ctas <= 2 * num_sms and k > 4 * STEP_COLUMNS * num_warps else 4
        if is_narrow:
            min_ctas = 1
        else:
            min_ctas = 3 if steps == 4 else 2
        return SkinnyBuild(1, num_warps, steps, steps, min_ctas)
    if m <= 16:
        return SkinnyBuild(2, 16, 4, 4, 1) if is_narrow else SkinnyBuild(2, 8, 4, 4, 2)
    return SkinnyBuild(4, 8, 8, 4, 1) if is_narrow else SkinnyBuild(4, 8, 4, 2, 2)


class SkinnyGemm:
    """The kernels for one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._modules: dict[SkinnyBuild, CudaModule] = {}

    def takes(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
        """Return whether the kernels compute x [m, k] @ w [n, k].T + bias."""
        n, k = w.shape
        operands = [each for each in (x, w, bias) if each is not None]
        return (
            0 < x.shape[0] <= (MAX_ROWS_OF_SMALL_WEIGHT if n * k <= SMALL_WEIGHT else MAX_ROWS)
            and k % STEP_COLUMNS == 0
            and n % 16 == 0
            and all(
                each.dtype == self._dtype and each.is_contiguous() and each.data_ptr() % 16 == 0
                for each in operands
            )
        )

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [m, k] @ w [n, k].T + bias [n]."""
        assert self.takes(x, w, bias), f"x {x.shape} {x.stride()}, w {w.shape} {w.stride()}"
        (m, k), n = x.shape, w.shape[0]
        out = x.new_empty(m, n)
        self._launch("linear", n // 16, (m, k, n), (x, w, bias, out, m, k, n))
        return out

    def gate_up(self, x: Tensor, w: Tensor) -> Tensor:
        """Return silu(x @ gate.T) * (x @ up.T), where w [2 * n, k] is gate above up."""
        assert self.takes(x, w), f"x {x.shape} {x.stride()}, w {w.shape} {w.stride()}"
        (m, k), n = x.shape, w.shape[0] // 2
        out = x.new_empty(m, n)
        self._launch("gate_up", n // 8, (m, k, 2 * n), (x, w, out, m, k, n))
        return out

    def _launch(
        self,
        name: str,
        num_ctas: int,
        shape: tuple[int, int, int],
        arguments: tuple[Tensor | int | None, ...],
    ) -> None:
        build = select_build(*shape, self._num_sms)
        if build not in self._modules:
            dtype_macros = ("HALF_F16",) if self._dtype == torch.float16 else ()
            binary = compile_source(SOURCE, (*build.macros, *dtype_macros), self._device)
            shared_bytes = {"linear": 0, "gate_up": 0}
            self._modules[build] = CudaModule(binary, shared_bytes, self._device)
        threads = 32 * build.num_warps
        self._modules[build].launch(name, (num_ctas, 1), threads, 0, arguments, pdl=True)
