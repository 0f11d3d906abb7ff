"""KV events in the form in which vLLM publishes them, for routers that follow it.

Owns names and order of the fields on the wire. Knows no engine and no socket: it returns lists and
dictionaries, and bytes where msgspec is installed.

    [ time, [event, ...], data_parallel_rank ]         a batch: always an array

    {"type": "BlockStored", "block_hashes": [...],     vLLM 0.26: named_batch
     "parent_block_hash": ..., "medium": "GPU", ...}
    ["BlockStored", [...], ..., "GPU", None]           older versions: positional_batch

A hash on the wire is an unsigned integer of 64 bits, the last eight bytes of the block's hash.
A message has three parts: a topic, a number that grows by one, and the batch as msgpack.

Source: vllm/distributed/kv_events.py, and vLLM's pull request 42892 for the change of form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge.errors import InvalidConfig
from forge.kv_events import (
    DEVICE,
    DISK,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)

MEDIUM_NAMES = {DEVICE: "GPU", HOST: "CPU", DISK: "DISK"}
"""Names of the media on the wire."""

TOPIC = b"kv-events"
MAX_SEQUENCE_NUMBER = 2**63 - 1


def wire_hash(block_hash: bytes) -> int:
    """Return a block's hash as an unsigned integer of 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


def named_batch(events: Sequence[KVEvent], time_s: float, rank: int = 0) -> list[Any]:
    """Return a batch whose events are dictionaries. Fields that are None are there where required.

    time_s   seconds since 1970
    rank     index of the engine among those that serve one address
    """
    return [time_s, [_named_event(event) for event in events], rank]


def positional_batch(events: Sequence[KVEvent], time_s: float, rank: int = 0) -> list[Any]:
    """Return a batch whose events are lists, of a name and the fields in their order.

    Arguments as of `named_batch`.
    """
    named = [_named_event(event) for event in events]
    return [time_s, [list(event.values()) for event in named], rank]


def encode_batch(batch: Sequence[Any]) -> bytes:
    """Return a batch as msgpack. Raises InvalidConfig where msgspec is not installed."""
    return batch_encoder()(batch)


def batch_encoder() -> Callable[[Sequence[Any]], bytes]:
    """Return the function that encodes batches as msgpack.

    Raises InvalidConfig where msgspec is not installed.
    """
    try:
        from msgspec import msgpack
    except ImportError:
        raise InvalidConfig(
            "kv_events",
            "the package msgspec is not installed",
            "pip install msgspec",
        ) from None
    encode: Callable[[Sequence[Any]], bytes] = msgpack.Encoder().encode
    return encode


def message(
    sequence_number: int, payload: bytes, topic: bytes = TOPIC
) -> tuple[bytes, bytes, bytes]:
    """Return the parts of a message: topic, number and batch."""
    assert 0 <= sequence_number <= MAX_SEQUENCE_NUMBER, f"{sequence_number=}"
    return topic, sequence_number.to_bytes(8, "big"), payload


def _named_event(event: KVEvent) -> dict[str, Any]:
    """Return the event with its fields in the order of the wire."""
    match event:
        case BlockStored(block_hashes, parent_hash, token_ids, block_size, medium):
            return {
                "type": "BlockStored",
                "block_hashes": [wire_hash(each) for each in block_hashes],
                "parent_block_hash": None if parent_hash is None else wire_hash(parent_hash),
                "token_ids": list(token_ids),
                "block_size": block_size,
                "lora_id": None,
                "medium": MEDIUM_NAMES[medium],
                "lora_name": None,
            }
        case BlockRemoved(block_hashes, medium):
            return {
                "type": "BlockRemoved",
                "block_hashes": [wire_hash(each) for each in block_hashes],
                "medium": MEDIUM_NAMES[medium],
            }
        case _:
            assert isinstance(event, AllBlocksCleared), f"{event} is no event of a cache"
            return {"type": "AllBlocksCleared"}
