"""Returning prefixes on vLLM with its native offloading to host memory, through its public API.

Owns vLLM's options and its proof of tiers. The requests are those of forge bench kv returning, and
so are the device's blocks, in tokens. Lines of both engines: bench/kv_record.py.

    python -m forge.bench.vllm_returning qwen3-4b > vllm.log
    python -m forge.bench.vllm_returning qwen3-4b --options '{"kv_offloading_size": 40}'

RequestOutput.num_cached_tokens counts the cached tokens of a prompt, and the counter
vllm:prompt_tokens_by_source of LLM.get_metrics those of them that came from host memory. Other
counters of hits miss a load: vLLM drops the statistics of a step without an output.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.bench.kv_record import create_figures, shared_fields, show
from forge.bench.kv_returning import Reporter, measure_pools, parse_lengths
from forge.bench.returning_prefix import (
    LENGTHS,
    NEW_TOKENS,
    REPEATS,
    ReturningRun,
    Sample,
    create_load,
)
from forge.bench.serve import parse_ints
from forge.bench.shapes import kv_bytes_per_token
from forge.bench.vllm_peer import VLLMPeer
from forge.errors import ForgeError
from forge.request import CachedTokens

BLOCK_SIZE = 16
"""vLLM's default."""

LOAD_BLOCK_SIZE = 64
"""forge's, in which the device's room is counted."""

OFFLOADING_GIB = 24
"""Host memory holds the prefixes and what a cycle computes: vLLM stores every prompt."""

SOURCES = "vllm:prompt_tokens_by_source"
LOADED = {"source": "external_kv_transfer"}
"""Counter of prompt tokens, and the label of those that were loaded."""

UNKNOWN_SOURCE = "vLLM did not count the tokens from host memory"


class VLLMTiers:
    """vLLM as a TierEngine.

    ids   range of the token ids of prompts, half-open
    """

    def __init__(self, peer: VLLMPeer) -> None:
        self._peer = peer
        self.ids = peer.ids

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once. Returns seconds and tokens."""
        return self._peer.run_batch(work)

    def measure(self, prompt: list[int]) -> Sample:
        """Run one request for one token."""
        params = self._peer.greedy_params(1)
        before = self._peer.counter(SOURCES, LOADED)
        start_s = time.perf_counter()
        (output,) = self._peer.run_outputs([prompt], [params])
        seconds = time.perf_counter() - start_s
        after = self._peer.counter(SOURCES, LOADED)
        num_cached = output.num_cached_tokens or 0
        if before is None or after is None:
            return Sample(seconds, CachedTokens(num_cached), UNKNOWN_SOURCE)
        num_external = after - before
        return Sample(seconds, CachedTokens(num_cached - num_external, num_external))


def peer_options(load_blocks: int, max_model_len: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of vLLM's LLM: the device's room in blocks of forge, and host memory."""
    return {
        "enable_prefix_caching": True,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": load_blocks * LOAD_BLOCK_SIZE // BLOCK_SIZE,
        "max_model_len": max_model_len,
        "kv_offloading_backend": "native",
        "kv_offloading_size": OFFLOADING_GIB,
        "disable_log_stats": False,  # get_metrics needs them
        **extra,
    }


def measure_vllm_returning(
    shape: str, root: str, lengths: Sequence[int], repeats: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of a record, printing each entry when it is complete."""
    fitting = parse_lengths(lengths, extra.get("max_model_len"), "lengths")
    load = create_load(fitting, repeats, LOAD_BLOCK_SIZE)
    options = peer_options(load.num_blocks, fitting[-1] + NEW_TOKENS + LOAD_BLOCK_SIZE, extra)
    print(f"options of vLLM: {options}", flush=True)
    peer = VLLMPeer(shape, root, **options)
    print(f"{Path(shape).name} on vLLM, started in {peer.start_s} s", flush=True)
    token_bytes = kv_bytes_per_token(shape)

    def extra_fields(length: int) -> dict[str, Any]:
        return {"prefix_bytes": token_bytes * length} if token_bytes else {}

    run = ReturningRun(VLLMTiers(peer), load)
    about = {"engine": "vllm", "shape": Path(shape).name}
    reporter = Reporter(run, about, shared_fields(), extra_fields, [])
    run.fill()
    measure_pools(run, reporter)
    return create_figures(reporter.entries)


def run_cli(words: Sequence[str] | None = None) -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.vllm_returning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", help="a shape such as qwen3-4b, or a checkpoint's folder")
    parser.add_argument("--lengths", type=parse_ints, default=LENGTHS, help="such as 1024,8192")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON for vLLM's LLM")
    args = parser.parse_args(words)
    try:
        with tempfile.TemporaryDirectory() as root:
            show(measure_vllm_returning(args.shape, root, args.lengths, args.repeats, args.options))
    except (ForgeError, OSError) as error:
        print(f"forge.bench.vllm_returning: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli())
