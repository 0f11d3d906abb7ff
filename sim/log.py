"""Log: what a world decided and when, as lines of JSON that are equal for equal runs.

Owns the format. Knows no file: it writes text to whatever takes it, and hashes it on the way.

    {"forge": "0.1.0", "seed": 0, ...}                           line 1: all that decides the run
    {"at": 1200, "arrive": 7, "prompt": 40, "output": 9}         times in nanoseconds; "class" and
                                                                 "tenant" where they are not 0, ""
    {"at": 5100, "step": 3, "rows": 2, "tokens": 41, "plan": 81, "admitted": [[7, "new, ..."]]}
    {"at": 9100, "quiet": 4, "rows": 2, "plan": 23}              4 steps like each other, the last
                                                                 told at 9100: a token a row
    {"at": 9600, "end": 7, "why": "length"}
    {"sha256": "..."}                                            of all lines before

`plan` is 32 bits of an order: whose the rows are, and which blocks they take. It names no token.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from zlib import crc32

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


def _digest(plan: StepPlan) -> int:
    """Of a step with decisions. A third of what a digest of the whole plan takes."""
    found = _digest_of_ids([row[0] for row in plan.rows])
    # By place: seq_id, slot, start and new_blocks. Who takes none is where it was.
    taking = [(row[0], row[2], row[3], row[7]) for row in plan.rows if row[7]]
    if taking or plan.copies:
        found = crc32(repr((taking, plan.copies)).encode(), found)
    return found


def _digest_of_ids(seq_ids: list[int]) -> int:
    return crc32(array("q", seq_ids).tobytes())


@dataclass(slots=True)
class _Quiet:
    """Steps like each other.

    seq_ids   of their rows
    steps     how many there are
    at_ns     when the last was told
    digest    of the ids, then of each (step, row, block) that was taken
    """

    seq_ids: list[int]
    steps: int
    at_ns: int
    digest: int


class Log:
    """A Watcher that writes. `close` writes the last line.

    write    takes text
    header   all that decides the run
    """

    def __init__(self, write: Callable[[str], object], header: Mapping[str, Any]) -> None:
        self._write = write
        self._hash = sha256()
        self._quiet: _Quiet | None = None
        self._line(header)

    @property
    def digest(self) -> str:
        """Of all lines so far; a run of quiet steps counts once it has ended."""
        return self._hash.hexdigest()

    def arrived(self, arrival: Arrival, now_ns: int, refused: str | None) -> None:
        """A line for the request, with its class and its tenant where it has one."""
        request = arrival.request
        labels = {"class": request.priority, "tenant": request.cache_salt}
        why = {} if refused is None else {"refused": refused}
        self._said(
            {
                "at": arrival.at_ns,
                "arrive": request.id,
                "prompt": len(request.prompt),
                "output": request.params.max_tokens,
                **{name: label for name, label in labels.items() if label},
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

    def committed(
        self,
        plan: StepPlan,
        now_ns: int,
        steps: int = 1,
        taken: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        """`steps` steps like this one have been committed, the last of them at `now_ns`.

        taken   step after this one, row and block, of each block that a row behind this step took
        """
        if is_quiet(plan):
            self._go_on(plan, now_ns, steps, taken)
            return
        line: dict[str, Any] = {
            "at": now_ns,
            "step": plan.step,
            "rows": len(plan.rows),
            "tokens": plan.num_tokens,
            "plan": _digest(plan),
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

    def _go_on(
        self, plan: StepPlan, now_ns: int, steps: int, taken: Iterable[tuple[int, int, int]]
    ) -> None:
        """Nothing was decided for so many steps more."""
        seq_ids = [row[0] for row in plan.rows]
        quiet = self._quiet
        if quiet is None or quiet.seq_ids != seq_ids:
            self._end_quiet()
            quiet = self._quiet = _Quiet(seq_ids, 0, now_ns, _digest_of_ids(seq_ids))
        own = [(0, i, block) for i, row in enumerate(plan.rows) if row[7] for block in row[7]]
        for step, row, block in (*own, *taken):
            took = array("q", (quiet.steps + step, row, block))
            quiet.digest = crc32(took.tobytes(), quiet.digest)
        quiet.steps += steps
        quiet.at_ns = now_ns

    def _end_quiet(self) -> None:
        quiet, self._quiet = self._quiet, None
        if quiet is not None:
            line = {"at": quiet.at_ns, "quiet": quiet.steps, "rows": len(quiet.seq_ids)}
            self._line({**line, "plan": quiet.digest})

    def _line(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._hash.update(text.encode())
        self._write(text)
