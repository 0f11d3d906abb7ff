"""`forge learn`: the list, the copy of a stub, and what a check leaves in the learner's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forge.cli.main import main
from forge.learn.catalogue import EXERCISES, find_exercise
from forge.learn.command import PROGRESS_FILE, describe_state, list_exercises

REFERENCES = Path(__file__).parent / "references"
ATTENTION = find_exercise("10")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The learner's folder, in an empty current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "learn"


def test_the_list_has_a_line_for_each_exercise(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[: len(EXERCISES)]] == [
        [str(each.number), "new"] for each in EXERCISES
    ]
    assert lines[2].endswith("Write a block pool: look up a prefix, evict a block, fork a table")
    assert not folder.exists()


def test_a_stub_is_copied_once_and_never_over_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", "3"]) == 0
    path = folder / "03_pool.py"
    assert path.read_text() == find_exercise("3").read_stub()
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "read      wiki/Paging.md, in the repository of forge",
        "write     learn/03_pool.py",
        "check     forge learn 3 --check",
    ]
    path.write_text("mine")
    assert main(["learn", "3"]) == 0
    assert path.read_text() == "mine"
    assert "which is there already and was left as it is" in capsys.readouterr().out
    assert describe_state(find_exercise("3"), folder) == "started"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["learn", "11"], "forge learn: exercise: there is no number '11'. Give 1 to 10"),
        (
            ["learn", "3", "--check"],
            "forge learn: exercise: there is no file learn/03_pool.py. `forge learn 3` writes it",
        ),
        (
            ["learn", "--check"],
            "forge learn: exercise: there is no number. Give one: forge learn 3 --check",
        ),
        (
            ["learn", "3", "--seed", "1"],
            "forge learn: seed: only a check has one. Add --check, or leave it out",
        ),
        (
            ["learn", "3", "--check", "--seed", "x"],
            "forge learn: seed: 'x' is not from 0 to 65535. Give what a check printed",
        ),
        (
            ["learn", "3", "--check", "--seed", "9" * 5000],
            f"forge learn: seed: '{'9' * 64}' is not from 0 to 65535. Give what a check printed",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == line + "\n"
    assert not folder.exists()


@pytest.mark.parametrize("words", [["learn", "3"], ["learn", "3", "--check"]])
def test_what_is_no_folder_or_no_file_is_to_be_moved(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("a file")
    assert main(words) == 2
    assert capsys.readouterr().err == ("forge learn: exercise: learn is no folder. Move it away\n")
    folder.unlink()
    (folder / "03_pool.py").mkdir(parents=True)
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "forge learn: exercise: learn/03_pool.py is no file. Move it away\n"
    )


def test_a_folder_that_cannot_be_written_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.symlink_to("missing/folder")
    assert main(["learn", "3"]) == 2
    error = capsys.readouterr().err
    assert "learn/03_pool.py cannot be written" in error
    assert error.endswith("Change to a folder of your own\n")


def test_what_cannot_be_read_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A symbolic link to a name that is too long cannot be read by any user."""
    folder.mkdir()
    (folder / "03_pool.py").symlink_to("x" * 300)
    assert list_exercises(folder)[2].startswith(" 3  unread")
    assert main(["learn", "3", "--check"]) == 2
    assert "learn/03_pool.py cannot be read: " in capsys.readouterr().err


@pytest.mark.long
def test_a_pass_that_cannot_be_noted_is_a_pass(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / PROGRESS_FILE).mkdir(parents=True)
    shutil.copy(REFERENCES / "attention.py", folder / "10_attention.py")
    assert main(["learn", "10", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("passed    ")
    assert lines[-1].startswith("note      the answer is right, but this could not be noted: ")


@pytest.mark.long
def test_a_pass_is_remembered_until_the_file_changes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["learn", "10"])
    assert main(["learn", "10", "--check", "--seed", "5"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("    raise NotImplementedError")
    assert describe_state(ATTENTION, folder) == "started"
    path = folder / "10_attention.py"
    shutil.copy(REFERENCES / "attention.py", path)
    assert main(["learn", "10", "--check", "--seed", "5"]) == 0
    assert capsys.readouterr().out.endswith("splits are as their positions at once\nseed      5\n")
    assert list_exercises(folder)[9].startswith("10  passed")
    path.write_text(path.read_text() + "\n")
    assert describe_state(ATTENTION, folder) == "changed"
    assert main(["learn", "10", "--check"]) == 0, "a fresh seed"
    assert sorted(each.name for each in folder.iterdir()) == ["10_attention.py", PROGRESS_FILE]


def test_a_number_may_be_written_as_in_the_name_of_its_file() -> None:
    assert find_exercise("03") is find_exercise("3")


def test_damaged_progress_is_none(folder: Path) -> None:
    folder.mkdir()
    (folder / "10_attention.py").write_text("")
    (folder / PROGRESS_FILE).write_text("{")
    assert describe_state(ATTENTION, folder) == "started"
