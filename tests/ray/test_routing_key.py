"""RoutingKey: prompts that begin alike have hashes that begin alike, and tenants share none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.ray.routing_key import BLOCK_BYTES, MAX_BLOCKS, RoutingKey, create_routing_key

TEXT = "".join(chr(97 + i % 26) for i in range(10 * BLOCK_BYTES))


def key_of(path_session_id: str = "", headers: tuple[Any, ...] = (), **body: Any) -> RoutingKey:
    return create_routing_key(path_session_id, headers, json.dumps(body).encode())


def num_shared(left: RoutingKey, right: RoutingKey) -> int:
    """Return how many of the first hashes are equal."""
    pairs = zip(left.hashes, right.hashes, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(right.hashes))


def test_a_prompt_has_a_hash_for_each_full_block_of_its_bytes() -> None:
    key = key_of(prompt=TEXT[: 3 * BLOCK_BYTES + 5])
    assert (len(key.hashes), key.num_tokens) == (3, (3 * BLOCK_BYTES + 5) // 4)


def test_prompts_share_hashes_up_to_the_block_in_which_they_differ() -> None:
    other = TEXT[: 4 * BLOCK_BYTES + 7] + "#" + TEXT[4 * BLOCK_BYTES + 8 :]
    assert num_shared(key_of(prompt=TEXT), key_of(prompt=other)) == 4
    # An equal block after another beginning is another block.
    assert not set(key_of(prompt=TEXT).hashes[5:]) & set(key_of(prompt=other).hashes[5:])


def test_a_later_turn_of_a_chat_begins_with_the_earlier_one() -> None:
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
    first = key_of(messages=messages)
    answer = [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "go on"}]
    second = key_of(messages=messages + answer)
    assert num_shared(first, second) >= len(first.hashes) - 1
    assert len(second.hashes) > len(first.hashes)


def test_a_prompt_of_a_newer_api_begins_with_its_instructions() -> None:
    user, more = {"role": "user", "content": TEXT}, {"role": "user", "content": "go on"}
    for first, name in (("instructions", "input"), ("system", "messages")):
        key = key_of(**{first: TEXT, name: [user]})
        later = key_of(**{first: TEXT, name: [user, more]})
        other = key_of(**{first: "#" + TEXT, name: [user]})
        assert num_shared(key, later) >= len(key.hashes) - 1 > 10
        assert num_shared(key, other) == 0
    text = key_of(input=TEXT)
    assert len(text.hashes) == 10 and text.hashes == key_of(input=TEXT).hashes


def test_the_order_of_a_message_s_fields_does_not_matter() -> None:
    one, other = {"role": "user", "content": TEXT}, {"content": TEXT, "role": "user"}
    assert key_of(messages=[one]).hashes == key_of(messages=[other]).hashes


def test_token_ids_have_hashes_too_and_the_first_of_several_prompts_counts() -> None:
    ids = list(range(200))
    assert len(key_of(prompt=ids).hashes) == 200 * 4 // BLOCK_BYTES
    assert key_of(prompt=[ids, [1]]).hashes == key_of(prompt=ids).hashes
    assert key_of(prompt=[TEXT, "a"]).hashes == key_of(prompt=TEXT).hashes


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        (((b"authorization", b"Bearer a"),), {}),
        (((b"x-api-key", b"a"),), {}),
        ((), {"cache_salt": "a"}),
        ((), {"model": "a"}),
    ],
    ids=["tenant", "key", "salt", "model"],
)
def test_another_tenant_salt_or_model_shares_nothing(
    headers: tuple[Any, ...], fields: dict[str, str]
) -> None:
    plain, other = key_of(prompt=TEXT), key_of(headers=headers, prompt=TEXT, **fields)
    assert not set(plain.hashes) & set(other.hashes)


def test_a_key_is_in_no_routing_key() -> None:
    key = key_of(headers=((b"authorization", b"Bearer sesame"),), prompt="a")
    assert len(key.tenant) == 16 and "sesame" not in key.tenant


@pytest.mark.parametrize(
    ("path_session_id", "headers", "fields", "session_id"),
    [
        ("", (), {"session_id": "a"}, "a"),
        ("", ((b"x-session-id", b"b"),), {}, "b"),
        ("", (), {"prompt_cache_key": "c"}, "c"),
        ("", ((b"x-session-id", b"b"),), {"session_id": "a", "prompt_cache_key": "c"}, "a"),
        ("d", (), {"session_id": "a"}, "d"),
        ("", (), {"session_id": 5}, ""),
        ("", (), {"session_id": "x" * 999}, "x" * 128),
    ],
)
def test_a_session_is_named_as_in_a_replica(
    path_session_id: str, headers: tuple[Any, ...], fields: dict[str, Any], session_id: str
) -> None:
    assert key_of(path_session_id, headers, **fields).session_id == session_id


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"\xff", b"[1]", b"5", b"[" * 100_000, b'{"prompt": 5}', b'{"prompt": []}',
        b'{"messages": "a"}', b'{"input": {}}', b'{"input": [null, 5], "tools": 5}',
        b'{"prompt": ["a", 1]}', b'{"prompt": [-1, 1.5, true, 99999999999]}',
        b'{"prompt": "\\ud800"}', b'{"messages": [null, 5, {"content": "\\ud800"}], "tools": 5}',
    ],
)  # fmt: skip
def test_a_body_that_a_replica_refuses_has_a_key_all_the_same(raw: bytes) -> None:
    assert create_routing_key("", (), raw).hashes == ()


def test_what_comes_after_the_last_block_that_counts_is_not_hashed() -> None:
    assert len(key_of(prompt=TEXT * 100).hashes) == MAX_BLOCKS
