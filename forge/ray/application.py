"""The application of a fleet: its deployments on Ray Serve, and their options.

Owns what Ray needs to know: resources, routing, health, autoscaling and the time to drain. All
else is in modules that do not know Ray.

    serve run forge.ray:app model=MODEL replicas=4 router=session-or-prefix num_blocks=4096

Always true: the name of an option is that of the file of `forge serve --config`, and its value is
checked by the same table; those of FleetOptions come in addition.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

from forge.cli.settings import Settings
from forge.ray.call import Call, ResponseHead
from forge.ray.fleet_options import FleetOptions, resolve_options
from forge.ray.ingress import Ingress
from forge.ray.replica import EngineReplica

LOST_ERRORS = (RayActorError, DeploymentUnavailableError)
MAX_INGRESS_REQUESTS = 10_000
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


class Replica(EngineReplica):
    """An EngineReplica with the name that Ray gives it."""

    def __init__(self, settings: Settings) -> None:
        values = settings.values
        super().__init__(
            serve.get_replica_context().replica_id.unique_id,
            values["model"],
            values["policy"],
            settings.engine_options,
            values["served_model_name"],
            tuple(values["api_key"] or ()),
            settings.limits,
            values["reasoning_parser"],
            values["tool_call_parser"],
            values["reasoning_config"],
        )


class IngressReplica:
    """The Ingress, with the handle of the engines."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        stream = engines.options(stream=True)

        async def send(call: Call) -> AsyncGenerator[ResponseHead | bytes, None]:
            response: Any = stream.remote(call)
            try:
                async for part in response:
                    yield part
            finally:
                response.cancel()  # changes nothing once it is complete

        self._ingress = Ingress(send, LOST_ERRORS)

    async def __call__(self, request: Request) -> Response:
        """Forward the request."""
        return await self._ingress(request)


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of a fleet. Raises InvalidConfig.

    args   options by their keys in a file; those that are not given are read from the environment
    """
    settings, fleet = resolve_options(args, os.environ)
    engines = serve.deployment(
        Replica,
        name="engine",
        max_ongoing_requests=fleet.max_requests,
        ray_actor_options={"num_cpus": fleet.replica_cpus, "num_gpus": fleet.replica_gpus},
        health_check_period_s=fleet.health_period_s,
        health_check_timeout_s=max(10.0, fleet.health_period_s),
        graceful_shutdown_timeout_s=fleet.drain_timeout_s,
        graceful_shutdown_wait_loop_s=1.0,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class="forge.ray.request_router:FleetRequestRouter",
            request_router_kwargs={
                "router": fleet.router,
                "replica_tokens": fleet.replica_tokens,
            },
        ),
        **_scaling_options(fleet),
    )
    ingress = serve.deployment(
        IngressReplica,
        name="ingress",
        # One process routes, so that it knows all requests. It needs little of a CPU.
        num_replicas=1,
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=fleet.drain_timeout_s,
        logging_config=QUIET,
    )
    return ingress.bind(engines.bind(settings))


def _scaling_options(fleet: FleetOptions) -> dict[str, Any]:
    """Return a fixed number of replicas, or how it follows their queue times."""
    if fleet.max_replicas is None:
        return {"num_replicas": fleet.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=fleet.replicas,
            max_replicas=fleet.max_replicas,
            policy=AutoscalingPolicy(
                policy_function="forge.ray.scaling:QueueTimePolicy",
                policy_kwargs={"target_queue_s": fleet.target_queue_s},
            ),
            metrics_interval_s=1.0,
            look_back_period_s=5.0,
            upscale_delay_s=5.0,
            downscale_delay_s=300.0,
        )
    }
