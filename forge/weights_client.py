"""send_weights: tensors of a trainer to a server of the same machine and user, without a file.

Owns the trainer's side of a message; forge.server.weights_socket has the other. Needs torch.
Nothing is pickled.

    CPU tensors ──► one memory file, sealed ──► its descriptor ┐
    GPU tensors ──► CUDA IPC: handles of their storages        ├──► --weights-socket ──► the engine
    names, dtypes, shapes, offsets ────────────────────────────┘    copies them in place

Always true: the tensors are read until the response, and stay as they are here.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from forge.errors import InvalidWeights, RequestFailed

_LENGTH = struct.Struct(">Q")
_ALIGNMENT = 16
"""Tensors of a memory file begin at multiples of this: more than any element has bytes."""


def send_weights(
    path: str,
    admin_key: str,
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    version: str | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Replace weights of the server that listens at `path`, and return its response.

    It follows when every later token is of the new weights. All tensors or some may be given, by
    their names in the checkpoint; those of a GPU are copied from there.

    version     name of the weights in later outputs; None: the next number
    timeout_s   longest wait for the server to read, or to respond. The update may be carried out
                later all the same
    Raises InvalidWeights for a value that cannot be sent as a tensor and for a repeated name,
    RequestFailed where the server refuses the update, TimeoutError after `timeout_s`, and OSError
    where the server cannot be reached.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    named: dict[str, Any] = {}
    for name, tensor in pairs:
        if name in named:
            raise InvalidWeights(str(name)[:160], "it comes twice", "Send it once")
        named[name] = tensor
    with ExitStack() as exit_stack:
        message: dict[str, Any] = {"key": admin_key, "weight_version": version}
        exported = _export(named, exit_stack)
        message |= {"storages": exported.storages, "tensors": exported.entries}
        text = json.dumps(message).encode()
        connection = exit_stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(timeout_s)
        connection.connect(path)
        with suppress(BrokenPipeError):  # a refusal may come before the end of the message
            socket.send_fds(connection, [_LENGTH.pack(len(text))], exported.descriptors)
            connection.sendall(text)
        response: dict[str, Any] = json.loads(_read_message(connection))
        del exported  # until here the server may read the tensors
    if "error" in response:
        raise RequestFailed(response["error"]["message"])
    return response


def _read_message(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        head = file.read(_LENGTH.size)
        text = file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not text:
        raise RequestFailed("the server has closed the socket without a response")
    return text


class _Export(NamedTuple):
    """Fields of a message, its descriptors, and the GPU tensors that its storages belong to."""

    storages: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    descriptors: list[int]
    gpu_tensors: list[Any]


def _export(tensors: Mapping[str, Any], exit_stack: ExitStack) -> _Export:
    """Return what the server needs to read the tensors.

    The descriptors are closed with `exit_stack`.
    """
    import torch

    storages: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    on_cpu: dict[str, torch.Tensor] = {}
    indices: dict[int, int] = {}  # address of a storage on a GPU -> its index
    gpu_tensors: list[torch.Tensor] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidWeights(str(name)[:160], "it is no tensor", "Give a torch.Tensor")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise InvalidWeights(
                str(name)[:160], "it is sparse, or has no memory", "Give a dense tensor with values"
            )
        tensor = tensor.detach().contiguous()
        if not tensor.is_cuda or not tensor.numel():  # CUDA exports no empty storage
            on_cpu[name] = tensor.cpu()
            continue
        gpu_tensors.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in indices:
            indices[storage.data_ptr()] = len(storages)
            torch.cuda.synchronize(tensor.device)
            storages.append(_cuda_storage(tensor))
        index = indices[storage.data_ptr()]
        entries.append(_entry(name, tensor, index, tensor.storage_offset()))
    descriptors = []
    if on_cpu:
        storage_index = len(storages)
        descriptor, num_bytes, offsets = _write_memory(on_cpu)
        exit_stack.callback(os.close, descriptor)
        descriptors.append(descriptor)
        storages.append({"kind": "memory", "num_bytes": num_bytes})
        for name, tensor in on_cpu.items():
            entries.append(_entry(name, tensor, storage_index, offsets[name]))
    return _Export(storages, entries, descriptors, gpu_tensors)


def _entry(name: str, tensor: Any, storage: int, offset: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = list(tensor.shape)
    return {"name": name, "dtype": dtype, "shape": shape, "storage": storage, "offset": offset}


def _cuda_storage(tensor: Any) -> dict[str, Any]:
    """Return the fields of the tensor's storage, as CUDA IPC exports it."""
    import torch

    _, handle, num_bytes, offset_bytes, counter, counter_offset, event, is_required = (
        tensor.untyped_storage()._share_cuda_()
    )
    return {
        "kind": "cuda",
        "num_bytes": num_bytes,
        "offset_bytes": offset_bytes,
        "device_uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
        "handle": handle.hex(),
        "ref_counter_handle": counter.hex(),
        "ref_counter_offset": counter_offset,
        "event_handle": event.hex(),
        "event_sync_required": is_required,
    }


def _write_memory(tensors: Mapping[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Write the tensors to a memory file; return its descriptor, size, and each one's offset.

    Offsets are in elements.
    """
    import torch

    starts: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        starts[name] = num_bytes
        num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    num_bytes = max(num_bytes, _ALIGNMENT)  # no file of 0 bytes can be mapped
    descriptor = os.memfd_create("forge-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        buffer = mmap.mmap(descriptor, num_bytes)
        for name, tensor in tensors.items():
            if tensor.numel():
                count, start = tensor.numel(), starts[name]
                target = torch.frombuffer(buffer, dtype=tensor.dtype, count=count, offset=start)
                target.copy_(tensor.reshape(-1))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, num_bytes, {n: start // tensors[n].itemsize for n, start in starts.items()}
