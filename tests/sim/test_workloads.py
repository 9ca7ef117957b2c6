"""Generated traffic keeps the promises of a trace, and each mix is what it says."""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace, TraceRequest
from stemkv.sim.workloads import WORKLOADS, workload_named
from stemkv.sim.workloads.draft import SECONDS_PER_OUTPUT_TOKEN
from stemkv.sim.workloads.draws import Zipf
from stemkv.sim.workloads.prompts import UNIT_SIZE, PromptWriter

NAMES = [workload.name for workload in WORKLOADS]
EACH = pytest.mark.parametrize("name", NAMES)


def plain(trace: Trace) -> list[Any]:
    return [
        (r.request_id, r.input_length, r.output_length, r.units.tolist(), r.arrival_s)
        + (r.tenant, r.session, r.parent, r.think_s)
        for r in trace.requests
    ]


def shared_units(a: array[int], b: array[int]) -> int:
    """Return the length of the equal beginning of two prompts."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def by_session(trace: Trace) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        assert request.session is not None
        sessions.setdefault(request.session, []).append(request)
    return sessions


# What every generated trace keeps


@EACH
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 120))
@settings(max_examples=12, deadline=None)
def test_every_workload_is_a_well_formed_trace(
    name: str, seed: int, num_requests: int
) -> None:
    trace = workload_named(name, num_requests=num_requests, rate=3.0, seed=seed)

    assert len(trace.requests) == num_requests
    assert trace.name == name
    assert (trace.format, trace.is_exact, trace.has_arrivals) == (
        "generated",
        True,
        True,
    )
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert len({request.request_id for request in trace.requests}) == num_requests
    before: dict[int, int | None] = {}
    for index, request in enumerate(trace.requests):
        assert request.input_length >= 1
        assert request.output_length >= 1
        assert len(request.units) == request.input_length // trace.unit_size
        for previous, unit in itertools.pairwise([None, *request.units]):
            assert 0 <= unit < 2**30
            # Equal ids have equal predecessors, one by one, so equal prefixes.
            assert before.setdefault(unit, previous) == previous
        if request.parent is not None:
            parent = trace.requests[request.parent]
            assert request.parent < index
            assert parent.session == request.session
            assert parent.tenant == request.tenant
            # All of the parent's prompt is the beginning of this one's, and there is
            # room for its output behind it.
            whole = parent.input_length // UNIT_SIZE
            assert shared_units(parent.units, request.units) == whole
            assert request.input_length >= parent.input_length + parent.output_length
            assert request.think_s >= 0
            # Bursts move arrivals, but only of the worked example here.
            answer_s = parent.output_length * SECONDS_PER_OUTPUT_TOKEN
            earliest = parent.arrival_s + answer_s + request.think_s
            assert request.arrival_s >= earliest - 1e-6


@EACH
def test_equal_seeds_give_equal_traces_and_others_do_not(name: str) -> None:
    first, again, other = (
        workload_named(name, num_requests=200, rate=2.0, seed=seed)
        for seed in (7, 7, 8)
    )

    assert plain(first) == plain(again)
    assert plain(first) != plain(other)


@EACH
def test_the_rate_is_kept(name: str) -> None:
    trace = workload_named(name, num_requests=6_000, rate=2.0, seed=1)

    # The later part, because sessions must overlap first. Requests of a session come
    # together, so a search of 35 makes the count vary by a tenth.
    late = trace.requests[2_000:]
    rate = len(late) / (late[-1].arrival_s - late[0].arrival_s)
    assert rate == pytest.approx(2, rel=0.2)


@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    tails=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_extensions_of_one_prompt_share_its_whole_units_and_no_others(
    lengths: list[int], tails: tuple[int, int]
) -> None:
    writer = PromptWriter()
    prompt = writer.new(0)
    for length in lengths:
        longer = writer.extend(prompt, length)
        assert shared_units(prompt.units, longer.units) == len(prompt.units)
        prompt = longer
    one, two = (writer.extend(prompt, tail) for tail in tails)

    assert prompt.length == sum(lengths)
    assert len(prompt.units) == prompt.length // UNIT_SIZE
    assert set(one.units) & set(two.units) == set(prompt.units)


# What each mix is


@given(
    num_requests=st.integers(1, 150),
    share=st.floats(0, 1),
    num_tenants=st.integers(1, 5),
    prefix_length=st.integers(16, 500),
)
@settings(deadline=None)
def test_exactly_the_share_of_the_worked_example_begins_with_the_prefix(
    num_requests: int, share: float, num_tenants: int, prefix_length: int
) -> None:
    trace = workload_named(
        "worked-example",
        num_requests=num_requests,
        share=share,
        num_tenants=num_tenants,
        prefix_length=prefix_length,
    )
    whole = prefix_length // UNIT_SIZE
    beginnings = Counter(tuple(r.units[:whole]) for r in trace.requests)
    # Unit 0 is the first that was made: the prefix is made before all else.
    num_sharing = beginnings.pop(tuple(range(whole)), 0)

    assert num_sharing == round(share * num_requests)
    assert all(count == 1 for count in beginnings.values())
    assert set(trace.tenants()) <= {f"tenant-{k}" for k in range(num_tenants)}


def test_the_worked_example_is_12000_tokens_in_40_percent() -> None:
    trace = workload_named("worked-example", num_requests=200, seed=7)
    sharing = [r for r in trace.requests if r.units[0] == 0]

    assert len(sharing) == 80
    assert all(12_150 <= r.input_length <= 12_500 for r in sharing)
    assert all(list(r.units[:750]) == list(range(750)) for r in sharing)
    assert {r.tenant for r in sharing} == {"tenant-0", "tenant-1"}
    assert all(
        1_500 <= r.input_length <= 6_000 for r in trace.requests if r.units[0] != 0
    )


def test_conversations_have_the_turns_and_lengths_of_the_vllm_benchmark() -> None:
    # Slow enough that all conversations but the last few are complete.
    trace = workload_named("chat", num_requests=2_000, rate=0.05, seed=2)
    sessions = list(by_session(trace).values())
    complete = sessions[:-20]

    assert {len(turns) for turns in complete} == {6, 7, 8, 9}
    for turns in complete:
        assert turns[0].parent is None
        assert 500 + 1 + 120 <= turns[0].input_length <= 500 + 5_000 + 160
        for last, turn in itertools.pairwise(turns):
            assert trace.requests[turn.parent or 0] is last
            grown = turn.input_length - last.input_length - last.output_length
            assert 120 <= grown <= 160
            assert 80 <= turn.output_length <= 120
    # 31 whole units of the common 500 tokens, and no more.
    one, two = complete[0][0], complete[1][0]
    assert shared_units(one.units, two.units) == 500 // UNIT_SIZE
    own = [turns[0].input_length - 500 - 140 for turns in complete]
    assert statistics.mean(own) == pytest.approx(1_000, rel=0.1)
    assert statistics.mean(
        request.think_s for request in trace.requests if request.parent is not None
    ) == pytest.approx(30, rel=0.1)


def test_agents_share_tools_and_repositories_and_stay_within_the_context() -> None:
    trace = workload_named("agents", num_requests=600, rate=2.0, seed=4)
    firsts = [turns[0] for turns in by_session(trace).values()]
    repositories = Counter(r.units[52_000 // UNIT_SIZE - 1] for r in firsts)

    assert len({tuple(r.units[:2_000]) for r in firsts}) == 1
    assert 1 < len(repositories) <= 50
    assert max(repositories.values()) > 2 * len(firsts) / len(repositories)
    assert all(r.input_length + r.output_length <= 167_000 for r in trace.requests)
    assert max(len(turns) for turns in by_session(trace).values()) > 10


def test_few_shot_tasks_are_asked_equally_often() -> None:
    trace = workload_named("few-shot", num_requests=1_024, seed=5)
    tasks = Counter(tuple(r.units[: 2_048 // UNIT_SIZE]) for r in trace.requests)

    assert len(tasks) == 64
    assert set(tasks.values()) == {16}
    assert {r.input_length for r in trace.requests} == {2_048 + 128}


def test_a_search_asks_each_state_as_often_as_it_branches() -> None:
    trace = workload_named("tree-search", num_requests=700, rate=0.5, seed=6)
    complete = list(by_session(trace).values())[:-10]
    for requests in complete:
        states = Counter((r.parent, tuple(r.units)) for r in requests)

        assert len(requests) == 5 * (1 + 3 * 2)
        assert set(states.values()) == {5}
        # Of each state's children at most the best two go on.
        assert len({r.parent for r in requests} - {None}) == 3 * 2


def test_few_documents_get_most_questions() -> None:
    trace = workload_named("documents", num_requests=4_000, seed=9)
    # The unit behind the instructions tells the document.
    asked = Counter(r.units[200 // UNIT_SIZE] for r in trace.requests)
    most = sum(count for _, count in asked.most_common(30))

    assert Zipf(1_000, 1.1).share(30) == pytest.approx(0.62, abs=0.005)
    assert most / 4_000 == pytest.approx(0.62, abs=0.03)
    assert len({r.units[0] for r in trace.requests}) == 1


def test_bursts_keep_order_and_rate_and_pause_between() -> None:
    even = workload_named("chat", num_requests=900, rate=3.0, seed=3)
    burst = workload_named(
        "bursts", num_requests=900, rate=3.0, seed=3, mix="chat", on_s=5.0, off_s=15.0
    )

    assert [r.request_id for r in even.requests] == [
        r.request_id for r in burst.requests
    ]
    assert all(r.arrival_s % 20 <= 5 for r in burst.requests)
    assert burst.duration_s == pytest.approx(even.duration_s, abs=20)
    assert any("5 s on, 15 s off" in note for note in burst.notes)


def test_the_heavy_tenant_sends_its_share_and_reuses_nothing() -> None:
    trace = workload_named("heavy-tenant", num_requests=333, seed=1, share=0.75)
    heavy = [r for r in trace.requests if r.tenant == "heavy"]
    light = [r for r in trace.requests if r.tenant != "heavy"]
    beginnings = {(r.tenant, tuple(r.units[:250])) for r in light}

    assert len(heavy) == round(0.75 * 333)
    assert len({unit for r in heavy for unit in r.units}) == sum(
        len(r.units) for r in heavy
    )
    assert len(beginnings) == 4


def test_documents_in_turn_come_round_in_order_whatever_is_between() -> None:
    trace = workload_named(
        "cyclic", num_requests=500, seed=3, num_documents=7, one_off_share=0.3
    )
    beginnings = Counter(r.units[0] for r in trace.requests)
    asked = [r.units[0] for r in trace.requests if beginnings[r.units[0]] > 1]

    assert len(set(asked)) == 7
    assert asked == [asked[place % 7] for place in range(len(asked))]
    assert 0.2 < 1 - len(asked) / 500 < 0.4


def test_documents_that_have_passed_are_never_asked_about_again() -> None:
    trace = workload_named(
        "drifting",
        num_requests=2_000,
        seed=3,
        num_documents=40,
        requests_per_step=100,
        documents_per_step=10,
    )
    steps: dict[int, list[int]] = {}
    for index, request in enumerate(trace.requests):
        steps.setdefault(request.units[0], []).append(index // 100)

    # Ten of forty leave at each step, so none stays longer than four.
    assert max(seen[-1] - seen[0] for seen in steps.values()) == 3
    assert len(steps) > 100


def test_an_interlude_parts_a_chat_that_then_goes_on() -> None:
    trace = workload_named("interlude", num_requests=900, rate=2.0, seed=5)
    inner = [i for i, r in enumerate(trace.requests) if r.session is None]
    crossing = [
        r
        for r in trace.requests[inner[-1] + 1 :]
        if r.parent is not None and r.parent < inner[0]
    ]
    pause_s = trace.requests[inner[-1]].arrival_s - trace.requests[inner[0]].arrival_s

    assert inner == list(range(inner[0], inner[0] + 300))
    assert inner[0] == 300
    assert len(crossing) > 10
    assert all(r.think_s > pause_s for r in crossing)
    chat = {unit for r in trace.requests if r.session for unit in r.units}
    assert not chat & {unit for i in inner for unit in trace.requests[i].units}


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["chat", "documents"])
@pytest.mark.parametrize("num_requests", [1, 2, 50])
def test_an_interlude_may_be_all_or_nothing(num_requests: int, share: float) -> None:
    trace = workload_named("interlude", num_requests=num_requests, seed=5, share=share)

    assert len(trace.requests) == num_requests
    assert {r.session is None for r in trace.requests} == {share == 1.0}


# Words and numbers that mean nothing


@pytest.mark.parametrize(
    "name, parameters, message",
    [
        (
            "chats",
            {},
            "workload 'chats' does not exist; there are worked-example, chat",
        ),
        ("chat", {"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ("chat", {"rate": 0.0}, "rate must be above 0 and finite, got 0"),
        (
            "chat",
            {"shares": 1},
            "shares: chat has no such parameter; it has answer_len",
        ),
        ("chat", {"num_tenants": 0}, "num_tenants must be at least 1, got 0"),
        ("chat", {"think_s": -1.0}, "a mean pause must be at least 0 s"),
        ("worked-example", {"share": 1.5}, "share must be from 0 to 1, got 1.5"),
        ("worked-example", {"tail_length": (5, 4)}, "lengths must be at least 1"),
        ("worked-example", {"prefix_length": -16}, "can't grow by -16 tokens"),
        ("agents", {"context_length": 50_000}, "context_length is 50000, less than"),
        ("tree-search", {"num_kept": 9}, "num_kept at most num_branches"),
        ("documents", {"num_documents": 0}, "num_documents must be at least 1"),
        ("few-shot", {"num_tasks": 0}, "num_tasks must be at least 1"),
        ("heavy-tenant", {"num_light": 0}, "num_light must be at least 1"),
        ("cyclic", {"num_documents": 0}, "num_documents must be at least 1"),
        ("cyclic", {"one_off_share": 2.0}, "one_off_share must be from 0 to 1"),
        ("drifting", {"num_documents": 0}, "num_documents must be at least 1"),
        ("drifting", {"requests_per_step": 0}, "requests_per_step must be at least 1"),
        ("drifting", {"documents_per_step": -1}, "documents_per_step must be at lea"),
        ("interlude", {"share": -0.1}, "share must be from 0 to 1"),
        ("bursts", {"mix": "bursts"}, "mix must be another workload"),
        ("bursts", {"on_s": 0.0}, "on_s must be above 0"),
        ("bursts", {"mix": "chat", "share": 0.5}, "share: chat has no such parameter"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        workload_named(name, **parameters)
