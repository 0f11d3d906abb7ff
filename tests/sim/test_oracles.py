"""The simulation compared with known results: queues, batches, blocks, caches, drafts.

No expectation here is computed by forge or sim. For means, twenty seeds give an interval that must
hold the mean and be narrow. For single runs, every nanosecond counts.

    one row, constant step       M/D/1, M/G/1           Pollaczek 1930, Khinchine 1932; Lindley 1952
    b rows, constant step        bulk queue             Bailey 1954
    rows for all                 M/G/infinity           a Poisson number in service
    a + b rows + c tokens        a batch that grows     mean field: a / (1 - load)
    blocks                       least recently used    stack distances: Mattson et al. 1970
    drafts                       independent trials     Leviathan et al. 2023
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from math import ceil, exp, inf, sqrt
from typing import Any

import pytest

from forge.config import EngineConfig, Speculation
from forge.engine import Engine
from forge.proposers import OracleProposer, Proposer
from forge.request import Delta, Request
from forge.seam import StepPlan
from forge.sim.clock import Clock, VirtualClockModel, VirtualClockStep
from forge.sim.cost.model import CostModel
from forge.sim.cost.simple import AffineCost, ConstantCost
from forge.sim.decision_log import DecisionLog
from forge.sim.draws import draw_uniform
from forge.sim.length_model import FILLER_TOKEN, LengthModel
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import (
    ClosedLoopWorkload,
    FixedArrivals,
    PoissonWorkload,
    RequestArrival,
    Workload,
    create_request,
    fixed_lengths,
    fixed_output_params,
)
from forge.sim.world import World, WorldObserver

SEEDS = range(20)
T_95 = 2.093
"""Two-sided 95 % quantile of Student's distribution with 19 degrees of freedom."""
MS = 1_000_000


class EventLog:
    """A WorldObserver that keeps the times of events, separately from RunMetrics."""

    def __init__(self) -> None:
        self.arrived_ns: dict[int, int] = {}
        self.token_times_ns: dict[int, list[int]] = {}
        self.ended_ns: dict[int, int] = {}
        self.refused: list[int] = []
        self.steps: list[tuple[int, int, StepPlan]] = []
        self.num_tokens_by_step: list[dict[int, int]] = []

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        if refusal is None:
            self.arrived_ns[arrival.request.id] = arrival.at_ns
        else:
            self.refused.append(arrival.request.id)

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        pass

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        if step is not None:
            self.steps.append((step.begin_ns, step.end_ns, step.plan))
            self.num_tokens_by_step.append(
                {delta.request_id: len(delta.tokens) for delta in deltas}
            )
        for delta in deltas:
            request_id = delta.request_id
            if delta.tokens:
                self.token_times_ns.setdefault(request_id, []).append(now_ns)
            if delta.finish is not None:
                self.ended_ns[request_id] = now_ns

    def gaps_ns(self, until_ns: float = inf) -> list[int]:
        """Return the times between consecutive tokens of each request, up to `until_ns`."""
        return [
            later - earlier
            for times_ns in self.token_times_ns.values()
            for earlier, later in pairwise(times_ns)
            if later <= until_ns
        ]

    def waits_ns(self, service_ns: Callable[[int], int]) -> list[int]:
        """Return time in the system less service time, in order of arrival."""
        return [
            self.ended_ns[request_id] - at_ns - service_ns(request_id)
            for request_id, at_ns in self.arrived_ns.items()
        ]


def world(
    workload: Workload,
    *watchers: WorldObserver,
    cost: CostModel,
    rows: int = 512,
    blocks: int = 100_000,
    block_size: int = 16,
    budget: int = 100_000,
    depth: int = 1,
    model: LengthModel | None = None,
    proposer: Proposer | None = None,
    speculation: Speculation | None = None,
) -> World:
    """Run a world to its end and return it."""
    config = EngineConfig(
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=2**20,
        depth=depth,
        speculation=speculation,
    )
    timed = VirtualClockModel(model or LengthModel(), Clock(), cost)
    ran = World(Engine(timed, config, proposer=proposer), timed, workload, *watchers)
    ran.run()
    return ran


def arrivals_at(*times_ns: int, prompt: int = 3, output: int = 1) -> FixedArrivals:
    return FixedArrivals(
        tuple(RequestArrival(t, create_request(i, prompt, output)) for i, t in enumerate(times_ns))
    )


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean of twenty independent values, and the half width of its 95 % interval."""
    listed = list(values)
    assert len(listed) == 20
    mean = sum(listed) / 20
    return mean, T_95 * sqrt(sum((value - mean) ** 2 for value in listed) / 19 / 20)


def assert_mean(values: Iterable[float], expected: float, within: float) -> None:
    """Check that the interval holds the expectation and has at most the relative width `within`."""
    mean, half = interval(values)
    assert half <= within * expected, f"{half} says nothing of {expected}"
    assert abs(mean - expected) <= half, f"{mean} +- {half}, expected {expected}"


# Little's law.


@pytest.mark.parametrize("depth", [1, 2])
def test_little_s_law_holds_to_the_nanosecond(depth: int) -> None:
    """Over a run that is empty at both ends, the number in the system, summed over time, is the sum
    of the times in the system, with disconnects, refusals and preemptions.
    """

    def hurried() -> Iterator[RequestArrival]:
        for i, arrival in enumerate(
            PoissonWorkload(150.0, 120, lambda i: (1 + i % 40, 1 + i % 9)).arrivals()
        ):
            request = arrival.request
            if i % 11 == 5:
                request = create_request(i, 3, 5000)  # more than the cache has
            leaves_ns = arrival.at_ns + 40 * MS if i % 7 == 3 else None
            yield RequestArrival(arrival.at_ns, request, leaves_ns)

    events = EventLog()
    cost = AffineCost(5 * MS, 10_007, 1_009, 200_003)
    ran = world(
        FixedArrivals(tuple(hurried())),
        events,
        cost=cost,
        rows=12,
        blocks=18,
        block_size=4,
        depth=depth,
    )
    assert ran.engine.scheduler.num_preemptions > 0
    assert len(events.refused) == 11 and ran.metrics.finish_counts["abort"] > 3
    assert sorted(events.arrived_ns) == sorted(events.ended_ns)

    sojourns_ns = sum(events.ended_ns[i] - events.arrived_ns[i] for i in events.arrived_ns)
    assert ran.metrics.in_system_ns == sojourns_ns


# One row: a single server.


@pytest.mark.parametrize("gap_ns", [4 * MS, 4 * MS + 1, 9 * MS])
def test_no_request_waits_when_requests_come_no_faster_than_they_are_served(gap_ns: int) -> None:
    """D/D/1: four steps of 1 ms each."""
    events = EventLog()
    world(
        arrivals_at(*range(0, 50 * gap_ns, gap_ns), output=4), events, cost=ConstantCost(MS), rows=1
    )
    assert events.waits_ns(lambda request_id: 4 * MS) == [0] * 50


def test_each_request_waits_longer_when_requests_come_faster_than_they_are_served() -> None:
    """D/D/1: each request finds 1 ns more of work than the one before."""
    events, gap_ns = EventLog(), 4 * MS - 1
    world(
        arrivals_at(*range(0, 50 * gap_ns, gap_ns), output=4), events, cost=ConstantCost(MS), rows=1
    )
    assert events.waits_ns(lambda request_id: 4 * MS) == list(range(50))


def short_or_long(seed: int) -> Callable[[int], tuple[int, int]]:
    """Return lengths: one step with probability 2 / 3, four otherwise; mean 2, mean square 6."""
    return lambda i: (3, 1 if draw_uniform(seed, 40, i) < 2 / 3 else 4)


def services_ns(lengths: Callable[[int], tuple[int, int]]) -> Callable[[int], int]:
    """Return service times: 1 ms per output token, the prompt being computed in the first step."""
    return lambda request_id: lengths(request_id)[1] * MS


def test_every_wait_is_that_of_lindley_s_recursion() -> None:
    """W' = max(0, W + S - gap), to the nanosecond."""
    events = EventLog()
    lengths = short_or_long(7)
    workload = PoissonWorkload(400.0, 400, lengths, seed=7)
    world(workload, events, cost=ConstantCost(MS), rows=1)
    expected, wait, last = [], 0, None
    for arrival in workload.arrivals():
        if last is not None:
            wait = max(0, wait + lengths(last.request.id)[1] * MS - (arrival.at_ns - last.at_ns))
        expected.append(wait)
        last = arrival
    assert 100 < sum(wait > 0 for wait in expected) < 350
    assert events.waits_ns(services_ns(lengths)) == expected


def mean_waits_ns(
    rate: float, count: int, drop: int, lengths: Callable[[int], Callable[[int], tuple[int, int]]]
) -> Iterator[float]:
    """Return the mean wait of each seed, without the first `drop` requests of the warm-up."""
    for seed in SEEDS:
        events, of = EventLog(), lengths(seed)
        world(PoissonWorkload(rate, count, of, seed), events, cost=ConstantCost(MS), rows=1)
        waits = events.waits_ns(services_ns(of))
        yield sum(waits[drop:]) / (count - drop)


def pollaczek_khinchine_ns(rate: float, mean_s: float, mean_square_s: float) -> float:
    """Return the mean wait of M/G/1."""
    return rate * mean_square_s / (2 * (1 - rate * mean_s)) * NS_PER_S


@pytest.mark.long
def test_the_mean_wait_is_pollaczek_and_khinchine_s_for_constant_services() -> None:
    """M/D/1, half loaded: half a service."""
    expected = pollaczek_khinchine_ns(500.0, 1e-3, 1e-6)
    assert expected == pytest.approx(0.5 * MS)
    assert_mean(
        mean_waits_ns(500.0, 330, 30, lambda seed: fixed_lengths(3, 1)), expected, within=0.1
    )


@pytest.mark.soak
def test_the_mean_wait_is_pollaczek_and_khinchine_s_for_varying_services() -> None:
    """M/G/1, loaded to two fifths: half a mean service."""
    expected = pollaczek_khinchine_ns(200.0, 2e-3, 6e-6)
    assert expected == pytest.approx(1 * MS)
    assert_mean(mean_waits_ns(200.0, 150, 10, short_or_long), expected, within=0.2)


@pytest.mark.soak
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_mean_waits_are_pollaczek_and_khinchine_s_at_any_load(load: float) -> None:
    rate = load / 1e-3
    constant = pollaczek_khinchine_ns(rate, 1e-3, 1e-6)
    assert_mean(
        mean_waits_ns(rate, 6000, 600, lambda seed: fixed_lengths(3, 1)), constant, within=0.08
    )
    varied = pollaczek_khinchine_ns(rate / 2, 2e-3, 6e-6)
    assert_mean(mean_waits_ns(rate / 2, 6000, 600, short_or_long), varied, within=0.12)


# b rows: a server of batches.


def bulk_ends_ns(arrived_ns: list[int], most: int) -> list[int]:
    """Return the end of each arrival, if a step of 1 ms takes up to `most` waiting ones."""
    ends_ns: list[int] = []
    free_ns = 0
    while len(ends_ns) < len(arrived_ns):
        begin_ns = max(free_ns, arrived_ns[len(ends_ns)])
        free_ns = begin_ns + MS
        there = bisect_right(arrived_ns, begin_ns)
        ends_ns += [free_ns] * min(most, there - len(ends_ns))
    return ends_ns


@pytest.mark.parametrize("rows", [2, 4])
def test_a_step_takes_as_many_as_are_there_and_have_rows(rows: int) -> None:
    """Every end, to the nanosecond, with fewer requests than rows and with more."""
    events = EventLog()
    world(
        PoissonWorkload(800.0 * rows, 300, fixed_lengths(3, 1)),
        events,
        cost=ConstantCost(MS),
        rows=rows,
    )
    expected = bulk_ends_ns(list(events.arrived_ns.values()), rows)
    assert {1, rows} <= set(Counter(expected).values())
    assert [events.ended_ns[request_id] for request_id in events.arrived_ns] == expected


def mean_bulk_queue(coming: float, most: int) -> float:
    """Return the mean of the chain Q' = max(Q - most, 0) + Poisson(coming) at the end of a step."""
    size = 40 * most
    arrivals = [exp(-coming)]
    for n in range(1, size):
        arrivals.append(arrivals[-1] * coming / n)
    law = [1.0] + [0.0] * (size - 1)
    change = 1.0
    while change > 1e-9:
        after = [0.0] * size
        for queue, share in enumerate(law):
            left = max(queue - most, 0)
            for n in range(size - left):
                after[left + n] += share * arrivals[n]
        change = sum(abs(a - b) for a, b in zip(after, law, strict=True))
        law = after
    assert sum(law) == pytest.approx(1.0, abs=1e-6) and law[-1] < 1e-9
    return sum(queue * share for queue, share in enumerate(law))


def assert_bulk_queue(rows: int, load: float, count: int, within: float) -> None:
    def means() -> Iterator[float]:
        for seed in SEEDS:
            events = EventLog()
            workload = PoissonWorkload(1000.0 * rows * load, count, fixed_lengths(3, 1), seed)
            world(workload, events, cost=ConstantCost(MS), rows=rows)
            arrived, ended = sorted(events.arrived_ns.values()), sorted(events.ended_ns.values())
            times = [end for _, end, _ in events.steps if end <= arrived[-1]][10:]
            there = [bisect_right(arrived, t) - bisect_right(ended, t) for t in times]
            yield sum(there) / len(there)

    assert_mean(means(), mean_bulk_queue(rows * load, rows), within)


@pytest.mark.long
def test_the_queue_of_batches_is_as_long_as_its_chain_says() -> None:
    assert_bulk_queue(rows=4, load=0.6, count=200, within=0.1)


@pytest.mark.soak
@pytest.mark.parametrize(("rows", "load"), [(2, 0.5), (4, 0.8), (8, 0.7)])
def test_the_queue_of_batches_is_as_long_as_its_chain_says_in_long_runs(
    rows: int, load: float
) -> None:
    assert_bulk_queue(rows, load, count=1500, within=0.15)


# Rows for all.


def assert_unlimited_rows(count: int, short: int, long: int, within: float) -> None:
    """Check M/G/infinity on a grid of steps.

    A request waits for the end of a step, uniformly, and then takes its own steps, `short` or
    `long`. The number in a step is Poisson, so its variance is its mean, rate times mean service,
    for any lengths.
    """
    rate, means, rows, squares = 1000.0, [], [], []
    mean = (short + long) / 2
    quarters: Counter[int] = Counter()
    for seed in SEEDS:
        events = EventLog()
        lengths = {i: (1, short if draw_uniform(seed, 41, i) < 0.5 else long) for i in range(count)}
        world(
            PoissonWorkload(rate, count, lengths.__getitem__, seed), events, cost=ConstantCost(MS)
        )
        # A request that arrives at an idle engine does not wait.
        waits = [wait for wait in events.waits_ns(services_ns(lengths.__getitem__)) if wait]
        assert len(waits) > 0.9 * count
        quarters.update(4 * wait // MS for wait in waits)
        means.append(sum(waits) / len(waits))
        last_ns = max(events.arrived_ns.values())
        num_rows = [len(plan.rows) for begin, _, plan in events.steps if begin < last_ns][
            2 * long :
        ]
        rows.append(sum(num_rows) / len(num_rows))
        squares.append(sum((n - mean) ** 2 for n in num_rows) / len(num_rows))
    assert_mean(means, MS / 2, within)
    assert_mean(rows, mean, 2 * within)
    assert_mean(squares, mean, 10 * within)
    assert sorted(quarters) == [0, 1, 2, 3]
    fair = sum(quarters.values()) / 4
    # 99 % quantile of chi-square with 3 degrees of freedom.
    assert sum((n - fair) ** 2 / fair for n in quarters.values()) < 11.34


@pytest.mark.long
def test_with_rows_for_all_a_request_waits_half_a_step() -> None:
    assert_unlimited_rows(count=150, short=2, long=8, within=0.04)


@pytest.mark.soak
def test_with_rows_for_all_a_request_waits_half_a_step_in_long_runs() -> None:
    assert_unlimited_rows(4000, short=4, long=20, within=0.008)


# Batches whose steps depend on their size.


def assert_closed_loop(clients: int, rounds: int) -> float:
    """Check a closed loop with answers of different lengths and no think time.

    Returns tokens a nanosecond while all clients are present.
    """
    a, b, events = 10 * MS, MS, EventLog()
    step_ns = a + b * clients
    different = min(clients, 30)
    loop = ClosedLoopWorkload(clients, rounds * clients, lambda i: (2, 9 + i % different))
    ran = world(loop, events, cost=AffineCost(a, row_ns=b), rows=clients)
    full = [step for step in events.steps if len(step[2].rows) == clients]
    assert len(full) > 30 and {end - begin for begin, end, _ in full} == {step_ns}
    # From the first step until the first client has no more requests.
    begin_ns, end_ns = events.steps[0][0], full[-1][1]
    assert len(full) == (end_ns - begin_ns) / step_ns
    # A client's next token is one of the same answer, or the first of the next one.
    assert set(events.gaps_ns(end_ns)) == {step_ns}
    firsts = [(events.arrived_ns[i], times_ns[0]) for i, times_ns in events.token_times_ns.items()]
    assert {first - start_ns for start_ns, first in firsts if first <= end_ns} == {step_ns}
    assert ran.metrics.num_output_tokens == sum(9 + i % different for i in range(rounds * clients))
    tokens = sum(sum(gained.values()) for gained in events.num_tokens_by_step[: len(full)])
    assert tokens == clients * len(full)
    return tokens / (end_ns - begin_ns)


@pytest.mark.parametrize("clients", [1, 4, 10, 30])
def test_a_closed_loop_gives_each_client_a_token_every_a_plus_b_n(clients: int) -> None:
    """Half of the highest throughput, 1 / b, is reached where there are a / b = 10 clients."""
    throughput = assert_closed_loop(clients, rounds=6)
    assert throughput == pytest.approx(clients / (10 * MS + MS * clients), rel=1e-12)
    if clients == 10:
        assert throughput == pytest.approx(0.5 / MS)


@pytest.mark.parametrize(
    ("clients", "share"), [(190, 0.95), pytest.param(990, 0.99, marks=pytest.mark.soak)]
)
def test_many_clients_have_nearly_all_that_there_is(clients: int, share: float) -> None:
    """N / (a + b N) goes to 1 / b."""
    assert assert_closed_loop(clients, rounds=2) == pytest.approx(share / MS)


@pytest.mark.parametrize("host_ns", [200_000, 3 * MS])
def test_a_host_that_plans_ahead_costs_nothing_until_it_is_the_slower_one(host_ns: int) -> None:
    """With one step in flight host and device alternate. With two, a step takes the slower time."""
    for depth, period_ns in ((1, MS + host_ns), (2, max(MS, host_ns))):
        events = EventLog()
        world(arrivals_at(0, output=40), events, cost=AffineCost(MS, host_ns=host_ns), depth=depth)
        assert len(events.gaps_ns()) == 39
        assert set(events.gaps_ns()[2:-1]) == {period_ns}


A, B, C = MS, 95_000, 5_000
PROMPT, OUTPUT = 181, 20
WORK_NS = OUTPUT * B + (PROMPT + OUTPUT - 1) * C
"""Work of a request in its steps: a row in OUTPUT of them, and its prompt and each output token
but the last, computed once.
"""


def test_steps_take_exactly_the_work_of_the_requests() -> None:
    """Work is conserved: a for each step and the same for each request, in any combination."""
    events = EventLog()
    workload = PoissonWorkload(200.0, 80, fixed_lengths(PROMPT, OUTPUT), seed=5)
    world(workload, events, cost=AffineCost(A, B, C), budget=600)
    assert (
        sum(end - begin for begin, end, _ in events.steps) == len(events.steps) * A + 80 * WORK_NS
    )


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_an_even_load_gives_steps_of_the_mean_field(load: float) -> None:
    """Requests of work w arrive every w / load, so the share `load` of each step is theirs and the
    rest is a: a step takes a / (1 - load) on average.
    """
    gap_ns = round(WORK_NS / load)
    events = EventLog()
    world(
        arrivals_at(*range(0, 250 * gap_ns, gap_ns), prompt=PROMPT, output=OUTPUT),
        events,
        cost=AffineCost(A, B, C),
    )
    # Whole gaps, and a while after the start; at the ends of steps, hence the tolerance.
    steps = [end - begin for begin, end, _ in events.steps if 50 * gap_ns <= begin < 250 * gap_ns]
    assert sum(steps) == pytest.approx(200 * gap_ns, rel=0.005)
    assert sum(steps) / len(steps) == pytest.approx(A / (1 - load), rel=0.01)


@pytest.mark.soak
@pytest.mark.parametrize("load", [0.6, 0.8])
def test_a_poisson_load_gives_steps_of_the_mean_field(load: float) -> None:
    """Almost never idle: steps are so long that forty requests and more are in the system."""
    long = 4 * A
    rate = load / WORK_NS * NS_PER_S

    def steps_a_ns() -> Iterator[float]:
        for seed in SEEDS:
            events = EventLog()
            lengths = fixed_lengths(PROMPT, OUTPUT)
            world(PoissonWorkload(rate, 2000, lengths, seed), events, cost=AffineCost(long, B, C))
            last_ns = max(events.arrived_ns.values())
            spans = [(b, e) for b, e, _ in events.steps if last_ns // 10 < b and e < last_ns]
            whole_ns = spans[-1][1] - spans[0][0]
            assert sum(e - b for b, e in spans) > 0.999 * whole_ns
            yield len(spans) / whole_ns

    # Steps per time, not time per step: linear in the arrivals, so a finite run has no bias.
    assert_mean(steps_a_ns(), (1 - load) / long, within=0.08)


def count_in_system(load: float, *counts: int) -> list[int]:
    """Return the requests in the system after these numbers of evenly spaced arrivals."""
    gap_ns, events = round(WORK_NS / load), EventLog()
    arrivals = arrivals_at(*range(0, max(counts) * gap_ns, gap_ns), prompt=PROMPT, output=OUTPUT)
    world(arrivals, events, cost=AffineCost(A, B, C))
    ended = sorted(events.ended_ns.values())
    return [count - bisect_right(ended, (count - 1) * gap_ns) for count in counts]


def present_in_mean_field(load: float) -> float:
    """Return the mean number in the system: each request takes OUTPUT steps of a / (1 - load)."""
    return load / WORK_NS * OUTPUT * A / (1 - load)


def test_a_batch_grows_without_limit_only_at_a_load_above_one() -> None:
    """After 150 and 300 arrivals: the same below, twice as many above."""
    some, more = count_in_system(0.8, 150, 300)
    assert some == pytest.approx(present_in_mean_field(0.8), abs=2) and abs(more - some) <= 1
    some, more = count_in_system(1.6, 150, 300)
    assert more > 1.8 * some > 1.8 * 30


@pytest.mark.soak
def test_a_batch_grows_without_limit_only_at_a_load_just_above_one() -> None:
    """Slow on both sides: 131 in the mean field at 0.95, and unlimited at 1.05."""
    some, more = count_in_system(0.95, 2000, 4000)
    expected = present_in_mean_field(0.95)
    assert [some, more] == [pytest.approx(expected, abs=6)] * 2
    some, more = count_in_system(1.05, 2000, 4000)
    assert more > 1.3 * some > 1.3 * 3 * expected


@pytest.mark.parametrize(("prompt", "chunk"), [(1, 8), (8, 8), (9, 8), (100, 8), (100, 100)])
def test_an_idle_engine_computes_a_prompt_in_as_few_chunks_as_it_has(
    prompt: int, chunk: int
) -> None:
    """All chunks are full but the last: 100 tokens are twelve times 8 and 4."""
    events = EventLog()
    cost = AffineCost(MS, row_ns=777, token_ns=5_003)
    world(arrivals_at(12_345, prompt=prompt), events, cost=cost, rows=4, budget=chunk)
    steps = ceil(prompt / chunk)
    chunks = [[row.end - row.start for row in plan.rows] for _, _, plan in events.steps]
    assert chunks == [[chunk]] * (steps - 1) + [[prompt - chunk * (steps - 1)]]
    assert events.token_times_ns[0][0] - 12_345 == steps * (MS + 777) + prompt * 5_003


# Blocks.


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (4, 1), (15, 2), (16, 17), (33, 40)])
def test_a_sequence_has_the_blocks_of_its_stored_tokens(
    block_size: int, prompt: int, output: int
) -> None:
    """At every step; the last token of an output is never stored."""
    events = EventLog()
    requests = arrivals_at(0, 0, 0, prompt=prompt, output=output)
    ran = world(requests, events, cost=ConstantCost(MS), block_size=block_size)
    most: dict[int, int] = {}
    for _, _, plan in events.steps:
        for row in plan.rows:
            table = row.keep + len(row.new_blocks)
            assert table == ceil(row.end / block_size)
            assert table * block_size - row.end <= block_size - 1
            most[row.seq_id] = row.end
    assert most == dict.fromkeys(range(3), prompt + output - 1)
    assert ran.engine.scheduler.pool.peak_used_blocks == 3 * ceil(
        (prompt + output - 1) / block_size
    )


@pytest.mark.parametrize("blocks", [7, 8, 20, 21, 99])
@pytest.mark.parametrize("prompt", [1, 16, 17, 100])
def test_as_many_prompts_are_admitted_at_once_as_have_blocks(blocks: int, prompt: int) -> None:
    """Each has separate blocks; all but the first leave one block free for a decode."""
    events = EventLog()
    world(arrivals_at(*[0] * 120, prompt=prompt), events, cost=ConstantCost(MS), blocks=blocks)
    each = ceil(prompt / 16)
    assert len(events.steps[0][2].rows) == max(1, (blocks - 1) // each)


# The prefix cache.


def chains(seed: int, count: int) -> list[tuple[int, ...]]:
    """Draw paths of two to seven nodes from the root of a tree. A child is named by its whole path,
    and some children are far more popular than others.
    """
    paths = []
    for i in range(count):
        node, path = 1, []
        for depth in range(2 + int(draw_uniform(seed, 50, i) * 6)):
            node = node * 8 + int(8 * draw_uniform(seed, 51, i, depth) ** 3)
            path.append(node)
        paths.append(tuple(path))
    return paths


def mattson_hits(paths: list[tuple[int, ...]], capacities: list[int]) -> dict[int, int]:
    """Return the hits of an LRU cache of each capacity, by one pass over stack distances.

    A path is one reference: its hits are counted before it moves to the top, root uppermost.
    """
    stack: list[int] = []
    hits = dict.fromkeys(capacities, 0)
    for path in paths:
        for node in path:
            if node in stack:
                distance = len(stack) - stack.index(node)
                for capacity in capacities:
                    hits[capacity] += distance <= capacity
        stack = [node for node in stack if node not in path] + list(reversed(path))
    return hits


def assert_least_recently_used(seed: int, count: int, capacities: list[int]) -> None:
    """Compare hits with Mattson's. The pool has one more block, for the prompt's last token."""
    paths = chains(seed, count)
    expected = mattson_hits(paths, capacities)
    unlimited = sum(len(path) for path in paths) - len({node for path in paths for node in path})
    assert expected == dict(sorted(expected.items())) and len(set(expected.values())) > 1
    for capacity in capacities:
        prompts = [(*(node * 4 + j for node in path for j in range(4)), 1) for path in paths]
        arrivals = FixedArrivals(
            tuple(
                RequestArrival(i, Request(i, prompt, fixed_output_params(1)))
                for i, prompt in enumerate(prompts)
            )
        )
        ran = world(arrivals, cost=ConstantCost(MS), rows=1, blocks=capacity + 1, block_size=4)
        scheduler = ran.engine.scheduler
        assert scheduler.num_cached_tokens == 4 * expected[capacity]
        assert expected[capacity] <= unlimited
        if capacity >= 10_000:
            assert expected[capacity] == unlimited
        else:
            assert scheduler.pool.num_evictions > 0


@pytest.mark.long
def test_the_cache_evicts_as_mattson_s_stack_says() -> None:
    assert_least_recently_used(seed=1, count=250, capacities=[8, 12, 20, 50, 120, 10_000])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_the_cache_evicts_as_mattson_s_stack_says_in_long_runs(seed: int) -> None:
    assert_least_recently_used(seed, 2500, [7, 8, 9, 13, 31, 64, 200, 700, 10_000])


def test_the_blocks_that_a_preempted_request_finds_again_are_no_hits() -> None:
    """Now and then two unrelated requests take each other's blocks, until no other block is cached.
    The requests between them find exactly what a trie of the requests since then has.
    """
    arrivals: list[RequestArrival] = []
    paths, hits, queries = iter(chains(seed=3, count=60)), 0, 0
    for burst in range(20):
        begin_ns, found = burst * NS_PER_S, set[int]()
        for _ in range(2):
            arrivals.append(RequestArrival(begin_ns, create_request(len(arrivals), 20, 100)))
            queries += 20
        for i in range(3):
            path = next(paths)
            hits += 4 * next((k for k, node in enumerate(path) if node not in found), len(path))
            found |= set(path)
            prompt = (*(node * 4 + j for node in path for j in range(4)), 1)
            queries += len(prompt)
            request = Request(len(arrivals), prompt, fixed_output_params(1))
            arrivals.append(RequestArrival(begin_ns + (i + 1) * NS_PER_S // 4, request))
    ran = world(FixedArrivals(tuple(arrivals)), cost=ConstantCost(MS // 2), blocks=40, block_size=4)
    scheduler = ran.engine.scheduler
    assert scheduler.num_preemptions >= 20 and hits > 50
    assert (scheduler.num_queried_tokens, scheduler.num_cached_tokens) == (queries, hits)


# Drafts.


def rounds(acceptance: float, drafts: int, requests: int, output: int) -> Counter[int]:
    """Count the rounds with all drafts by their number of accepted drafts."""
    events = EventLog()
    world(
        FixedArrivals(
            tuple(RequestArrival(0, create_request(i, 3, output)) for i in range(requests))
        ),
        events,
        cost=ConstantCost(MS),
        model=LengthModel(acceptance=acceptance, seed=11),
        proposer=OracleProposer(
            dict.fromkeys(range(requests), (FILLER_TOKEN,) * output), 1.0, 2**31 - 1
        ),
        speculation=Speculation(num_tokens=drafts, method="ngram"),
    )
    accepted: Counter[int] = Counter()
    for (_, _, plan), gained in zip(events.steps, events.num_tokens_by_step, strict=True):
        for row in plan.rows:
            if len(row.drafts) == drafts:
                accepted[gained[row.seq_id] - 1] += 1
    return accepted


# 99 % quantiles of chi-square, by degrees of freedom.
CHI_SQUARE_99 = {1: 6.63, 2: 9.21, 3: 11.34, 4: 13.28, 5: 15.09, 6: 16.81, 7: 18.48, 8: 20.09}


def assert_independent_trials(a: float, k: int, requests: int, output: int) -> None:
    """Check P(j accepted), a^j (1 - a) below k and a^k at k, and the mean tokens of a round."""
    counts = rounds(a, k, requests, output)
    total = sum(counts.values())
    shares = [a**j * (1 - a) for j in range(k)] + [a**k]
    assert sum(shares) == pytest.approx(1.0)
    expected = (1 - a ** (k + 1)) / (1 - a)
    variance = sum((j + 1 - expected) ** 2 * s for j, s in enumerate(shares))
    mean = sum((j + 1) * n for j, n in counts.items()) / total
    assert abs(mean - expected) < 2.58 * sqrt(variance / total)
    # Runs too rare to be counted alone are one class.
    while shares[-1] * total < 5:
        rare = shares.pop()
        shares[-1] += rare
        counts[len(shares) - 1] += counts.pop(len(shares), 0)
    chi_square = sum((counts[j] - total * s) ** 2 / (total * s) for j, s in enumerate(shares))
    assert chi_square < CHI_SQUARE_99[len(shares) - 1]


@pytest.mark.parametrize(("a", "k"), [(0.7, 4), (0.4, 2)])
def test_accepted_drafts_are_independent_trials(a: float, k: int) -> None:
    assert_independent_trials(a, k, requests=40, output=80)


@pytest.mark.soak
@pytest.mark.parametrize("a", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_accepted_drafts_are_independent_trials_in_long_runs(a: float, k: int) -> None:
    assert_independent_trials(a, k, requests=500, output=300)


@pytest.mark.parametrize(("acceptance", "accepted"), [(1.0, 5), (0.0, 0)])
def test_certain_drafts_are_all_accepted_and_hopeless_ones_never(
    acceptance: float, accepted: int
) -> None:
    counts = rounds(acceptance, 5, requests=3, output=61)
    assert list(counts) == [accepted] and counts[accepted] >= 30


@pytest.mark.parametrize("k", [1, 4, 7])
def test_drafts_that_are_always_right_have_the_speed_up_of_theory(k: int) -> None:
    """A round gives k + 1 tokens and takes 1 + k c, in units of a plain step."""
    plain_ns, draft_ns, events = 900_000, 100_000, EventLog()
    output = 1 + 30 * (k + 1)  # one with the prompt, then whole rounds
    world(
        arrivals_at(0, prompt=1, output=output),
        events,
        cost=AffineCost(plain_ns - draft_ns, token_ns=draft_ns),
        model=LengthModel(acceptance=1.0),
        proposer=OracleProposer({0: (FILLER_TOKEN,) * output}, 1.0, 2**31 - 1),
        speculation=Speculation(num_tokens=k, method="ngram"),
    )
    c = draft_ns / plain_ns
    spent_ns = events.ended_ns[0] - events.token_times_ns[0][0]
    speed_up = (output - 1) * plain_ns / spent_ns
    assert speed_up == pytest.approx((k + 1) / (1 + k * c), rel=1e-12)


def speed_ups(a: float, k: int, num_rounds: int) -> Iterator[float]:
    """Yield the speed-up in each seed's first rounds, none of them cut short by the end."""
    plain_ns, draft_ns = 900_000, 100_000
    output = 1 + (num_rounds + 1) * (k + 1)
    for seed in SEEDS:
        events = EventLog()
        world(
            arrivals_at(0, prompt=1, output=output),
            events,
            cost=AffineCost(plain_ns - draft_ns, token_ns=draft_ns),
            model=LengthModel(acceptance=a, seed=seed),
            proposer=OracleProposer({0: (FILLER_TOKEN,) * output}, 1.0, 2**31 - 1),
            speculation=Speculation(num_tokens=k, method="ngram"),
        )
        steps = list(zip(events.steps, events.num_tokens_by_step, strict=True))[1 : 1 + num_rounds]
        assert all(len(plan.rows[0].drafts) == k for (_, _, plan), _ in steps)
        tokens = sum(gained[0] for _, gained in steps)
        yield tokens * plain_ns / (steps[-1][0][1] - steps[0][0][0])


@pytest.mark.parametrize(("a", "k"), [(0.4, 2), (0.7, 4)])
def test_drafts_that_are_often_right_have_the_speed_up_of_theory(a: float, k: int) -> None:
    """E / (k c + 1), where E = (1 - a^(k + 1)) / (1 - a) and a draft takes c = 1 / 9 of a step."""
    expected = (1 - a ** (k + 1)) / (1 - a) / (k / 9 + 1)
    assert_mean(speed_ups(a, k, num_rounds=45), expected, within=0.05)


# Metamorphic: transformations that must not matter.


class ScaledCost:
    """A cost model with `times` the times of another."""

    def __init__(self, cost: CostModel, times: int) -> None:
        self._cost, self._times = cost, times

    def step_ns(self, plan: StepPlan) -> int:
        return self._times * self._cost.step_ns(plan)

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        return self._times * self._cost.decode_ns(num_rows, num_kv, most_kv)

    def plan_ns(self, plan: StepPlan) -> int:
        return self._times * self._cost.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        return self._times * self._cost.commit_ns(plan)


PRESSED = AffineCost(MS, 7_013, 911, 300_007, 1_501)


def pressed_log(
    seed: int,
    change: Callable[[RequestArrival], RequestArrival] = lambda arrival: arrival,
    cost: CostModel = PRESSED,
    depth: int = 2,
) -> list[dict[str, Any]]:
    """Return the log of a run with preemptions, refusals and disconnects."""
    lines: list[str] = []
    log = DecisionLog(lines.append, {})
    arrivals = []
    lengths = {i: (1 + (i + seed) * 7 % 30, 1 + (i + seed) * 5 % 12) for i in range(60)}
    for arrival in PoissonWorkload(500.0, 60, lengths.__getitem__, seed).arrivals():
        i = arrival.request.id
        leaves_ns = arrival.at_ns + 15 * MS if i % 9 == 4 else None
        request = create_request(i, 3, 2000) if i % 17 == 8 else arrival.request
        arrivals.append(change(RequestArrival(arrival.at_ns, request, leaves_ns)))
    world(
        FixedArrivals(tuple(arrivals)), log, cost=cost, rows=8, blocks=14, block_size=4, budget=24,
        depth=depth,
    )  # fmt: skip
    entries = [json.loads(line) for line in lines]
    text = "".join(lines)
    assert all(name in text for name in ("preempted", "refused", "leave", "quiet", "abort"))
    return without_hash(entries)


@cache
def reference_log(seed: int, depth: int = 2) -> list[dict[str, Any]]:
    """Return the log that the transformed run must equal."""
    return pressed_log(seed, depth=depth)


def without_hash(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in log if "sha256" not in line]


def transform_arrival(arrival: RequestArrival, times: int, more_ns: int) -> RequestArrival:
    leaves_ns = arrival.disconnect_ns
    if leaves_ns is not None:
        leaves_ns = leaves_ns * times + more_ns
    return RequestArrival(arrival.at_ns * times + more_ns, arrival.request, leaves_ns)


WORLDS = pytest.mark.parametrize(
    "seed", (*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20)))
)


@WORLDS
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("times", [2, 1000])
def test_a_world_with_slower_steps_and_arrivals_decides_the_same(
    times: int, depth: int, seed: int
) -> None:
    slow = pressed_log(
        seed, lambda a: transform_arrival(a, times, 0), ScaledCost(PRESSED, times), depth
    )
    for line in slow:
        if "at" in line:
            assert line["at"] % times == 0
            line["at"] //= times
    assert slow == reference_log(seed, depth)


@WORLDS
@pytest.mark.parametrize("more_ns", [1, 3600 * NS_PER_S + 12_345_678])
def test_a_world_that_starts_later_decides_the_same(more_ns: int, seed: int) -> None:
    shifted = pressed_log(seed, lambda a: transform_arrival(a, 1, more_ns))
    for line in shifted:
        if "at" in line:
            line["at"] -= more_ns
    assert shifted == reference_log(seed)


@WORLDS
def test_requests_may_have_any_ids_in_the_same_order(seed: int) -> None:
    """Request i has the id 7 i + 3."""

    def renamed(arrival: RequestArrival) -> RequestArrival:
        request = arrival.request
        again = Request(7 * request.id + 3, request.prompt, request.params)
        return arrival._replace(request=again)

    log = pressed_log(seed, renamed)
    for line in log:
        for name in ("arrive", "leave", "end"):
            if name in line:
                request_id, rest = divmod(line[name], 7)
                assert rest == 3
                line[name] = request_id
    # A refusal contains the request id.
    assert without_refusals(log) == without_refusals(reference_log(seed))


def without_refusals(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log without the texts of refusals."""
    return [{name: value for name, value in line.items() if name != "refused"} for line in log]
