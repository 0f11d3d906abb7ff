"""Fitting: tables from samples, by bounded relative least squares.

Owns how parameters are found and how far off they are on samples that the fit has not seen. Knows
no clock and no file. Needs numpy, which is imported here and nowhere on the way of a simulation:
what comes out are whole numbers, and only those are run.

    samples ──► four in five ──► every parameter at least 0, squares of relative errors least
            └─► one in five  ──► errors that are told, and residuals for sim/noise.py

The matrix is the model itself, asked for one parameter after the other, so fit and use cannot
disagree. Where samples say little, neighbours in a table are pulled together, weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from forge.errors import InvalidConfig
from sim.host import HostSample, middles
from sim.profiling import Sample
from sim.table import (
    FS_PER_NS,
    Commit,
    Decode,
    Draft,
    Launch,
    Mixed,
    Planning,
    Tables,
    Work,
    filled,
    flat,
    level,
    work_of,
)
from sim.workload import drawn

HELD = 84
"""Purpose of the draws that hold samples out."""

HELD_SHARE = 0.2
BENDS = (0, 256, 1024, 4096)
"""Means of positions at which a row's cost may bend; the one that fits best is taken."""

UNIT = 10**12
"""A parameter's value while the model is asked for it: large, so that rounding is nothing."""

LAUNCH_KNOTS = 24
"""Numbers of tokens, at most, at which launches are told apart."""

NEIGHBOURS, SIDES = 0.003, 0.0003
"""Weights of agreement, as shares of that of the samples: of neighbours in a table, and of the two
sides of a bend."""

Part = TypeVar("Part", Decode, Mixed, Draft, Planning, Launch, Commit)
Pulls = Callable[[Any], Iterable[tuple[int, int, float]]]


def numeric() -> Any:
    """numpy. Raises InvalidConfig where it is not installed."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise InvalidConfig(
            "calibrate", "a fit needs numpy, which is not installed", "Install numpy"
        ) from None
    return numpy


def nonnegative(matrix: Any, target: Any) -> Any:
    """x, no element below 0, for which |matrix x - target| is least.

    Elements that would be negative are set to 0, and freed once more where that was too much: the
    active set of Lawson and Hanson, begun from the unbounded solution.
    """
    np = numeric()
    size = matrix.shape[1]
    free = np.ones(size, bool)
    freed = np.zeros(size, bool)
    x = np.zeros(size)
    for _ in range(4 * size + 1):
        x = np.zeros(size)
        if free.any():
            x[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if (x < 0).any():
            free &= x >= 0
            continue
        gain = matrix.T @ (target - matrix @ x)
        gain[free | freed] = 0
        best = int(gain.argmax()) if size else 0
        if not size or gain[best] <= 1e-9 * float(np.abs(target).sum()):
            break
        free[best] = freed[best] = True
    return np.maximum(x, 0.0)


class Target(NamedTuple):
    """What the works take together, in nanoseconds, and the time that an error is a share of."""

    works: tuple[Work, ...]
    ns: int
    whole_ns: int


def target(work: Work, ns: int) -> Target:
    """Of one work; errors are shares of its time, which is above 0."""
    return Target((work,), ns, ns)


def fitted(part: Part, targets: Sequence[Target], pulls: Pulls | None = None) -> Part:
    """The part with the parameters that suit the targets best.

    pulls   pairs of parameters that should be alike, and how much so
    """
    np = numeric()
    count = len(flat(part))
    units = [filled(part, [UNIT * (i == j) for j in range(count)]) for i in range(count)]
    rows = [
        [sum(unit.fs(work) for work in works) / UNIT / whole_ns for unit in units]
        for works, _, whole_ns in targets
    ]
    matrix = np.array(rows, float).reshape(len(rows), count)
    scales = np.sqrt((matrix**2).sum(0))
    seen = scales > 0
    scales[~seen] = 1.0
    wanted = np.array([ns / whole_ns for _, ns, whole_ns in targets], float)
    together: list[Any] = []
    for one, other, share in pulls(part) if pulls is not None else ():
        if seen[one] or seen[other]:
            line = np.zeros(count)
            weight = share * max(scales[one], scales[other])
            line[one], line[other] = weight, -weight
            together.append(line)
    whole = np.vstack([matrix, *together])
    wanted = np.concatenate([wanted, np.zeros(len(together))])
    norms = np.sqrt((whole**2).sum(0))
    norms[norms == 0] = 1.0
    solution = nonnegative(whole / norms, wanted) / norms
    return filled(part, [round(float(ns) * FS_PER_NS) for ns in solution])


def misfit(part: Part, targets: Sequence[Target]) -> float:
    """Mean of squared relative errors."""
    return fmean(
        ((sum(map(part.fs, works)) / FS_PER_NS - ns) / whole_ns) ** 2
        for works, ns, whole_ns in targets
    )


# Samples.


def split(samples: Sequence[Sample], seed: int) -> tuple[list[Sample], list[Sample]]:
    """What is fitted, and what is held out: the same for the same seed."""
    held = [drawn(seed, HELD, place) < HELD_SHARE for place in range(len(samples))]
    return (
        [sample for sample, out in zip(samples, held, strict=True) if not out],
        [sample for sample, out in zip(samples, held, strict=True) if out],
    )


def launch_ns(sample: Sample) -> int:
    """The middle one of its launches."""
    return max(1, round(median(sample.launches_ns)))


def waits(sample: Sample) -> bool:
    """The host is busy for longer than the device: it computes itself, or launches each kernel."""
    return median(sample.launches_ns) > median(sample.steps_ns)


def usual_ns(sample: Sample, launch: Launch, draft_launch: Draft | None) -> int:
    """What the launch takes by the tables, where the host is waited for; else nothing."""
    if not waits(sample):
        return 0
    spent = launch.fs(work_of(sample.plan))
    if draft_launch is not None:
        spent += sum(draft_launch.fs(work_of(each)) for each in sample.plan.drafts)
    return spent // FS_PER_NS


def whole_times(sample: Sample) -> list[int]:
    """What the device took each time, and the launch where the host is waited for."""
    if not waits(sample):
        return [max(1, ns) for ns in sample.steps_ns]
    return [a + b for a, b in zip(sample.steps_ns, sample.launches_ns, strict=True)]


def whole_ns(sample: Sample) -> int:
    """The middle one of these times."""
    return max(1, round(median(whole_times(sample))))


def _step(sample: Sample, work: Work, launch: Launch) -> Target:
    """The step without the launch. A launch is told by rows and tokens alone: what else it depends
    on is the step's."""
    whole = whole_ns(sample)
    return Target((work,), whole - usual_ns(sample, launch, None), whole)


# Parts.


def _decode_pulls(part: Decode) -> Iterable[tuple[int, int, float]]:
    """What a position costs hardly depends on the number of rows, nor on which side of the bend."""
    count = len(part.base.at)
    for i in range(count):
        yield count + i, 2 * count + i, SIDES
        if i + 1 < count:
            yield count + i, count + i + 1, NEIGHBOURS
            yield 2 * count + i, 2 * count + i + 1, NEIGHBOURS


def _decode(targets: Sequence[Target]) -> Decode:
    sizes = sorted({work.rows for (work,), *_ in targets})
    longest = max(work.most_kv for (work,), *_ in targets)
    best: tuple[float, Decode] | None = None
    for bend in BENDS:
        if bend and bend >= longest:
            continue
        form = Decode(bend, level(sizes), level(sizes), level(sizes), 0)
        part = fitted(form, targets, _decode_pulls)
        error = misfit(part, targets)
        if best is None or error < 0.9 * best[0]:
            best = (error, part)
    assert best is not None, "no bend was tried"
    return best[1]


def _mixed(targets: Sequence[Target]) -> Mixed:
    return fitted(Mixed(level(sorted({work.tokens for (work,), *_ in targets}))), targets)


def _knotted(works: Iterable[Work], most: int) -> list[int]:
    """Tokens to be knots: those of samples, thinned."""
    sizes = sorted({work.tokens for work in works})
    return sorted({sizes[i * (len(sizes) - 1) // max(1, most - 1)] for i in range(most)})


def tables_of(
    samples: Sequence[Sample], plans: Sequence[HostSample], commits: Sequence[HostSample]
) -> Tables:
    """Tables that suit the samples and what the host took. Raises InvalidConfig for too few."""
    works = [(sample, work_of(sample.plan)) for sample in samples]
    alone = [(sample, work) for sample, work in works if not sample.plan.drafts]
    if len({bool(work.chunks) for _, work in alone}) < 2:
        raise InvalidConfig(
            "minutes", f"{len(samples)} kinds of steps are too few to fit", "Give more time"
        )
    launch = _launch(alone)
    decode = _decode([_step(s, w, launch) for s, w in alone if not w.chunks])
    mixed = _mixed([_step(s, w, launch) for s, w in alone if w.chunks])
    draft, draft_launch = _drafts(works, mixed, launch)
    return Tables(
        decode=decode,
        mixed=mixed,
        planning=_host(Planning(), middles(plans)),
        launch=launch,
        commit=_host(Commit(), middles(commits)),
        draft=draft,
        draft_launch=draft_launch,
    )


def _launch(alone: Sequence[tuple[Sample, Work]]) -> Launch:
    alike: dict[tuple[int, int], list[tuple[Sample, Work]]] = {}
    for sample, work in alone:
        alike.setdefault((work.rows, work.tokens), []).append((sample, work))
    targets = [target(sample.bound[0], max(1, sample.bound[1])) for sample, _ in alone]
    for group in alike.values():
        times = [launch_ns(sample) for sample, _ in group]
        # Of a host that computes, the least: the rest is told by what the device is told by.
        least = any(waits(sample) for sample, _ in group)
        ns = min(times) if least else round(median(times))
        targets += [target(work, ns) for _, work in group]
    works = [work for (work,), *_ in targets]
    decodes = sorted({work.rows for work in works if not work.chunks})
    tokens = _knotted((work for work in works if work.chunks), LAUNCH_KNOTS)
    return fitted(Launch(level(decodes), level(tokens)), targets)


def _drafts(
    works: Sequence[tuple[Sample, Work]], mixed: Mixed, launch: Launch
) -> tuple[Draft | None, Draft | None]:
    """What plans of the draft model add to steps and launches that are known without."""
    drafted = [
        (sample, work, tuple(work_of(each) for each in sample.plan.drafts))
        for sample, work in works
        if sample.plan.drafts
    ]
    if not drafted:
        return None, None
    form = Draft(level(sorted({drafts[0].rows for *_, drafts in drafted})))
    launches = []
    for sample, work, drafts in drafted:
        launched = launch_ns(sample)
        launches.append(Target(drafts, launched - launch.fs(work) // FS_PER_NS, launched))
    draft_launch = fitted(form, launches)
    steps = []
    for sample, work, drafts in drafted:
        whole = whole_ns(sample)
        usual = usual_ns(sample, launch, draft_launch)
        steps.append(Target(drafts, whole - usual - mixed.fs(work) // FS_PER_NS, whole))
    return fitted(form, steps), draft_launch


def _host(part: Part, samples: Sequence[HostSample]) -> Part:
    """A stall of fifty times does little: an error is a share of what was measured."""
    targets = [target(work, max(1, ns)) for work, ns in samples]
    return fitted(part, targets) if targets else part
