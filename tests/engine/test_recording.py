"""The events of a recording: what cannot be computed from other lines, and nothing else."""

from __future__ import annotations

import json
from itertools import count

from forge.recording import RecordingWriter
from forge.request import Delta, FinishReason
from forge.seam import RowOutput, StepOutput, Verified


def test_only_ends_that_do_not_follow_from_tokens_are_written() -> None:
    """A stop string and an error end a choice early; limits and stop tokens follow from tokens."""
    deltas = (
        Delta(7, 0, (3,), FinishReason.LENGTH),
        Delta(7, 1, (4,), FinishReason.STOP, stop_token=4),
        Delta(7, 2, (5, 6), FinishReason.STOP),
        Delta(7, 3, (), FinishReason.ERROR, error="it broke"),
        Delta(8, 0, (9,)),
    )
    lines: list[str] = []
    clock = count(100)
    tape = RecordingWriter(lines.append, lambda: next(clock), {"forge": "1"})
    tape.record_commit(StepOutput(5, (RowOutput((3,)),)), deltas)
    entry = json.loads(lines[-1].partition(" ")[2])
    assert entry == {
        "done": [5, 100],
        "out": [3],
        "ended": [[7, 2, 2, None], [7, 3, 0, "it broke"]],
    }


def test_a_row_is_written_as_briefly_as_it_can_be_read_again() -> None:
    rows = (
        RowOutput((3,)),
        RowOutput((3, 4)),
        RowOutput(()),
        RowOutput((3, 4), verified=(Verified(3), Verified(0))),
        RowOutput(error="it broke"),
    )
    lines: list[str] = []
    tape = RecordingWriter(lines.append, lambda: 0, {"forge": "1"})
    tape.record_commit(StepOutput(0, rows), ())
    assert json.loads(lines[-1].partition(" ")[2])["out"] == [
        3,
        [3, 4],
        [],
        {"tokens": [3, 4], "judged": 2},
        {"error": "it broke"},
    ]
