"""Replay: schedule a recorded run again, on any machine, and find the first plan that differs.

Owns the lines of the file, and where the first difference is. The scheduler and the comparison are
in forge.replay_run.

    recording ──► each line ──► ReplayRun ──► its plan is the recorded one?   no: line, step, plans
                                  └──► deltas of each line: forge.sim.workloads.recordings
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from forge.errors import ForgeError, InvalidConfig
from forge.policy import Policy
from forge.policy_loader import load_policy
from forge.recording import Entry, read_entries
from forge.replay_run import ReplayRun
from forge.request import Delta
from forge.scheduler import Scheduler


class ReplayResult(NamedTuple):
    """Counts of a replay, and its outcome.

    difference    the first decision that differs from the recorded one, or None
    is_complete   the recording has its last line: nothing is missing
    """

    version: str
    steps: int
    requests: int
    tokens: int
    lines: int
    difference: str | None
    is_complete: bool


EntryCallback = Callable[[Entry, Sequence[Delta]], object]
"""Receives each line that replayed as recorded, and its deltas."""

StartCallback = Callable[[Scheduler, Entry], object]
"""Receives the scheduler that replays, and the header of the recording, before the first line."""


def replay(
    lines: Iterable[str],
    policy: str | Policy | None = None,
    on_entry: EntryCallback = lambda entry, deltas: None,
    on_start: StartCallback = lambda scheduler, header: None,
) -> ReplayResult:
    """Make the decisions of the recording again, up to the first that differs.

    policy   used instead of the recorded one, which a recording names only if it is built in
    Raises InvalidConfig where the file is damaged or no recording.
    """
    numbered_entries = read_entries(lines)
    _, header = next(numbered_entries)
    if "config" not in header:
        raise InvalidConfig("recording", "line 1 is no header of a recording", "Name another file")
    run = ReplayRun(header, load_policy(policy or header["policy"]))
    on_start(run.scheduler, header)
    number, difference, is_complete = 1, None, False
    for number, entry in numbered_entries:
        if "end" in entry:
            is_complete = entry["end"] == number - 1
            for after, _ in numbered_entries:
                message = f"line {after} comes after the end"
                raise InvalidConfig("recording", message, "Name a file of --record")
            break
        try:
            difference = run.apply(entry)
        except (ForgeError, AssertionError, LookupError) as error:
            difference = f"{error!r}"
        if difference is not None:
            difference = f"line {number}: {difference}"
            break
        on_entry(entry, run.deltas)
    return ReplayResult(
        header["forge"], run.steps, run.requests, run.tokens, number, difference, is_complete
    )
