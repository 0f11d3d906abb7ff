"""ChatFormats: how one model writes its reasoning and its calls, and the parsers of its answers.

Owns the choice of the formats: by the names of two options, or from the chat template. Knows no
request of HTTP.

    --reasoning-config JSON    ──► the text that ends a reasoning whose budget is spent
    --reasoning-parser NAME    ──► REASONING_FORMATS ─┐
    --tool-call-parser NAME    ──► FORMATS ───────────┴─► ChatFormats ──► OutputParser of a choice
    neither: the chat template ──► the format whose marks it contains
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from forge.errors import InvalidConfig, InvalidRequest
from forge.reasoning_counter import ReasoningCounter
from forge.request import Reasoning, Structure, ThinkingBudget
from forge.server.call_check import CallCheck
from forge.server.forced_end import find_end_ids
from forge.server.harmony import COUNTED_ENDS, HarmonyParser
from forge.server.output_parser import OutputParser
from forge.server.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning,
    find_reasoning_format,
    num_open_tokens,
)
from forge.server.response_format import NamedStructure
from forge.server.tool_formats import FORMATS, HERMES, CallFormat, HarmonyFormat, find_format
from forge.server.tool_parser import LeadingCallParser, ToolCallParser
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
    end_ids        tokens that end a reasoning whose budget is spent; (): none can be ended
    """

    reasoning: ReasoningFormat | None
    calls: CallFormat | None
    call_problem: str
    end_ids: tuple[int, ...] = ()

    @property
    def call_format(self) -> CallFormat:
        """Format of the model's calls. Raises InvalidRequest if there is none."""
        if self.calls is None:
            raise InvalidRequest(
                "tools", self.call_problem, "Leave them out", "unsupported_parameter"
            )
        return self.calls

    @property
    def has_channels(self) -> bool:
        """True where answers are messages in channels, as those of gpt-oss."""
        return self.reasoning is HARMONY or isinstance(self.calls, HarmonyFormat)

    def find_reasoning(self, prompt: Sequence[int], tokenizer: Tokenizer) -> Reasoning | None:
        """Return the reasoning that an answer to this prompt may have; None where it has none."""
        return find_reasoning(self.reasoning, prompt, tokenizer)

    def thinking_budget_of(
        self, num_tokens: int, prompt: Sequence[int], tokenizer: Tokenizer
    ) -> ThinkingBudget | None:
        """Return the budget of an answer to this prompt; None where it has no reasoning.

        num_tokens   tokens after the begin marker, those of the prompt included

        Raises InvalidRequest where the model's reasoning cannot be ended.
        """
        if self.reasoning is None or not self.end_ids:
            raise InvalidRequest(
                "thinking_token_budget",
                "the reasoning of this model's answers cannot be ended",
                "Leave it out, or start the server with --reasoning-parser",
                "unsupported_parameter",
            )
        reasoning = self.find_reasoning(prompt, tokenizer)
        if reasoning is None:
            return None
        num_open = num_open_tokens(reasoning, self.reasoning.begin, prompt, tokenizer)
        return ThinkingBudget(max(0, num_tokens - num_open), reasoning, self.end_ids)

    def structure_of(
        self,
        answer: NamedStructure | None,
        tools: ToolSet | None,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
    ) -> Structure | None:
        """Return the structure of an answer to this prompt, or None. Raises InvalidRequest.

        answer   structure of an answer without calls
        tools    tools that the answer may call
        """
        if tools is None:
            structure = None if answer is None else answer.structure
        else:
            structure = tools.structure(self.call_format, tokenizer, answer)
            if self.has_channels:
                return structure  # the grammar of its messages has the reasoning
        if structure is None:
            return None
        return structure._replace(reasoning=self.find_reasoning(prompt, tokenizer))

    def create_parser(
        self,
        answer: NamedStructure | None,
        tools: ToolSet | None,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
    ) -> OutputParser:
        """Return the parser of a choice. The arguments are those of `structure_of`."""
        token_bytes = tokenizer.token_bytes
        callable_tools = () if tools is None else tools.callable_tools
        structure = None if answer is None else answer.structure
        reasoning = self.find_reasoning(prompt, tokenizer)
        begin, end = reasoning or ("", "")
        if self.has_channels:
            return OutputParser(
                ReasoningParser(None),
                HarmonyParser([tool.name for tool in callable_tools]),
                ReasoningCounter("", COUNTED_ENDS if end else (), token_bytes),
                CallCheck(callable_tools, HarmonyFormat(), structure),
            )
        call_format = HERMES if tools is None else self.call_format
        assert not isinstance(call_format, HarmonyFormat), "its answers have channels"
        calls = ToolCallParser(call_format, callable_tools)
        # A structure begins right after the marker, and its line breaks belong to it.
        return OutputParser(
            ReasoningParser(reasoning, "\n" if answer is None else ""),
            calls if answer is None else LeadingCallParser(calls),
            ReasoningCounter(begin, [end] if end else [], token_bytes),
            CallCheck(callable_tools, call_format, structure),
        )


def find_chat_formats(
    tokenizer: Tokenizer,
    reasoning_parser: str | None = None,
    tool_call_parser: str | None = None,
    reasoning_config: str | None = None,
) -> ChatFormats:
    """Return the formats of a model: those of these names, else those that its template shows.

    Raises InvalidConfig for an unknown name, and for a reasoning_config that does not fit.
    """
    template = tokenizer.chat_template or ""
    if reasoning_parser is None:
        reasoning = find_reasoning_format(template)
    else:
        reasoning = _format_of_name("reasoning_parser", reasoning_parser, REASONING_FORMATS)
    calls: CallFormat | None = None
    if not mentions_tools(template):
        problem = "the model's chat template does not support tools"
    else:
        calls, problem = find_format(template), "the format of the model's calls is not known here"
    if tool_call_parser is not None:
        calls = _format_of_name("tool_call_parser", tool_call_parser, FORMATS)
    end_ids = find_end_ids(tokenizer, reasoning, reasoning_config)
    return ChatFormats(reasoning, calls, problem, end_ids)


def _format_of_name(option: str, name: str, formats: Mapping[str, FormatT]) -> FormatT | None:
    """Return the format of this name; None for NO_FORMAT. Raises InvalidConfig."""
    if name == NO_FORMAT:
        return None
    if name not in formats:
        names = ", ".join((*formats, NO_FORMAT))
        raise InvalidConfig(option, f"there is no {name[:64]!r}", f"Give one of {names}")
    return formats[name]
