"""Policies that can be explored, and how much of growing numbers their decisions depend on.

Owns the bounds, and the small constants under which a policy is explored. Knows no scheduler and no
state. Numbers that grow without end would make the states of a world endless.

    num_overtaken   0 1 2 3 4 ...      a policy with MAX_OVERTAKEN = 2 reads: >= 2
                    0 1 2 2 2 ...      so states have min(num_overtaken, 2)

Always true: two values that are alike here are alike to every decision, and stay so when both grow.
A policy whose decisions depend on more is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from math import inf
from types import ModuleType
from typing import Any, NamedTuple

from forge.errors import InvalidConfig
from forge.policies import policy_path
from forge.policy import POLICIES, Policy
from forge.policy_loader import load_policy
from forge.sim.exploration.world import TinyWorld


class Reads(NamedTuple):
    """Value of each growing number above which all values have one effect; inf: there is none.

    num_overtaken   of a sequence
    num_served      of a sequence: positions computed for it
    num_turns       of a session
    paused_at       of a session: work at its last pause. Only differences of work are read besides
    num_tokens      of a session
    pause           work since a session has paused
    state           the policy's state -> the part of it that decisions read
    """

    num_overtaken: float = 0
    num_served: float = 0
    num_turns: float = 0
    paused_at: float = 0
    num_tokens: float = 0
    pause: float = 0
    state: Callable[[Any], Hashable] = repr


NOTHING = Reads()
EVERYTHING = Reads(inf, inf, inf, 1, inf, inf)
"""A policy that reads these numbers in full can be explored, though perhaps never completely."""

SMALL = {
    "longest-prefix": {"MAX_OVERTAKEN": 2},
    "session-fcfs": {"MAX_OVERTAKEN": 2},
    "working-set": {"MAX_OVERTAKEN": 2, "MAX_PAUSES": 1},
}
"""Policy -> constants that are smaller in a tiny world, so that their bounds are reached."""

READ_NOTHING = ("ageing", "fair-share", "newest", "shortest-aged", "shortest-job", "small-chunks")

REFUSED = {
    "attained-service": "the positions computed for a session",
    "fair-queueing": "the service of each tenant",
    "predicted-shortest": "the lengths of all outputs so far",
}
"""Policy -> the number without a bound that its decisions read."""


def explored_policy(name: str, world: TinyWorld) -> tuple[Policy, Reads]:
    """Return the policy of that name or file as it is explored, and what it reads.

    Raises InvalidConfig.
    """
    if name in REFUSED:
        raise _refusal(name, f"decides by {REFUSED[name]}, which grow without bound")
    if name in POLICIES or name in READ_NOTHING:
        return load_policy(name), NOTHING
    if name in SMALL:
        module = load_small(name)
        max_overtaken = module.MAX_OVERTAKEN
        if name == "longest-prefix":
            return module.policy, Reads(max_overtaken)
        if name == "session-fcfs":
            return module.policy, Reads(max_overtaken, num_served=1)
        return module.policy, _reads_of_working_set(module, world)
    policy = load_policy(name)
    if policy.update is not None:
        raise _refusal(name, "learns, and what it has learned may grow without bound")
    return policy, EVERYTHING


@cache
def load_small(name: str) -> ModuleType:
    """Return the module of a shipped policy, loaded once more, with its small constants."""
    path = policy_path(name)
    assert path is not None, f"{name} ships"
    spec = spec_from_file_location(f"{__name__}.{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is a module"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle finds the class of a policy's state there
    spec.loader.exec_module(module)
    for constant, value in SMALL[name].items():
        assert hasattr(module, constant), f"{name} has no {constant}"
        setattr(module, constant, value)
    return module


def _reads_of_working_set(module: ModuleType, world: TinyWorld) -> Reads:
    """Return what the working set reads.

    A mean pause above the tokens of the cache has one effect, whatever it is. A session is
    abandoned after some times a mean below that, so a longer pause has one effect too. The mean is
    that of one pause: a mean of more would remember how long the longest was.
    """
    assert module.MAX_PAUSES == 1, "the mean of several pauses has no bound"
    capacity = max(world.config.num_blocks, *world.sizes, 0) * world.config.block_size
    return Reads(
        module.MAX_OVERTAKEN,
        num_served=1,
        paused_at=1,
        num_tokens=inf,
        pause=module.ABANDONED_AFTER * capacity + 1,
        state=lambda pauses: (pauses.number, min(pauses.mean, capacity + 1)),
    )


def _refusal(name: str, why: str) -> InvalidConfig:
    explored = ", ".join(sorted([*POLICIES, *READ_NOTHING, *SMALL]))
    return InvalidConfig(
        "policy", f"{name[:64]!r} {why}", f"Explore {explored}, or a FILE.py without `update`"
    )
