"""AgentLoad: the sessions of agents that a benchmark runs, as values.

Owns their number, lengths and pauses, and the fields that describe them to a server. Knows no
server. Draws are those of the simulator, so a real and a simulated run have the same sessions.

    AgentLoad ─► Scenario ─► AgentSessions ─► requests
      agents = clients    sessions x turns = requests    new = prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge.config import MAX_GEOMETRY, EngineConfig
from forge.errors import InvalidConfig
from forge.request import MAX_PAUSE_S
from forge.sim.scenario import Scenario
from forge.sim.workloads.agents import AgentSessions
from forge.sim.workloads.length_distributions import parse_lengths
from forge.sim.workloads.request_labels import LabeledWorkload
from forge.sim.workloads.workload import Workload

MAX_COUNT = 1_000_000


@dataclass(frozen=True, kw_only=True)
class AgentLoad:
    """The sessions of a run. Raises InvalidConfig naming the field.

    agents     sessions that are open at a time
    sessions   sessions in all
    turns      most turns of a session
    system     tokens of the system prompt, which all sessions share
    new        new tokens of a turn: see forge.sim.workloads.length_distributions
    output     tokens of an answer
    pause      mean seconds of a tool, exponential; 0: none
    max_len    a session ends early where prompt and answer would be longer; None: no limit
    seed       seed of all draws
    """

    agents: int = 64
    sessions: int = 128
    turns: int = 20
    system: int = 8192
    new: str = "exp:2000"
    output: str = "exp:300"
    pause: float = 3.0
    max_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("agents", "sessions", "turns", "system"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                problem = f"{getattr(self, name)} is not from 1 to {MAX_COUNT}"
                raise InvalidConfig(name, problem, "Give 1 or more")
        if not 0 <= self.pause <= MAX_PAUSE_S:
            problem = f"{self.pause:g} is not from 0 to {MAX_PAUSE_S:g}"
            raise InvalidConfig("pause", problem, "Give seconds, or 0")
        try:
            parse_lengths("prompt", self.new)
        except InvalidConfig:
            remedy = "Give 512, 16-1024 or exp:300, say"
            raise InvalidConfig("new", f"{self.new[:64]!r} is no length", remedy) from None
        parse_lengths("output", self.output)

    def scenario(self) -> Scenario:
        """Return the scenario of the simulator that has these sessions."""
        max_len = MAX_GEOMETRY["max_model_len"] if self.max_len is None else self.max_len
        return Scenario(
            workload="agent",
            clients=self.agents,
            requests=self.sessions * self.turns,
            turns=self.turns,
            system=self.system,
            prompt=self.new,
            output=self.output,
            pause=self.pause,
            seed=self.seed,
            engine=EngineConfig(max_model_len=max_len),
        )

    def create_workload(self, get_answer: Callable[[int, int], Sequence[int]]) -> Workload:
        """Return the sessions with these answers: (request, number of tokens) -> tokens."""
        workload, _ = self.scenario().create_workload()
        assert isinstance(workload, LabeledWorkload), "every scenario labels its requests"
        sessions = workload.workload
        assert isinstance(sessions, AgentSessions), "the scenario is of agents"
        return replace(sessions, get_answer=get_answer)

    def turn_of(self, request_id: int) -> tuple[int, int]:
        """Return the session of a request, and the number of the turn in it."""
        return divmod(request_id, self.turns)

    def session_fields(self, request_id: int) -> Mapping[str, Any]:
        """Return the fields of forge's API that describe the session of a request.

        The last of `turns` ends its session; one that ends early is left to the server's limits.
        """
        session, turn = self.turn_of(request_id)
        fields: dict[str, Any] = {"session_id": f"{self.seed}-{session}"}
        if turn + 1 == self.turns:
            return {**fields, "session_end": True}
        return {**fields, "expected_pause_s": self.pause}

    def no_fields(self, request_id: int) -> Mapping[str, Any]:
        """Return no fields: the server recognises sessions by their prompts, or does not."""
        return {}
