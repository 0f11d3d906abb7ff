"""ServedModel: the one name that requests may give for the model.

Owns the check of the field `model`. Knows no engine.
"""

from __future__ import annotations

from typing import NamedTuple

from forge.server.errors import APIError, excerpt


class ServedModel(NamedTuple):
    """The model of this server, by its name over HTTP."""

    name: str

    def check(self, name: str | None) -> None:
        """Raise APIError for a name of another model. Without a name this one is meant."""
        if name is not None and name != self.name:
            raise APIError(
                404,
                "model_not_found",
                f"model: there is no '{excerpt(name)}' here. Use {self.name}",
                param="model",
            )
