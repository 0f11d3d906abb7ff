"""From the bytes of a request to a JSON object, strictly.

Owns the limits on a body and what JSON may hold. Knows no field. Every fault is a Refused, so a
body that is read here is a plain object: text is valid Unicode and every number is finite.

    receive() ──► at most MAX_BODY_BYTES ──► UTF-8 ──► JSON ──► {field: value}
                  413 when one byte more     400 invalid_json, invalid_type
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from starlette.requests import Request

from forge.errors import InvalidRequest
from forge.server.refusal import ClientGone, Refused, shown

MAX_BODY_BYTES = 8 * 2**20

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises Refused, InvalidRequest, or ClientGone."""
    _check_content_type(request.headers.get("content-type", ""))
    return parse_object(await _read(request))


def _check_content_type(content_type: str) -> None:
    media_type, _, parameters = content_type.partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]*)", parameters, re.IGNORECASE)
    if media_type.strip().lower() != "application/json" or (
        charset is not None and charset[1].lower() not in ("utf-8", "utf8")
    ):
        raise Refused(
            415,
            "unsupported_media_type",
            f"The content type '{shown(content_type)}' is not served. Send application/json",
        )


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > MAX_BODY_BYTES):
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large() -> Refused:
    return Refused(
        413,
        "request_too_large",
        f"The body is over {MAX_BODY_BYTES} bytes. Send less",
        headers={"connection": "close"},  # the rest of the body is not read
    )


class _Numbers:
    """Parses JSON's numbers and remembers whether one was not finite."""

    finite = True

    def constant(self, text: str) -> float:
        """NaN, Infinity, -Infinity."""
        self.finite = False
        return math.nan

    def number(self, text: str) -> float:
        """A number with a fraction or an exponent."""
        value = float(text)
        if math.isinf(value):
            self.finite = False
        return value


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that `raw` is. Raises Refused or InvalidRequest."""
    numbers = _Numbers()
    try:
        text = raw.decode()
        body = json.loads(text, parse_constant=numbers.constant, parse_float=numbers.number)
    except UnicodeDecodeError:
        raise _invalid("it is not UTF-8") from None
    except json.JSONDecodeError as fault:
        raise _invalid(f"line {fault.lineno} column {fault.colno} is not JSON") from None
    except RecursionError:
        raise _invalid("it is nested too deep") from None
    except ValueError:  # an integer of thousands of digits
        raise _invalid("a number is too long") from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_type", "The body is not a JSON object. Send {...}")
    if not numbers.finite or _SURROGATE_ESCAPE.search(text):
        for field, value in body.items():
            _check_plain(field, value)
    return body


def _invalid(problem: str) -> Refused:
    return Refused(400, "invalid_json", f"The body cannot be read: {problem}. Send a JSON object")


def _check_plain(field: str, value: Any) -> None:
    """Raise if there is a number that is not finite or half a surrogate pair anywhere in a field.

    Not recursive: the value may be as deep as the parser allows.
    """
    waiting = [field, value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidRequest(
                shown(field), "a number is not finite", "Send finite numbers", "invalid_value"
            )
        elif isinstance(item, str) and not _is_unicode(item):
            raise InvalidRequest(
                shown(field),
                "it has half a surrogate pair, which no UTF-8 text can have",
                "Send valid Unicode",
                "invalid_unicode",
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
