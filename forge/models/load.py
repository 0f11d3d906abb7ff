"""From a model's name to what an engine needs: model, tokenizer, completed geometry.

Owns the names of embedded models and their options. A loader is a context manager: what it opened
is closed when the engine is done.

    "hash"                   the deterministic model over the byte tokenizer
    "hash:seed=3,step_ms=2"  options follow a colon
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.models.hash import HashModel
from forge.seam import Model
from forge.tokenizer import ByteTokenizer, Tokenizer

LETTERS = b" etaoinshrdlucmfwygpbvk etaoinshr e"
"""Bytes that the embedded model finds likely, so that its text looks like text."""

HASH_OPTIONS = {"seed": int, "step_ms": float, "agreement": float}


class Loaded(NamedTuple):
    """A model ready to serve. `config` is the caller's, completed."""

    name: str
    model: Model
    tokenizer: Tokenizer
    config: EngineConfig


@contextmanager
def load(name: str, config: EngineConfig) -> Iterator[Loaded]:
    """The named model, for as long as the context lasts. Raises InvalidConfig with the remedy."""
    kind, _, options = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind != "hash":
        raise InvalidConfig(
            "model",
            f"{str(name)[:64]!r} is not a model this build serves",
            "Use hash or hash:seed=3",
        )
    yield _load_hash(name, _options(options), config)


def _options(text: str) -> dict[str, int | float]:
    """`a=1,b=2` as a mapping."""
    options: dict[str, int | float] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        kind = HASH_OPTIONS.get(key)
        if kind is None:
            known = ", ".join(HASH_OPTIONS)
            raise InvalidConfig("model", f"hash has no option {key[:64]!r}", f"Use one of: {known}")
        try:
            options[key] = kind(value)
        except ValueError:
            raise InvalidConfig(
                "model", f"hash:{key}={value[:64]!r} is not a number", f"Give {key}=1, say"
            ) from None
    for key, low, high in (("seed", -(2**63), 2**63 - 1), ("step_ms", 0, 1e5), ("agreement", 0, 1)):
        if key in options and not low <= options[key] <= high:
            raise InvalidConfig(
                "model", f"hash:{key}={options[key]} is out of range", f"Give {low} to {high}"
            )
    return options


def _load_hash(name: str, options: dict[str, int | float], config: EngineConfig) -> Loaded:
    tokenizer = ByteTokenizer()
    seed = int(options.get("seed", 0))
    likely = [tokenizer.encode(chr(byte))[0] for byte in LETTERS]
    model = HashModel(
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        seed=seed,
        likely=[*likely, *likely, *likely, tokenizer.eos_token],
        agreement=float(options.get("agreement", 1.0)),
        step_s=float(options.get("step_ms", 0.0)) / 1000,
    )
    return Loaded(name, model, tokenizer, replace(config, cache_namespace=f"hash seed={seed}"))
