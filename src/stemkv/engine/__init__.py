"""Tensors: paged KV, exact attention, sampling, over transformers models.

Needs the extra `engine` (torch, transformers).
"""

from stemkv.engine.engine import Completion, Engine, EngineConfig
from stemkv.engine.load import LoadedModel, load_model, wrap_model
from stemkv.engine.sampling import SamplingParams

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "LoadedModel",
    "SamplingParams",
    "load_model",
    "wrap_model",
]
