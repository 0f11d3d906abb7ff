"""The field `timings` of answers: when the engine served a request, and what that took.

Owns the names, which are those of llama.cpp where it has them. Knows no API.

    return_timings: true ──► ChoiceTimings of each choice ──► {"queue_ms", "prompt_ms", ...}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge.server.json_schema import COUNT, object_schema, or_null
from forge.timings import ChoiceTimings

_MILLISECONDS = or_null({"type": "number", "minimum": 0})
TIMINGS = {
    "timings": object_schema(
        queue_ms=_MILLISECONDS,
        time_to_first_token_ms=_MILLISECONDS,
        cache_n=COUNT,
        prompt_n=COUNT,
        prompt_ms=_MILLISECONDS,
        predicted_n=COUNT,
        predicted_ms=_MILLISECONDS,
        preemptions=COUNT,
        recomputed_n=COUNT,
    )
}
"""Optional property of what the engine generates for a request with `return_timings`."""


class AnswerTimings:
    """Times of the choices of one answer, if its request returns them."""

    def __init__(self, is_requested: bool | None) -> None:
        self._is_requested = is_requested
        self._choices: list[ChoiceTimings] = []

    def add(self, timings: ChoiceTimings | None) -> None:
        """Add the times of a choice that has ended; None where it has none, or has not ended."""
        if timings is not None and self._is_requested:
            self._choices.append(timings)

    def fields(self, num_prompt: int, num_cached: int, num_output: int) -> dict[str, Any]:
        """Return the field `timings`; none where no choice was timed.

        num_prompt   tokens of the prompts, each of which counts once for all its choices
        num_cached   those of them that were in a cache
        num_output   tokens of all choices
        """
        choices = self._choices
        if not choices:
            return {}
        arrival_s = min(choice.arrival_s for choice in choices)
        first_step_s = _find_time(min, [choice.first_step_s for choice in choices])
        first_token_s = _find_time(min, [choice.first_token_s for choice in choices])
        last_token_s = _find_time(max, [choice.last_token_s for choice in choices])
        return {
            "timings": {
                "queue_ms": _elapsed_ms(arrival_s, first_step_s),
                "time_to_first_token_ms": _elapsed_ms(arrival_s, first_token_s),
                "cache_n": num_cached,
                "prompt_n": 0 if first_step_s is None else num_prompt - num_cached,
                "prompt_ms": _elapsed_ms(first_step_s, first_token_s),
                "predicted_n": num_output,
                "predicted_ms": _elapsed_ms(first_token_s, last_token_s),
                "preemptions": sum(choice.num_preemptions for choice in choices),
                "recomputed_n": sum(choice.num_recomputed_tokens for choice in choices),
            }
        }


def _find_time(
    select: Callable[[list[float]], float], times_s: Sequence[float | None]
) -> float | None:
    """Return the time that `select` takes of those that exist, or None."""
    existing_s = [time_s for time_s in times_s if time_s is not None]
    return select(existing_s) if existing_s else None


def _elapsed_ms(start_s: float | None, end_s: float | None) -> float | None:
    """Return the milliseconds between two times; None where one does not exist."""
    return None if start_s is None or end_s is None else round(1000 * (end_s - start_s), 3)
