"""Steps of a model that several ranks share: published by rank 0, followed by the others.

Owns what a failure means once other ranks have a step. Knows no process: messages go through a
ring of forge.ranks.

    rank 0        LeaderModel.forward ─► HFModel.forward ─► StepSender ─► ring
    other ranks   follow_steps ◄─ ring;  HFModel.follow

A step that fails on one rank leaves the others waiting for its part of a sum. So a failure on any
rank ends the engine: no step is tried again, as it is where one process has the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from forge.errors import EngineDead, InvalidConfig
from forge.models.hf.model import HFModel
from forge.models.hf.parallel.step_message import (
    decode_late_masks,
    decode_step,
    encode_late_masks,
    encode_step,
)
from forge.models.hf.runner.batch_step import BatchStep
from forge.models.model_wrapper import ModelWrapper
from forge.ranks.message_kind import DRAFT_STEP, LATE_MASKS, RECORDED_LINE, STEP, message_kind
from forge.ranks.rank_lead import RankLead
from forge.ranks.step_ring import RingReader, RingWriter
from forge.seam import LateMask, Model, PendingStep, StepOutput, StepPlan


class StepSender:
    """StepPublisher that writes each step to the ring."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer

    def publish_late_masks(self, late_masks: Sequence[LateMask]) -> None:
        """Send the masks of the late rows of the step before."""
        self._writer.send(encode_late_masks(late_masks))

    def publish_draft(self, step: BatchStep) -> None:
        """Send a step of the draft model."""
        self._writer.send(encode_step(DRAFT_STEP, step))

    def publish(self, step: BatchStep) -> None:
        """Send a step of the model."""
        self._writer.send(encode_step(STEP, step))

    def accept_draft_failure(self, error: Exception) -> None:
        """Raise: the other ranks are running the step of the draft model."""
        raise error


class _LedStep:
    """Pending step of a model that several ranks run."""

    def __init__(self, step: PendingStep, lead: RankLead) -> None:
        self._step, self._lead = step, lead

    def result(self) -> StepOutput:
        """Wait for the step. Raises EngineDead where a rank has ended."""
        with self._lead.waiting():
            return self._step.result()


class LeaderModel(ModelWrapper):
    """Model of rank 0. A step that fails ends the engine."""

    def __init__(self, model: HFModel, lead: RankLead) -> None:
        super().__init__(model)
        self._lead = lead

    def forward(self, plan: StepPlan) -> PendingStep:
        """Queue the plan on every rank. Raises EngineDead where a rank fails or has ended."""
        with self._lead.waiting():
            try:
                return _LedStep(self._model.forward(plan), self._lead)
            except (EngineDead, InvalidConfig):
                raise
            except Exception as error:
                raise EngineDead(f"step {plan.step} failed on rank 0: {error!r}") from error


def lead_model(model: Model, lead: RankLead) -> LeaderModel:
    """Return the model of rank 0, whose steps the other ranks follow from now on."""
    assert isinstance(model, HFModel), "a checkpoint was opened"
    model.publish_to(StepSender(lead.writer))
    lead.is_waiting = False
    return LeaderModel(model, lead)


@runtime_checkable
class FollowingModel(Protocol):
    """Model whose steps rank 0 decides."""

    def follow(self, step: BatchStep) -> None:
        """Queue a step of the model."""
        ...

    def follow_draft(self, step: BatchStep) -> None:
        """Queue a step of the draft model."""
        ...

    def follow_late_masks(self, late_masks: Sequence[LateMask]) -> None:
        """Sample the late rows of the step before."""
        ...


def follow_steps(
    model: FollowingModel, reader: RingReader, check_line: Callable[[str], None]
) -> None:
    """Run the steps of rank 0 until the ring ends.

    check_line   takes each line that rank 0 has recorded since the last step
    """
    while (message := reader.receive()) is not None:
        kind = message_kind(message)
        if kind == RECORDED_LINE:
            check_line(message[4:].decode())
        elif kind == LATE_MASKS:
            model.follow_late_masks(decode_late_masks(message))
        elif kind == DRAFT_STEP:
            model.follow_draft(decode_step(message))
        else:
            model.follow(decode_step(message))
