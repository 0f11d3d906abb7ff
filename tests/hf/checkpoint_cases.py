"""Checkpoints that a case describes: names, ties, files and end tokens as published ones have them.

Case ─► write_weights ─► folder ─► reference of transformers ─► write_ends ─► complete folder
"""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers
from torch import Tensor

from tests.hf.families import SMALL, create_module_from_config

TINY = {**SMALL, "num_hidden_layers": 2, "eos_token_id": None, "max_position_embeddings": 128}
PREFIX = "model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NUM_TOKENS = 8
PROMPT = [5, 9, 31, 77, 8]

CONFIGS: dict[str, Any] = {
    "llama": lambda ties: hf.LlamaConfig(**TINY, tie_word_embeddings=ties),
    "qwen2": lambda ties: hf.Qwen2Config(**TINY, tie_word_embeddings=ties),
    "phi3": lambda ties: hf.Phi3Config(**TINY, tie_word_embeddings=ties),
    "gemma2": lambda ties: hf.Gemma2Config(
        **TINY, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=ties
    ),
    "olmo2": lambda ties: hf.Olmo2Config(**TINY, tie_word_embeddings=ties),
    "qwen3_moe": lambda ties: hf.Qwen3MoeConfig(
        **TINY,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        tie_word_embeddings=ties,
    ),
    "granite_hybrid": lambda ties: hf.GraniteMoeHybridConfig(
        **TINY,
        shared_intermediate_size=96,
        layer_types=["attention"] * 2,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        tie_word_embeddings=ties,
    ),
}
DIVISIBLE = ("llama", "qwen2", "phi3", "gemma2")

EXTRAS: dict[str, tuple[str, str | None]] = {
    "none": ("", None),
    "inv_freq": ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
    "mtp": ("mtp.layers.0.self_attn.q_proj.weight", None),
    "vision tower": ("vision_tower.blocks.0.weight", None),
    "bias": ("model.layers.1.mlp.up_proj.bias", "does not use"),
    "layer": ("model.layers.2.input_layernorm.weight", "does not use"),
    "scale": ("model.layers.0.self_attn.o_proj.weight_scale", "quantised"),
}
"""Name of a further tensor, and words of its refusal."""

REMOVED = {
    "none": "",
    "norm": "model.norm.weight",
    "projection": "model.layers.1.self_attn.o_proj.weight",
}
"""Name of a tensor that the files lack."""

Ends = tuple[int | None, int | None, int | None]
"""What config.json, generation_config.json and the tokenizer name, as indices of greedy tokens."""


class Case(NamedTuple):
    """A checkpoint.

    ties      of config.json
    head      what the files have of embedding and head: "embedding", "equal", "different", "head"
    extra     key of EXTRAS
    removed   key of REMOVED
    prefix    whether names begin with the base model's prefix
    layout    "one file", "two files", "no metadata" or "stale copy"
    dtype     of the files: "float32", "bfloat16", "mixed" or "float8"
    """

    family: str
    ties: bool
    head: str
    extra: str
    removed: str
    prefix: bool
    layout: str
    dtype: str
    ends: Ends


FIELDS: dict[str, tuple[Any, ...]] = {
    "family": tuple(CONFIGS),
    "ties": (True, False),
    "head": ("embedding", "equal", "different", "head"),
    "extra": tuple(EXTRAS),
    "removed": tuple(REMOVED),
    "prefix": (True, False),
    "layout": ("one file", "two files", "no metadata", "stale copy"),
    "dtype": ("float32", "bfloat16", "mixed", "float8"),
    "ends": (
        *((None, None, 3), (3, None, None), (None, 3, None), (5, 5, 3), (5, 3, None), (3, 5, 6)),
        *((9999, None, 4), (None, None, None)),
    ),
}
PLAIN = Case("llama", True, "embedding", "none", "none", True, "one file", "float32", (3, None, 5))


def whole_matrix() -> list[Case]:
    """Return ties and heads with every value of every other field, and ends with every family.

    A field that refuses a checkpoint stands alone, so that most are served. Families alternate.
    """
    families = itertools.cycle(FIELDS["family"])
    all_ends = itertools.cycle(FIELDS["ends"][:-1])
    others = [
        {field: value}
        for field in ("extra", "removed", "layout", "dtype")
        for value in FIELDS[field]
        if value != getattr(PLAIN, field)
    ]
    cases = [
        PLAIN._replace(
            family=next(families), ties=ties, head=head, prefix=prefix, ends=next(all_ends), **other
        )
        for ties, head, prefix in itertools.product(
            FIELDS["ties"], FIELDS["head"], FIELDS["prefix"]
        )
        for other in [{}, *others]
    ]
    cases += [
        PLAIN._replace(family=family, ends=ends)
        for family, ends in itertools.product(FIELDS["family"], FIELDS["ends"])
    ]
    return list(dict.fromkeys(cases))


def sample_cases(count: int, seed: int) -> list[Case]:
    """Return cases of the whole matrix."""
    return random.Random(seed).sample(whole_matrix(), count)


@cache
def saved_tensors(family: str, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a family, under the names that transformers saves them."""
    create_module_from_config(CONFIGS[family](False), torch.float32).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_weights(case: Case, folder: Path, cache_folder: Path) -> None:
    """Write config.json and the safetensors files of the case."""
    tensors = dict(saved_tensors(case.family, cache_folder / case.family))
    generator = torch.Generator().manual_seed(1)
    if case.head == "embedding":
        del tensors[HEAD]
    elif case.head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    elif case.head == "head":
        del tensors[EMBEDDING]
    if case.dtype == "bfloat16":
        tensors = {name: each.bfloat16() for name, each in tensors.items()}
    elif case.dtype == "mixed":
        tensors = {
            name: each.half() if index % 2 and each.dim() > 1 else each
            for index, (name, each) in enumerate(tensors.items())
        }
        if case.head == "equal":
            tensors[HEAD] = tensors[EMBEDDING].clone()
    elif case.dtype == "float8":
        name = "model.layers.0.self_attn.o_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    extra, _ = EXTRAS[case.extra]
    if extra:
        tensors[extra] = torch.randn(16, generator=generator)
    if case.removed != "none":
        del tensors[REMOVED[case.removed]]
    if not case.prefix:
        tensors = {name.removeprefix(PREFIX): each for name, each in tensors.items()}
    folder.mkdir(exist_ok=True)
    config = CONFIGS[case.family](case.ties)
    config.architectures = [type(hf.AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(folder)
    # transformers leaves out what is its default, and the default is what a case may need.
    change_json(folder / "config.json", tie_word_embeddings=case.ties)
    _write_files(case.layout, tensors, folder)


def _write_files(layout: str, tensors: dict[str, Tensor], folder: Path) -> None:
    if layout == "one file":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [names[::2], names[1::2]]
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    for file, part in zip(files, parts, strict=True):
        content = {name: tensors[name] for name in part}
        if layout == "stale copy" and file == files[1]:
            content[names[0]] = torch.zeros_like(tensors[names[0]])
        save_file(content, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_metadata(folder: Path) -> None:
    """Write the index as some converters do, which transformers cannot load."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"]}))


def change_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))


def load_reference(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the module that transformers loads in float32, and its report.

    Eager attention: sdpa has no soft caps, and transformers 5.17 chooses it for Gemma 2 too.
    """
    module, report = hf.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return module.eval(), report


def greedy_tokens(module: Any) -> tuple[list[int], list[float]]:
    """Return the greedy continuation of PROMPT, and the log probability of each of its tokens."""
    ids, logprobs = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            row = module(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(PROMPT) :], logprobs


def write_ends(case: Case, greedy: list[int], folder: Path) -> set[int]:
    """Write what the three files name as ends, and return the tokens."""
    named = [each if each is None or each >= len(greedy) else greedy[each] for each in case.ends]
    in_config, in_generation, in_tokenizer = named
    change_json(folder / "config.json", eos_token_id=in_config)
    if in_generation is not None:
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [in_generation]})
        )
    vocabulary = {f"t{index}": index for index in range(TINY["vocab_size"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, "t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    end = None if in_tokenizer is None else f"t{in_tokenizer}"
    hf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end).save_pretrained(folder)
    return {each for each in named if each is not None}
