"""Llama: a complete transformer over a paged KV cache, in numpy. A PagedDecoder.

Owns the weights, and the keys and values of every block. Knows no plan and samples nothing: those
are PagedModel's. The model is that of Touvron et al. (2023), in float32.

    tokens of all rows ─► embedding ─► layers ─► norm ─► logits
    layer    hidden ─► norm ─► q, k, v ─► rotate ─► k, v to their blocks ─► attend ─► + ─► MLP ─► +
    attend   for each row: its queries, and the keys and values of the blocks in its table
    cache    [blocks, layers, 2, kv_heads, block_size, head_dim]      cache[7] is all of block 7

Always true: a position has the same logits, bit by bit, whatever else a step computes. How a
product of matrices rounds depends on their shapes, so each product here has a fixed shape: tokens
are in tiles of TILE, and a query meets the keys of one block at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from safetensors.numpy import load_file

from forge.models.paged_decoder import BlockRow, RowLogits

Array: TypeAlias = Any
"""Array of numpy, of float32 where nothing else is said."""

TILE, PANEL = 4, 128
"""Tokens and outputs of one product with a weight: so small that BLAS starts no threads for it.

For more of them the threads cost more than they save.
"""


class Layer(NamedTuple):
    """Weights of a layer. Matrices that have the same inputs are joined.

    norms     [hidden]
    others    [panels, inputs, PANEL], see `split_panels`
    """

    attention_norm: Array
    qkv: Array
    attention_output: Array
    mlp_norm: Array
    gate_up: Array
    down: Array


class Llama:
    """Weights of a checkpoint in `folder`, and the keys and values of `num_blocks` blocks.

    weights   arrays by the names of the checkpoint
    """

    def __init__(self, folder: Path, num_blocks: int, block_size: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.vocab_size: int = config["vocab_size"]
        self.num_layers: int = config["num_hidden_layers"]
        self.block_size = block_size
        self._num_kv_heads: int = config["num_key_value_heads"]
        self._head_dim: int = config["head_dim"]
        self._norm_eps: float = config["rms_norm_eps"]
        self._rotations = compute_rotations(
            config["max_position_embeddings"],
            self._head_dim,
            config["rope_parameters"]["rope_theta"],
        )
        self.set_weights(load_file(folder / "model.safetensors"))
        self._cache = self._create_blocks(num_blocks)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Compute with these weights from now on. Blocks keep what the earlier ones wrote."""
        self.weights = weights
        self._embedding = weights["model.embed_tokens.weight"].astype(np.float32)
        self._layers = [load_layer(weights, index) for index in range(self.num_layers)]
        self._norm_weight = weights["model.norm.weight"].astype(np.float32)
        self._head = split_panels(self._embedding)  # One matrix is the embedding and the head.

    def _create_blocks(self, count: int) -> Array:
        shape = (self.num_layers, 2, self._num_kv_heads, self.block_size, self._head_dim)
        return np.zeros((count, *shape), np.float32)

    def pages(self) -> Array:
        """Return the blocks, each with the keys and values of all layers."""
        return self._cache

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks. The first ones keep their contents."""
        grown = self._create_blocks(max(0, num_blocks - len(self._cache)))
        self._cache = np.concatenate([self._cache[:num_blocks], grown])

    def forward(self, rows: Sequence[BlockRow]) -> list[RowLogits]:
        """Compute all rows in one pass of the layers, and return the logits of each row."""
        if not rows:
            return []
        tokens = np.concatenate([row.tokens for row in rows])
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        row_blocks = [np.array(row.table[: -(-row.end // self.block_size)]) for row in rows]
        blocks = np.concatenate(
            [
                table[np.arange(row.start, row.end) // self.block_size]
                for row, table in zip(rows, row_blocks, strict=True)
            ]
        )
        ends = np.cumsum([len(row.tokens) for row in rows])
        hidden = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            inputs = normalize(hidden, layer.attention_norm, self._norm_eps)
            queries, keys, values = self._split_heads(multiply(inputs, layer.qkv))
            rotations = self._rotations[positions]
            queries, keys = rotate(queries, rotations), rotate(keys, rotations)
            # Keys and values of the step are in the cache before a query reads them there.
            offsets = positions % self.block_size
            self._cache[blocks, index, 0, :, offsets] = keys
            self._cache[blocks, index, 1, :, offsets] = values
            attended = [
                attend(queries[end - len(row.tokens) : end], self._cache[table, index], row.start)
                for row, table, end in zip(rows, row_blocks, ends, strict=True)
            ]
            hidden = hidden + multiply(np.concatenate(attended), layer.attention_output)
            inputs = normalize(hidden, layer.mlp_norm, self._norm_eps)
            gate_up = multiply(inputs, layer.gate_up)
            middle = gate_up.shape[1] // 2
            gate, up = gate_up[:, :middle], gate_up[:, middle:]
            hidden = hidden + multiply(silu(gate) * up, layer.down)
        final = normalize(hidden, self._norm_weight, self._norm_eps)
        logits = multiply(final, self._head)[:, : self.vocab_size]
        return [
            read_logits(logits[end - len(row.tokens) : end], row.start)
            for row, end in zip(rows, ends, strict=True)
        ]

    def _split_heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values, [tokens, heads, head_dim] each."""
        heads = qkv.reshape(len(qkv), -1, self._head_dim)
        count = self._num_kv_heads
        return heads[:, : -2 * count], heads[:, -2 * count : -count], heads[:, -count:]


def attend(queries: Array, cache: Array, start: int) -> Array:
    """Return what each query reads from its own position and all before it, [tokens, hidden].

    queries   [tokens, heads, head_dim], of the positions from `start` on
    cache     [blocks, 2, kv_heads, block_size, head_dim], all blocks of the sequence

    Sums over a block come first, then the sum over blocks, in order. So blocks after the query's
    own add zeros only, and it does not matter how many there are.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_blocks, _, num_kv_heads, block_size, _ = cache.shape
    keys, values = cache[:, 0], cache[:, 1]
    # Heads that share keys are the rows of one product.
    grouped = queries.reshape(num_tokens, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.swapaxes(-1, -2) * head_dim**-0.5
    key_positions = np.arange(num_blocks * block_size).reshape(num_blocks, 1, 1, block_size)
    positions = np.arange(start, start + num_tokens).reshape(-1, 1, 1, 1, 1)
    scores = np.where(key_positions <= positions, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=(1, 4), keepdims=True))
    totals = weights.sum(axis=-1, keepdims=True)
    read = add_blocks(weights @ values) / add_blocks(totals)
    return read.reshape(num_tokens, -1)


def add_blocks(parts: Array) -> Array:
    """Return the sum over axis 1, added in order: the sum of numpy may choose another order."""
    total = parts[:, 0].copy()
    for block in range(1, parts.shape[1]):
        total += parts[:, block]
    return total


def multiply(inputs: Array, panels: Array) -> Array:
    """Return inputs [tokens, inputs] times a matrix in panels, in products of one shape."""
    num_tokens, num_inputs = inputs.shape
    num_tiles = -(-num_tokens // TILE)
    padded = np.zeros((num_tiles * TILE, num_inputs), np.float32)
    padded[:num_tokens] = inputs
    outputs = padded.reshape(num_tiles, 1, TILE, num_inputs) @ panels
    return outputs.swapaxes(1, 2).reshape(num_tiles * TILE, -1)[:num_tokens]


def normalize(hidden: Array, weight: Array, eps: float) -> Array:
    """Return the root mean square norm (Zhang and Sennrich, 2019)."""
    mean_square = (hidden * hidden).mean(axis=-1, keepdims=True)
    return hidden / np.sqrt(mean_square + eps) * weight


def silu(values: Array) -> Array:
    """Return each value times its sigmoid. tanh does not overflow, as exp could."""
    return values * (0.5 * np.tanh(0.5 * values) + 0.5)


def compute_rotations(num_positions: int, head_dim: int, theta: float) -> Array:
    """Return cosines and sines of each position, [positions, 2, 1, head_dim / 2] (RoPE, 2021)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    frequencies = 1 / theta**exponents
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, :, None]


def rotate(heads: Array, rotations: Array) -> Array:
    """Return heads [tokens, heads, head_dim], each pair of halves turned by its angle."""
    cos, sin = rotations[:, 0], rotations[:, 1]
    middle = heads.shape[-1] // 2
    first, second = heads[..., :middle], heads[..., middle:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def read_logits(logits: Array, start: int) -> RowLogits:
    """Return the logits [tokens, vocab_size] of a row by the end of their context."""
    return lambda end: logits[end - start - 1].tolist()


def split_panels(weight: Array) -> Array:
    """Return a weight [outputs, inputs] as panels [panels, inputs, PANEL], padded with zeros."""
    num_outputs, num_inputs = weight.shape
    padded = np.zeros((-(-num_outputs // PANEL) * PANEL, num_inputs), np.float32)
    padded[:num_outputs] = weight
    panels = padded.reshape(-1, PANEL, num_inputs).swapaxes(1, 2)
    return np.ascontiguousarray(panels)


def load_layer(weights: Mapping[str, Array], index: int) -> Layer:
    """Return the weights of a layer, from the names that transformers gives them."""

    def read(*names: str) -> Array:
        matrices = [weights[f"model.layers.{index}.{name}.weight"] for name in names]
        return np.concatenate(matrices).astype(np.float32)

    attention = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    return Layer(
        attention_norm=read("input_layernorm"),
        qkv=split_panels(read(*attention)),
        attention_output=split_panels(read("self_attn.o_proj")),
        mlp_norm=read("post_attention_layernorm"),
        gate_up=split_panels(read("mlp.gate_proj", "mlp.up_proj")),
        down=split_panels(read("mlp.down_proj")),
    )
