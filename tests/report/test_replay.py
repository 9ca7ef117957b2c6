"""The replay's page: sentences from numbers, no sum that fails, no word for NaN."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.errors import InvariantError
from stemkv.measure.results import (
    CapacityCurve,
    Check,
    CurvePoint,
    LatencySummary,
    MemorySample,
    ReplayResult,
    SweepCell,
)
from stemkv.report import Chart, Page
from stemkv.report.capacity import hit_rate_at
from stemkv.report.chart import thinned
from stemkv.report.replay import replay_page
from stemkv.report.sweep import sweep_page
from tests.report.examples import BLOCK_BYTES, make_result, make_sweep

ROOT = Path(__file__).parent.parent.parent


def charts(page: Page) -> dict[str, Chart]:
    return {each.title: each for each in page.sections if isinstance(each, Chart)}


def words(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def curve(name: str, *points: tuple[float, float]) -> CapacityCurve:
    return CapacityCurve(
        name=name,
        points=tuple(
            CurvePoint(num_blocks=int(gib * 512), gib=gib, hit_rate=hit_rate)
            for gib, hit_rate in points
        ),
    )


def without(result: ReplayResult, **changes: Any) -> ReplayResult:
    return dataclasses.replace(result, **changes)


# Sentences


def test_the_headline_gives_what_was_saved_where_and_what_isolation_costs() -> None:
    result = without(
        make_result(),
        curves=(
            curve("isolated", (1.0, 0.2), (2.0, 0.4)),
            curve("shared", (1.0, 0.3), (2.0, 0.55)),
        ),
    )
    headline = words(replay_page(result).headline)

    saved, share = result.saved.seconds, result.tokens.hit_rate
    assert headline == (
        f"Reuse saved {saved:.0f} s of prefill ({share:.1%} of the prompt tokens) in "
        "1.5 GiB of KV memory; isolating tenants costs 12.5 points of hit rate at this "
        "size, by the curves of requests one after another."
    ).replace("%", " %")


@pytest.mark.parametrize(
    ("shared", "end"),
    [
        (0.4002, "isolating tenants would cost nothing"),
        (0.39, "isolating tenants gains 1.0 points of hit rate"),
    ],
)
def test_isolation_is_said_to_cost_only_what_it_costs(shared: float, end: str) -> None:
    curves = (
        curve("isolated", (1.0, 0.4), (2.0, 0.4)),
        curve("shared", (1.0, shared), (2.0, shared)),
    )

    headline = words(replay_page(without(make_result(), curves=curves)).headline)
    assert f"; {end} at this size, by the curves" in headline


def test_nothing_is_said_of_isolation_where_no_curve_tells() -> None:
    outside = (
        curve("isolated", (2.0, 0.2), (4.0, 0.4)),
        curve("shared", (2.0, 0.3), (4.0, 0.5)),
    )
    one_tenant = make_result(tenants=("acme",))
    for result in (
        without(make_result(), curves=outside),
        without(make_result(), curves=outside[:1]),
        without(make_result(), curves=()),
        one_tenant,
    ):
        assert "isolating" not in replay_page(result).headline


def test_a_replay_that_reused_nothing_says_so() -> None:
    result = make_result()
    misses = dict.fromkeys(result.tokens.misses, 0)
    misses["never_seen"] = result.tokens.prompt
    nothing = dataclasses.replace(
        result.tokens, reused=0, computed=result.tokens.prompt, misses=misses
    )

    page = replay_page(without(result, tokens=nothing, curves=()))
    assert page.headline.startswith("Reuse saved nothing")
    assert page.headline.endswith("of KV memory.")
    assert replay_page(make_result(num_requests=0)).headline.startswith(
        "Nothing was replayed"
    )


def test_the_price_of_isolation_is_said_also_where_nothing_was_reused() -> None:
    result = make_result()
    prompt = result.tokens.prompt
    misses = dict.fromkeys(result.tokens.misses, 0) | {"other_domain": prompt}
    nothing = dataclasses.replace(
        result.tokens, reused=0, computed=prompt, misses=misses
    )
    curves = (
        curve("isolated", (1.0, 0.0), (2.0, 0.0)),
        curve("shared", (1.0, 0.9), (2.0, 0.9)),
    )

    by_curves = replay_page(without(result, tokens=nothing, curves=curves)).headline
    by_misses = replay_page(without(result, tokens=nothing, curves=())).headline

    for headline in (by_curves, by_misses):
        assert headline.startswith("Reuse saved nothing: ")
    assert "isolating tenants costs 90.0 points" in words(by_curves)
    assert "isolating tenants costs 100.0 points" in words(by_misses)
    assert "others had those tokens" in by_misses


def test_of_unknown_prompts_nothing_is_said_but_how_long_they_took() -> None:
    result = make_result()
    facts = dataclasses.replace(result.trace, num_opaque=result.trace.num_requests)
    page = replay_page(without(result, trace=facts))

    assert page.headline.startswith("Inconclusive: only lengths are known")
    titles = {each.title for each in page.sections}
    assert "Time to first token" in titles
    assert not titles & {
        "Bounds",
        "Hit rate by token against memory",
        "What reuse saved",
        "Where the prompt tokens went",
        "Why tokens were computed",
    }
    text = " ".join([*page.paragraphs, *(fact.name for fact in page.facts)])
    assert "Lost" not in text
    assert "hit rate" not in text
    assert "saved" not in text


def test_some_unknown_prompts_make_hit_rates_lower_bounds() -> None:
    facts = dataclasses.replace(make_result().trace, num_opaque=3)
    note = "Only the length of the prompt is known of 3 of"

    replayed = replay_page(without(make_result(), trace=facts))
    swept = sweep_page(dataclasses.replace(make_sweep(), trace=facts))

    for page in (replayed, swept):
        (text,) = [each for each in page.paragraphs if each.startswith(note)]
        assert text.endswith("so hit rates are lower bounds.")


def test_where_nothing_finished_nobody_is_said_to_have_waited_or_not() -> None:
    result = without(make_result(num_requests=0), num_refused=4, num_stalls=0)
    text = " ".join(replay_page(result).paragraphs)

    assert "No admission waited" not in text
    assert "4 requests could never run" in text


def test_stalls_are_told_with_who_held_the_memory() -> None:
    text = words(" ".join(replay_page(make_result()).paragraphs))
    calm = without(make_result(), num_stalls=0, stall_s=0.0)

    assert "8 admissions waited for memory" in text
    assert "held 91.5 % of the blocks (27.3 % published and pinned)" in text
    assert "stalled nobody" in " ".join(replay_page(calm).paragraphs)
    table = next(
        each
        for each in replay_page(make_result()).sections
        if each.title == "Who held the memory while admissions waited"
    )
    assert [row[0] for row in table.rows] == ["acme", "(public)", "beta"]
    assert table.rows[0][2] == pytest.approx(65.2)  # of 768 blocks


def test_an_inexact_trace_and_lines_left_out_are_told_on_top() -> None:
    result = make_result()
    facts = dataclasses.replace(result.trace, is_exact=False)
    page = replay_page(without(result, trace=facts))

    assert "every count of tokens is an estimate" in " ".join(page.paragraphs)
    assert "7 lines of the trace" in " ".join(page.paragraphs)
    labels = {each.title: each.label for each in page.sections}
    assert labels["Where the prompt tokens went"] == "estimated"


# Sums


def test_a_report_whose_sums_fail_is_not_drawn_and_both_sides_are_named() -> None:
    checks = (
        Check(name="prompt = reused + computed", left=10.0, right=10.0),
        Check(name="tenants = total", left=41.0, right=42.0),
    )

    with pytest.raises(InvariantError, match="tenants = total: 41.0 ≠ 42.0") as error:
        replay_page(make_result(checks=checks))
    assert "reused" not in str(error.value)


def test_a_check_of_nan_fails() -> None:
    check = Check(name="sum", left=math.nan, right=math.nan)

    with pytest.raises(InvariantError):
        replay_page(make_result(checks=[check]))


def test_every_bar_of_tokens_is_whole() -> None:
    figure = charts(replay_page(make_result()))["Where the prompt tokens went"].figure
    bars = zip(*(trace["x"] for trace in figure["data"]), strict=True)

    assert [math.fsum(bar) for bar in bars] == pytest.approx([1.0] * 6)


def test_requests_in_flight_are_what_counting_them_one_by_one_gives() -> None:
    result = make_result()
    rows = charts(replay_page(result))["Requests in flight"].rows

    for moment, *counted in rows:
        phases = [0, 0, 0]
        for r in result.requests:
            times = (r.arrival_s, r.admitted_s, r.first_token_s, r.end_s)
            num_passed = sum(t is not None and t <= moment for t in times)
            if 0 < num_passed < 4:
                phases[num_passed - 1] += 1
        assert counted == phases
    assert len(rows) > 100


@given(st.integers(1, 3000), st.integers(1, 400))
def test_thinning_covers_everything_once_and_in_order(length: int, limit: int) -> None:
    groups = thinned(length, limit)

    assert len(groups) == min(length, limit)
    assert [i for start, end in groups for i in range(start, end)] == list(
        range(length)
    )
    assert all(start < end for start, end in groups)


def test_thinned_memory_keeps_the_peak_and_all_evictions() -> None:
    samples = tuple(
        MemorySample(
            at_s=float(i), active=i % 97, cached=0, free=768 - i % 97, evicted=i % 5
        )
        for i in range(5000)
    )
    rows = charts(replay_page(without(make_result(), memory=samples)))[
        "Memory over time"
    ].rows

    assert len(rows) <= 300
    assert max(row[1] for row in rows) == 96
    assert sum(row[4] for row in rows) == sum(s.evicted for s in samples)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.floats(0, 1)),
        min_size=1,
        max_size=8,
        unique_by=lambda point: point[0],
    ),
    st.floats(0.01, 100),
)
def test_a_hit_rate_between_points_lies_between_them(
    points: list[tuple[float, float]], gib: float
) -> None:
    found = hit_rate_at(curve("shared", *points), gib)
    below = [point for point in points if point[0] <= gib]
    above = [point for point in points if point[0] >= gib]

    if not below or not above:
        # What is a point but for rounding is that point.
        near = [rate for at, rate in points if math.isclose(at, gib, rel_tol=1e-9)]
        assert found is None or found in near
        return
    ends = (max(below)[1], min(above)[1])
    assert found is not None
    assert min(ends) - 1e-9 <= found <= max(ends) + 1e-9


# Gaps


def nothing(name: str) -> LatencySummary:
    return LatencySummary(
        name=name,
        count=0,
        mean=math.nan,
        p50=math.nan,
        p90=math.nan,
        p95=math.nan,
        p99=math.nan,
        max=math.nan,
    )


@pytest.mark.parametrize("num_requests", [0, 1, 61])
def test_no_page_has_a_word_for_what_is_not_a_number(num_requests: int) -> None:
    result = without(
        make_result(num_requests=num_requests),
        steady_hit_rate=math.nan,
        request_hit_rate=math.nan,
        output_tokens_per_s=math.nan,
        latencies=(nothing("TTFT"), nothing("ITL")),
        regret_delay_s=nothing("regret"),
        goodput_rps=math.nan,
        goodput_share=None,
        busy_share=math.nan,
    )
    text = replay_page(result).render().split('<script type="text/plain"')[0]
    text = text[text.index("<body>") :]

    assert re.findall(r"\b(?:nan|NaN|inf|Infinity|None|null)\b", text) == []
    assert "no data" in text


def test_sections_without_content_are_left_out() -> None:
    empty = without(
        make_result(num_requests=0),
        curves=(),
        bounds=(),
        prefixes=(),
        writers=(),
        stall_accounts=(),
    )

    trace = dataclasses.replace(empty.trace, problems=(), notes=(), num_skipped_lines=0)
    page = replay_page(without(empty, trace=trace))
    titles = {"What was replayed", "Latencies, in milliseconds", "What reuse saved"}
    assert {each.title for each in page.sections} == titles


def test_requests_that_never_began_or_ended_are_drawn_as_far_as_they_came() -> None:
    result = make_result(num_requests=3)
    first, second, third = result.requests
    requests = (
        dataclasses.replace(first, admitted_s=None, first_token_s=None, end_s=None),
        dataclasses.replace(second, first_token_s=None, end_s=None),
        third,
    )
    page = replay_page(without(result, requests=requests, steps=()))
    figure = charts(page)["Timeline"].figure
    spans = {trace["name"]: trace["y"] for trace in figure["data"]}

    assert 0 not in {row for rows in spans.values() for row in rows}
    assert 1 in spans["prefill"]
    assert 1 not in spans["decode"]
    assert 2 in spans["decode"]


# Limits


def test_many_tenants_are_cut_to_the_largest_and_the_rest_is_counted() -> None:
    names = [f"tenant-{number:03}" for number in range(64)]
    page = replay_page(make_result(num_requests=900, tenants=names))
    drawn = charts(page)
    bars = drawn["Where the prompt tokens went"]
    table = next(each for each in page.sections if each.title == "What reuse saved")

    assert len(bars.rows) == 21
    assert "44 smallest tenants are not shown" in bars.note
    assert len(drawn["Who reuses whose tokens"].figure["data"][0]["z"]) == 20
    assert [row[0] for row in table.rows][-2:] == ["the other tenants", "all tenants"]
    num_requests = [row[1] for row in table.rows]
    assert sum(num_requests[:-1]) == num_requests[-1] == 900
    assert "58 tenants" in drawn["Time to first token"].note


def test_a_long_run_shows_the_requests_around_the_longest_wait() -> None:
    result = make_result(num_requests=400)
    waits = {
        r.request_id: (r.first_token_s or 0.0) - r.arrival_s for r in result.requests
    }
    worst = max(waits, key=lambda name: waits[name])
    chart = charts(replay_page(result))["Timeline"]

    assert len(chart.rows) == 60
    assert worst in {row[0] for row in chart.rows}
    assert "60 of 400 requests" in chart.note


def test_names_are_cut_and_what_they_hide_is_shown_wherever_they_stand() -> None:
    rogue = "evil\x1b[2J\u202ename\ud800"
    long = "n" * 70
    text = replay_page(make_result(tenants=(rogue, long))).render()
    text = text.split('<script type="text/plain"')[0]

    assert not set("\x1b\u202e\ud800") & set(text)
    assert r"evil\x1b[2J\u202ename\ud800" in text
    assert long not in text
    assert f"{'n' * 19}…{'n' * 20}" in text
    text.encode()


def test_text_of_prompts_is_there_only_where_the_result_has_it() -> None:
    with_text = charts(replay_page(make_result(text="You are a helpful")))
    without_text = charts(replay_page(make_result()))

    title = "Prefixes worth most per byte"
    assert "text" in with_text[title].columns
    assert "text" not in without_text[title].columns
    assert (
        "You are a helpful"
        in replay_page(make_result(text="You are a helpful")).render()
    )


# The same again


def test_equal_results_give_equal_bytes_whatever_the_hash_seed() -> None:
    code = (
        "import hashlib, sys\n"
        "from stemkv.report.replay import replay_page\n"
        "from stemkv.report.sweep import sweep_page\n"
        "from tests.report.examples import make_result, make_sweep\n"
        "text = replay_page(make_result()).render() + sweep_page(make_sweep()).render()\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    text = replay_page(make_result()).render() + sweep_page(make_sweep()).render()

    assert digests == {hashlib.sha256(text.encode()).hexdigest()}


def test_a_page_stays_near_the_size_of_what_draws_it() -> None:
    long = make_result(num_requests=3000)
    size = len(replay_page(long).render().encode())

    assert 1_900_000 < size < 2_250_000


# What plotly takes


@pytest.mark.parametrize("name", ["replay", "sweep", "sweep of one size"])
def test_plotly_knows_every_property_of_every_figure(name: str) -> None:
    sweep = make_sweep()
    if name == "sweep of one size":
        cells = tuple(cell for cell in sweep.cells if cell.num_blocks == 64)
        sweep = dataclasses.replace(sweep, cells=cells, curves=())
    page = replay_page(make_result()) if name == "replay" else sweep_page(sweep)

    assert charts(page)
    for chart in charts(page).values():
        go.Figure(chart.figure)  # raises where a name or a value is unknown
        assert chart.height == chart.figure["layout"]["height"]
        assert len(chart.legend) in (0, len(chart.figure["data"]))
        assert all(len(row) == len(chart.columns) for row in chart.rows)
        assert chart.rows


def test_the_capacity_mark_stands_at_the_operators_own_size() -> None:
    result = make_result()
    layout = charts(replay_page(result))["Hit rate by token against memory"].figure[
        "layout"
    ]

    gib = result.num_blocks * BLOCK_BYTES / 2**30
    assert layout["shapes"][0]["x0"] == layout["shapes"][0]["x1"] == gib
    assert layout["annotations"][0]["x"] == pytest.approx(math.log10(gib))
    assert words(layout["annotations"][0]["text"]) == "this run: 1.5 GiB"


# Sweeps


def test_a_sweep_says_which_configuration_reuses_most() -> None:
    headline = words(sweep_page(make_sweep()).headline)

    assert headline.startswith(
        "Of 30 configurations, “value, shared” with 2 GiB reuses most"
    )


def test_a_sweep_says_which_choice_moves_the_hit_rate() -> None:
    sweep = make_sweep()
    lru = tuple(cell for cell in sweep.cells if cell.eviction == "lru")

    def said(cells: tuple[SweepCell, ...]) -> str:
        return sweep_page(dataclasses.replace(sweep, cells=cells)).paragraphs[0]

    assert "choice of eviction policy and sharing rule moves" in said(sweep.cells)
    assert "choice of sharing rule moves" in said(lru)


def test_without_a_clock_hits_are_exact_and_seconds_are_not() -> None:
    sweep = make_sweep()
    untimed = tuple(
        dataclasses.replace(cell, ttft_p50_s=None, ttft_p99_s=None)
        for cell in sweep.cells
    )

    def label(cells: tuple[SweepCell, ...]) -> str:
        page = sweep_page(dataclasses.replace(sweep, cells=cells))
        return next(s.label for s in page.sections if s.title == "All configurations")

    assert label(sweep.cells) == "estimated"
    assert label(untimed) == "hit rates and blocks exact, saved seconds estimated"


def test_a_sweep_that_served_nobody_is_inconclusive() -> None:
    sweep = make_sweep()
    refused = tuple(
        dataclasses.replace(cell, num_refused=sweep.trace.num_requests)
        for cell in sweep.cells
    )
    page = sweep_page(dataclasses.replace(sweep, cells=refused))

    assert page.headline.startswith("Inconclusive: none of 30 configurations could")
    assert [each.title for each in page.sections] == ["All configurations"]


def test_a_sweep_of_unknown_prompts_is_inconclusive() -> None:
    sweep = make_sweep()
    facts = dataclasses.replace(sweep.trace, num_opaque=sweep.trace.num_requests)
    page = sweep_page(dataclasses.replace(sweep, trace=facts))

    assert page.headline.startswith("Inconclusive: only lengths are known")
    assert not charts(page)


def test_a_sweep_of_nothing_says_so() -> None:
    empty = dataclasses.replace(make_sweep(), cells=(), curves=())

    assert sweep_page(empty).headline == "No configuration was replayed."
    assert sweep_page(empty).sections == []
