"""PagedCache: generate() of transformers gives the same bits on the paged cache as on its own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf import PagedCache  # noqa: E402
from tests.hf.families import create_module  # noqa: E402

pytestmark = pytest.mark.torch
FULL = ("llama", "qwen2", "qwen3", "phi3", "gpt2", "olmo2")


def create_cache(module: Any, rows: int, length: int) -> Any:
    return PagedCache(
        module.config, max_batch_size=rows, max_length=length, dtype=module.dtype, block_size=4
    )


def generate(module: Any, ids: Any, cache: Any, count: int = 24, **options: Any) -> Any:
    """Return tokens and the logits that chose them."""
    torch.set_num_threads(1)
    mask = (ids != 0).long()
    return module.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def prompts(*rows: list[int]) -> Any:
    """Return rows padded on the left with token 0."""
    most = max(map(len, rows))
    return torch.tensor([[0] * (most - len(row)) + row for row in rows])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FULL)
def test_logits_are_equal_bit_by_bit_to_those_on_a_dynamic_cache(
    family: str, attention: str
) -> None:
    module = create_module(family, torch.float32, attention)
    ids = prompts([5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15])
    mine = generate(module, ids, create_cache(module, 3, 40), do_sample=False)
    theirs = generate(module, ids, hf.DynamicCache(config=module.config), do_sample=False)
    assert torch.equal(mine.sequences, theirs.sequences)
    for ours, other in zip(mine.logits, theirs.logits, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_largest_difference_of_fifty_steps_from_a_dynamic_cache_is_zero(family: str) -> None:
    module = create_module(family, torch.float32)
    ids = prompts([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])
    mine = generate(module, ids, create_cache(module, 2, 60), 50, do_sample=False)
    theirs = generate(module, ids, hf.DynamicCache(config=module.config), 50, do_sample=False)
    pairs = zip(mine.logits, theirs.logits, strict=True)
    differences = [float((ours - other).abs().max()) for ours, other in pairs]
    assert len(differences) == 50 and max(differences) == 0.0
    assert torch.equal(mine.sequences, theirs.sequences)


def test_blocks_of_one_row_are_not_adjacent() -> None:
    module = create_module("llama", torch.float32)
    cache = create_cache(module, 3, 40)
    generate(module, prompts([5, 6], [7, 8], [9, 10]), cache, do_sample=False)
    assert cache.get_seq_length() == 25
    assert cache.tables.block_ids[1, :3].tolist() == [1, 4, 7]


def test_beams_are_reordered_as_on_a_dynamic_cache() -> None:
    module = create_module("qwen3", torch.float32)
    ids = prompts([5, 6, 7, 8], [9, 10])
    options = {"num_beams": 3, "do_sample": False}
    mine = generate(module, ids, create_cache(module, 6, 40), **options)
    theirs = generate(module, ids, hf.DynamicCache(config=module.config), **options)
    assert torch.equal(mine.sequences, theirs.sequences)


def test_a_cropped_cache_goes_on_from_the_length_that_is_left() -> None:
    module = create_module("llama", torch.float32)
    first, second = create_cache(module, 1, 32), create_cache(module, 1, 32)
    with torch.inference_mode():
        module(torch.tensor([[5, 6, 7, 8, 9]]), past_key_values=first, use_cache=True)
        for layer in first.layers:
            layer.crop(-2)
        module(torch.tensor([[5, 6, 7]]), past_key_values=second, use_cache=True)
        after = [
            module(torch.tensor([[11]]), past_key_values=cache, use_cache=True).logits
            for cache in (first, second)
        ]
    assert first.get_seq_length() == second.get_seq_length() == 4
    assert torch.allclose(after[0], after[1], atol=1e-5)


def test_more_than_there_is_room_for_is_refused_by_name() -> None:
    module = create_module("llama", torch.float32)
    with pytest.raises(InvalidConfig, match="max_length: 9 requested of a cache for 8"):
        generate(module, prompts([5, 6]), create_cache(module, 1, 8), do_sample=False)
    with pytest.raises(InvalidConfig, match="max_batch_size: 2 requested of a cache for 1"):
        generate(module, prompts([5], [6]), create_cache(module, 1, 40), do_sample=False)
    cache = create_cache(module, 2, 40)
    generate(module, prompts([5, 6]), cache, do_sample=False)
    with pytest.raises(InvalidConfig, match="input_ids: 2 rows for a cache that holds 1"):
        module(prompts([7], [8]), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (hf.DeepseekV3Config, "deepseek_v3 has latent attention"),
        (hf.MambaConfig, "mamba has layers with a state"),
        (hf.Qwen3NextConfig, "qwen3_next has layers with a state"),
        (hf.Gemma3nTextConfig, "gemma3n_text has layers that share keys and values"),
        (hf.Gemma4TextConfig, "the layers of gemma4_text have keys of several shapes"),
    ],
)
def test_a_model_whose_layers_the_blocks_do_not_hold_is_refused_when_the_cache_is_created(
    config: Any, problem: str
) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        PagedCache(config(), max_batch_size=1, max_length=4, dtype=torch.float32)


def test_keys_of_another_shape_than_the_configuration_gives_are_refused() -> None:
    cache = create_cache(create_module("llama", torch.float32), 1, 8)
    keys = torch.zeros(1, 2, 1, 16)
    cache.update(keys, keys, 0)
    with pytest.raises(InvalidConfig, match=r"layer 1 has keys of 2x16 and values of 2x8, and"):
        cache.update(keys, keys[..., :8], 1)
