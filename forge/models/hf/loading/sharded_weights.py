"""Weights of one rank: read from files in part, or the parts of the random ones of `dummy`.

Owns the readers. Knows no layout but the slices it is given.

    files    q_proj.weight [ ....####.... ]      only the rank's rows or columns are read
    dummy    every matrix is drawn whole, as one rank draws it, and the rank's part is kept

Always true: the parts of all ranks together are the weights of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forge.models.hf.loading.checkpoint import (
    GIB,
    RANDOM_SEED,
    RANDOM_STD,
    Checkpoint,
    build_meta_module,
    check_memory,
    plan_weights,
    weight_bytes,
)
from forge.models.hf.loading.checkpoint_files import refuse_model
from forge.models.hf.loading.tensor_plan import TensorPlan, format_first
from forge.models.hf.parallel.communicator import Communicator
from forge.models.hf.parallel.module_layout import find_layout
from forge.models.hf.parallel.sharded_module import (
    WholeShapes,
    add_all_reduces,
    fill_module,
    shrink_module,
)
from forge.models.hf.parallel.sharding import Shard, Slice
from forge.models.hf.progress import log_phase, show_bar, show_progress, silence_transformers

NUM_READ_THREADS = 8
"""Threads that copy the weights of one layer to the device."""


class SlicedFiles:
    """Parts of the stored tensors of a plan.

    num_read   numbers of all tensors that were returned
    """

    def __init__(
        self,
        plan: TensorPlan,
        slices: Mapping[str, Slice],
        device: torch.device,
        dtype: torch.dtype,
        executor: Executor,
    ) -> None:
        self._tensors, self._slices = plan.tensors, slices
        self._device, self._dtype, self._executor = device, dtype, executor
        self.num_read = 0

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the rank's part of each named tensor, on the device. Raise InvalidConfig."""
        found = dict(zip(names, self._executor.map(self._read_one, names), strict=True))
        self.num_read += sum(each.numel() for each in found.values())
        return found

    def _read_one(self, name: str) -> Tensor:
        stored = self._tensors[name].open_slice()
        part = self._slices.get(name)
        if part is None:
            tensors = [stored[:]]
        elif part.dim == 0:
            tensors = [stored[start:end] for start, end in part.intervals]
        else:
            tensors = [stored[:, start:end] for start, end in part.intervals]
        on_device = [each.to(self._device, self._dtype, copy=True) for each in tensors]
        return on_device[0] if len(on_device) == 1 else torch.cat(on_device)


class RandomMatrices:
    """Parts of the matrices that `load_module` draws, if all are read in the module's order."""

    def __init__(
        self,
        whole: WholeShapes,
        slices: Mapping[str, Slice],
        device: torch.device,
        dtype: torch.dtype,
        advance: Callable[[int], object],
    ) -> None:
        self._shapes, self._slices = whole.shapes, slices
        self._device, self._dtype, self._advance = device, dtype, advance
        self._generator = torch.Generator(device).manual_seed(RANDOM_SEED)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the rank's part of each named matrix; vectors are left out."""
        self._advance(len(names))
        # Each draw depends on those before it.
        return {name: self._draw(name) for name in names if len(self._shapes[name]) > 1}

    def _draw(self, name: str) -> Tensor:
        matrix = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        matrix.normal_(0.0, RANDOM_STD, generator=self._generator)
        part = self._slices.get(name)
        if part is None:
            return matrix
        parts = [matrix.narrow(part.dim, start, end - start) for start, end in part.intervals]
        return torch.cat(parts, dim=part.dim)


@contextmanager
def open_weights(
    checkpoint: Checkpoint,
    plan: TensorPlan,
    whole: WholeShapes,
    slices: Mapping[str, Slice],
    device: torch.device,
    load_format: str,
) -> Iterator[Callable[[Sequence[str]], Mapping[str, Tensor]]]:
    """Yield a function that returns the rank's part of named parameters."""
    num_parameters = len(whole.shapes)
    if load_format == "dummy":
        with show_progress("initializing weights", num_parameters) as advance:
            yield RandomMatrices(whole, slices, device, checkpoint.dtype, advance).read
        return
    with (
        ThreadPoolExecutor(NUM_READ_THREADS) as executor,
        show_bar("Loading weights", num_parameters) as advance,
    ):
        files = SlicedFiles(plan, slices, device, checkpoint.dtype, executor)

        def read(names: Sequence[str]) -> Mapping[str, Tensor]:
            found = files.read(names)
            advance(len(names))
            return found

        yield read


def refuse_converted(checkpoint: Checkpoint, plan: TensorPlan) -> None:
    """Raise InvalidConfig for weights that transformers makes of several tensors."""
    if plan.converted:
        refuse_model(
            f"{checkpoint.folder} has weights that are converted when they are read, which ranks "
            f"cannot do: {format_first(sorted(plan.converted))}",
            "Serve it on one device, or save it again with this transformers",
        )


def load_sharded_module(
    checkpoint: Checkpoint,
    communicator: Communicator,
    device: torch.device,
    load_format: str = "auto",
    attn_implementation: str = "forge",
) -> Any:
    """Return this rank's part of the module, on the device, in eval mode and without gradients.

    load_format   auto reads the rank's part of the weights; dummy keeps its part of random ones
    Raise InvalidConfig where the module cannot be divided or its part takes too much memory.
    """
    with silence_transformers():
        module = build_meta_module(checkpoint, attn_implementation)
        shard = Shard(communicator.rank, communicator.world_size)
        layout = find_layout(module, shard)
        plan = plan_weights(checkpoint, module, load_format)
        refuse_converted(checkpoint, plan)
        whole = shrink_module(module, layout, plan.ties, communicator.rank)
        size = weight_bytes(module, plan.ties)
        check_memory(size, device)
        with (
            log_phase(f"loading weights: {size / GIB:.1f} GiB on rank {communicator.rank}"),
            open_weights(checkpoint, plan, whole, layout.slices, device, load_format) as read,
        ):
            fill_module(module, whole, layout, device, read)
    add_all_reduces(module, layout, communicator)
    module.requires_grad_(False)
    return module.eval()
