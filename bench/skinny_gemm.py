"""Skinny GEMMs on a GPU: a layer's four GEMMs, norms and silu over all layers, against a library's.

Owns nothing but the measurement. The kernels are those of forge.models.hf.ops.skinny_gemm.

    python -m forge.bench.skinny_gemm [--shapes qwen3-4b,qwen3-0.6b] [--json FILE]

Every layer has weights of its own, together many times the L2 cache, and one CUDA graph holds the
whole chain, as in a decode step.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from forge.bench.kernels import EPS, SHAPES, KernelShape, measure_launch_us
from forge.bench.result_file import create_result, write_json
from forge.models.hf.ops.skinny_gemm import SkinnyGemm
from forge.models.hf.ops.triton_ops import TritonOps

ROWS = (3, 4, 8, 12, 16, 24, 32)


def measure_chains(shape: KernelShape) -> dict[str, dict[str, float]]:
    """Return milliseconds of the chain by rows of x, with a library's GEMMs and with ours."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    weights = [
        [torch.randn(item.n, item.k, dtype=dtype, device=device) / 40 for item in gemms]
        for gemms in [shape.layer_gemms()] * shape.layers
    ]
    norm = torch.ones(shape.hidden, dtype=dtype, device=device)
    all_ops = {
        "library": TritonOps(pdl=True),
        "skinny": TritonOps(pdl=True, skinny_gemm=SkinnyGemm(dtype, device)),
    }
    times: dict[str, dict[str, float]] = {}
    for m in ROWS:
        x = torch.randn(m, shape.hidden, dtype=dtype, device=device)

        def run(ops: TritonOps, x: torch.Tensor, _: int) -> None:
            h = ops.rms_norm(x, norm, EPS)
            for qkv, o, gate_up, down in weights:
                a = ops.linear(h, qkv)[:, : shape.heads * 128].contiguous()
                h = ops.add_rms_norm(ops.linear(a, o), x, norm, EPS)
                h = ops.add_rms_norm(ops.linear(ops.gate_up(h, gate_up), down), x, norm, EPS)

        times[str(m)] = {
            name: measure_launch_us(partial(run, ops, x), 1) / 1000 for name, ops in all_ops.items()
        }
    return times


def main() -> None:
    """Measure, print, and write the record where `--json` names a file."""
    parser = argparse.ArgumentParser("python -m forge.bench.skinny_gemm")
    parser.add_argument("--shapes", default="qwen3-4b,qwen3-0.6b,llama-3.1-8b")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    chains: dict[str, Any] = {}
    for name in arguments.shapes.split(","):
        shape = SHAPES[name]
        gigabytes = 2 * sum(item.k * item.n for item in shape.layer_gemms()) * shape.layers / 1e9
        chains[name] = measure_chains(shape)
        for rows, ms in chains[name].items():
            print(
                f"{name} {rows} rows: library {ms['library']:.3f} ms, skinny {ms['skinny']:.3f} ms,"
                f" {gigabytes / ms['skinny']:.2f} TB/s",
                flush=True,
            )
    if arguments.json:
        write_json(arguments.json, create_result("skinny_gemm", {"chain_ms": chains}))


if __name__ == "__main__":
    main()
