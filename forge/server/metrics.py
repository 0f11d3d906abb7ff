"""What /metrics says: figures of the engine and of the requests that this process reads for.

Owns the names, the counts and the histograms. What the engine knows comes with each report of a
step, as counts since it was made. Latencies are taken where answers are read. A figure is counted
once, whatever it is called: FORGE and VLLM name the same figures.

    engine ── Report ──► stepped ──┐
                                   ├─► Figures ──► Exposition ──► GET /metrics
    reader ── gained, left ────────┘              names, labels

There is no label that a client chooses, so the number of series is fixed. No count ever falls while
the server lives. Each histogram is written by one thread; a scrape may see it between two writes.
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
from forge.engine_loop import Report, Status
from forge.errors import InvalidConfig
from forge.llm import TextDelta
from forge.request import FinishReason, Request

SECONDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5))
"""Edges of the histograms of time: 1 ms to 500 s. A step of a small model takes less than 1 ms."""
FINE_SECONDS = (0.0001, 0.0002, 0.0005, *SECONDS)
TOKENS = tuple(2**power for power in range(15))
"""Edges of the histogram of tokens: 1 to 16384."""
SERVED = (FinishReason.STOP.value, FinishReason.LENGTH.value)
"""How a choice ends that was served to its end."""


class Histogram:
    """How often a value fell at or under each edge. It has no lock: one thread writes it."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """The value is counted."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(edge, values at or under it) for each edge, and the sum of all values."""
        total, found = 0, list[tuple[str, float]]()
        for edge, count in zip((*self._edges, inf), list(self._counts), strict=True):
            total += count
            found.append(("+Inf" if isinf(edge) else repr(float(edge)), total))
        return found, self._sum


STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 500, 503, 504)
"""Every status that the server knows, so that a series is there before it counts."""


class Figures:
    """Everything that is counted: an Observer of the engine that it is about."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._seen = llm.status
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self.responses = dict.fromkeys(STATUSES, 0)
        self.first_token = Histogram(SECONDS)
        self.inter_token = Histogram(FINE_SECONDS)
        self.latency = Histogram(SECONDS)
        self.queue = Histogram(SECONDS)
        self.step_time = Histogram(FINE_SECONDS)
        self.step_tokens = Histogram(TOKENS)
        llm.observe(self)

    @property
    def status(self) -> Status:
        """The engine's, as it was when it last told."""
        return self._llm.status

    def stepped(self, report: Report) -> None:
        """The step is counted."""
        before, self._seen = self._seen, report.status
        tokens = self._seen.planned_tokens - before.planned_tokens
        if tokens:
            self.step_tokens.observe(tokens)
        if self._seen.num_steps != before.num_steps:
            self.step_time.observe(report.step_s)
        for wait_s in report.waits_s:
            self.queue.observe(wait_s)

    def answered(self, status: int) -> None:
        """An answer of this status has begun."""
        self.responses[status] = self.responses.get(status, 0) + 1

    def opened(self, request: Request) -> FiguresOfOne:
        """What counts the request."""
        return FiguresOfOne(self, request)


class FiguresOfOne:
    """Counts one request as its answer is read."""

    def __init__(self, figures: Figures, request: Request) -> None:
        self._figures = figures
        self._prompt_tokens = len(request.prompt)
        self._opened_s = time.monotonic()
        self._open = dict.fromkeys(range(request.params.n), 0.0)  # when it last gained; 0.0: never
        self._begun = False

    def gained(self, deltas: Sequence[TextDelta]) -> None:
        """Their tokens, their delays and their endings are counted."""
        figures, now_s = self._figures, time.monotonic()
        for choice, _, tokens, finish, *_ in deltas:
            if not self._begun and (tokens or finish in SERVED):
                self._begun = True
                figures.prompt_tokens += self._prompt_tokens
                if tokens:
                    figures.first_token.observe(now_s - self._opened_s)
            if tokens:
                figures.generation_tokens += len(tokens)
                if last_s := self._open[choice]:
                    figures.inter_token.observe(now_s - last_s)
                self._open[choice] = now_s
            if finish is not None:
                del self._open[choice]
                figures.finished[finish] += 1
                if finish in SERVED:
                    figures.latency.observe(now_s - self._opened_s)

    def left(self) -> None:
        """Choices that are still open have lost their reader."""
        self._figures.finished[FinishReason.ABORT.value] += len(self._open)
        self._open.clear()


# Names.


class Name(NamedTuple):
    """What a figure is called.

    label   of the series where there are several, "" where there is one
    """

    name: str
    label: str = ""


class Figure(NamedTuple):
    """One figure: what it is, how it is read, and what it is called.

    kind   of the library's families
    read   a Histogram, or a number for each value of the label
    """

    about: str
    kind: Callable[..., Any]
    read: Callable[[Figures], Any]
    forge: Name
    vllm: tuple[Name, ...] = ()


def _gauge(about: str, read: Callable[[Status], float], name: str, *vllm: str) -> Figure:
    names = tuple(map(Name, vllm))
    return Figure(about, GaugeMetricFamily, lambda f: {"": read(f.status)}, Name(name), names)


def _counter(about: str, read: Callable[[Figures], float], name: str, *vllm: str) -> Figure:
    names = tuple(map(Name, vllm))
    return Figure(about, CounterMetricFamily, lambda f: {"": read(f)}, Name(name), names)


def _histogram(about: str, read: Callable[[Figures], Histogram], name: str, *vllm: str) -> Figure:
    return Figure(about, HistogramMetricFamily, read, Name(name), tuple(map(Name, vllm)))


FIGURES = (
    _gauge(
        "Sequences in the batch", lambda s: s.running, "requests_running", "num_requests_running"
    ),
    _gauge(
        "Sequences in the engine that are not in the batch",
        lambda s: s.waiting,
        "requests_waiting",
        "num_requests_waiting",
    ),
    _gauge("Blocks of the cache", lambda s: s.num_blocks, "kv_blocks_total"),
    _gauge("Blocks that belong to open sequences", lambda s: s.blocks_used, "kv_blocks_used"),
    _gauge(
        "Blocks that belong to nobody and whose content is kept",
        lambda s: s.blocks_cached,
        "kv_blocks_cached",
    ),
    _gauge(
        "Blocks that belong to open sequences, as a share of all",
        lambda s: s.blocks_used / s.num_blocks,
        "kv_usage_ratio",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
    ),
    _counter(
        "Tokens that sequences had when they were first admitted",
        lambda f: f.status.queried_tokens,
        "prefix_cache_queries_total",
        "prefix_cache_queries_total",
    ),
    _counter(
        "Of those, tokens that were in the cache",
        lambda f: f.status.cached_tokens,
        "prefix_cache_hits_total",
        "prefix_cache_hits_total",
    ),
    _counter(
        "Proposed tokens that the model has judged",
        lambda f: f.status.drafted_tokens,
        "spec_draft_tokens_total",
        "spec_decode_num_draft_tokens_total",
    ),
    _counter(
        "Of those, tokens that it accepted",
        lambda f: f.status.accepted_tokens,
        "spec_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    ),
    Figure(
        "Times that a sequence lost its blocks and had to wait again",
        CounterMetricFamily,
        lambda f: {"recompute": f.status.preemptions},
        Name("preemptions_total", "mode"),
        (Name("num_preemptions_total"),),
    ),
    _counter(
        "Tokens of prompts whose output has begun",
        lambda f: f.prompt_tokens,
        "prompt_tokens_total",
        "prompt_tokens_total",
    ),
    _counter(
        "Tokens of outputs",
        lambda f: f.generation_tokens,
        "generation_tokens_total",
        "generation_tokens_total",
    ),
    Figure(
        "Choices of requests that have ended, by why",
        CounterMetricFamily,
        lambda f: dict(f.finished),
        Name("requests_total", "finish"),
        (Name("request_success_total", "finished_reason"),),
    ),
    Figure(
        "Answers, by HTTP status",
        CounterMetricFamily,
        lambda f: {str(status): count for status, count in f.responses.items()},
        Name("http_responses_total", "status"),
    ),
    _histogram(
        "From the request to its first token",
        lambda f: f.first_token,
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
    ),
    _histogram(
        "Between two events of a choice, each of which may hold several tokens",
        lambda f: f.inter_token,
        "inter_token_latency_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    _histogram(
        "From the request to the end of a choice that was served to its end",
        lambda f: f.latency,
        "request_latency_seconds",
        "e2e_request_latency_seconds",
    ),
    _histogram(
        "From the request's arrival at the engine to the first step that serves it",
        lambda f: f.queue,
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

Naming = Callable[[Figure], Iterable[Name]]


class Dialect(NamedTuple):
    """One system's names for the figures.

    labels   that each of its series has
    """

    prefix: str
    names: Naming
    labels: Mapping[str, str]


class Exposition:
    """A collector of the library: the figures of one app in one dialect."""

    def __init__(self, figures: Figures, dialect: Dialect) -> None:
        self._figures = figures
        self._dialect = dialect

    def collect(self) -> Iterator[Metric]:
        """Every figure under every name it has, as it is now."""
        for figure in FIGURES:
            for name in self._dialect.names(figure):
                yield self._family(figure, name)

    def _family(self, figure: Figure, name: Name) -> Metric:
        values, shared = figure.read(self._figures), self._dialect.labels
        labels = [*shared, name.label] if name.label else [*shared]
        family: Metric = figure.kind(self._dialect.prefix + name.name, figure.about, labels=labels)
        add: Callable[..., None] = family.add_metric  # type: ignore[attr-defined]
        if isinstance(values, Histogram):
            add(list(shared.values()), *values.buckets())
        elif name.label:
            for value, number in values.items():
                add([*shared.values(), value], number)
        else:
            add(list(shared.values()), sum(values.values()))
        return family


COMPATIBLE = ("vllm",)
"""Systems whose names can be given beside forge's own."""


class Metrics:
    """The route. One registry per application: nothing is shared between two of them.

    model    the served name, which vLLM's dashboards select by
    compat   one of COMPATIBLE, whose names are exposed too, or None; InvalidConfig for any other
    """

    def __init__(self, llm: AsyncLLM, *, model: str, compat: str | None = None) -> None:
        if compat not in (None, *COMPATIBLE):
            raise InvalidConfig(
                "metrics_compat", f"{compat!r} is not known", f"Use {', '.join(COMPATIBLE)}"
            )
        self.figures = figures = Figures(llm)
        self._registry = CollectorRegistry()
        self._registry.register(Exposition(figures, Dialect("forge_", lambda f: (f.forge,), {})))
        if compat == "vllm":
            labels = {"model_name": model, "engine": "0"}
            self._registry.register(Exposition(figures, Dialect("vllm:", lambda f: f.vllm, labels)))

    async def scrape(self, request: HttpRequest) -> Response:
        """GET and HEAD /metrics, in the format that the accept header asks for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})
