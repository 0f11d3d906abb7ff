"""LoadedModel: a model that is ready to serve, with its tokenizer and completed configuration."""

from __future__ import annotations

from typing import NamedTuple

from forge.config import EngineConfig
from forge.seam import Model
from forge.tokenizer import Tokenizer


class LoadedModel(NamedTuple):
    """Model that is ready to serve.

    config      the caller's fields, and the model's for the others
    disk_keys   keys of files of blocks at the start, the least recently used first
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    config: EngineConfig
    device: str = "cpu"
    disk_keys: tuple[bytes, ...] = ()
