"""Workloads: arrival times, shared prefixes, and draws that do not depend on other requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import exp, sqrt

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.request import Delta, Request, SamplingParams
from forge.sim.answer_recorder import AnswerRecorder
from forge.sim.clock import Clock, VirtualClockModel, VirtualClockStep
from forge.sim.cost.model import CostModel
from forge.sim.cost.simple import AffineCost, ConstantCost
from forge.sim.decision_log import DecisionLog
from forge.sim.draws import draw_uniform
from forge.sim.length_model import FILLER_TOKEN, LengthModel
from forge.sim.units import NS_PER_S
from forge.sim.workloads.agents import AgentSessions, filler_answer
from forge.sim.workloads.session_shape import Pause, SessionShape
from forge.sim.workloads.workload import (
    BurstyWorkload,
    ClosedLoopWorkload,
    FixedArrivals,
    PoissonWorkload,
    RequestArrival,
    VocabularyWorkload,
    Workload,
    create_request,
    fixed_lengths,
    unique_tokens,
)
from forge.sim.world import World, WorldObserver

VOCAB = 97


class ArrivalLog:
    """Requests in the order of arrival, with the tokens that each received."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.at_ns: dict[int, int] = {}
        self.ended_ns: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.most_open = 0

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        assert refusal is None, refusal
        self.requests[arrival.request.id] = arrival.request
        self.at_ns[arrival.request.id] = arrival.at_ns
        self.tokens[arrival.request.id] = []
        self.most_open = max(self.most_open, len(self.requests) - len(self.ended_ns))

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("no client disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        for delta in deltas:
            self.tokens[delta.request_id] += delta.tokens
            if delta.finish is not None:
                self.ended_ns[delta.request_id] = now_ns


def numbers(blocks: int = 4096, rows: int = 8, seed: int = 0) -> EngineConfig:
    return EngineConfig(
        num_blocks=blocks,
        block_size=4,
        max_num_seqs=rows,
        max_num_batched_tokens=512,
        max_model_len=4096,
        seed=seed,
    )


def world(
    workload: Workload,
    *watchers: WorldObserver,
    config: EngineConfig,
    cost: CostModel | None = None,
) -> World:
    """Run the workload on a LengthModel. Returns the world at its end."""
    model = VirtualClockModel(LengthModel(), Clock(), cost or ConstantCost())
    ran = World(Engine(model, config), model, workload, *watchers)
    ran.run()
    return ran


def run_hash_model(workload: Workload, *watchers: WorldObserver, config: EngineConfig) -> World:
    """Run the workload on a model whose tokens depend on all tokens before them."""
    inner = HashModel(
        vocab_size=VOCAB, num_blocks=config.num_blocks, block_size=config.block_size, seed=5
    )
    model = VirtualClockModel(inner, Clock(), AffineCost(1_000_000, 10_000, 1_000))
    world = World(Engine(model, config), model, workload, *watchers)
    world.run()
    return world


def varied_lengths(request_id: int) -> tuple[int, int]:
    return 1 + request_id * 7 % 23, 1 + request_id * 5 % 11


def gaps_s(workload: Workload) -> list[float]:
    times = [arrival.at_ns for arrival in workload.arrivals()]
    return [(after - before) / NS_PER_S for before, after in pairwise([0, *times])]


def test_gaps_of_poisson_arrivals_are_exponential() -> None:
    """Mean and standard deviation are 1 / rate, and a share of 1 / e is longer than the mean."""
    count = 4000
    gaps = gaps_s(PoissonWorkload(8.0, count, fixed_lengths(1, 1)))
    mean = sum(gaps) / count
    deviation = sqrt(sum((gap - mean) ** 2 for gap in gaps) / count)
    longer = sum(gap > 1 / 8 for gap in gaps) / count
    assert mean == pytest.approx(1 / 8, rel=3 / sqrt(count))
    assert deviation == pytest.approx(1 / 8, rel=3 * sqrt(8 / count))
    assert longer == pytest.approx(exp(-1), abs=3 * sqrt(exp(-1) * (1 - exp(-1)) / count))


def test_gaps_of_bursts_are_those_of_a_markov_modulated_poisson_process() -> None:
    """Mean and second moment from the two equations of the phases.

    D has the rates on the diagonal, Q is the generator, E[X^k] = k! p (D - Q)^-k 1, where p are the
    shares of arrivals in each phase.
    """
    (calm, burst), (calm_s, burst_s) = (2.0, 40.0), (2.0, 0.5)
    shares = (calm * calm_s, burst * burst_s)
    at = [share / sum(shares) for share in shares]
    leave, back = 1 / calm_s, 1 / burst_s
    determinant = (calm + leave) * (burst + back) - leave * back
    once = ((burst + back + leave) / determinant, (calm + leave + back) / determinant)
    twice = (
        ((burst + back) * once[0] + leave * once[1]) / determinant,
        (back * once[0] + (calm + leave) * once[1]) / determinant,
    )
    mean = at[0] * once[0] + at[1] * once[1]
    squared = 2 * (at[0] * twice[0] + at[1] * twice[1])
    assert mean == pytest.approx((calm_s + burst_s) / sum(shares))
    assert squared / mean**2 - 1 > 4

    gaps = gaps_s(
        BurstyWorkload((calm, burst), (calm_s, burst_s), 6000, fixed_lengths(1, 1), seed=3)
    )
    assert sum(gaps) / len(gaps) == pytest.approx(mean, rel=0.1)
    assert sum(gap * gap for gap in gaps) / len(gaps) == pytest.approx(squared, rel=0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda count: PoissonWorkload(5.0, count, varied_lengths, seed=2),
        lambda count: BurstyWorkload((1.0, 30.0), (1.0, 0.2), count, varied_lengths, seed=2),
    ],
    ids=["poisson", "bursts"],
)
def test_more_requests_change_nothing_for_those_before(make: Callable[[int], Workload]) -> None:
    assert list(make(300).arrivals())[:100] == list(make(100).arrivals())


def test_prompts_of_different_names_differ_in_their_first_token() -> None:
    names = [*range(50_000), *range(999_950_000, 1_000_000_000)]
    first = {unique_tokens(name, 1)[0] for name in names}
    assert len(first) == len(names)
    assert 0 not in first and FILLER_TOKEN not in first and max(first) < 2**30


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_clients_of_a_closed_loop_wait_for_their_answers(pause_s: float) -> None:
    log = ArrivalLog()
    world(ClosedLoopWorkload(5, 40, varied_lengths, pause_s, seed=4), log, config=numbers())
    assert list(log.at_ns.values()) == sorted(log.at_ns.values())
    assert sorted(log.requests) == list(range(40))
    assert log.most_open == 5 if pause_s == 0 else 2 <= log.most_open <= 5


def test_clients_that_pause_first_still_come_in_order_of_time() -> None:
    arrivals = list(ClosedLoopWorkload(20, 30, varied_lengths, 0.02, seed=4).arrivals())
    assert len(arrivals) == 20
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_ns)


def test_a_vocabulary_keeps_shared_beginnings() -> None:
    long = create_request(7, 40, 1)
    half = Request(1, (*long.prompt[:17], 3, 4, 5), SamplingParams(max_tokens=1))
    listed = FixedArrivals((RequestArrival(0, long), RequestArrival(5, half, disconnect_ns=9)))
    first, second = VocabularyWorkload(listed, VOCAB).arrivals()
    assert second == RequestArrival(5, second.request, 9)
    assert first.request.params == long.params and second.request.id == 1
    assert (len(first.request.prompt), len(second.request.prompt)) == (40, 20)
    assert all(2 <= token < VOCAB for token in first.request.prompt)
    assert len(set(first.request.prompt)) > 20
    same = [a == b for a, b in zip(first.request.prompt, second.request.prompt, strict=False)]
    assert same[:18] == [True] * 17 + [False]


def test_a_vocabulary_also_applies_to_arrivals_that_follow_an_answer() -> None:
    log = ArrivalLog()
    loop = VocabularyWorkload(ClosedLoopWorkload(2, 6, varied_lengths), VOCAB)
    run_hash_model(loop, log, config=numbers())
    assert len(log.ended_ns) == 6
    assert max(max(request.prompt) for request in log.requests.values()) < VOCAB


@pytest.mark.long
def test_a_hundred_seeds_give_a_hundred_logs_and_each_again_the_same() -> None:
    def digest(seed: int) -> str:
        lines: list[str] = []
        log = DecisionLog(lines.append, {"the same": "line"})
        world(PoissonWorkload(300.0, 8, varied_lengths, seed), log, config=numbers(rows=2))
        return log.close()

    digests = [digest(seed) for seed in range(100)]
    assert len(set(digests)) == 100
    assert [digest(seed) for seed in (0, 99)] == [digests[0], digests[99]]


def merge(*workloads: Workload) -> FixedArrivals:
    every = [arrival for workload in workloads for arrival in workload.arrivals()]
    return FixedArrivals(tuple(sorted(every, key=lambda arrival: arrival.at_ns)))


def with_sampling(
    arrivals: Iterator[RequestArrival], first_id: int, temperature: float
) -> FixedArrivals:
    """Return the same arrivals with other ids. Tokens are drawn from the seed of each request."""
    params = SamplingParams(temperature=temperature, max_tokens=9, ignore_eos=True)
    return FixedArrivals(
        tuple(
            RequestArrival(at_ns, Request(request.id + first_id, request.prompt, params))
            for at_ns, request, *_ in arrivals
        )
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_a_request_do_not_depend_on_unrelated_ones(temperature: float) -> None:
    """Alone in a large cache, and among 30 others in a small one with preemptions."""
    few = with_sampling(
        PoissonWorkload(400.0, 6, varied_lengths, seed=1).arrivals(), 100, temperature
    )
    other = with_sampling(
        PoissonWorkload(2000.0, 30, varied_lengths, seed=2).arrivals(), 0, temperature
    )
    alone, among = ArrivalLog(), ArrivalLog()
    run_hash_model(VocabularyWorkload(few, VOCAB), alone, config=numbers())
    crowd = run_hash_model(
        VocabularyWorkload(merge(few, other), VOCAB), among, config=numbers(blocks=12)
    )
    assert crowd.engine.scheduler.num_preemptions > 0
    assert len(among.tokens) == 36
    for request_id, tokens in alone.tokens.items():
        assert len(tokens) == 9
        assert among.tokens[request_id] == tokens
    assert len({tuple(tokens) for tokens in alone.tokens.values()}) == 6


def turn_lengths(session: int, turn: int) -> tuple[int, int]:
    """Return new tokens and answer tokens of a turn, of all sizes relative to a block of four."""
    return 3 + (5 * session + 3 * turn) % 13, 1 + (3 * session + 7 * turn) % 9


def create_agents(
    max_open_sessions: int,
    num_sessions: int,
    max_turns: int,
    num_system_tokens: int,
    lengths: Callable[[int, int], tuple[int, int]] = turn_lengths,
    *,
    mean_tool_s: float = 0.0,
    max_len: int | None = None,
    get_answer: Callable[[int, int], Sequence[int]] = filler_answer,
) -> AgentSessions:
    """Return sessions with one kind of pause and neither sub-agents nor compaction."""
    shape = SessionShape(
        max_turns, num_system_tokens, lengths,
        pauses=(Pause(1.0, mean_tool_s),), max_len=max_len, num_sessions=num_sessions,
    )  # fmt: skip
    return AgentSessions(max_open_sessions, shape, get_answer=get_answer)


def test_the_prompt_of_a_turn_is_the_context_the_answer_and_the_result_of_the_tool() -> None:
    """The answers are those of the model."""
    transcript, log = AnswerRecorder(), ArrivalLog()
    agents = create_agents(
        3, 5, 4, 10, turn_lengths, mean_tool_s=0.003, get_answer=transcript.answer
    )
    run_hash_model(VocabularyWorkload(agents, VOCAB), transcript, log, config=numbers())
    assert sorted(log.requests) == list(range(20))
    systems = {request.prompt[:10] for request in log.requests.values()}
    assert len(systems) == 1
    for request_id, request in log.requests.items():
        session, turn = divmod(request_id, 4)
        assert len(log.tokens[request_id]) == turn_lengths(session, turn)[1]
        if turn == 0:
            assert len(request.prompt) == 10 + turn_lengths(session, 0)[0]
            continue
        before = log.requests[request_id - 1].prompt
        assert log.at_ns[request_id] > log.ended_ns[request_id - 1]
        assert len(request.prompt) == sum(
            (len(before), turn_lengths(session, turn - 1)[1], turn_lengths(session, turn)[0])
        )


def test_the_answer_in_a_context_is_that_of_the_model() -> None:
    transcript, log = AnswerRecorder(), ArrivalLog()
    agents = create_agents(2, 2, 3, 4, turn_lengths, get_answer=transcript.answer)
    run_hash_model(VocabularyWorkload(agents, VOCAB), transcript, log, config=numbers())
    assert sorted(log.requests) == list(range(6))
    for request_id in (1, 2, 4, 5):
        answer = tuple(log.tokens[request_id - 1])
        before = len(log.requests[request_id - 1].prompt)
        assert log.requests[request_id].prompt[before : before + len(answer)] == answer


@pytest.mark.parametrize("agents", [1, 4])
def test_an_unlimited_cache_computes_only_the_new_tokens_of_each_turn(agents: int) -> None:
    """A turn hits the full blocks of everything computed before.

    These are the prompt and the answer of the previous turn, except the last token of the answer. A
    first turn hits those of the system prompt.
    """
    size, system = 4, 22
    ran = world(create_agents(agents, 6, 5, system, turn_lengths), config=numbers(blocks=100_000))
    found = (6 - 1) * (system // size) * size
    for session in range(6):
        length = system + turn_lengths(session, 0)[0]
        for turn in range(1, 5):
            computed = length + turn_lengths(session, turn - 1)[1] - 1
            length += turn_lengths(session, turn - 1)[1] + turn_lengths(session, turn)[0]
            found += min(computed // size, (length - 1) // size) * size
    assert ran.engine.scheduler.num_cached_tokens == found
    assert ran.metrics.num_arrived == 30


def test_prompts_of_agents_do_not_depend_on_the_order_of_finishes() -> None:
    def prompts(cost: CostModel) -> list[tuple[int, Request]]:
        log = ArrivalLog()
        world(
            create_agents(4, 9, 3, 8, turn_lengths, mean_tool_s=0.01),
            log,
            config=numbers(),
            cost=cost,
        )
        return sorted(log.requests.items())

    assert prompts(ConstantCost(900_000)) == prompts(AffineCost(50_000, 400_000, 30_000))


def test_sessions_follow_each_other_and_never_exceed_their_limit() -> None:
    log = ArrivalLog()
    world(create_agents(3, 8, 2, 4, turn_lengths), log, config=numbers())
    assert log.most_open == 3
    assert len(log.ended_ns) == 16


def test_the_tool_takes_an_exponential_time() -> None:
    log = ArrivalLog()
    world(create_agents(20, 20, 30, 1, lambda s, t: (1, 1), mean_tool_s=0.5), log, config=numbers())
    gaps = [(log.at_ns[i] - log.ended_ns[i - 1]) / NS_PER_S for i in log.requests if i % 30 != 0]
    assert len(gaps) == 20 * 29
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=3 / sqrt(len(gaps)))


@pytest.mark.parametrize(("longest", "turns"), [(44, 3), (45, 4)])
def test_a_session_ends_before_its_context_is_too_long(longest: int, turns: int) -> None:
    """15 tokens after the first answer, then 10 more each turn."""
    log = ArrivalLog()
    agents = create_agents(1, 2, 9, 5, lambda session, turn: (5, 5), max_len=longest)
    world(agents, log, config=numbers())
    assert sorted(log.requests) == [*range(turns), *range(9, 9 + turns)]


def test_agents_ignore_requests_of_other_workloads() -> None:
    agents = create_agents(1, 1, 3, 4, turn_lengths)
    assert len(list(agents.arrivals())) == 1
    assert list(agents.follow_up_arrivals(300, 5)) == []


def test_an_answer_is_dropped_one_step_after_its_end() -> None:
    transcript = AnswerRecorder()
    run_hash_model(
        VocabularyWorkload(PoissonWorkload(500.0, 30, varied_lengths), VOCAB),
        transcript,
        config=numbers(),
    )
    assert len(transcript._answers) <= 1


def test_draws_of_different_purposes_and_requests_are_unrelated() -> None:
    """Correlations of 4000 pairs stay within four standard errors of 0."""
    for other in ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        total = 0.0
        for i in range(4000):
            seed, purpose, who, index = other
            first, second = draw_uniform(0, 0, i, 0), draw_uniform(seed, purpose, i + who, index)
            total += (first - 0.5) * (second - 0.5) * 12
        assert abs(total / 4000) < 4 / sqrt(4000)


def test_a_log_names_every_turn_by_its_session_and_index() -> None:
    lines: list[str] = []
    log = DecisionLog(lines.append, {})
    world(create_agents(2, 2, 2, 4, turn_lengths), log, config=numbers())
    arrived = [json.loads(line).get("arrive") for line in lines]
    assert sorted(i for i in arrived if i is not None) == [0, 1, 2, 3]
