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

from forge.config import MAX_GEOMETRY, EngineConfig
from forge.cpu_count import num_usable_cpus
from forge.drafting import create_drafter
from forge.errors import (
    DuplicateRequest,
    EngineDead,
    EnginePaused,
    ForgeError,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
)
from forge.feedback_queue import QueueLevel
from forge.kv_events import KVEventLog, KVEventSink
from forge.pause import PauseMode
from forge.policy import FCFS, Policy
from forge.proposers import Proposer
from forge.request import Delta, FinishReason, Request, SamplingParams, Structure
from forge.scheduler import Scheduler
from forge.seam import (
    Model,
    PendingStep,
    StepOutput,
    StepPlan,
    executes_moves,
    samples_late_rows,
)
from forge.sequence import GrammarMatcher, StopChecker
from forge.sessions import SessionKey
from forge.tokenizer import StopStringDetokenizer, Tokenizer, Vocabulary
from forge.uniform_steps import FastForward
from forge.weight_versions import WeightVersions
from forge.weights import PartTimes, Sleeps, UpdatesWeights, WeightSource


def _check_output(plan: StepPlan, output: StepOutput) -> StepOutput:
    """Return the output if it is of this plan. Raises ValueError otherwise."""
    if (output.step, len(output.rows)) != (plan.step, len(plan.rows)):
        raise ValueError(
            f"step {output.step} with {len(output.rows)} rows is no result of step {plan.step} "
            f"with {len(plan.rows)}"
        )
    return output


class StopStringChecker:
    """Decodes one output as it grows, and finds the end of a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._text = StopStringDetokenizer(
            tokenizer.create_detokenizer(), params.stop, params.min_tokens
        )

    def feed(self, token: int) -> bool:
        """Append a token, and return whether a stop string is complete."""
        self._text.push(token)
        return self._text.matched_stop is not None


class GrammarBackend(Protocol):
    """Compiles structures and creates the matchers of outputs. Any thread may call it."""

    def vocabulary(self) -> Vocabulary:
        """Return the tokens for which structures are compiled."""
        ...

    def mark_compilable(self, structure: Structure, level: QueueLevel) -> None:
        """Let `check` accept the structure at once: another process compiled it on this level."""
        ...

    def compilable_level(self, structure: Structure) -> QueueLevel | None:
        """Return the level on which the structure was accepted, or None."""
        ...

    def check(self, structure: Structure) -> None:
        """Raise InvalidRequest unless an output can have this structure. May take seconds."""
        ...

    def compile(self, structure: Structure, level: QueueLevel | None) -> object:
        """Compile the structure in this process, and return an object that keeps it compiled.

        Raises InvalidRequest. May take seconds, within the limits of the level if that is known.
        """
        ...

    def compiled_grammar(self, structure: Structure) -> object | None:
        """Return an object that keeps the structure compiled while referenced, or None.

        None: it is not compiled. Otherwise `create_matcher` returns at once.
        """
        ...

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> GrammarMatcher:
        """Return the matcher of a new output.

        allow_end   an end id is allowed where the text is complete
        """
        ...

    def advance_matchers(self, pairs: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Do the work of the next `feed` of each matcher, which has this token, if that is faster.

        Errors are raised by `feed`.
        """
        ...


class Recorder(Protocol):
    """Receives, in order, everything that an engine's decisions depend on. See forge.recording."""

    def record_submit(self, request: Request) -> None:
        """Record a request that was accepted."""
        ...

    def record_abort(self, request_id: int) -> None:
        """Record that `abort` was called."""
        ...

    def record_reset(self) -> None:
        """Record that the prefix cache was reset."""
        ...

    def record_pause(self, mode: PauseMode) -> None:
        """Record that the engine was paused, before the steps in flight are committed."""
        ...

    def record_resume(self) -> None:
        """Record the end of a pause, before the requests that came meanwhile."""
        ...

    def record_weights(self, version: str, namespace: str) -> None:
        """Record an update of the weights, and the namespace of later blocks."""
        ...

    def record_sleep(self, level: int) -> None:
        """Record that the content of all blocks was dropped, with the model's memory."""
        ...

    def record_resize(self, num_blocks: int | None, num_host_blocks: int | None) -> None:
        """Record the new sizes of the pools; None: unchanged."""
        ...

    def record_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Record the keys of the files that are there at the start."""
        ...

    def record_end_session(self, key: SessionKey) -> None:
        """Record that a client ended a session."""
        ...

    def record_expire_session(self, key: SessionKey, last_turn: int) -> None:
        """Record that a timer closed a session after the turn of that number."""
        ...

    def record_plan(self, plan: StepPlan | None) -> None:
        """Record what `schedule()` returned."""
        ...

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Record an output and the deltas of its commit."""
        ...

    def record_void(self, why: str) -> None:
        """Record that the model failed, which voids every plan in flight."""
        ...


class Engine:
    """Serves requests on one model. Not thread-safe: one thread calls everything.

    recorder    receives everything that decisions depend on. May be set before the first call
    kv_events   receives the changes of the prefix cache, after each call that made some; those of a
                call that raises come with the next ones
    proposer    replaces the proposer that `config.speculation` names
    weights     version of the weights
    pause_mode  how the engine was paused; None: it is not
    sleep_level level of the model's sleep; 0: it is awake
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
        kv_events: KVEventSink | None = None,
    ) -> None:
        for token in config.end_ids:
            if not 0 <= token < model.vocab_size():
                raise InvalidConfig(
                    "end_ids",
                    f"{token} is not below the vocabulary size {model.vocab_size()}",
                    "Give ids of this model",
                )
        if config.host_tier is not None and not executes_moves(model):
            raise InvalidConfig(
                "host_tier",
                "this model has no pool of blocks in host memory",
                "Leave host_tier out, or use a model that executes moves",
            )
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.num_steps = 0
        self.kv_event_sink = kv_events
        self._kv_event_log = None if kv_events is None else KVEventLog(config.block_size)
        self.scheduler = Scheduler(
            config,
            model.vocab_size(),
            (model.eos_token(), *config.end_ids),
            policy,
            self._create_stop_checker,
            self._create_matcher,
            create_drafter(config, proposer),
            self._kv_event_log,
        )
        self._has_created_matchers = False
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._undelivered_deltas: list[Delta] = []
        self.recorder = recorder
        self.weights = WeightVersions()
        self.pause_mode: PauseMode | None = None
        self.sleep_level = 0
        self._lacks_weights = False
        self._held_requests: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        """True while `step` has a plan to make, a result to read or a delta to return."""
        return bool(
            self.scheduler.has_work
            or self._in_flight
            or self._undelivered_deltas
            or self._held_requests
        )

    @property
    def can_step(self) -> bool:
        """True while `step` would change something.

        False without work, and while the policy lets all requests wait for a paused session:
        then a request, an abort or the end of a session must come first. False in a pause too.
        """
        return bool(self.scheduler.can_plan or self._in_flight or self._undelivered_deltas)

    @property
    def is_paused(self) -> bool:
        """True in a pause, once no step is in flight and none follows."""
        if self.pause_mode is None:
            return False
        return self.scheduler.is_frozen or not (self.scheduler.has_work or self._in_flight)

    @property
    def num_held_requests(self) -> int:
        """Requests that wait for the end of a pause, in addition to those of the scheduler."""
        return len(self._held_requests)

    @property
    def undelivered_deltas(self) -> tuple[Delta, ...]:
        """Deltas that the next `step` returns, of requests aborted since the last one."""
        return tuple(self._undelivered_deltas)

    @property
    def plans_in_flight(self) -> list[StepPlan]:
        """Plans whose results are not read yet, oldest first."""
        return [plan for plan, _ in self._in_flight]

    def is_ending(self, request_id: int) -> bool:
        """Return whether a last delta of the request is undelivered: its id is still in use."""
        return any(delta.request_id == request_id for delta in self._undelivered_deltas)

    def submit(self, request: Request) -> None:
        """Queue the request. Raises InvalidRequest, and changes nothing then.

        In a pause the request is held, and reaches the scheduler with `resume`.
        """
        self.check(request)
        if self.is_ending(request.id):
            raise DuplicateRequest("id", f"request {request.id} is still ending", "Use a new id")
        if self.pause_mode is not None:
            if request.id in self._held_requests or request.id in self.scheduler.requests:
                raise DuplicateRequest("id", f"request {request.id} is live", "Use a new id")
            self._held_requests[request.id] = request
            return
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.record_submit(request)

    def check(self, request: Request) -> None:
        """Raise what `submit` would, except for a duplicate id. Any thread may call this.

        Front ends check before they queue a request. The engine checks again, since it must not
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
            if self.config.depth > 1 and not samples_late_rows(self.model):
                raise InvalidRequest(
                    "structure",
                    f"this model does not sample late rows (StepPlan.late_rows), which come with "
                    f"{self.config.depth} plans in flight",
                    "Give the model samples_late_rows(), or start with depth 1",
                )
            self.grammar_backend.check(params.structure)
        self.scheduler.max_len(request)

    @cached_property
    def grammar_backend(self) -> GrammarBackend:
        """The backend for this engine's tokens.

        Raises InvalidRequest where there is no tokenizer.
        """
        # llguidance is imported where a structure is used.
        from forge.mask_threads import num_mask_threads
        from forge.structured_output import LLGuidanceBackend

        if self.tokenizer is None:
            raise InvalidRequest("structure", "this engine has no tokenizer", "Give it one")
        model = self.model
        end_ids = (model.eos_token(), *self.config.end_ids)
        return LLGuidanceBackend(
            self.tokenizer, model.vocab_size(), end_ids, num_mask_threads(num_usable_cpus())
        )

    def abort(self, request_id: int) -> None:
        """End the request's open choices at the next step. Unknown and ended ids change nothing."""
        held = self._held_requests.pop(request_id, None)
        if held is not None:
            self._end_held(held, FinishReason.ABORT, None)
            return
        self._undelivered_deltas += self.weights.label(self.scheduler.abort(request_id))
        if self.recorder is not None:
            self.recorder.record_abort(request_id)

    def add_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Let sequences fetch blocks of these keys from files, the one used longest ago first.

        Call it before the first request, with the keys of the files that are there. Raises
        InvalidConfig for an engine without a disk tier.
        """
        if self.config.host_tier is None or self.config.host_tier.disk is None:
            raise InvalidConfig(
                "host_tier", "this engine has no disk tier for keys of files", "Set HostTier.disk"
            )
        self.scheduler.disk_cache.add_keys(keys)
        self._deliver_kv_events()
        if self.recorder is not None:
            self.recorder.record_disk_keys(keys)

    def end_session(self, key: SessionKey) -> bool:
        """End a session for its client, and return whether it was open.

        Its blocks that no other session has are evicted first from then on. With a live request
        the session closes when that ends.
        """
        was_open = self.scheduler.end_session(key)
        if was_open and self.recorder is not None:
            self.recorder.record_end_session(key)
        return was_open

    def expire_session(self, key: SessionKey, last_turn: int) -> bool:
        """Close a session that is paused since its turn `last_turn`. Return whether it was.

        Timers call it `config.session_ttl_s` after the session paused.
        """
        has_expired = self.scheduler.expire_session(key, last_turn)
        if has_expired and self.recorder is not None:
            self.recorder.record_expire_session(key, last_turn)
        return has_expired

    def resize(self, num_blocks: int | None = None, num_host_blocks: int | None = None) -> None:
        """Resize the pool on the device, the host pool or both, from the next plan on.

        Sequences that hold or load a removed block are preempted. Raises NeverFits, or
        InvalidConfig, and changes nothing then. A model may have memory for
        `config.num_blocks` blocks only: it fails at the next plan with more.
        """
        max_blocks = MAX_GEOMETRY["num_blocks"]
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("num_host_blocks", num_host_blocks, 0),
        ):
            if value is not None and (type(value) is not int or not least <= value <= max_blocks):
                raise InvalidConfig(
                    name,
                    f"{str(value)[:32]} is not an integer from {least} to {max_blocks}",
                    "Give one",
                )
        if num_host_blocks is not None and self.config.host_tier is None:
            raise InvalidConfig(
                "num_host_blocks",
                "this engine has no host pool to resize",
                "Start it with kv_host_gib, or leave this out",
            )
        if num_blocks is not None:
            self.scheduler.resize(num_blocks)
        if num_host_blocks is not None:
            self.scheduler.resize_host(num_host_blocks)
        self._deliver_kv_events()
        if self.recorder is not None:
            self.recorder.record_resize(num_blocks, num_host_blocks)

    def reset_prefix_cache(self) -> None:
        """Share nothing computed so far with later requests, in any tier.

        Files stay in their folder. This engine does not read them, and a later one does.
        """
        self.scheduler.reset_prefix_cache()
        self._deliver_kv_events()
        if self.recorder is not None:
            self.recorder.record_reset()

    # Pauses.

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests until `resume`, and stop: see PauseMode for those that are open.

        The steps in flight are committed before this returns; `step` returns their deltas. With
        WAIT further steps follow until `is_paused`. A second call changes the mode: KEEP or ABORT
        can follow a WAIT that takes too long.
        """
        if mode is PauseMode.WAIT and self.is_paused:
            return  # nothing is left to wait for, or it would wait for frozen requests
        if self.recorder is not None:
            self.recorder.record_pause(mode)
        self.pause_mode = mode
        if mode is PauseMode.WAIT:
            return
        self.scheduler.freeze()
        self._drain()
        if mode is PauseMode.ABORT:
            for request_id in list(self.scheduler.requests):
                self.abort(request_id)

    def resume(self) -> None:
        """End a pause: kept requests go on, and those that came meanwhile are queued.

        Raises EnginePaused while the model sleeps, or lacks weights after it.
        """
        if self.pause_mode is None:
            return
        if self.sleep_level:
            raise EnginePaused("the model sleeps. Wake it first")
        if self._lacks_weights:
            raise EnginePaused(
                "the model lacks weights, after a sleep or a failure. Update them all"
            )
        if self.recorder is not None:
            self.recorder.record_resume()
        self.pause_mode = None
        self.scheduler.unfreeze()
        held, self._held_requests = self._held_requests, {}
        for request in held.values():
            try:
                self.submit(request)
            except ForgeError as error:  # the pool was resized meanwhile
                self._end_held(request, FinishReason.ERROR, str(error))

    def update_weights(
        self, source: WeightSource, version: str | None = None, *, namespace: str
    ) -> str:
        """Replace weights between two steps, and return their version.

        Open requests go on with the new weights: their tokens stay, and all keys and values are
        computed again. No block of before is used by a later request, in any tier.

        version     name of the weights; None: the number of updates
        namespace   replaces `EngineConfig.cache_namespace`; each update needs a new one, since
                    files outlive the engine
        Raises InvalidWeights or InvalidConfig for a source that does not match, EnginePaused while
        the model sleeps or a WAIT still waits, and changes nothing then. Raises EngineDead where
        the update failed halfway.
        """
        model, recorder = self.model, self.recorder
        if not isinstance(model, UpdatesWeights):
            raise InvalidConfig(
                "weights", "those of this model are fixed", "Start again with the new weights"
            )
        version = self.weights.next_version(version)
        if self.sleep_level:
            raise EnginePaused("the model sleeps. Wake it first")
        if self.pause_mode is None:
            self.pause(PauseMode.KEEP)
            try:
                return self.update_weights(source, version, namespace=namespace)
            finally:
                if not self._lacks_weights:  # else the update failed halfway
                    self.resume()
        self._check_paused()
        lacked_weights, self._lacks_weights = self._lacks_weights, True
        try:
            model.update_weights(source)
        except InvalidWeights:
            self._lacks_weights = lacked_weights
            raise
        except Exception as error:
            raise EngineDead(f"an update of the weights failed halfway: {error!r}") from error
        self._lacks_weights = False
        self.weights.advance(version, self.scheduler.sequences.values())
        self.scheduler.discard_kv(f"weights {version}", namespace)
        self._deliver_kv_events()
        if recorder is not None:
            recorder.record_weights(version, namespace)
        return version

    def sleep(self, level: int) -> PartTimes:
        """Release the device's memory until `wake`, and return the seconds of each part.

        The content of all blocks is dropped, in every tier. Requests that the pause keeps go on
        after `wake` and `resume`.

        level   1 moves the weights to host memory; 2 drops them, and all must be updated after
                `wake`
        Raises InvalidConfig, or EnginePaused for an engine that is not paused.
        """
        model = self.model
        if not isinstance(model, Sleeps):
            raise InvalidConfig("sleep", "this model cannot release its memory", "End the engine")
        if type(level) is not int or level not in (1, 2):
            raise InvalidConfig("level", f"{str(level)[:32]} is not 1 or 2", "Give 1 or 2")
        self._check_paused()
        if self.sleep_level:
            raise EnginePaused("the model sleeps already. Wake it first")
        self.scheduler.freeze()
        self.scheduler.discard_kv("the model sleeps", self.scheduler.prefix_cache.namespace)
        self._deliver_kv_events()
        if self.recorder is not None:
            self.recorder.record_sleep(level)
        self.sleep_level = level
        return model.sleep(level)

    def wake(self) -> PartTimes:
        """Allocate what `sleep` released, and return the seconds of each part. `resume` follows.

        Raises EnginePaused where the model does not sleep.
        """
        model = self.model
        if not self.sleep_level or not isinstance(model, Sleeps):
            raise EnginePaused("the model is awake. Call sleep first")
        times = model.wake()
        self._lacks_weights = self._lacks_weights or self.sleep_level == 2
        self.sleep_level = 0
        return times

    def _check_paused(self) -> None:
        if not self.is_paused:
            raise EnginePaused(
                f"the engine runs {len(self.scheduler.requests)} requests. "
                "Wait for the pause to begin, or pause with mode keep"
            )

    def _drain(self) -> None:
        """Commit every plan in flight, and keep the deltas for the next `step`."""
        deltas: list[Delta] = []
        try:
            while self._in_flight:
                deltas += self.step()
        finally:
            self._undelivered_deltas = deltas + self._undelivered_deltas

    def _end_held(self, request: Request, finish: FinishReason, error: str | None) -> None:
        self._undelivered_deltas += self.weights.label(
            [
                Delta(request.id, choice, finish=finish, error=error)
                for choice in range(request.params.n)
            ]
        )

    def step(self) -> list[Delta]:
        """Plan and launch once if there is something to compute; commit the oldest plan if due.

        A model that raises voids every plan in flight: its sequences are computed again, once.
        EngineDead and InvalidConfig are raised: a later step would fail the same way.
        """
        plan, recorder = None, self.recorder
        if self.scheduler.can_plan:
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
        except BaseException as error:  # also Ctrl-C: ledger and queue must agree
            self._in_flight.clear()
            self.num_steps += 1
            why = f"the model failed: {error!r}"
            deltas += self.weights.label(self.scheduler.void(why))
            if recorder is not None:
                recorder.record_void(why)
            if isinstance(error, Exception) and not isinstance(error, InvalidConfig | EngineDead):
                self._deliver_kv_events()
                return deltas  # requests survive one failed step
            self._undelivered_deltas = deltas
            raise
        if ready is not None:
            self.num_steps += 1
            if self._has_created_matchers:
                self._advance_matchers(*ready)
            committed_deltas = self.scheduler.commit(*ready)
            if recorder is not None:
                recorder.record_commit(ready[1], committed_deltas)
            deltas += self.weights.label(committed_deltas)
        self._deliver_kv_events()
        return deltas

    def num_uniform_steps(self, token: int) -> int:
        """Return for how many steps nothing is decided and each running sequence gains one `token`.

        0 while deltas are undelivered or a recorder is set. For simulation; see `fast_forward`.
        """
        if self._undelivered_deltas or self.recorder is not None:
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
        self._deliver_kv_events()
        return result

    def _deliver_kv_events(self) -> None:
        if self._kv_event_log is not None and self.kv_event_sink is not None:
            events = self._kv_event_log.take()
            if events:
                self.kv_event_sink(events)

    def _create_stop_checker(self, params: SamplingParams) -> StopChecker | None:
        if not params.stop or self.tokenizer is None:
            return None
        return StopStringChecker(self.tokenizer, params)

    def _create_matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        if params.structure is None:
            return None
        self._has_created_matchers = True
        try:
            return self.grammar_backend.create_matcher(
                params.structure, allow_end=not params.ignore_eos
            )
        except ForgeError:
            raise
        except Exception as error:  # of the library, for this request only
            raise InvalidRequest("structure", f"it failed: {error!r}", "Fix it") from error

    def _advance_matchers(self, plan: StepPlan, output: StepOutput) -> None:
        """Let the matchers of the plan's rows do the work of their tokens, before the commit.

        A token that the commit may not feed is left out, and so are those of rows with drafts.
        """
        sequences, vocab_size = self.scheduler.sequences, self.model.vocab_size()
        pairs = []
        for row, result in zip(plan.rows, output.rows, strict=True):
            sequence = sequences.get(row.seq_id)
            if sequence is None or sequence.matcher is None or row.drafts or row.num_samples != 1:
                continue
            if result.error is None and len(result.tokens) == 1:
                token = result.tokens[0]
                if 0 <= token < vocab_size and token not in sequence.stop_ids:
                    pairs.append((sequence.matcher, token))
        if pairs:
            self.grammar_backend.advance_matchers(pairs)

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        vocab_size = self.model.vocab_size()
        # The ids of a range lie between its ends.
        for token in (ids[0], ids[-1]) if isinstance(ids, range) else ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidRequest(
                    field,
                    f"{token!r} is not a token id below {vocab_size}",
                    "Give ids of this model's vocabulary",
                    "token_out_of_range",
                )
