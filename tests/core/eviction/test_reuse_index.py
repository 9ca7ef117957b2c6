"""The reuse index: LRU where it knows nothing, and better where it has learnt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.retention.policy import EvictionPolicy, Lru, ReuseIndex, reuse_times
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.timelines import in_units_of
from stemkv.sim.workloads import workload_named
from tests.core.builders import build_cache, cached, serve
from tests.core.eviction.hooks import ACTS, Act, HookTree
from tests.core.eviction.script import Script
from tests.core.eviction.twin_reuse_index import ReuseIndexRule, ReuseIndexTwin
from tests.core.eviction.watched import Watched

MAX_RUNS = 60.0  # where counts are halved very soon

acts = st.lists(
    st.tuples(
        st.sampled_from(ACTS),
        st.integers(0, 60),
        st.integers(0, 60),
        st.sampled_from([0.0, 0.25, 0.5, 1.0, 20.0, 100.0]),
    ),
    max_size=80,
)

# Nothing known


class Beside:
    """Asks one policy, and tells two; their victims must be the same."""

    def __init__(self, policy: EvictionPolicy, other: EvictionPolicy) -> None:
        self.policy = policy
        self.other = other

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            if name not in ("num_alike", "can_extend", "can_merge"):
                other = getattr(self.other, name)(*args, **kwargs)
            answer = getattr(self.policy, name)(*args, **kwargs)
            if name == "victim":
                assert answer == other
            return answer

        return hook

    @property
    def needs_keys(self) -> bool:
        return self.policy.needs_keys


@settings(max_examples=200, deadline=None)
@given(acts)
def test_while_nothing_is_learnt_every_victim_is_that_of_lru(acts: list[Act]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_times, "_FIT_RUNS", 1e9)
        policy = ReuseIndex(20)
    tree = HookTree(Beside(policy, Lru()))
    for act in acts:
        tree.act(act)
    for lease in [*tree.leases]:
        tree.release(lease)
    while tree.evict(1) is not None:
        pass


@pytest.mark.parametrize("younger_s", [0.0, 0.5, 1.0, 1.5, 5.0, 70.0])
@pytest.mark.parametrize("older_s", [0.5, 1.25, 2.0, 6.0, 80.0, 6000.0])
def test_while_nothing_is_learnt_no_age_and_no_class_goes_before_an_older_one(
    older_s: float, younger_s: float
) -> None:
    script = Script(ReuseIndex(20))
    script.serve("younger")
    script.serve("older")
    script.wait(max(0.0, older_s - younger_s))
    script.serve("younger")  # of another class now
    script.wait(younger_s)

    assert script.evict() == ["older"]


def test_the_first_nineteen_reuses_change_nothing() -> None:
    script = Script(Beside(ReuseIndex(20), Lru()))
    names = [f"{number}" for number in range(19)]
    for _ in range(2):
        script.wait(3.0)
        script.serve(*names)
    script.serve("new")
    assert script.evict(20) == [*names, "new"]


# Something known


def learnt(policy: ReuseIndex) -> Script:
    """Chats go on every 20 s, and one prompt in two is never seen again.

    So often that a hundredth of LRU's hits pays for all that four chats displace.
    """
    script = Script(policy)
    chats = [f"chat {number}" for number in range(4)]
    for number in range(600):
        script.wait(5.0)
        script.serve(chats[number % 4])
        script.serve(f"once {number}")
        script.drop(f"once {number}")
    return script


def test_a_class_that_is_never_reused_goes_before_one_that_is() -> None:
    script = learnt(ReuseIndex(20))
    script.serve("new", "newer")

    # LRU would take the chats first, which were used up to 20 s ago.
    assert set(script.evict(2)) == {"new", "newer"}
    assert script.evict() == ["chat 0"]


def test_a_scan_does_not_wash_out_what_is_reused() -> None:
    script = learnt(ReuseIndex(20))
    for number in range(100):
        script.serve(f"scan {number}")
        assert script.evict()[0].startswith("scan")


def test_a_loop_that_is_larger_than_the_cache_is_won_on_what_else_lru_hits() -> None:
    """A hundredth of LRU's hits pays for the part of the loop that is kept."""

    def hits(make_policy: Callable[[], EvictionPolicy]) -> int:
        cache = build_cache(num_blocks=44, block_size=1, make_policy=make_policy)
        num_hits = 0
        for number in range(3000):
            text = chr(1000 + number % 25) + chr(2000)
            num_hits += serve(cache, text, now=float(number))
            num_hits += serve(cache, "ab!", now=float(number))
        return num_hits

    assert hits(lambda: ReuseIndex(44)) > hits(Lru) + 500


def test_what_comes_back_resumes_its_past() -> None:
    """Chats are known from what came once, also when they were evicted meanwhile."""
    script = learnt(ReuseIndex(20))
    script.drop("chat 1")
    script.wait(5.0)
    script.serve("chat 1", "new")

    assert script.evict() == ["new"]


def test_what_must_not_return_has_no_past_when_it_does() -> None:
    script = learnt(ReuseIndex(20))
    script.drop("chat 1", may_return=False)
    script.wait(5.0)
    script.serve("chat 1")

    assert script.evict() == ["chat 1"]


def test_blocks_that_are_remembered_come_back_as_they_left() -> None:
    policy = ReuseIndex(20)
    script = Script(policy)
    keys = Script.keys("whole", 4)
    script.serve("whole", num_blocks=4)
    script.policy.split(99, script.id_of("whole"), num_blocks=2)
    policy.used(99, hint=0, tick=90, now=0.0)
    policy.released(99, tick=91, now=0.0)
    script.drop("whole", 4)
    policy.dropped(99, 0, may_return=True)

    assert policy.num_alike(keys) == 2


def test_a_lease_may_add_blocks_only_behind_its_own_new_ones() -> None:
    policy = ReuseIndex(20)
    script = Script(policy)
    script.serve("gone")
    script.drop("gone")
    script.publish("new")
    new = script.id_of("new")

    assert policy.can_extend(new, [1])
    assert not policy.can_extend(new, Script.keys("gone"))
    script.use("new")
    assert not policy.can_extend(new, [1])


def test_hints_are_classes_whose_truth_is_learnt() -> None:
    policy = ReuseIndex(20)
    ids = iter(range(1, 10_000))
    tick = iter(range(1, 100_000))

    def serve_once(hint: int, now: float, *, is_reused: bool) -> None:
        node = next(ids)
        policy.published(
            node,
            start=0,
            num_blocks=1,
            keys=[node],
            hint=hint,
            tick=next(tick),
            now=now,
        )
        policy.released(node, tick=next(tick), now=now)
        if is_reused:
            policy.used(node, hint=hint, tick=next(tick), now=now + 10.0)
            policy.released(node, tick=next(tick), now=now + 10.0)
        policy.became_evictable(node, now=now + 10.0)
        policy.dropped(node, 0, may_return=False)

    now = 0.0
    for _ in range(400):
        serve_once(1, now, is_reused=True)
        serve_once(2, now, is_reused=False)
        now += 20.0
    for node, hint in ((20_001, 1), (20_002, 2)):
        policy.published(
            node,
            start=0,
            num_blocks=1,
            keys=[node],
            hint=hint,
            tick=10**6 + node,
            now=now,
        )
        policy.released(node, tick=10**7 + node, now=now)
        policy.became_evictable(node, now=now)

    assert policy.victim(now + 1.0) == 20_002, "the younger, as its word is worth less"


@pytest.mark.parametrize("worth", [None, float], ids=["tokens", "seconds"])
def test_of_two_alike_the_one_that_is_worth_less_goes_first(
    worth: Callable[[int], float] | None,
) -> None:
    script = learnt(ReuseIndex(20, worth=worth))
    script.serve("deep", start=9)
    script.wait(0.5)
    script.serve("shallow")

    assert script.evict() == ["deep" if worth is None else "shallow"]


# Against the twin, where much is learnt


@pytest.mark.parametrize("name", ["few-shot", "chat", "documents"])
def test_learning_from_made_up_traffic_finds_the_victims_of_the_twin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_times, "_MAX_RUNS", MAX_RUNS)
    trace = workload_named(name, num_requests=400, seed=5)
    trace = in_units_of(trace, 32 * trace.unit_size)
    num_blocks = max(len(request.units) for request in trace.requests) * 4
    twin = ReuseIndexTwin(ReuseIndexRule(num_blocks, max_runs=MAX_RUNS))
    policy = Watched(ReuseIndex(num_blocks), twin)

    replay_sequence(
        trace, num_blocks=num_blocks, rule=SharingRule(name="shared"), policy=policy
    )

    assert len(policy.victims) > 50
    assert twin.learner.num_fits > 5
    assert twin.learner.num_halvings > 2


@pytest.mark.parametrize("seed", range(10))
def test_learning_from_random_hooks_finds_the_victims_of_the_twin(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_times, "_MAX_RUNS", MAX_RUNS)
    twin = ReuseIndexTwin(ReuseIndexRule(20, max_runs=MAX_RUNS))
    policy = Watched(ReuseIndex(20), twin)
    tree = HookTree(policy)
    rng = random.Random(seed)
    for _ in range(800):
        pause = rng.choice([0.0, 0.25, 1.0, 20.0, 100.0])
        tree.act((rng.choice(ACTS), rng.randrange(99), rng.randrange(99), pause))

    assert twin.learner.num_fits > 0
    assert len(policy.victims) > 20


def test_in_a_cache_what_many_share_stays() -> None:
    cache = build_cache(num_blocks=14, block_size=1, make_policy=lambda: ReuseIndex(14))
    for number in range(200):
        serve(cache, "shared" + chr(1000 + number), now=4.0 * number)
        serve(cache, chr(3000 + number) + "+", now=4.0 * number + 1.0)
    for number in range(10):
        serve(cache, chr(5000 + number) + "+", now=800.0 + number / 5)

    assert cached(cache, "shared!") == 6
