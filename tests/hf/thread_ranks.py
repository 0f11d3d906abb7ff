"""Ranks as threads of one process: quick, and every collective call can be counted.

rank 0 ─ all_gather ─┐ barrier ┌─ [a, b]
rank 1 ─ all_gather ─┘         └─ [a, b]
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from forge.models.hf.decoders.module_decoder import ATTENTION_NAME
from forge.models.hf.parallel.communicator import add_parts
from forge.models.hf.parallel.module_layout import find_layout
from forge.models.hf.parallel.sharded_module import add_all_reduces, fill_module, shrink_module
from forge.models.hf.parallel.sharding import Shard, Slice

ResultT = TypeVar("ResultT")
MAX_WAIT_S = 60
CONSTRUCTION = threading.Lock()


class Meeting:
    """Where the ranks exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.parts: list[Any] = [None] * world_size


class ThreadCommunicator:
    """Communicator of one thread.

    calls   number of calls by the name of the method
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = meeting.world_size
        self.calls: Counter[str] = Counter()

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `x`, in the order of ranks, plus the residual."""
        self.calls["all_reduce"] += 1
        return add_parts(torch.stack(self._exchange(x)), residual)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return None: there is no such kernel."""
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`."""
        self.calls["all_gather"] += 1
        return torch.stack(self._exchange(x))

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite `x` with that of rank `source`."""
        self.calls["broadcast"] += 1
        x.copy_(self._exchange(x)[source])

    def _exchange(self, x: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.parts[self.rank] = x.detach().clone()
        meeting.barrier.wait(MAX_WAIT_S)
        parts = list(meeting.parts)
        shapes = {(each.shape, each.dtype) for each in parts}
        meeting.barrier.wait(MAX_WAIT_S)
        assert len(shapes) == 1, f"ranks exchange different tensors: {shapes}"
        return parts


def create_communicators(world_size: int) -> list[ThreadCommunicator]:
    """Return a communicator for each rank."""
    meeting = Meeting(world_size)
    return [ThreadCommunicator(meeting, rank) for rank in range(world_size)]


def run_ranks(
    communicators: list[ThreadCommunicator], run: Callable[[ThreadCommunicator], ResultT]
) -> list[ResultT]:
    """Return what `run` returns on each rank. Raise the first rank's error, if any."""

    def run_rank(communicator: ThreadCommunicator) -> ResultT:
        try:
            return run(communicator)
        except BaseException:
            communicator._meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(communicators)) as executor:
        futures = [executor.submit(run_rank, each) for each in communicators]
    errors = [error for each in futures if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in futures]


def divide_module(module: Any, communicator: ThreadCommunicator) -> Any:
    """Return the rank's part of a module that is in memory."""
    # transformers sets torch's default dtype meanwhile, for all threads.
    with CONSTRUCTION, torch.device("meta"):
        part = type(module)._from_config(
            copy.deepcopy(module.config), dtype=module.dtype, attn_implementation=ATTENTION_NAME
        )
    layout = find_layout(part, Shard(communicator.rank, communicator.world_size))
    whole = shrink_module(part, layout, part.all_tied_weights_keys, communicator.rank)
    tensors = dict(module.named_parameters())

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: select_part(tensors[name], layout.slices.get(name)) for name in names}

    fill_module(part, whole, layout, module.device, read)
    add_all_reduces(part, layout, communicator)
    return part.requires_grad_(False).eval()


def select_part(tensor: Tensor, part: Slice | None) -> Tensor:
    """Return a slice of a tensor; None: all of it."""
    if part is None:
        return tensor
    pieces = [tensor.narrow(part.dim, start, end - start) for start, end in part.intervals]
    return torch.cat(pieces, dim=part.dim)
