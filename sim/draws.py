"""Draws: pseudo-random numbers as pure functions of a seed, a purpose, a key and an index.

Owns the purposes: one number for each use, so that no two uses draw the same numbers. Knows no
state, so an additional draw for one request changes nothing for another.

    draw_uniform(seed, purpose, key, index)     the key is a request, a session or a step

Always true: equal arguments give the same number on every machine.
"""

from __future__ import annotations

from math import log

from forge.sampling import draw_key, uniform

GAP_DRAW, PROMPT_DRAW, OUTPUT_DRAW, THINK_TIME_DRAW, STATE_DRAW = range(5)
"""Purposes in workloads. 17 is that of LengthModel, 32 to 37 are those of forge.sim.faults."""

CLASS_DRAW, TENANT_DRAW = 48, 49
"""Purposes of request labels."""

TURNS_DRAW, SUBAGENTS_DRAW, ABANDON_DRAW = 50, 51, 52
"""Purposes of sessions."""
ADMISSION_DRAW = 64
"""Purpose of random admission to the prefix cache."""

UNEVEN_DRAW, ORDER_DRAW, IDS_DRAW, HOLDOUT_DRAW, NOISE_DRAW, HOST_HOLDOUT_DRAW = range(81, 87)
BLOCKS_DRAW, PAST_DRAW = 87, 88
"""Purposes in calibration, and NOISE_DRAW in simulations with noise."""


def draw_uniform(seed: int, purpose: int, key: int, index: int = 0) -> float:
    """Return a number drawn uniformly from (0, 1)."""
    return uniform(draw_key(seed, key, purpose), index)


def exponential_ns(mean_ns: float, uniform: float) -> int:
    """Map a uniform draw from (0, 1) to an exponential duration in whole nanoseconds."""
    return round(-mean_ns * log(uniform))
