"""Kinds of message in the ring of ranks: the first four bytes of each.

Owns the numbers. Knows no content.
"""

from __future__ import annotations

STEP, DRAFT_STEP, LATE_MASKS, RECORDED_LINE = range(4)
"""A step of the model, one of its draft model, masks of the step before, and a line of rank 0's
recording."""


def message_kind(message: bytes) -> int:
    """Return the kind of a message."""
    return int.from_bytes(message[:4], "little")


def kind_bytes(kind: int) -> bytes:
    """Return the first bytes of a message of that kind."""
    return kind.to_bytes(4, "little")
