"""CompiledDecoder: a model's own modules, each layer through torch.compile.

Owns the compilation: what is compiled, how often, and what the compiler does not trace. Knows no
plan, no sampling and no graph of a step.

    embedding     layer 0    layer 1    ...    layer 27     norm, head
    as it is    └── two graphs: one token, any other ──┘    as they are

    a graph      norm, q, k, v, rotation ─► forge::paged_attention ─► o, sums, norm, MLP
                                            opaque: the step's own KV cache and kernels

All layers run through one function whose input is the layer, so one graph serves every layer of the
same structure. Attention is an opaque operator. An operator takes tensors and no objects, so it
finds its step through an integer.

Always true: nothing falls back to plain Python. A layer that is not one graph is refused, and so is
a layer whose graphs fit only some numbers of tokens. A later compilation is a warning in the log.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import nn

from forge.errors import InvalidConfig
from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, QKNormRope
from forge.models.hf.decoders.interface import (
    ALL_TOKENS,
    ForwardContext,
    OpaqueContext,
    TokenSelection,
)
from forge.models.hf.decoders.module_decoder import ModuleDecoder
from forge.models.hf.kv_cache import KVCache, KVCacheSpec

log = logging.getLogger(__name__)

CompileBackend: TypeAlias = str | Callable[[Any, list[Any]], Callable[..., Any]]
"""Backend of torch.compile: a name that torch knows, or a function of a graph and its inputs."""

INDUCTOR = "inductor"
"""torch's own backend: C++ on a CPU, Triton on a GPU."""

MAIN_TOKEN_COUNTS = (37, 1)
"""Numbers of tokens that graphs are compiled for.

37 stands for all but 1. It equals no other size of a model: the compiler merges equal sizes.
"""

EXTRA_TOKEN_COUNTS = (2, 8, 64, 256)
"""Numbers of tokens that the compiler may still specialise for."""

CHECK_TOKEN_COUNTS = (131, 3, 2, 1)
"""Numbers of tokens for which nothing may be compiled after the warm-up."""

MAX_COMPILED_GRAPHS = 64
"""Most graphs of one model: two for each of 32 kinds of layers."""

MAX_ERROR_CHARS = 200
"""Characters of a compiler's message in a refusal."""


class _ZeroAttention:
    """Attention of warm-up steps: its outputs are zeros."""

    def plan(self, metadata: AttentionMetadata) -> None:
        pass

    def attend(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros_like(queries)

    def attend_qkv(self, layer_index: int, qkv: torch.Tensor, rope: QKNormRope) -> None:
        return None


class ContextHolder:
    """Holder of the current step's context while layers run."""

    def __init__(self) -> None:
        self.context: ForwardContext | None = None


_HOLDERS: WeakValueDictionary[int, ContextHolder] = WeakValueDictionary()
"""Holders by id. The operator is global to the process, so it finds its decoder's step here."""


def _paged_attention_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context_key: torch.Tensor
) -> torch.Tensor:
    """Write keys and values to their blocks and return the layer's outputs.

    query, key, value   [tokens, heads, head_dim]
    context_key         [2] int64 on the host; id of the ContextHolder, index of the layer
    """
    holder_id, layer_index = context_key.tolist()
    context = _HOLDERS[holder_id].context
    assert context is not None, f"layer {layer_index} attends outside of a step"
    context.kv_cache.write(layer_index, key, value, context.slot_mapping)
    return context.attention.attend(layer_index, query.contiguous(), key, value).contiguous()


def _paged_attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context_key: torch.Tensor
) -> torch.Tensor:
    return query.new_empty(query.shape)


# The KV cache is no argument: no compiled graph reads it, and the operator's output is always used.
torch.library.custom_op(
    "forge::paged_attention", _paged_attention_op, mutates_args=()
).register_fake(_paged_attention_fake)
_PAGED_ATTENTION: Callable[..., torch.Tensor] = torch.ops.forge.paged_attention.default


class CountingBackend:
    """Backend of torch.compile that counts its graphs.

    num_graphs   graphs compiled so far
    is_warm      True once every step is expected to have its graph
    """

    def __init__(self, backend: CompileBackend) -> None:
        self._backend = backend
        self.num_graphs = 0
        self.is_warm = False

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Return the compiled graph."""
        from torch._dynamo.backends.registry import lookup_backend

        if self.is_warm:
            log.warning("a layer is compiled after the start; requests wait for it")
        compiled_graph: Callable[..., Any] = lookup_backend(self._backend)(graph, inputs)
        self.num_graphs += 1
        return compiled_graph


class CompiledLayer(nn.Module):
    """Stand-in for a layer that runs it through `compiled_run`."""

    def __init__(
        self, layer: nn.Module, compiled_run: Callable[..., Any], context_key: torch.Tensor
    ) -> None:
        super().__init__()
        self.layer = layer
        self.compiled_run = compiled_run
        self.context_key = context_key

    def forward(self, *args: Any, paged: ForwardContext, **others: Any) -> Any:
        """Return the layer's output."""
        return self.compiled_run(
            self.layer, *args, paged=OpaqueContext(_PAGED_ATTENTION, self.context_key), **others
        )

    def __getattr__(self, name: str) -> Any:
        """Return the layer's attribute: models read some of their layers' attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _run_layer(layer: nn.Module, *args: Any, **others: Any) -> Any:
    return layer(*args, **others)


class CompiledDecoder(ModuleDecoder):
    """ModuleDecoder with compiled layers.

    Raise InvalidConfig where the model has no list of layers.
    """

    def __init__(self, module: Any, backend: CompileBackend = INDUCTOR) -> None:
        super().__init__(module)
        self.backend = CountingBackend(backend)
        self._holder = ContextHolder()
        _HOLDERS[id(self._holder)] = self._holder
        # Graphs are cached by code object: a copy ties their lifetime to this decoder.
        run_copy = FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
        compiled_run = torch.compile(run_copy, fullgraph=True, dynamic=True, backend=self.backend)
        name, layers = _find_layers(module)
        compiled_layers = nn.ModuleList(
            CompiledLayer(layer, compiled_run, torch.tensor([id(self._holder), index]))
            for index, layer in enumerate(layers)
        )
        self.base_model = _replace_submodule(module.base_model, name.split("."), compiled_layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> torch.Tensor:
        """Return hidden states after the last layer and its norm, [N, hidden_size]."""
        self._holder.context = context
        try:
            return super().forward(input_ids, positions, context, logits_indices)
        finally:
            self._holder.context = None


@torch.inference_mode()
def compile_decoder(
    module: Any, layers: Sequence[LayerSpec], backend: CompileBackend = INDUCTOR
) -> CompiledDecoder:
    """Return the module's decoder with every graph compiled. Each takes seconds.

    Raise InvalidConfig where the module cannot be compiled; a CUDA out-of-memory error is passed
    on.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit

    disabled = InvalidConfig(
        "torch_compile",
        "torch.compile is turned off in this environment",
        "Unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE",
    )
    if torch._dynamo.config.disable:
        raise disabled
    decoder = CompiledDecoder(module, backend)
    try:
        # One thread: few kernels to compile, and no worker processes that outlive the start.
        with (
            torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_GRAPHS),
            torch._inductor.config.patch(compile_threads=1),
        ):
            _run_warmup(decoder, layers, MAIN_TOKEN_COUNTS + EXTRA_TOKEN_COUNTS)
        decoder.backend.is_warm = True
        num_graphs = decoder.backend.num_graphs
        _run_warmup(decoder, layers, CHECK_TOKEN_COUNTS)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, FailOnRecompileLimitHit) as error:
        raise _compile_error(module, error) from error
    if not num_graphs:
        raise disabled
    if decoder.backend.num_graphs != num_graphs:
        kind = type(module).__name__
        raise InvalidConfig(
            "torch_compile", f"{kind} needs a graph for each number of tokens", "Leave it out"
        )
    return decoder


def _run_warmup(
    decoder: CompiledDecoder, layers: Sequence[LayerSpec], token_counts: Sequence[int]
) -> None:
    """Run a step for each number of tokens. Each token is the first of its sequence."""
    weight = decoder.module.get_input_embeddings().weight
    spec, device = layers[0], weight.device
    kv_cache = KVCache(
        KVCacheSpec(len(layers), spec.num_kv_heads, spec.head_dim, decoder.module.dtype),
        num_blocks=1,
        block_size=1,
        num_slots=1,
        max_model_len=1,
        device=device,
    )
    for count in token_counts:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        decoder.forward(
            zeros,
            zeros,
            ForwardContext(kv_cache, _ZeroAttention(), kv_cache.slot_mapping(zeros, zeros)),
        )


def _compile_error(module: Any, error: Exception) -> InvalidConfig:
    """Return a refusal with the compiler's message, in one line."""
    from torch._inductor.exc import InvalidCxxCompiler

    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, InvalidCxxCompiler):
        return InvalidConfig(
            "torch_compile", "no C++ compiler works here", "Install g++, or leave it out"
        )
    message = " ".join(str(cause).split())[:MAX_ERROR_CHARS]
    return InvalidConfig(
        "torch_compile",
        f"{type(module).__name__} cannot be compiled ({type(cause).__name__}: {message})",
        "Leave it out",
    )


def _find_layers(module: Any) -> tuple[str, nn.ModuleList]:
    """Return the path of the list of layers below `base_model`, and the list."""
    count = module.config.get_text_config().num_hidden_layers
    for name, part in module.base_model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return name, part
    kind = type(module).__name__
    raise InvalidConfig("torch_compile", f"{kind} has no list of {count} layers", "Leave it out")


def _replace_submodule(module: nn.Module, path: Sequence[str], part: nn.Module) -> nn.Module:
    """Return a copy of the module, on the same weights, with another part at the path."""
    if not path:
        return part
    copied = copy.copy(module)
    child = module._modules[path[0]]
    assert child is not None, f"nothing is at {path[0]}"
    copied._modules = {**module._modules, path[0]: _replace_submodule(child, path[1:], part)}
    return copied
