"""Kernel benchmarks: errors of the fused kernels on a GPU, their best tiles, and their times.

Owns the search for the table in forge.models.hf.ops.small_gemm. Knows shapes only, no model.

    python -m forge.bench.kernels [--shapes qwen3-4b,qwen3-0.6b,llama-3.1-8b] [--json FILE]

    measure_errors   every operation in bf16 against TorchOps in float64: relative error by norm
    tune             each product of a layer and the head, 1, 2 and 4 rows: time of each candidate
                     tile
    elementwise      the operations between products, for one token and for a long prompt
    chain            the four products of all layers in order: cuBLAS, and the kernels with
                     programmatic dependent launch

A time is that of one of many launches in a CUDA graph, each with different weights. Together these
are several gigabytes, many times the L2 cache, as in a decode step.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from forge.bench.result_file import create_result, write_json
from forge.models.hf.ops.reference import TorchOps
from forge.models.hf.ops.small_gemm import H200_TILES, SmallGemmTile, SmallGemmTiles
from forge.models.hf.ops.triton_ops import TritonOps

EPS = 1e-6
WEIGHT_POOL_BYTES = 4 * 2**30
MAX_LAUNCHES = 256
"""Launches in one graph. The smallest product reads 4 MB, so that even its launches read 1 GB."""

WORKERS = 15
Launch = Callable[[int], Any]
"""Queues one launch on the weights of this index."""


class Gemm(NamedTuple):
    """A product of a layer, or the head: w [n, k]."""

    name: str
    k: int
    n: int


class KernelShape(NamedTuple):
    """Sizes of a model that the kernels depend on, and the numbers of rows to measure."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    rows: tuple[int, ...]

    def layer_gemms(self) -> list[Gemm]:
        """Return the products of a layer, in order. Heads have 128 dimensions."""
        return [
            Gemm("qkv", self.hidden, (self.heads + 2 * self.kv_heads) * 128),
            Gemm("o", self.heads * 128, self.hidden),
            Gemm("gate_up", self.hidden, 2 * self.intermediate),
            Gemm("down", self.intermediate, self.hidden),
        ]

    def divide(self, ranks: int) -> KernelShape:
        """Return the sizes of one of so many ranks. Raise ValueError where they are not whole."""
        divided = (self.intermediate, self.heads, self.kv_heads, self.vocab)
        if ranks < 1 or any(size % ranks for size in divided):
            raise ValueError(f"{divided} cannot be divided by {ranks} ranks")
        intermediate, heads, kv_heads, vocab = (size // ranks for size in divided)
        return self._replace(intermediate=intermediate, heads=heads, kv_heads=kv_heads, vocab=vocab)

    def gemms(self) -> list[Gemm]:
        """Return the products of a layer, and the head."""
        return [*self.layer_gemms(), Gemm("head", self.hidden, self.vocab)]


SHAPES = {
    "qwen3-4b": KernelShape(2560, 9728, 36, 32, 8, 151936, (1, 2, 4)),
    "qwen3-0.6b": KernelShape(1024, 3072, 28, 16, 8, 151936, (1, 2, 4)),
    "llama-3.1-8b": KernelShape(4096, 14336, 32, 32, 8, 128256, (1,)),
}


def find_shape(name: str) -> KernelShape:
    """Return the shape of a name of SHAPES, or of one rank: `llama-3.1-8b/2` is one of two ranks.

    Raise ValueError for a name that is not known, or sizes that cannot be divided.
    """
    whole_name, slash, ranks = name.partition("/")
    if whole_name not in SHAPES or (slash and not ranks.isdigit()):
        raise ValueError(f"{name} is not one of {', '.join(SHAPES)}, with /2 for one of two ranks")
    return SHAPES[whole_name].divide(int(ranks) if slash else 1)


def row_tiles(m: int, k: int, n: int) -> Iterator[SmallGemmTile]:
    """Yield candidate tiles for m rows: few idle lanes, no spilled registers, a full device."""
    for outputs, warps in product((2, 4) if m == 1 or n < 4096 else (4, 8), (1, 2, 4)):
        width = 256 * warps
        num_chunks = -(-k // width)
        # Registers of a thread: pieces of w, x and the norm weight in flight; the products of one
        # row and, where there are several rows, the sums of all.
        free_registers = 200 - 8 * outputs if m == 1 else 180 - (8 + m) * outputs
        max_depth = min(num_chunks, free_registers // (4 * outputs + 8))
        idle, few = num_chunks * width > 1.3 * k, n // outputs < 256
        # Above 320 products of a piece the code exceeds the instruction cache.
        if idle or few or max_depth * outputs * width < 4096 or m * outputs * num_chunks > 320:
            continue
        half = max(min(2, max_depth), -(-max_depth // 2))
        yield from (SmallGemmTile(outputs, warps, depth) for depth in {max_depth, half})


def tile_candidates(m: int, k: int, n: int) -> list[SmallGemmTiles]:
    """Return tables of one entry each. The first is the current choice of the kernels."""
    rows = dict.fromkeys([H200_TILES.select_tile(m, k, n), *row_tiles(m, k, n)])
    return [SmallGemmTiles({(m, k, n): tile}) for tile in rows]


def run_gemm(ops: Any, name: str, x: Tensor, w: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
    """Compute the product as a decode step does.

    qkv, gate_up and head follow a norm; o and down add a residual.
    """
    out: Tensor
    if name == "gate_up":
        out = ops.gate_up_small(x, w, norm, EPS)
    elif name in ("o", "down"):
        out = ops.linear_small(x, w, residual=residual)
    else:
        out = ops.linear_small(x, w, norm_weight=norm, eps=EPS)
    return out


def _run_many(name: str, ops: Any, x: Tensor, w: Tensor) -> list[Tensor]:
    return [ops.gate_up(x, w) if name == "gate_up" else ops.linear(x, w)]


def _compile(jobs: list[tuple[str, SmallGemmTiles]]) -> None:
    """Compile each job in a worker, into the cache of Triton. A job may not fit the device."""
    torch.cuda.init()
    for name, tiles in jobs:
        [(m, k, n)] = tiles.measured
        x, w, norm, residual = (
            torch.zeros(s, dtype=torch.bfloat16, device="cuda")
            for s in ((m, k), (n, k), (k,), (m, n))
        )
        with suppress(Exception):  # the search fails again and counts it
            run_gemm(TritonOps(pdl=True, tiles=tiles), name, x, w, norm, residual)


def compile_all(jobs: list[tuple[str, SmallGemmTiles]]) -> None:
    """Compile in WORKERS processes: one alone would take minutes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        list(pool.map(_compile, [jobs[i::WORKERS] for i in range(WORKERS)]))


def measure_launch_us(launch: Launch, launches: int) -> float:
    """Return microseconds of one launch, the minimum of three replays of all launches."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return min(times[1:])


def split_weights(pool: Tensor, k: int, n: int) -> list[Tensor]:
    """Return as many w [n, k] as the pool holds, one after the other."""
    count = max(1, min(MAX_LAUNCHES, pool.numel() // (n * k)))
    return [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(count)]


def tune(pool: Tensor, item: Gemm, m: int) -> dict[str, Any]:
    """Return the fastest tile with time and rate, and the times of the current tile and cuBLAS."""
    k, n = item.k, item.n
    weight_views = split_weights(pool, k, n)
    x, norm, residual = (pool[: m * k].view(m, k), pool[:k], pool[: m * n].view(m, n).clone())
    times: list[tuple[float, SmallGemmTiles]] = []
    failed: list[str] = []
    for tiles in tile_candidates(m, k, n):
        ops = TritonOps(pdl=True, tiles=tiles)

        def at(i: int, ops: TritonOps = ops) -> None:
            run_gemm(ops, item.name, x, weight_views[i], norm, residual)

        try:
            times.append((measure_launch_us(at, len(weight_views)), tiles))
        except Exception as error:
            failed.append(f"{tiles.select_tile(m, k, n)}: {error!r}"[:100])
    best_us, best = min(times, key=lambda entry: entry[0])
    return {
        "name": item.name,
        "m": m,
        "key": (m, k, n),
        "tile": best.select_tile(m, k, n),
        "us": best_us,
        "tb_s": 2 * k * n / best_us / 1e6,
        "before_us": times[0][0],
        "cublas_us": measure_launch_us(lambda i: linear(x, weight_views[i]), len(weight_views)),
        "tried": len(times),
        "failed": failed,
    }


def measure_chain_ms(shape: KernelShape, m: int, ops: TritonOps | None) -> float:
    """Return milliseconds of the four products of all layers.

    If ops is None, cuBLAS computes them, without norms.
    """
    items = shape.layer_gemms() * shape.layers
    pool = torch.randn(sum(p.k * p.n for p in items), dtype=torch.bfloat16, device="cuda")
    parts = pool.split([p.k * p.n for p in items])
    weight_views = [part.view(p.n, p.k) for part, p in zip(parts, items, strict=True)]
    widest = max(p.n for p in items) * m
    x, residual = (torch.randn(widest, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def at(i: int) -> None:
        item = items[i]
        a = x[: m * item.k].view(m, item.k)
        if ops is None:
            linear(a, weight_views[i])
        else:
            run_gemm(
                ops,
                item.name,
                a,
                weight_views[i],
                x[: item.k],
                residual[: m * item.n].view(m, item.n),
            )

    for i in range(4):
        at(i)
    return measure_launch_us(at, len(items)) * len(items) / 1000


def _round_to_bf16(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    low = [t.bfloat16() for t in tensors]
    return low, [t.double() for t in low]


def measure_errors(shape: KernelShape, tokens: int, ops: TritonOps) -> dict[str, float]:
    """Return the relative error of every operation at this many tokens."""
    g = torch.Generator("cuda").manual_seed(tokens)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device="cuda", dtype=torch.float64)

    reference, errors = TorchOps(), {}

    def compare(name: str, tensors: list[Tensor], run: Callable[..., Any]) -> None:
        low, wide = _round_to_bf16(tensors)
        pairs = zip(run(ops, *low), run(reference, *wide), strict=True)
        errors[name] = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)

    def call_of(name: str, o: Any, *tensors: Tensor) -> list[Tensor]:
        return [run_gemm(o, name, *tensors)]

    hidden, heads, kv = shape.hidden, shape.heads, shape.kv_heads
    x, g_h = draw(tokens, hidden), draw(hidden)
    compare("rms_norm", [x, g_h], lambda o, a, w: [o.rms_norm(a, w, EPS)])
    compare("add_norm", [x, draw(tokens, hidden), g_h],
            lambda o, a, r, w: [o.add_rms_norm(a, r, w, EPS), r])  # fmt: skip
    for item in shape.layer_gemms():
        if item.name in ("o", "gate_up"):
            w = draw(item.n, item.k) / 16
            compare(
                f"{item.name} of many", [draw(tokens, item.k), w], partial(_run_many, item.name)
            )
    angles = torch.rand(4096, 128, generator=g, device="cuda") * 6
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32) % 4096

    def rope(o: Any, qkv: Tensor, pool: Tensor, q: Tensor, k: Tensor) -> list[Tensor]:
        out = o.rope_write(
            qkv, angles.cos(), angles.sin(), positions, positions, pool[:, 0], pool[:, 1],
            q, k, EPS, heads, kv,
        )  # fmt: skip
        return [*out, pool]

    pool = torch.zeros(tokens // 16 + 1, 2, 16, kv, 128, device="cuda")
    compare("rope_write", [draw(tokens, (heads + 2 * kv) * 128), pool, draw(128), draw(128)], rope)
    if tokens <= ops.max_small_rows:
        for item in shape.layer_gemms():
            w, residual = draw(item.n, item.k) / 16, draw(tokens, item.n)
            run = partial(call_of, item.name)
            compare(item.name, [draw(tokens, item.k), w, draw(item.k), residual], run)
    return errors


def measure_elementwise_us(shape: KernelShape, tokens: int, ops: TritonOps) -> dict[str, float]:
    """Return microseconds of every other operation, with operands in the cache."""
    heads, kv = shape.heads, shape.kv_heads
    x, residual, qkv = (
        torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        for width in (shape.hidden, shape.hidden, (heads + 2 * kv) * 128)
    )
    norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")
    pages = torch.zeros(tokens // 16 + 1, 2, 16, kv, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.rand(tokens, 128, device="cuda")
    slots = torch.arange(tokens, device="cuda", dtype=torch.int32)
    keys, values, head = pages[:, 0], pages[:, 1], norm[:128]

    def rope(_: int) -> None:
        ops.rope_and_cache(
            *(qkv, table, table, slots, slots, keys, values, head, head, EPS, heads, kv)
        )

    return {
        "rms_norm": measure_launch_us(lambda _: ops.rms_norm(x, norm, EPS), 32),
        "add_norm": measure_launch_us(lambda _: ops.add_rms_norm(x, residual, norm, EPS), 32),
        "rope_write": measure_launch_us(rope, 32),
    }


def _tune_all(shapes: dict[str, KernelShape]) -> list[dict[str, Any]]:
    """Return the best tile of every product, and print them as entries of H200_TILES."""
    pool = torch.empty(WEIGHT_POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    found = []
    print("H200_TILES = SmallGemmTiles({  # us, TB/s; current tile, cuBLAS (us); tried, failed")
    for name, shape in shapes.items():
        for m, item in product(shape.rows, shape.gemms()):
            best = {"shape": name, **tune(pool, item, m)}
            print(
                f"    {best['key']}: SmallGemmTile{tuple(best['tile'])},  # {name} {item.name}"
                f" {best['us']:.1f} {best['tb_s']:.2f}; {best['before_us']:.1f}"
                f" {best['cublas_us']:.1f}; {best['tried']} {len(best['failed'])}",
                flush=True,
            )
            found.append(best)
    print("})")
    failed = [text for best in found for text in best["failed"]]
    print(f"{len(failed)} tiles failed", *failed[:1])
    return found


def _measure_all_errors(shapes: dict[str, KernelShape]) -> dict[str, dict[str, float]]:
    """Return and print errors by shape and tokens.

    Raises AssertionError above what bf16 explains.
    """
    errors = {}
    for name, shape in shapes.items():
        for tokens in (*shape.rows, 2048):
            errors[f"{name} {tokens}"] = found = measure_errors(shape, tokens, TritonOps(pdl=True))
            print(f"{name} T={tokens}:", *(f"{key} {value:.1e}" for key, value in found.items()))
            assert max(found.values()) < 1e-2, f"{name}: kernels and float64 differ: {found}"
    return errors


def _measure_chains(
    shapes: dict[str, KernelShape], tiles: SmallGemmTiles
) -> dict[str, dict[str, float]]:
    """Return and print milliseconds of cuBLAS and of the kernels, by shape and rows."""
    chains = {}
    ops = TritonOps(pdl=True, tiles=tiles)
    for name, shape in shapes.items():
        gigabytes = 2 * sum(p.k * p.n for p in shape.layer_gemms()) * shape.layers / 1e9
        for m in shape.rows:
            ms = {
                "cublas": measure_chain_ms(shape, m, None),
                "kernels": measure_chain_ms(shape, m, ops),
            }
            chains[f"{name} {m}"] = ms
            print(
                f"{name} {m} rows: cuBLAS {ms['cublas']:.3f} ms, kernels {ms['kernels']:.3f} ms,"
                f" {gigabytes / ms['kernels']:.2f} TB/s",
                flush=True,
            )
    return chains


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m forge.bench.kernels")
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="NAME/2 is one of two ranks of a model"
    )
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    """Check, tune, measure chains and print. Writes the record where `--json` names a file."""
    arguments = _parse_arguments()
    shapes = {name: find_shape(name) for name in arguments.shapes.split(",")}
    jobs = [
        (item.name, tiles)
        for shape in shapes.values()
        for m, item in product(shape.rows, shape.gemms())
        for tiles in tile_candidates(m, item.k, item.n)
    ]
    print(f"{len(jobs)} kernels to compile", flush=True)
    compile_all(jobs)
    errors = _measure_all_errors(shapes)
    best = _tune_all(shapes)
    elementwise = {}
    for (name, shape), tokens in product(shapes.items(), (1, 2048)):
        elementwise[f"{name} {tokens}"] = us = measure_elementwise_us(
            shape, tokens, TritonOps(pdl=True)
        )
        print(f"{name} T={tokens}, us:", *(f"{key} {value:.1f}" for key, value in us.items()))
    chains = _measure_chains(shapes, SmallGemmTiles({b["key"]: b["tile"] for b in best}))
    if arguments.json:
        serializable = [{**b, "key": list(b["key"]), "tile": list(b["tile"])} for b in best]
        figures = {
            "errors": errors,
            "best": serializable,
            "glue_us": elementwise,
            "chain_ms": chains,
        }
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_json(arguments.json, create_result("kernels", {**device, **figures}))


if __name__ == "__main__":
    main()
