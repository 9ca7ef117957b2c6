"""Every check can fail: each kind of damage, done by hand, is found and named."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from stemkv.core.check import check_cache, check_pool, check_scheduler, check_tree
from stemkv.core.prefix.blocks import BlockPool
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.prefix.tree import Node, PrefixTree
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.order import Fcfs
from stemkv.core.schedule.plan import Sample, StepResult
from stemkv.core.schedule.request import Request, RequestId, RequestSpec, RequestState
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.errors import InvariantError
from tests.core.builders import (
    ALICE,
    BOB,
    NAMESPACE,
    acquire,
    build_cache,
    hold,
    serve,
    snapshot,
    tokens,
)

# The pool: blocks 0 and 1 private (0 held twice), 2 published, 3 … 5 free.


def build_pool() -> BlockPool:
    pool = BlockPool(6)
    taken = pool.allocate(3)
    pool.retain(taken[:1])
    pool.publish(taken[2:])
    return pool


def free_twice(pool: BlockPool) -> None:
    pool._free.append(4)


def free_a_private_block(pool: BlockPool) -> None:
    pool._free.append(1)


def free_a_published_block(pool: BlockPool) -> None:
    pool._free.append(2)


def lose_a_free_block(pool: BlockPool) -> None:
    pool._free.remove(4)


def reference_a_published_block(pool: BlockPool) -> None:
    pool._ref_counts[2] = 1


def reference_a_free_block(pool: BlockPool) -> None:
    pool._ref_counts[4] = 1


def publish_without_counting(pool: BlockPool) -> None:
    pool._ref_counts[1] = 0
    pool._published[1] = 1


def count_without_publishing(pool: BlockPool) -> None:
    pool._num_published += 1


@pytest.mark.parametrize(
    "damage, message",
    [
        (free_twice, "holds a block twice"),
        (free_a_private_block, "block 1 is private and in the free list"),
        (free_a_published_block, "block 2 is published and in the free list"),
        (lose_a_free_block, "block 4 is free and not in the free list"),
        (reference_a_published_block, "published block 2 has private references"),
        (reference_a_free_block, "block 4 is private and in the free list"),
        (publish_without_counting, "private blocks: 2, should be 1"),
        (count_without_publishing, "private blocks: 1, should be 2"),
    ],
)
def test_damage_to_the_pool_is_found(
    damage: Callable[[BlockPool], None], message: str
) -> None:
    pool = build_pool()
    check_pool(pool)
    damage(pool)
    with pytest.raises(InvariantError, match=message):
        check_pool(pool)


# The tree: a public stem, two private branches of Alice, one of Bob.


@dataclass
class Grove:
    tree: PrefixTree
    stem: Node  # "ab", public
    left: Node  # "abcd", Alice, pinned twice
    right: Node  # "abxy", Alice
    bobs: Node  # "abcd", Bob


def build_grove() -> Grove:
    tree = PrefixTree(1)
    stem = tree.add(tree.root(NAMESPACE), PUBLIC, tokens("ab"), array("i", [0, 1]))
    left = tree.add(stem, ALICE, tokens("cd"), array("i", [2, 3]))
    right = tree.add(stem, ALICE, tokens("xy"), array("i", [4, 5]))
    bobs = tree.add(stem, BOB, tokens("cd"), array("i", [6, 7]))
    tree.pin(left)
    tree.pin(left)
    return Grove(tree, stem, left, right, bobs)


def keep_an_empty_set(grove: Grove) -> None:
    children = grove.stem.children[BOB]
    children.discard(tokens("c"))


def unsort_the_keys(grove: Grove) -> None:
    grove.stem.children[ALICE]._runs[0].reverse()


def lose_a_sorted_key(grove: Grove) -> None:
    grove.stem.children[ALICE]._runs[0].pop()


def reach_a_node_twice(grove: Grove) -> None:
    grove.stem.children[BOB].add(tokens("x"), grove.right)


def link_to_a_wrong_parent(grove: Grove) -> None:
    grove.left.parent = grove.right


def hang_a_node_under_another_domain(grove: Grove) -> None:
    grove.bobs.domain = ALICE


def continue_another_domains_node(grove: Grove) -> None:
    grove.tree.add(grove.left, BOB, tokens("z"), array("i", [8]))


def change_the_tokens_of_a_block(grove: Grove) -> None:
    grove.right.edge = tokens("zy")


def empty_a_node(grove: Grove) -> None:
    grove.right.block_ids = array("i")


def cut_an_edge(grove: Grove) -> None:
    grove.right.edge = tokens("x")


def lose_a_block(grove: Grove) -> None:
    grove.right.block_ids.pop()


def pin_below_the_parents_pins(grove: Grove) -> None:
    grove.left.ref_count += 1


def forget_a_node(grove: Grove) -> None:
    del grove.tree._nodes[grove.right.id]


def keep_a_node_that_is_gone(grove: Grove) -> None:
    grove.stem.children[ALICE].discard(tokens("x"))


def miscount_the_blocks(grove: Grove) -> None:
    grove.tree._num_blocks += 1


def miscount_the_pinned_blocks(grove: Grove) -> None:
    grove.tree._num_pinned -= 1


def lose_a_retired_root(grove: Grove) -> None:
    grove.tree.retire(NAMESPACE)
    grove.tree._retired.clear()


@pytest.mark.parametrize(
    "damage, message",
    [
        (keep_an_empty_set, "empty set of children"),
        (unsort_the_keys, "sorted keys"),
        (lose_a_sorted_key, "sorted keys"),
        (reach_a_node_twice, "is reached twice"),
        (link_to_a_wrong_parent, "has a wrong parent"),
        (hang_a_node_under_another_domain, "has a wrong domain"),
        (continue_another_domains_node, "continues another domain's node"),
        (change_the_tokens_of_a_block, "key of node"),
        (empty_a_node, "is empty"),
        (cut_an_edge, "edge of node"),
        (lose_a_block, "edge of node"),
        (pin_below_the_parents_pins, "pinned more often than its parent"),
        (forget_a_node, "nodes: "),
        (keep_a_node_that_is_gone, "nodes: "),
        (miscount_the_blocks, "blocks in the tree: 9, should be 8"),
        (miscount_the_pinned_blocks, "pinned blocks in the tree: 3, should be 4"),
        (lose_a_retired_root, "nodes: "),
    ],
)
def test_damage_to_the_tree_is_found(
    damage: Callable[[Grove], None], message: str
) -> None:
    grove = build_grove()
    check_tree(grove.tree, 1)
    damage(grove)
    with pytest.raises(InvariantError, match=message):
        check_tree(grove.tree, 1)


def test_an_edge_of_other_blocks_than_the_configured_ones_is_found() -> None:
    with pytest.raises(InvariantError, match="key of node|edge of node"):
        check_tree(build_grove().tree, 2)


# The cache: one lease on a path of two nodes, one with a copy to run, one unsharable.


@dataclass
class House:
    cache: PrefixCache
    sharing: Lease  # "abcd", then private "e"
    copying: Lease  # "ab", copies one token of the block "cd"
    alone: Lease  # two private blocks

    @property
    def leases(self) -> list[Lease]:
        return [self.sharing, self.copying, self.alone]


def build_house() -> House:
    cache = build_cache(num_blocks=20, block_size=2)
    serve(cache, "abxyzw")
    sharing = hold(cache, "abcde")
    copying = acquire(cache, "abcZ")
    alone = acquire(cache, "abc", namespace=None)
    assert copying is not None
    assert copying.copy_source is not None
    assert alone is not None
    return House(cache, sharing, copying, alone)


def lose_a_copy_source(house: House) -> None:
    house.copying.copy_source = None


def use_a_released_lease(house: House) -> None:
    house.cache.release(house.sharing, 0.0)


def hold_a_block_twice_in_the_tree(house: House) -> None:
    node = house.sharing.node
    assert node is not None
    (other,) = (n for n in house.cache.tree.nodes() if n.is_leaf and n.ref_count == 0)
    other.block_ids[0] = node.block_ids[0]


def put_a_free_block_into_the_tree(house: House) -> None:
    (node,) = (n for n in house.cache.tree.nodes() if n.is_leaf and n.ref_count == 0)
    node.block_ids[0] = house.cache.pool.free_block_ids()[0]


def publish_a_block_outside_the_tree(house: House) -> None:
    house.cache.pool.publish(house.cache.pool.allocate(1))


def pin_once_too_often(house: House) -> None:
    assert house.sharing.node is not None
    house.cache.tree.pin(house.sharing.node)


def retain_once_too_often(house: House) -> None:
    house.cache.pool.retain([house.alone.table[0]])


def allocate_for_nobody(house: House) -> None:
    house.cache.pool.allocate(1)


def swap_published_blocks_of_a_table(house: House) -> None:
    house.sharing.table.replace(0, house.sharing.table.ids(0, 2)[::-1])


def claim_a_private_block_as_published(house: House) -> None:
    house.sharing.num_published_blocks += 1


def claim_publishing_without_sharing(house: House) -> None:
    house.alone.num_published_blocks = 1


def end_at_another_node(house: House) -> None:
    assert house.sharing.node is not None
    house.sharing.node = house.sharing.node.parent


def forget_the_peak(house: House) -> None:
    house.cache._peak_active = 1


@pytest.mark.parametrize(
    "damage, message",
    [
        (use_a_released_lease, "released lease is still in use"),
        (hold_a_block_twice_in_the_tree, "a block is in two nodes"),
        (put_a_free_block_into_the_tree, "in the tree but not published"),
        (publish_a_block_outside_the_tree, "published blocks: 5, should be 4"),
        (pin_once_too_often, "leases on node"),
        (lose_a_copy_source, "leases on node"),
        (retain_once_too_often, "references to block"),
        (allocate_for_nobody, "references to block .*a lost lease shows here"),
        (swap_published_blocks_of_a_table, "published part of a block table"),
        (claim_a_private_block_as_published, "published part of a block table"),
        (claim_publishing_without_sharing, "published blocks of an unsharable lease"),
        (end_at_another_node, "published part of a block table"),
        (forget_the_peak, "peak is too low"),
        (lambda house: free_twice(house.cache.pool), "private|free list|twice"),
        (lambda h: miscount_the_blocks(Grove(h.cache.tree, *[None] * 4)), "blocks in"),
    ],
)
def test_damage_to_the_cache_is_found(
    damage: Callable[[House], None], message: str
) -> None:
    house = build_house()
    check_cache(house.cache, house.leases)
    damage(house)
    with pytest.raises(InvariantError, match=message):
        check_cache(house.cache, house.leases)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_lost_lease_is_found(lost: int) -> None:
    house = build_house()
    leases = house.leases
    del leases[lost]
    with pytest.raises(InvariantError, match="leases on node|a lost lease"):
        check_cache(house.cache, leases)


@pytest.mark.parametrize("twice", [0, 1, 2])
def test_a_lease_that_is_counted_twice_is_found(twice: int) -> None:
    house = build_house()
    with pytest.raises(InvariantError, match="leases on node|references to block"):
        check_cache(house.cache, [*house.leases, house.leases[twice]])


def test_checking_changes_nothing() -> None:
    house = build_house()
    before = snapshot(house.cache)
    check_cache(house.cache, house.leases)
    assert snapshot(house.cache) == before


# The scheduler: one decodes, one is in its prefill, one waits.


def spec(request_id: str, text: str) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId(request_id),
        prompt=TokenIds(tokens(text)),
        max_new_tokens=4,
        arrival_s=0.0,
        domain=ALICE,
        namespace=NAMESPACE,
    )


@dataclass
class Office:
    scheduler: Scheduler
    decoding: Request
    prefilling: Request
    waiting: Request

    @property
    def lease(self) -> Lease:
        assert self.decoding.lease is not None
        return self.decoding.lease


def build_office() -> Office:
    cache = build_cache(num_blocks=20, block_size=2)
    config = SchedulerConfig(token_budget=6, max_num_running=2)
    scheduler = Scheduler(config, cache, Fcfs())
    requests = [
        scheduler.add(spec("decoding", "abcd")),
        scheduler.add(spec("prefilling", "mnopqrst")),
        scheduler.add(spec("waiting", "xyz")),
    ]
    plan = scheduler.schedule(0.0)
    samples = {RequestId("decoding"): (Sample(ord("e")),)}
    scheduler.commit(plan, StepResult(samples), 1.0)
    assert [r.num_computed for r in requests] == [4, 2, 0]
    return Office(scheduler, *requests)


def give_a_waiting_request_a_lease(office: Office) -> None:
    office.waiting.lease = office.lease


def take_a_running_requests_lease(office: Office) -> None:
    office.decoding.lease = None


def let_a_waiting_request_have_kv(office: Office) -> None:
    office.waiting.num_computed = 1


def compute_beyond_the_tokens(office: Office) -> None:
    office.decoding.num_computed = 6


def compute_beyond_the_slots(office: Office) -> None:
    office.prefilling.num_computed = 9


def publish_before_computing(office: Office) -> None:
    office.decoding.num_computed = 1


def reuse_the_whole_prompt(office: Office) -> None:
    office.decoding.counts.reused = 4


def forget_a_running_request(office: Office) -> None:
    office.scheduler._lives.running.all.pop()


def call_a_running_request_waiting(office: Office) -> None:
    office.prefilling.state = RequestState.WAITING


def forget_a_waiting_request(office: Office) -> None:
    office.scheduler._lives.line.order.remove(office.waiting)


def change_the_tokens_of_a_request(office: Office) -> None:
    office.decoding._buffer = tokens("abXde")


def hold_another_domains_block(office: Office) -> None:
    office.lease.domain = BOB


def run_more_than_allowed(office: Office) -> None:
    office.scheduler.config = SchedulerConfig(max_num_running=1)


def leak_a_block(office: Office) -> None:
    office.scheduler.cache.pool.allocate(1)


@pytest.mark.parametrize(
    "damage, message",
    [
        (give_a_waiting_request_a_lease, "waiting waits with a lease"),
        (take_a_running_requests_lease, "decoding runs without a lease"),
        (let_a_waiting_request_have_kv, "computed of waiting: 1, should be 0"),
        (compute_beyond_the_tokens, "more KV than slots or tokens"),
        (compute_beyond_the_slots, "more KV than slots or tokens"),
        (publish_before_computing, "published what it has not computed"),
        (reuse_the_whole_prompt, "reuses its whole prompt"),
        (forget_a_running_request, "running requests: 1, should be 2"),
        (call_a_running_request_waiting, "running requests: 2, should be 1"),
        (forget_a_waiting_request, "waiting requests: 0, should be 1"),
        (change_the_tokens_of_a_request, "holds KV of other tokens"),
        (hold_another_domains_block, "holds another domain's block"),
        (run_more_than_allowed, "2 run, at most 1 may"),
        (leak_a_block, "a lost lease shows here"),
    ],
)
def test_damage_to_the_scheduler_is_found(
    damage: Callable[[Office], None], message: str
) -> None:
    office = build_office()
    check_scheduler(office.scheduler)
    damage(office)
    with pytest.raises(InvariantError, match=message):
        check_scheduler(office.scheduler)
