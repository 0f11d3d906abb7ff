"""Cost errors: the errors of a cost model on measured steps, and the gate that they must pass.

Owns the errors, the cells in which they must hold, and the baselines that a fitted model has to
beat. Knows no fit of tables: a cost model of any origin can be checked.

    group_by_cell   {decode, mixed, prefill} x {few, some, many positions}
    gate            in each: median error 2 %, 90th percentile 6 %, mean error 1 % up or down

A small limit of the mean: 1 % of each step is 5 % of a waiting time at 80 % load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from forge.seam import StepPlan
from forge.sim.cost.model import CostModel
from forge.sim.cost.simple import AffineCost, ConstantCost


class RelativeErrors(NamedTuple):
    """Relative errors of predictions, as shares.

    number   predictions; bias: the signed mean error
    """

    number: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return (
            f"{self.number:>6}{100 * self.median:>9.2f} %{100 * self.p90:>9.2f} %"
            f"{100 * self.bias:>+9.2f} %"
        )


def summarize_errors(pairs: Iterable[tuple[int, int]]) -> RelativeErrors:
    """Return the errors of (predicted, measured) times. Measured times are above 0."""
    signed = [predicted / measured - 1 for predicted, measured in pairs]
    if not signed:
        return RelativeErrors(0, 0.0, 0.0, 0.0)
    sizes = sorted(abs(error) for error in signed)
    return RelativeErrors(len(sizes), median(sizes), sizes[(len(sizes) * 9) // 10], fmean(signed))


MAX_ERRORS = RelativeErrors(0, 0.02, 0.06, 0.01)
"""Limits of the errors of a cell."""

MIN_STEPS = 20
"""Cells with fewer steps are not checked."""

KV_TERCILES = ("few", "some", "many")


class MeasuredStep(NamedTuple):
    """A step and the nanoseconds of the device."""

    plan: StepPlan
    ns: int


def step_kind(plan: StepPlan) -> str:
    """Return decode (every row is one token), prefill (no row is) or mixed."""
    singles = sum(row.end - row.start == 1 for row in plan.rows)
    if singles == len(plan.rows):
        return "decode"
    return "mixed" if singles else "prefill"


def group_by_cell(steps: Sequence[MeasuredStep]) -> dict[str, list[MeasuredStep]]:
    """Return the steps by kind, and within a kind by terciles of their positions."""
    found: dict[str, list[MeasuredStep]] = {}
    for kind in ("decode", "mixed", "prefill"):
        steps_of_kind = [step for step in steps if step_kind(step.plan) == kind]
        steps_of_kind.sort(key=lambda step: sum(row.end for row in step.plan.rows))
        for i, positions in enumerate(KV_TERCILES):
            part = steps_of_kind[i * len(steps_of_kind) // 3 : (i + 1) * len(steps_of_kind) // 3]
            if part:
                found[f"{kind}, {positions} positions"] = part
    return found


class CellErrors(NamedTuple):
    """Errors in each cell."""

    errors: Mapping[str, RelativeErrors]

    @property
    def violations(self) -> list[str]:
        """Errors above their limits, as texts; empty where the model passes the gate."""
        found = []
        for cell, errors in self.errors.items():
            if errors.number < MIN_STEPS:
                continue
            for name, value in (("median", errors.median), ("p90", errors.p90)):
                limit = getattr(MAX_ERRORS, name)
                if value > limit:
                    found.append(f"{cell}: {name} error {value:.1%}, more than {limit:.0%}")
            if abs(errors.bias) > MAX_ERRORS.bias:
                found.append(
                    f"{cell}: steps take {-errors.bias:+.1%}, beyond {MAX_ERRORS.bias:.0%}"
                )
        return found


def compute_cell_errors(cost: CostModel, steps: Sequence[MeasuredStep]) -> CellErrors:
    """Return the errors of the cost model on these steps."""
    return CellErrors(
        {
            cell: summarize_errors((cost.step_ns(plan), ns) for plan, ns in cell_steps)
            for cell, cell_steps in group_by_cell(steps).items()
        }
    )


def fit_baselines(steps: Sequence[MeasuredStep]) -> dict[str, CostModel]:
    """Return the best constant, and the best affine function of rows and tokens."""
    middle = round(median(step.ns for step in steps))
    return {"constant": ConstantCost(middle), "affine": fit_affine(steps)}


def fit_affine(steps: Sequence[MeasuredStep]) -> AffineCost:
    """Return the base, row and token times that fit the steps best, none below 0.

    Relative least squares. Every subset of the three parameters is tried, which is exact and needs
    no library.
    """
    lines = [
        ((1 / ns, len(plan.rows) / ns, plan.num_tokens / ns), MeasuredStep(plan, ns))
        for plan, ns in steps
    ]
    best: tuple[float, tuple[float, float, float]] = (float("inf"), (0.0, 0.0, 0.0))
    for subset in range(1, 8):
        used = [i for i in range(3) if subset >> i & 1]
        solved = _solve(
            [[sum(x[i] * x[j] for x, _ in lines) for j in used] for i in used],
            [sum(x[i] for x, _ in lines) for i in used],
        )
        if solved is None or min(solved) < 0:
            continue
        solution = [0.0, 0.0, 0.0]
        for i, value in zip(used, solved, strict=True):
            solution[i] = value
        error = sum(
            (sum(a * b for a, b in zip(solution, x, strict=True)) - 1) ** 2 for x, _ in lines
        )
        if error < best[0]:
            best = (error, (solution[0], solution[1], solution[2]))
    base, row, token = best[1]
    return AffineCost(round(base), round(row), round(token))


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Return x with matrix x = target by elimination, or None where the matrix is singular."""
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
