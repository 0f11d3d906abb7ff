"""Traces: real workloads, read line by line from public formats, and runs of our own.

Owns the formats and how a trace is bent to fit: faster, shorter, longer, again. Knows no engine. A
trace has no text: it says when requests came, how long they were and, at best, which of them began
alike.

    Azure      TIMESTAMP,ContextTokens,GeneratedTokens             prompts share nothing
    Mooncake   {"timestamp", "input_length", "output_length",      equal ids: equal blocks of 512
                "hash_ids"}                                        tokens, and all before them too
    log        {"at", "arrive", "prompt", "output"} of sim.log     prompts share nothing,
               {"at", "leave"}                                     clients may leave, and
                                                                   classes and tenants stay
    recording  of forge.recording, decided again by sim.replay     tokens as they were asked

    file ──► Asked, Asked, ... ──► speed, scale, longest, laps ──► Arrival, Arrival, ...

Memory does not grow with the file or with the number of laps, but for a recording, which is kept.
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
from sim.replay import Served, history
from sim.workload import SECOND, Arrival, exactly, named_tokens

BLOCK = 512
"""Tokens that a hash id of Mooncake's stands for."""

SAMPLE = Path(__file__).parent / "data" / "azure_sample.csv"
"""The beginning of a public trace; its licence and source are beside it."""

_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
_OWN = '{"forge":'
"""How the first line of a log begins, and behind a checksum that of a recording."""
_CHECKSUM = "00000000 "


class Asked(NamedTuple):
    """One request of a trace.

    at_ns        since the trace's first request
    prompt       tokens
    output       tokens
    blocks       names of the prompt's blocks of BLOCK tokens, the last one maybe begun only; the
                 same name, the same tokens. Empty: nobody shares the prompt
    tokens       of the prompt, where they are known: then it has no blocks
    stays_ns     how long its client waits for the whole answer; None: as long as it takes
    priority     lower goes first
    cache_salt   only prompts with the same salt share what they have alike
    """

    at_ns: int
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    stays_ns: int | None = None
    priority: int = 0
    cache_salt: str = ""


def azure_line(line: str) -> Asked:
    """A line of Azure's traces, its time since 1970. Raises ValueError."""
    time, prompt, output = line.split(",")
    return Asked(_since_1970_ns(time), int(prompt), int(output))


def mooncake_line(line: str) -> Asked:
    """A line of Mooncake's traces. Raises ValueError."""
    said = json.loads(line)
    try:
        at_ns = round(said["timestamp"] * 1_000_000)
        prompt, output = int(said["input_length"]), int(said["output_length"])
        blocks = tuple(map(int, said["hash_ids"]))
    except (KeyError, TypeError) as fault:
        raise ValueError(f"not a request: {fault!r}") from fault
    if len(blocks) != -(-prompt // BLOCK):
        raise ValueError(f"{len(blocks)} hash_ids for {prompt} tokens, {BLOCK} each")
    return Asked(at_ns, prompt, output, blocks)


def log_line(left_ns: Mapping[int, int], line: str) -> Asked | None:
    """A line of a log, its time since the run began; None: nobody came. Raises ValueError.

    left_ns   request -> when its client went away
    """
    if '"arrive":' not in line:
        return None
    said = json.loads(line)
    try:
        at_ns, prompt, output = map(int, (said["at"], said["prompt"], said["output"]))
        stays_ns = None if said["arrive"] not in left_ns else left_ns[said["arrive"]] - at_ns
        priority, tenant = int(said.get("class", 0)), str(said.get("tenant", ""))
    except (KeyError, TypeError) as fault:
        raise ValueError(f"not a request: {fault!r}") from fault
    return Asked(at_ns, prompt, output, stays_ns=stays_ns, priority=priority, cache_salt=tenant)


def _departures(path: Path) -> dict[int, int]:
    """When each client went away that did. Raises InvalidConfig where the log is not whole."""
    leaving: list[bytes] = []
    found = sha256()
    with path.open("rb") as file:
        for line in file:
            if line == f'{{"sha256":"{found.hexdigest()}"}}\n'.encode():
                return {said["leave"]: said["at"] for said in map(json.loads, leaving)}
            found.update(line)
            if b'"leave":' in line:
                leaving.append(line)
    raise InvalidConfig(
        "workload", f"{path} does not end with the hash of its lines", "Write the log again"
    )


def asked_in(served: Iterable[Served]) -> list[Asked]:
    """What was asked in a recording: each choice is a request of its own, with the same prompt.

    Where every request says when it arrived, that is when. Otherwise it came with the first plan
    after it: who came while a step was under way came at its end.
    """
    runs = list(served)
    came_ns = planned_ns = [each.came_ns for each in runs]
    if all(each.request.arrival_s for each in runs):
        came_ns = [round(each.request.arrival_s * SECOND) for each in runs]
    first_ns = min(came_ns, default=0)
    # From the clock of arrivals to that of steps: somebody came when nothing was to be done.
    ahead_ns = min(map(sub, planned_ns, came_ns), default=0)
    # Of two that were made ready at a time the later one may have been submitted first.
    timed = sorted(zip(came_ns, runs, strict=True), key=itemgetter(0))
    return [
        Asked(
            at_ns - first_ns,
            len(request.prompt),
            _answer(request.params, gained, left_ns),
            tokens=tuple(request.prompt),
            stays_ns=None if left_ns is None else left_ns - ahead_ns - at_ns,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        for at_ns, (request, _, left_ns, every) in timed
        for gained in every
    ]


def _answer(params: SamplingParams, gained: int, left_ns: int | None) -> int:
    """Tokens of the whole answer; where nobody waited for it, those that were asked for."""
    return gained if left_ns is None else max(gained, params.max_tokens or 0)


def _since_1970_ns(text: str) -> int:
    """Of "2023-11-16 18:17:03.9799600", a time of UTC."""
    day, _, clock = text.removesuffix("+00:00").partition(" ")
    hours, minutes, seconds = clock.split(":")
    whole, _, part = seconds.partition(".")
    year, month, date = map(int, day.split("-"))
    # Days of the Gregorian calendar: the year begins in March, so its last day is the one that may
    # be missing. No `datetime`: nothing in here may know what time it is.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + date
    total_s = ((days - 719_469) * 24 + int(hours)) * 3600 + int(minutes) * 60 + int(whole)
    return total_s * SECOND + int(part.ljust(9, "0")[:9])


@dataclass(frozen=True)
class TraceFile:
    """The requests of a file, in order; read again each time it is iterated.

    lines   before the first request
    parse   a line; None: it is about no request
    """

    path: Path
    lines: int
    parse: Callable[[str], Asked | None]

    def __iter__(self) -> Iterator[Asked]:
        """From time 0 on. Raises InvalidConfig, naming the line, where one cannot be read."""
        first_ns = last_ns = None
        with self.path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(islice(file, self.lines, None), self.lines + 1):
                if line.isspace():
                    continue
                try:
                    asked = self.parse(line)
                except ValueError as fault:
                    raise self._refused(number, str(fault)) from fault
                if asked is None:
                    continue
                if first_ns is None or last_ns is None:
                    first_ns = last_ns = asked.at_ns
                if asked.at_ns < last_ns:
                    raise self._refused(number, "it is earlier than the line before")
                if asked.prompt < 0 or asked.output < 0:
                    raise self._refused(number, "a length is negative")
                last_ns = asked.at_ns
                yield asked._replace(at_ns=last_ns - first_ns)

    def _refused(self, number: int, problem: str) -> InvalidConfig:
        return InvalidConfig("workload", f"{self.path}, line {number}: {problem}", "Mend the file")


def trace_file(path: Path) -> Iterable[Asked]:
    """The requests of a file, whose format is told by its first line. Raises InvalidConfig."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = file.readline(4096).strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidConfig(
            "workload", f"{path} cannot be read: {fault}", "Give the path of a trace"
        ) from fault
    if first == _AZURE:
        return TraceFile(path, 1, azure_line)
    if first.startswith(_OWN):
        return TraceFile(path, 1, partial(log_line, _departures(path)))
    if first[len(_CHECKSUM) :].startswith(_OWN):
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            return asked_in(history(file))
    if first.startswith("{"):
        return TraceFile(path, 0, mooncake_line)
    raise InvalidConfig(
        "workload",
        f"{path} begins with {first[:64]!a}, which is no trace that is known",
        f"Give a CSV that begins with {_AZURE}, Mooncake's JSON lines, or a log or a recording of "
        "forge",
    )


@dataclass(frozen=True)
class Trace:
    """A workload that was seen somewhere. Open loop.

    requests         iterated once a lap
    speed            they come so many times as fast
    scale            prompts and outputs are so many times as long; what they share is scaled with
                     them, in whole blocks
    longest_prompt   longer ones are cut at the end: what they share stays shared
    longest_output   longer ones are cut
    count            requests in all: the trace is repeated, or ends early. None: one lap

    Every length is at least 1, and clients stay as long as they did. A lap begins one mean gap
    after the last request of the lap before, and shares no prompt with it.
    """

    requests: Iterable[Asked]
    speed: float = 1.0
    scale: float = 1.0
    longest_prompt: int | None = None
    longest_output: int | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("speed", self.speed), ("scale", self.scale)):
            if not 0 < value < float("inf"):
                raise InvalidConfig(name, f"{value!r} is not above 0", "Give a positive number")

    def at_rate(self, rate: float) -> Trace:
        """Return the trace at the speed at which the requests that it plays come `rate` a second.

        The mean rate counts the gaps between them, of all laps. One request alone has none, and
        any speed will do. Reads the trace once. Raises InvalidConfig where all come at once.
        """
        count, last_ns = 0, 0
        for count, (asked, begin_ns, _) in enumerate(self._played(), 1):  # noqa: B007
            last_ns = begin_ns + asked.at_ns
        if count < 2:
            return self
        if not last_ns:
            raise InvalidConfig(
                "rate",
                f"the first {count} requests come at the same time, so they have no rate",
                "Leave it out, or play more requests",
            )
        return replace(self, speed=rate * last_ns / ((count - 1) * SECOND))

    def arrivals(self) -> Iterator[Arrival]:
        """One at a time, however many laps."""
        # A value is checked when it is made, which takes longer than a line: one for each length.
        params: dict[int, SamplingParams] = {}
        for request_id, (asked, begin_ns, first_name) in enumerate(self._played()):
            output = _length(round(asked.output * self.scale), self.longest_output)
            if output not in params:
                params[output] = exactly(output)
            prompt = self._prompt(request_id, asked, first_name)
            at_ns = round((begin_ns + asked.at_ns) / self.speed)
            labels = (asked.priority, asked.cache_salt)
            request = Request(request_id, prompt, params[output], *labels)
            leaves_ns = None if asked.stays_ns is None else at_ns + asked.stays_ns
            yield Arrival(at_ns, request, leaves_ns)

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """Nothing."""
        return ()

    def _played(self) -> Iterator[tuple[Asked, int, int]]:
        """Return the first `count` requests of the laps, or those of one lap."""
        laps = self._laps()
        return laps if self.count is None else islice(laps, self.count)

    def _laps(self) -> Iterator[tuple[Asked, int, int]]:
        """Requests, when their lap begins, and what is added to the names of its blocks."""
        begin_ns, first_name = 0, 0
        while True:
            count, at_ns, names = 0, 0, 0
            for count, asked in enumerate(self.requests, 1):  # noqa: B007
                at_ns = asked.at_ns
                names = max(names, max(asked.tokens or asked.blocks, default=-1) + 1)
                yield asked, begin_ns, first_name
            if self.count is None or not count:
                return
            begin_ns += at_ns + (at_ns // (count - 1) if count > 1 else SECOND)
            first_name += names

    def _prompt(self, request_id: int, asked: Asked, first_name: int) -> tuple[int, ...] | range:
        if not asked.blocks:
            length = _length(round(asked.prompt * self.scale), self.longest_prompt)
            if not asked.tokens:
                return named_tokens(request_id, length)
            # Each as often as the next, so prompts that begin alike still do.
            last = len(asked.tokens) - 1
            places = (min(last, int(place / self.scale)) for place in range(length))
            return tuple(asked.tokens[place] + first_name for place in places)
        size = max(1, round(BLOCK * self.scale))
        full, rest = divmod(asked.prompt, BLOCK)
        length = _length(full * size + rest * size // BLOCK, self.longest_prompt)
        # As many blocks as the prompt has after the cut.
        names = islice(asked.blocks, -(-length // size))
        tokens = chain.from_iterable(named_tokens(first_name + name, size) for name in names)
        return tuple(islice(tokens, length))


def _length(tokens: int, longest: int | None) -> int:
    return max(1, tokens if longest is None else min(tokens, longest))
