"""Executes `docs/policies.md` and compares what it prints with what stands there."""

from __future__ import annotations

from pathlib import Path

from stemkv.core.retention.policies import EVICTIONS

from .test_ten_blocks import read_moments, run_moments

DOCUMENT = Path(__file__).parent.parent / "docs" / "policies.md"


def test_every_block_of_the_page_runs_and_prints_what_stands_there() -> None:
    moments = list(read_moments(DOCUMENT.read_text()))
    assert any(moment.expected for moment in moments)

    for moment, printed in run_moments(moments):
        assert printed == (moment.expected or ""), moment.title


def test_every_policy_has_a_section() -> None:
    text = DOCUMENT.read_text()

    assert [name for name in EVICTIONS if f"\n### `{name}`\n" not in text] == []
