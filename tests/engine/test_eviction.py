"""Eviction under the engine: no policy changes an answer, and operators are obeyed."""

from __future__ import annotations

import logging
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.quota import Quota
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.engine import Engine, EngineConfig, InFlight, LoadedModel, SamplingParams
from stemkv.engine.quotas import MemoryQuota, MemoryQuotas
from stemkv.errors import ConfigError, RequestError
from tests.engine.lives import EVERY_POLICY, POLICIES, Life, name_of, small_quotas
from tests.engine.lora_files import make_adapter
from tests.engine.models import TINY, kv_bytes, random_ids, tiny_once, tokens
from tests.engine.serving import assert_agreement, assert_cached_kv_is_fresh
from tests.knobs import engine_config

ONE = SamplingParams(max_new_tokens=1)
DTYPES = (torch.float32, torch.bfloat16)


# No policy changes an answer


def assert_life_changes_nothing(life: Life, num_rounds: int) -> None:
    life.live(num_rounds, checks_kv=True)

    assert_agreement(life.served, life.loaded)
    assert_cached_kv_is_fresh(life.engine)
    # A life without these would agree with anything.
    assert life.engine.usage().num_evicted_blocks > 100
    assert life.num_preempted > 0
    assert sum(c.counts.reused for c in life.served.completions.values()) > 300


@pytest.mark.parametrize(
    "eviction, has_quotas",
    [
        pytest.param(
            eviction,
            has_quotas,
            id=f"{name_of(eviction)}-{'quotas' if has_quotas else 'pooled'}",
            marks=() if has_quotas == index % 2 else pytest.mark.slow,
        )
        for index, eviction in enumerate(POLICIES)
        for has_quotas in (False, True)
    ],
)
def test_every_policy_gives_the_tokens_and_logits_of_runs_without_reuse(
    eviction: EvictionConfig, has_quotas: bool
) -> None:
    # Each policy with another model, so that every model is met by some.
    index = POLICIES.index(eviction)
    dtype = DTYPES[(index // 4 + has_quotas) % 2]
    loaded = tiny_once(sorted(TINY)[index % 4], dtype)
    quotas = small_quotas(loaded) if has_quotas else None

    assert_life_changes_nothing(Life(loaded, eviction, seed=6, quotas=quotas), 16)


@pytest.mark.slow
@EVERY_POLICY
@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_lives_under_every_policy_change_nothing(
    eviction: EvictionConfig, name: str, dtype: torch.dtype
) -> None:
    loaded = tiny_once(name, dtype)
    for seed in (9, 14):
        print(f"{seed=}")
        quotas = small_quotas(loaded) if seed == 9 else None
        life = Life(loaded, eviction, seed=seed, quotas=quotas)
        assert_life_changes_nothing(life, 20)


@pytest.mark.slow
@pytest.mark.model
@EVERY_POLICY
def test_every_policy_gives_the_tokens_of_the_real_model(
    eviction: EvictionConfig, smol: LoadedModel
) -> None:
    quotas = small_quotas(smol)

    assert_life_changes_nothing(Life(smol, eviction, seed=6, quotas=quotas), 12)


def test_policies_differ_in_what_they_evict_on_these_lives() -> None:
    """A control for the tests above: else they would be one test, repeated."""
    loaded = tiny_once("llama-group1", torch.float32)
    digests: dict[str, list[str]] = {}
    for eviction in POLICIES:
        life = Life(loaded, eviction, seed=6)
        life.live(16)
        digests[name_of(eviction)] = [c.state.digest for _, c in life.log.steps()]

    # Blocks of one size and no costs: nothing is left that GDSF adds.
    assert digests.pop("gdsf-tokens") == digests["lfu_da-tokens"]
    assert len({tuple(each) for each in digests.values()}) == len(digests)


# Settings


def build(
    *,
    num_blocks: int = 16,
    block_size: int = 8,
    loaded: LoadedModel | None = None,
    costs: Any = None,
    **config: Any,
) -> tuple[Engine, list[float]]:
    """An engine and the time it goes by, which a test moves on."""
    if loaded is None:
        loaded = tiny_once("llama-group1", torch.float32)
    time = [0.0]
    settings: dict[str, Any] = dict(
        kv_memory_bytes=kv_bytes(loaded, num_blocks, block_size),
        block_size=block_size,
        num_threads=1,
        runs_self_test=False,
    )
    engine = Engine(
        loaded,
        engine_config(**settings | config),
        clock=lambda: time[0],
        costs=costs,
    )
    return engine, time


def block_bytes(block_size: int = 8) -> int:
    return kv_bytes(tiny_once("llama-group1", torch.float32), 1, block_size)


def test_the_defaults_are_the_core_s_and_the_policy_is_the_reuse_index() -> None:
    config = EngineConfig()

    assert config.core.eviction == EvictionConfig(
        name="reuse_index", objective="tokens"
    )
    assert config.core.scheduler.lookahead == SchedulerConfig().lookahead
    assert config.core.cache.max_kept_share == CacheConfig(num_blocks=1).max_kept_share
    assert config.quotas is None


def test_settings_reach_the_core() -> None:
    engine, _ = build(lookahead=0, max_kept_share=0.25)

    assert engine.scheduler.config.lookahead == 0
    assert engine.cache.config.max_kept_share == 0.25


@pytest.mark.parametrize("name", ["reuse_index", "gdsf", "lru"])
def test_seconds_without_costs_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match="seconds needs costs.*stemkv calibrate"):
        build(eviction=EvictionConfig(name=name, objective="seconds"))


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"eviction": "lru"}, "eviction must be an EvictionConfig, got str"),
        ({"quotas": {}}, "quotas must be a MemoryQuotas, got dict"),
        ({"lookahead": -1}, "lookahead must be at least 0"),
        ({"max_kept_share": 2}, "max_kept_share must be a number in"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(**settings)


def test_quotas_in_bytes_become_whole_blocks_of_domains() -> None:
    size = block_bytes()
    sharing = SharingPolicy(groups={"crew": {"ann", "bob"}})
    engine, _ = build(
        sharing=sharing,
        quotas=MemoryQuotas(
            tenants={"dave": MemoryQuota(floor_bytes=3 * size - 1, weight=2.0)},
            groups={"crew": MemoryQuota(floor_bytes=size, cap_bytes=5 * size + 1)},
            default=MemoryQuota(cap_bytes=4 * size),
            public_bytes=2 * size + 7,
        ),
    )

    quotas = engine.cache.keeper.quotas
    assert quotas is not None
    assert quotas.config.quotas == {
        Domain.private("dave"): Quota(floor_blocks=2, weight=2.0),
        Domain.group("crew"): Quota(floor_blocks=1, cap_blocks=5),
    }
    assert quotas.config.default == Quota(cap_blocks=4)
    assert quotas.config.public_blocks == 2


def test_what_cannot_be_promised_is_refused_before_the_model_is_touched() -> None:
    size = block_bytes()
    floor = MemoryQuota(floor_bytes=8 * size)

    with pytest.raises(ConfigError, match="quotas: floors of 16.*a block takes 8,192"):
        build(quotas=MemoryQuotas(tenants={"a": floor, "b": floor}))
    with pytest.raises(ConfigError, match="floor_bytes 1 of tenant 'a' holds no block"):
        build(quotas=MemoryQuotas(tenants={"a": MemoryQuota(floor_bytes=1)}))


SHARING = SharingPolicy(groups={"crew": {"ann"}}, tenants={"carol": Sharing.NONE})


@pytest.mark.parametrize(
    "quotas, problem",
    [
        ({"groups": {"crow": MemoryQuota()}}, "no group is called 'crow'.*'crew'"),
        ({"tenants": {"ann": MemoryQuota()}}, "tenant 'ann' is in group 'crew'"),
        ({"tenants": {"carol": MemoryQuota()}}, "'carol' shares with nobody"),
    ],
    ids=["group", "member", "nobody"],
)
def test_a_quota_that_no_request_would_have_is_refused(
    quotas: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(sharing=SHARING, quotas=MemoryQuotas(**quotas))


def test_a_member_of_a_group_with_private_requests_can_have_a_quota() -> None:
    sharing = SharingPolicy(
        groups={"crew": {"ann"}}, classes={"drafts": Sharing.PRIVATE}
    )
    quota = MemoryQuota(floor_bytes=block_bytes())

    engine, _ = build(sharing=sharing, quotas=MemoryQuotas(tenants={"ann": quota}))

    assert engine.cache.keeper.quotas is not None


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda: MemoryQuota(floor_bytes=-1), "floor_bytes must be a number of bytes"),
        (lambda: MemoryQuota(floor_bytes=1.5), "floor_bytes must be"),
        (
            lambda: MemoryQuota(floor_bytes=2, cap_bytes=1),
            "cap_bytes must not be below",
        ),
        (lambda: MemoryQuota(weight=0), "weight must be a number above 0"),
        (lambda: MemoryQuotas(public_bytes=True), "public_bytes must be"),
        (
            lambda: MemoryQuotas(default=MemoryQuota(floor_bytes=9)),
            "default must have no floor_bytes, got 9",
        ),
        (lambda: MemoryQuotas(tenants={"": MemoryQuota()}), "tenants: a name must be"),
        (lambda: MemoryQuotas(groups={"a": 7}), "groups: 'a' must be a MemoryQuota"),
        (lambda: MemoryQuotas(tenants=["a"]), "tenants must be a mapping, got list"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_wrong_quota_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_changing_what_was_passed_changes_no_quotas() -> None:
    tenants = {"a": MemoryQuota()}
    quotas = MemoryQuotas(tenants=tenants)

    tenants.clear()

    assert list(quotas.tenants) == ["a"]
    assert {f.name for f in fields(MemoryQuotas)} == {
        "tenants",
        "groups",
        "default",
        "public_bytes",
    }


# What requests and operators say


def ask(engine: Engine, ids: list[int], tenant: str = "a", **more: Any) -> int:
    """Serve one request alone; return how many of its tokens were cached."""
    request_id = engine.add(tokens(ids), ONE, tenant=tenant, **more)
    (completion,) = engine.drain()
    assert completion.request_id == request_id
    return completion.counts.reused


def flood(engine: Engine, num_prompts: int, tenant: str = "b") -> None:
    for index in range(num_prompts):
        ask(engine, random_ids(17, seed=1000 + index), tenant)


def test_a_flooding_tenant_takes_nothing_from_one_within_its_floor() -> None:
    prompts = [random_ids(17, seed=seed) for seed in range(4)]
    hits = {}
    for name, quotas in {
        "none": None,
        "floor": MemoryQuotas(
            tenants={"a": MemoryQuota(floor_bytes=10 * block_bytes())}
        ),
    }.items():
        engine, _ = build(quotas=quotas)
        for prompt in prompts:
            ask(engine, prompt)
        flood(engine, 20)
        hits[name] = [ask(engine, prompt) for prompt in prompts]

    assert hits == {"none": [0, 0, 0, 0], "floor": [16, 16, 16, 16]}


def test_a_tenant_over_its_cap_evicts_its_own_while_memory_is_free() -> None:
    quota = MemoryQuota(cap_bytes=2 * block_bytes())
    engine, _ = build(quotas=MemoryQuotas(default=quota))

    flood(engine, 3)

    assert engine.usage_of("b").num_cached_blocks == 2
    assert engine.usage().num_free_blocks == 14


def test_what_is_ephemeral_is_not_retained() -> None:
    engine, _ = build()
    prompt = random_ids(33)

    ask(engine, prompt, hints=Hints(ephemeral_from=16))

    assert engine.usage_of("a").num_cached_blocks == 2
    assert ask(engine, prompt) == 16


@pytest.mark.parametrize("says_it_with_a_request", [True, False])
def test_what_only_an_ended_session_has_used_goes_first(
    says_it_with_a_request: bool,
) -> None:
    engine, _ = build()
    old, ended = random_ids(33, seed=1), random_ids(33, seed=2)
    ask(engine, old)
    ask(
        engine,
        ended,
        hints=Hints(session="s", ends_session=says_it_with_a_request),
    )
    if not says_it_with_a_request:
        engine.end_session("s", tenant="a")

    flood(engine, 5)

    assert ask(engine, old) == 32
    assert ask(engine, ended) < 32


def test_a_session_of_another_tenant_with_the_same_name_does_not_end() -> None:
    engine, _ = build()
    old, other = random_ids(33, seed=1), random_ids(33, seed=2)
    ask(engine, old)
    ask(engine, other, hints=Hints(session="s"))
    engine.end_session("s", tenant="b")

    flood(engine, 5)

    assert ask(engine, other) == 32, "it is younger than the other prompt"
    assert ask(engine, old) < 32


def test_a_request_that_begins_again_keeps_its_hints() -> None:
    engine, _ = build()
    prompt = random_ids(33)
    engine.add(tokens(prompt), ONE, tenant="a", hints=Hints(ephemeral_from=16))
    engine.update_numerics("tolerant", in_flight=InFlight.RESTART)
    engine.drain()

    assert engine.usage_of("a").num_cached_blocks == 2


def test_hints_of_generate_are_those_of_every_prompt() -> None:
    engine, _ = build()
    prompts = [tokens(random_ids(33, seed=seed)) for seed in range(2)]

    engine.generate(prompts, ONE, tenant="a", hints=Hints(ephemeral_from=0))

    assert engine.usage_of("a").num_cached_blocks == 0


def test_hints_never_change_an_answer() -> None:
    prompt = tokens(random_ids(33))
    params = SamplingParams(max_new_tokens=9)
    answers = {
        build()[0].generate([prompt], params, hints=hints)[0].token_ids
        for hints in (
            Hints(),
            Hints(session="s", ends_session=True),
            Hints(next_use_s=math.inf, ephemeral_from=3),
        )
    }

    assert len(answers) == 1


@pytest.mark.parametrize("session", ["", 7, None])
def test_a_session_without_a_name_is_refused(session: Any) -> None:
    engine, _ = build()
    if session is None:
        with pytest.raises(RequestError, match="ends_session needs hints.session"):
            Hints(ends_session=True)
        return
    with pytest.raises(RequestError, match="session must be a non-empty text"):
        engine.end_session(session)


# What the operator keeps


def test_a_kept_prefix_stays_until_its_time_is_over() -> None:
    engine, time = build()
    kept = random_ids(33)
    ask(engine, kept)
    assert engine.keep(tokens(kept), for_s=60.0, tenant="a") == 4

    flood(engine, 20)
    time[0] = 59.0
    assert ask(engine, kept) == 32

    time[0] = 61.0
    flood(engine, 20)
    assert ask(engine, kept) < 32


def test_a_prefix_can_be_kept_before_anybody_has_asked_for_it() -> None:
    engine, _ = build()
    kept = random_ids(33)
    engine.keep(tokens(kept), for_s=60.0, tenant="a")
    ask(engine, kept)

    flood(engine, 20)

    assert ask(engine, kept) == 32


def test_no_seconds_take_an_order_back() -> None:
    engine, _ = build()
    kept = random_ids(33)
    ask(engine, kept)
    engine.keep(tokens(kept), for_s=60.0, tenant="a")
    engine.keep(tokens(kept), for_s=0.0, tenant="a")

    flood(engine, 20)

    assert ask(engine, kept) < 32


def test_what_is_public_can_be_kept_for_all_and_nothing_else() -> None:
    engine, _ = build()
    head = random_ids(16)
    with pytest.raises(ConfigError, match="no declared public one begins with it"):
        engine.keep(tokens(head), for_s=60.0)
    engine.declare_public(tokens(head))
    engine.keep(tokens(head), for_s=60.0)
    ask(engine, [*head, 1], "a")

    flood(engine, 20)

    assert ask(engine, [*head, 2], "c") == 16


def test_more_than_the_share_that_may_be_kept_is_refused() -> None:
    engine, _ = build(max_kept_share=0.25)
    engine.keep(tokens(random_ids(24)), for_s=9.0, tenant="a")

    with pytest.raises(ConfigError, match="beside 3 exceeds the 4"):
        engine.keep(tokens(random_ids(16, seed=1)), for_s=9.0, tenant="a")


@pytest.mark.parametrize("for_s", [-1, math.inf, math.nan, True, "60"], ids=repr)
def test_a_time_that_is_none_is_refused(for_s: Any) -> None:
    engine, _ = build()
    with pytest.raises(ConfigError, match="for_s must be seconds of at least 0"):
        engine.keep(tokens(random_ids(16)), for_s=for_s, tenant="a")


def test_nothing_is_kept_where_nothing_is_reused() -> None:
    for settings in (
        {"reuses_prefixes": False},
        {"sharing": SharingPolicy(default=Sharing.NONE)},
    ):
        engine, _ = build(**settings)
        assert engine.keep(tokens(random_ids(16)), for_s=9.0, tenant="a") == 0
        engine.end_session("s", tenant="a")


def test_an_order_to_keep_is_refused_inside_a_callback() -> None:
    engine, _ = build()
    engine.on_event = lambda event: engine.keep(
        tokens(random_ids(16)), for_s=9.0, tenant="a"
    )
    caught: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.exc_info is not None
            caught.append(str(record.exc_info[1]))

    listener = Listener()
    logging.getLogger("stemkv.engine.outbox").addHandler(listener)
    ask(engine, random_ids(20))
    logging.getLogger("stemkv.engine.outbox").removeHandler(listener)

    assert caught
    assert all("keep was called inside" in each for each in caught)


def test_a_reset_ends_orders_to_keep_and_leaves_their_share_to_others() -> None:
    engine, _ = build()
    kept = random_ids(48)
    engine.keep(tokens(kept), for_s=60.0, tenant="a")
    engine.reset()
    ask(engine, kept)

    assert engine.keep(tokens(random_ids(64, seed=1)), for_s=60.0, tenant="a") == 8
    flood(engine, 20)

    assert ask(engine, kept) == 0


# The public budget


def test_public_prefixes_beyond_their_budget_are_refused_and_forgotten() -> None:
    engine, _ = build(quotas=MemoryQuotas(public_bytes=2 * block_bytes()))
    head = random_ids(16)
    assert engine.declare_public(tokens(head)) == 2

    with pytest.raises(ConfigError, match="exceed public_blocks of 2.*8,192 bytes"):
        engine.declare_public(tokens(random_ids(8, seed=1)))

    engine.reset()  # declares again what is public
    assert ask(engine, [*head, 1], "a") == 0
    assert ask(engine, [*head, 2], "b") == 16


def test_an_adapter_s_copy_that_does_not_fit_the_budget_is_left_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = build(quotas=MemoryQuotas(public_bytes=2 * block_bytes()))
    engine.load_adapter("tuned", make_adapter(tmp_path, "llama-group1"))
    head = random_ids(16)
    engine.declare_public(tokens(head))

    hits = [
        ask(engine, [*head, 1], "a", adapter="tuned"),
        ask(engine, [*head, 2], "b", adapter="tuned"),
        ask(engine, [*head, 3], "a"),
        ask(engine, [*head, 4], "b"),
    ]

    assert hits == [0, 0, 0, 16]
    assert "stays private for one adapter" in caplog.text
