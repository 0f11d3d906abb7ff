"""Scenarios: one value decides a run, and equal values write equal logs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from forge import __version__
from forge.config import EngineConfig, Speculation
from forge.errors import InvalidConfig
from forge.seam import Row, StepPlan
from forge.sim.cost.cost_spec import DraftModelCost, parse_cost
from forge.sim.cost.simple import AffineCost, ConstantCost
from forge.sim.decision_log import DecisionLog
from forge.sim.reports.run_history import RunHistory
from forge.sim.scenario import WORKLOAD_OPTIONS, Scenario, summary
from forge.sim.workloads.length_distributions import parse_lengths
from forge.sim.world import World

SMALL = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
FEW = Scenario(requests=12, rate=40.0, prompt="1-60", output="1-20", engine=SMALL)


def run_and_log(scenario: Scenario) -> tuple[World, str]:
    """Run the scenario. Returns the world at its end, and its log."""
    lines: list[str] = []
    log = DecisionLog(lines.append, scenario.header())
    world = scenario.run(log)
    log.close()
    return world, "".join(lines)


@pytest.mark.parametrize("model", ["lengths", "hash"])
@pytest.mark.parametrize("workload", WORKLOAD_OPTIONS)
def test_equal_scenarios_serve_all_requests_and_write_equal_logs(workload: str, model: str) -> None:
    few = replace(FEW, longest_prompt=40, longest_output=8) if workload == "sample" else FEW
    scenario = replace(few, workload=workload, model=model, turns=3, system=8)
    world, text = run_and_log(scenario)
    assert world.metrics.finish_counts == {"length": 12}
    assert world.metrics.num_in_system == 0
    assert run_and_log(replace(scenario))[1] == text


def test_other_seeds_make_other_runs() -> None:
    logs = [run_and_log(replace(FEW, seed=seed))[1].splitlines() for seed in range(8)]
    assert len({"".join(lines[1:-1]) for lines in logs}) == 8


def test_the_first_line_of_a_log_says_all_that_decides_the_run() -> None:
    header = json.loads(run_and_log(replace(FEW, seed=5))[1].splitlines()[0])
    options = {each.name for each in fields(Scenario)} - {"engine", "seed"}
    assert set(header["options"]) == options
    assert set(header["engine"]) == {each.name for each in fields(EngineConfig)}
    assert (header["seed"], header["forge"], header["calibration"]) == (5, __version__, None)
    assert len(header["code"]) == 64
    # Defaults are in it, too.
    unset = Scenario().header()["options"]
    assert (unset["rate"], unset["requests"]) == (10.0, 1000)


def test_the_first_line_knows_a_policy_and_a_trace_by_their_content(tmp_path: Path) -> None:
    policy, trace = tmp_path / "mine.py", tmp_path / "trace.csv"
    policy.write_text("from forge.policy import FCFS as policy\n")
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n")
    scenario = replace(FEW, policy=str(policy), workload=str(trace), requests=None)
    before = scenario.header()
    policy.write_text("from forge.policy import FCFS\npolicy = FCFS\n")
    between = scenario.header()
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,6\n")
    after = scenario.header()
    assert before["policy"] != between["policy"] == after["policy"]
    assert before["trace"] == between["trace"] != after["trace"]


def test_a_log_does_not_depend_on_how_a_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder, another name, a link, a relative path: equal contents are equal runs."""
    rows = ("2023-11-16 18:15:46,5,5", "2023-11-16 18:15:47,9,3")
    sources = {
        "trace.csv": "\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "")),
        "mine.py": "from forge.policy import FCFS as policy\n",
    }
    (tmp_path / "other").mkdir()
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
        (tmp_path / "other" / f"copy-of-{name}").write_text(text)
        (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    spelled = [
        tuple(form.format(name) for name in sources)
        for form in (
            f"{tmp_path}/{{}}", "{}", "./{}", "other/../{}", "link-{}", "other/copy-of-{}"
        )
    ]  # fmt: skip
    logs = {
        run_and_log(replace(FEW, workload=trace, policy=policy, requests=None))[1]
        for trace, policy in spelled
    }
    assert len(logs) == 1
    (text,) = logs
    options = json.loads(text.partition("\n")[0])["options"]
    assert (options["workload"], options["policy"]) == ("file", "file")
    assert run_and_log(replace(FEW, policy="fcfs", workload="trace.csv", requests=None))[1] != text


def test_observers_change_nothing() -> None:
    """Without observers, the world fast-forwards uniform steps."""
    tight = replace(FEW, requests=24, rate=400.0, engine=replace(SMALL, num_blocks=20))
    lines: list[str] = []
    log = DecisionLog(lines.append, tight.header())
    tight.run(log, lambda engine: [RunHistory(engine)])
    log.close()
    world, text = run_and_log(tight)
    assert "".join(lines) == text
    assert world.engine.scheduler.num_preemptions > 0


@pytest.mark.long
def test_a_fast_forward_does_not_use_reserved_blocks() -> None:
    """A sequence that was preempted eight times reserves every block it can need."""
    engine = EngineConfig(num_blocks=160, max_num_seqs=24)
    scenario = Scenario(requests=80, rate=12.0, prompt="16-64", output="200-400", engine=engine)
    lines: list[str] = []
    scenario.run(DecisionLog(lines.append, scenario.header()), lambda engine: [RunHistory(engine)])
    world, text = run_and_log(scenario)
    assert text.startswith("".join(lines))
    assert world.metrics.finish_counts == {"length": 80}


# Figures that are known in advance.


def test_one_client_on_steps_of_a_millisecond_waits_a_millisecond_a_token() -> None:
    alone = Scenario(
        workload="closed", clients=1, requests=5, prompt="100", output="7", cost="unit"
    )
    figures = summary(alone.run())
    assert figures["seconds"] == 0.035
    assert (figures["ttft_ms"]["max"], figures["latency_ms"]["max"]) == (1.0, 7.0)
    assert (figures["requests"], figures["output_tokens"], figures["steps"]) == (5, 35, 35)
    assert round(figures["tokens_per_s"], 6) == 1000


@pytest.mark.parametrize(
    ("ttft_ms", "itl_ms", "good"), [(1.0, 1.0, 5), (0.999, 1.0, 0), (1.0, 0.999, 0)]
)
def test_a_good_request_is_within_both_limits(ttft_ms: float, itl_ms: float, good: int) -> None:
    alone = Scenario(
        workload="closed", clients=1, requests=5, prompt="9", output="7", cost="unit",
        slo_ttft_ms=ttft_ms, slo_itl_ms=itl_ms,
    )  # fmt: skip
    figures = summary(alone.run())
    assert figures["good"] == good
    assert figures["goodput_per_s"] == good / 0.035


def test_a_request_that_can_never_run_is_refused_and_not_good() -> None:
    figures = summary(replace(FEW, prompt="8,300", requests=20).run())
    assert 0 < figures["refused"] < 20
    assert figures["endings"] == {"length": 20 - figures["refused"]}
    assert figures["good"] <= 20 - figures["refused"]


def test_drafts_are_accepted_at_the_given_rate() -> None:
    """Of k drafts, each verified one is accepted with the same probability."""
    engine = replace(EngineConfig(), speculation=Speculation(num_tokens=4))
    scenario = Scenario(requests=16, output="200", agreement=0.6, engine=engine)
    figures = summary(scenario.run())
    assert figures["drafted"] > 1000
    assert abs(figures["accepted"] / figures["drafted"] - 0.6) < 0.05
    assert figures["endings"] == {"length": 16}


def test_a_step_of_the_draft_model_takes_its_share() -> None:
    rows = (Row(0, 0, 0, 5, (1,), num_samples=1), Row(1, 0, 1, 5, (1,), num_samples=1))
    draft = StepPlan(0, rows[:1], 8, 4)
    plan = StepPlan(0, rows, 8, 4, drafts=(draft, draft))
    cost = DraftModelCost(AffineCost(1000, 10, 1), 100)
    assert cost.step_ns(plan) == 1022 + 2 * 1011 // 10
    assert cost.decode_ns(2, 10, 5) == 1022


# Labels of requests.


def test_labels_are_arrival_time_class_and_tenant() -> None:
    scenario = replace(FEW, requests=400, classes=3, tenants=3)
    plain, _ = replace(FEW, requests=400).create_workload()
    labelled, watchers = scenario.create_workload()
    assert watchers == ()
    arrivals = list(labelled.arrivals())
    assert [a.at_ns for a in arrivals] == [a.at_ns for a in plain.arrivals()]
    assert [a.request.prompt for a in arrivals] == [a.request.prompt for a in plain.arrivals()]
    assert all(a.request.arrival_s == a.at_ns / 1e9 for a in arrivals)
    assert {a.request.priority for a in arrivals} == {0, 1, 2}
    count = [a.request.cache_salt for a in arrivals].count
    assert 160 < count("tenant 0") < 240
    assert 60 < count("tenant 1") < 140
    assert count("tenant 0") + count("tenant 1") + count("tenant 2") == 400


def test_figures_of_classes_and_tenants_are_those_of_their_requests() -> None:
    """Counted again from the log, which has the class and tenant of each request."""
    scenario = replace(FEW, requests=80, rate=300.0, classes=3, tenants=3)
    world, text = run_and_log(scenario)
    arrived, ended = {}, {}
    for line in map(json.loads, text.splitlines()[1:-1]):
        if "arrive" in line:
            arrived[line["arrive"]] = line
        elif "end" in line:
            ended[line["end"]] = line["at"]
    assert len(arrived) == len(ended) == 80
    figures = summary(world)
    for name, key, unset in (("classes", "class", 0), ("tenants", "tenant", "")):
        latencies: dict[str, list[int]] = {}
        for request_id, line in arrived.items():
            latency_ns = ended[request_id] - line["at"]
            latencies.setdefault(str(line.get(key, unset)), []).append(latency_ns)
        groups = figures[name]
        assert list(groups) == sorted(latencies) and len(groups) == 3
        for label, waits in latencies.items():
            assert groups[label]["requests"] == len(waits)
            assert groups[label]["latency_ms"]["max"] == max(waits) / 1e6
            assert groups[label]["latency_ms"]["mean"] == sum(waits) / len(waits) / 1e6
        assert sum(group["good"] for group in groups.values()) == figures["good"]
        slowest = max(group["ttft_ms"]["max"] for group in groups.values())
        assert slowest == figures["ttft_ms"]["max"]
    assert summary(replace(FEW).run())["classes"] == {}


def test_prompts_that_share_a_beginning_share_it_on_the_hash_model() -> None:
    scenario = replace(FEW, workload="agent", model="hash", turns=2, system=40, clients=2)
    labelled, _ = scenario.create_workload()
    one, other = list(labelled.arrivals())
    assert one.request.prompt[:40] == other.request.prompt[:40]
    assert one.request.prompt[40:] != other.request.prompt[40:]
    assert max(one.request.prompt) < 256
    assert summary(scenario.run())["shared_tokens"] > 0


def test_an_agent_on_the_hash_model_repeats_the_answers_of_the_model() -> None:
    """Turn 1: 48 tokens and an answer of 16, the last of which is not computed: 15 blocks of 4."""
    scenario = replace(
        FEW, workload="agent", model="hash", clients=1, requests=2, turns=2, system=40,
        prompt="8", output="16",
    )  # fmt: skip
    figures = summary(scenario.run())
    assert (figures["prompt_tokens"], figures["shared_tokens"]) == (48 + 72, 60)


def test_the_rate_of_a_trace_is_its_own_unless_another_is_given(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{second:02},5,5" for second in range(10, 20, 2)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))

    def times(rate: float | None) -> list[int]:
        workload, _ = Scenario(workload=str(trace), rate=rate).create_workload()
        return [arrival.at_ns // 1_000_000 for arrival in workload.arrivals()]

    assert times(None) == [0, 2000, 4000, 6000, 8000]
    assert times(2.0) == [0, 500, 1000, 1500, 2000]


# Notation of options.


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("7", 7, 7, 7), ("3-5", 3, 5, 4), ("exp:50", 1, 600, 50), ("2,2,11-13", 2, 13, 16 / 3)],
)
def test_a_length_distribution_has_its_bounds_and_its_mean(
    text: str, low: int, high: int, mean: float
) -> None:
    spread = parse_lengths("prompt", text)
    drawn = [spread(1, request_id) for request_id in range(1000)]
    assert min(drawn) >= low and max(drawn) <= high
    assert abs(sum(drawn) / 1000 - mean) < 0.1 * mean
    other = parse_lengths("output", text)
    assert low == high or [other(1, i) for i in range(1000)] != drawn


def test_the_choice_of_a_component_is_independent_of_the_length() -> None:
    spread = parse_lengths("prompt", "1-4,11-14")
    drawn = Counter(spread(7, request_id) for request_id in range(800))
    assert sorted(drawn) == [1, 2, 3, 4, 11, 12, 13, 14]
    assert min(drawn.values()) > 60


@pytest.mark.parametrize("text", ["", "0", "5-3", "3-", "x", "exp:", "exp:0", "1,,2", "999999999"])
def test_an_invalid_length_distribution_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^output: .* is no length. Give 512, "):
        parse_lengths("output", text)


def test_a_cost_is_known_by_its_name() -> None:
    assert parse_cost("unit") == ConstantCost(1_000_000)
    assert parse_cost("affine:6000,20,2.5") == AffineCost(6_000_000, 20_000, 2_500)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"workload": "nonesuch"}, "workload: 'nonesuch' is no workload and no file. Use poisson"),
        ({"model": "gpt"}, "model: 'gpt' is not known. Use lengths, hash"),
        ({"cost": "free"}, "cost: 'free' is not known. Use one of: unit, affine"),
        ({"cost": "affine:0,1,1"}, "cost: 'affine:0,1,1' is not three numbers. Give affine:6000"),
        ({"cost": "affine:1,1"}, "cost: 'affine:1,1' is not three numbers"),
        ({"rate": 0.0}, "rate: '0.0' is not a number above 0"),
        ({"rate": float("nan")}, "rate: 'nan' is not a number above 0"),
        ({"requests": 0}, "requests: '0' is not from 1 to 1000000000"),
        ({"agreement": 1.5}, "agreement: '1.5' is not a probability. Give 0 to 1"),
        ({"pause": -1.0}, "pause: '-1.0' is not a time"),
        ({"seed": 2**63}, "seed: '9223372036854775808' is not of 64 bits"),
        ({"prompt": "many"}, "prompt: 'many' is no length"),
    ],
)
def test_an_invalid_field_is_refused_by_name(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        replace(FEW, **changes)
    assert str(refused.value).startswith(line)
