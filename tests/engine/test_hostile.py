"""One caller's odd values fail one request, and nobody else's (I24)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from time import monotonic
from typing import Any

import pytest
import torch

from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import Engine, EngineConfig, SamplingParams
from stemkv.errors import ConfigError, InvalidLimit, InvariantError, RequestError
from tests.engine.models import ByteTokenizer, build_engine, tiny

PROMPT = TokenIds.from_ids(range(3, 20))
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def busy() -> Engine:
    """An engine with an innocent request in flight."""
    engine = build_engine(tiny("llama-group1", torch.float32))
    engine.add(PROMPT, PARAMS, request_id="innocent")
    engine.step()
    return engine


def assert_unharmed(engine: Engine) -> None:
    ended = {c.request_id: c for c in engine.drain()}
    assert len(ended["innocent"].token_ids) == 6
    assert not engine.has_work
    assert engine.usage().num_active_blocks == 0


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 10**400},
        {"temperature": float("inf")},
        {"top_p": 10**400},
        {"seed": 10**5000},
        {"seed": 2**64},
        {"max_new_tokens": 1.5},
        {"stop": "text"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_that_no_float_or_seed_can_hold_are_refused(
    busy: Engine, values: dict[str, Any]
) -> None:
    with pytest.raises(InvalidLimit) as caught:
        busy.add(PROMPT, SamplingParams(**values))

    assert caught.value.field in values
    assert_unharmed(busy)


@pytest.mark.parametrize("tenant", [["x"], 1, True, "", "(no tenant)"])
def test_a_tenant_that_is_no_name_is_refused(busy: Engine, tenant: Any) -> None:
    with pytest.raises(RequestError, match="authenticated principal"):
        busy.add(PROMPT, PARAMS, tenant=tenant)

    assert_unharmed(busy)


def test_numbers_are_no_tenants_so_one_and_true_share_nothing() -> None:
    with pytest.raises(ConfigError):
        Domain.private(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [5, None, 1.5])
def test_generate_that_is_refused_half_way_leaves_nothing_behind(
    busy: Engine, odd: Any
) -> None:
    with pytest.raises((RequestError, ConfigError)):
        busy.generate([PROMPT, odd], PARAMS)

    assert len(busy.scheduler.requests()) == 1
    assert_unharmed(busy)


def test_what_cannot_be_sampled_fails_alone(
    busy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_the_guilty(request_id: str, index: int, row: torch.Tensor) -> None:
        if request_id == "guilty":
            raise ValueError("this observer chokes")

    busy.on_logits = fail_for_the_guilty
    busy.add(PROMPT, PARAMS, request_id="guilty")

    ended = {c.request_id: c for c in busy.drain()}

    assert ended["guilty"].finish_reason.value == "failed"
    assert len(ended["innocent"].token_ids) == 6


def test_a_defect_of_the_core_stops_the_engine_for_good(
    busy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*_: object) -> object:
        raise InvariantError("two and two are five")

    with monkeypatch.context() as patched:
        patched.setattr(busy.scheduler, "schedule", impossible)
        with pytest.raises(InvariantError, match="two and two"):
            busy.step()

    with pytest.raises(InvariantError, match="make a new one"):
        busy.step()


def test_step_records_do_not_grow_without_bound() -> None:
    engine = build_engine(tiny("llama-group1", torch.float32))
    assert engine.steps.maxlen is not None


def test_token_ids_do_not_change_with_the_buffer_they_came_from() -> None:
    buffer = bytearray(PROMPT.buffer)
    ids = TokenIds(buffer)  # type: ignore[arg-type]
    buffer[0] = 99
    assert ids == PROMPT


# Wrong types, at the door


@pytest.mark.parametrize(
    "prompts", ["hello", b"hello", PROMPT, {"role": "user"}, 5, None], ids=repr
)
def test_a_single_prompt_is_not_taken_for_many(busy: Engine, prompts: Any) -> None:
    """A text is a sequence of letters, and a prompt one of numbers."""
    with pytest.raises(RequestError, match=r"give \[prompt\]") as caught:
        busy.generate(prompts, PARAMS)

    assert caught.value.field == "prompts"
    assert_unharmed(busy)


@pytest.mark.parametrize("prompt", ["hello", [1, 2], b"\1\0\0\0", None, 7], ids=repr)
def test_what_is_no_prompt_is_refused_with_the_way_to_one(
    busy: Engine, prompt: Any
) -> None:
    with pytest.raises(RequestError, match="`TokenIds.from_ids` of numbers") as caught:
        busy.add(prompt, PARAMS)

    assert caught.value.field == "prompt"
    assert_unharmed(busy)


@pytest.mark.parametrize(
    "values, field",
    [
        ({"params": {"max_new_tokens": 3}}, "params"),
        ({"hints": "next turn"}, "hints"),
        ({"hints": None}, "hints"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": ["r"]}, "request_id"),
        ({"arrival_s": float("nan")}, "arrival_s"),
        ({"arrival_s": float("inf")}, "arrival_s"),
        ({"arrival_s": "now"}, "arrival_s"),
        ({"arrival_s": True}, "arrival_s"),
        ({"arrival_s": 10**400}, "arrival_s"),
        ({"arrival_s": 10**5000}, "arrival_s"),
        ({"adapter": 5}, "adapter"),
        ({"adapter": ["x"]}, "adapter"),
        ({"start_position": 1.5}, "start_position"),
        ({"request_class": ["x"]}, "request_class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_another_kind_is_refused_by_its_field(
    busy: Engine, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        busy.add(PROMPT, **({"params": PARAMS} | values))

    assert caught.value.field == field
    assert len(busy.scheduler.requests()) == 1
    assert_unharmed(busy)


@pytest.mark.parametrize("request_id", [5, None, ["innocent"]])
def test_only_a_text_can_be_cancelled_or_asked_about(
    busy: Engine, request_id: Any
) -> None:
    for verb in (busy.cancel, busy.progress):
        with pytest.raises(RequestError) as caught:
            verb(request_id)
        assert caught.value.field == "request_id"
    assert_unharmed(busy)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", True])
def test_a_clock_that_gives_no_seconds_is_refused_and_nothing_is_lost(
    value: Any,
) -> None:
    loaded = tiny("llama-group1", torch.float32)
    readings: list[Any] = []
    times = count()
    engine = Engine(
        loaded,
        EngineConfig(num_threads=1, runs_self_test=False, kv_memory_bytes=1 << 20),
        clock=lambda: readings.pop() if readings else float(next(times)),
    )
    engine.add(PROMPT, PARAMS, request_id="innocent")
    readings.append(value)
    with pytest.raises(ConfigError, match="clock must give finite seconds"):
        engine.step()
    assert_unharmed(engine)


def test_a_clock_that_goes_back_is_refused(busy: Engine) -> None:
    busy._clock._read = lambda: 0.0
    with pytest.raises(ConfigError, match="clock must not go back, gave 0"):
        busy.step()
    busy._clock._read = monotonic
    assert_unharmed(busy)


@pytest.mark.parametrize("at", range(3))
def test_a_clock_that_fails_within_a_step_leaves_a_sound_engine(at: int) -> None:
    loaded = tiny("llama-group1", torch.float32)
    readings: list[float] = []
    times = count()
    engine = Engine(
        loaded,
        EngineConfig(num_threads=1, runs_self_test=False, kv_memory_bytes=1 << 20),
        clock=lambda: readings.pop(0) if readings else float(next(times)),
    )
    engine.add(PROMPT, PARAMS)
    readings.extend([100.0, 101.0, 102.0])
    readings[at] = float("nan")
    with pytest.raises(ConfigError, match="clock"):
        engine.step()
    readings.clear()
    times = count(200)
    engine.drain()
    (again,) = engine.generate([PROMPT], PARAMS)
    assert len(again.token_ids) == 6
    assert not engine.has_work


@pytest.mark.parametrize("loaded", [None, "smollm", torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_loaded_model_is_refused(loaded: Any) -> None:
    with pytest.raises(ConfigError, match="loaded must be a LoadedModel"):
        Engine(loaded)


def test_settings_that_are_none_of_ours_are_refused() -> None:
    with pytest.raises(ConfigError, match="config must be an EngineConfig"):
        Engine(tiny("llama-group1"), {"block_size": 8})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="single_tenant must be True or False"):
        EngineConfig(single_tenant="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[5], ["text"], [{"content": "x"}], b"x", (1,)])
def test_messages_of_another_kind_are_refused(messages: Any) -> None:
    loaded = replace(tiny("llama-group1"), tokenizer=ByteTokenizer())
    with pytest.raises(RequestError) as caught:
        build_engine(loaded).encode(messages)
    assert caught.value.field == "prompt"


def test_what_a_tokenizer_cannot_take_is_the_prompt_s_fault() -> None:
    loaded = replace(tiny("llama-group1"), tokenizer=ByteTokenizer())
    with pytest.raises(RequestError, match="cannot be made into tokens") as caught:
        build_engine(loaded).encode("half a pair \ud800")
    assert caught.value.field == "prompt"


def test_verbs_within_a_step_are_refused_and_break_nothing(busy: Engine) -> None:
    refusals = []

    def meddle(request_id: str, index: int, row: torch.Tensor) -> None:
        for verb in (busy.step, busy.drain, lambda: busy.generate([PROMPT], PARAMS)):
            with pytest.raises(ConfigError, match="between steps") as caught:
                verb()
            refusals.append(caught.value)

    busy.on_logits = meddle
    assert_unharmed(busy)
    assert len(refusals) == 3 * 5
    busy.on_logits = None
    assert len(busy.generate([PROMPT], PARAMS)[0].token_ids) == 6


def test_names_of_tenants_that_are_gone_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stemkv.engine.door._MAX_COUNTED_TENANTS", 10)
    engine = build_engine(tiny("llama-group1"))
    made = [engine.add(PROMPT, PARAMS, tenant=f"t{i % 30}") for i in range(90)]
    assert len(set(made)) == 90
    assert len(engine._door._num_named) == 10
