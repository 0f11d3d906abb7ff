"""The end of a choice: its finish reason, the stop that matched, and what is wrong with it.

Owns the fields that the last part of a choice has in the APIs with choices. Knows no route.

    {"finish_reason": "stop", "stop_reason": "\\n", "matched_stop": "\\n"}
    {"finish_reason": "error", ..., "error": {"code": "schema_violation", ...}}

Always true: a choice that does not have its schema ends with "error" and with its error, and the
other choices of the request end as they would without it.
"""

from __future__ import annotations

import json

from forge.outputs import ChoiceOutput, TextDelta
from forge.request import INITIAL_WEIGHTS, OutputWeights
from forge.sequence import STRUCTURE_ERROR_PREFIX
from forge.server.errors import schema_violation_error
from forge.strict_json import SchemaViolation

_VIOLATION_PREFIX = f"{STRUCTURE_ERROR_PREFIX}: {SchemaViolation.__name__}("


def find_violation(end: ChoiceOutput | TextDelta) -> str | None:
    """Return how the engine saw a complete output violate its schema, or None.

    end   the choice, or its last delta
    """
    if end.error is None or not end.error.startswith(_VIOLATION_PREFIX):
        return None
    return end.error.removeprefix(_VIOLATION_PREFIX)[1:-2]  # a repr, without its quotes


def weights_fields(weights: OutputWeights) -> dict[str, object]:
    """Return the fields of a choice that say which weights it is of: none before an update."""
    if weights == INITIAL_WEIGHTS:
        return {}
    return {"weight_version": weights.version, "num_stale_tokens": weights.num_stale_tokens}


def end_fields(end: ChoiceOutput | TextDelta, violation: str | None) -> dict[str, object]:
    """Return the fields of a choice that its end decides, besides the finish reason.

    end         the choice, or its last delta
    violation   how it violates its schema, or None
    """
    return {
        "stop_reason": end.stop_match.reason,
        "matched_stop": end.stop_match.matched,
        **weights_fields(end.weights),
        **({} if violation is None else schema_violation_error(violation).envelope),
    }


def encode_end(finish_reason: str | None, delta: TextDelta, violation: str | None) -> str:
    """Return the JSON of a chunk's finish reason, which the last one's `end_fields` follow."""
    if finish_reason is None:
        return "null"
    fields = json.dumps(end_fields(delta, violation), separators=(",", ":"), allow_nan=False)
    return f'"{finish_reason}",{fields[1:-1]}'
