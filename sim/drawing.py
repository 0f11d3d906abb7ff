"""Drawing: what every step computed, and why, as text for a terminal.

Owns the letters and the lines. Knows no file: it writes text to whatever takes it. A request is
named by its number; a column is a slot. Blocks and line are those after the step.

          ms    step   slots  tokens      blocks  line
                        > 0 asks: 8 prompt tokens, 13 of output
                        > 1 asks: 8 prompt tokens, 13 of output
                        + 0 admitted: new, 0 tokens shared
         1.0       0   P...       6         2/8     1
                        + 1 admitted: new, 0 tokens shared
         2.0       1   PP..       6         4/8     0
         3.0       2   dP..       5         5/8     0
        10.0       9   dd..       2         8/8     0  and 6 before it alike
                        ! 1 preempted: 1 blocks needed, 0 free
        14.0      13   d...       1         0/8     1  and 3 before it alike
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
from sim.clock import TimedStep
from sim.log import is_quiet
from sim.trail import AGAIN, PROMPT, TOKEN, kind_of
from sim.workload import Arrival

LETTERS = {PROMPT: "P", TOKEN: "d", AGAIN: "A"}
QUIET = "d-."
LEGEND = "P a part of a prompt, A computed again, d one more token, 1-9 drafts, - waits, . empty"
MARGIN = 21


class _Line(NamedTuple):
    """A step as it will be drawn."""

    now_ns: int
    step: int
    slots: str
    tokens: int
    used: int
    waiting: int


class Drawing:
    """A Watcher that draws. `close` draws what is left."""

    def __init__(self, write: Callable[[str], object], engine: Engine) -> None:
        self._write = write
        self._scheduler = engine.scheduler
        self._num_blocks = engine.config.num_blocks
        self._width = min(engine.config.max_num_seqs, 64)
        self._request_of: dict[int, int] = {}
        self._prompts: dict[int, int] = {}  # sequence -> tokens of its prompt
        self._holders: dict[int, int] = {}  # slot -> sequence
        self._last: _Line | None = None
        self._alike = 0
        head = f"{'ms':>9} {'step':>7}   {'slots'.ljust(self._width)}"
        self._write(f"{head} {'tokens':>7} {'blocks':>11} {'line':>5}\n")

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """A line for the request."""
        request = arrival.request
        for sequence in self._scheduler.requests.get(request.id, ()):
            self._request_of[sequence.id] = request.id
            self._prompts[sequence.id] = len(request.prompt)
        asked = f"{len(request.prompt)} prompt tokens, {request.params.max_tokens} of output"
        self._say(f"> {request.id} asks: {asked}")
        if refused is not None:
            self._say(f"x {request.id} refused: {refused}")

    def left(self, request_id: int, now_ns: int) -> None:
        """A line for the client."""
        self._say(f"< {request_id} leaves")

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        """A line for the step, below what was decided for it and above what ended with it."""
        if step is not None:
            self._draw(step.plan, now_ns)
        for delta in deltas:
            if delta.finish is not None:
                why = delta.error or delta.finish.value
                self._say(f"= {delta.request_id} ended: {why}")

    def close(self) -> None:
        """Everything is drawn."""
        self._end()
        self._write(f"{' ' * MARGIN}{LEGEND}\n")

    def _draw(self, plan: StepPlan, now_ns: int) -> None:
        for sign, what, events in (
            ("!", "preempted", plan.preempted),
            ("+", "admitted", plan.admitted),
        ):
            for event in events:
                self._say(f"{sign} {self._request_of[event.seq_id]} {what}: {event.why}")
        gone = {event.seq_id for event in (*plan.preempted, *plan.finished)}
        self._holders = {slot: s for slot, s in self._holders.items() if s not in gone}
        self._holders |= {row.slot: row.seq_id for row in plan.rows}
        pool, waiting = self._scheduler.pool, len(self._scheduler.waiting)
        slots = self._slots(plan)
        line = _Line(now_ns, plan.step, slots, plan.num_tokens, pool.used, waiting)
        quiet = is_quiet(plan) and set(slots) <= set(QUIET)
        if self._last is not None and quiet and slots == self._last.slots:
            self._alike += 1
        else:
            self._end()
        self._last = line

    def _slots(self, plan: StepPlan) -> str:
        rows = {row.slot: row for row in plan.rows}
        return "".join(
            self._letter(rows[slot]) if slot in rows else "-" if slot in self._holders else "."
            for slot in range(self._width)
        )

    def _letter(self, row: Row) -> str:
        if row.drafts:
            return str(min(9, len(row.drafts)))
        return LETTERS[kind_of(row, self._prompts[row.seq_id])]

    def _say(self, text: str) -> None:
        self._end()
        self._write(f"{' ' * MARGIN}{text}\n")

    def _end(self) -> None:
        line, alike = self._last, self._alike
        self._last, self._alike = None, 0
        if line is None:
            return
        blocks = f"{line.used}/{self._num_blocks}"
        text = (
            f"{line.now_ns / 1e6:9.1f} {line.step:>7}   {line.slots} {line.tokens:>7} {blocks:>11}"
        )
        more = f"  and {alike} before it alike" if alike else ""
        self._write(f"{text} {line.waiting:>5}{more}\n")
