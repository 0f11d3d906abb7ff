"""Outputs equal those of the sequential reference, whatever disturbs a request.

Random worlds with all sizes of block, pool, budget and batch; pools under pressure; requests at the
limit of the pool; and a limit on the number of steps. Each test checks what it has reached.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import ContextTooLong, InvalidRequest, NeverFits
from forge.models.hash import HashModel
from forge.policy import POLICIES
from forge.request import FinishReason, Request, SamplingParams
from forge.seam import StepPlan
from tests.core.reference import ExpectedChoice, compute_expected
from tests.core.worlds import (
    ALLOWED_PREEMPTIONS,
    Chances,
    ChoiceResult,
    RandomWorld,
    RecordingModel,
    WorldOutcome,
    audit,
    audit_drained,
    check_choice,
    check_outcome,
    count_events,
    draw_world,
    run_world,
    snapshot,
)

# Random worlds.

WORLDS_PER_TEST = 90
EVENTS = (
    "preemptions",
    "evictions",
    "copies",
    "prefix hits",
    "forks",
    "overrun rows",
    "late results",
    "later chunks",
    "voids",
    "resized",
    "resize refused",
    "cache reset",
    "aborted gone",
    "aborted waiting",
    "aborted filling",
    "aborted decoding",
    "aborted decoding, token in flight",
    "aborted preempted",
    "accepted drafts",
    "rejected drafts",
    "failed drafts",
    "drafts and prompts",
    "rows of several k",
    "late masks",
    "plans of masks alone",
    "late rows of ended sequences",
)
ENDINGS = ("eos", "stop id", "stop string", "structure", "length", "abort", "error")


def run_worlds(seeds: Iterable[int], audited_every: int) -> Counter[str]:
    """Check every world of `seeds` against the reference, and count what they reached."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        world = draw_world(seed)
        try:
            outcome = run_world(world, audited=seed % audited_every == 0)
            reached += outcome.event_counts + check_outcome(outcome)
        except BaseException as failure:
            failure.add_note(f"world {seed}: drive(draw_world({seed}), audited=True)")
            raise
        assert world.config.depth == 2 or not outcome.event_counts["overrun rows"]
        reached[world.policy] += 1
    print(dict(reached))
    return reached


@pytest.mark.long
@pytest.mark.parametrize(
    "seeds",
    [
        range(WORLDS_PER_TEST),
        pytest.param(range(WORLDS_PER_TEST, 3 * WORLDS_PER_TEST), marks=pytest.mark.long),
    ],
    ids=["first", "further"],
)
def test_every_choice_of_a_random_world_is_the_sequential_reference(seeds: range) -> None:
    """Tokens, finish reason, stop id, logprobs and prompt logprobs are equal."""
    reached = run_worlds(seeds, audited_every=8)
    wanted = (*EVENTS, *ENDINGS, *POLICIES, "arbitrary")
    assert not [name for name in wanted if not reached[name]]


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2_000, 102_000, 10_000))
def test_every_choice_of_many_more_worlds_is_the_sequential_reference(first: int) -> None:
    reached = run_worlds(range(first, first + 10_000), audited_every=3)
    wanted = (*EVENTS, *ENDINGS, *POLICIES, "arbitrary")
    assert not [name for name in wanted if reached[name] < 50]


# Preemption and liveness.


def thrashing_world(seed: int) -> RandomWorld:
    """Return a world of 39 long outputs that need ten times the pool, in blocks of one token."""
    rng = Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = tuple(Request(i, (rng.randrange(6),), params) for i in range(39))
    config = EngineConfig(
        num_blocks=61,
        block_size=1,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        max_model_len=64,
        depth=1 + seed % 2,
        enable_prefix_caching=seed % 3 == 0,
    )
    return RandomWorld(seed, config, requests, vocab_size=6, chances=Chances(submit=0.12))


def max_steps(world: RandomWorld) -> int:
    """Return the most engine steps of a world without faults, resizes and late arrivals.

    A sequence gets blocks at most 1 + ALLOWED_PREEMPTIONS times and computes at most its length
    each time. Every plan computes a position or follows one and gives masks to its rows. A step
    that plans nothing commits a plan.
    """
    lengths = (
        r.params.n * (len(r.prompt) + r.params.max_tokens)
        for r in world.requests
        if r.params.max_tokens is not None
    )
    return 2 * (1 + ALLOWED_PREEMPTIONS) * sum(lengths) + world.config.depth


@pytest.mark.long
def test_a_sequence_preempted_eight_times_is_not_preempted_again_and_finishes() -> None:
    """`count_events` asserts that no sequence is preempted a ninth time."""
    reached: Counter[str] = Counter()
    for seed in range(4):  # one world of each depth, with and without shared prefixes
        outcome = run_world(thrashing_world(seed), audited=seed == 0)
        reached += outcome.event_counts + check_outcome(outcome)
    print(dict(reached))
    assert reached["preempted 8 times"] > 0 and reached["late results"] > 0
    assert reached["length"] == 4 * 39


@pytest.mark.long
def test_every_world_ends_within_the_stated_number_of_steps() -> None:
    """All requests are present at the start, so no step waits for an arrival."""
    share, preempted = 0.0, 0
    worlds = [thrashing_world(seed) for seed in range(4)]
    worlds += [draw_world(seed) for seed in range(40)]
    for drawn in worlds:
        world = drawn._replace(chances=Chances(submit=1.0))
        if any(r.params.max_tokens is None for r in world.requests):
            continue
        outcome = run_world(world)
        assert outcome.num_steps <= max_steps(world), f"world {world.seed}"
        share = max(share, outcome.num_steps / max_steps(world))
        preempted += outcome.event_counts["preemptions"]
    print(f"at most {share:.1%} of the bound, {preempted} preemptions")
    assert preempted > 500


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 4, 7])
def test_a_request_alone_takes_one_plan_per_chunk_and_one_per_token(
    depth: int, budget: int
) -> None:
    """The last chunk samples the first token; the last token is never computed."""
    config = EngineConfig(
        num_blocks=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=budget, depth=depth
    )
    for prompt_len, max_tokens in ((1, 1), (4, 5), (7, 1), (9, 12), (12, 20)):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(0, tuple(range(1, prompt_len + 1)), params)
        outcome = run_world(RandomWorld(0, config, (request,), chances=Chances(submit=1.0)))
        assert check_outcome(outcome) == {"length": 1}
        plans = [entry for entry in outcome.log if isinstance(entry, StepPlan)]
        assert len(plans) == -(-prompt_len // budget) + max_tokens - 1


# Pressure.


class PressureLevel(NamedTuple):
    """A load that keeps a pool near `target_fraction` of its blocks in use.

    Below `refill_below` another request is submitted, unless `max_waiting` wait already. Every 40
    steps, `burst_size` requests arrive.
    """

    target_fraction: float
    num_blocks: int
    block_size: int
    refill_below: float
    max_waiting: int
    burst_size: int


LEVELS = (
    PressureLevel(
        0.70, num_blocks=64, block_size=4, refill_below=0.66, max_waiting=1, burst_size=18
    ),
    PressureLevel(
        0.90, num_blocks=64, block_size=4, refill_below=0.87, max_waiting=2, burst_size=10
    ),
    PressureLevel(
        0.98, num_blocks=160, block_size=2, refill_below=1.10, max_waiting=12, burst_size=0
    ),
)
VOCAB = 16


def pressure_requests() -> list[Request]:
    """Return 1,000 requests with four shared prefixes, half of them greedy."""
    rng = Random(3)
    prefixes = [rng.choices(range(VOCAB), k=12) for _ in range(4)]
    return [
        Request(
            index,
            (*rng.choice(prefixes)[: rng.randint(0, 12)], *rng.choices(range(VOCAB), k=4)),
            SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                max_tokens=rng.randint(4, 24),
                ignore_eos=rng.random() < 0.7,
            ),
        )
        for index in range(1_000)
    ]


def pressure_config(num_blocks: int, block_size: int, depth: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        max_model_len=64,
        depth=depth,
        enable_prefix_caching=depth == 2,
    )


@pytest.fixture(scope="module")
def expected_by_request() -> list[tuple[Request, ExpectedChoice]]:
    """Return the requests of the pressure tests, each with its expected output."""
    model, config = HashModel(vocab_size=VOCAB), pressure_config(64, 4, 1)
    return [(request, compute_expected(model, config, request)) for request in pressure_requests()]


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"{level.target_fraction:.0%}")
def test_pressure_changes_the_speed_and_no_answer(
    level: PressureLevel, depth: int, expected_by_request: list[tuple[Request, ExpectedChoice]]
) -> None:
    """P2, pressure changes speed, not answers.

    1,000 requests a level, half of them at each depth, near 30 % of them aborted before their end;
    depth 2 shares prefixes as well.

    Utilisation is blocks held over all blocks, read as each plan is accepted, from the first plan
    at the named level to the last one before the last request is sent.
    """
    rng = Random(level.num_blocks + depth)
    config = pressure_config(level.num_blocks, level.block_size, depth)
    model = HashModel(vocab_size=VOCAB, num_blocks=level.num_blocks, block_size=level.block_size)
    recorder = RecordingModel(model)
    engine = Engine(recorder, config)
    expected_by_request = expected_by_request[depth - 1 :: 2]
    pool, waiting = engine.scheduler.pool, engine.scheduler.waiting
    unsent = deque(request for request, _ in expected_by_request)
    choices = {request.id: ChoiceResult() for request in unsent}
    held: list[float] = []

    def read(plan: StepPlan) -> None:
        if unsent and (held or pool.usage_ratio >= level.target_fraction):
            held.append(pool.usage_ratio)

    recorder.on_plan = read
    aborts: dict[int, list[int]] = {}
    num_steps = 0
    while unsent or engine.has_work:
        burst = level.burst_size if num_steps % 40 == 0 else 0
        while unsent and (
            burst > 0
            or (pool.usage_ratio < level.refill_below and len(waiting) < level.max_waiting)
        ):
            request = unsent.popleft()
            engine.submit(request)
            burst -= 1
            if rng.random() < 0.44:
                aborts.setdefault(num_steps + rng.randint(0, 20), []).append(request.id)
        for request_id in aborts.pop(num_steps, ()):
            engine.abort(request_id)
        for delta in engine.step():
            choices[delta.request_id].add(delta)
        num_steps += 1
        if num_steps % 50 == 0:
            audit(engine)
    audit_drained(engine)
    endings = Counter(
        check_choice(choices[request.id], want, f"request {request.id}")
        for request, want in expected_by_request
    )
    mean, reached = sum(held) / len(held), count_events(recorder.log)
    print(f"{mean=:.3f} {dict(endings)} {dict(reached)}")
    assert abs(mean - level.target_fraction) <= 0.03
    assert reached["preemptions"] > 10 and 110 < endings["abort"] < 190
    assert endings["eos"] > 25 and endings["length"] > 150


def test_a_request_alone_is_the_reference(
    expected_by_request: list[tuple[Request, ExpectedChoice]],
) -> None:
    """The engine is the one that serves all requests together."""
    config = pressure_config(64, 4, 2)
    for request, want in expected_by_request[::8]:
        engine = Engine(HashModel(vocab_size=VOCAB, num_blocks=64, block_size=4), config)
        engine.submit(request)
        choice = ChoiceResult()
        while engine.has_work:
            for delta in engine.step():
                choice.add(delta)
        check_choice(choice, want, f"request {request.id}")


# The bound.


def serve_alone(config: EngineConfig, request: Request) -> WorldOutcome:
    """Serve the request alone and return the outcome."""
    outcome = run_world(
        RandomWorld(0, config, (request,), chances=Chances(submit=1.0)), audited=True
    )
    assert check_outcome(outcome) == {"length": 1}
    assert outcome.choices[request.id, 0].finish is FinishReason.LENGTH
    return outcome


def refuse_at_submit(config: EngineConfig, request: Request) -> InvalidRequest:
    """Submit a request that must be refused, check that nothing changed, and return the error."""
    model = HashModel(vocab_size=20, num_blocks=config.num_blocks, block_size=config.block_size)
    engine = Engine(model, config)
    before = snapshot(engine.scheduler)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(request)
    assert snapshot(engine.scheduler) == before and not engine.has_work and engine.step() == []
    return caught.value


def create_request(prompt_len: int, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(0, tuple(1 + i % 19 for i in range(prompt_len)), params)


@pytest.mark.long
@pytest.mark.parametrize("num_blocks", range(1, 33))
def test_a_request_that_just_fits_the_pool_finishes_and_one_position_more_is_refused(
    num_blocks: int,
) -> None:
    """P4, impossible work is refused at once: at the bound, under it and over it.

    The last output token takes no position, so prompt + output - 1 positions are needed.
    """
    block_size = 1 + num_blocks % 4
    bound = num_blocks * block_size
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_num_seqs=4)
    for prompt_len in {1, (bound + 1) // 2, bound}:
        room = bound - prompt_len + 1
        whole = serve_alone(config, create_request(prompt_len, room))
        assert whole.engine.scheduler.pool.peak_used_blocks == num_blocks
        if room > 1:
            serve_alone(config, create_request(prompt_len, room - 1))
        error = refuse_at_submit(config, create_request(prompt_len, room + 1))
        assert type(error) is NeverFits and error.field == "max_tokens"
        assert f"--num-blocks {num_blocks + 1}" in error.remedy
    error = refuse_at_submit(config, create_request(bound + 1, 0))
    assert type(error) is NeverFits and error.field == "prompt"


@pytest.mark.parametrize("longest", [1, 2, 5, 16, 33])
def test_a_request_of_the_longest_length_finishes_and_one_token_more_is_refused(
    longest: int,
) -> None:
    config = EngineConfig(num_blocks=64, block_size=2, max_num_seqs=4, max_model_len=longest)
    for prompt_len in {1, (longest + 1) // 2, longest}:
        room = longest - prompt_len
        serve_alone(config, create_request(prompt_len, room))
        error = refuse_at_submit(config, create_request(prompt_len, room + 1))
        assert type(error) is ContextTooLong
        assert error.field == ("max_tokens" if room else "prompt")
        assert f"--max-model-len {longest + 1}" in error.remedy
