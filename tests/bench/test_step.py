"""Benchmarks on the deterministic model: the keys and the counts of their figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from forge import LLM
from forge.bench import breakdown, step, sweep, ttft
from forge.bench.engine_driver import EngineDriver, ModelTimer
from forge.bench.result_file import create_result
from forge.bench.workload import (
    BatchCell,
    Cells,
    PrefixCell,
    RequestTimes,
    SteadyCell,
    SweepCell,
    draw_batch,
    draw_prompts,
    level_figures,
    percentiles,
    prompt_id_range,
    quantile,
)
from forge.errors import InvalidConfig, RequestFailed
from forge.models.hash import HashModel
from forge.models.paged import FaultHooks
from forge.seam import Model, PendingStep, StepPlan
from tests.virtual_time import VirtualTime

TINY = Cells(
    seed=0,
    warm_up=(BatchCell("few", 2, (5, 5), (3, 3)),),
    ttft=(8, 20),
    repeats=3,
    throughput=(BatchCell("c3", 3, (10, 10), (6, 6)),),
    rounds=2,
    mixed=(BatchCell("mixed4", 4, (4, 12), (3, 9)),),
    steady=SteadyCell((1, 4), 64, 20),
    prefix=(PrefixCell("prefix_64_8", 64, 8, 3),),
    sweep=SweepCell((1, 3), 10, 6, 2),
)


def parse_result(printed: str) -> dict[str, Any]:
    """Return the result in the output of a run."""
    (line,) = (line for line in printed.splitlines() if line.startswith("RESULT "))
    content: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return content


class PlanKeeper(ModelTimer):
    """A model that keeps every plan."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> PendingStep:
        """Keep the plan and launch it."""
        self.plans.append(plan)
        return super().forward(plan)


# The cells


def test_the_cells_that_ship_are_those_that_were_agreed_on() -> None:
    cells = Cells.read()
    assert cells.ttft == (128, 512, 2048, 8000)
    assert cells.repeats == 7
    assert [tuple(batch) for batch in cells.throughput] == [
        ("c1", 1, (128, 128), (256, 256)),
        ("c8", 8, (512, 512), (256, 256)),
        ("c64", 64, (200, 200), (384, 384)),
        ("c256", 256, (200, 200), (384, 384)),
    ]
    assert cells.rounds == 2
    assert cells.mixed == (BatchCell("mixed256", 256, (100, 1024), (100, 1024)),)
    assert cells.sweep == SweepCell((1, 2, 4, 8, 16, 32, 64, 128), 200, 384, 2)


def test_named_cells_leave_all_others_out() -> None:
    cells = TINY.select(["ttft_20", "c3", "b4"])
    assert cells.names == ("ttft_20", "c3", "b4")


def test_an_unknown_cell_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match=r"there is no cell 'c9'\. Use some of: ttft_8, "):
        TINY.select(["c9"])


def test_every_mixed_prompt_is_drawn_before_the_first_output_length() -> None:
    """Lengths are part of the workload: other engines draw them in this order too."""
    batch = TINY.mixed[0]
    work = draw_batch(random.Random(0), batch, (10, 50))
    rng = random.Random(0)
    prompts = draw_prompts(rng, 4, (4, 12), (10, 50))
    assert work == [(prompt, rng.randint(3, 9)) for prompt in prompts]


@pytest.mark.parametrize(
    ("vocab_size", "ids"), [(151_936, (1000, 100_000)), (512, (128, 512)), (50_000, (1000, 50_000))]
)
def test_prompts_take_ids_that_the_vocabulary_has(vocab_size: int, ids: tuple[int, int]) -> None:
    assert prompt_id_range(vocab_size) == ids


def test_a_spread_has_the_median_and_what_surrounds_it() -> None:
    sample = [float(n) for n in range(100)]
    assert percentiles("ms", sample, 1) == {"ms": 49.5, "ms_p10": 10.0, "ms_p90": 90.0}
    assert quantile([3.0], 0.99) == 3.0


def test_a_level_counts_time_between_tokens_not_between_arrivals() -> None:
    """Five tokens in three arrivals: 40 ms after the first, four tokens later."""
    stream = RequestTimes(1.0, (1.010, 1.030, 1.050), 5)
    assert level_figures(1, [stream], 0.1) == {
        "c": 1,
        "ttft_p50": 10.0,
        "ttft_p99": 10.0,
        "itl_p50": 10.0,
        "itl_p99": 10.0,
        "gap_p99": 20.0,
        "tok_s": 50,
    }


# forge bench step


def test_step_prints_a_figure_for_each_cell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "step.json"
    assert step.main("hash", str(path), cells=TINY) == 0
    result = parse_result(capsys.readouterr().out)
    assert (result["engine"], result["shape"]) == ("forge", "hash")
    kinds = ("step_ms", "host_us", "forward_us", "policy_us")
    timed = [f"{kind}_b{n}" for n in (1, 4) for kind in kinds]
    assert set(result) == {
        *("engine", "shape", "start_s"),
        *("ttft_8_ms", "ttft_20_ms", "c3_tok_s", "mixed4_tok_s"),
        *(f"{name}{part}" for name in timed for part in ("", "_p10", "_p90")),
    }
    assert json.loads(path.read_text())["figures"] == result


def test_step_runs_the_named_cells_only(capsys: pytest.CaptureFixture[str]) -> None:
    step.main("hash", None, cell_names=["c3"], cells=TINY)
    assert set(parse_result(capsys.readouterr().out)) == {"engine", "shape", "start_s", "c3_tok_s"}


def test_a_device_that_takes_its_time_is_not_counted_as_host_time(
    virtual_time: VirtualTime,
) -> None:
    """Each step takes 50 ms on a virtual device; the host only reads the clock."""
    virtual_time.tick_s = 1e-5
    with LLM("hash:step_ms=50", enable_prefix_caching=False) as llm:
        times = EngineDriver(llm.engine).time_steps([[5, 6, 7], [8, 9]], 8)
    assert len(times) == 8
    for time in times[1:]:
        assert time.step_s == pytest.approx(0.05, abs=0.001)
        assert 0 < time.forward_s < time.host_s < 0.001


def test_steps_leave_the_engine_as_they_found_it() -> None:
    with LLM("hash") as llm:
        inner = llm.engine.model
        EngineDriver(llm.engine).time_steps([[5, 6, 7]], 4)
        assert llm.engine.model is inner
        assert not llm.engine.has_work


def test_steps_refuse_a_cache_that_cannot_hold_the_batch() -> None:
    with LLM("hash", num_blocks=8, enable_prefix_caching=False) as llm:
        with pytest.raises(InvalidConfig, match="a step of 2 sequences held 1"):
            EngineDriver(llm.engine).time_steps([[5] * 40, [6] * 40], 40)


def test_a_batch_counts_every_output_token() -> None:
    with LLM("hash") as llm:
        seconds, tokens = EngineDriver(llm.engine).run_batch([([5, 6], 7), ([7], 3)])
    assert tokens == 10
    assert seconds > 0


def test_a_failing_request_ends_the_measurement() -> None:
    def broken(plan: StepPlan) -> dict[int, str]:
        return {0: "not finite"}

    with LLM("hash") as llm:
        model = HashModel(
            vocab_size=llm.engine.model.vocab_size(), faults=FaultHooks(result=broken)
        )
        llm.engine.model = model
        with pytest.raises(RequestFailed, match="not finite"):
            EngineDriver(llm.engine).run_batch([([5, 6], 7)])


# forge bench ttft


def test_ttft_measures_with_and_without_a_cached_prefix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ttft.main("hash", None, cells=TINY)
    result = parse_result(capsys.readouterr().out)
    assert {"ttft_8_ms", "ttft_20_ms", "ttft_prefix_64_8_ms"} < set(result)


def test_the_prefix_cell_computes_the_new_tokens_only() -> None:
    """Sixty-four of the 72 tokens are four whole blocks, which the cache holds."""
    with LLM("hash", enable_prefix_caching=True) as llm:
        ttft.measure_ttft_s(llm, [*range(64), *[1] * 8])
        watched = llm.engine.model = PlanKeeper(llm.engine.model)
        ttft.measure_ttft_s(llm, [*range(64), *[2] * 8])
    assert [plan.num_tokens for plan in watched.plans] == [8]


# The sweep


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """Nine requests, three at a time, one token a step: three rows until the last three end."""
    with LLM("hash", enable_prefix_caching=False) as llm:
        watched = llm.engine.model = PlanKeeper(llm.engine.model)
        prompts = draw_prompts(random.Random(0), 9, (5, 5), (10, 90))
        streams, wall_s = EngineDriver(llm.engine).run_closed_loop(prompts, 4, 3)
    assert {len(plan.rows) for plan in watched.plans} == {3}
    assert [stream.num_tokens for stream in streams] == [4] * 9
    assert wall_s > 0


def test_a_stream_has_a_stamp_for_each_token_in_order() -> None:
    with LLM("hash", enable_prefix_caching=False) as llm:
        streams, _ = EngineDriver(llm.engine).run_closed_loop([[5, 6], [7]], 4, 2)
    for stream in streams:
        assert len(stream.chunk_times_s) == 4
        assert [stream.start_s, *stream.chunk_times_s] == sorted(
            [stream.start_s, *stream.chunk_times_s]
        )


def test_the_sweep_prints_a_result_for_each_concurrency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep.main("hash", None, cells=TINY)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert [(each["engine"], each["path"], each["c"]) for each in results] == [
        ("forge", "offline", 1),
        ("forge", "offline", 3),
    ]


# The breakdown


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    """Return a complete trace event, times in us."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_trace_becomes_times_per_step_and_group() -> None:
    """Two steps in 100 us. Two kernels overlap by 5 us, so busy is less than the sum."""
    result = breakdown.trace_figures(
        [
            event("kernel", "nvjet_tst_64x8", 0, 20),
            event("kernel", "_norm_rows", 15, 10),
            event("kernel", "void flashinfer::BatchDecodeWithPagedKVCacheKernel", 30, 10),
            event("gpu_memcpy", "Memcpy HtoD", 60, 10),
            event("kernel", "_score_tile", 90, 10),
            event("cuda_runtime", "cudaGraphLaunch", 0, 3),
            event("cuda_runtime", "cudaLaunchKernel", 50, 3),
            event("cuda_runtime", "cudaEventRecord", 55, 3),
            {"ph": "M", "name": "process_name"},
        ],
        steps=2,
    )
    assert result["groups_us"] == {
        "ranks": 0.0,
        "attention": 5.0,
        "sampling": 5.0,
        "copies": 5.0,
        "gemm": 10.0,
        "norm, rope, elementwise": 5.0,
        "other": 0.0,
    }
    assert (result["busy_us"], result["window_us"], result["idle_share"]) == (27.5, 50.0, 0.45)
    assert (result["kernels"], result["launches"]) == (2.5, 1.0)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("_row_linear", "gemm"),
        ("_block_gate_up", "gemm"),
        ("gate_up_small", "gemm"),
        ("nvjet_sm90_tst_128x64_64x6_1x2_h_bz_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "gemm"),
        ("kernel_mha", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("_rope_heads", "norm, rope, elementwise"),
        ("_silu_rows", "norm, rope, elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>", "sampling"),
        ("Memset (Device)", "copies"),
        ("mystery", "other"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, group: str) -> None:
    assert breakdown.kernel_group(kernel) == group


def test_a_breakdown_without_a_device_says_that_it_has_the_host_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    breakdown.main("hash", None, batches=(2,), cells=TINY)
    printed = capsys.readouterr().out
    assert "no CUDA device is used: the figures are those of the host only" in printed
    assert "device" not in parse_result(printed)["breakdown"]["b2"]


# The record


def test_a_record_says_what_it_was_measured_with() -> None:
    result = create_result("step", {"c1_tok_s": 3})
    assert result["versions"].keys() >= {"python"}
    assert result["machine"].keys() >= {"processor", "cores", "system"}
    assert result["figures"] == {"c1_tok_s": 3}
