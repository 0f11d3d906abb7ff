"""ModuleDecoder: any causal language model of transformers, over the paged KV cache.

Owns the connection to transformers: the attention function that its modules call, and the
inspection of each layer's call. Knows no plan, no sampling and no graph.

    module(input_ids, positions, paged=context)
        └─ each attention layer ─► paged_attention(q, k, v, scaling, sliding_window, softcap)
                                       ├─ context.kv_cache.write(layer, k, v)
                                       └─ context.attention.attend(layer, q)

The tokens of all rows form one batch of one sequence. Block tables and positions, not a mask,
determine which keys a token reads.
Always true: a model is inspected once with two tokens before it serves. An argument that the
kernels do not have, a mask that is not a causal window, or a layer that attends twice is refused.
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
"""Name under which transformers finds `paged_attention`."""

INSPECTION_NAME = "forge_survey"
"""Name for inspection, under which transformers also finds `window_mask`. Steps use no mask."""

FAR_POSITION = 2**20
"""Position beyond every window."""

NO_WINDOW = -1
"""Value of a mask that is not causal, or that hides more than a window does."""

IGNORED_ARGUMENTS = {"dropout", "position_ids", "use_cache", "output_attentions", "cache_position"}
"""Arguments of an attention call that change nothing for the consecutive tokens of a sequence."""


class _LayerInspector:
    """Stand-in for a ForwardContext that notes the arguments of each layer's attention."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def add_layer(self, index: int, q: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        if index in self.layers:
            # Its second keys would overwrite the first in their blocks.
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
    """Run one layer's attention call of transformers.

    query, key, value   [1, heads, tokens, head_dim]
    paged               context of the step, or the inspector
    Return outputs, [1, tokens, heads, head_dim], and no weights. Raise InvalidConfig during
    inspection for arguments that the kernels do not have.
    """
    if isinstance(paged, OpaqueContext):
        # The layer index is not read here: a graph that depends on it would serve one layer only.
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
    """Return a mask whose every entry is the window of `mask_function`, int64.

    A model's configuration determines a layer's mask, and not every model passes the window to its
    attention as well. So the mask is evaluated. The same integer in every entry shows whether the
    model changes the mask on its way to the layer.
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
    """Return the window of a mask made by `window_mask`, 0 for none, or NO_WINDOW."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64:
        return NO_WINDOW
    window = int(mask.flatten()[0])
    return window if bool((mask == window).all()) else NO_WINDOW


def _unsupported(problem: str) -> InvalidConfig:
    return InvalidConfig(
        "model", f"{problem}, which is not supported", "Serve a model with plain causal attention"
    )


class _HiddenOnly:
    """Output of a base model with a hidden state, and None for every other attribute."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _HiddenStateStub(nn.Module):
    """Stand-in for a base model that returns the hidden states it is given.

    child_names   children of that base model; a head may call one of them instead of the whole
    """

    def __init__(self, child_names: Sequence[str]) -> None:
        super().__init__()
        self._child_names = frozenset(child_names)

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("_child_names", ()) else super().__getattr__(name)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **others: Any) -> _HiddenOnly:
        return _HiddenOnly(inputs_embeds)


class ModuleDecoder:
    """Decoder of a transformers ...ForCausalLM, loaded with the attention `ATTENTION_NAME`.

    The code after the layers (head, scale, soft cap) is the module's own: `compute_logits` calls
    the module with a stub in place of its layers.
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
        """Return hidden states after the last layer and its norm, [N, hidden_size]."""
        return self._run_base_model(input_ids, positions, context)[logits_indices]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, [rows, vocab_size]."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    def inspect_layers(self) -> list[LayerSpec]:
        """Return the arguments of each layer's attention.

        Raise InvalidConfig for one that cannot run.
        """
        inspector = _LayerInspector()
        input_ids = torch.zeros(2, dtype=torch.int32, device=self.module.device)
        positions = torch.arange(2, dtype=torch.int32, device=input_ids.device)
        try:
            with torch.inference_mode(), _inspection_attention(self.module):
                self.compute_logits(self._run_base_model(input_ids, positions, inspector))
        except (InvalidConfig, torch.cuda.OutOfMemoryError):
            raise
        # The module's own code may fail in any way when it is called like this.
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
    """Make the module's layers use masks of `window_mask` until the context ends."""
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
    """Raise InvalidConfig where the config and a layer disagree on a window."""
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != bool(layers[index].window):
            raise _unsupported(f"layer {index} is {kind} and has window {layers[index].window}")


def register_attention() -> None:
    """Register `paged_attention` and `window_mask` with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionInterface.register(INSPECTION_NAME, paged_attention)
    AttentionMaskInterface.register(INSPECTION_NAME, window_mask)
