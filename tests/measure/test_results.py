"""JSON that equal results spell equally, and that every reader can read."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from stemkv.measure.results import (
    GIB,
    Check,
    LatencySummary,
    PrefixValue,
    SavedWork,
    Source,
    SweepResult,
    TokenTotals,
    TraceFacts,
    WriterReader,
    to_json,
)

SCHEMA = "stemkv.test/1"


def saved(**changes: float) -> SavedWork:
    values: dict[str, float] = {
        "seconds": 6.0,
        "joules": 2.0,
        "flops": 3.0,
        "retained_gib_s": 4.0,
        "active_gib_s": 5.0,
    }
    return SavedWork(**(values | changes))


def totals(prompt: int, reused: int) -> TokenTotals:
    return TokenTotals(
        prompt=prompt, reused=reused, computed=prompt - reused, misses={"evicted": 1}
    )


def loaded(value: object) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(to_json(value, schema=SCHEMA), parse_constant=refuse)


def test_the_schema_stands_in_every_document() -> None:
    assert loaded(saved())["schema"] == SCHEMA


def test_shares_that_follow_from_fields_are_in_it() -> None:
    assert loaded(saved())["seconds_per_gib_s"] == 1.5
    assert loaded(totals(8, 2))["hit_rate"] == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_no_number_is_null(value: float) -> None:
    document = loaded(saved(joules=value, flops=0.0))
    assert document["joules"] is None
    assert document["flops"] == 0.0


def test_a_share_of_nothing_is_null_too() -> None:
    assert loaded(totals(0, 0))["hit_rate"] is None
    assert loaded(saved(retained_gib_s=0.0))["seconds_per_gib_s"] is None


def test_nested_values_lists_and_words_are_plain() -> None:
    summary = LatencySummary(
        name="TTFT",
        count=1,
        mean=1.0,
        p50=1.0,
        p90=1.0,
        p95=1.0,
        p99=1.0,
        max=math.inf,
        distribution=((0.0, 1.0), (1.0, math.inf)),
    )
    document = loaded({"kind": Source.MEASURED, "summaries": [summary, None]})
    assert document["kind"] == "measured"
    assert document["summaries"][0]["distribution"] == [[0.0, 1.0], [1.0, None]]
    assert document["summaries"][0]["max"] is None
    assert document["summaries"][1] is None


def test_equal_results_are_equal_bytes_whatever_the_order_of_their_parts() -> None:
    left = TokenTotals(prompt=2, reused=1, computed=1, misses={"a": 1, "b": 2})
    right = TokenTotals(prompt=2, reused=1, computed=1, misses={"b": 2, "a": 1})
    assert to_json(left, schema=SCHEMA) == to_json(right, schema=SCHEMA)


def test_names_of_any_kind_survive() -> None:
    names = ["ü", "\ud800", '"', "\n", "</script>"]
    document = {"pairs": [WriterReader(writer=n, reader=n, tokens=1) for n in names]}
    assert [pair["writer"] for pair in loaded(document)["pairs"]] == names


def test_what_has_no_plain_form_is_refused_rather_than_made_up() -> None:
    with pytest.raises(TypeError):
        to_json({"set": {1, 2}}, schema=SCHEMA)


def test_a_check_holds_to_the_rounding_of_sums() -> None:
    assert Check(name="a", left=1.0, right=1.0 + 1e-12).holds
    assert not Check(name="a", left=100, right=101).holds
    assert not Check(name="a", left=math.nan, right=math.nan).holds
    assert loaded(Check(name="a", left=1.0, right=2.0))["holds"] is False


def test_a_prefix_that_was_never_idle_has_the_highest_value() -> None:
    def value(saved_s: float, retained: float) -> float:
        return PrefixValue(
            digest="",
            domain="public",
            start=0,
            end=1,
            num_hits=1,
            hit_tokens=1,
            saved_s=saved_s,
            retained_gib_s=retained,
            active_gib_s=0.0,
            num_evicted_blocks=0,
        ).seconds_per_gib_s

    assert value(1.0, 0.0) == math.inf
    assert value(0.0, 0.0) == 0.0
    assert value(1.0, 4.0) == 0.25


def test_every_field_of_a_result_is_in_its_json() -> None:
    facts = TraceFacts(
        name="t",
        format="f",
        num_requests=1,
        num_tenants=1,
        duration_s=0.0,
        prompt_tokens=1,
        output_tokens=1,
        unit_size=1,
        is_exact=True,
        num_skipped_lines=0,
    )
    result = SweepResult(
        trace=facts, config={"x": None}, cost_source="c", cells=(), curves=()
    )
    document = loaded(result)
    names = {field.name for field in dataclasses.fields(SweepResult)}
    assert document.keys() >= names | {"schema"}
    assert document["trace"].keys() >= {f.name for f in dataclasses.fields(TraceFacts)}
    assert GIB == 2**30
