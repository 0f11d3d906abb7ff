"""Metrics: the latencies that clients would measure, in bounded memory.

Owns times to the first token, times between tokens, latencies, and the counts that must balance.
Knows no engine. Memory grows with open requests and with the number of distinct times, which are
counted in bins of 0.1 %.

Most steps give the same requests one token each. For a run of such steps only the times are stored:
each request is updated once, when one of them ends, another gains a token or a figure is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import exp, expm1, inf, log
from operator import sub
from typing import Any, NamedTuple, TypeVar

from forge.request import Delta
from forge.sim.units import NS_PER_S

Label = TypeVar("Label", int, str)

BINS_PER_E = 1000
RESOLUTION = expm1(0.5 / BINS_PER_E)
"""Bins are 0.1 % wide: a quantile is within this share of the exact one."""

QUANTILES = (0.5, 0.9, 0.99)

SUCCESSFUL_FINISHES = ("length", "stop")
"""Finish reasons of choices with a complete answer."""


class LatencyObjective(NamedTuple):
    """Limits in nanoseconds that a served request must meet to count as good.

    ttft_ns   of the time to its first token
    itl_ns    of the mean time between its tokens
    """

    ttft_ns: float = inf
    itl_ns: float = inf


NO_OBJECTIVE = LatencyObjective()


class Refusals(NamedTuple):
    """Requests that were refused for one reason.

    requests   their number
    tokens     of the longest of them, prompt and output
    why        the error text of that one: its remedy serves all of them
    """

    requests: int
    tokens: int
    why: str


@dataclass
class DurationHistogram:
    """Durations in nanoseconds: count, sum, minimum, maximum and quantiles."""

    count: int = 0
    total_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    _bins: Counter[int] = field(default_factory=Counter)
    _last_ns: int = 0
    _last_bin: int = -1

    def add(self, duration_ns: int, count: int = 1) -> None:
        """Add a duration `count` times."""
        if duration_ns < self.min_ns or not self.count:
            self.min_ns = duration_ns
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns
        self.count += count
        self.total_ns += count * duration_ns
        if duration_ns != self._last_ns:  # equal durations often follow each other
            self._last_ns = duration_ns
            self._last_bin = round(BINS_PER_E * log(duration_ns)) if duration_ns > 0 else -1
        self._bins[self._last_bin] += count

    @property
    def mean_ns(self) -> float:
        """Mean duration; 0 where there are none."""
        return self.total_ns / self.count if self.count else 0.0

    def quantile_ns(self, quantile: float) -> float:
        """Return the duration that a share `quantile` does not exceed, within RESOLUTION."""
        remaining = quantile * self.count
        for bin_index in sorted(self._bins):
            remaining -= self._bins[bin_index]
            if remaining <= 0:
                return self._bin_center_ns(bin_index)
        return 0.0

    def cdf(self) -> list[tuple[float, float]]:
        """Return (duration, share of durations that do not exceed it), ascending."""
        found, cumulative = [], 0
        for bin_index in sorted(self._bins):
            cumulative += self._bins[bin_index]
            found.append((self._bin_center_ns(bin_index), cumulative / self.count))
        return found

    def _bin_center_ns(self, bin_index: int) -> float:
        """Return the middle of a bin, clipped to the minimum and maximum duration."""
        middle_ns = exp(bin_index / BINS_PER_E) if bin_index >= 0 else 0.0
        return min(max(middle_ns, self.min_ns), self.max_ns)

    def summary(self) -> dict[str, float]:
        """Return mean, quantiles and maximum in milliseconds."""
        named = {f"p{round(100 * q)}": self.quantile_ns(q) / 1e6 for q in QUANTILES}
        return {"mean": self.mean_ns / 1e6, **named, "max": self.max_ns / 1e6}


@dataclass
class GroupMetrics:
    """Metrics of the finished requests of one class or of one tenant."""

    num_finished: int = 0
    num_good: int = 0
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    latency: DurationHistogram = field(default_factory=DurationHistogram)

    def summary(self) -> dict[str, Any]:
        """Return counts, and times in milliseconds."""
        times = {"ttft_ms": self.ttft.summary(), "latency_ms": self.latency.summary()}
        return {"requests": self.num_finished, "good": self.num_good, **times}


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended, with the metrics of its class and of its tenant."""

    groups: tuple[GroupMetrics, GroupMetrics]
    arrival_ns: int
    last_token_ns: int = -1
    num_open_choices: int = 1
    first_token_ns: int = -1
    num_tokens: int = 0
    succeeded: bool = True


class RunMetrics:
    """Metrics of a run, from its arrivals, tokens and finishes.

    objective      limits that a good request meets
    num_good       good requests
    refusals       by reason
    classes        by priority
    tenants        by cache salt
    in_system_ns   integral over time of the number of requests in the system: Little's law, exact
    """

    def __init__(self, objective: LatencyObjective = NO_OBJECTIVE) -> None:
        self.objective = objective
        self.num_good = 0
        self.ttft, self.latency = DurationHistogram(), DurationHistogram()
        self.finish_counts: Counter[str] = Counter()
        self.num_arrived = 0
        self.refusals: dict[str, Refusals] = {}
        self.classes: dict[int, GroupMetrics] = {}
        self.tenants: dict[str, GroupMetrics] = {}
        self.in_system_ns = 0
        self.begin_ns: int | None = None
        self.end_ns = 0
        self._arrival_span_ns: tuple[int, int] | None = None  # the first arrival and the last
        self._open: dict[int, _OpenRequest] = {}
        self._last_change_ns = 0
        self._itl = DurationHistogram()
        self._num_output_tokens = 0
        # Requests that gained one token each at each of the times.
        self._decode_run_ids: list[int] = []
        self._decode_run_times_ns: list[int] = []

    @property
    def num_in_system(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._open)

    @property
    def itl(self) -> DurationHistogram:
        """Times between the tokens of a request."""
        self._flush_decode_run()
        return self._itl

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        self._flush_decode_run()
        return self._num_output_tokens

    @property
    def num_refused(self) -> int:
        """Requests that were refused."""
        return sum(each.requests for each in self.refusals.values())

    @property
    def offered_per_s(self) -> float | None:
        """Mean arrival rate, refused requests included; None where all arrived at one time."""
        first_ns, last_ns = self._arrival_span_ns or (0, 0)
        return (
            (self.num_arrived - 1) * NS_PER_S / (last_ns - first_ns) if last_ns > first_ns else None
        )

    def record_arrival(
        self, request_id: int, now_ns: int, num_choices: int, priority: int = 0, tenant: str = ""
    ) -> None:
        """Count a request that was accepted."""
        self._integrate_in_system(now_ns)
        self._count_arrival(now_ns)
        if self.begin_ns is None:
            self.begin_ns = now_ns
        groups = self._group_of(self.classes, priority), self._group_of(self.tenants, tenant)
        self._open[request_id] = _OpenRequest(groups, now_ns, num_open_choices=num_choices)

    def record_refusal(self, now_ns: int, reason: str, tokens: int, why: str) -> None:
        """Count a refused request of this many tokens.

        reason   name of the error
        why      the limit and the remedy
        """
        self._count_arrival(now_ns)
        count, longest_tokens, longest_why = self.refusals.get(reason, (0, -1, ""))
        self.refusals[reason] = Refusals(
            count + 1, *max((tokens, why), (longest_tokens, longest_why))
        )

    @staticmethod
    def _group_of(groups: dict[Label, GroupMetrics], label: Label) -> GroupMetrics:
        return groups.setdefault(label, GroupMetrics())

    def _count_arrival(self, now_ns: int) -> None:
        self.num_arrived += 1
        first_ns, last_ns = self._arrival_span_ns or (now_ns, now_ns)
        self._arrival_span_ns = min(first_ns, now_ns), max(last_ns, now_ns)

    def record_deltas(self, deltas: Sequence[Delta], now_ns: int) -> None:
        """Record tokens. Several tokens of a request in one delta have arrived together."""
        if not deltas:
            return
        # request_id and tokens by index: attribute access is slower, and every row passes here.
        ids = [delta[0] for delta in deltas if len(delta[2]) == 1]
        if ids == self._decode_run_ids and len(ids) == len(deltas):
            self._decode_run_times_ns.append(now_ns)
            return
        self._flush_decode_run()
        for delta in deltas:
            if delta.tokens:
                self._record_tokens(self._open[delta.request_id], len(delta.tokens), now_ns)
        if len(set(ids)) == len(deltas):
            self._decode_run_ids = ids

    def record_decode_steps(self, request_ids: list[int], times_ns: list[int]) -> None:
        """Record one token for each request at each of the times.

        All have a first token already.
        """
        if request_ids != self._decode_run_ids:
            self._flush_decode_run()
            self._decode_run_ids = request_ids
        self._decode_run_times_ns += times_ns

    def _record_tokens(self, request: _OpenRequest, num_tokens: int, now_ns: int) -> None:
        if request.last_token_ns < 0:
            self.ttft.add(now_ns - request.arrival_ns)
            request.first_token_ns = now_ns
        else:
            self._itl.add(now_ns - request.last_token_ns)
        if num_tokens > 1:
            self._itl.add(0, num_tokens - 1)
        request.last_token_ns = now_ns
        request.num_tokens += num_tokens
        self._num_output_tokens += num_tokens

    def _flush_decode_run(self) -> None:
        """End the run of uniform steps and add it to the histograms."""
        ids, times_ns = self._decode_run_ids, self._decode_run_times_ns
        self._decode_run_ids, self._decode_run_times_ns = [], []
        if not (ids and times_ns):
            return
        for request_id in ids:
            request = self._open[request_id]
            self._itl.add(times_ns[0] - request.last_token_ns)
            request.last_token_ns = times_ns[-1]
            request.num_tokens += len(times_ns)
        for wait_ns, run in groupby(map(sub, times_ns[1:], times_ns)):
            self._itl.add(wait_ns, len(list(run)) * len(ids))
        self._num_output_tokens += len(ids) * len(times_ns)

    def record_finish(self, request_id: int, now_ns: int, finish_reason: str) -> bool:
        """Record the end of a choice. Returns True where it was the last one of its request."""
        self._flush_decode_run()
        self.finish_counts[finish_reason] += 1
        request = self._open[request_id]
        request.num_open_choices -= 1
        request.succeeded &= finish_reason in SUCCESSFUL_FINISHES
        if request.num_open_choices:
            return False
        is_good = self._meets_objective(request)
        self.num_good += is_good
        self._integrate_in_system(now_ns)
        self.latency.add(now_ns - request.arrival_ns)
        for group in request.groups:
            group.num_finished += 1
            group.num_good += is_good
            group.latency.add(now_ns - request.arrival_ns)
            if request.first_token_ns >= 0:
                group.ttft.add(request.first_token_ns - request.arrival_ns)
        del self._open[request_id]
        self.end_ns = now_ns
        return True

    def _meets_objective(self, request: _OpenRequest) -> bool:
        if not request.succeeded:
            return False
        ttft_ns = max(0, request.first_token_ns - request.arrival_ns)
        itl_ns = (request.last_token_ns - request.first_token_ns) / max(1, request.num_tokens - 1)
        return ttft_ns <= self.objective.ttft_ns and itl_ns <= self.objective.itl_ns

    def _integrate_in_system(self, now_ns: int) -> None:
        self.in_system_ns += len(self._open) * (now_ns - self._last_change_ns)
        self._last_change_ns = now_ns

    def summary(self) -> Mapping[str, Any]:
        """Return all figures. Times are milliseconds, rates are over the time from begin to end."""
        span_s = (self.end_ns - (self.begin_ns or 0)) / 1e9
        return {
            "requests": self.num_arrived,
            "offered_per_s": self.offered_per_s,
            "endings": dict(sorted(self.finish_counts.items())),
            "refused": self.num_refused,
            "refusals": {name: each._asdict() for name, each in sorted(self.refusals.items())},
            "good": self.num_good,
            "seconds": span_s,
            "output_tokens": self.num_output_tokens,
            "tokens_per_s": self.num_output_tokens / span_s if span_s else 0.0,
            "goodput_per_s": self.num_good / span_s if span_s else 0.0,
            "ttft_ms": self.ttft.summary(),
            "itl_ms": self.itl.summary(),
            "latency_ms": self.latency.summary(),
            "classes": _summarize_groups(self.classes),
            "tenants": _summarize_groups(self.tenants),
        }


def _summarize_groups(groups: Mapping[Label, GroupMetrics]) -> dict[str, Any]:
    """Return the figures of each group; empty where there is only one group."""
    if len(groups) < 2:
        return {}
    return {str(label): groups[label].summary() for label in sorted(groups)}
