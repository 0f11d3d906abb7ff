"""Several API keys: each is a tenant, named by its digest."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from forge.server.tenants import Tenants, tenant_name
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
