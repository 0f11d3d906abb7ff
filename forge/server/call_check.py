"""CallCheck: whether a finished answer with tools has the schemas that it must have.

Owns which schema each of its parts must have. Knows no stream and no JSON of a response.

    call of a strict tool     the client's schema
    call of another tool      the part of it that the grammar held: forge.server.tool_schema
    answer without calls      the schema of response_format
    each of them              no name twice in an object, however it is written
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from forge.request import Structure, StructureKind
from forge.schema_check import SchemaCheck
from forge.server.output_events import ArgumentsPiece, CallStart, OutputEvent, TextPiece
from forge.server.tool_formats import CallableTool, CallFormat, ToolCallFormat
from forge.server.tool_parameters import arguments_of


class CallCheck:
    """Checks the calls of one answer as they end.

    tools             tools that the answer may call
    structure         structure of an answer without calls, which no engine compares; None: any text
    violation         what is wrong with the first part that does not have its schema, or None
    num_valid_calls   calls that have ended before it, and have their schema
    """

    def __init__(
        self,
        tools: Iterable[CallableTool],
        call_format: CallFormat,
        structure: Structure | None = None,
    ) -> None:
        self.violation: str | None = None
        self.num_valid_calls = 0
        self._tools = {tool.name: tool for tool in tools}
        self._syntax = call_format.parameters if isinstance(call_format, ToolCallFormat) else None
        self._answer_schema = ""
        if self._tools and structure is not None and structure.kind is StructureKind.JSON_SCHEMA:
            self._answer_schema = structure.text
        self._has_calls = False
        self._name = ""
        self._pieces: list[str] = []  # of the arguments of a call, or of an answer without calls

    def add(self, events: Sequence[OutputEvent], *, is_in_call: bool) -> list[OutputEvent]:
        """Add the next events of the answer; return those that a client may have.

        is_in_call   the arguments of its last call are incomplete after them

        Nothing follows a violation, and a call that violates its schema does not end: clients run
        calls without a look at the finish reason, but not without the end of their arguments.
        """
        allowed: list[OutputEvent] = []
        for event in events:
            if isinstance(event, CallStart):
                self._end_call(allowed)
                self._has_calls = True
                self._pieces.clear()
                self._name = event.name
            elif isinstance(event, ArgumentsPiece) or (
                isinstance(event, TextPiece) and self._answer_schema and not self._has_calls
            ):
                self._pieces.append(event.text)
            if self.violation is not None:
                return allowed
            allowed.append(event)
        if not is_in_call:
            self._end_call(allowed)
        return allowed

    def end(self, *, ends_by_itself: bool, stops: bool, is_in_call: bool) -> None:
        """Check the last part of the answer.

        ends_by_itself   no limit and no stop of the request cut it
        stops            it has ended with `stop`: a stop may also come where it is complete
        is_in_call       the arguments of its last call are incomplete
        """
        if is_in_call and ends_by_itself:
            self.violation = self.violation or "the answer ended within a call"
        if not self._answer_schema or self._has_calls:
            return
        if ends_by_itself or (stops and _is_json("".join(self._pieces))):
            self._fits("the answer", SchemaCheck(json.loads(self._answer_schema)))

    def _end_call(self, events: list[OutputEvent]) -> None:
        """Compare the open call, if there is one; take its end out of the events where it fails."""
        if not self._name or self.violation is not None:
            return
        name, self._name = self._name, ""
        check = arguments_of(self._tools[name], self._syntax).check
        if self._fits(f"the arguments of the call of '{name}'", check):
            self.num_valid_calls += 1
            return
        while events:
            last = events.pop()
            if isinstance(last, ArgumentsPiece):
                events.append(ArgumentsPiece(last.text[:-1]))
                return

    def _fits(self, part: str, check: SchemaCheck) -> bool:
        """Return whether the pieces have their schema; else set the violation."""
        try:
            problem = check.find_violation("".join(self._pieces))
        except ValueError as error:  # it takes too long
            problem = str(error)
        if problem is not None:
            self.violation = f"{part}: {problem}"
        return problem is None


def _is_json(text: str) -> bool:
    """Return whether the text is complete JSON, however often its names come."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
