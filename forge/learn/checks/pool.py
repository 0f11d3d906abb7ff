"""Check of exercise 3: a learner's pool and forge's BlockPool under the same random operations.

Owns the operations, the comparison and the hints. Exercise 4 compares pools by it too.

    draw_operations ──► PoolPair ──► BlockPool       tables, reference counts, free blocks
                            └──────► learner's pool  compared after each operation
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from forge.blocks import BlockHash, BlockPool, chain_hashes, root_hash
from forge.learn.answers import WrongAnswer, create_random, shorten

NUM_BLOCKS, BLOCK_SIZE = 10, 4
MAX_TABLE_BLOCKS = 4
NUM_OPERATIONS = 60
MIN_EVICTIONS = 12
"""Evictions after which no further run of operations is drawn."""
CHAINS = tuple(
    chain_hashes(
        root_hash("learn", "", BLOCK_SIZE),
        [first] * BLOCK_SIZE * 2 + [rest] * BLOCK_SIZE * 2,
        BLOCK_SIZE,
    )
    for first in range(3)
    for rest in range(3)
)
"""Hashes of prompts of four blocks: three begin with the same two, so that prefixes are shared."""

MISSING = root_hash("missing", "", BLOCK_SIZE)
"""A hash that is never published."""


class Operation(NamedTuple):
    """Call of a method on both pools: its name, the table it is about, and its arguments."""

    name: str
    seq_id: int
    child_id: int = -1
    hashes: tuple[BlockHash, ...] = ()


class PoolPair:
    """forge's pool, and the next operations that it can carry out."""

    def __init__(self, random: Random) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self._random = random
        self._next_id = 0
        self._chains: dict[int, tuple[BlockHash, ...]] = {}

    def draw(self) -> Operation:
        """Draw an operation that the pool has blocks for."""
        random, pool = self._random, self.pool
        tables = sorted(pool.tables)
        choices = ["open"] if len(tables) < 4 else []
        choices += ["fork", *["publish"] * 3, "release", "release", "append"] if tables else []
        name = random.choice(choices)
        if name in ("open", "append") and pool.num_free_blocks < MAX_TABLE_BLOCKS:
            name = "release"
        if name == "open":
            self._next_id += 1
            return Operation("open", self._next_id, hashes=self._draw_chain())
        seq_id = random.choice(tables)
        if name == "append" and len(pool.tables[seq_id].blocks) > MAX_TABLE_BLOCKS:
            name = "fork"
        if name == "fork":
            self._next_id += 1
            return Operation("fork", seq_id, self._next_id)
        return Operation(name, seq_id, hashes=self._chains.get(seq_id, ()))

    def _draw_chain(self) -> tuple[BlockHash, ...]:
        """Draw the hashes of a prompt: one of few, so that prefixes are found again."""
        random = self._random
        count = random.randrange(1, MAX_TABLE_BLOCKS + 1)
        return tuple(random.choice(CHAINS)[:count])

    def apply(self, operation: Operation) -> None:
        """Carry out the operation on forge's pool."""
        apply_to_pool(self.pool, operation)
        name, seq_id, child_id, hashes = operation
        if name == "open":
            self._chains[seq_id] = hashes
        elif name == "fork":
            self._chains[child_id] = self._chains[seq_id]


def apply_to_pool(pool: BlockPool, operation: Operation) -> None:
    """Carry out the operation on a pool with the methods of BlockPool."""
    name, seq_id, child_id, hashes = operation
    if name == "open":
        shared = pool.lookup(hashes)
        pool.open(seq_id, len(hashes) * BLOCK_SIZE, shared)
        pool.append(seq_id, (len(hashes) - len(shared)) * BLOCK_SIZE)
    elif name == "append":
        pool.append(seq_id, BLOCK_SIZE)
    elif name == "fork":
        pool.fork(seq_id, child_id, pool.tables[seq_id].num_tokens)
    elif name == "release":
        pool.release(seq_id)
    else:
        for block, block_hash in zip(pool.tables[seq_id].blocks, hashes, strict=False):
            pool.publish(block, block_hash)


def apply_to_learner(pool: Any, operation: Operation) -> None:
    """Carry out the operation on a pool with the methods of the stub."""
    name, seq_id, child_id, hashes = operation
    if name == "open":
        shared = pool.lookup([*hashes])
        if not isinstance(shared, list):
            raise WrongAnswer(f"lookup returned {shorten(shared)}, which is no list of blocks")
        pool.open(seq_id, shared, len(hashes) - len(shared))
    elif name == "fork":
        pool.fork(seq_id, child_id)
    elif name == "publish":
        for block, block_hash in zip(pool.tables[seq_id], hashes, strict=False):
            pool.publish(block, block_hash)
    else:
        getattr(pool, name)(seq_id)


def check(module: ModuleType, seed: int) -> str:
    """Run random operations on the learner's pool and on forge's, and compare them."""
    random = create_random(seed, 3)
    num_evictions = num_operations = 0
    while num_evictions < MIN_EVICTIONS:
        pair, pool = PoolPair(random), module.Pool(NUM_BLOCKS)
        for number in range(NUM_OPERATIONS):
            operation = pair.draw()
            before = [*pair.pool.free_blocks]
            pair.apply(operation)
            apply_to_learner(pool, operation)
            where = f"operation {number}, {operation.name} of sequence {operation.seq_id}"
            difference = find_difference(pair.pool, pool)
            if difference is not None:
                hint = find_hint(pair.pool, pool, operation, before)
                raise WrongAnswer(f"{where}: {difference}", hint)
            _check_lookups(pair, pool, where)
        num_evictions += pair.pool.num_evictions
        num_operations += NUM_OPERATIONS
    return f"{num_operations} operations with {num_evictions} evictions"


def find_difference(expected: BlockPool, pool: Any) -> str | None:
    """Return how tables, reference counts or free blocks differ; None where they are equal."""
    free = [*reversed(pool.empty), *pool.cached]
    counts = [expected.ref_count(block) for block in range(expected.num_blocks)]
    tables = {seq_id: table.blocks for seq_id, table in expected.tables.items()}
    for name, found, right in (
        ("tables", pool.tables, tables),
        ("reference counts", pool.ref_counts, counts),
        ("free blocks in their order", free, expected.free_blocks),
    ):
        if found != right:
            return f"{name} are {found}, expected {right}"
    return None


def _check_lookups(pair: PoolPair, pool: Any, where: str) -> None:
    """Raise WrongAnswer where `lookup` finds other blocks than forge's pool."""
    for chain in CHAINS:
        for hashes in (chain, [MISSING, *chain], [chain[0], MISSING, *chain[1:]]):
            found, right = pool.lookup([*hashes]), pair.pool.lookup(hashes)
            if found != right:
                what = f"{where}: lookup finds {shorten(found)}, expected {right}"
                raise WrongAnswer(what, _lookup_hint(pair.pool, found, right, hashes))


def _lookup_hint(
    expected: BlockPool, found: Any, right: Sequence[int], hashes: Sequence[BlockHash]
) -> str:
    """Return the hint for a wrong `lookup`, or an eviction that left a hash."""
    published = [block for each in hashes for block in expected.lookup([each])]
    if not isinstance(found, list):
        return "Return a list of blocks"
    if found == published:
        return "Stop at the first hash that is missing: keys and values depend on all tokens before"
    if any(expected.hash_of(block) is None for block in found):
        return "An evicted block gets another content: remove its hash, in both dictionaries"
    return "Return a block for each hash of the prefix, in order" if right else ""


def find_hint(expected: BlockPool, pool: Any, operation: Operation, before: Sequence[int]) -> str:
    """Return the hint for pools that differ after an operation.

    before   free blocks before it, in their order
    """
    if len({id(table) for table in pool.tables.values()}) < len(pool.tables):
        return "The child has the same list as its parent: a block added to one is in both. Copy it"
    if operation.name == "fork":
        table = pool.tables.get(operation.child_id, [])
        if any(pool.ref_counts[block] < expected.ref_count(block) for block in table):
            return "Both tables hold the blocks: count a reference for each"
        return "The child's table has the parent's blocks, and no block is allocated"
    if operation.name in ("open", "append"):
        right, found = expected.tables[operation.seq_id].blocks, pool.tables[operation.seq_id]
        pairs = zip(found, right, strict=False)
        if any(a != b and a in before and b in before for a, b in pairs):
            return "The least recently used block goes first: it is the first of `cached`"
    return ""
