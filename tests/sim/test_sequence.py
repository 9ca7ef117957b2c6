from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.retention.policy import Lru, ReuseIndex
from stemkv.errors import ConfigError
from stemkv.measure.results import WriterReader
from stemkv.sim.bounds import clairvoyant, infinite
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sequence import SequenceResult, replay_sequence
from stemkv.sim.sharing import SharingRule
from tests.sim.depth_cost import DepthCost
from tests.sim.small_traces import Drawn, Unit, paths, random_traces, rules, trace

FREELY = settings(deadline=None)  # a busy machine is no failure

SHARED = SharingRule(name="shared")


def served(result: SequenceResult) -> dict[str, int]:
    return {f"{each.writer}→{each.reader}": each.tokens for each in result.writers}


def test_only_the_leading_run_is_a_hit() -> None:
    prompts = trace("wxyz", "wxpz", "pxyz")

    hits = replay_sequence(prompts, num_blocks=None, rule=SharingRule()).hits

    assert (hits.hit_units, hits.hit_tokens, hits.input_tokens) == (2, 20, 120)


def test_tails_go_first() -> None:
    # Room for one more unit than "wxyz": the one that goes is "z", not "w".
    prompts = trace("wxyz", "pq", "wxyz")

    result = replay_sequence(prompts, num_blocks=5, rule=SharingRule())

    assert result.hits.hit_units == 3
    assert result.num_evicted_units == 2  # "z", then "q" for it


def test_a_capacity_of_exactly_the_request_holds_all_of_it() -> None:
    prompts = trace("wxyz", "wxyz")

    result = replay_sequence(prompts, num_blocks=4, rule=SharingRule())

    assert result.hits.hit_units == 4
    assert result.num_too_long == 0


def test_a_request_longer_than_the_cache_has_hits_and_inserts_nothing() -> None:
    prompts = trace("wx", "wxyz", "wxyz")

    result = replay_sequence(prompts, num_blocks=3, rule=SharingRule())

    assert result.num_too_long == 2
    assert result.hits.hit_units == 2 + 2
    assert result.num_evicted_units == 0


def test_a_tenant_never_finds_what_another_one_wrote() -> None:
    prompts = trace("xy", "xy", "xy", tenants="aab")

    result = replay_sequence(prompts, num_blocks=None, rule=SharingRule())

    assert served(result) == {"a→a": 19}
    assert [each.hit_tokens for each in result.tenants] == [19, 0]


def test_nobody_finds_what_was_written_under_another_identity() -> None:
    prompts = trace("xy", "xy", identities="mn")

    assert replay_sequence(prompts, num_blocks=None, rule=SHARED).hits.hit_units == 0


def test_public_prefixes_cross_tenants_and_what_follows_does_not() -> None:
    prompts = trace("pqx", "pqy", "pqx", "pqy", tenants="abab")

    result = replay_sequence(prompts, num_blocks=None, rule=SharingRule(name="public"))

    assert served(result) == {"a→a": 29, "a→b": 20 + 20, "b→b": 9}


def test_the_writer_is_who_put_the_resident_copy_there() -> None:
    # "p" pushes out what "a" wrote; "b" computes it anew and serves "a" from then on.
    prompts = trace("xy", "pq", "xy", "xy", tenants="acba")

    result = replay_sequence(prompts, num_blocks=2, rule=SHARED)

    assert result.writers == (WriterReader(writer="b", reader="a", tokens=19),)


def test_several_writers_can_serve_one_hit() -> None:
    prompts = trace("x", "xy", "xyz", tenants="abc", lacking=2)

    result = replay_sequence(prompts, num_blocks=None, rule=SHARED)

    assert served(result) == {"a→b": 10, "a→c": 10, "b→c": 10}


def test_a_prompt_of_less_than_a_unit_is_counted_and_finds_nothing() -> None:
    prompts = trace("", "", "x")

    result = replay_sequence(prompts, num_blocks=1, rule=SharingRule())

    assert (result.num_requests, result.hits.input_tokens) == (3, 1 + 1 + 10)
    assert result.request_hit_rate == 0.0


def test_an_empty_trace_has_no_rate() -> None:
    result = replay_sequence(trace(), num_blocks=None, rule=SharingRule())

    assert math.isnan(result.request_hit_rate)
    assert math.isnan(result.hits.hit_rate)


def test_a_given_policy_decides() -> None:
    class Newest(Lru):
        """Evicts the leaf that became one last."""

        def __init__(self) -> None:
            super().__init__()
            self.leaves: list[int] = []

        def became_evictable(self, node_id: int, *, now: float) -> None:
            super().became_evictable(node_id, now=now)
            self.leaves.append(node_id)

        def became_pinned(self, node_id: int) -> None:
            super().became_pinned(node_id)
            self.leaves.remove(node_id)

        def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
            super().dropped(node_id, num_left, may_return=may_return)
            if not num_left and node_id in self.leaves:
                self.leaves.remove(node_id)

        def victim(self, now: float) -> int | None:
            return self.leaves[-1] if self.leaves else None

    prompts = trace("x", "y", "z", "x")

    oldest = replay_sequence(prompts, num_blocks=2, rule=SHARED)
    newest = replay_sequence(prompts, num_blocks=2, rule=SHARED, policy=Newest())

    assert (oldest.hits.hit_units, newest.hits.hit_units) == (0, 1)


def test_regret_is_what_was_evicted_and_asked_for_again() -> None:
    # "pq" pushes out "z" and "y"; then "wxyz" misses both, and pushes out "pq".
    prompts = trace("wxyz", "pq", "wxyz", "pq", tenants="abac")

    result = replay_sequence(prompts, num_blocks=4, rule=SHARED)

    assert (result.regret_units, result.regret_tokens) == (2 + 2, 19 + 19)
    by_tenant = {each.tenant: each.regret_units for each in result.tenants}
    assert by_tenant == {"a": 2, "b": 0, "c": 2}


def test_what_was_never_seen_is_no_regret() -> None:
    prompts = trace("xy", "pq", "rs", "xz")

    result = replay_sequence(prompts, num_blocks=2, rule=SharingRule())

    assert result.regret_units == 1  # "x"


@FREELY
@given(
    drawn=random_traces(),
    rule=st.sampled_from(rules()),
    num_blocks=st.none() | st.integers(1, 12),
)
def test_hits_and_regret_are_the_hits_of_a_cache_without_limit(
    drawn: Drawn, rule: SharingRule, num_blocks: int | None
) -> None:
    everything = infinite(find_reuses(drawn.trace, rule))

    result = replay_sequence(drawn.trace, num_blocks=num_blocks, rule=rule)

    hits = result.hits
    assert hits.hit_units + result.regret_units == everything.hit_units
    assert hits.hit_tokens + result.regret_tokens == everything.hit_tokens
    assert sum(each.regret_units for each in result.tenants) == result.regret_units
    assert sum(each.regret_tokens for each in result.tenants) == result.regret_tokens


def test_reuses_that_were_found_before_change_nothing() -> None:
    prompts = trace("wxyz", "pq", "wxyz", "pq")
    reuses = find_reuses(prompts, SHARED)

    given_them, finding_them = (
        replay_sequence(prompts, num_blocks=4, rule=SHARED, reuses=each)
        for each in (reuses, None)
    )

    assert given_them == finding_them


class Clocked(Lru):
    """Notes all times that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        super().used(node_id, hint=hint, tick=tick, now=now)
        self.times.append(now)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        super().released(node_id, tick=tick, now=now)
        self.times.append(now)

    def victim(self, now: float) -> int | None:
        self.times.append(now)
        return super().victim(now)


def test_a_policy_is_told_when_requests_arrived() -> None:
    prompts = trace("x", "x", "y")
    for request, arrival_s in zip(prompts.requests, (0.5, 2.0, 60.0), strict=True):
        request.arrival_s = arrival_s
    policy = Clocked()

    replay_sequence(prompts, num_blocks=1, rule=SHARED, policy=policy)

    assert policy.times == [0.5, 2.0, 2.0, 60.0, 60.0]


@FREELY
@given(
    drawn=random_traces(),
    arrivals=st.lists(st.floats(0.0, 1e6), min_size=24, max_size=24),
    num_blocks=st.integers(1, 12),
)
def test_time_never_goes_back(
    drawn: Drawn, arrivals: list[float], num_blocks: int
) -> None:
    for request, arrival_s in zip(drawn.trace.requests, arrivals, strict=False):
        request.arrival_s = arrival_s
    policy = Clocked()

    replay_sequence(drawn.trace, num_blocks=num_blocks, rule=SHARED, policy=policy)

    assert policy.times == sorted(policy.times)


@FREELY
@given(
    drawn=random_traces(),
    rule=st.sampled_from(rules()),
    num_blocks=st.integers(1, 12),
)
def test_a_trace_without_a_clock_replays_as_with_one_under_lru(
    drawn: Drawn, rule: SharingRule, num_blocks: int
) -> None:
    clocked = replay_sequence(drawn.trace, num_blocks=num_blocks, rule=rule)
    drawn.trace.has_arrivals = False
    for request in drawn.trace.requests:
        request.arrival_s = 0.0

    assert clocked == replay_sequence(drawn.trace, num_blocks=num_blocks, rule=rule)


@FREELY
@given(
    drawn=random_traces(),
    rule=st.sampled_from(rules()),
    num_blocks=st.integers(1, 12),
)
def test_a_policy_that_learns_from_times_needs_no_clock_to_run(
    drawn: Drawn, rule: SharingRule, num_blocks: int
) -> None:
    drawn.trace.has_arrivals = False
    for request in drawn.trace.requests:
        request.arrival_s = 0.0

    first, second = (
        replay_sequence(
            drawn.trace, num_blocks=num_blocks, rule=rule, policy=ReuseIndex(num_blocks)
        )
        for _ in range(2)
    )

    assert first == second


def naive_hits_with_queue(
    requests: list[list[Unit]], num_blocks: int, lookahead: int
) -> int:
    """Evict unit by unit: what nobody waits for, oldest first; then the latest place."""
    last_used: dict[Unit, int] = {}  # of what is resident

    def num_found(path: list[Unit]) -> int:
        return next(
            (at for at, unit in enumerate(path) if unit not in last_used), len(path)
        )

    hits = 0
    for now, path in enumerate(requests):
        found = num_found(path)
        hits += found
        kept = path if len(path) <= num_blocks else path[:found]
        while len(last_used) + len(kept) - found > num_blocks:
            places: dict[Unit, int] = {}
            for place, other in enumerate(requests[now + 1 : now + 1 + lookahead]):
                for unit in other[: num_found(other)]:
                    places.setdefault(unit, place)
            del last_used[
                max(
                    last_used.keys() - set(path),
                    key=lambda unit: (
                        places.get(unit, len(requests)),
                        -last_used[unit] if unit not in places else 0,
                        len(unit[2]),
                    ),
                )
            ]
        last_used.update(dict.fromkeys(kept, now))
    return hits


def test_what_the_next_request_will_hit_is_spared() -> None:
    # "rs" needs two. "pq" was used last, but "wx" is asked for next.
    prompts = trace("wx", "pq", "rs", "wx")

    blind, looking = (
        replay_sequence(prompts, num_blocks=4, rule=SHARED, lookahead=lookahead)
        for lookahead in (0, 1)
    )

    assert (blind.hits.hit_units, looking.hits.hit_units) == (0, 2)


def test_the_queue_ends_where_it_is_said_to() -> None:
    prompts = trace("wx", "pq", "rs", "r", "wx")

    found = [
        replay_sequence(prompts, num_blocks=4, rule=SHARED, lookahead=lookahead)
        for lookahead in (1, 2)
    ]

    assert [each.hits.hit_units for each in found] == [1, 1 + 2]


def test_of_two_that_wait_the_one_behind_gives_way() -> None:
    prompts = trace("w", "p", "q", "w", "p")

    result = replay_sequence(prompts, num_blocks=2, rule=SHARED, lookahead=4)

    assert [each.hit_tokens for each in result.tenants] == [9]


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_a_queue_that_shows_the_whole_future_is_clairvoyant(
    drawn: Drawn, rule: SharingRule
) -> None:
    reuses = find_reuses(drawn.trace, rule)
    num_requests = len(drawn.trace.requests)

    for num_blocks in range(1, reuses.num_distinct + 2):
        looking = replay_sequence(
            drawn.trace, num_blocks=num_blocks, rule=rule, lookahead=num_requests
        )
        assert looking.hits == clairvoyant(reuses, num_blocks)


@FREELY
@given(
    drawn=random_traces(),
    rule=st.sampled_from(rules()),
    num_blocks=st.integers(1, 12),
    lookahead=st.integers(0, 6),
)
def test_what_the_queue_will_hit_goes_after_all_else_and_the_last_of_it_first(
    drawn: Drawn, rule: SharingRule, num_blocks: int, lookahead: int
) -> None:
    result = replay_sequence(
        drawn.trace, num_blocks=num_blocks, rule=rule, lookahead=lookahead
    )

    assert result.hits.hit_units == naive_hits_with_queue(
        paths(drawn, rule), num_blocks, lookahead
    )


def test_a_queue_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead"):
        replay_sequence(trace("x"), num_blocks=1, rule=SHARED, lookahead=-1)


def test_progress_ends_with_all_requests() -> None:
    seen: list[tuple[int, int]] = []

    replay_sequence(
        trace(*["x"] * 300),
        num_blocks=None,
        rule=SharingRule(),
        progress=lambda done, total: seen.append((done, total)),
    )

    assert seen == [(256, 300), (300, 300)]


@FREELY
@given(
    drawn=random_traces(),
    rule=st.sampled_from(rules()),
    num_blocks=st.none() | st.integers(1, 12),
)
def test_parts_sum_to_the_whole(
    drawn: Drawn, rule: SharingRule, num_blocks: int | None
) -> None:
    prompts = drawn.trace

    result = replay_sequence(
        prompts, num_blocks=num_blocks, rule=rule, cost=DepthCost()
    )

    hits = result.hits
    assert sum(each.tokens for each in result.writers) == hits.hit_tokens
    assert sum(each.hit_tokens for each in result.tenants) == hits.hit_tokens
    assert sum(each.input_tokens for each in result.tenants) == prompts.num_input_tokens
    assert sum(each.num_requests for each in result.tenants) == len(prompts.requests)
    by_tenant = sum(each.num_hit_requests for each in result.tenants)
    assert by_tenant == result.num_hit_requests
    assert [each.tenant for each in result.tenants] == prompts.tenants()
    limit = num_blocks if num_blocks is not None else math.inf
    too_long = [each for each in prompts.requests if len(each.units) > limit]
    assert result.num_too_long == len(too_long)
    assert result == replay_sequence(
        prompts, num_blocks=num_blocks, rule=rule, cost=DepthCost()
    )


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_the_first_writer_of_a_unit_serves_all_who_find_it(
    drawn: Drawn, rule: SharingRule
) -> None:
    writers: dict[tuple[str, str, str], str] = {}
    expected: dict[str, int] = {}
    pairs = zip(drawn.trace.requests, paths(drawn, rule), strict=True)
    for request, path in pairs:
        for depth, unit in enumerate(path):
            if unit not in writers:
                writers[unit] = request.tenant
                continue
            pair = f"{writers[unit]}→{request.tenant}"
            left = request.input_length - 1 - depth * drawn.trace.unit_size
            tokens = min(drawn.trace.unit_size, left)
            expected[pair] = expected.get(pair, 0) + tokens

    result = replay_sequence(drawn.trace, num_blocks=None, rule=rule)

    found = {pair: tokens for pair, tokens in served(result).items() if tokens}
    assert found == {pair: tokens for pair, tokens in expected.items() if tokens}
