"""Bodies that nobody meant: good ones, damaged by chance in the ways that clients and attackers do.

    good body ──► 1 to 4 mutations of the value ──► JSON ──► sometimes: of its text, of its bytes

`fuzzed(seed, index)` is one body, the same on any machine, so that a finding is two numbers.
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

from tests.wire import Address, Answer, Wire, post

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
REFUSALS = {400, 404, 413}
"""What a body alone can be answered with, if not with 200."""

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
ASKED: dict[str, Any] = {**SAMPLING, **STREAMED, **STRUCTURES}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["ab", "c"], "logprobs": 2, "echo": False, **ASKED},
    CHAT: {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 64,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": False,
        "add_generation_prompt": True,
        **ASKED,
        **TOOLS,
        "max_tokens": 64,  # enough for a call
    },
    GENERATE: {"prompt": "abc", **SAMPLING, **STRUCTURES},
    "/tokenize": {"model": "hash", "prompt": "abc", "add_special_tokens": True},
    "/detokenize": {"model": "hash", "tokens": [98, 99, 100]},
}
NEEDED = ("model", "prompt", "messages", "tokens", "max_tokens")
SHAPES = (*STRUCTURES, "tools")
"""An answer has one of these."""
OF_TOOLS = ("tool_choice", "parallel_tool_calls")
"""Nothing without tools."""
WEIGHTS = {COMPLETIONS: 4, CHAT: 4, GENERATE: 3, "/tokenize": 1, "/detokenize": 1}
OTHER_NAMES = [
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
"""Of what is repeated."""
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": None}, [None], {"a": {"b": []}}]

Change = Callable[[Random, Any], Any]


class Fuzzed(NamedTuple):
    """One damaged body."""

    path: str
    body: bytes


def fuzzed(seed: int, index: int) -> Fuzzed:
    """Body number `index` of this seed."""
    chance = Random(f"{seed} {index}")
    path = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    value: Any = _some_of(chance, GOOD[path])
    for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 2, 4))):
        value = _changed(chance, value)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    if chance.random() < 0.1:
        text = chance.choice(REWRITES)(chance, text)
    raw = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        for _ in range(chance.choice((1, 1, 3))):
            raw = _damaged(chance, raw)
    return Fuzzed(path, raw)


def _changed(chance: Random, value: Any) -> Any:
    """A change anywhere, or of the shape alone: else what is around it is refused before it."""
    change = chance.choice(CHANGES)
    name = next((n for n in SHAPES if n in value), None) if isinstance(value, dict) else None
    if name is None or chance.random() < 0.5:
        return change(chance, value)
    changed = change(chance, {name: value[name]})
    return {**value, **changed} if isinstance(changed, dict) else changed


def _some_of(chance: Random, whole: dict[str, Any]) -> dict[str, Any]:
    """What the route needs, and some of what it takes: a body with all fields is refused soon."""
    names = [n for n in whole if n in NEEDED or chance.random() < 0.15]
    chance.shuffle(names)
    left_out = {*[n for n in names if n in SHAPES][1:]}
    if "tools" not in names or "tools" in left_out:
        left_out.update(OF_TOOLS)
    names = [n for n in names if n not in left_out]
    return {name: whole[name] for name in names}


# Of values.


def _atom(chance: Random) -> Any:
    kind = chance.random()
    if kind < 0.45:
        return chance.choice(NUMBERS)
    return chance.choice(TEXTS) if kind < 0.8 else chance.choice(OTHERS)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in the value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            for key in item if isinstance(item, dict) else range(len(item)):
                yield item, key
                waiting.append(item[key])


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _somewhere(change: Callable[[Random, Any, Any], None]) -> Change:
    """The change, at a place by chance. The value that is given stays as it is."""

    def changed(chance: Random, value: Any) -> Any:
        value = _copied(value)
        places = list(_places(value))
        if places:
            # Whole fields as often as what is inside them: a long list has many places.
            own = [(item, key) for item, key in places if item is value]
            change(chance, *chance.choice(own if chance.random() < 0.5 else places))
        return value

    return changed


def _deleted(chance: Random, item: Any, key: Any) -> None:
    del item[key]


def _retyped(chance: Random, item: Any, key: Any) -> None:
    item[key] = _atom(chance)


def _wrapped(chance: Random, item: Any, key: Any) -> None:
    for _ in range(chance.choice((1, 1, 2, 5, 60))):
        item[key] = [item[key]] if chance.random() < 0.5 else {chance.choice(TEXTS): item[key]}


def _repeated(chance: Random, item: Any, key: Any) -> None:
    times = chance.choice((2, 16, 17, 256, 257, 1025, 5000))
    inner = item[key]
    times = min(times, MOST_CHARS // len(json.dumps(inner)))
    if isinstance(inner, str | list):
        item[key] = inner * times
    elif isinstance(inner, dict):
        inner.update({str(i): _atom(chance) for i in range(times)})
    else:
        item[key] = [inner] * times


def _renamed(chance: Random, item: Any, key: Any) -> None:
    value = item[key]
    if isinstance(item, dict):
        del item[key]
        item[chance.choice([*OTHER_NAMES, *SAMPLING, str(key).upper()])] = value


def _nudged(chance: Random, item: Any, key: Any) -> None:
    value = item[key]
    if isinstance(value, int | float):
        near = (-value, value + 1, value - 1, value // 3, value * 1000, str(value))
        item[key] = chance.choice(near)
    elif isinstance(value, str):
        place = chance.randint(0, len(value))
        item[key] = value[:place] + chance.choice(TEXTS) + value[place:]
    else:
        _retyped(chance, item, key)


def _added(chance: Random, value: Any) -> Any:
    """One more field: of this route, of another one, or of none."""
    if not isinstance(value, dict):
        return value
    whole = GOOD[chance.choice(list(GOOD))]
    name = chance.choice([*OTHER_NAMES, *whole])
    return {**value, name: _atom(chance) if chance.random() < 0.5 else whole.get(name)}


def _replaced(chance: Random, value: Any) -> Any:
    """Something else than an object, now and then."""
    return _atom(chance) if chance.random() < 0.1 else [value] if chance.random() < 0.1 else value


CHANGES: list[Change] = [
    *map(_somewhere, (_deleted, _retyped, _retyped, _retyped, _wrapped, _repeated, _repeated)),
    *map(_somewhere, (_renamed, _nudged, _nudged)),
    *(_added, _added, _replaced),
]

# Of the text and of the bytes.


def _with_duplicate(chance: Random, text: str) -> str:
    name = chance.choice([*SAMPLING, "prompt", "messages", "stream"])
    return text.replace("{", "{" + f"{json.dumps(name)}: {json.dumps(_atom(chance))}, ", 1)


def _deep(chance: Random, text: str) -> str:
    depth = chance.choice((500, 5000, 50_000))
    opened, closed = chance.choice((("[", "]"), ('{"a":', "}")))
    return text[:-1] + ', "deep": ' + opened * depth + "1" + closed * depth + "}"


def _odd_number(chance: Random, text: str) -> str:
    odd = ("1e999", "-1e999", "1e-999", "01", "+1", ".5", "1.", "0x1", "1_0", "9" * 5000, "-")
    number = chance.choice(odd)
    return text[:-1] + f', "{chance.choice(list(SAMPLING))}": {number}}}'


def _odd_space(chance: Random, text: str) -> str:
    return chance.choice((" \t\r\n", "\ufeff", "\x0b", "\u00a0", "/**/")) + text


def _odd_end(chance: Random, text: str) -> str:
    return text + chance.choice(("}", "{}", ",", "\x00", " ", "\n\n", text))


REWRITES: list[Callable[[Random, str], str]] = [
    *(_with_duplicate, _with_duplicate, _deep, _odd_number, _odd_space, _odd_end)
]


DEBRIS = (b'"', b"\\", b"}", b"]", b",", b":", b"\xff", b"\xed\xa0\x80", b"\\u", b"\x00")


def _damaged(chance: Random, raw: bytes) -> bytes:
    place = chance.randint(0, len(raw))
    span = chance.choice((1, 1, 1, 2, 8))
    junk = chance.choice((chance.randbytes(span), *DEBRIS))
    return chance.choice(
        (
            raw[:place] + junk + raw[place + len(junk) :],
            raw[:place] + junk + raw[place:],
            raw[:place] + raw[place + span :],
            raw[:place],
        )
    )


# Sending them.


@dataclass(slots=True)
class Findings:
    """What came of many bodies.

    faults        answers that no body may have, each with the body's index
    refused_ms    how long each refusal took
    """

    faults: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0

    def __str__(self) -> str:
        ordered = sorted(self.refused_ms)
        p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        return (
            f"{self.statuses.total()} bodies in {self.took_s:.1f} s: {dict(self.statuses)}; "
            f"refusals: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {ordered[-1]:.1f} ms; "
            f"{dict(self.codes.most_common())}"
        )


async def fuzz(address: Address, seed: int, count: int, connections: int) -> Findings:
    """The first `count` bodies of this seed were sent, over so many connections."""
    findings = Findings()
    indices = iter(range(count))
    start_s = time.perf_counter()

    async def send() -> None:
        wire = Wire(address)
        for index in indices:
            path, body = fuzzed(seed, index)
            sent_s = time.perf_counter()
            try:
                answer = await asyncio.wait_for(wire.answer(post(path, body)), 60)
                fault = fault_of(answer)
            except (OSError, EOFError, ValueError, TimeoutError) as broken:
                await wire.close()
                findings.faults.append(f"seed {seed} index {index} {path}: {broken!r}")
                continue
            findings.statuses[answer.status] += 1
            if answer.status != 200:
                findings.refused_ms.append((time.perf_counter() - sent_s) * 1e3)
            if fault is not None:
                said = f"{answer.status} {fault}: {answer.body[:200]!r}"
                findings.faults.append(f"seed {seed} index {index} {path}: {said}")
            elif answer.status != 200:
                findings.codes[answer.json["error"]["code"]] += 1
        await wire.close()

    await asyncio.gather(*(send() for _ in range(connections)))
    findings.took_s = time.perf_counter() - start_s
    return findings


def fault_of(answer: Answer) -> str | None:
    """What is wrong with this answer to a body, if anything."""
    if answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        ended = answer.body.endswith(b"data: [DONE]\n\n") and b'"error":' not in answer.body
        return None if ended else "a stream that does not end well"
    try:
        found = json.loads(answer.body, parse_constant=_no_constant)
    except ValueError:
        return "no JSON"
    if answer.status == 200:
        return None if isinstance(found, dict) and "error" not in found else "no answer"
    if answer.status not in REFUSALS:
        return "a status that no body asks for"
    return _envelope_fault(found)


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _envelope_fault(found: Any) -> str | None:
    error = found.get("error") if isinstance(found, dict) and list(found) == ["error"] else None
    if not isinstance(error, dict) or list(error) != ["message", "type", "param", "code"]:
        return "no envelope"
    message, kind, param, code = error.values()
    plain = isinstance(message, str) and message.isascii() and message.isprintable()
    if not plain or not 0 < len(message) <= 512:
        return "a message that is none"
    if kind != "invalid_request_error" or not isinstance(code, str) or not code:
        return "a type or code that is none"
    named = param is None or (isinstance(param, str) and param.isprintable())
    return None if named else "a param that is none"
