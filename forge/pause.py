"""PauseMode: what a pause of the engine does to the requests that are open.

Owns the names, which are those of vLLM.
"""

from __future__ import annotations

from enum import StrEnum


class PauseMode(StrEnum):
    """Treatment of open requests by a pause. New requests always wait for the end of the pause.

    ABORT   they end as aborted, with the tokens that they have
    WAIT    they are served to their end, and the pause begins then
    KEEP    they keep their tokens, and go on after the pause
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
