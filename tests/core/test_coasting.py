"""A request that coasts is scheduled as if it did not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from stemkv.core import (
    CacheConfig,
    Domain,
    Fcfs,
    FinishReason,
    Lru,
    OrderConfig,
    PrefixCache,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TokenIds,
)
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.cache import CacheUsage
from stemkv.core.prefix.events import BlocksPublished
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.tokens import MIN_SPAN_TOKENS, TOKEN_BYTES, Span
from stemkv.core.retention.policy import ReuseIndex
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TokenSampled,
)
from stemkv.core.schedule.order import Fair, Order
from stemkv.errors import InvariantError, PromptTooLong, RequestError
from tests.core.scheduling import FCFS, NAMESPACE
from tests.seeds import slow

BLOCK_SIZE = 4
# Besides the plain one: those that count what is decoded, or pause, or look at matches.
# A quantum is less than what a prompt and an output of the test cost.
OTHER_ORDERS = {
    "fair-pausing": OrderConfig(name="fair", lane=2, quantum=8),
    "fair-not-pausing": OrderConfig(
        name="fair", lane=2, quantum=8, pauses_prefills=False
    ),
    "residual": OrderConfig(name="residual"),
    "dfs": OrderConfig(name="dfs"),
}
HINTS = [
    NO_HINTS,
    Hints(session="s"),
    NO_HINTS,
    Hints(session="s", ends_session=True),
    Hints(ephemeral_from=8),
    Hints(next_use_s=20.0),
]


@dataclass(frozen=True)
class Script:
    """One request whose output is known."""

    spec: RequestSpec
    output: bytes
    stops: bool  # the last token of the output ends it, not `max_new_tokens`


def script(rng: random.Random, index: int, now: float) -> Script:
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 18))]
    num_output = rng.randint(1, 16)
    output = [rng.randrange(2) for _ in range(num_output)]
    stops = rng.random() < 0.5
    spec = RequestSpec(
        request_id=f"r{index}",
        prompt=TokenIds.from_ids(prompt),
        max_new_tokens=num_output + (rng.randint(1, 5) if stops else 0),
        arrival_s=now,
        domain=Domain.private(rng.choice("ab")),
        namespace=rng.choice([NAMESPACE, NAMESPACE, None]),
        hints=HINTS[index % len(HINTS)],
    )
    return Script(spec, TokenIds.from_ids(output).buffer, stops)


@dataclass
class Run:
    """The loop of a driver that knows all outputs."""

    scheduler: Scheduler
    coasts: bool
    order: Order
    scripts: dict[str, Script] = field(default_factory=dict)
    work: list[tuple[int, int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    debts: list[list[float]] = field(default_factory=list)  # after each plan
    num_coasted: int = 0

    def step(
        self, now: float, *, cancels: Sequence[str] = (), fails: bool = False
    ) -> None:
        """One step, in which some are cancelled while it runs, or which fails."""
        plan = self.scheduler.schedule(now)
        check_scheduler(self.scheduler)
        self.work.append(work_of(plan))
        self.debts.append(debts_of(self.order))
        self.num_coasted += plan.num_coasting
        for request_id in cancels:
            self.scheduler.cancel(request_id, now + 0.25)
        if fails:
            self.events += self.scheduler.abandon(plan, now + 0.5)
            check_scheduler(self.scheduler)
            return
        samples = {
            chunk.request_id: (self.sample(chunk.request_id),)
            for chunk in plan.chunks
            if chunk.num_samples
        }
        events = self.scheduler.commit(plan, StepResult(samples), now + 0.5)
        check_scheduler(self.scheduler)
        self.events += [
            e for e in events if not isinstance(e, TokenSampled | BlocksPublished)
        ]
        if not self.coasts:
            return
        for event in events:
            if isinstance(event, TokenSampled):
                start = (event.index + 1) * TOKEN_BYTES
                output = self.scripts[event.request_id].output
                # The last token is sampled, not coasted: it may end the request.
                self.scheduler.coast(event.request_id, output[start:-TOKEN_BYTES])

    def sample(self, request_id: str) -> Sample:
        request = self.scheduler.request(request_id)
        assert request is not None
        script = self.scripts[request_id]
        index = request.num_output_tokens
        end = (index + 1) * TOKEN_BYTES
        token = int.from_bytes(script.output[end - TOKEN_BYTES : end], "little")
        is_last = end == len(script.output)
        stops = script.stops and is_last
        return Sample(token, FinishReason.STOP_TOKEN if stops else None)


def work_of(plan: StepPlan) -> tuple[int, int, int]:
    """Tokens, requests and positions of a step, coasting or not."""
    return (
        plan.num_tokens,
        len(plan.chunks) + plan.num_coasting,
        sum(chunk.end for chunk in plan.chunks) + plan.num_coasting_context,
    )


def usage_of(run: Run) -> CacheUsage:
    """Blocks by state; in tokens, one that coasts is behind until it is spelled out."""
    return replace(run.scheduler.cache.usage(), num_active_tokens=0)


def lru_cache(num_blocks: int) -> PrefixCache:
    config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return PrefixCache(config, Retention(Lru))


# A cache of so many blocks: the plain one, or one with quotas for instance.
MakeCache = Callable[[int], PrefixCache]


def build(
    coasts: bool,
    num_blocks: int,
    make_cache: MakeCache = lru_cache,
    order: OrderConfig = FCFS,
) -> Run:
    config = SchedulerConfig(token_budget=12, max_num_running=6)
    strategy = order.make()
    scheduler = Scheduler(config, make_cache(num_blocks), strategy)
    return Run(scheduler, coasts, strategy)


def debts_of(order: Order) -> list[float]:
    """What the tenants of the tests may be served, and what their oldest is owed."""
    if not isinstance(order, Fair):
        return []
    return [
        value(name) for name in "ab" for value in (order.deficit, order.lane_credit)
    ]


@pytest.mark.parametrize("seed", [*range(12), *slow(range(12, 60))])
def test_coasting_changes_no_step_no_event_and_no_state(seed: int) -> None:
    check_coasting(seed, lru_cache)


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_coasting_changes_nothing_in_other_orders_either(name: str) -> None:
    for seed in range(3):
        check_coasting(seed, lru_cache, OTHER_ORDERS[name])


def check_coasting(seed: int, make_cache: MakeCache, order: OrderConfig = FCFS) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([10, 14, 40])
    runs = [build(coasts, num_blocks, make_cache, order) for coasts in (False, True)]
    index = 0
    now = 0.0
    for step in range(400):
        while step < 120 and rng.random() < 0.25:
            each = script(rng, index, now)
            index += 1
            with suppress(PromptTooLong):
                for run in runs:
                    run.scripts[each.spec.request_id] = each
                    run.scheduler.add(each.spec)
        cancelled = rng.randrange(index) if index and rng.random() < 0.05 else None
        for run in runs:
            if cancelled is not None:
                run.scheduler.cancel(f"r{cancelled}", now)
            run.step(now)
        if step > 120 and not runs[0].scheduler.has_work:
            break
        now += 1.0

    plain, coasting = runs
    assert not plain.scheduler.has_work
    assert not coasting.scheduler.has_work
    assert coasting.work == plain.work
    assert coasting.events == plain.events
    assert coasting.debts == plain.debts
    assert usage_of(coasting) == usage_of(plain)
    assert {type(e) for e in plain.events} >= {RequestAdmitted, RequestFinished}
    assert coasting.num_coasted > 30


@pytest.mark.parametrize("seed", [*range(12), *slow(range(12, 60))])
def test_who_ends_while_a_step_runs_ends_in_the_same_order(seed: int) -> None:
    rng = random.Random(1000 + seed)
    num_blocks = rng.choice([10, 14, 40])
    runs = [build(coasts, num_blocks) for coasts in (False, True)]
    index = 0
    for now in range(120):
        while rng.random() < 0.4:
            each = script(rng, index, float(now))
            index += 1
            for run in runs:
                run.scripts[each.spec.request_id] = each
                run.scheduler.add(each.spec)
        cancels = [f"r{i}" for i in range(index) if rng.random() < 0.04]
        fails = rng.random() < 0.05
        for run in runs:
            run.step(float(now), cancels=cancels, fails=fails)

    plain, coasting = runs
    assert coasting.work == plain.work
    assert [e for e in coasting.events if not isinstance(e, BlocksPublished)] == [
        e for e in plain.events if not isinstance(e, BlocksPublished)
    ]
    assert usage_of(coasting) == usage_of(plain)
    assert coasting.num_coasted > 20


def test_the_random_runs_preempt_requests_that_coast() -> None:
    """Else the test above would not say much about it."""
    rng = random.Random(3)
    run = build(coasts=True, num_blocks=10)
    for index in range(6):
        each = script(rng, index, 0.0)
        run.scripts[each.spec.request_id] = each
        run.scheduler.add(each.spec)
    now = 0.0
    while run.scheduler.has_work:
        run.step(now)
        now += 1.0
    assert any(isinstance(e, RequestPreempted) for e in run.events)
    assert run.num_coasted


# Everything that may happen to one that coasts


def token_bytes(*ids: int) -> bytes:
    return TokenIds.from_ids(ids).buffer


def coasting_run(
    *outputs: bytes, num_blocks: int = 40, num_prompt: int = 5, coasts: bool = True
) -> Run:
    """Requests r0, r1 … of one tenant that have sampled their first token."""
    run = build(coasts=coasts, num_blocks=num_blocks)
    for index, output in enumerate(outputs):
        spec = RequestSpec(
            request_id=f"r{index}",
            prompt=TokenIds.from_ids([index + 10] + [1] * (num_prompt - 1)),
            max_new_tokens=len(output) // TOKEN_BYTES,
            arrival_s=float(index),
            domain=Domain.private("a"),
            namespace=NAMESPACE,
        )
        run.scripts[spec.request_id] = Script(spec, output, stops=False)
        run.scheduler.add(spec)
    now = -40.0  # so that tests can begin at 0
    while any(r.num_output_tokens == 0 for r in run.scheduler.requests()):
        run.step(now)
        now += 1.0
    return run


LONG = token_bytes(*[1] * 40)


def ends(run: Run) -> list[Event]:
    return [e for e in run.events if isinstance(e, RequestFinished | RequestAborted)]


def test_a_failed_step_aborts_those_who_coast_and_counts_nothing_of_it() -> None:
    run = coasting_run(LONG, LONG)
    scheduler = run.scheduler
    run.step(1.0)
    assert scheduler.num_coasting == 2
    plan = scheduler.schedule(3.0)
    requests = scheduler.requests()
    events = scheduler.abandon(plan, 3.5)

    assert [type(e) for e in events] == [RequestAborted, RequestAborted]
    assert not scheduler.has_work
    assert (scheduler.num_coasting, scheduler.num_coasting_context) == (0, 0)
    # Their first token and one that coasted; the failed step brought none.
    assert [r.num_output_tokens for r in requests] == [2, 2]
    check_scheduler(scheduler)


def test_after_a_failed_step_others_coast_as_long_as_they_should() -> None:
    run = coasting_run(LONG)
    scheduler = run.scheduler
    scheduler.abandon(scheduler.schedule(1.0), 1.5)

    # Steps that were planned and never committed must not shorten anybody's coasting.
    late = coasting_run(LONG)
    spec = late.scripts["r0"].spec
    run.scripts["r0"] = late.scripts["r0"]
    scheduler.add(spec)
    run.step(2.0)
    for now in range(50):
        if not scheduler.has_work:
            break
        run.step(3.0 + now)
    (finished,) = [e for e in ends(run) if isinstance(e, RequestFinished)]
    assert finished.counts.reused + finished.counts.computed == 5
    assert scheduler.request("r0") is None


@pytest.mark.parametrize("verb", ["restart", "cut_off", "retire", "cancel"])
def test_what_is_done_to_one_that_coasts_is_done_as_if_it_did_not(verb: str) -> None:
    runs = [coasting_run(LONG, LONG, coasts=coasts) for coasts in (False, True)]
    for run in runs:
        run.step(1.0)
        scheduler = run.scheduler
        assert scheduler.num_coasting == (2 if run.coasts else 0)
        match verb:
            case "restart":
                scheduler.restart("r0", b"m" * 32, None, 2.0)
            case "cut_off":
                scheduler.cut_off("r0")
            case "retire":
                scheduler.retire(NAMESPACE, 2.0)
            case "cancel":
                assert scheduler.cancel("r0", 2.0)
        check_scheduler(scheduler)
        for now in range(60):
            run.step(3.0 + now)
    plain, coasting = runs
    assert not plain.scheduler.has_work
    assert not coasting.scheduler.has_work
    assert coasting.work == plain.work
    assert coasting.events == plain.events
    assert usage_of(coasting) == usage_of(plain)
    assert coasting.num_coasted > 15


def test_a_request_behind_a_fence_starts_when_those_who_coast_have_ended() -> None:
    run = coasting_run(token_bytes(*[1] * 12))
    scheduler = run.scheduler
    epoch = scheduler.fence()
    late = replace(run.scripts["r0"].spec, request_id="late")
    run.scripts["late"] = Script(late, run.scripts["r0"].output, stops=False)
    scheduler.add(late)
    run.step(1.0)
    assert scheduler.num_before(epoch) == 1
    for now in range(30):
        if not scheduler.num_before(epoch):
            scheduler.lift_fence(epoch)
        run.step(2.0 + now)
    assert not scheduler.has_work
    starts = [e for e in run.events if isinstance(e, RequestAdmitted)]
    assert [e.request_id for e in starts] == ["r0", "late"]
    assert [e.request_id for e in ends(run)] == ["r0", "late"]
    assert starts[1].now > ends(run)[0].now


def test_one_output_token_never_coasts() -> None:
    run = coasting_run(token_bytes(1))
    assert run.num_coasted == 0
    assert not run.scheduler.has_work
    assert run.scheduler.coast("r0", LONG) == 0
    assert run.scheduler.coast("nobody", LONG) == 0


@pytest.mark.parametrize("num_output", range(2, 14))
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5])
def test_coasting_ends_before_a_block_is_full_and_before_the_last_token(
    num_prompt: int, num_output: int
) -> None:
    """Whatever the last block looks like when the request ends, a full one included."""
    runs = []
    for coasts in (False, True):
        run = coasting_run(
            token_bytes(*[1] * num_output), num_prompt=num_prompt, coasts=coasts
        )
        for now in range(num_output):
            run.step(float(now))
        assert not run.scheduler.has_work
        runs.append(run)
    plain, coasting = runs
    assert coasting.work == plain.work
    assert coasting.events == plain.events
    assert usage_of(coasting) == usage_of(plain)
    # In plans: the first token, the last, and every one that needs or fills a block.
    positions = range(num_prompt, num_prompt + num_output - 1)
    coasted = [p for p in positions[:-1] if p % 4 not in (0, 3)]
    assert coasting.num_coasted == len(coasted)


@pytest.mark.parametrize("refused", ["prefilling", "waiting", "twice", "several"])
def test_who_cannot_coast_is_told_so(refused: str) -> None:
    run = build(coasts=False, num_blocks=40)
    spec = RequestSpec(
        request_id="r",
        prompt=TokenIds.from_ids([1] * (20 if refused == "prefilling" else 5)),
        max_new_tokens=9,
        arrival_s=0.0,
        domain=Domain.private("a"),
        namespace=NAMESPACE,
        num_samples=2 if refused == "several" else 1,
    )
    scheduler = run.scheduler
    scheduler.add(spec)
    if refused != "waiting":
        plan = scheduler.schedule(0.0)
        samples = {
            c.request_id: (Sample(1),) * c.num_samples
            for c in plan.chunks
            if c.num_samples
        }
        with pytest.raises(InvariantError, match="coast while step 0 is pending"):
            scheduler.coast("r", LONG)
        scheduler.commit(plan, StepResult(samples), 0.5)
    if refused == "twice":
        assert scheduler.coast("r", LONG) == 2
    assert scheduler.coast("r", LONG) == 0
    check_scheduler(scheduler)


BURSTS = [range(80), *slow(range(n, n + 80) for n in range(80, 400, 80))]


# Quiet steps: taken at once, they are what they would have been one by one


@dataclass
class Tally:
    """All that a driver could tell of a run: who came and went, and when."""

    num_steps: int = 0
    work: list[tuple[int, int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    debts: dict[int, list[float]] = field(default_factory=dict)  # by number of steps
    num_skipped: int = 0
    num_blocked: int = 0


class Burst:
    """Requests that arrive before given steps, on memory and places that are tight."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.num_blocks = rng.choice([8, 9, 10])
        self.config = SchedulerConfig(
            token_budget=rng.choice([6, 12]),
            max_num_running=rng.choice([2, 2, 3]),
            max_steps_awaiting=rng.choice([0, 1, 256]),
            watermark=rng.choice([0.0, 0.2]),
        )
        self.rng_seed = rng.random()
        self.specs: list[tuple[int, RequestSpec]] = []
        step = 0
        for index in range(rng.randint(2, 9)):
            step += rng.choice([0, 0, 1, 3, 9])
            stem = [1] * rng.choice([0, 4, 6, 9, 16])
            tail = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
            spec = RequestSpec(
                request_id=f"r{index}",
                prompt=TokenIds.from_ids(stem + tail),
                max_new_tokens=rng.choice([1, 2, 5, 14]),
                arrival_s=float(step),
                domain=Domain.private(rng.choice("aab")),
                namespace=NAMESPACE,
                num_samples=rng.choice([1, 1, 1, 2]),
                hints=HINTS[index % len(HINTS)],
            )
            self.specs.append((step, spec))
        # What an operator does before some steps.
        self.verbs = {
            rng.randrange(1, 40): rng.choice(["restart", "cut_off", "cancel"])
            for _ in range(rng.choice([0, 0, 1, 2]))
        }
        self.stops = {f"r{index}" for index in range(9) if rng.random() < 0.3}

    def run(
        self,
        *,
        skips: bool,
        make_cache: MakeCache = lru_cache,
        order: OrderConfig = FCFS,
    ) -> Tally:
        strategy = order.make()
        scheduler = Scheduler(self.config, make_cache(self.num_blocks), strategy)
        tally = Tally()
        rng = random.Random(self.rng_seed)
        waiting = deque(self.specs)
        while waiting or scheduler.has_work:
            while waiting and waiting[0][0] <= tally.num_steps:
                self._add(scheduler, waiting.popleft()[1])
            verb = self.verbs.get(tally.num_steps)
            if verb is not None and scheduler.has_work:
                self._act(scheduler, verb, rng, float(tally.num_steps))
            quiet = scheduler.num_quiet_steps
            tally.num_blocked += bool(quiet and scheduler.num_waiting)
            if skips and quiet:
                until = min(
                    [s for s, _ in waiting]
                    + [s for s in self.verbs if s > tally.num_steps],
                    default=quiet + tally.num_steps,
                )
                num_steps = max(1, min(quiet, until - tally.num_steps))
                num, context = scheduler.num_coasting, scheduler.num_coasting_context
                tally.work += [
                    (num, num, context + later * num) for later in range(num_steps)
                ]
                scheduler.skip(num_steps)
                check_scheduler(scheduler)
                tally.num_skipped += num_steps
                tally.num_steps += num_steps
            else:
                self._step(scheduler, tally, coasts=skips)
            tally.debts[tally.num_steps] = debts_of(strategy)
            assert tally.num_steps < 2_000
        return tally

    def _add(self, scheduler: Scheduler, spec: RequestSpec) -> None:
        with suppress(PromptTooLong):
            scheduler.add(spec)

    def _act(
        self, scheduler: Scheduler, verb: str, rng: random.Random, now: float
    ) -> None:
        request = rng.choice(scheduler.requests())
        match verb:
            case "restart":
                scheduler.restart(request.request_id, NAMESPACE, None, now)
            case "cut_off":
                scheduler.cut_off(request.request_id)
            case "cancel":
                scheduler.cancel(request.request_id, now)

    def _step(self, scheduler: Scheduler, tally: Tally, *, coasts: bool) -> None:
        step = tally.num_steps
        plan = scheduler.schedule(float(step))
        samples = {
            chunk.request_id: tuple(
                Sample(5, self._stop(chunk.request_id, k))
                for k in range(chunk.num_samples)
            )
            for chunk in plan.chunks
            if chunk.num_samples
        }
        events = scheduler.commit(plan, StepResult(samples), step + 0.5)
        check_scheduler(scheduler)
        tally.num_steps += 1
        tally.work.append(work_of(plan))
        tally.events += [
            e for e in events if not isinstance(e, TokenSampled | BlocksPublished)
        ]
        if coasts:
            for event in events:
                if isinstance(event, TokenSampled):
                    scheduler.coast(event.request_id, token_bytes(*[5] * 40))

    def _stop(self, request_id: str, sample: int) -> FinishReason | None:
        """Some end with their first token, where others are yet to begin."""
        return (
            FinishReason.STOP_TOKEN
            if sample == 0 and request_id in self.stops
            else None
        )


@pytest.mark.parametrize("seeds", BURSTS, ids=str)
def test_a_skip_passes_no_moment_at_which_somebody_could_have_started(
    seeds: range,
) -> None:
    for seed in seeds:
        burst = Burst(seed)
        skipping, stepping = burst.run(skips=True), burst.run(skips=False)
        assert skipping.events == stepping.events, seed
        assert skipping.work == stepping.work, seed


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_in_other_orders_a_skip_passes_no_moment_either(name: str) -> None:
    num_skipped = num_indebted = 0
    for seed in range(40):
        burst, order = Burst(seed), OTHER_ORDERS[name]
        skipping = burst.run(skips=True, order=order)
        stepping = burst.run(skips=False, order=order)
        assert skipping.events == stepping.events, seed
        assert skipping.work == stepping.work, seed
        assert skipping.debts.items() <= stepping.debts.items(), seed
        num_skipped += skipping.num_skipped
        num_indebted += any(debt < 0 for debt in skipping.debts[skipping.num_steps])
    assert num_skipped > 40
    assert num_indebted > 12 or not name.startswith("fair")


# With quotas, and policies that learn, admission depends on more


def quota_cache(num_blocks: int) -> PrefixCache:
    config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    names = {"a": Quota(floor_blocks=num_blocks // 3), "b": Quota(floor_blocks=2)}
    quotas = {Domain.private(name): quota for name, quota in names.items()}
    return PrefixCache(
        config,
        Retention.of(
            lambda: ReuseIndex(num_blocks),
            config,
            QuotaConfig(quotas=quotas, default=Quota(cap_blocks=1)),
        ),
    )


@pytest.mark.parametrize("seed", [*range(12), *slow(range(12, 60))])
def test_coasting_changes_nothing_beside_quotas_either(seed: int) -> None:
    check_coasting(seed, quota_cache)


@pytest.mark.parametrize("seeds", BURSTS, ids=str)
def test_with_quotas_a_skip_passes_no_moment_either(seeds: range) -> None:
    for seed in seeds:
        burst = Burst(seed)
        skipping, stepping = (
            burst.run(skips=skips, make_cache=quota_cache) for skips in (True, False)
        )
        assert skipping.events == stepping.events, seed
        assert skipping.work == stepping.work, seed


def test_the_bursts_skip_while_somebody_is_blocked() -> None:
    """Else the test above would not say much about it."""
    tallies = [Burst(seed).run(skips=True) for seed in BURSTS[0]]
    assert sum(tally.num_skipped > 0 for tally in tallies) > 40
    assert sum(tally.num_blocked > 0 for tally in tallies) > 12


def test_more_steps_than_are_quiet_cannot_be_skipped() -> None:
    run = coasting_run(LONG)
    quiet = run.scheduler.num_quiet_steps
    assert quiet == 2  # of three free slots the last one fills the block
    with pytest.raises(RequestError, match="num_steps"):
        run.scheduler.skip(-1)
    for num_steps in (0, quiet + 1):
        with pytest.raises(InvariantError, match=f"skip of {num_steps} steps, 2 are"):
            run.scheduler.skip(num_steps)
    run.scheduler.skip(quiet)
    assert run.scheduler.num_quiet_steps == 0


class Loop:
    """Every token is a five, and everybody coasts who can."""

    def __init__(self, *, coasts: bool = True, num_blocks: int, **limits: int) -> None:
        cache = PrefixCache(
            CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE), Retention(Lru)
        )
        config = SchedulerConfig(watermark=0.0, **{"max_num_running": 6} | limits)
        self.scheduler = Scheduler(config, cache, Fcfs())
        self.coasts = coasts
        self.work: list[tuple[int, int, int]] = []
        self.events: list[Event] = []

    def add(
        self,
        name: str,
        prompt: TokenIds,
        num_output: int,
        *,
        at: float,
        namespace: bytes = NAMESPACE,
    ) -> None:
        spec = RequestSpec(
            request_id=name,
            prompt=prompt,
            max_new_tokens=num_output,
            arrival_s=at,
            domain=Domain.private("a"),
            namespace=namespace,
        )
        self.scheduler.add(spec)

    def step(self) -> None:
        plan = self.scheduler.schedule(float(len(self.work)))
        self.work.append(work_of(plan))
        samples = {c.request_id: (Sample(5),) for c in plan.chunks if c.num_samples}
        events = self.scheduler.commit(plan, StepResult(samples), float(len(self.work)))
        check_scheduler(self.scheduler)
        self.events += events
        if self.coasts:
            for event in events:
                if isinstance(event, TokenSampled):
                    self.scheduler.coast(event.request_id, token_bytes(*[5] * 99))

    def started(self, name: str) -> bool:
        request = self.scheduler.request(name)
        return request is None or request.num_computed > 0


def assert_starts_next(loop: Loop, name: str) -> None:
    """Whoever would be admitted now is not skipped over."""
    assert not loop.started(name)
    assert loop.scheduler.num_coasting
    quiet = loop.scheduler.num_quiet_steps
    loop.step()
    assert loop.started(name), "else this says nothing"
    assert quiet == 0


def test_who_finds_more_where_a_node_has_grown_is_not_skipped_over() -> None:
    """It was too large beside a prefill, and is not once that has published."""
    loop = Loop(num_blocks=8, token_budget=9, max_steps_awaiting=0)
    shared = [1] * 16
    loop.add("leader", TokenIds.from_ids([*shared, 2]), 9, at=0.0)
    loop.step()
    loop.add("follower", TokenIds.from_ids([*shared, 3, 3, 3, 3]), 9, at=1.0)
    loop.step()
    assert_starts_next(loop, "follower")


def test_who_no_longer_awaits_what_did_not_come_is_not_skipped_over() -> None:
    """A span that is too short to tell is not published by the prompt it ends."""
    loop = Loop(num_blocks=10, token_budget=8)
    span = Span(digest=bytes(32), num_tokens=MIN_SPAN_TOKENS)
    prompt = TokenIds.from_parts([TokenIds.from_ids([1]), span])
    loop.add("leader", prompt, 9, at=0.0)
    loop.step()
    loop.add("follower", prompt, 9, at=1.0)
    loop.add("large", TokenIds.from_ids([2] * 36), 1, at=2.0)
    loop.step()
    assert_starts_next(loop, "follower")


def test_who_begins_again_where_it_finds_more_is_not_skipped_over() -> None:
    loop = Loop(num_blocks=9, token_budget=64)
    prompt = TokenIds.from_ids([1] * 17)
    loop.add("leader", prompt, 9, at=0.0, namespace=b"m" * 32)
    loop.step()
    loop.add("waiting", prompt, 9, at=1.0)
    loop.step()
    assert not loop.started("waiting")
    assert loop.scheduler.num_quiet_steps, "it is blocked, and all others coast"
    loop.scheduler.restart("waiting", b"m" * 32, None, 2.0)
    assert_starts_next(loop, "waiting")


@pytest.mark.parametrize("coasts", [False, True], ids=["plain", "coasting"])
def test_what_was_kept_for_a_victim_that_coasts_is_for_others(coasts: bool) -> None:
    """The oldest decodes, a prefill is under way, and the youngest has to go."""
    loop = Loop(coasts=coasts, num_blocks=13, token_budget=4, max_num_running=4)
    loop.add("oldest", TokenIds.from_ids([1]), 20, at=0.0)
    loop.step()
    loop.add("youngest", TokenIds.from_ids([2] * 3), 20, at=9.0)
    loop.step()
    loop.add("prefill", TokenIds.from_ids([3] * 39), 1, at=5.0)
    num_before = 0
    while not any(isinstance(e, RequestPreempted) for e in loop.events):
        num_before = loop.scheduler.num_running
        loop.step()
    (preempted,) = [e for e in loop.events if isinstance(e, RequestPreempted)]
    assert preempted.request_id == "youngest"
    assert num_before == 3
    # Whoever is left uses the whole budget, in the very step of the preemption.
    assert loop.work[-1][0] == 4


def test_asking_for_quiet_steps_changes_nothing_even_after_one_has_woken() -> None:
    loop = Loop(num_blocks=8)
    loop.add("first", TokenIds.from_ids([1]), 3, at=0.0)
    loop.add("second", TokenIds.from_ids([2]), 9, at=0.0)
    loop.step()
    assert (loop.scheduler.num_coasting, loop.scheduler.num_quiet_steps) == (2, 1)
    loop.scheduler.cancel("first", 1.0)
    wakes = list(loop.scheduler._lives.coasting._wakes)

    assert loop.scheduler.num_quiet_steps == 2

    assert loop.scheduler._lives.coasting._wakes == wakes
