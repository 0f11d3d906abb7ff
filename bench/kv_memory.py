"""Memory of keys and values: bytes that each sequence holds, by the kind of cache.

Owns nothing but the measurement. No weights are read: the caches are filled with a model's shape.

    forge bench kv memory [--shapes qwen3-4b,llama-3.1-8b] [--device cuda] [--json FILE]

    contiguous      StaticCache of transformers: 512 positions are allocated at the start
    dynamic         DynamicCache: exactly the positions held, copied at every step
    paged           PooledCaches on a pool that they fill
    paged, shared   the same, where all sequences begin with the same tokens

Bytes are those of live tensors: `torch.cuda.memory_allocated` on a GPU, the storages on a CPU. The
scratch block and the tables on the device count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers

from forge.bench.result_file import create_result, write_json
from forge.bench.shapes import SHAPES
from forge.bench.workload import print_result
from forge.models.hf.kv_cache_pool import KVCachePool
from forge.models.hf.transformers_cache import PooledCache

NUM_SEQUENCES = 32
SEQUENCE_LEN = 60
PROMPT_LEN = 50
SHARED_LEN = 48
CONTIGUOUS_LEN = 512
BLOCK_SIZE = 16
DTYPE = torch.bfloat16


class Measurement(NamedTuple):
    """Memory of one kind of cache.

    ratio   sequences in the same memory, contiguous allocation being 1
    """

    kind: str
    bytes_per_sequence: float
    sequences_per_gb: float
    ratio: float


def live_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors that are alive on the device."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = (each.untyped_storage() for each in tensors if each.device.type == device.type)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def fill(cache: Any, config: Any, device: torch.device) -> Any:
    """Write a prompt and one token at a time, up to SEQUENCE_LEN positions. Return the cache."""
    shape = (1, config.num_key_value_heads, SEQUENCE_LEN, config.head_dim)
    keys = torch.ones(shape, dtype=DTYPE, device=device)
    start = int(cache.get_seq_length())
    for end in (PROMPT_LEN, *range(PROMPT_LEN + 1, SEQUENCE_LEN + 1)):
        for layer_index in range(config.num_hidden_layers):
            cache.update(keys[:, :, start:end], keys[:, :, start:end], layer_index)
        start = end
    return cache


def open_paged(config: Any, device: torch.device, num_shared: int) -> list[Any]:
    """Return filled caches on a pool that has exactly their blocks.

    num_shared   positions that all sequences begin with, a multiple of BLOCK_SIZE
    """
    num_own_blocks = -(-(SEQUENCE_LEN - num_shared) // BLOCK_SIZE)
    pool = KVCachePool(
        config,
        num_blocks=NUM_SEQUENCES * num_own_blocks + num_shared // BLOCK_SIZE,
        dtype=DTYPE,
        device=device,
        block_size=BLOCK_SIZE,
    )
    caches = []
    for index in range(NUM_SEQUENCES):
        ids = torch.full((1, PROMPT_LEN), 1 + index)
        ids[:, :num_shared] = 0
        caches.append(fill(PooledCache(pool, ids, torch.ones_like(ids)), config, device))
        if num_shared:
            caches[-1].publish(ids)
    assert pool.blocks.num_free_blocks == 0, f"{pool.blocks.num_free_blocks=}"
    return caches


def measure_bytes(open_caches: Callable[[], list[Any]], device: torch.device) -> float:
    """Return the bytes of each of the NUM_SEQUENCES sequences in the opened caches."""
    before = live_bytes(device)
    caches = open_caches()
    num_bytes = live_bytes(device) - before
    assert len(caches) == NUM_SEQUENCES, f"{len(caches)=}"
    return num_bytes / NUM_SEQUENCES


def measure_shape(config: Any, device: torch.device) -> list[Measurement]:
    """Return a measurement of each kind of cache for models of this shape."""

    def open_each(create: Callable[[], Any]) -> list[Any]:
        return [fill(create(), config, device) for _ in range(NUM_SEQUENCES)]

    kinds: dict[str, Callable[[], list[Any]]] = {
        "contiguous": lambda: open_each(
            lambda: transformers.StaticCache(config, max_cache_len=CONTIGUOUS_LEN)
        ),
        "dynamic": lambda: open_each(lambda: transformers.DynamicCache(config=config)),
        "paged": lambda: open_paged(config, device, 0),
        "paged, shared": lambda: open_paged(config, device, SHARED_LEN),
    }
    num_bytes = {kind: measure_bytes(open_caches, device) for kind, open_caches in kinds.items()}
    return [
        Measurement(
            kind, round(each, 1), round(1e9 / each, 2), round(num_bytes["contiguous"] / each, 3)
        )
        for kind, each in num_bytes.items()
    ]


def create_config(name: str) -> Any:
    """Return transformers' configuration of a shape."""
    fields = dict(SHAPES[name])
    config = transformers.AutoConfig.for_model(**fields)
    config.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return config


def main(shapes: Sequence[str], device_name: str, json_path: str | None) -> int:
    """Measure, print and write the record.

    shapes        names of SHAPES
    device_name   cpu or cuda
    """
    device = torch.device(device_name)
    figures: dict[str, Any] = {
        "device": device_name,
        "num_sequences": NUM_SEQUENCES,
        "sequence_len": SEQUENCE_LEN,
        "shared_len": SHARED_LEN,
        "contiguous_len": CONTIGUOUS_LEN,
        "block_size": BLOCK_SIZE,
        "dtype": str(DTYPE).removeprefix("torch."),
    }
    with torch.inference_mode():
        for name in shapes:
            measurements = measure_shape(create_config(name), device)
            figures[name] = [each._asdict() for each in measurements]
            for each in measurements:
                print(f"{name} {each}", flush=True)
    print_result({"benchmark": "kv_memory", **figures})
    if json_path is not None:
        write_json(json_path, create_result("kv_memory", figures))
    return 0
