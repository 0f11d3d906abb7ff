"""OneShotAllReduce: sums over the ranks of one host in one launch. Imported only where CUDA is.

Owns the memory that the ranks share, and the launches. The kernels are those of all_reduce.cu, the
division of a call is that of all_reduce_layout.py. Knows no model.

    x ──┬─► memory of each other rank
        └─► sum in the order of ranks, fp32 ─► + residual ─► rounded once: x_new ─► norm ─► normed

    message          kernel            latency
    small            reduce_packets    one way over the link
    to max_bytes     reduce_flagged    there, a flag, and half the bytes of packets
    longer           `takes` is False: a library's all-reduce

Always true: a call may be part of a CUDA graph, which may be replayed in any order with other
graphs and with calls outside of them, as long as every rank makes the same calls in the same order,
on streams that order them. Every rank gets equal bits. A call waits on the device for the other
ranks: if one of them ends, it waits indefinitely, and its process has to be ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from forge.models.all_reduce_layout import (
    KERNELS,
    MAX_VECTORS,
    VECTOR_BYTES,
    AllReduceLaunch,
    AllReduceLayout,
    has_flags,
)
from forge.models.hf.cuda_module import CudaModule, compile_source, with_index
from forge.models.hf.parallel.agreement import gather_objects, gather_over_group, raise_on_all
from forge.models.rank_devices import WITHOUT_MULTICAST

SOURCE = Path(__file__).with_name("all_reduce.cu")

DTYPE_MACROS = {
    torch.bfloat16: "FLOAT_BF16",
    torch.float16: "FLOAT_F16",
    torch.float32: "FLOAT_F32",
}
"""Macro of all_reduce.cu for each dtype that the kernels add."""

MAX_THREADS = 512
"""Most threads of a CTA. With all registers of a multiprocessor, a thread may have 128."""

MAX_CTAS = 128
"""Most CTAs of a grid, where the device has as many multiprocessors."""

MAX_PUSHED_PACKET_BYTES = 256 * 1024
"""Longest message that is sent as packets, times the number of other ranks that it is sent to."""


class OneShotAllReduce:
    """Sums over a process group, of tensors on this process's device.

    Its construction is a collective operation: every rank passes equal sizes and dtypes.

    group              process group of ranks whose devices have access to each other's memory
    max_bytes          longest message, a multiple of 16. Each rank holds twice as many for each
                       rank
    max_packet_bytes   longest message that is sent as packets; None: a default for the group's size
    dtypes             dtypes for which kernels are compiled
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        max_bytes: int,
        *,
        max_packet_bytes: int | None = None,
        dtypes: Sequence[torch.dtype] = tuple(DTYPE_MACROS),
    ) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        if self.world_size < 2 or max_bytes <= 0 or max_bytes % VECTOR_BYTES:
            raise ValueError(
                f"{self.world_size} ranks and {max_bytes} bytes: at least two ranks and a positive "
                f"multiple of {VECTOR_BYTES} bytes are needed"
            )
        self._device = with_index(device)
        if max_packet_bytes is None:
            max_packet_bytes = MAX_PUSHED_PACKET_BYTES // (self.world_size - 1)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self.layout = AllReduceLayout(
            self.world_size,
            min(MAX_CTAS, num_sms),
            MAX_THREADS,
            min(max_bytes, max_packet_bytes // VECTOR_BYTES * VECTOR_BYTES),
            max_bytes,
        )
        # Objects are gathered on the current device.
        with torch.cuda.device(self._device):
            with raise_on_all(gather_over_group(group)):
                _check_environment()
                self._modules = {dtype: self._load_module(dtype) for dtype in dtypes}
            _check_equal(group, (self.layout, tuple(map(str, dtypes))))
            self._share_memory(group)

    def takes(self, x: Tensor, residual: Tensor | None = None) -> bool:
        """Return whether `all_reduce` adds these tensors. Equal on all ranks for equal shapes."""
        return 0 < x.nbytes <= self.layout.max_bytes and all(
            each.dtype == x.dtype
            and each.dtype in self._modules
            and each.shape == x.shape
            and each.is_contiguous()
            and each.nbytes % VECTOR_BYTES == 0
            and each.data_ptr() % VECTOR_BYTES == 0
            for each in (x, residual)
            if each is not None
        )

    def takes_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Return whether `all_reduce_norm` adds and norms these tensors."""
        row_bytes = weight.nbytes
        return (
            self.takes(x, residual)
            and weight.dtype == x.dtype
            and weight.shape == x.shape[-1:]
            and weight.is_contiguous()
            and row_bytes % VECTOR_BYTES == 0
            and row_bytes <= self.layout.max_row_bytes
            and weight.data_ptr() % VECTOR_BYTES == 0
        )

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's x, plus the residual: added in fp32, rounded once.

        residual   equal on all ranks; not changed
        """
        assert self.takes(x, residual), f"x {x.dtype} {x.shape} {x.stride()}"
        out = torch.empty_like(x)
        self._reduce(x, residual, None, out, None, 0.0)
        return out

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `all_reduce` of x and its norm: TorchOps.rms_norm of the rounded sum.

        x, residual   [..., H]
        weight        [H]
        """
        assert self.takes_norm(x, residual, weight), f"x {x.dtype} {x.shape} {x.stride()}"
        out, normed = torch.empty_like(x), torch.empty_like(x)
        self._reduce(x, residual, weight, out, normed, eps)
        return out, normed

    def takes_gather(self, x: Tensor) -> bool:
        """Return whether `all_gather` copies this tensor, of any dtype."""
        return (
            0 < x.nbytes <= self.layout.max_packet_bytes
            and x.is_contiguous()
            and x.nbytes % VECTOR_BYTES == 0
            and x.data_ptr() % VECTOR_BYTES == 0
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, [world_size, *x.shape], in the order of ranks."""
        assert self.takes_gather(x), f"x {x.dtype} {x.shape} {x.stride()}"
        out = x.new_empty((self.world_size, *x.shape))
        module = next(iter(self._modules.values()))
        self._launch(module, self.layout.select_gather(x.nbytes), x, (out,))
        return out

    def _load_module(self, dtype: torch.dtype) -> CudaModule:
        macros = (
            f"WORLD={self.world_size}",
            f"MAX_THREADS={MAX_THREADS}",
            f"MAX_VECTORS={MAX_VECTORS}",
            DTYPE_MACROS[dtype],
        )
        binary = compile_source(SOURCE, macros, self._device)
        return CudaModule(binary, dict.fromkeys(KERNELS, 0), self._device)

    def _share_memory(self, group: dist.ProcessGroup) -> None:
        """Allocate this rank's memory and map that of the others."""
        size = self.layout.total_bytes
        # Kept: the memory is unmapped when they are deleted.
        with raise_on_all(gather_over_group(group)):
            self._memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
            self._memory.zero_()
        # Torch's own collective call: a rank that fails in it meets the others after its timeout.
        with raise_on_all(gather_over_group(group)):
            self._handle = symmetric_memory.rendezvous(self._memory, group)
        # Where torch allocates it within a larger block, it begins at the same offset on all ranks.
        pointers = self._handle.buffer_ptrs
        offset = self._memory.data_ptr() - pointers[self.rank]
        _check_equal(group, offset)
        addresses = [each + offset for each in pointers]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        # Numbers of the next call with packets and with flags, for each CTA.
        ones = torch.ones(self.layout.max_ctas, dtype=torch.int32, device=self._device)
        packets, flagged = ones.clone(), ones.clone()
        self._counters = {each: flagged if has_flags(each) else packets for each in KERNELS}
        # Zeros are everywhere before the first call of any rank.
        torch.cuda.synchronize(self._device)
        dist.barrier(group)

    def _reduce(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        normed: Tensor | None,
        eps: float,
    ) -> None:
        launch = self.layout.select_launch(x.nbytes, None if weight is None else weight.nbytes)
        self._launch(self._modules[x.dtype], launch, x, (residual, weight, out, normed), eps)

    def _launch(
        self,
        module: CudaModule,
        launch: AllReduceLaunch,
        x: Tensor,
        others: Sequence[Tensor | None],
        *numbers: float,
    ) -> None:
        arguments = (
            self._addresses,
            self._counters[launch.kernel],
            *self.layout.region(launch.kernel),
            self.rank,
            self.layout.max_ctas,
            x,
            *others,
            x.nbytes // VECTOR_BYTES,
            launch.chunk_vectors,
            *numbers,
        )
        grid = (launch.num_ctas, 1)
        module.launch(launch.kernel, grid, launch.num_threads, 0, arguments, pdl=True)


def _check_environment() -> None:
    """Raise RuntimeError where this process may use multicast."""
    for name, value in WITHOUT_MULTICAST.items():
        if os.environ.get(name) != value:
            raise RuntimeError(f"{name} is not {value}. Set it before the process uses CUDA.")


def _check_equal(group: dist.ProcessGroup, value: object) -> None:
    """Raise RuntimeError on every rank unless all ranks have equal values."""
    values = gather_objects(group, value)
    if any(each != values[0] for each in values):
        raise RuntimeError(f"ranks have different all-reduces: {values}. Make them equal.")
