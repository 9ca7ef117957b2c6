"""The page: every text escaped, nothing fetched, readable with either background."""

from __future__ import annotations

import math
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from stemkv.errors import InvariantError
from stemkv.measure.results import Check
from stemkv.report import Fact, Page, Section

HOSTILE = '<script>alert("x")</script> & <img src=http://e.example/x>'


class Reader(HTMLParser):
    """Collects tags, attributes and the text of table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self._is_in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag in ("td", "th"):
            self._is_in_cell = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._is_in_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_in_cell:
            self.cells[-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def page(rows: list[list[str | int | float | None]]) -> str:
    section = Section(
        title=HOSTILE, columns=(HOSTILE, "n"), rows=rows, note=HOSTILE, label=HOSTILE
    )
    return Page(
        title=HOSTILE,
        headline=HOSTILE,
        sections=[section],
        paragraphs=[HOSTILE],
        facts=[Fact(name=HOSTILE, value=HOSTILE, label=HOSTILE)],
    ).render()


def test_every_text_is_escaped_wherever_it_stands() -> None:
    reader = read(page([[HOSTILE, 1]]))

    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert reader.cells == [HOSTILE, "n", HOSTILE, "1"]


def test_nothing_is_fetched() -> None:
    reader = read(page([["a", 1]]))

    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert not {"src", "href"} & {name for name, _ in reader.attributes}
    assert "url(" not in page([])
    assert "@import" not in page([])


def test_it_adapts_to_a_dark_background_and_to_a_phone() -> None:
    assert "prefers-color-scheme: dark" in page([])
    assert 'name="viewport"' in page([])


def test_numbers_are_grouped_and_an_absent_one_is_empty() -> None:
    assert read(page([[1234567, None]])).cells[2:] == ["1,234,567", ""]
    assert read(page([[0.123456, 2.0]])).cells[2:] == ["0.1235", "2"]


def test_verdicts_are_told_apart_by_more_than_their_words() -> None:
    attributes = read(page([["holds", "broken"], ["inconclusive", "x"]])).attributes

    for tone in ("holds", "broken", "inconclusive"):
        assert ("class", tone) in attributes


def test_only_columns_of_numbers_are_flush_right() -> None:
    rows: list[list[str | int | float | None]] = [[1, "x"], [2, 5], [None, 7]]
    numbers = [a for a in read(page(rows)).attributes if a == ("class", "number")]

    assert len(numbers) == 4  # the first column and its heading


def test_what_is_not_a_number_is_called_no_data() -> None:
    assert read(page([[math.nan, math.inf]])).cells[2:] == ["no data", "∞"]


def test_the_method_and_the_checks_that_held_are_shown() -> None:
    check = Check(name="sum of tenants", left=41, right=41)
    text = Page(
        title="t",
        headline="h",
        sections=[],
        method={"seed": 0, HOSTILE: None},
        checks=[check],
    ).render()

    assert read(text).cells[2:4] == ["seed", "0"]
    assert "sum of tenants" in read(text).cells
    assert "script" not in read(text).tags


def test_a_page_with_a_check_that_fails_cannot_be_made() -> None:
    check = Check(name="sum of tenants", left=41, right=42)

    with pytest.raises(InvariantError, match="sum of tenants: 41 ≠ 42"):
        Page(title="t", headline="h", sections=[], checks=[check])


def test_a_page_without_charts_needs_no_plotly() -> None:
    code = (
        "import sys\n"
        "sys.modules['plotly'] = None\n"  # as if it were not installed
        "from stemkv.report import Page, Section\n"
        "table = Section(title='t', columns=('a',), rows=[(1,)])\n"
        "print(Page(title='t', headline='h', sections=[table]).render())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "<table>" in done.stdout
