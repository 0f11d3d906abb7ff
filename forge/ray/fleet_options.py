"""FleetOptions: how many replicas of an engine there are, on what, and how they are routed to.

Owns the options of a fleet, and their checks. Knows no Ray object. Those of an engine are in the
table of `forge serve`.

    replicas=4                          four, always
    min_replicas=1 max_replicas=8       as many as their queue times call for
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.cli.options import (
    ENGINE_OPTIONS,
    LIMIT_OPTIONS,
    MODEL_OPTION,
    POLICY_OPTION,
    SERVER_OPTIONS,
    options_from_dataclass,
)
from forge.cli.settings import Settings, resolve_settings
from forge.errors import InvalidConfig
from forge.routing.router import find_router


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of a fleet.

    replicas           engines, each with its own cache
    max_replicas       most engines where their number follows the load; replicas is the least then
    target_queue_s     seconds that the longest waiting requests of engines may wait, on average,
                       before engines are added
    router             name of the router: session-or-prefix, prefix-aware, round-robin and others
    replica_tokens     tokens that the cache of an engine holds, for the router's memory of them
    replica_gpus       GPUs that Ray reserves for an engine; 0 for models on a CPU
    replica_cpus       CPUs that Ray reserves for an engine
    max_requests       most open requests of an engine, those in its queue included
    drain_timeout_s    seconds that open requests may take when an engine is stopped or replaced
    health_period_s    seconds between two checks of an engine's health
    """

    replicas: int = 1
    max_replicas: int | None = None
    target_queue_s: float = 1.0
    router: str = "session-or-prefix"
    replica_tokens: int = 500_000
    replica_gpus: float = 0.0
    replica_cpus: float = 1.0
    max_requests: int = 512
    drain_timeout_s: float = 120.0
    health_period_s: float = 5.0

    def __post_init__(self) -> None:
        find_router(self.router)
        for name, value, least in (
            ("replicas", self.replicas, 1),
            ("max_replicas", self.max_replicas, self.replicas),
            ("replica_tokens", self.replica_tokens, 1),
            ("max_requests", self.max_requests, 1),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise InvalidConfig(
                    name, f"{value!r} is not an integer from {least}", "Give a larger one"
                )
        for name, seconds in (
            ("target_queue_s", self.target_queue_s),
            ("drain_timeout_s", self.drain_timeout_s),
            ("health_period_s", self.health_period_s),
        ):
            if type(seconds) not in (int, float) or not 0 < seconds < 1e6:
                raise InvalidConfig(name, f"{seconds!r} is no time above 0", "Give seconds")
        for name, count in (
            ("replica_gpus", self.replica_gpus),
            ("replica_cpus", self.replica_cpus),
        ):
            if type(count) not in (int, float) or not 0 <= count < 1e4:
                raise InvalidConfig(name, f"{count!r} is no number from 0", "Give 1, say")


FLEET_OPTIONS = options_from_dataclass(
    FleetOptions, [name for name in FleetOptions.__slots__ if not name.startswith("_")]
)
_REPLICA_NAMES = (
    *("api_key", "served_model_name", "reasoning_parser", "tool_call_parser"),
    "reasoning_config",
)
REPLICA_SERVER_OPTIONS = tuple(each for each in SERVER_OPTIONS if each.name in _REPLICA_NAMES)
OPTIONS = (
    MODEL_OPTION,
    *FLEET_OPTIONS,
    *REPLICA_SERVER_OPTIONS,
    *LIMIT_OPTIONS,
    *ENGINE_OPTIONS,
    POLICY_OPTION,
)


def resolve_options(
    args: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Settings, FleetOptions]:
    """Return the options of an engine and of the fleet. Raises InvalidConfig."""
    by_key = {each.file_key: each for each in OPTIONS}
    for key in args:
        if key not in by_key:
            raise InvalidConfig(str(key)[:64], "there is no such option", "See forge serve --help")
    flags = {
        by_key[key].name: value if isinstance(value, list) else str(value)
        for key, value in args.items()
    }
    settings = resolve_settings(OPTIONS, flags, environ)
    fleet = FleetOptions(**{each.name: settings.values[each.name] for each in FLEET_OPTIONS})
    return settings, fleet
