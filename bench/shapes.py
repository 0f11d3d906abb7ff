"""Folders that describe a model of a known shape and hold no weights.

Owns the sizes, and a stand-in tokenizer of the right size. Knows no engine: forge and its peers
open the folder and draw random weights. The tokenizer is a byte-level BPE, as those of the models
are. So servers can read and write text, and a grammar can constrain it.

    write_shape("qwen3-4b", root) ─► root/qwen3-4b/config.json
                                                  /tokenizer.json  tokenizer_config.json

    python -m forge.bench.shapes models qwen3-4b    the same, for a server to open
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, InvalidConfig

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "dtype": "bfloat16",
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "dtype": "bfloat16",
    },
    "tiny-qwen3": {
        **_QWEN3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    },
}

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def model_folder(model: str, root: str | Path) -> str:
    """Return the folder of a shape, written under `root`, or the name of any other model."""
    return str(write_shape(model, root)) if model in SHAPES else model


def has_no_weights(model: str) -> bool:
    """Return True for a folder without weights: an engine has to draw random ones."""
    return Path(model).is_dir() and not any(Path(model).glob("*.safetensors"))


def kv_bytes_per_token(model: str) -> int | None:
    """Return the bytes of a position's keys and values, or None where no config.json says them.

    model   a shape, or the folder of a checkpoint
    """
    config = SHAPES.get(model)
    if config is None:
        file = Path(model) / "config.json"
        if not file.is_file():
            return None
        config = json.loads(file.read_text())
    try:
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        values = config["num_hidden_layers"] * config.get("num_key_value_heads", num_heads)
        dtype = config.get("dtype") or config["torch_dtype"]
        return int(2 * values * head_dim * DTYPE_BYTES[dtype])
    except KeyError:
        return None


def write_shape(shape: str, root: str | Path) -> Path:
    """Write the folder root/shape, which describes the model. Raises InvalidConfig."""
    if shape not in SHAPES:
        raise InvalidConfig("model", f"there is no shape {shape!r}", f"Use {', '.join(SHAPES)}")
    return write_config(Path(root) / shape, SHAPES[shape])


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a folder that describes a model of this configuration, and return it.

    config   fields of config.json, as in SHAPES
    """
    folder.mkdir(parents=True, exist_ok=True)
    common_fields = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    (folder / "config.json").write_text(json.dumps({**config, **common_fields}, indent=2) + "\n")
    _write_tokenizer(folder, config)
    return folder


_WORD_STARTS = [" ", *map(chr, range(33, 127))]
_WORD_PARTS = "abcdefghijklmnopqrstuvwxyz" * 4 + "0123456789" + '"{}[]():;,._-'
_MAX_WORD_CHARS = 12


def draw_words(count: int) -> list[str]:
    """Return `count` different words of 2 to 12 characters. Each is an earlier word and one more.

    The words are always the same. Their lengths and common beginnings are like those of a trained
    vocabulary, on which the cost of a grammar's masks depends.
    """
    rng = random.Random("words")
    words = list(_WORD_STARTS)
    known = set(words)
    while len(words) < len(_WORD_STARTS) + count:
        word = rng.choice(words) + rng.choice(_WORD_PARTS)
        if len(word) <= _MAX_WORD_CHARS and word not in known:
            known.add(word)
            words.append(word)
    return words[len(_WORD_STARTS) :]


def _write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special_ids = {"<|begin|>": config["bos_token_id"], "<|end|>": config["eos_token_id"]}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_words = config["vocab_size"] - len(alphabet) - len(special_ids)
    # A byte-level vocabulary writes the space as this letter.
    words = [word.replace(" ", "Ġ") for word in draw_words(num_words)]
    free_ids = (i for i in range(config["vocab_size"]) if i not in special_ids.values())
    vocabulary = dict(zip([*alphabet, *words], free_ids, strict=True)) | special_ids
    merges = [(word[:-1], word[-1]) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_ids))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def run_cli(words: list[str]) -> int:
    """Write the folders of the named shapes under a root, the first word.

    Returns the exit status.
    """
    if len(words) < 2:
        print("usage: python -m forge.bench.shapes ROOT SHAPE...", file=sys.stderr)
        return 2
    root, *shapes = words
    try:
        for shape in shapes:
            print(write_shape(shape, root))
    except (ForgeError, OSError) as error:
        print(f"forge.bench.shapes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(sys.argv[1:]))
