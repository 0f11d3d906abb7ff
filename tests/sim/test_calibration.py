"""Calibrations: planted costs are recovered, mismatches are refused, errors are gated."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import pytest

from forge import __version__
from forge.cli.main import main
from forge.config import EngineConfig, Speculation
from forge.errors import InvalidConfig
from forge.request import SamplingParams
from forge.seam import Bind, Event, Row, StepPlan
from forge.sim.calibration.calibrate import (
    Identity,
    create_identity,
    find_roofline,
    fit_calibration,
    refit_with_served_steps,
)
from forge.sim.calibration.cost_error import (
    MIN_STEPS,
    MeasuredStep,
    RelativeErrors,
    compute_cell_errors,
    fit_affine,
    summarize_errors,
)
from forge.sim.calibration.fitting import (
    FitTarget,
    create_target,
    fit,
    fit_tables,
    mean_squared_error,
    median_launch_ns,
    median_total_ns,
    split_holdout,
)
from forge.sim.calibration.host_times import HostSample, measure_host, median_samples
from forge.sim.calibration.nnls import solve_nnls
from forge.sim.calibration.profiling import (
    NUM_REPEATS,
    Probe,
    ProbePlanner,
    StepSample,
    create_probes,
    profile,
    row_sizes,
    shuffle_order,
)
from forge.sim.calibration.profiling import token_sizes as sizes_of_tokens
from forge.sim.clock import Clock, VirtualClockModel
from forge.sim.cost.calibration_file import (
    Calibration,
    ProbeTime,
    model_code_digest,
    read_calibration,
    select_engine_settings,
)
from forge.sim.cost.model import CostModel
from forge.sim.cost.noise import Bin, NoisyCost, Residuals, create_bins
from forge.sim.cost.roofline import parse_roofline
from forge.sim.cost.simple import ConstantCost
from forge.sim.cost.table import (
    CapturedStepCost,
    CommitCost,
    CostTables,
    DecodeCost,
    DraftPlanCost,
    FrontendLatency,
    GraphCondition,
    LaunchCost,
    MixedStepCost,
    PiecewiseLinear,
    PlanningCost,
    StepFeatures,
    TableCost,
    create_zero_knots,
    extract_features,
    get_parameters,
    scale_device_cost,
)
from forge.sim.cost.table import _makespan as last
from forge.sim.cost.table import _split_tiles as cut
from forge.sim.draws import draw_uniform
from forge.sim.length_model import LengthModel
from forge.sim.scenario import Scenario, parse_cost, summary

US = 1_000_000_000
"""Femtoseconds in a microsecond."""

CONFIG = EngineConfig(
    num_blocks=400,
    block_size=16,
    max_num_seqs=12,
    max_num_batched_tokens=256,
    max_model_len=1500,
    depth=2,
)
DRAFTED = replace(
    CONFIG, max_num_seqs=5, max_num_batched_tokens=40, speculation=Speculation(num_tokens=3)
)
MINUTE_NS = 60 * 10**9


def planted_tables(config: EngineConfig) -> CostTables:
    """Return tables with stairs that also fall, a bend, long rows, and all other parts."""
    rows, tokens = row_sizes(config.max_num_seqs), sizes_of_tokens(config.max_num_batched_tokens)
    stairs = tuple((700 + 40 * (-(-n // 4)) - 30 * (n % 8 == 0)) * US for n in rows)
    tiles = tuple((900 + 6 * n - 80 * (n % 64 == 1)) * US for n in tokens)
    return CostTables(
        decode=DecodeCost(
            256,
            PiecewiseLinear(tuple(rows), stairs),
            PiecewiseLinear(tuple(rows), (US // 30,) * len(rows)),
            PiecewiseLinear(tuple(rows), (US // 22,) * len(rows)),
            PiecewiseLinear(tuple(rows), (US // 40,) * len(rows)),
        ),
        mixed=MixedStepCost(
            PiecewiseLinear(tuple(tokens), tiles),
            US // 900,
            20 * US,
            4 * US,
            US // 28,
            150 * US,
            US,
        ),
        planning=PlanningCost(),
        launch=LaunchCost(
            PiecewiseLinear((1, config.max_num_seqs), (80 * US, 110 * US)),
            PiecewiseLinear((1, config.max_num_batched_tokens), (200 * US, 500 * US)),
            US,
            0,
            2 * US,
        ),
        commit=CommitCost(),
        draft=DraftPlanCost(PiecewiseLinear((1, 5), (300 * US, 340 * US)), US // 90, 5 * US),
        draft_launch=DraftPlanCost(PiecewiseLinear((1, 5), (60 * US, 70 * US))),
    )


ALONE_STEPS, ANY = GraphCondition(4, 4, whole=128), GraphCondition(128, 128, 0, 128)
MIXED_STEPS = GraphCondition(512, 4, 1, 512, above=64)
SIZES = (16, 64, 256)
CAPTURED_TILES = (
    CapturedStepCost(
        ALONE_STEPS,
        0,
        32,
        132,
        8,
        0,
        2000,
        PiecewiseLinear(SIZES, (800 * US, 900 * US, 1500 * US)),
        US // 2,
    ),
    CapturedStepCost(
        MIXED_STEPS,
        1,
        32,
        132,
        8,
        0,
        2000,
        PiecewiseLinear((256,), (1600 * US,)),
        US // 2,
        US // 30,
        US // 9,
    ),
    CapturedStepCost(
        ANY, 0, 32, 132, 8, 1, 1700, PiecewiseLinear(SIZES, (900 * US, 999 * US, 1700 * US)), US
    ),
)


class ProfileResult(NamedTuple):
    """Samples of a planted cost, in virtual time."""

    samples: list[StepSample]
    left: int
    spent_ns: int


def run_profile(
    cost: CostModel, config: EngineConfig = CONFIG, seconds: float = 600
) -> ProfileResult:
    clock = Clock()
    model = VirtualClockModel(LengthModel(), clock, cost)
    samples, left = profile(model, config, lambda: clock.now_ns, 0, round(seconds * 1e9))
    return ProfileResult(samples, left, clock.now_ns)


class FitResult(NamedTuple):
    """The planted table, the fitted one, and the held-out samples."""

    planted: TableCost
    found: TableCost
    holdout: list[StepSample]


def fit_planted(
    config: EngineConfig, cost: Callable[[TableCost], CostModel] = lambda table: table
) -> FitResult:
    pytest.importorskip("numpy")
    table = TableCost(planted_tables(config))
    known, holdout = split_holdout(run_profile(cost(table), config).samples, 0)
    return FitResult(table, TableCost(fit_tables(known, [], [])), holdout)


@pytest.fixture(scope="module")
def exact() -> FitResult:
    return fit_planted(CONFIG)


@pytest.fixture(scope="module")
def with_drafts() -> FitResult:
    return fit_planted(DRAFTED)


def holdout_errors(fit_planted: FitResult, kind: str) -> RelativeErrors:
    return summarize_errors(
        (fit_planted.found.step_ns(s.plan), fit_planted.planted.step_ns(s.plan))
        for s in fit_planted.holdout
        if s.kind == kind
    )


def identity(config: EngineConfig = CONFIG) -> Identity:
    return Identity(
        "qwen3-4b",
        "bfloat16",
        "NVIDIA H200",
        {"forge": __version__, "torch": "2.11.0"},
        "c0de",
        select_engine_settings(config),
    )


def calibration(config: EngineConfig = CONFIG) -> Calibration:
    """Return a calibration written by hand: nothing was fitted."""
    residuals = Residuals((Bin(10**6, (900_000, 1_000_000, 1_100_000)),), ())
    tables = planted_tables(config)._replace(recorded=CAPTURED_TILES)
    probes = (ProbeTime(StepFeatures(2, 6, 1, 9, 9, 15, spans=((1, 10), (5, 5))), 1000, 1200),)
    return Calibration(identity(config), tables, residuals, {"samples": 3}, probes)


def decode_plan(*pasts: int, step: int = 0) -> StepPlan:
    rows = tuple(Row(i, 0, i, past, (1,), num_samples=1) for i, past in enumerate(pasts))
    return StepPlan(step, rows, 400, 16)


# Recovered parameters.


@pytest.mark.parametrize("kind", ["decode", "chunk", "mixed"])
def test_a_planted_cost_is_found_again_on_steps_held_out(exact: FitResult, kind: str):
    errors = holdout_errors(exact, kind)
    assert errors.number >= 5
    assert errors.p90 < 0.001 and abs(errors.bias) < 0.001


def test_the_parameters_are_those_that_were_planted(exact: FitResult):
    """Each of them and the bend, not only their sum."""
    true, found = exact.planted.tables, exact.found.tables
    assert found.decode.bend == 256
    assert found.recorded == ()
    assert found.mixed[1:5] == pytest.approx(true.mixed[1:5], rel=0.001)
    for name in ("base", "near", "far", "long"):
        knots: PiecewiseLinear = getattr(found.decode, name)
        expected = [getattr(true.decode, name).evaluate(rows) for rows in knots.at]
        assert knots.fs == pytest.approx(expected, rel=0.02)


def test_a_tile_that_is_faster_when_full_is_no_monotone_table(exact: FitResult):
    """A table may fall: 65 tokens were planted to take less time than 64."""
    tokens = exact.found.tables.mixed.tokens
    assert {64, 65} <= set(tokens.at)
    assert tokens.evaluate(65) < tokens.evaluate(64)


def test_the_launch_is_predicted_from_rows_and_tokens(exact: FitResult):
    pairs = [
        (exact.found.launch_ns(s.plan), exact.planted.launch_ns(s.plan)) for s in exact.holdout
    ]
    assert summarize_errors(pairs).p90 < 0.005


@pytest.mark.parametrize("kind", ["verify", "draft"])
def test_drafts_and_their_verification_are_found_again(with_drafts: FitResult, kind: str):
    errors = holdout_errors(with_drafts, kind)
    assert errors.number >= 3
    assert errors.p90 < 0.005


def test_a_draft_model_is_separated_from_the_target(with_drafts: FitResult):
    draft = with_drafts.found.tables.draft
    assert draft is not None
    for rows in (1, 3, 5):
        work = StepFeatures(rows=rows, tokens=rows, kv=100 * rows, most_kv=100)
        planted_fs = planted_tables(DRAFTED).draft.cost_fs(work)  # type: ignore[union-attr]
        assert draft.cost_fs(work) == pytest.approx(planted_fs, rel=0.01)


class JitteredCost(NamedTuple):
    """The times of the table, each up to 3 % off; one in twenty takes three times as long."""

    table: TableCost

    def step_ns(self, plan: StepPlan) -> int:
        share = 0.97 + 0.06 * draw_uniform(1, 1, plan.step)
        return round(
            self.table.step_ns(plan) * share * (1 + 2 * (draw_uniform(1, 2, plan.step) < 0.05))
        )

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        raise AssertionError("a fit needs plans only")

    def plan_ns(self, plan: StepPlan) -> int:
        return self.table.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        return self.table.commit_ns(plan)


@pytest.mark.long
def test_noise_and_stalls_do_not_shift_the_mean():
    """Few of fifteen times are stalls, so the median is none."""
    found = fit_planted(CONFIG, JitteredCost)
    for kind in ("decode", "chunk", "mixed"):
        errors = holdout_errors(found, kind)
        assert errors.median < 0.015 and abs(errors.bias) < 0.01


@pytest.mark.long
def test_a_host_bound_model_is_fitted_with_its_launches():
    """The launch is all there is, and longer for longer sequences: that part goes to the step."""

    class Computing(NamedTuple):
        table: TableCost

        def step_ns(self, plan: StepPlan) -> int:
            return 1000

        def plan_ns(self, plan: StepPlan) -> int:
            return self.table.step_ns(plan)

        def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
            raise AssertionError("a fit needs plans only")

        def commit_ns(self, plan: StepPlan) -> int:
            return 0

    _, found, holdout = fit_planted(replace(CONFIG, depth=1), Computing)
    pairs = [
        (found.step_ns(s.plan) + found.launch_ns(s.plan), median_total_ns(s))
        for s in holdout
        if s.kind == "decode"
    ]
    assert len(pairs) > 5 and summarize_errors(pairs).p90 < 0.02


# Captured chunks.

SERVING = EngineConfig(
    num_blocks=2000,
    block_size=64,
    max_num_seqs=24,
    max_num_batched_tokens=512,
    max_model_len=8192,
    depth=2,
)


def captured_tables() -> CostTables:
    """Return tables of a GPU with 132 processors.

    A few rows alone, a few with decode rows, and graphs of any rows: up to 24 tokens, and larger.
    """
    sizes = (16, 32, 64, 128, 192, 256, 384, 512)
    base = tuple(n * US for n in (3500, 3600, 3900, 4000, 4300, 4600, 5700, 7000))
    least = tuple(9 * n // 10 for n in base)
    return planted_tables(SERVING)._replace(
        recorded=(
            CapturedStepCost(
                ALONE_STEPS, 0, 32, 132, 8, 0, 2000, PiecewiseLinear(sizes, least), US // 2
            ),
            CapturedStepCost(
                MIXED_STEPS,
                1,
                32,
                132,
                8,
                0,
                1400,
                PiecewiseLinear(sizes[3:], base[3:]),
                US // 2,
                US // 25,
                US // 60,
            ),
            CapturedStepCost(
                ANY, 0, 8, 132, 8, 1, 1200, PiecewiseLinear(sizes[:1], base[:1]), 3 * US // 4
            ),
            CapturedStepCost(
                ANY, 0, 32, 132, 8, 1, 1700, PiecewiseLinear(sizes[1:], base[1:]), 11 * US // 10
            ),
        )
    )


def fit_captured(cost: Callable[[TableCost], CostModel]) -> FitResult:
    pytest.importorskip("numpy")
    table = TableCost(captured_tables())
    known, holdout = split_holdout(run_profile(cost(table), SERVING).samples, 0)
    return FitResult(table, TableCost(fit_tables(known, [], [])), holdout)


@pytest.mark.long
def test_tiles_and_processors_of_captured_chunks_are_found_again():
    found = fit_captured(lambda table: table)
    for kind in ("chunk", "mixed"):
        errors = holdout_errors(found, kind)
        assert errors.number >= 10 and errors.p90 < 0.001 and abs(errors.bias) < 0.001
    for true, other in zip(found.planted.tables.recorded, found.found.tables.recorded, strict=True):
        assert other[:7] == true[:7]
        assert get_parameters(other)[-3:] == pytest.approx(get_parameters(true)[-3:], rel=0.005)


@pytest.mark.long
def test_noise_and_stalls_do_not_shift_captured_chunks():
    found = fit_captured(JitteredCost)
    shapes = [(each.tile, each.processors, each.heads) for each in found.found.tables.recorded[1:]]
    assert shapes == [(32, 132, 8), (8, 132, 8), (32, 132, 8)]
    for kind in ("chunk", "mixed"):
        errors = holdout_errors(found, kind)
        assert errors.median < 0.01 and errors.p90 < 0.03 and abs(errors.bias) < 0.01


def shortest_parts(tiles: list[int], room: int) -> list[int]:
    """Return all splits, as short as the room allows: every length is tried, from the shortest."""
    longest = max(tiles)
    lengths = range(min(128, longest), longest + 1)
    cut = next((n for n in lengths if sum(-(-end // n) for end in tiles) <= room), longest)
    return [min(cut, end - at) for end in tiles for at in range(0, end, cut)]


def test_splits_are_as_short_as_the_room_allows():
    """Rows of 900, 100 and 100, and a chunk of 2 tiles over 400: 7 splits of at most 400."""
    tiles = [900, 100, 100, 400, 400]
    assert cut(tiles, 8) == [400, 400, 100, 100, 100, 400, 400]
    assert cut(tiles, 0) == cut(tiles, 5) == tiles
    for seed in range(60):
        tiles = [
            1 + int(2000 * draw_uniform(seed, 6, i) ** 2)
            for i in range(1 + int(9 * draw_uniform(seed, 7, 0)))
        ]
        for room in (0, 4, 16, 33):
            assert cut(tiles, room) == shortest_parts(tiles, room)


@pytest.mark.parametrize(
    ("parts", "positions"),
    [
        ([70, 50], 70),  # a processor each
        ([70, 50, 20], 20 * 3 // 2 + 50),  # the first shares until the third ends
        ([70, 50, 20, 90], 50 * 3 // 2 + 40),
        # The second has room at 15, the first at 30: the fifth shares with what is left of 50.
        ([70, 50, 20, 10, 200], 15 + 40 * 3 // 2 + 160),
        # Two that end together are followed by one, and that by the next.
        ([10, 40, 10, 40, 8, 8], 60),
        ([10, 90, 10, 90, 8, 8], 135),
        ([10, 10, 10, 10, 8, 8, 5], 15 + 8 + 5),
    ],
    ids=str,
)
def test_a_step_ends_with_its_last_split(parts: list[int], positions: int):
    """On two processors, where splits that share one take half as long again."""
    assert last(parts, 2, 1500) == positions


def test_a_split_of_the_last_head_starts_when_a_processor_has_room():
    """The long row is the first of each of three heads; with two processors the third waits."""
    spans = ((1, 90), (1, 10))
    tiled = CapturedStepCost(ANY, 0, 32, 2, 3, 0, 2000, create_zero_knots((512,)))
    # 90 with 90 and 10 with 10, at half the speed. At 20 the other runs the third 90, then 10.
    assert tiled.makespan_positions(spans, 0) == 20 + 90 + 10 + 60
    assert tiled._replace(heads=1).makespan_positions(spans, 0) == 90


def test_tiles_stand_in_the_order_of_the_batch():
    """Rows of one token first, then the others; the padding of the graph is the last of these."""
    spans = ((40, 60), (1, 90))
    tiled = CapturedStepCost(ANY, 0, 32, 1, 1, 0, 1000, create_zero_knots((512,)))
    # 90 and 60, and when that has ended another 60, not 60 with 60 and then 90. After them come
    # two of 37, at 90 and at 120.
    assert tiled.makespan_positions(spans, 0) == 120
    assert tiled.makespan_positions(spans, 37) == 120 + 37


def test_the_padding_of_a_graph_is_one_more_row():
    tiled = CapturedStepCost(
        ANY, 0, 32, 132, 8, 0, 1000, PiecewiseLinear((16, 64), (US, 2 * US)), US
    )
    work = extract_features(StepPlan(0, (Row(0, 0, 0, 10, (1,) * 4),), 9, 16))
    longer = extract_features(StepPlan(0, (Row(0, 0, 0, 1, (1,) * 17),), 9, 16))
    assert tiled.cost_fs(work) == US + 14 * US
    assert tiled.cost_fs(longer) == 2 * US + 47 * US


def test_rows_of_the_separate_kernel_are_one_row_to_the_planned_kernel():
    """Three decode rows, a chunk of 100 tokens, and two tiles of 153 tokens of padding.

    The processor gains nothing from two splits at a time.
    """
    rows = [Row(i, i, i, past, (1,)) for i, past in enumerate((70, 500, 30))]
    plan = StepPlan(0, (*rows, Row(9, 9, 9, 300, (1,) * 100)), 9, 16)
    tiled = CapturedStepCost(
        MIXED_STEPS,
        1,
        128,
        1,
        1,
        0,
        2000,
        PiecewiseLinear((256,), (900 * US,)),
        7 * US,
        3 * US,
        2 * US,
    )
    positions = 3 + 400 + 2 * 153
    assert tiled.cost_fs(extract_features(plan)) == (900 + 7 * positions + 3 * 600 + 2 * 500) * US


def work_of_spans(*spans: tuple[int, int]) -> StepFeatures:
    """Return features of rows with this many tokens and end positions."""
    plan = StepPlan(
        0,
        tuple(Row(i, i, i, end - n, (1,) * n) for i, (n, end) in enumerate(spans)),
        9,
        16,
    )
    return extract_features(plan)


@pytest.mark.parametrize(
    ("work", "place"),
    [
        (work_of_spans((17, 17), (5, 5)), 0),
        (work_of_spans((128, 128)), 0),
        (work_of_spans((128, 129)), 2),
        (work_of_spans((129, 200)), 0),
        (work_of_spans(*[(40, 90)] * 4), 0),
        (work_of_spans(*[(40, 90)] * 5), 2),
        (work_of_spans((1, 1), (17, 17)), 2),
        (work_of_spans((1, 5), (200, 200)), 1),
        (work_of_spans((1, 5), (63, 70)), 2),
        (work_of_spans((1, 5), (64, 70)), 1),
        (work_of_spans((1, 5), *[(30, 70)] * 4), 1),
        (work_of_spans((1, 5), *[(30, 70)] * 5), 2),
        (work_of_spans(*[(1, 9)] * 124, *[(30, 70)] * 4), 1),
        (work_of_spans(*[(1, 9)] * 125, *[(20, 70)] * 4), 1),
        (work_of_spans(*[(1, 9)] * 125, *[(20, 70)] * 5), None),
        (work_of_spans((257, 257)), None),
    ],
)
def test_the_first_captured_cost_that_applies_to_a_step_is_used(
    work: StepFeatures, place: int | None
):
    tables = planted_tables(CONFIG)._replace(recorded=CAPTURED_TILES)
    part = tables.mixed if place is None else CAPTURED_TILES[place]
    assert [each.applies_to(work) for each in CAPTURED_TILES[: place or 0]] == [False] * (
        place or 0
    )
    assert tables.chunk_step_fs(work) == part.cost_fs(work)
    assert scale_device_cost(tables, 2000).chunk_step_fs(work) == pytest.approx(
        2 * part.cost_fs(work), rel=1e-9
    )


# Served steps.


class SlowDecodeCost(NamedTuple):
    """Rows of one token take twice the table's time to read; one step in ten stalls."""

    table: TableCost

    def step_ns(self, plan: StepPlan) -> int:
        decode = self.table.tables.decode
        near, far = (
            PiecewiseLinear(each.at, tuple(2 * fs for fs in each.fs))
            for each in (decode.near, decode.far)
        )
        table = TableCost(self.table.tables._replace(decode=decode._replace(near=near, far=far)))
        stall = 1.5 if not plan.step % 10 else 1.0
        return round(table.step_ns(plan) * stall)


@pytest.mark.long
def test_served_steps_join_the_probes():
    """Probes underestimate reads.

    For twelve long rows, which were not served, they still decide.
    """
    pytest.importorskip("numpy")
    table = TableCost(planted_tables(CONFIG))
    calibrated = fit_calibration(identity(), run_profile(table).samples, ([], []), 0)
    plans = [
        decode_plan(*(int(900 * draw_uniform(3, step, i)) for i in range(1 + step % 7)), step=step)
        for step in range(400)
    ]
    cost = SlowDecodeCost(table)
    served = [MeasuredStep(plan, cost.step_ns(plan)) for plan in plans]
    calm = [MeasuredStep(plan, cost.step_ns(plan)) for plan in plans if plan.step % 10]
    better = refit_with_served_steps(calibrated, served[:300])
    before, after = (
        summarize_errors((each.create_cost().step_ns(plan), ns) for plan, ns in calm[-90:])
        for each in (calibrated, better)
    )
    assert before.bias < -0.02
    assert after.median < 0.005 and abs(after.bias) < 0.005
    assert get_parameters(better.tables.mixed) == pytest.approx(
        get_parameters(calibrated.tables.mixed), rel=1e-6
    )
    assert better.tables.launch == calibrated.tables.launch
    far = decode_plan(*(500,) * 12)
    assert better.create_cost().step_ns(far) == pytest.approx(table.step_ns(far), rel=0.05)


def test_frequent_served_steps_do_not_override_a_few_probes():
    """One row of 400 steps and two rows of 4, regularized together: each keeps its value."""
    pytest.importorskip("numpy")
    form = DecodeCost(
        0,
        create_zero_knots((1, 2)),
        create_zero_knots((1,)),
        create_zero_knots((1,)),
        create_zero_knots((1,)),
    )
    targets = [create_target(StepFeatures(rows=1), 100)] * 400 + [
        create_target(StepFeatures(rows=2), 300)
    ] * 4
    found = fit(form, targets, lambda part: [(0, 1, 0.03)])
    assert [fs / 1e6 for fs in found.base.fs] == pytest.approx([100, 300], rel=0.01)


def test_a_stall_weighs_less_in_a_fit_that_is_repeated():
    pytest.importorskip("numpy")
    work = StepFeatures(rows=1)
    targets = [create_target(work, 100)] * 18 + [create_target(work, 150)] * 2
    once, again = (
        fit(CommitCost(), targets, None, rounds).cost_fs(work) / 1e6 for rounds in (0, 4)
    )
    assert once > 102 and 100 <= again < 100.5


@pytest.mark.long
def test_simpler_models_lose(exact: FitResult):
    """A constant, an affine function of rows and tokens, and the roofline, on the same steps."""
    profiled_all = run_profile(exact.planted).samples
    report = fit_calibration(identity(), profiled_all, ([], []), 0).report
    best = max(errors["p90"] for errors in report["steps"].values())
    assert set(report["baselines"]) == {"constant", "affine", "roofline"}
    for errors in report["baselines"].values():
        assert errors["p90"] > 20 * best + 0.02


@pytest.mark.long
def test_held_out_samples_are_in_the_final_tables(exact: FitResult):
    """A held-out step takes twice as long: only the final tables take it into account."""
    samples = run_profile(exact.planted).samples
    odd = next(s for s in exact.holdout if s.kind == "decode")
    place = next(i for i, s in enumerate(samples) if s.plan == odd.plan)
    slow = samples[place]._replace(steps_ns=tuple(2 * ns for ns in odd.steps_ns))
    samples[place] = slow
    found = fit_calibration(identity(), samples, ([], []), 0)
    without, kept = (t.step_ns(slow.plan) for t in (exact.found, found.create_cost()))
    assert without < 0.51 * median_total_ns(slow) and kept > 1.02 * without
    assert found.report["steps"]["decode"]["bias"] < -0.4 / len(exact.holdout)
    assert found.report["steps"]["chunk"]["p90"] < 0.001


# How it is fitted.


def nnls_by_subsets(matrix: list[list[float]], target: list[float]) -> float:
    """Return the least squared error of any x >= 0, by trying every subset."""
    np = pytest.importorskip("numpy")
    a, b = np.array(matrix), np.array(target)
    best = float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for used in itertools.combinations(range(a.shape[1]), size):
            x = np.linalg.lstsq(a[:, used], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(((a[:, used] @ x - b) ** 2).sum()))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_bounded_least_squares_are_the_least(seed: int):
    np = pytest.importorskip("numpy")
    matrix = [[draw_uniform(seed, 3, i, j) - 0.4 for j in range(5)] for i in range(9)]
    target = [draw_uniform(seed, 4, i) for i in range(9)]
    x = solve_nnls(np.array(matrix), np.array(target))
    assert (x >= 0).all()
    error = float(((np.array(matrix) @ x - np.array(target)) ** 2).sum())
    assert error == pytest.approx(nnls_by_subsets(matrix, target), rel=1e-6)


def test_errors_are_shares_of_what_is_measured():
    """100 and 300 for the same work: the fit is nearer to 100, where an error is a larger share."""
    pytest.importorskip("numpy")
    part = fit(
        CommitCost(),
        [create_target(StepFeatures(rows=1), 100), create_target(StepFeatures(rows=1), 300)],
    )
    assert part.cost_fs(StepFeatures(rows=1)) // 1_000_000 == pytest.approx(120, abs=1)


def test_a_share_of_a_longer_time_weighs_less():
    """10 of 1000 ns left and 10 of 10 ns left disagree with 0: the first hardly counts."""
    pytest.importorskip("numpy")
    targets = [
        FitTarget((StepFeatures(rows=1),), 30, 1000),
        FitTarget((StepFeatures(rows=1),), 10, 10),
    ]
    part = fit(CommitCost(), targets)
    assert part.cost_fs(StepFeatures(rows=1)) // 1_000_000 == pytest.approx(10, abs=0.1)
    assert mean_squared_error(part, targets) < 0.001


def test_the_line_through_rows_and_tokens_is_the_best_one():
    steps = [
        MeasuredStep(
            StepPlan(0, tuple(Row(i, 0, i, 0, (1,) * tokens) for i in range(rows)), 9, 16),
            5_000 + 70 * rows + 11 * rows * tokens,
        )
        for rows in (1, 2, 5)
        for tokens in (1, 3, 40)
    ]
    found = fit_affine(steps)
    assert (found.base_ns, found.row_ns, found.token_ns) == (5_000, 70, 11)


def test_too_few_samples_are_refused(exact: FitResult):
    with pytest.raises(InvalidConfig, match=r"too few to fit\. Give more time"):
        fit_tables([s for s in exact.holdout if s.kind == "decode"], [], [])


@pytest.mark.long
def test_host_times_are_predicted_from_rows_events_blocks_and_tokens():
    """Plans of the real scheduler with planted times; one kind of them stalls."""
    pytest.importorskip("numpy")
    planning = PlanningCost(30 * US, US // 2, 4 * US, US, US // 50)
    commit = CommitCost(9 * US, US // 3, US // 80)
    ticks = itertools.count(step=1000)
    plans, commits = measure_host(CONFIG, lambda: next(ticks), MINUTE_NS)
    assert any(w.events == 0 for w, _ in plans) and any(w.blocks > 1 for w, _ in plans)
    planned = [HostSample(w, planning.cost_fs(w) // 1_000_000) for w, _ in plans]
    odd = next(w for w, _ in plans if w.rows > 5 and w.events)
    planned = [each._replace(ns=50 * each.ns) if each.work == odd else each for each in planned]
    done = [HostSample(w, commit.cost_fs(w) // 1_000_000) for w, _ in commits]
    known, _ = split_holdout(run_profile(TableCost(planted_tables(DRAFTED)), DRAFTED).samples, 0)
    tables = fit_tables(known, planned, done)
    assert tables.planning == pytest.approx(planning, rel=0.02)
    assert tables.commit == pytest.approx(commit, rel=0.02)


def test_host_samples_do_not_depend_on_which_row_has_the_tokens():
    works = [StepFeatures(2, 8, 1, spans=((1, end), (7, 7))) for end in (5, 6, 9)]
    found = median_samples(
        [HostSample(work, ns) for work, ns in zip(works, (10, 900, 12), strict=True)]
    )
    assert found == [HostSample(StepFeatures(2, 8, 1), 12)]


def test_the_host_is_timed_from_the_commit_to_the_launch_and_from_the_result_to_the_end():
    """The clock ticks once for each read: nothing else is in between."""
    for depth in (1, 2):
        ticks = itertools.count(step=1000)
        config = replace(CONFIG, depth=depth)
        plans, commits = measure_host(config, lambda ticks=ticks: next(ticks), MINUTE_NS)
        assert len(plans) == len(commits) > 50
        assert {ns for _, ns in (*plans, *commits)} == {1000}
        assert [w for w, _ in plans] == [w for w, _ in commits]


def test_the_line_never_falls():
    """More rows took less: the best line that does not fall is level in rows."""
    steps = [MeasuredStep(decode_plan(*(5,) * rows), 9_000 - 100 * rows) for rows in (1, 2, 3, 9)]
    found = fit_affine(steps)
    assert (found.row_ns, found.token_ns) == (0, 0)
    assert 8_100 < found.base_ns < 8_900


# Probes.


def test_every_graph_is_timed_at_its_size_and_one_row_above_the_last():
    config = replace(CONFIG, max_num_seqs=256, num_blocks=10_000, max_num_batched_tokens=4096)
    rows = {len(probe.context_lens) for probe in create_probes(config, 0) if probe.kind == "decode"}
    assert rows == set(row_sizes(256)) >= {1, 2, 3, 4, 5, 8, 9, 120, 121, 128, 129, 256}
    tokens = {probe.num_tokens for probe in create_probes(config, 0) if probe.kind == "chunk"}
    assert tokens >= {16, 17, 256, 257, 512, 513, 1024, 1536, 2048, 3072, 4096}


@pytest.mark.parametrize(("kind", "fewest"), [("decode", 200), ("mixed", 60)])
def test_half_of_the_steps_with_rows_of_one_token_have_uneven_ones(kind: str, fewest: int):
    config = replace(CONFIG, max_num_seqs=256, num_blocks=10_000, max_num_batched_tokens=512)
    found = [
        p.context_lens
        for p in create_probes(config, 0)
        if p.kind == kind and len(p.context_lens) > 2
    ]
    uneven = [pasts for pasts in found if max(pasts) > min(pasts)]
    assert 0.35 < len(uneven) / len(found) < 0.65
    assert len(found) > fewest
    assert median(max(pasts) / fmean(pasts) for pasts in uneven) > 2


def test_chunks_of_mixed_steps_start_at_any_position():
    """Half of them start a prompt; the others start anywhere that the engine has room for."""
    config = replace(CONFIG, num_blocks=10_000, block_size=64, max_model_len=8192)
    mixed = [probe for probe in create_probes(config, 0) if probe.kind == "mixed"]
    pasts = [past for probe in mixed for past, _ in probe.chunks]
    later = sorted(past for past in pasts if past)
    assert 0.4 < len(later) / len(pasts) < 0.6
    assert later[len(later) // 4] > 1000 and later[-1] > 6000
    assert 3000 < median(later) < 5000


def test_no_probe_is_larger_than_the_engine():
    for config in (CONFIG, DRAFTED, EngineConfig(num_blocks=9, max_num_seqs=3, max_model_len=50)):
        every = create_probes(config, 0)
        assert every and len(set(every)) == len(every)
        for probe in every:
            ends = [past + 1 + probe.num_drafts for past in probe.context_lens]
            ends += [past + tokens for past, tokens in probe.chunks]
            assert sum(-(-end // config.block_size) for end in ends) <= config.num_blocks
            assert max(ends) <= config.max_model_len
            assert len(ends) <= config.max_num_seqs
            assert probe.num_tokens <= config.max_num_batched_tokens


def test_the_order_differs_between_repeats_and_is_equal_for_equal_seeds():
    every = create_probes(CONFIG, 0)
    orders = [shuffle_order(every, 0, repeat) for repeat in range(NUM_REPEATS)]
    assert all(sorted(order) == list(range(len(every))) for order in orders)
    assert len({tuple(order) for order in orders}) == NUM_REPEATS
    assert shuffle_order(every, 0, 1) == orders[1] != shuffle_order(every, 1, 1)


def test_each_step_is_timed_three_times_over(exact: FitResult):
    assert NUM_REPEATS >= 3
    assert all(len(s.steps_ns) == len(s.launches_ns) == 5 * NUM_REPEATS for s in exact.holdout)


def test_a_step_that_waits_for_its_drafts_is_not_launched_ahead(with_drafts: FitResult):
    """Its time starts at the end of its launch, and it refers to no token of the step before."""
    for sample in with_drafts.holdout:
        ahead = [ref for row in sample.plan.rows for ref in row.refs]
        assert bool(ahead) == (sample.kind in ("decode", "mixed"))


@pytest.mark.long
def test_only_steps_without_drafts_are_in_flight_together():
    """As many as the engine's depth, and one where drafts are verified."""

    class Counted(NamedTuple):
        model: VirtualClockModel
        flying: list[tuple[int, bool]]
        most: Counter[bool]

        def forward(self, plan: StepPlan) -> Any:
            drafts = any(row.drafts for row in plan.rows)
            self.flying.append((plan.step, drafts))
            self.most[drafts] = max(self.most[drafts], len(self.flying))
            return Landing(self.model.forward(plan), self.flying)

        def vocab_size(self) -> int:
            return 100

        def num_layers(self) -> int:
            return 1

        def eos_token(self) -> int:
            return 0

    class Landing(NamedTuple):
        step: Any
        flying: list[tuple[int, bool]]

        def result(self) -> Any:
            self.flying.pop(0)
            return self.step.result()

    clock = Clock()
    model = VirtualClockModel(LengthModel(), clock, TableCost(planted_tables(DRAFTED)))
    counted = Counted(model, [], Counter())
    profile(counted, DRAFTED, lambda: clock.now_ns, 0, MINUTE_NS)
    assert counted.most == {False: 2, True: 1}


@pytest.mark.long
def test_probes_without_time_are_left_out_evenly():
    """A second is too short for all probes; the measured ones are still of every kind."""
    whole = run_profile(TableCost(planted_tables(CONFIG)))
    short = run_profile(TableCost(planted_tables(CONFIG)), seconds=whole.spent_ns / 1e9 / 3)
    assert whole.left == 0 and short.left > 0
    assert short.spent_ns < 0.5 * whole.spent_ns
    counts = Counter(sample.kind for sample in short.samples)
    for kind, count in Counter(sample.kind for sample in whole.samples).items():
        assert 0.1 * count < counts[kind] < 0.7 * count


def test_a_full_grid_takes_less_than_ten_minutes_of_an_h200():
    """Counted, not run: the roofline time of each probe, for each of its repetitions."""
    config = EngineConfig(
        num_blocks=11_000,
        block_size=64,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        depth=2,
    )
    cost = parse_roofline("h200,qwen3-4b")
    spent_ns = 0
    for probe in create_probes(config, 0):
        rows = [Row(0, 0, 0, past, (1,), num_samples=1) for past in probe.context_lens]
        rows += [Row(0, 0, 0, past, range(n), num_samples=1) for past, n in probe.chunks]  # type: ignore[arg-type]
        spent_ns += cost.step_ns(StepPlan(0, tuple(rows), 1, 64)) * 9 * NUM_REPEATS
    assert spent_ns < 8 * MINUTE_NS


def test_blocks_of_a_probe_are_scattered_over_the_cache():
    config = EngineConfig(num_blocks=4096, block_size=16, max_num_seqs=8, max_model_len=2048)
    plan = ProbePlanner(LengthModel(), config, 0).create_bind_plan(Probe("decode", (1000,) * 8))
    blocks = [block for row in plan.rows for block in row.new_blocks]
    assert len(set(blocks)) == len(blocks) == 8 * 63
    assert set(blocks) <= set(range(4096))
    assert sum(b == a + 1 for a, b in itertools.pairwise(blocks)) < 10
    assert max(blocks) - min(blocks) > 3900


# The table.


def test_a_uniform_step_takes_the_time_of_its_plan():
    table = TableCost(planted_tables(CONFIG))
    for pasts in ((0,), (3, 3), (900, 4, 77), tuple(range(0, 1200, 97)), (1,) * 40):
        plan = decode_plan(*pasts)
        assert table.step_ns(plan) == table.decode_ns(len(pasts), sum(pasts), max(pasts))


def test_host_times_of_uniform_plans_depend_on_rows_alone():
    """Blocks that are allocated with a slot count; those that a sequence grows by do not."""
    tables = planted_tables(CONFIG)._replace(
        planning=PlanningCost(US, US, US, US, US), commit=CommitCost(US, US, US)
    )
    table = TableCost(tables)
    one, other = decode_plan(5, 900), decode_plan(77, 1000, step=9)
    grown = one._replace(rows=tuple(row._replace(keep=1, new_blocks=(3,)) for row in one.rows))
    assert table.plan_ns(one) == table.plan_ns(other) == table.plan_ns(grown)
    assert table.commit_ns(one) == table.commit_ns(other) == table.commit_ns(grown)
    bind = Bind(SamplingParams(), 0, 1)
    taken = grown._replace(rows=tuple(row._replace(bind=bind) for row in grown.rows))
    assert table.plan_ns(taken) == table.plan_ns(one) + 2 * 1_000 + 2 * 2_000


def test_a_table_is_linear_between_knots_and_proportional_above_them():
    knots = PiecewiseLinear((2, 4, 10), (100, 200, 140))
    assert [knots.evaluate(x) for x in (0, 2, 3, 4, 7, 10, 20)] == [
        100,
        100,
        150,
        200,
        170,
        140,
        280,
    ]


def test_a_position_costs_more_above_the_bend():
    near, far = PiecewiseLinear((1,), (1_000_000,)), PiecewiseLinear((1,), (3_000_000,))
    decode = DecodeCost(100, create_zero_knots((1,)), near, far, create_zero_knots((1,)))
    table = TableCost(planted_tables(CONFIG)._replace(decode=decode))
    assert [table.decode_ns(1, kv, kv) for kv in (99, 100, 101, 200)] == [99, 100, 103, 400]


def test_the_features_of_a_plan_are_counted():
    """A decode at 40, a chunk of 3 at 10, one of 2 with 2 drafts at 5 that binds a slot."""
    bind = Bind(SamplingParams(), 0, 1)
    rows = (
        Row(0, 0, 0, 40, (1,), num_samples=1),
        Row(1, 0, 1, 10, (1, 2, 3)),
        Row(2, 0, 2, 5, (1, 2), new_blocks=(7, 8), num_samples=3, bind=bind, drafts=(1, 1)),
    )
    plan = StepPlan(0, rows, 9, 4, admitted=(Event(2, "new"),), finished=(Event(9, "length"),))
    pairs = (11 + 12 + 13) + (6 + 7 + 8 + 9)
    spans = ((1, 41), (3, 13), (4, 9))
    assert extract_features(plan) == StepFeatures(3, 8, 2, 40, 40, pairs, 3, 1, 2, 2, spans)
    assert extract_features(decode_plan(5, 9)).spans == ()


def test_a_step_with_drafts_is_the_sum_of_its_parts():
    mixed = MixedStepCost(
        PiecewiseLinear((1, 100), (0, 99)), 1_000, 10_000, 100_000, 10**6, 10**7, 10**8
    )
    work = StepFeatures(rows=5, tokens=51, chunks=2, kv=3, pairs=4, lines=6)
    assert mixed.cost_fs(work) == 50 + 4_000 + 20_000 + 300_000 + 3 * 10**6 + 10**7 + 6 * 10**8
    assert mixed.cost_fs(work._replace(lines=0)) == 50 + 4_000 + 20_000 + 300_000 + 3 * 10**6


def test_a_step_waits_for_its_longest_row():
    """Below the bend and above it."""
    table = TableCost(planted_tables(CONFIG))
    for even, uneven in (((100, 100, 100), (280, 10, 10)), ((900, 900, 900), (1080, 810, 810))):
        waited_ns = table.step_ns(decode_plan(*uneven)) - table.step_ns(decode_plan(*even))
        assert waited_ns == pytest.approx(US // 40 * 180 // 1_000_000, abs=1)


def test_no_rows_take_no_time():
    assert TableCost(planted_tables(CONFIG)).step_ns(decode_plan()) == 0


def test_repeated_calls_return_equal_times():
    """Features and lines are cached; three plans in turn exceed the cache."""
    table = TableCost(planted_tables(CONFIG))
    plans = [decode_plan(5), decode_plan(5, 6), decode_plan(1000, 3, 3), decode_plan(5)]
    first = [TableCost(planted_tables(CONFIG)).step_ns(plan) for plan in plans]
    assert [table.step_ns(plan) for plan in plans * 2] == first * 2


def test_drafts_plans_are_added():
    tables = planted_tables(DRAFTED)
    plain = decode_plan(50, 60)
    drafted = plain._replace(drafts=(decode_plan(50, 60), decode_plan(51, 61)))
    assert tables.draft is not None
    own = [tables.draft.cost_fs(extract_features(each)) for each in drafted.drafts]
    table = TableCost(tables)
    assert table.step_ns(drafted) - table.step_ns(plain) == pytest.approx(sum(own) / 1e6, abs=1)
    assert table.plan_ns(drafted) > table.plan_ns(plain)


def test_the_frontend_adds_its_latency():
    assert FrontendLatency(1_000, 5, 300).first_token_ns(40) == 1_500


# Files and refusals.


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path):
    calibration().write(tmp_path / "new" / "one.json")
    assert read_calibration(tmp_path / "new" / "one.json") == calibration()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 32}, "block_size was 16, is 32"),
        ({"depth": 1}, "depth was 2, is 1"),
        ({"max_num_seqs": 13}, "max_num_seqs was at most 12, is 13"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens was at most 256, is 512"),
        ({"max_model_len": 1501}, "max_model_len was at most 1500, is 1501"),
        ({"speculation": Speculation()}, "num_speculative_tokens was at most 0, is 4"),
    ],
)
def test_another_geometry_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(InvalidConfig, match=named):
        calibration().check_engine(replace(CONFIG, **changes))


def test_a_smaller_engine_is_covered():
    calibration().check_engine(replace(CONFIG, max_num_seqs=4, max_model_len=100, num_blocks=99))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "NVIDIA A100"}, "device was NVIDIA H200, is NVIDIA A100"),
        ({"model": "qwen3-8b"}, "model was qwen3-4b, is qwen3-8b"),
        ({"dtype": "float16"}, "dtype was bfloat16, is float16"),
        ({"code": "0ther"}, "code was c0de, is 0ther"),
        (
            {"versions": {"forge": __version__, "torch": "2.12.0"}},
            "version torch was 2.11.0, is 2.12.0",
        ),
        ({"versions": {"forge": __version__}}, "version torch was 2.11.0, is absent"),
        (
            {"engine": select_engine_settings(replace(CONFIG, block_size=64))},
            "block_size was 16, is 64",
        ),
    ],
)
def test_another_machine_model_or_code_is_refused_by_name(changes: dict[str, Any], named: str):
    calibration().check_machine(identity())
    with pytest.raises(InvalidConfig, match=named):
        calibration().check_machine(identity()._replace(**changes))


def test_another_version_is_refused_where_nothing_is_measured():
    old = identity()._replace(versions={"forge": "0.0.9"})
    with pytest.raises(InvalidConfig, match=f"version forge was 0.0.9, is {__version__}"):
        replace(calibration(), identity=old).check_engine(CONFIG)


def printed_costs(
    identity: Identity, path: Path, capsys: pytest.CaptureFixture[str]
) -> list[list[str]]:
    """Return what a run and a sweep print of the costs of a calibration with this identity."""
    report = {**calibration().report, "day": "2026-03-01"}
    replace(calibration(), identity=identity, report=report).write(path)
    words = f"--cost {path} --requests 2 --prompt 4-8 --output 4-8 --depth 2 --max-num-seqs 4"
    words += " --max-num-batched-tokens 64 --max-model-len 256"
    found = []
    for command in ("sim", "sim sweep --rates 1,2"):
        assert main([*command.split(), *words.split()]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append([line for line in lines if " measured on " in line or " version" in line])
    return found


def test_a_run_reports_where_its_costs_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Another machine is not refused: a run predicts a GPU that is not present."""
    here = model_code_digest()
    line = f"costs       measured on NVIDIA H200, 2026-03-01: qwen3-4b bfloat16, code {here[:12]}"
    found = printed_costs(identity()._replace(code=here), tmp_path / "one.json", capsys)
    assert found == [[line]] * 2


def test_a_run_reports_costs_of_other_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = [
        "costs       measured on NVIDIA H200, 2026-03-01: qwen3-4b bfloat16, code c0de",
        f"            of another version: here is {model_code_digest()[:12]}",
    ]
    assert printed_costs(identity(), tmp_path / "one.json", capsys) == [lines] * 2


def edit_calibration(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    calibration().write(path)
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w["identity"].update(device="NVIDIA L4"), "changed afterwards"),
        (lambda w: w["identity"]["engine"].update(block_size=32), "changed afterwards"),
        (lambda w: w.pop("tables"), "'tables'"),
        (lambda w: w["tables"]["mixed"].update(pair_fs=-1), "pair_fs is no whole number"),
        (lambda w: w["tables"]["mixed"].update(pair_fs=1.5), "pair_fs is no whole number"),
        (lambda w: w["tables"]["decode"].pop("bend"), "decode has other keys"),
        (lambda w: w["tables"]["decode"]["base"].update(at=3), "at is no list"),
        (lambda w: w["tables"]["decode"]["base"].update(at=[1]), "base has other knots"),
        (lambda w: w["tables"]["decode"]["base"]["at"].reverse(), "base has .* not in order"),
        (lambda w: w["tables"]["mixed"]["tokens"].update(at=[], fs=[]), "tokens has"),
        (lambda w: w.update(format=1), "no calibration of this format: 1 is not 4"),
        (lambda w: w.pop("probes"), "'probes'"),
        (lambda w: w["probes"][0]["work"].update(rows=-1), "rows is no whole number"),
        (lambda w: w["tables"]["recorded"][0].update(heads=-1), "heads is no whole number"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Callable[..., object], named: str):
    with pytest.raises(InvalidConfig, match=named):
        read_calibration(edit_calibration(tmp_path / "one.json", change))


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path):
    (tmp_path / "text.json").write_text("not JSON")
    for name, what in (("text.json", "it is not JSON"), ("absent.json", "No such file")):
        with pytest.raises(InvalidConfig, match=what):
            parse_cost(str(tmp_path / name))


def test_tables_may_be_edited(tmp_path: Path):
    """To try what a faster kernel would change."""
    path = edit_calibration(tmp_path / "one.json", lambda w: w["tables"]["mixed"].update(pair_fs=0))
    assert read_calibration(path).tables.mixed.pair_fs == 0


# Errors and gates.


def table_steps(table: TableCost) -> list[MeasuredStep]:
    """Return steps of every kind with the times of that table."""
    return [MeasuredStep(s.plan, table.step_ns(s.plan)) for s in run_profile(table).samples]


@pytest.fixture(scope="module")
def steps() -> list[MeasuredStep]:
    return table_steps(TableCost(planted_tables(CONFIG)))


def test_an_accurate_model_has_no_violations(steps: list[MeasuredStep]):
    found = compute_cell_errors(TableCost(planted_tables(CONFIG)), steps)
    assert found.violations == []
    assert len(found.errors) == 9


@pytest.mark.parametrize(("per_mille", "shown"), [(1050, "-4.8%"), (950, r"\+5.[0-9]%")])
def test_a_calibration_that_is_off_by_five_per_cent_violates_the_gate(
    steps: list[MeasuredStep], per_mille: int, shown: str
):
    """Every gate of the median fails, in every cell with enough steps."""
    found = compute_cell_errors(
        TableCost(scale_device_cost(planted_tables(CONFIG), per_mille)), steps
    )
    gated = [cell for cell, errors in found.errors.items() if errors.number >= 20]
    assert len(gated) >= 6
    for cell in gated:
        assert any(fault.startswith(f"{cell}: median") for fault in found.violations)
        assert any(fault.startswith(f"{cell}: steps take") for fault in found.violations)


def test_drift_in_one_kind_of_step_is_found_there(steps: list[MeasuredStep]):
    tables = planted_tables(CONFIG)
    decode = scale_device_cost(tables, 1050).decode
    faults = compute_cell_errors(TableCost(tables._replace(decode=decode)), steps).violations
    assert faults and all(fault.startswith("decode, ") for fault in faults)


def drift_faults(*errors: float) -> list[str]:
    """Return the violations of a constant with these errors: decode steps, alike in each third."""
    assert len(errors) == MIN_STEPS
    missed = [MeasuredStep(decode_plan(100), round(10**9 / (1 + error))) for error in errors]
    return compute_cell_errors(ConstantCost(10**9), missed * 3).violations


@pytest.mark.parametrize(
    ("errors", "fault"),
    [
        ([0.021, -0.021] * 10, "median error 2.1%, more than 2%"),
        ([0.0] * 18 + [0.061, -0.061], "p90 error 6.1%, more than 6%"),
        ([0.011] * 20, "steps take -1.1%, beyond 1%"),
        ([-0.011] * 20, "steps take +1.1%, beyond 1%"),
    ],
)
def test_each_gate_alone_finds_errors_just_above_it(errors: list[float], fault: str):
    """The two other gates pass."""
    thirds = ("few", "some", "many")
    assert drift_faults(*errors) == [f"decode, {third} positions: {fault}" for third in thirds]


def test_errors_just_below_every_gate_are_no_violations():
    """Median 1.9 %, 90th percentile 5.9 %, bias 0.95 %."""
    assert drift_faults(*[0.019] * 14, *[-0.019] * 4, 0.059, -0.059) == []


def test_a_cell_with_few_steps_says_nothing(steps: list[MeasuredStep]):
    assert (
        compute_cell_errors(
            TableCost(scale_device_cost(planted_tables(CONFIG), 2000)), steps[:10]
        ).violations
        == []
    )


# Noise.


def create_noisy(seed: int = 0) -> NoisyCost:
    return NoisyCost(TableCost(planted_tables(CONFIG)), calibration().residuals, seed)


def test_noise_is_drawn_by_seed_and_step():
    plans = [decode_plan(100, 200, step=step) for step in range(300)]
    times = [create_noisy().step_ns(plan) for plan in plans]
    assert times == [create_noisy().step_ns(plan) for plan in plans]
    assert times != [create_noisy(1).step_ns(plan) for plan in plans]
    mean = create_noisy().table.step_ns(plans[0])
    assert sorted({time / mean for time in times}) == pytest.approx([0.9, 1.0, 1.1], rel=1e-5)
    assert fmean(times) == pytest.approx(mean, rel=0.02)


def test_steps_without_residuals_have_no_noise():
    chunk = StepPlan(5, (Row(0, 0, 0, 0, (1,) * 30),), 400, 16)
    assert create_noisy().step_ns(chunk) == create_noisy().table.step_ns(chunk)


def test_bins_keep_the_middle_and_the_tail_of_each_size():
    """Short steps take 1 % more than the tables say, long ones stall in a tenth of them."""
    short = [(1_000, 990)] * 100
    long = ([(9_000, 9_000)] * 9 + [(9_000, 27_000)]) * 20
    bins = create_bins(short + long)
    assert [each.most_ns for each in bins] == [1_000, 9_000, 9_000]
    assert set(bins[0].ratios) == {1_000_000}
    for each in bins[1:]:
        assert Counter(each.ratios) == {1_000_000: 90, 3_000_000: 10}
    assert create_bins([]) == ()


def test_a_world_with_noise_runs_step_by_step_and_again_the_same(tmp_path: Path):
    calibration().write(tmp_path / "one.json")
    plain = Scenario(
        cost=str(tmp_path / "one.json"),
        engine=CONFIG,
        requests=30,
        prompt="8-64",
        output="8-64",
        rate=50.0,
    )
    shaken = replace(plain, cost=f"noisy:{plain.cost}")
    first, again, other = (
        summary(scenario.run()) for scenario in (shaken, shaken, replace(shaken, seed=1))
    )
    assert first == again != other
    assert summary(plain.run())["itl_ms"] != first["itl_ms"]
    assert plain.header()["calibration"] == shaken.header()["calibration"] is not None
    calibration().write(tmp_path / "other.json")
    copied = replace(shaken, cost=f"noisy:{tmp_path}/other.json")
    assert copied.header() == shaken.header() != plain.header()
    with pytest.raises(InvalidConfig, match="block_size"):
        replace(plain, engine=replace(CONFIG, block_size=8))


def test_fast_forward_and_steps_agree_on_a_calibration(tmp_path: Path):
    calibration().write(tmp_path / "one.json")
    scenario = Scenario(cost=str(tmp_path / "one.json"), engine=CONFIG, requests=30, output="8-64")
    engine, model = scenario.create_engine()
    stepwise = scenario.create_world(engine, model)
    stepwise.run()
    assert summary(scenario.run()) == summary(stepwise)


def test_a_calibration_with_a_draft_model_sets_the_time_of_drafts(tmp_path: Path):
    """And `draft_cost` is not used."""
    calibration(DRAFTED).write(tmp_path / "one.json")
    scenario = Scenario(
        cost=str(tmp_path / "one.json"), engine=DRAFTED, requests=5, prompt="8-32", output="8-32"
    )
    dear = replace(scenario, draft_cost=50.0)
    assert summary(scenario.run()) == summary(dear.run())
    assert summary(scenario.run())["drafted"] > 0


# The whole calibration.


def test_a_model_is_calibrated_on_the_command_line(tmp_path: Path, capsys: Any):
    """In real time, so only the file and a run with it are checked, not the errors."""
    pytest.importorskip("numpy")
    path = tmp_path / "hash.json"
    geometry = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--num-blocks", "16"]
    geometry += ["--max-model-len", "48"]
    words = ["sim", "calibrate", "hash", "--out", str(path), "--minutes", "1", *geometry]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "held out" in printed and "affine" in printed and str(path) in printed
    found = read_calibration(path)
    assert found.identity.model == "hash"
    assert found.identity.engine["max_num_seqs"] == 2
    assert found.identity.versions.keys() >= {"forge", "python"}
    assert found.report["samples"] > 20
    assert date.fromisoformat(found.report["day"]).year > 2020
    assert sum(get_parameters(found.tables.launch)) > 0
    run = ["sim", "--cost", str(path), "--requests", "5", "--prompt", "4-8", "--output", "4-8"]
    assert main([*run, *geometry]) == 0
    assert main([*run, *geometry[:-1], "96"]) == 2
    assert "max_model_len was at most 48, is 96" in capsys.readouterr().err


def test_the_device_and_the_model_have_a_roofline_where_they_are_known():
    assert find_roofline(identity()) == parse_roofline("h200,qwen3-4b")
    a100 = identity()._replace(device="NVIDIA A100-SXM4-80GB", model="Llama-3.1-8B-Instruct")
    assert find_roofline(a100) == parse_roofline("a100-80,llama-3.1-8b")
    assert find_roofline(identity()._replace(device="AMD EPYC")) is None


def test_a_model_is_known_by_its_name_and_what_it_ran_on():
    from forge.models.loader import load_model

    with load_model("hash:step_ms=1", {"max_num_seqs": 3}) as loaded:
        found = create_identity(loaded)
    assert found.model == "hash:step_ms=1"
    assert found.engine["max_num_seqs"] == 3
    assert len(found.code) == 64 and found.device
    assert found.digest != found._replace(dtype="other").digest


# A prior: kernel times that others have published.

TRACES = os.environ.get("FORGE_TRACES")


@pytest.mark.skipif(TRACES is None, reason="FORGE_TRACES names no folder with profiles")
def test_decode_attention_of_a_real_gpu_fits_the_table():
    """36 layers of measured attention on 1 ms: better than a line in rows and positions."""
    pytest.importorskip("numpy")
    path = Path(str(TRACES)) / "profiles" / "h200_vllm0.24_generation_attention_perf.csv"
    with path.open() as file:
        measured = [
            (int(line["batch_size"]), int(line["step"]), float(line["latency"]))
            for line in csv.DictReader(file)
            if (line["num_heads"], line["num_key_value_heads"]) == ("32", "8")
            and (line["head_dim"], line["kv_cache_dtype"]) == ("128", "bfloat16")
            and line["window_size"] == "0"
        ]
    samples = [
        StepSample("decode", decode_plan(*(past,) * rows), (round(1e6 + 36e6 * ms),), (1_000,))
        for rows, past, ms in measured
    ]
    chunk = StepPlan(0, (Row(0, 0, 0, 0, (1,) * 16),), 400, 16)
    known, holdout = split_holdout(samples, 0)
    known.append(StepSample("chunk", chunk, (10**6,), (1_000,)))
    table = TableCost(fit_tables(known, [], []))
    errors = summarize_errors((table.step_ns(s.plan), median_total_ns(s)) for s in holdout)
    line = fit_affine([MeasuredStep(s.plan, median_total_ns(s)) for s in known])
    simple = summarize_errors((line.step_ns(s.plan), median_total_ns(s)) for s in holdout)
    assert errors.number > 20 and median_launch_ns(holdout[0]) == 1_000
    assert errors.median < 0.04 and errors.p90 < 0.12
    assert errors.median < simple.median / 2 and errors.p90 < simple.p90 / 5
