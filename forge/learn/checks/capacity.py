"""Check of exercise 9: the highest rate of a GPU within two limits, found with few simulations.

Owns the GPUs, the drawn limits and the count of simulations. The figures are those of `forge sim`
under roofline costs.
"""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import NamedTuple

from forge.config import EngineConfig
from forge.learn.answers import WrongAnswer, call_for_number, create_random
from forge.sim.cost.roofline import GPUS, MODEL_SHAPES
from forge.sim.scenario import Scenario

NUM_REQUESTS = 60
MAX_SIMULATIONS = 14
TOLERANCE = 1.05
HIGHER_SHARES = (1.03, 1.04, TOLERANCE, 1.055)
"""Rates above the answer, as shares of it. 95 % of the right rate breaks a limit at the last."""
LOOSE_MS = 60_000.0
BLOCK_SIZE, MEMORY_SHARE = 16, 0.9
MACHINES = (
    ("rtx-4090", "qwen3-4b", 24.0),
    ("rtx-3090", "qwen3-4b", 14.0),
    ("l40s", "qwen3-8b", 28.0),
)
"""GPU, model, and the rate near which requests begin to queue: TTFT grows steeply there."""
RATE_SHARES = {"ttft_p99_ms": (0.85, 1.1), "itl_mean_ms": (0.4, 0.6)}
"""Rates at which limits are drawn, as shares of that rate. ITL grows with the batch before it."""


class Figures(NamedTuple):
    """Milliseconds: 99 % of requests to their first token, mean between tokens."""

    ttft_p99_ms: float
    itl_mean_ms: float


class World(NamedTuple):
    """A GPU, a model, and the lengths of requests."""

    gpu: str
    model: str
    queueing_rate: float
    prompt: str
    seed: int

    def run(self, rate: float) -> Figures:
        """Simulate requests at this rate, on a cache that fills the GPU's memory."""
        shape = MODEL_SHAPES[self.model]
        memory_bytes = MEMORY_SHARE * GPUS[self.gpu].memory_bytes - shape.weight_bytes
        engine = EngineConfig(
            num_blocks=int(memory_bytes / shape.kv_bytes_per_token) // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=512,
            max_num_seqs=256,
            depth=2,
        )
        scenario = Scenario(
            cost=f"roofline:{self.gpu},{self.model}",
            rate=rate,
            requests=NUM_REQUESTS,
            prompt=self.prompt,
            output="64-192",
            seed=self.seed,
            engine=engine,
        )
        metrics = scenario.run().metrics
        return Figures(metrics.ttft.quantile_ns(0.99) / 1e6, metrics.itl.mean_ns / 1e6)


class Simulations:
    """The function `simulate` of one case: runs the world, and counts the runs."""

    def __init__(self, world: World) -> None:
        self.count = 0
        self._world = world

    def __call__(self, rate: float) -> Figures:
        """Return the figures at this rate. Raises WrongAnswer after too many."""
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.1 <= rate <= 1000:
            raise WrongAnswer(f"simulate({rate!r}): a rate is a number from 0.5 to 100")
        self.count += 1
        if self.count > MAX_SIMULATIONS:
            raise WrongAnswer(
                f"{self.count} simulations, and {MAX_SIMULATIONS} are there",
                "Halve the interval that holds the answer: 14 halvings of 100 leave 0.006",
            )
        return self._world.run(rate)


def draw_world(random: Random) -> World:
    """Draw a machine and lengths of prompts."""
    shortest = random.randrange(150, 250)
    machine = random.choice(MACHINES)
    return World(*machine, f"{shortest}-{shortest + 600}", random.randrange(2**16))


def check(module: ModuleType, seed: int) -> str:
    """Let the function search in two worlds: TTFT is the limit of one, ITL that of the other."""
    random = create_random(seed, 9)
    notes = []
    for limited in Figures._fields:
        world = draw_world(random)
        at_limit = world.run(random.uniform(*RATE_SHARES[limited]) * world.queueing_rate)
        limit_ms = round(getattr(at_limit, limited) + 0.05, 1)
        limits = Figures(LOOSE_MS, LOOSE_MS)._replace(**{limited: limit_ms})
        rate = call_for_number(module, "highest_rate", Simulations(world), *limits)
        _check_rate(world, limits, rate)
        notes.append(f"{rate:.1f}/s of {world.model} on {world.gpu}")
    return ", ".join(notes)


def _check_rate(world: World, limits: Figures, rate: float) -> None:
    """Raise WrongAnswer unless the limits hold at the rate or 5 % below, and break above it."""
    where = f"{world.model} on {world.gpu}, prompts of {world.prompt}"
    if not 0.1 <= rate <= 1000:
        raise WrongAnswer(f"{where}: {rate:g} is no rate from 0.5 to 100")
    found = world.run(rate)
    # The figures of a few requests are not quite monotonic, so one neighbour is enough.
    if not (_hold(found, limits) or _hold(world.run(rate / TOLERANCE), limits)):
        values = zip(Figures._fields, found, limits, strict=True)
        name, value, limit = next(each for each in values if each[1] > each[2])
        raise WrongAnswer(
            f"{where}: at {rate:.2f}/s {name} is {value:.1f}, the limit is {limit:.1f}",
            "The rate is too high. Both limits must hold, and the answer is the end of the "
            "interval at which they do",
        )
    if all(_hold(world.run(rate * share), limits) for share in HIGHER_SHARES):
        higher = rate * HIGHER_SHARES[-1]
        raise WrongAnswer(
            f"{where}: the limits hold at {rate:.2f}/s, and at {higher:.2f}/s too",
            "The rate is too low: search on until the interval is narrow",
        )


def _hold(figures: Figures, limits: Figures) -> bool:
    return all(value <= limit for value, limit in zip(figures, limits, strict=True))
