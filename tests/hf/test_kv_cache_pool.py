"""PooledCache: callers of generate() share prefixes on one pool, and get the same bits as alone."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf import KVCachePool, PooledCache  # noqa: E402
from tests.hf.families import create_module_from_config  # noqa: E402
from tests.hf.tiny_configs import tiny_config  # noqa: E402

pytestmark = pytest.mark.torch
FAMILIES = ("llama", "qwen3", "gpt2")
BLOCK_SIZE = 4
PROMPT = list(range(5, 26))  # 21 tokens: five full blocks of four


@cache
def tiny_module(family: str) -> Any:
    torch.set_num_threads(1)
    return create_module_from_config(tiny_config(family), torch.float32, "sdpa")


def create_pool(module: Any, num_blocks: int = 64) -> Any:
    return KVCachePool(
        module.config, num_blocks=num_blocks, dtype=module.dtype, block_size=BLOCK_SIZE
    )


def generate(module: Any, ids: Any, cache: Any, count: int = 50, **options: Any) -> Any:
    """Return sequences and the logits that chose them."""
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return module.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=options.pop("do_sample", False),
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def dynamic_cache(module: Any, prefix: Any) -> Any:
    """Return a DynamicCache that is filled with the prefix, which may be empty."""
    filled = hf.DynamicCache(config=module.config)
    if prefix.shape[1]:
        with torch.inference_mode():
            module(prefix, past_key_values=filled, use_cache=True)
    return filled


def publish_prefix(pool: Any, module: Any, prefix: Any) -> None:
    """Publish the blocks of a prefix. They are computed as those of `dynamic_cache` are."""
    with PooledCache(pool, prefix) as cache, torch.inference_mode():
        module(prefix, past_key_values=cache, use_cache=True)
        cache.publish(prefix)


def largest_difference(ours: Any, theirs: Any) -> float:
    pairs = zip(ours.logits, theirs.logits, strict=True)
    return max(float((mine - other).abs().max()) for mine, other in pairs)


def check_all_free(pool: Any) -> None:
    assert pool.blocks.tables == {}
    assert pool.blocks.num_free_blocks == pool.blocks.num_blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_with_and_without_a_shared_prefix_equal_a_dynamic_cache(family: str) -> None:
    module = tiny_module(family)
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    first_20 = torch.tensor([PROMPT[:20]])
    with PooledCache(pool, first_20) as cache:
        ours = generate(module, first_20, cache)
        assert cache.num_shared_positions == 0
        cache.publish(ours.sequences)
    theirs = generate(module, first_20, dynamic_cache(module, ids[:, :0]))
    assert largest_difference(ours, theirs) == 0.0 and len(ours.logits) == 50

    with PooledCache(pool, ids) as cache:
        assert cache.num_shared_positions == cache.get_seq_length() == 20
        ours = generate(module, ids, cache)
    theirs = generate(module, ids, dynamic_cache(module, ids[:, :20]))
    assert largest_difference(ours, theirs) == 0.0 and len(ours.logits) == 50
    assert torch.equal(ours.sequences, theirs.sequences)
    check_all_free(pool)


def test_a_conversation_starts_on_the_published_output_and_computes_only_the_rest() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    with PooledCache(pool, ids) as cache:
        first = generate(module, ids, cache, count=10).sequences
        cache.publish(first)
    second = torch.cat([first, torch.tensor([[40, 41]])], dim=1)
    widths = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with PooledCache(pool, second) as cache:
        assert cache.num_shared_positions == 28  # 30 of 31 tokens are held: seven full blocks
        generate(module, second, cache, count=3)
    handle.remove()
    assert widths == [33 - 28, 1, 1]


def test_at_least_one_position_is_left_to_compute() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT[:8]])
    for num_shared in (0, 4):
        with PooledCache(pool, ids) as cache:
            assert cache.num_shared_positions == num_shared
            cache.publish(generate(module, ids, cache, count=4).sequences)


def test_interleaved_callers_equal_those_that_run_alone() -> None:
    """Both start on the same blocks, and each decodes one token in turn."""
    module = tiny_module("qwen3")
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    publish_prefix(pool, module, ids[:, :20])
    tails = ([40, 41, 42], [50])
    with PooledCache(pool, ids) as first, PooledCache(pool, ids) as second, torch.inference_mode():
        caches = (first, second)
        alone = [dynamic_cache(module, ids[:, :20]) for _ in tails]
        assert torch.equal(first.tables.block_ids, second.tables.block_ids)
        tokens = [torch.tensor([[PROMPT[20], *tail]]) for tail in tails]
        for _ in range(12):
            for index in (0, 1):
                ours, theirs = (
                    module(tokens[index], past_key_values=each[index], use_cache=True).logits
                    for each in (caches, alone)
                )
                assert torch.equal(ours, theirs)
                tokens[index] = ours[:, -1:].argmax(-1)
    check_all_free(pool)


def test_a_published_block_is_not_written_after_a_crop() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    with PooledCache(pool, ids) as cache, torch.inference_mode():
        module(ids, past_key_values=cache, use_cache=True)
        cache.publish(ids)
        published = cache.tables.block_ids[0].tolist()[:5]
        content = pool.kv_cache.data[:, published].clone()
        cache.crop(-11)  # 10 positions are left: half of the third block
        reference = dynamic_cache(module, ids)
        reference.crop(-11)
        other = torch.tensor([[60, 61, 62, 63, 64, 65, 66]])
        ours, theirs = (
            module(other, past_key_values=each, use_cache=True).logits
            for each in (cache, reference)
        )
        assert torch.equal(ours, theirs)
        assert cache.tables.block_ids[0, :2].tolist() == published[:2]
        assert not set(cache.tables.block_ids[0, 2:].tolist()) & set(published)
    assert torch.equal(pool.kv_cache.data[:, published], content)
    with PooledCache(pool, ids) as cache:
        assert cache.num_shared_positions == 20
    check_all_free(pool)


def test_a_layer_that_is_cropped_alone_does_not_write_to_a_published_block() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT[:20]])
    with PooledCache(pool, ids) as cache, torch.inference_mode():
        module(ids, past_key_values=cache, use_cache=True)
        cache.publish(ids)
        content = pool.kv_cache.data.clone()
        cache.layers[0].crop(-20)
        keys = torch.zeros(1, module.config.num_key_value_heads, 20, module.config.head_dim)
        with pytest.raises(AssertionError, match="block 0 is shared"):
            cache.update(keys, keys, 0)
        assert torch.equal(pool.kv_cache.data, content)


def test_beams_on_a_shared_prefix_are_those_on_a_dynamic_cache() -> None:
    module = tiny_module("gpt2")
    pool, ids = create_pool(module, 128), torch.tensor([PROMPT, [9, *PROMPT[1:]]])
    options = {"num_beams": 3, "num_return_sequences": 3}
    repeated = ids.repeat_interleave(3, dim=0)
    publish_prefix(pool, module, ids[:, :20])
    with PooledCache(pool, repeated) as cache:
        assert cache.num_shared_positions == 20
        ours = generate(module, ids, cache, count=20, **options)
        num_published = pool.blocks.num_published_blocks
        cache.publish(ours.sequences)  # beams are in another order here: prompts only
        assert pool.blocks.num_published_blocks == num_published
    reference = dynamic_cache(module, ids[:, :20])
    reference.batch_repeat_interleave(3)
    theirs = generate(module, ids, reference, count=20, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    check_all_free(pool)


def test_rows_of_a_batch_share_the_longest_prefix_of_all_and_select_repeats_without_a_copy() -> (
    None
):
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT, PROMPT[:8] + [90] * 13])
    publish_prefix(pool, module, ids[:1, :12])
    with PooledCache(pool, ids) as cache, torch.inference_mode():
        assert cache.num_shared_positions == 8
        reference = dynamic_cache(module, ids[:1, :12])
        reference.crop(-4)
        reference.batch_repeat_interleave(2)
        both = (cache, reference)
        tokens = ids[:, 8:]
        for change in (
            lambda each: each.batch_repeat_interleave(2),
            lambda each: each.batch_select_indices(torch.tensor([3, 0, 0])),
            lambda each: each.reorder_cache(torch.tensor([1, 2, 0])),
        ):
            ours, theirs = (
                module(tokens, past_key_values=each, use_cache=True).logits for each in both
            )
            assert torch.equal(ours, theirs)
            num_used = pool.blocks.num_used_blocks
            for each in both:
                change(each)
            assert pool.blocks.num_used_blocks <= num_used
            tokens = torch.arange(30, 30 + cache.tables.num_rows)[:, None]
    check_all_free(pool)


def test_after_a_reorder_the_prompts_are_published_for_the_rows_that_have_them() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT[:8], PROMPT[8:16]])
    with PooledCache(pool, ids) as cache:
        output = generate(module, ids, cache, count=6).sequences  # 13 of 14 tokens are held
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(InvalidConfig, match="sequences: 2 rows"):
            cache.publish(output)
        cache.publish(output.flip(0))
    assert pool.blocks.num_published_blocks == 4
    with PooledCache(pool, output) as cache:
        assert cache.num_shared_positions == 8
        reference = dynamic_cache(module, ids)
        theirs = generate(module, output, reference, count=4)
        ours = generate(module, output, cache, count=4)
        assert largest_difference(ours, theirs) == 0.0
        cache.reorder_cache(torch.tensor([0, 1]))
        cache.publish(ours.sequences)  # the order is the same: 17 tokens are held
    assert pool.blocks.num_published_blocks == 8


def test_padding_is_shared_only_with_equal_padding() -> None:
    module = tiny_module("llama")
    pool = create_pool(module)
    ids = torch.tensor([[0] * 4 + PROMPT])
    mask = (torch.arange(25) >= 4).long()[None]
    with PooledCache(pool, ids, mask) as cache:
        output = generate(module, ids, cache, count=4, attention_mask=mask)
        cache.publish(output.sequences)
    with PooledCache(pool, ids, mask) as cache:
        assert cache.num_shared_positions == 24
    with PooledCache(pool, ids, torch.ones_like(ids)) as cache:
        assert cache.num_shared_positions == 0
    with pytest.raises(InvalidConfig, match="attention_mask: missing, and the ids contain the pad"):
        PooledCache(pool, ids)
    with pytest.raises(InvalidConfig, match=r"attention_mask: shape \(1, 24\)"):
        PooledCache(pool, ids, mask[:, 1:])
    check_all_free(pool)


def test_salts_share_nothing() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    for salt, num_shared in (("a", 0), ("b", 0), ("", 0), ("a", 20)):
        with PooledCache(pool, ids, salt=salt) as cache:
            assert cache.num_shared_positions == num_shared
            cache.publish(generate(module, ids, cache, count=1).sequences)


def test_out_of_blocks_is_an_error_with_a_remedy_and_leaks_nothing() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module, num_blocks=12), torch.tensor([PROMPT])
    with PooledCache(pool, ids) as first:
        output = generate(module, ids, first, count=4).sequences
        with (
            pytest.raises(InvalidConfig, match=r"num_blocks: 1 more .* 0 of 12 free. Close other"),
            PooledCache(pool, ids + 50) as second,
        ):
            generate(module, ids + 50, second)
        assert pool.blocks.num_used_blocks == 6
        two = torch.cat([ids, ids]) + 60
        with PooledCache(pool, two) as third:
            with pytest.raises(InvalidConfig, match="num_blocks: 6 more blocks needed"):
                generate(module, two, third, count=1)
            assert pool.blocks.num_used_blocks == 6 and third.get_seq_length() == 0
        more = generate(module, output, first, count=3).sequences  # the others took nothing
        assert torch.equal(
            more, generate(module, output, dynamic_cache(module, ids[:, :0]), count=3).sequences
        )
    check_all_free(pool)


def test_an_error_inside_generate_frees_the_blocks_at_the_end() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    calls = []

    def fail(*_: Any) -> None:
        calls.append(pool.blocks.num_used_blocks)
        if len(calls) == 4:
            raise RuntimeError("planted")

    handle = module.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"), PooledCache(pool, ids) as cache:
        generate(module, ids, cache)
    handle.remove()
    assert calls == [6, 6, 6, 6]
    check_all_free(pool)
    with pytest.raises(InvalidConfig, match="past_key_values: the cache is closed"):
        generate(module, ids, cache)
    with pytest.raises(InvalidConfig, match="past_key_values: the cache is closed"):
        cache.publish(ids)
    check_all_free(pool)


def test_calls_that_would_compute_or_publish_other_tokens_are_refused() -> None:
    module = tiny_module("llama")
    pool, ids = create_pool(module), torch.tensor([PROMPT])
    with PooledCache(pool, ids) as cache:
        output = generate(module, ids, cache, count=8).sequences
        with pytest.raises(InvalidConfig, match="sequences: 1 rows that do not begin with the 1"):
            cache.publish(output + 1)
        cache.publish(output)
    with (
        PooledCache(pool, ids) as cache,
        pytest.raises(InvalidConfig, match=r"input_ids: .* positions after 20 shared ones"),
    ):
        # Assisted generation of transformers passes the whole prompt to a filled cache.
        generate(module, ids, cache, prompt_lookup_num_tokens=3)
    for prompt in (ids, ids + 50):  # with a shared prefix, and without
        with (
            PooledCache(pool, prompt) as cache,
            pytest.raises(InvalidConfig, match=r"input_ids: 3 rows .* was opened with 1. Open it"),
        ):
            generate(module, prompt, cache, num_beams=3)
    with pytest.raises(InvalidConfig, match=r"input_ids: shape \(21,\)"):
        PooledCache(pool, ids[0])
    with pytest.raises(InvalidConfig, match="num_blocks: 0 is not a positive"):
        create_pool(module, num_blocks=0)
    check_all_free(pool)


Block = tuple[bytes | None, tuple[int, ...]]
"""Hash and tokens of a published block."""


class Caller:
    """A PooledCache, what each row should hold, and what is left to compute of its prompt."""

    def __init__(self, pool: Any, prompts: list[list[int]]) -> None:
        self.cache = PooledCache(pool, torch.tensor(prompts))
        self.rows = [row[: self.cache.num_shared_positions] for row in prompts]
        self.rest = [row[self.cache.num_shared_positions :] for row in prompts]

    def write(self, rows: list[list[int]]) -> None:
        """Append these tokens; keys are the tokens, values the tokens and their layer."""
        tokens = torch.tensor(rows, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, 16)
        for index in range(4):
            self.cache.update(tokens, tokens + 1000 * index, index)
        self.rows = [old + new for old, new in zip(self.rows, rows, strict=True)]

    def check_content(self) -> None:
        data = self.cache.pool.kv_cache
        if not self.rows[0]:
            return
        blocks = self.cache.tables.block_ids
        for index in range(4):
            for each, offset in ((data.keys[index], 0), (data.values[index], 1000 * index)):
                held = each[blocks].flatten(1, 2)[:, : len(self.rows[0]), 0, 0]
                assert (held - offset).int().tolist() == self.rows


def check_pool(pool: Any, callers: list[Caller], published: dict[int, Block]) -> None:
    """References are those of the tables, and published blocks have the content they had."""
    counts = [0] * pool.blocks.num_blocks
    for caller in callers:
        caller.check_content()
        if caller.rows[0]:
            for block in caller.cache.tables.block_ids.flatten().tolist():
                counts[block] += 1
    assert counts == [pool.blocks.ref_count(block) for block in range(len(counts))]
    for block in list(published):
        if pool.blocks.hash_of(block) != published[block][0]:
            del published[block]  # evicted
    for block, (_, tokens) in published.items():
        assert tuple(pool.kv_cache.keys[0][block, :, 0, 0].int().tolist()) == tokens


def choose_action(dice: random.Random, caller: Caller, num_actions: list[int]) -> None:
    """Append, crop, select rows, reset or publish."""
    action = dice.choice("aaacsrp")
    num_actions["acsrp".index(action)] += 1
    length = len(caller.rows[0])
    if action == "a":
        if len(caller.rest[0]) and len(caller.rest) == len(caller.rows):
            rows, caller.rest = caller.rest, [[]]
        else:
            count = dice.randint(1, 6)
            rows = [[dice.randint(1, 9) for _ in range(count)] for _ in caller.rows]
        caller.write(rows)
    elif action == "c" and length:
        count = dice.randint(0, length)
        caller.cache.crop(-count)
        caller.rows = [row[: length - count] for row in caller.rows]
    elif action == "s" and length:
        picked = [dice.randrange(len(caller.rows)) for _ in range(dice.randint(1, 4))]
        caller.cache.batch_select_indices(torch.tensor(picked))
        caller.rows = [caller.rows[index] for index in picked]
    elif action == "r":
        caller.cache.reset()
        caller.rows = [[] for _ in caller.rows]


@pytest.mark.parametrize("seed", range(6))
def test_random_callers_keep_the_counts_of_a_model_and_the_content_of_their_rows(seed: int) -> None:
    dice = random.Random(seed)
    config = hf.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4
    )
    pool = KVCachePool(config, num_blocks=16, dtype=torch.float32, block_size=BLOCK_SIZE)
    prompts = [[dice.randint(1, 2) for _ in range(length)] for length in (5, 9, 9, 13)]
    callers: list[Caller] = []
    published: dict[int, Block] = {}
    num_actions, num_refused, num_shared = [0] * 5, 0, 0
    for _ in range(400):
        if not callers or (len(callers) < 4 and dice.random() < 0.2):
            callers.append(Caller(pool, [dice.choice(prompts)] * dice.randint(1, 3)))
            num_shared += callers[-1].cache.num_shared_positions
        caller = dice.choice(callers)
        before = [list(row) for row in caller.rows], [list(row) for row in caller.rest]
        try:
            choose_action(dice, caller, num_actions)
        except InvalidConfig as error:
            # The other one is a write that may be the whole prompt again.
            assert error.option == "num_blocks" or "shared ones, of prompts" in str(error)
            num_refused += error.option == "num_blocks"
            for layer in caller.cache.layers:
                assert layer.get_seq_length() == len(before[0][0])
            caller.rows, caller.rest = before
        publish_known(caller, published)
        if dice.random() < 0.15 or pool.blocks.num_free_blocks == 0:
            caller.cache.close()
            callers.remove(caller)
        check_pool(pool, callers, published)
    for caller in callers:
        caller.cache.close()
    check_all_free(pool)
    assert min(num_actions) > 10 and num_refused and num_shared
    assert pool.blocks.num_copies and pool.blocks.num_evictions


def publish_known(caller: Caller, published: dict[int, Block]) -> None:
    """Publish what the rows hold, and note the content of each block that has a hash then."""
    with_prompts = torch.tensor(caller.rows)
    try:
        caller.cache.publish(with_prompts)
    except InvalidConfig:
        return  # cropped below the prompt, or reset
    blocks = caller.cache.pool.blocks
    for row, ids in zip(caller.rows, caller.cache.tables.block_ids.tolist(), strict=True):
        for index, block in enumerate(ids[: len(row) // BLOCK_SIZE]):
            if blocks.hash_of(block) is not None:
                tokens = tuple(row[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                published[block] = blocks.hash_of(block), tokens
