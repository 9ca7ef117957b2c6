"""The examples run, meet what they promise to show, and compare with no cache at all."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    "what",
    [
        "copied before writing",
        "copied the part of a block",
        "finished",
        "forked",
        "gave way",
        "tokens reused",
        "waited for memory",
    ],
)
def test_a_scheduler_of_ones_own_meets_all_that_a_driver_must_do(what: str) -> None:
    met = runpy.run_path(str(EXAMPLES / "own_scheduler.py"))["main"]()

    assert met[what] > 0


def test_there_is_no_example_that_nobody_runs() -> None:
    assert [path.name for path in EXAMPLES.glob("*.py")] == ["own_scheduler.py"]
