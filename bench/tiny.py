"""The embedded pair, `tiny` and `tiny-draft`: its text, its files and its measures.

Owns the text and which of it is held out, the format of a checkpoint, and the measures. Knows
nothing of training or serving. torch and transformers are imported on use.

    standard library ─► file by file ─┬─► the rest     what forge.bench.train_tiny trains on
                                      └─► held out     by a hash of the file's name
    bits per byte of a model          share of contexts at which draft and target agree

A token is a byte, and 0 ends a file: the ids are those of forge.tokenizer.ByteTokenizer. Every
Python has the text; versions differ a little, so the log has its digest.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge.bench.result_file import write_json

ROLES = ("target", "draft")
FOLDERS = {"target": "tiny", "draft": "tiny_draft"}

EXCLUDED_FOLDERS = frozenset(
    {
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo"),
        *("encodings", "pydoc_data"),  # tables
    }
)
"""Folders of the library that are not read."""

GENERATED_PREFIXES = ("_sysconfigdata", "config-")
"""Prefixes of files and folders that depend on how Python was built on one machine."""

HOLDOUT_BELOW = 13
"""A file is held out if the first byte of its name's SHA-256 is below this: one in twenty."""

END = "<|end|>"
VOCAB = 257
MAX_POSITIONS = 1024
"""Positions of both models, and of the last stage of training."""

WINDOW = 512
"""Tokens of a window of held-out text."""

SAMPLE_FILES, SAMPLE_TOKENS = 6, 256
"""The small measure: the beginnings of some held-out files. It is quick to repeat."""

TEMPLATE = """\
{%- for tool in tools or [] %}{{ 'function: ' + (tool.function | tojson) + '\\n' }}{% endfor -%}
{%- for message in messages -%}
{%- if not loop.first %}{{ '\\n' }}{% endif -%}
{{- message.role + ': ' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\ncall: ' + (dict({'id': call.id}, **call.function) | tojson) -}}
{%- endfor -%}
{%- endfor -%}
{{- '\\nassistant:' if add_generation_prompt else '\\n' -}}
{#- An answer calls tools like this:
<tool_call>
{"name": ..., "arguments": ...}
</tool_call>
-#}
"""
"""A chat template in lines, as forge.tokenizer.PLAIN_TEMPLATE is."""


class SourceText(NamedTuple):
    """A file of the library. `name` is its path in the library, with slashes."""

    name: str
    data: bytes

    @property
    def is_holdout(self) -> bool:
        """True where no model is trained on it. The name alone decides, so every Python agrees."""
        return hashlib.sha256(self.name.encode()).digest()[0] < HOLDOUT_BELOW


def describe_corpus(texts: Sequence[SourceText]) -> dict[str, Any]:
    """Return the counts and the digest of the files, and which of them are held out."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.name.encode() + b"\0" + text.data + b"\0")
    holdout = [text for text in texts if text.is_holdout]
    return {
        "source": "standard library of Python",
        "files": len(texts),
        "bytes": sum(len(text.data) for text in texts),
        "sha256": digest.hexdigest(),
        "held_out_rule": f"first byte of the SHA-256 of the file's name below {HOLDOUT_BELOW}",
        "held_out_bytes": sum(len(text.data) for text in holdout),
        "held_out_files": [text.name for text in holdout],
    }


# Text.


def read_library(root: Path | None = None) -> list[SourceText]:
    """Return the source files of the library that are UTF-8, sorted by name.

    root   folder of another Python's library; None: this one's
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if EXCLUDED_FOLDERS.isdisjoint(name.parts) and not name.parts[0].startswith(
            GENERATED_PREFIXES
        ):
            data = path.read_bytes()
            try:
                data.decode()
            except UnicodeDecodeError:
                continue
            texts.append(SourceText(name.as_posix(), data))
    return sorted(texts)


def encode(texts: Sequence[SourceText]) -> Any:
    """Return [tokens] int16: each file with an end token before and after it."""
    import torch

    joined = bytearray()
    ends = [0]
    for text in texts:
        joined += b"\0" + text.data
        ends.append(len(joined))
    ids = torch.frombuffer(joined + b"\0", dtype=torch.uint8).to(torch.int16) + 1
    ids[torch.tensor(ends)] = 0
    return ids


def choose_sample(texts: Sequence[SourceText]) -> list[SourceText]:
    """Return the beginnings of long held-out files, those with the lowest hashes."""
    long = [text for text in texts if text.is_holdout and len(text.data) >= SAMPLE_TOKENS]
    first = sorted(long, key=lambda text: hashlib.sha256(text.name.encode()).digest())
    return [SourceText(each.name, each.data[:SAMPLE_TOKENS]) for each in first[:SAMPLE_FILES]]


# Models.


def build_tokenizer_json() -> dict[str, Any]:
    """Return a tokenizer.json: the end token is 0, byte b is b + 1, no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from forge.models.hf.tokenizer import BYTE_BY_CHARACTER

    names = sorted(BYTE_BY_CHARACTER, key=BYTE_BY_CHARACTER.__getitem__)
    vocab = {END: 0} | {name: 1 + byte for byte, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return dict(json.loads(tokenizer.to_str()))


def save_checkpoint(module: Any, folder: Path) -> None:
    """Write a complete checkpoint of the module in float16 to the folder."""
    import torch

    from forge.models.hf.progress import silence_transformers

    with silence_transformers():
        copy.deepcopy(module).to(torch.float16).save_pretrained(folder)
    ends = {"bos_token": END, "eos_token": END, "pad_token": END}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ends,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    write_json(str(folder / "tokenizer.json"), build_tokenizer_json())
    write_json(str(folder / "tokenizer_config.json"), tokenizer_config)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read


def load_checkpoint(folder: Path) -> Any:
    """Return the saved module, which computes in float32."""
    import torch
    import transformers

    from forge.models.hf.progress import silence_transformers

    with silence_transformers():
        module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    return module.eval()


# Measures.


def split_windows(ids: Any, limit: int | None = None) -> Any:
    """Return [windows, WINDOW + 1]: the text in windows, or `limit` windows spread over it."""
    import torch

    count = (len(ids) - 1) // WINDOW
    indices = range(count) if limit is None else [i * count // limit for i in range(limit)]
    return torch.stack([ids[i * WINDOW : (i + 1) * WINDOW + 1] for i in indices]).long()


def bits_per_byte(module: Any, windows: Any) -> float:
    """Return the mean bits of a token given those before it in its window.

    An end counts as a byte.
    """
    import torch

    total = 0.0
    with torch.inference_mode():
        for part in windows.split(8):
            total += float(cross_entropy(module(part[:, :-1]).logits, part[:, 1:]) * len(part))
    return total / len(windows) / math.log(2)


def agreement(target: Any, draft: Any, windows: Any) -> dict[str, float]:
    """Return the share of contexts at which a draft token would be accepted.

    greedy    the most likely tokens are equal
    sampled   the mean of sum(min(p, q)): the acceptance of rejection sampling at temperature 1
    """
    import torch

    same = overlap = 0.0
    with torch.inference_mode():
        for part in windows.split(8):
            p, q = (module(part[:, :-1]).logits.softmax(-1) for module in (target, draft))
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            overlap += float(torch.minimum(p, q).sum())
    contexts = len(windows) * WINDOW
    return {"greedy": round(same / contexts, 4), "sampled": round(overlap / contexts, 4)}


def sample_bits(module: Any, sample: Sequence[SourceText]) -> dict[str, dict[str, Any]]:
    """Return bits per byte of each text of the sample, without its first byte, and its digest."""
    import torch

    found = {}
    for text in sample:
        ids = torch.tensor([[byte + 1 for byte in text.data]])
        with torch.inference_mode():
            nats = float(cross_entropy(module(ids[:, :-1]).logits, ids[:, 1:]))
        digest = hashlib.sha256(text.data).hexdigest()[:16]
        found[text.name] = {"sha256": digest, "bits": round(nats / math.log(2), 4)}
    return found


def cross_entropy(logits: Any, tokens: Any) -> Any:
    """Return the mean nats of the tokens under logits of the same positions."""
    from torch.nn import functional

    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
