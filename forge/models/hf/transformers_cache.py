"""PagedCache and PooledCache: the paged KV cache under transformers' own generate().

Owns what transformers reads of a cache: layers, lengths, rows of a batch. Knows no plan: it is the
engine's KV cache with the loop of transformers. RowTables owns the blocks.

    cache = PagedCache(module.config, max_batch_size=4, max_length=512, dtype=module.dtype)
    module.generate(ids, past_key_values=cache)

    pool = KVCachePool(module.config, num_blocks=4096, dtype=module.dtype)
    with PooledCache(pool, ids) as cache:         starts on the blocks that the pool has of ids
        output = module.generate(ids, past_key_values=cache)
        cache.publish(output)                     later callers start on them

    update(keys, values)   written to the blocks of the next positions, then read back through the
                           tables: [batch, heads, positions, head_dim], the same tensors that
                           DynamicCache returns

Always true: logits equal those of a DynamicCache that was filled in the same steps, bit by bit.
Rows allocate blocks as they grow, so the blocks of a row are not adjacent. Code that ignores a
table, or reads past it, gives wrong logits.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from forge.errors import InvalidConfig
from forge.models.hf.kv_cache_pool import KVCachePool, RowTables

MASKED = -1
"""Token of a position that the attention mask leaves out: padding has no content to share."""


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer. Every layer writes the same positions of the same tables."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: TableCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self._length = cache.tables.length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the blocks are allocated by the cache."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values and return those of all positions.

        key_states, value_states   [batch, heads, positions, head_dim]; the returned ones too, with
                                   the new positions last
        Raise InvalidConfig for more rows, positions or blocks than there are.
        """
        rows, heads, count, head_dim = key_states.shape
        spec = self._cache.pool.kv_cache.spec
        expected = (spec.num_kv_heads, spec.head_dim)
        if (heads, head_dim) != expected or value_states.shape != key_states.shape:
            raise InvalidConfig(
                "config",
                f"layer {self._index} has keys of {heads}x{head_dim} and values of "
                f"{value_states.shape[1]}x{value_states.shape[3]}, and the cache {expected[0]}x"
                f"{expected[1]} for both",
                "Use DynamicCache",
            )
        slots = self._cache.slots_to_write(rows, self._length, self._length + count)
        flat_keys, flat_values = (
            x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states)
        )
        self._cache.pool.kv_cache.write(self._index, flat_keys, flat_values, slots)
        self._length += count
        self.is_initialized = True
        return self._read()

    def get_seq_length(self) -> int:
        """Return the positions held."""
        return self._length

    def get_max_length(self) -> int:
        """Return the positions there is room for."""
        return self._cache.max_positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the positions that a mask spans after the next update, and the first of them."""
        return self._length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions: a negative count of them, or all after a positive length."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self._length + tokens_to_remove
        self._length = min(self._length, max(0, kept))
        self._cache.truncate_tables()

    def reset(self) -> None:
        """Drop all positions."""
        self._length = 0
        self._cache.truncate_tables()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all positions, [batch, heads, positions, head_dim] each."""
        kv_cache = self._cache.pool.kv_cache
        block_ids = self._cache.tables.block_ids
        keys, values = (
            blocks[block_ids].flatten(1, 2)[:, : self._length].transpose(1, 2).contiguous()
            for blocks in (kv_cache.keys[self._index], kv_cache.values[self._index])
        )
        return keys, values


class TableCache(Cache):
    """Cache of transformers over the block tables of its rows. A context manager; `close` ends it.

    pool            owns the blocks
    tables          of the rows
    max_positions   of each row
    """

    def __init__(self, pool: KVCachePool, tables: RowTables, max_positions: int) -> None:
        self.pool = pool
        self.tables = tables
        self.max_positions = max_positions
        self._is_closed = False
        num_layers = pool.kv_cache.spec.num_layers
        super().__init__(layers=[PagedLayer(self, index) for index in range(num_layers)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the blocks of all rows. A second call changes nothing."""
        self._is_closed = True
        self.reset()
        self.tables.release()

    def slots_to_write(self, rows: int, start: int, end: int) -> torch.Tensor:
        """Return where positions [start, end) of each row are written. Raise InvalidConfig."""
        self.check_is_open()
        return self.tables.slots_to_write(rows, start, end)

    def check_is_open(self) -> None:
        """Raise InvalidConfig after `close`: the blocks are free."""
        if self._is_closed:
            raise InvalidConfig("past_key_values", "the cache is closed", "Open another one")

    def truncate_tables(self) -> None:
        """Drop the positions that no layer holds."""
        self.tables.truncate(max(layer.get_seq_length() for layer in self.layers))

    def select_rows(self, rows: list[int]) -> None:
        """Make row i hold the keys and values of row rows[i], without a copy."""
        if self.tables.length:
            self.tables.select(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i hold the keys and values of row beam_idx[i]."""
        self.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies next to each other."""
        rows = range(self.tables.num_rows)
        self.select_rows([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        self.select_rows(torch.arange(self.tables.num_rows)[indices.cpu()].tolist())


class PagedCache(TableCache):
    """Cache of transformers with a pool of its own.

    config           config of a causal language model with full attention
    max_batch_size   rows, beams included
    max_length       positions of each row; `max_positions` afterwards
    """

    def __init__(
        self,
        config: Any,
        *,
        max_batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = 16,
    ) -> None:
        self._max_rows = max_batch_size
        num_blocks = max_batch_size * -(-max_length // block_size)
        pool = KVCachePool(
            config, num_blocks=num_blocks, dtype=dtype, device=device, block_size=block_size
        )
        super().__init__(pool, RowTables(pool), max_length)

    def slots_to_write(self, rows: int, start: int, end: int) -> torch.Tensor:
        """Return where positions [start, end) of each row are written. Raise InvalidConfig."""
        self._check_limit("max_batch_size", rows, self._max_rows)
        self._check_limit("max_length", end, self.max_positions)
        return super().slots_to_write(rows, start, end)

    def select_rows(self, rows: list[int]) -> None:
        """Make row i hold the keys and values of row rows[i]. Raise InvalidConfig for too many."""
        self._check_limit("max_batch_size", len(rows), self._max_rows)
        super().select_rows(rows)

    def _check_limit(self, name: str, requested: int, limit: int) -> None:
        if requested > limit:
            raise InvalidConfig(
                name, f"{requested} requested of a cache for {limit}", "Make it larger"
            )


class PooledCache(TableCache):
    """Cache of transformers that shares the blocks of known prefixes with others on its pool.

    input_ids        [rows, positions] prompts, with a row for each beam or returned sequence
    attention_mask   [rows, positions] where generate() has one; equal padding is shared too
    salt             caches of different salts share no block
    The cache starts with the positions of the longest prefix of full blocks that the pool has for
    every row. At least one position is left to compute.
    """

    def __init__(
        self,
        pool: KVCachePool,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str = "",
    ) -> None:
        self._prompts = _unmasked_tokens(pool, input_ids, attention_mask)
        self._input_ids: list[list[int]] = input_ids.tolist()
        self._salt = salt
        self._num_known = pool.blocks.num_blocks * pool.blocks.block_size
        tables = RowTables(pool)
        tables.open([pool.hashes(row[:-1], salt) for row in self._prompts])
        self._num_shared = tables.length
        super().__init__(pool, tables, max_positions=self._num_known)

    @property
    def num_shared_positions(self) -> int:
        """Positions of each row that the pool had when the cache was opened."""
        return self._num_shared

    def slots_to_write(self, rows: int, start: int, end: int) -> torch.Tensor:
        """Return where positions [start, end) of each row are written. Raise InvalidConfig."""
        if rows != len(self._prompts):
            raise InvalidConfig(
                "input_ids",
                f"{rows} rows for a cache that was opened with {len(self._prompts)}",
                "Open it with a row for each beam: input_ids.repeat_interleave(num_beams, dim=0)",
            )
        num_prompt = len(self._prompts[0])
        # Assisted generation, for one, passes the whole prompt again, after the shared positions.
        if start == self._num_shared and end - start >= num_prompt and start:
            raise InvalidConfig(
                "input_ids",
                f"{end - start} positions after {start} shared ones, of prompts of {num_prompt}",
                "Pass the positions that follow the shared ones only",
            )
        return super().slots_to_write(rows, start, end)

    def select_rows(self, rows: list[int]) -> None:
        """Make row i hold the keys and values of row rows[i], without a copy."""
        super().select_rows(rows)
        if self.tables.length and rows != list(range(len(self._prompts))):
            self._prompts = [self._prompts[row] for row in rows]
            self._input_ids = [self._input_ids[row] for row in rows]
            # The order of beams in the result is another one than here.
            self._num_known = min(self._num_known, len(self._prompts[0]))

    def publish(self, sequences: torch.Tensor) -> None:
        """Let later caches of the pool start on the full blocks of these rows.

        sequences   [rows, positions] tokens: the prompts, or what generate() returned for them
        After rows were reordered, as by beam search, only blocks of the prompts are published.
        Raise InvalidConfig where a row does not begin with its prompt, and after `close`.
        """
        self.check_is_open()
        rows: list[list[int]] = sequences.tolist()
        num_prompt = len(self._prompts[0])
        if [row[:num_prompt] for row in rows] != self._input_ids:
            raise InvalidConfig(
                "sequences",
                f"{len(rows)} rows that do not begin with the {len(self._input_ids)} prompts",
                "Give the ids that the cache was opened with, and what was generated after them",
            )
        end = min(self._num_known, *(layer.get_seq_length() for layer in self.layers))
        self.tables.publish(
            [
                self.pool.hashes((prompt + row[num_prompt:])[:end], self._salt)
                for prompt, row in zip(self._prompts, rows, strict=True)
            ]
        )


def _unmasked_tokens(
    pool: KVCachePool, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[list[int]]:
    """Return the rows of tokens, with MASKED for those that the mask leaves out.

    Raise InvalidConfig for shapes that do not fit, and for padding without a mask.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise InvalidConfig(
            "input_ids", f"shape {tuple(input_ids.shape)}", "Give [rows, positions], not empty"
        )
    if attention_mask is None:
        if pool.pad_token_id is not None and bool((input_ids == pool.pad_token_id).any()):
            raise InvalidConfig(
                "attention_mask",
                f"missing, and the ids contain the padding token {pool.pad_token_id}",
                "Give the mask that generate() has",
            )
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise InvalidConfig(
            "attention_mask",
            f"shape {tuple(attention_mask.shape)} for ids of {tuple(input_ids.shape)}",
            "Give both the same shape",
        )
    tokens: list[list[int]] = input_ids.masked_fill(attention_mask == 0, MASKED).tolist()
    return tokens
