"""Write the rule of speculative sampling: which drafts stay, and what replaces the others.

A draft was drawn from the law q of a small model. The law of the large model at this position is p.
Keep the draft with a probability, otherwise draw another token from a second law, so that the token
that results has exactly the law p, whatever q is.

1. `acceptance`: the probability with which a draft stays, from its p and its q.
2. `residual`: the weights of the tokens that may replace it. They need not sum to 1.
3. `next_token`: the token that results. `accept_u` and `replace_u` are two independent numbers,
   uniform on [0, 1): a draft stays where `accept_u` is below its acceptance. `draw(weights, u)` is
   given: the token that u selects.

The check uses all pairs of laws of three tokens in quarters, in exact fractions: it enumerates
every draft and both numbers, and adds up the law of what results.
"""

from fractions import Fraction

Law = dict[int, Fraction]


def draw(weights: Law, u: Fraction) -> int:
    """Return the token that u selects, with probabilities in proportion to the weights."""
    left = u * sum(weights.values())
    for token, weight in sorted(weights.items()):
        if left < weight:
            return token
        left -= weight
    raise ValueError(f"no token has a weight: {weights}")


def acceptance(p: Fraction, q: Fraction) -> Fraction:
    """Return the probability that a draft stays: p and q are its probabilities, and q > 0."""
    raise NotImplementedError


def residual(p: Law, q: Law) -> Law:
    """Return the weights of the tokens that may replace a draft."""
    raise NotImplementedError


def next_token(draft: int, p: Law, q: Law, accept_u: Fraction, replace_u: Fraction) -> int:
    """Return the draft, or a token in its place."""
    raise NotImplementedError
