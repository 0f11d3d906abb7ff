"""ChatFields: the fields that other APIs share with a chat request, under its names.

Owns which they are. Knows no API. A request of /v1/responses or /v1/messages becomes a ChatRequest;
these fields are its own, and the rest is translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from forge.server.chat import ChatRequest, TemplateVariablesField
from forge.server.field_names import FieldNames
from forge.server.protocol import (
    BooleanField,
    CacheKeyField,
    CacheSaltField,
    IntegerField,
    LogitBiasField,
    NumberField,
    RequestBody,
    SessionIdField,
    StringField,
    TokenIdsField,
    parse_request,
)


class ChatFields(RequestBody):
    """Fields of a chat request that another API has too, most of them forge's own."""

    model: StringField = None
    stream: BooleanField = None
    temperature: NumberField = None
    top_p: NumberField = None
    top_k: IntegerField = None
    min_p: NumberField = None
    min_tokens: IntegerField = None
    repetition_penalty: NumberField = None
    presence_penalty: NumberField = None
    frequency_penalty: NumberField = None
    logit_bias: LogitBiasField = None
    allowed_token_ids: TokenIdsField = None
    stop_token_ids: TokenIdsField = None
    seed: IntegerField = None
    ignore_eos: BooleanField = None
    priority: IntegerField = None
    cache_salt: CacheSaltField = None
    session_id: SessionIdField = None
    session_end: BooleanField = None
    expected_pause_s: NumberField = None
    prompt_cache_key: CacheKeyField = None
    return_timings: BooleanField = None
    chat_template_kwargs: TemplateVariablesField = None


class TranslatedChat(NamedTuple):
    """A chat request and the client's names of its fields, for errors."""

    request_body: ChatRequest
    names: FieldNames


def build_chat(
    request_body: ChatFields, fields: Mapping[str, Any], names: Mapping[str, str]
) -> TranslatedChat:
    """Return the chat request of these fields and of those that it shares with the request.

    names   the client's names of the chat's fields, where they differ
    Raises InvalidRequest under the client's names.
    """
    shared = {name: getattr(request_body, name) for name in ChatFields.model_fields}
    # A missing field is not null there: null is a value that some fields refuse.
    given = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    field_names = FieldNames(names)
    with field_names.rename_errors():
        return TranslatedChat(parse_request(ChatRequest, given), field_names)
