"""Pages in a real browser: drawn, self-contained, harmless, in both schemes, on a phone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stemkv.report import Page
from stemkv.report.replay import replay_page
from stemkv.report.sweep import sweep_page
from stemkv.report.value import DemoRow, demo_page, value_page
from tests.report.browser import Browser, Tab
from tests.report.examples import make_comparison, make_result, make_sweep

HOSTILE = (
    '</script><a href="https://e.example">x</a><img src=x onerror=alert(1)>%{x}<b>$y$'
)
NUM_CHARTS = "document.querySelectorAll('.chart').length"
NUM_DRAWN = (
    "document.querySelectorAll('.chart.drawn svg.main-svg:first-of-type').length"
)
PAPER = "getComputedStyle(document.body).backgroundColor"
INK = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"


def demo() -> Page:
    rows = [
        DemoRow(name="TTFT p50, all", off=1.9, on=0.4, unit="s"),
        DemoRow(name="cached bytes at the end", off=0.0, on=7.5e6, unit="bytes"),
    ]
    return demo_page(headline="h", paragraphs=["p"], rows=rows, config={"seed": 0})


def value() -> Page:
    first = replay_page(make_result()).sections[:1]
    return value_page(headline="h", paragraphs=["p"], sections=first, config={})


PAGES = {
    "replay": lambda: replay_page(make_result()),
    "sweep": lambda: sweep_page(make_sweep()),
    "policies": lambda: sweep_page(make_comparison()),
    "policies at one size": lambda: sweep_page(make_comparison(sizes=(256,))),
    "demo": demo,
    "value": value,
}


def show(browser: Browser, page: Page | str, file: Path, **how: int | str) -> Tab:
    file.write_text(page if isinstance(page, str) else page.render(), encoding="utf-8")
    return browser.open(file, **{"width": 1200, **how})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PAGES)
def test_every_chart_is_drawn_without_a_complaint_or_a_request(
    name: str, browser: Browser, page_file: Path
) -> None:
    tab = show(browser, PAGES[name](), page_file)

    assert tab.evaluate("document.documentElement.dataset.charts") == "drawn"
    assert tab.evaluate(NUM_CHARTS) > 0
    assert tab.evaluate(NUM_DRAWN) == tab.evaluate(NUM_CHARTS)
    assert tab.complaints() == []
    elsewhere = [url for url in tab.requested() if not url.startswith("data:")]
    assert elsewhere == [page_file.as_uri()]


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_scrolls_in_one_direction(
    name: str, browser: Browser, page_file: Path
) -> None:
    tab = show(browser, PAGES[name](), page_file, width=360, height=740)

    assert tab.evaluate("innerWidth") == 360
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    # No chart is wider than its place, where it would be cut off.
    widths = tab.evaluate(
        "[...document.querySelectorAll('.chart')].map("
        "spot => [spot.querySelector('svg').getBoundingClientRect().width,"
        " spot.clientWidth])"
    )
    assert widths
    assert all(drawn <= place for drawn, place in widths)
    smallest = tab.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text, p, td, th, li')].map("
        "text => parseFloat(getComputedStyle(text).fontSize)))"
    )
    assert smallest >= 11


def test_charts_follow_the_scheme_while_the_page_is_open(
    browser: Browser, page_file: Path
) -> None:
    tab = show(browser, PAGES["replay"](), page_file)
    light = tab.evaluate(f"[{PAPER}, {INK}]")
    tab.set_scheme("dark")
    tab.wait_for(f"{INK} != '{light[1]}'")
    dark = tab.evaluate(f"[{PAPER}, {INK}]")

    assert light == ["rgb(253, 253, 252)", "rgb(28, 28, 28)"]
    assert dark == ["rgb(22, 22, 20)", "rgb(230, 230, 227)"]
    assert tab.complaints() == []
    # Opened in the dark it looks the same.
    opened = show(browser, PAGES["replay"](), page_file, scheme="dark")
    assert opened.evaluate(f"[{PAPER}, {INK}]") == dark


def hostile() -> Page:
    result = make_result(tenants=("acme", HOSTILE, "2026-01-01"), text=HOSTILE)
    return replay_page(
        dataclasses.replace(
            result,
            trace=dataclasses.replace(result.trace, name=HOSTILE, notes=(HOSTILE,)),
            config={HOSTILE: HOSTILE},
            cost_source=HOSTILE,
        )
    )


def test_names_and_texts_of_others_are_text_everywhere(
    browser: Browser, page_file: Path
) -> None:
    tab = show(browser, hostile(), page_file, width=360)

    assert tab.evaluate("document.documentElement.dataset.charts") == "drawn"
    assert tab.evaluate("document.querySelectorAll('a, img, b').length") == 0
    ticks = tab.evaluate(
        "[...document.querySelectorAll('.ytick text')].map(t => t.textContent)"
    )
    assert any("</scrip" in tick for tick in ticks)
    assert any("2026-01-01" in tick for tick in ticks)
    assert tab.complaints() == []
    assert tab.evaluate("document.documentElement.scrollWidth") == 360


def test_pointing_at_a_chart_shows_numbers_and_nothing_else(
    browser: Browser, page_file: Path
) -> None:
    tab = show(browser, hostile(), page_file)
    shown = []
    for index in range(tab.evaluate(NUM_CHARTS)):
        layer = f"#chart-{index} .nsewdrag"
        for place in (0.13, 0.31, 0.52, 0.74):
            tab.point_at(layer, place, 0.5)
            tab.evaluate("new Promise(requestAnimationFrame)")
            tab.point_at(layer, place + 0.01, place)
            tab.evaluate("new Promise(done => setTimeout(done, 80))")
            shown += tab.evaluate(
                f"[...document.querySelectorAll('#chart-{index} .hoverlayer text')]"
                ".map(text => text.textContent)"
            )
        assert tab.evaluate("document.querySelectorAll('a, img, b').length") == 0

    assert any("</scr" in text for text in shown)
    assert any("tokens" in text for text in shown)
    assert tab.complaints() == []


def test_a_script_that_got_into_a_page_would_not_run_nor_fetch(
    browser: Browser, page_file: Path
) -> None:
    page = PAGES["demo"]().render()
    intruder = (
        "<script>document.documentElement.dataset.intruder = 1</script>"
        '<img src="http://192.0.2.1/x.png" onerror="document.body.dataset.intruder = 1">'
    )
    tab = show(browser, page.replace("<h1>", f"{intruder}<h1>"), page_file)

    assert tab.evaluate("document.documentElement.dataset.charts") == "drawn"
    assert tab.evaluate("document.documentElement.dataset.intruder ?? null") is None
    assert tab.evaluate("document.body.dataset.intruder ?? null") is None
    assert len(tab.complaints()) >= 2
    # Without the policy it would have run: the test can see one that does.
    start = page.index("<meta http-equiv")
    end = page.index(">", start) + 1
    bare = (page[:start] + page[end:]).replace("<h1>", f"{intruder}<h1>")
    open_to_all = show(browser, bare, page_file)
    assert open_to_all.evaluate("document.documentElement.dataset.intruder") == "1"


def test_a_key_of_the_legend_switches_its_line_off_and_on(
    browser: Browser, page_file: Path
) -> None:
    tab = show(browser, PAGES["replay"](), page_file)
    lines = "document.querySelector('#chart-0').querySelectorAll('.scatter').length"
    key = "document.querySelector('.legend button')"
    before = tab.evaluate(lines)
    tab.evaluate(f"{key}.click()")
    tab.wait_for(f"{lines} == {before - 1}")
    tab.set_scheme("dark")
    tab.wait_for(f"{INK} == 'rgb(230, 230, 227)'")

    assert tab.evaluate(f"{key}.getAttribute('aria-pressed')") == "false"
    assert tab.evaluate(lines) == before - 1
    tab.evaluate(f"{key}.click()")
    tab.wait_for(f"{lines} == {before}")


def test_a_chart_can_be_saved_as_a_picture(browser: Browser, page_file: Path) -> None:
    tab = show(browser, PAGES["replay"](), page_file)
    address = tab.evaluate(
        "Plotly.toImage('chart-0', {format: 'png', width: 400, height: 300})"
    )

    assert address.startswith("data:image/png;base64,")
    assert tab.complaints() == []


def test_without_charts_the_numbers_are_open(browser: Browser, page_file: Path) -> None:
    page = PAGES["replay"]().render().replace('id="plotly">H4sI', 'id="plotly">AAAA')
    tab = show(browser, page, page_file)

    assert tab.evaluate("document.documentElement.dataset.charts").startswith("not")
    assert tab.evaluate("document.querySelectorAll('.chart p').length") == tab.evaluate(
        NUM_CHARTS
    )
    assert (
        tab.evaluate("document.querySelectorAll('section details:not([open])').length")
        == 0
    )
