"""PagedCache: the paged KV cache under transformers' own generate().

Owns which block belongs to which row of a batch of generate(). Knows no plan: it is the engine's
KV cache with the loop of transformers, for comparison and for porting code step by step.

    cache = PagedCache(module.config, max_batch_size=4, max_length=512, dtype=module.dtype)
    module.generate(ids, past_key_values=cache)

    update(keys, values)   written to the blocks of the next positions, then read back through the
                           tables: [batch, heads, positions, head_dim], the same tensors that
                           DynamicCache returns

Always true: logits equal those of DynamicCache bit by bit. Rows allocate blocks in the order in
which they grow, so the blocks of a row are not adjacent. Code that ignores a table, or reads past
it, gives wrong logits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from forge.errors import InvalidConfig
from forge.models.hf.kv_cache import KVCache, KVCacheSpec


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer. Every layer writes the same positions of the same tables."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self._length = 0
        self._num_rows = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the blocks are allocated by the cache."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values and return those of all positions.

        key_states, value_states   [batch, heads, positions, head_dim]; the returned ones too, with
                                   the new positions last
        Raise InvalidConfig for more rows or positions than the cache was made for.
        """
        rows, _, count, _ = key_states.shape
        self.is_initialized = True
        self._num_rows = rows
        self._write(key_states, value_states, self._length)
        self._length += count
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

    def reset(self) -> None:
        """Drop all positions."""
        self._length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i hold the keys and values of row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies next to each other."""
        self.batch_select_indices(torch.arange(self._num_rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        if not self._length:
            return
        keys, values = self._read()
        index = indices.to(keys.device)
        self._num_rows = len(index)
        self._write(keys[index], values[index], 0)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Write keys and values at positions from `start` of each row.

        keys, values   [batch, heads, positions, head_dim]
        """
        rows, _, count, _ = keys.shape
        kv_cache = self._cache.kv_cache
        self._cache.allocate(rows, start + count)
        slots = torch.arange(rows, device=keys.device).repeat_interleave(count)
        positions = torch.arange(start, start + count, device=keys.device).repeat(rows)
        slot_mapping = kv_cache.slot_mapping(slots, positions)
        flat_keys, flat_values = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
        kv_cache.write(self._index, flat_keys, flat_values, slot_mapping)

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        kv_cache = self._cache.kv_cache
        rows = [kv_cache.gather(self._index, slot, self._length) for slot in range(self._num_rows)]
        keys, values = (
            torch.stack(each).transpose(1, 2).contiguous() for each in zip(*rows, strict=True)
        )
        return keys, values


class PagedCache(Cache):
    """Cache of transformers whose keys and values are in a KVCache.

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
        text_config = config.get_text_config()
        heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
        head_dim = getattr(text_config, "head_dim", None)
        shape = KVCacheSpec(
            text_config.num_hidden_layers,
            heads,
            head_dim or text_config.hidden_size // text_config.num_attention_heads,
            dtype,
        )
        self._max_rows = max_batch_size
        self.max_positions = max_length
        self.kv_cache = KVCache(
            shape,
            num_blocks=max_batch_size * -(-max_length // block_size),
            block_size=block_size,
            num_slots=max_batch_size,
            max_model_len=max_length,
            device=torch.device(device),
        )
        self._num_allocated = 0
        self._num_row_blocks = [0] * max_batch_size
        super().__init__(layers=[PagedLayer(self, index) for index in range(shape.num_layers)])

    def allocate(self, rows: int, length: int) -> None:
        """Allocate blocks so that rows [0, rows) have room for `length` positions."""
        for name, requested, limit in (
            ("max_batch_size", rows, self._max_rows),
            ("max_length", length, self.max_positions),
        ):
            if requested > limit:
                raise InvalidConfig(
                    name, f"{requested} requested of a cache for {limit}", "Make it larger"
                )
        needed = -(-length // self.kv_cache.block_size)
        for block_index in range(min(self._num_row_blocks[:rows]), needed):
            for row in range(rows):
                if self._num_row_blocks[row] == block_index:
                    self.kv_cache.block_tables[row, block_index] = self._num_allocated
                    self._num_allocated += 1
                    self._num_row_blocks[row] += 1
