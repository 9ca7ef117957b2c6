"""What goes first and what goes late: sessions, queues, orders to keep, single uses (I22).

One letter is one block, so a test shows its tree. `WatchedCache` looks at every eviction
there is and objects when something else had to go first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.check import check_cache, check_retention
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import BlocksEvicted, BlocksRefused
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.lookahead import Waiting
from stemkv.core.retention.policy import EvictionPolicy, Lru, ReuseIndex
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.errors import ConfigError, InvariantError
from tests.core.builders import (
    ALICE,
    BOB,
    CREW,
    NAMESPACE,
    OTHER_NAMESPACE,
    Prompt,
    ResidentBlock,
    Sink,
    cached,
    count_calls,
    resident,
    span,
    tokens,
)
from tests.core.picture import picture
from tests.core.scheduling import Driver
from tests.core.watching import WatchedCache

CHAT = Hints(session="chat")
ONCE = Hints(ephemeral_from=0)


def build(
    num_blocks: int = 20,
    *,
    block_size: int = 1,
    quotas: QuotaConfig | None = None,
    make_policy: Callable[[], EvictionPolicy] = Lru,
    **config: Any,
) -> WatchedCache:
    return WatchedCache(
        CacheConfig(num_blocks=num_blocks, block_size=block_size, **config),
        make_policy,
        quotas=quotas,
    )


def hold(
    cache: PrefixCache,
    text: str,
    *,
    domain: Domain = ALICE,
    namespace: bytes = NAMESPACE,
    hints: Hints = NO_HINTS,
    now: float = 0.0,
) -> Lease:
    """Acquire, compute and publish a text; the lease stays alive."""
    lease = cache.acquire(
        namespace,
        domain,
        tokens(text),
        Demand(num_slots=len(text)),
        hints=hints,
        now=now,
    )
    assert lease is not None, "the test's cache is too small"
    cache.copied(lease, now)
    cache.publish(lease, tokens(text), len(text), now)
    return lease


def serve(cache: PrefixCache, text: str, **how: Any) -> int:
    """Let a request come and go; return how many of its tokens were cached."""
    lease = hold(cache, text, **how)
    cache.release(lease, how.get("now", 0.0))
    check_cache(cache, [])
    return lease.num_matched_tokens


def whole(cache: PrefixCache, text: str, domain: Domain = ALICE) -> int:
    """How many blocks of the text are resident."""
    return cached(cache, text + "?", domain=domain)


def order_of_going(cache: PrefixCache, *texts: str, now: float = 100.0) -> str:
    """Evict one block after another; return the first letters of the texts that lost."""
    gone = ""
    while True:
        before = [whole(cache, text) for text in texts]
        if not cache.evict(1, now):
            return gone
        check_cache(cache, [])
        for text, num_before in zip(texts, before, strict=True):
            gone += text[0] * (num_before - whole(cache, text))


# Sessions


def test_blocks_of_an_ended_session_go_before_all_others() -> None:
    cache = build()
    serve(cache, "abc")
    serve(cache, "xyz", hints=CHAT, now=1.0)

    cache.end_session(ALICE, "chat", 2.0)

    assert order_of_going(cache, "abc", "xyz") == "xxxaaa"
    assert cache.num_gone("ended") == 3


def test_of_ended_sessions_the_one_that_ended_first_goes_first() -> None:
    cache = build()
    for session in "abc":
        serve(cache, session, hints=Hints(session=session))

    for session in "bca":
        cache.end_session(ALICE, session, 1.0)

    assert order_of_going(cache, "a", "b", "c") == "bca"


def test_a_block_that_somebody_else_used_is_not_the_sessions_any_more() -> None:
    cache = build()
    serve(cache, "abcd", hints=CHAT)
    serve(cache, "abx", now=1.0)

    cache.end_session(ALICE, "chat", 2.0)

    assert cache.evict(20, 3.0) == 5
    # "cd" as of an ended session; "x" and "ab" as any other.
    assert (cache.num_gone("ended"), cache.num_gone("ordinary")) == (2, 3)


def test_two_sessions_that_used_a_block_can_neither_of_them_end_it() -> None:
    cache = build()
    serve(cache, "ab", hints=Hints(session="one"))
    serve(cache, "ab", hints=Hints(session="two"))
    for session in ("one", "two"):
        cache.end_session(ALICE, session, 1.0)

    order_of_going(cache, "ab")

    assert cache.num_gone("ended") == 0


@pytest.mark.parametrize("again", [CHAT, NO_HINTS], ids=["itself", "another"])
def test_a_block_of_an_ended_session_that_is_used_is_an_ordinary_one(
    again: Hints,
) -> None:
    cache = build()
    serve(cache, "ab", hints=CHAT)
    cache.end_session(ALICE, "chat", 1.0)

    assert serve(cache, "abc", hints=again, now=2.0) == 2

    serve(cache, "x", now=3.0)
    assert order_of_going(cache, "abc", "x") == "aaax"
    assert cache.num_gone("ended") == 0


def test_a_session_that_goes_on_after_its_end_can_end_again() -> None:
    cache = build()
    serve(cache, "x")
    serve(cache, "ab", hints=CHAT)
    cache.end_session(ALICE, "chat", 1.0)
    serve(cache, "abc", hints=CHAT, now=2.0)
    cache.end_session(ALICE, "chat", 3.0)

    assert order_of_going(cache, "abc", "x") == "aaax"
    assert cache.num_gone("ended") == 3


def test_sessions_of_two_domains_with_one_name_are_two() -> None:
    cache = build()
    serve(cache, "ab", hints=CHAT)
    serve(cache, "xy", hints=CHAT, domain=BOB)
    serve(cache, "pq", hints=CHAT, domain=CREW)

    cache.end_session(BOB, "chat", 1.0)
    cache.end_session(CREW, "nothing", 1.0)
    cache.evict(3, 2.0)

    assert cache.num_gone("ended") == 2
    assert whole(cache, "ab") == 1
    assert whole(cache, "xy", BOB) == 0
    assert whole(cache, "pq", CREW) == 2


def test_what_is_public_is_no_sessions_so_nobody_can_end_it() -> None:
    cache = build()
    cache.declare_public(NAMESPACE, TokenIds(tokens("ab")))
    serve(cache, "x", domain=BOB)
    serve(cache, "abcd", hints=CHAT)

    cache.end_session(ALICE, "chat", 1.0)
    cache.evict(3, 2.0)

    assert whole(cache, "abcd", BOB) == 2
    assert whole(cache, "x", BOB) == 0
    assert cache.num_gone("ended") == 2


def test_a_session_that_ends_while_one_of_its_requests_runs_ends_for_it_too() -> None:
    cache = build()
    serve(cache, "x")
    running = hold(cache, "ab", hints=CHAT)
    cache.end_session(ALICE, "chat", 1.0)
    check_cache(cache, [running])

    cache.release(running, 2.0)

    assert order_of_going(cache, "ab", "x") == "aax"


def test_the_end_of_a_session_that_never_was_is_nothing() -> None:
    cache = build()
    serve(cache, "ab", hints=CHAT)
    before = picture(cache)

    cache.end_session(ALICE, "another", 1.0)
    cache.end_session(BOB, "chat", 1.0)

    assert picture(cache) == before


class Users:
    """Who used each resident block, and which of them are of an ended session."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.sessions: dict[ResidentBlock, set[str | None]] = {}
        self.ended: set[ResidentBlock] = set()

    def served(self, text: str, domain: Domain, session: str | None) -> None:
        for key in self._look():
            if tokens(text).startswith(key.prefix) and key.domain_name == domain.name:
                self.sessions.setdefault(key, set()).add(session)
                self.ended.discard(key)

    def end(self, domain: Domain, session: str) -> None:
        for key, sessions in self.sessions.items():
            if key.domain_name == domain.name and sessions == {session}:
                self.ended.add(key)

    def first(self) -> set[ResidentBlock]:
        """Leaves of ended sessions, or all if there is none."""
        keys = self._look()
        leaves = {
            key
            for key in keys
            if not any(
                other != key
                and other.prefix.startswith(key.prefix)
                and other.domain_name == key.domain_name
                for other in keys
            )
        }
        return leaves & self.ended or leaves

    def _look(self) -> set[ResidentBlock]:
        keys = set(resident(self.cache))
        self.ended &= keys
        self.sessions = {k: v for k, v in self.sessions.items() if k in keys}
        return keys


@settings(deadline=None)
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["serve", "serve", "serve", "end", "evict"]),
            st.sampled_from([ALICE, BOB]),
            st.text("ab", min_size=1, max_size=6),
            st.sampled_from([None, "s", "t"]),
        ),
        max_size=40,
    )
)
def test_the_first_to_go_is_of_an_ended_session_if_any_is(
    acts: list[tuple[str, Domain, str, str | None]],
) -> None:
    cache = build(14)
    users = Users(cache)
    for now, (verb, domain, text, session) in enumerate(acts):
        if verb == "serve":
            hints = NO_HINTS if session is None else Hints(session=session)
            # Room is made block by block, so that every victim is looked at.
            while cache.num_missing_blocks(
                NAMESPACE, domain, tokens(text), Demand(num_slots=len(text))
            ) or cache.pool.num_free < len(text):
                evict_one(cache, users, float(now))
            serve(cache, text, domain=domain, hints=hints, now=float(now))
            users.served(text, domain, session)
        elif verb == "end" and session is not None:
            cache.end_session(domain, session, float(now))
            users.end(domain, session)
        else:
            evict_one(cache, users, float(now))


def evict_one(cache: PrefixCache, users: Users, now: float) -> None:
    expected = users.first()
    before = set(resident(cache))
    cache.evict(1, now)
    assert before - set(resident(cache)) <= expected
    check_cache(cache, [])


# The queue


def queue(cache: PrefixCache, *texts: str, domain: Domain = ALICE) -> None:
    waiting = [Waiting(NAMESPACE, domain, tokens(text)) for text in texts]
    cache.watch_queue(lambda now: waiting)


def test_what_waiting_requests_will_hit_goes_late_and_the_farthest_first() -> None:
    cache = build()
    for text in ("abc", "def", "ghi", "xyz"):
        serve(cache, text)
    queue(cache, "ghi?", "abc?", "def?")

    assert order_of_going(cache, "abc", "def", "ghi", "xyz") == "xxxdddaaaggg"
    assert cache.num_gone("awaited") == 9


def test_of_a_leaf_only_what_will_be_hit_goes_late() -> None:
    cache = build()
    serve(cache, "abcdef")
    serve(cache, "xyz", now=1.0)
    queue(cache, "abc?")

    cache.evict(6, 2.0)

    assert whole(cache, "abcdef") == 3
    assert whole(cache, "xyz") == 0
    assert cache.num_gone("awaited") == 0


def test_a_leaf_that_two_wait_for_is_parted_where_the_nearer_one_ends() -> None:
    cache = build()
    serve(cache, "abcdef")
    serve(cache, "xyz")
    queue(cache, "abc?", "xyz?", "abcde?")

    # "f" nobody hits; "de" is the third one's; "xyz" the second one's.
    assert order_of_going(cache, "abcdef", "xyz") == "aaaxxxaaa"
    assert cache.num_gone("ordinary") == 1


def test_who_looks_up_a_leaf_behind_a_branch_holds_the_branch_as_well() -> None:
    cache = build()
    serve(cache, "abcd")
    serve(cache, "abxy", now=1.0)
    serve(cache, "p", now=2.0)
    queue(cache, "abcd?")

    assert order_of_going(cache, "abcd", "p", now=3.0)[-4:] == "aaaa"


def test_the_last_token_is_computed_in_any_case_so_its_block_is_not_awaited() -> None:
    cache = build()
    serve(cache, "abc")
    queue(cache, "abc")

    cache.evict(1, 1.0)

    assert cache.num_gone("awaited") == 0
    assert cache.num_gone("ordinary") == 1


@pytest.mark.parametrize(
    "waiting",
    [
        Waiting(OTHER_NAMESPACE, ALICE, tokens("abc?")),
        Waiting(None, ALICE, tokens("abc?")),
        Waiting(NAMESPACE, BOB, tokens("abc?")),
        Waiting(NAMESPACE, CREW, tokens("abc?")),
    ],
    ids=["another namespace", "unsharable", "another domain", "a group"],
)
def test_who_could_not_hit_a_block_keeps_it_from_nobody(waiting: Waiting) -> None:
    cache = build()
    serve(cache, "abc")
    serve(cache, "xyz", now=1.0)
    cache.watch_queue(lambda now: [waiting])

    assert order_of_going(cache, "abc", "xyz") == "aaaxxx"


def test_public_blocks_are_awaited_by_whoever_may_see_them() -> None:
    cache = build()
    cache.declare_public(NAMESPACE, TokenIds(tokens("ab")))
    serve(cache, "abc")
    serve(cache, "xyz", now=1.0)
    queue(cache, "abq?", domain=BOB)

    cache.evict(4, 2.0)

    assert whole(cache, "ab", BOB) == 2
    assert whole(cache, "xyz") == 0


def test_a_block_that_is_no_longer_awaited_is_an_ordinary_one_again() -> None:
    cache = build()
    serve(cache, "abc")
    serve(cache, "xyz", now=1.0)
    waiting = [Waiting(NAMESPACE, ALICE, tokens("abc?"))]
    cache.watch_queue(lambda now: waiting)
    cache.evict(4, 2.0)
    assert whole(cache, "abc") == 2
    serve(cache, "xyz", now=3.0)

    waiting.clear()

    assert order_of_going(cache, "abc", "xyz") == "aaxxx"


def test_who_moves_up_in_the_queue_moves_up_in_memory() -> None:
    cache = build()
    for text in ("abc", "def", "xyz"):
        serve(cache, text)
    waiting = [Waiting(NAMESPACE, ALICE, tokens(f"{text}?")) for text in ("abc", "def")]
    cache.watch_queue(lambda now: waiting)
    cache.evict(4, 1.0)
    assert whole(cache, "def") == 2

    waiting.reverse()

    assert order_of_going(cache, "abc", "def") == "aaadd"


def test_an_ended_session_that_somebody_waits_for_goes_late() -> None:
    cache = build()
    serve(cache, "abc", hints=CHAT)
    serve(cache, "xyz")
    cache.end_session(ALICE, "chat", 1.0)
    queue(cache, "ab?")

    assert order_of_going(cache, "abc", "xyz") == "axxxaa"


def test_a_domain_over_its_cap_looks_at_the_queue_as_well() -> None:
    cache = build(quotas=QuotaConfig(default=Quota(cap_blocks=3)))
    serve(cache, "abc")
    queue(cache, "abc?")

    serve(cache, "xyz", now=1.0)

    assert whole(cache, "abc") == 3
    assert whole(cache, "xyz") == 0


def test_the_queue_is_asked_only_when_something_has_to_go() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=6, block_size=1), Retention(Lru))
    asked = []

    def waiting(now: float) -> list[Waiting]:
        asked.append(now)
        return []

    cache.watch_queue(waiting)
    serve(cache, "abc")
    serve(cache, "xyz")
    assert asked == []

    serve(cache, "q", now=5.0)

    assert asked == [5.0]


def test_a_long_queue_costs_little_for_each_leaf() -> None:
    """Calls per block that goes, beside a queue of requests that hit nothing here."""

    def cost(num_waiting: int) -> int:
        cache = PrefixCache(CacheConfig(num_blocks=400, block_size=1), Retention(Lru))
        for number in range(100):
            serve_many = chr(1000 + number) * 3
            serve(cache, serve_many)
        texts = [chr(5000 + i) + "bc" for i in range(num_waiting)]
        queue(cache, *texts)
        return count_calls(lambda: cache.evict(200, 1.0))

    assert cost(512) < cost(0) + 20 * 512


# The queue of a scheduler


def driver_with(num_blocks: int, **limits: Any) -> tuple[Driver, WatchedCache]:
    cache: list[WatchedCache] = []

    def make_cache(config: CacheConfig) -> WatchedCache:
        cache.append(WatchedCache(config, Lru))
        return cache[0]

    driver = Driver(
        num_blocks=num_blocks, block_size=1, make_cache=make_cache, **limits
    )
    return driver, cache[0]


@pytest.mark.parametrize(
    "lookahead, num_found", [(0, 0), (1, 0), (2, 3), (32, 3)], ids=str
)
def test_what_the_first_in_the_queue_will_hit_stays(
    lookahead: int, num_found: int
) -> None:
    driver, cache = driver_with(14, max_num_running=1, lookahead=lookahead)
    driver.serve("old", "abc", max_new_tokens=1)
    driver.serve("new", "bbb", max_new_tokens=1)
    driver.add("runs", "c" * 4, max_new_tokens=7)
    driver.step()
    driver.add("first", "caca", max_new_tokens=1)
    driver.add("second", "abca", max_new_tokens=1)
    driver.run()

    assert driver.num_cached("second") == num_found
    assert cache.num_gone("ordinary") > 0
    driver.finish()


@pytest.mark.parametrize("lookahead, num_lost", [(0, 1), (32, 0)], ids=str)
def test_a_preempted_request_stands_in_the_queue_as_well(
    lookahead: int, num_lost: int
) -> None:
    """What it computed was used longer ago than what another request left since."""
    driver, _ = driver_with(22, max_num_running=3, token_budget=16, lookahead=lookahead)
    driver.add("elder", "ab", max_new_tokens=16)
    driver.add("short", "ccccc", max_new_tokens=5)
    driver.add("younger", "bbbb", max_new_tokens=8)
    driver.run()

    younger = driver.requests["younger"]
    assert younger.num_preemptions == 1
    assert younger.counts.recomputed == num_lost
    driver.finish()


def test_how_far_is_looked_ahead_is_a_number() -> None:
    with pytest.raises(ConfigError, match="lookahead must be at least 0, got -1"):
        SchedulerConfig(lookahead=-1)
    with pytest.raises(ConfigError, match="lookahead must be an integer, got 1.5"):
        SchedulerConfig(lookahead=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("end", ["finished", "cancelled"])
def test_a_session_ends_with_the_request_that_ends_it(
    end: str, num_samples: int
) -> None:
    """With all of its samples, however it ends."""
    driver, cache = driver_with(60)
    driver.serve("turn", "abc", hints=CHAT, max_new_tokens=1)
    driver.serve("other", "ccc", max_new_tokens=1)
    last = Hints(session="chat", ends_session=True)
    driver.add("last", "abca", hints=last, max_new_tokens=6, num_samples=num_samples)
    for _ in range(3):
        driver.step()
    retention = cache.keeper
    assert not retention._ended, "it is still under way"
    if end == "cancelled":
        for request in driver.scheduler.requests():
            assert not retention._ended
            driver.cancel(request.request_id)
    driver.run()

    assert retention._ended
    cache.evict(3, driver.now)
    assert cache.num_gone("ended") == 3
    driver.finish()


def test_an_end_that_a_request_brings_is_its_own_domains() -> None:
    driver, cache = driver_with(60)
    driver.serve("a", "abc", tenant="a", hints=CHAT, max_new_tokens=1)
    last = Hints(session="chat", ends_session=True)
    driver.serve("b", "abc", tenant="b", hints=last, max_new_tokens=1)

    domains = {cache.tree.node(each).domain.name for each in cache.keeper._ended}

    assert domains == {"b"}
    driver.finish()


# Once and never again


def test_what_is_used_once_is_dropped_with_its_last_lease() -> None:
    events = Sink()
    cache = build()
    cache.subscribe(events)

    serve(cache, "abcdef", hints=Hints(ephemeral_from=2))

    assert whole(cache, "abcdef") == 2
    assert cache.pool.num_free == 18
    assert events.total(BlocksRefused) == 4
    assert events.total(BlocksEvicted) == 0
    assert cache.usage().num_evicted_blocks == 0


def test_a_block_that_is_used_once_in_part_is_used_once() -> None:
    cache = build(block_size=4)

    serve(cache, "abcdefghijkl", hints=Hints(ephemeral_from=5))

    assert cached(cache, "abcdefghijkl?") == 4


def test_while_a_request_runs_others_may_use_what_it_uses_once() -> None:
    """And if one does, it stays."""
    cache = build()
    first = hold(cache, "abcdef", hints=Hints(ephemeral_from=1))
    second = hold(cache, "abcx", now=1.0)
    assert second.num_matched_tokens == 3

    cache.release(first, 2.0)
    check_cache(cache, [second])
    assert whole(cache, "abcdef") == 3, "nobody else used the rest"
    cache.release(second, 3.0)

    assert whole(cache, "abcx") == 4
    check_cache(cache, [])


@pytest.mark.parametrize("last", ["the first", "the second"])
def test_forks_drop_it_when_the_last_of_them_ends(last: str) -> None:
    cache = build()
    first = hold(cache, "abcd", hints=Hints(ephemeral_from=2))
    second = cache.fork(first, 1.0)
    one, other = (second, first) if last == "the first" else (first, second)

    cache.release(one, 2.0)
    assert whole(cache, "abcd") == 4
    check_cache(cache, [other])
    cache.release(other, 3.0)

    assert whole(cache, "abcd") == 2
    check_cache(cache, [])


def test_what_forks_add_is_used_once_like_what_they_share() -> None:
    cache = build()
    first = hold(cache, "ab", hints=Hints(ephemeral_from=1))
    second = cache.fork(first, 0.0)
    for lease, text in ((first, "abcd"), (second, "abxy")):
        assert cache.grow(lease, 4, 1.0)
        cache.publish(lease, tokens(text), 4, 1.0)
    check_cache(cache, [first, second])

    cache.release(first, 2.0)
    cache.release(second, 2.0)

    assert cache.pool.num_free == 19
    assert whole(cache, "abcd") == 1


def test_the_source_of_a_copy_was_used_by_another() -> None:
    cache = build(block_size=4)
    first = hold(cache, "abcdefgh", hints=ONCE)
    second = cache.acquire(
        NAMESPACE, ALICE, tokens("abcdefXY"), Demand(num_slots=8), now=1.0
    )
    assert second is not None
    assert second.copy is not None
    cache.release(first, 2.0)
    check_cache(cache, [second])

    cache.copied(second, 3.0)

    assert cached(cache, "abcdefgh?") == 8
    cache.release(second, 4.0)
    check_cache(cache, [])


def test_what_is_public_is_kept_whatever_a_caller_says() -> None:
    cache = build()
    cache.declare_public(NAMESPACE, TokenIds(tokens("ab")))

    serve(cache, "abcd", hints=ONCE)

    assert whole(cache, "abcd", BOB) == 2
    assert cache.pool.num_free == 18


def test_a_parent_whose_children_are_refused_can_be_evicted_once() -> None:

    class Strict(Lru):
        def became_evictable(self, node_id: int, *, now: float) -> None:
            assert node_id not in self._leaves
            super().became_evictable(node_id, now=now)

    cache = build(make_policy=Strict)
    serve(cache, "ab")
    leases = [hold(cache, f"ab{letter}", hints=ONCE) for letter in "xyz"]

    for lease in leases:
        cache.release(lease, 1.0)

    check_cache(cache, [])
    assert cache.evict(20, 2.0) == 2


def test_what_is_retained_never_ends_where_it_could_not_be_matched() -> None:
    """Nor stands in the way of equal prompts: a span is not parted (I19)."""
    cache = build(40, block_size=4)
    prompt = Prompt("ab", span("cat", 10), "cdefgh")
    for hints in (Hints(ephemeral_from=4), NO_HINTS):
        lease = cache.acquire(
            NAMESPACE, ALICE, prompt.ids, Demand(num_slots=18), hints=hints, now=0.0
        )
        assert lease is not None
        cache.publish(lease, prompt.ids, 18, 0.0)
        assert lease.num_published_blocks == 4
        cache.release(lease, 0.0)
        check_cache(cache, [])

    assert cache.peek(NAMESPACE, ALICE, prompt.ids).num_tokens == 16


def test_with_nothing_ephemeral_left_nothing_is_refused() -> None:
    cache = build()
    serve(cache, "abc", hints=Hints(ephemeral_from=3))

    assert whole(cache, "abc") == 3


@pytest.mark.parametrize("quotas", [None, QuotaConfig(default=Quota(cap_blocks=2))])
def test_unsound_kv_is_forgotten_up_to_its_beginning(
    quotas: QuotaConfig | None,
) -> None:
    """Also where its tail went at the release: as used once, or as over the cap."""
    cache = build(quotas=quotas)
    lease = hold(cache, "abcdef", hints=Hints(ephemeral_from=4))

    cache.release(lease, 1.0)
    cache.forget(lease, 1.0)

    assert whole(cache, "abcdef") == 0
    assert cache.pool.num_free == 20
    check_cache(cache, [])


# An operator's orders


def keep(
    cache: PrefixCache,
    text: str,
    until: float,
    *,
    domain: Domain = ALICE,
    now: float = 0.0,
) -> int:
    prefix = TokenIds(tokens(text))
    return cache.keep(NAMESPACE, domain, prefix, until=until, now=now)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_what_is_kept_goes_last_whether_it_is_there_already_or_comes_later(
    is_first: bool,
) -> None:
    cache = build()
    if is_first:
        assert keep(cache, "abc", 50.0) == 3
    serve(cache, "abc")
    if not is_first:
        assert keep(cache, "abc", 50.0) == 3
    serve(cache, "xyz", now=1.0)
    queue(cache, "xyz?")

    assert order_of_going(cache, "abc", "xyz", now=2.0) == "xxxaaa"
    assert cache.num_gone("kept") == 3


def test_whoever_is_kept_shortest_goes_first_and_others_before_both() -> None:
    cache = build()
    keep(cache, "abc", 60.0)
    keep(cache, "def", 50.0)
    for text in ("abc", "def", "xyz"):
        serve(cache, text)

    assert order_of_going(cache, "abc", "def", "xyz", now=2.0) == "xxxdddaaa"


def test_when_its_time_is_over_a_prefix_is_ordinary_again() -> None:
    cache = build()
    keep(cache, "abc", 50.0)
    serve(cache, "abc")
    serve(cache, "xyz", now=1.0)

    assert order_of_going(cache, "abc", "xyz", now=50.0) == "aaaxxx"
    assert cache.num_gone("kept") == 0


def test_only_the_prefix_is_kept_and_not_what_continues_it() -> None:
    """Its end may lie in the middle of an edge, and a later branch may divide it."""
    cache = build()
    serve(cache, "abcdef")
    keep(cache, "abc", 50.0)
    serve(cache, "xyz", now=1.0)
    cache.evict(6, 2.0)
    assert whole(cache, "abcdef") == 3
    serve(cache, "abcdef", now=3.0)
    serve(cache, "abqr", now=4.0)
    assert cache.num_gone("kept") == 0

    cache.evict(5, 5.0)

    assert whole(cache, "abc") == 3
    assert cache.num_gone("kept") == 0


def test_of_a_block_that_is_kept_in_part_nothing_is_kept() -> None:
    cache = build(block_size=4)
    assert keep(cache, "abcdef", 50.0) == 1
    assert keep(cache, "abc", 50.0) == 0
    serve(cache, "abcdefgh")

    cache.evict(1, 1.0)

    assert cached(cache, "abcdefgh") == 4


def test_of_orders_that_overlap_the_longest_time_counts() -> None:
    cache = build()
    serve(cache, "abcd")
    keep(cache, "abcd", 90.0)
    keep(cache, "ab", 40.0)
    serve(cache, "xyz", now=1.0)

    assert order_of_going(cache, "abcd", "xyz", now=60.0) == "xxxaaaa"
    assert cache.num_gone("kept") == 4


@pytest.mark.parametrize("order", [("ab", "abcd"), ("abcd", "ab")], ids=str)
def test_an_order_that_is_taken_back_leaves_the_others(order: tuple[str, str]) -> None:
    cache = build()
    serve(cache, "abcd")
    for text in order:
        keep(cache, text, 90.0)
    keep(cache, "abcd", 0.0)
    serve(cache, "xyz", now=1.0)

    assert order_of_going(cache, "abcd", "xyz", now=2.0) == "aaxxxaa"


def test_an_order_for_one_domain_is_not_for_another() -> None:
    cache = build()
    keep(cache, "abc", 50.0, domain=BOB)
    serve(cache, "abc")
    serve(cache, "xyz", now=1.0)

    assert order_of_going(cache, "abc", "xyz", now=2.0) == "aaaxxx"


def test_orders_of_two_domains_for_one_text_are_two_orders() -> None:
    cache = build()
    serve(cache, "ab")
    serve(cache, "xy")
    keep(cache, "ab", 90.0, domain=BOB)
    keep(cache, "ab", 40.0)

    assert order_of_going(cache, "ab", "xy", now=60.0) == "aaxx"


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("domain", [PUBLIC, ALICE], ids=["public", "alice"])
def test_a_public_prefix_is_kept_whoever_brings_it_in(
    domain: Domain, is_first: bool
) -> None:
    cache = build()
    cache.declare_public(NAMESPACE, TokenIds(tokens("ab")))
    if is_first:
        keep(cache, "ab", 50.0, domain=domain)
    serve(cache, "abcd", domain=BOB)
    if not is_first:
        keep(cache, "ab", 50.0, domain=domain)
    serve(cache, "xyz", domain=BOB, now=1.0)

    cache.evict(5, 2.0)

    assert whole(cache, "abcd", BOB) == 2


def test_an_order_for_what_is_public_keeps_no_private_copies() -> None:
    """They could be any number, and the share that may be kept counts one."""
    cache = build()
    serve(cache, "ab")
    cache.declare_public(NAMESPACE, TokenIds(tokens("ab")))
    keep(cache, "ab", 50.0, domain=PUBLIC)
    serve(cache, "xy", now=1.0)

    assert order_of_going(cache, "ab", "xy", now=2.0) == "aaxx"


def test_no_more_is_kept_than_an_operator_allowed_himself() -> None:
    cache = build(max_kept_share=0.25)
    keep(cache, "abc", 50.0)
    before = picture(cache)

    with pytest.raises(ConfigError, match="keeping 3 blocks beside 3 exceeds the 5"):
        keep(cache, "xyz", 50.0)

    assert picture(cache) == before
    keep(cache, "abc", 60.0)  # the same again
    keep(cache, "abc", 0.0)  # taken back
    assert keep(cache, "vwxyz", 50.0) == 5
    with pytest.raises(ConfigError, match="keeping 1 blocks beside 5"):
        keep(cache, "q", 50.0)
    assert keep(cache, "q", 90.0, now=50.0) == 1, "that order's time is over"


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", float("nan")])
def test_a_share_that_makes_no_sense_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="max_kept_share must be a number in"):
        CacheConfig(num_blocks=4, max_kept_share=share)


def test_a_fence_ends_the_orders_of_what_it_fences() -> None:
    cache = build(max_kept_share=0.25)
    keep(cache, "abcde", 50.0)
    serve(cache, "abcde")
    running = hold(cache, "abcdef")

    cache.retire(NAMESPACE, 1.0)
    check_cache(cache, [running])
    cache.release(running, 1.0)

    assert keep(cache, "vwxyz", 50.0, now=2.0) == 5, "the share is free again"
    serve(cache, "abcde", now=3.0)
    serve(cache, "pq", now=4.0)
    assert order_of_going(cache, "abcde", "pq", now=5.0) == "aaaaapp"


def test_what_is_kept_goes_when_nothing_else_can() -> None:
    cache = build(6, max_kept_share=1.0)
    keep(cache, "abcdef", 50.0)
    serve(cache, "abcdef")

    assert serve(cache, "uvwxyz", now=1.0) == 0

    assert whole(cache, "abcdef") == 0
    assert serve(cache, "abcdef", now=2.0) == 0


def test_what_is_kept_stays_even_if_it_was_used_once() -> None:
    cache = build()
    keep(cache, "abc", 50.0)

    serve(cache, "abcdef", hints=ONCE)

    assert whole(cache, "abcdef") == 3


def test_what_is_used_once_is_refused_again_when_it_is_no_longer_kept() -> None:
    cache = build()
    keep(cache, "abc", 50.0)
    lease = hold(cache, "abc", hints=ONCE)

    cache.release(lease, 60.0)

    assert whole(cache, "abc") == 0


@settings(deadline=None)
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["serve", "serve", "keep", "keep", "wait"]),
            st.sampled_from(["a", "ab", "aba", "abab", "abb", "ba"]),
            st.sampled_from([ALICE, BOB, PUBLIC]),
            st.sampled_from([0.0, 3.0, 20.0]),
        ),
        max_size=40,
    ),
    public=st.text("ab", max_size=3),
)
def test_every_block_is_kept_as_long_as_the_longest_order_says(
    acts: list[tuple[str, str, Domain, float]], public: str
) -> None:
    cache = build(60, max_kept_share=1.0)
    cache.declare_public(NAMESPACE, TokenIds(tokens(public)))
    orders: dict[tuple[Domain, str], float] = {}
    now = 0.0
    for verb, text, domain, seconds in acts:
        if verb == "serve" and domain != PUBLIC:
            serve(cache, text, domain=domain, now=now)
        elif verb == "keep":
            try:
                keep(cache, text, now + seconds, domain=domain, now=now)
            except ConfigError:
                continue
            orders[domain, text] = now + seconds
        else:
            now += seconds
        kept = cache.keeper._kept_until
        for node in cache.tree.nodes():
            spelled = b"".join(step.edge for step in node.path())
            times = [
                until
                for (each, prefix), until in orders.items()
                if until > now
                and node.domain in (PUBLIC, each)
                and tokens(prefix).startswith(spelled)
            ]
            until = kept.get(node.id, 0.0)
            assert max(times, default=0.0) == (until if until > now else 0.0)


# Cuts and joins, and what is left of it all


def test_parts_of_a_cut_edge_keep_what_was_said_of_the_whole() -> None:
    cache = build()
    keep(cache, "abcdef", 50.0)
    lease = hold(cache, "abcdef", hints=Hints(session="chat", ephemeral_from=0))
    other = cache.acquire(
        NAMESPACE, ALICE, tokens("abc?"), Demand(num_slots=4), now=1.0
    )
    assert other is not None
    retention = cache.keeper
    upper, lower = other.node, lease.node
    assert upper is not None
    assert lower is not None
    assert upper is not lower
    assert retention._kept_until == {upper.id: 50.0, lower.id: 50.0}
    assert retention._session_of == {lower.id: (ALICE, "chat")}, "two used the other"
    assert retention._ephemeral == {lower.id}
    check_cache(cache, [lease, other])


@pytest.mark.parametrize(
    "tell",
    [
        lambda cache: serve(cache, "ab"),
        lambda cache: keep(cache, "ab", 50.0),
        lambda cache: serve(cache, "ab", hints=Hints(session="other")),
    ],
    ids=["used by another", "kept", "used by another session"],
)
def test_what_is_told_apart_is_not_joined_again(
    tell: Callable[[PrefixCache], object],
) -> None:
    cache = build()
    serve(cache, "abcd", hints=CHAT)
    tell(cache)
    serve(cache, "abcdx", hints=CHAT, now=1.0)
    check_cache(cache, [])

    ends = {len(node.edge) // 4 for node in cache.tree.nodes()}

    assert 2 in ends, "the cut is where the difference is"


def test_what_ended_is_not_joined_with_what_is_used_again() -> None:
    """Even if the policy sees no difference."""

    class Joining(Lru):
        def can_merge(self, upper_id: int, lower_id: int) -> bool:
            return True

    cache = build(make_policy=Joining)
    serve(cache, "abcd", hints=CHAT)
    cache.end_session(ALICE, "chat", 1.0)
    # It ends before it has published anything, so nothing branches off at the cut.
    lease = cache.acquire(
        NAMESPACE, ALICE, tokens("ab?"), Demand(num_slots=3), hints=CHAT, now=2.0
    )
    assert lease is not None
    cache.release(lease, 2.0)
    serve(cache, "x", now=3.0)

    cache.evict(3, 4.0)

    assert cache.num_gone("ended") == 2
    assert cache.num_gone("ordinary") == 1


def walk_all(make_policy: Callable[[], EvictionPolicy], quotas: bool) -> WatchedCache:
    """Everything that leaves marks, over and over, on little memory."""
    config = QuotaConfig(quotas={ALICE: Quota(floor_blocks=4)}) if quotas else None
    cache = build(16, quotas=config, make_policy=make_policy)
    waiting: list[Waiting] = []
    cache.watch_queue(lambda now: waiting)
    words = ["abc", "abd", "ab", "xyz", "xy", "bca", "bcd", "pqr", "pqs"]
    for number in range(900):
        now = float(number)
        text = words[number * 7 % 9] + words[number * 5 % 9][: number % 4]
        domain = (ALICE, BOB)[number % 2]
        hints = (
            NO_HINTS,
            Hints(session=f"s{number % 6}"),
            Hints(ephemeral_from=number % 4),
            Hints(session="t", next_use_s=float(number % 90)),
        )[number * 11 % 4]
        serve(cache, text, domain=domain, hints=hints, now=now)
        if number % 5 == 0:
            cache.end_session(domain, f"s{number % 6}", now)
        if number % 7 == 0:
            keep(cache, words[number % 9][:2], now + number % 30, domain=BOB, now=now)
        waiting[:] = [Waiting(NAMESPACE, ALICE, tokens(words[number % 9] + "?"))]
        if number % 50 == 0:
            waiting[:] = [
                Waiting(NAMESPACE, each, tokens(f"{word}?"))
                for each in (ALICE, BOB)
                for word in (*words, *(a + b for a in words for b in words))
            ]
            cache.evict(12, now)
    return cache


@pytest.mark.parametrize("quotas", [False, True], ids=["without quotas", "quotas"])
@pytest.mark.parametrize("policy", ["lru", "reuse index"])
def test_marks_and_policies_forget_what_is_gone(policy: str, quotas: bool) -> None:
    cache = walk_all(Lru if policy == "lru" else lambda: ReuseIndex(16), quotas)
    for tier in ("ended", "ordinary", "awaited", "kept"):
        assert cache.num_gone(tier), f"nothing {tier} was ever evicted"

    cache.retire(NAMESPACE, 1_000.0)

    retention = cache.keeper
    for marks in (
        retention._session_of,
        retention._nodes_of,
        retention._ephemeral,
        retention._ended,
        retention._kept_until,
        retention._awaited,
        retention._stock_of,
        cache.residency.standing._keeps,
        cache.residency._keys._spaces,
    ):
        assert not marks
    for stock in (retention._common, *retention._stocks.values()):
        assert not stock.places
        for leaves in (stock.ended, stock.awaited, stock.kept):
            assert len(leaves) == 0
            assert len(leaves._heap) <= 64, "a lazy heap keeps a bounded rest"
        match stock.policy:
            case Lru():
                assert not stock.policy._last_used
            case ReuseIndex():
                assert not stock.policy._pasts
                assert len(stock.policy._ghosts) <= 8 * 16


def test_every_process_lets_the_same_blocks_go() -> None:
    program = (
        "from hashlib import sha256\n"
        "from stemkv.core.retention.policy import ReuseIndex\n"
        "from tests.core.builders import resident\n"
        "from tests.core.test_retention import walk_all\n"
        "cache = walk_all(lambda: ReuseIndex(16), True)\n"
        "told = sorted(map(repr, resident(cache).items()))\n"
        "print(sha256(repr((told, cache.went, cache.usage())).encode()).hexdigest())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }

    assert len(printed) == 1


# The check can fail


def lose_a_leaf(retention: Retention) -> None:
    node_id = next(iter(retention._stock_of))
    retention._withdraw(node_id)


def place_it_wrong(retention: Retention) -> None:
    retention._ended.add(next(iter(retention._stock_of)))


def remember_the_dead(retention: Retention) -> None:
    retention._ephemeral.add(99)


def lose_a_session(retention: Retention) -> None:
    retention._nodes_of.clear()


def end_nobodys(retention: Retention) -> None:
    node_id = next(iter(retention._stock_of))
    retention._leave_session(node_id)
    retention._ended.add(node_id)
    retention._replace(node_id, 0.0)


def put_it_into_anothers_stock(retention: Retention) -> None:
    node_id, stock = next(iter(retention._stock_of.items()))
    other = retention._stock_of[node_id] = retention._stock(BOB)
    other.places[node_id] = stock.places.pop(node_id)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lose_a_leaf, "evictable nodes"),
        (place_it_wrong, "tier of leaf"),
        (remember_the_dead, r"one use is noted of nodes \[99\], which are gone"),
        (lose_a_session, "nodes by session"),
        (end_nobodys, "without a session is of one that has ended"),
        (put_it_into_anothers_stock, "is in another's stock"),
    ],
)
def test_damage_to_the_marks_is_found(
    damage: Callable[[Retention], None], message: str
) -> None:
    cache = build(quotas=QuotaConfig())
    serve(cache, "abc", hints=CHAT)
    retention = cache.keeper
    check_retention(retention, cache.tree)

    damage(retention)

    with pytest.raises(InvariantError, match=message):
        check_retention(retention, cache.tree)
