"""Traces: recorded workloads in public formats, and runs of this engine.

Owns the formats, and how a trace is scaled, cut and repeated. Knows no engine. A trace has no text:
it has arrival times, lengths and, at best, which prompts share a beginning.

    Azure      TIMESTAMP,ContextTokens,GeneratedTokens             prompts share nothing
    Mooncake   {"timestamp", "input_length", "output_length",      equal ids: equal blocks of 512
                "hash_ids"}                                        tokens, and all before them too
    log        {"at", "arrive", "prompt", "output"} of a decision log         prompts share nothing,
               {"at", "leave"}                                     clients may disconnect; classes
                                                                   and tenants are kept
    recording  of forge.recording, replayed by forge.sim.replay    the tokens of the prompts

    file ──► TraceRequest, ... ──► speed, scale, cuts, laps ──► RequestArrival, ...

Memory does not grow with the file or with the number of laps. A recording alone is kept whole.
Azure: Patel et al. 2024 (Splitwise). Mooncake: Qin et al. 2025.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from operator import itemgetter, sub
from pathlib import Path
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.request import Request, SamplingParams
from forge.sim.units import NS_PER_S
from forge.sim.workloads.recordings import RecordedRequest, read_requests
from forge.sim.workloads.workload import RequestArrival, fixed_output_params, unique_tokens

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block that a hash id of Mooncake names."""

SAMPLE_TRACE = Path(__file__).parent.parent / "data" / "azure_sample.csv"
"""The beginning of a public trace; its licence and source are in the same folder."""

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_LOG_START = '{"forge":'
"""Start of the first line of a log; in a recording it follows a checksum."""
_CHECKSUM_EXAMPLE = "00000000 "


class TraceRequest(NamedTuple):
    """A request of a trace.

    at_ns         since the first request of the trace
    prompt        tokens of the prompt
    output        tokens of the output
    blocks        names of the prompt's blocks of MOONCAKE_BLOCK_TOKENS tokens, the last one may be
                  partial; equal names are equal tokens. Empty: the prompt is unique
    tokens        the prompt itself, where it is known; `blocks` is empty then
    patience_ns   how long the client waits for the whole answer; None: until it ends
    priority      lower goes first
    cache_salt    only prompts with equal salts share their beginning
    """

    at_ns: int
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    patience_ns: int | None = None
    priority: int = 0
    cache_salt: str = ""


def parse_azure_line(line: str) -> TraceRequest:
    """Parse a line of an Azure trace; times are since 1970. Raises ValueError."""
    time, prompt, output = line.split(",")
    return TraceRequest(_parse_utc_ns(time), int(prompt), int(output))


def parse_mooncake_line(line: str) -> TraceRequest:
    """Parse a line of a Mooncake trace. Raises ValueError."""
    fields = json.loads(line)
    try:
        at_ns = round(fields["timestamp"] * 1_000_000)
        prompt, output = int(fields["input_length"]), int(fields["output_length"])
        blocks = tuple(map(int, fields["hash_ids"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request: {error!r}") from error
    if len(blocks) != -(-prompt // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(
            f"{len(blocks)} hash_ids for {prompt} tokens, {MOONCAKE_BLOCK_TOKENS} each"
        )
    return TraceRequest(at_ns, prompt, output, blocks)


def parse_log_line(disconnects_ns: Mapping[int, int], line: str) -> TraceRequest | None:
    """Parse a line of a decision log; times are since the start of the run. Raises ValueError.

    disconnects_ns   request -> time at which its client disconnected
    Returns None for a line that is no arrival.
    """
    if '"arrive":' not in line:
        return None
    fields = json.loads(line)
    try:
        at_ns, prompt, output = map(int, (fields["at"], fields["prompt"], fields["output"]))
        patience_ns = (
            None
            if fields["arrive"] not in disconnects_ns
            else disconnects_ns[fields["arrive"]] - at_ns
        )
        priority, tenant = int(fields.get("class", 0)), str(fields.get("tenant", ""))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request: {error!r}") from error
    return TraceRequest(
        at_ns, prompt, output, patience_ns=patience_ns, priority=priority, cache_salt=tenant
    )


def _read_disconnects(path: Path) -> dict[int, int]:
    """Return request -> time of its disconnect.

    Raises InvalidConfig where the log is incomplete.
    """
    disconnect_lines: list[bytes] = []
    found = sha256()
    with path.open("rb") as file:
        for line in file:
            if line == f'{{"sha256":"{found.hexdigest()}"}}\n'.encode():
                return {
                    fields["leave"]: fields["at"] for fields in map(json.loads, disconnect_lines)
                }
            found.update(line)
            if b'"leave":' in line:
                disconnect_lines.append(line)
    raise InvalidConfig(
        "workload", f"{path} does not end with the hash of its lines", "Write the log again"
    )


def read_trace_requests(recorded: Iterable[RecordedRequest]) -> list[TraceRequest]:
    """Return the requests of a recording. Each choice becomes a request with the same prompt.

    The times are those of arrival where every request has one. Otherwise a request came with the
    first plan after it: one that came during a step came at the end of the step.
    """
    runs = list(recorded)
    arrivals_ns = first_plans_ns = [each.arrival_ns for each in runs]
    if all(each.request.arrival_s for each in runs):
        arrivals_ns = [round(each.request.arrival_s * NS_PER_S) for each in runs]
    first_ns = min(arrivals_ns, default=0)
    # From the clock of arrivals to that of steps: some request came to an idle engine.
    clock_offset_ns = min(map(sub, first_plans_ns, arrivals_ns), default=0)
    # Two requests that are prepared at a time may be submitted in the other order.
    timed = sorted(zip(arrivals_ns, runs, strict=True), key=itemgetter(0))
    return [
        TraceRequest(
            at_ns - first_ns,
            len(request.prompt),
            _num_output_tokens(request.params, num_tokens, disconnect_ns),
            tokens=tuple(request.prompt),
            patience_ns=None if disconnect_ns is None else disconnect_ns - clock_offset_ns - at_ns,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        for at_ns, (request, _, disconnect_ns, choices) in timed
        for num_tokens in choices
    ]


def _num_output_tokens(params: SamplingParams, num_tokens: int, disconnect_ns: int | None) -> int:
    """Return the tokens of the answer; the requested tokens where the client disconnected."""
    return num_tokens if disconnect_ns is None else max(num_tokens, params.max_tokens or 0)


def _parse_utc_ns(text: str) -> int:
    """Parse a time in UTC such as "2023-11-16 18:17:03.9799600"."""
    day, _, clock = text.removesuffix("+00:00").partition(" ")
    hours, minutes, seconds = clock.split(":")
    whole_seconds, _, part = seconds.partition(".")
    year, month, date = map(int, day.split("-"))
    # Days of the Gregorian calendar: the year begins in March, so the leap day is its last day. No
    # `datetime`: the simulator imports nothing that reads a clock.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + date
    total_s = ((days - 719_469) * 24 + int(hours)) * 3600 + int(minutes) * 60 + int(whole_seconds)
    return total_s * NS_PER_S + int(part.ljust(9, "0")[:9])


@dataclass(frozen=True)
class TraceFile:
    """The requests of a file, in order. Each iteration reads the file again.

    num_header_lines   lines before the first request
    parse_line         parses a line; returns None for a line without a request
    """

    path: Path
    num_header_lines: int
    parse_line: Callable[[str], TraceRequest | None]

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield requests from time 0 on. Raises InvalidConfig that names the line of a fault."""
        first_ns = last_ns = None
        with self.path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(
                islice(file, self.num_header_lines, None), self.num_header_lines + 1
            ):
                if line.isspace():
                    continue
                try:
                    request = self.parse_line(line)
                except ValueError as error:
                    raise self._line_error(number, str(error)) from error
                if request is None:
                    continue
                if first_ns is None or last_ns is None:
                    first_ns = last_ns = request.at_ns
                if request.at_ns < last_ns:
                    raise self._line_error(number, "it is earlier than the line before")
                if request.prompt < 0 or request.output < 0:
                    raise self._line_error(number, "a length is negative")
                last_ns = request.at_ns
                yield request._replace(at_ns=last_ns - first_ns)

    def _line_error(self, number: int, problem: str) -> InvalidConfig:
        return InvalidConfig("workload", f"{self.path}, line {number}: {problem}", "Fix the file")


def open_trace(path: Path) -> Iterable[TraceRequest]:
    """Return the requests of a file in the format that its first line shows.

    Raises InvalidConfig.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = file.readline(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            "workload", f"{path} cannot be read: {error}", "Give the path of a trace"
        ) from error
    if first == _AZURE_HEADER:
        return TraceFile(path, 1, parse_azure_line)
    if first.startswith(_LOG_START):
        return TraceFile(path, 1, partial(parse_log_line, _read_disconnects(path)))
    if first[len(_CHECKSUM_EXAMPLE) :].startswith(_LOG_START):
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return read_trace_requests(read_requests(file))
    if first.startswith("{"):
        return TraceFile(path, 0, parse_mooncake_line)
    raise InvalidConfig(
        "workload",
        f"{path} begins with {first[:64]!a}, which is no known trace format",
        f"Give a CSV that begins with {_AZURE_HEADER}, Mooncake's JSON lines, or a log or a "
        "recording of "
        "forge",
    )


@dataclass(frozen=True)
class TraceWorkload:
    """An open loop of the requests of a trace.

    requests            iterated once a lap
    speed               factor of the rate of requests
    scale               factor of the lengths of prompts and outputs; shared beginnings scale, too,
                        in whole blocks
    max_prompt_tokens   longer prompts are cut at their end, so shared beginnings stay shared
    max_output_tokens   longer outputs are cut
    num_requests        requests in all: the trace is repeated or cut. None: one lap

    Every length is at least 1, and `speed` does not change how long clients wait. A lap begins one
    mean gap after the last request of the previous lap, and shares no prompt with it.
    """

    requests: Iterable[TraceRequest]
    speed: float = 1.0
    scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("speed", self.speed), ("scale", self.scale)):
            if not 0 < value < float("inf"):
                raise InvalidConfig(name, f"{value!r} is not above 0", "Give a positive number")

    def at_rate(self, rate: float) -> TraceWorkload:
        """Return the trace at the speed at which the played requests arrive `rate` a second.

        The mean rate counts the gaps between them, over all laps. A single request has no gap and
        keeps its speed. Reads the trace once. Raises InvalidConfig where all requests arrive at one
        time.
        """
        count, last_ns = 0, 0
        for count, (request, pass_begin_ns, _) in enumerate(self._select_requests(), 1):  # noqa: B007
            last_ns = pass_begin_ns + request.at_ns
        if count < 2:
            return self
        if not last_ns:
            raise InvalidConfig(
                "rate",
                f"the first {count} requests come at the same time, so they have no rate",
                "Leave it out, or play more requests",
            )
        return replace(self, speed=rate * last_ns / ((count - 1) * NS_PER_S))

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield the arrivals of all laps, one at a time."""
        # Parameters are validated when created, which takes longer than a line: one per length.
        params: dict[int, SamplingParams] = {}
        for request_id, (trace_request, pass_begin_ns, key_offset) in enumerate(
            self._select_requests()
        ):
            output = _clip_length(round(trace_request.output * self.scale), self.max_output_tokens)
            if output not in params:
                params[output] = fixed_output_params(output)
            prompt = self._create_prompt(request_id, trace_request, key_offset)
            at_ns = round((pass_begin_ns + trace_request.at_ns) / self.speed)
            labels = (trace_request.priority, trace_request.cache_salt)
            request = Request(request_id, prompt, params[output], *labels)
            disconnect_ns = (
                None if trace_request.patience_ns is None else at_ns + trace_request.patience_ns
            )
            yield RequestArrival(at_ns, request, disconnect_ns)

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return nothing: this is an open loop."""
        return ()

    def _select_requests(self) -> Iterator[tuple[TraceRequest, int, int]]:
        """Return the first `num_requests` requests of the laps, or those of one lap."""
        passes = self._repeat()
        return passes if self.num_requests is None else islice(passes, self.num_requests)

    def _repeat(self) -> Iterator[tuple[TraceRequest, int, int]]:
        """Yield each request, the begin of its lap in time, and an offset for its block names."""
        pass_begin_ns, key_offset = 0, 0
        while True:
            count, at_ns, num_keys = 0, 0, 0
            for count, request in enumerate(self.requests, 1):  # noqa: B007
                at_ns = request.at_ns
                num_keys = max(num_keys, max(request.tokens or request.blocks, default=-1) + 1)
                yield request, pass_begin_ns, key_offset
            if self.num_requests is None or not count:
                return
            pass_begin_ns += at_ns + (at_ns // (count - 1) if count > 1 else NS_PER_S)
            key_offset += num_keys

    def _create_prompt(
        self, request_id: int, request: TraceRequest, key_offset: int
    ) -> tuple[int, ...] | range:
        if not request.blocks:
            length = _clip_length(round(request.prompt * self.scale), self.max_prompt_tokens)
            if not request.tokens:
                return unique_tokens(request_id, length)
            # Every token is repeated equally often, so shared beginnings stay shared.
            last = len(request.tokens) - 1
            indices = (min(last, int(index / self.scale)) for index in range(length))
            return tuple(request.tokens[index] + key_offset for index in indices)
        size = max(1, round(MOONCAKE_BLOCK_TOKENS * self.scale))
        full, rest = divmod(request.prompt, MOONCAKE_BLOCK_TOKENS)
        length = _clip_length(
            full * size + rest * size // MOONCAKE_BLOCK_TOKENS, self.max_prompt_tokens
        )
        # The blocks that the prompt has after the cut.
        keys = islice(request.blocks, -(-length // size))
        tokens = chain.from_iterable(unique_tokens(key_offset + name, size) for name in keys)
        return tuple(islice(tokens, length))


def _clip_length(tokens: int, max_tokens: int | None) -> int:
    return max(1, tokens if max_tokens is None else min(tokens, max_tokens))
