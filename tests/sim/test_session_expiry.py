"""Sessions in a world: when a paused one expires; and in a recording: that replay repeats it."""

from __future__ import annotations

from itertools import count

from forge import __version__
from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.policy import FCFS
from forge.recording import RecordingWriter, build_header
from forge.request import Request
from forge.sim.clock import Clock, VirtualClockModel
from forge.sim.cost.simple import ConstantCost
from forge.sim.length_model import LengthModel
from forge.sim.replay import replay
from forge.sim.units import NS_PER_S
from forge.sim.workloads.workload import FixedArrivals, RequestArrival, fixed_output_params
from forge.sim.world import World
from tests.core.test_sessions import PATIENT
from tests.sim.test_replay import parse_entries, with_checksums

STEP_NS = 1_000_000


def arrival(at_s: int, id: int, session: str = "a", pause_s: float | None = None) -> RequestArrival:
    """Return the arrival of a turn that takes one step."""
    turn = Request(
        id, (id, 1, 2), fixed_output_params(1), session_id=session, expected_pause_s=pause_s
    )
    return RequestArrival(at_s * NS_PER_S, turn)


def create_world(*arrivals: RequestArrival, policy: str = "fcfs") -> World:
    """Return a world with a step of one millisecond and ten seconds to live for each session."""
    model = VirtualClockModel(LengthModel(), Clock(), ConstantCost(STEP_NS))
    config = EngineConfig(num_blocks=8, session_ttl_s=10.0)
    chosen = PATIENT if policy == "patient" else FCFS
    return World(Engine(model, config, policy=chosen), model, FixedArrivals(arrivals))


def test_a_session_expires_when_its_last_pause_has_taken_its_time_to_live() -> None:
    world = create_world(arrival(0, 0), arrival(7, 1))
    world.run()
    assert not world.engine.scheduler.sessions
    assert world.clock.now_ns == (7 + 10) * NS_PER_S + STEP_NS


def test_a_session_that_expects_a_short_pause_expires_sooner() -> None:
    world = create_world(arrival(0, 0, pause_s=1.0))
    world.run()
    assert world.clock.now_ns == (2 + 5) * NS_PER_S + STEP_NS


def test_requests_that_wait_for_a_paused_session_run_when_it_expires() -> None:
    world = create_world(arrival(0, 0), arrival(1, 1, "b"), policy="patient")
    world.run()
    assert world.metrics.ttft.max_ns == 9 * NS_PER_S + 2 * STEP_NS


def test_a_recording_replays_how_sessions_ended() -> None:
    """Blocks of the expired session go in LRU order, those of the ended one first."""
    lines: list[str] = []
    clock = count()
    model = HashModel(num_blocks=8, block_size=4)
    config = EngineConfig(num_blocks=8, block_size=4)
    header = build_header(config, model.vocab_size(), model.eos_token(), "fcfs", __version__)
    recorder = RecordingWriter(lines.append, lambda: next(clock), header)
    engine = Engine(model, config, recorder=recorder)

    def serve(id: int, start: int, length: int, session: str = "") -> None:
        prompt = tuple(range(start, start + length))
        engine.submit(Request(id, prompt, fixed_output_params(1), session_id=session))
        while engine.has_work:
            engine.step()

    for id, session in enumerate("abc"):
        serve(id, 20 * id, 8, session)
    assert not engine.end_session(("", "x")) and not engine.expire_session(("", "a"), 2)
    assert engine.end_session(("", "b")) and engine.expire_session(("", "a"), 1)
    for id, start in enumerate((100, 0, 20, 40), 3):
        serve(id, start, 14)
    recorder.close()
    entries = parse_entries(lines)
    ends = {"end_session": ["", "b"], "expire_session": ["", "a", 1]}
    assert [e for e in entries if e.keys() & ends.keys()] == [{k: v} for k, v in ends.items()]
    assert replay(lines).difference is None
    for name in ends:
        found = replay(with_checksums([e for e in entries if name not in e]))
        assert "another plan than the recorded" in (found.difference or "")
