"""Write the model folders that the peers' tests are served: real tokenizers, made-up weights.

    qwen.tiktoken   of the package dashscope         ─┐                       ┌─ qwen
    tokenizer.model of the package mistral-common    ─┼─► write_model_folder ─┤  qwen-thinking
    weights drawn here from a seed                   ─┘                       ├─ mistral
                                                                              └─ mistral-tools

Owns the folders' content. The ids and counts of tokens are those of the real models, so that tests
which assert them hold. The weights are those of a Llama of one layer whose likeliest tokens are
whole ASCII words. In a structure it tends to close what it has opened, so that JSON ends.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of their ids, which follow the last of the vocabulary.
QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
# The template begins the reasoning: made-up weights would rarely do so.
OPENED_REASONING = r"{%- else %}{{- '<think>\n' }}"
# Name of a folder -> file of the tokenizer, where it is not Qwen's, and chat template. Mistral 7B
# and Zephyr have the first file, Mistral Instruct v0.3, which has tools, the second.
MODELS = {
    "qwen": ("", "chatml.jinja"),
    "qwen-thinking": ("", "chatml.jinja"),
    "mistral": ("tokenizer.model.v1", "zephyr.jinja"),
    "mistral-tools": ("mistral_instruct_tokenizer_240323.model.v3", "mistral.jinja"),
}
HIDDEN_SIZE = 64
MAX_MODEL_LEN = 32768


class Likelihood(NamedTuple):
    """How much likelier than other words a token is, in logits."""

    token: str
    logits: float


# The logits of words have a standard deviation of 4, so that the largest of 20,000 is about 16: one
# of these tokens is the likeliest in about every fifth context, and a structure soon ends. Greedy
# texts repeat themselves after some 20 tokens, so a quotation mark is the likeliest in every tenth
# context. After it a bracket is likelier than a comma, after which a schema might allow more keys.
CLOSING = (
    Likelihood('"', 13.0),
    *(Likelihood(token, 8.0) for token in ('"}', '"]')),
    *(Likelihood(token, 9.0) for token in ("}", "]", "}}", "]}")),
    Likelihood("</tool_call>", 6.0),
)
# Not in a text, where all words are likelier. Where no word may stand a line ends before a digit.
LINE_END = tuple(Likelihood(token, -60.0) for token in ("Ċ", "<0x0A>"))
# About one token in a hundred ends an answer: without it, one without a limit fills the context.
END_LOGITS = 8.5
REASONING_END = (Likelihood("</think>", 12.0),)


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of Qwen 2 to 3, without its chat template."""
    ranks = files("dashscope") / "resources" / "qwen.tiktoken"
    fast: Tokenizer = TikTokenConverter(vocab_file=str(ranks), pattern=QWEN_PATTERN).converted()
    fast.normalizer = normalizers.NFC()
    fast.add_special_tokens([AddedToken(each, normalized=False) for each in QWEN_SPECIAL])
    fast.add_tokens([AddedToken(each, normalized=False) for each in QWEN_ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def mistral_tokenizer(file: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of Mistral in a file of mistral-common, without its chat template."""
    model = files("mistral_common") / "data" / file
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.model").write_bytes(model.read_bytes())
        return LlamaTokenizer.from_pretrained(folder, legacy=True)


def draw_weights(
    tokenizer: PreTrainedTokenizerFast, likely: tuple[Likelihood, ...]
) -> LlamaForCausalLM:
    """Return a Llama of one layer whose likeliest tokens are whole ASCII words.

    The first channel of the hidden state is constant, so that the first column of the output layer
    is a bias: no layer writes to that channel.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.normal_(std=0.5)
            part.weight[0] = 0.0
        model.model.embed_tokens.weight.normal_(std=1.0)
        model.model.embed_tokens.weight[:, 0] = HIDDEN_SIZE**0.5
        model.lm_head.weight.normal_(std=4 * HIDDEN_SIZE**-0.5)
        model.lm_head.weight[:, 0] = output_bias(tokenizer, likely) / HIDDEN_SIZE**0.5
    return model


def output_bias(tokenizer: PreTrainedTokenizerFast, likely: tuple[Likelihood, ...]) -> torch.Tensor:
    """Return what is added to the logits, by id."""
    bias = torch.full((len(tokenizer),), -100.0)
    for name, token_id in tokenizer.get_vocab().items():
        word = name.lstrip("Ġ▁")
        if word.isascii() and word.isalpha() and len(word) > 2:
            bias[token_id] = 0.0
    for each in likely:
        token_id = tokenizer.convert_tokens_to_ids(each.token)
        if token_id is not None and token_id != tokenizer.unk_token_id:
            bias[token_id] = each.logits
    return bias


def write_model_folder(name: str, folder: Path) -> None:
    """Write the model of this name of MODELS."""
    tokenizer_file, template = MODELS[name]
    tokenizer = mistral_tokenizer(tokenizer_file) if tokenizer_file else qwen_tokenizer()
    likely = (*CLOSING, *LINE_END, Likelihood(tokenizer.eos_token, END_LOGITS))
    if name == "qwen-thinking":
        likely += REASONING_END
    text = (Path(__file__).parent / template).read_text("utf-8")
    if name == "qwen-thinking":
        text = text.replace("{#- opening -#}", OPENED_REASONING)
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder)
    draw_weights(tokenizer, likely).save_pretrained(folder)
    # Written last, so that a folder that was cut short is written again.
    (folder / "complete.json").write_text(json.dumps(source_sha256()), "utf-8")


def source_sha256() -> str:
    """Return the hash of what the folders are made from: this file and the templates."""
    parts = [Path(__file__), *sorted(Path(__file__).parent.glob("*.jinja"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def model_folder(name: str, folders: Path) -> Path:
    """Return the folder of the model, which is written the first time and after a change."""
    folder = folders / name
    complete = folder / "complete.json"
    if not complete.is_file() or json.loads(complete.read_text("utf-8")) != source_sha256():
        shutil.rmtree(folder, ignore_errors=True)
        write_model_folder(name, folder)
    return folder


def main() -> None:
    """Write the models that are missing in the folder of the first argument."""
    for name in MODELS:
        model_folder(name, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
