"""Random outputs with reasoning before a JSON schema, with drafts and two plans in flight.

Owns how a world is drawn, run and checked. Every choice that ends by itself must be reasoning, its
end marker and a JSON value that fits; any other must be the beginning of one.

    seed ──► schemas, markers, drafts, depth ──► engine on a HashModel ──► texts ──► check_text
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from random import Random
from typing import Any

from forge.config import Speculation
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.request import FinishReason, Reasoning, Request, SamplingParams, Structure
from forge.structured_output import LLGuidanceBackend
from forge.tokenizer import ByteTokenizer
from tests.core.builders import config

SCHEMAS_PER_WORLD = 4
END = "<|end|>"
PIECES = (
    *(END, "<think>", "</think>", "</", "think", ">", "think>", "<", "</think", ">{", ">\n"),
    *(
        "</think>{",
        "</think>[1",
        "<think>{",
        "k>1",
        "/",
        "\n",
        "{",
        "}",
        "[",
        "]",
        '"',
        ": ",
        ", ",
        ":",
    ),
    *(",", " ", "-", *"0123456789", "12", "true", "false", "null", "a", "b", "c", '"a"', '"b": '),
    *("h", "i", "k", "t", "r", "u", "e", "f", "l", "s", "n", '{"', '"}', "]}", "}}"),
)
"""Tokens of which several hold the end of a marker and text after it."""
MARKERS = (
    *(Reasoning("<think>", "</think>"), Reasoning("", "</think>")),
    *(Reasoning("", ">"), Reasoning("[", "]"), Reasoning("", "a<a<b")),
)
"""Markers, among them one that JSON of an array begins with, and one that overlaps itself."""


class PieceTokenizer(ByteTokenizer):
    """A tokenizer whose tokens are PIECES; the first one ends an output."""

    @property
    def vocab_size(self) -> int:
        return len(PIECES)

    @property
    def special_token_ids(self) -> Collection[int]:
        return (0,)

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token].encode()

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(PIECES[token] for token in tokens if token)


TOKENIZER = PieceTokenizer()
BACKEND = LLGuidanceBackend(TOKENIZER, TOKENIZER.vocab_size, (0,))
"""Compiles the structures for `check_tokens`, separate from those of the engines."""


def draw_schema(rng: Random, depth: int) -> dict[str, Any]:
    """Draw a schema that `fits` understands, nested up to `depth`."""
    kinds = ("boolean", "null", "integer", "string", "enum", "array", "object", "object", "anyOf")
    match rng.choice(kinds[: 5 if depth == 0 else None]):
        case "integer":
            low = rng.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 4)}
        case "enum":
            return {"enum": rng.sample(["a", "b", "ab", 1, 12, True, None, [1], {"a": 2}], 3)}
        case "array":
            return {
                "type": "array",
                "items": draw_schema(rng, depth - 1),
                "minItems": rng.randint(0, 1),
                "maxItems": rng.randint(1, 3),
            }
        case "object":
            names = rng.sample(["a", "b", "c", "ab"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: draw_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": [draw_schema(rng, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether the value fits a schema of `draw_schema`."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    match schema["type"]:
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return type(value) is str and len(value) <= schema["maxLength"]
        case "array":
            in_range = (
                type(value) is list and schema["minItems"] <= len(value) <= schema["maxItems"]
            )
            return in_range and all(fits(item, schema["items"]) for item in value)
        case _:
            properties = schema["properties"]
            return (
                type(value) is dict
                and set(schema["required"]) <= set(value) <= set(properties)
                and all(fits(item, properties[name]) for name, item in value.items())
            )


def split_text(text: str, reasoning: Reasoning) -> tuple[str, str | None]:
    """Return reasoning and answer of a text; None: the answer has not started."""
    begin, end = reasoning
    if begin and not text.startswith(begin):
        return "", text
    before, marker, answer = text.removeprefix(begin).partition(end)
    return before, answer if marker else None


def check_tokens(tokens: Iterable[int], structure: Structure) -> None:
    """Feed the tokens to a new matcher: each must be in the mask that the ones before give."""
    matcher = BACKEND.create_matcher(structure, allow_end=True)
    for index, token in enumerate(tokens):
        assert matcher.mask[token >> 3] >> (token & 7) & 1, f"token {index} is not allowed"
        if token == 0 or matcher.feed(token):
            break


def run_world(seed: int) -> Counter[str]:
    """Run a world and check every output; return what it reached. Raises AssertionError."""
    rng = Random(f"reasoning {seed}")
    method, depth = rng.choice((None, "draft", "ngram")), rng.choice((1, 2))
    speculation = None
    if method is not None:
        acceptance = rng.choice(("coupled", "rejection"))
        speculation = Speculation(
            num_tokens=rng.choice((1, 3, 5)), method=method, acceptance=acceptance
        )
    size = {"vocab_size": len(PIECES), "block_size": 4, "num_blocks": 256}
    draft = HashModel(**size, agreement=rng.choice((0.3, 0.9, 1.0))) if method == "draft" else None
    engine = Engine(
        HashModel(**size, draft=draft),
        config(blocks=256, depth=depth, seed=rng.getrandbits(31), speculation=speculation),
        TOKENIZER,
    )
    schemas = [draw_schema(rng, 2) for _ in range(SCHEMAS_PER_WORLD)]
    reached = Counter[str]()
    requests = []
    for index, schema in enumerate(schemas):
        structure = Structure.json_schema(schema)._replace(reasoning=rng.choice(MARKERS))
        # Without noise a repeated context repeats its continuation, which n-grams propose.
        temperature = rng.choice((0.0, 0.7, 1.0))
        params = SamplingParams(max_tokens=250, temperature=temperature, structure=structure)
        prompt = tuple(rng.choices(range(1, len(PIECES)), k=rng.randint(1, 6)))
        requests.append(Request(index, prompt, params))
        engine.submit(requests[-1])
    outputs: dict[int, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id] += delta.tokens
            if delta.finish is not None:
                structure = requests[delta.request_id].params.structure
                assert structure is not None
                assert delta.error is None, delta.error
                ending = check_output(outputs[delta.request_id], structure, delta.finish)
                reached[f"{method} depth {depth}: {ending}"] += 1
    return reached


def check_output(tokens: list[int], structure: Structure, finish: FinishReason) -> str:
    """Check one output, and return how it ended."""
    assert finish in (FinishReason.STOP, FinishReason.LENGTH), finish
    check_tokens(tokens, structure)
    assert structure.reasoning is not None
    text = TOKENIZER.decode(tokens)
    before, answer = split_text(text, structure.reasoning)
    if finish is FinishReason.LENGTH:
        return "cut in reasoning" if answer is None else "cut in JSON"
    assert answer is not None, f"no answer in {text!r}"
    assert fits(json.loads(answer), json.loads(structure.text)), f"{answer!r} in {text!r}"
    return "valid after reasoning" if before else "valid"
