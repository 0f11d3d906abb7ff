"""forge: an LLM serving engine whose policy is proved on a laptop and drives the GPU unchanged.

Importing it loads nothing else of forge: a public name is imported where it is first read. So a
process that needs one module, such as the compiler of grammars, does not import the engine too. No
public name needs torch or a web framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from forge.version import VERSION

if TYPE_CHECKING:
    from forge.async_llm import AsyncLLM
    from forge.blocks import BlockPool
    from forge.config import EngineConfig
    from forge.engine import Engine
    from forge.errors import ForgeError
    from forge.llm import LLM
    from forge.models.hash import HashModel
    from forge.models.logits import LogitsModel
    from forge.policy import Policy
    from forge.request import FinishReason, Request, SamplingParams, Structure
    from forge.scheduler import Scheduler
    from forge.seam import Model, StepOutput, StepPlan
else:
    _MODULES = {
        "LLM": "llm",
        "AsyncLLM": "async_llm",
        "BlockPool": "blocks",
        "Engine": "engine",
        "EngineConfig": "config",
        "FinishReason": "request",
        "ForgeError": "errors",
        "HashModel": "models.hash",
        "LogitsModel": "models.logits",
        "Model": "seam",
        "Policy": "policy",
        "Request": "request",
        "SamplingParams": "request",
        "Scheduler": "scheduler",
        "StepOutput": "seam",
        "StepPlan": "seam",
        "Structure": "request",
    }

    def __getattr__(name):
        """Import a public name, and keep it: Python calls this once for each."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})


__version__ = VERSION

__all__ = [
    "LLM",
    "AsyncLLM",
    "BlockPool",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "ForgeError",
    "HashModel",
    "LogitsModel",
    "Model",
    "Policy",
    "Request",
    "SamplingParams",
    "Scheduler",
    "StepOutput",
    "StepPlan",
    "Structure",
]
