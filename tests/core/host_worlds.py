"""Random worlds in which prefixes leave the device and come back from the host pool.

Owns how such a world is drawn. It is a world of tests/core/worlds.py, with turns of conversations
as requests, a pool of little more than one request, and a host pool.

    turn 0   [ common | conversation 2 ]          turns of other conversations evict its blocks
    turn 1   [ common | conversation 2 | more ]   which are loaded, as far as the host has them
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from forge.config import EngineConfig, HostTier, LoadCosts
from forge.request import Request, SamplingParams
from tests.core.worlds import DISK, Chances, RandomWorld, draw_speculation


def draw_host_world(seed: int) -> RandomWorld:
    """Draw a small world with a host pool: each seed gives other sizes, turns and disturbances."""
    rng = Random(f"host world {seed}")
    vocab_size, block_size = rng.choice((8, 20)), rng.choice((1, 2, 3, 4, 4))
    requests = _draw_requests(rng, vocab_size)
    longest = max(len(r.prompt) + (r.params.max_tokens or 0) for r in requests)
    num_blocks = -(-longest // block_size) + rng.choice((0, 1, 3, 6))
    rows = rng.randint(1, 4)
    host_tier = HostTier(
        num_blocks=rng.choice((0, 1, 3, num_blocks, 3 * num_blocks, 3 * num_blocks)),
        max_moved_blocks=rng.choice((1, 4, None)),
        min_clean_percent=rng.choice((12, 50, 100, 100)),
        min_touches=rng.choice((1, 1, 2)),
        min_loaded_blocks=rng.choice((1, 1, 1, 3)),
        costs=rng.choice((None, None, LoadCosts(3, 2, 1, 150))),
        disk=rng.choice((None, DISK, replace(DISK, max_moves=2, fetch_block_ns=1))),
    )
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice((0, 3, 60)),
        max_model_len=96,
        depth=rng.choice((1, 2, 2)),
        seed=rng.getrandbits(63),
        host_tier=host_tier,
    )
    chances = Chances(
        submit=rng.choice((0.1, 0.2, 0.4)),
        abort=rng.choice((0.0, 0.0, 0.1)),
        resize=rng.choice((0.0, 0.0, 0.0, 0.1)),
        resize_host=rng.choice((0.0, 0.0, 0.0, 0.04)),
        reset=rng.choice((0.0, 0.0, 0.0, 0.02)),
        break_step=rng.choice((0.0, 0.0, 0.0, 0.02)),
        break_row=rng.choice((0.0, 0.0, 0.0, 0.01)),
    )
    world = RandomWorld(seed, config, requests, vocab_size, chances=chances)
    if rng.random() < 0.3:
        world = world._replace(
            config=replace(config, speculation=draw_speculation(rng)),
            agreement=rng.choice((0.3, 0.95)),
        )
    return world


def _draw_requests(rng: Random, vocab_size: int) -> tuple[Request, ...]:
    common = rng.choices(range(1, vocab_size), k=rng.randint(0, 9))
    threads = [
        common + rng.choices(range(1, vocab_size), k=rng.randint(6, 18))
        for _ in range(rng.randint(3, 6))
    ]
    salts = [rng.choice(("", "", "salt")) for _ in threads]
    uses_sessions = rng.random() < 0.3
    requests = []
    for index in range(rng.randint(8, 20)):
        thread = rng.randrange(len(threads))
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 2)),
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=rng.choice((0, 1, 3, 8, 12)),
            ignore_eos=rng.random() < 0.8,
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            prompt_logprobs=rng.choice((None,) * 9 + (1,)),
        )
        requests.append(
            Request(
                index,
                tuple(threads[thread]),
                params,
                priority=rng.choice((0, 0, 0, 1)),
                cache_salt=rng.choice((salts[thread],) * 7 + ("salt",)),
                session_id=str(thread) if uses_sessions else "",
            )
        )
        if len(threads[thread]) < 40:
            threads[thread] = threads[thread] + rng.choices(range(1, vocab_size), k=2)
    return tuple(requests)
