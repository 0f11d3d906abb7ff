"""The changes that mutate.py draws from: each makes another program, and texts stay the same."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from tests.tools.mutations import assignments, changed_lines, sites

FORGE = Path(__file__).resolve().parents[2] / "forge"


def changes(source: str) -> set[str]:
    """The one line that each change leaves instead of another."""
    text = dedent(source).encode()
    return {
        changed_lines(text, site.replaced(text, choice))[2].strip()
        for site in sites("a.py", text)
        for choice in site.choices
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a is b # is", {"x = a is not b # is"}),
        ("x = (a) and (b or c)", {"x = (a) or (b or c)", "x = (a) and (b and c)"}),
        ("x = not a", {"x = (a)"}),
        ("x += y", {"x -= y", "pass"}),
        ("x //= y", {"x *= y", "x /= y", "pass"}),
        ("x = True", {"x = False"}),
        ("x = 0.0", {"x = 1.0"}),
        ("x = 'name'", {"x = 'XXname'"}),
        ("f(a, b)", {"f(b, a)", "pass"}),
        ("f(a, key=b)", {"f(a, )", "pass"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = a[b:c]", {"x = a[:c]", "x = a[b:]"}),
        ("x.y = z", {"pass"}),
        ("del x", {"pass"}),
        ("assert a, 'text'", {"assert not (a), 'text'"}),
        ("x = [a for a in b if c]", {f"x = [a for a in b if {c}]" for c in ("not (c)", "True")}),
        ("x = a if b else c", {f"x = a if {t} else c" for t in ("not (b)", "True", "False")}),
    ],
)
def test_each_kind_of_source_has_its_changes(source: str, expected: set[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "x: 'Word'",
        "x = 'a text with spaces'",
        "x = f'{a + 1}'",
        "__all__ = ['a', 'b']",
        "import a",
        "Kind = Literal['a', 'b']",
        "@dataclass(frozen=True)\nclass A:\n    pass",
        "if TYPE_CHECKING:\n    x = 1",
        "def f(a: int = None) -> 'A':\n    pass",
    ],
)
def test_what_a_program_does_not_compute_with_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_strings_of_errors_and_of_logs_are_left_alone() -> None:
    assert changes("raise Error('word')") == {"pass"}
    assert changes("log.info('word')") == {"pass"}


def test_a_site_knows_its_function_and_the_lines_that_run_it() -> None:
    source = b"class A:\n    def f(self, a=1):\n        b = (\n            2\n        )\n"
    default, inner = sites("a.py", source)
    assert (default.function, default.lines) == ("A.f", (3, 4, 5))
    assert (inner.function, inner.lines) == ("A.f", (3, 4, 5))


def test_what_runs_at_import_knows_the_names_that_it_sets() -> None:
    [site] = sites("a.py", b"LIMIT = 3\n")
    assert (site.function, site.used) == ("", ("LIMIT",))


@pytest.mark.parametrize("path", ["blocks.py", "server/tools.py", "models/hf/sampling/sampler.py"])
def test_every_change_is_another_program(path: str) -> None:
    """One site in thirty: parsing is what takes the time."""
    source = (FORGE / path).read_bytes()
    before = ast.dump(ast.parse(source))
    for site in sites(path, source)[::30]:
        for choice in site.choices:
            after = ast.dump(ast.parse(site.replaced(source, choice)))
            assert after != before, (site, choice)


def test_a_condition_of_several_lines_runs_where_any_of_them_does() -> None:
    source = b"def f():\n    if (\n        a\n        and b\n    ):\n        pass\n"
    assert {site.lines for site in sites("a.py", source)} == {(2, 3, 4, 5)}


def test_values_that_are_made_at_import_are_known_with_their_lines() -> None:
    source = "A = 1\nB: int = (\n    A\n)\nclass C:\n    d = 1\ndef f():\n    e = B\n"
    assert assignments(source) == [({1}, ("A",)), ({2, 3, 4}, ("B",))]
