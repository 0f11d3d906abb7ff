"""Peer: another engine that runs the batches of the fixed workloads.

Owns the interface, the environment of peers and the throughput of a batch cell. Knows no engine.

    BatchCell ─► prompts ─► Peer.run_batch ─► tokens a second of the fastest round
                            ├── bench/vllm_peer.py
                            └── bench/transformers_peer.py
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from forge.bench.workload import BatchCell, draw_batch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Defaults of the environment of peers. The engine of vLLM has its own process, its default."""


def set_environment() -> None:
    """Set the defaults of ENVIRONMENT where a variable is not set. Call it before an import."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class Peer(Protocol):
    """An engine that runs a batch.

    ids   range of the token ids of prompts, half-open
    """

    ids: tuple[int, int]

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once.

        Returns seconds until the end, and tokens.
        """
        ...


def measure_peer_throughput(peer: Peer, batch: BatchCell, rounds: int, seed: int) -> float:
    """Return output tokens a second of the fastest round."""
    rng = random.Random(seed)
    seconds, tokens = min(peer.run_batch(draw_batch(rng, batch, peer.ids)) for _ in range(rounds))
    return round(tokens / seconds)


def read_vocab_size(folder: str | Path) -> int:
    """Return the vocabulary size of the model in the folder."""
    return int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])
