"""Which retained block goes next: tiers over a policy, and a policy for each domain.

Owns what stands above any policy: blocks of sessions that have ended go first, blocks
that a waiting request will hit go late, blocks that an operator keeps go last; and with
quotas, whose blocks make room. Everything between is the policy's.

Every node is in one tier. The policy knows of a leaf only while it is in the ordinary
one; to the policy a leaf in another tier looks like one that a lease pins.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.keeper import Keeper, Waiting
from stemkv.core.prefix.tree import Node, PrefixTree
from stemkv.core.prefix.watcher import Caller, Publication
from stemkv.core.retention.hints import HintDigits
from stemkv.core.retention.lookahead import Awaited, Lookahead
from stemkv.core.retention.policy.base import EvictionPolicy
from stemkv.core.retention.policy.leaves import Leaves
from stemkv.core.retention.quota import QuotaConfig, Quotas

__all__ = ["Retention"]

_Session = tuple[Domain, str]


class _Tier(Enum):
    """In the order in which leaves go."""

    ENDED = 0  # of a session that has ended
    ORDINARY = 1
    AWAITED = 2  # a waiting request will hit it; the one that waits longest last
    KEPT = 3  # by the operator; the one that is kept shortest first


class _Stock:
    """The leaves of one domain, or of all, by tier."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.ended = Leaves()
        self.awaited = Leaves()
        self.kept = Leaves()
        self.places: dict[int, _Tier] = {}  # evictable leaves
        self.num_nodes = 0


class Retention(Keeper):
    """What the cache asks instead of a policy.

    `make_policy` makes one for each domain if there are quotas, so that no domain's
    evictions depend on what others did with theirs; else there is one for all.
    """

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy],
        quotas: Quotas | None = None,
    ) -> None:
        self.quotas = quotas
        self._make_policy = make_policy
        self._common = _Stock(make_policy())
        self._stocks: dict[Domain, _Stock] = {}  # with quotas
        self._digits = HintDigits()
        self._num_ended = 0  # orders what became evictable after its session ended
        # By node id, where there is anything to say
        self._session_of: dict[int, _Session] = {}  # only that one has used it
        self._ephemeral: set[int] = set()
        self._ended: set[int] = set()
        self._kept_until: dict[int, float] = {}
        self._awaited: dict[int, int] = {}  # place in the queue
        self._queue: Callable[[float], Iterable[Waiting]] | None = None
        self._tree: PrefixTree | None = None  # of the queue's cache
        self._find_awaited: Callable[[int], Awaited | None] | None = None
        self._stock_of: dict[int, _Stock] = {}  # evictable leaves
        self._nodes_of: dict[_Session, set[int]] = {}

    @classmethod
    def of(
        cls,
        make_policy: Callable[[], EvictionPolicy],
        config: CacheConfig,
        quotas: QuotaConfig | None,
    ) -> Retention:
        """Return the retention of a cache of that size, with quotas if there are any.

        Raises `ConfigError` when the cache cannot promise what they say.
        """
        if quotas is None:
            return cls(make_policy)
        return cls(make_policy, quotas=Quotas(quotas, config.num_blocks))

    # Sizes

    def num_available(
        self,
        domain: Domain,
        num_unpinned: int,
        *,
        num_used: int = 0,
        spares_floor: bool = False,
    ) -> int:
        """See `Keeper` and `Quotas.available_to`."""
        if self.quotas is None:
            return num_unpinned - num_used
        return self.quotas.available_to(
            domain, num_used=num_used, spares_floor=spares_floor
        )

    def counts_as_available(self, node: Node, domain: Domain) -> bool:
        """See `Keeper`."""
        return self.quotas is None or node.domain == domain

    def num_lendable(self, num_unpinned: int) -> int:
        """See `Keeper`."""
        return num_unpinned if self.quotas is None else self.quotas.num_lendable_blocks

    def most_blocks(self, domain: Domain, num_total: int) -> int:
        """See `Keeper`."""
        return num_total if self.quotas is None else self.quotas.most_blocks(domain)

    @property
    def public_budget(self) -> int | None:
        """See `Keeper`."""
        return None if self.quotas is None else self.quotas.config.public_blocks

    # What may be one node

    @property
    def needs_keys(self) -> bool:
        """Whether the policy wants keys of blocks."""
        return self._common.policy.needs_keys

    def num_alike(self, domain: Domain, keys: Sequence[int]) -> int:
        """Return how many leading blocks may be one node."""
        return self._stock(domain).policy.num_alike(keys)

    def can_extend(self, node: Node, publication: Publication) -> bool:
        """Whether what is published may join the node: nothing tells them apart."""
        caller = publication.caller
        return (
            self._session_of.get(node.id) == _session_of(caller, node)
            and (node.id in self._ephemeral)
            == _is_ephemeral(caller, node, publication.start)
            and self._kept_until.get(node.id) == publication.kept_until
            and node.id not in self._ended
            and self._stock(node.domain).policy.can_extend(node.id, publication.keys)
        )

    def can_merge(self, upper: Node, lower: Node) -> bool:
        """Whether nothing tells the two apart."""
        one, other = upper.id, lower.id
        return (
            self._session_of.get(one) == self._session_of.get(other)
            and (one in self._ephemeral) == (other in self._ephemeral)
            and (one in self._ended) == (other in self._ended)
            and self._kept_until.get(one) == self._kept_until.get(other)
            and self._stock(upper.domain).policy.can_merge(one, other)
        )

    # What happens to nodes

    def added(self, node: Node, publication: Publication) -> None:
        """Note what its publisher said of a new node."""
        self._stock(node.domain).num_nodes += 1
        caller = publication.caller
        session = _session_of(caller, node)
        if session is not None:
            self._session_of[node.id] = session
            self._nodes_of.setdefault(session, set()).add(node.id)
        if _is_ephemeral(caller, node, publication.start):
            self._ephemeral.add(node.id)
        if publication.kept_until is not None:
            self._kept_until[node.id] = publication.kept_until
        self.extended(node, publication)

    def extended(self, node: Node, publication: Publication) -> None:
        """Tell the policy of blocks that a node has gained."""
        self._stock(node.domain).policy.published(
            node.id,
            start=publication.start,
            num_blocks=len(publication.block_ids),
            keys=publication.keys,
            hint=_hint(publication.caller, node),
            tick=publication.tick,
            now=publication.now,
        )

    def used(self, node: Node, caller: Caller, tick: int, now: float) -> None:
        """A caller began to use the node."""
        node_id = node.id
        if self._session_of and self._session_of.get(node_id) != _session_of(
            caller, node
        ):
            self._leave_session(node_id)
        if self._ended:
            self._ended.discard(node_id)
        if self._ephemeral:
            self._ephemeral.discard(node_id)  # evidently it is used more than once
        self._stock(node.domain).policy.used(
            node_id, hint=_hint(caller, node), tick=tick, now=now
        )

    def pinned(self, node: Node, now: float) -> None:
        """Somebody begins to hold a node that nobody held."""
        if self.quotas is not None:
            self.quotas.change(node.domain, -node.num_blocks)
        if node.is_leaf:
            self._withdraw(node.id)

    def unpinned(self, node: Node, tick: int, now: float) -> None:
        """Nobody holds the node any more."""
        if self.quotas is not None:
            self.quotas.change(node.domain, node.num_blocks)
        self._stock(node.domain).policy.released(node.id, tick=tick, now=now)

    def refuses(self, node: Node, now: float) -> bool:
        """Whether a leaf that nobody holds shall not be retained at all."""
        if node.id not in self._ephemeral:
            return False
        until = self._kept_until.get(node.id)
        return until is None or until <= now

    def is_evictable(self, node: Node) -> bool:
        """Whether it was told that the node became evictable, and nothing since."""
        return node.id in self._stock_of

    def became_evictable(self, node: Node, now: float) -> None:
        """The node is now an unpinned leaf."""
        self._place(node.id, self._stock(node.domain), now)

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """`lower` was cut; `upper` is its leading part."""
        one, other = upper.id, lower.id
        session = self._session_of.get(other)
        if session is not None:
            self._session_of[one] = session
            self._nodes_of[session].add(one)
        for marked in (self._ephemeral, self._ended):
            if other in marked:
                marked.add(one)
        until = self._kept_until.get(other)
        if until is not None:
            self._kept_until[one] = until
        stock = self._stock(lower.domain)
        stock.num_nodes += 1
        stock.policy.split(one, other, num_blocks=upper.num_blocks)

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """`lower` took over the blocks of the upper node."""
        stock = self._stock(lower.domain)
        stock.num_nodes -= 1
        stock.policy.merged(upper.id, lower.id)
        self._forget_marks(upper.id)

    def trimmed(
        self, node: Node, block_ids: array[int], reason: DropReason, now: float
    ) -> None:
        """An unpinned leaf lost blocks of its tail; `node` has what is left."""
        if self.quotas is not None:
            self.quotas.change(node.domain, -len(block_ids))
        num_left = node.num_blocks
        if num_left == 0:
            self._withdraw(node.id)
        self._stock(node.domain).policy.dropped(
            node.id, num_left, may_return=reason is not DropReason.RETIRED
        )
        if num_left == 0:
            self._forget_marks(node.id)
            self._forget_stock(node.domain)

    # What is said of nodes

    def digit(self, owner: str, hints: Hints) -> int:
        """Return what a caller said of its next use as a digit for the policy."""
        return self._digits.of(owner, hints)

    def end_session(self, domain: Domain, session: str, now: float) -> None:
        """Let blocks that only this session has used go before all others."""
        for node_id in sorted(self._nodes_of.get((domain, session), ())):
            self._ended.add(node_id)
            self._replace(node_id, now)

    def keep(self, node: Node, until: float, now: float) -> None:
        """Keep a node until a time, as long as anything else can go."""
        if until <= now:
            self._kept_until.pop(node.id, None)
        else:
            self._kept_until[node.id] = until
        self._replace(node.id, now)

    def watch_queue(
        self, queue: Callable[[float], Iterable[Waiting]], tree: PrefixTree
    ) -> None:
        """Ask `queue(now)` who waits, in order, before anything is evicted.

        What those requests would hit goes late, and what the last of them would hit
        goes first.
        """
        self._queue, self._tree = queue, tree

    def look_ahead(self, now: float) -> None:
        """Take a snapshot of the queue: it is asked of leaves that are about to go."""
        if self._queue is None or self._tree is None:
            return
        ahead = Lookahead(self._queue(now), self._tree)
        self._find_awaited = ahead.awaited if len(ahead) else None
        for node_id in list(self._awaited):
            self._note_awaited(node_id, now)

    # Who goes

    def victim(
        self, domain: Domain | None, now: float
    ) -> tuple[int, int | None] | None:
        """Return the leaf to take from and how many blocks at most (`None`: any).

        `domain` is whose request needs room; `None`: the operator's wish.
        """
        if self.quotas is None:
            return self._first(self._common, None, now)
        giver = self.quotas.giver(domain)
        if giver is None:
            return None
        return self._first(self._stock(giver[0]), giver[1], now)

    def is_over_cap(self, domain: Domain) -> bool:
        """Whether a domain has retained more than it may."""
        return self.quotas is not None and self.quotas.over_cap(domain) > 0

    def victim_over_cap(self, domain: Domain, now: float) -> tuple[int, int] | None:
        """Return the leaf that a domain over its cap must give, and how many blocks."""
        num_over = 0 if self.quotas is None else self.quotas.over_cap(domain)
        if num_over == 0:
            return None
        first = self._first(self._stock(domain), num_over, now)
        return None if first is None else (first[0], first[1] or num_over)

    # Private

    def _stock(self, domain: Domain) -> _Stock:
        if self.quotas is None:
            return self._common
        stock = self._stocks.get(domain)
        if stock is None:
            stock = self._stocks[domain] = _Stock(self._make_policy())
        return stock

    def _first(
        self, stock: _Stock, num_most: int | None, now: float
    ) -> tuple[int, int | None] | None:
        """Return the leaf of a stock that goes first, and how much of it."""
        while stock.kept:
            node_id = stock.kept.first()
            if node_id is None or self._kept_until[node_id] > now:
                break
            del self._kept_until[node_id]  # its time is over
            self._replace(node_id, now)
        while True:
            node_id = stock.ended.first()
            if node_id is None:
                node_id = stock.policy.victim(now)
            if node_id is None:
                node_id = stock.awaited.first()
            if node_id is None:
                break
            tier = stock.places[node_id]
            awaited = self._note_awaited(node_id, now)
            if stock.places[node_id] is not tier:
                continue  # it goes later than it seemed, or sooner
            if tier is _Tier.ORDINARY:
                num_most = _least(num_most, stock.policy.most_to_take())
            if awaited is None:
                return node_id, num_most
            if node_id == stock.awaited.first() or tier is not _Tier.AWAITED:
                num_tail = awaited.num_tail_blocks
                return node_id, _least(num_most, num_tail)
        node_id = stock.kept.first()
        return None if node_id is None else (node_id, num_most)

    def _note_awaited(self, node_id: int, now: float) -> Awaited | None:
        """Find out what of a leaf is awaited, and put it where that belongs."""
        awaited = None if self._find_awaited is None else self._find_awaited(node_id)
        before = self._awaited.pop(node_id, None)
        if awaited is not None and awaited.place is not None:
            self._awaited[node_id] = awaited.place
        if before != self._awaited.get(node_id):
            self._replace(node_id, now)
        return awaited

    def _tier(self, node_id: int) -> _Tier:
        if node_id in self._kept_until:
            return _Tier.KEPT
        if node_id in self._awaited:
            return _Tier.AWAITED
        return _Tier.ENDED if node_id in self._ended else _Tier.ORDINARY

    def _place(self, node_id: int, stock: _Stock, now: float) -> None:
        tier = self._tier(node_id)
        stock.places[node_id] = tier
        self._stock_of[node_id] = stock
        match tier:
            case _Tier.ORDINARY:
                stock.policy.became_evictable(node_id, now=now)
            case _Tier.ENDED:
                self._num_ended += 1
                stock.ended.add(node_id, (self._num_ended, node_id))
            case _Tier.AWAITED:
                stock.awaited.add(node_id, (-self._awaited[node_id], -node_id))
            case _Tier.KEPT:
                stock.kept.add(node_id, (self._kept_until[node_id], -node_id))

    def _withdraw(self, node_id: int) -> None:
        stock = self._stock_of.pop(node_id, None)
        if stock is None:
            return
        match stock.places.pop(node_id):
            case _Tier.ORDINARY:
                stock.policy.became_pinned(node_id)
            case _Tier.ENDED:
                stock.ended.discard(node_id)
            case _Tier.AWAITED:
                stock.awaited.discard(node_id)
            case _Tier.KEPT:
                stock.kept.discard(node_id)

    def _replace(self, node_id: int, now: float) -> None:
        """Put an evictable leaf where its marks say now."""
        stock = self._stock_of.get(node_id)
        if stock is not None:
            self._withdraw(node_id)
            self._place(node_id, stock, now)

    def _forget_stock(self, domain: Domain) -> None:
        """Count a node that is gone; forget who has none and was promised nothing."""
        stock = self._stock(domain)
        stock.num_nodes -= 1
        if self.quotas is not None and stock.num_nodes == 0:
            self.quotas.forget(domain)
            if domain not in self.quotas.config.quotas:
                del self._stocks[domain]

    def _leave_session(self, node_id: int) -> None:
        session = self._session_of.pop(node_id, None)
        if session is None:
            return
        nodes = self._nodes_of[session]
        nodes.discard(node_id)
        if not nodes:
            del self._nodes_of[session]

    def _forget_marks(self, node_id: int) -> None:
        self._leave_session(node_id)
        self._ephemeral.discard(node_id)
        self._ended.discard(node_id)
        self._kept_until.pop(node_id, None)
        self._awaited.pop(node_id, None)


def _least(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two bounds, of which `None` bounds nothing."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


# What a caller says is of its own blocks. Public ones are everybody's: nobody's hint may
# cost others their hits.


def _session_of(caller: Caller, node: Node) -> _Session | None:
    session = caller.session
    if session is None or node.domain != caller.domain:
        return None
    return caller.domain, session


def _hint(caller: Caller, node: Node) -> int:
    return caller.hint if node.domain == caller.domain else 0


def _is_ephemeral(caller: Caller, node: Node, index: int) -> bool:
    return node.domain == caller.domain and caller.is_ephemeral(index)
