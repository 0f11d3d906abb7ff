"""Acceptance rules of speculative decoding: which drafts stay and what follows. Pure functions.

Owns the rules and nothing else: no model, batch or randomness. Numbers may be floats or fractions,
so that the code that serves is the code that is proved by enumeration.

    drafts   d1 d2 d3 d_i was drawn from q_i
    target   p1 p2 p3 p4 computed at once, as if the drafts were the sequence

    accept_coupled     the target draws at every position with the noise that it would have used
                       without drafts; its draws are the output up to the first that is no draft.
                       Token for token the output without speculation, at any temperature; a greedy
                       draw is one of these.
    rejection_sample   d_i stays with probability min(1, p_i(d_i) / q_i(d_i)); the first that does
                       not is replaced by a draw from max(0, p_i - q_i); after the last comes a
                       plain draw. The output's distribution is the target's (Leviathan et al. 2023,
                       Chen et al. 2023). A draft that was not drawn has q_i = 1 at itself.

Always true: what is emitted is the longest accepted prefix of the drafts and one token more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

Number = TypeVar("Number", float, Fraction)


class RejectionInput(NamedTuple):
    """A draft with the numbers that decide its acceptance.

    p, q       probability of the draft under the target, and under what it was drawn from
    u          uniform on (0, 1), drawn for this position and nothing else
    residual   the token in its place, drawn from `residual(p, q)`
    """

    draft: int
    p: float | Fraction
    q: float | Fraction
    u: float | Fraction
    residual: int


def accept_coupled(drafts: Sequence[int], target_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the target's draws up to the first that is not the draft. O(drafts).

    target_tokens   one more than drafts: the target's own, after each prefix of the drafts
    """
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == target_tokens[num_accepted]:
        num_accepted += 1
    return tuple(target_tokens[: num_accepted + 1])


def is_accepted(draft_input: RejectionInput) -> bool:
    """Return u < min(1, p / q), without dividing: q may be 0, or the quotient may overflow."""
    return draft_input.u * draft_input.q < draft_input.p


def rejection_sample(inputs: Sequence[RejectionInput], bonus: int) -> tuple[int, ...]:
    """Return the drafts up to the first that is rejected, and the token after them. O(drafts).

    bonus   the target's own draw after the last draft
    """
    emitted: list[int] = []
    for draft_input in inputs:
        if not is_accepted(draft_input):
            return (*emitted, draft_input.residual)
        emitted.append(draft_input.draft)
    return (*emitted, bonus)


def residual(p: Mapping[int, Number], q: Mapping[int, Number]) -> dict[int, Number]:
    """Return the weights max(0, p - q), not normalised, of the tokens where they are above 0.

    Where none is, p equals q and nothing is ever rejected, but for rounding: p itself then.
    """
    weights = {
        token: probability - q[token] if token in q else probability
        for token, probability in p.items()
    }
    weights = {token: weight for token, weight in weights.items() if weight > 0}
    return weights or {token: probability for token, probability in p.items() if probability > 0}


def expected_tokens(acceptance_rate: float, num_drafts: int) -> float:
    """Return the mean tokens of a round: (1 - a^(k + 1)) / (1 - a).

    Each of `num_drafts` drafts is accepted independently with `acceptance_rate`; one token follows.
    """
    return sum(acceptance_rate**num_accepted for num_accepted in range(num_drafts + 1))
