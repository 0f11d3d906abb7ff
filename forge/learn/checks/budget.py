"""Check of exercise 5: a token budget under two limits, in three simulated runs.

Owns the world and the limits. The runs are those of `forge sim`.
"""

from __future__ import annotations

from statistics import fmean
from types import ModuleType

from forge.config import MAX_GEOMETRY, EngineConfig
from forge.learn.answers import WrongAnswer, create_random
from forge.sim.scenario import Scenario

NUM_SEEDS = 3
NUM_REQUESTS = 200
RATE = 18.0
COST = "affine:10000,20,20"
MAX_ITL_MS = 35.0
GOOD_PERCENT = 90
MIN_BUDGET = 16


def check(module: ModuleType, seed: int) -> str:
    """Simulate the budget under drawn arrivals and compare its figures with the limits."""
    budget = module.MAX_NUM_BATCHED_TOKENS
    name, limit = "max_num_batched_tokens", MAX_GEOMETRY["max_num_batched_tokens"]
    if type(budget) is not int or not MIN_BUDGET <= budget <= limit:
        what = f"MAX_NUM_BATCHED_TOKENS is {budget!r}, not a whole number from {MIN_BUDGET}"
        raise WrongAnswer(what, f"It is what `{name.replace('_', '-')}` sets: 64, say")
    random = create_random(seed, 5)
    runs = [simulate(budget, random.randrange(2**16)) for _ in range(NUM_SEEDS)]
    itl_ms = max(each for each, _ in runs)
    good_percent = fmean(each for _, each in runs)
    figures = f"budget {budget}: ITL p99 up to {itl_ms:.1f} ms, {good_percent:.0f} % good"
    if good_percent < GOOD_PERCENT:
        raise WrongAnswer(
            f"{figures}; {GOOD_PERCENT} % were promised",
            "The steps are short, and prompts get too few tokens of them: they queue. 18 requests "
            "bring 25,000 tokens a second: how many does a full step compute in a second? A queue "
            "is short only where that is a fifth or more above what comes",
        )
    if itl_ms > MAX_ITL_MS:
        raise WrongAnswer(
            f"{figures}; {MAX_ITL_MS:g} ms were promised",
            "A step with a chunk of a prompt delays the next token of every other request: how "
            "long may a step be? Its rows take 20 us each, besides the tokens",
        )
    return figures


def simulate(budget: int, seed: int) -> tuple[float, float]:
    """Return the 99 % quantile of times between tokens in ms, and the good requests in per cent."""
    scenario = Scenario(
        cost=COST,
        rate=RATE,
        requests=NUM_REQUESTS,
        prompt="512-2048",
        output="64-128",
        seed=seed,
        engine=EngineConfig(
            num_blocks=8192,
            max_num_batched_tokens=budget,
            max_num_seqs=min(budget, EngineConfig().max_num_seqs),
        ),
    )
    metrics = scenario.run().metrics
    return metrics.itl.quantile_ns(0.99) / 1e6, 100 * metrics.num_good / NUM_REQUESTS
