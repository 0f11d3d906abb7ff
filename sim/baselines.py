"""Baselines: what a run could have been with an infinite cache, and with optimal eviction.

Owns the two comparisons. Changes nothing of a run: an infinite cache is a second simulation, and
optimal eviction is counted on the block accesses of the first.

    run         31.2 % of prompt tokens shared      mean session 1561 s
    infinite    93.7 %                              mean session  694 s
    belady      of the same accesses, in the same order, with the blocks of the run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forge.sim.eviction.study import belady_hits
from forge.sim.scenario import Scenario, summary
from forge.sim.world import World


def infinite_cache(scenario: Scenario, world: World) -> Scenario:
    """Return the scenario with a cache of which nothing is evicted.

    world   the run of `scenario`, at its end: it has computed all blocks
    """
    # Twice as many as have content: blocks that are being filled, and the reserve of the pool.
    num_blocks = 2 * world.sessions.accesses.num_blocks + 2 * scenario.engine.max_num_seqs
    engine = replace(scenario.engine, num_blocks=max(num_blocks, scenario.engine.num_blocks))
    return replace(scenario, oversubscription=None, engine=engine)


def baselines(scenario: Scenario, world: World) -> Mapping[str, Any]:
    """Return the figures of the same workload with an infinite cache, and the hits of Belady.

    belady_shared_tokens   most prompt tokens that a cache of as many blocks could have found, if
                           requests came in the order of their admission in `world`
    """
    accesses = world.sessions.accesses
    infinite_world = infinite_cache(scenario, world).run()
    assert not infinite_world.engine.scheduler.pool.num_evictions, "an infinite cache has evicted"
    hits = belady_hits(accesses.chains, scenario.engine.num_blocks)
    return {
        "infinite": summary(infinite_world),
        "belady_shared_tokens": hits * scenario.engine.block_size,
    }
