"""Small random checkpoints of eight model families, for tests of the Hugging Face model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

SMALL = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL, attention_bias=True),
    "qwen2": lambda: hf.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=32),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=20),
    "phi3": lambda: hf.Phi3Config(**SMALL),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=307,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "olmo2": lambda: hf.Olmo2Config(**SMALL),
    "gemma2": lambda: hf.Gemma2Config(
        **SMALL, head_dim=32, query_pre_attn_scalar=32, sliding_window=20
    ),
}
"""Configurations: grouped heads, biases, tied heads, head norms, windows, partial fusions."""

FAMILIES = tuple(CONFIGS)


def create_module(family: str, dtype: torch.dtype, attention: str = "eager", seed: int = 0) -> Any:
    """Return a ...ForCausalLM with random weights, large enough that contexts matter."""
    return create_module_from_config(CONFIGS[family](), dtype, attention, seed)


def create_module_from_config(
    config: Any, dtype: torch.dtype, attention: str = "eager", seed: int = 0
) -> Any:
    """Return such a module of any configuration, which is not changed."""
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            # transformers initializes so close to zero that every context gives the same logits.
            spread = 0.15 if tensor.dim() > 1 else 0.1
            noise = torch.randn(tensor.shape) * spread
            tensor.copy_(noise if tensor.dim() > 1 or "bias" in name else tensor + noise)
    return module.to(dtype).eval()


def generate_greedy(module: Any, prompt: list[int], count: int) -> list[int]:
    """Return `count` greedy tokens after the prompt, by transformers' own generate()."""
    with torch.inference_mode():
        ids = module.generate(
            torch.tensor([prompt], device=module.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=module.device),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(map(int, ids[0, len(prompt) :]))


def is_greedy(module: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Return whether each token is the most likely one after those before it.

    One forward of the module. generate_greedy has one for each token.
    """
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    return tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
