"""The option --otlp-traces-endpoint, and what exports the spans of a server with it.

Owns the check of the URL. OpenTelemetry, an extra, is imported where there is one.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from forge.errors import InvalidConfig, one_line
from forge.server.traces import RequestTraces


def open_traces(endpoint: str | None, model: str) -> RequestTraces | None:
    """Return what exports spans to this URL, or None without one. Raises InvalidConfig.

    model   served name, which the spans have
    """
    if endpoint is None:
        return None
    if not _is_http_url(endpoint):
        raise InvalidConfig(
            "otlp_traces_endpoint",
            f"{endpoint[:64]!r} is not http://HOST:PORT/PATH",
            "Give http://127.0.0.1:4318/v1/traces, say",
        )
    try:
        from forge.server.otel_traces import OtelTraces, create_exporter
    except ImportError as error:
        raise InvalidConfig(
            "otlp_traces_endpoint",
            f"{error.name} is not installed",
            "Install the extra otel: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http",
        ) from None
    try:
        return OtelTraces(create_exporter(endpoint), model)
    except ValueError as error:  # of a variable of OpenTelemetry's
        raise InvalidConfig(
            "otlp_traces_endpoint",
            f"OpenTelemetry cannot be set up: {one_line(error)}",
            "Correct the variables OTEL_... of the environment",
        ) from None


def _is_http_url(text: str) -> bool:
    """Return whether the text is http://HOST[:PORT]/PATH, or the same with https."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        url = urlsplit(text)
        is_port = url.port is None or url.port > 0
    except ValueError:  # brackets of an address, or a port over 65535
        return False
    return url.scheme in ("http", "https") and bool(url.hostname and url.path) and is_port
