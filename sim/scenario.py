"""Scenario: everything that decides a run, as one frozen value, and the world that it builds.

Owns the names of workloads, models and policies and what each requires. Knows no output: observers
belong to the caller.

    Scenario ─create_engine()─► Engine on a VirtualClockModel ─create_world()─► World ─► RunMetrics
        └──header()──► line 1 of the log

Always true: equal scenarios write equal logs, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import forge
from forge import __version__
from forge.config import MAX_GEOMETRY, EngineConfig, HostTier, Speculation
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.kv_events import KVEventSink
from forge.models.hash import HashModel
from forge.policies import policy_names, policy_path
from forge.policy_loader import load_policy
from forge.seam import Model
from forge.sim.answer_recorder import AnswerRecorder
from forge.sim.clock import Clock, LinkCost, VirtualClockModel
from forge.sim.cost.cost_spec import (
    NOISY_PREFIX,
    DraftModelCost,
    calibration_path,
    includes_drafts,
    parse_cost,
)
from forge.sim.cost.noise import NoisyCost
from forge.sim.decision_log import DecisionLog
from forge.sim.fast_forward import run_fast_forward
from forge.sim.length_model import LengthModel
from forge.sim.metrics import LatencyObjective, RunMetrics
from forge.sim.workloads.agents import AgentSessions, filler_answer
from forge.sim.workloads.length_distributions import parse_lengths
from forge.sim.workloads.request_labels import LabeledWorkload
from forge.sim.workloads.session_shape import (
    Pause,
    SessionShape,
    parse_hints,
    parse_pauses,
)
from forge.sim.workloads.traces import SAMPLE_TRACE, TraceWorkload, open_trace
from forge.sim.workloads.workload import (
    BurstyWorkload,
    ClosedLoopWorkload,
    PoissonWorkload,
    VocabularyWorkload,
    Workload,
)
from forge.sim.world import World, WorldObserver

HASH_VOCAB_SIZE = 256
"""Vocabulary of the model `hash`: small, since sampling costs in proportion to it."""

MODELS = ("lengths", "hash")

CALM_RATE_SHARE, BURST_RATE_SHARE, MEAN_DWELL_S = 0.5, 3.0, (8.0, 2.0)
"""Bursts: factors of the rate, and mean seconds in each state. The mean rate is the rate."""

OPEN_LOOP_OPTIONS = ("rate", "requests", "prompt", "output")
CLOSED_LOOP_OPTIONS = ("clients", "pause", "requests", "prompt", "output")
SESSION_OPTIONS = (
    *("sessions", "min_turns", "pause_mix", "subagents", "compact_at"),
    *("summary_tokens", "abandon", "hints", "oversubscription"),
)
"""Options of agent sessions, named in a title where they are set."""
TRACE_OPTIONS = ("rate", "requests", "scale", "longest_prompt", "longest_output")
WORKLOAD_OPTIONS = {
    "poisson": OPEN_LOOP_OPTIONS,
    "bursty": OPEN_LOOP_OPTIONS,
    "closed": CLOSED_LOOP_OPTIONS,
    "agent": (*CLOSED_LOOP_OPTIONS, "turns", "system", *SESSION_OPTIONS),
    "sample": TRACE_OPTIONS,
}
"""Each workload by name -> the options that it accepts. Any other name is a file."""

SHAPE_OPTIONS = tuple(dict.fromkeys(name for names in WORKLOAD_OPTIONS.values() for name in names))
"""Options that some workload accepts."""

DEFAULT_RATE, DEFAULT_NUM_REQUESTS = 10.0, 1000
"""Defaults of workloads that are drawn."""

HOST_MOVE_NS = 20_000
"""Nanoseconds of a plan's moves in one direction besides those of its blocks."""

FILE_PLACEHOLDER = "file"
"""Replaces a path in a header."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that decides a run. Raises InvalidConfig naming the field.

    workload          poisson, bursty, closed, agent, sample, or the file of a trace
    rate              requests a second, of those that are played; None: as in the file
    requests          number of requests; None: those of the file, once
    prompt            new tokens of a prompt: see forge.sim.workloads.length_distributions
    output            tokens of an answer
    clients           closed-loop clients (or concurrent agent sessions)
    pause             mean seconds between an answer and the next request
    turns             most turns of an agent session
    system            tokens of the system prompt that all agent sessions share
    sessions          number of agent sessions; None: `requests` / `turns`
    min_turns         fewest turns of an agent session, uniform up to `turns`; None: `turns`
    pause_mix         kinds of pauses, SHARE:SECONDS,..., in place of `pause`; None: one kind
    subagents         probability that a turn starts 1 to 3 sub-agents, which share its context
    compact_at        tokens of a prompt above which a summary replaces the context; None: never
    summary_tokens    tokens of such a summary
    abandon           probability after a turn that its session stops without notice
    hints             what requests say of their session: any of id,end,pause, or none
    oversubscription  longest contexts of all open sessions, as a multiple of the cache. Sets the
                      number of blocks; None: it stays
    scale             factor of the lengths of a file, prompts and answers
    longest_prompt    cut longer prompts of a file to this length; None: do not cut
    longest_output    cut longer answers of a file to this length; None: do not cut
    classes           number of priority classes, drawn uniformly; 0 is the most urgent
    tenants           number of tenants; the first sends as many requests as all others together
    policy            a name or a FILE.py
    cost              see forge.sim.cost.cost_spec
    model             lengths: no tokens, only their number; hash: the deterministic model
    agreement         probability that a draft is accepted
    draft_cost        time of a draft model step, as a share of a step of the model
    host_blocks       blocks of a pool in host memory, for what leaves the cache; 0: there is none
    host_block_us     microseconds in which a block moves between device and host memory
    slo_ttft_ms       limit of a good request: milliseconds to the first token
    slo_itl_ms        limit of a good request: mean milliseconds between tokens
    seed              seed of everything that is drawn
    engine            configuration of the engine
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
    sessions: int | None = None
    min_turns: int | None = None
    pause_mix: str | None = None
    subagents: float = 0.0
    compact_at: int | None = None
    summary_tokens: int = 2000
    abandon: float = 0.0
    hints: str = "id,end"
    oversubscription: float | None = None
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
    host_blocks: int = 0
    host_block_us: float = 190.0
    slo_ttft_ms: float = 1000.0
    slo_itl_ms: float = 50.0
    seed: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("rate", "scale", "slo_ttft_ms", "slo_itl_ms", "oversubscription"):
            self._check_range(name, 1e-9, 1e12, "a number above 0", "Give 1, say")
        for name in (
            *("clients", "classes", "tenants", "turns", "system"),
            *("requests", "longest_prompt", "longest_output"),
            *("sessions", "min_turns", "compact_at", "summary_tokens"),
        ):
            self._check_range(name, 1, 10**9, "from 1 to 1000000000", "Give 1 or more")
        self._check_range("pause", 0, 1e6, "a time", "Give seconds, or 0")
        for name in ("agreement", "subagents", "abandon"):
            self._check_range(name, 0, 1, "a probability", "Give 0 to 1")
        self._check_range("host_blocks", 0, MAX_GEOMETRY["num_blocks"], "a size", "Give 0 or more")
        self._check_range("host_block_us", 0, 1e6, "a time", "Give microseconds")
        self._check_range("draft_cost", 0, 100, "a share", "Give 0.1, say")
        self._check_range("seed", -(2**63), 2**63 - 1, "of 64 bits", "Give a smaller one")
        if self.model not in MODELS:
            names = ", ".join(MODELS)
            raise InvalidConfig("model", f"{self.model[:64]!r} is not known", f"Use {names}")
        if self.workload not in WORKLOAD_OPTIONS and not Path(self.workload).is_file():
            raise InvalidConfig(
                "workload",
                f"{self.workload[:64]!r} is no workload and no file",
                f"Use {', '.join(WORKLOAD_OPTIONS)} or the file of a trace",
            )
        for name in ("prompt", "output"):
            parse_lengths(name, getattr(self, name))
        self._check_sessions()
        if self.trace_path is None:  # a frozen value is completed here, within its construction
            object.__setattr__(self, "rate", self.rate or DEFAULT_RATE)
            object.__setattr__(self, "requests", self.requests or DEFAULT_NUM_REQUESTS)
        if self.workload == "agent" and self.oversubscription is not None:
            engine = replace(self.engine, num_blocks=self._num_oversubscribed_blocks())
            object.__setattr__(self, "engine", engine)
        parse_cost(self.cost, self.engine)

    def _check_sessions(self) -> None:
        if self.min_turns is not None and self.min_turns > self.turns:
            raise InvalidConfig(
                "min_turns", f"{self.min_turns} is above turns, {self.turns}", "Give a smaller one"
            )
        if self.compact_at is not None and self.compact_at <= self.system + self.summary_tokens:
            raise InvalidConfig(
                "compact_at",
                f"{self.compact_at} is not above the {self.system + self.summary_tokens} tokens "
                "of system prompt and summary",
                "Give a larger one",
            )
        parse_hints(self.hints)
        if self.pause_mix is not None:
            parse_pauses(self.pause_mix)

    def _num_oversubscribed_blocks(self) -> int:
        assert self.oversubscription is not None, "called where it is set"
        num_tokens = self.create_session_shape().working_set_tokens(self.clients)
        return max(1, round(num_tokens / self.oversubscription / self.engine.block_size))

    def _check_range(self, name: str, low: float, high: float, what: str, remedy: str) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise InvalidConfig(name, f"{str(value)[:64]!r} is not {what}", remedy)

    @property
    def options(self) -> tuple[str, ...]:
        """Options of SHAPE_OPTIONS that the workload accepts."""
        return WORKLOAD_OPTIONS.get(self.workload, TRACE_OPTIONS)

    @property
    def trace_path(self) -> Path | None:
        """Path of the trace; None where requests are drawn."""
        if self.workload == "sample":
            return SAMPLE_TRACE
        return None if self.workload in WORKLOAD_OPTIONS else Path(self.workload)

    def header(self) -> dict[str, Any]:
        """Return line 1 of the log: everything that decides the run, and the digest of the code.

        Paths are left out: a file is identified by the digest of its contents.
        """
        options = asdict(self)
        engine = options.pop("engine")
        file = policy_path(self.policy)
        calibration = calibration_path(self.cost)
        if self.workload not in WORKLOAD_OPTIONS:
            options["workload"] = FILE_PLACEHOLDER
        if self.policy not in policy_names():
            options["policy"] = FILE_PLACEHOLDER
        if calibration is not None:
            options["cost"] = (
                f"{NOISY_PREFIX}{FILE_PLACEHOLDER}"
                if self.cost.startswith(NOISY_PREFIX)
                else FILE_PLACEHOLDER
            )
        return {
            "forge": __version__,
            "seed": options.pop("seed"),
            "code": simulation_code_digest(),
            "options": options,
            "engine": engine,
            "policy": None if file is None else _file_digest(file),
            "trace": None if self.trace_path is None else _file_digest(self.trace_path),
            "calibration": None if calibration is None else _file_digest(calibration),
        }

    def create_workload(self) -> tuple[Workload, tuple[WorldObserver, ...]]:
        """Return the workload and the observers that it needs."""
        recorder = AnswerRecorder()
        workload = (
            self._create_synthetic_workload(recorder)
            if self.trace_path is None
            else self._create_trace_workload(self.trace_path)
        )
        if self.model == "hash":
            workload = VocabularyWorkload(workload, HASH_VOCAB_SIZE)
        watchers = (recorder,) if self.workload == "agent" and self.model == "hash" else ()
        return LabeledWorkload(workload, self.classes, self.tenants, self.seed), watchers

    def _create_trace_workload(self, file: Path) -> Workload:
        trace = TraceWorkload(
            open_trace(file),
            scale=self.scale,
            max_prompt_tokens=self.longest_prompt,
            max_output_tokens=self.longest_output,
            num_requests=self.requests,
        )
        return trace if self.rate is None else trace.at_rate(self.rate)

    def _create_synthetic_workload(self, recorder: AnswerRecorder) -> Workload:
        prompts = parse_lengths("prompt", self.prompt)
        outputs = parse_lengths("output", self.output)
        rate = self.rate or DEFAULT_RATE
        count = self.requests or DEFAULT_NUM_REQUESTS
        seed = self.seed

        def lengths(request_id: int) -> tuple[int, int]:
            return prompts(seed, request_id), outputs(seed, request_id)

        if self.workload == "poisson":
            return PoissonWorkload(rate, count, lengths, seed)
        if self.workload == "bursty":
            return BurstyWorkload(
                (CALM_RATE_SHARE * rate, BURST_RATE_SHARE * rate),
                MEAN_DWELL_S,
                count,
                lengths,
                seed,
            )
        if self.workload == "closed":
            return ClosedLoopWorkload(self.clients, count, lengths, self.pause, seed)
        return AgentSessions(
            self.clients,
            self.create_session_shape(),
            parse_hints(self.hints),
            filler_answer if self.model == "lengths" else recorder.answer,
        )

    def create_session_shape(self) -> SessionShape:
        """Return the shape of the agent sessions."""
        prompts = parse_lengths("prompt", self.prompt)
        outputs = parse_lengths("output", self.output)
        seed, turns = self.seed, self.turns
        count = self.requests or DEFAULT_NUM_REQUESTS

        def lengths(session: int, turn: int) -> tuple[int, int]:
            request_id = session * turns + turn
            return prompts(seed, request_id), outputs(seed, request_id)

        return SessionShape(
            turns,
            self.system,
            lengths,
            pauses=(
                (Pause(1.0, self.pause),)
                if self.pause_mix is None
                else parse_pauses(self.pause_mix)
            ),
            min_turns=self.min_turns,
            subagent_share=self.subagents,
            compact_at=self.compact_at,
            num_summary_tokens=self.summary_tokens,
            abandon_share=self.abandon,
            max_len=self.engine.max_model_len,
            num_sessions=self.sessions or -(-count // turns),
            seed=seed,
        )

    def create_engine(
        self, kv_events: KVEventSink | None = None
    ) -> tuple[Engine, VirtualClockModel]:
        """Return a new engine at time 0, and its model.

        kv_events   receives the changes of its prefix cache
        """
        cost = parse_cost(self.cost, self.engine)
        if isinstance(cost, NoisyCost):
            cost = replace(cost, seed=self.seed)
        if self.engine.speculation is not None and not includes_drafts(cost):
            cost = DraftModelCost(cost, round(1000 * self.draft_cost))
        link = LinkCost(HOST_MOVE_NS, round(1000 * self.host_block_us))
        model = VirtualClockModel(self._create_model(), Clock(), cost, link)
        host_tier = HostTier(num_blocks=self.host_blocks) if self.host_blocks else None
        config = replace(self.engine, seed=self.seed, host_tier=host_tier)
        policy = load_policy(self.policy)
        return Engine(model, config, policy=policy, kv_events=kv_events), model

    def _create_model(self) -> Model:
        if self.model == "lengths":
            return LengthModel(acceptance=self.agreement, seed=self.seed)
        drafts = self.engine.speculation is not None
        return self._create_hash_model(
            1.0, self._create_hash_model(self.agreement, None) if drafts else None
        )

    def _create_hash_model(self, agreement: float, draft: HashModel | None) -> HashModel:
        return HashModel(
            vocab_size=HASH_VOCAB_SIZE,
            num_blocks=self.engine.num_blocks,
            block_size=self.engine.block_size,
            seed=self.seed,
            agreement=agreement,
            draft=draft,
        )

    def create_world(
        self, engine: Engine, model: VirtualClockModel, *observers: WorldObserver
    ) -> World:
        """Return a world at time 0 with this engine and the workload."""
        objective = LatencyObjective(self.slo_ttft_ms * 1e6, self.slo_itl_ms * 1e6)
        workload, workload_observers = self.create_workload()
        return World(engine, model, workload, *workload_observers, *observers, objective=objective)

    def run(
        self,
        log: DecisionLog | None = None,
        create_observers: Callable[[Engine], Sequence[WorldObserver]] = lambda engine: (),
    ) -> World:
        """Return the world at its end. Fast-forwards uniform steps where only the log observes.

        create_observers   called with the engine before the first event; returns further observers
        """
        engine, model = self.create_engine()
        observers = create_observers(engine)
        world = self.create_world(engine, model, *(() if log is None else (log,)), *observers)
        # Noise is drawn by step number, so a fast-forward cannot add up equal steps.
        if self.model == "lengths" and not observers and not self.cost.startswith(NOISY_PREFIX):
            run_fast_forward(world, log)
        else:
            world.run()
        return world


def create_speculation(num_tokens: int) -> Speculation | None:
    """Return the configuration of a draft model with this many drafts, or None for 0.

    Raises InvalidConfig.
    """
    return Speculation(num_tokens=num_tokens) if num_tokens else None


def summary(world: World) -> dict[str, Any]:
    """Return the figures of a run."""
    scheduler = world.engine.scheduler
    measures: RunMetrics = world.metrics
    return {
        **measures.summary(),
        "sessions": world.sessions.summary(
            scheduler.num_cached_tokens,
            world.engine.config.block_size,
            scheduler.num_loaded_tokens,
        ),
        "steps": world.num_steps,
        "preemptions": scheduler.num_preemptions,
        "prompt_tokens": scheduler.num_queried_tokens,
        "shared_tokens": scheduler.num_cached_tokens,
        **({"loaded_tokens": scheduler.num_loaded_tokens} if scheduler.config.host_tier else {}),
        "drafted": scheduler.num_draft_tokens,
        "accepted": scheduler.num_accepted_tokens,
        "most_blocks": scheduler.pool.peak_used_blocks,
    }


def _file_digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def simulation_code_digest() -> str:
    """Return the digest of all sources that decide a run: engine, embedded models and simulator."""
    root = Path(forge.__file__).parent
    found = sha256()
    # forge/sim is a link in a checkout, which rglob(root) would not follow.
    for folder, pattern in ((root, "*.py"), (root / "models", "*.py"), (root / "sim", "**/*.py")):
        for file in sorted(folder.glob(pattern)):
            name = file.relative_to(root).as_posix()
            found.update(f"{name}\n".encode() + file.read_bytes())
    return found.hexdigest()
