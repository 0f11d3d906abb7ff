"""The graph of explored states: digests, how each was reached, and where progress leads.

Owns the arrays and their file. Knows no scheduler. States are numbered in the order in which they
were found, so the path to a state is a shortest one.

    state      0    1    2    3    4 ...      10 million states take about 2 GB
    digest   16 bytes each, to find a state again
    parent     -    0    0    1    1          state from which it was first reached
    action     -    4    0    4    2          and by which action
    waits     [1] [3 4] [] ...                states after progress that leaves the oldest live
                                              sequence of the most urgent class unfinished

Always true: a cycle of `waits` is starvation, and without one there is none. In a cycle something
is planned and committed, and the same sequence waits throughout.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge.errors import InvalidConfig
from forge.sim.exploration.canonical import DIGEST_SIZE
from forge.sim.exploration.world import Action

FORMAT = 1


class Lasso(NamedTuple):
    """A path to a state, and a path from it back to it."""

    stem: list[Action]
    cycle: list[Action]


class StateGraph:
    """States that were found, in order; the first `num_expanded` have all their successors.

    indices        digest -> number of the state
    actions        all actions that were performed, in order of their first use
    num_expanded   states from which every action was performed
    """

    def __init__(self) -> None:
        self.indices: dict[bytes, int] = {}
        self.actions: dict[Action, int] = {}
        self._actions_by_number: list[Action] = []
        self._parents = array("I")
        self._parent_actions = array("H")
        self._successors = array("I")
        self._successor_actions = array("H")
        self._offsets = array("Q", [0])

    @property
    def num_states(self) -> int:
        """States that were found."""
        return len(self.indices)

    @property
    def num_expanded(self) -> int:
        """States from which every action was performed."""
        return len(self._offsets) - 1

    def add_state(self, digest: bytes, parent: int, action: int) -> None:
        """Append a state that was reached from `parent`."""
        self.indices[digest] = len(self.indices)
        self._parents.append(parent)
        self._parent_actions.append(action)

    def action_index(self, action: Action) -> int:
        """Return the number of an action, a new one where it is met first."""
        number = self.actions.setdefault(action, len(self.actions))
        if number == len(self._actions_by_number):
            self._actions_by_number.append(action)
        return number

    def action(self, number: int) -> Action:
        """Return the action of that number."""
        return self._actions_by_number[number]

    def end_expansion(self, waits: Sequence[tuple[int, int]]) -> None:
        """Append the successors of the next state by progress that leaves its oldest waiting.

        waits   numbers of the action and of the state
        """
        for action, index in waits:
            self._successor_actions.append(action)
            self._successors.append(index)
        self._offsets.append(len(self._successors))

    def parent(self, index: int) -> int:
        """Return the state from which a state was first reached; the first state is its own."""
        return self._parents[index]

    def action_to(self, index: int) -> int:
        """Return the number of the action by which a state was first reached; 0 for the first."""
        return self._parent_actions[index]

    def path_to(self, index: int) -> list[Action]:
        """Return a shortest path from the first state."""
        path = []
        actions = list(self.actions)
        while index:
            path.append(actions[self._parent_actions[index]])
            index = self._parents[index]
        return path[::-1]

    # Starvation.

    def find_cycle(self) -> Lasso | None:
        """Return the lasso of the first state on a cycle of waits, or None. O(states + waits)."""
        degrees = array("I", bytes(4 * self.num_states))
        for index in self._successors:
            degrees[index] += 1
        # States without a predecessor are on no cycle: remove them until none is left.
        stack = [index for index in range(self.num_states) if not degrees[index]]
        num_removed = 0
        while stack:
            num_removed += 1
            for _, index in self._waits(stack.pop()):
                degrees[index] -= 1
                if not degrees[index]:
                    stack.append(index)
        if num_removed == self.num_states:
            return None
        remaining = (index for index in range(self.num_states) if degrees[index])
        return next(lasso for lasso in map(self._lasso_at, remaining) if lasso is not None)

    def _waits(self, index: int) -> list[tuple[int, int]]:
        if index >= self.num_expanded:
            return []
        part = slice(self._offsets[index], self._offsets[index + 1])
        return list(zip(self._successor_actions[part], self._successors[part], strict=True))

    def _lasso_at(self, start: int) -> Lasso | None:
        """Return the lasso of the shortest cycle through a state, or None."""
        came_from: dict[int, tuple[int, int]] = {}
        queue = [start]
        for index in queue:
            for action, successor in self._waits(index):
                if successor not in came_from:
                    came_from[successor] = (index, action)
                    queue.append(successor)
            if start in came_from:
                break
        if start not in came_from:
            return None
        cycle: list[Action] = []
        index, actions = start, list(self.actions)
        while not cycle or index != start:
            index, action = came_from[index]
            cycle.append(actions[action])
        return Lasso(self.path_to(start), cycle[::-1])

    # The file.

    def write(self, path: str, header: dict[str, Any]) -> None:
        """Write the graph. An interrupted call leaves the file of the call before."""
        arrays = self._arrays()
        header = {
            **header,
            "format": FORMAT,
            "num_states": self.num_states,
            "lengths": [len(each) for each in arrays],
            "actions": [[a.kind, a.number, list(a.outcomes)] for a in self.actions],
        }
        part = Path(f"{path}.part")
        with part.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(b"".join(self.indices))
            for each in arrays:
                each.tofile(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    @classmethod
    def read(cls, path: str) -> tuple[StateGraph, dict[str, Any]]:
        """Return the graph of a file, and its header. Raises InvalidConfig."""
        graph = cls()
        try:
            with open(path, "rb") as file:
                header = json.loads(file.readline())
                if header["format"] != FORMAT:
                    raise ValueError
                digests = file.read(DIGEST_SIZE * header["num_states"])
                del graph._offsets[:]
                for each, length in zip(graph._arrays(), header["lengths"], strict=True):
                    each.fromfile(file, length)
        except (OSError, ValueError, KeyError, EOFError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "it is no checkpoint of this version"
            raise InvalidConfig(
                "checkpoint", f"{path!r} cannot be read: {reason}", "Name another file"
            ) from None
        starts = range(0, len(digests), DIGEST_SIZE)
        graph.indices = {digests[i : i + DIGEST_SIZE]: n for n, i in enumerate(starts)}
        graph.actions = {
            Action(kind, number, tuple(outcomes)): index
            for index, (kind, number, outcomes) in enumerate(header["actions"])
        }
        graph._actions_by_number = list(graph.actions)
        return graph, header

    def _arrays(self) -> list[array[int]]:
        return [
            *(self._parents, self._parent_actions),
            *(self._successors, self._successor_actions, self._offsets),
        ]
