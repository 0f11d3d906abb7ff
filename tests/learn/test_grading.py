"""What happens to files that are missing, broken, endless, or end their process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.learn.catalogue import find_exercise
from forge.learn.command import run_grading
from forge.learn.grading import NOT_YET, PASSED, grade

REFERENCE = Path(__file__).parent / "references" / "attention.py"
EXERCISE = find_exercise("10")


def write(folder: Path, join: str, before: str = "") -> Path:
    """Write the reference with another body of `join`, and return the file."""
    text = REFERENCE.read_text(encoding="utf-8")
    head = text.partition("def join(")[0]
    path = folder / "answer.py"
    path.write_text(f"{before}{head}def join(parts):\n    {join}\n", encoding="utf-8")
    return path


def test_an_error_is_described_by_the_lines_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "return parts[99]")
    text = grade(EXERCISE, path, 1).text
    assert text.splitlines()[1:4] == [
        f"{path}, line {len(path.read_text().splitlines())}, in join",
        "    return parts[99]",
        "IndexError: list index out of range",
    ]
    assert "forge/learn/checks" not in text
    assert text.endswith("repeat    forge learn 10 --check --seed 1")


def test_an_error_that_the_engine_wraps_is_described_by_its_cause(tmp_path: Path) -> None:
    path = tmp_path / "policy.py"
    path.write_text(
        "from forge.policy import FCFS\n\n\n"
        "def admit(waiting, context):\n    return context.blocks\n\n\n"
        "policy = FCFS._replace(admit=admit)\n"
    )
    text = grade(find_exercise("6"), path, 1).text
    assert f"{path}, line 5, in admit\n    return context.blocks\nAttributeError: " in text


def test_a_file_that_does_not_compile_is_described_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text("def join(parts:\n    pass\n")
    text = grade(EXERCISE, path, 1).text
    assert f"{path}, line 1: " in text and "does not compile" in text


def test_a_missing_function_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text("Part = tuple\n")
    text = grade(EXERCISE, path, 1).text
    assert f"{path} has no join" in text
    assert "`forge learn 10` writes the stub again" in text


@pytest.mark.parametrize("value", ["None", "'text'", "[1.0]", "(0.0, 0.0, 0.0)"])
def test_a_result_of_another_type_is_shown(value: str, tmp_path: Path) -> None:
    text = grade(EXERCISE, write(tmp_path, f"return {value}"), 1).text
    assert f"join returned {value}, which is no list of 3" in text


def test_a_file_that_ends_the_interpreter_has_not_passed(tmp_path: Path) -> None:
    result = grade(EXERCISE, write(tmp_path, "raise SystemExit(0)"), 1)
    assert not result.passed
    assert "in join\n    raise SystemExit(0)" in result.text


@pytest.mark.long
def test_the_process_of_a_check_prints_what_the_file_prints(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text("print('from the file')\n" + REFERENCE.read_text(encoding="utf-8"))
    status, text = run_grading(EXERCISE, path, 1)
    assert status == PASSED
    assert text.startswith("from the file\npassed    ")


@pytest.mark.long
def test_a_loop_without_an_end_is_stopped_and_its_line_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "\n    while True:\n        parts = list(parts)")
    status, text = run_grading(EXERCISE, path, 1, limit_s=0.5)
    assert status == NOT_YET
    assert "did not end within 0.5 s of CPU time" in text
    assert "in join\n    " in text and text.endswith("--check --seed 1\n")


@pytest.mark.long
@pytest.mark.parametrize("handler", ["except Exception:", "finally:"])
def test_no_exception_handler_of_the_file_hides_the_limit(handler: str, tmp_path: Path) -> None:
    loop = "\n    while True:\n        try:\n            parts = list(parts)\n        "
    loop += f"{handler}\n            pass"
    status, text = run_grading(EXERCISE, write(tmp_path, loop), 1, limit_s=0.5)
    assert status == NOT_YET and "did not end within 0.5 s of CPU time" in text


@pytest.mark.long
def test_what_no_signal_interrupts_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path, "time.sleep(1000)", before="import time\n")
    status, text = run_grading(EXERCISE, path, 1, limit_s=0.1, kill_limit_s=2)
    assert status == NOT_YET
    assert text.startswith("not yet   the check did not end within 2 s, and was killed")


@pytest.mark.long
def test_a_loop_that_ignores_the_signal_is_killed_by_the_limit_of_the_process(
    tmp_path: Path,
) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
    path = write(tmp_path, "\n    while True:\n        pass", before=ignore)
    status, text = run_grading(EXERCISE, path, 1, limit_s=0.1)
    assert status == NOT_YET
    assert "not yet   the check did not end within 0.1 s of CPU time, and was killed" in text


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit the address space")
def test_memory_is_limited_and_the_line_is_shown(tmp_path: Path) -> None:
    status, text = run_grading(EXERCISE, write(tmp_path, "return [0] * 10**9"), 1)
    assert status == NOT_YET
    assert text.startswith("not yet   the check needed more memory than its 4 GiB\n")
    assert "in join\n    return [0] * 10**9" in text


@pytest.mark.long
def test_the_process_of_a_check_ends_with_its_parent(tmp_path: Path) -> None:
    """The file opens a FIFO, which has no writer left once its process has ended."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = write(tmp_path, "time.sleep(1000)", f"import time\nf = open({str(fifo)!r}, 'w')\n")
    code = (
        "from pathlib import Path; from forge.learn.catalogue import find_exercise as find; "
        "from forge.learn.command import run_grading; "
        f"run_grading(find('10'), Path({str(path)!r}), 1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        reader = os.open(fifo, os.O_RDONLY)  # returns when the file has opened it
        parent.kill()
        parent.wait()
        assert select.select([reader], [], [], 30)[0], "the process is there after its parent"
        os.close(reader)
    finally:
        parent.kill()


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("raise KeyboardInterrupt('a')", "KeyboardInterrupt: a"),
        ("raise GeneratorExit('a')", "GeneratorExit: a"),
        ("raise Silent", "Silent, whose text cannot be shown"),
        ("error = ValueError('a'); raise error from error", "ValueError: a"),
    ],
)
def test_whatever_the_file_raises_is_described(raised: str, line: str, tmp_path: Path) -> None:
    before = "class Silent(Exception):\n    def __str__(self):\n        raise ValueError\n\n\n"
    result = grade(EXERCISE, write(tmp_path, raised, before), 1)
    assert not result.passed
    assert result.text.splitlines()[2:4] == [f"    {raised}", line]


def test_only_the_last_frames_of_a_recursion_are_shown(tmp_path: Path) -> None:
    text = grade(EXERCISE, write(tmp_path, "return join(parts)"), 1).text
    assert text.count("in join\n    return join(parts)") == 4
    assert "RecursionError: " in text


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"# coding: latin-1\n# \xe4\n"])
def test_a_file_is_decoded_as_python_does(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_bytes(head + REFERENCE.read_bytes())
    assert grade(EXERCISE, path, 1).passed


def test_a_null_byte_has_no_line(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_bytes(b"a = 1\0\n")
    text = grade(EXERCISE, path, 1).text
    assert "does not compile" in text and "None" not in text


@pytest.mark.long
@pytest.mark.parametrize("end", ["sys.stdout.close()", "sys.stdout = None", "sys.path.index(own)"])
def test_a_right_answer_passes_whatever_it_does_to_its_output(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module `own` lies next to the file."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "own.py").write_text("")
    path = tmp_path / "answer.py"
    end = "print('text', end='')\n" + end.replace("(own)", f"({str(tmp_path)!r})\nimport own")
    path.write_text(f"{REFERENCE.read_text(encoding='utf-8')}\nimport sys\n{end}\n")
    status, text = run_grading(EXERCISE, path, 1)
    assert status == PASSED, text
    assert "passed    40 rows" in text


@pytest.mark.long
def test_an_error_that_is_no_unicode_is_printed(tmp_path: Path) -> None:
    status, text = run_grading(EXERCISE, write(tmp_path, "raise ValueError('\\ud800')"), 1)
    assert status == NOT_YET
    assert "ValueError: \\ud800\n" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "status"),
    [("os._exit(0)", 0), (f"os._exit({PASSED})", PASSED), ("os.abort()", -signal.SIGABRT.value)],
)
def test_a_file_that_ends_its_process_has_not_passed(
    call: str, status: int, tmp_path: Path
) -> None:
    found, text = run_grading(EXERCISE, write(tmp_path, f"import os; {call}"), 1)
    assert found == NOT_YET
    assert text.endswith(f"the file ended the process of the check, with status {status}\n")
