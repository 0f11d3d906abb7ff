"""LLM called from several threads: each gets the tokens that one thread gets."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forge.errors import EngineBusy, EngineDead
from forge.llm import LLM
from forge.outputs import TextDelta
from forge.recorder import Recorder
from forge.request import SamplingParams
from forge.seam import StepPlan

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)
PROMPTS = [f"prompt {number} of many" for number in range(80)]
TIMEOUT_S = 60.0


def tokens_of_one_thread(prompts: list[str], params: SamplingParams = PARAMS) -> list[list[int]]:
    with LLM("hash") as llm:
        return [each.token_ids for each in llm.generate(list(prompts), params, use_tqdm=False)]


def read_all(deltas: Iterator[TextDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def generate_one(llm: LLM, prompt: str) -> list[int]:
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    return output.token_ids


def chat_one(llm: LLM, prompt: str) -> list[int]:
    (output,) = llm.chat([{"role": "user", "content": prompt}], PARAMS, use_tqdm=False)
    return output.token_ids


def stream_one(llm: LLM, prompt: str) -> list[int]:
    return read_all(llm.stream(prompt, PARAMS))


@pytest.mark.parametrize("call", [generate_one, chat_one, stream_one])
@pytest.mark.parametrize("depth", [1, 2])
def test_four_threads_get_the_tokens_of_one(
    call: Callable[[LLM, str], list[int]], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM("hash") as alone:
        expected = [call(alone, prompt) for prompt in PROMPTS]
    with LLM("hash", depth=depth) as llm, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: call(llm, prompt), PROMPTS, timeout=TIMEOUT_S))
        assert not llm.engine.has_work
        assert not llm.engine.scheduler.pool.tables
    assert found == expected


def test_a_stream_is_read_by_another_thread_than_the_one_that_opened_it() -> None:
    prompts = PROMPTS[:16]
    with LLM("hash") as llm, ThreadPoolExecutor(4) as pool:
        streams = [llm.stream(prompt, PARAMS) for prompt in prompts]
        assert list(pool.map(read_all, streams, timeout=TIMEOUT_S)) == tokens_of_one_thread(prompts)


def test_threads_that_change_the_engine_leave_outputs_of_others_right() -> None:
    """Every public method that changes the engine runs alongside outputs of another thread."""
    llm, is_done = LLM("hash"), threading.Event()
    errors: list[BaseException] = []

    def change() -> None:
        try:
            while not is_done.is_set():
                with llm.session() as session:
                    session.generate("a turn", PARAMS)
                next(llm.stream("dropped", LONG))
                llm.pause("keep")
                llm.sleep()
                llm.wake()
                llm.update_weights({"seed": 0})
                llm.resume()
        except BaseException as error:
            errors.append(error)

    def generate(prompt: str) -> list[int]:
        while True:
            try:
                return generate_one(llm, prompt)
            except Exception as error:  # a pause of the other thread
                assert "paused" in str(error), error

    changing = threading.Thread(target=change)
    changing.start()
    try:
        found = [generate(prompt) for prompt in PROMPTS[:20]]
    finally:
        is_done.set()
        changing.join(TIMEOUT_S)
        llm.close()
    assert not errors
    assert found == tokens_of_one_thread(PROMPTS[:20])


class CallingRecorder(Recorder):
    """Makes a call within the third plan."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._num_plans = call, 0

    def record_plan(self, plan: StepPlan | None) -> None:
        self._num_plans += 1
        if self._num_plans == 3:
            self._call()


def test_a_stream_that_is_collected_within_a_step_ends_after_it() -> None:
    """The collector may run anywhere, and a stream that is dropped ends its request."""
    with LLM("hash", depth=2) as llm:
        cycle: list[object] = [llm.stream("dropped", LONG)]
        cycle.append(cycle)
        del cycle
        num_requests: list[int] = []

        def collect() -> None:
            gc.collect()
            num_requests.append(len(llm.engine.scheduler.requests))

        llm.engine.recorder = CallingRecorder(collect)
        assert generate_one(llm, "abc") == tokens_of_one_thread(["abc"])[0]
        assert num_requests == [2], "both are open within the step"
        assert not llm.engine.has_work


def test_a_stream_that_another_thread_drops_does_not_wait_for_the_engine() -> None:
    """Its finalizer runs wherever the collector does, perhaps under a lock."""
    with LLM("hash") as llm, ThreadPoolExecutor(1) as pool:
        streams = [llm.stream("dropped", LONG)]

        def drop() -> None:
            pool.submit(streams.clear).result(TIMEOUT_S)

        llm.engine.recorder = CallingRecorder(drop)
        assert generate_one(llm, "abc") == tokens_of_one_thread(["abc"])[0]
        assert not llm.engine.has_work


@pytest.mark.parametrize("call", [generate_one, chat_one, stream_one])
def test_a_call_within_a_call_is_refused_and_changes_nothing(
    call: Callable[[LLM, str], list[int]],
) -> None:
    """A handler of a signal runs anywhere on the main thread, also within a step."""
    with LLM("hash") as llm:
        opened = llm.stream("opened before", PARAMS)
        refused: list[str] = []

        def interrupt() -> None:
            for each in (
                lambda: call(llm, "within"),
                lambda: read_all(opened),
                lambda: llm.end_session("none"),
                lambda: llm.update_weights({"seed": 3}),
                llm.pause,
            ):
                with pytest.raises(EngineBusy, match="within a call") as error:
                    each()
                refused.append(str(error.value))

        llm.engine.recorder = CallingRecorder(interrupt)
        assert generate_one(llm, "abc") == tokens_of_one_thread(["abc"])[0]
        assert len(refused) == 5
        assert not llm.engine.has_work


def test_close_within_a_call_ends_it() -> None:
    with LLM("hash") as llm:
        llm.engine.recorder = CallingRecorder(llm.close)
        (output,) = llm.generate(["abc"], LONG, use_tqdm=False)
        assert output.finish_reason == "abort"


def test_close_waits_for_the_call_of_another_thread() -> None:
    llm = LLM("hash")
    begun = threading.Event()
    llm.engine.recorder = CallingRecorder(begun.set)
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(generate_one, llm, "abc")
        assert begun.wait(TIMEOUT_S)
        llm.close()
        assert output.result(TIMEOUT_S) == tokens_of_one_thread(["abc"])[0]
    with pytest.raises(EngineDead, match="closed"):
        generate_one(llm, "abc")
