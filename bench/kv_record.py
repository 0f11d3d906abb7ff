"""Record of returning prefixes: entries of one run, the bound of a load, and the break-even length.

Owns what follows from the entries, and the merge of RESULT lines of two engines. Knows no engine.

    entries of forge ─┬─► bounds       host <= device + bytes / (0.9 x plain copy) + 2 ms
    entries of vLLM  ─┘   break_even   from which length on a tier is quicker than computing
                          ratios       vLLM's time / forge's

    python -m forge.bench.kv_record NAME LOG... [--commit 1a2b3c4]     bench/results/NAME.json

Always true: all entries of a record are of one machine and one commit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge.bench.peers import RESULTS, parse_results
from forge.bench.result_file import create_result, write_json
from forge.bench.table_format import OURS, THEIRS
from forge.errors import ForgeError, InvalidConfig

BENCHMARK = "kv_returning"

LINK_SHARE = 0.9
FIXED_MS = 2.0
"""A load takes at most its bytes at this share of a plain pinned copy, and so many ms more."""

SHARED = ("machine", "commit")
"""Fields that all lines of one run have in common. They are the record's, not an entry's."""

UNKNOWN = "unknown"
"""The commit of a line that was measured in a tree without git."""

Entry = Mapping[str, Any]
Key = tuple[str, str]


def times_of(entries: Sequence[Entry]) -> dict[Key, dict[str, dict[int, Entry]]]:
    """Return (engine, shape) -> tier -> tokens of the prefix -> entry, without errors."""
    times: dict[Key, dict[str, dict[int, Entry]]] = {}
    for entry in entries:
        if "error" not in entry:
            tiers = times.setdefault((entry["engine"], entry["shape"]), {})
            tiers.setdefault(entry["tier"], {})[entry["prefix_tokens"]] = entry
    return times


def bounds(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the bound of each length that has a hit of both pools and a plain copy.

    bound_ms   device hit + bytes / (LINK_SHARE x plain copy) + FIXED_MS
    load_gb_s  bytes / (host - device), or None where the host hit was quicker
    """
    found = []
    for (engine, shape), tiers in times_of(entries).items():
        for length, host in tiers.get("host", {}).items():
            device, plain = tiers.get("device", {}).get(length), host.get("plain_copy_gb_s")
            if device is None or plain is None:
                continue
            num_bytes, load_ms = host["prefix_bytes"], host["ttft_ms"] - device["ttft_ms"]
            bound_ms = device["ttft_ms"] + num_bytes / (LINK_SHARE * plain * 1e6) + FIXED_MS
            found.append(
                {
                    "engine": engine,
                    "shape": shape,
                    "prefix_tokens": length,
                    "host_ms": host["ttft_ms"],
                    "bound_ms": round(bound_ms, 3),
                    "is_within": host["ttft_ms"] <= bound_ms,
                    "load_gb_s": round(num_bytes / load_ms / 1e6, 2) if load_ms > 0 else None,
                    "plain_copy_gb_s": plain,
                }
            )
    return found


def break_even(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return, for each engine and tier, by how much a hit is quicker than computing the prefix.

    ratio    time of a miss / time of a hit, by tokens of the prefix
    tokens   length above which the ratio stays over 1, linear between two lengths; the shortest
             length where it always is, None where it is not at the longest
    """
    found = []
    for (engine, shape), tiers in times_of(entries).items():
        misses = tiers.pop("miss", {})
        for tier, hits in tiers.items():
            lengths = sorted(hits.keys() & misses.keys())
            if not lengths:
                continue
            gains = [(n, misses[n]["ttft_ms"] - hits[n]["ttft_ms"]) for n in lengths]
            ratios = {str(n): misses[n]["ttft_ms"] / hits[n]["ttft_ms"] for n in lengths}
            found.append(
                {
                    "engine": engine,
                    "shape": shape,
                    "tier": tier,
                    "tokens": last_crossing(gains),
                    "ratio": {n: round(value, 3) for n, value in ratios.items()},
                }
            )
    return found


def last_crossing(gains: Sequence[tuple[int, float]]) -> int | None:
    """Return where the gain becomes positive for the last time, or None where it ends below 0."""
    if gains[-1][1] <= 0:
        return None
    crossing = gains[0][0]
    for (start, before), (end, after) in pairwise(gains):
        if before <= 0 < after:
            crossing = round(start + (end - start) * -before / (after - before))
    return crossing


def ratios(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return how many times as fast forge is at each tier and length that both engines have."""
    times = times_of(entries)
    found = []
    for (engine, shape), tiers in times.items():
        theirs = times.get((THEIRS, shape), {})
        if engine != OURS:
            continue
        for tier, of in tiers.items():
            for length in sorted(of.keys() & theirs.get(tier, {}).keys()):
                value = theirs[tier][length]["ttft_ms"] / of[length]["ttft_ms"]
                about = {"shape": shape, "tier": tier, "prefix_tokens": length}
                found.append({**about, "ratio": round(value, 3)})
    return found


def create_figures(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the entries, and what follows from them."""
    return {
        "entries": [dict(each) for each in entries],
        "bounds": bounds(entries),
        "break_even": break_even(entries),
        "ratios": ratios(entries),
    }


def show(figures: Mapping[str, Any]) -> None:
    """Print what follows from the entries."""
    for each in figures["bounds"]:
        verb = "within" if each["is_within"] else "OVER"
        print(
            f"{each['engine']:<6}{each['prefix_tokens']:>7} tokens from host memory: "
            f"{each['host_ms']:.2f} ms, {verb} the bound of {each['bound_ms']:.2f} ms; load "
            f"{each['load_gb_s']} GB/s, plain copy {each['plain_copy_gb_s']:.2f} GB/s"
        )
    for each in figures["break_even"]:
        gains = ", ".join(f"{n}: {value:.2f}x" for n, value in each["ratio"].items())
        start = "at no length" if each["tokens"] is None else f"from {each['tokens']} tokens on"
        print(f"{each['engine']:<6}{each['tier']:<12} quicker than computing {start}; {gains}")
    for each in figures["ratios"]:
        print(
            f"{each['tier']:<12}{each['prefix_tokens']:>7} tokens: {each['ratio']:.2f}x as fast "
            "as vLLM"
        )


def shared_fields() -> dict[str, Any]:
    """Return machine, versions and commit, which every RESULT line has. It takes a second."""
    record = create_result(BENCHMARK, {})
    return {key: record[key] for key in (*SHARED, "versions")}


# The record of several logs


def create_record(name: str, results: Sequence[Entry], commit: str = UNKNOWN) -> dict[str, Any]:
    """Return the record of RESULT lines. Raises InvalidConfig where they are of two runs.

    commit   of lines that were measured in a tree without git
    """
    results = [
        {**each, "commit": commit} if each["commit"] == UNKNOWN else each for each in results
    ]
    for key in SHARED:
        if any(each[key] != results[0][key] for each in results):
            raise InvalidConfig(
                "results", f"two lines have another {key}", "Join the lines of one run"
            )
    entries: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    versions: dict[str, str] = {}
    for result in sorted(results, key=lambda each: each["engine"] == OURS):
        versions |= result["versions"]
        at = tuple(result[key] for key in ("engine", "shape", "tier", "prefix_tokens"))
        if at in entries:
            raise InvalidConfig("results", f"{at} is there twice", "Join one run")
        left_out = (*SHARED, "versions", "benchmark")
        entries[at] = {key: value for key, value in result.items() if key not in left_out}
    return {
        "benchmark": BENCHMARK,
        "machine": results[0]["machine"],
        "versions": versions,
        "command": f"python -m forge.bench.kv_record {name}",
        "commit": results[0]["commit"],
        "figures": create_figures([*entries.values()]),
    }


def write_record(
    name: str, logs: Sequence[str], folder: Path = RESULTS, commit: str = UNKNOWN
) -> Path:
    """Write the record of the RESULT lines in the logs. Returns its path. Raises InvalidConfig.

    commit   of lines that were measured in a tree without git
    """
    lines = [line for log in logs for line in Path(log).read_text(errors="replace").splitlines()]
    results = [each for each in parse_results(lines) if each.get("benchmark") == BENCHMARK]
    if not results:
        raise InvalidConfig(
            "results", f"no returning prefix in {', '.join(logs)}", "Name other logs"
        )
    record = create_record(name, results, commit)
    show(record["figures"])
    path = folder / f"{name}.json"
    write_json(str(path), record)
    return path


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.kv_record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name")
    parser.add_argument("logs", nargs="+")
    parser.add_argument("--commit", default=UNKNOWN, help="commit of lines from a tree without git")
    args = parser.parse_args(words)
    try:
        print(write_record(args.name, args.logs, commit=args.commit))
    except (ForgeError, OSError) as error:
        print(f"forge.bench.kv_record: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
