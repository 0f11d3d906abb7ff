"""Decode attention on a GPU: time and bandwidth of a layer, by rows and lengths.

Owns nothing but the measurement. The kernels are those that a decode step of the model runs.

    python -m forge.bench.decode_attention [--shapes qwen3-4b,qwen3-0.6b] [--json FILE]

    equal      every row has this length
    drawn      exponential with this mean, 16 at least
    padded     equal, and rows of one position at the end, as a captured step has

A CUDA graph holds eight layers with blocks of their own, which are many times the L2 cache. Blocks
are scattered, as in a cache that has served for a while.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product, starmap
from random import Random
from typing import Any, NamedTuple

import torch

from forge.bench.kernels import EPS, SHAPES, KernelShape, measure_launch_us
from forge.bench.result_file import create_result, write_json
from forge.models.hf.attention.interface import LayerSpec, QKNormRope
from forge.models.hf.attention.triton_decode import DecodeAttention
from forge.models.hf.kv_cache import KVCache, KVCacheSpec

NUM_LAYERS = 8
BLOCK_SIZE = 64
HEAD_DIM = 128
ELEMENTWISE_BYTES = 4 * 2**30

MIN_DRAWN_LEN = 16


class Lengths(NamedTuple):
    """Lengths of a step's rows.

    kind            equal, drawn or padded, as above
    num_rows, mean  rows without padding, and their mean length
    num_padding     rows of one position, of the kind padded
    """

    kind: str
    num_rows: int
    mean: int
    num_padding: int = 0

    def draw(self) -> list[int]:
        """Return the positions of each row."""
        if self.kind != "drawn":
            return [self.mean] * self.num_rows + [1] * self.num_padding
        dice = Random(f"{self.num_rows} {self.mean}")
        drawn = [dice.expovariate(1.0) for _ in range(self.num_rows)]
        scale = self.mean * self.num_rows / sum(drawn)
        return [max(MIN_DRAWN_LEN, round(scale * each)) for each in drawn]


STEPS = (
    *starmap(Lengths, product(("equal", "drawn"), (24, 64, 256), (512, 2048))),
    *(Lengths("padded", n, 1000, padding) for n, padding in ((57, 7), (130, 14), (200, 8))),
)


def measure_elementwise_tb_s() -> float:
    """Return the bandwidth of an elementwise kernel, reads and writes together, in TB/s.

    A copy is no kernel in a graph, and slower: 2.7 TB/s on an H200.
    """
    source = torch.empty(ELEMENTWISE_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    us = measure_launch_us(lambda _: torch.bitwise_not(source, out=target), 4)
    return 2 * ELEMENTWISE_BYTES / us / 1e6


def fill_tables(kv_cache: KVCache, lengths: Sequence[int]) -> None:
    """Give each row scattered blocks for its positions."""
    blocks = torch.randperm(kv_cache.max_num_blocks, dtype=torch.int32, device="cuda")
    first = 0
    for row, length in enumerate(lengths):
        count = -(-length // kv_cache.block_size)
        kv_cache.block_tables[row, :count] = blocks[first : first + count]
        first += count


def measure_layer_us(shape: KernelShape, lengths: Sequence[int]) -> float:
    """Return microseconds of a layer's attention in a step of these rows."""
    device = torch.device("cuda")
    num_rows = len(lengths)
    spec = LayerSpec(shape.heads, shape.kv_heads, HEAD_DIM, HEAD_DIM**-0.5)
    kv_cache = KVCache(
        KVCacheSpec(NUM_LAYERS, shape.kv_heads, HEAD_DIM, torch.bfloat16),
        num_blocks=sum(-(-length // BLOCK_SIZE) for length in lengths),
        block_size=BLOCK_SIZE,
        num_slots=num_rows,
        max_model_len=max(lengths),
        device=device,
    )
    kv_cache.data.normal_()
    fill_tables(kv_cache, lengths)
    attention = DecodeAttention(kv_cache, [spec] * NUM_LAYERS, pdl=True)
    cos, sin = torch.randn(2, max(lengths), HEAD_DIM, device=device)
    norm = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device=device)
    rope = QKNormRope(cos, sin, norm, norm, EPS)
    width = (shape.heads + 2 * shape.kv_heads) * HEAD_DIM
    qkv = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return measure_launch_us(
        lambda layer: attention.attend_qkv(layer, qkv, rope, slots, kv_lens), NUM_LAYERS
    )


def measure_step(shape: KernelShape, step: Lengths) -> dict[str, Any]:
    """Return the step, the time of a layer and the bandwidth that it reads keys and values at."""
    lengths = step.draw()
    us = measure_layer_us(shape, lengths)
    num_bytes = 2 * 2 * shape.kv_heads * HEAD_DIM * sum(lengths)
    return {**step._asdict(), "us": round(us, 2), "tb_s": round(num_bytes / us / 1e6, 3)}


def main() -> None:
    """Measure, print, and write the record where `--json` names a file."""
    parser = argparse.ArgumentParser("python -m forge.bench.decode_attention")
    parser.add_argument("--shapes", default="qwen3-4b,qwen3-0.6b")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        figures["elementwise_tb_s"] = round(measure_elementwise_tb_s(), 3)
        print(f"elementwise {figures['elementwise_tb_s']} TB/s", flush=True)
        for name in arguments.shapes.split(","):
            figures[name] = [measure_step(SHAPES[name], step) for step in STEPS]
            for each in figures[name]:
                print(f"{name} {each}", flush=True)
    if arguments.json:
        write_json(arguments.json, create_result("decode_attention", figures))


if __name__ == "__main__":
    main()
