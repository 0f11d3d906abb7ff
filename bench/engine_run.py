"""Runs of one engine round by round: what each commit brought, and the window of it that counts.

Owns the record of a run and what is read off it. Knows no way of drafting: with and without drafts
a round is what lies between two commits.

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
"""Figures of several runs of which more than the median is told."""


class PlanRecorder(ModelTimer):
    """The model, timed, and the plans it was given."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> PendingStep:
        """The model's."""
        self.plans.append(plan)
        return super().forward(plan)


class StepCommit(NamedTuple):
    """The end of a step.

    model_s                                 seconds inside the model so far: accepting plans, and
                                            being waited for
    num_draft_tokens, num_accepted_tokens   drafts so far
    """

    at_s: float
    model_s: float
    num_draft_tokens: int
    num_accepted_tokens: int
    deltas: Sequence[Delta]


class EngineRun(NamedTuple):
    """One way, once. `plans` and `commits` are of the same steps."""

    plans: Sequence[StepPlan]
    commits: Sequence[StepCommit]
    outputs: Mapping[int, Tokens]


def run_requests(engine: Engine, prompts: Sequence[Tokens], output: int) -> EngineRun:
    """All prompts have `output` tokens, and began at once. Raises RequestFailed, InvalidConfig."""
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
    """No garbage is collected within: every plan is kept here, and no server keeps any."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class WindowFigures(NamedTuple):
    """Of the window of a run.

    round_s            median time from one commit to the next
    policy_s           the part of it outside the model: schedule and commit, in the mean
    drafts             of a row, in the mean
    draft_steps        of the draft model between two commits, in the mean: the most drafts of any
                       row
    tokens_per_round   tokens of a row, in the mean
    acceptance         share of the judged drafts that were accepted; None where none was judged
    """

    tok_s: float
    round_s: float
    policy_s: float
    drafts: float
    draft_steps: float
    tokens_per_round: float
    acceptance: float | None


def window_figures(engine_run: EngineRun, output: int, margin: int) -> WindowFigures:
    """What the window shows. `margin` tokens before its end a stream is near it."""
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
    """The first commit by which every stream decodes, the last by which none has over `max_tokens`.

    A stream decodes once it has two tokens: a plan made ahead of the first has no drafts.
    Raises InvalidConfig where there is no step between them.
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
    """Streams with another output, and the places at which they differ, not only the first."""
    differences = [
        sum(a != b for a, b in zip(outputs[each], plain[each], strict=True)) for each in plain
    ]
    return sum(count > 0 for count in differences), sum(differences)


def summarize(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians, with 10th and 90th percentile of SPREAD; of what is apart, the most."""
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
