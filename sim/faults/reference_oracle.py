"""The oracle: every request from arrival to end, compared with a sequential reference.

Owns the record of each choice: its arrival, what it received, how it ended. Knows the reference,
which computes one token after the other from the whole context, without block, batch, plan or
cache.

    arrived ──► open ──► finished | aborted | failed      each choice ends once, and nothing follows
       └──────► refused                                   arrived = ended + refused + open, always
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from forge.config import EngineConfig
from forge.engine import Engine
from forge.invariants import ALLOWED_PREEMPTIONS, audit, audit_drained
from forge.models.hash import HashModel
from forge.request import Delta, FinishReason, Request, TokenLogprob
from forge.sampling import (
    choice_seed,
    filter_logits,
    mix,
    probabilities,
    process_logits,
    sample_token,
    token_logprob,
)
from forge.seam import REJECTION, StepOutput, StepPlan
from forge.sim.clock import VirtualClockStep
from forge.sim.faults.faulty_model import FAULT_MARKER, FaultyModel
from forge.sim.workloads.workload import RequestArrival

MAX_STEPS_PER_POSITION = 2 * (1 + ALLOWED_PREEMPTIONS)
"""Most steps, per position, until the live sequences end.

A sequence gets blocks at most 1 + ALLOWED_PREEMPTIONS times and computes at most its length each
time. Every plan computes a position, and a step that plans nothing commits a plan.
"""

FIFO_POLICIES = ("fcfs", "prefill-first", "largest-victim")
"""Policies that admit in order of arrival, within a class."""


class ReferenceOutput(NamedTuple):
    """The output of a choice without faults and aborts."""

    tokens: tuple[int, ...]
    finish: FinishReason
    stop_token: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def compute_reference_output(
    model: HashModel, config: EngineConfig, request: Request, choice: int, max_len: int
) -> ReferenceOutput:
    """Compute a choice's output, one token after the other, each from the whole context.

    max_len   the length limit of the sequence
    """
    params, prompt = request.params, list(request.prompt)
    seed = params.seed if params.seed is not None else mix(config.seed ^ mix(request.id))
    end_ids = () if params.ignore_eos else (model.eos_token(), *config.end_ids)
    max_tokens = max_len - len(prompt) if params.max_tokens is None else params.max_tokens
    output: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish, stop_token = FinishReason.LENGTH, None
    while len(output) < max_tokens:
        logits = model.context_logits(prompt + output)
        allowed = process_logits(logits, params, prompt, output, end_ids)
        token = sample_token(allowed, params, choice_seed(seed, choice), len(prompt) + len(output))
        output.append(token)
        if params.logprobs is not None:
            logprobs.append(token_logprob(logits, token, params.logprobs))
        if token in (*end_ids, *params.stop_token_ids) and len(output) >= params.min_tokens:
            finish, stop_token = FinishReason.STOP, token
            break
    count = params.prompt_logprobs
    prompt_positions = () if count is None or choice else range(1, len(prompt))
    prompt_logprobs = tuple(
        token_logprob(model.context_logits(prompt[:p]), prompt[p], count or 0)
        for p in prompt_positions
    )
    return ReferenceOutput(tuple(output), finish, stop_token, tuple(logprobs), prompt_logprobs)


@dataclass(slots=True)
class ChoiceRecord:
    """Tokens and logprobs that one choice has received.

    reference    what it should receive; under rejection, only its part about the prompt is compared
    max_tokens   most tokens it may receive
    """

    request: Request
    reference: ReferenceOutput
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class ReferenceOracle:
    """A WorldObserver that checks everything at each event.

    num_arrived, num_refused   requests
    finish_counts              choices, by finish reason
    sojourn_ns                 sum of the times from a request's arrival to the end of its last
                               choice
    num_steps                  of the engine
    """

    def __init__(self, engine: Engine, model: HashModel, faulty: FaultyModel, policy: str) -> None:
        self.num_arrived = self.num_refused = self.num_steps = 0
        self.num_choices = self.sojourn_ns = 0
        self.finish_counts: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self._engine = engine
        self._model = model
        self._faulty = faulty
        self._open_choices: dict[tuple[int, int], ChoiceRecord] = {}
        self._arrival_ns: dict[int, int] = {}
        self._choice_of: dict[int, tuple[int, int]] = {}
        self._priority_of: dict[int, int] = {}
        self._aborted_ids: set[int] = set()
        self._preemption_counts: Counter[int] = Counter()
        self._retry_counts: Counter[int] = Counter()
        self._is_fifo = policy in FIFO_POLICIES
        self._now_ns = self._last_arrival_ns = self._num_simultaneous = 0
        self._progress = (0, 0)
        self._max_steps_left: int | None = None

    # Methods of a WorldObserver.

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Check that the request was refused exactly if it does not fit, and open its choices."""
        self._advance_clock(now_ns)
        assert arrival.at_ns <= now_ns, f"submitted at {now_ns} ns: {arrival}"
        request, config = arrival.request, self._engine.config
        self.num_arrived += 1
        max_tokens, num_blocks = request.params.max_tokens, self._engine.scheduler.pool.num_blocks
        min_len = len(request.prompt) + (1 if max_tokens is None else max_tokens)
        positions = max(len(request.prompt), min_len - 1)
        fits = min_len <= config.max_model_len and positions <= num_blocks * config.block_size
        assert fits == (refusal is None), (
            f"request {request.id}, {min_len=}, {num_blocks=}: {refusal}"
        )
        if refusal is not None:
            self.num_refused += 1
            return
        max_len = min(config.max_model_len, num_blocks * config.block_size + 1)
        self._count_boundary_lengths(request, min_len, max_len)
        self._num_simultaneous = (
            self._num_simultaneous + 1 if arrival.at_ns == self._last_arrival_ns else 1
        )
        self._last_arrival_ns = arrival.at_ns
        self.reached["burst"] += self._num_simultaneous == 5
        self._aborted_ids.discard(request.id)
        for choice in range(request.params.n):
            assert (request.id, choice) not in self._open_choices, (
                f"request {request.id} is open twice"
            )
            expected = compute_reference_output(self._model, config, request, choice, max_len)
            max_output = max_len - len(request.prompt) if max_tokens is None else max_tokens
            self._open_choices[request.id, choice] = ChoiceRecord(request, expected, max_output)
            self.num_choices += 1
        self._arrival_ns[request.id] = arrival.at_ns
        for sequence in self._engine.scheduler.requests[request.id]:
            self._choice_of[sequence.id] = (request.id, sequence.choice)
            self._priority_of[sequence.id] = request.priority

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Expect the choices of a request whose client has disconnected to end as aborted."""
        self._advance_clock(now_ns)
        self.reached["leave"] += any(name[0] == request_id for name in self._open_choices)
        self.expect_abort(request_id)

    def expect_abort(self, request_id: int) -> None:
        """Expect the choices of a request to end as aborted from now on."""
        self._aborted_ids.add(request_id)

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Check the engine after a step, and that the step made progress."""
        self.num_steps += 1
        if self._faulty.unexpected_error is not None:
            raise self._faulty.unexpected_error
        self._advance_clock(now_ns)
        progress = (self._engine.num_steps, self._faulty.num_plans)
        assert deltas or progress != self._progress, "the step made no progress"
        self._progress = progress
        if step is not None:
            self._count_events(step.plan)
            if self._faulty.last_result is not None and self._faulty.last_result[0] is step.plan:
                self._check_delivered(*self._faulty.last_result, deltas)
                self._count_draft_outcomes(*self._faulty.last_result, deltas)
        for delta in deltas:
            self._check_delta(delta)
        still_open = [name for name in self._open_choices if name[0] in self._aborted_ids]
        assert not still_open, f"{still_open} were aborted and are still open"
        self.check_state()
        if self._max_steps_left is not None:
            self._max_steps_left -= 1
            assert self._max_steps_left >= 0, "requests go on too long after the faults"

    # Checks.

    def check_state(self) -> None:
        """Check the invariants of the engine, and that its live choices are the open ones."""
        audit(self._engine)
        live = [
            (request_id, sequence.choice)
            for request_id, sequences in self._engine.scheduler.requests.items()
            for sequence in sequences
        ]
        undelivered = [(d.request_id, d.choice) for d in self._engine.undelivered_deltas]
        assert sorted(live + undelivered) == sorted(self._open_choices), (
            "the open choices are not the live ones"
        )
        assert self.num_choices == sum(self.finish_counts.values()) + len(self._open_choices)

    def start_drain(self) -> None:
        """Start counting down the steps in which the live sequences must end, without faults."""
        num_positions = sum(s.max_len for s in self._engine.scheduler.sequences.values())
        self._max_steps_left = (
            MAX_STEPS_PER_POSITION * num_positions + self._engine.config.depth + 1
        )

    def close(self) -> None:
        """Check that every choice has ended and that the engine holds nothing."""
        assert not self._open_choices, f"{sorted(self._open_choices)} never ended"
        audit_drained(self._engine)

    def _advance_clock(self, now_ns: int) -> None:
        """Set the time to `now_ns`, and check that it did not go back."""
        assert now_ns >= self._now_ns, f"the clock went back from {self._now_ns} to {now_ns}"
        self._now_ns = now_ns

    def _check_delta(self, delta: Delta) -> None:
        name = (delta.request_id, delta.choice)
        where = f"request {name[0]}, choice {name[1]}"
        record = self._open_choices.get(name)
        assert record is not None, f"{where} is not open: {delta}"
        record.tokens += delta.tokens
        record.logprobs += delta.logprobs
        record.prompt_logprobs += delta.prompt_logprobs
        want, got = record.reference, record
        if self._is_sampled_by_rejection(record.request):
            self._check_support(record, delta, where)
        else:
            _check_prefix(got.tokens, want.tokens, where)
            _check_prefix(got.logprobs, want.logprobs, f"{where}, logprobs")
            finish = (delta.finish, delta.stop_token)
            if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert finish == (want.finish, want.stop_token), f"{where}: {delta}"
                assert len(got.tokens) == len(want.tokens), f"{where} ended early: {delta}"
                assert len(got.logprobs) == len(want.logprobs), where
        _check_prefix(got.prompt_logprobs, want.prompt_logprobs, f"{where}, prompt")
        if delta.finish is not None:
            self._close_choice(record, delta, where)

    def _check_delivered(self, plan: StepPlan, output: StepOutput, deltas: list[Delta]) -> None:
        """Check that each open choice received its sampled tokens: nothing is computed twice."""
        if len(output.rows) != len(plan.rows):
            return  # the scheduler refused the output
        delivered = {
            (delta.request_id, delta.choice) for delta in deltas if delta.tokens or delta.finish
        }
        for row, out in zip(plan.rows, output.rows, strict=True):
            name = self._choice_of[row.seq_id]
            if out.tokens and name in self._open_choices:
                assert name in delivered, f"{name}: {out.tokens} of step {plan.step} were lost"

    def _close_choice(self, record: ChoiceRecord, delta: Delta, where: str) -> None:
        finish = delta.finish
        assert finish is not None
        if finish is FinishReason.ABORT:
            assert delta.request_id in self._aborted_ids, f"{where}: no abort was requested"
        elif finish is FinishReason.ERROR:
            assert self._is_injected(delta.error or ""), f"{where}: {delta.error}"
        else:
            logprobs, want = record.prompt_logprobs, record.reference.prompt_logprobs
            assert len(logprobs) == len(want), f"{where}: {len(logprobs)} prompt logprobs"
        del self._open_choices[delta.request_id, delta.choice]
        self.finish_counts[finish.value] += 1
        if all(name[0] != delta.request_id for name in self._open_choices):
            self.sojourn_ns += self._now_ns - self._arrival_ns.pop(delta.request_id)

    def _is_injected(self, error: str) -> bool:
        """Return whether an injected fault can cause this error."""
        done = self._faulty.num_injected
        return (
            FAULT_MARKER in error
            or ("is no result of step" in error and done["short"] > 0)
            or ("the model sampled token" in error and done["garble"] > 0)
        )

    def _is_sampled_by_rejection(self, request: Request) -> bool:
        """Return whether only the distribution of the request's tokens is known."""
        speculation = self._engine.config.speculation
        rejects = speculation is not None and speculation.acceptance == REJECTION
        return rejects and not request.params.greedy

    def _check_support(self, record: ChoiceRecord, delta: Delta, where: str) -> None:
        """Check that each new token was possible in its context, and where the output ends."""
        request, params, tokens = record.request, record.request.params, record.tokens
        end_ids = () if params.ignore_eos else (self._model.eos_token(),)
        for count in range(len(tokens) - len(delta.tokens), len(tokens)):
            logits = self._model.context_logits([*request.prompt, *tokens[:count]])
            allowed = process_logits(logits, params, request.prompt, tokens[:count], end_ids)
            p = probabilities(filter_logits(allowed, params)).get(tokens[count], 0.0)
            assert p > 0.0, f"{where}: {tokens[count]} cannot be at {count}"
        is_prompt_logprobs = delta.finish is None and not delta.tokens
        if is_prompt_logprobs or delta.finish in (FinishReason.ABORT, FinishReason.ERROR):
            return
        stops = (*end_ids, *params.stop_token_ids)
        ends = [i for i, t in enumerate(tokens, 1) if t in stops and i >= params.min_tokens]
        want = None
        if ends:
            want = FinishReason.STOP
        elif len(tokens) >= record.max_tokens:
            want = FinishReason.LENGTH
        assert delta.finish == want, f"{where}: {tokens} ended by {delta.finish}, not {want}"
        assert ends in ([], [len(tokens)]) and len(tokens) <= record.max_tokens, (
            f"{where}: {tokens}"
        )

    def _count_events(self, plan: StepPlan) -> None:
        """Count the plan's events, and check the limits on preemptions and retries."""
        reached = self.reached
        for event in plan.preempted:
            reached["preempted"] += 1
            if event.why.endswith("free"):
                self._preemption_counts[event.seq_id] += 1
                num_preemptions = self._preemption_counts[event.seq_id]
                reached["preempted 8 times"] += num_preemptions == ALLOWED_PREEMPTIONS
                assert num_preemptions <= ALLOWED_PREEMPTIONS, (
                    f"sequence {event.seq_id} was preempted {num_preemptions} times"
                )
            elif event.why.startswith("the model failed"):
                self._retry_counts[event.seq_id] += 1
                reached["retried"] += 1
                assert self._retry_counts[event.seq_id] <= 1, (
                    f"sequence {event.seq_id} was retried twice"
                )
        self._check_admission_order(plan)
        for event in plan.admitted:
            reached["forked"] += event.why.startswith("forked")
            reached["prefix hit"] += not event.why.startswith("forked") and ", 0 " not in event.why
        scheduler = self._engine.scheduler
        computing = scheduler.prefix_cache.blocks_in_progress
        reached["raced"] += any(h in computing for s in scheduler.waiting for h in s.hashes)

    def _check_admission_order(self, plan: StepPlan) -> None:
        """Check that sequences of a class are admitted in order of arrival.

        A sequence may wait for a prefix in progress, or for a sibling to fork from: those are left
        out.
        """
        scheduler = self._engine.scheduler
        new = [event.seq_id for event in plan.admitted if event.why.startswith("new")]
        if not new or not self._is_fifo or scheduler.config.enable_prefix_caching:
            return
        for s in scheduler.waiting:
            if not s.epoch and s.params.n == 1:
                overtaking = [
                    i for i in new if i > s.id and self._priority_of[i] == s.request.priority
                ]
                assert not overtaking, f"{overtaking} were admitted, and {s.id} came before them"

    def _count_boundary_lengths(self, request: Request, min_len: int, max_len: int) -> None:
        """Count the lengths at limits, where one token more or less is another case."""
        config, length = self._engine.config, len(request.prompt)
        self.reached["prompt of whole blocks"] += length % config.block_size == 0
        self.reached["prompt of whole chunks"] += length % config.max_num_batched_tokens == 0
        self.reached["longest sequence"] += min_len == max_len
        self.reached["no output"] += request.params.max_tokens == 0

    def _count_draft_outcomes(
        self, plan: StepPlan, output: StepOutput, deltas: list[Delta]
    ) -> None:
        """Count the outcomes of drafts, and the ends among accepted drafts."""
        reached, emitted = self.reached, []
        for row, out in zip(plan.rows, output.rows, strict=False):
            if row.drafts and out.tokens:
                emitted.append(out.tokens)
                reached["all drafts accepted"] += len(out.tokens) == len(row.drafts) + 1
                reached["no draft accepted"] += len(out.tokens) == 1
        for delta in deltas:
            num_tokens = len(delta.tokens)
            if num_tokens > 1 and delta.finish is not None:
                reached[f"{delta.finish.value} among drafts"] += 1
                reached["end inside accepted drafts"] += any(
                    tokens[:num_tokens] == delta.tokens and len(tokens) > num_tokens
                    for tokens in emitted
                )


def _check_prefix(got: Iterable[object], want: Iterable[object], where: str) -> None:
    """Check that `got` is a prefix of `want`."""
    want = list(want)
    for index, each in enumerate(got):
        assert index < len(want), f"{where}: {each} is one too many"
        assert each == want[index], f"{where}: {each} at {index}, not {want[index]}"
