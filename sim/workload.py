"""Workloads: who asks for what, and when. From one seed, the same every time.

Owns arrivals. Knows no engine. Randomness is a function of (seed, purpose, request, index), so one
more draw for one request changes nothing for another.

    open loop     arrivals come when they come, whatever the server does     Poisson, bursts, traces
    closed loop   who asked asks again some time after the answer             clients, agents
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import log
from typing import NamedTuple, Protocol

from forge.request import Request, SamplingParams
from forge.sampling import draw_key, mix, uniform

GAP, PROMPT, OUTPUT, PAUSE, STATE = range(5)
"""Purposes of draws."""

SECOND = 1_000_000_000


def drawn(seed: int, purpose: int, request_id: int, index: int = 0) -> float:
    """Uniform on (0, 1)."""
    return uniform(draw_key(seed, request_id, purpose), index)


def exponential_ns(mean_ns: float, share: float) -> int:
    """Exponential with this mean, by a uniform `share`; whole nanoseconds."""
    return round(-mean_ns * log(share))


class Arrival(NamedTuple):
    """A request comes at `at_ns`.

    leaves_ns   when its client goes away if it has no answer by then; None: it stays
    """

    at_ns: int
    request: Request
    leaves_ns: int | None = None


class Workload(Protocol):
    """Arrivals that come anyway, in order of time, and those that follow an answer."""

    def arrivals(self) -> Iterator[Arrival]:
        """In order of time; read one ahead, so that it may be long."""
        ...

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """What comes because this request has ended now."""
        ...


def fixed_lengths(prompt: int, output: int) -> Callable[[int], tuple[int, int]]:
    """Every request has these lengths."""
    return lambda request_id: (prompt, output)


def named_tokens(name: int, count: int) -> range:
    """`count` tokens that begin as no others do whose name differs, below 1 000 000 007."""
    first = (name * 1_048_573) % 1_000_000_007 + 2
    return range(first, first + count)


def request_of(request_id: int, prompt: int, output: int, *, priority: int = 0) -> Request:
    """A request whose prompt nobody shares and that gets exactly `output` tokens."""
    return Request(request_id, named_tokens(request_id, prompt), exactly(output), priority=priority)


def exactly(output: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


@dataclass(frozen=True)
class Listed:
    """These arrivals, in order of time."""

    listed: tuple[Arrival, ...]

    def arrivals(self) -> Iterator[Arrival]:
        """As they are listed."""
        return iter(self.listed)

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class InVocabulary:
    """Another workload, its prompts written in tokens below `vocab_size`.

    Those below it stay, as what a model answered. Token by token: prompts that share their
    beginning still do, and where they differ they still do, but for one place in `vocab_size`.
    """

    workload: Workload
    vocab_size: int

    def arrivals(self) -> Iterator[Arrival]:
        """The workload's."""
        return map(self._written, self.workload.arrivals())

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """The workload's."""
        return tuple(map(self._written, self.workload.following(request_id, now_ns)))

    def _written(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        size = self.vocab_size
        prompt = tuple(t if t < size else 1 + mix(t) % (size - 1) for t in request.prompt)
        return arrival._replace(request=replace(request, prompt=prompt))


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals, `rate` a second, `count` of them."""

    rate: float
    count: int
    lengths: Callable[[int], tuple[int, int]]
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Exponential gaps."""
        at_ns = 0
        for request_id in range(self.count):
            at_ns += exponential_ns(SECOND / self.rate, drawn(self.seed, GAP, request_id))
            yield Arrival(at_ns, request_of(request_id, *self.lengths(request_id)))

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class Bursts:
    """Poisson arrivals whose rate jumps between two values; stays are exponential.

    rates     a second, calm and in a burst
    stays_s   mean seconds in each
    A Markov-modulated Poisson process: gaps are more uneven than exponential ones.
    """

    rates: tuple[float, float]
    stays_s: tuple[float, float]
    count: int
    lengths: Callable[[int], tuple[int, int]]
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Each gap is drawn at the rate of the moment, and drawn again where that changes."""
        at_ns, state, changes = 0, 0, 0
        until_ns = self._stay_ns(state, changes)
        for request_id in range(self.count):
            for index in range(1_000_000):
                share = drawn(self.seed, GAP, request_id, index)
                next_ns = at_ns + exponential_ns(SECOND / self.rates[state], share)
                if next_ns < until_ns:
                    break
                at_ns, state, changes = until_ns, 1 - state, changes + 1
                until_ns += self._stay_ns(state, changes)
            at_ns = next_ns
            yield Arrival(at_ns, request_of(request_id, *self.lengths(request_id)))

    def _stay_ns(self, state: int, changes: int) -> int:
        return exponential_ns(self.stays_s[state] * SECOND, drawn(self.seed, STATE, changes))

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """Nothing."""
        return ()


@dataclass
class ClosedLoop:
    """`clients` that each ask again after a pause once they have an answer, `count` in all.

    pause_s   mean seconds between an answer and the next request, exponential; 0 is none
    """

    clients: int
    count: int
    lengths: Callable[[int], tuple[int, int]]
    pause_s: float = 0.0
    seed: int = 0
    _sent: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[Arrival]:
        """Everybody asks after a first pause."""
        first = [self._next(0) for _ in range(min(self.clients, self.count))]
        return iter(sorted(first, key=lambda arrival: arrival.at_ns))

    def following(self, request_id: int, now_ns: int) -> Iterable[Arrival]:
        """The client asks again."""
        return (self._next(now_ns),) if self._sent < self.count else ()

    def _next(self, now_ns: int) -> Arrival:
        request_id, self._sent = self._sent, self._sent + 1
        pause_ns = 0
        if self.pause_s:
            share = drawn(self.seed, PAUSE, request_id)
            pause_ns = exponential_ns(self.pause_s * SECOND, share)
        return Arrival(now_ns + pause_ns, request_of(request_id, *self.lengths(request_id)))
