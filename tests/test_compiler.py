"""StructureCompiler: limits of a compilation, and how its processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

import pytest

from forge.compiler import TOO_COSTLY, CompilerEnded, CompilerFull, StructureCompiler
from forge.errors import InvalidRequest
from forge.lanes import Lane
from forge.request import Structure, StructureKind
from forge.structure import Structures
from forge.tokenizer import ByteTokenizer, Vocabulary
from tests.faulty import Faulty, aborts, ends, fails, has_no_memory, is_killed, panics
from tests.listening import LIMIT_S


def all_of(count: int) -> str:
    """A text of `count` shapes at once. The cost of compiling is the product of theirs."""
    return "start: T\nT: " + " & ".join(f"/(.*[ab]){{{i}}}.*/" for i in range(3, 3 + count))


COSTLY = all_of(57)
"""Takes gigabytes."""

LONG = Structure.grammar(all_of(11))
"""Takes seconds, and some 20 MiB."""

RANGES = Structure.json_schema(
    {"properties": {f"p{i}": {"maximum": i + 0.1, "minimum": -1 / (i + 3)} for i in range(200)}}
)
"""Takes a tenth of a second."""

EASY = Structure.regex("[0-9]{3}")
SHORT = Lane(slots=1, cpu_s=0.02, memory_mib=16, max_waiting=0)
ONE = Lane(slots=1, cpu_s=LIMIT_S, memory_mib=16, max_waiting=0)


def vocabulary() -> Vocabulary:
    return Structures(ByteTokenizer(), 257, (0,)).vocabulary()


@contextmanager
def compiling(*lanes: Lane) -> Iterator[StructureCompiler]:
    compiler = StructureCompiler(vocabulary, lanes) if lanes else StructureCompiler(vocabulary)
    try:
        yield compiler
    finally:
        compiler.close()


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def the_process() -> int:
    """The id of the process in the middle."""
    (found,) = (
        child
        for child in children_of(os.getpid())
        if b"forge.compiler" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return found


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_structure_is_compiled_or_refused_as_in_this_process() -> None:
    with compiling() as compiler:
        compiler.check(EASY).result(LIMIT_S)
        with pytest.raises(InvalidRequest, match="unclosed character class") as refused:
            compiler.check(Structure.regex("[")).result(LIMIT_S)
    assert (refused.value.field, refused.value.code) == ("structure", "invalid_regex")


def test_each_of_those_who_are_refused_gets_an_exception_of_its_own() -> None:
    """One that is raised again and again keeps the frames of all who caught it."""
    caught = []
    with compiling() as compiler:
        asked = [compiler.check(Structure.regex("[")) for _ in range(2)]
        for future in (*asked, compiler.check(Structure.regex("["))):
            with pytest.raises(InvalidRequest, match="unclosed character class") as refused:
                future.result(LIMIT_S)
            caught.append(refused.value)
        with pytest.raises(InvalidRequest, match="unclosed character class") as refused:
            compiler.check(Structure.regex("[")).result(LIMIT_S)
        caught.append(refused.value)
    assert len({id(each) for each in caught}) == 4
    assert {each.code for each in caught} == {"invalid_regex"}


@pytest.mark.long
def test_one_that_takes_too_much_memory_is_refused_and_costs_the_others_nothing() -> None:
    costly = [Structure.grammar(f"{COSTLY}\nX{i}: /a/") for i in range(12)]
    with compiling() as compiler:
        refused = [compiler.check(each) for each in costly]
        compiler.check(EASY).result(LIMIT_S)
        for each in refused:
            with pytest.raises(InvalidRequest, match="takes more than 16 MiB to compile"):
                each.result(LIMIT_S)


@pytest.mark.parametrize(
    ("happens", "problem", "code"),
    [
        (aborts, "was not compiled: its process ended with SIGABRT", "invalid_schema"),
        (ends, "was not compiled: its process ended with exit code 7", "invalid_schema"),
        (is_killed, "was not compiled: the system ended its process", TOO_COSTLY),
        (panics, "could not be compiled: BaseException", "invalid_schema"),
        (fails, "could not be compiled: KeyError", "invalid_schema"),
        (has_no_memory, "takes more than 16 MiB to compile", TOO_COSTLY),
    ],
)
def test_a_refusal_says_what_happened_to_the_process(
    happens: Callable[[str], None], problem: str, code: str
) -> None:
    text = Faulty("{}")
    text.happens = happens
    with compiling(ONE, ONE._replace(max_waiting=1)) as compiler:
        with pytest.raises(InvalidRequest, match=f"the schema {problem}. Simplify it") as refused:
            compiler.check(Structure(StructureKind.JSON_SCHEMA, text)).result(LIMIT_S)
        assert refused.value.code == code
        assert compiler.check(EASY).result(LIMIT_S) == ONE


def test_a_process_whose_end_says_more_of_the_machine_may_be_tried_again() -> None:
    text = Faulty("{}")
    text.happens = ends
    with compiling(ONE) as compiler:
        with pytest.raises(InvalidRequest):
            compiler.check(Structure(StructureKind.JSON_SCHEMA, text)).result(LIMIT_S)
        assert not compiler._refused


def test_one_that_takes_too_long_is_refused_by_the_limit_of_the_last_lane() -> None:
    last = SHORT._replace(cpu_s=0.25, memory_mib=256, max_waiting=1)
    with compiling(SHORT, last) as compiler:
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.25 s to compile") as refused:
            compiler.check(LONG).result(LIMIT_S)
        assert refused.value.code == TOO_COSTLY
        compiler.check(EASY).result(LIMIT_S)


def test_one_that_takes_long_is_compiled_where_the_next_lane_has_the_time() -> None:
    with compiling(SHORT, SHORT._replace(cpu_s=30.0, max_waiting=1)) as compiler:
        compiler.check(RANGES).result(LIMIT_S)


def test_one_that_takes_much_memory_is_compiled_where_the_next_lane_has_it() -> None:
    with compiling(ONE._replace(memory_mib=1), ONE._replace(max_waiting=1)) as compiler:
        assert compiler.check(RANGES).result(LIMIT_S).memory_mib == ONE.memory_mib


def test_one_for_which_the_next_lane_has_no_room_may_be_sent_again() -> None:
    with compiling(SHORT, SHORT._replace(cpu_s=30.0)) as compiler:
        for _ in range(2):
            with pytest.raises(CompilerFull, match="too many that do are waiting"):
                compiler.check(LONG).result(LIMIT_S)


def test_those_who_ask_at_the_same_time_share_a_compilation() -> None:
    with compiling() as compiler:
        asked = [compiler.check(EASY) for _ in range(50)]
        assert len(compiler._waiting[EASY]) == 50
        assert len({each.result(LIMIT_S) for each in asked}) == 1


def test_a_structure_that_nobody_waits_for_gives_its_place_to_others() -> None:
    with compiling(ONE) as compiler:
        left = compiler.check(LONG)
        last = compiler.check(EASY)
        assert left.cancel()
        last.result(LIMIT_S)


def test_a_structure_that_was_left_can_be_asked_for_again() -> None:
    with compiling(ONE) as compiler:
        assert compiler.check(RANGES).cancel()
        compiler.check(RANGES).result(LIMIT_S)


def test_a_structure_that_was_left_while_it_waited_is_not_compiled() -> None:
    """It would be refused, and the refusal kept, before the last one has its turn."""
    bad = Structure.regex("[")
    with compiling(ONE) as compiler:
        first, left, last = (compiler.check(each) for each in (LONG, bad, EASY))
        assert left.cancel() and first.cancel()
        last.result(LIMIT_S)
        assert bad not in compiler._refused


def test_no_process_runs_before_the_first_structure_and_none_after_the_end() -> None:
    calls = []
    compiler = StructureCompiler(lambda: calls.append(1) or vocabulary())  # type: ignore[func-returns-value]
    compiler.close()
    assert calls == []
    with compiling() as compiler:
        compiler.check(EASY).result(LIMIT_S)
        process = the_process()
    assert has_ended(process) and process not in children_of(os.getpid())
    with pytest.raises(CompilerEnded, match="closed"):
        compiler.check(EASY).result(LIMIT_S)


def test_a_process_that_is_killed_fails_what_waits_and_the_next_structure_starts_another() -> None:
    with compiling(ONE) as compiler:
        compiler.check(EASY).result(LIMIT_S)
        process = the_process()
        os.kill(process, signal.SIGSTOP)
        waiting = compiler.check(Structure.regex("[0-9]{4}"))
        os.kill(process, signal.SIGKILL)
        with pytest.raises(CompilerEnded, match="exit code -9"):
            waiting.result(LIMIT_S)
        compiler.check(EASY).result(LIMIT_S)
        assert the_process() != process


@pytest.mark.long
def test_close_ends_a_process_that_reads_nothing() -> None:
    with compiling(ONE) as compiler:
        compiler.check(EASY).result(LIMIT_S)
        process = the_process()
        os.kill(process, signal.SIGSTOP)
        # More than the socket takes, so that the thread which sends them waits.
        waiting = [compiler.check(Structure.regex("a" * 200_000 + str(i))) for i in range(20)]
    assert has_ended(process)
    with pytest.raises(CompilerEnded):
        waiting[-1].result(LIMIT_S)


def test_a_vocabulary_that_cannot_be_read_fails_what_waits() -> None:
    def broken() -> Vocabulary:
        raise OSError("no such file")

    compiler = StructureCompiler(broken)
    with pytest.raises(CompilerEnded, match="no such file"):
        compiler.check(EASY).result(LIMIT_S)
    compiler.close()


PARENT = """
import sys
from tests.test_compiler import *
with compiling() as compiler:
    compiler.check(EASY).result(LIMIT_S)
    print(the_process(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def parent_of_one() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that compiles structures, and the id of its process in the middle."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        yield parent, int(parent.stdout.readline())


@pytest.mark.long
def test_the_process_does_not_hold_what_this_one_reads() -> None:
    """A writer learns that its reader has ended only once no process holds the other end."""
    with parent_of_one() as (_, process):
        assert os.readlink(f"/proc/{process}/fd/0") == os.devnull


@pytest.mark.long
def test_no_process_outlives_one_that_is_killed() -> None:
    with parent_of_one() as (parent, process):
        descriptor = os.pidfd_open(process)
        parent.kill()
        ready, _, _ = select([descriptor], [], [], LIMIT_S)  # it can be read once that has ended
        os.close(descriptor)
    assert ready and has_ended(process)
