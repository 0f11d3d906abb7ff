"""Terminal drawing: the rows of every step and the reasons of its events, as text.

Owns the letters and the lines. Knows no file: it writes text to a function. A request is named by
its id; a column is a slot. Blocks and queue (line) are those after the step.

          ms    step   slots  tokens      blocks  line
                        > 0 arrives: 8 prompt tokens, 13 of output
                        > 1 arrives: 8 prompt tokens, 13 of output
                        + 0 admitted: new, 0 tokens shared
         1.0       0   P...       6         2/8     1
                        + 1 admitted: new, 0 tokens shared
         2.0       1   PP..       6         4/8     0
         3.0       2   dP..       5         5/8     0
        10.0       9   dd..       2         8/8     0  and 6 equal steps before it
                        ! 1 preempted: 1 block needed, 0 free
        14.0      13   d...       1         0/8     1  and 3 equal steps before it
                        = 0 ended: length
                        + 1 admitted: resumed, 12 tokens shared
        15.0      14   A...       6         6/8     0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from forge.engine import Engine
from forge.request import Delta
from forge.seam import Row, StepPlan
from forge.sim.clock import VirtualClockStep
from forge.sim.reports.run_history import DECODE, PREFILL, RECOMPUTE, row_kind
from forge.sim.workloads.workload import RequestArrival

LETTERS = {PREFILL: "P", DECODE: "d", RECOMPUTE: "A"}
UNIFORM_LETTERS = "d-."
LEGEND = "P chunk of a prompt, A recomputed, d decode, 1-9 drafts, - waits, . empty"
MARGIN = 21


class _StepLine(NamedTuple):
    """A step as it will be drawn."""

    now_ns: int
    step: int
    slots: str
    tokens: int
    used_blocks: int
    num_waiting: int


class TerminalDrawing:
    """A WorldObserver that draws each step. `close` draws the last one and the legend."""

    def __init__(self, write: Callable[[str], object], engine: Engine) -> None:
        self._write = write
        self._scheduler = engine.scheduler
        self._num_blocks = engine.config.num_blocks
        self._width = min(engine.config.max_num_seqs, 64)
        self._request_of: dict[int, int] = {}
        self._prompt_lens: dict[int, int] = {}  # sequence -> tokens of its prompt
        self._slot_owners: dict[int, int] = {}  # slot -> sequence
        self._pending_line: _StepLine | None = None
        self._num_repeats = 0
        head = f"{'ms':>9} {'step':>7}   {'slots'.ljust(self._width)}"
        self._write(f"{head} {'tokens':>7} {'blocks':>11} {'line':>5}\n")

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Draw a line for the request."""
        request = arrival.request
        for sequence in self._scheduler.requests.get(request.id, ()):
            self._request_of[sequence.id] = request.id
            self._prompt_lens[sequence.id] = len(request.prompt)
        text = f"{len(request.prompt)} prompt tokens, {request.params.max_tokens} of output"
        self._write_event(f"> {request.id} arrives: {text}")
        if refusal is not None:
            self._write_event(f"x {request.id} refused: {refusal}")

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Draw a line for the client."""
        self._write_event(f"< {request_id} disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Draw a line for the step, between its decisions and the requests that end with it."""
        if step is not None:
            self._draw_step(step.plan, now_ns)
        for delta in deltas:
            if delta.finish is not None:
                why = delta.error or delta.finish.value
                self._write_event(f"= {delta.request_id} ended: {why}")

    def close(self) -> None:
        """Draw the last step and the legend."""
        self._flush()
        self._write(f"{' ' * MARGIN}{LEGEND}\n")

    def _draw_step(self, plan: StepPlan, now_ns: int) -> None:
        for sign, what, events in (
            ("!", "preempted", plan.preempted),
            ("+", "admitted", plan.admitted),
        ):
            for event in events:
                self._write_event(f"{sign} {self._request_of[event.seq_id]} {what}: {event.why}")
        left_ids = {event.seq_id for event in (*plan.preempted, *plan.finished)}
        self._slot_owners = {slot: s for slot, s in self._slot_owners.items() if s not in left_ids}
        self._slot_owners |= {row.slot: row.seq_id for row in plan.rows}
        pool, waiting = self._scheduler.pool, len(self._scheduler.waiting)
        slots = self._format_slots(plan)
        line = _StepLine(now_ns, plan.step, slots, plan.num_tokens, pool.num_used_blocks, waiting)
        repeats = plan.is_uniform and set(slots) <= set(UNIFORM_LETTERS)
        if self._pending_line is not None and repeats and slots == self._pending_line.slots:
            self._num_repeats += 1
        else:
            self._flush()
        self._pending_line = line

    def _format_slots(self, plan: StepPlan) -> str:
        rows = {row.slot: row for row in plan.rows}
        return "".join(
            self._format_row(rows[slot])
            if slot in rows
            else "-"
            if slot in self._slot_owners
            else "."
            for slot in range(self._width)
        )

    def _format_row(self, row: Row) -> str:
        if row.drafts:
            return str(min(9, len(row.drafts)))
        return LETTERS[row_kind(row, self._prompt_lens[row.seq_id])]

    def _write_event(self, text: str) -> None:
        self._flush()
        self._write(f"{' ' * MARGIN}{text}\n")

    def _flush(self) -> None:
        line, num_repeats = self._pending_line, self._num_repeats
        self._pending_line, self._num_repeats = None, 0
        if line is None:
            return
        blocks = f"{line.used_blocks}/{self._num_blocks}"
        text = (
            f"{line.now_ns / 1e6:9.1f} {line.step:>7}   {line.slots} {line.tokens:>7} {blocks:>11}"
        )
        steps = "step" if num_repeats == 1 else "steps"
        more = f"  and {num_repeats} equal {steps} before it" if num_repeats else ""
        self._write(f"{text} {line.num_waiting:>5}{more}\n")
