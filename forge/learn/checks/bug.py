"""Check of exercise 4: fault seeds and a comparison, both on the learner's subclass of BlockPool.

Owns the number of seeds. The runs, their invariants and the shrinking are those of
`forge sim --faults all`; the scheduler builds its pool from the learner's class while they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import forge.scheduler
from forge.blocks import BlockPool
from forge.learn.answers import WrongAnswer, create_random
from forge.learn.checks.pool import (
    BLOCK_SIZE,
    CHAINS,
    MIN_EVICTIONS,
    NUM_BLOCKS,
    NUM_OPERATIONS,
    Operation,
    PoolPair,
    apply_to_pool,
)
from forge.sim.faults.fuzz import run_seeds

NUM_SEEDS = 32
METHODS = ("open", "grow", "fork", "release")
"""Methods that the stub writes out, one of them with the bug."""


@contextmanager
def pool_class(pool: type[BlockPool]) -> Iterator[None]:
    """Let schedulers build their pool from this class."""
    name = "BlockPool"
    original = getattr(forge.scheduler, name)
    setattr(forge.scheduler, name, pool)
    try:
        yield
    finally:
        setattr(forge.scheduler, name, original)


def check(module: ModuleType, seed: int) -> str:
    """Run worlds with faults on the learner's pool, then compare it with forge's."""
    if not (isinstance(module.Pool, type) and issubclass(module.Pool, BlockPool)):
        raise WrongAnswer("Pool is no subclass of forge.blocks.BlockPool", "Keep the stub's class")
    _check_methods(module.Pool)
    _check_sharing(module.Pool)
    with pool_class(module.Pool):
        report = run_seeds(seed, seed + NUM_SEEDS - 1, write_line=lambda line: None)
    failure = report.failure
    if failure is not None:
        ops = "".join(f"\n    {op!r}" for op in failure.ops)
        raise WrongAnswer(
            f"an invariant broke in world {failure.seed}, at step {failure.violation.step}\n"
            f"    {failure.violation.what}\n"
            f"{len(failure.ops)} of {failure.num_ops} operations are enough:{ops}",
            "The operations are few: which method gives a block two owners, or a new owner while "
            "its content is still needed? Follow the free blocks through each method",
        )
    random = create_random(seed, 4)
    num_evictions = 0
    while num_evictions < MIN_EVICTIONS:
        pair = PoolPair(random)
        pool = module.Pool(NUM_BLOCKS, BLOCK_SIZE)
        for number in range(NUM_OPERATIONS):
            operation = pair.draw()
            pair.apply(operation)
            apply_to_pool(pool, operation)
            _compare(pair.pool, pool, f"operation {number}, {operation.name}")
        num_evictions += pair.pool.num_evictions
    check_full_pool(module.Pool)
    return (
        f"{report.num_seeds} worlds with faults, and {num_evictions} evictions as in forge's pool"
    )


def _check_methods(pool: type[BlockPool]) -> None:
    """Raise WrongAnswer where a method is forge's own instead of one of the file."""
    methods, right = vars(pool), vars(BlockPool)
    missing = [each for each in METHODS if methods.get(each) in (None, right[each])]
    if missing:
        raise WrongAnswer(
            f"Pool does not define {', '.join(missing)}",
            "The bug is in one of four methods: fix it there, and keep the other three",
        )


def _check_sharing(pool: type[BlockPool]) -> None:
    """Open a table on the blocks of another one."""
    found = pool(NUM_BLOCKS, BLOCK_SIZE)
    shared = found.open(1, 2 * BLOCK_SIZE).blocks
    blocks = found.open(2, 3 * BLOCK_SIZE, shared).blocks
    if blocks[:2] != shared:
        raise WrongAnswer(
            f"a table that starts on the shared blocks {shared} has the blocks {blocks}",
            "The pool shares fewer blocks than it could: a prefix that `lookup` found would be "
            "computed again, and a fork would lose its content",
        )


def check_full_pool(pool: type[BlockPool]) -> None:
    """Open a table on cached blocks where one of them would be evicted next."""
    first, second = CHAINS[0], CHAINS[-1]
    operations = [
        *(Operation(name, 1, hashes=tuple(first[:2])) for name in ("open", "publish", "release")),
        *(Operation(name, 2, hashes=tuple(second[:2])) for name in ("open", "publish", "release")),
        Operation("open", 3, hashes=tuple(first[:3])),
    ]
    expected, found = BlockPool(4, BLOCK_SIZE), pool(4, BLOCK_SIZE)
    for operation in operations:
        apply_to_pool(expected, operation)
        apply_to_pool(found, operation)
    _compare(expected, found, "4 cached blocks, a table on the two that would be evicted next")


def _compare(expected: BlockPool, pool: BlockPool, where: str) -> None:
    """Raise WrongAnswer where tables, free blocks or hashes of the pools differ."""
    tables = {seq_id: table.blocks for seq_id, table in pool.tables.items()}
    right = {seq_id: table.blocks for seq_id, table in expected.tables.items()}
    if tables != right:
        hint = "Shared blocks must be held before anything else is allocated"
        raise WrongAnswer(f"{where}: tables are {tables}, expected {right}", hint)
    if pool.free_blocks != expected.free_blocks:
        raise WrongAnswer(
            f"{where}: free blocks are {pool.free_blocks}, expected {expected.free_blocks}",
            "A chain is evicted from its end, so that the rest stays reachable",
        )
    for block in range(expected.num_blocks):
        if pool.hash_of(block) != expected.hash_of(block):
            raise WrongAnswer(
                f"{where}: block {block} has the hash of another content, or none",
                "Shared blocks must be held before anything else is allocated",
            )
