"""One caller's odd values fail one request, and nobody else's (I24)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import Engine, SamplingParams
from stemkv.errors import ConfigError, InvalidLimit, InvariantError, RequestError
from tests.engine.models import build_engine, tiny

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
