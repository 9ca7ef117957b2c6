from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import Bar, finish, number, parser


def build_bar(measured: float, limit: float | None = 15.0, **kwargs) -> Bar:
    return Bar(name="match", measured=measured, limit=limit, unit="µs", **kwargs)


def test_a_limit_is_kept_up_to_its_very_value() -> None:
    assert build_bar(15.0).is_met
    assert not build_bar(15.1).is_met
    assert build_bar(15.0, sense="at least").is_met
    assert not build_bar(14.9, sense="at least").is_met


def test_a_number_that_could_not_be_measured_keeps_no_promise() -> None:
    assert not build_bar(float("nan")).is_met
    assert not build_bar(float("nan"), sense="at least").is_met


def test_information_promises_nothing() -> None:
    assert build_bar(1e9, limit=None).is_met


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0"), (31, "31"), (62782, "62,782"), (14.22, "14.2"), (0.0512, "0.0512")],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_shortfall_fails_the_check_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = parser("").parse_args(["--check"])

    code = finish("title", [build_bar(16.0), build_bar(9.0)], options, facts={})

    assert code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "falls short: match: 16 µs, promised at most 15 µs"
    assert len([line for line in lines if "falls short" in line]) == 1


def test_a_shortfall_is_only_shown_when_nobody_checks() -> None:
    options = parser("").parse_args([])

    assert finish("title", [build_bar(16.0)], options, facts={}) == 0


def test_the_json_file_says_what_the_table_says(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = parser("").parse_args(["--json", str(path), "--check"])

    code = finish("title", [build_bar(9.0)], options, facts={"machine": "any"})

    document = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0
    assert document["facts"] == {"machine": "any"}
    assert document["bars"] == [
        {
            "name": "match",
            "measured": 9.0,
            "unit": "µs",
            "limit": 15.0,
            "sense": "at most",
            "basis": "measured",
            "is_met": True,
        }
    ]
