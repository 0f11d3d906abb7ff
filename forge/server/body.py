"""Strict parsing of a request's bytes into a JSON object.

Owns the limits on a body, its content type and the JSON that is accepted. Knows no field.

    headers ──► application/json, identity ──► receive() ──► UTF-8 ──► JSON ──► {field: value}
                415 unsupported_media_type     413           400 invalid_json, invalid_type

Always true: a parsed body is a plain object. Its text is valid Unicode, its numbers are finite and
no object has a key twice. Anything else is an APIError or an InvalidRequest.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request

from forge.errors import InvalidRequest
from forge.server.errors import APIError, ClientDisconnected, excerpt

MAX_BODY_BYTES = 8 * 2**20
MAX_JSON_ITEMS = 2**19
"""Objects, lists and strings of a body, keys included. In memory they far outweigh their bytes."""
THREAD_MIN_BYTES = 2**16
"""Bodies longer than this are parsed in a thread, so that the event loop serves others."""

_ITEM_START = re.compile(rb'["\[{]')
_REST_OF_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,4096}("?)', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


T = TypeVar("T")


async def read_json_body(request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return the result of `parse` on the request's body, a JSON object.

    A long body is parsed in a thread. Raises APIError, InvalidRequest or ClientDisconnected.
    """
    if (error := media_type_error(request.scope["headers"])) is not None:
        raise error
    raw = await _read_bytes(request)
    if len(raw) > THREAD_MIN_BYTES:
        return await asyncio.to_thread(lambda: parse(parse_json_object(raw)))
    return parse(parse_json_object(raw))


def media_type_error(headers: Iterable[tuple[bytes, bytes]]) -> APIError | None:
    """Return the error for headers of a body that is not plain JSON, or None."""
    types = [value.decode("latin-1") for name, value in headers if name == b"content-type"]
    if len(types) != 1 or not _is_json(types[0]):
        quoted_types = "', '".join(map(excerpt, types[:2]))
        return APIError(
            415,
            "unsupported_media_type",
            f"The content type '{quoted_types}' is not supported. Send application/json",
        )
    header_values = [
        value.decode("latin-1") for name, value in headers if name == b"content-encoding"
    ]
    coding_names = [
        coding.strip() for header_value in header_values for coding in header_value.split(",")
    ]
    for coding in coding_names:
        if coding.lower() not in ("identity", ""):
            return APIError(
                415,
                "unsupported_media_type",
                f"content-encoding: '{excerpt(coding)}' is not supported. "
                "Send the body uncompressed, without this header",
                headers={"accept-encoding": "identity"},
            )
    return None


def _is_json(content_type: str) -> bool:
    media_type, _, parameters = content_type.partition(";")
    charsets = re.findall(r"charset\s*=\s*\"?([^\s;\"]*)", parameters, re.IGNORECASE)
    return media_type.strip().lower() == "application/json" and all(
        charset.lower() in ("utf-8", "utf8") for charset in charsets
    )


async def _read_bytes(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > MAX_BODY_BYTES):
        raise _body_too_large_error()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _body_too_large_error()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _body_too_large_error() -> APIError:
    return APIError(
        413,
        "request_too_large",
        f"The body is over {MAX_BODY_BYTES} bytes. Send less",
        headers={"connection": "close"},  # the rest of the body is not read
    )


class _JSONHooks:
    """Parses numbers and objects for the JSON decoder, and notes numbers that are not finite.

    Python calls these, not C, so a thread that parses many of them lets other threads run.

    all_finite   whether every number so far was finite
    """

    all_finite = True

    def parse_constant(self, text: str) -> float:
        """Return NaN for NaN, Infinity and -Infinity."""
        self.all_finite = False
        return math.nan

    def parse_float(self, text: str) -> float:
        """Return a number with a fraction or an exponent."""
        value = float(text)
        if math.isinf(value):
            self.all_finite = False
        return value

    def parse_int(self, text: str) -> int:
        """Return a number without a fraction or an exponent."""
        return int(text)

    def build_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object. Raises APIError for a repeated key, of which readers differ."""
        members = dict(pairs)
        if len(members) != len(pairs):
            names = Counter(name for name, _ in pairs)
            duplicate = next(name for name, count in names.items() if count > 1)
            raise APIError(
                400,
                "duplicate_key",
                f"The body has the key '{excerpt(duplicate)}' {names[duplicate]} times in one "
                "object. "
                "Send it once",
            )
        return members


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises APIError or InvalidRequest."""
    _check_num_items(raw)
    reader = _JSONHooks()
    if raw.startswith(BOM_UTF8):
        raise _invalid_json_error("it begins with a byte order mark (EF BB BF), which is not JSON")
    try:
        text = raw.decode()
        body = json.loads(
            text,
            parse_constant=reader.parse_constant,
            parse_float=reader.parse_float,
            parse_int=reader.parse_int,
            object_pairs_hook=reader.build_object,
        )
    except UnicodeDecodeError:
        raise _invalid_json_error("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _invalid_json_error(f"line {error.lineno} column {error.colno} is not JSON") from None
    except RecursionError:
        raise _invalid_json_error("it is nested too deep") from None
    except ValueError:  # an integer of thousands of digits
        raise _invalid_json_error("a number is too long") from None
    if not isinstance(body, dict):
        raise APIError(400, "invalid_type", "The body is not a JSON object. Send {...}")
    if not reader.all_finite or _SURROGATE_ESCAPE.search(text):
        for field, value in body.items():
            _check_values(field, value)
    return body


def _check_num_items(raw: bytes) -> None:
    """Raise APIError for a body of more than MAX_JSON_ITEMS objects, lists and strings."""
    if has_too_many_items(raw):
        raise APIError(
            400,
            "too_many_items",
            f"The body has more than {MAX_JSON_ITEMS} objects, lists and texts. Send several "
            "requests",
        )


def has_too_many_items(raw: bytes) -> bool:
    """Return whether JSON has more than MAX_JSON_ITEMS objects, lists and strings."""
    upper_bound = raw.count(b'"') // 2 + raw.count(b"[") + raw.count(b"{")
    return (
        upper_bound > MAX_JSON_ITEMS
        and next(islice(item_positions(raw), MAX_JSON_ITEMS, None), None) is not None
    )


def item_positions(raw: bytes) -> Iterator[int]:
    """Yield the position after the start of each list and object and after the end of each string.

    Keys are strings too. No single match takes long, so a thread that iterates lets others run.
    """
    position = 0
    while match := _ITEM_START.search(raw, position):
        position = match.end()
        if match[0] == b'"':
            while (
                string_part := _REST_OF_STRING.match(raw, position)
            ) and string_part.end() > position:
                position = string_part.end()
                if string_part[1]:
                    break
        yield position


def _invalid_json_error(problem: str) -> APIError:
    return APIError(400, "invalid_json", f"The body cannot be read: {problem}. Send a JSON object")


def _check_values(field: str, value: Any) -> None:
    """Raise InvalidRequest for a field with an infinite number, NaN or half a surrogate pair.

    Not recursive: the value may be nested as deep as the parser allows.
    """
    stack = [field, value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidRequest(
                excerpt(field), "a number is not finite", "Send finite numbers", "invalid_value"
            )
        elif isinstance(item, str) and not _is_unicode(item):
            raise InvalidRequest(
                excerpt(field),
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
