"""Garbage collection: never during imports or a capture, never over what a start made."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from forge.config import EngineConfig
from forge.models import loader
from forge.models.embedded import embedded_folder
from forge.models.gc_control import freeze_gc, freeze_objects, pause_gc
from forge.models.hash import HashModel
from forge.models.loaded_model import LoadedModel
from forge.models.loader import import_checkpoint_packages, load_model
from forge.tokenizer import ByteTokenizer

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""


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


def test_objects_are_frozen_without_a_collection():
    gone: list[str] = []
    Cycle(gone)
    with freeze_objects():
        gc.collect()
        assert gone == [], "garbage that was frozen is kept"
        Cycle(gone)
        gc.collect()
        assert gone == ["destroyed"], "garbage made since is collected"
    gc.collect()
    assert gone == ["destroyed", "destroyed"]


def test_objects_stay_frozen_until_the_outer_context_ends():
    with freeze_objects():
        with freeze_gc():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


class CollectorState(ModuleType):
    """A package in place of forge.models.hf that records the collector's state as it is used."""

    def __init__(self, gone: list[str]) -> None:
        super().__init__("forge.models.hf")
        self.__path__ = []
        self.gone = gone
        self.states: list[tuple[str, bool, bool]] = []

    def record(self, event: str) -> None:
        self.states.append((event, gc.isenabled(), gc.get_freeze_count() > 0))

    def __getattr__(self, name: str) -> Any:
        if name not in ("create_tier_setup", "open_model", "open_pair"):
            raise AttributeError(name)
        assert self.gone == ["destroyed"], "garbage of before was not collected"
        self.record("import")
        return self.open if name.startswith("open") else self.create_nothing

    def create_nothing(self, *arguments: object) -> None:
        """Return None: there are no KV tiers."""

    @contextmanager
    def open(self, *arguments: object, communicator: object = None) -> Iterator[LoadedModel]:
        self.record("start")
        tokenizer = ByteTokenizer()
        model = HashModel(
            vocab_size=tokenizer.vocab_size,
            eos_token=tokenizer.eos_token,
            num_blocks=4,
            block_size=16,
        )
        yield LoadedModel("", model, tokenizer, EngineConfig(num_blocks=4))
        self.record("close")


@pytest.mark.parametrize("draft", [{}, {"draft_model": "tiny-draft"}], ids=["model", "pair"])
def test_nothing_is_collected_during_imports_and_their_objects_are_frozen(
    draft: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    gone: list[str] = []
    package = CollectorState(gone)
    monkeypatch.setitem(sys.modules, "forge.models.hf", package)
    Cycle(gone)
    with load_model(TINY, {"device": "cpu", "load_format": "dummy", **draft}):
        package.record("serve")
    # An import reads an attribute more than once.
    assert list(dict.fromkeys(package.states)) == [
        ("import", False, False),
        ("start", True, True),
        ("serve", True, True),
        ("close", True, True),
    ]
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_nothing_is_collected_while_the_server_imports_the_same_packages(
    monkeypatch: pytest.MonkeyPatch,
):
    states: list[bool] = []
    monkeypatch.setattr(loader, "import_module", lambda name: states.append(gc.isenabled()))
    import_checkpoint_packages(TINY)
    assert states == [False]
    assert gc.isenabled()
