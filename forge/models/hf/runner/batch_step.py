"""BatchStep: a plan as one device runs it, complete for every rank of the model.

Owns no translation and no device. Rank 0 makes it from a plan; other ranks receive it. From then
on all ranks run the same code.

    rank 0        StepPlan ─► build_input_batch ─► BatchStep ─► kernels
                                                       │ publish
    other ranks                                    BatchStep ─► kernels
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forge.models.hf.runner.input_batch import InputBatch
from forge.seam import Bind, LateMask, Row, StepPlan


class BatchStep(NamedTuple):
    """Work of one plan on one device.

    plan              its rows, drafts and events are read by rank 0 only
    batch             the plan's rows as arrays
    rows              rows of the plan in the order of the batch. Other ranks do not have their
                      sequences, known tokens and binds; lengths are equal
    binds             slot and bind of each sequence that takes over a slot
    num_draft_plans   plans of the draft model that have run: drafts of later plans do not exist
    """

    plan: StepPlan
    batch: InputBatch
    rows: Sequence[Row]
    binds: Sequence[tuple[int, Bind]]
    num_draft_plans: int


class StepPublisher(Protocol):
    """Receives each step of rank 0 before any of its kernels is queued."""

    def publish_late_masks(self, late_masks: Sequence[LateMask]) -> None:
        """Send the masks of the late rows of the step before, if it has late rows."""
        ...

    def publish_draft(self, step: BatchStep) -> None:
        """Send a step of the draft model."""
        ...

    def publish(self, step: BatchStep) -> None:
        """Send a step of the model, which follows those of its draft model."""
        ...

    def accept_draft_failure(self, error: Exception) -> None:
        """Return where a step goes on without the draft model, or raise."""
        ...


class NoFollowers:
    """StepPublisher of a model that has one rank."""

    def publish_late_masks(self, late_masks: Sequence[LateMask]) -> None:
        """Do nothing."""

    def publish_draft(self, step: BatchStep) -> None:
        """Do nothing."""

    def publish(self, step: BatchStep) -> None:
        """Do nothing."""

    def accept_draft_failure(self, error: Exception) -> None:
        """Return: each row still gets one token."""
