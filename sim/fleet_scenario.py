"""Fleet scenario: everything that decides the run of a fleet, as one frozen value.

Owns the names of feeds and the texts of deaths and starts. Knows no output. The requests, the
engine of each replica and the cost of its steps are those of a Scenario.

Always true: equal fleet scenarios write equal logs, byte for byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.kv_events import KVEventSink
from forge.routing.replica_table import DecisionFeed, EventFeed, ReplicaTable
from forge.routing.router import find_router
from forge.sim.clock import VirtualClockModel
from forge.sim.fleet import (
    NO_EVENTS,
    Fleet,
    FleetObserver,
    ReplicaEvent,
    ReplicaEvents,
)
from forge.sim.metrics import LatencyObjective
from forge.sim.scenario import Scenario
from forge.sim.units import NS_PER_S

FEEDS = ("events", "decisions")
"""Sources of what the router knows: KV events of replicas, or where it has sent requests."""

MAX_REPLICAS = 256


@dataclass(frozen=True, kw_only=True)
class FleetScenario:
    """Values that decide a run.

    base             requests, engine of each replica, and costs; its rate is that of the fleet
    num_replicas     replicas
    router           name of the router
    feed             one of FEEDS
    replica_events   deaths and starts

    Raises InvalidConfig.
    """

    base: Scenario
    num_replicas: int
    router: str
    feed: str = "events"
    replica_events: ReplicaEvents = NO_EVENTS

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise InvalidConfig(
                "replicas", f"{self.num_replicas} is not from 1 to {MAX_REPLICAS}", "Give 4, say"
            )
        find_router(self.router)
        if self.feed not in FEEDS:
            raise InvalidConfig(
                "feed", f"{self.feed[:64]!r} is not known", f"Use {' or '.join(FEEDS)}"
            )
        conflict = self.replica_events.conflict(self.num_replicas)
        if conflict is not None:
            raise InvalidConfig("deaths", conflict, "Change --deaths or --starts")
        if self.base.model == "hash" and self.base.workload == "agent":
            raise InvalidConfig(
                "model", "sessions of a fleet have answers of lengths only", "Use --model lengths"
            )

    def header(self) -> dict[str, Any]:
        """Return line 1 of the log: everything that decides the run."""
        return {
            **self.base.header(),
            "fleet": {
                "replicas": self.num_replicas,
                "router": self.router,
                "settings": repr(find_router(self.router)),
                "feed": self.feed,
                "deaths": self.replica_events.deaths,
                "starts": self.replica_events.starts,
            },
        }

    def run(self, *observers: FleetObserver) -> Fleet:
        """Return the fleet at its end."""
        workload, _ = self.base.create_workload()
        objective = LatencyObjective(self.base.slo_ttft_ms * 1e6, self.base.slo_itl_ms * 1e6)
        follows_events = self.feed == "events"
        table = ReplicaTable(
            find_router(self.router), EventFeed() if follows_events else DecisionFeed()
        )
        fleet = Fleet(
            self.base.create_engine if follows_events else self._create_silent_replica,
            self.num_replicas,
            table,
            workload,
            *observers,
            replica_events=self.replica_events,
            objective=objective,
        )
        fleet.run()
        return fleet

    def _create_silent_replica(self, sink: KVEventSink) -> tuple[Engine, VirtualClockModel]:
        """Return an engine that publishes no event, and its model."""
        return self.base.create_engine()


def parse_replica_events(name: str, text: str | None) -> tuple[ReplicaEvent, ...]:
    """Return the events of a text such as `1@30,2@60.5`: replica, then seconds.

    Raises InvalidConfig.
    """
    events = []
    for part in text.split(",") if text is not None else ():
        found = re.fullmatch(r"(\d{1,3})@(\d{1,9}(?:\.\d{1,9})?)", part)
        if found is None:
            raise InvalidConfig(
                name, f"{part[:64]!r} is not REPLICA@SECONDS", "Give 1@30,2@60, say"
            )
        events.append(ReplicaEvent(round(float(found[2]) * NS_PER_S), int(found[1])))
    return tuple(events)


def fleet_summary(fleet: Fleet) -> dict[str, Any]:
    """Return the figures of a run. Replicas are in the order of their starts.

    A request that moved is counted by both of its replicas, and once in the rest.
    """
    measures = fleet.metrics.summary()
    schedulers = [replica.engine.scheduler for replica in fleet.replicas]
    tokens = [replica.num_routed_tokens for replica in fleet.replicas]
    endings = measures["endings"]
    return {
        **measures,
        "refused": endings.get("refused", 0),
        "last_refusal": fleet.last_refusal,
        "moved": fleet.num_moved,
        "failed": endings.get("replica_died", 0) + endings.get("no_replica", 0),
        "steps": sum(replica.num_steps for replica in fleet.replicas),
        "preemptions": sum(each.num_preemptions for each in schedulers),
        "prompt_tokens": sum(each.num_queried_tokens for each in schedulers),
        "shared_tokens": sum(each.num_cached_tokens for each in schedulers),
        "loaded_tokens": sum(each.num_loaded_tokens for each in schedulers),
        "imbalance": max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0,
        "replicas": [
            {
                "id": replica.id,
                "requests": replica.num_requests,
                "routed_tokens": replica.num_routed_tokens,
                "steps": replica.num_steps,
                "prompt_tokens": scheduler.num_queried_tokens,
                "shared_tokens": scheduler.num_cached_tokens,
                "most_blocks": scheduler.pool.peak_used_blocks,
            }
            for replica, scheduler in zip(fleet.replicas, schedulers, strict=True)
        ],
    }


def share_percent(figures: Any) -> float:
    """Return the percentage of prompt tokens that were found in a cache."""
    return 100.0 * float(figures["shared_tokens"]) / max(1, int(figures["prompt_tokens"]))
