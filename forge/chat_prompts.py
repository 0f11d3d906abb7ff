"""Chats of the Python API: messages to the token ids of a prompt.

Owns what a message must have. The format of a chat is the tokenizer's.

    [{"role": "user", "content": "Hello"}] ──encode_chats──► [ids of "user: Hello\\nassistant:"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forge.errors import InvalidRequest, one_line
from forge.tokenizer import ChatEnd, Tokenizer

Chat = Sequence[Mapping[str, object]]


def encode_chats(
    tokenizer: Tokenizer,
    messages: Chat | Sequence[Chat],
    end: ChatEnd,
    variables: Mapping[str, object],
) -> list[list[int]]:
    """Return the ids of one chat, or of each of several, as the chat template writes them.

    messages    of one chat, or a list with those of each; a message has `role` and `content`
    variables   other names that the template may read, such as `tools`
    Raises InvalidRequest naming the message. No chats have no ids.
    """
    is_several = isinstance(messages, list | tuple) and all(
        isinstance(each, list | tuple) for each in messages
    )
    if not is_several:
        return [_encode("messages", tokenizer, messages, end, variables)]
    return [
        _encode(f"messages[{index}]", tokenizer, chat, end, variables)
        for index, chat in enumerate(messages)
    ]


def _encode(
    field: str, tokenizer: Tokenizer, chat: object, end: ChatEnd, variables: Mapping[str, object]
) -> list[int]:
    """Return the ids of a chat. Raises InvalidRequest of this field."""
    messages = _parse_messages(field, chat)
    try:
        return tokenizer.apply_chat_template(messages, end, variables)
    except UnicodeEncodeError:
        raise invalid_unicode_error(field) from None
    except InvalidRequest as error:
        raise InvalidRequest(field, error.problem, error.remedy, error.code) from None
    except (KeyError, TypeError, AttributeError) as error:  # such as a tool without "function"
        problem = f"the chat template cannot write them: {one_line(error)}"
        raise InvalidRequest(field, problem, "See the messages of docs/Server.md") from None


def _parse_messages(field: str, chat: object) -> Chat:
    """Return the messages of a chat. Raises InvalidRequest."""
    if not isinstance(chat, list | tuple) or not chat:
        problem, remedy = f"{str(chat)[:64]!r} is no list of messages", "Give one or more"
        raise InvalidRequest(field, problem, remedy, "invalid_type")
    for index, message in enumerate(chat):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            problem = f"{str(message)[:64]!r} is no message"
        elif message.get("content") is None and not message.get("tool_calls"):
            problem = "it has no content"
        else:
            continue
        remedy = 'Give {"role": "user", "content": "text"}'
        raise InvalidRequest(f"{field}[{index}]", problem, remedy, "invalid_type")
    # A message that calls tools needs no content, and a template may read it all the same.
    return [
        {"content": "", **{key: value for key, value in message.items() if value is not None}}
        for message in chat
    ]


def invalid_unicode_error(field: str) -> InvalidRequest:
    """Return the error of a text that no UTF-8 can have."""
    return InvalidRequest(
        field,
        "it has half a surrogate pair, which no UTF-8 text can have",
        "Send valid Unicode",
        "invalid_unicode",
    )
