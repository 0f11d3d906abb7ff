"""Agents: what their turns carry, sub-agents, compaction, pauses, and the measures of sessions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from forge.cli.main import main
from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.request import Delta, Request
from forge.sim.baselines import baselines, infinite_cache
from forge.sim.clock import VirtualClockStep
from forge.sim.scenario import Scenario, summary
from forge.sim.session_metrics import SessionMetrics, jain_index
from forge.sim.sweep import interval_95
from forge.sim.units import NS_PER_S
from forge.sim.workloads.session_shape import (
    PROFILES,
    Pause,
    SessionShape,
    parse_hints,
    parse_pauses,
)
from forge.sim.workloads.workload import RequestArrival
from forge.sim.world import World

SMALL = Scenario(
    workload="agent", clients=4, sessions=12, turns=6, system=40, prompt="5-30", output="2-20",
    pause=0.02, cost="unit", engine=EngineConfig(num_blocks=400, block_size=4, max_num_seqs=8),
)  # fmt: skip
FULL = replace(
    SMALL, min_turns=2, subagents=0.25, compact_at=150, summary_tokens=20, abandon=0.05,
    pause_mix="0.8:0.01,0.2:0.2", hints="id,end,pause",
)  # fmt: skip


class TurnLog:
    """Requests by session id, with the times of their arrival and end."""

    def __init__(self) -> None:
        self.turns: dict[str, list[Request]] = {}
        self.at_ns: dict[int, int] = {}
        self.ended_ns: dict[int, int] = {}
        self.session_of: dict[int, int | None] = {}

    def on_arrival(self, arrival: RequestArrival, now_ns: int, refusal: str | None) -> None:
        assert refusal is None, refusal
        request = arrival.request
        self.turns.setdefault(request.session_id, []).append(request)
        self.at_ns[request.id] = arrival.at_ns
        self.session_of[request.id] = arrival.session

    def on_disconnect(self, request_id: int, now_ns: int) -> None:
        raise AssertionError("no client disconnects")

    def on_step(self, step: VirtualClockStep | None, deltas: list[Delta], now_ns: int) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self.ended_ns[delta.request_id] = now_ns

    @property
    def requests(self) -> list[Request]:
        """All requests by id, without the times that the workload labels them with."""
        found = (replace(r, arrival_s=0.0) for turns in self.turns.values() for r in turns)
        return sorted(found, key=lambda r: r.id)


def run_logged(scenario: Scenario) -> tuple[World, TurnLog]:
    log = TurnLog()
    return scenario.run(create_observers=lambda engine: [log]), log


def create_shape(**options: Any) -> SessionShape:
    """Return the shape of sessions of five tokens a turn, with these options."""
    values = {"max_turns": 4, "num_system_tokens": 10, "lengths": lambda s, t: (3, 2), **options}
    return SessionShape(**values)


# What turns carry.


def test_turns_carry_their_session_and_the_last_one_its_end() -> None:
    _, log = run_logged(SMALL)
    assert sorted(map(int, log.turns)) == list(range(12))
    for session, turns in log.turns.items():
        assert [r.id for r in turns] == [int(session) * 6 + i for i in range(6)]
        assert [r.session_end for r in turns] == [False] * 5 + [True]
        assert {r.expected_pause_s for r in turns} == {None}


@pytest.mark.parametrize(
    ("hints", "has_id", "num_ends", "num_pauses"),
    [
        ("none", False, 0, 0),
        ("id", True, 0, 0),
        ("id,end,pause", True, 12, 60),
        ("pause", False, 0, 60),
    ],
)
def test_requests_carry_only_the_named_hints(
    hints: str, has_id: bool, num_ends: int, num_pauses: int
) -> None:
    """The last of six turns expects no pause."""
    _, log = run_logged(replace(SMALL, hints=hints))
    assert len(log.requests) == 72
    assert all(bool(r.session_id) == has_id for r in log.requests)
    assert sum(r.session_end for r in log.requests) == num_ends
    assert [r.expected_pause_s for r in log.requests].count(0.02) == num_pauses


def test_turns_of_a_session_have_one_tenant_and_one_class() -> None:
    _, log = run_logged(replace(FULL, sessions=30, tenants=3, classes=2))
    labels: dict[int | None, set[tuple[str, str, int]]] = {}
    for request in log.requests:
        label = request.tenant, request.cache_salt, request.priority
        labels.setdefault(log.session_of[request.id], set()).add(label)
    assert all(len(found) == 1 for found in labels.values())
    found = {label for each in labels.values() for label in each}
    assert {tenant for tenant, _, _ in found} == {"tenant 0", "tenant 1", "tenant 2"}
    assert all(tenant == salt for tenant, salt, _ in found)
    assert {priority for _, _, priority in found} == {0, 1}


def test_a_log_has_the_session_of_each_turn(tmp_path: Path) -> None:
    file = tmp_path / "log"
    words = (
        "--workload agent --sessions 2 --turns 2 --clients 2 --no-baselines --prompt 8 --output 3"
    )
    assert main(["sim", *words.split(), "--log", str(file)]) == 0
    lines = map(json.loads, file.read_text().splitlines())
    arrived = {line["arrive"]: line["session"] for line in lines if "arrive" in line}
    assert arrived == {0: "0", 1: "0", 2: "1", 3: "1"}


# Sub-agents, compaction, abandonment, pauses.


def test_subagents_share_the_context_and_the_parent_waits_for_all_of_them() -> None:
    _, log = run_logged(replace(SMALL, subagents=0.5))
    num_groups, group_sizes = 0, set()
    for session in range(12):
        turns = log.turns[str(session)]
        for index, (before, after) in enumerate(pairwise(turns)):
            agents = [log.turns.get(f"{session}.{index}.{k}") for k in range(3)]
            open_agents = [agent for agent in agents if agent is not None]
            if not open_agents:
                continue
            num_groups += 1
            group_sizes.add(len(open_agents))
            answered = len(before.prompt) + (before.params.max_tokens or 0)
            for agent in open_agents:
                assert agent[0].prompt[:answered] == after.prompt[:answered]
                assert agent[0].prompt[answered] != after.prompt[answered]
                assert log.at_ns[agent[0].id] == log.ended_ns[before.id]
                assert [r.session_end for r in agent] == [False] * (len(agent) - 1) + [True]
                assert 2 <= len(agent) <= 5
            assert log.at_ns[after.id] == max(log.ended_ns[a[-1].id] for a in open_agents)
            results = sum(a[-1].params.max_tokens or 0 for a in open_agents)
            assert len(after.prompt) - answered - results in range(5, 31)
    assert num_groups > 15 and group_sizes == {1, 2, 3}
    assert len({r.id for r in log.requests}) == len(log.requests)


def test_the_last_turn_starts_no_subagents() -> None:
    turns = create_shape(subagent_share=1.0).plan_session(0, 10)
    assert [bool(turn.subagents) for turn in turns] == [True, True, True, False]


def test_a_subagent_that_would_be_too_long_does_not_start() -> None:
    """12 tokens of the parent fit, 3 + 2 more of a sub-agent do not."""
    shape = create_shape(subagent_share=1.0, max_len=16, num_system_tokens=7)
    (only,) = shape.plan_session(0, 7)
    assert only.subagents == ()
    assert create_shape(subagent_share=1.0, max_len=18).plan_session(1, 13)[0].subagents == ()
    assert create_shape(subagent_share=1.0, max_len=18).plan_session(1, 14) == ()


def test_compaction_keeps_the_system_prompt_and_a_summary() -> None:
    """A prompt of 10 + 5 + 3 tokens is compacted to 10 + 6 + 3, and once more two turns later."""
    shape = create_shape(max_turns=5, compact_at=22, num_summary_tokens=6)
    turns = shape.plan_session(0, 10)
    assert [turn.is_compacted for turn in turns] == [False, False, True, True, True]
    assert [turn.num_new_tokens for turn in turns] == [3, 3, 9, 9, 9]
    assert shape.longest_context(0) == 21


def test_the_old_branch_diverges_after_the_system_prompt() -> None:
    world, log = run_logged(replace(SMALL, compact_at=120, summary_tokens=25))
    num_compacted = 0
    for turns in log.turns.values():
        for before, after in pairwise(turns):
            assert len(after.prompt) <= 120 or len(after.prompt) <= 40 + 25 + 30
            if len(after.prompt) < len(before.prompt) + (before.params.max_tokens or 0):
                num_compacted += 1
                assert after.prompt[:40] == before.prompt[:40]
                assert after.prompt[40] != before.prompt[40]
    assert num_compacted >= 12
    assert world.metrics.num_refused == 0


def test_an_abandoned_session_does_not_say_so_and_another_one_starts() -> None:
    """A share of 0.2 after each of the first five turns leaves 0.8 ** 5 of the sessions whole."""
    _, log = run_logged(replace(SMALL, sessions=60, abandon=0.2, hints="id,end,pause"))
    assert len(log.turns) == 60
    ended = [turns for turns in log.turns.values() if turns[-1].session_end]
    assert len(ended) == pytest.approx(60 * 0.8**6, abs=12)
    for turns in log.turns.values():
        assert (turns[-1].expected_pause_s is None) == turns[-1].session_end
    assert all(len(turns) == 6 for turns in ended)


def test_pauses_are_of_the_kinds_of_the_mix_and_hints_name_the_kind() -> None:
    shape = create_shape(
        max_turns=50, pauses=parse_pauses("0.7:0.5,0.25:5,0.05:60"), num_sessions=100
    )
    pauses: dict[float | None, list[float]] = {}
    for session in range(100):
        for before, after in pairwise(shape.plan_session(session, 10)):
            pauses.setdefault(before.next_pause_s, []).append(after.pause_ns / NS_PER_S)
    for share, mean_s in shape.pauses:
        found = pauses[mean_s]
        assert len(found) / 4900 == pytest.approx(share, rel=0.15)
        assert sum(found) / len(found) == pytest.approx(mean_s, rel=0.25)
    assert len(pauses) == 3


def test_turns_do_not_depend_on_the_order_of_events() -> None:
    """Another cost and another policy: the same requests, although they end in another order."""
    _, first = run_logged(FULL)
    _, other = run_logged(replace(FULL, cost="affine:100,900,50", policy="newest"))
    assert first.requests == other.requests
    assert len(first.requests) > 60
    assert sorted(first.ended_ns, key=first.ended_ns.__getitem__) != sorted(
        other.ended_ns, key=other.ended_ns.__getitem__
    )


def test_answers_of_the_hash_model_are_in_the_contexts() -> None:
    world, log = run_logged(replace(FULL, model="hash", sessions=4))
    assert any("." in session for session in log.turns)
    assert world.sessions.summary(0, 4)["turns"] == len(log.requests)


# Profiles and options.


def profile_shape(name: str) -> Scenario:
    values = dict(PROFILES[name])
    engine = {key: values.pop(key) for key in ("block_size", "max_model_len")}
    return Scenario(
        workload="agent", sessions=400, **values, engine=EngineConfig(**engine)  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.long
def test_the_coding_profile_has_the_figures_of_the_public_trace() -> None:
    scenario = profile_shape("coding")
    shape = scenario.create_session_shape()
    sessions = [shape.plan_session(s, scenario.system) for s in range(400)]
    assert median(map(len, sessions)) == pytest.approx(43, abs=2)
    last_prompts = [
        scenario.system
        + sum(turn.num_new_tokens + turn.num_output_tokens for turn in turns[:-1])
        + turns[-1].num_new_tokens
        for turns in sessions
    ]
    assert median(last_prompts) == pytest.approx(142_000, rel=0.05)
    outputs = [turn.num_output_tokens for turns in sessions for turn in turns]
    assert sum(outputs) / len(outputs) == pytest.approx(444, rel=0.03)
    with_subagents = sum(any(turn.subagents for turn in turns) for turns in sessions)
    assert with_subagents / 400 == pytest.approx(0.44, abs=0.05)


@pytest.mark.parametrize("times", [1.0, 2.0, 4.0])
def test_oversubscription_is_the_working_set_over_the_cache(times: float) -> None:
    """Twelve sessions of 6 turns of 5 tokens need 30 each; four of them and the system prompt."""
    scenario = replace(SMALL, prompt="3", output="2", oversubscription=times)
    assert scenario.engine.num_blocks == round((40 + 4 * 30) / times / 4)


def test_a_session_at_oversubscription_one_recomputes_nothing() -> None:
    equal = replace(SMALL, prompt="12", output="8", pause=0.0, oversubscription=1.0)
    figures = summary(equal.run())["sessions"]
    assert figures["resumed_tokens"]["recomputed"] == 0
    half = summary(replace(equal, oversubscription=4.0).run())["sessions"]
    assert half["resumed_tokens"]["recomputed"] > 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_turns": 7}, "min_turns"),
        ({"compact_at": 60, "summary_tokens": 20}, "compact_at"),
        ({"pause_mix": "0.5:1"}, "pause_mix"),
        ({"pause_mix": "1:x"}, "pause_mix"),
        ({"hints": "end"}, "hints"),
        ({"hints": "id,size"}, "hints"),
        ({"subagents": 1.5}, "subagents"),
        ({"oversubscription": 0.0}, "oversubscription"),
    ],
)
def test_an_invalid_option_of_sessions_is_refused_by_name(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidConfig, match=rf"^{field}: "):
        replace(SMALL, **options)


def test_hints_and_pauses_are_parsed() -> None:
    assert parse_hints("id,pause") == {"id", "pause"}
    assert parse_hints("none") == set()
    assert parse_pauses("0.25:2,.75:0") == (Pause(0.25, 2.0), Pause(0.75, 0.0))


# Measures.


def test_measures_of_two_sessions_by_hand() -> None:
    """Session 0: turns [0, 10] and [30, 40]; session 1, of another tenant: [5, 35]."""
    metrics = SessionMetrics()
    root = b"root"
    metrics.record_arrival(0, "a", 0, 0, chain_0 := [root, b"s", b"x"])
    metrics.record_admissions([0])
    metrics.record_arrival(1, "b", 9, 5_000_000, chain_9 := [root, b"s", b"y"])
    metrics.record_admissions([9])
    chain_0.append(b"answer")
    metrics.record_finish(0, 10_000_000)
    metrics.record_arrival(0, "a", 1, 30_000_000, [root, b"s", b"x", b"answer", b"z"])
    metrics.record_admissions([0, 1])  # the first one is known to be admitted already
    metrics.record_finish(9, 35_000_000)
    metrics.record_finish(1, 40_000_000)
    assert metrics.accesses.chains == [[0, 1, 3], [0, 2], [0, 1, 3, 4]]
    figures = metrics.summary(num_cached_tokens=16, block_size=8)
    assert figures["sessions"] == 2 and figures["turns"] == 3
    assert figures["turns_per_s"] == 75.0 and figures["makespan_ms"] == 40.0
    assert figures["completion_ms"]["mean"] == 35.0 and figures["completion_ms"]["max"] == 40.0
    assert figures["resumed_tokens"] == {"prefix_cache": 16, "recomputed": 16}
    assert figures["fairness"] == {"sessions": 0.8, "tenants": 0.8}
    assert chain_9 == [root, b"s", b"y"]


def test_jains_index_is_one_for_equal_shares_and_one_nth_for_one_of_n() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == 1.0
    assert jain_index([0.0, 5.0, 0.0, 0.0]) == 0.25
    assert jain_index([]) == jain_index([0.0]) == 1.0


def test_times_of_sessions_contain_their_subagents() -> None:
    world, log = run_logged(FULL)
    figures = summary(world)["sessions"]
    begin: dict[int | None, int] = {}
    end: dict[int | None, int] = {}
    for request in log.requests:
        session = log.session_of[request.id]
        begin[session] = min(begin.get(session, 1 << 60), log.at_ns[request.id])
        end[session] = max(end.get(session, 0), log.ended_ns[request.id])
    times = [end[session] - begin[session] for session in begin]
    assert figures["sessions"] == len(times) == 12
    assert figures["turns"] == len(log.requests) > 72
    assert figures["completion_ms"]["mean"] == pytest.approx(sum(times) / 12 / 1e6)
    assert figures["makespan_ms"] == (max(end.values()) - min(begin.values())) / 1e6


def test_a_run_that_is_fast_forwarded_has_the_same_figures_and_accesses() -> None:
    fast = replace(FULL, output="60-90").run()
    stepwise, _ = run_logged(replace(FULL, output="60-90"))
    assert summary(fast) == summary(stepwise)
    assert fast.sessions.accesses.chains == stepwise.sessions.accesses.chains


def test_a_workload_without_sessions_has_no_figures_of_sessions() -> None:
    figures = summary(Scenario(requests=3, cost="unit").run())
    assert figures["sessions"] == {}


# Baselines.


def test_resumed_tokens_are_what_an_infinite_cache_finds() -> None:
    """FULL has sub-agents and compaction, so contexts share and diverge in all ways."""
    tight = replace(FULL, engine=replace(FULL.engine, num_blocks=100), clients=8)
    world = tight.run()
    resumed = summary(world)["sessions"]["resumed_tokens"]
    infinite = summary(infinite_cache(tight, world).run())
    assert resumed["recomputed"] > 200
    assert sum(resumed.values()) == pytest.approx(infinite["shared_tokens"], rel=0.01)
    assert infinite["sessions"]["resumed_tokens"]["recomputed"] == 0


def test_no_policy_finds_more_than_belady_in_its_order() -> None:
    for policy in ("fcfs", "newest", "shortest-job"):
        tight = replace(FULL, policy=policy, clients=8, engine=replace(FULL.engine, num_blocks=100))
        world = tight.run()
        found = baselines(tight, world)
        figures = summary(world)
        assert figures["shared_tokens"] <= found["belady_shared_tokens"]
        assert found["belady_shared_tokens"] < found["infinite"]["shared_tokens"]


# The command line.


def run_sim(*words: str) -> None:
    assert main(["sim", *words]) == 0


TIGHT_WORDS = (
    "--workload agent --clients 4 --sessions 8 --turns 4 --system 40 --prompt 5-30 --output 2-20 "
    "--num-blocks 100 --block-size 4 --cost unit"
).split()


def test_a_run_prints_sessions_and_baselines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    run_sim(*TIGHT_WORDS, "--json", str(file))
    printed = capsys.readouterr().out
    record = json.loads(file.read_text())
    sessions, best = record["figures"]["sessions"], record["baselines"]
    assert sessions["sessions"] == 8 and sessions["turns"] == 32
    assert f"sessions    8: mean {sessions['completion_ms']['mean'] / 1e3:.1f} s, p99 " in printed
    resumed = sessions["resumed_tokens"]
    line = f"{resumed['prefix_cache']} prefix cache, {resumed['recomputed']} recomputed"
    assert f"resumed     tokens by source: {line}\n" in printed
    total = record["figures"]["prompt_tokens"]
    for name, tokens in (
        ("infinite", best["infinite"]["shared_tokens"]),
        ("belady", best["belady_shared_tokens"]),
    ):
        assert f"{name:<12}{100 * tokens / total:.1f} % shared" in printed
    run_sim(*TIGHT_WORDS, "--no-baselines", "--json", str(file))
    assert "infinite" not in capsys.readouterr().out
    assert "baselines" not in json.loads(file.read_text())


def test_a_profile_gives_options_that_are_not_given(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = "--workload agent --profile chat --sessions 2 --clients 2 --output 5 --pause 1"
    run_sim(*words.split(), "--no-baselines", "--json", str(file))
    options = json.loads(file.read_text())["header"]["options"]
    expected = {"turns": 8, "prompt": "exp:200", "output": "5", "pause": 1.0, "system": 512}
    assert {name: options[name] for name in expected} == expected
    assert options["oversubscription"] == 2.0


def test_blocks_that_are_given_replace_the_oversubscription_of_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = "--workload agent --profile chat --sessions 1 --turns 2 --num-blocks 900 --no-baselines"
    run_sim(*words.split(), "--json", str(file))
    header = json.loads(file.read_text())["header"]
    assert header["engine"]["num_blocks"] == 900
    assert header["options"]["oversubscription"] is None


def test_a_sweep_over_seeds_prints_means_and_intervals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sweep.json"
    words = "--policies fcfs,newest --seed 3 --seeds 3".split()
    run_sim("sweep", *TIGHT_WORDS, *words, "--json", str(file))
    heading, *rows = capsys.readouterr().out.splitlines()[1:]
    outcomes = json.loads(file.read_text())["outcomes"]
    assert [(o["case"]["policy"], o["seed"]) for o in outcomes] == [
        (policy, seed) for policy in ("fcfs", "newest") for seed in (3, 4, 5)
    ]
    assert heading.split()[-8:] == "session s p99 s makespan s turns/s fair".split()
    for policy, row in zip(("fcfs", "newest"), rows, strict=True):
        found = [
            o["figures"]["sessions"]["makespan_ms"] / 1e3
            for o in outcomes
            if o["case"]["policy"] == policy
        ]
        assert f"{sum(found) / 3:.1f} ±{interval_95(found):.1f}" in row


def test_an_interval_is_that_of_students_distribution() -> None:
    """Mean 2, deviation 1, three values: 4.303 / sqrt(3)."""
    assert interval_95([1.0, 2.0, 3.0]) == pytest.approx(2.4843, abs=1e-3)
    assert interval_95([5.0, 5.0]) == 0.0


def test_an_axis_sets_the_oversubscription(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    words = [*TIGHT_WORDS[:-6], "--block-size", "4", "--cost", "unit"]
    run_sim("sweep", *words, "--oversubscriptions", "1,2.5", "--json", str(file))
    outcomes = json.loads(file.read_text())["outcomes"]
    assert [o["case"] for o in outcomes] == [{"oversubscription": 1.0}, {"oversubscription": 2.5}]
    most = [o["figures"]["most_blocks"] for o in outcomes]
    assert most[1] < most[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--profile swe", "--profile: the workload poisson does not accept it"),
        ("--workload agent --profile x", "--profile: 'x' is not known. Use coding, swe, chat"),
        ("--workload agent --oversubscription 2 --num-blocks 9", "--oversubscription: it sets"),
        ("--no-baselines", "--baselines: the workload poisson has no sessions"),
        ("--workload closed --subagents 0.1", "--subagents: the workload closed does not accept"),
    ],
)
def test_an_option_without_its_workload_is_refused(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse: Callable[[], object] = lambda: main(["sim", *words.split()])  # noqa: E731
    assert refuse() == 2
    assert capsys.readouterr().err.startswith(f"forge sim: {line}")
