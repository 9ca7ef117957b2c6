"""What an engine recorded, the core decides again: plan by plan, block by block.

And what a cost model says of times to first token is what would have been measured, if
steps took as long as it says.
"""

from __future__ import annotations

import functools
import io
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import (
    CacheConfig,
    Domain,
    FinishReason,
    OrderConfig,
    RequestSpec,
    Sample,
    SchedulerConfig,
    SharingPolicy,
    StepResult,
    TokenIds,
)
from stemkv.core.books.cost import FittedCost, StepShape
from stemkv.core.core import Core, CoreConfig
from stemkv.core.prefix.hints import Hints
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import PrefixAwaited, TokenSampled
from stemkv.core.schedule.orders import ORDERS
from stemkv.core.schedule.request import RequestId
from stemkv.engine import Engine, InFlight, SamplingParams
from stemkv.engine.recorder import StepRecorder
from stemkv.errors import StepLogError
from stemkv.measure.steplog import (
    Added,
    Call,
    Cancelled,
    Committed,
    CoreState,
    Declared,
    Kept,
    Planned,
    PlanRecord,
    SessionEnded,
    StepLog,
    StepLogHeader,
)
from stemkv.measure.steplog_lines import read_step_log
from stemkv.sim import agreement
from stemkv.sim.agreement import Agreement, make_core, predict, repeat
from tests.engine.lives import EVERY_POLICY, POLICIES, Life, name_of, small_quotas
from tests.engine.models import random_ids, tiny, tiny_once, tokens
from tests.engine.recording import Recording, record
from tests.engine.serving import random_traffic, serve

PARAMS = SamplingParams(max_new_tokens=6)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def with_core(header: StepLogHeader, **parts: Any) -> StepLogHeader:
    return replace(header, core=replace(header.core, **parts))


def assert_repeats(log: StepLog) -> Agreement:
    agreement = repeat(log)
    assert agreement.first_difference is None, str(agreement.first_difference)
    assert agreement.is_equal
    assert agreement.num_equal_plans == agreement.num_plans > 0
    return agreement


# Logs of engines


def test_random_traffic_is_repeated_plan_by_plan() -> None:
    met: Counter[str] = Counter()
    # Logs without these would be repeated by a core that gets them wrong.
    wanted = {"reused", "copied", "preempted", "forked"}
    wanted |= {"cancelled", "evicted", "chunked", "awaited"}
    for seed in range(40):
        if seed >= 12 and all(met[what] for what in wanted):
            break  # what traffic meets depends on how the core decides
        draw = random.Random(seed)
        recording = record(
            num_blocks=draw.choice((26, 40, 160)),
            block_size=draw.choice((3, 4)),
            token_budget=draw.choice((7, 40, 512)),
            max_num_running=draw.choice((3, 4, 6)),
            order=draw.choice((OrderConfig(), OrderConfig(name="fcfs"))),
        )
        engine = recording.engine
        if draw.random() < 0.5:
            engine.declare_public(tokens(random_ids(20)))
        engine.on_event = lambda e: met.update(awaited=isinstance(e, PrefixAwaited))
        served = serve(engine, _fitting(random_traffic(draw), engine))

        agreement = assert_repeats(recording.log)

        for sample_id, completion in served.completions.items():
            is_cancelled = completion.finish_reason is FinishReason.CANCELLED
            if completion.sample == 0 or not is_cancelled:  # else it never split off
                assert agreement.hit_tokens[sample_id] == completion.counts.reused
            met["reused"] += completion.counts.reused
            met["copied"] += completion.counts.copied
            met["preempted"] += completion.num_preemptions
            met["forked"] += completion.counts.inherited > 0
            met["cancelled"] += is_cancelled
        met["evicted"] += engine.usage().num_evicted_blocks
        met["chunked"] += sum(
            chunk.num_samples == 0
            for plan, _ in recording.log.steps()
            for chunk in plan.chunks
        )
    for what in wanted:
        assert met[what], f"no {what}: {met}"


def _fitting(asks: list[Any], engine: Engine) -> list[Any]:
    """The asks that the engine can ever serve, none that follow another."""
    total = engine.cache.pool.num_total * engine.cache.config.block_size
    fits = [a for a in asks if len(a.ids) + a.params.max_new_tokens < total]
    return [a for a in fits if a.follows is None]


def update_weights(engine: Engine, policy: InFlight) -> None:
    name = "model.norm.weight"
    old = engine.loaded.model.state_dict()[name]
    engine.update_weights({name: old + 0.5}, in_flight=policy)


def reset(engine: Engine, policy: InFlight) -> None:
    engine.reset()


def update_sharing(engine: Engine, policy: InFlight) -> None:
    groups = {"both": {"a", "b"}}
    engine.update_sharing(SharingPolicy(groups=groups), in_flight=policy)


@pytest.mark.parametrize(
    "change", [update_weights, update_sharing, reset], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("policy", list(InFlight), ids=lambda p: p.name)
def test_rollouts_and_resets_are_repeated(
    change: Callable[[Engine, InFlight], None], policy: InFlight
) -> None:
    recording = record(tiny(), num_blocks=40, token_budget=16)
    engine = recording.engine
    prompt = random_ids(40)
    for index in range(6):
        engine.add(tokens([*prompt, index]), PARAMS, tenant="ab"[index % 2])
        engine.step()
        if index == 3:
            change(engine, policy)
    engine.drain()

    assert_repeats(recording.log)


def test_what_a_request_had_reused_is_forgotten_when_it_begins_again() -> None:
    recording = record(tiny())
    engine = recording.engine
    engine.generate([tokens(random_ids(40))], PARAMS)
    engine.add(tokens(random_ids(40)), PARAMS, request_id="r")
    engine.step()
    update_weights(engine, InFlight.RESTART)
    engine.cancel("r")

    agreement = assert_repeats(recording.log)

    (hit, *_) = recording.log.steps()[-1][0].chunks
    assert (hit.request_id, hit.num_reused) == ("r", 39)
    assert agreement.hit_tokens["r"] == 0


def test_failed_steps_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(token_budget=16)
    engine = recording.engine
    execute = engine._served.runner.execute
    num_steps = 0

    def fail_twice(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (2, 5):
            raise RuntimeError("no luck")
        return execute(*arguments)

    monkeypatch.setattr(engine._served.runner, "execute", fail_twice)
    for index in range(5):
        engine.add(tokens(random_ids(40, seed=index % 2)), PARAMS)
    ended = engine.drain()

    assert {c.finish_reason for c in ended} == {
        FinishReason.FAILED,
        FinishReason.LENGTH,
    }
    assert_repeats(recording.log)


def test_a_chunk_that_fails_alone_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(token_budget=64)
    engine = recording.engine
    execute = engine._served.runner.execute

    def fail_for_one(plan: Any, *more: Any) -> Any:
        if any(chunk.request_id == "r1" and chunk.start for chunk in plan.chunks):
            raise RuntimeError("no luck")
        return execute(plan, *more)

    monkeypatch.setattr(engine._served.runner, "execute", fail_for_one)
    for index in range(3):
        ids = tokens(random_ids(40, seed=index))
        engine.add(ids, PARAMS, request_id=f"r{index}")
    ended = {c.request_id: c.finish_reason for c in engine.drain()}

    assert ended.pop("r1") is FinishReason.FAILED
    assert set(ended.values()) == {FinishReason.LENGTH}
    assert_repeats(recording.log)


def test_prompts_with_embeddings_are_repeated_without_their_content() -> None:
    recording = record(tiny_once("llama-group1", torch.float32), block_size=4)
    engine = recording.engine
    image = torch.ones(14, 64)
    other = torch.zeros(14, 64)
    for vectors in (image, other, image, image):
        prompt = engine.embed(
            [tokens(random_ids(6)), vectors, vectors, tokens(random_ids(5, seed=1))]
        )
        engine.add(prompt, PARAMS)
        engine.drain()

    agreement = assert_repeats(recording.log)

    # 39 positions, of which the last is always computed and whole spans are shared.
    assert list(agreement.hit_tokens.values()) == [0, 6, 38, 38]


@EVERY_POLICY
@pytest.mark.parametrize("has_quotas", [False, True], ids=["pooled", "quotas"])
def test_every_policy_evicts_the_same_blocks_again(
    eviction: EvictionConfig, has_quotas: bool
) -> None:
    log = lived(eviction, has_quotas=has_quotas).log

    assert_repeats(log)

    assert (log.header.core.quotas is not None) == has_quotas
    assert (log.header.costs is None) == (eviction.objective == "tokens")
    kinds = Counter(type(call) for call in log.calls)
    for kind in (SessionEnded, Kept, Declared):
        assert kinds[kind], f"no {kind}: {kinds}"
    hints = [spec.hints for spec in log.specs]
    for field in ("session", "ends_session", "next_use_s", "ephemeral_from"):
        assert any(getattr(each, field) for each in hints), f"no {field}"


@pytest.mark.parametrize("lookahead", [0, 1, 32])
def test_a_queue_that_eviction_looks_at_is_repeated(lookahead: int) -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    life = Life(loaded, EvictionConfig(), seed=2, config={"lookahead": lookahead})
    life.live(16)

    assert life.log.header.core.scheduler.lookahead == lookahead
    assert_repeats(life.log)
    if lookahead == 0:
        other = replace(life.log.header.core.scheduler, lookahead=32)
        changed_log = replace(
            life.log, header=with_core(life.log.header, scheduler=other)
        )
        assert not repeat(changed_log).is_equal


def test_what_the_core_follows_from_a_call_is_not_told_to_it_again() -> None:
    """A session that a request ends is in the log with the request, and there only."""
    recording = record()
    hints = Hints(session="s", ends_session=True)
    for index in range(3):
        name = f"r{index}"
        recording.engine.add(
            tokens(random_ids(20)), PARAMS, request_id=name, hints=hints
        )
        recording.engine.step()
        if index:
            recording.engine.cancel(name)
    recording.engine.drain()

    kinds = {type(call) for call in recording.log.calls}

    assert SessionEnded not in kinds
    assert Cancelled in kinds
    assert_repeats(recording.log)


@functools.cache
def lived(eviction: EvictionConfig, *, has_quotas: bool) -> Life:
    """A life with hints, orders to keep and sessions that end, under a policy."""
    loaded = tiny_once("llama-group1", torch.float32)
    quotas = small_quotas(loaded) if has_quotas else None
    life = Life(loaded, eviction, seed=6, quotas=quotas)
    life.live(20)
    return life


# Differences are found


@EVERY_POLICY
def test_another_policy_on_the_same_log_is_a_difference(
    eviction: EvictionConfig,
) -> None:
    log = lived(eviction, has_quotas=False).log
    weighed = EvictionConfig(name="gdsf", objective="seconds")
    priced = lived(weighed, has_quotas=False).log.header.costs
    # Blocks of one size and no costs: nothing is left that GDSF adds.
    alike = {"lfu_da-tokens", "gdsf-tokens"}
    for other in POLICIES:
        if other == eviction or {name_of(eviction), name_of(other)} == alike:
            continue
        costs = priced if other.objective == "seconds" else None
        header = replace(with_core(log.header, eviction=other), costs=costs)

        found = repeat(replace(log, header=header)).first_difference

        assert found is not None, f"{name_of(other)} evicts the same"
        assert found.what in ("plan", "state")


@pytest.mark.parametrize("has_quotas", [False, True], ids=["pooled", "quotas"])
def test_one_other_victim_is_found_in_the_step_in_which_it_is_taken(
    has_quotas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = lived(EvictionConfig(), has_quotas=has_quotas).log
    other = OtherVictim(monkeypatch)
    assert_repeats(log)
    num_choices = other.num_choices
    assert num_choices > 50

    for wrong in range(0, num_choices, max(1, num_choices // 25)):
        other.take(wrong)

        found = repeat(log).first_difference
        assert found is not None, f"choice {wrong} is not seen"
        # Blocks are freed within a plan, or within the end of a request.
        seen = next(
            index
            for index in range(other.call, len(log.calls))
            if isinstance(log.calls[index], Planned | Committed)
        )
        assert found.call == seen, f"choice {wrong} is seen late"


class OtherVictim:
    """Lets a core take another leaf than it would, once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_choices = 0
        self.call = 0  # of the log, in which the wrong one was taken
        self._wrong: int | None = None
        self._now_at = 0
        self._wrap_first(patch)
        self._note_calls(patch)

    def take(self, wrong: int) -> None:
        """Get choice number `wrong` wrong in the next repetition."""
        self.num_choices = 0
        self._wrong = wrong

    def _wrap_first(self, patch: pytest.MonkeyPatch) -> None:
        first = Retention._first

        def other_first(retention: Retention, stock: Any, *rest: Any) -> Any:
            chosen = first(retention, stock, *rest)
            others = [] if chosen is None else sorted({*stock.places} - {chosen[0]})
            if not others:
                return chosen
            self.num_choices += 1
            if self.num_choices - 1 != self._wrong:
                return chosen
            self.call = self._now_at
            return others[-1], chosen[1]

        patch.setattr(Retention, "_first", other_first)

    def _note_calls(self, patch: pytest.MonkeyPatch) -> None:
        make = agreement._Repetition.make

        def noting(repetition: Any, index: int, call: Any) -> Any:
            self._now_at = index
            return make(repetition, index, call)

        patch.setattr(agreement._Repetition, "make", noting)


@pytest.mark.parametrize("has_quotas", [False, True], ids=["pooled", "quotas"])
def test_another_quota_floor_hint_or_keep_is_a_difference(has_quotas: bool) -> None:
    log = lived(EvictionConfig(), has_quotas=has_quotas).log
    calls = {
        "hints": [
            replace(call, spec=replace(call.spec, hints=Hints()))
            if isinstance(call, Added)
            else call
            for call in log.calls
        ],
        "keeps": [call for call in log.calls if not isinstance(call, Kept)],
    }
    headers = {"quotas": with_core(log.header, quotas=None if has_quotas else QUOTAS)}

    others = {name: replace(log, calls=tuple(each)) for name, each in calls.items()}
    others |= {name: replace(log, header=each) for name, each in headers.items()}

    for name, other in others.items():
        assert not repeat(other).is_equal, f"without {name} it decides the same"


QUOTAS = QuotaConfig(
    quotas={Domain.private("a"): Quota(floor_blocks=16)}, public_blocks=6
)


def test_a_log_of_seconds_without_prices_is_refused() -> None:
    eviction = EvictionConfig(objective="seconds")
    log = lived(eviction, has_quotas=False).log

    with pytest.raises(
        StepLogError, match="header: eviction.objective seconds needs costs"
    ):
        make_core(replace(log.header, costs=None))


def test_a_header_that_promises_too_much_is_refused(busy_log: StepLog) -> None:
    quotas = QuotaConfig(public_blocks=busy_log.header.core.cache.num_blocks)

    with pytest.raises(StepLogError, match="header: floors of 0 blocks"):
        make_core(with_core(busy_log.header, quotas=quotas))


@pytest.fixture(scope="module")
def busy_log() -> StepLog:
    """A log with everything that a plan can hold."""
    recording = record(num_blocks=20, block_size=4, token_budget=24)
    engine = recording.engine
    prompt = random_ids(30)
    for index in range(6):
        params = SamplingParams(
            max_new_tokens=10, num_samples=1 + index % 2, temperature=1.0
        )
        engine.add(tokens([*prompt[: 30 - index], index]), params)
        engine.step()
    engine.drain()
    log = recording.log
    assert_repeats(log)
    assert any(plan.copies for plan, _ in log.steps())
    return log


def changed(plan: PlanRecord, **changes: Any) -> PlanRecord:
    (first, *rest) = plan.chunks
    return replace(plan, chunks=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, digest="0" * 32),
        lambda plan: replace(plan, chunks=plan.chunks[:-1]),
        lambda plan: changed(plan, start=plan.chunks[0].start + 1),
        lambda plan: changed(plan, end=plan.chunks[0].end + 1),
        lambda plan: changed(plan, num_samples=7),
        lambda plan: changed(plan, num_reused=plan.chunks[0].num_reused + 4),
        lambda plan: replace(plan, copies=()),
    ],
    ids=["blocks", "fewer", "start", "end", "samples", "hits", "copies"],
)
def test_a_plan_that_differs_is_reported_with_both_plans(
    busy_log: StepLog, change: Callable[[PlanRecord], PlanRecord]
) -> None:
    index, plan = next(
        (index, call.plan)
        for index, call in enumerate(busy_log.calls)
        if isinstance(call, Planned) and call.plan.copies
    )
    calls = list(busy_log.calls)
    calls[index] = Planned(plan=change(plan))

    agreement = repeat(replace(busy_log, calls=tuple(calls)))

    found = agreement.first_difference
    assert found is not None
    assert (found.call, found.what) == (index, "plan")
    assert (found.recorded, found.repeated) == (change(plan), plan)
    assert agreement.num_equal_plans < agreement.num_plans
    assert f"line {index + 2}" in str(found)


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "token_budget"])
def test_a_core_of_another_size_is_found(busy_log: StepLog, field: str) -> None:
    header = busy_log.header
    if field == "token_budget":
        scheduler = replace(header.core.scheduler, token_budget=23)
        other = with_core(header, scheduler=scheduler)
    else:
        size = {"num_blocks": 19, "block_size": 5}[field]
        cache = replace(header.core.cache, **{field: size})
        other = with_core(header, cache=cache)

    assert not repeat(replace(busy_log, header=other)).is_equal


def test_a_state_that_differs_is_reported(busy_log: StepLog) -> None:
    calls = list(busy_log.calls)
    index = next(i for i, call in enumerate(calls) if hasattr(call, "state"))
    state = replace(calls[index].state, num_evicted_blocks=99)  # type: ignore[union-attr]
    calls[index] = replace(calls[index], state=state)  # type: ignore[call-arg]

    found = repeat(replace(busy_log, calls=tuple(calls))).first_difference

    assert found is not None
    assert (found.call, found.what, found.recorded) == (index, "state", state)
    assert isinstance(found.repeated, CoreState)


def test_a_log_that_the_core_refuses_is_a_difference(busy_log: StepLog) -> None:
    twice = replace(busy_log, calls=(busy_log.calls[0], *busy_log.calls))

    found = repeat(twice).first_difference

    assert found is not None
    assert (found.call, found.what) == (1, "error")
    assert "DuplicateRequest" in str(found)


def test_an_order_without_the_costs_it_needs_is_refused(busy_log: StepLog) -> None:
    order = OrderConfig(name="deadline", slo_ttft_s={"chat": 1.0})
    header = with_core(busy_log.header, order=order)

    with pytest.raises(StepLogError, match="header: order deadline needs a cost model"):
        make_core(header)


EVERY_ORDER = [
    *(OrderConfig(name=name) for name in ORDERS if name != "deadline"),
    OrderConfig(name="deadline", slo_ttft_s={"a": 0.5}),
    OrderConfig(lane=2, quantum=64, pauses_prefills=False, weights={"a": 2.0}),
]


@pytest.mark.parametrize(
    ("index", "has_costs"),
    [
        (index, has_costs)
        for index, order in enumerate(EVERY_ORDER)
        for has_costs in (False, True)
        if has_costs or order.name != "deadline"  # which is refused, see above
    ],
)
def test_every_order_plans_the_same_again(index: int, has_costs: bool) -> None:
    order = EVERY_ORDER[index]
    decides = not has_costs
    for seed in range(2):
        draw = random.Random(seed)
        config: dict[str, Any] = {"order": order, "block_size": 4}
        if has_costs:
            config["step_time_s"] = 0.3
        recording = record(
            num_blocks=draw.choice((40, 160)),
            token_budget=draw.choice((7, 40)),
            max_num_running=4,
            costs=COST if has_costs else None,
            **config,
        )
        serve(recording.engine, _fitting(random_traffic(draw), recording.engine))
        assert recording.log.header.core.order == order
        assert recording.log.header.costs == (COST if has_costs else None)

        assert_repeats(recording.log)

        others = iter([each for each in EVERY_ORDER if each != order])
        while not decides and (other := next(others, None)) is not None:
            header = with_core(recording.log.header, order=other)
            changed = replace(recording.log, header=header)
            decides = not repeat(changed).is_equal
    assert decides, "with any other order it is the same"


# Times


COST = FittedCost(
    source="made up",
    bytes_per_token=1,
    step_s=0.02,
    prefill_chunk_s=0.001,
    prefill_token_s=0.003,
    prefill_pair_s=1e-6,
    decode_s=0.002,
    decode_context_s=1e-5,
    copied_token_s=0.001,
    flops_per_token=1.0,
    flops_per_pair=1.0,
    assumed_watts=1.0,
)
NAMESPACE = bytes(32)


def run_on_cost(
    specs: list[RequestSpec], cancels: dict[str, float], cost: FittedCost
) -> tuple[StepLog, dict[str, float]]:
    """A driver without tensors whose steps take as long as `cost` says, recorded.

    Written apart from `predict`, which must find the same times to first token.
    """
    file = io.StringIO()
    config = CoreConfig(
        cache=CacheConfig(num_blocks=60, block_size=4),
        scheduler=SchedulerConfig(token_budget=32, max_num_running=6),
    )
    core = Core(config, recorder=StepRecorder(file, model="none"))
    scheduler = core.scheduler
    waiting = deque(sorted(specs, key=lambda spec: spec.arrival_s))
    left = dict(sorted(cancels.items(), key=lambda item: item[1]))
    now = 0.0
    ttfts: dict[str, float] = {}
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now:
            core.add(waiting.popleft())
        for name in [n for n, at_s in left.items() if at_s <= now]:
            del left[name]
            core.cancel(RequestId(name), now)
        if not scheduler.has_work:
            continue
        plan = core.schedule(now)
        shape = StepShape(num_copied_tokens=sum(c.num_tokens for c in plan.copies))
        samples = {}
        for chunk in plan.chunks:
            shape.add_chunk(chunk.start, chunk.end, is_decode=chunk.is_decode)
            samples[chunk.request_id] = (Sample(plan.step % 50),) * chunk.num_samples
        now += cost.step_seconds(shape)
        for event in core.commit(plan, StepResult(samples), now):
            if isinstance(event, TokenSampled) and event.index == 0:
                ttfts[event.request_id] = now
    arrivals = {spec.request_id: spec.arrival_s for spec in specs}
    return read_step_log(file.getvalue().splitlines(), file="log"), {
        name: at_s - arrivals[RequestId(name)]
        for name, at_s in ttfts.items()
        if name in arrivals
    }


def made_up_specs(draw: random.Random, num_requests: int) -> list[RequestSpec]:
    document = [draw.randrange(50) for _ in range(60)]
    return [
        RequestSpec(
            request_id=RequestId(f"r{index}"),
            prompt=TokenIds.from_ids(
                document[: draw.randint(0, 60)]
                + [draw.randrange(50) for _ in range(draw.randint(1, 40))]
            ),
            max_new_tokens=draw.randint(1, 12),
            arrival_s=draw.uniform(0, 4),
            domain=Domain.private(draw.choice("ab")),
            namespace=NAMESPACE,
            num_samples=draw.choice((1, 1, 2)),
        )
        for index in range(num_requests)
    ]


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_times_of_an_engine_that_runs_as_the_cost_says_are_predicted_exactly(
    seed: int,
) -> None:
    draw = random.Random(seed)
    specs = made_up_specs(draw, draw.randint(1, 15))
    log, ttfts = run_on_cost(specs, {}, COST)

    prediction = predict(log, COST)

    assert prediction.measured_s == pytest.approx(ttfts)
    assert prediction.predicted_s == pytest.approx(ttfts)
    assert prediction.error(50) == pytest.approx(0.0, abs=1e-9)


def test_a_cost_that_is_half_of_it_predicts_shorter_times() -> None:
    specs = made_up_specs(random.Random(1), 15)
    log, _ = run_on_cost(specs, {}, COST)
    half = replace(
        COST, step_s=0.01, prefill_token_s=0.0015, decode_s=0.001, prefill_chunk_s=0.0
    )

    prediction = predict(log, half)

    assert prediction.error(50) < -0.4
    assert prediction.error(90) < -0.4


def test_cancelled_requests_are_cancelled_again_and_not_compared() -> None:
    specs = made_up_specs(random.Random(2), 15)
    cancels = {spec.request_id: spec.arrival_s + 0.05 for spec in specs[::2]}
    log, ttfts = run_on_cost(specs, dict(cancels), COST)
    assert any(isinstance(call, Cancelled) for call in log.calls)

    prediction = predict(log, COST)

    assert len(ttfts) < 15
    assert prediction.predicted_s == pytest.approx(ttfts)


def test_a_request_that_was_cancelled_in_its_first_step_has_no_time() -> None:
    recording = record()
    engine = recording.engine
    engine.on_logits = lambda request_id, index, row: engine.cancel("gone")
    for name in ("gone", "r"):
        engine.add(tokens(random_ids(20, seed=len(name))), PARAMS, request_id=name)
    engine.drain()

    prediction = predict(recording.log, COST)

    assert list(prediction.measured_s) == list(prediction.predicted_s) == ["r"]


def test_ended_sessions_and_orders_to_keep_have_their_times_in_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = lived(EvictionConfig(), has_quotas=False).log
    told: list[SessionEnded | Kept] = []
    tell = agreement.tell

    def noting(core: Core, call: Call) -> None:
        if isinstance(call, SessionEnded | Kept):
            told.append(call)
        tell(core, call)

    monkeypatch.setattr(agreement, "tell", noting)

    prediction = predict(log, COST)

    recorded = [c for c in log.calls if isinstance(c, SessionEnded | Kept)]
    assert len(recorded) > 0
    for call, other in zip(recorded, told, strict=True):
        assert replace(other, now=call.now) == call
        assert other.now >= call.now
    assert prediction.predicted_s.keys() == {spec.request_id for spec in log.specs}


def test_times_of_rollouts_are_not_predicted() -> None:
    recording: Recording = record()
    recording.engine.generate([tokens(random_ids(20))], PARAMS)
    recording.engine.reset()

    with pytest.raises(StepLogError, match=r"line \d+: a log with NamespaceReset"):
        predict(recording.log, COST)


def test_a_request_id_that_comes_again_is_refused_by_predict_and_repeated() -> None:
    recording = record()
    for _ in range(2):
        recording.engine.add(tokens(random_ids(20)), PARAMS, request_id="r")
        recording.engine.drain()

    assert assert_repeats(recording.log).hit_tokens == {"r": 19}
    assert sum(isinstance(call, Added) for call in recording.log.calls) == 2
    with pytest.raises(StepLogError, match="occur twice"):
        predict(recording.log, COST)
