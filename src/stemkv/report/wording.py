"""How numbers and names read: units people think in, and nothing that hides.

Owns rounding, units, "no data" where there is none, and what becomes of a name that is
too long or has characters that cannot be seen. Knows nothing of where they come from.
"""

from __future__ import annotations

import math
import unicodedata

from stemkv.measure.results import GIB

__all__ = [
    "NO_DATA",
    "count",
    "energy",
    "memory",
    "name",
    "number",
    "per_cent",
    "percent",
    "points",
    "seconds",
    "short",
    "tokens",
    "visible",
]

NO_DATA = "no data"
_MAX_NAME = 40  # characters of a name in a table; JSON and Parquet have all of it
# What has no look of its own: control characters, lone surrogates, separators of lines,
# and format characters, such as those that reverse the order of what follows.
_UNSEEN = {"Cc", "Cs", "Zl", "Zp", "Cf"}
_JOINERS = "\u200c\u200d"  # in words of Persian or Hindi, and in emoji
_NBSP = "\N{NO-BREAK SPACE}"  # a unit never stands on a line of its own


def number(value: float | None, digits: int = 3) -> str:
    """Return at least `digits` significant digits, never an exponent of thousands."""
    if value is None or math.isnan(value):
        return NO_DATA
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    """Return a duration in the unit that keeps it readable."""
    if value is None or not math.isfinite(value):
        return number(value)
    size = abs(value)
    if size >= 172_800:
        return f"{number(value / 86_400)}{_NBSP}days"
    if size >= 7_200:
        return f"{number(value / 3_600)}{_NBSP}h"
    if size >= 600:
        return f"{number(value / 60)}{_NBSP}min"
    if size >= 1 or not size:
        return f"{number(value)}{_NBSP}s"
    if size >= 1e-3:
        return f"{number(value * 1e3)}{_NBSP}ms"
    return f"{number(value * 1e6)}{_NBSP}µs"


def percent(share: float | None) -> str:
    """Return a share of 1 with one decimal."""
    if share is None or not math.isfinite(share):
        return NO_DATA
    return f"{share * 100:.1f}{_NBSP}%"


def per_cent(share: float) -> float:
    """Return a share as a number for a column in percent, with one decimal."""
    return round(share * 100, 1)


def points(difference: float) -> str:
    """Return a difference of shares in percentage points, without its sign."""
    return f"{abs(difference) * 100:.1f}{_NBSP}points"


def memory(size: float | None) -> str:
    """Return bytes in the binary unit that keeps them readable."""
    if size is None or not math.isfinite(size):
        return NO_DATA
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(size) >= 1024**power or (unit == "GiB" and abs(size) >= GIB / 10):
            return f"{number(size / 1024**power)}{_NBSP}{unit}"
    return f"{size:.0f}{_NBSP}bytes"


def energy(joules: float | None) -> str:
    """Return joules in watt-hours, which bills are written in."""
    if joules is None or not math.isfinite(joules):
        return NO_DATA
    wh = joules / 3600
    if abs(wh) >= 1e6:
        return f"{number(wh / 1e6)}{_NBSP}MWh"
    if abs(wh) >= 1e3:
        return f"{number(wh / 1e3)}{_NBSP}kWh"
    return f"{number(wh)}{_NBSP}Wh"


def count(quantity: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, `1 block` or `2 blocks`."""
    if quantity == 1:
        return f"{quantity:,} {noun}"
    return f"{quantity:,} {noun + 's' if plural is None else plural}"


def tokens(quantity: float) -> str:
    """Return a number with a k, M, G or T, for where there is little room."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # From 999.5 thousand on, three digits would round up to the next unit.
        if abs(quantity) >= size * 0.9995:
            return f"{quantity / size:.3g}{_NBSP}{unit}"
    return f"{quantity:.0f}"


def visible(text: str) -> str:
    """Return text with what cannot be seen, or reorders the rest, as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _UNSEEN or character in _JOINERS:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def name(text: str) -> str:
    """Return somebody's name for a table: all of it visible, and not too long."""
    return short(visible(text), _MAX_NAME)


def short(text: str, length: int) -> str:
    """Return text cut in the middle, where names of one kind differ least."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"
