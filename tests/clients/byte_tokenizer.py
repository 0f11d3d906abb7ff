"""Forge's byte tokenizer as a folder for transformers: byte b is the token b + 1, the end is 0.

For clients that count or make tokens themselves. Needs transformers.
"""

from __future__ import annotations

from pathlib import Path

from expected import END, ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer, and check that it encodes and decodes as the server does."""
    # GPT-2's names of the bytes: themselves where printable, letters from 256 on elsewhere.
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in seen]
    names = [chr(byte if byte in seen else 256 + hidden.index(byte)) for byte in range(256)]
    vocab = {"<|end|>": END} | {name: byte + 1 for byte, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    every = "".join(map(chr, range(0x180)))
    assert fast(every, add_special_tokens=False).input_ids == ids(every)
    assert fast.decode(ids(every)) == every
    fast.save_pretrained(folder)
