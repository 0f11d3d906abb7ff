"""TensorPlan: which stored tensor each weight of a module is read from, and what is refused.

Owns the one rule of every loader: one device, ranks, drafts and the record of a start. It reads
names, dtypes and shapes; of contents only a head and an embedding that may be equal.

    stored names ─► renamed ─► weights of the module ─► ties ─► TensorPlan
                    by transformers     quantised, unused, missing, other shapes: refused by name

    config ties   files have         head is
    yes           embedding          the embedding
    yes           head               the embedding, read from the head
    yes           both, equal        the embedding
    yes, no       both, different    a weight of its own
    no            embedding          missing: refused

Always true: this is what transformers 5.17 and later load (`PreTrainedModel.tie_weights`), or it is
refused. A weight of the module is in `tensors`, `converted` or `ties`, and in one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge.models.hf.loading.checkpoint_files import StoredTensor, refuse_model
from forge.models.hf.weight_names import module_weight_names

FLOAT_DTYPES = {"BF16", "F16", "F32", "F64"}
"""safetensors' names of dtypes that hold a weight as it is."""

QUANTIZATION_PATTERN = (
    r"(_scale_inv|[._](weight|input|output|[qkv])_(scale|zero_point|packed)|_blocks|[._]scales"
    r"|\.(qweight|qzeros|g_idx)|absmax|quant_map)$"
)
"""Ends of names of quantised weights and of their factors: fp8, GPTQ, AWQ, MXFP4, bitsandbytes."""

COMPARED_ROWS = 4096
"""Rows of two tensors that are in memory while they are compared."""


class TensorPlan(NamedTuple):
    """Stored tensors of a module's weights.

    tensors     of each weight that is one tensor, by the weight's name
    converted   stored tensors, by their own names, that transformers makes other weights of
    ties        name of the weight that another one is, by the name of the latter
    """

    tensors: Mapping[str, StoredTensor]
    converted: Mapping[str, StoredTensor]
    ties: Mapping[str, str]

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor that is read, by its name in the files."""
        return {each.name: each for each in self.tensors.values()} | dict(self.converted)


def plan_random_tensors(module: Any) -> TensorPlan:
    """Return the plan of random weights: nothing is read, and the configuration decides ties."""
    return TensorPlan({}, {}, dict(module.all_tied_weights_keys))


def plan_tensors(module: Any, folder: Path, stored: Mapping[str, StoredTensor]) -> TensorPlan:
    """Return which of the folder's tensors a meta module is read from. Raise InvalidConfig."""
    architecture, weights = type(module).__name__, module.state_dict()
    matched = _match_names(module, folder, stored)
    tensors = matched.tensors
    if matched.quantised:
        refuse_model(
            f"{folder} has quantised weights ({format_first(matched.quantised)}), and its "
            "config.json has no quantization_config",
            "Serve the checkpoint that it was made from",
        )
    _refuse_other_shapes(folder, tensors, weights)
    ties = _find_ties(module.all_tied_weights_keys, tensors, weights)
    found = {*tensors, *matched.made, *(name for name in ties if ties[name] in tensors)}
    optional = list(module._keys_to_ignore_on_load_missing or ())
    missing = [
        name
        for name in weights
        if name not in found and not any(re.search(pattern, name) for pattern in optional)
    ]
    if missing:
        could_tie = set(module._tied_weights_keys or ()) - set(ties)
        refuse_missing(folder, architecture, missing, could_tie, sorted(matched.unused))
    if matched.unused:
        refuse_model(
            f"{folder} has weights that {architecture} with its config.json does not use: "
            f"{format_first(sorted(matched.unused))}",
            "Take both from one model, or remove these weights",
        )
    return TensorPlan(tensors, matched.converted, ties)


class MatchedNames(NamedTuple):
    """Stored tensors by what their names are.

    tensors, converted   as in TensorPlan, before ties
    made                 names of weights that transformers makes of those in `converted`
    unused               stored names of no weight that are not harmless
    quantised            stored names that only a quantised checkpoint has
    """

    tensors: dict[str, StoredTensor]
    converted: dict[str, StoredTensor]
    made: set[str]
    unused: list[str]
    quantised: list[str]


def _match_names(module: Any, folder: Path, stored: Mapping[str, StoredTensor]) -> MatchedNames:
    """Return what each stored tensor is, as transformers renames it. Raise InvalidConfig."""
    # Not with the file's imports: this brings the modelling code, which some starts do not need.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    weights, names = module.state_dict(), module_weight_names(module)
    conversions = get_model_conversion_mapping(module)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
    targets = {key: each.target_patterns for each in converters for key in each.source_patterns}
    matched = MatchedNames({}, {}, set(), [], [])
    for name, tensor in stored.items():
        renamed, pattern = rename_source_key(name, renamings, converters)
        weight = names.find(renamed)
        if weight is None and (weight := names.find(name)) is not None:
            pattern = None
        if weight is None:
            if not names.is_harmless(renamed, tensor.shape):
                is_quantised = re.search(QUANTIZATION_PATTERN, name)
                (matched.quantised if is_quantised else matched.unused).append(name)
        elif weights[weight].is_floating_point() and tensor.dtype not in FLOAT_DTYPES:
            matched.quantised.append(f"{name} is {tensor.dtype}")
        elif pattern is not None:
            matched.converted[name] = tensor
            first, *others = targets[pattern]
            matched.made.update((weight, *(weight.replace(first, each) for each in others)))
        elif weight in matched.tensors:
            refuse_model(
                f"{folder} has {matched.tensors[weight].name} and {name}, which are one weight",
                "Remove one of them",
            )
        else:
            matched.tensors[weight] = tensor
    return matched


def _refuse_other_shapes(
    folder: Path, tensors: Mapping[str, StoredTensor], weights: Mapping[str, torch.Tensor]
) -> None:
    mismatches = [
        (name, tensor.shape, tuple(weights[name].shape))
        for name, tensor in tensors.items()
        if tensor.shape != tuple(weights[name].shape)
    ]
    if mismatches:
        refuse_shapes(folder, mismatches)


def _find_ties(
    tied: Mapping[str, str],
    tensors: dict[str, StoredTensor],
    weights: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Return which of the weights that the configuration ties are one by the files too.

    tied      the configuration's ties, in the form of TensorPlan.ties
    tensors   changed: a tied weight is read once, under the name that it is tied to
    """
    ties: dict[str, str] = {}
    for target, source in tied.items():
        if target in tensors and source in tensors:
            if not _have_equal_content(tensors[target], tensors[source], weights[source].dtype):
                continue
            del tensors[target]
        elif target in tensors:
            tensors[source] = tensors.pop(target)
        ties[target] = source
    return ties


def _have_equal_content(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal in the dtype that both are loaded in."""
    slices = (one.open_slice(), other.open_slice())
    for start in range(0, one.shape[0], COMPARED_ROWS):
        a, b = (each[start : start + COMPARED_ROWS].to(dtype) for each in slices)
        if not torch.equal(a, b):
            return False
    return True


def refuse_shapes(
    folder: Path, mismatches: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Raise InvalidConfig about weights: name, shape in the files, shape by config.json."""
    found = [
        f"{name} is {_format_shape(stored)}, not {_format_shape(expected)}"
        for name, stored, expected in sorted(mismatches)
    ]
    refuse_model(
        f"weights of {folder} have other shapes than config.json says: {format_first(found)}",
        "Take both from one model",
    )


def refuse_missing(
    folder: Path,
    architecture: str,
    missing: Iterable[str],
    could_tie: Iterable[str] = (),
    unused: Sequence[str] = (),
) -> None:
    """Raise InvalidConfig about weights that no file has.

    could_tie   weights that would be others, if config.json tied them
    unused      tensors of no weight: the missing ones, perhaps, by the names of a wrapped module
    """
    names = sorted(missing)
    remedy = "Fetch it again"
    if unused:
        remedy = (
            f"It has {format_first(unused)}, which have no use: save it by the names of "
            f"{architecture}, or fetch it again"
        )
    if set(names) <= set(could_tie):
        remedy = (
            "Set tie_word_embeddings to true in config.json if the head is the embedding, or fetch "
            "it again"
        )
    refuse_model(f"{folder} lacks weights of {architecture}: {format_first(names)}", remedy)


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def format_first(names: Sequence[str]) -> str:
    """Return up to three of the names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
