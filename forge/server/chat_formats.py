"""ChatFormats: how one model writes its reasoning and its calls, and the parsers of its answers.

Owns the choice of the formats: by the names of two options, or from the chat template. Knows no
request of HTTP.

    --reasoning-parser NAME    ──► REASONING_FORMATS ─┐
    --tool-call-parser NAME    ──► FORMATS ───────────┴─► ChatFormats ──► OutputParser of a choice
    neither: the chat template ──► the format whose marks it contains
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from forge.errors import InvalidConfig, InvalidRequest
from forge.request import Reasoning, Request
from forge.server.output_parser import OutputParser
from forge.server.reasoning import (
    REASONING_FORMATS,
    ReasoningCounter,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning,
    find_reasoning_format,
)
from forge.server.tool_formats import FORMATS, HERMES, ToolCallFormat, ToolCallParser, find_format
from forge.server.tools import ToolSet, mentions_tools
from forge.tokenizer import Tokenizer

NO_FORMAT = "none"
"""Name that turns a parser off, whatever the template shows."""

FormatT = TypeVar("FormatT")


class ChatFormats(NamedTuple):
    """Formats of a model's answers.

    reasoning      None: answers have no reasoning
    calls          None: answers have no calls
    call_problem   why there is no format of calls
    """

    reasoning: ReasoningFormat | None
    calls: ToolCallFormat | None
    call_problem: str

    @property
    def call_format(self) -> ToolCallFormat:
        """Format of the model's calls. Raises InvalidRequest if there is none."""
        if self.calls is None:
            raise InvalidRequest(
                "tools", self.call_problem, "Leave them out", "unsupported_parameter"
            )
        return self.calls

    def find_reasoning(self, prompt: Sequence[int], tokenizer: Tokenizer) -> Reasoning | None:
        """Return the reasoning that an answer to this prompt may have; None where it has none."""
        return find_reasoning(self.reasoning, prompt, tokenizer)

    def create_parser(
        self, tools: ToolSet | None, request: Request, tokenizer: Tokenizer
    ) -> OutputParser:
        """Return the parser of a choice of the request.

        tools   tools that the answer may call; None: no text of it is a call
        """
        reasoning = self.find_reasoning(request.prompt, tokenizer)
        # A structure begins right after the marker, and its line breaks belong to it.
        dropped = "\n" if tools is not None or request.params.structure is None else ""
        names = [] if tools is None else [tool.name for tool in tools.callable_tools]
        begin, end = reasoning or ("", "")
        return OutputParser(
            ReasoningParser(reasoning, dropped),
            ToolCallParser(HERMES if tools is None else self.call_format, names),
            ReasoningCounter(begin, [end] if end else [], tokenizer.token_bytes),
        )


def find_chat_formats(
    tokenizer: Tokenizer, reasoning_parser: str | None = None, tool_call_parser: str | None = None
) -> ChatFormats:
    """Return the formats of a model: those of these names, else those that its template shows.

    Raises InvalidConfig for an unknown name.
    """
    template = tokenizer.chat_template or ""
    if reasoning_parser is None:
        reasoning = find_reasoning_format(template)
    else:
        reasoning = _format_of_name("reasoning_parser", reasoning_parser, REASONING_FORMATS)
    if not mentions_tools(template):
        calls, problem = None, "the model's chat template does not support tools"
    else:
        calls, problem = find_format(template), "the format of the model's calls is not known here"
    if tool_call_parser is not None:
        calls = _format_of_name("tool_call_parser", tool_call_parser, FORMATS)
    return ChatFormats(reasoning, calls, problem)


def _format_of_name(option: str, name: str, formats: Mapping[str, FormatT]) -> FormatT | None:
    """Return the format of this name; None for NO_FORMAT. Raises InvalidConfig."""
    if name == NO_FORMAT:
        return None
    if name not in formats:
        names = ", ".join((*formats, NO_FORMAT))
        raise InvalidConfig(option, f"there is no {name[:64]!r}", f"Give one of {names}")
    return formats[name]
