"""Fleet log: what a fleet decided and when, as lines of JSON that are equal for equal runs.

Owns the format. Knows no file: it passes text to a function, and hashes each line.

    {"forge": ..., "fleet": {...}}                               line 1: all that decides the run
    {"at": 0, "start": 1}                                        replica 1 accepts requests
    {"at": 1200, "route": 7, "tokens": 40, "replica": 1, "prefix": 2}     2 blocks are known there
    {"at": 5100, "replica": 1, "step": 3, "rows": 2, "tokens": 41, "plan": 81, "quiet": [4, 23]}
                                                                 after 4 steps without a decision
    {"at": 9600, "replica": 1, "end": 7, "why": "length"}
    {"at": 9700, "death": 1}
    {"sha256": "..."}                                            of all lines before
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any
from zlib import crc32

from forge.request import Delta, Request
from forge.routing.replica_table import Decision
from forge.sim.clock import VirtualClockStep
from forge.sim.decision_log import plan_digest, row_digest


class FleetLog:
    """A FleetObserver that writes a line for each decision. `close` writes the last line.

    write    takes text
    header   all that decides the run
    """

    def __init__(self, write: Callable[[str], object], header: Mapping[str, Any]) -> None:
        self._write = write
        self._hash = sha256()
        # By replica: the number of its steps since its last line, and their digest.
        self._quiet: dict[int, tuple[int, int]] = {}
        self._write_line(header)

    def on_route(
        self, request: Request, now_ns: int, decision: Decision | None, why: str | None
    ) -> None:
        """Write a line for the request, with its replica unless it waits for one."""
        line: dict[str, Any] = {"at": now_ns, "route": request.id, "tokens": len(request.prompt)}
        if decision is not None:
            line |= {"replica": decision.replica_id, "prefix": decision.num_prefix_blocks}
        self._write_line(line if why is None else {**line, "refused": why})

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        """Write a line for the disconnect of a client."""
        self._write_line({"at": now_ns, "leave": request_id})

    def on_step(
        self, replica_id: int, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int
    ) -> None:
        """Write a line for a step with decisions, and one for each choice that ended."""
        if step is not None:
            plan = step.plan
            if plan.is_uniform:
                self._count_quiet_step(replica_id, step)
            else:
                line = {"at": now_ns, "replica": replica_id, "step": plan.step}
                line |= {"rows": len(plan.rows), "tokens": plan.num_tokens}
                line["plan"] = plan_digest(plan)
                quiet = self._quiet.pop(replica_id, None)
                self._write_line(line if quiet is None else {**line, "quiet": quiet})
        for delta in deltas:
            if delta.finish is not None:
                end = {"end": delta.request_id, "why": delta.finish.value}
                self._write_line({"at": now_ns, "replica": replica_id, **end})

    def on_start(self, replica_id: int, now_ns: int) -> None:
        """Write a line for a replica that begins to accept requests."""
        self._write_line({"at": now_ns, "start": replica_id})

    def on_death(self, replica_id: int, now_ns: int) -> None:
        """Write a line for a replica that died."""
        self._quiet.pop(replica_id, None)
        self._write_line({"at": now_ns, "death": replica_id})

    def on_failure(self, request_id: int, now_ns: int, why: str) -> None:
        """Write a line for a request that no replica has."""
        self._write_line({"at": now_ns, "end": request_id, "why": why})

    def close(self) -> str:
        """Write the steps that no line has yet and the last line, and return the hash in it."""
        for replica_id, quiet in sorted(self._quiet.items()):
            self._write_line({"replica": replica_id, "quiet": quiet})
        digest = self._hash.hexdigest()
        self._write_line({"sha256": digest})
        return digest

    def _count_quiet_step(self, replica_id: int, step: VirtualClockStep) -> None:
        """Add a step without decisions: its end, its rows and the blocks that they take."""
        count, digest = self._quiet.get(replica_id, (0, 0))
        rows = step.plan.rows
        numbers = [step.end_ns, row_digest([row.seq_id for row in rows])]
        numbers += [block for row in rows for block in row.new_blocks]
        self._quiet[replica_id] = count + 1, crc32(array("q", numbers).tobytes(), digest)

    def _write_line(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._hash.update(text.encode())
        self._write(text)
