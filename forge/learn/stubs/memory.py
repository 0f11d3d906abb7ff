"""Compute the memory of a model: bytes of a token, tokens that fit, time of a decode step.

Write three functions. All values are of 2 bytes (bfloat16).

1. The keys and values of one token: one vector of each, for every layer and every KV head.
2. The cache takes what the weights, and nothing else, leave of 90 % of the GPU's memory. How many
   tokens fit?
3. A decode step is limited by memory bandwidth: it reads all weights once, and the keys and values
   of all tokens of all rows. How many milliseconds does that take?

The check begins with Qwen3-4B on an H200; drawn sizes on other GPUs follow. 2 % are close enough.
To know first: Qwen3-4B has 36 layers, 32 query heads, 8 KV heads of 128 values and 4.02 billion
weights; an H200 has 141 GB and reads 4,800 GB a second. What do you expect?
"""

from typing import NamedTuple

BYTES_PER_VALUE = 2
MEMORY_SHARE = 0.9


class Model(NamedTuple):
    """Sizes of a decoder."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_weights: int


class Gpu(NamedTuple):
    """Bytes of a GPU's memory, and bytes that it reads a second."""

    memory_bytes: int
    bytes_per_s: int


def kv_bytes_per_token(model: Model) -> float:
    """Return the bytes of the keys and values of one token."""
    raise NotImplementedError


def num_cache_tokens(model: Model, gpu: Gpu) -> float:
    """Return how many tokens the cache holds."""
    raise NotImplementedError


def decode_ms(model: Model, gpu: Gpu, num_rows: int, context_len: int) -> float:
    """Return the milliseconds of a decode step of `num_rows` rows of `context_len` tokens each."""
    raise NotImplementedError
