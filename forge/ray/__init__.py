"""Replicas of an engine on Ray Serve, on one machine or many.

    serve run forge.ray:app model=MODEL replicas=4

    client ──► Ray's proxy ──► Ingress ──► Ray's handle ──┬──► EngineReplica ──► engine process
               HTTP            retries     choose_replicas├──► EngineReplica
                                               │          └──► EngineReplica
                                     RoutingState ──► forge.routing

application     the deployments and their options: the only module besides request_router with Ray
ingress         forwards a request, and moves it while its response has not started
replica         one engine with the routes of `forge serve`
request_router  Ray's interface for a router, on top of RoutingState
routing_state   replicas by Ray's names, and the ReplicaTable
routing_key     what a router reads of a request: hashes of its prompt's bytes, session, tenant
scaling         the number of replicas by the queue time of their engines
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "app":
        from forge.ray.application import app

        return app
    raise AttributeError(name)
