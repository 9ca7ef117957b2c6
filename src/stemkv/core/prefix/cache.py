"""The prefix cache: block pool, prefix tree and keeper behind one door.

Owns the rules that tie our blocks and leases to what is resident: match, pin and
allocate as one atomic step; publish only what is computed; shared is read-only. Which
nodes there are is `Residency`'s, how much room `Room`'s, what the operator ordered
`Standing`'s. Knows nothing of requests, schedules or tensors.

Every number it reports follows from the same state, and `check` can compare it with the
truth.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stemkv.core.prefix.blocks import BlockPool
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.door import (
    check_domain,
    check_namespace,
    check_now,
    token_buffer,
)
from stemkv.core.prefix.events import CacheEvent
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.keeper import Keeper, Waiting
from stemkv.core.prefix.residency import Residency, descendants
from stemkv.core.prefix.room import Demand, Room
from stemkv.core.prefix.table import BlockCopy, BlockTable, Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenBuffer, TokenIds
from stemkv.core.prefix.tree import Match, Node, PartialBlock
from stemkv.core.prefix.watcher import Caller, Publication, Watcher
from stemkv.errors import DoubleRelease, InvariantError, PromptTooLong

__all__ = ["CacheUsage", "DomainUsage", "Peek", "PrefixCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Blocks and tokens by state, and totals since the start. All exact counts."""

    num_total_blocks: int
    num_free_blocks: int
    num_active_blocks: int  # held by at least one lease
    num_cached_blocks: int  # retained for reuse, evictable
    peak_active_blocks: int
    num_evicted_blocks: int
    num_published_blocks: int  # blocks that ever became matchable
    num_total_tokens: int  # slots of all blocks
    # Slots of active blocks that leases asked for; published blocks are full, and a
    # slot that several leases share counts once.
    num_active_tokens: int
    num_cached_tokens: int  # slots of cached blocks, which are full


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainUsage:
    """What one domain has in the tree now; nothing of it tells of other domains.

    Exact counts of published blocks; private blocks of running requests are not in it.
    """

    num_pinned_blocks: int  # on the path of at least one lease
    num_cached_blocks: int  # retained for reuse, evictable


@dataclass(frozen=True, slots=True)
class Peek:
    """What an acquire would find now."""

    num_tokens: int  # cached tokens, a partly matching block included
    num_whole_blocks: int


class PrefixCache:
    """Shares the KV of equal prefixes among requests that may share.

    `now` is in seconds on the caller's clock and must not decrease. `keeper` says what
    stays (`Retention`), and belongs to this cache alone; `watchers` hear what happens
    to nodes and blocks. Tokens are `TokenIds` or their buffer.
    """

    def __init__(
        self,
        config: CacheConfig,
        keeper: Keeper,
        *,
        watchers: Iterable[Watcher] = (),
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.residency = Residency(config, keeper, self.pool.reclaim)
        self.tree = self.residency.tree
        self.keeper = keeper
        self._room = Room(self.tree, keeper, self.pool)
        self._leases: dict[Lease, None] = {}  # those that live
        self._peak_active = 0
        for watcher in watchers:
            self.watch(watcher)

    # Questions

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation could get: free ones and cached ones."""
        return self.pool.num_free + self.tree.num_unpinned_blocks

    @property
    def num_lendable_blocks(self) -> int:
        """Cached blocks that anybody's allocation could get."""
        return self.keeper.num_lendable(self.tree.num_unpinned_blocks)

    def available_to(self, domain: Domain) -> int:
        """Return how many blocks an allocation for a domain could get.

        Less than `num_available_blocks` where others' floors are filled.
        """
        return self._room.available_to(domain)

    def most_blocks(self, domain: Domain) -> int:
        """Return how many blocks a request of the domain can surely hold if it is alone.

        All of them without quotas; with quotas, less what is promised to others. The
        same for every prompt: what of it is public now may be fenced while it waits.
        """
        return self.keeper.most_blocks(domain, self.pool.num_total)

    @property
    def num_active_blocks(self) -> int:
        """Blocks held by at least one lease."""
        return self.pool.num_private + self.tree.num_pinned_blocks

    @property
    def num_retired_blocks(self) -> int:
        """Fenced blocks that leases still hold; nobody can match them."""
        return sum(
            node.num_blocks
            for root in self.tree.retired_roots()
            for node in descendants(root)
        )

    def usage(self) -> CacheUsage:
        """Return the counts of this moment; pure, O(live leases)."""
        size = self.config.block_size
        num_active, num_cached = self.num_active_blocks, self.tree.num_unpinned_blocks
        return CacheUsage(
            num_total_blocks=self.pool.num_total,
            num_free_blocks=self.pool.num_free,
            num_active_blocks=num_active,
            num_cached_blocks=num_cached,
            peak_active_blocks=self._peak_active,
            num_evicted_blocks=self.residency.num_evicted,
            num_published_blocks=self.residency.num_published,
            num_total_tokens=self.pool.num_total * size,
            num_active_tokens=num_active * size - self._num_unasked_slots(),
            num_cached_tokens=num_cached * size,
        )

    def usage_of(self, domain: Domain) -> DomainUsage:
        """Return what a domain has resident; pure, O(nodes of the tree)."""
        pinned = cached = 0
        for node in self.tree.nodes():
            if node.domain == domain and node.ref_count:
                pinned += node.num_blocks
            elif node.domain == domain:
                cached += node.num_blocks
        return DomainUsage(num_pinned_blocks=pinned, num_cached_blocks=cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens`."""
        return -(-num_tokens // self.config.block_size)

    def peek(
        self, namespace: bytes | None, domain: Domain, tokens: bytes | TokenIds
    ) -> Peek:
        """Return what `acquire` would find, without touching anything."""
        match = self._match(namespace, domain, tokens)
        tail = match.partial.num_tokens if match.partial else 0
        return Peek(match.num_blocks * self.config.block_size + tail, match.num_blocks)

    def num_missing_blocks(
        self,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes | TokenIds,
        demand: Demand,
    ) -> int:
        """Return how many more blocks had to be available for `acquire` to succeed."""
        match = self._match(namespace, domain, tokens)
        return self._room.num_missing(match, domain, demand)

    def num_public_blocks(
        self, namespace: bytes | None, tokens: bytes | TokenIds
    ) -> int:
        """Return how many leading whole blocks lie inside a declared public prefix."""
        check_namespace(namespace)
        return self.residency.num_public_blocks(namespace, token_buffer(tokens))

    def domain_of_next(self, lease: Lease, index: int) -> Domain | None:
        """Return the domain in which the lease will publish its block `index`.

        `None` if it never will: it shares with nobody, or its namespace was retired, or
        it was cut off.
        """
        if lease.node is None or lease.is_cut_off:
            return None
        return self.residency.domain_of_next(
            lease.node, lease.domain, index=index, num_public=lease.num_public_blocks
        )

    # Verbs

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher, from now on, what happens to nodes and private blocks."""
        self.residency.watch(watcher)

    def subscribe(self, emit: Callable[[CacheEvent], None]) -> None:
        """Send every publish and eviction to `emit` from now on; one sink only."""
        self.residency.subscribe(emit)

    def declare_public(self, namespace: bytes, prefix: TokenIds) -> int:
        """Let everybody in the namespace share the whole blocks of `prefix`.

        An operator's act, never a request's. Returns how many blocks that is: the
        tokens of a last, partly covered block stay private. Blocks published before
        the declaration keep their domain.

        Raises `ConfigError` when there are quotas and all declared prefixes together
        exceed the public budget.
        """
        check_namespace(namespace)
        whole = self._whole_blocks(prefix)
        budget = self.keeper.public_budget
        self.residency.standing.declare(namespace, whole, budget)
        return len(whole) // self.tree.block_bytes

    def acquire(
        self,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes | TokenIds,
        demand: Demand,
        *,
        owner: str | None = None,
        hints: Hints = NO_HINTS,
        now: float,
    ) -> Lease | None:
        """Pin the longest cached prefix of `tokens` and allocate the rest.

        One atomic step: on success the lease's table has slots for what is demanded and
        at most all tokens but the last are matched; `None` means not now, and leaves
        everything bit-identical. If the match ends inside a block, `lease.copy` says
        what the driver must copy first (then call `copied`). `owner` is the tenant on
        whose account the blocks are, by default the name of the domain. The caller
        releases the lease exactly once.

        Raises `PromptTooLong` when the domain could not have so many even if alone.
        """
        check_now(now)
        check_namespace(namespace)
        check_domain(domain)
        tokens = token_buffer(tokens)
        match = self.residency.match(namespace, domain, tokens)
        self._check_demand(demand, domain, len(tokens) // TOKEN_BYTES)
        if self._room.num_missing(match, domain, demand):
            return None
        partial = match.partial
        if partial is not None and not self._room.has_room_for_source(
            match, domain, demand
        ):
            partial = None  # then those tokens are computed instead
        lease = Lease(
            namespace=namespace,
            domain=domain,
            caller=self._caller(domain, tokens, owner or domain.name, hints),
            num_public_blocks=self.residency.num_public_blocks(namespace, tokens),
        )
        self.residency.begin()
        partial, table = self._plant(lease, match, partial, now)
        num_published = len(table)
        num_fresh = self.num_blocks_for(demand.num_slots) - num_published
        table.extend(self._allocate(num_fresh, lease, now))
        num_tail = 0
        if partial is not None:
            num_tail, lease.copy_source = partial.num_tokens, partial.node
            lease.copy = BlockCopy(partial.block_id, table[num_published], num_tail)
        lease.table = BlockTable(table)
        lease.num_slots = demand.num_slots
        lease.num_published_blocks = num_published
        lease.num_matched_tokens = num_published * self.config.block_size + num_tail
        self._leases[lease] = None
        return lease

    def copied(self, lease: Lease, now: float) -> None:
        """Tell that the lease's copy has run: its source need not stay any longer."""
        check_now(now)
        if lease.copy_source is not None:
            self.residency.unpin(lease.copy_source, now)
            lease.copy_source = None
            lease.copy = None

    def grow(self, lease: Lease, num_slots: int, now: float) -> bool:
        """Lengthen the table to `num_slots` tokens; `False` means not now."""
        _check_live(lease)
        check_now(now)
        num_fresh = self.num_blocks_for(num_slots) - len(lease.table)
        if num_fresh > 0:
            if num_fresh > self.available_to(lease.domain):
                return False
            lease.table.append(self._allocate(num_fresh, lease, now))
        lease.num_slots = max(lease.num_slots, num_slots)
        return True

    def prepare_write(
        self, lease: Lease, position: int, now: float
    ) -> tuple[bool, BlockCopy | None]:
        """Make the block of `position` private to this lease.

        Returns `(True, None)` when it is already, `(True, copy)` when the driver must
        run a copy first, `(False, None)` when there is no block for it now.
        """
        _check_live(lease)
        check_now(now)
        index, offset = divmod(position, self.config.block_size)
        if index < lease.num_published_blocks:
            raise InvariantError(f"write at {position} into a published block")
        if index >= len(lease.table):
            raise InvariantError(
                f"write at {position} behind a table of {len(lease.table)} blocks"
            )
        source = lease.table[index]
        if self.pool.ref_count(source) == 1:
            return True, None
        if self.available_to(lease.domain) < 1:
            return False, None
        target = self._allocate(1, lease, now)
        lease.table.replace(index, target)
        # The other holders keep the source, so the copy can run any time before them.
        self.pool.release((source,))
        return True, (BlockCopy(source, target[0], offset) if offset else None)

    def publish(
        self,
        lease: Lease,
        tokens: bytes | TokenBuffer | TokenIds,
        num_computed: int,
        now: float,
    ) -> int:
        """Make the whole blocks of `tokens[:num_computed]` matchable.

        The caller vouches that their KV is computed for exactly these tokens. Where
        the tree already holds an equal block, the table takes that one and gives its
        own back, so a prefix is resident once. Returns how many blocks this lease
        added. A lease that shares with nobody, or whose namespace was retired,
        publishes nothing. Blocks that end within the first positions of a span wait
        until enough of the span is computed to tell it from others. Blocks that another
        table shares privately wait until that one has gone.
        """
        _check_live(lease)
        check_now(now)
        tokens = token_buffer(tokens)
        self._check_computed(lease, len(tokens) // TOKEN_BYTES, num_computed)
        end = num_computed // self.config.block_size
        if end <= lease.num_published_blocks:
            self.residency.begin()
            return 0
        end = self.residency.blocks_outside_span(tokens, end)
        num_added = 0
        self.residency.begin()
        while (start := lease.num_published_blocks) < end:
            domain = self.domain_of_next(lease, start)
            if domain is None:
                break
            stop = end
            if domain == PUBLIC and start < lease.num_public_blocks:
                stop = min(end, lease.num_public_blocks)
            num_added += self._publish_run(lease, domain, tokens, stop, now)
            if lease.num_published_blocks == start:
                break  # see `Residency.num_joinable` and `_blocks_of_one_table`
        return num_added

    def fork(self, lease: Lease, now: float) -> Lease:
        """Return a second lease on the same blocks.

        Published blocks are pinned once more; private ones are shared, and whoever
        writes first copies (`prepare_write`). Publish what is full first: a block that
        two tables share privately can no longer be published.
        """
        _check_live(lease)
        check_now(now)
        if lease.copy_source is not None:
            raise InvariantError("fork of a lease whose copy has not run yet")
        if lease.node is not None:
            self.residency.pin(lease.node, now)
        self.pool.retain(lease.table.ids(lease.num_published_blocks))
        twin = lease.twin()
        self._leases[twin] = None
        return twin

    def release(self, lease: Lease, now: float) -> None:
        """Give everything back. A second call raises `DoubleRelease`."""
        if lease.is_released:
            raise DoubleRelease("a lease must be released exactly once")
        self.copied(lease, now)
        lease.is_released = True
        self._leases.pop(lease, None)
        # Tail first: the free list is a stack, so they come out in table order again.
        tail = lease.table.ids(lease.num_published_blocks)
        tail.reverse()
        self._release_private(lease, tail, now)
        if lease.node is not None:
            self.residency.unpin(lease.node, now)

    def cut_off(self, lease: Lease) -> None:
        """Let the lease keep what it holds and publish nothing any more."""
        lease.is_cut_off = True

    def forget(self, lease: Lease, now: float) -> int:
        """Drop what nobody else uses of a released lease's path; return the blocks.

        For KV that turned out to be unsound: leaf by leaf, up to the first node that
        another lease pins or that other prefixes continue.
        """
        check_now(now)
        if not lease.is_released:
            raise InvariantError("forget of a lease that is still in use")
        return 0 if lease.node is None else self.residency.forget(lease.node, now)

    def evict(
        self, num_blocks: int, now: float, *, domain: Domain | None = None
    ) -> int:
        """Drop up to `num_blocks` retained blocks; return how many were dropped.

        `domain` is whose request needs the room, `None` that the operator wants it;
        then no domain goes below its floor.
        """
        check_now(now)
        return self.residency.evict(num_blocks, domain, now)

    def end_session(self, domain: Domain, session: str, now: float) -> None:
        """Let blocks that only this session has used go before all others.

        A hint: whoever uses one of them again makes it an ordinary block.
        """
        check_domain(domain)
        check_now(now)
        self.keeper.end_session(domain, session, now)

    def keep(
        self,
        namespace: bytes,
        domain: Domain,
        prefix: TokenIds,
        *,
        until: float,
        now: float,
    ) -> int:
        """Keep the whole blocks of a prefix until a time; return how many those are.

        An operator's act. They go when nothing else can, whether they are resident now
        or published later. A time that is over takes the order back.

        Raises `ConfigError` when what is kept would exceed `max_kept_share`.
        """
        check_namespace(namespace)
        check_domain(domain)
        check_now(now)
        whole = self._whole_blocks(prefix)
        self.residency.keep(namespace, domain, whole, until=until, now=now)
        return len(whole) // self.tree.block_bytes

    def watch_queue(self, queue: Callable[[float], Iterable[Waiting]]) -> None:
        """Ask `queue(now)` who waits, in order, before anything is evicted.

        What those requests would hit goes late, and what the last of them would hit
        goes first.
        """
        self.keeper.watch_queue(queue, self.tree)

    def retire(self, namespace: bytes, now: float) -> int:
        """Fence a namespace: nothing in it can be matched or published any more.

        Cached blocks are freed at once, active ones when their leases end. Returns how
        many blocks remain for that reason. The fence is between the leases of before
        and after: whoever acquires under the same bytes again starts an empty
        namespace, so a new generation of weights must bring a new identity.
        """
        check_namespace(namespace)
        check_now(now)
        return self.residency.retire(namespace, now)

    # Private

    def _match(
        self, namespace: bytes | None, domain: Domain, tokens: bytes | TokenIds
    ) -> Match:
        check_namespace(namespace)
        check_domain(domain)
        return self.residency.match(namespace, domain, token_buffer(tokens))

    def _whole_blocks(self, prefix: TokenIds) -> bytes:
        """Return the tokens of the whole blocks that may be declared or kept."""
        tokens = token_buffer(prefix)
        num_blocks = len(tokens) // self.tree.block_bytes
        num_blocks = self.residency.blocks_outside_span(tokens, num_blocks)
        return tokens[: num_blocks * self.tree.block_bytes]

    def _check_demand(self, demand: Demand, domain: Domain, num_tokens: int) -> None:
        if demand.num_slots < num_tokens:
            raise InvariantError(f"{demand.num_slots} slots for {num_tokens} tokens")
        num_needed = self.num_blocks_for(demand.num_slots)
        num_most = self.most_blocks(domain)
        if num_needed > num_most:
            raise PromptTooLong(
                f"{demand.num_slots} tokens need {num_needed} blocks but the domain "
                f"can have {num_most} of {self.pool.num_total}; raise num_blocks, lower "
                f"others' floors or shorten the prompt",
                field="prompt",
            )

    def _check_computed(self, lease: Lease, num_tokens: int, num_computed: int) -> None:
        num_slots = len(lease.table) * self.config.block_size
        if num_computed > min(num_tokens, num_slots):
            raise InvariantError(
                f"publish of {num_computed} computed tokens: {num_tokens} are given, "
                f"and the table has {num_slots} slots"
            )

    def _caller(
        self, domain: Domain, tokens: bytes, owner: str, hints: Hints
    ) -> Caller:
        first_ephemeral = None
        if hints.ephemeral_from is not None:
            # What is retained must not end where it could not be matched.
            first_ephemeral = self.residency.blocks_outside_span(
                tokens, hints.ephemeral_from // self.config.block_size
            )
        return Caller(
            domain=domain,
            owner=owner,
            session=hints.session,
            hint=0 if hints is NO_HINTS else self.keeper.digit(owner, hints),
            first_ephemeral_block=first_ephemeral,
        )

    def _plant(
        self, lease: Lease, match: Match, partial: PartialBlock | None, now: float
    ) -> tuple[PartialBlock | None, array[int]]:
        """Pin what matched for the lease; return the copy's source and the blocks.

        Pins before anything is allocated, so that the allocation cannot evict it.
        """
        table = array("i")
        if lease.namespace is None:
            return None, table
        node = match.node
        if node is None:
            lease.node = self.tree.root(lease.namespace)
            return None, table
        if match.num_node_blocks < node.num_blocks:
            lower = node
            node = self.residency.split(lower, match.num_node_blocks, now)
            if partial is not None:
                partial = PartialBlock(lower, 0, partial.num_tokens)
        path = node.path()
        self.residency.pin(node, now)
        self.residency.use(path, lease.caller, now)
        if partial is not None:
            # What is above both is used once.
            beyond = [step for step in partial.node.path() if step not in path]
            self.residency.pin(partial.node, now)
            self.residency.use(beyond, lease.caller, now)
        lease.node = node
        for step in path:
            table.extend(step.block_ids)
        return partial, table

    def _publish_run(
        self, lease: Lease, domain: Domain, tokens: bytes, stop: int, now: float
    ) -> int:
        """Publish or deduplicate blocks of one domain up to `stop` at most."""
        node, namespace = lease.node, lease.namespace
        assert node is not None, "only sharable leases get here"
        assert namespace is not None, "a lease with a node has a namespace"
        start = lease.num_published_blocks
        begin = start * self.tree.block_bytes
        block = tokens[begin : begin + self.tree.block_bytes]
        child = self.tree.child(node, domain, block)
        if child is not None:
            self._join(lease, child, tokens, stop, now)
            return 0
        stop = self._blocks_of_one_table(lease, stop, tokens)
        if stop == start:
            return 0
        run = Publication(
            namespace=namespace,
            domain=domain,
            caller=lease.caller,
            tokens=tokens,
            start=start,
            block_ids=lease.table.ids(start, stop),
            now=now,
        )
        lease.node = self.residency.publish(node, run, lease.keys)
        self.pool.publish(run.block_ids)
        lease.num_published_blocks = run.stop
        return len(run.block_ids)

    def _blocks_of_one_table(self, lease: Lease, end: int, tokens: bytes) -> int:
        """Return up to where the lease's blocks are its own, and may be published.

        Usually a fork shares no full block, as those are published before it. The
        blocks of a span that was too little to tell are an exception.
        """
        if self.pool.num_shares == 0:
            return end
        start = lease.num_published_blocks
        own = lease.table.ids(start, end)
        num_own = self.pool.num_leading_unshared(own)
        if num_own == len(own):
            return end
        return max(start, self.residency.blocks_outside_span(tokens, start + num_own))

    def _join(
        self, lease: Lease, child: Node, tokens: bytes, stop: int, now: float
    ) -> None:
        """Take over blocks that somebody published first; give back our own."""
        start = lease.num_published_blocks
        num_same = self.residency.num_joinable(child, lease.domain, tokens, start, stop)
        if num_same == 0:
            return
        if num_same < child.num_blocks:
            child = self.residency.split(child, num_same, now)
        own = lease.table.ids(start, start + num_same)
        self.residency.pin_child(child, now)
        self.residency.use((child,), lease.caller, now)
        lease.table.replace(start, child.block_ids)
        lease.node = child
        lease.num_published_blocks = start + num_same
        self._release_private(lease, own, now)
        self._note_active()

    def _release_private(self, lease: Lease, block_ids: array[int], now: float) -> None:
        num_free = self.pool.num_free
        self.pool.release(block_ids)
        for hear in self.residency.audience.freed:
            hear(lease.caller.owner, self.pool.num_free - num_free, now)

    def _allocate(self, num_blocks: int, lease: Lease, now: float) -> array[int]:
        """Take blocks that the caller knows to be available, evicting as needed."""
        num_short = num_blocks - self.pool.num_free
        if (
            num_short > 0
            and self.residency.evict(num_short, lease.domain, now) < num_short
        ):
            raise InvariantError(f"{num_blocks} available blocks could not be freed")
        taken = self.pool.allocate(num_blocks)
        for hear in self.residency.audience.allocated:
            hear(lease.caller.owner, num_blocks, now)
        self._note_active()
        return taken

    def _num_unasked_slots(self) -> int:
        """Return the slots at the ends of tables that no lease asked for.

        Only a private last block can have any, and those of a fork share it.
        """
        size = self.config.block_size
        unasked: dict[int, int] = {}  # by block
        for lease in self._leases:
            num_blocks = len(lease.table)
            if num_blocks > lease.num_published_blocks:
                last = lease.table[num_blocks - 1]
                num_slots = num_blocks * size - lease.num_slots
                unasked[last] = min(unasked.get(last, size), num_slots)
        return sum(unasked.values())

    def _note_active(self) -> None:
        self._peak_active = max(self._peak_active, self.num_active_blocks)


def _check_live(lease: Lease) -> None:
    """Refuse a released lease: its blocks may be somebody else's by now."""
    if lease.is_released:
        raise InvariantError("use of a released lease")
