"""The table of docs/Clients.md has the clients of tests/clients, and each shows its commands."""

from __future__ import annotations

from tests.clients.client_pages import ADDRESS, read_rows, shown_commands
from tests.clients.client_scripts import clients


def test_the_table_of_clients_has_each_script_with_its_version() -> None:
    """To correct it: make test-clients ARGS=--write."""
    expected = {client.name: client.row("passed").write() for client in clients()}
    assert read_rows() == expected
    assert len(expected) >= 16


def test_each_client_shows_commands_for_the_address_of_the_pages() -> None:
    for client in clients():
        commands = shown_commands(client.name, "other:1")
        assert "http://other:1" in commands, client.name
        assert ADDRESS not in commands, client.name


def test_a_client_is_pinned_to_one_version() -> None:
    """A floating version would make a failure that no change of forge explains."""
    for client in clients():
        assert all("==" in requirement for requirement in client.requirements), client.name
        assert client.done, client.name
