"""ModelWrapper: base of models that observe, time or alter another model's steps.

Owns nothing but the model inside. Knows no plan: subclasses implement `forward`.
"""

from __future__ import annotations

from forge.seam import Model, executes_moves, samples_late_rows


class ModelWrapper:
    """All methods of a Model but `forward`, passed on to the model inside."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def vocab_size(self) -> int:
        """Return the width of the inner model's logits."""
        return self._model.vocab_size()

    def num_layers(self) -> int:
        """Return the layers whose state a block of the inner model holds."""
        return self._model.num_layers()

    def eos_token(self) -> int:
        """Return the inner model's id that ends an output."""
        return self._model.eos_token()

    def executes_moves(self) -> bool:
        """Return whether the inner model carries out stores and loads."""
        return executes_moves(self._model)

    def samples_late_rows(self) -> bool:
        """Return whether the inner model samples late rows with their masks."""
        return samples_late_rows(self._model)
