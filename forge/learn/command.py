"""The command `forge learn`: list the exercises, copy the stub of one, check what was written.

Owns the learner's folder, `learn` in the current one. Knows no exercise's content: a file is
graded in another process, which a second time limit ends whatever the file does.

    forge learn             each exercise, and where the learner stands
    forge learn 3           the task; copies the stub to learn/03_pool.py unless that is there
    forge learn 3 --check   grades learn/03_pool.py on fresh cases
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import forge
from forge.cli.parser import Parser
from forge.cli.settings import Settings
from forge.errors import InvalidConfig
from forge.learn.catalogue import EXERCISES, Exercise, find_exercise
from forge.learn.grading import NOT_YET, PASSED

FOLDER = Path("learn")
"""The learner's folder, in the current one."""

PROGRESS_FILE = "passed.json"
"""Number of an exercise -> digest of the file that passed its check."""

LIMIT_S = 10.0
"""CPU seconds of a check. Those of the references take one or two."""

KILL_LIMIT_S = 120.0
"""Seconds after which a check's process is killed: the file runs code that no signal interrupts, or
sleeps."""

PAGE = "wiki/Exercises.md"
MAX_SEED = 2**16


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `forge learn`."""
    parser.add_argument(
        "exercise", nargs="?", metavar="N", help="number of an exercise; without it all are listed"
    )
    parser.add_argument("--check", action="store_true", help="grade the file that was written")
    parser.add_argument(
        "--seed", metavar="N", help="cases of an earlier check, which printed it (default: fresh)"
    )
    parser.set_defaults(run=learn, options=(), sources={}, parser=parser)


def learn(args: argparse.Namespace, settings: Settings) -> int:
    """List the exercises, or print a task and copy its stub, or check a file."""
    if args.exercise is None:
        if args.check or args.seed is not None:
            raise InvalidConfig("exercise", "there is no number", "Give one: forge learn 3 --check")
        print("\n".join(list_exercises(FOLDER)))
        return 0
    exercise = find_exercise(args.exercise)
    if args.check:
        return check_file(exercise, FOLDER, parse_seed(args.seed))
    if args.seed is not None:
        raise InvalidConfig("seed", "only a check has one", "Add --check, or leave it out")
    print("\n".join(begin(exercise, FOLDER)))
    return 0


def parse_seed(text: str | None) -> int:
    """Return the seed, a fresh one where none was given. Raises InvalidConfig."""
    if text is None:
        return secrets.randbelow(MAX_SEED)
    if not text.isdecimal() or len(text) > len(str(MAX_SEED)) or int(text) >= MAX_SEED:
        raise InvalidConfig(
            "seed", f"{text[:64]!r} is not from 0 to {MAX_SEED - 1}", "Give what a check printed"
        )
    return int(text)


def list_exercises(folder: Path) -> list[str]:
    """Return a line for each exercise: its number, its state in the folder, its title."""
    states = [describe_state(each, folder) for each in EXERCISES]
    lines = [
        f"{each.number:>2}  {state:<8}  {each.title}"
        for each, state in zip(EXERCISES, states, strict=True)
    ]
    return [*lines, "", f"begin with `forge learn 1`; {PAGE} has the path, with pages to read"]


def describe_state(exercise: Exercise, folder: Path) -> str:
    """Return the state of a file: new, started, passed, changed since it passed, or unread."""
    try:
        if not (path := folder / exercise.file_name).is_file():
            return "new"
        digest = _read_progress(folder).get(str(exercise.number))
        if digest is None:
            return "started"
        return "passed" if digest == _digest(path) else "changed"
    except OSError:
        return "unread"


def begin(exercise: Exercise, folder: Path) -> list[str]:
    """Return the task, after copying the stub where there is no file yet. Raises InvalidConfig."""
    path = folder / exercise.file_name
    is_new = not is_written(path)
    if is_new:
        try:
            folder.mkdir(exist_ok=True)
            path.write_text(exercise.read_stub(), encoding="utf-8")
        except OSError as error:
            raise InvalidConfig(
                "exercise", f"{path} cannot be written: {error}", "Change to a folder of your own"
            ) from error
    return [
        f"{exercise.number}  {exercise.task}",
        "",
        f"read      wiki/{exercise.page}.md, in the repository of forge",
        f"write     {path}{'' if is_new else ', which is there already and was left as it is'}",
        f"check     forge learn {exercise.number} --check",
    ]


def is_written(path: Path) -> bool:
    """Return whether there is a file at the path. Raises InvalidConfig for anything else there."""
    try:
        if path.parent.exists() and not path.parent.is_dir():
            raise InvalidConfig("exercise", f"{path.parent} is no folder", "Move it away")
        if path.exists() and not path.is_file():
            raise InvalidConfig("exercise", f"{path} is no file", "Move it away")
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from error


def check_file(exercise: Exercise, folder: Path, seed: int) -> int:
    """Grade the learner's file, print the result and note a pass. Returns the exit status.

    Raises InvalidConfig where there is no file.
    """
    path = folder / exercise.file_name
    if not is_written(path):
        remedy = f"`forge learn {exercise.number}` writes it"
        raise InvalidConfig("exercise", f"there is no file {path}", remedy)
    try:
        digest = _digest(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    status, text = run_grading(exercise, path, seed)
    print(text, end="")
    if status == PASSED:
        progress = {**_read_progress(folder), str(exercise.number): digest}
        try:
            (folder / PROGRESS_FILE).write_text(json.dumps(progress, indent=1), encoding="utf-8")
        except OSError as error:
            print(f"note      the answer is right, but this could not be noted: {error}")
    return 0 if status == PASSED else 1


def run_grading(
    exercise: Exercise,
    path: Path,
    seed: int,
    limit_s: float = LIMIT_S,
    kill_limit_s: float = KILL_LIMIT_S,
) -> tuple[int, str]:
    """Return the exit status and the output of the process that grades the file.

    The process ends with this one, which holds the other end of a pipe.
    """
    # The child finds this package whatever the current folder holds.
    paths = [str(Path(forge.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-P", "-m", "forge.learn.grading"]
    pipe, parent_end = os.pipe()
    try:
        run = subprocess.run(
            [*command, str(exercise.number), str(path), str(seed), f"{limit_s:g}", str(pipe)],
            env=environment,
            pass_fds=(pipe,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=kill_limit_s,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        what = f"not yet   the check did not end within {kill_limit_s:g} s, and was killed"
        return NOT_YET, f"{what}: is there a computation without an end?\n"
    finally:
        os.close(pipe)
        os.close(parent_end)
    if run.returncode == -signal.SIGXCPU:
        what = f"the check did not end within {limit_s:g} s of CPU time, and was killed"
        return NOT_YET, f"{run.stdout}not yet   {what}: is there a computation without an end?\n"
    # A file may end its process with the status of a pass, but then no result is printed.
    is_result = {
        PASSED: run.stdout.endswith(f"\nseed      {seed}\n"),
        NOT_YET: "not yet   " in run.stdout,
    }
    if not is_result.get(run.returncode):
        what = f"the file ended the process of the check, with status {run.returncode}"
        return NOT_YET, f"{run.stdout}not yet   {what}\n"
    return run.returncode, run.stdout


def _unreadable(path: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig("exercise", f"{path} cannot be read: {error}", "Change its permissions")


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _read_progress(folder: Path) -> dict[str, str]:
    """Return what has passed; nothing where the file of it is missing or damaged."""
    try:
        found = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
