"""Equal scenarios make equal logs: in any process, on any machine, however slow it is.

this process ──► log of each of WORLDS ──┬── == the log of another process, byte for byte
                                         └── == the log of a world that sleeps as it runs
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
from forge.models.around import Around
from forge.seam import Model, PendingStep, StepOutput, StepPlan
from sim.clock import Clock, Cost, TimedModel
from sim.cost import Affine
from sim.leap import run_leaping
from sim.lengths import LengthModel
from sim.log import Log
from sim.scenario import Scenario, speculation, summary
from sim.workload import Poisson
from sim.world import World

ROOT = Path(__file__).resolve().parent.parent
TIGHT = EngineConfig(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
DRAFTING = replace(TIGHT, num_blocks=64, speculation=speculation(3))
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
"""Scenarios by what they are about."""

OTHER_MINORS = [minor for minor in range(11, 20) if minor != sys.version_info.minor]
LIMIT_S = 60.0

WRITES = """\
import pickle, sys
from sim.log import Log

with open(sys.argv[1], "rb") as file:
    scenarios = pickle.load(file)
for scenario in scenarios:
    log = Log(sys.stdout.write, scenario.header())
    scenario.run(log)
    log.close()
"""
"""A program: the logs of the scenarios in a file, one behind the other."""

UNCOLLECTED = f"import gc\n\ngc.disable()\n{WRITES}"
"""The same, and no garbage is collected."""


def logged(scenario: Scenario) -> str:
    """The log of a run in this process."""
    lines: list[str] = []
    log = Log(lines.append, scenario.header())
    scenario.run(log)
    log.close()
    return "".join(lines)


@pytest.fixture(scope="module")
def logs() -> dict[str, str]:
    """The log of each world, of a run in this process."""
    return {name: logged(scenario) for name, scenario in WORLDS.items()}


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A file with the worlds."""
    file = tmp_path / "worlds"
    file.write_bytes(pickle.dumps(tuple(WORLDS.values())))
    return file


def elsewhere(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, stdout: int
) -> subprocess.Popen[bytes]:
    """A process that finds the sources of this one, and nothing else is as it is here."""
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"} | environ,
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[bytes]) -> bytes:
    """What it wrote into the pipe; it has succeeded."""
    with process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err.decode()
    return out or b""


def same(found: bytes, logs: Mapping[str, str]) -> None:
    """The logs of the worlds, byte for byte; of those that are not the first is named."""
    text = found.decode()
    for name, log in logs.items():
        assert text.startswith(log), f"{name}: another log"
        text = text[len(log) :]
    assert not text


def test_the_worlds_are_such_that_an_order_could_matter(logs: Mapping[str, str]) -> None:
    """Somebody is preempted, prompts are shared, drafts are judged."""
    figures = {name: summary(scenario.run()) for name, scenario in WORLDS.items()}
    for name in ("poisson", "bursts", "closed loop"):
        assert figures[name]["preemptions"], name
    assert figures["agent"]["shared_tokens"]
    for name in ("drafts", "drafts of a model"):
        assert 0 < figures[name]["accepted"] < figures[name]["drafted"], name
    assert len(set(logs.values())) == len(WORLDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "program", "environ"),
    [
        pytest.param((), UNCOLLECTED, {"PYTHONHASHSEED": "0"}, id="no garbage is collected"),
        pytest.param(("-O",), WRITES, {"PYTHONHASHSEED": "1", "LC_ALL": "C"}, id="no asserts"),
    ],
)
def test_a_log_has_the_same_bytes_in_every_process(
    flags: Sequence[str],
    program: str,
    environ: Mapping[str, str],
    logs: Mapping[str, str],
    pickled: Path,
    tmp_path: Path,
) -> None:
    """In another folder."""
    command = [sys.executable, *flags, "-c", program, str(pickled)]
    same(ended(elsewhere(command, environ, tmp_path, subprocess.PIPE)), logs)


@pytest.mark.long
def test_a_log_has_the_same_bytes_in_two_processes_at_once(
    logs: Mapping[str, str], pickled: Path, tmp_path: Path
) -> None:
    """One writes into a pipe, one into a file."""
    command = [sys.executable, "-c", WRITES, str(pickled)]
    file = tmp_path / "logs"
    with file.open("wb") as out:
        piped = elsewhere(command, {"OMP_NUM_THREADS": "7"}, tmp_path, subprocess.PIPE)
        filed = elsewhere(command, {"TZ": "Asia/Tokyo"}, tmp_path, out.fileno())
        same(ended(piped), logs)
        ended(filed)
    same(file.read_bytes(), logs)


def test_a_log_has_the_same_bytes_on_every_python(
    logs: Mapping[str, str], pickled: Path, tmp_path: Path
) -> None:
    """On those of the path that can run forge."""
    ran, why = [], []
    for minor in OTHER_MINORS:
        python = shutil.which(f"python3.{minor}")
        if python is None:
            continue
        tried = subprocess.run(
            [python, "-c", "import sim.scenario"], cwd=ROOT, capture_output=True, timeout=LIMIT_S
        )
        if tried.returncode:
            why.append(f"python3.{minor}: {tried.stderr.decode().strip().splitlines()[:1]}")
            continue
        command = [python, "-c", WRITES, str(pickled)]
        same(ended(elsewhere(command, {}, tmp_path, subprocess.PIPE)), logs)
        ran.append(minor)
    if not ran:
        pytest.skip(f"no other Python runs forge here: {', '.join(why) or 'none is on the path'}")


def test_the_command_writes_into_a_file_what_a_run_writes(tmp_path: Path) -> None:
    words = "--requests 12 --workload agent --turns 3 --tenants 3 --policy fair-share"
    command = [sys.executable, "-m", "forge", "sim", *words.split(), "--log", "log.jsonl"]
    ended(elsewhere(command, {}, tmp_path, subprocess.DEVNULL))
    scenario = Scenario(requests=12, workload="agent", turns=3, tenants=3, policy="fair-share")
    assert (tmp_path / "log.jsonl").read_bytes() == logged(scenario).encode()


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
    logs = {name: logged(scenario) for name, scenario in worlds.items()}
    assert len(set(logs.values())) == len(worlds)
    pickled = tmp_path / "worlds"
    pickled.write_bytes(pickle.dumps(tuple(worlds.values())))
    processes = []
    for number, hash_seed in enumerate(("0", "1", *4 * ("random",))):
        flags = ("-O",) if number % 2 else ()
        program = WRITES if number % 3 else UNCOLLECTED
        with (tmp_path / f"{number}").open("wb") as out:
            processes.append(
                elsewhere(
                    [sys.executable, *flags, "-c", program, str(pickled)],
                    {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": str(1 + number)},
                    tmp_path,
                    out.fileno(),
                )
            )
    for number, process in enumerate(processes):
        ended(process)
        same((tmp_path / f"{number}").read_bytes(), logs)


# What a run must not ask, and must not notice.

ASKS_NOBODY = """\
import os, pickle, random, sys, time

HEEDED = ("time.", "random.", "os.", "open", "import", "socket.", "subprocess.")
running, heard = False, []


def overheard(name, real):
    def call(*args, **named):
        hear(name, ())  # an error would be the model's to the engine, and the run would go on
        return real(*args, **named)

    return call


def hear(event, args):
    if running and event.startswith(HEEDED):
        heard.append((event, str(args[0]) if args else ""))


# Before anybody can have taken them by their names.
for module, names in (
    (time, set(dir(time)) - {"struct_time"}),
    (random, random.__all__),
    (os, ("urandom", "getrandom")),
):
    for name in names:
        real = getattr(module, name, None)
        if callable(real) and not name.startswith("_"):
            setattr(module, name, overheard(f"{module.__name__}.{name}", real))

from sim.log import Log
from sim.scenario import FOLDER, policy_file

sys.addaudithook(hear)
with open(sys.argv[1], "rb") as file:
    scenarios = pickle.load(file)
for scenario in scenarios:
    scenario.run()  # what is imported when it is first needed is there now
for scenario in scenarios:
    log = Log(lambda text: None, scenario.header())
    needed = {str(FOLDER), str(policy_file(scenario.policy)), str(scenario.file)}
    running = True
    scenario.run(log)
    running = False
    found = [(event, what) for event, what in heard if what not in needed]
    assert not found, found
    print(len(heard))
    heard.clear()
"""
"""A program: each scenario has run, and asked for no time, no chance and nobody else's answer."""


def test_a_run_asks_no_clock_no_chance_and_nobody_and_reads_what_its_scenario_names(
    tmp_path: Path,
) -> None:
    pickled = tmp_path / "worlds"
    sample = replace(FEW, workload="sample", longest_prompt=40, longest_output=8)
    pickled.write_bytes(pickle.dumps((*WORLDS.values(), sample)))
    command = [sys.executable, "-c", ASKS_NOBODY, str(pickled)]
    heard = ended(elsewhere(command, {}, tmp_path, subprocess.PIPE)).split()
    assert heard[-1] != b"0"  # the trace was read, and somebody heard it


class Sleeping(NamedTuple):
    """A Cost that thinks for a while before it says what another one says."""

    cost: Cost
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


class Slow(Around):
    """A model that takes a while, and so do its results."""

    def __init__(self, model: Model, sleep: Callable[[str], object]) -> None:
        super().__init__(model)
        self._sleep = sleep

    def forward(self, plan: StepPlan) -> SlowStep:
        self._sleep("forward")
        return SlowStep(self._model.forward(plan), self._sleep)


class SlowStep(NamedTuple):
    """A step whose result is late."""

    step: PendingStep
    sleep: Callable[[str], object]

    def result(self) -> StepOutput:
        self.sleep("result")
        return self.step.result()


THINK = {"step", "plan", "commit", "forward", "result"}


@pytest.mark.parametrize(
    ("run", "think"),
    [
        pytest.param(lambda world, log: world.run(), THINK, id="stepwise"),
        pytest.param(run_leaping, THINK | {"decode"}, id="leaps"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_how_long_costs_and_model_think_is_in_no_log(
    depth: int, run: Callable[[World, Log], object], think: set[str]
) -> None:
    """Each thinks for 5 ms at a time; a step takes a fifth of one."""
    config = replace(TIGHT, depth=depth)
    thought: list[str] = []

    def sleep(who: str) -> None:
        time.sleep(0.005)
        thought.append(who)

    def log_of(sleep: Callable[[str], object]) -> str:
        lines: list[str] = []
        cost = Sleeping(Affine(200_000, 700, 90, 3_000, 100), sleep)
        model = TimedModel(Slow(LengthModel(), sleep), Clock(), cost)
        log = Log(lines.append, {})
        workload = Poisson(2000.0, 2, lambda request_id: (4, 3 + 4 * request_id))
        run(World(Engine(model, config), model, workload, log), log)
        log.close()
        return "".join(lines)

    assert log_of(sleep) == log_of(lambda who: None)
    assert set(thought) == think
