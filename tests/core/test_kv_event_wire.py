"""KV events on the wire: the fields that vLLM's subscribers read, and the load report."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from forge.errors import InvalidConfig
from forge.kv_event_wire import (
    encode_batch,
    message,
    named_batch,
    positional_batch,
    wire_hash,
)
from forge.kv_events import (
    DEVICE,
    DISK,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from forge.load_report import LoadReport, load_report
from forge.request import Request, SamplingParams
from tests.core.builders import scheduler, step

FIRST, SECOND = bytes(range(64)), bytes(range(100, 164))
EVENTS: list[KVEvent] = [
    BlockStored((SECOND,), FIRST, (7, 8), 2, DEVICE),
    BlockStored((FIRST,), None, (), 2, HOST),
    BlockRemoved((FIRST, SECOND), DISK),
    AllBlocksCleared(),
]


def test_a_hash_is_the_last_eight_bytes_as_an_unsigned_integer() -> None:
    assert wire_hash(FIRST) == 0x38393A3B3C3D3E3F
    assert wire_hash(b"\xff" * 64) == 2**64 - 1


def test_a_named_batch_has_the_fields_that_vllm_publishes() -> None:
    first, second = wire_hash(FIRST), wire_hash(SECOND)
    assert named_batch(EVENTS, 12.5, 3) == [
        12.5,
        [
            {
                "type": "BlockStored", "block_hashes": [second], "parent_block_hash": first,
                "token_ids": [7, 8], "block_size": 2, "lora_id": None, "medium": "GPU",
                "lora_name": None,
            },
            {
                "type": "BlockStored", "block_hashes": [first], "parent_block_hash": None,
                "token_ids": [], "block_size": 2, "lora_id": None, "medium": "CPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [first, second], "medium": "DISK"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]  # fmt: skip


def test_a_positional_batch_has_the_fields_in_vllm_s_order() -> None:
    first, second = wire_hash(FIRST), wire_hash(SECOND)
    assert positional_batch(EVENTS, 12.5) == [
        12.5,
        [
            ["BlockStored", [second], first, [7, 8], 2, None, "GPU", None],
            ["BlockStored", [first], None, [], 2, None, "CPU", None],
            ["BlockRemoved", [first, second], "DISK"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


@pytest.mark.parametrize("batch", [named_batch, positional_batch])
def test_a_batch_is_of_plain_values(batch: Any) -> None:
    plain = batch(EVENTS, 12.5)
    assert json.loads(json.dumps(plain)) == plain


def test_a_message_has_topic_number_and_payload() -> None:
    assert message(258, b"batch") == (b"kv-events", bytes([0, 0, 0, 0, 0, 0, 1, 2]), b"batch")
    with pytest.raises(AssertionError, match="sequence_number=-1"):
        message(-1, b"")


@pytest.mark.skipif(find_spec("msgspec") is not None, reason="msgspec is installed")
def test_without_msgspec_the_error_names_the_package() -> None:
    with pytest.raises(InvalidConfig, match="msgspec is not installed"):
        encode_batch([0.0, [], 0])


def test_vllm_s_structs_decode_both_forms() -> None:
    msgspec = pytest.importorskip("msgspec", reason="the encoding needs msgspec")
    for array_like, batch in ((False, named_batch), (True, positional_batch)):
        fields = {
            "block_hashes": list[int], "parent_block_hash": int | None, "token_ids": list[int],
            "block_size": int, "lora_id": int | None, "medium": str | None,
            "lora_name": str | None,
        }  # fmt: skip
        stored = msgspec.defstruct("BlockStored", fields.items(), tag=True, array_like=array_like)
        decoded = msgspec.msgpack.decode(
            encode_batch(batch(EVENTS[:1], 1.0)), type=tuple[float, list[stored], int]
        )
        assert decoded[1][0].token_ids == [7, 8]


def waiting_request(id: int, arrival_s: float) -> Request:
    prompt = tuple(range(1 + 10 * id, 9 + 10 * id))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return Request(id, prompt, params, arrival_s=arrival_s)


def test_a_load_report_counts_sequences_blocks_and_the_longest_wait() -> None:
    """Two of three run. The third waits since second 4; the first is preempted later."""
    running = scheduler(blocks=16, max_num_seqs=2)
    assert load_report(running, 5.0) == LoadReport(0, 0, 16, 16, 0.0)
    for id, arrival_s in ((0, 1.0), (1, 2.0), (2, 4.0)):
        running.add(waiting_request(id, arrival_s))
    step(running)
    assert load_report(running, 10.0) == LoadReport(2, 1, 12, 16, 6.0)
    assert load_report(running, 3.0).queue_s == 0.0
    running.abort(2)
    running.void("the model failed")
    assert load_report(running, 10.0) == LoadReport(0, 2, 16, 16, 0.0)
