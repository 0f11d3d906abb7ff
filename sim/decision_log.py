"""Decision log: what a run decided and when, as lines of JSON that are equal for equal runs.

Owns the format. Knows no file: it passes text to a function, and hashes each line.

    {"forge": "0.1.1", "seed": 0, ...}                           line 1: all that decides the run
    {"at": 1200, "arrive": 7, "prompt": 40, "output": 9}         times in nanoseconds; "class",
                                                                 "tenant" and "session" where they
                                                                 are not 0 or ""
    {"at": 5100, "step": 3, "rows": 2, "tokens": 41, "plan": 81, "admitted": [[7, "new, ..."]]}
    {"at": 9100, "quiet": 4, "rows": 2, "plan": 23}              4 steps with the same rows and no
                                                                 decision, the last at 9100
    {"at": 9600, "end": 7, "why": "length"}
    {"sha256": "..."}                                            of all lines before

`plan` is a 32-bit digest of the order of the rows, of the blocks they take and of the blocks that
move, without tokens.
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
from forge.sim.clock import VirtualClockStep
from forge.sim.workloads.workload import RequestArrival


def plan_digest(plan: StepPlan) -> int:
    """Return the digest of a step with decisions.

    It takes a third of the time of a digest of the whole plan.
    """
    found = row_digest([row.seq_id for row in plan.rows])
    # A row without a new block has the position and the slot that earlier lines imply.
    allocations = [
        (row.seq_id, row.slot, row.start, row.new_blocks) for row in plan.rows if row.new_blocks
    ]
    if allocations or plan.copies:
        found = crc32(repr((allocations, plan.copies)).encode(), found)
    if plan.stores or plan.loads:
        found = crc32(repr((plan.stores, plan.loads)).encode(), found)
    return found


def row_digest(seq_ids: list[int]) -> int:
    """Return the digest of rows with these sequences."""
    return crc32(array("q", seq_ids).tobytes())


@dataclass(slots=True)
class _UniformRun:
    """Consecutive steps with the same rows and without decisions.

    seq_ids     sequence ids of their rows
    num_steps   number of steps
    at_ns       commit time of the last step
    digest      of the ids, then of each (step, row, block) that was allocated
    """

    seq_ids: list[int]
    num_steps: int
    at_ns: int
    digest: int


class DecisionLog:
    """A WorldObserver that writes a line for each decision. `close` writes the last line.

    write    takes text
    header   all that decides the run
    """

    def __init__(self, write: Callable[[str], object], header: Mapping[str, Any]) -> None:
        self._write = write
        self._hash = sha256()
        self._uniform_run: _UniformRun | None = None
        self._write_line(header)

    @property
    def digest(self) -> str:
        """Digest of all lines so far; a run of quiet steps counts once it has ended."""
        return self._hash.hexdigest()

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        """Write a line for the request, with class, tenant and session if they are set."""
        request = arrival.request
        labels = {
            "class": request.priority,
            "tenant": request.cache_salt,
            "session": request.session_id,
        }
        refusal_fields = {} if refusal is None else {"refused": refusal}
        self._write_decision(
            {
                "at": arrival.at_ns,
                "arrive": request.id,
                "prompt": len(request.prompt),
                "output": request.params.max_tokens,
                **{name: label for name, label in labels.items() if label},
                **refusal_fields,
            }
        )

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Write a line for the disconnect of a client."""
        self._write_decision({"at": now_ns, "leave": request_id})

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        """Write a line for a step with decisions, and one for each choice that ended."""
        if step is not None:
            self.record_steps(step.plan, now_ns)
        for delta in deltas:
            if delta.finish is not None:
                self._write_decision(
                    {"at": now_ns, "end": delta.request_id, "why": delta.finish.value}
                )

    def record_steps(
        self,
        plan: StepPlan,
        now_ns: int,
        num_steps: int = 1,
        allocations: Iterable[tuple[int, int, int]] = (),
    ) -> None:
        """Record `num_steps` committed steps like this one, the last committed at `now_ns`.

        allocations   (steps after this one, row, block) of each block that a later step allocated
        """
        if plan.is_uniform:
            self._extend_uniform_run(plan, now_ns, num_steps, allocations)
            return
        line: dict[str, Any] = {
            "at": now_ns,
            "step": plan.step,
            "rows": len(plan.rows),
            "tokens": plan.num_tokens,
            "plan": plan_digest(plan),
        }
        for name in ("admitted", "preempted", "finished"):
            events = getattr(plan, name)
            if events:
                line[name] = [list(event) for event in events]
        self._write_decision(line)

    def close(self) -> str:
        """Write the last line, and return the hash in it."""
        self._flush_uniform_run()
        digest = self.digest
        self._write_line({"sha256": digest})
        return digest

    def _write_decision(self, line: Mapping[str, Any]) -> None:
        self._flush_uniform_run()
        self._write_line(line)

    def _extend_uniform_run(
        self,
        plan: StepPlan,
        now_ns: int,
        num_steps: int,
        allocations: Iterable[tuple[int, int, int]],
    ) -> None:
        """Add `num_steps` steps without decisions to the current run of quiet steps."""
        seq_ids = [row.seq_id for row in plan.rows]
        run = self._uniform_run
        if run is None or run.seq_ids != seq_ids:
            self._flush_uniform_run()
            run = self._uniform_run = _UniformRun(seq_ids, 0, now_ns, row_digest(seq_ids))
        plan_allocations = [
            (0, i, block) for i, row in enumerate(plan.rows) for block in row.new_blocks
        ]
        for step, row, block in (*plan_allocations, *allocations):
            allocation = array("q", (run.num_steps + step, row, block))
            run.digest = crc32(allocation.tobytes(), run.digest)
        run.num_steps += num_steps
        run.at_ns = now_ns

    def _flush_uniform_run(self) -> None:
        run, self._uniform_run = self._uniform_run, None
        if run is not None:
            line = {"at": run.at_ns, "quiet": run.num_steps, "rows": len(run.seq_ids)}
            self._write_line({**line, "plan": run.digest})

    def _write_line(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._hash.update(text.encode())
        self._write(text)
