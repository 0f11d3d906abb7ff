"""Sharding: which part of every parameter a rank holds, and what cannot be divided.

Owns the arithmetic and its refusals. Knows no module, no file and no communication.

    rank          0            1
    q, k, v    [ heads 0-3 ][ heads 4-7 ]     by output (rows of the weight)
    o          [ heads 0-3 | heads 4-7 ]      by input (columns): partial sums, all-reduced
    gate, up   [ 0 .. I/2  ][ I/2 .. I  ]     by output
    down       [ 0 .. I/2  |  I/2 .. I  ]     by input: partial sums, all-reduced
    lm_head    [ ids 0 ..  ][ .. V      ]     by id
    the rest   whole on every rank

Always true: the query heads of a rank read the key and value heads of that rank. Where there are
fewer key and value heads than ranks, each is on several ranks.
Tensor parallelism: Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

from typing import NamedTuple

from forge.errors import InvalidConfig

FIELD = "tensor_parallel_size"


class Slice(NamedTuple):
    """Part of a tensor: intervals along one dimension, one after the other.

    dim         dimension that is divided
    intervals   half-open [start, end)
    """

    dim: int
    intervals: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Length of the part along `dim`."""
        return sum(end - start for start, end in self.intervals)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of the shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])


class HeadCounts(NamedTuple):
    """Attention heads of a layer."""

    num_heads: int
    num_kv_heads: int


class Shard(NamedTuple):
    """Part of one rank in a model with `world_size` ranks."""

    rank: int
    world_size: int

    def heads(self, whole: HeadCounts) -> HeadCounts:
        """Return this rank's heads. Raise InvalidConfig where the heads cannot be divided."""
        num_heads, num_kv_heads = whole
        ranks = self.world_size
        if num_heads % ranks:
            raise InvalidConfig(
                FIELD,
                f"{num_heads} attention heads cannot be divided by {ranks} ranks",
                f"Give a divisor of {num_heads}",
            )
        if num_kv_heads % ranks and ranks % num_kv_heads:
            raise InvalidConfig(
                FIELD,
                f"{num_kv_heads} key and value heads are neither a multiple nor a divisor of "
                f"{ranks} ranks",
                f"Give a multiple or a divisor of {num_kv_heads}",
            )
        return HeadCounts(num_heads // ranks, max(1, num_kv_heads // ranks))

    def head_rows(self, whole: HeadCounts, head_dim: int) -> tuple[tuple[int, int], ...]:
        """Return the intervals of this rank's query rows, and of its key rows, each from 0.

        Value rows are as key rows.
        """
        own = self.heads(whole)
        first_head = self.rank * own.num_heads
        # The group of query heads that share a key head lies on one rank, or on several whole ones.
        first_kv_head = first_head * whole.num_kv_heads // whole.num_heads
        return tuple(
            (first * head_dim, (first + count) * head_dim)
            for first, count in ((first_head, own.num_heads), (first_kv_head, own.num_kv_heads))
        )

    def inner_rows(self, intermediate_size: int) -> tuple[int, int]:
        """Return the interval of this rank's gate rows. Raise InvalidConfig for unequal parts."""
        if intermediate_size % self.world_size:
            raise InvalidConfig(
                FIELD,
                f"the intermediate size {intermediate_size} cannot be divided by "
                f"{self.world_size} ranks",
                f"Give a divisor of {intermediate_size}",
            )
        count = intermediate_size // self.world_size
        return (self.rank * count, (self.rank + 1) * count)


class VocabShard(NamedTuple):
    """Token ids whose logits a rank computes.

    vocab_size   ids of the model
    width        ids of every rank, padding included
    first        first id of this rank
    end          end of its ids; the last rank may have fewer than `width`
    """

    vocab_size: int
    width: int
    first: int
    end: int

    @classmethod
    def of(cls, shard: Shard, vocab_size: int) -> VocabShard:
        """Return the rank's ids. Raise InvalidConfig where a rank would have none."""
        width = -(-vocab_size // shard.world_size)
        if width * (shard.world_size - 1) >= vocab_size:
            raise InvalidConfig(
                FIELD,
                f"{vocab_size} token ids are too few for {shard.world_size} ranks",
                f"Give at most {max(1, vocab_size // 2)}",
            )
        first = shard.rank * width
        return cls(vocab_size, width, first, min(first + width, vocab_size))

    @property
    def size(self) -> int:
        """Ids of this rank."""
        return self.end - self.first
