"""Decoders: logits over pages are those of transformers, for eight families and ragged batches."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.arithmetic import TorchOps  # noqa: E402
from forge.models.hf.attention import Rows, Span, TorchAttention  # noqa: E402
from forge.models.hf.decoder import ATTENTION, ModuleDecoder, PagedStep, register  # noqa: E402
from forge.models.hf.fused import fuse  # noqa: E402
from forge.models.hf.open import decoder_of, distance  # noqa: E402
from forge.models.hf.pool import KVPool, KVShape  # noqa: E402
from tests.families import CONFIGS, FAMILIES, module_of  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000)
FUSABLE = ("llama", "qwen2", "qwen3", "mistral", "phi3")


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register()


def paged_logits(decoder: Any, layers: Any, prompts: list[Any], dtype: Any, split: int) -> Any:
    """Logits of every position of every prompt, in one ragged step or in two.

    split   positions of each prompt that an earlier step computes
    """
    shape = KVShape(len(layers), layers[0].num_kv_heads, layers[0].head_dim, dtype)
    needed = [-(-len(prompt) // 16) for prompt in prompts]
    pool = KVPool(
        shape,
        num_blocks=sum(needed),
        block_size=16,
        num_slots=len(prompts),
        max_model_len=1024,
        device=CPU,
    )
    blocks = torch.randperm(pool.capacity, generator=torch.Generator().manual_seed(5)).int()
    for slot, count in enumerate(needed):
        pool.tables[slot, :count], blocks = blocks[:count], blocks[count:]
    attention = TorchAttention(pool, layers)
    parts: dict[int, list[Any]] = {slot: [] for slot in range(len(prompts))}
    for low, high in ((0, split), (split, 1024)):
        spans, first = [], 0
        for slot, prompt in enumerate(prompts):
            start, end = min(low, len(prompt)), min(high, len(prompt))
            if start < end:
                spans.append(Span(slot, start, end, first))
                first += end - start
        if not spans:
            continue
        ids = torch.cat([prompts[s.slot][s.start : s.end] for s in spans]).int()
        positions = torch.cat([torch.arange(s.start, s.end) for s in spans]).int()
        slots = torch.cat([torch.full((s.end - s.start,), s.slot) for s in spans]).int()
        none = slots[:0]
        attention.begin(Rows(spans, 0, none, none))
        step = PagedStep(pool, attention, pool.places(slots, positions))
        with torch.inference_mode():
            logits = decoder.logits(decoder.hidden(ids, positions, step))
        for span in spans:
            parts[span.slot].append(logits[span.first : span.first + span.end - span.start])
    return [torch.cat(parts[slot]) for slot in range(len(prompts))]


def prompts_of(lengths: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 307, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("split", [0, 40], ids=["whole", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_ragged_batches_are_those_of_transformers(family: str, split: int) -> None:
    reference = module_of(family, torch.float32)
    decoder, layers = decoder_of(module_of(family, torch.float32, ATTENTION), TorchOps(), 1024)
    prompts = prompts_of(LENGTHS)
    for prompt, mine in zip(
        prompts, paged_logits(decoder, layers, prompts, torch.float32, split), strict=True
    ):
        with torch.inference_mode():
            theirs = reference(prompt[None], use_cache=False).logits[0]
        assert theirs.std() > 0.5  # logits all alike would be equal whatever the context
        assert (mine - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_known_structure_are_fused_and_others_are_not(family: str) -> None:
    module = module_of(family, torch.float64, ATTENTION)
    modules = ModuleDecoder(module)
    layers = modules.survey()
    fused = fuse(module, layers, TorchOps(), 1024)
    assert (fused is not None) == (family in FUSABLE)
    if fused is not None:
        assert distance(modules, fused, layers, module) < 1e-6


def test_fusing_keeps_the_modules_at_work_on_the_same_memory() -> None:
    module = module_of("qwen3", torch.float32, ATTENTION)
    layers = ModuleDecoder(module).survey()
    fuse(module, layers, TorchOps(), 1024)
    attention = module.model.layers[0].self_attn
    stacked = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == stacked


def test_a_model_that_looks_like_llama_and_computes_otherwise_is_not_fused() -> None:
    """Granite has Llama's parts and multiplies between them."""
    import transformers as hf

    from tests.families import SMALL

    config = hf.GraniteConfig(**SMALL, residual_multiplier=0.5, embedding_multiplier=2.0)
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config).eval()
    decoder, _ = decoder_of(module, TorchOps(), 1024)
    assert isinstance(decoder, ModuleDecoder)


def test_windows_and_soft_caps_are_surveyed_per_layer() -> None:
    layers = ModuleDecoder(module_of("gemma2", torch.float32, ATTENTION)).survey()
    assert [(spec.window, spec.softcap) for spec in layers] == [(20, 50.0), (0, 50.0), (20, 50.0)]


def test_attention_that_the_kernels_do_not_know_is_refused_by_name() -> None:
    import transformers as hf

    from tests.families import SMALL

    config = hf.GptOssConfig(**SMALL, num_local_experts=2, head_dim=16)
    config._attn_implementation = ATTENTION
    module = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InvalidConfig, match="s_aux"):
        ModuleDecoder(module).survey()


def test_every_family_is_tested_with_a_config_of_its_own() -> None:
    assert len({type(make()).__name__ for make in CONFIGS.values()}) == len(FAMILIES) == 8
