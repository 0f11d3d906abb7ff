"""Fault injection: a target model, a draft model, a proposer and step times that fail on command.

Owns the pending faults and the counts of injected ones. Knows no scheduler and no operation:
sim/faults/operations.py sets the pending faults.

    engine ──► VirtualClockModel ──► FaultyModel ──► HashModel ◄── draft model, of a DraftQuality
                   │ StallingCost       └ forward, result: raise, or return another output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.models.model_wrapper import ModelWrapper
from forge.models.paged import FaultHooks
from forge.proposers import OracleProposer
from forge.seam import PendingStep, StepOutput, StepPlan
from forge.sim.cost.model import CostModel
from forge.sim.faults.random_cases import EOS_TOKEN, RandomCase

FAULT_MARKER = "planted"
"""Part of every error that an injected fault raises."""


class FaultyStep(NamedTuple):
    """A step whose result may be a fault.

    failed_rows   indices in the plan of the rows that fail
    fault         fault of the whole result: "result", "short", or "" for none
    """

    pending: PendingStep
    plan: StepPlan
    model: FaultyModel
    failed_rows: tuple[int, ...]
    fault: str

    def result(self) -> StepOutput:
        """Return the step's output, or raise or return the injected fault."""
        return self.model.result(self)


class FaultyModel(ModelWrapper):
    """A model that fails on command, and keeps every failure that was not injected.

    A failing row or step leaves damaged keys and values, as a kernel that stops half-way does.
    The damage happens while the step runs. Once its result is read, a later plan may have the
    same blocks.

    on_plan            called with every plan before the model receives it
    pending_faults     fault kind -> amount, for the next plan or result
    last_result        the plan whose result was read last, and that result
    unexpected_error   error that on_plan or the model raised; the engine continues after it
    """

    def __init__(self, model: LogitsModel, on_plan: Callable[[StepPlan], None]) -> None:
        super().__init__(model)
        self._logits_model = model
        self.pending_faults: dict[str, int] = {}
        self.num_injected: Counter[str] = Counter()
        self.last_result: tuple[StepPlan, StepOutput] | None = None
        self.unexpected_error: Exception | None = None
        self.num_plans = 0
        self._on_plan = on_plan

    def forward(self, plan: StepPlan) -> FaultyStep:
        """Accept the plan, or raise a pending fault."""
        self.num_plans += 1
        try:
            self._on_plan(plan)
            is_refused = self._take_fault("forward")
            if not is_refused:
                return self._launch(plan)
        except Exception as error:
            self.unexpected_error = error
            raise
        raise RuntimeError(f"{FAULT_MARKER}: not accepted")

    def _launch(self, plan: StepPlan) -> FaultyStep:
        """Run the plan with the pending faults of its rows or of its result."""
        step, rows = self._model.forward(plan), plan.rows
        failed_rows: tuple[int, ...] = ()
        if rows and (amount := self._take_fault("rows")):
            failed_rows = (amount % len(rows),)
        fault = next((kind for kind in ("result", "short") if rows and self._take_fault(kind)), "")
        for row in rows if fault else [rows[index] for index in failed_rows]:
            self._logits_model.poison(row)
        return FaultyStep(step, plan, self, failed_rows, fault)

    def result(self, step: FaultyStep) -> StepOutput:
        """Return the step's output, or raise or return the injected fault."""
        try:
            output = step.pending.result()
        except Exception as error:
            self.unexpected_error = error
            raise
        if step.fault == "result":
            raise RuntimeError(f"{FAULT_MARKER}: no result")
        rows = list(output.rows)
        for index in step.failed_rows:
            rows[index] = rows[index]._replace(tokens=(), error=f"{FAULT_MARKER}: broken row")
        if any(row.tokens for row in rows) and self._take_fault("garble"):
            index = next(i for i, row in enumerate(rows) if row.tokens)
            rows[index] = rows[index]._replace(
                tokens=(self.vocab_size(),) * len(rows[index].tokens)
            )
        if step.fault == "short":
            del rows[-1]
        output = output._replace(rows=tuple(rows))
        self.last_result = (step.plan, output)
        return output

    def _take_fault(self, kind: str) -> int:
        amount = self.pending_faults.pop(kind, 0)
        self.num_injected[kind] += amount > 0
        return amount


class DraftQuality:
    """Current quality of the drafts, and the pending faults of the draft model.

    agreement           probability that a draft is the likeliest token; one of `agreements`
    num_failing_plans   number of the draft model's next plans that will fail
    failing_row         row of the next plan that will fail, modulo its rows; 0: none
    """

    def __init__(self, case: RandomCase) -> None:
        self.default_agreement = self.agreement = case.agreement
        self.agreements = tuple(dict.fromkeys((0.0, 1.0, case.agreement)))
        self.num_failing_plans = 0
        self.failing_row = 0
        self.num_injected: Counter[str] = Counter()

    def inject(self, plan: StepPlan) -> Mapping[int, str]:
        """Return the injected errors by row for a plan of the draft model, or raise a fault."""
        if self.num_failing_plans:
            self.num_failing_plans -= 1
            self.num_injected["draft-off"] += 1
            raise RuntimeError(f"{FAULT_MARKER}: no drafts")
        if self.failing_row and plan.rows:
            index, self.failing_row = self.failing_row % len(plan.rows), 0
            self.num_injected["draft-rows"] += 1
            return {index: f"{FAULT_MARKER}: broken draft"}
        return {}


def create_draft_model(case: RandomCase, quality: DraftQuality) -> LogitsModel | None:
    """Create the case's draft model, or None. Its logits follow the current DraftQuality."""
    speculation = case.config.speculation
    if speculation is None or speculation.method != "draft":
        return None
    models: dict[float, HashModel] = {}

    def logits(context: Sequence[int]) -> Sequence[float]:
        if quality.agreement not in models:
            models[quality.agreement] = case.create_model(
                quality.agreement, case.has_unrelated_draft
            )
        return models[quality.agreement].context_logits(context)

    return LogitsModel(
        logits,
        vocab_size=case.vocab_size,
        eos_token=EOS_TOKEN,
        num_blocks=speculation.num_blocks or case.config.num_blocks,
        block_size=case.config.block_size,
        faults=FaultHooks(result=quality.inject),
    )


class VariableOracle:
    """A proposer of recorded outputs that replaces some tokens, by the current DraftQuality."""

    def __init__(
        self, outputs: Mapping[int, Sequence[int]], case: RandomCase, quality: DraftQuality
    ) -> None:
        self._quality = quality
        self._oracles = {
            level: OracleProposer(outputs, level, case.vocab_size, case.seed)
            for level in quality.agreements
        }

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        """Return recorded tokens, some of them replaced."""
        oracle = self._oracles[self._quality.agreement]
        return oracle.propose(request_id, tokens, prompt_len, max_drafts)


@dataclass(frozen=True)
class StallingCost:
    """A cost model in which some steps of another cost model take longer.

    stalls_ns   step number -> time of that step in place of the usual one
    """

    cost: CostModel
    stalls_ns: dict[int, int]

    def step_ns(self, plan: StepPlan) -> int:
        """Return the step's stall, or the time of the other cost model."""
        return self.stalls_ns.get(plan.step) or self.cost.step_ns(plan)

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return the time of the other cost model: these steps do not stall."""
        return self.cost.decode_ns(num_rows, total_kv_len, max_kv_len)

    def plan_ns(self, plan: StepPlan) -> int:
        """Return the time of the other cost model."""
        return self.cost.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the time of the other cost model."""
        return self.cost.commit_ns(plan)
