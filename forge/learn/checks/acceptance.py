"""Check of exercise 7: the law of the tokens that a learner's rule emits, by enumeration.

Owns the pairs of laws and the known wrong answers. The rules that are compared with are those that
serve: `forge.acceptance`.

    every draft, weighted by q  x  every accept_u  x  every replace_u  ──►  a law, equal to p or not
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from math import lcm
from types import ModuleType

from forge.acceptance import RejectionInput, is_accepted, residual
from forge.learn.answers import WrongAnswer, create_random, shorten

NUM_TOKENS, DENOMINATOR = 3, 4
GRID = 12
"""Points of each uniform number: all thresholds of laws in quarters are multiples of 1/12."""

Law = dict[int, Fraction]
Rule = Callable[[int, Law, Law, Fraction, Fraction], int]

assert lcm(*range(1, DENOMINATOR + 1)) == GRID, "thresholds are a/b with a, b <= DENOMINATOR"
POINTS = tuple(Fraction(2 * i + 1, 2 * GRID) for i in range(GRID))


def all_laws(tokens: tuple[int, ...]) -> list[Law]:
    """Return every law of the tokens in multiples of 1/DENOMINATOR."""
    counts = product(range(DENOMINATOR + 1), repeat=len(tokens))
    return [
        {token: Fraction(n, DENOMINATOR) for token, n in zip(tokens, each, strict=True)}
        for each in counts
        if sum(each) == DENOMINATOR
    ]


def output_law(rule: Rule, p: Law, q: Law) -> Law:
    """Return the law of the rule's token, for drafts of the law q."""
    found = dict.fromkeys(p, Fraction())
    for draft, weight in q.items():
        if not weight:
            continue
        for accept_u, replace_u in product(POINTS, repeat=2):
            token = rule(draft, p, q, accept_u, replace_u)
            if token not in found:
                raise WrongAnswer(f"next_token returned {shorten(token)}, which is no token of p")
            found[token] += weight / GRID**2
    return found


def check(module: ModuleType, seed: int) -> str:
    """Compare acceptance, residual and the law of the output, for all pairs of laws."""
    random = create_random(seed, 7)
    laws = all_laws(tuple(random.sample(range(1000), NUM_TOKENS)))
    pairs = list(product(laws, repeat=2))
    random.shuffle(pairs)
    for p, q in pairs:
        _check_acceptance(module, p, q)
        _check_residual(module, p, q)
    for p, q in pairs:
        law = output_law(module.next_token, p, q)
        if law != p:
            raise WrongAnswer(
                f"next_token: p is {show(p)}, q is {show(q)}, and the output has the law "
                f"{show(law)}",
                _law_hint(module, law, p, q),
            )
        _check_use_of_draft(module, p, q)
    return f"{len(pairs)} pairs of laws: the output has exactly the law p, whatever q is"


def show(law: Law) -> str:
    """Return a law as text: token and fraction."""
    return "{" + ", ".join(f"{token}: {p}" for token, p in sorted(law.items())) + "}"


def _check_acceptance(module: ModuleType, p: Law, q: Law) -> None:
    """Raise WrongAnswer unless drafts stay as `is_accepted` decides."""
    for token, chance in q.items():
        if not chance:
            continue
        value = module.acceptance(p[token], chance)
        if not isinstance(value, Fraction | int):
            what = f"acceptance returned {shorten(value)}, which is no exact number"
            raise WrongAnswer(what, "Compute with the fractions that are given")
        accepted = [is_accepted(RejectionInput(token, p[token], chance, u, token)) for u in POINTS]
        expected = Fraction(sum(accepted), GRID)
        if value != expected:
            hints = {
                p[token]: "p alone rejects too often: a draft that both laws like as much must "
                "stay. Compare p with q",
                1 - expected: "That is the probability of a rejection",
            }
            raise WrongAnswer(
                f"acceptance({p[token]}, {chance}) is {value}, expected {expected}",
                hints.get(Fraction(value), "A probability is at most 1" if value > 1 else ""),
            )


def _check_residual(module: ModuleType, p: Law, q: Law) -> None:
    """Raise WrongAnswer unless the weights are in proportion to those of `residual`."""
    if p == q:
        return  # nothing is rejected, so any weights serve
    found, right = module.residual(dict(p), dict(q)), residual(p, q)
    if not isinstance(found, dict):
        raise WrongAnswer(f"residual returned {shorten(found)}, which is no dict")
    total, right_total = sum(found.values()), sum(right.values())
    scaled = {t: w / total for t, w in found.items() if w} if total else {}
    if scaled != {t: w / right_total for t, w in right.items()}:
        if scaled == {t: w for t, w in p.items() if w}:
            hint = "Tokens with p < q are emitted often enough as drafts: draw only what is missing"
        elif any(weight < 0 for weight in found.values()):
            hint = "A token with q > p has no weight, not a negative one"
        else:
            hint = "How much of p do the accepted drafts leave to each token?"
        what = f"residual({show(p)}, {show(q)}) is {show(found)}, expected {show(right)}"
        raise WrongAnswer(f"{what}, or a multiple", hint)


def _check_use_of_draft(module: ModuleType, p: Law, q: Law) -> None:
    """Raise WrongAnswer unless a draft stays exactly where `accept_u` is below its acceptance.

    A rule that draws from p has the right law too, but then no draft is of use.
    """
    for draft, chance in q.items():
        if not chance:
            continue
        threshold = module.acceptance(p[draft], chance)
        for accept_u in (Fraction(), threshold, *POINTS):
            if accept_u == 1:
                continue
            token = module.next_token(draft, dict(p), dict(q), accept_u, POINTS[0])
            if (token == draft) != (accept_u < threshold):
                raise WrongAnswer(
                    f"next_token: p is {show(p)}, q is {show(q)}, and the draft {draft} has the "
                    f"acceptance {threshold}; with accept_u = {accept_u} the token is {token}",
                    "A draft stays exactly where accept_u is below its acceptance: a draft that "
                    "stays is a token that costs no step",
                )


def _law_hint(module: ModuleType, law: Law, p: Law, q: Law) -> str:
    """Return the hint of a rule whose output has another law than p."""

    def one_coin(draft: int, p: Law, q: Law, accept_u: Fraction, replace_u: Fraction) -> int:
        is_kept = accept_u < module.acceptance(p[draft], q[draft])
        return draft if is_kept else module.draw(module.residual(p, q), accept_u)

    if hasattr(module, "draw") and law == output_law(one_coin, p, q):
        return (
            "One number decides twice: where a draft is rejected accept_u is large, so it selects "
            "the last tokens. Use replace_u for the replacement"
        )
    if law == q:
        return "Every draft is kept"
    return "Keep the draft where accept_u is below its acceptance, otherwise draw a replacement"
