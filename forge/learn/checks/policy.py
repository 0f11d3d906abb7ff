"""Check of exercise 6: a policy in a world short of blocks, and in one short of slots.

Owns the worlds and the limits, which are relative to `fcfs` on the same arrivals.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import ModuleType

from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.learn.answers import WrongAnswer, create_random
from forge.sim.metrics import RunMetrics
from forge.sim.scenario import Scenario

NUM_REQUESTS = 150
GOOD_PERCENT = 75
MIN_GAIN_PERCENT = 10
"""A policy that is better than `fcfs` by this lets requests pass, although too few."""
MAX_WAIT_RATIO = 1.3
MAX_FCFS_PERCENT = 60
"""Arrivals under which `fcfs` is better than this are drawn again: they block nothing."""
SHORT = ",".join(["32-96"] * 7)

BLOCKS_WORLD = Scenario(
    prompt=f"{SHORT},4000", output="100", rate=16.0, requests=NUM_REQUESTS,
    engine=EngineConfig(num_blocks=400),
)  # fmt: skip
SLOTS_WORLD = Scenario(
    prompt=f"{SHORT},2000", output="64", rate=18.0, requests=NUM_REQUESTS,
    engine=EngineConfig(max_num_seqs=8),
)  # fmt: skip


def check(module: ModuleType, seed: int) -> str:
    """Simulate the learner's policy and `fcfs` in both worlds, and compare them."""
    random = create_random(seed, 6)
    path = str(module.__file__)
    fcfs, world_seed = draw_blocked_arrivals(random)
    metrics = simulate(BLOCKS_WORLD, path, world_seed)
    good_percent = _good_percent(metrics)
    if good_percent < GOOD_PERCENT:
        fcfs_percent = _good_percent(fcfs)
        raise WrongAnswer(
            f"world short of blocks: {good_percent:.0f} % are good, {GOOD_PERCENT} % are the "
            f"goal, {fcfs_percent:.0f} % under fcfs",
            "Which request later in the queue could start now, in the blocks that are free?"
            if good_percent < fcfs_percent + MIN_GAIN_PERCENT
            else "Some requests pass, but too few. A bound on `num_overtaken` closes the queue "
            "until the long prompt has its blocks: is it above the short requests "
            "that come meanwhile?",
        )
    _check_longest_wait("world short of blocks", metrics, fcfs)
    world_seed = random.randrange(2**16)
    metrics, fcfs = (simulate(SLOTS_WORLD, each, world_seed) for each in (path, "fcfs"))
    _check_longest_wait("world short of slots", metrics, fcfs)
    return (
        f"{good_percent:.0f} % good where blocks are short; with short slots the longest wait is "
        f"{metrics.ttft.max_ns / 1e9:.1f} s, {fcfs.ttft.max_ns / 1e9:.1f} s under fcfs"
    )


def draw_blocked_arrivals(random: Random) -> tuple[RunMetrics, int]:
    """Draw arrivals of BLOCKS_WORLD that `fcfs` blocks; return its metrics and the seed."""
    while True:
        seed = random.randrange(2**16)
        metrics = simulate(BLOCKS_WORLD, "fcfs", seed)
        if _good_percent(metrics) <= MAX_FCFS_PERCENT:
            return metrics, seed


def _good_percent(metrics: RunMetrics) -> float:
    return 100 * metrics.num_good / NUM_REQUESTS


def _check_longest_wait(name: str, metrics: RunMetrics, fcfs: RunMetrics) -> None:
    """Raise WrongAnswer where a first token takes longer than the limit."""
    longest_s, limit_s = metrics.ttft.max_ns / 1e9, MAX_WAIT_RATIO * fcfs.ttft.max_ns / 1e9
    if longest_s > limit_s:
        raise WrongAnswer(
            f"{name}: the longest wait for a first token is {longest_s:.2f} s, the limit is "
            f"{limit_s:.2f} s",
            "Long prompts starve: short ones pass them although the long ones have their blocks. "
            "Pass a request only where it cannot start",
        )


def simulate(world: Scenario, policy: str, seed: int) -> RunMetrics:
    """Return the metrics of the world under a policy, by name or file. Raises WrongAnswer."""
    try:
        return replace(world, policy=policy, seed=seed).run().metrics
    except InvalidConfig as error:
        hint = "End the file with `policy = FCFS._replace(admit=admit)`"
        raise WrongAnswer(str(error), hint) from error
