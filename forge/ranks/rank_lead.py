"""RankLead: rank 0 while it leads the others, and whether it waits for them.

Owns the writing end of the ring. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forge.ranks.message_kind import RECORDED_LINE, kind_bytes
from forge.ranks.rank_context import LeaderContext
from forge.ranks.step_ring import RingWriter


class RankLead:
    """Rank 0 of a model, from the start on.

    rank_context   number of ranks, and where they meet
    writer       writing end of the ring
    is_waiting   a call is in progress that may depend on another rank; True from the start, in
                 which ranks meet
    """

    def __init__(self, rank_context: LeaderContext) -> None:
        self.rank_context = rank_context
        self.writer: RingWriter = rank_context.open_writer()
        self.is_waiting = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Set `is_waiting` for the time of a call."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def send_line(self, line: str) -> None:
        """Send a line of the engine's recording, before the step that it leads to."""
        self.writer.send([kind_bytes(RECORDED_LINE), line.encode()])

    def end(self) -> None:
        """End the ring: the other ranks end after the steps that they have."""
        self.writer.close()
