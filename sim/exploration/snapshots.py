"""Snapshots: a state as bytes, from which copies are made, and a compressed queue of them.

Owns the constants that are not copied: configuration, policy, requests. Knows no scheduler: pickle
copies whatever a state consists of, so a new field of the core is copied too.

    state ──save──► bytes ──load──► state, state, ...     constants are looked up by index
                      │
                      └──► Frontier   [ zlib of 64 | zlib of 64 | ... | the last few ]
                           of states and actions: many of a batch follow from the same state

Always true: a snapshot is loaded only by the object that saved it. Snapshots are not written to
files: a checkpoint has actions instead.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from forge.blocks import BlockPool, BlockTable
from forge.commit_gate import CommitGate
from forge.config import DiskTier, EngineConfig, HostTier
from forge.disk_cache import DiskCache
from forge.drafting import NoDrafter
from forge.host_cache import HostCache
from forge.invariants import PlanAudit
from forge.policy import Policy
from forge.policy_calls import PolicyCalls
from forge.prefix_cache import PrefixCache
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import Bind
from forge.sequence import Sequence
from forge.sessions import Session, SessionTable
from forge.sim.exploration.world import AnyTokenMatcher, State

CONSTANT_TYPES = (
    *(EngineConfig, HostTier, DiskTier, Policy, Request, SamplingParams),
    *(NoDrafter, AnyTokenMatcher),
)
"""Types whose values never change: a snapshot has an index in their place."""

OBJECT_TYPES = (
    *(Scheduler, BlockPool, PrefixCache, SessionTable),
    *(CommitGate, PolicyCalls, PlanAudit, HostCache, DiskCache),
)
DATACLASSES: tuple[type[Any], ...] = (BlockTable, Sequence, Session)
"""Types that are saved without names of fields and of types: it takes half the time."""

ACTION_SIZE = 2

BATCH_SIZE = 64
"""Snapshots that are compressed together: they share most of their bytes."""


def constant(index: int) -> object:
    """Name, in a snapshot, the function that looks a constant up. It is never called itself."""
    raise AssertionError("a snapshot was loaded without Snapshots")


def create(index: int) -> object:
    """Return an object without fields: `restore` sets them. Objects may refer to each other."""
    return object.__new__(OBJECT_TYPES[index])


def restore(value: object, state: tuple[tuple[str, ...], tuple[object, ...]]) -> None:
    """Set the fields of an object from their names and values."""
    vars(value).update(zip(*state, strict=True))


def build(index: int, *values: object) -> object:
    """Return a dataclass with these values."""
    return DATACLASSES[index](*values)


class Snapshots:
    """Saves states and makes copies of them. Grows by each constant that is first saved."""

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}
        self._constants: list[object] = []
        self._values: dict[object, object] = {}
        self._names: dict[tuple[str, str], Any] = {
            (__name__, constant.__name__): self._constants.__getitem__
        }
        self._reducers: dict[type, Callable[[Any], Any]] = dict.fromkeys(
            CONSTANT_TYPES, self._reduce
        )
        self._reducers[Bind] = self._reduce_equal
        self._reducers[_FieldNames] = self._reduce_equal
        for index, kind in enumerate(OBJECT_TYPES):
            self._reducers[kind] = _object_reducer(index)
        for index, dataclass in enumerate(DATACLASSES):
            self._reducers[dataclass] = _dataclass_reducer(index)

    def save(self, state: State) -> bytes:
        """Return the snapshot of a state."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5)
        pickler.dispatch_table = self._reducers
        pickler.dump(tuple(state))
        return file.getvalue()

    def load(self, snapshot: bytes) -> State:
        """Return a new copy of the state."""
        loader = _Loader(io.BytesIO(snapshot))
        loader.names = self._names
        return State(*loader.load())

    @staticmethod
    def discard(state: State) -> None:
        """Free a copy that is not used again. Its objects refer to each other: only the garbage
        collector would find them, which takes a sixth of the time of a search.
        """
        vars(state.scheduler).clear()

    def _reduce(self, value: object) -> tuple[Callable[[int], object], tuple[int]]:
        # A value found by identity is kept in `_constants`, so its id is not used again.
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self._constants)
            self._constants.append(value)
        return constant, (index,)

    def _reduce_equal(self, value: object) -> tuple[Callable[[int], object], tuple[int]]:
        # Many are made, and few are different.
        return self._reduce(self._values.setdefault(value, value))


class _FieldNames(tuple[str, ...]):
    """Names of the fields of an object, in their order. A constant."""


def _object_reducer(index: int) -> Callable[[object], tuple[object, ...]]:
    def reduce(value: object) -> tuple[object, ...]:
        state = vars(value)
        return create, (index,), (_FieldNames(state), tuple(state.values())), None, None, restore

    return reduce


def _dataclass_reducer(index: int) -> Callable[[object], tuple[object, ...]]:
    get = attrgetter(*[field.name for field in fields(DATACLASSES[index])])

    def reduce(value: object) -> tuple[object, ...]:
        return build, (index, *get(value))

    return reduce


class _Loader(pickle.Unpickler):
    """Loads a snapshot; each class is looked up once.

    names   what a name of a module stands for, filled as names are met
    """

    names: dict[tuple[str, str], Any]

    def find_class(self, module: str, name: str) -> Any:
        found = self.names.get((module, name))
        if found is None:
            found = self.names[module, name] = super().find_class(module, name)
        return found


class Frontier:
    """Queue of states, first in, first out: the snapshot from which each is one action away."""

    def __init__(self) -> None:
        self._first: deque[bytes] = deque()
        self._batches: deque[tuple[tuple[int, ...], bytes]] = deque()
        self._last: deque[bytes] = deque()

    def push(self, snapshot: bytes, action: int) -> None:
        """Append the state after an action, by number, in the state of the snapshot."""
        self._last.append(snapshot + action.to_bytes(ACTION_SIZE, "little"))
        if len(self._last) == 2 * BATCH_SIZE:
            batch = [self._last.popleft() for _ in range(BATCH_SIZE)]
            sizes = tuple(map(len, batch))
            self._batches.append((sizes, zlib.compress(b"".join(batch), 1)))

    def pop(self) -> tuple[bytes, int]:
        """Remove the oldest state, and return it. Raises IndexError where there is none."""
        if not self._first and self._batches:
            sizes, data = self._batches.popleft()
            file = io.BytesIO(zlib.decompress(data))
            self._first.extend(map(file.read, sizes))
        entry = self._first.popleft() if self._first else self._last.popleft()
        return entry[:-ACTION_SIZE], int.from_bytes(entry[-ACTION_SIZE:], "little")
