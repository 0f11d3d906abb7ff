"""The engine's promises, by their numbers: P1, P2, P3, P4, P14, P15, P17, P19.

Each promise is one check at two sizes: a small one that runs every time, and the full one under
`soak`. Each test checks what it has reached. The promises of the server are in
tests/server/test_promises_http.py, that of a long run in tests/server/test_soak.py.
"""

from __future__ import annotations

import codecs
from collections import Counter, deque
from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.outputs import OutputProcessor, RequestOutput, TextDelta, merge_deltas
from forge.request import Delta, FinishReason, Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import StepOutput, StepPlan
from forge.sequence import Sequence
from forge.tokenizer import ByteTokenizer
from tests.core import test_exactness
from tests.core.reference import ExpectedChoice, compute_expected
from tests.core.worlds import (
    ALLOWED_PREEMPTIONS,
    Chances,
    ChoiceResult,
    RandomWorld,
    RecordingModel,
    audit_drained,
    build_engine,
    check_choice,
    count_events,
    draw_world,
    run_world,
    tokens_in_flight,
)

VOCAB = 8
ANY = tuple(range(VOCAB))

# P1, no block is ever lost.

LIFE_STAGES = (
    "never submitted",
    "waiting",
    "waiting for a prefix that another one computes",
    "waiting for a choice of its own to compute the prompt",
    "part of the prompt computed",
    "a part of the prompt in flight",
    "decoding",
    "decoding, a token in flight",
    "decoding, its last token in flight",
    "preempted",
    "preempted, a token in flight",
    "ended",
)


def life_stage(scheduler: Scheduler, sequence: Sequence, coming: dict[int, object]) -> str:
    """Return the stage of a sequence between submission and its end."""
    flying = sequence.id in coming
    if sequence.slot is None and sequence.epoch:
        return "preempted, a token in flight" if flying else "preempted"
    if sequence.slot is None:
        siblings = scheduler.requests[sequence.request.id]
        if any(s.slot is not None for s in siblings):
            return "waiting for a choice of its own to compute the prompt"
        if scheduler.prefix_cache.next_block_in_progress(sequence):
            return "waiting for a prefix that another one computes"
        return "waiting"
    if sequence.id in scheduler._prefilling:
        flying = any(row.seq_id == sequence.id for plan in scheduler.ledger for row in plan.rows)
        return "a part of the prompt in flight" if flying else "part of the prompt computed"
    if flying and sequence.table.num_tokens + 1 >= sequence.max_len:
        return "decoding, its last token in flight"
    return "decoding, a token in flight" if flying else "decoding"


def crowded_request(rng: Random, request_id: int, prefixes: list[list[int]]) -> Request:
    """Draw a request with a shared prefix, in up to three choices."""
    prompt = [*rng.choice(prefixes)[: rng.randint(0, 16)], *rng.choices(ANY, k=rng.randint(1, 4))]
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=0.0,
        max_tokens=rng.randint(1, 16),
        ignore_eos=rng.random() < 0.5,
    )
    return Request(request_id, tuple(prompt), params, priority=rng.choice((0, 0, 1)))


class CrowdedScheduler:
    """A scheduler with more requests than blocks, so that each stage of a life has a request."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self.rng = Random(seed)
        config = EngineConfig(
            num_blocks=28,
            block_size=2,
            max_num_seqs=8,
            max_num_batched_tokens=12,
            max_model_len=64,
            depth=1 + seed % 2,
            enable_prefix_caching=seed % 4 < 3,
        )
        self.model = HashModel(vocab_size=VOCAB, num_blocks=28, block_size=2, seed=seed)
        self.scheduler = Scheduler(config, VOCAB, (self.model.eos_token(),))
        self.unsent = deque(range(num_requests))
        self.ended = [num_requests]  # of a request that is never submitted
        self.choices: dict[tuple[int, int], ChoiceResult] = {}
        self.reached: Counter[str] = Counter()
        self._flights: deque[tuple[StepPlan, StepOutput]] = deque()
        self._due = False
        self._prefixes = [self.rng.choices(ANY, k=16) for _ in range(3)]

    def submit(self, most_live: int) -> None:
        """Submit requests until `most_live` are live or all were sent."""
        while self.unsent and len(self.scheduler.requests) < most_live:
            request = crowded_request(self.rng, self.unsent.popleft(), self._prefixes)
            self.choices |= {(request.id, c): ChoiceResult() for c in range(request.params.n)}
            self.scheduler.add(request)

    def dispatch(self) -> None:
        """Put one more plan in flight, if there is something to compute."""
        plan = self.scheduler.schedule() if self.scheduler.has_work else None
        self._due = plan is None
        if plan is not None:
            self._flights.append((plan, self.model.forward(plan).result()))

    def complete(self) -> None:
        """Commit the oldest plan, if the depth is reached or the last call planned nothing."""
        if self._flights and (self._due or len(self._flights) >= self.scheduler.config.depth):
            self._add_deltas(self.scheduler.commit(*self._flights.popleft()))

    def abort(self) -> None:
        """Abort a request at the stage, of those present, that has had the fewest aborts."""
        coming = tokens_in_flight(self.scheduler)
        at: dict[str, set[int]] = {}
        for sequence in self.scheduler.sequences.values():
            point = life_stage(self.scheduler, sequence, coming)
            at.setdefault(point, set()).add(sequence.request.id)
        if not at:
            return
        point = min(at, key=lambda name: (self.reached[name], name))
        self._abort(point, self.rng.choice(sorted(at[point])))

    def abort_unknown(self) -> None:
        """Abort ids that have ended or never were submitted, and check that nothing changes."""
        request_id = self.rng.choice((self.ended[0], self.rng.choice(self.ended)))
        self._abort("never submitted" if request_id == self.ended[0] else "ended", request_id)

    def check_drained(self) -> bool:
        return not (self.unsent or self.scheduler.has_work or self._flights)

    def _abort(self, point: str, request_id: int) -> None:
        self._add_deltas(self.scheduler.abort(request_id))
        self.reached[point] += 1

    def _add_deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.choices[delta.request_id, delta.choice].add(delta)
            if delta.finish is not None:
                self.ended.append(delta.request_id)


def abort_at_every_point(seed: int, num_requests: int, num_aborts: int) -> Counter[str]:
    """Return the number of aborts at each stage, after draining the scheduler and checking it."""
    crowd = CrowdedScheduler(seed, num_requests)
    rng = crowd.rng
    left = num_aborts
    while left or not crowd.check_drained():
        crowd.submit(most_live=rng.randint(0, 20))
        for act in (crowd.dispatch, crowd.complete):
            act()
            # Two of three requests are aborted: enough live on to fill the blocks.
            if left and rng.random() < 0.25 and len(crowd.scheduler.requests) > 1:
                crowd.abort()
                left -= 1
        if left and (rng.random() < 0.3 or crowd.check_drained()):
            crowd.abort_unknown()
            left -= 1
    audit_drained(crowd.scheduler)
    pool = crowd.scheduler.pool
    assert len(pool._empty_blocks) + pool.num_cached_blocks == pool.num_blocks
    endings = Counter(choice.finish for choice in crowd.choices.values())
    assert endings.keys() == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    return crowd.reached


def reached_by_aborts(seeds: range, num_requests: int, num_aborts: int) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in seeds:
        reached += abort_at_every_point(seed, num_requests, num_aborts)
    print(dict(reached))
    return reached


def test_no_abort_at_any_point_of_a_life_loses_a_block() -> None:
    """P1, no block is ever lost: 1,200 aborts of 600 requests, at each of twelve points."""
    reached = reached_by_aborts(range(4), 150, 300)
    assert not [point for point in LIFE_STAGES if reached[point] < 3]


@pytest.mark.soak
def test_no_abort_of_a_million_loses_a_block() -> None:
    """P1, no block is ever lost: 100 seeds of 10,000 aborts of 5,000 requests, at each point."""
    reached = reached_by_aborts(range(100), 5_000, 10_000)
    assert sum(reached.values()) == 100 * 10_000
    assert not [point for point in LIFE_STAGES if reached[point] < 1_000]


# P2, pressure changes speed, not answers.


def pressure_requests(count: int) -> list[Request]:
    """Return greedy requests like those of tests/core/test_exactness.py."""
    drawn = test_exactness.pressure_requests()[:count]
    return [replace(each, params=replace(each.params, temperature=0.0)) for each in drawn]


class PressureResult(NamedTuple):
    """Fill of the pool during a run, and counts of what happened."""

    mean: float
    reached: Counter[str]


def run_under_pressure(
    level: test_exactness.PressureLevel,
    depth: int,
    caching: bool,
    expected: dict[Request, ExpectedChoice],
) -> PressureResult:
    """Check every output against the output alone, while the pool is near the level."""
    config = replace(
        test_exactness.pressure_config(level.num_blocks, level.block_size, depth),
        enable_prefix_caching=caching,
    )
    model = HashModel(
        vocab_size=test_exactness.VOCAB, num_blocks=level.num_blocks, block_size=level.block_size
    )
    recorder = RecordingModel(model)
    engine = Engine(recorder, config)
    pool, waiting = engine.scheduler.pool, engine.scheduler.waiting
    unsent = deque(expected)
    choices = {request.id: ChoiceResult() for request in expected}
    used: list[float] = []

    def read(plan: StepPlan) -> None:
        if unsent and (used or pool.usage_ratio >= level.target_fraction):
            used.append(pool.usage_ratio)

    recorder.on_plan = read
    num_steps = 0
    while unsent or engine.has_work:
        burst = level.burst_size if num_steps % 40 == 0 else 0
        while unsent and (
            burst > 0
            or (pool.usage_ratio < level.refill_below and len(waiting) < level.max_waiting)
        ):
            engine.submit(unsent.popleft())
            burst -= 1
        for delta in engine.step():
            choices[delta.request_id].add(delta)
        num_steps += 1
    audit_drained(engine)
    for request, want in expected.items():
        check_choice(choices[request.id], want, f"request {request.id}")
    return PressureResult(sum(used) / len(used), count_events(recorder.log))


def check_pressure(num_requests: int, levels: tuple[test_exactness.PressureLevel, ...]) -> None:
    config = test_exactness.pressure_config(64, 4, 1)
    model = HashModel(vocab_size=test_exactness.VOCAB)
    wanted = {
        each: compute_expected(model, config, each) for each in pressure_requests(num_requests)
    }
    for level in levels:
        for depth, caching in ((1, False), (1, True), (2, False), (2, True)):
            mean, reached = run_under_pressure(level, depth, caching, wanted)
            print(f"{level.target_fraction:.0%} {depth=} {caching=} {mean:.3f} {dict(reached)}")
            assert mean > level.target_fraction - 0.03
            assert reached["preemptions"] >= num_requests // 50
            assert caching == (reached["prefix hits"] > 0)


@pytest.mark.long
def test_pressure_changes_no_greedy_answer() -> None:
    """P2, pressure changes speed, not answers: 98 % of the pool, depth 1 and 2, prefix on, off."""
    check_pressure(150, test_exactness.LEVELS[2:])


@pytest.mark.soak
def test_no_pressure_changes_one_of_a_thousand_greedy_answers() -> None:
    """P2, pressure changes speed, not answers: 70, 90 and 98 % of the pool, 1,000 requests each."""
    check_pressure(1_000, test_exactness.LEVELS)


# P3, every admitted request ends.


def max_steps_to_finish(scheduler: Scheduler) -> int:
    """Return F, the most engine steps until one of the live or arriving requests must end.

    Each is admitted at most 1 + ALLOWED_PREEMPTIONS times and computes at most its length each
    time. A step computes a position, or it commits a plan that did.
    """
    lengths = sum(sequence.max_len for sequence in scheduler.sequences.values())
    return 2 * (1 + ALLOWED_PREEMPTIONS) * lengths + scheduler.config.depth


def faultless_world(seed: int) -> RandomWorld:
    """Return a world without faults, in which blocks are short."""
    world = test_exactness.thrashing_world(seed) if seed % 3 == 0 else draw_world(seed)
    return world._replace(chances=Chances(submit=world.chances.submit))


def run_to_end(world: RandomWorld) -> tuple[int, float, Counter[str]]:
    """Return the steps of the run, the largest share of F between two endings, and event counts."""
    rng = Random(world.seed)
    _, recorder, engine = build_engine(world)
    unsent = deque(world.requests)
    choices = {(r.id, c): ChoiceResult() for r in world.requests for c in range(r.params.n)}
    num_steps = since = 0
    share = 0.0
    while unsent or engine.has_work:
        while unsent and rng.random() < world.chances.submit:
            engine.submit(unsent.popleft())
        if not engine.has_work:
            continue
        most = max_steps_to_finish(engine.scheduler)
        since += 1
        num_steps += 1
        assert since <= most, f"world {world.seed}: no request has ended in {since} steps"
        share = max(share, since / most)
        for delta in engine.step():
            choices[delta.request_id, delta.choice].add(delta)
            if delta.finish is not None:
                since = 0
    assert all(choice.finish is not None for choice in choices.values())
    return num_steps, share, count_events(recorder.log)  # checks ALLOWED_PREEMPTIONS


def run_worlds(num_steps: int) -> Counter[str]:
    """Count what happened in worlds with `num_steps` steps in total."""
    reached: Counter[str] = Counter()
    largest, seed = 0.0, 0
    while reached["steps"] < num_steps:
        steps, share, found = run_to_end(faultless_world(seed))
        reached += found
        reached["steps"] += steps
        largest, seed = max(largest, share), seed + 1
    print(f"{seed} worlds, at most {largest:.1%} of F, {dict(reached)}")
    return reached


@pytest.mark.long
def test_a_request_ends_within_a_stated_number_of_steps() -> None:
    """P3, every admitted request ends: with W waiting one does within F(W) steps; 4,000 steps."""
    reached = run_worlds(4_000)
    assert reached["preemptions"] > 300 and reached["preempted 8 times"] > 0


@pytest.mark.soak
def test_a_request_ends_within_a_stated_number_of_steps_for_a_million_steps() -> None:
    """P3, every admitted request ends: 1,000,000 steps, and no sequence is preempted nine times."""
    reached = run_worlds(1_000_000)
    assert reached["preemptions"] > 50_000 and reached["preempted 8 times"] > 1_000


# P4, impossible work refused at once. The small size is that of tests/core/test_exactness.py.


@pytest.mark.soak
@pytest.mark.parametrize("num_blocks", range(2, 257))
def test_a_request_that_just_fits_a_pool_is_served_and_one_token_more_is_refused(
    num_blocks: int,
) -> None:
    """P4, impossible work refused at once: bound - 1, bound and bound + 1 of 2 to 256 blocks."""
    test_exactness.test_a_request_that_just_fits_the_pool_finishes_and_one_position_more_is_refused(
        num_blocks
    )


# P14, text is exact, and P15, stops are exact.

TOKENIZER = ByteTokenizer()
TEXT_PARTS = (
    *("a", "b", "ab", "ba", " ", "\n", "é", "漢", "字", "한", "\ufffd", "e\u0301"),
    *("😀", "👩‍👩‍👧", "🇩🇪", "👍🏽", "\u200d"),
)


def random_script(rng: Random) -> tuple[int, ...]:
    """Draw token ids of characters, some of them broken, and now and then an id without text."""
    ids: list[int] = []
    while len(ids) < 3 or rng.random() < 0.8:
        data = rng.choice(TEXT_PARTS).encode()
        if rng.random() < 0.15:
            data = data[: rng.randrange(len(data))] + bytes([rng.randrange(128, 256)])
        ids += [byte + 1 for byte in data]
        if rng.random() < 0.1:
            ids.append(TOKENIZER.eos_token)
    return tuple(ids)


def decode_prefix(tokens: tuple[int, ...], final: bool) -> str:
    """Return the text of the bytes of these tokens, decoded at once."""
    data = bytes(token - 1 for token in tokens if token)
    return codecs.utf_8_decode(data, "replace", final)[0]


class StreamedText(NamedTuple):
    """Expected text, tokens and ending of a stream."""

    text: str
    num_tokens: int
    stopped: bool


def expected_text(tokens: tuple[int, ...], stops: tuple[str, ...], min_tokens: int) -> StreamedText:
    """Cut the text at the earliest end of any stop string; of several there, at the longest."""
    texts = [decode_prefix(tokens[:n], final=False) for n in range(len(tokens) + 1)]
    texts.append(decode_prefix(tokens, final=True))
    lengths = [len(text) for text in texts]
    for n, (before, text) in enumerate(pairwise(texts), 1):
        ends = range(len(before) + 1, len(text) + 1)
        found = [(e, -len(s)) for e in ends for s in stops if text[:e].endswith(s)]
        if found and n >= min_tokens:
            end, minus_length = min(found)
            return StreamedText(text[: end + minus_length], min(n, len(tokens)), n <= len(tokens))
    assert lengths == sorted(lengths)
    return StreamedText(texts[-1], len(tokens), False)


def drawn_stops(rng: Random, text: str) -> tuple[str, ...]:
    """Draw stop strings: substrings of the text, and others."""
    stops = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        piece = text[start : start + rng.randint(1, 4)]
        stops.append(piece or rng.choice(TEXT_PARTS))
    return tuple(stops) if rng.random() < 0.9 else (*stops, rng.choice(TEXT_PARTS))


def run_scripts(scripts: list[tuple[int, ...]], each: list[SamplingParams]) -> list[list[Delta]]:
    """Return the deltas of an engine whose model outputs the script that the prompt names."""
    wanted = [[0.0] * token + [9.0] + [0.0] * (256 - token) for token in range(257)]

    def logits(context: Tokens[int]) -> list[float]:
        index = (context[0] - 1) * 250 + context[1] - 1
        script = scripts[index]
        return wanted[script[min(len(context) - 2, len(script) - 1)]]

    model = LogitsModel(logits, vocab_size=257, eos_token=0, num_blocks=256, block_size=16)
    config = EngineConfig(num_blocks=256, block_size=16, max_num_seqs=32, depth=2)
    engine = Engine(model, config, TOKENIZER)
    deltas: list[list[Delta]] = [[] for _ in scripts]
    for index, params in enumerate(each):
        engine.submit(Request(index, (1 + index // 250, 1 + index % 250), params))
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return deltas


def merge_randomly(rng: Random, deltas: list[TextDelta]) -> list[TextDelta]:
    """Merge deltas in groups of one to eight, as a slow reader receives them."""
    left, found = deque(deltas), []
    while left:
        group = [left.popleft() for _ in range(min(len(left), rng.randint(1, 8)))]
        found += merge_deltas(group)
    return found


def check_scripts(rng: Random, count: int, stopping: bool) -> Counter[str]:
    """Check every script as a whole and in random parts."""
    scripts = [random_script(rng) for _ in range(count)]
    each = []
    for script in scripts:
        each.append(
            SamplingParams(
                temperature=0.0,
                max_tokens=len(script),
                min_tokens=rng.choice((0, 0, 0, rng.randint(0, len(script)))),
                stop=drawn_stops(rng, decode_prefix(script, final=True)) if stopping else (),
                ignore_eos=True,
                logprobs=rng.choice((None, None, 0)),
            )
        )
    reached: Counter[str] = Counter()
    for script, params, deltas in zip(scripts, each, run_scripts(scripts, each), strict=True):
        want = expected_text(script, params.stop, params.min_tokens)
        request = Request(0, (1,), params)
        transcript = OutputProcessor(request, TOKENIZER)
        parts = [transcript.process(delta) for delta in deltas]
        sent = list(accumulate(part.text for part in parts))
        whole, grouped = RequestOutput.empty(request), RequestOutput.empty(request)
        for part in parts:
            whole.append(part)
        for part in merge_randomly(rng, parts):
            grouped.append(part)
        assert whole == grouped
        assert whole.text == sent[-1] == want.text, (script, params)
        assert tuple(whole.token_ids) == script[: want.num_tokens], (script, params)
        assert whole.finish_reason == ("stop" if want.stopped else "length"), (script, params)
        if params.logprobs is not None:
            assert [score.token for score in whole.logprobs] == whole.token_ids
        if not stopping:  # text is sent as soon as it is certain
            early = [decode_prefix(script[:n], final=False) for n in range(1, len(script))]
            assert sent[:-1] == early, script
        reached["stopped"] += want.stopped
        reached["cut by the last flush"] += not want.stopped and want.text != decode_prefix(
            script, final=True
        )
        reached["broken"] += "\ufffd" in want.text
        reached["broken at the end"] += want.text.endswith("\ufffd")
        reached["ended inside a character"] += want.stopped and not decode_prefix(
            script, final=True
        ).startswith(decode_prefix(script[: want.num_tokens], final=True))
    print(dict(reached))
    return reached


@pytest.mark.long
@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_joined_deltas_are_the_text_of_all_tokens(count: int) -> None:
    """P14, text is exact: random tokens, broken bytes among them, read in any parts."""
    reached = check_scripts(Random(14), count, stopping=False)
    assert reached["broken"] > count // 10 and reached["broken at the end"] > count // 50


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_the_stop_that_is_complete_first_ends_the_text(count: int) -> None:
    """P15, stops are exact: text, tokens, logprobs and reason are those of the earliest end."""
    reached = check_scripts(Random(15), count, stopping=True)
    assert reached["stopped"] > count // 2 and reached["cut by the last flush"] > 0


# P17, a seed reproduces.


class SampledRequest(NamedTuple):
    """Tokens of one request's two choices, and whether one of them was preempted."""

    tokens: list[tuple[int, ...]]
    preempted: bool


def sample_among(seed: int, neighbour_kind: str) -> SampledRequest:
    """Return the output of a request in an engine that it shares with `neighbour_kind`."""
    rng = Random(seed)
    params = SamplingParams(
        n=2,
        temperature=rng.choice((1.0, 1.5, 2.0)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.getrandbits(63),
        max_tokens=12,
        ignore_eos=True,
    )
    prompt = tuple(rng.choices(range(20), k=rng.randint(1, 9)))
    other = {
        "alone": [],
        "62 with the same seed": [params] * 62,
        "62 without a seed": [replace(params, seed=None)] * 62,
        "too little room": [params] * 62,
    }[neighbour_kind]
    neighbours = [
        Request(1 + i, tuple(rng.choices(range(20), k=4)), replace(each, n=1))
        for i, each in enumerate(other)
    ]
    requests = (*neighbours, Request(0, prompt, params))  # the newest is preempted first
    tight = neighbour_kind == "too little room"
    config = EngineConfig(
        num_blocks=40 if tight else 1_000,
        block_size=2,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        depth=1 + seed % 2,
        enable_prefix_caching=seed % 3 == 0,
        seed=len(neighbour_kind),  # an engine's seed is for requests without one
    )
    outcome = run_world(RandomWorld(seed, config, requests, chances=Chances(submit=1.0)))
    plans = [entry for entry in outcome.log if isinstance(entry, StepPlan)]
    most = max(len(plan.rows) for plan in plans)
    assert most == 2 if neighbour_kind == "alone" else tight or most == 64
    last = {len(requests) - 1, len(requests)}
    preempted = any(event.seq_id in last for plan in plans for event in plan.preempted)
    return SampledRequest([outcome.choices[0, choice].tokens for choice in range(2)], preempted)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [4, pytest.param(500, marks=pytest.mark.soak)])
def test_a_seed_draws_the_same_tokens_in_any_batch(seeds: int) -> None:
    """P17, a seed reproduces: alone, in a batch of 64, after preemption, alongside other seeds."""
    differing = preempted = 0
    for seed in range(seeds):
        alone = sample_among(seed, "alone").tokens
        assert len(alone[0]) == len(alone[1]) == 12
        differing += alone[0] != alone[1]
        for company in ("62 with the same seed", "62 without a seed", "too little room"):
            drawn = sample_among(seed, company)
            assert drawn.tokens == alone, (seed, company)
            preempted += drawn.preempted
    print(f"{differing} differ, {preempted} were preempted")
    assert differing > seeds // 2, "tokens that chance does not change prove nothing"
    assert preempted >= seeds // 4


# P19, tenants do not see each other.


class ServedCost(NamedTuple):
    """Cost of serving one request, in counts of the engine."""

    computed: int
    cached: int
    steps: int


def measure_cost(engine: Engine, request: Request) -> ServedCost:
    """Serve the request, and return the counts of the engine at its end."""
    scheduler = engine.scheduler
    before = (scheduler.num_planned_tokens, scheduler.num_cached_tokens, engine.num_steps)
    engine.submit(request)
    while engine.has_work:
        engine.step()
    after = (scheduler.num_planned_tokens, scheduler.num_cached_tokens, engine.num_steps)
    return ServedCost(*(b - a for a, b in zip(before, after, strict=True)))


def cost_after_warm_up(seed: int, salts: tuple[str, ...]) -> ServedCost:
    """Return the cost of a request of tenant B after the same prompt under each of these salts."""
    rng = Random(seed)
    config = EngineConfig(
        num_blocks=rng.choice((16, 64)),
        block_size=rng.choice((1, 2, 4)),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice((4, 32)),
        depth=rng.choice((1, 2)),
    )
    prompt = tuple(rng.choices(range(20), k=rng.randint(5, 12)))
    params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 4), ignore_eos=True)
    model = HashModel(
        vocab_size=20, num_blocks=config.num_blocks, block_size=config.block_size, seed=seed
    )
    engine = Engine(model, config)
    for number, salt in enumerate(salts):
        measure_cost(engine, Request(number, prompt, params, cache_salt=salt))
    return measure_cost(engine, Request(len(salts), prompt, params, cache_salt="B"))


@pytest.mark.long
@pytest.mark.parametrize("trials", [50, pytest.param(2_000, marks=pytest.mark.soak)])
def test_prompts_that_a_tenant_computed_cost_another_as_much_as_before(trials: int) -> None:
    """P19, tenants do not see each other: A's warm-up does not change what B costs.

    Costs are tokens computed, tokens found and steps: a clock would add noise.
    """
    for seed in range(trials):
        cold = cost_after_warm_up(seed, ())
        assert cold.cached == 0
        assert (
            cost_after_warm_up(seed, ("A",)) == cost_after_warm_up(seed, ("A", "", "A")) == cold
        ), seed
        own = cost_after_warm_up(seed, ("B",))
        assert own.cached > 0 and own.computed == cold.computed - own.cached, seed
