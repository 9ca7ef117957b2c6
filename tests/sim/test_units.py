from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.errors import ConfigError
from stemkv.sim.units import MAX_UNITS, ForeignUnits, UnitTable

# Few ids, so that they meet; some too sparse to index an array, some no int64 at all.
DENSE = st.integers(0, 5)
ANY = DENSE | st.sampled_from([-3, -1, 2**20 + 1, 2**40, 2**63, 2**70])


def naive_chain(requests: list[list[int]]) -> list[list[int]]:
    """Ids by whole prefix: the definition."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(r[: i + 1]), len(ids)) for i in range(len(r))]
        for r in requests
    ]


@given(st.lists(st.lists(DENSE, max_size=6) | st.lists(ANY, max_size=6), max_size=12))
def test_foreign_ids_become_what_the_definition_says(requests: list[list[int]]) -> None:
    units = ForeignUnits(UnitTable())

    assert [list(units.chain(ids)) for ids in requests] == naive_chain(requests)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_contents_become_what_the_definition_says(requests: list[list[int]]) -> None:
    table = UnitTable()

    chained = [list(table.chain(bytes([i]) for i in ids)) for ids in requests]

    assert chained == naive_chain(requests)
    assert table.num_units == max((max(c) + 1 for c in chained if c), default=0)


def test_an_id_under_two_parents_is_two_units_and_counted() -> None:
    units = ForeignUnits(UnitTable())

    first, second = units.chain([1, 9]), units.chain([2, 9])

    assert set(first) & set(second) == set()
    assert units.num_rechained == 1


def test_ids_of_two_scopes_never_meet() -> None:
    table = UnitTable()

    assert list(ForeignUnits(table).chain([1, 2])) == [0, 1]
    assert list(ForeignUnits(table).chain([1, 2])) == [2, 3]
    assert list(table.fresh(2)) == [4, 5]
    assert list(table.chain([b"a"])) == [6]


def test_contents_that_only_join_alike_are_different_units() -> None:
    table = UnitTable()

    assert table.chain([b"ab", b"c"]) != table.chain([b"a", b"bc"])


def test_the_table_keeps_nothing_of_a_content() -> None:
    table = UnitTable()

    table.chain([b"a secret of some length"])

    assert all(b"secret" not in key and len(key) == 16 for key in table._by_digest)


def test_a_trace_with_too_many_units_is_refused_with_a_remedy() -> None:
    table = UnitTable()
    table.take(MAX_UNITS)

    with pytest.raises(ConfigError, match="limit"):
        table.fresh(1)


def test_ids_come_in_the_type_that_a_trace_holds() -> None:
    table = UnitTable()

    assert isinstance(table.chain([b"a"]), array)
    assert ForeignUnits(table).chain([5]).typecode == "i"
    assert ForeignUnits(table).chain([]) == array("i")
