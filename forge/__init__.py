"""forge: an LLM serving engine whose policy is proved on a laptop and drives the GPU unchanged.

Importing it loads the policy core and the deterministic model: no torch, no web framework.
"""

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
from forge.version import VERSION

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
