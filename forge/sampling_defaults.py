"""SamplingDefaults: sampling parameters of a checkpoint, for requests that leave them out.

Owns which fields of generation_config.json apply, and how a request's own replace them. Reads no
file: a model's loader does.

    generation_config.json     {"temperature": 0.6, "top_k": 20, "max_new_tokens": 2048}
    a chat with                {"top_k": 1}
    its parameters             temperature 0.6, top_k 1, max_tokens 2048

Always true: a value of the request wins, also over `max_new_tokens`. SamplingParams made in Python
are complete, and nothing is added to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from forge.errors import InvalidConfig, InvalidRequest
from forge.request import SamplingParams

FIELD_NAMES: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json -> that of SamplingParams, as in vLLM."""

OPTION = "generation_config"


class SamplingDefaults(NamedTuple):
    """Fields of SamplingParams for requests that leave them out; all are in bounds."""

    fields: Mapping[str, Any]

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the defaults in a generation_config.json. Raises InvalidConfig."""
        found = {
            name: config[key] for key, name in FIELD_NAMES.items() if config.get(key) is not None
        }
        try:
            SamplingParams(**found)
        except InvalidRequest as error:
            raise InvalidConfig(
                OPTION,
                f"{error.field} of generation_config.json: {error.problem}",
                "Fix it, or start with --generation-config none",
            ) from None
        return cls(found)

    def params(self) -> SamplingParams:
        """Return the parameters of a call that has none."""
        return SamplingParams(**self.fields)

    def complete(self, given: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
        """Return the fields that a request gives, and the defaults for others.

        max_tokens   default of the request's route; the checkpoint's may be lower
        """
        limits = (max_tokens, self.fields.get("max_tokens"))
        limit = min((each for each in limits if each is not None), default=None)
        return {**self.fields, "max_tokens": limit, **given}

    def describe(self) -> str:
        """Return the fields as text: `temperature 0.6, top_k 20`."""
        return ", ".join(f"{name} {value}" for name, value in self.fields.items())


NO_SAMPLING_DEFAULTS = SamplingDefaults({})
