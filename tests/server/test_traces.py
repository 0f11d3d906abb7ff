"""Spans of requests: what a collector gets, and that the server does not depend on it."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx
import pytest

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig
from forge.outputs import TextDelta
from forge.request import Request, SamplingParams
from forge.server.app import create_app
from forge.server.routes import COMPLETIONS, GENERATE, ROUTE, RouteSpec
from forge.server.trace_option import open_traces
from forge.server.traces import SpanCounts, TraceMiddleware
from forge.timings import ChoiceTimings


def has_otel() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


needs_otel = pytest.mark.skipif(
    not has_otel(), reason="needs the extra otel, which the extra dev has"
)
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TIMEOUT_S = 20.0
URL = "http://127.0.0.1:4318/v1/traces"
BODY = {"model": "hash", "prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}


class Collector:
    """Exporter that keeps spans, or behaves as `outcome` says."""

    def __init__(self, outcome: str = "SUCCESS") -> None:
        self.outcome = outcome
        self.spans: list[Any] = []
        self.released = threading.Event()
        self.was_called = threading.Event()

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.was_called.set()
        if self.outcome == "hangs":
            self.released.wait(TIMEOUT_S)
        if self.outcome == "raises":
            raise OSError("no route to host")
        self.spans += spans
        return SpanExportResult["FAILURE" if self.outcome == "FAILURE" else "SUCCESS"]

    def shutdown(self) -> None:
        self.released.set()


class TracedApp(NamedTuple):
    """A client of a traced server, and the spans that it has exported."""

    client: httpx.AsyncClient
    traces: Any
    collector: Collector


def run_traced(test: Any, collector: Collector | None = None, **options: Any) -> list[Any]:
    """Run `test` on a TracedApp, close its traces, and return the spans in order of their start."""
    from forge.server.otel_traces import OtelTraces

    collector = collector or Collector()

    async def run() -> None:
        async with AsyncLLM("hash", **options) as llm:
            traces = OtelTraces(collector, "hash")
            transport = httpx.ASGITransport(create_app(llm, traces=traces))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", timeout=TIMEOUT_S
            ) as client:
                await test(TracedApp(client, traces, collector))
            await asyncio.to_thread(traces.close)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    return sorted(collector.spans, key=lambda span: (span.parent is not None, span.start_time))


async def complete(app: TracedApp, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return await app.client.post("/v1/completions", json={**BODY, **fields}, headers=headers)


@needs_otel
def test_a_request_has_a_span_with_its_phases() -> None:
    async def test(app: TracedApp) -> None:
        response = await complete(app, {"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"

    root, *phases = run_traced(test)
    assert (root.name, root.kind.name) == ("POST /v1/completions", "SERVER")
    found = dict(root.attributes)
    assert found.pop("gen_ai.request.id").startswith("mine-")
    latencies = {name: value for name, value in found.items() if ".latency." in name}
    assert all(value >= 0 for value in latencies.values()) and len(latencies) == 4
    assert {name: value for name, value in found.items() if name not in latencies} == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "forge",
        "gen_ai.request.model": "hash",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.input_tokens": 16,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "forge.num_preemptions": 0,
        "forge.num_recomputed_tokens": 0,
    }
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert all(phase.parent.span_id == root.context.span_id for phase in phases)
    times = [(phase.start_time, phase.end_time) for phase in phases]
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert root.start_time <= times[0][0] and times[-1][1] <= root.end_time
    assert [event.name for event in root.events] == ["admitted"]
    assert root.events[0].attributes["forge.plan"] == "new, 0 tokens shared"
    assert root.resource.attributes["service.name"] == "forge"


@needs_otel
@pytest.mark.parametrize(
    ("path", "fields", "operation"),
    [
        ("/generate", {"prompt": "a"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chat"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "stream": True}, "chat"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True},
            "chat",
        ),
    ],
)
def test_every_api_has_spans_whole_and_streamed(
    path: str, fields: dict[str, Any], operation: str
) -> None:
    """The client has not requested timings, so the answer has none."""

    async def test(app: TracedApp) -> None:
        body = {"model": "hash", "ignore_eos": True, **fields}
        if path in ("/generate", "/v1/chat/completions"):
            body["max_tokens"] = 2
        response = await app.client.post(path, json=body)
        assert response.status_code == 200 and "timings" not in response.text

    root, *phases = run_traced(test)
    assert root.attributes["gen_ai.operation.name"] == operation
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]


@needs_otel
def test_the_trace_of_the_client_goes_on() -> None:
    """A damaged context begins a new trace, and one that is not sampled has no span."""
    parent = f"00-{TRACE_ID}-{SPAN_ID}"

    async def test(app: TracedApp) -> None:
        for traceparent in (f"{parent}-01", f"{parent}-00", "00-zz-1-1", f"{parent}-01\x01"):
            await complete(app, {"traceparent": traceparent}, max_tokens=1)

    spans = run_traced(test)
    roots = [span for span in spans if span.kind.name == "SERVER"]
    of_parent = [span for span in roots if span.parent is not None]
    assert [format(span.parent.span_id, "016x") for span in of_parent] == [SPAN_ID]
    trace_ids = [format(span.context.trace_id, "032x") for span in roots]
    assert trace_ids.count(TRACE_ID) == 1 and len(set(trace_ids)) == len(trace_ids) == 3


@needs_otel
def test_preemptions_are_spans_and_events() -> None:
    """Eight blocks of four. Each of two choices grows to six."""

    async def test(app: TracedApp) -> None:
        await complete(app, prompt="req0", max_tokens=20, n=2)

    root, *phases = run_traced(test, num_blocks=8, block_size=4)
    num_preemptions = root.attributes["forge.num_preemptions"]
    assert num_preemptions >= 1
    names = [event.name for event in root.events]
    assert names.count("preempted") == num_preemptions
    assert names.count("admitted") == 2 + num_preemptions
    (waited, *_) = [phase for phase in phases if phase.name == "preempted"]
    plans = [(event.timestamp, event.attributes["forge.plan"]) for event in root.events]
    assert waited.end_time == next(time for time, plan in plans if "resumed" in plan)
    assert waited.start_time < waited.end_time
    assert {phase.attributes["forge.choice"] for phase in phases} == {0, 1}


@needs_otel
def test_a_refused_request_has_its_status_and_no_figures_of_the_engine() -> None:
    async def test(app: TracedApp) -> None:
        assert (await complete(app, max_tokens=-1)).status_code == 400
        assert (await app.client.get("/v1/models")).status_code == 200

    (root,) = run_traced(test)
    assert root.attributes["http.response.status_code"] == 400
    assert root.status.status_code.name == "UNSET"
    assert "gen_ai.usage.input_tokens" not in root.attributes


@needs_otel
@pytest.mark.parametrize(
    ("finish", "status", "cut", "error"),
    [
        ("length", 200, None, None),
        ("error", 200, None, "request_failed"),
        ("error", 500, None, "request_failed"),
        ("abort", 503, None, "503"),
        ("abort", 200, "client_disconnected", "client_disconnected"),
        ("abort", None, "client_disconnected", "client_disconnected"),
        ("abort", 500, "KeyError", "KeyError"),
    ],
)
def test_a_span_says_how_its_request_failed(
    finish: str, status: int | None, cut: str | None, error: str | None
) -> None:
    from forge.server.otel_traces import OtelTraces

    collector = Collector()
    traces = OtelTraces(collector, "hash")
    assert traces.begin("id", GENERATE, None)
    observer = traces.on_request(Request(0, (1, 2), external_id="id"))
    observer.on_deltas([TextDelta(0, "", (), finish)])
    observer.on_close()
    traces.end("id", status, cut)
    traces.close()
    (span,) = collector.spans
    assert span.attributes.get("error.type") == error
    assert (span.status.status_code.name == "ERROR") == (error not in (None, "client_disconnected"))
    assert span.attributes["gen_ai.usage.input_tokens"] == 2


class EndedTraces:
    """RequestTraces that keeps what `begin` and `end` are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | int | None, str | None]] = []

    def begin(self, request_id: str, spec: RouteSpec, traceparent: str | None) -> bool:
        self.calls.append((traceparent, None))
        return True

    def end(self, request_id: str, status: int | None, error_type: str | None) -> None:
        self.calls.append((status, error_type))


START = {"type": "http.response.start", "status": 200, "headers": []}
PART = {"type": "http.response.body", "body": b"a", "more_body": True}
LAST = {"type": "http.response.body", "body": b""}


@pytest.mark.parametrize(
    ("messages", "outcome"),
    [
        ([START, PART, LAST], (200, None)),
        ([START, PART], (200, "client_disconnected")),
        ([], (None, "client_disconnected")),
        ([KeyError("bug")], (500, "KeyError")),
        ([START, PART, KeyError("bug")], (200, "KeyError")),
    ],
)
def test_a_span_ends_as_its_response_does(
    messages: list[Any], outcome: tuple[int | None, str | None]
) -> None:
    """An application that returns before the last part has lost its client."""
    traces: Any = EndedTraces()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            if isinstance(message, Exception):
                raise message
            await send(message)

    async def receive_or_send(*message: Any) -> Any:
        return {}

    middleware = TraceMiddleware(app, traces)
    for length, traceparent in ((512, "x" * 512), (513, None)):
        headers = [(b"traceparent", b"x" * length)]
        scope = {
            **{"type": "http", "method": "POST", "path": "/generate"},
            **{"headers": headers, "state": {"request_id": "id"}, ROUTE: GENERATE.bind()},
        }
        with suppress(KeyError):
            asyncio.run(middleware(scope, receive_or_send, receive_or_send))
        assert traces.calls == [(traceparent, None), outcome]
        traces.calls.clear()


@needs_otel
def test_a_span_without_an_ended_choice_has_no_finish_reasons() -> None:
    from forge.server.otel_traces import OtelTraces

    collector = Collector()
    traces = OtelTraces(collector, "hash")
    assert traces.begin("id", GENERATE, None)
    traces.on_request(Request(0, (1, 2), external_id="id")).on_deltas([TextDelta(0, "a", (3,))])
    traces.end("id", 200, "client_disconnected")
    traces.close()
    (span,) = collector.spans
    assert span.attributes["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.response.finish_reasons" not in span.attributes


@needs_otel
def test_choices_have_the_index_of_the_answer_in_whichever_order_they_end() -> None:
    from forge.server.otel_traces import OtelTraces

    collector = Collector()
    traces = OtelTraces(collector, "hash")
    assert traces.begin("id", COMPLETIONS, None)
    first, second = (
        traces.on_request(Request(i, (1,), SamplingParams(n=2), external_id="id")) for i in range(2)
    )
    for observer, choice in ((second, 1), (first, 1), (second, 0)):
        observer.on_deltas([TextDelta(choice, "", (), "stop", timings=ChoiceTimings(1.0, 2.0))])
    traces.end("id", 200, None)
    traces.close()
    phases = [span for span in collector.spans if span.name == "queue"]
    assert [phase.attributes["forge.choice"] for phase in phases] == [3, 1, 2]


@needs_otel
@pytest.mark.parametrize("outcome", ["FAILURE", "raises"])
def test_a_dead_collector_loses_spans_and_counts_them(
    outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(app: TracedApp) -> None:
        for _ in range(3):
            assert (await complete(app)).status_code == 200
        await asyncio.to_thread(app.traces.close)
        metrics = (await app.client.get("/metrics")).text
        assert 'forge_trace_spans_total{outcome="lost"} 12.0' in metrics
        assert 'forge_trace_spans_total{outcome="exported"} 0.0' in metrics

    run_traced(test, Collector(outcome))
    assert [record.name for record in caplog.records].count("forge.traces") == 1


@needs_otel
def test_no_request_waits_for_a_collector_that_hangs() -> None:
    """The queue of two spans is full at once: what does not fit is lost."""
    from opentelemetry.sdk.trace import TracerProvider

    from forge.server.otel_traces import SpanQueue

    collector = Collector("hangs")
    queue = SpanQueue(collector, max_spans=2)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("test")
    tracer.start_span("first").end()
    assert collector.was_called.wait(TIMEOUT_S)
    for _ in range(5):
        tracer.start_span("later").end()
    assert queue.counts == SpanCounts(0, 3)
    collector.released.set()
    queue.close()
    assert queue.counts == SpanCounts(3, 3)


def answer_badly(kind: str, listener: socket.socket, released: threading.Event) -> None:
    """Accept connections until the listener is closed, and behave on each as `kind` says."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if kind == "garbage":
                    connection.recv(2**16)
                    connection.sendall(b"\x00\xff garbage\r\n\r\n" * 100)
                elif kind == "silent":
                    released.wait(TIMEOUT_S)
                elif kind == "drips":  # each byte comes before a timeout of reading
                    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                    while not released.wait(0.05):
                        connection.sendall(b"x")


@contextmanager
def bad_collector(kind: str) -> Iterator[str]:
    """Yield the URL of a collector that behaves so until the end of the block."""
    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        if kind == "refuses":
            listener.close()
        thread = threading.Thread(target=answer_badly, args=(kind, listener, released))
        thread.start()
        try:
            yield url
        finally:
            released.set()
            with suppress(OSError):  # it wakes the thread
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(TIMEOUT_S)


@needs_otel
@pytest.mark.long
@pytest.mark.parametrize("kind", ["refuses", "closes", "garbage", "silent", "drips"])
def test_a_collector_that_answers_badly_delays_neither_requests_nor_the_end(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on behaving so until the traces are closed: what waited for it would time out."""
    from forge.server.otel_traces import create_exporter

    async def test(app: TracedApp) -> None:
        for _ in range(3):
            assert (await complete(app)).status_code == 200
        await asyncio.to_thread(app.traces.close)
        assert app.traces.counts.num_exported == 0

    with bad_collector(kind) as url:
        exporter = create_exporter(url)
        exporter.spans = []  # run_traced returns them
        run_traced(test, exporter)
    for thread in threading.enumerate():
        if thread.name == "forge-traces":  # else it may log a loss within another test
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    assert [record.name for record in caplog.records].count("forge.traces") == 1


@needs_otel
def test_choices_beyond_the_limit_have_no_spans_of_their_own() -> None:
    from forge.server.otel_traces import MAX_CHOICES

    async def test(app: TracedApp) -> None:
        await complete(app, n=MAX_CHOICES + 1, max_tokens=2)

    root, *phases = run_traced(test)
    assert {phase.attributes["forge.choice"] for phase in phases} == set(range(MAX_CHOICES))
    assert root.attributes["gen_ai.usage.output_tokens"] == 2 * (MAX_CHOICES + 1)


@contextmanager
def without_otel() -> Iterator[None]:
    """Import nothing of opentelemetry in the block."""
    hidden = {name: sys.modules[name] for name in sys.modules if name.startswith("opentelemetry")}
    hidden |= {
        name: module for name, module in sys.modules.items() if name == "forge.server.otel_traces"
    }
    for name in hidden:
        del sys.modules[name]
    sys.modules["opentelemetry"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["opentelemetry"]
        sys.modules.update(hidden)


def test_without_the_extra_the_error_names_it() -> None:
    with (
        without_otel(),
        pytest.raises(InvalidConfig, match=r"Install the extra otel: pip install opentelemetry"),
    ):
        open_traces(URL, "m")


def test_without_the_option_nothing_is_imported() -> None:
    with without_otel():
        assert open_traces(None, "m") is None


@pytest.mark.parametrize(
    "endpoint",
    [
        *("127.0.0.1:4318", "grpc://h:4317", "http://", "http://a b/", "http://a"),
        *("http://a:99999999/x", "http://:1/x", "http://[::1/x", "http://a:0/x", "http://a:b/x"),
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match=r"is not http://HOST:PORT/PATH"):
        open_traces(endpoint, "m")


@needs_otel
def test_the_endpoint_is_opened_without_a_connection() -> None:
    traces = open_traces(URL, "m")
    assert traces is not None and traces.counts == SpanCounts(0, 0)
    traces.close()


@needs_otel
def test_a_wrong_variable_of_opentelemetry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "x")
    with pytest.raises(InvalidConfig, match=r"OTEL_SPAN_EVENT_COUNT_LIMIT"):
        open_traces(URL, "m")
