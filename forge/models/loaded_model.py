"""LoadedModel: a model that is ready to serve, with its tokenizer and completed configuration."""

from __future__ import annotations

from typing import NamedTuple

from forge.config import EngineConfig
from forge.sampling_defaults import NO_SAMPLING_DEFAULTS, SamplingDefaults
from forge.seam import Model
from forge.tokenizer import Tokenizer


class LoadedModel(NamedTuple):
    """Model that is ready to serve.

    config              the caller's fields, and the model's for the others
    disk_keys           keys of files of blocks at the start, the least recently used first
    sampling_defaults   parameters of requests that leave them out
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    config: EngineConfig
    device: str = "cpu"
    disk_keys: tuple[bytes, ...] = ()
    sampling_defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS
