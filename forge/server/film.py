"""The film of this server's engine: the page at / and its stream, GET /film.

Owns the pages that read, and the bound on what each of them has not read yet. The engine writes
lines only while there is a page, and never waits for one.

    engine's process            thread of reports       event loop
    LiveFilm ──report.film──►   JSON, once a line  ──►  _Reader ──► data: {...}   a page each
                                                          └── full: the page's stream ends

Always true: a stream begins with the header and a line with the whole state, and is complete from
there to its end.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from forge.async_llm import AsyncLLM, RequestObserver
from forge.engine_messages import StepReport
from forge.film.page import build_live_page
from forge.film.recorder import film_header
from forge.film.state import Line
from forge.limits import DEFAULT_LIMITS
from forge.outputs import TextDelta
from forge.request import Request as EngineRequest
from forge.server import routes
from forge.server.errors import APIError, ClientDisconnected, engine_dead_error
from forge.server.generation import run_until_disconnect
from forge.server.home import HEADERS
from forge.server.middleware import SHUTTING_DOWN
from forge.server.routes import APIRoute
from forge.server.sse import EventStream, encode_event

MAX_READERS = 8
"""Pages that read at the same time. Each one that joins costs the engine a line."""
MAX_UNREAD_BYTES = 8 * 2**20
"""Characters of lines that a page may leave unread; its stream ends above that."""
POLL_INTERVAL_S = 0.5
"""Seconds after which a silent stream finds that the server shuts down."""


class _Reader:
    """Lines on their way to one page. All calls are on the event loop.

    end   why the stream ends; None: it goes on
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_unread: int) -> None:
        self.loop = loop
        self.end: str | None = None
        self._max_unread = max_unread
        self._lines: deque[str] = deque()
        self._num_unread = 0
        self._has_state = False
        self._ready = asyncio.Event()

    def add(self, lines: Sequence[tuple[bool, str]]) -> None:
        """Add lines, each with whether it has the whole state; those before the first are not."""
        for is_keyframe, text in lines:
            if self.end is None and (is_keyframe or self._has_state):
                self._has_state = True
                self._lines.append(text)
                self._num_unread += len(text)
                if self._num_unread > self._max_unread:
                    self._lines.clear()
                    self.end = "the page reads too slowly"
        self._ready.set()

    async def next_lines(self) -> list[str]:
        """Return the lines that are unread, none after some time without one."""
        try:
            await asyncio.wait_for(self._ready.wait(), POLL_INTERVAL_S)
        except TimeoutError:
            return []
        self._ready.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def count_sent(self, line: str) -> None:
        """Count a line as read: it was handed to the connection."""
        self._num_unread -= len(line)


class _NoRequestObserver:
    """A RequestObserver that does nothing."""

    def on_deltas(self, deltas: Sequence[TextDelta]) -> None:
        """Do nothing."""

    def on_close(self) -> None:
        """Do nothing."""


class FilmFeed:
    """Passes the lines of an engine to the pages that read, and has their routes.

    llm          the engine, which observes no one else's film
    policy       name of its policy
    max_unread   characters that a page may leave unread
    """

    def __init__(self, llm: AsyncLLM, policy: str, max_unread: int = MAX_UNREAD_BYTES) -> None:
        self._llm = llm
        self._policy = policy
        self._max_unread = max_unread
        self._readers: tuple[_Reader, ...] = ()
        self._page, self._content_policy = build_live_page("forge")
        llm.add_observer(self)

    def routes(self) -> list[APIRoute]:
        """Return the routes with their handlers."""
        return [routes.FILM_PAGE.bind(GET=self.page), routes.FILM.bind(GET=self.stream)]

    async def page(self, request: Request) -> Response:
        """GET /. The page has nothing of the engine: it reads /film with its reader's key."""
        headers = {**HEADERS, "content-security-policy": self._content_policy}
        return HTMLResponse(self._page, headers=headers)

    async def stream(self, request: Request) -> Response:
        """GET /film."""
        if self._llm.failure is not None:
            raise engine_dead_error()
        if len(self._readers) >= MAX_READERS:
            raise APIError(
                503,
                "film_full",
                f"{MAX_READERS} pages read the film, which is the limit. Close one",
            )
        return _FilmStream(self)

    def header(self) -> Line:
        """Return the first line of a stream."""
        return film_header(self._llm.engine.scheduler, self._llm.model, self._policy, "live")

    def join(self) -> _Reader:
        """Open the film for one more page."""
        reader = _Reader(asyncio.get_running_loop(), self._max_unread)
        self._readers = (*self._readers, reader)
        self._llm.open_film()
        return reader

    def leave(self, reader: _Reader) -> None:
        """End the reading of a page; the last one closes the film."""
        self._readers = tuple(each for each in self._readers if each is not reader)
        if not self._readers:
            self._llm.close_film()

    def end_reason(self, reader: _Reader, scope: Scope) -> str | None:
        """Return why a stream ends now, or None."""
        if self._llm.failure is not None:
            return "the engine has ended"
        if scope.get("state", {}).get(SHUTTING_DOWN):
            return "the server shuts down"
        return reader.end

    # Called by the engine's host.

    def on_step(self, report: StepReport) -> None:
        """Encode the lines of a report once, for all pages."""
        if not report.film:
            return
        lines = [("key" in line, encode_line(line)) for line in report.film]
        for reader in self._readers:
            try:
                reader.loop.call_soon_threadsafe(reader.add, lines)
            except RuntimeError:
                continue  # the loop is closed, and its pages with it

    def on_request(self, request: EngineRequest) -> RequestObserver:
        """Return an observer that does nothing."""
        return _NoRequestObserver()


def encode_line(line: Line) -> str:
    """Return a line as an event."""
    return encode_event(json.dumps(line, separators=(",", ":")))


class _FilmStream(Response):
    """The film as server-sent events."""

    def __init__(self, feed: FilmFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send lines until the page leaves, or the film ends."""
        events = EventStream(send, DEFAULT_LIMITS.ping_interval)
        reader = self._feed.join()
        try:
            work: Any = self._write(events, reader, scope)
            await run_until_disconnect(receive, events.run_with_pings(work))
        except ClientDisconnected:
            return
        finally:
            self._feed.leave(reader)

    async def _write(self, events: EventStream, reader: _Reader, scope: Scope) -> None:
        await events.send(encode_line(self._feed.header()))
        while (end := self._feed.end_reason(reader, scope)) is None:
            for line in await reader.next_lines():
                await events.send(line)
                reader.count_sent(line)
        await events.send(encode_line({"end": end}))
        await events.end()
