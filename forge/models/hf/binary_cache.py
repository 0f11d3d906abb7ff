"""Files of earlier starts, such as compiled kernels: a start need not make them again.

Owns the folders and the form of their files. Knows no compiler and no decoder.

    key: all that the content depends on              SHA-256 ──► name of the file
    file                                              SHA-256 of the content, then the content

Always true: a file that is not whole is never used, and no file of a folder that another user owns
or that everyone can write to: its code would run in this process. A folder that cannot be used
costs a compilation and nothing else. A file appears under its name only when all of it is written.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

FORM = b"forge binary 1"
"""Part of every key. Another form of files has another number."""

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder(kind: str = "kernels") -> Path | None:
    """Return the folder for files of a kind in the user's cache folder, or None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "forge" / kind
    except RuntimeError:
        return None


def load_or_build(folder: Path | None, key: Sequence[bytes], build: Callable[[], bytes]) -> bytes:
    """Return the binary of this key from the folder, or build it and write it there.

    key   everything that the binary depends on
    """
    if folder is None or not is_usable(folder):
        return build()
    binary = read_entry(folder, key)
    if binary is None:
        binary = build()
        write_entry(folder, key, binary)
    return binary


def read_entry(folder: Path, key: Sequence[bytes]) -> bytes | None:
    """Return the content of this key, or None. The folder must be usable."""
    return _read_binary(folder / _hash_key(key))


def write_entry(folder: Path, key: Sequence[bytes], content: bytes) -> None:
    """Write the content of this key. Do nothing where it cannot be written."""
    with suppress(OSError):
        _write_binary(folder / _hash_key(key), content)


def remove_oldest(folder: Path, num_kept: int) -> None:
    """Remove all files of the folder but those that were written last."""
    with suppress(OSError):
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files[num_kept:]:
            path.unlink(missing_ok=True)


def is_usable(folder: Path) -> bool:
    """Create the folder where there is none. Return whether only this user and a group can write.

    Kubernetes lets the group of a pod write to its volumes (fsGroup).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH


def is_writable(folder: Path) -> bool:
    """Return whether a file can be made in the folder. Permissions do not say it of a volume."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _hash_key(key: Sequence[bytes]) -> str:
    """Return the name of the key's file. Lengths separate the parts."""
    digest = hashlib.sha256()
    for part in (FORM, *key):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _read_binary(path: Path) -> bytes | None:
    """Return the binary in the file, or None where there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return binary if binary and hashlib.sha256(binary).digest() == digest else None


def _write_binary(path: Path, binary: bytes) -> None:
    """Write the file under another name, then give it its own: readers see all of it or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(binary).digest() + binary)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
