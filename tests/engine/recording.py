"""Engines that are recorded, and the logs of what they did."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch

from stemkv.core import CostModel
from stemkv.engine import Engine, LoadedModel
from stemkv.engine.recorder import StepRecorder
from stemkv.measure.steplog import StepLog
from stemkv.measure.steplog_lines import read_step_log
from tests.engine.models import kv_bytes, tiny_once
from tests.knobs import engine_config

__all__ = ["Recording", "record"]


@dataclass
class Recording:
    """An engine and the file its step log goes to."""

    engine: Engine
    file: io.StringIO

    @property
    def log(self) -> StepLog:
        return read_step_log(self.file.getvalue().splitlines(), file="log")


def record(
    loaded: LoadedModel | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    costs: CostModel | None = None,
    **config: Any,
) -> Recording:
    """An engine as `build_engine` makes it, recorded from its start."""
    if loaded is None:
        loaded = tiny_once("llama-group1", torch.float32)
    settings: dict[str, Any] = dict(
        kv_memory_bytes=kv_bytes(loaded, num_blocks, block_size),
        block_size=block_size,
        max_num_running=min(8, config.get("token_budget", 8)),
        num_threads=1,
        runs_self_test=False,
        single_tenant=True,
    )
    file = io.StringIO()
    recorder = StepRecorder(file, model=loaded.name)
    engine = Engine(
        loaded, engine_config(**settings | config), costs=costs, recorder=recorder
    )
    return Recording(engine, file)
