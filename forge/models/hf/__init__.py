"""HuggingFace models behind the seam: plain torch on a CPU, our kernels and FlashInfer on a GPU.

    open        a start: checkpoint, weights, blocks, graphs          checkpoint, tokenizer, memory
    pair        the same for a model with its draft                   open, fitted
    model       the seam's four methods                               batch, step
    device      a step: inputs, hidden states, logits, draw           staging, pool, graphs
    decoder     any model through transformers' modules               attention, cuda_attention
    fused       a Llama-like model by hand                            arithmetic, kernels,
                                                                      decode_attention
    cache       our pages under transformers' own generate()
    sampler     forge.sampling on the device                          asked, draw, ranks, seen
    verify      rows with drafts: what is asked of the device         proposals, trials
    verdict     and what follows, on the host                         forge.acceptance

The only part of forge that imports torch.
"""

from forge.models.hf.loading.draft_pair import open_pair
from forge.models.hf.loading.model_loader import open_model
from forge.models.hf.model import HFModel
from forge.models.hf.transformers_cache import PagedCache

__all__ = ["HFModel", "PagedCache", "open_model", "open_pair"]
