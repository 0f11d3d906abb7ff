"""ModuleDecoder: any causal language model of transformers, over pages, through its own modules.

Owns the meeting with transformers: the attention function that its modules call, and the survey of
what they ask of it. Knows no plan, no sampling and no graph.

    module(input_ids, positions, paged=step)
        └─ each attention layer ─► paged_attention(q, k, v, scaling, sliding_window, softcap)
                                       ├─ step.pool.write(layer, k, v)
                                       └─ step.attention.attend(layer, q)

The tokens of all rows stand behind each other in one "batch" of one sequence; who may see whom is
known to the pages alone. A model is surveyed once with a few tokens: an argument that the kernels
do not know, a mask, or a window that never arrives is a refusal, not a wrong answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from forge.errors import InvalidConfig
from forge.models.hf.attention import Attention, LayerSpec
from forge.models.hf.pool import KVPool

ATTENTION = "forge"
"""The name under which transformers finds `paged_attention`."""

HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "cache_position"}
"""Arguments of an attention call that change nothing when one token follows the other."""


Wanted: TypeAlias = torch.Tensor | slice
EVERY = slice(None)
"""All tokens."""


class PagedStep(NamedTuple):
    """Where a step's keys and values go and who reads them.

    where   [tokens] int32, from KVPool.places
    """

    pool: KVPool
    attention: Attention
    where: torch.Tensor


class OpaqueStep(NamedTuple):
    """A step where a compiler looks on: `attend` is an operator that it does not look into.

    attend   of queries, keys and values, [tokens, heads, head_dim] each, and `at`
    at       whose step and which layer, for the operator to read
    """

    attend: Callable[..., torch.Tensor]
    at: torch.Tensor


class Decoder(Protocol):
    """Weights and arithmetic of one model; attention reads pages."""

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep, wanted: Wanted = EVERY
    ) -> torch.Tensor:
        """[wanted, hidden] that `logits` takes; the step's keys and values are in their pages.

        ids, positions   [tokens] int32
        wanted           tokens whose hidden state is asked for; behind the last layer's attention
                         no other needs computing
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] for some rows of `hidden`."""
        ...


class _Survey:
    """Stands in for a PagedStep and notes what each layer asks."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def note(self, index: int, q: torch.Tensor, k: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        self.layers[index] = spec
        return q.transpose(1, 2)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep | OpaqueStep | _Survey,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: [1, heads, tokens, head_dim] in, [1, tokens, heads, _] out."""
    if isinstance(paged, OpaqueStep):
        # No index is read before: a graph that knows it would be that layer's alone.
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        return paged.attend(q, k, v, paged.at)[None], None
    index: int = module.layer_idx
    if isinstance(paged, PagedStep):
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        paged.pool.write(index, k, v, paged.where)
        return paged.attention.attend(index, q, k, v)[None], None
    strange = [name for name in others if name not in HARMLESS and others[name] is not None]
    if attention_mask is not None:
        strange.append("attention_mask")
    if is_causal is False:
        strange.append("is_causal=False")
    if key.shape != value.shape:
        strange.append("values narrower than keys")
    if strange:
        raise _refused(f"layer {index} attends with {', '.join(strange)}")
    spec = LayerSpec(
        query.shape[1],
        key.shape[1],
        query.shape[3],
        query.shape[3] ** -0.5 if scaling is None else float(scaling),
        int(sliding_window or 0),
        float(softcap or 0.0),
    )
    return paged.note(index, query, key, spec), None


def _refused(problem: str) -> InvalidConfig:
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


class _Given(nn.Module):
    """Stands where the layers were: its output is the hidden state it is given."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **others: Any) -> _HiddenOnly:
        return _HiddenOnly(inputs_embeds)


class ModuleDecoder:
    """A transformers ...ForCausalLM, loaded with the attention implementation `ATTENTION`.

    What stands behind its layers (a head, its scale, its soft cap) is the module's own code: the
    module is called once more with the layers left out.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.base = module.base_model
        self._tail = copy.copy(module)
        self._tail._modules = {**module._modules, module.base_model_prefix: _Given()}

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep, wanted: Wanted = EVERY
    ) -> torch.Tensor:
        """[wanted, hidden] behind the last layer and its norm."""
        return self._through(ids, positions, step)[wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary]."""
        logits: torch.Tensor = self._tail(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    def survey(self) -> list[LayerSpec]:
        """What each layer's attention computes. Raises InvalidConfig for what cannot run."""
        survey = _Survey()
        ids = torch.zeros(2, dtype=torch.int32, device=self.module.device)
        self._through(ids, torch.arange(2, dtype=torch.int32, device=ids.device), survey)
        layers = [spec for _, spec in sorted(survey.layers.items())]
        count = self.module.config.get_text_config().num_hidden_layers
        if sorted(survey.layers) != list(range(count)):
            raise _refused(f"{len(layers)} of {count} layers attend")
        _check_windows(self.module.config.get_text_config(), layers)
        if len({(spec.num_kv_heads, spec.head_dim) for spec in layers}) > 1:
            raise _refused("its layers keep keys of several shapes")
        return layers

    def _through(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: PagedStep | _Survey
    ) -> torch.Tensor:
        out = self.base(
            input_ids=ids[None].long(),
            position_ids=positions[None].long(),
            use_cache=False,
            paged=paged,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]


def _check_windows(config: Any, layers: Sequence[LayerSpec]) -> None:
    """A layer that the config calls sliding must have said so: its mask was never made."""
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != bool(layers[index].window):
            raise _refused(f"layer {index} is {kind} and asks for window {layers[index].window}")


def register() -> None:
    """transformers knows `paged_attention` as `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)
