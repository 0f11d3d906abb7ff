"""BlockFiles: contents of blocks in a folder, one file a block, that several processes may share.

Owns the folder's permissions and its byte budget. Knows no scheduler, pool or
tensor: a content is bytes under a key. Whatever is wrong with a file or the disk is a miss.

    write   reserve bytes ──► .KEY.N.tmp, locked, at its full size ──► content ──► rename to KEY
    read    open without following links ──► header ──► pieces, each verified ──► the caller

A read never waits for the folder, and a write waits for another process once: as long as that holds
the folder, later writes fail at once. A folder that is deleted and made again is opened again.

The format of a file is in file_format.py.

Always true: files and temporary files together are within the budget, also between two processes.
A temporary file without a lock is abandoned: its writer has ended.
A file of the right name is complete, or it is found out: the name appears by a rename, and without
fsync a file that a power failure has torn has a wrong checksum. Checksums detect damage and not
tampering: only the user that owns the folder can write to it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from struct import Struct
from threading import Lock

from forge.errors import InvalidConfig, one_line
from forge.failure_log import FailureLog
from forge.models.file_format import (
    HASH_BYTES,
    MAX_CONTENT_BYTES,
    encode_header,
    read_for_timing,
    verified_pieces,
)

LOG = logging.getLogger("forge.kv_files")

MAX_LATE_NAMES = 4096
"""Files read, and files to remove, that are kept until the folder is held next."""

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO under a key must not block
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of opening a file that say nothing about it."""
_LOCK = ".lock"
_LOCK_POLL_S = 0.001
_KEY_NAME = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")
_TEMPORARY_NAME = re.compile(rf"\.[0-9a-f]{{{2 * HASH_BYTES}}}\.\d+\.tmp")
_GENERATION = Struct("<Q")
"""Content of the lock file: it grows before each change of the folder."""


def try_lock(fd: int) -> bool:
    """Lock an open file against other openings, and return whether none of them holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class BlockFiles:
    """Contents of blocks in a folder. Any thread may call it.

    layout            64 bytes: digest of all that decides what a content means, besides the key. A
                      file of another layout is a miss
    max_bytes         most bytes of all files of the folder, those of other processes included
    max_lock_wait_s   most seconds to wait while another process holds the folder. Then a write
                      fails, and opening the folder raises InvalidConfig
    try_lock          takes the open lock file, and returns whether it was free
    """

    def __init__(
        self,
        folder: str | Path,
        layout: bytes,
        max_bytes: int,
        max_lock_wait_s: float = 2.0,
        try_lock: Callable[[int], bool] = try_lock,
    ) -> None:
        self.layout = layout
        self.max_bytes = max_bytes
        self._max_lock_wait_s = max_lock_wait_s
        self._try_lock = try_lock
        self._has_timed_out = False  # the last wait for the folder was in vain
        self._folder = os.fspath(folder)
        self._failures = FailureLog(
            LOG,
            f"blocks cannot be written to {self._folder}",
            "The engine computes what it does not find there, and tries again with each block",
        )
        self._lock = Lock()
        self._names_read: deque[str] = deque(maxlen=MAX_LATE_NAMES)
        self._names_to_remove: deque[str] = deque(maxlen=MAX_LATE_NAMES)
        self._dir_fd = _open_folder(self._folder)
        self._lock_fd = -1
        self._bytes_by_name: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._generation = -1
        try:
            self._lock_fd = self._open_lock()
            with self._changes():
                self._remove_abandoned()
        except TimeoutError as error:
            self.close()
            raise InvalidConfig(
                "kv_disk_path", str(error), "End that process, or name another folder"
            ) from error
        except OSError as error:
            self.close()
            raise InvalidConfig(
                "kv_disk_path",
                f"{self._folder}/{_LOCK} cannot be used as a file: {error.strerror}",
                "Remove it, or name another folder",
            ) from error

    def close(self) -> None:
        """Close the folder. A second call changes nothing."""
        for name in ("_lock_fd", "_dir_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)

    def keys(self) -> list[bytes]:
        """Return the keys of the folder's files, the least recently used first.

        Raises TimeoutError where another process holds the folder too long.
        """
        with self._exclusive():
            return [bytes.fromhex(n) for n in self._bytes_by_name if _KEY_NAME.fullmatch(n)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the folder. Raises as `keys` does."""
        with self._exclusive():
            return self._num_bytes

    def write(self, key: bytes, content: bytes | memoryview) -> bool:
        """Write the content under the key, and return whether that was done.

        Least recently used files are removed where the budget needs it. False where the content is
        larger than the budget, the disk is full or fails, or another process holds the folder.
        """
        if not 0 < len(content) < MAX_CONTENT_BYTES:
            return False
        header = encode_header(self.layout, key, content)
        name, temporary = key.hex(), ""
        try:
            reserved = self._reserve(name, len(header) + len(content))
            if reserved is None:
                return False
            fd, temporary = reserved
            try:
                _write_all(fd, header)
                _write_all(fd, content)
                with self._changes():
                    os.rename(temporary, name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
                    self._num_bytes -= self._bytes_by_name.pop(name, 0)
                    self._bytes_by_name[name] = self._bytes_by_name.pop(temporary)
            finally:
                os.close(fd)  # and unlocked: not before it has its name
        except OSError as error:
            self._failures.fail(error)
            if temporary:
                self.remove(temporary)
            return False
        self._failures.succeed()
        return True

    def read(self, key: bytes, write: Callable[[memoryview], bool]) -> bool:
        """Pass the content under the key to `write` in pieces; return whether all were passed.

        write   takes the next piece, which is overwritten afterwards. False ends the reading

        Every piece was verified. Those before a damaged one are of no use, and such a file is
        removed.
        """
        name = key.hex()
        try:
            fd = self._open(name, os.O_RDONLY)
        except OSError as error:
            if error.errno not in _NO_RESOURCES and self._is_listed(name):
                self.remove(name)  # a link, or a file that cannot be opened
            return False
        try:
            for piece in verified_pieces(fd, self._file_bytes(fd), self.layout, key):
                if not write(piece):
                    return False
            os.utime(fd)
        except OSError:
            self.remove(name)
            return False
        finally:
            os.close(fd)
        self._names_read.append(name)
        return True

    def num_bytes_read(self, key: bytes) -> int:
        """Read a file as `read` does, and return its length: 0 where it cannot be read.

        For measurements: it may have another layout, and neither it nor its age changes.
        """
        try:
            fd = self._open(key.hex(), os.O_RDONLY)
        except OSError:
            return 0
        try:
            file_bytes = self._file_bytes(fd)
            read_for_timing(fd, file_bytes)
            return file_bytes
        except OSError:
            return 0
        finally:
            os.close(fd)

    def drop_from_page_cache(self, key: bytes) -> None:
        """Write a file through to the disk, so that it is read from there next, if it can be."""
        with suppress(OSError):
            fd = self._open(key.hex(), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there: with the next change, where the folder is held now."""
        self._names_to_remove.append(name)
        if self._lock.acquire(blocking=False):
            try:
                with suppress(OSError), self._holding(0.0), self._changing():
                    pass  # a change begins with what is to be removed
            finally:
                self._lock.release()

    def _is_listed(self, name: str) -> bool:
        try:
            os.lstat(name, dir_fd=self._dir_fd)
        except OSError:
            return False
        return True

    def _file_bytes(self, fd: int) -> int:
        """Return the length of a file. Raises OSError where it is no file of this user."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "no file of this user")
        return status.st_size

    # The folder.

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | _FLAGS, 0o600, dir_fd=self._dir_fd)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the folder against other threads and processes, with its files listed.

        Raises TimeoutError, at once while the process that holds it is the one waited for before.
        """
        with self._lock, ExitStack() as stack:
            has_timed_out, self._has_timed_out = self._has_timed_out, True
            stack.enter_context(self._holding(0.0 if has_timed_out else self._max_lock_wait_s))
            self._has_timed_out = False
            yield

    @contextmanager
    def _holding(self, max_wait_s: float) -> Iterator[None]:
        """Hold the folder against other processes, with its files listed. Raises TimeoutError."""
        self._lock_folder(max_wait_s)
        try:
            data = os.pread(self._lock_fd, _GENERATION.size, 0)
            generation = int.from_bytes(data, "little")
            if generation != self._generation:
                self._list_files()
                self._generation = generation
            while self._names_read:
                name = self._names_read.popleft()
                if name in self._bytes_by_name:
                    self._bytes_by_name.move_to_end(name)
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _lock_folder(self, max_wait_s: float) -> None:
        deadline_s = time.monotonic() + max_wait_s
        while True:
            if self._try_lock(self._lock_fd):
                if os.fstat(self._lock_fd).st_nlink:
                    return
                # Something has removed the file: other processes lock the one in its place.
                lock_fd = self._open_lock()
                os.close(self._lock_fd)
                self._lock_fd, self._generation = lock_fd, -1
                continue
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"another process has held {self._folder}/{_LOCK} for more than "
                    f"{self._max_lock_wait_s} s"
                )
            time.sleep(_LOCK_POLL_S)

    def _open_lock(self) -> int:
        """Return the lock file, opened; also that of the folder in the place of a deleted one."""
        with suppress(FileNotFoundError):  # no file can be made in a deleted folder
            return self._open(_LOCK, os.O_RDWR | os.O_CREAT)
        os.stat(self._folder)  # raises FileNotFoundError: this process does not make it again
        try:
            fd = _open_folder(self._folder)
        except InvalidConfig as error:
            raise OSError(one_line(error)) from error
        os.dup2(fd, self._dir_fd, inheritable=False)  # threads that read have the number
        os.close(fd)
        return self._open(_LOCK, os.O_RDWR | os.O_CREAT)

    @contextmanager
    def _changes(self) -> Iterator[int]:
        """Hold the folder for a change, and yield its number, which no other change has."""
        with self._exclusive(), self._changing() as generation:
            yield generation

    @contextmanager
    def _changing(self) -> Iterator[int]:
        """Let other processes list the folder that is held again, also if this one dies."""
        generation, self._generation = (self._generation + 1) % 2**64, -1
        os.pwrite(self._lock_fd, _GENERATION.pack(generation), 0)
        while self._names_to_remove:
            self._unlink(self._names_to_remove.popleft())
        yield generation
        self._generation = generation  # not after an error: this process lists it again too

    def _list_files(self) -> None:
        """List keys' files and temporary ones. Others are not counted, and never removed."""
        found = []
        for name in os.listdir(self._dir_fd):
            if _KEY_NAME.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name):
                with suppress(OSError):  # removed by something else in the meantime
                    status = os.lstat(name, dir_fd=self._dir_fd)
                    if stat.S_ISDIR(status.st_mode):
                        continue  # it cannot be removed as a file, and would stop every write
                    found.append((status.st_mtime_ns, name, status.st_size))
        self._bytes_by_name = OrderedDict((name, size) for _, name, size in sorted(found))
        self._num_bytes = sum(self._bytes_by_name.values())

    def _remove_abandoned(self) -> None:
        """Remove temporary files whose writers have ended."""
        for name in filter(_TEMPORARY_NAME.fullmatch, list(self._bytes_by_name)):
            if not self._is_locked(name):
                with suppress(OSError):
                    self._unlink(name)

    def _is_locked(self, name: str) -> bool:
        """Return whether an opening of the folder, in any process, writes a temporary file."""
        try:
            fd = self._open(name, os.O_RDONLY)
        except OSError:
            return False  # a link, or no file
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def _reserve(self, name: str, num_bytes: int) -> tuple[int, str] | None:
        """Return an open temporary file of that size, and its name; None without room for it."""
        with self._changes() as generation:
            while self._num_bytes + num_bytes > self.max_bytes:
                # The newest are temporary files, so the first one is usually a key's.
                oldest = next(filter(_KEY_NAME.fullmatch, self._bytes_by_name), None)
                if oldest is None or num_bytes > self.max_bytes:
                    return None
                self._unlink(oldest)
            temporary = f".{name}.{generation}.tmp"
            fd = self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Other processes count its size from here on.
                os.ftruncate(fd, num_bytes)
            except OSError:
                os.close(fd)
                self._unlink(temporary)
                raise
            self._bytes_by_name[temporary] = num_bytes
            self._num_bytes += num_bytes
            return fd, temporary

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._dir_fd)
        self._num_bytes -= self._bytes_by_name.pop(name, 0)


def _open_folder(folder: str) -> int:
    """Return the folder opened, after making it if it is missing. Raises InvalidConfig."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidConfig(
            "kv_disk_path",
            f"{folder} cannot be opened as a folder: {error.strerror}",
            "Name another",
        ) from error
    except ValueError as error:  # a null byte, or text that no path can have
        raise InvalidConfig(
            "kv_disk_path",
            f"{folder!r} cannot be opened as a folder: {one_line(error)}",
            "Name another",
        ) from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise InvalidConfig(
            "kv_disk_path",
            f"{folder} is of another user, or open to others, and its files reveal prompts",
            "chmod 700 it, or name a folder of your own",
        )
    return fd


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
