"""LlamaModel: the Model of a Llama in numpy, whose weights can be replaced between two steps.

Owns the checks of an update. Knows no layer: the arithmetic is in llama.py.

    source ─► names and shapes compared with those of the checkpoint ─► Llama.set_weights

Always true: a source that does not match changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from forge.errors import InvalidWeights, one_line
from forge.models.file_moves import FileMoves
from forge.models.host_blocks import HostBlocks
from forge.models.llama import Array, Llama
from forge.models.paged import PagedModel
from forge.weights import NamedWeights, WeightFiles, WeightSource, refuse_unreadable


class LlamaModel(PagedModel):
    """PagedModel of a Llama. A draft keeps its own weights."""

    def __init__(
        self,
        llama: Llama,
        *,
        eos_token: int,
        draft: PagedModel | None = None,
        files: FileMoves | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        super().__init__(
            llama, eos_token=eos_token, draft=draft, files=files, host_blocks=host_blocks
        )
        self._llama = llama

    def update_weights(self, source: WeightSource) -> None:
        """Replace the weights that the source has. Raises InvalidWeights."""
        weights = self._llama.weights
        with refuse_unreadable(source):
            read = read_weights(source, weights)
        self._llama.set_weights({**weights, **read})


def read_weights(source: WeightSource, current: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of the source by name, each of the current one's shape.

    Raises InvalidWeights for a source that has none, or another name, shape or type.
    """
    found = dict[str, Array]()
    for name, tensor in _open(source).items():
        if name not in current:
            raise InvalidWeights(
                str(name)[:160],
                "the model has no such tensor",
                f"Its names are like {next(iter(current))}",
            )
        found[name] = array = _read_array(name, tensor)
        if array.shape != current[name].shape:
            raise InvalidWeights(
                name,
                f"its shape is {list(array.shape)}, the model's {list(current[name].shape)}",
                "Give the tensor of this model",
            )
    if not found:
        raise InvalidWeights("weights", "there are none", "Give at least one tensor")
    return found


def _open(source: WeightSource) -> Mapping[str, object]:
    if isinstance(source, NamedWeights):
        return source.tensors
    if not isinstance(source, WeightFiles):
        raise InvalidWeights(
            "weights", "a model in numpy reads no memory of another process", "Give files"
        )
    tensors = dict[str, object]()
    for path in source.paths:
        try:
            loaded = load_file(path)
        except (
            *(SafetensorError, OSError, ValueError, KeyError, TypeError),
            AttributeError,  # float8: numpy has no such type
        ) as error:
            raise InvalidWeights(
                path, f"it cannot be read: {one_line(error)}", "Write it again, in float32"
            ) from None
        for name in loaded.keys() & tensors.keys():
            raise InvalidWeights(name, "it is in two files", "Write it to one")
        tensors |= loaded
    return tensors


def _read_array(name: str, tensor: object) -> Array:
    """Return the tensor, of numpy or of torch on a CPU, as an array of floats."""
    detach = getattr(tensor, "detach", None)
    try:
        array = np.array(tensor if detach is None else detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidWeights(
            name, f"it is no array: {one_line(error)}", "Give float32 on a CPU"
        ) from None
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise InvalidWeights(name, f"its dtype is {array.dtype}", "Give float32")
    return array
