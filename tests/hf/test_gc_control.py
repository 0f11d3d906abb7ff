"""Garbage collection: never during a capture, never over the objects that a start made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from forge.models.hf.loading.gc_control import freeze_gc, pause_gc

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def unfrozen_gc() -> Iterator[None]:
    """Unfreeze what the tests themselves have frozen, as in a server that starts."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    """Garbage that only the collector frees; it reports its destruction."""

    def __init__(self, gone: list[str]) -> None:
        self.gone = gone
        self.itself = self

    def __del__(self) -> None:
        self.gone.append("destroyed")


def test_garbage_is_collected_before_a_capture_and_never_during_one():
    gone: list[str] = []
    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        Cycle(gone)
        with pause_gc():
            assert gone == ["destroyed"]
            Cycle(gone)
            kept = [[n] for n in range(10_000)]
            assert gone == ["destroyed"] and len(kept) == 10_000
        assert gc.isenabled()
        kept += [[n] for n in range(10_000)]
        assert gone == ["destroyed", "destroyed"]
    finally:
        gc.set_threshold(*before)


def test_what_is_there_when_serving_begins_is_not_looked_at_until_it_ends():
    gone: list[str] = []
    with freeze_gc():
        kept = [Cycle(gone)]
        assert gc.get_freeze_count() > 10_000
        assert not any(each is kept for each in gc.get_objects(generation=2))
        kept.clear()
        gc.collect()
        assert gone == ["destroyed"], "garbage made while serving is collected"
    assert gc.get_freeze_count() == 0


def test_what_was_there_is_collected_when_serving_has_ended():
    gone: list[str] = []
    kept = [Cycle(gone)]
    with freeze_gc():
        kept.clear()
        gc.collect()
        assert gone == []
    gc.collect()
    assert gone == ["destroyed"]


def test_objects_that_others_have_frozen_stay_frozen():
    gc.freeze()
    try:
        with freeze_gc():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
