"""Weights: a checkpoint on a device, ready to be given a cache.

Owns the value that stands between loading and serving, and nothing else.

    checkpoint ─► module ─► Weights ─► blocks that fit ─► HFModel
"""

from __future__ import annotations

from typing import NamedTuple

from forge.models.hf.attention.interface import LayerSpec
from forge.models.hf.decoders.interface import Decoder
from forge.models.hf.kv_cache import KVCacheSpec
from forge.models.hf.loading.checkpoint import Checkpoint


class LoadedDecoder(NamedTuple):
    """A checkpoint on a device.

    kv_cache_spec   of the pages
    use_graphs      its steps can be recorded, and are to be
    """

    checkpoint: Checkpoint
    decoder: Decoder
    layers: list[LayerSpec]
    kv_cache_spec: KVCacheSpec
    use_graphs: bool
