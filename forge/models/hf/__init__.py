"""Hugging Face models as forge.seam.Model: plain torch on a CPU, Triton and FlashInfer on a GPU.

    loading              a start: checkpoint, weights, blocks, graphs; a model with its draft
    model                HFModel: the four methods of forge.seam
    step                 HFStep: a step in flight, and its outputs
    runner               a step: inputs, hidden states, logits, samples; CUDA graphs; verification
    speculation          drafts on the device, rejection's inputs, acceptance on the host
    sampling             forge.sampling on the device
    decoders             any model through its own modules, compiled, or fused by hand
    attention            paged attention: plain torch, Triton, FlashInfer
    ops                  the other operations of a layer: plain torch, Triton
    transformers_cache   the paged KV cache under transformers' own generate()

Each imports only from those below it, and all from kv_cache, buffers and progress.
Always true: no other part of forge imports torch.
"""

import torch  # noqa: F401  first: an error about missing packages names the one that matters most

from forge.models.hf.loading.draft_pair import open_pair
from forge.models.hf.loading.model_loader import open_model
from forge.models.hf.model import HFModel
from forge.models.hf.transformers_cache import PagedCache

__all__ = ["HFModel", "PagedCache", "open_model", "open_pair"]
