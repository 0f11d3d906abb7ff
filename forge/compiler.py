"""StructureCompiler: structures of clients, compiled in processes that end when they cost too much.

Owns those processes and their limits. Here a structure is compiled only to learn whether it can be:
a compiled one is a native object that cannot leave its process. One that was compiled within these
limits costs the same again where outputs follow it.

    this process              "forge-compiler"                      one process per compilation
    check(structure) ──pipe──► Lanes ── fork ─────────────────────► its lane's limits
    Future ◄─ reader ◄─pipe─── answer, or how the process ended ◄── forge.structure.compiled

The middle process has one thread and no sockets, so it can fork at any time. It has the vocabulary,
which its children share. It starts with the first structure, and ends with the pipe: when this
process closes it or is killed. A child that outlives it ends by its own limits.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, NoReturn, TypeAlias

import llguidance

from forge.errors import ForgeError, InvalidRequest
from forge.lanes import LANES, Lane, Lanes, Moved
from forge.request import Structure
from forge.structure import compiled, trie_of, with_deep_stack
from forge.tokenizer import Vocabulary

DEADLINE_S = 60.0
"""Of one process by the clock: one that waits uses no processor time."""

KEPT_REFUSALS = 256
"""Refused structures that are refused again without a process."""

TOO_COSTLY = "structure_too_costly"
"""Code of a refusal for what compiling takes, and not for what the structure says."""

OUT_OF_MEMORY = 3
"""Exit code of a process that ran out of memory in Python."""

ABORT_OF_MEMORY = b"memory allocation of "
"""How the line begins that Rust writes before it aborts for want of memory."""

NICENESS = 10
PATIENCE_S = 5.0
"""How long the process may take to end once its pipe is closed."""


class CompilerEnded(ForgeError):
    """The process that compiles structures has ended; the next structure starts another."""


class CompilerFull(ForgeError):
    """As many structures that take long wait to be compiled as may."""


class Drop(NamedTuple):
    """Nobody waits for this structure any more."""

    structure: Structure


Message: TypeAlias = Structure | Drop | None
"""None: end."""


class StructureCompiler:
    """Says of structures whether they can be compiled within the limits. Any thread may call it.

    vocabulary   called once, on a thread of its own, before the first structure is compiled
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], lanes: Sequence[Lane] = LANES) -> None:
        self._vocabulary = vocabulary
        self._lanes = tuple(lanes)
        self._lock = threading.Lock()
        self._waiting: dict[Structure, list[Future[Lane]]] = {}
        self._refused: OrderedDict[Structure, InvalidRequest] = OrderedDict()
        self._outgoing: SimpleQueue[Message] | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, structure: Structure) -> Future[Lane]:
        """Compile the structure, and give the lane within whose limits that was done.

        The future raises InvalidRequest, CompilerFull or CompilerEnded.

        Cancel it when nothing waits for it any more. Those who ask at the same time share one
        compilation. Returns at once.
        """
        future: Future[Lane] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(CompilerEnded("the compiler is closed. Open another"))
                return future
            refusal = self._refused.get(structure)
            if refusal is not None:
                self._refused.move_to_end(structure)
                _settle(future, refusal)
                return future
            waiting = self._waiting.setdefault(structure, [])
            waiting.append(future)
            outgoing = self._outgoing or self._started()
            if len(waiting) == 1:
                outgoing.put(structure)
        future.add_done_callback(partial(self._left, structure))
        return future

    def close(self) -> None:
        """End the process. Open futures raise CompilerEnded."""
        with self._lock:
            self._closed = True
            outgoing, thread = self._outgoing, self._thread
        if outgoing is not None and thread is not None:
            outgoing.put(None)
            thread.join(PATIENCE_S)
            process = self._process
            if thread.is_alive() and process is not None:
                process.kill()  # it reads nothing: a message to it fails now
            thread.join()

    def _started(self) -> SimpleQueue[Message]:
        outgoing = self._outgoing = SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, args=(outgoing,), name="forge-structures", daemon=True
        )
        self._thread.start()
        return outgoing

    def _left(self, structure: Structure, future: Future[Lane]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            waiting = self._waiting.get(structure, [])
            if future in waiting:
                waiting.remove(future)
                if not waiting and self._outgoing is not None:
                    del self._waiting[structure]
                    self._outgoing.put(Drop(structure))

    def _serve(self, outgoing: SimpleQueue[Message]) -> None:
        """Run one process from its start to its end."""
        failure = "it was closed"
        try:
            vocabulary = self._vocabulary()
            ours, theirs = socket.socketpair()
            pipe = Connection(os.dup(ours.fileno()))
            with ours, pipe, _spawned(theirs) as process:
                self._process = process
                reader = threading.Thread(target=self._read, args=(pipe, outgoing), daemon=True)
                with suppress(OSError):  # one that is gone reads nothing
                    pipe.send((vocabulary, self._lanes))
                    reader.start()
                    while (message := outgoing.get()) is not None:
                        pipe.send(message)
                with suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)  # closing would not wake this end's reader
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE_S)
                process.kill()
                process.wait()
                if reader.ident is not None:
                    reader.join()
            failure = f"its process ended with exit code {process.returncode}"
        except Exception as fault:  # whatever it is, those who wait must learn of it
            failure = repr(fault)
        with self._lock:
            self._outgoing = None
            left = [future for waiting in self._waiting.values() for future in waiting]
            self._waiting.clear()
        for future in left:
            ended = CompilerEnded(f"structures are not compiled: {failure}. Send it again")
            _settle(future, ended)

    def _read(self, pipe: Connection, outgoing: SimpleQueue[Message]) -> None:
        with suppress(EOFError, OSError):
            while True:
                structure, outcome, lasts = pipe.recv()
                with self._lock:
                    waiting = self._waiting.pop(structure, [])
                    if isinstance(outcome, InvalidRequest) and lasts:
                        self._refused[structure] = outcome
                        if len(self._refused) > KEPT_REFUSALS:
                            self._refused.popitem(last=False)
                for future in waiting:
                    _settle(future, outcome)
        outgoing.put(None)


def _settle(future: Future[Lane], outcome: Lane | ForgeError) -> None:
    """Set the future's result, or a copy of the exception.

    Raising an exception adds its callers' frames to its traceback. One object that is raised for
    each request would keep all their frames, and with them their prompts.
    """
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Lane):
        future.set_result(outcome)
    else:
        future.set_exception(copy(outcome))


def _spawned(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A process that runs `serve` on this end of a pair of sockets.

    Not by multiprocessing: the main module of this process may be one that cannot be imported.
    """
    with theirs:
        code = f"import sys; sys.path[:] = {sys.path!r}; from forge.compiler import serve; "
        return subprocess.Popen(
            [sys.executable, "-c", f"{code}serve({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )


# The process in the middle.


class _Running(NamedTuple):
    """A process that compiles a structure.

    answer   ends with a refusal or None, where the process comes to that
    stderr   what native code writes when it ends the process; never blocks
    """

    structure: Structure
    lane: Lane
    pid: int
    answer: Connection
    stderr: int
    deadline_s: float


def serve(descriptor: int) -> None:
    """Compile what comes over the pipe, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # who started it decides
    with Connection(descriptor) as pipe, suppress(EOFError, OSError):
        vocabulary, lanes = pipe.recv()
        tokens = trie_of(vocabulary)
        del vocabulary
        gc.freeze()  # pages that are never written stay shared with the children
        _Server(pipe, Lanes(lanes), tokens).run()


class _Server:
    """The jobs of one pipe."""

    def __init__(
        self, pipe: Connection, lanes: Lanes[Structure], tokens: llguidance.LLTokenizer
    ) -> None:
        self._pipe = pipe
        self._lanes = lanes
        self._tokens = tokens
        self._running: dict[Connection, _Running] = {}

    def run(self) -> None:
        """Serve until the pipe ends, which it says by raising EOFError or OSError."""
        try:
            while True:
                for structure, lane in self._lanes.due():
                    self._start(structure, lane)
                ready = wait([self._pipe, *self._running], self._patience_s())
                for connection in ready:
                    if connection is self._pipe:
                        self._obey(self._pipe.recv())
                    elif connection in self._running:  # it may have been dropped just now
                        self._finish(self._running[connection])
                self._kill(lambda job: job.deadline_s <= time.monotonic())
        finally:
            self._kill(lambda job: True)
            for job in self._running.values():
                os.waitpid(job.pid, 0)

    def _patience_s(self) -> float | None:
        """Seconds until the first deadline; None where nothing runs."""
        if not self._running:
            return None
        first_s = min(job.deadline_s for job in self._running.values())
        return max(0.0, first_s - time.monotonic())

    def _kill(self, due: Callable[[_Running], bool]) -> None:
        """Kill the processes that are due; their pipes end."""
        for job in self._running.values():
            if due(job):
                os.kill(job.pid, signal.SIGKILL)

    def _obey(self, message: Structure | Drop) -> None:
        if isinstance(message, Drop):
            self._lanes.remove(message.structure)
            for job in [j for j in self._running.values() if j.structure == message.structure]:
                os.kill(job.pid, signal.SIGKILL)
                self._reap(job)  # now: the structure may be the next message again
        elif not self._lanes.has(message):  # else its answer serves both
            self._lanes.add(message)

    def _start(self, structure: Structure, lane: Lane) -> None:
        answer, theirs = Pipe(duplex=False)
        stderr, written = os.pipe()
        for end in (stderr, written):  # what is too much for the pipe is lost
            os.set_blocking(end, False)
        pid = os.fork()
        if not pid:
            self._pipe.close()
            os.dup2(written, 2)
            _compile(structure, self._tokens, lane, theirs)
        theirs.close()
        os.close(written)
        deadline_s = time.monotonic() + DEADLINE_S
        self._running[answer] = _Running(structure, lane, pid, answer, stderr, deadline_s)

    def _reap(self, job: _Running) -> tuple[int, bytes]:
        """Forget a process that is ending; return its exit code, or -signal, and its last words."""
        del self._running[job.answer]
        job.answer.close()
        code = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        words = b""
        with suppress(BlockingIOError):
            words = os.read(job.stderr, 256)
        os.close(job.stderr)
        return code, words

    def _finish(self, job: _Running) -> None:
        """Tell what the process found, or what became of it."""
        structure, lane = job.structure, job.lane
        refusal, answered = None, False
        with suppress(EOFError, OSError):
            refusal, answered = job.answer.recv(), True
        code, words = self._reap(job)
        limit = None if answered else _exceeded(lane, code, words)
        if limit is None:
            self._lanes.remove(structure)
            if not answered:
                refusal = _unanswered(job, code)
            # A kill, the clock and a failed start say more of the machine than of the structure.
            lasts = code <= 0 and code != -signal.SIGKILL
            self._pipe.send((structure, refusal or lane, lasts))
            return
        problem = f"takes more than {limit} to compile"
        match self._lanes.ran_out(structure):
            case Moved.NO_LANE:
                refusal = _refusal(structure, problem, TOO_COSTLY)
                self._pipe.send((structure, refusal, True))
            case Moved.NO_ROOM:
                full = f"the {structure.kind.value} {problem}, and too many that do are waiting"
                self._pipe.send((structure, CompilerFull(full), False))


def _exceeded(lane: Lane, code: int, words: bytes) -> str | None:
    """Return the limit of the lane that ended a process; None where something else did."""
    if code == -signal.SIGPROF:
        return f"{lane.cpu_s:g} s"
    if code == OUT_OF_MEMORY or (code == -signal.SIGABRT and words.startswith(ABORT_OF_MEMORY)):
        return f"{lane.memory_mib} MiB"
    return None


def _unanswered(job: _Running, code: int) -> InvalidRequest:
    """Return the refusal where a process ended without an answer and within its limits."""
    if code == -signal.SIGKILL:
        problem = "was not compiled: the system ended its process"
        if job.deadline_s <= time.monotonic():
            problem = f"takes more than {DEADLINE_S:g} s to compile"
        return _refusal(job.structure, problem, TOO_COSTLY)
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return _unusable(job.structure, f"was not compiled: its process ended with {how}")


def _unusable(structure: Structure, problem: str) -> InvalidRequest:
    return _refusal(structure, problem, f"invalid_{structure.kind.value}")


def _refusal(structure: Structure, problem: str, code: str) -> InvalidRequest:
    kind = structure.kind.value
    return InvalidRequest("structure", f"the {kind} {problem}", "Simplify it", code)


# The process of one compilation.


def _compile(
    structure: Structure, tokens: llguidance.LLTokenizer, lane: Lane, answer: Connection
) -> NoReturn:
    """Answer with a refusal or None, and end. The kernel ends it where it costs too much."""
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, lane.cpu_s)  # of all threads; SIGPROF ends the process

    def work() -> InvalidRequest | None:
        _limit_memory(lane.memory_mib)
        try:
            compiled(structure, tokens, lane)
        except InvalidRequest as refusal:
            return refusal
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as fault:  # a panic in Rust is no Exception
            return _unusable(structure, f"could not be compiled: {type(fault).__name__}")
        return None

    found: Future[InvalidRequest | None] = Future()
    code = 1
    try:
        with_deep_stack(work, found)
        # It is set unless memory ran out at that very moment: waiting would take the deadline.
        answer.send(found.result(timeout=0))
        code = 0
    except (MemoryError, TimeoutError):
        code = OUT_OF_MEMORY
    finally:
        os._exit(code)


def _limit_memory(mib: int) -> None:
    """Let this process have so much more private memory than now.

    Linux alone says how much it has: elsewhere there is no limit. Called on the thread that
    compiles: its stack is there already.
    """
    figures = Path("/proc/self/statm")
    if figures.exists():
        most = int(figures.read_text().split()[5]) * resource.getpagesize() + mib * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
