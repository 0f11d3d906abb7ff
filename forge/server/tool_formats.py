"""Formats of tool calls: for each family of models a row.

Owns the formats. Knows no request and no HTTP. tool_grammar.py has the grammar of an answer in a
format, tool_parser.py and parameter_reader.py its parser.

    begin          <tool_call>\\n                    <tool_call>\\n
    call_prefix    {"name": "NAME", "arguments":     <function=NAME>\\n
    arguments      {...}                             <parameter=KEY>\\nVALUE\\n</parameter>\\n ...
    call_suffix    }                                 </function>
    separator      \\n</tool_call>\\n<tool_call>\\n    \\n</tool_call>\\n<tool_call>\\n
                   and the next call             and the next call
    end            \\n</tool_call>                \\n</tool_call>

JSON is spaced as forge.structured_output spaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called.

    name         letters, digits, _ and -, which JSON does not escape
    parameters   schema of its arguments, an object, that the grammar of its calls is built from
    is_strict    it is the whole schema of the client: what it does not hold is refused
    derived      what was computed of them: see `tool_parameters.arguments_of`
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    derived: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)


class ParameterSyntax(NamedTuple):
    """Arguments that are written one by one, and not as a JSON object.

    key         text before a value, with KEY for the parameter's name
    end         text after a value; "" where `separator` or the end of the call shows its end
    separator   text between two parameters
    quote       what surrounds a string; "": a string is written as it is, up to `end`
    words       words of the format for a whole value, and the JSON of each
    """

    key: str
    end: str
    separator: str = ""
    quote: str = ""
    words: Mapping[str, str] = MappingProxyType({"true": "true", "false": "false", "null": "null"})

    def key_text(self, name: str) -> str:
        """Return the text before the value of this parameter."""
        return self.key.replace("KEY", name)


class ToolCallFormat(NamedTuple):
    """The format of one family's tool calls.

    template_marks   texts that the source of a family's template contains, all of them
    other_marks      texts that it does not contain, none of them
    trigger          text after which an answer must continue with a call; "" where only the
                     beginning of a call shows that
    trigger_rest     text that must follow the trigger within a line, so that a sentence may mention
                     it; "": the trigger begins a call anywhere. A trigger that is a special token
                     does so as well
    begin            text before the first call
    other_trigger    another text after which an answer must continue with a call, because models of
                     the family sometimes write it; "": there is none
    other_begin      text before the first call where its beginning is `other_trigger`
    separator        text from one call to the next; None where an answer has at most one call
    end              text after the last call
    prefix           text of a call up to its arguments, with NAME for the tool's name
    call_suffix      text of a call after its arguments
    parameters       how arguments are written; None: as a JSON object
    first_char       first character of all arguments, which shows that a name is complete; "" where
                     the prefix shows it
    id_prefix        prefix of a call's id; a template may refuse others
    id_digits        hexadecimal digits after the prefix
    """

    template_marks: tuple[str, ...]
    other_marks: tuple[str, ...]
    trigger: str
    begin: str
    separator: str | None
    end: str
    prefix: str = '{"name": "NAME", "arguments": '
    call_suffix: str = "}"
    parameters: ParameterSyntax | None = None
    first_char: str = "{"
    trigger_rest: str = ""
    other_trigger: str = ""
    other_begin: str = ""
    id_prefix: str = "call_"
    id_digits: int = 24

    def call_prefix(self, name: str) -> str:
        """Return a call of this tool up to its arguments."""
        return self.prefix.replace("NAME", name)

    @property
    def texts(self) -> str:
        """All texts of the format, in which special tokens may be."""
        syntax = self.parameters
        begins = (self.begin, self.other_begin)
        parts = (*begins, self.prefix, self.call_suffix, self.separator or "", self.end)
        return " ".join(parts + (() if syntax is None else (syntax.key, syntax.end)))


class HarmonyFormat(NamedTuple):
    """The format of gpt-oss, whose answers are messages in channels: see harmony.py."""

    template_marks: tuple[str, ...] = ("<|channel|>",)
    other_marks: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_digits: int = 24

    @property
    def texts(self) -> str:
        """All texts of the format, in which special tokens may be."""
        return "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|>"


CallFormat = ToolCallFormat | HarmonyFormat

PYTHON_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
JSON_WORDS = ParameterSyntax("", "").words
HERMES = ToolCallFormat(
    template_marks=("<tool_call>", '"arguments"'),
    other_marks=("<function=", "<arg_key>", "<tool_sep>"),
    trigger="<tool_call>",
    trigger_rest="\n",
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
QWEN3_CODER = HERMES._replace(
    template_marks=("<tool_call>", "<function=", "<parameter="),
    other_marks=(),
    prefix="<function=NAME>\n",
    call_suffix="</function>",
    parameters=ParameterSyntax(
        "<parameter=KEY>\n",
        "\n</parameter>\n",
        words={**JSON_WORDS, **PYTHON_WORDS},  # templates write True, and models also true
    ),
    first_char="",
    other_trigger="<function=",
)
MISTRAL = ToolCallFormat(
    template_marks=("[TOOL_CALLS] [",),
    other_marks=("[ARGS]",),
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS] [",
    separator=", ",
    end="]",
    id_prefix="",
    id_digits=9,
)
MISTRAL_COMPACT = MISTRAL._replace(template_marks=("[TOOL_CALLS][",), begin="[TOOL_CALLS][")
MISTRAL_ARGS = MISTRAL._replace(
    template_marks=("[TOOL_CALLS]", "[ARGS]"),
    other_marks=("[CALL_ID]",),
    begin="[TOOL_CALLS]",
    prefix="NAME[ARGS]",
    call_suffix="",
    separator="[TOOL_CALLS]",
    end="",
)
GRANITE = ToolCallFormat(
    template_marks=("<|start_of_role|>", "<|tool_call|>"),
    other_marks=(),
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    separator=", ",
    end="]",
    other_trigger="<tool_call>[",
    other_begin="<tool_call>[",
)
LLAMA = ToolCallFormat(
    template_marks=('{"name": function name, "parameters": ',),
    other_marks=(),
    trigger="",
    begin="",
    separator=None,
    end="",
    prefix='{"name": "NAME", "parameters": ',
)
INTERNLM = LLAMA._replace(
    template_marks=("<|action_start|><|plugin|>",),
    trigger="<|action_start|>",
    begin="<|action_start|><|plugin|>\n",
    end="<|action_end|>",
)
PYTHONIC = ToolCallFormat(
    template_marks=("[func_name1(params_name1=params_value1",),
    other_marks=(),
    trigger="",
    begin="[",
    separator=", ",
    end="]",
    prefix="NAME(",
    call_suffix=")",
    parameters=ParameterSyntax("KEY=", "", ", ", '"', PYTHON_WORDS),
    first_char="",
)
DEEPSEEK_V3 = ToolCallFormat(
    template_marks=("<\uff5ctool▁sep\uff5c>", "```json"),
    other_marks=(),
    trigger="<\uff5ctool▁calls▁begin\uff5c>",
    begin="<\uff5ctool▁calls▁begin\uff5c>",
    separator="\n",
    end="<\uff5ctool▁calls▁end\uff5c>",
    prefix="<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>NAME\n```json\n",
    call_suffix="\n```<\uff5ctool▁call▁end\uff5c>",
)
DEEPSEEK_V31 = DEEPSEEK_V3._replace(
    template_marks=("<\uff5ctool▁sep\uff5c>",),
    other_marks=("```json",),
    separator="",
    prefix="<\uff5ctool▁call▁begin\uff5c>NAME<\uff5ctool▁sep\uff5c>",
    call_suffix="<\uff5ctool▁call▁end\uff5c>",
)
GLM45 = ToolCallFormat(
    template_marks=("<tool_call>", "<arg_key>"),
    other_marks=("</arg_key><arg_value>",),
    trigger="<tool_call>",
    begin="<tool_call>",
    separator="\n<tool_call>",
    end="",
    prefix="NAME\n",
    call_suffix="</tool_call>",
    parameters=ParameterSyntax("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    first_char="",
)
GLM47 = GLM45._replace(
    template_marks=("<tool_call>", "</arg_key><arg_value>"),
    other_marks=(),
    separator="<tool_call>",
    prefix="NAME",
    parameters=ParameterSyntax("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
    first_char="<",
)
MINIMAX_M2 = ToolCallFormat(
    template_marks=("<minimax:tool_call>",),
    other_marks=(),
    trigger="<minimax:tool_call>",
    begin="<minimax:tool_call>\n",
    separator="\n",
    end="\n</minimax:tool_call>",
    prefix='<invoke name="NAME">\n',
    call_suffix="</invoke>",
    parameters=ParameterSyntax('<parameter name="KEY">', "</parameter>\n"),
    first_char="",
)
FORMATS: Mapping[str, CallFormat] = {
    "openai": HarmonyFormat(),
    "minimax_m2": MINIMAX_M2,
    "glm47": GLM47,
    "glm45": GLM45,
    "qwen3_coder": QWEN3_CODER,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "mistral_compact": MISTRAL_COMPACT,
    "mistral_args": MISTRAL_ARGS,
    "granite": GRANITE,  # after hermes: a template of Granite 4 has the marks of both
    "internlm": INTERNLM,
    "llama3_json": LLAMA,
    "llama4_pythonic": PYTHONIC,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}
"""Formats by name, where vLLM has one by its name. A template has the first whose marks it has."""


def find_format(template: str) -> CallFormat | None:
    """Return the format of a model with this chat template; None if it is not in FORMATS."""
    source = template.replace("\\", "")  # a template may escape quotes
    for call_format in FORMATS.values():
        if all(mark in source for mark in call_format.template_marks):
            if not any(mark in source for mark in call_format.other_marks):
                return call_format
    return None
