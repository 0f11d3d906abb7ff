"""GrammarSandbox: the limits of a compilation, and the end of its processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

import pytest

from forge.errors import InvalidRequest
from forge.feedback_queue import QueueLevel
from forge.grammar_sandbox import TOO_COSTLY_CODE, GrammarSandbox, SandboxDied, SandboxFull
from forge.request import Structure, StructureKind
from forge.structured_output import LLGuidanceBackend
from forge.tokenizer import ByteTokenizer, Vocabulary
from tests.engine.faulty_schema import (
    FaultySchema,
    abort_process,
    exit_process,
    kill_process,
    raise_base_exception,
    raise_key_error,
    raise_memory_error,
    run_out_of_memory_in_a_panic,
)
from tests.server.local_server import TIMEOUT_S


def costly_grammar(count: int) -> str:
    """Return a grammar of `count` shapes at once. The cost of compiling is their product."""
    return "start: T\nT: " + " & ".join(f"/(.*[ab]){{{i}}}.*/" for i in range(3, 3 + count))


COSTLY = costly_grammar(57)
"""Needs gigabytes."""

LONG_GRAMMAR = Structure.grammar(costly_grammar(11))
"""Needs seconds, and about 20 MiB."""

RANGES = Structure.json_schema(
    {"properties": {f"p{i}": {"maximum": i + 0.1, "minimum": -1 / (i + 3)} for i in range(200)}}
)
"""Needs a tenth of a second."""

EASY = Structure.regex("[0-9]{3}")
SHORT = QueueLevel(slots=1, cpu_s=0.02, memory_mib=16, max_waiting=0)
ONE = QueueLevel(slots=1, cpu_s=TIMEOUT_S, memory_mib=16, max_waiting=0)


def vocabulary() -> Vocabulary:
    return LLGuidanceBackend(ByteTokenizer(), 257, (0,)).vocabulary()


@contextmanager
def create_compiler(*levels: QueueLevel) -> Iterator[GrammarSandbox]:
    compiler = GrammarSandbox(vocabulary, levels) if levels else GrammarSandbox(vocabulary)
    try:
        yield compiler
    finally:
        compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarSandbox]:
    """A compiler for tests that need no process of their own.

    It caches errors, so each of them has another bad structure.
    """
    with create_compiler(ONE, ONE._replace(max_waiting=1)) as shared:
        yield shared


def children_of(pid: int) -> list[int]:
    """Return the processes that this one started. Others may end meanwhile, as its threads may."""
    children = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if f"\nPPid:\t{pid}\n" in status.read_text():
                children.append(int(status.parent.name))
    return children


def compiler_pid(compiler: GrammarSandbox) -> int:
    """Return the id of the middle process, which has compiled a structure."""
    assert compiler._process is not None
    return compiler._process.pid


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_structure_is_compiled_or_refused_as_in_this_process(compiler: GrammarSandbox) -> None:
    compiler.check(EASY).result(TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="unclosed character class") as error:
        compiler.check(Structure.regex("[")).result(TIMEOUT_S)
    assert (error.value.field, error.value.code) == ("structure", "invalid_regex")


def test_each_refused_caller_gets_its_own_exception(compiler: GrammarSandbox) -> None:
    """An exception that is raised again and again keeps the frames of all its callers."""
    bad = Structure.regex("[a")
    caught = []
    futures = [compiler.check(bad) for _ in range(2)]
    for future in (*futures, compiler.check(bad)):
        with pytest.raises(InvalidRequest, match="unclosed character class") as error:
            future.result(TIMEOUT_S)
        caught.append(error.value)
    with pytest.raises(InvalidRequest, match="unclosed character class") as error:
        compiler.check(bad).result(TIMEOUT_S)
    caught.append(error.value)
    assert len({id(each) for each in caught}) == 4
    assert {each.code for each in caught} == {"invalid_regex"}


@pytest.mark.long
def test_a_structure_that_takes_too_much_memory_is_refused_and_delays_no_other() -> None:
    costly = [Structure.grammar(f"{COSTLY}\nX{i}: /a/") for i in range(12)]
    with create_compiler() as compiler:
        futures = [compiler.check(each) for each in costly]
        compiler.check(EASY).result(TIMEOUT_S)
        for each in futures:
            with pytest.raises(InvalidRequest, match="takes more than 16 MiB to compile"):
                each.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("happens", "problem", "code"),
    [
        (abort_process, "was not compiled: its process ended with SIGABRT", "invalid_schema"),
        (exit_process, "was not compiled: its process ended with exit code 7", "invalid_schema"),
        (kill_process, "was not compiled: the system ended its process", TOO_COSTLY_CODE),
        (raise_base_exception, "could not be compiled: BaseException", "invalid_schema"),
        (raise_key_error, "could not be compiled: KeyError", "invalid_schema"),
        (raise_memory_error, "takes more than 16 MiB to compile", TOO_COSTLY_CODE),
        (run_out_of_memory_in_a_panic, "takes more than 16 MiB to compile", TOO_COSTLY_CODE),
    ],
)
def test_an_error_names_what_ended_the_process(
    compiler: GrammarSandbox, happens: Callable[[str], None], problem: str, code: str
) -> None:
    text = FaultySchema(f'{{"title": "{happens.__name__}"}}')
    text.fault = happens
    with pytest.raises(InvalidRequest, match=f"the schema {problem}. Simplify it") as error:
        compiler.check(Structure(StructureKind.JSON_SCHEMA, text)).result(TIMEOUT_S)
    assert error.value.code == code
    assert compiler.check(EASY).result(TIMEOUT_S) == ONE


def test_a_panic_that_needs_more_memory_than_the_first_level_has_is_described() -> None:
    """llguidance slices this text inside a character. The description takes 6 MiB."""
    schema = {"properties": {"a": {"type": "string"}}, "required": "é" * 50}
    roomy = ONE._replace(memory_mib=256, max_waiting=1)
    with create_compiler(ONE._replace(memory_mib=4), roomy) as compiler:
        with pytest.raises(InvalidRequest, match="the schema cannot be used: panic"):
            compiler.check(Structure.json_schema(schema)).result(TIMEOUT_S)


def test_a_structure_whose_process_the_machine_ended_may_be_tried_again(
    compiler: GrammarSandbox,
) -> None:
    text = FaultySchema('{"title": "again"}')
    text.fault = exit_process
    cached_errors = list(compiler._cached_errors)
    with pytest.raises(InvalidRequest):
        compiler.check(Structure(StructureKind.JSON_SCHEMA, text)).result(TIMEOUT_S)
    assert list(compiler._cached_errors) == cached_errors


@pytest.mark.long
def test_a_structure_that_takes_too_long_is_refused_by_the_limit_of_the_last_level() -> None:
    last = SHORT._replace(cpu_s=0.25, memory_mib=256, max_waiting=1)
    with create_compiler(SHORT, last) as compiler:
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.25 s to compile") as error:
            compiler.check(LONG_GRAMMAR).result(TIMEOUT_S)
        assert error.value.code == TOO_COSTLY_CODE
        compiler.check(EASY).result(TIMEOUT_S)


def test_a_structure_that_takes_long_is_compiled_where_the_next_level_has_the_time() -> None:
    with create_compiler(SHORT, SHORT._replace(cpu_s=30.0, max_waiting=1)) as compiler:
        compiler.check(RANGES).result(TIMEOUT_S)


def test_a_structure_that_takes_much_memory_is_compiled_where_the_next_level_has_it() -> None:
    with create_compiler(ONE._replace(memory_mib=1), ONE._replace(max_waiting=1)) as compiler:
        assert compiler.check(RANGES).result(TIMEOUT_S).memory_mib == ONE.memory_mib


def test_a_structure_for_which_the_next_level_has_no_room_may_be_sent_again() -> None:
    with create_compiler(SHORT, SHORT._replace(cpu_s=30.0)) as compiler:
        for _ in range(2):
            with pytest.raises(SandboxFull, match="the queue of such structures is full"):
                compiler.check(LONG_GRAMMAR).result(TIMEOUT_S)


def test_simultaneous_checks_share_a_compilation() -> None:
    with create_compiler() as compiler:
        futures = [compiler.check(EASY) for _ in range(50)]
        assert len(compiler._futures[EASY]) == 50
        assert len({each.result(TIMEOUT_S) for each in futures}) == 1


def test_a_cancelled_structure_gives_its_slot_to_others(compiler: GrammarSandbox) -> None:
    left = compiler.check(LONG_GRAMMAR)
    last = compiler.check(EASY)
    assert left.cancel()
    last.result(TIMEOUT_S)


def test_a_cancelled_structure_can_be_checked_again() -> None:
    with create_compiler(ONE) as compiler:
        assert compiler.check(RANGES).cancel()
        compiler.check(RANGES).result(TIMEOUT_S)


def test_a_structure_cancelled_while_it_waited_is_not_compiled(compiler: GrammarSandbox) -> None:
    """Compiled, it would fail, and its error would be cached before the last one has its turn."""
    bad = Structure.regex("[b")
    cached_errors = list(compiler._cached_errors)
    first, left, last = (compiler.check(each) for each in (LONG_GRAMMAR, bad, EASY))
    assert left.cancel() and first.cancel()
    last.result(TIMEOUT_S)
    assert list(compiler._cached_errors) == cached_errors


def test_the_cached_error_of_a_long_text_has_few_bytes() -> None:
    long_text = Structure.regex("[" + "a" * 100_000)
    with create_compiler() as compiler:
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                compiler.check(long_text).result(TIMEOUT_S)
        assert len(compiler._cached_errors) == 1
        assert len(pickle.dumps(compiler._cached_errors)) < 4096


def test_no_process_runs_before_the_first_structure_and_none_after_the_end() -> None:
    calls = []
    compiler = GrammarSandbox(lambda: calls.append(1) or vocabulary())  # type: ignore[func-returns-value]
    compiler.close()
    assert calls == []
    with create_compiler() as compiler:
        compiler.check(EASY).result(TIMEOUT_S)
        process = compiler_pid(compiler)
    assert has_ended(process) and process not in children_of(os.getpid())
    with pytest.raises(SandboxDied, match="closed"):
        compiler.check(EASY).result(TIMEOUT_S)


def test_a_process_that_is_killed_fails_what_waits_and_the_next_structure_starts_another() -> None:
    with create_compiler(ONE) as compiler:
        compiler.check(EASY).result(TIMEOUT_S)
        process = compiler_pid(compiler)
        os.kill(process, signal.SIGSTOP)
        waiting = compiler.check(Structure.regex("[0-9]{4}"))
        os.kill(process, signal.SIGKILL)
        with pytest.raises(SandboxDied, match="exit code -9"):
            waiting.result(TIMEOUT_S)
        compiler.check(EASY).result(TIMEOUT_S)
        assert compiler_pid(compiler) != process


@pytest.mark.long
def test_close_ends_a_process_that_reads_nothing() -> None:
    with create_compiler(ONE) as compiler:
        compiler.check(EASY).result(TIMEOUT_S)
        process = compiler_pid(compiler)
        os.kill(process, signal.SIGSTOP)
        # More than the socket takes, so that the thread which sends them waits.
        waiting = [compiler.check(Structure.regex("a" * 200_000 + str(i))) for i in range(20)]
    assert has_ended(process)
    with pytest.raises(SandboxDied):
        waiting[-1].result(TIMEOUT_S)


def test_a_vocabulary_that_cannot_be_read_fails_what_waits() -> None:
    def broken() -> Vocabulary:
        raise OSError("no such file")

    compiler = GrammarSandbox(broken)
    with pytest.raises(SandboxDied, match="no such file"):
        compiler.check(EASY).result(TIMEOUT_S)
    compiler.close()


PARENT_PROGRAM = """
import sys
from tests.engine.test_grammar_sandbox import *
with create_compiler() as compiler:
    compiler.check(EASY).result(TIMEOUT_S)
    print(compiler_pid(compiler), flush=True)
    sys.stdin.read()
"""


@contextmanager
def parent_of_one() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a process that compiles structures; yield it and the id of its middle process."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        yield parent, int(parent.stdout.readline())


@pytest.mark.long
def test_the_process_does_not_hold_what_this_one_reads() -> None:
    """A writer finds that its reader has ended only once no process holds the other end."""
    with parent_of_one() as (_, process):
        assert os.readlink(f"/proc/{process}/fd/0") == os.devnull


@pytest.mark.long
def test_no_process_outlives_one_that_is_killed() -> None:
    with parent_of_one() as (parent, process):
        descriptor = os.pidfd_open(process)
        parent.kill()
        ready, _, _ = select([descriptor], [], [], TIMEOUT_S)  # readable once the process ended
        os.close(descriptor)
    assert ready and has_ended(process)
