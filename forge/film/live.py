"""LiveFilm: the film of an engine that serves, within a fixed share of the engine's time.

Owns the state that the pages have, and when the next line is due. Knows no page, socket or thread.
A line costs a loop over all live sequences. So a line that took 0.4 ms is followed by none for
160 ms: the steps meanwhile are merged into the next one, which says how many they are.

    step     0      1      2      3      4      5
    line    plan 0                plan 3 (steps: 3)       compared with the line before
             └── its cost / SHARE ──┘

Always true: after each line with a plan, the lines fold to the pool, table for table, as they do
in forge.film.recorder. Between two lines only counts and events are kept. The engine has this
recorder only while a page reads, so a server without one spends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from forge.failure_log import FailureLog
from forge.film.difference import add_rows, add_tables, find_ended, find_freed
from forge.film.state import FilmState, Line
from forge.pause import PauseMode
from forge.request import Delta, FinishReason, Request
from forge.scheduler import Scheduler
from forge.seam import StepOutput, StepPlan
from forge.sessions import SessionKey

LOG = logging.getLogger("forge.film")

SHARE = 0.0025
"""Most of the engine's time that lines take, while one takes at most SHARE * MAX_PAUSE_NS."""
MAX_PAUSE_NS = 10**9
"""Longest time between lines: a machine that was busy during one delays the next no longer."""


class LiveFilm:
    """A Recorder whose lines are taken after each step.

    clock   integer nanoseconds
    share   most of the time that lines take; 1: a line for each plan
    """

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], int], share: float = SHARE
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._share = share
        self._begin_ns = self._due_ns = clock()
        self._failures = FailureLog(LOG, "the film has failed", "It begins again: report this")
        self._state: FilmState | None = None  # None: no page has a keyframe yet
        self._lines: list[Line] = []
        self._lacks_keyframe = False
        self._clear_events()
        self._num_output = 0
        self._plan_of_line = -1

    def _clear_events(self) -> None:
        self._events: list[Line] = []
        self._plan_events: dict[str, list[list[int | str]]] = {}
        self._reasons: dict[tuple[int, int], FinishReason] = {}
        self._num_steps = 0
        self._has_changed = False

    def add_keyframe(self) -> None:
        """Write the whole state after the next line, for a page that joins."""
        self._lacks_keyframe = True

    def take_lines(self) -> list[Line]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def finish_steps(self) -> None:
        """Write what has changed: no step follows that would."""
        if self._has_changed or self._lacks_keyframe:
            self._write_line(None)

    # Events from outside. They stand before the next line.

    def record_submit(self, request: Request) -> None:
        """Keep the arrival of a request."""
        sequences = self._scheduler.requests[request.id]
        line: Line = {"arrive": request.id, "seq": sequences[0].id, "n": len(sequences)}
        line |= {"prompt": len(request.prompt), "output": request.params.max_tokens}
        if request.priority:
            line["class"] = request.priority
        self._add_event(line)

    def record_abort(self, request_id: int) -> None:
        """Keep that the client left."""
        self._add_event({"left": request_id})

    def record_reset(self) -> None:
        """Keep that the prefix cache was reset."""
        self._add_event({"reset": True})

    def record_pause(self, mode: PauseMode) -> None:
        """Keep that the engine was paused."""
        self._add_event({"pause": mode.value})

    def record_resume(self) -> None:
        """Keep the end of the pause."""
        self._add_event({"resume": True})

    def record_weights(self, version: str, namespace: str) -> None:
        """Keep that new weights dropped the content of all blocks, without their version."""
        self._add_event({"reset": True, "weights": True})

    def record_sleep(self, level: int) -> None:
        """Keep that the model sleeps, which drops the content of all blocks."""
        self._add_event({"reset": True, "sleep": level})

    def record_resize(self, num_blocks: int | None, num_host_blocks: int | None) -> None:
        """Keep the new sizes of the pools."""
        self._add_event({"resize": [num_blocks, num_host_blocks]})

    def record_disk_keys(self, keys: Sequence[bytes]) -> None:
        """Keep the number of files that are there at the start."""
        self._add_event({"files": len(keys)})

    def record_end_session(self, key: SessionKey) -> None:
        """Keep that a session ended, without its name."""
        self._add_event({"session": "ended"})

    def record_expire_session(self, key: SessionKey, last_turn: int) -> None:
        """Keep that a session expired, without its name."""
        self._add_event({"session": "expired"})

    def record_void(self, why: str) -> None:
        """Keep that every plan in flight is void, without the reason, which may quote anything."""
        self._add_event({"void": "the model failed"})

    def _add_event(self, line: Line) -> None:
        self._has_changed = True
        self._events.append({**line, "at": self._now_us()})

    # Steps.

    def record_plan(self, plan: StepPlan | None) -> None:
        """Count a plan, keep its events, and write a line if one is due."""
        if plan is None:
            return
        self._num_steps += 1
        self._has_changed = True
        for name in ("admitted", "preempted", "copies"):
            events = getattr(plan, name)
            if events:
                self._plan_events.setdefault(name, []).extend(map(list, events))
        if self._clock() >= self._due_ns:
            self._write_line(plan)

    def record_commit(self, output: StepOutput, deltas: Sequence[Delta]) -> None:
        """Count the tokens, keep the ends, and write when the plan of the last line ended."""
        self._has_changed = True
        # Comprehensions take half the time of a loop, and each step has one delta a row.
        self._num_output += sum([len(delta.tokens) for delta in deltas])
        self._reasons |= {
            (delta.request_id, delta.choice): delta.finish
            for delta in deltas
            if delta.finish is not None
        }
        if output.step == self._plan_of_line:
            self._lines.append({"done": output.step, "at": self._now_us()})

    # Lines.

    def _now_us(self) -> int:
        return (self._clock() - self._begin_ns) // 1000

    def _write_line(self, plan: StepPlan | None) -> None:
        """Write what has changed since the line before, and set when the next one is due.

        An error of the film ends no step: the next line has the whole state, after a long pause.
        """
        start_ns = self._clock()
        try:
            self._add_line(plan)
        except Exception as error:
            self._failures.fail(error)
            self._state, self._lacks_keyframe = None, True
            self._due_ns = self._clock() + MAX_PAUSE_NS
        else:
            end_ns = self._clock()
            pause_ns = int((end_ns - start_ns) * (1 / self._share - 1))
            self._due_ns = end_ns + min(pause_ns, MAX_PAUSE_NS)
            self._failures.succeed()
        self._clear_events()

    def _add_line(self, plan: StepPlan | None) -> None:
        state, is_first = self._state, self._state is None
        if state is None:  # a keyframe follows: it has what the first line would have
            state = self._state = initial_state(self._scheduler)
            self._events.clear()
        for event in self._events:
            state.apply(event)
        line = self._next_line(state, plan)
        state.apply(line)
        if not is_first:
            self._lines += [*self._events, line]
            self._plan_of_line = -1 if plan is None else plan.step
        if self._lacks_keyframe:
            self._lacks_keyframe = False
            facts = {"at": line["at"], "totals": self._totals()}
            self._lines.append({**state.keyframe(), **facts})

    def _totals(self) -> list[int]:
        """Return preemptions, evictions, copies, drafts, kept drafts and output tokens."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        drafts = [scheduler.num_draft_tokens, scheduler.num_accepted_tokens]
        counts = [scheduler.num_preemptions, pool.num_evictions, pool.num_copies]
        return [*counts, *drafts, self._num_output]

    def _next_line(self, state: FilmState, plan: StepPlan | None) -> Line:
        scheduler = self._scheduler
        line: Line = {"at": self._now_us(), "totals": self._totals(), **self._plan_events}
        if plan is not None:
            line = {"plan": plan.step, **line}
            if self._num_steps > 1:
                line["steps"] = self._num_steps
        left = {event["left"] for event in self._events if "left" in event}
        line |= find_ended(state, scheduler, self._reasons, left)
        line |= find_freed(state, scheduler)
        if plan is not None:
            add_rows(line, state, plan)
        add_tables(line, state, scheduler, plan)
        self._add_waits(line, state)
        pool = scheduler.pool
        evicted, published = state.published - pool.published_blocks, pool.published_blocks
        for name, value, known in (
            ("evict", sorted(evicted), []),
            ("publish", sorted(published - state.published), []),
            ("next", pool.next_free_block, state.next_block),
            ("host", scheduler.host_cache.num_held_blocks, state.num_host_blocks),
            ("disk", scheduler.disk_cache.num_files, state.num_files),
        ):
            if value != known:
                line[name] = value
        return line

    def _add_waits(self, line: Line, state: FilmState) -> None:
        """Add the reasons of the last plan, where they differ from those that the pages have."""
        reasons, wait = self._scheduler.wait_reasons, None
        waiting = self._scheduler.waiting
        if waiting:
            why = {str(s.id): reasons.by_seq_id[s.id] for s in waiting if s.id in reasons.by_seq_id}
            wait = [*(reasons.limit or ("", "")), why]
        if wait != state.wait:
            line["wait"] = wait


def initial_state(scheduler: Scheduler) -> FilmState:
    """Return a state with the live sequences of the scheduler, and no tables."""
    pool = scheduler.pool
    state = FilmState({"blocks": pool.num_blocks, "next": pool.next_free_block})
    for sequence in scheduler.sequences.values():
        request, params = sequence.request, sequence.params
        facts = (request.id, sequence.choice, request.priority)
        state.live[sequence.id] = (*facts, len(request.prompt), params.max_tokens)
        state.epochs[sequence.id] = sequence.epoch
        if sequence.slot is not None:
            state.slots[sequence.id] = sequence.slot
    return state
