"""The figures of /metrics: their names, here and in vLLM, and the exposition.

Owns the names and labels. Knows no clock: ServerStats counts. Each figure is counted once and may
have a forge name and vLLM names.

    ServerStats ──► StatsCollector ──► GET /metrics
                    names, labels

Always true: no label has a value that a client chooses, so the number of series is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from forge.async_llm import AsyncLLM
from forge.engine_messages import EngineStatus
from forge.errors import InvalidConfig
from forge.server.server_stats import Histogram, ServerStats
from forge.server.traces import RequestTraces
from forge.tier_status import NO_TIERS, TierStatus

# Names.


class MetricName(NamedTuple):
    """Name of a figure.

    label   label of its series where there are several, "" where there is one
    """

    name: str
    label: str = ""


class MetricSpec(NamedTuple):
    """A figure: its meaning, how to read it, and its names.

    family_type   class of prometheus_client's families
    value_of      returns a Histogram, or a number for each value of the label
    """

    documentation: str
    family_type: Callable[..., Any]
    value_of: Callable[[ServerStats], Any]
    forge_name: MetricName
    vllm_names: tuple[MetricName, ...] = ()


def _gauge(
    documentation: str, value_of: Callable[[EngineStatus], float], name: str, *vllm: str
) -> MetricSpec:
    names = tuple(map(MetricName, vllm))
    return MetricSpec(
        documentation,
        GaugeMetricFamily,
        lambda f: {"": value_of(f.status)},
        MetricName(name),
        names,
    )


def _tier_gauge(
    documentation: str, value_of: Callable[[TierStatus], float], name: str
) -> MetricSpec:
    return _gauge(documentation, lambda s: value_of(s.tiers or NO_TIERS), name)


def _counter(
    documentation: str, value_of: Callable[[ServerStats], float], name: str, *vllm: str
) -> MetricSpec:
    names = tuple(map(MetricName, vllm))
    return MetricSpec(
        documentation, CounterMetricFamily, lambda f: {"": value_of(f)}, MetricName(name), names
    )


def _histogram(
    documentation: str, value_of: Callable[[ServerStats], Histogram], name: str, *vllm: str
) -> MetricSpec:
    return MetricSpec(
        documentation,
        HistogramMetricFamily,
        value_of,
        MetricName(name),
        tuple(map(MetricName, vllm)),
    )


METRICS = (
    _gauge(
        "Sequences in the batch",
        lambda s: s.num_running,
        "requests_running",
        "num_requests_running",
    ),
    _gauge(
        "Sequences in the engine that are not in the batch",
        lambda s: s.num_waiting,
        "requests_waiting",
        "num_requests_waiting",
    ),
    _gauge("Blocks of the cache", lambda s: s.num_blocks, "kv_blocks_total"),
    _gauge("Blocks that belong to open sequences", lambda s: s.num_used_blocks, "kv_blocks_used"),
    _gauge(
        "Blocks that no sequence holds and whose content is kept",
        lambda s: s.num_cached_blocks,
        "kv_blocks_cached",
    ),
    _gauge(
        "Blocks that belong to open sequences, as a share of all",
        lambda s: s.num_used_blocks / s.num_blocks,
        "kv_usage_ratio",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
    ),
    _counter(
        "Tokens that sequences had when they were first admitted",
        lambda f: f.status.num_queried_tokens,
        "prefix_cache_queries_total",
        "prefix_cache_queries_total",
    ),
    _counter(
        "Of those, tokens that were in the cache on the device",
        lambda f: f.status.num_cached_tokens,
        "prefix_cache_hits_total",
        "prefix_cache_hits_total",
    ),
    _counter(
        "Of the queries, tokens that were not in the cache on the device",
        lambda f: f.num_tokens_off_device(),
        "host_cache_queries_total",
        "external_prefix_cache_queries_total",
    ),
    _counter(
        "Of those, tokens that were in host memory or in files",
        lambda f: f.tiers.num_host_tokens + f.tiers.num_disk_tokens,
        "host_cache_hits_total",
        "external_prefix_cache_hits_total",
    ),
    MetricSpec(
        "Tokens that sequences had when they were first admitted, by where they were",
        CounterMetricFamily,
        lambda f: f.tokens_by_source(),
        MetricName("prompt_tokens_by_source_total", "source"),
    ),
    MetricSpec(
        "Tokens found for later turns of a session, by where they were",
        CounterMetricFamily,
        lambda f: {
            "device": f.status.num_resumed_tokens,
            "host": f.tiers.num_resumed_host_tokens,
            "disk": f.tiers.num_resumed_disk_tokens,
        },
        MetricName("resumed_tokens_total", "from"),
    ),
    _tier_gauge("Blocks of the host pool", lambda t: t.num_host_blocks, "kv_host_blocks_total"),
    _tier_gauge(
        "Blocks of the host pool whose content can be loaded",
        lambda t: t.num_used_host_blocks,
        "kv_host_blocks_used",
    ),
    _tier_gauge("Files of blocks that can be read", lambda t: t.num_files, "kv_disk_files"),
    MetricSpec(
        "Blocks copied between device, host memory and files, by move",
        CounterMetricFamily,
        lambda f: {
            "store": f.tiers.num_stored_blocks,
            "load": f.tiers.num_loaded_blocks,
            "spill": f.tiers.num_spilled_blocks,
            "fetch": f.tiers.num_fetched_blocks,
        },
        MetricName("tier_moves_total", "move"),
    ),
    MetricSpec(
        "Files of blocks that could not be written, or not be read as they were written",
        CounterMetricFamily,
        lambda f: {"spill": f.tiers.num_failed_spills, "fetch": f.tiers.num_failed_fetches},
        MetricName("tier_failed_moves_total", "move"),
    ),
    _counter(
        "Files of blocks given up: a step failed, a reset, a resize, or too long a wait",
        lambda f: f.tiers.num_dropped_moves,
        "tier_dropped_moves_total",
    ),
    _counter(
        "Blocks of the host pool whose content gave way to another",
        lambda f: f.tiers.num_host_evictions,
        "host_cache_evictions_total",
    ),
    MetricSpec(
        "Steps with changes of the prefix cache for subscribers: published, or dropped where the "
        "queue was full",
        CounterMetricFamily,
        lambda f: {
            "published": f.kv_events.num_published,
            "dropped": f.kv_events.num_dropped,
        },
        MetricName("kv_event_batches_total", "outcome"),
    ),
    MetricSpec(
        "Spans of requests: exported, or lost where the collector does not take them",
        CounterMetricFamily,
        lambda f: {"exported": f.spans.num_exported, "lost": f.spans.num_lost},
        MetricName("trace_spans_total", "outcome"),
    ),
    _counter(
        "Recordings that ended because their file could not be written",
        lambda f: f.status.num_failed_recordings,
        "recording_failures_total",
    ),
    _gauge("Sessions that have not ended", lambda s: s.num_sessions, "sessions_open"),
    _gauge(
        "Of those, sessions without an open request",
        lambda s: s.num_paused_sessions,
        "sessions_paused",
    ),
    _counter(
        "Draft tokens that the model has verified",
        lambda f: f.status.num_draft_tokens,
        "spec_draft_tokens_total",
        "spec_decode_num_draft_tokens_total",
    ),
    _counter(
        "Of those, tokens that it has accepted",
        lambda f: f.status.num_accepted_tokens,
        "spec_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    ),
    MetricSpec(
        "Times that a sequence lost its blocks and waited again",
        CounterMetricFamily,
        lambda f: {"recompute": f.status.num_preemptions},
        MetricName("preemptions_total", "mode"),
        (MetricName("num_preemptions_total"),),
    ),
    _counter(
        "Tokens computed again after a sequence lost its blocks",
        lambda f: f.status.num_recomputed_tokens,
        "recomputed_tokens_total",
    ),
    _counter(
        "Tokens of prompts whose output has started",
        lambda f: f.num_prompt_tokens,
        "prompt_tokens_total",
        "prompt_tokens_total",
    ),
    _counter(
        "Tokens of outputs",
        lambda f: f.num_generation_tokens,
        "generation_tokens_total",
        "generation_tokens_total",
    ),
    MetricSpec(
        "Choices of requests that have ended, by finish reason",
        CounterMetricFamily,
        lambda f: dict(f.num_finished),
        MetricName("requests_total", "finish"),
        (MetricName("request_success_total", "finished_reason"),),
    ),
    MetricSpec(
        "Responses, by HTTP status",
        CounterMetricFamily,
        lambda f: {str(status): count for status, count in f.num_responses.items()},
        MetricName("http_responses_total", "status"),
    ),
    _histogram(
        "From the request to its first token",
        lambda f: f.time_to_first_token,
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
    ),
    _histogram(
        "Between two events of a choice, each of which may hold several tokens",
        lambda f: f.inter_token_latency,
        "inter_token_latency_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    _histogram(
        "From the request to the end of a choice that was served to its end",
        lambda f: f.request_latency,
        "request_latency_seconds",
        "e2e_request_latency_seconds",
    ),
    _histogram(
        "From the request's arrival at the engine to the first step that serves it",
        lambda f: f.queue_time,
        "queue_time_seconds",
        "request_queue_time_seconds",
    ),
    _histogram("One step: schedule, forward, commit", lambda f: f.step_time, "step_time_seconds"),
    _histogram(
        "Tokens that one step computes",
        lambda f: f.step_tokens,
        "step_tokens",
        "iteration_tokens_total",
    ),
)


# The exposition.

NameSelector = Callable[[MetricSpec], Iterable[MetricName]]


class MetricNamespace(NamedTuple):
    """Names of one system for the figures.

    labels   labels of each of its series
    """

    prefix: str
    names: NameSelector
    labels: Mapping[str, str]


class StatsCollector:
    """A collector of prometheus_client: the figures of one application in one namespace."""

    def __init__(self, stats: ServerStats, namespace: MetricNamespace) -> None:
        self._stats = stats
        self._namespace = namespace

    def collect(self) -> Iterator[Metric]:
        """Yield every figure under each of its names, with its current value."""
        for spec in METRICS:
            for name in self._namespace.names(spec):
                yield self._build_family(spec, name)

    def _build_family(self, spec: MetricSpec, name: MetricName) -> Metric:
        values, common_labels = spec.value_of(self._stats), self._namespace.labels
        labels = [*common_labels, name.label] if name.label else [*common_labels]
        family: Metric = spec.family_type(
            self._namespace.prefix + name.name, spec.documentation, labels=labels
        )
        add: Callable[..., None] = family.add_metric  # type: ignore[attr-defined]
        if isinstance(values, Histogram):
            add(list(common_labels.values()), *values.buckets())
        elif name.label:
            for value, number in values.items():
                add([*common_labels.values(), value], number)
        else:
            add(list(common_labels.values()), sum(values.values()))
        return family


COMPAT_SYSTEMS = ("vllm",)
"""Systems whose names /metrics can have in addition to forge's own."""


class MetricsEndpoint:
    """The route /metrics. Each application has its own registry.

    model    the served name, by which vLLM's dashboards select
    compat   one of COMPAT_SYSTEMS, whose names are exposed too, or None; InvalidConfig for others
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        model: str,
        compat: str | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        if compat not in (None, *COMPAT_SYSTEMS):
            raise InvalidConfig(
                "metrics_compat", f"{compat!r} is not known", f"Use {', '.join(COMPAT_SYSTEMS)}"
            )
        self.stats = stats = ServerStats(llm, traces)
        self._registry = CollectorRegistry()
        self._registry.register(
            StatsCollector(stats, MetricNamespace("forge_", lambda f: (f.forge_name,), {}))
        )
        if compat == "vllm":
            labels = {"model_name": model, "engine": "0"}
            self._registry.register(
                StatsCollector(stats, MetricNamespace("vllm:", lambda f: f.vllm_names, labels))
            )

    async def scrape(self, request: HttpRequest) -> Response:
        """Handle GET and HEAD /metrics, in the format of the accept header."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})
