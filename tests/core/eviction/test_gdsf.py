"""Uses, worth and age: GDSF, and LFU-DA, which is GDSF where all blocks cost the same."""

from __future__ import annotations

import pytest

from stemkv.core.retention.policy import Gdsf, LfuDa
from tests.core.builders import build_cache, cached, serve
from tests.core.eviction.script import Script


def test_the_leaf_used_least_often_goes_first() -> None:
    script = Script(LfuDa(8))
    script.serve("a", "a", "a", "b", "b", "c")

    assert script.evict(3) == ["c", "b", "a"]


def test_of_leaves_used_equally_often_the_least_recently_used_goes_first() -> None:
    script = Script(LfuDa(8))
    script.serve("a", "b", "c", "b", "a", "c")

    assert script.evict(3) == ["b", "a", "c"]


def test_every_lease_is_a_use_also_while_another_lasts() -> None:
    script = Script(LfuDa(8))
    script.publish("shared")
    script.use("shared")  # by a second lease
    script.release("shared")
    script.serve("alone")

    assert script.evict() == ["alone"]


def test_what_was_popular_once_falls_behind_what_is_new() -> None:
    script = Script(LfuDa(8))
    script.serve(*["old"] * 5)
    for number in range(20):
        script.serve(f"new {number}", f"newer {number}")
        if "old" in script.evict(2):
            break

    # Each round evicts at an age one higher, until five uses are no more than one.
    assert number == 4


def test_age_is_the_priority_of_what_was_evicted_last() -> None:
    policy = LfuDa(8)
    script = Script(policy)
    script.serve("a", "a", "a", "b")
    ages = []
    while script.evict():
        ages.append(policy._age)

    assert ages == [1, 3]


def test_age_never_goes_back() -> None:
    """A parent that becomes a leaf can have less priority than its child had."""
    policy = Gdsf(8, worth=float)
    script = Script(policy)
    script.publish("above", "deep", start=7)
    script.release("deep", inner=["above"])
    script.serve("other", start=0)
    script.policy.dropped(script.id_of("other"), 0, may_return=False)
    script.evict()
    assert policy._age == 8

    script.become_leaf("above")
    script.evict()
    assert policy._age == 8


@pytest.mark.parametrize("may_return", [False, True])
def test_what_goes_unnamed_does_not_age_the_cache(may_return: bool) -> None:
    policy = LfuDa(8)
    script = Script(policy)
    script.serve("a", "a", "a", "b")
    assert script.victim() == "b"
    script.drop("a", may_return=may_return)

    assert policy._age == 0


def test_being_named_once_ages_the_cache_once() -> None:
    policy = Gdsf(8, worth=lambda depth: 10.0 - depth)
    script = Script(policy)
    script.serve("long", num_blocks=3)
    script.evict()
    assert policy._age == 7
    script.drop("long")  # though nobody asked again

    assert policy._age == 7


def test_uses_before_an_eviction_count_when_the_block_comes_back() -> None:
    script = Script(LfuDa(8))
    script.serve("a", "a", "b")
    script.drop("a")
    script.serve("a", "b", "c", "c", "c")

    assert script.evict(3) == ["b", "a", "c"]


def test_uses_of_what_must_not_return_are_forgotten() -> None:
    script = Script(LfuDa(8))
    script.serve("a", "a", "b", "b")
    script.drop("a", may_return=False)
    script.serve("a")

    assert script.evict() == ["a"]


def test_uses_are_remembered_for_eight_times_the_cache() -> None:
    script = Script(LfuDa(2))
    names = [f"{number}" for number in range(17)]
    script.serve(*names, *names)
    for name in names:
        script.drop(name)
    known = [script.policy.num_alike(Script.keys(name) + [0]) == 1 for name in names]

    assert known == [False] + [True] * 16


def test_blocks_used_unequally_often_do_not_come_back_as_one_node() -> None:
    policy = LfuDa(8)
    script = Script(policy)
    keys = Script.keys("whole", 4)
    script.serve("whole", num_blocks=4)
    script.policy.split(99, script.id_of("whole"), num_blocks=2)
    policy.used(99, hint=0, tick=90, now=0.0)
    policy.released(99, tick=91, now=0.0)
    script.drop("whole", 4)
    policy.dropped(99, 0, may_return=True)

    assert policy.num_alike(keys) == 2
    assert policy.num_alike([*keys[:2], 7]) == 2
    assert policy.num_alike([7, *keys[:2]]) == 1


def test_a_lease_may_add_blocks_only_behind_its_own_new_ones() -> None:
    policy = LfuDa(8)
    script = Script(policy)
    script.publish("new")
    new = script.id_of("new")
    assert policy.can_extend(new, [1])

    script.serve("gone")
    script.drop("gone")
    assert not policy.can_extend(new, Script.keys("gone")), "those have a past"
    script.use("new")
    assert not policy.can_extend(new, [1]), "another lease has used it"
    script.serve("done")
    assert not policy.can_extend(script.id_of("done"), [1])


# Worth


def test_of_leaves_used_equally_often_the_one_worth_less_goes_first() -> None:
    script = Script(Gdsf(8, worth=lambda depth: float(depth)))
    script.serve("deep", start=9)
    script.serve("shallow", start=0)
    script.serve("middle", start=4)

    assert script.evict(3) == ["shallow", "middle", "deep"]


def test_uses_and_worth_weigh_against_each_other() -> None:
    script = Script(Gdsf(8, worth=lambda depth: float(depth)))
    script.serve("deep", start=4)  # 5 at once
    script.serve(*["shallow"] * 6, start=0)  # 6 times 1

    assert script.evict(2) == ["deep", "shallow"]


def test_a_trimmed_leaf_is_rated_by_its_new_tail() -> None:
    script = Script(Gdsf(8, worth=lambda depth: float(depth)))
    script.serve("long", num_blocks=6)
    script.serve("other", start=3)
    assert script.evict() == ["other"], "worth 4 of 6"
    script.drop("long", 3)
    script.serve("next", start=3)

    assert script.evict() == ["long"], "worth 3 now"


def test_half_of_a_leaf_is_rated_as_the_whole_is_by_its_tail() -> None:
    script = Script(Gdsf(8, worth=lambda depth: float(depth)))
    script.serve("long", num_blocks=6)
    script.serve("other", start=4)
    script.policy.split(99, script.id_of("long"), num_blocks=3)

    assert script.victim() == "other"
    assert script.policy.can_merge(99, script.id_of("long"))
    script.policy.merged(99, script.id_of("long"))
    script.drop("long", 2)
    assert script.victim() == "long"


def test_in_a_cache_what_many_share_stays() -> None:
    cache = build_cache(num_blocks=12, block_size=1, make_policy=lambda: LfuDa(12))
    for number in range(6):
        serve(cache, "shared" + "uvwxyz"[number], now=float(number))
    for number in range(8):
        serve(cache, f"{number}+", now=10.0 + number)

    assert cached(cache, "shared!") == 6
