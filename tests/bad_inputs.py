"""Bad inputs, row by row: what is sent, and what a server must say to it.

Rows have numbers so that they can be spoken of; a number with several endpoints or several answers
has several rows. 136 to 143 are about the
state of a server, not about what one request holds: see test_bad_inputs.py.

A row sends each of `sent` to each of `paths`:

    dict     fields in place of those of a good body; ABSENT leaves one out
    bytes    the whole body
    Raw      every byte of the request, to no path but its own
    Cut      the same, and the server ends the connection after its answer
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tests.wire import HOST, JSON, KEY, WITH_KEY, Answer, head, post

LONGEST = 256
"""Tokens that a prompt and its answer may have: `max_model_len` of the server."""
VOCABULARY = 257
MOST_BYTES = 8 * 2**20
CHAT_OVERHEAD = 17
"""Tokens of a chat of one message beside its content: `user: ` and `assistant:` on its line."""

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ALL = (COMPLETIONS, CHAT, GENERATE)
PROMPTED = (COMPLETIONS, GENERATE)
OPENAI = (COMPLETIONS, CHAT)

ABSENT = object()
ITS_NAME = "the field that was sent"
NAN, INF = float("nan"), float("inf")


class Literal(NamedTuple):
    """A value that json.dumps cannot write."""

    text: str


class Raw(NamedTuple):
    """A request, made when it is sent, and how many answers it gets."""

    request: Callable[[], bytes]
    answers: int = 1


class Cut(NamedTuple):
    """A request after which the server ends the connection."""

    request: Callable[[], bytes]


Sent = Mapping[str, Any] | bytes | Raw | Cut


class Row(NamedTuple):
    """One kind of bad input, or an odd one that is good: then `code` is None.

    param   ITS_NAME: the first of the fields that were sent
    holds   what else is true of each answer
    """

    number: int
    what: str
    paths: tuple[str, ...]
    sent: tuple[Sent, ...]
    status: int
    param: str | None
    code: str | None
    kind: str = "invalid_request_error"
    holds: Callable[[Answer], bool] = lambda answer: True


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    """A chat of one message."""
    return [{"role": "user", "content": content, **more}]


GOOD: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"model": "hash", "prompt": "good", "max_tokens": 1, "temperature": 0},
    CHAT: {"model": "hash", "messages": user("good"), "max_tokens": 1, "temperature": 0},
    GENERATE: {"prompt": "good", "max_tokens": 1, "temperature": 0},
}


def body_of(path: str, fields: Mapping[str, Any]) -> bytes:
    """The good body of a path with these fields in place of its own."""
    given = {**GOOD[path], **fields}
    pairs = (
        f"{json.dumps(name)}: {value.text if isinstance(value, Literal) else json.dumps(value)}"
        for name, value in given.items()
        if value is not ABSENT
    )
    return ("{" + ", ".join(pairs) + "}").encode()


def requests_of(row: Row) -> Iterable[tuple[Raw | Cut, str | None]]:
    """Each request of the row, and the first of its fields, if it has one."""
    for sent in row.sent:
        if isinstance(sent, Raw | Cut):
            yield sent, None
        else:
            for path in row.paths:
                body = sent if isinstance(sent, bytes) else body_of(path, sent)
                name = next(iter(sent)) if isinstance(sent, Mapping) else None
                yield Raw(lambda path=path, body=body: post(path, body)), name  # type: ignore[misc]


def bad(
    number: int,
    what: str,
    paths: tuple[str, ...],
    *sent: Sent,
    param: str | None = ITS_NAME,
    code: str = "invalid_value",
    status: int = 400,
) -> Row:
    """A row that is refused."""
    return Row(number, what, paths, sent, status, param, code)


def wire(number: int, what: str, *sent: Raw | Cut, status: int, code: str | None) -> Row:
    """A row about the transport: it has no field."""
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return Row(number, what, (), sent, status, None, code, kind)


def good(
    number: int,
    what: str,
    paths: tuple[str, ...],
    *sent: Sent,
    holds: Callable[[Answer], bool] = lambda answer: True,
) -> Row:
    """A row that is served."""
    return Row(number, what, paths, sent, 200, None, None, holds=holds)


# How answers are looked at.


def finish_of(answer: Answer) -> str:
    """Of the first choice."""
    body = answer.json
    return str(body["choices"][0]["finish_reason"] if "choices" in body else body["finish_reason"])


def prompt_tokens(answer: Answer) -> int:
    """As the answer counts them."""
    body = answer.json
    return int(body["usage"]["prompt_tokens"] if "usage" in body else body["prompt_tokens"])


def texts_of(answer: Answer) -> list[str]:
    """Of all choices."""
    body = answer.json
    if "choices" not in body:
        return [body["text"]]
    return [c["text"] if "text" in c else c["message"]["content"] for c in body["choices"]]


def has_tokens(count: int) -> Callable[[Answer], bool]:
    """The prompt has so many."""
    return lambda answer: prompt_tokens(answer) == count


def ends_with_length(answer: Answer) -> bool:
    """Nothing but a limit has ended it."""
    return finish_of(answer) == "length"


def has_another_id(answer: Answer) -> bool:
    """The request has a name that the server made."""
    given = answer.headers["x-request-id"]
    return len(given) == 24 and given.isalnum()


# How requests are made.

SMALL = body_of(GENERATE, {})


def raw(*parts: bytes) -> Raw:
    """These bytes."""
    return Raw(lambda: b"".join(parts))


def cut(*parts: bytes) -> Cut:
    """These bytes, after which the server ends the connection."""
    return Cut(lambda: b"".join(parts))


def without_key(method: str, path: str, *headers: str) -> Raw:
    """A good request, but for its key."""
    length = f"content-length: {len(SMALL) if method == 'POST' else 0}"
    start = head(method, path, HOST, JSON, length, *headers)
    return raw(start, SMALL if method == "POST" else b"")


def with_type(content_type: str) -> Raw:
    """A good request of this content type, or of none."""
    named = [f"content-type: {content_type}"] if content_type else []
    length = f"content-length: {len(SMALL)}"
    return raw(head("POST", GENERATE, HOST, WITH_KEY, length, *named), SMALL)


def named(request_id: str) -> Raw:
    """A good request that has a name."""
    return raw(post(GENERATE, SMALL, f"x-request-id: {request_id}"))


def chunked_over_the_limit() -> bytes:
    """A body that is one byte too long, which only its last chunk tells."""
    start = head("POST", COMPLETIONS, HOST, JSON, WITH_KEY, "transfer-encoding: chunked")
    part = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    return start + part * (MOST_BYTES // 2**20) + b"1\r\n \r\n"


def hundred_at_once() -> bytes:
    """A pipeline."""
    return post(GENERATE, b"{}") * 100


LENGTH = f"content-length: {len(SMALL)}"

TRANSPORT = [
    wire(
        1,
        "a request that never comes to its end",
        cut(f"POST {GENERATE} HTTP/1.1\r\n".encode()),
        cut(head("POST", GENERATE, HOST, JSON, WITH_KEY, "content-length: 50"), b'{"prompt": '),
        status=408,
        code="request_timeout",
    ),
    wire(
        3,
        "a header of megabytes",
        cut(head("POST", GENERATE, HOST, JSON, WITH_KEY, LENGTH, "x-long: " + "y" * 20_000)),
        cut(head("GET", "/v1/models", HOST, WITH_KEY, "x-long: " + "y" * 2**20)),
        status=431,
        code="headers_too_large",
    ),
    wire(
        4,
        "thousands of headers",
        cut(head("GET", "/v1/models", HOST, WITH_KEY, *(f"x-{i}: y" for i in range(5000)))),
        cut(head("GET", "/v1/models", HOST, WITH_KEY, *["x: y"] * 200)),
        status=431,
        code="headers_too_large",
    ),
    wire(
        5,
        "two ways to say where the body ends",
        cut(
            head("POST", GENERATE, HOST, JSON, WITH_KEY, LENGTH, "transfer-encoding: chunked"),
            b"0\r\n\r\n",
        ),
        status=400,
        code="bad_framing",
    ),
    wire(
        152,
        "lines that end or go on as none may",
        *(
            cut(f"GET /livez HTTP/1.1{end}".encode())
            for end in (
                *("\nhost: a\r\n\r\n", "\r\nhost: a\n\r\n", "\r\nhost: a\r\n\n"),
                *("\r\nhost: a\r\n b\r\n\r\n", "\r\n\thost: a\r\n\r\n", "\r\nhost: a\rb\r\n"),
                *("\r\nhost : a\r\n\r\n", "\r\nhost\r\n\r\n", "\r\n\x00: a\r\nhost: a\r\n\r\n"),
            )
        ),
        status=400,
        code="bad_framing",
    ),
    wire(
        154,
        "another version of HTTP",
        cut(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        *(cut(f"GET /livez HTTP/{v}\r\nhost: a\r\n\r\n".encode()) for v in ("2.0", "0.9", "9.9")),
        status=400,
        code="bad_framing",
    ),
    good(
        155,
        "a probe of HTTP/1.0 without a host",
        (),
        *(raw(f"GET {path} HTTP/1.0\r\n\r\n".encode()) for path in ("/livez", "/healthz")),
    ),
    wire(
        155,
        "another request of HTTP/1.0 without a host, and a probe with two",
        cut(f"GET /v1/models HTTP/1.0\r\n{WITH_KEY}\r\n\r\n".encode()),
        cut(b"GET /livez HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n"),
        status=400,
        code="bad_host",
    ),
    wire(
        156,
        "a body that waits to be asked for by what is refused",
        *(
            cut(head("POST", "/nowhere", HOST, JSON, WITH_KEY, LENGTH, f"expect: {value}"), SMALL)
            for value in ("100-continue", "100-Continue")
        ),
        cut(
            head("POST", "/nowhere", HOST, JSON, WITH_KEY, LENGTH, "expect: 100-continue"),
            head("GET", "/livez", HOST),
        ),
        status=404,
        code="not_found",
    ),
    wire(
        153,
        "chunks that are none",
        *(
            cut(head("POST", GENERATE, HOST, JSON, WITH_KEY, "transfer-encoding: chunked"), chunks)
            for chunks in (
                *(b"11111111111111111\r\n", b"1" * 17, b"x\r\n", b"-1\r\n", b"2\n{}\r\n0\r\n\r\n"),
                *(b"2\r\n{}x0\r\n\r\n", b"2;a\nb\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\n"),
                b"2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n",
            )
        ),
        *(
            cut(head("POST", GENERATE, HOST, JSON, WITH_KEY, *lengths), SMALL)
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
    wire(
        7,
        "a length that is none",
        *(
            cut(head("POST", GENERATE, HOST, JSON, WITH_KEY, f"content-length: {length}"))
            for length in ("-1", "abc", "1e3", "5, 6", "9" * 30)
        ),
        status=400,
        code="bad_framing",
    ),
    wire(
        8,
        "a body that says it is too long",
        *(
            cut(head("POST", path, HOST, JSON, WITH_KEY, f"content-length: {length}"))
            for path in (*ALL, "/tokenize", "/detokenize")
            for length in (MOST_BYTES + 1, 10**18)
        ),
        status=413,
        code="request_too_large",
    ),
    wire(
        9,
        "a body that grows too long",
        Cut(chunked_over_the_limit),
        status=413,
        code="request_too_large",
    ),
    wire(
        11,
        "no host",
        cut(head("POST", GENERATE, JSON, WITH_KEY, LENGTH), SMALL),
        status=400,
        code="bad_host",
    ),
    wire(
        12,
        "a host with a path, with and without a key",
        *(
            cut(head("POST", GENERATE, f"host: {host}", JSON, LENGTH, *key), SMALL)
            for host in ("evil/?x=", "a/#", "/livez?", "a b", "")
            for key in ([], [WITH_KEY])
        ),
        status=400,
        code="bad_host",
    ),
    wire(
        13,
        "another spelling of a path, without a key",
        *(
            without_key("POST", path)
            for path in (
                *("//v1/completions", "/v1/%63ompletions", "/V1/Completions", "/v1/completions/"),
                *("/livez/../generate", "/livez/%2e%2e/generate", "/livez%2f..%2fgenerate"),
                *("/LIVEZ", "/livez/", "//livez", "/livez;/generate", "/livez%00"),
            )
        ),
        status=401,
        code="invalid_api_key",
    ),
    wire(
        13,
        "another spelling of a path, with a key",
        *(
            raw(post(path, SMALL))
            for path in (
                *("//v1/completions", "/V1/Completions", "/v1/completions/", "/livez/../generate"),
                *("/livez/%2e%2e/generate", "/livez%2f..%2fgenerate", "/livez/", "/LIVEZ"),
            )
        ),
        status=404,
        code="not_found",
    ),
    good(
        148,
        "a target that is a whole URL",
        (),
        raw(post(f"http://localhost{GENERATE}", SMALL)),
        raw(post(f"HTTP://127.0.0.1:1{GENERATE}?a=b", SMALL)),
        without_key("GET", "https://localhost/livez"),
        raw(b"GET http://localhost/livez HTTP/1.0\r\n\r\n"),
    ),
    wire(
        148,
        "a target that is a whole URL, without a key",
        *(
            without_key("GET", f"http://localhost{path}")
            for path in ("/v1/models", "", "?/livez", "/livez/../v1/models", "//livez")
        ),
        status=401,
        code="invalid_api_key",
    ),
    wire(
        148,
        "a target that is a URL of no host",
        *(
            cut(head("GET", f"http://{host}/livez", HOST, WITH_KEY))
            for host in ("", "user@localhost", "localhost:80:80", "[::1", "%6cocalhost")
        ),
        status=400,
        code="bad_host",
    ),
    wire(15, "a path of nothing", raw(post("/v1/nope", SMALL)), status=404, code="not_found"),
    wire(
        16,
        "a body that is not called JSON",
        *(with_type(t) for t in ("", "text/plain", "application/jsonx", "multipart/form-data")),
        with_type("application/x-www-form-urlencoded"),
        status=415,
        code="unsupported_media_type",
    ),
    wire(
        17,
        "JSON in another encoding",
        with_type("application/json; charset=utf-16"),
        with_type("application/json; charset=utf-8; charset=utf-16"),
        status=415,
        code="unsupported_media_type",
    ),
    wire(
        144,
        "a body that is called encoded",
        *(
            raw(post(path, SMALL, f"content-encoding: {coding}"))
            for path in (*ALL, "/tokenize", "/detokenize", "/reset_prefix_cache", "/nowhere")
            for coding in ("gzip", "GZIP", "x-gzip", "deflate, identity", "br", "identity, gzip")
        ),
        raw(post(GENERATE, gzip.compress(SMALL), "content-encoding: gzip")),
        raw(post(GENERATE, SMALL, "content-encoding: identity", "content-encoding: gzip")),
        status=415,
        code="unsupported_media_type",
    )._replace(
        holds=lambda answer: (
            "content-encoding" in answer.json["error"]["message"]
            and answer.headers["accept-encoding"] == "identity"
        )
    ),
    good(
        144,
        "a body that is called as it is",
        (),
        raw(post(GENERATE, SMALL, "content-encoding: identity")),
    ),
    wire(
        145,
        "two content types",
        *(
            raw(post(GENERATE, SMALL, f"content-type: {other}"))
            for other in ("application/json", "text/plain")
        ),
        status=415,
        code="unsupported_media_type",
    ),
    Row(
        19,
        "a hundred requests sent at once",
        (),
        (Raw(hundred_at_once, 100),),
        400,
        "prompt",
        "missing_required_parameter",
    ),
    good(
        20,
        "a thousand ranges",
        (),
        raw(head("GET", "/openapi.json", HOST, WITH_KEY, "range: bytes=0-" + ",0-" * 1000)),
        holds=lambda answer: answer.json["openapi"] == "3.1.0",
    ),
]

KEYS = [
    wire(
        21,
        "no key",
        *(without_key("POST", path) for path in (*ALL, "/tokenize", "/detokenize")),
        status=401,
        code="invalid_api_key",
    )._replace(holds=lambda answer: answer.headers["www-authenticate"] == "Bearer"),
    wire(
        23,
        "a key of thousands of characters",
        without_key("POST", GENERATE, f"authorization: Bearer {'k' * 10_000}"),
        status=401,
        code="invalid_api_key",
    ),
    wire(
        23,
        "a key of a million characters",
        cut(head("POST", GENERATE, HOST, JSON, f"authorization: Bearer {'k' * 10**6}")),
        status=431,
        code="headers_too_large",
    ),
    wire(
        24,
        "a key that is almost one",
        *(
            without_key("POST", GENERATE, f"authorization: {value}")
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
        without_key("POST", GENERATE, WITH_KEY, WITH_KEY),
        status=401,
        code="invalid_api_key",
    ),
    good(
        24,
        "a scheme in another case",
        (),
        *(
            without_key("POST", GENERATE, f"authorization: {scheme} {KEY}")
            for scheme in ("bearer", "BEARER", "bEARER")
        ),
    ),
    wire(
        25,
        "a key that is not ASCII",
        without_key("POST", GENERATE, "authorization: Bearer \xe9\xff\x80"),
        status=401,
        code="invalid_api_key",
    ),
    wire(
        27,
        "any route without a key",
        *(
            without_key("GET", path)
            for path in (
                *("/metrics", "/debug", "/admin/x", "/", "/v1/models", "/v1/models/hash"),
                *("/version", "/tokenizer_info", "/openapi.json", "/docs", "/generate"),
            )
        ),
        without_key("POST", "/reset_prefix_cache"),
        status=401,
        code="invalid_api_key",
    ),
    good(
        27,
        "a probe without a key",
        (),
        *(without_key("GET", path) for path in ("/livez", "/readyz", "/healthz", "/ping")),
    ),
    wire(
        28,
        "a key in the path",
        *(without_key("POST", f"{GENERATE}?{name}={KEY}") for name in ("api_key", "key", "token")),
        status=401,
        code="invalid_api_key",
    ),
]

MILLION = Literal("[" + "1," * 999_999 + "1]")


def names(count: int) -> str:
    """An object of JSON with so many names, made in one go: the rows are made by every worker."""
    return '{"' + str(list(range(count)))[1:-1].replace(", ", '":1,"') + '":1}'


MANY_IDS = Literal(names(200_000))
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

SHAPE = [
    bad(29, "no body", ALL, b"", b" ", param=None, code="invalid_json"),
    bad(
        31,
        "bytes that are not UTF-8",
        ALL,
        b"\xff\xfe",
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xc0\xaf"}',
        param=None,
        code="invalid_json",
    ),
    bad(32, "a byte order mark", ALL, b"\xef\xbb\xbf{}", param=None, code="invalid_json"),
    *(
        Row(146, "a key that comes twice", ALL, sent, 400, None, "duplicate_key", holds=holds)
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
    bad(
        147,
        "a body of half a million parts",
        (GENERATE,),
        b'{"foo": [' + b"[],{}," * 2**18 + b"1]}",
        b'{"foo": ' + names(2**19).encode() + b"}",
        param=None,
        code="too_many_items",
    ),
    bad(
        33,
        "something else than an object",
        ALL,
        *(b'"text"', b"42", b"null", b"true", b"[]", b"NaN", b'[{"prompt": "a"}]'),
        param=None,
        code="invalid_type",
    ),
    bad(
        35,
        "an integer of 5,000 digits",
        ALL,
        {"seed": Literal("9" * 5000)},
        {"max_tokens": Literal("-" + "9" * 5000)},
        param=None,
        code="invalid_json",
    ),
    bad(35, "lists in lists in lists", ALL, DEEP, param=None, code="invalid_json"),
    bad(
        36,
        "a number that is none",
        ALL,
        *({name: value} for name in ("temperature", "top_p", "foo") for value in (NAN, INF, -INF)),
    ),
    bad(36, "a number that is none, deep inside", ALL, {"metadata": {"a": [[NAN]]}}),
    bad(
        37,
        "a number past the last one",
        ALL,
        {"temperature": Literal("1e999")},
        {"temperature": Literal("-1e999")},
        {"seed": Literal("1e400")},
    ),
    bad(
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
    bad(39, "half a surrogate pair", PROMPTED, {"prompt": "a\ud800b"}, code="invalid_unicode"),
    bad(39, "half a surrogate pair", (CHAT,), {"messages": user("\udc00")}, code="invalid_unicode"),
    good(40, "NUL inside a text", PROMPTED, {"prompt": "a\x00b"}, holds=has_tokens(3)),
    good(
        40,
        "NUL inside a text",
        (CHAT,),
        {"messages": user("a\x00b")},
        holds=has_tokens(3 + CHAT_OVERHEAD),
    ),
    bad(41, "a million items in no field", ALL, {"zeros": MILLION}, code="unknown_parameter"),
    bad(43, "no field", ALL, {"foo": 1}, {"foo": None}, {"Prompt": "a"}, code="unknown_parameter"),
    bad(
        44,
        "a field that is not served",
        ALL,
        {"audio": {"format": "mp3"}},
        {"best_of": 2},
        {"use_beam_search": True},
        {"prompt_embeds": "AAAA"},
        code="unsupported_parameter",
    ),
    bad(
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
    bad(45, "no model", OPENAI, *NO_MODEL, {"model": ""}, code="missing_required_parameter"),
    # The one model is served whether it is named or not.
    good(45, "no model", (GENERATE,), *NO_MODEL),
    bad(45, "a model of no name", (GENERATE,), {"model": ""}, code="model_not_found", status=404),
    bad(45, "a model that is no name", ALL, {"model": 7}, {"model": ["hash"]}, code="invalid_type"),
    bad(
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
    bad(
        48,
        "no prompt",
        PROMPTED,
        *({"prompt": ABSENT}, {"prompt": None}),
        param="prompt",
        code="missing_required_parameter",
    ),
    bad(
        48,
        "no messages",
        (CHAT,),
        *({"messages": ABSENT}, {"messages": None}),
        code="missing_required_parameter",
    ),
    bad(49, "an empty prompt", PROMPTED, {"prompt": ""}, {"prompt": []}, code="empty_prompt"),
    bad(
        51,
        "an empty prompt among others",
        (COMPLETIONS,),
        {"prompt": ["a", ""]},
        param="prompt[1]",
        code="empty_prompt",
    ),
    bad(
        52,
        "an empty prompt among others, as ids",
        (COMPLETIONS,),
        {"prompt": [[1, 2], []]},
        param="prompt[1]",
        code="empty_prompt",
    ),
    bad(
        53,
        "prompts of several kinds",
        PROMPTED,
        *({"prompt": value} for value in (["a", 1], [[1], "a"], [1, [2]], [[["a"]]], [None], {})),
        *({"prompt": value} for value in (5, True, [True], [1.0], [{}])),
        code="invalid_type",
    ),
    bad(55, "an id below 0", PROMPTED, {"prompt": [-1]}, code="token_out_of_range"),
    bad(
        56,
        "an id that the model does not have",
        PROMPTED,
        *({"prompt": [value]} for value in (VOCABULARY, 2**31, 2**63, 10**400)),
        code="token_out_of_range",
    ),
    bad(
        57,
        "ten thousand prompts",
        (COMPLETIONS,),
        {"prompt": ["a"] * 10_000},
        {"prompt": [[1]] * 10_000},
        code="too_many_prompts",
    ),
    bad(57, "several prompts", (GENERATE,), {"prompt": ["a", "b"]}, code="invalid_type"),
    bad(
        59,
        "a prompt that leaves no room for an answer",
        PROMPTED,
        {"prompt": "x" * LONGEST},
        {"prompt": [1] * LONGEST},
        code="context_length_exceeded",
    ),
    bad(
        59,
        "a chat that leaves no room for an answer",
        (CHAT,),
        {"messages": user("x" * (LONGEST - CHAT_OVERHEAD))},
        {"messages": user("x" * (LONGEST - CHAT_OVERHEAD)), "max_tokens": None},
        code="context_length_exceeded",
    ),
    good(60, "the longest prompt", PROMPTED, {"prompt": "x" * (LONGEST - 1)}),
    good(60, "the longest chat", (CHAT,), {"messages": user("x" * (LONGEST - CHAT_OVERHEAD - 1))}),
    bad(
        61,
        "one token more than fits",
        PROMPTED,
        {"prompt": "x" * 56, "max_tokens": LONGEST - 55},
        param="max_tokens",
        code="context_length_exceeded",
    ),
    bad(
        61,
        "one token more than fits",
        (CHAT,),
        {"messages": user("x" * 39), "max_tokens": LONGEST - 55},
        param="max_tokens",
        code="context_length_exceeded",
    ),
    wire(
        63,
        "a prompt of 27 MB",
        *(
            cut(
                head("POST", path, HOST, JSON, WITH_KEY, f"content-length: {27 * 10**6}"),
                b'{"prompt": "xxxxxxxx',
            )
            for path in ALL
        ),
        status=413,
        code="request_too_large",
    ),
    bad(
        64,
        "a million times one character",
        PROMPTED,
        {"prompt": "x" * 10**6},
        {"prompt": " " * 10**6},
        code="context_length_exceeded",
    ),
    bad(
        64,
        "a million times one character",
        (CHAT,),
        {"messages": user("x" * 10**6)},
        code="context_length_exceeded",
    ),
    good(65, "the name of a special token", PROMPTED, {"prompt": "<|end|>"}, holds=has_tokens(7)),
    good(
        65,
        "the name of a special token",
        (CHAT,),
        {"messages": user("<|end|>")},
        {"messages": user("<|end|>", name="a")},
        holds=has_tokens(7 + CHAT_OVERHEAD),
    ),
]


def message(*messages: Any) -> dict[str, Any]:
    """A chat of these messages."""
    return {"messages": list(messages)}


MESSAGES = [
    bad(67, "no message", (CHAT,), message(), code="empty_messages"),
    bad(
        68,
        "a message that is none",
        (CHAT,),
        *(message(value) for value in (None, "x", [], 1)),
        param="messages[0]",
        code="invalid_type",
    ),
    bad(
        69,
        "a role that is none",
        (CHAT,),
        message({"content": "a"}),
        *(message({"role": role, "content": "a"}) for role in ("wizard", 1, None, "", [], "User")),
        param="messages[0].role",
    ),
    bad(
        71,
        "a message of a user that says nothing",
        (CHAT,),
        *(message({"role": "user", "content": None}), message({"role": "user"})),
        param="messages[0].content",
        code="invalid_type",
    ),
    bad(
        72,
        "content that is no text",
        (CHAT,),
        *(message({"role": "user", "content": value}) for value in (5, {}, True)),
        param="messages[0].content",
        code="invalid_type",
    ),
    bad(
        73,
        "content of parts that are none",
        (CHAT,),
        *({"messages": user(value)} for value in ([], [{"type": "text"}], [{"type": "x"}])),
        {"messages": user([{"type": "text", "text": 5}])},
        param="messages[0].content",
    ),
    bad(
        75,
        "a hundred thousand messages",
        (CHAT,),
        {"messages": user("a") * 100_000},
        code="too_many_messages",
    ),
    bad(
        76,
        "a name that is none",
        (CHAT,),
        *({"messages": user("a", name=name)} for name in ("a\nb", "x" * 10_000, "", 5, "<|end|>")),
        param="messages[0].name",
    ),
    bad(
        77,
        "a chat that its template refuses",
        (CHAT,),
        message(*user("a"), *user("b")),
        {**message(*user("a"), *user("b")), "stream": True},
        code="template_error",
    ),
    bad(
        79,
        "a template of the request",
        (CHAT,),
        {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template": "{{ messages }}"},
        code="unsupported_parameter",
    ),
    bad(
        80,
        "a chat that goes on and begins anew",
        (CHAT,),
        {"continue_final_message": True, "add_generation_prompt": True},
    ),
    bad(
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
    bad(83, "no token at all", ALL, {"max_tokens": 0}),
    good(
        83,
        "a prompt and its scores alone",
        (COMPLETIONS,),
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        holds=lambda answer: texts_of(answer) == ["good"],
    ),
    bad(
        84,
        "a limit that is none",
        ALL,
        *({"max_tokens": value} for value in (-1, 1.5, "10", True, 2**63, 10**30, BIG, [], {})),
    ),
    bad(
        149,
        "more tokens at least than fit",
        (CHAT,),
        *(
            {"min_tokens": count, "max_tokens": ABSENT}
            for count in (LONGEST - CHAT_OVERHEAD - len("good") + 1, 2**31 - 1)
        ),
        code="context_length_exceeded",
    ),
    bad(
        149,
        "more tokens at least than at most",
        PROMPTED,
        {"min_tokens": 2},
        {"min_tokens": 33, "max_tokens": ABSENT},
    ),
    good(
        149,
        "as many tokens at least as fit",
        (CHAT,),
        {"min_tokens": LONGEST - CHAT_OVERHEAD - len("good"), "max_tokens": ABSENT},
        holds=lambda answer: (
            ends_with_length(answer) and answer.json["usage"]["total_tokens"] == LONGEST
        ),
    ),
    bad(
        150,
        "fewer choices to choose from than choices",
        OPENAI,
        {"best_of": 1, "n": 2},
        {"best_of": 0},
        {"best_of": -1},
        {"best_of": "1"},
        {"best_of": True},
    ),
    good(150, "all choices that there are", OPENAI, {"best_of": 2, "n": 2}, {"best_of": None}),
    bad(
        151,
        "usage of every chunk and not of the last",
        OPENAI,
        {"stream_options": {"continuous_usage_stats": True}, "stream": True},
        {
            "stream_options": {"continuous_usage_stats": True, "include_usage": False},
            "stream": True,
        },
    ),
    bad(
        85,
        "two limits",
        (CHAT,),
        {"max_completion_tokens": 2},
        code="conflicting_parameters",
    ),
    bad(
        87,
        "choices that are none",
        OPENAI,
        *({"n": value} for value in (0, -1, 1.5, "2", True, [])),
    ),
    good(87, "as many choices as there are by default", ALL, {"n": None}),
    bad(
        87,
        "choices of a route that has one",
        (GENERATE,),
        *({"n": value} for value in (0, -1, 1.5, "2", True, 2, 129, 10**9)),
        code="unsupported_parameter",
    ),
    bad(88, "choices without end", OPENAI, *({"n": value} for value in (129, 10**9, BIG))),
    good(
        89,
        "choices without chance",
        OPENAI,
        {"n": 3},
        holds=lambda answer: len(texts_of(answer)) == 3 and len(set(texts_of(answer))) == 1,
    ),
    bad(
        91,
        "a temperature that is none",
        ALL,
        *({"temperature": value} for value in (-0.1, 2.1, "1", True, BIG, [], {})),
    ),
    good(91, "the temperature that is there by default", ALL, {"temperature": None}),
    good(92, "a temperature near 0", ALL, {"temperature": 1e-40}, {"temperature": 5e-324}),
    bad(93, "top_p out of range", ALL, *({"top_p": value} for value in (0, -1, 1.1, NAN, "1"))),
    bad(95, "top_k out of range", ALL, *({"top_k": value} for value in (-2, 1.5, 10**12, "1"))),
    good(95, "top_k that is off", ALL, {"top_k": -1}, {"top_k": 0}),
    bad(96, "min_p out of range", ALL, *({"min_p": value} for value in (-0.1, 1.1, NAN, "1"))),
    bad(
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
    good(
        99,
        "a penalty",
        ALL,
        *({name: 2} for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
        {"frequency_penalty": -2, "max_tokens": 3},
    ),
    bad(100, "a seed that is none", ALL, *({"seed": v} for v in (2**63, 2**64, 1.5, "x", True))),
    good(100, "a seed at the edge", ALL, *({"seed": v} for v in (-1, -(2**63), 2**63 - 1))),
    bad(
        101,
        "a bias that is none",
        ALL,
        *({"logit_bias": v} for v in ([], "x", {"a": 1}, {"1": "x"}, {"01": 1}, {"-1": 1})),
        {"logit_bias": {"9" * 5000: 1}},
        code="invalid_type",
    ),
    bad(
        101,
        "a bias of an id that the model does not have",
        ALL,
        {"logit_bias": {str(VOCABULARY): 1}},
        code="token_out_of_range",
    ),
    bad(
        103,
        "a bias out of range",
        ALL,
        *({"logit_bias": {"1": value}} for value in (101, -101, NAN)),
    ),
    bad(
        104,
        "a bias of 200,000 ids",
        ALL,
        {"logit_bias": MANY_IDS},
        code="too_many_items",
    ),
    good(
        105,
        "a bias against everything",
        ALL,
        {"logit_bias": {str(i): -100 for i in range(VOCABULARY)}},
        {"logit_bias": {str(i): -100 for i in range(VOCABULARY)}, "temperature": 1},
    ),
    bad(
        107,
        "a stop id that the model does not have",
        ALL,
        *({"stop_token_ids": [value]} for value in (-1, VOCABULARY, 2**63)),
        code="token_out_of_range",
    ),
    bad(107, "a million stop ids", ALL, {"stop_token_ids": MILLION}, code="too_many_items"),
    bad(108, "an empty stop", ALL, {"stop": ""}, {"stop": [""]}, {"stop": ["a", ""]}),
    bad(
        109,
        "a stop that is no text",
        ALL,
        *({"stop": value} for value in ([1], {"a": 1}, [["a"]], 1, [None])),
        code="invalid_type",
    ),
    bad(
        111,
        "a stop of a million characters",
        ALL,
        {"stop": "x" * 10**6},
        {"stop": ["x" * 10**6]},
        code="string_too_long",
    ),
    good(
        112,
        "an answer without a limit that nothing ends",
        PROMPTED,
        {"prompt": "x" * 64, "max_tokens": None, "ignore_eos": True},
        holds=ends_with_length,
    ),
    good(
        112,
        "an answer without a limit that nothing ends",
        (CHAT,),
        {
            "messages": user("x" * (LONGEST - CHAT_OVERHEAD - 5)),
            "max_tokens": None,
            "ignore_eos": True,
        },
        holds=lambda answer: (
            ends_with_length(answer) and answer.json["usage"]["total_tokens"] == LONGEST
        ),
    ),
]

FORMATS = [
    bad(
        113,
        "scores that are none",
        (COMPLETIONS,),
        *({"logprobs": value} for value in (-1, 21, True, "1", 1.5)),
    ),
    bad(113, "scores that are none", (CHAT,), {"top_logprobs": 21, "logprobs": True}),
    bad(115, "scores of others without one's own", (CHAT,), {"top_logprobs": 5}),
    bad(
        116, "a number of scores where there is one", (CHAT,), {"logprobs": 5}, code="invalid_type"
    ),
    bad(
        117,
        "an echo with scores as a stream",
        (COMPLETIONS,),
        {"echo": True, "stream": True, "logprobs": 1},
        code="unsupported_parameter",
    ),
    bad(
        119,
        "a stream that is none",
        OPENAI,
        *({"stream": value} for value in ("true", 1)),
        code="invalid_type",
    ),
    bad(
        119,
        "a stream of a route that has none",
        (GENERATE,),
        *({"stream": value} for value in ("true", 1, True)),
        code="unsupported_parameter",
    ),
    bad(
        120,
        "options of no stream",
        OPENAI,
        {"stream_options": {"include_usage": True}},
        {"stream_options": {}, "stream": False},
    ),
    bad(
        121,
        "options of a stream that are none",
        OPENAI,
        *({"stream_options": v, "stream": True} for v in ({"include_usage": "yes"}, [], "x", 1)),
        code="invalid_type",
    ),
    bad(
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


def takes(parameters: Any) -> dict[str, Any]:
    """A chat with one tool, whose arguments are these."""
    return {"tools": [tool("f", parameters=parameters)]}


def has_calls(answer: Answer) -> bool:
    """Nothing else is in the message."""
    message = answer.json["choices"][0]["message"]
    return message["content"] is None and len(message["tool_calls"]) == 1


def rules(count: int) -> str:
    """A grammar of so many rules, each of which is the next one."""
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return f'start: r0\n{chain}\nr{count}: "a"'


STRUCTURED = [
    bad(
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
    good(
        123,
        "a schema of more than an answer can hold",
        ALL,
        schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
    ),
    bad(
        124,
        "a pattern that cannot be followed",
        ALL,
        *({"regex": v} for v in ("[", "(?<=a)b", "(?=a)b", "\\1")),
        code="invalid_regex",
    ),
    good(
        124,
        "a pattern that backtracks elsewhere",
        ALL,
        *({"regex": v} for v in ("(a+)+b", "a{1,100000}{1,100000}")),
    ),
    good(125, "a grammar of 600 rules in a row", ALL, {"grammar": rules(600)}),
    bad(
        125,
        "a grammar that cannot be followed",
        ALL,
        *({"grammar": v} for v in ("", "start: start", "start: " + "(" * 6000 + ")" * 6000)),
        {"grammar": f'start: %json {{"const": {-(2**63)}}}'},
        {"grammar": rules(4000)},
        code="invalid_grammar",
    ),
]

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALLING = {"tools": [tool("f")], "tool_choice": NAMED, "parallel_tool_calls": False}

TOOLS = [
    bad(
        127,
        "arguments that cannot be followed",
        (CHAT,),
        takes({"properties": {"a": {"type": "string", "pattern": "["}}}),
        takes({"properties": {"a": {"$ref": "#/nowhere"}}}),
        takes({"properties": {"a": {"type": "foo"}}}),
        takes({"properties": {"a": {"const": -(2**63)}}}),
        param="tools[0].function.parameters",
        code="invalid_schema",
    ),
    bad(
        127,
        "arguments that are no object",
        (CHAT,),
        *(takes({"type": kind}) for kind in (5, "string", None, ["object", "null"])),
        param="tools[0].function.parameters.type",
        code="invalid_schema",
    ),
    bad(
        127,
        "arguments of 10,000 properties",
        (CHAT,),
        takes({"properties": {f"p{i}": {} for i in range(10_000)}}),
        code="invalid_schema",
    ),
    bad(
        127,
        "tools of a prompt",
        PROMPTED,
        *({name: value} for name, value in CALLING.items()),
        code="unsupported_parameter",
    ),
    bad(
        127,
        "a choice of no tools",
        (CHAT,),
        *({"tool_choice": value} for value in ("required", "auto", NAMED)),
        {"tool_choice": "required", "tools": []},
        {"parallel_tool_calls": True},
    ),
    bad(
        127,
        "a choice of a tool that is not there",
        (CHAT,),
        {**CALLING, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        param="tool_choice.function.name",
    ),
    bad(
        127,
        "two tools of one name",
        (CHAT,),
        {"tools": [tool("f"), tool("g"), tool("f", description="another")]},
        param="tools[2].function.name",
    ),
    bad(
        127,
        "a tool of a name that is none",
        (CHAT,),
        *({"tools": [tool(v)]} for v in ("", "a b", "x" * 65, 'f"', "f\n", "\u00e9", 5, [])),
        param="tools[0].function.name",
    ),
    bad(
        127,
        "tools and another structure",
        (CHAT,),
        {"regex": "a", "tools": [tool("f")]},
        {"response_format": {"type": "json_object"}, "tools": [tool("f")]},
        code="conflicting_parameters",
    ),
    good(
        127,
        "a tool that has to be called",
        (CHAT,),
        {**CALLING, "max_tokens": 64},
        holds=has_calls,
    ),
]

NAMES = [
    bad(
        128,
        "a salt that is none",
        ALL,
        *({"cache_salt": v} for v in ("", 1, "x" * 10_000, "a/../b", "\n", "salt\n", "sält")),
    ),
    bad(129, "a user that is none", ALL, {"user": 5}, {"user": "x" * 10_000}),
    good(
        131,
        "a request that brings an odd name",
        (),
        *(named(value) for value in ("x" * 10_000, "x" * 65, "a%0d%0ab", "a b", "../x", "\xe9")),
        holds=has_another_id,
    ),
    good(
        131,
        "a request that brings the name of one that runs",
        (),
        named("good-0"),
        holds=lambda answer: answer.headers["x-request-id"] == "good-0",
    ),
    wire(
        131,
        "a request that brings a line break in its name",
        cut(post(GENERATE, SMALL, "x-request-id: a\rb")),
        cut(post(GENERATE, SMALL, "x-request-id: a\x00b")),
        status=400,
        code="bad_framing",
    ),
    # There is no route that ends a request: its client does, by leaving.
    wire(
        133,
        "an end to a request of somebody else",
        *(
            raw(post(path, b'{"id": "good-0"}'))
            for path in ("/abort", "/abort_request", "/v1/completions/good-0/cancel")
        ),
        status=404,
        code="not_found",
    ),
    bad(
        135,
        "a field that names a place",
        ALL,
        {"kv_transfer_params": {"remote_host": "localhost"}},
        {"session_id": "../../x"},
        {"lora_path": "file:///etc/passwd"},
        code="unsupported_parameter",
    ),
]

ROWS = [
    *(*TRANSPORT, *KEYS, *SHAPE, *PROMPTS, *MESSAGES),
    *(*SAMPLING, *FORMATS, *STRUCTURED, *TOOLS, *NAMES),
]
