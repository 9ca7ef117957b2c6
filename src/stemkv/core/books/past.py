"""What was there of the blocks that a request did not find.

Owns how it is told from the marks of one run: the asker's own, those of the public copy,
and of others only that some domain of a namespace had a block.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stemkv.core.prefix.identity import PUBLIC, Domain

__all__ = [
    "NEVER",
    "REFUSED",
    "RESIDENT",
    "Holder",
    "Past",
    "PastRun",
    "joined",
    "pasts",
]

NEVER = -math.inf  # this holder never had the block
REFUSED = -sys.float_info.max  # dropped after use: before any time, after never
RESIDENT = math.inf

Holder = tuple[bytes, Domain]


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of one run of blocks that a request did not find.

    The first of these that applies: the request itself might have found them earlier
    (`left_s`), another domain of its namespace has or had them, another namespace has
    or had them; else nobody did.
    """

    # When its own or the public copy was evicted; inf: it is resident, or was dropped
    # because it must not be used.
    left_s: float | None = None
    is_refused: bool = False  # it was dropped after use, as its caller had said
    is_other_domain: bool = False
    other_namespace: bytes | None = None


@dataclass(frozen=True, slots=True)
class PastRun:
    """Consecutive blocks with the same past."""

    num_blocks: int
    past: Past


def pasts(
    gone: Mapping[Holder, Sequence[float]],
    seen: Mapping[bytes, bytearray],
    own: Holder,
    low: int,
    high: int,
) -> Iterator[PastRun]:
    """Yield runs of equal past among blocks `low … high - 1` of a run.

    Looks at the asker's own marks and at one byte per block and namespace, however
    many others have the text.
    """
    namespace = own[0]
    never = array("d", [NEVER]) * (high - low)
    mine = gone.get(own)
    public = gone.get((namespace, PUBLIC))
    others = sorted(name for name in seen if name != namespace)
    nobody = bytes(high - low)
    columns: list[Sequence[float]] = [
        never if mine is None else mine[low:high],
        never if public is None else public[low:high],
        seen[namespace][low:high] if namespace in seen else nobody,
        *(seen[name][low:high] for name in others),
    ]
    if all(min(column) == max(column) for column in columns):
        yield PastRun(high - low, _past([column[0] for column in columns], others))
        return
    for values, group in groupby(zip(*columns, strict=True)):
        yield PastRun(sum(1 for _ in group), _past(values, others))


def _past(values: Sequence[float], others: list[bytes]) -> Past:
    mine, public, is_seen, *is_elsewhere = values
    left_s = max(mine, public)  # of two copies the one that stayed longer
    if left_s == REFUSED:
        return Past(is_refused=True)
    if left_s != NEVER:
        return Past(left_s=left_s)
    if is_seen:
        return Past(is_other_domain=True)
    for name, is_there in zip(others, is_elsewhere, strict=True):
        if is_there:
            return Past(other_namespace=name)  # of several, always the same one
    return Past()


def joined(runs: list[PastRun]) -> list[PastRun]:
    """Merge neighbours with an equal past."""
    merged: list[PastRun] = []
    for run in runs:
        if merged and merged[-1].past == run.past:
            run = PastRun(merged.pop().num_blocks + run.num_blocks, run.past)
        merged.append(run)
    return merged
