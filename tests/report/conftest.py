from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import NAMES, Browser, find_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        reason = f"needs one of {', '.join(NAMES)} (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with Browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    return tmp_path / "page.html"
