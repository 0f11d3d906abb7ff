"""`stop_reason` and `matched_stop`: which stop ended each choice, whole and streamed.

Each token of the model `hash` is a byte, and its id is that of the byte and one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_server import GREEDY, RunningServer, open_server, parse_chunks, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BATCH, GENERATE = "/v1/chat/completions/batch", "/generate"
CHATS = [[{"role": "user", "content": content}] for content in ("stop here", "or there")]
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["stop here", "or there"], "n": 2, "seed": 3},
    CHAT: {"messages": CHATS[0], "n": 4, "seed": 3},
    BATCH: {"messages": CHATS, "seed": 3},
    GENERATE: {"prompt": "stop here", "seed": 3},
}
END_TOKEN = 0
STOPS = ["e", "ou", "a", "\x00"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server() as running:
        yield running
        wait_until(running.is_idle)


def choices_of(server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a whole response, which must succeed; of /generate the response."""
    model = {} if path == GENERATE else {"model": "hash"}
    answer = server.post(path, **{**PROMPTS[path], **model, "max_tokens": 60, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    found: list[dict[str, Any]] = body.get("choices", [body])
    return found


def stops_of(choice: dict[str, Any]) -> tuple[int | str | None, int | str | None]:
    return choice["stop_reason"], choice["matched_stop"]


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice of any route."""
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("path", PROMPTS)
def test_each_choice_names_the_stop_string_that_ended_it(server: RunningServer, path: str) -> None:
    whole = choices_of(server, path, ignore_eos=True)
    cut = choices_of(server, path, ignore_eos=True, stop=STOPS)
    for choice, longer in zip(cut, whole, strict=True):
        stop = choice["matched_stop"]
        assert stop in STOPS and choice["stop_reason"] == stop
        assert text_of(longer).startswith(text_of(choice) + stop)
    assert path in (BATCH, GENERATE) or len({choice["matched_stop"] for choice in cut}) > 1


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("fields", "stops"),
    [
        ({"stop_token_ids": [106], "logit_bias": {"106": 100}}, (106, 106)),
        ({"logit_bias": {str(END_TOKEN): 100}}, (None, END_TOKEN)),
        ({"ignore_eos": True, "max_tokens": 2}, (None, None)),
        ({"regex": "ab", "stop": "c"}, (None, None)),
        ({"regex": "ab", "stop": "b"}, ("b", "b")),
        ({"stop": "c", "min_tokens": 2, "regex": "cabc"}, ("c", "c")),
    ],
    ids=["stop id", "end token", "length", "structure", "structure and string", "min_tokens"],
)
def test_a_choice_names_its_stop_id_and_no_other_end(
    server: RunningServer, path: str, fields: dict[str, Any], stops: tuple[Any, Any]
) -> None:
    found = choices_of(server, path, **GREEDY, **fields)
    assert {stops_of(choice) for choice in found} == {stops}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_last_chunk_of_a_choice_alone_names_its_stop(server: RunningServer, path: str) -> None:
    fields = {"model": "hash", "max_tokens": 60, **PROMPTS[path], "stop": STOPS}
    expected = {c["index"]: stops_of(c) for c in choices_of(server, path, **fields)}
    chunks = parse_chunks(server.post(path, **fields, stream=True).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    last = {c["index"]: stops_of(c) for c in choices if c["finish_reason"] is not None}
    assert last == expected
    others = [choice for choice in choices if choice["finish_reason"] is None]
    # A busy machine sends the whole choice in one chunk: then there are no others.
    assert not any({"stop_reason", "matched_stop"} & choice.keys() for choice in others)
