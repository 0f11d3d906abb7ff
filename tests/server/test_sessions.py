"""Sessions over HTTP: how a request names one, what ends it, and what a hostile client gains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from forge.invariants import audit
from forge.server.tenants import tenant_name
from forge.sessions import Session
from tests.server.bad_inputs import ALL, CHAT, COMPLETIONS, GENERATE, GOOD
from tests.server.http_wire import Address, build_head, build_post, send_request
from tests.server.local_server import TIMEOUT_S, wait_until
from tests.server.test_server import RunningServer, check_envelope, open_server
from tests.virtual_time import VirtualTime

KEY, OTHER_KEY = "sesame", "poppy"
TENANT = tenant_name(KEY)
HEADER = "x-session-id"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with open_server(api_keys=(KEY, OTHER_KEY), num_blocks=256) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running
        audit(running.llm.engine)


def post(
    server: RunningServer, path: str = GENERATE, headers: Any = None, **fields: Any
) -> httpx.Response:
    return server.client.post(path, json={**GOOD[path], **fields}, headers=headers)


def delete(server: RunningServer, session_id: str, key: str = KEY) -> httpx.Response:
    """Return the response to the end of a session, whose id is encoded."""
    headers = {"authorization": f"Bearer {key}"}
    return server.client.delete(f"/v1/sessions/{quote(session_id, safe='')}", headers=headers)


def open_session(server: RunningServer, session_id: str, tenant: str = TENANT) -> Session | None:
    """Return the session, or None where it is not open."""
    return server.llm.engine.scheduler.sessions.get((tenant, session_id))


def check_ok(response: httpx.Response) -> None:
    assert response.status_code == 200, response.text


# Names.


@pytest.mark.parametrize("path", ALL)
def test_a_session_is_named_by_field_header_or_cache_key(server: RunningServer, path: str) -> None:
    name = f"named{path}"
    check_ok(post(server, path, session_id=name))
    check_ok(post(server, path, {HEADER: name}))
    check_ok(post(server, path, prompt_cache_key=name))
    check_ok(post(server, path, {HEADER: name}, session_id=name, prompt_cache_key="x"))
    session = open_session(server, name)
    assert session is not None and session.num_turns == 4
    assert open_session(server, "x") is None


@pytest.mark.parametrize("path", ALL)
def test_field_and_header_that_differ_are_refused(server: RunningServer, path: str) -> None:
    response = post(server, path, {HEADER: "one"}, session_id="two")
    check_envelope(response, 400, "session_id", "conflicting_parameters")
    assert HEADER in response.json()["error"]["message"]
    assert open_session(server, "one") is open_session(server, "two") is None


def test_a_header_goes_before_a_cache_key_and_a_user_is_no_session(server: RunningServer) -> None:
    check_ok(post(server, headers={HEADER: "header"}, prompt_cache_key="cache key"))
    check_ok(post(server, CHAT, user="user"))
    check_ok(post(server, prompt_cache_key=""))
    assert open_session(server, "header") is not None
    for name in ("cache key", "user", ""):
        assert open_session(server, name) is None


def test_an_id_has_any_128_characters_without_control_characters(server: RunningServer) -> None:
    for name in ("x" * 128, "é" * 128, "\U0001f600" * 128, " ", "../..", 'a"b', "\x80", "%00"):
        check_ok(post(server, session_id=name))
        assert open_session(server, name) is not None
        assert delete(server, name).json() == {
            "id": name,
            "object": "session.deleted",
            "deleted": True,
        }
        assert open_session(server, name) is None


@pytest.mark.parametrize("name", ["", "x" * 129, "a\x00", "\n", "a\x7f", "a\n"])
def test_an_id_out_of_bounds_is_refused(server: RunningServer, name: str) -> None:
    check_envelope(post(server, session_id=name), 400, "session_id", "invalid_value")


def test_a_header_is_utf_8(server: RunningServer) -> None:
    check_ok(post(server, headers={HEADER: "sésame".encode()}))
    check_ok(post(server, session_id="sésame"))
    session = open_session(server, "sésame")
    assert session is not None and session.num_turns == 2


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ((f"{HEADER}: ",), "invalid_value"),
        ((f"{HEADER}: {'x' * 129}",), "invalid_value"),
        ((f"{HEADER}: a\x01b",), "invalid_value"),
        ((f"{HEADER}: a\x7f",), "invalid_value"),
        ((f"{HEADER}: a\tb",), "invalid_value"),
        ((f"{HEADER}: s\xe9same",), "invalid_unicode"),
        ((f"{HEADER}: a", f"{HEADER}: a"), "invalid_value"),
    ],
    ids=str,
)
def test_a_bad_header_is_refused_by_its_name(
    server: RunningServer, lines: tuple[str, ...], code: str
) -> None:
    request = build_post(GENERATE, json.dumps(GOOD[GENERATE]).encode(), *lines)
    answer = send_request(address_of(server), request, TIMEOUT_S)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["param"], error["code"]) == (HEADER, code)
    assert error["message"].isprintable()


def address_of(server: RunningServer) -> Address:
    return "127.0.0.1", httpx.URL(server.url).port or 80


def test_several_prompts_are_turns_of_one_session(server: RunningServer) -> None:
    check_ok(post(server, COMPLETIONS, prompt=["a", "b", "c"], session_id="several"))
    session = open_session(server, "several")
    assert session is not None and (session.num_turns, session.is_paused) == (3, True)
    check_ok(post(server, COMPLETIONS, prompt=["a", "b"], session_id="several", session_end=True))
    assert open_session(server, "several") is None


# Hints and ends.


@pytest.mark.parametrize("path", ALL)
def test_the_last_turn_ends_its_session(server: RunningServer, path: str) -> None:
    name = f"ends{path}"
    check_ok(post(server, path, session_id=name, expected_pause_s=2.5))
    session = open_session(server, name)
    assert session is not None and session.expected_pause_s == 2.5
    check_ok(post(server, path, session_id=name, session_end=False, expected_pause_s=86_400))
    assert session.expected_pause_s == 86_400
    check_ok(post(server, path, {HEADER: name}, session_end=True))
    assert open_session(server, name) is None


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"session_end": True}, "invalid_value"),
        ({"session_end": 1, "session_id": "bad"}, "invalid_type"),
        ({"expected_pause_s": -0.5, "session_id": "bad"}, "invalid_value"),
        ({"expected_pause_s": 86_400.5, "session_id": "bad"}, "invalid_value"),
        ({"expected_pause_s": "3", "session_id": "bad"}, "invalid_value"),
    ],
    ids=str,
)
def test_a_bad_hint_is_refused_by_its_name(
    server: RunningServer, path: str, fields: dict[str, Any], code: str
) -> None:
    check_envelope(post(server, path, **fields), 400, next(iter(fields)), code)
    assert open_session(server, "bad") is None


@pytest.mark.parametrize(
    "name", ["one", "a/b", "/", "a//b/", "a?b#c", "100 %", "é/\U0001f600", "+"]
)
def test_delete_ends_a_session_once(server: RunningServer, name: str) -> None:
    check_ok(post(server, session_id=name))
    assert delete(server, name).json() == {"id": name, "object": "session.deleted", "deleted": True}
    check_envelope(delete(server, name), 404, "id", "session_not_found")
    assert open_session(server, name) is None


def test_an_id_that_never_was_is_not_found(server: RunningServer) -> None:
    for name in ("never", "x" * 5000, "\x85[2J", ""):
        check_envelope(delete(server, name), 404, "id", "session_not_found")


def test_a_session_with_an_open_request_ends_after_it(server: RunningServer) -> None:
    body = {**GOOD[COMPLETIONS], "session_id": "busy", "stream": True, "max_tokens": 200}
    with server.client.stream("POST", COMPLETIONS, json={**body, "ignore_eos": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        check_ok(delete(server, "busy"))
        assert list(lines)[-2] == "data: [DONE]"
    wait_until(lambda: open_session(server, "busy") is None)


def test_the_sessions_of_another_key_cannot_be_reached(server: RunningServer) -> None:
    """The same id with another key is another session."""
    check_ok(post(server, session_id="mine"))
    check_envelope(delete(server, "mine", OTHER_KEY), 404, "id", "session_not_found")
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    check_ok(post(server, headers=other, session_id="mine", session_end=True))
    session = open_session(server, "mine")
    assert session is not None and (session.num_turns, session.has_ended) == (1, False)
    check_ok(post(server, headers=other, session_id="mine"))
    assert open_session(server, "mine", tenant_name(OTHER_KEY)) is not None
    check_ok(delete(server, "mine"))
    assert open_session(server, "mine", tenant_name(OTHER_KEY)) is not None


def test_without_a_key_no_session_ends(server: RunningServer) -> None:
    check_ok(post(server, session_id="safe"))
    request = build_head("DELETE", "/v1/sessions/safe", "host: localhost")
    assert send_request(address_of(server), request, TIMEOUT_S).status == 401
    check_envelope(
        server.client.delete("/v1/sessions/safe", headers={"origin": "http://evil.example"}),
        403,
        None,
        "cross_origin",
    )
    assert open_session(server, "safe") is not None


def test_a_server_without_keys_has_sessions_too() -> None:
    with open_server() as server:
        check_ok(post(server, session_id="a"))
        assert open_session(server, "a", tenant="") is not None
        check_ok(server.client.delete("/v1/sessions/a"))


# Figures.


def test_figures_of_sessions_are_those_of_the_engine() -> None:
    """The second turn of 28 tokens finds the 20 tokens of five full blocks."""
    with open_server() as server:
        first = post(server, session_id="a", prompt="x" * 20, max_tokens=4).json()
        tokens = [121] * 20 + first["token_ids"] + [5] * 4
        check_ok(post(server, session_id="a", prompt=tokens))
        check_ok(post(server, session_id="b", prompt=tokens))
        figures = server.client.get("/metrics").text.splitlines()
        assert "forge_sessions_open 2.0" in figures
        assert "forge_sessions_paused 2.0" in figures
        assert 'forge_resumed_tokens_total{from="device"} 20.0' in figures
        check_ok(server.client.delete("/v1/sessions/a"))
        assert "forge_sessions_open 1.0" in server.client.get("/metrics").text.splitlines()


# A hostile client.

MAX_SESSIONS = 16


@contextmanager
def engine_time() -> Iterator[VirtualTime]:
    """Yield a clock for the engine in the block. The server's own clock is that of its loop."""
    virtual_time = VirtualTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", virtual_time.read)
        yield virtual_time


@pytest.mark.long
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_hostile_client_gains_no_memory_and_harms_no_other_tenant(count: int) -> None:
    """A new id with each request, with endless pauses. All sessions expire, except in use."""
    options: dict[str, Any] = {"max_sessions": MAX_SESSIONS, "api_keys": (KEY, OTHER_KEY)}
    with open_server(**options) as server, engine_time() as virtual_time:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        table = server.llm.engine.scheduler
        other = {"authorization": f"Bearer {OTHER_KEY}"}
        check_ok(post(server, headers=other, session_id="good"))
        for number in range(count):
            name = f"{number} \U0001f600".ljust(128, "x")
            check_ok(post(server, session_id=name, expected_pause_s=86_400))
            assert len(table.sessions) <= MAX_SESSIONS + 1
        assert len(table.sessions) == MAX_SESSIONS + 1
        assert open_session(server, "good", tenant_name(OTHER_KEY)) is not None
        check_ok(post(server, headers=other, session_id="good", expected_pause_s=1_000.0))
        virtual_time.sleep(119.0)
        check_ok(post(server, headers=other, session_id="good"))
        assert len(table.sessions) == MAX_SESSIONS + 1
        virtual_time.sleep(2.0)
        check_envelope(delete(server, "wakes the engine"), 404, "id", "session_not_found")
        assert list(table.sessions) == [(tenant_name(OTHER_KEY), "good")]
        virtual_time.sleep(120.0)
        check_envelope(delete(server, "wakes the engine"), 404, "id", "session_not_found")
        assert not table.sessions
        assert table.pool.num_free_blocks == table.pool.num_blocks
        audit(server.llm.engine)
