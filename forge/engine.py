"""The loop: schedule, forward, commit. One engine, one loop, plans in flight up to `depth`.

Owns the queue of (plan, pending step) and the last check of a request against the model. Knows no
thread, socket or clock: `step()` is called by a thread (AsyncLLM), a loop (LLM) or a simulator.

    depth 1   |P0|-- step 0 --|C0||P1|-- step 1 --|C1|        the host waits for the device
    depth 2   |P0||P1|        |C0||P2|      |C1||P3|          P = schedule, C = commit
              [---- step 0 ---][---- step 1 ---][--- step 2    the device never waits

Every submitted request ends each of its choices with exactly one Delta that has a finish reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

from forge.config import EngineConfig
from forge.drafting import create_drafter
from forge.errors import DuplicateRequest, ForgeError, InvalidConfig, InvalidRequest
from forge.feedback_queue import QueueLevel
from forge.policy import FCFS, Policy
from forge.proposers import Proposer
from forge.request import Delta, Request, SamplingParams, Structure
from forge.scheduler import Scheduler
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from forge.sequence import GrammarMatcher, StopChecker
from forge.tokenizer import StopStringDetokenizer, Tokenizer, Vocabulary
from forge.uniform_steps import FastForward


def _check_output(plan: StepPlan, output: StepOutput) -> StepOutput:
    """The output, which is this plan's. Raises ValueError for any other."""
    if (output.step, len(output.rows)) != (plan.step, len(plan.rows)):
        raise ValueError(
            f"step {output.step} with {len(output.rows)} rows is no result of step {plan.step} "
            f"with {len(plan.rows)}"
        )
    return output


class StopStringChecker:
    """Decodes one output as it grows and says when a stop string is complete."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._text = StopStringDetokenizer(
            tokenizer.create_detokenizer(), params.stop, params.min_tokens
        )

    def feed(self, token: int) -> bool:
        """True once a stop string is complete."""
        self._text.push(token)
        return self._text.matched_stop is not None


class GrammarBackend(Protocol):
    """Makes the guides of outputs with a structure. Any thread may call it."""

    def vocabulary(self) -> Vocabulary:
        """Return the tokens that structures are compiled for."""
        ...

    def mark_compilable(self, structure: Structure, lane: QueueLevel) -> None:
        """Let `check` return at once: another process compiled the structure within this lane."""
        ...

    def compilable_level(self, structure: Structure) -> QueueLevel | None:
        """Return the lane with which the structure was accepted, if it was."""
        ...

    def check(self, structure: Structure) -> None:
        """Raise InvalidRequest unless an output can have this structure. May take seconds."""
        ...

    def compile(self, structure: Structure, lane: QueueLevel) -> object:
        """Compile the structure in this process, and return what keeps it compiled.

        Raises InvalidRequest. May take seconds, within the limits of the lane.
        """
        ...

    def compiled_grammar(self, structure: Structure) -> object | None:
        """Return what keeps it compiled while that is referred to; None where it is not compiled.

        `create_matcher` returns at once where it is.
        """
        ...

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> GrammarMatcher:
        """A guide of a new output.

        With `allow_end` an end id may come where the text is complete.
        """
        ...


class Recorder(Protocol):
    """Hears, in order, of all that an engine's decisions depend on. See forge.recording."""

    def record_submit(self, request: Request) -> None:
        """The request was accepted."""
        ...

    def record_abort(self, request_id: int) -> None:
        """Somebody wanted it gone."""
        ...

    def record_reset(self) -> None:
        """The prefix cache was reset."""
        ...

    def record_plan(self, plan: StepPlan | None) -> None:
        """The scheduler was asked, and made this plan or none."""
        ...

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """The output was read, and gave these."""
        ...

    def record_void(self, why: str) -> None:
        """The model failed; every plan in flight is void."""
        ...


class Engine:
    """Serves requests on one model. Not thread-safe: one thread calls everything.

    recorder    hears of all that decisions depend on
    proposer    guesses drafts in the place of what `config.speculation` names
    num_steps   plans committed or voided so far: grows while the engine makes progress
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        policy: Policy = FCFS,
        proposer: Proposer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        for token in config.end_ids:
            if not 0 <= token < model.vocab_size():
                raise InvalidConfig(
                    "end_ids",
                    f"{token} is not below the vocabulary size {model.vocab_size()}",
                    "Give ids of this model",
                )
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.num_steps = 0
        self.scheduler = Scheduler(
            config,
            model.vocab_size(),
            (model.eos_token(), *config.end_ids),
            policy,
            self._create_stop_checker,
            self._create_matcher,
            create_drafter(config, proposer),
        )
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._undelivered_deltas: list[Delta] = []
        self._recorder = recorder

    @property
    def has_work(self) -> bool:
        """`step` has something to do or to tell."""
        return bool(self.scheduler.has_work or self._in_flight or self._undelivered_deltas)

    @property
    def undelivered_deltas(self) -> tuple[Delta, ...]:
        """Deltas that the next `step` returns: of requests aborted since the last one."""
        return tuple(self._undelivered_deltas)

    @property
    def plans_in_flight(self) -> list[StepPlan]:
        """Plans whose results are not read yet, oldest first."""
        return [plan for plan, _ in self._in_flight]

    def is_ending(self, request_id: int) -> bool:
        """Return whether a last delta of the request is undelivered, so its id is not free yet."""
        return any(delta.request_id == request_id for delta in self._undelivered_deltas)

    def submit(self, request: Request) -> None:
        """The request will be served. Raises InvalidRequest and changes nothing otherwise."""
        self.check(request)
        if self.is_ending(request.id):
            raise DuplicateRequest("id", f"request {request.id} is still ending", "Use a new id")
        self.scheduler.add(request)
        if self._recorder is not None:
            self._recorder.record_submit(request)

    def check(self, request: Request) -> None:
        """Raise what `submit` would, but for a duplicate id. Any thread may call this.

        Front ends check before they promise anything; the engine checks again, for it must not
        depend on them. A structure is compiled here, once.
        """
        params = request.params
        self._check_ids("prompt", request.prompt)
        self._check_ids("logit_bias", tuple(token for token, _ in params.logit_bias))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop", "this engine has no tokenizer", "Use stop_token_ids, or give a tokenizer"
            )
        if params.structure is not None:
            self.grammar_backend.check(params.structure)
        self.scheduler.max_len(request)

    @cached_property
    def grammar_backend(self) -> GrammarBackend:
        """Of this engine's tokens. Raises InvalidRequest where there is no tokenizer."""
        from forge.structured_output import (
            LLGuidanceBackend,  # the library behind it: for those who ask
        )

        if self.tokenizer is None:
            raise InvalidRequest("structure", "this engine has no tokenizer", "Give it one")
        model = self.model
        return LLGuidanceBackend(
            self.tokenizer, model.vocab_size(), (model.eos_token(), *self.config.end_ids)
        )

    def abort(self, request_id: int) -> None:
        """The request's open choices end at the next step. Unknown and ended ids change nothing."""
        self._undelivered_deltas += self.scheduler.abort(request_id)
        if self._recorder is not None:
            self._recorder.record_abort(request_id)

    def reset_prefix_cache(self) -> None:
        """No request to come shares what was computed before."""
        self.scheduler.reset_prefix_cache()
        if self._recorder is not None:
            self._recorder.record_reset()

    def step(self) -> list[Delta]:
        """Plan and launch once if there is something to compute, then commit the oldest if due.

        A model that raises voids every plan in flight: its sequences are computed again, once.
        """
        plan, recorder = None, self._recorder
        if self.scheduler.has_work:
            plan = self.scheduler.schedule()
            if recorder is not None:
                recorder.record_plan(plan)
        deltas, self._undelivered_deltas = self._undelivered_deltas, []
        ready = None
        try:
            if plan is not None:
                self._in_flight.append((plan, self.model.forward(plan)))
            if self._in_flight and (plan is None or len(self._in_flight) >= self.config.depth):
                oldest, pending = self._in_flight.popleft()
                ready = (oldest, _check_output(oldest, pending.result()))
        except BaseException as fault:  # also Ctrl-C: ledger and queue must tell the same story
            self._in_flight.clear()
            self.num_steps += 1
            why = f"the model failed: {fault!r}"
            deltas += self.scheduler.void(why)
            if recorder is not None:
                recorder.record_void(why)
            if isinstance(fault, Exception) and not isinstance(fault, InvalidConfig):
                return deltas  # requests outlive one bad step
            self._undelivered_deltas = deltas
            raise
        if ready is not None:
            self.num_steps += 1
            committed_deltas = self.scheduler.commit(*ready)
            if recorder is not None:
                recorder.record_commit(ready[1], committed_deltas)
            deltas += committed_deltas
        return deltas

    def num_uniform_steps(self, token: int) -> int:
        """Return for how many steps nothing is decided and each running sequence gains one `token`.

        0 while deltas are undelivered or a recorder is set. For simulation; see `fast_forward`.
        """
        if self._undelivered_deltas or self._recorder is not None:
            return 0
        return self.scheduler.num_uniform_steps(token)

    def fast_forward(
        self, steps: int, token: int, launch: Callable[[StepPlan], PendingStep]
    ) -> FastForward:
        """Advance `steps` uniform steps at once, from a plan that `scheduler.schedule()` just made.

        launch   returns the pending step of the plan that stays in flight; the model does not run
        """
        result = self.scheduler.fast_forward(steps, token)
        self._in_flight = deque((plan, launch(plan)) for plan in self.scheduler.ledger)
        self.num_steps += steps
        return result

    def _create_stop_checker(self, params: SamplingParams) -> StopChecker | None:
        if not params.stop or self.tokenizer is None:
            return None
        return StopStringChecker(self.tokenizer, params)

    def _create_matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        if params.structure is None:
            return None
        try:
            return self.grammar_backend.create_matcher(
                params.structure, allow_end=not params.ignore_eos
            )
        except ForgeError:
            raise
        except Exception as fault:  # of a library, for one request: others have theirs
            raise InvalidRequest("structure", f"it failed: {fault!r}", "Mend it") from fault

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        vocab_size = self.model.vocab_size()
        # What a range has lies between its ends.
        for token in (ids[0], ids[-1]) if isinstance(ids, range) else ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidRequest(
                    field,
                    f"{token!r} is not a token id below {vocab_size}",
                    "Give ids of this model's vocabulary",
                    "token_out_of_range",
                )
