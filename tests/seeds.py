"""Seeds, sizes and the like, of which `make test` takes a few and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def slow(values: Iterable[object]) -> list[ParameterSet]:
    """Values for `parametrize` that carry the marker `slow`: `[*range(8), *slow(range(8, 60))]`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
