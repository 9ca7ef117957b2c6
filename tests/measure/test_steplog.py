"""A step log is read back as it was written, and says where it is broken."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core.books.cost import FittedCost
from stemkv.core.core import Core, CoreConfig
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import Span, TokenIds, end_outside_span
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.policy import Lru
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.order import Fcfs
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.plan import Sample, StepResult
from stemkv.core.schedule.request import FinishReason, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.errors import StemKVError, StepLogError
from stemkv.measure.steplog import (
    CALLS,
    Abandoned,
    Added,
    Call,
    Cancelled,
    Committed,
    CoreState,
    CutOff,
    Declared,
    Fenced,
    FenceLifted,
    Kept,
    NamespaceReset,
    NamespaceRetired,
    Planned,
    PlannedChunk,
    PlanRecord,
    Restarted,
    SessionEnded,
    StepLog,
    StepLogHeader,
)
from stemkv.measure.steplog_lines import StepLogWriter, read_step_log

GOLDEN = Path(__file__).with_name("golden_calls.jsonl")
COSTS = FittedCost(
    source="made up",
    bytes_per_token=7,
    step_s=0.1 + 0.2,
    prefill_chunk_s=1e-9,
    prefill_token_s=1 / 3,
    prefill_pair_s=1e-12,
    decode_s=0.002,
    decode_context_s=1e-5,
    flops_per_token=1.0,
    flops_per_pair=1.0,
    assumed_watts=1.0,
)
HEADER = StepLogHeader(
    model="tiny",
    core=CoreConfig(
        cache=CacheConfig(num_blocks=7, block_size=4),
        scheduler=SchedulerConfig(
            token_budget=64, max_request_tokens=99, watermark=0.25
        ),
        eviction=EvictionConfig(name="gdsf", objective="seconds"),
        order=OrderConfig(
            name="deadline", lane=3, weights={"ann": 0.1 + 0.2}, slo_ttft_s={"x": 1e-9}
        ),
        quotas=QuotaConfig(
            quotas={
                Domain.private("ann"): Quota(floor_blocks=2, cap_blocks=3, weight=1.5),
                Domain.group("ann"): Quota(),
            },
            default=Quota(cap_blocks=1),
            public_blocks=1,
        ),
        books=None,
    ),
    costs=COSTS,
)

times = st.floats(-1e6, 1e6)
counts = st.integers(0, 2**31)
names = st.text(min_size=1, max_size=6).filter(lambda name: "#" not in name)
ids = st.builds(lambda name, k: RequestId(name + k), names, st.sampled_from(["", "#3"]))
namespaces = st.binary(min_size=32, max_size=32)
prompts = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9).map(
    TokenIds.from_ids
)
domains = st.one_of(names.map(Domain.private), names.map(Domain.group))
reasons = st.sampled_from(FinishReason)
hints = st.one_of(
    st.just(Hints()),
    st.builds(
        Hints,
        session=names,
        ends_session=st.booleans(),
        next_use_s=st.none() | st.floats(0, 1e9) | st.just(float("inf")),
        ephemeral_from=st.none() | st.integers(0, 99),
    ),
)
specs = st.builds(
    RequestSpec,
    request_id=names.map(RequestId),
    prompt=prompts,
    max_new_tokens=st.integers(1, 99),
    arrival_s=times,
    domain=domains,
    namespace=st.none() | namespaces,
    num_samples=st.integers(1, 4),
    adapter=st.none() | names,
    start_position=st.integers(0, 99),
    tenant=st.none() | names,
    request_class=st.none() | names,
    hints=hints,
)
digests = st.text("0123456789abcdef", max_size=8)
states = st.builds(
    CoreState,
    **{f.name: digests if f.name == "digest" else counts for f in fields(CoreState)},
)
plans = st.builds(
    PlanRecord,
    step=counts,
    now=times,
    copies=st.lists(st.builds(BlockCopy, counts, counts, counts), max_size=2).map(
        tuple
    ),
    chunks=st.lists(
        st.builds(PlannedChunk, ids, counts, counts, counts, counts), max_size=3
    ).map(tuple),
    digest=digests,
)
samples = st.builds(Sample, st.integers(-5, 2**31), st.none() | reasons)
between: list[st.SearchStrategy[Any]] = [
    st.builds(Declared, namespace=namespaces, prefix=prompts),
    st.builds(Added, spec=specs),
    st.builds(Cancelled, now=times, request_id=ids, reason=reasons),
    st.builds(
        Restarted,
        now=times,
        request_id=ids,
        namespace=st.none() | namespaces,
        adapter=st.none() | names,
        domain=st.none() | domains,
    ),
    st.builds(CutOff, request_id=ids),
    st.builds(Fenced),
    st.builds(FenceLifted, epoch=counts),
    st.builds(NamespaceRetired, now=times, namespace=namespaces),
    st.builds(NamespaceReset, now=times, namespace=namespaces),
    st.builds(SessionEnded, now=times, domain=domains, session=names),
    st.builds(
        Kept,
        now=times,
        namespace=namespaces,
        domain=domains | st.just(PUBLIC),
        prefix=prompts,
        until=times,
    ),
]
ends: list[st.SearchStrategy[Any]] = [
    st.builds(
        Committed,
        now=times,
        samples=st.dictionaries(ids, st.lists(samples, max_size=2).map(tuple)),
        state=states,
    ),
    st.builds(Abandoned, now=times, state=states),
]
steps = st.tuples(
    st.builds(Planned, plan=plans), st.lists(between[2], max_size=1), st.one_of(ends)
).map(lambda parts: [parts[0], *parts[1], parts[2]])
calls = st.lists(st.one_of(*between).map(lambda call: [call]) | steps, max_size=6).map(
    lambda groups: tuple(call for group in groups for call in group)
)


def state_of(count: int) -> CoreState:
    values: dict[str, Any] = {f.name: count for f in fields(CoreState)}
    return CoreState(**values | {"digest": "0f"})


def written(*calls: Call) -> list[str]:
    file = io.StringIO()
    writer = StepLogWriter(file, HEADER)
    for call in calls:
        writer.write(call)
    return file.getvalue().splitlines()


@given(calls)
def test_a_log_is_read_back_as_it_was_written(calls: tuple[Call, ...]) -> None:
    lines = written(*calls)

    assert read_step_log(lines, file="log") == StepLog(header=HEADER, calls=calls)
    assert len(lines) == 1 + len(calls)
    assert all(line.isascii() for line in lines)


def test_every_kind_of_call_is_drawn_and_has_a_name() -> None:
    assert len(between) + len(ends) + 1 == len(get_args(Call))
    assert set(CALLS.values()) == set(get_args(Call))


def test_a_call_is_a_verb_of_the_core_with_its_arguments() -> None:
    """So that recording one is no more than writing down what was asked."""
    own = {Planned, Committed, Abandoned}
    for verb, call in CALLS.items():
        asked = set(signature(getattr(Core, verb, Core.schedule)).parameters)
        named = {f.name for f in fields(call)}
        assert call in own or named == asked - {"self"}, verb


@pytest.mark.parametrize("name", ["golden_calls", "golden_run"])
def test_calls_are_written_as_they_were_before_this_form(name: str) -> None:
    """The files were written by an earlier version, encoded by hand field by field."""
    lines = Path(__file__).with_name(f"{name}.jsonl").read_text().splitlines()

    log = read_step_log([*written(), *lines[1:]], file=name)

    assert written(*log.calls)[1:] == lines[1:]
    assert {type(call) for call in log.calls} <= set(CALLS.values())


def test_a_header_is_written_as_it_was_before_this_form() -> None:
    """Settings that are new since are written as well, and change nothing of the rest."""
    golden = json.loads(GOLDEN.read_text().splitlines()[0])
    now = json.loads(written()[0])

    for name, part in golden.items():
        if name in {f.name for f in fields(CoreConfig)}:
            known = {key: now[name][key] for key in part}
            assert json.dumps(known) == json.dumps(part)
        else:
            assert json.dumps(now[name]) == json.dumps(part)


def test_sessions_are_in_the_header_where_there_are_any() -> None:
    core = replace(HEADER.core, sessions=SessionConfig(share=0.5))
    file = io.StringIO()
    StepLogWriter(file, replace(HEADER, core=core))

    log = read_step_log(file.getvalue().splitlines(), file="log")

    assert log.header.core.sessions == SessionConfig(share=0.5)


def test_the_header_says_that_token_ids_are_in_the_log() -> None:
    header = json.loads(written()[0])

    assert header["schema"] == "stemkv.steplog/3"
    assert "token ids of prompts and outputs" in header["contains"]


def test_steps_are_plans_with_what_came_of_them() -> None:
    state = state_of(1)
    plans = [
        PlanRecord(step=step, now=float(step), copies=(), chunks=(), digest="")
        for step in range(3)
    ]
    first = Committed(now=0.5, samples={}, state=state)
    third = Committed(now=2.5, samples={}, state=state)
    log = StepLog(
        header=HEADER,
        calls=(
            Planned(plan=plans[0]),
            first,
            Planned(plan=plans[1]),
            Abandoned(now=1.5, state=state),
            Planned(plan=plans[2]),
            third,
        ),
    )

    assert log.steps() == ((plans[0], first), (plans[2], third))


def test_a_plan_s_digest_tells_block_tables_apart() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4), Retention(Lru))
    scheduler = Scheduler(SchedulerConfig(), cache, Fcfs())
    for name in ("a", "b"):
        scheduler.add(
            RequestSpec(
                request_id=RequestId(name),
                prompt=TokenIds.from_ids(range(8)),
                max_new_tokens=1,
                arrival_s=0.0,
                domain=Domain.private("a"),
                namespace=None,
            )
        )
    plan = scheduler.schedule(0.0)
    first, second = plan.chunks
    swapped = replace(
        plan,
        chunks=(
            replace(first, block_ids=second.block_ids),
            replace(second, block_ids=first.block_ids),
        ),
    )

    record = PlanRecord.of(plan, scheduler)
    other = PlanRecord.of(swapped, scheduler)

    assert PlanRecord.of(plan, scheduler) == record
    assert other.chunks == record.chunks
    assert other.digest != record.digest


def test_a_plan_s_digest_and_a_state_s_tell_which_blocks_are_free() -> None:
    """All counts are equal; the two cached blocks that are left are not."""
    left = [after_evicting(policy) for policy in (Lru, MostRecent)]

    assert left[0][0] == left[1][0]
    for one, other in zip(*(each[1] for each in left), strict=True):
        assert replace(one, digest="") == replace(other, digest="")
        assert one.digest != other.digest


class MostRecent(Lru):
    """Gives the leaf that was used last."""

    def became_evictable(self, node_id: int, *, now: float) -> None:
        self._leaves.add(node_id, (-self._last_used[node_id], -node_id))


def after_evicting(policy: type[Lru]) -> tuple[str, tuple[PlanRecord, CoreState]]:
    """The records of a core in which two of four cached blocks were evicted."""
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=1), Retention(policy))
    scheduler = Scheduler(SchedulerConfig(), cache, Fcfs())
    for index in range(4):
        scheduler.add(
            RequestSpec(
                request_id=RequestId(f"r{index}"),
                prompt=TokenIds.from_ids([index]),
                max_new_tokens=1,
                arrival_s=0.0,
                domain=Domain.private("a"),
                namespace=bytes(32),
            )
        )
        plan = scheduler.schedule(float(index))
        done = {chunk.request_id: (Sample(0),) for chunk in plan.chunks}
        scheduler.commit(plan, StepResult(done), float(index))
    cache.evict(2, 9.0)
    record = PlanRecord.of(scheduler.schedule(9.0), scheduler)
    return repr(cache.usage()), (record, CoreState.of(scheduler))


# Spans


parts = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=3).map(TokenIds.from_ids),
        st.builds(
            Span,
            digest=st.sampled_from([b"a" * 32, b"b" * 32]),
            num_tokens=st.integers(9, 12),
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(parts, parts)
def test_prompts_with_spans_agree_after_reading_exactly_where_they_did(
    left: list[TokenIds | Span], right: list[TokenIds | Span]
) -> None:
    prompts = [TokenIds.from_parts(left), TokenIds.from_parts(right)]
    log = read_step_log(
        written(*(Declared(namespace=b"n", prefix=prompt) for prompt in prompts)),
        file="log",
    )
    again = [call.prefix for call in log.calls if isinstance(call, Declared)]

    assert common(*again) == common(*prompts)
    for prompt, other in zip(prompts, again, strict=True):
        assert [max(i, -1) for i in other] == [max(i, -1) for i in prompt]
        ends = [end_outside_span(prompt.buffer, n) for n in range(len(prompt) + 1)]
        assert ends == [end_outside_span(other.buffer, n) for n in range(len(ends))]


def common(left: TokenIds, right: TokenIds) -> int:
    """Positions up to which a match of the two may go."""
    same = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        same += 1
    return end_outside_span(left.buffer, same)


# Broken logs


def spec_line() -> dict[str, Any]:
    spec = RequestSpec(
        request_id=RequestId("r"),
        prompt=TokenIds.from_ids([1, 2]),
        max_new_tokens=1,
        arrival_s=0.0,
        domain=Domain.private("a"),
        namespace=bytes(32),
    )
    document: dict[str, Any] = json.loads(written(Added(spec=spec))[1])
    return document


def with_spec(**changes: Any) -> dict[str, Any]:
    document = spec_line()
    return document | {"spec": document["spec"] | changes}


def hint_line(**changes: Any) -> dict[str, Any]:
    hints = {"session": "s", "ends_session": False, "next_use_s": "never"}
    return hints | {"ephemeral_from": None} | changes


def without_spec(name: str) -> dict[str, Any]:
    document = spec_line()
    del document["spec"][name]
    return document


@pytest.mark.parametrize(
    "document, problem",
    [
        ({"kind": "dance"}, "kind: Invalid value 'dance'"),
        ({"epoch": 1}, "missing required field `kind`"),
        ([], "Expected `object`, got `array`"),
        ({"kind": "lift_fence"}, "missing required field `epoch`"),
        ({"kind": "lift_fence", "epoch": 1, "x": 2}, "unknown field `x`"),
        ({"kind": "lift_fence", "epoch": True}, "epoch: Expected `int`, got `bool`"),
        ({"kind": "lift_fence", "epoch": -1}, "epoch: Expected `int` >= 0"),
        (
            {"kind": "reset", "now": "noon", "namespace": "00"},
            "now: Expected `float`, got `str`",
        ),
        ({"kind": "reset", "now": 1, "namespace": "0"}, "namespace: non-hexadecimal"),
        ({"kind": "cut_off", "request_id": 7}, "request_id: Expected `str`, got `int`"),
        (without_spec("prompt"), "spec: Object missing required field `prompt`"),
        (with_spec(prompt="AAA"), "spec.prompt: must be base64"),
        (with_spec(prompt="AAAA"), "spec.prompt: a token buffer holds 4 bytes"),
        (with_spec(prompt="/////w=="), "spec.prompt: a span must cover"),
        (with_spec(prompt=""), "spec: prompt has no tokens"),
        (with_spec(max_new_tokens=0), "spec: max_new_tokens must be"),
        (with_spec(domain=["public", ""]), "spec: domain must be the caller's own"),
        (
            with_spec(domain=["friends", "x"]),
            "spec.domain[0]: Invalid enum value 'friends'",
        ),
        (with_spec(domain="a"), "spec.domain: Expected `array`, got `str`"),
        ({"kind": "commit"}, "missing required field `now`"),
        (
            with_spec(hints={"session": "s"}),
            "spec.hints: Object missing required field `ends_session`",
        ),
        (
            with_spec(hints=hint_line(next_use_s="soon")),
            "next_use_s: Invalid enum value 'soon'",
        ),
        (
            with_spec(hints=hint_line(ends_session=1)),
            "ends_session: Expected `bool`, got `int`",
        ),
        (
            with_spec(hints=hint_line(session=None, ends_session=True)),
            "spec.hints: hints.ends_session needs hints.session",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_line_is_named_with_its_field(document: Any, problem: str) -> None:
    lines = [*written(), json.dumps(document)]

    with pytest.raises(StepLogError) as caught:
        read_step_log(lines, file="run.jsonl")

    assert str(caught.value).startswith("run.jsonl:2: ")
    assert problem in str(caught.value)


def plan_line(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"plan": line["plan"] | {"chunks": [["r", 0, 1, 1]]}}


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda lines: lines[1:], ":1: schema: must be 'stemkv.steplog/3', got None"),
        (lambda lines: [], ": empty"),
        (lambda lines: ["{", *lines], ":1: not JSON"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], ":3: not JSON"),
        (lambda lines: ["[" * 100_000, *lines], ":1: not JSON"),
        (lambda lines: [*lines, lines[2]], ":4: kind: a plan must come before commit"),
        (lambda lines: [*lines[:2], lines[1]], ":3: kind: its commit must come before"),
        (
            lambda lines: [lines[0], json.dumps(plan_line(json.loads(lines[1])))],
            ":2: plan.chunks[0]: Expected `array` of at least length 5, got 4",
        ),
        (
            lambda lines: [lines[0].replace('"block_size":4', '"block_size":0')],
            ":1: cache: block_size must be at least 1",
        ),
        (
            lambda lines: [lines[0].replace('"gdsf"', '"oracle"')],
            ":1: eviction: eviction must be one of reuse_index",
        ),
        (
            lambda lines: [lines[0].replace('["group","ann"]', '["private","ann"]')],
            ":1: quotas: quotas: must name a domain once",
        ),
        (
            lambda lines: [lines[0].replace("steplog/3", "steplog/1")],
            ":1: schema: must be 'stemkv.steplog/3', got 'stemkv.steplog/1', which does "
            "not say in which order requests were served; record the log with this "
            "version",
        ),
    ],
    ids=[
        "headless",
        "empty",
        "noise",
        "cut",
        "deep",
        "commits",
        "plans",
        "row",
        "size",
        "policy",
        "quota",
        "old",
    ],
)
def test_a_log_that_is_no_log_is_refused(
    spoil: Callable[[list[str]], list[str]], problem: str
) -> None:
    state = state_of(0)
    plan = PlanRecord(step=0, now=0.0, copies=(), chunks=(), digest="")
    lines = written(Planned(plan=plan), Committed(now=1.0, samples={}, state=state))

    with pytest.raises(StepLogError) as caught:
        read_step_log(spoil(lines), file="log")

    assert f"log{problem}" in str(caught.value)


@given(st.text(max_size=30) | st.recursive(st.none() | counts, st.lists).map(str))
def test_any_text_is_refused_with_an_error_of_ours(text: str) -> None:
    with pytest.raises(StemKVError, match="log:2"):
        read_step_log([*written(), text], file="log")
