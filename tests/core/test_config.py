"""Settings are checked where they are made, and the message names the field."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from stemkv.core import (
    CacheConfig,
    Demand,
    Lru,
    PrefixCache,
    Retention,
    SchedulerConfig,
)
from stemkv.core.core import Core, CoreConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.errors import ConfigError
from tests.core.builders import ALICE, NAMESPACE, tokens
from tests.sim.depth_cost import DepthCost


def test_the_defaults_are_valid_and_say_what_we_document() -> None:
    cache, scheduler = CacheConfig(num_blocks=1), SchedulerConfig()

    assert cache.block_size == 16
    assert (scheduler.token_budget, scheduler.max_num_running) == (512, 64)
    assert scheduler.max_request_tokens is None
    assert scheduler.max_steps_awaiting == 256
    assert scheduler.watermark == 0.01


@pytest.mark.parametrize(
    "field, smallest",
    [("num_blocks", 1), ("block_size", 1)],
)
def test_a_cache_limit_below_its_smallest_value_is_refused(
    field: str, smallest: int
) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 4}

    assert getattr(CacheConfig(**{**settings, field: smallest}), field) == smallest
    for value in (smallest - 1, -5):
        with pytest.raises(
            ConfigError, match=f"{field} must be at least {smallest}, got {value}"
        ):
            CacheConfig(**{**settings, field: value})


@pytest.mark.parametrize(
    "field, smallest",
    [
        ("token_budget", 1),
        ("max_num_running", 1),
        ("max_request_tokens", 2),  # one token of prompt, one of output
        ("max_steps_awaiting", 0),
    ],
)
def test_a_scheduler_limit_below_its_smallest_value_is_refused(
    field: str, smallest: int
) -> None:
    settings: dict[str, Any] = {"token_budget": 1, "max_num_running": 1}

    assert getattr(SchedulerConfig(**{**settings, field: smallest}), field) == smallest
    for value in (smallest - 1, -5):
        with pytest.raises(
            ConfigError, match=f"{field} must be at least {smallest}, got {value}"
        ):
            SchedulerConfig(**{**settings, field: value})


@pytest.mark.parametrize("value", [2.0, "2", True, None, float("nan")])
@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
def test_a_cache_limit_that_is_no_integer_is_refused(field: str, value: object) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 4, field: value}

    with pytest.raises(ConfigError, match=f"{field} must be an integer, got "):
        CacheConfig(**settings)


@pytest.mark.parametrize("value", [2.0, "2", True, float("nan")])
@pytest.mark.parametrize(
    "field",
    ["token_budget", "max_num_running", "max_request_tokens", "max_steps_awaiting"],
)
def test_a_scheduler_limit_that_is_no_integer_is_refused(
    field: str, value: object
) -> None:
    settings: dict[str, Any] = {field: value}

    with pytest.raises(ConfigError, match=f"{field} must be an integer, got "):
        SchedulerConfig(**settings)


def test_everybody_who_may_run_must_get_a_token_in_every_step() -> None:
    SchedulerConfig(token_budget=8, max_num_running=8)

    with pytest.raises(
        ConfigError, match=r"max_num_running must not exceed token_budget \(8\).*got 9"
    ):
        SchedulerConfig(token_budget=8, max_num_running=9)


@pytest.mark.parametrize("value", [-0.01, 1.0, 1.5, float("nan"), float("inf")])
def test_a_watermark_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(
        ConfigError, match=r"watermark must be a number in \[0, 1\), got"
    ):
        SchedulerConfig(watermark=value)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 0.999])
def test_a_watermark_is_a_share_below_one(value: float) -> None:
    assert SchedulerConfig(watermark=value).watermark == value


@pytest.mark.parametrize("value", ["0.1", None])
def test_a_watermark_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="watermark must be a number"):
        SchedulerConfig(watermark=value)


@pytest.mark.parametrize(
    "config, field",
    [(CacheConfig(num_blocks=1), "num_blocks"), (SchedulerConfig(), "token_budget")],
)
def test_settings_do_not_change_after_they_were_checked(
    config: object, field: str
) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(config, field, 0)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        CacheConfig(8, 4)  # type: ignore[misc]
    with pytest.raises(TypeError):
        SchedulerConfig(8)  # type: ignore[misc]


def test_a_bad_setting_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        CacheConfig(num_blocks=0)


@pytest.mark.parametrize(
    ("block_size", "num_prompt", "num_output"),
    [(4, 4, 1), (4, 5, 1), (4, 3, 1), (4, 3, 2), (4, 2, 3), (4, 1, 9), (1, 1, 1)],
)
def test_a_size_can_hit_if_asking_twice_hits(
    block_size: int, num_prompt: int, num_output: int
) -> None:
    config = CacheConfig(num_blocks=8, block_size=block_size)
    cache = PrefixCache(config, Retention(Lru))
    prompt, output = "abcdefgh"[:num_prompt], "ABCDEFGHIJ"[:num_output]
    text = tokens(prompt + output[:-1])
    lease = cache.acquire(
        NAMESPACE,
        ALICE,
        tokens(prompt),
        Demand(num_slots=len(prompt + output)),
        now=0.0,
    )
    assert lease is not None
    cache.publish(lease, text, len(prompt + output) - 1, 0.0)
    cache.release(lease, 0.0)

    hits = cache.peek(NAMESPACE, ALICE, tokens(prompt)).num_tokens > 0

    assert config.can_hit(num_prompt, num_output) == hits


def test_a_core_says_which_part_is_of_the_wrong_kind() -> None:
    for name, kind in (("cache", "a CacheConfig"), ("order", "an OrderConfig")):
        with pytest.raises(ConfigError, match=f"{name} must be {kind}, got str"):
            CoreConfig(**{name: "fifo"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scheduler must be .* got NoneType"):
        CoreConfig(scheduler=None)  # type: ignore[arg-type]


def test_a_core_keeps_books_where_it_has_prices_and_is_to_have_some() -> None:
    config = CoreConfig().sized(8)

    assert Core(config).ledger is None
    assert Core(config, DepthCost()).ledger is not None
    assert Core(replace(config, books=None), DepthCost()).ledger is None


@pytest.mark.parametrize(
    "config, problem",
    [
        (CoreConfig(eviction=EvictionConfig(objective="seconds")), "objective seconds"),
        (CoreConfig(scheduler=SchedulerConfig(step_time_s=0.1)), "step_time_s needs"),
    ],
)
def test_what_is_counted_in_seconds_needs_costs(
    config: CoreConfig, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Core(config)

    Core(config, DepthCost())


class Heard:
    """A recorder that notes the verbs."""

    def __init__(self) -> None:
        self.verbs: list[str] = []

    def begin(self, core: Core) -> None:
        self.verbs.append("begin")

    def hear(self, core: Core, verb: str, answer: object, /, **asked: Any) -> None:
        self.verbs.append(verb)


def test_a_recorder_hears_each_verb_once_and_nothing_that_happens_inside() -> None:
    """Retiring a namespace retires it in the cache, too; a step ends sessions."""
    heard = Heard()
    core = Core(CoreConfig().sized(8), recorder=heard)

    core.declare(NAMESPACE, tokens("a" * 16))
    core.retire(NAMESPACE, 0.0)
    core.reset(NAMESPACE, 0.0)
    core.lift_fence(core.fence())
    core.abandon(core.schedule(1.0), 2.0)
    with pytest.raises(ConfigError):
        core.keep(NAMESPACE, ALICE, tokens("a" * 160), until=9.0, now=2.0)

    assert heard.verbs == [
        *("begin", "declare", "retire", "reset", "fence", "lift_fence"),
        *("schedule", "abandon"),
    ]
