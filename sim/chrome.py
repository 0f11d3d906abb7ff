"""Chrome's trace events: a run as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Owns the format. Knows no engine: it writes what a trail has kept.

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

from sim.trail import KINDS, Trail

DEVICE, SLOTS, REQUESTS = range(3)
NAMES = ("device", "slots", "requests")

Event = dict[str, Any]


def write_trace(write: Callable[[str], object], trail: Trail) -> None:
    """The whole file, an event a line."""
    write('{"displayTimeUnit":"ms","traceEvents":[\n')
    gap = ""
    for event in events(trail):
        write(gap + json.dumps(event, separators=(",", ":")))
        gap = ",\n"
    write("\n]}\n")


def events(trail: Trail) -> Iterator[Event]:
    """Names first, then every kind of event in order of time. Times are microseconds."""
    for process, name in enumerate(NAMES):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield _track(DEVICE, 0, "steps")
    for slot in sorted({span.slot for span in trail.spans}):
        yield _track(SLOTS, slot, f"slot {slot}")
    yield from _steps(trail)
    for span in trail.spans:
        many = f" x {span.num_steps}" if span.num_steps > 1 else ""
        yield {
            **_slice(SLOTS, span.slot, span.begin_ns, span.end_ns),
            "name": f"{span.request_id} {span.kind}{many}",
            "cat": span.kind,
            "args": {"request": span.request_id, "tokens": span.num_tokens, "step": span.step},
        }
    yield from _requests(trail)
    for mark in trail.marks:
        yield {
            **{"ph": "i", "s": "g", "pid": REQUESTS, "tid": 0, "ts": mark.at_ns / 1000},
            "name": f"{mark.request_id} {mark.what}",
            "args": {"why": mark.why},
        }


def _steps(trail: Trail) -> Iterator[Event]:
    """Steps, and each counter where it changes."""
    shown: dict[str, dict[str, int]] = {}
    for seen in trail.steps:
        tokens = dict(zip(KINDS, seen.tokens, strict=True))
        yield {
            **_slice(DEVICE, 0, seen.begin_ns, seen.end_ns),
            "name": f"step {seen.step}",
            "args": {"rows": seen.num_rows, **{k: n for k, n in tokens.items() if n}},
        }
        for name, values in (
            ("blocks used", {"blocks": seen.used_blocks}),
            ("in line", {"requests": seen.num_waiting}),
            ("tokens a step", tokens),
        ):
            if shown.get(name) != values:
                shown[name] = values
                at = {"ph": "C", "pid": DEVICE, "ts": seen.told_ns / 1000}
                yield {**at, "name": name, "args": values}


def _requests(trail: Trail) -> Iterator[Event]:
    """One asynchronous slice for each request, from arrival to end; its first token inside."""
    for request_id, life in trail.lives.items():
        common = {"cat": "request", "id": request_id, "pid": REQUESTS, "tid": 0}
        common["name"] = f"request {request_id}"
        begun = {"prompt": life.prompt, "output": life.num_tokens, "ended": life.finish}
        yield {**common, "ph": "b", "ts": life.arrived_ns / 1000, "args": begun}
        if life.first_ns >= 0:
            yield {**common, "ph": "n", "name": "first token", "ts": life.first_ns / 1000}
        if life.ended_ns >= 0:
            yield {**common, "ph": "e", "ts": life.ended_ns / 1000}


def _track(process: int, track: int, name: str) -> Event:
    return {
        **{"ph": "M", "name": "thread_name", "pid": process, "tid": track},
        "args": {"name": name},
    }


def _slice(process: int, track: int, begin_ns: int, end_ns: int) -> Event:
    times = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    return {"ph": "X", "pid": process, "tid": track, **times}
