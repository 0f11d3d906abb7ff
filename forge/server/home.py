"""The page at /: what this server is, and where its documentation is.

Owns a short page of HTML for browsers in which the address of the server is opened. It has no code,
and its content security policy allows none. Clients use the other routes.
"""

from __future__ import annotations

from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from forge import __version__
from forge.server import routes
from forge.server.routes import APIRoute

HEADERS = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>forge</title></head>
<body>
<h1>forge</h1>
<p>This is forge {version}, a server for language models with the API of OpenAI. It serves the model
<code>{model}</code>. Clients take <code>/v1</code> at this address as their base URL.</p>
<ul>
<li><a href="/v1/models">/v1/models</a>: the model, and the longest sequence it takes</li>
<li><a href="/healthz">/healthz</a>: figures of the engine</li>
<li><a href="/metrics">/metrics</a>: figures for Prometheus</li>
<li><a href="/openapi.json">/openapi.json</a>: all routes, as OpenAPI 3.1</li>
</ul>
<p>The documentation is in the folder <code>docs</code> of forge: <code>docs/Server.md</code> has
the routes, <code>docs/Clients.md</code> has clients.</p>
</body>
</html>
"""


class HomeEndpoint:
    """Handler of the route. `model_name` is the name that requests give for the model."""

    def __init__(self, model_name: str) -> None:
        self._page = PAGE.format(version=escape(__version__), model=escape(model_name))

    def routes(self) -> list[APIRoute]:
        """Return the route with its handler."""
        return [routes.HOME.bind(GET=self.home)]

    async def home(self, request: Request) -> Response:
        """GET /."""
        return HTMLResponse(self._page, headers=HEADERS)
