"""Module of one rank: a ...ForCausalLM of transformers that holds its part of the weights.

Owns the change of a module in place: smaller parameters, fewer heads, and an all-reduce after each
partial sum. Knows no files: `read` fills the parameters.

    meta module ─► layout ─► smaller parameters ─► memory ─► weights ─► hooks
    no memory                no memory             the device

    x ─ norm ─ q, k, v ─ attention ─ o ─► all-reduce ─ + x      own heads
      ─ norm ─ gate, up ─────────── down ─► all-reduce ─ + x    own rows

Always true: two all-reduces a layer, and none elsewhere. The module's own code runs unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge.models.hf.parallel.communicator import Communicator
from forge.models.hf.parallel.module_layout import ModuleLayout

HEAD_COUNTS = ("num_heads", "num_attention_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
HEAD_NAME = "lm_head.weight"


class WholeShapes(NamedTuple):
    """Shapes of a module before it was divided, in the order of its parameters.

    shapes    by name; a tied head has no entry
    is_tied   whether the head is the embedding
    """

    shapes: Mapping[str, tuple[int, ...]]
    is_tied: bool


def shrink_module(
    module: Any, layout: ModuleLayout, ties: Container[str], rank: int
) -> WholeShapes:
    """Replace each divided parameter of a meta module by an empty one of the rank's shape.

    ties   names of the parameters that are another one: the head, or none
    Return the shapes that the module had.
    """
    is_tied = HEAD_NAME in ties
    parameters = module.named_parameters(remove_duplicate=False)
    whole = {name: tuple(each.shape) for name, each in parameters if name not in ties}
    for name, part in layout.slices.items():
        owner_name, _, field = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        shape = part.shape(tuple(getattr(owner, field).shape))
        empty = torch.empty(shape, dtype=getattr(owner, field).dtype, device="meta")
        setattr(owner, field, nn.Parameter(empty, requires_grad=False))
        if field == "weight":
            owner.out_features, owner.in_features = shape
    for name in layout.first_only if rank else ():
        module.get_submodule(name.rpartition(".")[0]).bias = None
    for layer in module.base_model.layers:
        _set_heads(layer.self_attn, layout)
    return WholeShapes(whole, is_tied)


def _set_heads(attn: Any, layout: ModuleLayout) -> None:
    """Give an attention module the rank's number of heads, and a configuration that has it."""
    heads = layout.heads
    attn.config = copy.deepcopy(attn.config)
    for owner in (attn, attn.config):
        for names, count in ((HEAD_COUNTS, heads.num_heads), (KV_HEAD_COUNTS, heads.num_kv_heads)):
            for name in names:
                if name in vars(owner):
                    setattr(owner, name, count)
    attn.num_key_value_groups = heads.num_heads // heads.num_kv_heads


def fill_module(
    module: Any,
    whole: WholeShapes,
    layout: ModuleLayout,
    device: torch.device,
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
) -> None:
    """Allocate the module's parameters on the device and fill them, and its buffers.

    read   returns the rank's part of the named parameters, which belong to one submodule. Called
           in the order of the module. What it leaves out is initialised as by transformers
    """
    module.to_empty(device=device)
    parameters = dict(module.named_parameters())
    for names in _groups([name for name in whole.shapes if name in parameters]):
        found = read(names)
        for name in names:
            if name in found:
                parameters[name].data.copy_(found[name])
                parameters[name]._is_hf_initialized = True
            else:
                parameters[name].data.fill_(0.0 if name.endswith("bias") else 1.0)
    if whole.is_tied:
        embedding = module.get_input_embeddings().weight.data
        view = embedding[layout.vocab.first : layout.vocab.end]
        module.lm_head.weight = nn.Parameter(view, requires_grad=False)
        module.lm_head.weight._is_hf_initialized = True
    # Buffers that no checkpoint has, such as the frequencies of rotary positions.
    module.initialize_weights()


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Return the names in order, those of one layer or of another submodule together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:3]), []).append(name)
    return list(groups.values())


def add_all_reduces(module: Any, layout: ModuleLayout, communicator: Communicator) -> None:
    """Sum the outputs of the partial linear modules over the ranks, from now on."""

    def reduce(linear: nn.Module, args: object, output: Tensor) -> Tensor:
        return communicator.all_reduce(output)

    for name in layout.partial:
        module.get_submodule(name).register_forward_hook(reduce)
