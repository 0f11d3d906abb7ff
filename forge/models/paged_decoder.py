"""PagedDecoder: the protocol of what PagedModel runs a step on: blocks, and arithmetic over them.

Owns the types. Knows no plan: a row has the blocks, the position and the tokens.

    BlockRow((7, 2, 9), start=20, tokens=(5, 6))     blocks of 16: position 20 is in block 2
                  │
    forward ──────┴─► writes positions 20 and 21, reads 0 to 21 ─► logits after 21 and 22 tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from forge.models.host_blocks import Pages


class BlockRow(NamedTuple):
    """Row of a PagedDecoder: tokens of one sequence that are computed in a step.

    table    blocks of the sequence, in order: position p is in table[p // block_size]
    start    position of the first token; the blocks have all that is before it
    tokens   inputs, at least one
    """

    table: Sequence[int]
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        """End position: one past the last token."""
        return self.start + len(self.tokens)


RowLogits: TypeAlias = Callable[[int], Sequence[float]]
"""Logits of a row after tokens [0, end), for any end with start < end <= row.end.

One float per token of the vocabulary. They are valid until the next `forward` of the decoder.
"""


class PagedDecoder(Protocol):
    """Blocks, and the arithmetic that writes and reads them.

    num_layers   layers whose state a block holds
    block_size   positions of a block
    """

    vocab_size: int
    num_layers: int
    block_size: int

    def pages(self) -> Pages:
        """Return the contents of the blocks, to be copied and moved as bytes."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks. The first ones keep their contents."""
        ...

    def forward(self, rows: Sequence[BlockRow]) -> Sequence[RowLogits]:
        """Write the rows' inputs into their blocks, and return the logits of each row.

        No row reads what another row of the call writes.
        """
        ...
