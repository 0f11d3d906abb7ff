"""A model that is ready to serve, with its tokenizer and the completed engine configuration."""

from __future__ import annotations

from typing import NamedTuple

from forge.config import EngineConfig
from forge.seam import Model
from forge.tokenizer import Tokenizer


class LoadedModel(NamedTuple):
    """A model ready to serve. `config` is what the caller gave, completed."""

    name: str
    model: Model
    tokenizer: Tokenizer
    config: EngineConfig
    device: str = "cpu"
