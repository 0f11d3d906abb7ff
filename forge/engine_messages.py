"""Engine messages: the commands that an engine's thread or process takes, and its reports.

Owns their fields. Knows no inbox and no transport: values of plain fields, which pickle.

    AsyncLLM ── Request, Abort, Pause, ... ──► EngineLoop
             ◄── StepReport, EngineStatus ────

A command with a ticket is answered in a report that carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self, TypeAlias

from forge.engine import Engine
from forge.errors import ForgeError
from forge.feedback_queue import QueueLevel
from forge.film.state import Line
from forge.kv_publisher import KVEventCounts, KVEventPublisher
from forge.pause import PauseMode
from forge.request import Delta, Request
from forge.sessions import SessionKey
from forge.tier_status import TierStatus
from forge.weights import PartTimes, WeightSource


class Abort(NamedTuple):
    """Command: end this request, which has no reader. Unknown and ended ids change nothing."""

    request_id: int


class CheckedRequest(NamedTuple):
    """Command: serve a request whose structure another process compiled within a level's limits."""

    request: Request
    level: QueueLevel


class EndSession(NamedTuple):
    """Command: end a session for its client. The report after it carries the ticket."""

    ticket: int
    key: SessionKey


class ResetPrefixCache(NamedTuple):
    """Command: drop all cached prefixes. The report after it carries the ticket."""

    ticket: int


class Pause(NamedTuple):
    """Command: pause. The first report without a step in flight carries the ticket."""

    ticket: int
    mode: PauseMode


class Resume(NamedTuple):
    """Command: end a pause. The report after it carries the ticket."""

    ticket: int


class UpdateWeights(NamedTuple):
    """Command: replace weights: see Engine.update_weights. The report after it has the ticket."""

    ticket: int
    source: WeightSource
    version: str | None
    namespace: str


class Sleep(NamedTuple):
    """Command: release the device's memory. The report after it carries the ticket."""

    ticket: int
    level: int


class Wake(NamedTuple):
    """Command: allocate it again. The report after it carries the ticket."""

    ticket: int


class Resize(NamedTuple):
    """Command: resize the pools whose blocks are given. The report after it carries the ticket."""

    ticket: int
    num_blocks: int | None
    num_host_blocks: int | None


class OpenFilm(NamedTuple):
    """Command: add lines of the film to reports, and soon one with the whole state."""


class CloseFilm(NamedTuple):
    """Command: add no more lines."""


FilmCommand: TypeAlias = OpenFilm | CloseFilm

PauseCommand: TypeAlias = Pause | Resume | UpdateWeights | Sleep | Wake
"""A command of trainers, with its ticket. Some take seconds, in which there is no step."""

ControlCommand: TypeAlias = (
    Abort | EndSession | ResetPrefixCache | Resize | FilmCommand | PauseCommand
)
"""A command that brings no request."""

Command: TypeAlias = Request | CheckedRequest | ControlCommand
"""A value that `post` takes. A Request may take long: its structure may not be compiled yet."""


class EngineStatus(NamedTuple):
    """Figures of an engine after a step.

    num_steps           steps so far
    num_running         sequences that are being computed
    num_waiting         sequences that wait for admission
    num_blocks          blocks of the KV cache
    num_used_blocks     blocks that open sequences hold
    has_work            a request has not ended
    can_step            a step would change something; False as well while all requests wait for a
                        paused session
    pause_mode          how the engine was paused; None: it is not
    is_paused           no step is in flight, and none follows until the end of the pause
    sleep_level         level of the model's sleep; 0: it is awake
    weight_version      version of the weights
    num_cached_blocks   blocks that no sequence holds and whose content is kept
    num_sessions        open sessions
    num_paused_sessions   those of them without a live request

    Totals since the engine was made, which never fall:

    num_preemptions       preemptions of a sequence, which lost its blocks and waited again
    num_recomputed_tokens tokens computed again after that
    num_queried_tokens    tokens that sequences had when they were first admitted
    num_cached_tokens     those of them that the prefix cache had on the device
    num_uncached_tokens   those of them that no tier had
    num_resumed_tokens    those of num_cached_tokens that belong to a later turn of a session
    num_planned_tokens    tokens that steps have computed or are computing
    num_draft_tokens      draft tokens that the model has verified
    num_accepted_tokens   draft tokens that it accepted
    num_failed_recordings recordings that ended because their file could not be written
    tiers                 figures of host memory and files; None where there are none
    kv_events             batches of published KV events; None where none are published
    """

    num_steps: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    has_work: bool
    can_step: bool
    pause_mode: str | None
    is_paused: bool
    sleep_level: int
    weight_version: str
    num_cached_blocks: int
    num_sessions: int
    num_paused_sessions: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_uncached_tokens: int
    num_resumed_tokens: int
    num_planned_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_failed_recordings: int
    tiers: TierStatus | None
    kv_events: KVEventCounts | None

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Return the engine's figures. Read during a step, they may mix two steps."""
        scheduler, sink = engine.scheduler, engine.kv_event_sink
        failures = engine.recording_failures
        pool = scheduler.pool
        return cls(
            engine.num_steps,
            len(scheduler.running),
            len(scheduler.waiting) + len(engine.pause_state.held_requests),
            pool.num_blocks,
            pool.num_used_blocks,
            engine.has_work,
            engine.can_step,
            None if (mode := engine.pause_state.mode) is None else mode.value,
            engine.is_paused,
            engine.pause_state.sleep_level,
            engine.weights.current,
            pool.num_cached_blocks,
            len(scheduler.sessions),
            scheduler.num_paused_sessions,
            scheduler.num_preemptions,
            scheduler.num_recomputed_tokens,
            scheduler.num_queried_tokens,
            scheduler.num_cached_tokens,
            scheduler.num_uncached_tokens,
            scheduler.resumed_tokens.device,
            scheduler.num_planned_tokens,
            scheduler.num_draft_tokens,
            scheduler.num_accepted_tokens,
            0 if failures is None else failures.num_failures,
            TierStatus.from_scheduler(scheduler),
            sink.counts if isinstance(sink, KVEventPublisher) else None,
        )


class PauseResult(NamedTuple):
    """Outcome of a command of trainers.

    refusal          why the engine refused it; None: it was carried out
    times            parts of the command, each with its seconds
    weight_version   that an update began; None for any other command
    """

    ticket: int
    refusal: ForgeError | None = None
    times: PartTimes = ()
    weight_version: str | None = None


class StepReport(NamedTuple):
    """Outcome of a step and of the commands before it.

    rejections      (request id, error) of each request that was refused
    step_s          seconds that the step took: schedule, forward, commit
    queue_times_s   seconds from `post` to this step, for each request first served by it
    reset_tickets   tickets of the resets carried out
    ended_sessions  (ticket, whether the session was open) of each EndSession carried out
    resizes         (ticket, None or why it was refused) of each Resize
    pause_results   of each command of trainers that was carried out or refused
    oldest_post_s   time of `post`, on time.monotonic(), of the request that has waited longest for
                    its first step; None where none waits
    film            lines of the film; none while it is closed
    """

    deltas: Sequence[Delta]
    rejections: Sequence[tuple[int, str]]
    status: EngineStatus
    step_s: float
    queue_times_s: Sequence[float]
    reset_tickets: Sequence[int]
    ended_sessions: Sequence[tuple[int, bool]]
    resizes: Sequence[tuple[int, ForgeError | None]]
    pause_results: Sequence[PauseResult]
    oldest_post_s: float | None
    film: Sequence[Line] = ()
