"""Comparison: a fused decoder is used only where logits agree, in any dtype, at any position."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.models.hf.decoders.comparison import float32_error, logits_error, probe_positions  # noqa: E402
from forge.models.hf.decoders.fused_decoder import FusedDecoder, fuse  # noqa: E402
from forge.models.hf.decoders.fusion_support import unmodelled_fields  # noqa: E402
from forge.models.hf.decoders.module_decoder import (  # noqa: E402
    ATTENTION_NAME,
    ModuleDecoder,
    register_attention,
)
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from tests.hf.families import CONFIGS, SMALL, create_module, create_module_from_config  # noqa: E402

pytestmark = pytest.mark.torch
FUSABLE = ("llama", "qwen2", "qwen3", "mistral", "phi3")
DTYPES = (torch.float32, torch.bfloat16)
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
BETA = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


def llama(dtype: Any = torch.float32, **fields: Any) -> Any:
    return create_module_from_config(hf.LlamaConfig(**{**SMALL, **fields}), dtype, ATTENTION_NAME)


def decoder_type(module: Any, ops: Any = None, max_model_len: int = 2048) -> type:
    return type(select_decoder(module, ops or TorchOps(), max_model_len)[0])


# By the configuration.


LAYER_FIELD_CONFIGS: dict[str, Any] = {
    "no_rope_layer": lambda: hf.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "llama_4_scaling_beta": lambda: hf.Ministral3Config(
        **SMALL, rope_parameters={**BETA, "llama_4_scaling_beta": 0.5}
    ),
    "residual_multiplier": lambda: hf.GraniteConfig(**SMALL, residual_multiplier=0.5),
    "logits_scaling": lambda: hf.GraniteConfig(**SMALL, logits_scaling=2.0),
}


@pytest.mark.parametrize("field", LAYER_FIELD_CONFIGS)
def test_a_field_that_is_not_modelled_leaves_a_model_its_modules_and_is_named(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = create_module_from_config(LAYER_FIELD_CONFIGS[field](), torch.bfloat16, ATTENTION_NAME)
    assert decoder_type(module) is ModuleDecoder
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and field in record.getMessage()


@pytest.mark.parametrize("family", FUSABLE)
def test_fields_of_the_fused_families_are_all_modelled(family: str) -> None:
    assert unmodelled_fields(create_module(family, torch.float32, ATTENTION_NAME)) == []


NEUTRAL_CONFIGS: dict[str, Callable[[], Any]] = {
    "granite": lambda: hf.GraniteConfig(**SMALL, attention_multiplier=0.3),
    "seed_oss": lambda: hf.SeedOssConfig(**SMALL, head_dim=16),
    "ministral": lambda: hf.MinistralConfig(**SMALL, head_dim=16, sliding_window=20),
    "cwm": lambda: hf.CwmConfig(
        **SMALL, head_dim=16, sliding_window=20, rope_parameters=PLAIN
    ),
    "yarn": lambda: hf.Qwen3Config(**SMALL, head_dim=16, rope_parameters=BETA),
}  # fmt: skip


@pytest.mark.parametrize("kind", NEUTRAL_CONFIGS)
def test_families_whose_multipliers_are_neutral_are_fused_in_any_dtype(kind: str) -> None:
    for dtype in DTYPES:
        assert (
            decoder_type(create_module_from_config(NEUTRAL_CONFIGS[kind](), dtype, ATTENTION_NAME))
            is FusedDecoder
        )


OLD_ROPE_CONFIGS: dict[str, Callable[[], Any]] = {
    "linear": lambda: hf.LlamaConfig(**SMALL, rope_scaling={"type": "linear", "factor": 2.0}),
    "both": lambda: hf.LlamaConfig(
        **SMALL, rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0}
    ),
    "yarn": lambda: hf.Qwen2Config(
        **SMALL,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "part": lambda: hf.Phi3Config(**SMALL, partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("kind", OLD_ROPE_CONFIGS)
def test_a_rotation_under_its_older_names_is_fused(kind: str) -> None:
    assert (
        decoder_type(
            create_module_from_config(OLD_ROPE_CONFIGS[kind](), torch.float32, ATTENTION_NAME)
        )
        is FusedDecoder
    )


def test_a_field_that_no_class_declares_counts_if_the_models_source_names_it() -> None:
    module = llama()
    module.config.rope_type = "a field of the rotary parameters, as far as the class knows"
    assert unmodelled_fields(module) == ["rope_type"]


def test_a_field_that_transformers_does_not_know_changes_nothing() -> None:
    module = llama(unsloth_fixed=True, is_llama_config=True)
    assert unmodelled_fields(module) == []
    setattr(module.config, "transformers.js(config", {})
    assert unmodelled_fields(module) == []
    module.config.rope_parameters["twist"] = 2
    assert unmodelled_fields(module) == ["rope_parameters.twist"]


# By the structure.


def changed_llama(change: Callable[[Any], None]) -> Any:
    module = llama()
    change(module)
    return module


def with_epsilon(module: Any) -> None:
    module.model.layers[1].input_layernorm.variance_epsilon = 0.5


def with_parameter(module: Any) -> None:
    module.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.ones(4))


def with_bias(module: Any) -> None:
    module.lm_head.bias = torch.nn.Parameter(torch.ones(307))


def with_activation(module: Any) -> None:
    module.model.layers[1].mlp.act_fn = torch.nn.GELU()


def with_linear(module: Any) -> None:
    class Halved(torch.nn.Linear):
        pass

    module.model.layers[1].mlp.up_proj.__class__ = Halved


def with_norm(module: Any) -> None:
    module.model.layers[1].mlp.ffn_sub_norm = torch.nn.Identity()


def with_pooling(module: Any) -> None:
    module.pooling = torch.nn.Identity()


def with_projection(module: Any) -> None:
    module.model.project_in = torch.nn.Identity()


def with_layer_norm(module: Any) -> None:
    module.model.layers[1].post_feedforward_layernorm = torch.nn.Identity()


def with_gate(module: Any) -> None:
    module.model.layers[1].self_attn.g_proj = torch.nn.Identity()


MODULE_CHANGES = [
    *(with_epsilon, with_parameter, with_bias, with_activation, with_linear, with_norm),
    *(with_pooling, with_projection, with_layer_norm, with_gate),
]


@pytest.mark.parametrize("change", MODULE_CHANGES, ids=lambda change: change.__name__)
def test_a_part_that_llama_does_not_have_leaves_a_model_its_modules(change: Any) -> None:
    module = changed_llama(change)
    layers = ModuleDecoder(module).inspect_layers()
    assert fuse(module, layers, TorchOps(), 64) is None


@pytest.mark.parametrize(
    ("fields", "is_fused"),
    [({"window": 8}, True), ({"scale": 0.3}, False), ({"softcap": 5.0}, False)],
)
def test_layers_may_differ_in_their_window_and_in_nothing_else(
    fields: dict[str, Any], is_fused: bool
) -> None:
    module = llama()
    *layers, last = ModuleDecoder(module).inspect_layers()
    fused = fuse(module, [*layers, last._replace(**fields)], TorchOps(), 64)
    assert (fused is not None) == is_fused


# By what is computed.


def with_forward(module: Any, layer: int, wrap: Callable[..., Any]) -> None:
    """Replace the layer's forward by `wrap` of it, which no configuration and no part shows."""
    inner = module.model.layers[layer]

    class Other(type(inner)):  # type: ignore[misc]
        def forward(self, hidden: Any, **others: Any) -> Any:
            return wrap(super().forward, hidden, **others)

    inner.__class__ = Other


def unrotated(forward: Any, hidden: Any, *, position_embeddings: Any, **others: Any) -> Any:
    cos, sin = position_embeddings
    plain = (torch.ones_like(cos), torch.zeros_like(sin))
    return forward(hidden, position_embeddings=plain, **others)


def scale_after(position: int, factor: float) -> Callable[..., Any]:
    def wrap(forward: Any, hidden: Any, *, position_ids: Any, **others: Any) -> Any:
        out = forward(hidden, position_ids=position_ids, **others)
        return torch.where(position_ids[..., None] >= position, factor * out, out)

    return wrap


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_does_not_rotate_is_seen_in_every_dtype(dtype: Any) -> None:
    """Scores are so small that logits differ less than rounding to bfloat16 may explain."""
    module = llama(dtype)
    for layer in module.model.layers:
        layer.self_attn.q_proj.weight.data *= 0.05
    with_forward(module, 1, unrotated)
    assert decoder_type(module) is ModuleDecoder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [1000, 1700, 2047])
def test_arithmetic_that_changes_after_a_configured_position_is_found(
    position: int, dtype: Any
) -> None:
    """Five per cent, from some token on. The last position needs no field."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    module = llama(
        dtype, head_dim=16, rope_parameters={**rope, "original_max_position_embeddings": 1000}
    )
    module.config.pretraining_tp = 1700
    with_forward(module, 1, scale_after(position, 1.05))
    assert decoder_type(module) is ModuleDecoder


@pytest.mark.parametrize("family", FUSABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_alone_is_far_below_the_limit(family: str, dtype: Any) -> None:
    module = create_module(family, dtype, ATTENTION_NAME)
    modules = ModuleDecoder(module)
    layers = modules.inspect_layers()
    fused = fuse(module, layers, TorchOps(), 2048)
    assert fused is not None
    positions = probe_positions(module.config, 2048)
    assert float32_error(modules, fused, layers, positions) < 2e-5


def test_a_comparison_leaves_weights_dtypes_and_precision_as_they_were() -> None:
    module = create_module("qwen3", torch.bfloat16, ATTENTION_NAME)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    precision = torch.backends.cuda.matmul.fp32_precision
    decoder, _ = select_decoder(module, TorchOps(), 64)
    assert isinstance(decoder, FusedDecoder) and decoder.dtype == torch.bfloat16
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.backends.cuda.matmul.fp32_precision == precision


def test_a_model_may_read_its_layers_while_it_is_compared() -> None:
    """Models whose masks depend on a layer's kind do so."""
    module, kinds = llama(), list[str]()

    def read(base: Any, args: Any) -> None:
        kinds.extend(type(layer.self_attn).__name__ for layer in base.layers)

    module.model.register_forward_pre_hook(read)
    assert decoder_type(module) is FusedDecoder
    assert {*kinds} == {"LlamaAttention"}


class NaNOps(TorchOps):
    """Operations that return NaN in steps of some numbers of tokens."""

    def __init__(self, *counts: int) -> None:
        self._counts = counts

    def gate_up(self, x: Any, w: Any) -> Any:
        out = super().gate_up(x, w)
        return out * float("nan") if len(out) in self._counts else out


@pytest.mark.parametrize("counts", [(1,), (2,), tuple(range(3, 99))], ids=["one", "two", "many"])
def test_logits_that_are_not_finite_are_never_close_enough(counts: tuple[int, ...]) -> None:
    assert decoder_type(llama(), NaNOps(*counts)) is ModuleDecoder
    assert decoder_type(llama(), NaNOps()) is FusedDecoder


def test_a_model_whose_own_logits_are_not_finite_keeps_its_modules() -> None:
    module = llama()
    module.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    assert decoder_type(module) is ModuleDecoder


# Positions.


def test_a_probe_stands_on_both_sides_of_every_integer_of_the_configuration() -> None:
    rope = {**BETA, "original_max_position_embeddings": 700}
    config = hf.Qwen3Config(
        **SMALL, rope_parameters=rope, use_sliding_window=True, sliding_window=333
    )
    found = probe_positions(config, 1500)
    assert found == sorted(set(found)) and found[-1] == 1499
    assert {0, 1, 2, 332, 333, 334, 699, 700, 701, 1023 + 1, 1498} <= set(found)
    assert len(found) < 100
    assert probe_positions(config, 1) == [0]


@pytest.mark.parametrize("family", FUSABLE)
def test_a_probe_of_distant_positions_gives_what_a_whole_sequence_gives_there(family: str) -> None:
    """With a window of 20: tokens between those of a probe are outside of it."""
    module = create_module(family, torch.float64, ATTENTION_NAME)
    modules = ModuleDecoder(module)
    layers = modules.inspect_layers()
    fused = fuse(module, layers, TorchOps(), 2048)
    assert fused is not None
    assert logits_error(modules, fused, layers, probe_positions(module.config, 2048)) < 1e-6


def test_every_fusable_family_is_one_of_the_tests_families() -> None:
    assert set(FUSABLE) <= set(CONFIGS)
