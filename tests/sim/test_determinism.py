"""Equal scenarios write equal logs: in any process, on any machine, at any speed.

this process ──► log of each of WORLDS ──┬── == the log of another process, byte for byte
                                         └── == the log of a world with sleeps in it
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.model_wrapper import ModelWrapper
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from forge.sim.clock import Clock, VirtualClockModel
from forge.sim.cost.model import CostModel
from forge.sim.cost.simple import AffineCost
from forge.sim.decision_log import DecisionLog
from forge.sim.fast_forward import run_fast_forward
from forge.sim.length_model import LengthModel
from forge.sim.scenario import Scenario, create_speculation, summary
from forge.sim.workloads.workload import PoissonWorkload
from forge.sim.world import World

ROOT = Path(__file__).resolve().parents[2]
TIGHT = EngineConfig(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
DRAFTING = replace(TIGHT, num_blocks=64, speculation=create_speculation(3))
FEW = Scenario(requests=10, rate=200.0, prompt="1-40", output="1-20", engine=TIGHT)
AGENT = replace(FEW, workload="agent", clients=3, turns=3, system=8, tenants=3, model="hash")
WORLDS = {
    "poisson": FEW,
    "bursts": replace(FEW, workload="bursty", requests=40, seed=1),
    "closed loop": replace(FEW, workload="closed", clients=6, pause=0.01, model="hash"),
    "agent": replace(AGENT, policy="fair-share"),
    "drafts": replace(FEW, requests=30, engine=DRAFTING),
    "drafts of a model": replace(FEW, engine=DRAFTING, model="hash", seed=3),
}
"""Scenarios by their subject."""

OTHER_MINORS = [minor for minor in range(11, 20) if minor != sys.version_info.minor]
TIMEOUT_S = 60.0

LOG_PROGRAM = """\
import pickle, sys
from forge.sim.decision_log import DecisionLog

with open(sys.argv[1], "rb") as file:
    scenarios = pickle.load(file)
for scenario in scenarios:
    log = DecisionLog(sys.stdout.write, scenario.header())
    scenario.run(log)
    log.close()
"""
"""A program that writes the logs of the scenarios in a file, one after the other."""

LOG_PROGRAM_WITHOUT_GC = f"import gc\n\ngc.disable()\n{LOG_PROGRAM}"
"""The same program with garbage collection disabled."""


def run_log(scenario: Scenario) -> str:
    """Return the log of a run in this process."""
    lines: list[str] = []
    log = DecisionLog(lines.append, scenario.header())
    scenario.run(log)
    log.close()
    return "".join(lines)


@pytest.fixture(scope="module")
def logs_by_world() -> dict[str, str]:
    """Return the log of each world, from a run in this process."""
    return {name: run_log(scenario) for name, scenario in WORLDS.items()}


@pytest.fixture
def worlds_file(tmp_path: Path) -> Path:
    """Write a file with the worlds."""
    file = tmp_path / "worlds"
    file.write_bytes(pickle.dumps(tuple(WORLDS.values())))
    return file


def start_process(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, stdout: int
) -> subprocess.Popen[bytes]:
    """Start a process that imports the sources of this one, in another environment."""
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"} | environ,
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


def read_output(process: subprocess.Popen[bytes]) -> bytes:
    """Return the output of a process. It must succeed."""
    with process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err.decode()
    return out or b""


def check_logs(found: bytes, logs_by_world: Mapping[str, str]) -> None:
    """Compare the logs byte for byte. The first world that differs is named."""
    text = found.decode()
    for name, log in logs_by_world.items():
        assert text.startswith(log), f"{name}: another log"
        text = text[len(log) :]
    assert not text


def test_the_worlds_depend_on_the_order_of_events(logs_by_world: Mapping[str, str]) -> None:
    """Sequences are preempted, prefixes are shared, drafts are verified."""
    figures = {name: summary(scenario.run()) for name, scenario in WORLDS.items()}
    for name in ("poisson", "bursts", "closed loop"):
        assert figures[name]["preemptions"], name
    assert figures["agent"]["shared_tokens"]
    for name in ("drafts", "drafts of a model"):
        assert 0 < figures[name]["accepted"] < figures[name]["drafted"], name
    assert len(set(logs_by_world.values())) == len(WORLDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "program", "environ"),
    [
        pytest.param(
            (), LOG_PROGRAM_WITHOUT_GC, {"PYTHONHASHSEED": "0"}, id="no garbage is collected"
        ),
        pytest.param(("-O",), LOG_PROGRAM, {"PYTHONHASHSEED": "1", "LC_ALL": "C"}, id="no asserts"),
    ],
)
def test_a_log_has_the_same_bytes_in_every_process(
    flags: Sequence[str],
    program: str,
    environ: Mapping[str, str],
    logs_by_world: Mapping[str, str],
    worlds_file: Path,
    tmp_path: Path,
) -> None:
    """In another folder."""
    command = [sys.executable, *flags, "-c", program, str(worlds_file)]
    check_logs(
        read_output(start_process(command, environ, tmp_path, subprocess.PIPE)), logs_by_world
    )


@pytest.mark.long
def test_a_log_has_the_same_bytes_in_two_processes_at_once(
    logs_by_world: Mapping[str, str], worlds_file: Path, tmp_path: Path
) -> None:
    """One writes into a pipe, one into a file."""
    command = [sys.executable, "-c", LOG_PROGRAM, str(worlds_file)]
    file = tmp_path / "logs"
    with file.open("wb") as out:
        piped = start_process(command, {"OMP_NUM_THREADS": "7"}, tmp_path, subprocess.PIPE)
        filed = start_process(command, {"TZ": "Asia/Tokyo"}, tmp_path, out.fileno())
        check_logs(read_output(piped), logs_by_world)
        read_output(filed)
    check_logs(file.read_bytes(), logs_by_world)


def test_a_log_has_the_same_bytes_on_every_python(
    logs_by_world: Mapping[str, str], worlds_file: Path, tmp_path: Path
) -> None:
    """On each Python of the path that can run forge."""
    ran, why = [], []
    for minor in OTHER_MINORS:
        python = shutil.which(f"python3.{minor}")
        if python is None:
            continue
        tried = subprocess.run(
            [python, "-c", "import forge.sim.scenario"],
            cwd=ROOT,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        if tried.returncode:
            why.append(f"python3.{minor}: {tried.stderr.decode().strip().splitlines()[:1]}")
            continue
        command = [python, "-c", LOG_PROGRAM, str(worlds_file)]
        check_logs(
            read_output(start_process(command, {}, tmp_path, subprocess.PIPE)), logs_by_world
        )
        ran.append(minor)
    if not ran:
        pytest.skip(f"no other Python runs forge here: {', '.join(why) or 'none is on the path'}")


def test_the_command_writes_into_a_file_what_a_run_writes(tmp_path: Path) -> None:
    words = "--requests 12 --workload agent --turns 3 --tenants 3 --policy fair-share"
    command = [sys.executable, "-m", "forge", "sim", *words.split(), "--log", "log.jsonl"]
    read_output(start_process(command, {}, tmp_path, subprocess.DEVNULL))
    scenario = Scenario(requests=12, workload="agent", turns=3, tenants=3, policy="fair-share")
    assert (tmp_path / "log.jsonl").read_bytes() == run_log(scenario).encode()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_many_logs_have_the_same_bytes_in_many_processes(seed: int, tmp_path: Path) -> None:
    """Every world, and the requests of a file, from two seeds each, in six processes at once."""
    sample = replace(FEW, workload="sample", longest_prompt=60, longest_output=20)
    worlds = {
        f"{name}, seed {each}": replace(scenario, requests=40, seed=each)
        for name, scenario in {**WORLDS, "sample": sample}.items()
        for each in (2 * seed, 2 * seed + 1)
    }
    logs_by_world = {name: run_log(scenario) for name, scenario in worlds.items()}
    assert len(set(logs_by_world.values())) == len(worlds)
    worlds_file = tmp_path / "worlds"
    worlds_file.write_bytes(pickle.dumps(tuple(worlds.values())))
    processes = []
    for number, hash_seed in enumerate(("0", "1", *4 * ("random",))):
        flags = ("-O",) if number % 2 else ()
        program = LOG_PROGRAM if number % 3 else LOG_PROGRAM_WITHOUT_GC
        with (tmp_path / f"{number}").open("wb") as out:
            processes.append(
                start_process(
                    [sys.executable, *flags, "-c", program, str(worlds_file)],
                    {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": str(1 + number)},
                    tmp_path,
                    out.fileno(),
                )
            )
    for number, process in enumerate(processes):
        read_output(process)
        check_logs((tmp_path / f"{number}").read_bytes(), logs_by_world)


# Inputs that a run must not read.

ISOLATION_PROGRAM = """\
import os, pickle, random, sys, time

FORBIDDEN = ("time.", "random.", "os.", "open", "import", "socket.", "subprocess.")
running, calls = False, []


def noted(name, real):
    def call(*args, **named):
        note_call(name, ())  # an exception would count as an error of the model
        return real(*args, **named)

    return call


def note_call(event, args):
    if running and event.startswith(FORBIDDEN):
        calls.append((event, str(args[0]) if args else ""))


# Before any module has imported them by name.
for module, names in (
    (time, set(dir(time)) - {"struct_time"}),
    (random, random.__all__),
    (os, ("urandom", "getrandom")),
):
    for name in names:
        real = getattr(module, name, None)
        if callable(real) and not name.startswith("_"):
            setattr(module, name, noted(f"{module.__name__}.{name}", real))

from forge.sim.decision_log import DecisionLog
from forge.policies import POLICY_FOLDER, policy_path

sys.addaudithook(note_call)
with open(sys.argv[1], "rb") as file:
    scenarios = pickle.load(file)
for scenario in scenarios:
    scenario.run()  # lazy imports happen here
for scenario in scenarios:
    log = DecisionLog(lambda text: None, scenario.header())
    needed = {str(POLICY_FOLDER), str(policy_path(scenario.policy)), str(scenario.trace_path)}
    running = True
    scenario.run(log)
    running = False
    found = [(event, what) for event, what in calls if what not in needed]
    assert not found, found
    print(len(calls))
    calls.clear()
"""
"""A program that runs each scenario and fails on reads of clocks, entropy or other hosts."""


@pytest.mark.long
def test_a_run_reads_no_clock_no_entropy_and_only_the_files_of_its_scenario(
    tmp_path: Path,
) -> None:
    worlds_file = tmp_path / "worlds"
    sample = replace(FEW, workload="sample", longest_prompt=40, longest_output=8)
    worlds_file.write_bytes(pickle.dumps((*WORLDS.values(), sample)))
    command = [sys.executable, "-c", ISOLATION_PROGRAM, str(worlds_file)]
    output = read_output(start_process(command, {}, tmp_path, subprocess.PIPE)).split()
    assert output[-1] != b"0"  # the trace was read, and the hook saw it


class SleepingCost(NamedTuple):
    """A CostModel that sleeps before it returns the time of another one."""

    cost: CostModel
    sleep: Callable[[str], object]

    def step_ns(self, plan: StepPlan) -> int:
        self.sleep("step")
        return self.cost.step_ns(plan)

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        self.sleep("decode")
        return self.cost.decode_ns(num_rows, num_kv, most_kv)

    def plan_ns(self, plan: StepPlan) -> int:
        self.sleep("plan")
        return self.cost.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        self.sleep("commit")
        return self.cost.commit_ns(plan)


class SleepingModel(ModelWrapper):
    """A model that sleeps, and so do its steps."""

    def __init__(self, model: Model, sleep: Callable[[str], object]) -> None:
        super().__init__(model)
        self._sleep = sleep

    def forward(self, plan: StepPlan) -> SleepingStep:
        self._sleep("forward")
        return SleepingStep(self._model.forward(plan), self._sleep)


class SleepingStep(NamedTuple):
    """A step with a late result."""

    step: PendingStep
    sleep: Callable[[str], object]

    def result(self) -> StepOutput:
        self.sleep("result")
        return self.step.result()


SLEEP_POINTS = {"step", "plan", "commit", "forward", "result"}


@pytest.mark.parametrize(
    ("run", "think"),
    [
        pytest.param(lambda world, log: world.run(), SLEEP_POINTS, id="stepwise"),
        pytest.param(run_fast_forward, SLEEP_POINTS | {"decode"}, id="leaps"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_real_time_in_costs_and_model_is_in_no_log(
    depth: int, run: Callable[[World, DecisionLog], object], think: set[str]
) -> None:
    """Each sleeps for 5 ms at a time; a step takes a fifth of one."""
    config = replace(TIGHT, depth=depth)
    thought: list[str] = []

    def sleep(who: str) -> None:
        time.sleep(0.005)
        thought.append(who)

    def log_of(sleep: Callable[[str], object]) -> str:
        lines: list[str] = []
        cost = SleepingCost(AffineCost(200_000, 700, 90, 3_000, 100), sleep)
        model = VirtualClockModel(SleepingModel(LengthModel(), sleep), Clock(), cost)
        log = DecisionLog(lines.append, {})
        workload = PoissonWorkload(2000.0, 2, lambda request_id: (4, 3 + 4 * request_id))
        run(World(Engine(model, config), model, workload, log), log)
        log.close()
        return "".join(lines)

    assert log_of(sleep) == log_of(lambda who: None)
    assert set(thought) == think
