"""Fitting: tables from samples and from steps that were served, by relative least squares.

Owns how parameters are found and how far off they are on samples that the fit has not seen. Knows
no clock and no file. Needs numpy, which is imported here and nowhere on the way of a simulation:
what comes out are whole numbers, and only those are run.

    samples ──► four in five ──► every parameter at least 0, squares of relative errors least
            └─► one in five  ──► errors that are told, and residuals for sim/noise.py
    served  ──► join the samples; a step that is far off weighs less (Huber 1964), for it is one
                time and no median: a host stalls in the midst of a step

The matrix is the model itself, asked for one parameter after the other, so fit and use cannot
disagree. Where samples say little, neighbours in a table are pulled together, weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from forge.errors import InvalidConfig
from sim.host import HostSample, middles
from sim.profiling import PADDED, Sample
from sim.squares import nonnegative, numeric
from sim.table import (
    FS_PER_NS,
    Commit,
    Decode,
    Draft,
    Launch,
    Mixed,
    Planning,
    Steps,
    Tables,
    Tiled,
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

FEW_ROWS, MANY_ROWS = 4, 128
"""Longer rows, and rows at all, of which there are recordings."""

ALONE, APART = 128, 64
"""Tokens of recordings up to which longer rows alone must begin at their start, and above which
rows of one token beside a few of them are read apart."""

TILES = (8, 16, 32, 64, 128)
"""Tokens of a row that a kernel may take at once: up to 128 queries, by the heads that share a key
head."""

TILE, SHARING = 32, 1400
"""What is tried first."""

SHARINGS = (1000, 1200, 1400, 1700, 2000)
"""Per mille: how much longer a part may take while two share a processor."""

DEVICES = tuple((processors, heads) for processors in (108, 132, 148) for heads in (2, 4, 8, 16))
"""Processors of an A100, an H100 or H200, and a B200, and key heads."""

CHOOSING = 300
"""Probes, and served steps, by which a bend, tiles and processors are chosen, at most."""

BETTER = 0.9
"""Of the error: what a form with more parameters has to reach to be taken."""

ROUNDS, USUAL, LEAST = 4, 3.0, 0.02
"""Of fits that weigh large errors less; errors that count in full, in medians; and at least."""

STALL = 0.2
"""Of a step's time: larger errors count as this one where forms are compared."""

NEIGHBOURS, SIDES = 0.03, 0.0003
"""Weights of agreement, as shares of that of the samples: of neighbours in a table, and of the two
sides of a bend."""

Part = TypeVar("Part", Decode, Tiled, Mixed, Draft, Planning, Launch, Commit)
Pulls = Callable[[Any], Iterable[tuple[int, int, float]]]


class Target(NamedTuple):
    """What the works take together, in nanoseconds, and the time that an error is a share of."""

    works: tuple[Work, ...]
    ns: int
    whole_ns: int


class Known(NamedTuple):
    """Targets of one work each: probes, and steps that were served."""

    probes: Sequence[Target]
    served: Sequence[Target] = ()

    @property
    def every(self) -> list[Target]:
        """Both."""
        return [*self.probes, *self.served]

    @property
    def some(self) -> list[Target]:
        """As many of each as forms are chosen by, spread over all."""
        return [
            each[i]
            for each in (self.probes, self.served)
            for i in range(0, len(each), -(-len(each) // CHOOSING) or 1)
        ]

    @property
    def rounds(self) -> int:
        """A probe is a median; a step that was served is one time, and a stall may be in it."""
        return ROUNDS if self.served else 0

    def those(self, counts: Callable[[Work], bool]) -> Known:
        """Only of works that count."""
        probes, served = (
            [each for each in targets if counts(each.works[0])]
            for targets in (self.probes, self.served)
        )
        return Known(probes, served)


def target(work: Work, ns: int) -> Target:
    """Of one work; errors are shares of its time, which is above 0."""
    return Target((work,), ns, ns)


def fitted(
    part: Part, targets: Sequence[Target], pulls: Pulls | None = None, rounds: int = 0
) -> Part:
    """The part with the parameters that suit the targets best.

    pulls    pairs of parameters that should be alike, and how much so
    rounds   times that it is fitted again, errors far beyond the median one weighing less
    """
    np = numeric()
    count = len(flat(part))
    units = [filled(part, [UNIT * (i == j) for j in range(count)]) for i in range(count)]
    rows = [
        [sum(unit.fs(work) for work in works) / UNIT / whole_ns for unit in units]
        for works, _, whole_ns in targets
    ]
    matrix = np.array(rows, float).reshape(len(rows), count)
    wanted = np.array([ns / whole_ns for _, ns, whole_ns in targets], float)
    solution = _solved(part, matrix, wanted, pulls)
    for _ in range(rounds):
        errors = np.abs(matrix @ solution - wanted)
        usual = max(USUAL * float(np.median(errors)), LEAST)
        weights = np.sqrt(usual / np.maximum(errors, usual))
        solution = _solved(part, matrix * weights[:, None], wanted * weights, pulls)
    return filled(part, [round(float(ns) * FS_PER_NS) for ns in solution])


def _solved(part: Part, matrix: Any, wanted: Any, pulls: Pulls | None) -> Any:
    """Nanoseconds of each parameter, given what a nanosecond of each adds to each target."""
    np = numeric()
    count = matrix.shape[1]
    scales = np.sqrt((matrix**2).sum(0))
    seen = scales > 0
    scales[~seen] = 1.0
    together: list[Any] = []
    for one, other, share in pulls(part) if pulls is not None else ():
        known = [scales[each] for each in (one, other) if seen[each]]
        if known:
            # A share of the lesser evidence: what is served a thousand times would drag along what
            # a few probes know.
            line = np.zeros(count)
            weight = share * min(known)
            line[one], line[other] = weight, -weight
            together.append(line)
    whole = np.vstack([matrix, *together])
    wanted = np.concatenate([wanted, np.zeros(len(together))])
    norms = np.sqrt((whole**2).sum(0))
    norms[norms == 0] = 1.0
    return nonnegative(whole / norms, wanted) / norms


def misfit(part: Part, targets: Sequence[Target]) -> float:
    """Mean of squared relative errors, none larger than a stall's."""
    return fmean(
        min(((sum(map(part.fs, works)) / FS_PER_NS - ns) / whole_ns) ** 2, STALL**2)
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
            for first in (count, 2 * count, 3 * count):
                yield first + i, first + i + 1, NEIGHBOURS


def _decode(known: Known) -> Decode:
    sizes = sorted({work.rows for (work,), *_ in known.probes or known.every})
    longest = max(work.most_kv for (work,), *_ in known.every)
    best: tuple[float, Decode] | None = None
    for bend in BENDS:
        if bend and bend >= longest:
            continue
        form = Decode(bend, level(sizes), level(sizes), level(sizes), level(sizes))
        error = misfit(fitted(form, known.some, _decode_pulls), known.some)
        if best is None or error < BETTER * best[0]:
            best = (error, form)
    assert best is not None, "no bend was tried"
    return fitted(best[1], known.every, _decode_pulls, known.rounds)


def _mixed(known: Known) -> Mixed:
    sizes = sorted({work.tokens for (work,), *_ in known.probes or known.every})
    return fitted(Mixed(level(sizes)), known.every, None, known.rounds)


def _recorded(known: Known, most_rows: int, plain: Mixed) -> tuple[Tiled, ...]:
    """What there is of the forms of recordings.

    None where the steps are as well told by their tokens and pairs: nothing is recorded there, or
    it is another kernel's.
    """
    most_tokens = max(work.tokens for (work,), *_ in known.every)
    forms = _forms([size for size in PADDED if size // 2 < most_tokens], most_rows)
    own = [known.those(partial(_held, form, forms)) for form in forms]
    seen = [(form, mine) for form, mine in zip(forms, own, strict=True) if mine.every]
    device = min(
        DEVICES, key=lambda each: sum(_error(_on(form, each), mine) for form, mine in seen)
    )
    parts: list[Tiled] = []
    errors = [0.0, 0.0]
    for form, mine in seen:
        form = _shaped(_on(form, device), mine)
        parts.append(fitted(form, mine.every, _tiled_pulls, mine.rounds))
        errors[0] += misfit(parts[-1], mine.every) * len(mine.every)
        errors[1] += misfit(plain, mine.every) * len(mine.every)
    return tuple(parts) if errors[0] < BETTER * errors[1] else ()


def _forms(sizes: Sequence[int], most_rows: int) -> list[Tiled]:
    """A few longer rows alone, these with rows of one token apart, and any rows, in narrow tiles
    and in wide ones."""
    apart = [size for size in sizes if size > APART]
    narrow = [size for size in sizes if size <= min(most_rows, MANY_ROWS)]
    any_rows = Steps(MANY_ROWS, MANY_ROWS, 0, MANY_ROWS)
    beside = Steps(MANY_ROWS, FEW_ROWS, 1, MANY_ROWS, above=APART)
    forms = [
        Tiled(steps, away, TILE, *DEVICES[0], cuts, SHARING, level(at))
        for steps, away, cuts, at in (
            (Steps(FEW_ROWS, FEW_ROWS, whole=ALONE), 0, 0, sizes),
            (beside, 1, 0, apart),
            (any_rows, 0, 1, narrow),
            (any_rows, 0, 1, sizes[len(narrow) :]),
        )
    ]
    return [form for form in forms if form.base.at]


def _held(form: Tiled, forms: Sequence[Tiled], work: Work) -> bool:
    """The form is the first that holds the step."""
    return form is next((each for each in forms if each.holds(work)), None)


def _tiled_pulls(part: Tiled) -> Iterable[tuple[int, int, float]]:
    """A size that no step has is told by the next one."""
    for i in range(len(part.base.at) - 1):
        yield i, i + 1, SIDES


def _on(form: Tiled, device: tuple[int, int]) -> Tiled:
    """On so many processors, with so many key heads."""
    return form._replace(processors=device[0], heads=device[1])


def _shaped(form: Tiled, known: Known) -> Tiled:
    """With the tile that suits best, and what sharing a processor costs."""
    for _ in range(2):  # each is chosen again, now that the other is known
        tiles = [form._replace(tile=each) for each in TILES]
        form = min(tiles, key=lambda each: _error(each, known))
        shared = [form._replace(sharing=each) for each in SHARINGS]
        form = min(shared, key=lambda each: _error(each, known))
    return form


def _error(form: Tiled, known: Known) -> float:
    """Of the form, fitted to some of what is known."""
    return misfit(fitted(form, known.some, _tiled_pulls), known.some)


def _knotted(works: Iterable[Work], most: int) -> list[int]:
    """Tokens to be knots: those of samples, thinned."""
    sizes = sorted({work.tokens for work in works})
    return sorted({sizes[i * (len(sizes) - 1) // max(1, most - 1)] for i in range(most)})


def decode_of(known: Known) -> Decode | None:
    """Of steps without a chunk; None if there are none.

    Rows of probes are the knots: of an engine's steps too, where there are no probes.
    """
    own = known.those(lambda work: not work.chunks)
    return _decode(own) if own.every else None


def chunks_of(known: Known) -> tuple[Mixed, tuple[Tiled, ...]] | None:
    """Of steps with chunks: those that are not recorded, and those that are; None if there are
    none. Tokens of probes are the knots."""
    own = known.those(lambda work: work.chunks > 0)
    if not own.every:
        return None
    mixed = _mixed(own)
    most_rows = max(work.rows for (work,), *_ in known.probes or known.every)
    recorded = _recorded(own, most_rows, mixed)
    rest = own.those(lambda work: not any(each.holds(work) for each in recorded))
    return (_mixed(rest) if recorded and rest.every else mixed), recorded


def probes_of(samples: Sequence[Sample], launch: Launch) -> list[Target]:
    """The steps of the samples, less the launch where the host is waited for; none with drafts'
    plans."""
    plain = [sample for sample in samples if not sample.plan.drafts]
    return [_step(sample, work_of(sample.plan), launch) for sample in plain]


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
    known = Known(probes_of(samples, launch))
    decode, chunks = decode_of(known), chunks_of(known)
    assert decode is not None and chunks is not None, "there are steps of both kinds"
    mixed, recorded = chunks
    tables = Tables(
        decode=decode,
        mixed=mixed,
        planning=_host(Planning(), middles(plans)),
        launch=launch,
        commit=_host(Commit(), middles(commits)),
        recorded=recorded,
    )
    draft, draft_launch = _drafts(works, tables)
    return tables._replace(draft=draft, draft_launch=draft_launch)


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
    works: Sequence[tuple[Sample, Work]], tables: Tables
) -> tuple[Draft | None, Draft | None]:
    """What plans of the draft model add to steps and launches that are known without."""
    drafted = [
        (sample, work, tuple(work_of(each) for each in sample.plan.drafts))
        for sample, work in works
        if sample.plan.drafts
    ]
    if not drafted:
        return None, None
    launch = tables.launch
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
        steps.append(Target(drafts, whole - usual - tables.chunked_fs(work) // FS_PER_NS, whole))
    return fitted(form, steps), draft_launch


def _host(part: Part, samples: Sequence[HostSample]) -> Part:
    """A stall of fifty times does little: an error is a share of what was measured."""
    targets = [target(work, max(1, ns)) for work, ns in samples]
    return fitted(part, targets) if targets else part
