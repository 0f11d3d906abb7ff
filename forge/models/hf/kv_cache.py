"""KVPool: the pages that hold keys and values, and every slot's block table, on one device.

Owns two tensors. Knows no plan and no attention kernel. Block b of the scheduler is page b; one
more page, the scratch page, is known to nobody above: rows that pad a batch write there.

    data     [layers, blocks + 1, 2, kv_heads, block_size, head_dim]      keys at 0, values at 1
    tables   [slots + 1, blocks of the longest sequence]                  last row: the scratch page

    position p of slot s lives in page tables[s, p // block_size] at offset p % block_size

Pages are laid out as FlashInfer's HND: what one head reads of a page is one piece. `keys` and
`values` show them as [blocks + 1, block_size, kv_heads, head_dim]. The heads' dimension may be
padded: kernels know only some sizes, and zeros change no dot product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from forge.errors import InvalidConfig
from forge.seam import BlockCopy


class KVCacheSpec(NamedTuple):
    """What one position of one sequence holds.

    head_dim   of the pages, padding included
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Pages for `num_blocks` blocks of `block_size` positions, and tables for `num_slots` slots.

    max_num_blocks   blocks there is memory for: a plan may name fewer, never more
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
        """The slot whose table is the scratch page: where padding rows live."""
        return self.num_slots

    def check_plan(self, num_blocks: int, block_size: int) -> None:
        """Raise InvalidConfig unless a plan with this pool can run here."""
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
        """Each target page holds what its source held, in every layer. In order."""
        for source, target in copies:
            self.data[:, target].copy_(self.data[:, source])

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens] page * block_size + offset of each position, as int32.

        slots, positions   [tokens] integers on the pool's device
        """
        block_ids = self.block_tables[
            slots, torch.div(positions, self.block_size, rounding_mode="floor")
        ]
        return (block_ids * self.block_size + positions % self.block_size).to(torch.int32)

    def write(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Put this step's keys and values into their pages.

        keys, values   [tokens, kv_heads, head_dim], the last one possibly without its padding
        slot_mapping   [tokens] from `slot_mapping`
        """
        block_ids = torch.div(slot_mapping, self.block_size, rounding_mode="floor")
        offsets = slot_mapping % self.block_size
        head_dim = keys.shape[-1]
        self.keys[layer_index][..., :head_dim][block_ids, offsets] = keys
        self.values[layer_index][..., :head_dim][block_ids, offsets] = values

    def gather(self, layer_index: int, slot: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions [0, end): [end, kv_heads, head_dim] each."""
        block_ids = self.block_tables[slot, : -(-end // self.block_size)]
        keys = self.keys[layer_index][block_ids].flatten(0, 1)[:end]
        return keys, self.values[layer_index][block_ids].flatten(0, 1)[:end]
