"""Fences between rollouts: who may start, and who of before is still there.

Owns the epochs and whom a fence holds. Knows nothing of what is rolled out.
"""

from __future__ import annotations

from stemkv.core.schedule.request import Request, RequestId
from stemkv.errors import InvariantError

__all__ = ["Epochs"]


class Epochs:
    """Counts samples in flight by epoch; requests of later ones than `opened` wait."""

    def __init__(self) -> None:
        self.num_fences = 0
        self.opened = 0
        self._num_by_epoch: dict[int, int] = {}  # samples in flight
        self._held: dict[RequestId, Request] = {}

    def num_before(self, epoch: int) -> int:
        """Return how many samples in flight were added before this epoch began."""
        return sum(n for each, n in self._num_by_epoch.items() if each < epoch)

    def enter(self, request: Request) -> None:
        """Count a sample in its epoch."""
        epoch = request.epoch
        self._num_by_epoch[epoch] = self._num_by_epoch.get(epoch, 0) + 1

    def leave(self, request: Request) -> None:
        """Count a sample no more."""
        self._num_by_epoch[request.epoch] -= 1
        if self._num_by_epoch[request.epoch] == 0:
            del self._num_by_epoch[request.epoch]

    def fence(self) -> int:
        """Begin a new epoch and return it."""
        self.num_fences += 1
        return self.num_fences

    def lift(self, epoch: int) -> list[Request]:
        """Open an epoch; return who was held and may start now."""
        if self.num_before(epoch) or epoch > self.num_fences:
            raise InvariantError(
                f"fence {epoch} lifted with {self.num_before(epoch)} samples of before "
                f"it in flight, of {self.num_fences} fences"
            )
        self.opened = max(self.opened, epoch)
        free = [each for each in self._held.values() if each.epoch <= self.opened]
        for request in free:
            del self._held[request.request_id]
        return free

    def is_open_to(self, request: Request) -> bool:
        """Whether what a request shall run on is in place."""
        return request.epoch <= self.opened

    def hold(self, request: Request) -> None:
        """Remember a request that may not start yet."""
        self._held[request.request_id] = request

    def forget(self, request: Request) -> None:
        """Forget a request that waits no longer."""
        self._held.pop(request.request_id, None)
