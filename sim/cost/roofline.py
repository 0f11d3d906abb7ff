"""Roofline: step times from the peak figures of a GPU and the shape of a model.

Owns the figures of common GPUs and models, the shares of the peak that this engine reaches, and the
size of the cache that fits.
Needs no GPU and no calibration, so it answers how policies compare on an H200. sim/cost/table.py
answers how long steps take, to a few per cent.

    weights    read once a step      ┐ the longer of the two
    products   of every token        ┘                        ┐
    positions  read by each row      ┐ the longer of the two  ├ their sum
    scores     of queries and keys   ┘                        │
    layers     kernels that wait for one another              ┘

The shares are those of decode steps measured on one H200: bench/results. Two effects are left out.
Other kernels serve other batches, so a step of 8 rows takes up to 60 % longer than predicted. A
prompt of a few hundred tokens may take longer to launch than to compute.

Williams, Waterman, Patterson 2009 (roofline).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.seam import StepPlan
from forge.sim.units import FS_PER_NS, FS_PER_S

BYTES_PER_VALUE = 2

WEIGHT_BANDWIDTH_PER_MILLE = 950
KV_BANDWIDTH_PER_MILLE = 600
MATMUL_PER_MILLE = 600
"""Shares of the peak: bandwidth for weights, bandwidth for the KV cache, arithmetic."""

RESERVED_BYTES = 5 * 2**29
"""Bytes that a server keeps for sampling, CUDA graphs and libraries."""

LAYER_NS = 16_000
"""Time that the kernels of a layer add to the roofline: each waits for the one before."""

PLAN_NS, PLAN_ROW_NS = 95_000, 1_500
COMMIT_NS, COMMIT_ROW_NS = 10_000, 850
"""Times of the host: planning with launch, and commit; constant and for each row."""


class Gpu(NamedTuple):
    """Figures of the manufacturer: memory bandwidth, dense 16-bit operations a second, memory."""

    bytes_per_s: int
    flops_per_s: int
    memory_bytes: int


class ModelShape(NamedTuple):
    """Sizes of a decoder. With tied word embeddings one table serves as embedding and head."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def num_layer_weights(self) -> int:
        """Number of weights in the matrices of all layers."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Number of weights in the matrix that computes logits."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the GPU."""
        tables = 1 if self.tie_word_embeddings else 2
        return BYTES_PER_VALUE * (self.num_layer_weights + tables * self.num_head_weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one position."""
        return BYTES_PER_VALUE * 2 * self.num_layers * self.num_kv_heads * self.head_dim


GPUS: dict[str, Gpu] = {
    "b200": Gpu(8_000 * 10**9, 2_250 * 10**12, 180 * 10**9),
    "h200": Gpu(4_800 * 10**9, 989 * 10**12, 141 * 10**9),
    "h100": Gpu(3_350 * 10**9, 989 * 10**12, 80 * 10**9),
    "a100-80": Gpu(2_039 * 10**9, 312 * 10**12, 80 * 10**9),
    "a100-40": Gpu(1_555 * 10**9, 312 * 10**12, 40 * 10**9),
    "l40s": Gpu(864 * 10**9, 362 * 10**12, 48 * 10**9),
    "l4": Gpu(300 * 10**9, 121 * 10**12, 24 * 10**9),
    "rtx-4090": Gpu(1_008 * 10**9, 165 * 10**12, 24 * 10**9),
    "rtx-3090": Gpu(936 * 10**9, 71 * 10**12, 24 * 10**9),
}

_QWEN, _LLAMA = 151_936, 128_256
MODEL_SHAPES: dict[str, ModelShape] = {
    "qwen3-0.6b": ModelShape(28, 1024, 3072, 16, 8, 128, _QWEN, True),
    "qwen3-1.7b": ModelShape(28, 2048, 6144, 16, 8, 128, _QWEN, True),
    "qwen3-4b": ModelShape(36, 2560, 9728, 32, 8, 128, _QWEN, True),
    "qwen3-8b": ModelShape(36, 4096, 12_288, 32, 8, 128, _QWEN, False),
    "qwen3-14b": ModelShape(40, 5120, 17_408, 40, 8, 128, _QWEN, False),
    "qwen3-32b": ModelShape(64, 5120, 25_600, 64, 8, 128, _QWEN, False),
    "llama-3.2-1b": ModelShape(16, 2048, 8192, 32, 8, 64, _LLAMA, True),
    "llama-3.2-3b": ModelShape(28, 3072, 8192, 24, 8, 128, _LLAMA, True),
    "llama-3.1-8b": ModelShape(32, 4096, 14_336, 32, 8, 128, _LLAMA, False),
    "llama-3.1-70b": ModelShape(80, 8192, 28_672, 64, 8, 128, _LLAMA, False),
    "mistral-7b": ModelShape(32, 4096, 14_336, 32, 8, 128, 32_768, False),
}


@dataclass(frozen=True)
class RooflineCost:
    """A CostModel of femtoseconds, except for `base_ns`.

    base_ns      of a step: its layers, one after the other
    weights_fs   of reading every weight
    token_fs     of the products of a token with the weights of the layers
    sample_fs    of the products that compute the logits of a row
    kv_read_fs   of reading the keys and values of a position
    pair_fs      of the score of one query and one key
    """

    base_ns: int
    weights_fs: int
    token_fs: int
    sample_fs: int
    kv_read_fs: int
    pair_fs: int

    def step_ns(self, plan: StepPlan) -> int:
        """Return the time of the device. A row samples after its last token and each draft."""
        tokens = num_samples = attention_fs = 0
        position_fs, pair_fs = self.kv_read_fs, self.pair_fs
        for row in plan.rows:
            start, end = row.start, row.end
            count = end - start
            tokens += count
            num_samples += row.num_samples
            pairs = count * start + count * (count + 1) // 2
            attention_fs += max(position_fs * end, pair_fs * pairs)
        return self._total_ns(tokens, num_samples, attention_fs)

    def decode_ns(self, num_rows: int, total_kv_len: int, max_kv_len: int) -> int:
        """Return the time of the device: a row scores as many keys as it reads positions."""
        attention_fs = max(self.kv_read_fs, self.pair_fs) * (total_kv_len + num_rows)
        return self._total_ns(num_rows, num_rows, attention_fs)

    def _total_ns(self, tokens: int, samples: int, attention_fs: int) -> int:
        matmul_fs = tokens * self.token_fs + samples * self.sample_fs
        return self.base_ns + (max(self.weights_fs, matmul_fs) + attention_fs) // FS_PER_NS

    def plan_ns(self, plan: StepPlan) -> int:
        """Return the time of planning and launching, by rows."""
        return PLAN_NS + PLAN_ROW_NS * len(plan.rows)

    def commit_ns(self, plan: StepPlan) -> int:
        """Return the time of the commit, by rows."""
        return COMMIT_NS + COMMIT_ROW_NS * len(plan.rows)


def create_roofline(gpu: Gpu, shape: ModelShape) -> RooflineCost:
    """Return the cost model of a model of this shape on this GPU."""

    def reading_fs(count: int, per_mille: int) -> int:
        return count * FS_PER_S * 1000 // (gpu.bytes_per_s * per_mille)

    def matmul_fs(count: int) -> int:
        return 2 * count * FS_PER_S * 1000 // (gpu.flops_per_s * MATMUL_PER_MILLE)

    weight_bytes = BYTES_PER_VALUE * (shape.num_layer_weights + shape.num_head_weights)
    return RooflineCost(
        base_ns=LAYER_NS * shape.num_layers,
        weights_fs=reading_fs(weight_bytes, WEIGHT_BANDWIDTH_PER_MILLE),
        token_fs=matmul_fs(shape.num_layer_weights),
        sample_fs=matmul_fs(shape.num_head_weights),
        kv_read_fs=reading_fs(shape.kv_bytes_per_token, KV_BANDWIDTH_PER_MILLE),
        pair_fs=matmul_fs(2 * shape.num_layers * shape.num_heads * shape.head_dim),
    )


def parse_roofline(text: str) -> RooflineCost:
    """Return the cost model of `GPU,MODEL`, such as "h200,qwen3-4b". Raises InvalidConfig."""
    return create_roofline(*parse_gpu_and_shape(text))


def num_blocks_that_fit(gpu: Gpu, shape: ModelShape, utilization: float, block_size: int) -> int:
    """Return the blocks of a cache that fit next to the weights, 0 or more.

    utilization   share of the GPU's memory for weights, steps and cache

    Activations of the largest step are left out, and so is what a GPU has above its nominal size.
    """
    cache_bytes = int(utilization * gpu.memory_bytes) - shape.weight_bytes - RESERVED_BYTES
    return max(0, cache_bytes // (block_size * shape.kv_bytes_per_token))


def parse_gpu_and_shape(text: str) -> tuple[Gpu, ModelShape]:
    """Return the GPU and the model of `GPU,MODEL`. Raises InvalidConfig."""
    gpu_name, _, shape_name = text.partition(",")
    for name, names in ((gpu_name, list(GPUS)), (shape_name, list(MODEL_SHAPES))):
        if name not in names:
            raise InvalidConfig(
                "cost",
                f"roofline:{text[:64]} names {name[:64]!r}, which is not known",
                f"Use one of: {', '.join(names)}",
            )
    gpu, shape = GPUS[gpu_name], MODEL_SHAPES[shape_name]
    if shape.weight_bytes >= gpu.memory_bytes:
        raise InvalidConfig(
            "cost",
            f"{shape_name} takes {shape.weight_bytes / 1e9:.0f} GB, {gpu_name} has "
            f"{gpu.memory_bytes / 1e9:.0f}",
            "Name a smaller model or a larger GPU",
        )
    return gpu, shape
