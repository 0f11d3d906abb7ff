"""The example agent: its loop on a scripted server, its tools, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forge import AsyncLLM
from forge.server.app import create_app
from forge.server.http_server import create_listener
from tests.server.local_server import serve_app

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "agent.py"


@pytest.fixture(scope="module")
def agent(openai: Any) -> ModuleType:
    """The example, which imports openai."""
    spec = importlib.util.spec_from_file_location("agent_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ScriptedModel:
    """A server that answers chats with the next choice of a script.

    bodies     bodies of all chats, in order
    deleted    paths of all requests to delete
    """

    def __init__(self, choices: Sequence[dict[str, Any]], delete_status: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self._choices = iter(choices)
        self._delete_status = delete_status

    def answer_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        choice = {"index": 0, "logprobs": None, **next(self._choices)}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "m"}
        return {**head, "choices": [choice]}

    def answer_delete(self, path: str) -> tuple[int, dict[str, Any]]:
        self.deleted.append(path)
        return self._delete_status, {"deleted": self._delete_status == 200}


@contextmanager
def serve_script(
    *choices: dict[str, Any], delete_status: int = 200
) -> Iterator[tuple[ScriptedModel, Any]]:
    """Serve a script; yield it and a client."""
    from openai import OpenAI

    model = ScriptedModel(choices, delete_status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._reply(200, model.answer_chat(json.loads(body)))

        def do_DELETE(self) -> None:
            self._reply(*model.answer_delete(self.path))

        def log_message(self, *arguments: object) -> None:
            """Write nothing."""

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield model, client
        finally:
            server.shutdown()
            thread.join(60)


def text(content: str) -> dict[str, Any]:
    return {"finish_reason": "stop", "message": {"role": "assistant", "content": content}}


def call(name: str, arguments: str, finish_reason: str = "tool_calls") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"finish_reason": finish_reason, "message": message}


def tool_results(body: dict[str, Any]) -> list[str]:
    return [each["content"] for each in body["messages"] if each["role"] == "tool"]


@pytest.mark.long
def test_the_agent_runs_tools_until_the_model_answers_in_one_session(
    agent: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "prices.txt").write_text("tea 3, cake 4")
    script = (
        call("list_folder", '{"path": "."}'),
        call("read_file", '{"path": "prices.txt"}'),
        call("calculate", '{"expression": "2 * (3 + 4)"}'),
        text("14"),
    )
    with serve_script(*script) as (model, client):
        answer = agent.Agent(client, "m", tmp_path, "auto").run("Tea and cake for two?", 9)
    assert answer == "14"
    assert tool_results(model.bodies[-1]) == ["prices.txt", "tea 3, cake 4", "14"]
    roles = [message["role"] for message in model.bodies[-1]["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 3]
    for before, after in pairwise(model.bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    (session_id,) = {body["session_id"] for body in model.bodies}
    assert model.deleted == [f"/v1/sessions/{session_id}"]
    assert "expected_pause_s" not in model.bodies[0]
    assert all(body["expected_pause_s"] >= 0 for body in model.bodies[1:])


@pytest.mark.long
def test_the_agent_runs_on_forge_to_its_limit_and_leaves_no_session(
    agent: ModuleType, openai: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model calls tools with random arguments, in the form that the grammar allows."""
    llm = AsyncLLM("hash")
    with (
        create_listener("127.0.0.1", 0, None) as socket_,
        serve_app(llm, create_app(llm), socket_) as (url, http),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        example = agent.Agent(client, "hash", tmp_path, "required")
        assert example.run("Hello", 3) == "no answer after 3 turns"
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 3 and all(" -> " in line for line in printed)
        assert http.delete(f"/v1/sessions/{example.session_id}").status_code == 404
        with pytest.raises(openai.BadRequestError, match="session_id"):
            client.completions.create(model="hash", prompt="a", extra_body={"session_id": ""})


def test_two_agents_have_two_sessions(agent: ModuleType, tmp_path: Path) -> None:
    with serve_script(text("a"), text("b")) as (model, client):
        for _ in range(2):
            agent.Agent(client, "m", tmp_path, "auto").run("Hello", 1)
    assert len({body["session_id"] for body in model.bodies}) == 2


def test_the_loop_ends_at_its_limit_and_ends_the_session(agent: ModuleType, tmp_path: Path) -> None:
    script = [call("calculate", '{"expression": "1"}')] * 5
    with serve_script(*script) as (model, client):
        answer = agent.Agent(client, "m", tmp_path, "required").run("Hello", 3)
    assert answer == "no answer after 3 turns"
    assert [body["tool_choice"] for body in model.bodies] == ["required"] * 3
    assert len(model.deleted) == 1


def test_a_call_that_is_cut_ends_the_loop(agent: ModuleType, tmp_path: Path) -> None:
    """Its arguments are no JSON, and a server refuses them in the next prompt."""
    with serve_script(call("read_file", '{"path": "a', "length")) as (model, client):
        answer = agent.Agent(client, "m", tmp_path, "auto").run("Hello", 3)
    assert answer == "no answer: the model wrote more than 1000 tokens"
    assert len(model.deleted) == 1


def test_a_server_without_sessions_is_no_error(agent: ModuleType, tmp_path: Path) -> None:
    with serve_script(text("hello"), delete_status=404) as (model, client):
        assert agent.Agent(client, "m", tmp_path, "auto").run("Hello", 3) == "hello"
    assert len(model.deleted) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("calculate", '{"expression": "1 / 0"}', "division by zero"),
        ("calculate", '{"expression": "1 +"}', "invalid syntax"),
        ("read_file", '{"path": "missing"}', "No such file"),
        ("read_file", "{}", "not enough values to unpack"),
        ("remove_file", '{"path": "a"}', "'remove_file'"),
    ],
)
def test_an_error_of_a_tool_is_its_result(
    agent: ModuleType, tmp_path: Path, name: str, arguments: str, error: str
) -> None:
    with serve_script(call(name, arguments), text("sorry")) as (model, client):
        assert agent.Agent(client, "m", tmp_path, "auto").run("Hello", 3) == "sorry"
    (result,) = tool_results(model.bodies[-1])
    assert result.startswith("error: ") and error in result


def test_the_definition_of_a_tool_names_its_function_and_its_argument(agent: ModuleType) -> None:
    function = agent.describe_tool(agent.calculate, "expression")["function"]
    assert function["name"] == "calculate"
    assert function["description"].startswith("Return the value of an expression")
    assert function["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("-(7 // 2) % 5", "2"), (" 1 / 4", "0.25"), ("+3 - 0.5", "2.5")],
)
def test_the_calculator_follows_the_order_of_operations(
    agent: ModuleType, expression: str, value: str
) -> None:
    assert agent.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["abs(1)", "__import__('os')", "9 ** 9 ** 9", "True + 1", "'a' * 9", "[1]", "1 < 2"],
)
def test_the_calculator_refuses_all_but_arithmetic(agent: ModuleType, expression: str) -> None:
    with pytest.raises(ValueError, match="only numbers"):
        agent.calculate(expression)


def test_files_outside_of_the_folder_are_refused(agent: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (tmp_path / "secret").write_text("key")
    (root / "link").symlink_to(tmp_path / "secret")
    files = agent.Folder(root)
    assert files.list_folder("inside/..") == "inside\nlink"
    for path in ("../secret", "inside/../../secret", str(tmp_path / "secret"), "link"):
        with pytest.raises(ValueError, match="outside of the folder"):
            files.read_file(path)


def test_a_long_file_is_cut(agent: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("a" * 9000)
    assert agent.Folder(tmp_path).read_file("long") == "a" * 4000
