"""tests/tools/mutants.py: which mutants its arguments choose, and that sources and tests exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.tools.mutants import (
    ROOT,
    Mutant,
    choose_mutants,
    link_tree,
    main,
    order_mutants,
    parse_arguments,
    plant_mutant,
    read_mutants,
    remove_mutant,
)

MUTANTS = [Mutant(name, "", "", "", "") for name in ("leak a block", "leak a slot", "tie breaks")]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["leak a block", "leak a slot", "tie breaks"]),
        (["leak"], ["leak a block", "leak a slot"]),
        (["slot", "tie"], ["leak a slot", "tie breaks"]),
    ],
)
def test_mutants_are_chosen_by_a_word_of_their_name(words: list[str], names: list[str]) -> None:
    assert [mutant.name for mutant in choose_mutants(MUTANTS, words)] == names


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["leek"], "no mutant's name has 'leek'. Close to it: leak"),
        (["tie", "leak a blok"], "no mutant's name has 'leak a blok'. Close to it: leak a block"),
        (["xyz"], "no mutant's name has 'xyz'. One is: leak a block"),
    ],
)
def test_a_word_of_no_name_is_refused_with_close_names(words: list[str], remedy: str) -> None:
    with pytest.raises(ValueError) as refused:
        choose_mutants(MUTANTS, words)
    assert str(refused.value).startswith(remedy)


def test_a_word_of_no_name_runs_no_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["salt not hased"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Close to it: salt not hashed" in printed.err


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ([], (["mutants.toml"], [], False)),
        (["leak", "tie"], (["mutants.toml"], ["leak", "tie"], False)),
        (["mutants_hf.toml", "leak"], (["mutants_hf.toml"], ["leak"], False)),
        (["leak", "--tests-passed"], (["mutants.toml"], ["leak"], True)),
    ],
)
def test_arguments_are_files_words_of_names_and_whether_the_tests_have_passed(
    words: list[str], arguments: tuple[list[str], list[str], bool]
) -> None:
    assert parse_arguments(words) == arguments


def test_mutants_that_hang_start_first_and_none_is_left_out() -> None:
    mutants = [Mutant(str(n), "", "", "", "", hangs=n % 5 == 4) for n in range(20)]
    order = order_mutants(mutants)
    assert [mutant.hangs for mutant in order] == [True] * 4 + [False] * 16
    assert sorted(order) == sorted(mutants)


def read_tree(tree: Path) -> dict[str, str]:
    files = (path for path in tree.rglob("*") if path.is_file())
    return {path.relative_to(tree).as_posix(): path.read_text("utf-8") for path in files}


def test_a_tree_is_unchanged_after_its_mutant_is_removed(tmp_path: Path) -> None:
    """What its test has compiled and drawn is removed too, and the first tree never changes."""
    unchanged = tmp_path / "unchanged"
    (unchanged / "a" / "__pycache__").mkdir(parents=True)
    (unchanged / "a" / "b.py").write_text("x = 1\n")
    (unchanged / "a" / "__pycache__" / "b.cpython-311.pyc").write_text("x = 1, compiled")
    before = read_tree(unchanged)
    tree = link_tree(unchanged, tmp_path)
    assert read_tree(tree) == before

    mutant = Mutant("two", "a/b.py", "= 1", "= 2", "")
    assert plant_mutant(mutant, tree) == ""
    assert read_tree(tree) == {"a/b.py": "x = 2\n"}
    (tree / "a" / "__pycache__" / "b.cpython-311.pyc").write_text("x = 2, compiled")
    (tree / ".hypothesis").mkdir()
    (tree / ".hypothesis" / "example").write_text("2")
    assert read_tree(unchanged) == before

    remove_mutant(mutant, unchanged, tree)
    assert read_tree(tree) == read_tree(unchanged) == before
    assert "stands 0 times" in plant_mutant(mutant._replace(old="= 3"), tree)


@pytest.mark.parametrize("path", ["mutants.toml", "mutants_hf.toml"])
def test_the_source_of_each_mutant_occurs_once(path: str) -> None:
    counts = {m.name: (ROOT / m.path).read_text("utf-8").count(m.old) for m in read_mutants(path)}
    assert {name: count for name, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("path", ["mutants.toml", "mutants_hf.toml"])
def test_the_test_of_each_mutant_exists(path: str) -> None:
    missing = []
    for mutant in read_mutants(path):
        file, _, test = mutant.test.partition("::")
        name = test.partition("[")[0]
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text("utf-8"):
            missing.append(mutant.test)
    assert missing == []


def test_the_lines_of_each_equivalent_change_exist() -> None:
    tables = tomllib.loads((ROOT / "tests/tools/mutate.toml").read_text("utf-8"))
    missing = []
    for entry in tables["equivalent"]:
        source = (ROOT / entry["path"]).read_text("utf-8")
        lines = "\n".join(line.strip() for line in source.splitlines())
        if f"\n{entry['old']}\n" not in lines:
            missing.append(entry["old"])
    assert missing == []
