"""Unit ids: equal ids mean an equal prefix.

Owns how ids are given out, densely and in order of first appearance, so that equal
input gives equal ids. Knows no file format, and keeps no text: of content it remembers
a digest only.

Two sources give chained ids: content of our own (`UnitTable.chain`), and ids that came
with a trace (`ForeignUnits`). Both key a unit by its parent, so that ids chain even
where the trace's did not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = ["MAX_UNITS", "ForeignUnits", "UnitTable"]

MAX_UNITS = 2**30  # ids are in [0, MAX_UNITS), so an int32 holds them everywhere

_ROOT = -1  # the parent of a first unit
_DIGEST_BYTES = 16
# A foreign id may index an array up to here whatever the file holds, and beyond it
# while the array stays in proportion to the ids seen.
_ALWAYS_DENSE = 2**20
_DENSE_FACTOR = 8


class UnitTable:
    """Gives out the unit ids of one trace, from 0."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, int] = {}
        self._num_units = 0

    @property
    def num_units(self) -> int:
        """Ids given out."""
        return self._num_units

    def chain(self, contents: Iterable[bytes]) -> array[int]:
        """Return the ids of consecutive units with these contents.

        A unit's key is BLAKE2b-128 of its parent's id and its content. So two
        different prefixes get one id with odds below n² / 2**129: 2e-21 for the 2**30
        ids that a trace may have at most. The table grows by about 90 bytes per
        distinct unit, whatever its content.
        """
        ids = array("i")
        parent = _ROOT
        for content in contents:
            key = blake2b(
                parent.to_bytes(4, "little", signed=True) + content,
                digest_size=_DIGEST_BYTES,
            ).digest()
            known = self._by_digest.get(key)
            if known is None:
                known = self._by_digest[key] = self.take(1)
            ids.append(known)
            parent = known
        return ids

    def fresh(self, count: int) -> array[int]:
        """Return ids that no other request has: nothing is known of the content."""
        first = self.take(count)
        return array("i", range(first, first + count))

    def take(self, count: int) -> int:
        """Return the first of `count` new consecutive ids."""
        first = self._num_units
        if first + count > MAX_UNITS:
            raise ConfigError(
                f"the trace has more than {MAX_UNITS:,} distinct units; "
                f"read fewer requests (limit) or a larger unit_size"
            )
        self._num_units += count
        return first


class ForeignUnits:
    """Ids that came with a trace, within one scope, to our chained ones.

    A foreign id gets one of ours per parent it stands under. In a chained trace that
    is one, and whole requests are translated with a few array operations; ids of
    blocks that are not chained take the slow path, one by one.
    """

    def __init__(self, table: UnitTable) -> None:
        self._table = table
        # Name → our id under the first parent; -1: not seen. A name is the foreign id
        # itself, or what `_names` gives when the ids are too sparse to index an array.
        self._ours: npt.NDArray[np.int32] = np.full(1024, -1, np.int32)
        self._parent: npt.NDArray[np.int32] = np.full(1024, -1, np.int32)  # by name
        self._names: dict[int, int] | None = None
        self._next_name = 0
        self._others: dict[tuple[int, int], int] = {}  # (parent, name), later parents
        self._num_seen = 0
        self.num_rechained = 0  # ids of ours beyond the first for a foreign id

    def chain(self, foreign: Sequence[int]) -> array[int]:
        """Return our ids for a request's foreign ids, which may be any integers."""
        names = self._named(foreign)
        if not len(names):
            return array("i")
        ours = self._ours[names]
        before = np.concatenate((np.array([_ROOT], np.int32), ours[:-1]))
        fits = (ours >= 0) & (self._parent[names] == before)
        lead = len(names) if fits.all() else int(fits.argmin())
        tail = names[lead:]
        if len(tail):
            parent = int(ours[lead - 1]) if lead else _ROOT
            if (ours[lead:] < 0).all() and len(np.unique(tail)) == len(tail):
                ours[lead:] = self._append(tail, parent)
            else:
                ours[lead:] = [*self._walk(tail.tolist(), parent)]
        return array("i", ours.tobytes())

    def _append(
        self, names: npt.NDArray[np.int64], parent: int
    ) -> npt.NDArray[np.int32]:
        first = self._table.take(len(names))
        new = np.arange(first, first + len(names), dtype=np.int32)
        self._ours[names] = new
        self._parent[names[0]] = parent
        self._parent[names[1:]] = new[:-1]
        self._num_seen += len(names)
        return new

    def _walk(self, names: list[int], parent: int) -> Iterator[int]:
        for name in names:
            ours = int(self._ours[name])
            if ours < 0:
                ours = self._table.take(1)
                self._ours[name] = ours
                self._parent[name] = parent
                self._num_seen += 1
            elif self._parent[name] != parent:
                known = self._others.get((parent, name))
                if known is None:
                    known = self._others[parent, name] = self._table.take(1)
                    self.num_rechained += 1
                ours = known
            yield ours
            parent = ours

    def _named(self, foreign: Sequence[int]) -> npt.NDArray[np.int64]:
        if self._names is None:
            names = _as_int64(foreign)
            if names is not None and self._can_index(names):
                return names
            # The first id that is too sparse. What was seen keeps its name; new ids
            # get names behind all of them.
            self._names = {
                int(name): int(name) for name in (self._ours >= 0).nonzero()[0]
            }
            self._next_name = len(self._ours)
        known = self._names
        result = np.empty(len(foreign), np.int64)
        for i, identifier in enumerate(foreign):
            name = known.get(identifier)
            if name is None:
                name = known[identifier] = self._next_name
                self._next_name += 1
            result[i] = name
        self._grow(self._next_name)
        return result

    def _can_index(self, names: npt.NDArray[np.int64]) -> bool:
        if not len(names):
            return True
        limit = max(_ALWAYS_DENSE, _DENSE_FACTOR * (self._num_seen + len(names)))
        top = int(names.max())
        if names.min() < 0 or top >= limit:
            return False
        self._grow(top + 1)
        return True

    def _grow(self, size: int) -> None:
        if size > len(self._ours):
            more = np.full(
                max(size, 2 * len(self._ours)) - len(self._ours), -1, np.int32
            )
            self._ours = np.concatenate((self._ours, more))
            self._parent = np.concatenate((self._parent, more))


def _as_int64(foreign: Sequence[int]) -> npt.NDArray[np.int64] | None:
    try:
        return np.frombuffer(array("q", foreign), np.int64)
    except OverflowError:
        return None
