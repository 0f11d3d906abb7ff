"""Check of exercise 8: the events of the engine at depth 1 and 2, and the rules of planning ahead.

Owns the wrong orders and why each is wrong. The events are recorded from `Engine.step`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from types import ModuleType
from typing import Any, cast

from forge.config import EngineConfig
from forge.engine import Engine
from forge.learn.answers import WrongAnswer, create_random, shorten
from forge.models.hash import HashModel
from forge.recorder import Recorder
from forge.request import Request, SamplingParams
from forge.seam import PendingStep, StepOutput, StepPlan

NUM_CASES = 8
MAX_STEPS = 9

REASONS = {
    "a": ("own token", "a token that is in flight would be sampled a second time"),
    "b": ("last token", "a sequence would be preempted for blocks that a commit is about to free"),
    "c": ("publish", "a request would read a block whose content was never computed"),
    "d": ("epoch", "blocks would be found under hashes whose content they do not have"),
    "e": ("reference", "the device would compute with the placeholder"),
}
"""Wrong order -> the rule that forbids it, and what would happen."""


class EventRecorder:
    """Events of an engine and its model. Receives a Recorder's calls; two of them count."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def record_plan(self, plan: StepPlan | None) -> None:
        """Record that a plan was made."""
        if plan is not None:
            self.events.append(f"schedule {plan.step}")

    def record_commit(self, output: StepOutput, deltas: object) -> None:
        """Record that an output was committed."""
        self.events.append(f"commit {output.step}")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class RecordedStep:
    """A pending step whose reading is recorded."""

    def __init__(self, step: PendingStep, number: int, events: list[str]) -> None:
        self._step, self._number, self._events = step, number, events

    def result(self) -> StepOutput:
        """Record the reading and return the output."""
        self._events.append(f"read {self._number}")
        return self._step.result()


class RecordedModel(HashModel):
    """The hash model, with launches and readings recorded."""

    events: list[str]

    def forward(self, plan: StepPlan) -> Any:
        """Record the launch and run the plan."""
        self.events.append(f"launch {plan.step}")
        return RecordedStep(super().forward(plan), plan.step, self.events)


def record_events(num_steps: int, depth: int) -> list[str]:
    """Return the events of an engine that computes this many steps of one request."""
    model = RecordedModel(vocab_size=50, num_blocks=16, block_size=4)
    engine = Engine(model, EngineConfig(num_blocks=16, block_size=4, depth=depth))
    recorder = EventRecorder()
    model.events = recorder.events
    engine.recorder = cast(Recorder, recorder)
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True)
    engine.submit(Request(0, (1, 2, 3), params))
    while engine.has_work:
        engine.step()
    return recorder.events


def check(module: ModuleType, seed: int) -> str:
    """Compare the orders with those of the engine, and the rules with the known ones."""
    random = create_random(seed, 8)
    cases = [(2, 1), (2, 2)] + [
        (random.randrange(1, MAX_STEPS), 1 + i % 2) for i in range(NUM_CASES)
    ]
    for num_steps, depth in cases:
        _compare(module.order(num_steps, depth), record_events(num_steps, depth), num_steps, depth)
    answers = module.FORBIDDEN_BY
    if not isinstance(answers, dict):
        raise WrongAnswer(f"FORBIDDEN_BY is {shorten(answers)}, which is no dict")
    rules = {rule for rule, _ in REASONS.values()}
    for name, (rule, reason) in REASONS.items():
        answer = answers.get(name)
        if not isinstance(answer, str) or answer not in rules:
            raise WrongAnswer(
                f"order {name}: {shorten(answer)} is no rule",
                f"Use one of: {', '.join(sorted(rules))}",
            )
        if answer != rule:
            raise WrongAnswer(
                f"order {name}: the rule {answer!r} does not forbid it", f"In this order {reason}"
            )
    return f"{len(cases)} runs of the engine, and {len(REASONS)} orders that rules forbid"


def _compare(answer: Any, expected: list[str], num_steps: int, depth: int) -> None:
    """Raise WrongAnswer where the events differ, naming the first one."""
    call = f"order({num_steps}, {depth})"
    if not isinstance(answer, list):
        raise WrongAnswer(f"{call} returned {shorten(answer)}, which is no list")
    if not all(isinstance(each, str) for each in answer):
        raise WrongAnswer(
            f"{call} returned {shorten(answer)}", "An event is a text, such as 'schedule 0'"
        )
    for index, (found, right) in enumerate(zip_longest(answer, expected, fillvalue="none")):
        if found != right:
            if depth == 2 and answer == record_events(num_steps, 1):
                hint = "At depth 2 the host makes plan n + 1 while the device runs step n"
            elif sorted(answer) != sorted(expected):
                hint = f"There are {len(expected)} events: four of each step"
            elif right.startswith(("read", "commit")):
                in_flight = "1 plan is" if depth == 1 else f"{depth} plans are"
                hint = f"{in_flight} in flight: the oldest is committed before another is made"
            else:
                hint = "A plan is launched at once, and read when its tokens are needed"
            raise WrongAnswer(f"{call}: event {index} is {found}, expected {right}", hint)
