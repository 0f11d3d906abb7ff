"""The embedded models: `hash` and the trained pair `tiny` and `tiny-draft`. Neither needs torch.

Owns their names, their options and how they are opened. Knows no other checkpoint.

    "hash"                   the deterministic model
    "hash:seed=3,step_ms=2"  options follow a colon
    "tiny", "tiny-draft"     the checkpoints next to this file, in numpy

All are over the byte tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from forge.config import DeviceOptions, EngineConfig, HostTier, StepCosts
from forge.errors import InvalidConfig
from forge.models.checked_host_blocks import CheckedHostBlocks
from forge.models.file_format import HASH_BYTES, header_bytes
from forge.models.file_moves import FileMoves
from forge.models.hash import HashModel
from forge.models.host_blocks import HostBlocks, page_bytes
from forge.models.loaded_model import LoadedModel
from forge.models.paged import PagedModel
from forge.models.tier_files import open_tier_files
from forge.tier_options import TierOptions
from forge.tokenizer import ByteTokenizer

LETTERS = b" etaoinshrdlucmfwygpbvk etaoinshr e"
"""Bytes that the hash model finds likely, so that its text looks like text."""

HASH_OPTIONS = {"seed": int, "step_ms": float, "agreement": float}

EMBEDDED_CHECKPOINTS = {"tiny": "tiny", "tiny-draft": "tiny_draft"}
"""Embedded models that are checkpoints, and their folders next to this file."""

NUMPY_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "device": ("auto", "cpu"),
    "dtype": ("auto", "float32"),
    "load_format": ("auto",),
    "tensor_parallel_size": (1,),
}
"""Values of device options that describe what a model in numpy does anyway."""

MAX_POSITIONS = 1024
"""Positions that both checkpoints were trained for."""

NUMPY_BATCHED_TOKENS = 256
"""Default of `max_num_batched_tokens`: memory of a step grows with its tokens times their context.
"""


def is_embedded(name: object) -> bool:
    """Return whether the name is that of an embedded model, options included."""
    return isinstance(name, str) and (
        name.partition(":")[0] == "hash" or name in EMBEDDED_CHECKPOINTS
    )


def embedded_folder(name: str) -> Path:
    """Return the folder of an embedded checkpoint."""
    return Path(__file__).with_name(EMBEDDED_CHECKPOINTS[name])


@contextmanager
def open_embedded_model(
    name: str,
    draft: str | None,
    device: Mapping[str, Any],
    config: Mapping[str, Any],
    tiers: TierOptions,
) -> Iterator[LoadedModel]:
    """Open the named model, and close it when the context ends. Raise InvalidConfig.

    draft    name of the draft model, or None
    device   options of DeviceOptions that the caller set
    config   fields of EngineConfig that the caller set, and `speculation`
    """
    if name in EMBEDDED_CHECKPOINTS:
        _refuse_device_options(name, device)
        with _open_numpy_model(name, draft, config, tiers) as loaded:
            yield loaded
        return
    for option in device:
        raise InvalidConfig(
            option, "the model hash does not accept it", "Leave it out, or serve a checkpoint"
        )
    if "max_step_ms" in config:
        raise InvalidConfig(
            "max_step_ms",
            "steps of the model hash do not depend on their tokens",
            "Leave it out, or serve a checkpoint",
        )
    with _open_hash_model(name, draft, EngineConfig(**config), tiers) as loaded:
        yield loaded


class _HostMemory(NamedTuple):
    """KV tiers of a model. Without host memory `tier` is None."""

    tier: HostTier | None
    blocks: HostBlocks
    moves: FileMoves | None = None
    keys: tuple[bytes, ...] = ()


@contextmanager
def _open_host_memory(
    options: TierOptions, config: EngineConfig, block_bytes: int, contents: str
) -> Iterator[_HostMemory]:
    """Open the KV tiers of a model, and close their files when the context ends.

    contents   text that says what a block contains, besides its tokens' hash
    """
    tier = options.host_tier(
        block_bytes,
        header_bytes(block_bytes) + block_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    blocks = (CheckedHostBlocks if options.check_kv else HostBlocks)(block_bytes)
    layout = f"{contents}, {sys.byteorder} endian, {config.block_size} a block"
    digest = blake2b(layout.encode(), digest_size=HASH_BYTES).digest()
    with open_tier_files(options, digest) as opened:
        if opened is None:
            yield _HostMemory(tier, blocks)
        else:
            moves = FileMoves(opened.files, opened.executor)
            yield _HostMemory(tier, blocks, moves, opened.keys)


# The trained pair.


def _refuse_device_options(name: str, device: Mapping[str, Any]) -> None:
    """Raise InvalidConfig for an option that only a device has."""
    DeviceOptions(**device)
    for option, value in device.items():
        if value not in NUMPY_CHOICES.get(option, ()):
            raise InvalidConfig(
                option,
                f"the model {name} is computed in numpy, in float32 on the CPU, and has no "
                f"{option} of {value!r}",
                "Leave it out, or install torch and serve the checkpoint by its folder: "
                f"{embedded_folder(name)}",
            )


@contextmanager
def _open_numpy_model(
    name: str, draft: str | None, fields: Mapping[str, Any], tiers: TierOptions
) -> Iterator[LoadedModel]:
    """Open a checkpoint in numpy, and its draft model. Raise InvalidConfig."""
    if draft is not None and not (isinstance(draft, str) and draft in EMBEDDED_CHECKPOINTS):
        raise InvalidConfig(
            "draft_model", f"{str(draft)[:64]!r} cannot draft for {name}", "Use tiny-draft"
        )
    max_num_seqs = fields.get("max_num_seqs")  # EngineConfig refuses what is no integer
    max_tokens = max(NUMPY_BATCHED_TOKENS, max_num_seqs if type(max_num_seqs) is int else 0)
    defaults = {"max_model_len": MAX_POSITIONS, "max_num_batched_tokens": max_tokens}
    config = EngineConfig(**{**defaults, **fields})
    if config.max_model_len > MAX_POSITIONS:
        raise InvalidConfig(
            "max_model_len",
            f"{config.max_model_len} is more than the {MAX_POSITIONS} positions of {name}",
            f"Give at most {MAX_POSITIONS}",
        )
    # numpy takes a tenth of a second to import, which `hash` does not need.
    from forge.models.llama import Llama
    from forge.models.llama_model import LlamaModel

    tokenizer = ByteTokenizer()
    draft_model = None
    if draft is not None:
        assert config.speculation is not None, "a draft model was named"
        num_blocks = config.speculation.num_blocks or config.num_blocks
        draft_decoder = Llama(embedded_folder(draft), num_blocks, config.block_size)
        draft_model = PagedModel(draft_decoder, eos_token=tokenizer.eos_token)
    decoder = Llama(embedded_folder(name), config.num_blocks, config.block_size)
    contents = f"{name} {_digest(embedded_folder(name))} float32"
    block_bytes = page_bytes(decoder.pages())
    with _open_host_memory(tiers, config, block_bytes, contents) as memory:
        model = LlamaModel(
            decoder,
            eos_token=tokenizer.eos_token,
            draft=draft_model,
            files=memory.moves,
            host_blocks=memory.blocks,
        )
        config = replace(config, cache_namespace=contents, host_tier=memory.tier)
        yield LoadedModel(name, model, tokenizer, config, disk_keys=memory.keys)


def _digest(folder: Path) -> str:
    """Return the digest of a checkpoint's shape and weights."""
    digest = blake2b(digest_size=16)
    for file in ("config.json", "model.safetensors"):
        digest.update((folder / file).read_bytes())
    return digest.hexdigest()


# The hash model.


@contextmanager
def _open_hash_model(
    name: str, draft: str | None, config: EngineConfig, tiers: TierOptions
) -> Iterator[LoadedModel]:
    """Open the hash model and its draft. Raise InvalidConfig."""
    options = _parse_hash_options(name.partition(":")[2])
    draft_model = None
    if draft is not None:
        kind, _, drafts = draft.partition(":") if isinstance(draft, str) else ("", "", "")
        if kind != "hash":
            raise InvalidConfig(
                "draft_model",
                f"{str(draft)[:64]!r} cannot draft for hash",
                "Use hash:agreement=0.6, say",
            )
        # Equal seeds: on `agreement` of contexts the draft's most likely token is the model's.
        draft_options = {
            "seed": options.get("seed", 0),
            **_parse_hash_options(drafts, "draft_model"),
        }
        draft_model = _create_hash_model(draft_options, config)
        costs = _hash_step_costs(options, draft_options)
        assert config.speculation is not None, "a draft model was named"
        config = replace(config, speculation=replace(config.speculation, costs=costs))
    # Its blocks hold token ids of four bytes.
    block_bytes = 4 * config.block_size
    with _open_host_memory(tiers, config, block_bytes, "token ids") as memory:
        model = _create_hash_model(options, config, draft_model, memory.moves, memory.blocks)
        namespace = f"hash seed={int(options.get('seed', 0))}"
        config = replace(config, cache_namespace=namespace, host_tier=memory.tier)
        yield LoadedModel(name, model, ByteTokenizer(), config, disk_keys=memory.keys)


def _parse_hash_options(text: str, field: str = "model") -> dict[str, int | float]:
    """Return `a=1,b=2` as a mapping. Raise InvalidConfig."""
    options: dict[str, int | float] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        kind = HASH_OPTIONS.get(key)
        if kind is None:
            known = ", ".join(HASH_OPTIONS)
            raise InvalidConfig(field, f"hash has no option {key[:64]!r}", f"Use one of: {known}")
        try:
            options[key] = kind(value)
        except ValueError:
            raise InvalidConfig(
                field, f"hash:{key}={value[:64]!r} is not a number", f"Give {key}=1, say"
            ) from None
    for key, low, high in (("seed", -(2**63), 2**63 - 1), ("step_ms", 0, 1e5), ("agreement", 0, 1)):
        if key in options and not low <= options[key] <= high:
            raise InvalidConfig(
                field, f"hash:{key}={options[key]} is out of range", f"Give {low} to {high}"
            )
    return options


def _hash_step_costs(
    options: Mapping[str, int | float], draft: Mapping[str, int | float]
) -> StepCosts | None:
    """Return the step costs, or None where a step takes no time: all draft lengths are equal."""
    step_ms, draft_ms = options.get("step_ms", 0.0), draft.get("step_ms", 0.0)
    if not step_ms:
        return None
    return StepCosts(((1, step_ms / 1000),), ((1, draft_ms / 1000),))


def _create_hash_model(
    options: Mapping[str, int | float],
    config: EngineConfig,
    draft: HashModel | None = None,
    files: FileMoves | None = None,
    host_blocks: HostBlocks | None = None,
) -> HashModel:
    tokenizer = ByteTokenizer()
    likely = [tokenizer.encode(chr(byte))[0] for byte in LETTERS]
    return HashModel(
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        seed=int(options.get("seed", 0)),
        likely_tokens=[*likely, *likely, *likely, tokenizer.eos_token],
        agreement=float(options.get("agreement", 1.0)),
        step_s=float(options.get("step_ms", 0.0)) / 1000,
        draft=draft,
        files=files,
        host_blocks=host_blocks,
    )
