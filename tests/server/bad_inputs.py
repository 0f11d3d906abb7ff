"""Bad inputs, row by row: what is sent, and the response that a server must give.

Rows have numbers for reference. A number with several endpoints or several responses has several
rows. Rows 136 to 143 are about the state of a server, not about the content of one request: see
test_bad_inputs.py.

A row sends each of `sent` to each of `paths`:

    dict             fields in place of those of a good body; ABSENT omits one
    bytes            the whole body
    RawRequest       every byte of the request, with its own path
    ClosingRequest   a RawRequest after whose response the server ends the connection
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tests.server.http_wire import (
    AUTHORIZATION,
    HOST,
    JSON,
    KEY,
    WireResponse,
    build_head,
    build_post,
)

MAX_MODEL_LEN = 256
"""Tokens of a prompt and its output together: `max_model_len` of the server."""
VOCABULARY = 257
MAX_BODY_BYTES = 8 * 2**20
CHAT_OVERHEAD = 17
"""Tokens of a chat of one message in addition to its content: `user: ` and a line `assistant:`."""

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ALL = (COMPLETIONS, CHAT, GENERATE)
PROMPT_PATHS = (COMPLETIONS, GENERATE)
OPENAI_PATHS = (COMPLETIONS, CHAT)

ABSENT = object()
SENT_FIELD = "the field that was sent"
NAN, INF = float("nan"), float("inf")


class Literal(NamedTuple):
    """A value that json.dumps cannot write."""

    text: str


class RawRequest(NamedTuple):
    """A request, built when it is sent, and its number of responses."""

    request: Callable[[], bytes]
    answers: int = 1


class ClosingRequest(NamedTuple):
    """A request after which the server ends the connection."""

    request: Callable[[], bytes]


RequestSpec = Mapping[str, Any] | bytes | RawRequest | ClosingRequest


class BadInput(NamedTuple):
    """One kind of bad input, or an odd one that is valid: then `code` is None.

    param   ITS_NAME: the first of the fields that were sent
    check   another condition on each response
    """

    number: int
    description: str
    paths: tuple[str, ...]
    requests: tuple[RequestSpec, ...]
    status: int
    param: str | None
    code: str | None
    error_type: str = "invalid_request_error"
    check: Callable[[WireResponse], bool] = lambda answer: True


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    """Return a chat of one message."""
    return [{"role": "user", "content": content, **more}]


GOOD: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"model": "hash", "prompt": "good", "max_tokens": 1, "temperature": 0},
    CHAT: {"model": "hash", "messages": user("good"), "max_tokens": 1, "temperature": 0},
    GENERATE: {"prompt": "good", "max_tokens": 1, "temperature": 0},
}


def build_body(path: str, fields: Mapping[str, Any]) -> bytes:
    """Return the good body of a path, with these fields in place of its own."""
    fields_sent = {**GOOD[path], **fields}
    pairs = (
        f"{json.dumps(name)}: {value.text if isinstance(value, Literal) else json.dumps(value)}"
        for name, value in fields_sent.items()
        if value is not ABSENT
    )
    return ("{" + ", ".join(pairs) + "}").encode()


def row_requests(row: BadInput) -> Iterable[tuple[RawRequest | ClosingRequest, str | None]]:
    """Yield each request of the row, and the first of its fields, if it has one."""
    for sent in row.requests:
        if isinstance(sent, RawRequest | ClosingRequest):
            yield sent, None
        else:
            for path in row.paths:
                body = sent if isinstance(sent, bytes) else build_body(path, sent)
                name = next(iter(sent)) if isinstance(sent, Mapping) else None
                yield RawRequest(lambda path=path, body=body: build_post(path, body)), name  # type: ignore[misc]


def refused_row(
    number: int,
    what: str,
    paths: tuple[str, ...],
    *sent: RequestSpec,
    param: str | None = SENT_FIELD,
    code: str = "invalid_value",
    status: int = 400,
) -> BadInput:
    """Return a row that is refused."""
    return BadInput(number, what, paths, sent, status, param, code)


def transport_row(
    number: int, what: str, *sent: RawRequest | ClosingRequest, status: int, code: str | None
) -> BadInput:
    """Return a row about the transport, without a field."""
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return BadInput(number, what, (), sent, status, None, code, kind)


def accepted_row(
    number: int,
    what: str,
    paths: tuple[str, ...],
    *sent: RequestSpec,
    check: Callable[[WireResponse], bool] = lambda answer: True,
) -> BadInput:
    """Return a row that is served."""
    return BadInput(number, what, paths, sent, 200, None, None, check=check)


# Checks of responses.


def finish_reason(answer: WireResponse) -> str:
    """Return the finish reason of the first choice."""
    body = answer.json
    return str(body["choices"][0]["finish_reason"] if "choices" in body else body["finish_reason"])


def prompt_tokens(answer: WireResponse) -> int:
    """Return the number of prompt tokens in the usage."""
    body = answer.json
    return int(body["usage"]["prompt_tokens"] if "usage" in body else body["prompt_tokens"])


def choice_texts(answer: WireResponse) -> list[str]:
    """Return the texts of all choices."""
    body = answer.json
    if "choices" not in body:
        return [body["text"]]
    return [c["text"] if "text" in c else c["message"]["content"] for c in body["choices"]]


def has_tokens(count: int) -> Callable[[WireResponse], bool]:
    """Return a check that the prompt has so many tokens."""
    return lambda answer: prompt_tokens(answer) == count


def ends_with_length(answer: WireResponse) -> bool:
    """Return whether a limit ended the output."""
    return finish_reason(answer) == "length"


def has_another_id(answer: WireResponse) -> bool:
    """Return whether the server made the request id."""
    given = answer.headers["x-request-id"]
    return len(given) == 24 and given.isalnum()


# Builders of requests.

SMALL = build_body(GENERATE, {})


def raw_request(*parts: bytes) -> RawRequest:
    """Return a request of these bytes."""
    return RawRequest(lambda: b"".join(parts))


def closing_request(*parts: bytes) -> ClosingRequest:
    """Return a request of these bytes, after which the server ends the connection."""
    return ClosingRequest(lambda: b"".join(parts))


def request_without_key(method: str, path: str, *headers: str) -> RawRequest:
    """Return a good request without a key."""
    length = f"content-length: {len(SMALL) if method == 'POST' else 0}"
    start = build_head(method, path, HOST, JSON, length, *headers)
    return raw_request(start, SMALL if method == "POST" else b"")


def request_with_content_type(content_type: str) -> RawRequest:
    """Return a good request with this content type, or with none."""
    named = [f"content-type: {content_type}"] if content_type else []
    length = f"content-length: {len(SMALL)}"
    return raw_request(build_head("POST", GENERATE, HOST, AUTHORIZATION, length, *named), SMALL)


def request_with_id(request_id: str) -> RawRequest:
    """Return a good request with an x-request-id."""
    return raw_request(build_post(GENERATE, SMALL, f"x-request-id: {request_id}"))


def oversized_chunked_request() -> bytes:
    """Return a body that is one byte too long, which only its last chunk shows."""
    start = build_head("POST", COMPLETIONS, HOST, JSON, AUTHORIZATION, "transfer-encoding: chunked")
    part = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    return start + part * (MAX_BODY_BYTES // 2**20) + b"1\r\n \r\n"


def pipelined_requests() -> bytes:
    """Return pipelined requests."""
    return build_post(GENERATE, b"{}") * 100


LENGTH = f"content-length: {len(SMALL)}"

TRANSPORT = [
    transport_row(
        1,
        "a request that never comes to its end",
        closing_request(f"POST {GENERATE} HTTP/1.1\r\n".encode()),
        closing_request(
            build_head("POST", GENERATE, HOST, JSON, AUTHORIZATION, "content-length: 50"),
            b'{"prompt": ',
        ),
        status=408,
        code="request_timeout",
    ),
    transport_row(
        3,
        "a header of megabytes",
        closing_request(
            build_head(
                "POST", GENERATE, HOST, JSON, AUTHORIZATION, LENGTH, "x-long: " + "y" * 20_000
            )
        ),
        closing_request(
            build_head("GET", "/v1/models", HOST, AUTHORIZATION, "x-long: " + "y" * 2**20)
        ),
        status=431,
        code="headers_too_large",
    ),
    transport_row(
        4,
        "thousands of headers",
        closing_request(
            build_head(
                "GET", "/v1/models", HOST, AUTHORIZATION, *(f"x-{i}: y" for i in range(5000))
            )
        ),
        closing_request(build_head("GET", "/v1/models", HOST, AUTHORIZATION, *["x: y"] * 200)),
        status=431,
        code="headers_too_large",
    ),
    transport_row(
        5,
        "two ways to say where the body ends",
        closing_request(
            build_head(
                "POST", GENERATE, HOST, JSON, AUTHORIZATION, LENGTH, "transfer-encoding: chunked"
            ),
            b"0\r\n\r\n",
        ),
        status=400,
        code="bad_framing",
    ),
    transport_row(
        152,
        "lines that end or go on as none may",
        *(
            closing_request(f"GET /livez HTTP/1.1{end}".encode())
            for end in (
                *("\nhost: a\r\n\r\n", "\r\nhost: a\n\r\n", "\r\nhost: a\r\n\n"),
                *("\r\nhost: a\r\n b\r\n\r\n", "\r\n\thost: a\r\n\r\n", "\r\nhost: a\rb\r\n"),
                *("\r\nhost : a\r\n\r\n", "\r\nhost\r\n\r\n", "\r\n\x00: a\r\nhost: a\r\n\r\n"),
            )
        ),
        status=400,
        code="bad_framing",
    ),
    transport_row(
        154,
        "another version of HTTP",
        closing_request(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        *(
            closing_request(f"GET /livez HTTP/{v}\r\nhost: a\r\n\r\n".encode())
            for v in ("2.0", "0.9", "9.9")
        ),
        status=400,
        code="bad_framing",
    ),
    accepted_row(
        155,
        "a probe of HTTP/1.0 without a host",
        (),
        *(raw_request(f"GET {path} HTTP/1.0\r\n\r\n".encode()) for path in ("/livez", "/healthz")),
    ),
    transport_row(
        155,
        "another request of HTTP/1.0 without a host, and a probe with two",
        closing_request(f"GET /v1/models HTTP/1.0\r\n{AUTHORIZATION}\r\n\r\n".encode()),
        closing_request(b"GET /livez HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n"),
        status=400,
        code="bad_host",
    ),
    transport_row(
        156,
        "a body that waits for a 100 response and is refused",
        *(
            closing_request(
                build_head(
                    "POST", "/nowhere", HOST, JSON, AUTHORIZATION, LENGTH, f"expect: {value}"
                ),
                SMALL,
            )
            for value in ("100-continue", "100-Continue")
        ),
        closing_request(
            build_head(
                "POST", "/nowhere", HOST, JSON, AUTHORIZATION, LENGTH, "expect: 100-continue"
            ),
            build_head("GET", "/livez", HOST),
        ),
        status=404,
        code="not_found",
    ),
    transport_row(
        153,
        "chunks that are none",
        *(
            closing_request(
                build_head(
                    "POST", GENERATE, HOST, JSON, AUTHORIZATION, "transfer-encoding: chunked"
                ),
                chunks,
            )
            for chunks in (
                *(b"11111111111111111\r\n", b"1" * 17, b"x\r\n", b"-1\r\n", b"2\n{}\r\n0\r\n\r\n"),
                *(b"2\r\n{}x0\r\n\r\n", b"2;a\nb\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\n"),
                b"2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n",
            )
        ),
        *(
            closing_request(
                build_head("POST", GENERATE, HOST, JSON, AUTHORIZATION, *lengths), SMALL
            )
            for lengths in (
                (LENGTH, LENGTH),
                (f"content-length: {len(SMALL)}, {len(SMALL)}",),
                (f"content-length: +{len(SMALL)}",),
                ("transfer-encoding: gzip, chunked",),
                ("transfer-encoding: chunked", "transfer-encoding: identity"),
            )
        ),
        status=400,
        code="bad_framing",
    ),
    transport_row(
        7,
        "a length that is none",
        *(
            closing_request(
                build_head("POST", GENERATE, HOST, JSON, AUTHORIZATION, f"content-length: {length}")
            )
            for length in ("-1", "abc", "1e3", "5, 6", "9" * 30)
        ),
        status=400,
        code="bad_framing",
    ),
    transport_row(
        8,
        "a body that declares a length over the limit",
        *(
            closing_request(
                build_head("POST", path, HOST, JSON, AUTHORIZATION, f"content-length: {length}")
            )
            for path in (*ALL, "/tokenize", "/detokenize")
            for length in (MAX_BODY_BYTES + 1, 10**18)
        ),
        status=413,
        code="request_too_large",
    ),
    transport_row(
        9,
        "a body that grows too long",
        ClosingRequest(oversized_chunked_request),
        status=413,
        code="request_too_large",
    ),
    transport_row(
        11,
        "no host",
        closing_request(build_head("POST", GENERATE, JSON, AUTHORIZATION, LENGTH), SMALL),
        status=400,
        code="bad_host",
    ),
    transport_row(
        12,
        "a host with a path, with and without a key",
        *(
            closing_request(
                build_head("POST", GENERATE, f"host: {host}", JSON, LENGTH, *key), SMALL
            )
            for host in ("evil/?x=", "a/#", "/livez?", "a b", "")
            for key in ([], [AUTHORIZATION])
        ),
        status=400,
        code="bad_host",
    ),
    transport_row(
        13,
        "another spelling of a path, without a key",
        *(
            request_without_key("POST", path)
            for path in (
                *("//v1/completions", "/v1/%63ompletions", "/V1/Completions", "/v1/completions/"),
                *("/livez/../generate", "/livez/%2e%2e/generate", "/livez%2f..%2fgenerate"),
                *("/LIVEZ", "/livez/", "//livez", "/livez;/generate"),
            )
        ),
        status=401,
        code="invalid_api_key",
    ),
    transport_row(
        13,
        "a control character in a path",
        *(
            request_without_key("POST", path, *key)
            for key in ([], [AUTHORIZATION])
            for path in ("/livez%00", "/generate%0a", "/v1/models/hash%0a", "/v1/sessions/%1b%5b2J")
        ),
        status=400,
        code="invalid_path",
    ),
    transport_row(
        13,
        "another spelling of a path, with a key",
        *(
            raw_request(build_post(path, SMALL))
            for path in (
                *("//v1/completions", "/V1/Completions", "/v1/completions/", "/livez/../generate"),
                *("/livez/%2e%2e/generate", "/livez%2f..%2fgenerate", "/livez/", "/LIVEZ"),
            )
        ),
        status=404,
        code="not_found",
    ),
    accepted_row(
        148,
        "a target that is a whole URL",
        (),
        raw_request(build_post(f"http://localhost{GENERATE}", SMALL)),
        raw_request(build_post(f"HTTP://127.0.0.1:1{GENERATE}?a=b", SMALL)),
        request_without_key("GET", "https://localhost/livez"),
        raw_request(b"GET http://localhost/livez HTTP/1.0\r\n\r\n"),
    ),
    transport_row(
        148,
        "a target that is a whole URL, without a key",
        *(
            request_without_key("GET", f"http://localhost{path}")
            for path in ("/v1/models", "", "?/livez", "/livez/../v1/models", "//livez")
        ),
        status=401,
        code="invalid_api_key",
    ),
    transport_row(
        148,
        "a target that is a URL of no host",
        *(
            closing_request(build_head("GET", f"http://{host}/livez", HOST, AUTHORIZATION))
            for host in ("", "user@localhost", "localhost:80:80", "[::1", "%6cocalhost")
        ),
        status=400,
        code="bad_host",
    ),
    transport_row(
        15,
        "a path of nothing",
        raw_request(build_post("/v1/nope", SMALL)),
        status=404,
        code="not_found",
    ),
    transport_row(
        16,
        "a body that is not called JSON",
        *(
            request_with_content_type(t)
            for t in ("", "text/plain", "application/jsonx", "multipart/form-data")
        ),
        request_with_content_type("application/x-www-form-urlencoded"),
        status=415,
        code="unsupported_media_type",
    ),
    transport_row(
        17,
        "JSON in another encoding",
        request_with_content_type("application/json; charset=utf-16"),
        request_with_content_type("application/json; charset=utf-8; charset=utf-16"),
        status=415,
        code="unsupported_media_type",
    ),
    transport_row(
        144,
        "a body that is called encoded",
        *(
            raw_request(build_post(path, SMALL, f"content-encoding: {coding}"))
            for path in (*ALL, "/tokenize", "/detokenize", "/reset_prefix_cache", "/nowhere")
            for coding in ("gzip", "GZIP", "x-gzip", "deflate, identity", "br", "identity, gzip")
        ),
        raw_request(build_post(GENERATE, gzip.compress(SMALL), "content-encoding: gzip")),
        raw_request(
            build_post(GENERATE, SMALL, "content-encoding: identity", "content-encoding: gzip")
        ),
        status=415,
        code="unsupported_media_type",
    )._replace(
        check=lambda answer: (
            "content-encoding" in answer.json["error"]["message"]
            and answer.headers["accept-encoding"] == "identity"
        )
    ),
    accepted_row(
        144,
        "a body that is called as it is",
        (),
        raw_request(build_post(GENERATE, SMALL, "content-encoding: identity")),
    ),
    transport_row(
        145,
        "two content types",
        *(
            raw_request(build_post(GENERATE, SMALL, f"content-type: {other}"))
            for other in ("application/json", "text/plain")
        ),
        status=415,
        code="unsupported_media_type",
    ),
    BadInput(
        19,
        "a hundred requests sent at once",
        (),
        (RawRequest(pipelined_requests, 100),),
        400,
        "prompt",
        "missing_required_parameter",
    ),
    accepted_row(
        20,
        "a thousand ranges",
        (),
        raw_request(
            build_head(
                "GET", "/openapi.json", HOST, AUTHORIZATION, "range: bytes=0-" + ",0-" * 1000
            )
        ),
        check=lambda answer: answer.json["openapi"] == "3.1.0",
    ),
]

KEYS = [
    transport_row(
        21,
        "no key",
        *(request_without_key("POST", path) for path in (*ALL, "/tokenize", "/detokenize")),
        status=401,
        code="invalid_api_key",
    )._replace(check=lambda answer: answer.headers["www-authenticate"] == "Bearer"),
    transport_row(
        23,
        "a key of thousands of characters",
        request_without_key("POST", GENERATE, f"authorization: Bearer {'k' * 10_000}"),
        status=401,
        code="invalid_api_key",
    ),
    transport_row(
        23,
        "a key of a million characters",
        closing_request(
            build_head("POST", GENERATE, HOST, JSON, f"authorization: Bearer {'k' * 10**6}")
        ),
        status=431,
        code="headers_too_large",
    ),
    transport_row(
        24,
        "a key that is almost one",
        *(
            request_without_key("POST", GENERATE, f"authorization: {value}")
            for value in (
                *(f"Basic {KEY}", f"Bearer  {KEY}", "Bearer", "Bearer ", "bearer", KEY),
                *(
                    f"Bearer {KEY}x",
                    f"Bearer {KEY[:-1]}",
                    f"Bearer {KEY.upper()}",
                    f"Bearer\t{KEY}",
                ),
            )
        ),
        request_without_key("POST", GENERATE, AUTHORIZATION, AUTHORIZATION),
        status=401,
        code="invalid_api_key",
    ),
    accepted_row(
        24,
        "a scheme in another case",
        (),
        *(
            request_without_key("POST", GENERATE, f"authorization: {scheme} {KEY}")
            for scheme in ("bearer", "BEARER", "bEARER")
        ),
    ),
    transport_row(
        25,
        "a key that is not ASCII",
        request_without_key("POST", GENERATE, "authorization: Bearer \xe9\xff\x80"),
        status=401,
        code="invalid_api_key",
    ),
    transport_row(
        27,
        "any route without a key",
        *(
            request_without_key("GET", path)
            for path in (
                *("/metrics", "/debug", "/admin/x", "/", "/v1/models", "/v1/models/hash"),
                *("/version", "/tokenizer_info", "/openapi.json", "/docs", "/generate"),
            )
        ),
        request_without_key("POST", "/reset_prefix_cache"),
        status=401,
        code="invalid_api_key",
    ),
    accepted_row(
        27,
        "a probe without a key",
        (),
        *(request_without_key("GET", path) for path in ("/livez", "/readyz", "/healthz", "/ping")),
    ),
    transport_row(
        28,
        "a key in the path",
        *(
            request_without_key("POST", f"{GENERATE}?{name}={KEY}")
            for name in ("api_key", "key", "token")
        ),
        status=401,
        code="invalid_api_key",
    ),
]

MILLION = Literal("[" + "1," * 999_999 + "1]")


def many_names_json(count: int) -> str:
    """Return a JSON object with so many names, built at once: every worker makes the rows."""
    return '{"' + str(list(range(count)))[1:-1].replace(", ", '":1,"') + '":1}'


MANY_IDS = Literal(many_names_json(200_000))
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

SHAPE = [
    refused_row(29, "no body", ALL, b"", b" ", param=None, code="invalid_json"),
    refused_row(
        31,
        "bytes that are not UTF-8",
        ALL,
        b"\xff\xfe",
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xc0\xaf"}',
        param=None,
        code="invalid_json",
    ),
    refused_row(32, "a byte order mark", ALL, b"\xef\xbb\xbf{}", param=None, code="invalid_json"),
    *(
        BadInput(146, "a key that comes twice", ALL, sent, 400, None, "duplicate_key", check=holds)
        for holds, *sent in (
            (lambda answer: "'seed' 2 times" in answer.body.decode(), b'{"seed": 1, "seed": 1}'),
            (
                lambda answer: "'a' 3 times" in answer.body.decode(),
                b'{"metadata": {"a": "x", "b": "y", "a": "z", "\\u0061": "x"}}',
                b'{"unknown": [[{"b": {"a": 1, "a": 1, "a": 1}}]]}',
                b'{"a": NaN, "a": 1, "a": "\\ud800"}',
            ),
            (
                lambda answer: r"\\x1b" in answer.body.decode(),
                b'{"\\u001b[2J": 1, "\\u001b[2J": 2}',
            ),
        )
    ),
    refused_row(
        147,
        "a body of half a million parts",
        (GENERATE,),
        b'{"foo": [' + b"[],{}," * 2**18 + b"1]}",
        b'{"foo": ' + many_names_json(2**19).encode() + b"}",
        param=None,
        code="too_many_items",
    ),
    refused_row(
        33,
        "something else than an object",
        ALL,
        *(b'"text"', b"42", b"null", b"true", b"[]", b"NaN", b'[{"prompt": "a"}]'),
        param=None,
        code="invalid_type",
    ),
    refused_row(
        35,
        "an integer of 5,000 digits",
        ALL,
        {"seed": Literal("9" * 5000)},
        {"max_tokens": Literal("-" + "9" * 5000)},
        param=None,
        code="invalid_json",
    ),
    refused_row(35, "lists in lists in lists", ALL, DEEP, param=None, code="invalid_json"),
    refused_row(
        36,
        "a number that is none",
        ALL,
        *({name: value} for name in ("temperature", "top_p", "foo") for value in (NAN, INF, -INF)),
    ),
    refused_row(36, "a number that is none, deep inside", ALL, {"metadata": {"a": [[NAN]]}}),
    refused_row(
        37,
        "a number past the last one",
        ALL,
        {"temperature": Literal("1e999")},
        {"temperature": Literal("-1e999")},
        {"seed": Literal("1e400")},
    ),
    refused_row(
        39,
        "half a surrogate pair",
        ALL,
        *(
            {"stop": "\ud800"},
            {"user": "\udfff"},
            {"model": "\ud800"},
            {"metadata": {"\ud800": "a"}},
        ),
        code="invalid_unicode",
    ),
    refused_row(
        39, "half a surrogate pair", PROMPT_PATHS, {"prompt": "a\ud800b"}, code="invalid_unicode"
    ),
    refused_row(
        39, "half a surrogate pair", (CHAT,), {"messages": user("\udc00")}, code="invalid_unicode"
    ),
    accepted_row(40, "NUL inside a text", PROMPT_PATHS, {"prompt": "a\x00b"}, check=has_tokens(3)),
    accepted_row(
        40,
        "NUL inside a text",
        (CHAT,),
        {"messages": user("a\x00b")},
        check=has_tokens(3 + CHAT_OVERHEAD),
    ),
    refused_row(
        41, "a million items in no field", ALL, {"zeros": MILLION}, code="unknown_parameter"
    ),
    refused_row(
        43, "no field", ALL, {"foo": 1}, {"foo": None}, {"Prompt": "a"}, code="unknown_parameter"
    ),
    refused_row(
        44,
        "a field that is not served",
        ALL,
        {"audio": {"format": "mp3"}},
        {"best_of": 2},
        {"use_beam_search": True},
        {"prompt_embeds": "AAAA"},
        code="unsupported_parameter",
    ),
    refused_row(
        44,
        "an image",
        (CHAT,),
        {"messages": user([{"type": "image_url", "image_url": {"url": "http://localhost/"}}])},
        param="messages[0].content",
        code="unsupported_parameter",
    ),
]

NO_MODEL = ({"model": ABSENT}, {"model": None})

PROMPTS = [
    # The one model is served whether it is named or not.
    accepted_row(45, "no model", ALL, *NO_MODEL),
    refused_row(45, "a model of no name", ALL, {"model": ""}, code="model_not_found", status=404),
    refused_row(
        45, "a model that is no name", ALL, {"model": 7}, {"model": ["hash"]}, code="invalid_type"
    ),
    refused_row(
        47,
        "a model that is not there",
        ALL,
        {"model": "../../etc/passwd"},
        {"model": "m" * 10**6},
        {"model": "hash\r\nx-injected: 1"},
        {"model": "\x1b[31mhash"},
        code="model_not_found",
        status=404,
    ),
    refused_row(
        48,
        "no prompt",
        PROMPT_PATHS,
        *({"prompt": ABSENT}, {"prompt": None}),
        param="prompt",
        code="missing_required_parameter",
    ),
    refused_row(
        48,
        "no messages",
        (CHAT,),
        *({"messages": ABSENT}, {"messages": None}),
        code="missing_required_parameter",
    ),
    refused_row(
        49, "an empty prompt", PROMPT_PATHS, {"prompt": ""}, {"prompt": []}, code="empty_prompt"
    ),
    refused_row(
        51,
        "an empty prompt among others",
        (COMPLETIONS,),
        {"prompt": ["a", ""]},
        param="prompt[1]",
        code="empty_prompt",
    ),
    refused_row(
        52,
        "an empty prompt among others, as ids",
        (COMPLETIONS,),
        {"prompt": [[1, 2], []]},
        param="prompt[1]",
        code="empty_prompt",
    ),
    refused_row(
        53,
        "prompts of several kinds",
        PROMPT_PATHS,
        *({"prompt": value} for value in (["a", 1], [[1], "a"], [1, [2]], [[["a"]]], [None], {})),
        *({"prompt": value} for value in (5, True, [True], [1.0], [{}])),
        code="invalid_type",
    ),
    refused_row(55, "an id below 0", PROMPT_PATHS, {"prompt": [-1]}, code="token_out_of_range"),
    refused_row(
        56,
        "an id that the model does not have",
        PROMPT_PATHS,
        *({"prompt": [value]} for value in (VOCABULARY, 2**31, 2**63, 10**400)),
        code="token_out_of_range",
    ),
    refused_row(
        57,
        "ten thousand prompts",
        (COMPLETIONS,),
        {"prompt": ["a"] * 10_000},
        {"prompt": [[1]] * 10_000},
        code="too_many_prompts",
    ),
    refused_row(57, "several prompts", (GENERATE,), {"prompt": ["a", "b"]}, code="invalid_type"),
    refused_row(
        59,
        "a prompt that leaves no room for an answer",
        PROMPT_PATHS,
        {"prompt": "x" * MAX_MODEL_LEN},
        {"prompt": [1] * MAX_MODEL_LEN},
        code="context_length_exceeded",
    ),
    refused_row(
        59,
        "a chat that leaves no room for an answer",
        (CHAT,),
        {"messages": user("x" * (MAX_MODEL_LEN - CHAT_OVERHEAD))},
        {"messages": user("x" * (MAX_MODEL_LEN - CHAT_OVERHEAD)), "max_tokens": None},
        code="context_length_exceeded",
    ),
    accepted_row(60, "the longest prompt", PROMPT_PATHS, {"prompt": "x" * (MAX_MODEL_LEN - 1)}),
    accepted_row(
        60,
        "the longest chat",
        (CHAT,),
        {"messages": user("x" * (MAX_MODEL_LEN - CHAT_OVERHEAD - 1))},
    ),
    refused_row(
        61,
        "one token more than fits",
        PROMPT_PATHS,
        {"prompt": "x" * 56, "max_tokens": MAX_MODEL_LEN - 55},
        param="max_tokens",
        code="context_length_exceeded",
    ),
    refused_row(
        61,
        "one token more than fits",
        (CHAT,),
        {"messages": user("x" * 39), "max_tokens": MAX_MODEL_LEN - 55},
        param="max_tokens",
        code="context_length_exceeded",
    ),
    transport_row(
        63,
        "a prompt of 27 MB",
        *(
            closing_request(
                build_head(
                    "POST", path, HOST, JSON, AUTHORIZATION, f"content-length: {27 * 10**6}"
                ),
                b'{"prompt": "xxxxxxxx',
            )
            for path in ALL
        ),
        status=413,
        code="request_too_large",
    ),
    refused_row(
        64,
        "a million times one character",
        PROMPT_PATHS,
        {"prompt": "x" * 10**6},
        {"prompt": " " * 10**6},
        code="context_length_exceeded",
    ),
    refused_row(
        64,
        "a million times one character",
        (CHAT,),
        {"messages": user("x" * 10**6)},
        code="context_length_exceeded",
    ),
    accepted_row(
        65, "the name of a special token", PROMPT_PATHS, {"prompt": "<|end|>"}, check=has_tokens(1)
    ),
    accepted_row(
        65,
        "the name of a special token as text",
        PROMPT_PATHS,
        {"prompt": "<|end|>", "parse_special_tokens": False},
        check=has_tokens(7),
    ),
    accepted_row(
        65,
        "the name of a special token",
        (CHAT,),
        {"messages": user("<|end|>")},
        {"messages": user("<|end|>", name="a")},
        check=has_tokens(7 + CHAT_OVERHEAD),
    ),
]


def message(*messages: Any) -> dict[str, Any]:
    """Return the fields of a chat of these messages."""
    return {"messages": list(messages)}


MESSAGES = [
    refused_row(67, "no message", (CHAT,), message(), code="empty_messages"),
    refused_row(
        68,
        "a message that is none",
        (CHAT,),
        *(message(value) for value in (None, "x", [], 1)),
        param="messages[0]",
        code="invalid_type",
    ),
    refused_row(
        69,
        "a role that is none",
        (CHAT,),
        message({"content": "a"}),
        *(
            message({"role": role, "content": "a"})
            for role in ("a wizard", 1, None, "", [], "User")
        ),
        param="messages[0].role",
    ),
    refused_row(
        71,
        "a message of a user without text",
        (CHAT,),
        *(message({"role": "user", "content": None}), message({"role": "user"})),
        param="messages[0].content",
        code="invalid_type",
    ),
    refused_row(
        72,
        "content that is no text",
        (CHAT,),
        *(message({"role": "user", "content": value}) for value in (5, {}, True)),
        param="messages[0].content",
        code="invalid_type",
    ),
    refused_row(
        73,
        "content of parts that are none",
        (CHAT,),
        *({"messages": user(value)} for value in ([], [{"type": "text"}], [{"type": "x"}])),
        {"messages": user([{"type": "text", "text": 5}])},
        param="messages[0].content",
    ),
    refused_row(
        75,
        "a hundred thousand messages",
        (CHAT,),
        {"messages": user("a") * 100_000},
        code="too_many_messages",
    ),
    refused_row(
        76,
        "a name that is none",
        (CHAT,),
        *({"messages": user("a", name=name)} for name in ("a\nb", "x" * 10_000, "", 5, "<|end|>")),
        param="messages[0].name",
    ),
    refused_row(
        77,
        "a chat that its template refuses",
        (CHAT,),
        message(*user("a"), *user("b")),
        {**message(*user("a"), *user("b")), "stream": True},
        code="template_error",
    ),
    refused_row(
        79,
        "a template of the request",
        (CHAT,),
        {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template": "{{ messages }}"},
        code="unsupported_parameter",
    ),
    refused_row(
        80,
        "a chat that continues a message and starts one",
        (CHAT,),
        {"continue_final_message": True, "add_generation_prompt": True},
    ),
    refused_row(
        81,
        "a tool that answers no call",
        (CHAT,),
        message(*user("a"), {"role": "tool", "content": "a"}),
        param="messages[1].tool_call_id",
        code="missing_required_parameter",
    ),
]

BIG = 10**400

SAMPLING = [
    refused_row(83, "no token at all", ALL, {"max_tokens": 0}),
    accepted_row(
        83,
        "a prompt and its scores alone",
        (COMPLETIONS,),
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        check=lambda answer: choice_texts(answer) == ["good"],
    ),
    refused_row(
        84,
        "a limit that is none",
        ALL,
        *({"max_tokens": value} for value in (-1, 1.5, "10", True, 2**63, 10**30, BIG, [], {})),
    ),
    refused_row(
        149,
        "more tokens at least than fit",
        (CHAT,),
        *(
            {"min_tokens": count, "max_tokens": ABSENT}
            for count in (MAX_MODEL_LEN - CHAT_OVERHEAD - len("good") + 1, 2**31 - 1)
        ),
        code="context_length_exceeded",
    ),
    refused_row(
        149,
        "more tokens at least than at most",
        PROMPT_PATHS,
        {"min_tokens": 2},
        {"min_tokens": 33, "max_tokens": ABSENT},
    ),
    accepted_row(
        149,
        "as many tokens at least as fit",
        (CHAT,),
        {"min_tokens": MAX_MODEL_LEN - CHAT_OVERHEAD - len("good"), "max_tokens": ABSENT},
        check=lambda answer: (
            ends_with_length(answer) and answer.json["usage"]["total_tokens"] == MAX_MODEL_LEN
        ),
    ),
    refused_row(
        150,
        "fewer choices to choose from than choices",
        OPENAI_PATHS,
        {"best_of": 1, "n": 2},
        {"best_of": 0},
        {"best_of": -1},
        {"best_of": "1"},
        {"best_of": True},
    ),
    accepted_row(
        150, "all choices that there are", OPENAI_PATHS, {"best_of": 2, "n": 2}, {"best_of": None}
    ),
    accepted_row(
        151,
        "usage of every chunk and not of the last",
        OPENAI_PATHS,
        {"stream_options": {"continuous_usage_stats": True}, "stream": True},
        {
            "stream_options": {"continuous_usage_stats": True, "include_usage": False},
            "stream": True,
        },
    ),
    refused_row(
        85,
        "two limits",
        (CHAT,),
        {"max_completion_tokens": 2},
        code="conflicting_parameters",
    ),
    refused_row(
        87,
        "choices that are none",
        OPENAI_PATHS,
        *({"n": value} for value in (0, -1, 1.5, "2", True, [])),
    ),
    accepted_row(87, "as many choices as there are by default", ALL, {"n": None}),
    refused_row(
        87,
        "choices of a route that has one",
        (GENERATE,),
        *({"n": value} for value in (0, -1, 1.5, "2", True, 2, 129, 10**9)),
        code="unsupported_parameter",
    ),
    refused_row(
        88, "choices without end", OPENAI_PATHS, *({"n": value} for value in (129, 10**9, BIG))
    ),
    accepted_row(
        89,
        "choices without chance",
        OPENAI_PATHS,
        {"n": 3},
        check=lambda answer: len(choice_texts(answer)) == 3 and len(set(choice_texts(answer))) == 1,
    ),
    refused_row(
        91,
        "a temperature that is none",
        ALL,
        *({"temperature": value} for value in (-0.1, 2.1, "1", True, BIG, [], {})),
    ),
    accepted_row(91, "the temperature that is there by default", ALL, {"temperature": None}),
    accepted_row(92, "a temperature near 0", ALL, {"temperature": 1e-40}, {"temperature": 5e-324}),
    refused_row(
        93, "top_p out of range", ALL, *({"top_p": value} for value in (0, -1, 1.1, NAN, "1"))
    ),
    refused_row(
        95, "top_k out of range", ALL, *({"top_k": value} for value in (-2, 1.5, 10**12, "1"))
    ),
    accepted_row(95, "top_k that is off", ALL, {"top_k": -1}, {"top_k": 0}),
    refused_row(
        96, "min_p out of range", ALL, *({"min_p": value} for value in (-0.1, 1.1, NAN, "1"))
    ),
    refused_row(
        97,
        "a penalty out of range",
        ALL,
        *(
            {name: value}
            for name in ("frequency_penalty", "presence_penalty")
            for value in (2.1, -2.1, NAN, "1", True)
        ),
        *({"repetition_penalty": value} for value in (0, -1, 11, NAN)),
    ),
    accepted_row(
        99,
        "a penalty",
        ALL,
        *({name: 2} for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
        {"frequency_penalty": -2, "max_tokens": 3},
    ),
    refused_row(
        100, "a seed that is none", ALL, *({"seed": v} for v in (2**63, 2**64, 1.5, "x", True))
    ),
    accepted_row(100, "a seed at the edge", ALL, *({"seed": v} for v in (-1, -(2**63), 2**63 - 1))),
    refused_row(
        101,
        "a bias that is none",
        ALL,
        *({"logit_bias": v} for v in ([], "x", {"a": 1}, {"1": "x"}, {"01": 1}, {"-1": 1})),
        {"logit_bias": {"9" * 5000: 1}},
        code="invalid_type",
    ),
    refused_row(
        101,
        "a bias of an id that the model does not have",
        ALL,
        {"logit_bias": {str(VOCABULARY): 1}},
        code="token_out_of_range",
    ),
    refused_row(
        103,
        "a bias out of range",
        ALL,
        *({"logit_bias": {"1": value}} for value in (101, -101, NAN)),
    ),
    refused_row(
        104,
        "a bias of 200,000 ids",
        ALL,
        {"logit_bias": MANY_IDS},
        code="too_many_items",
    ),
    accepted_row(
        105,
        "a bias against everything",
        ALL,
        {"logit_bias": {str(i): -100 for i in range(VOCABULARY)}},
        {"logit_bias": {str(i): -100 for i in range(VOCABULARY)}, "temperature": 1},
    ),
    refused_row(
        107,
        "a stop id that the model does not have",
        ALL,
        *({"stop_token_ids": [value]} for value in (-1, VOCABULARY, 2**63)),
        code="token_out_of_range",
    ),
    refused_row(107, "a million stop ids", ALL, {"stop_token_ids": MILLION}, code="too_many_items"),
    refused_row(108, "an empty stop", ALL, {"stop": ""}, {"stop": [""]}, {"stop": ["a", ""]}),
    refused_row(
        109,
        "a stop that is no text",
        ALL,
        *({"stop": value} for value in ([1], {"a": 1}, [["a"]], 1, [None])),
        code="invalid_type",
    ),
    refused_row(
        111,
        "a stop of a million characters",
        ALL,
        {"stop": "x" * 10**6},
        {"stop": ["x" * 10**6]},
        code="string_too_long",
    ),
    accepted_row(
        112,
        "an answer without a limit that nothing ends",
        PROMPT_PATHS,
        {"prompt": "x" * 64, "max_tokens": None, "ignore_eos": True},
        check=ends_with_length,
    ),
    accepted_row(
        112,
        "an answer without a limit that nothing ends",
        (CHAT,),
        {
            "messages": user("x" * (MAX_MODEL_LEN - CHAT_OVERHEAD - 5)),
            "max_tokens": None,
            "ignore_eos": True,
        },
        check=lambda answer: (
            ends_with_length(answer) and answer.json["usage"]["total_tokens"] == MAX_MODEL_LEN
        ),
    ),
]

FORMATS = [
    refused_row(
        113,
        "scores that are none",
        (COMPLETIONS,),
        *({"logprobs": value} for value in (-1, 21, True, "1", 1.5)),
    ),
    refused_row(113, "scores that are none", (CHAT,), {"top_logprobs": 21, "logprobs": True}),
    refused_row(115, "scores of others without one's own", (CHAT,), {"top_logprobs": 5}),
    refused_row(
        116, "a number of scores where there is one", (CHAT,), {"logprobs": 5}, code="invalid_type"
    ),
    refused_row(
        119,
        "a stream that is none",
        OPENAI_PATHS,
        *({"stream": value} for value in ("true", 1)),
        code="invalid_type",
    ),
    refused_row(
        119,
        "a stream of a route that has none",
        (GENERATE,),
        *({"stream": value} for value in ("true", 1, True)),
        code="unsupported_parameter",
    ),
    refused_row(
        120,
        "options of no stream",
        OPENAI_PATHS,
        {"stream_options": {"include_usage": True}},
        {"stream_options": {}, "stream": False},
    ),
    refused_row(
        121,
        "options of a stream that are none",
        OPENAI_PATHS,
        *({"stream_options": v, "stream": True} for v in ({"include_usage": "yes"}, [], "x", 1)),
        code="invalid_type",
    ),
    refused_row(
        121,
        "options of a stream of a route that has none",
        (GENERATE,),
        *({"stream_options": v} for v in ({"include_usage": True}, {}, [])),
        code="unsupported_parameter",
    ),
]


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def tool(name: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def chat_with_tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    """Return a chat with one tool, whose arguments have this schema."""
    return {"tools": [tool("f", parameters=parameters, **fields)]}


UNFOLLOWABLE_SCHEMAS = (
    {"properties": {"a": {"type": "string", "pattern": "["}}},
    {"properties": {"a": {"$ref": "#/nowhere"}}},
    {"properties": {"a": {"type": "foo"}}},
    {"properties": {"a": {"const": -(2**63)}}},
)
"""Schemas of arguments that no grammar can follow."""


def has_calls(answer: WireResponse) -> bool:
    """Return whether the message has calls and nothing else."""
    message = answer.json["choices"][0]["message"]
    return message["content"] is None and len(message["tool_calls"]) == 1


def chained_grammar(count: int) -> str:
    """Return a grammar of so many rules, each of which refers to the next one."""
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return f'start: r0\n{chain}\nr{count}: "a"'


STRUCTURED = [
    refused_row(
        123,
        "a schema that cannot be followed",
        ALL,
        schema({"type": "foo"}),
        schema({"$ref": "#"}),
        schema({"$ref": "http://localhost:1/x.json"}),
        schema(nested(200)),
        schema({"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}}),
        *(schema({"const": value}) for value in (-(2**63), 10**400, -(10**400))),
        schema({"allOf": [{"multipleOf": step} for step in (7, 11, 13, 17, 19, 23)]}),
        code="invalid_schema",
    ),
    accepted_row(
        123,
        "a schema of more than an answer can hold",
        ALL,
        schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
    ),
    refused_row(
        124,
        "a pattern that cannot be followed",
        ALL,
        *({"regex": v} for v in ("[", "(?<=a)b", "(?=a)b", "\\1")),
        code="invalid_regex",
    ),
    accepted_row(
        124,
        "a pattern that backtracks elsewhere",
        ALL,
        *({"regex": v} for v in ("(a+)+b", "a{1,100000}{1,100000}")),
    ),
    accepted_row(125, "a grammar of 600 rules in a row", ALL, {"grammar": chained_grammar(600)}),
    refused_row(
        125,
        "a grammar that cannot be followed",
        ALL,
        *({"grammar": v} for v in ("", "start: start", "start: " + "(" * 6000 + ")" * 6000)),
        {"grammar": f'start: %json {{"const": {-(2**63)}}}'},
        {"grammar": chained_grammar(4000)},
        code="invalid_grammar",
    ),
]

NAMED_TOOL_CHOICE: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALLING = {"tools": [tool("f")], "tool_choice": NAMED_TOOL_CHOICE, "parallel_tool_calls": False}

TOOLS = [
    refused_row(
        127,
        "strict arguments that cannot be followed",
        (CHAT,),
        *(chat_with_tool(each, strict=True) for each in UNFOLLOWABLE_SCHEMAS),
        param="tools[0].function.parameters",
        code="invalid_schema",
    ),
    accepted_row(
        127,
        "arguments that cannot be followed",
        (CHAT,),
        *map(chat_with_tool, UNFOLLOWABLE_SCHEMAS),
    ),
    refused_row(
        127,
        "arguments that are no object",
        (CHAT,),
        *(chat_with_tool({"type": kind}) for kind in (5, "string", None, ["object", "null"])),
        param="tools[0].function.parameters.type",
        code="invalid_schema",
    ),
    refused_row(
        127,
        "arguments of 10,000 properties",
        (CHAT,),
        chat_with_tool({"properties": {f"p{i}": {} for i in range(10_000)}}),
        code="invalid_schema",
    ),
    refused_row(
        127,
        "tools of a prompt",
        PROMPT_PATHS,
        *({name: value} for name, value in CALLING.items()),
        code="unsupported_parameter",
    ),
    refused_row(
        127,
        "a choice of no tools",
        (CHAT,),
        *({"tool_choice": value} for value in ("required", "auto", NAMED_TOOL_CHOICE)),
        {"tool_choice": "required", "tools": []},
        {"parallel_tool_calls": True},
    ),
    refused_row(
        127,
        "a choice of a tool that is not there",
        (CHAT,),
        {**CALLING, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        param="tool_choice.function.name",
    ),
    refused_row(
        127,
        "two tools of one name",
        (CHAT,),
        {"tools": [tool("f"), tool("g"), tool("f", description="another")]},
        param="tools[2].function.name",
    ),
    refused_row(
        127,
        "a tool of a name that is none",
        (CHAT,),
        *({"tools": [tool(v)]} for v in ("", "a b", "x" * 65, 'f"', "f\n", "\u00e9", 5, [])),
        param="tools[0].function.name",
    ),
    accepted_row(
        127,
        "tools and another structure",
        (CHAT,),
        {"response_format": {"type": "json_object"}, "tools": [tool("f")], "max_tokens": 64},
    ),
    accepted_row(
        127,
        "a tool that has to be called",
        (CHAT,),
        {**CALLING, "max_tokens": 64},
        check=has_calls,
    ),
]

NAMES = [
    refused_row(
        128,
        "a salt that is none",
        ALL,
        *({"cache_salt": v} for v in ("", 1, "x" * 10_000, "a/../b", "\n", "salt\n", "sält")),
    ),
    refused_row(129, "a user that is none", ALL, {"user": 5}, {"user": "x" * 10_000}),
    refused_row(
        129,
        "timings that are neither requested nor not",
        ALL,
        *({"return_timings": value} for value in (1, 0, "true", [], {}, BIG)),
        code="invalid_type",
    ),
    accepted_row(
        131,
        "a request that brings an odd name",
        (),
        *(
            request_with_id(value)
            for value in ("x" * 10_000, "x" * 65, "a%0d%0ab", "a b", "../x", "\xe9")
        ),
        check=has_another_id,
    ),
    accepted_row(
        131,
        "a request that brings the name of one that runs",
        (),
        request_with_id("good-0"),
        check=lambda answer: answer.headers["x-request-id"] == "good-0",
    ),
    transport_row(
        131,
        "a request that brings a line break in its name",
        closing_request(build_post(GENERATE, SMALL, "x-request-id: a\rb")),
        closing_request(build_post(GENERATE, SMALL, "x-request-id: a\x00b")),
        status=400,
        code="bad_framing",
    ),
    # No route ends a request: its client ends it by leaving.
    transport_row(
        133,
        "an end to another client's request",
        *(
            raw_request(build_post(path, b'{"id": "good-0"}'))
            for path in ("/abort", "/abort_request", "/v1/completions/good-0/cancel")
        ),
        status=404,
        code="not_found",
    ),
    refused_row(
        135,
        "a field that names a place",
        ALL,
        {"kv_transfer_params": {"remote_host": "localhost"}},
        {"lora_path": "file:///etc/passwd"},
        code="unsupported_parameter",
    ),
]


def request_of_session(*headers: str, **fields: Any) -> RawRequest:
    """Return a good request with these headers and fields."""
    return raw_request(build_post(GENERATE, build_body(GENERATE, fields), *headers))


SESSIONS = [
    refused_row(
        157,
        "a session that is none",
        ALL,
        *({"session_id": v} for v in ("", 1, True, [], "x" * 129, "x" * 10**6, "a\x00b", "\n")),
        *({"prompt_cache_key": v} for v in (1, [], "x" * 129, "\x1b[2J")),
    ),
    refused_row(
        157, "a session of half a pair", ALL, {"session_id": "\ud800"}, code="invalid_unicode"
    ),
    accepted_row(
        157,
        "a session with an odd name",
        ALL,
        *({"session_id": v} for v in ("../../x", "é" * 128, " ", "%00", "a/b?c#d", None)),
        {"prompt_cache_key": ""},
    ),
    refused_row(
        158,
        "a session that is none, in a header",
        (),
        *(
            request_of_session(f"x-session-id: {value}")
            for value in ("", "x" * 129, "a\x01b", "a\tb", "\x7f")
        ),
        request_of_session("x-session-id: a", "x-session-id: a"),
        request_of_session("x-session-id: a", "x-session-id: b"),
        param="x-session-id",
    ),
    refused_row(
        158,
        "a session in a header that is no text",
        (),
        request_of_session("x-session-id: \xe9"),
        param="x-session-id",
        code="invalid_unicode",
    ),
    refused_row(
        158,
        "two sessions",
        (),
        request_of_session("x-session-id: a", session_id="b"),
        param="session_id",
        code="conflicting_parameters",
    ),
    refused_row(
        159,
        "an end of no session",
        ALL,
        {"session_end": True},
        {"session_end": True, "session_id": None, "user": "a"},
    ),
    refused_row(
        159,
        "an end that is none",
        ALL,
        *({"session_end": value, "session_id": "a"} for value in (1, 0, "true", [])),
        code="invalid_type",
    ),
    refused_row(
        160,
        "a pause that is none",
        ALL,
        *({"expected_pause_s": value} for value in (-1, -0.001, 86_400.1, "1", True, BIG, [], {})),
    ),
    accepted_row(
        160,
        "the shortest and the longest pause",
        ALL,
        *({"expected_pause_s": value} for value in (0, 5e-324, 86_400, None)),
    ),
    refused_row(
        161,
        "an end of a session that is not open",
        (),
        *(
            raw_request(build_head("DELETE", f"/v1/sessions/{name}", HOST, AUTHORIZATION))
            for name in ("never", "", "x" * 5000, "%c2%85", "..%2f..", "%ff", "a/b")
        ),
        param="id",
        code="session_not_found",
        status=404,
    ),
]

ROWS = [
    *(*TRANSPORT, *KEYS, *SHAPE, *PROMPTS, *MESSAGES),
    *(*SAMPLING, *FORMATS, *STRUCTURED, *TOOLS, *NAMES, *SESSIONS),
]
