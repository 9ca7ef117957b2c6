"""What is remembered of evicted blocks, so that those that come back have a past.

Owns runs of block keys, each run with one past, and the order in which they are
forgotten. Knows nothing of what a past is, but for whether two are alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import eq
from typing import Generic, TypeVar

__all__ = ["Ghosts"]

Past = TypeVar("Past")


class _Run(Generic[Past]):
    """Blocks that follow one another on a path and were evicted together."""

    __slots__ = ("keys", "past")

    def __init__(self, keys: array[int], past: Past) -> None:
        self.keys = keys
        self.past = past


class Ghosts(Generic[Past]):
    """Pasts of at most `max_blocks` evicted blocks, by key; the oldest run is forgotten.

    A path is evicted from its tail and comes back from its head, so a run is found by
    its first key: the blocks before it are resident or come back first. Two blocks can
    have one key, by accident or by somebody's work (keys are short); then one of them
    has the other's past or none, and no call fails.

    Every call is O(keys), amortised.
    """

    def __init__(
        self, max_blocks: int, is_alike: Callable[[Past, Past], bool] = eq
    ) -> None:
        self._max_blocks = max_blocks
        self._is_alike = is_alike
        # By the key of the first block; the one that was evicted first is first.
        self._runs: OrderedDict[int, _Run[Past]] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        """Return how many blocks are remembered."""
        return self._num_blocks

    def __contains__(self, key: int) -> bool:
        """Whether a block whose parent is resident is remembered."""
        return key in self._runs

    def num_alike(self, keys: Sequence[int]) -> int:
        """Return how far the past of the first block reaches, or how far none has one.

        At least 1. `keys` are those of blocks that follow one another, at least one.
        """
        runs = self._runs
        first, num_alike = runs.get(keys[0]), 0
        if first is None:
            for num_alike, key in enumerate(keys):
                if key in runs:
                    return num_alike
            return len(keys)
        run: _Run[Past] | None = first
        while run is not None and self._is_alike(run.past, first.past):
            num_alike += _num_same(run.keys, keys, num_alike)
            if num_alike == len(keys):
                break
            run = runs.get(keys[num_alike])
        return num_alike

    def remember(self, keys: array[int], past: Past) -> None:
        """Keep what is known of a run that was just evicted. Takes the array over."""
        self._forget(keys[0])
        self._runs[keys[0]] = _Run(keys, past)
        self._num_blocks += len(keys)
        while self._num_blocks > self._max_blocks:
            self._forget(next(iter(self._runs)))

    def recall(self, keys: Sequence[int]) -> Past | None:
        """Forget these blocks, which are resident again; return the first one's past."""
        first = self._runs.get(keys[0])
        at = 0
        while at < len(keys):
            run = self._runs.get(keys[at])
            if run is None:
                at += 1
                continue
            self._forget(keys[at])
            num_same = _num_same(run.keys, keys, at)
            if num_same < len(run.keys):
                # In its old place would be better than at the end; it is rare.
                self.remember(run.keys[num_same:], run.past)
            at += num_same
        return None if first is None else first.past

    def _forget(self, key: int) -> None:
        """Forget the run that begins with this key, if there is one."""
        run = self._runs.pop(key, None)
        if run is not None:
            self._num_blocks -= len(run.keys)


def _num_same(run: array[int], keys: Sequence[int], start: int) -> int:
    """Return how many leading keys of a run are those from `start` on."""
    num_most = min(len(run), len(keys) - start)
    for at in range(num_most):
        if run[at] != keys[start + at]:
            return at
    return num_most
