"""Replay: a recording is scheduled again, and the first line that differs is named."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from zlib import crc32

import pytest

from forge import LLM, __version__
from forge.config import (
    EngineConfig,
    HostTier,
    LoadCosts,
    MixedStepCosts,
    Speculation,
    StepCosts,
)
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.hash import HashModel
from forge.policy import POLICIES
from forge.recording import (
    Entry,
    RecordingWriter,
    build_header,
    encode_request,
    parse_config,
    parse_request,
)
from forge.request import Request, SamplingParams, Structure
from forge.sim.replay import ReplayResult, replay
from forge.sim.workloads.recordings import read_requests
from tests.core.host_worlds import draw_host_world
from tests.core.worlds import (
    Chances,
    RandomWorld,
    RecordingModel,
    build_engine,
    draw_world,
    run_world,
)


def record_world(world: RandomWorld) -> tuple[list[str], Counter[str]]:
    """Run the world with a recorder. Returns its lines, and the events that it reached."""
    lines: list[str] = []
    clock = count()

    def build_with_recorder(world: RandomWorld) -> tuple[HashModel, RecordingModel, Engine]:
        model, recorder, engine = build_engine(world)
        header = build_header(
            world.config, world.vocab_size, world.eos_token, world.policy, __version__
        )
        engine.recorder = RecordingWriter(lines.append, lambda: next(clock), header)
        return model, recorder, engine

    outcome = run_world(world, create=build_with_recorder)
    recording = outcome.engine.recorder
    assert isinstance(recording, RecordingWriter)
    recording.close()
    return lines, outcome.event_counts


def worlds(seeds: range) -> list[RandomWorld]:
    """Yield worlds with a named policy: a recording has no other."""
    return [world for world in map(draw_world, seeds) if world.policy in POLICIES]


def compare(seeds: range) -> Counter[str]:
    reached: Counter[str] = Counter()
    for world in worlds(seeds):
        lines, events = record_world(world)
        found = replay(lines)
        assert found.difference is None and found.is_complete, f"world {world.seed}: {found}"
        assert found.lines == len(lines)
        reached += events
        reached["structures"] += any(r.params.structure for r in world.requests)
        reached["stop strings"] += any(r.params.stop for r in world.requests)
    return reached


def test_a_recorded_world_replays_without_a_difference() -> None:
    reached = compare(range(100, 140))
    events = ("preemptions", "voids", "cache reset", "accepted drafts", "failed drafts", "resized")
    events += ("late masks", "plans of masks alone")
    assert not [name for name in (*events, "structures", "stop strings") if not reached[name]]


@pytest.mark.soak
def test_many_recorded_worlds_replay_without_a_difference() -> None:
    compare(range(20_000, 30_000))


def test_one_flipped_byte_is_found_in_its_line() -> None:
    lines, _ = record_world(worlds(range(1))[0])
    for at in (0, 1, len(lines) // 2, len(lines) - 1):
        for place in (0, 9, len(lines[at]) - 2):
            damaged = list(lines)
            flipped = chr(ord(lines[at][place]) ^ 1)
            damaged[at] = lines[at][:place] + flipped + lines[at][place + 1 :]
            with pytest.raises(InvalidConfig, match=f"line {at + 1} is not as it was written"):
                replay(damaged)


def test_a_recording_that_was_cut_says_so() -> None:
    lines, _ = record_world(worlds(range(1))[0])
    for rest in ([], [lines[-1][:12]], [lines[-1][:-1]]):
        found = replay([*lines[:-1], *rest])
        assert (found.is_complete, found.difference, found.lines) == (False, None, len(lines) - 1)
    with pytest.raises(InvalidConfig, match="line 1 is not as it was written"):
        replay([lines[0][:12]])
    with pytest.raises(InvalidConfig, match="it is empty"):
        replay([])


def test_what_follows_the_end_of_a_recording_is_refused() -> None:
    """Another recording, and a line whose checksum continues that of the end."""
    lines, _ = record_world(worlds(range(1))[0])
    with pytest.raises(InvalidConfig, match=f"line {len(lines) + 1} is not as it was written"):
        replay([*lines, *lines])
    crc = 0
    for line in lines:
        crc = crc32(line.rstrip("\n").partition(" ")[2].encode(), crc)
    more = '{"reset":1}'
    with pytest.raises(InvalidConfig, match=f"line {len(lines) + 1} comes after the end"):
        replay([*lines, f"{crc32(more.encode(), crc):08x} {more}\n"])


def test_the_first_decision_that_differs_is_named() -> None:
    """Another policy admits another request first."""
    world = draw_world(2)._replace(policy="fcfs")
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    requests = tuple(Request(i, (1,) * (9 - i), params) for i in range(4))
    config = world.config
    world = world._replace(requests=requests, chances=world.chances._replace(submit=1.0, abort=0.0))
    lines, _ = record_world(world)
    assert replay(lines).difference is None
    assert config == world.config
    other = replay(lines, "shortest-prompt")
    assert other.difference is not None and "another plan than the recorded step 0" in (
        other.difference
    )


# One decision or one token is changed.


def parse_entries(lines: list[str]) -> list[Entry]:
    """Return the entries of the lines."""
    return [json.loads(line.partition(" ")[2]) for line in lines]


def with_checksums(entries: list[Entry]) -> list[str]:
    """Return lines of these entries with correct checksums: only the content is changed."""
    lines, crc = [], 0
    for entry in entries:
        text = json.dumps(entry, separators=(",", ":"))
        crc = crc32(text.encode(), crc)
        lines.append(f"{crc:08x} {text}\n")
    return lines


def entry_indices(entries: list[Entry], name: str) -> list[int]:
    """Return the indices of the lines of planned steps, or of committed ones."""
    return [index for index, entry in enumerate(entries) if entry.get(name)]


def first_middle_last(found: list[int]) -> tuple[int, int, int]:
    return found[0], found[len(found) // 2], found[-1]


def test_the_first_plan_that_differs_is_named_wherever_it_is() -> None:
    """Only that one: plans before and after it are unchanged."""
    steps = set[int]()
    for world in worlds(range(40, 46)):
        lines, _ = record_world(world)
        assert with_checksums(parse_entries(lines)) == lines
        for at in first_middle_last(entry_indices(parse_entries(lines), "plan")):
            entries = parse_entries(lines)
            step = entries[at]["plan"][0]
            entries[at]["plan"][1] ^= 1
            found = replay(with_checksums(entries))
            assert (found.difference or "").startswith(
                f"line {at + 1}: another plan than the recorded step {step}: StepPlan("
            ), f"world {world.seed}, step {step}: {found}"
            assert (found.lines, found.is_complete) == (at + 1, False)
            steps.add(step)
    assert 0 in steps and len(steps) >= 8 and max(steps) > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_changed_token_is_found_at_the_first_plan_that_depends_on_it(
    depth: int,
) -> None:
    """It becomes the end of its sequence, which then has no further plan."""
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    config = EngineConfig(
        num_blocks=32, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, depth=depth
    )
    requests = tuple(Request(i, (1 + i,) * 9, sampling) for i in range(2))
    world = RandomWorld(
        5, config, requests, likely_tokens=tuple(range(1, 20)), chances=Chances(submit=1.0)
    )
    lines, _ = record_world(world)
    entries = parse_entries(lines)
    planned = entry_indices(entries, "plan")
    done = [at for at in entry_indices(entries, "done") if at < planned[-1]]
    assert replay(lines).difference is None
    assert len(done) >= 10 and not any(0 in entries[at]["out"] for at in done)
    for at in first_middle_last(done):
        changed = parse_entries(lines)
        changed[at]["out"][0] = 0
        after = next(each for each in planned if each > at)
        # With two steps in flight, the plan in between was made before the token was known.
        step = entries[after]["plan"][0]
        assert step == entries[at]["done"][0] + depth
        found = replay(with_checksums(changed))
        assert (found.difference or "").startswith(
            f"line {after + 1}: another plan than the recorded step {step}: StepPlan("
        ), f"{at}: {found}"


def test_a_recording_that_replays_differently_is_refused() -> None:
    lines, _ = record_world(worlds(range(1))[0])
    entries = parse_entries(lines)
    at = entry_indices(entries, "plan")[-1]
    entries[at]["plan"][1] ^= 1
    assert len(read_requests(lines)) == sum('{"submit"' in line for line in lines)
    with pytest.raises(InvalidConfig, match=f"decided otherwise at line {at + 1}: another plan"):
        read_requests(with_checksums(entries))


def test_a_file_that_is_no_recording_is_refused() -> None:
    lines: list[str] = []
    RecordingWriter(lines.append, lambda: 0, {"other": 1})
    with pytest.raises(InvalidConfig, match="no header"):
        replay(lines)


def test_a_replay_counts_steps_requests_and_tokens() -> None:
    lines, _ = record_world(worlds(range(1))[0])
    found = replay(lines)
    submitted = sum('{"submit"' in line for line in lines)
    assert isinstance(found, ReplayResult)
    assert (found.version, found.requests) == (__version__, submitted)
    assert found.steps == sum('{"plan":[' in line for line in lines)


def test_a_recording_of_an_llm_replays_without_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=1, stop=("e",), n=2),
        SamplingParams(max_tokens=30, structure=Structure.regex("(ab|ba)+")),
        SamplingParams(max_tokens=30, logprobs=1),
    ]
    with LLM("hash", draft_model="hash:agreement=0.7", depth=2, record=str(path)) as llm:
        outputs = llm.generate(["one", "two", "three"], params)
    found = replay(path.read_text().splitlines(keepends=True))
    assert (found.difference, found.is_complete, found.requests) == (None, True, 3)
    choices = [choice for output in outputs for choice in output.choices]
    assert found.tokens == sum(len(choice.token_ids) for choice in choices)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be written: Is a directory"):
        LLM("hash", record=str(tmp_path))


def test_costs_of_another_version_are_refused_with_the_remedy() -> None:
    costs = StepCosts(((1, 1.0),), ((1, 0.1),), ((2, 1.1),), ((1, 0.2),))
    config = EngineConfig(speculation=Speculation(num_tokens=2, costs=costs))
    header = json.loads(json.dumps(build_header(config, 256, 0, "fcfs", "0")))
    assert parse_config(header) == config
    written = header["config"]["speculation"]["costs"]
    for costs in ([written[0], 0.5, *written[2:]], written[:-1], [*written, []]):
        header["config"]["speculation"]["costs"] = costs
        with pytest.raises(InvalidConfig, match="costs are written as another version"):
            parse_config(header)


MIXED_COSTS = MixedStepCosts(((1, 1000), (2, 1500), (4, 3000)), position_ns=20, pair_ps=5000)


def replace_config(lines: list[str], **changes: object) -> list[str]:
    """Return the recording with other values in its header, and with the checksums of these."""
    texts = [line.partition(" ")[2].rstrip("\n") for line in lines]
    header = json.loads(texts[0])
    header["config"] |= changes
    crc, written = 0, []
    for text in (json.dumps(header), *texts[1:]):
        crc = crc32(text.encode(), crc)
        written.append(f"{crc:08x} {text}\n")
    return written


@pytest.mark.long
def test_a_recording_has_the_table_by_which_its_steps_were_bounded() -> None:
    """The table decides plans: a replay without it differs."""
    num_bounded = 0
    for world in worlds(range(24)):
        config = replace(world.config, max_step_ms=2.5, mixed_costs=MIXED_COSTS)
        lines, _ = record_world(world._replace(config=config))
        assert parse_config(json.loads(lines[0].partition(" ")[2])) == config
        assert replay(lines).difference is None, f"seed {world.seed}"
        num_bounded += replay(replace_config(lines, mixed_costs=None)).difference is not None
    assert num_bounded >= 6


@pytest.mark.parametrize("costs", [7, [], [[[1, 2]], 3], [[1, 2], 3, 4]])
def test_a_table_of_another_version_is_refused_with_the_remedy(costs: object) -> None:
    header = json.loads(json.dumps(build_header(EngineConfig(), 256, 0, "fcfs", "0")))
    header["config"]["mixed_costs"] = costs
    with pytest.raises(InvalidConfig, match="costs are written as another version"):
        parse_config(header)


@pytest.mark.long
def test_a_recording_has_the_costs_by_which_blocks_were_loaded_or_computed() -> None:
    """The costs decide plans: a replay without them, or without one of them, differs."""
    num_decided: Counter[str] = Counter()
    for seed in range(40):
        world = draw_host_world(seed)
        tier = world.config.host_tier
        assert tier is not None
        tier = replace(tier, costs=LoadCosts(20, 1, 1, 300), min_loaded_blocks=1)
        config = replace(world.config, host_tier=tier)
        lines, _ = record_world(world._replace(config=config))
        assert parse_config(json.loads(lines[0].partition(" ")[2])) == config
        assert replay(lines).difference is None, f"seed {seed}"
        for name, costs in (("none", None), ("no pairs", [20, 1, 1]), ("no load", [0, 1, 1, 300])):
            changed = {**asdict(tier), "costs": costs}
            result = replay(replace_config(lines, host_tier=changed))
            num_decided[name] += result.difference is not None
    assert min(num_decided.values()) >= 3 and len(num_decided) == 3


@pytest.mark.parametrize("costs", [[], [1, 2], [1, 2, 3, 4, 5], 7])
def test_load_costs_of_another_version_are_refused_with_the_remedy(costs: object) -> None:
    config = EngineConfig(host_tier=HostTier(num_blocks=1))
    header = json.loads(json.dumps(build_header(config, 256, 0, "fcfs", "0")))
    header["config"]["host_tier"]["costs"] = costs
    with pytest.raises(InvalidConfig, match="costs are written as another version"):
        parse_config(header)


def test_a_recording_from_before_steps_were_bounded_has_no_bound() -> None:
    header = json.loads(json.dumps(build_header(EngineConfig(), 256, 0, "fcfs", "0.1.0")))
    del header["config"]["max_step_ms"], header["config"]["mixed_costs"]
    assert parse_config(header) == EngineConfig()


def test_a_prompt_that_is_a_range_is_recorded_as_its_tokens() -> None:
    written = json.loads(json.dumps(encode_request(Request(0, range(3, 6)))))
    assert parse_request(written) == Request(0, (3, 4, 5))


@pytest.mark.parametrize("pause_s", [None, 0.0, 2.5])
def test_the_session_of_a_request_is_recorded(pause_s: float | None) -> None:
    turn = Request(1, (3,), tenant="t", session_id="s", session_end=True, expected_pause_s=pause_s)
    assert parse_request(json.loads(json.dumps(encode_request(turn)))) == turn


def test_a_recording_from_before_there_were_sessions_has_none() -> None:
    """Recognised sessions would protect blocks that the recorded run evicted."""
    header = build_header(EngineConfig(), 256, 0, "fcfs", "0.1.0")
    assert parse_config(header).max_sessions == 1024
    del header["config"]["max_sessions"], header["config"]["session_ttl_s"]
    assert parse_config(header).max_sessions == 0
