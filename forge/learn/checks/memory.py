"""Check of exercise 1: the memory of models, from their shapes.

Owns the known wrong answers and the drawn shapes. The first case and the GPUs are those of the
simulator's roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import ModuleType
from typing import NamedTuple

from forge.learn.answers import WrongAnswer, call_for_number, create_random, is_close
from forge.sim.cost.roofline import BYTES_PER_VALUE, GPUS, MODEL_SHAPES, Gpu

MEMORY_SHARE = 0.9
FIRST_CASE = ("h200", "qwen3-4b")
NUM_CASES = 6
OTHER_SIZES = "Compute with every size of `model` and `gpu`: those of the next case are others"
"""Hint of an answer that is none of the known wrong ones."""


class Model(NamedTuple):
    """Sizes of a decoder, with the fields of the stub's."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_weights: int


def check(module: ModuleType, seed: int) -> str:
    """Compare the three functions on the first case and on drawn ones."""
    random = create_random(seed, 1)
    gpu_name, model_name = FIRST_CASE
    shape = MODEL_SHAPES[model_name]
    # With tied tables a step reads every weight, so one number serves for memory and time.
    assert shape.tie_word_embeddings, model_name
    first = Model(
        *(shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim),
        shape.weight_bytes // BYTES_PER_VALUE,
    )
    cases = [(f"{model_name} on {gpu_name}", gpu_name, first)]
    for _ in range(NUM_CASES):
        gpu_name, model = random.choice(sorted(GPUS)), draw_model(random)
        cases.append((f"{model} on {gpu_name}", gpu_name, model))
    for where, gpu_name, model in cases:
        num_rows, context_len = random.choice((1, 8, 64, 256)), random.randrange(500, 8000)
        _check_case(module, where, GPUS[gpu_name], model, num_rows, context_len)
    kept = shape.kv_bytes_per_token
    return f"{len(cases)} models and GPUs; Qwen3-4B keeps {kept} bytes a token"


def draw_model(random: Random) -> Model:
    """Draw sizes other than those of the first case. The weights fit every GPU.

    Quotients with the sizes of the first case are no powers of two, as those of the known wrong
    answers are: a size that is not read from the model gets a hint of its own.
    """
    num_kv_heads = random.choice((3, 5, 6, 10, 12))
    return Model(
        num_layers=random.randrange(16, 36),
        num_heads=num_kv_heads * random.choice((2, 4, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=random.choice((72, 80, 96, 192)),
        num_weights=random.randrange(500, 9_000) * 10**6,
    )


def _check_case(
    module: ModuleType, where: str, gpu: Gpu, model: Model, num_rows: int, context_len: int
) -> None:
    values_per_layer = 2 * model.num_kv_heads * model.head_dim
    kv_bytes = BYTES_PER_VALUE * model.num_layers * values_per_layer
    weight_bytes = BYTES_PER_VALUE * model.num_weights
    _compare(
        f"kv_bytes_per_token of {where}",
        call_for_number(module, "kv_bytes_per_token", model),
        kv_bytes,
        {
            kv_bytes / 2: "Each layer keeps a key and a value, each of them of 2 bytes",
            kv_bytes * model.num_heads / model.num_kv_heads: "Query heads share KV heads: only "
            "these are kept (grouped-query attention)",
            kv_bytes / model.num_layers: "Every layer has keys and values of its own",
        },
    )
    memory = MEMORY_SHARE * gpu.memory_bytes
    _compare(
        f"num_cache_tokens of {where}",
        call_for_number(module, "num_cache_tokens", model, gpu),
        (memory - weight_bytes) / kv_bytes,
        {
            memory / kv_bytes: "The weights are in the same memory",
            (gpu.memory_bytes - weight_bytes) / kv_bytes: "Only 90 % of the memory is used",
            (memory - weight_bytes / 2) / kv_bytes: "A weight has 2 bytes",
        },
    )
    read_bytes = weight_bytes + num_rows * context_len * kv_bytes
    to_ms = 1000 / gpu.bytes_per_s
    _compare(
        f"decode_ms of {where}, {num_rows} rows of {context_len} tokens",
        call_for_number(module, "decode_ms", model, gpu, num_rows, context_len),
        read_bytes * to_ms,
        {
            read_bytes / gpu.bytes_per_s: "The result is in milliseconds",
            weight_bytes * to_ms: "Each row also reads the keys and values of its context",
            (weight_bytes + context_len * kv_bytes) * to_ms: "Each row has a context of its own",
            num_rows * (weight_bytes + context_len * kv_bytes) * to_ms: "The rows of a step share "
            "one reading of the weights: that is why batches pay",
        },
    )


def _compare(where: str, value: float, expected: float, known_errors: Mapping[float, str]) -> None:
    """Raise WrongAnswer unless the value is close, with the hint of a known wrong value."""
    if is_close(value, expected):
        return
    hint = next(
        (text for wrong, text in known_errors.items() if is_close(value, wrong)), OTHER_SIZES
    )
    raise WrongAnswer(f"{where}: {value:,.6g}, expected {expected:,.6g}", hint)
