"""A closed engine gives everything back at once, also where something still references it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from forge.async_llm import AsyncLLM
from forge.errors import EngineDead
from forge.llm import LLM
from forge.request import SamplingParams, Structure
from tests.engine.option_groups import ANY_PORT, BASE
from tests.engine.test_async_llm import run
from tests.ranks.test_rank_group import is_alive, wait_until

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NUM_ENGINES = 5


def open_files() -> Counter[str]:
    """Count what the descriptors of this process are open for."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(descriptor))
        except OSError:  # that of the listing itself
            continue
    return Counter(name.partition(":[")[0] for name in names if not name.startswith("/proc/"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    resource_tracker.ensure_running()  # multiprocessing keeps it until this process ends
    threads, files = set(threading.enumerate()), open_files()
    yield
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert not open_files() - files


def contents_of(model: Any) -> list[weakref.ref[Any]]:
    """Return references to what has a model in numpy: weights, blocks, host blocks."""
    decoder = model._decoder
    owners = [model, decoder, model._host_blocks, model._files, decoder.pages()[0]]
    weights = getattr(decoder, "weights", {})
    return [weakref.ref(each) for each in (*owners, *weights.values()) if _has_references(each)]


def _has_references(owner: object) -> bool:
    try:
        weakref.ref(owner)
    except TypeError:
        return False
    return True


def every_option(folder: Path, number: int) -> dict[str, Any]:
    return {
        **BASE,
        "depth": 2,
        "draft_model": "tiny-draft",
        "kv_host_gib": 0.01,
        "kv_disk_path": str(folder / "kv"),
        "kv_disk_gib": 0.01,
        "check_kv": True,
        "kv_events": ANY_PORT,
        "kv_events_replay": ANY_PORT,
        "record": str(folder / f"recording-{number}"),
    }


@pytest.mark.parametrize("has_options", [False, True], ids=["plain", "every option"])
def test_an_llm_frees_its_model_when_it_is_closed(has_options: bool, tmp_path: Path) -> None:
    closed: list[Any] = []
    for number in range(NUM_ENGINES if not has_options else 2):
        llm = LLM("tiny", **(every_option(tmp_path, number) if has_options else BASE))
        llm.generate(["Once upon a time", "Once upon"], PARAMS, use_tqdm=False)
        stream = llm.stream("It was", PARAMS)
        next(stream)
        contents = contents_of(llm.engine.model)
        assert len(contents) > 10
        llm.close()
        gc.collect()
        assert not [each() for each in contents if each() is not None]
        assert [delta.finish_reason for delta in stream if delta.finish_reason] == ["abort"]
        closed += [llm, stream]


def test_an_async_llm_frees_its_model_when_it_is_closed(tmp_path: Path) -> None:
    closed: list[Any] = []
    for number in range(2):
        llm = AsyncLLM("tiny", **every_option(tmp_path, number))
        run(llm.generate("Once upon a time", PARAMS))
        contents = contents_of(llm.engine.model)
        llm.close()
        gc.collect()
        assert not [each() for each in contents if each() is not None]
        closed.append(llm)


def test_threads_of_structures_end_with_the_engine() -> None:
    """The fixture counts threads."""
    params = SamplingParams(max_tokens=40, structure=Structure.regex("[ab]{3,9}"))
    closed = []
    for opener in (LLM, AsyncLLM):
        llm: Any = opener("hash")
        output = llm.generate("abc", params)
        if opener is AsyncLLM:
            run(output)
        llm.close()
        closed.append(llm)


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("abc"),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "abc"}]),
    "stream": lambda llm: llm.stream("abc"),
    "end_session": lambda llm: llm.end_session("abc"),
    "pause": lambda llm: llm.pause(),
    "resume": lambda llm: llm.resume(),
    "update_weights": lambda llm: llm.update_weights({"seed": 3}),
    "sleep": lambda llm: llm.sleep(),
    "wake": lambda llm: llm.wake(),
}


def test_a_closed_llm_refuses_every_call() -> None:
    llm = LLM("hash")
    llm.close()
    methods = {name for name, each in vars(LLM).items() if callable(each) and name[0] != "_"}
    assert methods - {"close", "session", "get_default_sampling_params"} == CALLS.keys()
    for call in (*CALLS.values(), lambda llm: llm.session().generate("abc")):
        with pytest.raises(EngineDead, match=r"closed\. Open another LLM"):
            call(llm)
    assert llm.weight_version == "0"


@pytest.mark.long
def test_a_spawned_engine_frees_its_pipes_when_it_is_closed() -> None:
    closed = []
    for _ in range(2):
        llm = AsyncLLM.spawn("hash")
        run(llm.generate("abc", PARAMS))
        llm.close()
        llm.close()
        closed.append(llm)


@pytest.mark.long
def test_a_spawned_engine_ends_with_the_last_reference_to_it() -> None:
    llm = AsyncLLM.spawn("hash")
    run(llm.generate("abc", PARAMS))
    (process,) = [p for p in multiprocessing.active_children() if p.name == "forge-engine"]
    pid = process.pid or 0
    del llm
    gc.collect()
    wait_until(lambda: not is_alive(pid))


def test_the_thread_of_an_engine_ends_with_the_last_reference_to_it() -> None:
    llm = AsyncLLM("hash")
    run(llm.generate("abc", PARAMS))
    del llm
    gc.collect()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "forge-engine"])
