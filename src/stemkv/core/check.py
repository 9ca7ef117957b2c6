"""The truth about pool, tree, cache and scheduler, recomputed from scratch.

Owns O(n) verifications of every counter and invariant the rest keeps incrementally.
Raises `InvariantError` naming the first thing that is wrong; changes nothing. Tests
call it after every operation, operators when in doubt. The numbers in brackets are those
of `docs/invariants.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from stemkv.core.prefix.blocks import BlockPool, BlockState
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.holds import BlockHolds
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.prefix.tree import Node, PrefixTree
from stemkv.core.retention.quota import Quotas
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.request import Request, RequestId, RequestState
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.errors import InvariantError

__all__ = [
    "check_cache",
    "check_holds",
    "check_pool",
    "check_quotas",
    "check_retention",
    "check_scheduler",
    "check_tree",
]


def check_pool(pool: BlockPool) -> None:
    """Each block is in exactly one state and the counts add up (I4, I8)."""
    free = pool.free_block_ids()
    _require(len(set(free)) == len(free), "the free list holds a block twice")
    states = Counter(pool.state(block_id) for block_id in range(pool.num_total))
    in_free = set(free)
    for block_id in range(pool.num_total):
        state = pool.state(block_id)
        _require(
            (state is BlockState.FREE) == (block_id in in_free),
            f"block {block_id} is {state.value} and "
            f"{'in' if block_id in in_free else 'not in'} the free list",
        )
        _require(
            state is not BlockState.PUBLISHED or pool.ref_count(block_id) == 0,
            f"published block {block_id} has private references",
        )
    counts = (pool.ref_count(block_id) for block_id in range(pool.num_total))
    num_shares = sum(count - 1 for count in counts if count)
    _equal("references beyond the first", pool.num_shares, num_shares)
    _equal("free blocks", pool.num_free, states[BlockState.FREE])
    _equal("private blocks", pool.num_private, states[BlockState.PRIVATE])
    _equal("published blocks", pool.num_published, states[BlockState.PUBLISHED])
    total = pool.num_free + pool.num_private + pool.num_published
    _equal("free + private + published", total, pool.num_total)


def check_tree(tree: PrefixTree, block_size: int) -> None:
    """Edges, keys, links, domains and counts of the tree are consistent (I36)."""
    block_bytes = block_size * TOKEN_BYTES
    seen: dict[int, Node] = {}
    num_blocks = num_pinned = 0
    live, retired = tree.roots(), tree.retired_roots()
    for root in live.values():
        _require(not root.is_retired, "a retired root can be matched")
    for root in retired:
        _require(root.is_retired, "a root is kept as retired and is not")
        _require(bool(root.children), "a retired root without blocks is kept")
    stack = [*live.values(), *retired]
    while stack:
        parent = stack.pop()
        for domain, children in parent.children.items():
            _require(len(children) > 0, "an empty set of children is kept")
            _equal("sorted keys", children.sorted_keys(), sorted(children.keys()))
            for key, node in children.items():
                _require(node.id not in seen, f"node {node.id} is reached twice")
                seen[node.id] = node
                _require(node.parent is parent, f"node {node.id} has a wrong parent")
                _require(node.domain == domain, f"node {node.id} has a wrong domain")
                _require(
                    parent.domain in (PUBLIC, domain),
                    f"node {node.id} continues another domain's node",
                )
                _equal(f"key of node {node.id}", key, node.edge[:block_bytes])
                _require(node.num_blocks > 0, f"node {node.id} is empty")
                _equal(
                    f"edge of node {node.id}",
                    len(node.edge),
                    node.num_blocks * block_bytes,
                )
                _require(
                    parent.parent is None or parent.ref_count >= node.ref_count,
                    f"node {node.id} is pinned more often than its parent",
                )
                num_blocks += node.num_blocks
                num_pinned += node.num_blocks if node.ref_count else 0
                stack.append(node)
    _equal("nodes", {node.id for node in tree.nodes()}, set(seen))
    _equal("blocks in the tree", tree.num_blocks, num_blocks)
    _equal("pinned blocks in the tree", tree.num_pinned_blocks, num_pinned)


def check_retention(retention: Retention, tree: PrefixTree) -> None:
    """Exactly the unpinned leaves can go, each from where its marks say (I13, I37)."""
    nodes = {node.id: node for node in tree.nodes()}
    leaves = {n.id: n for n in nodes.values() if n.is_leaf and n.ref_count == 0}
    _equal("evictable nodes", set(retention._stock_of), set(leaves))
    common, stocks = retention._common, retention._stocks
    placed: dict[int, object] = {}
    for stock in (common, *stocks.values()):
        by_tier: dict[str, set[int]] = {}
        for node_id, tier in stock.places.items():
            _require(node_id not in placed, f"leaf {node_id} is placed twice")
            placed[node_id] = stock
            by_tier.setdefault(tier.name, set()).add(node_id)
            _equal(f"tier of leaf {node_id}", tier, retention._tier(node_id))
        for name, among in (
            ("ENDED", stock.ended),
            ("AWAITED", stock.awaited),
            ("KEPT", stock.kept),
        ):
            _equal(f"{name} leaves", set(among._keys), by_tier.get(name, set()))
        for node_id, key in stock.awaited._keys.items():
            _equal("place in the queue", key, (-retention._awaited[node_id], -node_id))
        for node_id, key in stock.kept._keys.items():
            _equal("time to keep", key, (retention._kept_until[node_id], -node_id))
    _equal("placed leaves", placed, retention._stock_of)
    for node_id, node in leaves.items():
        own = common if retention.quotas is None else stocks.get(node.domain)
        _require(placed[node_id] is own, f"leaf {node_id} is in another's stock")
    _check_marks(retention, nodes)
    if retention.quotas is not None:
        retained: Counter[Domain] = Counter()
        for node in nodes.values():
            retained[node.domain] += node.num_blocks if node.ref_count == 0 else 0
        check_quotas(retention.quotas, retained)


def check_quotas(quotas: Quotas, retained: Mapping[Domain, int]) -> None:
    """The counts are these, and follow from them; nobody is over its cap (I37)."""
    counts = quotas.retained_by_domain()
    _require(min(counts.values(), default=0) >= 0, "a domain retains less than nothing")
    _equal(
        "retained blocks",
        {domain: num_blocks for domain, num_blocks in counts.items() if num_blocks},
        {domain: num_blocks for domain, num_blocks in retained.items() if num_blocks},
    )
    above = {
        domain: num_blocks - quotas.config.of(domain).floor_blocks
        for domain, num_blocks in counts.items()
        if domain != PUBLIC and num_blocks > quotas.config.of(domain).floor_blocks
    }
    _equal("lendable blocks", quotas.num_lendable_blocks, sum(above.values()))
    for domain, excess in above.items():
        entry = (-excess / quotas.config.of(domain).weight, quotas._numbers[domain])
        _require(entry in quotas._heap, f"{domain} is above its floor and cannot give")
    for domain in counts:
        _equal(f"blocks of {domain} over its cap", quotas.over_cap(domain), 0)


def check_cache(cache: PrefixCache, leases: Iterable[Lease]) -> None:
    """Pool, tree and `leases`, which must be all that are live, agree (I4, I8, I35)."""
    block_size = cache.config.block_size
    check_pool(cache.pool)
    check_tree(cache.tree, block_size)
    if isinstance(cache.keeper, Retention):
        check_retention(cache.keeper, cache.tree)
    _check_public(cache)
    in_tree: Counter[int] = Counter()
    for node in cache.tree.nodes():
        in_tree.update(node.block_ids)
    _require(not in_tree or max(in_tree.values()) == 1, "a block is in two nodes")
    for block_id in in_tree:
        _require(
            cache.pool.state(block_id) is BlockState.PUBLISHED,
            f"block {block_id} is in the tree but not published",
        )
    _equal("published blocks", cache.pool.num_published, len(in_tree))

    pins: Counter[int] = Counter()
    private: Counter[int] = Counter()
    for lease in leases:
        _require(not lease.is_released, "a released lease is still in use")
        _check_lease_path(lease)
        _check_lease_root(cache, lease)
        private.update(lease.table.ids(lease.num_published_blocks))
        for pinned in (lease.node, lease.copy_source):
            if pinned is not None:
                pins.update(node.id for node in pinned.path())
    for node in cache.tree.nodes():
        _equal(f"leases on node {node.id}", node.ref_count, pins[node.id])
        _require(
            node.ref_count > 0 or not node.root().is_retired,
            f"node {node.id} is retired, held by no lease and not freed",
        )
    for block_id in range(cache.pool.num_total):
        _equal(
            f"references to block {block_id} (a lost lease shows here)",
            cache.pool.ref_count(block_id),
            private[block_id],
        )
    usage = cache.usage()
    total = usage.num_free_blocks + usage.num_active_blocks + usage.num_cached_blocks
    _equal("free + active + cached", total, usage.num_total_blocks)
    _require(usage.peak_active_blocks >= usage.num_active_blocks, "peak is too low")


def check_holds(holds: BlockHolds, held: Set[int]) -> None:
    """Tree and retention agree with what another pool says is held: `held` (I4, I8)."""
    tree = holds.tree
    check_tree(tree, tree.block_size)
    if isinstance(holds.residency.keeper, Retention):
        check_retention(holds.residency.keeper, tree)
    node_of = {each: node for node in tree.nodes() for each in node.block_ids}
    _equal("blocks in nodes", sum(n.num_blocks for n in tree.nodes()), len(node_of))
    _equal("nodes of blocks", holds._node_of, node_of)
    _equal("held blocks", holds._held, set(held) & set(node_of))
    needed = {
        step.id: step for block_id in holds._held for step in node_of[block_id].path()
    }
    _equal("pinned nodes", {n.id for n in tree.nodes() if n.ref_count}, set(needed))
    for node in needed.values():
        is_last = not any(
            child.id in needed for kind in node.children.values() for child in kind
        )
        _require(
            not is_last or node.block_ids[-1] in holds._held,
            f"node {node.id} pins a tail that nobody holds",
        )


def check_scheduler(scheduler: Scheduler) -> None:
    """Requests, leases, order, fences and cache agree (I7, I9, I19)."""
    requests, lives = scheduler.requests(), scheduler._lives
    running = [r for r in requests if r.state is RequestState.RUNNING]
    waiting = [r for r in requests if r.state is not RequestState.RUNNING]
    _equal("running requests", scheduler.num_running, len(running))
    _equal("waiting requests", scheduler.num_waiting, len(waiting))
    for request in waiting:
        _require(request.lease is None, f"{request.request_id} waits with a lease")
        _equal(f"computed of {request.request_id}", request.num_computed, 0)
    leases = []
    for request in running:
        lease = request.lease
        if lease is None:
            raise InvariantError(f"{request.request_id} runs without a lease")
        leases.append(lease)
        num_slots = len(lease.table) * scheduler.cache.config.block_size
        _require(
            request.num_computed <= min(num_slots, request.num_tokens),
            f"{request.request_id} has more KV than slots or tokens",
        )
        _require(
            lease.num_published_blocks * scheduler.cache.config.block_size
            <= max(request.num_computed, lease.num_matched_tokens),
            f"{request.request_id} published what it has not computed",
        )
        _require(
            request.counts.reused <= request.num_prompt_tokens - 1,
            f"{request.request_id} reuses its whole prompt",
        )
        _check_tokens(request.tokens, lease)
        _check_fence(request, lease)
    _check_epochs(scheduler)
    _check_queue(scheduler, waiting, running)
    coasting = [r for r in running if r.is_coasting]
    stepping = sorted(
        (r for r in running if not r.is_coasting), key=lambda r: r.order_key
    )
    _equal("requests that coast", scheduler.num_coasting, len(coasting))
    _require(stepping == lives.running.stepping, "who steps is not who does not coast")
    limit = scheduler.config.max_num_running
    _require(len(running) <= limit, f"{len(running)} run, at most {limit} may")
    check_cache(scheduler.cache, leases)


def _check_queue(
    scheduler: Scheduler, waiting: list[Request], running: list[Request]
) -> None:
    """What waits is known to order, index and backlog; holds have live leaders."""
    lives, service = scheduler._lives, scheduler.service
    matches = lives.line.matches
    matches.check()
    _equal("requests whose matches are kept", len(matches), len(waiting))
    pending = set(matches.take_moved())
    for request_id in pending:  # put back: asking must not change what follows
        matches._moved[request_id] = None
    size = scheduler.cache.config.block_size
    for request in waiting:
        if request.request_id not in pending:
            _equal(
                f"cached of {request.request_id}",
                request.num_cached,
                matches.num_blocks(request.request_id) * size,
            )
    unfinished = {r.request_id: r for r in running if r.is_unfinished}
    _require(unfinished == lives.running.prefills, "unfinished prefills are not known")
    queued = [*waiting, *unfinished.values()]
    if not pending:
        backlog = sum(r.num_tokens - r.num_ready for r in queued)
        _equal("backlog of all", service.backlog, backlog)
    _equal(
        "backlog of tenants",
        sum(s.backlog for s in service.tenants.values()),
        service.backlog,
    )
    _equal(
        "queued of tenants",
        sum(s.num_queued for s in service.tenants.values()),
        len(queued),
    )
    _equal(
        "in flight of tenants",
        sum(s.num_in_flight for s in service.tenants.values()),
        len(waiting) + len(running),
    )
    for request_id, hold in lives.followers.holds.items():
        _require(
            hold.leader.request_id in unfinished,
            f"{request_id} is held for {hold.leader.request_id}, whose prefill is over",
        )
        _require(
            hold.request.state is not RequestState.RUNNING,
            f"{request_id} runs and is held",
        )


def _check_marks(retention: Retention, nodes: Mapping[int, Node]) -> None:
    """Nothing is noted of a node that is gone, or said by who may not say it."""
    for name, marked in (
        ("a session", retention._session_of),
        ("one use", retention._ephemeral),
        ("an ended session", retention._ended),
        ("a time to keep it", retention._kept_until),
        ("a place in the queue", retention._awaited),
    ):
        gone = sorted(set(marked) - set(nodes))
        _require(not gone, f"{name} is noted of nodes {gone}, which are gone")
    by_session: dict[tuple[Domain, str], set[int]] = {}
    for node_id, session in retention._session_of.items():
        by_session.setdefault(session, set()).add(node_id)
        _equal(f"domain of node {node_id}", nodes[node_id].domain, session[0])
    _equal("nodes by session", retention._nodes_of, by_session)
    _require(
        retention._ended <= set(retention._session_of),
        "a node without a session is of one that has ended",
    )
    for node_id in retention._ephemeral:
        _require(nodes[node_id].domain != PUBLIC, f"public node {node_id} is used once")


def _check_public(cache: PrefixCache) -> None:
    """No more is public than was budgeted (I37)."""
    budget = cache.keeper.public_budget
    if budget is None:
        return
    num_public = sum(
        node.num_blocks
        for node in cache.tree.nodes()
        if node.domain == PUBLIC and not node.root().is_retired
    )
    _require(num_public <= budget, f"{num_public} blocks are public, budget {budget}")


def _check_lease_path(lease: Lease) -> None:
    """The published part of a table is exactly the path of the lease's node."""
    if lease.node is None:
        _equal("published blocks of an unsharable lease", lease.num_published_blocks, 0)
        return
    path = [block_id for node in lease.node.path() for block_id in node.block_ids]
    table = list(lease.table.ids(0, lease.num_published_blocks))
    _equal("published part of a block table", table, path)


def _check_tokens(tokens: bytes, lease: Lease) -> None:
    """The path of a lease spells the leading tokens of its request (I19)."""
    if lease.node is not None:
        spelled = b"".join(node.edge for node in lease.node.path())
        _require(tokens.startswith(spelled), "a table holds KV of other tokens")
        for node in lease.node.path():
            _require(
                node.domain in (PUBLIC, lease.domain),
                "a lease holds another domain's block",
            )


def _check_lease_root(cache: PrefixCache, lease: Lease) -> None:
    """What a lease publishes is where its namespace is matched, or nowhere (I9)."""
    if lease.namespace is None:
        _require(lease.node is None, "a lease without a namespace holds a node")
        return
    if lease.node is None:
        raise InvariantError("a lease with a namespace holds no node")
    root = lease.node.root()
    _require(
        root.is_retired or cache.tree.roots().get(lease.namespace) is root,
        "a lease holds a tree that is neither retired nor its namespace's",
    )


def _check_fence(request: Request, lease: Lease) -> None:
    """A request publishes under its own namespace, and under none once cut off (I9)."""
    if request.namespace is not None:
        _equal(
            f"namespace of {request.request_id}'s lease",
            lease.namespace,
            request.namespace,
        )
    elif lease.node is not None:
        _require(
            lease.is_cut_off or lease.node.root().is_retired,
            f"{request.request_id} shares nothing and could publish",
        )


def _check_epochs(scheduler: Scheduler) -> None:
    """Requests are counted by epoch, and only those of the open one run."""
    lives = scheduler._lives
    open_epoch, num_fences = lives.epochs.opened, lives.epochs.num_fences
    _require(open_epoch <= num_fences, "a fence is lifted that was not set up")
    requests = scheduler.requests()
    by_epoch = Counter(request.epoch for request in requests)
    _equal("requests by epoch", lives.epochs._num_by_epoch, dict(by_epoch))
    for request in requests:
        _require(
            open_epoch <= request.epoch <= num_fences,
            f"{request.request_id} is of epoch {request.epoch}, which is not one of "
            f"{open_epoch} to {num_fences}",
        )
        _require(
            request.epoch == open_epoch or request.state is RequestState.WAITING,
            f"{request.request_id} started before its fence was lifted",
        )
    roots: dict[RequestId, dict[RequestId, Request]] = {}
    for request in requests:
        roots.setdefault(request.spec.request_id, {})[request.request_id] = request
    _equal("samples in flight by id", lives._by_root, roots)


def _equal(what: str, actual: object, expected: object) -> None:
    _require(actual == expected, f"{what}: {actual!r}, should be {expected!r}")


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise InvariantError(message)
