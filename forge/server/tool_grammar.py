"""Grammars of answers that may call tools, in llguidance's dialect of Lark.

Owns the grammar of each format. Knows no request and no parser of answers.

    start    text, or text up to calls      min_calls = 0
             calls                          min_calls = 1
             a structure, or calls          min_calls = 0 and an answer that has a structure
    call0    prefix rest0                   rest0: arguments suffix

Always true: the grammar of an answer allows nothing but text and calls of the tools, so a parser
reads every call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from forge.schema_grammar import prepare_schema
from forge.server.tool_formats import CallableTool, ParameterSyntax, ToolCallFormat
from forge.server.tool_parameters import PlainText, ToolParameter, arguments_of
from forge.structured_output import write_regex_rule

_ANY = "/(?s:.*)/"


class TerminalWriter:
    """Writes texts as terminals. A special token in them is that token, never its text.

    special_ids   special tokens, by name
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.special_ids = special_ids
        names = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special_names = re.compile(f"({'|'.join(names)})" if names else "(?!)")

    def write(self, text: str) -> str:
        """Return the text as terminals and special tokens; "" for no text."""
        parts = filter(None, self._special_names.split(text))
        ids = self.special_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)

    def has_special(self, text: str) -> bool:
        """Return whether a special token is in the text."""
        return self._special_names.search(text) is not None


def write_json_rule(schema: Mapping[str, object] | bool) -> str:
    """Return the right side of a rule for JSON that the schema allows: any for `true`."""
    return f"%json {json.dumps(prepare_schema(schema))}"


class ToolGrammarBuilder:
    """Builds the grammar of an answer.

    special_ids   special tokens in the format's texts, by name; the answer must have these tokens
                  there
    """

    def __init__(self, call_format: ToolCallFormat, special_ids: Mapping[str, int]) -> None:
        self._format = call_format
        self._terminals = TerminalWriter(special_ids)

    def build_grammar(
        self, tools: Sequence[CallableTool], min_calls: int, max_calls: int, answer: str = ""
    ) -> str:
        """Return the grammar of an answer.

        min_calls   0: any text, and calls only after it; 1: nothing but calls
        max_calls   most calls, where the format has a separator
        answer      right side of a rule for an answer without calls; "": any text
        """
        call_format, more_calls, write = self._format, "", self._terminals.write
        separator, numbers = call_format.separator, range(len(tools))
        if separator is not None and max_calls > 1:
            more_calls = f"({' | '.join(f'next{i}' for i in numbers)}){{0,{max_calls - 1}}} "
        more = (more_calls + write(call_format.end)) or '""'
        lines = [
            f"call: {' | '.join(f'call{i}' for i in numbers)}",
            f"more: {more}",
        ]
        for index, tool in enumerate(tools):
            prefix = call_format.call_prefix(tool.name)
            lines.append(f"call{index}: {write(prefix)} rest{index}")
            if more_calls:
                # One terminal: the lexer does not return to the end of a shorter one.
                lines.append(f"next{index}: {write((separator or '') + prefix)} rest{index}")
            lines += self._build_rest(index, tool)
        calls = f"{write(call_format.begin)} call more"
        if min_calls:
            return "\n".join([f"start: {calls}", *lines])
        if answer:
            return "\n".join([f"start: answer | {calls}", f"answer: {answer}", *lines])
        return "\n".join([*self._build_auto_rules(tools), *lines])

    def _build_rest(self, index: int, tool: CallableTool) -> list[str]:
        """Return the rules for what follows the prefix of a call."""
        suffix, syntax = self._terminals.write(self._format.call_suffix), self._format.parameters
        if syntax is None:
            return [f"rest{index}: {write_json_rule(tool.parameters)} {suffix}".rstrip()]
        parameters = arguments_of(tool, syntax).parameters
        arguments = "" if not parameters else f"first{index}_0"
        if not any(each.is_required for each in parameters) and parameters:
            arguments += "?"
        lines = [f"rest{index}: {arguments} {suffix}"]
        for number, parameter in enumerate(parameters):
            is_last = number == len(parameters) - 1
            own, more = f"p{index}_{number}", "" if is_last else f" more{index}_{number + 1}"
            first = f"{own}{more}"
            if not parameter.is_required and not is_last:
                first += f" | first{index}_{number + 1}"
            lines.append(f"first{index}_{number}: {first}")
            if number:
                step = f"{self._terminals.write(syntax.separator)} {own}".strip()
                step = step if parameter.is_required else f"({step})?"
                lines.append(f"more{index}_{number}: {step}{more}")
            lines += self._build_parameter(own, parameter, syntax)
        return lines

    def _build_parameter(
        self, rule: str, parameter: ToolParameter, syntax: ParameterSyntax
    ) -> list[str]:
        """Return the rules for one parameter: its key, its value and what ends it."""
        write = self._terminals.write
        key, end = write(syntax.key_text(parameter.name)), write(syntax.end)
        text, words = parameter.text, list(parameter.words)
        if text is not None and text.is_free:
            if self._terminals.has_special(syntax.end):
                terminal = rule.upper()
                # Spelled out within a text, the end would end the value for a parser.
                lines = [f"{terminal}: {_ANY} & ~({_ANY} {json.dumps(syntax.end)} {_ANY})"]
                return [f"{rule}: {key} {terminal} {end}", *lines]
            return [f"{rule}: {key} value_{rule}", f"value_{rule}[lazy]: {_ANY} {end}"]
        forms, lines = [], []
        if text is not None:
            forms.append(f"text_{rule}")
            lines += self._build_text(rule, text, words, syntax.end)
        elif words:
            forms.append(f"({' | '.join(map(json.dumps, words))}) {end}")
        if parameter.other is not None:
            forms.append(f"value_{rule} {end}")
            lines.append(f"value_{rule}: {write_json_rule(parameter.other)}")
        return [f"{rule}: {key} ({' | '.join(map(str.strip, forms))})", *lines]

    def _build_text(self, rule: str, text: PlainText, words: Sequence[str], end: str) -> list[str]:
        """Return the rules for text that is restricted, or one of the words, and for its end."""
        texts = [json.dumps(each) for each in dict.fromkeys([*text.choices, *words])]
        texts += [f"({' & '.join(map(write_regex_rule, each))})" for each in text.patterns]
        terminal, whole = rule.upper(), json.dumps(end)
        if self._terminals.has_special(end):
            return [
                f"text_{rule}: {terminal} {self._terminals.write(end)}",
                f"{terminal}: ({' | '.join(texts)}) & ~({_ANY} {whole} {_ANY})",
            ]
        return [
            f"text_{rule}[lazy]: {terminal}",
            f"{terminal}: (({' | '.join(texts)}) {whole}) & ~({_ANY} {whole} /(?s:.+)/)",
        ]

    def _build_auto_rules(self, tools: Sequence[CallableTool]) -> list[str]:
        """Return rules for text, or text up to a call: a lazy lexeme ends where a call begins.

        A call begins after whole lines, or where a trigger and what must follow it are in a line.
        """
        call_format, write = self._format, self._terminals.write
        starts, lines = ["TEXT"], ["TEXT: /(?s:.*)/"]
        if not call_format.trigger:
            for index, tool in enumerate(tools):
                head, comma, rest = call_format.call_prefix(tool.name).partition(", ")
                starts.append(f"sign{index} {write(comma + rest)} rest{index} more")
                lines.append(f"sign{index}[lazy]: TEXT {json.dumps(call_format.begin + head)}")
        trigger, begin = call_format.trigger, call_format.begin
        signs = [
            ("sign", "TEXT", trigger, begin),
            ("other", "TEXT", call_format.other_trigger, call_format.other_begin),
        ]
        if call_format.trigger_rest and trigger not in self._terminals.special_ids:
            lines.append("LINES: /((?s:.*)\\n)?/")
            signs[0] = ("sign", "LINES", trigger, begin)
            signs.append(("within", "TEXT", trigger + call_format.trigger_rest, begin))
        for rule, text, trigger, begin in signs:
            if not trigger:
                continue
            sign = f"{text} {write(trigger)}"
            if trigger not in self._terminals.special_ids:
                sign = rule
                lines.append(f"{rule}[lazy]: {text} {json.dumps(trigger)}")
            for index, tool in enumerate(tools):
                prefix = (begin + call_format.call_prefix(tool.name)).removeprefix(trigger)
                starts.append(f"{sign} {write(prefix)} rest{index} more")
        return [f"start: {' | '.join(starts)}", *lines]
