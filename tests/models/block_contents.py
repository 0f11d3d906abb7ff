"""Keys and contents of files for tests of BlockFiles: a number gives both, in any process."""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from forge.models.file_moves import FileStore


def key_of(number: int) -> bytes:
    """Return a key: 64 bytes."""
    return blake2b(str(number).encode()).digest()


def content_of(number: int, size: int = 1000) -> bytes:
    """Return the content that belongs to a key of `key_of`."""
    return Random(number).randbytes(size)


def read_content(files: FileStore, key: bytes) -> bytes | None:
    """Return the content under a key as a whole, or None where a piece of it is missing."""
    content = bytearray()

    def write(piece: memoryview) -> bool:
        content.extend(piece)
        return True

    return bytes(content) if files.read(key, write) else None


LAYOUT, OTHER_LAYOUT = key_of(-1), key_of(-2)

KILLED_BYTES, NUM_KILLED_KEYS = 12_000_000, 3
"""Bytes of each content, and number of keys, that a process writes until it is killed."""
