"""Digest of all that decides what the keys and values of a block mean, besides its tokens.

Owns what the digest is made of. Knows no file of blocks: each has the digest in its header, and the
engine hashes it into every key.

    config.json, all weights, tokenizer ─┐
    dtype, shape and size of a block     ├─► 64 bytes
    decoder, versions                   ─┘

All content of the weights is hashed, in pieces and by several threads: a second or two for 16 GB
in the page cache. A sample would be faster. But two checkpoints may differ in a few rows of one
matrix, and one would then read the other's blocks: text of the wrong model, which no checksum
finds. Paths and times of files are not in the digest, so a checkpoint may be moved.

Always true: equal digests are equal models to the last bit, on any machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch
import transformers

from forge.models.hf.kv_cache import KVCacheSpec
from forge.models.hf.loading.checkpoint import RANDOM_SEED, RANDOM_STD, CheckpointSummary
from forge.models.hf.loading.checkpoint_files import weight_files

LAYOUT_VERSION = 1
"""Raise it with every change of where a block has which number, or of how it is computed."""

DIGEST_BYTES = 64
PIECE_BYTES = 16 * 2**20
NUM_HASH_THREADS = 16

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files that decide which ids a text has."""


def kv_layout_digest(
    checkpoint: CheckpointSummary,
    kv_cache_spec: KVCacheSpec,
    block_size: int,
    *,
    decoder: str,
    load_format: str,
    device: torch.device,
) -> bytes:
    """Return the digest, 64 bytes. It reads all weights.

    decoder       name of the decoder: each rounds in its own way
    load_format   dummy: the random weights are those of a seed, a generator and the config
    """
    folder = checkpoint.folder
    tokenizer_files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    weights = (
        f"random {RANDOM_SEED} {RANDOM_STD} {device.type} torch {torch.__version__}".encode()
        if load_format == "dummy"
        else digest_files(weight_files(folder))
    )
    parts = (
        f"version {LAYOUT_VERSION}, transformers {transformers.__version__}, {sys.byteorder}",
        f"{checkpoint.architecture} in {checkpoint.dtype} by {decoder}",
        f"{kv_cache_spec}, {block_size} positions a block",
        digest_files([folder / "config.json"]).hex(),
        digest_files(tokenizer_files).hex(),
        weights.hex(),
    )
    return blake2b(repr(parts).encode(), digest_size=DIGEST_BYTES).digest()


def digest_files(files: Sequence[Path]) -> bytes:
    """Return a digest of the files' names and contents, 64 bytes."""
    pieces = [
        (file, start)
        for file in files
        for start in range(0, max(1, file.stat().st_size), PIECE_BYTES)
    ]
    with ThreadPoolExecutor(NUM_HASH_THREADS) as executor:
        digests = list(executor.map(_digest_piece, pieces))
    listed = [
        (file.name, start, digest) for (file, start), digest in zip(pieces, digests, strict=True)
    ]
    return blake2b(repr(listed).encode(), digest_size=DIGEST_BYTES).digest()


def _digest_piece(piece: tuple[Path, int]) -> bytes:
    """Return the digest of PIECE_BYTES of a file, or of its rest."""
    file, start = piece
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        piece_hash = blake2b(digest_size=DIGEST_BYTES)
        end = start + PIECE_BYTES
        while start < end and (data := os.pread(fd, end - start, start)):
            piece_hash.update(data)
            start += len(data)
        return piece_hash.digest()
    finally:
        os.close(fd)
