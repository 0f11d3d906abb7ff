"""Models that fail on command: the target, its draft, a proposer, and the times of steps.

Owns the pending faults and counts the injected ones. Knows no scheduler and no operation:
sim/faults/operations.py sets what is pending.

    engine ──► VirtualClockModel ──► FaultyModel ──► HashModel ◄── draft of some quality
                   │ StallingCost        └ forward, result: raised, or another output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.models.hash import HashModel
from forge.models.logits import FaultHooks, LogitsModel
from forge.models.model_wrapper import ModelWrapper
from forge.proposers import OracleProposer
from forge.seam import PendingStep, StepOutput, StepPlan
from forge.sim.cost.model import CostModel
from forge.sim.faults.random_cases import EOS_TOKEN, RandomCase

FAULT_MARKER = "planted"
"""Word in every error that an injected fault raises."""


class FaultyStep(NamedTuple):
    """A step whose result may be a fault.

    failed_rows   rows that fail, by index in the plan
    fault         fault of the whole result: "result", "short", or none
    """

    pending: PendingStep
    plan: StepPlan
    model: FaultyModel
    failed_rows: tuple[int, ...]
    fault: str

    def result(self) -> StepOutput:
        """Return the step's output, or the fault in its place."""
        return self.model.result(self)


class FaultyModel(ModelWrapper):
    """A model that fails on command, and keeps every error that was not injected.

    A row or a step that fails leaves damaged keys and values, as a kernel that ends half-way does.
    They are damaged while the step runs: once its result is read a later plan may have been given
    the same blocks.

    on_plan            called with every plan before the model gets it
    pending_faults     kinds of faults that the next plan or result has, and how much of each
    last_result        the plan whose result was read last, and that result
    unexpected_error   what on_plan or the model raised: an engine would continue after it
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
        """Launch the plan, unless a fault is pending."""
        self.num_plans += 1
        try:
            self._on_plan(plan)
            is_refused = self._take_fault("forward")
            if not is_refused:
                return self._launch(plan)
        except Exception as fault:
            self.unexpected_error = fault
            raise
        raise RuntimeError(f"{FAULT_MARKER}: not accepted")

    def _launch(self, plan: StepPlan) -> FaultyStep:
        """Run the plan with the faults that are pending for its rows or for its result."""
        step, rows = self._model.forward(plan), plan.rows
        failed_rows: tuple[int, ...] = ()
        if rows and (amount := self._take_fault("rows")):
            failed_rows = (amount % len(rows),)
        fault = next((kind for kind in ("result", "short") if rows and self._take_fault(kind)), "")
        for row in rows if fault else [rows[index] for index in failed_rows]:
            self._logits_model.poison(row)
        return FaultyStep(step, plan, self, failed_rows, fault)

    def result(self, step: FaultyStep) -> StepOutput:
        """Return the step's output, or the fault in its place."""
        try:
            output = step.pending.result()
        except Exception as fault:
            self.unexpected_error = fault
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
    """Quality of drafts at the moment, and failures of the draft model.

    agreement           probability that a draft is the likeliest token; one of `agreements`
    num_failing_plans   of the draft model that will fail; row: one of the next plan's that will
    """

    def __init__(self, case: RandomCase) -> None:
        self.default_agreement = self.agreement = case.agreement
        self.agreements = tuple(dict.fromkeys((0.0, 1.0, case.agreement)))
        self.num_failing_plans = 0
        self.failing_row = 0
        self.num_injected: Counter[str] = Counter()

    def inject(self, plan: StepPlan) -> Mapping[int, str]:
        """Apply pending failures to a plan of the draft model."""
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
    """Return the case's draft model with the quality of the moment, or None."""
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
    """Proposer of recorded outputs, changed as the quality of the moment says."""

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
        """Return recorded tokens, some of them changed."""
        oracle = self._oracles[self._quality.agreement]
        return oracle.propose(request_id, tokens, prompt_len, max_drafts)


@dataclass(frozen=True)
class StallingCost:
    """Cost model under which some steps of another one take longer.

    stalls_ns   step number -> time that it takes instead
    """

    cost: CostModel
    stalls_ns: dict[int, int]

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the step, or the injected one."""
        return self.stalls_ns.get(plan.step) or self.cost.step_ns(plan)

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return the other model's time: these steps are never stalled."""
        return self.cost.decode_ns(num_rows, total_kv_len, max_kv_len)

    def plan_ns(self, plan: StepPlan) -> int:
        """Return the other model's time."""
        return self.cost.plan_ns(plan)

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the other model's time."""
        return self.cost.commit_ns(plan)
