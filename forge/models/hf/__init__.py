"""Hugging Face models as forge.seam.Model: plain torch on a CPU, Triton and FlashInfer on a GPU.

    loading              a start: checkpoint, weights, blocks, graphs; a model with its draft
    parallel             parts of a model on several devices, and sums over them
    model                HFModel: the four methods of forge.seam
    block_moves          stores and loads on streams of their own, spills and fetches
    host_pool            blocks in pinned host memory
    step                 HFStep: a step in flight, and its outputs
    runner               a step: inputs, hidden states, logits, samples; CUDA graphs; verification
    speculation          drafts on the device, rejection's inputs, acceptance on the host
    sampling             forge.sampling on the device
    decoders             any model through its own modules, compiled, or fused by hand
    attention            paged attention: plain torch, Triton, FlashInfer
    ops                  the other operations of a layer: plain torch, Triton
    transformers_cache   the paged KV cache under transformers' own generate()
    kv_cache_pool        blocks that several of those caches share

Each imports only from those below it, and all from kv_cache, buffers and progress.
Always true: no other part of forge imports torch.
"""

import torch  # noqa: F401  first: an error about missing packages names the one that matters most

from forge.models.hf.kv_cache_pool import KVCachePool
from forge.models.hf.loading.draft_pair import open_pair
from forge.models.hf.loading.kv_tiers import create_tier_setup
from forge.models.hf.loading.model_loader import open_model
from forge.models.hf.model import HFModel
from forge.models.hf.transformers_cache import PagedCache, PooledCache

__all__ = [
    "HFModel",
    "KVCachePool",
    "PagedCache",
    "PooledCache",
    "create_tier_setup",
    "open_model",
    "open_pair",
]
