"""The prefix cache: block pool, prefix tree and eviction policy behind one door.

Owns the rules that tie them together: match, pin and allocate as one atomic step;
publish only what is computed; shared is read-only; tail blocks go first. Knows nothing
of requests, schedules or tensors.

It is the only class that holds pool, tree and policy, so every number it reports
follows from the same state, and `check` can compare it with the truth. If it is given a
ledger, it tells it of every block that changes hands.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

from stemkv.core.books.ledger import Ledger
from stemkv.core.prefix.blocks import BlockPool
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import (
    BlocksEvicted,
    BlocksPublished,
    BlocksRefused,
    BlocksRetired,
    CacheEvent,
    DropReason,
)
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.table import BlockCopy, BlockTable, Lease
from stemkv.core.prefix.tokens import (
    MIN_SPAN_TOKENS,
    TOKEN_BYTES,
    TokenIds,
    common_prefix_bytes,
    end_outside_span,
)
from stemkv.core.prefix.tree import Match, Node, PartialBlock, PrefixTree
from stemkv.core.retention.hints import HintDigits
from stemkv.core.retention.lookahead import Lookahead, Waiting
from stemkv.core.retention.policy.base import EvictionPolicy
from stemkv.core.retention.quota import QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.waiting import WaitingMatches
from stemkv.errors import ConfigError, DoubleRelease, InvariantError, PromptTooLong

__all__ = ["CacheUsage", "DomainUsage", "Peek", "PrefixCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Blocks by state, and totals since the start. All exact counts."""

    num_total_blocks: int
    num_free_blocks: int
    num_active_blocks: int  # held by at least one lease
    num_cached_blocks: int  # retained for reuse, evictable
    peak_active_blocks: int
    num_evicted_blocks: int
    num_published_blocks: int  # blocks that ever became matchable


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


@dataclass(frozen=True, slots=True)
class _Keep:
    """An operator's order to keep whole blocks until a time."""

    namespace: bytes
    domain: Domain
    tokens: bytes
    until: float


# Domains that keep their number for the keys of blocks. As many can have a block here,
# or one that a policy remembers; one that is forgotten begins anew, with no past.
_KEY_SPACES_PER_BLOCK = 9


class PrefixCache:
    """Shares the KV of equal prefixes among requests that may share.

    `now` is in seconds on the caller's clock and must not decrease. `make_policy` makes
    the eviction policy: one, or with `quotas` one for each domain.
    """

    def __init__(
        self,
        config: CacheConfig,
        make_policy: Callable[[], EvictionPolicy],
        *,
        quotas: QuotaConfig | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.pool = BlockPool(config.num_blocks)
        self.tree = PrefixTree(config.block_size)
        self._retention = Retention(
            make_policy, num_blocks=config.num_blocks, quotas=quotas
        )
        self._digits = HintDigits()
        self._queue: Callable[[float], Iterable[Waiting]] | None = None
        self._matches: WaitingMatches | None = None
        self._keeps: list[_Keep] = []
        self._emit: Callable[[CacheEvent], None] = _ignore
        self._block_bytes = config.block_size * TOKEN_BYTES
        self._public: dict[bytes, list[bytes]] = {}  # by namespace, sorted
        self._tick = 0  # number of the last event that a policy was told of
        # Namespace and domain → number, for the keys of blocks; the last used is last.
        self._key_spaces: dict[tuple[bytes, Domain], int] = {}
        self._num_key_spaces = 0
        self._peak_active = 0
        self._num_evicted = 0
        self._num_published = 0

    # Questions

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation could get: free ones and cached ones."""
        return self.pool.num_free + self.tree.num_unpinned_blocks

    @property
    def num_lendable_blocks(self) -> int:
        """Cached blocks that anybody's allocation could get."""
        quotas = self._retention.quotas
        if quotas is None:
            return self.tree.num_unpinned_blocks
        return quotas.num_lendable_blocks

    def available_to(self, domain: Domain) -> int:
        """Return how many blocks an allocation for a domain could get.

        Less than `num_available_blocks` where others' floors are filled.
        """
        return self._num_room(domain)

    def most_blocks(self, domain: Domain) -> int:
        """Return how many blocks a request of the domain can surely hold if it is alone.

        All of them without quotas; with quotas, less what is promised to others. The
        same for every prompt: what of it is public now may be fenced while it waits.
        """
        quotas = self._retention.quotas
        return self.pool.num_total if quotas is None else quotas.most_blocks(domain)

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
            for node in _descendants(root)
        )

    def usage(self) -> CacheUsage:
        """Return the counts of this moment; pure."""
        return CacheUsage(
            num_total_blocks=self.pool.num_total,
            num_free_blocks=self.pool.num_free,
            num_active_blocks=self.num_active_blocks,
            num_cached_blocks=self.tree.num_unpinned_blocks,
            peak_active_blocks=self._peak_active,
            num_evicted_blocks=self._num_evicted,
            num_published_blocks=self._num_published,
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

    def peek(self, namespace: bytes | None, domain: Domain, tokens: bytes) -> Peek:
        """Return what `acquire` would find, without touching anything."""
        match = self._match(namespace, domain, tokens)
        tail = match.partial.num_tokens if match.partial else 0
        return Peek(match.num_blocks * self.config.block_size + tail, match.num_blocks)

    def num_missing_blocks(
        self,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes,
        *,
        num_slots: int,
        num_spare: int = 0,
        num_retained: int = 0,
        spares_floor: bool = False,
    ) -> int:
        """Return how many more blocks had to be available for `acquire` to succeed."""
        match = self._match(namespace, domain, tokens)
        num_fresh = self.num_blocks_for(num_slots) - match.num_blocks
        num_used = self._num_available_on(match, domain)
        room = self._num_room(domain, num_used=num_used, spares_floor=spares_floor)
        num_short = num_fresh + num_spare - room
        num_short = max(num_short, self._num_below(num_retained, num_fresh, num_used))
        return max(0, num_short)

    def num_public_blocks(self, namespace: bytes | None, tokens: bytes) -> int:
        """Return how many leading whole blocks lie inside a declared public prefix."""
        if namespace is None:
            return 0
        declared = self._public.get(namespace)
        if declared is None:
            return 0
        # Of sorted prefixes one of the two neighbours agrees with the tokens longest.
        at = bisect_left(declared, tokens)
        num_blocks = max(
            common_prefix_bytes(prefix, 0, tokens, 0, min(len(prefix), len(tokens)))
            // self._block_bytes
            for prefix in declared[max(0, at - 1) : at + 1]
        )
        return self._blocks_outside_span(tokens, num_blocks)

    def domain_of_next(self, lease: Lease, index: int) -> Domain | None:
        """Return the domain in which the lease will publish its block `index`.

        `None` if it never will: it shares with nobody, or its namespace was retired, or
        it was cut off.
        """
        if lease.node is None or lease.is_cut_off or lease.node.root().is_retired:
            return None
        # A public block below a private one could be reached by nobody else.
        is_public = index < lease.num_public_blocks and lease.node.domain == PUBLIC
        return PUBLIC if is_public else lease.domain

    # Verbs

    def subscribe(self, emit: Callable[[CacheEvent], None]) -> None:
        """Send every publish and eviction to `emit` from now on; one sink only."""
        self._emit = emit

    def declare_public(self, namespace: bytes, prefix: TokenIds) -> int:
        """Let everybody in the namespace share the whole blocks of `prefix`.

        An operator's act, never a request's. Returns how many blocks that is: the
        tokens of a last, partly covered block stay private. Blocks published before
        the declaration keep their domain.

        Raises `ConfigError` when there are quotas and all declared prefixes together
        exceed the public budget.
        """
        num_blocks = len(prefix) // self.config.block_size
        num_blocks = self._blocks_outside_span(prefix.buffer, num_blocks)
        self._check_public_budget(namespace, prefix.buffer, num_blocks)
        if num_blocks:
            whole = prefix.buffer[: num_blocks * self._block_bytes]
            declared = self._public.setdefault(namespace, [])
            at = bisect_left(declared, whole)
            if at == len(declared) or declared[at] != whole:
                declared.insert(at, whole)
        return num_blocks

    def acquire(
        self,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes,
        *,
        num_slots: int,
        num_spare: int = 0,
        num_retained: int = 0,
        spares_floor: bool = False,
        owner: str | None = None,
        hints: Hints = NO_HINTS,
        now: float,
    ) -> Lease | None:
        """Pin the longest cached prefix of `tokens` and allocate the rest.

        One atomic step: on success the lease's table has slots for `num_slots` tokens
        and at most `len(tokens) - 1` of them are matched; `None` means not now, and
        leaves everything bit-identical. `num_spare` available blocks must be left
        over; `spares_floor`: and what the domain has retained up to its own floor, as
        others will give their blocks back later; nothing is evicted if less than
        `num_retained` cached blocks would stay. If the match ends inside a block,
        `lease.copy` says what the driver must copy first (then call `copied`). `owner`
        is the tenant on whose account the blocks are, by default the name of the
        domain. The caller releases the lease exactly once.

        Raises `PromptTooLong` when the domain could not have so many even if alone.
        """
        if num_slots * TOKEN_BYTES < len(tokens):
            raise InvariantError(f"{num_slots} slots for {len(tokens) // 4} tokens")
        num_needed = self.num_blocks_for(num_slots)
        num_most = self.most_blocks(domain)
        if num_needed > num_most:
            raise PromptTooLong(
                f"{num_slots} tokens need {num_needed} blocks but the domain can have "
                f"{num_most} of {self.pool.num_total}; raise num_blocks, lower others' "
                f"floors or shorten the prompt",
                field="prompt",
            )
        match = self._match(namespace, domain, tokens)
        num_fresh = num_needed - match.num_blocks
        num_used = self._num_available_on(match, domain)
        room = self._num_room(domain, num_used=num_used, spares_floor=spares_floor)
        if num_fresh > room - num_spare:
            return None
        if self._num_below(num_retained, num_fresh, num_used) > 0:
            return None
        partial = match.partial
        if partial is not None:
            num_used += self._num_beyond(match, domain)
            room = self._num_room(domain, num_used=num_used, spares_floor=spares_floor)
            if num_fresh > room - num_spare:
                # Pinning the copy's source would take away the very blocks this needs;
                # then those tokens are computed instead.
                partial = None
        if owner is None:
            owner = domain.name
        first_ephemeral = None
        if hints.ephemeral_from is not None:
            # What is retained must not end where it could not be matched.
            first_ephemeral = self._blocks_outside_span(
                tokens, hints.ephemeral_from // self.config.block_size
            )
        lease = Lease(
            namespace=namespace,
            domain=domain,
            owner=owner,
            hints=hints,
            hint=self._digits.of(owner, hints),
            first_ephemeral_block=first_ephemeral,
            num_public_blocks=self.num_public_blocks(namespace, tokens),
        )
        self._tick += 1
        node, partial = self._plant(lease, match, partial, now)
        table = array("i")
        if node is not None:
            for step in node.path():
                table.extend(step.block_ids)
        num_published = len(table)
        table.extend(self._allocate(num_fresh, lease, now))
        num_tail = 0
        if partial is not None:
            num_tail, lease.copy_source = partial.num_tokens, partial.node
            lease.copy = BlockCopy(partial.block_id, table[num_published], num_tail)
        lease.node = node
        lease.table = BlockTable(table)
        lease.num_published_blocks = num_published
        lease.num_matched_tokens = num_published * self.config.block_size + num_tail
        return lease

    def copied(self, lease: Lease, now: float) -> None:
        """Tell that the lease's copy has run: its source need not stay any longer."""
        if lease.copy_source is not None:
            self._unpin(lease.copy_source, now)
            lease.copy_source = None
            lease.copy = None

    def grow(self, lease: Lease, num_slots: int, now: float) -> bool:
        """Lengthen the table to `num_slots` tokens; `False` means not now."""
        _check_live(lease)
        num_fresh = self.num_blocks_for(num_slots) - len(lease.table)
        if num_fresh <= 0:
            return True
        if num_fresh > self.available_to(lease.domain):
            return False
        lease.table.append(self._allocate(num_fresh, lease, now))
        return True

    def prepare_write(
        self, lease: Lease, position: int, now: float
    ) -> tuple[bool, BlockCopy | None]:
        """Make the block of `position` private to this lease.

        Returns `(True, None)` when it is already, `(True, copy)` when the driver must
        run a copy first, `(False, None)` when there is no block for it now.
        """
        _check_live(lease)
        index, offset = divmod(position, self.config.block_size)
        if index < lease.num_published_blocks:
            raise InvariantError(f"write at {position} into a published block")
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
        self, lease: Lease, tokens: bytes, num_computed: int, now: float
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
        end = self._blocks_outside_span(tokens, num_computed // self.config.block_size)
        num_added = 0
        self._tick += 1
        while (start := lease.num_published_blocks) < end:
            domain = self.domain_of_next(lease, start)
            if domain is None:
                break
            stop = end
            if domain == PUBLIC and start < lease.num_public_blocks:
                stop = min(end, lease.num_public_blocks)
            num_added += self._publish_run(lease, domain, tokens, stop, now)
            if lease.num_published_blocks == start:
                break  # see `_num_joinable` and `_blocks_of_one_table`
        return num_added

    def fork(self, lease: Lease, now: float) -> Lease:
        """Return a second lease on the same blocks.

        Published blocks are pinned once more; private ones are shared, and whoever
        writes first copies (`prepare_write`). Publish what is full first: a block that
        two tables share privately can no longer be published.
        """
        _check_live(lease)
        if lease.copy_source is not None:
            raise InvariantError("fork of a lease whose copy has not run yet")
        if lease.node is not None:
            self.tree.pin(lease.node)
        self.pool.retain(lease.table.ids(lease.num_published_blocks))
        child = Lease(
            namespace=lease.namespace,
            domain=lease.domain,
            owner=lease.owner,
            hints=lease.hints,
            hint=lease.hint,
            first_ephemeral_block=lease.first_ephemeral_block,
            num_public_blocks=lease.num_public_blocks,
        )
        child.node = lease.node
        child.table = BlockTable(lease.table.ids())
        child.num_published_blocks = lease.num_published_blocks
        child.num_matched_tokens = lease.num_matched_tokens
        child.is_cut_off = lease.is_cut_off
        return child

    def release(self, lease: Lease, now: float) -> None:
        """Give everything back. A second call raises `DoubleRelease`."""
        if lease.is_released:
            raise DoubleRelease("a lease must be released exactly once")
        lease.is_released = True
        self.copied(lease, now)
        # Tail first: the free list is a stack, so they come out in table order again.
        tail = lease.table.ids(lease.num_published_blocks)
        tail.reverse()
        self._release_private(lease, tail, now)
        if lease.node is not None:
            self._unpin(lease.node, now)

    def cut_off(self, lease: Lease) -> None:
        """Let the lease keep what it holds and publish nothing any more."""
        lease.is_cut_off = True

    def forget(self, lease: Lease, now: float) -> int:
        """Drop what nobody else uses of a released lease's path; return the blocks.

        For KV that turned out to be unsound: leaf by leaf, up to the first node that
        another lease pins or that other prefixes continue.
        """
        if not lease.is_released:
            raise InvariantError("forget of a lease that is still in use")
        num_dropped = 0
        node = lease.node
        while node is not None and node.parent is not None:
            if node.num_blocks:  # else it was not retained, or evicted, at the release
                if node.children or node.ref_count:
                    break
                num_dropped += self._drop_retired(node, now)
            node = node.parent
        return num_dropped

    def evict(
        self, num_blocks: int, now: float, *, domain: Domain | None = None
    ) -> int:
        """Drop up to `num_blocks` retained blocks; return how many were dropped.

        `domain` is whose request needs the room, `None` that the operator wants it;
        then no domain goes below its floor.
        """
        self._expect_queue(now)
        num_dropped = 0
        while num_dropped < num_blocks:
            victim = self._retention.victim(domain, now)
            if victim is None:
                break
            node_id, num_most = victim
            num_wanted = num_blocks - num_dropped
            if num_most is not None:
                num_wanted = min(num_wanted, num_most)
            num_dropped += self._evict_from(node_id, num_wanted, now)
        return num_dropped

    def end_session(self, domain: Domain, session: str, now: float) -> None:
        """Let blocks that only this session has used go before all others.

        A hint: whoever uses one of them again makes it an ordinary block.
        """
        self._retention.end_session(domain, session, now=now)

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
        num_blocks = len(prefix) // self.config.block_size
        num_blocks = self._blocks_outside_span(prefix.buffer, num_blocks)
        tokens = prefix.buffer[: num_blocks * self._block_bytes]
        keeps = [
            each
            for each in self._keeps
            if each.until > now
            and (each.namespace, each.domain, each.tokens)
            != (namespace, domain, tokens)
        ]
        if num_blocks == 0:
            return 0
        if until > now:
            num_kept = sum(len(each.tokens) for each in keeps) // self._block_bytes
            most = int(self.config.max_kept_share * self.config.num_blocks)
            if num_kept + num_blocks > most:
                raise ConfigError(
                    f"keeping {num_blocks} blocks beside {num_kept} exceeds the "
                    f"{most} that max_kept_share allows; keep less or for a shorter "
                    f"time, or raise max_kept_share"
                )
            keeps.append(_Keep(namespace, domain, tokens, until))
        self._keeps = keeps
        # One token more: a match never is the whole of what it is given.
        match = self._match(namespace, domain, tokens + bytes(TOKEN_BYTES))
        node = match.node
        if node is None or node.parent is None:
            return num_blocks
        if match.num_node_blocks < node.num_blocks:
            node = self._split(node, match.num_node_blocks, now)
        end = 0
        for step in node.path():
            end += step.num_blocks
            # Of all orders that cover the node; the one given may have ended another.
            until = max(
                (each.until for each in keeps if self._covers(each, step, tokens, end)),
                default=now,
            )
            self._retention.keep(step, until, now=now)
        return num_blocks

    def watch_queue(self, queue: Callable[[float], Iterable[Waiting]]) -> None:
        """Ask `queue(now)` who waits, in order, before anything is evicted.

        What those requests would hit goes late, and what the last of them would hit
        goes first.
        """
        self._queue = queue

    def keep_matches(self) -> WaitingMatches:
        """Return what will know, from now on, what waiting requests would match.

        One for each cache: whoever queues requests adds them to it.
        """
        if self._matches is None:
            self._matches = WaitingMatches(self.tree, self.config.block_size)
        return self._matches

    def retire(self, namespace: bytes, now: float) -> int:
        """Fence a namespace: nothing in it can be matched or published any more.

        Cached blocks are freed at once, active ones when their leases end. Returns how
        many blocks remain for that reason. The fence is between the leases of before
        and after: whoever acquires under the same bytes again starts an empty
        namespace, so a new generation of weights must bring a new identity.
        """
        self._public.pop(namespace, None)
        self._keeps = [each for each in self._keeps if each.namespace != namespace]
        for space in [each for each in self._key_spaces if each[0] == namespace]:
            del self._key_spaces[space]
        root = self.tree.retire(namespace)
        if root is None:
            return 0
        if self._matches is not None:
            self._matches.retired(namespace)
        for node in reversed(tuple(_descendants(root))):  # children before parents
            if node.is_leaf and node.ref_count == 0:
                self._drop_retired(node, now)
        return sum(node.num_blocks for node in _descendants(root))

    # Private

    def _match(self, namespace: bytes | None, domain: Domain, tokens: bytes) -> Match:
        if namespace is None:
            return Match(None, 0, 0, None)
        limit = len(tokens) // TOKEN_BYTES - 1  # at least one token is computed
        match = self.tree.match(namespace, domain, tokens, limit=limit)
        num_tokens = match.num_blocks * self.config.block_size
        if match.partial is not None:
            num_tokens += match.partial.num_tokens
        end = end_outside_span(tokens, num_tokens)
        if end < num_tokens:
            # Too little of a span agrees to say that it is the same one.
            match = self.tree.match(namespace, domain, tokens, limit=end)
        return match

    def _blocks_outside_span(self, tokens: bytes, num_blocks: int) -> int:
        """Return how many of the leading blocks may be published or declared."""
        size = self.config.block_size
        # Rounding down to a block may end in the span before.
        while (end := end_outside_span(tokens, num_blocks * size)) < num_blocks * size:
            num_blocks = end // size
        return num_blocks

    def _plant(
        self, lease: Lease, match: Match, partial: PartialBlock | None, now: float
    ) -> tuple[Node | None, PartialBlock | None]:
        """Pin what matched; return the deepest pinned node and the copy's source.

        Pins before anything is allocated, so that the allocation cannot evict it.
        """
        if lease.namespace is None:
            return None, None
        node = match.node
        if node is None:
            return self.tree.root(lease.namespace), None
        if match.num_node_blocks < node.num_blocks:
            lower = node
            node = self._split(lower, match.num_node_blocks, now)
            if partial is not None:
                partial = PartialBlock(lower, 0, partial.num_tokens)
        path = node.path()
        self._pin(node, path, lease, now)
        if partial is not None:
            # What is above both is used once.
            beyond = [step for step in partial.node.path() if step not in path]
            self._pin(partial.node, beyond, lease, now)
        return node, partial

    def _blocks_of_one_table(self, lease: Lease, end: int, tokens: bytes) -> int:
        """Return up to where the lease's blocks are its own, and may be published.

        Usually a fork shares no full block, as those are published before it. The
        blocks of a span that was too little to tell are an exception.
        """
        start = lease.num_published_blocks
        own = lease.table.ids(start, end)
        num_own = self.pool.num_leading_unshared(own)
        if num_own == len(own):
            return end
        return max(start, self._blocks_outside_span(tokens, start + num_own))

    def _publish_run(
        self, lease: Lease, domain: Domain, tokens: bytes, stop: int, now: float
    ) -> int:
        """Publish or deduplicate blocks of one domain up to `stop` at most."""
        node = lease.node
        assert node is not None, "only sharable leases get here"
        start = lease.num_published_blocks
        begin, end = start * self._block_bytes, stop * self._block_bytes
        child = self.tree.child(node, domain, tokens[begin : begin + self._block_bytes])
        if child is not None:
            self._join(lease, child, tokens, begin, end, now)
            return 0
        stop = self._blocks_of_one_table(lease, stop, tokens)
        if stop == start:
            return 0
        kept_until, stop = self._kept_until(lease, domain, tokens, start, stop, now)
        first_ephemeral = lease.first_ephemeral_block
        if first_ephemeral is not None and start < first_ephemeral < stop:
            stop = first_ephemeral
        keys: Sequence[int] = ()
        if self._retention.needs_keys:
            keys = self._keys(lease, domain, tokens, start, stop)
            num_alike = self._retention.num_alike(domain, keys)
            if num_alike < len(keys):
                # Rounded down, so as not to part a span; then it loses its past.
                stop = self._blocks_outside_span(tokens, start + num_alike)
                stop = stop if stop > start else start + len(keys)
                keys = keys[: stop - start]
        end = stop * self._block_bytes
        own = lease.table.ids(start, stop)
        self.pool.publish(own)
        can_extend = (
            node.parent is not None
            and node.ref_count == 1
            and node.is_leaf
            and node.domain == domain
            and node.owner == lease.owner
            and self._retention.can_extend(node, lease, keys, kept_until)
        )
        if can_extend:
            num_before = node.num_blocks
            self.tree.extend(node, tokens[begin:end], own)
            if self._matches is not None:
                self._matches.extended(node, num_before)
        else:
            node = self.tree.add(
                node, domain, tokens[begin:end], own, owner=lease.owner
            )
            self.tree.pin_child(node)
            lease.node = node
            if self._matches is not None:
                self._matches.added(node)
        assert lease.namespace is not None, "a lease with a node has a namespace"
        if self.ledger is not None:
            self.ledger.published(
                node,
                start,
                stop,
                namespace=lease.namespace,
                owner=lease.owner,
                tokens=tokens,
                now=now,
            )
        self._retention.published(
            node,
            lease,
            start=start,
            num_blocks=len(own),
            keys=keys,
            kept_until=kept_until,
            tick=self._tick,
            now=now,
        )
        lease.num_published_blocks = stop
        self._num_published += len(own)
        self._emit(
            BlocksPublished(
                now=now, namespace=lease.namespace, domain=domain, num_blocks=len(own)
            )
        )
        return len(own)

    def _keys(
        self, lease: Lease, domain: Domain, tokens: bytes, start: int, stop: int
    ) -> array[int]:
        """Return a key for each block: of all tokens up to its end, for this domain.

        CRC-32, as it is fast and equal everywhere; a policy may be wrong about a block
        once in four thousand million. What one domain publishes cannot collide with
        another's: each has its own upper half of the keys.
        """
        assert lease.namespace is not None, "what publishes has a namespace"
        space = (lease.namespace, domain)
        number = self._key_spaces.pop(space, None)
        if number is None:
            self._num_key_spaces += 1
            number = self._num_key_spaces
        self._key_spaces[space] = number
        if len(self._key_spaces) > _KEY_SPACES_PER_BLOCK * self.pool.num_total:
            del self._key_spaces[next(iter(self._key_spaces))]
        upper = (number & 0xFFFFFFFF) << 32
        block_bytes = self._block_bytes
        num_blocks, crc = lease.key_state
        if num_blocks != start:
            crc = crc32(tokens[: start * block_bytes])
        keys = array("Q")
        for begin in range(start * block_bytes, stop * block_bytes, block_bytes):
            crc = crc32(tokens[begin : begin + block_bytes], crc)
            keys.append(upper | crc)
        lease.key_state = (stop, crc)
        return keys

    def _join(
        self, lease: Lease, child: Node, tokens: bytes, begin: int, end: int, now: float
    ) -> None:
        """Take over blocks that somebody published first; give back our own."""
        num_same = self._num_joinable(lease, child, tokens, begin, end)
        if num_same == 0:
            return
        if num_same < child.num_blocks:
            child = self._split(child, num_same, now)
        start = lease.num_published_blocks
        own = lease.table.ids(start, start + num_same)
        if self.tree.pin_child(child):
            self._retention.pinned(child)
            if self.ledger is not None:
                self.ledger.pinned(child, now)
        self._retention.used(child, lease, tick=self._tick, now=now)
        lease.table.replace(start, child.block_ids)
        lease.node = child
        lease.num_published_blocks = start + num_same
        self._release_private(lease, own, now)
        self._note_active()

    def _num_joinable(
        self, lease: Lease, child: Node, tokens: bytes, begin: int, end: int
    ) -> int:
        """Return how many leading blocks of the child are surely the lease's own.

        Equal tokens are, unless they end within the first positions of a span: then
        only if what follows agrees as well.
        """
        num_same = self.tree.common_blocks(child, tokens, begin, end)
        start = lease.num_published_blocks
        safe = self._blocks_outside_span(tokens, start + num_same) - start
        if safe == num_same:
            return num_same
        match = self._match(lease.namespace, lease.domain, tokens)
        is_verified = (
            match.num_blocks >= start + num_same
            and match.node is not None
            and child in match.node.path()
        )
        return num_same if is_verified else max(0, safe)

    def _split(self, node: Node, num_blocks: int, now: float) -> Node:
        upper = self.tree.split(node, num_blocks)
        if self._matches is not None:
            self._matches.split(upper, node)
        self._retention.split(upper, node)
        if self.ledger is not None:
            self.ledger.split(upper, node, now)
        return upper

    def _release_private(self, lease: Lease, block_ids: array[int], now: float) -> None:
        if self.ledger is None:
            self.pool.release(block_ids)
            return
        num_free = self.pool.num_free
        self.pool.release(block_ids)
        self.ledger.freed(lease.owner, self.pool.num_free - num_free, now)

    def _pin(self, node: Node, used: list[Node], lease: Lease, now: float) -> None:
        for pinned in self.tree.pin(node):
            self._retention.pinned(pinned)
            if self.ledger is not None:
                self.ledger.pinned(pinned, now)
        for step in used:
            self._retention.used(step, lease, tick=self._tick, now=now)

    def _unpin(self, node: Node, now: float) -> None:
        unpinned = self.tree.unpin(node)
        path = node.path()
        if self.ledger is not None:
            for step in unpinned:
                self.ledger.unpinned(step, now)
        is_retired = node.root().is_retired
        self._tick += 1
        for step in reversed(unpinned):
            self._retention.released(step, tick=self._tick, now=now)
        for step in unpinned:  # deepest first, so a parent may become a leaf meanwhile
            if not step.is_leaf:
                continue
            if is_retired:
                self._drop_retired(step, now)
            elif self._retention.refuses(step, now=now):
                self._refuse(step, now)
            elif not self._retention.is_evictable(step):  # as its child was refused
                self._retention.became_evictable(step, now=now)
        # A match that was cut short split an edge. Unless something was published
        # there, the cut is undone as soon as the policy sees no difference between the
        # parts, so that paths do not fragment: many short leases must not make
        # everybody else's matches slow for good.
        for step in path:
            lower = self.tree.mergeable(step)
            if lower is not None and self._retention.can_merge(step, lower):
                self.tree.merge(step, lower)
                if self._matches is not None:
                    self._matches.merged(step, lower)
                self._retention.merged(step.id, lower)
                if self.ledger is not None:
                    self.ledger.merged(step.id, lower, now)
        if self._retention.is_over_cap(node.domain):
            self._evict_over_cap(node.domain, now)

    def _allocate(self, num_blocks: int, lease: Lease, now: float) -> array[int]:
        """Take blocks that the caller knows to be available, evicting as needed."""
        num_short = num_blocks - self.pool.num_free
        if (
            num_short > 0
            and self.evict(num_short, now, domain=lease.domain) < num_short
        ):
            raise InvariantError(f"{num_blocks} available blocks could not be freed")
        taken = self.pool.allocate(num_blocks)
        if self.ledger is not None:
            self.ledger.allocated(lease.owner, num_blocks, now)
        self._note_active()
        return taken

    def _evict_over_cap(self, domain: Domain, now: float) -> None:
        self._expect_queue(now)
        while True:
            victim = self._retention.victim_over_cap(domain, now)
            if victim is None:
                return
            node_id, num_blocks = victim
            assert num_blocks is not None, "no more than what is over the cap"
            self._evict_from(node_id, num_blocks, now)

    def _evict_from(self, node_id: int, num_blocks: int, now: float) -> int:
        node = self.tree.node(node_id)
        dropped = self._drop(node, num_blocks, now, DropReason.EVICTED)
        self._emit(BlocksEvicted(now=now, domain=node.domain, num_blocks=dropped))
        self._num_evicted += dropped
        return dropped

    def _refuse(self, node: Node, now: float) -> None:
        dropped = self._drop(node, node.num_blocks, now, DropReason.REFUSED)
        self._emit(BlocksRefused(now=now, domain=node.domain, num_blocks=dropped))

    def _drop_retired(self, node: Node, now: float) -> int:
        dropped = self._drop(node, node.num_blocks, now, DropReason.RETIRED)
        self._emit(BlocksRetired(now=now, domain=node.domain, num_blocks=dropped))
        return dropped

    def _drop(self, node: Node, num_blocks: int, now: float, reason: DropReason) -> int:
        """Free tail blocks of an unpinned leaf and tell the policy what follows.

        A few more than asked, where the rest would end in the first positions of a
        span: nobody could match those, and they would stand in the way of equal ones.
        """
        keep = node.num_blocks - num_blocks
        while keep > 0 and self._ends_in_span(node, keep):
            keep -= 1
        keep = max(0, keep)
        if self.ledger is not None:
            self.ledger.dropping(node, keep, reason=reason, now=now)
        dropped = self.tree.trim(node, node.num_blocks - keep)
        if self._matches is not None:
            self._matches.trimmed(node)
        dropped.reverse()
        self.pool.reclaim(dropped)
        parent = node.parent
        self._retention.dropped(
            node, len(dropped), may_return=reason is not DropReason.RETIRED
        )
        if (
            node.num_blocks == 0
            and parent is not None
            and parent.parent is not None
            and parent.is_leaf
            and parent.ref_count == 0
            and not parent.root().is_retired
        ):
            self._retention.became_evictable(parent, now=now)
        return len(dropped)

    def _kept_until(
        self,
        lease: Lease,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        now: float,
    ) -> tuple[float | None, int]:
        """Return until when a domain's run is kept, and where that changes."""
        until = None
        for keep in self._keeps:
            if (
                keep.until <= now
                or len(keep.tokens) <= start * self._block_bytes
                or keep.namespace != lease.namespace
                or domain not in (PUBLIC, keep.domain)
            ):
                continue
            limit = min(len(keep.tokens), len(tokens))
            same = common_prefix_bytes(keep.tokens, 0, tokens, 0, limit)
            end = same // self._block_bytes
            if end > start:
                stop = min(stop, end)
                until = max(until or keep.until, keep.until)
        return until, stop

    def _covers(self, keep: _Keep, node: Node, tokens: bytes, end: int) -> bool:
        """Whether an order keeps all of a node, which ends `tokens` at block `end`."""
        num_bytes = end * self._block_bytes
        return (
            node.root().namespace == keep.namespace
            and node.domain in (PUBLIC, keep.domain)
            and len(keep.tokens) >= num_bytes
            and keep.tokens.startswith(tokens[:num_bytes])
        )

    def _check_public_budget(
        self, namespace: bytes, prefix: bytes, num_blocks: int
    ) -> None:
        quotas = self._retention.quotas
        if quotas is None:
            return
        # Upper bound: prefixes of one namespace may share blocks.
        declared = sum(
            len(each) for prefixes in self._public.values() for each in prefixes
        )
        whole = prefix[: num_blocks * self._block_bytes]
        if whole not in self._public.get(namespace, ()):
            declared += len(whole)
        budget = quotas.config.public_blocks
        if declared > budget * self._block_bytes:
            raise ConfigError(
                f"declared public prefixes of {declared // self._block_bytes} blocks "
                f"exceed public_blocks of {budget}; raise it or declare less"
            )

    def _expect_queue(self, now: float) -> None:
        """Let retention find out what those who wait now will hit."""
        if self._queue is not None:
            ahead = Lookahead(self._queue(now), self.tree, self.config.block_size)
            self._retention.expect(ahead.awaited if len(ahead) else None, now=now)

    def _num_room(
        self, domain: Domain, *, num_used: int = 0, spares_floor: bool = False
    ) -> int:
        """Return how many blocks a domain could get beside those it is about to use."""
        return self.pool.num_free + self._retention.num_available(
            domain,
            self.tree.num_unpinned_blocks,
            num_used=num_used,
            spares_floor=spares_floor,
        )

    def _num_below(self, num_retained: int, num_fresh: int, num_used: int) -> int:
        """Return how far evicting for fresh blocks would go below what is retained."""
        num_evicted = num_fresh - self.pool.num_free
        if num_evicted <= 0 or num_retained == 0:
            return 0
        return num_retained - (self.tree.num_unpinned_blocks - num_used - num_evicted)

    def _num_available_on(self, match: Match, domain: Domain) -> int:
        """Return how many of the matched blocks are available to a domain as room."""
        if match.node is None:
            return 0
        total = 0
        for node in match.node.path():
            if node.ref_count == 0 and self._retention.counts_as_available(
                node, domain
            ):
                total += (
                    match.num_node_blocks if node is match.node else node.num_blocks
                )
        return total

    def _num_beyond(self, match: Match, domain: Domain) -> int:
        """Return how many more available blocks pinning the copy's source takes."""
        if match.partial is None:
            return 0
        source = match.partial.node
        if source.ref_count or not self._retention.counts_as_available(source, domain):
            return 0
        if source is match.node:
            return source.num_blocks - match.num_node_blocks
        return source.num_blocks

    def _ends_in_span(self, node: Node, num_blocks: int) -> bool:
        """Whether a path cut after so many blocks of the node tells its span too late."""
        num_bytes = (MIN_SPAN_TOKENS - 1) * TOKEN_BYTES
        end = num_blocks * self._block_bytes
        tail = node.edge[max(0, end - num_bytes) : end]
        above = node.parent
        while len(tail) < num_bytes and above is not None:
            tail = above.edge[-(num_bytes - len(tail)) :] + tail
            above = above.parent
        num_tokens = len(tail) // TOKEN_BYTES
        return end_outside_span(tail, num_tokens) < num_tokens

    def _note_active(self) -> None:
        self._peak_active = max(self._peak_active, self.num_active_blocks)


def _check_live(lease: Lease) -> None:
    """Refuse a released lease: its blocks may be somebody else's by now."""
    if lease.is_released:
        raise InvariantError("use of a released lease")


def _ignore(event: CacheEvent) -> None:
    """Drop the event: nobody has subscribed."""


def _descendants(root: Node) -> Iterator[Node]:
    """Yield the nodes below a root, parents before children."""
    stack = [root]
    while stack:
        node = stack.pop()
        for children in node.children.values():
            for child in children:
                yield child
                stack.append(child)
