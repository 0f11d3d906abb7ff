"""Fleet report: the figures of the run of a fleet, as lines.

Owns the words. Knows no command: it prints the figures that it receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.sim.fleet_scenario import FleetScenario, share_percent
from forge.sim.reports.text_report import describe_rate, describe_scenario


def print_fleet_report(
    fleet: FleetScenario, figures: Mapping[str, Any], digest: str | None
) -> None:
    """Print the figures of a run."""
    base = fleet.base
    endings = ", ".join(f"{count} {how}" for how, count in figures["endings"].items())
    print(f"workload    {describe_scenario(base)}, seed {base.seed}")
    print(
        f"fleet       {fleet.num_replicas} replicas of {base.engine.num_blocks} blocks, "
        f"router {fleet.router}, fed by {fleet.feed}"
    )
    print(f"requests    {figures['requests']}: {endings or 'none ended'}")
    if figures["refused"]:
        print(f"{'':<12}the last refused one: {figures['last_refusal']}")
    print(f"offered     {describe_rate(base, figures)}")
    print(f"time        {figures['seconds']:.3f} s simulated, {figures['steps']} steps")
    print(f"{'':<12}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name in ("ttft_ms", "itl_ms", "latency_ms"):
        times = figures[name].values()
        print(f"{name.replace('_', ' '):<12}" + "".join(f"{time:>10.2f}" for time in times))
    print(f"output      {figures['output_tokens']} tokens, {figures['tokens_per_s']:.1f} a second")
    print(
        f"goodput     {figures['goodput_per_s']:.2f} requests a second, {figures['good']} of "
        f"{figures['requests']}: at most {base.slo_ttft_ms:g} ms to the first token and "
        f"{base.slo_itl_ms:g} ms between tokens, their mean"
    )
    print(f"moved       {figures['moved']} requests, {figures['failed']} failed with their replica")
    print(f"preemptions {figures['preemptions']}")
    print(
        f"prefix      {share_percent(figures):.1f} % of {figures['prompt_tokens']} prompt tokens "
        "shared"
    )
    if base.host_blocks:
        print(f"host        {figures['loaded_tokens']} tokens loaded")
    print(f"imbalance   {figures['imbalance']:.2f}: most prompt tokens of a replica, by the mean")
    print(
        f"{'replica':<12}{'requests':>10}{'tokens':>12}{'shared %':>10}{'steps':>10}{'blocks':>10}"
    )
    for each in figures["replicas"]:
        print(
            f"{each['id']:<12}{each['requests']:>10}{each['routed_tokens']:>12}"
            f"{share_percent(each):>10.1f}{each['steps']:>10}{each['most_blocks']:>10}"
        )
    if digest is not None:
        print(f"log         sha256 {digest}")
