"""Chrome trace events: a run as a file for Perfetto (ui.perfetto.dev) and chrome://tracing.

Owns the format. Knows no engine: it writes a RunHistory.

    process "device"     steps          |== step 0 ==|== step 1 ==|
    process "slots"      slot 0         |7 prompt    |7 token x 12 ...
                         slot 1                      |8 prompt   |
    process "requests"   7              |waiting |running .......|
    counters             blocks used, requests in line, tokens a step
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from forge.sim.reports.run_history import KINDS, RunHistory

DEVICE_PROCESS, SLOTS_PROCESS, REQUESTS_PROCESS = range(3)
PROCESS_NAMES = ("device", "slots", "requests")

TraceEvent = dict[str, Any]


def write_chrome_trace(write: Callable[[str], object], history: RunHistory) -> None:
    """Write the whole file, one event a line."""
    write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    for event in create_events(history):
        write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    write("\n]}\n")


def create_events(history: RunHistory) -> Iterator[TraceEvent]:
    """Yield names first, then every kind of event in order of time. Times are microseconds."""
    for process, name in enumerate(PROCESS_NAMES):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield _name_track(DEVICE_PROCESS, 0, "steps")
    for slot in sorted({span.slot for span in history.spans}):
        yield _name_track(SLOTS_PROCESS, slot, f"slot {slot}")
    yield from _create_step_events(history)
    for span in history.spans:
        repeat = f" x {span.num_steps}" if span.num_steps > 1 else ""
        yield {
            **_create_slice(SLOTS_PROCESS, span.slot, span.begin_ns, span.end_ns),
            "name": f"{span.request_id} {span.kind}{repeat}",
            "cat": span.kind,
            "args": {"request": span.request_id, "tokens": span.num_tokens, "step": span.step},
        }
    yield from _create_request_events(history)
    for event in history.events:
        yield {
            **{"ph": "i", "s": "g", "pid": REQUESTS_PROCESS, "tid": 0, "ts": event.at_ns / 1000},
            "name": f"{event.request_id} {event.what}",
            "args": {"why": event.why},
        }


def _create_step_events(history: RunHistory) -> Iterator[TraceEvent]:
    """Yield the steps, and each counter where it changes."""
    last_values: dict[str, dict[str, int]] = {}
    for record in history.steps:
        tokens = dict(zip(KINDS, record.tokens, strict=True))
        yield {
            **_create_slice(DEVICE_PROCESS, 0, record.begin_ns, record.end_ns),
            "name": f"step {record.step}",
            "args": {"rows": record.num_rows, **{k: n for k, n in tokens.items() if n}},
        }
        for name, values in (
            ("blocks used", {"blocks": record.used_blocks}),
            ("in line", {"requests": record.num_waiting}),
            ("tokens a step", tokens),
        ):
            if last_values.get(name) != values:
                last_values[name] = values
                at = {"ph": "C", "pid": DEVICE_PROCESS, "ts": record.commit_time_ns / 1000}
                yield {**at, "name": name, "args": values}


def _create_request_events(history: RunHistory) -> Iterator[TraceEvent]:
    """Yield a slice for each request, from arrival to end, with its first token inside."""
    for request_id, timeline in history.timelines.items():
        common = {"cat": "request", "id": request_id, "pid": REQUESTS_PROCESS, "tid": 0}
        common["name"] = f"request {request_id}"
        args = {
            "prompt": timeline.prompt_len,
            "output": timeline.num_tokens,
            "ended": timeline.finish,
        }
        yield {**common, "ph": "b", "ts": timeline.arrival_ns / 1000, "args": args}
        if timeline.first_token_ns >= 0:
            yield {**common, "ph": "n", "name": "first token", "ts": timeline.first_token_ns / 1000}
        if timeline.finish_ns >= 0:
            yield {**common, "ph": "e", "ts": timeline.finish_ns / 1000}


def _name_track(process: int, track: int, name: str) -> TraceEvent:
    return {
        **{"ph": "M", "name": "thread_name", "pid": process, "tid": track},
        "args": {"name": name},
    }


def _create_slice(process: int, track: int, begin_ns: int, end_ns: int) -> TraceEvent:
    times = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    return {"ph": "X", "pid": process, "tid": track, **times}
