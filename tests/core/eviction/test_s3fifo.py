"""S3-FIFO: two queues of leaves, and a memory of what left the small one."""

from __future__ import annotations

from stemkv.core.retention.policy import S3Fifo
from tests.core.builders import build_cache, cached, serve
from tests.core.eviction.script import Script


def filled(policy: S3Fifo, num_main: int = 10) -> Script:
    """A script with leaves in the main queue, the oldest first."""
    script = Script(policy)
    names = [f"main {number}" for number in range(num_main)]
    for _ in range(3):
        script.serve(*names)
    script.serve("any", num_blocks=num_main)
    assert script.evict(num_blocks=num_main) == ["any"], "the others move on"
    return script


def test_what_came_first_goes_first_whether_it_was_used_once_or_not() -> None:
    script = Script(S3Fifo(8))
    script.serve("a", "b", "c", "a")

    assert script.evict(3) == ["a", "b", "c"]


def test_what_was_used_twice_after_it_came_moves_to_the_main_queue() -> None:
    script = Script(S3Fifo(8))
    script.serve("a", "b", "c", "a", "a")

    assert script.evict(3) == ["b", "c", "a"]


def test_a_use_counts_while_another_lasts() -> None:
    script = Script(S3Fifo(8))
    script.publish("a")
    script.use("a")
    script.use("a")
    script.release("a")
    script.serve("b")

    assert script.evict() == ["b"]


def test_a_scan_does_not_reach_the_main_queue() -> None:
    script = filled(S3Fifo(20))
    for number in range(50):
        script.serve(f"scan {number}", f"scan {number} too")
        assert script.evict(2)[0].startswith("scan")


def test_the_main_queue_gives_when_the_small_one_is_less_than_a_tenth() -> None:
    script = filled(S3Fifo(20), num_main=10)
    script.serve("new")  # one of eleven

    assert script.evict() == ["main 0"]
    assert script.evict() == ["new"], "one of ten"


def test_blocks_count_for_a_tenth_also_where_they_cannot_go() -> None:
    script = filled(S3Fifo(20), num_main=18)
    script.publish("held", num_blocks=2)
    script.serve("new")

    assert script.evict() == ["new"]


def test_what_was_used_in_the_main_queue_enters_it_anew() -> None:
    script = filled(S3Fifo(20))
    script.serve("main 0", "main 0", "main 1")

    victims = script.evict(20)

    # Main 0 was used twice, so it is met three times before it goes.
    assert victims[:8] == [f"main {number}" for number in range(2, 10)]
    assert victims[8:] == ["main 1", "main 0"]


def test_uses_beyond_three_do_not_count() -> None:
    policy = S3Fifo(20)
    script = filled(policy, num_main=2)
    script.serve(*["main 0"] * 9)
    script.serve(*["main 1"] * 3)

    assert script.evict(2) == ["main 0", "main 1"]


def test_what_comes_back_enters_the_main_queue() -> None:
    script = Script(S3Fifo(8))
    script.serve("back")
    assert script.evict() == ["back"]
    script.serve("back", "new")

    assert script.evict(2) == ["new", "back"]


def test_what_left_the_main_queue_comes_back_as_new() -> None:
    script = filled(S3Fifo(20), num_main=1)
    assert script.evict() == ["main 0"]
    script.serve("main 0", "new")

    assert script.evict(2) == ["main 0", "new"]


def test_as_many_are_remembered_as_the_cache_holds() -> None:
    script = Script(S3Fifo(4))
    names = "abcdef"
    script.serve(*names)
    script.evict(6)
    known = [script.policy.num_alike(Script.keys(name) + [0]) == 1 for name in names]

    assert known == [False, False, True, True, True, True]


def test_a_parent_that_becomes_a_leaf_is_met_at_its_own_place() -> None:
    script = Script(S3Fifo(8))
    script.publish("above")
    script.serve("early")
    script.publish("below")
    script.release("above")
    script.policy.became_pinned(script.id_of("above"))  # a leaf no more
    script.serve("late")
    script.release("below")
    assert script.evict(1) == ["early"]
    script.drop("below")
    script.become_leaf("above")

    assert script.evict(2) == ["above", "late"]


def test_a_leaf_keeps_its_place_while_it_is_held() -> None:
    script = Script(S3Fifo(8))
    script.serve("a", "b")
    script.use("a")
    assert script.victim() == "b"
    script.release("a")

    assert script.victim() == "a"


def test_nodes_of_one_lease_go_from_the_last_to_the_first() -> None:
    script = Script(S3Fifo(8))
    script.publish("a", "b", "c")
    script.release("a", "b", "c")

    assert script.evict(3) == ["c", "b", "a"]


def test_where_only_the_small_queue_has_leaves_it_spares_what_was_used() -> None:
    script = filled(S3Fifo(100), num_main=30)
    for number in range(30):
        script.policy.became_pinned(script.id_of(f"main {number}"))
    script.serve("a", "b", "a")

    assert script.evict(2) == ["b", "a"]


def test_a_lease_may_add_blocks_only_to_what_enters_with_them() -> None:
    policy = S3Fifo(8)
    script = Script(policy)
    script.serve("gone", "gone too")
    script.evict(2)
    script.publish("new")
    script.publish("gone")

    def can_extend(name: str, keys: list[int]) -> bool:
        return policy.can_extend(script.id_of(name), keys)

    gone = Script.keys("gone too")
    assert can_extend("new", [1])
    assert not can_extend("new", gone)
    assert can_extend("gone", gone)
    assert not can_extend("gone", [1])
    script.use("new")
    assert not can_extend("new", [1])
    script.release("gone")
    assert not can_extend("gone", gone)


def test_in_a_cache_what_many_share_stays() -> None:
    cache = build_cache(num_blocks=12, block_size=1, make_policy=lambda: S3Fifo(12))
    for number in range(6):
        serve(cache, "shared" + "uvwxyz"[number], now=float(number))
    for number in range(20):
        serve(cache, f"{number:02}", now=10.0 + number)

    assert cached(cache, "shared!") == 6
