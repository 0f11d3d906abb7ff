"""The table of docs/Clients.md has the clients of tests/clients, and each shows its commands."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the modules of pages and of scripts. Clients import them from their own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "clients"))
    return importlib.import_module("client_pages"), importlib.import_module("client_scripts")


def test_the_table_of_clients_has_each_script_with_its_version(modules: tuple[Any, Any]) -> None:
    """To correct it: make test-clients ARGS=--write."""
    pages, scripts = modules
    expected = {client.name: client.row("passed").write() for client in scripts.clients()}
    assert pages.read_rows() == expected
    assert len(expected) >= 16


def test_each_client_shows_commands_for_the_address_of_the_pages(modules: tuple[Any, Any]) -> None:
    pages, scripts = modules
    for client in scripts.clients():
        commands = pages.shown_commands(client.name, "other:1")
        assert "http://other:1" in commands, client.name
        assert pages.ADDRESS not in commands, client.name


def test_a_client_is_pinned_to_one_version(modules: tuple[Any, Any]) -> None:
    """A floating version would make a failure that no change of forge explains."""
    _, scripts = modules
    for client in scripts.clients():
        assert all("==" in requirement for requirement in client.requirements), client.name
        assert client.done, client.name
