"""An exploration from the command line: progress, checkpoints and the printed report.

Owns the text and the header of a checkpoint. Knows no flag. The clock of the machine is read for
the rate alone.

    world       lengths: 4 blocks of 2, 2 slots, budget 3, depth 2, 3 requests; no faults
    states      3363, all of them
    violations  none

Always true: a checkpoint that is continued gives the figures of a search without a break, but for
the time.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from forge.errors import InvalidConfig
from forge.policy import Policy
from forge.sim.exploration.drawing import draw
from forge.sim.exploration.graph import StateGraph
from forge.sim.exploration.reads import SMALL, Reads, explored_policy
from forge.sim.exploration.search import Report, Search
from forge.sim.exploration.world import KINDS, TinyWorld

CHECKPOINT_INTERVAL_S = 600.0
"""Seconds between two checkpoints: one of ten million states takes a minute to write."""


def explore_world(
    world: TinyWorld, policy_name: str, max_states: int, checkpoint: str | None
) -> dict[str, Any]:
    """Explore a world, print the report, and return it as a record for a file.

    policy_name   a name or a FILE.py

    Raises InvalidConfig, among others under `python -O`, which leaves out every check.
    """
    if not __debug__:
        raise InvalidConfig("world", "python -O leaves out every check", "Start without -O")
    policy, reads = explored_policy(policy_name, world)
    names = {"world": describe(world), "policy": describe_policy(policy_name)}
    search, seconds_before = _open_search(world, policy, reads, names, checkpoint)
    num_before = search.graph.num_states
    print(f"world       {names['world']}", flush=True)
    print(f"policy      {names['policy']}", flush=True)
    if num_before > 1:
        print(f"continued   from {num_before} states", flush=True)
    start_s = saved_s = time.perf_counter()

    def save() -> None:
        elapsed_s = seconds_before + time.perf_counter() - start_s
        if checkpoint is not None:
            header = {**names, "seconds": elapsed_s, "reached": search.reached}
            search.graph.write(checkpoint, header)

    def on_progress() -> None:
        nonlocal saved_s
        if time.perf_counter() - saved_s > CHECKPOINT_INTERVAL_S:
            save()
            saved_s = time.perf_counter()
            graph = search.graph
            print(
                f"found       {graph.num_states} states, {graph.num_expanded} expanded", flush=True
            )

    report = search.run(max_states, on_progress)
    save()
    seconds = seconds_before + time.perf_counter() - start_s
    print(format_report(report, seconds))
    if report.counterexample is not None:
        print(draw(world, policy, report.counterexample))
    return {
        **names,
        "states": report.num_states,
        "expanded": report.num_expanded,
        "complete": report.is_complete,
        "transitions": report.num_transitions,
        "drained": report.num_drained,
        "depth": report.depth,
        "seconds": seconds,
        "reached": dict(sorted(report.reached.items())),
        "error": None if report.counterexample is None else str(report.counterexample),
    }


def _open_search(
    world: TinyWorld, policy: Policy, reads: Reads, names: dict[str, str], checkpoint: str | None
) -> tuple[Search, float]:
    """Return a new search, or the one of the checkpoint and its seconds so far.

    names   what a checkpoint must be of
    """
    if checkpoint is None or not Path(checkpoint).exists():
        return Search(world, policy, reads=reads), 0.0
    graph, header = StateGraph.read(checkpoint)
    for name, value in names.items():
        if header[name] != value:
            raise InvalidConfig(
                "checkpoint", f"{checkpoint!r} is of the {name} {header[name]}", "Name another file"
            )
    try:
        search = Search(world, policy, graph, reads)
    except ValueError as error:
        raise InvalidConfig(
            "checkpoint", f"{checkpoint!r} is of another scheduler: {error}", "Name another file"
        ) from None
    search.reached = Counter(header["reached"])
    return search, header["seconds"]


def describe(world: TinyWorld) -> str:
    """Return name, sizes and faults of a world on one line."""
    config = world.config
    sizes = f"{min(world.sizes)} to {max(world.sizes)}" if world.sizes else f"{config.num_blocks}"
    faults = ", ".join((*world.faults, *(("resize",) if world.sizes else ()))) or "no faults"
    return (
        f"{world.name}: {sizes} blocks of {config.block_size}, {config.max_num_seqs} slots, "
        f"budget {config.max_num_batched_tokens}, depth {config.depth}, "
        f"{len(world.menu)} requests; {faults}"
    )


def describe_policy(name: str) -> str:
    """Return the name of a policy, with the constants that are small in a tiny world."""
    constants = [f"{constant} = {value}" for constant, value in SMALL.get(name, {}).items()]
    return f"{name} with {', '.join(constants)}" if constants else name


def format_report(report: Report, seconds: float) -> str:
    """Return the figures of a search, a line each."""
    open_states = report.num_states - report.num_expanded
    scope = "all of them" if report.is_complete else f"{open_states} of them not expanded"
    lines = [
        f"states      {report.num_states}, {scope}",
        f"actions     {report.num_transitions}, at most {report.depth} to a state",
        f"rate        {report.num_states / max(seconds, 1e-9):.0f} states a second",
    ]
    events = [name for name in sorted(report.reached) if name not in KINDS and report.reached[name]]
    lines.append("reached     " + ", ".join(f"{name} {report.reached[name]}" for name in events))
    lines.append(f"violations  {'none' if report.counterexample is None else 'one:'}")
    return "\n".join(lines)
