"""From units and times to prompts of real tokens and arrivals."""

from __future__ import annotations

import math
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.errors import ConfigError
from stemkv.sim.arrivals import Arrivals, LoadConfig, public_tokens
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest
from tests.sim.small_traces import UNIT, random_traces, trace

SHARED = SharingRule(name="shared")


def arrivals_of(traffic: Trace, **load: object) -> Arrivals:
    return Arrivals(traffic, SharingRule(), LoadConfig(**load))  # type: ignore[arg-type]


def ids(arrivals: Arrivals, index: int) -> list[int]:
    return array("i", arrivals.spec(index, 0.0).prompt.buffer).tolist()


def request(units: list[int], input_length: int, **changes: object) -> TraceRequest:
    values: dict[str, object] = {
        "request_id": "r",
        "input_length": input_length,
        "output_length": 3,
        "units": array("i", units),
        "arrival_s": 0.0,
    }
    return TraceRequest(**(values | changes))  # type: ignore[arg-type]


def of(*requests: TraceRequest, unit_size: int = 4) -> Trace:
    return Trace(name="t", format="f", unit_size=unit_size, requests=list(requests))


# Prompts


@given(drawn=random_traces())
@settings(deadline=None)
def test_prompts_share_exactly_the_tokens_of_their_common_units(drawn: object) -> None:
    traffic: Trace = drawn.trace  # type: ignore[attr-defined]
    prompts: tuple[str, ...] = drawn.prompts  # type: ignore[attr-defined]
    arrivals = arrivals_of(traffic)
    tokens = [ids(arrivals, index) for index in range(len(prompts))]
    for left, one in enumerate(prompts):
        assert len(tokens[left]) == traffic.requests[left].input_length
        for right, other in enumerate(prompts[:left]):
            units = common(one, other)
            shortest = min(len(tokens[left]), len(tokens[right]))
            assert common(tokens[left], tokens[right]) == min(units * UNIT, shortest)


def common(left: str | list[int], right: str | list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, (left, right)))
    )


def test_a_unit_that_is_not_full_is_cut_to_the_prompts_length() -> None:
    arrivals = arrivals_of(of(request([7, 8], 6), request([7, 8], 5)))
    assert ids(arrivals, 0) == [7] * 4 + [8] * 2
    assert ids(arrivals, 1) == [7] * 4 + [8]


def test_a_tail_that_no_unit_describes_is_the_requests_own() -> None:
    """Two equal prompts as far as the trace tells, so their tails may be anything."""
    arrivals = arrivals_of(of(request([7], 6), request([7], 6), request([], 3)))
    prompts = [ids(arrivals, index) for index in range(3)]
    assert prompts[0][:4] == prompts[1][:4] == [7] * 4
    tails = [prompts[0][4:], prompts[1][4:], prompts[2]]
    assert [len(set(tail)) for tail in tails] == [1, 1, 1]
    seen = {tail[0] for tail in tails}
    assert len(seen) == 3
    assert min(seen) >= 2**30, "no unit has such an id"


def test_what_a_request_samples_is_in_nobody_elses_prompt_or_output() -> None:
    arrivals = arrivals_of(of(*[request([2**30 - 1], 5)] * 5))
    outputs = [arrivals.output_token(index) for index in range(5)]
    assert len(set(outputs)) == 5
    for index, token in enumerate(outputs):
        others = [ids(arrivals, each) for each in range(5) if each != index]
        assert all(token not in prompt for prompt in others)
        assert token < 2**31, "it fits a token"


def test_a_spec_says_whose_request_it_is_and_how_long_it_will_be() -> None:
    traffic = of(
        request([1], 4, tenant="x", identity="m", output_length=0),
        request([1], 4, tenant="y", identity="n"),
    )
    arrivals = Arrivals(traffic, SHARED, LoadConfig())
    first, second = arrivals.spec(0, 1.5), arrivals.spec(1, 2.5)
    assert (first.tenant, second.tenant) == ("x", "y")
    assert first.domain == second.domain, "everybody shares"
    assert first.namespace != second.namespace, "but not across identities"
    assert (first.arrival_s, second.arrival_s) == (1.5, 2.5)
    # An engine samples at least one token.
    assert (first.max_new_tokens, second.max_new_tokens) == (1, 3)
    assert first.request_id != second.request_id


@given(drawn=random_traces(), min_tenants=st.integers(2, 3))
@settings(deadline=None)
def test_what_is_declared_public_is_a_prefix_that_enough_tenants_show(
    drawn: object, min_tenants: int
) -> None:
    traffic: Trace = drawn.trace  # type: ignore[attr-defined]
    rule = SharingRule(name="public", public_min_tenants=min_tenants)
    arrivals = Arrivals(traffic, rule, LoadConfig())
    for namespace, prefix in public_tokens(traffic, rule):
        assert len(prefix) % UNIT == 0
        showing = set()
        for index, each in enumerate(traffic.requests):
            spec = arrivals.spec(index, 0.0)
            if spec.namespace == namespace and spec.prompt.buffer.startswith(
                prefix.buffer
            ):
                showing.add(each.tenant)
        assert len(showing) >= min_tenants


def test_only_the_public_rule_declares_anything() -> None:
    traffic = trace("ab", "ab", tenants="xy")
    assert public_tokens(traffic, SharingRule(name="isolated")) == []
    assert public_tokens(traffic, SharingRule(name="shared")) == []
    assert len(public_tokens(traffic, SharingRule(name="public"))) == 1


# Times


def test_an_open_loop_replays_recorded_times() -> None:
    traffic = trace("a", "b", "c")
    assert arrivals_of(traffic).first() == [(0.0, 0), (1.0, 1), (2.0, 2)]
    assert list(arrivals_of(traffic).after(0, 9.0)) == []


def test_twice_the_rate_is_half_the_time() -> None:
    traffic = trace("a", "b", "c")
    assert arrivals_of(traffic, rate=2.0).first() == [(0.0, 0), (0.5, 1), (1.0, 2)]
    assert arrivals_of(traffic, rate=0.5).first() == [(0.0, 0), (2.0, 1), (4.0, 2)]


def session() -> Trace:
    return of(
        request([1], 4),
        request([1], 4, parent=0, think_s=2.5, arrival_s=1.0),
        request([1], 4, parent=0, think_s=0.0, arrival_s=1.0),
        request([1], 4, parent=2, think_s=1.0, arrival_s=3.0),
        request([1], 4, arrival_s=4.0),
    )


def test_in_a_closed_loop_a_child_waits_for_its_parent_and_thinks() -> None:
    arrivals = arrivals_of(session(), loop="closed")
    assert arrivals.first() == [(0.0, 0), (4.0, 4)]
    assert list(arrivals.after(0, 10.0)) == [(12.5, 1), (10.0, 2)]
    assert list(arrivals.after(2, 20.0)) == [(21.0, 3)]
    assert list(arrivals.after(1, 20.0)) == []


def test_a_prompt_that_is_not_known_shares_with_nobody() -> None:
    known, opaque = request([1], 4), request([2], 4, is_opaque=True)
    arrivals = arrivals_of(of(known, opaque))

    assert arrivals.spec(0, 0.0).namespace is not None
    assert arrivals.spec(1, 0.0).namespace is None


def test_a_rate_does_not_change_how_long_people_think() -> None:
    arrivals = arrivals_of(session(), loop="closed", rate=2.0)
    assert arrivals.first() == [(0.0, 0), (2.0, 4)]
    assert list(arrivals.after(2, 20.0)) == [(21.0, 3)]


def test_an_open_loop_knows_no_parents() -> None:
    arrivals = arrivals_of(session())
    assert [index for _, index in arrivals.first()] == [0, 1, 2, 3, 4]
    assert list(arrivals.after(0, 10.0)) == []


@given(
    ticks=st.lists(st.integers(0, 5), min_size=1, max_size=30).map(sorted),
    seed=st.integers(0, 3),
)
@settings(deadline=None)
def test_spreading_moves_only_those_who_share_a_time_and_keeps_their_order(
    ticks: list[int], seed: int
) -> None:
    traffic = of(*[request([1], 4, arrival_s=float(tick)) for tick in ticks])
    spread = arrivals_of(traffic, spread_s=1.0, seed=seed).first()

    times = {index: arrival_s for arrival_s, index in spread}
    counts = Counter(ticks)
    for index, tick in enumerate(ticks):
        if counts[tick] == 1:
            assert times[index] == tick
        else:
            assert tick <= times[index] < tick + 1.0
    assert [index for _, index in spread] == list(range(len(ticks)))
    assert spread == sorted(spread)
    again = arrivals_of(traffic, spread_s=1.0, seed=seed).first()
    assert spread == again


def test_another_seed_spreads_otherwise() -> None:
    traffic = of(*[request([1], 4)] * 9)
    spreads = [arrivals_of(traffic, spread_s=1.0, seed=seed).first() for seed in (0, 1)]
    assert spreads[0] != spreads[1]


@pytest.mark.parametrize(
    "field, value",
    [
        ("loop", "shut"),
        ("rate", 0.0),
        ("rate", -1.0),
        ("rate", math.nan),
        ("rate", math.inf),
        ("spread_s", -0.5),
        ("spread_s", math.nan),
    ],
    ids=str,
)
def test_a_load_that_makes_no_sense_is_refused_by_name(
    field: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=field):
        LoadConfig(**{field: value})  # type: ignore[arg-type]
