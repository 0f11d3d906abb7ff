"""CompiledDecoder: a model's own modules, each layer through torch.compile.

Owns the compilation: what is compiled, how often, and what a compiler must not look into. Knows no
plan, no sampling and no graph.

    embedding     layer 0    layer 1    ...    layer 27     norm, head
    as it is    └── two graphs: one token, any other ──┘    as they are

    a graph      norm, q, k, v, rotation ─► forge::paged_attention ─► o, sums, norm, MLP
                                            opaque: the step's own pages and kernels

All layers run through one function whose input is the layer, so a graph serves every layer of the
same structure. Attention is one operator to the compiler. It finds its step through a number, for
an operator takes tensors and no objects.

Nothing falls back: a layer that is not one graph is a refusal, and so is one whose graphs fit some
numbers of tokens only. What is compiled after the start all the same is a line in the log.
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
from forge.models.hf.attention import LayerSpec, Rotary, Rows
from forge.models.hf.decoder import EVERY, ModuleDecoder, OpaqueStep, PagedStep, Wanted
from forge.models.hf.pool import KVPool, KVShape

log = logging.getLogger(__name__)

Backend: TypeAlias = str | Callable[[Any, list[Any]], Callable[..., Any]]
"""What makes a graph fast: a name that torch knows, or a function of a graph and its inputs."""

INDUCTOR = "inductor"
"""torch's own: C++ on a CPU, Triton on a GPU."""

FIRST_COUNTS = (37, 1)
"""Numbers of tokens that are compiled for. The first stands for all but one: it is no other size
of a model, for the compiler takes equal sizes to be one."""

OTHER_COUNTS = (2, 8, 64, 256)
"""Numbers of tokens that a compiler may yet treat apart."""

NEW_COUNTS = (131, 3, 2, 1)
"""Numbers of tokens for which nothing may be compiled any more."""

MOST_GRAPHS = 64
"""Graphs of one model: layers of 32 kinds."""

FAULT_CHARS = 200
"""How much of a compiler's fault a refusal shows."""


class _Zeros:
    """Attention of steps that are run for their compilation."""

    def begin(self, rows: Rows) -> None:
        pass

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros_like(queries)

    def attend_product(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> None:
        return None


class Seat:
    """Where the step lies while layers run."""

    def __init__(self) -> None:
        self.step: PagedStep | None = None


_SEATS: WeakValueDictionary[int, Seat] = WeakValueDictionary()
"""Seats by their number. An operator belongs to the process, so its way back to a decoder does."""


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """[tokens, heads, head_dim], when keys and values are in their pages.

    query, key, value   [tokens, heads, head_dim]
    at                  [2] on the host: number of the seat, index of the layer
    """
    number, layer = at.tolist()
    step = _SEATS[number].step
    assert step is not None, f"layer {layer} attends outside of a step"
    step.pool.write(layer, key, value, step.where)
    return step.attention.attend(layer, query.contiguous(), key, value).contiguous()


def _attended_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    return query.new_empty(query.shape)


# Pages are no argument: nothing in a graph reads them, and no output of the operator is unused.
torch.library.custom_op("forge::paged_attention", _attended, mutates_args=()).register_fake(
    _attended_shape
)
_OPERATOR: Callable[..., torch.Tensor] = torch.ops.forge.paged_attention.default


class Compiler:
    """A backend of torch.compile that counts.

    graphs    compiled so far
    settled   True once every step is expected to have its graph
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.graphs = 0
        self.settled = False

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """The graph, compiled."""
        from torch._dynamo.backends.registry import lookup_backend

        if self.settled:
            log.warning("a layer is compiled after the start; requests wait for it")
        made: Callable[..., Any] = lookup_backend(self._backend)(graph, inputs)
        self.graphs += 1
        return made


class CompiledLayer(nn.Module):
    """Stands where a layer was and runs it through `run`."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any], at: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.run = run
        self.at = at

    def forward(self, *args: Any, paged: PagedStep, **others: Any) -> Any:
        """What the layer gives."""
        return self.run(self.layer, *args, paged=OpaqueStep(_OPERATOR, self.at), **others)

    def __getattr__(self, name: str) -> Any:
        """The layer's, where models ask their layers for more than their output."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _run(layer: nn.Module, *args: Any, **others: Any) -> Any:
    return layer(*args, **others)


class CompiledDecoder(ModuleDecoder):
    """The module's decoder, its layers compiled. Raises InvalidConfig where there are none."""

    def __init__(self, module: Any, backend: Backend = INDUCTOR) -> None:
        super().__init__(module)
        self.compiler = Compiler(backend)
        self._seat = Seat()
        _SEATS[id(self._seat)] = self._seat
        # Graphs are kept with a function's code: another code, and they go with this decoder.
        own = FunctionType(_run.__code__.replace(), _run.__globals__)
        run = torch.compile(own, fullgraph=True, dynamic=True, backend=self.compiler)
        name, layers = _layers_of(module)
        instead = nn.ModuleList(
            CompiledLayer(layer, run, torch.tensor([id(self._seat), index]))
            for index, layer in enumerate(layers)
        )
        self.base = _with(module.base_model, name.split("."), instead)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep, wanted: Wanted = EVERY
    ) -> torch.Tensor:
        """[wanted, hidden] behind the last layer and its norm."""
        self._seat.step = step
        try:
            return super().hidden(ids, positions, step, wanted)
        finally:
            self._seat.step = None


@torch.inference_mode()
def compiled(
    module: Any, layers: Sequence[LayerSpec], backend: Backend = INDUCTOR
) -> CompiledDecoder:
    """The module's decoder with a graph for every step, all compiled now. Raises InvalidConfig.

    A graph costs seconds. Running out of CUDA memory is raised as it is.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit

    off = InvalidConfig(
        "torch_compile",
        "torch.compile is turned off in this environment",
        "Unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE",
    )
    if torch._dynamo.config.disable:
        raise off
    decoder = CompiledDecoder(module, backend)
    try:
        # One thread: there are a few kernels to compile, and no processes that stay beside ours.
        with (
            torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS),
            torch._inductor.config.patch(compile_threads=1),
        ):
            _exercise(decoder, layers, FIRST_COUNTS + OTHER_COUNTS)
        decoder.compiler.settled = True
        graphs = decoder.compiler.graphs
        _exercise(decoder, layers, NEW_COUNTS)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, FailOnRecompileLimitHit) as fault:
        raise _refused(module, fault) from fault
    if not graphs:
        raise off
    if decoder.compiler.graphs != graphs:
        kind = type(module).__name__
        raise InvalidConfig(
            "torch_compile", f"{kind} needs a graph for each number of tokens", "Leave it out"
        )
    return decoder


def _exercise(decoder: CompiledDecoder, layers: Sequence[LayerSpec], counts: Sequence[int]) -> None:
    """Steps of so many tokens have run. Each token is the first of its sequence."""
    weight = decoder.module.get_input_embeddings().weight
    spec, device = layers[0], weight.device
    pool = KVPool(
        KVShape(len(layers), spec.num_kv_heads, spec.head_dim, decoder.module.dtype),
        num_blocks=1,
        block_size=1,
        num_slots=1,
        max_model_len=1,
        device=device,
    )
    for count in counts:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        decoder.hidden(zeros, zeros, PagedStep(pool, _Zeros(), pool.places(zeros, zeros)))


def _refused(module: Any, fault: Exception) -> InvalidConfig:
    """What the compiler says, in one line."""
    from torch._inductor.exc import InvalidCxxCompiler

    cause = getattr(fault, "inner_exception", None) or fault
    if isinstance(cause, InvalidCxxCompiler):
        return InvalidConfig(
            "torch_compile", "no C++ compiler works here", "Install g++, or leave it out"
        )
    said = " ".join(str(cause).split())[:FAULT_CHARS]
    return InvalidConfig(
        "torch_compile",
        f"{type(module).__name__} cannot be compiled ({type(cause).__name__}: {said})",
        "Leave it out",
    )


def _layers_of(module: Any) -> tuple[str, nn.ModuleList]:
    """The list of the model's layers and its name behind `base_model`."""
    count = module.config.get_text_config().num_hidden_layers
    for name, part in module.base_model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return name, part
    kind = type(module).__name__
    raise InvalidConfig("torch_compile", f"{kind} has no list of {count} layers", "Leave it out")


def _with(module: nn.Module, path: Sequence[str], part: nn.Module) -> nn.Module:
    """The module, on the same weights, with another part at the path."""
    if not path:
        return part
    twin = copy.copy(module)
    inner = module._modules[path[0]]
    assert inner is not None, f"nothing is at {path[0]}"
    twin._modules = {**module._modules, path[0]: _with(inner, path[1:], part)}
    return twin
