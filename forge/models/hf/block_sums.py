"""BlockSums: one 64-bit number for the content of a block, equal on the device and on the host.

Owns the formula. Knows no plan and no stream: it sums blocks of a cache, and bytes of a host block.

    word i of a block ── word ^ (word >> 32) ── * weight i ──┬── sum of all words, modulo 2^64
    its upper half changes the lower one too     odd, by i   │
                                                             └── equal in any order of addition

Always true: a change of one word changes the sum, since each step can be undone. Any other damage
is missed with a chance of about 2^-32 at most, words that change places among it. It detects damage
and no intent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge.models.hf.buffers import int64_array, upload
from forge.models.hf.kv_cache import KVCache

MAX_SUM_BYTES = 16 * 2**20
"""Bytes of blocks that are summed at a time, one block at least: they are copied twice."""

_DTYPES: tuple[tuple[torch.dtype, Any], ...] = (
    (torch.int64, np.int64),
    (torch.int32, np.int32),
    (torch.int16, np.int16),
    (torch.uint8, np.uint8),
)
"""Words of a block, the widest first: as the device and as the host name them."""
_LOWER_HALF = 2**32 - 1


class BlockSums:
    """Sums of blocks of a KV cache, and of the bytes that they have in a host pool."""

    def __init__(self, kv_cache: KVCache) -> None:
        data = kv_cache.data
        num_layers, blocks_per_layer = data.shape[:2]
        rows = data.view(num_layers * blocks_per_layer, -1)
        row_bytes = rows.shape[1] * rows.itemsize
        dtype, host_dtype = next(pair for pair in _DTYPES if row_bytes % pair[0].itemsize == 0)
        self._host_dtype = np.dtype(host_dtype)
        self._rows = rows.view(dtype)
        self._layer_starts = np.arange(num_layers, dtype=np.int64) * blocks_per_layer
        self._num_at_once = max(1, MAX_SUM_BYTES // kv_cache.block_bytes)
        self._host_weights = _weights(kv_cache.block_bytes // dtype.itemsize)
        self._weights = torch.from_numpy(self._host_weights).to(data.device)

    def sum_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the sums of blocks of the device, int64 [blocks], on the current stream."""
        return torch.cat(list(self._sum_parts(blocks)))

    def sum_content(self, content: bytes | memoryview) -> int:
        """Return the sum of the content of a host block: that of the block it was stored from."""
        words: NDArray[np.int64] = np.frombuffer(content, self._host_dtype).astype(np.int64)
        words ^= (words >> 32) & _LOWER_HALF
        words *= self._host_weights
        return int(words.sum())

    def _sum_parts(self, blocks: Sequence[int]) -> Iterator[torch.Tensor]:
        starts = int64_array(blocks)[:, None] + self._layer_starts
        [rows] = upload(self._rows.device, starts.reshape(-1))
        for part in rows.split(self._num_at_once * len(self._layer_starts)):
            # A host block has all layers of a block one after the other.
            words = self._rows.index_select(0, part).view(-1, len(self._host_weights))
            folded = words.to(torch.int64)
            folded = folded ^ (folded >> 32).bitwise_and_(_LOWER_HALF)
            yield folded.mul_(self._weights).sum(1)


def _weights(count: int) -> NDArray[np.int64]:
    """Return odd numbers of 64 bits, by the finalizer of SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
