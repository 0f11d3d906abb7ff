"""File format: the content of a block in a file, and reading it back in pieces that are verified.

Owns header and checksums. Knows no folder and no pool: a file is open, and pieces are bytes.

    file    | magic, version, length of pieces and content | layout | key |
            | crc32 of each piece | crc32 of all before | content |

    read    header ─► file ─► one buffer ─► crc32 ─► what the caller does with the piece ─┐
                         ▲                                                                │
                         └──────────────────────── the next piece ────────────────────────┘

A piece is in the cache of its core from the read to the caller's copy. Reads, checksums and copies
of pieces run without Python's lock, so as many files are read at a time as there are cores.

Always true: a piece is passed on only if its checksum is right, and only after the whole header is.
The length of a file gives that of its header, so no more is read than a file of that length has.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from struct import Struct
from zlib import crc32

MAGIC, FORMAT_VERSION = b"forge-kv", 1
HASH_BYTES = 64
PIECE_BYTES = 2**20
MAX_CONTENT_BYTES = 2**32

_FIXED = Struct(f"<8sIIQ{HASH_BYTES}s{HASH_BYTES}s")
"""Magic, version, bytes of a piece, bytes of the content, layout, key."""
_CRC = Struct("<I")


def _num_pieces(content_bytes: int) -> int:
    return -(-content_bytes // PIECE_BYTES)


def header_bytes(content_bytes: int) -> int:
    """Return the length of the header of a file with so many bytes of content."""
    return _FIXED.size + _CRC.size * (_num_pieces(content_bytes) + 1)


def encode_header(layout: bytes, key: bytes, content: bytes | memoryview) -> bytes:
    """Return the header of a file."""
    view = memoryview(content)
    pieces = (view[i : i + PIECE_BYTES] for i in range(0, len(content), PIECE_BYTES))
    header = _fixed_part(layout, key, len(content))
    header += b"".join(_CRC.pack(crc32(piece)) for piece in pieces)
    return header + _CRC.pack(crc32(header))


def _fixed_part(layout: bytes, key: bytes, content_bytes: int) -> bytes:
    assert len(layout) == len(key) == HASH_BYTES, "hashes have 64 bytes"
    return _FIXED.pack(MAGIC, FORMAT_VERSION, PIECE_BYTES, content_bytes, layout, key)


def verified_pieces(fd: int, file_bytes: int, layout: bytes, key: bytes) -> Iterator[memoryview]:
    """Yield the content of a file in pieces, each of which is overwritten by the next.

    Raises OSError at what is not as it was written: pieces before that were right.
    """
    # A piece takes its own bytes and its checksum, and the last one may be shorter.
    num_pieces = -(-(file_bytes - _FIXED.size - _CRC.size) // (PIECE_BYTES + _CRC.size))
    header_end = _FIXED.size + _CRC.size * (num_pieces + 1)
    content_bytes = file_bytes - header_end
    # Before anything is read: a damaged file may be of any length.
    if not 0 < content_bytes < MAX_CONTENT_BYTES:
        raise _damage(f"{file_bytes} bytes are the length of no file")
    header = os.pread(fd, header_end, 0)
    if header[: _FIXED.size] != _fixed_part(layout, key, content_bytes):
        raise _damage("the file has another format, layout, key or length")
    if header[-_CRC.size :] != _CRC.pack(crc32(header[: -_CRC.size])):
        raise _damage("the checksum of the header is wrong")
    sums = _CRC.iter_unpack(header[_FIXED.size : -_CRC.size])
    for piece, (expected,) in zip(_pieces(fd, header_end, file_bytes), sums, strict=True):
        if crc32(piece) != expected:
            raise _damage("the checksum of a piece is wrong")
        yield piece


def read_for_timing(fd: int, file_bytes: int) -> None:
    """Read and sum a file as `verified_pieces` does, whatever is in it. Raises OSError."""
    if file_bytes >= MAX_CONTENT_BYTES:
        raise _damage(f"{file_bytes} bytes are the length of no file")
    for piece in _pieces(fd, 0, file_bytes):
        crc32(piece)


def _pieces(fd: int, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from `start` to `end` in one buffer that is read into again and again."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, end - start)))
    while start < end:
        piece = buffer[: end - start]
        num_read = 0
        while num_read < len(piece):
            count = os.preadv(fd, [piece[num_read:]], start + num_read)
            if not count:
                raise _damage("the file has become shorter")
            num_read += count
        yield piece
        start += len(piece)


def _damage(what: str) -> OSError:
    return OSError(errno.EBADMSG, what)
