"""Quotas: floors are kept, caps hold, what is lent comes back, and nothing promises more
than there is (I37). Random walks over everything at once are in `test_quota_machine`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core.check import check_cache, check_quotas
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import BlocksEvicted
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.policy import Lru
from stemkv.core.retention.quota import Quota, QuotaConfig, Quotas
from stemkv.core.retention.retention import Retention
from stemkv.errors import ConfigError, InvariantError, PromptTooLong
from tests.core.builders import (
    ALICE,
    BOB,
    CREW,
    NAMESPACE,
    OTHER_NAMESPACE,
    Prompt,
    Sink,
    acquire,
    cached,
    hold,
    serve,
    span,
    tokens,
)
from tests.core.picture import picture

DAVE = Domain.private("dave")


def build(
    num_blocks: int,
    *,
    block_size: int = 1,
    public_blocks: int = 0,
    default: Quota | None = None,
    **quotas: Quota,
) -> PrefixCache:
    """A cache in which one letter is one block, unless told otherwise."""
    domains = {"alice": ALICE, "bob": BOB, "crew": CREW, "dave": DAVE}
    return PrefixCache(
        CacheConfig(num_blocks=num_blocks, block_size=block_size),
        Retention.of(
            Lru,
            CacheConfig(num_blocks=num_blocks, block_size=block_size),
            QuotaConfig(
                quotas={domains[name]: quota for name, quota in quotas.items()},
                default=Quota() if default is None else default,
                public_blocks=public_blocks,
            ),
        ),
    )


def floor(num_blocks: int, **rest: Any) -> Quota:
    return Quota(floor_blocks=num_blocks, **rest)


def retained(cache: PrefixCache, domain: Domain) -> int:
    return cache.usage_of(domain).num_cached_blocks


def public(text: str) -> TokenIds:
    return TokenIds(tokens(text))


# What an operator may ask for


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"floor_blocks": -1}, "floor_blocks must be an integer of at least 0, got -1"),
        ({"floor_blocks": 1.5}, "floor_blocks must be an integer .* got 1.5"),
        ({"floor_blocks": True}, "floor_blocks must be an integer .* got True"),
        ({"cap_blocks": -2}, "cap_blocks must be an integer of at least 0, got -2"),
        ({"cap_blocks": "9"}, "cap_blocks must be an integer .* got '9'"),
        (
            {"floor_blocks": 4, "cap_blocks": 3},
            "cap_blocks must not be below floor_blocks, got 3 and 4",
        ),
        ({"weight": 0}, "weight must be a number above 0, got 0"),
        ({"weight": -1.0}, "weight must be a number above 0, got -1.0"),
        ({"weight": math.inf}, "weight must be a number above 0, got inf"),
        ({"weight": math.nan}, "weight must be a number above 0, got nan"),
        ({"weight": True}, "weight must be a number above 0, got True"),
        ({"weight": "1"}, "weight must be a number above 0, got '1'"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_a_quota_that_makes_no_sense_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Quota(**fields)


def test_a_floor_for_whoever_may_come_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have no floor, got 2 blocks"):
        QuotaConfig(default=floor(2))


def test_public_prefixes_have_a_budget_and_no_quota() -> None:
    with pytest.raises(ConfigError, match="have public_blocks, not a quota"):
        QuotaConfig(quotas={PUBLIC: Quota()})
    with pytest.raises(ConfigError, match="public_blocks must be an integer"):
        QuotaConfig(public_blocks=-1)


@pytest.mark.parametrize("num_blocks", [8, 9], ids=["less", "equal"])
def test_floors_that_leave_nothing_to_run_in_are_refused_at_the_start(
    num_blocks: int,
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"floors of 7 blocks and public_blocks of 2 leave nothing of "
        f"{num_blocks} blocks",
    ):
        build(num_blocks, alice=floor(3), bob=floor(4), public_blocks=2)


def test_one_block_that_is_promised_to_nobody_is_enough() -> None:
    cache = build(10, alice=floor(3), bob=floor(4), public_blocks=2)

    assert cache.most_blocks(DAVE) == 1
    assert cache.most_blocks(ALICE) == 4
    assert cache.most_blocks(BOB) == 5


def test_a_promise_cannot_be_changed_behind_the_back_of_the_cache() -> None:
    quotas = {ALICE: floor(3)}
    config = QuotaConfig(quotas=quotas)

    quotas[BOB] = floor(100)

    assert config.num_promised_blocks == 3
    assert config.of(BOB) == Quota()


# Whose turn it is to give, against counts that are made anew each time

SOME = [ALICE, BOB, CREW, DAVE, PUBLIC]


class CountedAnew:
    """The words of the quota, O(domains) for each question."""

    def __init__(self, config: QuotaConfig) -> None:
        self.config = config
        self.retained: Counter[Domain] = Counter()
        self.known: list[Domain] = []  # in the order in which they came

    def change(self, domain: Domain, num_blocks: int) -> None:
        self.retained[domain] += num_blocks
        if domain not in self.known and domain != PUBLIC:
            self.known.append(domain)

    def above(self, domain: Domain) -> int:
        return max(0, self.retained[domain] - self.config.of(domain).floor_blocks)

    def lendable(self) -> int:
        return sum(map(self.above, self.known))

    def available_to(self, domain: Domain) -> int:
        others = sum(self.above(each) for each in self.known if each != domain)
        return others + self.retained[domain]

    def giver(self, domain: Domain | None) -> tuple[Domain, int] | None:
        givers = [each for each in self.known if self.above(each)]
        if givers:
            # `max` takes the first of equals.
            most = max(givers, key=lambda d: self.above(d) / self.config.of(d).weight)
            return most, self.above(most)
        if domain is not None and self.retained[domain]:
            return domain, self.retained[domain]
        return None


@given(
    floors=st.tuples(*[st.integers(0, 4)] * 3),
    caps=st.tuples(*[st.none() | st.integers(4, 9)] * 3),
    weights=st.tuples(*[st.sampled_from([0.3, 1.0, 3])] * 3),
    changes=st.lists(
        st.tuples(st.sampled_from(SOME), st.integers(-6, 6)), max_size=120
    ),
)
def test_counts_follow_every_change(
    floors: tuple[int, ...],
    caps: tuple[int | None, ...],
    weights: tuple[float, ...],
    changes: list[tuple[Domain, int]],
) -> None:
    config = QuotaConfig(
        quotas={
            domain: Quota(floor_blocks=f, cap_blocks=c, weight=w)
            for domain, f, c, w in zip(SOME[:3], floors, caps, weights, strict=True)
        },
        default=Quota(cap_blocks=7),
    )
    quotas, twin = Quotas(config, 100), CountedAnew(config)
    for domain, change in changes:
        change = max(change, -twin.retained[domain])
        quotas.change(domain, change)
        twin.change(domain, change)
        assert quotas.num_lendable_blocks == twin.lendable()
        for each in SOME:
            assert quotas.retained(each) == twin.retained[each]
            cap = 7 if each == DAVE else config.of(each).cap_blocks
            over = 0 if cap is None else max(0, twin.retained[each] - cap)
            assert quotas.over_cap(each) == (0 if each == PUBLIC else over)
            if each != PUBLIC:
                assert quotas.available_to(each) == twin.available_to(each)
        asks = domain if domain != PUBLIC else None
        assert quotas.giver(asks) == twin.giver(asks)
        assert quotas.giver(None) == twin.giver(None)
    assert quotas.retained_by_domain() == twin.retained


@given(
    own=st.integers(0, 9),
    others=st.integers(0, 9),
    num_used=st.integers(0, 9),
    floor_blocks=st.integers(0, 6),
)
def test_what_is_spared_is_what_the_floor_still_covers(
    own: int, others: int, num_used: int, floor_blocks: int
) -> None:
    quotas = Quotas(QuotaConfig(quotas={ALICE: floor(floor_blocks)}), 100)
    quotas.change(ALICE, own)
    quotas.change(BOB, others)
    num_used = min(num_used, own)

    left = own - num_used
    every = quotas.available_to(ALICE, num_used=num_used)
    sparing = quotas.available_to(ALICE, num_used=num_used, spares_floor=True)

    assert every == others + left
    assert every - sparing == min(left, floor_blocks)


def test_a_domain_that_comes_and_goes_leaves_no_pile_behind() -> None:
    quotas = Quotas(QuotaConfig(), 100)
    for _ in range(3_000):
        for domain in (ALICE, BOB):
            quotas.change(domain, 5)
            quotas.change(domain, -5)

    assert len(quotas._heap) < 100
    assert quotas.giver(None) is None
    assert not quotas._heap


def test_a_check_finds_counts_that_are_not_those_of_the_tree() -> None:
    cache = build(10, alice=floor(2), bob=Quota(cap_blocks=3))
    serve(cache, "abc")
    quotas = cache.keeper.quotas
    assert quotas is not None
    check_cache(cache, [])
    damages: list[tuple[Callable[[], object], str]] = [
        (lambda: quotas.change(ALICE, 1), "retained blocks"),
        (lambda: setattr(quotas, "_lendable", 0), "lendable blocks: 0, should be 1"),
        (lambda: quotas._heap.clear(), "is above its floor and cannot give"),
    ]
    for damage, message in damages:
        before = dict(vars(quotas)) | {"_heap": list(quotas._heap)}
        before["_retained"] = dict(quotas._retained)
        damage()
        with pytest.raises(InvariantError, match=message):
            check_cache(cache, [])
        vars(quotas).update(before)
    quotas.change(BOB, 4)
    with pytest.raises(InvariantError, match="over its cap: 1, should be 0"):
        check_quotas(quotas, {ALICE: 3, BOB: 4})


# Floors


def test_a_flood_takes_nothing_from_a_domain_at_its_floor() -> None:
    cache = build(12, alice=floor(4))
    serve(cache, "abcd")
    for start in range(8):
        text = "".join(chr(200 + 8 * start + i) for i in range(8))
        serve(cache, text, domain=BOB, now=float(start))

    assert cached(cache, "abcde") == 4
    assert retained(cache, BOB) == 8


def test_a_domain_above_its_floor_gives_down_to_it_and_no_further() -> None:
    cache = build(12, alice=floor(3))
    serve(cache, "abcdefgh")

    lease = acquire(cache, "uvwxyzUVW", domain=BOB)

    assert lease is not None
    assert cached(cache, "abcdefgh") == 3
    assert acquire(cache, "s", domain=BOB) is None
    check_cache(cache, [lease])


def test_a_floor_that_is_not_filled_is_lent_and_taken_back() -> None:
    cache = build(10, alice=floor(6))
    serve(cache, "uvwx", domain=BOB)
    serve(cache, "yzUV", domain=BOB)
    assert retained(cache, BOB) == 8, "nobody else wanted it"

    serve(cache, "abcdef", now=1.0)

    assert retained(cache, ALICE) == 6
    assert retained(cache, BOB) == 4
    assert acquire(cache, "ghij", domain=BOB, now=2.0) is not None
    assert retained(cache, ALICE) == 6, "taken back for good"


def test_of_those_above_their_floors_the_one_with_most_over_its_weight_gives() -> None:
    cache = build(16, alice=floor(4), bob=Quota(weight=0.5), crew=Quota(weight=4))
    serve(cache, "abcdef")  # 2 above
    serve(cache, "ghi", domain=BOB)  # 3, as good as 6
    serve(cache, "jklmnop", domain=CREW)  # 7, less than 2

    held = []
    gone = []
    for number in range(12):
        before = {d: retained(cache, d) for d in (ALICE, BOB, CREW)}
        lease = acquire(cache, chr(300 + number), domain=DAVE, now=1.0)
        if lease is None:
            break
        held.append(lease)
        gone += [d for d in before if retained(cache, d) < before[d]]

    assert gone == [BOB, BOB, ALICE, BOB, *[CREW] * 3, ALICE, *[CREW] * 4]
    assert len(held) == 12
    assert retained(cache, ALICE) == 4


def test_what_its_own_floor_covers_goes_only_when_nobody_is_above_his() -> None:
    """A domain that needs much does not cut into its floor while others are above."""
    cache = build(12, alice=floor(5))
    serve(cache, "abcdefg")
    serve(cache, "x", domain=BOB)

    lease = acquire(cache, "hijklmn", now=1.0)  # 4 are free

    assert lease is not None
    assert retained(cache, ALICE) == 5
    assert retained(cache, BOB) == 0
    more = acquire(cache, "op", now=2.0)
    assert more is not None, "at last it may use all that is its own"
    assert retained(cache, ALICE) == 3


def test_who_spares_its_floor_waits_for_others_instead() -> None:
    cache = build(10, alice=floor(4))
    serve(cache, "abcd")
    running = acquire(cache, "uvwxy", domain=BOB)
    assert running is not None

    def ask(text: str, *, spares_floor: bool) -> Lease | None:
        return cache.acquire(
            NAMESPACE,
            ALICE,
            tokens(text),
            Demand(num_slots=len(text), spares_floor=spares_floor),
            now=1.0,
        )

    before = picture(cache)
    assert ask("ef", spares_floor=True) is None
    assert picture(cache) == before
    # What it finds is no loss.
    found = ask("abcde", spares_floor=True)
    assert found is not None
    assert found.num_matched_tokens == 4
    cache.release(found, 1.0)
    assert ask("ef", spares_floor=False) is not None
    assert cached(cache, "abcde") == 3


def test_eviction_by_an_operator_leaves_every_floor_and_what_is_public() -> None:
    cache = build(20, alice=floor(3), public_blocks=2)
    cache.declare_public(NAMESPACE, public("xy"))
    serve(cache, "abcde")
    serve(cache, "xyz", domain=BOB)

    assert cache.evict(20, 1.0) == 3

    assert retained(cache, ALICE) == 3
    assert retained(cache, BOB) == 0
    assert cached(cache, "xyz", domain=DAVE) == 2


def test_the_last_block_given_may_part_a_span_whose_head_goes_with_it() -> None:
    """Nobody could match the head, and it would stand in the way of equal prompts."""
    cache = build(30, alice=floor(8))
    prompt = Prompt("abcd", span("cat", 16))
    lease = cache.acquire(NAMESPACE, ALICE, prompt.ids, Demand(num_slots=20), now=0.0)
    assert lease is not None
    cache.publish(lease, prompt.ids, 20, 0.0)
    cache.release(lease, 0.0)

    cache.evict(12, 1.0)

    assert retained(cache, ALICE) == 4
    assert cache.evict(4, 2.0) == 0, "it is below its floor now"


# Caps


def test_a_domain_over_its_cap_evicts_its_own_and_nobody_elses() -> None:
    events = Sink()
    cache = build(20, alice=Quota(cap_blocks=5))
    cache.subscribe(events)
    serve(cache, "uvwxyz", domain=BOB)
    serve(cache, "abc")
    serve(cache, "defg", now=1.0)

    assert retained(cache, ALICE) == 5
    assert cached(cache, "abcz") == 1, "the least recently used ones went"
    assert cached(cache, "defgz") == 4
    assert retained(cache, BOB) == 6
    evicted = [e for e in events.events if isinstance(e, BlocksEvicted)]
    assert [(e.domain, e.num_blocks) for e in evicted] == [(ALICE, 2)]
    assert cache.usage().num_free_blocks == 9


def test_a_cap_counts_what_is_retained_and_not_what_is_used() -> None:
    cache = build(20, alice=Quota(cap_blocks=2))
    lease = hold(cache, "abcdef")
    assert cached(cache, "abcdefg") == 6

    cache.release(lease, 1.0)

    assert cached(cache, "abcdefg") == 2


def test_a_cap_of_nothing_retains_nothing_and_shares_while_it_is_used() -> None:
    cache = build(20, default=Quota(cap_blocks=0))
    lease = hold(cache, "abc")
    assert serve(cache, "abcde") == 3
    assert retained(cache, ALICE) == 0

    cache.release(lease, 1.0)

    assert cache.usage().num_free_blocks == 20


def test_the_source_of_a_copy_counts_when_it_is_let_go() -> None:
    cache = build(20, block_size=2, alice=Quota(cap_blocks=2))
    first = hold(cache, "abcd")
    second = acquire(cache, "abcx")
    assert second is not None
    assert second.copy is not None
    cache.release(first, 1.0)
    assert retained(cache, ALICE) == 0, "all of it is pinned"

    cache.copied(second, 2.0)

    assert retained(cache, ALICE) == 1
    cache.publish(second, tokens("abcx"), 4, 2.0)
    cache.release(second, 3.0)
    assert retained(cache, ALICE) == 2
    check_cache(cache, [])


# What is public


def test_as_much_is_public_as_was_budgeted() -> None:
    cache = build(20, block_size=2, public_blocks=3)
    assert cache.declare_public(NAMESPACE, public("abcd")) == 2
    before = picture(cache)

    with pytest.raises(
        ConfigError, match="prefixes of 4 blocks exceed public_blocks of 3"
    ):
        cache.declare_public(OTHER_NAMESPACE, public("abcde"))

    assert picture(cache) == before
    assert cache.declare_public(NAMESPACE, public("abcd")) == 2, "not another one"
    assert cache.declare_public(OTHER_NAMESPACE, public("abc")) == 1
    cache.retire(NAMESPACE, 1.0)
    assert cache.declare_public(OTHER_NAMESPACE, public("xyzw")) == 2


def test_public_blocks_stay_whoever_needs_room() -> None:
    cache = build(10, public_blocks=3)
    cache.declare_public(NAMESPACE, public("abc"))
    serve(cache, "abcd")

    lease = acquire(cache, "uvwxyz!", domain=BOB, now=1.0)

    assert lease is not None
    assert cached(cache, "abcd", domain=BOB) == 3
    assert acquire(cache, "?", domain=ALICE, now=1.0) is None


# What is promised can be had


def fill(cache: PrefixCache) -> None:
    """Fill every floor, and more, with what nobody asks for again."""
    for number, domain in enumerate((ALICE, BOB, CREW)):
        text = "".join(chr(1000 + 50 * number + i) for i in range(6))
        serve(cache, text, domain=domain, now=float(number))


@pytest.mark.parametrize(
    "domain", [ALICE, BOB, CREW, DAVE], ids=lambda domain: repr(domain.name)
)
def test_the_largest_request_that_is_taken_always_fits_alone(domain: Domain) -> None:
    cache = build(16, alice=floor(3), bob=floor(5), crew=floor(2), public_blocks=2)
    cache.declare_public(NAMESPACE, public("xy"))
    serve(cache, "xyz")
    fill(cache)
    most = cache.most_blocks(domain)
    text = "".join(chr(5000 + i) for i in range(most))

    lease = acquire(cache, text, domain=domain, now=9.0)

    assert lease is not None
    check_cache(cache, [lease])
    before = picture(cache)
    with pytest.raises(
        PromptTooLong, match=f"need {most + 1} blocks .* can have {most} of 16"
    ):
        acquire(cache, text + "!", domain=domain, now=9.0)
    assert picture(cache) == before


def test_a_public_prefix_that_one_has_a_longer_copy_of_promises_nothing() -> None:
    """The copy was there first, so it is what matches, and the public one stays."""
    cache = build(8, block_size=2, public_blocks=2)
    serve(cache, "ababcc")
    cache.declare_public(NAMESPACE, public("abab"))
    serve(cache, "ababcc", domain=BOB)

    with pytest.raises(PromptTooLong, match="need 7 blocks .* can have 6 of 8"):
        acquire(cache, "ababccdddddddd")
    lease = acquire(cache, "ababccdddddd")
    assert lease is not None
    assert lease.num_matched_tokens == 6


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: acquire(cache, "uvw", domain=BOB),
        lambda cache: acquire(cache, "uv", domain=BOB, num_spare=1),
        lambda cache: acquire(cache, "abcdeuvw"),
        lambda cache: acquire(cache, "uvw", domain=BOB, namespace=None),
    ],
    ids=["too much", "nothing to spare", "its own in use", "unsharable"],
)
def test_what_does_not_fit_now_leaves_everything_bit_identical(
    ask: Callable[[PrefixCache], Lease | None],
) -> None:
    cache = build(8, alice=floor(5))
    serve(cache, "abcdef")
    running = acquire(cache, "1", domain=BOB)
    assert running is not None
    before = picture(cache)

    assert ask(cache) is None

    assert picture(cache) == before
    assert not cache.grow(running, 4, 1.0)
    assert picture(cache) == before


def test_a_shared_block_is_made_writable_only_with_room_that_is_ones_own() -> None:
    cache = build(4, block_size=2, alice=floor(2))
    serve(cache, "abcd")
    lease = acquire(cache, "xyz", domain=BOB)
    assert lease is not None
    cache.publish(lease, tokens("xyz"), 2, 0.0)
    twin = cache.fork(lease, 0.0)
    before = picture(cache)

    assert cache.prepare_write(twin, 3, 1.0) == (False, None)

    assert picture(cache) == before
    cache.evict(4, 1.0, domain=ALICE)
    is_ready, copy = cache.prepare_write(twin, 3, 1.0)
    assert is_ready
    assert copy is not None


def test_others_see_nothing_of_a_floor_but_that_room_is_missing() -> None:
    """Usage of a domain does not depend on what others retain (I3)."""
    alone = build(12, alice=floor(4))
    beside = build(12, alice=floor(4))
    serve(beside, "abcd")
    for cache in (alone, beside):
        serve(cache, "uvw", domain=BOB)

    assert alone.usage_of(BOB) == beside.usage_of(BOB)
    assert cached(alone, "uvwx", domain=BOB) == cached(beside, "uvwx", domain=BOB)
