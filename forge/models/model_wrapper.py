"""Around: a model around another one, for those who look on, time or spoil what passes.

Owns nothing but the model inside. Knows no plan: `forward` is for whoever is around it.
"""

from __future__ import annotations

from forge.seam import Model


class ModelWrapper:
    """Three of a Model's four methods: the numbers are those of the model inside."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def vocab_size(self) -> int:
        """The model's."""
        return self._model.vocab_size()

    def num_layers(self) -> int:
        """The model's."""
        return self._model.num_layers()

    def eos_token(self) -> int:
        """The model's."""
        return self._model.eos_token()
