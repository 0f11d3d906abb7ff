"""The loop: schedule, forward, commit. One engine, one loop, plans in flight up to `depth`.

Owns the queue of (plan, pending step) and the last check of a request against the model. Knows no
thread, socket or clock: `step()` is called by a thread (AsyncLLM), a loop (LLM) or a simulator.

    depth 1   |P0|-- step 0 --|C0||P1|-- step 1 --|C1|        the host waits for the device
    depth 2   |P0||P1|        |C0||P2|      |C1||P3|          P = schedule, C = commit
              [---- step 0 ---][---- step 1 ---][--- step 2    the device never waits

Every submitted request ends each of its choices with exactly one Delta that has a finish reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from forge.absent_model import AbsentModel
from forge.config import EngineConfig
from forge.drafting import create_drafter
from forge.engine_checks import (
    check_config,
    check_pool_sizes,
    check_request,
    require_sleep,
    require_weight_updates,
)
from forge.errors import (
    DuplicateRequest,
    EngineDead,
    EnginePaused,
    ForgeError,
    InvalidConfig,
)
from forge.failure_log import FailureLog
from forge.grammar_backend import GrammarBackend, create_grammar_backend
from forge.kv_events import KVEventLog, KVEventSink
from forge.matchers import Matchers
from forge.pause import PauseMode
from forge.pause_state import PauseState
from forge.policy import FCFS, Policy
from forge.proposers import Proposer
from forge.recorder import Recorder
from forge.request import Delta, FinishReason, Request
from forge.scheduler import Scheduler
from forge.seam import Model, PendingStep, StepPlan
from forge.sessions import SessionKey
from forge.steps_in_flight import StepsInFlight
from forge.stop_strings import create_stop_checker
from forge.tokenizer import Tokenizer
from forge.uniform_steps import FastForward
from forge.weight_versions import WeightVersions
from forge.weights import PartTimes, Sleeps, WeightSource


class Engine:
    """Serves requests on one model. Not thread-safe: one thread calls everything.

    recorder    receives everything that decisions depend on. May be set before the first call, and
                between steps where it needs nothing that came before
    kv_events   receives the changes of the prefix cache, after each call that made some; those of a
                call that raises come with the next ones
    recording_failures   failures of the file that `recorder` writes, which end the recording alone
    proposer    replaces the proposer that `config.speculation` names
    weights     version of the weights
    pause_state whether the engine is paused, and what waits for the end of the pause
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
        recording_failures: FailureLog | None = None,
    ) -> None:
        check_config(config, model)
        self.model: Model = model
        self.config = config
        self.tokenizer = tokenizer
        self.num_steps = 0
        self.kv_event_sink = kv_events
        self._kv_event_log = None if kv_events is None else KVEventLog(config.block_size)
        self._matchers = Matchers(lambda: self.grammar_backend, tokenizer, model.vocab_size())
        self.scheduler = Scheduler(
            config,
            model.vocab_size(),
            (model.eos_token(), *config.end_ids),
            policy,
            lambda request: create_stop_checker(self.tokenizer, request),
            self._matchers.create,
            create_drafter(config, proposer),
            self._kv_event_log,
        )
        self._in_flight = StepsInFlight()
        self._undelivered_deltas: list[Delta] = []
        self.recorder = recorder
        self.recording_failures = recording_failures
        self.weights = WeightVersions()
        self.pause_state = PauseState()

    @property
    def has_work(self) -> bool:
        """True while `step` has a plan to make, a result to read or a delta to return."""
        return bool(
            self.scheduler.has_work
            or self._in_flight
            or self._undelivered_deltas
            or self.pause_state.held_requests
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
        if self.pause_state.mode is None:
            return False
        return self.scheduler.is_frozen or not (self.scheduler.has_work or self._in_flight)

    @property
    def undelivered_deltas(self) -> tuple[Delta, ...]:
        """Deltas that the next `step` returns, of requests aborted since the last one."""
        return tuple(self._undelivered_deltas)

    @property
    def plans_in_flight(self) -> list[StepPlan]:
        """Plans whose results are not read yet, oldest first."""
        return self._in_flight.plans

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
        if self.pause_state.mode is not None:
            structure, grammar = request.params.structure, None
            if structure is not None:  # `resume` would compile it on this thread
                grammar = self.grammar_backend.compiled_grammar(structure)
            self.pause_state.hold(request, self.scheduler.requests, grammar)
            return
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.record_submit(request)

    def check(self, request: Request) -> None:
        """Raise what `submit` would, except for a duplicate id. Any thread may call this.

        Front ends check before they queue a request. The engine checks again, since it must not
        depend on them. A structure is compiled here, once.
        """
        check_request(request, self.model, self.config, self.tokenizer)
        if request.params.structure is not None:
            self.grammar_backend.check(request.params.structure)
        self.scheduler.max_len(request)

    @cached_property
    def grammar_backend(self) -> GrammarBackend:
        """The backend for this engine's tokens.

        Raises InvalidRequest where there is no tokenizer.
        """
        end_ids = (self.model.eos_token(), *self.config.end_ids)
        return create_grammar_backend(self.tokenizer, self.model.vocab_size(), end_ids)

    def abort(self, request_id: int) -> None:
        """End the request's open choices at the next step. Unknown and ended ids change nothing."""
        held = self.pause_state.release(request_id)
        if held is not None:
            self._end_held(held, FinishReason.ABORT, None)
            return
        self._undelivered_deltas += self.weights.label(self.scheduler.abort(request_id))
        if self.recorder is not None:
            self.recorder.record_abort(request_id)

    def close(self) -> None:
        """Let go of the model and of the steps in flight, whose memory is free then.

        Open requests end nowhere: abort them first. Only checks of requests may follow.
        """
        self._in_flight.replace(())
        self.model = AbsentModel.from_model(self.model)

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
        the session closes when that ends, also where the request waits for the end of a pause.
        """
        if self.pause_state.end_session(key):
            return True
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
        check_pool_sizes(num_blocks, num_host_blocks, self.config)
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
        self.pause_state.mode = mode
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
        if self.pause_state.mode is None:
            return
        self.pause_state.check_can_end()
        if self.recorder is not None:
            self.recorder.record_resume()
        self.scheduler.unfreeze()
        for request in self.pause_state.end():
            try:
                self.submit(request)
            except ForgeError as error:  # the pool was resized meanwhile
                self.pause_state.release(request.id)
                self._end_held(request, FinishReason.ERROR, str(error))
            else:
                self.pause_state.release(request.id)

    def update_weights(
        self, source: WeightSource, version: str | None = None, *, namespace: str
    ) -> str:
        """Replace weights between two steps, and return their version.

        Open requests go on with the new weights: their tokens stay, and all keys and values are
        computed again. No block of before is used by a later request, in any tier.

        version     name of the weights; None: the next number
        namespace   replaces `EngineConfig.cache_namespace`; each update needs a new one, since
                    files outlive the engine
        Raises InvalidWeights or InvalidConfig for a source that does not match, EnginePaused while
        the model sleeps or a WAIT still waits, and changes nothing then. Raises EngineDead where
        the update failed halfway.
        """
        model, state = require_weight_updates(self.model), self.pause_state
        version = self.weights.next_version(version)
        state.check_awake()
        if state.mode is None:
            self.pause(PauseMode.KEEP)
            try:
                return self.update_weights(source, version, namespace=namespace)
            finally:
                if not state.lacks_weights:  # else the update failed halfway
                    self.resume()
        self._check_paused()
        with state.changing_model("an update of the weights"):
            model.update_weights(source)
        state.lacks_weights = False
        self.weights.advance(version, self.scheduler.sequences.values())
        self.scheduler.discard_kv(f"weights {version}", namespace)
        self._deliver_kv_events()
        if self.recorder is not None:
            self.recorder.record_weights(version, namespace)
        return version

    def sleep(self, level: int) -> PartTimes:
        """Release the device's memory until `wake`, and return the seconds of each part.

        The content of all blocks is dropped, in every tier. Requests that the pause keeps go on
        after `wake` and `resume`.

        level   1 moves the weights to host memory; 2 drops them, and all must be updated after
                `wake`
        Raises InvalidConfig, or EnginePaused for an engine that is not paused, and changes nothing
        then. Raises EngineDead where the sleep failed halfway.
        """
        model = require_sleep(self.model, level)
        self._check_paused()
        self.pause_state.check_awake()
        with self.pause_state.changing_model("a sleep"):
            times = model.sleep(level)
        self.scheduler.freeze()
        self.scheduler.discard_kv("the model sleeps", self.scheduler.prefix_cache.namespace)
        self._deliver_kv_events()
        if self.recorder is not None:
            self.recorder.record_sleep(level)
        self.pause_state.sleep_level = level
        return times

    def wake(self) -> PartTimes:
        """Allocate what `sleep` released, and return the seconds of each part. `resume` follows.

        Raises EnginePaused where the model does not sleep.
        """
        model = self.model
        if not self.pause_state.sleep_level or not isinstance(model, Sleeps):
            raise EnginePaused("the model is awake. Call sleep first")
        with self.pause_state.changing_model("a wake"):
            times = model.wake()
        self.pause_state.end_sleep()
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
        if request.session_end:
            self.end_session((request.tenant, request.session_id))

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
                self._in_flight.launch(plan, self.model)
            if self._in_flight and (plan is None or len(self._in_flight) >= self.config.depth):
                ready = self._in_flight.take_oldest()
                self._matchers.advance(*ready, self.scheduler.sequences)
        except BaseException as error:  # also Ctrl-C: ledger and queue must agree
            self._in_flight.replace(())
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
        self._in_flight.replace((plan, launch(plan)) for plan in self.scheduler.ledger)
        self.num_steps += steps
        self._deliver_kv_events()
        return result

    def _deliver_kv_events(self) -> None:
        if self._kv_event_log is not None and self.kv_event_sink is not None:
            events = self._kv_event_log.take()
            if events:
                self.kv_event_sink(events)
