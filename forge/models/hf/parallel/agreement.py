"""Agreement of ranks: what fails on one rank fails on all, before any of them waits for another.

Owns no communication: each function receives one that gathers. Knows no model.

    rank 0   part of a start ── ok ───────┐ gather ┌─ EngineDead: rank 1 failed: ...
    rank 1   part of a start ── raises ───┘        └─ its own error

Always true: a context of `raise_on_all` has no collective call inside, so that all ranks leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from forge.errors import EngineDead, one_line
from forge.models.hf.parallel.communicator import Communicator

MAX_TEXT_BYTES = 512
"""Bytes of an error that other ranks receive."""

GatherTexts = Callable[[str], Sequence[str]]
"""Returns every rank's text, in the order of ranks: a collective call."""


@contextmanager
def raise_on_all(gather_texts: GatherTexts) -> Iterator[None]:
    """Raise at the end of the context on every rank where the context raises on any.

    A rank raises its own error, or EngineDead with that of another rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # raised below, once the other ranks have it too
        error = raised
    texts = gather_texts("" if error is None else f"{type(error).__name__}: {one_line(error)}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise EngineDead(f"rank {rank} failed: {text}")


def gather_over_group(group: dist.ProcessGroup) -> GatherTexts:
    """Return the gathering of texts over a process group."""
    return lambda text: gather_objects(group, text)


def gather_over_communicator(communicator: Communicator, device: torch.device) -> GatherTexts:
    """Return the gathering of texts, cut to MAX_TEXT_BYTES, as tensors on the device."""

    def gather(text: str) -> list[str]:
        raw = text.encode(errors="replace")[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
        parts = communicator.all_gather(torch.tensor(list(raw), dtype=torch.uint8, device=device))
        return [bytes(part).rstrip(b"\0").decode(errors="replace") for part in parts.cpu().tolist()]

    return gather


def gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values
