"""The tools of a chat request: their checks, and their effect on the answer.

Owns the checks of `tools`, `tool_choice` and `parallel_tool_calls`. Knows no template beyond its
source: tool_formats.py has the formats of calls.

    tools[0].function     name, description, parameters ──► definitions, for the template
    tool_choice           none       the template gets no tool
                          auto       text, or text and calls
                          required   calls
                          a function one call of it
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from forge.errors import InvalidRequest
from forge.request import Structure, StructureKind, has_more_values, num_properties
from forge.schema_keywords import drop_neutral_keywords
from forge.server.body import MAX_JSON_ITEMS, has_too_many_items
from forge.server.errors import excerpt
from forge.server.harmony import HarmonyGrammarBuilder
from forge.server.json_numbers import parse_float, parse_int
from forge.server.protocol import (
    invalid_field_error,
    missing_field_error,
    unknown_field_error,
)
from forge.server.response_format import NamedStructure
from forge.server.tool_formats import CallableTool, CallFormat, HarmonyFormat, ToolCallFormat
from forge.server.tool_grammar import ToolGrammarBuilder, write_json_rule
from forge.server.tool_parameters import arguments_of, parameter_problem
from forge.server.tool_schema import (
    find_unheld_keyword,
    hoist_references,
    relax_further,
    relax_schema,
)
from forge.structured_output import write_regex_rule
from forge.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Calls of one message, in a request or in an answer: a model may repeat itself."""
MAX_JSON_DEPTH = 64
"""Depth of nested lists and objects, in the schema of parameters and in arguments."""
MAX_JSON_VALUES = 2**19
"""Values of a schema, of arguments or of a key for a template. Writing them holds Python's lock."""
MAX_TOOL_PROPERTIES = 1000
"""Properties in the schemas of all tools: the time to compile them grows with the square."""

TOOL_CHOICES = ("none", "auto", "required")

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MENTIONS_TOOLS = re.compile(r"\btools\b")
_ANNOTATION_KEYS = {"description", "title", "$comment"}
_LITERAL_KEYS = {"const", "enum", "default", "examples"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolSet(NamedTuple):
    """The tools that an answer may call.

    definitions      definitions of all tools, for the template
    callable_tools   tools that may be called
    field_paths      path in the request of each callable tool
    min_calls        least calls, 0 or 1
    max_calls        most calls, 1 or MAX_TOOL_CALLS
    finish_reason    finish reason of an answer with calls
    """

    definitions: tuple[dict[str, Any], ...]
    callable_tools: tuple[CallableTool, ...]
    field_paths: tuple[str, ...]
    min_calls: int
    max_calls: int
    finish_reason: str

    def structure(
        self, call_format: CallFormat, tokenizer: Tokenizer, answer: NamedStructure | None
    ) -> Structure:
        """Return the structure of the answer of a model that writes calls in this format.

        answer   structure of an answer without calls; None: any text

        Raises InvalidRequest for what the format cannot express.
        """
        self._check_strict_tools(call_format)
        syntax = call_format.parameters if isinstance(call_format, ToolCallFormat) else None
        for tool in self.callable_tools:
            arguments_of(tool, syntax)  # while this is a thread
        builder = create_grammar_builder(call_format, tokenizer)
        return Structure.grammar(
            builder.build_grammar(
                self.callable_tools,
                self.min_calls,
                self.max_calls,
                "" if answer is None else self._answer_rule(answer, call_format),
            )
        )

    def _answer_rule(self, answer: NamedStructure, call_format: CallFormat) -> str:
        """Return the right side of a rule for an answer without calls. Raises InvalidRequest."""
        kind, text, _ = answer.structure
        problem = None
        if kind is StructureKind.GRAMMAR:
            problem = "a grammar and tools together are not supported"
        elif isinstance(call_format, ToolCallFormat) and not (
            call_format.trigger or self.min_calls
        ):
            problem = "the model's calls look like other structured answers"
        if problem is not None:
            raise InvalidRequest(
                answer.field,
                problem,
                'Set tool_choice to "none", or leave one of them out',
                "conflicting_parameters",
            )
        if kind is StructureKind.REGEX:
            return write_regex_rule(text)
        return write_json_rule(json.loads(text))

    def alone(self, index: int) -> ToolSet:
        """Return the set in which one call of this callable tool must come."""
        return self._replace(
            callable_tools=self.callable_tools[index : index + 1],
            field_paths=self.field_paths[index : index + 1],
            min_calls=1,
            max_calls=1,
        )

    def relax_tools(self, *indices: int) -> ToolSet:
        """Return the set with less of the schemas of tools that are not strict.

        indices   of callable tools whose schema cannot be compiled; (): all of them together cannot
        """
        return self._replace(
            callable_tools=tuple(
                tool
                if tool.is_strict or (indices and index not in indices)
                else replace(tool, parameters=relax_further(tool.parameters))
                for index, tool in enumerate(self.callable_tools)
            )
        )

    def _check_strict_tools(self, call_format: CallFormat) -> None:
        """Raise InvalidRequest for a strict tool whose schema a grammar of the format relaxes."""
        for field_path, tool in zip(self.field_paths, self.callable_tools, strict=True):
            problem, keyword = None, find_unheld_keyword(tool.parameters)
            if keyword is not None:
                problem = f"a grammar cannot hold the value of '{keyword}'"
            elif isinstance(call_format, ToolCallFormat) and call_format.parameters is not None:
                problem = parameter_problem(tool.parameters, call_format.parameters)
            if problem is not None and tool.is_strict:
                raise InvalidRequest(
                    f"{field_path}.parameters",
                    problem,
                    "Simplify it, or set strict to false",
                    "invalid_schema",
                )


def parse_tools(tools: object, choice: object, parallel: bool | None) -> ToolSet | None:
    """Return the tools that an answer may call, or None. Raises InvalidRequest."""
    definitions = _parse_definitions(tools)
    if not isinstance(tools, list) or not definitions:
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if value is not None and value != "none":
                raise InvalidRequest(name, "there are no tools", "Leave it out, or give tools")
        return None
    names = [definition["function"]["name"] for definition in definitions]
    if choice in tools:  # a tool of the list stands for its name
        choice = {"type": "function", "function": {"name": names[tools.index(choice)]}}
    mode, allowed_names = _parse_tool_choice(choice, names)
    if mode == "none":
        return None
    indices = [names.index(name) for name in allowed_names]
    return ToolSet(
        definitions=tuple(definitions),
        callable_tools=tuple(
            _create_callable(definitions[index]["function"], tools[index]["function"])
            for index in indices
        ),
        field_paths=tuple(map(_field_path, indices)),
        min_calls=0 if mode == "auto" else 1,
        max_calls=1 if mode == "function" or parallel is False else MAX_TOOL_CALLS,
        finish_reason="stop" if mode == "function" else "tool_calls",
    )


def _create_callable(definition: Mapping[str, Any], given: Mapping[str, Any]) -> CallableTool:
    """Return the tool of a definition that `given` was parsed to."""
    schema = hoist_references(drop_neutral_keywords(definition["parameters"]))
    if given.get("strict"):
        return CallableTool(definition["name"], _strip_annotations(schema), is_strict=True)
    return CallableTool(definition["name"], relax_schema(schema))


def _field_path(index: int) -> str:
    return f"tools[{index}].function"


def _parse_tool_choice(choice: object, names: list[str]) -> tuple[str, list[str]]:
    """Return the mode and the names of the tools that may be called. Raises InvalidRequest.

    The mode is one of TOOL_CHOICES, or `function`: one call of the one tool.
    """
    if choice is None:
        return "auto", names
    if isinstance(choice, str) and choice in TOOL_CHOICES:
        return choice, names
    if not isinstance(choice, dict):
        raise invalid_field_error(
            "tool_choice", f"it is neither one of {', '.join(TOOL_CHOICES)} nor an object"
        )
    match choice.get("type"):
        case "function":
            return "function", [_parse_named_tool("tool_choice", choice, names)]
        case "allowed_tools":
            return _parse_allowed_tools(choice, names)
    raise InvalidRequest(
        "tool_choice.type",
        "only function and allowed_tools are supported",
        "Name a function",
        "unsupported_parameter",
    )


def _parse_named_tool(param: str, item: Mapping[str, Any], names: list[str]) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}."""
    _check_keys(param, item, {"type", "function"})
    function = item.get("function")
    if not isinstance(function, dict):
        raise invalid_field_error(f"{param}.function", "it is not an object", "invalid_type")
    _check_keys(f"{param}.function", function, {"name"})
    name = function.get("name")
    if name not in names:
        raise invalid_field_error(f"{param}.function.name", "there is no tool of this name")
    return str(name)


def _parse_allowed_tools(choice: Mapping[str, Any], names: list[str]) -> tuple[str, list[str]]:
    param = "tool_choice.allowed_tools"
    _check_keys("tool_choice", choice, {"type", "allowed_tools"})
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise invalid_field_error(param, "it is not an object", "invalid_type")
    _check_keys(param, allowed, {"mode", "tools"})
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid_field_error(f"{param}.mode", "it is neither auto nor required")
    if not isinstance(tools, list) or not tools:
        raise invalid_field_error(f"{param}.tools", "it is not a list of tools", "invalid_type")
    allowed_names: list[str] = []
    for index, tool in enumerate(tools):
        path = f"{param}.tools[{index}]"
        if not isinstance(tool, dict):
            raise invalid_field_error(path, "it is not an object", "invalid_type")
        if tool.get("type") != "function":
            raise InvalidRequest(
                f"{path}.type",
                "only function is supported",
                "Give functions",
                "unsupported_parameter",
            )
        allowed_names.append(_parse_named_tool(path, tool, names))
    return str(mode), list(dict.fromkeys(allowed_names))


def _parse_definitions(tools: object) -> list[dict[str, Any]]:
    """Return the definitions with all keys present. Raises InvalidRequest naming the field."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise invalid_field_error("tools", "it is not a list", "invalid_type")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            "tools", f"{len(tools)} tools, at most {MAX_TOOLS}", "Give fewer", "too_many_items"
        )
    definitions = [_parse_definition(index, tool) for index, tool in enumerate(tools)]
    names: set[str] = set()
    for index, definition in enumerate(definitions):
        name = definition["function"]["name"]
        if name in names:
            raise invalid_field_error(
                f"{_field_path(index)}.name", f"the name '{name}' is used twice"
            )
        names.add(name)
    count = sum(num_properties(each["function"]["parameters"]) for each in definitions)
    if count > MAX_TOOL_PROPERTIES:
        raise InvalidRequest(
            "tools",
            f"their parameters have {count} properties, at most {MAX_TOOL_PROPERTIES}",
            "Simplify them",
            "invalid_schema",
        )
    return definitions


def _parse_definition(index: int, tool: object) -> dict[str, Any]:
    param = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise invalid_field_error(param, "it is not an object", "invalid_type")
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{param}.type", "only function is supported", "Give functions", "unsupported_parameter"
        )
    _check_keys(param, tool, {"type", "function"})
    field_path, function = _field_path(index), tool.get("function")
    if function is None:
        raise missing_field_error(field_path, 'Give {"name": "..."}')
    if not isinstance(function, dict):
        raise invalid_field_error(field_path, "it is not an object", "invalid_type")
    _check_keys(field_path, function, {"name", "description", "parameters", "strict"})
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid_field_error(f"{field_path}.description", "it is not a string", "invalid_type")
    if not isinstance(function.get("strict"), bool | None):
        raise invalid_field_error(f"{field_path}.strict", "it is not true or false", "invalid_type")
    name = parse_tool_name(f"{field_path}.name", function.get("name"))
    parameters = _parse_parameters(f"{field_path}.parameters", function.get("parameters"))
    # A template may write a description that is there, so an absent one stays absent.
    given = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **given, "parameters": parameters}}


def _parse_parameters(param: str, schema: object) -> dict[str, Any]:
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict):
        raise invalid_field_error(param, "it is not an object", "invalid_type")
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid_field_error(f"{param}.type", 'it is not "object"', "invalid_schema")
    check_json_size(param, schema)
    return {"type": "object", **schema}


def parse_tool_name(param: str, name: object) -> str:
    """Return the name of a tool. Raises InvalidRequest."""
    if name is None:
        raise missing_field_error(param, "Give the name of a function")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise invalid_field_error(param, "it is not 1 to 64 letters, digits, _ or -")
    return name


def check_json_size(param: str, value: object) -> None:
    """Raise InvalidRequest for a value with too many values or levels. Not recursive."""
    if has_more_values(value, MAX_JSON_VALUES):
        raise invalid_field_error(param, f"it has more than {MAX_JSON_VALUES} values")
    values, depth = [value], 0
    while values:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise invalid_field_error(param, f"it is nested deeper than {MAX_JSON_DEPTH}")
        values = [
            inner
            for item in values
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


def _strip_annotations(schema: Any) -> Any:
    """Return the schema without descriptions and titles: a grammar's length is limited.

    A property of such a name is kept, because its value is a schema. Recursive: call
    check_json_size first.
    """
    if isinstance(schema, list):
        return [_strip_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _LITERAL_KEYS else _strip_annotations(value)
        for key, value in schema.items()
        if key not in _ANNOTATION_KEYS or not isinstance(value, str)
    }


def _check_keys(param: str, item: Mapping[str, Any], known: set[str]) -> None:
    for key in item:
        if key not in known:
            raise unknown_field_error(f"{param}.{excerpt(key)}", key, known)


def parse_tool_calls(param: str, value: object) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message for a template. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise invalid_field_error(param, "it is not a list", "invalid_type")
    if len(value) > MAX_TOOL_CALLS:
        raise InvalidRequest(
            param, f"{len(value)} calls, at most {MAX_TOOL_CALLS}", "Give fewer", "too_many_items"
        )
    return [_parse_tool_call(f"{param}[{index}]", call) for index, call in enumerate(value)]


def _parse_tool_call(param: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid_field_error(param, "it is not an object", "invalid_type")
    if call.get("type") != "function":
        raise InvalidRequest(
            f"{param}.type", "only function is supported", "Give functions", "unsupported_parameter"
        )
    _check_keys(param, call, {"id", "type", "function"})
    call_id, function = call.get("id"), call.get("function")
    if call_id is None:
        raise missing_field_error(f"{param}.id", "Give the id that the call came with")
    if not isinstance(function, dict):
        raise invalid_field_error(f"{param}.function", "it is not an object", "invalid_type")
    field_path = f"{param}.function"
    _check_keys(field_path, function, {"name", "arguments"})
    function_call = {
        "name": parse_tool_name(f"{field_path}.name", function.get("name")),
        "arguments": _parse_arguments(f"{field_path}.arguments", function.get("arguments")),
    }
    return {"id": call_id, "type": "function", "function": function_call}


def _parse_arguments(param: str, text: object) -> dict[str, Any]:
    """Return the JSON object in the text, as templates need it. Raises InvalidRequest."""
    if not isinstance(text, str):
        raise invalid_field_error(param, "it is not a string", "invalid_type")
    problem = "it is not the text of a JSON object"
    if has_too_many_items(text.encode(errors="replace")):
        raise invalid_field_error(
            param, f"it has more than {MAX_JSON_ITEMS} objects, lists and texts"
        )
    try:
        # A model may write any number of JSON, and gets the nearest one to read.
        value = json.loads(text, parse_float=parse_float, parse_int=parse_int)
    except (ValueError, RecursionError):
        raise invalid_field_error(param, problem) from None
    if not isinstance(value, dict):
        raise invalid_field_error(param, problem)
    check_json_size(param, value)
    try:
        # A template writes it again, and cannot write half a surrogate pair or infinity.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise invalid_field_error(
            param, "it has half a surrogate pair", "invalid_unicode"
        ) from None
    except ValueError:
        raise invalid_field_error(param, problem) from None
    return value


def mentions_tools(template: str) -> bool:
    """Return whether the source of a chat template reads the definitions of tools."""
    return _MENTIONS_TOOLS.search(template) is not None


def create_grammar_builder(
    call_format: CallFormat, tokenizer: Tokenizer
) -> ToolGrammarBuilder | HarmonyGrammarBuilder:
    """Return a builder of grammars for the answers of a model with this format."""
    names = {tokenizer.decode([token]): token for token in tokenizer.special_token_ids}
    special_ids = {
        name: token for name, token in names.items() if name and name in call_format.texts
    }
    if isinstance(call_format, HarmonyFormat):
        return HarmonyGrammarBuilder(special_ids)
    return ToolGrammarBuilder(call_format, special_ids)


def check_renders_tool_calls(param: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest where the template would drop the calls of a message."""
    if "tool_calls" not in (tokenizer.chat_template or "tool_calls"):
        raise InvalidRequest(
            param, "the model's chat template renders none", "Leave it out", "unsupported_parameter"
        )
