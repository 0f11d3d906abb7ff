"""GrammarSandbox: compiles the structures of clients in processes with limits on time and memory.

Owns those processes and their limits. Knows no engine. A compiled structure is a native object that
cannot leave its process. So the sandbox only reports whether a structure compiles within the
limits; the engine's process then compiles it again, at the same cost.

    this process              "forge-compiler"                   one process per compilation
    check(structure) ──pipe──► FeedbackQueue ── fork ──────────► limits of its level
    Future ◄─ reader ◄─pipe─── error, or how the process ended ◄─ structured_output.compile_grammar

The middle process has one thread and no sockets, so it can fork at any time. It has the vocabulary,
which its children share. It starts with the first structure. It ends with the pipe: when this
process closes the pipe or is killed. A child that outlives it ends by its own limits.

Always true: every future gets a result or an error, also when the process dies.
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
from forge.feedback_queue import COMPILE_LEVELS, Demotion, FeedbackQueue, QueueLevel
from forge.request import Structure
from forge.structured_output import (
    build_token_trie,
    compile_grammar,
    digest_structure,
    run_with_deep_stack,
)
from forge.tokenizer import Vocabulary

MAX_WALL_S = 60.0
"""Seconds of one compilation by the clock: a process that waits uses no processor time."""

MAX_CACHED_ERRORS = 256
"""Errors of structures that are kept, so that the same structure needs no process again."""

TOO_COSTLY_CODE = "structure_too_costly"
"""Error code of a structure that takes too long or too much memory to compile."""

OUT_OF_MEMORY_EXIT_CODE = 3
"""Exit code of a process that got a MemoryError in Python."""

RUST_OOM_PREFIX = b"memory allocation of "
"""First words of the line that Rust writes to standard error before it aborts without memory."""

MAX_STDERR_BYTES = 256
"""Bytes kept of what a process writes to standard error."""

NICENESS = 10
STOP_TIMEOUT_S = 5.0
"""Seconds that the process may take to end once its pipe is closed."""


class SandboxDied(ForgeError):
    """The process that compiles structures has ended; the next structure starts another."""


class SandboxFull(ForgeError):
    """The queue of structures that take long to compile is full."""


class Cancel(NamedTuple):
    """Command: stop compiling this structure, whose result is not needed."""

    structure: Structure


SandboxCommand: TypeAlias = Structure | Cancel | None
"""Message to the middle process. None: end."""


class GrammarSandbox:
    """Reports whether structures compile within the limits. Any thread may call it.

    vocabulary   called once, on a thread of the sandbox, before the first structure is compiled
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], levels: Sequence[QueueLevel] = COMPILE_LEVELS
    ) -> None:
        self._vocabulary = vocabulary
        self._levels = tuple(levels)
        self._lock = threading.Lock()
        self._futures: dict[Structure, list[Future[QueueLevel]]] = {}
        # By digest: a client's text may have megabytes.
        self._cached_errors: OrderedDict[bytes, InvalidRequest] = OrderedDict()
        self._commands: SimpleQueue[SandboxCommand] | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, structure: Structure) -> Future[QueueLevel]:
        """Compile the structure; return a future of the level within whose limits it compiled.

        The future raises InvalidRequest, SandboxFull or SandboxDied. Cancel it when its result is
        not needed. Simultaneous calls with one structure share a compilation. Returns at once.
        """
        future: Future[QueueLevel] = Future()
        digest = digest_structure(structure)
        with self._lock:
            if self._closed:
                future.set_exception(SandboxDied("the compiler is closed. Open another"))
                return future
            error = self._cached_errors.get(digest)
            if error is not None:
                self._cached_errors.move_to_end(digest)
                _set_outcome(future, error)
                return future
            futures = self._futures.setdefault(structure, [])
            futures.append(future)
            commands = self._commands or self._start_process()
            if len(futures) == 1:
                commands.put(structure)
        future.add_done_callback(partial(self._on_future_done, structure))
        return future

    def close(self) -> None:
        """End the process. Open futures raise SandboxDied."""
        with self._lock:
            self._closed = True
            commands, thread = self._commands, self._thread
        if commands is not None and thread is not None:
            commands.put(None)
            thread.join(STOP_TIMEOUT_S)
            process = self._process
            if thread.is_alive() and process is not None:
                process.kill()  # it stopped reading: a write that waits for it now fails
            thread.join()

    def _start_process(self) -> SimpleQueue[SandboxCommand]:
        commands = self._commands = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_process, args=(commands,), name="forge-structures", daemon=True
        )
        self._thread.start()
        return commands

    def _on_future_done(self, structure: Structure, future: Future[QueueLevel]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            futures = self._futures.get(structure, [])
            if future in futures:
                futures.remove(future)
                if not futures and self._commands is not None:
                    del self._futures[structure]
                    self._commands.put(Cancel(structure))

    def _run_process(self, commands: SimpleQueue[SandboxCommand]) -> None:
        """Run one process from its start to its end, and fail the futures that are then open."""
        failure = "it was closed"
        try:
            vocabulary = self._vocabulary()
            parent_socket, child_socket = socket.socketpair()
            pipe = Connection(os.dup(parent_socket.fileno()))
            with parent_socket, pipe, _spawn_process(child_socket) as process:
                self._process = process
                reader = threading.Thread(
                    target=self._read_results, args=(pipe, commands), daemon=True
                )
                with suppress(OSError):  # a process that is gone reads nothing
                    pipe.send((vocabulary, self._levels))
                    reader.start()
                    while (message := commands.get()) is not None:
                        pipe.send(message)
                with suppress(OSError):
                    # Closing the pipe would not wake the reader of this end.
                    parent_socket.shutdown(socket.SHUT_RDWR)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
                process.kill()
                process.wait()
                if reader.ident is not None:
                    reader.join()
            failure = f"its process ended with exit code {process.returncode}"
        except Exception as exc:  # open futures must end, whatever the error is
            failure = repr(exc)
        with self._lock:
            self._commands = None
            open_futures = [future for futures in self._futures.values() for future in futures]
            self._futures.clear()
        for future in open_futures:
            error = SandboxDied(f"structures are not compiled: {failure}. Send it again")
            _set_outcome(future, error)

    def _read_results(self, pipe: Connection, commands: SimpleQueue[SandboxCommand]) -> None:
        with suppress(EOFError, OSError):
            while True:
                structure, outcome, is_permanent = pipe.recv()
                digest = digest_structure(structure)
                with self._lock:
                    futures = self._futures.pop(structure, [])
                    if isinstance(outcome, InvalidRequest) and is_permanent:
                        self._cached_errors[digest] = outcome
                        if len(self._cached_errors) > MAX_CACHED_ERRORS:
                            self._cached_errors.popitem(last=False)
                for future in futures:
                    _set_outcome(future, outcome)
        commands.put(None)


def _set_outcome(future: Future[QueueLevel], outcome: QueueLevel | ForgeError) -> None:
    """Set the future's result, or a copy of the exception.

    Raising an exception adds its callers' frames to its traceback. One object raised for many
    requests would keep all their frames alive, and with them their prompts.
    """
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, QueueLevel):
        future.set_result(outcome)
    else:
        future.set_exception(copy(outcome))


def _spawn_process(child_socket: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process that runs `run_sandbox` on this end of a pair of sockets.

    multiprocessing would import the main module of this process, which may not be importable.
    """
    with child_socket:
        path = f"import sys; sys.path[:] = {sys.path!r}"
        code = f"{path}; from forge.grammar_sandbox import run_sandbox; "
        return subprocess.Popen(
            [sys.executable, "-c", f"{code}run_sandbox({child_socket.fileno()})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[child_socket.fileno()],
        )


# The middle process.


class _Job(NamedTuple):
    """A process that compiles a structure.

    result_pipe   carries an InvalidRequest or None, unless the process ends before
    stderr        pipe with what native code writes before it ends the process; never blocks
    stderr_text   what was read from it
    """

    structure: Structure
    level: QueueLevel
    pid: int
    result_pipe: Connection
    stderr: int
    stderr_text: bytearray
    deadline_s: float


def run_sandbox(fd: int) -> None:
    """Compile the structures that come over the pipe, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this process ends
    with Connection(fd) as pipe, suppress(EOFError, OSError):
        vocabulary, levels = pipe.recv()
        tokens = build_token_trie(vocabulary)
        del vocabulary
        gc.freeze()  # pages that no process writes stay shared with the children
        _JobRunner(pipe, FeedbackQueue(levels), tokens).run()


class _JobRunner:
    """Runs the compilations of one pipe."""

    def __init__(
        self, pipe: Connection, jobs: FeedbackQueue[Structure], token_trie: llguidance.LLTokenizer
    ) -> None:
        self._pipe = pipe
        self._jobs = jobs
        self._token_trie = token_trie
        self._running: dict[Connection, _Job] = {}
        self._watched: dict[int, _Job] = {}  # by the pipe of their stderr

    def run(self) -> None:
        """Serve until the pipe ends; then raise EOFError or OSError."""
        try:
            while True:
                for structure, level in self._jobs.start_jobs():
                    self._start(structure, level)
                ready = wait([self._pipe, *self._running, *self._watched], self._timeout_s())
                for source in ready:
                    if source is self._pipe:
                        self._execute(self._pipe.recv())
                    elif source in self._running:  # a Cancel may have just removed it
                        self._finish(self._running[source])
                    elif source in self._watched:
                        self._read_stderr(self._watched[source])
                self._kill(lambda job: job.deadline_s <= time.monotonic())
        finally:
            self._kill(lambda job: True)
            for job in self._running.values():
                os.waitpid(job.pid, 0)

    def _timeout_s(self) -> float | None:
        """Return the seconds until the first deadline; None without a running job."""
        if not self._running:
            return None
        next_deadline_s = min(job.deadline_s for job in self._running.values())
        return max(0.0, next_deadline_s - time.monotonic())

    def _kill(self, should_kill: Callable[[_Job], bool]) -> None:
        """Kill the processes of the selected jobs; their pipes end."""
        for job in self._running.values():
            if should_kill(job):
                os.kill(job.pid, signal.SIGKILL)

    def _execute(self, message: Structure | Cancel) -> None:
        if isinstance(message, Cancel):
            self._jobs.remove(message.structure)
            for job in [j for j in self._running.values() if j.structure == message.structure]:
                os.kill(job.pid, signal.SIGKILL)
                self._reap(job)  # now: the next message may be the same structure
        elif not self._jobs.contains(message):  # a running job answers both
            self._jobs.add(message)

    def _start(self, structure: Structure, level: QueueLevel) -> None:
        result_pipe, child_pipe = Pipe(duplex=False)
        stderr, stderr_write_end = os.pipe()
        for end in (stderr, stderr_write_end):  # output beyond the pipe's size is lost
            os.set_blocking(end, False)
        pid = os.fork()
        if not pid:
            self._pipe.close()
            os.dup2(stderr_write_end, 2)
            _compile_and_exit(structure, self._token_trie, level, child_pipe)
        child_pipe.close()
        os.close(stderr_write_end)
        deadline_s = time.monotonic() + MAX_WALL_S
        job = _Job(structure, level, pid, result_pipe, stderr, bytearray(), deadline_s)
        self._running[result_pipe] = self._watched[stderr] = job

    def _reap(self, job: _Job) -> tuple[int, bytes]:
        """Remove a process that is ending; return its exit code, or -signal, and its stderr."""
        del self._running[job.result_pipe]
        job.result_pipe.close()
        code = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        self._read_stderr(job)
        self._watched.pop(job.stderr, None)
        os.close(job.stderr)
        return code, bytes(job.stderr_text)

    def _read_stderr(self, job: _Job) -> None:
        """Read what native code has written, and abort a process whose memory ran out in it.

        Rust aborts by itself, except where memory ends while a panic is described: then it waits
        for its own lock.
        """
        with suppress(BlockingIOError):
            text = os.read(job.stderr, MAX_STDERR_BYTES)
            job.stderr_text.extend(text[: MAX_STDERR_BYTES - len(job.stderr_text)])
            if not text:
                self._watched.pop(job.stderr, None)
        if job.stderr_text.startswith(RUST_OOM_PREFIX) and job.result_pipe in self._running:
            self._watched.pop(job.stderr, None)
            os.kill(job.pid, signal.SIGABRT)

    def _finish(self, job: _Job) -> None:
        """Send the result of a job that ended, or move it to the next level."""
        structure, level = job.structure, job.level
        error, has_result = None, False
        with suppress(EOFError, OSError):
            error, has_result = job.result_pipe.recv(), True
        code, stderr_text = self._reap(job)
        limit = None if has_result else _exceeded_limit(level, code, stderr_text)
        if limit is None:
            self._jobs.remove(structure)
            if not has_result:
                error = _no_result_error(job, code)
            # A kill, the clock and a failed start depend on the machine, not on the structure.
            is_permanent = code <= 0 and code != -signal.SIGKILL
            self._pipe.send((structure, error or level, is_permanent))
            return
        problem = f"takes more than {limit} to compile"
        match self._jobs.demote(structure):
            case Demotion.LAST_LEVEL:
                error = _structure_error(structure, problem, TOO_COSTLY_CODE)
                self._pipe.send((structure, error, True))
            case Demotion.LEVEL_FULL:
                full_message = (
                    f"the {structure.kind.value} {problem}, "
                    "and the queue of such structures is full"
                )
                self._pipe.send((structure, SandboxFull(full_message), False))


def _exceeded_limit(level: QueueLevel, code: int, stderr_text: bytes) -> str | None:
    """Return the limit of the level that ended a process; None if something else did."""
    if code == -signal.SIGPROF:
        return f"{level.cpu_s:g} s"
    if code == OUT_OF_MEMORY_EXIT_CODE or (
        code == -signal.SIGABRT and stderr_text.startswith(RUST_OOM_PREFIX)
    ):
        return f"{level.memory_mib} MiB"
    return None


def _no_result_error(job: _Job, code: int) -> InvalidRequest:
    """Return the error for a process that ended without a result and within its limits."""
    if code == -signal.SIGKILL:
        problem = "was not compiled: the system ended its process"
        if job.deadline_s <= time.monotonic():
            problem = f"takes more than {MAX_WALL_S:g} s to compile"
        return _structure_error(job.structure, problem, TOO_COSTLY_CODE)
    exit_text = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return _unusable_error(job.structure, f"was not compiled: its process ended with {exit_text}")


def _unusable_error(structure: Structure, problem: str) -> InvalidRequest:
    return _structure_error(structure, problem, f"invalid_{structure.kind.value}")


def _structure_error(structure: Structure, problem: str, code: str) -> InvalidRequest:
    kind = structure.kind.value
    return InvalidRequest("structure", f"the {kind} {problem}", "Simplify it", code)


# The process of one compilation.


def _compile_and_exit(
    structure: Structure,
    token_trie: llguidance.LLTokenizer,
    level: QueueLevel,
    result_pipe: Connection,
) -> NoReturn:
    """Send an InvalidRequest or None, and exit. The kernel ends the process at its limits."""
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, level.cpu_s)  # of all threads; SIGPROF ends the process

    def work() -> InvalidRequest | None:
        _limit_memory(level.memory_mib)
        try:
            compile_grammar(structure, token_trie, level)
        except InvalidRequest as error:
            return error
        except MemoryError:
            os._exit(OUT_OF_MEMORY_EXIT_CODE)
        except BaseException as error:  # a panic in Rust is no Exception
            return _unusable_error(structure, f"could not be compiled: {type(error).__name__}")
        return None

    outcome: Future[InvalidRequest | None] = Future()
    code = 1
    try:
        run_with_deep_stack(work, outcome)
        # A future without a result means that memory ran out: waiting would last to the deadline.
        result_pipe.send(outcome.result(timeout=0))
        code = 0
    except (MemoryError, TimeoutError):
        code = OUT_OF_MEMORY_EXIT_CODE
    finally:
        os._exit(code)


def _limit_memory(mib: int) -> None:
    """Limit this process to `mib` MiB of private memory more than it has now.

    Only Linux reports how much it has: elsewhere there is no limit. Call it on the thread that
    compiles, so that its stack is already counted.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit_bytes = int(statm.read_text().split()[5]) * resource.getpagesize() + mib * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
