"""What was there before, against a dict that remembers every block by itself."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.books.account import PrefixAccount
from stemkv.core.books.history import History, Place
from stemkv.core.books.past import Past, PastRun
from stemkv.core.prefix.identity import PUBLIC, Domain
from tests.core.builders import ALICE, BOB, CREW, NAMESPACE, OTHER_NAMESPACE, tokens

NAMESPACES = (NAMESPACE, OTHER_NAMESPACE, b"a" * 32)
# CREW is a group with a principal's name: equal to nobody's private domain.
DOMAINS = (ALICE, BOB, CREW, PUBLIC)
STEMS = ("aaaaaa", "aabaaa", "aabbaa", "baaaab")  # a letter is a block
MAX_BLOCKS = 6
REFUSED = -1.0  # the twin's time of what was dropped after use: before all others


@dataclass(frozen=True)
class Act:
    """The holder's blocks `start … stop - 1` of the text come or go."""

    namespace: bytes
    domain: Domain
    text: str
    start: int
    stop: int
    verb: str  # comes, leaves, is refused


@dataclass(frozen=True)
class Question:
    """What a request of this holder would ask."""

    namespace: bytes
    domain: Domain
    text: str
    start: int
    stop: int


class Twin:
    """One entry for every holder and every prefix of whole blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._gone: dict[tuple[bytes, Domain, str], float] = {}

    def note(self, act: Act, now: float) -> None:
        for index in range(act.start, act.stop):
            head = act.text[: (index + 1) * self._block_size]
            key = (act.namespace, act.domain, head)
            times = {"comes": math.inf, "leaves": now, "is refused": REFUSED}
            self._gone[key] = times[act.verb]

    def past(self, asked: Question) -> list[Past]:
        return [self._past_of(asked, index) for index in range(asked.start, asked.stop)]

    def own(self, asked: Question, index: int) -> list[float]:
        """Since when what the holder may see is gone: its own and the public copy."""
        held = self._held(asked, index)
        return [
            held[asked.namespace, domain]
            for domain in (asked.domain, PUBLIC)
            if (asked.namespace, domain) in held
        ]

    def _held(self, asked: Question, index: int) -> dict[tuple[bytes, Domain], float]:
        head = asked.text[: (index + 1) * self._block_size]
        return {
            (namespace, domain): gone
            for (namespace, domain, each), gone in self._gone.items()
            if each == head
        }

    def _past_of(self, asked: Question, index: int) -> Past:
        held, own = self._held(asked, index), self.own(asked, index)
        if own and max(own) == REFUSED:
            return Past(is_refused=True)
        if own:
            return Past(left_s=max(own))
        if any(namespace == asked.namespace for namespace, _ in held):
            return Past(is_other_domain=True)
        others = [namespace for namespace, _ in held]
        return Past(other_namespace=min(others, default=None))


@st.composite
def texts(draw: st.DrawFn, block_size: int) -> str:
    """Whole blocks of a few stems: texts meet, divide and continue each other."""
    blocks = {"a": "a" * block_size, "b": "a" * (block_size - 1) + "b"}
    stem = draw(st.sampled_from(STEMS))
    num_blocks = draw(st.integers(1, MAX_BLOCKS))
    return "".join(blocks[letter] for letter in stem[:num_blocks])


@st.composite
def spans_of(draw: st.DrawFn, block_size: int) -> tuple[str, int, int]:
    text = draw(texts(block_size))
    stop = draw(st.integers(1, len(text) // block_size))
    return text, draw(st.integers(0, stop - 1)), stop


@st.composite
def acts(draw: st.DrawFn, holders: list[tuple[bytes, Domain]], block_size: int) -> Act:
    return Act(
        *draw(st.sampled_from(holders)),
        *draw(spans_of(block_size)),
        verb=draw(st.sampled_from(["comes", "leaves", "is refused"])),
    )


@st.composite
def lives(draw: st.DrawFn, block_size: int) -> list[Act]:
    """What a few holders do; the fewer, the more their runs grow and are cut."""
    holder = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(DOMAINS))
    holders = draw(st.lists(holder, min_size=1, max_size=5))
    return draw(st.lists(acts(holders, block_size), min_size=1, max_size=25))


@st.composite
def questions(draw: st.DrawFn, block_size: int) -> Question:
    return Question(
        draw(st.sampled_from(NAMESPACES)),
        draw(st.sampled_from((ALICE, BOB, CREW))),
        *draw(spans_of(block_size)),
    )


def note(history: History, act: Act, now: float) -> None:
    what = act.namespace, act.domain, act.text, act.start, act.stop
    if act.verb == "comes":
        history.leave(history.published(*what[:2], tokens(act.text), *what[3:]))
    else:
        leave(history, *what, now, is_refused=act.verb == "is refused")


def leave(
    history: History,
    namespace: bytes,
    domain: Domain,
    text: str,
    start: int,
    stop: int,
    now: float,
    *,
    is_refused: bool = False,
) -> None:
    """Blocks that came, at the latest just now, leave."""
    place = history.published(namespace, domain, tokens(text), start, stop)
    history.left(place, start, now, is_refused=is_refused)
    history.leave(place)


def spelled_out(runs: list[PastRun]) -> list[Past]:
    return [run.past for run in runs for _ in range(run.num_blocks)]


def ask(history: History, asked: Question) -> list[PastRun]:
    prompt = tokens(asked.text)
    return history.past(asked.namespace, asked.domain, prompt, asked.start, asked.stop)


@given(data=st.data(), block_size=st.sampled_from([1, 2, 3]))
@settings(max_examples=120, deadline=None)
def test_history_knows_of_each_block_what_a_dict_of_blocks_knows(
    data: st.DataObject, block_size: int
) -> None:
    history, twin = History(block_size), Twin(block_size)
    for now, act in enumerate(data.draw(lives(block_size))):
        note(history, act, float(now))
        twin.note(act, float(now))
        check_nodes(history)
    for asked in data.draw(st.lists(questions(block_size), min_size=1, max_size=8)):
        runs = ask(history, asked)

        assert spelled_out(runs) == twin.past(asked)
        assert all(left.past != right.past for left, right in pairwise(runs))
        assert ask(history, asked) == runs, "asking changes nothing"


@given(data=st.data(), max_blocks=st.integers(1, 12))
@settings(max_examples=120, deadline=None)
def test_bounded_history_forgets_and_never_invents(
    data: st.DataObject, max_blocks: int
) -> None:
    history, twin = History(2, max_blocks=max_blocks), Twin(2)
    for now, act in enumerate(data.draw(lives(2))):
        note(history, act, float(now))
        twin.note(act, float(now))
        assert history.num_marks <= max_blocks
        check_nodes(history)
    for asked in data.draw(st.lists(questions(2), min_size=1, max_size=8)):
        known = spelled_out(ask(history, asked))

        assert len(known) == asked.stop - asked.start
        for index, told in enumerate(known, asked.start):
            # It may have forgotten some who had a block, so the next reason applies;
            # whatever it still says is true.
            held = twin._held(asked, index)
            assert told.left_s is None or told.left_s in twin.own(asked, index)
            assert not told.is_refused or REFUSED in twin.own(asked, index)
            assert not told.is_refused or told == Past(is_refused=True)
            if told.is_other_domain:
                assert any(namespace == asked.namespace for namespace, _ in held)
            if told.other_namespace is not None:
                assert told.other_namespace in {namespace for namespace, _ in held}


def check_nodes(history: History) -> None:
    """One number per block and holder, and as many blocks as are counted."""
    num_blocks = num_marks = 0
    for node in history._nodes():
        length = len(node.edge) // history._block_bytes
        num_blocks += length
        assert length
        assert {len(gone) for gone in node.gone.values()} <= {length}
        assert {len(seen) for seen in node.seen.values()} <= {length}
        assert node.gone or node.children or node.num_places, (
            "what nobody has is not kept"
        )
        num_marks += length * len(node.gone)
        assert node.parent is not None
        assert node.parent.children[bytes(node.edge[: history._block_bytes])] is node
        assert node.start == node.parent.stop == node.stop - length
    assert history.num_blocks == num_blocks
    assert history.num_marks == num_marks


def test_what_was_forgotten_first_is_what_changed_longest_ago() -> None:
    history = History(1, max_blocks=16)
    for now in range(17):
        history.published(NAMESPACE, ALICE, tokens(chr(65 + now)), 0, 1)

    known = [
        history.past(NAMESPACE, BOB, tokens(chr(65 + now)), 0, 1)[0].past
        for now in range(17)
    ]
    assert known == [Past()] + [Past(is_other_domain=True)] * 16


def test_a_parent_is_remembered_as_long_as_a_child_is() -> None:
    history = History(1, max_blocks=8)
    history.published(NAMESPACE, ALICE, tokens("ab"), 0, 2)
    history.published(NAMESPACE, BOB, tokens("ac"), 0, 2)
    for now in range(2, 12):
        # The root of both is as old as time; one child is kept fresh.
        history.published(NAMESPACE, ALICE, tokens("ab"), 1, 2)
        history.published(NAMESPACE, BOB, tokens(chr(77 + now)), 0, 1)

    found = history.past(NAMESPACE, ALICE, tokens("ab"), 0, 2)
    assert found == [PastRun(2, Past(left_s=math.inf))]


def test_a_prefix_that_grows_block_by_block_stays_one_node() -> None:
    history = History(1)
    text = "abcdefghij"
    for stop in range(1, 11):
        history.published(NAMESPACE, ALICE, tokens(text[:stop]), stop - 1, stop)

    assert len(list(history._nodes())) == 1
    (node,) = history._nodes()
    assert node.gone[NAMESPACE, ALICE] == array("d", [math.inf] * 10)


def test_a_block_that_came_back_has_not_left() -> None:
    history = History(1)
    history.published(NAMESPACE, ALICE, tokens("ab"), 0, 2)
    leave(history, NAMESPACE, ALICE, "ab", 0, 2, 2.0)
    history.published(NAMESPACE, ALICE, tokens("ab"), 0, 1)

    assert history.past(NAMESPACE, ALICE, tokens("ab"), 0, 2) == [
        PastRun(1, Past(left_s=math.inf)),
        PastRun(1, Past(left_s=2.0)),
    ]


def test_what_was_refused_is_told_until_it_comes_back_or_leaves_otherwise() -> None:
    history = History(1)
    history.published(NAMESPACE, ALICE, tokens("abc"), 0, 3)
    leave(history, NAMESPACE, ALICE, "abc", 1, 3, 2.0, is_refused=True)
    history.published(NAMESPACE, ALICE, tokens("ab"), 1, 2)

    assert history.past(NAMESPACE, ALICE, tokens("abc"), 0, 3) == [
        PastRun(2, Past(left_s=math.inf)),
        PastRun(1, Past(is_refused=True)),
    ]
    leave(history, NAMESPACE, ALICE, "ab", 1, 2, 5.0)
    leave(history, NAMESPACE, PUBLIC, "abc", 2, 3, -7.0)
    assert history.past(NAMESPACE, ALICE, tokens("abc"), 1, 3) == [
        PastRun(1, Past(left_s=5.0)),
        PastRun(1, Past(left_s=-7.0)),
    ], "of two copies the one that was evicted, whenever that was"
    assert history.past(NAMESPACE, BOB, tokens("abc"), 1, 2) == [
        PastRun(1, Past(is_other_domain=True)),
    ]


@pytest.mark.parametrize(
    "holder, expected",
    [
        ((NAMESPACE, ALICE), Past(left_s=math.inf)),
        ((NAMESPACE, PUBLIC), Past(left_s=math.inf)),
        ((NAMESPACE, BOB), Past(is_other_domain=True)),
        ((NAMESPACE, CREW), Past(is_other_domain=True)),
        ((OTHER_NAMESPACE, ALICE), Past(other_namespace=OTHER_NAMESPACE)),
        ((OTHER_NAMESPACE, PUBLIC), Past(other_namespace=OTHER_NAMESPACE)),
    ],
    ids=["own", "public", "other", "group-of-that-name", "namespace", "its-public"],
)
def test_who_held_it_decides_what_alice_is_told(
    holder: tuple[bytes, Domain], expected: Past
) -> None:
    history = History(1)
    history.published(*holder, tokens("a"), 0, 1)

    assert history.past(NAMESPACE, ALICE, tokens("a"), 0, 1) == [PastRun(1, expected)]


@pytest.mark.parametrize("num_others", [0, 1, 400])
def test_a_look_costs_the_same_however_many_others_have_the_text(
    num_others: int,
) -> None:
    """Else a tenant could tell from its own delay what others have."""
    prompt = tokens("a" * 200)
    history = History(1)
    history.published(NAMESPACE, ALICE, prompt, 0, 200)
    for number in range(num_others):
        history.published(NAMESPACE, Domain.private(f"t{number}"), prompt, 0, 200)

    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    runs = history.past(NAMESPACE, BOB, prompt, 0, 200)
    sys.setprofile(None)

    assert [run.past for run in runs] == [Past(is_other_domain=True)]
    assert num_calls < 100


def test_many_holders_of_one_text_are_bounded_too() -> None:
    history = History(1, max_blocks=500)
    prompt = tokens("a" * 100)
    for number in range(50):
        holder = Domain.private(f"t{number}")
        history.published(NAMESPACE, holder, prompt, 0, 100)
        assert history.num_marks <= 500

    assert history.num_blocks == 100
    assert sum(len(node.gone) for node in history._nodes()) == 5


def built(num_nodes: int, max_blocks: int | None) -> tuple[History, bytes, Place]:
    """A path that is cut before each of its blocks, and where it ends."""
    history = History(1, max_blocks=max_blocks)
    text = "ab" * num_nodes
    place = history.published(NAMESPACE, ALICE, tokens(text), 0, len(text))
    for stop in range(1, num_nodes):
        fork = text[:stop] + "z"
        history.leave(history.published(NAMESPACE, BOB, tokens(fork), stop, stop + 1))
    return history, tokens(text), place


@pytest.mark.parametrize("max_blocks", [None, 5_000], ids=["all", "bounded"])
def test_what_comes_and_goes_costs_the_same_at_any_depth(
    max_blocks: int | None,
) -> None:
    num_calls = []
    for num_nodes in (4, 400):
        history, prompt, place = built(num_nodes, max_blocks)
        assert len(list(history._nodes())) >= 2 * num_nodes - 2
        num_blocks = len(prompt) // 4
        longer = prompt + tokens("xy")
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        leaf = history.published(
            NAMESPACE, BOB, longer, num_blocks, num_blocks + 2, after=place
        )
        history.past(NAMESPACE, ALICE, longer, num_blocks, num_blocks + 2, after=leaf)
        history.left(leaf, num_blocks, 5.0)
        history.leave(leaf)
        sys.setprofile(None)
        num_calls.append(calls)

    assert num_calls[0] == num_calls[1]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_digests_are_those_of_all_tokens_up_to_the_end_of_a_run(
    data: st.DataObject,
) -> None:
    history = History(1)
    resident = []
    for act in data.draw(lives(1)):
        place = history.published(
            act.namespace, act.domain, tokens(act.text), act.start, act.stop
        )
        account = PrefixAccount(
            domain=act.domain,
            start=act.start,
            end=act.stop,
            num_blocks=act.stop - act.start,
            is_pinned=False,
            since_s=0.0,
        )
        account.hit(act.start, act.stop)
        resident.append((place, account))

    num_tokens = sum(account.hit_tokens for _, account in resident)
    accounts = history.accounts(resident)
    assert sum(account.hit_tokens for account in accounts.values()) == num_tokens
    assert accounts.keys() == {
        fresh_digest(*holder, text_to(node))
        for node in history._nodes()
        for holder, gone in node.gone.items()
        if max(gone) == math.inf  # it has some of its blocks
    }


def fresh_digest(namespace: bytes, domain: Domain, text: str) -> bytes:
    place = (namespace, domain.kind.value, domain.name)
    return sha256(repr(place).encode() + tokens(text)).digest()


def text_to(node: Any) -> str:
    edges = []
    while node.parent is not None:
        edges.append(bytes(node.edge))
        node = node.parent
    ids = array("i", b"".join(reversed(edges)))
    return "".join(map(chr, ids))


def test_a_place_is_found_again_after_its_run_was_cut_above_and_below_it() -> None:
    history = History(1)
    whole = history.published(NAMESPACE, ALICE, tokens("abcdef"), 0, 6)
    upper = history.cut(whole, 4)
    for fork in ("abx", "abcdx", "ax"):
        history.leave(
            history.published(NAMESPACE, BOB, tokens(fork), len(fork) - 1, len(fork))
        )
    history.left(whole, 4, 7.0)
    history.leave(whole)

    assert history.past(NAMESPACE, ALICE, tokens("abcdef"), 0, 6) == [
        PastRun(4, Past(left_s=math.inf)),
        PastRun(2, Past(left_s=7.0)),
    ]
    longer = history.published(NAMESPACE, ALICE, tokens("abcdxy"), 5, 6, after=upper)
    assert (longer.node.start, longer.stop) == (5, 6)
    check_nodes(history)


def test_a_run_that_is_resident_stays_in_its_place_when_it_is_forgotten() -> None:
    history = History(1, max_blocks=4)
    place = history.published(NAMESPACE, ALICE, tokens("ab"), 0, 2)
    for letter in "cdefgh":
        history.leave(history.published(NAMESPACE, ALICE, tokens(letter), 0, 1))

    assert history.past(NAMESPACE, ALICE, tokens("ab"), 0, 2) == [PastRun(2, Past())]
    history.left(place, 0, 9.0)
    history.leave(place)
    assert history.past(NAMESPACE, ALICE, tokens("ab"), 0, 2) == [
        PastRun(2, Past(left_s=9.0))
    ]
    check_nodes(history)
