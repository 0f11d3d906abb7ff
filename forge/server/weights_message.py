"""WeightsMessage: an update of weights as a trainer sends it, checked before anything is opened.

Owns the fields and their bounds. Knows no socket and no model: names, shapes and dtypes of tensors
are compared with the model's by the model.

    {"key": ..., "weight_version": ..., "storages": [...], "tensors": [...]} ──► SharedWeights

Always true: every tensor lies within its storage, and no field is code.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from forge.errors import InvalidWeights
from forge.weight_versions import MAX_VERSION_CHARS
from forge.weights import CudaStorage, SharedMemory, SharedTensor, SharedWeights

MAX_TENSORS = 65_536
MAX_BYTES = 2**44
MAX_KEY_CHARS = 4096
MAX_ERRORS = 64
"""Wrong fields of a message, beyond which none is named: a description of each takes too long."""
DTYPE_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Name of a dtype -> bytes of an element."""

Size = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Hex = Annotated[str, Field(max_length=65_536, pattern=r"^([0-9a-f]{2})*$")]
"""Bytes as hexadecimal digits. A handle has a part for each segment of its memory."""

Parsed = TypeVar("Parsed", bound=BaseModel)


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _MemoryFields(_Fields):
    kind: Literal["memory"]
    num_bytes: Annotated[int, Field(gt=0, le=MAX_BYTES)]


class _CudaFields(_Fields):
    kind: Literal["cuda"]
    num_bytes: Annotated[int, Field(gt=0, le=MAX_BYTES)]
    offset_bytes: Size
    device_uuid: Annotated[str, Field(max_length=128)]
    handle: Hex
    ref_counter_handle: Hex
    ref_counter_offset: Size
    event_handle: Hex
    event_sync_required: bool


class _TensorFields(_Fields):
    name: Annotated[str, Field(min_length=1, max_length=1024)]
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    shape: Annotated[list[Size], Field(max_length=16), FailFast()]
    storage: Size
    offset: Size


Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]


class _KeyField(BaseModel):
    """The key of a message, whose other fields are parsed and not checked."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    key: Key


class WeightsMessage(_Fields):
    """The body of a message."""

    key: Key
    weight_version: Annotated[str, Field(max_length=MAX_VERSION_CHARS)] | None = None
    storages: Annotated[
        list[Annotated[_MemoryFields | _CudaFields, Field(discriminator="kind")]],
        Field(max_length=MAX_TENSORS),
        FailFast(),
    ]
    tensors: Annotated[list[_TensorFields], Field(max_length=MAX_TENSORS), FailFast()]

    def weights(self, memory_path: str | None, memory_bytes: int) -> SharedWeights:
        """Return the weights. Raises InvalidWeights for a tensor that is not in its storage.

        memory_path    path of the memory that came with the message; None: none came
        memory_bytes   its size
        """
        num_memories = sum(storage.kind == "memory" for storage in self.storages)
        if num_memories != (memory_path is not None):
            raise InvalidWeights(
                "storages",
                f"{num_memories} are memory, and {int(memory_path is not None)} descriptors came",
                "Send one descriptor for the one storage of kind memory",
            )
        storages: list[SharedMemory | CudaStorage] = []
        for storage in self.storages:
            if isinstance(storage, _CudaFields):
                storages.append(_cuda_storage(storage))
                continue
            if storage.num_bytes > memory_bytes:
                raise InvalidWeights(
                    "storages",
                    f"the memory has {memory_bytes} bytes, not {storage.num_bytes}",
                    "Write all of it before it is sent",
                )
            storages.append(SharedMemory(str(memory_path), storage.num_bytes))
        names = set[str]()
        for tensor in self.tensors:
            self._check_tensor(tensor)
            if tensor.name in names:
                raise InvalidWeights(tensor.name, "it comes twice", "Send it once")
            names.add(tensor.name)
        return SharedWeights(
            tuple(storages),
            tuple(
                SharedTensor(t.name, t.dtype, tuple(t.shape), t.storage, t.offset)
                for t in self.tensors
            ),
        )

    def _check_tensor(self, tensor: _TensorFields) -> None:
        if tensor.storage >= len(self.storages):
            raise InvalidWeights(
                tensor.name,
                f"there is no storage {tensor.storage} among {len(self.storages)}",
                "Give the index of one",
            )
        # torch multiplies the sizes of an empty tensor too.
        if prod(size or 1 for size in tensor.shape) > MAX_BYTES:
            raise InvalidWeights(
                tensor.name,
                f"its shape has more than {MAX_BYTES} elements without its sizes of 0",
                "Give that of the model's tensor",
            )
        size = DTYPE_SIZES[tensor.dtype]
        end = size * (tensor.offset + prod(tensor.shape))
        num_bytes = self.storages[tensor.storage].num_bytes
        if end > num_bytes:
            raise InvalidWeights(
                tensor.name,
                f"it ends at byte {end} of a storage of {num_bytes}",
                "Give its offset in elements",
            )


def _cuda_storage(fields: _CudaFields) -> CudaStorage:
    return CudaStorage(
        fields.num_bytes,
        fields.offset_bytes,
        fields.device_uuid,
        bytes.fromhex(fields.handle),
        bytes.fromhex(fields.ref_counter_handle),
        fields.ref_counter_offset,
        bytes.fromhex(fields.event_handle),
        fields.event_sync_required,
    )


def parse_key(text: bytes) -> str:
    """Return the key of a message. Raises InvalidWeights where it has none.

    Nothing else is checked: a message without the right key costs no more than its parsing.
    """
    return _parse(_KeyField, text).key


def parse_message(text: bytes) -> WeightsMessage:
    """Return the message. Raises InvalidWeights with the place of what is wrong."""
    return _parse(WeightsMessage, text)


def _parse(model: type[Parsed], text: bytes) -> Parsed:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            raise InvalidWeights(
                "message",
                f"{error.error_count()} fields are wrong or unknown",
                "Send it with forge.weights_client",
            ) from None
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "message"
        raise InvalidWeights(
            place[:160], first["msg"][:160], "Send it with forge.weights_client"
        ) from None
