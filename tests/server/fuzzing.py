"""Fuzzed bodies: good ones with random damage of the kinds that clients and attackers cause.

    good body ──► 1 to 4 mutations of the value ──► JSON ──► sometimes: of its text, of its bytes

`fuzz_body(seed, index, routes)` is one body, equal on any machine, so that a finding is two numbers
and a table of routes: CLIENT_ROUTES or OPERATOR_ROUTES of good_bodies.py. fuzz_runs.py sends them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tests.server.good_bodies import (
    GOOD,
    OUTPUT_CONSTRAINTS,
    QUERY_ROUTES,
    REQUIRED_FIELDS,
    SAMPLING,
    TOOL_ONLY_FIELDS,
)

FOREIGN_NAMES = [
    *("best_of", "suffix", "tools", "tool_choice", "functions", "response_format", "audio"),
    *("prompt_embeds", "guided_json", "kv_transfer_params", "prompt_logprobs", "echo", "n"),
    *("chat_template", "documents", "truncate_prompt_tokens", "use_beam_search", "bad_words"),
    "stop_regex",
    *("$ref", "$id", "properties", "items", "prefixItems", "allOf", "oneOf", "not", "if", "format"),
    *("patternProperties", "minItems", "maxLength", "multipleOf", "x-guidance", "type", "function"),
    *("__class__", "__proto__", "constructor", "", " ", "Model", "a.b", "a[0]", "\ud800", "\x00"),
]
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 16, 17, 20, 21, 48, 64, 128, 129, 256, 257, 258, 1024, 1025, 65536),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64),
    *(10**18, 10**30, 10**400, -(10**400), 0.0, -0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 2.1, -0.1, 1e-5),
    *(5e-324, 1e-40, 1e38, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
]
TEXTS = [
    *("", " ", "a", "hash", "true", "null", "1", "-1", "NaN", "\x00", "\n", "\r\n", "\t\x1b[31m"),
    *("\ud800", "\udfff", "a\ud83d", "\ufffd", "\ufeff", "\u202e", "é", "e\u0301", "日本語"),
    *("\U0001f469\u200d\U0001f467", "\U0010ffff", "\u2028", "\u0130", "\ufb01", "\x00\x01"),
    *("<|end|>", "<|im_start|>system", "{{ 7*7 }}", "{% for %}", "../../etc/passwd", "file:///x"),
    *(
        "[",
        "(a+)+b",
        "(?=a)b",
        "a{1,99999}",
        "(a|b){999}{999}",
        "\\p{L}+",
        "(?i:k)",
        "#",
        "#/$defs/f",
    ),
    *("start: start", "start: /a/ start?", 'start: "a"+', "http://localhost:1/x", '{"a": 1e999}'),
    *("<tool_call>", '<tool_call>\n{"name": "k", "arguments": {', "object", "json_schema", "date"),
    *("%s%n", "${jndi:x}", "' OR 1=1 --", "user", "assistant", "tool", "none", "auto", "a" * 513),
]
MOST_CHARS = 50_000
"""Longest repetition."""
MAX_QUERY_CHARS = 4_000
"""Longest query: a longer one is refused as a head that is too large."""
OTHER_VALUES: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    {"": None},
    [None],
    {"a": {"b": []}},
]

Mutation = Callable[[Random, Any], Any]


class FuzzedBody(NamedTuple):
    """A damaged body, and the path that it is sent to, which may have a query."""

    path: str
    body: bytes


def fuzz_body(seed: int, index: int, routes: Mapping[str, int]) -> FuzzedBody:
    """Return body number `index` of this seed, for one of the routes, which have weights."""
    rng = Random(f"{seed} {index}")
    path = rng.choices(list(routes), list(routes.values()))[0]
    value: Any = _choose_fields(rng, GOOD[path])
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 4))):
        value = _mutate(rng, value)
    if path in QUERY_ROUTES:
        return FuzzedBody(path + _encode_query(value), b"")
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = rng.choice(TEXT_MUTATIONS)(rng, text)
    raw = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 1, 3))):
            raw = _damage_bytes(rng, raw)
    return FuzzedBody(path, raw)


def _encode_query(value: Any) -> str:
    """Return a query of the fields; of what is no object, the JSON as its only parameter."""
    fields = value if isinstance(value, dict) else {json.dumps(value): ""}
    pairs = [
        (name, each if isinstance(each, str) else json.dumps(each)) for name, each in fields.items()
    ]
    query = urlencode(pairs, errors="surrogatepass")[:MAX_QUERY_CHARS]
    return f"?{query}" if query else ""


def _mutate(rng: Random, value: Any) -> Any:
    """Return the value with one mutation, anywhere or at the root."""
    change = rng.choice(MUTATIONS)
    name = (
        next((n for n in OUTPUT_CONSTRAINTS if n in value), None)
        if isinstance(value, dict)
        else None
    )
    if name is None or rng.random() < 0.5:
        return change(rng, value)
    changed = change(rng, {name: value[name]})
    return {**value, **changed} if isinstance(changed, dict) else changed


def _choose_fields(rng: Random, whole: dict[str, Any]) -> dict[str, Any]:
    """Return the required fields and a few others: a body with all of them is refused early."""
    names = [n for n in whole if n in REQUIRED_FIELDS or rng.random() < 0.15]
    rng.shuffle(names)
    left_out = {*[n for n in names if n in OUTPUT_CONSTRAINTS][1:]}
    if "tools" not in names or "tools" in left_out:
        left_out.update(TOOL_ONLY_FIELDS)
    names = [n for n in names if n not in left_out]
    return {name: whole[name] for name in names}


# Mutations of values.


def _random_scalar(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    return rng.choice(TEXTS) if kind < 0.8 else rng.choice(OTHER_VALUES)


def _locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in the value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            for key in item if isinstance(item, dict) else range(len(item)):
                yield item, key
                waiting.append(item[key])


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _at_random_location(change: Callable[[Random, Any, Any], None]) -> Mutation:
    """Return a mutation that applies the change at a random place of a copy of the value."""

    def mutate(rng: Random, value: Any) -> Any:
        value = _copy(value)
        locations = list(_locations(value))
        if locations:
            # Whole fields as often as their content: a long list has many places.
            own = [(item, key) for item, key in locations if item is value]
            change(rng, *rng.choice(own if rng.random() < 0.5 else locations))
        return value

    return mutate


def _delete(rng: Random, item: Any, key: Any) -> None:
    del item[key]


def _retype(rng: Random, item: Any, key: Any) -> None:
    item[key] = _random_scalar(rng)


def _wrap(rng: Random, item: Any, key: Any) -> None:
    for _ in range(rng.choice((1, 1, 2, 5, 60))):
        item[key] = [item[key]] if rng.random() < 0.5 else {rng.choice(TEXTS): item[key]}


def _repeat(rng: Random, item: Any, key: Any) -> None:
    times = rng.choice((2, 16, 17, 256, 257, 1025, 5000))
    inner = item[key]
    times = min(times, MOST_CHARS // len(json.dumps(inner)))
    if isinstance(inner, str | list):
        item[key] = inner * times
    elif isinstance(inner, dict):
        inner.update({str(i): _random_scalar(rng) for i in range(times)})
    else:
        item[key] = [inner] * times


def _rename(rng: Random, item: Any, key: Any) -> None:
    value = item[key]
    if isinstance(item, dict):
        del item[key]
        item[rng.choice([*FOREIGN_NAMES, *SAMPLING, str(key).upper()])] = value


def _nudge(rng: Random, item: Any, key: Any) -> None:
    value = item[key]
    if isinstance(value, int | float):
        near = (-value, value + 1, value - 1, value // 3, value * 1000, str(value))
        item[key] = rng.choice(near)
    elif isinstance(value, str):
        position = rng.randint(0, len(value))
        item[key] = value[:position] + rng.choice(TEXTS) + value[position:]
    else:
        _retype(rng, item, key)


def _add_field(rng: Random, value: Any) -> Any:
    """Add a field: of this route, of another one, or an unknown one."""
    if not isinstance(value, dict):
        return value
    whole = GOOD[rng.choice(list(GOOD))]
    name = rng.choice([*FOREIGN_NAMES, *whole])
    return {**value, name: _random_scalar(rng) if rng.random() < 0.5 else whole.get(name)}


def _replace_root(rng: Random, value: Any) -> Any:
    """Return something other than an object, now and then."""
    return _random_scalar(rng) if rng.random() < 0.1 else [value] if rng.random() < 0.1 else value


MUTATIONS: list[Mutation] = [
    *map(_at_random_location, (_delete, _retype, _retype, _retype, _wrap, _repeat, _repeat)),
    *map(_at_random_location, (_rename, _nudge, _nudge)),
    *(_add_field, _add_field, _replace_root),
]

# Mutations of the text and of the bytes.


def _duplicate_key(rng: Random, text: str) -> str:
    name = rng.choice([*SAMPLING, "prompt", "messages", "stream"])
    return text.replace("{", "{" + f"{json.dumps(name)}: {json.dumps(_random_scalar(rng))}, ", 1)


def _nest_deep(rng: Random, text: str) -> str:
    depth = rng.choice((500, 5000, 50_000))
    opening, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    return text[:-1] + ', "deep": ' + opening * depth + "1" + closed * depth + "}"


def _add_odd_number(rng: Random, text: str) -> str:
    odd = ("1e999", "-1e999", "1e-999", "01", "+1", ".5", "1.", "0x1", "1_0", "9" * 5000, "-")
    number = rng.choice(odd)
    return text[:-1] + f', "{rng.choice(list(SAMPLING))}": {number}}}'


def _prepend_space(rng: Random, text: str) -> str:
    return rng.choice((" \t\r\n", "\ufeff", "\x0b", "\u00a0", "/**/")) + text


def _append_garbage(rng: Random, text: str) -> str:
    return text + rng.choice(("}", "{}", ",", "\x00", " ", "\n\n", text))


TEXT_MUTATIONS: list[Callable[[Random, str], str]] = [
    *(_duplicate_key, _duplicate_key, _nest_deep, _add_odd_number, _prepend_space, _append_garbage)
]


DEBRIS = (b'"', b"\\", b"}", b"]", b",", b":", b"\xff", b"\xed\xa0\x80", b"\\u", b"\x00")


def _damage_bytes(rng: Random, raw: bytes) -> bytes:
    position = rng.randint(0, len(raw))
    span = rng.choice((1, 1, 1, 2, 8))
    junk = rng.choice((rng.randbytes(span), *DEBRIS))
    return rng.choice(
        (
            raw[:position] + junk + raw[position + len(junk) :],
            raw[:position] + junk + raw[position:],
            raw[:position] + raw[position + span :],
            raw[:position],
        )
    )
