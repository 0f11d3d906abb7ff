"""ModelWeights: the parameters of a decoder by their names, updated and released in place.

Owns the way from an update's tensors to the memory that steps read. Knows no plan and no graph.

    model.layers.3.self_attn.q_proj.weight ─┐ views of
    model.layers.3.self_attn.k_proj.weight ─┼────────► the stacked QKV weight, where it is
    lm_head.weight ─────────────────────────┴────────► the embedding, where they are tied
    model.rotary_emb.inv_freq                          ignored, as at a start: weight_names.py

Captured graphs hold the addresses of weights, so an update copies into the same memory. A sleep
frees the memory under the tensors, and all views see that which is allocated later: its address is
another one, so graphs are captured again.

Always true: names, shapes and dtypes are checked before the first byte is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from forge.errors import InvalidWeights, one_line
from forge.models.hf.shared_weights import open_shared_weights
from forge.models.hf.weight_names import WeightNames
from forge.weights import (
    NamedWeights,
    SharedWeights,
    WeightFiles,
    WeightSource,
    refuse_unreadable,
)

NUM_COPY_THREADS = 8
"""Threads that copy the tensors of files: most of their time is the copy from the page cache."""


class ModelWeights:
    """Parameters of one model.

    parameters   tensor of each name in the module, with the checkpoint's shape. Several names may
                 be of one tensor
    names        names that sources write; None: those of the parameters
    buffers      tensors that checkpoints have too, such as the bias of a router; a sleep keeps them
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        names: WeightNames | None = None,
        buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._names = names or WeightNames(parameters, prefix="")
        self._saved: list[tuple[torch.UntypedStorage, torch.Tensor | int]] = []
        self._lacks_content = False

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names; one of several names has the first."""
        found: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            found.setdefault(_place(parameter), (name, parameter))
        return dict(found.values())

    @torch.inference_mode()
    def update(self, source: WeightSource) -> None:
        """Copy the source's tensors over those of the same names.

        A tensor is rounded to the model's dtype, as at a start. Raises InvalidWeights, and changes
        nothing then.
        """
        with ExitStack() as exit_stack:
            with refuse_unreadable(source):
                named = exit_stack.enter_context(open_source(source))
                tensors = self._match(named)
                self._check(tensors)
            self._lacks_content = True  # An error from here on leaves a mixture.
            if isinstance(source, WeightFiles):
                with ThreadPoolExecutor(NUM_COPY_THREADS) as executor:
                    list(executor.map(self._copy, tensors, tensors.values()))
            else:
                _synchronize(tensors.values())  # The trainer may still compute them.
                for name, tensor in tensors.items():
                    self._copy(name, tensor)
            _synchronize(self._parameters.values())  # The source may change from here on.
        self._lacks_content = False

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        with torch.inference_mode():  # Each thread has a mode of its own.
            self._target(name).copy_(tensor)

    def _target(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer of this name."""
        parameter = self._parameters.get(name)
        return self._buffers[name] if parameter is None else parameter

    def _match(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their parameters, without those of no weight."""
        tensors: dict[str, torch.Tensor] = {}
        for stored_name, tensor in named.items():
            name = self._names.find(stored_name)
            if name is None or (name not in self._parameters and name not in self._buffers):
                if self._names.is_harmless(stored_name, tensor.shape):
                    continue
                raise self._unknown(stored_name)
            if name in tensors:
                raise InvalidWeights(stored_name, f"it is {name} again", "Give one of them")
            tensors[name] = tensor
        return tensors

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise InvalidWeights unless each tensor can be copied to the parameter of its name."""
        if not tensors:
            raise InvalidWeights("weights", "there are none", "Give at least one tensor")
        first_names: dict[tuple[int, int], str] = {}
        for name, tensor in tensors.items():
            parameter = self._target(name)
            _check_tensor(name, tensor, parameter)
            first = first_names.setdefault(_place(parameter), name)
            if first != name and not torch.equal(tensors[first].to(tensor.device), tensor):
                raise InvalidWeights(
                    name,
                    f"it differs from {first}, and the model has one tensor for both",
                    "Give one of them",
                )
        if self._lacks_content:
            for name, parameter in self._parameters.items():
                if _place(parameter) not in first_names:
                    raise InvalidWeights(
                        name, "it is missing, and the model has no weights", "Give all tensors"
                    )

    def _unknown(self, name: str) -> InvalidWeights:
        known = list(self._parameters)
        close = difflib.get_close_matches(str(name)[:160], known, 1) or known[:1]
        return InvalidWeights(
            str(name)[:160], "the model has no such tensor", f"Its names are like {''.join(close)}"
        )

    @torch.inference_mode()
    def release(self, *, keep_content: bool) -> None:
        """Free the memory of all parameters, with a copy in host memory if `keep_content`."""
        storages = self._storages()
        for storage in storages:
            num_bytes = storage.nbytes()
            if keep_content:
                is_pinned = storage.device.type == "cuda"
                copy = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
                copy.copy_(_bytes_of(storage), non_blocking=True)
                self._saved.append((storage, copy))
            else:
                self._saved.append((storage, num_bytes))
        _synchronize(self._parameters.values())
        for storage in storages:
            storage.resize_(0)
        self._lacks_content = self._lacks_content or not keep_content

    def drop(self) -> None:
        """Free the memory of all parameters, and that of copies: nothing follows."""
        self._saved.clear()
        for storage in self._storages():
            storage.resize_(0)
        self._parameters, self._buffers = {}, {}

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of the parameters, each once.

        A file that is mapped into memory is none of the model's own.
        """
        all_storages = [each.untyped_storage() for each in self._parameters.values()]
        return list({each.data_ptr(): each for each in all_storages if each.resizable()}.values())

    @property
    def released_bytes(self) -> int:
        """Bytes that `restore` allocates."""
        return sum(saved if isinstance(saved, int) else saved.numel() for _, saved in self._saved)

    @torch.inference_mode()
    def restore(self) -> None:
        """Allocate the memory that `release` freed, with its content where that was kept.

        Otherwise every number is NaN until an update.
        """
        for storage, saved in self._saved:
            if isinstance(saved, int):
                storage.resize_(saved)
            else:
                storage.resize_(saved.numel())
                _bytes_of(storage).copy_(saved, non_blocking=True)
        self._saved.clear()
        if self._lacks_content:
            for parameter in self._parameters.values():
                parameter.fill_(torch.nan)
        _synchronize(self._parameters.values())


@contextmanager
def open_source(source: WeightSource) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors of the source by their names. Raises InvalidWeights.

    Those of files are on the CPU, and are read when they are copied.
    """
    if isinstance(source, NamedWeights):
        yield _named_tensors(source.tensors)
        return
    if isinstance(source, SharedWeights):
        yield open_shared_weights(source)
        return
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as exit_stack:
        for path in source.paths:
            try:
                file: Any = exit_stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():
                    if name in tensors:
                        raise InvalidWeights(name, "it is in two files", "Write it to one")
                    tensors[name] = file.get_tensor(name)
            except (SafetensorError, OSError, ValueError) as error:
                if isinstance(error, InvalidWeights):
                    raise
                raise InvalidWeights(
                    path, f"it cannot be read: {one_line(error)}", "Write it again"
                ) from None
        yield tensors


def _named_tensors(tensors: Mapping[str, object]) -> Mapping[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidWeights(
                str(name)[:160], f"a {type(tensor).__name__} is no tensor", "Give a torch.Tensor"
            )
        found[name] = tensor.detach()
    return found


def _check_tensor(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise InvalidWeights(
            name,
            f"its shape is {list(tensor.shape)}, the model's {list(parameter.shape)}",
            "Give the tensor of this model",
        )
    if (
        not tensor.is_floating_point()
        or tensor.element_size() < 2
        or tensor.layout != torch.strided
    ):
        raise InvalidWeights(
            name, f"its dtype is {tensor.dtype}, {tensor.layout}", "Give float32 or bfloat16"
        )
    if tensor.is_meta:
        raise InvalidWeights(name, "it has no content", "Give a tensor on a CPU or GPU")


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a parameter begins. Two names of one tensor have one place."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(tensors: Sequence[torch.Tensor] | Any) -> None:
    """Wait for the GPUs that have one of the tensors."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
