"""ServedModel: the one name that requests may give for the model.

Owns the check of the field `model`. Knows no engine.
"""

from __future__ import annotations

from typing import NamedTuple

from forge.server.errors import APIError, excerpt
from forge.server.protocol import missing_field_error


class ServedModel(NamedTuple):
    """The model of this server, by its name over HTTP."""

    name: str

    def check_required(self, name: str | None) -> None:
        """Raise InvalidRequest without a name, and APIError for a name of another model."""
        if not name:
            raise missing_field_error("model", f"Use {self.name}")
        self.check(name)

    def check(self, name: str) -> None:
        """Raise APIError for a name of another model."""
        if name != self.name:
            raise APIError(
                404,
                "model_not_found",
                f"model: there is no '{excerpt(name)}' here. Use {self.name}",
                param="model",
            )
