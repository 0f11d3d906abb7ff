"""Fields of a request: what each may be, which do nothing here, which are refused by name.

Owns their types and the tables. Bounds are SamplingParams' and the engine's: they hold for every
front end alike. Knows no HTTP.

    {field: value} ─┬─ known        its type is checked, strictly: "1" and true are no numbers
                    ├─ UNSUPPORTED  refused, unless the value asks for nothing
                    └─ any other    refused

A field is honoured or refused, never dropped in silence. `null` is the default of every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from forge.errors import InvalidRequest
from forge.request import (
    MAX_LISTED_IDS,
    MAX_PATTERN_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    Structure,
)
from forge.server.refusal import MAX_SHOWN, shown
from forge.server.response_format import AskedStructure, asked_structure

MAX_PROMPTS = 256
MAX_CONTINUATIONS = 1024
MAX_USER_CHARS = 512
MAX_METADATA = 16

_TEXT = f"a string of at most {MAX_USER_CHARS} characters"
Integer = Annotated[int | None, Field(description="an integer")]
Number = Annotated[float | None, Field(description="a number")]
Flag = Annotated[bool | None, Field(description="true or false")]
Text = Annotated[str | None, Field(description=_TEXT, max_length=MAX_USER_CHARS)]
Name = Annotated[str | None, Field(description="a string")]
Ids = Annotated[list[int] | None, Field(description="a list of token ids")]
Stop = Annotated[str | list[str] | None, Field(description="a string or a list of strings")]
Bias = Annotated[
    dict[str, float] | None, Field(description="an object of token ids, as strings, and numbers")
]
Salt = Annotated[
    str | None,
    Field(description="1 to 128 letters, digits, _ or -", pattern=r"^[A-Za-z0-9_-]{1,128}$"),
]
Format = Annotated[dict[str, Any] | None, Field(description="an object with a type")]
Pattern = Annotated[
    str | None,
    Field(
        description=f"a string of at most {MAX_PATTERN_CHARS} characters",
        json_schema_extra={"maxLength": MAX_PATTERN_CHARS},  # `asked_structure` says it better
    ),
]
Metadata = Annotated[dict[str, str] | None, Field(description="an object of strings")]
# Checked by `named_prompts`, which names the prompt at fault and stops at the first.
Prompts = Annotated[
    SkipValidation[str | list[str] | list[int] | list[list[int]] | None],
    Field(description="text, token ids, or a list of either"),
]

MOST_ITEMS = {
    "logit_bias": MAX_LISTED_IDS,
    "allowed_token_ids": MAX_LISTED_IDS,
    "stop_token_ids": MAX_LISTED_IDS,
    "stop": MAX_STOP_STRINGS,
    "stream_options": MAX_METADATA,
    "metadata": MAX_METADATA,
    "chat_template_kwargs": MAX_METADATA,
}

# Refused by name -> values that ask for nothing, beside null.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_path": (),
    "max_completion_tokens": (),
    "messages": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

# A scalar of the wrong type is a wrong value; anything else is a wrong type.
_SCALAR = {"int_type", "float_type", "string_type", "string_too_long", "string_pattern_mismatch"}


class NamedPrompt(NamedTuple):
    """One prompt and how an error names it: `prompt`, or `prompt[1]` of several."""

    param: str
    content: str | list[int]


class Body(BaseModel):
    """A body of fields, each of which has a description of what it may be.

    unsupported   fields refused by name, and the values of each that ask for nothing
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}


class Asked(Body):
    """What every request that generates has in common. The names are SamplingParams' own."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED
    default_max_tokens: ClassVar[int | None]

    model: Name = None
    max_tokens: Integer = None
    min_tokens: Integer = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: Bias = None
    allowed_token_ids: Ids = None
    seed: Integer = None
    stop: Stop = None
    stop_token_ids: Ids = None
    ignore_eos: Flag = None
    response_format: Format = None
    regex: Pattern = None
    grammar: Pattern = None
    priority: Integer = None
    cache_salt: Salt = None
    # Accepted, and nothing depends on them.
    user: Text = None
    request_id: Text = None
    metadata: Metadata = None
    add_special_tokens: Flag = None
    spaces_between_special_tokens: Flag = None

    def sampling_params(self) -> SamplingParams:
        """As asked, with the defaults of SamplingParams. Raises InvalidRequest."""
        with self.named():
            return SamplingParams(**self.given())

    @property
    def asked_structure(self) -> AskedStructure | None:
        """The structure of the output and the field that asks for it. Raises InvalidRequest."""
        return asked_structure(self.response_format, self.regex, self.grammar)

    @property
    def structure(self) -> Structure | None:
        """SamplingParams' field of this name. Raises InvalidRequest."""
        asked = self.asked_structure
        return None if asked is None else asked.structure

    @contextmanager
    def named(self) -> Iterator[None]:
        """What is wrong with the structure is said of the field that asked for it."""
        try:
            yield
        except InvalidRequest as fault:
            asked = self.asked_structure if fault.field == "structure" else None
            if asked is None:
                raise
            raise InvalidRequest(asked.field, fault.problem, fault.remedy, fault.code) from None

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams that are not left to their default. Raises InvalidRequest."""
        values = ((field.name, getattr(self, field.name, None)) for field in fields(SamplingParams))
        given = {name: value for name, value in values if value is not None}
        given.setdefault("max_tokens", self.default_max_tokens)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(k): v for k, v in self.logit_bias.items()}
        return given


class Prompted(Asked):
    """A request that brings its prompts as text or token ids."""

    prompt: Prompts = None

    def named_prompts(self) -> list[NamedPrompt]:
        """The prompts, at least one. Raises InvalidRequest."""
        return named_prompts(self.prompt)


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """The body as a request of this kind. Raises InvalidRequest naming the first field at fault."""
    given = {}
    for name, value in body.items():
        if name in kind.model_fields:
            _check_length(name, value)
            given[name] = value
        elif name not in kind.unsupported:
            raise InvalidRequest(
                shown(name), "there is no such field", "Leave it out", "unknown_parameter"
            )
        elif value is not None and not _asks_for_nothing(value, kind.unsupported[name]):
            raise InvalidRequest(
                name, "it is not supported", "Leave it out", "unsupported_parameter"
            )
    try:
        return kind.model_validate(given)
    except ValidationError as fault:
        raise _refusal(kind, given, fault) from None


def _check_length(name: str, value: object) -> None:
    """Before anything looks at the items: there may be a million of them."""
    most = MOST_ITEMS.get(name)
    if most is not None and isinstance(value, list | dict) and len(value) > most:
        raise InvalidRequest(
            name, f"{len(value)} items, at most {most}", "Give fewer", "too_many_items"
        )


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(none) and value == none for none in neutral)


def _refusal(kind: type[Body], given: Mapping[str, Any], fault: ValidationError) -> InvalidRequest:
    error = fault.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(error["loc"][0])
    expected = kind.model_fields[name].description
    code = "invalid_type"
    if error["type"] == "extra_forbidden":
        code = "unknown_parameter"
    elif name != "model" and len(error["loc"]) == 1 and error["type"] in _SCALAR:
        code = "invalid_value"
    problem = f"{_said(given[name])} is not {expected}"
    return InvalidRequest(name, problem, "Mend it or leave it out", code)


def _said(value: object) -> str:
    """A field's value as part of a message: as JSON has it, but short."""
    if isinstance(value, str):
        cut = "..." if len(value) > MAX_SHOWN else ""
        return f"'{shown(value)}{cut}'"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return shown(str(value))
    return "it"


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key):
        raise InvalidRequest(
            "logit_bias", f"'{shown(key)}' is not a token id", "Give ids from 0", "invalid_type"
        )
    return int(key)


def named_prompts(value: object) -> list[NamedPrompt]:
    """The prompts in `value`: text, token ids, or a list of either. Raises InvalidRequest."""
    if value is None:
        raise missing("prompt", "Give text or token ids")
    if isinstance(value, str):
        return [NamedPrompt("prompt", value)]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if isinstance(value, list) and kinds <= {int}:
        return [NamedPrompt("prompt", value)]  # an empty list is an empty prompt
    if isinstance(value, list) and len(value) > MAX_PROMPTS:
        raise InvalidRequest(
            "prompt",
            f"{len(value)} prompts, at most {MAX_PROMPTS}",
            "Send them in several requests",
            "too_many_prompts",
        )
    texts = kinds == {str}
    lists = kinds == {list} and all(set(map(type, item)) <= {int} for item in value)  # type: ignore[attr-defined]
    if not (texts or lists):
        raise InvalidRequest(
            "prompt",
            "it is neither text nor token ids nor a list of either",
            "Give a string, a list of strings, a list of ids, or a list of lists of ids",
            "invalid_type",
        )
    assert isinstance(value, list)
    return [NamedPrompt(f"prompt[{index}]", item) for index, item in enumerate(value)]


def missing(name: str, remedy: str) -> InvalidRequest:
    """A required field is not there."""
    return InvalidRequest(name, "it is missing", remedy, "missing_required_parameter")


def wrong(name: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    """What is there is not what it must be."""
    return InvalidRequest(name, problem, "Mend it", code)
