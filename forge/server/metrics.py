"""The figures of /metrics: counts of the engine, and latencies of the requests that are read here.

Owns the names, the counts and the histograms. The engine's figures come with each step report, as
totals since it was made. Latencies are measured where responses are read. Each figure is counted
once and may have a forge name and vLLM names.

    engine ── StepReport ──► on_step ────────┐
                                             ├─► ServerStats ──► StatsCollector ──► GET /metrics
    reader ── on_deltas, on_close ───────────┘                   names, labels

Always true: no label has a value that a client chooses, so the number of series is fixed. No
counter falls while the server lives. One thread writes each histogram; a scrape may see it between
two writes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf, isinf
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
from forge.engine_loop import EngineStatus, StepReport
from forge.errors import InvalidConfig
from forge.outputs import TextDelta
from forge.request import FinishReason, Request

TIME_BUCKETS_S = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5))
"""Bounds of the histograms of time: 1 ms to 500 s. A step of a small model takes less than 1 ms."""
FINE_TIME_BUCKETS_S = (0.0001, 0.0002, 0.0005, *TIME_BUCKETS_S)
TOKEN_BUCKETS = tuple(2**power for power in range(15))
"""Bounds of the histogram of tokens: 1 to 16384."""
COMPLETED_REASONS = (FinishReason.STOP.value, FinishReason.LENGTH.value)
"""Finish reasons of choices that were served to their end."""


class Histogram:
    """Counts of values up to each bound. It has no lock: one thread writes it."""

    def __init__(self, upper_bounds: Sequence[float]) -> None:
        self._upper_bounds = upper_bounds
        self._counts = [0] * (len(upper_bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count the value."""
        self._counts[bisect_left(self._upper_bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return (bound, values up to it) for each bound, and the sum of all values."""
        total, buckets = 0, list[tuple[str, float]]()
        for edge, count in zip((*self._upper_bounds, inf), list(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if isinf(edge) else repr(float(edge)), total))
        return buckets, self._sum


HTTP_STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 500, 503, 504)
"""Statuses that the server sends: each has its series before the first response with it."""


class ServerStats:
    """The counts of one server: an EngineObserver of its engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._last_status = llm.status
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self.num_responses = dict.fromkeys(HTTP_STATUSES, 0)
        self.time_to_first_token = Histogram(TIME_BUCKETS_S)
        self.inter_token_latency = Histogram(FINE_TIME_BUCKETS_S)
        self.request_latency = Histogram(TIME_BUCKETS_S)
        self.queue_time = Histogram(TIME_BUCKETS_S)
        self.step_time = Histogram(FINE_TIME_BUCKETS_S)
        self.step_tokens = Histogram(TOKEN_BUCKETS)
        llm.add_observer(self)

    @property
    def status(self) -> EngineStatus:
        """Return the engine's figures in its latest report."""
        return self._llm.status

    def on_step(self, report: StepReport) -> None:
        """Count the step of the report."""
        last_status, self._last_status = self._last_status, report.status
        num_tokens = self._last_status.num_planned_tokens - last_status.num_planned_tokens
        if num_tokens:
            self.step_tokens.observe(num_tokens)
        if self._last_status.num_steps != last_status.num_steps:
            self.step_time.observe(report.step_s)
        for wait_s in report.queue_times_s:
            self.queue_time.observe(wait_s)

    def count_response(self, status: int) -> None:
        """Count a response of this status, when it starts."""
        self.num_responses[status] = self.num_responses.get(status, 0) + 1

    def on_request(self, request: Request) -> RequestStats:
        """Return the observer that counts the request."""
        return RequestStats(self, request)


class RequestStats:
    """Counts one request while its output is read."""

    def __init__(self, stats: ServerStats, request: Request) -> None:
        self._stats = stats
        self._prompt_tokens = len(request.prompt)
        self._start_s = time.monotonic()
        # Time of the latest tokens of each open choice; 0.0: none yet.
        self._last_token_s = dict.fromkeys(range(request.params.n), 0.0)
        self._has_started = False

    def on_deltas(self, deltas: Sequence[TextDelta]) -> None:
        """Count the tokens, latencies and finish reasons of the deltas."""
        stats, now_s = self._stats, time.monotonic()
        for choice, _, tokens, finish, *_ in deltas:
            if not self._has_started and (tokens or finish in COMPLETED_REASONS):
                self._has_started = True
                stats.num_prompt_tokens += self._prompt_tokens
                if tokens:
                    stats.time_to_first_token.observe(now_s - self._start_s)
            if tokens:
                stats.num_generation_tokens += len(tokens)
                if last_s := self._last_token_s[choice]:
                    stats.inter_token_latency.observe(now_s - last_s)
                self._last_token_s[choice] = now_s
            if finish is not None:
                del self._last_token_s[choice]
                stats.num_finished[finish] += 1
                if finish in COMPLETED_REASONS:
                    stats.request_latency.observe(now_s - self._start_s)

    def on_close(self) -> None:
        """Count open choices as aborted: their reader has left."""
        self._stats.num_finished[FinishReason.ABORT.value] += len(self._last_token_s)
        self._last_token_s.clear()


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
        "Of those, tokens that were in the cache",
        lambda f: f.status.num_cached_tokens,
        "prefix_cache_hits_total",
        "prefix_cache_hits_total",
    ),
    MetricSpec(
        "Of these, tokens of later turns of a session, by where they were",
        CounterMetricFamily,
        lambda f: {"device": f.status.num_resumed_tokens},
        MetricName("resumed_tokens_total", "from"),
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

    def __init__(self, llm: AsyncLLM, *, model: str, compat: str | None = None) -> None:
        if compat not in (None, *COMPAT_SYSTEMS):
            raise InvalidConfig(
                "metrics_compat", f"{compat!r} is not known", f"Use {', '.join(COMPAT_SYSTEMS)}"
            )
        self.stats = stats = ServerStats(llm)
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
