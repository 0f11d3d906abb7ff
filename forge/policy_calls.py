"""Policy calls: ask a policy for a decision, and refuse one that is not among the choices.

Owns the policy's state and the wording of every error about a decision. Knows no queue, block or
plan: a decision is made among the values that are passed in.

    waiting              ──► policy.admit      ──► admission      an index, or None
    running              ──► policy.preempt    ──► victim         a sequence
    running, waiting     ──► policy.displace   ──► displacement   a sequence, or None
    budget, prefilling   ──► policy.split      ──► split          within the budget
    sessions             ──► policy.evict      ──► eviction       a session
    event                ──► policy.update     ──► state

Always true: what a policy raises or returns wrongly becomes a PolicyError that names it. An event
is never lost with it: an error of `update` is raised by the next call of `raise_pending`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from forge.errors import PolicyError
from forge.policy import Policy, PolicyContext, PolicyEvent, Split
from forge.sequence import Sequence as TokenSequence
from forge.sessions import Session

ChoiceT = TypeVar("ChoiceT", TokenSequence, Session)


class PolicyCalls:
    """Calls a policy with the current context, and keeps its state.

    policy          a value
    state           what `update` returned last
    pending_error   error of an update that `raise_pending` has not raised yet
    build_context   state -> the context of a decision that is made now
    """

    def __init__(self, policy: Policy, build_context: Callable[[Hashable], PolicyContext]) -> None:
        self.policy = policy
        self.state: Hashable = policy.initial_state
        self._build_context = build_context
        self.pending_error: PolicyError | None = None

    @property
    def chooses_evictions(self) -> bool:
        """True where the policy says which session's blocks go next."""
        return self.policy.evict is not None

    def admission(self, waiting: list[TokenSequence]) -> int | None:
        """Return the index of the sequence to admit next, or None. Raises PolicyError."""
        choice = self._ask(self.policy.admit, waiting)
        if choice is None:
            return None
        for index, sequence in enumerate(waiting):
            if sequence is choice:
                return index
        raise _not_on_offer("admit", choice)

    def victim(self, running: list[TokenSequence]) -> TokenSequence:
        """Return the sequence that gives up its blocks. Raises PolicyError."""
        return _pick("preempt", self._ask(self.policy.preempt, running), running)

    def displacement(
        self, running: list[TokenSequence], waiting: list[TokenSequence]
    ) -> TokenSequence | None:
        """Return the running sequence that is preempted for a waiting one, or None.

        Raises PolicyError.
        """
        if self.policy.displace is None or not running or not waiting:
            return None
        choice = self._ask(self.policy.displace, running, waiting)
        return None if choice is None else _pick("displace", choice, running)

    def split(self, budget: int, num_decodes: int, prefilling: list[TokenSequence]) -> Split:
        """Return how the next plan's tokens are split. Raises PolicyError."""
        split = self._ask(self.policy.split, budget, num_decodes, prefilling)
        if not _is_within_offer(split, budget, num_decodes, prefilling):
            pending = [each.num_pending for each in prefilling]
            raise PolicyError(
                f"split returned {split!r} for a budget of {budget}, decodes {num_decodes}, "
                f"pending {pending}. Return a Split within these, with a chunk for each sequence"
            )
        assert isinstance(split, Split)
        return split

    def eviction(self, sessions: list[Session]) -> Session:
        """Return the session whose cached blocks go next. Raises PolicyError."""
        assert self.policy.evict is not None, "the policy evicts in LRU order"
        return _pick("evict", self._ask(self.policy.evict, sessions), sessions)

    def notify(self, event: PolicyEvent) -> None:
        """Update the state after an event. An error waits for `raise_pending`."""
        assert self.policy.update is not None, "the policy has no state"
        try:
            self.state = _call(self.policy.update, self.state, event)
        except PolicyError as error:
            self.pending_error = error

    def raise_pending(self) -> None:
        """Raise the pending error."""
        error, self.pending_error = self.pending_error, None
        assert error is not None, "no update has failed"
        raise error

    def _ask(self, choose: Callable[..., Any], *offer: object) -> Any:
        return _call(choose, *offer, self._build_context(self.state))


def _call(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what the policy returns. Raises PolicyError, with file and line, for any exception.

    The line is that of the error, or of the function where the call itself fails.
    """
    try:
        return function(*arguments)
    except Exception as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        traceback = error.__traceback__
        assert traceback is not None
        while traceback.tb_next is not None:
            traceback = traceback.tb_next
            where = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        raise PolicyError(f"the policy raised {error!r} at {where}. Fix the policy") from error


def _pick(decision: str, choice: object, choices: Sequence[ChoiceT]) -> ChoiceT:
    for each in choices:
        if each is choice:
            return each
    raise _not_on_offer(decision, choice)


def _not_on_offer(decision: str, choice: object) -> PolicyError:
    name = repr(choice)
    if isinstance(choice, Session):
        name = f"session {choice.key}"
    elif isinstance(choice, TokenSequence):
        name = f"sequence {choice.id}"
    return PolicyError(f"{decision} returned {name}. Return one of its candidates")


def _is_within_offer(
    split: object, budget: int, num_decodes: int, prefilling: list[TokenSequence]
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
