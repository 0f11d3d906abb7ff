"""Several API keys: each is a tenant, which shares no cached block with another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forge.recording import parse_request, read_entries
from forge.request import Request
from forge.server.tenants import Tenants, tenant_name, tenant_salt
from tests.server.test_server import RunningServer, check_envelope, open_server

KEYS = ("sesame", "poppy")
PROMPT = "a prefix that is longer than a block of four tokens"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with open_server(api_keys=KEYS, num_blocks=1024) as running:
        yield running


def generate(server: RunningServer, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    return server.client.post("/generate", json=body, headers={"authorization": f"Bearer {key}"})


def num_cached_tokens(server: RunningServer, key: str, **fields: object) -> int:
    """Return how many tokens of the prompt were in the cache."""
    before = server.llm.status.num_cached_tokens
    assert generate(server, key, **fields).status_code == 200
    return server.llm.status.num_cached_tokens - before


def recorded_requests(file: Path) -> list[Request]:
    """Return the requests of a recording."""
    entries = (
        entry for _, entry in read_entries(file.read_text(encoding="utf-8").splitlines(True))
    )
    return [parse_request(entry["submit"]) for entry in entries if "submit" in entry]


def test_each_key_is_accepted_and_no_other(server: RunningServer) -> None:
    for key in KEYS:
        assert generate(server, key).status_code == 200
    for key in ("sesame,poppy", "sesam", "poppysesame", "y"):
        check_envelope(generate(server, key), 401, None, "invalid_api_key")


def test_a_tenant_is_named_by_a_digest_of_its_key() -> None:
    assert tenant_name("sesame") == "4ae74afb7aacfd42"
    assert len({tenant_name(key) for key in (*KEYS, "sesamE", "")}) == 4
    tenants = Tenants(KEYS)
    assert tenants.of_request(b"Bearer poppy") == tenant_name("poppy")
    assert tenants.of_request(b"Bearer sesame") == tenant_name("sesame")
    assert tenants.of_request(None) is tenants.of_request(b"Bearer x") is None
    assert Tenants(()).of_request(None) == Tenants(()).of_request(b"Bearer sesame") == ""


def test_two_keys_never_share_a_block_and_one_key_does(server: RunningServer) -> None:
    assert num_cached_tokens(server, "sesame") == 0
    assert num_cached_tokens(server, "poppy") == 0
    for key in KEYS:
        assert num_cached_tokens(server, key) >= 44


def test_a_salt_of_the_client_separates_requests_of_one_key_and_joins_none_of_two(
    server: RunningServer,
) -> None:
    for salt in ("a", "b", tenant_name("poppy"), tenant_name("sesame")):
        for key in KEYS:
            assert num_cached_tokens(server, key, cache_salt=salt) == 0
    assert num_cached_tokens(server, "sesame", cache_salt="a") >= 44
    assert num_cached_tokens(server, "sesame") == 0


def test_salts_of_two_tenants_differ_and_without_tenants_the_clients_is_kept() -> None:
    names = ["", *map(tenant_name, KEYS)]
    salts = {tenant_salt(name, salt) for name in names[1:] for salt in ("", "a", *names[1:])}
    assert len(salts) == 8
    assert [tenant_salt("", salt) for salt in ("", "a")] == ["", "a"]


def test_a_recording_has_the_name_of_a_tenant_and_no_key(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with open_server(api_keys=KEYS, record=str(file)) as server:
        generate(server, "poppy", cache_salt="a")
    written = file.read_text(encoding="utf-8")
    assert "poppy" not in written and "sesame" not in written
    (request,) = recorded_requests(file)
    name = tenant_name("poppy")
    assert (request.tenant, request.cache_salt) == (name, f"{name}:a")


def test_without_keys_a_request_has_no_tenant_and_the_salt_of_its_client(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with open_server(record=str(file)) as server:
        generate(server, "poppy", cache_salt="a")
        generate(server, "poppy")
    requests = recorded_requests(file)
    assert [(each.tenant, each.cache_salt) for each in requests] == [("", "a"), ("", "")]
