"""What the books say of small stories whose every number can be told by hand.

Blocks have four tokens. A driver's clock advances by one second with every call.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import Domain, Sample, StepResult, TokenIds
from stemkv.core.books.account import PrefixAccount
from stemkv.core.books.entry import MissReason, Regret
from stemkv.core.books.ledger import PUBLIC_ACCOUNT, Ledger
from stemkv.core.prefix.events import BlocksRefused
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.tokens import MIN_SPAN_TOKENS, Span
from stemkv.core.schedule.events import RequestForked, RequestPreempted
from stemkv.errors import InvariantError
from tests.core.bookkeeping import BookedDriver, spans
from tests.core.builders import build_identity
from tests.core.scheduling import (
    NAMESPACE,
    Model,
    build_spec,
    namespace_of,
    of_type,
    tokens,
)
from tests.sim.depth_cost import DepthCost

NEVER_SEEN = MissReason.NEVER_SEEN
IDENTITY_DIFFERS = MissReason.IDENTITY_DIFFERS
OTHER_DOMAIN = MissReason.OTHER_DOMAIN
EVICTED = MissReason.EVICTED
NOT_YET_COMPUTED = MissReason.NOT_YET_COMPUTED
NOT_RETAINED = MissReason.NOT_RETAINED
BELOW_BLOCK = MissReason.BELOW_BLOCK
UNSHARABLE = MissReason.UNSHARABLE

# Outputs are made of a, b, c and d, so no prompt here continues as one was answered.
NINE = "efghijklm"  # two blocks and one token
SEVENTEEN = "efghijklmnopqrstu"
OTHER = "vwxyzyxwvuvwxyz"  # four blocks, of which three are whole
CREW = Domain.group("crew")


def serve(driver: BookedDriver, request_id: str, prompt: str, **spec: object) -> None:
    driver.serve(request_id, prompt, **{"max_new_tokens": 1} | spec)  # type: ignore[arg-type]
    driver.check_books()


def serve_in_crew(driver: BookedDriver, request_id: str, prompt: str, who: str) -> None:
    driver.add_in(request_id, prompt, CREW, tenant=who, max_new_tokens=1)
    driver.run()
    driver.check_books()


# Why tokens were missed: each reason appears where it must, and not where it must not


def test_what_nobody_had_was_never_seen() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)
    serve(driver, "again", NINE)
    serve(driver, "other", OTHER)

    assert driver.misses("first") == [(0, 8, NEVER_SEEN), (8, 9, BELOW_BLOCK)]
    assert driver.misses("again") == [(8, 9, BELOW_BLOCK)]
    assert driver.misses("other") == [(0, 12, NEVER_SEEN), (12, 15, BELOW_BLOCK)]
    driver.finish()


def test_the_last_token_is_computed_even_if_its_block_is_there() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE[:8])
    serve(driver, "again", NINE[:8])

    # Its block cannot be reused as a whole, but three of its tokens can be copied.
    assert driver.misses("first") == [(0, 4, NEVER_SEEN), (4, 8, BELOW_BLOCK)]
    assert driver.misses("again") == [(7, 8, BELOW_BLOCK)]
    entry = driver.entry("again")
    assert (entry.num_reused_tokens, entry.num_copied_tokens) == (7, 3)
    assert entry.num_reused_blocks == 1
    driver.finish()


def test_what_another_tenant_has_or_had_is_another_domains() -> None:
    driver = BookedDriver(num_blocks=4)
    serve(driver, "alice", NINE, tenant="alice")
    serve(driver, "bob", NINE, tenant="bob")
    serve(driver, "large", OTHER, tenant="carol")  # evicts everything
    serve(driver, "dave", NINE, tenant="dave")

    assert driver.misses("bob") == [(0, 8, OTHER_DOMAIN), (8, 9, BELOW_BLOCK)]
    assert driver.misses("dave") == [(0, 8, OTHER_DOMAIN), (8, 9, BELOW_BLOCK)]
    assert driver.entry("dave").regrets == ()  # they were not his to regret
    driver.finish()


def test_a_group_has_one_domain_and_no_other() -> None:
    driver = BookedDriver()
    serve_in_crew(driver, "alice", NINE, "alice")
    serve_in_crew(driver, "bob", NINE, "bob")
    # Her own, and the group of her name: neither is the other.
    serve(driver, "alone", NINE, tenant="alice")

    assert driver.misses("bob") == [(8, 9, BELOW_BLOCK)]
    assert driver.misses("alone") == [(0, 8, OTHER_DOMAIN), (8, 9, BELOW_BLOCK)]
    driver.finish()


def test_what_another_namespace_has_differs_in_named_fields() -> None:
    driver = BookedDriver()
    model = Model(adapter="v1")
    driver.ledger.name(NAMESPACE, asdict(build_identity()))
    other = build_identity(adapter_scale=2.0, start_position=1)
    driver.ledger.name(namespace_of(model), asdict(other))
    assert driver.ledger.facts(NAMESPACE) == asdict(build_identity())
    assert driver.ledger.facts(b"other") is None
    serve(driver, "base", NINE)
    serve(driver, "adapted", NINE, adapter="v1")
    serve(driver, "nameless", NINE, adapter="v2")

    expected = [(0, 8, IDENTITY_DIFFERS), (8, 9, BELOW_BLOCK)]
    assert driver.misses("adapted") == driver.misses("nameless") == expected
    (miss, _) = driver.entry("adapted").misses
    assert miss.differing_fields == ("adapter_scale", "start_position")
    assert driver.entry("adapted").misses[1].differing_fields == ()
    (miss, _) = driver.entry("nameless").misses
    assert miss.differing_fields == ()  # nobody said what it stands for
    driver.finish()


def test_of_several_reasons_the_nearest_is_given() -> None:
    """Own eviction before another domain, another domain before another identity."""
    driver = BookedDriver(num_blocks=4)
    serve(driver, "adapted", NINE, adapter="v1", tenant="alice")
    serve(driver, "alice", NINE, tenant="alice")
    serve(driver, "bob", NINE, tenant="bob")
    serve(driver, "large", OTHER)
    serve(driver, "alice-again", NINE, tenant="alice")

    assert driver.misses("alice") == [(0, 8, IDENTITY_DIFFERS), (8, 9, BELOW_BLOCK)]
    assert driver.misses("bob") == [(0, 8, OTHER_DOMAIN), (8, 9, BELOW_BLOCK)]
    assert driver.misses("alice-again") == [(0, 8, EVICTED), (8, 9, BELOW_BLOCK)]
    driver.finish()


def test_what_was_evicted_is_regretted_by_those_who_might_have_found_it() -> None:
    driver = BookedDriver(num_blocks=4)
    serve(driver, "first", SEVENTEEN[:13])  # three blocks cached, one free
    serve(driver, "other", "vwxyz")  # takes two: the tail block goes
    evicted_s = driver.events_of("other")[0].now
    serve(driver, "again", SEVENTEEN[:13])
    admitted_s = driver.events_of("again")[0].now

    assert driver.misses("again") == [(8, 12, EVICTED), (12, 13, BELOW_BLOCK)]
    assert driver.entry("again").regrets == (Regret(4, admitted_s - evicted_s),)
    assert admitted_s > evicted_s
    assert driver.entry("other").regrets == ()
    driver.finish()


def test_a_public_prefix_that_was_evicted_is_everybodys_regret() -> None:
    driver = BookedDriver(num_blocks=4)
    driver.declare_public(NINE[:8])
    serve(driver, "alice", NINE, tenant="alice")
    serve(driver, "large", OTHER, tenant="alice")
    serve(driver, "bob", NINE, tenant="bob")

    assert driver.misses("bob") == [(0, 8, EVICTED), (8, 9, BELOW_BLOCK)]
    assert [regret.num_tokens for regret in driver.entry("bob").regrets] == [8]
    driver.finish()


def test_what_had_to_be_dropped_is_nobodys_regret() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)
    driver.retire_for_all()
    serve(driver, "again", NINE)

    assert driver.misses("again") == [(0, 8, EVICTED), (8, 9, BELOW_BLOCK)]
    assert driver.entry("again").regrets == ()
    assert driver.ledger.accounts(driver.now)["a"].num_evicted_blocks == 0
    driver.finish()


def chunked() -> BookedDriver:
    """Nobody waits for anybody, and a leader has published eight of its tokens."""
    driver = BookedDriver(token_budget=10, max_steps_awaiting=0)
    driver.declare_public(SEVENTEEN[:12])
    driver.add("leader", SEVENTEEN, tenant="alice")
    driver.step()
    return driver


def test_what_somebody_computes_just_then_is_not_yet_computed() -> None:
    driver = chunked()
    driver.add("follower", SEVENTEEN, tenant="alice")
    driver.run()

    expected = [(8, 16, NOT_YET_COMPUTED), (16, 17, BELOW_BLOCK)]
    assert driver.misses("follower") == expected
    driver.finish()


def test_a_stranger_would_have_been_given_what_is_public_only() -> None:
    driver = chunked()
    driver.add("stranger", SEVENTEEN, tenant="bob")
    driver.run()

    assert driver.misses("stranger") == [
        (8, 12, NOT_YET_COMPUTED),
        (12, 16, NEVER_SEEN),
        (16, 17, BELOW_BLOCK),
    ]
    driver.finish()


@pytest.mark.parametrize("how", ["retired", "cut off", "private above"])
def test_what_a_leader_will_not_publish_is_not_to_come(how: str) -> None:
    driver = BookedDriver(token_budget=10, max_steps_awaiting=0)
    if how == "private above":
        serve(driver, "before", SEVENTEEN[:5], tenant="alice")
    driver.declare_public(SEVENTEEN[:12])
    driver.add("leader", SEVENTEEN, tenant="alice")
    driver.step()
    if how == "retired":
        driver.retire()
    elif how == "cut off":
        driver.cut_off("leader")
    # Even the leader's own tenant cannot find what is in a retired tree.
    who = "alice" if how == "retired" else "bob"
    driver.add("stranger", SEVENTEEN, tenant=who)
    driver.run()

    assert driver.entry("stranger").admitted_s < driver.ends["leader"].now
    reasons = [reason for _, _, reason in driver.misses("stranger")]
    assert NOT_YET_COMPUTED not in reasons
    driver.finish()


def test_who_waited_for_a_prefix_has_missed_nothing_of_it() -> None:
    driver = BookedDriver(token_budget=8)
    driver.add("leader", SEVENTEEN)
    driver.step()
    driver.add("follower", SEVENTEEN)
    driver.run()

    assert driver.misses("follower") == [(16, 17, BELOW_BLOCK)]
    driver.finish()


def test_who_shares_with_nobody_misses_everything_for_that() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)
    serve(driver, "alone", NINE, namespace=None)
    serve(driver, "again", NINE)

    assert driver.misses("alone") == [(0, 9, UNSHARABLE)]
    assert driver.misses("again") == [(8, 9, BELOW_BLOCK)]
    assert driver.entry("alone").num_retained_blocks == 0
    driver.finish()


def test_the_first_miss_is_where_prompts_part_inside_a_block() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)
    serve(driver, "second", NINE[:6] + "zzz")

    entry = driver.entry("second")
    assert entry.first_miss is not None
    assert (entry.first_miss.start, entry.first_miss.reason) == (6, NEVER_SEEN)
    assert (entry.num_reused_tokens, entry.num_copied_tokens) == (6, 2)
    assert entry.writers == {"a": 6}
    driver.finish()


def test_a_prompt_that_ends_in_a_span_ends_before_it() -> None:
    """Its last token is computed, and then too little of the span is left to tell."""
    scheduler = BookedDriver().scheduler
    span = Span(digest=bytes(32), num_tokens=MIN_SPAN_TOKENS)
    prompt = TokenIds.from_parts([tokens("ef"), span])
    for now, request_id in enumerate(("first", "again")):
        spec = build_spec(request_id, max_new_tokens=6)
        scheduler.add(replace(spec, prompt=prompt))
        plan = scheduler.schedule(float(now))
        if request_id == "again":
            break
        while scheduler.has_work:
            samples = {c.request_id: (Sample(9),) for c in plan.chunks}
            scheduler.commit(plan, StepResult(samples), float(now))
            if scheduler.has_work:
                plan = scheduler.schedule(float(now))

    assert scheduler.cache.tree.num_blocks == 4, "all of it is there"
    assert plan.chunks[0].start == 2
    ledger = scheduler._lives.journal.ledger
    assert ledger is not None
    entry = ledger.entry("again")
    assert entry is not None
    assert spans(entry.misses) == [(2, 11, BELOW_BLOCK)]


# Who wrote, who read, who pays


def test_a_reader_is_told_who_brought_in_what_it_reused() -> None:
    driver = BookedDriver()
    serve_in_crew(driver, "x", SEVENTEEN[:9], "xeno")
    serve_in_crew(driver, "y", SEVENTEEN, "yves")
    serve_in_crew(driver, "z", SEVENTEEN, "zoe")

    assert driver.entry("y").writers == {"xeno": 8}
    assert driver.entry("z").writers == {"xeno": 8, "yves": 8}
    accounts = driver.ledger.accounts(driver.now)
    assert {name: a.num_published_blocks for name, a in accounts.items()} == {
        "xeno": 2,
        "yves": 2,
        "zoe": 0,
    }
    assert len(driver.cache.tree.roots()[NAMESPACE].children) == 1
    assert driver.cache.tree.num_nodes == 2, "a node has one owner"
    driver.finish()


def test_owners_do_not_change_what_is_matched() -> None:
    """Two nodes of two owners are found as one of a single owner would be."""
    alone, both = BookedDriver(), BookedDriver()
    for driver, names in ((alone, "xx"), (both, "xy")):
        serve_in_crew(driver, "1", SEVENTEEN[:9], names[0])
        serve_in_crew(driver, "2", SEVENTEEN, names[1])
    assert alone.cache.tree.num_nodes == 1
    assert both.cache.tree.num_nodes == 2
    for end in range(1, 18):
        asked = tokens(SEVENTEEN[:end] + "z").buffer
        found = [d.cache.peek(NAMESPACE, CREW, asked) for d in (alone, both)]
        assert found[0] == found[1]
    alone.finish()
    both.finish()


def test_a_split_of_ones_own_is_undone_and_one_between_owners_is_not() -> None:
    driver = BookedDriver()
    serve_in_crew(driver, "x", SEVENTEEN, "xeno")
    serve_in_crew(driver, "short", SEVENTEEN[:6], "yves")  # cuts after a block
    assert driver.cache.tree.num_nodes == 2, "one part was used later"
    assert driver.misses("short") == [(5, 6, BELOW_BLOCK)]
    serve_in_crew(driver, "again", SEVENTEEN, "yves")
    assert driver.cache.tree.num_nodes == 1
    assert driver.entry("again").writers == {"xeno": 16}
    driver.finish()


def test_what_is_public_is_on_nobodys_account() -> None:
    driver = BookedDriver()
    driver.declare_public(NINE[:4])
    serve(driver, "first", NINE, tenant="alice")
    serve(driver, "second", NINE, tenant="bob")
    driver._tick()

    accounts = driver.ledger.accounts(driver.now)
    assert {name: a.num_cached_blocks for name, a in accounts.items()} == {
        PUBLIC_ACCOUNT: 1,
        "alice": 1,
        "bob": 1,
    }
    assert driver.entry("second").writers == {"alice": 4}
    driver.finish()


def test_retained_seconds_begin_when_the_last_lease_ends() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)  # ends with two cached blocks at this moment
    for _ in range(5):
        driver._tick()

    account = driver.ledger.accounts(driver.now)["a"]
    assert account.retained_block_s == 2 * 5
    # Three blocks (two whole ones, one for the last token) from schedule to commit.
    assert account.active_block_s == 3 * 1
    (prefix,) = driver.ledger.prefixes(driver.cache.tree.nodes(), driver.now).values()
    # One for the block it holds from the commit on, and that was no time at all.
    assert (prefix.start, prefix.end) == (0, 8)
    assert (prefix.retained_block_s, prefix.active_block_s) == (2 * 5, 0)
    driver.finish()


def test_a_prefix_that_comes_and_goes_has_one_line() -> None:
    driver = BookedDriver(num_blocks=4)
    for number in range(3):
        serve(driver, f"one-{number}", NINE)
        serve(driver, f"one-again-{number}", NINE)
        serve(driver, f"large-{number}", OTHER)

    prefixes = driver.ledger.prefixes(driver.cache.tree.nodes(), driver.now)
    lines = [p for p in prefixes.values() if p.end == 8]
    assert len(lines) == 1
    (line,) = lines
    assert (line.num_hits, line.hit_tokens) == (3, 24)
    assert line.num_evicted_blocks == 3 * 2
    assert line.saved_s(DepthCost()) == 3 * DepthCost().prefill_seconds(0, 8)
    driver.finish()


def test_a_prefix_is_cut_where_prompts_part_and_not_where_a_match_or_an_eviction_ended() -> (
    None
):
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN)
    serve(driver, "again", SEVENTEEN)
    driver.add("part", SEVENTEEN[:9], max_new_tokens=4)
    driver.step()  # it runs and holds the first half
    driver.check_books()

    (whole,) = prefix_list(driver)
    assert (whole.start, whole.end) == (0, 16)
    assert (whole.num_hits, whole.hit_tokens) == (2, 16 + 8)
    driver.finish()


def test_what_a_run_earned_before_prompts_parted_goes_to_where_hits_had_reached() -> (
    None
):
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN)
    serve(driver, "half", SEVENTEEN[:9])
    serve(driver, "parts", SEVENTEEN[:8] + OTHER[:9])

    runs = {(p.start, p.end): p for p in prefix_list(driver)}
    assert (runs[0, 8].num_hits, runs[0, 8].hit_tokens) == (2, 16)
    assert (runs[8, 16].num_hits, runs[8, 16].hit_tokens) == (0, 0)
    driver.finish()


def test_what_an_evicted_tail_earned_stays_with_the_tail_when_prompts_part() -> None:
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN)
    serve(driver, "again", SEVENTEEN)
    driver.cache.evict(1, driver.now)  # the last of four blocks
    serve(driver, "parts", SEVENTEEN[:8] + OTHER[:9])

    runs = sorted(
        (p.start, p.end, p.num_hits, p.hit_tokens) for p in prefix_list(driver)
    )
    assert runs == [(0, 8, 2, 16), (8, 16, 0, 0), (8, 16, 1, 8)]
    driver.finish()


def test_a_cut_that_is_undone_counts_nobody_twice() -> None:
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN)
    serve(driver, "again", SEVENTEEN)
    serve(driver, "short", SEVENTEEN[:9])  # cuts the node
    assert driver.cache.tree.num_nodes == 2
    serve(driver, "whole", SEVENTEEN)  # lets it be joined again

    assert driver.cache.tree.num_nodes == 1
    (run,) = prefix_list(driver)
    assert (run.num_hits, run.hit_tokens) == (3, 16 + 8 + 16)
    driver.finish()


def test_a_run_that_left_is_cut_where_prompts_part_deep_in_the_tree() -> None:
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN)
    serve(driver, "early", SEVENTEEN[:4] + OTHER[:5])  # a branch after one block
    serve(driver, "again", SEVENTEEN)
    driver.cache.evict(99, driver.now)
    serve(driver, "late", SEVENTEEN[:12] + OTHER[:5])

    hits = {(p.start, p.end): p.hit_tokens for p in prefix_list(driver) if p.hit_tokens}
    assert hits == {(0, 4): 8, (4, 12): 8, (12, 16): 4}
    driver.finish()


def test_what_was_evicted_piece_by_piece_is_divided_by_where_it_was() -> None:
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN)
    serve(driver, "half", SEVENTEEN[:9])
    for _ in range(4):
        driver.cache.evict(1, driver.now)
    serve(driver, "parts", SEVENTEEN[:8] + OTHER[:9])

    found = {p.end: p for p in prefix_list(driver) if p.num_hits}
    assert found.keys() == {8}
    assert (found[8].num_hits, found[8].hit_tokens) == (1, 8)
    assert found[8].saved_s(DepthCost()) == DepthCost().prefill_seconds(0, 8)
    driver.finish()


def prefix_list(driver: BookedDriver) -> list[PrefixAccount]:
    nodes = driver.cache.tree.nodes()
    return list(driver.ledger.prefixes(nodes, driver.now).values())


@given(
    start=st.integers(0, 3),
    length=st.integers(1, 5),
    cut=st.integers(0, 9),
    hit_length=st.integers(0, 5),
    num_evicted=st.integers(0, 3),
)
@settings(deadline=None)
def test_the_parts_of_an_account_are_the_whole_and_lie_where_they_say(
    start: int, length: int, cut: int, hit_length: int, num_evicted: int
) -> None:
    hit_length = min(length, hit_length)
    hit_end = 4 * (start + hit_length)
    whole = PrefixAccount(
        domain=CREW,
        start=4 * start,
        end=4 * (start + length),
        num_blocks=length,
        is_pinned=True,
        since_s=0.0,
        active_block_s=float(length),
        retained_block_s=2.0 * length,
        num_evicted_blocks=num_evicted,
    )
    if hit_length:
        whole.hit(4 * start, hit_end)
    before = whole.copy()
    part = whole.split_off(4 * cut)

    assert before.start == part.start <= part.end == whole.start <= whole.end
    assert whole.end == before.end
    assert part.end == min(max(4 * cut, before.start), before.end)
    for each in (part, whole):
        # One hit from the start on: each part has what of it lies there.
        num_tokens = max(0, min(hit_end, each.end) - each.start)
        assert each.hit_tokens == num_tokens
        seconds = DepthCost().prefill_seconds(each.start, each.start + num_tokens)
        assert each.saved_s(DepthCost()) == pytest.approx(seconds if num_tokens else 0)
        assert each.num_hits == min(num_tokens, 1)
        assert each.num_blocks == (each.end - each.start) // 4
        assert each.active_block_s == pytest.approx(each.num_blocks)
        assert each.retained_block_s == pytest.approx(2 * each.num_blocks)
    evicted = [part.num_evicted_blocks, whole.num_evicted_blocks]
    assert sum(evicted) == num_evicted
    assert not num_evicted or part.end == before.end or evicted[0] == 0

    part.join(whole)
    assert (part.start, part.end) == (before.start, before.end)
    assert part.hit_tokens == before.hit_tokens
    assert part.num_evicted_blocks == num_evicted


# Blocks that are used once: not retained, and not evicted either


def test_what_was_used_once_was_not_retained_and_is_nobodys_regret() -> None:
    driver = BookedDriver()
    serve(driver, "first", SEVENTEEN, hints=Hints(ephemeral_from=9))
    assert driver.misses("first") == [(0, 16, NEVER_SEEN), (16, 17, BELOW_BLOCK)]
    serve(driver, "again", SEVENTEEN)

    assert driver.misses("again") == [(8, 16, NOT_RETAINED), (16, 17, BELOW_BLOCK)]
    assert driver.entry("again").regrets == ()
    assert driver.entry("first").num_retained_blocks == 4, "published by it"
    driver.finish()


def test_what_is_refused_is_on_the_account_of_who_brought_it() -> None:
    driver = BookedDriver()
    serve(driver, "alice", SEVENTEEN, tenant="alice", hints=Hints(ephemeral_from=8))
    serve(driver, "bob", OTHER, tenant="bob")
    driver.cache.evict(2, driver._tick())

    accounts = driver.ledger.accounts(driver.now)
    refused = {name: a.num_refused_blocks for name, a in accounts.items()}
    evicted = {name: a.num_evicted_blocks for name, a in accounts.items()}
    assert refused == {"alice": 2, "bob": 0}
    assert evicted == {"alice": 2, "bob": 0}
    assert accounts["alice"].num_published_blocks == 4
    (event,) = of_type(driver.events, BlocksRefused)
    assert (event.domain, event.num_blocks) == (Domain.private("alice"), 2)
    driver.finish()


def test_seconds_of_what_is_refused_are_those_of_its_leases() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE, hints=Hints(ephemeral_from=0))
    for _ in range(5):
        driver._tick()

    account = driver.ledger.accounts(driver.now)["a"]
    assert account.retained_block_s == 0
    assert account.active_block_s > 0
    assert account.num_cached_blocks == 0
    driver.finish()


def test_of_a_public_and_an_own_copy_the_one_that_was_evicted_is_the_reason() -> None:
    driver = BookedDriver()
    serve(driver, "own", NINE, hints=Hints(ephemeral_from=0))
    driver.declare_public(NINE[:4])
    serve(driver, "public", NINE, tenant="bob")
    driver.cache.evict(99, driver._tick())
    serve(driver, "again", NINE)

    assert driver.misses("again") == [
        (0, 4, EVICTED),
        (4, 8, NOT_RETAINED),
        (8, 9, BELOW_BLOCK),
    ]
    driver.finish()


def test_what_one_domain_did_not_retain_is_another_domains_for_the_rest() -> None:
    driver = BookedDriver()
    serve(driver, "alice", NINE, tenant="alice", hints=Hints(ephemeral_from=0))
    serve(driver, "bob", NINE, tenant="bob")

    assert driver.misses("bob") == [(0, 8, OTHER_DOMAIN), (8, 9, BELOW_BLOCK)]
    driver.finish()


def test_a_preempted_request_that_is_used_once_computes_again_what_was_dropped() -> (
    None
):
    driver = BookedDriver(num_blocks=6, max_num_running=2)
    driver.add("elder", NINE[:8], max_new_tokens=12)
    driver.add("younger", OTHER[:8], max_new_tokens=8, hints=Hints(ephemeral_from=0))
    driver.run()
    driver.check_books()

    entry = driver.entry("younger")
    assert entry.num_preemptions == 1
    assert entry.num_recomputed_tokens >= 8
    assert entry.num_reused_tokens == 0
    assert driver.misses("younger") == [(0, 4, NEVER_SEEN), (4, 8, BELOW_BLOCK)]
    driver.finish()


# Stalls


def stalled() -> BookedDriver:
    """Alice holds three of four blocks for long; Bob asks for two."""
    driver = BookedDriver(num_blocks=4)
    driver.add("alice", NINE, tenant="alice", max_new_tokens=5)
    driver.step()
    driver.add("bob", "vwxyz", tenant="bob", max_new_tokens=1)
    return driver


def test_a_stall_lasts_from_the_first_refusal_to_the_admission() -> None:
    driver = stalled()
    driver.step()
    refused_s = driver.plans[-1].now
    driver.run()

    entry = driver.entry("bob")
    assert entry.stall_s == entry.admitted_s - refused_s > 0
    accounts = driver.ledger.accounts(driver.now)
    assert (accounts["bob"].num_stalls, accounts["bob"].stall_s) == (1, entry.stall_s)
    assert (accounts["alice"].num_stalls, accounts["alice"].stall_s) == (0, 0.0)
    driver.finish()


def test_a_stall_names_who_held_the_memory() -> None:
    driver = stalled()
    driver.step()
    driver.step()  # still the same stall

    stalls = driver.ledger.stalls
    assert stalls.num_stalls == 1
    accounts = driver.ledger.accounts(driver.now)
    blamed = {name: a.stalling_blocks for name, a in accounts.items()}
    assert blamed == {"alice": 3, "bob": 0}
    assert (stalls.active_blocks, stalls.shared_blocks, stalls.cached_blocks) == (
        3,
        2,
        0,
    )
    assert stalls.missing_blocks == 2  # two to hold and one to spare, one was free
    driver.finish()


def test_what_is_shared_with_a_running_request_is_not_missing() -> None:
    driver = BookedDriver(num_blocks=7)
    driver.add("alice", SEVENTEEN, max_new_tokens=4)  # five blocks
    driver.step()
    driver.add("follower", SEVENTEEN[:16] + "vwxyz", max_new_tokens=1)
    driver.step()

    # Six blocks, of which four are there and in use: two, and one to spare, of two.
    assert driver.ledger.stalls.num_stalls == 1
    assert driver.ledger.stalls.missing_blocks == 1
    driver.finish()


@pytest.mark.parametrize("num_spare", range(4))
def test_blocks_are_missing_exactly_when_an_acquire_fails(num_spare: int) -> None:
    driver = BookedDriver(num_blocks=7)
    serve(driver, "first", SEVENTEEN)  # four blocks cached
    cache, domain, asked = driver.cache, Domain.private("a"), tokens(SEVENTEEN).buffer
    cache.acquire(
        None, domain, asked[:8], Demand(num_slots=8), now=driver.now
    )  # two of three

    # Five blocks, of which four are there, but held by nobody: only one is to spare.
    num_missing = cache.num_missing_blocks(
        NAMESPACE, domain, asked, Demand(num_slots=17, num_spare=num_spare)
    )
    lease = cache.acquire(
        NAMESPACE,
        domain,
        asked,
        Demand(num_slots=17, num_spare=num_spare),
        now=driver.now,
    )
    assert num_missing == num_spare
    assert (lease is None) == (num_missing > 0)


def test_who_waits_for_a_place_does_not_stall() -> None:
    driver = BookedDriver(max_num_running=1)
    driver.add("first", NINE, max_new_tokens=5)
    driver.step()
    driver.add("second", NINE, max_new_tokens=5)
    driver.run()

    assert driver.ledger.stalls.num_stalls == 0
    assert driver.entry("second").stall_s == 0.0
    driver.finish()


def test_a_stall_that_ends_with_a_cancel_is_over() -> None:
    driver = stalled()
    driver.step()
    refused_s = driver.plans[-1].now
    driver.cancel("bob")

    account = driver.ledger.accounts(driver.now)["bob"]
    assert (account.num_stalls, account.stall_s) == (1, driver.now - refused_s)
    assert not driver.ledger.is_stalled("bob")
    driver.finish()


def test_a_sample_that_stalls_leaves_nothing_behind() -> None:
    """Only whole requests have entries, but memory they wait for is waited for."""
    driver = BookedDriver(num_blocks=4)
    driver.add("r", "efg", num_samples=3, max_new_tokens=9)
    driver.run_until(RequestPreempted)
    driver.run()

    accounts = driver.ledger.accounts(driver.now)
    assert accounts["a"].num_stalls == driver.ledger.stalls.num_stalls > 0
    assert accounts["a"].stall_s > 0
    assert not any(driver.ledger.is_stalled(name) for name in ("r", "r#1", "r#2"))
    driver.finish()


# Ends


def test_who_is_cancelled_has_missed_what_it_computed() -> None:
    driver = BookedDriver(token_budget=4, max_num_running=4)
    driver.add("r", NINE)
    driver.step()
    driver.cancel("r")
    driver.run()
    driver._note(driver.scheduler.take_events())

    entry = driver.entry("r")
    assert driver.misses("r") == [(0, 4, NEVER_SEEN)]
    assert (entry.num_computed_tokens, entry.num_reused_tokens) == (4, 0)
    assert entry.finish_reason == "cancelled"
    assert driver.ledger.misses[NEVER_SEEN] == 4
    driver.finish()


def test_who_was_never_admitted_has_no_entry() -> None:
    driver = stalled()
    driver.step()
    driver.cancel("bob")
    driver.run()

    assert [entry.request_id for entry in driver.entries] == ["alice"]
    assert driver.ledger.entry("bob") is None
    driver.finish()


def test_a_failed_step_leaves_entries_of_what_was_computed_before() -> None:
    driver = BookedDriver(token_budget=4, max_num_running=4)
    driver.add("r", NINE)
    driver.step()
    driver.abandon(driver.schedule())

    assert driver.misses("r") == [(0, 4, NEVER_SEEN)]
    assert driver.entry("r").finish_reason == "failed"
    driver.finish()


def test_who_begins_again_reused_in_vain() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)
    driver.add("r", NINE)
    driver.step()
    driver.restart("r", "v1")
    driver.check_books()
    driver.run()

    entry = driver.entry("r")
    assert entry.num_reused_tokens == 0
    assert driver.misses("r") == [(0, 8, IDENTITY_DIFFERS), (8, 9, BELOW_BLOCK)]
    assert driver.ledger.num_reused_tokens == 0
    assert driver.ledger.saved_s == 0.0
    driver.check_books()  # what was credited is in vain, and the sums agree
    driver.finish()


def test_a_preempted_request_reuses_what_others_computed_meanwhile() -> None:
    driver = BookedDriver(num_blocks=8, token_budget=2)
    driver.add("old", "wxyz", tenant="b", max_new_tokens=12)
    driver.step()
    driver.step()
    driver.add("young", SEVENTEEN, max_new_tokens=1)
    driver.run_until(RequestPreempted)
    num_known = driver.requests["young"].num_counted
    assert 0 < num_known < 16
    # Somebody with the same prompt, who comes first.
    driver.add("other", SEVENTEEN, max_new_tokens=1, arrival_s=0.0)
    driver.run()

    entry = driver.entry("young")
    assert entry.num_preemptions == 1
    assert entry.num_reused_tokens == 16 - num_known
    assert entry.saved_s == DepthCost().prefill_seconds(num_known, 16)
    assert driver.misses("young") == [
        (0, num_known, NEVER_SEEN),
        (16, 17, BELOW_BLOCK),
    ]
    driver.finish()


def test_blocks_that_a_request_published_are_its_own() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE, max_new_tokens=4)  # computes 12 tokens
    serve(driver, "again", NINE, max_new_tokens=4)

    assert driver.entry("first").num_retained_blocks == 3
    assert driver.entry("again").num_retained_blocks == 0  # they were there
    driver.finish()


def test_samples_share_one_entry() -> None:
    driver = BookedDriver()
    driver.add("r", NINE, num_samples=3, max_new_tokens=4)
    driver.run()

    assert any(isinstance(event, RequestForked) for event in driver.events)
    (entry,) = driver.entries
    assert entry.num_computed_tokens == 9
    driver.finish()


# What the ledger refuses


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    driver = BookedDriver()
    serve(driver, "first", NINE)
    serve(driver, "again", NINE)
    totals = driver.ledger._totals
    for name in (
        "num_prompt",
        "num_reused",
        "num_computed",
        "num_credited",
        "saved_s",
        "credited_s",
    ):
        value = getattr(totals, name)
        setattr(totals, name, value + 1)
        with pytest.raises(InvariantError, match="does not add up"):
            driver.check_books()
        setattr(totals, name, value)
    driver.finish()


def test_a_ledger_and_a_scheduler_that_disagree_say_so() -> None:
    ledger = Ledger(4, DepthCost())
    ledger.admitted(
        "r",
        tenant="a",
        domain=Domain.private("a"),
        namespace=NAMESPACE,
        prompt=tokens(NINE).buffer,
        path=[],
        copied=None,
        num_awaitable=0,
        arrival_s=0.0,
        now=1.0,
    )
    with pytest.raises(InvariantError, match="reused 4 tokens, the ledger has 0"):
        ledger.ended(
            "r",
            reason="length",
            num_reused=4,
            num_computed=5,
            num_recomputed=0,
            num_output=1,
            num_preemptions=0,
            now=2.0,
        )


def test_a_request_that_computed_less_than_it_missed_did_not_finish() -> None:
    """Prompt tokens that nobody accounts for are an error, not a rounding."""
    driver = BookedDriver()
    driver.add("r", NINE, max_new_tokens=1)
    plan = driver.schedule()
    entry = driver.ledger.entry("r")
    assert entry is not None
    entry.misses.pop()

    with pytest.raises(InvariantError, match="computed 9 .* the ledger has 8 that it"):
        driver.execute_and_commit(plan)


def test_nobody_can_have_the_public_account() -> None:
    driver = BookedDriver()
    driver.declare_public(NINE[:4])
    serve(driver, "r", NINE, tenant="(public)")

    accounts = driver.ledger.accounts(driver.now)
    assert sorted(a.num_cached_blocks for a in accounts.values()) == [1, 1]
