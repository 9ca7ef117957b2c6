"""Numbers as people read them."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.report import wording


def words(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (3.2e-5, "32 µs"),
        (0.0421, "42.1 ms"),
        (1.26, "1.26 s"),
        (212.4, "212 s"),
        (660.0, "11 min"),
        (9000.0, "2.5 h"),
        (-2.0, "-2 s"),
        (math.nan, "no data"),
        (None, "no data"),
        (math.inf, "∞"),
    ],
)
def test_durations_have_the_unit_that_keeps_them_short(
    value: float | None, text: str
) -> None:
    assert words(wording.seconds(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 bytes"),
        (2048, "2 KiB"),
        (7.5 * 2**20, "7.5 MiB"),
        (0.25 * 2**30, "0.25 GiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**41, "2 TiB"),
        (math.nan, "no data"),
    ],
)
def test_memory_is_in_binary_units(value: float, text: str) -> None:
    assert words(wording.memory(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999.9e3, "1 M"), (12_000, "12 k"), (1_234_567, "1.23 M")],
)
def test_short_token_counts_never_round_to_a_thousand(value: float, text: str) -> None:
    assert words(wording.tokens(value)) == text


def test_energy_is_in_watt_hours() -> None:
    assert words(wording.energy(3600.0)) == "1 Wh"
    assert words(wording.energy(9e9)) == "2.5 MWh"
    assert wording.energy(math.nan) == "no data"


def test_counts_have_the_right_number() -> None:
    assert wording.count(1, "block") == "1 block"
    assert wording.count(1200, "block") == "1,200 blocks"
    assert wording.count(2, "prefix was", plural="prefixes were") == "2 prefixes were"


@given(st.floats(0.01, 1e12))
def test_numbers_are_close_to_what_they_say_and_have_no_exponent(value: float) -> None:
    text = wording.number(value)

    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.005)


@given(st.text(alphabet=st.characters()))
def test_what_is_visible_can_be_printed_and_hides_nothing(text: str) -> None:
    shown = wording.visible(text)

    shown.encode()
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert not set(shown) & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )
    assert wording.visible(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Zoë [a] 名前", "Zoë [a] 名前"),
        ("a\x1b[31mb\n", r"a\x1b[31mb\x0a"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\ud800", r"\ud800"),
        ("x" * 41, f"{'x' * 19}…{'x' * 20}"),
    ],
    ids=ascii,
)
def test_a_name_is_visible_and_not_too_long(text: str, shown: str) -> None:
    assert wording.name(text) == shown


@given(st.text(), st.integers(3, 40))
def test_shortened_text_is_never_longer_than_asked(text: str, length: int) -> None:
    shown = wording.short(text, length)

    assert len(shown) <= length
    assert shown == text or "…" in shown
