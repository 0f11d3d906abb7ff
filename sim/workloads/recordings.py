"""Recordings as workloads: the requests of an engine run, and what each of them received.

Owns the history of requests. A recording does not say which request a token belongs to, so
forge.sim.replay schedules the run again.

    recording ──► replay ──► request, arrival, disconnect, tokens of each choice
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.recording import Entry, parse_request
from forge.request import Delta, FinishReason, Request
from forge.sim.replay import replay


class RecordedRequest(NamedTuple):
    """A request of a recording with its result. Times are those of recorded steps.

    arrival_ns      the first plan after it was submitted
    disconnect_ns   the first plan after it was aborted; None: it was not aborted
    num_tokens      tokens of each choice
    """

    request: Request
    arrival_ns: int
    disconnect_ns: int | None
    num_tokens: tuple[int, ...]


class _RequestHistory:
    """Results of requests, by their index in the order of submission.

    A submission and an abort have no time in a recording: they receive that of the next plan.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.num_tokens: list[list[int]] = []
        self.arrival_ns: dict[int, int] = {}
        self.disconnect_ns: dict[int, int] = {}
        self._index_of: dict[int, int] = {}
        self._pending_times: list[tuple[dict[int, int], int]] = []
        self._last_plan_ns = 0

    def on_entry(self, entry: Entry, deltas: Sequence[Delta]) -> None:
        """Add one line of the recording."""
        if "submit" in entry:
            request = parse_request(entry["submit"])
            index = self._index_of[request.id] = len(self.requests)
            self.requests.append(request)
            self.num_tokens.append([0] * request.params.n)
            self._pending_times.append((self.arrival_ns, index))
        elif entry.get("plan"):
            self._last_plan_ns = entry["plan"][2]
            self.assign_times()
        for delta in deltas:
            index = self._index_of[delta.request_id]
            self.num_tokens[index][delta.choice] += len(delta.tokens)
            if delta.finish is FinishReason.ABORT:
                self._pending_times.append((self.disconnect_ns, index))

    def assign_times(self) -> None:
        """Assign the time of the last plan to pending arrivals and disconnects."""
        for times, index in self._pending_times:
            times[index] = self._last_plan_ns
        self._pending_times.clear()


def read_requests(lines: Iterable[str]) -> list[RecordedRequest]:
    """Return every request of a recording, in the order of submission.

    Raises InvalidConfig where the recording is damaged, has no end, or replays differently.
    """
    requests = _RequestHistory()
    result = replay(lines, on_entry=requests.on_entry)
    if result.difference is not None:
        raise InvalidConfig(
            "recording",
            f"it is decided otherwise at {result.difference}",
            f"Take forge {result.version}, which recorded it",
        )
    if not result.is_complete:
        raise InvalidConfig("recording", "its end is missing", "Record the run again")
    requests.assign_times()
    return [
        RecordedRequest(
            request,
            requests.arrival_ns[index],
            requests.disconnect_ns.get(index),
            tuple(requests.num_tokens[index]),
        )
        for index, request in enumerate(requests.requests)
    ]
