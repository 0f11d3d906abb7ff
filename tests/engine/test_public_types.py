"""The types that users of the package see: no `Any`, and a constructor with every field."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import pytest

import forge
from forge import SamplingParams

CLASSES = [getattr(forge, name) for name in forge.__all__]


def annotations_of(cls: type) -> Iterator[tuple[str, object]]:
    """Yield (where, type) for the fields, properties and public methods of a class."""
    for name, hint in typing.get_type_hints(cls).items():
        yield name, hint
    for name, member in inspect.getmembers_static(cls):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        function = getattr(member, "fget", getattr(member, "__func__", member))
        if inspect.isfunction(function):
            for parameter, hint in typing.get_type_hints(function).items():
                yield f"{name}({parameter})", hint


def contains_any(hint: object) -> bool:
    """Return whether `Any` is the type or part of it."""
    if isinstance(hint, list | tuple):  # the parameters of a Callable
        return any(map(contains_any, hint))
    return hint is Any or any(map(contains_any, typing.get_args(hint)))


class Untyped(NamedTuple):
    """A class with `Any` in a field, in a property and in a method."""

    values: dict[str, list[Any]]

    @property
    def first(self) -> Any:
        """A value of unknown type."""
        return next(iter(self.values))

    def visit(self, callback: typing.Callable[[Any], None]) -> None:
        """Take a callback of unknown type."""


def test_a_public_name_is_of_the_module_that_type_checkers_read_it_from() -> None:
    """Type checkers read imports that Python does not run: it imports a name where it is read."""
    (declared,) = (
        node for node in ast.parse(inspect.getsource(forge)).body if isinstance(node, ast.If)
    )
    modules = {
        alias.name: node.module
        for node in declared.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert sorted(modules) == sorted(forge.__all__)
    assert {name: getattr(forge, name).__module__ for name in modules} == modules
    assert set(forge.__all__) <= set(dir(forge))
    with pytest.raises(AttributeError, match="module 'forge' has no attribute 'Scheduled'"):
        forge.Scheduled  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("cls", CLASSES, ids=forge.__all__)
def test_no_type_of_the_public_classes_is_any(cls: type) -> None:
    assert [where for where, hint in annotations_of(cls) if contains_any(hint)] == []


def test_the_search_finds_any_in_fields_properties_and_methods() -> None:
    found = {where for where, hint in annotations_of(Untyped) if contains_any(hint)}
    assert {"values", "first(return)", "visit(callback)"} <= found


def test_the_declared_constructor_has_the_fields_and_defaults_of_the_dataclass() -> None:
    """Type checkers read the declaration; Python runs the constructor that dataclass makes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(SamplingParams)))
    (declared,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    names = [argument.arg for argument in declared.args.args[1:]]
    defaults = [ast.literal_eval(default) for default in declared.args.defaults]
    assert list(zip(names, defaults, strict=True)) == [
        (field.name, field.default) for field in fields(SamplingParams)
    ]


def test_sequences_and_mappings_become_tuples() -> None:
    params = SamplingParams(
        logit_bias={3: 1.5, 1: -2.0}, allowed_token_ids=[4, 5], stop="end", stop_token_ids={7}
    )
    assert params.logit_bias == ((1, -2.0), (3, 1.5))
    assert params.allowed_token_ids == (4, 5)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (7,)
