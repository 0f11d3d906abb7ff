"""KVCache: the blocks that hold keys and values, and every slot's block table, on one device.

Owns two tensors. Knows no plan and no attention kernel. Block b of the scheduler is block b here.
There is one more, the scratch block, which the scheduler never allocates: rows that pad a batch
write there.

    data           [layers, blocks + 1, 2, kv_heads, block_size, head_dim]   keys at 0, values at 1
    block_tables   [slots + 1, blocks of the longest sequence]               last row: scratch block

    position p of slot s is in block block_tables[s, p // block_size] at offset p % block_size

Always true: a block's layout is FlashInfer's HND, so what one head reads of a block is contiguous.
`keys` and `values` show the blocks as [blocks + 1, block_size, kv_heads, head_dim]. head_dim may be
padded: kernels take only some sizes, and zeros change no dot product.
Paged attention: Kwon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from forge.errors import InvalidConfig
from forge.seam import BlockCopy


class KVCacheSpec(NamedTuple):
    """Shape of one position of one sequence in the cache.

    head_dim   of the blocks, padding included
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Memory of `num_blocks` blocks of `block_size` positions, and the slots' block tables.

    max_num_blocks   blocks that memory is allocated for; a plan may use fewer, never more
    data, keys, values, block_tables   see the module's docstring
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.max_num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_slots
        self.data = torch.zeros(
            (spec.num_layers, num_blocks + 1, 2, spec.num_kv_heads, block_size, spec.head_dim),
            dtype=spec.dtype,
            device=device,
        )
        table_width = -(-max_model_len // block_size)
        self.block_tables = torch.full(
            (num_slots + 1, table_width), num_blocks, dtype=torch.int32, device=device
        )
        self.keys = [layer[:, 0].transpose(1, 2) for layer in self.data]
        self.values = [layer[:, 1].transpose(1, 2) for layer in self.data]

    @property
    def scratch_slot(self) -> int:
        """Slot of padding rows; its block table holds the scratch block."""
        return self.num_slots

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        return self.spec.bytes_per_token * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, the scratch block included."""
        return self.data.numel() * self.data.itemsize

    @property
    def released_bytes(self) -> int:
        """Bytes that `restore` allocates."""
        return self.num_bytes - self.data.untyped_storage().nbytes()

    def release(self) -> None:
        """Free the memory of all blocks. Views of `data` stay; call `restore` before a step."""
        self.data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the memory that `release` freed, all zeros, perhaps at another address."""
        with torch.inference_mode():
            self.data.untyped_storage().resize_(self.num_bytes)
            self.data.zero_()

    def check_plan(self, num_blocks: int, block_size: int) -> None:
        """Raise InvalidConfig unless a plan over this many blocks of this size can run here."""
        if block_size != self.block_size:
            raise InvalidConfig(
                "block_size",
                f"the model keeps {self.block_size} positions a block, the engine {block_size}",
                "Give both the same",
            )
        if num_blocks > self.max_num_blocks:
            raise InvalidConfig(
                "num_blocks",
                f"{num_blocks} blocks, and there is memory for {self.max_num_blocks}",
                "Start with a larger --num-blocks to leave room to grow",
            )

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy each source block to its target, in every layer, in order."""
        for source, target in copies:
            self.data[:, target].copy_(self.data[:, source])

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return block * block_size + offset of each position, [tokens] int32.

        slots, positions   [tokens] integers on the cache's device
        """
        block_ids = self.block_tables[
            slots, torch.div(positions, self.block_size, rounding_mode="floor")
        ]
        return (block_ids * self.block_size + positions % self.block_size).to(torch.int32)

    def write(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's keys and values into their blocks.

        keys, values   [tokens, kv_heads, head_dim]; head_dim with or without padding
        slot_mapping   [tokens] from `slot_mapping`
        """
        block_ids = torch.div(slot_mapping, self.block_size, rounding_mode="floor")
        offsets = slot_mapping % self.block_size
        head_dim = keys.shape[-1]
        self.keys[layer_index][..., :head_dim][block_ids, offsets] = keys
        self.values[layer_index][..., :head_dim][block_ids, offsets] = values

    def gather(self, layer_index: int, slot: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions [0, end), [end, kv_heads, head_dim] each."""
        block_ids = self.block_tables[slot, : -(-end // self.block_size)]
        keys = self.keys[layer_index][block_ids].flatten(0, 1)[:end]
        return keys, self.values[layer_index][block_ids].flatten(0, 1)[:end]
