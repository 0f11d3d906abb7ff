"""Decoders: logits over the paged cache are transformers', for eight families and any batch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.attention.interface import AttentionMetadata, RowSpan  # noqa: E402
from forge.models.hf.attention.reference import TorchAttention  # noqa: E402
from forge.models.hf.decoders.comparison import logits_error  # noqa: E402
from forge.models.hf.decoders.fused_decoder import fuse  # noqa: E402
from forge.models.hf.decoders.interface import ForwardContext  # noqa: E402
from forge.models.hf.decoders.module_decoder import (  # noqa: E402
    ATTENTION_NAME,
    NO_WINDOW,
    ModuleDecoder,
    read_window,
    register_attention,
    window_mask,
)
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from tests.hf.families import CONFIGS, FAMILIES, SMALL, create_module, create_module_from_config  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000)
FUSABLE = ("llama", "qwen2", "qwen3", "mistral", "phi3")


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


def paged_logits(decoder: Any, layers: Any, prompts: list[Any], dtype: Any, split: int) -> Any:
    """Return logits of every position of every prompt, in one step or in two.

    split   positions of each prompt that an earlier step computes
    """
    shape = KVCacheSpec(len(layers), layers[0].num_kv_heads, layers[0].head_dim, dtype)
    needed = [-(-len(prompt) // 16) for prompt in prompts]
    pool = KVCache(
        shape,
        num_blocks=sum(needed),
        block_size=16,
        num_slots=len(prompts),
        max_model_len=1024,
        device=CPU,
    )
    blocks = torch.randperm(pool.max_num_blocks, generator=torch.Generator().manual_seed(5)).int()
    for slot, count in enumerate(needed):
        pool.block_tables[slot, :count], blocks = blocks[:count], blocks[count:]
    attention = TorchAttention(pool, layers)
    parts: dict[int, list[Any]] = {slot: [] for slot in range(len(prompts))}
    for low, high in ((0, split), (split, 1024)):
        spans, first = [], 0
        for slot, prompt in enumerate(prompts):
            start, end = min(low, len(prompt)), min(high, len(prompt))
            if start < end:
                spans.append(RowSpan(slot, start, end, first))
                first += end - start
        if not spans:
            continue
        ids = torch.cat([prompts[s.slot][s.start : s.end] for s in spans]).int()
        positions = torch.cat([torch.arange(s.start, s.end) for s in spans]).int()
        slots = torch.cat([torch.full((s.end - s.start,), s.slot) for s in spans]).int()
        none = slots[:0]
        attention.plan(AttentionMetadata(spans, 0, none, none))
        step = ForwardContext(pool, attention, pool.slot_mapping(slots, positions))
        with torch.inference_mode():
            logits = decoder.compute_logits(decoder.forward(ids, positions, step))
        for span in spans:
            parts[span.slot].append(
                logits[span.first_token : span.first_token + span.end - span.start]
            )
    return [torch.cat(parts[slot]) for slot in range(len(prompts))]


def prompts_of(lengths: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 307, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("split", [0, 40], ids=["whole", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_ragged_batches_are_those_of_transformers(family: str, split: int) -> None:
    reference = create_module(family, torch.float32)
    decoder, layers = select_decoder(
        create_module(family, torch.float32, ATTENTION_NAME), TorchOps(), 1024
    )
    prompts = prompts_of(LENGTHS)
    for prompt, mine in zip(
        prompts, paged_logits(decoder, layers, prompts, torch.float32, split), strict=True
    ):
        with torch.inference_mode():
            theirs = reference(prompt[None], use_cache=False).logits[0]
        assert theirs.std() > 0.5  # Equal logits would agree whatever the context.
        assert (mine - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_known_structure_are_fused_and_others_are_not(family: str) -> None:
    module = create_module(family, torch.float64, ATTENTION_NAME)
    modules = ModuleDecoder(module)
    layers = modules.inspect_layers()
    fused = fuse(module, layers, TorchOps(), 1024)
    assert (fused is not None) == (family in FUSABLE)
    if fused is not None:
        assert logits_error(modules, fused, layers, range(24)) < 1e-6


def test_fusing_keeps_the_modules_at_work_on_the_same_memory() -> None:
    module = create_module("qwen3", torch.float32, ATTENTION_NAME)
    layers = ModuleDecoder(module).inspect_layers()
    fuse(module, layers, TorchOps(), 1024)
    attention = module.model.layers[0].self_attn
    stacked = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == stacked


def test_a_model_that_looks_like_llama_and_computes_otherwise_is_not_fused() -> None:
    """Granite has Llama's parts and multiplies between them."""
    config = hf.GraniteConfig(**SMALL, residual_multiplier=0.5, embedding_multiplier=2.0)
    decoder, _ = select_decoder(create_tiny(config), TorchOps(), 1024)
    assert isinstance(decoder, ModuleDecoder)


def test_windows_and_soft_caps_are_surveyed_per_layer() -> None:
    layers = ModuleDecoder(create_module("gemma2", torch.float32, ATTENTION_NAME)).inspect_layers()
    assert [(spec.window, spec.softcap) for spec in layers] == [(20, 50.0), (0, 50.0), (20, 50.0)]


def create_tiny(config: Any, attention: str = ATTENTION_NAME) -> Any:
    """Return a random model of a class in no other test; see families.py for its weights."""
    return create_module_from_config(config, torch.float32, attention)


def refusal(config: Any) -> str:
    with pytest.raises(InvalidConfig) as caught:
        ModuleDecoder(create_tiny(config)).inspect_layers()
    assert caught.value.option == "model"
    return str(caught.value)


def test_attention_that_the_kernels_do_not_know_is_refused_by_name() -> None:
    assert "s_aux" in refusal(hf.GptOssConfig(**SMALL, num_local_experts=2, head_dim=16))


def test_a_layer_that_attends_twice_is_refused() -> None:
    """Its second keys would be written over its first."""
    assert "layer 0 attends twice" in refusal(hf.DiffLlamaConfig(**SMALL))


def test_a_model_that_fails_with_the_paged_cache_is_refused_by_name_and_with_the_reason() -> None:
    assert "layer 0 does not pass keyword arguments on" in refusal(hf.NemotronConfig(**SMALL))
    module = create_tiny(hf.LlamaConfig(**SMALL))
    module.model.layers[2].mlp = torch.nn.Linear(7, 7)
    with pytest.raises(
        InvalidConfig, match=r"LlamaForCausalLM fails over pages \(RuntimeError: mat"
    ):
        ModuleDecoder(module).inspect_layers()


def test_a_head_that_cannot_be_called_is_refused_before_a_request_meets_it() -> None:
    module = create_tiny(hf.LlamaConfig(**SMALL))
    module.lm_head = torch.nn.Linear(7, 7)
    with pytest.raises(InvalidConfig, match="LlamaForCausalLM fails over pages"):
        ModuleDecoder(module).inspect_layers()


def test_the_survey_leaves_the_modules_attention_as_it_was() -> None:
    for config in (hf.LlamaConfig(**SMALL), hf.NemotronConfig(**SMALL)):
        module = create_tiny(config)
        with suppress(InvalidConfig):
            ModuleDecoder(module).inspect_layers()
        used = {
            part.config._attn_implementation for part in module.modules() if hasattr(part, "config")
        }
        assert used == {ATTENTION_NAME}


UNUSUAL_CONFIGS: dict[str, Any] = {
    "queries scaled by position": hf.Ministral3Config(
        **SMALL,
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.5},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "original_max_position_embeddings": 16,
        },
    ),
    "layers without rotation": hf.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "a call without its window": hf.PhimoeConfig(**SMALL, sliding_window=9, num_local_experts=2),
    "windows of some layers, in no call": hf.Qwen2MoeConfig(
        **SMALL,
        **{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "a head that calls a part of the model": hf.OPTConfig(
        vocab_size=307, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=512, word_embed_proj_dim=64, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
"""Models that compute more than the eight families, or pass less on to their attention."""


@pytest.mark.parametrize("kind", UNUSUAL_CONFIGS)
def test_modules_of_other_habits_give_the_logits_of_transformers(kind: str) -> None:
    reference = create_tiny(UNUSUAL_CONFIGS[kind], "eager")
    decoder, layers = select_decoder(create_tiny(UNUSUAL_CONFIGS[kind]), TorchOps(), 1024)
    prompts = prompts_of((1, 7, 40))
    for prompt, mine in zip(
        prompts, paged_logits(decoder, layers, prompts, torch.float32, 20), strict=True
    ):
        with torch.inference_mode():
            theirs = reference(prompt[None], use_cache=False).logits[0]
        assert theirs.std() > 0.5
        assert (mine - theirs).abs().max() <= 1e-4


def window_of_mask(mask_function: Any) -> int:
    mask = window_mask(1, 2, 2, mask_function, CPU)
    assert mask.shape == (1, 1, 2, 2)
    return read_window(mask)


def test_a_window_is_read_off_the_mask_that_a_layer_is_given() -> None:
    assert window_of_mask(causal_mask_function) == 0
    assert window_of_mask(sliding_window_causal_mask_function(9)) == 9
    assert window_of_mask(sliding_window_causal_mask_function(1)) == 1
    left = torch.zeros(1, dtype=torch.int64)
    assert window_of_mask(chunked_causal_mask_function(8, left)) == NO_WINDOW
    assert window_of_mask(bidirectional_mask_function) == NO_WINDOW
    first_too = or_masks(sliding_window_causal_mask_function(9), lambda b, h, q, k: k == 0)
    assert window_of_mask(first_too) == NO_WINDOW
    later_too = or_masks(sliding_window_causal_mask_function(9), lambda b, h, q, k: k == q + 1)
    assert window_of_mask(later_too) == NO_WINDOW


def test_a_mask_that_changes_on_its_way_to_a_layer_is_no_window() -> None:
    mask = window_mask(1, 2, 2, sliding_window_causal_mask_function(9), CPU)
    assert read_window(mask[:, :, :1]) == 9
    for changed in (mask.bool(), mask.float(), mask + torch.eye(2, dtype=torch.int64), object()):
        assert read_window(changed) == NO_WINDOW


def test_a_call_whose_window_is_not_its_masks_is_refused() -> None:
    module = create_tiny(hf.MistralConfig(**SMALL, sliding_window=9))
    module.model.layers[1].self_attn.config = hf.MistralConfig(**SMALL, sliding_window=8)
    module.model.layers[1].self_attn.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(InvalidConfig, match="layer 1 attends with window 8 and a mask of window 9"):
        ModuleDecoder(module).inspect_layers()


def test_a_window_longer_than_any_text_is_none() -> None:
    layers = ModuleDecoder(
        create_tiny(hf.MistralConfig(**SMALL, sliding_window=2**31 - 1))
    ).inspect_layers()
    assert {layer.window for layer in layers} == {0}


def test_every_family_is_tested_with_a_separate_config() -> None:
    assert len({type(make()).__name__ for make in CONFIGS.values()}) == len(FAMILIES) == 8
