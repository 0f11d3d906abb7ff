"""ModuleDecoder: any causal language model of transformers, over pages, through its own modules.

Owns the meeting with transformers: the attention function that its modules call, and the survey of
what they ask of it. Knows no plan, no sampling and no graph.

    module(input_ids, positions, paged=step)
        └─ each attention layer ─► paged_attention(q, k, v, scaling, sliding_window, softcap)
                                       ├─ step.pool.write(layer, k, v)
                                       └─ step.attention.attend(layer, q)

The tokens of all rows stand behind each other in one "batch" of one sequence; who may see whom is
known to the pages alone. A model is surveyed once with a few tokens: an argument that the kernels
do not know, a mask that is no window, or a layer that attends twice is a refusal, not a wrong
answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge.errors import InvalidConfig, one_line
from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.decoders.interface import (
    ALL_TOKENS,
    ForwardContext,
    OpaqueContext,
    TokenSelection,
)

ATTENTION_NAME = "forge"
"""The name under which transformers finds `paged_attention`."""

INSPECTION_NAME = "forge_survey"
"""The name under which it also finds `window_mask`. Steps take no mask, so theirs has none."""

FAR_POSITION = 2**20
"""A position behind every window."""

NO_WINDOW = -1
"""In a mask of the survey: it is not causal, or what it hides is no window."""

IGNORED_ARGUMENTS = {"dropout", "position_ids", "use_cache", "output_attentions", "cache_position"}
"""Arguments of an attention call that change nothing when one token follows the other."""


class _LayerInspector:
    """Stands in for a ForwardContext and notes what each layer asks."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def add_layer(self, index: int, q: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        if index in self.layers:
            # Its second keys would overwrite the pages of the first.
            raise _unsupported(f"layer {index} attends twice")
        self.layers[index] = spec
        return q.transpose(1, 2)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: ForwardContext | OpaqueContext | _LayerInspector | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: [1, heads, tokens, head_dim] in, [1, tokens, heads, _] out."""
    if isinstance(paged, OpaqueContext):
        # No index is read before: a graph that knows it would be that layer's alone.
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        return paged.attend(q, k, v, paged.context_key)[None], None
    index: int = module.layer_idx
    if isinstance(paged, ForwardContext):
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        paged.kv_cache.write(index, k, v, paged.slot_mapping)
        return paged.attention.attend(index, q, k, v)[None], None
    if paged is None:
        raise _unsupported(f"layer {index} does not pass keyword arguments on to its attention")
    unsupported = [
        name for name in others if name not in IGNORED_ARGUMENTS and others[name] is not None
    ]
    window = int(sliding_window or 0)
    mask_window = window if attention_mask is None else read_window(attention_mask)
    if mask_window == NO_WINDOW:
        unsupported.append("attention_mask")
    elif window not in (0, mask_window) and not (mask_window == 0 and window > FAR_POSITION):
        unsupported.append(f"window {window} and a mask of window {mask_window}")
    if is_causal is False:
        unsupported.append("is_causal=False")
    if key.shape != value.shape:
        unsupported.append("values narrower than keys")
    if unsupported:
        raise _unsupported(f"layer {index} attends with {', '.join(unsupported)}")
    spec = LayerSpec(
        query.shape[1],
        key.shape[1],
        query.shape[3],
        query.shape[3] ** -0.5 if scaling is None else float(scaling),
        mask_window,
        float(softcap or 0.0),
    )
    return paged.add_layer(index, query, spec), None


def window_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    **others: Any,
) -> torch.Tensor:
    """Return a stand-in for a mask of transformers: its window, in every place of the mask.

    What a layer is given depends on the configuration in ways of each model's own, and whether
    it says so to its attention too is the model's affair. The mask is what counts. An integer in
    its place shows when a model changes the mask on its way to the layer.
    """
    keys = torch.arange(FAR_POSITION + 2, device=device)
    zero = keys[0]
    windows = set()
    for query in (FAR_POSITION - 1, FAR_POSITION):
        visible = mask_function(zero, zero, keys[query], keys).expand(len(keys))
        count = int(visible.sum())
        is_window = 0 < count <= query + 1 and bool(visible[query + 1 - count : query + 1].all())
        windows.add((0 if count == query + 1 else count) if is_window else NO_WINDOW)
    window = windows.pop() if len(windows) == 1 else NO_WINDOW
    shape = (batch_size, 1, q_length, kv_length)
    return torch.full(shape, window, dtype=torch.int64, device=device)


def read_window(mask: torch.Tensor) -> int:
    """Return the window of a mask that `window_mask` made, 0: none, or NO_WINDOW."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64:
        return NO_WINDOW
    window = int(mask.flatten()[0])
    return window if bool((mask == window).all()) else NO_WINDOW


def _unsupported(problem: str) -> InvalidConfig:
    return InvalidConfig(
        "model", f"{problem}, which is not supported", "Serve a model with plain causal attention"
    )


class _HiddenOnly:
    """An output of the layers that has a hidden state, and None for all else it may be asked."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _HiddenStateStub(nn.Module):
    """Stands where the layers were: its output is the hidden state it is given.

    child_names   parts that stood there: a head may call one of them in the place of the whole
    """

    def __init__(self, child_names: Sequence[str]) -> None:
        super().__init__()
        self._child_names = frozenset(child_names)

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("_child_names", ()) else super().__getattr__(name)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **others: Any) -> _HiddenOnly:
        return _HiddenOnly(inputs_embeds)


class ModuleDecoder:
    """A transformers ...ForCausalLM, loaded with the attention implementation `ATTENTION_NAME`.

    What stands behind its layers (a head, its scale, its soft cap) is the module's own code: the
    module is called once more with the layers left out.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.base_model = module.base_model
        self._head = copy.copy(module)
        stub = _HiddenStateStub([name for name, _ in module.base_model.named_children()])
        self._head._modules = {**module._modules, module.base_model_prefix: stub}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        logits_indices: TokenSelection = ALL_TOKENS,
    ) -> torch.Tensor:
        """[wanted, hidden] behind the last layer and its norm."""
        return self._run_base_model(input_ids, positions, context)[logits_indices]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary]."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    def inspect_layers(self) -> list[LayerSpec]:
        """What each layer's attention computes. Raises InvalidConfig for what cannot run."""
        inspector = _LayerInspector()
        input_ids = torch.zeros(2, dtype=torch.int32, device=self.module.device)
        positions = torch.arange(2, dtype=torch.int32, device=input_ids.device)
        try:
            with torch.inference_mode(), _inspection_attention(self.module):
                self.compute_logits(self._run_base_model(input_ids, positions, inspector))
        except (InvalidConfig, torch.cuda.OutOfMemoryError):
            raise
        # Code of any model may fail in any way where it is called otherwise than it expects.
        except Exception as error:
            raise _unsupported(
                f"{type(self.module).__name__} fails over pages "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error
        layers = [spec for _, spec in sorted(inspector.layers.items())]
        count = self.module.config.get_text_config().num_hidden_layers
        if sorted(inspector.layers) != list(range(count)):
            raise _unsupported(f"{len(layers)} of {count} layers attend")
        _check_windows(self.module.config.get_text_config(), layers)
        if len({(spec.num_kv_heads, spec.head_dim) for spec in layers}) > 1:
            raise _unsupported("its layers keep keys of several shapes")
        return layers

    def _run_base_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        paged: ForwardContext | _LayerInspector,
    ) -> torch.Tensor:
        out = self.base_model(
            input_ids=input_ids[None].long(),
            position_ids=positions[None].long(),
            use_cache=False,
            paged=paged,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]


@contextmanager
def _inspection_attention(module: nn.Module) -> Iterator[None]:
    """Let the module's layers be given masks of `window_mask` for as long as the context lasts."""
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    configs_by_id = {id(each): each for each in configs if hasattr(each, "_attn_implementation")}
    implementations = {key: config._attn_implementation for key, config in configs_by_id.items()}
    try:
        for config in configs_by_id.values():
            config._attn_implementation = INSPECTION_NAME
        yield
    finally:
        for key, config in configs_by_id.items():
            config._attn_implementation = implementations[key]


def _check_windows(config: Any, layers: Sequence[LayerSpec]) -> None:
    """Raise InvalidConfig where a layer that the config calls sliding has no window."""
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != bool(layers[index].window):
            raise _unsupported(
                f"layer {index} is {kind} and asks for window {layers[index].window}"
            )


def register_attention() -> None:
    """Let transformers know `paged_attention` as `ATTENTION_NAME`, and what the survey takes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionInterface.register(INSPECTION_NAME, paged_attention)
    AttentionMaskInterface.register(INSPECTION_NAME, window_mask)
