"""ChoiceTimings: when the engine served one choice of a request, and what preemptions cost it.

Owns the values. Knows no clock: forge.timings_recorder reads one.

    arrival       first step       first token       last token
       |-- queue ----|---- prefill -----|---- decode ----|
                            events: admitted, load, preempted

Times are seconds of time.monotonic(), which is the same in all processes of a machine.
"""

from __future__ import annotations

from typing import NamedTuple


class TimedEvent(NamedTuple):
    """Change of a choice in the engine.

    name   admitted (to the batch), load (of its blocks from host memory) or preempted
    text   what the plan says of it, such as "new, 16 tokens shared"
    """

    time_s: float
    name: str
    text: str


class ChoiceTimings(NamedTuple):
    """Times of a choice, from its request's arrival at the engine on.

    first_step_s            when the first step that serves it was planned; None: none was
    first_token_s           when its first token was there; None: it has none
    last_token_s            when its last token was there; None: it has none
    num_preemptions         plans that took its blocks
    num_recomputed_tokens   positions computed again after that
    events                  in order of time
    """

    arrival_s: float
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    events: tuple[TimedEvent, ...] = ()
