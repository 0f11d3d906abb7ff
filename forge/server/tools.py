"""The tools of a chat: what a request may say of them, and what it means for the answer.

Owns the checks of `tools`, `tool_choice` and `parallel_tool_calls`. Knows no template beyond its
source: how a model writes calls is for tool_formats.py.

    tools[0].function     name, description, parameters ──► definitions, which the template writes
    tool_choice           none       no tool is mentioned
                          auto       text, or text and calls
                          required   calls
                          one named  one call of it
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from forge.errors import InvalidRequest
from forge.request import Structure, num_properties
from forge.server.fields import missing, wrong
from forge.server.refusal import shown
from forge.server.tool_formats import CallFormat, Tool, Writer, format_of
from forge.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_CALLS = 128
"""Of one message, whether it is asked or answered: a model may repeat itself."""
MAX_DEPTH = 64
"""Of the schema of parameters, and of arguments: lists and objects in one another."""
MAX_PROPERTIES = 1000
"""Of the schemas of all tools: the time to compile them grows with its square."""

CHOICES = ("none", "auto", "required")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MENTIONED = re.compile(r"\btools\b")
_REMARKS = {"description", "title", "$comment"}
_VALUES = {"const", "enum", "default", "examples"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tools(NamedTuple):
    """The tools that an answer may call.

    definitions   of all tools, as a template takes them
    callable      those that may be called
    places        where the request has them
    fewest        0 or 1 calls at least
    most          1 or MAX_CALLS
    finish        why an answer with calls has ended
    """

    definitions: tuple[dict[str, Any], ...]
    callable: tuple[Tool, ...]
    places: tuple[str, ...]
    fewest: int
    most: int
    finish: str

    def structure(self, tokenizer: Tokenizer) -> Structure:
        """What the answer may be. Raises InvalidRequest where the model knows no tools."""
        writer = call_writer(tokenizer)
        return Structure.grammar(writer.grammar(self.callable, self.fewest, self.most))


def asked_tools(tools: object, choice: object, parallel: bool | None) -> Tools | None:
    """The tools that an answer may call; None where there is none. Raises InvalidRequest."""
    definitions = _checked_tools(tools)
    if not definitions:
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if value is not None and value != "none":
                raise InvalidRequest(name, "there are no tools", "Leave it out, or give tools")
        return None
    names = [definition["function"]["name"] for definition in definitions]
    named = _checked_choice(choice, names)
    if choice == "none":
        return None
    called = definitions if named is None else [definitions[names.index(named)]]
    functions = [definition["function"] for definition in called]
    return Tools(
        definitions=tuple(definitions),
        callable=tuple(Tool(each["name"], _bare(each["parameters"])) for each in functions),
        places=tuple(_place(names.index(each["name"])) for each in functions),
        fewest=0 if choice in (None, "auto") else 1,
        most=1 if named is not None or parallel is False else MAX_CALLS,
        finish="tool_calls" if named is None else "stop",
    )


def _place(index: int) -> str:
    return f"tools[{index}].function"


def _checked_choice(choice: object, names: list[str]) -> str | None:
    """The tool that has to be called, where it is one. Raises InvalidRequest."""
    if choice is None or (isinstance(choice, str) and choice in CHOICES):
        return None
    if not isinstance(choice, dict):
        raise wrong("tool_choice", f"it is none of {', '.join(CHOICES)} and no object")
    if choice.get("type") != "function":
        raise InvalidRequest(
            "tool_choice.type", "it is not function", "Name a function", "unsupported_parameter"
        )
    _check_keys("tool_choice", choice, {"type", "function"})
    function = choice.get("function")
    if not isinstance(function, dict):
        raise wrong("tool_choice.function", "it is not an object", "invalid_type")
    _check_keys("tool_choice.function", function, {"name"})
    name = function.get("name")
    if name not in names:
        raise wrong("tool_choice.function.name", "there is no tool of this name")
    return str(name)


def _checked_tools(tools: object) -> list[dict[str, Any]]:
    """Definitions of the tools, without gaps. Raises InvalidRequest naming the place."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise wrong("tools", "it is not a list", "invalid_type")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            "tools", f"{len(tools)} tools, at most {MAX_TOOLS}", "Give fewer", "too_many_items"
        )
    definitions = [_definition(index, tool) for index, tool in enumerate(tools)]
    seen: set[str] = set()
    for index, definition in enumerate(definitions):
        name = definition["function"]["name"]
        if name in seen:
            raise wrong(f"{_place(index)}.name", f"there is another '{name}'")
        seen.add(name)
    count = sum(num_properties(each["function"]["parameters"]) for each in definitions)
    if count > MAX_PROPERTIES:
        raise InvalidRequest(
            "tools",
            f"their parameters have {count} properties, at most {MAX_PROPERTIES}",
            "Simplify them",
            "invalid_schema",
        )
    return definitions


def _definition(index: int, tool: object) -> dict[str, Any]:
    param = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise wrong(param, "it is not an object", "invalid_type")
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{param}.type", "it is not function", "Give functions", "unsupported_parameter"
        )
    _check_keys(param, tool, {"type", "function"})
    place, function = _place(index), tool.get("function")
    if function is None:
        raise missing(place, 'Give {"name": "..."}')
    if not isinstance(function, dict):
        raise wrong(place, "it is not an object", "invalid_type")
    _check_keys(place, function, {"name", "description", "parameters", "strict"})
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise wrong(f"{place}.description", "it is not a string", "invalid_type")
    # The arguments follow the schema in any case.
    if not isinstance(function.get("strict"), bool | None):
        raise wrong(f"{place}.strict", "it is not true or false", "invalid_type")
    name = checked_name(f"{place}.name", function.get("name"))
    parameters = _parameters(f"{place}.parameters", function.get("parameters"))
    about = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": about}


def _parameters(param: str, schema: object) -> dict[str, Any]:
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict):
        raise wrong(param, "it is not an object", "invalid_type")
    kind = schema.get("type", "object")
    if kind != "object":
        raise wrong(f"{param}.type", "it is not object", "invalid_schema")
    check_depth(param, schema)
    return {"type": "object", **schema}


def checked_name(param: str, name: object) -> str:
    """The name of a tool. Raises InvalidRequest."""
    if name is None:
        raise missing(param, "Give the name of a function")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(param, "it is not 1 to 64 letters, digits, _ or -")
    return name


def check_depth(param: str, value: object) -> None:
    """Raise InvalidRequest for what is nested too deep. Not recursive itself."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise wrong(param, f"it is nested deeper than {MAX_DEPTH}")
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


def _bare(schema: Any) -> Any:
    """The schema without what it says to readers alone: its length in a grammar is limited.

    A property of such a name has a schema and no text. It is not nested deep.
    """
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _bare(value)
        for key, value in schema.items()
        if key not in _REMARKS or not isinstance(value, str)
    }


def _check_keys(param: str, item: Mapping[str, Any], known: set[str]) -> None:
    for key in item:
        if key not in known:
            raise InvalidRequest(
                f"{param}.{shown(key)}",
                "there is no such field",
                "Leave it out",
                "unknown_parameter",
            )


def checked_calls(param: str, value: object) -> list[dict[str, Any]]:
    """The calls of an assistant's message, as templates take them. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise wrong(param, "it is not a list", "invalid_type")
    if len(value) > MAX_CALLS:
        raise InvalidRequest(
            param, f"{len(value)} calls, at most {MAX_CALLS}", "Give fewer", "too_many_items"
        )
    return [_checked_call(f"{param}[{index}]", call) for index, call in enumerate(value)]


def _checked_call(param: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise wrong(param, "it is not an object", "invalid_type")
    if call.get("type") != "function":
        raise InvalidRequest(
            f"{param}.type", "it is not function", "Give functions", "unsupported_parameter"
        )
    _check_keys(param, call, {"id", "type", "function"})
    label, function = call.get("id"), call.get("function")
    if label is None:
        raise missing(f"{param}.id", "Give the id that the call came with")
    if not isinstance(function, dict):
        raise wrong(f"{param}.function", "it is not an object", "invalid_type")
    place = f"{param}.function"
    _check_keys(place, function, {"name", "arguments"})
    about = {
        "name": checked_name(f"{place}.name", function.get("name")),
        "arguments": _object(f"{place}.arguments", function.get("arguments")),
    }
    return {"id": label, "type": "function", "function": about}


def _object(param: str, text: object) -> dict[str, Any]:
    """The JSON object that is in the text: templates want it so."""
    if not isinstance(text, str):
        raise wrong(param, "it is not a string", "invalid_type")
    problem = "it is not the text of a JSON object"
    try:
        value = json.loads(text)
        # A template writes it again: no half of a surrogate pair, no number without end.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise wrong(param, "it has half a surrogate pair", "invalid_unicode") from None
    except (ValueError, RecursionError):
        raise wrong(param, problem) from None
    if not isinstance(value, dict):
        raise wrong(param, problem)
    check_depth(param, value)
    return value


def call_format(tokenizer: Tokenizer) -> CallFormat:
    """How the model writes calls. Raises InvalidRequest where it cannot be told of tools."""
    template = tokenizer.chat_template
    if template is None or not _MENTIONED.search(template):
        problem = "the model's chat template knows no tools"
    else:
        form = format_of(template)
        if form is not None:
            return form
        problem = "how the model writes calls is not known here"
    raise InvalidRequest("tools", problem, "Leave them out", "unsupported_parameter")


def call_writer(tokenizer: Tokenizer) -> Writer:
    """Writes the grammars of the model's answers. Raises InvalidRequest as `call_format` does."""
    form = call_format(tokenizer)
    texts = f"{form.before}{form.between or ''}{form.after}"
    names = {tokenizer.decode([token]): token for token in tokenizer.special_ids}
    return Writer(form, {name: token for name, token in names.items() if name and name in texts})


def check_mentions_calls(param: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest where the template would drop the calls of a message."""
    if "tool_calls" not in (tokenizer.chat_template or "tool_calls"):
        raise InvalidRequest(
            param, "the model's chat template knows none", "Leave it out", "unsupported_parameter"
        )
