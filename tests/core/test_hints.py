"""Hints: checked where they are made, learnt from one by one, and harmless when wrong."""

from __future__ import annotations

import math
import random
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.check import check_cache
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.hints import HintDigits
from stemkv.core.retention.policy import Lru, ReuseIndex
from stemkv.core.retention.retention import Retention
from stemkv.errors import RequestError
from tests.core.builders import ALICE, BOB, NAMESPACE, tokens

# What may be said


@pytest.mark.parametrize(
    "fields, field, message",
    [
        ({"session": ""}, "session", "text of at most 256 characters, got ''"),
        ({"session": 7}, "session", "text of at most 256 characters, got 7"),
        ({"session": b"s"}, "session", "text of at most 256 characters, got b's'"),
        ({"session": "s" * 257}, "session", "text of at most 256 characters, got 'ss"),
        ({"ends_session": True}, "ends_session", "needs hints.session"),
        (
            {"session": "s", "ends_session": 1},
            "ends_session",
            "must be true or false, got 1",
        ),
        ({"next_use_s": -1}, "next_use_s", "seconds of at least 0, .* got -1"),
        ({"next_use_s": math.nan}, "next_use_s", "seconds of at least 0, .* got nan"),
        ({"next_use_s": True}, "next_use_s", "seconds of at least 0, .* got True"),
        ({"next_use_s": "9"}, "next_use_s", "seconds of at least 0, .* got '9'"),
        ({"ephemeral_from": -1}, "ephemeral_from", "position of at least 0, got -1"),
        ({"ephemeral_from": 1.0}, "ephemeral_from", "position of at least 0, got 1.0"),
        ({"ephemeral_from": True}, "ephemeral_from", "position .* got True"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_a_hint_that_makes_no_sense_fails_its_request(
    fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Hints(**fields)

    assert error.value.field == f"hints.{field}"


def test_a_message_about_a_hint_is_never_longer_than_it_need_be() -> None:
    with pytest.raises(RequestError) as error:
        Hints(next_use_s="9" * 10_000)  # type: ignore[arg-type]

    assert len(str(error.value)) < 200


def test_a_position_behind_any_prompt_makes_nothing_ephemeral() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=9, block_size=2), Retention(Lru))
    lease = cache.acquire(
        NAMESPACE,
        ALICE,
        tokens("abcdef"),
        Demand(num_slots=6),
        hints=Hints(ephemeral_from=10**30, session="s" * 256),
        now=0.0,
    )
    assert lease is not None
    assert cache.publish(lease, tokens("abcdef"), 6, 0.0) == 3
    cache.release(lease, 0.0)

    assert cache.usage().num_cached_blocks == 3


def test_whatever_may_be_said_may_be_left_out() -> None:
    assert Hints() == NO_HINTS
    assert Hints(session="s", ends_session=True).next_use_s is None
    assert Hints(next_use_s=0, ephemeral_from=0) == Hints(
        next_use_s=0.0, ephemeral_from=0
    )


# How it becomes a digit


def test_who_declares_nothing_has_the_digit_nought() -> None:
    digits = HintDigits()

    assert digits.of("a", NO_HINTS) == 0
    assert digits.of("a", Hints(session="s", ephemeral_from=3)) == 0
    assert digits.of("a", Hints(next_use_s=1.0)) == 1, "saying nothing took no group"


@pytest.mark.parametrize(
    "seconds, bucket",
    [
        (0, 0),
        (14.9, 0),
        (15, 1),
        (59.9, 1),
        (60, 2),
        (299.9, 2),
        (300, 3),
        (1e300, 3),
        (10**400, 3),
        (math.inf, 4),
    ],
    ids=lambda value: str(value)[:9],
)
def test_a_declared_time_falls_into_one_of_five_buckets(
    seconds: float, bucket: int
) -> None:
    assert HintDigits().of("a", Hints(next_use_s=seconds)) == 1 + bucket


def test_seven_tenants_have_digits_of_their_own_and_all_others_share() -> None:
    digits = HintDigits()
    often, never = Hints(next_use_s=1.0), Hints(next_use_s=math.inf)

    by_tenant = {
        name: (digits.of(name, often), digits.of(name, never)) for name in "abcdefghij"
    }

    own = [digit for name in "abcdefg" for digit in by_tenant[name]]
    assert len(set(own)) == 14
    assert by_tenant["h"] == by_tenant["i"] == by_tenant["j"]
    assert not set(by_tenant["h"]) & set(own)
    assert min(own) == 1
    assert max(by_tenant["h"]) == 40
    assert digits.of("a", often) == by_tenant["a"][0], "and keep them"


def test_any_number_of_tenants_takes_no_more_memory() -> None:
    digits = HintDigits()
    for number in range(1_000):
        digits.of(f"tenant {number}", Hints(next_use_s=1.0))

    assert len(digits._groups) == 7


# What a hint cannot do

SAID = st.builds(
    Hints,
    session=st.sampled_from(["s", "t"]),
    ends_session=st.booleans(),
    next_use_s=st.sampled_from([None, 0.0, 100.0, math.inf]),
)


@settings(deadline=None)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from([ALICE, BOB]), st.text("ab", min_size=1), SAID),
        max_size=30,
    )
)
def test_a_hint_changes_nothing_of_what_is_found_while_memory_lasts(
    acts: list[tuple[Domain, str, Hints]],
) -> None:
    config = CacheConfig(num_blocks=150, block_size=2)
    hinted, plain = (
        PrefixCache(config, Retention(lambda: ReuseIndex(150))) for _ in range(2)
    )
    for now, (domain, text, hints) in enumerate(acts):
        found = []
        for cache, said in ((hinted, hints), (plain, NO_HINTS)):
            lease = cache.acquire(
                NAMESPACE,
                domain,
                tokens(text),
                Demand(num_slots=len(text)),
                hints=said,
                now=float(now),
            )
            assert lease is not None
            found.append(lease.num_matched_tokens)
            cache.copied(lease, float(now))
            cache.publish(lease, tokens(text), len(text), float(now))
            cache.release(lease, float(now))
            if said.ends_session and said.session is not None:
                cache.end_session(domain, said.session, float(now))
            check_cache(cache, [])
        assert found[0] == found[1]
    assert hinted.usage() == plain.usage()


def test_a_hint_of_one_tenant_is_told_apart_from_anothers_by_the_policy() -> None:
    told: list[int] = []

    class Listening(Lru):
        def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
            told.append(hint)
            super().used(node_id, hint=hint, tick=tick, now=now)

    cache = PrefixCache(CacheConfig(num_blocks=20, block_size=1), Retention(Listening))
    for owner in ("one", "two", "one"):
        for seconds in (None, 1.0):
            lease = cache.acquire(
                NAMESPACE,
                ALICE,
                tokens("abc"),
                Demand(num_slots=3),
                owner=owner,
                hints=Hints(next_use_s=seconds),
                now=0.0,
            )
            assert lease is not None
            cache.publish(lease, tokens("abc"), 3, 0.0)
            cache.release(lease, 0.0)

    assert told[-1] == told[0]
    assert set(told) == {0, 1, 6}


# Lies


def hit_rates(*, honest: str, other: str, seed: int = 0) -> tuple[float, float]:
    """Two tenants with equal traffic on one memory: what each of them hits.

    Half of all prompts come back, after half a minute on average. Each tenant says
    nothing of that, or the truth, or whatever comes to its mind.
    """
    rng = random.Random(seed)
    num_blocks = 300
    cache = PrefixCache(
        CacheConfig(num_blocks=num_blocks, block_size=1),
        Retention(lambda: ReuseIndex(num_blocks)),
    )
    names = {"honest": honest, "other": other}
    hits, asked = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    due: list[tuple[float, int, str, int]] = []
    for number in range(2_400):
        heappush(due, (number * 0.25, number, ("honest", "other")[number % 2], 0))
    while due:
        now, number, name, num_uses = heappop(due)
        gap = rng.expovariate(1 / 30) if rng.random() < 0.5 else math.inf
        hints = {
            "silent": NO_HINTS,
            "true": Hints(next_use_s=gap),
            "random": Hints(next_use_s=rng.choice([1.0, 30.0, 100.0, 999.0, math.inf])),
        }[names[name]]
        prompt = TokenIds.from_ids([number, 0, 0, 0, 0]).buffer
        lease = cache.acquire(
            NAMESPACE,
            Domain.private("both"),
            prompt,
            Demand(num_slots=5),
            owner=name,
            hints=hints,
            now=now,
        )
        assert lease is not None
        if num_uses:
            hits[name] += lease.num_matched_tokens
            asked[name] += 4
        cache.publish(lease, prompt, 4, now)
        cache.release(lease, now)
        if gap < math.inf:
            heappush(due, (now + gap, number, name, num_uses + 1))
    return hits["honest"] / asked["honest"], hits["other"] / asked["other"]


def test_who_lies_gains_nothing_and_takes_nothing_from_who_does_not() -> None:
    silent, _ = hit_rates(honest="silent", other="silent")
    beside_silent, left_to_silent = hit_rates(honest="true", other="silent")
    beside_liar, left_to_liar = hit_rates(honest="true", other="random")

    assert beside_silent > silent + 0.3, "the truth helps, or this says nothing"
    assert beside_liar > beside_silent - 0.03
    assert left_to_liar < left_to_silent + 0.03


def test_who_tells_the_truth_as_another_does_gains_as_much() -> None:
    silent, _ = hit_rates(honest="silent", other="silent")
    one, other = hit_rates(honest="true", other="true")

    assert min(one, other) > silent + 0.2
