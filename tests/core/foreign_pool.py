"""A block pool that is not ours, as another engine has one, over our tree and retention.

Naive on purpose: a reference count for each block, a list of blank ones, nothing else. It
tells `BlockHolds` what is touched, published and let go, block by block, and asks it for
victims. `ForeignCache` puts the verbs of `PrefixCache` on top, so that the same machines
and the same oracles drive it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stemkv.core.check import check_holds
from stemkv.core.prefix.blocks import BlockState
from stemkv.core.prefix.cache import Peek
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.holds import BlockHolds
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.keeper import Keeper
from stemkv.core.prefix.room import Demand, Room
from stemkv.core.prefix.table import BlockCopy, BlockTable
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.prefix.tree import Match
from stemkv.core.prefix.watcher import Caller
from stemkv.errors import DoubleRelease, PromptTooLong

__all__ = ["ForeignCache", "ForeignPool"]


class ForeignPool:
    """Counts references to blocks; published ones without any are ours to choose from."""

    def __init__(self, config: CacheConfig, keeper: Keeper) -> None:
        self.ref_counts = [0] * config.num_blocks
        self.blank = list(range(config.num_blocks))
        self.holds = BlockHolds(config, keeper, self.blank.extend)

    @property
    def num_free(self) -> int:
        return len(self.blank)

    def get_new_blocks(self, num_blocks: int, domain: Domain, now: float) -> list[int]:
        num_short = num_blocks - len(self.blank)
        if num_short > 0:
            self.holds.evict(num_short, domain, now)
        taken = [self.blank.pop() for _ in range(num_blocks)]
        for block_id in taken:
            assert self.ref_counts[block_id] == 0, "a block in use was given away"
            assert not self.holds.is_published(block_id), "a blank block can be matched"
            self.ref_counts[block_id] = 1
        return taken

    def touch(self, block_ids: Sequence[int], caller: Caller, now: float) -> None:
        for block_id in block_ids:
            self.ref_counts[block_id] += 1
        self.holds.touch(block_ids, caller, now)

    def share(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert self.ref_counts[block_id] > 0, "only what is held is shared"
            self.ref_counts[block_id] += 1

    def free_blocks(self, block_ids: Iterable[int], now: float) -> None:
        idle = []
        for block_id in block_ids:
            assert self.ref_counts[block_id] > 0, "a block is freed once too often"
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                idle.append(block_id)
        self.blank += [each for each in idle if not self.holds.is_published(each)]
        self.holds.let_go(idle, now)

    def state(self, block_id: int) -> BlockState:
        if self.holds.is_published(block_id):
            return BlockState.PUBLISHED
        return BlockState.PRIVATE if self.ref_counts[block_id] else BlockState.FREE

    def ref_count(self, block_id: int) -> int:
        """References to a private block, as `BlockPool` counts them."""
        return 0 if self.holds.is_published(block_id) else self.ref_counts[block_id]


@dataclass(frozen=True)
class Held:
    """Blocks that wait for a copy; looks like a node."""

    block_ids: tuple[int, ...]

    def path(self) -> list[Held]:
        return [self]


@dataclass(eq=False)
class ForeignLease:
    """A request's blocks. Only `ForeignCache` changes it."""

    namespace: bytes | None
    domain: Domain
    caller: Caller
    num_declared: int
    table: BlockTable = field(default_factory=lambda: BlockTable(array("i")))
    num_published_blocks: int = 0
    num_matched_tokens: int = 0
    copy: BlockCopy | None = None
    copy_source: Held | None = None
    is_retired: bool = False
    is_released: bool = False


@dataclass(frozen=True)
class Usage:
    num_free_blocks: int
    num_active_blocks: int
    num_cached_blocks: int


class ForeignCache:
    """The verbs of `PrefixCache` over a foreign pool. No checks: machines check."""

    def __init__(self, config: CacheConfig, keeper: Keeper) -> None:
        self.config = config
        self.keeper = keeper
        self.pool = ForeignPool(config, keeper)
        self.holds = self.pool.holds
        self.residency = self.holds.residency
        self.tree = self.holds.tree
        self._room = Room(self.tree, keeper, self.pool)
        self._live: dict[ForeignLease, None] = {}

    # Questions

    def usage(self) -> Usage:
        num_free, num_cached = self.pool.num_free, self.holds.num_evictable
        return Usage(
            num_free, self.config.num_blocks - num_free - num_cached, num_cached
        )

    def peek(self, namespace: bytes | None, domain: Domain, tokens: bytes) -> Peek:
        match = self._match(namespace, domain, tokens)
        tail = match.partial.num_tokens if match.partial else 0
        return Peek(match.num_blocks * self.config.block_size + tail, match.num_blocks)

    def _match(self, namespace: bytes | None, domain: Domain, tokens: bytes) -> Match:
        return self.residency.match(namespace, domain, tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def check(self, leases: Iterable[ForeignLease]) -> None:
        """Every count is what the leases hold."""
        counts = [0] * self.config.num_blocks
        for lease in leases:
            for block_id in lease.table.ids():
                counts[block_id] += 1
            for block_id in lease.copy_source.block_ids if lease.copy_source else ():
                counts[block_id] += 1
        assert counts == self.pool.ref_counts
        blank = set(self.pool.blank)
        assert len(blank) == len(self.pool.blank)
        assert blank == {
            each
            for each, count in enumerate(counts)
            if count == 0 and not self.holds.is_published(each)
        }
        check_holds(self.holds, {each for each, count in enumerate(counts) if count})

    # Verbs

    def subscribe(self, emit: Callable[[object], None]) -> None:
        self.residency.subscribe(emit)

    def declare_public(self, namespace: bytes, prefix: TokenIds) -> int:
        num_blocks = len(prefix) // self.config.block_size
        whole = prefix.buffer[: num_blocks * self.tree.block_bytes]
        self.residency.standing.declare(namespace, whole, None)
        return num_blocks

    def acquire(
        self,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes,
        demand: Demand,
        *,
        now: float,
    ) -> ForeignLease | None:
        if self.num_blocks_for(demand.num_slots) > self.config.num_blocks:
            raise PromptTooLong("more than there is", field="prompt")
        match = self._match(namespace, domain, tokens)
        if self._room.num_missing(match, domain, demand):
            return None
        partial = match.partial
        if partial and not self._room.has_room_for_source(match, domain, demand):
            partial = None
        caller = Caller(domain=domain, owner=domain.name)
        num_declared = self.residency.num_public_blocks(namespace, tokens)
        lease = ForeignLease(namespace, domain, caller, num_declared)
        found = matched_ids(match)
        source: list[int] = []
        if partial is not None:
            for node in partial.node.path():
                source += node.block_ids
            lease.copy_source = Held(tuple(source))
            copied_id = partial.block_id  # touching may split its node
        self.pool.touch(found, caller, now)
        self.pool.touch(source, caller, now)
        num_fresh = self._room.num_fresh(match, demand)
        table = found + self.pool.get_new_blocks(num_fresh, domain, now)
        lease.table = BlockTable(array("i", table))
        lease.num_published_blocks = len(found)
        lease.num_matched_tokens = len(found) * self.config.block_size
        if partial is not None:
            target = table[len(found)]
            lease.copy = BlockCopy(copied_id, target, partial.num_tokens)
            lease.num_matched_tokens += partial.num_tokens
        self._live[lease] = None
        return lease

    def copied(self, lease: ForeignLease, now: float) -> None:
        if lease.copy_source is not None:
            self.pool.free_blocks(lease.copy_source.block_ids, now)
            lease.copy_source = lease.copy = None

    def grow(self, lease: ForeignLease, num_slots: int, now: float) -> bool:
        num_fresh = self.num_blocks_for(num_slots) - len(lease.table)
        if num_fresh > self._room.available_to(lease.domain):
            return False
        if num_fresh > 0:
            fresh = self.pool.get_new_blocks(num_fresh, lease.domain, now)
            lease.table.append(array("i", fresh))
        return True

    def prepare_write(
        self, lease: ForeignLease, position: int, now: float
    ) -> tuple[bool, BlockCopy | None]:
        index, offset = divmod(position, self.config.block_size)
        source = lease.table[index]
        if self.pool.ref_counts[source] == 1:
            return True, None
        if self._room.available_to(lease.domain) < 1:
            return False, None
        target = self.pool.get_new_blocks(1, lease.domain, now)
        lease.table.replace(index, array("i", target))
        self.pool.free_blocks([source], now)
        return True, (BlockCopy(source, target[0], offset) if offset else None)

    def publish(
        self, lease: ForeignLease, tokens: bytes, num_computed: int, now: float
    ) -> int:
        start, stop = lease.num_published_blocks, num_computed // self.config.block_size
        if lease.namespace is None or lease.is_retired or stop <= start:
            return 0
        own = list(lease.table.ids(start, stop))
        resident = self.holds.publish(
            lease.table[start - 1] if start else None,
            own,
            namespace=lease.namespace,
            domain=lease.domain,
            caller=lease.caller,
            tokens=tokens,
            start=start,
            num_public=lease.num_declared,
            now=now,
        )
        # It can replace blocks in its tables, so it uses what was there.
        taken = [n for n, each in enumerate(resident) if each != own[n]]
        for n in taken:
            self.pool.ref_counts[resident[n]] += 1
        self.pool.free_blocks([own[n] for n in taken], now)
        lease.table.replace(start, array("i", resident))
        lease.num_published_blocks = start + len(resident)
        return len(resident) - len(taken)

    def fork(self, lease: ForeignLease, now: float) -> ForeignLease:
        twin = ForeignLease(
            lease.namespace, lease.domain, lease.caller, lease.num_declared
        )
        twin.table = BlockTable(lease.table.ids())
        twin.num_published_blocks = lease.num_published_blocks
        twin.num_matched_tokens = lease.num_matched_tokens
        twin.is_retired = lease.is_retired
        self.pool.share(twin.table.ids())
        self._live[twin] = None
        return twin

    def release(self, lease: ForeignLease, now: float) -> None:
        if lease.is_released:
            raise DoubleRelease("a lease must be released exactly once")
        self.copied(lease, now)
        lease.is_released = True
        del self._live[lease]
        tail_first = lease.table.ids()
        tail_first.reverse()
        self.pool.free_blocks(tail_first, now)

    def evict(self, num_blocks: int, now: float) -> int:
        return self.holds.evict(num_blocks, None, now)

    def retire(self, namespace: bytes, now: float) -> int:
        for lease in self._live:
            lease.is_retired |= lease.namespace == namespace
        return self.holds.retire(namespace, now)


def matched_ids(match: Match) -> list[int]:
    """The blocks of a match, in order."""
    if match.node is None:
        return []
    *above, last = match.node.path() or [match.node]
    ids = [each for node in above for each in node.block_ids]
    return ids + list(last.block_ids[: match.num_node_blocks])
