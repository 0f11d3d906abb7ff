"""Context of a rank: what it receives at its start. Its number, its pipes, and where ranks meet.

Owns no process. Contexts are made by the process that starts the ranks, and sent to each once.

    LeaderContext     rank 0        writes the ring
    FollowerContext   other ranks   read it, and report when they are ready

The store is the file of a torch FileStore, in memory without a name: it is on no network, no other
user can open it, and nothing is left of it when the processes have ended.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import NamedTuple

from forge.errors import InvalidConfig
from forge.ranks.step_ring import RingMemory, RingReader, RingWriter, select_spin_s


class LeaderContext(NamedTuple):
    """Context of rank 0.

    store_path   file by which a torch FileStore of all ranks is opened
    lifeline     pipe whose other end only the starting process has; None: this is that process
    """

    world_size: int
    store_path: str
    memory: RingMemory
    notices: tuple[Connection, ...]
    acks: tuple[Connection, ...]
    lifeline: Connection | None = None

    @property
    def rank(self) -> int:
        """Return 0: the number of this rank."""
        return 0

    def open_writer(self) -> RingWriter:
        """Return the writing end of the ring. Call it once."""
        return RingWriter(self.memory, self.notices, self.acks)


class FollowerContext(NamedTuple):
    """Context of a rank other than 0.

    store_path   file by which a torch FileStore of all ranks is opened
    reports      pipe to the starting process; see rank_process
    lifeline     pipe whose other end only the starting process has
    """

    rank: int
    world_size: int
    store_path: str
    memory: RingMemory
    notices: Connection
    acks: Connection
    reports: Connection
    lifeline: Connection

    def open_reader(self) -> RingReader:
        """Return the reading end of the ring. Call it once."""
        spin_s = select_spin_s(self.world_size, len(os.sched_getaffinity(0)))
        return RingReader(self.memory, self.notices, self.acks, spin_s)


RankContext = LeaderContext | FollowerContext


def create_memory_file(name: str, num_bytes: int) -> int:
    """Create a file in memory without a name in any folder, and return its descriptor.

    Other processes of this user open it by `memory_file_path`. Raises InvalidConfig on a system
    without such files.
    """
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        raise InvalidConfig(
            "tensor_parallel_size",
            "ranks share memory files of Linux, which this system does not have",
            "Leave it out, or run on Linux",
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.truncate(fd, num_bytes)
    return fd


def memory_file_path(fd: int) -> str:
    """Return the path by which other processes open a memory file of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"
