"""Text report: the figures of a run, as lines.

Owns the words. Knows no command: it prints the figures that it receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

from forge.sim.cost.calibration_file import model_code_digest, read_calibration
from forge.sim.cost.cost_spec import calibration_path
from forge.sim.scenario import SESSION_OPTIONS, Scenario

ROOFLINE_ORIGIN = "an estimate: served on an H200, tokens took 1.2 to 2.2 times as long"
"""Origin of the costs of a roofline. Figures: wiki/Capacity.md."""

NAMED_IF_GIVEN = {*SESSION_OPTIONS, "scale", "longest_prompt", "longest_output"}
"""Options that the line of a scenario has only where they differ from their default."""

REPLACED_BY = {"requests": "sessions", "pause": "pause_mix"}
"""Option -> the option that replaces it where it is set."""


def describe_scenario(scenario: Scenario) -> str:
    """Return the workload, its options, the policy and the cost model in one line."""
    shape = [
        f"{name.replace('_', ' ')} {_format_option(name, getattr(scenario, name))}"
        for name in scenario.options
        if name not in NAMED_IF_GIVEN or getattr(scenario, name) != getattr(Scenario, name)
        if name not in REPLACED_BY or getattr(scenario, REPLACED_BY[name]) is None
    ]
    return f"{scenario.workload}, {', '.join(shape)}; {scenario.policy}, {scenario.cost}"


def describe_rate(scenario: Scenario, figures: Mapping[str, Any]) -> str:
    """Return the offered rate of requests, and the requested one where there is one."""
    rate = figures["offered_per_s"]
    text = "all requests at once" if rate is None else f"{rate:.2f} requests a second"
    requested_rate = scenario.rate if "rate" in scenario.options else None
    return text if requested_rate is None else f"{text}, {requested_rate:g} requested"


def _format_option(name: str, value: object) -> str:
    if value is None:
        return "of the file" if name == "rate" else "all"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_cost_origin(scenario: Scenario) -> None:
    """Print where costs of a GPU come from. A simulation may run on another machine."""
    file = calibration_path(scenario.cost)
    lines = [ROOFLINE_ORIGIN] if scenario.cost.startswith("roofline:") else []
    if file is not None:
        lines = read_calibration(file).describe_origin(model_code_digest())
    for label, line in zip(("costs", ""), lines, strict=False):
        print(f"{label:<12}{line}")


def print_refusals(figures: Mapping[str, Any]) -> None:
    """Print the reasons of refusals with their remedies, and which requests the times are of."""
    for label, (reason, each) in zip(
        chain(("refused",), repeat("")), figures["refusals"].items(), strict=False
    ):
        print(f"{label:<12}{each['requests']} {reason}, the longest of them: {each['why']}")
    if figures["refused"]:
        num_served = figures["requests"] - figures["refused"]
        print(f"{'':<12}Times are those of the {num_served} requests that were not refused.")


def _print_sessions(sessions: Mapping[str, Any]) -> None:
    completion, resumed = sessions["completion_ms"], sessions["resumed_tokens"]
    fairness = [f"{index:.3f} over {group}" for group, index in sessions["fairness"].items()]
    print(
        f"sessions    {sessions['sessions']}: mean {completion['mean'] / 1e3:.1f} s, p99 "
        f"{completion['p99'] / 1e3:.1f} s; makespan {sessions['makespan_ms'] / 1e3:.1f} s"
    )
    print(f"turns       {sessions['turns']}, {sessions['turns_per_s']:.3f} a second")
    sources = [f"{count} {source.replace('_', ' ')}" for source, count in resumed.items()]
    print(f"resumed     tokens by source: {', '.join(sources)}")
    print(f"fairness    {', '.join(fairness)}: Jain's index of mean turn latencies")


def print_baselines(figures: Mapping[str, Any], baselines: Mapping[str, Any]) -> None:
    """Print what the same sessions reach with an infinite cache and with optimal eviction."""
    infinite = baselines["infinite"]
    sessions = infinite["sessions"]
    infinite_share = infinite["shared_tokens"] / infinite["prompt_tokens"]
    belady_share = baselines["belady_shared_tokens"] / figures["prompt_tokens"]
    print(
        f"infinite    {100 * infinite_share:.1f} % shared, mean session "
        f"{sessions['completion_ms']['mean'] / 1e3:.1f} s, makespan "
        f"{sessions['makespan_ms'] / 1e3:.1f} s: the same run if nothing is evicted"
    )
    print(
        f"belady      {100 * belady_share:.1f} % shared: optimal eviction, the requests in the "
        "order of this run"
    )


def print_report(scenario: Scenario, figures: Mapping[str, Any], digest: str | None) -> None:
    """Print the figures of a run."""
    endings = ", ".join(f"{count} {how}" for how, count in figures["endings"].items())
    steps, seconds = figures["steps"], figures["seconds"]
    share = figures["shared_tokens"] / figures["prompt_tokens"] if figures["prompt_tokens"] else 0.0
    print(f"workload    {describe_scenario(scenario)}, seed {scenario.seed}")
    print(f"requests    {figures['requests']}: {endings or 'none ended'}", end="")
    print(f", {figures['refused']} refused" if figures["refused"] else "")
    print_refusals(figures)
    print(f"offered     {describe_rate(scenario, figures)}")
    print(f"time        {seconds:.3f} s simulated, {steps} steps")
    print(f"{'':<12}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name in ("ttft_ms", "itl_ms", "latency_ms"):
        times = figures[name].values()
        label = name.replace("_", " ")
        print(f"{label:<12}" + "".join(f"{time:>10.2f}" for time in times))
    print(f"output      {figures['output_tokens']} tokens, {figures['tokens_per_s']:.1f} a second")
    print(
        f"goodput     {figures['goodput_per_s']:.2f} requests a second, {figures['good']} of "
        f"{figures['requests']}: at most {scenario.slo_ttft_ms:g} ms to the first token and "
        f"{scenario.slo_itl_ms:g} ms between tokens, their mean"
    )
    print(f"cache       {figures['most_blocks']} of {scenario.engine.num_blocks} blocks at most")
    print(f"preemptions {figures['preemptions']}")
    print(f"prefix      {100 * share:.1f} % of {figures['prompt_tokens']} prompt tokens shared")
    if "loaded_tokens" in figures:
        num_loaded, num_blocks = figures["loaded_tokens"], scenario.host_blocks
        print(f"host        {num_loaded} tokens loaded from {num_blocks} blocks")
    if figures["sessions"]:
        _print_sessions(figures["sessions"])
    if scenario.engine.speculation is not None:
        print(f"drafts      {figures['accepted']} of {figures['drafted']} accepted")
    if digest is not None:
        print(f"log         sha256 {digest}")
