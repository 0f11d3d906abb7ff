"""Random worlds: an engine, a model, requests and disturbances from one seed, run to the end.

Owns how a world is drawn and driven, what it reached, and the audit of an engine's state. Knows no
expected output: that is tests/reference.py.

    draw_world(seed) ──► drive(world) ──► Outcome ──► verify(outcome)     equal to the reference
                           │ audit(engine)      after every step, where asked
                           │ PlanAudit(plan)    as every plan is accepted, where asked
                           └ reached            what happened, so that a test can say it did

`audit` recomputes from scratch what the scheduler and the pool keep, and asserts that both agree.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from forge.blocks import BlockPool, chain_hash, root_hash
from forge.config import EngineConfig, Speculation, StepCosts
from forge.drafting import DraftModel
from forge.engine import Engine
from forge.errors import NeverFits
from forge.models.hash import HashModel
from forge.models.logits import NO_FAULTS, Faults
from forge.policy import POLICIES, Candidate, Policy, Split
from forge.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Structure,
    TokenLogprob,
)
from forge.scheduler import Scheduler
from forge.seam import DraftRef, Model, PendingStep, Row, StepOutput, StepPlan, TokenRef
from forge.sequence import Sequence
from forge.tokenizer import ByteTokenizer, Tokenizer
from tests.reference import ALPHABET, Expected, expected

PATTERNS = ("(a|é|b\n){1,2}", "[ab]{0,4}é?", "( |é){2,5}", "b?(éa| b)?", "a")
"""Languages of outputs with a structure, of at most reference.MOST characters."""
PLANTED_ERRORS = (
    "broken row",
    "the model failed: RuntimeError('not accepted')",
    "the model failed: RuntimeError('no result')",
)
MOST_PREEMPTIONS = 8
"""What the scheduler promises, in its own words elsewhere: no test takes the number from it."""


# Worlds.


class Chances(NamedTuple):
    """Probability, per engine step, that something happens beside the step."""

    submit: float = 0.5
    abort: float = 0.0
    resize: float = 0.0
    reset: float = 0.0
    break_step: float = 0.0
    break_row: float = 0.0
    break_draft: float = 0.0


class World(NamedTuple):
    """Everything that decides a run, as values."""

    seed: int
    config: EngineConfig
    requests: tuple[Request, ...]
    vocab_size: int = 20
    likely: tuple[int, ...] | None = None
    eos_token: int = 0
    policy: str = "fcfs"  # a name in POLICIES, or "arbitrary"
    chances: Chances = Chances()
    tokenizer: Tokenizer | None = None
    agreement: float = 1.0  # of the draft, where there is one
    stranger: bool = False  # the draft's distributions are another model's


def draw_world(seed: int) -> World:
    """A small world from `seed`: another seed, other sizes, requests and disturbances."""
    rng = Random(seed)
    tokenizer, likely, vocab_size, eos_token = None, None, rng.choice((8, 20, 40)), 0
    if rng.random() < 0.1:
        tokenizer = ByteTokenizer()
        vocab_size, eos_token = tokenizer.vocab_size, tokenizer.eos_token
        likely = (*sorted(set(tokenizer.encode(ALPHABET))), eos_token)
    ids = likely or tuple(range(vocab_size))
    prefix = rng.choices(ids, k=rng.randint(1, 20))
    requests = tuple(
        draw_request(rng, index, prefix, ids, tokenizer is not None)
        for index in range(rng.randint(2, 8))
    )
    block_size = rng.choice((1, 1, 2, 3, 4, 8, 16))
    rows = rng.randint(1, 6)
    config = EngineConfig(
        num_blocks=_least_blocks(requests, block_size) + rng.choice((0, 0, 0, 1, 2, 4, 20)),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice((0, 1, 3, 7, 60)),
        max_model_len=64,
        depth=rng.choice((1, 2)),
        enable_prefix_caching=rng.random() < 0.6,
        seed=rng.getrandbits(63),
        end_ids=rng.choice(((), (), (ids[-1],))),
    )
    policy = rng.choice(("fcfs", "fcfs", "arbitrary", *POLICIES))
    chances = Chances(
        submit=rng.choice((0.3, 0.7, 1.0)),
        abort=rng.choice((0.0, 0.0, 0.03, 0.1)),
        resize=rng.choice((0.0, 0.0, 0.0, 0.15)),
        reset=rng.choice((0.0, 0.0, 0.0, 0.05)),
        break_step=rng.choice((0.0,) * 9 + (0.03,)),
        break_row=rng.choice((0.0,) * 9 + (0.02,)),
    )
    world = World(seed, config, requests, vocab_size, likely, eos_token, policy, chances, tokenizer)
    return _with_drafts(world) if seed % 2 else world


COSTS = StepCosts(((1, 1.0), (8, 1.1), (64, 3.0)), ((1, 0.1), (64, 0.3)), 0.05)
"""Of an imagined device on which drafts pay where at least every fourth is right."""


def _with_drafts(world: World) -> World:
    """The world, speculating in some way."""
    rng = Random(f"{world.seed} drafts")
    speculation = Speculation(
        num_tokens=rng.choice((1, 2, 3, 5)),
        method=rng.choice(("draft", "draft", "draft", "ngram")),
        acceptance=rng.choice(("coupled", "coupled", "rejection")),
        num_blocks=rng.choice((None, None, None, 3)),
        costs=rng.choice((None, None, COSTS)),
    )
    return world._replace(
        config=replace(world.config, speculation=speculation),
        chances=world.chances._replace(break_draft=rng.choice((0.0, 0.0, 0.0, 0.1))),
        agreement=rng.choice((0.0, 0.3, 0.8, 0.95, 1.0)),
        stranger=rng.random() < 0.3,
    )


def draw_request(
    rng: Random, request_id: int, prefix: list[int], ids: tuple[int, ...], text: bool
) -> Request:
    """A prompt that begins with some of `prefix`; every parameter is on in some requests."""

    def maybe(share: float, value: object, otherwise: object) -> object:
        return value if rng.random() < share else otherwise

    max_tokens = rng.randint(0, 12) if rng.random() < 0.97 else None
    allowed = tuple(rng.sample(ids, 4)) if rng.random() < 0.05 else None
    stops = maybe(0.25, (rng.choice(ids),), ())
    tail = rng.choices(ids, k=rng.randint(0, 5))
    options: dict[str, object] = {
        "n": rng.choice((1, 1, 1, 2, 3)),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "top_k": maybe(0.2, 3, 0),
        "top_p": maybe(0.2, 0.8, 1.0),
        "min_p": maybe(0.1, 0.1, 0.0),
        "repetition_penalty": maybe(0.2, 1.3, 1.0),
        "presence_penalty": maybe(0.2, 0.5, 0.0),
        "frequency_penalty": maybe(0.2, -0.4, 0.0),
        "logit_bias": maybe(0.1, {rng.choice(ids): rng.choice((-100.0, 4.0))}, ()),
        "allowed_token_ids": allowed,
        "seed": maybe(0.3, rng.randrange(-(2**63), 2**63), None),
        "max_tokens": max_tokens,
        "min_tokens": rng.randint(0, max_tokens) if rng.random() < 0.2 and max_tokens else 0,
        # Where only ends are possible, min_tokens masks none of them.
        "stop_token_ids": maybe(0.5, allowed, stops) if allowed else stops,
        "ignore_eos": rng.random() < 0.4,
        "logprobs": maybe(0.1, rng.randint(0, 3), None),
        "prompt_logprobs": maybe(0.1, rng.randint(0, 3), None),
    }
    if text:
        options["stop"] = tuple(
            "".join(rng.choices(ALPHABET, k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))
        )
        if allowed is None:
            options["structure"] = maybe(0.4, Structure.regex(rng.choice(PATTERNS)), None)
    return Request(
        request_id,
        tuple(prefix[: rng.randint(0, len(prefix))] + tail) or (ids[0],),
        SamplingParams(**options),  # type: ignore[arg-type]
        priority=rng.choice((0, 0, 1)),
        cache_salt=rng.choice(("", "", "salt")),
    )


def arbitrary_policy(rng: Random) -> Policy:
    """Chooses blindly among what is on offer, and gives at least one token to somebody."""

    def split(budget: int, num_decodes: int, filling: Iterable[Candidate]) -> Split:
        chunks = []
        for candidate in filling:
            chunks.append(rng.randint(0, min(budget, candidate.num_pending)))
            budget -= chunks[-1]
        decodes = rng.randint(0, min(budget, num_decodes))
        if not decodes and not any(chunks):
            chunks[0] = 1
        return Split(decodes, tuple(chunks))

    return Policy(rng.choice, rng.choice, split)


def _least_blocks(requests: tuple[Request, ...], block_size: int) -> int:
    """Blocks in which each of the requests fits alone."""
    spans = (
        len(r.prompt) + max(0, (1 if r.params.max_tokens is None else r.params.max_tokens) - 1)
        for r in requests
    )
    return max(-(-span // block_size) for span in spans)


# Driving a world.


class RecordedStep(NamedTuple):
    """A pending step that says when its result is read."""

    step: PendingStep
    log: list[StepPlan | StepOutput]

    def result(self) -> StepOutput:
        """The step's output, which is logged."""
        output = self.step.result()
        self.log.append(output)
        return output


class RecordingModel:
    """A model that keeps every plan it accepts and every output that is read, in order."""

    def __init__(self, model: Model, on_plan: Callable[[StepPlan], None] | None = None) -> None:
        self.log: list[StepPlan | StepOutput] = []
        self.on_plan = on_plan
        self._model = model

    def vocab_size(self) -> int:
        """The model's."""
        return self._model.vocab_size()

    def num_layers(self) -> int:
        """The model's."""
        return self._model.num_layers()

    def eos_token(self) -> int:
        """The model's."""
        return self._model.eos_token()

    def forward(self, plan: StepPlan) -> PendingStep:
        """The plan is logged and shown to `on_plan`, then accepted by the model."""
        self.log.append(plan)
        if self.on_plan is not None:
            self.on_plan(plan)
        return RecordedStep(self._model.forward(plan), self.log)


@dataclass(slots=True)
class Choice:
    """What came back for one choice."""

    deltas: list[Delta] = field(default_factory=list)
    finish: FinishReason | None = None

    def take(self, delta: Delta) -> None:
        """The delta is kept. None may come after the one that ends the choice."""
        assert self.finish is None, f"{delta} after {self.deltas[-1]}"
        self.deltas.append(delta)
        self.finish = delta.finish

    @property
    def tokens(self) -> tuple[int, ...]:
        """Output ids in order."""
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One per output id where asked."""
        return tuple(entry for delta in self.deltas for entry in delta.logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """One per prompt id after the first where asked."""
        return tuple(entry for delta in self.deltas for entry in delta.prompt_logprobs)


class Outcome(NamedTuple):
    """A run that has ended.

    longest   (request id): length at which a request without max_tokens had to end
    aborted   ids of requests that were aborted while they were live
    """

    world: World
    model: HashModel
    engine: Engine
    log: list[StepPlan | StepOutput]
    choices: dict[tuple[int, int], Choice]
    longest: dict[int, int]
    aborted: set[int]
    num_steps: int
    reached: Counter[str]


def build(world: World) -> tuple[HashModel, RecordingModel, Engine]:
    """The world's model, its recorder and an engine over them."""
    model = HashModel(
        vocab_size=world.vocab_size,
        eos_token=world.eos_token,
        num_blocks=world.config.num_blocks,
        block_size=world.config.block_size,
        seed=world.seed,
        likely=world.likely,
        faults=_faults(world),
        draft=_draft(world),
    )
    recorder = RecordingModel(model)
    policy = POLICIES.get(world.policy) or arbitrary_policy(Random(world.seed))
    return model, recorder, Engine(recorder, world.config, world.tokenizer, policy)


def _draft(world: World) -> HashModel | None:
    speculation = world.config.speculation
    if speculation is None or speculation.method != "draft":
        return None

    def result(plan: StepPlan) -> Mapping[int, str]:
        rng = Random(f"{world.seed} draft {plan.step}")
        if rng.random() < world.chances.break_draft / 2:
            raise RuntimeError("no drafts")
        rows = range(len(plan.rows))
        return {i: "broken draft" for i in rows if rng.random() < world.chances.break_draft}

    return HashModel(
        vocab_size=world.vocab_size,
        eos_token=world.eos_token,
        num_blocks=speculation.num_blocks or world.config.num_blocks,
        block_size=world.config.block_size,
        seed=world.seed + world.stranger,
        likely=world.likely,
        agreement=world.agreement,
        faults=Faults(result=result),
    )


def _faults(world: World) -> Faults:
    chances = world.chances
    if not chances.break_step and not chances.break_row:
        return NO_FAULTS

    def forward(plan: StepPlan) -> None:
        if Random(f"{world.seed} forward {plan.step}").random() < chances.break_step / 2:
            raise RuntimeError("not accepted")

    def result(plan: StepPlan) -> Mapping[int, str]:
        rng = Random(f"{world.seed} result {plan.step}")
        if rng.random() < chances.break_step / 2:
            raise RuntimeError("no result")
        return {i: "broken row" for i in range(len(plan.rows)) if rng.random() < chances.break_row}

    return Faults(forward, result)


def drive(
    world: World,
    *,
    audited: bool = False,
    built: Callable[[World], tuple[HashModel, RecordingModel, Engine]] = build,
) -> Outcome:
    """Run the world until nothing is left to do. The engine is drained then."""
    rng = Random(-1 - world.seed)
    model, recorder, engine = built(world)
    reached: Counter[str] = Counter()
    choices = {(r.id, c): Choice() for r in world.requests for c in range(r.params.n)}
    longest: dict[int, int] = {}
    aborted: set[int] = set()
    unsent = deque(world.requests)
    if audited:
        recorder.on_plan = PlanAudit(engine.scheduler)
    num_steps = 0
    while unsent or engine.has_work:
        while unsent and rng.random() < world.chances.submit:
            request = unsent.popleft()
            longest[request.id] = min(
                world.config.max_model_len,
                engine.scheduler.pool.num_blocks * world.config.block_size + 1,
            )
            engine.submit(request)
        _disturb(world, engine, rng, reached, aborted)
        working, before = engine.has_work, (engine.num_steps, len(recorder.log))
        for delta in engine.step():
            choices[delta.request_id, delta.choice].take(delta)
            working = False
        assert not working or before != (engine.num_steps, len(recorder.log)), "nothing happened"
        num_steps += 1
        assert num_steps < 20_000, "the world does not end"
        if audited:
            audit(engine)
    audit_drained(engine)
    reached += count(recorder.log)
    reached["evictions"] = engine.scheduler.pool.evictions
    return Outcome(
        world, model, engine, recorder.log, choices, longest, aborted, num_steps, reached
    )


def _disturb(
    world: World, engine: Engine, rng: Random, reached: Counter[str], aborted: set[int]
) -> None:
    chances, scheduler = world.chances, engine.scheduler
    if rng.random() < chances.abort:
        live = list(scheduler.requests) if rng.random() < 0.5 else []
        request_id = rng.choice(live or [request.id for request in world.requests])
        for stage in stages(scheduler, request_id):
            reached[f"aborted {stage}"] += 1
        aborted |= {request_id} & scheduler.requests.keys()
        engine.abort(request_id)
    if rng.random() < chances.resize:
        least = _least_blocks(world.requests, world.config.block_size)
        try:
            scheduler.resize(least + rng.choice((0, 1, 3, 10)))
            reached["resized"] += 1
        except NeverFits:  # a request without max_tokens may need the larger pool it came to
            reached["resize refused"] += 1
    if rng.random() < chances.reset:
        engine.reset_prefix_cache()
        reached["cache reset"] += 1


def stages(scheduler: Scheduler, request_id: int) -> list[str]:
    """Where each open choice of a request is in its life; ["gone"] where there is none."""
    sequences = scheduler.requests.get(request_id)
    if sequences is None:
        return ["gone"]
    found, coming = [], in_flight(scheduler)
    for s in sequences:
        if s.slot is None:
            name = "preempted" if s.epoch else "waiting"
        else:
            name = "filling" if s.id in scheduler._filling else "decoding"
        found.append(f"{name}, token in flight" if s.id in coming else name)
    return found


def verify(outcome: Outcome) -> Counter[str]:
    """Every choice that nobody stopped is the reference's; the others are a beginning of it.

    Returns how often each ending occurred.
    """
    world, endings = outcome.world, Counter[str]()
    for request in world.requests:
        for index in range(request.params.n):
            got = outcome.choices[request.id, index]
            want = expected(
                outcome.model,
                world.config,
                request,
                index,
                longest=outcome.longest[request.id],
                tokenizer=world.tokenizer,
            )
            where = f"world {world.seed}, request {request.id}, choice {index}"
            if promises_distribution(world, request):
                endings[f"drawn {got.finish}"] += 1
                continue
            if got.finish is FinishReason.ABORT:
                assert request.id in outcome.aborted, where
            if got.finish is FinishReason.ERROR:
                assert got.deltas[-1].error in PLANTED_ERRORS, f"{where}: {got.deltas[-1]}"
            endings[compare(got, want, where)] += 1
    return endings


def promises_distribution(world: World, request: Request) -> bool:
    """Which tokens its choices have is for chance to say, and only their distribution is known."""
    speculation = world.config.speculation
    if speculation is None or speculation.acceptance == "coupled":
        return False
    return request.params.temperature > 0


def compare(got: Choice, want: Expected, where: str) -> str:
    """How the choice ended, once it is known to be right."""
    if got.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert got.tokens == want.tokens[: len(got.tokens)], where
        assert got.logprobs == want.logprobs[: len(got.logprobs)], where
        assert got.prompt_logprobs == want.prompt_logprobs[: len(got.prompt_logprobs)], where
        return str(got.finish.value)
    assert got.tokens == want.tokens, where
    assert got.finish == want.finish, where
    assert got.deltas[-1].stop_token == want.stop_token, where
    assert got.logprobs == want.logprobs, where
    assert got.prompt_logprobs == want.prompt_logprobs, where
    return want.why


def count(log: list[StepPlan | StepOutput]) -> Counter[str]:
    """What happened in a recorded run, read from the plans' own words and rows."""
    reached: Counter[str] = Counter()
    flying: deque[StepPlan] = deque()
    times: Counter[int] = Counter()
    for entry in log:
        if isinstance(entry, StepOutput):
            while flying and flying[0].step <= entry.step:
                flying.popleft()
            for out in entry.rows:
                reached["accepted drafts"] += max(0, len(out.tokens) - 1)
                reached["rejected drafts"] += len(out.verified) >= len(out.tokens) > 0
            reached["failed drafts"] += len(entry.undrafted)
            continue
        plan = entry
        if any("model failed" in event.why for event in (*plan.preempted, *plan.finished)):
            reached["voids"] += 1
            flying.clear()
        computing = {row.seq_id for earlier in flying for row in earlier.rows}
        for event in plan.preempted:
            reached["late results"] += event.seq_id in computing
            if event.why.endswith("free"):
                reached["preemptions"] += 1
                times[event.seq_id] += 1
        for event in plan.finished:
            if event.why in ("stop", "length"):
                reached["overrun rows"] += event.seq_id in computing
            else:
                reached["late results"] += event.seq_id in computing
        for event in plan.admitted:
            reached["forks"] += event.why.startswith("forked")
            reached["prefix hits"] += event.why.startswith(("new, ", "resumed, ")) and (
                ", 0 tokens" not in event.why
            )
        reached["copies"] += len(plan.copies)
        reached["drafts beside prompts"] += any(r.drafts for r in plan.rows) and any(
            len(r.tokens) > 1 for r in plan.rows
        )
        reached["rows of several k"] += len({len(r.drafts) for r in plan.rows if r.drafts}) > 1
        reached["drafts under masks"] += any(r.drafts and r.masks for r in plan.rows)
        # A decode feeds one token; more of them in a bound slot are a prompt's later chunk.
        reached["later chunks"] += sum(r.bind is None and len(r.tokens) > 1 for r in plan.rows)
        flying.append(plan)
    reached["preempted 8 times"] = sum(n == MOST_PREEMPTIONS for n in times.values())
    assert max(times.values(), default=0) <= MOST_PREEMPTIONS, times
    return reached


# The audit.


def audit(subject: Engine | Scheduler) -> None:
    """What the scheduler and its pool keep is what can be counted again from scratch."""
    scheduler = subject.scheduler if isinstance(subject, Engine) else subject
    audit_pool(scheduler.pool)
    if isinstance(scheduler._drafting, DraftModel):
        audit_pool(scheduler._drafting.pool)
        assert scheduler._drafting.pool.tables.keys() == scheduler._drafting._followers.keys()
        assert scheduler._drafting._followers.keys() <= scheduler.running.keys()
    _audit_queues(scheduler)
    _audit_sequences(scheduler)
    _audit_published(scheduler)
    if isinstance(subject, Engine):
        assert [plan for plan, _ in subject._in_flight] == list(scheduler.ledger)


def audit_drained(subject: Engine | Scheduler) -> None:
    """Nobody is left, and nothing is left behind: every block and slot can be handed out."""
    audit(subject)
    scheduler = subject.scheduler if isinstance(subject, Engine) else subject
    pool = scheduler.pool
    assert not scheduler.waiting and not scheduler.running and not scheduler.requests
    assert not scheduler._live and not scheduler._filling and not scheduler.sharing.computing
    assert not scheduler.ledger
    assert not pool.tables and pool.used == 0 and pool.available == pool.num_blocks
    assert not any(pool._references) and pool.fragmentation == 0
    assert len(scheduler._free_slots) == scheduler.config.max_num_seqs
    if isinstance(scheduler._drafting, DraftModel):
        assert scheduler._drafting.pool.used == 0


def audit_pool(pool: BlockPool) -> None:
    """Blocks are partitioned, counted and named as the tables and the cache say (I1 to I3, I5)."""
    free, cached = pool._free, list(pool._cached)
    references = Counter(block for table in pool.tables.values() for block in table.blocks)
    # Three lists without a repetition that together name every id once: a partition.
    assert sorted([*free, *cached, *references]) == list(range(pool.num_blocks))
    assert pool._references == [references[block] for block in range(pool.num_blocks)]
    assert {h: b for b, h in pool._hash_of.items()} == pool._block_of
    assert len(pool._hash_of) == len(pool._block_of)
    assert pool._hash_of.keys() >= set(cached) and not pool._hash_of.keys() & set(free)
    assert pool.used == len(references) <= pool.peak_used <= max(pool.peak_used, pool.num_blocks)
    assert pool.available == len(free) + len(cached) == pool.num_blocks - pool.used
    assert 0.0 <= pool.utilisation <= 1.0
    for table in pool.tables.values():
        assert len(set(table.blocks)) == len(table.blocks)
        assert table.capacity == len(table.blocks) * pool.block_size >= table.num_tokens >= 0


def _audit_queues(scheduler: Scheduler) -> None:
    """Every sequence is in exactly one state, every slot with at most one (I18, I20, I23, I26)."""
    waiting, running, pool = scheduler.waiting, scheduler.running, scheduler.pool
    coming = in_flight(scheduler)
    live = sorted([s.id for s in waiting] + list(running))
    assert live == sorted(scheduler._live) and len(set(live)) == len(live)
    assert live == sorted(s.id for group in scheduler.requests.values() for s in group)
    assert all(scheduler.requests.values()), "a request without choices is over"
    assert waiting == sorted(waiting, key=lambda s: (s.request.priority, s.epoch == 0, s.id))
    for s in waiting:
        assert s.slot is None and s.num_blocks == s.committed == s.told == 0
    slots = [s.slot for s in running.values() if s.slot is not None]
    assert len(slots) == len(running)
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.config.max_num_seqs))
    assert pool.tables.keys() == running.keys()
    assert all(pool.tables[i] is s.table and s.id == i for i, s in running.items())
    assert scheduler._filling.keys() <= running.keys()
    stepwise = {i for i, s in running.items() if s.guide is not None or s.num_drafts}
    assert scheduler._stepwise.keys() == stepwise
    drafts_coming = drafts_in_flight(scheduler)
    for i, s in running.items():
        tokens_coming = len(coming.get(i, ()))
        if i in scheduler._filling:
            assert s.num_pending >= 1 and not tokens_coming
            assert s.table.capacity >= len(s.tokens)
        else:  # it has one token to compute, or with max_tokens=0 none
            pending = s.num_pending + drafts_coming[i, s.epoch]
            assert pending + tokens_coming == (s.limit > s.bind.prompt_len)
    chains = {i: set(chain(scheduler, s)[1:]) for i, s in running.items()}
    assert all(block_hash in chains[i] for block_hash, i in scheduler.sharing.computing.items())


def _audit_sequences(scheduler: Scheduler) -> None:
    """Lengths and computed positions are those of the plans in flight (I21, I22)."""
    assert len(scheduler.ledger) <= scheduler.config.depth
    coming, pool = in_flight(scheduler), scheduler.pool
    flying: Counter[tuple[int, int]] = Counter()
    for plan in scheduler.ledger:
        for row in plan.rows:
            flying[row.seq_id, row.epoch] += row.end - row.start
    for i, s in scheduler._live.items():
        assert s.bind.prompt_len <= len(s.tokens) + len(coming.get(i, ())) <= s.limit
        assert s.num_output == 0 or len(s.tokens) < s.limit, "an output that is complete goes on"
        assert s.preemptions <= min(MOST_PREEMPTIONS, s.epoch)
        if s.slot is not None:
            most = pool.blocks_for(max(s.limit - 1, len(s.tokens)))
            assert pool.blocks_for(s.table.num_tokens) <= s.num_blocks <= most
            assert s.committed == s.table.num_tokens - flying[i, s.epoch]
            assert 0 < s.num_blocks and s.told <= s.num_blocks
            if s.preemptions < MOST_PREEMPTIONS and i not in scheduler._filling:
                # What drafts took is back once they were judged.
                assert s.num_blocks <= pool.blocks_for(max(s.table.num_tokens + 1, len(s.tokens)))
            if s.preemptions == MOST_PREEMPTIONS:
                assert s.table.capacity >= s.limit - 1, "one that is exempt could be stopped"


def in_flight(scheduler: Scheduler) -> dict[int, list[TokenRef]]:
    """Tokens that plans in flight sample, by sequence, oldest first."""
    found: dict[int, list[TokenRef]] = {}
    for plan in scheduler.ledger:
        for index, row in enumerate(plan.rows):
            if row.num_samples:
                found.setdefault(row.seq_id, []).append(TokenRef(plan.step, index))
    return found


def drafts_in_flight(scheduler: Scheduler) -> Counter[tuple[int, int]]:
    """How many drafts plans in flight verify, by sequence and epoch."""
    found: Counter[tuple[int, int]] = Counter()
    for plan in scheduler.ledger:
        for row in plan.rows:
            found[row.seq_id, row.epoch] += len(row.drafts)
    return found


def _audit_published(scheduler: Scheduler) -> None:
    """What is published or shared is full, committed, of its holders' chain (I4, I5, I10)."""
    pool = scheduler.pool
    for s in scheduler.running.values():
        hashes = chain(scheduler, s)
        assert s.hashes == hashes[: len(s.hashes)]
        for index, block in enumerate(s.table.blocks):
            if block in pool._hash_of or pool._references[block] > 1:
                end = (index + 1) * pool.block_size
                assert end <= s.committed, f"block {block} to {end}, {s.committed=}"
            if block in pool._hash_of:
                assert pool._hash_of[block] == hashes[index + 1]
    if not scheduler.config.enable_prefix_caching:
        assert not pool._hash_of


def chain(scheduler: Scheduler, sequence: Sequence) -> list[bytes]:
    """The hashes that the sequence's full blocks must have, root first."""
    size = scheduler.config.block_size
    salt = sequence.request.cache_salt
    hashes = [root_hash(scheduler.config.cache_namespace, salt, size)]
    for end in range(size, len(sequence.tokens) + 1, size):
        hashes.append(chain_hash(hashes[-1], sequence.tokens[end - size : end]))
    return hashes


def snapshot(subject: Scheduler | BlockPool) -> str:
    """Everything that it keeps, as text: equal when nothing has changed."""
    if isinstance(subject, Scheduler):
        return f"{vars(subject)} {subject.sharing.computing} {snapshot(subject.pool)}"
    return str(vars(subject))


class PlanAudit:
    """Checks every plan as it is made, against the scheduler's state at that moment.

    tables   the fold of the plans' diffs so far, per slot: what a device knows
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.tables: dict[int, list[int]] = {}
        self._scheduler = scheduler
        self._owners: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, range] = {}
        self._step = -1
        self._draft_tables: dict[int, list[int]] = {}
        self._draft_owners: dict[int, tuple[int, int]] = {}
        self._draft_step = -1

    def __call__(self, plan: StepPlan) -> None:
        """The plan is within the limits, and its diffs fold to the scheduler's tables."""
        scheduler, config = self._scheduler, self._scheduler.config
        assert self._step < plan.step == scheduler.ledger[-1].step
        self._step = plan.step
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert plan.rows or plan.copies
        assert len(plan.rows) <= config.max_num_seqs
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        assert plan.num_blocks == scheduler.pool.num_blocks
        for source, target in plan.copies:
            assert scheduler.pool._references[source] and scheduler.pool._references[target] == 1
            assert target not in scheduler.pool._hash_of
        self._check_drafts(plan)
        coming = in_flight(scheduler)
        for row in plan.rows:
            self._fold(row)
            self._check_row(row, coming.get(row.seq_id, []))
        for s in scheduler.running.values():
            if s.slot is not None and s.told:
                assert self.tables[s.slot][: s.told] == s.table.blocks[: s.told]

    def _fold(self, row: Row) -> None:
        owner = (row.seq_id, row.epoch)
        if row.bind is None:
            assert self._owners[row.slot] == owner and row.start in self._ends[row.slot]
            assert row.keep <= len(self.tables[row.slot])
        else:
            assert row.keep == 0 and self._owners.get(row.slot) != owner
        # Behind drafts the next row begins where they were confirmed to.
        self._ends[row.slot] = range(row.end - len(row.drafts), row.end + 1)
        self._owners[row.slot] = owner
        self.tables.setdefault(row.slot, [])[row.keep :] = row.new_blocks

    def _check_row(self, row: Row, coming: list[TokenRef]) -> None:
        """It reads what is known or coming, and writes where nobody else reads (I4)."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        s = scheduler.running[row.seq_id]
        assert (s.slot, s.epoch) == (row.slot, row.epoch)
        assert self.tables[row.slot] == s.table.blocks
        assert row.tokens == tuple(s.tokens[row.start : row.start + len(row.tokens)])
        assert row.start < row.end == s.table.num_tokens
        assert row.num_samples == 1 + len(row.drafts) or not (row.drafts or row.num_samples)
        if row.drafts:
            assert (row.start, len(row.tokens)) == (len(s.tokens) - 1, 1)
            assert row.end < s.limit and len(row.masks) in (0, row.num_samples)
        assert list(row.refs) == coming[: len(coming) - row.num_samples]
        assert not row.tokens or not row.refs
        if row.refs:
            (ref,) = row.refs
            earlier = next(plan for plan in scheduler.ledger if plan.step == ref.step)
            assert earlier.rows[ref.row].end == row.start
        for block in s.table.blocks[row.start // pool.block_size : pool.blocks_for(row.end)]:
            assert pool._references[block] == 1, f"row {row} writes into shared block {block}"
            assert block not in pool._hash_of, f"row {row} writes into published block {block}"

    def _check_drafts(self, plan: StepPlan) -> None:
        """The draft model's tables are the fold of its rows, which write where nobody reads."""
        drafting = self._scheduler._drafting
        named = [d for row in plan.rows for d in row.drafts if isinstance(d, DraftRef)]
        assert len(set(named)) == len(named)
        for draft in named:
            row = plan.drafts[draft.plan].rows[draft.row]
            assert row.num_samples == 1
        for each in plan.drafts:
            assert isinstance(drafting, DraftModel)
            assert each.step == self._draft_step + 1 and each.rows and not each.drafts
            assert each.num_tokens <= self._scheduler.config.max_num_batched_tokens
            assert len({row.slot for row in each.rows}) == len(each.rows)
            for row in each.rows:
                self._check_draft_row(drafting, each, row)
            self._draft_step = each.step

    def _check_draft_row(self, drafting: DraftModel, plan: StepPlan, row: Row) -> None:
        owner, pool = (row.seq_id, row.epoch), drafting.pool
        s = self._scheduler.running[row.seq_id]
        assert (s.slot, s.epoch) == (row.slot, row.epoch)
        if row.bind is None:
            assert self._draft_owners[row.slot] == owner
        else:
            assert row.keep == 0 and row.bind.proposes
        self._draft_owners[row.slot] = owner
        self._draft_tables.setdefault(row.slot, [])[row.keep :] = row.new_blocks
        table = drafting._followers[row.seq_id].table
        assert self._draft_tables[row.slot] == table.blocks
        assert row.tokens == tuple(s.tokens[row.start : row.start + len(row.tokens)])
        assert row.start < row.end <= table.num_tokens and bool(row.tokens) != bool(row.refs)
        if row.refs:
            assert row.refs[0].step == plan.step - 1 and row.start >= len(s.tokens)
        for block in table.blocks[row.start // pool.block_size : pool.blocks_for(row.end)]:
            assert pool._references[block] == 1 and block not in pool._hash_of
