"""Engine runs: the commits of a run, and figures of the window in which all streams decode.

Owns the record of a run and its figures. Knows no proposer: with and without drafts, a round is the
time between two commits.

    stream 1   prompt |x..xx..x...x.x|.x           x   tokens of a commit
    stream 2   prompt .|x.x..xxx.x...|xx.x
                       └── window ───┘             all streams decode, and none is near its end
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from forge.bench.engine_driver import ModelTimer, greedy
from forge.bench.workload import percentiles
from forge.engine import Engine
from forge.errors import InvalidConfig, RequestFailed
from forge.request import Delta, Request
from forge.seam import Model, PendingStep, StepPlan

Tokens = Sequence[int]

WITH_PERCENTILES = ("tok_s", "ratio", "round_ms")
"""Figures that are summarized with percentiles, not only with the median."""


class PlanRecorder(ModelTimer):
    """A timed model that keeps the plans it received."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> PendingStep:
        """Keep the plan and launch it."""
        self.plans.append(plan)
        return super().forward(plan)


class StepCommit(NamedTuple):
    """The commit of a step.

    at_s                                    time of the commit
    model_s                                 seconds in launches and waits so far
    num_draft_tokens, num_accepted_tokens   drafts so far
    """

    at_s: float
    model_s: float
    num_draft_tokens: int
    num_accepted_tokens: int
    deltas: Sequence[Delta]


class EngineRun(NamedTuple):
    """A run of a variant. `plans` and `commits` are of the same steps."""

    plans: Sequence[StepPlan]
    commits: Sequence[StepCommit]
    outputs: Mapping[int, Tokens]


def run_requests(engine: Engine, prompts: Sequence[Tokens], output: int) -> EngineRun:
    """Run all prompts at once, with `output` tokens each. Raises RequestFailed, InvalidConfig."""
    inner = engine.model
    recorder = engine.model = PlanRecorder(inner)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(index, tuple(prompt), greedy(output)))
    clock, scheduler, commits = time.perf_counter, engine.scheduler, []
    with gc_disabled():
        while engine.has_work:
            before = engine.num_steps
            deltas = engine.step()
            if engine.num_steps > before:
                counts = scheduler.num_draft_tokens, scheduler.num_accepted_tokens
                commits.append(
                    StepCommit(clock(), recorder.forward_s + recorder.wait_s, *counts, deltas)
                )
    engine.model = inner
    outputs: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    for commit in commits:
        for delta in commit.deltas:
            if delta.error is not None:
                raise RequestFailed(delta.error)
            outputs[delta.request_id] += delta.tokens
    if len(commits) != len(recorder.plans):
        raise RequestFailed("a step failed, and its requests were computed again")
    if any(plan.preempted for plan in recorder.plans):
        raise InvalidConfig(
            "num_blocks",
            f"the cache is too small for {len(prompts)} sequences at once",
            "Give more blocks, or measure fewer streams",
        )
    return EngineRun(recorder.plans, commits, outputs)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: every plan is kept here, and a server keeps none."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class WindowFigures(NamedTuple):
    """Figures of the window of a run. All but `round_s` are means.

    round_s            median time from one commit to the next
    policy_s           the part of a round outside the model: schedule and commit
    drafts             drafts of a row
    draft_steps        steps of the draft model between two commits: the most drafts of any row
    tokens_per_round   tokens of a row
    acceptance         share of verified drafts that were accepted; None where there are none
    """

    tok_s: float
    round_s: float
    policy_s: float
    drafts: float
    draft_steps: float
    tokens_per_round: float
    acceptance: float | None


def window_figures(engine_run: EngineRun, output: int, margin: int) -> WindowFigures:
    """Return the figures of the window.

    A stream is near its end within the last `margin` tokens.
    """
    first, last = find_window(engine_run.commits, len(engine_run.outputs), output - margin)
    first_commit, last_commit = engine_run.commits[first], engine_run.commits[last]
    window_commits = engine_run.commits[first : last + 1]
    rounds = [b.at_s - a.at_s for a, b in pairwise(window_commits)]
    plans = engine_run.plans[first + 1 : last + 1]
    rows = [row for plan in plans for row in plan.rows if row.num_samples]
    tokens = sum(len(delta.tokens) for commit in window_commits[1:] for delta in commit.deltas)
    wall_s = last_commit.at_s - first_commit.at_s
    num_draft_tokens = last_commit.num_draft_tokens - first_commit.num_draft_tokens
    return WindowFigures(
        tokens / wall_s,
        median(rounds),
        (wall_s - (last_commit.model_s - first_commit.model_s)) / len(rounds),
        sum(len(row.drafts) for row in rows) / len(rows),
        sum(len(plan.drafts) for plan in plans) / len(plans),
        tokens / len(rows),
        (last_commit.num_accepted_tokens - first_commit.num_accepted_tokens) / num_draft_tokens
        if num_draft_tokens
        else None,
    )


def find_window(commits: Sequence[StepCommit], streams: int, max_tokens: int) -> tuple[int, int]:
    """Return the first commit by which all streams decode, and the last before any nears its end.

    max_tokens   a stream with more tokens is near its end
    A stream decodes once it has two tokens: a plan made before the first token has no drafts.
    Raises InvalidConfig where there is no step between the two.
    """
    counts = [0] * streams
    first, last = None, len(commits) - 1
    for index, commit in enumerate(commits):
        for delta in commit.deltas:
            counts[delta.request_id] += len(delta.tokens)
        if max(counts) > max_tokens:
            last = index - 1
            break
        if first is None and min(counts) > 1:
            first = index
    if first is None or last <= first:
        raise InvalidConfig(
            "output_tokens", f"{streams} streams hardly decode together", "Ask for more tokens"
        )
    return first, last


def count_differences(
    outputs: Mapping[int, Tokens], plain: Mapping[int, Tokens]
) -> tuple[int, int]:
    """Return the streams with another output, and the number of positions at which they differ."""
    differences = [
        sum(a != b for a, b in zip(outputs[each], plain[each], strict=True)) for each in plain
    ]
    return sum(count > 0 for count in differences), sum(differences)


def summarize(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return medians, with percentiles for WITH_PERCENTILES, and maxima of differences."""
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for each in samples for name in each):
        values = [each[name] for each in samples if name in each]
        if name.endswith("_apart"):
            figures[name] = max(values)
        elif name in WITH_PERCENTILES:
            figures |= percentiles(name, values, 4)
        else:
            figures[name] = round(median(values), 4)
    return figures
