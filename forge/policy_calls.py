"""Policy calls: ask a policy for a decision, and refuse one that is not among the choices.

Owns the wording of every error about a decision. Knows no queue, block or plan: a decision is made
among the sequences that are passed in.

    waiting              ──► policy.admit    ──► choose_admission   an index, or None
    running              ──► policy.preempt  ──► choose_victim      a sequence
    budget, prefilling   ──► policy.split    ──► choose_split       within the budget

Always true: what a policy raises or returns wrongly becomes a PolicyError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.errors import PolicyError
from forge.policy import Policy, Split
from forge.sequence import Sequence


def choose_admission(policy: Policy, waiting: list[Sequence]) -> int | None:
    """Return the index of the sequence to admit next, or None. Raises PolicyError."""
    choice = _ask(policy.admit, waiting)
    if choice is None:
        return None
    for index, sequence in enumerate(waiting):
        if sequence is choice:
            return index
    raise PolicyError(f"admit chose {_describe(choice)}. Choose one on offer")


def choose_victim(policy: Policy, running: list[Sequence]) -> Sequence:
    """Return the sequence that gives up its blocks. Raises PolicyError."""
    choice: object = _ask(policy.preempt, running)
    for sequence in running:
        if sequence is choice:
            return sequence
    raise PolicyError(f"preempt chose {_describe(choice)}. Choose one on offer")


def choose_split(
    policy: Policy, budget: int, num_decodes: int, prefilling: list[Sequence]
) -> Split:
    """Return how the next plan's tokens are split. Raises PolicyError."""
    split = _ask(policy.split, budget, num_decodes, prefilling)
    if not _is_within_offer(split, budget, num_decodes, prefilling):
        raise PolicyError(f"split gave {split} of a budget of {budget}. Stay within the offer")
    assert isinstance(split, Split)
    return split


def _ask(choose: Callable[..., Any], *offer: object) -> Any:
    """Return what the policy returns. Raises PolicyError, with file and line, for any exception."""
    try:
        return choose(*offer)
    except Exception as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        assert traceback is not None
        where = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        raise PolicyError(f"the policy raised {error!r} at {where}. Fix the policy") from error


def _describe(choice: object) -> str:
    return f"sequence {choice.id}" if isinstance(choice, Sequence) else repr(choice)


def _is_within_offer(
    split: object, budget: int, num_decodes: int, prefilling: list[Sequence]
) -> bool:
    """Return whether the split spends no more than the budget, and no more than was offered."""
    return (
        isinstance(split, Split)
        and len(split.chunks) == len(prefilling)
        and type(split.num_decodes) is int
        and 0 <= split.num_decodes <= num_decodes
        and all(type(n) is int for n in split.chunks)
        and all(0 <= n <= s.num_pending for n, s in zip(split.chunks, prefilling, strict=True))
        and split.num_decodes + sum(split.chunks) <= budget
    )
