"""Tensors: paged KV, exact attention, sampling, over transformers models.

Needs the extra `engine` (torch, transformers).
"""

from stemkv.engine.config import EngineConfig
from stemkv.engine.delta import Delta, TextDelta, TextEnded, TextTakenBack
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.engine import Engine, ResetReport
from stemkv.engine.load import LoadedModel, load_model, wrap_model
from stemkv.engine.quotas import MemoryQuota, MemoryQuotas
from stemkv.engine.rollout import InFlight
from stemkv.engine.samples import Completion, Progress
from stemkv.engine.sampling import SamplingParams

__all__ = [
    "Completion",
    "Delta",
    "EmbeddedPrompt",
    "Engine",
    "EngineConfig",
    "InFlight",
    "LoadedModel",
    "MemoryQuota",
    "MemoryQuotas",
    "Progress",
    "ResetReport",
    "SamplingParams",
    "TextDelta",
    "TextEnded",
    "TextTakenBack",
    "load_model",
    "wrap_model",
]
