"""The fields `timings` and `metrics` of answers: when the engine served a request.

Owns the names: of timings those of llama.cpp where it has them, of metrics those of vLLM. Knows no
API.

    return_timings: true ──► ChoiceTimings of each choice ──► {"queue_ms", "prompt_ms", ...}
    return_metrics: true ──► ChoiceTimings of the choice  ──► {"queue_time_ms", ...}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge.server.json_schema import COUNT, object_schema, or_null, with_optional
from forge.timings import ChoiceTimings

_NOT_NEGATIVE = or_null({"type": "number", "minimum": 0})
TIMINGS = {
    "timings": object_schema(
        queue_ms=_NOT_NEGATIVE,
        time_to_first_token_ms=_NOT_NEGATIVE,
        cache_n=COUNT,
        prompt_n=COUNT,
        prompt_ms=_NOT_NEGATIVE,
        predicted_n=COUNT,
        predicted_ms=_NOT_NEGATIVE,
        preemptions=COUNT,
        recomputed_n=COUNT,
    )
}
"""Optional property of what the engine generates for a request with `return_timings`."""

METRICS = {
    "metrics": or_null(
        with_optional(
            object_schema(),
            time_to_first_token_ms=_NOT_NEGATIVE,
            generation_time_ms=_NOT_NEGATIVE,
            queue_time_ms=_NOT_NEGATIVE,
            mean_itl_ms=_NOT_NEGATIVE,
            tokens_per_second=_NOT_NEGATIVE,
        )
    )
}
"""Optional property of completions and chats, for a request with `return_metrics`."""


class AnswerTimings:
    """Times of the choices of one answer, if its request returns them.

    has_timings   the answer has `timings`
    has_metrics   the answer has `metrics`
    """

    def __init__(self, has_timings: bool | None, has_metrics: bool | None = None) -> None:
        self._has_timings = has_timings
        self._has_metrics = has_metrics
        self._choices: list[ChoiceTimings] = []

    def add(self, timings: ChoiceTimings | None) -> None:
        """Add the times of a choice that has ended; None where it has none, or has not ended."""
        if timings is not None and (self._has_timings or self._has_metrics):
            self._choices.append(timings)

    def fields(self, num_prompt: int, num_cached: int, num_output: int) -> dict[str, Any]:
        """Return the field `timings`; none where no choice was timed.

        num_prompt   tokens of the prompts, each of which counts once for all its choices
        num_cached   those of them that were in a cache
        num_output   tokens of all choices
        """
        choices = self._choices
        if not choices or not self._has_timings:
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

    def metrics(self, num_output: int) -> dict[str, Any]:
        """Return the field `metrics`, null where several choices share the answer; none without it.

        num_output   tokens of the choice
        """
        if not self._has_metrics:
            return {}
        if len(self._choices) != 1:
            return {"metrics": None}
        (choice,) = self._choices
        first_step_s, first_token_s = choice.first_step_s, choice.first_token_s
        decode_ms = _elapsed_ms(first_token_s, choice.last_token_s)
        inference_ms = _elapsed_ms(first_step_s, choice.last_token_s)
        return {
            "metrics": {
                "time_to_first_token_ms": _elapsed_ms(first_step_s, first_token_s),
                "generation_time_ms": decode_ms,
                "queue_time_ms": _elapsed_ms(choice.arrival_s, first_step_s),
                "mean_itl_ms": None
                if decode_ms is None or num_output < 2
                else round(decode_ms / (num_output - 1), 3),
                "tokens_per_second": round(1000 * num_output / inference_ms, 3)
                if inference_ms
                else None,
            }
        }

    def last_chunk_metrics(self, num_output: int) -> dict[str, Any]:
        """Return what `metrics` returns, without what is null: for the chunk with the usage."""
        found = self.metrics(num_output).get("metrics")
        if found is None:
            return {}
        return {"metrics": {name: value for name, value in found.items() if value is not None}}


def _find_time(
    select: Callable[[list[float]], float], times_s: Sequence[float | None]
) -> float | None:
    """Return the time that `select` takes of those that exist, or None."""
    existing_s = [time_s for time_s in times_s if time_s is not None]
    return select(existing_s) if existing_s else None


def _elapsed_ms(start_s: float | None, end_s: float | None) -> float | None:
    """Return the milliseconds between two times; None where one does not exist."""
    return None if start_s is None or end_s is None else round(1000 * (end_s - start_s), 3)
