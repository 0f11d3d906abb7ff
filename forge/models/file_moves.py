"""FileMoves: spills and fetches of a model, started by a plan and answered by a later output.

Owns the moves in progress. Knows no scheduler and no format: a store writes and reads contents.

    begin(plan)   drop what another epoch drops, then start the plan's moves
      spill         host block ──► copy, unless dropped by then ──► store
      fetch         store ──► a piece ──► host block, unless dropped by then ──► the next piece
    end(plan)     an answer for each that is done by now

Always true: a store has a copy of the content and never the host block. A move that is dropped can
go on in its thread: it neither writes a host block nor stores what it has read of one since. A drop
waits for the copy of one piece at most, and never for a store. A host block that has some of its
pieces only is answered as a miss.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from forge.seam import FileAnswer, HostFile, StepPlan

MAX_WAIT_S = 0.01
"""Seconds for which a plan without rows waits for answers: so long may a new request wait for it,
and in this time 64 files in flight keep every thread busy."""

MAX_DROPPED_MOVES = 64
"""Most dropped moves that still go on: then new ones fail, so a hung disk fills no memory."""


class ContentWriter(Protocol):
    """A host block that a content is written to. One thread at a time may call it."""

    def write(self, piece: memoryview) -> bool:
        """Write the next piece, and return whether it fits."""
        ...

    def complete(self) -> bool:
        """End the content, and return whether it has the length of a block."""
        ...


@dataclass(slots=True)
class WholeContent:
    """ContentWriter that keeps all pieces and writes them when there are no more.

    finish   writes a content, and returns whether it has the length of a block
    """

    finish: Callable[[bytes], bool]
    _content: bytearray = field(default_factory=bytearray)

    def write(self, piece: memoryview) -> bool:
        """Keep the next piece."""
        self._content += piece
        return True

    def complete(self) -> bool:
        """Write all pieces."""
        return self.finish(bytes(self._content))


class HostContents(Protocol):
    """Host blocks, as one plan finds them."""

    def wait(self) -> None:
        """Wait until all work of earlier plans is complete. Any thread may call it."""
        ...

    def reader(self, host_block: int) -> Callable[[], bytes | memoryview]:
        """Return a call that returns a copy of the content. Any thread may make it.

        Raises ValueError where nothing was stored.
        """
        ...

    def writer(self, host_block: int) -> ContentWriter:
        """Return what writes a content. Until it is complete the host block has none."""
        ...


class FileStore(Protocol):
    """Contents under keys, such as BlockFiles. What raises counts as failed."""

    def write(self, key: bytes, content: bytes | memoryview) -> bool:
        """Write the content under the key, and return whether that was done."""
        ...

    def read(self, key: bytes, write: Callable[[memoryview], bool]) -> bool:
        """Pass the content under the key to `write` in pieces; return whether all were passed.

        write   takes the next piece, which it may not keep. False ends the reading
        """
        ...


class _NoStore:
    def write(self, key: bytes, content: bytes | memoryview) -> bool:
        return False

    def read(self, key: bytes, write: Callable[[memoryview], bool]) -> bool:
        return False


@dataclass(slots=True)
class _Claim:
    """Right of a move to its host block, until it is dropped. `lock` is held while it is used."""

    lock: Lock = field(default_factory=Lock)
    is_dropped: bool = False

    def drop(self) -> None:
        """End the right. Waits while the move writes its host block."""
        with self.lock:
            self.is_dropped = True


@dataclass(slots=True)
class _Move:
    """Spill or fetch in progress. `due_step` is the first plan whose output may answer it."""

    step: int
    file: HostFile
    is_fetch: bool
    claim: _Claim
    future: Future[bool]
    due_step: int


def _no_lateness(step: int, file: HostFile) -> int:
    return 0


class FileMoves:
    """Spills and fetches in progress.

    store      contents of blocks
    executor   runs the store in threads; None: it runs while the plan does
    lateness   plans by which the answer of a move of a plan is later than it could be, for tests
    """

    def __init__(
        self,
        store: FileStore,
        executor: Executor | None = None,
        lateness: Callable[[int, HostFile], int] = _no_lateness,
    ) -> None:
        self._store = store
        self._executor = executor
        self._lateness = lateness
        self._moves: list[_Move] = []
        self._dropped: list[Future[bool]] = []
        self._epoch = 0
        self._newest_has_rows = False

    @property
    def spilling(self) -> set[int]:
        """Host blocks whose spill is not answered."""
        return {move.file.host_block for move in self._moves if not move.is_fetch}

    @property
    def fetching(self) -> set[int]:
        """Host blocks whose fetch is not answered."""
        return {move.file.host_block for move in self._moves if move.is_fetch}

    def begin(self, plan: StepPlan, contents: HostContents) -> None:
        """Begin the plan's moves. Raises ValueError where two have one host block.

        Call it before anything of the plan writes a host block.
        """
        self._newest_has_rows = bool(plan.rows)
        if plan.file_epoch != self._epoch:
            for move in self._moves:
                move.claim.drop()
            self._dropped += [move.future for move in self._moves]
            self._moves.clear()
            self._epoch = plan.file_epoch  # not before: Ctrl-C may end the waits above
        if self._dropped:
            self._dropped = [future for future in self._dropped if not future.done()]
        busy = {move.file.host_block for move in self._moves}
        for is_fetch, files in ((False, plan.spills), (True, plan.fetches)):
            for file in files:
                if not 0 <= file.host_block < plan.num_host_blocks or file.host_block in busy:
                    raise ValueError(f"plan {plan.step}: {file} has no host block of its own")
                busy.add(file.host_block)
                claim = _Claim()
                start = self._start_fetch if is_fetch else self._start_spill
                future = start(file, contents, claim)
                due_step = plan.step + self._lateness(plan.step, file)
                self._moves.append(_Move(plan.step, file, is_fetch, claim, future, due_step))

    def end(self, plan: StepPlan) -> tuple[FileAnswer, ...]:
        """Return the answers of moves of this plan and earlier ones that are done.

        A plan without rows waits for their fetches, unless a newer plan has rows to be read.
        """
        if not self._moves:
            return ()
        if not plan.rows and not self._newest_has_rows:
            # All of them, since a sequence waits for all, and a plan for each would take longer.
            wait([m.future for m in self._moves if m.is_fetch and m.step <= plan.step], MAX_WAIT_S)
        done: list[_Move] = []
        others: list[_Move] = []
        for move in self._moves:
            is_done = move.future.done() and move.due_step <= plan.step
            (done if is_done else others).append(move)
        self._moves = others
        return tuple(FileAnswer(m.step, m.file.host_block, _is_good(m.future)) for m in done)

    def _start_spill(self, file: HostFile, contents: HostContents, claim: _Claim) -> Future[bool]:
        store, read = self._store, contents.reader(file.host_block)

        def spill() -> bool:
            contents.wait()
            content = read()
            # Since it was dropped, another plan may have written the host block.
            return not claim.is_dropped and store.write(file.key, content)

        return self._submit(spill, claim)

    def _start_fetch(self, file: HostFile, contents: HostContents, claim: _Claim) -> Future[bool]:
        store, writer = self._store, contents.writer(file.host_block)

        def write(piece: memoryview) -> bool:
            with claim.lock:
                return not claim.is_dropped and writer.write(piece)

        def fetch() -> bool:
            contents.wait()  # A load of an earlier plan may still read the host block.
            if not store.read(file.key, write):
                return False
            with claim.lock:
                return not claim.is_dropped and writer.complete()

        return self._submit(fetch, claim)

    def _submit(self, run: Callable[[], bool], claim: _Claim) -> Future[bool]:
        future: Future[bool] = Future()
        if len(self._dropped) >= MAX_DROPPED_MOVES:
            future.set_result(False)
            return future
        if self._executor is not None:
            try:
                return self._executor.submit(run)
            except RuntimeError:  # No thread can be started. An earlier one may still run the call.
                claim.drop()
                future.set_result(False)
                return future
        try:
            future.set_result(run())
        except Exception as error:
            future.set_exception(error)
        return future


def _is_good(future: Future[bool]) -> bool:
    return future.exception() is None and future.result()


def no_files() -> FileMoves:
    """Return moves that all fail: no file is written, and none is found."""
    return FileMoves(_NoStore())
