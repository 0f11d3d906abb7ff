"""Checkpoint: what a folder says about a model, and the module that holds its weights.

Owns the checks of config.json, the choice of dtype and device, and loading. Knows no engine, KV
cache or attention; the name of the module's attention is an argument.

    name ─► folder ─► config.json ─► Checkpoint ─► load_module ─► torch.nn.Module
            local,    refused by     dtype, ends,   safetensors    eval, no gradients,
            cached    name           positions      or random      on the device

Always true: no pickle is read and no code of a checkpoint runs. A checkpoint that cannot work is
refused before its weights are read, by the cheapest check first.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Container, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError

from forge.errors import InvalidConfig, one_line
from forge.models.hf.loading.checkpoint_files import (
    DESCRIPTION_PATTERNS,
    SINGLE_FILE,
    WEIGHT_PATTERNS,
    check_descriptions,
    find_checkpoint_folder,
    open_tensors,
    read_json,
    refuse_model,
)
from forge.models.hf.loading.config_checks import refuse_sizes, refuse_unsupported
from forge.models.hf.loading.end_tokens import (
    DEFAULT_SUFFIX,
    EndToken,
    merge_end_tokens,
    parse_end_tokens,
)
from forge.models.hf.loading.tensor_plan import (
    TensorPlan,
    plan_random_tensors,
    plan_tensors,
    refuse_missing,
    refuse_shapes,
)
from forge.models.hf.progress import log_phase, show_progress, silence_transformers

log = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"

RANDOM_SEED = 0
RANDOM_STD = 0.02
"""Standard deviation of random weights: that of most models before training."""

GIB = 2**30


class CheckpointSummary(NamedTuple):
    """Fields of a checkpoint that are still needed when its weights are on a device.

    architecture   name of transformers' class for it
    """

    folder: Path
    architecture: str
    dtype: torch.dtype
    vocab_size: int


class Checkpoint(NamedTuple):
    """Checkpoint of a model that can be loaded.

    name            name in the request to open it
    folder          folder of its files
    config          its configuration, of transformers
    module_class    class of transformers that holds the weights
    dtype           dtype that the module computes in
    vocab_size      width of the logits
    ends            tokens that its files name as ends of an output, the preferred one first
    max_model_len   positions that the model was made for, or None where unknown
    """

    name: str
    folder: Path
    config: Any
    module_class: Any
    dtype: torch.dtype
    vocab_size: int
    ends: tuple[EndToken, ...]
    max_model_len: int | None

    def summary(self) -> CheckpointSummary:
        """Return what is still needed when the weights are loaded."""
        return CheckpointSummary(
            self.folder, self.module_class.__name__, self.dtype, self.vocab_size
        )

    def resolve_max_model_len(self, requested: int | None) -> int:
        """Return the longest sequence to serve: `requested`, or every position of the checkpoint.

        Raise InvalidConfig for more than the checkpoint has.
        """
        max_positions = self.max_model_len
        length = max_positions if requested is None else requested
        if length is None:
            raise InvalidConfig(
                "max_model_len", "the checkpoint does not say how long a context may be", "Give it"
            )
        if max_positions is not None and length > max_positions:
            raise InvalidConfig(
                "max_model_len",
                f"{length} is more than the {max_positions} positions of the checkpoint",
                f"Give at most {max_positions}",
            )
        return length


def select_device(name: str) -> torch.device:
    """Return the named device; `auto` is a GPU where there is one. Raise InvalidConfig."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "finds no GPU" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise InvalidConfig(
            "device", f"there is no cuda: torch {torch.__version__} {reason}", "Give cpu"
        )
    return torch.device("cuda", 0)  # Every thread's default; CUDA_VISIBLE_DEVICES selects it.


def open_checkpoint(
    name: str, device: torch.device, dtype: str = "auto", load_format: str = "auto"
) -> Checkpoint:
    """Return the named checkpoint, every file of it checked. Raise InvalidConfig.

    name    a folder, or a Hugging Face id, whose files are in the local cache after the call
    dtype   a dtype's name; `auto` is the checkpoint's, or one that suits the device
    """
    with silence_transformers():
        folder = find_checkpoint_folder(name, DESCRIPTION_PATTERNS)
        check_descriptions(folder)
        raw = read_json(folder, "config.json")
        config = _load_config(folder, raw)
        refuse_sizes(config)
        module_class = _find_module_class(config, raw)
        refuse_unsupported(config, module_class)
        torch_dtype = _select_dtype(config, dtype, device)
        generation = {}
        if (folder / "generation_config.json").exists():
            generation = read_json(folder, "generation_config.json")
        if load_format != "dummy":
            find_checkpoint_folder(name, WEIGHT_PATTERNS)
            open_tensors(folder)
        if (folder / ADAPTER_FILE).exists():
            log.warning("%s is not read: the model is served without the adapter", ADAPTER_FILE)
    config_origin = (
        "config.json" if "eos_token_id" in raw else type(config).__name__ + DEFAULT_SUFFIX
    )
    max_positions = getattr(config, "max_position_embeddings", None)
    return Checkpoint(
        name,
        folder,
        config,
        module_class,
        torch_dtype,
        int(config.vocab_size),
        merge_end_tokens(
            [
                *parse_end_tokens(generation.get("eos_token_id"), "generation_config.json"),
                *parse_end_tokens(getattr(config, "eos_token_id", None), config_origin),
            ]
        ),
        max_positions if type(max_positions) is int and max_positions > 0 else None,
    )


def _load_config(folder: Path, raw: dict[str, Any]) -> Any:
    """Return the configuration as transformers parses it."""
    for field in ("quantization_config", "compression_config"):
        quantization = raw.get(field)
        if quantization is None:
            continue
        if quantization == {}:
            refuse_model(
                f"{field} of {folder / 'config.json'} is empty",
                "Remove it if the weights are not quantised",
            )
        quant_method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        refuse_model(
            "quantised checkpoints are not served, and this one is "
            f"({quant_method or 'by an unnamed method'})",
            "Serve the checkpoint that it was made from",
        )
    if raw.get("transformers_weights") is not None:
        refuse_model(
            f"{folder / 'config.json'} names other files of weights (transformers_weights)",
            f"Rename them to {SINGLE_FILE} and remove the field",
        )
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        refuse_model(f"{folder / 'config.json'} names no model_type", "Fetch it again")
    if model_type not in transformers.CONFIG_MAPPING:
        auto_map = raw.get("auto_map")
        if auto_map:
            code = (
                ", ".join(map(str, auto_map.values())) if isinstance(auto_map, dict) else auto_map
            )
            refuse_model(
                f"model type {model_type!r} needs code of the checkpoint ({str(code)[:80]}), and "
                "no code "
                "of a checkpoint is run",
                "Serve a model that transformers knows",
            )
        refuse_model(
            f"transformers {transformers.__version__} knows no model type {model_type!r}",
            "Serve a model it knows, or install a later one",
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # Each of transformers' configs checks itself in its own way.
    except Exception as error:
        refuse_model(f"{folder / 'config.json'} is not understood: {one_line(error)}", "Fix it")


def _find_module_class(config: Any, raw: dict[str, Any]) -> Any:
    """Return the causal language model's class for this configuration."""
    model_type = config.model_type
    architectures = raw.get("architectures") or []
    architecture = (
        str(architectures[0])[:64]
        if isinstance(architectures, list) and architectures
        else model_type
    )
    if getattr(config, "is_encoder_decoder", False):
        refuse_model(f"{architecture} is an encoder and a decoder", "Serve a causal language model")
    for part in ("vision_config", "audio_config", "text_config"):
        if raw.get(part):
            refuse_model(
                f"{architecture} is not about text alone ({part})", "Serve a causal language model"
            )
    module_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    module_class = module_class[0] if isinstance(module_class, tuple) else module_class
    if module_class is None:
        refuse_model(
            f"{architecture} is no causal language model of transformers",
            "Serve one, such as Qwen3",
        )
    if architectures and module_class.__name__ not in architectures:
        refuse_model(
            f"{architecture} is no causal language model; for {model_type} that is "
            f"{module_class.__name__}",
            "Serve a checkpoint of that architecture",
        )
    return module_class


def _select_dtype(config: Any, name: str, device: torch.device) -> torch.dtype:
    """Return the named dtype; `auto` is the checkpoint's, or the device's where it names none."""
    dtypes = {each: getattr(torch, each) for each in ("float32", "float16", "bfloat16", "float64")}
    if name != "auto":
        if name not in dtypes:
            raise InvalidConfig("dtype", f"{name!r} is not known", f"Give {', '.join(dtypes)}")
        return dtypes[name]
    on_cpu = device.type == "cpu"
    dtype = getattr(config, "dtype", None)
    dtype = dtypes.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype is None:
        return torch.float32 if on_cpu else torch.bfloat16
    if dtype not in dtypes.values():
        raise InvalidConfig(
            "dtype", f"the checkpoint is in {dtype}, which is not supported", "Give bfloat16"
        )
    # A CPU has no float16 arithmetic: it is slow there, and some operations are missing.
    return torch.float32 if on_cpu and dtype == torch.float16 else dtype


def import_modelling() -> None:
    """Import transformers' code of models, which takes seconds."""
    import_module("transformers.models.auto.modeling_auto")
    import_module("transformers.modeling_utils")


def load_module(
    checkpoint: Checkpoint,
    device: torch.device,
    load_format: str = "auto",
    attn_implementation: str = "forge",
) -> torch.nn.Module:
    """Return the module with its weights, on the device, in eval mode and without gradients.

    load_format           auto reads the weights; dummy makes random ones, the same every time
    attn_implementation   a name in transformers' ALL_ATTENTION_FUNCTIONS

    Raise InvalidConfig where the weights do not match the config or take too much memory.
    """
    with silence_transformers():
        module = build_meta_module(checkpoint, attn_implementation)
        plan = plan_weights(checkpoint, module, load_format)
        size = weight_bytes(module, plan.ties)
        check_memory(size, device)
        if load_format == "dummy":
            module.to_empty(device=device)
            _init_random_weights(module, device)
        else:
            with log_phase(f"loading weights: {size / GIB:.1f} GiB"):
                module = _read_weights(checkpoint, plan, attn_implementation).to(device)
    module.requires_grad_(False)
    return module.eval()


def build_meta_module(checkpoint: Checkpoint, attention: str) -> Any:
    """Return the module with tensors that have a shape and no memory."""
    config = copy.deepcopy(checkpoint.config)
    try:
        with torch.device("meta"):
            return checkpoint.module_class._from_config(
                config, dtype=checkpoint.dtype, attn_implementation=attention
            )
    # Inconsistent sizes raise any error, somewhere in a layer's constructor.
    except Exception as error:
        architecture = checkpoint.module_class.__name__
        # The name of a function, such as an activation, that transformers has not.
        unknown = error.args[0] if isinstance(error, KeyError) else None
        for field in _fields_with(config.to_dict(), unknown):
            refuse_model(
                f"config.json has {field} {str(unknown)[:64]!r}, which transformers "
                f"{transformers.__version__} does not know for {architecture}",
                "Fix it",
            )
        refuse_model(
            f"{architecture} cannot be made of config.json: {one_line(error)}", "Fix its sizes"
        )


def _fields_with(values: Mapping[str, Any], text: object) -> Iterator[str]:
    """Yield the names of fields that are this text, those of inner objects with the outer name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _fields_with(value, text))
        elif isinstance(value, str) and value == text:
            yield name


def mean_layer_weights(module: Any) -> int:
    """Return the parameters of a layer, on average; embedding and head are no layers."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    # They may share one tensor.
    outside = {id(end.weight): end.weight.numel() for end in ends if end is not None}
    num_parameters = sum(tensor.numel() for tensor in module.parameters())
    num_layers = module.config.get_text_config().num_hidden_layers
    return int(num_parameters - sum(outside.values())) // num_layers


def plan_weights(checkpoint: Checkpoint, module: Any, load_format: str) -> TensorPlan:
    """Return what a meta module's weights are read from. Raise InvalidConfig.

    load_format   as in `load_module`
    """
    if load_format == "dummy":
        return plan_random_tensors(module)
    return plan_tensors(module, checkpoint.folder, open_tensors(checkpoint.folder))


def weight_bytes(module: Any, ties: Container[str]) -> int:
    """Return the bytes of a module's parameters.

    ties   names of those that are another one
    """
    parameters = module.named_parameters(remove_duplicate=False)
    return sum(each.numel() * each.element_size() for name, each in parameters if name not in ties)


def module_parameters(module: Any) -> dict[str, torch.Tensor]:
    """Return the module's weights by their names. Several names may be of one tensor."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: parameter.data for name, parameter in parameters}


def module_buffers(module: Any) -> dict[str, torch.Tensor]:
    """Return the floating buffers that a checkpoint has, by their names."""
    buffers = dict(module.named_buffers())
    return {
        name: buffers[name]
        for name in module.state_dict()
        if name in buffers and buffers[name].is_floating_point()
    }


def check_memory(needed_bytes: int, device: torch.device) -> None:
    """Raise InvalidConfig where the weights alone exceed the device's memory."""
    if device.type == "cuda":
        available_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        available_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > available_bytes:
        refuse_model(
            f"its weights take {needed_bytes / GIB:.1f} GiB, and {device.type} has "
            f"{available_bytes / GIB:.1f}",
            "Serve a smaller model, or one with a smaller --dtype",
        )


@torch.no_grad()
def _init_random_weights(module: Any, device: torch.device) -> None:
    """Fill matrices with random numbers, and the rest as transformers initializes it.

    One kernel for each matrix.
    """
    module.tie_weights()  # `to_empty` has untied them.
    generator = torch.Generator(device).manual_seed(RANDOM_SEED)
    parameters = list(module.named_parameters())
    with show_progress("initializing weights", len(parameters)) as advance:
        for name, tensor in parameters:
            if tensor.dim() > 1:
                tensor.normal_(0.0, RANDOM_STD, generator=generator)
                # transformers does not initialize a tensor that is marked like this.
                tensor._is_hf_initialized = True
            else:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            advance(1)
    # Norms and biases by each class's rules, and buffers that no checkpoint has, such as the
    # frequencies of rotary positions.
    module.initialize_weights()


def _read_weights(checkpoint: Checkpoint, plan: TensorPlan, attention: str) -> Any:
    """Return the module with the plan's weights, in host memory."""
    config = copy.deepcopy(checkpoint.config)
    folder, architecture = checkpoint.folder, checkpoint.module_class.__name__
    # Slices of open files: transformers reads each when it needs it, as from the files themselves.
    stored = {name: each.open_slice() for name, each in plan.stored_tensors().items()}
    try:
        module, report = checkpoint.module_class.from_pretrained(
            None,
            config=config,
            state_dict=stored,
            dtype=checkpoint.dtype,
            attn_implementation=attention,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # They are refused below, by name.
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        refuse_model(f"{folder} cannot be loaded: {one_line(error)}", "Fetch it again")
    # Of weights that transformers makes of several tensors, such as the experts of a layer.
    if report["mismatched_keys"]:
        refuse_shapes(folder, report["mismatched_keys"])
    if report["missing_keys"]:
        refuse_missing(folder, architecture, report["missing_keys"])
    return module
