"""OtelTraces: spans of requests in OpenTelemetry's form, and their way to a collector.

Owns the names of spans and attributes, and the queue of ended spans. Attributes `gen_ai.*` are
those of OpenTelemetry's conventions for generative AI. `gen_ai.latency.*` and `gen_ai.request.id`
are vLLM's. Knows no prompt and no output: a span has counts and times.

    POST /v1/chat/completions                                              SERVER
    ├─ queue        from the arrival at the engine to the first step       INTERNAL
    ├─ prefill      to the first token                                     of each of the first
    ├─ decode       to the last token                                      MAX_CHOICES choices
    ├─ preempted    from the loss of its blocks to the next admission
    └─ events: admitted, load, preempted, each with the words of the plan

Always true: no request waits for the collector. A span that finds the queue full is lost, as are
those that the collector does not take, and both are counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from forge.engine_messages import StepReport
from forge.failure_log import FailureLog
from forge.outputs import TextDelta
from forge.request import FinishReason, Request
from forge.server.routes import RouteSpec
from forge.server.timings import AnswerTimings
from forge.server.traces import CLIENT_DISCONNECTED, SpanCounts
from forge.timings import ChoiceTimings
from forge.version import VERSION

LOG = logging.getLogger("forge.traces")

MAX_QUEUED_SPANS = 4096
MAX_EXPORTED_SPANS = 512
"""Spans of one message to the collector."""
EXPORT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
"""Seconds that spans in the queue may take to be exported at the end."""
MAX_CHOICES = 8
"""Choices of an HTTP request that have spans of their own: it may have 1024 choices."""

LATENCIES = {
    "queue_ms": "gen_ai.latency.time_in_queue",
    "time_to_first_token_ms": "gen_ai.latency.time_to_first_token",
    "prompt_ms": "gen_ai.latency.time_in_model_prefill",
    "predicted_ms": "gen_ai.latency.time_in_model_decode",
}
"""Name in an answer's timings -> attribute, in seconds."""
COUNTS = {
    "preemptions": "forge.num_preemptions",
    "recomputed_n": "forge.num_recomputed_tokens",
}


def create_exporter(endpoint: str) -> SpanExporter:
    """Return what sends spans to this URL."""
    # It logs each attempt that fails. SpanQueue logs the first one.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


class SpanQueue(SpanProcessor):
    """Ended spans on their way to an exporter, which a thread calls."""

    def __init__(self, exporter: SpanExporter, max_spans: int = MAX_QUEUED_SPANS) -> None:
        self._exporter = exporter
        self._spans: Queue[ReadableSpan | None] = Queue(max_spans)
        self._lock = threading.Lock()
        self._num_exported = self._num_lost = 0
        self._failures = FailureLog(LOG, "spans are lost", "Later losses are counted only")
        self._thread = threading.Thread(target=self._run, name="forge-traces", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> SpanCounts:
        """Return the spans so far, without those in the queue."""
        with self._lock:
            return SpanCounts(self._num_exported, self._num_lost)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, or lose it where the queue is full. Never waits."""
        try:
            self._spans.put_nowait(span)
        except Full:
            with self._lock:
                self._num_lost += 1

    def close(self) -> None:
        """Export what is queued, for `CLOSE_TIMEOUT_S` at most."""
        with suppress(Full):  # then the thread hangs in the exporter, and ends with the process
            self._spans.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while (span := self._spans.get()) is not None:
            batch = [span]
            with suppress(Empty):
                while len(batch) < MAX_EXPORTED_SPANS:
                    following = self._spans.get_nowait()
                    if following is None:
                        self._export(batch)
                        return
                    batch.append(following)
            self._export(batch)

    def _export(self, batch: Sequence[ReadableSpan]) -> None:
        """Hand the spans to the exporter, and count them. Log the first of failures in a row."""
        why: Exception | str | None = None
        try:
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                why = "the collector did not take them"
        except Exception as error:  # the spans of one message must not end the thread
            why = error
        with self._lock:
            if why is None:
                self._num_exported += len(batch)
            else:
                self._num_lost += len(batch)
        if why is None:
            self._failures.succeed()
        else:
            self._failures.fail(why)


@dataclass(slots=True)
class _OpenTrace:
    """Span of an open HTTP request, and what its choices were. Owned by OtelTraces.

    num_choices  choices of all requests so far
    choices      index and times of each choice that has ended with times
    """

    span: Span
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    num_choices: int = 0
    choices: list[tuple[int, ChoiceTimings]] = field(default_factory=list)


class OtelTraces:
    """RequestTraces of OpenTelemetry.

    model   served name
    """

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        self._queue = SpanQueue(exporter)
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first, as with OpenTelemetry's SDK.
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "forge"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("forge", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._open: dict[str, _OpenTrace] = {}

    @property
    def counts(self) -> SpanCounts:
        """Return the spans so far."""
        return self._queue.counts

    def begin(self, request_id: str, spec: RouteSpec, traceparent: str | None) -> bool:
        """Begin the span of an HTTP request; return whether it is sampled."""
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        span = self._tracer.start_span(
            f"POST {spec.path}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "url.path": spec.path,
                "gen_ai.operation.name": spec.operation,
                "gen_ai.provider.name": "forge",
                "gen_ai.request.model": self._model,
                "gen_ai.request.id": request_id,
            },
        )
        if span.is_recording():
            self._open[request_id] = _OpenTrace(span)
        return span.is_recording()

    def end(self, request_id: str, status: int | None, error_type: str | None) -> None:
        """End the span of an HTTP request, after those of its choices."""
        trace = self._open.pop(request_id)
        span = trace.span
        # Times of the engine are of time.monotonic(), and those of spans of time.time().
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for index, choice in trace.choices:
            if index < MAX_CHOICES:
                self._end_choice(span, index, choice, epoch_ns)
        if trace.num_prompt:
            span.set_attributes(_engine_attributes(trace))
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if FinishReason.ERROR.value in trace.finish_reasons:
            error_type = "request_failed"
        elif error_type is None and status is not None and status >= 500:
            error_type = str(status)
        if error_type is not None:
            span.set_attribute("error.type", error_type)
            if error_type != CLIENT_DISCONNECTED:
                span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Export what is left within seconds, and end."""
        self._queue.close()

    def on_step(self, report: StepReport) -> None:
        """Do nothing: the last deltas of a request have its times."""

    def on_request(self, request: Request) -> _RequestObserver:
        """Return the observer of a request, which adds to the span of its HTTP request."""
        trace = self._open.get(request.external_id)
        first_choice = 0
        if trace is not None:
            params, first_choice = request.params, trace.num_choices
            trace.num_prompt += len(request.prompt)
            trace.num_choices += params.n
            trace.span.set_attribute("gen_ai.request.choice.count", params.n)
            trace.span.set_attribute("gen_ai.request.temperature", params.temperature)
            trace.span.set_attribute("gen_ai.request.top_p", params.top_p)
            if params.max_tokens is not None:
                trace.span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
        return _RequestObserver(trace, first_choice)

    def _end_choice(self, parent: Span, index: int, choice: ChoiceTimings, epoch_ns: int) -> None:
        """Make the events of a choice, and the spans of its phases that have ended."""
        context = set_span_in_context(parent)

        def add_phase(name: str, start_s: float | None, end_s: float | None) -> None:
            if start_s is None or end_s is None:
                return
            attributes = {"forge.choice": index}
            start_ns, end_ns = epoch_ns + int(start_s * 1e9), epoch_ns + int(end_s * 1e9)
            child = self._tracer.start_span(
                name, context, attributes=attributes, start_time=start_ns
            )
            child.end(end_ns)

        add_phase("queue", choice.arrival_s, choice.first_step_s)
        add_phase("prefill", choice.first_step_s, choice.first_token_s)
        add_phase("decode", choice.first_token_s, choice.last_token_s)
        preempted_s: float | None = None
        for time_s, name, text in choice.events:
            attributes: Mapping[str, str | int] = {"forge.choice": index, "forge.plan": text}
            parent.add_event(name, attributes, epoch_ns + int(time_s * 1e9))
            if name == "preempted":
                preempted_s = time_s
            elif name == "admitted":
                add_phase("preempted", preempted_s, time_s)
                preempted_s = None


class _RequestObserver:
    """Adds the deltas of one request to the span of its HTTP request.

    trace          None: it has no span
    first_choice   choices of the requests before it
    """

    def __init__(self, trace: _OpenTrace | None, first_choice: int) -> None:
        self._trace = trace
        self._first_choice = first_choice

    def on_deltas(self, deltas: Sequence[TextDelta]) -> None:
        """Count tokens, and keep how each choice ended."""
        trace = self._trace
        if trace is None:
            return
        for delta in deltas:
            trace.num_output += len(delta.token_ids)
            trace.num_cached += delta.cached_tokens.total
            if delta.finish_reason is not None:
                trace.finish_reasons.append(delta.finish_reason)
            if delta.timings is not None:
                trace.choices.append((self._first_choice + delta.choice, delta.timings))

    def on_close(self) -> None:
        """Do nothing: the span ends with the response."""


def _engine_attributes(trace: _OpenTrace) -> dict[str, str | int | float | tuple[str, ...]]:
    """Return the attributes of a request that the engine got."""
    attributes: dict[str, str | int | float | tuple[str, ...]] = {
        "gen_ai.usage.input_tokens": trace.num_prompt,
        "gen_ai.usage.output_tokens": trace.num_output,
        "gen_ai.usage.cache_read.input_tokens": trace.num_cached,
    }
    if trace.finish_reasons:  # none where the client left before the end of each choice
        attributes["gen_ai.response.finish_reasons"] = tuple(trace.finish_reasons)
    answer = AnswerTimings(True)
    for _, choice in trace.choices:
        answer.add(choice)
    counts = trace.num_prompt, trace.num_cached, trace.num_output
    timings = answer.fields(*counts).get("timings", {})
    for name, value in timings.items():
        if name in COUNTS:
            attributes[COUNTS[name]] = value
        elif name in LATENCIES and value is not None:
            attributes[LATENCIES[name]] = value / 1000
    return attributes
