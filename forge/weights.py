"""Weights that replace those of a model between two steps: sources, and what a model offers.

Owns the values that an update consists of. Knows no tensor library and no file format: a model
reads the source.

    WeightFiles("step-40/model.safetensors") ─┬─► Engine.update_weights ─► UpdatesWeights
    NamedWeights({"model.norm.weight": ...}) ─┤      between two steps       in place
    SharedWeights(storages, tensors) ─────────┘

Always true: a source that does not match the model changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from forge.errors import ForgeError, InvalidWeights, one_line


class WeightFiles(NamedTuple):
    """Safetensors files that this machine can read. No name is in two of them."""

    paths: tuple[str, ...]


class NamedWeights(NamedTuple):
    """Tensors of this process by their names in the checkpoint, on any device."""

    tensors: Mapping[str, object]


class SharedMemory(NamedTuple):
    """Memory of another process: a file without a name, which cannot shrink.

    path   under /proc, of the descriptor of the process that has it open
    """

    path: str
    num_bytes: int


class CudaStorage(NamedTuple):
    """Memory on a GPU that another process has exported by CUDA IPC.

    The fields are those that torch's storage gives there, and `device_uuid` is that of the GPU:
    its index may be another one in each process.
    """

    num_bytes: int
    offset_bytes: int
    device_uuid: str
    handle: bytes
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SharedTensor(NamedTuple):
    """Contiguous tensor in a storage.

    dtype     torch's name, such as bfloat16
    storage   index in SharedWeights.storages
    offset    elements before it
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: int
    offset: int


class SharedWeights(NamedTuple):
    """Tensors in memory of another process, which leaves them as they are until the update ends."""

    storages: tuple[SharedMemory | CudaStorage, ...]
    tensors: tuple[SharedTensor, ...]


class WeightUpdate(NamedTuple):
    """Result of an update.

    version   of the weights that it began
    seconds   of each part
    """

    version: str
    seconds: dict[str, float]


WeightSource: TypeAlias = WeightFiles | NamedWeights | SharedWeights

PartTimes: TypeAlias = tuple[tuple[str, float], ...]
"""Parts of a slow command, each with its seconds."""


def as_weight_source(weights: object) -> WeightSource:
    """Return the weights as a source: a source itself, a mapping of tensors, or pairs of them.

    Raises InvalidWeights for anything else. What the tensors are is for the model.
    """
    if isinstance(weights, SharedWeights):
        return weights
    if isinstance(weights, WeightFiles):
        paths = weights.paths
        if isinstance(paths, list | tuple) and all(isinstance(path, str) for path in paths):
            return WeightFiles(tuple(paths))
    else:
        with suppress(TypeError, ValueError):
            pairs = weights.tensors if isinstance(weights, NamedWeights) else weights
            tensors = dict(cast(Mapping[str, object], pairs))
            if all(isinstance(name, str) for name in tensors):
                return NamedWeights(tensors)
    raise InvalidWeights(
        "weights",
        f"{str(weights)[:64]!r} is no source of weights",
        'Give {"name": tensor}, pairs of these, or WeightFiles(("a.safetensors",))',
    )


@contextmanager
def refuse_unreadable(source: WeightSource) -> Iterator[None]:
    """Raise InvalidWeights in place of any error of a source that is read before the first write.

    source   which is read in the context
    """
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        raise InvalidWeights(
            "weights",
            f"{type(source).__name__} cannot be read: {type(error).__name__}: {one_line(error)}",
            "Give tensors of the model, by their names",
        ) from error


@runtime_checkable
class UpdatesWeights(Protocol):
    """Optional method of a Model whose weights can be replaced in place."""

    def update_weights(self, source: WeightSource) -> None:
        """Replace the weights that the source has. No step is in flight, and none begins.

        Raises InvalidWeights, and changes nothing then. Any other error leaves a mixture, with
        which nothing may be computed.
        """
        ...


@runtime_checkable
class Sleeps(Protocol):
    """Optional methods of a Model that can release its device's memory between two steps."""

    def sleep(self, level: int) -> PartTimes:
        """Release the memory of the KV cache and of the weights. No step is in flight.

        level   1 keeps a copy of the weights in host memory, 2 keeps none
        """
        ...

    def wake(self) -> PartTimes:
        """Allocate everything again. After level 2 all weights must be updated before a step."""
        ...
