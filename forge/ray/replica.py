"""EngineReplica: one engine with the routes of `forge serve`, called by Ray instead of a socket.

Owns the engine and its application. Knows no Ray object and no other replica.

    Call ──► ASGI scope ──► create_app(llm) ──► http.response.start ──► ResponseHead
                 ▲                              http.response.body  ──► bytes, joined if they wait
                 └── http.disconnect ◄── the caller stops reading: the request is aborted

Always true: the first part of a response is its head. A replica whose engine has ended raises
ReplicaLost in place of a response that has not started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from starlette.types import Message

from forge.async_llm import AsyncLLM
from forge.engine_options import Options
from forge.errors import EngineDead
from forge.limits import DEFAULT_LIMITS, Limits
from forge.ray.call import Call, ReplicaLost, ResponseHead
from forge.ray.scaling import QUEUE_METRIC, ROWS_METRIC
from forge.server.app import create_app
from forge.server.operations import STALL_LIMIT_S

MAX_UNREAD_PARTS = 64
"""Messages of a response that the application may be ahead of its reader."""


class EngineReplica:
    """An engine and its application. `close` ends both."""

    def __init__(
        self,
        name: str,
        model: str,
        policy: str,
        options: Options,
        served_model_name: str | None = None,
        api_keys: tuple[str, ...] = (),
        limits: Limits = DEFAULT_LIMITS,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_config: str | None = None,
    ) -> None:
        self.name = name
        self.llm = AsyncLLM.spawn(model, policy=policy, **options)
        # A later request may reach another replica, which would not find a stored response.
        limits = replace(limits, response_store_mib=0)
        self._app = create_app(
            self.llm,
            served_model_name=served_model_name,
            api_keys=api_keys,
            limits=limits,
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
            reasoning_config=reasoning_config,
        )

    def close(self) -> None:
        """End the engine. A second call changes nothing."""
        self.llm.close()

    def __del__(self) -> None:
        if hasattr(self, "llm"):  # Ray stops a replica by dropping it
            self.close()

    def check_health(self) -> None:
        """Raise EngineDead where the engine has ended, or has work and makes no step."""
        if self.llm.failure is not None:
            raise EngineDead(f"the engine has ended: {self.llm.failure}")
        if self.llm.stalled_s > STALL_LIMIT_S:
            raise EngineDead(f"the engine has made no step for {self.llm.stalled_s:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy reads."""
        load = self.llm.load
        max_rows = self.llm.engine.config.max_num_seqs
        return {QUEUE_METRIC: load.queue_s, ROWS_METRIC: load.num_running / max_rows}

    async def __call__(self, call: Call) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head of the response and then its body. Raises ReplicaLost before the head."""
        if self.llm.failure is not None:
            raise ReplicaLost(self.name)
        messages: asyncio.Queue[Message] = asyncio.Queue(MAX_UNREAD_PARTS)
        disconnected = asyncio.Event()
        unread = [call.body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(_create_scope(call), receive, messages.put))
        try:
            head = await self._next_message(messages, task)
            if head["status"] == 503 and self.llm.failure is not None:
                raise ReplicaLost(self.name)
            yield ResponseHead(head["status"], tuple(map(tuple, head.get("headers", ()))))
            is_last = False
            while not is_last:
                parts = [await self._next_message(messages, task)]
                while not messages.empty():
                    parts.append(messages.get_nowait())
                is_last = not parts[-1].get("more_body", False)
                if body := b"".join(part.get("body", b"") for part in parts):
                    yield body
            await task
        finally:
            disconnected.set()
            while not messages.empty():  # the application may wait for room
                messages.get_nowait()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _next_message(
        self, messages: asyncio.Queue[Message], task: asyncio.Future[None]
    ) -> Message:
        """Return the next message of the application. Raises what ended it without one."""
        get = asyncio.ensure_future(messages.get())
        try:
            await asyncio.wait((get, task), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
            if not messages.empty():
                return messages.get_nowait()
            task.result()
            raise ReplicaLost(self.name)
        finally:
            get.cancel()


def _create_scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": quote(call.path).encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
        "state": {},
    }
