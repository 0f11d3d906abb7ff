"""torchrun: ranks whose processes an outer launcher has started, one for each rank on this host.

Owns how these processes find each other, and how rank 0 watches one that is not its child. What a
rank runs and its context are those of ranks that rank 0 starts itself.

    torchrun ─┬─ rank 0   listens on a Unix socket ◄── connects ─┐
              └─ rank 1   ───────────────────────────────────────┘
                          ◄── context, its pipes, what it runs ── then as in rank_process.py

The socket's name is that of torchrun's run, and in no folder. Both ends refuse a process of another
user. Nothing here uses a network, torchrun's own store included.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from forge.errors import EngineDead, InvalidConfig
from forge.ranks.rank_context import FollowerContext
from forge.ranks.rank_process import RunRank, run_rank_process

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
"""Variables that torchrun sets in every process that it starts. Other launchers lack the fourth."""

CONNECT_TIMEOUT_S = 300.0
"""Seconds that ranks wait for each other: one may read its packages from a slow disk."""

POLL_S = 0.05

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a Unix socket."""

_LENGTH = struct.Struct("<I")
_NUM_PIPES = 4


class TorchrunRank(NamedTuple):
    """Number of this process among those that torchrun has started.

    address   name of the Unix socket at which they meet
    """

    rank: int
    world_size: int
    address: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TorchrunRank | None:
        """Return the rank of this process, or None where torchrun has started one process or none.

        Raise InvalidConfig where the processes are on several hosts.
        """
        if any(name not in environment for name in VARIABLES):
            return None
        rank, world_size, local_world_size = (int(environment[name]) for name in VARIABLES[:3])
        if world_size == 1:
            return None
        if local_world_size != world_size:
            raise InvalidConfig(
                "tensor_parallel_size",
                f"torchrun has started {local_world_size} of {world_size} ranks on this host, and "
                "ranks share its memory",
                "Start all of them on one host, with --nnodes 1",
            )
        run = [environment.get(name, "") for name in (*VARIABLES[3:], "TORCHELASTIC_RESTART_COUNT")]
        return cls(rank, world_size, "\0forge-ranks-" + "-".join([str(os.getuid()), *run]))

    def check_world_size(self, num_ranks: int) -> None:
        """Raise InvalidConfig unless torchrun has started a process for each of `num_ranks`."""
        if num_ranks != self.world_size:
            raise InvalidConfig(
                "tensor_parallel_size",
                f"torchrun has started {self.world_size} processes for {num_ranks} ranks",
                f"Give --tensor-parallel-size {self.world_size}, or --nproc-per-node {num_ranks}",
            )


class SiblingProcess:
    """Process of this user that is not a child, with the methods of multiprocessing's."""

    exitcode = None
    """Unknown: the system reports it to the parent alone."""

    is_child = False

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return not self._has_ended(0.0)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, or for so many seconds."""
        self._has_ended(timeout)

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def close(self) -> None:
        """Close the sentinel: nothing more is called."""
        os.close(self.sentinel)

    def _has_ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))


class SiblingRanks:
    """Rank 0's connections to the other ranks, which wait for their contexts."""

    def __init__(self, torchrun: TorchrunRank) -> None:
        """Wait until all have connected. Raise EngineDead where one does not in time."""
        self._sockets: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(torchrun.address)
            listener.listen(torchrun.world_size)
            deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
            while len(self._sockets) < torchrun.world_size - 1:
                try:
                    rank, connected = _accept_rank(listener, deadline_s)
                except TimeoutError:
                    raise EngineDead(
                        f"{torchrun.world_size - 1 - len(self._sockets)} processes of torchrun did "
                        f"not begin within {CONNECT_TIMEOUT_S:g} s. See their output"
                    ) from None
                if rank in self._sockets or not 0 < rank < torchrun.world_size:
                    raise EngineDead(
                        f"a process of torchrun has rank {rank}, which does not exist or "
                        "which another process has. See --nproc-per-node"
                    )
                self._sockets[rank] = connected

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in self._sockets.values():
            each.close()

    def start(
        self, rank_context: FollowerContext, run_rank: RunRank, args: tuple[Any, ...]
    ) -> SiblingProcess:
        """Let a rank run with this context. Its ends of the pipes may be closed here after that."""
        connected = self._sockets[rank_context.rank]
        process = SiblingProcess(_credentials(connected)[0])
        *fields, notices, acks, reports, lifeline = rank_context
        content = pickle.dumps((fields, run_rank, args))
        pipes = [each.fileno() for each in (notices, acks, reports, lifeline)]
        socket.send_fds(connected, [_LENGTH.pack(len(content))], pipes)
        connected.sendall(content)
        return process


def follow_sibling(torchrun: TorchrunRank) -> NoReturn:
    """Run this process's rank: take its context from rank 0, and end when the ring ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        _connect(connected, torchrun.address)
        if not _is_own(connected):
            raise EngineDead("a process of another user listens at the address of rank 0")
        connected.sendall(_LENGTH.pack(torchrun.rank))
        length, pipes, *_ = socket.recv_fds(connected, _LENGTH.size, _NUM_PIPES)
        for pipe in pipes:
            os.set_inheritable(pipe, False)
        if len(pipes) != _NUM_PIPES:
            raise EngineDead("rank 0 has ended before the other ranks began. See its output")
        # Rank 0 is a process of the same user: what it sends is as trusted as what it starts.
        fields, run_rank, args = pickle.loads(_receive(connected, *_LENGTH.unpack(length)))
    rank, world_size, store_path, memory = fields
    notices, acks, reports, lifeline = pipes
    rank_context = FollowerContext(
        *(rank, world_size, store_path, memory),
        Connection(notices, writable=False),
        Connection(acks, readable=False),
        Connection(reports, readable=False),
        Connection(lifeline, writable=False),
    )
    run_rank_process(rank_context, run_rank, args)
    raise AssertionError("the process has ended")


def _connect(connected: socket.socket, address: str) -> None:
    """Connect to rank 0, which may not listen yet. Raise EngineDead where it does not in time."""
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return connected.connect(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise EngineDead(
                    f"rank 0 did not begin within {CONNECT_TIMEOUT_S:g} s. See its output"
                ) from None
            time.sleep(POLL_S)


def _credentials(connected: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the other end."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(raw)
    return pid, user, group


def _is_own(connected: socket.socket) -> bool:
    """Return whether the other end is a process of this user: any user may use the address."""
    return _credentials(connected)[1] == os.getuid()


def _accept_rank(listener: socket.socket, deadline_s: float) -> tuple[int, socket.socket]:
    """Return the next rank that connects, and its socket. Raise TimeoutError after the deadline.

    Processes of other users are left out, since one of them could end every start.
    """
    while True:
        listener.settimeout(_remaining_s(deadline_s))
        connected, _ = listener.accept()
        if _is_own(connected):
            break
        connected.close()
    connected.settimeout(_remaining_s(deadline_s))
    (rank,) = _LENGTH.unpack(_receive(connected, _LENGTH.size))
    connected.settimeout(None)
    return rank, connected


def _remaining_s(deadline_s: float) -> float:
    """Return the seconds until the deadline; a little where it is over, since 0 never waits."""
    return max(0.001, deadline_s - time.monotonic())


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes. Raise EngineDead where the other end closes before."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connected.recv(num_bytes - len(parts))
        if not part:
            raise EngineDead("a rank has ended before all began. See its output")
        parts += part
    return bytes(parts)
