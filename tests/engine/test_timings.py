"""Times of choices in the engine: on a clock that the test sets, of requests that return them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from forge.async_llm import AsyncLLM
from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidRequest
from forge.llm import LLM
from forge.models.hash import HashModel
from forge.pause import PauseMode
from forge.recorder_chain import RecorderChain
from forge.recording import RecordingWriter, build_header
from forge.request import Request, SamplingParams
from forge.timings import ChoiceTimings, TimedEvent
from forge.timings_recorder import TimingsRecorder
from forge.weights import NamedWeights

NUM_BLOCKS, BLOCK_SIZE = 6, 4


class TimedEngine:
    """An engine whose step n takes place at n seconds."""

    def __init__(self, max_num_seqs: int = 8) -> None:
        config = EngineConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=8,
            max_num_seqs=max_num_seqs,
            depth=1,
        )
        self.engine = Engine(HashModel(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), config)
        self.now_s = 0.0
        self.recorder = TimingsRecorder(
            self.engine.scheduler, RecorderChain(self.engine), lambda: self.now_s
        )
        self.timings: dict[tuple[int, int], ChoiceTimings | None] = {}

    def submit(self, request_id: int, prompt_len: int, *, is_timed: bool, n: int = 1) -> None:
        params = SamplingParams(n=n, max_tokens=9, ignore_eos=True, temperature=0)
        request = Request(
            request_id,
            range(request_id, request_id + prompt_len),
            params,
            return_timings=is_timed,
        )
        self.engine.submit(request)
        self.recorder.add(request, self.now_s)

    def step(self) -> None:
        self.now_s += 1
        for delta in self.recorder.label(self.engine.step()):
            if delta.finish is not None:
                self.timings[delta.request_id, delta.choice] = delta.timings

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def test_each_phase_of_a_choice_has_its_time() -> None:
    """A prompt of eleven takes two steps of eight, and each later token one step."""
    timed = TimedEngine()
    timed.now_s = 0.5
    timed.submit(0, 11, is_timed=True)
    timed.now_s = 4.0
    timed.run()
    assert timed.timings[0, 0] == ChoiceTimings(
        arrival_s=0.5,
        first_step_s=5.0,
        first_token_s=6.0,
        last_token_s=14.0,
        events=(TimedEvent(5.0, "admitted", "new, 0 tokens shared"),),
    )


def test_only_requests_that_return_timings_are_timed() -> None:
    timed = TimedEngine()
    timed.submit(0, 5, is_timed=False)
    assert timed.engine.recorder is None
    timed.submit(1, 5, is_timed=True, n=2)
    assert timed.engine.recorder is not None
    timed.run()
    assert timed.timings[0, 0] is None
    assert all(timed.timings[1, choice] is not None for choice in range(2))
    assert timed.engine.recorder is None, "the next requests pay for clocks that nothing reads"


def test_preemptions_and_recomputed_tokens_are_those_of_the_scheduler() -> None:
    """Six blocks of four for three requests that grow to five, four and five."""
    timed = TimedEngine()
    for request_id, prompt_len in ((0, 11), (100, 5), (200, 9)):
        timed.submit(request_id, prompt_len, is_timed=True)
    timed.run()
    all_timings = [each for each in timed.timings.values() if each is not None]
    scheduler = timed.engine.scheduler
    assert len(all_timings) == 3
    assert sum(each.num_preemptions for each in all_timings) == scheduler.num_preemptions > 0
    recomputed = sum(each.num_recomputed_tokens for each in all_timings)
    assert recomputed == scheduler.num_recomputed_tokens > 0
    for each in all_timings:
        names = [event.name for event in each.events]
        assert names == ["admitted"] + ["preempted", "admitted"] * each.num_preemptions
        assert [event.time_s for event in each.events] == sorted(e.time_s for e in each.events)


def test_a_preempted_choice_keeps_the_time_of_its_first_step() -> None:
    timed = TimedEngine()
    timed.submit(0, 5, is_timed=True)
    timed.step()
    timed.engine.update_weights(NamedWeights({"seed": 3}), namespace="new")
    timed.run()
    timings = timed.timings[0, 0]
    assert timings is not None and timings.num_preemptions == 1
    assert (timings.first_step_s, timings.events[-1].name) == (1.0, "admitted")


def test_a_choice_that_never_ran_has_its_arrival_alone() -> None:
    timed = TimedEngine(max_num_seqs=1)
    timed.submit(0, 5, is_timed=False)
    timed.submit(1, 5, is_timed=True)
    timed.step()
    timed.engine.abort(1)
    timed.step()
    assert timed.timings[1, 0] == ChoiceTimings(arrival_s=0.0)
    assert timed.engine.recorder is None


def test_requests_of_a_pause_are_timed_from_their_submission() -> None:
    timed = TimedEngine()
    timed.engine.pause(PauseMode.KEEP)
    timed.submit(0, 5, is_timed=True)
    timed.now_s = 7.0
    timed.engine.resume()
    timed.run()
    timings = timed.timings[0, 0]
    assert timings is not None and (timings.arrival_s, timings.first_step_s) == (0.0, 8.0)


def test_recorders_come_and_go_in_any_order() -> None:
    """That of --record stays, and gets each call first."""
    engine = TimedEngine().engine
    calls: list[str] = []

    class Named(TimingsRecorder):
        def __init__(self, name: str) -> None:
            self.name = name

        def record_abort(self, request_id: int) -> None:
            calls.append(self.name)

    engine.recorder = first = Named("first")
    chain, one, two = RecorderChain(engine), Named("one"), Named("two")
    for change in (lambda: None, lambda: chain.add(one), lambda: chain.add(two)):
        change()
        engine.abort(7)
    chain.remove(one)
    engine.abort(7)
    chain.remove(two)
    engine.abort(7)
    chain.remove(first)
    assert engine.recorder is None
    assert calls == ["first", "first", "one", "first", "one", "two", "first", "two", "first"]


@pytest.mark.parametrize("llm_type", [LLM, AsyncLLM])
def test_outputs_of_an_llm_have_their_timings(llm_type: Callable[..., LLM | AsyncLLM]) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    llm = llm_type("hash")
    try:
        if isinstance(llm, LLM):
            (output,) = llm.generate("Once", params, return_timings=True)
            (plain,) = llm.generate("Once", params)
        else:
            output = asyncio.run(llm.generate("Once", params, return_timings=True))
            plain = asyncio.run(llm.generate("Once", params))
    finally:
        llm.close()
    timings = output.choices[0].timings
    assert timings is not None and plain.choices[0].timings is None
    assert timings.first_step_s is not None and timings.first_token_s is not None
    assert timings.arrival_s <= timings.first_step_s <= timings.first_token_s


def test_a_recording_has_the_external_id_and_no_clock_of_the_request() -> None:
    """A field that decides nothing and that no reader of a recording needs is left out."""
    timed = TimedEngine()
    lines: list[str] = []
    header = build_header(timed.engine.config, 256, 0, "fcfs", "0")
    timed.engine.recorder = RecordingWriter(lines.append, count().__next__, header)
    request = Request(0, (1, 2), external_id="req-1", return_timings=True)
    timed.engine.submit(request)
    assert '"external_id":"req-1"' in lines[-1]
    assert "timings" not in lines[-1]


@pytest.mark.parametrize("fields", [{"return_timings": 1}, {"external_id": 7}])
def test_fields_of_another_type_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        Request(0, (1,), **fields)  # type: ignore[arg-type]
