"""Models that fail when told to: the target, its draft, a proposer, and what steps take.

Owns what is armed and what was done. Knows no scheduler and no operation: sim/faults.py arms them.

    engine ──► TimedModel ──► FaultyModel ──► HashModel ◄── draft of some mood
                   │ Hiccups      └ forward, result: raised, or another output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.models.around import Around
from forge.models.hash import HashModel
from forge.models.logits import Faults, LogitsModel
from forge.proposers import Oracle
from forge.seam import PendingStep, StepOutput, StepPlan
from sim.cases import EOS_TOKEN, Case
from sim.clock import Cost

PLANTED = "planted"
"""In every error that a fault causes by raising."""


class FaultyStep(NamedTuple):
    """A step whose result may be a fault.

    failed   rows that fail, by their place in the plan
    fault    what becomes of the whole result: "result", "short", or nothing
    """

    step: PendingStep
    plan: StepPlan
    model: FaultyModel
    failed: tuple[int, ...]
    fault: str

    def result(self) -> StepOutput:
        """The step's output, or what was planted in its place."""
        return self.model.result(self)


class FaultyModel(Around):
    """A model that fails when told to, and remembers every failure that nobody planted.

    A row or a step that fails leaves damaged keys and values, as a kernel that ends half-way does.
    They are damaged while the step runs: once its result is read a later plan may have been given
    the same blocks.

    on_plan    is shown every plan before the model has it
    armed      kinds of faults that the next plan or result has, and how much of each
    last       the plan whose result was read last, and that result
    unplanned  what on_plan or the model raised: an engine would go on after it
    """

    def __init__(self, model: LogitsModel, on_plan: Callable[[StepPlan], None]) -> None:
        super().__init__(model)
        self._paged = model
        self.armed: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self.last: tuple[StepPlan, StepOutput] | None = None
        self.unplanned: Exception | None = None
        self.num_plans = 0
        self._on_plan = on_plan

    def forward(self, plan: StepPlan) -> FaultyStep:
        """The plan is accepted, unless a fault is armed."""
        self.num_plans += 1
        try:
            self._on_plan(plan)
            refused = self._takes("forward")
            if not refused:
                return self._launched(plan)
        except Exception as fault:
            self.unplanned = fault
            raise
        raise RuntimeError(f"{PLANTED}: not accepted")

    def _launched(self, plan: StepPlan) -> FaultyStep:
        """Run the plan with the faults that are armed for its rows or for its result."""
        step, rows = self._model.forward(plan), plan.rows
        failed: tuple[int, ...] = ()
        if rows and (amount := self._takes("rows")):
            failed = (amount % len(rows),)
        fault = next((kind for kind in ("result", "short") if rows and self._takes(kind)), "")
        for row in rows if fault else [rows[at] for at in failed]:
            self._paged.damage(row)
        return FaultyStep(step, plan, self, failed, fault)

    def result(self, step: FaultyStep) -> StepOutput:
        """The step's output, or what was planted in its place."""
        try:
            output = step.step.result()
        except Exception as fault:
            self.unplanned = fault
            raise
        if step.fault == "result":
            raise RuntimeError(f"{PLANTED}: no result")
        rows = list(output.rows)
        for at in step.failed:
            rows[at] = rows[at]._replace(tokens=(), error=f"{PLANTED}: broken row")
        if any(row.tokens for row in rows) and self._takes("garble"):
            at = next(i for i, row in enumerate(rows) if row.tokens)
            rows[at] = rows[at]._replace(tokens=(self.vocab_size(),) * len(rows[at].tokens))
        if step.fault == "short":
            del rows[-1]
        output = output._replace(rows=tuple(rows))
        self.last = (step.plan, output)
        return output

    def _takes(self, kind: str) -> int:
        amount = self.armed.pop(kind, 0)
        self.done[kind] += amount > 0
        return amount


class Mood:
    """How good drafts are at the moment, and whether there are any.

    level   probability that a draft is the likeliest token; one of `levels`
    plans   of the draft model that will fail; row: one of the next plan's that will
    """

    def __init__(self, case: Case) -> None:
        self.usual = self.level = case.agreement
        self.levels = tuple(dict.fromkeys((0.0, 1.0, case.agreement)))
        self.plans = 0
        self.row = 0
        self.done: Counter[str] = Counter()

    def faults(self, plan: StepPlan) -> Mapping[int, str]:
        """What happens to a plan of the draft model."""
        if self.plans:
            self.plans -= 1
            self.done["draft-off"] += 1
            raise RuntimeError(f"{PLANTED}: no drafts")
        if self.row and plan.rows:
            at, self.row = self.row % len(plan.rows), 0
            self.done["draft-rows"] += 1
            return {at: f"{PLANTED}: broken draft"}
        return {}


def draft_model(case: Case, mood: Mood) -> LogitsModel | None:
    """The case's draft model, if it has one, as good as the mood of the moment."""
    speculation = case.config.speculation
    if speculation is None or speculation.method != "draft":
        return None
    models: dict[float, HashModel] = {}

    def logits(context: Sequence[int]) -> Sequence[float]:
        if mood.level not in models:
            models[mood.level] = case.model(mood.level, case.stranger)
        return models[mood.level].context_logits(context)

    return LogitsModel(
        logits,
        vocab_size=case.vocab_size,
        eos_token=EOS_TOKEN,
        num_blocks=speculation.num_blocks or case.config.num_blocks,
        block_size=case.config.block_size,
        faults=Faults(result=mood.faults),
    )


class MoodyOracle:
    """A proposer: recorded outputs, spoiled as the mood of the moment says."""

    def __init__(self, outputs: Mapping[int, Sequence[int]], case: Case, mood: Mood) -> None:
        self._mood = mood
        self._oracles = {
            level: Oracle(outputs, level, case.vocab_size, case.seed) for level in mood.levels
        }

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, most: int
    ) -> tuple[int, ...]:
        """Recorded tokens, some of them others."""
        oracle = self._oracles[self._mood.level]
        return oracle.propose(request_id, tokens, prompt_len, most)


@dataclass(frozen=True)
class Hiccups:
    """A cost model: some steps of another one take longer.

    stalled   by number, what a step takes instead
    """

    cost: Cost
    stalled: dict[int, int]

    def step_ns(self, plan: StepPlan) -> int:
        """The other's, or what was planted."""
        return self.stalled.get(plan.step) or self.cost.step_ns(plan)

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        """The other's: none of these is stalled."""
        return self.cost.decode_ns(num_rows, num_kv, most_kv)

    def plan_ns(self, plan: StepPlan) -> int:
        """The other's."""
        return self.cost.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        """The other's."""
        return self.cost.commit_ns(plan)
