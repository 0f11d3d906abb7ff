"""Compare the decisions of two checkouts: scenarios, fault seeds and a recording, byte for byte.

    python tests/tools/decision_logs.py OLD_CHECKOUT NEW_CHECKOUT            all, a minute or two
    python tests/tools/decision_logs.py OLD_CHECKOUT NEW_CHECKOUT spec fault names with either word

A refactoring of scheduler, drafting or simulator keeps every decision. Compared are:

    scenarios      the decision log of one `forge sim` each
    fault seeds    the report of `forge sim --faults all` for each range
    recording      plans and outputs of a `forge generate`; the new checkout replays the old

A line says whether the two are equal, or quotes the first line that differs. Digests of the source
code and times of recordings are left out. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

POLICIES = (
    *("fcfs", "shortest-prompt", "prefill-first", "largest-victim", "ageing", "fair-share"),
    *("newest", "shortest-aged", "shortest-job", "small-chunks"),
)
NUM_FAULT_SEEDS, SEEDS_A_RUN = 200, 50
DIGEST_FIELDS = ("code", "policy")
"""Fields of a log's first line that change with the source code."""


def scenarios() -> dict[str, list[str]]:
    """Return the arguments of `forge sim` for each scenario, by name."""
    named = dict(_scenarios())
    for seed in range(0, NUM_FAULT_SEEDS, SEEDS_A_RUN):
        arguments = f"--faults all --seed {seed} --seeds {SEEDS_A_RUN}"
        named[f"faults-{seed}"] = arguments.split()
    return named


def _scenarios() -> Iterator[tuple[str, list[str]]]:
    load = "--rate 30 --num-blocks 300 --requests 150 --classes 2 --tenants 3"
    for policy in POLICIES:
        yield f"policy-{policy}", f"--policy {policy} {load}".split()
    short = "--rate 40 --requests 80 --num-blocks 200 --prompt 16-200 --output 4-60"
    drafted = "--requests 60 --prompt 16-100 --output 10-60 --num-blocks 200 --model hash --rate 30"
    for depth in (1, 2):
        at_depth = ["--depth", str(depth)]
        for model in ("lengths", "hash"):
            for caching in ("enable", "no-enable"):
                arguments = f"--model {model} --{caching}-prefix-caching {short}"
                yield (
                    f"depth{depth}-{model}-{caching}",
                    [*at_depth, *arguments.split(), "--max-num-batched-tokens", "256"],
                )
        for num_drafts in (1, 3, 5):
            drafts = [*at_depth, "--num-speculative-tokens", str(num_drafts)]
            yield f"spec{num_drafts}-depth{depth}-hash", [*drafts, *drafted.split()]
            yield f"spec{num_drafts}-depth{depth}", [*drafts, "--requests", "150", "--rate", "30"]
        workloads = {
            "closed": "--clients 12 --requests 100",
            "agent": "--clients 4 --requests 60 --prompt 20-60 --num-blocks 4096",
            "bursty": "--rate 10 --requests 200",
            "sample": "--rate 8 --requests 100",
        }
        for workload, arguments in workloads.items():
            yield (
                f"{workload}-depth{depth}",
                [
                    *at_depth,
                    *f"--workload {workload} {arguments}".split(),
                ],
            )
    yield "roofline", "--cost roofline:h200,qwen3-4b --requests 200 --depth 2".split()


def record_run(checkout: Path, recording: Path) -> list[str]:
    """Record a run with drafts, and return the recording's lines without checksums and times."""
    words = "generate text --model hash --max-tokens 60 --temperature 0.7".split()
    words += ["--speculative-model", "hash"]
    run_forge(checkout, [*words, "--record", str(recording)])
    lines = []
    for line in recording.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line.partition(" ")[2])
        for key in ("plan", "done"):
            if key in entry:
                entry[key] = entry[key][:-1]
        lines.append(json.dumps(entry))
    return lines


def compare_recordings(old: Path, new: Path) -> str | None:
    """Return how recordings of the checkouts differ, or a replay of the old one in the new one."""
    with tempfile.TemporaryDirectory() as folder:
        old_file, new_file = Path(folder, "old"), Path(folder, "new")
        difference = first_difference(record_run(old, old_file), record_run(new, new_file))
        replay = run_forge(new, ["sim", "replay", str(old_file)])
    return difference or (replay.stdout + replay.stderr if replay.returncode else None)


def run_forge(checkout: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line of a checkout in it."""
    return subprocess.run(
        [sys.executable, "-m", "forge", *words],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )


def run_scenario(checkout: Path, arguments: list[str]) -> list[str]:
    """Return the lines of the decision log without digests, or of the report if there is no log.

    A run without a log is one of faults, or one that failed: its report has the exit status.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        words = arguments if "--faults" in arguments else [*arguments, "--log", str(log)]
        run = run_forge(checkout, ["sim", *words])
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if lines and not run.returncode:
        return without_digests(lines)
    report = [f"exit status {run.returncode}", *run.stdout.splitlines(), *run.stderr.splitlines()]
    return [line for line in report if "sha256" not in line]


def without_digests(lines: list[str]) -> list[str]:
    """Return the lines of a decision log without the digests of source code and log."""
    header = {k: v for k, v in json.loads(lines[0]).items() if k not in DIGEST_FIELDS}
    return [json.dumps(header), *(line for line in lines[1:] if "sha256" not in line)]


def first_difference(old: list[str], new: list[str]) -> str | None:
    """Return a text that quotes the first line in which the two differ, or None.

    Options that only the new header has are left out: the old run had them at their defaults.
    """
    if old and new and old[0].startswith("{") and new[0].startswith("{"):
        header = _without_added(json.loads(old[0]), json.loads(new[0]))
        new = [json.dumps(header), *new[1:]]
    for number, (before, after) in enumerate(zip_longest(old, new), 1):
        if before != after:
            return f"line {number}\n    old  {before}\n    new  {after}"
    return None


def _without_added(old: object, new: object) -> object:
    if isinstance(old, dict) and isinstance(new, dict):
        return {k: _without_added(old[k], v) for k, v in new.items() if k in old}
    return new


def main(arguments: list[str]) -> int:
    """Compare the checkouts, print a line for each scenario, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="checkout that is right")
    parser.add_argument("new", type=Path, help="checkout to compare with it")
    parser.add_argument("words", nargs="*", help="compare scenarios with one of these in the name")
    options = parser.parse_args(arguments)
    chosen = {
        name: words
        for name, words in scenarios().items()
        if not options.words or any(word in name for word in options.words)
    }
    if not chosen:
        parser.error(f"no scenario's name has {' or '.join(options.words)}")
    num_different = 0
    if not options.words:
        difference = compare_recordings(options.old, options.new)
        num_different += difference is not None
        print(f"{'recording':26} {'equal' if difference is None else difference}", flush=True)
    with ThreadPoolExecutor(2) as pool:
        for name, words in chosen.items():
            old, new = pool.map(run_scenario, (options.old, options.new), (words, words))
            difference = first_difference(old, new)
            num_different += difference is not None
            outcome = (
                f"equal ({len(new)} lines)" if difference is None else f"differs: {difference}"
            )
            print(f"{name:26} {outcome}", flush=True)
    num_compared = len(chosen) + (not options.words)
    print(f"{num_compared - num_different} of {num_compared} equal")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
