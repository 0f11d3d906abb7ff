"""Check of exercise 2: the plans of the real scheduler, for drawn lengths.

Owns the cases and the known wrong answers. The plans are made by `Scheduler.schedule`.
"""

from __future__ import annotations

from itertools import zip_longest
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from forge.config import EngineConfig
from forge.learn.answers import WrongAnswer, create_random, shorten
from forge.policy import FCFS, POLICIES, Policy
from forge.request import Request, SamplingParams
from forge.scheduler import Scheduler
from forge.seam import RowOutput, StepOutput

NUM_CASES = 12
MAX_REQUESTS = 5
BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 256, 100

Plan = dict[int, tuple[int, int]]


class Case(NamedTuple):
    """Lengths and limits of a run."""

    prompt_lens: tuple[int, ...]
    max_tokens: tuple[int, ...]
    budget: int
    max_num_seqs: int

    def __str__(self) -> str:
        """Return the call of the learner's function."""
        return (
            f"predict_plans({[*self.prompt_lens]}, {[*self.max_tokens]}, budget={self.budget}, "
            f"max_num_seqs={self.max_num_seqs})"
        )


SLOTS_CASE = Case((3, 4, 2, 5), (4, 4, 4, 4), budget=9, max_num_seqs=2)
"""A run in which slots are short and the budget is not: of the drawn ones there may be none."""


def draw_case(random: Random) -> Case:
    """Draw a run in which the budget and the slots are short."""
    count = random.randrange(2, MAX_REQUESTS + 1)
    max_num_seqs = random.randrange(2, 4)
    return Case(
        tuple(random.randrange(1, 20) for _ in range(count)),
        tuple(random.randrange(1, 6) for _ in range(count)),
        random.randrange(max_num_seqs + 1, 12),
        max_num_seqs,
    )


def run_scheduler(case: Case, policy: Policy = FCFS) -> list[Plan]:
    """Return the plans of a run of the scheduler at depth 1, until all requests have ended."""
    config = EngineConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.budget,
    )
    scheduler = Scheduler(config, VOCAB_SIZE, (0,), policy)
    for i, (length, count) in enumerate(zip(case.prompt_lens, case.max_tokens, strict=True)):
        # Prompts that differ in their first token share no block.
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        scheduler.add(Request(i, tuple(range(i + 1, i + 1 + length)), params))
    plans = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None, "blocks are never short here"
        plans.append({row.seq_id: (row.start, row.end) for row in plan.rows})
        outputs = tuple(RowOutput((1,) * row.num_samples) for row in plan.rows)
        scheduler.commit(plan, StepOutput(plan.step, outputs))
    return plans


def check(module: ModuleType, seed: int) -> str:
    """Compare the plans of the function with those of the scheduler."""
    random = create_random(seed, 2)
    num_plans = 0
    cases = [SLOTS_CASE, *(draw_case(random) for _ in range(NUM_CASES))]
    for case in cases:
        expected = run_scheduler(case)
        answer = module.predict_plans(
            [*case.prompt_lens], [*case.max_tokens], case.budget, case.max_num_seqs
        )
        _check_type(case, answer)
        _compare(case, answer, expected)
        num_plans += len(expected)
    return f"{num_plans} plans of {len(cases)} runs are those of schedule()"


def _check_type(case: Case, answer: Any) -> None:
    """Raise WrongAnswer unless the answer is a list of plans."""
    if not isinstance(answer, list) or not all(isinstance(each, dict) for each in answer):
        raise WrongAnswer(f"{case} returned {shorten(answer)}, which is no list of dicts")
    for index, plan in enumerate(answer):
        for request, positions in plan.items():
            is_pair = isinstance(positions, tuple) and len(positions) == 2
            if request not in range(len(case.prompt_lens)) or not (
                is_pair and all(type(each) is int for each in positions)
            ):
                raise WrongAnswer(
                    f"{case}\n          plan {index} has {shorten(request)}: {shorten(positions)}",
                    "A plan maps the number of a request to two whole numbers: (start, end)",
                )


def _compare(case: Case, answer: list[Any], expected: list[Plan]) -> None:
    """Raise WrongAnswer for the first plan that differs."""
    for index, (found, right) in enumerate(zip_longest(answer, expected)):
        if found != right:
            raise WrongAnswer(
                f"{case}\n          plan {index}: {_show(found)}\n"
                f"          schedule(): {_show(right)}",
                _find_hint(case, answer, index, found or {}, right or {}),
            )


def _show(plan: Plan | None) -> str:
    """Return the plan in order of requests, or that there is none."""
    return "none" if plan is None else str(dict(sorted(plan.items())))


def _find_hint(case: Case, answer: list[Any], index: int, found: Plan, right: Plan) -> str:
    """Return the rule that the first different plan breaks."""
    prefills_first = run_scheduler(case, POLICIES["prefill-first"])
    if answer[: index + 1] == prefills_first[: index + 1]:
        return (
            "Decodes come first: each running request with a token gets its position, then chunks"
        )
    for request, (_, end) in found.items():
        if end >= case.prompt_lens[request] + case.max_tokens[request]:
            return f"The last token of request {request} is never an input: nothing follows it"
    if sum(end - start for start, end in found.values()) > case.budget:
        return f"A plan computes {case.budget} positions at most"
    if len(found) > case.max_num_seqs:
        return f"{case.max_num_seqs} requests run at most"
    empty = [request for request, (start, end) in found.items() if start >= end]
    if empty:
        return f"Request {empty[0]} computes nothing in this plan: leave it out"
    if not found:
        return "Each plan computes something, until every request has sampled its last token"
    for request, (start, end) in right.items():
        is_whole = (start, end) == (0, case.prompt_lens[request])
        if is_whole and request not in found and max(found) > request:
            return f"Requests are admitted in their order: request {request} comes first"
        if request not in found and end < case.prompt_lens[request]:
            return f"A prompt may be computed in chunks: request {request} gets what is left"
        if request not in found and start >= case.prompt_lens[request]:
            return f"Request {request} has a token, so it gets one position in every plan"
        if request not in found and index and request not in answer[index - 1]:
            return "A slot that a request has left is used by the next plan"
    return ""
