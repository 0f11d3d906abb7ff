"""Time of a step's message: from rank 0's plan in arrays to the same arrays on the other ranks.

Owns the processes and the figures. The ring is that of forge.ranks, the format that of
forge.models.hf.parallel.step_message. No model and no GPU is used.

    python -m forge.bench.step_messages [--rows 256] [--ranks 2] [--period-ms 5] [--check]

    rank 0        [ encode_us | send_us ]
    other ranks            ... waiting ...[ received ][ decode_us ]
                  └──────── latency_us ───┘

All are p50 and p99 in microseconds; `latency_us` is the slowest rank's. Between steps rank 0
sleeps for `--period-ms`, then builds the step, as an engine does. A reader polls for `--spin-ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from forge.bench.result_file import create_result, write_json
from forge.bench.workload import print_result, quantile
from forge.models.hf.parallel.step_message import decode_step, encode_step
from forge.models.hf.runner.batch_step import BatchStep
from forge.models.hf.runner.input_batch import build_input_batch
from forge.ranks.message_kind import STEP
from forge.ranks.rank_context import FollowerContext
from forge.ranks.rank_group import RankGroup
from forge.ranks.step_ring import RingReader, select_spin_s
from forge.seam import Row, StepPlan, TokenRef

LIMIT_US = 60.0
"""Most microseconds of the median latency with `--check`."""

NUM_WARM_UP = 50
"""First messages, which are left out."""


def create_decode_step(num_rows: int) -> BatchStep:
    """Return a step in which each sequence decodes a token that the step before sampled."""
    rows = tuple(
        Row(slot, 0, slot, 900, refs=(TokenRef(0, slot),), keep=57, num_samples=1)
        for slot in range(num_rows)
    )
    plan = StepPlan(1, rows, 60 * num_rows, 16)
    batch = build_input_batch(plan, range(num_rows), num_rows, 512)
    return BatchStep(plan, batch, rows, [], 0)


def read_messages(
    rank_context: FollowerContext, report_ready: Callable[[], None], folder: str, spin_s: float
) -> None:
    """Read and decode steps until the ring ends. Write when each arrived and was decoded, in ns."""
    reader = RingReader(rank_context.memory, rank_context.notices, rank_context.acks, spin_s)
    report_ready()
    times: list[tuple[int, int]] = []
    while (message := reader.receive()) is not None:
        received_ns = time.perf_counter_ns()
        decode_step(message)
        times.append((received_ns, time.perf_counter_ns()))
    Path(folder, f"{rank_context.rank}.json").write_text(json.dumps(times))


def measure(
    num_rows: int, num_ranks: int, num_steps: int, period_s: float, spin_s: float
) -> dict[str, Any]:
    """Return the figures of so many steps of `num_rows` decodes."""
    sent: list[tuple[int, int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        with RankGroup(num_ranks, read_messages, (folder, spin_s)) as group:
            group.watch_thread(lambda: False)
            with group.leader_context.open_writer() as writer:
                group.wait_until_ready()
                for _ in range(NUM_WARM_UP + num_steps):
                    time.sleep(period_s)
                    # As in an engine, the step is built just before it is sent.
                    step = create_decode_step(num_rows)
                    # The clock is the same in every process of the machine.
                    begin_ns = time.perf_counter_ns()
                    buffers = encode_step(STEP, step)
                    encoded_ns = time.perf_counter_ns()
                    writer.send(buffers)
                    sent.append((begin_ns, encoded_ns, time.perf_counter_ns()))
                group.expect_end()
        read = [
            json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(1, num_ranks)
        ]
    samples: dict[str, list[float]] = {}
    for (begin_ns, encoded_ns, end_ns), *times in list(zip(sent, *read, strict=True))[NUM_WARM_UP:]:
        for name, time_ns in (
            ("encode_us", encoded_ns - begin_ns),
            ("send_us", end_ns - encoded_ns),
            ("latency_us", max(received_ns for received_ns, _ in times) - begin_ns),
            ("decode_us", max(decoded_ns - received_ns for received_ns, decoded_ns in times)),
        ):
            samples.setdefault(name, []).append(time_ns / 1e3)
    return {
        f"{name}_{label}": round(value, 1)
        for name, sample in samples.items()
        for label, value in (("p50", median(sample)), ("p99", quantile(sample, 0.99)))
    }


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.step_messages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=256, help="decodes of a step; default 256")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, 0 included; default 2")
    parser.add_argument("--steps", type=int, default=2000, help="measured steps; default 2000")
    parser.add_argument("--period-ms", type=float, default=5.0, help="of a step; default 5")
    parser.add_argument(
        "--spin-ms", type=float, help="polling of a reader; default: that of ranks on this machine"
    )
    parser.add_argument(
        "--check", action="store_true", help=f"fail where latency_us_p50 is above {LIMIT_US:g}"
    )
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(words)
    spin_ms = args.spin_ms
    if spin_ms is None:
        spin_ms = 1e3 * select_spin_s(args.ranks, len(os.sched_getaffinity(0)))
    figures = {"rows": args.rows, "ranks": args.ranks, "period_ms": args.period_ms}
    figures |= {"spin_ms": spin_ms}
    figures |= measure(args.rows, args.ranks, args.steps, args.period_ms / 1e3, spin_ms / 1e3)
    print_result(figures)
    if args.json is not None:
        write_json(args.json, create_result("step_messages", figures))
    if args.check and figures["latency_us_p50"] > LIMIT_US:
        print(f"latency_us_p50 is above {LIMIT_US:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
