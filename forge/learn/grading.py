"""Grading: load a learner's file, run the check on it, and describe what failed.

Owns the text of a result and the time limit. Runs as a process of its own, because the file may not
end or may end its interpreter:

    python -m forge.learn.grading NUMBER FILE SEED LIMIT_S    exit status: PASSED or NOT_YET

The limit is of CPU time, so that a slow machine does not fail an answer.

Tracebacks are short: the lines of the learner's file, and the error.
"""

from __future__ import annotations

import linecache
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

from forge.learn.answers import WrongAnswer
from forge.learn.catalogue import Exercise, find_exercise

LEARNER_MODULE = "learner_file"

PASSED, NOT_YET = 80, 81
"""Exit statuses that no interpreter has by itself: a file that ends the process has not passed."""


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
    source = path.read_text(encoding="utf-8")
    module = ModuleType(LEARNER_MODULE)
    module.__file__ = str(path)
    sys.modules[LEARNER_MODULE] = module  # dataclasses look their module up
    linecache.checkcache(str(path))
    exec(compile(source, str(path), "exec"), module.__dict__)
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
        line = (error.text or "").strip()
        what = f"{path}, line {error.lineno}: {error.msg}\n    {line}"
        return Grade(False, f"not yet   the file does not compile\n{what}")
    except TimeLimitExceeded as error:
        where = "\n".join(_describe_frames(error, path)[-2:])
        what = (
            f"the check did not end within {error} s of CPU time: is there a loop without an end?"
        )
        return Grade(False, f"not yet   {what}\n{where}\n{repeat}")
    except (Exception, SystemExit) as error:
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
            return [*frames, f"{type(each).__name__}: {each}"]
    note = "The check could not use what the file returned. Compare it with the stub's docstring."
    return [f"{type(error).__name__}: {error}", note]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that led to this one, the first one first, then itself."""
    origin = error.__cause__ or error.__context__
    if origin is not None:
        yield from _causes(origin)
    yield error


def _describe_frames(error: BaseException, path: Path) -> list[str]:
    """Return two lines for each frame of the learner's file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return [f"{f.filename}, line {f.lineno}, in {f.name}\n    {f.line}" for f in frames[-4:]]


def main(words: list[str]) -> int:
    """Grade a file within the time limit, print the result and return the exit status."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded(limit_s)

    number, path, seed, limit_s = words
    exercise = find_exercise(number)
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, float(limit_s))
    result = grade(exercise, Path(path), int(seed))
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(result.text)
    return PASSED if result.passed else NOT_YET


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
