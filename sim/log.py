"""Log: what a world decided and when, as lines of JSON that are equal for equal runs.

Owns the format. Knows no file: it writes text to whatever takes it, and hashes it on the way.

    {"forge": "0.1.0", "seed": 0, ...}                           line 1: all that decides the run
    {"at": 1200, "arrive": 7, "prompt": 40, "output": 9}         times in nanoseconds
    {"at": 5100, "step": 3, "rows": 2, "tokens": 41, "admitted": [[7, "new, 0 tokens shared"]]}
    {"at": 9100, "quiet": 4, "rows": 2}                          4 steps like each other, the last
                                                                 told at 9100: a token a row
    {"at": 9600, "end": 7, "why": "length"}
    {"sha256": "..."}                                            of all lines before
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from forge.request import Delta
from forge.seam import StepPlan
from sim.clock import TimedStep
from sim.workload import Arrival


def is_quiet(plan: StepPlan) -> bool:
    """Nothing was decided: every row is one more token of a sequence that ran before."""
    if plan.admitted or plan.preempted or plan.finished or plan.copies:
        return False
    # A row has one token at least; by place, `num_samples`.
    return plan.num_tokens == len(plan.rows) and all(row[8] == 1 for row in plan.rows)


class Log:
    """A Watcher that writes. `close` writes the last line.

    write    takes text
    header   all that decides the run
    """

    def __init__(self, write: Callable[[str], object], header: Mapping[str, Any]) -> None:
        self._write = write
        self._hash = sha256()
        self._quiet: tuple[int, int, int] | None = None  # steps, rows, end of the last
        self._line(header)

    @property
    def digest(self) -> str:
        """Of all lines so far; a run of quiet steps counts once it has ended."""
        return self._hash.hexdigest()

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """A line for the request."""
        request = arrival.request
        why = {} if refused is None else {"refused": refused}
        self._said(
            {
                "at": arrival.at_ns,
                "arrive": request.id,
                "prompt": len(request.prompt),
                "output": request.params.max_tokens,
                **why,
            }
        )

    def left(self, request_id: int, now_ns: int) -> None:
        """A line for the client."""
        self._said({"at": now_ns, "leave": request_id})

    def stepped(self, step: TimedStep | None, deltas: list[Delta], now_ns: int) -> None:
        """A line for a step with decisions, and one for each choice that ended."""
        if step is not None:
            self.committed(step.plan, now_ns)
        for delta in deltas:
            if delta.finish is not None:
                self._said({"at": now_ns, "end": delta.request_id, "why": delta.finish.value})

    def committed(self, plan: StepPlan, now_ns: int, steps: int = 1) -> None:
        """`steps` steps like this one have been committed, the last of them at `now_ns`."""
        if is_quiet(plan):
            if self._quiet is not None and self._quiet[1] == len(plan.rows):
                steps += self._quiet[0]
            else:
                self._end_quiet()
            self._quiet = (steps, len(plan.rows), now_ns)
            return
        line: dict[str, Any] = {
            "at": now_ns,
            "step": plan.step,
            "rows": len(plan.rows),
            "tokens": plan.num_tokens,
        }
        for name in ("admitted", "preempted", "finished"):
            events = getattr(plan, name)
            if events:
                line[name] = [list(event) for event in events]
        self._said(line)

    def close(self) -> str:
        """The last line is written; the hash that is in it."""
        self._end_quiet()
        digest = self.digest
        self._line({"sha256": digest})
        return digest

    def _said(self, line: Mapping[str, Any]) -> None:
        self._end_quiet()
        self._line(line)

    def _end_quiet(self) -> None:
        if self._quiet is not None:
            steps, rows, at_ns = self._quiet
            self._quiet = None
            self._line({"at": at_ns, "quiet": steps, "rows": rows})

    def _line(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._hash.update(text.encode())
        self._write(text)
