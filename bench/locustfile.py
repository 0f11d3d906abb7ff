"""Locust file: streamed chats on forge, or on any server with OpenAI's API, timed by token.

Owns one kind of user: it sends a chat, reads the stream to its end and starts again. Locust counts
users, requests and failures; TTFT and ITL are two more rows of its table.

    POST /v1/chat/completions   the whole request, to the end of its stream
    TTFT                        until the first piece of output
    ITL                         each wait between two pieces after it

Locust is no dependency of forge: install it in a separate environment.

    python -m venv locust && locust/bin/pip install locust
    locust/bin/locust -f bench/locustfile.py --headless -u 8 -r 8 -t 30s --host http://127.0.0.1:8080
"""

from __future__ import annotations

import json
import time
from typing import Any

from locust import (  # type: ignore[import-not-found,unused-ignore]
    HttpUser,
    constant,
    events,
    task,
)

PATH = "/v1/chat/completions"


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Add the options of this file to those of locust."""
    parser.add_argument("--served-model", default="", help="model's name over HTTP")
    parser.add_argument("--api-key", default="", env_var="FORGE_API_KEY", is_secret=True)
    parser.add_argument("--prompt-chars", type=int, default=180, help="length of each message")
    parser.add_argument("--max-tokens", type=int, default=384, help="output of each request")


class ChatUser(HttpUser):
    """A stream of a closed loop: when a chat ends, the next one begins."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Read the key and the name of the model."""
        options = self.environment.parsed_options
        if options.api_key:
            self.client.headers["Authorization"] = f"Bearer {options.api_key}"
        models = self.client.get("/v1/models").json()
        self.model = options.served_model or models["data"][0]["id"]
        self.sent = 0

    @task
    def chat(self) -> None:
        """Send a chat, read its stream, and report its times to locust."""
        options = self.environment.parsed_options
        self.sent += 1
        # A unique beginning, so that no two chats share a cached prefix.
        text = f"{id(self):x}-{self.sent} ".ljust(options.prompt_chars, "a")
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        start_s = time.perf_counter()
        with self.client.post(PATH, json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            num_chunks, done = self.read_stream(response, start_s)
            # Locust's time of a stream ends with its headers.
            response.request_meta["response_time"] = 1e3 * (time.perf_counter() - start_s)
            if done and num_chunks:
                response.success()
            else:
                response.failure(f"the stream broke off after {num_chunks} pieces of output")

    def read_stream(self, response: Any, start_s: float) -> tuple[int, bool]:
        """Return the pieces of output that came, and whether the stream ended with [DONE]."""
        num_chunks, before_s = 0, start_s
        for line in response.iter_lines():
            if line == b"data: [DONE]":
                return num_chunks, True
            if not line.startswith(b"data: "):
                continue
            choices = json.loads(line[len(b"data: ") :]).get("choices")
            if not choices or not choices[0]["delta"].get("content"):
                continue
            now_s = time.perf_counter()
            self.report_time("ITL" if num_chunks else "TTFT", now_s - before_s)
            num_chunks, before_s = num_chunks + 1, now_s
        return num_chunks, False

    def report_time(self, name: str, duration_s: float) -> None:
        """Add a time to the row of this name."""
        self.environment.events.request.fire(
            request_type="LLM",
            name=name,
            response_time=1e3 * duration_s,
            response_length=0,
            exception=None,
            context={},
        )
