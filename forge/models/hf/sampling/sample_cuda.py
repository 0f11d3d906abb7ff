"""SampleKernels: the kernels of sample.cu on one CUDA device. Imported only where torch has CUDA.

Owns their compilation and launch. Knows no request and no sampling parameter.

    sample.cu ──► a module for each type of logits ──► sample, adjust, logprobs
                  8 CTAs a row in a cluster    compute capability 9.0 and above
                  1 CTA a row, cells in global memory    below, or for a huge vocabulary

Always true: nothing here waits for the device, and `sample` is safe inside a CUDA graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from forge.models.hf.cuda_module import CudaModule, compile_source, max_shared_bytes, with_index
from forge.models.hf.sampling.filters import Cuts
from forge.models.hf.sampling.row_adjustments import RowAdjustments

SOURCE = Path(__file__).with_name("sample.cu")

LOGIT_MACROS = {
    torch.bfloat16: "LOGIT_BF16",
    torch.float16: "LOGIT_F16",
    torch.float32: "LOGIT_F32",
}
"""Macro of sample.cu for each type of logits that the kernels read."""

ADJUST_TILE = 4096
"""Tokens of a CTA of `adjust`: TILE in sample.cu."""

SHARED_STATE_BYTES = 13 * 1024
"""Room for `Shared` of sample.cu in shared memory, before the cells."""


class _RowLayout(NamedTuple):
    """Division of a row's vocabulary.

    cluster   CTAs of a row
    threads   threads of a CTA
    chunk     tokens of a CTA
    """

    cluster: int
    threads: int
    chunk: int

    @property
    def uses_scratch(self) -> bool:
        """True where the cells are in global memory."""
        return self.cluster == 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return SHARED_STATE_BYTES + (0 if self.uses_scratch else 4 * self.chunk)

    @classmethod
    def choose(cls, vocab_size: int, device: torch.device) -> _RowLayout:
        """Return a cluster where the device has them and a part of the row fits, or one CTA."""
        cluster = cls(8, 512, _round_up(-(-vocab_size // 8), 8))
        has_clusters = torch.cuda.get_device_capability(device) >= (9, 0)
        if has_clusters and cluster.shared_bytes <= max_shared_bytes(device):
            return cluster
        return cls(1, 1024, _round_up(vocab_size, 8))


class SampleKernels:
    """Kernels for logits of `vocab_size` tokens on the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Compile the kernels for adjusted logits. Others are compiled when they are first used."""
        self._vocab_size = vocab_size
        self._device = with_index(device)
        self._layout = _RowLayout.choose(vocab_size, self._device)
        self._modules: dict[torch.dtype, CudaModule] = {}
        self._module_for(torch.float32)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        slot_table: Tensor,
        out_tokens: Tensor,
        out_status: Tensor,
        *,
        rows: Tensor | None = None,
        raw_flags: Tensor | None = None,
        first_token: int = 0,
        out_scores: Tensor | None = None,
    ) -> None:
        """Write token and status of each of n rows: temperature, filters, noise, argmax.

        logits       [R, V] bfloat16, float16 or float32; logits of a row are contiguous
        slots        [n] int32
        positions    [n] int32; positions of the tokens to sample
        slot_table   [slots, 6] int64; see Sampler
        out_tokens   [n] int32; 0 where the status is not STATUS_OK
        out_status   [n] int32
        rows         [n] int64; rows of `logits`, or None: the first n
        raw_flags    [n] int32; result of `adjust`, where these logits are its result
        first_token  id of the first logit of a row
        out_scores   [n] float64; score of each row's token, where the caller compares parts of rows
        """
        _check_arrays(torch.float64, out_scores)
        self._launch_sample(
            logits,
            rows,
            slots,
            positions,
            slot_table,
            raw_flags,
            out_tokens,
            out_status,
            first_token=first_token,
            out_scores=out_scores,
        )

    def find_cuts(self, logits: Tensor, slots: Tensor, slot_table: Tensor) -> Cuts:
        """Return where the filters of each row end.

        logits   [n, V]
        slots    [n] int32
        """
        cuts = torch.full((len(slots), 2), -1, dtype=torch.int32, device=self._device)
        self._launch_sample(logits, None, slots, slots, slot_table, out_cuts=cuts)
        gaps, tokens = cuts.long().unbind(1)
        return Cuts(gaps, tokens.clamp_(max=self._vocab_size))

    def adjust(
        self,
        logits: Tensor,
        rows: Tensor,
        adjustments: RowAdjustments[Tensor],
        draft_tokens: Tensor,
        count_tables: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the adjusted logits, float32 [n, V], and the flags of the raw ones, int32 [n].

        logits         [R, V]; not changed
        rows           [n] int64; rows of `logits`
        adjustments    those of the n rows
        draft_tokens   int64; flat table of drafts
        count_tables   [slots, V] tokens of the prompt, bool; counts in the output, int32. None
                       where no row has penalties
        """
        num_rows = len(rows)
        adjusted = torch.empty(num_rows, self._vocab_size, device=self._device)
        raw_flags = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        prompt_mask, output_counts = count_tables or (None, None)
        self._launch(
            "adjust",
            (-(-self._vocab_size // ADJUST_TILE), num_rows),
            4 * ADJUST_TILE,
            logits,
            logits.stride(0),
            rows,
            self._vocab_size,
            adjusted,
            raw_flags,
            *adjustments,
            draft_tokens,
            prompt_mask,
            output_counts,
        )
        return adjusted, raw_flags

    def logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, rows: Tensor | None = None
    ) -> Tensor:
        """Return `logprobs.compute_logprobs` of rows of the logits.

        tokens    [n] int64
        num_top   at most MAX_FAST_LOGPROBS and the size of the vocabulary
        rows      [n] int64; rows of `logits`, or None: the first n
        """
        _check_arrays(torch.int64, tokens, rows)
        num_rows, layout = len(tokens), self._layout
        packed = torch.empty(num_rows, 2 + 2 * num_top, dtype=torch.float64, device=self._device)
        self._launch(
            "logprobs",
            (num_rows * layout.cluster, 1),
            layout.shared_bytes,
            logits,
            logits.stride(0),
            rows,
            tokens,
            self._vocab_size,
            layout.chunk,
            self._create_scratch(num_rows),
            num_top,
            packed,
        )
        return packed

    def _module_for(self, dtype: torch.dtype) -> CudaModule:
        """Return the kernels for logits of this type."""
        if dtype not in self._modules:
            binary = compile_sample_kernels(dtype, self._vocab_size, self._device)
            row_bytes = self._layout.shared_bytes
            shared_bytes = {"sample": row_bytes, "logprobs": row_bytes, "adjust": 4 * ADJUST_TILE}
            self._modules[dtype] = CudaModule(binary, shared_bytes, self._device)
        return self._modules[dtype]

    def _create_scratch(self, num_rows: int) -> Tensor | None:
        if not self._layout.uses_scratch:
            return None
        return torch.empty(num_rows, self._layout.chunk, dtype=torch.int32, device=self._device)

    def _launch_sample(
        self,
        logits: Tensor,
        rows: Tensor | None,
        slots: Tensor,
        positions: Tensor,
        slot_table: Tensor,
        raw_flags: Tensor | None = None,
        out_tokens: Tensor | None = None,
        out_status: Tensor | None = None,
        out_cuts: Tensor | None = None,
        first_token: int = 0,
        out_scores: Tensor | None = None,
    ) -> None:
        _check_arrays(torch.int32, slots, positions, raw_flags, out_tokens, out_status)
        _check_arrays(torch.int64, rows)
        layout = self._layout
        self._launch(
            "sample",
            (len(slots) * layout.cluster, 1),
            layout.shared_bytes,
            logits,
            logits.stride(0),
            rows,
            slots,
            positions,
            slot_table,
            raw_flags,
            self._vocab_size,
            layout.chunk,
            self._create_scratch(len(slots)),
            out_tokens,
            out_status,
            out_cuts,
            first_token,
            out_scores,
        )

    def _launch(
        self,
        name: str,
        grid: tuple[int, int],
        shared_bytes: int,
        logits: Tensor,
        *arguments: Tensor | int | None,
    ) -> None:
        assert logits.stride(1) == 1, f"logits of a row have stride {logits.stride(1)}, not 1"
        if grid[0] and grid[1]:
            self._module_for(logits.dtype).launch(
                name, grid, self._layout.threads, shared_bytes, (logits, *arguments)
            )


def compile_sample_kernels(dtype: torch.dtype, vocab_size: int, device: torch.device) -> bytes:
    """Return the kernels for logits of one type, compiled for the device. Cached."""
    device = with_index(device)
    layout = _RowLayout.choose(vocab_size, device)
    macros = (
        LOGIT_MACROS[dtype],
        f"CLUSTER={layout.cluster}",
        f"THREADS={layout.threads}",
        f"SHARED_STATE_BYTES={SHARED_STATE_BYTES}",
    )
    return compile_source(SOURCE, macros, device, options=("--fmad=false",))


def _check_arrays(dtype: torch.dtype, *arrays: Tensor | None) -> None:
    """Assert that a kernel can read these one-dimensional arrays."""
    for array in arrays:
        assert array is None or (array.dtype == dtype and array.is_contiguous()), (
            f"{array.dtype} with strides {array.stride()}, not {dtype} without gaps"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
