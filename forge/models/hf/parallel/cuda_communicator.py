"""CudaCommunicator: ranks on the GPUs of one host.

Owns which kernel sums a message of which size, and small exact copies inside CUDA graphs. The
kernels are this package's one-shot sum, torch's over symmetric memory, and NCCL's.

    bytes of a message      0 ── one-shot bytes ── TWO_SHOT_BYTES ──
    sum                     one shot      two shots          NCCL
    gather, broadcast       small: one shot, or as sums of 16-bit integers in float32, which are
                            exact. Others: NCCL

Always true: which kernel is taken depends on shapes and dtypes alone, so all ranks take the same.
What a CUDA graph captures is small enough for the kernels over symmetric memory. Their buffers are
allocated once. Multicast is off: see forge/models/rank_devices.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from forge.errors import EngineDead, one_line
from forge.models.hf.parallel.agreement import gather_over_group, raise_on_all

log = logging.getLogger("forge.start")

ONE_SHOT_BYTES = 1 << 20
"""Longest message of one shot where there are more than two ranks."""

PAIR_ONE_SHOT_BYTES = 3 << 20
"""Longest message of one shot between two ranks, where two shots send no less.

On two H200s, with residual and norm: 1.25 MiB in 10.0 us, by torch's two shots and a norm in 13.0;
5 MiB in 30.6 and 27.9.
"""

TWO_SHOT_BYTES = 64 << 20
"""Longest message of two shots. On an H200: 20 MiB in 71 us, by NCCL in 100."""

ALIGNMENT_BYTES = 16
"""Bytes of a vector; each rank's share of a message is whole vectors."""

PAD_BYTES = 64
"""Multiple of the bytes in `exact_numbers`, so that eight ranks have whole vectors of a sum."""


class Reducer(Protocol):
    """A way to sum over ranks."""

    def takes(self, x: Tensor, residual: Tensor | None = None) -> bool:
        """Return whether `all_reduce` sums such tensors. Equal on all ranks for equal shapes."""
        ...

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, plus the residual."""
        ...


@runtime_checkable
class OneShotReducer(Reducer, Protocol):
    """A way to sum over ranks that also norms the sum, and copies small tensors of any dtype."""

    def takes_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Return whether `all_reduce_norm` takes these tensors."""
        ...

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of every rank's `x` plus the residual, and its RMS norm."""
        ...

    def takes_gather(self, x: Tensor) -> bool:
        """Return whether `all_gather` copies this tensor."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, [world_size, *x.shape]."""
        ...


class NcclReducer:
    """Sums of any tensors by NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def takes(self, x: Tensor, residual: Tensor | None = None) -> bool:
        """Return True."""
        return True

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, plus the residual."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x if residual is None else x + residual


class SymmetricReducer:
    """Sums by torch's kernels over symmetric memory: one shot for short messages, else two.

    max_bytes        longest message; the shared buffer has as many
    one_shot_bytes   longest message of one shot
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        max_bytes: int = TWO_SHOT_BYTES,
        one_shot_bytes: int = ONE_SHOT_BYTES,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._group_name = group.group_name
        self._max_bytes, self._one_shot_bytes = max_bytes, one_shot_bytes
        with raise_on_all(gather_over_group(group)):
            self._memory = symmetric_memory.empty(max_bytes, dtype=torch.uint8, device=device)
        with raise_on_all(gather_over_group(group)):
            self._handle = symmetric_memory.rendezvous(self._memory, group)

    def takes(self, x: Tensor, residual: Tensor | None = None) -> bool:
        """Return whether the message fits the buffer and has whole vectors for each rank."""
        multiple = ALIGNMENT_BYTES * self._handle.world_size
        return (
            x.dtype in (torch.bfloat16, torch.float32)
            and 0 < x.nbytes <= self._max_bytes
            and x.nbytes % multiple == 0
        )

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, plus the residual."""
        shared = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        if x.nbytes <= self._one_shot_bytes:
            total = torch.ops.symm_mem.one_shot_all_reduce_copy(
                shared, x.contiguous(), "sum", self._group_name
            )
        else:
            shared.copy_(x)
            total = torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group_name)
        return total if residual is None else total + residual


class CudaCommunicator:
    """Ranks of a process group of NCCL, one GPU each.

    reducers   ways to sum, in the order in which they are tried; the last takes all tensors
    """

    def __init__(self, group: dist.ProcessGroup, reducers: Sequence[Reducer]) -> None:
        self._group = group
        self._reducers = tuple(reducers)
        first = reducers[0]
        self._one_shot = first if isinstance(first, OneShotReducer) else None
        self.rank, self.world_size = group.rank(), group.size()

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, plus the residual."""
        for reducer in self._reducers:
            if reducer.takes(x, residual):
                return reducer.all_reduce(x, residual)
        raise AssertionError(f"no reducer takes {x.dtype} {x.shape}")

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return the sum and its norm, or None where the fused kernel does not take them."""
        if self._one_shot is None or not self._one_shot.takes_norm(x, residual, weight):
            return None
        return self._one_shot.all_reduce_norm(x, residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, [world_size, *x.shape]."""
        x = x.contiguous()
        if self._one_shot is not None and self._one_shot.takes_gather(x):
            return self._one_shot.all_gather(x)
        if not self._is_small(x.nbytes * self.world_size):
            gathered = x.new_empty((self.world_size, *x.shape))
            dist.all_gather_into_tensor(gathered, x, group=self._group)
            return gathered
        numbers = exact_numbers(x)
        parts = numbers.new_zeros((self.world_size, numbers.numel()))
        parts[self.rank] = numbers
        return restore_numbers(self.all_reduce(parts), x.dtype, (self.world_size, *x.shape))

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite `x` with that of rank `source`."""
        sent = x.contiguous()
        if self._one_shot is not None and self._one_shot.takes_gather(sent):
            x.copy_(self._one_shot.all_gather(sent)[source])
            return
        if not self._is_small(sent.nbytes):
            dist.broadcast(sent, group=self._group, group_src=source)
            x.copy_(sent)
            return
        numbers = exact_numbers(sent)
        part = numbers if self.rank == source else torch.zeros_like(numbers)
        x.copy_(restore_numbers(self.all_reduce(part), x.dtype, x.shape))

    def _is_small(self, num_bytes: int) -> bool:
        """Return whether a message is faster as a sum. NCCL copies what it would sum itself."""
        return len(self._reducers) > 1 and 2 * num_bytes <= ONE_SHOT_BYTES // 2


def exact_numbers(x: Tensor) -> Tensor:
    """Return the bytes of `x` as 16-bit integers in float32, padded to whole vectors, [n].

    A sum of one of them and zeros is exact, whatever the bytes mean.
    """
    raw = x.view(-1).view(torch.uint8)
    pad_bytes = -len(raw) % PAD_BYTES
    if pad_bytes:
        raw = torch.nn.functional.pad(raw, (0, pad_bytes))
    return raw.view(torch.int16).float()


def restore_numbers(numbers: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the tensors whose `exact_numbers` these are, [*shape].

    numbers   [n], or [ranks, n] with a shape that begins with the ranks
    """
    raw = numbers.to(torch.int16).view(torch.uint8)
    row_shape = shape[1:] if numbers.dim() > 1 else shape
    num_bytes = dtype.itemsize
    for size in row_shape:
        num_bytes *= size
    return raw[..., :num_bytes].contiguous().view(dtype).view(tuple(shape))


def select_one_shot_bytes(world_size: int) -> int:
    """Return the longest message that this package's kernels sum among so many ranks."""
    return PAIR_ONE_SHOT_BYTES if world_size == 2 else ONE_SHOT_BYTES


def create_one_shot(group: dist.ProcessGroup, device: torch.device) -> Reducer:
    """Return this package's kernels, which add the residual and the norm too."""
    # The bindings of CUDA are installed only where torch has CUDA.
    from forge.models.hf.parallel.all_reduce import OneShotAllReduce

    return OneShotAllReduce(group, device, select_one_shot_bytes(group.size()))


CREATE_REDUCER: Mapping[str, Callable[[dist.ProcessGroup, torch.device], Reducer]] = {
    "one_shot": create_one_shot,
    "symmetric": SymmetricReducer,
    "nccl": lambda group, device: NcclReducer(group),
}
"""Ways to sum by name, in the order in which they are tried."""


def create_cuda_communicator(
    group: dist.ProcessGroup, device: torch.device, names: Sequence[str] = tuple(CREATE_REDUCER)
) -> CudaCommunicator:
    """Return the communicator of this rank. A collective call: every rank makes it.

    names   ways to sum, of CREATE_REDUCER; the last takes all tensors
    Where a GPU cannot map another's memory, the last sums everything on all ranks, which is said in
    the log.
    """
    try:
        reducers = [CREATE_REDUCER[name](group, device) for name in names]
    except (EngineDead, OSError, RuntimeError) as error:  # on all ranks: see agreement.py
        log.warning("%s sums all messages, GPUs share no memory: %s", names[-1], one_line(error))
        reducers = [CREATE_REDUCER[names[-1]](group, device)]
    return CudaCommunicator(group, reducers)


@contextmanager
def open_group(
    rank: int, world_size: int, address: str, device: torch.device
) -> Iterator[dist.ProcessGroup]:
    """Open the default process group of torch.distributed: NCCL on a GPU, gloo on a CPU.

    address   URL of the meeting point, such as tcp://127.0.0.1:29500
    """
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=address,
        rank=rank,
        world_size=world_size,
        device_id=device if is_cuda else None,
    )
    group = dist.group.WORLD
    assert group is not None, "the default group is open"
    try:
        yield group
    finally:
        dist.destroy_process_group()
