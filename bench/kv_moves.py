"""Moves of blocks between a GPU and its host pool: gigabytes a second, against one plain copy.

Owns nothing but the measurement. The moves are those of forge.models.hf.block_moves.

    forge bench kv moves [--shapes qwen3-4b,qwen3-0.6b] [--num-blocks N] [--json FILE]

    plain_gb_s      one pinned copy of 1 GiB, in the same run: the link
    NAME_N_gb_s     a plan that moves N blocks, from `begin` until the device is done
    NAME_N_host_us  the time of `begin` and `queue` on the host, which delays the next step
    both_N_gb_s     stores and loads of N blocks each in one plan, in sum

The blocks of a plan are drawn from the whole pool, which should be as large as in serving: kernels
take other paths where a tensor has more than 2^31 numbers. Contents are compared at the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any

import torch

from forge.bench.result_file import create_result, write_json
from forge.bench.workload import print_result
from forge.errors import InvalidConfig
from forge.models.hf.block_moves import BlockMoves
from forge.models.hf.host_pool import GIB, HostPool, allocate_slabs
from forge.models.hf.kv_cache import KVCache, KVCacheSpec
from forge.seam import HostLoad, HostStore, StepPlan

NUM_MOVED = (1, 8, 32, 256)
ROUNDS = 9
BLOCK_SIZE = 64

SPECS = {
    "qwen3-0.6b": KVCacheSpec(28, 8, 128, torch.bfloat16),
    "qwen3-4b": KVCacheSpec(36, 8, 128, torch.bfloat16),
    "llama-3.1-8b": KVCacheSpec(32, 8, 128, torch.bfloat16),
}


class MoveBench:
    """Cache, host pool and moves of one shape, with random contents in the cache."""

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, num_host_blocks: int, device: torch.device
    ) -> None:
        self.cache = KVCache(
            spec,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_slots=1,
            max_model_len=BLOCK_SIZE,
            device=device,
        )
        for layer in self.cache.data:
            layer.normal_()
        self.block_bytes = self.cache.block_bytes
        self._num_host_blocks = num_host_blocks
        slabs = allocate_slabs(
            num_host_blocks * self.block_bytes,
            is_pinned=device.type == "cuda",
            block_bytes=self.block_bytes,
        )
        self._moves = BlockMoves(self.cache, HostPool(slabs, self.block_bytes))
        self._steps = count()
        self._device = device

    def run(
        self, stores: list[tuple[int, int]], loads: list[tuple[int, int]]
    ) -> tuple[float, float]:
        """Execute a plan of these moves. Return its seconds, and those on the host.

        stores, loads   pairs of block and host block
        """
        plan = StepPlan(
            next(self._steps),
            (),
            self.cache.max_num_blocks,
            BLOCK_SIZE,
            num_host_blocks=self._num_host_blocks,
            stores=tuple(HostStore(*pair) for pair in stores),
            loads=tuple(HostLoad(0, 0, *pair) for pair in loads),
        )
        synchronize(self._device)
        began_s = time.perf_counter()
        self._moves.begin(plan)
        self._moves.queue(plan)
        queued_s = time.perf_counter()
        synchronize(self._device)
        return time.perf_counter() - began_s, queued_s - began_s

    def measure(self, num_moved: int, rng: random.Random) -> dict[str, float]:
        """Return the figures of plans that move so many blocks in a direction."""
        blocks = rng.sample(range(self.cache.max_num_blocks), 2 * num_moved)
        host_blocks = rng.sample(range(self._num_host_blocks), 2 * num_moved)
        first = list(zip(blocks[:num_moved], host_blocks[:num_moved], strict=True))
        second = list(zip(blocks[num_moved:], host_blocks[num_moved:], strict=True))
        figures: dict[str, float] = {}
        for name, stores, loads in (
            ("stores", first, []),
            ("loads", [], first),
            ("both", first, second),
        ):
            if name == "both":
                self.run(second, [])  # What is loaded was stored.
            times = [self.run(stores, loads) for _ in range(ROUNDS)]
            num_bytes = (len(stores) + len(loads)) * self.block_bytes
            figures[f"{name}_{num_moved}_gb_s"] = num_bytes / median(t for t, _ in times) / 1e9
            figures[f"{name}_{num_moved}_host_us"] = median(t for _, t in times) * 1e6
        return figures

    def count_differences(self, rng: random.Random) -> int:
        """Return how many of some blocks differ after a store, and a load into other blocks."""
        num_moved = self._num_host_blocks
        blocks = rng.sample(range(self.cache.max_num_blocks), 2 * num_moved)
        sources, targets = blocks[:num_moved], blocks[num_moved:]
        host_blocks = rng.sample(range(num_moved), num_moved)
        self.run(list(zip(sources, host_blocks, strict=True)), [])
        self.run([], list(zip(targets, host_blocks, strict=True)))
        data = self.cache.data
        return sum(
            not torch.equal(data[:, source], data[:, target])
            for source, target in zip(sources, targets, strict=True)
        )


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_plain_copies(device: torch.device, num_bytes: int = GIB) -> dict[str, float]:
    """Return GB/s of one pinned copy in each direction."""
    [host] = allocate_slabs(num_bytes, is_pinned=device.type == "cuda", block_bytes=num_bytes)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    copies: dict[str, Callable[[], object]] = {
        "stores": lambda: host.copy_(on_device, non_blocking=True),
        "loads": lambda: on_device.copy_(host, non_blocking=True),
    }
    figures = {}
    for name, copy in copies.items():
        times = []
        for _ in range(ROUNDS):
            synchronize(device)
            began_s = time.perf_counter()
            copy()
            synchronize(device)
            times.append(time.perf_counter() - began_s)
        figures[name] = num_bytes / median(times) / 1e9
    return figures


@torch.inference_mode()
def measure(
    spec: KVCacheSpec, num_blocks: int, num_moved: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """Return the figures of one shape: GB/s, microseconds, and blocks that differ."""
    rng = random.Random(0)
    bench = MoveBench(spec, num_blocks, 2 * max(num_moved), device)
    for _ in range(2):
        bench.run([(0, 0)], [(1, 1)])  # Kernels are loaded on their first run.
    figures: dict[str, Any] = {"block_bytes": bench.block_bytes}
    for each in num_moved:
        figures |= bench.measure(each, rng)
    figures["different_blocks"] = bench.count_differences(rng)
    return figures


def main(shapes: Sequence[str], num_blocks: int, json_path: str | None) -> int:
    """Measure, print and write the record. Raises InvalidConfig.

    shapes       names of SPECS
    num_blocks   blocks of the device's pool
    """
    for name in shapes:
        if name not in SPECS:
            raise InvalidConfig("shapes", f"there is no shape {name!r}", f"Use {', '.join(SPECS)}")
    least = 2 * max(NUM_MOVED)
    if num_blocks < 2 * least:
        raise InvalidConfig(
            "num_blocks", f"{num_blocks} blocks are too few to move {least}", f"Give {2 * least}"
        )
    if not torch.cuda.is_available():
        raise InvalidConfig("device", "moves need a GPU", "Run this where there is one")
    device = torch.device("cuda", 0)
    plain = measure_plain_copies(device)
    figures: dict[str, Any] = {"plain_gb_s": plain}
    print(f"plain copies: stores {plain['stores']:.1f} GB/s, loads {plain['loads']:.1f}")
    for name in shapes:
        figures[name] = found = measure(SPECS[name], num_blocks, NUM_MOVED, device)
        for each in NUM_MOVED:
            stores, loads, both = (
                found[f"{kind}_{each}_gb_s"] for kind in ("stores", "loads", "both")
            )
            print(
                f"{name} {each} blocks: stores {stores:.1f} GB/s "
                f"({stores / plain['stores']:.0%} of plain), loads {loads:.1f} "
                f"({loads / plain['loads']:.0%}), both {both:.1f}, host "
                f"{found[f'both_{each}_host_us']:.0f} us",
                flush=True,
            )
        print(f"{name}: {found['different_blocks']} blocks differ after a store and a load")
    print_result({"benchmark": "kv_moves", **figures})
    if json_path is not None:
        write_json(json_path, create_result("kv_moves", figures))
    return 0
