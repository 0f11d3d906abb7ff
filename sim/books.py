"""Books: every request from its arrival to its end, against what a sequential reference says.

Owns the accounts: who came, what each choice got, how it ended. Knows the reference, ten lines that
take one token after the other from the whole context; it knows no block, batch, plan or cache.

    arrived ──► open ──► finished | aborted | failed      each choice ends once, and nothing follows
       └──────► refused                                   came = ended + refused + live, every step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.request import Delta, FinishReason, Request, TokenLogprob
from forge.sampling import (
    adjusted,
    candidates,
    choice_seed,
    choose,
    mix,
    probabilities,
    token_logprob,
)
from forge.seam import REJECTION, StepOutput, StepPlan
from sim.checks import MOST_PREEMPTIONS, audit, audit_drained
from sim.clock import TimedStep
from sim.faulty import PLANTED, FaultyModel
from sim.workload import Arrival

ROUNDS = 2 * (1 + MOST_PREEMPTIONS)
"""Steps in which what is live must end, for each of its positions.

A sequence gets blocks at most 1 + MOST_PREEMPTIONS times and computes at most its length each time.
Every plan computes a position, and a step that plans nothing commits a plan.
"""

IN_ORDER = ("fcfs", "prefill-first", "largest-victim")
"""Policies that admit whoever came first, within a class."""


class Answer(NamedTuple):
    """What a choice gets when nothing goes wrong."""

    tokens: tuple[int, ...]
    finish: FinishReason
    stop_token: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def answer(
    model: HashModel, config: EngineConfig, request: Request, choice: int, longest: int
) -> Answer:
    """One token after the other, from the whole context. `longest` is that of any sequence."""
    params, prompt = request.params, list(request.prompt)
    base = params.seed if params.seed is not None else mix(config.seed ^ mix(request.id))
    end_ids = () if params.ignore_eos else (model.eos_token(), *config.end_ids)
    room = longest - len(prompt) if params.max_tokens is None else params.max_tokens
    output: list[int] = []
    scores: list[TokenLogprob] = []
    finish, stop_token = FinishReason.LENGTH, None
    while len(output) < room:
        logits = model.context_logits(prompt + output)
        allowed = adjusted(logits, params, prompt, output, end_ids)
        token = choose(allowed, params, choice_seed(base, choice), len(prompt) + len(output))
        output.append(token)
        if params.logprobs is not None:
            scores.append(token_logprob(logits, token, params.logprobs))
        if token in (*end_ids, *params.stop_token_ids) and len(output) >= params.min_tokens:
            finish, stop_token = FinishReason.STOP, token
            break
    count = params.prompt_logprobs
    of_prompt = () if count is None or choice else range(1, len(prompt))
    told = tuple(
        token_logprob(model.context_logits(prompt[:p]), prompt[p], count or 0) for p in of_prompt
    )
    return Answer(tuple(output), finish, stop_token, tuple(scores), told)


@dataclass(slots=True)
class Account:
    """What one choice has got.

    answer   what it should get; of one whose tokens are for chance to say, only the prompt's part
    room     most tokens it may get
    """

    request: Request
    answer: Answer
    room: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Books:
    """A Watcher that checks everything whenever it hears of anything.

    came, refused   requests
    ended           choices, by how
    sojourn_ns      sum of the times from a request's arrival to the end of its last choice
    num_steps       of the engine
    """

    def __init__(self, engine: Engine, model: HashModel, faulty: FaultyModel, policy: str) -> None:
        self.came = self.refused = self.num_steps = 0
        self.choices = self.sojourn_ns = 0
        self.ended: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self._engine = engine
        self._model = model
        self._faulty = faulty
        self._open: dict[tuple[int, int], Account] = {}
        self._arrived_ns: dict[int, int] = {}
        self._names: dict[int, tuple[int, int]] = {}
        self._classes: dict[int, int] = {}
        self._aborted: set[int] = set()
        self._preempted: Counter[int] = Counter()
        self._retried: Counter[int] = Counter()
        self._in_order = policy in IN_ORDER
        self._now_ns = self._last_ns = self._together = 0
        self._progress = (0, 0)
        self._steps_left: int | None = None

    # What a Watcher hears.

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """Refused, and it could not have been served; or open."""
        self._hear(now_ns)
        assert arrival.at_ns <= now_ns, f"it is {now_ns}, and {arrival} has come"
        request, config = arrival.request, self._engine.config
        self.came += 1
        asked, most = request.params.max_tokens, self._engine.scheduler.pool.num_blocks
        least = len(request.prompt) + (1 if asked is None else asked)
        positions = max(len(request.prompt), least - 1)
        fits = least <= config.max_model_len and positions <= most * config.block_size
        assert fits == (refused is None), f"request {request.id}, {least=}, {most=}: {refused}"
        if refused is not None:
            self.refused += 1
            return
        longest = min(config.max_model_len, most * config.block_size + 1)
        self._count_edges(request, least, longest)
        self._together = self._together + 1 if arrival.at_ns == self._last_ns else 1
        self._last_ns = arrival.at_ns
        self.reached["burst"] += self._together == 5
        self._aborted.discard(request.id)
        for choice in range(request.params.n):
            assert (request.id, choice) not in self._open, f"request {request.id} is open twice"
            expected = answer(self._model, config, request, choice, longest)
            room = longest - len(request.prompt) if asked is None else asked
            self._open[request.id, choice] = Account(request, expected, room)
            self.choices += 1
        self._arrived_ns[request.id] = arrival.at_ns
        for sequence in self._engine.scheduler.requests[request.id]:
            self._names[sequence.id] = (request.id, sequence.choice)
            self._classes[sequence.id] = request.priority

    def left(self, request_id: int, now_ns: int) -> None:
        """Its client has gone away."""
        self._hear(now_ns)
        self.reached["leave"] += any(name[0] == request_id for name in self._open)
        self.aborted(request_id)

    def aborted(self, request_id: int) -> None:
        """From now on its choices may end as aborted."""
        self._aborted.add(request_id)

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Everything is in order after a step of the engine, and the step was one."""
        self.num_steps += 1
        if self._faulty.unplanned is not None:
            raise self._faulty.unplanned
        self._hear(now_ns)
        progress = (self._engine.num_steps, self._faulty.num_plans)
        assert deltas or progress != self._progress, "there is work, and nothing happened"
        self._progress = progress
        if step is not None:
            self._count(step.plan)
            if self._faulty.last is not None and self._faulty.last[0] is step.plan:
                self._check_told(*self._faulty.last, deltas)
                self._count_drafts(*self._faulty.last, deltas)
        for delta in deltas:
            self._take(delta)
        ignored = [name for name in self._open if name[0] in self._aborted]
        assert not ignored, f"{ignored} were aborted, and go on"
        self.look()
        if self._steps_left is not None:
            self._steps_left -= 1
            assert self._steps_left >= 0, "faults are off, and it does not end"

    # What is checked.

    def look(self) -> None:
        """The engine is in order, and has exactly the choices that are open here."""
        audit(self._engine)
        live = [
            (request_id, sequence.choice)
            for request_id, sequences in self._engine.scheduler.requests.items()
            for sequence in sequences
        ]
        telling = [(d.request_id, d.choice) for d in self._engine._undelivered]
        assert sorted(live + telling) == sorted(self._open), "who is open is not who is live"
        assert self.choices == sum(self.ended.values()) + len(self._open)

    def calm(self) -> None:
        """Faults are off: what is live must end within so many steps."""
        left = sum(s.limit for s in self._engine.scheduler._live.values())
        self._steps_left = ROUNDS * left + self._engine.config.depth + 1

    def close(self) -> None:
        """All is over, and nothing is left behind."""
        assert not self._open, f"{sorted(self._open)} never ended"
        audit_drained(self._engine)

    def _hear(self, now_ns: int) -> None:
        """It is `now_ns`, and never was later."""
        assert now_ns >= self._now_ns, f"the clock went back from {self._now_ns} to {now_ns}"
        self._now_ns = now_ns

    def _take(self, delta: Delta) -> None:
        name = (delta.request_id, delta.choice)
        where = f"request {name[0]}, choice {name[1]}"
        account = self._open.get(name)
        assert account is not None, f"{where} is not open: {delta}"
        account.tokens += delta.tokens
        account.logprobs += delta.logprobs
        account.prompt_logprobs += delta.prompt_logprobs
        want, got = account.answer, account
        if self._is_chance(account.request):
            self._check_chance(account, delta, where)
        else:
            _same(got.tokens, want.tokens, where)
            _same(got.logprobs, want.logprobs, f"{where}, logprobs")
            ended = (delta.finish, delta.stop_token)
            if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert ended == (want.finish, want.stop_token), f"{where}: {delta}"
                assert len(got.tokens) == len(want.tokens), f"{where} ended early: {delta}"
                assert len(got.logprobs) == len(want.logprobs), where
        _same(got.prompt_logprobs, want.prompt_logprobs, f"{where}, prompt")
        if delta.finish is not None:
            self._end(account, delta, where)

    def _check_told(self, plan: StepPlan, output: StepOutput, deltas: list[Delta]) -> None:
        """What was sampled for a choice that is open has been told: nothing is computed twice."""
        if len(output.rows) != len(plan.rows):
            return  # it was refused
        told = {
            (delta.request_id, delta.choice) for delta in deltas if delta.tokens or delta.finish
        }
        for row, out in zip(plan.rows, output.rows, strict=True):
            name = self._names[row.seq_id]
            if out.tokens and name in self._open:
                assert name in told, f"{name}: {out.tokens} of step {plan.step} were lost"

    def _end(self, account: Account, delta: Delta, where: str) -> None:
        finish = delta.finish
        assert finish is not None
        if finish is FinishReason.ABORT:
            assert delta.request_id in self._aborted, f"{where}: nobody aborted it"
        elif finish is FinishReason.ERROR:
            assert self._was_planted(delta.error or ""), f"{where}: {delta.error}"
        else:
            told, want = account.prompt_logprobs, account.answer.prompt_logprobs
            assert len(told) == len(want), f"{where}: {len(told)} prompt logprobs"
        del self._open[delta.request_id, delta.choice]
        self.ended[finish.value] += 1
        if all(name[0] != delta.request_id for name in self._open):
            self.sojourn_ns += self._now_ns - self._arrived_ns.pop(delta.request_id)

    def _was_planted(self, error: str) -> bool:
        """A fault that was planted has this consequence."""
        done = self._faulty.done
        return (
            PLANTED in error
            or ("is no result of step" in error and done["short"] > 0)
            or ("the model sampled token" in error and done["garble"] > 0)
        )

    def _is_chance(self, request: Request) -> bool:
        """Only the distribution of its tokens is known."""
        speculation = self._engine.config.speculation
        rejects = speculation is not None and speculation.acceptance == REJECTION
        return rejects and not request.params.greedy

    def _check_chance(self, account: Account, delta: Delta, where: str) -> None:
        """What it gained was possible, each token behind those before; it ends where it must."""
        request, params, tokens = account.request, account.request.params, account.tokens
        end_ids = () if params.ignore_eos else (self._model.eos_token(),)
        for count in range(len(tokens) - len(delta.tokens), len(tokens)):
            logits = self._model.context_logits([*request.prompt, *tokens[:count]])
            allowed = adjusted(logits, params, request.prompt, tokens[:count], end_ids)
            p = probabilities(candidates(allowed, params)).get(tokens[count], 0.0)
            assert p > 0.0, f"{where}: {tokens[count]} cannot be at {count}"
        scores_alone = delta.finish is None and not delta.tokens  # of a prompt
        if scores_alone or delta.finish in (FinishReason.ABORT, FinishReason.ERROR):
            return
        stops = (*end_ids, *params.stop_token_ids)
        ends = [i for i, t in enumerate(tokens, 1) if t in stops and i >= params.min_tokens]
        want = None
        if ends:
            want = FinishReason.STOP
        elif len(tokens) >= account.room:
            want = FinishReason.LENGTH
        assert delta.finish == want, f"{where}: {tokens} ended by {delta.finish}, not {want}"
        assert ends in ([], [len(tokens)]) and len(tokens) <= account.room, f"{where}: {tokens}"

    def _count(self, plan: StepPlan) -> None:
        """What the plan says has happened."""
        reached = self.reached
        for event in plan.preempted:
            reached["preempted"] += 1
            if event.why.endswith("free"):
                self._preempted[event.seq_id] += 1
                times = self._preempted[event.seq_id]
                reached["preempted 8 times"] += times == MOST_PREEMPTIONS
                assert times <= MOST_PREEMPTIONS, f"sequence {event.seq_id}: {times} times"
            elif event.why.startswith("the model failed"):
                self._retried[event.seq_id] += 1
                reached["retried"] += 1
                assert self._retried[event.seq_id] <= 1, f"sequence {event.seq_id} is tried again"
        self._check_order(plan)
        for event in plan.admitted:
            reached["forked"] += event.why.startswith("forked")
            reached["prefix hit"] += not event.why.startswith("forked") and ", 0 " not in event.why
        scheduler = self._engine.scheduler
        computing = scheduler.sharing.computing
        reached["raced"] += any(h in computing for s in scheduler.waiting for h in s.hashes)

    def _check_order(self, plan: StepPlan) -> None:
        """No sequence is admitted before an older one of its class, where nothing else holds it.

        A sequence may wait for a prefix that is being computed, or for a sibling to fork from.
        """
        scheduler = self._engine.scheduler
        new = [event.seq_id for event in plan.admitted if event.why.startswith("new")]
        if not new or not self._in_order or scheduler.config.enable_prefix_caching:
            return
        for s in scheduler.waiting:
            if not s.epoch and s.params.n == 1:
                later = [i for i in new if i > s.id and self._classes[i] == s.request.priority]
                assert not later, f"{later} were admitted, and {s.id} came before them"

    def _count_edges(self, request: Request, least: int, longest: int) -> None:
        """Lengths at which one more, or one less, would be another case."""
        config, length = self._engine.config, len(request.prompt)
        self.reached["prompt of whole blocks"] += length % config.block_size == 0
        self.reached["prompt of whole chunks"] += length % config.max_num_batched_tokens == 0
        self.reached["longest sequence"] += least == longest
        self.reached["no output"] += request.params.max_tokens == 0

    def _count_drafts(self, plan: StepPlan, output: StepOutput, deltas: list[Delta]) -> None:
        """How drafts fared, and what ended among them."""
        reached, given = self.reached, []
        for row, out in zip(plan.rows, output.rows, strict=False):
            if row.drafts and out.tokens:
                given.append(out.tokens)
                reached["all drafts accepted"] += len(out.tokens) == len(row.drafts) + 1
                reached["no draft accepted"] += len(out.tokens) == 1
        for delta in deltas:
            taken = len(delta.tokens)
            if taken > 1 and delta.finish is not None:
                reached[f"{delta.finish.value} among drafts"] += 1
                reached["end inside accepted drafts"] += any(
                    tokens[:taken] == delta.tokens and len(tokens) > taken for tokens in given
                )


def _same(got: Iterable[object], want: Iterable[object], where: str) -> None:
    """`got` is a beginning of `want`."""
    want = list(want)
    for index, each in enumerate(got):
        assert index < len(want), f"{where}: {each} is one too many"
        assert each == want[index], f"{where}: {each} at {index}, not {want[index]}"
