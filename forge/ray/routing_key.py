"""RoutingKey: what a router reads of an HTTP request, before any tokenizer.

Owns the hashes of a prompt's bytes. Knows no model and no replica. Requests whose prompts begin
with the same bytes also begin with the same tokens, up to the last one. So a tokenizer would make
the prefix more exact by a few tokens, and would have to be loaded where requests are routed.

    {"messages": [system, user]}          bytes    [ 256 | 256 | 256 |..   chained hashes a b c
    {"messages": [system, user, a, u2]}   bytes    [ 256 | 256 | 256 | 256 | 256 |..   a b c d e

Always true: two requests of different tenants, salts or models have no hash in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

BLOCK_BYTES = 256
"""Bytes of a prompt that a hash stands for: about 64 tokens."""
MAX_BLOCKS = 512
"""Hashes of a request: what comes later than 128 KiB does not matter for its replica."""
BYTES_PER_TOKEN = 4
HASH_BYTES = 16
SESSION_HEADER = b"x-session-id"
MAX_SESSION_CHARS = 128

Headers = Sequence[tuple[bytes, bytes]]


class RoutingKey(NamedTuple):
    """Properties of an HTTP request that decide on its replica.

    hashes       of the blocks of its prompt's bytes, first block first
    num_tokens   of its prompt, estimated from its bytes
    tenant       digest of the key that it has, "" without one
    """

    hashes: tuple[bytes, ...]
    num_tokens: int
    tenant: str
    session_id: str


def create_routing_key(path_session_id: str, headers: Headers, raw_body: bytes) -> RoutingKey:
    """Return the key of a request. A body that is not JSON has no prefix: a replica refuses it.

    path_session_id   session that the path names, "" where it names none
    """
    tenant = _tenant(headers)
    body = _parse_object(raw_body)
    prompt = b"".join(_prompt_parts(body))
    root = repr((tenant, _text(body, "cache_salt"), _text(body, "model"))).encode()
    hashes = _chain_hashes(root, prompt)
    session_id = (path_session_id or _session_id(headers, body))[:MAX_SESSION_CHARS]
    return RoutingKey(hashes, len(prompt) // BYTES_PER_TOKEN, tenant, session_id)


def _parse_object(raw_body: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw_body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _prompt_parts(body: dict[str, Any]) -> Iterable[bytes]:
    """Yield the bytes of a prompt in the order in which a model reads them."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(messages, list):
        yield from _encode_parts(body.get("tools"), body.get("system"), *messages)
        return
    if "input" in body:  # of /v1/responses
        items = body["input"] if isinstance(body["input"], list) else [body["input"]]
        yield from _encode_parts(body.get("tools"), body.get("instructions"), *items)
        return
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts go to one replica, by the first of them
    if isinstance(prompt, str):
        yield prompt.encode(errors="surrogatepass")
    elif isinstance(prompt, list):
        yield b"".join(
            each.to_bytes(BYTES_PER_TOKEN, "little")
            for each in prompt
            if type(each) is int and 0 <= each < 2**32
        )


def _encode_parts(*parts: object) -> Iterable[bytes]:
    """Yield the JSON of each part that is there."""
    for part in parts:
        if part is not None:
            yield json.dumps(part, sort_keys=True, separators=(",", ":")).encode()


def _chain_hashes(root: bytes, prompt: bytes) -> tuple[bytes, ...]:
    """Return the hashes of the full blocks of the prompt, each of all bytes up to its end."""
    end = min(len(prompt) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES
    digest = blake2b(root, digest_size=HASH_BYTES)
    hashes = []
    for start in range(0, end, BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        hashes.append(digest.digest())
    return tuple(hashes)


def _tenant(headers: Headers) -> str:
    values = dict(headers)
    value = values.get(b"authorization", values.get(b"x-api-key"))
    return "" if value is None else blake2b(value, digest_size=8).hexdigest()


def _session_id(headers: Headers, body: dict[str, Any]) -> str:
    """Return the session as a replica reads it: of the body, the header or the cache."""
    header = next((value for name, value in headers if name == SESSION_HEADER), b"")
    return (
        _text(body, "session_id")
        or header.decode(errors="replace")
        or _text(body, "prompt_cache_key")
    )


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""
