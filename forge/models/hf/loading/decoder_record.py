"""DecoderRecord: what a start has found out about a checkpoint, for later starts on this machine.

Owns what a record depends on, and its file. A start with a record needs neither transformers' code
of the model, whose import takes seconds, nor the module, nor another comparison with it.

    first start   module ─► inspected ─► fused ─► compared ─► record ─► rebuilt from it: equal bits?
                                                                             └─ yes ─► file
    later start   the same key ─► file ─► record ─► the fused decoder, from the weights alone

    key    forge's sources, versions, device    config.json, tokenizer: contents
           dtype, positions, load format        weights: sizes, times of change, headers
           environment of kernels

Always true: a record is written only if the decoder that it describes has equal bits to the one
that was compared. A changed key is another record. So a decoder never changes with a record.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.binary_cache import (
    cache_folder,
    is_usable,
    is_writable,
    read_entry,
    remove_oldest,
    write_entry,
)
from forge.models.hf.loading.checkpoint_files import DESCRIPTION_PATTERNS
from forge.models.hf.loading.end_tokens import EndToken

DRIVER_VERSION = Path("/proc/driver/nvidia/version")

MAX_RECORDS = 64
"""Most records that are kept. One has some ten thousand bytes."""

SOURCES = Path(__file__).parents[1]
"""Folder of forge.models.hf: decoders, kernels, and this file."""

MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library reads."""

LIBRARIES = (
    *("cuda-bindings", "numpy", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc"),
    *("safetensors", "tokenizers", "torch", "transformers", "triton"),
    # AutoTokenizer chooses a class by these.
    *("mistral-common", "protobuf", "sentencepiece", "tiktoken"),
)
"""Distributions whose versions are in the key."""

VARIABLE_PREFIXES = (
    *("ATEN_", "CUBLAS", "DNNL_", "MKL_", "NVIDIA_TF32_", "ONEDNN_", "TORCH_", "TRITON_"),
)
"""Prefixes of environment variables that choose kernels, their compiler or their arithmetic."""

LIBRARY_FILES = (
    *("conversion_mapping.py", "core_model_loading.py", "modeling_rope_utils.py"),
    "models/auto/tokenization_auto.py",
)
"""Files of transformers that a record depends on, besides those of the module's classes."""

RecordKey = tuple[bytes, ...]


class DecoderRecord(NamedTuple):
    """A checkpoint that a fused decoder computes, and how that decoder is made of its weights.

    architecture     name of the module's class
    dtype            name of the decoder's dtype
    ends             tokens that files name as ends of an output, the preferred one first
    max_model_len    positions of the cosines and sines
    tokenizer_class  name of the tokenizer's class in transformers
    layers           arguments of each layer's attention
    layer_weights    parameters of a layer, on average
    weight_bytes     bytes of all parameters
    eps              constant of the norms
    inv_freq         angles per position, [rotated dimensions / 2]
    rope_scaling     factor of cosines and sines
    shapes           shape of each parameter, by its name
    embedding, norm, head   names of these parameters
    layer_names      names of the parameters that each weight of each layer is stacked of
    sources          digests of transformers' files that define the module, by their paths
    """

    architecture: str
    dtype: str
    vocab_size: int
    ends: list[EndToken]
    max_model_len: int
    tokenizer_class: str
    layers: list[LayerSpec]
    layer_weights: int
    weight_bytes: int
    eps: float
    inv_freq: list[float]
    rope_scaling: float
    shapes: dict[str, list[int]]
    embedding: str
    norm: str
    head: str
    layer_names: list[list[list[str]]]
    sources: dict[str, str]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the decoder."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def record_key(
    folder: Path,
    device: torch.device,
    *,
    dtype: str,
    load_format: str,
    max_model_len: int | None,
    versions: Mapping[str, str],
    sources: Path = SOURCES,
) -> RecordKey:
    """Return everything that a record of this folder depends on. Raise OSError for unread files.

    dtype, load_format, max_model_len   as the caller set them
    versions                            those of `library_versions`
    sources                             folder of the code that makes and reads records
    """
    return (
        f"{dtype} {load_format} {max_model_len}".encode(),
        _describe_device(device).encode(),
        *(f"{name} {version}".encode() for name, version in versions.items()),
        *_describe_environment(),
        *_digest_sources(sources),
        *_digest_descriptions(folder),
        *(() if load_format == "dummy" else _describe_weights(folder)),
    )


def read_record(key: RecordKey) -> DecoderRecord | None:
    """Return the record of this key, or None, also where transformers' files have changed."""
    folder = cache_folder("decoders")
    if folder is None or not is_usable(folder):
        return None
    content = read_entry(folder, key)
    record = None if content is None else decode_record(content)
    return record if record is not None and _is_current(record) else None


def may_write_record(key: RecordKey) -> bool:
    """Return whether a record can be written, and none is there or transformers' files changed."""
    folder = cache_folder("decoders")
    if folder is None or not is_usable(folder) or not is_writable(folder):
        return False
    content = read_entry(folder, key)
    if content is None:
        return True
    record = decode_record(content)
    return record is not None and not _is_current(record)


def _is_current(record: DecoderRecord) -> bool:
    """Return whether transformers' files are those that the record was made with."""
    return all(_digest_library_file(path) == digest for path, digest in record.sources.items())


def write_record(key: RecordKey, record: DecoderRecord | None) -> None:
    """Write the record. None: this checkpoint has none, and later starts need not try."""
    folder = cache_folder("decoders")
    if folder is not None and is_usable(folder):
        write_entry(folder, key, encode_record(record))
        remove_oldest(folder, MAX_RECORDS)


def encode_record(record: DecoderRecord | None) -> bytes:
    """Return the record as JSON, which has every float exactly."""
    return json.dumps(None if record is None else record._asdict()).encode()


def decode_record(content: bytes) -> DecoderRecord | None:
    """Return the record in JSON of this version of forge."""
    fields = json.loads(content)
    if fields is None:
        return None
    layers = [LayerSpec(*layer) for layer in fields["layers"]]
    ends = [EndToken(token, tuple(origins)) for token, origins in fields["ends"]]
    return DecoderRecord(**{**fields, "layers": layers, "ends": ends})


def find_sources(module: Any) -> dict[str, str]:
    """Return the digests of transformers' files that define the module and its configuration.

    Classes that these inherit from are included.
    """
    parts = [*module.modules(), module.config]
    owners = {owner for part in parts for owner in type(part).__mro__}
    root = Path(transformers.__file__).parent
    paths = {
        Path(file).relative_to(root).as_posix()
        for owner in owners
        if (file := getattr(sys.modules.get(owner.__module__), "__file__", None))
        and Path(file).is_relative_to(root)
    }
    digests = {name: _digest_library_file(name) for name in sorted({*paths, *LIBRARY_FILES})}
    return {name: digest for name, digest in digests.items() if digest}


def _digest_library_file(name: str) -> str:
    """Return the digest of a file of transformers, or "" where there is none."""
    try:
        return _digest((Path(transformers.__file__).parent / name).read_bytes()).hex()
    except OSError:
        return ""


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=32).digest()


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a decoder depends on, and of Python."""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "none"

    found = {name: version(name) for name in LIBRARIES}
    return {**found, "torch": torch.__version__, "python": platform.python_version()}


def _describe_device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    major, minor = torch.cuda.get_device_capability(device)
    driver = DRIVER_VERSION.read_text() if DRIVER_VERSION.exists() else "unknown"
    return f"cuda {torch.cuda.get_device_name(device)} {major}.{minor} {driver}"


def _digest_sources(folder: Path) -> Iterator[bytes]:
    """Yield names and digests of the folder's source files."""
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cu")]):
        yield path.relative_to(folder).as_posix().encode()
        yield _digest(path.read_bytes())


def _digest_descriptions(folder: Path) -> Iterator[bytes]:
    """Yield names and digests of the files that describe the model and its tokenizer."""
    for path in sorted({path for each in DESCRIPTION_PATTERNS for path in folder.glob(each)}):
        yield os.fsencode(path.name)
        yield _digest(path.read_bytes())


def _describe_environment() -> Iterator[bytes]:
    """Yield the environment variables of VARIABLE_PREFIXES, with their values."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLE_PREFIXES):
            yield os.fsencode(f"{name}={value}")


def _describe_weights(folder: Path) -> Iterator[bytes]:
    """Yield names, sizes, times of change and headers of the files with weights.

    A header has the name, dtype, shape and place of each tensor. No tensor is read. An index may
    name any of these files.
    """
    for path in sorted(folder.glob("*.safetensors")):
        status = path.stat()
        yield os.fsencode(f"{path.name} {status.st_size} {status.st_mtime_ns}")
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            yield _digest(file.read(min(header_bytes, MAX_HEADER_BYTES)))
