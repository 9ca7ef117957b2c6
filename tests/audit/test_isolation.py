"""The audit of isolation on a tiny model, and that it finds what is put there to find.

Time is made up: a step takes what its tokens cost, plus noise. So the verdicts about
times to first token are the same on every machine.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from stemkv.audit.isolation import timing
from stemkv.audit.isolation.audit import IsolationOptions, audit_isolation
from stemkv.audit.isolation.statistics import PairedTest, sign_flip_p
from stemkv.audit.isolation.timing import Round, judge
from stemkv.audit.isolation.turns import NOSY, Turns, try_turns
from stemkv.audit.isolation.worlds import visible_to
from stemkv.audit.verdict import AuditReport, Verdict
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.events import BlocksPublished
from stemkv.core.prefix.identity import PUBLIC, Domain, DomainKind
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.retention.policy import EvictionPolicy, ReuseIndex
from stemkv.core.retention.quota import Quota, QuotaConfig, Quotas
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import RequestAdmitted, RequestForked
from stemkv.core.schedule.followers import Followers
from stemkv.core.schedule.orders import ORDERS
from stemkv.core.schedule.plan import StepPlan
from stemkv.core.schedule.request import Request, RequestId
from stemkv.core.schedule.waiting import WaitingMatches
from stemkv.engine import Engine, LoadedModel
from stemkv.engine.door import Door
from stemkv.engine.runner import ModelRunner
from stemkv.errors import ConfigError
from tests.engine.models import tiny_once

_FEW = IsolationOptions(min_pairs=20, max_pairs=20)


class StepCost:
    """A clock that forward passes advance, by their tokens and some noise."""

    def __init__(self) -> None:
        self.now = 0.0
        self.noise = 0.05  # of a step
        self.is_leaky = False  # tokens that anybody computed before cost less
        self._rng = random.Random(0)
        self._seen: set[bytes] = set()

    def __call__(self) -> float:
        return self.now

    def spend(self, plan: StepPlan) -> None:
        num_tokens = float(plan.num_tokens)
        for chunk in plan.chunks:
            if self.is_leaky and chunk.tokens in self._seen:
                num_tokens -= 0.2 * chunk.num_tokens
            self._seen.add(chunk.tokens)
        seconds = 0.04 + 0.0025 * num_tokens
        self.now += seconds * (1 + self.noise * abs(self._rng.gauss(0, 1)))


def put_on_clock(cost: StepCost, patch: pytest.MonkeyPatch) -> None:
    execute = ModelRunner.execute

    def timed(self: ModelRunner, plan: StepPlan, *rest: Any) -> Any:
        cost.spend(plan)
        return execute(self, plan, *rest)

    patch.setattr(ModelRunner, "execute", timed)


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> StepCost:
    cost = StepCost()
    put_on_clock(cost, monkeypatch)
    return cost


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    yield tiny_once("llama-group1", torch.float32)
    torch.set_num_threads(threads)


def audit(
    loaded: LoadedModel,
    cost: StepCost,
    options: IsolationOptions = _FEW,
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    return audit_isolation(loaded, options, progress, clock=cost)


def broken(report: AuditReport) -> set[str]:
    return {c.claim for c in report.checks if c.verdict is Verdict.BROKEN}


def describe(report: AuditReport) -> str:
    """What is not as it should be, for a failing assertion."""
    return "\n".join(
        f"{c.verdict.value} {c.claim}: {c.evidence}"
        for c in report.checks
        if c.verdict is not Verdict.HOLDS
    )


# Claims, by the words of theirs that occur in no other claim.
MATCH = "matches nothing"
COUNTS = "token counts of an answer"
EVENTS = "Every event"
USAGE = "usage a tenant can read"
EVICTION = "blocks are evicted"
WAITING = "never waits"
SCOPES = "reach as far as declared"
RETAINED = "leaves nothing behind"
NAMES = "name cannot be crafted"
REFUSED = "names no tenant"
CANCEL = "neither cancel"
IDS = "ids a tenant is given"
THEFT = "secret behind a known beginning"
THEFT_PUBLIC = "declared public"
THEFT_TIME = "than guessing does"
TTFT = "Time to first token does not depend"
VOLUME = "tells how much others take"
HABITS = "does not tell that"
OWN_TURNS = "own requests start"
TURNS = "starts before or after"
CLAIMS = (
    MATCH,
    COUNTS,
    EVENTS,
    USAGE,
    EVICTION,
    WAITING,
    SCOPES,
    RETAINED,
    NAMES,
    REFUSED,
    CANCEL,
    IDS,
    THEFT,
    THEFT_PUBLIC,
    THEFT_TIME,
    TTFT,
    VOLUME,
    HABITS,
    OWN_TURNS,
    TURNS,
)


def named(claims: set[str]) -> set[str]:
    return {words for words in CLAIMS for claim in claims if words in claim}


# What holds


@pytest.fixture(scope="module")
def report(loaded: LoadedModel) -> AuditReport:
    with pytest.MonkeyPatch.context() as patch:
        cost = StepCost()
        put_on_clock(cost, patch)
        return audit(loaded, cost)


def test_by_default_a_tenant_learns_nothing_of_others(report: AuditReport) -> None:
    assert report.verdict is Verdict.HOLDS, describe(report)
    claims = {check.claim for check in report.checks if not check.is_control}
    assert named(claims) == set(CLAIMS)
    assert len(claims) == len(CLAIMS)
    assert sum(check.is_control for check in report.checks) >= 10


def test_the_report_can_be_stored_and_says_what_remains_visible(
    report: AuditReport,
) -> None:
    document = json.loads(json.dumps(report.as_json()))

    assert document["verdict"] == "holds"
    assert (
        document["data"]["thefts"][0]["guess"]
        == (document["data"]["thefts"][0]["secret"])
    )
    assert any("remains visible" in table["title"] for table in document["tables"])
    lost = {row["num_taken"]: row["num_lost"] for row in document["data"]["pressure"]}
    assert lost[16] == 8, "others' load is felt without quotas, and it is said"
    pooled, floored = document["data"]["habits"]
    assert pooled["num_told"] == pooled["num_plays"] > 0, "habits are, too"
    assert floored["num_told"] == 0
    beyond = document["data"]["beyond_floor"]
    assert beyond["floor"] < beyond["num_left"] < beyond["num_retained"]
    assert beyond["num_lost_running"] > 0, "a floor is no room to run, and it is said"


def test_the_same_seed_gives_the_same_report_and_progress_is_told(
    loaded: LoadedModel, cost: StepCost, report: AuditReport
) -> None:
    told: list[str] = []

    again = audit(loaded, cost, progress=told.append)

    assert again.as_json() == report.as_json()
    assert len(told) > 20
    assert len(set(told)) == len(told)


# What is put there to find

Sabotage = Callable[[pytest.MonkeyPatch], None]


def all_domains_are_equal(patch: pytest.MonkeyPatch) -> None:
    def equal(self: Domain, other: object) -> bool:
        if not isinstance(other, Domain):
            return False
        return (self.kind is DomainKind.PUBLIC) == (other.kind is DomainKind.PUBLIC)

    patch.setattr(Domain, "__eq__", equal)
    patch.setattr(Domain, "__hash__", lambda self: 0)


def everybody_is_in_one_group(patch: pytest.MonkeyPatch) -> None:
    """The policy says private and does not mean it."""
    domain = SharingPolicy.domain

    def sharing(self: SharingPolicy, *rest: Any) -> Domain:
        domain(self, *rest)  # refuses what it refuses
        return Domain.group("everybody")

    patch.setattr(SharingPolicy, "domain", sharing)


def followers_wait_for_foreign_prefixes(patch: pytest.MonkeyPatch) -> None:
    def will_publish(
        self: Followers, leader: Request, follower: Request, index: int, end: int
    ) -> bool:
        tokens = follower.tokens[: end * TOKEN_BYTES]
        return leader.num_computed < end and leader.tokens.startswith(tokens)

    patch.setattr(Followers, "_will_publish", will_publish)


def usage_counts_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "usage_of", lambda self, tenant: self.usage())


def use_refreshes_equal_blocks_of_others(patch: pytest.MonkeyPatch) -> None:
    acquire = PrefixCache.acquire

    def touching(self: PrefixCache, *rest: Any, now: float, **more: Any) -> Any:
        lease = acquire(self, *rest, now=now, **more)
        tokens, retention = rest[2], self.keeper
        for node in tuple(self.tree.nodes()):
            if retention.is_evictable(node) and tokens.startswith(node.edge):
                retention._withdraw(node.id)
                retention.used(node, lease.caller, self.residency._tick, now)
                retention.became_evictable(node, now)
        return lease

    patch.setattr(PrefixCache, "acquire", touching)


def floors_are_not_minded(patch: pytest.MonkeyPatch) -> None:
    """Whoever has most gives, floor or not."""
    init = Quotas.__init__

    def forgetful(self: Quotas, config: QuotaConfig, num_blocks: int) -> None:
        init(self, QuotaConfig(), num_blocks)
        # And so that the smaller one gives as well: what is small weighs more.
        self.config = QuotaConfig(
            quotas={each: Quota(weight=0.01) for each in config.quotas}
        )

    patch.setattr(Quotas, "__init__", forgetful)


def policies_learn_from_all_tenants(patch: pytest.MonkeyPatch) -> None:
    """Each domain has a policy, but what they know is one."""
    init = Retention.__init__

    def pooling(
        self: Retention, make_policy: Callable[[], EvictionPolicy], **rest: Any
    ) -> None:
        known: list[ReuseIndex] = []

        def make() -> EvictionPolicy:
            policy = make_policy()
            if isinstance(policy, ReuseIndex):
                known.append(policy)
                policy._times, policy._shadow = known[0]._times, known[0]._shadow
            return policy

        init(self, make, **rest)

    patch.setattr(Retention, "__init__", pooling)


def orders_rank_tenants_by_all_that_is_cached(patch: pytest.MonkeyPatch) -> None:
    ready = property(lambda self: self.num_ready)
    patch.setattr(Request, "num_ready_in_public", ready)


def orders_ask_what_everybody_has_cached(patch: pytest.MonkeyPatch) -> None:
    """Reuse is as it should be; only the place in the queue goes by all domains."""
    num_blocks = WaitingMatches.num_blocks

    def anywhere(self: WaitingMatches, request_id: RequestId) -> int:
        tokens = self._entries[request_id].tokens
        found = [n.num_blocks for n in self._tree.nodes() if n.edge in tokens]
        return max(num_blocks(self, request_id), sum(found))

    patch.setattr(WaitingMatches, "num_blocks", anywhere)


def anybody_can_cancel(patch: pytest.MonkeyPatch) -> None:
    cancel = Engine.cancel
    patch.setattr(
        Engine,
        "cancel",
        lambda self, request_id, *, tenant=None: cancel(self, request_id),
    )


def ids_are_counted_for_all(patch: pytest.MonkeyPatch) -> None:
    named = Door._id
    patch.setattr(Door, "_id", lambda self, name, account: named(self, name, "all"))


def names_are_folded(patch: pytest.MonkeyPatch) -> None:
    domain = SharingPolicy.domain

    def folding(self: SharingPolicy, tenant: Any, *rest: Any) -> Domain | None:
        if isinstance(tenant, str):
            tenant = unicodedata.normalize("NFKC", tenant).strip() or tenant
        return domain(self, tenant, *rest)

    patch.setattr(SharingPolicy, "domain", folding)


def classes_widen(patch: pytest.MonkeyPatch) -> None:
    domain = SharingPolicy.domain

    def widening(
        self: SharingPolicy, tenant: str, request_class: str | None = None
    ) -> Domain | None:
        narrow = domain(self, tenant, request_class)
        return Domain.group("crew") if request_class == "chat" else narrow

    patch.setattr(SharingPolicy, "domain", widening)


def none_means_private(patch: pytest.MonkeyPatch) -> None:
    domain = SharingPolicy.domain

    def keeping(self: SharingPolicy, tenant: str, *rest: Any) -> Domain | None:
        found = domain(self, tenant, *rest)
        return Domain.private(tenant) if found is None else found

    patch.setattr(SharingPolicy, "domain", keeping)


def strangers_are_taken_in(patch: pytest.MonkeyPatch) -> None:
    domain = SharingPolicy.domain

    def lenient(self: SharingPolicy, tenant: Any, *rest: Any) -> Domain | None:
        return domain(self, tenant if isinstance(tenant, str) else "nobody", *rest)

    patch.setattr(SharingPolicy, "domain", lenient)


_WHAT_A_HIT_SHOWS = {MATCH, COUNTS, EVENTS, USAGE, EVICTION, WAITING}
_ALL_THEFTS = {THEFT, THEFT_PUBLIC, THEFT_TIME, TTFT}
_EVICTIONS = {VOLUME, HABITS}
_ALL_TURNS = {OWN_TURNS, TURNS}


@pytest.mark.parametrize(
    "sabotage, expected",
    [
        (
            all_domains_are_equal,
            {
                *_WHAT_A_HIT_SHOWS,
                *_ALL_THEFTS,
                *_EVICTIONS,
                *_ALL_TURNS,
                SCOPES,
                NAMES,
            },
        ),
        (
            everybody_is_in_one_group,
            {
                *_WHAT_A_HIT_SHOWS,
                *_ALL_THEFTS,
                *_EVICTIONS,
                *_ALL_TURNS,
                SCOPES,
                NAMES,
                RETAINED,
            },
        ),
        (followers_wait_for_foreign_prefixes, {WAITING}),
        (usage_counts_everybody, {USAGE, VOLUME}),
        (use_refreshes_equal_blocks_of_others, {EVICTION}),
        (floors_are_not_minded, {VOLUME}),
        (policies_learn_from_all_tenants, {HABITS}),
        (orders_rank_tenants_by_all_that_is_cached, {TURNS}),
        (orders_ask_what_everybody_has_cached, {OWN_TURNS}),
        (anybody_can_cancel, {CANCEL}),
        (ids_are_counted_for_all, {IDS, EVENTS, VOLUME}),
        (names_are_folded, {NAMES}),
        (classes_widen, {SCOPES}),
        (none_means_private, {SCOPES, RETAINED}),
        (strangers_are_taken_in, {REFUSED}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_of_leak_is_found_by_its_own_attack(
    loaded: LoadedModel,
    cost: StepCost,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Sabotage,
    expected: set[str],
) -> None:
    sabotage(monkeypatch)

    report = audit(loaded, cost)

    assert report.verdict is Verdict.BROKEN
    assert named(broken(report)) == expected, describe(report)


def test_a_leak_that_only_a_clock_sees_is_found(
    loaded: LoadedModel, cost: StepCost
) -> None:
    cost.is_leaky = True

    report = audit(loaded, cost)

    assert named(broken(report)) == {TTFT}, describe(report)
    assert len(report.data["rounds"]) == 2, "it was measured again before it was said"


# What cannot be told


def test_an_attack_that_works_nowhere_proves_nothing(
    loaded: LoadedModel, cost: StepCost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "publish", lambda *rest: 0)

    report = audit(loaded, cost)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert broken(report) == set()
    failed = [c for c in report.checks if c.verdict is Verdict.INCONCLUSIVE]
    assert sum(check.is_control for check in failed) >= 8


def test_on_a_machine_too_noisy_to_tell_the_audit_says_so(
    loaded: LoadedModel, cost: StepCost
) -> None:
    cost.noise = 0.6

    report = audit(loaded, cost)

    undecided = {c.claim for c in report.checks if c.verdict is Verdict.INCONCLUSIVE}
    assert named(undecided) == {TTFT}, describe(report)
    assert "try again" in describe(report)
    assert report.verdict is Verdict.INCONCLUSIVE


def test_noise_is_met_with_more_pairs(loaded: LoadedModel, cost: StepCost) -> None:
    cost.noise = 0.1

    report = audit(loaded, cost, replace(_FEW, max_pairs=80))

    num_pairs = report.data["rounds"][0]["claim"]["num_pairs"]
    assert 20 < num_pairs < 80
    assert report.verdict is Verdict.HOLDS, describe(report)


# The rule that decides about times


def paired(mean: float, p: float, detectable: float = 0.001) -> PairedTest:
    return PairedTest(
        num_pairs=24, mean=mean, low=mean, high=mean, p=p, detectable=detectable
    )


def timed(
    mean: float, p: float, *, detectable: float = 0.001, control_p: float = 0.001
) -> Round:
    return Round(
        claim=paired(mean, p, detectable),
        control=paired(-0.1, control_p),
        differences=(),
        control_differences=(),
        fresh_s=0.2,
    )


@pytest.mark.parametrize(
    "first, second, verdict",
    [
        (timed(0.0, 0.5), None, Verdict.HOLDS),
        (timed(0.0, 0.5, detectable=0.011), None, Verdict.INCONCLUSIVE),
        (timed(0.0, 0.5, control_p=0.02), None, Verdict.INCONCLUSIVE),
        (timed(-0.1, 0.001), None, Verdict.INCONCLUSIVE),
        (timed(-0.1, 0.001), timed(-0.1, 0.001), Verdict.BROKEN),
        (timed(-0.1, 0.001), timed(-0.1, 0.001, control_p=1), Verdict.BROKEN),
        (timed(-0.1, 0.001), timed(0.1, 0.001), Verdict.INCONCLUSIVE),
        (timed(-0.1, 0.001), timed(0.0, 0.5), Verdict.HOLDS),
        (timed(-0.1, 0.001), timed(0.0, 0.5, detectable=1), Verdict.INCONCLUSIVE),
    ],
)
def test_only_a_difference_that_repeats_breaks_and_only_power_lets_it_hold(
    first: Round, second: Round | None, verdict: Verdict
) -> None:
    assert judge(first, second) is verdict


def test_a_slower_answer_is_no_working_control() -> None:
    odd = replace(timed(0.0, 0.5), control=paired(0.1, 0.001))

    assert judge(odd, None) is Verdict.INCONCLUSIVE


def test_fewer_pairs_than_signs_can_tell_of_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_pairs must be from 20"):
        IsolationOptions(min_pairs=19)
    with pytest.raises(ConfigError, match="max_pairs"):
        IsolationOptions(min_pairs=24, max_pairs=23)


def test_the_fewest_pairs_of_a_control_can_be_significant() -> None:
    slower = [1.0 + 0.01 * index for index in range(10)]

    assert sign_flip_p(slower, seed=0) <= timing.ALPHA
    assert sign_flip_p(slower[:8], seed=0) > timing.ALPHA


# Whose turn it is


@pytest.fixture(scope="module")
def turns() -> list[Turns]:
    return try_turns(lambda text: None)


@pytest.mark.parametrize("order", ORDERS)
def test_no_order_tells_what_a_stranger_has_cached(
    turns: list[Turns], order: str
) -> None:
    played = [
        each for each in turns if each.order == order and not each.setting.is_control
    ]

    assert len(played) == 4
    assert [each.warm for each in played] == [each.cold for each in played]


def test_in_one_group_every_order_that_minds_the_cache_tells_it(
    turns: list[Turns],
) -> None:
    telling = {t.order for t in turns if t.setting.is_control and t.is_signal}

    assert telling == set(ORDERS) - {"fcfs"}
    (lpm,) = [t for t in turns if t.setting.is_control and t.order == "lpm"]
    assert lpm.warm == ("guess 2", "guess 0", "guess 1", "guess 3")


def test_an_order_that_ranks_tenants_by_all_that_is_cached_is_caught(
    turns: list[Turns],
) -> None:
    (nosy,) = [each for each in turns if each.order == NOSY]

    assert nosy.is_signal
    assert (nosy.warm[0], nosy.cold[-1]) == ("victim's", "victim's")


# What a tenant may see


def test_a_tenant_sees_its_requests_its_domain_and_nothing_else() -> None:
    own = {RequestId("mine")}
    domain = Domain.private("ann")

    def admitted(request_id: str) -> RequestAdmitted:
        return RequestAdmitted(
            now=0.0,
            request_id=RequestId(request_id),
            num_cached_tokens=0,
            num_copied_tokens=0,
            is_resumed=False,
        )

    def published(domain: Domain) -> BlocksPublished:
        return BlocksPublished(
            now=0.0,
            namespace=b"",
            domain=domain,
            block_ids=(0,),
            start=0,
            parent_block_id=None,
        )

    forked = RequestForked(now=0.0, request_id=RequestId("mine#1"), child_ids=())
    seen = [
        visible_to(event, own, domain)
        for event in (
            admitted("mine"),
            forked,
            published(domain),
            admitted("yours"),
            published(Domain.private("bob")),
            published(Domain.group("ann")),
            published(PUBLIC),
        )
    ]

    assert seen == [True, True, True, False, False, False, False]
    assert not visible_to(published(domain), own, None)
