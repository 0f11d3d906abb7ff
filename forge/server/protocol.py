"""Fields of a request: the type of each, those without effect, and those refused by name.

Owns the types and the tables. Knows no HTTP. The bounds of values are those of SamplingParams and
of the engine, so they hold for every front end.

    {field: value} ─┬─ known               its type is checked, strictly: "1" is no number
                    ├─ UNSUPPORTED_FIELDS  refused, unless the value has no effect
                    └─ any other           refused

Always true: a field is honoured or refused, never silently dropped. `null` is the default of every
field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from forge.errors import InvalidRequest
from forge.llm import EncodingFields
from forge.request import (
    MAX_LISTED_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PATTERN_CHARS,
    MAX_SESSION_ID_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    Structure,
)
from forge.sampling_defaults import SamplingDefaults
from forge.server.errors import MAX_EXCERPT_CHARS, excerpt
from forge.server.response_format import NamedStructure, parse_structure

MAX_PROMPTS = 256
MAX_TOTAL_CHOICES = 1024
MAX_USER_CHARS = 512
MAX_METADATA = 16
MAX_NAMED_KEYS = 8
"""Wrong keys of one field that an error names."""

MIN_SIMILARITY = 0.7
"""Least ratio of difflib at which an error names a field as the one that was meant."""

_SHORT_TEXT = f"a string of at most {MAX_USER_CHARS} characters"
IntegerField = Annotated[int | None, Field(description="an integer")]
NumberField = Annotated[float | None, Field(description="a number")]
BooleanField = Annotated[bool | None, Field(description="true or false")]
ShortTextField = Annotated[str | None, Field(description=_SHORT_TEXT, max_length=MAX_USER_CHARS)]
StringField = Annotated[str | None, Field(description="a string")]
TokenIdsField = Annotated[list[int] | None, Field(description="a list of token ids")]
StopField = Annotated[str | list[str] | None, Field(description="a string or a list of strings")]
LogitBiasField = Annotated[
    dict[str, float] | None, Field(description="an object of token ids, as strings, and numbers")
]
CacheSaltField = Annotated[
    str | None,
    Field(description="1 to 128 letters, digits, _ or -", pattern=r"^[A-Za-z0-9_-]{1,128}$"),
]
_SESSION_ID_PATTERN = r"[^\x00-\x1f\x7f]{%d,%d}"
SESSION_ID = re.compile(_SESSION_ID_PATTERN % (1, MAX_SESSION_ID_CHARS))
SESSION_ID_TEXT = f"1 to {MAX_SESSION_ID_CHARS} characters without control characters"
SessionIdField = Annotated[
    str | None, Field(description=SESSION_ID_TEXT, pattern=f"^{SESSION_ID.pattern}$")
]
CacheKeyField = Annotated[
    str | None,
    Field(
        description=f"at most {MAX_SESSION_ID_CHARS} characters without control characters",
        pattern=f"^{_SESSION_ID_PATTERN % (0, MAX_SESSION_ID_CHARS)}$",
    ),
]
ResponseFormatField = Annotated[dict[str, Any] | None, Field(description="an object with a type")]
StructuredOutputsField = Annotated[
    dict[str, Any] | None,
    Field(description="an object with json, json_object, regex, choice or grammar"),
]
PatternField = Annotated[
    str | None,
    Field(
        description=f"a string of at most {MAX_PATTERN_CHARS} characters",
        json_schema_extra={"maxLength": MAX_PATTERN_CHARS},  # `parse_structure` checks it
    ),
]
MetadataField = Annotated[dict[str, str] | None, Field(description="an object of strings")]
# Checked by `parse_prompts`, which names the invalid prompt and stops at the first one.
PromptField = Annotated[
    SkipValidation[str | list[str] | list[int] | list[list[int]] | None],
    Field(description="text, token ids, or a list of either"),
]

MAX_ITEMS = {
    "logit_bias": MAX_LISTED_IDS,
    "allowed_token_ids": MAX_LISTED_IDS,
    "stop_token_ids": MAX_LISTED_IDS,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
    "label_token_ids": MAX_LOGPROB_TOKEN_IDS,
    "stop": MAX_STOP_STRINGS,
    "stream_options": MAX_METADATA,
    "metadata": MAX_METADATA,
    "chat_template_kwargs": MAX_METADATA,
}

# Field that is refused by name -> values that have no effect, besides null.
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
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
    "modalities": (["text"],),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT_ONLY_FIELDS: Mapping[str, tuple[object, ...]] = {
    "chat_template_kwargs": ({},),
    "max_completion_tokens": (),
    "messages": (),
    "parallel_tool_calls": (),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (),
}
"""Fields that only a chat has, with the values of each that have no effect elsewhere."""

REMEDIES: Mapping[str, str] = {
    **{
        f"guided_{kind}": f'Use structured_outputs: {{"{kind}": ...}}'
        for kind in ("choice", "grammar", "json", "regex")
    },
    **dict.fromkeys(
        ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        "Send a chat to /v1/chat/completions",
    ),
    "audio": "Send and request text",
    "chat_template": "Write it to chat_template.jinja in the model's folder",
    "function_call": "Use tool_choice",
    "functions": "Use tools",
    "max_completion_tokens": "Use max_tokens",
    "prompt": "Send messages, or a prompt to /v1/completions",
    "stop_regex": "Use stop, or regex for the whole output",
    "modalities": 'Send and request text: ["text"]',
    "parse_special_tokens": "Render the chat, and send it as a prompt to /v1/completions",
    "thinking_token_budget": "Send a chat, whose template shows where its reasoning begins",
    "top_logprobs": "Use logprobs of /v1/completions",
    "truncate_prompt_tokens": "Shorten the prompt",
    "suffix": "Write both texts into the prompt, as the model was trained to fill in between",
    "use_beam_search": "Use n and a temperature, and choose by logprobs",
    "web_search_options": "Give a search of your own as a tool",
}
"""Remedies for fields that are refused by name."""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "input": ("messages", "prompt"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_tokens",),
    "max_tokens": ("max_output_tokens",),
    "messages": ("input",),
    "response_format": ("text", "output_config"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
}
"""Field of an API -> the names of the same field in other APIs."""

# Errors of a scalar's type, which are reported as a wrong value; others are a wrong type.
_SCALAR_ERRORS = {
    "int_type",
    "float_type",
    "string_type",
    "string_too_long",
    "string_pattern_mismatch",
}


class NamedPrompt(NamedTuple):
    """A prompt and its name in errors: `prompt`, or `prompt[1]` where there are several."""

    param: str
    content: str | list[int]


class RequestBody(BaseModel):
    """A body of fields. Each field's description says what its value must be, for errors.

    unsupported   fields refused by name, and the values of each that have no effect. A class may
                  refuse a field of its base class
    remedy        default remedy of an unsupported field: see REMEDIES
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    remedy: ClassVar[str] = "Leave it out"


class EncodedRequest(RequestBody):
    """Fields of every request with a prompt: how its text becomes ids.

    add_special_tokens     false: without the ids that the checkpoint puts around every prompt
    parse_special_tokens   false: the names of special tokens are plain text
    """

    add_special_tokens: BooleanField = None
    parse_special_tokens: BooleanField = None

    @property
    def encoding(self) -> EncodingFields:
        """Return the fields of `Tokenizer.encode`."""
        return {
            "add_special_tokens": self.add_special_tokens is not False,
            "parse_special_tokens": self.parse_special_tokens is not False,
        }


class SamplingRequest(EncodedRequest):
    """Fields of every request that generates. Their names are those of SamplingParams."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED_FIELDS
    default_max_tokens: ClassVar[int | None]

    model: StringField = None
    max_tokens: IntegerField = None
    min_tokens: IntegerField = None
    temperature: NumberField = None
    top_p: NumberField = None
    top_k: IntegerField = None
    min_p: NumberField = None
    repetition_penalty: NumberField = None
    presence_penalty: NumberField = None
    frequency_penalty: NumberField = None
    logit_bias: LogitBiasField = None
    allowed_token_ids: TokenIdsField = None
    seed: IntegerField = None
    stop: StopField = None
    stop_token_ids: TokenIdsField = None
    ignore_eos: BooleanField = None
    response_format: ResponseFormatField = None
    regex: PatternField = None
    grammar: PatternField = None
    ebnf: PatternField = None
    structured_outputs: StructuredOutputsField = None
    priority: IntegerField = None
    cache_salt: CacheSaltField = None
    session_id: SessionIdField = None
    session_end: BooleanField = None
    expected_pause_s: NumberField = None
    prompt_cache_key: CacheKeyField = None
    return_timings: BooleanField = None
    # Accepted without effect.
    user: ShortTextField = None
    request_id: ShortTextField = None
    metadata: MetadataField = None
    spaces_between_special_tokens: BooleanField = None

    @property
    def is_timed(self) -> bool:
        """Return whether the answer has times of its request."""
        return bool(self.return_timings)

    @property
    def begins_text(self) -> bool:
        """Return whether an output begins a text, and does not continue the prompt's."""
        return False

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidRequest.

        defaults   the checkpoint's, for fields that the request leaves out
        """
        with self.relabel_structure_error():
            params = defaults.complete(self.explicit_params(), self.default_max_tokens)
            return SamplingParams(**params)

    @cached_property
    def named_structure(self) -> NamedStructure | None:
        """The output's structure and the field that requests it. Raises InvalidRequest."""
        return parse_structure(
            self.response_format, self.regex, self.grammar, self.structured_outputs, self.ebnf
        )

    @property
    def structure(self) -> Structure | None:
        """The output's structure, under SamplingParams' name. Raises InvalidRequest."""
        named_structure = self.named_structure
        return None if named_structure is None else named_structure.structure

    @contextmanager
    def relabel_structure_error(self) -> Iterator[None]:
        """Raise an InvalidRequest of the structure again with the field that requested it."""
        try:
            yield
        except InvalidRequest as error:
            named_structure = self.named_structure if error.field == "structure" else None
            if named_structure is None:
                raise
            raise InvalidRequest(
                named_structure.field, error.problem, error.remedy, error.code
            ) from None

    def explicit_params(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the request sets. Raises InvalidRequest."""
        values = ((field.name, getattr(self, field.name, None)) for field in fields(SamplingParams))
        params = {name: value for name, value in values if value is not None}
        if self.logit_bias is not None:
            params["logit_bias"] = _parse_logit_bias(self.logit_bias)
        return params


class PromptRequest(SamplingRequest):
    """A request whose prompts are text or token ids."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED_FIELDS,
        **CHAT_ONLY_FIELDS,
    }

    prompt: PromptField = None

    def parse_prompts(self) -> list[NamedPrompt]:
        """Return the prompts, at least one. Raises InvalidRequest."""
        return parse_prompts(self.prompt)


BodyT = TypeVar("BodyT", bound=RequestBody)


def parse_request(model_type: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """Return the body as a request. Raises InvalidRequest naming the first invalid field."""
    known_fields = {}
    for name, value in body.items():
        if (neutral := model_type.unsupported.get(name)) is not None:
            if not is_neutral(value, neutral):
                remedy = REMEDIES.get(name, model_type.remedy)
                raise unsupported_error(name, "it is not supported", remedy)
        elif name in model_type.model_fields:
            _check_length(name, value)
            known_fields[name] = value
        else:
            usable = [
                each for each in model_type.model_fields if each not in model_type.unsupported
            ]
            raise unknown_field_error(excerpt(name), name, usable)
    try:
        return model_type.model_validate(known_fields)
    except ValidationError as error:
        raise _validation_error(model_type, known_fields, error) from None


def _check_length(name: str, value: object) -> None:
    """Raise InvalidRequest for too many items, before any check that visits each of them."""
    max_items = MAX_ITEMS.get(name)
    if max_items is not None and isinstance(value, list | dict) and len(value) > max_items:
        raise InvalidRequest(
            name, f"{len(value)} items, at most {max_items}", "Give fewer", "too_many_items"
        )


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether the value of an unsupported field has no effect: null, or one of `neutral`."""
    return value is None or any(
        type(value) is type(neutral_value) and value == neutral_value for neutral_value in neutral
    )


def _validation_error(
    model_type: type[RequestBody], known_fields: Mapping[str, Any], exc: ValidationError
) -> InvalidRequest:
    error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(error["loc"][0])
    expected = model_type.model_fields[name].description
    code = "invalid_type"
    if error["type"] == "extra_forbidden":
        code = "unknown_parameter"
    elif name != "model" and len(error["loc"]) == 1 and error["type"] in _SCALAR_ERRORS:
        code = "invalid_value"
    problem = f"{_format_value(known_fields[name])} is not {expected}"
    return InvalidRequest(name, problem, "Fix it or leave it out", code)


def _format_value(value: object) -> str:
    """Return a field's value as part of a message: as in JSON, but short."""
    if isinstance(value, str):
        ellipsis = "..." if len(value) > MAX_EXCERPT_CHARS else ""
        return f"'{excerpt(value)}{ellipsis}'"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return excerpt(str(value))
    return "it"


def _parse_logit_bias(logit_bias: Mapping[str, float]) -> dict[int, float]:
    """Return the biases by token id. Raises InvalidRequest naming the first wrong keys."""
    wrong = [key for key in logit_bias if not _is_token_id(key)]
    if wrong:
        names = ", ".join(f"'{excerpt(key)}'" for key in wrong[:MAX_NAMED_KEYS])
        problem = f"{names} is not a token id" if len(wrong) == 1 else f"{names} are not token ids"
        raise InvalidRequest("logit_bias", problem, "Give ids from 0", "invalid_type")
    return {int(key): bias for key, bias in logit_bias.items()}


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key


def parse_prompts(value: object) -> list[NamedPrompt]:
    """Return the prompts in `value`: text, token ids or a list of either. Raises InvalidRequest."""
    if value is None:
        raise missing_field_error("prompt", "Give text or token ids")
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
    is_texts = kinds == {str}
    is_id_lists = kinds == {list} and all(set(map(type, item)) <= {int} for item in value)  # type: ignore[attr-defined]
    if not (is_texts or is_id_lists):
        raise InvalidRequest(
            "prompt",
            "it is neither text nor token ids nor a list of either",
            "Give a string, a list of strings, a list of ids, or a list of lists of ids",
            "invalid_type",
        )
    assert isinstance(value, list)
    return [NamedPrompt(f"prompt[{index}]", item) for index, item in enumerate(value)]


def missing_field_error(name: str, remedy: str) -> InvalidRequest:
    """Return the error of a required field that is missing."""
    return InvalidRequest(name, "it is missing", remedy, "missing_required_parameter")


def invalid_field_error(name: str, problem: str, code: str = "invalid_value") -> InvalidRequest:
    """Return the error of a field with an invalid value."""
    return InvalidRequest(name, problem, "Fix it", code)


def unsupported_error(param: str, problem: str, remedy: str) -> InvalidRequest:
    """Return the error of a value that this server has no support for."""
    return InvalidRequest(param, problem, remedy, "unsupported_parameter")


def unknown_field_error(param: str, name: str, known: Iterable[str]) -> InvalidRequest:
    """Return the error of a field that does not exist. Its remedy names the one that is meant.

    param   path of the field, for the error
    name    the field as the client wrote it, of any length
    """
    names = list(known) if len(name) <= MAX_EXCERPT_CHARS else []
    meant = [each for each in OTHER_NAMES.get(name, ()) if each in names]
    meant = meant or difflib.get_close_matches(name, names, 1, MIN_SIMILARITY)
    remedy = "".join(f"Use {each}, or leave it out" for each in meant[:1]) or "Leave it out"
    return InvalidRequest(param, "there is no such field", remedy, "unknown_parameter")
