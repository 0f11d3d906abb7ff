"""Fuzzed bodies: good ones with random damage of the kinds that clients and attackers cause.

    good body ──► 1 to 4 mutations of the value ──► JSON ──► sometimes: of its text, of its bytes

`fuzz_body(seed, index)` is one body, equal on any machine, so that a finding is two numbers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from tests.server.http_wire import Address, PersistentConnection, WireResponse, build_post

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
REFUSALS = {400, 404, 413}
"""Statuses other than 200 that a body alone may cause."""

SAMPLING: dict[str, Any] = {
    "model": "hash",
    "max_tokens": 2,
    "min_tokens": 0,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": -1.5, "7": 3},
    "allowed_token_ids": [5, 6, 7, 98],
    "seed": 7,
    "stop": ["end", "\n\n"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "priority": 1,
    "cache_salt": "salt",
    "user": "somebody",
    "request_id": "r-1",
    "return_timings": True,
    "metadata": {"a": "b"},
    "add_special_tokens": True,
}
STREAMED: dict[str, Any] = {
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[b-d]{1,3}$"},
        "e": {"$ref": "#/$defs/f"},
        "g": {"anyOf": [{"const": None}, {"enum": ["h", 1]}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"f": {"type": "array", "items": {"minimum": 0}, "maxItems": 2}},
}
STRUCTURES: dict[str, Any] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "i", "description": "j", "strict": True, "schema": SCHEMA},
    },
    "regex": "(red|green)( [^a-z]{1,3})?",
    "grammar": 'start: word (" " word)*\nword: /[a-c]+/ | "d" | %json {"type": "integer"}',
}
CALL: dict[str, Any] = {"name": "k", "arguments": '{"a": "b", "e": [1]}'}
TOOLS: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {"name": "k", "description": "l", "strict": True, "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "m", "parameters": {}}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "k"}},
    "parallel_tool_calls": False,
}
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
    {"role": "assistant", "content": "c", "tool_calls": []},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "e", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "d", "tool_call_id": "e"},
]
GENERATION_FIELDS: dict[str, Any] = {**SAMPLING, **STREAMED, **STRUCTURES}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["ab", "c"], "logprobs": 2, "echo": False, **GENERATION_FIELDS},
    CHAT: {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 64,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": False,
        "add_generation_prompt": True,
        **GENERATION_FIELDS,
        **TOOLS,
        "max_tokens": 64,  # enough for a call
    },
    GENERATE: {"prompt": "abc", **SAMPLING, **STRUCTURES},
    "/tokenize": {"model": "hash", "prompt": "abc", "add_special_tokens": True},
    "/detokenize": {"model": "hash", "tokens": [98, 99, 100]},
}
REQUIRED_FIELDS = ("model", "prompt", "messages", "tokens", "max_tokens")
OUTPUT_CONSTRAINTS = (*STRUCTURES, "tools")
"""Keys, of which a response has one."""
TOOL_ONLY_FIELDS = ("tool_choice", "parallel_tool_calls")
"""Fields without effect where there are no tools."""
WEIGHTS = {COMPLETIONS: 4, CHAT: 4, GENERATE: 3, "/tokenize": 1, "/detokenize": 1}
FOREIGN_NAMES = [
    *("best_of", "suffix", "tools", "tool_choice", "functions", "response_format", "audio"),
    *("prompt_embeds", "guided_json", "kv_transfer_params", "prompt_logprobs", "echo", "n"),
    *("chat_template", "documents", "truncate_prompt_tokens", "use_beam_search", "bad_words"),
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
    """A damaged body."""

    path: str
    body: bytes


def fuzz_body(seed: int, index: int) -> FuzzedBody:
    """Return body number `index` of this seed."""
    rng = Random(f"{seed} {index}")
    path = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    value: Any = _choose_fields(rng, GOOD[path])
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 4))):
        value = _mutate(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = rng.choice(TEXT_MUTATIONS)(rng, text)
    raw = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 1, 3))):
            raw = _damage_bytes(rng, raw)
    return FuzzedBody(path, raw)


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


# Sending.


@dataclass(slots=True)
class BodyFuzzReport:
    """Results of many bodies.

    faults        responses that no body may have, each with the body's index
    refused_ms    milliseconds of each refusal
    """

    faults: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    duration_s: float = 0.0

    def __str__(self) -> str:
        ordered = sorted(self.refused_ms)
        p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        return (
            f"{self.statuses.total()} bodies in {self.duration_s:.1f} s: {dict(self.statuses)}; "
            f"refusals: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {ordered[-1]:.1f} ms; "
            f"{dict(self.codes.most_common())}"
        )


async def run_fuzz(address: Address, seed: int, count: int, connections: int) -> BodyFuzzReport:
    """Send the first `count` bodies of this seed over so many connections."""
    findings = BodyFuzzReport()
    indices = iter(range(count))
    start_s = time.perf_counter()

    async def send() -> None:
        wire = PersistentConnection(address)
        for index in indices:
            path, body = fuzz_body(seed, index)
            sent_s = time.perf_counter()
            try:
                answer = await asyncio.wait_for(wire.send(build_post(path, body)), 60)
                problem = find_fault(answer)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                await wire.close()
                findings.faults.append(f"seed {seed} index {index} {path}: {error!r}")
                continue
            findings.statuses[answer.status] += 1
            if answer.status != 200:
                findings.refused_ms.append((time.perf_counter() - sent_s) * 1e3)
            if problem is not None:
                problem = f"{answer.status} {problem}: {answer.body[:200]!r}"
                findings.faults.append(f"seed {seed} index {index} {path}: {problem}")
            elif answer.status != 200:
                findings.codes[answer.json["error"]["code"]] += 1
        await wire.close()

    await asyncio.gather(*(send() for _ in range(connections)))
    findings.duration_s = time.perf_counter() - start_s
    return findings


def find_fault(answer: WireResponse) -> str | None:
    """Return what is wrong with the response to a body, or None."""
    if answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        ends_well = answer.body.endswith(b"data: [DONE]\n\n") and b'"error":' not in answer.body
        return None if ends_well else "a stream that does not end well"
    try:
        found = json.loads(answer.body, parse_constant=_refuse_constant)
    except ValueError:
        return "no JSON"
    if answer.status == 200:
        return None if isinstance(found, dict) and "error" not in found else "no answer"
    if answer.status not in REFUSALS:
        return "a status that no body may cause"
    return _find_envelope_fault(found)


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _find_envelope_fault(found: Any) -> str | None:
    error = found.get("error") if isinstance(found, dict) and list(found) == ["error"] else None
    if not isinstance(error, dict) or list(error) != ["message", "type", "param", "code"]:
        return "no envelope"
    message, kind, param, code = error.values()
    plain = isinstance(message, str) and message.isascii() and message.isprintable()
    if not plain or not 0 < len(message) <= 512:
        return "a message that is none"
    if kind != "invalid_request_error" or not isinstance(code, str) or not code:
        return "a type or code that is none"
    has_valid_param = param is None or (isinstance(param, str) and param.isprintable())
    return None if has_valid_param else "a param that is none"
