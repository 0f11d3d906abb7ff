"""A fused decoder made of a DecoderRecord and the weights of its checkpoint, without a module.

Owns the readers of weights and the order of their tensors. Knows no key and no file of records.

    files    model.layers.3.self_attn.q_proj.weight ┐
             model.layers.3.self_attn.k_proj.weight ├─► stacked, on the device ─► FusedDecoder
             model.layers.3.self_attn.v_proj.weight ┘
    dummy    the same random numbers, in the order of the module's parameters

Always true: `create_record` returns a record only if each tensor that is read by it has equal bits
to the tensor of the decoder that it was made from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from forge.errors import InvalidConfig, one_line
from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.decoders.fused_decoder import FusedDecoder, gate_up_names, qkv_names
from forge.models.hf.loading.checkpoint import GIB, RANDOM_SEED, RANDOM_STD, mean_layer_weights
from forge.models.hf.loading.checkpoint_files import open_tensors
from forge.models.hf.loading.decoder_record import DecoderRecord, find_sources
from forge.models.hf.loading.end_tokens import EndToken
from forge.models.hf.progress import log_phase, show_bar, show_progress
from forge.models.hf.weight_names import WeightNames
from forge.models.hf.weights import ModelWeights

log = logging.getLogger("forge.start")

HEAD_NAME = "lm_head.weight"
"""Name of the head that `create_record` reads. A tied one has the name of the embedding too."""

NUM_READ_THREADS = 8
"""Threads that copy the weights of one layer to the device."""


class WeightReader(Protocol):
    """Source of weights, on the device and in the record's dtype."""

    def read(self, parts: Sequence[Sequence[str]]) -> list[torch.Tensor | None]:
        """Return the parameters of each part, stacked; None for a part without names."""


class FileReader:
    """Weights of the folder's safetensors files. Raises KeyError for a name that none has."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, executor: Executor
    ) -> None:
        self._device, self._dtype, self._executor = device, dtype, executor
        self._tensors = open_tensors(folder)

    def read(self, parts: Sequence[Sequence[str]]) -> list[torch.Tensor | None]:
        """Return the parameters of each part, stacked; None for a part without names."""
        names = [name for part in parts for name in part]
        found = dict(zip(names, self._executor.map(self._read_one, names), strict=True))
        return [_stack([found[name] for name in part]) for part in parts]

    def _read_one(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[name].read()
        # A tensor on the CPU would otherwise be the file itself, which may change.
        return tensor.to(self._device, self._dtype, copy=True)


class RandomReader:
    """The random weights of `load_module`, if the layers are read in the module's order."""

    def __init__(self, record: DecoderRecord, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = record.shapes, record.torch_dtype, device
        self._generator = torch.Generator(device).manual_seed(RANDOM_SEED)

    def read(self, parts: Sequence[Sequence[str]]) -> list[torch.Tensor | None]:
        """Return the parameters of each part, stacked; None for a part without names."""
        wanted = {name for part in parts for name in part}
        # Each draw depends on those before it. The shapes are in the order of the module.
        found = {name: self._draw(name) for name in self._shapes if name in wanted}
        return [_stack([found[name] for name in part]) for part in parts]

    def _draw(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if tensor.dim() > 1:
            return tensor.normal_(0.0, RANDOM_STD, generator=self._generator)
        return tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    return torch.cat(tensors)


@contextmanager
def show_reading(record: DecoderRecord, load_format: str) -> Iterator[Callable[[int], object]]:
    """Show the reading of weights as a start without a record does.

    Yield a function that takes the number of parameters read since its last call.
    """
    num_parameters = len(record.shapes)
    if load_format == "dummy":
        with show_progress("initializing weights", num_parameters) as advance:
            yield advance
    else:
        with (
            log_phase(f"loading weights: {record.weight_bytes / GIB:.1f} GiB"),
            show_bar("Loading weights", num_parameters) as advance,
        ):
            yield advance


@contextmanager
def open_reader(
    record: DecoderRecord, folder: Path, load_format: str, device: torch.device
) -> Iterator[WeightReader]:
    """Yield a reader of the checkpoint's weights, or of random ones for `dummy`."""
    if load_format == "dummy":
        yield RandomReader(record, device)
        return
    with ThreadPoolExecutor(NUM_READ_THREADS) as executor:
        yield FileReader(folder, device, record.torch_dtype, executor)


def recorded_tensors(
    record: DecoderRecord,
    reader: WeightReader,
    device: torch.device,
    advance: Callable[[int], object],
) -> Iterator[torch.Tensor | None]:
    """Yield the tensors of the record's decoder, in the order of `FusedDecoder.tensors`.

    advance   called with the number of parameters read since its last call
    """

    def read(parts: Sequence[Sequence[str]]) -> list[torch.Tensor | None]:
        tensors = reader.read(parts)
        advance(sum(map(len, parts)))
        return tensors

    (embedding,) = read([[record.embedding]])
    yield embedding
    yield from _cos_sin(record, device)
    for parts in record.layer_names:
        yield from read(parts)
    yield from read([[record.norm]])
    if record.head == record.embedding:
        yield embedding
    else:
        yield from read([[record.head]])


def recorded_weights(record: DecoderRecord, decoder: FusedDecoder) -> ModelWeights:
    """Return the weights of the record's decoder, as views of its tensors."""
    parts = [[record.embedding], [], []]
    parts += [part for layer in record.layer_names for part in layer]
    parts += [[record.norm], [record.head]]
    parameters: dict[str, torch.Tensor] = {}
    for names, tensor in zip(parts, decoder.tensors(), strict=True):
        if tensor is not None and names:
            sizes = [record.shapes[name][0] for name in names]
            parameters |= zip(names, tensor.split_with_sizes(sizes), strict=True)
    if record.head == record.embedding:
        parameters[HEAD_NAME] = parameters[record.embedding]
    prefix = record.embedding.removesuffix(".embed_tokens.weight")
    return ModelWeights(parameters, WeightNames(parameters, prefix))


def _cos_sin(record: DecoderRecord, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield cosines and sines of every position, [positions, rotated], rounded as by the module."""
    dtype = torch.promote_types(record.torch_dtype, torch.float32)
    positions = torch.arange(record.max_model_len, device=device).float()
    inv_freq = torch.tensor(record.inv_freq, dtype=torch.float32, device=device)
    angles = torch.cat([positions[:, None] * inv_freq] * 2, dim=-1)
    yield (angles.cos() * record.rope_scaling).to(dtype)
    yield (angles.sin() * record.rope_scaling).to(dtype)


def create_record(
    module: Any,
    fused: FusedDecoder,
    layers: Sequence[LayerSpec],
    folder: Path,
    load_format: str,
    *,
    ends: Sequence[EndToken],
    vocab_size: int,
    tokenizer_class: str,
) -> DecoderRecord | None:
    """Return the record of a decoder that was compared with its module.

    None where the decoder that is rebuilt from the record has another bit anywhere. All weights are
    read a second time, a layer at a time.
    """
    rotary = module.base_model.rotary_emb
    inv_freq, scaling = getattr(rotary, "inv_freq", None), getattr(rotary, "attention_scaling", 1.0)
    if not isinstance(inv_freq, torch.Tensor) or not isinstance(scaling, float | int):
        return None
    cos = list(fused.tensors())[1]
    assert cos is not None, "every fused decoder has cosines"
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}

    def name_of(part: Any, parameter: str = "weight") -> list[str]:
        found = getattr(part, parameter, None)
        return [] if found is None else [names[id(found)]]

    base = module.base_model
    record = DecoderRecord(
        architecture=type(module).__name__,
        dtype=str(fused.dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        ends=list(ends),
        max_model_len=len(cos),
        tokenizer_class=tokenizer_class,
        layers=list(layers),
        layer_weights=mean_layer_weights(module),
        weight_bytes=sum(each.numel() * each.element_size() for each in parameters.values()),
        eps=fused.eps,
        inv_freq=inv_freq.float().tolist(),
        rope_scaling=float(scaling),
        shapes={name: list(parameter.shape) for name, parameter in parameters.items()},
        embedding=name_of(base.embed_tokens)[0],
        norm=name_of(base.norm)[0],
        head=name_of(module.lm_head)[0],
        layer_names=[_layer_names(layer, name_of) for layer in base.layers],
        sources=find_sources(module),
    )
    return record if _rebuilds(record, fused, folder, load_format) else None


def _layer_names(layer: Any, name_of: Any) -> list[list[str]]:
    """Return the names of the parameters in each field of LayerWeights, in their order."""
    attn, mlp = layer.self_attn, layer.mlp
    inputs = [getattr(attn, name) for name in qkv_names(attn)]
    gates = [getattr(mlp, name) for name in gate_up_names(mlp)]
    return [
        name_of(layer.input_layernorm),
        [name for part in inputs for name in name_of(part)],
        [name for part in inputs for name in name_of(part, "bias")],
        name_of(getattr(attn, "q_norm", None)),
        name_of(getattr(attn, "k_norm", None)),
        name_of(attn.o_proj),
        name_of(attn.o_proj, "bias"),
        name_of(layer.post_attention_layernorm),
        [name for part in gates for name in name_of(part)],
        name_of(mlp.down_proj),
    ]


def _rebuilds(record: DecoderRecord, fused: FusedDecoder, folder: Path, load_format: str) -> bool:
    """Return whether the record gives every tensor of the decoder, to the last bit.

    Whatever keeps it from being rebuilt, the compared decoder serves.
    """
    try:
        with (
            show_bar("Checking the record", len(record.shapes)) as advance,
            open_reader(record, folder, load_format, fused.device) as reader,
        ):
            rebuilt = recorded_tensors(record, reader, fused.device, advance)
            return all(
                _have_equal_bits(a, b) for a, b in zip(rebuilt, fused.tensors(), strict=True)
            )
    except KeyError:
        return False  # transformers has read this weight from another name.
    # Files that changed since they were loaded, or a GPU without memory for two layers more.
    except (InvalidConfig, OSError, RuntimeError, SafetensorError) as error:
        log.info("this start is not recorded: %s", one_line(error))
        return False


def _have_equal_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.shape == b.shape
        and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())
    )
