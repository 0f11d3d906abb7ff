"""Fitting: cost tables from probe samples and from served steps, by relative least squares.

Owns the fit and its errors on held-out samples. Knows no clock and no file. Needs numpy, which no
simulation imports: the fitted parameters are integers, and only these are used.

    samples ──► four in five ──► every parameter >= 0, least squares of relative errors
            └─► one in five  ──► reported errors, and residuals for sim/cost/noise.py
    served  ──► join the samples. A large error of a served step weighs less (Huber 1964): the step
                is timed once, not a median of several times, and may contain a stall of the host

The matrix is the cost model itself, evaluated for one parameter at a time, so fit and use cannot
disagree. Where samples are few, neighbours in a table are regularized weakly towards each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from forge.errors import InvalidConfig
from forge.models.capture_sizes import (
    MAX_GRAPH_PREFILL_ROWS,
    MAX_MIXED_ROWS,
    MIXED_CAPTURE_SIZES,
    NO_CONTEXT_MAX_TOKENS,
    SPLIT_DECODE_ABOVE_TOKENS,
)
from forge.sim.calibration.host_times import HostSample, median_samples
from forge.sim.calibration.nnls import import_numpy, solve_nnls
from forge.sim.calibration.profiling import StepSample
from forge.sim.cost.table import (
    CapturedStepCost,
    CommitCost,
    CostPart,
    CostTables,
    DecodeCost,
    DraftPlanCost,
    GraphCondition,
    LaunchCost,
    MixedStepCost,
    PlanningCost,
    StepFeatures,
    create_zero_knots,
    extract_features,
    get_parameters,
    with_parameters,
)
from forge.sim.draws import HOLDOUT_DRAW, draw_uniform
from forge.sim.units import FS_PER_NS

HOLDOUT_SHARE = 0.2
BEND_CANDIDATES = (0, 256, 1024, 4096)
"""Bends of DecodeCost, in mean positions a row; the one that fits best is chosen."""

UNIT_PARAMETER = 10**12
"""Value of a parameter while the matrix is computed: large, so that rounding does not matter."""

MAX_LAUNCH_KNOTS = 24
"""Most knots in the table of launches by tokens."""

TILE_CANDIDATES = (8, 16, 32, 64, 128)
"""Tokens of a row in a tile: up to 128 queries, divided by the query heads of a key head."""

INITIAL_TILE, INITIAL_SHARING = 32, 1400
"""Values from which the search of tile and sharing starts."""

SHARING_CANDIDATES = (1000, 1200, 1400, 1700, 2000)
"""Per mille: how much longer a split takes while two share a processor."""

DEVICE_CANDIDATES = tuple(
    (processors, heads) for processors in (108, 132, 148) for heads in (2, 4, 8, 16)
)
"""Processors of an A100, an H100 or H200, and a B200, each with numbers of key heads."""

MAX_SELECTION_TARGETS = 300
"""Most probes, and most served steps, by which bend, tile and processors are chosen."""

ACCEPTED_ERROR_RATIO = 0.9
"""A form with more parameters is chosen if its error is below this share of the simpler one's."""

HUBER_ROUNDS, HUBER_MEDIANS, HUBER_MIN_ERROR = 4, 3.0, 0.02
"""Robust fits: rounds of reweighting; the error that counts in full, in medians; its minimum."""

MAX_COUNTED_ERROR = 0.2
"""Cap of an error where forms are compared, as a share of the time of the step."""

NEIGHBOUR_WEIGHT, BEND_WEIGHT = 0.03, 0.0003
"""Weights of the regularizer as shares of the weight of the samples: between neighbours in a table,
and between the two sides of a bend.
"""

Regularizer = Callable[[Any], Iterable[tuple[int, int, float]]]


class FitTarget(NamedTuple):
    """Steps with a measured total time.

    works      features of the steps
    ns         their time together
    whole_ns   the time that an error is relative to
    """

    works: tuple[StepFeatures, ...]
    ns: int
    whole_ns: int


class FitTargets(NamedTuple):
    """Targets of one step each: probes, and served steps."""

    probes: Sequence[FitTarget]
    served: Sequence[FitTarget] = ()

    @property
    def all_targets(self) -> list[FitTarget]:
        """Probes and served steps."""
        return [*self.probes, *self.served]

    @property
    def selection_targets(self) -> list[FitTarget]:
        """Evenly spaced targets: at most MAX_SELECTION_TARGETS probes and as many served steps."""
        return [
            each[i]
            for each in (self.probes, self.served)
            for i in range(0, len(each), -(-len(each) // MAX_SELECTION_TARGETS) or 1)
        ]

    @property
    def num_rounds(self) -> int:
        """Rounds of reweighting: none without served steps. A probe is a median, without stalls."""
        return HUBER_ROUNDS if self.served else 0

    def filter(self, predicate: Callable[[StepFeatures], bool]) -> FitTargets:
        """Return the targets whose features satisfy the predicate."""
        probes, served = (
            [each for each in targets if predicate(each.works[0])]
            for targets in (self.probes, self.served)
        )
        return FitTargets(probes, served)


def create_target(work: StepFeatures, ns: int) -> FitTarget:
    """Return a target of one step whose errors are relative to its own time, which is above 0."""
    return FitTarget((work,), ns, ns)


def fit(
    part: CostPart,
    targets: Sequence[FitTarget],
    regularizer: Regularizer | None = None,
    num_rounds: int = 0,
) -> CostPart:
    """Return the part with the parameters that fit the targets best.

    regularizer   yields (parameter, parameter, weight) for pairs that should be similar
    num_rounds    rounds of reweighting, in which errors far above the median weigh less
    """
    np = import_numpy()
    count = len(get_parameters(part))
    units = [
        with_parameters(part, [UNIT_PARAMETER * (i == j) for j in range(count)])
        for i in range(count)
    ]
    rows = [
        [sum(unit.cost_fs(work) for work in works) / UNIT_PARAMETER / whole_ns for unit in units]
        for works, _, whole_ns in targets
    ]
    matrix = np.array(rows, float).reshape(len(rows), count)
    target_values = np.array([ns / whole_ns for _, ns, whole_ns in targets], float)
    solution = _solve(part, matrix, target_values, regularizer)
    for _ in range(num_rounds):
        errors = np.abs(matrix @ solution - target_values)
        threshold = max(HUBER_MEDIANS * float(np.median(errors)), HUBER_MIN_ERROR)
        weights = np.sqrt(threshold / np.maximum(errors, threshold))
        solution = _solve(part, matrix * weights[:, None], target_values * weights, regularizer)
    return with_parameters(part, [round(float(ns) * FS_PER_NS) for ns in solution])


def _solve(part: CostPart, matrix: Any, target_values: Any, regularizer: Regularizer | None) -> Any:
    """Return nanoseconds for each parameter.

    matrix   [targets, parameters]   relative time that a nanosecond of the parameter adds
    """
    np = import_numpy()
    count = matrix.shape[1]
    scales = np.sqrt((matrix**2).sum(0))
    is_used = scales > 0
    scales[~is_used] = 1.0
    penalty_rows: list[Any] = []
    for one, other, share in regularizer(part) if regularizer is not None else ():
        used_scales = [scales[each] for each in (one, other) if is_used[each]]
        if used_scales:
            # Relative to the parameter with less evidence: otherwise a step that is served a
            # thousand times would outweigh the few probes of its neighbour.
            line = np.zeros(count)
            weight = share * min(used_scales)
            line[one], line[other] = weight, -weight
            penalty_rows.append(line)
    augmented = np.vstack([matrix, *penalty_rows])
    target_values = np.concatenate([target_values, np.zeros(len(penalty_rows))])
    norms = np.sqrt((augmented**2).sum(0))
    norms[norms == 0] = 1.0
    return solve_nnls(augmented / norms, target_values) / norms


def mean_squared_error(part: CostPart, targets: Sequence[FitTarget]) -> float:
    """Return the mean of squared relative errors, each capped at MAX_COUNTED_ERROR."""
    return fmean(
        min(
            ((sum(map(part.cost_fs, works)) / FS_PER_NS - ns) / whole_ns) ** 2, MAX_COUNTED_ERROR**2
        )
        for works, ns, whole_ns in targets
    )


# Samples.


def split_holdout(
    samples: Sequence[StepSample], seed: int
) -> tuple[list[StepSample], list[StepSample]]:
    """Return the samples to fit and the held-out samples. Equal seeds give equal splits."""
    is_holdout = [
        draw_uniform(seed, HOLDOUT_DRAW, index) < HOLDOUT_SHARE for index in range(len(samples))
    ]
    return (
        [sample for sample, out in zip(samples, is_holdout, strict=True) if not out],
        [sample for sample, out in zip(samples, is_holdout, strict=True) if out],
    )


def median_launch_ns(sample: StepSample) -> int:
    """Return the median of the launch times of a sample."""
    return max(1, round(median(sample.launches_ns)))


def is_host_bound(sample: StepSample) -> bool:
    """Return True where the launch takes longer than the device.

    That holds for a host that computes itself, or that launches each kernel.
    """
    return median(sample.launches_ns) > median(sample.steps_ns)


def exposed_launch_ns(
    sample: StepSample, launch: LaunchCost, draft_launch: DraftPlanCost | None
) -> int:
    """Return the predicted time of the launch where the step is host-bound, else 0."""
    if not is_host_bound(sample):
        return 0
    spent = launch.cost_fs(extract_features(sample.plan))
    if draft_launch is not None:
        spent += sum(draft_launch.cost_fs(extract_features(each)) for each in sample.plan.drafts)
    return spent // FS_PER_NS


def total_times_ns(sample: StepSample) -> list[int]:
    """Return the times of the device; a host-bound step adds its launch."""
    if not is_host_bound(sample):
        return [max(1, ns) for ns in sample.steps_ns]
    return [a + b for a, b in zip(sample.steps_ns, sample.launches_ns, strict=True)]


def median_total_ns(sample: StepSample) -> int:
    """Return the median of `total_times_ns`."""
    return max(1, round(median(total_times_ns(sample))))


def _create_step_target(sample: StepSample, work: StepFeatures, launch: LaunchCost) -> FitTarget:
    """Return a target of the step without its launch.

    The launch is subtracted as predicted from rows and tokens. What else it depends on stays in the
    step.
    """
    total_ns = median_total_ns(sample)
    return FitTarget((work,), total_ns - exposed_launch_ns(sample, launch, None), total_ns)


# Parts.


def _regularize_decode(part: DecodeCost) -> Iterable[tuple[int, int, float]]:
    """Yield pairs of parameters that should be similar, with weights.

    The cost of a position hardly depends on the number of rows, or on the side of the bend.
    """
    count = len(part.base.at)
    for i in range(count):
        yield count + i, 2 * count + i, BEND_WEIGHT
        if i + 1 < count:
            for first in (count, 2 * count, 3 * count):
                yield first + i, first + i + 1, NEIGHBOUR_WEIGHT


def _select_decode(targets: FitTargets) -> DecodeCost:
    sizes = sorted({work.rows for (work,), *_ in targets.probes or targets.all_targets})
    max_kv_len = max(work.most_kv for (work,), *_ in targets.all_targets)
    best: tuple[float, DecodeCost] | None = None
    for bend in BEND_CANDIDATES:
        if bend and bend >= max_kv_len:
            continue
        form = DecodeCost(
            bend,
            create_zero_knots(sizes),
            create_zero_knots(sizes),
            create_zero_knots(sizes),
            create_zero_knots(sizes),
        )
        error = mean_squared_error(
            fit(form, targets.selection_targets, _regularize_decode), targets.selection_targets
        )
        if best is None or error < ACCEPTED_ERROR_RATIO * best[0]:
            best = (error, form)
    assert best is not None, "no bend was tried"
    return fit(best[1], targets.all_targets, _regularize_decode, targets.num_rounds)


def _fit_mixed(targets: FitTargets) -> MixedStepCost:
    sizes = sorted({work.tokens for (work,), *_ in targets.probes or targets.all_targets})
    return fit(
        MixedStepCost(create_zero_knots(sizes)), targets.all_targets, None, targets.num_rounds
    )


def _fit_captured(
    targets: FitTargets, most_rows: int, mixed: MixedStepCost
) -> tuple[CapturedStepCost, ...]:
    """Return the parts of captured steps.

    Returns none where MixedStepCost fits them as well: then no step is captured, or another kernel
    computes them.
    """
    most_tokens = max(work.tokens for (work,), *_ in targets.all_targets)
    forms = _create_captured_forms(
        [size for size in MIXED_CAPTURE_SIZES if size // 2 < most_tokens], most_rows
    )
    form_targets = [targets.filter(partial(_is_first_match, form, forms)) for form in forms]
    observed = [
        (form, form_target)
        for form, form_target in zip(forms, form_targets, strict=True)
        if form_target.all_targets
    ]
    device = min(
        DEVICE_CANDIDATES,
        key=lambda each: sum(
            _selection_error(_with_device(form, each), form_target)
            for form, form_target in observed
        ),
    )
    parts: list[CapturedStepCost] = []
    errors = [0.0, 0.0]
    for form, form_target in observed:
        form = _with_best_tile(_with_device(form, device), form_target)
        parts.append(fit(form, form_target.all_targets, _regularize_tiled, form_target.num_rounds))
        errors[0] += mean_squared_error(parts[-1], form_target.all_targets) * len(
            form_target.all_targets
        )
        errors[1] += mean_squared_error(mixed, form_target.all_targets) * len(
            form_target.all_targets
        )
    return tuple(parts) if errors[0] < ACCEPTED_ERROR_RATIO * errors[1] else ()


def _create_captured_forms(sizes: Sequence[int], most_rows: int) -> list[CapturedStepCost]:
    """Return the forms of captured steps that an engine has.

    These are few prefill rows alone, few prefill rows with separate decode rows, and any rows, in
    narrow and in wide graphs.
    """
    max_tokens = MIXED_CAPTURE_SIZES[-1]  # Each row has a token, so this limits no rows.
    split_sizes = [size for size in sizes if size > SPLIT_DECODE_ABOVE_TOKENS]
    narrow_sizes = [size for size in sizes if size <= min(most_rows, MAX_MIXED_ROWS)]
    any_rows = GraphCondition(MAX_MIXED_ROWS, MAX_MIXED_ROWS, 0, MAX_MIXED_ROWS)
    few_chunks = GraphCondition(
        max_tokens, MAX_GRAPH_PREFILL_ROWS, 1, max_tokens, above=SPLIT_DECODE_ABOVE_TOKENS
    )
    forms = [
        CapturedStepCost(
            steps,
            away,
            INITIAL_TILE,
            *DEVICE_CANDIDATES[0],
            cuts,
            INITIAL_SHARING,
            create_zero_knots(at),
        )
        for steps, away, cuts, at in (
            (
                GraphCondition(
                    MAX_GRAPH_PREFILL_ROWS, MAX_GRAPH_PREFILL_ROWS, whole=NO_CONTEXT_MAX_TOKENS
                ),
                0,
                0,
                sizes,
            ),
            (few_chunks, 1, 0, split_sizes),
            (any_rows, 0, 1, narrow_sizes),
            (any_rows, 0, 1, sizes[len(narrow_sizes) :]),
        )
    ]
    return [form for form in forms if form.base.at]


def _is_first_match(
    form: CapturedStepCost, forms: Sequence[CapturedStepCost], work: StepFeatures
) -> bool:
    """Return True where the form is the first that applies to the step."""
    return form is next((each for each in forms if each.applies_to(work)), None)


def _regularize_tiled(part: CapturedStepCost) -> Iterable[tuple[int, int, float]]:
    """Yield pairs of neighbouring sizes: a size without samples takes the value of the next one."""
    for i in range(len(part.base.at) - 1):
        yield i, i + 1, BEND_WEIGHT


def _with_device(form: CapturedStepCost, device: tuple[int, int]) -> CapturedStepCost:
    """Return the form with this (processors, key heads)."""
    return form._replace(processors=device[0], heads=device[1])


def _with_best_tile(form: CapturedStepCost, targets: FitTargets) -> CapturedStepCost:
    """Return the form with the tile and the sharing that fit best."""
    for _ in range(2):  # each choice depends on the other, so both are made twice
        tiles = [form._replace(tile=each) for each in TILE_CANDIDATES]
        form = min(tiles, key=lambda each: _selection_error(each, targets))
        shared = [form._replace(sharing=each) for each in SHARING_CANDIDATES]
        form = min(shared, key=lambda each: _selection_error(each, targets))
    return form


def _selection_error(form: CapturedStepCost, targets: FitTargets) -> float:
    """Return the error of the form, fitted to the selection targets."""
    return mean_squared_error(
        fit(form, targets.selection_targets, _regularize_tiled), targets.selection_targets
    )


def _choose_knots(works: Iterable[StepFeatures], max_knots: int) -> list[int]:
    """Return the numbers of tokens that become knots: those of the samples, thinned out."""
    sizes = sorted({work.tokens for work in works})
    return sorted({sizes[i * (len(sizes) - 1) // max(1, max_knots - 1)] for i in range(max_knots)})


def fit_decode(targets: FitTargets) -> DecodeCost | None:
    """Return the cost of steps without chunks, or None where there are none.

    The knots are the rows of probes, or those of served steps where there are no probes.
    """
    decode_targets = targets.filter(lambda work: not work.chunks)
    return _select_decode(decode_targets) if decode_targets.all_targets else None


def fit_chunks(targets: FitTargets) -> tuple[MixedStepCost, tuple[CapturedStepCost, ...]] | None:
    """Return the costs of steps with chunks, not captured and captured; None where there are none.

    The knots are the tokens of probes.
    """
    chunk_targets = targets.filter(lambda work: work.chunks > 0)
    if not chunk_targets.all_targets:
        return None
    mixed = _fit_mixed(chunk_targets)
    most_rows = max(work.rows for (work,), *_ in targets.probes or targets.all_targets)
    captured = _fit_captured(chunk_targets, most_rows, mixed)
    uncaptured = chunk_targets.filter(
        lambda work: not any(each.applies_to(work) for each in captured)
    )
    return (_fit_mixed(uncaptured) if captured and uncaptured.all_targets else mixed), captured


def create_probe_targets(samples: Sequence[StepSample], launch: LaunchCost) -> list[FitTarget]:
    """Return targets of the samples without draft plans.

    The launch is subtracted from host-bound samples.
    """
    plain = [sample for sample in samples if not sample.plan.drafts]
    return [_create_step_target(sample, extract_features(sample.plan), launch) for sample in plain]


def fit_tables(
    samples: Sequence[StepSample],
    plan_samples: Sequence[HostSample],
    commit_samples: Sequence[HostSample],
) -> CostTables:
    """Return tables that fit the samples and the times of the host.

    Raises InvalidConfig where there are too few samples.
    """
    works = [(sample, extract_features(sample.plan)) for sample in samples]
    without_drafts = [(sample, work) for sample, work in works if not sample.plan.drafts]
    if len({bool(work.chunks) for _, work in without_drafts}) < 2:
        raise InvalidConfig(
            "minutes", f"{len(samples)} kinds of steps are too few to fit", "Give more time"
        )
    launch = _fit_launch(without_drafts)
    targets = FitTargets(create_probe_targets(samples, launch))
    decode, chunks = fit_decode(targets), fit_chunks(targets)
    assert decode is not None and chunks is not None, "there are steps of both kinds"
    mixed, captured = chunks
    tables = CostTables(
        decode=decode,
        mixed=mixed,
        planning=_fit_host(PlanningCost(), median_samples(plan_samples)),
        launch=launch,
        commit=_fit_host(CommitCost(), median_samples(commit_samples)),
        recorded=captured,
    )
    draft, draft_launch = _fit_drafts(works, tables)
    return tables._replace(draft=draft, draft_launch=draft_launch)


def _fit_launch(samples: Sequence[tuple[StepSample, StepFeatures]]) -> LaunchCost:
    by_size: dict[tuple[int, int], list[tuple[StepSample, StepFeatures]]] = {}
    for sample, work in samples:
        by_size.setdefault((work.rows, work.tokens), []).append((sample, work))
    targets = [
        create_target(sample.bind_launch[0], max(1, sample.bind_launch[1])) for sample, _ in samples
    ]
    for group in by_size.values():
        times = [median_launch_ns(sample) for sample, _ in group]
        # Host-bound: the shortest launch of a size. What remains depends on the features of the
        # step and is part of its cost.
        use_min = any(is_host_bound(sample) for sample, _ in group)
        ns = min(times) if use_min else round(median(times))
        targets += [create_target(work, ns) for _, work in group]
    works = [work for (work,), *_ in targets]
    decodes = sorted({work.rows for work in works if not work.chunks})
    tokens = _choose_knots((work for work in works if work.chunks), MAX_LAUNCH_KNOTS)
    return fit(LaunchCost(create_zero_knots(decodes), create_zero_knots(tokens)), targets)


def _fit_drafts(
    works: Sequence[tuple[StepSample, StepFeatures]], tables: CostTables
) -> tuple[DraftPlanCost | None, DraftPlanCost | None]:
    """Return the costs of draft plans for the device and for launches.

    They are the remainders of samples with drafts after the fitted tables.
    """
    samples = [
        (sample, work, tuple(extract_features(each) for each in sample.plan.drafts))
        for sample, work in works
        if sample.plan.drafts
    ]
    if not samples:
        return None, None
    launch = tables.launch
    form = DraftPlanCost(create_zero_knots(sorted({drafts[0].rows for *_, drafts in samples})))
    launches = []
    for sample, work, drafts in samples:
        launch_ns = median_launch_ns(sample)
        launches.append(FitTarget(drafts, launch_ns - launch.cost_fs(work) // FS_PER_NS, launch_ns))
    draft_launch = fit(form, launches)
    steps = []
    for sample, work, drafts in samples:
        total_ns = median_total_ns(sample)
        exposed_ns = exposed_launch_ns(sample, launch, draft_launch)
        steps.append(
            FitTarget(
                drafts, total_ns - exposed_ns - tables.chunk_step_fs(work) // FS_PER_NS, total_ns
            )
        )
    return fit(form, steps), draft_launch


def _fit_host(part: CostPart, samples: Sequence[HostSample]) -> CostPart:
    """Return the part fitted to host times.

    Errors are relative, so a long stall has little weight.
    """
    targets = [create_target(work, max(1, ns)) for work, ns in samples]
    return fit(part, targets) if targets else part
