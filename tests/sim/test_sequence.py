from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.eviction.lru import Lru
from stemkv.measure.results import WriterReader
from stemkv.sim.sequence import SequenceResult, replay_sequence
from stemkv.sim.sharing import SharingRule
from tests.sim.depth_cost import DepthCost
from tests.sim.small_traces import Drawn, paths, random_traces, rules, trace

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
            self.leaves.append(node_id)

        def became_pinned(self, node_id: int) -> None:
            self.leaves.remove(node_id)

        def removed(self, node_id: int) -> None:
            self.leaves.remove(node_id)

        def victim(self) -> int | None:
            return self.leaves[-1] if self.leaves else None

    prompts = trace("x", "y", "z", "x")

    oldest = replay_sequence(prompts, num_blocks=2, rule=SHARED)
    newest = replay_sequence(prompts, num_blocks=2, rule=SHARED, policy=Newest())

    assert (oldest.hits.hit_units, newest.hits.hit_units) == (0, 1)


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
