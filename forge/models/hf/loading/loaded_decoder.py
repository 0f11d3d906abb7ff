"""LoadedDecoder: a checkpoint's weights on a device, before it has a KV cache.

Owns the value between loading and serving, and nothing else.

    checkpoint ─► module ─► LoadedDecoder ─► blocks that fit ─► HFModel
"""

from __future__ import annotations

from typing import NamedTuple

from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.decoders.interface import Decoder
from forge.models.hf.kv_cache import KVCacheSpec
from forge.models.hf.loading.checkpoint import CheckpointSummary
from forge.models.hf.loading.kernel_selection import PrefillKernels
from forge.models.hf.weights import ModelWeights


class LoadedDecoder(NamedTuple):
    """Decoder of a checkpoint, with its weights on a device.

    layers          arguments of each layer's attention
    kv_cache_spec   shape of one position in the KV cache
    layer_weights   parameters of a layer, on average
    use_graphs      whether its steps are captured as CUDA graphs
    prefill         kernels of rows with more than one token
    weights         its parameters, which an update changes in place
    """

    checkpoint: CheckpointSummary
    decoder: Decoder
    layers: list[LayerSpec]
    kv_cache_spec: KVCacheSpec
    layer_weights: int
    use_graphs: bool
    prefill: PrefillKernels
    weights: ModelWeights
