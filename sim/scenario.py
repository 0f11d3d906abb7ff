"""Scenario: all that decides a run, as one frozen value, and the world that it builds.

Owns the names of workloads, models and policies and what each needs. Knows no file of results: who
watches is the caller's. Two scenarios that are equal make logs that are equal, byte for byte.

    Scenario ──engine()──► Engine on a TimedModel ──world()──► World ──run()──► Measures
        └──header()──► line 1 of the log
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from forge import __version__
from forge.config import EngineConfig, Speculation
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.llm import find_policy
from forge.models.hash import HashModel
from forge.policy import POLICIES, Policy
from forge.seam import Model
from sim.agents import Agents, Transcript, plain_answer
from sim.clock import Clock, TimedModel
from sim.labels import Labels
from sim.leap import run_leaping
from sim.lengths import LengthModel
from sim.log import Log
from sim.measures import Measures, Objective
from sim.noise import Noisy
from sim.price import NOISY, Drafted, calibration_file, cost_of, knows_drafts
from sim.spread import lengths_of
from sim.traces import SAMPLE, Trace, trace_file
from sim.workload import Bursts, ClosedLoop, InVocabulary, Poisson, Workload
from sim.world import Watcher, World

HASH_VOCABULARY = 256
"""Of the model `hash`: small, since each sampled token costs as much."""

MODELS = ("lengths", "hash")

CALM, BURST, STAYS_S = 0.5, 3.0, (8.0, 2.0)
"""Bursts: shares of the rate, and mean seconds of each. Their mean is the rate."""

OPEN = ("rate", "requests", "prompt", "output")
CLOSED = ("clients", "pause", "requests", "prompt", "output")
OF_FILES = ("rate", "requests", "scale", "longest_prompt", "longest_output")
USES = {
    "poisson": OPEN,
    "bursty": OPEN,
    "closed": CLOSED,
    "agent": (*CLOSED, "turns", "system"),
    "sample": OF_FILES,
}
"""Each workload by name: the options that it has a use for. What is not here is a file."""

SHAPES = tuple(dict.fromkeys(name for names in USES.values() for name in names))
"""All of them."""

RATE, REQUESTS = 10.0, 1000
"""Of workloads that are drawn, where nobody says."""

A_FILE = "file"
"""What a header has in place of a path."""

FOLDER = Path(__file__).with_name("policies")


def policy_names() -> tuple[str, ...]:
    """Of all policies that have a name here: forge's own, then those of the laboratory."""
    files = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")
    return (*POLICIES, *(name.replace("_", "-") for name in files))


def policy_file(choice: str) -> Path | None:
    """The file of a policy that has one. Forge's own names have none."""
    if choice.endswith(".py"):
        return Path(choice)
    own = FOLDER / f"{choice.replace('-', '_')}.py"
    return own if choice in policy_names() and choice not in POLICIES else None


def policy_of(choice: str) -> Policy:
    """The policy of that name, or the one that the named file defines. Raises InvalidConfig."""
    file = policy_file(choice)
    if file is None and choice not in POLICIES:
        names = ", ".join(policy_names())
        raise InvalidConfig("policy", f"{choice[:64]!r} is not known", f"Use {names} or a FILE.py")
    return find_policy(choice if file is None else str(file))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that decides a run. Raises InvalidConfig naming the field.

    workload         poisson, bursty, closed, agent, sample, or the file of a trace
    rate             requests a second, of those that are played; None: as the file has them
    requests         how many; None: those of the file, once
    prompt           tokens that are new in a request: see sim.spread
    output           tokens of an answer
    clients          that each ask, wait for the answer and ask again; of agents: sessions at a time
    pause            mean seconds between an answer and the next request
    turns            most of an agent's session
    system           tokens of the prompt that all sessions begin with
    scale            prompts and answers of a file are so many times as long
    longest_prompt   of a file: longer ones are cut; None: none is
    longest_output   as longest_prompt
    classes          of priority, each as likely; 0 is the most urgent
    tenants          for whom requests are; the first asks as often as all others together
    policy           a name or a FILE.py
    cost             see `cost_of`
    model            lengths: no tokens, only their number; hash: the deterministic model
    agreement        probability that a draft is right
    draft_cost       of a step of the draft model, as a share of one of the model
    slo_ttft_ms      most milliseconds to the first token of a good request
    slo_itl_ms       most milliseconds between tokens of a good request, their mean
    seed             of everything that is drawn
    engine           the engine's numbers
    """

    workload: str = "poisson"
    rate: float | None = None
    requests: int | None = None
    prompt: str = "16-1024"
    output: str = "16-256"
    clients: int = 16
    pause: float = 0.0
    turns: int = 8
    system: int = 512
    scale: float = 1.0
    longest_prompt: int | None = None
    longest_output: int | None = None
    classes: int = 1
    tenants: int = 1
    policy: str = "fcfs"
    cost: str = "affine:6000,20,25"
    model: str = "lengths"
    agreement: float = 0.7
    draft_cost: float = 0.1
    slo_ttft_ms: float = 1000.0
    slo_itl_ms: float = 50.0
    seed: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("rate", "scale", "slo_ttft_ms", "slo_itl_ms"):
            self._require(name, 1e-9, 1e12, "a number above 0", "Give 1, say")
        for name in (
            *("clients", "classes", "tenants", "turns", "system"),
            *("requests", "longest_prompt", "longest_output"),
        ):
            self._require(name, 1, 10**9, "from 1 to 1000000000", "Give 1 or more")
        self._require("pause", 0, 1e6, "a time", "Give seconds, or 0")
        self._require("agreement", 0, 1, "a probability", "Give 0 to 1")
        self._require("draft_cost", 0, 100, "a share", "Give 0.1, say")
        self._require("seed", -(2**63), 2**63 - 1, "of 64 bits", "Give a smaller one")
        if self.model not in MODELS:
            known = ", ".join(MODELS)
            raise InvalidConfig("model", f"{self.model[:64]!r} is not known", f"Use {known}")
        if self.workload not in USES and not Path(self.workload).is_file():
            raise InvalidConfig(
                "workload",
                f"{self.workload[:64]!r} is no workload and no file",
                f"Use {', '.join(USES)} or the file of a trace",
            )
        for name in ("prompt", "output"):
            lengths_of(name, getattr(self, name))
        cost_of(self.cost, self.engine)
        if self.file is None:  # a frozen value is completed once, here, before anyone sees it
            object.__setattr__(self, "rate", self.rate or RATE)
            object.__setattr__(self, "requests", self.requests or REQUESTS)

    def _require(self, name: str, low: float, high: float, what: str, remedy: str) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise InvalidConfig(name, f"{str(value)[:64]!r} is not {what}", remedy)

    @property
    def uses(self) -> tuple[str, ...]:
        """Options of SHAPES that the workload has a use for."""
        return USES.get(self.workload, OF_FILES)

    @property
    def file(self) -> Path | None:
        """Where the trace is; None: requests are drawn."""
        if self.workload == "sample":
            return SAMPLE
        return None if self.workload in USES else Path(self.workload)

    def header(self) -> dict[str, Any]:
        """Line 1 of the log: everything that decides the run, and the code that runs it.

        A path does not: a file is known by the digest of its contents.
        """
        options = asdict(self)
        engine = options.pop("engine")
        file = policy_file(self.policy)
        calibrated = calibration_file(self.cost)
        if self.workload not in USES:
            options["workload"] = A_FILE
        if self.policy not in policy_names():
            options["policy"] = A_FILE
        if calibrated is not None:
            options["cost"] = f"{NOISY}{A_FILE}" if self.cost.startswith(NOISY) else A_FILE
        return {
            "forge": __version__,
            "seed": options.pop("seed"),
            "code": code_digest(),
            "options": options,
            "engine": engine,
            "policy": None if file is None else _digest(file),
            "trace": None if self.file is None else _digest(self.file),
            "calibration": None if calibrated is None else _digest(calibrated),
        }

    def requested(self) -> tuple[Workload, tuple[Watcher, ...]]:
        """Who asks for what, and when; and who must watch for that."""
        transcript = Transcript()
        workload = self._drawn(transcript) if self.file is None else self._trace(self.file)
        if self.model == "hash":
            workload = InVocabulary(workload, HASH_VOCABULARY)
        watchers = (transcript,) if self.workload == "agent" and self.model == "hash" else ()
        return Labels(workload, self.classes, self.tenants, self.seed), watchers

    def _trace(self, file: Path) -> Workload:
        trace = Trace(
            trace_file(file),
            scale=self.scale,
            longest_prompt=self.longest_prompt,
            longest_output=self.longest_output,
            count=self.requests,
        )
        return trace if self.rate is None else trace.at_rate(self.rate)

    def _drawn(self, transcript: Transcript) -> Workload:
        prompts, outputs = lengths_of("prompt", self.prompt), lengths_of("output", self.output)
        rate, count, seed = self.rate or RATE, self.requests or REQUESTS, self.seed

        def lengths(request_id: int) -> tuple[int, int]:
            return prompts(seed, request_id), outputs(seed, request_id)

        if self.workload == "poisson":
            return Poisson(rate, count, lengths, seed)
        if self.workload == "bursty":
            return Bursts((CALM * rate, BURST * rate), STAYS_S, count, lengths, seed)
        if self.workload == "closed":
            return ClosedLoop(self.clients, count, lengths, self.pause, seed)
        return Agents(
            self.clients,
            -(-count // self.turns),
            self.turns,
            self.system,
            lambda session, turn: lengths(session * self.turns + turn),
            self.pause,
            self.engine.max_model_len,
            plain_answer if self.model == "lengths" else transcript.answer,
            seed,
        )

    def timed_engine(self) -> tuple[Engine, TimedModel]:
        """A new engine at time 0, and the model under it."""
        cost = cost_of(self.cost, self.engine)
        if isinstance(cost, Noisy):
            cost = replace(cost, seed=self.seed)
        if self.engine.speculation is not None and not knows_drafts(cost):
            cost = Drafted(cost, round(1000 * self.draft_cost))
        model = TimedModel(self._model(), Clock(), cost)
        config = replace(self.engine, seed=self.seed)
        return Engine(model, config, policy=policy_of(self.policy)), model

    def _model(self) -> Model:
        if self.model == "lengths":
            return LengthModel(acceptance=self.agreement, seed=self.seed)
        drafts = self.engine.speculation is not None
        return self._hash(1.0, self._hash(self.agreement, None) if drafts else None)

    def _hash(self, agreement: float, draft: HashModel | None) -> HashModel:
        return HashModel(
            vocab_size=HASH_VOCABULARY,
            num_blocks=self.engine.num_blocks,
            block_size=self.engine.block_size,
            seed=self.seed,
            agreement=agreement,
            draft=draft,
        )

    def world(self, engine: Engine, model: TimedModel, *watchers: Watcher) -> World:
        """The engine and the requests, at time 0."""
        objective = Objective(self.slo_ttft_ms * 1e6, self.slo_itl_ms * 1e6)
        workload, needed = self.requested()
        return World(engine, model, workload, *needed, *watchers, objective=objective)

    def run(
        self,
        log: Log | None = None,
        watch: Callable[[Engine], Sequence[Watcher]] = lambda engine: (),
    ) -> World:
        """The world at its end. What nobody but the log watches is leapt over.

        watch   the engine, before anything has happened -> who else hears of everything
        """
        engine, model = self.timed_engine()
        others = watch(engine)
        world = self.world(engine, model, *(() if log is None else (log,)), *others)
        # With noise it matters which step it is.
        if self.model == "lengths" and not others and not self.cost.startswith(NOISY):
            run_leaping(world, log)
        else:
            world.run()
        return world


def speculation(num_tokens: int) -> Speculation | None:
    """So many drafts of a draft model; 0: none. Raises InvalidConfig."""
    return Speculation(num_tokens=num_tokens) if num_tokens else None


def summary(world: World) -> dict[str, Any]:
    """What came of a run, in figures."""
    scheduler: Any = world.engine.scheduler
    measures: Measures = world.measures
    return {
        **measures.summary(),
        "steps": world.num_steps,
        "preemptions": scheduler.preemptions,
        "prompt_tokens": scheduler.queried_tokens,
        "shared_tokens": scheduler.cached_tokens,
        "drafted": scheduler.drafted_tokens,
        "accepted": scheduler.accepted_tokens,
        "most_blocks": scheduler.pool.peak_used,
    }


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def code_digest() -> str:
    """Of the sources that decide what happens: engine, embedded models and simulator."""
    root = Path(__file__).resolve().parent.parent
    found = sha256()
    for folder in ("forge", "forge/models", "sim", "sim/policies"):
        for file in sorted((root / folder).glob("*.py")):
            found.update(f"{folder}/{file.name}\n".encode() + file.read_bytes())
    return found.hexdigest()
