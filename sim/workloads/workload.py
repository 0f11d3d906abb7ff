"""Workloads: who asks for what, and when. From one seed, the same every time.

Owns arrivals. Knows no engine. Randomness is a function of (seed, purpose, request, index), so one
more draw for one request changes nothing for another.

    open loop     arrivals come when they come, whatever the server does     Poisson, bursts, traces
    closed loop   who asked asks again some time after the answer             clients, agents
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from forge.request import Request, SamplingParams
from forge.sampling import mix
from forge.sim.draws import GAP_DRAW, STATE_DRAW, THINK_TIME_DRAW, draw_uniform, exponential_ns
from forge.sim.units import NS_PER_S


class RequestArrival(NamedTuple):
    """A request comes at `at_ns`.

    disconnect_ns   when its client goes away if it has no answer by then; None: it stays
    """

    at_ns: int
    request: Request
    disconnect_ns: int | None = None


class Workload(Protocol):
    """Arrivals that come anyway, in order of time, and those that follow an answer."""

    def arrivals(self) -> Iterator[RequestArrival]:
        """In order of time; read one ahead, so that it may be long."""
        ...

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """What comes because this request has ended now."""
        ...


def fixed_lengths(prompt: int, output: int) -> Callable[[int], tuple[int, int]]:
    """Every request has these lengths."""
    return lambda request_id: (prompt, output)


def unique_tokens(key: int, count: int) -> range:
    """`count` tokens that begin as no others do whose name differs, below 1 000 000 007."""
    first = (key * 1_048_573) % 1_000_000_007 + 2
    return range(first, first + count)


def create_request(request_id: int, prompt: int, output: int, *, priority: int = 0) -> Request:
    """A request whose prompt nobody shares and that gets exactly `output` tokens."""
    return Request(
        request_id,
        unique_tokens(request_id, prompt),
        fixed_output_params(output),
        priority=priority,
    )


def fixed_output_params(output: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


@dataclass(frozen=True)
class FixedArrivals:
    """These arrivals, in order of time."""

    items: tuple[RequestArrival, ...]

    def arrivals(self) -> Iterator[RequestArrival]:
        """As they are listed."""
        return iter(self.items)

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class VocabularyWorkload:
    """Another workload, its prompts written in tokens below `vocab_size`.

    Those below it stay, as what a model answered. Token by token: prompts that share their
    beginning still do, and where they differ they still do, but for one place in `vocab_size`.
    """

    workload: Workload
    vocab_size: int

    def arrivals(self) -> Iterator[RequestArrival]:
        """The workload's."""
        return map(self._map_tokens, self.workload.arrivals())

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """The workload's."""
        return tuple(map(self._map_tokens, self.workload.follow_up_arrivals(request_id, now_ns)))

    def _map_tokens(self, arrival: RequestArrival) -> RequestArrival:
        request = arrival.request
        size = self.vocab_size
        prompt = tuple(t if t < size else 1 + mix(t) % (size - 1) for t in request.prompt)
        return arrival._replace(request=replace(request, prompt=prompt))


@dataclass(frozen=True)
class PoissonWorkload:
    """Independent arrivals, `rate_per_s` a second, `num_requests` of them."""

    rate_per_s: float
    num_requests: int
    lengths: Callable[[int], tuple[int, int]]
    seed: int = 0

    def arrivals(self) -> Iterator[RequestArrival]:
        """Exponential gaps."""
        at_ns = 0
        for request_id in range(self.num_requests):
            at_ns += exponential_ns(
                NS_PER_S / self.rate_per_s, draw_uniform(self.seed, GAP_DRAW, request_id)
            )
            yield RequestArrival(at_ns, create_request(request_id, *self.lengths(request_id)))

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class BurstyWorkload:
    """Poisson arrivals whose rate jumps between two values; stays are exponential.

    rates_per_s    a second, calm and in a burst
    mean_dwell_s   mean seconds in each
    A Markov-modulated Poisson process: gaps are more uneven than exponential ones.
    """

    rates_per_s: tuple[float, float]
    mean_dwell_s: tuple[float, float]
    num_requests: int
    lengths: Callable[[int], tuple[int, int]]
    seed: int = 0

    def arrivals(self) -> Iterator[RequestArrival]:
        """Each gap is drawn at the rate of the moment, and drawn again where that changes."""
        at_ns, state, changes = 0, 0, 0
        state_end_ns = self._draw_dwell_ns(state, changes)
        for request_id in range(self.num_requests):
            for index in range(1_000_000):
                share = draw_uniform(self.seed, GAP_DRAW, request_id, index)
                next_ns = at_ns + exponential_ns(NS_PER_S / self.rates_per_s[state], share)
                if next_ns < state_end_ns:
                    break
                at_ns, state, changes = state_end_ns, 1 - state, changes + 1
                state_end_ns += self._draw_dwell_ns(state, changes)
            at_ns = next_ns
            yield RequestArrival(at_ns, create_request(request_id, *self.lengths(request_id)))

    def _draw_dwell_ns(self, state: int, changes: int) -> int:
        return exponential_ns(
            self.mean_dwell_s[state] * NS_PER_S, draw_uniform(self.seed, STATE_DRAW, changes)
        )

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Nothing."""
        return ()


@dataclass
class ClosedLoopWorkload:
    """`num_clients` that each ask again after a pause once they have an answer, `num_requests` in
    all.

    mean_think_s   mean seconds between an answer and the next request, exponential; 0 is none
    """

    num_clients: int
    num_requests: int
    lengths: Callable[[int], tuple[int, int]]
    mean_think_s: float = 0.0
    seed: int = 0
    _num_sent: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[RequestArrival]:
        """Everybody asks after a first pause."""
        first = [self._create_next(0) for _ in range(min(self.num_clients, self.num_requests))]
        return iter(sorted(first, key=lambda arrival: arrival.at_ns))

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """The client asks again."""
        return (self._create_next(now_ns),) if self._num_sent < self.num_requests else ()

    def _create_next(self, now_ns: int) -> RequestArrival:
        request_id, self._num_sent = self._num_sent, self._num_sent + 1
        think_ns = 0
        if self.mean_think_s:
            share = draw_uniform(self.seed, THINK_TIME_DRAW, request_id)
            think_ns = exponential_ns(self.mean_think_s * NS_PER_S, share)
        return RequestArrival(
            now_ns + think_ns, create_request(request_id, *self.lengths(request_id))
        )
