"""Blocks and tables: what is written at a position is read there, whatever block it is in."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from forge.seam import BlockCopy  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def pool_of(*, head_dim: int = 4, layers: int = 2, blocks: int = 6) -> KVCache:
    """Return blocks of four positions for three slots of up to 14: tables of four blocks."""
    return KVCache(
        KVCacheSpec(layers, 2, head_dim, torch.float32),
        num_blocks=blocks,
        block_size=4,
        num_slots=3,
        max_model_len=14,
        device=CPU,
    )


def draw(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_token_costs_keys_and_values_of_every_layer_and_head_in_bytes():
    assert KVCacheSpec(36, 8, 128, torch.bfloat16).bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert KVCacheSpec(2, 1, 64, torch.float64).bytes_per_token == 2 * 2 * 64 * 8


def test_there_is_one_scratch_block_and_one_scratch_table():
    pool = pool_of()
    assert pool.max_num_blocks == 6
    assert [pages.shape for pages in (*pool.keys, *pool.values)] == [(7, 4, 2, 4)] * 4
    assert pool.block_tables.shape == (4, 4)


def test_every_table_starts_at_the_scratch_block_and_the_scratch_slot_is_the_last():
    pool = pool_of()
    assert pool.scratch_slot == 3
    assert pool.block_tables.unique().tolist() == [6]


def test_a_position_is_stored_in_its_block_at_its_offset():
    pool = pool_of()
    pool.block_tables[1, :3] = torch.tensor([5, 0, 2])
    slots = torch.tensor([1, 1, 1, 1, 3])
    positions = torch.tensor([0, 3, 4, 10, 1], dtype=torch.int32)
    where = pool.slot_mapping(slots, positions)
    assert where.tolist() == [5 * 4, 5 * 4 + 3, 0, 2 * 4 + 2, 6 * 4 + 1]
    assert where.dtype == torch.int32


@pytest.mark.parametrize("head_dim", [4, 3], ids=["whole", "padded"])
def test_what_is_written_is_gathered_and_padding_stays_zero(head_dim: int):
    pool = pool_of(head_dim=4)
    pool.block_tables[2, :3] = torch.tensor([4, 1, 3])
    positions = torch.arange(10)
    keys, values = draw(1, 10, 2, head_dim), draw(2, 10, 2, head_dim)
    where = pool.slot_mapping(torch.full((10,), 2), positions)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    pool.write(1, keys[order], values[order], where[order])
    got = pool.gather(1, 2, 10)
    assert [part.shape for part in got] == [(10, 2, 4)] * 2
    for part, written in zip(got, (keys, values), strict=True):
        assert torch.equal(part[..., :head_dim], written)
        assert not part[..., head_dim:].any()
    assert not pool.data[0].any(), "another layer was written"


def test_only_the_requested_positions_are_gathered():
    pool = pool_of()
    pool.block_tables[0, :2] = torch.tensor([1, 0])
    keys = draw(1, 8, 2, 4)
    pool.write(0, keys, keys, pool.slot_mapping(torch.zeros(8, dtype=torch.int64), torch.arange(8)))
    for end in (1, 4, 5, 8):
        assert torch.equal(pool.gather(0, 0, end)[0], keys[:end])


def test_padding_rows_write_to_the_scratch_block_only():
    pool = pool_of()
    pool.block_tables[0] = torch.tensor([0, 1, 2, 3])
    ones = torch.ones(3, 2, 4)
    where = pool.slot_mapping(torch.full((3,), pool.scratch_slot), torch.tensor([0, 5, 13]))
    pool.write(0, ones, ones, where)
    assert not pool.data[:, :6].any()
    assert pool.data[0, 6].any()


def test_a_copy_takes_keys_and_values_of_every_layer():
    pool = pool_of()
    pool.data.copy_(draw(1, *pool.data.shape))
    source, others = pool.data[:, 2].clone(), pool.data[:, [0, 1, 3, 4, 6]].clone()
    pool.copy_blocks([BlockCopy(2, 5)])
    assert torch.equal(pool.data[:, 5], source)
    assert torch.equal(pool.data[:, 2], source)
    assert torch.equal(pool.data[:, [0, 1, 3, 4, 6]], others)


def test_copies_happen_in_order():
    """0 goes to 1 and from there to 2; what 1 held before goes nowhere."""
    pool = pool_of()
    pool.data.copy_(torch.arange(7.0).view(1, 7, 1, 1, 1, 1).expand(pool.data.shape))
    pool.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(5, 0)])
    assert pool.values[1][:, 3, 1, 2].tolist() == [5, 0, 0, 3, 4, 5, 6]


def test_a_plan_with_fewer_blocks_runs_and_others_are_refused_with_the_remedy():
    pool = pool_of()
    pool.check_plan(6, 4)
    pool.check_plan(3, 4)
    with pytest.raises(InvalidConfig, match="7 blocks, and there is memory for 6") as refused:
        pool.check_plan(7, 4)
    assert refused.value.option == "num_blocks"
    with pytest.raises(InvalidConfig, match="4 positions a block, the engine 8") as refused:
        pool.check_plan(6, 8)
    assert refused.value.option == "block_size"
