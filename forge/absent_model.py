"""AbsentModel: the numbers of a model that an engine does not have: elsewhere, or closed.

Owns what checking a request needs of a model. Knows no weights and no blocks.

    process of the engine    Engine(model)
    process of the caller    Engine(AbsentModel): checks requests by the same rules
    after Engine.close       Engine(AbsentModel): nothing keeps the model's memory
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn, Self

from forge.errors import EngineDead
from forge.seam import Model, StepPlan


class AbsentModel(NamedTuple):
    """Properties of a model, enough to check a request. An engine that has it makes no step."""

    vocabulary_size: int
    eos_token_id: int

    @classmethod
    def from_model(cls, model: Model) -> Self:
        """Return the properties of the model, without a reference to it."""
        return cls(model.vocab_size(), model.eos_token())

    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        return self.vocabulary_size

    def num_layers(self) -> int:
        """Return 0: checking a request does not depend on the layers."""
        return 0

    def eos_token(self) -> int:
        """Return the id of the model's end token."""
        return self.eos_token_id

    def executes_moves(self) -> bool:
        """Return True: the engine that has the model has checked it."""
        return True

    def samples_late_rows(self) -> bool:
        """Return True: the engine that has the model checks it for each request."""
        return True

    def forward(self, plan: StepPlan) -> NoReturn:
        """Raise EngineDead: there is no model to run."""
        raise EngineDead("the model of this engine is closed, or in another process")
