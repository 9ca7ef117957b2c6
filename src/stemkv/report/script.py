"""What runs in the reader's browser: plotly.js and the few lines that start it.

Owns embedding and the policy that lets nothing else run and nothing be fetched. Knows
nothing of what a figure shows.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from stemkv.errors import ConfigError

__all__ = ["content_policy", "script_elements"]


def content_policy(*, has_charts: bool) -> str:
    """Return a Content-Security-Policy: no network, no script but ours by its hash."""
    # plotly.js styles through the style attribute, which has no hash. Its picture
    # button makes an image of a blob.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    if has_charts:
        hashes = " ".join(_hash(text) for text in (_starter(), _plotly()))
        policy += f"; script-src {hashes}; img-src data: blob:"
    return policy


def script_elements(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the elements that draw `figures` into `#chart-0` and so on."""
    data = json.dumps(
        _finite(figures), allow_nan=False, sort_keys=True, separators=(",", ":")
    )
    # Packed text cannot close the element that it stands in.
    return (
        f'<script type="text/plain" id="figures">{_packed(data)}</script>\n'
        f'<script type="text/plain" id="plotly">{_packed_plotly()}</script>\n'
        f"<script>{_starter()}</script>"
    )


def _finite(value: Any) -> Any:
    """Return plain data with gaps where a number is not one, which JSON cannot say."""
    if isinstance(value, float):
        # Twelve digits are more than any screen shows, and a third of the bytes less.
        return float(f"{value:.12g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _starter() -> str:
    return files("stemkv.report").joinpath("page.js").read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    try:
        # Here, as pages without charts need none.
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "a report with charts needs plotly; install: pip install 'stemkv[report]'"
        ) from error
    return str(get_plotlyjs())


@cache
def _packed_plotly() -> str:
    return _packed(_plotly())


def _packed(text: str) -> str:
    # No time of packing in it: equal pages have equal bytes.
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
