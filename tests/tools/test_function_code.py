"""tests/tools/function_code.py: changes of a source that are changes of functions alone."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import CodeType

import pytest

from tests.tools.function_code import ImportedFunctions, changed_functions

SOURCE = """
from contextlib import contextmanager
from functools import cache

LIMIT = 3

class Pool:
    size = 4

    def __init__(self, count=2):
        self.count = count

    @property
    def num_free(self):
        return self.size - self.count

@cache
def double(x):
    return [2 * each for each in (x,)][0]

@contextmanager
def opened():
    yield LIMIT

SQUARES = [x * x for x in range(3)]
"""


def compiled(source: str, path: str = "a.py") -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def changes(old: str, new: str) -> list[str] | None:
    """Return the names of the functions that differ after a replacement."""
    assert SOURCE.count(old) == 1
    found = changed_functions(compiled(SOURCE), compiled(SOURCE.replace(old, new)))
    return None if found is None else [each.co_qualname for each, _ in found]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("self.size - self.count", "self.size + self.count", ["Pool.num_free"]),
        ("return self.size - self.count", "x = 1\n        return x", ["Pool.num_free"]),
        ("2 * each", "2.0 * each", ["double"]),
        ("yield LIMIT", "yield 3", ["opened"]),
        ("LIMIT = 3", "LIMIT = 3.0", None),
        ("size = 4", "size = 5", None),
        ("count=2", "count=1", None),
        ("@cache\n", "", None),
        ("LIMIT = 3", "LIMIT = 3  # of a pool\n\n", []),
    ],
)
def test_only_functions_differ_or_more(old: str, new: str, names: list[str] | None) -> None:
    assert changes(old, new) == names


def test_functions_that_exist_get_the_new_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properties, cached functions and objects that exist have it at once."""
    path = tmp_path / "module_of_a_pool.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = import_module(path.stem)
    monkeypatch.delitem(sys.modules, path.stem)
    pool = module.Pool()
    functions = ImportedFunctions()
    text = SOURCE.replace("self.size - ", "self.size * ").replace("2 * each", "3 * each")
    found = changed_functions(compiled(SOURCE, str(path)), compiled(text, str(path)))
    assert found is not None and len(found) == 2
    assert functions.replace(path, found)
    assert (pool.num_free, module.double(5)) == (8, 15)
    assert not functions.replace(path.with_name("other.py"), found)
