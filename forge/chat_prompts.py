"""Chats of the Python API: messages to the token ids of a prompt.

Owns what a message must have. The format of a chat is the tokenizer's.

    [{"role": "user", "content": "Hello"}] ──encode_chats──► [ids of "user: Hello\\nassistant:"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from forge.errors import InvalidRequest
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
    Raises InvalidRequest naming the message.
    """
    chats = _as_chats(messages)
    for index, chat in enumerate(chats):
        _check_chat("messages" if len(chats) == 1 else f"messages[{index}]", chat)
    return [_encode(tokenizer, chat, end, variables) for chat in chats]


def _as_chats(messages: Chat | Sequence[Chat]) -> list[Chat]:
    """Return the chats as a list: a list with anything but lists is one chat."""
    is_list = isinstance(messages, list | tuple)
    if is_list and all(isinstance(each, list | tuple) for each in messages):
        return list(cast(Sequence[Chat], messages))
    return [cast(Chat, messages)]


def _check_chat(field: str, chat: object) -> None:
    """Raise InvalidRequest for what is no list of messages."""
    if not isinstance(chat, list | tuple) or not chat:
        problem, remedy = f"{str(chat)[:64]!r} is no list of messages", "Give one or more"
        raise InvalidRequest(field, problem, remedy, "invalid_type")
    for index, message in enumerate(cast(Iterable[object], chat)):
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or "content" not in cast(Mapping[str, object], message):
            raise InvalidRequest(
                f"{field}[{index}]",
                f"{str(message)[:64]!r} is no message",
                'Give {"role": "user", "content": "text"}',
                "invalid_type",
            )


def _encode(
    tokenizer: Tokenizer, chat: Chat, end: ChatEnd, variables: Mapping[str, object]
) -> list[int]:
    try:
        return tokenizer.apply_chat_template(chat, end, variables)
    except UnicodeEncodeError:
        raise InvalidRequest(
            "messages",
            "they have half a surrogate pair, which no UTF-8 text can have",
            "Send valid Unicode",
            "invalid_unicode",
        ) from None
