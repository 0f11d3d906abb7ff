"""Changes of a source, planted in a process that has imported it: functions get other code.

    source ──► changed_functions ──► [(old code, new code), ...]      or None
                                              │
                 ImportedFunctions.replace ◄──┘      each function with the old code gets the new

Code is compared without line numbers: a change of one function moves those of all after it. The
outermost function that differs is replaced, because each call of it makes its inner ones.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

CodeChange = tuple[CodeType, CodeType]


def changed_functions(old: CodeType, new: CodeType) -> list[CodeChange] | None:
    """Return the code of each outermost function that differs between two modules.

    None where more differs: what runs at import, as class bodies, decorators and default values.
    """
    try:
        return list(_compare_scopes(old, new))
    except ValueError:
        return None


def _compare_scopes(old: CodeType, new: CodeType) -> Iterator[CodeChange]:
    """Yield the functions that differ in the body of a module or class.

    Raises ValueError where the body itself differs.
    """
    if _own_parts(old) != _own_parts(new):
        raise ValueError(f"{old.co_qualname} runs at import")
    for one, other in zip(_inner_code(old), _inner_code(new), strict=True):
        if not one.co_flags & CO_OPTIMIZED:
            yield from _compare_scopes(one, other)
        elif _parts(one) != _parts(other):
            yield one, other


def _inner_code(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _own_parts(code: CodeType) -> tuple[Any, ...]:
    """Return what code consists of, without line numbers and inner code."""
    # Equal numbers of two types are two constants.
    constants = [
        each.co_name if isinstance(each, CodeType) else (type(each), repr(each))
        for each in code.co_consts
    ]
    return (
        *(code.co_code, code.co_exceptiontable, constants, code.co_names, code.co_flags),
        *(code.co_varnames, code.co_cellvars, code.co_freevars),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
    )


def _parts(code: CodeType) -> tuple[Any, ...]:
    return (_own_parts(code), [_parts(each) for each in _inner_code(code)])


class ImportedFunctions:
    """The functions that exist now, by file and code."""

    def __init__(self) -> None:
        paths: dict[str, Path] = {}
        self._functions: dict[tuple[Path, CodeType], list[FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType:
                code = each.__code__
                # A link to a folder gives its files a second name.
                if code.co_filename not in paths:
                    paths[code.co_filename] = Path(code.co_filename).resolve()
                self._functions[paths[code.co_filename], code].append(each)

    def replace(self, path: Path, changes: list[CodeChange]) -> bool:
        """Replace code of functions in a file. Return False, and change none, if one is missing."""
        found = [self._functions.get((path, old), []) for old, _ in changes]
        if not all(found) or any(old.co_freevars != new.co_freevars for old, new in changes):
            return False
        for functions, (_, new) in zip(found, changes, strict=True):
            for function in functions:
                function.__code__ = new
        return True
