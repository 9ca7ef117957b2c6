"""A recorder writes down what an engine's core was asked, and changes nothing."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch

from stemkv.core import OrderConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.engine import Engine, EngineConfig, SamplingParams
from stemkv.engine.recorder import StepRecorder
from stemkv.errors import ConfigError, PromptTooLong
from stemkv.measure.steplog import (
    Added,
    Cancelled,
    Committed,
    Declared,
    NamespaceReset,
    NamespaceRetired,
    Planned,
    StepLogHeader,
)
from stemkv.measure.steplog_lines import StepLogWriter, read_step_log
from stemkv.sim.agreement import repeat
from tests.engine.lives import Life, small_quotas
from tests.engine.models import build_engine, kv_bytes, random_ids, tiny_once, tokens
from tests.engine.recording import record
from tests.engine.serving import random_traffic, serve
from tests.knobs import engine_config

PARAMS = SamplingParams(max_new_tokens=4)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_recorded_engine_does_what_it_does_without(seed: int) -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    asks = random_traffic(random.Random(seed))
    how = dict(num_blocks=40, block_size=3, token_budget=40)

    plain = serve(build_engine(loaded, **how), asks)
    recorded = serve(record(loaded, **how).engine, asks)

    assert recorded.completions.keys() == plain.completions.keys()
    for sample_id, completion in plain.completions.items():
        other = recorded.completions[sample_id]
        assert other.token_ids == completion.token_ids
        assert other.counts == completion.counts
        assert other.num_preemptions == completion.num_preemptions


def test_the_log_tells_prompts_outputs_and_every_step_in_order() -> None:
    recording = record(token_budget=16)
    engine = recording.engine
    engine.declare_public(tokens(random_ids(16)))
    engine.add(tokens(random_ids(30)), PARAMS, tenant="acme", request_id="r")
    (completion,) = engine.drain()

    log = recording.log

    assert log.header.core.cache == engine.cache.config
    assert log.header.core.scheduler == engine.scheduler.config
    assert (log.header.core.eviction, log.header.core.order) == (
        EvictionConfig(),
        OrderConfig(),
    )
    assert (log.header.core.quotas, log.header.costs) == (None, None)
    (spec,) = log.specs
    assert (spec.request_id, list(spec.prompt)) == ("r", random_ids(30))
    steps = log.steps()
    assert [plan.step for plan, _ in steps] == [0, 1, 2, 3, 4]
    computed = [(plan.chunks[0].start, plan.chunks[0].end) for plan, _ in steps]
    assert computed == [(0, 16), (16, 30), (30, 31), (31, 32), (32, 33)]
    output = [s.token for _, commit in steps for s in commit.samples.get("r", ())]
    assert tuple(output) == completion.token_ids
    kinds = [type(call) for call in log.calls if not isinstance(call, Declared)]
    assert kinds == [Added, *[Planned, Committed] * 5]
    assert isinstance(log.calls[0], Declared)
    assert all(commit.now >= plan.now for plan, commit in steps)
    assert steps[-1][1].state.num_running == 0


def test_a_call_within_a_call_is_not_written_twice() -> None:
    recording = record()
    engine = recording.engine
    engine.generate([tokens(random_ids(20))], PARAMS)
    engine.reset()
    engine.update_numerics("tolerant")  # retires through the scheduler

    kinds = [type(call) for call in recording.log.calls]

    assert kinds.count(NamespaceReset) == 1
    assert kinds.count(NamespaceRetired) == 1


def test_what_the_core_refuses_is_not_in_the_log() -> None:
    recording = record(num_blocks=4)
    with pytest.raises(PromptTooLong):
        recording.engine.add(tokens(random_ids(100)), PARAMS)
    assert not recording.engine.cancel("nobody")

    assert recording.log.calls == ()


def test_a_cancel_while_a_step_runs_stands_between_plan_and_commit() -> None:
    recording = record()
    engine = recording.engine
    engine.on_logits = lambda request_id, index, row: engine.cancel("r")
    engine.add(tokens(random_ids(20)), PARAMS, request_id="r")
    engine.drain()

    kinds = [type(call) for call in recording.log.calls]

    assert kinds == [Added, Planned, Cancelled, Committed]


class FullDisk(io.StringIO):
    """Takes some lines, then none."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_left = num_lines

    def write(self, text: str) -> int:
        if self.num_left == 0:
            raise OSError(28, "No space left on device")
        self.num_left -= 1
        return super().write(text)


@pytest.mark.parametrize("num_lines", [0, 1, 2, 3])
def test_an_engine_goes_on_when_its_log_cannot_be_written(num_lines: int) -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    recorder = StepRecorder(FullDisk(num_lines), model="tiny")
    config = engine_config(
        kv_memory_bytes=kv_bytes(loaded, 16, 8), block_size=8, num_threads=1
    )
    engine = Engine(loaded, config, recorder=recorder)

    (completion,) = engine.generate([tokens(random_ids(20))], PARAMS)

    assert len(completion.token_ids) == 4
    assert isinstance(recorder.error, OSError)
    assert recorder.error.errno == 28


def test_an_engine_goes_on_when_somebody_closed_its_log() -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    file = io.StringIO()
    recorder = StepRecorder(file, model="tiny")
    config = engine_config(
        kv_memory_bytes=kv_bytes(loaded, 16, 8), block_size=8, num_threads=1
    )
    engine = Engine(loaded, config, recorder=recorder)
    file.close()

    (completion,) = engine.generate([tokens(random_ids(20))], PARAMS)

    assert len(completion.token_ids) == 4
    assert isinstance(recorder.error, ValueError)


GOLDEN = Path(__file__).parent.parent / "measure" / "golden_run.jsonl"


def test_a_run_of_an_earlier_version_is_decided_and_recorded_again() -> None:
    """Byte by byte; it was recorded by subclasses of cache and scheduler."""
    loaded = tiny_once("llama-group1", torch.float32)
    core = Life(loaded, EvictionConfig(), quotas=small_quotas(loaded)).engine.core
    first, again = io.StringIO(), io.StringIO()
    StepLogWriter(first, StepLogHeader(model="tiny", core=core.config))
    lines = GOLDEN.read_text().splitlines()[1:]
    log = read_step_log([*first.getvalue().splitlines(), *lines], file="golden")

    found = repeat(log, recorder=StepRecorder(again, model="tiny"))

    assert found.first_difference is None, str(found.first_difference)
    assert again.getvalue().splitlines()[1:] == lines


def test_a_recorder_records_one_engine() -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    recorder = StepRecorder(io.StringIO(), model="tiny")
    config = EngineConfig(kv_memory_bytes=1 << 20, num_threads=1, runs_self_test=False)
    Engine(loaded, config, recorder=recorder)

    with pytest.raises(ConfigError, match="one engine"):
        Engine(loaded, config, recorder=recorder)
