"""An agent: requests and tools take turns until the model answers without a call.

    task ─► POST /v1/chat/completions ─► calls ─► tools ─► results ─► POST ... ─► answer
            session_id: the server keeps the cache of the context between turns

Needs the package openai and a running server:

    python docs/examples/agent.py "Which pages are there?" --folder docs
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import NotFoundError, OpenAI

SYSTEM = "Use the tools to find out what you need. Answer in one sentence once you know."
MAX_TOKENS = 1000
"""Most output tokens of a turn."""
MAX_CHARS = 4000
"""Most characters of a tool's result: each is part of all later prompts."""

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos},
}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % and brackets."""
    return str(evaluate(ast.parse(expression.strip(), mode="eval").body))


def evaluate(node: ast.AST) -> float:
    """Return the value of a syntax tree. Raises ValueError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
    raise ValueError("only numbers, + - * / // % and brackets")


class Folder:
    """Tools that read below one folder, and nothing above it."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def list_folder(self, path: str) -> str:
        """Return the names in a folder, one a line."""
        return "\n".join(sorted(each.name for each in self._resolve(path).iterdir()))

    def read_file(self, path: str) -> str:
        """Return the text of a file."""
        with self._resolve(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARS)

    def _resolve(self, path: str) -> Path:
        found = (self._root / path).resolve()
        if not found.is_relative_to(self._root):
            raise ValueError(f"{path!r} is outside of the folder")
        return found


def describe_tool(function: Callable[[str], str], argument: str) -> dict[str, Any]:
    """Return the definition of a tool with one argument, as the API takes it."""
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string", "maxLength": 100}},
        "required": [argument],
        "additionalProperties": False,
    }
    about = {"name": function.__name__, "description": function.__doc__, "parameters": schema}
    return {"type": "function", "function": about}


class Agent:
    """One session: a context that grows by each answer and each result of a tool.

    tool_choice   auto: the model decides; required: it calls a tool in every turn
    session_id    of all requests; no two agents have the same one
    """

    def __init__(self, client: OpenAI, model: str, folder: Path, tool_choice: Any) -> None:
        files = Folder(folder)
        self._client, self._model, self._tool_choice = client, model, tool_choice
        self._functions: dict[str, Callable[[str], str]] = {
            each.__name__: each for each in (calculate, files.list_folder, files.read_file)
        }
        self._tools: list[Any] = [
            describe_tool(calculate, "expression"),
            describe_tool(files.list_folder, "path"),
            describe_tool(files.read_file, "path"),
        ]
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self.session_id = f"agent-{uuid.uuid4().hex}"
        self._session_fields: dict[str, Any] = {"session_id": self.session_id}

    def run(self, task: str, max_turns: int) -> str:
        """Return the answer, or why there is none after `max_turns`. Ends the session."""
        self._messages.append({"role": "user", "content": task})
        try:
            for _ in range(max_turns):
                choice = self._request_choice()
                if choice.finish_reason == "length":
                    return f"no answer: the model wrote more than {MAX_TOKENS} tokens"
                if not choice.message.tool_calls:
                    return choice.message.content or ""
                start_s = time.monotonic()
                self._messages += map(self._run_tool, choice.message.tool_calls)
                # The next tools are taken to need as long as these.
                self._session_fields["expected_pause_s"] = round(time.monotonic() - start_s, 3)
            return f"no answer after {max_turns} turns"
        finally:
            self._end_session()

    def _request_choice(self) -> Any:
        completion = self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            tools=self._tools,
            tool_choice=self._tool_choice,
            parallel_tool_calls=False,
            max_tokens=MAX_TOKENS,
            temperature=0,
            extra_body=self._session_fields,
        )
        (choice,) = completion.choices
        self._messages.append(choice.message.model_dump(exclude_none=True))
        return choice

    def _run_tool(self, call: Any) -> dict[str, Any]:
        """Return the message with the result of a call. An error of the tool is a result."""
        name, arguments = call.function.name, call.function.arguments
        try:
            (argument,) = json.loads(arguments).values()
            result = self._functions[name](argument)
        except Exception as error:  # whatever a tool raises, the model reads it
            result = f"error: {error}"
        print(f"{name} {arguments} -> {result[:60]!r}")
        return {"role": "tool", "tool_call_id": call.id, "content": result[:MAX_CHARS]}

    def _end_session(self) -> None:
        """End the session: no turn follows, so the server may evict its context first."""
        with suppress(NotFoundError):  # no turn was served, or the server has no sessions
            self._client.delete(f"/sessions/{self.session_id}", cast_to=object)


def main() -> None:
    """Run the agent of the command line."""
    parser = argparse.ArgumentParser(description="Run an agent on an OpenAI-compatible server.")
    parser.add_argument("task")
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--folder", type=Path, default=Path(), help="what the tools may read")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--tool-choice", choices=["auto", "required"], default="auto")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    with OpenAI(base_url=args.url, api_key=key) as client:
        model = args.model or next(iter(client.models.list())).id
        print(Agent(client, model, args.folder, args.tool_choice).run(args.task, args.max_turns))


if __name__ == "__main__":
    main()
