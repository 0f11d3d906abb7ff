"""Measures: what users would have seen, kept in bounded memory.

Owns times to the first token, times between tokens, latencies, and the counts that must balance.
Knows no engine. Memory grows with open requests and with the number of distinct times, which are
kept in bins of 0.1 %.

Most steps give the same requests a token each. Of a run of such steps only the times are noted:
each request is looked at once, when one of them ends, another gains or somebody asks.
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
from sim.workload import SECOND

Label = TypeVar("Label", int, str)

FINE = 1000
RESOLUTION = expm1(0.5 / FINE)
"""Times are counted in bins of 0.1 %: a quantile is within this share of the exact one."""

QUANTILES = (0.5, 0.9, 0.99)

SERVED = ("length", "stop")
"""Endings of choices that have all of their answer."""


class Objective(NamedTuple):
    """What makes a request a good one, beside that it was served: no more than these nanoseconds.

    ttft_ns   to its first token
    itl_ns    between its tokens, their mean
    """

    ttft_ns: float = inf
    itl_ns: float = inf


SERVED_AT_ALL = Objective()


class Refusals(NamedTuple):
    """Requests that were refused for one reason.

    requests   how many
    tokens     of the longest of them, prompt and output
    why        the error of that one: what helps it helps them all
    """

    requests: int
    tokens: int
    why: str


@dataclass
class Times:
    """Durations in nanoseconds: how many, their sum, the least, the most, and quantiles."""

    count: int = 0
    total_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0
    _bins: Counter[int] = field(default_factory=Counter)
    _last_ns: int = 0
    _last_bin: int = -1

    def add(self, duration_ns: int, count: int = 1) -> None:
        """`count` times the same duration."""
        if duration_ns < self.least_ns or not self.count:
            self.least_ns = duration_ns
        if duration_ns > self.most_ns:
            self.most_ns = duration_ns
        self.count += count
        self.total_ns += count * duration_ns
        if duration_ns != self._last_ns:  # steps that are alike come one after the other
            self._last_ns = duration_ns
            self._last_bin = round(FINE * log(duration_ns)) if duration_ns > 0 else -1
        self._bins[self._last_bin] += count

    @property
    def mean_ns(self) -> float:
        """0 where there are none."""
        return self.total_ns / self.count if self.count else 0.0

    def quantile_ns(self, share: float) -> float:
        """The least duration that `share` of all do not exceed, within RESOLUTION of it."""
        left = share * self.count
        for name in sorted(self._bins):
            left -= self._bins[name]
            if left <= 0:
                return self._middle_ns(name)
        return 0.0

    def distribution(self) -> list[tuple[float, float]]:
        """Each duration, ascending, and the share of all that do not exceed it."""
        found, so_far = [], 0
        for name in sorted(self._bins):
            so_far += self._bins[name]
            found.append((self._middle_ns(name), so_far / self.count))
        return found

    def _middle_ns(self, name: int) -> float:
        """The middle of a bin; of the outermost bins as much as there are durations."""
        middle_ns = exp(name / FINE) if name >= 0 else 0.0
        return min(max(middle_ns, self.least_ns), self.most_ns)

    def summary(self) -> dict[str, float]:
        """Mean and quantiles, in milliseconds."""
        named = {f"p{round(100 * q)}": self.quantile_ns(q) / 1e6 for q in QUANTILES}
        return {"mean": self.mean_ns / 1e6, **named, "max": self.most_ns / 1e6}


@dataclass
class Group:
    """Requests of one class or of one tenant that have ended."""

    requests: int = 0
    good: int = 0
    first_token: Times = field(default_factory=Times)
    latency: Times = field(default_factory=Times)

    def summary(self) -> dict[str, Any]:
        """Counts, and times in milliseconds."""
        times = {"ttft_ms": self.first_token.summary(), "latency_ms": self.latency.summary()}
        return {"requests": self.requests, "good": self.good, **times}


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and its class and tenant."""

    groups: tuple[Group, Group]
    arrived_ns: int
    last_ns: int = -1
    left: int = 1
    first_ns: int = -1
    num_tokens: int = 0
    served: bool = True


class Measures:
    """Told of arrivals, tokens and endings; says what came of them.

    objective    what a good request is
    good         requests that were
    refusals     by reason
    classes      by priority
    tenants      by cache salt
    holding_ns   sum over time of the number of requests in the system: Little's law, exact
    """

    def __init__(self, objective: Objective = SERVED_AT_ALL) -> None:
        self.objective = objective
        self.good = 0
        self.first_token, self.latency = Times(), Times()
        self.endings: Counter[str] = Counter()
        self.arrived = 0
        self.refusals: dict[str, Refusals] = {}
        self.classes: dict[int, Group] = {}
        self.tenants: dict[str, Group] = {}
        self.holding_ns = 0
        self.begin_ns: int | None = None
        self.end_ns = 0
        self._offered_ns: tuple[int, int] | None = None  # the first arrival and the last
        self._open: dict[int, _Open] = {}
        self._last_change_ns = 0
        self._between_tokens = Times()
        self._output_tokens = 0
        self._alike: list[int] = []  # requests that gained a token each at each of the times
        self._alike_ns: list[int] = []

    @property
    def in_system(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._open)

    @property
    def between_tokens(self) -> Times:
        """Between the tokens of a request."""
        self._count_alike()
        return self._between_tokens

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        self._count_alike()
        return self._output_tokens

    @property
    def refused(self) -> int:
        """Requests that were not taken."""
        return sum(each.requests for each in self.refusals.values())

    @property
    def offered_per_s(self) -> float | None:
        """Mean rate at which requests came, refused ones too; None where all came at once."""
        first_ns, last_ns = self._offered_ns or (0, 0)
        return (self.arrived - 1) * SECOND / (last_ns - first_ns) if last_ns > first_ns else None

    def arrive(
        self, request_id: int, now_ns: int, num_choices: int, priority: int = 0, tenant: str = ""
    ) -> None:
        """The request is in the system."""
        self._hold(now_ns)
        self._offer(now_ns)
        if self.begin_ns is None:
            self.begin_ns = now_ns
        groups = self._of(self.classes, priority), self._of(self.tenants, tenant)
        self._open[request_id] = _Open(groups, now_ns, left=num_choices)

    def refuse(self, now_ns: int, reason: str, tokens: int, why: str) -> None:
        """Count a request of so many tokens that was refused.

        reason   one of few words
        why      the limit and the remedy
        """
        self._offer(now_ns)
        count, most, told = self.refusals.get(reason, (0, -1, ""))
        self.refusals[reason] = Refusals(count + 1, *max((tokens, why), (most, told)))

    @staticmethod
    def _of(groups: dict[Label, Group], label: Label) -> Group:
        return groups.setdefault(label, Group())

    def _offer(self, now_ns: int) -> None:
        self.arrived += 1
        first_ns, last_ns = self._offered_ns or (now_ns, now_ns)
        self._offered_ns = min(first_ns, now_ns), max(last_ns, now_ns)

    def gain(self, deltas: Sequence[Delta], now_ns: int) -> None:
        """Tokens came; the second and later ones of a request came at once."""
        if not deltas:
            return
        # By place, of every row: request_id and tokens.
        ids = [delta[0] for delta in deltas if len(delta[2]) == 1]
        if ids == self._alike and len(ids) == len(deltas):
            self._alike_ns.append(now_ns)
            return
        self._count_alike()
        for delta in deltas:
            if delta.tokens:
                self._gain(self._open[delta.request_id], len(delta.tokens), now_ns)
        if len(set(ids)) == len(deltas):
            self._alike = ids

    def gain_each(self, request_ids: list[int], times_ns: list[int]) -> None:
        """Each of the requests, which all have tokens already, gained one at each of the times."""
        if request_ids != self._alike:
            self._count_alike()
            self._alike = request_ids
        self._alike_ns += times_ns

    def _gain(self, request: _Open, num_tokens: int, now_ns: int) -> None:
        if request.last_ns < 0:
            self.first_token.add(now_ns - request.arrived_ns)
            request.first_ns = now_ns
        else:
            self._between_tokens.add(now_ns - request.last_ns)
        if num_tokens > 1:
            self._between_tokens.add(0, num_tokens - 1)
        request.last_ns = now_ns
        request.num_tokens += num_tokens
        self._output_tokens += num_tokens

    def _count_alike(self) -> None:
        """The run of steps is over and in the figures."""
        ids, times_ns = self._alike, self._alike_ns
        self._alike, self._alike_ns = [], []
        if not (ids and times_ns):
            return
        for request_id in ids:
            request = self._open[request_id]
            self._between_tokens.add(times_ns[0] - request.last_ns)
            request.last_ns = times_ns[-1]
            request.num_tokens += len(times_ns)
        for wait_ns, run in groupby(map(sub, times_ns[1:], times_ns)):
            self._between_tokens.add(wait_ns, len(list(run)) * len(ids))
        self._output_tokens += len(ids) * len(times_ns)

    def end(self, request_id: int, now_ns: int, how: str) -> bool:
        """One choice has ended; True where it was the last."""
        self._count_alike()
        self.endings[how] += 1
        request = self._open[request_id]
        request.left -= 1
        request.served &= how in SERVED
        if request.left:
            return False
        is_good = self._is_good(request)
        self.good += is_good
        self._hold(now_ns)
        self.latency.add(now_ns - request.arrived_ns)
        for group in request.groups:
            group.requests += 1
            group.good += is_good
            group.latency.add(now_ns - request.arrived_ns)
            if request.first_ns >= 0:
                group.first_token.add(request.first_ns - request.arrived_ns)
        del self._open[request_id]
        self.end_ns = now_ns
        return True

    def _is_good(self, request: _Open) -> bool:
        if not request.served:
            return False
        ttft_ns = max(0, request.first_ns - request.arrived_ns)
        itl_ns = (request.last_ns - request.first_ns) / max(1, request.num_tokens - 1)
        return ttft_ns <= self.objective.ttft_ns and itl_ns <= self.objective.itl_ns

    def _hold(self, now_ns: int) -> None:
        self.holding_ns += len(self._open) * (now_ns - self._last_change_ns)
        self._last_change_ns = now_ns

    def summary(self) -> Mapping[str, Any]:
        """Times in milliseconds, tokens a second over the time that anybody was served."""
        span_s = (self.end_ns - (self.begin_ns or 0)) / 1e9
        return {
            "requests": self.arrived,
            "offered_per_s": self.offered_per_s,
            "endings": dict(sorted(self.endings.items())),
            "refused": self.refused,
            "refusals": {name: each._asdict() for name, each in sorted(self.refusals.items())},
            "good": self.good,
            "seconds": span_s,
            "output_tokens": self.output_tokens,
            "tokens_per_s": self.output_tokens / span_s if span_s else 0.0,
            "goodput_per_s": self.good / span_s if span_s else 0.0,
            "ttft_ms": self.first_token.summary(),
            "itl_ms": self.between_tokens.summary(),
            "latency_ms": self.latency.summary(),
            "classes": _compared(self.classes),
            "tenants": _compared(self.tenants),
        }


def _compared(groups: Mapping[Label, Group]) -> dict[str, Any]:
    """The groups' figures; none where all requests are of one."""
    if len(groups) < 2:
        return {}
    return {str(label): groups[label].summary() for label in sorted(groups)}
