"""Random worlds: an engine, a model, requests and disturbances from one seed, run to the end.

Owns how a world is drawn and run, and the counts of what it reached. Knows no expected output:
that is in tests/core/reference.py. The invariants after every step are in forge/invariants.py.

    draw_world(seed) ──► run_world(world) ──► WorldOutcome ──► check_outcome(outcome)
                           │ audit(engine)      after every step, if requested
                           │ PlanAudit(plan)    as every plan is accepted, if requested
                           └ reached            what happened, for the tests to check
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from forge.config import DiskTier, EngineConfig, HostTier, LoadCosts, Speculation, StepCosts
from forge.engine import Engine
from forge.errors import NeverFits
from forge.invariants import ALLOWED_PREEMPTIONS, PlanAudit, audit, audit_drained, describe_states
from forge.invariants import audit_pool as audit_pool
from forge.invariants import chain_of as chain_of
from forge.invariants import snapshot as snapshot
from forge.invariants import tokens_in_flight as tokens_in_flight
from forge.models.file_moves import FileMoves
from forge.models.hash import HashModel
from forge.models.paged import NO_FAULTS, FaultHooks
from forge.policy import POLICIES, Candidate, Policy, PolicyContext, Split
from forge.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Structure,
    TokenLogprob,
)
from forge.seam import (
    HostFile,
    Model,
    PendingStep,
    StepOutput,
    StepPlan,
    executes_moves,
    samples_late_rows,
)
from forge.tokenizer import ByteTokenizer, Tokenizer
from tests.core.reference import ALPHABET, ExpectedChoice, compute_expected

PATTERNS = ("(a|é|b\n){1,2}", "[ab]{0,4}é?", "( |é){2,5}", "b?(éa| b)?", "a")
"""Languages of structured outputs, of texts up to the longest that reference.py enumerates."""
PLANTED_ERRORS = (
    "broken row",
    "the model failed: RuntimeError('not accepted')",
    "the model failed: RuntimeError('no result')",
)


# Worlds.


class Chances(NamedTuple):
    """Probabilities of disturbances, per engine step."""

    submit: float = 0.5
    abort: float = 0.0
    resize: float = 0.0
    resize_host: float = 0.0
    reset: float = 0.0
    break_step: float = 0.0
    break_row: float = 0.0
    break_draft: float = 0.0


class RandomWorld(NamedTuple):
    """Values that decide a run completely."""

    seed: int
    config: EngineConfig
    requests: tuple[Request, ...]
    vocab_size: int = 20
    likely_tokens: tuple[int, ...] | None = None
    eos_token: int = 0
    policy: str = "fcfs"  # a name in POLICIES, or "arbitrary"
    chances: Chances = Chances()
    tokenizer: Tokenizer | None = None
    agreement: float = 1.0  # agreement of the draft model, if there is one
    is_draft_unrelated: bool = False  # the draft's distributions are another model's


def draw_world(seed: int) -> RandomWorld:
    """Draw a small world: each seed gives other sizes, requests and disturbances."""
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
        num_blocks=_min_blocks(requests, block_size) + rng.choice((0, 0, 0, 1, 2, 4, 20)),
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
    world = RandomWorld(
        seed, config, requests, vocab_size, likely, eos_token, policy, chances, tokenizer
    )
    world = _with_drafts(world) if seed % 2 else world
    return with_host_tier(world) if config.enable_prefix_caching else world


DISK = DiskTier(max_files=200, max_moves=12, max_wait_plans=4)


def with_host_tier(world: RandomWorld) -> RandomWorld:
    """Return the world with a drawn pool of blocks in host memory, or with none."""
    rng = Random(f"{world.seed} host tier")
    num_blocks = world.config.num_blocks
    host_tier = HostTier(
        num_blocks=rng.choice((0, 1, 2, num_blocks // 2, num_blocks, 4 * num_blocks)),
        max_moved_blocks=rng.choice((1, 4, None)),
        min_clean_percent=rng.choice((12, 50, 100, 100)),
        min_touches=rng.choice((1, 1, 2)),
        min_loaded_blocks=rng.choice((1, 1, 3)),
        costs=rng.choice((None, None, LoadCosts(3, 2, 1))),
        disk=rng.choice((None, DISK)),
    )
    return world._replace(
        config=replace(world.config, host_tier=rng.choice((None, host_tier, host_tier))),
        chances=world.chances._replace(resize_host=rng.choice((0.0, 0.0, 0.1))),
    )


COSTS = StepCosts(((1, 1.0), (8, 1.1), (64, 3.0)), ((1, 0.1), (64, 0.3)), scheduler=((1, 0.05),))
"""Costs of an imagined device on which drafts pay if at least one in four is right."""


def _with_drafts(world: RandomWorld) -> RandomWorld:
    """Return the world with a drawn way of speculation."""
    rng = Random(f"{world.seed} drafts")
    speculation = draw_speculation(rng)
    return world._replace(
        config=replace(world.config, speculation=speculation),
        chances=world.chances._replace(break_draft=rng.choice((0.0, 0.0, 0.0, 0.1))),
        agreement=rng.choice((0.0, 0.3, 0.8, 0.95, 1.0)),
        is_draft_unrelated=rng.random() < 0.3,
    )


def draw_speculation(rng: Random) -> Speculation:
    """Draw a way of speculation."""
    return Speculation(
        num_tokens=rng.choice((1, 2, 3, 5)),
        method=rng.choice(("draft", "draft", "draft", "ngram")),
        acceptance=rng.choice(("coupled", "coupled", "rejection")),
        num_blocks=rng.choice((None, None, None, 3)),
        costs=rng.choice((None, None, COSTS)),
    )


def draw_request(
    rng: Random, request_id: int, prefix: list[int], ids: tuple[int, ...], text: bool
) -> Request:
    """Draw a request whose prompt starts with part of `prefix`; each parameter is set in some."""

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
        # If only end ids are possible, min_tokens masks none of them.
        "stop_token_ids": maybe(0.5, allowed, stops) if allowed else stops,
        "ignore_eos": rng.random() < 0.4,
        "logprobs": maybe(0.1, rng.randint(0, 3), None),
        "prompt_logprobs": maybe(0.1, rng.randint(0, 3), None),
    }
    if options["logprobs"] == 3:
        options["logprob_token_ids"] = ids[::-2][:4]
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


class FaultyStore:
    """Contents by key in memory. Some writes and reads fail, some are answered late, or never.

    The seed decides it, not the order of calls. A seed in four has no fault at all.
    """

    def __init__(self, seed: int) -> None:
        self.contents: dict[bytes, bytes] = {}
        self._seed = seed

    def _draw(self, key: bytes, what: str) -> float:
        if self._seed % 4 == 0:
            return 1.0
        return Random(f"{self._seed} {key.hex()} {what}").random()

    def write(self, key: bytes, content: bytes) -> bool:
        """Keep the content, fail, or raise."""
        if self._draw(key, "write") < 0.05:
            raise OSError("no space left")
        if self._draw(key, "write") < 0.1:
            return False
        self.contents[key] = content
        return True

    def read(self, key: bytes, write: Callable[[memoryview], bool]) -> bool:
        """Pass the content in two pieces; or nothing, or one of them, or raise."""
        draw = self._draw(key, "read")
        if draw < 0.03:
            raise OSError("input/output error")
        content = self.contents.get(key)
        if content is None or 0.06 <= draw < 0.1:
            return False
        middle = len(content) // 2
        if draw < 0.06:
            # The rest is damaged, or the file is shorter.
            return write(memoryview(content)[:middle]) and draw < 0.045
        return write(memoryview(content)[:middle]) and write(memoryview(content)[middle:])

    def lateness(self, step: int, file: HostFile) -> int:
        """Return by how many plans the answer is late."""
        draw = self._draw(file.key, f"lateness {step}")
        return 1_000_000 if draw < 0.02 else int(6 * draw) if draw < 0.8 else 0


def arbitrary_policy(rng: Random) -> Policy:
    """Return a policy that chooses at random, and gives at least one token to some sequence."""

    def split(
        budget: int, num_decodes: int, filling: Iterable[Candidate], context: PolicyContext
    ) -> Split:
        chunks = []
        for candidate in filling:
            chunks.append(rng.randint(0, min(budget, candidate.num_pending)))
            budget -= chunks[-1]
        decodes = rng.randint(0, min(budget, num_decodes))
        if not decodes and not any(chunks):
            chunks[0] = 1
        return Split(decodes, tuple(chunks))

    def choose(candidates: Sequence[Candidate], context: PolicyContext) -> Candidate:
        return rng.choice(candidates)

    return Policy(choose, choose, split)


def _min_blocks(requests: tuple[Request, ...], block_size: int) -> int:
    """Return the number of blocks in which each of the requests fits alone."""
    spans = (
        len(r.prompt) + max(0, (1 if r.params.max_tokens is None else r.params.max_tokens) - 1)
        for r in requests
    )
    return max(-(-span // block_size) for span in spans)


# Running a world.


class RecordingStep(NamedTuple):
    """A pending step that logs its output when the result is read."""

    step: PendingStep
    log: list[StepPlan | StepOutput]

    def result(self) -> StepOutput:
        """Return the step's output, and log it."""
        output = self.step.result()
        self.log.append(output)
        return output


class RecordingModel:
    """A model that logs every accepted plan and every output that is read, in order.

    failure   error that `on_plan` raised: the engine continues after it
    """

    def __init__(self, model: Model, on_plan: Callable[[StepPlan], None] | None = None) -> None:
        self.log: list[StepPlan | StepOutput] = []
        self.on_plan = on_plan
        self.failure: AssertionError | None = None
        self._model = model

    def vocab_size(self) -> int:
        """Return the vocabulary size of the model."""
        return self._model.vocab_size()

    def num_layers(self) -> int:
        """Return the number of layers of the model."""
        return self._model.num_layers()

    def eos_token(self) -> int:
        """Return the end token of the model."""
        return self._model.eos_token()

    def executes_moves(self) -> bool:
        """Return whether the model carries out stores and loads."""
        return executes_moves(self._model)

    def samples_late_rows(self) -> bool:
        """Return whether the model samples late rows with their masks."""
        return samples_late_rows(self._model)

    def forward(self, plan: StepPlan) -> PendingStep:
        """Log the plan, call `on_plan`, and run the model."""
        self.log.append(plan)
        if self.on_plan is not None:
            try:
                self.on_plan(plan)
            except AssertionError as failure:
                self.failure = failure
                raise
        return RecordingStep(self._model.forward(plan), self.log)


@dataclass(slots=True)
class ChoiceResult:
    """Deltas of one choice."""

    deltas: list[Delta] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Add a delta, and check that none follows the final one."""
        assert self.finish is None, f"{delta} after {self.deltas[-1]}"
        self.deltas.append(delta)
        self.finish = delta.finish

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the output ids in order."""
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return one entry per output id, if requested."""
        return tuple(entry for delta in self.deltas for entry in delta.logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return one entry per prompt id after the first, if requested."""
        return tuple(entry for delta in self.deltas for entry in delta.prompt_logprobs)


class WorldOutcome(NamedTuple):
    """A run that has ended.

    max_len_by_request   request id -> length at which a request without max_tokens must end
    aborted              ids of requests that were aborted while they were live
    """

    world: RandomWorld
    model: HashModel
    engine: Engine
    log: list[StepPlan | StepOutput]
    choices: dict[tuple[int, int], ChoiceResult]
    max_len_by_request: dict[int, int]
    aborted: set[int]
    num_steps: int
    event_counts: Counter[str]


def build_engine(
    world: RandomWorld, store: FaultyStore | None = None
) -> tuple[HashModel, RecordingModel, Engine]:
    """Return the world's model, its recorder, and an engine on them.

    store   of files; None: one in memory, if the world has files
    """
    host_tier = world.config.host_tier
    if store is None and host_tier is not None and host_tier.disk is not None:
        store = FaultyStore(world.seed)
    model = HashModel(
        vocab_size=world.vocab_size,
        eos_token=world.eos_token,
        num_blocks=world.config.num_blocks,
        block_size=world.config.block_size,
        seed=world.seed,
        likely_tokens=world.likely_tokens,
        faults=_faults(world),
        draft=_draft(world),
        files=None if store is None else FileMoves(store, lateness=store.lateness),
    )
    recorder = RecordingModel(model)
    policy = POLICIES.get(world.policy) or arbitrary_policy(Random(world.seed))
    return model, recorder, Engine(recorder, world.config, world.tokenizer, policy)


def build_displacing_engine(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
    """Return what `build_engine` returns; a policy in two displaces sequences at random too."""
    model, recorder, engine = build_engine(world)
    rng = Random(f"{world.seed} displace")

    def displace(
        running: Sequence[Candidate], waiting: Sequence[Candidate], context: PolicyContext
    ) -> Candidate | None:
        return rng.choice(running) if rng.random() < 0.3 else None

    if rng.random() < 0.5:
        policy = engine.scheduler.policy._replace(displace=displace)
        engine = Engine(recorder, world.config, world.tokenizer, policy)
    return model, recorder, engine


def _draft(world: RandomWorld) -> HashModel | None:
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
        seed=world.seed + world.is_draft_unrelated,
        likely_tokens=world.likely_tokens,
        agreement=world.agreement,
        faults=FaultHooks(result=result),
    )


def _faults(world: RandomWorld) -> FaultHooks:
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

    return FaultHooks(forward, result)


def run_world(
    world: RandomWorld,
    *,
    audited: bool = False,
    create: Callable[[RandomWorld], tuple[HashModel, RecordingModel, Engine]] = build_engine,
) -> WorldOutcome:
    """Run the world until all requests have ended and the engine is drained."""
    rng = Random(-1 - world.seed)
    model, recorder, engine = create(world)
    event_counts: Counter[str] = Counter()
    choices = {(r.id, c): ChoiceResult() for r in world.requests for c in range(r.params.n)}
    max_len_by_request: dict[int, int] = {}
    aborted: set[int] = set()
    pending = deque(world.requests)
    if audited:
        recorder.on_plan = PlanAudit(engine.scheduler)
    num_steps = 0
    while pending or engine.has_work:
        while pending and rng.random() < world.chances.submit:
            request = pending.popleft()
            max_len_by_request[request.id] = min(
                world.config.max_model_len,
                engine.scheduler.pool.num_blocks * world.config.block_size + 1,
            )
            engine.submit(request)
        _disturb(world, engine, rng, event_counts, aborted)
        working, before = engine.has_work, (engine.num_steps, len(recorder.log))
        for delta in engine.step():
            choices[delta.request_id, delta.choice].add(delta)
            working = False
        if recorder.failure is not None:
            raise recorder.failure
        assert not working or before != (engine.num_steps, len(recorder.log)), (
            "the step made no progress"
        )
        num_steps += 1
        assert num_steps < 20_000, "the world does not end"
        if audited:
            audit(engine)
    audit_drained(engine)
    event_counts += count_events(recorder.log)
    event_counts["evictions"] = engine.scheduler.pool.num_evictions
    return WorldOutcome(
        world,
        model,
        engine,
        recorder.log,
        choices,
        max_len_by_request,
        aborted,
        num_steps,
        event_counts,
    )


def _disturb(
    world: RandomWorld, engine: Engine, rng: Random, event_counts: Counter[str], aborted: set[int]
) -> None:
    chances, scheduler = world.chances, engine.scheduler
    if rng.random() < chances.abort:
        live = list(scheduler.requests) if rng.random() < 0.5 else []
        request_id = rng.choice(live or [request.id for request in world.requests])
        for stage in describe_states(scheduler, request_id):
            event_counts[f"aborted {stage}"] += 1
        aborted |= {request_id} & scheduler.requests.keys()
        engine.abort(request_id)
    if rng.random() < chances.resize:
        least = _min_blocks(world.requests, world.config.block_size)
        try:
            engine.resize(least + rng.choice((0, 1, 3, 10)))
            event_counts["resized"] += 1
        except NeverFits:  # without max_tokens a request may need the larger pool
            event_counts["resize refused"] += 1
    if chances.resize_host and scheduler.config.host_tier is not None:
        if rng.random() < chances.resize_host:
            engine.resize(num_host_blocks=rng.choice((0, 1, 3, 20)))
            event_counts["host resized"] += 1
    if rng.random() < chances.reset:
        engine.reset_prefix_cache()
        event_counts["cache reset"] += 1


def check_outcome(outcome: WorldOutcome) -> Counter[str]:
    """Check that every choice equals the reference, or a prefix of it if it was aborted.

    Returns how often each ending occurred.
    """
    world, endings = outcome.world, Counter[str]()
    for request in world.requests:
        for index in range(request.params.n):
            choice = outcome.choices[request.id, index]
            expected_choice = compute_expected(
                outcome.model,
                world.config,
                request,
                index,
                max_len=outcome.max_len_by_request[request.id],
                tokenizer=world.tokenizer,
            )
            where = f"world {world.seed}, request {request.id}, choice {index}"
            if has_only_distribution(world, request):
                endings[f"drawn {choice.finish}"] += 1
                continue
            if choice.finish is FinishReason.ABORT:
                assert request.id in outcome.aborted, where
            if choice.finish is FinishReason.ERROR:
                assert choice.deltas[-1].error in PLANTED_ERRORS, f"{where}: {choice.deltas[-1]}"
            endings[check_choice(choice, expected_choice, where)] += 1
    return endings


def has_only_distribution(world: RandomWorld, request: Request) -> bool:
    """Return whether only the distribution of the request's tokens is known."""
    speculation = world.config.speculation
    if speculation is None or speculation.acceptance == "coupled":
        return False
    return request.params.temperature > 0


def check_choice(choice: ChoiceResult, expected_choice: ExpectedChoice, where: str) -> str:
    """Check the choice against the reference, and return how it ended."""
    if choice.finish in (FinishReason.ABORT, FinishReason.ERROR):
        assert choice.tokens == expected_choice.tokens[: len(choice.tokens)], where
        assert choice.logprobs == expected_choice.logprobs[: len(choice.logprobs)], where
        assert (
            choice.prompt_logprobs == expected_choice.prompt_logprobs[: len(choice.prompt_logprobs)]
        ), where
        return str(choice.finish.value)
    assert choice.tokens == expected_choice.tokens, where
    assert choice.finish == expected_choice.finish, where
    assert choice.deltas[-1].stop_token == expected_choice.stop_token, where
    assert choice.logprobs == expected_choice.logprobs, where
    assert choice.prompt_logprobs == expected_choice.prompt_logprobs, where
    return expected_choice.end_reason


def count_events(log: list[StepPlan | StepOutput]) -> Counter[str]:
    """Count what happened in a recorded run, from the plans, their events and rows."""
    event_counts: Counter[str] = Counter()
    in_flight_plans: deque[StepPlan] = deque()
    num_preemptions: Counter[int] = Counter()
    for entry in log:
        if isinstance(entry, StepOutput):
            while in_flight_plans and in_flight_plans[0].step <= entry.step:
                in_flight_plans.popleft()
            event_counts["good answers"] += sum(answer.is_good for answer in entry.answers)
            event_counts["bad answers"] += sum(not answer.is_good for answer in entry.answers)
            for out in entry.rows:
                event_counts["accepted drafts"] += max(0, len(out.tokens) - 1)
                event_counts["rejected drafts"] += len(out.verified) >= len(out.tokens) > 0
            event_counts["failed drafts"] += len(entry.undrafted)
            continue
        plan = entry
        if any("model failed" in event.why for event in (*plan.preempted, *plan.finished)):
            event_counts["voids"] += 1
            in_flight_plans.clear()
        computing = {row.seq_id for earlier in in_flight_plans for row in earlier.rows}
        for event in plan.preempted:
            event_counts["late results"] += event.seq_id in computing
            if event.why.endswith("free"):
                event_counts["preemptions"] += 1
                num_preemptions[event.seq_id] += 1
        for event in plan.finished:
            if event.why in ("stop", "length"):
                event_counts["overrun rows"] += event.seq_id in computing
            else:
                event_counts["late results"] += event.seq_id in computing
        for event in plan.admitted:
            event_counts["forks"] += event.why.startswith("forked")
            event_counts["prefix hits"] += event.why.startswith(("new, ", "resumed, ")) and (
                ", 0 tokens" not in event.why
            )
        event_counts["copies"] += len(plan.copies)
        event_counts["stores"] += len(plan.stores)
        event_counts["spills"] += len(plan.spills)
        event_counts["fetches"] += len(plan.fetches)
        is_for_files = not (plan.rows or plan.loads or plan.copies or plan.late_masks)
        event_counts["plans for files"] += is_for_files
        event_counts["late masks"] += len(plan.late_masks)
        event_counts["plans of masks alone"] += bool(plan.late_masks and not plan.rows)
        if plan.late_rows or plan.late_masks:
            num_late = sum(len(earlier.late_rows) for earlier in in_flight_plans)
            event_counts["late rows of ended sequences"] += num_late > len(plan.late_masks)
        event_counts["loads"] += len(plan.loads)
        event_counts["loads alongside rows"] += bool(plan.loads and plan.rows)
        event_counts["loads of several plans"] += any(
            (load.seq_id, load.epoch) == (other.seq_id, other.epoch)
            for earlier in in_flight_plans
            for other in earlier.loads
            for load in plan.loads
        )
        event_counts["resumed by loads"] += sum(
            event.why.startswith("resumed") and "to load" in event.why for event in plan.admitted
        )
        event_counts["drafts and prompts"] += any(r.drafts for r in plan.rows) and any(
            len(r.tokens) > 1 for r in plan.rows
        )
        event_counts["rows of several k"] += len({len(r.drafts) for r in plan.rows if r.drafts}) > 1
        event_counts["drafts under masks"] += any(r.drafts and r.masks for r in plan.rows)
        # A decode feeds one token; more tokens in a bound slot are a later chunk of a prompt.
        event_counts["later chunks"] += sum(r.bind is None and len(r.tokens) > 1 for r in plan.rows)
        in_flight_plans.append(plan)
    event_counts["preempted 8 times"] = sum(
        n == ALLOWED_PREEMPTIONS for n in num_preemptions.values()
    )
    assert max(num_preemptions.values(), default=0) <= ALLOWED_PREEMPTIONS, num_preemptions
    return event_counts
