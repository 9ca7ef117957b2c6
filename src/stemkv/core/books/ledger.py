"""The books: what each hit saved, what each retained byte-second cost, why tokens missed.

Owns the lookup record of every request, the accounts of tenants and of prefixes, and
the equations between them (`check`). It watches the cache, and `Scheduler`
tells it of requests; it decides nothing, and nothing it says may reach another tenant: it is the operator's.

Two kinds of account. A tenant's account integrates blocks over time: active ones (held
by a lease) and retained ones (cached, held by nobody). What is public belongs to nobody
in particular and has an account of its own, `PUBLIC_ACCOUNT`. A prefix's account does
the same for one node of the tree, and is credited with the hits on it; what is evicted
is booked where the history remembers its tokens, so that a prefix that comes and goes
has one line. Both kinds add up to the same totals.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stemkv.core.books.account import Account, PrefixAccount
from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import (
    LedgerEntry,
    Miss,
    MissReason,
    Regret,
    Stall,
    StepSavings,
    first,
    without,
)
from stemkv.core.books.history import Booking, History
from stemkv.core.books.share import ShareOfWork
from stemkv.core.books.waits import Waits
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES, end_outside_span
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import LeaseWatcher, Publication
from stemkv.errors import InvariantError

__all__ = [
    "PUBLIC_ACCOUNT",
    "Ledger",
    "StallTotals",
]

# What the operator declared public; no tenant pays for it, and none has an empty name.
PUBLIC_ACCOUNT = ""


@dataclass(slots=True)
class StallTotals:
    """Who held the memory when an admission had to wait, summed over the stalls."""

    num_stalls: int = 0
    active_blocks: int = 0
    shared_blocks: int = 0  # of those, published and on the path of a lease
    cached_blocks: int = 0  # evictable, and still too few
    missing_blocks: int = 0  # by how much admission fell short
    by_account: dict[str, int] = field(default_factory=dict)  # active blocks


class Ledger(LeaseWatcher):
    """Keeps the books of one cache.

    Entries of requests that have ended wait for `take_entries`. Costs O(nodes on the
    path) per request and event. `max_history_blocks` bounds what is remembered for the
    reasons of misses (see `History`); `None` remembers everything. What stays is one
    small account for every tenant there ever was, and what a namespace stands for.
    """

    def __init__(
        self,
        block_size: int,
        cost: CostModel,
        *,
        max_history_blocks: int | None = None,
    ) -> None:
        self.cost = cost
        self.stalls = StallTotals()
        self.block_size = block_size
        self._ended: list[LedgerEntry] = []  # not yet taken
        self._history = History(block_size, max_blocks=max_history_blocks)
        self._accounts: dict[str, Account] = {}
        self._holding: dict[str, None] = {}  # accounts with active blocks
        self._prefixes: dict[int, PrefixAccount] = {}  # by node id, resident
        self._facts: dict[bytes, Mapping[str, object]] = {}  # by namespace
        self._open: dict[str, LedgerEntry] = {}
        self._stalled: dict[str, _OpenStall] = {}  # by request
        self._step = StepSavings()  # since `take_step`
        # What the entries of ended requests add up to.
        self._num_prompt = 0
        self._num_unreached = 0  # of those, not computed before an abort
        self._num_reused = 0
        self._num_computed = 0
        self._num_missed = dict.fromkeys(MissReason, 0)
        self._num_credited = 0  # tokens credited to prefixes, in vain ones included
        self._num_in_vain = 0  # of those, by requests that were restarted
        self._saved_s = 0.0
        self._credited_s = 0.0
        self._in_vain_s = 0.0

    # Questions

    @property
    def misses(self) -> Mapping[MissReason, int]:
        """Tokens missed by requests that have ended, by reason; zeros included."""
        return dict(self._num_missed)

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens that ended requests reused."""
        return self._num_reused

    @property
    def saved_s(self) -> float:
        """Prefill seconds that ended requests were saved."""
        return self._saved_s

    def accounts(self, now: float) -> dict[str, Account]:
        """Return copies of all accounts, with integrals up to `now`."""
        copies = {}
        for name, account in sorted(self._accounts.items()):
            copies[name] = account.copy()
            copies[name].settle(now)
        return copies

    def prefixes(self, nodes: Iterable[Node], now: float) -> dict[bytes, PrefixAccount]:
        """Return the accounts of all runs by digest, with integrals up to `now`.

        A run is what no branch divides in all that is remembered, so it stays the same
        through evictions. The digest is SHA-256 over namespace, domain and all tokens
        up to its end. `nodes` are the resident ones, as `PrefixTree.nodes` gives them.
        """
        resident = []
        for node in nodes:
            account = self._prefixes[node.id].copy()
            account.settle(now)
            resident.append(self._booking(node, account))
        return self._history.accounts(resident)

    def entry(self, request_id: str) -> LedgerEntry | None:
        """Return the entry of a running request; `None` before admission and after."""
        return self._open.get(request_id)

    @property
    def num_stalled(self) -> int:
        """Requests whose admission waits for memory now."""
        return len(self._stalled)

    def is_stalled(self, request_id: str) -> bool:
        """Whether its admission waits for memory."""
        return request_id in self._stalled

    def check(self, nodes: Iterable[Node], now: float) -> None:
        """Raise `InvariantError` unless all sums agree.

        Prefixes and tenants hold the same blocks for the same time; hits credited to
        prefixes are the tokens that requests reused; what requests reused and missed is
        their prompts, and what they missed is what they computed.
        """
        prefixes = self.prefixes(nodes, now).values()
        accounts = self.accounts(now).values()
        open_reused = sum(e.num_reused_tokens for e in self._open.values())
        open_saved = sum(e.saved_s for e in self._open.values())
        equations = [
            (
                "retained block-seconds of prefixes and of tenants",
                sum(p.retained_block_s for p in prefixes),
                sum(a.retained_block_s for a in accounts),
            ),
            (
                "evicted blocks of prefixes and of tenants",
                sum(p.num_evicted_blocks for p in prefixes),
                sum(a.num_evicted_blocks for a in accounts),
            ),
            (
                "tokens credited to prefixes and reused by requests",
                self._num_credited,
                self._num_reused + open_reused + self._num_in_vain,
            ),
            (
                "tokens credited to prefixes, by prefix and in total",
                sum(p.hit_tokens for p in prefixes),
                self._num_credited,
            ),
            (
                "seconds credited to prefixes and saved by requests",
                self._credited_s,
                self._saved_s + open_saved + self._in_vain_s,
            ),
            (
                "seconds credited to prefixes, by prefix and in total",
                sum(p.saved_s(self.cost) for p in prefixes),
                self._credited_s,
            ),
            (
                "prompt tokens and reused + computed + unreached ones",
                self._num_prompt,
                self._num_reused + self._num_computed + self._num_unreached,
            ),
            (
                "computed tokens and misses by reason",
                self._num_computed,
                sum(self._num_missed.values()),
            ),
        ]
        for name, left, right in equations:
            if not math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-6):
                raise InvariantError(
                    f"the ledger does not add up: {name}: {left} and {right}"
                )

    # Identities

    def name(self, namespace: bytes, facts: Mapping[str, object]) -> None:
        """Tell what a namespace stands for, so that a miss can name what differs.

        `facts` are the fields of its `ComputeIdentity`, or what a trace tells of one.
        """
        self._facts[namespace] = facts

    def facts(self, namespace: bytes) -> Mapping[str, object] | None:
        """Return what a namespace stands for; `None` if nobody told."""
        return self._facts.get(namespace)

    # What requests do

    def admitted(
        self,
        request_id: str,
        *,
        tenant: str,
        domain: Domain,
        namespace: bytes | None,
        prompt: bytes,
        path: list[Node],
        copied: tuple[Node, int] | None,
        num_awaitable: int,
        arrival_s: float,
        now: float,
    ) -> None:
        """Book a request's lookup, before it computes or publishes anything.

        `path` are the nodes it reuses as a whole, `copied` the node and how many tokens
        are copied out of its block, `num_awaitable` up to where some running request is
        computing the same tokens for it to see.
        """
        num_prompt = len(prompt) // TOKEN_BYTES
        entry = LedgerEntry(
            request_id=request_id,
            tenant=tenant,
            domain=domain,
            namespace=namespace,
            prefix_digest=None,
            arrival_s=arrival_s,
            admitted_s=now,
            num_prompt_tokens=num_prompt,
            num_reused_tokens=0,
            num_reused_blocks=0,
            num_copied_tokens=0,
            saved_s=0.0,
            misses=[Miss(0, num_prompt, MissReason.UNSHARABLE)],
            reused=[],
            writers={},
            regrets=(),
        )
        self._open[request_id] = entry
        self._end_stall(request_id, now)
        if namespace is None:
            return
        reused = self._credit(entry, path, copied, 0, num_prompt)
        if reused:
            digest = hashlib.sha256(namespace)
            digest.update(prompt[: reused * TOKEN_BYTES])
            entry.prefix_digest = digest.digest()
        self._explain(entry, prompt, reused, num_awaitable, now)

    def resumed(
        self,
        request_id: str,
        *,
        path: list[Node],
        copied: tuple[Node, int] | None,
        num_known: int,
        now: float,
    ) -> None:
        """Book what a preempted request finds beyond `num_known` tokens.

        What it had reused or computed before is recomputed or found again, and counts
        once; what others have computed meanwhile is reused now. A sample that was forked
        has no entry, so only its stall is booked.
        """
        self._end_stall(request_id, now)
        entry = self._open.get(request_id)
        if entry is not None and entry.namespace is not None:
            end = self._credit(entry, path, copied, num_known, entry.num_prompt_tokens)
            entry.misses = without(entry.misses, num_known, end)

    def restarted(self, request_id: str) -> None:
        """Book that a request begins again: what it reused so far was in vain."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._num_in_vain += entry.num_reused_tokens
            self._in_vain_s += entry.saved_s

    def stalled(
        self,
        request_id: str,
        *,
        tenant: str,
        num_missing: int,
        num_active: int,
        num_shared: int,
        num_cached: int,
        holders: tuple[tuple[str, int], ...],
        now: float,
    ) -> None:
        """Book that admission has to wait for memory, once for each stall.

        `holders` are running requests and their blocks, those that hold most.
        """
        retained = [
            (name, account.num_cached_blocks)
            for name, account in self._accounts.items()
            if account.num_cached_blocks
        ]
        retained.sort(key=lambda pair: (-pair[1], pair[0]))
        self._stalled[request_id] = _OpenStall(
            tenant, now, num_missing, holders, tuple(retained)
        )
        account = self._account(tenant, now)
        account.num_stalls += 1
        stalls = self.stalls
        stalls.num_stalls += 1
        stalls.active_blocks += num_active
        stalls.shared_blocks += num_shared
        stalls.cached_blocks += num_cached
        stalls.missing_blocks += num_missing
        for name in self._holding:
            held = stalls.by_account.get(name, 0)
            num_active = self._accounts[name].num_active_blocks
            stalls.by_account[name] = held + num_active

    def left_blocks(self, request_id: str, num_blocks: int) -> None:
        """Book blocks that a request published."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.num_retained_blocks += num_blocks

    def ended(
        self,
        request_id: str,
        *,
        reason: str,
        num_reused: int,
        num_computed: int,
        num_recomputed: int,
        num_output: int,
        num_preemptions: int,
        share: ShareOfWork | None = None,
        waits: Waits | None = None,
        now: float,
    ) -> None:
        """Close a request's entry; one that was never admitted has none."""
        self._end_stall(request_id, now)
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        if num_reused != entry.num_reused_tokens:
            raise InvariantError(
                f"request {request_id} reused {num_reused} tokens, the ledger has "
                f"{entry.num_reused_tokens}"
            )
        num_missed = sum(miss.end - miss.start for miss in entry.misses)
        if num_output and num_computed != num_missed:
            raise InvariantError(
                f"request {request_id} computed {num_computed} tokens of its prompt, "
                f"the ledger has {num_missed} that it missed"
            )
        # One that was aborted has not computed all it missed.
        entry.misses = first(entry.misses, num_computed)
        entry.ended_s = now
        entry.finish_reason = reason
        entry.num_computed_tokens = num_computed
        entry.num_recomputed_tokens = num_recomputed
        entry.num_output_tokens = num_output
        entry.num_preemptions = num_preemptions
        entry.share = share
        if waits is not None:
            entry.waits = tuple(waits.spans)
            entry.wait_s = dict(waits.seconds)
        self._num_prompt += entry.num_prompt_tokens
        self._num_unreached += num_missed - num_computed
        self._num_reused += num_reused
        self._num_computed += num_computed
        self._saved_s += entry.saved_s
        for miss in entry.misses:
            self._num_missed[miss.reason] += miss.end - miss.start
        self._ended.append(entry)

    def take_entries(self) -> tuple[LedgerEntry, ...]:
        """Return and forget the entries of requests that ended since the last call."""
        entries = tuple(self._ended)
        self._ended.clear()
        return entries

    def take_step(self) -> StepSavings:
        """Return and forget what hits have saved since the last call."""
        savings, self._step = self._step, StepSavings()
        return savings

    # What blocks do

    def allocated(self, owner: str, num_blocks: int, now: float) -> None:
        """Book blocks that became private to a lease of the owner."""
        self._move(owner, now, active=num_blocks)

    def freed(self, owner: str, num_blocks: int, now: float) -> None:
        """Book private blocks that nobody holds any more."""
        self._move(owner, now, active=-num_blocks)

    def added(self, node: Node, publication: Publication) -> None:
        """Book that private blocks are in a new node now; a lease pins it."""
        self._published(node, publication)
        self._prefixes[node.id] = PrefixAccount(
            domain=node.domain,
            start=publication.start * self.block_size,
            end=publication.stop * self.block_size,
            num_blocks=len(publication.block_ids),
            is_pinned=True,
            since_s=publication.now,
        )

    def extended(self, node: Node, publication: Publication) -> None:
        """Book that a node was lengthened by private blocks of its lease."""
        self._published(node, publication)
        num_blocks = len(publication.block_ids)
        account = self._prefixes[node.id]
        account.settle(publication.now)
        account.num_blocks += num_blocks
        account.end += num_blocks * self.block_size

    def pinned(self, node: Node, now: float) -> None:
        """Book that a lease begins to hold a node that none held."""
        self._change(node, now, is_pinned=True)

    def unpinned(self, node: Node, tick: int, now: float) -> None:
        """Book that no lease holds a node any more: from now on it is retained."""
        self._change(node, now, is_pinned=False)

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """Divide an account as its node was divided."""
        account = self._prefixes[lower.id]
        account.settle(now)
        cut = account.start + upper.num_blocks * self.block_size
        part = account.split_off(cut)
        self._prefixes[upper.id] = part

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """Join two accounts as their nodes were joined."""
        other, account = self._prefixes.pop(upper.id), self._prefixes[lower.id]
        other.settle(now)
        account.settle(now)
        account.num_blocks += other.num_blocks
        account.add(other)

    def trimming(
        self, node: Node, num_kept: int, reason: DropReason, now: float
    ) -> None:
        """Book that a node is about to lose all but its first `num_kept` blocks."""
        num_dropped = node.num_blocks - num_kept
        name = account_of(node.domain, node.owner)
        self._move(name, now, cached=-num_dropped)
        account = self._prefixes.pop(node.id)
        account.settle(now)
        if num_kept:
            cut = account.start + num_kept * self.block_size
            self._prefixes[node.id] = account.split_off(cut)
        if reason is DropReason.EVICTED:
            account.num_evicted_blocks += num_dropped
            self._accounts[name].num_evicted_blocks += num_dropped
        elif reason is DropReason.REFUSED:
            self._accounts[name].num_refused_blocks += num_dropped
        booking = self._booking(node, account)
        if reason is not DropReason.RETIRED:
            # What must not be used any more has no time at which it left: to ask for it
            # again is no regret.
            self._history.left(
                booking.namespace,
                node.domain,
                booking.tokens,
                booking.start,
                booking.stop,
                now,
                is_refused=reason is DropReason.REFUSED,
            )
        self._history.book(booking)

    # Private

    def _published(self, node: Node, publication: Publication) -> None:
        num_blocks, now = len(publication.block_ids), publication.now
        name = account_of(node.domain, node.owner)
        self._move(publication.caller.owner, now, active=-num_blocks)
        self._move(name, now, active=num_blocks)
        self._accounts[name].num_published_blocks += num_blocks
        self._history.published(
            publication.namespace,
            node.domain,
            publication.tokens,
            publication.start,
            publication.stop,
        )

    def _credit(
        self,
        entry: LedgerEntry,
        path: list[Node],
        copied: tuple[Node, int] | None,
        start: int,
        limit: int,
    ) -> int:
        """Credit the nodes for tokens `[start, …)` of the prompt; return up to where.

        At most `limit` tokens: a resumed request may find its own output as well.
        """
        found = [(node, node.num_blocks * self.block_size, False) for node in path]
        if copied is not None:
            found.append((copied[0], copied[1], True))
        position = 0
        for node, num_tokens, is_copied in found:
            low, high = max(position, start), min(position + num_tokens, limit)
            position += num_tokens
            if low >= high:
                continue
            seconds = self.cost.prefill_seconds(low, high)
            account = self._prefixes[node.id]
            account.hit(low, high)
            entry.saved_s += seconds
            self._step.num_tokens += high - low
            self._step.seconds += seconds
            self._step.joules += self.cost.prefill_joules(low, high)
            entry.num_reused_tokens += high - low
            if entry.reused and entry.reused[-1][1] == low:
                low_before, _ = entry.reused.pop()
                entry.reused.append((low_before, high))
            else:
                entry.reused.append((low, high))
            if is_copied:
                entry.num_copied_tokens += high - low
            else:
                entry.num_reused_blocks += (high - low) // self.block_size
            # Of a public run too: who brought it in, not whose account it is on.
            entry.writers[node.owner] = entry.writers.get(node.owner, 0) + high - low
            self._num_credited += high - low
            self._credited_s += seconds
        return max(start, min(position, limit))

    def _explain(
        self,
        entry: LedgerEntry,
        prompt: bytes,
        reused: int,
        num_awaitable: int,
        now: float,
    ) -> None:
        """Find a reason for each token of the prompt behind the reused ones."""
        size = self.block_size
        num_prompt = entry.num_prompt_tokens
        misses: list[Miss] = []
        regrets: list[Regret] = []
        # Of a prompt of whole blocks the last token is computed in any case, and with
        # it its block, unless the leading tokens of that are copied; and a span that
        # this cuts too short to tell.
        whole_end = end_outside_span(prompt, num_prompt - 1) // size * size
        position = reused
        awaitable = min(num_awaitable, whole_end)
        if position < awaitable:
            misses.append(Miss(position, awaitable, MissReason.NOT_YET_COMPUTED))
            position = awaitable
        if position < whole_end:
            assert entry.namespace is not None, "what has no namespace is not explained"
            first = position // size
            runs = self._history.past(
                entry.namespace, entry.domain, prompt, first, whole_end // size
            )
            end = first * size
            for run in runs:
                start, end = max(position, end), end + run.num_blocks * size
                if start >= end:
                    continue
                past = run.past
                names: tuple[str, ...] = ()
                if past.is_refused:
                    reason = MissReason.NOT_RETAINED
                elif past.left_s is not None:
                    reason = MissReason.EVICTED
                    if math.isfinite(past.left_s):
                        regrets.append(Regret(end - start, now - past.left_s))
                elif past.is_other_domain:
                    reason = MissReason.OTHER_DOMAIN
                elif past.other_namespace is not None:
                    reason = MissReason.IDENTITY_DIFFERS
                    names = self._differing(entry.namespace, past.other_namespace)
                else:
                    reason = MissReason.NEVER_SEEN
                misses.append(Miss(start, end, reason, names))
        tail = max(reused, whole_end)
        if tail < num_prompt:
            misses.append(Miss(tail, num_prompt, MissReason.BELOW_BLOCK))
        entry.misses = misses
        entry.regrets = tuple(regrets)

    def _differing(self, one: bytes, other: bytes) -> tuple[str, ...]:
        left, right = self._facts.get(one), self._facts.get(other)
        if left is None or right is None:
            return ()
        return tuple(
            name
            for name in dict.fromkeys((*left, *right))
            if name not in left or name not in right or left[name] != right[name]
        )

    def _end_stall(self, request_id: str, now: float) -> None:
        stall = self._stalled.pop(request_id, None)
        if stall is None or stall.since_s == now:
            return
        self._account(stall.tenant, now).stall_s += now - stall.since_s
        entry = self._open.get(request_id)
        if entry is not None:
            entry.stall_s += now - stall.since_s
            entry.stalls += (
                Stall(
                    start_s=stall.since_s,
                    end_s=now,
                    num_missing_blocks=stall.num_missing,
                    active=stall.holders,
                    retained=stall.retained,
                ),
            )

    def _account(self, name: str, now: float) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(since_s=now)
        return account

    def _move(self, name: str, now: float, *, active: int = 0, cached: int = 0) -> None:
        account = self._account(name, now)
        account.settle(now)
        account.num_active_blocks += active
        account.num_cached_blocks += cached
        if account.num_active_blocks:
            self._holding[name] = None
        else:
            self._holding.pop(name, None)

    def _change(self, node: Node, now: float, *, is_pinned: bool) -> None:
        account = self._prefixes[node.id]
        account.settle(now)
        account.is_pinned = is_pinned
        num_blocks = node.num_blocks if is_pinned else -node.num_blocks
        name = account_of(node.domain, node.owner)
        self._move(name, now, active=num_blocks, cached=-num_blocks)

    def _booking(self, node: Node, account: PrefixAccount) -> Booking:
        """Return the account and where its run lies, for the history."""
        return Booking(
            namespace=node.root().namespace,
            tokens=b"".join([step.edge for step in node.path()]),
            start=account.start // self.block_size,
            stop=account.end // self.block_size,
            account=account,
        )


@dataclass(frozen=True, slots=True)
class _OpenStall:
    tenant: str
    since_s: float
    num_missing: int
    holders: tuple[tuple[str, int], ...]
    retained: tuple[tuple[str, int], ...]


def account_of(domain: Domain, owner: str) -> str:
    """Return whose account a block is on: nobody's in particular if it is public."""
    return PUBLIC_ACCOUNT if domain == PUBLIC else owner
