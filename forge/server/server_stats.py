"""ServerStats: counts of one server, and latencies of the requests that are read here.

Owns the counts and the histograms. Knows no name of a metric. The engine's figures come with each
step report, as totals since it was made. Latencies are measured where responses are read.

    engine ── StepReport ──► on_step ────────┐
                                             ├─► ServerStats ──► forge.server.metrics
    reader ── on_deltas, on_close ───────────┘

Always true: no counter falls while the server lives. One thread writes each histogram; a scrape may
see it between two writes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from math import inf, isinf

from forge.async_llm import AsyncLLM
from forge.engine_messages import EngineStatus, StepReport
from forge.kv_publisher import NO_KV_EVENTS, KVEventCounts
from forge.outputs import TextDelta
from forge.request import FinishReason, Request
from forge.server.traces import NO_SPANS, RequestTraces, SpanCounts
from forge.tier_status import NO_TIERS, TierStatus

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
    """The counts of one server: an EngineObserver of its engine.

    traces   what exports the spans of its requests; None: none are exported
    """

    def __init__(self, llm: AsyncLLM, traces: RequestTraces | None = None) -> None:
        self._llm = llm
        self._traces = traces
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

    @property
    def tiers(self) -> TierStatus:
        """Return the figures of host memory and files: all 0 where there are none."""
        return self.status.tiers or NO_TIERS

    @property
    def kv_events(self) -> KVEventCounts:
        """Return the batches of published KV events: 0 where none are published."""
        return self.status.kv_events or NO_KV_EVENTS

    @property
    def spans(self) -> SpanCounts:
        """Return the spans so far: 0 where none are exported."""
        return NO_SPANS if self._traces is None else self._traces.counts

    def tokens_by_source(self) -> dict[str, int]:
        """Return the tokens of sequences when they were first admitted, by where they were."""
        status, tiers = self.status, self.tiers
        return {
            "device": status.num_cached_tokens,
            "host": tiers.num_host_tokens,
            "disk": tiers.num_disk_tokens,
            "computed": status.num_uncached_tokens,
        }

    def num_tokens_off_device(self) -> int:
        """Return those of these tokens that were not in the cache on the device."""
        # A sum of totals: a difference could fall where a step counts meanwhile.
        by_source = self.tokens_by_source()
        return by_source["host"] + by_source["disk"] + by_source["computed"]

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
