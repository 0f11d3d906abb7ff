"""From the bytes of a request to a JSON object, strictly.

Owns the limits on a body, what it may be called and what JSON may hold. Knows no field. Every fault
is a Refused, so a body that is read here is a plain object: text is valid Unicode, every number is
finite and every key is there once.

    headers ──► application/json, as it is ──► receive() ──► UTF-8 ──► JSON ──► {field: value}
                415 unsupported_media_type     413           400 invalid_json, invalid_type
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request

from forge.errors import InvalidRequest
from forge.server.refusal import ClientGone, Refused, shown

MAX_BODY_BYTES = 8 * 2**20
MAX_PARTS = 2**19
"""Objects, lists and texts of a body, names among them. They cost far more than their bytes say."""
ASIDE_BYTES = 2**16
"""Bodies longer than this are read in a thread: the event loop serves others."""

_PART = re.compile(rb'["\[{]')
_REST_OF_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,4096}("?)', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


T = TypeVar("T")


async def read_object(request: Request, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the body, a JSON object. Raises Refused, InvalidRequest or ClientGone.

    Of a long body all of it is read in a thread.
    """
    if (refused := media_refusal(request.scope["headers"])) is not None:
        raise refused
    raw = await _read(request)
    if len(raw) > ASIDE_BYTES:
        return await asyncio.to_thread(lambda: read(parse_object(raw)))
    return read(parse_object(raw))


def media_refusal(headers: Iterable[tuple[bytes, bytes]]) -> Refused | None:
    """Return why a body with these headers is not read as JSON, or None."""
    types = [value.decode("latin-1") for name, value in headers if name == b"content-type"]
    if len(types) != 1 or not _is_json(types[0]):
        called = "', '".join(map(shown, types[:2]))
        return Refused(
            415,
            "unsupported_media_type",
            f"The content type '{called}' is not served. Send application/json",
        )
    codings = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    named = [coding.strip() for each in codings for coding in each.split(",")]
    for coding in named:
        if coding.lower() not in ("identity", ""):
            return Refused(
                415,
                "unsupported_media_type",
                f"content-encoding: '{shown(coding)}' is not served. Send the body as it is, "
                "without this header",
                headers={"accept-encoding": "identity"},
            )
    return None


def _is_json(content_type: str) -> bool:
    media_type, _, parameters = content_type.partition(";")
    charsets = re.findall(r"charset\s*=\s*\"?([^\s;\"]*)", parameters, re.IGNORECASE)
    return media_type.strip().lower() == "application/json" and all(
        charset.lower() in ("utf-8", "utf8") for charset in charsets
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


class _Reader:
    """Reads JSON's numbers and objects, and remembers whether a number was not finite.

    Python calls these, not C, so a thread that reads many numbers or objects lets others run.
    """

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

    def integer(self, text: str) -> int:
        """A number without them."""
        return int(text)

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object. Raises Refused: of two equal names each reader would choose its own."""
        found = dict(pairs)
        if len(found) != len(pairs):
            names = Counter(name for name, _ in pairs)
            twice = next(name for name, count in names.items() if count > 1)
            raise Refused(
                400,
                "duplicate_key",
                f"The body has the key '{shown(twice)}' {names[twice]} times in one object. "
                "Send it once",
            )
        return found


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that `raw` is. Raises Refused or InvalidRequest."""
    _check_parts(raw)
    reader = _Reader()
    try:
        text = raw.decode()
        body = json.loads(
            text,
            parse_constant=reader.constant,
            parse_float=reader.number,
            parse_int=reader.integer,
            object_pairs_hook=reader.members,
        )
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
    if not reader.finite or _SURROGATE_ESCAPE.search(text):
        for field, value in body.items():
            _check_plain(field, value)
    return body


def _check_parts(raw: bytes) -> None:
    """Raise Refused for a body of more than MAX_PARTS parts."""
    at_most = raw.count(b'"') // 2 + raw.count(b"[") + raw.count(b"{")
    if at_most > MAX_PARTS and next(islice(parts(raw), MAX_PARTS, None), None) is not None:
        raise Refused(
            400,
            "too_many_items",
            f"The body has more than {MAX_PARTS} objects, lists and texts. Send several requests",
        )


def parts(raw: bytes) -> Iterator[int]:
    """Yield where each list and object begins and where each text ends, names among them.

    No match of a pattern takes long, so a thread that reads them lets others run.
    """
    place = 0
    while found := _PART.search(raw, place):
        place = found.end()
        if found[0] == b'"':
            while (rest := _REST_OF_STRING.match(raw, place)) and rest.end() > place:
                place = rest.end()
                if rest[1]:
                    break
        yield place


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
