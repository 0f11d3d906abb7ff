"""The twin's experiment: what is compared with what, and that it can fail."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from bench.twin import (  # noqa: E402
    Outcome,
    blocks,
    capacity,
    committed,
    compared,
    corrected,
    kendall,
    predicted,
    real,
    trace,
)
from forge.config import EngineConfig  # noqa: E402
from forge.models.hash import HashModel  # noqa: E402
from forge.seam import Row, StepPlan  # noqa: E402
from sim.calibration import Calibration, Identity  # noqa: E402
from sim.cost import Affine, Constant  # noqa: E402
from sim.drift import Measured  # noqa: E402
from sim.noise import Residuals  # noqa: E402
from sim.table import Commit, Decode, Knots, Launch, Mixed, Planning, Tables, level  # noqa: E402
from sim.traces import Asked  # noqa: E402

pytestmark = pytest.mark.torch  # numpy comes with it
MS = 1_000_000
CONFIG = EngineConfig(num_blocks=512, block_size=16, max_num_seqs=4, max_model_len=256)
ASKED = [Asked(i * 300 * MS, 20 + i, 8) for i in range(12)]


def outcome(first: list[float], gap: float, seconds: float = 2.0) -> Outcome:
    return Outcome(np.array(first), [np.full(5, gap) for _ in first], seconds)


def test_a_trace_begins_at_once_and_comes_as_fast_as_was_asked():
    arrivals = list(trace(ASKED[4:], 10.0, 256).arrivals())
    assert arrivals[0].at_ns == 0
    assert arrivals[-1].at_ns == pytest.approx(7 / 10 * 1e9, rel=1e-6)
    assert [len(each.request.prompt) for each in arrivals] == [24 + i for i in range(8)]


def test_what_does_not_fit_is_cut():
    (arrival,) = trace([Asked(0, 900, 900)], 1.0, 256).arrivals()
    assert (len(arrival.request.prompt), arrival.request.params.max_tokens) == (224, 32)


def test_the_capacity_is_that_of_all_requests_at_once():
    # Four at a time, each of a step for its prompt and its first token and seven steps more.
    steps = 3 * 8
    assert capacity(Constant(10 * MS), CONFIG, ASKED) == pytest.approx(12 / (steps * 0.01), rel=0.1)


def test_a_prediction_takes_what_its_cost_says():
    slow, fast = (predicted(Constant(n * MS), CONFIG, trace(ASKED, 2.0, 256)) for n in (20, 10))
    assert slow.figures()["itl_p50"] == pytest.approx(20)
    assert fast.figures()["itl_p99"] == pytest.approx(10)
    assert fast.figures()["ttft_p50"] == pytest.approx(10)


def test_a_real_run_serves_the_same_requests_and_keeps_its_steps():
    model = HashModel(vocab_size=256, num_blocks=512, block_size=16)
    ran, steps = real(model, CONFIG, trace(ASKED, 400.0, 256), keeps=True)
    said = predicted(Constant(MS), CONFIG, trace(ASKED, 400.0, 256))
    assert len(ran.first) == len(said.first) == 12
    assert [len(each) for each in ran.between] == [7] * 12
    assert sum(step.plan.num_tokens for step in steps) == sum(20 + i + 7 for i in range(12))
    assert all(step.ns > 0 for step in steps)


def test_an_error_is_signed_and_a_share_of_the_middle_run():
    runs = [outcome([10, 20, 30], 5.0), outcome([11, 21, 31], 5.5), outcome([40, 50, 60], 6.0)]
    said = outcome([21, 21, 21], 4.4).figures()
    found = compared(said, runs)
    assert found["ttft_p50"] == {
        **found["ttft_p50"],
        "sim": 21.0,
        "real": 21.0,
        "error": 0.0,
        "runs": [20.0, 21.0, 50.0],
        "within": True,
    }
    assert found["itl_p50"]["error"] == pytest.approx(-0.2)
    assert not found["itl_p50"]["within"]
    low, high = found["ttft_mean"]["interval"]
    assert low < found["ttft_mean"]["real"] < high
    assert found["tok_s"]["interval"] is None


def test_tau_counts_pairs():
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


def test_what_was_predicted_is_written_with_its_digest(tmp_path: Path):
    told = committed(tmp_path / "new" / "said.json", {"b": 1, "a": [2.5]})
    text = (tmp_path / "new" / "said.json").read_bytes()
    assert told["sha256"] == sha256(text).hexdigest()
    assert json.loads(text) == {"a": [2.5], "b": 1}


def plan(step: int, *lengths: int) -> StepPlan:
    rows = tuple(Row(i, 0, i, 10, tuple(range(n)), num_samples=1) for i, n in enumerate(lengths))
    return StepPlan(step, rows, 64, 16)


def calibration() -> Calibration:
    one = Knots((1, 8), (10**12, 10**12))
    tables = Tables(
        decode=Decode(0, one, level((1,)), level((1,)), level((1,))),
        mixed=Mixed(one),
        planning=Planning(),
        launch=Launch(one, one),
        commit=Commit(),
    )
    identity = Identity("m", "bf16", "gpu", {}, "", {})
    return Calibration(identity, tables, Residuals(), {})


def test_practice_is_fitted_and_told_by_blocks_that_were_held_out():
    """Two kinds of steps that take other times than the table says, and one stall in twenty."""
    steps = [
        Measured(
            plan(i, 1, 1) if i % 2 else plan(i, 1, 6),
            (1_500_000 if i % 2 else 800_000) * (2 if i % 20 == 7 else 1),
        )
        for i in range(500)
    ]
    better, told = corrected(calibration(), steps)
    assert (told["steps"], told["held_out"]) == (500, 100)
    for step in (steps[0], steps[1]):
        assert better.table().step_ns(step.plan) == pytest.approx(step.ns, rel=0.01)
    assert better.tables.launch == calibration().tables.launch
    assert told["before"].keys() == told["after"].keys()
    assert all(cell["median"] < 0.01 for cell in told["after"].values())
    assert any(cell["median"] > 0.1 for cell in told["before"].values())


def test_held_out_steps_are_told_by_a_fit_that_has_not_seen_them():
    """The held-out blocks are the only ones with mixed steps: their errors stay as they were."""
    steps = [
        Measured(plan(i, 1, 6) if 200 <= i < 250 else plan(i, 1, 1), 2 * MS) for i in range(250)
    ]
    better, told = corrected(calibration(), steps)
    assert told["held_out"] == 50
    assert told["after"] == told["before"]
    assert better.table().step_ns(steps[220].plan) == pytest.approx(2 * MS, rel=0.01)


def test_every_fifth_block_is_held_out():
    steps = [Measured(plan(i, 1), MS + i) for i in range(520)]
    known, held = blocks(steps)
    assert [step.plan.step for step in held] == [*range(200, 250), *range(450, 500)]
    assert known == [step for step in steps if step not in held]


def test_a_kind_that_was_not_met_stays_as_it_was():
    better, _ = corrected(calibration(), [Measured(plan(0, 1), 2 * MS)])
    assert better.tables.mixed == calibration().tables.mixed
    assert better.tables.decode != calibration().tables.decode


def test_a_prediction_by_another_line_is_another():
    fast, slow = (
        predicted(Affine(base, 0, 1000), CONFIG, trace(ASKED, 20.0, 256)).figures()
        for base in (5 * MS, 6 * MS)
    )
    assert slow["latency_mean"] > 1.1 * fast["latency_mean"]
