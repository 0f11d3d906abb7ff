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
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from forge.errors import InvalidConfig
from forge.models.hf.attention import Attention, LayerSpec
from forge.models.hf.files import brief
from forge.models.hf.pool import KVPool

ATTENTION = "forge"
"""The name under which transformers finds `paged_attention`."""

SURVEY = "forge_survey"
"""The name under which it also finds `window_mask`. Steps take no mask, so theirs has none."""

FAR = 2**20
"""A position behind every window."""

NO_WINDOW = -1
"""In a mask of the survey: it is not causal, or what it hides is no window."""

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

    def note(self, index: int, q: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        if index in self.layers:
            # Its second keys would overwrite the pages of the first.
            raise _refused(f"layer {index} attends twice")
        self.layers[index] = spec
        return q.transpose(1, 2)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep | OpaqueStep | _Survey | None = None,
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
    if paged is None:
        raise _refused(f"layer {index} does not pass keyword arguments on to its attention")
    strange = [name for name in others if name not in HARMLESS and others[name] is not None]
    window = int(sliding_window or 0)
    masked = window if attention_mask is None else window_of(attention_mask)
    if masked == NO_WINDOW:
        strange.append("attention_mask")
    elif window not in (0, masked) and not (masked == 0 and window > FAR):
        strange.append(f"window {window} and a mask of window {masked}")
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
        masked,
        float(softcap or 0.0),
    )
    return paged.note(index, query, spec), None


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
    keys = torch.arange(FAR + 2, device=device)
    zero = keys[0]
    counts = set()
    for query in (FAR - 1, FAR):
        read = mask_function(zero, zero, keys[query], keys).expand(len(keys))
        count = int(read.sum())
        is_window = 0 < count <= query + 1 and bool(read[query + 1 - count : query + 1].all())
        counts.add((0 if count == query + 1 else count) if is_window else NO_WINDOW)
    window = counts.pop() if len(counts) == 1 else NO_WINDOW
    shape = (batch_size, 1, q_length, kv_length)
    return torch.full(shape, window, dtype=torch.int64, device=device)


def window_of(mask: torch.Tensor) -> int:
    """Return the window of a mask that `window_mask` made, 0: none, or NO_WINDOW."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64:
        return NO_WINDOW
    first = int(mask.flatten()[0])
    return first if bool((mask == first).all()) else NO_WINDOW


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
    """Stands where the layers were: its output is the hidden state it is given.

    names   parts that stood there: a head may call one of them in the place of the whole
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("_names", ()) else super().__getattr__(name)

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
        given = _Given([name for name, _ in module.base_model.named_children()])
        self._tail._modules = {**module._modules, module.base_model_prefix: given}

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
        positions = torch.arange(2, dtype=torch.int32, device=ids.device)
        try:
            with torch.inference_mode(), _surveyed(self.module):
                self.logits(self._through(ids, positions, survey))
        except (InvalidConfig, torch.cuda.OutOfMemoryError):
            raise
        # Code of any model may fail in any way where it is called otherwise than it expects.
        except Exception as fault:
            raise _refused(
                f"{type(self.module).__name__} fails over pages "
                f"({type(fault).__name__}: {brief(fault)})"
            ) from fault
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


@contextmanager
def _surveyed(module: nn.Module) -> Iterator[None]:
    """Let the module's layers be given masks of `window_mask` for as long as the context lasts."""
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    found = {id(each): each for each in configs if hasattr(each, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in found.items()}
    try:
        for config in found.values():
            config._attn_implementation = SURVEY
        yield
    finally:
        for key, config in found.items():
            config._attn_implementation = before[key]


def _check_windows(config: Any, layers: Sequence[LayerSpec]) -> None:
    """Raise InvalidConfig where a layer that the config calls sliding has no window."""
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != bool(layers[index].window):
            raise _refused(f"layer {index} is {kind} and asks for window {layers[index].window}")


def register() -> None:
    """Let transformers know `paged_attention` as `ATTENTION`, and what the survey takes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionInterface.register(SURVEY, paged_attention)
    AttentionMaskInterface.register(SURVEY, window_mask)
