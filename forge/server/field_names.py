"""FieldNames: the client's names of the fields that a chat request was made of.

Owns the renaming of errors. Knows no API. A request of another API becomes a chat request, whose
checks name its own fields; an error has to name those that the client sent.

    messages[2].tool_calls[0].function.arguments ──► input[5].arguments
    max_completion_tokens                        ──► max_output_tokens

Always true: the longest name that a field begins with is the one that is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from forge.errors import InvalidRequest

_NAME_END = re.compile(r"(?=[.\[])|$")


class FieldNames:
    """Names of fields of the request that a body became, and the client's name of each."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def client_name(self, field: str) -> str:
        """Return the client's name of a field; the field itself where it has no other name."""
        for end in reversed([match.start() for match in _NAME_END.finditer(field)]):
            name = self._names.get(field[:end])
            if name is not None:
                return name + field[end:]
        return field

    @contextmanager
    def rename_errors(self) -> Iterator[None]:
        """Raise an InvalidRequest again under the client's name of its field."""
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(
                self.client_name(error.field), error.problem, error.remedy, error.code
            ) from None
