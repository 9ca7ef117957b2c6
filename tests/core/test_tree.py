"""The prefix tree against a dict of prefixes, and its costs as counts."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stemkv.core.check import check_tree
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.prefix.tree import Match, Node, PrefixTree
from stemkv.errors import InvariantError
from tests.core.builders import (
    ALICE,
    BOB,
    CREW,
    NAMESPACE,
    OTHER_NAMESPACE,
    count_calls,
    spelled,
    tokens,
)


def plant(
    tree: PrefixTree,
    text: str | bytes,
    block_size: int,
    *,
    domain: Domain = ALICE,
    namespace: bytes = NAMESPACE,
    num_public: int = 0,
    first_block: int = 0,
) -> Node:
    """Add the whole blocks of a text the way `PrefixCache.publish` does."""
    data = tokens(text) if isinstance(text, str) else text
    block_bytes = block_size * TOKEN_BYTES
    node, at = tree.root(namespace), 0
    while at + block_bytes <= len(data):
        is_public = at < num_public * block_bytes and node.domain == PUBLIC
        end = num_public * block_bytes if is_public else len(data)
        end = min(end, len(data) - len(data) % block_bytes)
        owner = PUBLIC if is_public else domain
        child = tree.child(node, owner, data[at : at + block_bytes])
        if child is None:
            num_blocks = (end - at) // block_bytes
            ids = array("i", range(first_block, first_block + num_blocks))
            first_block += num_blocks
            node = tree.add(node, owner, data[at:end], ids)
            at = end
            continue
        same = tree.common_blocks(child, data, at, end)
        node = tree.split(child, same) if same < child.num_blocks else child
        at += same * block_bytes
    return node


def match(
    tree: PrefixTree,
    text: str,
    *,
    domain: Domain = ALICE,
    namespace: bytes = NAMESPACE,
    limit: int | None = None,
) -> Match:
    limit = len(text) if limit is None else limit
    return tree.match(namespace, domain, tokens(text), limit=limit)


def found(match: Match) -> tuple[int, int]:
    """Whole blocks and tokens of the block after them."""
    return match.num_blocks, match.partial.num_tokens if match.partial else 0


# Matching


def test_nothing_matches_in_an_unknown_namespace() -> None:
    tree = PrefixTree(2)
    plant(tree, "abcd", 2)

    missed = match(tree, "abcd", namespace=OTHER_NAMESPACE)

    assert missed == Match(None, 0, 0, None)
    assert OTHER_NAMESPACE not in tree.roots(), "a question planted a root"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", (0, 0)),
        ("x", (0, 0)),
        ("a", (0, 1)),
        ("ab", (0, 2)),
        ("abc", (1, 0)),
        ("abcX", (1, 0)),
        ("abcd", (1, 1)),
        ("abcdeX", (1, 2)),
        ("abcdef", (2, 0)),
        ("abcdefghiX", (3, 0)),
        ("bcdefg", (0, 0)),
    ],
)
def test_a_match_counts_whole_blocks_and_then_tokens(
    text: str, expected: tuple[int, int]
) -> None:
    tree = PrefixTree(3)
    plant(tree, "abcdefghi", 3)
    assert found(match(tree, text)) == expected


@pytest.mark.parametrize("limit", range(10))
def test_no_token_at_or_beyond_the_limit_is_matched(limit: int) -> None:
    tree = PrefixTree(3)
    plant(tree, "abcdefghi", 3)

    assert found(match(tree, "abcdefghi", limit=limit)) == divmod(limit, 3)


def test_a_match_names_the_node_and_how_much_of_it_agrees() -> None:
    tree = PrefixTree(2)
    node = plant(tree, "abcdefgh", 2, first_block=10)

    within = match(tree, "abcdeX")
    assert (within.node, within.num_node_blocks) == (node, 2)
    assert within.partial is not None
    assert (within.partial.block_id, within.partial.num_tokens) == (12, 1)

    whole = match(tree, "abcdefghij")
    assert (whole.node, whole.num_node_blocks, whole.partial) == (node, 4, None)


def test_the_partial_block_is_the_child_that_agrees_the_longest() -> None:
    tree = PrefixTree(4)
    for first_block, text in enumerate(["aXXX", "abXX", "abcX", "aYYY", "bbcd"]):
        plant(tree, text, 4, first_block=first_block)

    longest = match(tree, "abcd")

    assert longest.partial is not None
    assert (longest.partial.block_id, longest.partial.num_tokens) == (2, 3)


def test_a_partial_block_agrees_in_tokens_and_not_in_bytes_of_a_token() -> None:
    tree = PrefixTree(1)
    block = (0x01020304).to_bytes(4, "little")
    tree.add(tree.root(NAMESPACE), ALICE, block, array("i", [0]))

    wanted = (0x7F020304).to_bytes(4, "little")  # three bytes of four agree
    assert tree.match(NAMESPACE, ALICE, wanted, limit=1).partial is None


def test_the_same_tokens_elsewhere_do_not_match() -> None:
    """A block is found by all the tokens before it, not by its own (I19)."""
    tree = PrefixTree(2)
    plant(tree, "abcd", 2)

    assert found(match(tree, "cdab")) == (0, 0)
    assert found(match(tree, "xbcd")) == (0, 0)


# Domains (I3)


def test_a_domain_sees_its_own_blocks_and_the_public_ones_only() -> None:
    tree = PrefixTree(2)
    plant(tree, "abcdef", 2, domain=ALICE, num_public=1)

    assert found(match(tree, "abcdef", domain=ALICE)) == (3, 0)
    assert found(match(tree, "abcdef", domain=BOB)) == (1, 0)
    assert found(match(tree, "abcdef", domain=CREW)) == (1, 0), "a name is no domain"
    assert found(match(tree, "abcdef", domain=PUBLIC)) == (1, 0)


def test_another_domains_blocks_are_not_even_copied_from() -> None:
    tree = PrefixTree(4)
    plant(tree, "abcdefgh", 4, domain=ALICE, num_public=1)

    assert found(match(tree, "abcdefgX", domain=ALICE)) == (1, 3)
    assert found(match(tree, "abcdefgX", domain=BOB)) == (1, 0)


def test_equal_suffixes_of_two_domains_are_two_nodes() -> None:
    tree = PrefixTree(2)
    plant(tree, "abcd", 2, domain=ALICE, num_public=1, first_block=0)
    plant(tree, "abcd", 2, domain=BOB, num_public=1, first_block=2)

    assert tree.num_nodes == 3
    alices = match(tree, "abcd", domain=ALICE).node
    bobs = match(tree, "abcd", domain=BOB).node
    assert alices is not None
    assert bobs is not None
    assert (alices.domain, list(alices.block_ids)) == (ALICE, [1])
    assert (bobs.domain, list(bobs.block_ids)) == (BOB, [2])
    assert alices.parent is bobs.parent


def test_a_private_branch_off_a_public_node_beats_a_shorter_public_path() -> None:
    tree = PrefixTree(1)
    plant(tree, "abcz", 1, num_public=4)  # public a-b-c-z
    plant(tree, "abx", 1, num_public=2, first_block=10)  # public a-b, private x
    plant(tree, "abxyw", 1, num_public=2, first_block=20)

    assert match(tree, "abxyw").num_blocks == 5
    assert match(tree, "abcz").num_blocks == 4
    assert match(tree, "abxyw", domain=BOB).num_blocks == 2


def test_a_private_chain_older_than_the_public_one_still_counts_if_longer() -> None:
    tree = PrefixTree(1)
    plant(tree, "abcd", 1)  # private from the root on
    plant(tree, "ab", 1, num_public=2, first_block=10)  # public later

    assert match(tree, "abcd").num_blocks == 4
    assert match(tree, "abcd", domain=BOB).num_blocks == 2


def test_the_longest_visible_prefix_is_found_where_chains_tie() -> None:
    """Public and private blocks tie on `ab`; only the private chain goes on."""
    tree = PrefixTree(2)
    plant(tree, "abcd", 2)  # private, published before the declaration
    plant(tree, "ab", 2, num_public=1, first_block=10)

    assert found(match(tree, "abcX")) == (1, 1)


# Splits, pins, trims


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_split_keeps_matches_blocks_and_pins(cut: int) -> None:
    tree = PrefixTree(1)
    lower = plant(tree, "abcd", 1, first_block=5)
    tree.pin(lower)
    tree.pin(lower)

    upper = tree.split(lower, cut)

    assert lower.parent is upper
    assert lower.path() == [upper, lower]
    assert spelled(lower) == tokens("abcd")
    assert [*upper.block_ids, *lower.block_ids] == [5, 6, 7, 8]
    assert (upper.ref_count, lower.ref_count) == (2, 2)
    assert upper.domain == lower.domain
    assert (tree.num_blocks, tree.num_pinned_blocks) == (4, 4)
    assert match(tree, "abcd").node is lower
    check_tree(tree, 1)

    tree.unpin(lower)
    tree.unpin(lower)
    assert tree.num_pinned_blocks == 0


def test_a_split_keeps_the_children_below_the_lower_part() -> None:
    tree = PrefixTree(1)
    lower = plant(tree, "abcd", 1, num_public=4)
    plant(tree, "abcdx", 1, num_public=4, first_block=10)
    plant(tree, "abcdx", 1, num_public=4, domain=BOB, first_block=20)

    tree.split(lower, 2)

    assert match(tree, "abcdx").num_blocks == 5
    assert match(tree, "abcdx", domain=BOB).num_blocks == 5
    assert match(tree, "abcdx", domain=CREW).num_blocks == 4
    check_tree(tree, 1)


@pytest.mark.parametrize("cut", [-1, 0, 4, 5])
def test_a_split_leaves_blocks_on_both_sides(cut: int) -> None:
    tree = PrefixTree(1)
    node = plant(tree, "abcd", 1)
    with pytest.raises(InvariantError, match="split of a 4-block edge"):
        tree.split(node, cut)


def test_a_root_cannot_be_split() -> None:
    tree = PrefixTree(1)
    with pytest.raises(InvariantError, match="split"):
        tree.split(tree.root(NAMESPACE), 0)


@pytest.mark.parametrize("num_pins", [0, 2])
def test_a_merge_undoes_a_split(num_pins: int) -> None:
    tree = PrefixTree(1)
    lower = plant(tree, "abcd", 1, num_public=4, first_block=5)
    below = plant(tree, "abcdx", 1, num_public=4, first_block=10)
    for _ in range(num_pins):
        tree.pin(lower)
    upper = tree.split(lower, 2)

    assert tree.mergeable(upper) is lower
    tree.merge(upper, lower)

    assert lower.path() == [lower]
    assert below.path() == [lower, below]
    assert (spelled(lower), list(lower.block_ids)) == (tokens("abcd"), [5, 6, 7, 8])
    assert lower.ref_count == num_pins
    assert (tree.num_nodes, tree.num_blocks) == (2, 5)
    assert match(tree, "abcdx").node is below
    with pytest.raises(KeyError):
        tree.node(upper.id)
    check_tree(tree, 1)


def test_a_cut_that_separates_something_is_not_undone() -> None:
    tree = PrefixTree(1)
    branching = plant(tree, "ab", 1)
    plant(tree, "abc", 1, first_block=10)
    plant(tree, "abd", 1, first_block=20)
    public = plant(tree, "xy", 1, num_public=2, first_block=30)
    plant(tree, "xyz", 1, num_public=2, first_block=40)  # private below public
    shared = plant(tree, "pq", 1, num_public=2, first_block=50)
    plant(tree, "pqr", 1, num_public=3, first_block=60)
    plant(tree, "pqr", 1, num_public=2, domain=BOB, first_block=70)
    leased = plant(tree, "mn", 1, first_block=80)
    tree.pin(plant(tree, "mno", 1, first_block=90))
    tree.pin(leased)  # ends at the cut
    leaf = plant(tree, "abc", 1)

    for node in (branching, public, shared, leased, leaf, tree.root(NAMESPACE)):
        assert tree.mergeable(node) is None
    check_tree(tree, 1)


def test_a_cut_between_two_owners_is_not_undone() -> None:
    tree = PrefixTree(1)
    root = tree.root(NAMESPACE)
    upper = tree.add(root, ALICE, tokens("a"), array("i", [0]), owner="one")
    tree.add(upper, ALICE, tokens("b"), array("i", [1]), owner="other")

    assert tree.mergeable(upper) is None


def test_asking_what_could_be_merged_changes_nothing() -> None:
    tree = PrefixTree(1)
    lower = plant(tree, "abcd", 1)
    upper = tree.split(lower, 2)

    assert tree.mergeable(upper) is tree.mergeable(upper) is lower
    assert lower.path() == [upper, lower]
    check_tree(tree, 1)


def test_only_parent_and_child_can_be_merged() -> None:
    tree = PrefixTree(1)
    lower = plant(tree, "abcd", 1)
    upper = tree.split(lower, 2)
    for pair in ((lower, upper), (upper, upper), (tree.root(NAMESPACE), upper)):
        with pytest.raises(InvariantError, match="not parent and child"):
            tree.merge(*pair)


def test_a_pin_holds_all_ancestors_and_says_which_were_free() -> None:
    tree = PrefixTree(1)
    deep = plant(tree, "abcd", 1)
    middle = tree.split(deep, 2)

    assert tree.pin(deep) == [deep, middle]
    assert tree.pin(middle) == []
    assert (middle.ref_count, deep.ref_count) == (2, 1)
    assert tree.unpin(deep) == [deep]
    assert tree.unpin(middle) == [middle]
    assert tree.num_unpinned_blocks == tree.num_blocks == 4


def test_a_child_below_a_pin_is_pinned_alone() -> None:
    tree = PrefixTree(1)
    parent = plant(tree, "ab", 1)
    tree.pin(parent)
    child = plant(tree, "abcd", 1, first_block=2)

    assert tree.pin_child(child)
    assert not tree.pin_child(child)
    assert (parent.ref_count, child.ref_count) == (1, 2)
    assert tree.num_pinned_blocks == 4


def test_a_root_is_never_pinned() -> None:
    tree = PrefixTree(1)
    root = tree.root(NAMESPACE)

    assert tree.pin(root) == []
    assert tree.unpin(root) == []
    assert root.ref_count == 0


def test_unpinning_more_than_pinned_is_refused() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "a", 1)
    tree.pin(node)
    tree.unpin(node)
    with pytest.raises(InvariantError, match=f"node {node.id} is unpinned more"):
        tree.unpin(node)


def test_a_leaf_of_one_lease_grows_in_place() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "ab", 1)
    tree.pin(node)
    tree.extend(node, tokens("cd"), array("i", [7, 8]))

    assert (tree.num_nodes, tree.num_blocks, tree.num_pinned_blocks) == (1, 4, 4)
    assert match(tree, "abcd").num_blocks == 4
    check_tree(tree, 1)


@pytest.mark.parametrize("num_pins", [0, 2])
def test_a_leaf_of_none_or_two_leases_does_not_grow(num_pins: int) -> None:
    tree = PrefixTree(1)
    node = plant(tree, "ab", 1)
    for _ in range(num_pins):
        tree.pin(node)
    with pytest.raises(InvariantError, match="single lease"):
        tree.extend(node, tokens("c"), array("i", [7]))


def test_a_node_with_children_does_not_grow() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "ab", 1)
    plant(tree, "abx", 1, first_block=2)
    tree.pin(node)
    with pytest.raises(InvariantError, match="only a leaf"):
        tree.extend(node, tokens("c"), array("i", [7]))


def test_two_children_cannot_start_with_the_same_block() -> None:
    tree = PrefixTree(1)
    plant(tree, "ab", 1)
    with pytest.raises(InvariantError, match="two children"):
        tree.add(tree.root(NAMESPACE), ALICE, tokens("ax"), array("i", [5, 6]))


def test_a_trim_drops_the_tail_first() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "abcd", 1)

    assert list(tree.trim(node, 1)) == [3]
    assert match(tree, "abcd").num_blocks == 3
    assert list(tree.trim(node, 2)) == [1, 2]
    assert match(tree, "abcd").num_blocks == 1
    check_tree(tree, 1)


def test_a_node_that_loses_its_last_block_leaves_the_tree() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "ab", 1)

    assert list(tree.trim(node, 99)) == [0, 1]
    assert (tree.num_nodes, tree.num_blocks) == (0, 0)
    assert match(tree, "ab").num_blocks == 0
    assert tree.root(NAMESPACE).is_leaf
    check_tree(tree, 1)


def test_ids_of_nodes_are_never_used_again() -> None:
    tree = PrefixTree(1)
    seen = set()
    for _ in range(5):
        node = plant(tree, "abcd", 1)
        upper = tree.split(node, 2)
        assert {node.id, upper.id}.isdisjoint(seen)
        seen |= {node.id, upper.id}
        tree.trim(node, 2)
        tree.trim(upper, 2)


def test_only_unpinned_leaves_can_be_trimmed() -> None:
    tree = PrefixTree(1)
    inner = plant(tree, "a", 1)
    leaf = plant(tree, "ab", 1, first_block=1)
    for node in (inner, tree.root(NAMESPACE)):
        with pytest.raises(InvariantError, match="not an unpinned leaf"):
            tree.trim(node, 1)
    tree.pin(leaf)
    with pytest.raises(InvariantError, match="not an unpinned leaf"):
        tree.trim(leaf, 1)


# Retirement (I9)


def test_a_retired_namespace_matches_nothing_and_keeps_its_blocks() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "abcd", 1)

    root = tree.retire(NAMESPACE)

    assert root is not None
    assert root.is_retired
    assert node.root() is root
    assert match(tree, "abcd") == Match(None, 0, 0, None)
    assert tree.num_blocks == 4
    assert tree.retired_roots() == (root,)
    check_tree(tree, 1)


def test_a_retired_root_is_forgotten_with_its_last_block() -> None:
    tree = PrefixTree(1)
    node = plant(tree, "ab", 1)
    tree.retire(NAMESPACE)
    tree.trim(node, 1)
    assert tree.retired_roots() != ()
    tree.trim(node, 1)
    assert tree.retired_roots() == ()


def test_a_name_can_be_used_again_after_it_was_retired() -> None:
    tree = PrefixTree(1)
    plant(tree, "abcd", 1)
    tree.retire(NAMESPACE)
    plant(tree, "ab", 1, first_block=10)

    assert match(tree, "abcd").num_blocks == 2
    assert tree.num_blocks == 6
    check_tree(tree, 1)


def test_retiring_an_empty_or_unknown_namespace_leaves_nothing_behind() -> None:
    tree = PrefixTree(1)
    root = tree.root(OTHER_NAMESPACE)

    assert tree.retire(NAMESPACE) is None
    assert tree.retire(OTHER_NAMESPACE) is root
    assert root.is_retired
    assert tree.retired_roots() == ()


# Against a dict of prefixes


class TreeMachine(RuleBasedStateMachine):
    """Grow, split, pin, trim and retire; every question has a naive answer.

    The dict maps (namespace, owner, leading public blocks, prefix) to a block id.
    Public blocks and their private duplicates can both be resident, since a prefix
    may be declared public later; hence the third part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[tuple[bytes, Domain, int, bytes], int] = {}
        self.pins: list[tuple[Node, bytes]] = []
        self.num_created = 0

    @initialize(block_size=st.integers(1, 3))
    def create(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.tree = PrefixTree(block_size)

    namespaces = st.sampled_from([NAMESPACE, OTHER_NAMESPACE])
    owners = st.sampled_from([ALICE, BOB, CREW, PUBLIC])
    texts = st.text("ab", max_size=9)

    @rule(namespace=namespaces, owner=owners, text=texts, num_public=st.integers(0, 3))
    def plant(
        self, namespace: bytes, owner: Domain, text: str, num_public: int
    ) -> None:
        # Evenly mixed: without this nearly all texts are public or nearly none.
        num_public = num_public if num_public < 3 else 0
        data = tokens(text)
        first_block = self.num_created
        for index in range(len(text) // self.block_size):
            is_public = index < num_public or owner == PUBLIC
            key = (
                namespace,
                PUBLIC if is_public else owner,
                index + 1 if is_public else min(num_public, index + 1),
                data[: (index + 1) * self.block_bytes],
            )
            if key not in self.blocks:
                self.blocks[key] = self.num_created
                self.num_created += 1
        plant(
            self.tree,
            data,
            self.block_size,
            domain=owner,
            namespace=namespace,
            num_public=num_public,
            first_block=first_block,
        )

    def any_node(self, data: st.DataObject) -> Node:
        nodes = sorted(self.tree.nodes(), key=lambda node: node.id)
        assume(nodes)
        return data.draw(st.sampled_from(nodes))

    @precondition(lambda self: self.tree.num_nodes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        node = self.any_node(data)
        self.pins.append((node, spelled(node)))
        free = [step for step in reversed(node.path()) if step.ref_count == 0]
        assert self.tree.pin(node) == free

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pins) - 1))
        node, prefix = self.pins.pop(index)
        last = [step for step in reversed(node.path()) if step.ref_count == 1]
        assert spelled(node) == prefix, "a split moved a pin"
        assert self.tree.unpin(node) == last

    @precondition(lambda self: self.tree.num_nodes)
    @rule(data=st.data(), cut=st.integers(1, 3))
    def split(self, data: st.DataObject, cut: int) -> None:
        node = self.any_node(data)
        assume(cut < node.num_blocks)
        self.tree.split(node, cut)

    @precondition(lambda self: self.tree.num_nodes)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        node = self.any_node(data)
        below = [step for step in self.tree.nodes() if step.parent is node]
        is_seam = len(below) == 1 and below[0].domain == node.domain
        is_end_of_a_pin = any(pinned is node for pinned, _ in self.pins)
        lower = self.tree.mergeable(node)
        assert lower is (below[0] if is_seam and not is_end_of_a_pin else None)
        if lower is not None:
            self.tree.merge(node, lower)

    @precondition(lambda self: self.tree.num_nodes)
    @rule(data=st.data(), amount=st.integers(1, 4))
    def trim(self, data: st.DataObject, amount: int) -> None:
        node = self.any_node(data)
        if node.ref_count or not node.is_leaf:
            with pytest.raises(InvariantError):
                self.tree.trim(node, amount)
            return
        tail = list(node.block_ids)[-amount:]
        assert list(self.tree.trim(node, amount)) == tail
        self.blocks = {k: b for k, b in self.blocks.items() if b not in tail}

    @rule(namespace=namespaces)
    def retire(self, namespace: bytes) -> None:
        assume(not self.pins)  # those pins would hold nodes the dict has forgotten
        root = self.tree.retire(namespace)
        for node in [*self.tree.nodes()][::-1]:
            if node.root() is root:
                self.drop(node)
        self.blocks = {k: b for k, b in self.blocks.items() if k[0] != namespace}

    def drop(self, node: Node) -> None:
        for children in list(node.children.values()):
            for child in list(children):
                self.drop(child)
        if node.num_blocks:
            self.tree.trim(node, node.num_blocks)

    @rule(namespace=namespaces, owner=owners, text=texts, data=st.data())
    def ask(
        self, namespace: bytes, owner: Domain, text: str, data: st.DataObject
    ) -> None:
        limit = data.draw(st.integers(0, len(text)), label="limit")
        wanted = tokens(text)
        before = self.picture()
        answer = self.tree.match(namespace, owner, wanted, limit=limit)
        assert self.tree.match(namespace, owner, wanted, limit=limit) == answer
        assert self.picture() == before, "a question changed the tree"

        visible = [
            key
            for key in self.blocks
            if key[0] == namespace and key[1] in (PUBLIC, owner)
        ]
        end = limit * TOKEN_BYTES
        whole = [k for k in visible if len(k[3]) <= end and wanted.startswith(k[3])]
        longest = max((len(k[3]) for k in whole), default=0)
        assert answer.num_blocks * self.block_bytes == longest
        self.check_chain(answer, owner, wanted[:longest])

        tails = [
            (common_tokens(key[3][longest:], wanted[longest:end]), key)
            for key in visible
            if len(key[3]) == longest + self.block_bytes
            and key[3].startswith(wanted[:longest])
        ]
        most = max((same for same, _ in tails), default=0)
        tail = answer.partial.num_tokens if answer.partial else 0
        assert tail == most
        if answer.partial is not None:
            sources = {self.blocks[key] for same, key in tails if same >= tail}
            assert answer.partial.block_id in sources

    def check_chain(self, answer: Match, owner: Domain, prefix: bytes) -> None:
        """What is said to match does spell the prefix, in blocks we may see."""
        node = answer.node
        if node is None:
            assert prefix == b""
            return
        dropped = node.num_blocks - answer.num_node_blocks
        assert spelled(node)[: len(spelled(node)) - dropped * self.block_bytes] == (
            prefix
        )
        assert all(step.domain in (PUBLIC, owner) for step in node.path())

    def picture(self) -> list[Any]:
        return [
            (node.id, node.parent, node.edge, tuple(node.block_ids), node.ref_count)
            for node in self.tree.nodes()
        ] + [self.tree._next_id, sorted(self.tree.roots())]

    @invariant()
    def the_tree_is_the_dict(self) -> None:
        check_tree(self.tree, self.block_size)
        spelled_blocks = {}
        for node in self.tree.nodes():
            num_public = sum(
                step.num_blocks for step in node.path() if step.domain == PUBLIC
            )
            prefix = spelled(node)
            for back, block_id in enumerate(reversed(node.block_ids)):
                end = len(prefix) - back * self.block_bytes
                public = num_public - back if node.domain == PUBLIC else num_public
                namespace = next(
                    name
                    for name, root in self.tree.roots().items()
                    if root is node.root()
                )
                spelled_blocks[namespace, node.domain, public, prefix[:end]] = block_id
        assert spelled_blocks == self.blocks

    @invariant()
    def the_parent_of_a_resident_block_is_resident(self) -> None:
        """I36; a public block's parent is public, a private one's may be either."""
        for namespace, owner, num_public, prefix in self.blocks:
            parent = prefix[: -self.block_bytes]
            if not parent:
                continue
            above = num_public - 1 if owner == PUBLIC else num_public
            owner_above = PUBLIC if len(parent) <= above * self.block_bytes else owner
            assert (namespace, owner_above, above, parent) in self.blocks

    @invariant()
    def pins_are_counted(self) -> None:
        held = [step.id for node, _ in self.pins for step in node.path()]
        for node in self.tree.nodes():
            assert node.ref_count == held.count(node.id)
        pinned = sum(n.num_blocks for n in self.tree.nodes() if n.id in held)
        assert self.tree.num_pinned_blocks == pinned
        assert self.tree.num_unpinned_blocks == len(self.blocks) - pinned


def common_tokens(left: bytes, right: bytes) -> int:
    same = 0
    while (
        same < min(len(left), len(right)) // TOKEN_BYTES
        and left[: (same + 1) * TOKEN_BYTES] == right[: (same + 1) * TOKEN_BYTES]
    ):
        same += 1
    return same


def test_the_tree_answers_like_a_dict_of_prefixes() -> None:
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(max_examples=100, stateful_step_count=30, deadline=None),
    )


@pytest.mark.slow
def test_the_tree_answers_like_a_dict_of_prefixes_for_long() -> None:
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(max_examples=400, stateful_step_count=60, deadline=None),
    )


# The nearest child


@pytest.mark.parametrize(
    "num_children, alphabet",
    [(3000, 9), (3000, 1 << 20), (2500, 7)],
    ids=["crowded", "spread", "nearly all blocks"],
)
def test_the_nearest_of_thousands_of_children_is_that_of_brute_force(
    num_children: int, alphabet: int
) -> None:
    """Few letters: hundreds of children share their first tokens with the query."""
    rng = random.Random(num_children * alphabet)
    tree = PrefixTree(4)
    root = tree.root(NAMESPACE)
    nodes: dict[bytes, Node] = {}

    def block() -> bytes:
        return array("i", [rng.randrange(alphabet) for _ in range(4)]).tobytes()

    def ask() -> None:
        wanted = block()
        if rng.random() < 0.5:  # near a child that exists
            wanted = rng.choice(list(nodes))[: rng.randrange(4, 16)] + wanted
        wanted = wanted[:16]
        most = max(common_tokens(wanted, key) for key in nodes)
        for limit in range(1, 5):
            answer = tree.match(NAMESPACE, ALICE, wanted, limit=limit)
            if limit == 4 and wanted in nodes:
                assert answer.node is nodes[wanted]
            else:
                assert found(answer) == (0, min(most, limit))

    while len(nodes) < min(num_children, alphabet**4):
        key = block()
        if key not in nodes:
            nodes[key] = tree.add(root, ALICE, key, array("i", [len(nodes)]))
    for _ in range(60):
        ask()
    check_tree(tree, 4)
    while len(nodes) > 3:  # runs of sorted keys shrink and vanish again
        for key in rng.sample(sorted(nodes), k=max(1, len(nodes) // 3)):
            tree.trim(nodes.pop(key), 1)
        check_tree(tree, 4)
        for _ in range(20):
            ask()


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_children_stay_sorted_in_whatever_order_they_come(order: str) -> None:
    tree = PrefixTree(1)
    root = tree.root(NAMESPACE)
    keys = [i.to_bytes(4, "big") for i in range(2000)]
    if order == "descending":
        keys.reverse()
    if order == "shuffled":
        random.Random(1).shuffle(keys)
    nodes = [tree.add(root, ALICE, k, array("i", [i])) for i, k in enumerate(keys)]
    check_tree(tree, 1)
    runs = root.children[ALICE]._runs
    assert max(map(len, runs)) <= 512, "adding a child moves too many keys"
    for node in nodes[::2]:
        tree.trim(node, 1)
    check_tree(tree, 1)
    assert root.children[ALICE].sorted_keys() == sorted(keys[1::2])


# Costs, as counts of calls


def forest(num_sequences: int, *, num_blocks: int = 3) -> PrefixTree:
    """Sequences of two-token blocks that differ from their first block on."""
    tree = PrefixTree(2)
    for i in range(num_sequences):
        data = array("i", [i, i] + [7] * (2 * num_blocks - 2)).tobytes()
        plant(tree, data, 2, first_block=i * num_blocks)
    return tree


def match_calls(tree: PrefixTree, data: bytes, *, domain: Domain = ALICE) -> int:
    limit = len(data) // TOKEN_BYTES
    return count_calls(lambda: tree.match(NAMESPACE, domain, data, limit=limit))


@pytest.mark.parametrize(
    "wanted",
    [[5, 5, 7, 7, 7, 7], [5, 5, 7, 7, 9, 9], [5, 5], [5, 9], [-1, 0]],
    ids=["hit", "within an edge", "one block", "partial", "miss"],
)
def test_matching_costs_the_same_among_ten_and_ten_thousand(wanted: list[int]) -> None:
    data = array("i", wanted).tobytes()
    few, many = match_calls(forest(10), data), match_calls(forest(10_000), data)
    assert many <= few + 4  # the nearest child may lie in the next run of keys


def test_matching_a_long_edge_takes_no_call_per_block() -> None:
    def calls(num_blocks: int) -> int:
        tree = forest(1, num_blocks=num_blocks)
        data = array("i", [0, 0] + [7] * (2 * num_blocks - 2)).tobytes()
        return match_calls(tree, data)

    assert calls(10_000) == calls(3)


def test_a_difference_within_an_edge_is_found_in_logarithmic_calls() -> None:
    tree = forest(1, num_blocks=10_000)
    data = array("i", [0, 0] + [7] * 9_998 + [8] * 10_000).tobytes()
    assert tree.match(NAMESPACE, ALICE, data, limit=20_000).num_blocks == 5_000
    assert match_calls(tree, data) < match_calls(tree, data[:400]) + 20


@pytest.mark.parametrize("num_public", [0, 999])
def test_matching_grows_with_the_nodes_on_the_path(num_public: int) -> None:
    """Every block branches here, so a path of `n` blocks has `n` nodes."""
    path = "".join(chr(i) for i in range(1000, 1040))
    tree = PrefixTree(1)
    plant(tree, path, 1, num_public=num_public)
    for cut in range(1, len(path)):
        plant(tree, path[:cut] + "x", 1, num_public=cut, first_block=100 * cut)
        plant(tree, path[:cut] + "y", 1, num_public=num_public, first_block=100 * cut)

    short = match_calls(tree, tokens(path[:10]))
    double = match_calls(tree, tokens(path[:20]))
    quadruple = match_calls(tree, tokens(path[:40]))

    assert 0 < quadruple - double <= 2 * (double - short) + 10
