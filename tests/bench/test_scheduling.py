"""The loads of `bench.scheduling`: what they are said to be, and the parts by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from bench.scheduling import FCFS, PARTS, SMALL_POOL, play, throughput
from bench.scheduling_traffic import (
    HEAVY,
    PREFIX,
    conversation,
    copies,
    groups,
    users,
    worked,
)
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.trace import Trace
from tests.sim.trace_files import shape, shared_trace

MINISWE = "lmcache-agent/miniswe_cl100k_blk16.jsonl.gz"
MAGAGENT = "lmcache-agent/magagent_cl100k_blk16.jsonl.gz"
TAU = "tau-bench/gpt-4o-airline_cl100k_blk16.jsonl.gz"
CONVERSATION = "mooncake/conversation_trace.jsonl.gz"


@pytest.mark.parametrize("make", [worked, groups], ids=lambda make: make.__name__)
def test_a_seed_gives_one_trace(make: Callable[..., Trace]) -> None:
    first, again, other = (make(seed, 5.0, num_requests=60) for seed in (1, 1, 2))

    assert shape(first) == shape(again)
    assert shape(first) != shape(other)


def test_two_fifths_of_the_worked_example_share_one_prefix() -> None:
    trace = worked(1, 6.0, num_requests=2_000)
    begins = Counter(request.units[0] for request in trace.requests)
    (unit, num_sharing), (_, most_of_others) = begins.most_common(2)
    tenants = Counter(request.tenant for request in trace.requests)

    assert 0.37 < num_sharing / 2_000 < 0.43
    assert most_of_others == 1
    assert all(
        request.input_length > PREFIX
        for request in trace.requests
        if request.units[0] == unit
    )
    assert 0.57 < tenants[HEAVY] / 2_000 < 0.63
    assert len(tenants) == 4
    assert 5.5 < 2_000 / trace.duration_s < 6.5


def test_seven_tenths_of_the_groups_are_over_24_prefixes() -> None:
    trace = groups(1, 4.0, num_requests=2_000)
    begins = Counter(request.units[0] for request in trace.requests)
    shared = {unit: count for unit, count in begins.items() if count > 1}

    assert len(shared) == 24
    assert 0.67 < sum(shared.values()) / 2_000 < 0.73


@pytest.mark.parametrize(
    ("name", "path"), [("miniswe", MINISWE), ("magagent", MAGAGENT)], ids=str
)
def test_an_agent_has_one_request_under_way_at_a_time(name: str, path: str) -> None:
    shared_trace(path)
    trace = copies(name, 2)
    last: dict[str | None, int] = {}
    for index, request in enumerate(trace.requests):
        # In a closed loop nothing else keeps a turn from coming with the first.
        assert request.parent == last.get(request.session)
        last[request.session] = index

    roots = [request for request in trace.requests if request.parent is None]
    assert len(roots) == len({request.session for request in trace.requests})
    assert all(0 <= request.arrival_s <= 60.0 for request in roots)
    assert sum(request.think_s for request in trace.requests) > 0


def test_no_more_agents_wait_than_there_are() -> None:
    """By Little's law, from what a replay gives: the loop is closed."""
    shared_trace(MINISWE)
    trace = copies("miniswe", 1)
    num_sessions = len({request.session for request in trace.requests})

    result = play(
        "miniswe x 1",
        trace,
        FCFS,
        num_tokens=SMALL_POOL // 4,
        block_size=64,
        load=LoadConfig(loop="closed"),
    )

    ends = [each.end_s - each.arrival_s for each in result.requests if each.end_s]
    assert result.num_finished == len(trace.requests)
    assert throughput(result) * sum(ends) / len(ends) <= num_sessions


def test_copies_of_an_agent_share_nothing() -> None:
    shared_trace(MINISWE)
    trace = copies("miniswe", 2)
    units: dict[str, set[int]] = {"0": set(), "1": set()}
    for request in trace.requests:
        units[request.request_id.rsplit("/", 1)[1]].update(request.units)

    assert not units["0"] & units["1"]
    assert len(units["0"]) == len(units["1"])


def test_users_of_a_desk_wait_for_their_answer() -> None:
    shared_trace(TAU)
    trace = users(4, num_requests=100, think_s=1.0)

    roots = [index for index, r in enumerate(trace.requests) if r.parent is None]
    assert roots == [0, 1, 2, 3]
    assert all(r.parent == i - 4 for i, r in enumerate(trace.requests) if i >= 4)
    assert {request.think_s for request in trace.requests} == {1.0}


def test_one_tenant_has_the_most_of_the_conversation_hour() -> None:
    shared_trace(CONVERSATION)
    trace = conversation(limit=2_000)
    tenants = Counter(request.tenant for request in trace.requests)

    assert tenants.most_common(1)[0][0] == HEAVY
    assert 0.45 < tenants[HEAVY] / 2_000 < 0.65
    assert len(tenants) == 4


def test_every_bar_of_the_issue_has_its_part() -> None:
    assert list(PARTS) == ["S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "engine"]
