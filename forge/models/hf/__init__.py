"""HuggingFace models behind the seam: plain torch on a CPU, our kernels and FlashInfer on a GPU.

    open        a start: checkpoint, weights, blocks, graphs          checkpoint, tokenizer, memory
    model       the seam's four methods                               batch, step
    device      a step: inputs, hidden states, logits, draw           staging, pool, graphs
    decoder     any model through transformers' modules               attention, cuda_attention
    fused       a Llama-like model by hand                            arithmetic, kernels,
                                                                      decode_attention
    cache       our pages under transformers' own generate()
    sampler     forge.sampling on the device                          draw, ranks, seen, upload

The only part of forge that imports torch.
"""

from forge.models.hf.cache import PagedCache
from forge.models.hf.model import HFModel
from forge.models.hf.open import open_model

__all__ = ["HFModel", "PagedCache", "open_model"]
