"""Breadth-first search over all states of a tiny world, with every check in every state.

Owns the search, and the counterexample where a check fails. Knows no file and no clock.

    frontier ──► state ──► each possible action ──► perform ──► digest ──► known? drop the copy
       ▲                                              │
       └────────── audit, save ◄────── new ───────────┘

    safety     every state: forge.invariants.audit; every plan: PlanAudit; each choice ends once
    liveness   no cycle of arrivals, plans and results in which the oldest live sequence of the most
               urgent class is the same throughout, so each one ends, whatever arrives. From a state
               whose successors were not explored: everything ends without new arrivals

Always true: states are found in order of their distance, so a counterexample has as few actions as
any. A cycle begins at the state nearest to the first one.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from forge.policy import POLICIES, Policy
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sim.exploration.canonical import Canonicaliser
from forge.sim.exploration.graph import StateGraph
from forge.sim.exploration.reads import EVERYTHING, NOTHING, Reads
from forge.sim.exploration.snapshots import Frontier, Snapshots
from forge.sim.exploration.world import (
    ADD,
    COMMIT,
    EXPIRE,
    GO,
    KINDS,
    SCHEDULE,
    Action,
    State,
    TinyWorld,
    check,
    create_state,
    live_rows,
    perform,
    possible_actions,
)

STARVATION = "starvation: while others arrive, the oldest of the most urgent class never ends"
LIVELOCK = "livelock: without arrivals and faults, a request never ends"

NO_ACTION = 0xFFFF
"""Number of the action that leads to the first state: none."""

MAX_DRAINS = 100_000
"""States of a frontier from which everything must end: one takes as long as a state to search."""

PROGRESS_INTERVAL = 1000
"""States that are expanded between two calls of `on_progress`."""


class Counterexample(NamedTuple):
    """The error of a check, and the actions that lead to it.

    cycle   actions after `path` that lead back to its end; () where the last action fails
    """

    error: str
    path: tuple[Action, ...]
    cycle: tuple[Action, ...] = ()

    def __str__(self) -> str:
        """Return the error and the actions on one line each."""
        lines = [self.error, *(f"    {action}" for action in self.path)]
        if self.cycle:
            lines += ["again and again:", *(f"    {action}" for action in self.cycle)]
        return "\n".join(lines)


class Report(NamedTuple):
    """Figures of a search.

    num_states       distinct states that were found, and checked
    num_expanded     those from which every action was performed: all of them where it is complete
    num_drained      states after those of the frontier that were checked to end
    depth            most actions of a shortest path to a state
    reached          events of plans: how often each was made
    """

    num_states: int
    num_expanded: int
    num_drained: int
    depth: int
    reached: Counter[str]
    counterexample: Counterexample | None

    @property
    def num_transitions(self) -> int:
        """Actions performed."""
        return sum(self.reached[kind] for kind in KINDS)

    @property
    def is_complete(self) -> bool:
        """True where every reachable state was found, and every action performed in it."""
        return self.num_states == self.num_expanded and self.counterexample is None


class Search:
    """A search of one world. It may be stopped, saved as a StateGraph, and go on from there."""

    def __init__(
        self,
        world: TinyWorld,
        policy: Policy,
        graph: StateGraph | None = None,
        reads: Reads | None = None,
    ) -> None:
        """Begin a search, or continue one from its graph: its last states are made again.

        reads   of the policy; without it, nothing for one of forge.policy, and else everything

        Raises ValueError where the graph is of another world or another scheduler.
        """
        self.world = world
        self.graph = StateGraph() if graph is None else graph
        self.reached: Counter[str] = Counter()
        if reads is None:
            reads = NOTHING if policy in POLICIES.values() else EVERYTHING
        self._canonical = Canonicaliser(world, reads)
        self._snapshots = Snapshots()
        self._frontier = Frontier()
        first = create_state(world, policy)
        if graph is None:
            self.graph.add_state(self._canonical.digest(first.scheduler), 0, 0)
            self._frontier.push(self._snapshots.save(first), NO_ACTION)
        else:
            self._rebuild_frontier(first)

    def run(self, max_states: int, on_progress: Callable[[], object] = lambda: None) -> Report:
        """Search until every state is expanded, `max_states` are found, or a check fails."""
        graph, found = self.graph, None
        while found is None and graph.num_expanded < graph.num_states < max_states:
            found = self._expand()
            if graph.num_expanded % PROGRESS_INTERVAL == 0:
                on_progress()
        num_drained = 0
        if found is None:
            found = self._find_starvation()
        if found is None:
            num_drained, found = self._drain_frontier()
        return Report(
            graph.num_states,
            graph.num_expanded,
            num_drained,
            len(graph.path_to(graph.num_states - 1)),
            self.reached,
            found,
        )

    def _expand(self) -> Counterexample | None:
        """Perform every action in the next state of the frontier."""
        graph, world, snapshots = self.graph, self.world, self._snapshots
        indices, digest = graph.indices, self._canonical.digest
        parent = graph.num_expanded
        state = self._pop_state()
        snapshot = snapshots.save(state)
        actions = list(possible_actions(world, state))
        is_live, can_progress = bool(state.scheduler.sequences), False
        # Where all wait for a paused session, its expiry leads on.
        leading_on = (SCHEDULE, COMMIT) if state.scheduler.can_plan else (SCHEDULE, COMMIT, EXPIRE)
        oldest = oldest_seq_id(state.scheduler)
        waits = []
        for action in actions:
            # The last action needs no copy.
            copy = snapshots.load(snapshot) if action is not actions[-1] else state
            try:
                plan = perform(world, copy, action)
                key = digest(copy.scheduler)
            except Exception as error:
                return self._counterexample(parent, action, error)
            index, number = indices.get(key), graph.action_index(action)
            if index is None:
                try:
                    check(copy)
                except Exception as error:
                    return self._counterexample(parent, action, error)
                index = graph.num_states
                graph.add_state(key, parent, number)
                self._frontier.push(snapshot, number)
            if index != parent and action.is_progress:
                can_progress |= action.kind in leading_on
                if oldest in copy.scheduler.sequences:
                    waits.append((number, index))
            self._count(action, plan)
            snapshots.discard(copy)
        graph.end_expansion(waits)
        if is_live and not can_progress:
            path = tuple(graph.path_to(parent))
            return Counterexample("requests are live, and no plan and no result is left", path)
        return None

    def _pop_state(self, *, keep: bool = False) -> State:
        """Return the next state of the frontier, and `keep` it there as the last one."""
        snapshot, number = self._frontier.pop()
        if keep:
            self._frontier.push(snapshot, number)
        state = self._snapshots.load(snapshot)
        if number != NO_ACTION:
            perform(self.world, state, self.graph.action(number))
        return state

    def _counterexample(self, parent: int, action: Action, error: Exception) -> Counterexample:
        return Counterexample(describe(error), (*self.graph.path_to(parent), action))

    def _count(self, action: Action, plan: StepPlan | None) -> None:
        self.reached[action.kind] += 1
        if plan is not None:
            for event in plan.admitted:
                why, _, shared = event.why.rpartition(", ")
                why = why.partition(", ")[0]
                self.reached["forked" if why.startswith("forked") else why] += 1
                self.reached["prefix hit"] += not shared.startswith("0 ")
            self.reached["preempted"] += sum(" needed, " in e.why for e in plan.preempted)
            self.reached["copied"] += len(plan.copies)
            self.reached["stored"] += len(plan.stores)
            self.reached["loaded"] += len(plan.loads)

    # Liveness.

    def _find_starvation(self) -> Counterexample | None:
        lasso = self.graph.find_cycle()
        if lasso is None:
            return None
        error = STARVATION if any(action.kind == ADD for action in lasso.cycle) else LIVELOCK
        return Counterexample(error, tuple(lasso.stem), tuple(lasso.cycle))

    def _drain_frontier(self) -> tuple[int, Counterexample | None]:
        """Check that everything ends from each state of the frontier, without arrivals or faults.

        Outputs are as long as they may be. Of a larger frontier at most MAX_DRAINS states are
        taken, at equal distances. Return how many states were checked.
        """
        drained: set[bytes] = set()
        first, end = self.graph.num_expanded, self.graph.num_states
        stride = -(-(end - first) // MAX_DRAINS) or 1
        for index in range(first, end):
            if (index - first) % stride:
                self._frontier.push(*self._frontier.pop())
                continue
            state = self._pop_state(keep=True)  # the search may go on later
            path, seen = self.graph.path_to(index), set[bytes]()
            key = self._canonical.digest(state.scheduler)
            while state.scheduler.sequences and key not in drained:
                seen.add(key)
                try:
                    key = self._drain_step(state, key, path)
                except Exception as error:
                    return len(drained), Counterexample(describe(error), tuple(path))
                if key in seen:
                    return len(drained), Counterexample(LIVELOCK, tuple(path))
            drained |= seen
        return len(drained), None

    def _drain_step(self, state: State, key: bytes, path: list[Action]) -> bytes:
        """Schedule, or commit where that changes nothing, and return the state's new digest.

        Where all wait for a session the oldest paused one expires. The action is appended to
        `path`.
        """
        scheduler = state.scheduler
        if scheduler.can_plan and len(scheduler.ledger) < self.world.config.depth:
            path.append(Action(SCHEDULE))
            perform(self.world, state, path[-1])
            new_key = self._canonical.digest(scheduler)
            if new_key != key:
                check(state)
                return new_key
            path.pop()
        if scheduler.can_plan or scheduler.ledger:
            num_rows = len(list(live_rows(scheduler, scheduler.ledger[0])))
            path.append(Action(COMMIT, outcomes=(GO,) * num_rows))
        else:
            paused = [i for i, s in enumerate(scheduler.sessions.values()) if s.is_paused]
            assert paused, "all wait for a paused session, and none is paused"
            path.append(Action(EXPIRE, paused[0]))
        perform(self.world, state, path[-1])
        check(state)
        return self._canonical.digest(scheduler)

    # Resumption.

    def _rebuild_frontier(self, first: State) -> None:
        """Make the states of the frontier again, each from the state before it on its path."""
        graph = self.graph
        num_children: Counter[int] = Counter()
        for index in range(graph.num_expanded, graph.num_states):
            while index and num_children.update([parent := graph.parent(index)]) is None:
                if num_children[parent] > 1:
                    break
                index = parent
        digests = list(graph.indices)
        snapshots = {0: self._snapshots.save(first)}
        for index in range(graph.num_states):
            if index < graph.num_expanded and not num_children[index]:
                continue
            if index:
                parent, number = graph.parent(index), graph.action_to(index)
                snapshot = snapshots[parent]
                state = self._snapshots.load(snapshot)
                perform(self.world, state, graph.action(number))
                num_children[parent] -= 1
                if not num_children[parent]:
                    del snapshots[parent]
            else:
                state, snapshot, number = first, snapshots[0], NO_ACTION
            if self._canonical.digest(state.scheduler) != digests[index]:
                raise ValueError(f"state {index} is another one now")
            if index >= graph.num_expanded:
                self._frontier.push(snapshot, number)
            elif index:
                snapshots[index] = self._snapshots.save(state)


def oldest_seq_id(scheduler: Scheduler) -> int | None:
    """Return the oldest live sequence of the most urgent class."""
    live = [(s.request.priority, s.id) for s in scheduler.sequences.values()]
    return min(live)[1] if live else None


def describe(error: Exception) -> str:
    """Return class and text of an error; where it has no text, the assertion that failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or last.line}"
