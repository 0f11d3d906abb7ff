"""A fleet on Ray on this machine: prefixes found by router, and what Ray adds to a request.

Owns the figures of `python -m forge.bench.fleet`. The model is `hash`, which computes nothing, so
hits do not depend on the machine, and a latency is that of the processes in between. Needs Ray.

    shared prefixes   groups of prompts that begin alike, in random order, on 4 replicas whose
                      caches hold a part of the groups, or all of them
    overhead          the same stream of tokens from `forge serve` and through Ray
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from forge.bench.result_file import create_result, write_json

RAY_PORT, SERVER_PORT = 8131, 8132
GROUPS = 24
REQUESTS_OF_GROUP = 12
PREFIX_TOKENS, SUFFIX_TOKENS = 2048, 64
CACHE_BLOCKS = {"a third": 1000, "all": 4000}
"""Blocks of a replica, by the share of the groups that fits: each takes 132 of 16 tokens."""
NUM_REPLICAS = 4
CONCURRENCY = 8
ROUTERS = ("round-robin", "least-loaded", "prefix-aware", "session-or-prefix")
STREAM_TOKENS = 32
STEP_MS = 5
NUM_STREAMS = 200
START_TIMEOUT_S = 300


def create_prompts(seed: int) -> list[str]:
    """Return the prompts of all groups in random order. A token is a byte."""
    rng = random.Random(seed)

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    prefixes = [text(PREFIX_TOKENS) for _ in range(GROUPS)]
    prompts = [prefix + text(SUFFIX_TOKENS) for prefix in prefixes * REQUESTS_OF_GROUP]
    rng.shuffle(prompts)
    return prompts


@contextmanager
def open_cluster() -> Iterator[None]:
    """Run Ray and its proxy on this machine in the block."""
    import ray
    from ray import serve

    ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": RAY_PORT})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def serve_fleet(**options: Any) -> Iterator[str]:
    """Serve a fleet in the block, and yield its address. Caches are empty."""
    from ray import serve

    from forge.ray.application import app

    serve.run(app({"served_model_name": "hash", "replica_cpus": 0.1, **options}))
    try:
        yield f"http://127.0.0.1:{RAY_PORT}"
    finally:
        serve.delete("default")


@contextmanager
def serve_directly(model: str) -> Iterator[str]:
    """Run `forge serve` in the block, and yield its address."""
    command = [sys.executable, "-m", "forge", "serve", model, "--port", str(SERVER_PORT)]
    process = subprocess.Popen(
        [*command, "--served-model-name", "hash"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{SERVER_PORT}"
    deadline_s = time.monotonic() + START_TIMEOUT_S
    try:
        while not _is_ready(url):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise RuntimeError("forge serve did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


async def find_prefixes(url: str, prompts: Sequence[str]) -> dict[str, Any]:
    """Return the share of the prompts' tokens that was cached, with `CONCURRENCY` at a time."""
    waiting = list(reversed(prompts))
    num_cached = num_tokens = 0

    async def send_some(client: httpx.AsyncClient) -> None:
        nonlocal num_cached, num_tokens
        while waiting:
            body = {"model": "hash", "prompt": waiting.pop(), "max_tokens": 4, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            usage = response.raise_for_status().json()["usage"]
            num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            num_tokens += usage["prompt_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(send_some(client) for _ in range(CONCURRENCY)))
    return {"hit_rate": num_cached / num_tokens, "prompt_tokens": num_tokens}


async def time_streams(url: str, concurrency: int) -> dict[str, float]:
    """Return milliseconds to the first token and to the end of a stream: percentiles 50 and 99."""
    first_ms: list[float] = []
    last_ms: list[float] = []
    numbers = iter(range(NUM_STREAMS))

    async def send_some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            body = {
                "model": "hash",
                "prompt": f"stream {number}",
                "max_tokens": STREAM_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            start_s = time.perf_counter()
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.raise_for_status().aiter_lines()
                await anext(lines)
                first_ms.append(1000 * (time.perf_counter() - start_s))
                async for _ in lines:
                    pass
            last_ms.append(1000 * (time.perf_counter() - start_s))

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await client.get("/v1/models")
        await asyncio.gather(*(send_some(client) for _ in range(concurrency)))
    return {
        f"{name}_p{percent}": sorted(times)[min(len(times) - 1, len(times) * percent // 100)]
        for name, times in (("ttft_ms", first_ms), ("latency_ms", last_ms))
        for percent in (50, 99)
    }


def measure_routers(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the hit rate of each router, cache size and seed."""
    figures = []
    for share, num_blocks in CACHE_BLOCKS.items():
        for router in ROUTERS:
            for seed in seeds:
                with serve_fleet(
                    model="hash", replicas=NUM_REPLICAS, router=router, num_blocks=num_blocks
                ) as url:
                    found = asyncio.run(find_prefixes(url, create_prompts(seed)))
                figures.append({"groups_that_fit": share, "router": router, "seed": seed, **found})
                print(f"{share:<9}{router:<19}{seed:>3}{found['hit_rate']:>8.1%}", flush=True)
    return figures


def measure_overhead() -> list[dict[str, Any]]:
    """Return latencies of streams from one engine, directly and through Ray."""
    figures = []
    model = f"hash:step_ms={STEP_MS}"
    for name in ("forge serve", "Ray"):
        opened = serve_directly(model) if name == "forge serve" else serve_fleet(model=model)
        with opened as url:
            for concurrency in (1, 8):
                found = asyncio.run(time_streams(url, concurrency))
                figures.append({"through": name, "streams": concurrency, **found})
                text = "".join(f"{key:>17} {value:7.1f}" for key, value in found.items())
                print(f"{name:<12}{concurrency:>3}{text}", flush=True)
    return figures


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m forge.bench.fleet", description=__doc__)
    parser.add_argument("--seeds", default="0", help="seeds of the prompts")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(words)
    with open_cluster():
        figures = {
            "overhead": measure_overhead(),
            "routers": measure_routers([int(each) for each in args.seeds.split(",")]),
        }
    if args.json is not None:
        write_json(args.json, create_result("fleet", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
