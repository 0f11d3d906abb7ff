"""Snapshots: a state as bytes, from which copies are made, and a compressed queue of them.

Owns the constants that are not copied: configuration, policy, requests. Knows no scheduler: pickle
copies whatever a state consists of, so a new field of the core is copied too.

    state ──save──► bytes ──load──► state, state, ...     constants are looked up by index
                      │
                      └──► Frontier   [ zlib of 64 | zlib of 64 | ... | the last few ]

Always true: a snapshot is loaded only by the object that saved it. Snapshots are not written to
files: a checkpoint has actions instead.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from forge.config import EngineConfig
from forge.drafting import NoDrafter
from forge.policy import Policy
from forge.request import Request, SamplingParams
from forge.sim.exploration.world import AnyTokenMatcher, State

CONSTANT_TYPES = (
    *(EngineConfig, Policy, Request, SamplingParams),
    *(NoDrafter, AnyTokenMatcher),
)
"""Types whose values never change: a snapshot has an index in their place."""


BATCH_SIZE = 64
"""Snapshots that are compressed together: they share most of their bytes."""


def constant(index: int) -> object:
    """Name, in a snapshot, the function that looks a constant up. It is never called itself."""
    raise AssertionError("a snapshot was loaded without Snapshots")


class Snapshots:
    """Saves states and makes copies of them. Grows by each constant that is first saved."""

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}
        self._constants: list[object] = []
        self._names: dict[tuple[str, str], Any] = {
            (__name__, constant.__name__): self._constants.__getitem__
        }
        self._reducers: dict[type, Callable[[Any], Any]] = dict.fromkeys(
            CONSTANT_TYPES, self._reduce
        )

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

    def _reduce(self, value: object) -> tuple[Callable[[int], object], tuple[int]]:
        # A value found by identity is kept in `_constants`, so its id is not used again.
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self._constants)
            self._constants.append(value)
        return constant, (index,)


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
    """Queue of snapshots, first in, first out. About 400 bytes each."""

    def __init__(self) -> None:
        self._first: deque[bytes] = deque()
        self._batches: deque[tuple[tuple[int, ...], bytes]] = deque()
        self._last: deque[bytes] = deque()

    def push(self, snapshot: bytes) -> None:
        """Append a snapshot."""
        self._last.append(snapshot)
        if len(self._last) == 2 * BATCH_SIZE:
            batch = [self._last.popleft() for _ in range(BATCH_SIZE)]
            sizes = tuple(map(len, batch))
            self._batches.append((sizes, zlib.compress(b"".join(batch), 1)))

    def pop(self) -> bytes:
        """Remove the oldest snapshot, and return it. Raises IndexError where there is none."""
        if not self._first and self._batches:
            sizes, data = self._batches.popleft()
            file = io.BytesIO(zlib.decompress(data))
            self._first.extend(map(file.read, sizes))
        return self._first.popleft() if self._first else self._last.popleft()
