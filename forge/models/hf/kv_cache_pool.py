"""KVCachePool: blocks of one model that several caches share, and the block tables of their rows.

Owns a KVCache and the BlockPool that counts, hashes and evicts its blocks. Of transformers it
reads configurations alone.
The rows of one cache have equal lengths, and so equally many blocks.

    RowTables of caller A   [0 1 4]   [0 1 6]     blocks 0 and 1: the same prompt, published
    RowTables of caller B   [0 1 7]               shares them, and computes the rest
    cached                  3 5                   in no table; found by hash until evicted

Always true: a block that is written is in one table and not published. A write to any other one
goes to a copy, which takes its place in the table of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge.blocks import BlockPool, chain_hashes, root_hash
from forge.errors import InvalidConfig, OutOfBlocks
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.seam import BlockCopy

KV_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Layers that hold the keys and values of each position, and nothing else."""


class KVCachePool:
    """Memory of `num_blocks` blocks for the caches of one model. Use it from one thread at a time.

    config         config of a causal language model with full attention
    kv_cache       contents of the blocks
    blocks         references, hashes and eviction of the blocks
    pad_token_id   of the config, or None where it also ends sequences
    """

    def __init__(
        self,
        config: Any,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = 16,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidConfig(name, f"{value} is not a positive integer", "Give 1 or more")
        text_config = config.get_text_config()
        _refuse_layers(text_config)
        ends, pad = (getattr(text_config, f"{kind}_token_id", None) for kind in ("eos", "pad"))
        self.pad_token_id = None if pad in (ends if isinstance(ends, list) else [ends]) else pad
        heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
        head_dim = getattr(text_config, "head_dim", None)
        spec = KVCacheSpec(
            text_config.num_hidden_layers,
            heads,
            head_dim or text_config.hidden_size // text_config.num_attention_heads,
            dtype,
        )
        self.kv_cache = KVCache(
            spec,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=0,  # rows have tables of their own
            max_model_len=block_size,
            device=torch.device(device),
        )
        self.blocks = BlockPool(num_blocks, block_size)
        self._next_table_id = 0

    def new_table_id(self) -> int:
        """Return an id that no table of the pool has had."""
        self._next_table_id += 1
        return self._next_table_id - 1

    def hashes(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """Return the hash of each full block of `tokens`. Another salt gives other hashes."""
        size = self.blocks.block_size
        full = tokens[: len(tokens) // size * size]
        return chain_hashes(root_hash("", salt, size), full, size)


def _refuse_layers(config: Any) -> None:
    """Raise InvalidConfig for layers that hold anything but keys and values of one shape."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    module_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    fields = ("kv_lora_rank", "num_kv_shared_layers", "num_key_value_heads", "head_dim")
    try:
        rank, shared, _, _ = (getattr(config, field, None) for field in fields)
    except RuntimeError:
        # transformers raises where each layer has its own value.
        raise InvalidConfig(
            "config",
            f"the layers of {config.model_type} have keys of several shapes",
            "Use DynamicCache",
        ) from None
    other_layers = set(getattr(config, "layer_types", None) or ()) - KV_LAYER_TYPES
    held = {
        "layers with a state": getattr(module_class, "_is_stateful", False),
        "latent attention (MLA)": bool(rank),
        "layers that share keys and values": bool(shared),
        f"layers of {', '.join(sorted(map(str, other_layers)))}": bool(other_layers),
    }
    for feature, is_present in held.items():
        if is_present:
            raise InvalidConfig(
                "config",
                f"{config.model_type} has {feature}, which blocks of keys and values do not hold",
                "Use DynamicCache",
            )


class RowTables:
    """Block tables of the rows of one cache.

    length   positions of each row
    """

    def __init__(self, pool: KVCachePool) -> None:
        self.length = 0
        self._pool = pool
        self._ids: list[int] = []
        self._block_ids: torch.Tensor | None = None
        self._writable_slots: tuple[tuple[int, int], torch.Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """Rows that have a table."""
        return len(self._ids)

    @property
    def block_ids(self) -> torch.Tensor:
        """Return the blocks of each row in order, [rows, blocks] integers on the pool's device."""
        if self._block_ids is None:
            tables = self._pool.blocks.tables
            device = self._pool.kv_cache.data.device
            self._block_ids = torch.tensor(
                [tables[each].blocks for each in self._ids], dtype=torch.int64, device=device
            )
        return self._block_ids

    def open(self, rows_hashes: Sequence[Sequence[bytes]]) -> None:
        """Start one row on each list of hashes, with the blocks that the pool has of all rows.

        Sets `length` to the positions of the longest prefix that is found for every row.
        """
        blocks = self._pool.blocks
        found = [blocks.lookup(hashes) for hashes in rows_hashes]
        num_shared = min(map(len, found))
        self._replace([], len(found))
        for table_id, row in zip(self._ids, found, strict=True):
            blocks.release(table_id)
            blocks.open(table_id, 0, row[:num_shared])
        self.length = num_shared * blocks.block_size

    def slots_to_write(self, num_rows: int, start: int, end: int) -> torch.Tensor:
        """Return block * block_size + offset of positions [start, end), [rows * positions].

        Allocates what is missing, and copies what is shared or published. Each layer of a step
        calls it with the same positions; only the first call does work.
        Raises InvalidConfig and changes nothing where the pool has too few free blocks, or the
        cache has another number of rows.
        """
        if self._writable_slots is None or self._writable_slots[0] != (start, end):
            self._grow(num_rows, end)
            size = self._pool.blocks.block_size
            positions = torch.arange(start, end, device=self.block_ids.device)
            for table_id in self._ids:
                for block in self._pool.blocks.tables[table_id].blocks[start // size :]:
                    assert self._is_private(block), f"block {block} is shared, {start=} {end=}"
            slots = self.block_ids[:, positions // size] * size + positions % size
            self._writable_slots = (start, end), slots.flatten()
        return self._writable_slots[1]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions of each row."""
        if length < self.length:
            self.length = length
            self.select(list(range(self.num_rows)))

    def select(self, rows: Sequence[int]) -> None:
        """Make row i share the blocks of row rows[i]. Copies no content: writes do."""
        self._replace([self._ids[row] for row in rows], len(rows))

    def publish(self, rows_hashes: Sequence[Sequence[bytes]]) -> None:
        """Publish the first blocks of each row under its hashes. They have to be full."""
        blocks = self._pool.blocks
        for table_id, hashes in zip(self._ids, rows_hashes, strict=True):
            assert len(hashes) * blocks.block_size <= self.length, f"{len(hashes)=} {self.length=}"
            for block, block_hash in zip(blocks.tables[table_id].blocks, hashes, strict=False):
                blocks.publish(block, block_hash)
        self._forget_tensors()

    def release(self) -> None:
        """Free the blocks of all rows. A second call changes nothing."""
        self.length = 0
        self._replace([], 0)

    def _replace(self, sources: Sequence[int], num_rows: int) -> None:
        """Replace all tables by `num_rows` others, which begin like `sources` or are empty."""
        blocks = self._pool.blocks
        ids = [self._pool.new_table_id() for _ in range(num_rows)]
        for index, table_id in enumerate(ids):
            if sources:
                blocks.fork(sources[index], table_id, self.length)
            else:
                blocks.open(table_id, 0)
        for table_id in self._ids:
            blocks.release(table_id)
        self._ids = ids
        self._forget_tensors()

    def _grow(self, num_rows: int, end: int) -> None:
        """Make room for positions up to `end` in `num_rows` rows."""
        if self.num_rows != num_rows:
            if self.length:
                raise InvalidConfig(
                    "input_ids",
                    f"{num_rows} rows for a cache that holds {self.num_rows}",
                    "Reset the cache, or repeat its rows first",
                )
            self._replace([], num_rows)
        blocks, length = self._pool.blocks, self.length
        if end <= length:
            return
        self.length = end
        try:
            for table_id in self._ids:
                growth = blocks.append(table_id, end - length)
                if growth.new_blocks:
                    self._forget_tensors()
                if growth.copy is not None:
                    self._pool.kv_cache.copy_blocks([BlockCopy(*growth.copy)])
        except OutOfBlocks as error:
            self.truncate(length)
            raise InvalidConfig(
                "num_blocks",
                f"{error.needed} more blocks needed for a row of {end} positions, {error.free} of "
                f"{blocks.num_blocks} free",
                "Close other caches, use fewer rows or positions, or make the pool larger",
            ) from None

    def _is_private(self, block: int) -> bool:
        blocks = self._pool.blocks
        return blocks.ref_count(block) == 1 and blocks.hash_of(block) is None

    def _forget_tensors(self) -> None:
        self._block_ids = self._writable_slots = None
