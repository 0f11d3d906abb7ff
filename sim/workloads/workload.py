"""Workloads: requests and their arrival times, equal for equal seeds.

Owns arrivals. Knows no engine. Draws are functions of (seed, purpose, request, index), so an
additional draw for one request changes nothing for another.

    open loop     arrivals do not depend on the server              Poisson, bursts, traces
    closed loop   a client sends again some time after the answer   clients, agents
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
    """A request that arrives at `at_ns`.

    disconnect_ns   when its client disconnects if it has no answer by then; None: never
    session         index of the session that it is a turn of, or a turn of one of its sub-agents;
                    None: it is part of none. For measures: the request has what the engine sees
    """

    at_ns: int
    request: Request
    disconnect_ns: int | None = None
    session: int | None = None


class Workload(Protocol):
    """Arrivals at fixed times, and arrivals that follow an answer."""

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield arrivals in order of time. They are read one ahead, so the iterator may be long."""
        ...

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the arrivals that follow the end of this request at `now_ns`."""
        ...


def fixed_lengths(prompt: int, output: int) -> Callable[[int], tuple[int, int]]:
    """Return a function that gives every request these lengths."""
    return lambda request_id: (prompt, output)


def unique_tokens(key: int, count: int) -> range:
    """Return `count` token ids whose beginning is unique to `key`. Keys are below 1 000 000 007."""
    first = (key * 1_048_573) % 1_000_000_007 + 2
    return range(first, first + count)


def create_request(request_id: int, prompt: int, output: int, *, priority: int = 0) -> Request:
    """Return a request with a unique prompt and exactly `output` tokens of output."""
    return Request(
        request_id,
        unique_tokens(request_id, prompt),
        fixed_output_params(output),
        priority=priority,
    )


def fixed_output_params(output: int) -> SamplingParams:
    """Return parameters for exactly `output` tokens of any value."""
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


@dataclass(frozen=True)
class FixedArrivals:
    """A workload of these arrivals, in order of time."""

    items: tuple[RequestArrival, ...]

    def arrivals(self) -> Iterator[RequestArrival]:
        return iter(self.items)

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return nothing: this is an open loop."""
        return ()


@dataclass(frozen=True)
class VocabularyWorkload:
    """Another workload with its prompts mapped to tokens below `vocab_size`.

    Tokens below it stay, such as those of answers. The map is by token, so prompts that share their
    beginning still do. Tokens that differ become equal with probability 1 / `vocab_size`.
    """

    workload: Workload
    vocab_size: int

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield the arrivals of the workload, mapped."""
        return map(self._map_tokens, self.workload.arrivals())

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the arrivals of the workload, mapped."""
        return tuple(map(self._map_tokens, self.workload.follow_up_arrivals(request_id, now_ns)))

    def _map_tokens(self, arrival: RequestArrival) -> RequestArrival:
        request = arrival.request
        size = self.vocab_size
        prompt = tuple(t if t < size else 1 + mix(t) % (size - 1) for t in request.prompt)
        return arrival._replace(request=replace(request, prompt=prompt))


@dataclass(frozen=True)
class PoissonWorkload:
    """Independent arrivals: `num_requests`, at a mean of `rate_per_s` a second."""

    rate_per_s: float
    num_requests: int
    lengths: Callable[[int], tuple[int, int]]
    seed: int = 0

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield arrivals with exponential gaps."""
        at_ns = 0
        for request_id in range(self.num_requests):
            at_ns += exponential_ns(
                NS_PER_S / self.rate_per_s, draw_uniform(self.seed, GAP_DRAW, request_id)
            )
            yield RequestArrival(at_ns, create_request(request_id, *self.lengths(request_id)))

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return nothing: this is an open loop."""
        return ()


@dataclass(frozen=True)
class BurstyWorkload:
    """Poisson arrivals whose rate alternates between two values, with exponential dwell times.

    rates_per_s    a second, in the calm state and in a burst
    mean_dwell_s   mean seconds in each state
    A Markov-modulated Poisson process: gaps vary more than exponential ones.
    """

    rates_per_s: tuple[float, float]
    mean_dwell_s: tuple[float, float]
    num_requests: int
    lengths: Callable[[int], tuple[int, int]]
    seed: int = 0

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield arrivals. A gap that crosses a change of state is drawn again from there."""
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
        """Return nothing: this is an open loop."""
        return ()


@dataclass
class ClosedLoopWorkload:
    """Clients that each send a request, wait for its answer and pause before the next one.

    num_clients    clients; num_requests: requests of all clients together
    mean_think_s   mean seconds of a pause, exponential; 0: no pause
    """

    num_clients: int
    num_requests: int
    lengths: Callable[[int], tuple[int, int]]
    mean_think_s: float = 0.0
    seed: int = 0
    _num_sent: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[RequestArrival]:
        """Yield the first request of each client, after a first pause."""
        first = [self._create_next(0) for _ in range(min(self.num_clients, self.num_requests))]
        return iter(sorted(first, key=lambda arrival: arrival.at_ns))

    def follow_up_arrivals(self, request_id: int, now_ns: int) -> Iterable[RequestArrival]:
        """Return the next request of the client."""
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
