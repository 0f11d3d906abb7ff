"""No body makes the server fail, lose a block or answer in another shape.

The bodies are those of fuzzing.py. A finding has a seed and an index:

    from tests.server.fuzzing import fuzz_body
    from tests.server.good_bodies import CLIENT_ROUTES
    print(fuzz_body(seed, index, CLIENT_ROUTES))

Schemathesis makes requests from /openapi.json, and compares the responses with it too.
`make test-fuzz` installs Schemathesis in a separate environment and runs all of this.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.trainer_access import TrainerAccess
from tests.server.audited_server import SERVER_TIMEOUT_S, AuditedServer, open_audited_server
from tests.server.fuzz_runs import (
    ADMIN_KEY,
    CLIENT_REFUSALS,
    GOOD_REQUEST,
    BodyFuzzReport,
    find_fault,
    run_fuzz,
    run_operator_fuzz,
)
from tests.server.fuzzing import fuzz_body
from tests.server.good_bodies import (
    ANTHROPIC,
    CHAT,
    CLIENT_ROUTES,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    NUM_BLOCKS,
    RESPONSES,
    TOOLS,
)
from tests.server.http_wire import KEY, Address, WireResponse, send_request
from tests.server.test_trainers import save_seed

ROOT = Path(__file__).resolve().parents[2]
SCHEMATHESIS = ROOT / ".venv" / "fuzz" / "bin" / "schemathesis"
CHECKS = (
    *("not_a_server_error", "response_schema_conformance", "status_code_conformance"),
    *("content_type_conformance", "response_headers_conformance"),
)
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"model": "hash", "prompt": "a", "max_tokens": 2},
        {"model": "hash", "prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True},
        {"model": "hash", "prompt": [98], "stream": True},
    ],
    CHAT: [
        {"model": "hash", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        {
            "model": "hash",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        },
        {"model": "hash", "messages": MESSAGES, "max_tokens": 64, **TOOLS},
        {"model": "hash", "messages": MESSAGES, **TOOLS, "tool_choice": "auto", "max_tokens": 9},
    ],
    GENERATE: [{"prompt": "a"}, {"prompt": "a", "regex": "b{2,3}"}],
    "/tokenize": [{"prompt": "a"}],
    "/detokenize": [{"tokens": [98]}],
}
SMALL = {"num_blocks": NUM_BLOCKS, "block_size": 4, "max_model_len": 800, "max_num_seqs": 64}
SEED = 1
NO_ERRORS = 'forge_requests_total{finish="error"} 0.0'


def check_bodies(
    run: Callable[[Address], Coroutine[Any, Any, BodyFuzzReport]], folder: Path
) -> None:
    """Check that each body of the run is served or refused, and leaves no block in use."""
    save_seed(folder / "model.safetensors", 0)  # as at the start
    access = TrainerAccess(ADMIN_KEY, folder.resolve())
    with open_audited_server("hash", trainer_access=access, **SMALL) as server:
        before = send_request(server.address, GOOD_REQUEST, SERVER_TIMEOUT_S)
        report = asyncio.run(run(server.address))
        print(f"\n{report}")
        assert report.faults == []
        assert report.statuses[200] > report.statuses.total() // 20 < report.statuses[400]
        after = send_request(server.address, GOOD_REQUEST, SERVER_TIMEOUT_S)
        assert after.json["text"] == before.json["text"]
        assert NO_ERRORS in server.metrics_lines()
        server.check_idle()


@pytest.mark.long
def test_no_body_makes_the_server_fail(tmp_path: Path) -> None:
    check_bodies(lambda address: run_fuzz(address, SEED, 200, 4), tmp_path)


@pytest.mark.long
def test_no_command_of_an_operator_makes_the_server_fail(tmp_path: Path) -> None:
    check_bodies(lambda address: run_operator_fuzz(address, SEED, 100), tmp_path)


@pytest.mark.soak
def test_a_hundred_thousand_bodies_do_not_make_the_server_fail(tmp_path: Path) -> None:
    check_bodies(lambda address: run_fuzz(address, SEED, 100_000, 8), tmp_path)


@pytest.mark.soak
def test_ten_thousand_commands_do_not_make_the_server_fail(tmp_path: Path) -> None:
    check_bodies(lambda address: run_operator_fuzz(address, SEED, 10_000), tmp_path)


def test_a_body_is_the_same_whenever_it_is_made() -> None:
    first, second = ([fuzz_body(3, index, CLIENT_ROUTES) for index in range(50)] for _ in range(2))
    assert first == second
    assert len({body for _, body in first}) > 40


ENVELOPE = {"message": "a", "type": "invalid_request_error", "param": None, "code": "invalid_json"}


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, {"text": "a"}, None),
        (400, {"error": ENVELOPE}, None),
        (500, {"error": ENVELOPE}, "a status that no body may cause"),
        (422, {"error": ENVELOPE}, "a status that no body may cause"),
        (200, {"error": ENVELOPE}, "no answer"),
        (200, {"text": float("nan")}, "no JSON"),
        (400, {"detail": "a"}, "no envelope"),
        (400, {"error": {"message": "a"}}, "no envelope"),
        (400, {"error": {**ENVELOPE, "message": "a\nb"}}, "a message that is none"),
        (400, {"error": {**ENVELOPE, "message": "a" * 513}}, "a message that is none"),
        (400, {"error": {**ENVELOPE, "code": None}}, "a type or code that is none"),
        (400, {"error": {**ENVELOPE, "type": "server_error"}}, "a type or code that is none"),
        (400, {"error": {**ENVELOPE, "param": 5}}, "a param that is none"),
    ],
)
def test_an_answer_in_another_shape_is_a_finding(
    status: int, body: dict[str, Any], problem: str | None
) -> None:
    answer = WireResponse(status, {"content-type": "application/json"}, json.dumps(body).encode())
    assert find_fault(COMPLETIONS, answer, CLIENT_REFUSALS) == problem


ANTHROPIC_ERROR = {"type": "invalid_request_error", "message": "a"}
EVENT_STREAM = {"content-type": "text/event-stream"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"type": "error", "error": ANTHROPIC_ERROR, "request_id": "a"}, None),
        ({"error": ENVELOPE}, "no envelope"),
        ({"type": "error", "error": ENVELOPE, "request_id": "a"}, "no envelope"),
        (
            {
                "type": "error",
                "error": {**ANTHROPIC_ERROR, "type": "api_error"},
                "request_id": "a",
            },
            "a type or code that is none",
        ),
    ],
)
def test_an_error_of_messages_in_another_shape_is_a_finding(
    body: dict[str, Any], problem: str | None
) -> None:
    answer = WireResponse(400, {"content-type": "application/json"}, json.dumps(body).encode())
    assert find_fault(ANTHROPIC, answer, CLIENT_REFUSALS) == problem


@pytest.mark.parametrize(
    ("path", "body", "ends_well"),
    [
        (CHAT, b"data: {}\n\ndata: [DONE]\n\n", True),
        (CHAT, b"data: {}\n\n", False),
        (CHAT, b"data: [DONE]\n\ndata: {}\n\n", False),
        (CHAT, b'data: {"error":{}}\n\ndata: [DONE]\n\n', False),
        (RESPONSES, b"event: response.incomplete\ndata: {}\n\n", True),
        (RESPONSES, b"event: response.failed\ndata: {}\n\n", False),
        (RESPONSES, b"event: response.completed\ndata: {", False),
        (ANTHROPIC, b"event: message_stop\ndata: {}\n\n", True),
        (ANTHROPIC, b"event: error\ndata: {}\n\n", False),
    ],
)
def test_a_stream_that_is_cut_is_a_finding(path: str, body: bytes, ends_well: bool) -> None:
    found = find_fault(path, WireResponse(200, EVENT_STREAM, body), CLIENT_REFUSALS)
    assert (found is None) == ends_well


@pytest.mark.soak
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    if not SCHEMATHESIS.exists():
        pytest.skip("Schemathesis is not installed: make test-fuzz")
    with open_audited_server("hash", **SMALL) as server:
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(complete_openapi(server)), encoding="utf-8")
        host, port = server.address
        command = [
            *(str(SCHEMATHESIS), "run", str(file), f"--url=http://{host}:{port}"),
            *(f"--checks={','.join(CHECKS)}", f"--header=Authorization: Bearer {KEY}"),
            *("--phases=examples,coverage,fuzzing", "--max-examples=200", "--seed=1"),
            *("--continue-on-failure", "--no-color"),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert NO_ERRORS in server.metrics_lines()
        server.check_idle()


def complete_openapi(server: AuditedServer) -> dict[str, Any]:
    """Return /openapi.json, completed with the model's name and with bodies that are served."""
    document: dict[str, Any] = server.client.get("/openapi.json").json()
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "hash"}
        if "num_blocks" in schema.get("properties", {}):
            # A smaller pool would refuse all other requests.
            schema["properties"]["num_blocks"] = {"const": server.llm.engine.config.num_blocks}
    for path, bodies in EXAMPLES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["examples"] = {f"{i}": {"value": body} for i, body in enumerate(bodies)}
    return document
