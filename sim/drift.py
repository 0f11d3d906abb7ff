"""Drift: how far a cost model is off from steps that were measured, and whether that is too far.

Owns the errors, the cells in which they must hold, and the models that a fitted one has to beat.
Knows no fit of tables: what it is given may have come from anywhere.

    cells    {decode, mixed, prefill} x {few, some, many positions}
    gate     in each: median error 2 %, 90th percentile 6 %, mean error 1 % either way

A mean error of 1 % of every step is 5 % of a waiting time at 80 % load, which is why it is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from forge.seam import StepPlan
from sim.clock import Cost
from sim.cost import Affine, Constant


class Errors(NamedTuple):
    """Relative errors of predictions: how far off, and which way. Shares, not per cent."""

    number: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return (
            f"{self.number:>6}{100 * self.median:>9.2f} %{100 * self.p90:>9.2f} %"
            f"{100 * self.bias:>+9.2f} %"
        )


def errors_of(pairs: Iterable[tuple[int, int]]) -> Errors:
    """Of (predicted, measured) times; measured ones are above 0."""
    signed = [predicted / measured - 1 for predicted, measured in pairs]
    if not signed:
        return Errors(0, 0.0, 0.0, 0.0)
    sizes = sorted(abs(error) for error in signed)
    return Errors(len(sizes), median(sizes), sizes[(len(sizes) * 9) // 10], fmean(signed))


MOST = Errors(0, 0.02, 0.06, 0.01)
"""Errors that a cell may have."""

FEWEST = 20
"""Steps without which a cell says nothing."""

KV_TERCILES = ("few", "some", "many")


class Measured(NamedTuple):
    """A step, and nanoseconds that the device took for it."""

    plan: StepPlan
    ns: int


def kind_of(plan: StepPlan) -> str:
    """decode: every row is one token; prefill: none is; mixed: some are."""
    singles = sum(row.end - row.start == 1 for row in plan.rows)
    if singles == len(plan.rows):
        return "decode"
    return "mixed" if singles else "prefill"


def cells(steps: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The steps by kind, and within a kind by thirds of the positions that they reach."""
    found: dict[str, list[Measured]] = {}
    for kind in ("decode", "mixed", "prefill"):
        own = [step for step in steps if kind_of(step.plan) == kind]
        own.sort(key=lambda step: sum(row.end for row in step.plan.rows))
        for i, positions in enumerate(KV_TERCILES):
            part = own[i * len(own) // 3 : (i + 1) * len(own) // 3]
            if part:
                found[f"{kind}, {positions} positions"] = part
    return found


class Drift(NamedTuple):
    """Errors in each cell."""

    errors: Mapping[str, Errors]

    @property
    def faults(self) -> list[str]:
        """What is too far off, in words; none where the model still holds."""
        found = []
        for cell, errors in self.errors.items():
            if errors.number < FEWEST:
                continue
            for name, value in (("median", errors.median), ("p90", errors.p90)):
                most = getattr(MOST, name)
                if value > most:
                    found.append(f"{cell}: {name} error {value:.1%}, more than {most:.0%}")
            if abs(errors.bias) > MOST.bias:
                found.append(f"{cell}: steps take {-errors.bias:+.1%}, beyond {MOST.bias:.0%}")
        return found


def drift(cost: Cost, steps: Sequence[Measured]) -> Drift:
    """How far the cost model is off from these steps."""
    return Drift(
        {
            cell: errors_of((cost.step_ns(plan), ns) for plan, ns in own)
            for cell, own in cells(steps).items()
        }
    )


def baselines(steps: Sequence[Measured]) -> dict[str, Cost]:
    """What a fitted model has to beat: the best constant, and the best line in rows and tokens."""
    middle = round(median(step.ns for step in steps))
    return {"constant": Constant(middle), "affine": affine(steps)}


def affine(steps: Sequence[Measured]) -> Affine:
    """Base, row and token that suit the steps best, none below 0: relative least squares.

    Of the three numbers each subset is tried, which is exact and needs no library.
    """
    lines = [
        ((1 / ns, len(plan.rows) / ns, plan.num_tokens / ns), Measured(plan, ns))
        for plan, ns in steps
    ]
    best: tuple[float, tuple[float, float, float]] = (float("inf"), (0.0, 0.0, 0.0))
    for subset in range(1, 8):
        used = [i for i in range(3) if subset >> i & 1]
        solved = _solved(
            [[sum(x[i] * x[j] for x, _ in lines) for j in used] for i in used],
            [sum(x[i] for x, _ in lines) for i in used],
        )
        if solved is None or min(solved) < 0:
            continue
        whole = [0.0, 0.0, 0.0]
        for i, value in zip(used, solved, strict=True):
            whole[i] = value
        error = sum((sum(a * b for a, b in zip(whole, x, strict=True)) - 1) ** 2 for x, _ in lines)
        if error < best[0]:
            best = (error, (whole[0], whole[1], whole[2]))
    base, row, token = best[1]
    return Affine(round(base), round(row), round(token))


def _solved(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """x with matrix x = target, by elimination; None where there is not one."""
    size = len(target)
    rows = [[*line, value] for line, value in zip(matrix, target, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) <= 1e-12 * max(map(abs, matrix[i])):
            return None
        for r in range(size):
            if r != i:
                share = rows[r][i] / rows[i][i]
                rows[r] = [a - share * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
