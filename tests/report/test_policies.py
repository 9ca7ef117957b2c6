"""Eviction policies compared: what is said follows from the numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from stemkv.measure.gap import with_gaps
from stemkv.measure.results import SweepCell, SweepResult
from stemkv.report.page import Chart
from stemkv.report.policies import (
    policy_charts,
    policy_headline,
    policy_sentences,
    policy_tables,
)
from stemkv.report.sweep import sweep_page
from tests.report.examples import make_comparison, make_sweep


def words(text: str | None) -> str:
    return (text or "").replace("\N{NO-BREAK SPACE}", " ")


def changed(change: Callable[[SweepCell], SweepCell]) -> SweepResult:
    result = make_comparison()
    return dataclasses.replace(result, cells=with_gaps(map(change, result.cells)))


def column(result: SweepResult, name: str) -> dict[str, object]:
    """Return a column of the first table by policy."""
    table = policy_tables(result)[0]
    at = list(table.columns).index(name)
    return {str(row[0]): row[at] for row in table.rows}


def test_each_size_has_a_table_with_the_best_policy_first() -> None:
    tables = policy_tables(make_comparison())

    assert len(tables) == 5
    for table in tables:
        hit_rates = [row[1] for row in table.rows]
        assert hit_rates == sorted(hit_rates, reverse=True)  # type: ignore[type-var]
        assert [row[0] for row in table.rows][:2] == ["clairvoyant", "reuse_index"]
        assert table.label.endswith("CPU time measured")
    assert [bool(table.note) for table in tables] == [True, False, False, False, False]


def test_the_worst_policy_is_marked_and_it_is_never_the_clairvoyant_one() -> None:
    marks = column(make_comparison(), "")

    assert marks == {name: "worst" if name == "lfu_da" else "" for name in marks}


def test_where_all_do_alike_none_is_worst_and_there_is_no_gap() -> None:
    result = changed(lambda cell: dataclasses.replace(cell, hit_rate=0.4))

    assert set(column(result, "").values()) == {""}
    assert set(column(result, "gap closed, tokens %").values()) == {None}
    assert policy_charts(result) == []
    assert policy_headline(result) is None
    assert "there is no gap to close" in words(policy_sentences(result)[-1])


def test_ends_of_the_gap_are_nothing_and_all_of_it() -> None:
    gaps = column(make_comparison(), "gap closed, tokens %")

    assert (gaps["lru"], gaps["clairvoyant"]) == (0.0, 100.0)
    lfu_da = gaps["lfu_da"]
    assert isinstance(lfu_da, float)
    assert lfu_da < 0


def test_what_was_not_measured_has_no_column() -> None:
    result = changed(lambda cell: dataclasses.replace(cell, policy_cpu_s=None))

    table = policy_tables(result)[0]
    assert "CPU s" not in table.columns
    assert "measured" not in table.label + table.note


def test_a_trace_without_a_clock_has_no_value_by_time() -> None:
    result = make_comparison()
    clockless = dataclasses.replace(
        result, trace=dataclasses.replace(result.trace, has_arrivals=False)
    )

    assert "saved s per GiB·s" in policy_tables(result)[0].columns
    assert "saved s per GiB·s" not in policy_tables(clockless)[0].columns


def test_the_headline_names_who_closes_most_and_who_least() -> None:
    text = words(policy_headline(make_comparison()))

    assert text.startswith("Of 4 eviction policies “reuse_index” comes closest")
    assert "“lfu_da” closes least, -2" in text


def test_who_loses_against_lru_is_named_with_how_much() -> None:
    losing = words(policy_sentences(make_comparison())[0])
    safe = policy_sentences(
        changed(
            lambda cell: dataclasses.replace(cell, hit_rate=max(cell.hit_rate, 0.7))
        )
    )

    assert losing.startswith("The most that a policy loses against LRU is 2")
    assert "“lfu_da” with 0.125 GiB" in losing
    assert safe[0] == "No policy reuses less than LRU at any of these sizes."


def test_there_is_a_line_for_every_policy_lru_at_nothing_and_the_best_at_all() -> None:
    tokens, seconds = policy_charts(make_comparison())

    for chart in (tokens, seconds):
        lines = {line["name"]: line for line in chart.figure["data"]}
        assert len(lines) == 6
        assert set(lines["lru"]["y"]) == {0.0}
        assert set(lines["clairvoyant"]["y"]) == {1.0}
        assert lines["clairvoyant"]["line"]["dash"] == "dash"
        assert len({line["line"]["color"] for line in lines.values()}) == 6
    assert (tokens.label, seconds.label) == ("exact", "estimated")


def test_policies_that_do_the_same_are_said_to_have_one_line() -> None:
    result = make_comparison()
    gdsf = {c.num_blocks: c for c in result.cells if c.eviction == "gdsf"}
    same = changed(
        lambda cell: (
            dataclasses.replace(gdsf[cell.num_blocks], eviction="lfu_da")
            if cell.eviction == "lfu_da"
            else cell
        )
    )

    assert "gdsf and lfu_da do the same." in policy_charts(same)[0].note
    assert "the same" not in policy_charts(result)[0].note


def hinted() -> SweepResult:
    """Return a comparison with hints: LRU is there twice."""
    result = make_comparison()
    told = [
        dataclasses.replace(
            cell,
            is_hinted=cell.eviction != "clairvoyant",
            hit_rate=cell.hit_rate + (0.01 if cell.eviction != "clairvoyant" else 0),
        )
        for cell in result.cells
    ]
    blind = [cell for cell in result.cells if cell.eviction == "lru"]
    config = {**result.config, "hints": "next_use, from hindsight"}
    return dataclasses.replace(result, cells=with_gaps([*told, *blind]), config=config)


def test_with_hints_lru_is_there_twice_and_the_one_without_is_nothing() -> None:
    result = hinted()

    gaps = column(result, "gap closed, tokens %")
    assert gaps["lru without hints"] == 0.0
    lru = gaps["lru"]
    assert isinstance(lru, float)
    assert lru > 0
    assert gaps["clairvoyant"] == 100.0
    assert words(policy_headline(result)).startswith("Of 5 eviction policies")
    (tokens, _) = policy_charts(result)
    lines = {line["name"]: line["line"] for line in tokens.figure["data"]}
    assert lines["lru"]["color"] == lines["lru without hints"]["color"]
    assert lines["lru without hints"]["dash"] == "dash"
    assert tokens.note.startswith("LRU without hints is 0")


def test_hints_from_hindsight_are_called_so() -> None:
    page = sweep_page(hinted())

    assert any("what such hints are worth at best" in text for text in page.paragraphs)
    plain = sweep_page(make_comparison())
    assert not any("at best" in text for text in plain.paragraphs)


def test_one_size_is_drawn_as_bars() -> None:
    (chart,) = policy_charts(make_comparison(sizes=(256,)))

    assert [each["type"] for each in chart.figure["data"]] == ["bar", "bar"]
    assert "0.5 GiB" in words(chart.title)


def test_two_sharing_rules_have_tables_and_lines_of_their_own() -> None:
    result = make_comparison(sizes=(64, 128))
    both = [
        *result.cells,
        *(dataclasses.replace(cell, sharing="shared") for cell in result.cells),
    ]
    result = dataclasses.replace(result, cells=with_gaps(both))

    titles = [words(table.title) for table in policy_tables(result)]
    assert titles[0] == "Eviction policies with 0.125 GiB, isolated"
    assert len(titles) == 4
    assert len(policy_charts(result)[0].figure["data"]) == 12


def test_a_sweep_that_compares_nothing_says_nothing_of_gaps() -> None:
    result = make_sweep()

    assert policy_tables(result) == []
    assert policy_charts(result) == []
    assert policy_headline(result) is None
    assert policy_sentences(result) == []


@pytest.mark.parametrize("has_clock", [True, False])
def test_the_page_of_a_comparison_begins_with_it(has_clock: bool) -> None:
    result = make_comparison()
    if has_clock:
        result = dataclasses.replace(
            make_sweep(), clockless=result.cells, trace=result.trace
        )

    page = sweep_page(result)

    assert page.headline.startswith("Of 4 eviction policies")
    first = page.sections[0]
    assert isinstance(first, Chart)
    assert first.title.startswith("Gap closed")
    said = any("configurations" in text for text in page.paragraphs)
    assert said is has_clock, "what was found with the clock is said as well"
    assert not any("clairvoyant”" in text for text in page.paragraphs)
