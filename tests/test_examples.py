"""The examples run, meet what they promise to show, and compare with no cache at all."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@cache
def met() -> dict[str, int]:
    """What happened in one run of the example, by name."""
    counts: dict[str, int] = runpy.run_path(str(EXAMPLES / "own_scheduler.py"))[
        "main"
    ]()
    return counts


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
    assert met()[what] > 0


def test_there_is_no_example_that_nobody_runs() -> None:
    assert [path.name for path in EXAMPLES.glob("*.py")] == ["own_scheduler.py"]
