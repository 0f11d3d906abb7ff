"""Wait reasons: why the last `schedule()` left sequences in the queue, in its own words.

Owns the reasons. Knows no queue and no pool: the scheduler writes each reason where it decides, so
a drawing of the queue never decides again.

    queue   3          "its token is in flight"            passed over
            5          "7 blocks needed, 1 kept, 4 free"   admission ended here: limit `blocks`
            6, 7, 8    no reason of their own              not examined: `limit` is their reason
"""

from __future__ import annotations

from typing import NamedTuple

SLOTS, BUDGET, BLOCKS, POLICY = "slots", "budget", "blocks", "policy"
SEARCH, PREEMPTION, COMMIT, PAUSE = "search", "preemption", "commit", "pause"
LIMITS = (SLOTS, BUDGET, BLOCKS, POLICY, SEARCH, PREEMPTION, COMMIT, PAUSE)
"""Names of what ends admission: no slot, no token of the step or no block is left; the policy
admits none; too many sequences were passed over; running sequences are short of blocks; a step in
flight must be committed first; or the engine is paused.
"""

OWN_TOKEN = "its own token is in flight"
SIBLING = "another choice of its request computes the prompt"
PREFIX = "another sequence computes the next block of its prefix"
FILES = "files of its next blocks are being read"


class AdmissionLimit(NamedTuple):
    """End of the admission of a plan while sequences waited.

    name   one of LIMITS
    why    the numbers
    """

    name: str
    why: str


class WaitReasons:
    """Reasons why sequences wait, as the last `schedule()` decided.

    by_seq_id   reasons of the sequences that it examined
    limit       the reason of all others; None where admission ended with the queue
    """

    def __init__(self) -> None:
        self.by_seq_id: dict[int, str] = {}
        self.limit: AdmissionLimit | None = None

    def clear(self) -> None:
        """Forget every reason: another plan begins."""
        self.by_seq_id.clear()
        self.limit = None

    def limit_admission(self, name: str, why: str) -> None:
        """Set what ended admission."""
        self.limit = AdmissionLimit(name, why)
