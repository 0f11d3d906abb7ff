"""Grading: load a learner's file, run the check on it, and describe what failed.

Owns the text of a result and the limits of time and memory. Runs as a process of its own, because
the file may not end or may end its interpreter:

    python -m forge.learn.grading NUMBER FILE SEED LIMIT_S PIPE    exit status: PASSED or NOT_YET

The limit is of CPU time, so that a slow machine does not fail an answer. The parent holds the other
end of the pipe: this process ends when the parent does.

Tracebacks are short: the lines of the learner's file, and the error.
"""

from __future__ import annotations

import linecache
import os
import resource
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from math import ceil
from pathlib import Path
from threading import Thread
from types import FrameType, ModuleType
from typing import NamedTuple

from forge.learn.answers import WrongAnswer
from forge.learn.catalogue import Exercise, find_exercise

LEARNER_MODULE = "learner_file"

PASSED, NOT_YET = 80, 81
"""Exit statuses that no interpreter has by itself: a file that ends the process has not passed."""


MAX_MEMORY_BYTES = 4 * 2**30
"""Address space of a check. Those of the references take less than a tenth."""

SPARE_BYTES = 2**28
"""Address space for the description of an error, where a check had all of it."""

SPARE_S = 1
"""CPU seconds after the limit at which the process is killed, since the limit did not end it."""


class TimeLimitExceeded(BaseException):
    """The time of the check is over. No `except Exception` in a learner's file catches it."""


class Grade(NamedTuple):
    """Result of a check: whether it passed, and the lines to print."""

    passed: bool
    text: str


def load_answer(exercise: Exercise, path: Path) -> ModuleType:
    """Return the learner's file as a module.

    Raises WrongAnswer where a name is missing, and whatever the file raises.
    """
    module = ModuleType(LEARNER_MODULE)
    module.__file__ = str(path)
    sys.modules[LEARNER_MODULE] = module  # dataclasses look their module up
    linecache.checkcache(str(path))
    # From bytes: `compile` reads a byte order mark and a coding line as `python` does.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    missing = [name for name in exercise.names if not hasattr(module, name)]
    if missing:
        raise WrongAnswer(
            f"{path} has no {', '.join(missing)}",
            f"Keep the names of the stub. Move your file away, and `forge learn {exercise.number}` "
            "writes the stub again",
        )
    return module


def grade(exercise: Exercise, path: Path, seed: int) -> Grade:
    """Run the check of the exercise on the file, and return what it found."""
    repeat = f"repeat    forge learn {exercise.number} --check --seed {seed}"
    try:
        note = exercise.load_check()(load_answer(exercise, path), seed)
    except WrongAnswer as error:
        hint = f"\nhint      {error.hint}" if error.hint else ""
        return Grade(False, f"not yet   {error.what}{hint}\n{repeat}")
    except NotImplementedError as error:
        where = "\n".join(_describe_frames(error, path))
        return Grade(False, f"not yet   a function of the stub is still to be written\n{where}")
    except SyntaxError as error:
        line = f"\n    {error.text.strip()}" if error.text else ""
        where = f"{path}, line {error.lineno}" if error.lineno else str(path)
        what = f"{where}: {error.msg}{line}"
        return Grade(False, f"not yet   the file does not compile\n{what}")
    except TimeLimitExceeded as error:
        where = "\n".join(_describe_frames(error, path)[-2:])
        what = (
            f"the check did not end within {error} s of CPU time: is there a loop without an end?"
        )
        return Grade(False, f"not yet   {what}\n{where}\n{repeat}")
    except MemoryError as error:
        if resource.getrlimit(resource.RLIMIT_AS)[0] == MAX_MEMORY_BYTES:
            _limit_memory(MAX_MEMORY_BYTES + SPARE_BYTES)
        where = "\n".join(_describe_frames(error, path)[-2:])
        what = f"the check needed more memory than its {MAX_MEMORY_BYTES / 2**30:g} GiB"
        return Grade(False, f"not yet   {what}\n{where}\n{repeat}")
    except BaseException as error:  # SystemExit too: the file does not end the check
        lines = _describe_error(error, path)
        return Grade(False, "\n".join(["not yet   the file raised an error", *lines, repeat]))
    return Grade(True, f"passed    {note}\nseed      {seed}")


def _describe_error(error: BaseException, path: Path) -> list[str]:
    """Return the lines of the learner's file on the way to an error, and the error.

    An error that the engine has wrapped is described by its cause in the file.
    """
    for each in _causes(error):
        frames = _describe_frames(each, path)
        if frames:
            return [*frames, _show_error(each)]
    note = "The check could not use what the file returned. Compare it with the stub's docstring."
    return [_show_error(error), note]


def _show_error(error: BaseException) -> str:
    """Return the type of an error and its text, which the file's own class may not return."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be shown"


def _causes(error: BaseException) -> list[BaseException]:
    """Return the errors that led to this one, the first one first, then itself.

    An error may be its own cause: each is listed once.
    """
    causes: dict[int, BaseException] = {}
    origin: BaseException | None = error
    while origin is not None and id(origin) not in causes:
        causes[id(origin)] = origin
        origin = origin.__cause__ or origin.__context__
    return [*causes.values()][::-1]


def _describe_frames(error: BaseException, path: Path) -> list[str]:
    """Return two lines for each of the last frames of the learner's file."""
    frames = deque(
        (each for each in traceback.walk_tb(error.__traceback__) if _is_of(path, each[0])),
        maxlen=4,  # of a recursion without an end there are millions
    )
    return [
        f"{f.filename}, line {f.lineno}, in {f.name}\n    {f.line}"
        for f in traceback.StackSummary.extract(iter(frames))
    ]


def _is_of(path: Path, frame: FrameType) -> bool:
    return frame.f_code.co_filename == str(path)


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space. macOS has no such limit."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def _limit_time(limit_s: float) -> None:
    """Let a signal kill the process soon after the limit, if TimeLimitExceeded does not end it."""
    seconds = ceil(time.process_time() + limit_s) + SPARE_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _end_with_parent(pipe: int) -> None:
    """End the process once the parent's end of the pipe is closed."""
    os.read(pipe, 1)
    os._exit(NOT_YET)


def main(words: list[str]) -> int:
    """Grade a file within the limits, print the result and return the exit status."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded(limit_s)

    number, path, seed, limit_s, pipe = words
    # The file may close or replace sys.stdout, and an error's text may be no valid Unicode.
    first_stdout = sys.stdout
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    Thread(target=_end_with_parent, args=(int(pipe),), daemon=True).start()
    sys.path.append(str(Path(path).resolve().parent))  # modules that the learner keeps next to it
    exercise = find_exercise(number)
    _limit_memory(MAX_MEMORY_BYTES)
    _limit_time(float(limit_s))
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, float(limit_s))
    result = grade(exercise, Path(path), int(seed))
    signal.setitimer(signal.ITIMER_PROF, 0)
    for stream in (first_stdout, sys.stdout):
        with suppress(Exception):
            stream.flush()  # what the file has printed comes first
    print(result.text, file=output, flush=True)
    return PASSED if result.passed else NOT_YET


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
