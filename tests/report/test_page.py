"""The page: every text escaped, nothing fetched, readable with either background."""

from __future__ import annotations

from html.parser import HTMLParser

from stemkv.report import Page, Section

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
    return Page(title=HOSTILE, headline=HOSTILE, sections=[section]).render()


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
