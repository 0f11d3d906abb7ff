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
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError

from forge.errors import InvalidConfig, one_line
from forge.models.hf.loading.checkpoint_files import (
    DESCRIPTION_PATTERNS,
    WEIGHT_PATTERNS,
    check_weights,
    find_checkpoint_folder,
    read_json,
    refuse_model,
)
from forge.models.hf.progress import log_phase, show_progress, silence_transformers

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that SamplingParams has too."""

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
GLOBAL_FIELDS = (
    *("vocab_size", "max_position_embeddings", "rope_parameters", "layer_types", "alibi"),
    *("attn_config", "position_embedding_type", "kv_lora_rank", "num_kv_shared_layers"),
    *("original_max_position_embeddings", "add_cross_attention"),
)
"""Fields that are read once for all layers, here and at the start."""

ATTENTION_SINK_TYPES = {
    *("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"),
}
"""Model types whose attention has a learned logit in addition to those of the keys."""

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

    name                name in the request to open it
    folder              folder of its files
    config              its configuration, of transformers
    module_class        class of transformers that holds the weights
    dtype               dtype that the module computes in
    vocab_size          width of the logits
    end_ids             tokens that end an output, the preferred one first; may be empty
    max_model_len       positions that the model was made for, or None where unknown
    sampling_defaults   fields of generation_config.json, under the names of SamplingParams
    """

    name: str
    folder: Path
    config: Any
    module_class: Any
    dtype: torch.dtype
    vocab_size: int
    end_ids: tuple[int, ...]
    max_model_len: int | None
    sampling_defaults: dict[str, float]

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
        raw = read_json(folder, "config.json")
        config = _load_config(folder, raw)
        module_class = _find_module_class(config, raw)
        refuse_unsupported(config, module_class)
        torch_dtype = _select_dtype(config, dtype, device)
        generation = {}
        if (folder / "generation_config.json").exists():
            generation = read_json(folder, "generation_config.json")
        if load_format != "dummy":
            find_checkpoint_folder(name, WEIGHT_PATTERNS)
            check_weights(folder)
    vocab_size = int(config.vocab_size)
    end_ids = (
        *_parse_token_ids(generation.get("eos_token_id")),
        *_parse_token_ids(getattr(config, "eos_token_id", None)),
    )
    max_positions = getattr(config, "max_position_embeddings", None)
    return Checkpoint(
        name,
        folder,
        config,
        module_class,
        torch_dtype,
        vocab_size,
        tuple(dict.fromkeys(end for end in end_ids if 0 <= end < vocab_size)),
        max_positions if type(max_positions) is int and max_positions > 0 else None,
        {
            key: generation[key]
            for key in SAMPLING_FIELDS
            if type(generation.get(key)) in (int, float)
        },
    )


def _load_config(folder: Path, raw: dict[str, Any]) -> Any:
    """Return the configuration as transformers parses it."""
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        quant_method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        refuse_model(
            "quantised checkpoints are not served, and this one is "
            f"({quant_method or 'by an unnamed method'})",
            "Serve the checkpoint that it was made from",
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


def refuse_unsupported(config: Any, module_class: Any) -> None:
    """Raise InvalidConfig where paged attention would compute something else than the module."""
    for field in GLOBAL_FIELDS:
        try:
            getattr(config, field, None)
        # transformers raises where each layer has its own value.
        except RuntimeError:
            refuse_model(
                f"{module_class.__name__} has a {field} for each layer, which is not supported",
                "Serve another model, such as a Llama or a Qwen3",
            )

    def has(field: str) -> bool:
        return bool(getattr(config, field, None))

    layer_types = set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS
    alibi = (
        config.model_type == "bloom"
        or has("alibi")
        or bool(getattr(getattr(config, "attn_config", None), "alibi", False))
    )
    relative = str(getattr(config, "position_embedding_type", "")).startswith("relative")
    unsupported = {
        # Even as decoders these count positions differently.
        "the layers of an encoder": (
            type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
            or config.model_type == "bert-generation"
        ),
        "layers that read another model": config.model_type.endswith("_assistant"),
        "layers with a state": getattr(module_class, "_is_stateful", False),
        f"layers of {', '.join(sorted(map(str, layer_types)))}": bool(layer_types),
        "latent attention (MLA)": has("kv_lora_rank"),
        "attention sinks": config.model_type in ATTENTION_SINK_TYPES,
        "ALiBi": alibi,
        "relative position biases": relative,
        "layers that share keys and values": has("num_kv_shared_layers"),
        "attention to another text": has("add_cross_attention"),
        "attention that does not go through transformers' interface": not (
            module_class.is_backend_compatible()
        ),
    }
    for feature, is_present in unsupported.items():
        if is_present:
            refuse_model(
                f"{module_class.__name__} has {feature}, which is not supported",
                "Serve another model, such as a Llama or a Qwen3",
            )


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


def _parse_token_ids(value: Any) -> tuple[int, ...]:
    """Return one id, several or none, from transformers' field."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(item for item in items if type(item) is int)


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
        size = weight_bytes(module)
        check_memory(size, device)
        if load_format == "dummy":
            module.to_empty(device=device)
            _init_random_weights(module, device)
        else:
            with log_phase(f"loading weights: {size / GIB:.1f} GiB"):
                module = _read_weights(checkpoint, attn_implementation).to(device)
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
        refuse_model(
            f"{checkpoint.module_class.__name__} cannot be made of config.json: {one_line(error)}",
            "Fix its sizes",
        )


def mean_layer_weights(module: Any) -> int:
    """Return the parameters of a layer, on average; embedding and head are no layers."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    # They may share one tensor.
    outside = {id(end.weight): end.weight.numel() for end in ends if end is not None}
    num_parameters = sum(tensor.numel() for tensor in module.parameters())
    num_layers = module.config.get_text_config().num_hidden_layers
    return int(num_parameters - sum(outside.values())) // num_layers


def weight_bytes(module: Any) -> int:
    """Return the bytes of a module's parameters."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


def module_parameters(module: Any) -> dict[str, torch.Tensor]:
    """Return the module's weights by their names. Several names may be of one tensor."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: parameter.data for name, parameter in parameters}


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


def _read_weights(checkpoint: Checkpoint, attention: str) -> Any:
    """Return the module with the folder's weights, in host memory."""
    config = copy.deepcopy(checkpoint.config)
    try:
        module, report = checkpoint.module_class.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=checkpoint.dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # They are refused below, by name.
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        refuse_model(f"{checkpoint.folder} cannot be loaded: {one_line(error)}", "Fetch it again")
    mismatches = [
        f"{name} is {_format_shape(found)}, not {_format_shape(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    if mismatches:
        refuse_model(
            f"weights of {checkpoint.folder} have other shapes than config.json says: "
            f"{_format_first(mismatches)}",
            "Take both from one model",
        )
    if report["missing_keys"]:
        refuse_model(
            f"{checkpoint.folder} lacks weights of {checkpoint.module_class.__name__}: "
            f"{_format_first(sorted(report['missing_keys']))}",
            "Fetch it again",
        )
    return module


def _format_shape(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _format_first(names: Sequence[str]) -> str:
    """Return up to three of the names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
