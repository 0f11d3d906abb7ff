"""Weights: a checkpoint on a device, ready to be given a cache.

Owns the value that stands between loading and serving, and nothing else.

    checkpoint ─► module ─► Weights ─► blocks that fit ─► HFModel
"""

from __future__ import annotations

from typing import NamedTuple

from forge.models.hf.attention import LayerSpec
from forge.models.hf.checkpoint import Checkpoint
from forge.models.hf.decoder import Decoder
from forge.models.hf.pool import KVShape


class Weights(NamedTuple):
    """A checkpoint on a device.

    shape      of the pages
    recorded   its steps can be recorded, and are to be
    """

    checkpoint: Checkpoint
    decoder: Decoder
    layers: list[LayerSpec]
    shape: KVShape
    recorded: bool
